"""One safetensors file: written in one pass with a checksum for each block, read by block.

The header says for each block which part of which tensor it is, in the format of torch's `HuggingFaceStorageWriter`, so
that torch.distributed.checkpoint reads a folder of such files with its own `HuggingFaceStorageReader`. Checksums are
XXH3 of 128 bits.
"""

from __future__ import annotations

import json
import math
import os
import stat
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import xxhash

from zgraph.checkpoint.source import Block, naturals
from zgraph.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SUFFIX = ".safetensors"
SHARDING = "DCP_SHARDING_INFO"  # torch's key in the header's metadata; `OFFSETS` is the key within it
OFFSETS = "saved_offsets"
ALIGNMENT = 8
CHUNK = 16 << 20  # bytes that are read at once


@dataclass(frozen=True)
class Piece:
    """A block of a tensor, and its position in a file."""

    name: str  # the tensor's name
    dtype: str  # its dtype, by safetensors' name
    block: Block  # the block of the tensor
    start: int  # its first byte in the file
    nbytes: int  # its bytes
    checksum: str = ""  # the checksum of its bytes; "" if none is known


@dataclass(frozen=True)
class Written:
    """A file that was written."""

    nbytes: int  # its size
    header: int  # its header's size in bytes, with the 8 that give the length
    checksum: str  # its header's checksum
    pieces: tuple[Piece, ...]  # its blocks, in their order


def checksum(data: Any) -> str:
    """Return the checksum of an object with a buffer."""
    return xxhash.xxh3_128_hexdigest(data)


def data_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU, in row-major order."""
    flat = tensor.detach().contiguous().reshape(-1)
    raw: Any = flat.view(torch.uint8).numpy()
    return memoryview(raw) if flat.numel() else memoryview(b"")


def laid_out(blocks: Sequence[tuple[str, torch.dtype, Block]], *, sharding: bool) -> tuple[bytes, list[Piece]]:
    """Return the header (its length first) of a file that holds these blocks in this order, and each block's position.
    `sharding`: whether the header says where in its tensor each block begins."""
    entries: dict[str, Any] = {}
    metadata: dict[str, str] = {"format": "pt"}
    if sharding:
        offsets = {name: {OFFSETS: list(block.offsets)} for name, _, block in blocks}
        metadata |= {SHARDING: json.dumps(offsets), "DCP_VERSION": "1.0"}
    at = 0
    for name, dtype, block in blocks:
        size = block.elements * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": list(block.sizes), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps({"__metadata__": metadata} | entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    pieces = []
    for name, dtype, block in blocks:
        first, last = entries[name]["data_offsets"]
        pieces.append(Piece(name, NAMES[dtype], block, len(header) + first, last - first))
    return header, pieces


def refuse_unwritable(name: str, dtype: torch.dtype) -> None:
    """Raise `CheckpointError` for a dtype that safetensors have no name for."""
    if dtype not in NAMES:
        raise CheckpointError(
            f"{name} is of {dtype}, which safetensors can't hold", hint="cast it, or leave it out of what is saved"
        )


def write(path: Path, blocks: Sequence[tuple[str, Block, torch.Tensor]]) -> Written:
    """Write a safetensors file, the widest elements first (so that every block is aligned), and flush it to the disk.
    Raises `OSError`."""
    blocks = sorted(blocks, key=lambda block: -block[2].dtype.itemsize)
    header, pieces = laid_out([(n, t.dtype, b) for n, b, t in blocks], sharding=True)
    done = []
    with open(path, "xb") as file:
        file.write(header)
        for piece, (_, _, tensor) in zip(pieces, blocks, strict=True):
            data = data_of(tensor.cpu())
            file.write(data)
            done.append(Piece(piece.name, piece.dtype, piece.block, piece.start, piece.nbytes, checksum(data)))
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    return Written(size, len(header), checksum(header), tuple(done))


def write_bytes(path: Path, data: bytes) -> None:
    """Write a new small file and flush it to the disk. Raises `OSError`, also where the file exists."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def damaged(path: Path, why: str) -> NoReturn:
    raise CheckpointError(f"{path.name} is damaged", where=str(path), why=why, hint="load another checkpoint")


