"""`python -m tests.fuzz`: run cases, show what they came to, and write a script of each failure."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ZGRAPH_HARDWARE", "default")  # (schedules are the same on every machine)


def main() -> int:
    """Exit code 1 if a case is wrong or unclear."""
    from fuzz.campaign import campaign
    from fuzz.case import RUNS

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", "-n", type=int, default=200, help="how many cases (200)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (0); those that follow are taken in turn")
    parser.add_argument(
        "--kinds", nargs="*", default=[], help=f"kinds of run or mesh dimensions, of {', '.join(RUNS)}, dp, …; all"
    )
    parser.add_argument("--out", type=Path, default=Path("fuzz-failures"), help="the folder of the failures' scripts")
    parser.add_argument(
        "--blocks", action="store_true", help="show counts of each kind of block, argument, style and option as well"
    )
    parser.add_argument("--no-shrink", action="store_true", help="leave failures as large as they are")
    parser.add_argument("--show", action="store_true", help="print the first seed's program, and run nothing")
    given = parser.parse_args()
    return campaign(given)


if __name__ == "__main__":
    sys.exit(main())
