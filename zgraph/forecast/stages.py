"""Forecast a pipeline before anything runs: simulate each stage's programs and the schedule, and sum up each rank's
memory.

Each kind of stage is simulated once, with the same passes and by the same simulator as any step. Its seconds go into
the schedule's replay, its bytes into the memory of its rank (`zgraph/stages/rank_memory.py`), whose peak is the most it
holds during one of its actions.

At ZeRO stages 1 and 2 only the first forward of a pipeline stage in a step gathers; below ZeRO stage 2 only its last
backward reduces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from zgraph.build.pass_pipeline import MemoryDecision, Variant, costs_of
from zgraph.build.planned_step import Inputs, split_inputs
from zgraph.forecast.pipeline_plan import PlannedStages, planned_stages
from zgraph.passes.analysis.costs import Costs
from zgraph.passes.analysis.simulator import Forecast, simulate
from zgraph.passes.stages.cut_stages import StageMessage
from zgraph.passes.stages.stage_costs import Balance
from zgraph.plan.pipeline_schedules.actions import Action, Kind
from zgraph.plan.plan import Plan
from zgraph.program.program import STAGE_DIM, Program
from zgraph.runtime.train_step import first_part
from zgraph.stages.gantt import picture
from zgraph.stages.simulated_stage import SimulatedStage, likeness
from zgraph.stages.simulation import Timeline, replay
from zgraph.stages.stage_programs import needs_of
from zgraph.stages.stage_tasks import stage_tasks
from zgraph.units import columns, milliseconds, shown_bytes

SHOWN = 3  # the text shows this many categories of memory, and 2 more


@dataclass(frozen=True)
class StageForecast:
    """The time and memory of a stage on its rank for one micro-batch, after all passes."""

    stage: int  # the stage's number
    rank: int  # the position of its rank along "pp"
    like: int  # the equal stage that was simulated in its place; itself if it is the first of its kind
    forward: float  # seconds of its forward
    backward: float  # seconds of its backward, or of both parts of it
    # seconds of the part for gradients of inputs; None if the schedule does not split backwards
    input_gradients: float | None
    # seconds of the part for gradients of weights; None if the schedule does not split backwards
    weight_gradients: float | None
    exposed: float  # seconds of communication that nothing hides
    parameters: int  # bytes of the rank's part of its parameters
    saved: int  # bytes saved from its forward for its backward
    kept: int  # bytes kept from the first part of a split backward for the second


@dataclass(frozen=True)
class Sent:
    """The values that one stage sends another on another rank for a micro-batch."""

    source: int  # the stage that sends
    target: int  # the stage that receives
    back: bool  # whether it is sent in the backward
    values: int  # the number of values
    bytes: int  # their bytes together
    seconds: float  # their time on an otherwise idle link


@dataclass(frozen=True)
class RankForecast:
    """The time and memory of a rank in a step."""

    rank: int  # its position along "pp"
    stages: tuple[int, ...]  # the stages that it has
    busy: float  # seconds in which it computes, without the update
    idle: float  # seconds in which it waits, before the update
    update: float  # seconds of its update
    exposed: float  # seconds of communication within stages that nothing hides
    where: str  # the action that reaches its peak, or "update"
    categories: dict[str, int]  # bytes at its peak, by category

    @property
    def peak(self) -> int:
        """All bytes at the peak."""
        return sum(self.categories.values())


@dataclass(frozen=True, eq=False)
class PipelineForecast:
    """The forecast of a step of a pipeline. Its text has tables and a picture of the schedule."""

    world: int  # the number of ranks
    plan: Plan  # the plan
    costs: Costs  # the costs that it was simulated with
    balance: Balance  # the time and memory of each stage, according to the captured program
    stages: tuple[StageForecast, ...]  # each stage for one micro-batch
    sent: tuple[Sent, ...]  # what stages on different ranks send each other
    timeline: Timeline  # the schedule, simulated
    ranks: tuple[RankForecast, ...]  # each rank along "pp" in a step

    @property
    def update(self) -> float:
        """Seconds of the slowest rank's update, for which all ranks wait."""
        return max(rank.update for rank in self.ranks)

    @property
    def seconds(self) -> float:
        """Seconds of the whole step: the pipeline, the update, and the run time's own."""
        return self.timeline.makespan + self.update + self.costs.hardware.step

    @property
    def exposed(self) -> float:
        """Seconds of communication within stages that nothing hides, of the rank that has most."""
        return max(rank.exposed for rank in self.ranks)

    @property
    def worst(self) -> RankForecast:
        """The rank with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.peak)

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain data; times in seconds, sizes in bytes."""
        schedule = self.timeline.schedule
        return {
            "world": self.world,
            "hardware": self.costs.hardware.model_dump(mode="json"),
            "seconds": self.seconds,
            "makespan": self.timeline.makespan,
            "bubble": self.timeline.bubble,
            "update": self.update,
            "exposed": self.exposed,
            "peak": self.worst.peak,
            "peak_rank": self.worst.rank,
            "schedule": {
                "name": schedule.name,
                "micro_batches": schedule.micro_batches,
                "rank_of": list(schedule.rank_of),
                "rows": [[str(action) for action in schedule.of(rank)] for rank in range(schedule.ranks)],
            },
            "partition": [asdict(load) for load in self.balance.stages],
            "stages": [asdict(stage) for stage in self.stages],
            "sent": [asdict(sent) for sent in self.sent],
            "ranks": [{**asdict(rank), "peak": rank.peak} for rank in self.ranks],
        }

    def __str__(self) -> str:
        schedule, worst = self.timeline.schedule, self.worst
        how = self.plan.partition if isinstance(self.plan.partition, str) else ", ".join(self.plan.partition)
        lines = [f"{schedule.stages} stages, cut by {how}, as captured:", str(self.balance), ""]
        lines += ["a micro-batch on each stage, after all passes:", *columns(self._stage_rows()), ""]
        if self.sent:
            lines += ["what stages send for a micro-batch:", *columns(self._sent_rows()), ""]
        lines += [f"{schedule.name}, {schedule.micro_batches} micro-batches:", picture(self.timeline), ""]
        lines += ["memory of each rank at its peak:", *columns(self._rank_rows()), ""]
        parts = [f"pipeline {milliseconds(self.timeline.makespan)} (bubble {self.timeline.bubble:.1%})"]
        parts += [f"update {milliseconds(self.update)}"] if self.update else []
        parts += [f"besides {milliseconds(self.costs.hardware.step)}"] if self.costs.hardware.step else []
        lines.append(f"step: {milliseconds(self.seconds)}: {', '.join(parts)}")
        lines.append(f"peak: {shown_bytes(worst.peak)} on rank {worst.rank} of {STAGE_DIM}, in {worst.where}")
        return "\n".join(lines)

    def _stage_rows(self) -> list[tuple[str, ...]]:
        apart = self.timeline.schedule.apart
        halves = ("of inputs", "of weights") if apart else ()
        rows: list[tuple[str, ...]] = [
            ("stage", "rank", "forward", "backward", *halves, "exposed", "parameters", "saves", "like")
        ]
        for s in self.stages:
            parts = (s.input_gradients or 0.0, s.weight_gradients or 0.0) if apart else ()
            seconds = map(milliseconds, (s.forward, s.backward, *parts, s.exposed))
            like = "" if s.like == s.stage else f"stage {s.like}"
            rows.append((str(s.stage), str(s.rank), *seconds, shown_bytes(s.parameters), shown_bytes(s.saved), like))
        return rows

    def _sent_rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("from", "to", "in the", "values", "size", "link")]
        for s in self.sent:
            phase = "backward" if s.back else "forward"
            rows.append(
                (str(s.source), str(s.target), phase, str(s.values), shown_bytes(s.bytes), milliseconds(s.seconds))
            )
        return rows

    def _rank_rows(self) -> list[tuple[str, ...]]:
        total: Counter[str] = Counter()
        for rank in self.ranks:
            total.update(rank.categories)
        named = [name for name, size in total.most_common() if size]
        shown, rest = named[: SHOWN + 2], named[SHOWN + 2 :]
        rows: list[tuple[str, ...]] = [
            ("rank", "stages", "busy", "update", *shown, *(["other"] if rest else []), "peak", "in")
        ]
        for r in self.ranks:
            sizes = [r.categories.get(name, 0) for name in shown]
            sizes += [sum(r.categories.get(name, 0) for name in rest)] if rest else []
            stages = ", ".join(map(str, r.stages))
            times = (milliseconds(r.busy), milliseconds(r.update))
            rows.append((str(r.rank), stages, *times, *map(shown_bytes, (*sizes, r.peak)), r.where))
        return rows


