"""The table of a plan's fields that do not go together: which, when, what is wrong, and what to do. `Plan` checks it
when it is created."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zgraph.errors import PlanError
from zgraph.plan.optimizers import OneBitOptimizer, ZeroOneAdam
from zgraph.plan.shapes import FIXED_BY, buckets_of, hot_of, sizes_in


@dataclass(frozen=True, slots=True)
class Conflict:
    """A row of the table. Its plan is untyped, since `Plan` checks itself by this table."""

    where: str  # the field that is refused
    when: Callable[[Any], bool]  # whether a plan has this conflict
    what: str  # the error, with the plan's values put in by `str.format`
    hint: str  # what to do
    why: str | None = None  # the reason

    def error(self, plan: Any) -> PlanError:
        return PlanError(self.what.format(plan=plan), where=self.where, why=self.why, hint=self.hint)


def first_conflict(plan: Any) -> PlanError | None:
    """Return the first conflict that a plan has, as an error, or None."""
    return next((row.error(plan) for row in CONFLICTS if row.when(plan)), None)


def _ranks(plan: Any, dim: str) -> int:
    return int(plan.mesh.get(dim, 1))


def _changed(plan: Any, field: str) -> bool:
    return bool(getattr(plan, field) != type(plan).model_fields[field].default)


def _is_set(record: str, field: str) -> Callable[[Any], bool]:
    return lambda plan: getattr(getattr(plan, record), field) is not None


def _micro_batches_differ(plan: Any) -> bool:
    """Return whether the plan has another number of micro-batches than its elastic batch gives."""
    elastic = plan.elastic
    if elastic is None:
        return False
    return bool(plan.micro_batches != (1 if elastic.rows is None else elastic.parts(elastic.rows)))


def _errs_if_nonfinite(plan: Any) -> bool:
    return plan.grad_clip is not None and bool(plan.grad_clip.error_if_nonfinite)


def _stays(plan: Any) -> bool:
    """Return whether the optimizer's states stay on the device."""
    return plan.offload.tier("optimizer") is None and plan.memory_budget is None


GIVE_OPTIMIZER = "give the plan an optimizer"
LEAVE_OUT = "leave it out"
OFFLOAD_STATES = 'offload={"optimizer": "cpu"} or "nvme:FOLDER" offloads them; or leave it out'
GATHERS_FOR_A_TIME = "only stage 3 gathers weights for a time; the other stages keep what they gather until the update"


def _only_at_stage_3(field: str) -> Conflict:
    return Conflict(
        f"prefetch.{field}",
        lambda plan: plan.zero < 3 and _is_set("prefetch", field)(plan),
        f"prefetch.{field} is set, and zero is {{plan.zero}}",
        why=GATHERS_FOR_A_TIME,
        hint="zero=3, or leave it out",
    )


def _only_with(dim: str, field: str, what: str) -> Conflict:
    return Conflict(
        field,
        lambda plan: _ranks(plan, dim) == 1 and _changed(plan, field),
        f"{field} is set without ranks that divide {what}",
        hint=f'mesh={{"dp": -1, "{dim}": 2}} has two; or leave it out',
    )


def _only_in_a_pipeline(field: str) -> Conflict:
    return Conflict(
        field,
        lambda plan: _ranks(plan, "pp") == 1 and _changed(plan, field),
        f"{field} is set without a pipeline",
        hint='mesh={"pp": 2, "dp": -1} has two stages; or leave it out',
    )


def _of_gradients(field: str, value: str | bool) -> tuple[Conflict, Conflict]:
    """Return the conflicts of a field of `wire` that changes how gradients are sent."""

    def is_set(plan: Any) -> bool:
        return bool(getattr(plan.wire, field) == value)

    return (
        Conflict(
            f"wire.{field}",
            lambda plan: is_set(plan) and not plan.wire.reduces,
            f"wire.{field} is set, and gradients are sent as they are",
            hint='wire.reduce="int8" sends them in few bits; or leave it out',
        ),
        Conflict(
            f"wire.{field}",
            lambda plan: is_set(plan) and _ranks(plan, "pp") != 1,
            f"wire.{field} is set together with a pipeline",
            hint=LEAVE_OUT,
        ),
    )


def _wants_symbols(plan: Any) -> bool:
    return bool(sizes_in(plan.dynamic)) or plan.shapes == "dynamic" or hot_of(plan) is not None


