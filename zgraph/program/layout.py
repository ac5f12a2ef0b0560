"""How values lie in memory. A node's fake value says which strides its real one has: derivatives were written for these.

Some operators' real results have other strides than their fake ones (a layer norm's gradient is contiguous, whatever was
promised), and operators that were captured for the promised ones would read them wrongly.
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
    """Whether a transfer is still at work on this node's value, which nothing may read before its wait."""
    if node.op == "placeholder":
        return any(collectives.is_wait(u) or transfers_to_host.is_wait(u) for u in node.users)
    made = node.all_input_nodes[0] if node.target is operator.getitem else node
    return (
        collectives.is_start(made) or made.target in collectives.COALESCED.values() or transfers_to_host.is_start(made)
    )


def promised(node: fx.Node) -> Strides | None:
    """The strides that a node's value has in its program; None if it is no strided tensor of known size, or in flight."""
    fake = None if in_flight(node) else value(node)
    if not isinstance(fake, torch.Tensor) or fake.layout is not torch.strided:
        return None
    if not all(isinstance(n, int) for n in (*fake.shape, *fake.stride())):
        return None
    return tuple(fake.stride())


def promised_at(node: fx.Node, names: tuple[str, ...]) -> Callable[..., Strides] | None:
    """The strides that a node's value has in its program, as a function of the sizes by these names; None if they are numbers, or as in
    `promised`."""
    fake = None if in_flight(node) else value(node)
    if not isinstance(fake, torch.Tensor) or fake.layout is not torch.strided:
        return None
    return formula(fake.stride(), names) if any(is_symbolic(n) for n in (*fake.shape, *fake.stride())) else None


def lies_as(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    """Whether a tensor has these strides, where they mean something: in dimensions with several elements."""
    mine = tensor.stride()
    if mine == strides:
        return True
    if len(mine) != len(strides):
        return False
    return not tensor.numel() or all(a == b or n == 1 for a, b, n in zip(mine, strides, tensor.shape, strict=True))


def laid_out(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The tensor with these strides: itself, or a copy."""
    if lies_as(tensor, strides) or len(strides) != tensor.dim():
        return tensor
    once = tensor
    for dim, stride in enumerate(strides):  # (what repeats is there once)
        if stride == 0:
            once = once.narrow(dim, 0, 1)
    made = torch.empty_strided(once.shape, tuple(strides), dtype=tensor.dtype, device=tensor.device)
    made.copy_(once)
    return made if made.shape == tensor.shape else made.expand(tensor.shape)
