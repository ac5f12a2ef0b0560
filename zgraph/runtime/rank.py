"""A rank of a run: where it stands among the others, and what it runs with. The parts of a run time know it by this."""

from __future__ import annotations

import abc
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zgraph.build.step_program import Entry
from zgraph.build.stored_programs import kept_programs
from zgraph.build.update_program import away_bytes, shares_of
from zgraph.errors import ModelError, OffloadError
from zgraph.offload.run_transfers import Tiers
from zgraph.parameters.sharding import Shards, still_unset
from zgraph.passes.analysis.costs import Costs
from zgraph.plan.plan import Plan
from zgraph.program.program import DATA_DIMS, ParamSpec
from zgraph.ranks import progress
from zgraph.ranks.agreement import Agreement
from zgraph.ranks.foreseen_actions import UPDATE
from zgraph.runtime.memory import StepMemory
from zgraph.runtime.node_groups import node_groups
from zgraph.runtime.prefetch import FirstGathers
from zgraph.runtime.same_on_all_ranks import Votes
from zgraph.runtime.step_votes import Acts, gradients
from zgraph.runtime.timings import Clock
from zgraph.update.hyperparameters import UPDATE_HINT, Numbers, compare_updates
from zgraph.update.owned_parameters import Held
from zgraph.update.resume import Last


class Recorder(Protocol):
    """Who is told what a run time does, and writes it down."""

    def compiled(self) -> None: ...

    def stepped(self) -> None: ...

    def of(self, runtime: Any) -> Recorder: ...


class Saver(Protocol):
    """Who saves a run time's checkpoints, and knows the `last` one."""

    last: Last | None

    def wait(self) -> None:
        """Let the save end that is on its way; raise what it raised."""

    def load_last(self, runtime: Any) -> dict[str, Any]:
        """Load the last checkpoint; returns what the user added to it."""


@dataclass(frozen=True)
class RankContext:
    """Where a rank stands, and what it schedules from: the same for all that one compiled model has."""

    sizes: dict[
        str, int
    ]  # of the mesh: of the ranks that run the same programs (of one stage, where there is a pipeline)
    mesh: DeviceMesh | None  # of these ranks; None in one process without a process group
    device: torch.device
    agreement: Agreement  # of these ranks
    everyone: Agreement  # of the ranks of all stages
    costs: Costs
    tiers: Tiers
    held: Held | None = None  # what this rank of a pipeline holds of the model; None without one


def opened_tiers(
    model: nn.Module,
    plan: Plan,
    specs: dict[str, ParamSpec],
    device: torch.device,
    agreement: Agreement,
    held: Held | None = None,
) -> Tiers:
    """Open what the plan offloads to, on all ranks or on none. Raises `OffloadError` on every rank if one has no room for it. `held` is
    what this rank of a pipeline holds."""
    if not plan.offload.tiers():
        return Tiers(plan.offload, device, 0)

    def refused(rank: int, said: str) -> OffloadError:
        return OffloadError(f"rank {rank} can't offload", where=plan.offload.folder(), why=said)

    return agreement.together(
        "the disk", lambda: Tiers(plan.offload, device, away_bytes(model, specs, plan, held)), refused
    )


