"""Finds attention that a model has written out, and puts the operator of sparse attention in its place.

    scores = q @ k^T (* scale) (+ masks)       weights = softmax(scores)      out = weights @ v

    of_v = weights^T @ of_out                  of_weights = of_out @ v^T
    of_scores = softmax's backward             of_q = of_scores @ k * scale   of_k^T = q^T @ of_scores * scale

with views and casts between, as autograd writes the backward, by torch's softmax or by what Inductor decomposes it into. Each node on the
way is read by nothing else, or the attention is not taken. What is added to the scores becomes the operator's mask; if it has a gradient (a
position bias that is learned), the operator gives it. Dropout of the weights becomes the operator's, with a seed that is drawn where the mask
was.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zgraph.program.aliases import is_cast, is_random
from zgraph.program.attention_dropout import SEEDS
from zgraph.program.node import Phase, info, tensor
from zgraph.program.program import Program
from zgraph.program.sparse_attention import SPARSE, SPARSE_BACKWARD, SPARSE_BACKWARD_WITH_MASK
from zgraph.torch_compat.symbols import expression

aten, prims = torch.ops.aten, torch.ops.prims

_SOFTMAX = (aten._softmax.default, aten._safe_softmax.default)
_VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
}
_SCALES = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}
_FILLS = {aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.where.self}
_PRODUCTS = {aten.bmm.default, aten.baddbmm.default}
_PERMUTATIONS = {aten.permute.default, aten.transpose.int}
_OF_ROWS = {aten.eq.Scalar, aten.logical_not.default, aten.any.dim, aten.all.dim}


class NotTakenError(Exception):
    """Attention that is written out in a form that the operator does not have: why, and what to do."""

    def __init__(self, why: str, hint: str = "leave this module out of the pattern") -> None:
        super().__init__(why)
        self.why, self.hint = why, hint


@dataclass(frozen=True)
class _Term:
    """What is added to the scores."""

    node: fx.Node  # the numbers, or a condition
    hides: bool | None  # the value of the condition that hides a key; None for numbers


@dataclass(frozen=True)
class _Dropout:
    """A dropout of the weights: torch's operator, or a comparison of random numbers and two products."""

    rate: float  # the share that is dropped
    drawn: fx.Node  # what draws
    reader: fx.Node  # what reads the weights
    result: fx.Node  # the weights that are left, multiplied
    mask: fx.Node | None  # which are left, booleans; None where nothing reads them


@dataclass
class _Attention:
    """The nodes of one attention."""

    weights: fx.Node  # the softmax's result
    product: fx.Node = field(init=False)  # weights @ v
    scores: fx.Node = field(init=False)  # q @ k^T
    scale: float = 1.0  # of the scores
    terms: list[_Term] = field(default_factory=list)  # what is added to them
    dropout: _Dropout | None = None  # of the weights
    of_weights: fx.Node | None = None  # the gradient of the weights; None of this and the others where none is needed
    of_values: fx.Node | None = None  # that of values
    of_queries: fx.Node | None = None  # that of queries
    of_keys: fx.Node | None = None  # that of keys, with the dimensions of k^T
    of_scores: fx.Node | None = None  # that of the scores with all that is added
    # readers of the mask's gradient, and what each reads
    of_mask: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)


