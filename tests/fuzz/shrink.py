"""Make a failing case smaller while it still fails in the same way: fewer blocks, options, fields of the plan, ranks, steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from .case import Case, Line
from .runner import Outcome
from .scenarios import fits

Run = Callable[[Case], Outcome]


def shrink(found: Outcome, run: Run, seconds: float = 45.0) -> Outcome:
    """The smallest case that could be found in so many seconds that fails with the same word and, where it raises, the same reason."""
    end = time.monotonic() + seconds
    smallest, before = found, None
    while smallest is not before:
        before = smallest
        for case in smaller(smallest.case):
            if time.monotonic() > end:
                return smallest
            outcome = run(case)
            if _alike(outcome, found):
                smallest = outcome
                break
    return smallest


def _alike(outcome: Outcome, found: Outcome) -> bool:
    mine, theirs = outcome.verdict, found.verdict
    return mine.word == theirs.word and (mine.word == "wrong" or mine.reason == theirs.reason)


def smaller(case: Case) -> Iterator[Case]:
    """Cases with one thing less, those with the most less first."""
    for at in range(len(case.lines)):
        if len(case.lines) > 1:
            yield replace(case, lines=case.lines[:at] + case.lines[at + 1 :])
    plan = dict(case.plan)
    for key in plan:
        if key not in ("backend", "mesh", "optimizer", "zero", "precision"):
            yield replace(case, plan=tuple((k, v) for k, v in case.plan if k != key))
    if case.argument:
        yield replace(case, argument=None)
    for option in case.options:
        yield replace(case, options=tuple(o for o in case.options if o != option))
    for name in case.inputs:
        yield replace(case, inputs=tuple(n for n in case.inputs if n != name))
    if case.steps > 1:
        yield replace(case, steps=case.steps - 1)
    for at, line in enumerate(case.lines):
        for other in _simpler(line):
            yield replace(case, lines=(*case.lines[:at], other, *case.lines[at + 1 :]))
    yield from _simpler_rest(case)


def _simpler(line: Line) -> Iterator[Line]:
    if line.way == "parallel":
        for kind in line.kinds:
            # (the choices of a block are those of its own place: the second one's are others when it is alone)
            yield Line("plain", (kind,), line.seed)
    elif line.way != "plain":
        yield Line("plain", line.kinds, line.seed)


def _simpler_rest(case: Case) -> Iterator[Case]:
    plan = dict(case.plan)
    if case.tokens:
        yield replace(case, tokens=False)
    for change in ({"output": "loss"}, {"loss": "square"}, {"style": "usual"}, {"optimizer": "SGD"}):
        ((field, value),) = change.items()
        other = replace(case, **change)  # type: ignore[arg-type]
        if getattr(case, field) not in (value, None) and fits(other.style, other):
            yield other
    if plan.get("optimizer", {"name": "SGD"}) not in ({"name": "SGD"}, {"name": "SGD", "lr": 0.1}):
        yield replace(case, plan=tuple({**plan, "optimizer": {"name": "SGD", "lr": 0.1}}.items()))
    if plan["zero"] not in (0, 3) or (plan["zero"] == 3 and "offload" not in plan):
        yield replace(case, plan=tuple({**plan, "zero": 0}.items()))
    if case.run == "inductor":
        yield replace(case, run="eager", plan=tuple({**plan, "backend": "eager"}.items()))
    for dim in case.mesh:
        if len(case.mesh) > 1:
            mesh = {d: s for d, s in case.mesh.items() if d != dim}
            world = case.world // case.mesh[dim]
            kept = {k: v for k, v in plan.items() if dim != "pp" or k != "schedule"}
            yield replace(case, plan=tuple({**kept, "mesh": mesh}.items()), world=world)
