"""Finds the program that serves a call of the model, or has one compiled: by the inputs' signature, and by the
Python state that its capture read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zgraph.build.programs_of_one_step import leave, pair_programs
from zgraph.build.step_program import Entry
from zgraph.capture.call_signature import shared, signed
from zgraph.capture.learned_sizes import Signature
from zgraph.capture.refuse_inputs import refuse_inputs
from zgraph.capture.symbolic_capture import SymbolicSizes
from zgraph.capture.value_inputs import ValueInputs, warn_of_unknown, with_values
from zgraph.errors import CaptureError, RankMismatchError, SignatureError, SizeError, ZgraphError
from zgraph.plan.shapes import buckets_of
from zgraph.ranks import compile_progress
from zgraph.runtime.call_sizes import CallSizes, CallSizeTracker, RankCall, TwoSidesError
from zgraph.runtime.rank import Rank
from zgraph.runtime.rank_votes import INPUTS
from zgraph.runtime.recompile_storms import RecompileStorms
from zgraph.torch_compat import fake_tensors
from zgraph.torch_compat.guards import Failing
from zgraph.torch_compat.modules import Registered

logger = logging.getLogger(__name__)

_STATE = "; python state "  # in the keys of programs: comes before the number of the Python state that one is for

Compile = Callable[[str, tuple[Any, ...], dict[str, Any], SymbolicSizes | None], Entry]
"""Compiles the program for a call: takes the program's key, the call, and the sizes that are to be symbols."""

Execute = Callable[[Entry, tuple[Any, ...]], tuple[Any, ...]]
"""Runs a program on flat inputs, and returns the flat outputs."""


class _OnceMore(Exception):
    """Raised to look for a call's programs again, after ranks have learned more about its sizes."""


@dataclass(frozen=True)
class _Found:
    """The result of a search for a call's program."""

    key: str  # of the call's program
    new: bool  # whether that program has still to be compiled
    number: int  # how many programs before it in the list do not serve the call
    before: str | None  # of the last program that does not serve the call
    refused: Entry | None  # a program that would serve the call at other sizes

    @property
    def ballot(self) -> str:
        """What ranks must agree on: the program, and whether it is new."""
        return f"{shared(self.key)}; {'new' if self.new else 'known'}"