def softmaxes(program: Program) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield each softmax of the forward over as many keys as there are queries, as its result and the scores that it reads."""
    for node in program.nodes:
        scores = _scores_of(node)
        if scores is None or info(node).phase is not Phase.FORWARD:
            continue
        shape = [expression(size) for size in tensor(node).shape]
        if len(shape) > 2 and shape[-1] == shape[-2]:
            yield node, scores


def _scores_of(node: fx.Node) -> fx.Node | None:
    """Return what a softmax over the last dimension reads: torch's, or the quotient that it is decomposed into."""
    if node.target in _SOFTMAX:
        return node.args[0] if _is_last(node.args[1], node) else None  # type: ignore[return-value]
    if node.target is not aten.div.Tensor or not all(isinstance(a, fx.Node) for a in node.args):
        return None
    powers, sums = node.all_input_nodes if len(node.all_input_nodes) == 2 else (None, None)
    if powers is None or sums is None or powers.target is not aten.exp.default:
        return None
    if sums.target is not aten.sum.dim_IntList or sums.args[0] is not powers or not _is_last(sums.args[1], node):
        return None
    less = powers.all_input_nodes[0]
    top = less.args[1] if less.target is aten.sub.Tensor else None
    if not isinstance(top, fx.Node) or top.target is not aten.amax.default or top.args[0] is not less.args[0]:
        return None
    return less.args[0]  # type: ignore[return-value]


def _is_last(dim: Any, like: fx.Node) -> bool:
    (dim,) = dim if isinstance(dim, list | tuple) and len(dim) == 1 else (dim,)
    return dim in (-1, tensor(like).dim() - 1)


# -- reading ----------------------------------------------------------------------------------------------------------
def read(weights: fx.Node, scores: fx.Node) -> _Attention:
    """Return the attention of a softmax. Raises `NotTakenError`."""
    attention = _Attention(weights)
    _read_scores(attention, scores)
    same = _read_weights(attention, scores)
    _read_backward(attention, same)
    query, keys, values = (tensor(n) for n in (*attention.scores.args[-2:], attention.product.args[1]))  # type: ignore[arg-type]
    if len({x.dtype for x in (query, keys, values)}) != 1:
        raise NotTakenError(f"queries and keys are {query.dtype}, and values {values.dtype}", "cast them before")
    if expression(query.shape[-1]) != expression(values.shape[-1]):
        raise NotTakenError(f"values have width {values.shape[-1]}, and queries {query.shape[-1]}")
    return attention


def _read_scores(attention: _Attention, node: fx.Node) -> None:
    """Walk from the softmax's operand up to the product of queries and keys."""
    length = tensor(node).shape[-1]
    while node.target not in _PRODUCTS:
        if _keeps_order(node):
            node = node.all_input_nodes[0]
        elif node.target in _SCALES and (number := _number(node.args[1])) is not None:
            attention.scale *= 1 / number if node.target in (aten.div.Tensor, aten.div.Scalar) else number
            node = node.args[0]  # type: ignore[assignment]
        elif node.target is aten.add.Tensor and not node.kwargs and len(node.all_input_nodes) == 2:
            sides = [_leads_to_product(side) for side in node.args[:2]]
            if all(sides):
                raise NotTakenError("its scores are a sum of products")
            if not any(sides):
                break
            if attention.scale != 1:
                raise NotTakenError("its scores are scaled behind a mask", "scale them before the mask is added")
            attention.terms.append(_Term(node.args[sides.index(False)], None))  # type: ignore[arg-type]
            node = node.args[sides.index(True)]  # type: ignore[assignment]
        elif node.target in _FILLS:
            node = _read_fill(attention, node)
        else:
            break
    if node.target not in _PRODUCTS or expression(tensor(node).shape[-1]) != expression(length):
        raise NotTakenError(f"its scores are no product of queries and keys: they come from {node.target}")
    if node.target is aten.baddbmm.default:
        if attention.scale != 1 or any(number != 1 for number in node.kwargs.values()):
            raise NotTakenError("a mask is added to its scores with a factor", "add the mask behind the product")
        attention.terms.append(_Term(node.args[0], None))  # type: ignore[arg-type]
    attention.scores = node


