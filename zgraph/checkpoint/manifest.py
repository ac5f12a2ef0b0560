"""The manifest of a checkpoint: every file with its size and checksum, every tensor with its blocks, and what is known
of the run besides.

It is JSON that ends in its own checksum. What it says of a file is compared with the file's own header when a
checkpoint is verified.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from zgraph.checkpoint.source import Block, TensorInfo, natural, naturals
from zgraph.checkpoint.tensorfile import DTYPES, SUFFIX, OpenFile, Piece, checksum, read_bytes
from zgraph.errors import CheckpointError
from zgraph.update.resume import Known

FORMAT = 1
NAME = "manifest.json"
MOST_BYTES = 1 << 32
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
MARK = b',"checksum":"'
_HEAD = re.compile(rb'\{"format":\d+,"serial":(\d{1,18}),')
MOST_COUNTED = 1 << 40  # the largest count of steps or samples that is accepted: one may be counted up to again
MOST_CUT = 8  # the most dimensions along which a tensor may be divided into blocks
_HEX = re.compile(r"[0-9a-f]{32}")


def shard_file(rank: int, number: int = 0, count: int = 1) -> str:
    """Return the name of a rank's `number`-th of `count` files of tensors, in the format of torch's
    `HuggingFaceStorageWriter`."""
    return f"shard-{rank + 1:05}-model-{number + 1:05}-of-{count:05}{SUFFIX}"


def own_file(rank: int) -> str:
    """Return the name of the file of a rank's own state."""
    return f"rank-{rank:05}.json"


@dataclass
class FileEntry:
    """The manifest's entry for one file: a safetensors file has `header` and `pieces`, any other a `checksum`."""

    nbytes: int  # its size
    checksum: str = ""  # of all of its bytes; "" for a safetensors file
    header: tuple[int, str] | None = None  # its header's (size in bytes, checksum)
    pieces: list[Piece] = field(default_factory=list)  # its blocks of tensors, in their order in the file


@dataclass
class Manifest:
    """The manifest of one checkpoint."""

    serial: int  # counts the saves into one folder
    files: dict[str, FileEntry]  # the checkpoint's other files, by name
    tensors: dict[str, tuple[str, tuple[int, ...]]]  # (dtype by safetensors' name, shape) by the tensor's name
    known: Known  # what is known of the run besides tensors
    client: dict[str, Any] = field(default_factory=dict)  # what the user added and every rank had alike, by key
    own: list[str] = field(default_factory=list)  # the file of each rank's own state, by rank
    checksum: str = ""  # of the manifest; set when it is written or read

    def infos(self) -> dict[str, TensorInfo]:
        """Return the tensors, with their blocks in the order of the files."""
        blocks: dict[str, list[Block]] = {name: [] for name in self.tensors}
        for entry in self.files.values():
            for piece in entry.pieces:
                blocks[piece.name].append(piece.block)
        return {n: TensorInfo(DTYPES[d], s, tuple(blocks[n])) for n, (d, s) in self.tensors.items()}

    def written(self) -> bytes:
        """Encode the manifest as a file's bytes, and set `checksum`. Raises `CheckpointError` if `read` would refuse
        what is known of the run."""
        try:
            _check_known(self.known)
        except ValueError as error:
            raise CheckpointError(
                "what is known of the run can't be saved",
                why=str(error),
                hint="parameter groups hold numbers, strings, and lists of them",
            ) from None
        files: dict[str, Any] = {}
        for name, entry in self.files.items():
            shown: dict[str, Any] = {"bytes": entry.nbytes}
            if entry.header is None:
                shown["checksum"] = entry.checksum
            else:
                shown["header"] = list(entry.header)
                shown["pieces"] = [
                    [p.name, list(p.block.offsets), list(p.block.sizes), p.start, p.checksum] for p in entry.pieces
                ]
            files[name] = shown
        data = {
            "format": FORMAT,
            "serial": self.serial,
            "files": files,
            "tensors": {n: [d, list(s)] for n, (d, s) in self.tensors.items()},
            "known": asdict(self.known),
            "client": self.client,
            "own": self.own,
        }
        body = json.dumps(data, separators=(",", ":"), allow_nan=True).encode()[:-1]
        self.checksum = checksum(body)
        return body + MARK + self.checksum.encode() + b'"}\n'


def read(folder: Path) -> Manifest:
    """Read and check the manifest in a checkpoint's folder, without its other files. Raises `CheckpointError`."""
    path = folder / NAME
    if not path.exists() and not path.is_symlink():
        raise CheckpointError("there is no checkpoint", where=str(folder), why=f"there is no {NAME}")
    data = read_bytes(path, MOST_BYTES)
    body, mark, rest = data.rpartition(MARK)
    stored_checksum = rest[:-3].decode("ascii", "replace")
    if not mark or rest[-3:] != b'"}\n' or not _HEX.fullmatch(stored_checksum) or checksum(body) != stored_checksum:
        raise _damaged(path, "its checksum is not that of its bytes")
    try:
        manifest = _parsed(json.loads(body + b"}"))
    except CheckpointError as error:
        error.where = error.where or str(path)
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}"[:300]) from None
    manifest.checksum = stored_checksum
    return manifest


def serial_of(folder: Path) -> int | None:
    """Return the serial of the checkpoint in a folder, from the first bytes of its manifest, which may be large; None
    if these don't give one."""
    try:
        file = OpenFile(folder / NAME)
        match = _HEAD.match(file.read(0, min(64, file.nbytes)))
    except CheckpointError:
        return None
    return int(match[1]) if match else None


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path.name} is damaged", where=str(path), why=why, hint="load another checkpoint")


