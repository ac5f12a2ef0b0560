"""Gathers whole tensors of DTensors: large ones straight into their memory, many small ones with one transfer.

A DTensor may be cut along several dimensions, by several mesh dimensions; the innermost cut is undone first. If the
parts of a large tensor follow each other in its memory, as rows do, each arrives where it belongs. Other parts, of
whatever dtypes, are packed: those of one rank behind each other, as bytes, and copied from there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from zgraph.parameters.reused_memory import ReusedMemory
from zgraph.torch_compat import process_groups
from zgraph.torch_compat.dtensors import local_of

BUCKET = 256 << 20  # bytes that a bucket, what is sent of it and its whole tensors take by default
UNPACKED = 256 << 10  # bytes of a rank's part, from which on it has a transfer of its own: a packed one is copied twice
_ALIGNED = 16  # bytes that packed parts begin at multiples of: a view of a dtype needs those of its elements


class Wanted(NamedTuple):
    """A tensor to gather."""

    tensor: torch.Tensor  # a DTensor, or a plain tensor
    dtype: torch.dtype  # of the whole tensor

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class _Cut:
    """One cut of a tensor, into parts for the ranks of a mesh dimension."""

    mesh_dim: int  # the mesh dimension
    dim: int  # the tensor's dimension that is cut
    sizes: tuple[int, ...]  # the length of each rank's part
    mine: int  # this rank's place among them


@dataclass(frozen=True)
class _Step:
    """A tensor of which one cut is undone."""

    cut: _Cut  # the cut
    shape: tuple[int, ...]  # the shape without it
    order: tuple[int, ...]  # the tensor's dimensions in memory order
    inverse: tuple[int, ...]  # the place of each dimension in that order
    dtype: torch.dtype  # in which parts are sent
    nbytes: tuple[int, ...]  # of each rank's part

    @property
    def is_in_parts(self) -> bool:
        """Whether parts follow each other in memory."""
        return all(self.shape[d] == 1 for d in self.order[: self.inverse[self.cut.dim]])

    def laid_out(self, memory: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """Return the tensor in these bytes, or the part of a rank."""
        shape = list(self.shape)
        if rank is not None:
            shape[self.cut.dim] = self.cut.sizes[rank]
        return memory.view(self.dtype).view([shape[d] for d in self.order]).permute(self.inverse)

    def bytes_of(self, part: torch.Tensor, device: torch.device) -> torch.Tensor | None:
        """Return the memory of a part, if it is on this device and laid out as it is sent; else None."""
        laid = part.permute(self.order)
        same = laid.is_contiguous() and laid.dtype is self.dtype and laid.device == device
        return laid.view(-1).view(torch.uint8) if same else None


@dataclass(frozen=True)
class _Divided:
    """A tensor that ranks hold parts of."""

    wanted: Wanted  # the tensor
    cuts: tuple[_Cut, ...]  # outermost first
    order: tuple[int, ...]  # its dimensions in memory order
    dtype: torch.dtype  # in which parts are sent: the narrower of the two, since a cast commutes with a gather

    def step(self, cuts: int) -> _Step:
        """Return what undoes the last of its `cuts` outermost cuts."""
        *outer, cut = self.cuts[:cuts]
        shape = list(self.wanted.tensor.shape)
        for other in outer:
            shape[other.dim] = other.sizes[other.mine]
        row = math.prod(n for d, n in enumerate(shape) if d != cut.dim) * self.dtype.itemsize
        inverse = sorted(range(len(shape)), key=self.order.__getitem__)
        return _Step(cut, tuple(shape), self.order, tuple(inverse), self.dtype, tuple(row * n for n in cut.sizes))


def gathered(
    wanted: Iterable[Wanted],
    device: torch.device,
    max_bytes: int = BUCKET,
    memory: ReusedMemory | None = None,
    ranks: Collection[int] | None = None,
) -> Iterator[torch.Tensor | None]:
    """Yield the whole of each tensor, in order, on this device, as a plain tensor. One that is not divided is not
    copied, if it has the device and dtype. All ranks must consume all of them.

    `ranks`: the global numbers of the ranks that need them, by default all. The others send what they hold, and get None
    for each tensor.

    On a CPU the memory of a large tensor is used again as soon as nothing holds it (that of an earlier call too, which
    got the same `memory`). Packed parts, whole tensors and such memory take at most `max_bytes`; a single tensor that
    has more takes its own size, and as much again if its parts don't follow each other in its memory.
    """
    memory = memory or ReusedMemory(device, max_bytes)
    here = ranks is None or dist.get_rank() in ranks
    for bucket in _buckets(wanted, max_bytes):
        wholes = _gather(bucket, device, memory, ranks)
        yield from wholes if here else (None for _ in wholes)


def _divided(wanted: Wanted) -> _Divided | None:
    """Return how ranks hold parts of a tensor; None if each has it whole, or it is cut in a way that only torch knows."""
    tensor = wanted.tensor
    if not isinstance(tensor, DTensor):
        return None
    mesh, shape, cuts = tensor.device_mesh, list(tensor.shape), []
    for at, placement in enumerate(tensor.placements):
        if placement.is_replicate() or mesh.size(at) == 1:
            continue
        if type(placement) is not Shard:
            return None
        dim, mine = placement.dim, mesh.get_local_rank(at)
        most = -(-shape[dim] // mesh.size(at))
        sizes = tuple(max(0, min(most, shape[dim] - most * rank)) for rank in range(mesh.size(at)))
        cuts.append(_Cut(at, dim, sizes, mine))
        shape[dim] = sizes[mine]
    if not cuts:
        return None
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda d: (-strides[d], d)))
    stored = tensor.dtype
    return _Divided(wanted, tuple(cuts), order, wanted.dtype if wanted.dtype.itemsize < stored.itemsize else stored)


_Bucket = list[tuple[Wanted, _Divided | None]]


def _buckets(wanted: Iterable[Wanted], max_bytes: int) -> Iterator[_Bucket]:
    """Yield the tensors that are gathered together: those cut by the same mesh dimensions, and those that are whole.

    A bucket gets a third of the bytes: beside it are its packed parts and the whole tensors.
    """
    bucket: _Bucket = []
    size, kind = 0, None
    for item in wanted:
        divided = _divided(item)
        nbytes, mine = 0, None
        if divided is not None:
            mesh = item.tensor.device_mesh  # type: ignore[attr-defined]
            nbytes, mine = item.nbytes, (id(mesh), tuple(cut.mesh_dim for cut in divided.cuts))
        if kind is not None and mine is not None and (mine != kind or size + nbytes > max_bytes // 3):
            yield bucket
            bucket, size, kind = [], 0, None
        bucket.append((item, divided))
        size, kind = size + nbytes, kind or mine
    if bucket:
        yield bucket


def _gather(
    bucket: _Bucket, device: torch.device, memory: ReusedMemory, ranks: Collection[int] | None
) -> Iterator[torch.Tensor | None]:
    """Yield the whole tensors of a bucket; on ranks that do not need them, None for those that are divided."""
    divided = [cut for _, cut in bucket if cut is not None]
    parts: list[torch.Tensor | None] = [local_of(cut.wanted.tensor).detach() for cut in divided]
    if divided:
        first = divided[0]
        mesh: DeviceMesh = first.wanted.tensor.device_mesh  # type: ignore[attr-defined]
        dims = [cut.mesh_dim for cut in first.cuts]
        links = [_Link(mesh, dims[: at + 1], device, ranks) for at in range(len(dims))]
        for cuts in range(len(links), 1, -1):
            parts = list(_joined([d.step(cuts) for d in divided], parts, links[cuts - 1], memory))
        wholes = _joined([d.step(1) for d in divided], parts, links[0], memory)
        del parts
    for item, cut in bucket:
        if cut is not None:
            whole = next(wholes)
            yield whole if whole is None else whole.to(item.dtype)
            del whole  # (its memory is used again)
        else:
            stored = item.tensor.detach()
            stored = stored.full_tensor() if isinstance(stored, DTensor) and not _is_whole(stored) else local_of(stored)
            yield stored.to(device, item.dtype)


def _is_whole(tensor: DTensor) -> bool:
    mesh = tensor.device_mesh
    return all(p.is_replicate() or mesh.size(d) == 1 for d, p in enumerate(tensor.placements))


class _Link:
    """The ranks of a mesh dimension, which exchange parts.

    gloo's all-gather copies everything twice more, into memory of its own, so over gloo each rank broadcasts its part
    (which may have any size). Others gather parts of one size at once. Parts that only some ranks need are sent to these.
    """

    def __init__(
        self, mesh: DeviceMesh, dims: Sequence[int], device: torch.device, ranks: Collection[int] | None
    ) -> None:
        """Connect the ranks of the last of these mesh dimensions; along the others cuts are undone later. `ranks`: those
        that need whole tensors."""
        *later, dim = dims
        self.group, self.ranks, self.mine = mesh.get_group(dim), mesh.size(dim), mesh.get_local_rank(dim)
        self.device = device
        self.receivers = list(range(self.ranks)) if ranks is None else _receivers(mesh, dim, later, ranks)
        self.receives = self.mine in self.receivers
        self.to_all = len(self.receivers) == self.ranks
        self.in_equal_parts = self.to_all and process_groups.backend_of(self.group.group_name, device)[0] != "gloo"

    def sizes(self, needed: Sequence[int]) -> list[int]:
        """Return the bytes that each rank's part takes, of those needed; the first rank needs the most."""
        return [needed[0]] * self.ranks if self.in_equal_parts else list(needed)

    def take(self, sizes: Sequence[int], memory: ReusedMemory) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for what this rank is to hold of parts of these sizes, which is all or its own, and its own in it."""
        if self.receives:
            received = memory.take(sum(sizes))
            return received, received.split(list(sizes))[self.mine]
        own = memory.take(sizes[self.mine])
        return own, own

    def exchange(self, received: torch.Tensor, sizes: Sequence[int], mine: torch.Tensor) -> None:
        """Fill memory with all ranks' parts, of these sizes, behind each other, on ranks that need them. `mine`: the
        bytes of this rank's part; where they are not in that memory yet, they are copied while others arrive.
        """
        parts = list(received.split(list(sizes))) if self.receives else []
        own = parts[self.mine][: mine.numel()] if parts else mine
        there = own.data_ptr() == mine.data_ptr()
        if self.in_equal_parts:
            if not there:
                own.copy_(mine)
            if received.numel():
                process_groups.all_gather(received, parts[self.mine], self.group)
            return
        sent = self._broadcasts(parts, mine) if self.to_all else self._messages(parts, mine)
        if not there:
            own.copy_(mine)
        for work in sent:
            work.wait()

    def _broadcasts(self, parts: list[torch.Tensor], mine: torch.Tensor) -> list[dist.Work]:
        return [
            dist.broadcast(mine if rank == self.mine else part, group=self.group, group_src=rank, async_op=True)
            for rank, part in enumerate(parts)
            if part.numel()
        ]

    def _messages(self, parts: list[torch.Tensor], mine: torch.Tensor) -> list[dist.Work]:
        to = [rank for rank in self.receivers if rank != self.mine and mine.numel()]
        messages = [dist.P2POp(dist.isend, mine, group=self.group, group_peer=rank) for rank in to]
        for rank, part in enumerate(parts):
            if rank != self.mine and part.numel():
                messages.append(dist.P2POp(dist.irecv, part, group=self.group, group_peer=rank))
        return dist.batch_isend_irecv(messages) if messages else []


def _receivers(mesh: DeviceMesh, dim: int, later: Collection[int], ranks: Collection[int]) -> list[int]:
    """Return which ranks of a mesh dimension need the parts of the others: those whose tensors reach one of `ranks` when
    the cuts along the `later` dimensions are undone."""
    here = mesh.get_coordinate()
    assert here is not None
    places = [place for rank in ranks for place in (mesh.mesh == rank).nonzero().tolist()]
    fixed = [d for d in range(mesh.ndim) if d != dim and d not in later]
    return sorted({place[dim] for place in places if all(place[d] == here[d] for d in fixed)})


def _joined(
    steps: Sequence[_Step], parts: Sequence[torch.Tensor | None], link: _Link, memory: ReusedMemory
) -> Iterator[torch.Tensor | None]:
    """Yield each tensor with a cut undone, on ranks that need it; else None. `parts` are this rank's."""
    own = [part for part in parts if part is not None]
    if not link.receivers:
        yield from [None] * len(steps)
        return
    direct = [s.is_in_parts and (len(steps) == 1 or s.nbytes[0] >= UNPACKED) for s in steps]
    packed = [(step, part) for step, part, alone in zip(steps, own, direct, strict=True) if not alone]
    unpacked = _unpacked(packed, link, memory) if packed else iter(())
    for step, part, alone in zip(steps, own, direct, strict=True):
        yield _in_place(step, part, link, memory) if alone else next(unpacked)