def _read_fill(attention: _Attention, node: fx.Node) -> fx.Node:
    """Read a fill of hidden scores; return the scores that it fills."""
    if node.target is aten.where.self:
        condition, shown, hidden = node.args
        hides = False
        if not _leads_to_product(shown):
            shown, hidden, hides = hidden, shown, True
        number = _number(hidden)
    else:
        shown, condition, hidden = node.args
        number, hides = _number(hidden), True
    if number != -torch.inf:
        raise NotTakenError(
            f"it fills the scores of hidden keys with {number}: a query that sees no key would have all of them",
            'fill with float("-inf"), or add the mask to the scores; or leave this module out of the pattern',
        )
    attention.terms.append(_Term(condition, hides))  # type: ignore[arg-type]
    return shown  # type: ignore[return-value]


def _leads_to_product(node: Any) -> bool:
    """Return whether a node is a product of queries and keys, or computed from one by what `_read_scores` reads."""
    while isinstance(node, fx.Node) and node.op == "call_function":
        if node.target in _PRODUCTS:
            return True
        if node.target is aten.add.Tensor:
            return any(_leads_to_product(side) for side in node.args[:2])
        if node.target is aten.where.self:
            return any(_leads_to_product(side) for side in node.args[1:])
        if not (_keeps_order(node) or node.target in _SCALES or node.target in _FILLS):
            return False
        node = node.args[0]
    return False


def _number(value: Any) -> float | None:
    """Return a number, or that of a tensor without dimensions: one that is filled with it, or a constant of the code (`torch.tensor(1.0)`)."""
    if isinstance(value, fx.Node) and value.target in (aten.full.default, aten.scalar_tensor.default):
        value = value.args[-1] if not tensor(value).dim() else None
    elif isinstance(value, fx.Node) and value.target is aten.lift_fresh_copy.default:
        constant = getattr(value.graph.owning_module, str(value.all_input_nodes[0].target), None)
        known = type(constant) is torch.Tensor and not constant.dim() and constant.device.type != "meta"
        value = constant.item() if known else None  # type: ignore[union-attr]
    return float(value) if isinstance(value, int | float) else None


def _read_weights(attention: _Attention, scores: fx.Node) -> dict[fx.Node, None]:
    """Find the product with values, and the gradient of these; return the nodes whose values are the weights."""
    same = _forms_of(attention.weights, scores)
    attention.dropout = _dropout(same)
    used = same
    if attention.dropout is not None:
        for _, user in _readers(same):
            in_forward = user.op != "call_function" or info(user).phase is Phase.FORWARD
            if in_forward and user is not attention.dropout.reader:
                raise _read_elsewhere(user, "weights", same)
        used = _forms_of(attention.dropout.result)
    products: list[fx.Node] = []
    for node, user in _readers(used):
        if user.op != "call_function" or info(user).phase is Phase.FORWARD:
            if user.target is not aten.bmm.default or user.args[0] is not node:
                raise _read_elsewhere(user, "weights", used)
            products.append(user)
        elif _swapped(user) is node:
            for reader in user.users:
                if reader.target is not aten.bmm.default or reader.args[0] is not user:
                    raise _read_elsewhere(reader, "weights", used)
                attention.of_values = reader
    if len(products) != 1:
        raise NotTakenError(f"its weights are multiplied with values in {len(products)} products")
    attention.product = products[0]
    return same


def _dropout(weights: dict[fx.Node, None]) -> _Dropout | None:
    """Return the dropout of these weights; None if they have none, or another."""
    for _, user in _readers(weights):
        if user.target is aten.native_dropout.default and len(user.args) > 2 and user.args[2] is not False:
            results = {u.args[1]: u for u in user.users if u.target is operator.getitem}
            if 0 in results:
                return _Dropout(float(user.args[1]), user, user, results[0], results.get(1))  # type: ignore[arg-type]
        if user.target is not aten.mul.Tensor or len(user.all_input_nodes) != 2 or len(user.users) != 1:
            continue
        mask = next((n for n in user.all_input_nodes if n not in weights), None)
        if mask is None or mask.target is not aten.gt.Scalar:
            continue
        drawn, result, rate = _under_casts(mask.args[0]), next(iter(user.users)), mask.args[1]
        if drawn.target is not aten.rand.default or result.target not in _SCALES or not isinstance(rate, float):
            continue
        number = _number(result.args[1]) if result.args[0] is user else None
        if result.target in (aten.mul.Tensor, aten.mul.Scalar) and number is not None and _is_factor(number, rate):
            return _Dropout(rate, drawn, user, result, mask)
    return None


