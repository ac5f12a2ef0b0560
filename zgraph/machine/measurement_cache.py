"""The cache of measurements for later processes: a small JSON file for each key, in the cache folder.

An entry is used only if it is intact (by its checksum), has the key that is asked for (a file's name is a hash of it), and its values are within
the limits of their record. Otherwise it is measured and written again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import TypeVar

from zgraph.errors import PlanError
from zgraph.ranks.host import cache_folder
from zgraph.record import Record

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=Record)


def entry(kind: str, key: dict[str, str]) -> Path:
    """Return the file of the measurement with this key."""
    return cache_folder() / "machine" / f"{kind}-{_hash(_text(key))[:16]}.json"


def read(kind: str, key: dict[str, str], record: type[R]) -> R | None:
    """Return the cached measurement with this key; None if there is none, or none that is intact."""
    path = entry(kind, key)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["key"] != key:
            raise ValueError("it is of another key")
        if document["sum"] != _hash(_text(document["key"]) + _text(document["value"])):
            raise ValueError("its sum is another")
        return record.model_validate(document["value"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError, PlanError) as error:
        logger.warning("%s can't be used (%s): measured again", path, error)
        return None


def write(kind: str, key: dict[str, str], value: Record) -> None:
    """Write a measurement atomically. If that fails, log a warning."""
    path, data = entry(kind, key), value.model_dump(mode="json")
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = {"key": key, "value": data, "sum": _hash(_text(key) + _text(data))}
        part.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        logger.warning("what was measured of this machine can't be kept: %s", error)
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _text(data: object) -> str:
    return json.dumps(data, sort_keys=True)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
