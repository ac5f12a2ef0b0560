"""A folder of checkpoints: one folder a tag, `latest`, and what makes a save one move.

A save is written into `.TAG.partial`, which no reader looks at, and put in its place by one rename, after every byte has
reached the disk. `latest` holds a tag and its checksum, and is replaced by one rename too. What an interrupted save
leaves is removed by the next.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
from pathlib import Path

from zgraph.checkpoint import manifest
from zgraph.checkpoint.tensorfile import checksum, read_bytes, write_bytes
from zgraph.errors import CheckpointError

LATEST = "latest"
TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
PARTIAL, OLD = ".partial", ".old"
_EXCHANGE, _HERE = 2, -100  # RENAME_EXCHANGE, AT_FDCWD


def checked_tag(tag: str) -> str:
    """The tag, if a folder can have this name and nothing else. Raises `CheckpointError`."""
    if not isinstance(tag, str) or not TAG.fullmatch(tag) or tag == LATEST:
        raise CheckpointError(
            f"{str(tag)[:80]!r} is no tag",
            why="a tag is letters, digits, . _ and -, and begins with none of the last three",
        )
    return tag


def tags(folder: Path) -> list[str]:
    """Those of the complete checkpoints in a folder, the newest first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if TAG.fullmatch(path.name) and (serial := manifest.serial_of(path)) is not None:
            found.append((serial, path.name))
    return [tag for _, tag in sorted(found, reverse=True)]


def latest(folder: Path) -> str:
    """The tag that was saved last. Raises `CheckpointError` where there is none, or what `latest` says is not there."""
    path = folder / LATEST
    if not os.path.lexists(path):
        known = tags(folder)
        raise CheckpointError(
            "no checkpoint" if not known else "a folder of checkpoints without its file latest",
            where=str(folder),
            why="it is no folder" if not folder.is_dir() else None,
            hint=f"name a tag: {', '.join(known[:5])}" if known else None,
        )
    words = read_bytes(path, 4096).decode("ascii", "replace").split(" ")
    if len(words) != 2 or not TAG.fullmatch(words[0]) or not words[1].endswith("\n"):
        raise CheckpointError("latest is damaged", where=str(path), hint="name a tag")
    tag, said = words[0], words[1][:-1]
    if checksum(tag.encode()) != said:
        raise CheckpointError(
            "latest is damaged", where=str(path), why="its checksum is not its tag's", hint="name a tag"
        )
    return tag


def next_serial(folder: Path) -> int:
    """One more than that of the newest checkpoint in a folder."""
    return max((manifest.serial_of(folder / tag) or 0 for tag in tags(folder)), default=-1) + 1


def begin(folder: Path, tag: str) -> Path:
    """An empty folder to write into. What earlier saves left unfinished is removed. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name.startswith(".") and path.name.endswith((PARTIAL, OLD)) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
    made = folder / f".{tag}{PARTIAL}"
    made.mkdir()
    return made


def commit(partial: Path, tag: str) -> None:
    """Put a checkpoint in its place, whose files have all reached the disk, and let `latest` name it. Raises `OSError`."""
    folder, place = partial.parent, partial.parent / tag
    sync(partial)
    if place.exists():
        _exchange(partial, place)
    else:
        partial.rename(place)
    sync(folder)
    fresh = folder / f".{LATEST}"
    fresh.unlink(missing_ok=True)
    write_bytes(fresh, f"{tag} {checksum(tag.encode())}\n".encode())
    fresh.rename(folder / LATEST)
    sync(folder)
    discard(partial)  # (what was there before, if there was)


def discard(path: Path) -> None:
    """Remove a folder that is no checkpoint (any more)."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)


def retain(folder: Path, count: int) -> list[str]:
    """Remove all but so many of the newest checkpoints; the tags of those removed. Raises `OSError`."""
    gone = tags(folder)[count:]
    for tag in gone:
        aside = folder / f".{tag}{OLD}"
        (folder / tag).rename(aside)  # (from here on it is no checkpoint)
        discard(aside)
    return gone


def sync(path: Path) -> None:
    """Let a file, or the names in a folder, reach the disk. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> None:
    """Let two folders change places in one move. Raises `OSError` where the file system can't."""
    found = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if found is None:
        raise OSError(errno.ENOSYS, "this system can't exchange two folders in one move; give another tag", str(other))
    if found(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE):
        number = ctypes.get_errno()
        said = os.strerror(number)
        if number in (errno.EINVAL, errno.ENOSYS):
            said = f"this file system can't exchange two folders in one move ({said}); give another tag"
        raise OSError(number, said, str(other))
