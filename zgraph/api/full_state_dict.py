"""State dicts of a compiled model and its optimizer with whole tensors, and such dicts sharded again like the
model's parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from zgraph.api.gathered_weights import bytes_of, ranks_of, ready
from zgraph.errors import refuse_unless
from zgraph.parameters.whole_tensors import BUCKET, Wanted, gathered
from zgraph.torch_compat.dtensors import local_of

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
    """Return a compiled model's state dict with whole plain tensors; with an `optimizer`, (that, the optimizer's state dict).

    Both are like those of the plain model: `torch.save` can save them, and any program can load them. `optimizer`: the
    plan's (`model.zgraph.optimizer`) or one of your own. `ranks`: the global numbers of the ranks that get them, by default
    all; the others get empty dicts. `device`: where the tensors are put. Buffers are this rank's own. Gathers take at most
    `max_bytes`, or one tensor's bytes if it is larger. All ranks must call it.
    """
    states = optimizer is None or callable(getattr(optimizer, "state_dict", None))
    refuse_unless(states, "zgraph.full_state_dict(optimizer=…)", optimizer, "an optimizer or None")
    refuse_unless(
        isinstance(device, str | torch.device), "zgraph.full_state_dict(device=…)", device, 'a device, such as "cpu"'
    )
    runtime = ready(model, "a whole state dict")
    chosen = ranks_of(runtime, ranks)
    runtime.everyone.vote("a whole state dict", f"{chosen} {optimizer is not None} {max_bytes}")
    gather = _Gather(runtime, chosen, torch.device(device), bytes_of(max_bytes))
    (of_model,) = gather.wholes([model.state_dict(keep_vars=True)])
    return of_model if optimizer is None else (of_model, gather.of_optimizer(optimizer))


def full_optimizer_state(
    models: Sequence[nn.Module], optimizer: torch.optim.Optimizer, *, ranks: Collection[int] | None = None
) -> dict[str, Any]:
    """Return the whole state dict of an optimizer over parameters of these compiled models: see `full_state_dict`.

    All ranks must call it.
    """
    runtime, chosen = _ready(models, "an optimizer's whole state dict", ranks)
    return _Gather(runtime, chosen, torch.device("cpu"), BUCKET).of_optimizer(optimizer)


def full_tensors(
    models: Sequence[nn.Module], tensors: Mapping[str, Any], *, ranks: Collection[int] | None = None
) -> dict[str, Any]:
    """Return a dict of tensors of these compiled models, such as the state dict of a module that holds them, whole and
    on the CPU.

    It is empty on ranks that are not in `ranks`. All ranks must call it.
    """
    runtime, chosen = _ready(models, "whole tensors", ranks)
    (whole,) = _Gather(runtime, chosen, torch.device("cpu"), BUCKET).wholes([dict(tensors)])
    return whole


def _ready(models: Sequence[nn.Module], what: str, ranks: Collection[int] | None) -> tuple[Runtime, list[int] | None]:
    """Return the first of these models' runtimes and the ranks that need what is gathered (None: all), after pending
    updates, once all ranks have asked for the same."""
    runtimes = [ready(model, what) for model in models]
    chosen = ranks_of(runtimes[0], ranks)
    for runtime in runtimes:
        runtime.everyone.vote(what, str(chosen))
    return runtimes[0], chosen


def as_held(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's whole state dict with each tensor of a parameter's shape sharded like the parameter, and tensors of
    other shapes, such as Adafactor's sums of rows, whole on the parameter's mesh."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [n for group in state["param_groups"] for n in group["params"]]
    of = dict(zip(numbers, params, strict=True))
    sharded_states = {
        n: {k: _sharded_state(k, v, of[n]) if torch.is_tensor(v) else v for k, v in param_state.items()}
        for n, param_state in state["state"].items()
    }
    return {**state, "state": sharded_states}


def _sharded_state(key: str, state: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    if state.shape == param.shape and (state.dim() or key not in _COUNTS):
        return as_cut(state, param)
    if state.dim() and isinstance(param, DTensor):
        mesh = param.device_mesh
        return DTensor.from_local(state.to(param.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return state


# States of torch's optimizers that are one number for each parameter: for a 0-dim parameter they can't be told by their shape.
_COUNTS = ("step", "mu_product", "eta", "mu")


def as_cut(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor that this rank has read, sharded like a parameter."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


class _Gather:
    """The gathering of tensors in dicts, for the ranks that need them."""

    def __init__(self, runtime: Runtime, ranks: Collection[int] | None, device: torch.device, max_bytes: int) -> None:
        self.runtime, self.ranks, self.device, self.max_bytes = runtime, ranks, device, max_bytes
        self.here = ranks is None or torch.distributed.get_rank() in ranks

    def of_optimizer(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's whole state dict."""
        states = optimizer.state_dict()
        numbers = sorted(states["state"])  # (in one order on all ranks)
        whole_states = self.wholes([states["state"][n] for n in numbers])
        return {**states, "state": dict(zip(numbers, whole_states, strict=True))} if self.here else {}

    def wholes(self, dicts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the dicts with whole tensors, where a tensor under several names stays one; empty dicts on ranks
        that need none."""
        wanted = {id(v): v for given in dicts for v in given.values() if torch.is_tensor(v)}
        whole_tensors: dict[int, torch.Tensor] = {}
        given = [Wanted(v, v.dtype) for v in wanted.values()]
        stream = gathered(given, self.runtime.device, self.max_bytes, ranks=self.ranks)
        for (key, value), whole in zip(wanted.items(), stream, strict=True):
            if whole is not None:
                whole_tensors[key] = _apart(whole, value, self.device)
        return [{n: whole_tensors.get(id(v), v) for n, v in given.items()} if self.here else {} for given in dicts]


def _apart(whole: torch.Tensor, of: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a whole tensor on a device, in memory of its own that it shares neither with the model nor with the
    rest of its bucket."""
    tensor, local = whole.to(device), local_of(of)
    shared = tensor.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    return tensor.clone() if shared or tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
