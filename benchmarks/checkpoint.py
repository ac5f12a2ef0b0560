"""Checkpoints saved and loaded, beside plain torch.distributed.checkpoint with the same state, in one run.

    python benchmarks/checkpoint.py [--ranks 2] [--width 768] [--layers 20] [--rounds 5] [--folder FOLDER] [--out FOLDER]

Weights and AdamW states of a transformer in float32, sharded over ranks of gloo (ZeRO 3). Each round saves and loads by both, in an order
that alternates; medians. *Plain* is `dcp.save` and `dcp.load` with torch's own writer and reader and state dicts that were made before
(their making is not counted), with as many fsyncs; it checks nothing. *zgraph* is `model.save_checkpoint` and `load_checkpoint`: with checksums of
every byte, written and compared, manifest, random states. *Blocked* is how long a save in the background keeps the
step, beside copying the same tensors into memory that is there already.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine

RESULTS = Path(__file__).parent / "results"
GOALS = {"save": 1.05, "load": 1.05, "blocked": 1.2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written (a temporary folder)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    import torch.multiprocessing as mp

    folder = Path(tempfile.mkdtemp(prefix="checkpoints", dir=options.folder))
    try:
        arguments = (options.ranks, options.width, options.layers, options.rounds, str(folder))
        mp.spawn(measure, args=arguments, nprocs=options.ranks)
        write(json.loads((folder / "measured.json").read_text()), options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(rank: int, ranks: int, width: int, layers: int, rounds: int, where: str) -> None:
    """One rank; the first writes what was measured."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.tensor import DTensor

    import zgraph

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{where}/meet", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    layer = [nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True) for _ in range(layers)]
    model = zgraph.compile(nn.Sequential(*layer), zgraph.Plan(backend="eager", zero=3, optimizer=zgraph.AdamW(lr=1e-3)))
    weights, states = get_state_dict(model, model.zgraph.optimizer)
    state = {"model": weights, "optimizer": states}
    mine, plain = Path(where) / "zgraph", Path(where) / "plain"
    local = [t._local_tensor if isinstance(t, DTensor) else t for t in tensors_of(state)]
    buffers = [torch.zeros_like(t) for t in local]
    found: dict[str, list[float]] = {n: [] for n in ("save", "plain save", "load", "plain load", "blocked", "copy")}

    def timed(name: str, work: Callable[[], Any], after: Callable[[], Any] = lambda: None) -> None:
        os.sync()  # (what was written before is not to slow this down)
        dist.barrier()
        start = time.perf_counter()
        work()
        mine_took = torch.tensor(time.perf_counter() - start)
        after()
        dist.all_reduce(mine_took, op=dist.ReduceOp.MAX)
        found[name].append(float(mine_took))

    def plain_save() -> None:
        dcp.save(state, checkpoint_id=plain / str(len(found["plain save"])))

    def plain_load() -> None:
        dcp.load(state, checkpoint_id=plain / str(len(found["plain save"]) - 1))

    def copy() -> None:
        for buffer, tensor in zip(buffers, local, strict=True):
            buffer.copy_(tensor)

    for number in range(rounds + 1):
        tags = f"save{number}", f"async{number}"
        tasks = [
            functools.partial(timed, "save", functools.partial(model.save_checkpoint, mine, tags[0])),
            functools.partial(timed, "plain save", plain_save),
            functools.partial(timed, "load", functools.partial(model.load_checkpoint, mine)),
            functools.partial(timed, "plain load", plain_load),
            functools.partial(
                timed,
                "blocked",
                functools.partial(model.save_checkpoint, mine, tags[1], async_=True),
                model.zgraph.finish,
            ),
            functools.partial(timed, "copy", copy),
        ]
        pairs = [(0, 1), (2, 3), (4, 5)] if number % 2 else [(1, 0), (3, 2), (5, 4)]
        for one, other in pairs:
            tasks[one]()
            tasks[other]()
        if rank == 0:
            for old in (plain / str(number), mine / f"save{number}", mine / f"async{number - 1}"):  # (not measured)
                shutil.rmtree(old, ignore_errors=True)
        dist.barrier()
    if rank == 0:
        size = sum(t.numel() * t.element_size() for t in tensors_of(state))
        result = {n: statistics.median(times[1:]) for n, times in found.items()} | {"bytes": size, "all": found}
        (Path(where) / "measured.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def tensors_of(state: Any) -> list[Any]:
    import torch
    from torch.utils import _pytree as pytree

    return [t for t in pytree.tree_leaves(state) if isinstance(t, torch.Tensor)]


def write(found: dict[str, Any], options: argparse.Namespace) -> None:

    rows = [("save", "plain save"), ("load", "plain load"), ("blocked", "copy")]
    lines = [
        "# Checkpoints",
        "",
        f"`python benchmarks/checkpoint.py --ranks {options.ranks} --width {options.width} --layers {options.layers} --rounds {options.rounds}`",
        "",
        f"{found['bytes'] / 1e6:.0f} MB of weights and AdamW states in float32, over {options.ranks} ranks.",
        "",
        "| | zgraph | beside | | ratio | goal | |",
        "|---|---:|---|---:|---:|---:|---|",
    ]
    for mine, other in rows:
        ratio = found[mine] / found[other]
        verdict = "met" if ratio <= GOALS[mine] else "missed"
        lines.append(
            f"| {mine} | {found[mine]:.3f} s | {other} | {found[other]:.3f} s | {ratio:.3f} | {GOALS[mine]} | {verdict} |"
        )
    lines += ["", "All rounds, in seconds (the first is not counted):", ""]
    lines += [f"- {name}: {', '.join(f'{t:.3f}' for t in times)}" for name, times in found["all"].items()]
    lines += [
        "",
        f"Conditions: {machine.conditions()}, one thread a rank.",
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "checkpoint.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
