"""Holds back gradients that are to be reduced later: those of micro-batches inside `no_sync`, at ZeRO stages 0 and 1.

They are the user's own `.grad`, as DTensors that say so: placement `Partial("avg")`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from zgraph.parameters.shards import Shards
from zgraph.torch_compat import tensor_hooks


@dataclass(frozen=True)
class Reduction:
    """How the gradients of one backward are reduced."""

    now: bool = True  # whether in this backward, or only later
    added: frozenset[str] = frozenset()  # parameters whose pending gradients are reduced together with this backward's
    rest: bool = False  # whether the pending gradients of other parameters are reduced afterwards


class PendingGradients:
    """The pending gradients of one compiled module. If each backward `reduces`, there are none."""

    def __init__(self, shards: Shards, device: torch.device, *, reduces: bool) -> None:
        self.shards = shards
        self.device = device
        self.reduces = reduces  # whether each backward reduces, inside `no_sync` too

    def reduction(self, adds: Callable[[], frozenset[str]], *, accumulating: bool, never: bool = False) -> Reduction:
        """Return how the gradients of the next backward are reduced; `adds` returns the parameters whose `.grad` it
        adds to.

        ZeRO stages 2 and 3 reduce in each backward: only shards are kept. So do models of which a parameter has hooks:
        a hook is called with the gradient of one backward, as in autograd, not with a sum of several. `never`: the
        update takes gradients unreduced.
        """
        if self.reduces:
            return Reduction()
        if never:
            return Reduction(now=False)
        params = self.shards.params()
        if any(map(tensor_hooks.has_hooks, params.values())):
            self.reduce()
            return Reduction()
        grads = {n: p.grad for n, p in params.items() if p.grad is not None}
        waiting = {n for n, g in grads.items() if _is_partial(g)}
        if accumulating and len(waiting) == len(grads):
            return Reduction(now=False)
        if not waiting:
            return Reduction()
        into = adds()
        return Reduction(added=into & waiting, rest=bool(into))

    def take(self, name: str) -> torch.Tensor:
        """Take the pending gradient of a parameter: its `.grad` becomes None."""
        param = self.shards.params()[name]
        grad, param.grad = param.grad, None
        return grad._local_tensor  # type: ignore[union-attr,no-any-return]

    def zeros(self, name: str) -> torch.Tensor:
        """Return what a backward takes for a parameter that has no pending gradient, or whose pending gradient stays
        pending.
        """
        spec = self.shards.specs[name]
        return torch.zeros(spec.shape, dtype=spec.grad_dtype, device=self.device)

    def reduce(self) -> None:
        """Reduce all pending gradients. All ranks must call it."""
        for name, param in self.shards.params().items():
            if param.grad is not None and _is_partial(param.grad):
                param.grad = param.grad.redistribute(placements=self.shards.placements(self.shards.specs[name]))  # type: ignore[attr-defined]


def _is_partial(grad: torch.Tensor) -> bool:
    return isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements)
