"""Schedules a model's transfers once more, by the times that its operators take in its own steps.

    steps 1 to 3    run as they are: the first compiles, the others say what a step takes
    steps 4 to 6    time each operator; every transfer is waited for where it starts, so that nothing runs beside one
    then            ranks merge their times, and each makes a new schedule and compiles it in a thread, while training goes on
    each 4th step   ranks vote whether all are done; then all take the new programs, where a step begins

*Belief.* Numbers stay as they are, bit for bit (`zgraph/build/reschedule.py` checks it), and ranks never run different programs: all
decide from the same times, at the same steps, and switch only where each has made the same. A rank that can't go on says so in
the next exchange, and all stay with what they have. Nothing waits for the thread but the end of the process, which lets
it finish the part that it compiles.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch

from zgraph.build.reschedule import Rescheduled, reschedule
from zgraph.build.step_program import Entry, StepProgram
from zgraph.codegen.instrumented import Stopwatch, Timed
from zgraph.machine.measured_costs import named_hardware
from zgraph.machine.operator_times import Sample, operator_table, samples, slowest_samples
from zgraph.passes.analysis.costs import Costs
from zgraph.program.program import STAGE_DIM
from zgraph.runtime.rank import Rank
from zgraph.runtime.timings import median_step
from zgraph.torch_compat import process_groups

logger = logging.getLogger(__name__)

STEPS = 3  # how many steps run before operators are timed, and how many are timed
LOOK = 4  # steps from one vote on whether all ranks have compiled to the next

READY, WORKING, STAYS = range(3)  # what a rank says in these votes


@dataclass(frozen=True)
class _Times:
    """What a rank tells the others of its times."""

    operators: str = ""  # a hash of the operators that it has timed, in their order
    seconds: tuple[float, ...] = ()  # what they took
    step: float = 0.0  # seconds of a step
    update: float = 0.0  # seconds of its update
    error: str = ""  # why this rank could not time them; "" if it could


class AdaptedSchedule:
    """Watches the steps of one compiled module, until its schedule was adapted once or is known to stay."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.told = ""  # what has become of it, for reports; "" until that is known
        self._ends = rank.plan.adapt == "off" or named_hardware(rank.plan) is not None or not _trains_alike(rank)
        self._entry: Entry | None = None  # whose steps are watched
        self._step: StepProgram | None = None  # its program
        self._begun = 0  # steps of this program, one after another, that have begun
        self._timed: list[Timed] = []  # what times the parts of a step now
        self._error = ""  # why they could not be timed
        self._before: dict[str, float] = {}  # the seconds of a step and its phases before they are timed
        self._job: _Job | None = None  # what makes the new schedule

    def step_begins(self, entry: Entry) -> None:
        """Note that a step begins with a forward of this entry. All ranks must call it."""
        if self._ends or not torch.is_grad_enabled():
            return
        step = entry.program()
        if not step.differentiated:
            return
        if self._job is not None:
            self._begun += 1
            if self._begun % LOOK == 0:
                self._look()
            return
        if step is not self._step:
            self._stop_timing()
            self._entry, self._step, self._begun = entry, step, 0
        self._begun += 1
        if self._begun == STEPS + 1:
            self._start_timing(step)
        elif self._begun == 2 * STEPS + 1:
            self._start_job(step)

    def _refusal(self, step: StepProgram) -> str:
        """Return why the schedule of a step is not adapted, the same on all ranks; "" if it is."""
        rank = self.rank
        if all(ranks == 1 for ranks in rank.sizes.values()) and not rank.plan.offload.tiers():
            return "nothing is transferred"
        if not rank.plan.prefetch.enabled:
            return "prefetch is off"
        if rank.agreement.group is not None and not rank.needed_votes.by_steps():
            return "ranks vote on each call"
        if step.captured.sizes:
            return "sizes differ from call to call"
        if len(step.beside) > 1 or step.hot:
            return "ranks may run different programs in one step"
        return ""

    # -- times --------------------------------------------------------------------------------------------------------
    def _start_timing(self, step: StepProgram) -> None:
        if why := self._refusal(step):
            self._end(f"it stays as it is: {why}")
            return
        self._before, self._error = median_step(self.rank.clock), ""
        try:
            watch = Stopwatch(self.rank.device)
            self._timed = [Timed(e, watch) for e in step.executables() if e.rebuild is not None]
        except Exception as error:
            logger.warning("adapt: operators can't be timed: %s: %s", type(error).__name__, error)
            self._timed, self._error = [], f"operators can't be timed: {error}"
        for each in self._timed:
            each.install()

    def _stop_timing(self) -> None:
        for each in self._timed:
            each.remove()

    def _samples(self, step: StepProgram) -> list[Sample]:
        """Return what was timed, once nothing is timed any more; none, and the error, where that fails."""
        timed, self._timed, costs = self._timed, [], step.context.costs
        for each in timed:
            each.remove()
        rows: list[Sample] = []
        try:
            whole = step.history().program
            for each in timed:
                if runs := each.take():
                    rows += samples(each, runs, whole, costs)
        except Exception as error:
            logger.warning("adapt: the times of operators are lost: %s: %s", type(error).__name__, error)
            self._error = f"the times of operators are lost: {error}"
        return rows

    def _start_job(self, step: StepProgram) -> None:
        """Let ranks merge their times, and start to make a schedule by them."""
        rows, before = self._samples(step), self._before
        update = 0.0 if self.rank.plan.offload.late else before.get("update", 0.0)
        operators = hashlib.sha256("\n".join(row.key for row in rows).encode()).hexdigest()
        mine = _Times(operators, tuple(row.seconds for row in rows), before.get("step", 0.0), update, self._error)
        ranks: list[_Times] = self.rank.everyone.gather("the times of operators", mine)
        if why := next((times.error for times in ranks if times.error), None):
            self._end(f"it stays as it is: {why}")
            return
        if len({times.operators for times in ranks}) > 1:
            self._end("it stays as it is: ranks have timed different operators")
            return
        timed = [[replace(r, seconds=s) for r, s in zip(rows, times.seconds, strict=True)] for times in ranks]
        table = operator_table(slowest_samples(timed))
        hardware = step.context.costs.hardware.model_copy(update={"operators": table})
        self._before = {"step": max(times.step for times in ranks)}
        costs, update = replace(step.context.costs, hardware=hardware), max(times.update for times in ranks)
        self._job = _Job(step, costs, update, self.rank.device)
        weakref.finalize(self, self._job.cancel)
        self._begun = 0
        self._job.start()

    # -- the switch ---------------------------------------------------------------------------------------------------
    def _look(self) -> None:
        """Let ranks vote on whether all have compiled the new schedule; then take it, or stay."""
        assert self._job is not None
        everyone = self.rank.everyone
        if everyone.most("whether the adapted schedule is compiled", self._job.state) == WORKING:
            return
        mine = self._job.result or Rescheduled(None, "")  # (another rank has said that it stays)
        views = everyone.gather("the adapted schedule", (mine.digest, mine.why))
        self._job.cancel()
        if why := next((why for _, why in views if why), None):
            self._end(f"it stays as it is: {why}", mine)
        elif len({digest for digest, _ in views}) > 1:
            logger.warning("adapt: ranks have made different schedules, and stay with the one that they have")
            self._end("it stays as it is: ranks have made different schedules", mine)
        else:
            self._take(mine)

    def _take(self, result: Rescheduled) -> None:
        entry, step = self._entry, self._step
        assert entry is not None and step is not None and result.step is not None and self._job is not None
        if entry not in self.rank.entries.values() or entry.program(step.pattern) is not step or len(step.beside) > 1:
            self._end("it stays as it is: the program that it is for runs no more", result)
            return
        entry.take_over(step, result.step)
        self._end(f"another one from step {self.rank.steps + 1} on, compiled in {self._job.seconds:.1f} s", result)

    def _end(self, said: str, result: Rescheduled | None = None) -> None:
        """Stop watching, and tell what has become of the schedule."""
        job, self._job = self._job, None
        self._entry = self._step = None
        self._ends, self.told = True, f"schedule: {said}"
        if result is not None and result.before and job is not None:
            self.told += (
                f"; a step takes {self._before['step'] * 1e3:.4g} ms, forecast {result.planned * 1e3:.4g}, "
                f"{result.before * 1e3:.4g} by the times of its operators"
            )
            if result.after:
                self.told += f", {result.after * 1e3:.4g} with the schedule that they give"
        if self.rank.everyone.first():
            logger.info("adapt: %s", self.told)


