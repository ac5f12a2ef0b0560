"""A step's programs, kept for later processes: with them a `StepProgram` needs no tracing and no passes.

[Note: what is kept] The captured program without its graph, and facts about that graph (`StepFacts`); the parts of each variant that was
split, whole, with what runs read of their graphs; their code (`codegen/code_cache.py`). The history of the passes is not kept: to
see it, the capture, which every process makes, goes through the passes again, and the result must be the program that was kept.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from zgraph.build.build_context import BuildContext, own_order
from zgraph.build.pass_pipeline import EVERY_PASS, MemoryDecision, Variant
from zgraph.build.wire_formats import WireFormats
from zgraph.cache import conditions
from zgraph.cache.store import Store, hashed, opened
from zgraph.capture.capture import Trace
from zgraph.capture.graph_text import text_of_trace
from zgraph.codegen.code_cache import CodeCache
from zgraph.codegen.executable import edge_of
from zgraph.codegen.partition import Parts
from zgraph.errors import UnsupportedError, ZgraphError
from zgraph.program.digest import digest
from zgraph.program.lazy_program import LazyProgram, lazy_from_text, text_of
from zgraph.program.program import Program
from zgraph.program.serialize import frame_from_json, frame_to_json
from zgraph.program.sparse_attention import layout_text

logger = logging.getLogger(__name__)

STEP = "step"


@dataclass(frozen=True)
class StepFacts:
    """What is read of a step's graphs besides its parts."""

    random: bool  # whether it draws random numbers
    keeps: bool  # whether whole weights outlive it
    offloaded: int  # bytes of activations that are offloaded
    read_by_backward: frozenset[str]  # parameters that the backward reads
    from_start: frozenset[int]  # see `Trace.from_start`
    choice: MemoryDecision | None  # what was decided under a memory budget; None without a decision
    formats: WireFormats | None  # what `wire.auto` chose for the model; None without it
    made: str  # the digest of the program after all passes
    warnings: tuple[tuple[str, str], ...]  # (logger, message) of the warnings given while it was made

    def said(self) -> dict[str, Any]:
        """Return these facts as JSON."""
        sets = {name: sorted(getattr(self, name)) for name in ("read_by_backward", "from_start")}
        choice = None if self.choice is None else asdict(self.choice) | {"keep": sorted(self.choice.keep)}
        return {**dataclasses.asdict(self), **sets, "choice": choice, "warnings": [list(w) for w in self.warnings]}

    @staticmethod
    def of(said: Mapping[str, Any]) -> StepFacts:
        """Return the facts that `said` gave as JSON."""
        choice = said["choice"]
        if choice is not None:
            choice = MemoryDecision(**{**choice, "keep": frozenset(choice["keep"])})
        formats = said["formats"] and WireFormats.of(said["formats"])
        sets = {name: frozenset(said[name]) for name in ("read_by_backward", "from_start")}
        warnings = tuple((logger, message) for logger, message in said["warnings"])
        return StepFacts(**{**said, **sets, "choice": choice, "formats": formats, "warnings": warnings})

    def warn(self) -> None:
        """Give the warnings again that were given while the step was made."""
        for name, message in self.warnings:
            logging.getLogger(name).warning("%s", message)


class RecordedWarnings(logging.Handler):
    """A log handler that records the warnings which this thread gives to zgraph's loggers while it is entered."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings: list[tuple[str, str]] = []
        self._thread = 0

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread:
            self.warnings.append((record.name, record.getMessage()))

    def __enter__(self) -> RecordedWarnings:
        self._thread = threading.get_ident()
        logging.getLogger("zgraph").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("zgraph").removeHandler(self)


class StoredStep:
    """The store's entry for one step: empty, or with everything that earlier processes have made of it."""

    def __init__(self, store: Store, key: str, code: CodeCache) -> None:
        self.store, self.key, self.code = store, key, code
        self._data: dict[str, Any] = {}
        self.facts: StepFacts | None = None  # None while nothing is kept
        self._read()

    def _read(self) -> None:
        data = self.store.get_json(STEP, self.key)
        if data is not None:
            self._data, self.facts = data, StepFacts.of(data["facts"])

    def captured(self, make: Callable[[], Program]) -> Program:
        """Return the captured program, whose graph is made when someone first looks at it.

        Raises `ZgraphError` then if the graph differs from the kept one.
        """
        frame, known = self._data["captured"]

        def same() -> Program:
            return self.refuse_another(make(), known)

        return LazyProgram(frame_from_json(frame), same, None, known)

    def refuse_another(self, program: Program, known: str) -> Program:
        """Return the program. Raises `ZgraphError` unless its digest is the `known` one."""
        if digest(program) != known:
            raise ZgraphError(
                f"program {program.name} is another than the one that was kept of it",
                where=str(self.store.folder),
                why="what it is made of is the same, as far as zgraph looks",
                hint="zgraph cache clear; and report this: it is a fault of zgraph",
            )
        return program

    def parts(self, variant: Variant, *, apart: bool) -> Parts | None:
        """Return the parts of a variant; None where none are kept."""
        rows = self._data.get("parts", {}).get(_name(variant, apart))
        if rows is None:
            return None
        forward, backward, weights, *ahead = [None if row is None else lazy_from_text(*row) for row in rows]
        assert forward is not None
        return Parts(forward, backward, tuple(p for p in ahead if p is not None), weights)

    def keep(
        self, captured: Program, facts: StepFacts, parts: Mapping[tuple[Variant, bool], Parts], words: Mapping[str, str]
    ) -> None:
        """Keep a step with all parts that it has by now."""
        known = dict(self._data.get("parts", {}))
        wanted = {_name(*which): part for which, part in parts.items()}
        if wanted.keys() <= known.keys():
            return
        try:
            known |= {name: _rows(part) for name, part in wanted.items() if name not in known}
            frame = self._data["captured"] if self._data else [frame_to_json(captured), digest(captured)]
        except UnsupportedError as error:
            logger.debug("%s is not kept: %s", captured.name, error)
            self.store.usage.refuse(f"{captured.name} is not kept for later processes: {error}")
            return
        self._data = {"captured": frame, "facts": facts.said(), "parts": known}
        self.store.put_json(STEP, self.key, self._data, words)


