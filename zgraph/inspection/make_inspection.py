"""Make an `Inspection` of a model and a plan, for any number of ranks that need not exist, or of a running model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import nn

from zgraph.build.pass_pipeline import EVERY_PASS, PLAIN, PassFilter, Variant, costs_of
from zgraph.build.step_program import StepProgram
from zgraph.inspection.inspection import EVALUATION, STEP, UPDATE, Inspection, PassTrace
from zgraph.inspection.snapshot import of_record
from zgraph.passes import History
from zgraph.passes.analysis.costs import Costs, most_bytes
from zgraph.plan.plan import Plan
from zgraph.program.program import InputRole, OutputRole, Program
from zgraph.program.remark import Remark
from zgraph.runtime.timings import median_step
from zgraph.runtime.train_step import first_part

if TYPE_CHECKING:
    from zgraph.build.planned_step import Inputs
    from zgraph.runtime.runtime import Runtime


def of_model(
    model: nn.Module,
    plan: Plan,
    inputs: Inputs,
    world: int,
    *,
    origin: str = "",
    pass_filter: PassFilter | None = None,
    captured: Program | None = None,
) -> Inspection:
    """Inspect what a plan makes of a model, for `world` ranks that need not exist. `inputs` are a rank's batch, which
    is cut into the plan's micro-batches (of an elastic plan: see `first_part`). The model may be on the meta device and
    is not changed. `captured`: the model as captured by this plan already. Raises what `zgraph.compile` does, and
    `StepError` for a batch that can't be cut so."""
    from zgraph.build.planned_step import planned_step, split_inputs

    plan, costs = plan.for_world(world), costs_of(plan)
    args, kwargs = first_part(plan, *split_inputs(inputs))
    part = kwargs if isinstance(inputs, dict) else args
    planned = planned_step(model, plan, part, world, costs, pass_filter or EVERY_PASS, captured)
    ways = _step_ways(planned.step, costs, planned.step.runs())
    # (the one that most steps have is the last)
    updates = [update for update in (planned.round(), planned.update()) if update is not None]
    ways += [_way(update, 0, costs) for update in updates]  # (all states are its own inputs)
    hardware = costs.hardware.model_dump(mode="json")
    return Inspection(origin, world, {w.name: w for w in ways}, plan.model_dump(mode="json"), hardware, planned.late)


def of_stage(
    model: nn.Module,
    plan: Plan,
    inputs: Inputs,
    world: int,
    stage: int,
    *,
    origin: str = "",
    pass_filter: PassFilter | None = None,
) -> Inspection:
    """Inspect what a plan with a pipeline makes of one stage of a model, and the update of the rank that has it. Its
    `world` is the number of ranks that run these programs. All else is as in `of_model`; raises what that does, and
    `PlanError` for a stage that does not exist."""
    from zgraph.forecast.pipeline_plan import planned_stages
    from zgraph.forecast.stages import besides, micro_batch

    plan, costs = plan.for_world(world), costs_of(plan)
    planned = planned_stages(model, plan, micro_batch(plan, inputs), world, costs, pass_filter or EVERY_PASS)
    step, parts = planned.step(stage), plan.micro_batches
    each = [("first", PLAIN, 1), ("next", Variant(step.keeps), parts - 1)] if parts > 1 else [("first", PLAIN, 1)]
    ways = _step_ways(step, costs, step.runs() if planned.once else each)
    if pass_filter is None:  # (values in flight are only known once all passes have run)
        around = besides(planned, stage)
        for way in ways:
            way.held += around
    schedule = planned.partition.schedule
    update = planned.update(schedule.rank_of[stage])
    ways += [_way(update, 0, costs)] if update is not None else []
    hardware, data = costs.hardware.model_dump(mode="json"), plan.model_dump(mode="json")
    origin = f"{origin}, stage {stage} of {schedule.stages}"
    return Inspection(origin, math.prod(planned.sizes.values()), {w.name: w for w in ways}, data, hardware)


def of_runtime(runtime: Runtime) -> Inspection:
    """Inspect a running model's programs so far, with what was measured of its steps."""
    ways: dict[str, PassTrace] = {}
    for entry in runtime.entries.values():
        for program in entry.every_program():
            ways |= {way.name: way for way in _step_ways(program, runtime.costs, program.runs())}
    for name, history in runtime.updater.programs.histories().items():
        ways[name] = _way(history, 0, runtime.costs, name)
    seconds = median_step(runtime.clock).get("step")
    measured = {"steps": len(runtime.clock.steps), "seconds": seconds, "peak": runtime.memory.measured}
    return Inspection(
        type(runtime.module).__name__,
        max(1, len(runtime.everyone.ranks)),
        ways,
        runtime.plan.model_dump(mode="json"),
        runtime.costs.hardware.model_dump(mode="json"),
        bool(runtime.updater.options.late()),
        measured,
    )


def _step_ways(step: StepProgram, costs: Costs, parts: list[tuple[str, Variant, int]]) -> list[PassTrace]:
    """Return the programs of a step: "train0" for its first micro-batch, "train0-next" and "train0-last" for others, if
    there are any. `parts` is what `StepProgram.runs` returns."""
    if not step.differentiated:
        return [_way(step.history(), step.outside.held, costs)]
    ways = []
    for which, variant, runs in parts:
        history = step.history(variant)
        came = sum(most_bytes(n) for n in history.program.input_nodes(InputRole.ACCUMULATOR).values())
        name = step.name if which == "first" else f"{step.name}-{which}"
        # (accumulated gradients are the program's own inputs)
        way = _way(history, max(0, step.outside.held - came), costs, name)
        way.step, way.runs = step.name, runs
        ways.append(way)
    return ways


def _way(history: History, held: int, costs: Costs, name: str | None = None) -> PassTrace:
    program = history.program
    remarks = [_remark_data(r) for r in program.remarks]
    snapshots = [of_record(r, costs) for r in history.records]
    name = name or program.name
    return PassTrace(name, kind_of(program), snapshots, held, remarks, name)


def kind_of(program: Program) -> str:
    """Return the kind of a finished program: see `PassTrace.kind`."""
    if any(p.role is InputRole.GRADIENT for p in program.inputs):
        return UPDATE
    trains = any(p.role in (OutputRole.GRADIENT, OutputRole.RETURNED) for p in program.outputs)
    return STEP if trains else EVALUATION


def _remark_data(remark: Remark) -> dict[str, Any]:
    return {
        "made_by": remark.made_by,
        "node": remark.node,
        "what": remark.what,
        "why": remark.why,
        "seconds": remark.seconds,
        "remedy": remark.remedy,
        "text": str(remark),
    }
