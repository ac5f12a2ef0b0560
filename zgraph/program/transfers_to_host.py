"""The operators that move values between the device and where they are offloaded to, each as a start and a wait.

    zgraph::fetch(home, device) -> x    starts bringing a value from its home to the device
    zgraph::offload(x, tier) -> home    starts taking a value to a home of its own in a tier ("cpu", "nvme")
    zgraph::store(home!, x) -> token    starts writing a value over the one at home (in updates alone)
    zgraph::moved(to, of) -> to         waits for it; until then `of` lives, and nothing else may read `to`

They are functional, but for `store`. Code generation writes the wait as the change in place that it is (`moved_`), so that no reader
of a value can come before it. What runs them stands in `zgraph/offload/run_transfers.py`; on virtual ranks they are copies.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from zgraph.program.ops import library

_ANY = (torch.Tag.flexible_layout,)  # (strides of Inductor's own: a copy with others would not be what is on its way)

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
    """Let `end` be called when a program with moves fails: nothing waits for those that it has started."""
    _ends.append(end)


def failed() -> None:
    """A program has failed."""
    for end in _ends:
        end()


def is_start(node: fx.Node) -> bool:
    """Whether this node starts a move."""
    return node.op == "call_function" and node.target in (FETCH, OFFLOAD, STORE)


def is_wait(node: fx.Node) -> bool:
    """Whether this node waits for a move."""
    return node.op == "call_function" and node.target in (MOVED, MOVED_IN_PLACE)


def is_move(node: fx.Node) -> bool:
    return is_start(node) or is_wait(node)


def start_of(wait: fx.Node) -> fx.Node:
    return wait.all_input_nodes[0]


def moved_value(start: fx.Node) -> fx.Node:
    """The node whose value a start moves."""
    operand = start.args[1] if start.target is STORE else start.args[0]
    assert isinstance(operand, fx.Node)
    return operand
