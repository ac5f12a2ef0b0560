"""The output of commands: text or JSON, to the terminal, a pipe or a file; progress goes to stderr.

Colour is used in a terminal, unless NO_COLOR (https://no-color.org) is set. In a pipe, lines are not wrapped.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from zgraph.errors import TargetError

CHECK_FAILED = 1  # the exit code of a command whose check failed


def give(data: Any, text: str, as_json: bool, output: Path | None) -> None:
    """Write `data` as JSON, or else `text`."""
    write(json.dumps(data, indent=1, allow_nan=False) if as_json else text, output)


def write(text: str, output: Path | None) -> None:
    """Print text, or write it to a file and say so on stderr."""
    text = text.rstrip("\n")
    if output is None:
        typer.echo(text, color=use_color(sys.stdout))
        return
    write_file((text + "\n").encode(), output)


def write_file(content: bytes, output: Path) -> None:
    """Write bytes to a file and say so on stderr. Raises `TargetError` if that fails."""
    try:
        output.write_bytes(content)
    except OSError as error:
        raise TargetError("the output can't be written", where=str(output), why=error.strerror) from error
    typer.echo(f"wrote {output}", err=True)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return rows as a table under their heads: text is aligned left, numbers (alone, or with a unit) right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rich_table = Table(box=None, pad_edge=False, header_style="bold")
    for at, name in enumerate(head):
        rich_table.add_column(
            name, justify="right" if rows and all(_number(row[at]) for row in rows) else "left", no_wrap=True
        )
    for row in rows:
        rich_table.add_row(*(Text(str(cell)) for cell in row))
    console = Console(width=10_000, color_system="standard" if use_color(sys.stdout) else None, force_terminal=False)
    with console.capture() as captured:
        console.print(rich_table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _number(cell: Any) -> bool:
    first = str(cell).removeprefix("+").removeprefix("-").split(" ")[0].removesuffix("%")
    return first == "" or first.replace(".", "", 1).replace("e-", "", 1).isdigit()


def use_color(stream: Any) -> bool:
    """Return whether a stream is a terminal that should get colour."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and bool(stream.isatty())


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """Show in a terminal what is being done inside the block; yield a function that shows the present part."""
    if not sys.stderr.isatty():
        yield lambda part: None
        return
    from rich.console import Console

    with Console(stderr=True, no_color=not use_color(sys.stderr)).status(f"{what} …") as status:
        yield lambda part: status.update(f"{what}: {part} …")
