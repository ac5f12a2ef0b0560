"""Training steps within a memory budget: measured peaks beside budgets and forecasts, times beside torch's own partitioner.

    python benchmarks/memory.py [--budgets 12] [--layers 24] [--dim 544] [--batch 2] [--seq 512] [--steps 5] [--out FOLDER]

One process and no process group; a GPT of 85 M parameters by default, SGD, float32, one thread a core. `zgraph.calibrate` measures the
model's operators first. Budgets are spread evenly from the smallest that works (the one that the refusal of one byte states) to
the forecast of a plan without a budget.

*Peaks* are bytes of torch's CPU allocator (`zgraph.runtime.allocations`), which count from before the model is made: all that is held
and all that a step allocates. *Times* are medians of steps after two to warm up. Machines get slower and faster while this runs: each step is
timed behind one of the same reference (of zgraph without a budget), and its time is multiplied by the reference's median over
the time that this one took. The reference itself is timed so at three times of the run: times that differ by less than these do not differ.

*torch* is `torch.compile` with `torch._functorch.config.activation_memory_budget` from 1 to 0, on the same model, batch and optimizer. A
budget of zgraph is compared with the fastest of those whose measured peak is not above its own.

*Gradients* of each budget, with `backend="eager"`, are compared bit for bit with those of a plan without a budget.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import machine

from zgraph.runtime import allocations

FORECAST = 0.03  # of the measured peak: how far the forecast may be off
COLUMNS = (
    "budget",
    "measured peak",
    "of budget",
    "forecast peak",
    "off by",
    "step",
    "min",
    "of keeping all",
    "forecast",
    "torch at that peak",
    "ratio",
    "gradients",
)
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budgets", type=int, default=12)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--dim", type=int, default=544)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    allocations.count()
    import torch
    from link import gpt

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    size = gpt.Size(args.layers, args.dim, 8192, args.seq, args.batch, args.seq)
    result = measure(size, args.budgets, args.steps)
    result["conditions"] = conditions(args, sum(p.numel() for p in gpt.make(size).parameters()))
    text = report(result)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "memory.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "memory.md").write_text(text)
    print(text)


def measure(size: Any, budgets: int, steps: int) -> dict[str, Any]:
    import zgraph

    machine = Path(tempfile.mkdtemp(prefix="zgraph-memory-")) / "here.json"
    plan = zgraph.Plan(optimizer=zgraph.SGD(lr=1e-3))
    from link import gpt

    batch = gpt.data(size, 0)
    zgraph.calibrate(gpt.make(size), plan, batch, path=machine)
    plan = plan.model_copy(update={"hardware": str(machine)})
    most = forecast(size, plan)
    least = smallest(size, plan)
    wanted = [least + (most - least) * i // (budgets - 1) for i in range(budgets)]
    found: dict[str, Any] = {"most": most, "least": least, "budgets": [], "torch": [], "same": []}
    reference = Reference(zgraph_step(size, plan)[0], steps)
    found["same"].append(reference.beside_itself(steps))
    for fraction in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0):
        row = timed(lambda fraction=fraction: torch_step(size, fraction), steps, reference)
        found["torch"].append({"fraction": fraction, **row})
        print("torch", found["torch"][-1], flush=True)
    found["same"].append(reference.beside_itself(steps))
    for budget in reversed(wanted):
        mine = plan.model_copy(update={"memory_budget": budget})
        row = timed(lambda mine=mine: zgraph_step(size, mine), steps, reference)
        found["budgets"].append({"budget": budget, **row})
        print("zgraph", found["budgets"][-1], flush=True)
    found["same"].append(reference.beside_itself(steps))
    eager = zgraph.Plan(backend="eager", hardware=str(machine))
    plain = gradients(size, eager)
    low, high = smallest(size, eager), forecast(size, eager)
    for i, row in enumerate(found["budgets"]):
        budget = high - (high - low) * i // (budgets - 1)
        row["equal"] = equal(plain, gradients(size, eager.model_copy(update={"memory_budget": budget})))
    return found


def forecast(size: Any, plan: Any) -> int:
    """Bytes at the peak of a step of this plan, by the simulator."""
    from link import gpt

    from zgraph.build.pass_pipeline import costs_of
    from zgraph.build.planned_step import programs
    from zgraph.passes.analysis.simulator import simulate

    program = programs(gpt.make(size), plan, gpt.data(size, 0), 1).program
    return sum(simulate(program, costs_of(plan)).peak.values())


def smallest(size: Any, plan: Any) -> int:
    from zgraph.errors import PlanError

    try:
        return forecast(size, plan.model_copy(update={"memory_budget": 1}))
    except PlanError as error:
        found = re.search(r"smallest that works is (\d+) bytes", str(error))
        if found is None:
            raise
        return int(found[1])


def zgraph_step(size: Any, plan: Any) -> tuple[Callable[[], Any], Callable[[], dict[str, Any]]]:
    from link import gpt

    import zgraph

    batch = gpt.data(size, 0)
    model = zgraph.compile(gpt.make(size), plan)

    def said() -> dict[str, Any]:
        from zgraph.passes.analysis.simulator import simulate

        runtime = model.zgraph.runtime
        step = next(iter(model.zgraph.programs.values()))
        found = simulate(step.history().program, runtime.costs)
        return {
            "forecast": sum(found.peak.values()) + step.outside.held,
            "forecast seconds": model.zgraph.forecast().seconds,
        }

    return lambda: model.train_step(*batch), said


def torch_step(size: Any, fraction: float) -> tuple[Callable[[], Any], Callable[[], dict[str, Any]]]:
    import torch
    from link import gpt

    torch._dynamo.reset()
    torch._functorch.config.activation_memory_budget = fraction  # (read when the first step is compiled)
    batch = gpt.data(size, 0)
    model = gpt.make(size)
    compiled = torch.compile(model, dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> Any:
        loss = compiled(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, dict


class Reference:
    """A step that stays the same, beside which others are timed: `seconds` is its median over the whole run."""

    def __init__(self, step: Callable[[], Any], steps: int) -> None:
        self.step = step
        for _ in range(2):
            step()
        self.seconds = statistics.median(clocked(step) for _ in range(steps))

    def corrected(self, step: Callable[[], Any]) -> float:
        """Seconds of a step, as they would be where the reference takes its median."""
        mine = clocked(self.step)
        return clocked(step) * self.seconds / mine

    def beside_itself(self, steps: int) -> float:
        """Its own seconds, measured as those of others are: how far these are apart at different times is noise."""
        return statistics.median(self.corrected(self.step) for _ in range(steps))


def clocked(step: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def timed(build: Callable[[], Any], steps: int, reference: Reference) -> dict[str, Any]:
    """Peak bytes and seconds of a step, and what else it says of itself."""
    gc.collect()
    before = allocations.live()
    step, said = build()
    compiled = clocked(step) + clocked(step)
    gc.collect()
    allocations.reset_peak()
    for _ in range(2):
        step()
    peak = allocations.peak() - before
    seconds = [reference.corrected(step) for _ in range(steps)]
    return {"peak": peak, "seconds": statistics.median(seconds), "min": min(seconds), "warm": compiled, **said()}


def gradients(size: Any, plan: Any) -> dict[str, Any]:
    from link import gpt

    import zgraph

    model = zgraph.compile(gpt.make(size), plan)
    model(*gpt.data(size, 0)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    import torch

    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


# -- the report ---------------------------------------------------------------------------------------------------------
def report(result: dict[str, Any]) -> str:
    rows = sorted(result["budgets"], key=lambda r: r["budget"])
    base = rows[-1]["seconds"]
    lines = [
        "# Memory: steps within a budget",
        "",
        f"`python benchmarks/memory.py {' '.join(sys.argv[1:])}`",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---:|" * len(COLUMNS),
    ]
    for row in rows:
        rival = at_most(result["torch"], row["peak"])
        lines.append(
            f"| {mb(row['budget'])} | {mb(row['peak'])} | {row['peak'] / row['budget']:.3f} | {mb(row['forecast'])} "
            f"| {row['forecast'] / row['peak'] - 1:+.1%} | {row['seconds']:.3f} s | {row['min']:.3f} | {row['seconds'] / base:.3f} "
            f"| {row['forecast seconds']:.3f} s | "
            + (f"{rival['seconds']:.3f} s | {row['seconds'] / rival['seconds']:.3f} |" if rival else "none | |")
            + f" {'equal' if row.get('equal') else 'differ'} |"
        )
    lines += [
        "",
        "torch's `activation_memory_budget`:",
        "",
        "| fraction | measured peak | step | min |",
        "|---:|---:|---:|---:|",
    ]
    lines += [f"| {r['fraction']} | {mb(r['peak'])} | {r['seconds']:.3f} s | {r['min']:.3f} |" for r in result["torch"]]
    lines += ["", "## Goals", "", "| goal | at most | measured | |", "|---|---:|---:|---|"]
    noise = max(result["same"]) / min(result["same"])
    for text, limit, measured in goals(result):
        shown = "not measured" if measured is None else f"{measured:.3f}"
        verdict = "" if measured is None else "met" if measured <= limit else "missed"
        if verdict == "missed" and "time" in text and measured <= limit * noise:
            verdict = "within the noise"
        lines.append(f"| {text} | {limit:.3f} | {shown} | {verdict} |")
    lines += [
        "",
        f"Noise: the reference beside itself, at three times of the run: {noise:.3f} from the least to the most.",
    ]
    lines += ["", f"Conditions: {result['conditions']}", ""]
    return "\n".join(lines)


def goals(result: dict[str, Any]) -> list[tuple[str, float, float | None]]:
    rows = sorted(result["budgets"], key=lambda r: r["budget"])
    rivals = [(r, at_most(result["torch"], r["peak"])) for r in rows]
    ratios = [r["seconds"] / rival["seconds"] for r, rival in rivals if rival]
    pairs = list(itertools.pairwise(rows))
    return [
        ("measured peak / budget, at most", 1.0, max(r["peak"] / r["budget"] for r in rows)),
        ("forecast peak off by, of the measured one", FORECAST, max(abs(r["forecast"] / r["peak"] - 1) for r in rows)),
        ("a smaller budget's peak / the next larger one's", 1.0, max(a["peak"] / b["peak"] for a, b in pairs)),
        ("a larger budget's time / the next smaller one's", 1.0, max(b["seconds"] / a["seconds"] for a, b in pairs)),
        ("time / torch's at a measured peak that is not above", 1.0, max(ratios, default=None)),
        ("budgets of which a gradient differs", 0.0, float(sum(not r["equal"] for r in rows))),
    ]


def at_most(rows: list[dict[str, Any]], peak: int) -> dict[str, Any] | None:
    """The fastest of torch's whose measured peak is not above this one."""
    return min((r for r in rows if r["peak"] <= peak), key=lambda r: r["seconds"], default=None)


def mb(size: float) -> str:
    return f"{size / 1e6:.1f} MB"


def conditions(args: argparse.Namespace, parameters: int) -> str:
    return (
        f"{machine.conditions()}. GPT of {parameters / 1e6:.1f} M parameters ({args.layers} layers, width {args.dim}), "
        f"batch {args.batch} x {args.seq}, float32, SGD, medians of {args.steps} steps, each beside one of the same reference."
    )


if __name__ == "__main__":
    main()
