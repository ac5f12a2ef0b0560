"""The store of the cache folder: each entry is one file, used only if it is intact, has the key that is asked for, and can't be another user's.

A file begins with a line of JSON: its kind, the whole key (a file's name is a part of it), a description for listings, and the SHA-256 of this line
and the body behind it. An entry that fails these checks counts as missing, with a warning, and is written again. Since entries are code that runs
later, a folder that another user can write to is not used at all. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import uuid
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zgraph.ranks.host import cache_folder

logger = logging.getLogger(__name__)

FORMAT = 1
SUFFIX = ".kept"
IDENTITY = "identity"
_LONGEST_LINE = 1 << 16


@dataclass(frozen=True)
class Found:
    """An entry on disk, as its first line describes it."""

    path: Path  # its file
    size: int  # the bytes of the file
    kind: str  # the kind of entry
    words: Mapping[str, str]  # its description, for listings
    fault: str  # what is wrong with it; "" if nothing is


@dataclass
class Usage:
    """What was done with a store since it was opened."""

    taken: set[tuple[str, str]] = field(default_factory=set)  # (kind, key) of entries that were there, and intact
    written: set[tuple[str, str]] = field(default_factory=set)  # (kind, key) of entries that were written
    refused: list[str] = field(default_factory=list)  # what could not be kept, and why: a sentence for each
    by_rank: bool = False  # whether an entry that was asked for is for this rank alone

    def refuse(self, line: str) -> None:
        """Note what can't be kept, and why."""
        if line not in self.refused:
            self.refused.append(line)


class Damaged(ValueError):
    """The error for an entry that is not as it was written."""


