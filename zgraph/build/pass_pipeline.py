"""From a plan to a pipeline: which passes run, with which options, in which order."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx, nn

from zgraph.capture.tensor_parallel_layout import unmatched as unmatched_rows
from zgraph.errors import PassError, PlanError
from zgraph.names import did_you_mean, matches
from zgraph.passes import Pass, PassType
from zgraph.passes.analysis.costs import Costs, hardware, hardware_like
from zgraph.passes.canonicalize.cleanup import cleanup
from zgraph.passes.canonicalize.inductor_prepare import inductor_prepare
from zgraph.passes.canonicalize.known_masks import known_masks
from zgraph.passes.canonicalize.narrow import narrow
from zgraph.passes.offload.offload import OffloadOptions, offload
from zgraph.passes.offload.offload_update import OffloadUpdateOptions, offload_update
from zgraph.passes.overlap.bucket import BucketOptions, bucket
from zgraph.passes.overlap.overlap import OverlapOptions, overlap
from zgraph.passes.remat.checkpoint import CheckpointOptions, checkpoint
from zgraph.passes.remat.recompute import recompute
from zgraph.passes.remat.rematerialize import RematerializeOptions, rematerialize
from zgraph.passes.remat.solver import Solver
from zgraph.passes.spmd.divide import DivideOptions, divide
from zgraph.passes.spmd.divide_context import ContextOptions, divide_context
from zgraph.passes.spmd.interleave import InterleaveOptions, interleave
from zgraph.passes.spmd.partition_activations import PartitionOptions, partition_activations
from zgraph.passes.tiling.tile import LOSS, TileOptions, tile
from zgraph.passes.update.group_updates import GroupOptions, group_updates
from zgraph.passes.update.write_in_place import write_in_place
from zgraph.passes.zero.keep_gathered import KeepOptions, keep_gathered
from zgraph.passes.zero.reduce_gradients import ReduceOptions, reduce_gradients
from zgraph.passes.zero.regather import RegatherOptions, regather
from zgraph.passes.zero.release import release
from zgraph.passes.zero.scale_loss import scale_loss
from zgraph.passes.zero.shard_parameters import shard_parameters
from zgraph.program.program import CONTEXT_DIM, TENSOR_DIM
from zgraph.record import joined

if TYPE_CHECKING:
    from zgraph.plan.plan import Plan


@dataclass(frozen=True)
class Variant:
    """Which of a step's programs: has an earlier one gathered the weights (stages 1 and 2), does this one reduce its
    gradients, and do unreduced gradients of earlier micro-batches come in?"""

    gathered_before: bool = False
    reduce: bool = True
    accumulated: bool = False


PLAIN = Variant()  # a step of one micro-batch


@dataclass(frozen=True)
class MemoryDecision:
    """What is decided under a memory budget: bytes of gathered weights beyond what is needed at once, those by which they may
    raise the peak, those of gradients that wait (None: as the plan says), the weights that are held from the forward to
    the backward, the bytes that activations may take (None: all are kept that the plan does not say otherwise of), those of
    activations that are offloaded, where the plan lets them (None: all), the share of the optimizer's states that is (None:
    the plan's `offload.ratio`), and how many micro-batches wait in a stage besides: their activations are among those bytes."""

    room: int | None = None
    spare: int | None = None
    reduce: int | None = None
    keep: frozenset[str] = frozenset()
    activations: int | None = None
    away: int | None = None
    states: float | None = None
    waiting: int = 0

    def replace(self, **changes: Any) -> MemoryDecision:
        return replace(self, **changes)


@dataclass(frozen=True)
class PassFilter:
    """Passes that are left out of a pipeline, and the one it ends after, for someone who looks for what a pass does; and whether the
    verifier looks at what each leaves."""

    without: frozenset[str] = frozenset()
    until: str | None = None
    verified: bool = True

    def cut(self, passes: list[Pass]) -> list[Pass]:
        """The passes up to the last that is wanted. Raises `PassError` if that one is not there."""
        if self.until is None:
            return passes
        names = [p.name for p in passes]
        if self.until not in names:
            raise PassError(f"there is no pass {self.until!r} in this pipeline", hint=did_you_mean(self.until, names))
        return passes[: names.index(self.until) + 1]

    def kept(self, passes: list[Pass]) -> list[Pass]:
        """The passes without those that are left out. Raises `PassError` if one of these is not there."""
        names = [p.name for p in passes]
        for name in sorted(self.without - set(names)):
            raise PassError(f"there is no pass {name!r} in this pipeline", hint=did_you_mean(name, names))
        return [p for p in passes if p.name not in self.without]


EVERY_PASS = PassFilter()


