"""The update program against torch's AdamW: time, extra memory and compile time, one thread, one process without a group.

    OMP_NUM_THREADS=1 python benchmarks/update.py [--parameters 100000000] [--tensors 3 300] [--rounds 9] [--out FILE]

*Plain.* AdamW alone on float32 weights: `torch.optim.AdamW` fused and foreach, and `model.step()` of a plan with AdamW.

*Everything.* On one side fused AdamW and the separate operations that a training loop puts around it:
`_foreach_mul_(grads, 1 / scale)`, `clip_grad_norm_`, `AdamW.step`, `_foreach_copy_` of the float32 weights into bfloat16
ones, `_foreach_lerp_` of the average. On the other a plan that does exactly this work in its update program:
`loss_average="token"` (gradients are multiplied by a number that is known at run time; fp16's own unscaling is part of
the backward), `grad_clip=1.0`, `precision` with bfloat16 parameters (the update keeps float32 weights and writes
bfloat16 ones) and float32 gradients, `ema=0.999`. Afterwards the float32 weights and averages of both sides are compared.

All contenders of one number of tensors run in one process on the same gradients, in turn, in another order
each round; copies of gradients are not timed. 300 tensors are 25 layers of GPT-2. Bandwidth is that of the bytes that
the work needs at least: plain 28 a parameter (reads p, g, m, v; writes p, m, v), everything 42 (reads g for the norm, then
p, g, m, v and the average; writes p, m, v, the average and bfloat16 p); `Tensor.copy_` counts 8 an element. Memory and
compile time are measured in processes of their own: the peak of the resident set during two steps less what was resident
before them, with all states made; and what `Updater.program` takes with an empty Inductor cache. "Outside kernels" is
`model.step()` less the compiled pieces (in steps that are not among those compared).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
import torch
from torch import Tensor, nn

import zgraph

PLAIN = ("torch fused", "torch foreach", "zgraph")
EVERYTHING = ("torch fused + separate", "zgraph, everything")
BYTES = {**dict.fromkeys(PLAIN, 28), **dict.fromkeys(EVERYTHING, 42)}
BASE = {**dict.fromkeys(PLAIN, PLAIN[0]), **dict.fromkeys(EVERYTHING, EVERYTHING[0])}
TARGETS = {"zgraph": 1.05, "zgraph, everything": 0.7}  # of the time of `BASE`
LR, SCALE, DECAY = 1e-3, 2.0**16, 0.999


def shapes(tensors: int, parameters: int) -> list[tuple[int, ...]]:
    """Of so many tensors with about so many elements together: equal matrices, or layers of GPT-2 (12 tensors each)."""
    if tensors % 12:
        return [(max(1, parameters // tensors // 1024), 1024)] * tensors
    layers = tensors // 12
    h = max(8, round((parameters / layers / 12) ** 0.5 / 8) * 8)
    layer = [(h,), (h,), (3 * h, h), (3 * h,), (h, h), (h,), (h,), (h,), (4 * h, h), (4 * h,), (h, 4 * h), (h,)]
    return layer * layers


class Weights(nn.Module):
    """Nothing but parameters."""

    def __init__(self, values: list[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(v.clone()) for v in values)

    def forward(self) -> Tensor:
        return torch.stack([w.sum() for w in self.weights]).sum()


@dataclass
class Contender:
    """One that updates weights: `prepare` gives it its gradients and is not timed. `result` are its tensors to compare."""

    prepare: Callable[[], None]
    step: Callable[[], Any]
    result: Callable[[], list[Tensor]]
    model: Any = None


def contender(name: str, values: list[Tensor], grads: list[Tensor]) -> Contender:
    """`grads` are only read; where they are scaled they are `SCALE` times too large."""
    if name.startswith("zgraph"):
        return _zgraph(values, grads, everything=name in EVERYTHING)
    return _separate(values, grads) if name in EVERYTHING else _torch(name, values, grads)


def _torch(name: str, values: list[Tensor], grads: list[Tensor]) -> Contender:
    params = [nn.Parameter(v.clone()) for v in values]
    optimizer = torch.optim.AdamW(params, lr=LR, fused=name == "torch fused", foreach=name == "torch foreach")

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Contender(lambda: _give(params, grads), step, lambda: [p.detach() for p in params])


def _separate(values: list[Tensor], grads: list[Tensor]) -> Contender:
    low = [v.bfloat16() for v in values]
    params: list[Tensor] = [nn.Parameter(v.float()) for v in low]
    average = [p.detach().clone() for p in params]
    own = [torch.empty_like(g) for g in grads]
    optimizer = torch.optim.AdamW(params, lr=LR, fused=True)

    def prepare() -> None:
        torch._foreach_copy_(own, grads)
        _give(params, own)

    @torch.no_grad()
    def step() -> None:
        torch._foreach_mul_(own, 1 / SCALE)
        nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        optimizer.step()
        torch._foreach_copy_(low, params)
        torch._foreach_lerp_(average, params, 1 - DECAY)
        optimizer.zero_grad()

    return Contender(prepare, step, lambda: [*(p.detach() for p in params), *average])


def _zgraph(values: list[Tensor], grads: list[Tensor], *, everything: bool) -> Contender:
    plan = zgraph.Plan(backend="inductor", optimizer=zgraph.AdamW(lr=LR))
    if everything:
        precision = zgraph.Precision(parameter="bfloat16", compute="bfloat16", reduce="float32")
        average = zgraph.EMA(decay=DECAY)
        plan = plan.model_copy(update={"grad_clip": zgraph.GradClip(norm=1.0), "ema": average})
        plan = plan.model_copy(update={"precision": precision, "loss_average": "token"})
    model: Any = zgraph.compile(Weights([v.bfloat16() if everything else v for v in values]), plan)
    params, updater = list(model.parameters()), model.zgraph.runtime.updater
    for param in params:
        param.grad_dtype = torch.float32

    def prepare() -> None:
        _give(params, grads)
        if everything:
            updater.numbers.factor = 1 / SCALE

    def result() -> list[Tensor]:
        names = [n for n, _ in model.named_parameters()]
        if not everything:
            return [p.detach() for p in params]
        return [updater.states[f"{n}/{key}"] for key in ("master", "ema") for n in names]

    return Contender(prepare, model.step, result, model)


def _give(params: list[Any], grads: list[Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad


def data(tensors: int, parameters: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Weights, gradients, and the same gradients scaled, of a norm near 3."""
    generator = torch.Generator().manual_seed(0)
    sizes = shapes(tensors, parameters)
    values = [torch.randn(s, generator=generator) * 0.02 for s in sizes]
    grads = [torch.randn(s, generator=generator) * (3 / parameters**0.5) for s in sizes]
    return values, grads, [g * SCALE for g in grads]


