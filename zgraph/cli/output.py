"""How commands answer: text or JSON, to the terminal, a pipe or a file; what is going on goes to stderr.

Colour is for a terminal, and not where NO_COLOR (https://no-color.org) is set. In a pipe lines are as long as they are.
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

CHECK_FAILED = 1  # the exit code of a command that looked, and found what it should not


def give(data: Any, text: str, as_json: bool, output: Path | None) -> None:
    """Answer with `data` as JSON, or with `text`."""
    write(json.dumps(data, indent=1, allow_nan=False) if as_json else text, output)


def write(text: str, output: Path | None) -> None:
    """Print text, or put it in a file (a line on stderr says so)."""
    text = text.rstrip("\n")
    if output is None:
        typer.echo(text, color=use_color(sys.stdout))
        return
    write_file((text + "\n").encode(), output)


def write_file(content: bytes, output: Path) -> None:
    """Put bytes in a file, and say so on stderr. Raises `TargetError` where that can't be done."""
    try:
        output.write_bytes(content)
    except OSError as error:
        raise TargetError("the output can't be written", where=str(output), why=error.strerror) from error
    typer.echo(f"wrote {output}", err=True)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Rows under their heads, in columns: text to the left, numbers (given as such, or with a unit) to the right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, header_style="bold")
    for at, name in enumerate(head):
        made.add_column(
            name, justify="right" if rows and all(_number(row[at]) for row in rows) else "left", no_wrap=True
        )
    for row in rows:
        made.add_row(*(Text(str(cell)) for cell in row))
    console = Console(width=10_000, color_system="standard" if use_color(sys.stdout) else None, force_terminal=False)
    with console.capture() as captured:
        console.print(made)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _number(cell: Any) -> bool:
    first = str(cell).removeprefix("+").removeprefix("-").split(" ")[0].removesuffix("%")
    return first == "" or first.replace(".", "", 1).replace("e-", "", 1).isdigit()


def use_color(stream: Any) -> bool:
    """Whether this is a terminal that wants colour."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and bool(stream.isatty())


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """While this lasts, a terminal sees what is being done; what it yields is told of each part."""
    if not sys.stderr.isatty():
        yield lambda part: None
        return
    from rich.console import Console

    with Console(stderr=True, no_color=not use_color(sys.stderr)).status(f"{what} …") as status:
        yield lambda part: status.update(f"{what}: {part} …")
