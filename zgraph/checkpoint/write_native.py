"""A checkpoint written through torch.distributed.checkpoint, which decides what of a tensor which rank writes.

Every rank writes one file of tensors and one of its own state, and reports them to rank 0, which writes the manifest.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint import planner as planning
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from zgraph.checkpoint import manifest
from zgraph.checkpoint.folder import next_serial
from zgraph.checkpoint.manifest import FileEntry, Manifest
from zgraph.checkpoint.source import Block
from zgraph.checkpoint.tensorfile import (
    NAMES,
    checksum,
    refuse_unwritable,
    write,
    write_bytes,
)
from zgraph.update.resume import Known


class Writer(StorageWriter):
    """Writes one checkpoint into an empty folder. `own` is this rank's own state, encoded as a file; `known` and
    `client` go into the manifest."""

    def __init__(self, folder: Path, known: Known, client: dict[str, Any], own: bytes) -> None:
        self.folder = folder
        self.known = known
        self.client = client
        self.own = own

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False  # (it writes into the folder that it was made with)

    def reset(self, checkpoint_id: Any = None) -> None:
        return

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        return

    def prepare_local_plan(self, plan: planning.SavePlan) -> planning.SavePlan:
        """Drop empty blocks of tensors that are not empty: a rank that holds no rows writes nothing."""
        items = []
        for item in plan.items:
            assert item.tensor_data is not None
            refuse_unwritable(item.index.fqn, item.tensor_data.properties.dtype)
            if item.tensor_data.chunk.sizes.numel() or not item.tensor_data.size.numel():
                items.append(item)
        return dataclasses.replace(plan, items=items)

    def prepare_global_plan(self, plans: list[planning.SavePlan]) -> list[planning.SavePlan]:
        return [dataclasses.replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: planning.SavePlan, planner: planning.SavePlanner) -> Future[list[WriteResult]]:
        rank: int = plan.storage_data
        files: dict[str, FileEntry] = {}
        blocks = []
        for item in plan.items:
            data = planner.resolve_data(item)
            assert isinstance(data, torch.Tensor) and item.tensor_data is not None
            chunk = item.tensor_data.chunk
            blocks.append((item.index.fqn, Block(tuple(chunk.offsets), tuple(chunk.sizes)), data))
        if blocks:
            name = manifest.shard_file(rank)
            shard = write(self.folder / name, blocks)
            files[name] = FileEntry(shard.nbytes, "", (shard.header, shard.checksum), list(shard.pieces))
        own = manifest.own_file(rank)
        write_bytes(self.folder / own, self.own)
        files[own] = FileEntry(len(self.own), checksum(self.own))
        index = dcp.MetadataIndex(own)
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(index, sum(f.nbytes for f in files.values()), files)])
        return done

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, dcp.TensorStorageMetadata)
            tensors[name] = (NAMES[entry.properties.dtype], tuple(entry.size))
        files: dict[str, FileEntry] = {}
        for result in results:
            files |= result[0].storage_data
        own = [result[0].index.fqn for result in results]
        new_manifest = Manifest(next_serial(self.folder.parent), files, tensors, self.known, self.client, own)
        write_bytes(self.folder / manifest.NAME, new_manifest.written())
