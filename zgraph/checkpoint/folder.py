"""A folder of checkpoints: one folder for each tag, the file `latest`, and saves that are completed by one rename.

A save is written into `.zgraph-TAG.partial`, which no reader looks at, and renamed to its tag after every byte has
reached the disk. `latest` holds a tag and its checksum, and is replaced by one rename too. What an interrupted save
leaves is removed by the next; nothing else in the folder is touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from zgraph.checkpoint import manifest
from zgraph.checkpoint.tensorfile import checksum, read_bytes, write_bytes
from zgraph.errors import CheckpointError

logger = logging.getLogger(__name__)

LATEST = "latest"
TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
PARTIAL, OLD = ".partial", ".old"
_OURS = re.compile(r"\.zgraph-[A-Za-z0-9][A-Za-z0-9._-]{0,199}(\.partial|\.old)")
_EXCHANGE, _HERE = 2, -100  # RENAME_EXCHANGE, AT_FDCWD


def checked_tag(tag: str) -> str:
    """Return the tag if it can be the name of a checkpoint's folder. Raises `CheckpointError`."""
    if not isinstance(tag, str) or not TAG.fullmatch(tag) or tag == LATEST:
        raise CheckpointError(
            f"{str(tag)[:80]!r} is no tag",
            why="a tag is letters, digits, . _ and -, and begins with none of the last three",
        )
    return tag


def tags(folder: Path) -> list[str]:
    """Return the tags of the complete checkpoints in a folder, the newest first."""
    entries = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if TAG.fullmatch(path.name) and (serial := manifest.serial_of(path)) is not None:
            entries.append((serial, path.name))
    return [tag for _, tag in sorted(entries, reverse=True)]


def latest(folder: Path) -> str:
    """Return the tag that was saved last. Raises `CheckpointError` where there is no file `latest`, or it is
    damaged."""
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
    """Return one more than the serial of the newest checkpoint in a folder; 0 without any."""
    return max((manifest.serial_of(folder / tag) or 0 for tag in tags(folder)), default=-1) + 1


class Unfinished:
    """The folder `path` that a checkpoint of this tag is written into. It is locked while this object lives, so that
    other saves into the same folder of checkpoints leave it alone."""

    def __init__(self, path: Path, tag: str) -> None:
        self.path = path
        self.tag = tag
        self._lock = _locked(path)

    def commit(self, pointer: str | None = LATEST, text: str | None = None) -> None:
        """Rename the folder, whose files have all reached the disk, to its tag, and let the file `pointer` beside it
        name it: by `text`, which is by default the tag and its checksum. Raises `OSError`."""
        folder, place = self.path.parent, self.path.parent / self.tag
        if pointer is not None:
            write_bytes(self.path / pointer, (text or f"{self.tag} {checksum(self.tag.encode())}\n").encode())
        sync(self.path)
        if place.exists():
            _exchange(self.path, place)
        else:
            self.path.rename(place)
        sync(folder)
        if pointer is not None:
            (place / pointer).rename(folder / pointer)
            sync(folder)
        self.discard()  # (a checkpoint of the same tag, if one was replaced)

    def discard(self) -> None:
        """Remove what is left in the partial folder, and unlock it."""
        _remove(self.path)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def partial_of(folder: Path, tag: str) -> Path:
    """Return the folder that a checkpoint of this tag is written into."""
    return folder / f".zgraph-{tag}{PARTIAL}"


def begin(folder: Path, tag: str) -> Unfinished:
    """Make an empty folder to write into, and remove what earlier saves left unfinished. Raises `OSError`, and
    `CheckpointError` if the tag names something other than a checkpoint, or another save of the tag is running."""
    place = folder / tag
    if os.path.lexists(place) and (place.is_symlink() or manifest.serial_of(place) is None):
        raise CheckpointError(
            f"{tag} is there, and is no checkpoint",
            where=str(place),
            why="a save would replace it",
            hint="give another tag",
        )
    folder.mkdir(parents=True, exist_ok=True)
    partial = partial_of(folder, tag)
    with _alone(folder):
        _sweep(folder)
        try:
            partial.mkdir()
        except FileExistsError:
            raise CheckpointError(
                f"another save of {tag} is on its way", where=str(folder), hint="give another tag"
            ) from None
        return Unfinished(partial, tag)


def _sweep(folder: Path) -> None:
    """Remove partial and replaced folders that no process has locked."""
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            with contextlib.suppress(FileNotFoundError):  # (it was renamed to its tag meanwhile)
                lock = _locked(path)
                if lock is not None:
                    _remove(path)
                    os.close(lock)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the folder of checkpoints, so that no other save begins or removes anything meanwhile: a new partial folder
    looks abandoned until it is locked. Where the file system has no locks, `_locked` warns of it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _locked(path: Path) -> int | None:
    """Lock a folder until the descriptor that is returned is closed or the process ends; return None where another has
    the lock."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:  # (a file system without locks)
        logger.warning("%s can't be locked (%s): let no two saves run in one folder", path.parent, error.strerror)
    return descriptor


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def retain(folder: Path, count: int) -> list[str]:
    """Remove all but the `count` newest checkpoints, and return the tags of those removed. Raises `OSError`."""
    with _alone(folder):
        gone = {tag: folder / f".zgraph-{tag}{OLD}" for tag in tags(folder)[count:]}
        for tag, aside in gone.items():
            (folder / tag).rename(aside)  # (from here on it is no checkpoint)
    for aside in gone.values():
        _remove(aside)
    return list(gone)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> None:
    """Swap the names of two folders in one move. Raises `OSError` where the file system can't."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        raise OSError(errno.ENOSYS, "this system can't exchange two folders in one move; give another tag", str(other))
    if renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE):
        number = ctypes.get_errno()
        message = os.strerror(number)
        if number in (errno.EINVAL, errno.ENOSYS):
            message = f"this file system can't exchange two folders in one move ({message}); give another tag"
        raise OSError(number, message, str(other))
