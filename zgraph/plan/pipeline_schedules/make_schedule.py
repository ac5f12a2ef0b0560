"""Schedules by what a plan calls them: torch's own by name, and the user's own by file or function.

| name | stages a rank | what |
| --- | --- | --- |
| gpipe | 1 | all forwards, then all backwards (https://arxiv.org/abs/1811.06965) |
| 1f1b | 1 | a backward as soon as there can be one (PipeDream-Flush, https://arxiv.org/abs/2006.09503) |
| interleaved1f1b | any, 2 | 1F1B with several stages a rank (https://arxiv.org/abs/2104.04473) |
| loopedbfs | any, 2 | GPipe with several stages a rank (https://arxiv.org/abs/2211.05953) |
| interleavedzerobubble | any, 2 | 1F1B whose backwards of weights fill the bubble (https://arxiv.org/abs/2401.10241) |
| zb | any, 1 | the same; with one stage a rank it is the paper's ZB-H1 |
| zbvzerobubble, zbv | 2 | ZB-V of the same paper: rank r of p has stages r and 2p - 1 - r |
| dualpipev | 2 | DeepSeek's DualPipe, placed like that (https://arxiv.org/abs/2412.19437) |

Names are looked up without torch; it is loaded for the tables of those that are torch's.
"""

from __future__ import annotations

from typing import NamedTuple

from zgraph.errors import PlanError
from zgraph.names import did_you_mean
from zgraph.plan.pipeline_schedules.actions import Action
from zgraph.plan.pipeline_schedules.schedule import Schedule
from zgraph.plan.pipeline_schedules.user_tables import call_function, is_own, read_csv
from zgraph.plan.pipeline_schedules.validity import check, check_table

__all__ = ["check_name", "make_schedule"]


class _Known(NamedTuple):
    torch: str  # what torch calls it
    virtual: int  # stages on each rank if the plan does not say
    others: bool  # whether another number of stages is possible


_KNOWN = {
    "gpipe": _Known("GPipe", 1, False),
    "1f1b": _Known("1F1B", 1, False),
    "interleaved1f1b": _Known("Interleaved1F1B", 2, True),
    "loopedbfs": _Known("LoopedBFS", 2, True),
    "interleavedzerobubble": _Known("InterleavedZeroBubble", 2, True),
    "zb": _Known("InterleavedZeroBubble", 1, True),
    "zbvzerobubble": _Known("ZBVZeroBubble", 2, False),
    "zbv": _Known("ZBVZeroBubble", 2, False),
    "dualpipev": _Known("DualPipeV", 2, False),
}


def check_name(name: str) -> None:
    """Raise `PlanError` for what is neither a schedule's name, in any case, nor a CSV file or a function."""
    if not is_own(name) and name.casefold() not in _KNOWN:
        raise PlanError(
            f"there is no schedule {name!r}",
            where="schedule",
            hint=f'{did_you_mean(name, _KNOWN)}; a file ends in ".csv", and a function is "package.module:function"',
        )


def make_schedule(name: str, ranks: int, micro_batches: int, virtual: int | None = None) -> Schedule:
    """Return the schedule that a plan names, for `ranks` ranks of the mesh's "pp" and this number of micro-batches.

    `virtual` is the number of stages on each rank; None is the schedule's own, in the table above. A file says it with
    its actions, and a function is asked for one stage if it is None.

    A schedule of torch's has passed `check` for a chain of stages. One of the user's own has passed `check_table`
    only: whether it deadlocks depends on which stages send to which. Raises `PlanError`.
    """
    check_name(name)
    for key, number in (("mesh.pp", ranks), ("micro_batches", micro_batches), ("virtual_stages", virtual)):
        if number is not None and number < 1:
            raise PlanError(f"{key} is {number}", where=key, hint="it is at least 1")
    if is_own(name):
        return _own(name, ranks, micro_batches, virtual)
    known = _KNOWN[name.casefold()]
    if virtual not in (None, known.virtual) and not known.others:
        several = [other for other, row in _KNOWN.items() if row.others]
        raise PlanError(
            f"the schedule {name!r} has {_stages(known.virtual)} a rank, not {virtual}",
            where="virtual_stages",
            hint=f"leave virtual_stages out, or take a schedule that can have any number: {', '.join(several)}",
        )
    virtual = known.virtual if virtual is None else virtual
    rows = _torch_rows(name, ranks, virtual, micro_batches)
    schedule = Schedule.from_rows(name.casefold(), rows, ranks * virtual, micro_batches)
    check(schedule)
    return schedule


def _torch_rows(name: str, ranks: int, virtual: int, micro_batches: int) -> list[list[Action | None]]:
    from zgraph.plan.pipeline_schedules.torch_tables import rows_of

    known = _KNOWN[name.casefold()].torch

    def fits(count: int) -> bool:
        try:
            return bool(rows_of(known, ranks, virtual, count))
        except (ValueError, AssertionError):
            return False

    try:
        return rows_of(known, ranks, virtual, micro_batches)
    except (ValueError, AssertionError) as error:
        # Every schedule takes a multiple of its stages as the number of micro-batches.
        most = -(-micro_batches // (ranks * virtual)) * ranks * virtual
        fewer = next(filter(fits, range(micro_batches - 1, 0, -1)), None)
        more = next(filter(fits, range(micro_batches + 1, most + 1)), None)
        near = " or ".join(str(n) for n in (fewer, more) if n is not None)
        raise PlanError(
            f"the schedule {name!r} can't have {micro_batches} micro-batches on {ranks} ranks of {_stages(virtual)}",
            where="micro_batches",
            why=f"torch says: {error}",
            hint=f"{near} would fit",
        ) from error


def _own(name: str, ranks: int, micro_batches: int, virtual: int | None) -> Schedule:
    if name.casefold().endswith(".csv"):
        rows = read_csv(name)
        actions = [action for row in rows for action in row if action is not None]
        stages = 1 + max((action.stage for action in actions), default=-1)
        there = 1 + max((action.micro_batch for action in actions), default=-1)
        if there != micro_batches:
            raise PlanError(
                f"the schedule {name!r} is for {there} micro-batches, and the plan has {micro_batches}",
                where="micro_batches",
            )
        if virtual is not None and stages != ranks * virtual:
            raise PlanError(
                f"the schedule {name!r} has {stages} stages, and {ranks} ranks of {_stages(virtual)} have {ranks * virtual}",
                where="virtual_stages",
                hint="leave virtual_stages out: the file says it",
            )
    else:
        stages = ranks * (virtual or 1)
        rows = call_function(name, ranks, stages, micro_batches)
    if len(rows) != ranks:
        raise PlanError(
            f"the schedule {name!r} has {len(rows)} rows, and the mesh has {ranks} ranks of pp", where="schedule"
        )
    schedule = Schedule.from_rows(name, rows, stages, micro_batches)
    check_table(schedule)
    return schedule


def _stages(count: int) -> str:
    return "one stage" if count == 1 else f"{count} stages"
