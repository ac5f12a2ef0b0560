"""The contents of a checkpoint, and of a folder of them, as data; and a check that all of a checkpoint can be read."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zgraph.checkpoint import folder, manifest
from zgraph.checkpoint.detect_format import open_checkpoint
from zgraph.checkpoint.read_native import Checkpoint
from zgraph.checkpoint.source import MODEL, OPTIMIZER, Source
from zgraph.errors import CheckpointError, FilterError
from zgraph.names import did_you_mean

KINDS = ("weights", "optimizer", "client")


@dataclass(frozen=True)
class Tag:
    """One checkpoint of a folder of them."""

    tag: str  # its folder's name
    steps: int | None = None  # the optimizer steps it was saved after; None if unknown or damaged
    bytes: int | None = None  # its size on disk; None if damaged
    latest: bool = False  # whether `latest` names it
    damaged: str | None = None  # what is wrong with its manifest; None if nothing is


def kind_of(name: str) -> str:
    """Return which of `KINDS` a tensor of this name is."""
    return KINDS[0] if name.startswith(MODEL) else KINDS[1] if name.startswith(OPTIMIZER) else KINDS[2]


def chosen(names: Iterator[str] | list[str], pattern: str | None) -> list[str]:
    """Return the names that a glob matches, whole or without their prefix ("model." or "optimizer.state."). Raises
    `FilterError` if none match."""
    known = list(names)
    if pattern is None:
        return known
    matches = [n for n in known if any(fnmatch.fnmatchcase(part, pattern) for part in (n, _bare(n)))]
    if not matches:
        raise FilterError(
            f"no tensor matches {pattern!r}", hint=did_you_mean(pattern, known) if len(known) < 20 else None
        )
    return matches


def _bare(name: str) -> str:
    return name.removeprefix(MODEL).removeprefix(OPTIMIZER)


def tags_of(path: Path) -> list[Tag]:
    """Return zgraph's checkpoints in a folder, the newest first; those whose manifest does not even say its serial come
    last."""
    try:
        last = folder.latest(path)
    except CheckpointError:
        last = None
    known = folder.tags(path)
    places = sorted(path.iterdir()) if path.is_dir() else []
    known += [
        p.name for p in places if p.name not in known and folder.TAG.fullmatch(p.name) and (p / manifest.NAME).is_file()
    ]
    return [_tag(path / tag, last) for tag in known]


def _tag(place: Path, last: str | None) -> Tag:
    try:
        tag_manifest = manifest.read(place)
    except CheckpointError as error:
        return Tag(place.name, damaged=str(error))
    size = (place / manifest.NAME).stat().st_size + sum(f.nbytes for f in tag_manifest.files.values())
    return Tag(place.name, tag_manifest.known.steps, size, place.name == last)


def contents(source: Source, pattern: str | None = None) -> dict[str, Any]:
    """Return what a checkpoint says of the run, its tensors (those that a glob matches), and the bytes of each kind of
    tensor, as JSON. Raises `FilterError` and `CheckpointError`."""
    names = chosen(list(source.tensors), pattern)
    totals = {kind: {"tensors": 0, "bytes": 0} for kind in KINDS}
    for name in names:
        of_kind = totals[kind_of(name)]
        of_kind["tensors"] += 1
        of_kind["bytes"] += source.tensors[name].nbytes
    return {
        "kind": source.kind,
        "folder": str(source.folder),
        **asdict(source.known),
        "client_keys": _client_keys(source),
        "totals": totals,
        "tensors": [
            {
                "name": name,
                "kind": kind_of(name),
                "dtype": str(source.tensors[name].dtype).removeprefix("torch."),
                "shape": list(source.tensors[name].shape),
                "blocks": len(source.tensors[name].blocks),
                "bytes": source.tensors[name].nbytes,
            }
            for name in names
        ],
    }


def _client_keys(source: Source) -> list[str]:
    """Return the keys of what the user added: of values equal on all ranks, and of each rank's own."""
    if not isinstance(source, Checkpoint):
        return []
    own = [(source.own(rank) or {}).get("client", {}) for rank in range(len(source.manifest.own))]
    return sorted(set(source.manifest.client).union(*own))


def damage(
    path: Path, tag: str | None, say: Callable[[str], None] = lambda name: None
) -> tuple[Source | None, str | None]:
    """Read all of a checkpoint, and return (the checkpoint if it can be opened, what is damaged in it or None)."""
    source = None
    try:
        source = open_checkpoint(path, tag)
        say(str(source.folder))
        source.verify()
        if not isinstance(source, Checkpoint):  # (others have no checksums of every byte, so they are at least read)
            for name, info in source.tensors.items():
                say(name)
                for block in info.blocks:
                    source.block(name, block).clone()
    except CheckpointError as error:
        return source, str(error)
    return source, None
