"""Patterns in a plan that match nothing of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from zgraph.capture.tensor_parallel_layout import unmatched as unmatched_rows
from zgraph.errors import PlanError
from zgraph.names import did_you_mean, matches, parameter_names
from zgraph.passes.tiling.tile import LOSS
from zgraph.program.program import TENSOR_DIM
from zgraph.record import joined

if TYPE_CHECKING:
    from zgraph.plan.plan import Plan


@dataclass(frozen=True)
class Unmatched:
    """A pattern in a field of a plan that names nothing of the model."""

    field: str  # the field of the plan
    pattern: str  # the pattern
    error: PlanError  # the error that says so


def unmatched(plan: Plan, model: nn.Module) -> Iterator[Unmatched]:
    """Yield each pattern of `recompute`, `tiles`, `attention` and `tensor_parallel` that matches no module, by any of its names."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    recompute = plan.recompute if isinstance(plan.recompute, tuple) else ()
    tiles = [p for p in plan.tiles if p != LOSS]
    for field, patterns in (("recompute", recompute), ("tiles", tiles), ("attention", list(plan.attention))):
        for pattern in patterns:
            if not matches(names, [pattern]):
                what = f"{field} has a pattern {pattern!r} that matches no module"
                hint = did_you_mean(pattern, [name for name in names if name])
                where = field if field == "recompute" else f"{field}.{pattern}"
                yield Unmatched(field, pattern, PlanError(what, where=where, hint=hint))
    if isinstance(plan.tensor_parallel, Mapping) and plan.mesh.get(TENSOR_DIM, 1) != 1:
        for pattern in plan.tensor_parallel:
            for error in unmatched_rows([pattern], model):
                yield Unmatched("tensor_parallel", pattern, error)


def refuse_unmatched(plan: Plan, model: nn.Module) -> None:
    """Raise `PlanError` for patterns that match no module, or no parameter."""
    faults = [row.error for row in unmatched(plan, model)]
    faults += _unmatched_parameters(plan.wire.exact, model)
    if faults:
        raise joined(faults)


def _unmatched_parameters(patterns: Iterable[str], model: nn.Module) -> Iterator[PlanError]:
    """Yield an error for each pattern of `wire.exact` that matches no parameter by its first name."""
    names = parameter_names(model)
    for pattern in patterns:
        if matches(names, [pattern]):
            continue
        also = next((first for first, every in names.items() if matches(every, [pattern])), None)
        what = f"wire.exact has a pattern {pattern!r} that matches no parameter"
        hint = f"it is called {also!r} here: several modules share it" if also else did_you_mean(pattern, names)
        yield PlanError(what, where="wire.exact", hint=hint)


def without(plan: Plan, faulty: Iterable[Unmatched]) -> Plan:
    """Return the plan without these patterns."""
    lost = {(row.field, row.pattern) for row in faulty}
    changes: dict[str, Any] = {}
    for field in {field for field, _ in lost}:
        patterns = getattr(plan, field)
        remaining = [p for p in patterns if (field, p) not in lost]
        changes[field] = (
            {p: patterns[p] for p in remaining} if isinstance(patterns, Mapping) else tuple(remaining) or "auto"
        )
    return plan.model_copy(update=changes)
