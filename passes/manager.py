"""Runs a pipeline: contracts first, then each pass; after each, the verifier, a clock, counts and a snapshot.

A pass that raises, or that leaves a program which the verifier refuses, writes a reproducer: a folder with the
program before it (as JSON and as text), the names of the passes that were still to run, and what they were made from;
`zgraph repro` runs it again.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.autograd.profiler import record_function

from zgraph.errors import ContractError, PassError, PlanError, VerifyError
from zgraph.passes.contract import Contract, Pass
from zgraph.passes.verifier import ValueCache, verify_program
from zgraph.program.program import Program

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PassRecord:
    """What one pass did: seconds of its own and of the verifier, its counts, and the program after it; its contract and its
    options (None for the capture, which is no pass).

    Without snapshots `program` is the one that later passes went on to change.
    """

    name: str
    summary: str
    seconds: float
    verify_seconds: float
    stats: dict[str, int]
    program: Program
    contract: Contract | None = None
    options: Any = None

    @property
    def nodes(self) -> int:
        return len(self.program.graph.nodes)


@dataclass
class History:
    """A program's way through a pipeline; the first record is the captured program."""

    records: list[PassRecord] = field(default_factory=list)

    @property
    def program(self) -> Program:
        """The program after the last pass."""
        return self.records[-1].program

    def after(self, name: str) -> Program:
        """The program after the pass of that name; KeyError lists those there are."""
        for record in self.records:
            if record.name == name:
                return record.program
        raise KeyError(f"no pass {name!r} ran; there are: {', '.join(r.name for r in self.records)}")


class PassManager:
    """Runs `passes` in order over a program. Raises `ContractError` before running anything if they don't fit.

    `verify` checks the program before the first pass and after each. `snapshots` keeps a copy of the graph after each
    pass (fake values are shared): the history and reproducers need them. `recipe` is what a reproducer says of how the
    passes were made, as JSON (see `zgraph.recipe`).
    """

    def __init__(
        self,
        passes: Sequence[Pass],
        *,
        verify: bool = True,
        snapshots: bool = True,
        recipe: Mapping[str, Any] | None = None,
    ) -> None:
        self.passes = list(passes)
        self.verify = verify
        self.snapshots = snapshots
        self.recipe = recipe
        self._values = ValueCache()

    def check(self, facts: frozenset[str] = frozenset()) -> None:
        """Do the passes' contracts fit, one after another, from these facts on?"""
        known = set(facts)
        names: set[str] = set()
        for step in self.passes:
            contract = step.contract
            if contract.name in names:
                raise ContractError(f"pass {contract.name!r} stands twice in the pipeline", hint="leave one out")
            names.add(contract.name)
            missing = contract.requires - known
            if missing:
                givers = sorted({p.name for p in self.passes if p.contract.provides & missing})
                raise ContractError(
                    f"pass {contract.name!r} can't run here",
                    why=f"it requires {sorted(missing)}, which no pass before it provides",
                    hint=f"put it after {givers}" if givers else "add the pass that provides it",
                )
            clash = contract.conflicts & known
            if clash:
                raise ContractError(
                    f"pass {contract.name!r} can't run here",
                    why=f"it conflicts with {sorted(clash)}",
                    hint="put it earlier",
                )
            known |= contract.provides

    def run(self, program: Program) -> History:
        """Run all passes; the program is changed in place and returned in the history.

        Raises `ContractError` before any pass runs, `PlanError` where a pass can't do what the plan asks, `VerifyError` for
        a program that breaks an invariant, `PassError` for a pass that raises; the last two say where the reproducer is.
        """
        self.check(frozenset(program.facts))
        history = History()
        seconds = self._verify(program)
        history.records.append(
            PassRecord("capture", "the joint forward and backward graph", 0.0, seconds, {}, self._keep(program))
        )
        for at, step in enumerate(self.passes):
            before = history.records[-1].program if self.snapshots else None
            start = time.perf_counter()
            try:
                with record_function(f"zgraph:pass {step.name}"):
                    stats = dict(step(program))
                program.recompile()
                program.facts |= step.contract.provides
                if step.contract.level is not None:
                    program.level = max(program.level, step.contract.level)
                took = time.perf_counter() - start
                verified = self._verify(program)
            except PlanError:  # (a wish that can't be had, and no fault of the pass)
                raise
            except Exception as error:
                where = self._reproducer(before, at, error)
                if isinstance(error, PassError):
                    error.add_note(f"in pass {step.name!r}; reproducer: {where}")
                    raise
                raise PassError(
                    f"pass {step.name!r} failed",
                    why=f"{type(error).__name__}: {error}",
                    hint=f"reproducer: {where}",
                ) from error
            logger.debug("pass %s: %.3f s, verified in %.3f s, %s", step.name, took, verified, stats)
            history.records.append(
                PassRecord(
                    step.name,
                    step.contract.summary,
                    took,
                    verified,
                    stats,
                    self._keep(program),
                    step.contract,
                    step.options,
                )
            )
        return history

    def _keep(self, program: Program) -> Program:
        return program.snapshot() if self.snapshots else program

    def _verify(self, program: Program) -> float:
        start = time.perf_counter()
        if self.verify:
            verify_program(program, self._values)
        return time.perf_counter() - start

    def _reproducer(self, before: Program | None, at: int, error: Exception) -> str:
        """Write what is needed to replay the failure; never let this hide the failure itself."""
        if before is None:
            return "none (snapshots are off)"
        from zgraph.program.serial import to_json
        from zgraph.program.text import render

        try:
            base = os.environ.get("ZGRAPH_REPRO_DIR")
            folder = Path(tempfile.mkdtemp(prefix="zgraph-repro-", dir=base))
            (folder / "program.json").write_text(json.dumps(to_json(before)))
            (folder / "program.txt").write_text(render(before))
            node = error.node if isinstance(error, VerifyError) else None
            rest = {
                "passes": [p.name for p in self.passes[at:]],
                "error": f"{type(error).__name__}: {error}",
                "node": node,
                "recipe": self.recipe,
            }
            (folder / "pipeline.json").write_text(json.dumps(rest, indent=2))
            return str(folder)
        except Exception as problem:
            return f"could not be written ({problem})"
