"""Runs one training step of a model in stages, or a forward alone: cuts the batch, runs the schedule, and joins the
output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from zgraph.capture.batch import Call
from zgraph.capture.call_signature import batch_rows, batch_size
from zgraph.errors import CaptureError, StepError, UnsupportedError
from zgraph.parameters.replaced_parameters import refuse_hooks
from zgraph.plan.pipeline_schedules.actions import Action, Kind
from zgraph.plan.pipeline_schedules.schedule import Schedule
from zgraph.runtime.join_outputs import join_outputs, rows_by_place
from zgraph.runtime.train_step import (
    cut_batch,
    for_forward,
    in_order,
    loss_of,
    named,
    no_loss,
    refuse_rest,
    target_weights,
)
from zgraph.stages.runtime import PipelineRuntime
from zgraph.stages.stage_programs import Staged


def train_step(
    runtime: PipelineRuntime, loss_fn: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run one whole training step (see `zgraph.api.handle.Handle.train_step`)."""
    refuse_hooks(runtime.shards.params())
    _refuse_module_hooks(runtime.module)
    if runtime.buckets is not None and loss_fn is not None:
        raise StepError(
            "a loss_fn can't have outputs without padding, in a pipeline",
            where="shapes.buckets",
            why="the targets that it takes besides would be of another size than what the last stage gives",
            hint="give the labels to forward, and let it compute the loss; or pad in the collator",
        )
    with (
        runtime.padded(args, in_order(runtime, kwargs)) as (args, kwargs),
        runtime.beside_batch.step(runtime.plan.micro_batches),
    ):
        return _train_step(runtime, loss_fn, args, kwargs)


