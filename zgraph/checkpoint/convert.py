"""Write a checkpoint of any system as one of zgraph's, as a plain folder of torch.distributed.checkpoint, or as
DeepSpeed's, in one process.

Tensors are read and written one after another, in files of about a gigabyte, so the model need not fit in the host's
memory.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from zgraph.checkpoint import folder, manifest
from zgraph.checkpoint.detect_format import UNIVERSAL
from zgraph.checkpoint.formats.write_deepspeed import Layout, write_deepspeed
from zgraph.checkpoint.manifest import FileEntry, Manifest
from zgraph.checkpoint.read_native import Checkpoint
from zgraph.checkpoint.saving import failed
from zgraph.checkpoint.source import MODEL, OPTIMIZER, Block, Source
from zgraph.checkpoint.tensorfile import NAMES, checksum, refuse_unwritable, write, write_bytes
from zgraph.errors import CheckpointError

logger = logging.getLogger(__name__)

FILE_BYTES = 1 << 30


SYSTEMS = ("zgraph", "dcp", "deepspeed")


def convert(
    source: Source,
    path: Path,
    tag: str,
    to: Literal["zgraph", "dcp", "deepspeed"] = "zgraph",
    *,
    layout: Layout = "universal",
    ranks: int | None = None,
) -> Path:
    """Write a checkpoint anew, as `tag` in the folder `path`, and return its folder. Needs no process group.

    "zgraph": as `save_checkpoint` does; `latest` then names it. "dcp": as torch.distributed.checkpoint's default writer does, as {"model":
    {NAME: tensor}, "optimizer": {"state": {NAME: {KEY: tensor}}, "param_groups": […]}}, for `dcp.load`; without counts of steps and what users
    added. "deepspeed": as DeepSpeed 0.19 saves, in a `layout`: partitions of ZeRO stage 1, 2 or 3 for `ranks` data-parallel ranks (by default
    the number that saved the checkpoint), or universal, which DeepSpeed loads on any number (`"checkpoint": {"load_universal": true}`); without
    what users added.

    The source is verified first. Raises `CheckpointError` for a source that is damaged, for a folder that can't be written, and if the tag
    exists already; nothing is then changed.
    """
    if to not in SYSTEMS:
        raise CheckpointError(
            f"a checkpoint can't be written as {to!r}", why=f"they are written as {', '.join(SYSTEMS)}"
        )
    chosen = folder.checked_tag(tag)
    if os.path.lexists(path / chosen):
        raise CheckpointError(
            "there is something already", where=str(path / chosen), hint="give another tag (--as), or another folder"
        )
    if source.known.left_out and to != "zgraph":
        raise CheckpointError(
            f"{len(source.known.left_out)} frozen weights are not in the checkpoint ({source.known.left_out[0]}, …)",
            where=str(source.folder),
            why="it was saved with frozen=False",
            hint="load it into the model, and save that: model.save_checkpoint(folder), model.save_pretrained(folder)",
        )
    source.verify()
    unfinished: folder.Unfinished | None = None
    try:
        serial = folder.next_serial(path) if to == "zgraph" else 0
        unfinished = folder.begin(path, chosen)
        if to == "zgraph":
            _tell_left_of_client(source)
            _write_native(source, unfinished.path, serial)
            unfinished.commit()
        elif to == "dcp":
            _write_plain(source, unfinished.path)
            unfinished.commit(pointer=None)
        else:
            _tell_left(source)
            write_deepspeed(source, unfinished.path, layout, ranks or source.known.world)
            unfinished.commit(UNIVERSAL if layout == "universal" else folder.LATEST, chosen)
    except OSError as error:
        raise failed(path, error) from error
    finally:
        if unfinished is not None:
            unfinished.discard()
    return path / chosen


def _write_native(source: Source, partial: Path, serial: int) -> None:
    for name, info in source.tensors.items():
        refuse_unwritable(name, info.dtype)
    files: dict[str, FileEntry] = {}
    parts = list(_parts(source))
    for number, names in enumerate(parts):
        blocks = []
        for name in names:
            tensor = source.whole(name)
            blocks.append((name, Block((0,) * tensor.dim(), tuple(tensor.shape)), tensor))
        file = manifest.shard_file(0, number, len(parts))
        shard = write(partial / file, blocks)
        files[file] = FileEntry(shard.nbytes, "", (shard.header, shard.checksum), list(shard.pieces))
    client: dict[str, Any] = {}
    own = []
    if isinstance(source, Checkpoint):
        client = source.manifest.client
        for rank in range(len(source.manifest.own)):
            data = json.dumps(source.own(rank), separators=(",", ":")).encode()
            own.append(manifest.own_file(rank))
            write_bytes(partial / own[-1], data)
            files[own[-1]] = FileEntry(len(data), checksum(data))
    tensors = {n: (NAMES[info.dtype], info.shape) for n, info in source.tensors.items()}
    new_manifest = Manifest(serial, files, tensors, source.known, client, own)
    write_bytes(partial / manifest.NAME, new_manifest.written())


def _parts(source: Source) -> Iterator[list[str]]:
    """Yield the names of the tensors of each file, which has at most `FILE_BYTES` or one tensor."""
    names: list[str] = []
    total = 0
    for name, info in source.tensors.items():
        if names and total + info.nbytes > FILE_BYTES:
            yield names
            names, total = [], 0
        names.append(name)
        total += info.nbytes
    if names:
        yield names


def _write_plain(source: Source, partial: Path) -> None:
    model: dict[str, torch.Tensor] = {}
    states: dict[str, dict[str, torch.Tensor]] = {}
    for name, info in source.tensors.items():
        empty = torch.empty(info.shape, dtype=info.dtype, device="meta")
        if name.startswith(MODEL):
            model[name.removeprefix(MODEL)] = empty
        elif name.startswith(OPTIMIZER):
            owner, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
            states.setdefault(owner, {})[key] = empty
    _tell_left(source)
    described: dict[str, Any] = {"model": model}
    if states or source.known.groups:
        groups = [{("params" if k == "names" else k): v for k, v in g.items()} for g in source.known.groups]
        described["optimizer"] = {"state": states, "param_groups": groups}
    try:
        save(described, storage_writer=FileSystemWriter(partial), planner=_WhenWritten(source), no_dist=True)
    except CheckpointException as error:
        raise failed(partial, error) from error


def _tell_left(source: Source) -> None:
    left = [n for n in source.tensors if not n.startswith((MODEL, OPTIMIZER))]
    if left or (isinstance(source, Checkpoint) and source.manifest.client):
        logger.warning(_LEFT, source.folder)
    _tell_left_of_client(source)


_LEFT = "%s: what was added to the checkpoint (client_state) is left out"


def _tell_left_of_client(source: Source) -> None:
    if source.client:  # (of another system's checkpoint)
        logger.warning(_LEFT, source.folder)


class _WhenWritten(DefaultSavePlanner):
    """A planner for tensors without data, which reads each when it is written."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source = source

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        _, *keys = self.mappings[write_item.index.fqn]
        name = ".".join(str(k) for k in keys)
        return self._source.whole((MODEL if self.mappings[write_item.index.fqn][0] == "model" else "optimizer.") + name)
