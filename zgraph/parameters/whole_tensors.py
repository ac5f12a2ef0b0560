"""Gathers whole tensors of DTensors, many with one collective.

A DTensor whose rows are divided over one mesh dimension is gathered in a bucket with others: each rank puts its rows,
padded to the number that the first rank has, one tensor after another, and one all-gather collects them all. A tensor
that is divided in another way (over `tp`) is gathered alone, by torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from zgraph.torch_compat.dtensors import local_of

BUCKET = 256 << 20  # bytes that a bucket, what is sent of it and its whole tensors take by default


class Wanted(NamedTuple):
    """A tensor to gather."""

    tensor: torch.Tensor  # a DTensor, or a plain tensor
    dtype: torch.dtype  # of the whole tensor

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class _Rows:
    """How a tensor's rows are divided."""

    dim: int  # the mesh dimension that divides them
    count: int  # rows of each rank, with padding
    order: tuple[int, ...]  # the tensor's dimensions in memory order, rows first


def _rows(tensor: torch.Tensor) -> _Rows | None:
    """Return how a tensor's rows are divided; None if it is divided otherwise, or not at all."""
    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    cut = [(d, p) for d, p in enumerate(tensor.placements) if not p.is_replicate() and mesh.size(d) > 1]
    if len(cut) != 1 or cut[0][1] != Shard(0):
        return None
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda d: (d != 0, -strides[d], d)))
    return _Rows(cut[0][0], -(-tensor.shape[0] // mesh.size(cut[0][0])), order)


def gathered(wanted: Iterable[Wanted], device: torch.device, max_bytes: int = BUCKET) -> Iterator[torch.Tensor]:
    """Yield the whole of each tensor, in order, on this device, as a plain tensor. One that is not divided is not
    copied, if it has the device and dtype. All ranks must consume all of them.

    A bucket, what is sent of it and its whole tensors take at most `max_bytes`; a single tensor that has more takes its
    own size, and what this rank sends of it.
    """
    for bucket in _buckets(wanted, max_bytes):
        if bucket[0][1] is None:
            item = bucket[0][0]
            held = item.tensor.detach()
            held = held.full_tensor() if isinstance(held, DTensor) and not _is_whole(held) else local_of(held)
            yield held.to(device, item.dtype)
        else:
            yield from _gather([(item, rows) for item, rows in bucket if rows is not None], device)


def _is_whole(tensor: DTensor) -> bool:
    mesh = tensor.device_mesh
    return all(p.is_replicate() or mesh.size(d) == 1 for d, p in enumerate(tensor.placements))


def _buckets(wanted: Iterable[Wanted], max_bytes: int) -> Iterator[list[tuple[Wanted, _Rows | None]]]:
    """Yield the tensors that are gathered together: of one mesh dimension and one dtype, in order. A bucket gets a
    third of the bytes: beside it are what is sent and the whole tensors.
    """
    bucket: list[tuple[Wanted, _Rows | None]] = []
    size, last = 0, None
    for item in wanted:
        rows = _rows(item.tensor)
        kind = None if rows is None else (id(item.tensor.device_mesh), rows.dim, _sent(item))  # type: ignore[attr-defined]
        if bucket and (kind is None or kind != last or size + item.nbytes > max_bytes // 3):
            yield bucket
            bucket, size = [], 0
        bucket.append((item, rows))
        size, last = size + item.nbytes, kind
    if bucket:
        yield bucket


def _sent(item: Wanted) -> torch.dtype:
    """Return the narrower of the two dtypes: a cast commutes with a gather."""
    held = item.tensor.dtype
    return item.dtype if item.dtype.itemsize < held.itemsize else held


def _laid_out(
    bucket: Sequence[tuple[Wanted, _Rows]], sizes: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return this rank's rows of a bucket's tensors, one tensor after another; without a copy for a single tensor that
    is stored so.
    """
    if len(bucket) == 1:
        mine = local_of(bucket[0][0].tensor).detach().permute(bucket[0][1].order)
        if mine.dtype is dtype and mine.device == device and mine.is_contiguous() and mine.numel() == sizes[0]:
            return mine.reshape(-1)
    sent = torch.empty(sum(sizes), dtype=dtype, device=device)
    for (item, rows), at, size in zip(bucket, itertools.accumulate(sizes, initial=0), sizes, strict=False):
        mine = local_of(item.tensor).detach().permute(rows.order)
        sent[at : at + size].view(rows.count, *mine.shape[1:])[: mine.shape[0]].copy_(mine)
    return sent


def _gather(bucket: Sequence[tuple[Wanted, _Rows]], device: torch.device) -> Iterator[torch.Tensor]:
    first, cut = bucket[0]
    assert isinstance(first.tensor, DTensor)
    mesh, dtype = first.tensor.device_mesh, _sent(first)
    ranks = mesh.size(cut.dim)
    sizes = [rows.count * math.prod(item.tensor.shape[1:]) for item, rows in bucket]
    sent = _laid_out(bucket, sizes, dtype, device)
    got = torch.empty(ranks * sent.numel(), dtype=dtype, device=device)
    dist.all_gather_into_tensor(got, sent, group=mesh.get_group(cut.dim))
    del sent
    parts = got.view(ranks, -1).split(sizes, dim=1)
    for (item, rows), part in zip(bucket, parts, strict=True):
        shape = [item.tensor.shape[d] for d in rows.order]
        whole = part.reshape(ranks * rows.count, *shape[1:])[
            : shape[0]
        ]  # (a view, if the tensor is alone in its bucket)
        if len(bucket) > 1 and whole.data_ptr() == part.data_ptr():  # (if each rank has a single element, say)
            whole = whole.clone()
        inverse = sorted(range(len(shape)), key=rows.order.__getitem__)
        yield whole.permute(inverse).to(item.dtype)
