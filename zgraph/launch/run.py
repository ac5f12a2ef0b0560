"""Running the command lines of a job side by side: their output is shown, and when one fails, or a rank dies, all of them are stopped, with
all that they have started."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TextIO

from zgraph.errors import MeshError
from zgraph.launch.process_tree import mark, send, tree
from zgraph.launch.rank_deaths import Death, Deaths

KEPT = 25  # lines of a failed node's output that are shown again
FOLLOWING = (
    5.0  # seconds in which a dead rank's node ends by itself, and in which the rank that others have lost is told of
)
PATIENCE = 10.0  # seconds between SIGTERM and SIGKILL
KILLED = 5.0  # seconds in which what got SIGKILL is gone; longer in the kernel alone (a disk that does not answer)
UNREACHABLE = 255  # ssh's exit code if it could not connect


@dataclass(frozen=True)
class Losses:
    """What a job may lose and go on."""

    nodes: int = 0  # so many nodes may fail: torchrun goes on with the others
    ranks: bool = False  # ranks may die: torchrun starts all of them again


NO_LOSSES = Losses()


@dataclass(frozen=True)
class _Shown:
    """Where the output of nodes goes."""

    out: TextIO  # all that is shown
    several: bool  # lines begin with their node's name
    deaths: Deaths  # reports of dead ranks are gathered here, and not shown as they come
    stopped: list[int]  # numbers of signals that end the job; SIGPIPE's where nobody reads what is shown

    def write(self, text: str) -> None:
        try:
            self.out.write(f"{text}\n")
            self.out.flush()
        except OSError:
            self.stopped.append(signal.SIGPIPE)


class _Node:
    """A running command line, in its own process group."""

    def __init__(self, name: str, line: Sequence[str], variables: Mapping[str, str], shown: _Shown) -> None:
        self.name = name
        self.last: collections.deque[str] = collections.deque(maxlen=KEPT)
        self._shown = shown
        self._mark = mark()
        self.process = subprocess.Popen(
            list(line),
            env={**os.environ, **variables, self._mark: "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            text = line.rstrip("\r\n")
            if not self._shown.deaths.take(self.name, text):
                self.last.append(text)
                self._shown.write(f"{self.name}: {text}" if self._shown.several else text)

    def left(self) -> Sequence[int]:
        """Return the processes of the command that still run, parents first: itself, and all that it has started."""
        running = self.process.poll() is None
        pids = tree(self._mark, self.process.pid if running else None)
        return [self.process.pid, *pids] if running and self.process.pid not in pids else pids

    def ask(self) -> None:
        """Send SIGTERM to the command's process group, to let it end what it has started; if the command has ended, to
        what is left of it."""
        if self.process.poll() is not None:
            send(self.left(), signal.SIGTERM)
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)

    def how(self) -> str:
        """Return how the command ended, which is over."""
        code = self.process.returncode
        if code == UNREACHABLE:
            return f"ended with {code}, which is ssh's own: the node did not answer, or refused the key"
        return f"was ended by signal {-code}" if code < 0 else f"ended with {code}"

    def finish(self) -> None:
        self._reader.join(timeout=2.0)


def run(
    lines: Mapping[str, Sequence[str]],
    variables: Mapping[str, str] | None = None,
    out: TextIO | None = None,
    losses: Losses = NO_LOSSES,
) -> int:
    """Run command lines, by their names, until all have ended; return 0, or the exit code of the rank or else of the node that failed first.

    When more is lost than `losses` allow, or this process is interrupted (SIGINT, SIGTERM, SIGHUP, unless it ignores them), or nobody reads
    its output any more, the others get SIGTERM, and SIGKILL `PATIENCE` seconds later, with all that they have started, which a command that has
    ended already may have left. The last lines of the rank that died first are shown again, before what followed of it; of a node where no rank
    says that it died, the node's. Raises `MeshError` for a line whose program is not there.
    """
    nodes: list[_Node] = []
    stopped: list[int] = []
    shown = _Shown(out or sys.stdout, len(lines) > 1, Deaths(), stopped)
    wanted = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    handlers = {n: signal.signal(n, lambda number, _: stopped.append(number)) for n in wanted}
    try:
        for name, line in lines.items():
            nodes.append(_Node(name, line, variables or {}, shown))
        failed = _first_failure(nodes, stopped, shown, losses)
        if failed is None and not stopped:
            return 0
        _end(nodes)
        if failed is None:
            return 128 + stopped[0]
        for node in nodes:
            node.finish()
        return _tell(failed, shown)
    except OSError as error:
        _end(nodes)
        raise MeshError(
            f"{name} could not be started", where=line[0], why=str(error), hint="install it; --launcher names others"
        ) from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _first_failure(nodes: Sequence[_Node], stopped: Sequence[int], shown: _Shown, losses: Losses) -> _Node | None:
    """Wait for and return the first node whose failure, or whose rank's, ends the job; None if all succeed, or this process is interrupted."""
    failed: list[_Node] = []
    limit = None  # when the job is ended, if it has not by itself
    while not stopped:
        running = [node for node in nodes if node.process.poll() is None]
        for node in nodes:
            if node.process.returncode and node not in failed:
                failed.append(node)
                if len(failed) <= losses.nodes:
                    shown.deaths.forget(node.name)
                    shown.write(f"zgraph launch: {node.name} {node.how()}; the job goes on without it")
        over, deaths = len(failed) > losses.nodes, shown.deaths.in_order()
        if not running:
            for node in nodes:
                node.finish()
            return failed[losses.nodes] if over else None
        if over or (deaths and not losses.ranks):
            limit = limit or time.monotonic() + FOLLOWING
            missing = deaths and deaths[0][0].followed()  # (the rank that all of these have lost)
            if (over and not missing) or time.monotonic() > limit:
                return failed[losses.nodes] if over else next(node for node in nodes if node.name == deaths[0][1])
        time.sleep(0.05)
    return None


