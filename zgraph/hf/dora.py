"""PEFT's DoRA as it can be captured: PEFT asks which module the type of a weight is of, which dynamo can't follow."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from zgraph.hf.replaced_globals import Before, replace
from zgraph.torch_compat.private_names import refuse_release

_MODULE = "zgraph.hf.peft_dora"


def _weight_of(module: nn.Module) -> Any:
    """The weight of a layer that is not quantized, as any that is compiled."""
    return module.weight


def _transposed(weight: torch.Tensor, fan_in_fan_out: bool) -> torch.Tensor:
    """What PEFT makes a parameter of, which no graph can hold."""
    return weight.T if fan_in_fan_out else weight


_REPLACED = {"dequantize_module_weight": _weight_of, "transpose": _transposed}  # PEFT's names
_METHODS = ("forward", "get_weight_norm")


def capturable_dora(model: nn.Module) -> list[Before]:
    """Give each DoRA layer of a model methods that are captured, and compute what PEFT's do; returns what they had."""
    peft = sys.modules.get("peft.tuners.lora.dora")
    if peft is None:
        return []
    replaced = []
    for module in model.modules():
        if isinstance(module, peft.DoraLinearLayer):
            refuse_release("DoRA")
            for name in _METHODS:
                function = getattr(type(module), name)
                plain = getattr(function, "__wrapped__", function)  # (without PEFT's cache, which is for evaluations)
                replaced.append(replace(module, name, plain, _MODULE, _REPLACED))
    return replaced