def _train_step(
    runtime: PipelineRuntime, loss_fn: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    plan = runtime.plan
    calls = cut_batch(runtime, args, kwargs, plan.micro_batches, uneven=None)
    given = [for_forward(runtime, *call) for call in calls]
    runtime.beside = given[0][1:]
    staged = _entry(runtime, [call for call, _, _ in given])
    runtime.refuse_other_batch(staged, calls[0])
    if not staged.pattern:
        raise StepError(
            "train_step was called while gradients are disabled", hint="call train_step outside of torch.no_grad()"
        )
    if loss_fn is None:  # (checked on all ranks: the one with the last stage must not find out alone)
        call, rest, others = given[0]
        refuse_rest(named(runtime, call), rest, others)
        if staged.trace.loss is None:
            raise no_loss()
    tokens = plan.loss_average == "token"
    weights = target_weights(runtime, calls, staged.trace.ignored) if tokens else [1.0 / len(calls)] * len(calls)
    flats = [staged.trace.flat.flatten(runtime.module, *call) for call, _, _ in given]
    runtime.refuse_aliases(staged, flats)

    def tangents_of(number: int, values: list[Any]) -> dict[int, torch.Tensor]:
        call, rest, others = given[number]
        if loss_fn is None:
            (at,) = staged.pattern
            return {at: torch.as_tensor(weights[number], dtype=values[at].dtype, device=values[at].device)}
        leaves = {i: values[i].detach().requires_grad_() for i in sorted(staged.pattern)}
        seen = [leaves.get(i, v) for i, v in enumerate(values)]
        flat = staged.trace.flat
        with torch.enable_grad(), flat.effects.undone():  # (they take effect when the outputs are put together)
            output = flat.around(lambda *_: seen, runtime.module, *call)
            loss = loss_of(output, loss_fn, named(runtime, call), rest, others)
            scaled = torch.as_tensor(weights[number], dtype=loss.dtype, device=loss.device)
            grads = torch.autograd.grad(loss, list(leaves.values()), scaled, allow_unused=True)
        return {
            i: torch.zeros_like(leaf) if grad is None else grad
            for (i, leaf), grad in zip(leaves.items(), grads, strict=True)
        }

    with runtime.board.watched() as marker:
        outputs = runtime.run(staged, runtime.partition.schedule, flats, tangents_of, marker)
        rows = batch_rows(*calls[0]) if staged.open else staged.rows
        runtime.samples += rows * len(calls) * runtime.data_ranks()
        if plan.optimizer is not None:
            runtime.updater.step()
        else:
            runtime.updater.clip_only()
        _complete(runtime, staged, flats, outputs)
    total = sum(weights)
    shares = [w / total for w in weights] if total else [1.0 / len(calls)] * len(calls)
    return _joined(runtime, staged, [call for call, _, _ in given], outputs, shares)


def compile_first(runtime: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Compile what a step takes for a batch of these arguments."""
    with runtime.padded(args, in_order(runtime, kwargs)) as (args, kwargs):
        call = cut_batch(runtime, args, kwargs, runtime.plan.micro_batches, uneven=None)[0]
        given, *runtime.beside = for_forward(runtime, *call)
        _entry(runtime, [given])


def refuse_gradients() -> None:
    """Raise `StepError` for a forward alone with gradients enabled."""
    if torch.is_grad_enabled():
        raise StepError(
            "a model in stages can't run a forward with gradients by itself",
            where="mesh.pp",
            why="its backward would have to go through all stages in turn",
            hint="model.train_step(…) is a whole step; under torch.no_grad() the forward runs alone",
        )


def forward_only(runtime: PipelineRuntime, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the model's output without gradients: the loss, if it has one, on all ranks; other tensors on the ranks
    with the last stage, None on the others. The batch is cut into the plan's micro-batches if their number divides it,
    else it goes through whole. Raises `StepError` if gradients are enabled.
    """
    refuse_gradients()
    with (
        runtime.padded(args, in_order(runtime, kwargs)) as batch,
        runtime.beside_batch.step(runtime.plan.micro_batches),
    ):
        return _forward_only(runtime, *batch)


def _forward_only(runtime: PipelineRuntime, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    size, parts = batch_size(args, kwargs), runtime.plan.micro_batches
    parts = parts if size is not None and size % parts == 0 else 1
    calls = cut_batch(runtime, args, kwargs, parts, uneven=None)
    staged = _entry(runtime, calls)
    runtime.refuse_other_batch(staged, calls[0])
    flats = [staged.trace.flat.flatten(runtime.module, *call) for call in calls]
    runtime.refuse_aliases(staged, flats)
    with runtime.board.watched() as marker:
        outputs = runtime.run(staged, _forwards(runtime.partition.schedule, len(calls)), flats, None, marker)
        _complete(runtime, staged, flats, outputs)
    return _joined(runtime, staged, calls, outputs, [1.0 / len(calls)] * len(calls))


def _refuse_module_hooks(module: nn.Module) -> None:
    """Raise `UnsupportedError` for hooks on the compiled model itself: a step in stages runs its stages' programs and
    does not call it.
    """
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise UnsupportedError(
            "the model has hooks of its own, in a pipeline",
            where="mesh.pp",
            why="train_step runs the programs of its stages, and does not call the model, which calls hooks",
            hint="put hooks on modules inside of it, which are part of its forward; or do before and after train_step what they do",
        )


def _complete(
    runtime: PipelineRuntime, staged: Staged, flats: Sequence[Sequence[Any]], outputs: list[list[Any]]
) -> None:
    """Complete the outputs on each rank: with the micro-batches' losses, which only the last stage's rank has so far;
    with the buffers that forward keeps, as this rank has written them; and cut off the padding.
    """
    at = staged.trace.loss
    if at is not None:
        for values, loss in zip(outputs, runtime.everywhere([values[at] for values in outputs]), strict=True):
            values[at] = loss.to(staged.loss_dtype)
    for values, flat in zip(outputs, flats, strict=True):
        for number, buffer in staged.kept.items():
            values[number] = flat[buffer]
        if runtime.buckets is not None:
            for number, cut in runtime.buckets.cuts(staged.follows, values, copied=staged.trace.loss is None).items():
                values[number] = cut.of(values[number])


def _entry(runtime: PipelineRuntime, calls: Sequence[Call]) -> Staged:
    runtime.board.refuse_broken()
    runtime.end_own_step()
    runtime.tell_place(0)
    staged: Any = runtime.entry(*calls[0])[1]
    runtime.entered = staged
    if len(calls) > 1 and staged.trace.flat.takes_numbers:
        raise CaptureError(
            "a Python number that forward changes is used in its computation, in a pipeline with several micro-batches",
            where="mesh.pp",
            why="the inputs of all micro-batches are read before the first has changed it",
            hint="keep it in a buffer (register_buffer), or change it outside of forward",
        )
    return staged  # type: ignore[no-any-return]


def _joined(
    runtime: PipelineRuntime, staged: Staged, calls: Sequence[Call], outputs: list[list[Any]], shares: Sequence[float]
) -> Any:
    results = [
        staged.trace.flat.around(lambda *_, values=values: values, runtime.module, *call)
        for call, values in zip(calls, outputs, strict=True)
    ]
    if not staged.settled:
        runtime.settle(staged, *calls[0])
    is_part = runtime.beside_batch.is_part
    staged.rows_by_place = rows_by_place(results[-1], outputs[-1], staged.rows_of_outputs, calls[-1], is_part)
    return join_outputs(results, shares, [batch_size(*call) for call in calls], staged.rows_by_place)


def _forwards(schedule: Schedule, micro_batches: int) -> Schedule:
    """Return a schedule of the forwards alone, in the same order; for another number of micro-batches, stage by
    stage.
    """
    if micro_batches == schedule.micro_batches:
        rows = tuple(tuple(a for a in schedule.of(rank) if a.kind is Kind.F) for rank in range(schedule.ranks))
    else:
        rows = tuple(
            tuple(Action(Kind.F, s, m) for s in schedule.stages_of(rank) for m in range(micro_batches))
            for rank in range(schedule.ranks)
        )
    return Schedule("forward", micro_batches, schedule.rank_of, rows)
