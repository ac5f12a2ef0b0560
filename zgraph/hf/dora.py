"""PEFT's DoRA as it can be captured: PEFT asks which module the type of a weight is of, which dynamo can't follow."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from zgraph.errors import ModelError
from zgraph.hf.other_globals import Before, replace

_MODULE = "zgraph.hf.peft_dora"


def _weight_of(module: nn.Module) -> Any:
    """The weight of a layer that is not quantized, as any that is compiled."""
    return module.weight


def _transposed(weight: torch.Tensor, fan_in_fan_out: bool) -> torch.Tensor:
    """What PEFT makes a parameter of, which no graph can hold."""
    return weight.T if fan_in_fan_out else weight


_REPLACED = {"dequantize_module_weight": _weight_of, "transpose": _transposed}  # PEFT's names
KNOWN = "0.21"
"""The release of PEFT that this was run with."""
_METHODS = ("forward", "get_weight_norm")


def capturable_dora(model: nn.Module) -> list[Before]:
    """Give each DoRA layer of a model methods that are captured, and compute what PEFT's do; returns what they had."""
    peft = sys.modules.get("peft.tuners.lora.dora")
    if peft is None:
        return []
    replaced = []
    missing = [name for name in _REPLACED if not hasattr(peft, name)]
    missing += [name for name in _METHODS if not hasattr(peft.DoraLinearLayer, name)]
    for module in model.modules():
        if isinstance(module, peft.DoraLinearLayer):
            if missing:
                raise ModelError(
                    f"DoRA of PEFT {version('peft')} has no {missing[0]}",
                    why="its layers get methods that can be captured, and that is no public interface",
                    hint=f"PEFT {KNOWN} is known to work; or LoRA without use_dora",
                )
            for name in _METHODS:
                function = getattr(type(module), name)
                plain = getattr(function, "__wrapped__", function)  # (without PEFT's cache, which is for evaluations)
                replaced.append(replace(module, name, plain, _MODULE, _REPLACED))
    return replaced
