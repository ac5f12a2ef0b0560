"""TRL's fused head as operators that can be captured.

TRL replaces the forward of a causal language model by one that returns log-probabilities of labels. It computes them in tiles, in an autograd
function that writes into its buffers, which no graph can hold. Here the same numbers are computed from the whole logits by plain operators.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from zgraph.hf.replaced_globals import Before, replace
from zgraph.torch_compat.private_names import refuse_release

_FUNCTION = "_ChunkedLogProbFunction"  # TRL's names, in the globals of the forward that it gives a model
_MODULE = "zgraph.hf.trl_forward"
_COMPACT = "_use_triton"  # the function that decides whether ignored labels are left out, so that sizes depend on data


class LogProbabilities:
    """A replacement for TRL's `ChunkedLogProbFunction`."""

    @staticmethod
    def apply(
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
        """Compute for each position the log-probability of its target, and what `outputs` names; all are float32 of
        shape [N].

        `outputs` may name the entropy, the logarithm of the sum of squared probabilities, the mean logit, and whether
        the target is the most likely token. `hidden` is [N, H], `weight` [V, H].
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


_REPLACED = {_FUNCTION: LogProbabilities, _COMPACT: lambda device: False}


def capturable_heads(model: nn.Module) -> list[Before]:
    """Replace TRL's forward in each module of a model by one that can be captured; return what was replaced."""
    replaced = []
    for module in model.modules():
        forward = module.__dict__.get("forward")
        function: Any = getattr(forward, "__func__", None)
        names = getattr(function, "__globals__", {})
        if str(names.get("__name__")).startswith("trl."):
            refuse_release("fused heads")
        if isinstance(forward, types.MethodType) and _FUNCTION in names:
            replaced.append(replace(module, "forward", function, _MODULE, _REPLACED))
    return replaced