def _in_place(step: _Step, part: torch.Tensor, link: _Link, memory: ReusedMemory) -> torch.Tensor | None:
    """Return a tensor with a cut undone, each part of which was received in its place."""
    sizes = link.sizes(step.nbytes)
    mine = step.bytes_of(part, link.device)
    if link.receives or mine is None:
        received, own = link.take(sizes, memory)
        if mine is None:
            mine = own[: step.nbytes[link.mine]]
            step.laid_out(mine, link.mine).copy_(part)
    else:
        received = mine
    link.exchange(received, sizes, mine)
    return step.laid_out(received[: sum(step.nbytes)]) if link.receives else None


def _unpacked(
    packed: Sequence[tuple[_Step, torch.Tensor]], link: _Link, memory: ReusedMemory
) -> Iterator[torch.Tensor | None]:
    """Yield tensors with a cut undone, whose parts are all sent packed."""
    begins: list[list[int]] = []  # of each part of each rank, in the rank's bytes; the last is where these end
    for rank in range(link.ranks):
        needed = [-(-step.nbytes[rank] // _ALIGNED) * _ALIGNED for step, _ in packed]
        begins.append(list(itertools.accumulate(needed, initial=0)))
    sizes = link.sizes([at[-1] for at in begins])
    received, own = link.take(sizes, memory)

    def there(number: int, rank: int, segment: torch.Tensor) -> torch.Tensor:
        step, begin = packed[number][0], begins[rank][number]
        return step.laid_out(segment[begin : begin + step.nbytes[rank]], rank)

    def joined(number: int, segments: Sequence[torch.Tensor]) -> torch.Tensor:
        step = packed[number][0]
        whole = step.laid_out(memory.take(sum(step.nbytes)))
        for rank, part in enumerate(whole.split(step.cut.sizes, step.cut.dim)):
            part.copy_(there(number, rank, segments[rank]))
        return whole

    for number, (_, part) in enumerate(packed):
        there(number, link.mine, own).copy_(part)
    link.exchange(received, sizes, own)
    if not link.receives:
        yield from [None] * len(packed)
        return
    segments = received.split(sizes)
    for number in range(len(packed)):
        yield joined(number, segments)