def _padded_rows_are_split(plan: Any) -> bool:
    buckets = buckets_of(plan)
    rows = buckets is not None and any(0 in pad.dims for pad in buckets.padded().values())
    return rows and _ranks(plan, "pp") != 1 and plan.micro_batches != 1


def _declared_and_padded(plan: Any) -> bool:
    buckets = buckets_of(plan)
    padded = {(name, str(dim)) for name, pad in buckets.padded().items() for dim in pad.dims} if buckets else set()
    return any((name, dim) in padded for name, dims in sizes_in(plan.dynamic).items() for dim in dims)


def _fixed(where: str, when: Callable[[Any], bool], why: str) -> Conflict:
    """Return the conflict between sizes that differ from call to call and a field that makes all sizes numbers."""
    return Conflict(
        "shapes",
        lambda plan: _wants_symbols(plan) and when(plan),
        f"sizes are to differ from call to call in one program, and {where} is set",
        why=why,
        hint='shapes="static" or "auto" without dynamic: each size is a program of its own; pad batches to few lengths',
    )


def _not_with_signs(where: str, when: Callable[[Any], bool], what: str, why: str, hint: str) -> Conflict:
    """Return a conflict with an optimizer that, at some of its steps, shares signs instead of gradients."""
    return Conflict(where, lambda plan: isinstance(plan.optimizer, OneBitOptimizer) and when(plan), what, hint, why)


WITH_SIGNS = (
    _not_with_signs(
        "optimizer",
        lambda plan: plan.zero > 0,
        "a 1-bit optimizer takes gradients that are not reduced, and zero is {plan.zero}",
        "each rank has to keep whole momenta, and whole gradients until the update: other stages divide them",
        "zero=0, or an optimizer such as AdamW",
    ),
    _not_with_signs(
        "mesh",
        lambda plan: any(size != 1 for dim, size in plan.mesh.items() if dim != "dp"),
        "a 1-bit optimizer shares signs over the ranks of dp, and the mesh has others",
        "what it sends is summed over one dimension alone",
        'mesh={"dp": -1}',
    ),
    _not_with_signs(
        "grad_clip.error_if_nonfinite",
        _errs_if_nonfinite,
        "error_if_nonfinite is set together with a 1-bit optimizer",
        "at steps that share signs each rank clips its own gradient, and knows its norm alone",
        'on_nonfinite="stop", which all ranks decide',
    ),
    _not_with_signs(
        "wire",
        lambda plan: bool(plan.wire.compresses),
        "wire is set together with a 1-bit optimizer, which compresses what ranks share itself",
        "gradients are sent as they are only where they are to be exact",
        LEAVE_OUT,
    ),
    _not_with_signs(
        "offload",
        lambda plan: plan.offload.tier("optimizer") is not None,
        "offload.optimizer is set together with a 1-bit optimizer",
        "what it has not sent stays on the device",
        LEAVE_OUT,
    ),
    _not_with_signs(
        "ema",
        lambda plan: plan.ema is not None and isinstance(plan.optimizer, ZeroOneAdam),
        "ema is set together with ZeroOneAdam",
        "between two synchronizations each rank has weights of its own, and so would have averages",
        LEAVE_OUT,
    ),
)


def _not_with_local_steps(where: str, when: Callable[[Any], bool], what: str, why: str, hint: str) -> Conflict:
    return Conflict(where, lambda plan: plan.local_steps is not None and when(plan), what, hint, why)


