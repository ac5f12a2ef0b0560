"""Find out which checkpoint a path means, and which system wrote it, from the files in the folder."""

from __future__ import annotations

import os
from pathlib import Path

from zgraph.checkpoint import folder, manifest
from zgraph.checkpoint.formats.deepspeed import DeepSpeed, is_deepspeed
from zgraph.checkpoint.formats.huggingface import Safetensors
from zgraph.checkpoint.formats.plain_dcp import METADATA, PlainDcp
from zgraph.checkpoint.read_native import Checkpoint
from zgraph.checkpoint.source import Source
from zgraph.checkpoint.tensorfile import SUFFIX, read_bytes
from zgraph.errors import CheckpointError

BLOCKS = ".distcp"
UNIVERSAL = "latest_universal"


def open_checkpoint(path: Path, tag: str | None = None) -> Source:
    """Open the checkpoint `tag` in a folder of checkpoints (by default that in the file `latest`), or the checkpoint
    that the folder or file itself is: zgraph's, DeepSpeed's, plain torch.distributed.checkpoint's, or weights as
    safetensors. Raises `CheckpointError`."""
    try:
        return _opened(path, tag)
    except OSError as error:
        raise CheckpointError("the checkpoint can't be read", where=str(path), why=error.strerror) from error


def candidates(path: Path, tag: str | None) -> list[str | None]:
    """Return the tags to try one after another, for when the first is damaged: `tag`, then the others, the newest
    first."""
    return [tag, *(t for t in folder.tags(path) if t != tag)]


def _opened(path: Path, tag: str | None) -> Source:
    if tag is not None:
        place = path / folder.checked_tag(tag)
        if not place.is_dir():
            known = folder.tags(path)
            hint = f"there are {', '.join(known[:8])}" if known else None
            raise CheckpointError(f"there is no checkpoint {tag!r}", where=str(path), hint=hint)
        return _here(place) or _unknown(place)
    if path.is_file() and path.name.endswith(SUFFIX):
        return Safetensors(path)
    if (path / manifest.NAME).is_file():
        return Checkpoint(path)
    named = _named_by_deepspeed(path)
    if named is not None:
        return _here(path / named) or _unknown(path / named)
    if path.is_dir() and not os.path.lexists(path / folder.LATEST) and not folder.tags(path):
        return _here(path) or _unknown(path)
    return Checkpoint(path / folder.latest(path))


def _here(place: Path) -> Source | None:
    """Open the checkpoint that a folder is, of any system; return None if it is none."""
    if (place / manifest.NAME).exists():
        return Checkpoint(place)
    if not place.is_dir():
        return None
    if is_deepspeed(place):
        return DeepSpeed(place)
    ends = {p.suffix for p in place.iterdir()}
    if (place / METADATA).is_file() and (BLOCKS in ends or SUFFIX not in ends):
        return PlainDcp(place)
    return Safetensors(place) if SUFFIX in ends else None


def _named_by_deepspeed(path: Path) -> str | None:
    """Return the tag in DeepSpeed's file `latest` or `latest_universal`; None without one. DeepSpeed's file holds one
    word, zgraph's `latest` has a checksum after it."""
    for name in (folder.LATEST, UNIVERSAL):
        if (path / name).is_file():
            words = read_bytes(path / name, 4096).decode("utf-8", "replace").split()
            if len(words) == 1 and not (path / folder.checked_tag(words[0]) / manifest.NAME).exists():
                return words[0]
            return None
    return None


def _unknown(place: Path) -> Source:
    if not place.is_dir():
        raise CheckpointError("there is no checkpoint", where=str(place), why="there is no such folder")
    names = sorted(p.name for p in place.iterdir())
    inside = [p.name for p in sorted(place.iterdir()) if p.is_dir() and _is_checkpoint(p)]
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    raise CheckpointError(
        "this is no checkpoint of a known format",
        where=str(place),
        why=f"it holds {shown or 'nothing'}; checkpoints have {manifest.NAME}, {METADATA}, *_model_states.pt or *{SUFFIX}",
        hint=f"these folders in it are checkpoints: {', '.join(inside[:5])}" if inside else None,
    )


def _is_checkpoint(place: Path) -> bool:
    ends = {p.suffix for p in place.iterdir()}
    return any((place / n).exists() for n in (manifest.NAME, METADATA)) or SUFFIX in ends or is_deepspeed(place)
