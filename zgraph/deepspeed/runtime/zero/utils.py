"""DeepSpeed's helpers for sharded parameters, where scripts import them from."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from zgraph.errors import PlanError

ZeRORuntimeException = PlanError

__all__ = ["ZeRORuntimeException", "is_zero_param"]


def is_zero_param(parameter: Any) -> bool:
    """Return whether a parameter is a shard. (At every ZeRO stage above 0 a compiled model's parameters are.)"""
    return isinstance(parameter, DTensor)
