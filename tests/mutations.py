"""Plants faults in zgraph, one by one, and sees that a test finds each: `python tests/mutations.py [NAME …] [--write docs/mutations.md]`.

A fault is a change of one place in the sources (`tests/planted_faults.py`). The tests that are to find it run against a copy of
the package that has it. A fault that no test finds is a wall without a guard.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from planted_faults import FAULTS, Fault
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "zgraph": "zgraph",
    "passes": "zgraph/passes",
    "codegen": "zgraph/codegen",
}  # a folder, and where it is installed


def copy_of_the_package(folder: Path) -> None:
    """Lay the sources out in `folder` as they are installed."""
    for source, target in PACKAGES.items():
        shutil.copytree(ROOT / source, folder / target, ignore=shutil.ignore_patterns("__pycache__"))


def found_by(fault: Fault, folder: Path) -> str | None:
    """The first of the fault's tests that fails with it planted in the copy; None if all pass. Raises `RuntimeError` if a test can't be run."""
    file = folder / PACKAGES.get(fault.file.split("/")[0], "") / fault.file.split("/", 1)[1]
    clean = file.read_text()
    file.write_text(fault.planted(clean))
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        for test in fault.tests:
            # (-P: the folder that it runs in has a zgraph as well)
            command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", test]
            ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
            if ran.returncode == 1 or ran.returncode < 0:  # (a fault may end the process)
                return test
            if ran.returncode != 0:
                raise RuntimeError(f"{test} can't be run:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")
        return None
    finally:
        file.write_text(clean)


def table(results: list[tuple[Fault, str | None]]) -> str:
    """The page of the documentation."""
    rows = [
        f"| {fault.wall} | {fault.what} | `{fault.file}` | {f'`{test}`' if test else '**nothing**'} |"
        for fault, test in results
    ]
    caught = sum(test is not None for _, test in results)
    return "\n".join(
        [
            "# Planted faults",
            "",
            "Each row is a fault that `python tests/mutations.py` plants in the sources, and the test that then fails.",
            f"{caught} of {len(results)} are found.",
            "",
            "| wall | fault | planted in | found by |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="faults to plant (all)")
    parser.add_argument("--write", type=Path, help="write the table to this file")
    chosen = parser.parse_args()
    faults = [f for f in FAULTS if not chosen.names or f.name in chosen.names]
    results: list[tuple[Fault, str | None]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with tempfile.TemporaryDirectory() as scratch, Progress(*columns) as progress:
        copy_of_the_package(Path(scratch))
        task = progress.add_task("planting faults", total=len(faults))
        for fault in faults:
            progress.update(task, description=fault.name)
            start = time.perf_counter()
            results.append((fault, found_by(fault, Path(scratch))))
            said = f"found by {results[-1][1]}" if results[-1][1] else "NOT FOUND"
            progress.console.print(f"{fault.name}: {said} ({time.perf_counter() - start:.0f} s)")
            progress.advance(task)
    if chosen.write:
        chosen.write.write_text(table(results))
    return int(any(test is None for _, test in results))


if __name__ == "__main__":
    raise SystemExit(main())
