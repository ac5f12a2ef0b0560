"""The throughput of an engine in rows per second, as DeepSpeed logs it."""

from __future__ import annotations

import time

import torch

from zgraph.deepspeed.utils.memory import memory_status


class ThroughputTimer:
    """The clock of an engine's steps (`engine.tput_timer`), logged at every `steps_per_print`.

    It runs from a step's first forward to the end of its update. If it is `synchronized`, it waits for the device at both
    ends of a step that is logged, and only there, so that other steps still overlap. The average is over all time since the
    second step, loading of data included; earlier, programs are compiled.
    """

    start_step = 2

    def __init__(self, steps_per_output: int | None, *, enabled: bool = True, synchronized: bool = True) -> None:
        self.steps_per_output = steps_per_output if enabled else None
        self.synchronized = synchronized
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.step_elapsed_time = 0.0  # of the last step
        self._began: float | None = None
        self._rows = 0  # since the second step
        self._since = self._until = 0.0

    def due(self, steps: int) -> bool:
        """Return whether the step of this number is logged."""
        return bool(self.steps_per_output) and steps % (self.steps_per_output or 1) == 0

    def update_epoch_count(self) -> None:
        """Count an epoch, which log lines name, and its micro-batches from zero on."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Start the clock at a step's first micro-batch."""
        self.micro_step_count += 1
        if self._began is None:
            self._began = self._now(self.due(self.global_step_count + 1))

    def stop(self, rows: int) -> None:
        """Stop the clock at the end of a step of `rows` rows over all ranks."""
        self.global_step_count += 1
        self._until = self._now(self.due(self.global_step_count))
        self.step_elapsed_time = self._until - (self._until if self._began is None else self._began)
        self._began = None
        if self.global_step_count == self.start_step:
            self._since = self._until
        elif self.global_step_count > self.start_step:
            self._rows += rows

    def _now(self, exact: bool) -> float:
        if exact and self.synchronized and torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def avg_samples_per_sec(self) -> float:
        """Return the rows per second since the second step; -inf before the third, as in DeepSpeed."""
        return self._rows / (self._until - self._since) if self._rows else float("-inf")

    def line(self, steps: int, rows: int) -> str:
        """Return the log line of the step `steps` of `rows` rows."""
        status = memory_status(print_rank=-2)
        gigabytes = [status[a] or status[b] for a, b in (("allocated", "resident"), ("max_allocated", "max_resident"))]
        now, most = (round(size / 1024**3, 2) for size in gigabytes)
        return (
            f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={steps}, RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, "
            f"CurrSamplesPerSec={rows / max(self.step_elapsed_time, 1e-12)}, MemAllocated={now}GB, MaxMemAllocated={most}GB"
        )
