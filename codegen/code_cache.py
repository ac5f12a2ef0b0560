"""A cache of Inductor's code for later processes: its source as text, and the libraries of its C++ kernels as bytes
with their hashes.

Inductor has caches of its own: of graphs, which it pickles, and of libraries, which it finds by name. Here nothing is
unpickled, and no library is loaded that is not, byte by byte, the one that was compiled: one that is missing or
damaged in Inductor's folder is written anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from zgraph.cache.store import Store, hashed
from zgraph.codegen.executable import Executable, Kernel
from zgraph.codegen.lower_collectives import has_own_rank
from zgraph.errors import UnsupportedError
from zgraph.program.lazy_program import text_of
from zgraph.program.program import Program
from zgraph.torch_compat import inductor_code, process_groups
from zgraph.torch_compat.kernel_files import Place, inductor_folder

logger = logging.getLogger(__name__)

CODE, LIBRARY = "code", "library"


@dataclass(frozen=True)
class Code:
    """The code of one program, and what was read of it when it was compiled."""

    source: str  # the generated source
    strides: list[Any]  # strides of each output, None where Inductor tells none
    record: inductor_code.CodeRecord  # what another process needs to load the code
    kernels: tuple[Kernel, ...]  # the fused kernels that Inductor generated
    library: tuple[Kernel, ...]  # library calls, such as BLAS products
    # (line of the source from 0, position of the node in the graph) of each node with a call of its own
    calls: tuple[tuple[int, int], ...]

    @staticmethod
    def of(executable: Executable, record: inductor_code.CodeRecord) -> Code:
        """Return the code of an executable that was just compiled."""
        return Code(
            executable.source, executable.strides, record, executable.kernels, executable.library, executable.calls
        )


class CodeCache:
    """Keeps code in a store, for programs that are compiled under one state of all `conditions` (a hash)."""

    def __init__(self, store: Store, conditions: str, device: torch.device, words: Mapping[str, str]) -> None:
        self.store = store
        self.device = device
        self.conditions = conditions
        self.words = words

    def key(self, program: Program, how: Mapping[str, Any]) -> str | None:
        """Return the key under which the code of `program`, compiled with the options `how`, is stored.

        Returns None for a program that has no text, or has symbolic sizes.
        """
        if program.sizes:
            return None  # (the guards that Inductor adds to the sizes are not stored with the code)
        try:
            text = text_of(program)
        except UnsupportedError as error:
            self.refuse(program, str(error))
            return None
        places = {name: process_groups.backend_of(name, self.device) for name in how["groups"].values()}
        backends = {name: backend for name, (backend, _) in places.items()}
        own = has_own_rank(text, backends.values())
        self.store.usage.by_rank |= own
        return hashed(self.conditions, text, json.dumps([how, places if own else backends], sort_keys=True))

    def refuse(self, program: Program, why: str) -> None:
        """Note that the code of a program can't be kept."""
        logger.debug("the code of %s is not kept: %s", program.name, why)
        self.store.usage.refuse(f"the code of {program.name} is not kept for later processes: {why}")

    def take(self, key: str) -> Code | None:
        """Return the code with this key after putting its libraries where Inductor looks for them.

        Returns None where the code or one of its libraries is missing or damaged.
        """
        data = self.store.get_json(CODE, key)
        if data is None:
            return None
        paths = data["libraries"]
        if not all(self._put_there(path, total) for path, total in paths):
            return None
        return Code(
            data["source"],
            [None if s is None else tuple(s) for s in data["strides"]],
            inductor_code.CodeRecord(
                tuple(data["inputs_to_check"]),
                tuple(data["mutated_input_idxs"]),
                tuple(Place(*place) for place in data["places"]),
            ),
            _kernels(data["kernels"]),
            _kernels(data["library"]),
            tuple((line, at) for line, at in data["calls"]),
        )

    def keep(self, key: str, code: Code) -> None:
        """Store the code of a program, with its libraries."""
        paths = []
        for path in sorted({place.path for place in code.record.places}):
            try:
                data = (Path(inductor_folder()) / path).read_bytes()
            except OSError as error:
                logger.debug("code is not kept: %s", error)
                self.store.usage.refuse(f"code of {self.words['program']} is not kept for later processes: {error}")
                return
            total = hashlib.sha256(data).hexdigest()
            if not self.store.has(LIBRARY, total):
                self.store.put(LIBRARY, total, data, {})
            paths.append([path, total])
        said = {
            **asdict(code.record),
            "source": code.source,
            "strides": code.strides,
            "kernels": [asdict(k) for k in code.kernels],
            "library": [asdict(k) for k in code.library],
            "calls": code.calls,
            "libraries": paths,
        }
        self.store.put_json(CODE, key, said, self.words)

    def _put_there(self, path: str, total: str) -> bool:
        """Write a library into Inductor's folder unless the same bytes are there; return whether it is in place."""
        there = Path(inductor_folder()) / path
        try:
            if hashlib.sha256(there.read_bytes()).hexdigest() == total:
                return True
        except OSError:
            pass
        data = self.store.get(LIBRARY, total)
        if data is None or hashlib.sha256(data).hexdigest() != total:
            return False
        part = there.with_name(f"{there.name}.{os.getpid()}.part")
        try:
            there.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(data)
            part.chmod(0o755)
            os.replace(part, there)
        except OSError as error:
            logger.debug("%s can't be put into Inductor's folder: %s", path, error)
            part.unlink(missing_ok=True)
            return False
        return True


def _kernels(rows: list[dict[str, Any]]) -> tuple[Kernel, ...]:
    return tuple(Kernel(row["name"], tuple(row["operators"]), row["calls"]) for row in rows)
