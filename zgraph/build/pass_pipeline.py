"""From a plan to a pipeline: the passes that run, their options and their order. `STEP_PASSES` and `UPDATE_PASSES` are
the tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import torch
from torch import fx

from zgraph.errors import PassError, PlanError
from zgraph.names import did_you_mean
from zgraph.passes import Contract, Pass, PassType
from zgraph.passes.analysis.costs import Costs, hardware, hardware_like
from zgraph.passes.canonicalize.add_rows import add_rows
from zgraph.passes.canonicalize.cleanup import cleanup
from zgraph.passes.canonicalize.compact_masks import compact_masks
from zgraph.passes.canonicalize.inductor_prepare import inductor_prepare
from zgraph.passes.canonicalize.known_masks import known_masks
from zgraph.passes.canonicalize.narrow import narrow
from zgraph.passes.canonicalize.packed_documents import PackedOptions, packed_documents
from zgraph.passes.canonicalize.sliding_windows import SlidingOptions, sliding_windows
from zgraph.passes.canonicalize.sparse_attention import SparseOptions, sparse_attention
from zgraph.passes.compression.compress_exchanges import compress_exchanges
from zgraph.passes.compression.compress_gathers import compress_gathers
from zgraph.passes.compression.compress_messages import compress_messages
from zgraph.passes.compression.compress_reductions import compress_reductions
from zgraph.passes.compression.quantize_transfers import CompressOptions, Correction
from zgraph.passes.offload.offload import OffloadOptions, offload
from zgraph.passes.offload.offload_update import OffloadUpdateOptions, offload_update
from zgraph.passes.overlap.bucket import BucketOptions, bucket
from zgraph.passes.overlap.defer_gradients import DeferOptions, defer_gradients
from zgraph.passes.overlap.follow_order import Start
from zgraph.passes.overlap.overlap import OverlapOptions, overlap
from zgraph.passes.remat.checkpoint import CheckpointOptions, checkpoint
from zgraph.passes.remat.pack_masks import pack_masks
from zgraph.passes.remat.recompute import recompute
from zgraph.passes.remat.rematerialize import RematerializeOptions, rematerialize
from zgraph.passes.remat.solver import Solver
from zgraph.passes.spmd.divide import DivideOptions, divide
from zgraph.passes.spmd.divide_context import ContextOptions, divide_context
from zgraph.passes.spmd.interleave import InterleaveOptions, interleave
from zgraph.passes.spmd.partition_activations import PartitionOptions, partition_activations
from zgraph.passes.tiling.tile import LOSS, TileOptions, tile
from zgraph.passes.update.group_updates import GroupOptions, group_updates
from zgraph.passes.update.share_rounds import share_rounds
from zgraph.passes.update.write_in_place import write_in_place
from zgraph.passes.zero.keep_gathered import KeepOptions, keep_gathered
from zgraph.passes.zero.reduce_gradients import ReduceOptions, reduce_gradients
from zgraph.passes.zero.regather import RegatherOptions, regather
from zgraph.passes.zero.release import release
from zgraph.passes.zero.scale_loss import scale_loss
from zgraph.passes.zero.secondary_shards import SecondaryOptions, secondary_shards
from zgraph.passes.zero.shard_parameters import shard_parameters
from zgraph.plan.user_functions import load_named
from zgraph.program.program import CONTEXT_DIM, DATA_DIMS, TENSOR_DIM

if TYPE_CHECKING:
    from zgraph.plan.plan import Plan


BETWEEN_GROUPS = DATA_DIMS[-1]  # gradients are averaged over it last, when only their shards within a group are left


@dataclass(frozen=True)
class Variant:
    """One of the programs of a step."""

    gathered_before: bool = False  # whether an earlier program has gathered the weights (ZeRO stages 1 and 2)
    reduce: bool = True  # whether it reduces its gradients
    accumulated: bool = False  # whether unreduced gradients of earlier micro-batches come in


PLAIN = Variant()  # a step of one micro-batch


def runs_of(plan: Plan, keeps: bool) -> list[tuple[str, Variant, int]]:
    """Return the programs that a training step runs, each as (name, variant, how often); `keeps` tells whether whole
    weights outlive them.

    "first" is for the first micro-batch, "next" for those that follow, "last" for one that adds up the unreduced
    gradients of the earlier ones.
    """
    micro = plan.micro_batches
    if micro == 1:
        return [("first", PLAIN, 1)]
    if plan.zero >= 2:  # (each micro-batch reduces)
        return [("first", PLAIN, 1), ("next", Variant(keeps), micro - 1)]
    runs = [("first", Variant(reduce=False), 1), ("next", Variant(keeps, reduce=False), micro - 2)]
    return [run for run in (*runs, ("last", Variant(keeps, accumulated=True), 1)) if run[2]]


@dataclass(frozen=True)
class MemoryDecision:
    """What is decided under a memory budget."""

    room: int | None = None  # bytes of gathered weights beyond those needed at once; None: the default of `overlap`
    # bytes by which these may raise the peak, if the plan does not say; None: the default of `overlap`
    spare: int | None = None
    # bytes of gradients waiting for their reduction, if the plan does not say; None: its default
    reduce: int | None = None
    keep: frozenset[str] = frozenset()  # weights that are kept from the forward to the backward
    # bytes that activations may take; None: all are kept that the plan does not say otherwise of
    activations: int | None = None
    away: int | None = None  # bytes of activations that are offloaded, if the plan lets them; None: all
    # the share of the optimizer's states that is offloaded; None: the plan's `offload.ratio`
    states: float | None = None
    waiting: int = 0  # micro-batches waiting in a stage besides, whose activations count in `activations`

    def replace(self, **changes: Any) -> MemoryDecision:
        return replace(self, **changes)


@dataclass(frozen=True)
class PassFilter:
    """A part of a pipeline, for someone who wants to see what a pass does."""

    without: frozenset[str] = frozenset()  # passes that are left out
    until: str | None = None  # the last pass that runs; None for all
    verified: bool = True  # whether the verifier checks the result of each pass

    def cut(self, passes: list[Pass]) -> list[Pass]:
        """Return the passes up to the last that is wanted. Raises `PassError` if it is not in the pipeline."""
        if self.until is None:
            return passes
        names = [p.name for p in passes]
        if self.until not in names:
            raise PassError(f"there is no pass {self.until!r} in this pipeline", hint=did_you_mean(self.until, names))
        return passes[: names.index(self.until) + 1]

    def kept(self, passes: list[Pass]) -> list[Pass]:
        """Return the passes without those that are left out. Raises `PassError` if one of these is not in the pipeline."""
        names = [p.name for p in passes]
        for name in sorted(self.without - set(names)):
            raise PassError(f"there is no pass {name!r} in this pipeline", hint=did_you_mean(name, names))
        return [p for p in passes if p.name not in self.without]


EVERY_PASS = PassFilter()


def costs_of(plan: Plan, device: torch.device | None = None) -> Costs:
    """Return what passes decide from where nothing is measured: the plan's hardware, else what is known of devices of
    this kind (by default of CPUs).

    It does not depend on the machine. Raises `PlanError` for unknown hardware, a file that can't be read, and a mesh
    dimension without a link.
    """
    if plan.named_hardware is not None:
        device_spec = hardware(plan.named_hardware)
    else:
        cuda = device is not None and device.type == "cuda"
        device_spec = hardware_like("cuda" if cuda else "cpu", torch.cuda.get_device_name(device) if cuda else "")
    for dim in plan.mesh:
        device_spec.link(dim)
    return Costs(device_spec, fused=plan.backend == "inductor")


@dataclass(frozen=True)
class PassContext:
    """What a pipeline is built for."""

    plan: Plan  # the plan
    costs: Costs  # what passes decide from
    variant: Variant = PLAIN  # the program of the step
    training: bool = True  # whether the program has gradients
    choice: MemoryDecision = MemoryDecision()  # what was decided about memory
    solver: Solver | None = None  # the solver for recomputation, where there is one already
    order: tuple[Start, ...] = ()  # the order of transfers, where another program's is followed
    schedule: Costs | None = None  # what transfers are scheduled by; None: `costs`

    @property
    def transfer_costs(self) -> Costs:
        """What transfers are scheduled by."""
        return self.schedule or self.costs

    @property
    def keeps_weights(self) -> bool:
        """Whether gathered weights stay until the update (ZeRO stages 1 and 2)."""
        return self.training and self.plan.zero in (1, 2)

    @property
    def staged(self) -> bool:
        """Whether this is a stage of a pipeline. (Its backward does not directly follow its forward, nor the next
        forward its update.)"""
        return self.plan.mesh.get("pp", 1) != 1


@dataclass(frozen=True)
class Decision:
    """Whether a plan runs a pass, and why."""

    runs: bool  # whether the pass runs
    why: str  # the reason, in words

    def unless(self, refused: bool, why: str) -> Decision:
        """Return this decision, but let a pass that would run not run if it is `refused`, for the reason `why`."""
        return Decision(False, why) if self.runs and refused else self


@dataclass(frozen=True)
class UpdateContext:
    """What the pipeline of an update is built for."""

    plan: Plan  # the plan
    first: tuple[str, ...] = ()  # parameters that are updated as early as they can be


C = TypeVar("C")


@dataclass(frozen=True)
class PassRow(Generic[C]):
    """A row of a table of passes."""

    type: PassType  # the pass
    when: Callable[[C], Decision]  # decides whether it runs
    options: Callable[[C], object] = lambda context: None  # makes its options; None for no options, or the defaults


def _passes(rows: Sequence[PassRow[C]], context: C) -> list[Pass]:
    """Return the passes of a table that run."""
    return [row.type(row.options(context)) for row in rows if row.when(context).runs]


def _always(why: str) -> Callable[[Any], Decision]:
    return lambda context: Decision(True, why)


def _over(dim: str) -> Callable[[PassContext], Decision]:
    """Return a decision to run with more than one rank along a mesh dimension."""

    def when(context: PassContext) -> Decision:
        ranks = context.plan.mesh.get(dim, 1)
        return Decision(ranks != 1, f"mesh.{dim} is {ranks}")

    return when


def _of(field: str, test: Callable[[Plan], bool]) -> Callable[[PassContext], Decision]:
    """Return a decision to run where `test` is true of the plan; the reason names this field."""

    def when(context: PassContext) -> Decision:
        return Decision(test(context.plan), f"{field} is {getattr(context.plan, field)!r}")

    return when


def _in_training(when: Callable[[PassContext], Decision]) -> Callable[[PassContext], Decision]:
    return lambda context: when(context).unless(not context.training, "the program has no gradients")


def _recomputes(context: PassContext) -> Decision:
    on_inductor = Decision(context.plan.backend == "inductor", f"backend is {context.plan.backend!r}")
    return on_inductor.unless(context.plan.recompute == "none", "recompute is 'none'")


def _checkpoints(context: PassContext) -> Decision:
    asked = context.plan.recompute
    if isinstance(asked, tuple) or ":" in asked:
        return Decision(True, f"recompute is {asked!r}")
    if asked == "none" or context.plan.backend == "eager":
        return Decision(True, "the model's own checkpointed regions are recomputed")
    return Decision(False, "on inductor the min-cut follows the model's own checkpointed regions")


def _checkpoint_options(context: PassContext) -> CheckpointOptions:
    asked = context.plan.recompute
    if isinstance(asked, tuple):
        return CheckpointOptions(modules=asked)
    return CheckpointOptions(policy=load_policy(asked)) if ":" in asked else CheckpointOptions()


def _rematerializes(context: PassContext) -> Decision:
    asked = context.plan.recompute
    if asked == "full":
        return Decision(True, "recompute is 'full'")
    if isinstance(asked, tuple) or ":" in asked:
        return Decision(False, f"recompute is {asked!r}, which says what is recomputed")
    if context.choice.activations is not None:
        return Decision(True, "the memory budget needs it")
    return Decision(False, f"recompute is {asked!r}; a memory budget adds it where the model needs it")


def _rematerialize_options(context: PassContext) -> RematerializeOptions:
    if context.plan.recompute == "full":
        return RematerializeOptions(None, context.costs)
    return RematerializeOptions(context.choice.activations, context.costs, context.solver, context.choice.waiting)


def _interleaves(context: PassContext) -> Decision:
    return _over(TENSOR_DIM)(context).unless(
        context.plan.async_tensor_parallel == "off", "async_tensor_parallel is 'off'"
    )


def _interleave_options(context: PassContext) -> InterleaveOptions:
    asked = context.plan.async_tensor_parallel
    return InterleaveOptions(TENSOR_DIM, asked if isinstance(asked, int) else None, context.costs)


def _context_options(context: PassContext) -> ContextOptions:
    plan = context.plan
    told = None if plan.sequence_dim == "auto" else plan.sequence_dim
    return ContextOptions(CONTEXT_DIM, told, plan.context_attention, context.staged)


def _keeps(context: PassContext) -> Decision:
    why = f"zero is {context.plan.zero}"
    return Decision(context.keeps_weights, why if context.training else "the program has no gradients")


def _lets_go(context: PassContext) -> Decision:
    decision = _keeps(context)
    return Decision(not decision.runs, decision.why)


def _regather_options(context: PassContext) -> RegatherOptions:
    reused = context.plan.prefetch.reuse_bytes
    return RegatherOptions(reused, context.choice.keep, not context.staged or reused is not None, context.order)


def _keeps_parts(context: PassContext) -> Decision:
    ranks = context.plan.wire.secondary
    decision = _lets_go(context)
    if ranks is None or not decision.runs:
        return Decision(False, "wire.secondary is not set" if ranks is None else decision.why)
    return Decision(True, f"wire.secondary is {ranks}")


def _scales(context: PassContext) -> Decision:
    scaled = context.plan.loss_scale() is not None
    return Decision(scaled, "the plan has a loss scale" if scaled else "the plan has no loss scale")


def _compresses(field: str) -> Callable[[PassContext], Decision]:
    def when(context: PassContext) -> Decision:
        wire = context.plan.wire
        if wire.auto and field != "activations":
            return Decision(False, f"wire.auto chooses wire.{field} once the model is captured")
        format = getattr(wire, field)
        return Decision(format != "same", f"wire.{field} is {format!r}")

    return when


def _gather_options(context: PassContext) -> CompressOptions:
    wire = context.plan.wire
    return CompressOptions(wire.gather, wire.block, wire.exact, context.costs)


def _reduction_options(context: PassContext) -> CompressOptions:
    wire = context.plan.wire
    over = BETWEEN_GROUPS if wire.hierarchical else None
    correction = Correction(wire.rounding == "stochastic", wire.error_feedback)
    return CompressOptions(wire.reduce, wire.block, wire.exact, context.costs, over, correction)


def _exchange_options(context: PassContext) -> CompressOptions:
    wire = context.plan.wire
    return CompressOptions(wire.activations, wire.block, costs=context.costs)


def message_options(plan: Plan) -> CompressOptions:
    """Return how pipeline stages send each other activations."""
    return CompressOptions(plan.wire.activations, plan.wire.block)


def _defers(context: PassContext) -> Decision:
    if not any(_over(dim)(context).runs for dim in DATA_DIMS):
        return Decision(False, "one rank has all rows")
    decision = Decision(context.plan.prefetch.enabled, f"prefetch.enabled is {context.plan.prefetch.enabled}")
    return decision.unless(context.staged, "a stage's backward ends with what it sends").unless(
        not context.variant.reduce, "its gradients are reduced by a later program"
    )


def _overlap_options(context: PassContext) -> OverlapOptions:
    plan, choice, early = context.plan, context.choice, context.plan.prefetch
    beside: Literal["update", "receives"] | None = "receives" if context.staged else None
    if plan.optimizer is not None and early.across_steps and not context.staged:
        beside = "update"
    if not context.training or plan.offload.tier("parameters") is not None:
        beside = None
    return OverlapOptions(
        max_bytes=early.max_bytes,
        room_bytes=choice.room,
        spare_bytes=choice.spare if early.spare_bytes is None else early.spare_bytes,
        ahead_bytes=early.ahead_bytes,
        reduce_bytes=choice.reduce if early.reduce_bytes is None else early.reduce_bytes,
        ahead=early.enabled,
        beside=beside,
        costs=context.transfer_costs,
        order=context.order,
    )


def _offloads(context: PassContext) -> Decision:
    offloaded = context.plan.offload
    names = [n for n in ("activations", "parameters") if offloaded.tier(n) is not None]
    names += ["gradients"] if offloaded.gradients else []
    # Of these, a step without gradients has only parameters.
    here = [n for n in names if context.training or n == "parameters"]
    if here:
        return Decision(True, f"offload has {' and '.join(here)}")
    why = "the program has no gradients" if names else "nothing of the step is offloaded"
    return Decision(False, why)


def _offload_options(context: PassContext) -> OffloadOptions:
    offloaded = context.plan.offload
    tier = offloaded.tier("activations") if context.training else None
    return OffloadOptions(
        tier, context.choice.away, offloaded.least_bytes, offloaded.staging_bytes, context.transfer_costs
    )


STEP_PASSES: tuple[PassRow[PassContext], ...] = (
    PassRow(cleanup, _always("the passes behind it rely on it")),
    PassRow(narrow, _of("tiles", lambda plan: LOSS in plan.tiles)),
    PassRow(
        sparse_attention,
        _of("attention", lambda plan: bool(plan.attention)),
        lambda c: SparseOptions(tuple(c.plan.attention.items())),
    ),
    PassRow(
        sliding_windows,
        _always("a model's own masks may be sliding windows"),
        lambda c: SlidingOptions(tuple(c.plan.attention.items())),
    ),
    PassRow(divide, _over(TENSOR_DIM), lambda c: DivideOptions(TENSOR_DIM, c.plan.sequence_parallel)),
    PassRow(known_masks, _over(CONTEXT_DIM)),
    PassRow(
        packed_documents,
        _always("attention may be inside of packed documents"),
        lambda c: PackedOptions(c.plan.mesh.get(CONTEXT_DIM, 1) != 1),
    ),
    PassRow(compact_masks, _always("a mask of attention may say the same to all queries")),
    PassRow(divide_context, _over(CONTEXT_DIM), _context_options),
    PassRow(inductor_prepare, _of("backend", lambda plan: plan.backend == "inductor")),
    PassRow(add_rows, _in_training(_of("backend", lambda plan: plan.backend == "inductor"))),
    PassRow(recompute, _recomputes),
    PassRow(tile, _of("tiles", lambda plan: bool(plan.tiles)), lambda c: TileOptions(tuple(c.plan.tiles.items()))),
    PassRow(checkpoint, _in_training(_checkpoints), _checkpoint_options),
    PassRow(rematerialize, _in_training(_rematerializes), _rematerialize_options),
    PassRow(pack_masks, _in_training(_of("pack_masks", lambda plan: plan.pack_masks))),
    PassRow(interleave, _interleaves, _interleave_options),
    PassRow(shard_parameters, _always("parameters enter as this rank stores them")),
    PassRow(keep_gathered, _keeps, lambda c: KeepOptions(c.variant.gathered_before)),
    PassRow(regather, _lets_go, _regather_options),
    PassRow(secondary_shards, _keeps_parts, lambda c: SecondaryOptions(c.plan.wire.secondary or 1)),
    PassRow(scale_loss, _in_training(_scales)),
    PassRow(
        reduce_gradients,
        _always("gradients leave as this rank stores them"),
        lambda c: ReduceOptions(c.variant.reduce, c.variant.accumulated, c.plan.local_steps is not None),
    ),
    PassRow(compress_gathers, _compresses("gather"), _gather_options),
    PassRow(compress_reductions, _in_training(_compresses("reduce")), _reduction_options),
    PassRow(
        compress_exchanges,
        lambda c: _compresses("activations")(c).unless(
            not any(_over(dim)(c).runs for dim in (TENSOR_DIM, CONTEXT_DIM)), "no ranks divide layers or sequences"
        ),
        _exchange_options,
    ),
    PassRow(
        compress_messages,
        lambda c: _compresses("activations")(c).unless(not c.staged, "there is no pipeline"),
        lambda c: message_options(c.plan),
    ),
    PassRow(
        partition_activations,
        _in_training(_of("partition_activations", lambda plan: plan.partition_activations)),
        lambda c: PartitionOptions(TENSOR_DIM, c.costs),
    ),
    PassRow(defer_gradients, _in_training(_defers), lambda c: DeferOptions(c.costs, c.order)),
    PassRow(
        bucket,
        _always("small transfers are joined"),
        lambda c: BucketOptions(c.plan.bucket.gather, c.plan.bucket.reduce, c.costs, c.order),
    ),
    PassRow(overlap, _always("the order of transfers is decided here"), _overlap_options),
    PassRow(release, _lets_go),
    PassRow(offload, _offloads, _offload_options),
)
"""The passes of a step, in their order, each with its condition and its options. `build` adds the plan's own."""


