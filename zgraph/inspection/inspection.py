"""`Inspection`: a compiled step with all that can be asked of it, from a model, from a running one, or from a bundle."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from zgraph.errors import PassError, TargetError
from zgraph.inspection.snapshot import Snapshot, of_record
from zgraph.names import did_you_mean

if TYPE_CHECKING:
    from torch import nn

    from zgraph.compiler import Inputs
    from zgraph.passes import History
    from zgraph.passes.costs import Costs
    from zgraph.passes.memory import Life
    from zgraph.passes.simulator import Forecast, StepForecast
    from zgraph.pipeline import Edit
    from zgraph.plan import Plan
    from zgraph.program.program import Program
    from zgraph.program.remark import Remark
    from zgraph.runtime import Runtime

STEP, UPDATE, EVALUATION = "step", "update", "evaluation"


@dataclass(eq=False)
class Way:
    """A program's way through its passes.

    `kind` says what it is: a training `STEP` (forward and backward), an `UPDATE`, or an `EVALUATION` without gradients. `held` are the
    bytes of the device that are taken besides while it runs: states of the optimizer, gradients that wait. `remarks` are what its
    passes missed, as `Remark`'s fields and its "text".
    """

    name: str
    kind: str
    snapshots: list[Snapshot]
    held: int
    remarks: list[dict[str, Any]]

    @property
    def last(self) -> Snapshot:
        """The finished program."""
        return self.snapshots[-1]

    def after(self, name: str) -> Snapshot:
        """The program after a pass. Raises `PassError` with the nearest right name."""
        found = next((s for s in self.snapshots if s.name == name), None)
        if found is None:
            hint = did_you_mean(name, [s.name for s in self.snapshots])
            raise PassError(f"there is no pass {name!r} in this pipeline", hint=hint)
        return found

    def before(self, name: str) -> Snapshot | None:
        """The program that a pass was given; None for the capture."""
        at = self.snapshots.index(self.after(name))
        return self.snapshots[at - 1] if at else None


@dataclass(eq=False)
class Inspection:
    """A step as a plan makes it for `world` ranks.

    `origin` says of what it is. `ways` are its programs by name. `plan_data` and `hardware` are the plan and the costs' hardware as
    JSON; `measured` is what a run has shown of it: "steps", "seconds" of the median step, "peak" bytes (None where nobody counted).
    """

    origin: str
    world: int
    ways: dict[str, Way]
    plan_data: dict[str, Any]
    hardware: dict[str, Any]
    measured: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def plan(self) -> Plan:
        from zgraph.plan import Plan

        return Plan.model_validate(self.plan_data)

    @cached_property
    def costs(self) -> Costs:
        """What decisions were made from."""
        from zgraph.passes.costs import Costs, Hardware

        return Costs(Hardware.model_validate(self.hardware), fused=self.plan.backend == "inductor")

    # -- programs -----------------------------------------------------------------------------------------------------
    def way(self, name: str | None = None) -> Way:
        """A program's way by its name, by default that of the training step made last. Raises `TargetError` for none of that name."""
        if name is None:
            steps = [w for w in self.ways.values() if w.kind == STEP]
            return (steps or list(self.ways.values()))[-1]
        if name not in self.ways:
            raise TargetError(f"there is no program {name!r}", where=self.origin, hint=did_you_mean(name, self.ways))
        return self.ways[name]

    @property
    def update(self) -> Way | None:
        """The update that belongs to the step: the last that was made."""
        found = [w for w in self.ways.values() if w.kind == UPDATE]
        return found[-1] if found else None

    def step_ways(self) -> list[Way]:
        """What a step runs, in order."""
        return [self.way(), *([self.update] if self.update is not None and self.way().kind == STEP else [])]

    # -- what it takes ------------------------------------------------------------------------------------------------
    @cached_property
    def forecast(self) -> StepForecast:
        """The step and its update, simulated by `costs`."""
        from zgraph.passes.simulator import simulate_step

        ways = self.step_ways()
        offload = self.plan.offload
        late = offload.delayed_after is not None and bool(offload.tier("optimizer"))
        update = ways[1].last.program if len(ways) > 1 else None
        return simulate_step(ways[0].last.program, update, self.costs, late)

    def forecasts(self) -> list[tuple[Way, Forecast]]:
        """Each program of a step with what it takes."""
        return list(zip(self.step_ways(), self.forecast.programs, strict=True))

    def lives(self, way: Way) -> list[Life]:
        """What takes memory in a program, and from when to when."""
        from zgraph.passes.memory import lives

        return lives(way.last.program, self.costs.fused)

    def remarks(self) -> list[dict[str, Any]]:
        """What passes missed in the step and its update, the costliest first; each says of which program it is."""
        found = [{"program": way.name, **remark} for way in self.step_ways() for remark in way.remarks]
        return sorted(found, key=lambda r: -float(r["seconds"]))


