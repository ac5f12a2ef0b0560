"""Training steps of zgraph and of its peers over a modelled link: step time, exposed communication, peak memory.

    python benchmarks/overlap.py [--rates 0,2,1] [--variants ddp,zgraph-zero3] [--rounds 4] [--steps 5] [--out FOLDER]
    python benchmarks/overlap.py --model llama --rates 10,4,2,1 --variants local-compiled,fsdp_async-compiled,zgraph-zero3,zgraph-itself,zgraph-sheet
    python benchmarks/overlap.py --layers 2 --dim 64 --vocab 256 --seq 32 --steps 2 --rounds 1 --tries 1 --variants ddp-eager

The same model, data and link for all, on two ranks with a core and a thread each, in one run. zgraph's ZeRO-2 and ZeRO-3 are
calibrated; `zgraph-link4`, `-link0.25`, `-products4` and `-products0.25` are ZeRO-3 by a calibration that takes the link or products
to be so many times as fast as they are. `zgraph-itself` is ZeRO-3 as it comes,
`zgraph-adapted` with `adapt = "once"`, `zgraph-sheet` with `hardware = "default"`;
`zgraph-bf16`, `-int8` and `-int4` are ZeRO-3 with `wire`, `zgraph-auto` with formats that it chooses for each rate; `ddp_fp16`,
`ddp_powersgd` and `ddp_noop` are DDP with torch's communication hooks. A rate is in Gbit/s, 0 is
unlimited; a variant may be named by how its name begins. Each variant has two processes of its own, which build it once
and sleep while others are measured. A round goes through all variants, in another order each time, and through all
rates of one before the next: a noisy minute hits one round, and not all of a rate's. A measurement beside which others used the
processor is taken again. A step's time is that of the slower rank, from a barrier. Peak memory is that of torch's CPU
allocator, counted exactly in steps that are not timed. The first three steps' losses of all variants are compared with
those of data-parallel training in one process.

The link (`benchmarks/link/zlink.cpp`) moves data by one copy between the processes and holds each collective back until a
link of the rate would have carried it. Sleeping costs nothing, so what a step waits for is what it failed to overlap.
The copy itself costs the processor 3 to 11 % of the link's time at 1 to 2 Gbit/s and half of it at 10: figures above 4
say more about the copy than about the schedule.

With `--out` it writes overlap.json, overlap.md and, if there is matplotlib, overlap.svg to that folder. The exit status is 1 if a
variant failed or its losses differ.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import datetime
import json
import os
import platform
import random
import select
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import machine

HERE = Path(__file__).parent
WORLD = 2
NAMES = (
    "local-eager",
    "local-compiled",
    "ddp-eager",
    "ddp-compiled",
    "ddp_fp16-eager",
    "ddp_powersgd-eager",
    "ddp_noop-eager",
    "fully_shard-eager",
    "fully_shard-compiled",
    "fsdp_async-eager",
    "fsdp_async-compiled",
    "deepspeed-zero3",
    "zgraph-zero2",
    "zgraph-zero3",
    "zgraph-link4",
    "zgraph-link0.25",
    "zgraph-products4",
    "zgraph-products0.25",
    "zgraph-itself",
    "zgraph-adapted",
    "zgraph-sheet",
    "zgraph-bf16",
    "zgraph-int8",
    "zgraph-int4",
    "zgraph-auto",
)
BUILD_LIMIT, MEASURE_LIMIT = 1800.0, 900.0  # seconds

# Fresh pages cost as much as the arithmetic on them: let malloc keep what it has.
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34), "MALLOC_TOP_PAD_": str(2**26)}


class Failed(Exception):
    """A variant's process has died, or is not heard of."""


