"""Which parameter is updated by which rule, with which numbers: a plan's optimizer, resolved for one model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from zgraph.errors import PlanError
from zgraph.names import matches, parameter_names
from zgraph.program.program import ParamSpec

if TYPE_CHECKING:
    from zgraph.plan.plan import Plan

STEP = "/step"  # the count of updates that all parameters share, as long as all have gradients at the same steps


@dataclass(frozen=True)
class Member:
    """One parameter of an update."""

    name: str  # the parameter's name
    record: Any  # the plan's optimizer with its group's values; None where the gradient is only clipped
    group: int  # number of its group
    count: str = STEP  # the STATE that counts its updates: parameters with gradients at the same steps share one


def refuse_complex_clipping(plan: Plan, specs: dict[str, ParamSpec]) -> None:
    """Raise `PlanError` for a plan that clips the gradients of complex parameters."""
    names = [n for n, s in specs.items() if s.dtype.is_complex and s.requires_grad]
    if plan.grad_clip is not None and names:
        raise PlanError(
            f"the gradient of {names[0]!r} can't be clipped",
            where="grad_clip",
            why="it is complex, and update programs compute with real numbers",
            hint="leave grad_clip out, and call torch.nn.utils.clip_grad_norm_ in your own loop",
        )


def members_of(module: nn.Module, specs: dict[str, ParamSpec], optimizer: Any) -> list[Member]:
    """Return every parameter that the optimizer may update, in the module's order; also frozen ones, which may be
    unfrozen.

    `specs` are those of the whole model, also where a rank of a pipeline holds some of it: groups are numbered from 0,
    alike on all ranks, and a pattern may match a parameter of another stage. Parameters that no group of the plan matches
    come first, then the plan's groups in its order, as in an optimizer of torch's: schedulers have numbers for each group.

    Raises `PlanError` for a parameter that two groups match, a group that matches none, and a complex parameter.
    """
    for fault in faults_of(specs, optimizer, module):
        raise fault
    records = [(_patterns(g), g) for g in optimizer.groups]
    known = parameter_names(module)
    keyed: list[tuple[str, Any, Any]] = []  # (name, record, what its group is told by)
    for name, spec in specs.items():
        if not spec.dtype.is_floating_point:
            continue
        names = known.get(name, [name])
        matching = [i for i, (patterns, _) in enumerate(records) if matches(names, patterns)]
        record = _record(optimizer, names, spec, module)
        if matching:
            record = record.model_copy(update=dict(records[matching[0]][1].overrides))
        if (
            record.decay == "matrices"
            and len(spec.shape) < 2
            and not (matching and "weight_decay" in records[matching[0]][1].overrides)
        ):
            record = record.model_copy(update={"weight_decay": 0.0})
        record = record.model_copy(update={"groups": ()})
        key = (
            matching[0] if matching else -1,
            record,
        )  # (groups with equal numbers stay apart: a user may change one of them)
        keyed.append((name, record, key))
    in_order = sorted(dict.fromkeys(key for _, _, key in keyed), key=lambda key: key[0])
    numbers = {key: number for number, key in enumerate(in_order)}
    return [Member(name, record, numbers[key]) for name, record, key in keyed]


def faults_of(specs: dict[str, ParamSpec], optimizer: Any, module: nn.Module) -> Iterator[PlanError]:
    """Yield an error for whatever keeps the optimizer from updating these parameters of a module, each once."""
    if not any(spec.dtype.is_floating_point for spec in specs.values()):
        yield PlanError(
            "the plan has an optimizer, but the model has no floating-point parameters",
            where="optimizer",
            hint="leave it out of the plan",
        )
        return
    records = [(_patterns(g), g) for g in optimizer.groups]
    known = parameter_names(module)
    used = [False] * len(records)
    told: set[tuple[int, ...]] = set()
    for name, spec in specs.items():
        names = known.get(name, [name])
        matching = tuple(i for i, (patterns, _) in enumerate(records) if matches(names, patterns))
        if len(matching) > 1 and matching not in told:
            told.add(matching)
            both = " and ".join(repr(records[i][1].match) for i in matching[:2])
            yield PlanError(
                f"parameter {name!r} is in two groups",
                where="optimizer.groups",
                why=f"both {both} match it" + (f"; it is tied: {' and '.join(map(repr, names))}" if names[1:] else ""),
                hint="make one of the patterns narrower",
            )
        for i in matching:
            used[i] = True
        if not spec.dtype.is_floating_point and spec.requires_grad:
            yield PlanError(
                f"parameter {name!r} is {str(spec.dtype).removeprefix('torch.')}, which no optimizer of a plan updates",
                where="optimizer",
                hint="hold it as two real parameters, or leave the optimizer out of the plan and use torch's",
            )
    hint = f"names look like {next(iter(specs), 'none')!r}"
    for (_, group), was in zip(records, used, strict=True):
        if not was:
            yield PlanError(
                f"the optimizer's group {group.match!r} matches no parameter", where="optimizer.groups", hint=hint
            )
    for pattern in getattr(optimizer, "companion_modules", ()):
        if not any(matches(known.get(name, [name]), [pattern]) for name in specs):
            what = f"companion_modules has a pattern {pattern!r} that matches no parameter"
            yield PlanError(what, where="optimizer.companion_modules", hint=hint)


def _patterns(group: Any) -> tuple[str, ...]:
    return (group.match,) if isinstance(group.match, str) else tuple(group.match)


def _record(optimizer: Any, names: Sequence[str], spec: ParamSpec, module: nn.Module) -> Any:
    """Return the plan's optimizer, or its companion for a parameter that is no matrix. `names` are all names of the
    parameter."""
    companion = getattr(optimizer, "companion", None)
    if companion is None:
        return optimizer
    embeds = any(isinstance(module.get_submodule(n.rpartition(".")[0]), nn.Embedding) for n in names)
    matrix = len(spec.shape) == 2 and not embeds
    return optimizer if matrix and not matches(names, optimizer.companion_modules) else companion
