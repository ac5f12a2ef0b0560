"""Who shares memory with whom, among what goes into a program, what it keeps, and what it hands out."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from zgraph.program import torch_private


def address(tensor: torch.Tensor) -> int:
    """Where a tensor's memory begins: the same number for all tensors on one storage, as long as one of them lives."""
    return tensor.untyped_storage().data_ptr()


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte, and of the one behind its last."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Have two spans a byte in common?"""
    return one[0] < other[1] and other[0] < one[1]


def owned(
    values: Sequence[torch.Tensor], others: Collection[int], transferred: Collection[int] = ()
) -> list[torch.Tensor]:
    """The tensors that a backward gives, each in memory that nothing else reads or writes: those that have none of their own are copied.

    Whoever gets one may write to it: `.grad` is added to, clipped and scaled in place, and torch looks only at the tensor, not at its memory.
    `others` are the ids of tensors that stay where they are: a program may give an input back as it is. What came out of a collective
    (`transferred`, by position) is in memory that was made for it, which the transport may hold a little longer. The `values` were made
    without bases of views (`torch_private.without_bases`): a base would count as one more tensor on their memory.
    """
    taken = set(others)
    made: list[torch.Tensor] = []
    for at, value in enumerate(values):
        own = id(value) not in taken and torch_private.elements_are_apart(value)
        if own and torch_private.holders(value) > 1:
            own = _beside(value, values, made, at in transferred)
        if not own:
            value = value.clone()
        taken.add(id(value))
        made.append(value)
    return made


def _beside(
    value: torch.Tensor, values: Sequence[torch.Tensor], made: Sequence[torch.Tensor], transferred: bool
) -> bool:
    """Is the memory of `value` shared with other `values` alone, and its part of it with none of those that are `made` already?"""
    here, mine = address(value), span(value)
    sharing = {id(v) for v in values if address(v) == here}
    known = transferred or torch_private.holders(value) == len(sharing)
    return known and not any(overlap(mine, span(m)) for m in made)
