"""What loading a folder of transformers' into shards holds, and what whole weights take beside `full_tensor()` of each parameter.

    OMP_NUM_THREADS=1 python benchmarks/whole_weights.py [--ranks 8] [--layers 24] [--width 1024] [--rounds 7] [--out FOLDER]

*Loading.* A Llama in float32, saved by transformers in files of at most 500 MB, is loaded by `zgraph.load_pretrained` with ZeRO 3 on so many gloo
ranks. Counted is the anonymous memory of each process (`RssAnon`, sampled each millisecond) above what it had before the call; a smaller
model is loaded twice first, so that what Python imports is not counted. The goal is a rank's share of the weights and the largest tensor.

*Whole weights.* The same kind of model with a quarter of the layers on two ranks: entering and leaving `zgraph.full_weights`, all of
`zgraph.stream_weights`, both for all ranks and for the first alone, and `full_tensor()` of each parameter in turn (all of them kept, as in
`full_weights`; or one at a time, as in a stream), in an order that alternates; medians. All tensors are compared bit for bit. Peaks are
measured as above in rounds of their own: that of a stream beside its `max_bytes`, or one and a half of the largest tensor where that is more;
that of `full_weights` beside the whole weights and what one gather may take.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine

RESULTS = Path(__file__).parent / "results"
GOAL = 0.5  # of the time of `full_tensor()` for each parameter
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--max-bytes", type=int, default=64 * MIB)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    import torch.multiprocessing as mp

    folder = Path(tempfile.mkdtemp(prefix="whole"))
    try:
        for name, layers, width in (
            ("large", options.layers, options.width),
            ("half", max(1, options.layers // 4), options.width),
            ("small", 1, 64),
        ):
            llama(layers, width).save_pretrained(folder / name, max_shard_size="500MB")
        mp.spawn(loading, args=(options.ranks, str(folder)), nprocs=options.ranks)
        mp.spawn(gathering, args=(2, str(folder), options.rounds, options.max_bytes), nprocs=2)
        loads = [json.loads((folder / f"load{rank}.json").read_text()) for rank in range(options.ranks)]
        write(loads, json.loads((folder / "whole.json").read_text()), options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def llama(layers: int, width: int) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    heads = max(1, width // 64)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32 * width,
            hidden_size=width,
            intermediate_size=11 * width // 4,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
        )
    )


class Peak:
    """The most anonymous memory that the process has inside above what it had before, in bytes."""

    def __enter__(self) -> Peak:
        ctypes.CDLL(None).malloc_trim(0)  # (what was freed before is no memory that it has)
        self.before, self.most, self.over = _anonymous(), 0, threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.over.wait(0.001):
            self.most = max(self.most, _anonymous() - self.before)

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()
        self.most = max(self.most, _anonymous() - self.before)


def _anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def started(rank: int, ranks: int, meet: str) -> None:
    import torch
    import torch.distributed as dist

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=ranks)


def loading(rank: int, ranks: int, where: str) -> None:
    """One rank of those that load; each writes what it held."""
    import torch.distributed as dist
    import transformers

    import zgraph

    started(rank, ranks, f"{where}/meet")
    plan = zgraph.Plan(backend="eager", zero=3)
    for _ in range(2):
        zgraph.load_pretrained(transformers.LlamaForCausalLM, f"{where}/small", plan)
    dist.barrier()
    with Peak() as peak:
        model = zgraph.load_pretrained(transformers.LlamaForCausalLM, f"{where}/large", plan)
    sizes = [p.numel() * p.element_size() for p in model.parameters()]
    found = {"peak": peak.most, "weights": sum(sizes), "largest": max(sizes), "numbers": sum(sizes) // 4}
    (Path(where) / f"load{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def gathering(rank: int, ranks: int, where: str, rounds: int, max_bytes: int) -> None:
    """One rank of those that gather; the first writes what was measured."""
    import torch
    import torch.distributed as dist
    import transformers

    import zgraph

    started(rank, ranks, f"{where}/meet again")
    model = zgraph.load_pretrained(transformers.LlamaForCausalLM, f"{where}/half", zgraph.Plan(backend="eager", zero=3))
    params = dict(model.named_parameters())

    def whole(ranks: list[int] | None = None) -> None:
        with zgraph.full_weights(model, ranks=ranks):
            pass

    def stream(ranks: list[int] | None = None) -> None:
        for _ in zgraph.stream_weights(model, ranks=ranks, max_bytes=max_bytes):
            pass

    def each() -> None:
        for param in params.values():
            param.full_tensor()

    expected = {name: param.full_tensor() for name, param in params.items()}
    equal = all(torch.equal(value, expected[n]) for n, value in zgraph.stream_weights(model, max_bytes=max_bytes))
    with zgraph.full_weights(model):
        equal &= all(torch.equal(value, expected[n]) for n, value in model.named_parameters())
    del expected
    ways: dict[str, Callable[[], Any]] = {
        "full_weights": whole,
        "full_weights, ranks=[0]": lambda: whole([0]),
        "full_tensor, kept": lambda: [param.full_tensor() for param in params.values()],
        "stream_weights": stream,
        "stream_weights, ranks=[0]": lambda: stream([0]),
        "full_tensor": each,
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in list(ways) if number % 2 else list(ways)[::-1]:
            dist.barrier()
            start, used = time.perf_counter(), _cpu()
            ways[name]()
            dist.barrier()
            times[name].append((time.perf_counter() - start, _cpu() - used))
    peaks = {}
    for name, way in ways.items():
        dist.barrier()
        with Peak() as peak:
            way()
        peaks[name] = peak.most
    if rank == 0:
        sizes = [p.numel() * p.element_size() for p in params.values()]
        medians = {n: [statistics.median(t[i] for t in all_[1:]) for i in (0, 1)] for n, all_ in times.items()}
        found = {"times": medians, "peaks": peaks, "equal": equal, "weights": sum(sizes), "largest": max(sizes)}
        (Path(where) / "whole.json").write_text(json.dumps({**found, "count": len(sizes)}))
    dist.barrier()
    dist.destroy_process_group()


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def write(loads: list[dict[str, int]], found: dict[str, Any], options: argparse.Namespace) -> None:
    from zgraph.parameters.whole_tensors import BUCKET

    one = loads[0]
    share = one["weights"] / options.ranks
    bound = share + one["largest"]
    peak = max(load["peak"] for load in loads)
    each = ", ".join(f"{load['peak'] / 1e6:.0f}" for load in loads)
    limit = max(options.max_bytes, found["largest"] * 3 / 2)
    bounds = {"full_weights": found["weights"] + BUCKET, "stream_weights": limit}
    lines = [
        "# Whole weights",
        "",
        f"`python benchmarks/whole_weights.py --ranks {options.ranks} --layers {options.layers} --width {options.width} --rounds {options.rounds}`",
        "",
        "## Loading",
        "",
        f"A Llama of {one['numbers'] / 1e6:.0f} M parameters in float32 ({one['weights'] / 1e6:.0f} MB) over {options.ranks} processes, each of",
        f"which holds {share / 1e6:.0f} MB of it. The largest tensor has {one['largest'] / 1e6:.0f} MB.",
        "",
        "| | MB |",
        "|---|---:|",
        f"| the most that a process held while it loaded | {peak / 1e6:.0f} |",
        f"| its share and the largest tensor | {bound / 1e6:.0f} |",
        "",
        f"The goal is {'met' if peak <= bound else 'missed'}. Of each process: {each} MB.",
        "",
        "## Gathering",
        "",
        f"{found['count']} tensors of {found['weights'] / 1e6:.0f} MB on two ranks.",
        f"All were {'equal' if found['equal'] else 'NOT equal'} bit for bit.",
        "",
        f"| | s | of `full_tensor()` each, goal {GOAL} | processor s | of its | peak MB | bound MB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for call, beside in (("full_weights", "full_tensor, kept"), ("stream_weights", "full_tensor")):
        other, theirs = found["times"][beside]
        for name in (call, f"{call}, ranks=[0]"):
            took, used = found["times"][name]
            lines.append(
                f"| {name} | {took:.3f} | {took / other:.2f} ({'met' if took / other <= GOAL else 'missed'}) | "
                f"{used:.3f} | {used / theirs:.2f} | {found['peaks'][name] / 1e6:.0f} | {bounds[call] / 1e6:.0f} |"
            )
        lines.append(f"| {beside} | {other:.3f} | | {theirs:.3f} | | {found['peaks'][beside] / 1e6:.0f} | |")
    load = f"{os.getloadavg()[1]:.0f} processes wanted to run in the last five minutes"
    lines += ["", f"Conditions: {machine.conditions()}, one thread a rank; {load}.", ""]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "whole_weights.md").write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