def forecast_pipeline(
    model: nn.Module, plan: Plan, inputs: Inputs, world: int, captured: Program | None = None
) -> PipelineForecast:
    """Forecast a step of a plan with a pipeline for `world` ranks, which need not exist. `model` is not compiled, may
    be on the meta device, and is not changed. `inputs` are a data-parallel rank's whole batch. `captured`: the model as
    captured by this plan already.

    Raises what `planned_stages` does, `StepError` for a batch that can't be cut into the plan's micro-batches, and what
    passes raise.
    """
    plan = plan.for_world(world)
    return forecast_of(planned_stages(model, plan, micro_batch(plan, inputs), world, costs_of(plan), captured=captured))


def micro_batch(plan: Plan, inputs: Inputs) -> Inputs:
    """Return the first micro-batch of a rank's whole batch, in the same form. Raises `StepError` for a batch that can't
    be cut into the plan's micro-batches."""
    args, kwargs = first_part(plan, *split_inputs(inputs))
    return kwargs if isinstance(inputs, dict) else args


def forecast_of(planned: PlannedStages) -> PipelineForecast:
    """Forecast stages that are planned already."""
    return _Forecaster(planned).run()


def besides(planned: PlannedStages, stage: int) -> int:
    """Return the most bytes that a stage's rank has in use while the stage runs, beside its programs and what
    `StepProgram.outside` counts: values in flight, and what the rank's other stages hold."""
    rank = planned.partition.schedule.rank_of[stage]
    return planned.memory(rank).besides(stage, _Forecaster(planned).of_rank(rank))