def _name(variant: Variant, apart: bool) -> str:
    return json.dumps([*dataclasses.astuple(variant), apart])


def _rows(parts: Parts) -> list[list[Any] | None]:
    return [_row(p) for p in (parts.forward, parts.backward, parts.weights, *parts.ahead)]


def _row(program: Program | None) -> list[Any] | None:
    if program is None:
        return None
    return [text_of(program), digest(program), edge_of(program).said()]


class StoredPrograms:
    """The store's entries for the steps of one compiled model."""

    def __init__(self, store: Store, model: str, device: torch.device) -> None:
        self.store = store
        self.model = model
        self.device = device
        self._told: set[str] = set()

    def conditions(self) -> str | None:
        """Return the hash of everything besides the step that programs depend on now; log a line and return None where
        some of it has no text."""
        try:
            return conditions.key_of(conditions.conditions(self.device))
        except conditions.Unknown as error:
            self._tell(f"{self.model} is not kept for later processes: {error}")
            return None

    def words(self, program: str) -> dict[str, str]:
        """Return what a listing of the folder shows for an entry."""
        return {"model": self.model, "program": program}

    def code(self, program: str) -> CodeCache | None:
        """Return the store of an update's code; None where it can't be kept."""
        condition_hash = self.conditions()
        return (
            CodeCache(self.store, condition_hash, self.device, self.words(program))
            if condition_hash is not None
            else None
        )

    def step(self, trace: Trace, pattern: frozenset[int], name: str, context: BuildContext) -> StoredStep | None:
        """Return what is kept of a capture's step; None for a step that can't be kept."""
        own_code = context.plan.passes or context.plan.own_policy
        if context.pass_filter != EVERY_PASS or context.order is not own_order or own_code:
            return None  # (made for inspection, or by a user's own passes or policy)
        condition_hash = self.conditions()
        if condition_hash is None:
            return None
        try:
            captured = text_of_trace(trace)
        except UnsupportedError as error:
            self._tell(f"{name} is not kept for later processes: {error}")
            return None
        residents = context.residents
        made_with = [
            context.plan.model_dump(mode="json"),
            [layout_text(sparsity) for sparsity in context.plan.attention.values()],  # (with digests of mask functions)
            context.costs.hardware.model_dump(mode="json"),
            context.costs.fused,
            [[share, repr(residents.at(share))] for share in residents.shares],
            context.wire.said(),  # (an earlier program's choice)
            sorted(pattern),
            name,
            torch.is_grad_enabled(),
        ]
        key = hashed(condition_hash, captured, json.dumps(made_with, sort_keys=True))
        return StoredStep(self.store, key, CodeCache(self.store, condition_hash, self.device, self.words(name)))

    def _tell(self, line: str) -> None:
        self.store.usage.refuse(line)
        if line not in self._told:
            self._told.add(line)
            logger.info("%s", line)


VARIABLE = "ZGRAPH_CACHE"


def stored_programs(model: torch.nn.Module, device: torch.device) -> StoredPrograms | None:
    """Return the store of a model's programs: None unless the user has named a folder by `ZGRAPH_CACHE`."""
    store = opened() if os.environ.get(VARIABLE) else None
    return StoredPrograms(store, type(model).__name__, device) if store is not None else None
