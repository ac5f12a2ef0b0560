"""The kernels that Inductor makes of one layer, forward and backward, for CPUs and for an H200 (sm_90): how many, what they move, what is fused.

    python benchmarks/kernels.py [--layers llama gpt2 bert t5 head] [--devices cpu sm_90] [--write]

Nothing is run: code is generated for layers on the meta device, for sm_90 with the stand-in of
`tests/cuda/fake_h200.py`. What is counted, and how, is in `kernel_counts.py`. `--write` puts the tables into
benchmarks/results/kernels.md; `tests/codegen/test_layer_kernels.py` holds that page to what is generated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import machine

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests/cuda"))  # (for the stand-in)
RESULT = ROOT / "benchmarks/results/kernels.md"
DEVICES = {"sm_90": "bfloat16", "cpu": "float32"}  # each with the dtype of its layers
TITLES = {"sm_90": "H200 (sm_90), bfloat16", "cpu": "CPU, float32"}
PHASES = ("forward", "backward")
LAYERS = {
    "llama": "Llama (width 4,096, inner 14,336, 32 heads of which 8 of keys; 4,096 tokens)",
    "gpt2": "GPT-2 (width 768, 12 heads, dropout 0.1; 8 x 1,024 tokens)",
    "bert": "BERT (width 768, 12 heads, dropout 0.1; 16 x 512 tokens)",
    "t5": "T5 v1.1 (width 768, inner 2,048, 12 heads, attention written out, dropout 0.1; 16 x 512 tokens)",
    "head": "Llama's head (norm, 32,000 words, cross entropy; 4,096 tokens)",
}
HEAD = """\
# Kernels of a layer

`python benchmarks/kernels.py --write`: one layer of each model, with the gradients of its input and its weights, and what Inductor makes of it for an
H200 (sm_90, bfloat16) and for CPUs (float32). Nothing is run: code for sm_90 is generated without a device. The page on
[kernels](../../docs/internals/kernels.md) says what follows from it. `tests/codegen/test_layer_kernels.py` generates it again, and compares.
"""
MEANING = """\
A *library call* is a matrix product or attention; it reads its operands and writes its results. All else could at best be one loop, which reads
once what it needs of the inputs (for a backward: of what its forward saved) and of the library calls' results, and writes once what a library call
or the caller reads. Both together are the *least*. It is a bound that no program reaches: a residual that is needed before and after attention is
read twice by any. What a forward writes for its backward alone is moved, but not part of the least; it is in a column of its own.

*Moved* is what the buffers of each kernel and library call have by the count of Inductor's scheduler, without reads that only pin an order; *by
zgraph* is the estimate of its simulator; *but library calls* leaves these out of both sides, by Inductor's count. On CPU a kernel is a loop.
"""
FUSED = """\
## What is fused

Operators between the same library calls are a *place*: they could be one kernel. A cell has the kernels that compute the places with a fusion, and
the number of such places: with no more kernels than places, each is fused. Why two kernels of a place are apart is what Inductor says of them, with
the number of pairs.
"""


# -- what is counted --------------------------------------------------------------------------------------------------
def measure(name: str, device: str) -> dict[str, Any]:
    """Return the counts of a layer's forward and backward, for the device that this process has or stands in for."""
    import kernel_counts
    import kernel_layers
    import torch

    import zgraph
    from zgraph.build.planned_step import programs
    from zgraph.codegen.inductor import adopt_strides, compile_inductor
    from zgraph.codegen.partition import split

    module, inputs = kernel_layers.layer(name, getattr(torch, DEVICES[device]))
    plan = zgraph.Plan(mesh={"dp": 1}, zero=0)
    parts = split(programs(module, plan, inputs, 1).program)
    with kernel_counts.generating() as of_forward:
        forward = compile_inductor(parts.forward, {})
    adopt_strides(parts.backward, forward)
    with kernel_counts.generating() as of_backward:
        compile_inductor(parts.backward, {}, is_backward=True)
    both = (parts.forward, of_forward), (parts.backward, of_backward)
    return {phase: asdict(kernel_counts.counts(*part)) for phase, part in zip(PHASES, both, strict=True)}


