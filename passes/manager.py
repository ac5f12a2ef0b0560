"""Runs a pipeline of passes: checks the contracts, then runs each pass, and after each verifies, times, counts and
takes a snapshot.

A pass that raises, or that leaves a program which the verifier refuses, writes a reproducer
(`zgraph/passes/reproducer.py`).
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.autograd.profiler import record_function

from zgraph.errors import ContractError, PassError, PlanError
from zgraph.passes import reproducer
from zgraph.passes.contract import Contract, Pass
from zgraph.passes.verifier import ValueCache, verify_program
from zgraph.program.printer import render
from zgraph.program.program import Program
from zgraph.torch_compat import fx_graphs, inductor_code

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PassRecord:
    """What one pass did to a program. The first record of a history is the capture, which is no pass.

    Without snapshots `program` is the one that later passes went on to change. With snapshots it is copied when it is
    first read.
    """

    name: str  # the name of the pass; "capture" for the captured program
    summary: str  # one line for people
    seconds: float  # the time that the pass took
    verify_seconds: float  # the time that the verifier took after it
    stats: dict[str, int]  # the counts that the pass returned, by name
    kept: Callable[[], Program]  # returns the program after the pass
    contract: Contract | None = None  # the contract of the pass, None for the capture
    options: Any = None  # the options of the pass, None for the capture

    @functools.cached_property
    def program(self) -> Program:
        return self.kept()

    @property
    def nodes(self) -> int:
        return len(self.program.graph.nodes)


@dataclass
class History:
    """The record of each pass of a pipeline over one program; the first record is the captured program."""

    records: list[PassRecord] = field(default_factory=list)  # in the order in which the passes ran

    @property
    def program(self) -> Program:
        """The program after the last pass."""
        return self.records[-1].program

    def after(self, name: str) -> Program:
        """Return the program after the pass of that name. Raises KeyError, which lists the passes that ran."""
        for record in self.records:
            if record.name == name:
                return record.program
        raise KeyError(f"no pass {name!r} ran; there are: {', '.join(r.name for r in self.records)}")


class PassManager:
    """Runs `passes` in order over a program. Raises `ContractError` before running anything if they don't fit.

    `verify` checks the program before the first pass and after each. `snapshots` keeps a copy of the graph after each
    pass (fake values are shared): the history and reproducers need them. `recipe` is what a reproducer says of how the
    passes were made, as JSON (see `zgraph.build.recipe`).
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
        self._kept: fx_graphs.FrozenGraph | None = None  # the last snapshot

    def check(self, facts: frozenset[str] = frozenset()) -> None:
        """Raise `ContractError` for the first pass whose contract does not fit; `facts` hold before the first pass."""
        for fault in self.faults(facts):
            raise fault

    def faults(self, facts: frozenset[str] = frozenset()) -> Iterator[ContractError]:
        """Yield a `ContractError` for each pass whose contract does not fit at its position; `facts` hold before the
        first pass.
        """
        known = set(facts)
        names: set[str] = set()
        for step in self.passes:
            contract = step.contract
            if contract.name in names:
                yield ContractError(f"pass {contract.name!r} stands twice in the pipeline", hint="leave one out")
            names.add(contract.name)
            missing = contract.requires - known
            if missing:
                givers = sorted({p.name for p in self.passes if p.contract.provides & missing})
                yield ContractError(
                    f"pass {contract.name!r} can't run here",
                    why=f"it requires {sorted(missing)}, which no pass before it provides",
                    hint=f"put it after {givers}" if givers else "add the pass that provides it",
                )
            clash = contract.conflicts & known
            if clash:
                yield ContractError(
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
            PassRecord(
                "capture", "the joint forward and backward graph", 0.0, seconds, {}, self._keep(program, 0, "capture")
            )
        )
        for at, step in enumerate(self.passes):
            before = history.records[-1] if self.snapshots else None
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
                    error.history, error.failure = history, error
                    raise
                failed = PassError(
                    f"pass {step.name!r} failed",
                    why=f"{type(error).__name__}: {error}",
                    hint=f"reproducer: {where}",
                )
                failed.history, failed.failure = history, error
                raise failed from error
            logger.debug("pass %s: %.3f s, verified in %.3f s, %s", step.name, took, verified, stats)
            history.records.append(
                PassRecord(
                    step.name,
                    step.contract.summary,
                    took,
                    verified,
                    stats,
                    self._keep(program, at + 1, step.name),
                    step.contract,
                    step.options,
                )
            )
        return history

    def _keep(self, program: Program, at: int, name: str) -> Callable[[], Program]:
        if not self.snapshots:
            return lambda: program
        inductor_code.trace_artifact(f"zgraph_{program.name}_{at:02}_{name}", lambda: render(program))
        if self._kept is None or not self._kept.is_of(program.module):  # (many passes have nothing to do in a program)
            self._kept = fx_graphs.FrozenGraph(program.module)
        return program.frozen(self._kept)

    def _verify(self, program: Program) -> float:
        start = time.perf_counter()
        if self.verify:
            verify_program(program, self._values)
        return time.perf_counter() - start

    def _reproducer(self, before: PassRecord | None, at: int, error: Exception) -> str:
        """Write what is needed to replay the failure; never let an error in this hide the failure itself."""
        if before is None:
            return "none (snapshots are off)"
        try:
            return str(reproducer.write(before.program, [p.name for p in self.passes[at:]], error, self.recipe))
        except Exception as problem:
            return f"could not be written ({problem})"
