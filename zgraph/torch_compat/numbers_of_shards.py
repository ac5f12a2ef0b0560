"""Numbers that are read of tensors which are divided over ranks (`item()`, `float(…)`, `if tensor:`, `numpy()`, `tolist()`).

Of one element torch reads the number of a rank's own part, without a word: a norm of a gradient would be another one on each rank, and the
whole one on none. Of several it has none, of whole tensors either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from zgraph.errors import ModelError
from zgraph.torch_compat.dtensors import local_of
from zgraph.torch_compat.operators_of_shards import (
    Treatment,
    called_by_all_ranks,
    is_divided,
    is_of_a_model,
    line_of_caller,
)


def reading(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that reads all numbers of a tensor, which torch has for no DTensor."""

    @functools.wraps(method)
    def read(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        if not is_of_a_model(self):
            return method(self, *args, **kwargs)
        whole = (
            local_of(_whole(self)).detach().requires_grad_(self.requires_grad)
        )  # (numpy() refuses what requires a gradient)
        return getattr(whole, method.__name__)(*args, **kwargs)

    return read


def _read(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Read the number of a DTensor of one element."""
    return operator(local_of(_whole(args[0])))  # (as torch does)


def _whole(tensor: DTensor) -> DTensor:
    """Return a tensor of a model as all ranks have it, where all of them ask for it; refuse a divided one elsewhere."""
    if not is_divided(tensor) or not is_of_a_model(tensor):
        return tensor
    if not called_by_all_ranks():
        raise ModelError(
            "a number is read of a tensor that is divided over the ranks",
            where=line_of_caller(),
            why="each rank has another part of the weights and gradients, and would read the number of its own",
            hint="value.full_tensor() first, on all ranks; model.zgraph.grad_norms() for norms of gradients; "
            "zgraph.full_weights(model) for weights; or zero=0 in the plan, with which each rank has them whole",
        )
    with torch.no_grad():
        return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)


NUMBERS: dict[Any, Treatment] = {torch.ops.aten._local_scalar_dense.default: _read}
"""An optimizer's step and torch.nn.init read the number of a whole tensor, and none is read elsewhere."""
