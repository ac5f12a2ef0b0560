"""Texts for sizes, times and tables. Loads nothing, so that the command line answers at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def shown_bytes(size: float) -> str:
    """Return a size as text: "1.50 GiB", "12.00 MiB", "96 bytes"."""
    if size < 2**20:
        return f"{size:.0f} bytes"
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"


def milliseconds(seconds: float) -> str:
    """Return a time as text in milliseconds, so that times can be compared: "12.345 ms"."""
    return f"{seconds * 1e3:.3f} ms"


def columns(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> list[str]:
    """Return the lines of a table, its head first: columns numbered in `left` are aligned left, all others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
