"""Real ranks for tests: processes on this machine that talk over gloo.

    with Ranks(2) as ranks:
        losses = ranks.run(train, 3)            # train(3) on both ranks: [rank 0's result, rank 1's]
        outcomes = ranks.attempt(disagree)      # the same, with each rank's exception in place of raising it

The processes stay between calls, and those of the fixtures `two` and `four` between files, so that a test costs no launch.
They are forked from a server that has imported torch already and has run nothing. Functions are named, not sent: they
must stand at the top of a test module.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any

_PRELOAD = [
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.tensor.experimental",
    "torch._dynamo",
    "torch.export._trace",
    "torch._inductor.compile_fx",
    "torch._inductor.graph",
    "torch._inductor.codegen.cpp",
    "setuptools",
    "zgraph.api.compiler",
    "pytest",
    "transformers.models.gpt2.modeling_gpt2",
]


_AT_FIRST = dict(os.environ)  # the environment before any test has changed it

kept: dict[Any, Any] = {}
"""On a rank: what functions there leave for each other until it gets another process group, at the latest at the end of a test file."""


def fresh_processes() -> ForkServerContext:
    """A context for processes that have run nothing: forks of the server, which has imported what they would import for seconds."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    changed = dict(os.environ)
    os.environ.clear()
    os.environ.update(_AT_FIRST)  # (torch reads settings there when the server imports it)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(changed)
    return context


@dataclass
class Outcome:
    """What became of one rank's call. `error` is None where it returned; a rank that died has neither."""

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    seconds: float = 0.0
    died: bool = False


class Ranks:
    """`world` processes, each with torch's default process group over gloo.

    `timeout` (seconds) is the process group's; `env` is added to the processes' environment.
    """

    def __init__(self, world: int, *, timeout: float = 180.0, env: dict[str, str] | None = None) -> None:
        self.world = world
        self.timeout = timeout
        self.env = env or {}
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, function: Callable[..., Any], *args: Any, limit: float = 600.0) -> list[Any]:
        """`function(*args)` on every rank; their results, in order. A rank's exception fails the test."""
        outcomes = self.attempt(function, *args, limit=limit)
        for rank, outcome in enumerate(outcomes):
            if outcome.error is not None:
                raise AssertionError(f"rank {rank} of {self.world}:\n{outcome.traceback}") from outcome.error
            if outcome.died:
                raise AssertionError(f"rank {rank} of {self.world} died")
        return [outcome.value for outcome in outcomes]

    def attempt(
        self,
        function: Callable[..., Any],
        *args: Any,
        limit: float = 600.0,
        lost: tuple[int, ...] = (),
        keep: bool = False,
    ) -> list[Outcome]:
        """`function(*args)` on each rank, whatever becomes of it; all are killed after `limit` seconds. Ranks that are `lost` are not waited
        for, and killed when the others are done. Processes that raised are killed too, unless one is to `keep` those of which all did and none
        has anything under way: these get another process group."""
        if not self._processes:
            self._start()
        begin = time.monotonic()
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send((function.__module__, function.__qualname__, args))
        outcomes = {rank: Outcome(died=True) for rank in lost}
        while len(outcomes) < self.world:
            waiting = {pipe: r for r, pipe in enumerate(self._pipes) if r not in outcomes}
            ready = wait(list(waiting), timeout=max(0.0, begin + limit - time.monotonic()))
            if not ready:
                late = sorted(waiting.values())
                self.stop()
                raise AssertionError(f"ranks {late} had not returned from {function.__qualname__} after {limit:.0f} s")
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    outcomes[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    outcomes[rank] = Outcome(died=True)
                outcomes[rank].seconds = time.monotonic() - begin
        if keep and all(o.error is not None for o in outcomes.values()):
            self.renew()
        elif any(o.error is not None or o.died for o in outcomes.values()):
            self.stop()  # what is left of the process group may be out of step
        return [outcomes[rank] for rank in range(self.world)]

    def renew(self) -> None:
        """Give the processes another process group, as new ones would have it: what they have imported stays, no group that was made since does."""
        if not self._processes:
            return
        assert self._directory is not None
        store = os.path.join(self._directory.name, f"store{time.monotonic_ns()}")
        self.attempt(
            _join, store, self.timeout, limit=60.0
        )  # (those that can't are stopped, and made anew by the next call)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _start(self) -> None:
        context = fresh_processes()
        self._directory = tempfile.TemporaryDirectory()
        store = os.path.join(self._directory.name, "store")
        for rank in range(self.world):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(
                    theirs,
                    rank,
                    self.world,
                    store,
                    self.timeout,
                    {**os.environ, "OMP_NUM_THREADS": "1", **self.env},
                ),
                daemon=False,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)


def _serve(pipe: Connection, rank: int, world: int, store: str, timeout: float, env: dict[str, str]) -> None:
    os.environ.clear()  # (the server that this was forked from has what was there when it began: perhaps a test's own)
    os.environ.update(env)
    if os.path.exists("/sys/class/net/lo"):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    gc.set_threshold(20_000, 20, 20)  # (this and the next: see conftest.py)
    gc.freeze()
    faulthandler.enable()  # a rank that crashes says where it was
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    measure_disks_briefly()
    _join(store, timeout, rank, world)
    while True:
        try:
            module, name, args = pipe.recv()
        except EOFError:
            return
        # By value: a tensor sent as a handle to shared memory is lost when its sender is faster than its reader.
        pipe.send_bytes(pickle.dumps(_call(module, name, args)))


def _join(store: str, timeout: float, rank: int | None = None, world: int | None = None) -> None:
    """Make the default process group, in place of the one that is there."""
    import torch.distributed as dist

    if dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
        kept.clear()
        gc.collect()  # (models that nobody has, which have groups)
        gc.freeze()  # (what stays is not searched again: at the end of each file, on each rank)
        dist.destroy_process_group()
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=limit)


def _call(module: str, name: str, args: tuple[Any, ...]) -> Outcome:
    import importlib

    try:
        function = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        outcome = Outcome(value=function(*args))  # type: ignore[operator]
    except BaseException as error:
        outcome = Outcome(error=error, traceback=traceback.format_exc())
    try:
        pickle.loads(pickle.dumps(outcome))
    except Exception as error:
        text = outcome.traceback or f"the result can't be sent: {error}"
        outcome = Outcome(error=RuntimeError(str(outcome.error or error)), traceback=text)
    sys.stdout.flush()
    sys.stderr.flush()
    return outcome


def measure_disks_briefly() -> None:
    """Let this process's models that offload to a disk measure it by a megabyte: what is written first takes half a second else."""
    from zgraph.offload import files

    files.TRIAL = 2**20


def die() -> None:
    """End this rank as the kernel's out-of-memory killer would."""
    os.kill(os.getpid(), signal.SIGKILL)
