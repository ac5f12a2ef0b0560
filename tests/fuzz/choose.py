"""`python -m tests.fuzz.choose`: seeds for `make test`. Each is the equal case with most in it that none before it has."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

WANTED = {"eager": 36, "virtual": 18, "inductor": 2, "ranks": 4}
"""How many of each kind of run."""


def main() -> None:
    """Print each seed as it is found, and what no seed has."""
    from fuzz.blocks import KINDS
    from fuzz.case import Case, draw, run_of
    from fuzz.ranks import Workers
    from fuzz.worker import Worker

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.choose", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first candidate")
    parser.add_argument("--candidates", type=int, default=2500)
    given = parser.parse_args()
    pool: list[Case] = [draw(s) for s in range(given.seed, given.seed + given.candidates) if run_of(s) in WANTED]
    pool = [c for c in pool if c.run != "ranks" or c.world == 2]  # (a launch for each number of ranks takes seconds)
    covered: set[str] = set()
    found: Counter[str] = Counter()
    with Worker() as worker, Workers() as ranks:
        while pool := [c for c in pool if found[c.run] < WANTED[c.run]]:
            best = max(pool, key=lambda c: len(set(features(c)) - covered))
            pool.remove(best)
            outcome = (ranks if best.run == "ranks" else worker).run(best)
            if outcome.verdict.word == "equal" and not outcome.verdict.reason:
                covered |= set(features(best))
                found[best.run] += 1
                print(best.seed, best.run, f"{outcome.seconds:.1f} s", flush=True)
            elif outcome.bad:
                print("not", best.seed, outcome.verdict.word, outcome.verdict.reason, flush=True)
    print("in no seed:", sorted(k for k in KINDS if f"block {k}" not in covered))


def features(case: Case) -> Iterator[str]:  # noqa: F821  (imported when the program runs)
    """What a case tries."""
    yield from (f"run {case.run}", case.layout, case.loss, f"output {case.output}", f"optimizer {case.optimizer}")
    yield from (f"block {k}" for line in case.lines for k in line.kinds)
    yield from (f"way {line.way}" for line in case.lines)
    yield from (f"mesh {d}" for d in case.mesh)
    yield from (f"plan {k}" for k, _ in case.plan)
    if case.run != "virtual":
        yield from (f"style {case.style}", f"argument {case.argument}")
        yield from (f"option {o}" for o in case.options)
        yield from (f"input {i}" for i in case.inputs)


if __name__ == "__main__":
    main()
