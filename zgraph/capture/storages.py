"""Memory that is shared among what goes into a program, what it keeps, and what it returns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from zgraph.program.program import OutputRole, Program
from zgraph.torch_compat import tensor_storage

K = TypeVar("K")


def address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage: the same for all tensors on it while one of them lives. 0 if it has
    none."""
    return tensor_storage.storage_address(tensor)


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte, and of the one after its last."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return whether two spans have a byte in common."""
    return one[0] < other[1] and other[0] < one[1]


def owned(
    values: Sequence[torch.Tensor], others: Collection[int], transferred: Collection[int] = ()
) -> list[torch.Tensor]:
    """Return a backward's tensors, each in memory that nothing else reads or writes: those that share theirs are
    copied.

    Whoever gets one may write to it: `.grad` is added to, clipped and scaled in place, and torch looks only at the
    tensor, not at its memory. `others` are the ids of tensors that stay in use: a program may return an input as it is.
    The result of a collective (`transferred`, by position) is in memory that was made for it, which the transport may
    hold a little longer. The `values` were made without bases of views (`autograd_state.without_bases`): a base would
    count as one more tensor on their memory.
    """
    used_ids = set(others)
    tensors: list[torch.Tensor] = []
    for at, value in enumerate(values):
        own = id(value) not in used_ids and tensor_storage.elements_are_apart(value)
        if own and tensor_storage.holders(value) > 1:
            own = _beside(value, values, tensors, at in transferred)
        if not own:
            value = value.clone()
        used_ids.add(id(value))
        tensors.append(value)
    return tensors


def _beside(
    value: torch.Tensor, values: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], transferred: bool
) -> bool:
    """Return whether only other `values` share the memory of `value`, and none of those already in `tensors` overlaps it."""
    here, mine = address(value), span(value)
    sharing = {id(v) for v in values if address(v) == here}
    known = transferred or tensor_storage.holders(value) == len(sharing)
    return known and not any(overlap(mine, span(m)) for m in tensors)


@dataclass(frozen=True)
class Sharing:
    """The memory that the values of one forward program share with others: the same at each run.

    What the backward reads must not be written to before it.
    """

    copied: frozenset[int]  # outputs copied first: separate in the plain model, or within reach of the forward's writes
    linked: frozenset[int]  # flat outputs that are views of each other in the plain model too
    lent: frozenset[int]  # flat outputs that are views of inputs in the plain model too
    read_inputs: frozenset[int]  # flat inputs whose memory the backward reads
    read_outputs: tuple[int, ...]  # flat outputs whose memory the backward reads
    read_params: frozenset[str]  # parameters whose memory the backward reads

    def handed(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """Return a flat output as a user gets it.

        Autograd lets a user write to a tensor that is no view; for a view it must know the base.
        """
        if index in self.linked or index in self.lent:
            return value.view_as(value)
        return value.detach() if value._is_view() else value


def sharing(
    program: Program,
    values: Sequence[Any],
    flat: Sequence[Any],
    params: Mapping[str, torch.Tensor],
    kept: Iterable[torch.Tensor],
    plain: PlainStorages,
) -> Sharing:
    """Return what a forward `program` shares, from one run of it.

    `values` are its outputs, `flat` its flat inputs, `params` what it took for the parameters, and `kept` the whole
    weights that are kept for later forwards.
    """
    inputs = _by_address({i: v for i, v in enumerate(flat) if isinstance(v, torch.Tensor)})
    weights, gathers = _by_address(params), _by_address(dict(enumerate(kept)))
    mutated = {p.index for p in program.outputs if p.role is OutputRole.MUTATION}
    given: dict[int, set[int]] = {}  # flat outputs by address
    saved: set[int] = set()
    copied: set[int] = set()
    for at, (port, value) in enumerate(zip(program.outputs, values, strict=True)):
        here = address(value)
        written = inputs.get(here, set()) & mutated
        if here == 0:
            continue
        if port.role is OutputRole.OUTPUT and port.index is not None:
            lent = (here in inputs or here in weights) and not plain.of_inputs(port.index)
            mixed = any(not plain.same(port.index, other) for other in given.get(here, ()))
            if lent or mixed or here in gathers:
                copied.add(at)
            else:
                given.setdefault(here, set()).add(port.index)
        elif (port.role is OutputRole.SAVED and written) or (
            port.role is OutputRole.MUTATION and written - {port.index}
        ):
            copied.add(at)
        elif port.role is OutputRole.SAVED:
            saved.add(here)
    return Sharing(
        copied=frozenset(copied),
        linked=frozenset(i for group in given.values() if len(group) > 1 for i in group),
        lent=frozenset(i for here, group in given.items() if here in inputs or here in weights for i in group),
        read_inputs=frozenset(i for here, group in inputs.items() if here in saved for i in group),
        read_outputs=tuple(sorted(i for here, group in given.items() if here in saved for i in group)),
        read_params=frozenset(n for here, group in weights.items() if here in saved for n in group),
    )


def _by_address(tensors: Mapping[K, torch.Tensor]) -> dict[int, set[K]]:
    keys_by_address: dict[int, set[K]] = {}
    for key, tensor in tensors.items():
        if (here := address(tensor)) != 0:
            keys_by_address.setdefault(here, set()).add(key)
    return keys_by_address


@dataclass(frozen=True)
class PlainStorages:
    """The storages of the plain model's flat inputs and outputs: a number for each, equal for those on one storage."""

    inputs: tuple[int | None, ...]  # the number of each flat input, None for other values than tensors
    outputs: tuple[int | None, ...]  # the number of each flat output, None for other values than tensors

    def of_inputs(self, output: int) -> bool:
        return self.outputs[output] is not None and self.outputs[output] in self.inputs

    def same(self, output: int, other: int) -> bool:
        return self.outputs[output] == self.outputs[other]


def written_twice(written: Collection[int], flat: Sequence[Any], others: Collection[int]) -> tuple[int, int] | None:
    """Return the positions of two flat inputs whose memory overlaps, one of them `written` and one among the `others`;
    None if there are none.

    A program writes to each of its inputs as if it shared memory with no other.
    """
    places: dict[int, list[int]] = {}
    for at in {*written, *others}:
        if isinstance(flat[at], torch.Tensor) and (here := address(flat[at])):
            places.setdefault(here, []).append(at)
    for group in places.values():
        for one in group if len(group) > 1 else ():
            for other in group:
                pair = one in written and one != other and (one in others or other in others)
                if pair and overlap(span(flat[one]), span(flat[other])):
                    return one, other
    return None
