"""Runs that are killed at random moments and go on from their last checkpoint, beside runs that never were.

    python benchmarks/kills.py [--runs 100] [--steps 24] [--every 3] [--seed 0] [--out FOLDER]

Each run is a training of a small transformer with dropout on several ranks over gloo, which saves every few steps, at once or in
the background, keeps two checkpoints, and begins from the last one there is. A rank drawn by lot gets SIGKILL at a moment drawn by lot (in
a step, in a save, in a load, while it starts), up to three times a run; what is left of the job is then killed too, as torchrun would, and
started again. Every loss of every step, whichever start it was computed in, and all weights and optimizer states at the end are
compared bit for bit with those of a run of the same plan that was never killed. Runs go through stages, worlds, backends and kinds
of saves in turn.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import itertools
import json
import multiprocessing as mp
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine

RESULTS = Path(__file__).parent / "results"
PRELOAD = ["torch", "torch.distributed.tensor", "torch._dynamo", "torch._inductor.compile_fx", "zgraph.api.compiler"]
LIMIT = 600.0  # seconds without an end: a hang, which fails


@dataclass(frozen=True)
class Kind:
    """One way to train and to save."""

    backend: str
    zero: int
    world: int
    async_: bool

    def __str__(self) -> str:
        return f"{self.backend}, ZeRO {self.zero}, {self.world} ranks, {'async' if self.async_ else 'sync'}"


KINDS = [
    *(
        Kind("eager", zero, world, async_)
        for zero, world, async_ in itertools.product((3, 0, 2, 1), (2, 3), (True, False))
    ),
    *(Kind("inductor", 3, 2, async_) for async_ in (True, False, True, False)),
]


def train(kind: Kind, rank: int, steps: int, every: int, where: str, start: str) -> None:
    """One rank of one start of a run: `where` has the run's checkpoints and logs, `start` what its ranks meet by."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(Path(where).parent / "inductor")}
    import torch
    import torch.distributed as dist
    from torch import nn

    import zgraph

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{start}", rank=rank, world_size=kind.world, timeout=timeout)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(61, 48)
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(48, 4, 96, dropout=0.1, batch_first=True) for _ in range(2)
            )
            self.head = nn.Linear(48, 61, bias=False)

        def forward(self, tokens: Any) -> Any:
            hidden = self.embed(tokens)
            for block in self.blocks:
                hidden = block(hidden)
            return nn.functional.cross_entropy(self.head(hidden[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    torch.manual_seed(0)
    plan = zgraph.Plan(
        backend=kind.backend,
        zero=kind.zero,
        optimizer=zgraph.AdamW(lr=1e-3),
        lr_schedule=zgraph.Cosine(total_steps=steps, warmup_steps=3),
        grad_clip=1.0,
        ema=0.99,
    )
    model = zgraph.compile(Net(), plan)
    folder, first = Path(where) / "checkpoints", 0
    torch.manual_seed(1000 + rank)
    if (folder / "latest").exists():
        first = model.load_checkpoint(folder)["step"]
    with open(Path(where) / f"losses{rank}", "a") as log:
        print("start", first, file=log, flush=True)
        for step in range(first, steps):
            tokens = torch.randint(61, (4, 17), generator=torch.Generator().manual_seed(step * 10 + rank))
            print(step, float(model.train_step(tokens)).hex(), file=log, flush=True)
            if (step + 1) % every == 0:
                state = {"step": step + 1}
                model.save_checkpoint(folder, client_state=state, async_=kind.async_, keep_last=2)
        model.zgraph.finish()
        digest = hashlib.sha256()
        held = dict(model.state_dict())
        for name, param in model.named_parameters():
            held |= {f"{name}.{k}": v for k, v in model.zgraph.optimizer.state[param].items()}
        for name in sorted(held):
            value = held[name].to_local() if hasattr(held[name], "to_local") else held[name]
            digest.update(name.encode() + value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        print("end", digest.hexdigest(), file=log, flush=True)
    dist.destroy_process_group()


def run(context: Any, kind: Kind, steps: int, every: int, where: Path, kills: random.Random | None) -> dict[str, int]:
    """Train to the end, killed up to three times; how often it was, and in what."""
    where.mkdir(parents=True)
    found = {"kills": 0, "starts": 0, "while saving": 0}
    wanted = kills.randrange(1, 4) if kills is not None else 0
    begun = time.monotonic()
    while True:
        start = where / f"start{found['starts']}"
        found["starts"] += 1
        arguments = (steps, every, str(where), str(start))
        ranks = [context.Process(target=train, args=(kind, r, *arguments), daemon=True) for r in range(kind.world)]
        for process in ranks:
            process.start()
        killed = False
        if kills is not None and found["kills"] < wanted:
            moment = kills.random()
            if moment < 0.9:  # (else while it starts)
                _await(ranks, lambda: _started(where) >= found["starts"])
            if moment < 0.4:
                _await(ranks, lambda: _saving(where))
                time.sleep(kills.random() * 0.01)
            else:
                time.sleep(kills.random() * kills.choice((0.05, 0.5, 1.5)))
            victim = kills.choice(ranks)
            if victim.exitcode is None:
                os.kill(victim.pid, signal.SIGKILL)
                killed = True
                found["kills"] += 1
                found["while saving"] += _saving(where)
                time.sleep(kills.random() * 0.3)  # (the others go on for as long as they can)
                for process in ranks:
                    if process.exitcode is None:
                        os.kill(process.pid, signal.SIGKILL)
        for process in ranks:
            process.join(LIMIT)
            if process.exitcode is None:
                process.kill()
                raise AssertionError(f"{kind} in {where}: a rank hangs")
        if not killed and all(process.exitcode == 0 for process in ranks):
            found["seconds"] = round(time.monotonic() - begun)
            return found
        if not killed:
            raise AssertionError(f"{kind} in {where}: exit codes {[p.exitcode for p in ranks]}")


def _await(ranks: list[Any], there: Callable[[], bool]) -> None:
    while all(p.exitcode is None for p in ranks) and not there():
        time.sleep(0.001)


def _started(where: Path) -> int:
    log = where / "losses0"
    return log.read_text().count("start") if log.exists() else 0


def _saving(where: Path) -> bool:
    return any((where / "checkpoints").glob(".*.partial"))


def compared(where: Path, reference: Path, kind: Kind, steps: int) -> list[str]:
    """What of a run is not what it is in the one that was never killed."""
    wrong = []
    for rank in range(kind.world):
        lines = [line.split() for line in (where / f"losses{rank}").read_text().splitlines()]
        known = dict(line.split() for line in (reference / f"losses{rank}").read_text().splitlines())
        whole = [
            line for line in lines if len(line) == 2 and line[0] != "start" and (line[0] != "end" or line is lines[-1])
        ]
        wrong += [
            f"rank {rank}: {step}: {said} is not {known[step]}" for step, said in whole if said != known.get(step)
        ]
        missing = {str(s) for s in range(steps)} | {"end"}
        wrong += [f"rank {rank}: no {step}" for step in sorted(missing - {step for step, _ in whole})]
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    root = Path(tempfile.mkdtemp(prefix="kills"))
    source = random.Random(options.seed)
    rows: dict[Kind, dict[str, int]] = {}
    wrong: list[str] = []
    try:
        for number in range(options.runs):
            kind = KINDS[number % len(KINDS)]
            reference = root / f"reference{number % len(KINDS)}"
            if not reference.exists():
                run(context, kind, options.steps, options.every, reference, None)
            where = root / f"run{number}"
            found = run(context, kind, options.steps, options.every, where, source)
            differences = compared(where, reference, kind, options.steps)
            wrong += [f"run {number} ({kind}): {d}" for d in differences]
            row = rows.setdefault(kind, {"runs": 0, "kills": 0, "while saving": 0, "equal": 0})
            row["runs"] += 1
            row["kills"] += found["kills"]
            row["while saving"] += found["while saving"]
            row["equal"] += not differences
            print(number, kind, json.dumps(found), "equal" if not differences else differences[:3], flush=True)
            shutil.rmtree(where)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    _write(rows, options)
    if wrong:
        sys.exit("\n".join(wrong[:20]))


def _write(rows: dict[Kind, dict[str, int]], options: argparse.Namespace) -> None:

    columns = ("runs", "kills", "while saving", "equal")
    total = {c: sum(row[c] for row in rows.values()) for c in columns}
    lines = [
        "# Runs that were killed",
        "",
        f"`python benchmarks/kills.py --runs {options.runs} --steps {options.steps} --every {options.every} --seed {options.seed}`",
        "",
        "| how it trains and saves | runs | SIGKILLs | of them while a save was on its way | equal bit for bit |",
        "|---|---:|---:|---:|---:|",
        *(f"| {kind} | {' | '.join(str(row[c]) for c in columns)} |" for kind, row in rows.items()),
        f"| **all** | {' | '.join(str(total[c]) for c in columns)} |",
        "",
        "Equal: the loss of every step on every rank, and a hash of all weights and optimizer states at the end, are those of a run that was",
        "never killed.",
        "",
        f"Conditions: {machine.conditions()}.",
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "kills.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
