"""The division of parameters among DeepSpeed's tensor-parallel ranks, and their parts put together.

DeepSpeed 0.19.8 writes it as `universal_checkpoint_info`, which its own conversion reads: the blocks of each parameter
by rank (`affine_map`) and, for parameters without them, the patterns of names that are cut by rows, are whole on every
rank, or are several parameters in one. Megatron's checkpoints have only the patterns. Without this information the
division is unknown: a fused weight looks like a plain one.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zgraph.checkpoint.formats.deepspeed_partitions import Read, StoredTensor
from zgraph.checkpoint.formats.torchfile import Stored
from zgraph.checkpoint.source import naturals
from zgraph.errors import CheckpointError, UnsupportedError

INFO = "universal_checkpoint_info"
AFFINE_VERSION = 1  # the newest version of the `affine_map` that is known here
WIDTHS_SINCE = (
    0.4  # the first version of the information that gives the widths of each rank's part of a fused parameter
)


@dataclass(frozen=True)
class Piece:
    """A block of a parameter: its position in the whole parameter and in a rank's part, in elements."""

    rank: int  # the tensor-parallel rank that has it
    shape: tuple[int, ...]  # its shape
    whole: tuple[int, tuple[int, ...]]  # in the whole: first element, strides
    part: tuple[int, tuple[int, ...]]  # in the rank's part: first element, strides


@dataclass(frozen=True)
class Merged:
    """A tensor put together from tensor-parallel ranks' parts."""

    dtype: torch.dtype  # its dtype
    shape: tuple[int, ...]  # its whole shape
    parts: tuple[StoredTensor, ...]  # each rank's part
    pieces: tuple[Piece, ...]  # the blocks that it consists of; where several ranks have one, they must agree
    name: str  # the parameter's name, for errors
    folder: Path  # the checkpoint's folder, for errors
    averaged: bool = False  # whether it is the mean of the ranks' parts

    def read(self) -> torch.Tensor:
        """Read all of it. Raises `CheckpointError` where ranks differ in a block that several hold, or a block is
        missing."""
        parts = [part.read().reshape(-1) for part in self.parts]
        if self.averaged:
            return (sum(parts[1:], parts[0].clone()) / len(parts)).reshape(self.shape)
        tensor = torch.empty(math.prod(self.shape), dtype=self.dtype)
        filled = torch.zeros(tensor.numel(), dtype=torch.bool)
        for piece in self.pieces:
            block = parts[piece.rank].as_strided(piece.shape, piece.part[1], piece.part[0])
            target = tensor.as_strided(piece.shape, piece.whole[1], piece.whole[0])
            filled_part = filled.as_strided(piece.shape, piece.whole[1], piece.whole[0])
            if not torch.equal(target[filled_part], block[filled_part]):
                raise CheckpointError(
                    f"tensor-parallel ranks hold different values of {self.name}",
                    where=str(self.folder),
                    why="its description says that they hold the same",
                    hint="load another checkpoint: the ranks had drifted apart",
                )
            target.copy_(block)
            filled_part.fill_(True)
        if not bool(filled.all()):
            raise CheckpointError(f"no tensor-parallel rank holds a part of {self.name}", where=str(self.folder))
        return tensor.reshape(self.shape)

    def rows(self, first: int, count: int) -> torch.Tensor:
        """Read `count` of its rows (of dimension 0) from row `first` on. Raises `CheckpointError`."""
        return self.read()[first : first + count]


