"""The programs of a rank's stages within its memory budget: one budget for all that the rank holds, at each of its actions.

A stage's program is looked for as any other (`zgraph.build.memory_search.Search`); what a choice takes is the peak of its rank, replayed: with what
micro-batches in flight leave there. Where a rank has several stages, each is first given the same part of the way from the least that it can
do with to all that it could use, as large a part as fits; then each in turn gets what is left. A rank decides for its own stages alone, by
what all ranks agree on, so those that have the same stages decide alike. In each stage a step has the same programs for all micro-batches.
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

SHARE_STEPS = 16  # parts of the way from the least that stages can do with


@dataclass(frozen=True)
class Refusal:
    """A rank along "pp" can't do with less than `least` bytes, which it holds in an action of `stage`, or in its update (None): bytes by
    category. Its actions then take so many `seconds` of a step."""

    rank: int
    least: int
    where: str
    stage: int | None
    categories: Mapping[str, int]
    seconds: float


class _TooSmallError(PlanError):
    """No choice fits into a stage's budget; the one that takes least."""

    def __init__(self, smallest: Outcome) -> None:
        super().__init__("a stage does not fit")
        self.smallest = smallest


class RankBudget:
    """The decisions for the `programs` of a rank's stages, within the plan's budget: made when they are first asked for.

    `once` says whether a step reduces gradients once, after its last backward.
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
        """What the rank needs if it can't hold the budget."""
        found = self._decide()
        return found if isinstance(found, Refusal) else None

    def decision(self, stage: int) -> SearchResult:
        """What was chosen for a stage of this rank. Raises `PlanError` if the budget can't be held."""
        found = self._decide()
        if isinstance(found, Refusal):
            raise refused(self.budget, [found])
        return found[stage]

    def _decide(self) -> dict[int, SearchResult] | Refusal:
        if self._decided is None:
            self._decided = self._best_share()
            for search in self.searches.values():
                search.forget()
        return self._decided

    def _best_share(self) -> dict[int, SearchResult] | Refusal:
        """The fastest step with its update, over all shares of the states that may be offloaded."""
        best: tuple[float, dict[int, SearchResult]] | None = None
        least: Refusal | None = None
        for share in self.residents.shares:
            for search in self.searches.values():
                search.use_share(share)
            found = self._within()
            if isinstance(found, Refusal):
                least = found if least is None or found.least < least.least else least
                continue
            seconds = self.residents.at(share).step(sum(s.busy(found[n][0]) for n, s in self.searches.items()))
            if best is None or seconds < best[0]:
                chosen = {
                    stage: SearchResult(outcome.choice.replace(states=share), self.searches[stage], remark)
                    for stage, (outcome, remark) in found.items()
                }
                best = seconds, chosen
        if best is not None:
            return best[1]
        assert least is not None
        return least

    def _within(self) -> dict[int, tuple[Outcome, Remark | None]] | Refusal:
        """The best for all stages together, for one share."""
        if len(self.searches) == 1:
            ((stage, search),) = self.searches.items()
            found = search.best(self.budget)
            return self._refusal({stage: found}) if isinstance(found, Outcome) else {stage: found}
        least = {stage: search.smallest() for stage, search in self.searches.items()}
        if self._peak(least) > self.budget:
            return self._refusal(least)
        best: dict[int, tuple[Outcome, Remark | None]] = {stage: (outcome, None) for stage, outcome in least.items()}
        low, high = 0, SHARE_STEPS
        while low < high:
            middle = (low + high + 1) // 2
            found_there = self._part(middle, least)
            fits = self._peak({n: outcome for n, (outcome, _) in found_there.items()}) <= self.budget
            low, high, best = (middle, high, found_there) if fits else (low, middle - 1, best)
        for stage, search in self.searches.items():
            search.others = {n: self.searches[n].stage_of(o) for n, (o, _) in best.items() if n != stage}
            more = search.best(self.budget)
            if not isinstance(more, Outcome) and more[0].seconds < best[stage][0].seconds:
                best[stage] = more
            search.others = {}
        return best

    def _part(self, part: int, least: Mapping[int, Outcome]) -> dict[int, tuple[Outcome, Remark | None]]:
        """Each stage's best, `part` of the way from its least bytes; all of the way it has the whole budget for itself."""
        found: dict[int, tuple[Outcome, Remark | None]] = {}
        for stage, search in self.searches.items():
            smallest = least[stage].peak
            most = self.budget if part == SHARE_STEPS else min(self.budget, search.plain().peak)
            best = search.best(smallest + max(most - smallest, 0) * part // SHARE_STEPS)
            found[stage] = (least[stage], None) if isinstance(best, Outcome) else best
        return found

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
    """Raise `PlanError` if a rank can't hold the plan's budget, with the smallest that all can. `refusals` are those of all ranks."""
    found = [refusal for refusal in refusals if refusal is not None]
    if found:
        assert plan.memory_budget is not None
        raise refused(plan.memory_budget, found, plan)


def refused(budget: int, refusals: Sequence[Refusal], plan: Plan | None = None) -> PlanError:
    """What is said of ranks that can't hold a budget."""
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
    """A stage's programs by a choice that is tried: not verified, and never run."""

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
    """The search for one stage. A choice's peak is that of the rank with the `others` of its stages that are given, by numbers."""

    def __init__(self, stage: int, memory: RankMemory, program: Program, context: BuildContext, once: bool) -> None:
        self.stage = stage
        self.memory = memory
        self.once = once
        self.others: Mapping[int, SimulatedStage] = {}
        self.waiting = memory.waiting(stage)
        self.stages: dict[MemoryDecision, SimulatedStage] = {}
        super().__init__(program, context, PLAIN, is_differentiated(program))

    def best(self, budget: int) -> tuple[Outcome, Remark | None] | Outcome:
        """The fastest within a budget; where none fits, what takes least."""
        self.budget, self.tried = budget, {}
        try:
            return self._best()
        except _TooSmallError as error:
            return error.smallest

    def smallest(self) -> Outcome:
        """What takes least."""
        found = self.best(0)
        assert isinstance(found, Outcome)
        return found

    def plain(self) -> Outcome:
        """With nothing computed again, and nothing gathered early."""
        return self._try(self.least)

    def use_share(self, share: float) -> None:
        self._use_share(share)

    def stage_of(self, outcome: Outcome) -> SimulatedStage:
        """The stage by a choice that was tried."""
        return self.stages[outcome.choice]

    def busy(self, outcome: Outcome) -> float:
        """The seconds that its actions take in a step."""
        return outcome.seconds * self.context.plan.micro_batches

    def held(self, stages: Mapping[int, SimulatedStage]) -> tuple[str, dict[str, int]]:
        """What the rank does at its peak, and the bytes by category there."""
        outside = self.outside
        return self.memory.peak(
            stages, self.memory.states(outside), {UPDATE: outside.update} if outside.update else None
        )

    def trial(self, choice: MemoryDecision, variant: Variant) -> History:
        """Passes without snapshots and verifier."""
        passes = self._passes(choice, variant)[self.cut :]
        with self._failures_of(choice):
            return PassManager(passes, verify=False, snapshots=False).run(self._snapshot(self.start, choice))

    def forget(self) -> None:
        """Let go of what was tried."""
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
