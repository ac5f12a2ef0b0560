"""What it costs from `compile` to the end of the first step: zgraph beside torch.compile of the whole model and of each block, cold and warm.

    OMP_NUM_THREADS=1 python benchmarks/first_step.py [--models gpt2-10 llama-12 llama-24 llama-48] [--ways …] [--write]

Cold is a process with empty folders, warm a second one with what the first left there (`ZGRAPH_CACHE`, `TORCHINDUCTOR_CACHE_DIR`). Seconds are the
processor's, of the process and of the compilers that it starts, from the call of `compile` on; imports and the model's making are not counted.
zgraph's step has an update (AdamW), which the peers' have not. Its parts, exclusive of each other:

    dynamo      the capture of the forward
    aot         the joint graph: AOTAutograd's
    passes, verify    zgraph's
    lowering    Inductor's own work, until there is code
    c++         the compilers of kernels, as processes of their own
    other       what is left: the step itself, votes, signatures, what is kept in the cache's folder

`--write` puts the table, with date and conditions, into benchmarks/results/first_step.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import machine

RESULT = Path(__file__).parent / "results" / "first_step.md"
WAYS = ("zgraph", "torch.compile", "torch.compile of each block")
PARTS = ("dynamo", "aot", "passes", "verify", "lowering", "c++", "other")
MODELS = ("gpt2-10", "llama-12", "llama-24", "llama-48")


def model_of(name: str) -> tuple[Any, Any, dict[str, Any]]:
    """(a transformers model by its family and number of layers, its list of blocks, the inputs of a step)."""
    import torch
    import transformers

    family, layers = name.split("-")
    torch.manual_seed(0)
    if family == "gpt2":
        sizes = {"n_embd": 160, "n_layer": int(layers), "n_head": 4, "n_positions": 64, "vocab_size": 1000}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, use_cache=False))
        blocks = model.transformer.h
    else:
        config = transformers.LlamaConfig(
            vocab_size=1000,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=int(layers),
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
        model = transformers.LlamaForCausalLM(config)
        blocks = model.model.layers
    tokens = torch.randint(1000, (2, 64))
    return model, blocks, {"input_ids": tokens, "labels": tokens}


def cpu() -> float:
    """Seconds of the processor so far, of this process and of those that it has waited for."""
    return time.process_time() + compilers()


def compilers() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Parts:
    """Seconds of this process by part: what is inside of another part counts for the inner one alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = time.process_time()

    def _turn(self) -> None:
        now = time.process_time()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def timed(self, owner: Any, function: str, name: str) -> None:
        """Count all calls of an owner's function as a part."""
        own: Callable[..., Any] = getattr(owner, function)

        @functools.wraps(own)
        def counted(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return own(*args, **kwargs)

        setattr(owner, function, counted)


def measure(name: str, way: str) -> dict[str, float]:
    """Seconds of the processor of one first step, in this process."""
    import zgraph

    model, blocks, inputs = model_of(name)
    parts = Parts()
    if way == "zgraph":
        from zgraph.capture import capture
        from zgraph.passes import PassManager, manager
        from zgraph.runtime import runtime
        from zgraph.torch_compat import inductor_code

        parts.timed(capture.Trace, "joint", "aot")
        parts.timed(runtime, "trace", "dynamo")
        parts.timed(PassManager, "run", "passes")
        parts.timed(manager, "verify_program", "verify")
        parts.timed(inductor_code, "compile_with_inductor", "lowering")
    begin, wall, outside = cpu(), time.perf_counter(), compilers()
    if way == "zgraph":
        plan = zgraph.Plan(optimizer=zgraph.AdamW(lr=1e-4))
        zgraph.compile(model, plan).train_step(**inputs)
    else:
        if way == "torch.compile":
            model.compile()
        else:
            for block in blocks:
                block.compile()
        model(**inputs).loss.backward()
    total = cpu() - begin
    found = dict(parts.seconds) | {"c++": compilers() - outside}
    return found | {"other": total - sum(found.values()), "total": total, "wall": time.perf_counter() - wall}


def in_own_process(name: str, way: str) -> list[dict[str, float]]:
    """(cold, warm): a first step in a process with empty folders, and in one after it."""
    with tempfile.TemporaryDirectory() as folder:
        folders = {"ZGRAPH_CACHE": f"{folder}/zgraph", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        command = [sys.executable, __file__, "--one", name, way]
        environment = os.environ | folders | {"ZGRAPH_HARDWARE": "default"}
        runs = [subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment) for _ in "cw"]
        return [json.loads(run.stdout.splitlines()[-1]) for run in runs]


def table(found: dict[tuple[str, str], list[dict[str, float]]]) -> str:
    lines = [
        "| model | way | | " + " | ".join(PARTS) + " | total | wall |",
        "|---|---|---|" + "---:|" * (len(PARTS) + 2),
    ]
    for (name, way), runs in found.items():
        for kind, run in zip(("cold", "warm"), runs, strict=True):
            cells = [f"{run.get(part, 0.0):.1f}" if way == "zgraph" else "" for part in PARTS]
            lines.append(f"| {name} | {way} | {kind} | {' | '.join(cells)} | {run['total']:.1f} | {run['wall']:.1f} |")
    return "\n".join(lines)


def ratios(found: dict[tuple[str, str], list[dict[str, float]]]) -> Iterator[str]:
    """Of each model zgraph's total over its peers', where both were measured: cold beside cold, warm beside warm."""
    for name, way in found:
        if way != "zgraph" and (name, "zgraph") in found:
            pairs = zip(found[name, "zgraph"], found[name, way], strict=True)
            cold, warm = (ours["total"] / theirs["total"] for ours, theirs in pairs)
            yield f"- {name}: {cold:.2f} of {way} cold, {warm:.2f} warm"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS, help="a family (gpt2, llama) and a number of layers")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measure(*args.one)))
        return
    found = {}
    for name in args.models:
        for way in args.ways:
            found[name, way] = in_own_process(name, way)
            print(
                f"{name}, {way}: {found[name, way][0]['total']:.1f} s cold, {found[name, way][1]['total']:.1f} s warm"
            )
    text = table(found) + "\n\n" + "\n".join(ratios(found))
    print(text)
    if args.write:
        load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
        RESULT.write_text(
            "# From `compile` to the end of the first step\n\n"
            "`OMP_NUM_THREADS=1 python benchmarks/first_step.py --write`: a GPT-2 of width 160 and Llamas of width 128 (4 heads, 2 of keys), "
            "vocabularies of 1,000, a batch of 2 rows of 64 tokens, one process, ZeRO 0, Inductor. Seconds of the processor, but for the last, "
            "without imports. Cold: with empty folders; warm: a second process. zgraph's step has an update (AdamW), the others are forward and "
            "backward.\n\n"
            f"{text}\n\nConditions: {machine.conditions()}, load average {load} at the end. One run each.\n"
        )


if __name__ == "__main__":
    main()
