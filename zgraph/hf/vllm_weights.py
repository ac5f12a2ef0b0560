"""The weights that TRL's trainers send to vLLM, from the shards of an attached model."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zgraph.api.full_weights import full_weights
from zgraph.api.gathered_weights import handle_of
from zgraph.api.peft_adapters import is_adapted, learns_prompts
from zgraph.api.stream_weights import stream_weights
from zgraph.errors import ModelError
from zgraph.torch_compat.private_names import refuse_release

Weights = Iterator[tuple[str, torch.Tensor]]

_OF_PEFT = "base_model.model."  # what PEFT puts before the name of each parameter of a model


def stream_to_vllm(trainer: Any) -> None:
    """Let the object by which a trainer of TRL's sends weights to vLLM, if it has one, send whole weights of the trainer's compiled model.

    Raises `ModelError` for a release of TRL that sends them in another way.
    """
    generation = getattr(trainer, "vllm_generation", None)
    if generation is not None:
        refuse_release("vLLM")
        kind: type = type(generation)
        generation.__class__ = _streaming(kind)


class _Streaming:
    """A mixin in front of TRL's `VLLMGeneration`, which takes the (name, tensor) pairs below one after another, on all ranks."""

    # TRL's own.
    model: Any  # the model that is trained
    mode: str  # "server": the first rank sends to it; "colocate": each rank has an engine of its own

    def _iter_named_params(self) -> Weights:
        """Yield whole weights by the names of a transformers checkpoint, those of layers with adapters merged, on the
        ranks that send them."""
        ranks = [0] if self.mode == "server" else None
        return _merged(self.model, ranks) if is_adapted(self.model) else stream_weights(self.model, ranks=ranks)


@functools.cache
def _streaming(kind: type) -> type:
    return type(kind.__name__, (_Streaming, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def _merged(model: Any, ranks: list[int] | None) -> Weights:
    """Yield the weights of a model with PEFT's adapters as those of the model without them, on these ranks. Nothing is written to the model: PEFT
    merges a copy of each layer, of one at a time. Raises `ModelError` for adapters that no weights can stand for."""
    around = list(_outermost(model))  # (all ranks raise alike, before any waits for another)
    with full_weights(model, ranks=ranks), torch.no_grad():
        if not handle_of(model).whole:
            return
        seen: set[int] = set()  # parameters that are sent, and those that are not to be
        for path, module in around:
            seen |= {id(param) for param in module.parameters()}
            for name, param in _merged_layer(module).named_parameters():
                yield f"{path}.{name}".removeprefix(_OF_PEFT), param.detach()
        for name, param in model.named_parameters():
            if id(param) not in seen:
                yield name.removeprefix(_OF_PEFT), param.detach()


def _outermost(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path and module of whatever PEFT has put around a module, but not what is inside of it. Raises `ModelError` for what no weights
    can stand for."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    if learns_prompts(model):
        raise ModelError(
            "adapters that make prompts can't be sent to vLLM",
            why="they change no weights, and vLLM is sent weights",
            hint="adapters that change layers (LoRA, IA3), or use_vllm=False",
        )
    inside = "\0"
    for path, module in model.named_modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper) and not path.startswith(inside):
            if not isinstance(module, BaseTunerLayer) and not hasattr(module, "modules_to_save"):
                raise ModelError(
                    f"{path!r} can't be sent to vLLM",
                    why=f"PEFT's {type(module).__name__} has no layer that stands for it",
                    hint="modules_to_save, LoRA or IA3; or use_vllm=False",
                )
            inside = f"{path}."
            yield path, module


def _merged_layer(module: Any) -> nn.Module:
    """Return the layer that computes what a layer with adapters does, or the module that is trained in the place of another."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    if hasattr(module, "modules_to_save"):
        active: nn.Module = module.modules_to_save[module.active_adapters[0]]
        return active
    layer: Any = copy.deepcopy(module)
    parts: list[Any] = [*layer.modules()]
    for part in parts:
        if isinstance(part, BaseTunerLayer):
            part.merge()
    merged: nn.Module = layer.get_base_layer()
    return merged
