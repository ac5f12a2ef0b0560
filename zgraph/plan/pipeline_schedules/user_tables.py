"""Schedules of the user's own: tables in CSV files and from functions.

A CSV file has the format of torch.distributed.pipelining: a row for each rank, in each cell an action ("2F3") or
nothing. Where torch has written its transfers, gathers and reductions into it ("2SEND_F3", "2UNSHARD"), they are left
out: zgraph finds its own.
"""

from __future__ import annotations

import csv
import importlib
import re
from collections.abc import Sequence
from pathlib import Path

from zgraph.errors import PlanError
from zgraph.plan.pipeline_schedules.actions import Action
from zgraph.plan.pipeline_schedules.schedule import Schedule

__all__ = ["call_function", "is_own", "read_csv", "save_csv"]

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_NO_COMPUTATION = re.compile(r"[0-9]+((SEND|RECV)_[FB][0-9]+|UNSHARD|RESHARD|REDUCE_GRAD)")
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")

Rows = list[list[Action | None]]


def is_own(name: str) -> bool:
    """Return whether a plan's schedule is a file or a function, rather than a name."""
    return name.casefold().endswith(".csv") or _FUNCTION.fullmatch(name) is not None


def read_csv(path: str) -> Rows:
    """Return the rows of a file. Raises `PlanError`, with row and cell counted from 1."""
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            cells = [row for row in csv.reader(file) if row]
    except (OSError, ValueError, csv.Error) as error:  # (ValueError: what is no UTF-8, or no path)
        raise PlanError(f"the schedule {path!r} can't be read", where="schedule", why=str(error)) from error
    return [
        [action for column, cell in enumerate(row) for action in _actions(cell, f"row {line + 1}, cell {column + 1}")]
        for line, row in enumerate(cells)
    ]


def call_function(reference: str, ranks: int, stages: int, micro_batches: int) -> Rows:
    """Return the rows that a user's function gives: for each rank a list of actions, as `Action`, as text, or None for
    an idle slot.

    `reference` is "package.module:function"; it is called with `(ranks, stages, micro_batches)`. Raises `PlanError`.
    """
    module, _, name = reference.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # (a user's module may raise anything)
        raise PlanError(
            f"the schedule {reference!r} can't be loaded",
            where="schedule",
            why=f"{type(error).__name__}: {error}",
            hint="is the module on the Python path?",
        ) from error
    try:
        rows = function(ranks, stages, micro_batches)
    except Exception as error:
        raise PlanError(
            f"the schedule {reference!r} failed for {ranks} ranks, {stages} stages and {micro_batches} micro-batches",
            where="schedule",
            why=f"{type(error).__name__}: {error}",
        ) from error
    if not _is_list(rows) or not all(_is_list(row) for row in rows):
        raise PlanError(
            f"the schedule {reference!r} gave no table",
            where="schedule",
            hint='it must return for each rank a list of actions: [["0F0", "0B0"], ["1F0", "1B0"]]',
        )
    return [
        [action for place, cell in enumerate(row) for action in _actions(cell, f"rank {rank}, place {place}")]
        for rank, row in enumerate(rows)
    ]


def save_csv(schedule: Schedule, path: str | Path) -> None:
    """Write a schedule as torch and `read_csv` read it. Raises `OSError`."""
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(["" if action is None else str(action) for action in row] for row in schedule.rows)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _actions(cell: object, place: str) -> list[Action | None]:
    """Return the actions of a cell. A pair that torch may overlap becomes its two actions."""
    if not isinstance(cell, str | Action | None):
        raise PlanError(f"{place}: {str(cell)[:80]!r} is no action but {type(cell).__name__}", where="schedule")
    # An action is read again from its text, so that what a user made of other types is refused.
    text = "" if cell is None else str(cell).strip()
    if not text:
        return [None]
    if _NO_COMPUTATION.fullmatch(text):
        return []
    pair = _OVERLAPPED.fullmatch(text)
    try:
        return [Action.parse(part) for part in (pair[1].split(";") if pair else [text])]
    except PlanError as error:
        raise PlanError(f"{place}: {error.what}", where=error.where, hint=error.hint) from error
