"""Runs a program operator by operator and shows each value as soon as it is computed, to find where a value comes
from.

Collectives are waited for where they start. Random numbers are those that the program draws when it is compiled.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from zgraph.program import collectives, transfers_to_host
from zgraph.program.aliases import mutates
from zgraph.program.layout import laid_out, promised
from zgraph.program.program import Program
from zgraph.torch_compat import autograd_state, inductor_code

aten = torch.ops.aten


def run_node_by_node(ready: Program, values: Sequence[Any], seen: Callable[[fx.Node, Any], None]) -> None:
    """Run a program that was made ready for code generation (`lowered`) on the `values` of its inputs.

    `seen(node, value)` is called for each node in order; for a value that is fetched or offloaded, once the transfer
    is complete. All ranks must call it.
    """
    live_values: dict[fx.Node, Any] = {}
    left = {node: len(node.users) for node in ready.graph.nodes}
    inputs = iter(values)
    with torch.no_grad(), autograd_state.below_autograd():
        for node in ready.graph.nodes:
            if node.op == "output":
                return
            live_values[node] = _value(ready, node, live_values, inputs)
            if not any(map(mutates, (node, *node.users))) and (strides := promised(node)) is not None:
                live_values[node] = laid_out(live_values[node], strides)
            if node.target is transfers_to_host.MOVED_IN_PLACE:
                seen(transfers_to_host.start_of(node), live_values[transfers_to_host.start_of(node)])
            elif not transfers_to_host.is_start(node) and node.target is not aten.empty.memory_format:
                seen(node, live_values[node])
            for used in node.all_input_nodes:
                left[used] -= 1
            for done in (*node.all_input_nodes, node):
                if not left[done]:
                    live_values.pop(done, None)


def _value(ready: Program, node: fx.Node, held: dict[fx.Node, Any], given: Any) -> Any:
    if node.op == "placeholder":
        return next(given)
    if node.op == "get_attr":
        return operator.attrgetter(str(node.target))(ready.module)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: held[n])
    if inductor_code.draws_by_seed(node.target):
        return inductor_code.drawn_by_inductor(node.target, args, kwargs)
    result = node.target(*args, **kwargs)  # type: ignore[operator]
    if collectives.is_start(node) or node.target in collectives.COALESCED.values():
        for tensor in pytree.tree_leaves(result):
            collectives.WAIT(tensor)
    return result