class Rank(abc.ABC):
    """One rank with one compiled module."""

    updater: Any  # who runs its updates
    nonfinite: Any  # who looks for values that are not finite; None where the plan ignores them
    clock: Clock
    first_gathers: FirstGathers
    saver: Saver  # (given by who makes the run time)
    forward_function: Callable[..., Any]  # the module's own
    forwards_replaced = 0  # how often it has become another one

    def __init__(self, module: nn.Module, plan: Plan, shards: Shards, context: RankContext) -> None:
        self.module = module
        self.plan = plan
        self.shards = shards
        self.context = context
        self.sizes, self.mesh, self.device = context.sizes, context.mesh, context.device
        self.agreement, self.everyone = context.agreement, context.everyone
        self.costs, self.tiers, self.held = context.costs, context.tiers, context.held
        self.groups = dict(self.tiers.keys)
        if self.mesh is not None:
            self.groups |= {d: str(self.mesh.get_group(d).group_name) for d in self.mesh.mesh_dim_names or ()}
        self.nodes = node_groups(self.mesh, plan.wire.secondary) if self.mesh is not None else {}
        self.groups |= {name: str(group.group_name) for name, group in self.nodes.items()}
        self.places = {  # this rank's position in each mesh dimension, as programs take it
            d: torch.tensor(self.mesh.get_local_rank(d), device=self.device)
            for d in self.sizes
            if self.mesh is not None
        }
        self.shares = shares_of(
            plan
        )  # of the optimizer's states that may be offloaded: one, once the first program has chosen
        self.entries: dict[str, Entry] = {}
        self.memory = StepMemory(self.device)
        self.votes = Votes(plan, self.mesh, self.sizes, self.device, self.agreement, self.everyone)
        self.acts = Acts(self.agreement, updates=plan.optimizer is not None)
        self.recorder: Recorder | None = None
        self.keeper = kept_programs(module, self.device)  # where programs are kept for other processes
        self.steps = 0  # steps that it has run

    def changed_here(self, *, again: bool = False) -> int:
        """Whether this rank has changed weights that something was made of: 1, or 2 where it is too late to make that anew. (Will it be asked
        `again` at once?)"""
        return 0

    def settle_changes(self, worst: int) -> None:  # noqa: B027 (a pipeline keeps nothing between steps)
        """Make anew on all ranks what one of them has changed weights of, by the `worst` that any said. Raises `StepError` where it is too late."""

    @abc.abstractmethod
    def weights_changed(self, names: Sequence[str]) -> None:
        """Forget what was made of these parameters' weights: they were changed."""

    @abc.abstractmethod
    def reduce_leftovers(self) -> None:
        """Reduce the gradients that still wait for it. All ranks must call it."""

    @abc.abstractmethod
    def settle_gradients(self) -> None:
        """Put gradients that autograd has added up in memory of its own where they belong."""

    def refuse_unset(self) -> None:
        """Raise `ModelError` if the model has values yet to be loaded."""
        if not self.shards.pending:
            return
        missing = list(still_unset(self.shards))
        if missing:
            raise ModelError(
                f"{len(missing)} tensors of the model have no values yet: {', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}",
                why="the model was built on the meta device and its modules have no initialisation for them",
                hint="load a checkpoint first, or give their modules a reset_parameters method",
            )
        self.shards.pending.clear()

    def tell_place(self, micro_batch: int) -> None:
        """Write down, for who watches, that a micro-batch of the next step begins."""
        here = progress.HERE
        here.caller = threading.get_ident()
        if self.everyone.ranks:
            here.micro_batch = micro_batch
            here.step = (self.updater.calls if self.plan.optimizer is not None else self.steps) + 1

    @property
    def once(self) -> bool:
        """Whether gradients of micro-batches are added up, and reduced once a step."""
        return False

    def data_ranks(self) -> int:
        """How many ranks see different rows."""
        return math.prod(self.sizes.get(dim, 1) for dim in DATA_DIMS)

    def told(self) -> list[str]:
        """Lines of the report about what this rank is among others."""
        return []

    def stage_position(self) -> int:
        """This rank's position along "pp"; 0 without a pipeline."""
        return 0

    def process_groups(self) -> list[Any]:
        """Those that steps communicate in."""
        return [*map(self.mesh.get_group, self.sizes), *self.nodes.values()] if self.mesh is not None else []

    def relax(self) -> None:
        """Let ranks wait for each other as long as they would without the plan's timeout, until their next vote."""
        for voters in (self.agreement, self.everyone):
            voters.relax()

    def holds(self, name: str) -> bool:
        """Whether this rank stores the parameter (and not other stages' ranks alone)."""
        return self.held is None or name in self.held.own

    def counts(self, name: str) -> bool:
        """Whether this rank stores the parameter and counts it (in the norm of gradients, in checkpoints), if other stages store it too."""
        return self.holds(name) and (self.held is None or name not in self.held.uncounted)

    def has_buffer(self, name: str) -> bool:
        """Whether this buffer, by its first name, is here as the model's forward changes it."""
        return True

    def whole_gradient(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        """A parameter's gradient with what other stages have of it. All ranks must call it."""
        return grad

    def agree_on_update(self, names: Sequence[str], numbers: Numbers) -> None:
        """Let the ranks compare of which parameters they are about to use the gradients, and the numbers that their optimizers have now."""
        told = gradients(names)
        self.agreement.vote(
            UPDATE,
            f"{told}; {numbers.ballot()}",
            lambda: (told, numbers),
            compare_updates,
            hint=UPDATE_HINT,
        )