class Layout:
    """The division of a checkpoint's parameters among its tensor-parallel ranks."""

    def __init__(self, info: Any, ranks: int, folder: Path) -> None:
        if not isinstance(info, dict):
            raise UnsupportedError(
                "a DeepSpeed checkpoint of tensor parallelism without a description can't be read",
                where=str(folder),
                why=f"its files say nothing of how {ranks} ranks had divided each parameter (no {INFO})",
                hint="save it with DeepSpeed 0.19.8, which writes it; or convert it with DeepSpeed's ds_to_universal, and load that",
            )
        self._info = info
        self._ranks = ranks
        self._folder = folder
        affine = info.get("affine_map") or {}
        if affine.get("version", AFFINE_VERSION) > AFFINE_VERSION:
            raise UnsupportedError(
                f"a DeepSpeed checkpoint whose parameters are described in version {affine['version']}",
                where=str(folder),
                why=f"version {AFFINE_VERSION} is known",
                hint="convert it with its own DeepSpeed's ds_to_universal, and load that",
            )
        self._affine: Mapping[str, Any] = affine.get("params") or {}

    def merged(self, name: str, parts: Sequence[StoredTensor], *, weight: bool = True) -> Merged:
        """Return a parameter, or a state of one, put together from the ranks' parts. Raises `CheckpointError`, and
        `UnsupportedError` for what is not described."""
        shapes = [tuple(p.shape) for p in parts]
        if len({p.dtype for p in parts}) > 1:
            raise CheckpointError(f"ranks hold {name} in several dtypes", where=str(self._folder))
        self._refuse(name)
        averaged = False
        if (key := self._match(self._affine, name)) is not None:
            shape, pieces = self._of_map(name, self._affine[key], shapes, weight=weight)
        elif self._says("tp_replicated_parameter_patterns", name):
            shape, pieces = self._whole(name, shapes)
        elif self._says("parameter_to_average_patterns", name):
            (shape, pieces), averaged = self._whole(name, shapes), True
        else:
            shape, pieces = self._of_patterns(name, shapes)
            if self._says("vocabulary_parameter_patterns", name):
                shape, pieces = self._without_padding(shape, pieces)
        return Merged(parts[0].dtype, shape, tuple(parts), tuple(pieces), name, self._folder, averaged)

    # -- what is said of a name -----------------------------------------------------------------------------------------
    @staticmethod
    def _match(patterns: Iterable[str], name: str) -> str | None:
        return next((p for p in patterns if isinstance(p, str) and re.match(p, name)), None)

    def _says(self, key: str, name: str) -> bool:
        return self._match(self._info.get(key) or (), name) is not None

    def _refuse(self, name: str) -> None:
        patterns = self._info.get("autotp_unsupported_parameter_patterns") or {}
        if (key := self._match(patterns, name)) is not None:
            raise UnsupportedError(
                f"{name} of a DeepSpeed checkpoint of tensor parallelism can't be read",
                where=str(self._folder),
                why=str(patterns[key])[:300],
            )

    # -- blocks -----------------------------------------------------------------------------------------------------------
    def _of_map(
        self, name: str, said: Mapping[str, Any], shapes: Sequence[tuple[int, ...]], *, weight: bool
    ) -> tuple[tuple[int, ...], list[Piece]]:
        """Return (shape, blocks) by the `affine_map`'s entry for a name: {"logical_shape", "ranks": {rank:
        {"shard_shape", "pieces"}}}."""
        shape, pieces = naturals(said["logical_shape"]), list[Piece]()
        ranks = {int(rank): entry for rank, entry in said["ranks"].items()}
        if sorted(ranks) != list(range(self._ranks)):
            raise CheckpointError(f"{name} is described for other ranks than there are", where=str(self._folder))
        for rank, entry in sorted(ranks.items()):
            if naturals(entry["shard_shape"]) != shapes[rank]:
                self._other_shape(name, rank, naturals(entry["shard_shape"]), shapes[rank])
            for piece in entry["pieces"]:
                if piece.get("scale", 1.0) != 1.0:
                    what = "a weight" if weight else "an optimizer's state"
                    raise UnsupportedError(
                        f"{name} of a DeepSpeed checkpoint of tensor parallelism can't be read",
                        where=str(self._folder),
                        why=f"ranks hold {what} multiplied by {piece['scale']}, so its updates were others",
                    )
                whole = (naturals([piece["source"][0]])[0], naturals(piece["source"][1]))
                part = (naturals([piece["dest"][0]])[0], naturals(piece["dest"][1]))
                new_piece = Piece(rank, naturals(piece["shape"]), whole, part)
                for (first, strides), within in ((whole, shape), (part, shapes[rank])):
                    last = first + sum((n - 1) * s for n, s in zip(new_piece.shape, strides, strict=True))
                    if math.prod(new_piece.shape) and last >= math.prod(within):
                        raise CheckpointError(f"a block of {name} lies outside of it", where=str(self._folder))
                pieces.append(new_piece)
        return shape, pieces

    def _whole(self, name: str, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], list[Piece]]:
        for rank, shape in enumerate(shapes):
            if shape != shapes[0]:
                self._other_shape(name, rank, shapes[0], shape)
        at = (0, _strides(shapes[0]))
        return shapes[0], [Piece(rank, shapes[0], at, at) for rank in range(len(shapes))]

    def _of_patterns(self, name: str, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], list[Piece]]:
        """Return (shape, blocks) by the patterns that a name matches: divided along dimension 1 or 0, or several
        parameters in one, each divided."""
        if self._says("parameter_with_2_sub_params_cat_dim_0", name):
            return self._cut(name, shapes, 0, [[s[0] // 2 for s in shapes]] * 2)
        for fused in self._info.get("parameter_with_sub_params") or ():
            fused = fused if isinstance(fused, dict) else fused.state  # (a record of DeepSpeed's own)
            if (key := self._match(fused["patterns"], name)) is not None:
                return self._fused(name, shapes, fused, key)
        by_rows = self._says("parameter_with_row_parallelism_patterns", name)
        dim = 1 if by_rows and len(shapes[0]) > 1 else 0
        return self._cut(name, shapes, dim, [[s[dim] for s in shapes]])

    def _fused(
        self, name: str, shapes: Sequence[tuple[int, ...]], said: Mapping[str, Any], key: str
    ) -> tuple[tuple[int, ...], list[Piece]]:
        dim = said["partition_dim"]
        sizes = said["shape"][dim]
        widths = (self._info.get("sub_param_shard_widths") or {}).get(key)
        if widths is None:
            total = sum(s[dim] for s in shapes)
            sizes = list(sizes) if isinstance(sizes, (list, tuple)) else [total // sizes] * sizes
            version = self._info.get("universal_checkpoint_version", 0.0)
            if version >= WIDTHS_SINCE or any(size % self._ranks for size in sizes) or sum(sizes) != total:
                raise UnsupportedError(
                    f"{name} of a DeepSpeed checkpoint of tensor parallelism can't be read",
                    where=str(self._folder),
                    why=f"it is {len(sizes)} parameters in one, and how wide each rank's part of each is was not saved",
                )
            widths = [[size // self._ranks] * self._ranks for size in sizes]
        return self._cut(name, shapes, dim, widths)

    def _cut(
        self, name: str, shapes: Sequence[tuple[int, ...]], dim: int, widths: Sequence[Sequence[int]]
    ) -> tuple[tuple[int, ...], list[Piece]]:
        """Return (shape, blocks) of a parameter divided along one dimension: `widths[i][rank]` is the width of a rank's
        part of the `i`-th of the parameters in one."""
        for rank, shape in enumerate(shapes):
            expected = list(shapes[0])
            expected[dim] = sum(w[rank] for w in widths)
            if shape != tuple(expected):
                self._other_shape(name, rank, expected, shape)
        whole = list(shapes[0])
        whole[dim] = sum(map(sum, widths))
        strides, pieces, at = _strides(whole), list[Piece](), 0
        begun = [0] * len(shapes)
        for fused in widths:
            for rank, width in enumerate(fused):
                block = list(whole)
                block[dim] = width
                own = _strides(shapes[rank])
                pieces.append(Piece(rank, tuple(block), (at * strides[dim], strides), (begun[rank] * own[dim], own)))
                at, begun[rank] = at + width, begun[rank] + width
        return tuple(whole), pieces

    def _without_padding(self, shape: tuple[int, ...], pieces: Sequence[Piece]) -> tuple[tuple[int, ...], list[Piece]]:
        """Return (shape, blocks) of a vocabulary without the rows that were added to divide it evenly."""
        rows = min(shape[0], self._info.get("original_vocab_size") or shape[0])
        clipped_pieces, row_elements = list[Piece](), math.prod(shape[1:])
        for piece in pieces:
            first = piece.whole[0] // row_elements if row_elements else 0
            count = max(0, min(piece.shape[0], rows - first))
            clipped_pieces.append(Piece(piece.rank, (count, *piece.shape[1:]), piece.whole, piece.part))
        return (rows, *shape[1:]), clipped_pieces

    def _other_shape(self, name: str, rank: int, said: Sequence[int], actual: Sequence[int]) -> None:
        raise UnsupportedError(
            f"{name} of a DeepSpeed checkpoint of tensor parallelism can't be read",
            where=str(self._folder),
            why=f"rank {rank} holds {list(actual)}, and its description says {list(said)}",
            hint="DeepSpeed describes some layers (GPT-2's Conv1D) in another way than it cuts them",
        )


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def merge(layout: Layout, reads: Sequence[Read], states: Sequence[Mapping[str, Any]], folder: Path) -> Read:
    """Return what all tensor-parallel ranks hold, put together. `reads`: the tensors of each one's files; `states`: its
    model state. Raises `CheckpointError` and `UnsupportedError`."""
    merged = Read(groups=reads[0].groups)
    names = list(reads[0].weights)
    weights = [_held(state) for state in states]
    for read, table in zip(reads, weights, strict=True):
        if list(read.weights) != names or table.keys() != weights[0].keys():
            raise CheckpointError("tensor-parallel ranks hold other parameters", where=str(folder))
    for name in names:
        merged.weights[name] = layout.merged(name, [read.weights[name] for read in reads])
    for (name, key), first in reads[0].states.items():
        parts = [read.states.get((name, key)) for read in reads]
        plain = [p for p in parts if isinstance(p, torch.Tensor)]
        if isinstance(first, torch.Tensor):
            if len(plain) < len(parts) or any(not torch.equal(first, p) for p in plain):
                raise CheckpointError(f"tensor-parallel ranks are of different steps of {name}", where=str(folder))
            merged.states[name, key] = first
        else:
            whole = [p for p in parts if p is not None and not isinstance(p, torch.Tensor)]
            if len(whole) < len(parts):
                raise CheckpointError(f"a tensor-parallel rank has no {key} of {name}", where=str(folder))
            merged.states[name, key] = layout.merged(name, whole, weight=False)
    places = {(w.start, w.shape) for n, w in weights[0].items() if n in merged.weights}
    tied = states[0].get("shared_params") or {}
    for name, first in weights[0].items():  # what no optimizer has: frozen parameters below stage 2
        if name not in merged.weights and name not in tied and (first.start, first.shape) not in places:
            merged.weights[name] = layout.merged(name, [table[name] for table in weights])
    return merged


def _held(state: Mapping[str, Any]) -> dict[str, Stored]:
    """Return the parameters in a rank's model file; those that a ZeRO stage has emptied are left out."""
    buffers = set(state.get("buffer_names") or ())
    module = state.get("module") or {}
    return {n: v for n, v in module.items() if isinstance(v, Stored) and n not in buffers and v.elements}


def check_buffers(states: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Raise `UnsupportedError` for a buffer that differs between tensor-parallel ranks."""
    names = states[0].get("buffer_names") or ()
    buffers = [{name: (state.get("module") or {}).get(name) for name in names} for state in states]
    for one, other in itertools.pairwise(buffers):
        check_same(one, other, folder)


def check_same(one: Mapping[str, Any], other: Mapping[str, Any], folder: Path) -> None:
    """Raise `UnsupportedError` for a tensor that differs between two tensor-parallel ranks."""
    for name, mine in one.items():
        theirs = other.get(name)
        if not isinstance(mine, Stored) and not isinstance(theirs, Stored):
            continue
        tensors = [x for x in (mine, theirs) if isinstance(x, Stored)]
        alike = len(tensors) == 2 and tensors[0].shape == tensors[1].shape
        if not (alike and torch.equal(tensors[0].read(), tensors[1].read())):
            raise UnsupportedError(
                f"buffer {name} of a DeepSpeed checkpoint of tensor parallelism can't be read",
                where=str(folder),
                why="it is another one on each rank, and how these make a whole is not saved",
            )