def build(
    plan: Plan,
    variant: Variant = PLAIN,
    *,
    training: bool = True,
    costs: Costs | None = None,
    choice: MemoryDecision = MemoryDecision(),
    solver: Solver | None = None,
    pass_filter: PassFilter = EVERY_PASS,
    order: tuple[Start, ...] = (),
    schedule: Costs | None = None,
) -> list[Pass]:
    """Build the pipeline of a plan.

    Decisions are made from `costs` (by default those of the plan's hardware, or of a CPU). `solver` is the one for
    recomputation, where there is one already. Transfers start in the `order`, if one is given, and are scheduled by other
    costs, `schedule`, if these are given: all else is then decided as without them. A program that is not
    for `training` (it has no gradients) keeps no weights, whatever the ZeRO stage. Raises `PlanError` for a user's pass
    that can't be loaded or placed, `PassError` for a pass to leave out that is not in the pipeline.
    """
    context = PassContext(plan, costs or costs_of(plan), variant, training, choice, solver, order, schedule)
    passes = _passes(STEP_PASSES, context)
    for user in plan.user_passes():
        _place(passes, user.ref, user.position, user.anchor)
    return pass_filter.kept(passes)


def load_policy(ref: str) -> Callable[[fx.Node], bool]:
    """Return the function over nodes that "package.module:name" names. Raises `PlanError` if there is none."""
    policy = load_named(ref, "policy")
    if not callable(policy):
        raise PlanError(
            f"{ref!r} is no policy but {type(policy).__name__}", where="recompute", hint="a function of a node"
        )
    return policy  # type: ignore[no-any-return]


