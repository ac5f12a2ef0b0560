"""The operators that copy values between the device and the tier that they are offloaded to, each as a start and a
wait.

    zgraph::fetch(home, device) -> x    starts copying a value from its tier to the device
    zgraph::offload(x, tier) -> home    starts copying a value into new memory of a tier ("cpu", "nvme")
    zgraph::store(home!, x) -> token    starts writing a value over the one in its tier (in updates alone)
    zgraph::moved(to, of) -> to         waits for it; until then `of` lives, and nothing else may read `to`

They are functional, but for `store`. Code generation replaces the wait by one that writes in place (`moved_`), so that
no reader of a value can come before it. What runs them is in `zgraph/offload/run_transfers.py`; on virtual ranks they
are copies.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from zgraph.program.ops import library

# (Inductor may choose the strides: it would else copy a value whose transfer is still running)
_ANY = (torch.Tag.flexible_layout,)

library.define("fetch(Tensor home, Device device) -> Tensor", tags=_ANY)
library.define("offload(Tensor x, str tier) -> Tensor", tags=_ANY)
library.define("store(Tensor(a!) home, Tensor x) -> Tensor", tags=_ANY)
library.define("moved(Tensor to, Tensor of) -> Tensor", tags=_ANY)
library.define("moved_(Tensor(a!) to, Tensor of) -> ()", tags=_ANY)


def _like(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device)


torch.library.register_fake("zgraph::fetch", _like, lib=library)
torch.library.register_fake("zgraph::offload", lambda x, tier: _like(x, torch.device("cpu")), lib=library)
torch.library.register_fake("zgraph::store", lambda home, x: home.new_empty(1, dtype=torch.uint8), lib=library)
torch.library.register_fake("zgraph::moved", lambda to, of: _like(to, to.device), lib=library)
torch.library.register_fake("zgraph::moved_", lambda to, of: None, lib=library)

FETCH = torch.ops.zgraph.fetch.default
OFFLOAD = torch.ops.zgraph.offload.default
STORE = torch.ops.zgraph.store.default
MOVED = torch.ops.zgraph.moved.default
MOVED_IN_PLACE = torch.ops.zgraph.moved_.default

for operator in (STORE, MOVED_IN_PLACE):
    fx.node.has_side_effect(operator)


_ends: list[Callable[[], None]] = []


def when_one_fails(end: Callable[[], None]) -> None:
    """Register `end` to be called when a program with transfers fails: nothing waits for those that it has started."""
    _ends.append(end)


def failed() -> None:
    """Report that a program has failed to those that registered with `when_one_fails`."""
    for end in _ends:
        end()


def is_start(node: fx.Node) -> bool:
    """Return whether this node starts a transfer to or from a tier."""
    return node.op == "call_function" and node.target in (FETCH, OFFLOAD, STORE)


def is_wait(node: fx.Node) -> bool:
    """Return whether this node waits for a transfer to or from a tier."""
    return node.op == "call_function" and node.target in (MOVED, MOVED_IN_PLACE)


def is_host_transfer(node: fx.Node) -> bool:
    return is_start(node) or is_wait(node)


def start_of(wait: fx.Node) -> fx.Node:
    return wait.all_input_nodes[0]


def moved_value(start: fx.Node) -> fx.Node:
    """Return the node whose value a start copies."""
    operand = start.args[1] if start.target is STORE else start.args[0]
    assert isinstance(operand, fx.Node)
    return operand
