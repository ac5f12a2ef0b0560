"""Running the command lines of a job side by side: their output is shown, and when one fails all of them are stopped, with
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
from typing import IO, TextIO

from zgraph.errors import MeshError
from zgraph.launch.process_tree import mark, send, tree

KEPT = 25  # lines of a failed node's output that are shown again
PATIENCE = 10.0  # seconds between SIGTERM and SIGKILL
KILLED = 5.0  # seconds in which what got SIGKILL is gone; longer in the kernel alone (a disk that does not answer)
UNREACHABLE = 255  # ssh's exit code if it could not connect


class _Node:
    """A running command line, in its own process group."""

    def __init__(self, name: str, line: Sequence[str], variables: Mapping[str, str], out: TextIO, prefix: bool) -> None:
        self.name = name
        self.last: collections.deque[str] = collections.deque(maxlen=KEPT)
        self._out, self._prefix = out, f"{name}: " if prefix else ""
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
            self.last.append(text)
            self._out.write(f"{self._prefix}{text}\n")
            self._out.flush()

    def left(self) -> set[int]:
        """Return the processes of the command that still run: itself, and all that it has started."""
        running = self.process.poll() is None
        pids = tree(self._mark, self.process.pid if running else None)
        return pids | {self.process.pid} if running else pids

    def ask(self) -> None:
        """Send SIGTERM to the command's process group, to let it end what it has started; if the command has ended, to
        what is left of it."""
        if self.process.poll() is not None:
            send(self.left(), signal.SIGTERM)
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)

    def finish(self) -> None:
        self._reader.join(timeout=2.0)


def run(
    lines: Mapping[str, Sequence[str]], variables: Mapping[str, str] | None = None, out: TextIO | None = None
) -> int:
    """Run command lines, by their names, until all have ended; return the exit code of the first that failed, else 0.

    When one fails, or this process is interrupted (SIGINT, SIGTERM, SIGHUP, unless it ignores them), the others get SIGTERM, and SIGKILL
    `PATIENCE` seconds later, with all that they have started, which a command that has ended already may have left. The last output of the
    failed one is shown again, with its name. Raises `MeshError` for a line whose program is not there.
    """
    shown = out or sys.stdout
    nodes: list[_Node] = []
    stopped: list[int] = []
    wanted = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    handlers = {n: signal.signal(n, lambda number, _: stopped.append(number)) for n in wanted}
    try:
        for name, line in lines.items():
            nodes.append(_Node(name, line, variables or {}, shown, len(lines) > 1))
        failed = _first_failure(nodes, stopped)
        if failed is None and not stopped:
            return 0
        _end(nodes)
        if failed is None:
            return 128 + stopped[0]
        failed.finish()
        code = failed.process.returncode
        _tell(failed, code, shown)
        return code if code > 0 else 128 - code
    except OSError as error:
        _end(nodes)
        raise MeshError(
            f"{name} could not be started", where=line[0], why=str(error), hint="install it; --launcher names others"
        ) from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _first_failure(nodes: Sequence[_Node], stopped: Sequence[int]) -> _Node | None:
    """Wait for and return the first node that fails; None if all succeed, or this process is interrupted."""
    while not stopped:
        codes = [node.process.poll() for node in nodes]
        failed = next((node for node, code in zip(nodes, codes, strict=True) if code), None)
        if failed is not None or all(code is not None for code in codes):
            for node in nodes:
                if node.process.returncode is not None:
                    node.finish()
            return failed
        time.sleep(0.05)
    return None


def _end(nodes: Sequence[_Node]) -> None:
    for node in nodes:
        node.ask()
    limit = time.monotonic() + PATIENCE
    while time.monotonic() < limit and any(node.left() for node in nodes):
        time.sleep(0.05)
    limit = time.monotonic() + KILLED
    while (pids := set[int]().union(*(node.left() for node in nodes))) and time.monotonic() < limit:
        send(pids, signal.SIGKILL)  # (again, for what was started in the meantime)
        time.sleep(0.02)
    for node in nodes:
        node.process.poll()


def _tell(node: _Node, code: int, out: TextIO) -> None:
    how = f"was ended by signal {-code}" if code < 0 else f"ended with {code}"
    if code == UNREACHABLE:
        how += ", which is ssh's own: the node did not answer, or refused the key"
    out.write(f"zgraph launch: {node.name} {how}; the others were ended. It printed last:\n")
    out.write("".join(f"    {line}\n" for line in node.last))
    out.flush()