def _offloads_update(context: UpdateContext) -> Decision:
    tiers = bool(context.plan.offload.tiers())
    return Decision(tiers, "something is offloaded" if tiers else "nothing is offloaded")


def _shares_rounds(context: UpdateContext) -> Decision:
    local = context.plan.local_steps
    if local is None:
        return Decision(False, "local_steps is not set")
    return Decision(True, f"local_steps.every is {local.every}, local_steps.wire {local.wire!r}")


def _share_options(context: UpdateContext) -> CompressOptions:
    local, wire = context.plan.local_steps, context.plan.wire
    return CompressOptions(local.wire if local else "same", wire.block, wire.exact, over=BETWEEN_GROUPS)


UPDATE_PASSES: tuple[PassRow[UpdateContext], ...] = (
    PassRow(share_rounds, _shares_rounds, _share_options),
    PassRow(write_in_place, _always("weights and states are written where they are")),
    PassRow(
        group_updates,
        _always("parameters are updated in groups"),
        lambda c: GroupOptions(c.first, c.plan.offload.sub_group_bytes),
    ),
    PassRow(offload_update, _offloads_update, lambda c: OffloadUpdateOptions(c.plan.offload.update_on == "host")),
)
"""The passes of an update, in their order."""


def build_update_passes(plan: Plan, first: tuple[str, ...] = ()) -> list[Pass]:
    """Build the pipeline of update programs; the parameters named in `first` are updated as early as they can be."""
    return _passes(UPDATE_PASSES, UpdateContext(plan, first))


