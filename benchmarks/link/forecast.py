"""What the simulator says that a step of a zgraph variant takes, to stand beside what was measured."""

from __future__ import annotations

from typing import Any


def forecast(model: Any) -> dict[str, float]:
    """`{"step": seconds, "exposed": seconds}` of a compiled model by the hardware that its plan was made for."""
    found = model.zgraph.forecast()
    return {"step": found.seconds, "exposed": found.exposed}
