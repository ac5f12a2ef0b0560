"""How long capture and passes take as a model grows: Llamas of 12, 24 and 48 layers on the meta device, ZeRO-3 at world 8.

    python benchmarks/compile_time.py [--layers 12 24 48] [--repeat 1] [--write]

Inductor does not run. Each size is measured in a process of its own, so that none profits from another's caches. The
parts are seconds of the processor (all is one thread), which other load on the machine changes little; "wall" is the
clock's.
"linear" is the total over what the first size's total would grow to if each layer cost the same. `--write` puts
the table, with date and conditions, into benchmarks/results/compile_time.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import machine

RESULT = Path(__file__).parent / "results" / "compile_time.md"
PARTS = ("trace", "joint", "passes", "verify", "other")


def measure(layers: int) -> dict[str, float]:
    """Seconds of each part for a Llama of so many layers, and the final program's nodes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import zgraph
    from zgraph.build.pass_pipeline import build
    from zgraph.build.planned_step import device_of
    from zgraph.capture import capture
    from zgraph.parameters.layout import layout
    from zgraph.passes import PassManager, manager
    from zgraph.torch_compat import compile_lock, inductor_code

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        tokens = torch.empty(1, 512, dtype=torch.long)
    plan = zgraph.Plan(mesh={"dp": 8}, zero=3)
    sizes = plan.resolve_mesh(8)
    clock = time.process_time
    manager.time = SimpleNamespace(perf_counter=clock)  # type: ignore[attr-defined]  # what the history's records are made with
    wall, begin = time.perf_counter(), clock()
    specs = layout(model, sizes, plan.zero, plan.param_persistence_threshold)
    inputs = {"input_ids": tokens, "labels": tokens}
    device = device_of(model)
    start = clock()
    traced = capture.trace(model, type(model).forward, (), inputs, specs, sizes, device)
    trace = clock() - start
    start = clock()
    assert traced.loss is not None
    captured = traced.joint(frozenset({traced.loss}), inductor_code.inductor_decompositions(), "train")
    joint = clock() - start
    with compile_lock.ONE_AT_A_TIME:  # (as the run time does)
        history = PassManager(build(plan)).run(captured)
    total = clock() - begin
    wall = time.perf_counter() - wall
    passes = sum(record.seconds for record in history.records)
    verify = sum(record.verify_seconds for record in history.records)
    return {
        "trace": trace,
        "joint": joint,
        "passes": passes,
        "verify": verify,
        "other": total - trace - joint - passes - verify,
        "total": total,
        "wall": wall,
        "nodes": history.records[-1].nodes,
    }


def in_own_process(layers: int, repeat: int) -> dict[str, float]:
    """The fastest of `repeat` measurements."""
    runs = []
    for _ in range(repeat):
        command = [sys.executable, __file__, "--one", str(layers)]
        runs.append(
            json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
        )
    return min(runs, key=lambda run: run["total"])


def table(found: dict[int, dict[str, float]]) -> str:
    first = min(found)
    lines = [
        "| layers | nodes | " + " | ".join(PARTS) + " | total | of linear | wall |",
        "|" + "---:|" * (len(PARTS) + 5),
    ]
    for layers, run in found.items():
        linear = run["total"] / (found[first]["total"] * layers / first)
        cells = [f"{run[part]:.1f} s" for part in (*PARTS, "total")]
        lines.append(
            f"| {layers} | {run['nodes']:.0f} | " + " | ".join(cells) + f" | {linear:.2f} | {run['wall']:.1f} s |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48])
    parser.add_argument("--repeat", type=int, default=1, help="measurements of each size; the fastest counts")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measure(args.one)))
        return
    found = {layers: in_own_process(layers, args.repeat) for layers in sorted(args.layers)}
    text = table(found)
    print(text)
    if args.write:
        load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(
            "# Capture and passes, without Inductor\n\n"
            "`python benchmarks/compile_time.py --write`: Llamas (hidden size 1024, 16 heads, 8 key-value heads, batch 1 of 512 tokens) "
            "on the meta device, ZeRO-3 at world 8.\n\n"
            f"{text}\n\nConditions: {machine.conditions()}, load average {load} at the end. "
            f"The fastest of {args.repeat} a size; each in a process of its own; "
            'imports are not counted. Seconds of the processor (one thread), but for "wall". "Of linear" is the total over '
            "the smallest size's total times the ratio of layers.\n"
        )


if __name__ == "__main__":
    main()
