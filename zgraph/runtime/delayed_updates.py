"""Updates that run beside the next step: one step late.

The next forward and backward compute with the weights before the update, which is made on copies of them (the states
"ahead") in a thread of its own. At the step after, the copies become the weights, and the next update begins: the
one-step delayed parameter update of ZeRO-Offload (Ren et al., 2021). Its results are not those of updates in time.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from zgraph.codegen.update_chunks import UpdateExecutable
from zgraph.errors import PlanError
from zgraph.offload.run_transfers import apart
from zgraph.parameters.shards import Shards
from zgraph.program import collectives
from zgraph.program.node import info
from zgraph.ranks import progress
from zgraph.update.build_update import AHEAD
from zgraph.update.states import States


class DelayedUpdates:
    """The delayed update of one module, and the weights that it makes. A weight that something else changed meanwhile
    (a load, say; torch counts no writes through `.data`) keeps that value, and updates go on from there.
    """

    def __init__(self, shards: Shards, states: States, device: torch.device) -> None:
        self.shards = shards
        self.states = states
        self._threads = ThreadPoolExecutor(1, "zgraph-update")
        weakref.finalize(self, self._threads.shutdown, wait=False)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._running: Future[None] | None = None
        self._versions: dict[str, tuple[int, ...]] = {}  # versions of the weights that only updates have changed since
        self._new = False  # whether the copies hold weights that the model does not have yet

    def start(self, rest: Callable[[], None]) -> None:
        """Run the rest of an update in a thread."""
        for name in self._made():
            self._versions.setdefault(name, self.shards.version(name))
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._new = True
        self._running = self._threads.submit(self._run, rest)

    def _run(self, rest: Callable[[], None]) -> None:
        with (
            apart(),
            progress.aside(),
            torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext(),
        ):
            rest()
        if self._stream is not None:
            self._stream.synchronize()

    def wait(self) -> None:
        """Wait for the update in progress. Raises what it raised."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def publish(self) -> list[str]:
        """Copy the last update's weights into the model, and return the names of those written."""
        written = []
        for name in self._made():
            ahead, mine = self.states[f"{name}/{AHEAD}"], self.shards.local(name)
            if self.shards.version(name) != self._versions.get(name):
                ahead.copy_(mine)
            elif self._new:
                mine.copy_(ahead)
                written.append(name)
        return written

    def published(self) -> None:
        """Note that the weights equal their copies, and that their writes are counted."""
        self._versions = {name: self.shards.version(name) for name in self._made()}
        self._new = False

    def loaded(self) -> None:
        """Note that the states were loaded, after the weights that they belong to."""
        self._versions = {name: self.shards.version(name) for name in self._made()}
        self._new = True

    def adopt(self, other: DelayedUpdates) -> None:
        """Continue from the state of another `DelayedUpdates`."""
        unchanged = [n for n, version in other._versions.items() if other.shards.version(n) == version]
        self._versions, self._new = {n: self.shards.version(n) for n in unchanged}, other._new

    def _made(self) -> list[str]:
        return [n for n in self.states.options.late() if f"{n}/{AHEAD}" in self.states.tensors]


def refuse_late_collectives(executable: UpdateExecutable) -> None:
    """Raise `PlanError` for an update whose late part communicates."""
    starts = [n for c in executable.late for n in c.executable.program.graph.nodes if collectives.is_start(n)]
    if starts:
        raise PlanError(
            f"the update of {info(starts[0]).param} communicates, and can't run late",
            where="offload.delayed_after",
            why="ranks would communicate in another order than the next step, which runs beside it",
            hint="an optimizer that works on each rank's rows alone (AdamW, SGD, Adagrad, Lion), or leave it out",
        )
