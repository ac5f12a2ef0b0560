"""Builds what serves one input signature of a model in stages: its capture, its cut, and the programs of this rank's
own stages.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from zgraph.build.build_context import BuildContext
from zgraph.build.pass_pipeline import message_options
from zgraph.build.step_program import Serves, StepProgram
from zgraph.capture.capture import Trace, flat_values
from zgraph.errors import CaptureError, StepError
from zgraph.passes.analysis.costs import Costs
from zgraph.passes.compression.compress_messages import compressed_messages
from zgraph.passes.spmd.divide_context import refuse_without_attention
from zgraph.passes.stages.cut_points import Cuts, assign, find_cuts
from zgraph.passes.stages.cut_stages import Stages, cut_stages
from zgraph.passes.tiling.tile import check_names
from zgraph.plan.pipeline_schedules.dependencies import Needs
from zgraph.plan.pipeline_schedules.make_schedule import make_schedule
from zgraph.plan.pipeline_schedules.schedule import Schedule
from zgraph.plan.pipeline_schedules.validity import check
from zgraph.plan.plan import Plan
from zgraph.program.program import DATA_DIMS, InputRole, Program
from zgraph.stages.channels import Likes, Routes, likes_of
from zgraph.stages.memory_search import RankBudget
from zgraph.stages.rank_memory import memory_of_rank
from zgraph.torch_compat import inductor_code

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Capture:
    """The whole model, captured for one signature."""

    key: str  # of the signature
    trace: Trace  # what dynamo traced
    pattern: frozenset[int]  # the flat outputs that are differentiated
    joint: Program  # forward and backward as one graph
    seconds: float  # that the capture took
    of_loss: bool  # whether the loss chose `pattern`
    kept: Mapping[int, int]  # buffers that are kept, by flat output (see `Trace.buffers_kept`)
    # the dimension of each flat output that has a micro-batch's rows (see `zgraph.capture.batch.MicroBatch`)
    rows_of_outputs: Mapping[int, int | None]


@dataclass(frozen=True)
class Partition:
    """The cuts of a model, and which rank runs which stage in which order: the same on all ranks, and for all
    signatures.
    """

    cuts: Cuts  # where the model is cut
    schedule: Schedule  # each rank's actions, in order

    def holders(self, stages: Stages) -> dict[str, tuple[int, ...]]:
        """Return for each parameter the positions along "pp" of the ranks that store it."""
        return {
            name: tuple(sorted({self.schedule.rank_of[s] for s in stage_numbers}))
            for name, stage_numbers in stages.holders.items()
        }


@dataclass(frozen=True)
class RankStages:
    """The stages of a partition that a rank runs."""

    partition: Partition  # the cuts and the schedule
    position: int  # of the rank, along "pp"
    once: bool  # whether a step reduces gradients once, after its last backward


def needs_of(stages: Stages) -> Needs:
    """Return which stages send to which."""

    def senders(back: bool) -> tuple[tuple[int, ...], ...]:
        sources: list[set[int]] = [set() for _ in stages.programs]
        for transfer in stages.transfers:
            if transfer.back is back:
                sources[transfer.target].add(transfer.source)
        return tuple(tuple(sorted(f)) for f in sources)

    return Needs(senders(False), senders(True))


def partition(joint: Program, plan: Plan, ranks: int, costs: Costs, module: nn.Module) -> Partition:
    """Return where the plan cuts the captured program of `module`, for this number of ranks along "pp". Raises
    `PlanError` if it can't be cut so.
    """
    check_names(joint, plan.tiles)
    if plan.context_attention == "ring":
        refuse_without_attention(joint)  # (a single stage can't tell whether another one has attention)
    schedule = make_schedule(plan.schedule, ranks, plan.micro_batches, plan.virtual_stages)
    types = {path: type(child).__name__ for path, child in module.named_modules(remove_duplicate=False)}
    return Partition(find_cuts(joint, schedule.stages, plan.partition, costs, types=types), schedule)


def cut(joint: Program, partition: Partition, plan: Plan) -> Stages:
    """Return the stages' programs, and what they send each other as the plan says. Raises `PlanError` if the schedule
    would wait forever for it.
    """
    schedule = partition.schedule
    stages = cut_stages(joint, assign(joint, partition.cuts), schedule.stages)
    check(schedule, needs_of(stages))
    if plan.wire.activations == "same":
        return stages
    return compressed_messages(stages, schedule.rank_of, message_options(plan))


def reduces_once(plan: Plan, sizes: Mapping[str, int]) -> bool:
    """Return whether a step reduces its gradients once, after the backwards of all micro-batches. `sizes` is the mesh
    within a stage.
    """
    return plan.zero < 2 and math.prod(sizes.get(dim, 1) for dim in DATA_DIMS) > 1


def joint_of(trace: Trace, plan: Plan, name: str, pattern: frozenset[int]) -> Program:
    """Return the captured program in which these outputs are differentiated."""
    decompositions = inductor_code.inductor_decompositions() if plan.backend == "inductor" else {}
    return trace.joint(pattern, decompositions, name)


@contextlib.contextmanager
def without_fast_path() -> Iterator[None]:
    """Turn off the fast path of torch's encoder layers inside, so that they read their parameters one by one in
    evaluation too, as in training.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class Staged(Serves):
    """What serves one input signature on this rank; takes the place of `zgraph.build.step_program.Entry` if there are
    stages.
    """

    def __init__(
        self,
        name: str,
        shown: str,
        capture: Capture,
        rows: int,
        here: RankStages,
        context: BuildContext,
    ) -> None:
        self.name = name
        self.shown = shown  # the inputs, in words
        self.rows = rows  # of this rank's batch
        self.trace, self.pattern, self.capture_seconds = capture.trace, capture.pattern, capture.seconds
        self.kept, self.rows_of_outputs = capture.kept, capture.rows_of_outputs
        self.rows_by_place: Mapping[int, int | None] = {}  # see `zgraph.runtime.join_outputs`
        self.context = context
        partition = here.partition
        self.stages = cut(capture.joint, partition, context.plan)
        returned: Any = self.trace.flat.graph_module.graph.output_node().args[0]
        self.constants = [None if isinstance(n, fx.Node) else n for n in returned]
        loss = returned[self.trace.loss] if self.trace.loss is not None else None
        self.loss_dtype = self.trace.output_dtype or (
            loss.meta["example_value"].dtype if loss is not None else torch.float32
        )
        programs = {stage: self.stages.programs[stage] for stage in partition.schedule.stages_of(here.position)}
        memory = memory_of_rank(capture.joint, self.stages, partition.schedule, here.position)
        self.budget = RankBudget(memory, programs, context, here.once) if context.plan.memory_budget else None
        self.steps = {
            stage: StepProgram(
                program,
                context,
                functools.partial(self.budget.decision, stage) if self.budget is not None else None,
            )
            for stage, program in programs.items()
        }
        self._sizes = capture.joint.sizes.names
        self._likes_at = likes_of(self.stages.transfers, self._sizes)
        self.routes: dict[tuple[str, int], Routes] = {}  # by the schedule's name and its number of micro-batches
        # dimensions of flat outputs that have a padded size, with its name
        self.follows: Mapping[int, Mapping[int, str]] = {}
        self.seen = False  # whether a batch of this signature has been compared between the ranks of a pipeline
        self.settled = self.unsettled = self.unsettled_before = False
        self.only = {}

    def likes(self, flat: Sequence[Any]) -> Likes:
        """Return the shapes of the transfers between stages in a call with these flat inputs. Raises `SignatureError`
        for sizes that the programs do not take.
        """
        step = self.program()
        return self._likes_at(tuple(step.sizes_of_call(flat).values()) if self._sizes else ())

    def program(self) -> StepProgram:
        """Return the program of this rank's first stage."""
        return next(iter(self.steps.values()))

    def programs(self) -> list[StepProgram]:
        return list(self.steps.values())