def _is_factor(number: float, rate: float) -> bool:
    """Return whether a number is what dropout multiplies weights by that are left."""
    return abs(number * (1 - rate) - 1) < 1e-6


def _under_casts(node: Any) -> fx.Node:
    while is_cast(node):
        node = node.args[0]
    return node  # type: ignore[no-any-return]


def _dropout_backward(dropout: _Dropout, tangent: fx.Node, reader: fx.Node) -> bool:
    """Return whether an operator that reads a gradient of what is left is the dropout's backward."""
    factor: Any
    if reader.target is aten.native_dropout_backward.default:
        of_tangent, mask, factor = reader.args
        fits = of_tangent is tangent and mask is dropout.mask and isinstance(factor, int | float)
        return fits and (dropout.rate == 1 or _is_factor(float(factor), dropout.rate))
    if reader.target is not aten.mul.Tensor:
        return False
    scaled = next((a for a in reader.args if a is not tangent), None)
    if not isinstance(scaled, fx.Node) or scaled.target not in (aten.mul.Tensor, aten.mul.Scalar):
        return False
    factor = _number(scaled.args[1])
    return factor is not None and _under_casts(scaled.args[0]) is dropout.mask and _is_factor(factor, dropout.rate)


def _forms_of(node: fx.Node, scores: fx.Node | None = None) -> dict[fx.Node, None]:
    """Return a node and all that have its value in another form; with `scores` also where rows without keys are 0."""
    forms: dict[fx.Node, None] = {node: None}
    stack = [node]
    while stack:
        node = stack.pop()
        for user in node.users:
            if user in forms:
                continue
            if _keeps_order(user) or (scores is not None and _is_safe(user, node, scores)):
                forms[user] = None
                stack.append(user)
            elif user.users and all(_is_turned_back(second) for second in user.users):  # (as einsum does)
                forms |= {user: None, **dict.fromkeys(user.users)}
                stack += user.users
    return forms


def _is_turned_back(node: fx.Node) -> bool:
    """Return whether a node permutes dimensions so that those of its operand, a permutation, are in order again."""
    first = node.args[0] if node.target in _PERMUTATIONS else None
    if not isinstance(first, fx.Node) or first.target not in _PERMUTATIONS:
        return False
    before = tensor(first.args[0]).shape  # type: ignore[arg-type]
    order = _dims(first)
    dims = [order[dim] for dim in _dims(node) if expression(before[order[dim]]) != 1]
    return dims == sorted(dims)


