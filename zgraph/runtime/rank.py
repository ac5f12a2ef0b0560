"""Defines a rank of a run, its position among the others and what it runs with: what the parts of a run time know of
it.
"""

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

from zgraph.build.offloaded_states import shares_of
from zgraph.build.step_program import Entry
from zgraph.build.stored_programs import stored_programs
from zgraph.build.update_program import away_bytes
from zgraph.build.wire_formats import WireChoice
from zgraph.errors import ModelError, OffloadError
from zgraph.offload.run_transfers import Tiers
from zgraph.parameters.meta_init import still_unset
from zgraph.parameters.shards import Shards
from zgraph.passes.analysis.costs import Costs
from zgraph.plan.plan import Plan
from zgraph.program.program import DATA_DIMS, ParamSpec
from zgraph.ranks import progress
from zgraph.ranks.agreement import Agreement
from zgraph.ranks.foreseen_actions import UPDATE
from zgraph.runtime.memory import StepMemory
from zgraph.runtime.needed_votes import NeededVotes, gradients
from zgraph.runtime.node_groups import node_groups
from zgraph.runtime.prefetch import FirstGathers
from zgraph.runtime.rank_votes import Votes
from zgraph.runtime.timings import Clock
from zgraph.update.hyperparameters import UPDATE_HINT, Hyperparameters, compare_updates
from zgraph.update.owned_parameters import OwnedParameters
from zgraph.update.resume import Last


class Recorder(Protocol):
    """What is told of a run time's events and records them."""

    def compiled(self) -> None: ...

    def stepped(self) -> None: ...

    def of(self, runtime: Any) -> Recorder: ...


class Saver(Protocol):
    """What saves a run time's checkpoints. `last` is the last one."""

    last: Last | None

    def wait(self) -> None:
        """Wait for the save in progress. Raises what it raised."""

    def load_last(self, runtime: Any) -> dict[str, Any]:
        """Load the last checkpoint, and return what the user added to it."""


@dataclass(frozen=True)
class RankContext:
    """A rank's position and what it schedules from, the same for all parts of one compiled model."""

    # of the mesh of the ranks that run the same programs (in a pipeline: of one stage), by dimension
    sizes: dict[str, int]
    mesh: DeviceMesh | None  # of these ranks; None in one process without a process group
    device: torch.device  # the device that the rank computes on
    agreement: Agreement  # of these ranks
    everyone: Agreement  # of the ranks of all stages
    costs: Costs  # what operators and transfers cost, for schedules
    tiers: Tiers  # where offloaded values are stored
    held: OwnedParameters | None = None  # what this rank of a pipeline stores of the model; None without a pipeline


def opened_tiers(
    model: nn.Module,
    plan: Plan,
    specs: dict[str, ParamSpec],
    device: torch.device,
    agreement: Agreement,
    held: OwnedParameters | None = None,
) -> Tiers:
    """Open the tiers that the plan offloads to, on all ranks or on none. Raises `OffloadError` on every rank if one has
    no room for what is offloaded. `held` is what this rank of a pipeline stores.
    """
    if not plan.offload.tiers():
        return Tiers(plan.offload, device, 0)

    def refused(rank: int, said: str) -> OffloadError:
        return OffloadError(f"rank {rank} can't offload", where=plan.offload.folder(), why=said)

    return agreement.together(
        "the disk", lambda: Tiers(plan.offload, device, away_bytes(model, specs, plan, held)), refused
    )


