"""Operators that torch's DTensors do not have, or have for rows alone that divide evenly (`weight.tril_()`, `torch.renorm(weight, …)`,
`weight[mask]`, `for row in weight:`, `weight.view(-1)`, a loss that is a mean).

They get whole tensors, which all ranks gather; what they give is whole on each rank, and what they write in place each rank writes to its part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map_only

from zgraph.errors import ModelError
from zgraph.torch_compat.dtensors import dtensor, layout, local_of, part_of
from zgraph.torch_compat.operators_of_shards import (
    Treatment,
    as_torch_does,
    is_divided,
    is_of_a_model,
    line_of_caller,
)

aten = torch.ops.aten
_WITHOUT_STRATEGY = (
    *(aten.tril_.default, aten.triu_.default, aten.renorm.default, aten.renorm_.default, aten.unfold.default),
    *(aten.index_fill.int_Scalar, aten.index_fill_.int_Scalar, aten.index_fill.int_Tensor, aten.index_fill_.int_Tensor),
    *(aten.index_copy.default, aten.index_copy_.default, aten.index_add.default, aten.index_add_.default),
    *(
        aten.masked_scatter.default,
        aten.masked_scatter_.default,
        aten.take.default,
        aten.put.default,
        aten.put_.default,
    ),
    *(aten.masked_select.default, aten.nonzero.default, aten._unique2.default, aten.unique_dim.default),
    *(aten.bucketize.Tensor, aten.searchsorted.Tensor, aten.histogram.bin_ct, aten.block_diag.default),
    *(
        aten._cdist_forward.default,
        aten._cdist_backward.default,
        aten._linalg_solve_ex.default,
        aten.linalg_lstsq.default,
    ),
    *(aten.convolution.default, aten.convolution_backward.default),  # (torch takes them for divided over batches)
    aten.scatter_add_.default,  # (torch's writes to a copy, and says that the tensor is whole)
)
_WITH_STRATEGY = (
    *(aten.index.Tensor, aten.index_put.default, aten.mv.default, aten.addmv.default),
    *(aten.scatter_.src, aten.scatter_.value, aten.allclose.default),
    *(aten.nll_loss_forward.default, aten.nll_loss_backward.default),
)
_LOSSES = (
    *(aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default, aten.soft_margin_loss.default),
    *(aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default),
    *(aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default),
    *(aten.soft_margin_loss_backward.default, aten.binary_cross_entropy_backward.default),
)
_ANOTHER_FORM = (aten.t_.default, aten.transpose_.default, aten.unsqueeze_.default, aten.resize_.default)
_OF_RANKS = tuple(
    operator.default
    for name in ("allreduce_", "broadcast_", "reduce_", "allgather_", "_allgather_base_", "reduce_scatter_", "send")
    if (operator := getattr(torch.ops.c10d, name, None)) is not None
)


def on_whole(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on whole tensors."""
    given = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
    if not isinstance(given, DTensor) or not is_of_a_model(given):
        return as_torch_does(operator, args, kwargs)
    mesh, everywhere = given.device_mesh, [Replicate()] * given.device_mesh.ndim

    def everything(tensor: DTensor) -> torch.Tensor:
        return local_of(tensor.redistribute(placements=everywhere))

    def shown(value: torch.Tensor) -> DTensor:
        return dtensor(value, layout(mesh, everywhere, value.shape, value.stride(), value.dtype))

    with torch.no_grad():
        result = operator(*tree_map_only(DTensor, everything, args), **tree_map_only(DTensor, everything, dict(kwargs)))
    if not operator._schema.is_mutable:
        return tree_map_only(torch.Tensor, shown, result)
    if is_divided(given):
        local_of(given).copy_(part_of(result, given))
    return given


def else_on_whole(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator as torch does, and where torch has no way to divide it, which all ranks find alike, on whole tensors."""
    try:
        return as_torch_does(operator, args, kwargs)
    except (RuntimeError, NotImplementedError):
        return on_whole(operator, args, kwargs)


def _mean_loss(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return a loss that is a mean: torch averages those of the ranks, which is another number where rows do not divide evenly."""
    names = [argument.name for argument in operator._schema.arguments]
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    given, target = named["self"], named["target"]
    if named.get("reduction", 1) != 1 or not isinstance(given, DTensor) or not is_of_a_model(given):
        return as_torch_does(operator, args, kwargs)
    count = torch.broadcast_shapes(given.shape, target.shape).numel()
    if "grad_output" in named:
        return as_torch_does(operator, (), {**named, "grad_output": named["grad_output"] / count, "reduction": 2})
    return as_torch_does(operator, (), {**named, "reduction": 2}) / count


def _strided(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Refuse views by strides, which torch has for those alone that change nothing."""
    try:
        return as_torch_does(operator, args, kwargs)
    except RuntimeError as error:
        raise ModelError(
            f"as_strided (or fill_diagonal_) of a tensor that may be divided over the ranks: {tuple(args[0].shape)}",
            where=line_of_caller(),
            why="the strides are those of the whole tensor, of which each rank has a part",
            hint="weight.masked_fill_(torch.eye(*weight.shape).bool(), 0) for a diagonal; or inside zgraph.full_weights(model, write=True)",
        ) from error


def _in_another_form(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Refuse to give a tensor another form where it is, which torch's DTensors can't."""
    if not is_of_a_model(args[0]):
        return as_torch_does(operator, args, kwargs)
    name = operator.overloadpacket.__name__
    raise ModelError(
        f"{name} gives a tensor of a compiled model another form in place: {tuple(args[0].shape)}",
        where=line_of_caller(),
        why="how it is divided over the ranks, and the programs that read it, are of the form it has",
        hint=f"{name[:-1]} without the underscore, or view, gives another tensor; a weight itself before zgraph.compile",
    )


def _between_ranks(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Communicate tensors that ranks have whole; refuse it for others."""
    given = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, DTensor)]
    if any(is_divided(t) for t in given if is_of_a_model(t)):
        raise ModelError(
            f"{operator.overloadpacket.__name__} of torch.distributed takes a tensor that is divided over the ranks",
            where=line_of_caller(),
            why="ranks would communicate different parts of it as if they were the same",
            hint="gradients are reduced when backward returns, there is nothing to do; value.full_tensor() for another whole value",
        )
    return operator(*tree_map_only(DTensor, local_of, args), **kwargs)


WHOLE: dict[Any, Treatment] = {
    **dict.fromkeys(_WITHOUT_STRATEGY, on_whole),
    **dict.fromkeys(_WITH_STRATEGY, else_on_whole),
    **dict.fromkeys(_LOSSES, _mean_loss),
    **dict.fromkeys(_OF_RANKS, _between_ranks),
    **dict.fromkeys(_ANOTHER_FORM, _in_another_form),
    aten.as_strided.default: _strided,
}
"""What needs whole tensors gets them."""
