"""Puts the outputs of a step's micro-batches together to that of the whole batch."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from zgraph.capture.batch import Call


def detached(output: Any) -> Any:
    return _mapped(lambda x: x.detach(), [output])


def leaves_of(output: Any) -> list[torch.Tensor]:
    """Return an output's tensors in the order in which they are put together."""
    leaves: list[torch.Tensor] = []
    _mapped(leaves.append, [output])
    return leaves


def rows_by_place(
    output: Any,
    handed: Sequence[Any],
    rows_of_outputs: Mapping[int, int | None],
    call: Call,
    is_part: Callable[[torch.Tensor], bool],
) -> dict[int, int | None]:
    """Return the dimension that has a micro-batch's rows for each tensor of its output, by its place among them; None for one that
    has them in none. What is not known is left out.

    `handed` are the model's flat outputs, `rows_of_outputs` what is known of them, by their numbers.
    """
    number = {id(value): at for at, value in enumerate(handed) if isinstance(value, torch.Tensor)}
    given = {id(leaf) for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor) and not is_part(leaf)}
    found: dict[int, int | None] = {}
    for place, leaf in enumerate(leaves_of(output)):
        if id(leaf) in given:
            found[place] = None
        elif number.get(id(leaf)) in rows_of_outputs:
            found[place] = rows_of_outputs[number[id(leaf)]]
    return found


def join_outputs(
    outputs: Sequence[Any], shares: Sequence[float], sizes: Sequence[int | None], rows: Mapping[int, int | None]
) -> Any:
    """Return the whole batch's output: scalars are averaged by weight, tensors joined along the dimension that has the rows.

    `rows` says which dimension that is (see `rows_by_place`). A tensor of which it is not known is joined along dimension 0 where
    it has a micro-batch's size there. Other tensors and values are the last micro-batch's. Pytrees and dataclasses are traversed.
    """
    if len(outputs) == 1:
        return outputs[0]
    places = {id(leaf): place for place, leaf in enumerate(leaves_of(outputs[-1]))}

    def join(*parts: torch.Tensor) -> torch.Tensor:
        if parts[0].dim() == 0 and parts[0].is_floating_point():
            counted = [(p.to(torch.float64), s) for p, s in zip(parts, shares, strict=True) if s]  # 0/0 targets is NaN
            return torch.stack([p * s for p, s in counted]).sum().to(parts[0].dtype)
        place = places[id(parts[-1])]
        by_size = all(p.dim() > 0 and p.shape[0] == size for p, size in zip(parts, sizes, strict=True))
        dim = rows.get(place, 0 if by_size else None)
        return parts[-1] if dim is None else torch.cat(parts, dim)

    return _mapped(join, outputs)


def _mapped(function: Callable[..., Any], values: Sequence[Any]) -> Any:
    """Apply `function` to the tensors at the same position of several values of one structure, and return the results
    in that structure.
    """
    first = values[-1]
    if isinstance(first, torch.Tensor):
        return function(*values)
    if dataclasses.is_dataclass(first) and not isinstance(first, type) and not isinstance(first, dict):
        mapped = copy.copy(first)
        for field in dataclasses.fields(first):
            object.__setattr__(mapped, field.name, _mapped(function, [getattr(v, field.name) for v in values]))
        return mapped
    leaves, spec = pytree.tree_flatten(first)
    if len(leaves) == 1 and leaves[0] is first:
        if any(isinstance(v, torch.Tensor) for v in getattr(first, "__dict__", {}).values()):  # a plain object
            plain = copy.copy(first)
            plain.__dict__.update({k: _mapped(function, [vars(v)[k] for v in values]) for k in vars(first)})
            return plain
        if not isinstance(first, dict):
            return first
        known: dict[Any, Any] = copy.copy(first)  # a kind of dict that pytree does not know, as a ModelOutput may be
        for key in first:
            known[key] = _mapped(function, [v[key] for v in values])
        return known
    flat = [pytree.tree_leaves(v) for v in values]
    if any(len(f) != len(leaves) for f in flat):
        return first
    return pytree.tree_unflatten([_mapped(function, column) for column in zip(*flat, strict=True)], spec)
