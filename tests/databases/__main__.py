"""`python -m tests.databases`: runs the databases, with progress, and writes the table."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))  # (as pytest imports tests)
sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("ZGRAPH_HARDWARE", "default")  # (schedules are the same on every machine)

from databases.cases import Case, modules, operators
from databases.comparison import compare
from databases.table import written

ROOT = Path(__file__).parents[2]


def main() -> int:
    """The exit code is 1 if something was wrong or unclear."""
    parser = argparse.ArgumentParser(prog="python -m tests.databases", description=__doc__)
    parser.add_argument("--backend", choices=["eager", "inductor"], default="eager")
    parser.add_argument("--only", default="", help="names that have this")
    parser.add_argument("--database", choices=["module", "operator", "all"], default="all")
    parser.add_argument("--samples", type=int, default=4, help="at most so many samples of each")
    parser.add_argument("--results", type=Path, default=ROOT / ".databases.jsonl", help="what has been run so far")
    parser.add_argument("--again", action="store_true", help="run what has been run, too")
    parser.add_argument("--write", type=Path, help="write the table of all results to this file")
    options = parser.parse_args()
    logging.getLogger("zgraph").setLevel(logging.ERROR)
    known = read(options.results)
    cases = chosen(options.database, options.only, options.samples)
    if not options.again:
        cases = [c for c in cases if f"{options.backend} {c.key}" not in known]
    faults = run(cases, options.backend, options.results, known)
    if options.write:
        options.write.write_text(written(list(known.values())))
    return 1 if faults else 0


def chosen(database: str, only: str, samples: int, *, exact: bool = False) -> list[Case]:
    """Cases of what is named `only`, or has it in its name."""

    def wanted(name: str) -> bool:
        return name == only if exact else only in name

    found: list[Case] = []
    if database in ("module", "all"):
        found += modules(samples, wanted)
    if database in ("operator", "all"):
        found += operators(samples, wanted)
    return found


def read(path: Path) -> dict[str, dict[str, str]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {f"{r['backend']} {r['key']}": r for r in rows}


def run(cases: list[Case], backend: str, results: Path, known: dict[str, dict[str, str]]) -> int:
    faults, start = 0, time.monotonic()
    with results.open("a") as file:
        for number, case in enumerate(cases, 1):
            result = compare(case, backend)
            row = {"backend": backend, "key": case.key, "database": case.database, "name": case.name}
            row |= {"verdict": result.verdict, "why": result.why}
            known[f"{backend} {case.key}"] = row
            print(json.dumps(row), file=file, flush=True)
            if result.verdict in ("wrong", "unclear"):
                faults += 1
            if result.verdict in ("wrong", "unclear"):
                print(f"{result.verdict}: {case.key}: {result.why}", flush=True)
            if number % 50 == 0 or number == len(cases):
                left = (time.monotonic() - start) / number * (len(cases) - number)
                print(f"[{number}/{len(cases)}] {backend}, {left / 60:.1f} min left", file=sys.stderr, flush=True)
    return faults


if __name__ == "__main__":
    sys.exit(main())
