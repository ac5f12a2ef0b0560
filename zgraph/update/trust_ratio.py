"""The ratio that LAMB scales a parameter's update by (You et al., 2020)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zgraph.update.rule_interface import Part


def trust_ratio(record: Any, p: Tensor, update: Tensor, part: Part) -> Tensor:
    """Return |p| / |update| of the whole parameter, between the record's `min_coeff` and `max_coeff`; 1 where one of the two is zero. 0-dim."""
    weight_norm = part.total((p * p).sum()).sqrt()
    update_norm = part.total((update * update).sum()).sqrt()
    bounded = (weight_norm / update_norm).clamp(record.min_coeff, record.max_coeff)
    return torch.where((weight_norm > 0) & (update_norm > 0), bounded, torch.ones_like(bounded))