# -- what one process measures ---------------------------------------------------------------------------------------
def times(tensors: int, parameters: int, rounds: int) -> dict[str, Any]:
    """Median seconds of each contender and of `Tensor.copy_` on the same number of elements, and what else needs all."""
    values, grads, scaled = data(tensors, parameters)
    source = torch.randn(sum(v.numel() for v in values))
    target = torch.zeros_like(source)
    found: dict[str, Any] = {"elements": source.numel(), "outside": {}, "differ": {}}
    runs = {n: contender(n, values, scaled if n in EVERYTHING else grads) for n in BYTES}
    runs["copy"] = Contender(lambda: None, lambda: target.copy_(source), list)
    seconds: dict[str, list[float]] = {n: [] for n in runs}
    names = list(runs)
    for number in range(-2, rounds):  # (the first two compile and warm up)
        random.Random(number).shuffle(names)  # (what ran before leaves its tensors in the cache)
        for name in names:
            runs[name].prepare()
            start = time.perf_counter()
            runs[name].step()
            if number >= 0:
                seconds[name].append(time.perf_counter() - start)
    for name in (n for n in runs if runs[n].model is not None):
        pairs = zip(runs[name].result(), runs[BASE[name]].result(), strict=True)
        found["differ"][name] = max(float((a - b).abs().max()) for a, b in pairs)
        found["outside"][name] = outside(runs[name], rounds)
    return {"seconds": {n: statistics.median(s) for n, s in seconds.items()}, "all": seconds, **found}


def program_of(model: Any) -> Any:
    """What runs the update of all of a compiled model's parameters."""
    updater = model.zgraph.runtime.updater
    return updater.programs.of(tuple(n for n, _ in model.named_parameters()), updater.options).executable


