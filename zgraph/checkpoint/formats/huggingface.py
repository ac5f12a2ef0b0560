"""A folder of safetensors as weights: of transformers (one file, or several with an index), or of torch's
`HuggingFaceStorageWriter`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch

from zgraph.checkpoint.formats.key_names import parted
from zgraph.checkpoint.manifest import check_tiling
from zgraph.checkpoint.source import MODEL, Block, Source, TensorInfo
from zgraph.checkpoint.tensorfile import DTYPES, SUFFIX, Piece, TensorFile, damaged, read_bytes
from zgraph.errors import CheckpointError
from zgraph.update.resume import Known

INDEX = ".index.json"
MOST_BYTES = 1 << 30
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}\.safetensors")


class Safetensors(Source):
    """A folder of safetensors, or one such file, as a source. Raises `CheckpointError` where files lack something or do
    not fit together."""

    kind = "safetensors"

    def __init__(self, path: Path) -> None:
        self.folder = path if path.is_dir() else path.parent
        files = [TensorFile(self.folder / name) for name in (self._listed() if path.is_dir() else [path.name])]
        self._pieces: dict[str, dict[tuple[int, ...], tuple[TensorFile, Piece]]] = {}
        for file in files:
            for piece in file.pieces.values():
                blocks = self._pieces.setdefault(piece.name, {})
                first = blocks.setdefault(piece.block.offsets, (file, piece))
                if first[1] is not piece and first[1].block.elements and piece.block.elements:
                    damaged(file.path, f"{piece.name} is in {first[0].path.name} too")
                if piece.block.elements:  # (a rank without rows may have written an empty block)
                    blocks[piece.block.offsets] = (file, piece)
        infos = {name: self._info(name) for name in self._pieces}
        check_tiling(infos)
        self._names = parted(list(infos), (), {}, str(path)).names
        if not any(n.startswith(MODEL) for n in self._names):
            raise CheckpointError("the checkpoint has no tensors", where=str(path))
        self.tensors = {n: infos[of] for n, of in self._names.items()}
        self.known = Known()

    def _listed(self) -> list[str]:
        """Return the folder's files of tensors; those that the index names, if there is one, which must hold what it
        says."""
        present = sorted(p.name for p in self.folder.iterdir() if p.name.endswith(SUFFIX))
        indices = sorted(p for p in self.folder.iterdir() if p.name.endswith(SUFFIX + INDEX))
        if len(indices) > 1:
            raise CheckpointError(
                "the folder has two indices of weights",
                where=str(self.folder),
                hint="name one file, or one folder each",
            )
        if not indices:
            return present
        try:
            weights = json.loads(read_bytes(indices[0], MOST_BYTES))["weight_map"]
            names = sorted(set(weights.values()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            damaged(indices[0], f"{type(error).__name__}: {error}"[:300])
        for name in names:
            if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
                damaged(indices[0], f"it names a file {str(name)[:80]!r}")
        lost = next((n for n in names if n not in present), None)
        if lost is not None:
            raise CheckpointError(f"{lost} is missing", where=str(self.folder), why=f"{indices[0].name} names it")
        for name in names:
            pieces = TensorFile(self.folder / name).pieces
            without = next((n for n, file in weights.items() if file == name and n not in pieces), None)
            if without is not None:
                damaged(indices[0], f"{name} does not hold {str(without)[:80]}")
        return names

    def _info(self, name: str) -> TensorInfo:
        pieces = [piece for _, piece in self._pieces[name].values()]
        first = pieces[0]
        for file, piece in self._pieces[name].values():
            if piece.dtype != first.dtype or len(piece.block.sizes) != len(first.block.sizes):
                damaged(file.path, f"{name} has another type or other dimensions than in other files")
        blocks = [p.block for p in pieces]
        shape = tuple(max(b.offsets[d] + b.sizes[d] for b in blocks) for d in range(len(blocks[0].sizes)))
        filled = tuple(b for b in blocks if b.elements)
        return TensorInfo(DTYPES[first.dtype], shape, filled or (first.block,))

    def block(self, name: str, block: Block) -> torch.Tensor:
        file, piece = self._pieces[self._names[name]][block.offsets]
        return file.tensor(piece)

    def rows(self, name: str, block: Block, first: int, count: int) -> torch.Tensor:
        file, piece = self._pieces[self._names[name]][block.offsets]
        return file.tensor(piece, first, count)

    def verify(self, share: int = 0, of: int = 1) -> None:
        """Do nothing: such files have no checksums, and opening them has compared their sizes with their headers."""
