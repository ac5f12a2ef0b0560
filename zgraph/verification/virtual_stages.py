"""Run a pipeline's step on virtual ranks in one process and compare it with the plain model, for `zgraph.verify` and a
plan with "pp".

All stages' programs run on all their ranks, in an order that the plan's schedule allows. Besides outputs, gradients and
buffers, all values that cross between stages are compared with those of the captured program, cut into stages and run
before any pass. So the stage at fault is known: it is the stage of the first wrong value, since later ones may follow
from it.

Each stage draws the random numbers that the plain model draws there. (Real ranks draw numbers of their own.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from zgraph.build.pass_pipeline import Variant
from zgraph.build.step_program import StepProgram
from zgraph.codegen.accumulate import summing
from zgraph.codegen.partition import Parts, split
from zgraph.forecast.pipeline_plan import planned_stages
from zgraph.plan.pipeline_schedules.actions import Action, Kind
from zgraph.program.groups import positions_of
from zgraph.program.program import STAGE_DIM, InputRole, OutputRole, Program
from zgraph.program.tolerance import Difference, difference, norm_of
from zgraph.stages.module_buffers import Buffers
from zgraph.stages.stage_tasks import StageTask, stage_tasks
from zgraph.verification.replay import replay
from zgraph.verification.virtual_ranks import coordinates, run_virtual
from zgraph.verification.virtual_step import (
    HANDED,
    SCALE,
    PlainRun,
    VirtualStep,
    allowing,
    mean_of,
    named,
    part_of,
    shard_of,
)

__all__ = ["VirtualPipeline"]

Row = list[torch.Tensor]
"""A value on each rank of a stage."""

AHEAD, BACK = "value for later stages", "gradient for earlier stages"
PART = "part of a gradient"
_CROSSING: dict[InputRole | OutputRole, str] = {OutputRole.SENT: AHEAD, OutputRole.RETURNED: BACK}
_ARRIVES: dict[InputRole | OutputRole, InputRole] = {
    OutputRole.SENT: InputRole.RECEIVED,
    OutputRole.RETURNED: InputRole.RETURNED,
}


class VirtualPipeline:
    """The stages of `step`, whose plan has a pipeline. Raises what `planned_stages` does, and `UnsupportedError` if one
    rank would read a buffer that another changes."""

    def __init__(self, step: VirtualStep) -> None:
        self.step = step
        self.planned = planned_stages(step.model, step.plan, (), step.world, step.costs, captured=step.step.captured)
        self.stages, self.schedule = self.planned.stages, self.planned.partition.schedule
        Buffers().note(step.entry.name, self.stages.programs, self.schedule.rank_of)
        self.width = len(step.ranks)
        inner = {tuple(coordinates(step.sizes, r).values()): r for r in range(self.width)}
        self._rank = {}  # the rank's number, by (position along "pp", rank within a stage)
        for rank in range(step.world):
            at = coordinates(step.mesh, rank)
            position = at.pop(STAGE_DIM)
            self._rank[position, inner[tuple(at.values())]] = rank
        self._found: list[Difference] = []

    @cached_property
    def differences(self) -> list[Difference]:
        """The differences of a step from the plain model: values that cross and outputs in the order they are made,
        then gradients and buffers."""
        duty = {s: d for p in range(self.schedule.ranks) for s, d in stage_tasks(self.schedule, p).items()}
        workers = [_Worker(self, stage, step, duty[stage]) for stage, step in enumerate(self.planned.steps)]
        replay(self.schedule, self.stages, lambda action, came: workers[action.stage].run(action, came))
        if self.step.step.differentiated:
            self._compare_gradients([w.gradients for w in workers])
        for stage, worker in enumerate(workers):
            for name in worker.changed:
                for rank, run in enumerate(self.step.calls[-1]):
                    mine, plain = worker.buffers[rank][name], run.buffers[name]
                    self._compare("buffer", name, stage, rank, mine, plain, norm_of(run.buffers.values()))
                    self._allow(name, [[run]])
        return self._settled()

    def _settled(self) -> list[Difference]:
        """Return the differences. If all results of the step are right within rounding, differences of values on the
        way are accepted as rounding."""
        between = (AHEAD, BACK, PART)
        if not all(d.ok for d in self._found if d.what not in between):
            return self._found
        rounded = [d.what in between and math.isfinite(d.error) for d in self._found]
        return [
            replace(d, allowed=max(d.allowed, d.error)) if r else d for d, r in zip(self._found, rounded, strict=True)
        ]

    # -- what it is compared with -------------------------------------------------------------------------------------
    @cached_property
    def expected(self) -> _Captured:
        """The results of the captured stages."""
        return _Captured(self)

    def _compare(
        self, what: str, name: str, stage: int, rank: int, mine: Any, plain: Any, norm: float = 0.0, low: Any = None
    ) -> None:
        at = self._rank[self.schedule.rank_of[stage], rank]
        self._found.append(difference(what, name, at, mine, plain, norm, low, stages=(stage,)))

    def _allow(self, name: str, runs: Sequence[Sequence[PlainRun]], size: float | None = None) -> None:
        """Let the last difference be as large as the plain model's own rounding error: see `allowing`."""
        self._found[-1] = allowing(self._found[-1], name, runs, size)

    def made(self, stage: int, micro_batch: int, program: Program, values: Sequence[Sequence[Any]]) -> None:
        """Compare what a stage has made for a micro-batch, rank by rank."""
        low = self.step.plan.resolved_precision().dtype("compute")
        suffix = f", micro-batch {micro_batch}" if len(self.step.calls) > 1 else ""
        for rank, (run, row) in enumerate(zip(self.step.calls[micro_batch], values, strict=True)):
            for port, value in zip(program.outputs, row, strict=True):
                if port.role in _CROSSING:
                    what, name = _CROSSING[port.role], port.name + suffix
                    plain = self.expected.crossing[what, port.name, micro_batch][rank]
                    norm = self.expected.norms[what, micro_batch][rank]
                    self._compare(what, name, stage, rank, value, plain, norm, low)
            for (what, name), value in named(program, run, row).items():
                if what == "output":
                    # (relative to all outputs: the mean of centred values, for example, is only rounding)
                    norm = norm_of(run.plain.values())
                    self._compare(what, name + suffix, stage, rank, value, run.plain[name], norm, low)
                    self._allow(name, [[run]])
                elif what == "kept weight":
                    spec = self.step.specs[name]
                    whole = part_of(self.step.params[name], spec, rank, self.step.sizes).to(spec.compute_dtype)
                    self._compare(what, name, stage, rank, value, whole)

    def _compare_gradients(self, gradients: list[list[dict[str, torch.Tensor]]]) -> None:
        """Compare the gradients. `gradients` are each stage's sums over micro-batches on each of its ranks."""
        step = self.step
        own = {n: [[r.grads.get(n) for r in calls] for calls in step.calls] for n in step.params}
        wholes = {n: self._whole(n, g) for n, g in own.items() if all(x is not None for row in g for x in row)}  # type: ignore[arg-type]
        norm = norm_of(wholes.values())
        reached = {name for of_stage in gradients for name in of_stage[0]}
        for name in sorted(wholes.keys() ^ reached):
            how = "missing" if name in wholes else "should not be there"
            at = self.stages.holders[name]
            rank = self._rank[self.schedule.rank_of[at[0]], 0]
            self._found.append(Difference("gradient", f"{name} ({how})", rank, float("inf"), 0.0, False, at))
        for name in sorted(wholes.keys() & reached):
            at, low = self.stages.holders[name], step.specs[name].compute_dtype
            for stage in at if len(at) > 1 else ():
                part = self._whole(name, self.expected.gradients[stage, name])
                for rank in range(self.width):
                    plain = self._held(name, part, rank)
                    self._compare(PART, name, stage, rank, gradients[stage][rank].get(name), plain, norm, low)
            for rank in range(self.width):
                plain = self._held(name, wholes[name], rank)
                total = self._total(name, [of_stage[rank] for of_stage in gradients])
                for position in sorted({self.schedule.rank_of[s] for s in at}):
                    number = self._rank[position, rank]
                    self._found.append(difference("gradient", name, number, total, plain, norm, low, stages=at))
                    runs = [list(calls) for calls in zip(*step.calls, strict=True)]
                    self._allow(name, runs, float(wholes[name].double().norm()))

    def _held(self, name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the part of a whole gradient that a rank of a stage holds."""
        spec, sizes = self.step.specs[name], self.step.sizes
        return shard_of(part_of(whole, spec, rank, sizes), spec, rank, sizes)

    def _total(self, name: str, gradients: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
        """Return a gradient's sum over stages, in the order in which the ranks that hold the parameter add: first over
        each rank's own stages, then over ranks."""
        owned = next(h for h in self.planned.held if name in h.own)
        group = owned.tied.get(name)
        mesh = {STAGE_DIM: self.schedule.ranks}
        positions = positions_of(group, mesh) if group is not None else range(self.schedule.ranks)
        sums = []
        for position in positions:
            grads = [gradients[s][name] for s in self.schedule.stages_of(position) if name in gradients[s]]
            if grads:
                sums.append(_sum(grads))
        return _sum(sums)

    def _whole(self, name: str, grads: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """Return the whole gradient from those of each micro-batch on each rank (by micro-batch, then rank), added in
        the order of a step."""
        spec, sizes = self.step.specs[name], self.step.sizes
        if self.planned.once and len(grads) > 1:
            sums = [_sum([row[rank].to(spec.grad_dtype) for row in grads]) for rank in range(self.width)]
            return mean_of(sums, sizes, spec)[0].to(spec.grad_dtype)
        return _sum([mean_of(row, sizes, spec)[0].to(spec.grad_dtype) for row in grads])


class _Worker:
    """One stage in one step on all of its ranks at once, as `zgraph.stages.worker.Worker` is on one."""

    def __init__(self, pipeline: VirtualPipeline, stage: int, step: StepProgram, duty: StageTask) -> None:
        self.pipeline = pipeline
        self.stage = stage
        self.step = step
        self.duty = duty
        width = pipeline.width
        self.gradients: list[dict[str, torch.Tensor]] = [{} for _ in range(width)]
        self.buffers = [_own_buffers(pipeline.step) for _ in range(width)]
        self.changed: dict[str, None] = {}
        self._kept: list[dict[tuple[Any, str], Any]] = [{} for _ in range(width)]
        self._batches: dict[int, list[dict[tuple[Any, str], Any]]] = {}

    def run(self, action: Action, came: dict[str, Row]) -> dict[str, Row]:
        """Run an action with the values that came from other stages; return those that it sends."""
        if action.kind is Kind.F:
            batch: list[dict[tuple[Any, str], Any]] = [
                {(InputRole.RECEIVED, name): row[rank] for name, row in came.items()}
                for rank in range(self.pipeline.width)
            ]
            self._batches[action.micro_batch] = batch
            parts = self.step.parts(Variant(gathered_before=bool(self._kept[0])))
            for ahead in parts.ahead:
                self._run(action, ahead, None)
            states = self.pipeline.expected.random[self.stage, action.micro_batch, Kind.F]
            return self._run(action, parts.forward, states)
        if not self.step.differentiated:  # (everything in and before this stage is frozen)
            return {}
        for rank, batch_here in enumerate(self._batches[action.micro_batch]):
            batch_here |= {(InputRole.RETURNED, name): row[rank] for name, row in came.items()}
        reduce, accumulated = self.duty.reduction(action, self.pipeline.planned.once, bool(self.gradients[0]))
        parts = self.step.parts(Variant(self.step.keeps, reduce, accumulated), apart=action.kind is not Kind.B)
        part_here = parts.weights if action.kind is Kind.W else parts.backward
        if part_here is None:
            return {}
        adds = action.kind is not Kind.I and bool(self.gradients[0]) and not accumulated
        states = self.pipeline.expected.random[self.stage, action.micro_batch, Kind.B]
        return self._run(action, summing(part_here) if adds else part_here, states, adds)

    def _run(self, action: Action, part: Program, states: Row | None, adds: bool = False) -> dict[str, Row]:
        """Run a part of the stage's program. `adds`: add its gradients to the earlier micro-batches' (the offloaded
        ones only, if the part adds the others itself)."""
        whole, number = self.pipeline.step, action.micro_batch
        batch, runs = self._batches[number], whole.calls[number]
        given = []
        for rank, run in enumerate(runs):
            sums = {(InputRole.ACCUMULATOR, n): g for n, g in self.gradients[rank].items()}
            buffers = {(InputRole.BUFFER, n): b for n, b in self.buffers[rank].items()}
            extra = batch[rank] | self._kept[rank] | buffers | sums
            given.append([whole.input_of(port, node, rank, run, part, extra) for port, node in part.input_items()])
        values = run_virtual(part, given, states, whole.watch)
        self.pipeline.made(self.stage, number, part, values)
        sent: dict[str, Row] = {}
        for rank, row in enumerate(values):
            for port, value in zip(part.outputs, row, strict=True):
                if port.role in _ARRIVES:
                    sent.setdefault(port.name, []).append(
                        self._arrived(port.name, port.role is OutputRole.RETURNED, value)
                    )
                elif port.role is OutputRole.UNSHARDED:
                    self._kept[rank][InputRole.UNSHARDED, port.name] = value
                elif port.role in HANDED:
                    batch[rank][HANDED[port.role], port.name] = value
                elif port.role is OutputRole.GRADIENT:
                    before = self.gradients[rank].get(port.name) if adds else None
                    self.gradients[rank][port.name] = value.clone() if before is None else before + value
                elif port.role is OutputRole.MUTATION:
                    if port.of is InputRole.BUFFER:
                        self.buffers[rank][port.name].copy_(value)
                        self.changed[port.name] = None
                    else:
                        batch[rank][port.of, port.name] = value
        return sent

    def _arrived(self, name: str, back: bool, value: torch.Tensor) -> torch.Tensor:
        """Return what was sent, in memory of its own and with the strides that the receiver expects."""
        like = next(t.like for t in self.pipeline.stages.transfers if t.name == name and t.back is back)
        return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype).copy_(value)


class _Captured:
    """The results of the stages as they were cut, before any pass. `crossing`: by kind, name and micro-batch;
    `gradients`: of each stage and parameter, by micro-batch and rank; `random`: the random states at the start of each
    forward and backward; `norms`: by rank, of all values that go to later or to earlier stages."""

    def __init__(self, pipeline: VirtualPipeline) -> None:
        self.pipeline = pipeline
        self.crossing: dict[tuple[str, str, int], Row] = {}
        self.gradients: dict[tuple[int, str], list[Row]] = {}
        self.random: dict[tuple[int, int, Kind], Row] = {}
        self.norms: dict[tuple[str, int], list[float]] = {}
        self._buffers = [_own_buffers(pipeline.step) for _ in range(pipeline.width)]
        # (gradients are multiplied by the loss scale here if they are in the finished programs)
        finished = (step.history().program for step in pipeline.planned.steps)
        self._scale = SCALE if any(p.role is InputRole.SCALE for program in finished for p in program.inputs) else 1.0
        parts = [split(program) for program in pipeline.stages.programs]
        for number in range(len(pipeline.step.calls)):
            self._run(number, parts)

    def _run(self, number: int, parts: Sequence[Parts]) -> None:
        step = self.pipeline.step
        states = step.random_states(number)
        there: list[dict[tuple[Any, str], Any]] = []
        for rank, run in enumerate(step.calls[number]):
            tangents = {(InputRole.TANGENT, f"output_{i}"): t * self._scale for i, t in run.tangents.items()}
            there.append(tangents | {(InputRole.BUFFER, n): b for n, b in self._buffers[rank].items()})
        own: list[list[dict[tuple[Any, str], Any]]] = [[{} for _ in there] for _ in parts]
        order = [(s, part.forward, Kind.F) for s, part in enumerate(parts)]
        order += [
            (s, part.backward, Kind.B) for s, part in reversed(list(enumerate(parts))) if part.backward is not None
        ]
        for stage, program, kind in order:
            self.random[stage, number, kind] = [s.clone() for s in states]
            given = [
                [
                    step.input_of(port, node, rank, run, program, there[rank] | own[stage][rank])
                    for port, node in program.input_items()
                ]
                for rank, run in enumerate(step.calls[number])
            ]
            for rank, row in enumerate(run_virtual(program, given, states)):
                for port, value in zip(program.outputs, row, strict=True):
                    if port.role in _ARRIVES:
                        self.crossing.setdefault((_CROSSING[port.role], port.name, number), []).append(value)
                        there[rank][_ARRIVES[port.role], port.name] = value
                    elif port.role in HANDED:
                        own[stage][rank][HANDED[port.role], port.name] = value
                    elif port.role is OutputRole.GRADIENT:
                        rows = self.gradients.setdefault((stage, port.name), [[] for _ in step.calls])
                        rows[number].append(value / self._scale)
                    elif port.role is OutputRole.MUTATION and port.of is InputRole.BUFFER:
                        self._buffers[rank][port.name].copy_(value)
                    elif port.role is OutputRole.MUTATION:
                        there[rank][port.of, port.name] = value
        for way in (AHEAD, BACK):
            rows = [row for (what, _, at), row in self.crossing.items() if what == way and at == number]
            self.norms[way, number] = [norm_of(row[rank] for row in rows) for rank in range(len(there))]


def _own_buffers(step: VirtualStep) -> dict[str, torch.Tensor]:
    return {name: buffer.detach().clone() for name, buffer in step.model.named_buffers()}


def _sum(values: Sequence[torch.Tensor]) -> torch.Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total