@dataclass(frozen=True)
class _Seconds:
    """The time of each action. A forward's first gathers start before it waits for what it receives."""

    stages: Sequence[SimulatedStage]  # each stage, simulated
    variants: Mapping[Action, Variant]  # the variant of its stage's program that each action runs

    def of(self, action: Action, waited: float) -> float:
        lead = waited if action.kind is Kind.F else 0.0
        return self.stages[action.stage].seconds(action.kind, self.variants[action], lead)


class _Forecaster:
    def __init__(self, planned: PlannedStages) -> None:
        self.made = planned
        self.schedule = planned.partition.schedule
        kinds: dict[tuple[str, MemoryDecision], int] = {}
        self.like = [
            kinds.setdefault((likeness(s), s.choice or MemoryDecision()), stage)
            for stage, s in enumerate(planned.steps)
        ]
        simulated = {
            stage: SimulatedStage(planned.steps[stage], planned.costs, planned.once) for stage in kinds.values()
        }
        self.stages = [simulated[like] for like in self.like]
        self.variants = dict(self._variants())

    def run(self) -> PipelineForecast:
        planned, schedule = self.made, self.schedule
        sent = sent_between(planned.stages.transfers, planned.costs)
        link = {(s.source, s.target): s.seconds for s in sent}
        timeline = replay(
            schedule, _Seconds(self.stages, self.variants), lambda a, b: link[a, b], needs_of(planned.stages)
        )
        apart = [s for s in sent if schedule.rank_of[s.source] != schedule.rank_of[s.target]]
        return PipelineForecast(
            planned.world,
            planned.plan,
            planned.costs,
            planned.balance,
            tuple(self._stage(stage) for stage in range(schedule.stages)),
            tuple(apart),
            timeline,
            self._ranks(timeline),
        )

    def _variants(self) -> Iterator[tuple[Action, Variant]]:
        """Yield each action with the variant of its stage's program that it runs."""
        for rank in range(self.schedule.ranks):
            of, begun = stage_tasks(self.schedule, rank), set[int]()
            for action in self.schedule.of(rank):
                first = action.kind is Kind.F and action.stage not in begun
                begun |= {action.stage} if first else set()
                stage = self.stages[action.stage]
                yield action, stage.variant(action, first=first, last=of[action.stage].last == action)

    def _stage(self, number: int) -> StageForecast:
        """Return a stage's forecast for a micro-batch in the middle of a step: neither the first nor the last, where
        there are others."""
        stage = self.stages[number]
        of: dict[Kind, Variant] = {}
        row = [a for a in self.schedule.of(self.schedule.rank_of[number]) if a.stage == number]
        for kind in Kind:
            actions = [a for a in row if a.kind is kind]
            if actions:
                of[kind] = self.variants[actions[len(actions) // 2]]
        usual = of.get(Kind.B, of.get(Kind.I, of[Kind.F]))
        inputs, weights = (stage.seconds(kind, of[kind]) if kind in of else None for kind in (Kind.I, Kind.W))
        whole = stage.seconds(Kind.B, usual) if Kind.B in of else (inputs or 0.0) + (weights or 0.0)
        return StageForecast(
            number,
            self.schedule.rank_of[number],
            self.like[number],
            stage.seconds(Kind.F, of[Kind.F]),
            whole,
            inputs,
            weights,
            stage.exposed(usual),
            stage.parameters,
            stage.saved,
            stage.kept if Kind.W in of else 0,
        )

    # -- ranks --------------------------------------------------------------------------------------------------------------
    def _ranks(self, timeline: Timeline) -> tuple[RankForecast, ...]:
        updates: dict[str, Forecast | None] = {}
        forecasts = []
        for rank in range(self.schedule.ranks):
            key = self._held_alike(rank)
            if key not in updates:
                history = self.made.update(rank)
                updates[key] = simulate(history.program, self.made.costs) if history is not None else None
            update = updates[key]
            memory = self.made.memory(rank)
            peak = update.peak if update is not None else None
            where, categories = memory.peak(self.of_rank(rank), memory.states(self.made.outside(rank)), peak)
            exposed = sum(
                self.stages[a.stage].exposed(self.variants[a])
                for a in self.schedule.of(rank)
                if a.kind in (Kind.B, Kind.I)
            )
            forecasts.append(
                RankForecast(
                    rank,
                    self.schedule.stages_of(rank),
                    timeline.busy[rank],
                    timeline.idle[rank],
                    update.seconds if update is not None else 0.0,
                    exposed,
                    where,
                    {name: size for name, size in categories.items() if size},
                )
            )
        return tuple(forecasts)

    def of_rank(self, rank: int) -> dict[int, SimulatedStage]:
        """Return a rank's stages, simulated."""
        return {stage: self.stages[stage] for stage in self.schedule.stages_of(rank)}

    def _held_alike(self, rank: int) -> str:
        """Return a text that is equal for ranks with equal updates: they hold equal parameters in the same order, and
        share the same ones with other ranks."""
        owned = self.made.held[rank]
        optimizer = self.made.plan.optimizer
        if optimizer is not None and optimizer.groups:
            return str(rank)  # (parameter groups depend on names)
        specs = [
            (replace(spec, name=""), owned.tied.get(name), name in owned.uncounted)
            for name, spec in self.made.layout.items()
            if name in owned.own
        ]
        return str(specs)


def sent_between(transfers: tuple[StageMessage, ...], costs: Costs) -> tuple[Sent, ...]:
    """Return what each pair of stages sends for a micro-batch, one message for each value. Raises `PlanError` for
    hardware without a link for "pp"."""
    link = costs.hardware.link(STAGE_DIM)
    sizes_by_pair: dict[tuple[int, int], list[int]] = {}
    for transfer in transfers:
        sizes_by_pair.setdefault((transfer.source, transfer.target), []).append(transfer.nbytes)
    return tuple(
        Sent(a, b, b < a, len(sizes), sum(sizes), len(sizes) * link.latency + sum(sizes) / link.bandwidth)
        for (a, b), sizes in sorted(sizes_by_pair.items())
    )
