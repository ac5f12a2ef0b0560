"""Finds out whether a model counts the padding of its batches: the padding is replaced, and the outputs are compared.

What a model gives for its batch must not depend on what stands behind it. One that masks its padding gives the same; a mean over the
length, attention without a mask, or statistics of a batch do not. What is replaced is the padding of inputs that are nothing but looked
up in a table, or multiplied with weights: a mask, or an input that the model makes one from, has to be as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from zgraph.program.aliases import is_view
from zgraph.program.node import Phase, info
from zgraph.program.program import InputRole, Program
from zgraph.program.tolerance import difference
from zgraph.runtime.pad_to_buckets import Padded

logger = logging.getLogger(__name__)
aten = torch.ops.aten

_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default}
_SAME_VALUES = {
    aten._to_copy.default,
    aten.clone.default,
    aten.alias.default,
    torch.ops.prims.convert_element_type.default,
}


def other_padding(program: Program, flat: Sequence[Any], padded: Padded) -> dict[int, tuple[str, torch.Tensor]]:
    """Return flat inputs of a padded call, by number, with other values behind the batch's: (the input's name, the tensor) of those
    that the program shows to be no mask. Indices are replaced by the batch's first ones, others are larger by 1.
    """
    nodes = {port.index: node for port, node in program.input_items() if port.role is InputRole.INPUT}
    number = {id(x): at for at, x in enumerate(flat)}
    changed: dict[int, tuple[str, torch.Tensor]] = {}
    for path, tensor, pad in padded.inputs:
        at = number.get(id(tensor))
        if at is not None and at in nodes and _is_data(nodes[at]):
            changed[at] = path, _replaced(tensor, {dim: padded.real[pad.size] for dim in pad.dims})
    return changed


def warn_of_counted(before: Sequence[Any], after: Sequence[Any], names: Sequence[str]) -> None:
    """Warn if a call's outputs, without their padding, are others with other padding in the inputs of these names."""
    apart = [at for at, (one, other) in enumerate(zip(before, after, strict=True)) if _differ(one, other)]
    if apart:
        logger.warning(
            "the model counts its padding: output %s (counted flat) is another with other values behind the batch in %s. "
            "Its numbers are not those of the batch as it is: mask the padding, and take no mean and no last value over what is padded "
            "(zgraph.verify(…, compiled=True) compares with the plain model)",
            ", ".join(map(str, apart)),
            ", ".join(names),
        )


def _is_data(source: fx.Node) -> bool:
    """Return whether forward does nothing with an input but look it up in a table, or multiply it with weights."""
    stack, found = [source], False
    while stack:
        at = stack.pop()
        for user in at.users:
            if user.op == "output" or info(user).phase is not Phase.FORWARD:
                continue
            if is_view(user) or user.target in _SAME_VALUES:
                stack.append(user)
            elif user.target is aten.embedding.default or user.target in _PRODUCTS:
                found = True
            else:
                return False
    return found


def _replaced(x: torch.Tensor, real: Mapping[int, int]) -> torch.Tensor:
    """Return a copy with other values from these sizes on."""
    copy = x.detach().clone()
    for dim, length in real.items():
        behind = copy.narrow(dim, length, copy.shape[dim] - length)
        if copy.is_floating_point() or copy.is_complex():
            behind += 1
        elif length:
            behind.copy_(copy.narrow(dim, 0, 1).expand_as(behind))
    return copy.requires_grad_(x.requires_grad)


def _differ(one: Any, other: Any) -> bool:
    tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return tensors and not difference("output", "", 0, one, other).ok
