"""Plants faults in zgraph, one by one, and sees that a test finds each: `python tests/mutations.py [NAME …] [--write docs/mutations.md]`.

A fault is a change of one place in the sources (`tests/planted_faults.py`). The tests that are to find it run against a copy of
the package that has it; those that fail have to pass without it. A fault that no test finds is a wall without a guard.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from planted_faults import FAULTS, PACKAGES, ROOT, Fault, sources
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_NOTHING = "**nothing**"
_ROW = re.compile(r"^\| [^|]+ \| (?P<what>[^|]+) \| [^|]+ \| (?P<test>[^|]+) \|$", re.M)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?$", re.M)


class Copy:
    """The sources in `folder`, laid out as they are installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for source, target in PACKAGES.items():
            shutil.copytree(ROOT / source, folder / target, ignore=shutil.ignore_patterns("__pycache__"))

    def write(self, path: Path, text: str) -> None:
        """Replace a file, named by its path in the repository."""
        (self.folder / PACKAGES[path.parts[0]] / Path(*path.parts[1:])).write_text(text)

    def failures(self, tests: Sequence[str], *options: str) -> list[str]:
        """Those of these tests (files, or tests in them) that fail. Raises `RuntimeError` if they can't be run."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        # (-P: the folder that it runs in has a zgraph as well)
        command = [
            sys.executable,
            "-P",
            "-m",
            "pytest",
            "-q",
            "--no-header",
            "-p",
            "no:cacheprovider",
            *options,
            *tests,
        ]
        ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)
        if ran.returncode == 0:
            return []
        failed = _FAILED.findall(ran.stdout)
        if ran.returncode == 1 and failed:
            return failed
        if ran.returncode < 0:  # (a fault may end the process)
            return list(tests[:1])
        raise RuntimeError(f"{tests} can't be run:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")


def found_by(fault: Fault, copy: Copy, texts: dict[Path, str]) -> str | None:
    """The first of the fault's tests that fails with it planted in the copy; None if all pass."""
    path, planted = fault.planted(texts)
    copy.write(path, planted)
    try:
        return next(iter(copy.failures(fault.tests, "-x")), None)
    finally:
        copy.write(path, texts[path])


def table(found: dict[str, str], texts: dict[Path, str]) -> str:
    """The page of the documentation, from what `found` says of each fault (by its text)."""
    faults = [f for f in FAULTS if f.what in found]
    rows = [f"| {f.wall} | {f.what} | `{f.planted(texts)[0]}` | {found[f.what]} |" for f in faults]
    caught = sum(found[f.what] != _NOTHING for f in faults)
    return "\n".join(
        [
            "# Planted faults",
            "",
            "Do the tests see it when one of zgraph's [checks](beliefs.md) is gone? Each row is a fault that `python tests/mutations.py`",
            "plants in a copy of the sources (they are in `tests/planted_faults.py`), and the first test that then fails, and passes",
            "without it. `python tests/mutations.py --write docs/mutations.md` runs them all and writes this page;",
            "with names of faults before `--write` it runs those alone, and leaves the other rows as they were.",
            "",
            f"{caught} of {len(faults)} are found.",
            "",
            "| wall | fault | planted in | found by |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="faults to plant (all)", metavar="NAME")
    parser.add_argument("--write", type=Path, help="write the table to this file")
    chosen = parser.parse_args()
    unknown = set(chosen.names) - {f.name for f in FAULTS}
    if unknown:
        parser.error(f"no fault has the name {', '.join(sorted(unknown))}")
    faults = [f for f in FAULTS if not chosen.names or f.name in chosen.names]
    texts = sources()
    results: list[tuple[Fault, str | None]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with tempfile.TemporaryDirectory() as scratch, Progress(*columns) as progress:
        copy = Copy(Path(scratch))
        task = progress.add_task("planting faults", total=len(faults))
        for fault in faults:
            progress.update(task, description=fault.name)
            start = time.perf_counter()
            results.append((fault, found_by(fault, copy, texts)))
            said = f"found by {results[-1][1]}" if results[-1][1] else "NOT FOUND"
            progress.console.print(
                f"{fault.name}: {said} ({time.perf_counter() - start:.0f} s)", markup=False, soft_wrap=True
            )
            progress.advance(task)
        progress.update(task, description="the same tests, without a fault")
        tests = sorted({test for _, test in results if test})
        if tests and (failed := copy.failures(tests)):
            raise SystemExit(f"these fail without a fault, too: {failed}")
    if chosen.write:
        before = chosen.write.read_text() if chosen.names and chosen.write.is_file() else ""
        known = {row["what"]: row["test"] for row in _ROW.finditer(before)}
        now = {fault.what: f"`{test}`" if test else _NOTHING for fault, test in results}
        chosen.write.write_text(table(known | now, texts))
    return int(any(test is None for _, test in results))


if __name__ == "__main__":
    raise SystemExit(main())
