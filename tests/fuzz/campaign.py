"""Many cases, one after the other."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from pathlib import Path

from rich.console import Console

from .case import RUNS, Case, draw, run_of
from .ranks import Workers
from .report import Report, progress
from .runner import Outcome
from .shrink import shrink
from .source import render, script
from .worker import Worker

ALIKE = 2
"""Of failures with one reason so many are made smaller."""


def campaign(given: argparse.Namespace) -> int:
    """Run what the command line asks for. Returns the exit code."""
    console = Console(file=sys.stdout)
    if given.show:
        print(render(draw(given.seed)))
        return 0
    report, cases = Report(), chosen(given.seed, given.cases, set(given.kinds))
    alike: Counter[tuple[str, ...]] = Counter()
    with Worker() as worker, Workers() as ranks, progress(console) as bar:
        task = bar.add_task("cases", total=len(cases))
        for case in cases:
            run = ranks.run if case.run == "ranks" else worker.run
            outcome = run(case)
            report.add(outcome)
            count = report.counts["all"]
            bar.update(task, advance=1, description=", ".join(f"{count[w]} {w}" for w in count))
            if outcome.bad:
                key = (outcome.verdict.word, outcome.verdict.reason)
                alike[key] += 1
                if not given.no_shrink and alike[key] <= ALIKE:
                    bar.update(task, description=f"making seed {case.seed} smaller")
                    outcome = shrink(outcome, run)
                path = write(outcome, given.out)
                console.print(
                    f"{outcome.verdict.word}: seed {case.seed}: {outcome.verdict.detail[:200]}\n  {path}", markup=False
                )
    report.show(console, given.blocks)
    if given.out.is_dir() or report.bad:
        report.save(given.out / "report.json")
    return int(bool(report.bad))


def chosen(first: int, count: int, kinds: set[str]) -> list[Case]:
    """The cases of the next seeds, of these kinds of run and mesh dimensions if there are any; those of real ranks last, by their number."""
    found: list[Case] = []
    runs = kinds & set(RUNS)
    for seed in itertools.count(first):
        if len(found) == count:
            break
        if runs and run_of(seed) not in runs:
            continue
        case = draw(seed)
        if kinds <= runs or (kinds - runs) & set(case.mesh):
            found.append(case)
    return sorted(found, key=lambda c: c.world if c.run == "ranks" else 0)


def write(outcome: Outcome, folder: Path) -> Path:
    """Write a failure's script."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"seed{outcome.case.seed}.py"
    text = f"{outcome.verdict.word}: {outcome.verdict.reason}: {outcome.verdict.detail[:300]}".replace(
        '"', "'"
    ).replace("\\", "/")
    path.write_text(script(outcome.case, text))
    return path