def _readers(forms: dict[fx.Node, None]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield each of these nodes with each of its users that is none of them."""
    return ((node, user) for node in forms for user in node.users if user not in forms)


def _is_safe(user: fx.Node, weights: fx.Node, scores: fx.Node) -> bool:
    """Return whether a node gives the weights, and 0 in rows whose scores are all -inf."""
    if user.target is not aten.where.self or user.args[2] is not weights:
        return False
    condition, zeros = user.args[:2]
    if not isinstance(zeros, fx.Node) or zeros.target is not aten.full.default or zeros.args[1] != 0:
        return False
    while isinstance(condition, fx.Node) and condition.target in _OF_ROWS:
        condition = condition.args[0]
    return condition is scores


def _read_elsewhere(user: fx.Node, what: str, forms: dict[fx.Node, None]) -> NotTakenError:
    """Return the error for values of attention that something else reads; a mask of dropout has that as its reason."""
    near = {user}
    for _ in range(6):
        near |= {n for node in near for n in node.all_input_nodes if n not in forms}
    if any(n.op == "call_function" and is_random(n) for n in near):
        return NotTakenError(
            "it has dropout in a form that is not known",
            "torch.nn.functional.dropout of the weights; or set its dropout to 0",
        )
    line = f" in {info(user).source}" if user.op == "call_function" else ""
    return NotTakenError(f"its {what} are read elsewhere ({user.target}{line})", "neither return nor change them there")


def _read_backward(attention: _Attention, same: dict[fx.Node, None]) -> None:
    """Find the gradients of the weights, the scores, queries and keys, and who reads that of the mask."""
    values = attention.product.args[1]
    tangent = attention.of_values.args[1] if attention.of_values is not None else None
    for turned in values.users:  # type: ignore[union-attr]
        for reader in turned.users if _swapped(turned) is values else ():
            backward = reader.op == "call_function" and info(reader).phase is Phase.BACKWARD
            product = reader.target is aten.bmm.default and reader.args[1] is turned
            if backward and product and tangent in (None, reader.args[0]):
                attention.of_weights = reader
    if attention.of_weights is None:
        return
    forms = _forms_of(attention.of_weights)
    if attention.dropout is not None:
        forms = _forms_of(_before_dropout(attention.dropout, forms))
    for node, user in _readers(forms):
        attention.of_scores = _softmax_backward(node, user, same)
        if attention.of_scores is None:
            raise _read_elsewhere(user, "weights' gradients", forms)
    if attention.of_scores is None:
        raise NotTakenError("its backward is not autograd's")
    _read_gradients(attention, attention.of_scores)


def _before_dropout(dropout: _Dropout, forms: dict[fx.Node, None]) -> fx.Node:
    """Return the gradient of the weights, from that of what is left of them."""
    results: list[fx.Node] = []
    for node, user in _readers(forms):
        if not _dropout_backward(dropout, node, user):
            raise _read_elsewhere(user, "weights' gradients", forms)
        results.append(user)
    if len(results) != 1:
        raise NotTakenError("its backward is not autograd's")
    return results[0]


def _softmax_backward(tangent: fx.Node, reader: fx.Node, same: dict[fx.Node, None]) -> fx.Node | None:
    """Return the result of a softmax's backward whose first operator reads the weights' gradient; None for another."""
    if reader.target is aten._softmax_backward_data.default:
        return reader if reader.args[0] is tangent and reader.args[1] in same else None
    if reader.target is not aten.mul.Tensor or not any(n in same for n in reader.all_input_nodes):
        return None
    # product = tangent * weights;  result = product - weights * sum(product), as one operator or several
    results = [u for u in reader.users if u.target in (prims.fma.default, aten.sub.Tensor)]
    sums = [u for u in reader.users if u.target is aten.sum.dim_IntList and _is_last(u.args[1], reader)]
    if len(results) != 1 or len(sums) != 1 or len(reader.users) != 2:
        return None
    (result,), (total,) = results, sums
    if result.target is prims.fma.default:
        less, factor, rest = result.args
        negative = isinstance(less, fx.Node) and less.target is aten.neg.default and less.all_input_nodes[0] in same
        return result if negative and rest is reader and factor is total else None
    part = result.args[1]
    fits = result.args[0] is reader and isinstance(part, fx.Node) and part.target is aten.mul.Tensor
    return result if fits and total in part.args and any(a in same for a in part.args) else None  # type: ignore[union-attr]


def _read_gradients(attention: _Attention, of_scores: fx.Node) -> None:
    """Walk from the gradient of the masked scores down to those of queries and keys; what else reads it is of the mask."""
    query, key = attention.scores.args[-2:]
    before: dict[fx.Node, fx.Node | None] = {of_scores: None}
    whole = {of_scores}  # (not yet scaled)
    stack = [of_scores]
    on_the_way: set[fx.Node | None] = {None, of_scores}
    while stack:
        node = stack.pop()
        for user in node.users:
            product = user.target is aten.bmm.default
            if product and user.args[0] is node and _swapped(user.args[1]) is key:
                attention.of_queries = user
            elif product and user.args[1] is node and _swapped(user.args[0]) is query:
                attention.of_keys = user
            elif user not in before and (_keeps_order(user) or _is_scale(user) or _fills_zeros(user, node)):
                before[user] = node
                stack.append(user)
                whole |= {user} if node in whole and not _is_scale(user) else set()
                continue
            else:
                continue
            on_the_way.add(user)
            step: fx.Node | None = node
            while step not in on_the_way:
                on_the_way.add(step)
                step = before[step]  # type: ignore[index]
    for node in before:
        for user in node.users if node in on_the_way else ():
            if user in on_the_way:
                continue
            if node not in whole or not attention.terms:
                raise _read_elsewhere(user, "scores' gradients", dict.fromkeys(before))
            attention.of_mask.append((user, node))


def _is_scale(node: fx.Node) -> bool:
    return node.target in _SCALES and _number(node.args[1]) is not None


def _fills_zeros(node: fx.Node, gradient: fx.Node) -> bool:
    """Return whether a node is a gradient, and 0 where keys are hidden (whose gradient is 0 as it is)."""
    if node.target is aten.where.self:
        other = node.args[2] if node.args[1] is gradient else node.args[1]
        return _number(other) == 0 and node.args[0] is not gradient
    return node.target in _FILLS and node.args[0] is gradient and _number(node.args[2]) == 0


def _keeps_order(node: fx.Node) -> bool:
    """Return whether a node has the elements of its first operand, in order: a view, a copy, a cast, a permutation of sizes of 1."""
    if node.op != "call_function":
        return False
    if node.target in _VIEWS:
        return True
    before, after = (
        (node.args[0].meta.get("val") if node.args and isinstance(node.args[0], fx.Node) else None),
        node.meta.get("val"),
    )
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    if is_cast(node):
        return before.dtype.is_floating_point and after.dtype.is_floating_point
    if node.target is aten.expand.default:
        return [expression(n) for n in before.shape] == [expression(n) for n in after.shape]
    if node.target in _PERMUTATIONS:
        dims = [dim for dim in _dims(node) if expression(before.shape[dim]) != 1]
        return dims == sorted(dims)
    return False


def _dims(node: fx.Node) -> list[int]:
    """Return the order of dimensions that a permutation gives."""
    count = tensor(node).dim()
    if node.target is aten.permute.default:
        return [int(dim) % count for dim in node.args[1]]  # type: ignore[union-attr,arg-type]
    dims = list(range(count))
    one, other = (int(at) % count for at in node.args[1:3])  # type: ignore[arg-type]
    dims[one], dims[other] = other, one
    return dims


def _swapped(node: Any) -> fx.Node | None:
    """Return the matrices that a node has transposed; None if it does something else."""
    if not isinstance(node, fx.Node) or node.target not in _PERMUTATIONS:
        return None
    return node.args[0] if _dims(node) == [0, 2, 1] else None  # type: ignore[return-value]


# -- writing ----------------------------------------------------------------------------------------------------------
def write(program: Program, attention: _Attention, layout: str) -> None:
    """Put the operator, and its backward, in the place of attention that is written out. What it computed is dead then."""
    _Writer(program, attention, layout).write()


def drawn_seed(program: Program, attention: fx.Node) -> fx.Node:
    """Insert the draw of an attention's seed, from the generator of its device."""
    value = attention.meta["val"]
    like = {"dtype": torch.int64, "device": (value if isinstance(value, torch.Tensor) else value[0]).device}
    return program.call(aten.randint.low, (*SEEDS, [1]), info(attention), name="dropout_seed", kwargs=like)


class _Writer:
    """The operator in the place of one attention."""

    def __init__(self, program: Program, attention: _Attention, layout: str) -> None:
        self.program, self.attention, self.layout = program, attention, layout
        self.record = info(attention.weights)
        shape = list(tensor(attention.weights).shape)
        self.rows, self.heads, self.length = (shape[0], shape[1] if len(shape) == 4 else 1, shape[-1])

    def write(self) -> None:
        a = self.attention
        query, key, value = *a.scores.args[-2:], a.product.args[1]
        direct = self._sums_to_mask()
        with self.program.graph.inserting_before(a.product):
            key = _swapped(key) or self._call(aten.permute.default, (key, [0, 2, 1]), "keys")
            tensors = [self._with_heads(x) for x in (query, key, value)]
            mask = self._mask()
            if mask is not None and a.of_mask and not direct:
                sizes = [self.rows, self.heads, self.length, self.length]
                mask = self._call(aten.expand.default, (mask, sizes), "whole_mask")
            options = (mask, False, a.scale, self.layout, *self._dropout())
            attention = self._call(SPARSE, (*tensors, *options), "sparse_attention")
            out, sums = (self._call(operator.getitem, (attention, at), "attention") for at in (0, 1))
            product = self._flat(out, a.product)
        a.product.replace_all_uses_with(product)
        gradients = [n for n in (a.of_values, a.of_weights) if n is not None]
        if gradients:
            self.record = info(min(gradients))
            with self.program.graph.inserting_before(min(gradients)):
                self._write_backward(tensors, (out, sums), options, direct)
        self.program.graph.eliminate_dead_code()
        if a.dropout is not None and not a.dropout.drawn.users:  # (what draws is never dead)
            self.program.graph.erase_node(a.dropout.drawn)
            self.program.graph.eliminate_dead_code()

    def _dropout(self) -> tuple[Any, ...]:
        """Return the operator's arguments for dropout; none without it."""
        if self.attention.dropout is None:
            return ()
        with self.program.graph.inserting_before(self.attention.dropout.drawn):
            seed = drawn_seed(self.program, self.attention.weights)
        return seed, self.attention.dropout.rate

    def _write_backward(
        self, tensors: list[fx.Node], results: tuple[fx.Node, fx.Node], options: tuple[Any, ...], direct: bool
    ) -> None:
        a = self.attention
        tangent = a.of_weights.args[0] if a.of_weights is not None else a.of_values.args[1]  # type: ignore[union-attr]
        target = SPARSE_BACKWARD_WITH_MASK if a.of_mask else SPARSE_BACKWARD
        given = (self._with_heads(tangent), *tensors, *results, *options)
        backward = self._call(target, given, target.__name__.split(".")[0])
        for at, old in ((0, a.of_queries), (1, a.of_keys), (2, a.of_values)):
            if old is None:
                continue
            gradient = self._call(operator.getitem, (backward, at), "gradient")
            if at == 1:
                gradient = self._call(aten.permute.default, (gradient, [0, 1, 3, 2]), "gradient")
            old.replace_all_uses_with(self._flat(gradient, old))
        if a.of_mask:
            self._give_mask(self._call(operator.getitem, (backward, 3), "gradient_of_mask"), direct)

    def _give_mask(self, gradient: fx.Node, direct: bool) -> None:
        """Let the readers of the mask's gradient read the operator's."""
        a = self.attention
        assert a.of_scores is not None
        replaced = [reader for reader, _ in a.of_mask] if direct else [a.of_scores]
        for old in replaced:
            new = gradient
            if tensor(new).dtype is not tensor(old).dtype:
                new = self._call(prims.convert_element_type.default, (new, tensor(old).dtype), "gradient_of_mask")
            old.replace_all_uses_with(self._call(aten.view.default, (new, list(tensor(old).shape)), "gradient_of_mask"))

    def _sums_to_mask(self) -> bool:
        """Return whether the mask is smaller than the scores, and its gradient is read by sums over what it is one for alone."""
        a = self.attention
        if not a.of_mask or len(a.terms) != 1 or a.terms[0].hides is not None:
            return False
        mask, scores = tensor(a.terms[0].node).shape, tensor(a.weights).shape
        if len(scores) != 4 or len(mask) < 2:
            return False
        sizes = [1] * (4 - len(mask)) + [expression(n) for n in mask]
        shared = {dim for dim in range(4) if sizes[dim] == 1 and expression(scores[dim]) != 1}
        for reader, read_node in a.of_mask:
            if reader.target is not aten.sum.dim_IntList or tensor(read_node).dim() != 4:
                return False
            dims = {int(dim) % 4 for dim in reader.args[1]}  # type: ignore[union-attr,arg-type]
            if {dim for dim in dims if expression(scores[dim]) != 1} != shared:
                return False
        return bool(shared)

    def _mask(self) -> fx.Node | None:
        """Return what is added to the scores as one tensor of 2 or 4 dimensions."""
        mask: fx.Node | None = None
        dtype = tensor(self.attention.product).dtype
        for term in self.attention.terms:
            node = self._as_mask(term.node)
            if term.hides is None:
                if tensor(node).dtype is not dtype:
                    node = self._call(prims.convert_element_type.default, (node, dtype), "mask")
                mask = node if mask is None else self._call(aten.add.Tensor, (mask, node), "mask")
                continue
            hidden, shown = self._fill(-torch.inf, dtype), mask if mask is not None else self._fill(0.0, dtype)
            either = (hidden, shown) if term.hides else (shown, hidden)
            mask = self._call(aten.where.self, (node, *either), "mask")
        return mask

    def _as_mask(self, node: fx.Node) -> fx.Node:
        """Give a term of the scores the operator's dimensions: [rows, heads, queries, keys], or fewer sizes of 1."""
        shape = list(tensor(node).shape)
        flat = len(shape) == 3 and expression(shape[0]) == expression(self.rows * self.heads)
        if flat and (
            tensor(self.attention.weights).dim() == 3 or expression(shape[0]) not in (1, expression(self.heads))
        ):
            sizes = [self.rows, self.heads, *shape[1:]]
        else:
            sizes = [1] * (4 - len(shape)) + shape
        return node if len(shape) == 4 else self._call(aten.view.default, (node, sizes), "mask")

    def _fill(self, number: float, dtype: torch.dtype) -> fx.Node:
        like = {"dtype": dtype, "device": tensor(self.attention.product).device}
        return self._call(aten.full.default, ([], number), "number", like)

    def _with_heads(self, node: Any) -> fx.Node:
        """Return matrices [rows * heads, length, width] as [rows, heads, length, width], whose last elements lie next to each other."""
        if expression(tensor(node).stride()[-1]) != 1:
            node = self._call(aten.clone.default, (node,), "packed", {"memory_format": torch.contiguous_format})
        sizes = [self.rows, self.heads, *tensor(node).shape[1:]]
        return self._call(aten.view.default, (node, sizes), "with_heads")

    def _flat(self, node: fx.Node, like: fx.Node) -> fx.Node:
        """Return [rows, heads, …] as the matrices that were computed before, contiguous as these."""
        if not _is_contiguous(tensor(node)):
            node = self._call(aten.clone.default, (node,), "packed", {"memory_format": torch.contiguous_format})
        return self._call(aten.view.default, (node, list(tensor(like).shape)), like.name)

    def _call(self, target: Any, args: tuple[Any, ...], name: str, kwargs: dict[str, Any] | None = None) -> fx.Node:
        return self.program.call(target, args, self.record, name=name, kwargs=kwargs)


def _is_contiguous(x: torch.Tensor) -> bool:
    """Return whether a tensor is contiguous, without asking a symbolic size."""
    expected: Any = 1
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if expression(size) != 1 and expression(stride) != expression(expected):
            return False
        expected = expected * size
    return True
