"""Strides of values. A node's fake value says which strides its real one must have: derivatives were captured for
these.

Some operators' real results have other strides than their fake ones (a layer norm's gradient is contiguous, whatever
its fake value says), and operators that were captured for the fake strides would read them wrongly.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import fx

from zgraph.program import collectives, transfers_to_host
from zgraph.program.node import value
from zgraph.program.sizes import formula, is_symbolic

Strides = tuple[int, ...]


def in_flight(node: fx.Node) -> bool:
    """Return whether a transfer is still running on this node's value, which nothing may read before its wait."""
    if node.op == "placeholder":
        return any(collectives.is_wait(u) or transfers_to_host.is_wait(u) for u in node.users)
    start = node.all_input_nodes[0] if node.target is operator.getitem else node
    return (
        collectives.is_start(start)
        or start.target in collectives.COALESCED.values()
        or transfers_to_host.is_start(start)
    )


def promised(node: fx.Node) -> Strides | None:
    """Return the strides of a node's fake value; None if it is in flight, or no strided tensor of known size."""
    fake = None if in_flight(node) else value(node)
    if not isinstance(fake, torch.Tensor) or fake.layout is not torch.strided:
        return None
    if not all(isinstance(n, int) for n in (*fake.shape, *fake.stride())):
        return None
    return tuple(fake.stride())


def promised_at(node: fx.Node, names: tuple[str, ...]) -> Callable[..., Strides] | None:
    """Return the strides of a node's fake value as a function of the sizes by these names.

    Returns None if all are numbers, or where `promised` does for another reason.
    """
    fake = None if in_flight(node) else value(node)
    if not isinstance(fake, torch.Tensor) or fake.layout is not torch.strided:
        return None
    return formula(fake.stride(), names) if any(is_symbolic(n) for n in (*fake.shape, *fake.stride())) else None


def has_strides(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    """Return whether a tensor has these strides in each dimension of several elements; in others strides do not
    matter."""
    mine = tensor.stride()
    if mine == strides:
        return True
    if len(mine) != len(strides):
        return False
    return not tensor.numel() or all(a == b or n == 1 for a, b, n in zip(mine, strides, tensor.shape, strict=True))


def laid_out(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return the tensor with these strides: itself, or a copy."""
    if has_strides(tensor, strides) or len(strides) != tensor.dim():
        return tensor
    once = tensor
    for dim, stride in enumerate(strides):  # (an expanded dimension is stored once)
        if stride == 0:
            once = once.narrow(dim, 0, 1)
    copy = torch.empty_strided(once.shape, tuple(strides), dtype=tensor.dtype, device=tensor.device)
    copy.copy_(once)
    return copy if copy.shape == tensor.shape else copy.expand(tensor.shape)