@dataclass
class Process:
    """One rank of a variant (`link/rank.py`)."""

    popen: subprocess.Popen[str]
    log: Path

    def send(self, request: dict[str, Any]) -> None:
        assert self.popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # (reading its answer will say that it has died)
            self.popen.stdin.write(json.dumps(request) + "\n")
            self.popen.stdin.flush()

    def receive(self, deadline: float) -> dict[str, Any]:
        assert self.popen.stdout is not None
        ready, _, _ = select.select([self.popen.stdout], [], [], max(0.0, deadline - time.monotonic()))
        line = self.popen.stdout.readline() if ready else ""
        if not line:
            last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
            raise Failed(" ".join(["no answer in time:" if not ready else "died:", *last]))
        return json.loads(line)

    def processor(self) -> float:
        """Seconds of processor time so far."""
        fields = Path(f"/proc/{self.popen.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Variant:
    """What is known of a variant; `processes` is empty when it can't be measured (any more)."""

    name: str
    processes: list[Process] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=lambda: {"status": "measured", "rates": {}})

    def stop(self) -> None:
        for process in self.processes:
            process.popen.kill()
            process.popen.wait()
        self.processes = []

    def receive(self, seconds: float) -> list[dict[str, Any]]:
        """Both ranks' answers; [] if the variant has failed, which is recorded."""
        deadline, answers = time.monotonic() + seconds, []
        try:
            # (whichever rank is heard of first: of two ranks one may die and the other wait for it)
            waiting = list(self.processes)
            while waiting:
                pipes = [p.popen.stdout for p in waiting]
                ready, _, _ = select.select(pipes, [], [], max(0.0, deadline - time.monotonic()))
                process = waiting[pipes.index(ready[0])] if ready else waiting[0]
                answers.append((self.processes.index(process), process.receive(deadline)))
                waiting.remove(process)
        except Failed as failure:
            self.found |= {"status": "failed", "why": str(failure), "rates": {}}
            print(f"{self.name} failed: {failure}", flush=True)
            self.stop()
            return []
        return [answer for _, answer in sorted(answers, key=lambda pair: pair[0])]


