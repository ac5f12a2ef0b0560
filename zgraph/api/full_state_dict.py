"""The state dict of a compiled model, and of its optimizer, with whole tensors; and such dicts cut as a model's parameters are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from zgraph.api.gathered_weights import bytes_of, ready
from zgraph.parameters.sharding import local_of
from zgraph.parameters.whole_tensors import BUCKET, Wanted, gathered

if TYPE_CHECKING:
    from zgraph.runtime.runtime import Runtime


def full_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    ranks: Collection[int] | None = None,
    device: str | torch.device = "cpu",
    max_bytes: int | str = BUCKET,
) -> Any:
    """The state dict of a compiled model with whole plain tensors, on this device; with an `optimizer`, a tuple of it and of the optimizer's.

    Both are as those of the plain model are: they can be saved by `torch.save` and loaded by any program. `optimizer`: the plan's
    (`model.zgraph.optimizer`) or one of your own. `ranks`: those (by their global numbers) that get them, by default all; the others get empty
    dicts. Buffers are this rank's own. Gathers take `max_bytes` at most, or one tensor's where it is larger. All ranks must call it.
    """
    runtime = ready(model, "a whole state dict")
    asked = f"{sorted(ranks) if ranks is not None else None} {optimizer is not None} {max_bytes}"
    runtime.everyone.vote("a whole state dict", asked)
    gather = _Gather(runtime, ranks, torch.device(device), bytes_of(max_bytes))
    (of_model,) = gather.wholes([model.state_dict(keep_vars=True)])
    return of_model if optimizer is None else (of_model, gather.of_optimizer(optimizer))


def full_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, ranks: Collection[int] | None = None
) -> dict[str, Any]:
    """The optimizer's part of `full_state_dict`, without that of the model."""
    runtime = ready(model, "an optimizer's whole state dict")
    runtime.everyone.vote("an optimizer's whole state dict", str(sorted(ranks) if ranks is not None else None))
    return _Gather(runtime, ranks, torch.device("cpu"), BUCKET).of_optimizer(optimizer)


def full_tensors(
    models: Sequence[nn.Module], tensors: Mapping[str, Any], *, ranks: Collection[int] | None = None
) -> dict[str, Any]:
    """A dict with values of these compiled models, say the state dict of a module that holds them, with whole plain tensors on the CPU. On ranks
    that are not named it is empty. All ranks must call it."""
    runtimes = [ready(model, "whole tensors") for model in models]
    for runtime in runtimes:
        runtime.everyone.vote("whole tensors", str(sorted(ranks) if ranks is not None else None))
    (whole,) = _Gather(runtimes[0], ranks, torch.device("cpu"), BUCKET).wholes([dict(tensors)])
    return whole


def as_held(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's whole state dict, with each tensor of a parameter's shape cut as the parameter is."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [n for group in state["param_groups"] for n in group["params"]]
    of = dict(zip(numbers, params, strict=True))
    made = {
        n: {
            k: as_cut(v, of[n])
            if torch.is_tensor(v) and v.shape == of[n].shape and (v.dim() or k not in _COUNTS)
            else v
            for k, v in kept.items()
        }
        for n, kept in state["state"].items()
    }
    return {**state, "state": made}


# What torch's optimizers keep as one number for each parameter: of a parameter that is one number itself the shape says nothing.
_COUNTS = ("step", "mu_product", "eta", "mu")


def as_cut(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole tensor that this rank has read, as one that is divided like a parameter."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


class _Gather:
    """Makes the tensors of dicts whole, on the ranks that need them."""

    def __init__(self, runtime: Runtime, ranks: Collection[int] | None, device: torch.device, max_bytes: int) -> None:
        self.runtime, self.device, self.max_bytes = runtime, device, max_bytes
        self.here = ranks is None or not runtime.everyone.ranks or torch.distributed.get_rank() in ranks

    def of_optimizer(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Its state dict."""
        states = optimizer.state_dict()
        numbers = sorted(states["state"])  # (in one order on all ranks)
        made = self.wholes([states["state"][n] for n in numbers])
        return {**states, "state": dict(zip(numbers, made, strict=True))} if self.here else {}

    def wholes(self, dicts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The dicts with whole tensors: one tensor under several names stays one. Empty ones where this rank needs none."""
        wanted = {id(v): v for given in dicts for v in given.values() if torch.is_tensor(v)}
        made: dict[int, torch.Tensor] = {}
        stream = gathered([Wanted(v, v.dtype) for v in wanted.values()], self.runtime.device, self.max_bytes)
        for (key, value), whole in zip(wanted.items(), stream, strict=True):
            if self.here:
                made[key] = _apart(whole, value, self.device)
        return [{n: made.get(id(v), v) for n, v in given.items()} if self.here else {} for given in dicts]


def _apart(whole: torch.Tensor, of: torch.Tensor, device: torch.device) -> torch.Tensor:
    """It on a device, in memory that nothing else has (the model, or the rest of what was gathered with it)."""
    there, held = whole.to(device), local_of(of)
    shared = there.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()
    return there.clone() if shared or there.untyped_storage().nbytes() > there.nbytes else there
