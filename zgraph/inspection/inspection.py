"""`Inspection`: a compiled step, with its programs after every pass and its forecast.

`make_inspection.py` makes one of a model or of a running model, `bundle.py` reads one from a bundle.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from zgraph.errors import BundleError, PassError, PlanError, TargetError
from zgraph.inspection.snapshot import Snapshot, at_sizes
from zgraph.names import did_you_mean

if TYPE_CHECKING:
    from zgraph.passes.analysis.costs import Costs
    from zgraph.passes.analysis.live_memory import Life
    from zgraph.passes.analysis.simulator import Forecast, StepForecast
    from zgraph.plan.plan import Plan

STEP, UPDATE, EVALUATION = "step", "update", "evaluation"


@dataclass(eq=False)
class PassTrace:
    """A program after each of its passes.

    Of several micro-batches the first, the following ones and the last may have programs of their own, which belong to
    the same `step`.
    """

    name: str  # the program's name
    kind: str  # a training `STEP` (forward and backward), an `UPDATE`, or an `EVALUATION` without gradients
    snapshots: list[Snapshot]  # the program as captured, then after each pass
    # bytes of the device in use besides while it runs: optimizer states, waiting gradients, parameters that it does not
    # use
    held: int
    remarks: list[dict[str, Any]]  # what its passes missed: `Remark`'s fields and its "text"
    step: str = ""  # the name of the step that it belongs to
    runs: int = 1  # how often a training step runs it

    @property
    def last(self) -> Snapshot:
        """The finished program."""
        return self.snapshots[-1]

    def after(self, name: str) -> Snapshot:
        """Return the program after a pass. Raises `PassError` with the nearest right name."""
        snapshot = next((s for s in self.snapshots if s.name == name), None)
        if snapshot is None:
            hint = did_you_mean(name, [s.name for s in self.snapshots])
            raise PassError(f"there is no pass {name!r} in this pipeline", hint=hint)
        return snapshot

    def before(self, name: str) -> Snapshot | None:
        """Return the program that a pass was given; None for the capture."""
        at = self.snapshots.index(self.after(name))
        return self.snapshots[at - 1] if at else None


@dataclass(eq=False)
class Inspection:
    """A step as a plan makes it for `world` ranks."""

    origin: str  # the name of the model, target or bundle that it is of
    world: int  # the number of ranks
    ways: dict[str, PassTrace]  # its programs by name
    plan_data: dict[str, Any]  # the plan as JSON
    hardware: dict[str, Any]  # the costs' hardware as JSON
    late: bool = False  # whether the update runs beside the next step
    # of a run: "steps", "seconds" of the median step, "peak" bytes (None if not counted)
    measured: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def plan(self) -> Plan:
        from zgraph.plan.plan import Plan

        with self._said():
            return Plan.model_validate(self.plan_data)

    @cached_property
    def costs(self) -> Costs:
        """The costs that the passes' decisions were made from."""
        from zgraph.passes.analysis.costs import Costs, Hardware

        with self._said():
            return Costs(Hardware.model_validate(self.hardware), fused=self.plan.backend == "inductor")

    @contextlib.contextmanager
    def _said(self) -> Iterator[None]:
        """Turn a `PlanError` of an invalid plan or hardware into a `BundleError` that names the bundle."""
        try:
            yield
        except PlanError as error:
            where = f"{self.origin}{f': {error.where}' if error.where else ''}"
            raise BundleError(error.what, where=where, why=error.why, hint=error.hint) from error

    # -- programs -----------------------------------------------------------------------------------------------------
    def way(self, name: str | None = None) -> PassTrace:
        """Return the program of this name, by default that of the training step made last (of its first micro-batch).
        Raises `TargetError` if none has the name, and if there is no program at all."""
        if not self.ways:
            raise TargetError(
                "there is no program yet", where=self.origin, hint="a first step, or zgraph.compile(…, inputs=…)"
            )
        if name is None:
            steps = [w for w in self.ways.values() if w.kind == STEP]
            last = (steps or list(self.ways.values()))[-1]
            return next(w for w in self.ways.values() if w.step == last.step)
        if name not in self.ways:
            raise TargetError(f"there is no program {name!r}", where=self.origin, hint=did_you_mean(name, self.ways))
        return self.ways[name]

    @property
    def update(self) -> PassTrace | None:
        """The update of the step: the last one made; None without one."""
        updates = [w for w in self.ways.values() if w.kind == UPDATE]
        return updates[-1] if updates else None

    def only(self, name: str | None) -> Inspection:
        """Return this inspection with only the step that this program belongs to and its update, or with only this
        other program. Raises as `way`."""
        if name is None:
            return self
        chosen = self.way(name)
        wanted = [w for w in self.ways.values() if w.step == chosen.step]
        wanted += [self.update] if chosen.kind == STEP and self.update is not None else []
        return replace(self, ways={w.name: w for w in wanted})

    def at(self, sizes: Mapping[str, int]) -> Inspection:
        """Return this inspection with its programs at these sizes, by name; at the typical ones where none is given.
        Raises `TargetError` for a name that no program has, and for sizes that a program is not for."""
        ways: dict[str, PassTrace] = {}
        names: set[str] = set()
        for name, way in self.ways.items():
            known = way.last.program.sizes
            names |= set(known.names)
            if not known:
                ways[name] = way
                continue
            point = known.point({n: size for n, size in sizes.items() if n in known.names})
            if not known.hold(point):
                condition, where = known.broken(point)
                raise TargetError(f"program {name} is not for these sizes", where=where, why=f"it is for {condition}")
            ways[name] = replace(way, snapshots=[at_sizes(s, point, self.costs) for s in way.snapshots])
        for name in sizes:
            if name not in names:
                raise TargetError(
                    f"no program has a size {name!r} that differs from call to call",
                    where=self.origin,
                    hint=did_you_mean(name, names) if names else "declare it in the plan: dynamic",
                )
        return replace(self, ways=ways)

    def step_ways(self) -> list[PassTrace]:
        """Return the programs that a step runs, in order."""
        first = self.way()
        ways = [w for w in self.ways.values() if w.step == first.step]
        return [*ways, *([self.update] if self.update is not None and first.kind == STEP else [])]

    # -- what it takes ------------------------------------------------------------------------------------------------
    @cached_property
    def forecast(self) -> StepForecast:
        """The simulation of the step with all its micro-batches and its update. The first micro-batch's first gathers
        run beside the update of the step before."""
        from zgraph.passes.analysis.simulator import StepForecast, simulate

        ways = self.step_ways()
        updates = [simulate(w.last.program, self.costs) for w in ways if w.kind == UPDATE]
        lead = 0.0 if self.late else sum(u.seconds for u in updates)
        steps = [w for w in ways if w.kind != UPDATE]
        forecasts = [simulate(w.last.program, self.costs, lead=0.0 if at else lead) for at, w in enumerate(steps)]
        forecasts = [replace(one, program=way.name) for one, way in zip(forecasts, steps, strict=True)]
        runs = tuple(w.runs for w in ways)
        return StepForecast((*forecasts, *updates), self.costs.hardware.step, self.late and bool(updates), runs)

    def forecasts(self) -> list[tuple[PassTrace, Forecast]]:
        """Return each program of a step with its forecast."""
        return list(zip(self.step_ways(), self.forecast.programs, strict=True))

    def lives(self, way: PassTrace) -> list[Life]:
        """Return the values that take memory in a program, with the positions from and to which they live."""
        from zgraph.passes.analysis.live_memory import lives

        return lives(way.last.program, self.costs.fused)

    def remarks(self) -> list[dict[str, Any]]:
        """Return what passes missed in the step and its update, the costliest first, each with its program's name.
        Remarks on collectives that nothing waits for in the forecast are left out: the update before the step may hide
        them, which a pass does not know."""
        from zgraph.inspection.stalls import exposed_by_transfer, transfer_of
        from zgraph.program import collectives

        remarks = []
        for way, forecast in self.forecasts():
            nodes = {node.name: node for node in way.last.program.graph.nodes} if way.remarks else {}
            waits = exposed_by_transfer(way.last.program, forecast)
            for remark in way.remarks:
                start = nodes.get(str(remark["node"]))
                if start is None or not collectives.is_start(start) or transfer_of(start) in waits:
                    remarks.append({"program": way.name, **remark})
        return sorted(remarks, key=lambda r: -float(r["seconds"]))
