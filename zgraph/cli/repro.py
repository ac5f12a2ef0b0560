"""`zgraph repro`: runs a failed pass again, from the reproducer folder that it left."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zgraph.cli.options import JsonOption, OutputOption
from zgraph.cli.output import CHECK_FAILED, give
from zgraph.cli.targets import on_path

if TYPE_CHECKING:
    from zgraph.inspection.repro import Failure, Replay


def repro(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="What a pass that failed has written: zgraph-repro-….", show_default=False
        ),
    ],
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the pass of a reproducer again, and those after it, and say whether it still fails, and where.

    Exits with 1 if it does. The program is in the folder: neither the model nor its ranks are needed.
    """
    from zgraph.inspection.repro import replay

    on_path()  # (for passes of the user's)
    outcome = replay(folder)
    give(outcome.to_json(), text_of(outcome), as_json, output)
    if outcome.now is not None:
        raise typer.Exit(CHECK_FAILED)


def text_of(replay: Replay) -> str:
    """Return text with the result of the replay."""
    if replay.now is None:
        lines = [f"{', '.join(replay.passes)}: nothing fails any more", "", "it was:", *_told(replay.before)]
    elif replay.same:
        lines = [f"pass {replay.now.name!r} fails again, with the same error", "", *_told(replay.now)]
    else:
        lines = ["it fails again, in another way:", *_told(replay.now), "", "it was:", *_told(replay.before)]
    if replay.lines:
        lines += ["", *replay.lines]
    return "\n".join([*lines, "", f"(written by zgraph {replay.zgraph} with torch {replay.torch})"])


def _told(failure: Failure) -> list[str]:
    node = [f"  node {failure.node!r}"] if failure.node else []
    return [f"  pass {failure.name!r}", *node, *(f"  {line}" for line in failure.error.splitlines())]
