"""Simulates one stage of a pipeline: what each action of a schedule takes on it, and what a micro-batch keeps there for
its backward.

Forward and backward are timed as one program, like any step, and divided where the backward begins. A backward in two
parts is two programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from torch import fx

from zgraph.build.pass_pipeline import PLAIN, Variant
from zgraph.build.step_program import StepProgram
from zgraph.codegen.accumulate import summing
from zgraph.codegen.update_chunks import canonical
from zgraph.passes.analysis.costs import Costs, most_bytes, own_bytes
from zgraph.passes.analysis.fusion import sources
from zgraph.passes.analysis.live_memory import idle_bytes
from zgraph.passes.analysis.simulator import Forecast, simulate
from zgraph.plan.pipeline_schedules.actions import Action, Kind
from zgraph.program.node import Phase, info
from zgraph.program.program import InputRole, OutputRole, Program
from zgraph.stages.live_values import Values, values_of
from zgraph.torch_compat import aot


class SimulatedStage:
    """A stage's programs, simulated when first asked for. `once`: a step reduces gradients once, after its last
    backward.
    """

    def __init__(self, step: StepProgram, costs: Costs, once: bool) -> None:
        self.step = step
        self.costs = costs
        self.once = once
        self._joint: dict[tuple[Variant, float], Forecast] = {}
        self._forward_ends: dict[Variant, int] = {}
        self._leads: dict[Variant, float] = {}  # seconds after which all early-started transfers have arrived
        self._apart: dict[tuple[Variant, Kind], Forecast | None] = {}
        self._values: dict[tuple[Variant, bool, bool], Values] = {}

    def variant(self, action: Action, *, first: bool, last: bool) -> Variant:
        """Return the variant of the stage's program that an action runs. `first`: the first forward of a step; `last`:
        the last backward.
        """
        keeps = self.step.keeps
        if action.kind is Kind.F and first and keeps:
            return PLAIN
        if not self.once or not self.step.differentiated:
            return Variant(keeps)
        reduces = last and action.kind is not Kind.F
        return Variant(keeps, reduce=reduces, accumulated=reduces and self.step.plan.micro_batches > 1)

    def seconds(self, kind: Kind, variant: Variant, lead: float = 0.0) -> float:
        """Return the seconds of a program of this kind, if its early transfers start `lead` seconds before it."""
        whole = self.joint(variant, lead)
        ends = whole.clock[self._forward_ends[variant]]
        if kind is Kind.F:
            return ends
        if kind is Kind.B:
            return whole.seconds - ends if self.step.differentiated else 0.0
        part = self.part(kind, variant)
        return part.seconds if part is not None else 0.0

    def exposed(self, variant: Variant) -> float:
        """Return the seconds of communication that nothing hides, in forward and backward."""
        return sum(self.joint(variant).exposed.values(), 0.0)

    def values(self, variant: Variant, *, apart: bool = False, adds: bool = False) -> Values:
        """Return the bytes of the parts of a program. `apart`: the backward has two parts; `adds`: it adds to gradients
        of earlier micro-batches in place.
        """
        key = (variant, apart, adds)
        if key not in self._values:
            program = self.step.history(variant).program
            first = self.step.parts(variant, apart=True).backward if apart else None
            names = {n.name for n in first.graph.nodes} if first is not None else set()
            program = summing(program) if adds else program
            self._values[key] = values_of(program, self.costs.fused, names if apart else None, adds=adds)
        return self._values[key]

    def memory(self, kind: Kind, variant: Variant, *, adds: bool = False) -> dict[str, int]:
        """Return the bytes by category at the peak of a program of this kind, without what is on the device during the
        whole step (see `Values`).
        """
        return self.values(variant, apart=kind in (Kind.I, Kind.W), adds=adds).peaks[kind]

    def joint(self, variant: Variant, lead: float = 0.0) -> Forecast:
        """Return the forecast of forward and backward as one program, whose early transfers start `lead` seconds before
        it.
        """
        program = self.step.history(variant).program
        if variant not in self._forward_ends:
            forward = [i for i, n in enumerate(program.nodes) if n.op != "output" and info(n).phase is Phase.FORWARD]
            self._forward_ends[variant] = max(forward, default=0)
            forecast = self._joint[variant, 0.0] = simulate(program, self.costs)
            early = {n.name for n in program.nodes if n.op != "output" and info(n).ahead}
            self._leads[variant] = max((s.start + s.seconds for s in forecast.spans if s.node in early), default=0.0)
        # (leads that differ by rounding, or are longer than needed, share a forecast)
        key = (variant, min(round(lead, 9), self._leads[variant]))
        if key not in self._joint:
            self._joint[key] = simulate(program, self.costs, key[1])
        return self._joint[key]

    def _program(self, kind: Kind, variant: Variant) -> Program | None:
        parts = self.step.parts(variant, apart=True)
        return parts.backward if kind is Kind.I else parts.weights

    def part(self, kind: Kind, variant: Variant) -> Forecast | None:
        """Return the forecast of one part of a backward in two parts; None if the part is empty."""
        if (variant, kind) not in self._apart:
            program = self._program(kind, variant)
            self._apart[variant, kind] = simulate(program, self.costs) if program is not None else None
        return self._apart[variant, kind]

    @cached_property
    def parameters(self) -> int:
        """The bytes of the stage's parameters on one rank's device."""
        program = self.step.captured
        return sum(most_bytes(n) for n in self._inputs(self.step.history().program, InputRole.PARAMETER)) + idle_bytes(
            program
        )

    @cached_property
    def gathered(self) -> int:
        """The bytes of whole weights that are kept from the first forward of a step to its last backward."""
        return sum(
            most_bytes(n) for p, n in self.step.history().program.output_items() if p.role is OutputRole.UNSHARDED
        )

    @cached_property
    def gradients(self) -> int:
        """The bytes of gradients that wait on the device between micro-batches."""
        program = self.step.history(self._usual).program
        given = (n for p, n in program.output_items() if p.role is OutputRole.GRADIENT and info(n).home is None)
        return sum(most_bytes(n) for n in given)

    @cached_property
    def given(self) -> int:
        """The bytes of a micro-batch's outputs that the stage computes; they stay until the step ends."""
        program = self.step.history().program
        on = sources(program.nodes, self.costs.fused)
        outputs = {s for p, n in program.output_items() if p.role is OutputRole.OUTPUT and n in on for s in on[n]}
        return sum(own_bytes(s) for s in outputs if s.op != "placeholder")

    @cached_property
    def lent(self) -> frozenset[int]:
        """The values that the stage sends and also keeps itself until the backward (saved values, or its own inputs),
        as indices among all that it sends forward. (Names differ between equal stages.)
        """
        lent_names = self.values(self._usual).lent
        return frozenset(place for place, name in enumerate(sent_names(self.step.captured)) if name in lent_names)

    @cached_property
    def inputs(self) -> int:
        """The bytes of a micro-batch's inputs that the stage reads."""
        return sum(most_bytes(n) for n in self._inputs(self.step.history().program, InputRole.INPUT))

    @cached_property
    def saved(self) -> int:
        """The bytes that a micro-batch keeps from its forward to its backward."""
        return self.values(self._usual).saved

    @cached_property
    def kept(self) -> int:
        """The bytes that a micro-batch keeps from the first part of its backward to the second."""
        return self.values(self._usual, apart=True).kept if self.step.differentiated else 0

    @property
    def _usual(self) -> Variant:
        """The variant that most micro-batches run."""
        reduces = not self.once or self.step.plan.micro_batches == 1 or not self.step.differentiated
        return Variant(self.step.keeps, reduce=reduces)

    @staticmethod
    def _inputs(program: Program, role: InputRole) -> Iterator[fx.Node]:
        return (n for p, n in program.input_items() if p.role is role and info(n).home is None)


def sent_names(program: Program) -> list[str]:
    """Return the names of what a stage sends forward, in order."""
    return [port.name for port in program.outputs if port.role is OutputRole.SENT]


def likeness(step: StepProgram) -> str:
    """Return a text that is equal for stages to which passes do the same. Names are left out, unless the plan selects
    by name.
    """
    program, plan = step.captured, step.plan
    by_name = bool(plan.passes) or isinstance(plan.recompute, tuple) or ":" in plan.recompute
    modules: dict[str, int] = {}
    regions: dict[object, int] = {None: 0}
    nodes = [
        f"{info(n).phase} {modules.setdefault(info(n).module, len(modules))} {regions.setdefault(aot.users_region(n), len(regions))}"
        for n in program.nodes
    ]
    specs = [replace(program.params[name], name="") for name in program.params]
    ports = [f"{p.role} {p.of} {p.few_bits}" for p in (*program.inputs, *program.outputs)]
    names = [p.name for p in program.inputs] + list(modules) if by_name else []
    return "\n".join([canonical(program), *nodes, str(specs), *ports, *names])
