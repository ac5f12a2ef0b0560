"""`zgraph precompile`: fills the cache folder before a run, with no rank of it."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from zgraph.cli.options import BatchOption, JsonOption, ModelArgument, OutputOption, PlanOption, WorldOption
from zgraph.cli.output import CHECK_FAILED, give, progress
from zgraph.cli.targets import load_plan, load_target, on_path, refuse_bundle, resolve_world

if TYPE_CHECKING:
    from torch import nn

    from zgraph.api.precompile import Precompiled
    from zgraph.build.planned_step import Inputs

THREADS = "OMP_NUM_THREADS"


def precompile(
    target: ModelArgument,
    plan: PlanOption = None,
    world: WorldOption = None,
    batch: BatchOption = None,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compile what N ranks need for their first training step into ZGRAPH_CACHE, with none of them there.

    The ranks then find it, if they have this plan, this model's files, calls like TARGET's, the same versions and settings, and a processor
    like this one. Exits with 1 if something can't be kept, and says what. Over gloo each rank has code of its own, and ranks are
    compiled for one after another.
    """
    refuse_bundle(target, "precompile")
    the_plan = load_plan(plan)
    ranks = resolve_world(the_plan, world)
    _as_torchrun(ranks)
    on_path()  # (for policies of the user's)

    from zgraph.api.precompile import precompile as run

    def make() -> tuple[nn.Module, Inputs]:
        loaded = load_target(target, batch)
        return loaded.model, loaded.inputs

    with progress(f"compiling {target} for {ranks} ranks") as told:
        precompiled = run(make, the_plan, ranks, told)
    give(_data(precompiled), _text(precompiled), as_json, output)
    if not precompiled.ok:
        raise typer.Exit(CHECK_FAILED)


def _as_torchrun(ranks: int) -> None:
    """Let this process have as many threads as torchrun gives to each of several ranks: programs depend on it."""
    if ranks == 1 or THREADS in os.environ:
        return
    os.environ[THREADS] = "1"
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    typer.echo(
        f"note: {THREADS}=1, as torchrun sets it for several ranks of a machine; set what the ranks have", err=True
    )


def _data(precompiled: Precompiled) -> dict[str, Any]:
    return asdict(precompiled) | {"folder": str(precompiled.folder), "ok": precompiled.ok}


def _text(precompiled: Precompiled) -> str:
    lines = [f"{precompiled.folder}: for {precompiled.world} rank{'s' if precompiled.world > 1 else ''}"]
    for one in precompiled.ranks:
        who = "each rank" if len(precompiled.ranks) == 1 < precompiled.world else f"rank {one.rank}"
        had = f", {_counts(one.found)} there before" if one.found else ""
        lines.append(f"  {who}: {', '.join(one.programs)}: {_counts(one.written) or 'nothing'} written{had}")
    lines += [f"  not kept: {line}" for line in precompiled.refused]
    lines += [f"  note: {line}" for line in precompiled.depends]
    return "\n".join(lines)


def _counts(kinds: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())
