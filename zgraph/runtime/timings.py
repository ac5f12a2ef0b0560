"""Measures where a step's time goes: `print(model.zgraph.timings())`.

Phases are timed in every step: by the host's clock on CPU, on CUDA by events that are read when someone asks. Waits for
communication can't be seen from outside a program: the step after each question runs under torch's profiler, whose
waits are matched with the programs' own, in order.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zgraph.program import collectives
from zgraph.program.flops import product_flops
from zgraph.program.node import Role, info
from zgraph.program.program import Program
from zgraph.runtime.memory import COMPILING

KEEP = 100  # steps whose times are kept
PHASES = ("forward", "backward", "update")
PARTS = ("gather", "reduce")


@dataclass
class Clock:
    """The times of the last steps of one compiled module, in seconds."""

    device: torch.device  # the device that is timed
    # seconds of the last steps, by phase
    steps: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=KEEP))
    sampled: dict[str, float] | None = None  # exposed seconds of the last profiled step, by part
    wants_sample: bool = False  # whether to profile the next step
    reduced: bool = False  # whether a backward of this step has reduced its gradients
    on_begin: Callable[[], None] = lambda: None  # called when a step begins
    on_end: Callable[[], None] = lambda: None  # called when a step ends
    on_ran: Callable[[Program], None] = lambda program: None  # called with each program that runs
    _open: list[tuple[str, Any, Any]] = field(default_factory=list)  # phases of this step: (name, start, end)
    # steps not read yet
    _pending: deque[tuple[list[tuple[str, Any, Any]], Any, Any]] = field(default_factory=lambda: deque(maxlen=KEEP))
    _begin: Any = None  # when this step began; None between steps
    _depth: int = 0  # how many phases are open
    _profile: Any = None  # the profiler that is running, if one is
    _programs: list[Program] = field(default_factory=list)  # programs run in the profiled step

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Time what runs inside as part of `phase`; a phase inside another counts for the outer one."""
        if self._depth:
            yield
            return
        if self._begin is None:
            self._begin = self._now()
            self.on_begin()
            if self._profile is None and self.wants_sample:
                self._start_profile()
        start = self._now()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._open.append((phase, start, self._now()))

    def ran(self, program: Program) -> None:
        """Record that a program ran; in a profiled step its waits are matched later."""
        self.on_ran(program)
        if self._profile is not None:
            self._programs.append(program)

    def end_step(self) -> None:
        """End the step, after its update."""
        self.reduced = False
        if self._begin is None:
            return
        self._pending.append((self._open, self._begin, self._now()))
        self.on_end()
        self._open, self._begin = [], None
        if self._profile is not None:
            self._end_profile()

    def read(self) -> None:
        """Turn what was recorded into seconds; on CUDA this waits for the device."""
        while self._pending:
            parts, begin, end = self._pending.popleft()
            times = dict.fromkeys(PHASES, 0.0)
            for phase, start, stop in parts:
                times[phase] += self._between(start, stop)
            times["step"] = self._between(begin, end)
            times["forwards"] = float(sum(phase == "forward" for phase, _, _ in parts))
            self.steps.append(times)

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        if self.device.type != "cuda":
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def _start_profile(self) -> None:
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            return  # the user's own is running
        self.wants_sample = False
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.__enter__()
        self._programs = []

    def _end_profile(self) -> None:
        profile, self._profile = self._profile, None
        profile.__exit__(None, None, None)
        events = list(profile.events() or ())
        if self.device.type == "cuda":
            self.sampled = exposed_on_device(events)
        else:
            self.sampled = exposed_waits(events, self._programs)


def exposed_waits(events: Sequence[Any], programs: Sequence[Program]) -> dict[str, float]:
    """Return the seconds spent waiting for gathers and for reductions, on CPU. The n-th wait profiled is the n-th wait
    of the programs.
    """
    waits = sorted((e for e in events if e.name == "_c10d_functional::wait_tensor"), key=lambda e: e.time_range.start)
    nodes: list[fx.Node] = [n for p in programs for n in p.graph.nodes if collectives.is_wait(n)]
    seconds = dict.fromkeys(PARTS, 0.0)
    for event, node in zip(waits, nodes, strict=False):
        role = info(node.all_input_nodes[0]).role
        seconds["gather" if role is Role.GATHER else "reduce"] += event.time_range.elapsed_us() / 1e6
    return seconds


