"""Random numbers for tensors that are divided over ranks (`torch.randn_like(weight)`, `grad.normal_()`, dropout of a weight).

torch draws those of a rank's own part by the rank's generator: on a CPU ranks with one seed get the same numbers, each for another
part, and on a GPU the state of the first rank's generator becomes that of all, and ranks draw by offsets that no whole tensor has.
Here a rank draws for the whole tensor, and keeps its part: ranks with one seed have the numbers of plain PyTorch, and
their generators stay alike. Nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_map_only

from zgraph.errors import ModelError
from zgraph.torch_compat.dtensors import dtensor, layout, local_of, part_of
from zgraph.torch_compat.operators_of_shards import Treatment, as_torch_does, is_divided, is_of_a_model

aten = torch.ops.aten
_IN_PLACE = (
    aten.normal_.default,
    aten.uniform_.default,
    aten.bernoulli_.float,
    aten.exponential_.default,
    aten.geometric_.default,
    aten.log_normal_.default,
    aten.cauchy_.default,
    *(aten.random_.default, aten.random_.to, getattr(aten.random_, "from"), aten.bernoulli_.Tensor),
)
_LIKE = (aten.randn_like.default, aten.rand_like.default, aten.randint_like.default, aten.randint_like.low_dtype)
_OF_VALUES = (
    *(aten.bernoulli.default, aten.native_dropout.default),
    *(aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor),
)
_OTHERS = (
    aten.rrelu_with_noise.default,
    aten.rrelu_with_noise_functional.default,
    aten.multinomial.default,
    aten.poisson.default,
)


def _draw(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Draw for a DTensor."""
    every = [t for t in (*args, *kwargs.values()) if isinstance(t, DTensor)]
    given = next(filter(is_divided, every), every[0])
    mesh, local = given.device_mesh, given._local_tensor
    known = (Shard, Replicate)
    if local.is_meta or any(not is_of_a_model(t) or any(type(p) not in known for p in t.placements) for t in every):
        return as_torch_does(operator, args, kwargs)

    def spread(tensor: DTensor) -> torch.Tensor:  # (each number decides about the value in its own place)
        whole = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=local.device).fill_(1)
        part_of(whole, tensor).copy_(local_of(tensor))
        return whole

    drawn = operator(*tree_map_only(DTensor, spread, args), **tree_map_only(DTensor, spread, dict(kwargs)))
    if operator in _IN_PLACE:
        local_of(args[0]).copy_(part_of(drawn, args[0]))
        return args[0]

    def divided(value: torch.Tensor) -> DTensor:
        where = layout(mesh, given.placements, value.shape, value.stride(), value.dtype)
        return dtensor(part_of(value, given).clone(), where)

    return tree_map_only(torch.Tensor, divided, drawn)


def _refuse(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Draw as torch does, unless ranks have different parts."""
    if isinstance(args[0], DTensor) and is_of_a_model(args[0]) and is_divided(args[0]):
        raise ModelError(
            f"{operator.overloadpacket.__name__} draws random numbers for a tensor that is divided over the ranks",
            why="each rank would draw for its own part, and ranks with one seed the same numbers",
            hint="draw by torch.rand_like or another of docs/features/your-own-loop.md; or inside zgraph.full_weights(model, write=True)",
        )
    return as_torch_does(operator, args, kwargs)


NOISE: dict[Any, Treatment] = {
    **dict.fromkeys((*_IN_PLACE, *_LIKE, *_OF_VALUES), _draw),
    **dict.fromkeys(_OTHERS, _refuse),
}
"""A rank draws for a whole tensor, and keeps its part; what it can't draw so is refused."""
