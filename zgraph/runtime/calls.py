"""Finds the program that serves a call of the model, or has one compiled: by the inputs' signature, and by the Python state that its capture read."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from zgraph.build.step_program import Entry
from zgraph.capture.cache_key import shared, signature
from zgraph.capture.inputs import refuse_inputs
from zgraph.errors import CaptureError, SignatureError
from zgraph.runtime.rank import Rank
from zgraph.torch_compat.guards import Failing

logger = logging.getLogger(__name__)

_STATE = "; python state "  # in the keys of programs: before the number of the state that one is for

Compile = Callable[[str, tuple[Any, ...], dict[str, Any]], Entry]
"""Compiles the program for a call, which it gets with the key that the program will have."""

Execute = Callable[[Entry, tuple[Any, ...]], tuple[Any, ...]]
"""Runs a program on flat inputs, and gives the flat outputs."""


class Calls:
    """The programs of one compiled module by the calls that they serve. They are in the rank's `entries`, by their keys."""

    def __init__(self, rank: Rank, compile_entry: Compile, execute: Execute) -> None:
        self.rank = rank
        self.lock = threading.RLock()  # (threads that call for the first time at once compile once)
        self._compile = compile_entry
        self._execute = execute
        self._bound: dict[str, Callable[..., Any]] = {}

    def entry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Entry]:
        """The program for these inputs, with its key. For a new signature it is captured and compiled, on all ranks alike."""
        rank, entries = self.rank, self.rank.entries
        refuse_inputs(rank.forward_function, args, kwargs)
        rank.shards.refresh()
        rank.shards.fetch()
        signed = self._signed(args, kwargs)
        key, known = signed, 0  # the same inputs may have programs for several states of the Python attributes
        while key in entries and (stale := entries[key].trace.flat.stale(rank.module, args, kwargs)):
            logger.info("%s is not for this call: no longer %s", entries[key].name, stale.what)
            known += 1
            key = f"{signed}{_STATE}{known}"
        new = key not in entries
        rank.everyone.vote("the inputs of a call", f"{shared(key)}; {'new' if new else 'known'}")
        if new:
            before = f"{signed}{_STATE}{known - 1}" if known > 1 else signed
            self._add(key, before if known else None, args, kwargs)
        return key, entries[key]

    def run(self, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call, by the program with this key."""
        return self._bound[key](self.rank.module, *args, **kwargs)

    def settle(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """After a program's first run: has the forward itself changed the Python state that it depends on?

        Once is how a model finishes its construction, and it may go back and forth between states that have a program. Twice in a row to a
        state that has none, it would be compiled again at every call.
        """
        module = self.rank.module
        entry.settled = True
        stale = entry.trace.flat.stale(module, args, kwargs)
        entry.unsettled = stale is not None and stale.lasts
        if stale is None or not entry.unsettled or not entry.unsettled_before:
            return
        signed = self._signed(args, kwargs)
        states = [e for k, e in self.rank.entries.items() if k.split(_STATE)[0] == signed]
        if all(e.trace.flat.stale(module, args, kwargs) for e in states):
            raise CaptureError(
                "the model's forward changes Python state that it depends on, at every call",
                where=stale.where,
                why=f"no longer true after the call: {stale.what}",
                hint="keep such state in a buffer (register_buffer), or change it outside of forward",
            )

    def name_new(self, shown: str) -> str:
        """The name of the program for a new signature, which is told to the user."""
        rank = self.rank
        name = f"{'train' if torch.is_grad_enabled() and rank.module.training else 'eval'}{len(rank.entries)}"
        log = logger.warning if rank.entries and rank.everyone.first() else logger.info
        log("new input signature: compiling program %s for %s", name, shown)
        return name

    def _signed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        signed = signature(self.rank.module, args, kwargs)
        return f"{signed}; forward {self.rank.forwards_replaced}" if self.rank.forwards_replaced else signed

    def _add(self, key: str, before: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compile the program for a call; `before` is the key of the last one for such inputs, whose Python state was another."""
        rank = self.rank
        rank.relax()
        rank.refuse_unset()
        _refuse_other_devices(rank.device, args, kwargs)
        entry = self._compile(key, args, kwargs)
        _refuse_unstable(entry.trace.flat.stale(rank.module, args, kwargs))
        entry.unsettled_before = before is not None and rank.entries[before].unsettled
        rank.entries[key] = entry
        self._bound[key] = entry.trace.flat.bind(lambda *flat: self._execute(entry, flat))
        if rank.recorder is not None:
            rank.recorder.compiled()


def _refuse_other_devices(device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise `SignatureError` for an input on another accelerator than the model's."""
    for leaf in torch.utils._pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.device.type not in (device.type, "cpu"):
            raise SignatureError(
                f"an input is on {leaf.device}, the model on {device}", hint=f"move it: x.to({str(device)!r})"
            )


def _refuse_unstable(stale: Failing | None) -> None:
    """Raise `CaptureError` if what a forward has just been captured with is not so."""
    if stale is not None:
        raise CaptureError(
            "the model's forward reads Python state that is another at every read",
            where=stale.where,
            why=f"not true straight after the capture: {stale.what}",
            hint="let what it reads (a property, a function's result) be the same object, or an equal value, while nothing has changed",
        )
