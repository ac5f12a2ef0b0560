"""Lets ranks publish where they are, so that a rank that is stuck or gone is named by those that wait for it.

A thread of each rank writes its progress (`zgraph/ranks/progress.py`; the node and the user's line are read off the
stack of the running thread) into the default process group's store, every `interval` seconds. Nobody reads it until a
collective has failed, or has lasted for half of its timeout: then a rank whose heartbeat goes on is alive, and its
count of programs tells whether it is behind; a rank whose heartbeat does not go on is stopped or dead. Only the ranks
of the waiting group are judged, by what they did in that group. Clocks of different machines are never compared.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import socket
import sysconfig
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from zgraph.program import collectives
from zgraph.program.node import place_of
from zgraph.ranks import progress
from zgraph.ranks.foreseen_actions import answer_all
from zgraph.ranks.thread_stacks import StackFrame, stack_of
from zgraph.torch_compat import process_groups

if TYPE_CHECKING:
    from zgraph.plan.watchdog import Watch
    from zgraph.ranks.agreement import Agreement

logger = logging.getLogger(__name__)


def _folders(package: str) -> list[str]:
    spec = find_spec(package)
    return list(spec.submodule_search_locations or ()) if spec is not None else []


PATIENCE = 2.5  # intervals without a heartbeat after which a rank counts as gone
BETWEEN = 10**9  # the order of a rank that has left its program or vote
SHOWN = 8  # ranks that are listed
_NOT_THE_USERS = (
    sysconfig.get_path("stdlib"),
    *(folder for name in ("torch", "zgraph", "zgraph.passes", "zgraph.codegen") for folder in _folders(name)),
)


@dataclass(frozen=True)
class Beat:
    """A heartbeat: where a rank is."""

    number: int  # counts this rank's heartbeats
    state: str  # "alive", "failed" (it has raised a CollectiveError) or "left" (it watches no more)
    step: int  # the optimizer step, from 1
    micro_batch: int  # the micro-batch, from 0
    group: str  # the group that it runs a program or votes with; "" if none
    counts: dict[str, int]  # programs and votes entered so far, by group
    order: int  # position of the node in its program; `BETWEEN` outside of programs
    where: str  # the program, node and line, in words
    still: float  # seconds since group, counts and order last changed
    pid: int  # its process
    host: str  # its machine
    absent: tuple[int, ...] = ()  # ranks that its CollectiveError named

    def at(self, group: str) -> tuple[int, int]:
        """Return how far the rank is in what this group does, as (count, order)."""
        return self.counts.get(group, 0), self.order if self.group == group else BETWEEN

    def shown(self) -> str:
        return f"step {self.step}, micro-batch {self.micro_batch}, {self.where}"


class Pulse:
    """One rank's heartbeat, and its reading of the others'. Its thread refers to this object only."""

    def __init__(self, store: Any, rank: int, interval: float) -> None:
        self.store = store
        self.rank = rank
        self.interval = interval
        self.pid = os.getpid()
        self.stop = threading.Event()
        self._lock = threading.RLock()  # (a finaliser may end this while its own thread is in here)
        self._host = socket.gethostname()
        self._number = 0
        self._at: tuple[str, dict[str, int], int] | None = None
        self._since = time.monotonic()
        self._told: tuple[str, dict[str, int]] | None = None  # where this rank was at its last warning
        self._first: tuple[float, dict[int, Beat]] | None = None

    # -- this rank ----------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Publish heartbeats until told to stop, or until the store is gone: the body of the thread."""
        while not self.stop.wait(self.interval):
            try:
                beat = self.publish("alive")
                self._warn(beat)
                answer_all()
            except Exception as error:  # (the store has ended before this process: there is nobody to tell)
                logger.debug("no more heartbeats: %s", error)
                return

    def publish(self, state: str, node: fx.Node | None = None, absent: Sequence[int] = ()) -> Beat:
        """Publish where this rank is, or at which node it failed. Raises what the store raises."""
        with self._lock:
            here = progress.HERE
            group, order, where = _place(node)
            counts = {_name(ranks): count for ranks, count in here.counts.copy().items()}
            if (group, counts, order) != self._at:
                self._at, self._since = (group, counts, order), time.monotonic()
            self._number += 1
            still = time.monotonic() - self._since
            beat = Beat(
                self._number,
                state,
                here.step,
                here.micro_batch,
                group,
                counts,
                order,
                where,
                still,
                self.pid,
                self._host,
                tuple(absent),
            )
            self.store.set(str(self.rank), json.dumps(asdict(beat)))
            return beat

    def _warn(self, mine: Beat) -> None:
        """Warn once which ranks this rank waits for, when it has not moved for half of a collective's timeout."""
        group = _watched(progress.HERE.others)
        usual = process_groups.timeout_of(group.group) if group is not None else None
        if group is None or usual is None or mine.group != _name(tuple(group.ranks)):
            self._first = None
            return
        ranks, limit, here = group.ranks, usual.total_seconds(), (mine.group, mine.counts)
        if mine.still < limit / 2 or self._told == here:
            self._first = None
        elif self._first is None:
            self._first = time.monotonic(), self.read(ranks)
        elif time.monotonic() - self._first[0] >= PATIENCE * self.interval:
            text, absent = _told(mine, self._first[1], self.read(ranks), self._other_ranks(ranks))
            self._told, self._first = here, None
            said = f"it waits for rank(s) {_listed(absent)}" if absent else "no rank is behind it"
            allowed = f"a collective may take {limit:.0f} s"
            logger.warning("rank %d has not moved for %.0f s (%s): %s\n%s", self.rank, mine.still, allowed, said, text)

    # -- the others ---------------------------------------------------------------------------------------------------
    def read(self, ranks: Sequence[int]) -> dict[int, Beat]:
        """Return the last heartbeat of each of these ranks that has one, except this rank."""
        with self._lock:
            known = [r for r in self._other_ranks(ranks) if self.store.check([str(r)])]
            texts = [self.store.get(str(r)) for r in known]
        return {r: _beat(text) for r, text in zip(known, texts, strict=True)}

    def _other_ranks(self, ranks: Sequence[int]) -> list[int]:
        return [r for r in sorted(ranks) if r != self.rank]

    def report(self, node: fx.Node | None, ranks: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """Return what is known of the other ranks, and which of them had not arrived, after a collective of this rank
        has failed at `node` (None: a vote).
        """
        try:
            mine = self.publish("failed", node)
            first = now = self.read(ranks)
            others = self._other_ranks(ranks)
            end = time.monotonic() + PATIENCE * self.interval
            while time.monotonic() < end and not all(_answers(first.get(r), now.get(r)) for r in others):
                time.sleep(min(0.05, self.interval))
                now = self.read(ranks)
            text, absent = _told(mine, first, now, others)
            self.publish("failed", node, absent)
            return text, absent
        except Exception as error:
            said = str(error).strip().splitlines()
            return (
                f"where the other ranks are can't be told: the store that they tell it to is gone ({said[0] if said else type(error).__name__}). "
                "It lives in rank 0, unless a launcher keeps it: that rank is probably the one that is gone"
            ), ()

    def end(self) -> None:
        """Stop, and publish that this rank watches no more."""
        if os.getpid() != self.pid:
            return
        self.stop.set()
        with contextlib.suppress(Exception):
            self.publish("left")


class Heart:
    """Keeps a pulse and its thread going for as long as it lives. `store` is the process group's; raises what the store
    raises.
    """

    def __init__(self, store: Any, rank: int, interval: float) -> None:
        self.store = store
        # (its own connection: a wait in the other one does not hold this one up)
        self.pulse = pulse = Pulse(process_groups.own_store(store, "zgraph/heartbeat"), rank, interval)
        thread = threading.Thread(target=pulse.run, name="zgraph-heartbeat", daemon=True)
        weakref.finalize(self, _end, pulse, thread)
        pulse.publish("alive")
        thread.start()


def _end(pulse: Pulse, thread: threading.Thread) -> None:
    pulse.end()
    if os.getpid() == pulse.pid and thread is not threading.current_thread():
        thread.join(timeout=5.0)  # (a thread that is in C++ when the interpreter exits ends the process in an ugly way)


_heart: weakref.ref[Heart] | None = None


def watch(plan: Watch, agreement: Agreement, groups: Sequence[Any]) -> None:
    """Let the ranks of `agreement` watch each other as the plan says, while it lives; `groups` are the process groups
    of its mesh.
    """
    if agreement.group is None or process_groups.is_fake(agreement.group):
        return
    agreement.set_timeout(plan.timeout, groups)
    agreement.heart = _shared(plan.interval) if plan.interval else None


def _shared(interval: float) -> Heart | None:
    """Return the heart of this process, shared by all models of a process group. None, with a warning, if its store
    does not work.
    """
    global _heart
    store = process_groups.default_store()
    heart = _heart() if _heart is not None else None
    if heart is not None and heart.store is store and not heart.pulse.stop.is_set():
        heart.pulse.interval = min(heart.pulse.interval, interval)
        return heart
    try:
        new_heart = Heart(store, torch.distributed.get_rank(), interval)
    except RuntimeError as error:
        logger.warning("ranks can't watch each other: %s", error)
        return None
    _heart = weakref.ref(new_heart)
    return new_heart


def _report(node: Any) -> tuple[str, tuple[int, ...]] | None:
    group = _watched(progress.HERE.others)
    return group.heart.pulse.report(node, group.ranks) if group is not None else None


def _watched(group: progress.Together | None) -> progress.Together | None:
    """Return this group if its ranks watch each other and this process made the heart (it was not forked since); else
    None.
    """
    return group if group is not None and group.heart is not None and group.heart.pulse.pid == os.getpid() else None


def _forget() -> None:
    """Forget the heart in a forked process, which does not have its thread."""
    global _heart
    _heart = None


progress.report_by(_report)
os.register_at_fork(after_in_child=_forget)


# -- texts ------------------------------------------------------------------------------------------------------------
def _beat(text: bytes) -> Beat:
    fields = json.loads(text)
    return Beat(**{**fields, "absent": tuple(fields["absent"])})


def _answers(first: Beat | None, now: Beat | None) -> bool:
    """Return whether a rank has written since it was first read, or has written its last heartbeat."""
    return now is not None and (now.state != "alive" or (first is not None and now.number > first.number))


def _told(
    mine: Beat, first: dict[int, Beat], now: dict[int, Beat], others: Sequence[int]
) -> tuple[str, tuple[int, ...]]:
    """Return what is known of the other ranks, and which of them have not arrived where this one is."""
    absent: list[int] = []
    lines: list[str] = []
    for rank in others:
        line, arrived = _line(mine, first.get(rank), now.get(rank))
        if line is not None:
            lines.append(f"rank {rank} {line}")
        if not arrived:
            absent.append(rank)
    if not absent:
        absent = sorted({r for beat in now.values() for r in beat.absent})
        lines = lines or ["all other ranks are at the same place"]
    if len(lines) > SHOWN:
        lines = [*lines[:SHOWN], f"… and {len(lines) - SHOWN} more"]
    return "\n".join([f"this rank is at {mine.shown()}", *lines]), tuple(absent)


def _line(mine: Beat, first: Beat | None, now: Beat | None) -> tuple[str | None, bool]:
    """Return what to say of another rank (None: nothing), and whether it has arrived."""
    if now is None:
        return "has told nothing yet", False
    if now.state == "left":
        return (
            f"watches no more (its model is gone, or its process has ended in order); it was last at {now.shown()}",
            False,
        )
    if now.state == "failed":
        of = f", for want of rank(s) {_listed(now.absent)}" if now.absent else ""
        return f"has failed too{of}: it was at {now.shown()}", True
    if not _answers(first, now):
        return f"is gone: no heartbeat ({_process(mine, now)}); it was last at {now.shown()}", False
    if now.at(mine.group) < mine.at(mine.group):
        return f"is alive, and has not arrived: for {now.still:.0f} s it has been at {now.shown()}", False
    return None, True


def _process(mine: Beat, other: Beat) -> str:
    """Return what is known of a process's state, if it is on this machine."""
    if mine.host != other.host or not os.path.isdir("/proc/self"):
        return f"process {other.pid} on {other.host} was killed or stopped, or can't be reached"
    try:
        state = Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return f"process {other.pid} has ended"
    texts = {
        "T": "is stopped, by SIGSTOP or a debugger",
        "t": "is stopped by a debugger",
        "Z": "has ended",
        "X": "has ended",
    }
    return f"process {other.pid} {texts.get(state, 'is there, and its threads are held up')}"


@functools.lru_cache
def _name(ranks: tuple[int, ...]) -> str:
    """Return the name of a group of ranks in heartbeats; "" for no ranks."""
    return hashlib.sha256(str(ranks).encode()).hexdigest()[:16] if ranks else ""


def _place(node: fx.Node | None) -> tuple[str, int, str]:
    """Return (group, the node's position in its program, a description) of where this process is: at `node`, if
    given.
    """
    here = progress.HERE
    inside, others = here.inside, here.others
    group = _name(tuple(others.ranks)) if others is not None else ""
    if isinstance(inside, str):
        return group, 0, f"in {inside}"
    if inside is not None:
        node = node or inside.running_node(stack_of(here.thread))
        if node is None:
            return group, 0, f"in {inside.program.name}"
        if collectives.is_wait(node):
            node = collectives.start_of(node)
        order = list(inside.program.graph.nodes).index(node)
        return group, order, f"in {inside.program.name} at {node.name} ({place_of(node)})"
    return (
        "",
        BETWEEN,
        f"between two programs, {_line_of(stack_of(here.caller or threading.main_thread().ident or 0))}",
    )


def _line_of(stack: Sequence[StackFrame]) -> str:
    """Return the innermost line of the user's own code that a thread is in, in words."""
    own = [line for line in stack if not line.file.startswith(("<", *_NOT_THE_USERS))]
    for frame in (*own, *stack):
        return f"in {frame.function}, {frame.file}:{frame.number}"
    return "nowhere in Python"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:SHOWN])) + (", …" if len(ranks) > SHOWN else "")