@dataclass(frozen=True)
class ExplainedPass:
    """A pass, with a plan's decision whether it runs."""

    contract: Contract  # the pass's contract
    decision: Decision  # whether and why the plan runs it


def explain_step_passes(plan: Plan) -> list[ExplainedPass]:
    """Return every pass that a training step may have, in order, the plan's own included. Raises as `build`."""
    build(plan)
    passes = _explained(STEP_PASSES, PassContext(plan, costs_of(plan)))
    for user in plan.user_passes():
        user_pass = ExplainedPass(load_pass(user.ref).contract, Decision(True, "the plan's passes name it"))
        names = [f.contract.name for f in passes]
        at = len(passes) if user.anchor is None else names.index(user.anchor) + (user.position == "after")
        passes.insert(at, user_pass)
    return passes


def explain_update_passes(plan: Plan) -> list[ExplainedPass]:
    """Return every pass that an update may have, in order."""
    return _explained(UPDATE_PASSES, UpdateContext(plan))


def _explained(rows: Sequence[PassRow[C]], context: C) -> list[ExplainedPass]:
    return [ExplainedPass(row.type.contract, row.when(context)) for row in rows]


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


def load_pass(ref: str) -> Pass:
    """Return the pass that "package.module:name" names. Raises `PlanError` if there is none."""
    definition = load_named(ref, "pass")
    instance = definition() if isinstance(definition, PassType) else definition
    if not isinstance(instance, Pass):
        raise PlanError(
            f"{ref!r} is no pass but {type(definition).__name__}",
            hint="decorate the function with zgraph.passes.graph_pass",
        )
    return instance