WITH_LOCAL_STEPS = (
    _not_with_local_steps(
        "local_steps",
        lambda plan: "replicate" not in plan.mesh,
        "local_steps is set, and the mesh has no replicate",
        "the groups of ranks that train by themselves are those of mesh.replicate",
        'mesh={"replicate": 2, "dp": -1} has two groups, say of the devices of a node; or leave it out',
    ),
    _not_with_local_steps(
        "local_steps",
        lambda plan: plan.optimizer is None,
        "local_steps is set, but the plan has no optimizer",
        "groups come together in the update program",
        GIVE_OPTIMIZER,
    ),
    _not_with_local_steps(
        "local_steps",
        lambda plan: isinstance(plan.optimizer, OneBitOptimizer),
        "local_steps is set together with a 1-bit optimizer",
        "such an optimizer says itself at which steps all ranks share what",
        "an inner optimizer such as AdamW; or leave it out",
    ),
    _not_with_local_steps(
        "local_steps",
        lambda plan: _ranks(plan, "pp") != 1,
        "local_steps is set together with a pipeline",
        "the updates of a pipeline's stages share collectives, and would have to come together at once",
        LEAVE_OUT,
    ),
    _not_with_local_steps(
        "local_steps",
        lambda plan: _ranks(plan, "cp") != 1,
        "local_steps is set together with context parallelism",
        "nothing has compared such a group's steps with the algorithm's yet",
        'leave "cp" out of the mesh, or local_steps out',
    ),
    _not_with_local_steps(
        "ema",
        lambda plan: plan.ema is not None,
        "ema is set together with local_steps",
        "within a round each group of ranks has weights of its own, and so would have averages",
        LEAVE_OUT,
    ),
    _not_with_local_steps(
        "local_steps",
        lambda plan: plan.loss_scale() is not None,
        "local_steps is set together with a loss scale",
        "groups that train by themselves would skip steps, and scale losses, each for itself",
        'precision="bf16" needs no loss scale',
    ),
    _not_with_local_steps(
        "on_nonfinite",
        lambda plan: plan.on_nonfinite != "ignore",
        "on_nonfinite={plan.on_nonfinite!r} is set together with local_steps",
        "within a round no group knows of another's losses and gradients",
        LEAVE_OUT,
    ),
    _not_with_local_steps(
        "grad_clip.error_if_nonfinite",
        _errs_if_nonfinite,
        "error_if_nonfinite is set together with local_steps",
        "within a round each group of ranks knows the norm of its own gradients alone: one would stop, and others wait for it",
        LEAVE_OUT,
    ),
    _not_with_local_steps(
        "offload",
        lambda plan: any(plan.offload.tier(what) is not None for what in ("optimizer", "parameters")),
        "offload.optimizer or offload.parameters is set together with local_steps",
        "a round's end reads and writes weights and states twice, before and after groups come together: they stay on the device",
        'offload={"activations": "cpu"} alone; or leave it out',
    ),
    _not_with_local_steps(
        "wire.hierarchical",
        lambda plan: plan.wire.hierarchical,
        "wire.hierarchical is set together with local_steps",
        "gradients are not sent between groups of ranks then",
        'leave it out; local_steps.wire="int8" sends what groups have moved in few bits',
    ),
)


