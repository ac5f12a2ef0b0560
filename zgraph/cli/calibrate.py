"""`zgraph calibrate`: measures the costs of schedules and forecasts on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zgraph.cli.options import JsonOption, ModelArgument, PlanOption
from zgraph.cli.targets import load_plan, load_target, refuse_bundle


def calibrate(
    target: ModelArgument,
    out: Annotated[
        Path, typer.Option("-o", "--out", "--output", metavar="FILE.json", help="Where to write.", show_default=False)
    ],
    plan: PlanOption = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="How many steps to time.")] = 12,
    as_json: JsonOption = False,
) -> None:
    """Train a few steps on this machine, time every operator and link, and write them down for a plan's `hardware`.

    Under torchrun on all ranks, which measure together: torchrun --nproc-per-node 2 -m zgraph calibrate TARGET …
    """
    refuse_bundle(target, "calibrate")
    the_plan = load_plan(plan)
    loaded_target = load_target(target)

    import torch.distributed as dist

    from zgraph.api.calibration import calibrate as run

    hardware = run(loaded_target.model, the_plan, loaded_target.inputs, path=out, steps=steps)
    if not dist.is_initialized() or dist.get_rank() == 0:
        if as_json:
            typer.echo(hardware.model_dump_json(indent=1))
            return
        products = ", ".join(f"{rate / 1e9:.1f} GFLOP/s in {dtype}" for dtype, rate in hardware.flops.items())
        typer.echo(f"{len(hardware.operators)} operators; {products}; memory {hardware.memory / 1e9:.1f} GB/s")
        for dim, link in hardware.links.items():
            typer.echo(f"link {dim}: {link.bandwidth / 1e9:.3f} GB/s, {link.latency * 1e6:.0f} µs")
        typer.echo(f"wrote {out}", err=True)