def _end(nodes: Sequence[_Node]) -> None:
    for node in nodes:
        node.ask()
    limit = time.monotonic() + PATIENCE
    while time.monotonic() < limit and any(node.left() for node in nodes):
        time.sleep(0.05)
    limit = time.monotonic() + KILLED
    while (pids := [pid for node in nodes for pid in node.left()]) and time.monotonic() < limit:
        send(pids, signal.SIGKILL)  # (again, for what was started in the meantime)
        time.sleep(0.02)
    for node in nodes:
        node.process.poll()


def _tell(failed: _Node, shown: _Shown) -> int:
    """Show what failed first and what it printed last, then what followed; return its exit code."""
    deaths = shown.deaths.in_order()
    # (where all ranks that died say that they have lost another, it is on a node that says nothing of its ranks)
    if not deaths or (deaths[0][0].followed() and failed.name not in (node for _, node in deaths)):
        return _tell_of_a_node(failed, shown)
    first, node = deaths[0]
    shown.write(f"zgraph launch: {_name(first, node, shown)} {first.how()}, and the job with it. It printed last:")
    for line in first.last:
        shown.write(f"    {line}")
    if deaths[1:]:
        shown.write("zgraph launch: after it")
    for death, node in deaths[1:]:
        shown.write(f"    {_name(death, node, shown)} {death.how()}: {death.last[-1] if death.last else 'no output'}")
    return 1 if first.asked else _exit_code(first.code)


def _name(death: Death, node: str, shown: _Shown) -> str:
    return f"rank {death.rank} (local rank {death.local_rank} on {node if shown.several else death.host})"


def _tell_of_a_node(node: _Node, shown: _Shown) -> int:
    shown.write(f"zgraph launch: {node.name} {node.how()}; the others were ended. It printed last:")
    for line in node.last:
        shown.write(f"    {line}")
    return _exit_code(node.process.returncode)


def _exit_code(code: int) -> int:
    return code if code > 0 else 128 - code
