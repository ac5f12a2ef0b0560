"""Plain tensors beside tensors that are divided over ranks (`weight.copy_(value)`, `weight.mul_(mask)`, `weight + torch.eye(4)`).

torch refuses them, since it can't know what a plain tensor is there. Here it is the whole one, where all ranks do the same with it: in
what writes to a divided tensor, of which each rank writes its part; in an optimizer's step and in torch.nn.init. Elsewhere it may be of a
rank's own batch: what is computed of it with one rank's part of a weight is right on no rank, and the gradient of a whole weight is that
rank's own. That is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_leaves, tree_map_only

from zgraph.errors import ModelError, UnsupportedError, divided_penalty
from zgraph.torch_compat.dtensors import dtensor, layout, local_of
from zgraph.torch_compat.operators_of_shards import (
    Treatment,
    as_torch_does,
    called_by_all_ranks,
    is_divided,
    is_of_a_model,
    line_of_caller,
    with_strategies,
)

aten = torch.ops.aten
_IN_PLACE = (
    *(aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor, aten.copy_.default),
    *(aten.addcmul_.default, aten.addcdiv_.default, aten.lerp_.Scalar, aten.lerp_.Tensor),
)
_NEW = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
"""With those in place: what computes each element of those in its own place, and of floating-point numbers of one dtype another such."""
MIXED = "takes a plain tensor beside one that is divided over the ranks"
"""In each of these errors."""


def with_plain_operands(treatments: Mapping[Any, Treatment]) -> dict[Any, Treatment]:
    """Return treatments of all operators that take several tensors, which give these whole ones."""
    several = [o for o in {*with_strategies(), *treatments} if _takes_several(o)]
    beside = {o: functools.partial(_beside_plain, treatments.get(o, as_torch_does)) for o in several}
    return {**treatments, **beside, **{o: functools.partial(_by_elements, beside[o]) for o in (*_IN_PLACE, *_NEW)}}


def _by_elements(treatment: Treatment, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Compute tensors that are all divided alike, each rank its own elements, in half the time that torch's DTensors take."""
    first = args[0]
    if type(first) is not DTensor or not _is_of_values(first.placements):
        return treatment(operator, args, kwargs)
    spec, mine = first._spec, []
    for value in args:
        if type(value) is DTensor:
            other = value._spec
            if other is not spec and not (
                other.mesh is spec.mesh
                and other.placements == spec.placements
                and other.tensor_meta == spec.tensor_meta
            ):
                return treatment(operator, args, kwargs)
            mine.append(value._local_tensor)
        elif isinstance(value, torch.Tensor):
            return treatment(operator, args, kwargs)
        else:
            mine.append(value)
    if operator in _IN_PLACE:
        operator(*mine, **kwargs)
        return first
    if not first.dtype.is_floating_point:
        return treatment(operator, args, kwargs)
    return dtensor(operator(*mine, **kwargs), spec)


@functools.lru_cache(maxsize=256)
def _is_of_values(placements: tuple[Placement, ...]) -> bool:
    """Return whether ranks hold values of a tensor, not parts of sums."""
    return all(type(placement) in (Shard, Replicate) for placement in placements)


def _takes_several(operator: Any) -> bool:
    kinds = [str(argument.type) for argument in operator._schema.arguments]
    tensors = sum("Tensor" in kind for kind in kinds)
    return operator.namespace == "aten" and (tensors > 1 or any("List[" in k and "Tensor" in k for k in kinds))


def _plain(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the plain tensors among arguments, but constants of one element, which torch takes; this runs at each call of an operator."""
    for value in values:
        kind = type(value)
        if kind is DTensor or kind is float or kind is int:
            continue
        if kind is list or kind is tuple:
            yield from _plain(value)
        elif isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and not _is_constant(value):
            yield value


def _is_constant(tensor: torch.Tensor) -> bool:
    """Return whether a plain tensor is a number that is no loss: one of these is of a rank's own rows."""
    return tensor.numel() == 1 and not (tensor.requires_grad and torch.is_grad_enabled())


def _beside_plain(treatment: Treatment, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    plain = [*_plain(args), *_plain(kwargs.values())]
    if not plain:
        return treatment(operator, args, kwargs)
    given = [t for t in tree_leaves((args, dict(kwargs))) if isinstance(t, DTensor)]
    if not all(map(is_of_a_model, given)):
        return treatment(operator, args, kwargs)
    # (of whole weights each rank would have the gradient of its own plain tensor, and go another way than the others)
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    divided = next((t for t in given if is_divided(t) or learns), None)
    arguments = operator._schema.arguments
    written = tree_leaves([args[0] if a is arguments[0] else kwargs.get(a.name) for a in arguments if a.is_write])
    writes = bool(written) and all(isinstance(t, DTensor) for t in written)
    if divided is not None and not writes and not called_by_all_ranks():
        if plain[0].numel() == 1:
            name = operator.overloadpacket.__name__
            why = f"{name} takes a number of a rank's own rows beside one that belongs to all ranks"
            raise divided_penalty(UnsupportedError, why, where=line_of_caller())
        raise ModelError(
            f"{operator.overloadpacket.__name__} {MIXED}",
            where=line_of_caller(),
            why=f"the one of {tuple(divided.shape)} belongs to all ranks; whether the plain one of {tuple(plain[0].shape)} is the same on all "
            "of them, as a weight is, or of a rank's own batch, is not known",
            hint=f"take full_tensor() of the one of {tuple(divided.shape)}, on all ranks: its gradient is averaged over them; or make the "
            "plain one like it, "
            "torch.distributed.tensor.distribute_tensor(value, weight.device_mesh, weight.placements), or by "
            "torch.zeros_like(weight), torch.rand_like(weight), or as a copy of the weight after zgraph.compile; or compute it in the "
            "model's forward, or without gradients inside of zgraph.full_weights(model)",
        )
    if not any(map(is_divided, given)) and not any(isinstance(t, DTensor) for t in written):
        return operator(*tree_map_only(DTensor, local_of, args), **tree_map_only(DTensor, local_of, dict(kwargs)))
    mesh = given[0].device_mesh

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor) or tensor.numel() == 1:
            return tensor
        everywhere = [Replicate()] * mesh.ndim
        return dtensor(tensor, layout(mesh, everywhere, tensor.shape, tensor.stride(), tensor.dtype))

    result = treatment(operator, *tree_map_only(torch.Tensor, whole, (args, dict(kwargs))))
    return args[0] if arguments[0].is_write and result is not None else result
