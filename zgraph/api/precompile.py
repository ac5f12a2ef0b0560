"""Fills the cache folder with what the ranks of a run would compile for their first training step, with none of these ranks there.

This process stands in for one rank after another (`process_groups.standing_in`), and compiles a model as that rank does: so
an entry's key is not computed a second way. Nothing is run, and no number of the model is looked at.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zgraph.api.compiler import compile
from zgraph.build.planned_step import Inputs, device_of, split_inputs
from zgraph.build.stored_programs import VARIABLE
from zgraph.cache.store import Store, opened
from zgraph.errors import MeshError, PlanError, UnsupportedError
from zgraph.machine import measured_costs
from zgraph.plan.plan import Plan
from zgraph.runtime.runtime import Runtime
from zgraph.runtime.train_step import first_part
from zgraph.torch_compat import process_groups


@dataclass(frozen=True)
class RankPrograms:
    """What was compiled for one rank."""

    rank: int  # the rank
    programs: tuple[str, ...]  # the names of its programs
    written: dict[str, int]  # the entries that it added to the folder, by kind
    found: dict[str, int]  # the entries that were there, by kind


@dataclass(frozen=True)
class Precompiled:
    """What `precompile` has left in the cache folder."""

    folder: Path  # the folder of entries
    world: int  # the number of ranks
    ranks: tuple[RankPrograms, ...]  # the ranks that it has compiled for: rank 0 alone where all need the same
    refused: tuple[str, ...]  # what could not be kept, and why: ranks compile it anew
    depends: tuple[str, ...]  # what ranks measure themselves: where they find something else, they compile anew

    @property
    def ok(self) -> bool:
        """Whether all programs of the step that can be kept are."""
        return not self.refused


def precompile(
    make: Callable[[], tuple[nn.Module, Inputs]],
    plan: Plan,
    world: int,
    told: Callable[[str], None] = lambda line: None,
) -> Precompiled:
    """Compile what `world` ranks need for their first training step by `plan`, and keep it in `ZGRAPH_CACHE`.

    `make` returns a plain model and the batch of one rank; it is called for each rank that is compiled for. `told` is given
    each line of progress. A `world` of 1 is a process without a process group. Raises `PlanError` for a plan whose
    programs are not kept, if there is no cache folder, and if what ranks will schedule by isn't known; `UnsupportedError` for
    several ranks on CUDA, whose programs name the device of their rank; and what `zgraph.compile` raises.
    """
    _refuse(plan, world)
    folder = _folder()
    programs: list[RankPrograms] = []
    refused: dict[str, None] = {}
    for rank in range(world):
        told(f"rank {rank} of {world}")
        with process_groups.standing_in(rank, world) if world > 1 else contextlib.nullcontext():
            mine, not_kept, same = _compiled_for(rank, make, plan, world)
        programs.append(mine)
        refused.update(dict.fromkeys(not_kept))
        gc.collect()  # (a rank's shards, before the next one has its own)
        if same:
            break
    return Precompiled(folder.folder, world, tuple(programs), tuple(refused), _measured_by_ranks(plan, world))


def _compiled_for(
    rank: int, make: Callable[[], tuple[nn.Module, Inputs]], plan: Plan, world: int
) -> tuple[RankPrograms, list[str], bool]:
    """Compile for one rank; return (what it has, what could not be kept, whether all other ranks need the same)."""
    model, inputs = make()
    _refuse_device(device_of(model), world)
    args, kwargs = first_part(plan.for_world(world), *split_inputs(inputs))
    compiled: Any = compile(model, plan, inputs=kwargs if isinstance(inputs, dict) else args)
    runtime: Runtime = compiled.zgraph.runtime
    (entry,) = runtime.entries.values()
    step = entry.program()
    runtime.prepare_step(step)
    assert runtime.keeper is not None  # (the folder is one that programs are kept in)
    usage = runtime.keeper.store.usage
    refused = list(usage.refused)
    if step.kept is None and not refused:
        refused.append(f"{step.name} is not kept for later processes")
    names = (step.name, *runtime.updater.programs.histories())
    several = sum(size > 1 for size in runtime.sizes.values()) > 1  # (then ranks have groups of different names)
    same = plan.backend == "eager" or not (several or usage.by_rank)
    return RankPrograms(rank, names, _by_kind(usage.written), _by_kind(usage.taken)), refused, same


def _by_kind(entries: set[tuple[str, str]]) -> dict[str, int]:
    return dict(sorted(Counter(kind for kind, _ in entries).items()))


def _folder() -> Store:
    """Return the store that programs are kept in. Raises `PlanError` if there is none."""
    if not os.environ.get(VARIABLE):
        raise PlanError(
            "there is no folder to keep programs in",
            where=VARIABLE,
            why="ranks keep and take programs only where it is set",
            hint=f"{VARIABLE}=FOLDER, here and for the ranks",
        )
    store = opened()
    if store is None or not store.identity():
        raise PlanError(
            "nothing can be kept in the cache folder",
            where=os.environ[VARIABLE],
            why="this user can't write to it" if store is not None else "other users could have written to it",
            hint="a folder of your own (chmod go-w), that you can write to",
        )
    return store


def _refuse(plan: Plan, world: int) -> None:
    """Raise the error for a plan whose programs can't be made here, or are never kept."""
    plan.refuse_pipeline(world, "cache")
    if dist.is_initialized():
        raise MeshError(
            "this process is a rank already",
            why="it would stand in for others",
            hint="precompile in a process of its own",
        )
    if plan.dynamic:
        raise PlanError(
            "programs whose sizes or values of inputs are declared to differ are not kept",
            where="dynamic",
            why="what Inductor assumes of their sizes is not stored with their code",
            hint="leave it out to precompile the program for the sizes of the target's inputs",
        )
    if plan.passes or plan.own_policy:
        raise PlanError(
            "programs that your own passes or policy change are not kept",
            where="passes" if plan.passes else "recompute",
            why="their code is in no key of the cache",
            hint="leave them out, or let each run compile",
        )


def _refuse_device(device: torch.device, world: int) -> None:
    if world == 1:
        return
    if device.type != "cpu":
        raise UnsupportedError(
            f"programs of {world} ranks on {device.type} can't be compiled by one process",
            why="a program names the device of its rank (cuda:0, …), and this process would need each of them",
            hint=f"on a machine without GPUs, or with CUDA_VISIBLE_DEVICES= set, CPU's; else start the ranks once with {VARIABLE} set",
        )
    if torch.cuda.is_available():
        raise UnsupportedError(
            "programs of ranks on CPU can't be compiled by a process that sees a GPU",
            why="where ranks see one, torch makes them further process groups, whose names are in their programs' code",
            hint="CUDA_VISIBLE_DEVICES= here and for the ranks",
        )


def _measured_by_ranks(plan: Plan, world: int) -> tuple[str, ...]:
    """Return a sentence for each thing that programs depend on and that ranks measure in every run."""
    notes = []
    if world > 1 and not (plan.hardware or os.environ.get(measured_costs.VARIABLE)):
        notes.append(
            "costs are those that ranks have measured here before: each run measures its links again, and where a transfer "
            f"takes {measured_costs.STEADY} times as long or short as before, it compiles anew, unless the plan names its hardware"
        )
    if "nvme" in plan.offload.tiers():
        notes.append(
            "the plan offloads to a disk, whose rate each run measures: where it is another power of two, it compiles anew"
        )
    return tuple(notes)