def _trains_alike(rank: Rank) -> bool:
    """Return whether all ranks run the same programs, and are real."""
    group = rank.everyone.group
    is_real = group is None or not process_groups.is_fake(group)
    return is_real and rank.plan.mesh.get(STAGE_DIM, 1) == 1


class _Cancelled(BaseException):
    """Raised in the thread where nobody waits for its result any more."""


class _Job:
    """Makes and compiles a schedule in a thread of its own."""

    def __init__(self, step: StepProgram, costs: Costs, update: float, device: torch.device) -> None:
        self.step, self.costs, self.update, self.device = step, costs, update, device
        self.result: Rescheduled | None = None
        self.seconds = 0.0  # how long it took
        self._is_cancelled = False

    def start(self) -> None:
        # (no daemon: a process that ends while Inductor works in a thread would crash)
        threading.Thread(target=self._run, name="zgraph-adapt").start()

    def cancel(self) -> None:
        """Let the thread end at the next occasion."""
        self._is_cancelled = True

    @property
    def state(self) -> int:
        if self.result is None:
            return WORKING
        return STAYS if self.result.step is None else READY

    def _run(self) -> None:
        began = time.perf_counter()
        on_device: Any = torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()
        try:
            with on_device:
                result = reschedule(self.step, self.costs, self.update, self._goes_on)
        except _Cancelled:
            return
        except Exception as error:
            logger.warning("adapt: the schedule stays as it is: %s: %s", type(error).__name__, error, exc_info=True)
            result = Rescheduled(None, f"it could not be made: {type(error).__name__}: {error}")
        self.seconds = time.perf_counter() - began
        self.result = result

    def _goes_on(self) -> None:
        if self._is_cancelled or not threading.main_thread().is_alive():
            raise _Cancelled
