"""Numbers that are read of tensors which are divided over ranks (`item()`, `float(…)`, `if tensor:`).

torch reads the number of a rank's own part, without a word: a norm of a gradient would be another one on each rank, and the
whole one on none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zgraph.errors import ModelError
from zgraph.torch_compat.dtensors import local_of
from zgraph.torch_compat.operators_of_shards import (
    Treatment,
    called_by_all_ranks,
    is_divided,
    is_of_a_model,
    line_of_caller,
)


def _read(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Read the number of a DTensor of one element."""
    tensor: DTensor = args[0]
    if is_divided(tensor) and is_of_a_model(tensor):
        if not called_by_all_ranks():
            raise ModelError(
                "a number is read of a tensor that is divided over the ranks",
                where=line_of_caller(),
                why="each rank has another part of the weights and gradients, and would read the number of its own",
                hint="value.full_tensor() first, on all ranks; model.zgraph.grad_norms() for norms of gradients; "
                "zgraph.full_weights(model) for weights; or zero=0 in the plan, with which each rank has them whole",
            )
        with torch.no_grad():
            tensor = tensor.full_tensor()  # type: ignore[assignment]
    return operator(local_of(tensor))  # (as torch does)


NUMBERS: dict[Any, Treatment] = {torch.ops.aten._local_scalar_dense.default: _read}
"""An optimizer's step and torch.nn.init read the number of a whole tensor, and none is read elsewhere."""
