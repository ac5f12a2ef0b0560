"""A bundle: a folder with everything that can be inspected of a compiled step, for another machine or another day.

    bundle.json            the model, plan, hardware, programs with their passes and remarks, what was measured
    plan.json              the plan, as a file that `--plan` takes
    NAME/03-PASS.json      program NAME after its fourth pass, as `zgraph dump --format json` gives it
    NAME/03-PASS.txt       the same for people
    remarks.txt            what the passes missed
    memory.json            the forecast of the memory: `zgraph memory --json`
    timeline.json          the simulated step for Perfetto: `zgraph timeline`
    report.html            all of it as one page: `zgraph report`

Reading a bundle loads torch and a program only when something asks for the program.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from zgraph._version import __version__
from zgraph.errors import BundleError
from zgraph.inspection.inspection import Inspection, PassTrace
from zgraph.inspection.snapshot import FACTS, RUN_FACTS, Figures, Snapshot, of_file

FORMAT = 1
HEAD = "bundle.json"
REMARK = ("made_by", "node", "what", "why", "seconds", "remedy", "text")


def write(inspection: Inspection, folder: Path, written: set[str] | None = None, *, views: bool = True) -> None:
    """Write a bundle. Programs named in `written` are in the folder already; those written now are added to it. Without
    `views` the files made of the programs (remarks, memory, timeline, report) are not written again.

    The head (bundle.json) is written last and in one move: a bundle that has one is complete. Raises `BundleError` if
    the folder can't be written.
    """
    written = set() if written is None else written
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not written:
            _clear(folder)
        for way in inspection.ways.values():
            if way.name not in written:
                _write_way(way, folder)
                written.add(way.name)
        for name, text in (_views(inspection) if views else {}).items():
            (folder / name).write_text(text + "\n", encoding="utf-8")
        aside = folder / f".{HEAD}.{os.getpid()}"
        aside.write_text(json.dumps(_head(inspection), indent=1), encoding="utf-8")
        aside.replace(folder / HEAD)
    except OSError as error:
        raise BundleError("the bundle can't be written", where=str(folder), why=error.strerror) from error


def _clear(folder: Path) -> None:
    """Remove an earlier bundle, its head first, so that an incomplete one has no head."""
    try:
        names = [str(row["name"]) for row in _read_head(folder)["programs"]]
    except (BundleError, LookupError, TypeError):
        names = []
    (folder / HEAD).unlink(missing_ok=True)
    for name in names:
        if Path(name).name == name:  # (a folder of the bundle's own)
            shutil.rmtree(folder / name, ignore_errors=True)


def _views(inspection: Inspection) -> dict[str, str]:
    """Return the files that are made of the programs, by name."""
    from zgraph.inspection import html_report, memory, trace

    remarks = "\n".join(f"{r['program']}, {r['made_by']}: {r['text']}" for r in inspection.remarks())
    return {
        "plan.json": json.dumps(inspection.plan_data, indent=2, ensure_ascii=False),
        "remarks.txt": remarks or "nothing was missed",
        "memory.json": json.dumps(memory.data_of(inspection), indent=1),
        "timeline.json": json.dumps(trace.trace_of(inspection)),
        "report.html": html_report.html_report(inspection),
    }


def read(folder: Path) -> Inspection:
    """Read the bundle in a folder. Raises `BundleError` for no bundle, one of another version, and one that is
    damaged."""
    head = _read_head(folder)
    try:
        ways = {row["name"]: _way(row, folder) for row in head["programs"]}
        measured = {key: _number(value) for key, value in head["measured"].items()}
        if not ways:
            raise ValueError("it has no programs")
        plan, hardware = dict(head["plan"]), dict(head["hardware"])
        return Inspection(str(folder), int(head["world"]), ways, plan, hardware, bool(head["late"]), measured)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise BundleError(
            "the bundle is damaged",
            where=str(folder / HEAD),
            why=f"{type(error).__name__}: {error}",
            hint="write it again",
        ) from error


def _read_head(folder: Path) -> dict[str, Any]:
    path = folder / HEAD
    if not path.exists():
        raise BundleError(
            "this folder is no bundle",
            where=str(folder),
            why=f"it has no {HEAD}",
            hint="a run writes one with ZGRAPH_BUNDLE=FOLDER set",
        )
    try:
        head = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BundleError("the bundle can't be read", where=str(path), why=str(error), hint="write it again") from error
    if not isinstance(head, dict) or "format" not in head:
        raise BundleError("the bundle is damaged", where=str(path), why="it states no format", hint="write it again")
    if head["format"] != FORMAT:
        raise BundleError(
            f"this bundle is of format {head['format']!r}, and this zgraph reads format {FORMAT}",
            where=str(path),
            why=f"zgraph {head.get('zgraph', 'of an unknown version')} wrote it",
            hint="write it again with this version",
        )
    return head


def _write_way(way: PassTrace, folder: Path) -> None:
    from zgraph.program.printer import render

    (folder / way.name).mkdir(exist_ok=True)
    for at, snapshot in enumerate(way.snapshots):
        path = folder / _stem(way, at, snapshot)
        path.with_suffix(".json").write_text(json.dumps(snapshot.data, allow_nan=False), encoding="utf-8")
        path.with_suffix(".txt").write_text(render(snapshot.program), encoding="utf-8")


def _stem(way: PassTrace, at: int, snapshot: Snapshot) -> str:
    return f"{way.name}/{at:02}-{snapshot.name}"


def _head(inspection: Inspection) -> dict[str, Any]:
    import torch

    programs = [
        {
            "name": way.name,
            "kind": way.kind,
            "step": way.step,
            "runs": way.runs,
            "held": way.held,
            "remarks": way.remarks,
            "passes": [
                {"facts": s.facts, "figures": vars(s.figures), "file": f"{_stem(way, at, s)}.json"}
                for at, s in enumerate(way.snapshots)
            ],
        }
        for way in inspection.ways.values()
    ]
    return {
        "format": FORMAT,
        "zgraph": __version__,
        "torch": str(torch.__version__),
        "of": inspection.origin,
        "world": inspection.world,
        "plan": inspection.plan_data,
        "hardware": inspection.hardware,
        "late": inspection.late,
        "measured": inspection.measured,
        "programs": programs,
    }


def _way(row: dict[str, Any], folder: Path) -> PassTrace:
    passes = [of_file(_facts(p["facts"]), _figures(p["figures"]), folder / p["file"]) for p in row["passes"]]
    if not passes:
        raise ValueError(f"program {row['name']!r} has no passes")
    remarks = [{key: (float if key == "seconds" else str)(r[key]) for key in REMARK} for r in row["remarks"]]
    name, kind = str(row["name"]), str(row["kind"])
    return PassTrace(name, kind, passes, int(row["held"]), remarks, str(row["step"]), int(row["runs"]))


def _facts(facts: dict[str, Any]) -> dict[str, Any]:
    missing = [key for key in (*FACTS, *RUN_FACTS) if key not in facts]
    if missing:
        raise ValueError(f"a pass lacks {', '.join(missing)}")
    return facts


def _figures(figures: dict[str, Any]) -> Figures:
    return Figures(float(figures["seconds"]), float(figures["exposed"]), int(figures["peak"]))


def _number(value: Any) -> float | int | None:
    if value is not None and not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is no number")
    return value