def measured(layers: Iterable[str], device: str) -> dict[str, dict[str, Any]]:
    """Return what `measure` does, from a process of its own: a stand-in for a device comes before torch."""
    command = [sys.executable, __file__, "--child", device, "--layers", *layers]
    environment = {**os.environ, "ZGRAPH_FAKE_H200": str(int(device == "sm_90")), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-6000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def child(layers: Iterable[str], device: str) -> None:
    """Print what `measure` returns for each layer, and end the process."""
    if device == "sm_90":
        import fake_h200  # noqa: F401  (before torch)
        import kernel_layers

        kernel_layers.attend_as_sm_90()
    print(json.dumps({name: measure(name, device) for name in layers}), flush=True)
    os._exit(0)  # (the stand-in for the device has nothing to tear down)


# -- the page ---------------------------------------------------------------------------------------------------------
def rows(counts: dict[str, dict[str, Any]]) -> list[str]:
    """Return the table of what one device's layers move."""
    titles = ("operators", "library calls", "kernels", "least, GB", "moved, GB", "of the least", "by zgraph")
    columns = ("layer", "", *titles, "but library calls", "for the backward, GB")
    lines = [_row(columns), "| --- | --- |" + " ---: |" * (len(columns) - 2)]
    for name in counts:
        for phase, part in counts[name].items():
            numbers = [str(part[key]) for key in ("operators", "library", "kernels")]
            numbers += [f"{part[key] / 1e9:.3f}" for key in ("least", "moved")]
            rest = part["moved"] - part["library_moved"], part["least"] - part["library_least"]
            ratios = part["moved"] / part["least"], part["estimate"] / part["least"], rest[0] / rest[1]
            for_backward = f"{part['for_backward'] / 1e9:.3f}" if phase == "forward" else ""
            lines.append(_row((name, phase, *numbers, *(f"{ratio:.2f}" for ratio in ratios), for_backward)))
    return lines


def fusion_rows(counts: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """Return the table of what became of each fusion in each layer, for all devices."""
    fusions = {
        (f["name"], name, device, phase): f
        for device, layers in counts.items()
        for name, parts in layers.items()
        for phase, part in parts.items()
        for f in part["fusions"]
    }
    columns = [(device, phase) for device in counts for phase in PHASES]
    lines = [_row(("fusion", "layer", *map(", ".join, columns), "why kernels are apart"))]
    lines.append("| --- | --- |" + " ---: |" * len(columns) + " --- |")
    for fusion, name in sorted({key[:2] for key in fusions}, key=_order(fusions)):
        own = [fusions.get((fusion, name, *column)) for column in columns]
        refusals: dict[str, int] = {}
        for why, pairs in (item for f in own if f for item in f["refusals"].items()):
            refusals[why] = refusals.get(why, 0) + pairs
        cells = (f"{f['kernels']} in {f['places']}" if f else "–" for f in own)
        reasons = "; ".join(f"{why} ({pairs})" for why, pairs in sorted(refusals.items()))
        lines.append(_row((fusion, name, *cells, reasons)))
    return lines


def _order(fusions: Iterable[tuple[str, ...]]) -> Any:
    names, layers = list(dict.fromkeys(key[0] for key in fusions)), list(LAYERS)
    return lambda pair: (names.index(pair[0]), layers.index(pair[1]))


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def page(counts: dict[str, dict[str, dict[str, Any]]], conditions: str) -> str:
    """Return the page of results, which says at its end what made it."""
    tables = (line for device in counts for line in (f"## {TITLES[device]}", "", *rows(counts[device]), ""))
    lines = [HEAD, *(f"- {name}: {what}" for name, what in LAYERS.items()), "", MEANING, *tables]
    return "\n".join([*lines, FUSED, *fusion_rows(counts), "", f"Conditions: {conditions}.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=list(LAYERS))
    parser.add_argument("--devices", nargs="+", default=list(DEVICES), choices=list(DEVICES))
    parser.add_argument(
        "--write", action="store_true", help=f"write {RESULT.name}, if these are all layers and devices"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.layers, args.child)
    counts = {device: measured(args.layers, device) for device in args.devices}
    for device in counts:
        print(device, *rows(counts[device]), sep="\n")
    print(*fusion_rows(counts), sep="\n")
    if args.write:
        if (args.layers, args.devices) != (list(LAYERS), list(DEVICES)):
            parser.error("--write needs all layers and devices: the page has them all")
        RESULT.write_text(page(counts, machine.conditions()), encoding="utf-8")


if __name__ == "__main__":
    main()