def _parsed(data: dict[str, Any]) -> Manifest:
    if data["format"] != FORMAT:
        raise CheckpointError(
            f"the checkpoint has format {data['format']!r}, and this zgraph reads {FORMAT}",
            hint="use the zgraph that it was written with, or a newer one",
        )
    tensors = {_text(n): (_dtype(d), naturals(s)) for n, (d, s) in data["tensors"].items()}
    files = {}
    for name, shown in data["files"].items():
        if not FILE_NAME.fullmatch(name) or name == NAME:
            raise CheckpointError(f"a file called {name[:80]!r}", why="names of files are letters, digits, . _ and -")
        entry = FileEntry(natural(shown["bytes"]))
        if "header" in shown:
            entry.header = (natural(shown["header"][0]), _sum(shown["header"][1]))
            entry.pieces = [_piece(tensors, *item) for item in shown["pieces"]]
        else:
            entry.checksum = _sum(shown["checksum"])
        files[name] = entry
    known_fields = {"left_out": [], **data["known"]}  # (older checkpoints have no `left_out`)
    known = Known(**{f.name: known_fields[f.name] for f in fields(Known)})
    _check_known(known)
    own = [_text(n) for n in data["own"]]
    if any(n not in files for n in own) or not isinstance(data["client"], dict):
        raise ValueError("the state of a rank is in no file")
    manifest = Manifest(natural(data["serial"]), files, tensors, known, data["client"], own)
    check_tiling(manifest.infos())
    return manifest


def _piece(tensors: dict[str, Any], name: str, offsets: list[Any], sizes: list[Any], start: Any, said: Any) -> Piece:
    dtype, shape = tensors[name]
    block = Block(naturals(offsets), naturals(sizes))
    if not len(block.offsets) == len(block.sizes) == len(shape):
        raise ValueError(f"a block of {name} has other dimensions than it")
    return Piece(name, dtype, block, natural(start), block.elements * DTYPES[dtype].itemsize, _sum(said))


def _check_known(known: Known) -> None:
    counts = [n for n in (known.steps, known.skipped, known.samples) if n is not None]
    if any(natural(n) > MOST_COUNTED for n in (*counts, known.world)):
        raise ValueError(f"no run has counted beyond {MOST_COUNTED}: {counts}"[:300])
    if known.steps is not None and known.skipped > known.steps:
        raise ValueError(f"{known.skipped} of {known.steps} steps were skipped")
    for group in known.groups:
        if not all(isinstance(n, str) for n in group["names"]):
            raise ValueError("a parameter group without names")
        for key, value in group.items():
            if not _is_plain(value):
                raise ValueError(
                    f"{key!r} of a parameter group is a {type(value).__name__}: it is no number, string or list"
                )
    for value, kind in ((known.loss_scale, dict), (known.plan, dict)):
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{value!r} is no {kind.__name__}"[:200])
    if known.loss_scale is not None and not all(isinstance(v, (int, float)) for v in known.loss_scale.values()):
        raise ValueError("the loss scale is no number")
    if not isinstance(known.programs, dict) or not isinstance(known.mesh, dict):
        raise ValueError("programs and mesh are no tables")
    if not isinstance(known.left_out, list) or not all(isinstance(name, str) for name in known.left_out):
        raise ValueError("what is left out is no list of names")


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def check_tiling(tensors: dict[str, TensorInfo]) -> None:
    """Raise `CheckpointError` unless the blocks of each tensor cover all of it, and none overlap."""
    for name, info in tensors.items():
        outside = any(o + n > d for b in info.blocks for o, n, d in zip(b.offsets, b.sizes, info.shape, strict=True))
        if outside or not info.blocks or not _fill(info.blocks, info.shape):
            total = sum(b.elements for b in info.blocks)
            raise CheckpointError(
                f"the blocks of {name} are not all of it, each once",
                why=f"it is {list(info.shape)}; {len(info.blocks)} blocks have {total} elements",
                hint="load another checkpoint",
            )


def _fill(blocks: Sequence[Block], shape: tuple[int, ...]) -> bool:
    """Return whether these blocks cover a box of this shape, each element once.

    The count of blocks that cover each element is determined by its differences along all dimensions, to which a block
    adds 1 or -1 at its corners only. So the corners of all blocks must cancel those of the box. They are summed in one
    dimension after another, where inner corners of a grid of blocks cancel at once.
    """
    filled = [b for b in blocks if b.elements]
    cut = [d for d, n in enumerate(shape) if any(b.sizes[d] != n for b in filled)]
    if len(cut) > MOST_CUT:
        raise CheckpointError(f"a tensor is cut along {len(cut)} dimensions", why=f"none is along more than {MOST_CUT}")
    covered: Counter[tuple[Any, ...]] = Counter(
        tuple((b.offsets[d], b.offsets[d] + b.sizes[d]) for d in cut) for b in filled
    )
    if math.prod(shape):
        covered[tuple((0, shape[d]) for d in cut)] -= 1
    for _ in cut:
        corners: Counter[tuple[Any, ...]] = Counter()
        for ((begin, end), *rest), times in covered.items():
            corners[*rest, begin] += times
            corners[*rest, end] -= times
        covered = Counter({corner: times for corner, times in corners.items() if times})
    return not any(covered.values())


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no name"[:200])
    return value


def _sum(value: Any) -> str:
    if not isinstance(value, str) or not _HEX.fullmatch(value):
        raise ValueError(f"{value!r} is no checksum"[:200])
    return value


def _dtype(value: Any) -> str:
    if value not in DTYPES:
        raise ValueError(f"{value!r} is no type of numbers"[:200])
    return str(value)
