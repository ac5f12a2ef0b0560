"""Run a failed pass once more, from the folder that it left (`zgraph/passes/reproducer.py`).

The passes are rebuilt from the plan and the decisions made for it (`zgraph.build.recipe`); a pass of the user's is
imported by its name. The program is read from the folder: neither the model nor its ranks are needed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import fx

from zgraph.build.recipe import passes_of
from zgraph.errors import BundleError, PassError, PlanError, ZgraphError
from zgraph.passes import History, Pass, PassManager
from zgraph.passes.reproducer import FORMAT, PIPELINE, PROGRAM, node_of, told
from zgraph.program.printer import line
from zgraph.program.program import Program
from zgraph.program.serialize import from_json

AROUND = 4  # nodes shown on each side of the one at fault
NO_REPRODUCER = "a pass that fails writes one, and says where; ZGRAPH_REPRO_DIR names the folder for them"


@dataclass(frozen=True)
class Failure:
    """A pass that failed."""

    name: str  # the pass
    error: str  # its error's text
    node: str | None  # the node that the error is about; None if it names none


@dataclass(frozen=True)
class Replay:
    """The result of running a reproducer's passes again."""

    folder: str  # the reproducer's folder
    zgraph: str  # the version of zgraph that wrote it
    torch: str  # the version of torch that wrote it
    passes: tuple[str, ...]  # the passes that were run again, the failed one first
    before: Failure  # how it failed then
    now: Failure | None  # how it fails now; None if it does not
    lines: tuple[str, ...]  # the program's text around the node at fault, which is marked by ">"

    @property
    def same(self) -> bool:
        """Whether the same pass fails with the same error about the same node. (Only the first lines of errors are
        compared: others may hold addresses, and names of folders.)"""
        if self.now is None:
            return False
        first = (self.before.error.partition("\n")[0], self.now.error.partition("\n")[0])
        return first[0] == first[1] and (self.before.name, self.before.node) == (self.now.name, self.now.node)

    def to_json(self) -> dict[str, Any]:
        return {"fails": self.now is not None, "same": self.same, **asdict(self)}


def replay(folder: Path) -> Replay:
    """Run the passes of a reproducer from the one that failed on.

    Raises `BundleError` for a folder that is no reproducer, is damaged, or is of another version, and if its pipeline
    can't be rebuilt; `PlanError` if a pass of the user's can't be imported.
    """
    head = _head(folder)
    names: list[str] = head["passes"]
    program = _program(folder)
    passes = _passes(head, folder)
    before = Failure(names[0], head["error"], head["node"])
    now: Failure | None = None
    try:
        PassManager(passes, snapshots=False).run(program)
    except PassError as error:
        if error.failure is None or not isinstance(error.history, History):
            raise BundleError(
                "the reproducer's passes don't fit its program", where=str(folder), why=str(error), hint=_by_hand(names)
            ) from error
        now = Failure(names[len(error.history.records) - 1], told(error.failure), node_of(error.failure))
    return Replay(
        str(folder),
        str(head.get("zgraph")),
        str(head.get("torch")),
        tuple(names),
        before,
        now,
        tuple(_around(program, (now or before).node)),
    )


def _head(folder: Path) -> dict[str, Any]:
    path = folder / PIPELINE
    if not path.is_file():
        bundle = (folder / "bundle.json").exists()
        raise BundleError(
            "this folder is no reproducer" if folder.exists() else "there is no such folder",
            where=str(folder),
            why=f"it has no {PIPELINE}" + (": it is a bundle" if bundle else "") if folder.exists() else None,
            hint="zgraph dump, diff and memory look at bundles" if bundle else NO_REPRODUCER,
        )
    try:
        head = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BundleError("the reproducer can't be read", where=str(path), why=str(error)) from error
    if not isinstance(head, dict) or not _texts(head.get("passes")) or not isinstance(head.get("error"), str):
        raise BundleError(
            "the reproducer is damaged", where=str(path), why="it does not say which pass failed, and how"
        )
    if head.get("format") != FORMAT:
        told_format = f"of format {head['format']!r}" if "format" in head else "older than formats"
        raise BundleError(
            f"this reproducer is {told_format}, and this zgraph reads format {FORMAT}",
            where=str(path),
            why=f"zgraph {head.get('zgraph', 'of an unknown version')} wrote it",
            hint=_by_hand(head["passes"]),
        )
    if not isinstance(head.get("recipe"), dict):
        raise BundleError(
            "the reproducer does not say how its passes were made",
            where=str(path),
            why="they were run by hand, without a plan",
            hint=_by_hand(head["passes"]),
        )
    if not isinstance(head.get("node"), (str, type(None))):
        raise BundleError("the reproducer is damaged", where=str(path), why="its node is no name")
    return head


def _texts(item: Any) -> bool:
    return isinstance(item, list) and bool(item) and all(isinstance(i, str) for i in item)


def _by_hand(names: list[str]) -> str:
    """Return a hint for a reproducer that can't be replayed."""
    return (
        f"program.txt shows the program; in Python, PassManager(passes).run(zgraph.program.serialize.from_json(…)) of {PROGRAM}"
        f" runs what you make yourself of {', '.join(names)}"
    )


def _program(folder: Path) -> Program:
    path = folder / PROGRAM
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except ZgraphError as error:
        raise BundleError(error.what, where=str(path), why=error.why, hint=error.hint) from error
    except (OSError, ValueError) as error:
        raise BundleError("the reproducer's program can't be read", where=str(path), why=str(error)) from error


def _passes(head: dict[str, Any], folder: Path) -> list[Pass]:
    """Rebuild the recorded passes. Raises `BundleError` if they can't be, or are others now."""
    names = head["passes"]
    try:
        passes = passes_of(head["recipe"])
    except PlanError:
        raise
    except (LookupError, TypeError, ValueError) as error:
        raise BundleError(
            "the reproducer's recipe is damaged",
            where=str(folder / PIPELINE),
            why=f"{type(error).__name__}: {error}",
            hint=_by_hand(names),
        ) from error
    pipeline = [p.name for p in passes]
    at = pipeline.index(names[0]) if names[0] in pipeline else 0
    recorded = passes[at : at + len(names)]
    if [p.name for p in recorded] != names:
        raise BundleError(
            "the pipeline is another one by now",
            where=str(folder / PIPELINE),
            why=f"it was {', '.join(names)}; made again it is {', '.join(pipeline)}",
            hint=f"use the zgraph that wrote it: {head.get('zgraph')}",
        )
    return recorded


def _around(program: Program, name: str | None) -> list[str]:
    nodes = program.nodes
    at = next((i for i, n in enumerate(nodes) if n.name == name), None)
    if at is None:
        return []
    first = max(0, at - AROUND)
    return [f"{'>' if n is nodes[at] else ' '}{_text(n)}" for n in nodes[first : at + AROUND + 1]]


def _text(node: fx.Node) -> str:
    """Return a node's line; for a node of a broken program that has none, fx's own text."""
    try:
        return line(node) if node.op != "output" else f"    {node.format_node()}"
    except Exception:
        return f"    {node.format_node()}"
