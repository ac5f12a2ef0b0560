"""A link to a rank that is not there: the c10d backend "emulated", for measurements on a single GPU.

    with emulated() as link:        # a process group of 2 ranks, of which this process is the first
        link.rate = 50e9            # bytes per second; None: as fast as memory copies
        …

The second rank is taken to hold what this one does: a gather repeats the shard, a reduce-scatter averages equal parts and
gives this rank's rows, an average over ranks is what it was. All else is as over NCCL. A collective starts behind what the
current stream has been given so far, runs on the link's own stream, one after another, and its wait lets the current stream,
not the host, wait for it; until then the work holds its tensors. There it sleeps for as long as a link of the rate would take,
and then copies: who reads too early reads what was there before.

On CPU there are no streams. A transfer copies only when it is waited for, or when a later one is that stands behind it, and the
wait sleeps until the link would have been done: who writes to an operand too early, or reads a result, is found there too.

With `shake` every start and wait is held up for a random time, on the link and on the stream that computes (on CPU,
transfers copy anywhere between start and wait), and what will be written is filled with NaN at the start.

Integers, which only ranks' votes send, take no time and are no business of the link's: over NCCL the host sends them by itself.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.distributed import distributed_c10d

WORLD = 2
WAITED = "emulated link: waited"  # what a profile on CPU shows for a wait
ROUNDS = {"all_reduce": 2}  # of a ring, by kind of collective; 1 for others


@dataclass(frozen=True)
class Sent:
    """One transfer: `whole` are the bytes of what was gathered, or is to be reduced, over all ranks."""

    kind: str
    whole: int


class Link:
    """What becomes of transfers.

    Seconds are those of the ring algorithm, as `zgraph.passes.analysis.costs` counts them: `rate` in bytes per second and direction
    (None: no time at all), `latency` in seconds. With `beside` false a collective runs where it starts, on the stream that
    computes. `sent` has the transfers so far.
    """

    def __init__(self, rate: float | None = None, latency: float = 0.0) -> None:
        self.rate = rate
        self.latency = latency
        self.beside = True
        self.sent: list[Sent] = []
        self._random: random.Random | None = None
        self._longest = 0.0
        self._queue: deque[_Late] = deque()
        self._free = 0.0  # when the link will be done, on CPU
        self._stream: Any = None
        self._cycles = 0.0  # a second's

    def shake(self, seed: int | None, longest: float = 2e-3) -> None:
        """Hold everything up at random from now on, by at most `longest` seconds each time; None: no longer."""
        self._random, self._longest = (None if seed is None else random.Random(seed)), longest

    @property
    def shaken(self) -> bool:
        return self._random is not None

    def seconds(self, sent: Sent) -> float:
        """The time that a transfer takes on the link, alone."""
        if self.rate is None:
            return 0.0
        rounds = ROUNDS.get(sent.kind, 1)
        return (WORLD - 1) * rounds * (self.latency + sent.whole / WORLD / self.rate)

    def start(self, sent: Sent, move: Callable[[], None], tensors: Sequence[torch.Tensor]) -> Work:
        """Begin a transfer, which `move` carries out and which reads and writes `tensors`."""
        if not tensors[0].is_floating_point():
            move()
            return _Done()
        self.sent.append(sent)
        begin = self._on_stream if tensors[0].is_cuda else self._later
        return begin(self.seconds(sent), move, tensors)

    def alone(self, sent: Sequence[Sent], device: torch.device, repeat: int) -> float:
        """Seconds in which the link carries these transfers with nothing beside them; the median."""
        most = max((s.whole for s in sent), default=0)
        source, target = (torch.empty(most // 4 + 1, device=device) for _ in range(2))

        def copy(whole: int) -> Callable[[], None]:
            def move() -> None:
                target[: whole // 4].copy_(source[: whole // 4])

            return move

        times, before = [], len(self.sent)
        for _ in range(repeat):
            begin = time.perf_counter()
            for work in [self.start(s, copy(s.whole), [source, target]) for s in sent]:
                work.wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - begin)
        del self.sent[before:]
        return statistics.median(times)

    # -- streams ------------------------------------------------------------------------------------------------------
    def _on_stream(self, seconds: float, move: Callable[[], None], tensors: Sequence[torch.Tensor]) -> Work:
        device = tensors[0].device
        if self._stream is None:
            self._cycles = cycles_per_second(device)
            self._stream = torch.cuda.Stream(device)
        if not self.beside:
            self.sleep(seconds)
            move()
            return _Done()
        self.hold_up()
        current = torch.cuda.current_stream(device)
        self._stream.wait_event(current.record_event())
        with torch.cuda.stream(self._stream):
            self.sleep(seconds)
            self.hold_up()
            move()
            done = self._stream.record_event()
        self.hold_up()
        return _Behind(self, done, tensors)

    def sleep(self, seconds: float) -> None:
        """Let the current CUDA stream do nothing for so long. (Nothing where no transfer has been on a GPU.)"""
        if seconds > 0 and self._stream is not None:
            torch.cuda._sleep(int(seconds * self._cycles))

    def hold_up(self) -> None:
        """A random delay on the current CUDA stream, while everything is shaken: mostly short, sometimes long."""
        if self._random is not None:
            self.sleep(self._longest * self._random.random() ** 3)

    # -- no streams ---------------------------------------------------------------------------------------------------
    def _later(self, seconds: float, move: Callable[[], None], tensors: Sequence[torch.Tensor]) -> Work:
        if not self.beside:
            time.sleep(seconds)
            move()
            return _Done()
        self._free = max(time.perf_counter(), self._free) + seconds
        work = _Late(self, move, self._free)
        self._queue.append(work)
        while self._random is not None and self._queue and self._random.random() < 0.5:
            self._queue.popleft().run()
        return work

    def arrive(self, work: _Late) -> None:
        """Return when that transfer is over."""
        while not work.over:
            self._queue.popleft().run()
        if (left := work.due - time.perf_counter()) > 0:
            with torch.profiler.record_function(WAITED):
                time.sleep(left)


def cycles_per_second(device: torch.device) -> float:
    """Of the clock by which `torch.cuda._sleep` counts, as the GPU runs now."""
    cycles = 10**8
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # (the first one wakes the GPU)
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        torch.cuda.synchronize(device)
    return cycles / (begin.elapsed_time(end) / 1e3)


class _Done(Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


class _Behind(Work):
    """A transfer on the link's stream. It holds its tensors until someone has waited: from then on the allocator, which knows
    only the stream that they are from, may give their memory away."""

    def __init__(self, link: Link, done: Any, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.link, self.done, self.device = link, done, tensors[0].device
        self.tensors: Sequence[torch.Tensor] | None = tensors

    def wait(self, timeout: Any = None) -> bool:
        self.link.hold_up()
        torch.cuda.current_stream(self.device).wait_event(self.done)
        self.link.hold_up()
        self.tensors = None
        return True


class _Late(Work):
    """A transfer on CPU, which is `over` once `run`; `due` is when the link has carried it."""

    def __init__(self, link: Link, move: Callable[[], None], due: float) -> None:
        super().__init__()
        self.link, self.due = link, due
        self.move: Callable[[], None] | None = move

    @property
    def over(self) -> bool:
        return self.move is None

    def run(self) -> None:
        assert self.move is not None
        self.move()
        self.move = None

    def wait(self, timeout: Any = None) -> bool:
        self.link.arrive(self)
        return True


class Group(dist.ProcessGroup):
    """What a collective does to this rank's tensors. Torch 2.13 has other names than 2.11 for some of these."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        if (rank, size) != (0, WORLD):
            raise ValueError(f"one process is rank 0 of {WORLD}, not rank {rank} of {size}")
        self.link = Link()

    def size(self) -> int:
        return WORLD

    def rank(self) -> int:
        return 0

    @property
    def group_name(self) -> str:
        return distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:
        return "emulated"

    def _gather(self, kind: str, pairs: list[tuple[Sequence[torch.Tensor], torch.Tensor]]) -> Work:
        """Each pair is the ranks' parts of a result, and what this rank gives."""

        def move() -> None:
            for parts, mine in pairs:
                for part in parts:
                    part.copy_(mine)

        results = [part for parts, _ in pairs for part in parts]
        self._spoil(results)
        return self.link.start(Sent(kind, _bytes(results)), move, [*results, *(mine for _, mine in pairs)])

    def _scatter(self, pairs: list[tuple[torch.Tensor, torch.Tensor]], op: Any) -> Work:
        """Each pair is a result, and what this rank gives of all rows."""

        factor = _factor(op)

        def move() -> None:
            for mine, whole in pairs:
                mine.copy_(whole[: mine.shape[0]])
                if factor != 1:
                    mine.mul_(factor)

        self._spoil([mine for mine, _ in pairs])
        wholes = [whole for _, whole in pairs]
        return self.link.start(Sent("reduce_scatter", _bytes(wholes)), move, [t for pair in pairs for t in pair])

    def _all_reduce(self, tensors: list[torch.Tensor], op: Any) -> Work:
        factor = _factor(op)

        def move() -> None:
            for tensor in tensors if factor != 1 else ():
                tensor.mul_(factor)

        return self.link.start(Sent("all_reduce", _bytes(tensors)), move, tensors)

    def _spoil(self, results: list[torch.Tensor]) -> None:
        if self.link.shaken and self.link.beside:
            for result in results:
                if result.is_floating_point():
                    result.fill_(float("nan"))

    # -- what c10d calls ----------------------------------------------------------------------------------------------
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._gather("all_gather", list(zip(outputs, inputs, strict=True)))

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [input])

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._gather("all_gather", [(o.chunk(WORLD), i) for o, i in zip(outputs, inputs, strict=True)])

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any) -> Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        return self._scatter(list(zip(outputs, inputs, strict=True)), opts.reduceOp)

    def allreduce(self, tensors: Any, opts: Any) -> Work:
        return self._all_reduce(tensors, opts.reduceOp)

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        return _Done()

    def barrier(self, opts: Any = None) -> Work:
        return _Done()

    allreduce_coalesced = allreduce
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _factor(op: Any) -> int:
    """How many times itself a tensor is when it has been reduced with an equal one. (`op` lives no longer than the call.)"""
    if op == dist.ReduceOp.SUM:
        return WORLD
    if any(op == same for same in (dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN)):
        return 1
    raise NotImplementedError(f"the emulated link has no reduction {op}")


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


dist.Backend.register_backend("emulated", lambda store, rank, size, timeout: Group(rank, size), devices=["cpu", "cuda"])


@contextlib.contextmanager
def emulated(rate: float | None = None, latency: float = 0.0) -> Iterator[Link]:
    """A default process group over a new link, until the end. It stands in for groups that are made beside it, too: no second
    process would join them."""
    dist.init_process_group("emulated", store=dist.HashStore(), rank=0, world_size=WORLD)
    try:
        group: Any = dist.group.WORLD
        group.link.rate, group.link.latency = rate, latency
        with mock.patch.object(dist, "new_group", lambda *_, **__: group):
            yield group.link
    finally:
        dist.destroy_process_group()
