"""A folder of plain torch.distributed.checkpoint as a source: `.metadata` and `*.distcp`, as FSDP2, torchtitan and
Lightning write them.

`.metadata` is a pickle. It is parsed without constructing any object: torch's own metadata classes become records of
what they hold, and a pickle that names anything else is refused. Each block is a small file of `torch.save` inside a
larger one, at a position that the metadata gives.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from zgraph.checkpoint.formats.key_names import GROUPS, parted
from zgraph.checkpoint.formats.torchfile import (
    MALFORMED,
    Inert,
    Stored,
    TorchFile,
    known_global,
    number,
    plain_group,
    unpickled,
)
from zgraph.checkpoint.manifest import check_tiling
from zgraph.checkpoint.source import MODEL, Block, Source, TensorInfo, naturals
from zgraph.checkpoint.tensorfile import damaged, read_bytes
from zgraph.errors import CheckpointError
from zgraph.update.resume import Known

METADATA = ".metadata"
MOST_BYTES = 1 << 33
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_CLASSES = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "Path"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
    ("builtins", "getattr"),  # (how Python 3.11 writes members of enumerations; it is not called)
    ("__builtin__", "getattr"),
}


class PlainDcp(Source):
    """A folder of torch.distributed.checkpoint, as a source. Raises `CheckpointError` for one that is damaged, or if it
    is ambiguous which part is the model."""

    kind = "torch.distributed.checkpoint"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / METADATA
        try:
            infos, values, paths = self._parsed(read_bytes(path, MOST_BYTES))
            check_tiling(infos)
            parts = parted(list(infos), values, paths, str(folder))
            self.known = Known(groups=self._groups(parts.optimizer, values))
        except MALFORMED as error:
            damaged(path, f"{type(error).__name__}: {error}"[:300])
        if not any(n.startswith(MODEL) for n in parts.names):
            raise CheckpointError("the checkpoint has no model's tensors", where=str(folder))
        self._names = parts.names
        self.tensors = {n: infos[of] for n, of in parts.names.items()}

    def _parsed(self, data: bytes) -> tuple[dict[str, TensorInfo], list[str], dict[str, tuple[str | int, ...]]]:
        """Parse `.metadata`: return the tensors, the names of other values, and the keys that each name was saved
        under. Raises one of `MALFORMED`, and `CheckpointError`."""
        metadata = unpickled(data, self._global).state
        infos, values = {}, []
        for name, entry in metadata["state_dict_metadata"].items():
            if not isinstance(name, str):
                raise ValueError("a name that is no text")
            if entry.origin.endswith(".BytesStorageMetadata"):
                values.append(name)
                continue
            state = entry.state
            properties = state["properties"].state
            dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{name} has no dtype")
            shape = naturals(state["size"])
            blocks = [Block(naturals(c.state["offsets"]), naturals(c.state["sizes"])) for c in state["chunks"]]
            if any(not len(b.offsets) == len(b.sizes) == len(shape) for b in blocks):
                raise ValueError(f"a block of {name} has other dimensions than it")
            filled = tuple(b for b in blocks if b.elements)  # (a rank without rows may have written an empty block)
            infos[name] = TensorInfo(dtype, shape, filled or tuple(blocks[:1]))
        self._places: dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]] = {}
        for index, info in metadata["storage_data"].items():
            if info.state.get("transform_descriptors"):
                raise CheckpointError(
                    "the checkpoint is compressed",
                    where=str(self.folder),
                    hint="save it without extensions of the storage writer",
                )
            file, offset = info.state["relative_path"], index.state.get("offset")
            if not isinstance(file, str) or not FILE_NAME.fullmatch(file):
                raise ValueError(f"it names a file {str(file)[:80]!r}")
            start, nbytes = naturals((info.state["offset"], info.state["length"]))
            self._places[index.state["fqn"], None if offset is None else naturals(offset)] = (file, start, nbytes)
        planned = metadata.get("planner_data")
        paths = {}
        for name, path in (planned if isinstance(planned, dict) else {}).items():
            if not isinstance(path, tuple) or not all(isinstance(p, (str, int)) for p in path):
                raise ValueError(f"the keys of {name} are no keys")
            paths[name] = path
        return infos, values, paths

    def _global(self, module: str, name: str) -> Any:
        known = known_global(module, name)
        if known is not None:
            return known
        if (module, name) not in _CLASSES:
            raise CheckpointError(
                f"{METADATA} names {module}.{name}",
                where=str(self.folder / METADATA),
                why="it is a pickle, which would run what it names; torch.distributed.checkpoint writes no such name",
                hint="do not load this checkpoint if it is not your own",
            )
        return type(name, (Inert,), {"origin": f"{module}.{name}"})

    def block(self, name: str, block: Block) -> torch.Tensor:
        return self._stored(name, block).read()

    def rows(self, name: str, block: Block, first: int, count: int) -> torch.Tensor:
        return self._stored(name, block).rows(first, count)

    def _stored(self, name: str, block: Block) -> Stored:
        info = self.tensors[name]
        value = self._item(self._names[name], block.offsets).value
        if not isinstance(value, Stored) or value.dtype is not info.dtype or value.shape != block.sizes:
            raise CheckpointError(
                f"{self._names[name]} is not what {METADATA} says",
                where=str(self.folder),
                why=f"it should be {list(block.sizes)} of {info.dtype}",
                hint="load another checkpoint",
            )
        return value

    def _item(self, name: str, offsets: tuple[int, ...] | None) -> TorchFile:
        if (name, offsets) not in self._places:
            raise CheckpointError(f"{METADATA} does not say where {name} lies", where=str(self.folder))
        file, start, nbytes = self._places[name, offsets]
        return TorchFile(self.folder / file, start, nbytes)

    def verify(self, share: int = 0, of: int = 1) -> None:
        blocks = [(n, b) for n, info in self.tensors.items() for b in info.blocks]
        for name, block in blocks[share::of]:
            self._item(self._names[name], block.offsets).verify()

    def _groups(self, prefix: str | None, values: list[str]) -> list[dict[str, Any]]:
        """Return the numbers of parameter groups, if groups were saved as such (`param_groups.0.lr`). Flattened ones,
        with each number once for each parameter, are left out."""
        groups: dict[int, dict[str, Any]] = {}
        for name in values if prefix is not None else ():
            words = name.removeprefix(f"{prefix}{GROUPS}.").split(".")
            if name.startswith(f"{prefix}{GROUPS}.") and len(words) == 2 and words[0].isdigit():
                groups.setdefault(int(words[0]), {})[words[1]] = self._item(name, None).value
        return list(_groups(groups))


def _groups(saved: dict[int, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for _, group in sorted(saved.items()):
        names = group.pop("params", None)
        if isinstance(names, list) and all(isinstance(n, str) for n in names):
            numbers = {k: number(v, k) for k, v in group.items() if isinstance(v, Stored)}
            yield {"names": names} | plain_group(group) | numbers
