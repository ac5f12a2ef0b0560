"""Adapters of PEFT: small parts of a divided model, which PEFT's own code saves and loads while they are whole."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from zgraph.api.full_weights import whole_parameters
from zgraph.torch_compat.private_names import refuse_release

FILE = "adapter_model.safetensors"
"""PEFT's name."""
_IS_MAIN_PROCESS = 5
"""Which argument of PEFT's `save_pretrained` this is."""


def is_adapted(model: Any) -> bool:
    """Is it a model with adapters of PEFT's?"""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def learns_prompts(model: Any) -> bool:
    """Has a model with adapters such that make prompts, in place of layers?"""
    return any(config.is_prompt_learning for config in model.peft_config.values())


def save_adapters(model: Any, *args: Any, **kwargs: Any) -> Any:
    """PEFT's own `save_pretrained`; the first rank writes. All ranks must call it."""
    if dist.is_initialized() and len(args) < _IS_MAIN_PROCESS:
        kwargs = {"is_main_process": dist.get_rank() == 0, **kwargs}
    with whole_adapters(model):
        return type(model).save_pretrained(model, *args, **kwargs)


def load_adapter(model: Any, folder: str) -> None:
    """Give the adapter in use the weights of a folder that PEFT wrote. All ranks must call it."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    with whole_adapters(model, write=True):
        set_peft_model_state_dict(model, load_file(os.path.join(folder, FILE)), adapter_name=model.active_adapter)


@contextlib.contextmanager
def whole_adapters(model: Any, *, write: bool = False) -> Iterator[None]:
    """Inside, the parameters that any adapter saves are whole plain tensors; what is written to them stays if they are to be written. All ranks
    must enter it."""
    with whole_parameters(model, _saved(model), write=write):
        yield


def _saved(model: Any) -> list[Any]:
    """The parameters that adapters save. Prompts are saved as what their encoder, a part of the model, makes of its own."""
    from peft import get_peft_model_state_dict

    if learns_prompts(model):
        refuse_release("prompts")
        beside = [p for n, p in model.named_parameters() if ".modules_to_save." in n]
        return [*model.prompt_encoder.parameters(), *beside]
    state = model.state_dict(keep_vars=True)
    return [
        value
        for name in model.peft_config
        for value in get_peft_model_state_dict(model, state_dict=state, adapter_name=name).values()
    ]