def costs_of(plan: Plan, device: torch.device | None = None) -> Costs:
    """What passes decide from: the plan's hardware, else that of the device (by default a CPU). Raises `PlanError` for
    hardware that is not known, a file that can't be read, and a mesh dimension without a link."""
    if plan.hardware is not None:
        found = hardware(plan.hardware)
    else:
        cuda = device is not None and device.type == "cuda"
        found = hardware_like("cuda" if cuda else "cpu", torch.cuda.get_device_name(device) if cuda else "")
    for dim in plan.mesh:
        found.link(dim)
    return Costs(found, fused=plan.backend == "inductor")


def build(
    plan: Plan,
    variant: Variant = PLAIN,
    *,
    training: bool = True,
    costs: Costs | None = None,
    choice: MemoryDecision = MemoryDecision(),
    solver: Solver | None = None,
    pass_filter: PassFilter = EVERY_PASS,
) -> list[Pass]:
    """The pipeline of a plan. Raises `PlanError` for a user's pass that is not there, `PassError` for one to leave out that is not.

    Decisions are made from `costs` (by default those of the plan's hardware, or of a CPU); `solver` is one for what is computed
    again, where there is one already. A program
    that is not for `training` (it has no gradients) keeps no weights, whatever the stage.
    """
    costs = costs or costs_of(plan)
    keep = training and plan.zero in (1, 2)
    staged = (
        plan.mesh.get("pp", 1) != 1
    )  # (a stage's backward is not next to its forward, nor the next forward to its update)
    passes = [cleanup()]
    if LOSS in plan.tiles:
        passes.append(narrow())
    if plan.mesh.get(TENSOR_DIM, 1) != 1:
        passes.append(divide(DivideOptions(TENSOR_DIM, plan.sequence_parallel)))
    if plan.mesh.get(CONTEXT_DIM, 1) != 1:
        passes.append(known_masks())
        told = None if plan.sequence_dim == "auto" else plan.sequence_dim
        passes.append(divide_context(ContextOptions(CONTEXT_DIM, told, plan.context_attention)))
    if plan.backend == "inductor":
        passes.append(inductor_prepare())
        if plan.recompute != "none":
            passes.append(recompute())
    if plan.tiles:
        passes.append(tile(TileOptions(tuple(plan.tiles.items()))))
    if training:
        passes += _checkpointing(plan, costs, choice, solver)
    if plan.mesh.get(TENSOR_DIM, 1) != 1 and plan.async_tensor_parallel != "off":
        asked = None if plan.async_tensor_parallel == "auto" else plan.async_tensor_parallel
        passes.append(interleave(InterleaveOptions(TENSOR_DIM, asked, costs)))
    passes.append(shard_parameters())
    if keep:
        passes.append(keep_gathered(KeepOptions(variant.gathered_before)))
    else:
        turn = not staged or plan.prefetch.reuse_bytes is not None
        passes.append(regather(RegatherOptions(plan.prefetch.reuse_bytes, choice.keep, turn)))
    if training and plan.loss_scale() is not None:
        passes.append(scale_loss())
    passes.append(reduce_gradients(ReduceOptions(variant.reduce, variant.accumulated)))
    if training and plan.partition_activations:
        passes.append(partition_activations(PartitionOptions(TENSOR_DIM, costs)))
    passes.append(bucket(BucketOptions(plan.bucket.gather, plan.bucket.reduce, costs)))
    early = plan.prefetch
    beside: Literal["update", "receives"] | None = "receives" if staged else None
    if plan.optimizer is not None and early.across_steps and not staged:
        beside = "update"
    if not training or plan.offload.tier("parameters") is not None:
        beside = None
    waiting = choice.reduce if early.reduce_bytes is None else early.reduce_bytes
    bounds = OverlapOptions(
        max_bytes=early.max_bytes,
        room_bytes=choice.room,
        spare_bytes=choice.spare if early.spare_bytes is None else early.spare_bytes,
        ahead_bytes=early.ahead_bytes,
        reduce_bytes=waiting,
        ahead=early.enabled,
        beside=beside,
        costs=costs,
    )
    passes.append(overlap(bounds))
    if not keep:
        passes.append(release())
    away = plan.offload
    tier = away.tier("activations") if training else None
    if tier is not None or away.tier("parameters") is not None or (training and away.gradients):
        passes.append(offload(OffloadOptions(tier, choice.away, away.least_bytes, away.staging_bytes, costs)))
    for user in plan.user_passes():
        _place(passes, user.ref, user.position, user.anchor)
    return pass_filter.kept(passes)


