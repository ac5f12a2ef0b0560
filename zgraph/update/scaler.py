"""The loss scale from step to step: DeepSpeed's rule, as a pure function of tensors.

It is traced into the update program, so no Python code branches on an overflow: a branch would make the host wait for
the device in each step. For the same reason it can't raise; it says that the run should end.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from zgraph.plan.loss_scaling import MAX_POWER, LossScale

__all__ = ["advance", "initial"]


def initial(record: LossScale) -> dict[str, Tensor]:
    """Return the state before the first step, as 0-dim tensors.

    `scale`: float32, the factor of the step's loss. int64: `iteration`, the number of this step from 0;
    `last_overflow`, that of the last overflow, at first -1; `hysteresis`, overflows up to and including the one that
    halves the scale; `skipped`, how many steps had an overflow. `exhausted`: bool, whether there ever was an overflow
    that could not make the scale smaller.
    """
    scale = 2.0**record.initial_scale_power if record.static is None else record.static
    return {
        "scale": torch.tensor(scale, dtype=torch.float32),
        "iteration": torch.tensor(0),
        "last_overflow": torch.tensor(-1),
        "hysteresis": torch.tensor(record.hysteresis),
        "skipped": torch.tensor(0),
        "exhausted": torch.tensor(False),
    }


def advance(record: LossScale, state: Mapping[str, Tensor], overflow: Tensor) -> dict[str, Tensor]:
    """Return the state for the next step; `overflow` is a 0-dim bool that says whether this one had an overflow.

    The rule is `DynamicLossScaler.update_scale` of deepspeed/runtime/fp16/loss_scaler.py (0.19.6) with its factor of
    2. An overflow takes one from `hysteresis`, or halves the scale once only 1 is left, though not below the minimum.
    Without one, the scale is doubled and `hysteresis` filled up when the steps since the last overflow, not counting
    this one (unless the record `doubles_within_window`, as torch's GradScaler does), are a multiple of the window
    above 0; with `consecutive_hysteresis` every such step fills it up.

    DeepSpeed raises at an overflow with the scale at its minimum: here `exhausted` becomes true and stays so (unless
    the record does not end there), and the rest goes on as if DeepSpeed had been told not to raise. A fixed scale only
    counts.
    """
    scale, hysteresis = state["scale"], state["hysteresis"]
    iteration, last_overflow = state["iteration"], state["last_overflow"]
    counted = {
        "iteration": iteration + 1,
        "last_overflow": torch.where(overflow, iteration, last_overflow),
        "skipped": state["skipped"] + overflow,
    }
    if record.static is not None:
        return {**state, **counted}

    # Tensors, since a Python number that float32 can't hold would not equal the scale that came from it.
    floor = scale.new_full((), record.min_loss_scale)
    ceiling = scale.new_full((), 2.0**MAX_POWER)
    halves = overflow & (hysteresis == 1)
    stable = iteration - last_overflow - (0 if record.doubles_within_window else 1)
    doubles = overflow.logical_not() & (stable > 0) & (stable % record.loss_scale_window == 0)
    grown = torch.where(doubles, torch.minimum(scale * 2, ceiling), scale)
    refills = overflow.logical_not() if record.consecutive_hysteresis else doubles
    refilled = torch.where(refills, hysteresis.new_full((), record.hysteresis), hysteresis)
    return {
        "scale": torch.where(halves, torch.maximum(scale / 2, floor), grown),
        "hysteresis": torch.where(overflow & halves.logical_not(), hysteresis - 1, refilled),
        "exhausted": state["exhausted"] | (halves & (scale == floor)) if record.ends_at_minimum else state["exhausted"],
        **counted,
    }
