"""Functions of transformers', PEFT's and TRL's that no graph can hold, written so that capture traces them in the libraries' place.

Each returns what the library's own returns. A library that is not imported is left alone.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from zgraph.errors import UnsupportedError
from zgraph.torch_compat.private_names import refuse_release


def weight_of(module: nn.Module) -> Any:
    """Return the weight of a DoRA layer. PEFT's function looks whether it is quantized: such layers are not compiled."""
    return module.weight


def transposed(weight: torch.Tensor, fan_in_fan_out: bool) -> torch.Tensor:
    """Return a weight as [out, in]. PEFT's function makes a parameter of it."""
    return weight.T if fan_in_fan_out else weight


def sparse_update(layer: Any, adapter: str) -> torch.Tensor:
    """Return what SHiRA adds to a weight as a dense [out, in]. PEFT's method makes a sparse tensor."""
    values = layer.shira_weight[adapter] * layer.scaling[adapter]
    rows, columns = layer.shira_indices[adapter].to(values.device).long().unbind(0)
    whole = torch.zeros(layer.out_features, layer.in_features, dtype=values.dtype, device=values.device)
    return whole.index_put((rows, columns), values, accumulate=True)


def with_adapted_parameter(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run a layer with LoRA added to one of its parameters, as of `target_parameters`. PEFT's method registers a
    parametrization for the call."""
    layer._check_forward_args(x, *args, **kwargs)
    kwargs.pop("adapter_names", None)
    adapters = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters and layer.merged:
        layer.unmerge()
    if layer.disable_adapters or layer.merged or not adapters:
        return layer.base_layer(x, *args, **kwargs)
    base, name = layer.get_base_layer(), layer.parameter_name
    weight = getattr(base, name)
    if len(adapters) == 1 and layer.num_experts > 1:
        left, right, scaling = layer.get_delta_factors(adapters[0])
        with torch.autocast(weight.device.type, enabled=False):
            adapted = torch.baddbmm(weight, left, right, alpha=scaling)
    else:
        adapted = weight + sum(layer.get_delta_weight(adapter) for adapter in adapters)
    inner, path = layer.base_layer, name
    while inner is not base:  # (a wrapper for each parameter, one around the other)
        inner, path = inner.base_layer, f"base_layer.{path}"
    return torch.func.functional_call(layer.base_layer, {path: adapted}, (x, *args), kwargs)


def with_module_dropout(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run a layer with LoHa or LoKr. PEFT's method draws a number, and leaves an adapter out by a branch on it."""
    if layer.disable_adapters and layer.merged:
        layer.unmerge()
    result = layer.base_layer(x, *args, **kwargs)
    if layer.disable_adapters or layer.merged:
        return result.to(x.dtype)
    for adapter in layer.active_adapters:
        if adapter in layer._available_adapters:
            update = layer._get_delta_activations(adapter, x, *args, **kwargs)
            dropout = layer.module_dropout[adapter] if layer.training else 0.0
            if dropout:
                update = torch.where(torch.rand((), device=update.device) > dropout, update, 0)
            result = result + update
    return result.to(x.dtype)


def of_vector_bank(layer: Any, adapter: str, cast_to_fp32: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the matrices A and B of VB-LoRA. PEFT's method raises by a branch on values."""
    bank, logits = layer.vblora_vector_bank[adapter], [layer.vblora_logits_A[adapter], layer.vblora_logits_B[adapter]]
    if layer.training:
        message = "Found infinity values in VB-LoRA logits: was training resumed from a save_only_topk_weights model?"
        torch._assert_async(~logits[0][0, 0].isinf().any(), message)
    if cast_to_fp32:
        bank, logits = bank.float(), [value.float() for value in logits]
    left, right = (layer._get_low_rank_matrix(value, bank, layer.topk[adapter]) for value in logits)
    return left.reshape(logits[0].shape[0], -1), right.transpose(1, 2).reshape(-1, logits[1].shape[1])


def log_probabilities(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    chunk_size: int,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] = (),
) -> tuple[torch.Tensor | None, ...]:
    """Compute for each position the log-probability of its target, and what `outputs` names; all are float32 of shape [N].

    `outputs` may name the entropy, the logarithm of the sum of squared probabilities, the mean logit, and whether the target
    is the most likely token. `hidden` is [N, H], `weight` [V, H]. TRL's function computes tiles in an autograd function that
    writes into its buffers; here the logits are whole.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    logits = F.linear(hidden.to(dtype), weight.to(dtype), bias.to(dtype) if bias is not None else None)
    z = logits.float() * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z = z * (1 / temperature)
    log_z = torch.logsumexp(z, -1)
    target = z.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    entropy = log_z - (torch.softmax(z, -1) * z).sum(-1) if "entropy" in outputs else None
    with torch.no_grad():
        squares = torch.logsumexp(2 * z, -1) - 2 * log_z if "log_sum_sq_probs" in outputs else None
        mean = z.mean(-1) if "mean_logits" in outputs else None
        top = z.argmax(-1) == targets if "is_top1" in outputs else None
    return target - log_z, entropy, squares, mean, top


def counts_all_positions(device: torch.device) -> bool:
    """Return False: TRL asks whether ignored labels are left out, so that sizes would depend on data."""
    return False


def with_noise(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    """Return embeddings with NEFTune's noise. transformers' hook reads its bounds as a number of a tensor, by which capture would take the
    tokens for values that decide."""
    if not module.training:
        return output
    dims = torch.full((), output.size(1) * output.size(2), dtype=torch.float32, device=output.device)
    bound = module.neftune_noise_alpha / torch.sqrt(dims)
    return output + torch.zeros_like(output).uniform_(-1, 1) * bound


_DORA = "peft.tuners.lora.dora"
_STAND_INS: dict[str, Callable[..., Any]] = {
    f"{_DORA}:dequantize_module_weight": weight_of,
    f"{_DORA}:transpose": transposed,
    "peft.tuners.lora.layer:ParamWrapper.forward": with_adapted_parameter,
    "peft.tuners.loha.layer:LoHaLayer.forward": with_module_dropout,
    "peft.tuners.lokr.layer:LoKrLayer.forward": with_module_dropout,
    "peft.tuners.shira.layer:Linear.get_delta_weight": sparse_update,
    "peft.tuners.vblora.layer:Linear._get_lora_matrices": of_vector_bank,
    "transformers.integrations.neftune:neftune_post_forward_hook": with_noise,
    "trl.kernels.chunked_logprob:ChunkedLogProbFunction": log_probabilities,
    "trl.kernels.chunked_logprob:_use_triton": counts_all_positions,
}
_CACHED = tuple(
    f"{_DORA}:{kind}.{method}"
    for kind in ("DoraLinearLayer", "DoraEmbeddingLayer", "_DoraConvNdLayer")
    for method in ("get_weight_norm", "get_lora_weight")
)  # methods behind PEFT's cache, which is for evaluations
_PARTS = {  # the part of the table of private names that a layer needs
    f"{_DORA}:DoraLinearLayer": "DoRA",
    "peft.tuners.lora.layer:ParamWrapper": "adapted parameters",
    "peft.tuners.loha.layer:LoHaLayer": "LoHa and LoKr",
    "peft.tuners.lokr.layer:LoKrLayer": "LoHa and LoKr",
    "peft.tuners.shira.layer:Linear": "SHiRA",
    "peft.tuners.vblora.layer:VBLoRALayer": "VB-LoRA",
}
_REFUSED = {  # layers, and what is like them
    "peft.tuners.waveft.layer:WaveFTLayer": ("WaveFT", "FourierFT"),
    "peft.tuners.frod.layer:FrodLayer": ("FRoD", "VeRA"),
    "peft.tuners.poly.layer:PolyLayer": ("Poly", "LoRA with several adapters"),
    "peft.tuners.cpt.model:CPTEmbedding": ("CPT", "prompt tuning"),
    "peft.tuners.cartridge.model:CartridgeEncoder": ("Cartridge", "prefix tuning"),
}

_HOOKED = "peft.tuners.osf.layer:OSFLayer"  # a layer whose hooks compute with the gradients of whole weights


def stand_ins() -> dict[Any, Callable[..., Any]]:
    """Return what is traced in the place of functions, methods and autograd functions of libraries that are imported."""
    functions = {known: function for name, function in _STAND_INS.items() if (known := _known(name)) is not None}
    for name in _CACHED:
        method = _known(name)
        if hasattr(method, "__wrapped__"):
            functions[method] = method.__wrapped__
    return functions


def refuse_layers(model: nn.Module) -> None:
    """Raise `UnsupportedError` for a layer that can't be captured, and `ModelError` for one that is traced otherwise than its
    library has it if the release lacks a name that this needs."""
    for name, (adapter, other) in _REFUSED.items():
        kind = _known(name)
        where = [path for path, m in model.named_modules() if kind is not None and isinstance(m, kind)]
        if where:
            raise UnsupportedError(
                f"adapters of {adapter} can't be captured as a graph",
                where=where[0],
                why="what they compute is written in Python that decides by types or values, makes classes or hooks, or has sparse tensors",
                hint=f"{other} can, and LoRA; or train without a plan",
            )
    kinds = {kind: part for name, part in _PARTS.items() if (kind := _known(name)) is not None}
    parts = {part for kind, part in kinds.items() if any(isinstance(m, kind) for m in model.modules())}
    if any(_module_of_forward(m).startswith("trl.") for m in model.modules()):
        parts.add("fused heads")
    for part in sorted(parts):
        refuse_release(part)


def refuse_hooked_layers(model: nn.Module) -> None:
    """Raise `UnsupportedError` for a layer whose hooks on weights can't compute with gradients as ranks have them."""
    kind = _known(_HOOKED)
    where = [path for path, m in model.named_modules() if kind is not None and isinstance(m, kind)]
    if where:
        raise UnsupportedError(
            "adapters of OSF can't be trained on ranks",
            where=where[0],
            why="their hooks on weights multiply whole gradients by plain matrices, and gradients are DTensors",
            hint="LoRA, OFT and BOFT can; or train in one process without a process group",
        )


def _module_of_forward(module: nn.Module) -> str:
    """Return the name of the Python module that a forward of the module's own, in place of its class's, is from."""
    function = getattr(module.__dict__.get("forward"), "__func__", None)
    return str(getattr(function, "__globals__", {}).get("__name__"))


def _known(name: str) -> Any:
    """Return what a name of the form "module:path" is; None if the module is not imported or lacks it."""
    module, _, path = name.partition(":")
    return functools.reduce(lambda owner, part: getattr(owner, part, None), path.split("."), sys.modules.get(module))
