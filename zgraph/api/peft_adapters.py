"""PEFT's adapters: small parts of a sharded model, which are gathered while PEFT's own code saves and loads them."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from zgraph.api.full_weights import whole_parameters
from zgraph.api.gathered_weights import handle_of
from zgraph.errors import StepError
from zgraph.parameters.whole_tensors import Wanted, gathered
from zgraph.torch_compat.private_names import refuse_release

_ALLOCATE = "update_and_allocate"
"""The method of AdaLoRA's models that measures ranks by gradients, and masks those of the least weight."""
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


def watch_allocators(model: nn.Module) -> None:
    """Make AdaLoRA's `update_and_allocate`, of a compiled model or of any module in it, read and mask whole adapters."""
    for module in _allocators(model):
        module.__dict__[_ALLOCATE] = functools.partial(_update_and_allocate, model, module)


def unwatch_allocators(model: nn.Module) -> None:
    """Undo `watch_allocators`."""
    for module in _allocators(model):
        if getattr(module.__dict__.get(_ALLOCATE), "func", None) is _update_and_allocate:
            del module.__dict__[_ALLOCATE]


def _allocators(model: nn.Module) -> list[nn.Module]:
    peft = sys.modules.get("peft")
    return [] if peft is None else [m for m in model.modules() if isinstance(m, peft.AdaLoraModel)]


def _update_and_allocate(model: nn.Module, adapted: Any, global_step: int) -> None:
    """Run AdaLoRA's own method with whole adapters and whole gradients. All ranks must call it, between the backward and
    what takes its gradients."""
    adapter = adapted.trainable_adapter_name
    config = adapted.peft_config[adapter]
    params = {n: p for n, p in adapted.named_parameters() if "lora_" in n and adapter in n}
    grads = {n: p.grad for n, p in params.items() if p.grad is not None}
    if not grads and global_step < config.total_step - config.tfinal:
        raise StepError(
            f"update_and_allocate({global_step}) of AdaLoRA finds no gradients",
            where=f"the adapter {adapter!r}",
            why="it measures ranks by the gradients of the last backward, which the plan's update takes with it",
            hint="call it between loss.backward() and step(), of a Trainer in on_pre_optimizer_step of a callback; not with train_step",
        )
    wholes = gathered([Wanted(g, g.dtype) for g in grads.values()], handle_of(model).runtime.device)
    found = dict(zip(grads, wholes, strict=True))
    with whole_parameters(model, list(params.values()), write=True):
        fresh = dict(adapted.named_parameters())
        for name, grad in found.items():
            fresh[name].grad = grad
        try:
            getattr(type(adapted), _ALLOCATE)(adapted, global_step)
        finally:
            for name in found:
                fresh[name].grad = None


def _saved(model: Any) -> list[Any]:
    """Return the parameters that adapters save. For prompts these are the parameters of the encoder that makes them."""
    from peft import get_peft_model_state_dict

    if learns_prompts(model):
        refuse_release("prompts")
        beside = [p for n, p in model.named_parameters() if ".modules_to_save." in n]
        return [*model.prompt_encoder.parameters(), *beside]
    state = model.state_dict(keep_vars=True)
    with _without_masks(model.peft_config.values()):
        return [
            value
            for name in model.peft_config
            for value in get_peft_model_state_dict(model, state_dict=state, adapter_name=name).values()
        ]


@contextlib.contextmanager
def _without_masks(configs: Iterable[Any]) -> Iterator[None]:
    """Keep AdaLoRA's masks of ranks, by which PEFT saves parts of its weights, out of the configurations for a while."""
    masks = [(config, config.rank_pattern) for config in configs if config.peft_type == "ADALORA"]
    for config, _ in masks:
        config.rank_pattern = None
    try:
        yield
    finally:
        for config, mask in masks:
            config.rank_pattern = mask