def loss_pattern(
    trace: Trace, loss_of: Callable[[Any], torch.Tensor] | None, module: nn.Module, args: Any, kwargs: Any
) -> frozenset[int]:
    """Return the flat outputs that a step differentiates: the model's own loss, else the outputs that `loss_of` reads
    (it is run on zeros). Raises `StepError` if `loss_of` reads parameters: only the last stage's ranks would have their
    gradients.
    """
    if loss_of is None or not trace.differentiable:
        return trace.pattern
    returned: Any = trace.flat.graph_module.graph.output_node().args[0]
    shape = trace.shapes_in(trace.flat.flatten(module, args, kwargs))
    with torch.enable_grad():
        values = [
            torch.zeros(shape(v), dtype=v.dtype, device=v.device).requires_grad_(i in trace.differentiable)
            if isinstance(v, torch.Tensor)
            else v
            for i, v in enumerate(n.meta["example_value"] if isinstance(n, fx.Node) else n for n in returned)
        ]
        with trace.flat.effects.undone():
            loss = loss_of(trace.flat.around(lambda *_: values, module, args, kwargs))
        _refuse_own_parameters(loss, values)
        wanted = sorted(trace.differentiable)
        gradients = torch.autograd.grad(loss, [values[i] for i in wanted], allow_unused=True)
    return frozenset(i for i, g in zip(wanted, gradients, strict=True) if g is not None)