CONFLICTS = (
    Conflict(
        "dynamic",
        lambda plan: bool(sizes_in(plan.dynamic)) and plan.shapes == "static",
        'dynamic has sizes, and shapes is "static"',
        hint="leave one out",
    ),
    *(_fixed(*row) for row in FIXED_BY),
    Conflict(
        "dynamic",
        _declared_and_padded,
        "dynamic has a dimension for a symbol that shapes.pad pads",
        why="what is padded to buckets has one number in each program",
        hint="leave it out of one of them",
    ),
    Conflict(
        "shapes.pad",
        _padded_rows_are_split,
        "shapes.pad pads dimension 0, and a pipeline has micro-batches",
        why="a batch is cut into micro-batches after it is padded: rows of padding would be in some of them alone",
        hint="pad the other dimensions, and give batches whose rows micro_batches divides; or micro_batches=1",
    ),
    Conflict(
        "shapes.hot",
        lambda plan: hot_of(plan) is not None and _ranks(plan, "pp") != 1,
        "shapes has hot sizes, in a pipeline",
        why="a stage sends what the next one's program has for its input, and all stages would have to know which one runs",
        hint='shapes="auto": one program serves all sizes',
    ),
    Conflict(
        "wire.gather",
        lambda plan: plan.wire.gather != "same" and plan.zero == 0,
        "wire.gather sends weights in fewer bits, and zero is 0",
        why="every rank has all weights, and none is gathered",
        hint="zero=1 or more divides them; or leave gather out",
    ),
    Conflict(
        "wire.activations",
        lambda plan: (
            plan.wire.activations != "same" and all(_ranks(plan, dimension) == 1 for dimension in ("pp", "tp", "cp"))
        ),
        "wire.activations is set, but no ranks exchange activations",
        why="pipeline stages do, and ranks that divide layers (mesh.tp) or sequences (mesh.cp)",
        hint='mesh={"pp": 2, "dp": -1} has two stages; or leave it out',
    ),
    Conflict(
        "wire.auto",
        lambda plan: plan.wire.auto and (plan.wire.gather, plan.wire.reduce) != ("same", "same"),
        "wire.auto is set together with wire.gather or wire.reduce",
        why="it chooses both",
        hint=LEAVE_OUT,
    ),
    Conflict(
        "wire.max_error",
        lambda plan: plan.wire.auto and plan.wire.max_error is None,
        "wire.auto is set without wire.max_error",
        why="it chooses among the formats that are as right as the plan needs",
        hint="wire.max_error=0.005 allows bf16, and int8 for what is rounded once",
    ),
    Conflict(
        "wire.max_error",
        lambda plan: not plan.wire.auto and plan.wire.max_error is not None,
        "wire.max_error is set without wire.auto",
        why="the plan says itself in what formats values are sent",
        hint="wire.auto=True chooses them; or leave it out",
    ),
    Conflict(
        "wire.auto",
        lambda plan: plan.wire.auto and _ranks(plan, "pp") != 1,
        "wire.auto is set, in a pipeline",
        why="what a step takes depends on all stages, and each rank makes the programs of its own",
        hint="say wire.gather and wire.reduce; zgraph forecast shows what a step takes with them",
    ),
    *_of_gradients("error_feedback", True),
    *_of_gradients("rounding", "stochastic"),
    Conflict(
        "wire.secondary",
        lambda plan: plan.wire.secondary is not None and plan.zero != 3,
        "wire.secondary is set, and zero is {plan.zero}",
        why="the backward gathers weights again at stage 3 alone",
        hint="zero=3, or leave it out",
    ),
    Conflict(
        "wire.secondary",
        lambda plan: plan.wire.secondary is not None and _ranks(plan, "pp") != 1,
        "wire.secondary is set, in a pipeline",
        why="each micro-batch that a stage has under way would keep a copy",
        hint=LEAVE_OUT,
    ),
    Conflict(
        "wire.secondary",
        lambda plan: plan.wire.secondary is not None and plan.offload.tier("parameters") is not None,
        "wire.secondary is set, and offload.parameters as well",
        why="the copy would lie on the device that the weights are to leave",
        hint=LEAVE_OUT,
    ),
    Conflict(
        "wire.hierarchical",
        lambda plan: plan.wire.hierarchical and not plan.wire.reduces,
        "wire.hierarchical is set, and gradients are sent as they are",
        hint='wire.reduce="int4" sends them in few bits between groups; or leave it out',
    ),
    Conflict(
        "wire.hierarchical",
        lambda plan: plan.wire.hierarchical and _ranks(plan, "replicate") == 1,
        "wire.hierarchical is set, and mesh.replicate is 1",
        why="gradients are sent in few bits between groups of ranks, and there is one",
        hint='mesh={"replicate": 2, "dp": -1} has two groups, say of the devices of a node; or leave it out',
    ),
    Conflict(
        "wire.error_feedback",
        lambda plan: plan.wire.error_feedback and plan.optimizer is None,
        "wire.error_feedback is set, but the plan has no optimizer",
        why="what was not sent is part of the optimizer's state, and of checkpoints",
        hint=GIVE_OPTIMIZER,
    ),
    *WITH_LOCAL_STEPS,
    *WITH_SIGNS,
    Conflict(
        "lr_schedule",
        lambda plan: plan.lr_schedule is not None and plan.optimizer is None,
        "lr_schedule is set, but the plan has no optimizer",
        hint="give the plan an optimizer, or use a scheduler of torch.optim.lr_scheduler on your own",
    ),
    Conflict(
        "grad_clip.error_if_nonfinite",
        lambda plan: _errs_if_nonfinite(plan) and plan.loss_scale() is not None,
        "error_if_nonfinite is set together with a loss scale",
        why="gradients that overflow are how the scale is found; such steps are skipped and counted",
        hint="leave it out: at the smallest scale an error says so",
    ),
    Conflict(
        "on_nonfinite",
        lambda plan: plan.on_nonfinite != "ignore" and plan.optimizer is None,
        "on_nonfinite={plan.on_nonfinite!r} is set, but the plan has no optimizer",
        why="a step that is not finite is skipped by the update program, on all ranks alike",
        hint=GIVE_OPTIMIZER,
    ),
    Conflict(
        "grad_clip.error_if_nonfinite",
        lambda plan: plan.on_nonfinite != "ignore" and _errs_if_nonfinite(plan),
        "error_if_nonfinite is set together with on_nonfinite",
        why="both say what happens at such a step",
        hint='on_nonfinite="stop" alone: its error names the module as well',
    ),
    Conflict(
        "on_nonfinite",
        lambda plan: plan.on_nonfinite not in ("ignore", "skip") and plan.offload.late,
        "on_nonfinite={plan.on_nonfinite!r} is set together with late updates",
        why="the weights that such a step ran with are gone by then: it can't be run again",
        hint='on_nonfinite="skip", or leave out offload.delayed_after',
    ),
    Conflict(
        "ema",
        lambda plan: plan.ema is not None and plan.optimizer is None,
        "ema is set, but the plan has no optimizer",
        hint=GIVE_OPTIMIZER,
    ),
    *map(_only_at_stage_3, ("max_bytes", "spare_bytes", "ahead_bytes", "reuse_bytes")),
    Conflict(
        "offload.parameters",
        lambda plan: plan.offload.tier("parameters") is not None and plan.zero < 3,
        "offload.parameters is set, and zero is {plan.zero}",
        why="only stage 3 frees a weight after its use; the other stages keep what they gather",
        hint="zero=3 (in one process too), or leave it out",
    ),
    Conflict(
        "offload.optimizer",
        lambda plan: plan.offload.tier("optimizer") is not None and plan.optimizer is None,
        "offload.optimizer is set, but the plan has no optimizer",
        hint=GIVE_OPTIMIZER,
    ),
    Conflict(
        "offload.delayed_after",
        lambda plan: _stays(plan) and plan.offload.delayed_after is not None,
        "offload.delayed_after is set, but the optimizer's states stay on the device",
        hint=OFFLOAD_STATES,
    ),
    Conflict(
        "offload.ratio",
        lambda plan: _stays(plan) and plan.offload.ratio not in (None, 1.0),
        "offload.ratio is set, but the optimizer's states stay on the device",
        hint=OFFLOAD_STATES,
    ),
    Conflict(
        "numerics",
        lambda plan: plan.numerics is not None and not isinstance(plan.precision, str),
        "numerics names a system's precision, and precision is a record already",
        hint='leave numerics out, or say precision="bf16"',
    ),
    Conflict(
        "precision.accumulate",
        lambda plan: plan.optimizer is None and getattr(plan.precision, "accumulate", None) is not None,
        "precision.accumulate is set, but the plan has no optimizer",
        why="an optimizer of your own takes gradients in the dtype of their parameters",
        hint=GIVE_OPTIMIZER,
    ),
    Conflict(
        "precision.accumulate",
        lambda plan: plan.loss_scale() is not None and plan.resolved_precision().accumulate == "bfloat16",
        'precision.accumulate is "bfloat16" together with a loss scale',
        why="float16's gradients have more digits than bfloat16, and lose them",
        hint='accumulate="float32", or compute in bfloat16',
    ),
    Conflict(
        "micro_batches",
        _micro_batches_differ,
        "micro_batches is set together with elastic",
        why="how many there are follows from the ranks that there are",
        hint="leave it out; elastic.micro_batch bounds the rows of one",
    ),
    *map(_only_in_a_pipeline, ("schedule", "partition", "virtual_stages")),
    Conflict(
        "elastic",
        lambda plan: _ranks(plan, "pp") != 1 and plan.elastic is not None,
        "elastic is set together with a pipeline",
        why="how many micro-batches there are would change the schedule",
        hint=LEAVE_OUT,
    ),
    Conflict(
        "on_nonfinite",
        lambda plan: _ranks(plan, "pp") != 1 and plan.on_nonfinite != "ignore",
        "on_nonfinite is set together with a pipeline",
        why="the module that a step became infinite in is found by running it again, which stages can't do alone",
        hint=LEAVE_OUT,
    ),
    Conflict(
        "offload.delayed_after",
        lambda plan: _ranks(plan, "pp") != 1 and plan.offload.late,
        "offload.delayed_after is set together with a pipeline",
        hint=LEAVE_OUT,
    ),
    *(
        _only_with("tp", field, "weights")
        for field in ("tensor_parallel", "sequence_parallel", "async_tensor_parallel", "partition_activations")
    ),
    Conflict(
        "attention",
        lambda plan: (
            all(_ranks(plan, dim) != 1 for dim in ("tp", "cp")) and any(s.heads_differ for s in plan.attention.values())
        ),
        "heads have different layouts of attention, and both mesh.tp and mesh.cp divide the heads",
        why="a rank finds its heads by its place in one dimension of the mesh",
        hint='give all heads one layout (different_layout_per_head=False); or leave "tp" or "cp" out of the mesh',
    ),
    *(_only_with("cp", field, "a sequence") for field in ("sequence_dim", "context_attention")),
)
