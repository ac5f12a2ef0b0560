"""Adapters of PEFT: small parts of a divided model, which are saved whole."""

from __future__ import annotations

import os
import sys
from typing import Any

from torch.distributed.tensor import DTensor

FILE = "adapter_model.safetensors"
"""PEFT's name."""


def is_adapted(model: Any) -> bool:
    """Is it a model with adapters of PEFT's?"""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def whole_state(model: Any) -> dict[str, Any]:
    """The state dict of a model with adapters, in which what any adapter saves is whole, and the rest as it is. All ranks must call it."""
    from peft import get_peft_model_state_dict

    state = model.state_dict()
    saved = {
        id(value)
        for name in model.peft_config
        for value in get_peft_model_state_dict(model, state_dict=state, adapter_name=name).values()
    }
    return {n: v.full_tensor() if id(v) in saved and isinstance(v, DTensor) else v for n, v in state.items()}


def load_adapter(model: Any, folder: str) -> None:
    """Give the adapter in use the weights of a folder that PEFT wrote. All ranks must call it."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    set_peft_model_state_dict(model, load_file(os.path.join(folder, FILE)), adapter_name=model.active_adapter)