def refuse_state(
    traced: Trace, again: Callable[[], Trace], micro_batches: int, module: nn.Module, args: Any, kwargs: Any
) -> dict[int, int]:
    """Raise `CaptureError` if the forward changes Python state or replaces tensors in a way that the programs of stages
    can't follow. `again` captures it in the state after a call. Return the buffers that are kept, by flat output (see
    `Trace.buffers_kept`).
    """
    kept_buffers = traced.buffers_kept(module, args, kwargs)
    if micro_batches > 1 and not traced.flat.effects.is_empty:
        _refuse_changing(traced, again, module, args, kwargs)
    _refuse_carried(traced, kept_buffers, module, args, kwargs)
    return kept_buffers


def _refuse_changing(first: Trace, again: Callable[[], Trace], module: nn.Module, args: Any, kwargs: Any) -> None:
    """Raise `CaptureError` for a forward that changes, in every call, Python state that it depends on: a step runs one
    program for all of its micro-batches. (One change is fine: a model may finish its construction so.) `again` captures
    it in the state after a call.
    """
    with left_by(first, module, args, kwargs) as stale:
        if stale is None or not stale.lasts:
            return
        with left_by(again(), module, args, kwargs) as stale:
            if stale is None or not stale.lasts:
                return
    raise CaptureError(
        "the model's forward changes Python state that it depends on, in a pipeline with several micro-batches",
        where=stale.where,
        why=f"no longer true after the first of them: {stale.what}",
        hint="keep such state in a buffer (register_buffer), or change it outside of forward",
    )


@contextlib.contextmanager
def left_by(trace: Trace, module: nn.Module, args: Any, kwargs: Any) -> Iterator[Any]:
    """Put Python's state as a call leaves it inside; yields what of it the program does not fit any more, or None."""
    values = flat_values(trace.flat)
    with trace.flat.effects.undone():
        trace.flat.around(lambda *_: values, module, args, kwargs)
        yield trace.flat.stale(module, args, kwargs)


def _refuse_carried(trace: Trace, kept: Mapping[int, int], module: nn.Module, args: Any, kwargs: Any) -> None:
    """Raise `CaptureError` for a forward that reads a tensor of the model and replaces it by another: the programs of
    all micro-batches would read the tensor from before the step, and only the rank with the last stage would have the
    new one. (Buffers in `kept` stay the same tensors.)
    """
    flat = trace.flat
    if flat.effects.is_empty:
        return
    returned: Any = flat.graph_module.graph.output_node().args[0]
    fakes = [n.meta["example_value"] if isinstance(n, fx.Node) else n for n in returned]
    before = flat.flatten(module, args, kwargs)
    shape = trace.shapes_in(before)
    outputs = [
        torch.zeros(shape(v), dtype=v.dtype, device=v.device) if isinstance(v, torch.Tensor) else v for v in fakes
    ]
    outputs_elsewhere = [None if isinstance(v, torch.Tensor) else v for v in fakes]
    for at, buffer in kept.items():
        outputs[at] = outputs_elsewhere[at] = before[buffer]

    def replayed(values: list[Any]) -> tuple[str | None, str | None]:
        """Return, for the model after a call with these outputs: (the state that differs from the capture, else None;
        if none does, the name of a tensor that was replaced).
        """
        with flat.effects.undone():
            flat.around(lambda *_: values, module, args, kwargs)
            stale = flat.stale(module, args, kwargs)
            if stale is not None:
                return (stale.what if stale.lasts else None), None
            kinds, tensors = (InputRole.BUFFER, InputRole.CONSTANT), len(before) - flat.number_inputs
            after = flat.flatten(module, args, kwargs)
            moved = (i for i in range(tensors) if before[i] is not after[i] and trace.inputs[i].role in kinds)
            return None, next((trace.source(i) for i in moved), None)

    stale, carried_state = replayed(outputs)
    # (if it is the same with and without tensors, a flag say, all ranks have it)
    if stale is not None and stale != replayed(outputs_elsewhere)[0]:
        carried_state = stale
    if carried_state is not None:
        raise CaptureError(
            f"the model's forward reads a tensor and replaces it, in a pipeline ({carried_state})",
            where="mesh.pp",
            why="all micro-batches would read what was there before the step, and ranks of other stages never see what is put there",
            hint="make it in __init__; or keep it in a buffer (register_buffer) that forward writes to in place (self.state.copy_(…))",
        )


def _refuse_own_parameters(loss: torch.Tensor, values: Sequence[Any]) -> None:
    given = {id(v) for v in values}
    seen: set[Any] = set()
    stack = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) not in given and hasattr(node, "variable"):
            raise StepError(
                "loss_fn reads parameters that want gradients",
                where="mesh.pp",
                why="it runs on the ranks with the last stage alone, outside of the programs",
                hint="let the model compute what has parameters, its loss too",
            )
        stack += [following for following, _ in node.next_functions]
