"""What a plan for many ranks takes to be looked at on one machine: a Llama of 70 B parameters for 1,024 ranks (tp 8, pp 8, dp 16, ZeRO-1).

    python benchmarks/whatif.py [--layers 80] [--tensor-parallel auto] [--out FOLDER]

The model is on the meta device. It is captured, divided, cut into stages, each kind of stage goes through all passes and is simulated, and the
schedule is replayed: all that `zgraph forecast` does. Seconds are those of the wall clock and of the processor (other work on the machine makes
the first longer, not the second), memory is the process's most (its resident set). One thread.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from pathlib import Path
from typing import Any

import machine

RESULTS = Path(__file__).parent / "results"
LIMIT_SECONDS, LIMIT_BYTES = 300.0, 12 * 2**30
LLAMA = {
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "use_cache": False,
}
TOKENS = 4096  # of a row; a micro-batch is one
MICRO_BATCHES = 16


class Clock:
    """Seconds of each part, by the wall and by the processor, and the process's memory behind it."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, float, float]] = []
        self._from = self._begun = (time.perf_counter(), time.process_time())

    def lap(self, what: str) -> None:
        self._add(what, self._from)
        self._from = (time.perf_counter(), time.process_time())

    def total(self) -> tuple[str, float, float, float]:
        self._add("all", self._begun)
        return self.rows[-1]

    def _add(self, what: str, since: tuple[float, float]) -> None:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.rows.append((what, time.perf_counter() - since[0], time.process_time() - since[1], most))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--tensor-parallel", choices=("auto", "model"), default="auto")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    text = measured(options.layers, options.tensor_parallel)
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "whatif.md").write_text(text)


def measured(layers: int, how: str) -> str:
    import torch
    import transformers

    import zgraph
    from zgraph.build.planned_step import captured_program
    from zgraph.forecast.pipeline_plan import planned_stages
    from zgraph.forecast.stages import forecast_of

    torch.set_num_threads(1)
    plan = zgraph.Plan(
        mesh={"pp": 8, "dp": 16, "tp": 8},
        tensor_parallel=how,
        zero=1,
        optimizer=zgraph.AdamW(lr=1e-4),
        precision="bf16",
        micro_batches=MICRO_BATCHES,
        hardware="h100-80g",
    )
    clock = Clock()
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=layers, **LLAMA))
        ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    clock.lap("the model, on the meta device")
    captured = captured_program(model, plan, batch, 1024)
    clock.lap("captured, weights to divide found")
    made = planned_stages(model, plan, batch, 1024, captured=captured)
    clock.lap("cut into 8 stages")
    found = forecast_of(made)
    clock.lap("all passes, simulated and replayed")
    return written(layers, how, sum(p.numel() for p in model.parameters()), len(captured.nodes), clock, found)


def written(layers: int, how: str, parameters: int, nodes: int, clock: Clock, found: Any) -> str:
    _, wall, processor, most = clock.total()
    kinds = len({stage.like for stage in found.stages})
    lines = [
        "# What-if for 1,024 ranks",
        "",
        f"A Llama of {layers} layers and {parameters / 1e9:.1f} B parameters, a micro-batch of one row of {TOKENS} tokens: {nodes} nodes, forward",
        f"and backward. Plan: `pp` 8, `dp` 16, `tp` 8, ZeRO-1, AdamW, bf16, {MICRO_BATCHES} micro-batches, `tensor_parallel={how!r}`, h100-80g.",
        f"Of 8 stages {kinds} are of different kinds, and are simulated.",
        "",
        "| | wall clock | processor | most memory by then |",
        "| --- | ---: | ---: | ---: |",
        *(f"| {what} | {a:.1f} s | {b:.1f} s | {c / 2**30:.2f} GiB |" for what, a, b, c in clock.rows),
        "",
        f"Goals: at most {LIMIT_SECONDS:.0f} s ({'met' if wall <= LIMIT_SECONDS else 'missed'} by the wall clock, "
        f"{'met' if processor <= LIMIT_SECONDS else 'missed'} by the processor's) and {LIMIT_BYTES / 2**30:.0f} GiB "
        f"({'met' if most <= LIMIT_BYTES else 'missed'}).",
        "",
        "What came out:",
        "",
        "```text",
        str(found),
        "```",
        "",
        f"Conditions: {machine.conditions()}, one thread; {os.getloadavg()[0]:.0f} processes ran or waited for a core in the last minute.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
