"""Gradients of whole tensors that a loss outside of the model reads (`param.full_tensor()`, `to_local()` of one that is not divided).

torch takes the gradient that a rank computes for such a tensor for the same on all ranks, without a word. In a loss of a rank's own
rows it is not: each rank's part of the weight, or its copy, would follow that rank's rows alone. Here it is averaged over the ranks, as the
gradients of the model's programs are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zgraph.torch_compat.operators_of_shards import is_divided, is_of_a_model


def averaging(method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a method that gives a whole tensor, with the gradient averaged over the ranks of a compiled model's mesh."""

    @functools.wraps(method)
    def averaged(self: DTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        value = method(self, *args, **kwargs)
        told = (
            any(a is not None for a in args) or kwargs.get("grad_placements") is not None
        )  # (the user says what it is)
        of_part = method.__name__ == "to_local" and is_divided(self)
        if told or of_part or not value.requires_grad or not is_of_a_model(self):
            return value
        whole: torch.Tensor = _Averaged.apply(value, self.device_mesh)  # type: ignore[no-untyped-call]
        return whole

    return averaged


class _Averaged(torch.autograd.Function):
    """A tensor as it is, whose gradient is averaged over a mesh."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        total = gradient.contiguous().clone()
        for dim in range(ctx.mesh.ndim):
            if ctx.mesh.size(dim) > 1:
                dist.all_reduce(total, group=ctx.mesh.get_group(dim))
        return total.div_(ctx.mesh.size()), None
