"""Searches for the programs of a rank's stages within its memory budget: one budget for all that the rank holds, at
each of its actions.

A stage's program is searched for like any other (`zgraph.build.memory_search.Search`), but a choice's peak is that of
its rank's replay, with what micro-batches in flight keep there. If a rank has several stages, each first gets the same
fraction of the range from its smallest to its largest memory, as large a fraction as fits; then each in turn gets what
is left. A rank decides for its own stages alone, from what all ranks agree on, so ranks with the same stages decide
alike. Each stage has the same programs for all micro-batches of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from zgraph.build.build_context import BuildContext
from zgraph.build.memory_search import Outcome, Search, SearchResult
from zgraph.build.pass_pipeline import PLAIN, MemoryDecision, Variant
from zgraph.build.step_program import StepProgram, is_differentiated
from zgraph.codegen.partition import Parts, split
from zgraph.errors import PlanError
from zgraph.passes import History, PassManager
from zgraph.plan.plan import Plan
from zgraph.program.program import STAGE_DIM, Program
from zgraph.program.remark import Remark
from zgraph.stages.rank_memory import UPDATE, RankMemory, variant_of
from zgraph.stages.simulated_stage import SimulatedStage
from zgraph.units import shown_bytes

SHARE_STEPS = 16  # steps in which that fraction is searched


@dataclass(frozen=True)
class Refusal:
    """What a rank along "pp" needs that can't hold the budget."""

    rank: int  # its position
    least: int  # the fewest bytes that it can do with
    where: str  # the action, or "update", at that peak
    stage: int | None  # the stage of that action; None for the update
    categories: Mapping[str, int]  # bytes at that peak, by category
    seconds: float  # that its actions take in a step


class _TooSmallError(PlanError):
    """Raised if no choice fits into a stage's budget; has the choice that takes the least memory."""

    def __init__(self, smallest: Outcome) -> None:
        super().__init__("a stage does not fit")
        self.smallest = smallest


