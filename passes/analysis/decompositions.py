"""Rewrites operators as several others that can be computed in parts where the one operator can't: along the classes of
a softmax or a loss, or along the inner dimension of a product that something is added to.

Each expansion builds the same function of whole tensors. (Dividing its nodes gives the vocabulary-parallel loss that
Megatron writes by hand.)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import torch
from torch import fx

from zgraph.passes.spmd.sharding_rules import argument
from zgraph.program.node import info, tensor
from zgraph.program.program import Program

aten = torch.ops.aten

Build = Callable[..., fx.Node]
Expansion = Callable[[fx.Node, Build], "fx.Node | tuple[fx.Node, ...] | None"]


def expand(
    program: Program,
    node: fx.Node,
    expansion: Expansion,
    note: Callable[[fx.Node], None],
    stand_for: Callable[[fx.Node, fx.Node], None],
) -> bool:
    """Replace an operator by its expansion, if it has one for these arguments, and return whether it was replaced.

    `note` is called with every new node, in order, and `stand_for` with each new node that replaces an old one.
    """
    record = info(node).replace(made_by="divide")

    def build(target: object, *args: object, **kwargs: object) -> fx.Node:
        new_node = program.call(target, args, record, name=f"{node.name}_of", kwargs=kwargs)
        note(new_node)
        return new_node

    with program.graph.inserting_before(node):
        replacement = expansion(node, build)
    if replacement is None:
        return False
    if isinstance(replacement, tuple):
        for user in list(node.users):
            assert user.target is operator.getitem
            stand_for(replacement[argument(user, 1)], user)
            user.replace_all_uses_with(replacement[argument(user, 1)])
            program.graph.erase_node(user)
    else:
        stand_for(replacement, node)
        node.replace_all_uses_with(replacement)
    program.graph.erase_node(node)
    return True


def _addmm(node: fx.Node, build: Build) -> fx.Node | None:
    if node.kwargs:
        return None
    added, one, other = node.args
    return build(aten.add.Tensor, build(aten.mm.default, one, other), added)


def _log_softmax(node: fx.Node, build: Build) -> fx.Node | None:
    x, dim, to_float = node.args
    if to_float:
        return None
    shifted = build(aten.sub.Tensor, x, build(aten.amax.default, x, [dim], True))
    total = build(aten.sum.dim_IntList, build(aten.exp.default, shifted), [dim], True)
    return build(aten.sub.Tensor, shifted, build(aten.log.default, total))


def _log_softmax_backward(node: fx.Node, build: Build) -> fx.Node | None:
    grad, out, dim, dtype = node.args
    if tensor(grad).dtype is not dtype:  # type: ignore[arg-type]
        return None
    total = build(aten.sum.dim_IntList, grad, [dim], True)
    return build(aten.sub.Tensor, grad, build(aten.mul.Tensor, build(aten.exp.default, out), total))


def _logsumexp(node: fx.Node, build: Build) -> fx.Node | None:
    x, dims = node.args[:2]
    top = build(aten.amax.default, x, dims, True)
    infinite = build(aten.eq.Scalar, build(aten.abs.default, top), math.inf)
    top = build(aten.where.self, infinite, _zero(tensor(top), build), top)
    total = build(aten.sum.dim_IntList, build(aten.exp.default, build(aten.sub.Tensor, x, top)), dims, True)
    result = build(aten.add.Tensor, build(aten.log.default, total), top)
    return result if argument(node, 2, False) else build(aten.squeeze.dims, result, dims)


def _softmax(node: fx.Node, build: Build) -> fx.Node | None:
    x, dim, to_float = node.args
    if to_float:
        return None
    top = build(aten.exp.default, build(aten.sub.Tensor, x, build(aten.amax.default, x, [dim], True)))
    return build(aten.div.Tensor, top, build(aten.sum.dim_IntList, top, [dim], True))


def _softmax_backward(node: fx.Node, build: Build) -> fx.Node | None:
    grad, out, dim, dtype = node.args
    if tensor(grad).dtype is not dtype:  # type: ignore[arg-type]
        return None
    product = build(aten.mul.Tensor, grad, out)
    total = build(aten.sum.dim_IntList, product, [dim], True)
    return build(aten.sub.Tensor, product, build(aten.mul.Tensor, out, total))


def _targets(target: object, ignored: object, build: Build) -> tuple[fx.Node, fx.Node]:
    """Return which targets count, and their classes as a column (0 for targets that do not count)."""
    counts = build(aten.ne.Scalar, target, ignored)
    zero = build(aten.full.default, [], 0, dtype=torch.int64, device=tensor(counts).device)
    return counts, build(aten.unsqueeze.default, build(aten.where.self, counts, target, zero), 1)


def _zero(like: torch.Tensor, build: Build) -> fx.Node:
    return build(aten.full.default, [], 0, dtype=like.dtype, device=like.device)


_NONE, _MEAN, _SUM = 0, 1, 2  # torch's numbers for a loss's reduction


def _nll_loss(node: fx.Node, build: Build) -> tuple[fx.Node, ...] | None:
    logs, target, weight, reduction, ignored = node.args
    if weight is not None or reduction == _NONE:
        return None
    like = tensor(logs)  # type: ignore[arg-type]
    counts, column = _targets(target, ignored, build)
    picked = build(aten.squeeze.dim, build(aten.gather.default, logs, 1, column), 1)
    terms = build(aten.where.self, counts, build(aten.neg.default, picked), _zero(like, build))
    total = build(aten.sum.default, build(aten._to_copy.default, counts, dtype=like.dtype))
    loss = build(aten.sum.default, terms)
    return (build(aten.div.Tensor, loss, total) if reduction == _MEAN else loss), total


def _nll_loss_backward(node: fx.Node, build: Build) -> fx.Node | None:
    grad, logs, target, weight, reduction, ignored, total = node.args
    if weight is not None or reduction == _NONE:
        return None
    like = tensor(logs)  # type: ignore[arg-type]
    counts, column = _targets(target, ignored, build)
    each = build(aten.neg.default, build(aten.div.Tensor, grad, total) if reduction == _MEAN else grad)
    terms = build(aten.unsqueeze.default, build(aten.where.self, counts, each, _zero(like, build)), 1)
    return build(aten.scatter.src, build(aten.full_like.default, logs, 0), 1, column, terms)


EXPANSIONS: dict[object, Expansion] = {
    aten.addmm.default: _addmm,
    aten._log_softmax.default: _log_softmax,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
    aten.logsumexp.default: _logsumexp,
    aten._softmax.default: _softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss_backward.default: _nll_loss_backward,
}