def of_model(
    model: nn.Module,
    plan: Plan,
    inputs: Inputs,
    world: int,
    *,
    origin: str = "",
    edit: Edit | None = None,
    captured: Program | None = None,
) -> Inspection:
    """What a plan makes of a model, for so many ranks, without any. `inputs` are those of one rank. The model may be on the meta
    device and is not changed. `captured` is what was captured of it by this plan already. Raises what `zgraph.compile` does."""
    from zgraph.compiler import planned_step
    from zgraph.pipeline import EVERYTHING, costs_of

    costs = costs_of(plan)
    made = planned_step(model, plan, inputs, world, costs, edit or EVERYTHING, captured=captured)
    step = _way(made.step, made.outside.held, costs)
    ways = {step.name: step}
    if made.update is not None:
        update = _way(made.update, max(0, made.outside.update - _peak(made.update.program, costs)), costs)
        ways[update.name] = update
    return Inspection(origin, world, ways, plan.model_dump(mode="json"), costs.hardware.model_dump(mode="json"))


def of_runtime(runtime: Runtime) -> Inspection:
    """A running model's programs so far, and what was measured of its steps."""
    from zgraph.timings import median_step

    ways: dict[str, Way] = {}
    for entry in runtime.entries.values():
        for program in entry.programs():
            ways[program.name] = _way(program.history(), program.outside.held, runtime.costs)
    for name, history in runtime.updater.histories().items():
        ways[name] = _way(history, 0, runtime.costs, name)
    seconds = median_step(runtime.clock).get("step")
    measured = {"steps": len(runtime.clock.steps), "seconds": seconds, "peak": runtime.memory.measured}
    return Inspection(
        type(runtime.module).__name__,
        runtime.mesh.size() if runtime.mesh is not None else 1,
        ways,
        runtime.plan.model_dump(mode="json"),
        runtime.costs.hardware.model_dump(mode="json"),
        measured,
    )


def _way(history: History, held: int, costs: Costs, name: str | None = None) -> Way:
    program = history.program
    remarks = [remark_data(r) for r in program.remarks]
    snapshots = [of_record(r, costs) for r in history.records]
    return Way(name or program.name, kind_of(program), snapshots, held, remarks)


def kind_of(program: Program) -> str:
    """What a finished program is: see `Way`."""
    from zgraph.program.program import InputRole, OutputRole

    if any(p.role is InputRole.GRADIENT for p in program.inputs):
        return UPDATE
    return STEP if any(p.role is OutputRole.GRADIENT for p in program.outputs) else EVALUATION


def remark_data(remark: Remark) -> dict[str, Any]:
    return {
        "made_by": remark.made_by,
        "node": remark.node,
        "what": remark.what,
        "why": remark.why,
        "seconds": remark.seconds,
        "remedy": remark.remedy,
        "text": str(remark),
    }


def _peak(program: Program, costs: Costs) -> int:
    from zgraph.passes.memory import memory_of

    return max((sum(at.values()) for at in memory_of(program, costs.fused)), default=0)
