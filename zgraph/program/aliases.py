"""Which values of a graph share storage: read from the operators' schemas, never from names."""

from __future__ import annotations

import functools
import operator

import torch
from torch import fx

from zgraph.program import collectives, transfers_to_host
from zgraph.program.block_quantization import TO_BLOCKS_FED
from zgraph.program.node import Phase, info


def aliased_input(node: fx.Node) -> fx.Node | None:
    """Return the argument whose storage this node's value shares (a view's base), or None for a value of its own
    storage."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        base = node.args[0]
        return base if isinstance(base, fx.Node) and aliased_input(base) is not None else None
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target is torch.ops.aten._unsafe_view.default:  # (its schema does not say so)
        return node.all_input_nodes[0]
    for at in _aliased_positions(node.target):
        if at < len(node.args) and isinstance(given := node.args[at], fx.Node):
            return given
    return None


@functools.cache
def _aliased_positions(target: torch._ops.OpOverload) -> tuple[int, ...]:
    """Return the positions of arguments whose storage an operator's result may share; none where it has its own."""
    schema = target._schema
    if not any(r.alias_info is not None for r in schema.returns):
        return ()
    return tuple(at for at, argument in enumerate(schema.arguments) if argument.alias_info is not None)


def is_view(node: fx.Node) -> bool:
    """Return whether this node's value is a view of its argument's storage."""
    return aliased_input(node) is not None


def is_cast(node: fx.Node) -> bool:
    """Return whether this node converts its argument to another dtype (or copies it)."""
    return node.target in (torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default)


def root_of(node: fx.Node) -> fx.Node:
    """Return the base of a view, through all views between; the node itself if it is no view."""
    while (base := aliased_input(node)) is not None:
        node = base
    return node


def mutates(node: fx.Node) -> bool:
    """Return whether this node writes to one of its arguments."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    return _writes(node.target)


@functools.cache
def _writes(target: torch._ops.OpOverload) -> bool:
    """Return whether an operator writes to one of its arguments."""
    return any(a.alias_info is not None and a.alias_info.is_write for a in target._schema.arguments)


def is_write(node: fx.Node) -> bool:
    """Return whether this node writes an update's result over the input that it replaces (or over what was fetched of
    it)."""
    if node.op != "call_function" or node.target not in (torch.ops.aten.copy_.default, transfers_to_host.STORE):
        return False
    place = node.args[0]
    if not isinstance(place, fx.Node) or info(node).phase is not Phase.UPDATE:
        return False
    return place.op == "placeholder" or transfers_to_host.is_wait(place)


def is_feedback(node: fx.Node) -> bool:
    """Return whether this node writes what quantization left unsent into an input of its own (error feedback)."""
    if node.target is not TO_BLOCKS_FED:
        return False
    residual = node.args[1]
    return isinstance(residual, fx.Node) and residual.op == "placeholder" and len(residual.users) == 1


def aliases_of(root: fx.Node) -> list[fx.Node]:
    """Return `root` and every view of it, in graph order."""
    aliases = {root: None}
    stack = [root]
    while stack:
        for user in stack.pop().users:
            if user not in aliases and aliased_input(user) in aliases:
                aliases[user] = None
                stack.append(user)
    return sorted(aliases)


def is_random(node: fx.Node) -> bool:
    """Return whether this node draws random numbers. Attention without dropout does not, though its operator could."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    names = [a.name for a in node.target._schema.arguments]
    if "dropout_p" not in names:
        return True
    at = names.index("dropout_p")
    given = node.args[at] if at < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return bool(given != 0.0)


def made_once(node: fx.Node) -> bool:
    """Return whether this value must not be recomputed.

    A second draw would give other random numbers, and a collective or transfer would need all ranks, or its tier, once
    more.
    """
    source = node.all_input_nodes[0] if node.target is operator.getitem else node
    moves_bytes = (
        collectives.is_start(source) or collectives.is_wait(source) or transfers_to_host.is_host_transfer(source)
    )
    return is_random(source) or moves_bytes
