"""`zgraph verify`: compares a program on virtual ranks, or its compiled code on real ones, with the plain model."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zgraph.cli.options import (
    BatchOption,
    HardwareOption,
    JsonOption,
    ModelArgument,
    OutputOption,
    PlanOption,
    WorldOption,
)
from zgraph.cli.output import CHECK_FAILED, give, progress
from zgraph.cli.targets import load_plan, load_target, refuse_bundle, resolve_world, with_hardware
from zgraph.errors import VerifyError

if TYPE_CHECKING:
    from zgraph.build.planned_step import Inputs
    from zgraph.program.tolerance import Difference

CompiledOption = Annotated[
    bool, typer.Option("--compiled", help="Run the generated code on real ranks; under torchrun for more than one.")
]

AllFaultsOption = Annotated[
    bool,
    typer.Option("--all-faults", help="List every fault of a program that breaks an invariant, not the first alone."),
]


def verify(
    target: ModelArgument,
    plan: PlanOption = None,
    world: WorldOption = None,
    hardware: HardwareOption = None,
    batch: BatchOption = None,
    compiled: CompiledOption = False,
    all_faults: AllFaultsOption = False,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the program on N virtual ranks and compare outputs, gradients and buffers with the plain model.

    Exits with 1 if they differ by more than rounding. Of a pipeline all stages run, by its schedule. With --compiled the generated code
    takes four training steps on real ranks, here or, for more than one, under torchrun. A program that breaks an invariant is an error, which
    shows the first fault; with --all-faults it shows each.
    """
    refuse_bundle(target, "verify")
    the_plan = with_hardware(load_plan(plan), hardware)
    ranks = resolve_world(the_plan, world)
    loaded_target = load_target(target, batch, weights=True)

    from zgraph.api.verify import verify as run

    inputs = batch_of_all(loaded_target.inputs, the_plan.data_ranks(ranks))
    with progress(f"running {target} on {ranks} {'real' if compiled else 'virtual'} ranks"):
        try:
            report = run(loaded_target.model, the_plan, ranks, inputs, compiled=compiled)
        except VerifyError as error:
            if error.others and not all_faults:
                error.add_note(f"and {len(error.others)} further faults of this program: --all-faults lists them")
            for other in error.others if all_faults else ():
                typer.echo(f"zgraph: {other}\n", err=True)
            raise
    worst = [_data(d) for d in report.worst()]
    values = {
        "ok": report.ok,
        "exact": report.exact,
        "world": ranks,
        "stage": report.stage,
        "compared": len(report.differences),
        "first": None if report.first is None else _data(report.first),
        "worst": worst,
    }
    if int(os.environ.get("RANK", 0)) == 0 or not compiled:  # (all ranks have the same result)
        give(values, str(report), as_json, output)
    if not report.ok:
        raise typer.Exit(CHECK_FAILED)


def _data(difference: Difference) -> dict[str, Any]:
    return dataclasses.asdict(difference) | {"error": _finite(difference.error), "ok": difference.ok}


def _finite(error: float) -> float | None:
    """Return None for an error that can't be measured (another shape): JSON has no infinity."""
    return error if math.isfinite(error) else None


def batch_of_all(inputs: Inputs, ranks: int) -> Inputs:
    """Return a batch for `ranks` ranks with different rows, made from one rank's; print a note if the rows can't
    differ."""
    batch, different = global_batch(inputs, ranks)
    if not different and ranks > 1:
        note = "note: the batch has one row, so all ranks see the same data: a missing reduction is not found"
        typer.echo(note, err=True)
    return batch


def global_batch(inputs: Inputs, world: int) -> tuple[Inputs, bool]:
    """Return the batch of all ranks, made from one rank's batch, and whether the ranks see different data.

    Rank 0 gets the rows as they are, each other rank as many, drawn with replacement: if all ranks had equal rows, the mean
    over ranks would equal each rank's own value, and a missing reduction would not be detected. All inputs draw the same
    rows, so inputs and targets stay together.
    """
    import torch
    from torch.utils import _pytree as pytree

    batched = [x for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor) and x.dim()]
    rows = max((x.shape[0] for x in batched), default=0)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(max(rows, 1), (rows * (world - 1),), generator=generator)
    index = torch.cat([torch.arange(rows), drawn])

    def repeat(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != rows:
            return leaf
        return leaf[index.to(leaf.device)]

    return pytree.tree_map(repeat, inputs), rows > 1  # type: ignore[return-value]