def start(name: str, args: argparse.Namespace, folder: Path) -> Variant:
    """Start a variant's processes and wait until they have built it."""
    variant = Variant(name)
    environment = {**os.environ, **MALLOC, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    # deepspeed looks for torchrun's variables
    environment |= {
        "DS_ACCELERATOR": "cpu",
        "WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    for rank in range(WORLD):
        log = folder / f"{name}-{rank}.log"
        job = {
            "name": name,
            "model": args.model,
            "rank": rank,
            "world": WORLD,
            "store": str(folder / f"{name}.store"),
            "core": args.cores[rank],
        }
        job |= {"size": sizes(args), "latency_us": args.latency, "products": args.products}
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with log.open("w") as errors:
            popen = subprocess.Popen(
                [sys.executable, "-m", "link.rank", json.dumps(job)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        variant.processes.append(Process(popen, log))
    atexit.register(variant.stop)
    answers = variant.receive(BUILD_LIMIT)
    if any("not_installed" in a for a in answers):
        variant.found["status"] = "not installed"
        variant.stop()
    elif answers:
        variant.found |= {
            "losses": [a["losses"] for a in answers],
            "reference": [a["reference"] for a in answers],
            "build_seconds": max(a["seconds"] for a in answers),
            "groups": answers[0]["groups"],
            "parameters": answers[0]["parameters"],
        }
    return variant


def measure(variant: Variant, rate: str, args: argparse.Namespace, memory: bool) -> None:
    """One round of one variant at one rate, added to what was found."""
    request = {"rate": float(rate), "steps": args.steps, "warmup": args.warmup, "memory": memory}
    quietest: tuple[float, list[dict[str, Any]]] | None = None
    for _ in range(args.tries):
        begin, machine = time.monotonic(), machine_seconds()
        own = sum(p.processor() for p in variant.processes)
        for process in variant.processes:
            process.send(request)
        answers = variant.receive(MEASURE_LIMIT)
        if not answers:
            return
        own = sum(p.processor() for p in variant.processes) - own
        elsewhere = (machine_seconds() - machine - own) / (time.monotonic() - begin) / (os.cpu_count() or 1)
        if quietest is None or elsewhere < quietest[0]:
            quietest = max(0.0, elsewhere), answers
        if elsewhere <= args.quiet:
            break
    assert quietest is not None
    elsewhere, answers = quietest
    found = variant.found["rates"].setdefault(rate, {"rounds": [], "elsewhere": []})
    found["rounds"].append([max(pair) for pair in zip(*(a["seconds"] for a in answers), strict=True)])
    found["elsewhere"].append(elsewhere)
    found |= {key: answers[0][key] for key in ("ops", "wire_bytes", "link", "copy")}
    if memory:
        found |= {key: answers[0][key] for key in ("held", "peak")}
    if answers[0].get("forecast"):
        found["forecast"] = answers[0]["forecast"]


def machine_seconds() -> float:
    """Processor time that the machine has spent on anything so far, all cores together."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def sizes(args: argparse.Namespace) -> dict[str, int]:
    return {key: getattr(args, key) for key in ("layers", "dim", "vocab", "batch", "seq")} | {
        "positions": max(256, args.seq)
    }


def conditions(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from zgraph.codegen import cpu_gemm

    return {
        "date": f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
        "cpu": machine.processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "products": "oneDNN" if args.products == "own" and cpu_gemm.onednn() else "MKL",
        "command": " ".join(["python benchmarks/overlap.py", *map(shlex.quote, sys.argv[1:])]),
        "rounds": args.rounds,
        "steps": args.steps,
        "warmup": args.warmup,
    }


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The result, as `link/report.py` describes it."""
    from link import report

    variants = []
    for name in args.variants:
        variants.append(start(name, args, folder))
        took = variants[-1].found.get("build_seconds")
        print(f"{name}: " + (f"built in {took:.0f} s" if took else variants[-1].found["status"]), flush=True)
    built = [v.found for v in variants if "parameters" in v.found]
    result = {
        "conditions": conditions(args),
        "model": args.model,
        "size": sizes(args),
        "parameters": built[0]["parameters"] if built else 0,
        "latency_us": args.latency,
        "rates": args.rates,
        "reference": next((f["reference"] for f in built if f["reference"][0]), None),
        "variants": {v.name: v.found for v in variants},
    }
    print(report.losses_text(result), flush=True)
    for number in range(args.rounds):
        order = random.Random(number)
        local, others = [], []
        for v in variants:
            (local if v.name.startswith("local") else others).append(v)
        order.shuffle(others)
        for variant in [*local, *others]:
            # A variant's rates one after the other: the machine's own speed drifts, and what a link adds is their difference.
            for rate in ["0"] if variant in local else order.sample(args.rates, len(args.rates)):
                if variant.processes:
                    measure(variant, rate, args, memory=number == 0)
        print(f"round {number + 1} of {args.rounds}: {time.strftime('%H:%M:%S')}", flush=True)
    for variant in variants:
        variant.stop()
        for key in ("reference", "parameters"):
            variant.found.pop(key, None)
    return result


def write(result: dict[str, Any], folder: Path) -> None:
    from link import report

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "overlap.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "overlap.md").write_text(report.markdown(result))
    try:
        report.plot(result, folder / "overlap.svg")
    except ImportError:
        print("no plot: matplotlib is not installed (pip install 'zgraph[bench]')")


def rate_names(text: str) -> list[str]:
    return [f"{float(rate):g}" for rate in text.split(",")]


def variant_names(text: str) -> list[str]:
    asked = text.split(",")
    for one in asked:
        if not any(name.startswith(one) for name in NAMES):
            raise argparse.ArgumentTypeError(f"no variant begins with {one!r}: there are {', '.join(NAMES)}")
    return [name for name in NAMES if any(name.startswith(one) for one in asked)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cores = sorted(os.sched_getaffinity(0))
    parser.add_argument(
        "--model", choices=["gpt", "llama", "gpt2", "t5"], default="gpt", help="all but the first are of transformers"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a rank's batch")
    parser.add_argument("--seq", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--rates", type=rate_names, default="0,2,1", help="Gbit/s; 0 is unlimited")
    parser.add_argument(
        "--latency", type=float, default=20.0, help="microseconds of a ring step, where the rate is limited"
    )
    parser.add_argument("--variants", type=variant_names, default=",".join(NAMES), help="names, or how they begin")
    parser.add_argument(
        "--products",
        choices=["own", "torch"],
        default="own",
        help="who computes zgraph's matrix products; peers have torch's",
    )
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a variant in a round at a rate")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--quiet", type=float, default=0.1, help="measure again if others use more of all cores than this"
    )
    parser.add_argument("--tries", type=int, default=3, help="but so often at most; the quietest counts")
    parser.add_argument(
        "--cores",
        type=lambda text: [int(core) for core in text.split(",")],
        default=[cores[rank % len(cores)] for rank in range(WORLD)],
        help="the core of each rank",
    )
    parser.add_argument("--out", type=Path, help="a folder to write the report to")
    parser.add_argument("--report", type=Path, help="measure nothing: write tables and plot of this JSON file again")
    args = parser.parse_args()
    from link import report

    if args.report is not None:
        result = json.loads(args.report.read_text())
    else:
        with tempfile.TemporaryDirectory() as folder:
            result = run(args, Path(folder))
    if args.out is not None:
        write(result, args.out)
    print("\n" + report.markdown(result))
    failed = [name for name, v in result["variants"].items() if v["status"] == "failed"]
    differ = [name for name, value in report.losses(result).items() if not value <= report.allowed(name)]
    return 1 if failed or differ else 0


if __name__ == "__main__":
    sys.exit(main())
