"""Replacements for functions of PEFT's DoRA that dynamo can't capture: one inspects the type of a weight, one makes a parameter."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from zgraph.hf.replaced_globals import Before, replace
from zgraph.torch_compat.private_names import refuse_release

_MODULE = "zgraph.hf.peft_dora"


def _weight_of(module: nn.Module) -> Any:
    """Return the weight of a layer that is not quantized: quantized ones are not compiled."""
    return module.weight


def _transposed(weight: torch.Tensor, fan_in_fan_out: bool) -> torch.Tensor:
    """Return a weight as [out, in]. PEFT's function makes a parameter of it, which no graph can hold."""
    return weight.T if fan_in_fan_out else weight


_REPLACED = {"dequantize_module_weight": _weight_of, "transpose": _transposed}  # PEFT's names
_METHODS = ("forward", "get_weight_norm")


def capturable_dora(model: nn.Module) -> list[Before]:
    """Replace the methods of each DoRA layer by ones that can be captured and compute the same; return what was
    replaced."""
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
