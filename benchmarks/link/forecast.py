"""What the simulator says that a step of a zgraph variant takes, to stand beside what was measured."""

from __future__ import annotations

from typing import Any


def forecast(model: Any, gbps: float, latency_us: float, compute_seconds: float | None) -> dict[str, float] | None:
    """`{"step": seconds, "exposed": seconds}` of a compiled model at that rate (0: unlimited), or None if there is none.

    It is called on rank 0 after the measurements at that rate. `compute_seconds` is a step's time without communication as
    measured in the same run, or None. The programs that ran are in `model.zgraph.programs`; `zgraph.passes.simulator`
    replays one on given costs.
    """
    return None