def outside(run: Contender, rounds: int) -> float:
    """Median seconds of a step that no compiled piece takes."""
    inside = 0.0

    def timed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        def call(inputs: list[Any]) -> Any:
            nonlocal inside
            start = time.perf_counter()
            try:
                return function(inputs)
            finally:
                inside += time.perf_counter() - start

        return call

    executable = program_of(run.model)
    for chunk in executable.chunks:
        chunk.executable.function = timed(chunk.executable.function)
    left = []
    for _ in range(rounds):
        run.prepare()
        inside, start = 0.0, time.perf_counter()
        run.step()
        left.append(time.perf_counter() - start - inside)
    return statistics.median(left)


def memory(name: str, tensors: int, parameters: int) -> dict[str, float]:
    """Bytes that a step needs above what stays, and the seconds that zgraph's program takes to compile."""
    values, grads, scaled = data(tensors, parameters)
    run = contender(name, values, scaled if name in EVERYTHING else grads)
    found: dict[str, float] = {}
    if run.model is not None:
        start = time.perf_counter()
        executable = program_of(run.model)
        found = {"compile": time.perf_counter() - start, "kinds": len(executable.executables)}
    for _ in range(2):
        run.prepare()
        run.step()
    run.prepare()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # (what an earlier step freed must count again)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    run.step()
    run.prepare()
    run.step()
    return {"extra": _status("VmHWM") - before, **found}


def _status(key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) * 1024


# -- the table -------------------------------------------------------------------------------------------------------
def table(tensors: int, found: dict[str, Any], own: dict[str, dict[str, float]]) -> str:
    seconds, n = found["seconds"], found["elements"]
    copy = 8 * n / seconds["copy"]
    lines = [
        f"{tensors} tensors, {n / 1e6:.1f} M parameters; `Tensor.copy_`: {copy / 1e9:.1f} GB/s",
        "",
        "| | time | fastest | of torch | needs at least | of copy | extra memory | of a gradient | compile | outside kernels |",
        "|---|" + "---:|" * 9,
    ]
    for name in BYTES:
        rate = BYTES[name] * n / seconds[name]
        target = f" (target {TARGETS[name]})" if name in TARGETS else ""
        cells = [
            f"{seconds[name] * 1e3:.1f} ms",
            f"{min(found['all'][name]) * 1e3:.1f} ms",
            f"{seconds[name] / seconds[BASE[name]]:.2f}{target}",
            f"{BYTES[name]} B each: {rate / 1e9:.1f} GB/s",
            f"{rate / copy:.2f}",
            f"{own[name]['extra'] / 1e6:.0f} MB",
            f"{own[name]['extra'] / (4 * n):.2f}{' (target 1)' if name in TARGETS else ''}",
            f"{own[name]['compile']:.1f} s, {own[name]['kinds']:.0f} kinds" if "compile" in own[name] else "",
            f"{found['outside'][name] * 1e3:.1f} ms" if name in found["outside"] else "",
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    differ = ", ".join(f"{name}: {value:.1g}" for name, value in found["differ"].items())
    return "\n".join([*lines, "", f"Largest difference from torch's weights (and averages) afterwards: {differ}."])


def conditions(rounds: int) -> str:
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    return f"Conditions: {machine.conditions()}, 1 thread, load average {load} at the end. Medians of {rounds} rounds."


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--tensors", type=int, nargs="+", default=[3, 300], help="a multiple of 12: layers of GPT-2")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="write the tables there as well, as markdown")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.one is not None:
        count = args.tensors[0]
        timed = args.one == "times"
        found = times(count, args.parameters, args.rounds) if timed else memory(args.one, count, args.parameters)
        print(json.dumps(found))
        return
    parts = []
    for count in args.tensors:
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache}

            def one(what: str, count: int = count, environment: dict[str, str] = environment) -> Any:
                command = [sys.executable, __file__, "--one", what, "--tensors", str(count)]
                command += ["--parameters", str(args.parameters), "--rounds", str(args.rounds)]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
                return json.loads(done.stdout.splitlines()[-1])

            own = {name: one(name) for name in BYTES}
            parts.append(table(count, one("times"), own))
        print(parts[-1], end="\n\n", flush=True)
    print(conditions(args.rounds))
    if args.out is not None:
        text = "\n\n".join(["# The update program", "`python benchmarks/update.py`", *parts, conditions(args.rounds)])
        args.out.parent.mkdir(exist_ok=True)
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
