"""How fast ranks exchange bytes, measured: gathers of several sizes and a straight line through their times.

A transfer of n bytes takes alpha + beta * n (Hockney, 1994, "The Communication Challenge for MPP"). Each is timed from
the moment at which all ranks are there: on the rank that came last, so the shortest time over a group's ranks is its own. The
slowest group counts. All are timed in two rounds, of which the faster counts.
"""

from __future__ import annotations

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


def measure_link(group: str, ranks: int, device: torch.device, agreement: Agreement) -> Link:
    """The link over the process group of this name, but for what it takes from computing. All ranks of the model must call
    it; they get the same answer."""
    bench = _Bench(group, ranks, device, agreement)
    transfers: list[Callable[[], torch.Tensor]] = []
    first: list[float] = []
    for size in SIZES:
        transfers.append(bench.gather(size))
        first.append(bench.time(transfers[-1]))
        if first[-1] > LONGEST:
            break
    sizes = SIZES[: len(transfers)]
    transfers.append(bench.scatter(sizes[-1]))
    first.append(bench.time(transfers[-1]))
    # What else runs on a machine makes transfers slower, never faster, and seldom lasts from one round to the next.
    *times, scattered = map(min, first, [bench.time(transfer) for transfer in transfers])
    latency, per_byte = fit_line(sizes, times)
    whole = (ranks - 1) / ranks
    return Link(
        bandwidth=whole / per_byte,
        latency=latency / (ranks - 1),
        scatter=max(scattered - latency, 0.1 * times[-1]) / (per_byte * sizes[-1]),
        joins=not bench.gloo,
    )


def fit_line(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """(seconds, seconds a byte): least squares of relative errors, so that small transfers count as much as large ones.
    Neither is negative."""
    import numpy as np

    x, y = np.asarray(sizes, dtype=float), np.asarray(times, dtype=float)
    fixed, slope = np.linalg.lstsq(np.stack([1 / y, x / y], axis=1), np.ones(len(y)), rcond=None)[0]
    if fixed < 0:
        fixed, slope = 0.0, (x / y).sum() / ((x / y) ** 2).sum()
    if slope <= 0:  # (all take as long: no link that is worth a rate)
        fixed, slope = float(y.min()), 1e-13
    return float(fixed), float(slope)


class _Bench:
    def __init__(self, group: str, ranks: int, device: torch.device, agreement: Agreement) -> None:
        self.group = group
        self.ranks = ranks
        self.device = device
        self.agreement = agreement
        self.watch = Stopwatch(device)
        self.gloo = process_groups.backend_of(group, device)[0] == "gloo"

    def gather(self, size: int) -> Callable[[], torch.Tensor]:
        """What starts a gather of `size` bytes in all, in the form in which programs have it on this transport."""
        rows = max(size // self.ranks // 4, 1)
        part = torch.zeros(rows, device=self.device)
        if self.gloo:
            return lambda: collectives.ALL_GATHER_INTO(  # type: ignore[no-any-return]
                part, self.ranks, self.group, out=torch.empty(rows * self.ranks, device=self.device)
            )
        return lambda: collectives.ALL_GATHER(part, self.ranks, self.group)  # type: ignore[no-any-return]

    def scatter(self, size: int) -> Callable[[], torch.Tensor]:
        """What starts a reduce-scatter of them, likewise."""
        whole = torch.zeros(max(size // self.ranks // 4, 1) * self.ranks, device=self.device)
        if self.gloo:
            return lambda: collectives.ALL_REDUCE(whole, "avg", self.group)  # type: ignore[no-any-return]
        return lambda: collectives.REDUCE_SCATTER(whole, "avg", self.ranks, self.group)  # type: ignore[no-any-return]

    def time(self, start: Callable[[], torch.Tensor]) -> float:
        """Seconds from a start to its end."""
        mine: list[float] = []
        for _ in range(REPEATS + 1):
            self.agreement.any("the start of a transfer", False)
            value = start()
            begin = self.watch.now()
            collectives.WAIT(value)
            mine.append(self.watch.between(begin, self.watch.now()))
        group = process_groups.ranks_of(self.group)
        views = self.agreement.gather(
            "times of transfers", (group, mine[1:])
        )  # (the first one of a size may make buffers)
        by_group: dict[tuple[int, ...], list[list[float]]] = {}
        for members, seconds in views:
            by_group.setdefault(members, []).append(seconds)
        slowest = ([min(same) for same in zip(*rows, strict=True)] for rows in by_group.values())
        return max(statistics.median(each) for each in slowest)