def _checkpointing(plan: Plan, costs: Costs, choice: MemoryDecision, solver: Solver | None) -> list[Pass]:
    """What is computed again besides cheap values: what the model and the plan say, or what the budget needs."""
    asked = plan.recompute
    if isinstance(asked, tuple):
        return [checkpoint(CheckpointOptions(modules=asked))]
    if ":" in asked:
        return [checkpoint(CheckpointOptions(policy=load_policy(asked)))]
    # (on Inductor the min-cut follows the model's own regions)
    found = [checkpoint()] if plan.backend == "eager" or asked == "none" else []
    if asked == "full":
        found.append(rematerialize(RematerializeOptions(None, costs)))
    elif choice.activations is not None:
        found.append(rematerialize(RematerializeOptions(choice.activations, costs, solver, choice.waiting)))
    return found


@dataclass(frozen=True)
class Unmatched:
    """A pattern in a field of a plan that names nothing of the model."""

    field: str
    pattern: str
    error: PlanError


def unmatched(plan: Plan, model: nn.Module) -> Iterator[Unmatched]:
    """Each pattern of `recompute`, `tiles` and `tensor_parallel` that matches no module, by any of its names."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    recompute = plan.recompute if isinstance(plan.recompute, tuple) else ()
    tiles = [p for p in plan.tiles if p != LOSS]
    for field, patterns in (("recompute", recompute), ("tiles", tiles)):
        for pattern in patterns:
            if not matches(names, [pattern]):
                what = f"{field} has a pattern {pattern!r} that matches no module"
                hint = did_you_mean(pattern, [name for name in names if name])
                where = field if field == "recompute" else f"{field}.{pattern}"
                yield Unmatched(field, pattern, PlanError(what, where=where, hint=hint))
    if isinstance(plan.tensor_parallel, Mapping) and plan.mesh.get(TENSOR_DIM, 1) != 1:
        for pattern in plan.tensor_parallel:
            for error in unmatched_rows([pattern], model):
                yield Unmatched("tensor_parallel", pattern, error)


def refuse_unmatched(plan: Plan, model: nn.Module) -> None:
    """Raises `PlanError` for patterns that match no module."""
    faults = [found.error for found in unmatched(plan, model)]
    if faults:
        raise joined(faults)


def without(plan: Plan, faulty: Iterable[Unmatched]) -> Plan:
    """The plan without these patterns."""
    lost = {(found.field, found.pattern) for found in faulty}
    changes: dict[str, Any] = {}
    for field in {field for field, _ in lost}:
        patterns = getattr(plan, field)
        kept = [p for p in patterns if (field, p) not in lost]
        changes[field] = {p: patterns[p] for p in kept} if isinstance(patterns, Mapping) else tuple(kept) or "auto"
    return plan.model_copy(update=changes)


def load_policy(ref: str) -> Callable[[fx.Node], bool]:
    """The function over nodes that "package.module:name" names. Raises `PlanError` if there is none."""
    found = _load(ref, "policy")
    if not callable(found):
        raise PlanError(
            f"{ref!r} is no policy but {type(found).__name__}", where="recompute", hint="a function of a node"
        )
    return found  # type: ignore[no-any-return]


def build_update_passes(plan: Plan, first: tuple[str, ...] = ()) -> list[Pass]:
    """The pipeline of update programs; the parameters named in `first` are updated as early as they can be."""
    away = bool(plan.offload.tiers())
    grouped = group_updates(GroupOptions(first, plan.offload.sub_group_bytes))
    return [
        write_in_place(),
        grouped,
        *([offload_update(OffloadUpdateOptions(plan.offload.update_on == "host"))] if away else []),
    ]


def _place(passes: list[Pass], ref: str, position: str | None, anchor: str | None) -> None:
    mine = load_pass(ref)
    names = [p.name for p in passes]
    if anchor is None:
        passes.append(mine)
        return
    if anchor not in names:
        raise PlanError(
            f"pass {ref!r} is to stand {position} {anchor!r}, which is not in the pipeline",
            hint=f"there are: {', '.join(names)}",
        )
    passes.insert(names.index(anchor) + (position == "after"), mine)


def _load(ref: str, kind: str) -> Any:
    module_name, _, attribute = ref.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise PlanError(
            f"{kind} {ref!r} can't be loaded",
            why=f"{type(error).__name__}: {error}",
            hint="is the module on the Python path?",
        ) from error


def load_pass(ref: str) -> Pass:
    """The pass that "package.module:name" names."""
    found = _load(ref, "pass")
    made = found() if isinstance(found, PassType) else found
    if not isinstance(made, Pass):
        raise PlanError(
            f"{ref!r} is no pass but {type(found).__name__}",
            hint="decorate the function with zgraph.passes.graph_pass",
        )
    return made
