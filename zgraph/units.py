"""Sizes and times as people read them. Loads nothing, so that the command line answers at once."""

from __future__ import annotations


def shown_bytes(size: float) -> str:
    """A size: "1.50 GiB", "12.0 MiB", "96 bytes"."""
    if size < 2**20:
        return f"{size:.0f} bytes"
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"


def milliseconds(seconds: float) -> str:
    """A time, in a unit that times can be compared in: "12.345 ms"."""
    return f"{seconds * 1e3:.3f} ms"