class Rank(abc.ABC):
    """One rank with one compiled module."""

    updater: Any  # runs its updates
    nonfinite: Any  # watches for values that are not finite; None if the plan ignores them
    clock: Clock
    first_gathers: FirstGathers
    saver: Saver  # (set by whatever makes the run time)
    forward_function: Callable[..., Any]  # the module's own forward
    forwards_replaced = 0  # how often `forward_function` was replaced

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
        # of the optimizer's states that may be offloaded: a single one, once the first program has chosen it
        self.shares = shares_of(plan)
        self.wire = WireChoice()
        self.entries: dict[str, Entry] = {}
        self.memory = StepMemory(self.device)
        self.votes = Votes(plan, self.mesh, self.sizes, self.device, self.agreement, self.everyone)
        self.needed_votes = NeededVotes(self.agreement, updates=plan.optimizer is not None)
        self.recorder: Recorder | None = None
        self.keeper = stored_programs(module, self.device)  # where programs are kept for other processes
        self.steps = 0  # steps run so far

    def changed_here(self, *, again: bool = False) -> int:
        """Return whether weights that something was computed from have changed on this rank: 0 if not, 1 if so, 2 if it
        is too late to compute that again. `again`: it will be asked again at once.
        """
        return 0

    def settle_changes(self, worst: int) -> None:  # noqa: B027 (a pipeline keeps nothing between steps)
        """Drop, on all ranks, what was computed from weights that changed on one of them; `worst` is the largest answer
        of any rank. Raises `StepError` if it is too late.
        """

    @abc.abstractmethod
    def weights_changed(self, names: Sequence[str]) -> None:
        """Drop what was computed from these parameters' weights: they were changed."""

    @abc.abstractmethod
    def reduce_leftovers(self) -> None:
        """Reduce the pending gradients. All ranks must call it."""

    @abc.abstractmethod
    def settle_gradients(self) -> None:
        """Move gradients that autograd has accumulated in memory of its own to where they are stored."""

    def refuse_unset(self) -> None:
        """Raise `ModelError` if tensors of the model have no values yet."""
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
        """Record, for the heartbeat, that a micro-batch of the next step begins."""
        here = progress.HERE
        here.caller = threading.get_ident()
        if self.everyone.ranks:
            here.micro_batch = micro_batch
            here.step = (self.updater.calls if self.plan.optimizer is not None else self.steps) + 1

    @property
    def once(self) -> bool:
        """Whether gradients are accumulated over micro-batches, and reduced once per step."""
        return False

    def data_ranks(self) -> int:
        """Return the number of ranks that see different rows."""
        return math.prod(self.sizes.get(dim, 1) for dim in DATA_DIMS)

    def told(self) -> list[str]:
        """Return the report's lines on this rank's position among the others."""
        return []

    def stage_position(self) -> int:
        """Return this rank's position along "pp"; 0 without a pipeline."""
        return 0

    def process_groups(self) -> list[Any]:
        """Return the process groups that steps communicate in."""
        return [*map(self.mesh.get_group, self.sizes), *self.nodes.values()] if self.mesh is not None else []

    def relax(self) -> None:
        """Lift the plan's timeout for waits between ranks, until their next vote."""
        for voters in (self.agreement, self.everyone):
            voters.relax()

    def holds(self, name: str) -> bool:
        """Return whether this rank stores the parameter; in a pipeline, some are stored by other stages' ranks only."""
        return self.held is None or name in self.held.own

    def counts(self, name: str) -> bool:
        """Return whether this rank stores the parameter and counts it in norms of gradients and in checkpoints: if
        several stages store one, a single one counts it.
        """
        return self.holds(name) and (self.held is None or name not in self.held.uncounted)

    def has_buffer(self, name: str) -> bool:
        """Return whether this rank has the current value of a buffer, given by its first name."""
        return True

    def whole_gradient(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        """Return a parameter's gradient summed over all stages that have it. All ranks must call it."""
        return grad

    def agree_on_update(self, names: Sequence[str], numbers: Hyperparameters) -> None:
        """Let ranks compare the names of the parameters whose gradients they are about to use, and the numbers of their
        optimizers.
        """
        told = gradients(names)
        self.agreement.vote(
            UPDATE,
            f"{told}; {numbers.ballot()}",
            lambda: (told, numbers),
            compare_updates,
            hint=UPDATE_HINT,
        )
