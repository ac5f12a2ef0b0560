"""Makes a step's programs anew, with transfers scheduled by the times of its own operators, where that is worth it.

*Belief.* The new programs give the same numbers as those before, bit for bit. So only the order of transfers may differ (`passes/analysis/
same_computation.py`), and Inductor must have made the same kernels of it (`codegen/same_kernels.py`); else the step stays as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from zgraph.build.pass_pipeline import Variant
from zgraph.build.step_program import StepProgram
from zgraph.codegen import same_kernels
from zgraph.errors import PlanError
from zgraph.passes.analysis import same_computation
from zgraph.passes.analysis.costs import Costs
from zgraph.passes.analysis.simulator import simulate
from zgraph.program.digest import digest
from zgraph.program.node import has_info, info

MIN_GAIN = 0.03  # of a step's time: less is not worth to be compiled


@dataclass(frozen=True)
class Rescheduled:
    """A step with another schedule, or why it has none."""

    step: StepProgram | None  # the program, compiled; None where the step stays as it is
    why: str  # why it stays; "" where it does not
    planned: float = 0.0  # forecast seconds of the step as it is, by the costs that it was scheduled by
    before: float = 0.0  # the same by the times of its operators
    after: float = 0.0  # forecast seconds of the step with the new schedule, by the times of its operators
    digest: str = ""  # a hash of the new programs, equal on ranks that have made the same


def reschedule(step: StepProgram, costs: Costs, update: float, goes_on: Callable[[], None]) -> Rescheduled:
    """Schedule the transfers of a step by `costs`, which have the times of its operators, and compile what comes of it.

    `update` are the seconds between the step's last backward and the next forward. `goes_on` is called between the
    parts of this work, and may raise. No other rank is told or waited for.
    """
    planned, before = seconds_of(step, step.context.costs, update), seconds_of(step, costs, update)
    goes_on()
    try:
        other = step.rescheduled(costs)
        after = seconds_of(other, costs, update)
        for variant in step.variants_made():
            goes_on()
            name = same_computation.difference(step.history(variant).program, other.history(variant).program)
            if name is not None:
                return Rescheduled(None, f"it would compute {name} otherwise", planned, before, after)
        is_other = any(schedule_of(step, variant) != schedule_of(other, variant) for variant in step.variants_made())
    except PlanError as error:
        return Rescheduled(None, f"the new schedule breaks a bound of the plan: {error.what}", planned, before)
    if not is_other:
        return Rescheduled(None, "the times of its operators give the schedule that it has", planned, before, after)
    if after > before * (1 - MIN_GAIN):
        return Rescheduled(None, "no schedule is forecast to be 3% faster", planned, before, after)
    other.compile_like(step, goes_on)
    if (other_code := same_kernels.difference(step.executables(), other.executables())) is not None:
        return Rescheduled(None, f"compiled, {other_code}", planned, before, after)
    return Rescheduled(other, "", planned, before, after, _digest(other))


def seconds_of(step: StepProgram, costs: Costs, update: float) -> float:
    """Return the forecast seconds of a step with its update; its first gathers run beside the update before it."""
    seconds = update
    for number, (_, variant, times) in enumerate(step.runs()):
        program = step.history(variant).program
        seconds += times * simulate(program, costs, lead=0.0 if number else update).seconds
    return seconds


def schedule_of(step: StepProgram, variant: Variant) -> tuple[str, list[bool]]:
    """Return what is equal in programs of one computation whose transfers start, and are awaited, at the same places."""
    program = step.history(variant).program
    return digest(program), [info(node).ahead for node in program.graph.nodes if has_info(node)]


def _digest(step: StepProgram) -> str:
    programs = [digest(executable.program) for executable in step.executables()]
    return hashlib.sha256(" ".join(programs).encode()).hexdigest()
