"""PEFT's adapters: small parts of a sharded model, which are gathered while PEFT's own code saves and loads them."""

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
"""PEFT's file name for an adapter's weights."""
_IS_MAIN_PROCESS = 5
"""The position of `is_main_process` among the arguments of PEFT's `save_pretrained`."""


def is_adapted(model: Any) -> bool:
    """Return whether a model has PEFT's adapters."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def learns_prompts(model: Any) -> bool:
    """Return whether a model has adapters that make prompts, instead of changing layers."""
    return any(config.is_prompt_learning for config in model.peft_config.values())


def save_adapters(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run PEFT's own `save_pretrained` with gathered adapters, and write on the first rank. All ranks must call it."""
    if dist.is_initialized() and len(args) < _IS_MAIN_PROCESS:
        kwargs = {"is_main_process": dist.get_rank() == 0, **kwargs}
    with whole_adapters(model):
        return type(model).save_pretrained(model, *args, **kwargs)


def load_adapter(model: Any, folder: str) -> None:
    """Load an adapter that PEFT wrote into the model's active adapter. All ranks must call it."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    with whole_adapters(model, write=True):
        set_peft_model_state_dict(model, load_file(os.path.join(folder, FILE)), adapter_name=model.active_adapter)


@contextlib.contextmanager
def whole_adapters(model: Any, *, write: bool = False) -> Iterator[None]:
    """Gather the parameters that any adapter saves inside the block; with `write`, what is written to them is kept.
    All ranks must enter it."""
    with whole_parameters(model, _saved(model), write=write):
        yield


def _saved(model: Any) -> list[Any]:
    """Return the parameters that adapters save. For prompts these are the parameters of the encoder that makes them."""
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
