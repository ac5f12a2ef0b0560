"""Lay out parameters: which rank has which rows, in which dtype, stored in which tier."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from zgraph.errors import UnsupportedError
from zgraph.parameters.mixed_precision import stays_fp32, with_precision
from zgraph.plan.precision import Precision
from zgraph.program.program import ParamSpec

if TYPE_CHECKING:
    from zgraph.plan.plan import Plan

logger = logging.getLogger(__name__)


def layout(
    module: nn.Module,
    mesh: dict[str, int],
    zero: int,
    persistence_threshold: int,
    precision: Precision | None = None,
    home: str | None = None,
    least_bytes: int = 0,
) -> dict[str, ParamSpec]:
    """Return each parameter's layout by name (a tied one under its first name): its division over ranks, dtypes and
    tier.

    Scalars, empty parameters and those with fewer than `persistence_threshold` elements stay whole. Parts of at least
    `least_bytes` are stored in `home`.
    """
    precision = precision or Precision()
    ranks = mesh.get("dp", 1)
    stays = stays_fp32(module, precision)
    specs: dict[str, ParamSpec] = {}
    for name, param in module.named_parameters():
        if isinstance(param, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise UnsupportedError(
                f"parameter {name!r} has no shape yet",
                why="the model has lazy modules",
                hint="run the model once before compiling it",
            )
        if param.layout is not torch.strided:
            raise UnsupportedError(
                f"parameter {name!r} is sparse",
                why=f"its layout is {str(param.layout).removeprefix('torch.')}, and shards are rows of strided tensors",
                hint="make it dense (.to_dense()), or keep the sparse tensor outside of the model",
            )
        spec = ParamSpec(name, tuple(param.shape), _dense_stride(param, name), param.dtype, param.requires_grad)
        spec = with_precision(spec, precision, stays)
        sharded = zero > 0 and ranks > 1 and param.dim() > 0 and param.numel() >= max(1, persistence_threshold)
        spec = spec.sharded("dp", ranks) if sharded else spec
        part = math.prod(spec.shard_shape) * spec.dtype.itemsize
        specs[name] = replace(spec, home=home, grad_home=home) if part and part >= least_bytes else spec
    return specs


def planned_layout(module: nn.Module, mesh: dict[str, int], plan: Plan) -> dict[str, ParamSpec]:
    """Return the layout of a plan, on a mesh of these sizes."""
    home, precision = plan.offload.tier("parameters"), plan.resolved_precision()
    return layout(module, mesh, plan.zero, plan.param_persistence_threshold, precision, home, plan.offload.least_bytes)


def with_requires_grad(specs: dict[str, ParamSpec], params: dict[str, nn.Parameter]) -> dict[str, ParamSpec]:
    """Return the layouts with `requires_grad` as it is now."""
    return {
        n: s if s.requires_grad == params[n].requires_grad else replace(s, requires_grad=params[n].requires_grad)
        for n, s in specs.items()
    }


def row_by_row(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape."""
    return tuple(torch.empty(tuple(shape), device="meta").stride())


def _dense_stride(param: torch.Tensor, name: str) -> tuple[int, ...]:
    """Return the strides of the whole parameter in programs: its own if its rows follow each other densely in memory,
    else contiguous ones.
    """
    stride = param.stride()
    order = sorted(range(param.dim()), key=lambda d: (-stride[d], d))
    expected, ok = 1, True
    for d in reversed(order):
        ok = ok and (param.shape[d] == 1 or stride[d] == expected)
        expected *= param.shape[d]
    if ok and (not order or order[0] == 0 or param.shape[0] == 1 or param.numel() == 0):
        return tuple(stride)
    logger.info("parameter %s is stored row by row from now on (its memory format was %s)", name, list(stride))
    return row_by_row(param.shape)
