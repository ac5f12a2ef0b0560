"""The benchmark of the links between ranks: gathers of several sizes, and a straight line fitted to their times.

A transfer of n bytes takes alpha + beta * n (Hockney, 1994, "The Communication Challenge for MPP"). It is timed from the moment at which all ranks
have arrived, which is the time on the last rank: so a transfer's time is the shortest over the ranks of its group. The slowest group counts. All
transfers are timed in two rounds, of which the faster counts.

How much a transfer slows down computation is measured on products that run for longer than the transfer beside them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import torch

from zgraph.codegen.instrumented import Stopwatch
from zgraph.passes.analysis.costs import Link
from zgraph.program import collectives
from zgraph.ranks.agreement import Agreement
from zgraph.torch_compat import process_groups

SIZES = tuple(4**k for k in range(6, 13))  # bytes of the whole: 4 KiB to 16 MiB
LONGEST = 0.3  # seconds: a slow link is not given larger transfers once one takes this long
REPEATS = 7
QUICK = 3  # repeats under a time limit
SIDE = {"cpu": 192, "cuda": 2048}  # side length of the matrices in products beside transfers
SHARE = 150  # the time limit over that of a transfer: about 30 transfers, and the last size may take 4 times as long


def measure_link(
    group: str, ranks: int, device: torch.device, agreement: Agreement, seconds: float | None = None
) -> Link:
    """Measure the link over the process group of this name. All ranks of the model must call it; they get the same result.

    It takes about `seconds`, and then also measures how much transfers slow down computation; with None it takes as long as
    needed, and does not measure that.
    """
    bench = _Bench(group, ranks, device, agreement, REPEATS if seconds is None else QUICK)
    longest = LONGEST if seconds is None else seconds / SHARE
    transfers: list[Callable[[], torch.Tensor]] = []
    first: list[float] = []
    for size in SIZES:
        transfers.append(bench.gather(size))
        first.append(bench.time(transfers[-1]))
        if first[-1] > longest and len(first) > 1:
            break
    sizes = SIZES[: len(transfers)]
    transfers.append(bench.scatter(sizes[-1]))
    first.append(bench.time(transfers[-1]))
    # Other load on a machine makes transfers slower, never faster, and seldom lasts from one round to the next.
    *times, scattered = map(min, first, [bench.time(transfer) for transfer in transfers])
    latency, per_byte = fit_line(sizes, times)
    whole = (ranks - 1) / ranks
    link = Link(
        bandwidth=whole / per_byte,
        latency=latency / (ranks - 1),
        scatter=max(scattered - latency, 0.1 * times[-1]) / (per_byte * sizes[-1]),
        joins=not bench.gloo,
    )
    if seconds is None:
        return link
    longer, start = bench.taken(transfers[-2], times[-1])
    return link.model_copy(update={"work": min(longer / sizes[-1], 1 / link.bandwidth), "start": start})


def fit_line(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """Return (seconds, seconds per byte), neither negative, by least squares of relative errors, so that small
    transfers count as much as large ones."""
    import numpy as np

    x, y = np.asarray(sizes, dtype=float), np.asarray(times, dtype=float)
    fixed, slope = np.linalg.lstsq(np.stack([1 / y, x / y], axis=1), np.ones(len(y)), rcond=None)[0]
    if fixed < 0:
        fixed, slope = 0.0, (x / y).sum() / ((x / y) ** 2).sum()
    if slope <= 0:  # (all sizes take equally long: the bandwidth is practically unlimited)
        fixed, slope = float(y.min()), 1e-13
    return float(fixed), float(slope)


class _Bench:
    def __init__(self, group: str, ranks: int, device: torch.device, agreement: Agreement, repeats: int) -> None:
        self.group = group
        self.ranks = ranks
        self.repeats = repeats
        self.device = device
        self.agreement = agreement
        self.watch = Stopwatch(device)
        self.gloo = process_groups.backend_of(group, device)[0] == "gloo"

    def gather(self, size: int) -> Callable[[], torch.Tensor]:
        """Return a function that starts a gather of `size` bytes in all, with the operator that programs use on this
        transport."""
        rows = max(size // self.ranks // 4, 1)
        part = torch.zeros(rows, device=self.device)
        if self.gloo:
            return lambda: collectives.GATHER_APART(part, self.ranks, self.group)  # type: ignore[no-any-return]
        return lambda: collectives.ALL_GATHER(part, self.ranks, self.group)  # type: ignore[no-any-return]

    def scatter(self, size: int) -> Callable[[], torch.Tensor]:
        """Return a function that starts a reduce-scatter of `size` bytes in all, with the operator that programs use
        on this transport."""
        whole = torch.zeros(max(size // self.ranks // 4, 1) * self.ranks, device=self.device)
        if self.gloo:
            return lambda: collectives.ALL_REDUCE(whole, "avg", self.group)  # type: ignore[no-any-return]
        return lambda: collectives.REDUCE_SCATTER(whole, "avg", self.ranks, self.group)  # type: ignore[no-any-return]

    def time(self, start: Callable[[], torch.Tensor]) -> float:
        """Measure the seconds from a transfer's start to its end."""
        mine: list[float] = []
        for _ in range(self.repeats + 1):
            self.agreement.any("the start of a transfer", False)
            value = start()
            begin = self.watch.now()
            collectives.WAIT(value)
            mine.append(self.watch.between(begin, self.watch.now()))
        group = process_groups.ranks_of(self.group)
        views = self.agreement.gather(
            "times of transfers", (group, mine[1:])
        )  # (without the first one, which may allocate buffers)
        by_group: dict[tuple[int, ...], list[list[float]]] = {}
        for members, seconds in views:
            by_group.setdefault(members, []).append(seconds)
        slowest = ([min(same) for same in zip(*rows, strict=True)] for rows in by_group.values())
        return max(statistics.median(each) for each in slowest)

    def taken(self, transfer: Callable[[], torch.Tensor], seconds: float) -> tuple[float, float]:
        """Return (seconds by which a transfer of `seconds` slows down products, seconds that its start takes):
        medians over ranks."""
        side = SIDE[self.device.type]
        a, b, c = (torch.ones(side, side, device=self.device) for _ in range(3))

        def compute(calls: int) -> float:
            begin = self.watch.now()
            for _ in range(calls):
                torch.mm(a, b, out=c)
            return self.watch.between(begin, self.watch.now())

        compute(1)
        calls = max(1, math.ceil(1.5 * seconds / min(compute(1) for _ in range(QUICK))))
        alone, beside, starts = [], [], []
        for _ in range(QUICK):
            self.agreement.any("the start of products", False)
            alone.append(compute(calls))
            self.agreement.any("the start of products beside a transfer", False)
            begin = self.watch.now()
            value = transfer()
            starts.append(self.watch.between(begin, self.watch.now()))
            beside.append(compute(calls))
            collectives.WAIT(value)
        views = self.agreement.gather("what a transfer takes", (min(beside) - min(alone), min(starts)))
        longer, start = (statistics.median(column) for column in zip(*views, strict=True))
        return min(max(longer, 0.0), seconds), max(start, 0.0)
