"""Sizes that depend on values (what a mask selects, the indices that are not zero) are folded away.

AOTAutograd traces them as symbols. A value with such a size, and its readers, become a region
(`zgraph.program.regions`), so that all other nodes have sizes that are numbers. A region of the backward recomputes the
forward's values of unknown size that it needs from values of fixed sizes: nothing of unknown size is saved.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from zgraph.errors import CaptureError, UnsupportedError
from zgraph.program import ops, regions
from zgraph.program.aliases import is_random
from zgraph.program.node import NodeInfo, Phase, info, set_info
from zgraph.torch_compat import aot, symbols, unbacked_sizes

aten = torch.ops.aten

# Their sizes depend on values only in rare cases (residuals of matrices without full rank), seen when a region runs.
LOOKED_AT = (aten.linalg_lstsq.default,)

# The entries of its first node's meta that a region takes over.
_TRACED = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "seq_nr", "partitioner_tag", "autograd_backward")


def pad_outputs(module: fx.GraphModule) -> tuple[tuple[int, int, int], ...]:
    """Make a captured forward return each output with one size that depends on values at its largest size, and the size
    as one more output.

    Returns (output, dimension, output that is its size) for each; outputs with several such sizes, or one without a
    bound, stay as they are.
    """
    output = module.graph.output_node()
    returned: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    crops = []
    for at, node in enumerate(tuple(returned)):
        value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
        if not isinstance(value, torch.Tensor) or value.is_sparse:
            continue
        unknown = [d for d, size in enumerate(value.shape) if symbols.is_unknown(size)]
        most = unbacked_sizes.largest(value.shape[unknown[0]]) if len(unknown) == 1 else None
        if most is None:
            continue
        with module.graph.inserting_before(output):
            for function, arguments in ((_padded, (node, unknown[0], most)), (_size, (node, unknown[0]))):
                new_node = module.graph.call_function(function, arguments)
                new_node.meta = {k: v for k, v in node.meta.items() if k in _TRACED}
                with value.fake_mode:  # type: ignore[attr-defined]
                    new_node.meta["example_value"] = function(value, *arguments[1:])
                if function is _padded:
                    returned[at] = new_node
                else:
                    crops.append((at, unknown[0], len(returned)))
                    returned.append(new_node)
    output.args = (tuple(returned),)
    module.recompile()
    return tuple(crops)


def _padded(x: torch.Tensor, dim: int, most: int) -> torch.Tensor:
    shape = [*x.shape[:dim], most, *x.shape[dim + 1 :]]
    return x.new_zeros(shape).index_copy(dim, torch.arange(x.shape[dim], device=x.device), x)


def _size(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.scalar_tensor(x.shape[dim], dtype=torch.int64)


def fold_data_dependent_sizes(graph: fx.Graph) -> None:
    """Turn all nodes with sizes that depend on values into regions; nothing else changes. The nodes have their records
    already.

    Raises `CaptureError` with the user's line where such a value leaves the model, or is drawn at random.
    """
    _size_gradients(graph)
    # (all sizes of this program's inputs are numbers, so a symbol depends on values)
    dynamic = {n for n in graph.nodes if symbols.has_symbol(n.meta.get("val")) or n.target in LOOKED_AT}
    if not dynamic:
        return
    _assert_tensors(graph, dynamic)
    _refuse_outputs(graph, dynamic)
    for phase in (
        Phase.BACKWARD,
        Phase.FORWARD,
    ):  # (regions of the backward repeat the forward's nodes, so they come first)
        nodes = [n for n in graph.nodes if n.op == "call_function" and info(n).phase is phase]
        for number, members in enumerate(_groups(nodes, dynamic)):
            _fold(graph, members, dynamic, f"{phase}_region_{number}")
    graph.lint()


def _size_gradients(graph: fx.Graph) -> None:
    """Give each gradient whose size is a sum of sizes that depend on values (of a tensor that `split` cuts by values)
    the size of its input: a view, which fails if the sizes differ when it runs."""
    inputs = {aot.describe_input(n.meta.get("desc")): n for n in graph.find_nodes(op="placeholder")}
    output = graph.output_node()
    returned: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    for at, (node, desc) in enumerate(zip(tuple(returned), output.meta["desc"], strict=True)):
        if not isinstance(node, fx.Node) or not symbols.has_symbol(node.meta.get("val")):
            continue
        kind, number = aot.describe_output(desc)
        like = inputs.get(("input", number)) if kind == "gradient" else None
        if like is None:
            continue
        value, shape = node.meta["val"], list(like.meta["val"].shape)
        with graph.inserting_before(output):
            dense = graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
            sized = graph.call_function(aten.view.default, (dense, shape))
        with value.fake_mode:
            values = torch.empty(value.shape, dtype=value.dtype), torch.empty(shape, dtype=value.dtype)
        for new_node, new_value in zip((dense, sized), values, strict=True):
            new_node.meta = {k: node.meta[k] for k in _TRACED if k in node.meta} | {"val": new_value}
            set_info(new_node, info(node))
        returned[at] = sized
    output.args = (tuple(returned),)


def fold_effects(graph: fx.Graph) -> None:
    """Turn each check that AOTAutograd orders by tokens (`torch.linalg`'s of singular matrices, say) into a region that
    raises as plain PyTorch does, and remove the tokens.

    An assertion of the region's result keeps it in the graph. Raises `UnsupportedError` for another operator with
    effects (a print, one of C++ objects).
    """
    for node in [n for n in graph.nodes if n.target is aot.WITH_EFFECTS]:
        token, target, *arguments = node.args
        if target is not aten._linalg_check_errors.default:
            raise UnsupportedError(
                "the model calls an operator with effects",
                where=info(node).source or None,
                why=f"{target} is to run once a call, in order",
                hint="call it outside of the model's forward",
            )
        with graph.inserting_before(node):
            check = graph.call_function(target, tuple(arguments), node.kwargs)
            passed = _scalar(graph, True, node)
            assertion = graph.call_function(aten._assert_async.msg, (passed, "a matrix of a linalg function"))
        for new_node in (check, assertion):
            new_node.meta = {k: node.meta[k] for k in _TRACED if k in node.meta} | {"val": None}
            set_info(new_node, info(node))
        _fold(graph, [check, passed], set(), "linalg_check")
        for user in list(node.users):
            user.replace_all_uses_with(token)
            graph.erase_node(user)
        graph.erase_node(node)
    output = graph.output_node()
    outputs = [
        (value, desc)
        for value, desc in zip(output.args[0], output.meta["desc"], strict=True)  # type: ignore[arg-type]
        if not aot.is_token(desc)
    ]
    output.args = (tuple(value for value, _ in outputs),)
    output.meta["desc"] = [desc for _, desc in outputs]
    for node in graph.find_nodes(op="placeholder"):
        if aot.is_token(node.meta.get("desc")) and not node.users:
            graph.erase_node(node)


def _assert_tensors(graph: fx.Graph, dynamic: set[fx.Node]) -> None:
    """Replace each assertion of a Python number by one of a tensor, which a region gives.

    Assertions that torch itself makes about sizes alone are removed: a region's operators check their sizes when they
    run.
    """
    for node in list(graph.find_nodes(op="call_function", target=aten._assert_scalar.default)):
        condition, message = node.args
        if isinstance(condition, fx.Node):
            leads = _ancestors([condition], dynamic)
            numbers = any(n.target is aten._local_scalar_dense.default for n in leads)
            if numbers or not message.startswith("Runtime assertion failed for expression"):
                with graph.inserting_before(node):
                    tensor = _scalar(graph, condition, node)
                    assertion = graph.call_function(aten._assert_async.msg, (tensor, message))
                assertion.meta = {k: v for k, v in node.meta.items() if k != "val"} | {"val": None}
        graph.erase_node(node)


def _scalar(graph: fx.Graph, number: Any, like: fx.Node) -> fx.Node:
    """Insert a bool as a 0-dim tensor, at the graph's insertion point."""
    scalar = graph.call_function(aten.scalar_tensor.default, (number,), {"dtype": torch.bool})
    scalar.meta = {k: like.meta[k] for k in _TRACED if k in like.meta}
    mode = next(v.fake_mode for n in graph.nodes if isinstance(v := n.meta.get("val"), FakeTensor))
    with mode:
        scalar.meta["val"] = torch.empty((), dtype=torch.bool)
    set_info(scalar, info(like))
    return scalar


def _refuse_outputs(graph: fx.Graph, dynamic: set[fx.Node]) -> None:
    for node in graph.output_node().all_input_nodes:
        if node in dynamic:
            first = next(n for n in _ancestors([node], dynamic))
            is_tensor = isinstance(node.meta["val"], torch.Tensor)
            raise CaptureError(
                "the model returns a tensor whose size depends on values"
                if is_tensor
                else "the model returns a Python number that depends on values",
                where=info(first).source or None,
                why=f"{first.name!r} is only known when the forward runs, and programs have outputs of fixed sizes",
                hint="reduce it in the model (a mean, a sum, a loss), or return torch.where(mask, x, 0) and the mask"
                if is_tensor
                else "return the tensor (leave out .item(), float(), int())",
            )


def _ancestors(roots: Sequence[fx.Node], within: set[fx.Node]) -> list[fx.Node]:
    """Return the nodes of `within` that lead to the roots, and those roots that are in it, in order."""
    ancestors, stack = set(roots), list(roots)
    while stack:
        for argument in stack.pop().all_input_nodes:
            if argument in within and argument not in ancestors:
                ancestors.add(argument)
                stack.append(argument)
    return sorted(ancestors & within)


def _groups(nodes: Sequence[fx.Node], dynamic: set[fx.Node]) -> list[list[fx.Node]]:
    """Return the nodes of one phase that must be in regions, by region, in order.

    A region has a value of unknown size and all its readers, and every node between two of its nodes, because a region
    runs as one. With a node that gives a tuple come the tuple's members.
    """
    group_of: dict[fx.Node, int] = {}

    def join(members: Iterable[fx.Node]) -> None:
        members = list(members)
        old = {group_of[n] for n in members if n in group_of}
        number = min(old) if old else len(group_of)
        for node in [*members, *(n for n, g in group_of.items() if g in old)]:
            group_of[node] = number

    mine = set(nodes)
    for node in nodes:
        if node in dynamic or (node in group_of and not isinstance(node.meta.get("val"), torch.Tensor)):
            join([node, *(u for u in node.users if u in mine)])
        elif node not in group_of and any(a in dynamic for a in node.all_input_nodes):
            join([node, *(() if isinstance(node.meta.get("val"), torch.Tensor) else node.users)])
    while True:
        before = len(group_of), len(set(group_of.values()))
        for number in sorted(set(group_of.values())):
            members = _between([n for n in nodes if group_of.get(n) == number], nodes)
            tuples = [n for n in members if isinstance(n.meta.get("val"), tuple | list)]
            join([*members, *(u for n in tuples for u in n.users if u in mine)])
        if (len(group_of), len(set(group_of.values()))) == before:
            break
    groups: dict[int, list[fx.Node]] = {}
    for node in nodes:
        if node in group_of:
            groups.setdefault(group_of[node], []).append(node)
    return list(groups.values())


def _between(members: Sequence[fx.Node], nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the members, and all nodes that are computed from one of them and needed for another."""
    after, before = set(members), set(members)
    for node in nodes:
        if any(a in after for a in node.all_input_nodes):
            after.add(node)
    for node in reversed(nodes):
        if any(u in before for u in node.users):
            before.add(node)
    return [n for n in nodes if n in after and n in before]


def _fold(graph: fx.Graph, members: list[fx.Node], dynamic: set[fx.Node], name: str) -> None:
    """Replace these nodes by one region."""
    inside = set(members)
    repeated = _ancestors(members, {n for n in dynamic if n not in inside and info(n).phase is Phase.FORWARD})
    drawn = next((n for n in repeated if is_random(n)), None)
    if drawn is not None:
        raise CaptureError(
            "random numbers are drawn of a size that depends on values",
            where=info(drawn).source or None,
            why=f"the backward would have to draw {drawn.name!r} again",
            hint="draw them for all rows, before the mask selects some",
        )
    nodes = [*repeated, *members]
    inputs = list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside and a not in repeated))
    outputs = [n for n in members if n not in dynamic and any(u not in inside for u in n.users)]
    if not outputs:  # (only a region of the backward repeats these)
        for node in reversed(members):
            graph.erase_node(node)
        return
    try:
        text = regions.written(inputs, nodes, outputs)
    except UnsupportedError as error:
        raise UnsupportedError(
            "the model has an operator on values whose size depends on values that zgraph can't run there",
            where=info(members[0]).source or None,
            why=f"{error.what} ({error.why})",
            hint="use torch.where or a mask of weights in place of selecting",
        ) from error
    first, last = members[0], members[-1]
    late = _late(graph, first, last, inside)
    with graph.inserting_after(last):
        region = graph.call_function(ops.REGION, (inputs, text))
    region._rename(name)
    region.meta = {k: first.meta[k] for k in _TRACED if k in first.meta} | {"val": [n.meta["val"] for n in outputs]}
    set_info(region, NodeInfo(phase=info(first).phase, module=info(first).module, source=info(first).source))
    place = region
    for number, node in enumerate(outputs):
        with graph.inserting_after(place):
            place = graph.call_function(operator.getitem, (region, number))
        place.meta = dict(node.meta)
        node.replace_all_uses_with(place, lambda user: user not in inside and user is not region)
    for node in late:
        place.append(node)
        place = node
    for node in reversed(members):
        graph.erase_node(node)


def _late(graph: fx.Graph, first: fx.Node, last: fx.Node, inside: set[fx.Node]) -> list[fx.Node]:
    """Return the nodes between a region's nodes that read one of them: they move behind the region."""
    late_nodes: list[fx.Node] = []
    node = first
    while node is not last:
        if node not in inside and any(a in inside or a in late_nodes for a in node.all_input_nodes):
            late_nodes.append(node)
        node = node.next
    return late_nodes
