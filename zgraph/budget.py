"""A program within the plan's memory budget: how early gathers may start, and which weights are held for the backward.

The budget is for the peak of the simulated step at every position. What is left of it goes, first, to transfers in flight, as
long as that makes the step shorter; then to weights that are kept from the forward to the backward instead of being gathered
again, those first whose second gather costs most time per byte (DeepCompile's selective unsharding; Tanaka et al., 2025,
"DeepCompile: A Compiler-Driven Approach to Optimizing Distributed Deep Learning Training").
"""

from __future__ import annotations

from dataclasses import dataclass

from zgraph.errors import PlanError
from zgraph.passes import History, PassManager
from zgraph.passes.costs import Costs
from zgraph.passes.simulator import simulate
from zgraph.passes.transfers import gathers_of, largest_layer
from zgraph.pipeline import PLAIN, Choice, Variant, build
from zgraph.plan import Plan
from zgraph.program.node import Phase, info
from zgraph.program.program import Program
from zgraph.program.remark import Remark

TURNS = 7  # of a bisection over the weights to keep


def run_passes(
    captured: Program, plan: Plan, costs: Costs, variant: Variant = PLAIN, *, training: bool = True, held: int = 0
) -> History:
    """The plan's pipeline over a captured program, which is changed. `held` are bytes that live outside of it all the time.

    Raises `PlanError` with the smallest budget that works if the plan's does not.
    """
    if plan.memory_budget is None:
        return PassManager(build(plan, variant, training=training, costs=costs)).run(captured)
    return _Budget(captured, plan, costs, variant, training, held).run()


@dataclass(frozen=True)
class _Outcome:
    peak: int
    seconds: float


class _Budget:
    def __init__(
        self, captured: Program, plan: Plan, costs: Costs, variant: Variant, training: bool, held: int
    ) -> None:
        assert plan.memory_budget is not None
        self.captured = captured
        self.plan = plan
        self.costs = costs
        self.variant = variant
        self.training = training
        self.held = held
        self.budget: int = plan.memory_budget
        passes = build(plan, variant, training=training, costs=costs)
        self.cut = next(i for i, p in enumerate(passes) if p.name in ("regather", "keep_gathered"))
        manager = PassManager(passes[: self.cut], verify=False, snapshots=False)
        self.start = manager.run(captured.snapshot()).program  # what all choices have in common

    def run(self) -> History:
        layer = largest_layer(self.start)
        least = Choice(room=0, spare=0, reduce=0)
        tight = self._try(least)
        if tight.peak > self.budget:
            raise PlanError(
                f"a step does not fit into {_gib(self.budget)}",
                where="memory_budget",
                why=f"{self.captured.name} needs {_gib(tight.peak)} at its peak, with nothing kept and nothing gathered ahead"
                + (f"; {_gib(self.held)} of it are optimizer states and gradients" if self.held else ""),
                hint=f"the smallest that works is {tight.peak} bytes; or more ranks, a smaller batch, a higher ZeRO stage",
            )
        spare = self.budget - tight.peak
        choices = [least, *(Choice(layer * n // 2, max(spare - layer * n, 0), layer * n) for n in (1, 2, 4))]
        fitting = [(o, c) for c in choices if (o := self._try(c)).peak <= self.budget]
        best, choice = min(fitting, key=lambda item: (item[0].seconds, item[0].peak))
        kept, missed = self._keep(choice)
        if kept and (outcome := self._try(kept)).seconds <= best.seconds:
            best, choice = outcome, kept
        passes = build(self.plan, self.variant, training=self.training, costs=self.costs, choice=choice)
        history = PassManager(passes).run(self.captured)
        if missed is not None:
            history.program.remarks.append(missed)
        return history

    def _try(self, choice: Choice) -> _Outcome:
        passes = build(self.plan, self.variant, training=self.training, costs=self.costs, choice=choice)[self.cut :]
        program = PassManager(passes, verify=False, snapshots=False).run(self.start.snapshot()).program
        found = simulate(program, self.costs)
        return _Outcome(sum(found.peak.values()) + self.held, found.seconds)

    def _keep(self, choice: Choice) -> tuple[Choice | None, Remark | None]:
        """As many weights as fit, in the order of what their second gather costs; and what is said of the first that
        does not."""
        order = self._candidates()
        low, high = 0, len(order)  # (low fits, high + 1 is not known to)
        for _ in range(TURNS):
            if low >= high:
                break
            middle = (low + high + 1) // 2
            fits = self._try(choice.but(order[:middle])).peak <= self.budget
            low, high = (middle, high) if fits else (low, middle - 1)
        missed = None
        if low < len(order):
            seconds = sum(s for s, _, _ in self._ranked[low:])
            peak = self._try(choice.but(order[: low + 1])).peak
            missed = Remark(
                "regather",
                order[low],
                f"{order[low]} and {len(order) - low - 1} other weights are gathered again for the backward",
                f"kept, the peak would reach {_gib(peak)}, budget {_gib(self.budget)}",
                seconds,
                f"memory_budget={peak} has room for the first of them",
            )
        return (choice.but(order[:low]) if low else None), missed

    def _candidates(self) -> list[str]:
        """The weights that both phases gather: most seconds per byte first, then those whose uses are closest."""
        again = build(self.plan, self.variant, training=self.training, costs=self.costs)[self.cut]
        program = PassManager([again], verify=False, snapshots=False).run(self.start.snapshot()).program
        self._ranked: list[tuple[float, int, str]] = []
        for at, gather in enumerate(gathers_of(program)):
            if info(gather.start).phase is Phase.BACKWARD:
                ranks = program.mesh[str(info(gather.start).mesh_dim)]
                self._ranked.append((self.costs.transfer([gather.start], ranks), at, gather.name))
        sizes = {g.name: max(g.bytes, 1) for g in gathers_of(program)}
        self._ranked.sort(key=lambda r: (-round(r[0] / sizes[r[2]] * 1e12), r[1]))
        return [name for _, _, name in self._ranked]


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
