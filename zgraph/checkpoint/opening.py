"""Which checkpoint a path means, of whatever system."""

from __future__ import annotations

from pathlib import Path

from zgraph.checkpoint import folder, manifest
from zgraph.checkpoint.native import Checkpoint
from zgraph.checkpoint.source import Source
from zgraph.errors import CheckpointError


def open_checkpoint(path: Path, tag: str | None = None) -> Source:
    """The checkpoint of this tag in a folder of zgraph's (by default the one that `latest` names), or the one that the folder itself is.
    Raises `CheckpointError`."""
    if tag is not None:
        place = path / folder.checked_tag(tag)
        if not (place / manifest.NAME).exists() and not place.is_dir():
            known = folder.tags(path)
            hint = f"there are {', '.join(known[:8])}" if known else None
            raise CheckpointError(f"no checkpoint {tag!r}", where=str(path), hint=hint)
        return Checkpoint(place)
    if (path / manifest.NAME).is_file():
        return Checkpoint(path)
    return Checkpoint(path / folder.latest(path))


def candidates(path: Path, tag: str | None) -> list[str | None]:
    """The tags to try one after another, where the first may be damaged: the one asked for, then the others, the newest first."""
    return [tag, *(t for t in folder.tags(path) if t != tag)]
