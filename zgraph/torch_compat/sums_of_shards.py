"""Sums over tensors that are divided over ranks, and writes in place that torch's DTensors have not.

An optimizer that knows nothing of shards may use a number of a whole parameter: Adafactor the norm of its update, Muon a product
of matrices. torch gives a norm as parts of a sum that are on several ranks, in which nothing can be written in place. In the step of
an optimizer, which all ranks make, it is whole here; elsewhere it is torch's, for which nobody has to wait.
Rprop writes a number where a sign has changed, and copies several tensors at once, and fused SGD and Adagrad update several, which each rank
does in its own part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map_only

from zgraph.torch_compat.dtensors import local_of
from zgraph.torch_compat.operators_of_shards import Treatment, as_torch_does, called_by_all_ranks, is_of_a_model
from zgraph.torch_compat.whole_operands import else_on_whole

aten = torch.ops.aten
_SUMS = (
    *(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.nansum.default),
    *(aten.linalg_vector_norm.default, aten.norm.Scalar, aten._foreach_norm.Scalar, aten._foreach_max.default),
    *(aten.max.default, aten.max.dim, aten.amax.default, aten.min.default, aten.min.dim, aten.amin.default),
    *(aten.all.default, aten.all.dim, aten.any.default, aten.any.dim, aten.any.dims),
    *(aten.prod.default, aten.prod.dim_int, aten.logsumexp.default, aten.var.correction, aten.std.correction),
    *(aten.dot.default, aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default),
)

_FUSED = (
    *(aten._fused_sgd_.default, aten._fused_sgd_.tensor_lr, aten._fused_adagrad_.default),
    *([aten._fused_adagrad_.tensor_lr] if hasattr(aten._fused_adagrad_, "tensor_lr") else []),
)


def _sum(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    result = as_torch_does(operator, args, kwargs)
    return tree_map_only(DTensor, _whole, result) if called_by_all_ranks() else result


def _whole(tensor: DTensor) -> DTensor:
    """Return a tensor whose parts on several ranks are summed (or reduced as they are to be); another as it is."""
    if not is_of_a_model(tensor) or not any(p.is_partial() for p in tensor.placements):
        return tensor
    with torch.no_grad():
        return tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])


def _put(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Write one number where a mask of the target's own shape and layout is true; torch does all else."""
    given, masks, value = args[:3]
    mask = masks[0]
    here = (
        isinstance(given, DTensor)
        and is_of_a_model(given)
        and len(masks) == 1
        and isinstance(mask, DTensor)
        and mask.dtype == torch.bool
        and (mask.shape, mask.placements) == (given.shape, given.placements)
        and value.numel() == 1
    )
    if not here:
        return else_on_whole(operator, args, kwargs)
    operator(local_of(given), [local_of(mask)], local_of(value), *args[3:], **kwargs)
    return given


def _copy(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Copy tensors one by one."""
    if not all(isinstance(mine, DTensor) and is_of_a_model(mine) for mine in args[0]):
        return as_torch_does(operator, args, kwargs)
    for mine, other in zip(args[0], args[1], strict=True):
        mine.copy_(other, *args[2:], **kwargs)
    return None


def _by_elements(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Update each element by what is in its own place, on each rank in its own part."""
    lists = [a for a in args if isinstance(a, (list, tuple)) and a and all(isinstance(t, DTensor) for t in a)]
    alike = all(t.placements == like.placements for others in lists for t, like in zip(others, args[0], strict=False))
    if not lists or lists[0] is not args[0] or not alike or not all(map(is_of_a_model, args[0])):
        return as_torch_does(operator, args, kwargs)
    return operator(*tree_map_only(DTensor, local_of, args), **tree_map_only(DTensor, local_of, dict(kwargs)))


SUMS: dict[Any, Treatment] = {
    **dict.fromkeys(_SUMS, _sum),
    **dict.fromkeys(_FUSED, _by_elements),
    aten.index_put_.default: _put,
    aten._foreach_copy_.default: _copy,
}
"""Sums are whole in an optimizer's step; a number is written where a mask is true, and several tensors are copied."""