class RankBudget:
    """The decisions for the `programs` of a rank's stages, within the plan's budget; made when first asked for.

    `once` tells whether a step reduces gradients once, after its last backward.
    """

    def __init__(self, memory: RankMemory, programs: Mapping[int, Program], context: BuildContext, once: bool) -> None:
        assert context.plan.memory_budget is not None
        self.budget: int = context.plan.memory_budget
        self.memory = memory
        self.residents = context.residents
        self.searches = {
            stage: _StageSearch(stage, memory, program, context, once) for stage, program in programs.items()
        }
        self._decided: dict[int, SearchResult] | Refusal | None = None

    @property
    def refusal(self) -> Refusal | None:
        """What the rank needs, if it can't hold the budget; else None."""
        verdict = self._decide()
        return verdict if isinstance(verdict, Refusal) else None

    def decision(self, stage: int) -> SearchResult:
        """Return the choice for a stage of this rank. Raises `PlanError` if the budget can't be held."""
        verdict = self._decide()
        if isinstance(verdict, Refusal):
            raise refused(self.budget, [verdict])
        return verdict[stage]

    def _decide(self) -> dict[int, SearchResult] | Refusal:
        if self._decided is None:
            self._decided = self._best_share()
            for search in self.searches.values():
                search.forget()
        return self._decided

    def _best_share(self) -> dict[int, SearchResult] | Refusal:
        """Return the choices of the fastest step with its update, over all shares of the states that may be
        offloaded.
        """
        best: tuple[float, dict[int, SearchResult]] | None = None
        least: Refusal | None = None
        for share in self.residents.shares:
            for search in self.searches.values():
                search.use_share(share)
            choices = self._within()
            if isinstance(choices, Refusal):
                least = choices if least is None or choices.least < least.least else least
                continue
            seconds = self.residents.at(share).step(sum(s.busy(choices[n][0]) for n, s in self.searches.items()))
            if best is None or seconds < best[0]:
                chosen = {
                    stage: SearchResult(outcome.choice.replace(states=share), self.searches[stage], remark)
                    for stage, (outcome, remark) in choices.items()
                }
                best = seconds, chosen
        if best is not None:
            return best[1]
        assert least is not None
        return least

    def _within(self) -> dict[int, tuple[Outcome, Remark | None]] | Refusal:
        """Return the best choices for all stages together, at one share of offloaded states."""
        if len(self.searches) == 1:
            ((stage, search),) = self.searches.items()
            choice = search.best(self.budget)
            return self._refusal({stage: choice}) if isinstance(choice, Outcome) else {stage: choice}
        least = {stage: search.smallest() for stage, search in self.searches.items()}
        if self._peak(least) > self.budget:
            return self._refusal(least)
        best: dict[int, tuple[Outcome, Remark | None]] = {stage: (outcome, None) for stage, outcome in least.items()}
        low, high = 0, SHARE_STEPS
        while low < high:
            middle = (low + high + 1) // 2
            choices = self._part(middle, least)
            fits = self._peak({n: outcome for n, (outcome, _) in choices.items()}) <= self.budget
            low, high, best = (middle, high, choices) if fits else (low, middle - 1, best)
        for stage, search in self.searches.items():
            search.others = {n: self.searches[n].stage_of(o) for n, (o, _) in best.items() if n != stage}
            more = search.best(self.budget)
            if not isinstance(more, Outcome) and more[0].seconds < best[stage][0].seconds:
                best[stage] = more
            search.others = {}
        return best

    def _part(self, part: int, least: Mapping[int, Outcome]) -> dict[int, tuple[Outcome, Remark | None]]:
        """Return each stage's best choice with `part` / `SHARE_STEPS` of the range from its least memory to what it
        needs without recomputation; at the end of the range a stage has the whole budget.
        """
        choices: dict[int, tuple[Outcome, Remark | None]] = {}
        for stage, search in self.searches.items():
            smallest = least[stage].peak
            most = self.budget if part == SHARE_STEPS else min(self.budget, search.plain().peak)
            best = search.best(smallest + max(most - smallest, 0) * part // SHARE_STEPS)
            choices[stage] = (least[stage], None) if isinstance(best, Outcome) else best
        return choices

    def _peak(self, chosen: Mapping[int, Outcome]) -> int:
        return sum(self._held(chosen)[1].values())

    def _held(self, chosen: Mapping[int, Outcome]) -> tuple[str, dict[str, int]]:
        first = next(iter(self.searches.values()))
        return first.held({stage: self.searches[stage].stage_of(outcome) for stage, outcome in chosen.items()})

    def _refusal(self, smallest: Mapping[int, Outcome]) -> Refusal:
        where, categories = self._held(smallest)
        seconds = sum(self.searches[stage].busy(outcome) for stage, outcome in smallest.items())
        stage = None if where == UPDATE else next(m.action.stage for m in self.memory.moments if str(m.action) == where)
        return Refusal(self.memory.rank, sum(categories.values()), where, stage, categories, seconds)


def refuse(plan: Plan, refusals: Iterable[Refusal | None]) -> None:
    """Raise `PlanError` if a rank can't hold the plan's budget, with the smallest budget that all ranks can hold.
    `refusals` are those of all ranks.
    """
    actual_refusals = [refusal for refusal in refusals if refusal is not None]
    if actual_refusals:
        assert plan.memory_budget is not None
        raise refused(plan.memory_budget, actual_refusals, plan)


def refused(budget: int, refusals: Sequence[Refusal], plan: Plan | None = None) -> PlanError:
    """Return the error for ranks that can't hold a budget."""
    worst = max(refusals, key=lambda refusal: (refusal.least, -refusal.rank))
    holds = sorted(((size, name) for name, size in worst.categories.items() if size), reverse=True)
    there = ", ".join(f"{name} {shown_bytes(size)}" for size, name in holds[:4])
    at = "its update" if worst.stage is None else f"{worst.where}, of stage {worst.stage}"
    more = "" if plan is None or plan.recompute == "auto" else ', recompute="auto"'
    more += "" if plan is None or plan.offload.tiers() else ", offload"
    more += "" if plan is None or plan.partition != "time" else ', partition="parameters" or "uniform"'
    return PlanError(
        f"a step does not fit into {shown_bytes(budget)} on each rank",
        where="memory_budget",
        why=f"rank {worst.rank} of {STAGE_DIM} holds {shown_bytes(worst.least)} in {at}, with all computed again or offloaded that may be "
        f"({there}), and computes for {worst.seconds * 1e3:.4g} ms by the plan's hardware",
        hint=f"the smallest that works is {worst.least} bytes; or more stages or ranks, smaller micro-batches, a schedule with fewer of them "
        f"in flight{more}",
    )


class _Trial(StepProgram):
    """A stage's programs by a choice that is only tried: not verified, and never run."""

    def __init__(self, search: _StageSearch, choice: MemoryDecision) -> None:
        super().__init__(search.captured, search.context)
        self.made: Callable[[Variant], History] = lambda variant: search.trial(choice, variant)

    def history(self, variant: Variant = PLAIN) -> History:
        if variant not in self._histories:
            self._histories[variant] = self.made(variant)
        return self._histories[variant]

    def parts(self, variant: Variant = PLAIN, *, apart: bool = False) -> Parts:
        if (variant, apart) not in self._parts:
            self._parts[variant, apart] = split(self.history(variant).program, apart=apart)
        return self._parts[variant, apart]


class _StageSearch(Search):
    """The search for one stage. A choice's peak is that of the rank, together with the `others` of its stages."""

    def __init__(self, stage: int, memory: RankMemory, program: Program, context: BuildContext, once: bool) -> None:
        self.stage = stage
        self.memory = memory
        self.once = once
        self.others: Mapping[int, SimulatedStage] = {}
        self.waiting = memory.waiting(stage)
        self.stages: dict[MemoryDecision, SimulatedStage] = {}
        super().__init__(program, context, PLAIN, is_differentiated(program))

    def best(self, budget: int) -> tuple[Outcome, Remark | None] | Outcome:
        """Return the fastest choice within a budget; if none fits, the one that takes the least memory."""
        self.budget, self.tried = budget, {}
        try:
            return self._best()
        except _TooSmallError as error:
            return error.smallest

    def smallest(self) -> Outcome:
        """Return the choice that takes the least memory."""
        outcome = self.best(0)
        assert isinstance(outcome, Outcome)
        return outcome

    def plain(self) -> Outcome:
        """Return the choice without recomputation and early gathers."""
        return self._try(self.least)

    def use_share(self, share: float) -> None:
        self._use_share(share)

    def stage_of(self, outcome: Outcome) -> SimulatedStage:
        """Return the simulated stage of a choice that was tried."""
        return self.stages[outcome.choice]

    def busy(self, outcome: Outcome) -> float:
        """Return the seconds that the stage's actions take in a step."""
        return outcome.seconds * self.context.plan.micro_batches

    def held(self, stages: Mapping[int, SimulatedStage]) -> tuple[str, dict[str, int]]:
        """Return (the action at the rank's peak, the bytes by category there)."""
        outside = self.outside
        return self.memory.peak(
            stages, self.memory.states(outside), {UPDATE: outside.update} if outside.update else None
        )

    def trial(self, choice: MemoryDecision, variant: Variant) -> History:
        """Run the passes of a choice, without snapshots and verifier."""
        passes = self._passes(choice, variant)[self.cut :]
        with self._failures_of(choice):
            return PassManager(passes, verify=False, snapshots=False).run(self._snapshot(self.start, choice))

    def forget(self) -> None:
        """Forget what was tried."""
        self.tried, self.stages, self.others = {}, {}, {}

    def _weighed(self, choice: MemoryDecision) -> Outcome:
        if choice not in self.stages:
            self.stages[choice] = SimulatedStage(_Trial(self, choice), self.context.costs, self.once)
        stage = self.stages[choice]
        with self._failures_of(choice):
            peak = sum(self.held({self.stage: stage, **self.others})[1].values())
            mine = [moment for moment in self.memory.row if moment.action.stage == self.stage]
            busy = sum(stage.seconds(moment.action.kind, variant_of(moment, stage)) for moment in mine)
        return Outcome(choice, peak, busy / self.context.plan.micro_batches, stage.joint(PLAIN))

    def _refusal(self, outcome: Outcome, what: str) -> PlanError:
        return _TooSmallError(outcome)
