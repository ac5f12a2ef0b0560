"""The options that several commands share, so that they are spelled and explained alike."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="package.module:factory, hf:DIR, an example's name, or a bundle's folder.",
        show_default=False,
    ),
]
ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET", help="A model: package.module:factory, hf:DIR, or an example's name.", show_default=False
    ),
]
PlanOption = Annotated[
    Path | None,
    typer.Option("--plan", metavar="FILE", help="A plan as TOML, YAML or JSON. [default: Plan()]"),
]
WorldOption = Annotated[
    int | None,
    typer.Option("--world", metavar="N", min=1, help="The number of ranks. [default: the mesh's, 2 for its -1]"),
]
HardwareOption = Annotated[
    str | None,
    typer.Option(
        "--hw",
        "--hardware",
        metavar="NAME",
        help="h100-80g, h200-141g, a100-80g, cpu, or the file of zgraph calibrate. [default: the plan's, else h100-80g]",
    ),
]
BatchOption = Annotated[
    str | None,
    typer.Option(
        "--batch", metavar="N[xLENGTH]", help="Rows of a rank's batch, and tokens of each, for hf:DIR. [default: 1x512]"
    ),
]
AtOption = Annotated[
    list[str] | None,
    typer.Option(
        "--at",
        metavar="NAME=SIZE",
        help="Give a size that differs from call to call this value (may be repeated). [default: symbols]",
    ),
]
ProgramOption = Annotated[
    str | None,
    typer.Option(
        "--program", metavar="NAME", help="Which program, where there are several. [default: the training step]"
    ),
]
StageOption = Annotated[
    int | None,
    typer.Option("--stage", metavar="K", min=0, help="Which stage's programs, of a plan with a pipeline. [default: 0]"),
]
UpdateOption = Annotated[
    bool, typer.Option("--update", help="Show the program of the plan's optimizer instead of forward and backward.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for other tools.")]
OutputOption = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="FILE", help="Write to a file.", show_default=False),
]
