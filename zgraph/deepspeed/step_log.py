"""What an engine logs about its steps if the configuration asks for it: monitors, a breakdown of the time, a profile
of the operations."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from zgraph.deepspeed import comm
from zgraph.deepspeed.comms_log import CommsLog
from zgraph.deepspeed.engine_settings import value_of
from zgraph.deepspeed.monitor import Event, Monitor
from zgraph.deepspeed.utils.memory import see_memory_usage
from zgraph.deepspeed.utils.timer import ThroughputTimer
from zgraph.passes.analysis.costs import flops_of
from zgraph.program.node import info

if TYPE_CHECKING:
    from zgraph.api.handle import Handle
    from zgraph.program.program import Program

logger = logging.getLogger("zgraph.deepspeed")


class Steps(Protocol):
    """The part of an engine that is logged."""

    @property
    def handle(self) -> Handle: ...
    @property
    def optimizer(self) -> Any: ...
    @property
    def global_steps(self) -> int: ...
    @property
    def global_samples(self) -> int: ...
    @property
    def skipped_steps(self) -> int: ...
    def get_lr(self) -> list[float]: ...
    def get_mom(self) -> list[Any]: ...
    def gradient_accumulation_steps(self) -> int: ...
    def train_micro_batch_size_per_gpu(self) -> int: ...
    def train_batch_size(self) -> int: ...


class StepLog:
    """The clock of an engine's phases ("forward", "backward", "step"; for a pipeline "train_batch"), and the log of its steps.

    The clock waits for the device at the ends of a phase, so it runs only if `wall_clock_breakdown` or `flops_profiler` ask
    for it.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.monitor = Monitor(config)
        self._breakdown = bool(value_of(config, "wall_clock_breakdown", False))
        self._memory = bool(value_of(config, "memory_breakdown", False))
        self._every = value_of(config, "steps_per_print", None)
        profiler = value_of(config, "flops_profiler", {})
        self._profiles = int(profiler.get("profile_step", 1)) if profiler.get("enabled") else None
        self._profiler = profiler
        self._clocked = self._breakdown or self._profiles is not None
        self._milliseconds: dict[str, float] = {}
        self.communication = CommsLog()
        timed = value_of(config, "timers.throughput", {})
        self.throughput = ThroughputTimer(
            self._every, enabled=timed.get("enabled", True), synchronized=timed.get("synchronized", True)
        )

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time of what runs inside to a phase."""
        if not self._clocked:
            yield
            return
        begin = _now()
        yield
        self._milliseconds[phase] = self._milliseconds.get(phase, 0.0) + (_now() - begin) * 1e3

    def stepped(self, engine: Steps, loss: float | None) -> None:
        """Log a step that has ended; `loss` is its mean over this rank's micro-batches, if it is known."""
        took, self._milliseconds = self._milliseconds, {}
        self.communication.stepped(engine.handle.runtime.clock)
        steps, rows = engine.global_steps, engine.train_batch_size()
        due = bool(self._every) and steps % self._every == 0
        self.throughput.stop(rows)
        if self.monitor.enabled:
            self.monitor.write_events(_events(engine, loss, took if self._breakdown else {}))
        if comm.get_rank() == 0:
            if due:
                logger.info(
                    "step=%d, skipped=%d, lr=%s, mom=%s", steps, engine.skipped_steps, engine.get_lr(), engine.get_mom()
                )
            if self.throughput.due(self.throughput.global_step_count) and self.throughput.global_step_count > 2:
                logger.info("%s", self.throughput.line(steps, rows))
            if self._breakdown and (due or not self._every):
                logger.info("step %d, time (ms) | %s", steps, " | ".join(f"{k}: {v:.2f}" for k, v in took.items()))
            if steps == self._profiles:
                self._tell(profile_of(engine, took, self._profiler))
        if self._memory:
            see_memory_usage(f"after step {steps}", force=True)

    def _tell(self, text: str) -> None:
        path = self._profiler.get("output_file")
        if path:
            Path(path).write_text(text + "\n")
        else:
            logger.info("%s", text)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _events(engine: Steps, loss: float | None, took: Mapping[str, float]) -> list[Event]:
    rows = engine.global_samples
    events: list[Event] = [("Train/Samples/train_loss", loss, rows)] if loss is not None else []
    rates = engine.get_lr()
    if rates:
        events.append(("Train/Samples/lr", float(rates[0]), rows))
    if engine.handle.loss_scale is not None:
        events.append(("Train/Samples/loss_scale", float(engine.optimizer.cur_scale), rows))
    return events + [(f"Train/Samples/elapsed_time_ms_{phase}", ms, rows) for phase, ms in took.items()]


def profile_of(engine: Steps, took: Mapping[str, float], section: Mapping[str, Any]) -> str:
    """Return a text with the floating-point operations of a step's matmuls, convolutions and attention by module, and
    the step's times.

    The operations are counted by torch's formulas in the captured program of this rank, before operators are fused.
    """
    programs = [step.captured for step in engine.handle.programs.values() if step.differentiated]
    program = programs[-1] if programs else None
    forward, backward = _flops(program) if program is not None else (Counter(), Counter())
    parts = engine.gradient_accumulation_steps()
    weights = sum(math.prod(spec.whole_shape) for spec in program.params.values()) if program is not None else 0
    total = (forward.total() + backward.total()) * parts
    seconds = sum(took.values()) / 1e3
    lines = [
        f"profile of step {engine.global_steps} on rank 0, {parts} micro-batch(es) of {engine.train_micro_batch_size_per_gpu()} row(s)",
        f"parameters of the model: {_count(weights)}",
        f"products of a forward: {_count(forward.total())}FLOP, of a backward: {_count(backward.total())}FLOP",
        *(f"{phase}: {ms:.2f} ms" for phase, ms in took.items()),
    ]
    if seconds:
        lines.append(f"in all {_count(total)}FLOP in {seconds * 1e3:.2f} ms: {_count(total / seconds)}FLOP/s")
    depth = int(section.get("module_depth", -1))
    if section.get("detailed", True) and forward:
        lines.append("products of a forward, by module:")
        lines += [f"  {name or '(the model itself)'}: {_count(n)}FLOP" for name, n in _by_module(forward, depth)]
    return "\n".join(lines)


def _flops(program: Program) -> tuple[Counter[str], Counter[str]]:
    """Return the floating-point operations by module, of the forward and of the backward."""
    by_phase: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    for node in program.graph.nodes:
        if node.op == "call_function" and (flops := flops_of(node)):
            by_phase[info(node).phase.name.lower() == "backward"][info(node).module] += flops
    return by_phase


def _by_module(flops: Counter[str], depth: int) -> list[tuple[str, int]]:
    """Return (module, operations) of modules down to `depth` (-1: all), each with its submodules' operations, sorted
    by name."""
    totals: Counter[str] = Counter()
    for name, count in flops.items():
        parts = name.split(".") if name else []
        for end in range(len(parts) + 1):
            if depth < 0 or end <= depth:
                totals[".".join(parts[:end])] += count
    return sorted(totals.items())


def _count(number: float) -> str:
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.2f} {letter}"
    return f"{number:.0f} "
