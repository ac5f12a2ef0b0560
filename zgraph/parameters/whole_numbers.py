"""Steps of torch's and other optimizers on sharded parameters, in which numbers of whole parameters are whole.

An optimizer that knows nothing of shards may use a number of a whole parameter: Adafactor the norm of its update, Rprop the places
where a sign has changed. torch's `DTensor` gives a norm as parts of a sum that are on several ranks, and what reads it gets this
rank's own part, or an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from zgraph.torch_compat.dtensors import local_of

aten = torch.ops.aten


class WholeNumbers(TorchDispatchMode):
    """A context in which sums over sharded tensors are whole on every rank. All ranks must run the same operators."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = args[0] if args else None
        if isinstance(given, DTensor) and func is aten.index_put_.default and _elementwise(given, args[1], args[2]):
            func(local_of(given), [local_of(args[1][0])], local_of(args[2]))
            return given
        return tree_map_only(DTensor, _whole_sum, func(*args, **(kwargs or {})))


def _elementwise(target: DTensor, masks: Sequence[Any], value: torch.Tensor) -> bool:
    """Return whether one number is written where a mask of the target's own shape and layout is true."""
    mask = masks[0]
    return (
        len(masks) == 1
        and isinstance(mask, DTensor)
        and mask.dtype == torch.bool
        and (mask.shape, mask.placements) == (target.shape, target.placements)
        and value.numel() == 1
    )


def _whole_sum(tensor: DTensor) -> DTensor:
    """Return a tensor whose parts on several ranks are summed (or reduced as they are to be); another as it is."""
    if not any(p.is_partial() for p in tensor.placements):
        return tensor
    return tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])
