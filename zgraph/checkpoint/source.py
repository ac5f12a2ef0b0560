"""The form in which checkpoints of all systems are read: tensors by name, in blocks, and what is known of the run
besides.

Names are `model.NAME` for parameters and buffers, `optimizer.state.NAME.KEY` for what an optimizer keeps of a parameter
(as torch's flattened optimizer state dicts have it), and `client.RANK.N` for tensors of the user's own. One reader of
torch.distributed.checkpoint serves every kind, so that resharding is torch's.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint import planner as planning
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from zgraph.update.resume import Known

MODEL = "model."
OPTIMIZER = "optimizer.state."
MOST_DIMENSIONS = 64


def natural(value: Any) -> int:
    """Return a size, offset or count read from a checkpoint. Raises `ValueError` if it is none."""
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{str(value)[:80]!r} is no size")
    return value


def naturals(values: Any) -> tuple[int, ...]:
    """Return a shape (or offsets) read from a checkpoint, as a tuple. Raises `ValueError` if it is none."""
    if not isinstance(values, (list, tuple)) or len(values) > MOST_DIMENSIONS:
        raise ValueError(f"{str(values)[:80]!r} is no shape")
    return tuple(map(natural, values))


@dataclass(frozen=True)
class Block:
    """A box of a tensor, in elements."""

    offsets: tuple[int, ...]  # where it begins in each dimension
    sizes: tuple[int, ...]  # how long it is in each dimension

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a checkpoint, and the blocks that it is stored in: together they cover it, and none overlap."""

    dtype: torch.dtype  # its dtype in the checkpoint
    shape: tuple[int, ...]  # its whole shape
    blocks: tuple[Block, ...]  # the blocks that it is stored in

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @staticmethod
    def whole(dtype: torch.dtype, shape: tuple[int, ...]) -> TensorInfo:
        """Return a tensor that is stored in one block."""
        return TensorInfo(dtype, shape, (Block((0,) * len(shape), shape),))


class Source(abc.ABC):
    """A checkpoint that can be read: `kind` names the system that wrote it, `tensors` are its tensors by name."""

    kind: str
    folder: Path
    tensors: dict[str, TensorInfo]
    known: Known
    client: Mapping[str, Any] = MappingProxyType({})  # what a script has added, where a system's files have that

    @abc.abstractmethod
    def block(self, name: str, block: Block) -> torch.Tensor:
        """Read one of the blocks of a tensor, onto the CPU. Raises `CheckpointError` if it can't be read."""

    @abc.abstractmethod
    def verify(self, share: int = 0, of: int = 1) -> None:
        """Read the `share`-th of `of` parts of the checkpoint, and raise `CheckpointError` for what is damaged."""

    def rows(self, name: str, block: Block, first: int, count: int) -> torch.Tensor:
        """Read `count` rows (of dimension 0) of a block from row `first` on."""
        return self.block(name, block)[first : first + count]

    def whole(self, name: str) -> torch.Tensor:
        """Read all of a tensor."""
        info = self.tensors[name]
        if len(info.blocks) == 1:
            return self.block(name, info.blocks[0])
        tensor = torch.empty(info.shape, dtype=info.dtype)
        for block in info.blocks:
            tensor[_box(block.offsets, block.sizes)] = self.block(name, block)
        return tensor

    def reader(self) -> Reader:
        """Return a storage reader for `torch.distributed.checkpoint.load`."""
        return Reader(self)


def _box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))


class Reader(StorageReader):
    """A storage reader by which torch.distributed.checkpoint reads a source: it cuts blocks to what a rank holds."""

    def __init__(self, source: Source) -> None:
        self.source = source

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False  # (there is a source, and no other)

    def reset(self, checkpoint_id: Any = None) -> None:
        return

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        tensors: dict[str, Any] = {}
        for name, info in self.source.tensors.items():
            chunks = [dcp.ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in info.blocks]
            properties = dcp.TensorProperties(dtype=info.dtype)
            tensors[name] = dcp.TensorStorageMetadata(properties, torch.Size(info.shape), chunks)
        return dcp.Metadata(state_dict_metadata=tensors, storage_meta=dcp.StorageMeta())

    def set_up_storage_reader(self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        return

    def prepare_local_plan(self, plan: planning.LoadPlan) -> planning.LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[planning.LoadPlan]) -> list[planning.LoadPlan]:
        return plans

    def read_data(self, plan: planning.LoadPlan, planner: planning.LoadPlanner) -> Future[None]:
        for item in plan.items:
            index = item.storage_index
            info = self.source.tensors[index.fqn]
            number = index.index if index.index is not None else 0
            block = info.blocks[number]
            if index.offset is not None and tuple(index.offset) != block.offsets:
                block = next(b for b in info.blocks if b.offsets == tuple(index.offset))
            at, lengths = tuple(item.storage_offsets), tuple(item.lengths)
            if lengths[:1] < block.sizes[:1]:
                values = self.source.rows(index.fqn, block, at[0], lengths[0])
                at = (0, *at[1:])
            else:
                values = self.source.block(index.fqn, block)
            target = planner.resolve_tensor(item).detach()
            target.copy_(values[_box(at, lengths)])
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done