def exposed_on_device(events: Sequence[Any]) -> dict[str, float]:
    """Return the seconds in which NCCL's kernels ran and no other kernel did, by kind."""
    compute: list[tuple[float, float]] = []
    spans: dict[str, list[tuple[float, float]]] = {part: [] for part in PARTS}
    for event in events:
        if getattr(event, "device_type", None) != torch._C._autograd.DeviceType.CUDA:
            continue
        span = (event.time_range.start, event.time_range.end)
        name = event.name.lower()
        if "nccl" not in name:
            compute.append(span)
        else:
            spans["gather" if "gather" in name else "reduce"].append(span)
    return {part: uncovered(kernels, compute) / 1e6 for part, kernels in spans.items()}


def uncovered(spans: Sequence[tuple[float, float]], by: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of `spans` that no span of `by` covers."""
    edges = [(t, 0, d) for a, b in spans for t, d in ((a, 1), (b, -1))]
    edges += [(t, 1, d) for a, b in by for t, d in ((a, 1), (b, -1))]
    open_, total, last = [0, 0], 0.0, 0.0
    for at, kind, change in sorted(edges):
        if open_[0] and not open_[1]:
            total += at - last
        open_[kind] += change
        last = at
    return total


@dataclass(frozen=True)
class Timings:
    """The median of the last steps, on every rank; `str()` is a table of min, median and max over ranks.

    If the user's own optimizer updates, a step ends with the next forward, and "update" is 0.
    """

    # per rank, seconds of "step", "forward", "backward", "update"; once a step was sampled, those of "gather" and
    # "reduce" that were waited for, within the phases; and "forwards", their number per step
    ranks: tuple[dict[str, float], ...]
    steps: int  # how many steps the medians are of
    tokens: float | None = None  # tokens per second over all ranks; None if not asked for
    # share of the hardware's peak FLOP/s that the model's products reach; None if not asked for
    mfu: float | None = None

    @property
    def exposed(self) -> tuple[float | None, ...]:
        """Exposed communication in seconds per step, of each rank; None before a step was sampled."""
        return tuple(sum(r[p] for p in PARTS) if all(p in r for p in PARTS) else None for r in self.ranks)

    def __str__(self) -> str:
        if not self.steps:
            return "no step has ended yet"
        lines = [
            f"median of {self.steps} steps, in ms; over {len(self.ranks)} rank(s)",
            f"{'':24}{'min':>10}{'median':>10}{'max':>10}",
        ]
        names = {"step": "step", **{p: f"  {p}" for p in PHASES}, **{p: f"  exposed {p}" for p in PARTS}}
        for key, shown in names.items():
            values = [r[key] * 1e3 for r in self.ranks if key in r]
            if values:
                lines.append(f"{shown:24}{min(values):10.2f}{statistics.median(values):10.2f}{max(values):10.2f}")
        if self.tokens is not None:
            lines.append(f"{'tokens/s':24}{self.tokens:10.0f}")
        if self.mfu is not None:
            lines.append(f"{'model FLOP/s utilisation':24}{self.mfu:10.1%}")
        return "\n".join(lines)


def model_flops(program: Program) -> int:
    """Return the floating-point operations of a captured program's products (matmuls, convolutions, attention), forward
    and backward.

    The shapes are those of one rank's batch; recomputation does not count.
    """
    return sum(int(product_flops(node)) for node in program.graph.nodes)


def median_step(clock: Clock) -> dict[str, float]:
    """Return the median of each phase over the recorded steps, without those that compiled if there are others."""
    clock.read()
    steps = list(clock.steps)
    if COMPILING < len(steps) < KEEP:
        steps = steps[COMPILING:]
    if not steps:
        return {}
    medians = {key: statistics.median(s[key] for s in steps) for key in steps[0]}
    return medians | (clock.sampled or {})
