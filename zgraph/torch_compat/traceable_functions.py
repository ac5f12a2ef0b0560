"""Functions of torch that read values in Python or C++, written with tensors: capture traces these in their place.

Each returns what torch's own returns. `dynamo` says which function each stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F


def cov(
    input: torch.Tensor,
    *,
    correction: int = 1,
    fweights: torch.Tensor | None = None,
    aweights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `torch.cov`, whose own implementation reads in Python whether the degrees of freedom are above zero."""
    x = input.view(1, -1) if input.dim() < 2 else input
    weights = fweights
    if fweights is not None and fweights.numel():
        torch._assert_async((fweights >= 0).all(), "cov(): fweights cannot be negative")
    if aweights is not None:
        if aweights.numel():
            torch._assert_async((aweights >= 0).all(), "cov(): aweights cannot be negative")
        weights = aweights if weights is None else weights * aweights
    if weights is None:
        mean = x.sum(1) / x.shape[1]
        freedom: Any = max(x.shape[1] - correction, 0)
    else:
        total = weights.sum()
        torch._assert_async(total != 0, "cov(): weights sum to zero, can't be normalized")
        mean = (x * weights).sum(1) / total
        lost = correction * (weights * aweights).sum() / total if aweights is not None and correction else correction
        freedom = (total - lost).clamp(min=0)
    x = x - mean.unsqueeze(1)
    product = torch.mm(x, (x if weights is None else x * weights).t().conj())
    return torch.true_divide(product, torch.as_tensor(freedom, device=x.device)).squeeze()


def corrcoef(input: torch.Tensor) -> torch.Tensor:
    """Return `torch.corrcoef`, by way of `cov`."""
    c = cov(input)
    if c.dim() == 0:
        return c / c
    deviation = c.diag().sqrt() if not c.is_complex() else torch.real(c.diag()).sqrt()
    c = c / deviation.view(-1, 1) / deviation.view(1, -1)
    if c.is_complex():
        return torch.complex(torch.real(c).clip(-1, 1), torch.imag(c).clip(-1, 1))
    return c.clip(-1, 1)


def batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Return `F.batch_norm` in training, with a momentum that is only known at run time (1 / batches:
    `BatchNorm(momentum=None)`)."""
    mean, variance = torch.zeros_like(running_mean), torch.zeros_like(running_var)
    output = F.batch_norm(input, mean, variance, weight, bias, training, 1.0, eps)
    running_mean.copy_(momentum * mean + (1 - momentum) * running_mean)
    running_var.copy_(momentum * variance + (1 - momentum) * running_var)
    return output


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Return `F.ctc_loss` for lengths that are Python numbers, which torch's own makes tensors of where capture can't
    see it."""
    lengths = torch.tensor(input_lengths), torch.tensor(target_lengths)
    return F.ctc_loss(log_probs, targets, *lengths, blank, reduction, zero_infinity)


def detect_is_causal_mask(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Return whether transformers' layers may treat a mask as the causal one: only if told so, without a look at its
    values."""
    return is_causal is True
