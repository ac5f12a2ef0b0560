"""Groups of parameter objects as groups of a plan's optimizer record: those of an optimizer of torch's or DeepSpeed's,
or `model_parameters`.

A plan names its parameters, and a script passes objects, so groups are matched by the names that the objects have in
the model.
"""

from __future__ import annotations

import glob
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zgraph.errors import ModelError, PlanError, StepError
from zgraph.plan import optimizers as records

logger = logging.getLogger(__name__)

# Keys of torch's groups that do not change the result of an update: how it is computed, or what a scheduler remembers.
_HOW = (
    "params",
    "names",
    "param_names",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "initial_lr",
    "max_lr",
    "min_lr",
    "max_momentum",
    "base_momentum",
    "swa_lr",
)
_KINDS: dict[type, type[records.Optimizer]] = {
    torch.optim.AdamW: records.AdamW,
    torch.optim.Adam: records.Adam,
    torch.optim.SGD: records.SGD,
    torch.optim.Adagrad: records.Adagrad,
}


def register(kind: type[torch.optim.Optimizer], record: type[records.Optimizer]) -> None:
    """Map a class of optimizers to a plan's record."""
    _KINDS[kind] = record


def groups_of(parameters: Iterable[Any]) -> list[dict[str, Any]]:
    """Return parameters, or groups of them, as a list of groups."""
    given = list(parameters)
    if given and all(isinstance(item, Mapping) for item in given):
        return [{**group, "params": _listed(group["params"])} for group in given]
    return [{"params": given}] if given else []


def _listed(params: Any) -> list[Any]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def names_of(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the names in the model of each group's parameters.

    Raises `ModelError` for a parameter that is not the model's, or is in two groups.
    """
    known = {id(p): name for name, p in model.named_parameters()}
    seen: dict[str, int] = {}
    names: list[list[str]] = []
    for number, group in enumerate(groups):
        mine = []
        for param in group["params"]:
            name = known.get(id(param))
            if name is None:
                raise ModelError(
                    f"group {number} has a parameter of shape {list(param.shape)} that is not the model's",
                    why="an engine trains the parameters of the model that it is given",
                    hint="give initialize the model that has it",
                )
            if name in seen:
                raise ModelError(f"parameter {name!r} is in group {seen[name]} and in group {number}")
            seen[name] = number
            mine.append(name)
        names.append(mine)
    return names


def freeze_others(model: nn.Module, names: Iterable[Iterable[str]]) -> list[str]:
    """Freeze the parameters that are in no group, since DeepSpeed never updates them, with a warning; return the names of all that are in
    no group."""
    trained = {name for group in names for name in group}
    without = [n for n, _ in model.named_parameters() if n not in trained]
    others = [n for n in without if model.get_parameter(n).requires_grad]
    for name in others:
        model.get_parameter(name).requires_grad_(False)
    if others:
        logger.warning(
            "%d parameters are in no group (%s …): they are frozen, since nothing would update them",
            len(others),
            others[0],
        )
    return without


def record_of(optimizer: torch.optim.Optimizer, names: Sequence[Sequence[str]]) -> records.Optimizer | None:
    """Return a plan's record of an optimizer object, with its groups; None for a kind that plans do not support.

    Raises `PlanError` for numbers that the record can't have, `StepError` for an optimizer that has stepped already.
    """
    kind = _KINDS.get(type(optimizer))
    if kind is None:
        return None
    if any(
        _has_states(optimizer.state[p], group)
        for group in optimizer.param_groups
        for p in group["params"]
        if p in optimizer.state
    ):
        raise StepError(
            "the optimizer has made steps already, or its states were changed",
            why="its states become shards of the ranks, and begin with the first update",
            hint="pass a new optimizer; a checkpoint that has the states can be loaded afterwards",
        )
    values = [_values(kind, group) for group in optimizer.param_groups]
    return with_groups(kind(**values[0]), list(zip(names, values, strict=True))[1:])


def _has_states(state: Mapping[str, Any], group: Mapping[str, Any]) -> bool:
    """Return whether a parameter has states that a plan's optimizer does not begin with. (Adagrad has some before its first step.)"""
    begins: dict[str, Any] = {"step": 0, "sum": group.get("initial_accumulator_value")}
    return any(key not in begins or bool(torch.as_tensor(value).ne(begins[key]).any()) for key, value in state.items())


def with_groups(
    record: records.Optimizer, others: Sequence[tuple[Sequence[str], Mapping[str, Any]]]
) -> records.Optimizer:
    """Return the record with further groups, each given by the names of its parameters and its own numbers."""
    groups = tuple(
        records.ParamGroup(match=tuple(map(glob.escape, names)), overrides=dict(values))
        for names, values in others
        if names
    )
    return record.model_copy(update={"groups": groups}) if groups else record


def _values(kind: type[records.Optimizer], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's numbers as fields of a record. Raises `PlanError` for a number that the record does not have."""
    values: dict[str, Any] = {}
    for key, value in group.items():
        if key in _HOW or (isinstance(value, str) and (key not in kind.model_fields or key == "name")):
            continue  # (a text is the group's label)
        if key in kind.model_fields and key not in ("name", "groups", "decay"):
            value = value.item() if isinstance(value, torch.Tensor) else value
            values[key] = tuple(value) if isinstance(value, (list, tuple)) else value
        elif value not in (None, False) and not (key == "decoupled_weight_decay" and kind is records.AdamW):
            raise PlanError(
                f"{kind.__name__} has no number {key!r}",
                where=f"optimizer.{key}",
                why=f"a group of the optimizer has {key} = {value!r}",
                hint="leave it out",
            )
    return values


def of_model_parameters(
    record: records.Optimizer, groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]
) -> records.Optimizer:
    """Return a configuration's optimizer with the groups of `model_parameters`, whose own numbers override the
    configuration's."""
    values = [_values(type(record), group) for group in groups]
    if not any(values) and len(groups) == 1:
        return record
    first = record.model_copy(update=values[0]) if values[0] else record
    base = {k: v for k, v in record.model_dump().items() if any(k in v for v in values)}
    return with_groups(first, [(n, {**base, **v}) for n, v in list(zip(names, values, strict=True))[1:]])
