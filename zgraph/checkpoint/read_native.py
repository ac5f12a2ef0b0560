"""The reader of zgraph's own checkpoints: a manifest, safetensors files, and one file of each rank's own state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from zgraph.checkpoint import manifest
from zgraph.checkpoint.manifest import FileEntry
from zgraph.checkpoint.source import Block, Source
from zgraph.checkpoint.tensorfile import Piece, TensorFile, checksum, read_bytes
from zgraph.errors import CheckpointError

OWN_BYTES = 1 << 30  # no rank's own state has more


class Checkpoint(Source):
    """A checkpoint of zgraph's. Raises `CheckpointError` for a folder that is no checkpoint, or whose manifest is
    damaged."""

    kind = "zgraph"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = manifest.read(folder)
        self.tensors = self.manifest.infos()
        self.known = self.manifest.known
        self._where = {
            (p.name, p.block): (name, p) for name, entry in self.manifest.files.items() for p in entry.pieces
        }
        self._open: dict[str, TensorFile] = {}

    def block(self, name: str, block: Block) -> torch.Tensor:
        file, piece = self._where[name, block]
        return self._file(file).tensor(piece)

    def rows(self, name: str, block: Block, first: int, count: int) -> torch.Tensor:
        file, piece = self._where[name, block]
        return self._file(file).tensor(piece, first, count)

    def _file(self, name: str) -> TensorFile:
        if name not in self._open:
            self._open[name] = TensorFile(self.folder / name)
        return self._open[name]

    def own(self, rank: int) -> dict[str, Any] | None:
        """Return what a rank saved as its own state; None if there was no such rank. Raises `CheckpointError` if it is
        damaged."""
        if rank >= len(self.manifest.own):
            return None
        name = self.manifest.own[rank]
        data = read_bytes(self.folder / name, OWN_BYTES)
        if checksum(data) != self.manifest.files[name].checksum:
            raise self._damaged(name, "its checksum is not that of its bytes")
        try:
            state = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise self._damaged(name, str(error)) from None
        if not isinstance(state, dict):
            raise self._damaged(name, "it is no table")
        return state

    def verify(self, share: int = 0, of: int = 1) -> None:
        """Compare the `share`-th of `of` equal shares of the files with the manifest, byte by byte. Raises
        `CheckpointError`."""
        sizes = sorted(self.manifest.files.items(), key=lambda item: -item[1].nbytes)
        shares: list[int] = [0] * of
        for name, entry in sizes:  # (the largest first, each to the share that has least)
            least = shares.index(min(shares))
            shares[least] += entry.nbytes + 1
            if least == share:
                self._verify(name, entry)

    def _verify(self, name: str, entry: FileEntry) -> None:
        if entry.header is None:
            data = read_bytes(self.folder / name, OWN_BYTES)
            if len(data) != entry.nbytes or checksum(data) != entry.checksum:
                raise self._damaged(name, "its checksum is not the manifest's")
            return
        file = self._file(name)
        if file.nbytes != entry.nbytes or file.header != entry.header[0]:
            raise self._damaged(name, f"it has {file.nbytes} bytes, the manifest says {entry.nbytes}")
        if file.checksum(0, file.header) != entry.header[1]:
            raise self._damaged(name, "the checksum of its header is not the manifest's")
        if list(file.pieces.values()) != [_without_checksum(p) for p in entry.pieces]:
            raise self._damaged(name, "its header has other tensors than the manifest")
        for piece in entry.pieces:
            if file.checksum(piece.start, piece.nbytes) != piece.checksum:
                at = f"{list(piece.block.offsets)}" if any(piece.block.offsets) else "its beginning"
                raise self._damaged(name, f"{piece.name} from {at}: its checksum is not the manifest's")

    def _damaged(self, name: str, why: str) -> CheckpointError:
        hint = "load another checkpoint: model.load_checkpoint(folder, tag), or fallback=True for the last good one"
        return CheckpointError(f"{name} is damaged", where=str(self.folder / name), why=why, hint=hint)


def _without_checksum(piece: Piece) -> Piece:
    return Piece(piece.name, piece.dtype, piece.block, piece.start, piece.nbytes)
