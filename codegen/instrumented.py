"""A program that records when each of its calls begins and ends: what its operators really take.

*Contract.* A `Timed` runs the very code of its executable, with clock reads written into it around every line that
runs one node by itself (a product, a library call; in an eager program every operator). Between two such lines run
fused kernels, allocations and frees; their time belongs to the nodes that stand between the two in the program, and is
divided among them in proportion to their roofline times. So the seconds of a program's nodes add up to its whole time.

While `settles` is true each collective is waited for where it starts. Nothing then runs beside a kernel, and the time
of links is in no operator's time. Else the program runs as it is, and transfers beside its kernels slow these down.
"""

from __future__ import annotations

import bisect
import itertools
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zgraph.codegen.executable import Executable
from zgraph.passes.analysis.costs import Costs, computes
from zgraph.program import collectives

_MARK, _SETTLE = "zgraph_mark", "zgraph_settle"
_VALUE = re.compile(r"\s*(\w+) = ")


class Stopwatch:
    """Moments on a device: by the host's clock on CPU, by events on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Return the seconds from one moment to another; on CUDA this waits for the device."""
        if self.device.type != "cuda":
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


@dataclass(frozen=True)
class Run:
    """The durations of one run."""

    intervals: list[float]  # seconds before, in, between and after the calls: those at odd positions are calls

    @property
    def seconds(self) -> float:
        return sum(self.intervals)


class Timed:
    """A function that runs in place of `executable.function` (see `install`) and records moments."""

    def __init__(self, executable: Executable, watch: Stopwatch) -> None:
        self.executable = executable
        self.watch = watch
        self.settles = True
        self._records: list[list[Any]] = []
        self._moments: list[Any] = []
        self._original, self._source = executable.function, executable.source
        self._function, self._marked = executable.function, executable.source
        if executable.rebuild is not None:
            names = {_MARK: self._mark, _SETTLE: self._settle}
            self._marked = instrumented(executable)
            self._function = executable.rebuild(self._marked, names)

    def install(self) -> None:
        # (errors and heartbeats find the node that runs by its line)
        self.executable.function, self.executable.source = self, self._marked

    def remove(self) -> None:
        self.executable.function, self.executable.source = self._original, self._source

    def __call__(self, values: list[Any]) -> Sequence[Any]:
        self._moments = moments = [self.watch.now()]
        results = self._function(values)
        moments.append(self.watch.now())
        self._records.append(moments)
        return results

    def _mark(self) -> None:
        self._moments.append(self.watch.now())

    def _settle(self, value: Any) -> Any:
        for tensor in [value] if isinstance(value, torch.Tensor) else value:
            if self.settles:
                collectives.WAIT(tensor)
        return value

    def take(self) -> list[Run]:
        """Return the runs since the last call of `take`; on CUDA this waits for the device."""
        records, self._records = self._records, []
        return [Run([self.watch.between(a, b) for a, b in itertools.pairwise(r)]) for r in records]

    def starts(self, run: Run) -> tuple[float, int]:
        """Return (seconds in starts of collectives, number of starts) of a run."""
        nodes = list(self.executable.program.graph.nodes)
        calls = [(nodes[at], run.intervals[2 * i + 1]) for i, (_, at) in enumerate(self.executable.calls)]
        durations = [seconds for node, seconds in calls if collectives.is_start(node)]
        return sum(durations), len(durations)

    def longer(self, alone: Sequence[Run], beside: Sequence[Run]) -> float:
        """Return how many seconds more its computation takes with transfers `beside` it than `alone`.

        It is the sum of the differences of medians over all intervals but starts and waits.
        """
        if not alone or not beside:
            return 0.0
        nodes = list(self.executable.program.graph.nodes)
        moves = [collectives.is_start(nodes[at]) or collectives.is_wait(nodes[at]) for _, at in self.executable.calls]
        medians = [
            [statistics.median(t) for t in zip(*(r.intervals for r in runs), strict=True)] for runs in (alone, beside)
        ]
        counted = [i for i in range(len(medians[0])) if i % 2 == 0 or not moves[i // 2]]
        return sum(medians[1][i] - medians[0][i] for i in counted)

    def seconds(self, taken: Sequence[Run], costs: Costs) -> dict[fx.Node, float]:
        """Return the seconds of each node that computes, in these runs.

        They are medians over runs, scaled to add up to the median run: on a busy machine the median of a sum is more
        than the sum of medians. `costs` divides a fused kernel's time among its nodes.
        """
        runs = [run.intervals for run in taken]
        estimate = costs.compute(self.executable.program)
        node_seconds = shared([statistics.median(each) for each in zip(*runs, strict=True)], self.executable, estimate)
        whole = statistics.median(sum(shared(run, self.executable, estimate).values()) for run in runs)
        total = sum(node_seconds.values())
        return {node: seconds * whole / total for node, seconds in node_seconds.items()} if total else node_seconds


def instrumented(executable: Executable) -> str:
    """Return the executable's source with a mark before and after each of its calls, and a wait after each start of a
    collective."""
    nodes = list(executable.program.graph.nodes)
    calls = dict(executable.calls)
    lines = []
    for at, line in enumerate(executable.source.splitlines()):
        if at not in calls:
            lines.append(line)
            continue
        indent = line[: len(line) - len(line.lstrip())]
        lines += [f"{indent}{_MARK}()", line]
        if collectives.is_start(nodes[calls[at]]):
            value = _VALUE.match(line)
            if value is None:
                lines[-1] = f"{indent}{_SETTLE}({line.strip()})"
            elif "#" in line:
                lines.append(f"{indent}{_SETTLE}({value[1]})")
            else:  # (on its line, so that an error is that of the collective)
                lines[-1] = f"{line.rstrip()}; {_SETTLE}({value[1]})"
        lines.append(f"{indent}{_MARK}()")
    return "\n".join(lines) + "\n"


def shared(intervals: Sequence[float], executable: Executable, estimate: dict[fx.Node, float]) -> dict[fx.Node, float]:
    """Return the seconds of each node that computes, from the `intervals` before, in, between and after an
    executable's calls.

    The time of a fused kernel is divided among its nodes in proportion to `estimate`, which has all nodes that
    compute. The time of a node that does not compute (a view, in an eager program), and the time between two calls
    with no node between them, is added to the next node. Starts of collectives and waits are not counted: see
    `zgraph.machine.link_benchmark`.
    """
    nodes = list(executable.program.graph.nodes)
    at = sorted(p for _, p in executable.calls)
    calls = [nodes[p] for _, p in executable.calls]
    between: list[list[fx.Node]] = [[] for _ in range(len(at) + 1)]
    own = set(calls)
    for position, node in enumerate(nodes):
        if node in estimate and node not in own:
            between[bisect.bisect(at, position)].append(node)
    node_seconds = dict.fromkeys(estimate, 0.0)
    owed = 0.0
    last: fx.Node | None = None
    for i, members in enumerate(between):
        owed += intervals[2 * i]
        if members:
            whole = sum(estimate[n] for n in members)
            for node in members:
                node_seconds[node] += owed * (estimate[node] / whole if whole else 1 / len(members))
            owed, last = 0.0, members[-1]
        if i < len(calls):
            node = calls[i]
            if computes(node):
                node_seconds[node] += owed + intervals[2 * i + 1]
                owed, last = 0.0, node
            elif not (collectives.is_start(node) or collectives.is_wait(node)):
                owed += intervals[2 * i + 1]
    if last is not None:
        node_seconds[last] += owed
    return node_seconds