class Store:
    """The entries of one folder. An entry that can't be read counts as missing, and one that can't be written is
    dropped: neither raises."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.read_only = False  # the last entry could not be written
        self.usage = Usage()

    def get(self, kind: str, key: str) -> bytes | None:
        """Return the body of the entry with this key; None if there is none, or none that is intact."""
        path = self._path(kind, key)
        try:
            body = _body(path.read_bytes(), kind, key)
        except FileNotFoundError:
            return None
        except (OSError, Damaged) as error:
            logger.warning("%s can't be used (%s): made again", path, error)
            return None
        if (kind, key) not in self.usage.written:
            self.usage.taken.add((kind, key))
        return body

    def get_json(self, kind: str, key: str) -> Any:
        """Return the value of an entry that `put_json` wrote; None as in `get`."""
        body = self.get(kind, key)
        return None if body is None else json.loads(body)

    def has(self, kind: str, key: str) -> bool:
        """Return whether there is a file for this key. (Whether it is intact is checked when it is read.)"""
        return self._path(kind, key).exists()

    def put(self, kind: str, key: str, body: bytes, words: Mapping[str, str]) -> None:
        """Write an entry atomically. If that fails, log a warning."""
        path = self._path(kind, key)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            part.write_bytes(_entry(kind, key, body, words))
            os.replace(part, path)
            self.read_only = False
            self.usage.written.add((kind, key))
        except OSError as error:
            self.usage.refuse(f"what was compiled can't be kept: {error}")
            if not self.read_only:
                logger.warning("what was compiled can't be kept: %s", error)
            self.read_only = True
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)

    def put_json(self, kind: str, key: str, value: Any, words: Mapping[str, str]) -> None:
        """Write an entry with a JSON value."""
        self.put(kind, key, json.dumps(value, separators=(",", ":")).encode(), words)

    def identity(self) -> str:
        """Return a random text that is the same for everyone who uses this folder, from any machine, and for no other
        folder.

        Returns "" if the folder can't be written to.
        """
        path = self.folder / IDENTITY
        part = path.with_name(f"{IDENTITY}.{os.getpid()}.part")
        with contextlib.suppress(OSError):
            if not path.exists():
                self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                part.write_text(uuid.uuid4().hex, encoding="ascii")
                with contextlib.suppress(FileExistsError):
                    os.link(part, path)  # (atomic, and it succeeds for one process only)
                part.unlink()
            return path.read_text(encoding="ascii")
        return ""

    def entries(self) -> Iterator[Found]:
        """Yield all entries, each read and checked."""
        for path in sorted(self.folder.glob(f"*/*{SUFFIX}")):
            yield _examined(path)

    def clear(self) -> tuple[int, int]:
        """Delete all entries, and the remains of interrupted writes; return the number of these files, and their
        bytes."""
        files = [p for p in self.folder.glob("*/*") if p.name.endswith(SUFFIX) or p.name.endswith(".part")]
        size = 0
        for path in files:
            with contextlib.suppress(OSError):
                size += path.stat().st_size
                path.unlink()
        for folder in {p.parent for p in files}:
            with contextlib.suppress(OSError):
                folder.rmdir()
        return len(files), size

    def _path(self, kind: str, key: str) -> Path:
        return self.folder / key[:2] / f"{key[:32]}-{kind}{SUFFIX}"


def opened(folder: Path | None = None) -> Store | None:
    """Return the store of programs in the cache folder (by default the user's); None, with a warning, if other users
    could have written to it."""
    folder = (folder or cache_folder()) / "programs"
    if (why := writable_by_others(folder)) is not None:
        logger.warning("nothing compiled is kept in %s, nor taken from it: %s", folder, why)
        return None
    return Store(folder)


def writable_by_others(folder: Path) -> str | None:
    """Return why a user other than this one and root could have written into a folder, or replaced a folder above
    it; None if none could."""
    at = Path(os.path.abspath(os.path.realpath(folder)))
    for path in (at, *at.parents):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue  # (this user will create it, in a folder that is checked next)
        except OSError as error:
            return f"{path}: {error}"
        if status.st_uid not in (os.geteuid(), 0):
            return f"{path} belongs to another user (number {status.st_uid})"
        others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if others and (not status.st_mode & stat.S_ISVTX or path == at):
            return f"others can write to {path} (chmod go-w)"
    return None


def hashed(*texts: str) -> str:
    """Return the SHA-256 of texts in hex, as a key."""
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(f"{len(data)}:".encode())
        digest.update(data)
    return digest.hexdigest()


def _entry(kind: str, key: str, body: bytes, words: Mapping[str, str]) -> bytes:
    packed = zlib.compress(body, 1)
    head = {"format": FORMAT, "kind": kind, "key": key, "words": dict(words)}
    head["sum"] = _sum(head, packed)
    return json.dumps(head).encode() + b"\n" + packed


def _sum(head: Mapping[str, Any], packed: bytes) -> str:
    said = {name: value for name, value in head.items() if name != "sum"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode() + b"\n" + packed).hexdigest()


def _opened(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the first line and the body of an entry. Raises `Damaged`."""
    line, newline, packed = data.partition(b"\n")
    if not newline or len(line) > _LONGEST_LINE:
        raise Damaged("it is no entry of a cache, or is cut off")
    try:
        head = json.loads(line)
        if head["format"] != FORMAT:
            raise Damaged(f"it is of format {head['format']!r}, and this zgraph reads {FORMAT}")
        if head["sum"] != _sum(head, packed):
            raise Damaged("its sum is another")
        return head, zlib.decompress(packed)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, zlib.error) as error:
        if isinstance(error, Damaged):
            raise
        raise Damaged(f"{type(error).__name__}: {error}") from error


def _body(data: bytes, kind: str, key: str) -> bytes:
    head, body = _opened(data)
    if (head["kind"], head["key"]) != (kind, key):
        raise Damaged("it is of another key")
    return body


def _examined(path: Path) -> Found:
    try:
        data = path.read_bytes()
    except OSError as error:
        return Found(path, 0, "", {}, str(error))
    try:
        head, _ = _opened(data)
        if path.name != f"{head['key'][:32]}-{head['kind']}{SUFFIX}":
            raise Damaged("its name is that of another key")
        return Found(path, len(data), head["kind"], head["words"], "")
    except Damaged as error:
        return Found(path, len(data), "", {}, str(error))