class OpenFile:
    """A regular file, opened for reading; neither a link nor a device. Raises `CheckpointError`, also where the disk
    fails in a read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise _unreadable(path, error) from error
        weakref.finalize(self, os.close, self._descriptor)
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            damaged(path, "it is no regular file")
        self.nbytes = status.st_size

    def read_into(self, target: Any, at: int) -> None:
        """Fill a buffer with the bytes from position `at` on. (A memory mapping would end the process where the disk
        fails.)"""
        with memoryview(target).cast("B") as left:
            done = 0
            while done < len(left):
                try:
                    count = os.preadv(self._descriptor, [left[done : done + CHUNK]], at + done)
                except OSError as error:
                    raise _unreadable(self.path, error) from error
                if not count:
                    damaged(self.path, f"it ends at byte {at + done}")
                done += count

    def read(self, at: int, nbytes: int) -> bytes:
        """Read `nbytes` bytes from position `at`."""
        if at + nbytes > self.nbytes:
            damaged(self.path, f"it ends at byte {self.nbytes}")
        data = bytearray(nbytes)
        self.read_into(data, at)
        return bytes(data)

    def checksum(self, at: int, nbytes: int) -> str:
        """Return the checksum of `nbytes` bytes from position `at`, read in chunks."""
        room, sums = bytearray(min(nbytes, CHUNK)), xxhash.xxh3_128()
        for first in range(at, at + nbytes, CHUNK):
            with memoryview(room)[: min(CHUNK, at + nbytes - first)] as part:
                self.read_into(part, first)
                sums.update(part)
        return sums.hexdigest()


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path.name} can't be read", where=str(path), why=error.strerror or str(error))


def read_bytes(path: Path, most: int) -> bytes:
    """Read all of a file of at most `most` bytes. Raises `CheckpointError`."""
    file = OpenFile(path)
    if file.nbytes > most:
        damaged(path, f"it has {file.nbytes} bytes, and none has more than {most}")
    return file.read(0, file.nbytes)


class TensorFile(OpenFile):
    """A safetensors file, opened for reading. `pieces` are checked: they begin at byte `header`, do not overlap, and
    fill the rest of the file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if self.nbytes < 8:
            damaged(path, f"it has {self.nbytes} bytes")
        self.header = 8 + int.from_bytes(self.read(0, 8), "little")
        if self.header > self.nbytes:
            damaged(path, f"its header would have {self.header} bytes, and the file has {self.nbytes}")
        self.pieces = self._parsed(self.read(8, self.header - 8))

    def _parsed(self, header: bytes) -> dict[str, Piece]:
        try:
            entries = json.loads(header.decode())
            metadata = entries.pop("__metadata__", {})
            offsets = json.loads(metadata[SHARDING]) if SHARDING in metadata else {}
            pieces = {}
            for name, entry in entries.items():
                sizes = naturals(entry["shape"])
                first, last = naturals(entry["data_offsets"])
                begins = naturals(offsets[name][OFFSETS]) if offsets else (0,) * len(sizes)
                dtype = entry["dtype"]
                block = Block(begins, sizes)
                if len(begins) != len(sizes) or last - first != block.elements * DTYPES[dtype].itemsize:
                    raise ValueError(f"{name} has {last - first} bytes, which is not {dtype}{list(sizes)}")
                pieces[name] = Piece(name, dtype, block, self.header + first, last - first)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            damaged(self.path, f"its header can't be read: {type(error).__name__}: {error}"[:300])
        at = self.header
        for piece in sorted(pieces.values(), key=lambda p: (p.start, p.nbytes)):
            if piece.start != at:
                damaged(self.path, f"{piece.name} begins at byte {piece.start}, not at {at}")
            at += piece.nbytes
        if at != self.nbytes:
            damaged(self.path, f"its tensors end at byte {at}, and the file has {self.nbytes}")
        return pieces

    def tensor(self, piece: Piece, first: int = 0, count: int | None = None) -> torch.Tensor:
        """Read a piece, or `count` of its rows from row `first` on."""
        sizes = piece.block.sizes if count is None else (count, *piece.block.sizes[1:])
        tensor = torch.empty(sizes, dtype=DTYPES[piece.dtype])
        if tensor.numel():
            skipped = first * math.prod(sizes[1:]) * tensor.element_size()
            self.read_into(tensor.view(-1).view(torch.uint8).numpy(), piece.start + skipped)
        return tensor