class Calls:
    """The programs of one compiled module, by the calls that they serve; they are stored in the rank's `entries`, by
    key.
    """

    def __init__(self, rank: Rank, compile_entry: Compile, execute: Execute) -> None:
        self.rank = rank
        self.lock = threading.RLock()  # (threads that make the first call at the same time compile once)
        self._compile = compile_entry
        self._execute = execute
        self._bound: dict[str, Callable[..., Any]] = {}
        self._sizes = CallSizeTracker(rank)
        self._values = ValueInputs(rank.plan.dynamic, rank.forward_function)
        self._storms = RecompileStorms(rank.forward_function, rank.plan.max_programs)
        self._states: dict[str, list[str]] = {}  # keys of programs that differ in Python state, by the key without it
        self._made: dict[str, int] = {}  # how many such programs were ever made
        self._programs = 0  # how many programs were ever made
        self._calls = 0
        self._last: dict[str, int] = {}  # the number of each program's last call

    def entry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Entry]:
        """Return the key and the program for these inputs. All ranks together capture and compile it for a new
        signature.
        """
        rank = self.rank
        rank.everyone.refuse_destroyed_groups()
        refuse_inputs(rank.forward_function, args, kwargs)
        own: Registered | None = rank.shards.refresh()
        rank.shards.fetch()
        if not self._calls and rank.plan.dynamic and rank.everyone.first():
            warn_of_unknown(rank.plan.dynamic, rank.forward_function, args, kwargs)
        while True:
            call = self._signed(args, kwargs, own)
            try:
                return self._entry(call, args, kwargs)
            except _OnceMore:
                own = None
            except CaptureError as error:
                if not self._values.next_try(error, call):
                    raise

    def _entry(self, call: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Entry]:
        rank = self.rank
        with self._refusals_told():
            sizes = self._sizes.of(call)
            match = self._find(sizes, args, kwargs)
        changed = rank.changed_here()
        if not match.new and rank.needed_votes.passes_forward(match.key, learns=sizes.learn, changed=changed):
            return self._called(match.key)
        if sizes.learn:
            verdict = rank.votes.call(
                shared(call.outline), shared(call.text()), shared(match.key), new=match.new, worst=changed
            )
            rank.settle_changes(verdict.worst)
            if not verdict.flag:
                rank.needed_votes.did_forward(match.key)
                return self._called(match.key)
            calls = rank.everyone.gather("the shapes of a call", (call.shapes, call.values, call.numbers))
            sizes.take_in(calls)
            try:
                if beside := sizes.others(calls) or self._sides(sizes, calls):
                    return self._entry_beside(sizes, beside)
                return self._entry_together(self._find_together(sizes, args, kwargs), sizes, 0)
            except TwoSidesError:
                if not (each := sizes.each(calls)):
                    raise
                return self._entry_beside(sizes, [one.alone(sizes) for one in each])
        return self._entry_together(match, sizes, changed)

    def _entry_together(self, match: _Found, sizes: CallSizes, changed: int) -> tuple[str, Entry]:
        """Return the program that serves the calls of all ranks; compile it if it is new."""
        verdict = self.rank.everyone.vote(INPUTS, match.ballot, worst=changed)
        self.rank.settle_changes(verdict.worst)
        if match.new:
            match = self._add(match, sizes, *sizes.call.call)
        self.rank.needed_votes.did_forward(match.key)
        return self._called(match.key)

    def _sides(self, own: CallSizes, calls: Sequence[RankCall]) -> list[CallSizes]:
        """Return one call for each program that the ranks' calls need, where all of these are known: the model's code
        branches on sizes. [] where one program is the first for all of them, or one has still to be compiled.
        """
        each, entries = own.each(calls, "meta"), self.rank.entries
        if len(each) < 2:
            return []
        args, kwargs = own.call.call
        states = [
            key
            for key in self._states.get(own.key, ())
            if not entries[key].trace.flat.stale(self.rank.module, args, kwargs)
        ]
        serving: dict[str, int] = {}  # the number of the call that needs it, by program
        for number, one in enumerate(each):
            key = next((key for key in states if one.point and entries[key].holds(one.point)), None)
            if key is None:
                return []
            if one is own or key not in serving:
                serving[key] = number
        if len(serving) < 2:
            return []
        stand_ins = own.each(calls)
        return [stand_ins[number] for number in serving.values()]  # (by program: the same order on all ranks)

    def agree_on_step(self, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
        """Let ranks vote once on the forwards of these calls, the micro-batches of a step. If one of them has no
        program yet, or ranks have to learn from it, each call votes by itself later.
        """
        rank = self.rank
        if (
            not rank.needed_votes.by_steps() or buckets_of(rank.plan) is not None
        ):  # (padding is only agreed on call by call)
            return
        own = rank.shards.refresh()
        rank.shards.fetch()
        signatures = self._signatures(calls, own)
        matches: dict[str, _Found] = {}
        with self._refusals_told():
            sizes = [self._sizes.of(call) for call in signatures]
            for one, (args, kwargs) in zip(sizes, calls, strict=True):
                if one.key not in matches:
                    matches[one.key] = self._find(one, args, kwargs)
        programs = [matches[one.key] for one in sizes]
        new = any(program.new for program in programs)
        ballot = " | ".join(program.ballot for program in programs)
        changed = rank.changed_here(again=True)
        if any(one.learn for one in sizes):
            outline, text = (
                " | ".join(shared(t) for t in column)
                for column in zip(*((c.outline, c.text()) for c in signatures), strict=True)
            )
            verdict = rank.votes.call(f"{len(calls)} micro-batches: {outline}", text, ballot, new=new, worst=changed)
        else:
            verdict = rank.everyone.vote(INPUTS, f"{len(calls)} micro-batches: {ballot}", worst=changed)
        rank.settle_changes(verdict.worst)
        if not new and not verdict.flag:
            rank.needed_votes.promise([program.key for program in programs])

    @contextlib.contextmanager
    def _refusals_told(self) -> Iterator[None]:
        """Tell the other ranks, which vote on their calls, where this rank refuses its own (a size beyond the declared
        maximum, say).
        """
        try:
            yield
        except SignatureError as error:
            if self._sizes.varies:  # (else they may foresee their forwards, and not vote)
                refused = f"a call that this rank refuses: {error.what}"
                with contextlib.suppress(RankMismatchError):
                    self.rank.votes.call(refused, refused, refused, new=True)
            raise

    def _signatures(self, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]], own: Registered) -> list[Signature]:
        for args, kwargs in calls:
            refuse_inputs(self.rank.forward_function, args, kwargs)
        return [self._signed(args, kwargs, own) for args, kwargs in calls]

    def _entry_beside(self, own: CallSizes, calls: Sequence[CallSizes]) -> tuple[str, Entry]:
        """Return the program for a call where ranks have `calls` that need several programs (some are stand-ins). Every
        rank compiles all of them; they are checked to communicate alike.
        """
        keys: list[str] = []
        for sizes in calls:
            args, kwargs = sizes.call.call
            match = self._find_together(sizes, args, kwargs)
            self.rank.everyone.vote(INPUTS, match.ballot)
            keys.append((self._add(match, sizes, args, kwargs) if match.new else match).key)
        pair_programs([self.rank.entries[key] for key in keys])
        self.rank.needed_votes.did_forward(" beside ".join(keys))
        return self._called(keys[calls.index(own)], *keys)

    def _called(self, key: str, *beside: str) -> tuple[str, Entry]:
        """Record the call and return the program with this key; other ranks call the ones in `beside`. Beyond
        `max_programs`, drop the program that was not called for the longest time, which is the same on all ranks.
        """
        self._calls += 1
        self._last |= dict.fromkeys(beside or (key,), self._calls)
        entries = self.rank.entries
        while len(entries) > max(self.rank.plan.max_programs, len(beside)):
            oldest = min(entries, key=self._last.__getitem__)
            logger.info("program %s is let go: there are more than max_programs", entries[oldest].name)
            self.rank.votes.forget(entries[oldest].name)
            leave(entries[oldest])
            del entries[oldest], self._bound[oldest], self._last[oldest]
            self._states[oldest.split(_STATE)[0]].remove(oldest)
            fake_tensors.forget_results()  # (their cache grows with each program)
        return key, entries[key]

    def _find_together(self, sizes: CallSizes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Found:
        """Return the program for a call, skipping those that refuse any rank's sizes."""
        match = self._find(sizes, args, kwargs)
        least = self.rank.everyone.most("programs that refuse sizes", match.number if match.refused is not None else 0)
        return self._find(sizes, args, kwargs, least) if least > match.number else match

    def _find(self, sizes: CallSizes, args: tuple[Any, ...], kwargs: dict[str, Any], least: int = 0) -> _Found:
        """Return the program for a call. The same inputs may have several: one per state of the Python attributes, and
        per range of sizes. The first `least` of them refuse another rank's sizes.
        """
        entries, module = self.rank.entries, self.rank.module
        point = sizes.point
        before, refused = None, None
        states = self._states.get(sizes.key, ())
        for number, key in enumerate(states):
            entry = entries[key]
            if stale := entry.trace.flat.stale(module, args, kwargs):
                logger.info("%s is not for this call: no longer %s", entry.name, stale.what)
            elif number >= least and (not point or entry.holds(point)):
                return _Found(key, False, number, before, None)
            elif refused is None or not entry.only:  # (one for a range of sizes says more than one for a single size)
                refused = entry
            before = key
        return _Found(self._new_key(sizes), True, len(states), before, refused)

    def _new_key(self, sizes: CallSizes) -> str:
        count = self._made.get(sizes.key, 0)
        return f"{sizes.key}{_STATE}{count}" if count else sizes.key

    def run(self, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the program with this key and return the model's result."""
        return self._bound[key](self.rank.module, *args, **kwargs)

    def settle(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check, after a program's first run, whether the forward itself changed the Python state that the program
        depends on. Raises `CaptureError` if it does so at every call.

        A model may finish its construction in its first call, and may go back and forth between states that have a
        program. If a second program in a row ends in a state that has none, every call would be compiled again.
        """
        module = self.rank.module
        entry.settled = True
        stale = entry.trace.flat.stale(module, args, kwargs)
        entry.unsettled = stale is not None and stale.lasts
        if stale is None or not entry.unsettled or not entry.unsettled_before:
            return
        key = self._sizes.of(self._signed(args, kwargs)).key
        states = [e for k, e in self.rank.entries.items() if k.split(_STATE)[0] == key]
        if all(e.trace.flat.stale(module, args, kwargs) for e in states):
            raise CaptureError(
                "the model's forward changes Python state that it depends on, at every call",
                where=stale.where,
                why=f"no longer true after the call: {stale.what}",
                hint="keep such state in a buffer (register_buffer), or change it outside of forward",
            )

    def name_new(self, shown: str) -> str:
        """Return the name of the program for a new signature, and log it for the user."""
        rank = self.rank
        name = f"{'train' if torch.is_grad_enabled() and rank.module.training else 'eval'}{self._programs}"
        log = logger.warning if rank.entries and rank.everyone.first() else logger.info
        log("new input signature: compiling program %s for %s", name, shown)
        return name

    def _signed(self, args: tuple[Any, ...], kwargs: dict[str, Any], own: Registered | None = None) -> Signature:
        call = signed(self.rank.module, args, kwargs, self._values.of(args, kwargs), own)
        replaced = self.rank.forwards_replaced
        return dataclasses.replace(call, form=f"{call.form}; forward {replaced}") if replaced else call

    def _add(self, match: _Found, sizes: CallSizes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Found:
        """Compile the program for a call. Sizes that can't be symbols in it become numbers, with a program for each
        from now on. If it turns out not to serve the call's sizes, compile one more: made at these sizes, and if need
        be for these alone.
        """
        rank = self.rank
        rank.relax()
        rank.refuse_unset()
        _refuse_other_devices(rank.device, args, kwargs)
        refused = match.refused
        sizes.made_at(self._asked(sizes, refused=refused is not None and not refused.holds(sizes.point)), refused)
        while match.new:
            try:
                with self._shown():
                    entry = self._compile(match.key, args, kwargs, self._open_sizes(match, sizes))
            except ZgraphError as error:
                known = not sizes.open_elements or self._values.of_sizes
                if known and self._values.may_help(error, sizes.call):
                    sizes.restore()
                    raise
                if not sizes.give_up(error, match.refused):
                    raise
                if sizes.apart and sizes.closed:
                    raise _OnceMore from error
            except Exception as error:  # (torch has many ways to say what it can't do with a symbol)
                first = (str(error).splitlines() or [""])[0]
                why = f"torch can't trace the model with it as a symbol: {type(error).__name__}: {first}"
                if not sizes.point or not sizes.give_up(SizeError("sizes can't be symbols", why=why), match.refused):
                    raise
                if sizes.apart and sizes.closed:
                    raise _OnceMore from error
            else:
                sizes.settled(entry)
                # (a number that was to be an input of the program may be a constant in it)
                if sizes.key != match.key.split(_STATE)[0]:
                    match = dataclasses.replace(match, key=self._new_key(sizes))
                self._keep(match, entry, sizes)
                asked = self._asked(sizes, refused=bool(sizes.point) and not entry.holds(sizes.point))
                if asked is None:
                    return match
                sizes.made_at(asked, entry)
            match = self._find_together(sizes, args, kwargs)
            rank.everyone.vote(INPUTS, match.ballot)
        return match

    def _shown(self) -> contextlib.AbstractContextManager[None]:
        """Show the progress of compiling, on one rank."""
        plan, rank = self.rank.plan, self.rank
        return compile_progress.shown(
            type(rank.module).__name__,
            here=rank.everyone.first(),
            inductor=plan.backend == "inductor",
            searched=plan.memory_budget is not None,
        )

    def _open_sizes(self, match: _Found, sizes: CallSizes) -> SymbolicSizes | None:
        """Return what the capture of a call's program treats as symbols. Python numbers (a counter in the model's
        attributes, say) that differ from those that the program before it was captured with become inputs.
        """
        asked, before = with_values(sizes.open_sizes(), sizes.call.constants), self.rank.entries.get(match.before or "")
        if not sizes.gives_numbers:
            return dataclasses.replace(asked, numbers=()) if asked is not None else None
        if before is not None:
            args, kwargs = sizes.call.call
            changed = before.trace.flat.changed_numbers(self.rank.module, args, kwargs)
            if changed:
                asked = asked or SymbolicSizes({}, {})
                asked = dataclasses.replace(asked, numbers=tuple(dict.fromkeys([*asked.numbers, *changed])))
        sizes.takes_numbers = bool(asked is not None and asked.numbers)
        return asked

    def _asked(self, sizes: CallSizes, *, refused: bool) -> dict[str, int] | None:
        """Return the sizes of the first rank whose program refuses them; None if no rank's does. All ranks must call
        it.
        """
        if not sizes.point:
            return None
        views = self.rank.everyone.gather("sizes that a program refuses", dict(sizes.point) if refused else None)
        return next((view for view in views if view is not None), None)

    def _keep(self, match: _Found, entry: Entry, sizes: CallSizes) -> None:
        rank = self.rank
        args, kwargs = sizes.call.call
        _refuse_unstable(entry.trace.flat.stale(rank.module, args, kwargs))
        entry.unsettled_before = match.before is not None and rank.entries[match.before].unsettled
        rank.entries[match.key] = entry
        base = match.key.split(_STATE)[0]
        self._states.setdefault(base, []).append(match.key)
        self._made[base] = self._made.get(base, 0) + 1
        self._programs += 1
        self._last[match.key] = self._calls
        self._bound[match.key] = entry.trace.flat.bind(lambda *flat: self._execute(entry, flat))
        if (values := self._values.settled()) and rank.everyone.first():
            logger.warning(
                "each value of %s has a program of its own, but for elements that only set sizes: forward decides by it "
                '(to declare it, with a program for each value: dynamic={"%s": "value"})',
                ", ".join(values),
                values[0],
            )
        many = entry.open or buckets_of(rank.plan) is not None
        before = rank.entries.get(match.before or "")
        stale = before.trace.flat.stale(rank.module, args, kwargs) if before is not None else None
        self._storms.made(sizes.call, stale.what if stale else None, many=many, tell=rank.everyone.first())
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
    """Raise `CaptureError` if Python state that a forward has just been captured with does not hold any more."""
    if stale is not None:
        raise CaptureError(
            "the model's forward reads Python state that is another at every read",
            where=stale.where,
            why=f"not true straight after the capture: {stale.what}",
            hint="let what it reads (a property, a function's result) be the same object, or an equal value, while nothing has changed",
        )
