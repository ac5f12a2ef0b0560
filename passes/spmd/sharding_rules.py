"""What operators do along each dimension of their tensors: the rules by which a tensor may be divided over several
ranks.

A rule gives every dimension of every operand and result a tuple of *labels*, outermost first. A label is an index that
the operator runs over, as in an Einstein sum: dimensions with the same label share that index, a dimension with two
labels is the product of both, and one without any can't be divided. An operator may be computed in parts along a label
that is not `whole`: each rank then gives its part of the results that have the label, and a term of the sum (or
maximum) of those that lack it. (After the named dimensions of GSPMD, Xu et al. 2021, and the factors of Alpa, Zheng et
al. 2022.)

Operators without a rule are computed on whole tensors: a rule only ever allows more.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zgraph.program import collectives, cpu_attention, ops
from zgraph.program.aliases import is_random
from zgraph.program.node import tensors, value
from zgraph.program.packed_attention import PACKED, PACKED_BACKWARD
from zgraph.program.sizes import is_symbolic, stand_in
from zgraph.program.sparse_attention import SPARSE, SPARSE_BACKWARD, SPARSE_BACKWARD_WITH_MASK

aten = torch.ops.aten
prims = torch.ops.prims

Label = str
Dims = tuple[tuple[Label, ...], ...]


@dataclass(frozen=True)
class Rule:
    """The labels of one operator's tensors."""

    operands: tuple[Dims, ...]  # of its tensor operands, in the order of `operands_of`
    results: tuple[Dims, ...]  # of its results
    sizes: dict[Label, int]  # of each label, as numbers that stand for them (`zgraph.program.sizes.stand_in`)
    whole: frozenset[Label] = frozenset()  # labels along which the operator can't be divided
    reduction: str = "sum"  # combines the ranks' parts of a result without the label: "sum" or "max"
    unread: frozenset[int] = frozenset()  # operands whose values don't matter: these may have any placement
    # operands of which the results are linear: if just these are sums over ranks, so are the results
    linear: frozenset[int] = frozenset()
    alike: frozenset[int] = frozenset()  # results that are the same for parts of the operands as for the whole


@dataclass
class _Builder:
    """A builder of the rule of one node, which collects its labels."""

    node: fx.Node  # the operator
    sizes: dict[Label, int] = field(default_factory=dict)  # of the labels so far
    operands: list[fx.Node] = field(default_factory=list)  # the operator's tensor operands

    def __post_init__(self) -> None:
        self.operands = operands_of(self.node)

    def shape(self, at: int) -> tuple[int, ...]:
        return tuple(map(stand_in, value(self.operands[at]).shape))

    def results(self) -> list[tuple[int, ...]]:
        return [tuple(map(stand_in, t.shape)) for t in tensors(self.node)]

    def dims(self, shape: Sequence[int], labels: Sequence[Label | None]) -> Dims:
        """Return one label for each dimension; None, and any label of a dimension of size 1, is no label."""
        dims: list[tuple[Label, ...]] = []
        for size, label in zip(shape, labels, strict=True):
            if label is None or size == 1:
                dims.append(())
            else:
                self.sizes[label] = size
                dims.append((label,))
        return tuple(dims)

    def rule(
        self,
        operands: Sequence[Dims],
        results: Sequence[Dims],
        whole: Sequence[Label] = (),
        reduction: str = "sum",
        unread: Sequence[int] = (),
        linear: Sequence[int] = (),
        alike: Sequence[int] = (),
    ) -> Rule:
        return Rule(
            tuple(operands),
            tuple(results),
            dict(self.sizes),
            frozenset(whole),
            reduction,
            frozenset(unread),
            frozenset(linear),
            frozenset(alike),
        )


def operands_of(node: fx.Node) -> list[fx.Node]:
    """Return the tensors that an operator reads, in the order of its arguments; one that it reads twice is listed
    twice. (Sizes are left out.)
    """
    nodes: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), nodes.append)
    return [n for n in nodes if not is_symbolic(value(n))]


def rule_of(node: fx.Node) -> Rule | None:
    """Return the rule of an operator's node; None for one that takes whole tensors (which is always right)."""
    if not isinstance(node.target, torch._ops.OpOverload) or (
        is_random(node) and node.target is not aten.native_dropout.default
    ):
        return None
    builder = _Builder(node)
    fakes = [value(n) for n in builder.operands]
    result = value(node)
    results = result if isinstance(result, (tuple, list)) else (result,)
    if node.target in ATTENTION:  # (its results include lengths, and None for results that are not computed)
        results = tuple(v for v in results if isinstance(v, torch.Tensor))
    if not all(isinstance(v, torch.Tensor) for v in (*fakes, *results)):
        return None
    maker = _RULES.get(node.target) or _NAMED.get(node.target._schema.name)
    if maker is None and (torch.Tag.pointwise in node.target.tags or node.target in _POINTWISE):
        maker = _pointwise
    return maker(builder) if maker is not None else None


Maker = Callable[[_Builder], "Rule | None"]
_RULES: dict[object, Maker] = {}


def _for(*targets: object) -> Callable[[Maker], Maker]:
    def register(maker: Maker) -> Maker:
        _RULES.update(dict.fromkeys(targets, maker))
        return maker

    return register


def _named(prefix: str, count: int) -> list[Label]:
    return [f"{prefix}{i}" for i in range(count)]


def _labels_but(count: int, *dims: int) -> list[Label | None]:
    """Return a label for each dimension but these, which have none."""
    return [None if i in {d % count for d in dims} else label for i, label in enumerate(_named("d", count))]


# -- element by element -----------------------------------------------------------------------------------------------
_POINTWISE = {
    aten._to_copy.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
    aten.copy.default,
    aten.full_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.gelu_backward.default,
    aten.silu_backward.default,
    aten.tanh_backward.default,
    aten.sigmoid_backward.default,
    aten.threshold_backward.default,
    aten.masked_fill.Scalar,
    aten.fill.Tensor,
    aten.fill.Scalar,
    prims.convert_element_type.default,
    ops.OUTPUT,
}
_UNREAD = {
    aten.full_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
}
# Linear in all of their operands together, or in their only one.
_LINEAR = {
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.neg.default,
    aten.alias.default,
    aten.detach.default,
    aten.clone.default,
    aten.mul.Scalar,
    aten.div.Scalar,
}


def _pointwise(b: _Builder) -> Rule | None:
    (result,) = b.results()
    labels = _named("d", len(result))
    dims = [b.dims(b.shape(i), labels[len(result) - len(b.shape(i)) :]) for i in range(len(b.operands))]
    linear = range(len(dims)) if b.node.target in _LINEAR and _all_operands(b.node) else ()
    unread = (0,) if b.node.target in _UNREAD else ()
    return b.rule(dims, [b.dims(result, labels)], unread=unread, linear=tuple(linear))


def _all_operands(node: fx.Node) -> bool:
    """Return whether no term of a sum is a number (which every rank would add)."""
    return node.target not in (aten.add.Tensor, aten.sub.Tensor) or len(operands_of(node)) == 2


@_for(aten.native_dropout.default)
def _dropout(b: _Builder) -> Rule:
    """Return the rule of dropout, which can't be divided: it draws for all elements at once."""
    labels = _named("d", len(b.shape(0)))
    dims = b.dims(b.shape(0), labels)
    return b.rule([dims], [dims, dims], whole=[x for x in labels if x in b.sizes])


# -- products ---------------------------------------------------------------------------------------------------------
def _product(b: _Builder, one: str, other: str, result: str, extra: Sequence[str] = ()) -> Rule:
    operands = [b.dims(b.shape(i), list(letters)) for i, letters in enumerate([*extra, one, other])]
    return b.rule(operands, [b.dims(b.results()[0], list(result))])


@_for(aten.mm.default)
def _mm(b: _Builder) -> Rule:
    return _product(b, "mk", "kn", "mn")


@_for(aten.bmm.default)
def _bmm(b: _Builder) -> Rule:
    return _product(b, "bmk", "bkn", "bmn")


@_for(aten.addmm.default)
def _addmm(b: _Builder) -> Rule:
    rule = _product(b, "mk", "kn", "mn", ["mn"[2 - len(b.shape(0)) :]])
    return b.rule(rule.operands, rule.results, whole="k")  # (each rank would add the first operand)


@_for(aten.convolution.default)
def _convolution(b: _Builder) -> Rule | None:
    transposed, groups = b.node.args[6], b.node.args[8]
    if transposed or groups != 1:
        return None
    space = [None] * (len(b.shape(0)) - 2)
    operands = [b.dims(b.shape(0), ["n", "c", *space]), b.dims(b.shape(1), ["o", "c", *space])]
    biased = len(b.operands) == 3
    if biased:
        operands.append(b.dims(b.shape(2), ["o"]))
    return b.rule(operands, [b.dims(b.results()[0], ["n", "o", *space])], whole="c" if biased else "")


@_for(aten._grouped_mm.default)
def _grouped(b: _Builder) -> Rule | None:
    """Return the rule of rows of tokens, sorted by expert, times each expert's own matrix; where each expert's rows end
    is only known when it runs.
    """
    if [len(b.shape(i)) for i in range(len(b.operands))] != [2, 3, 1]:
        return None
    operands = [b.dims(b.shape(0), ["t", "k"]), b.dims(b.shape(1), ["e", "k", "n"]), b.dims(b.shape(2), ["e"])]
    return b.rule(operands, [b.dims(b.results()[0], ["t", "n"])], whole=["t", "e"])


def _grouped_backward(b: _Builder) -> Rule:
    rows, matrices = b.dims(b.shape(0), ["t", "k"]), b.dims(b.shape(1), ["e", "k", "n"])
    operands = [rows, matrices, b.dims(b.shape(2), ["e"]), b.dims(b.shape(3), ["t", "n"])]
    return b.rule(operands, [rows, matrices], whole=["t", "e"])


# Operators of libraries, which may not be installed.
_NAMED: dict[str, Maker] = {
    "transformers::grouped_mm_fallback": _grouped,
    "transformers::grouped_mm_fallback_backward": _grouped_backward,
}


# -- views ------------------------------------------------------------------------------------------------------------
@_for(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(b: _Builder) -> Rule | None:
    before, after = b.shape(0), b.results()[0]
    one: list[list[Label]] = [[] for _ in before]
    other: list[list[Label]] = [[] for _ in after]
    if 0 in before:
        return None
    i = j = 0
    left = right = 1
    while True:
        while left == 1 and i < len(before):
            left, i = before[i], i + 1
        while right == 1 and j < len(after):
            right, j = after[j], j + 1
        if left == 1 or right == 1:
            break
        size = min(left, right)
        if left % size or right % size:
            # The two shapes cut the elements at different places: dimensions up to the next common boundary have no labels.
            first, second = i - 1, j - 1
            low, high = left, right
            while low != high:
                if low < high:
                    low, i = low * before[i], i + 1
                else:
                    high, j = high * after[j], j + 1
            for k in range(first, i):
                one[k] = []
            for k in range(second, j):
                other[k] = []
            left = right = 1
            continue
        label = f"v{len(b.sizes)}"
        b.sizes[label] = size
        one[i - 1].append(label)
        other[j - 1].append(label)
        left, right = left // size, right // size
    common = {x for dim in one for x in dim} & {x for dim in other for x in dim}
    whole: list[Label] = []
    for dims, shape in ((one, before), (other, after)):
        for k, dim in enumerate(dims):
            dims[k] = [x for x in dim if x in common]
            if math.prod(b.sizes[x] for x in dims[k]) != shape[k]:
                dims[k] = []  # (part of it has no label)
    return b.rule(
        [tuple(map(tuple, one))], [tuple(map(tuple, other))], whole=_unmatched(one, other, whole), linear=(0,)
    )


def _unmatched(one: list[list[Label]], other: list[list[Label]], whole: list[Label]) -> list[Label]:
    """Return the labels that only one of the two sides has: nothing can be divided along them."""
    left, right = {x for dim in one for x in dim}, {x for dim in other for x in dim}
    return [*whole, *(left ^ right)]


@_for(aten.permute.default, aten.transpose.int, aten.t.default)
def _permute(b: _Builder) -> Rule:
    shape = b.shape(0)
    labels: list[Label | None] = list(_named("d", len(shape)))
    if b.node.target is aten.permute.default:
        order = [d % len(shape) for d in argument(b.node, 1)]
    elif b.node.target is aten.t.default:
        order = list(range(len(shape)))[::-1]
    else:
        order = list(range(len(shape)))
        p, q = (argument(b.node, at) % len(shape) for at in (1, 2))
        order[p], order[q] = order[q], order[p]
    return b.rule([b.dims(shape, labels)], [b.dims(b.results()[0], [labels[d] for d in order])], linear=(0,))


@_for(aten.expand.default)
def _expand(b: _Builder) -> Rule:
    result = b.results()[0]
    labels = _named("d", len(result))
    return b.rule([b.dims(b.shape(0), labels[len(result) - len(b.shape(0)) :])], [b.dims(result, labels)], linear=(0,))


@_for(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def _squeeze(b: _Builder) -> Rule:
    shape, result = b.shape(0), b.results()[0]
    labels = iter(_named("d", len(shape)))
    long = [next(labels) if size != 1 else None for size in shape]
    long_labels = iter([x for x in long if x is not None])
    after = [next(long_labels) if size != 1 else None for size in result]
    return b.rule([b.dims(shape, long)], [b.dims(result, after)], linear=(0,))


def argument(node: fx.Node, at: int, default: Any = None) -> Any:
    """Return the positional argument `at`, or the default if it was not given."""
    return node.args[at] if len(node.args) > at else default


@_for(aten.select.int, aten.unbind.int, aten.sort.default, aten.topk.default, aten.cumsum.default)
def _without_dim(b: _Builder) -> Rule:
    """Return the rule of an operator that works along one dimension: all other dimensions have labels."""
    shape = b.shape(0)
    at = 2 if b.node.target is aten.topk.default else 1
    dim = int(argument(b.node, at, 0 if b.node.target is aten.unbind.int else -1)) % len(shape)
    labels = _labels_but(len(shape), dim)
    result_labels = labels[:dim] + labels[dim + 1 :] if b.node.target in (aten.select.int, aten.unbind.int) else labels
    return b.rule([b.dims(shape, labels)], [b.dims(r, result_labels) for r in b.results()])


def _pieces(b: _Builder, whole: int, starts: Sequence[int], sizes: Sequence[int]) -> tuple[Label, Label] | None:
    """Return the labels of a dimension that is cut: `chunks` of a `width` that divides all pieces; None if the width
    would be 1.
    """
    width = math.gcd(whole, *starts, *sizes)
    if width == 1 or width == whole:
        return None
    b.sizes["chunks"], b.sizes["width"] = whole // width, width
    return "chunks", "width"


def _cut(b: _Builder, dim: int, starts: Sequence[int], results: Sequence[tuple[int, ...]]) -> Rule:
    """Return the rule of an operator that gives pieces of its operand along a dimension."""
    shape = b.shape(0)
    labels = _labels_but(len(shape), dim)
    before = list(b.dims(shape, labels))
    pieces = _pieces(b, shape[dim], starts, [r[dim] for r in results])
    whole: list[Label] = []
    result_dims = []
    if pieces is not None:
        before[dim] = pieces
        whole.append("chunks")
    for i, result in enumerate(results):
        after = list(b.dims(result, labels))
        if pieces is not None:
            after[dim] = (pieces[1],)
            if result[dim] != b.sizes["width"]:
                b.sizes[f"count{i}"] = result[dim] // b.sizes["width"]
                whole.append(f"count{i}")
                after[dim] = (f"count{i}", pieces[1])
        result_dims.append(tuple(after))
    return b.rule([tuple(before)], result_dims, whole=whole, linear=(0,))


@_for(aten.split.Tensor, aten.split_with_sizes.default)
def _split(b: _Builder) -> Rule:
    dim = int(argument(b.node, 2, 0)) % len(b.shape(0))
    results = b.results()
    starts, at = [], 0
    for result in results:
        starts.append(at)
        at += result[dim]
    return _cut(b, dim, starts, results)


@_for(aten.slice.Tensor)
def _slice(b: _Builder) -> Rule | None:
    shape, result = b.shape(0), b.results()[0]
    dim = int(argument(b.node, 1, 0)) % len(shape)
    if shape[dim] == result[dim]:
        labels = _named("d", len(shape))
        return b.rule([b.dims(shape, labels)], [b.dims(result, labels)], linear=(0,))
    start = argument(b.node, 2, 0) or 0
    if argument(b.node, 4, 1) != 1 or isinstance(start, fx.Node):
        return _without_label(b, dim)
    return _cut(b, dim, [start + shape[dim] if start < 0 else start], [result])


def _without_label(b: _Builder, *dims: int) -> Rule:
    """Return the rule of an operator whose operands and results have the same dimensions, with no labels for these."""
    labels = _labels_but(len(b.shape(0)), *dims)
    return b.rule(
        [b.dims(b.shape(i), labels) for i in range(len(b.operands))], [b.dims(r, labels) for r in b.results()]
    )


@_for(aten.slice_scatter.default, aten.constant_pad_nd.default, aten.slice_backward.default, aten.flip.default)
def _in_place_of(b: _Builder) -> Rule:
    node, count = b.node, len(b.shape(0))
    if node.target is aten.constant_pad_nd.default:
        pads = list(argument(node, 1))  # (a pad that is a node is a symbolic size)
        return _without_label(b, *[count - 1 - i // 2 for i, pad in enumerate(pads) if pad])
    if node.target is aten.flip.default:
        return _without_label(b, *node.args[1])  # type: ignore[misc]
    at = 2  # (slice_scatter(x, source, dim, …), slice_backward(grad, sizes, dim, …))
    return _without_label(b, int(argument(node, at, 0)))


@_for(aten.select_backward.default, aten.select_scatter.default)
def _select_backward(b: _Builder) -> Rule:
    result = b.results()[0]
    dim = int(argument(b.node, 2)) % len(result)
    labels = _labels_but(len(result), dim)
    less = labels[:dim] + labels[dim + 1 :]
    operands = [b.dims(b.shape(i), labels if len(b.shape(i)) == len(result) else less) for i in range(len(b.operands))]
    return b.rule(operands, [b.dims(result, labels)], linear=(0,) if len(operands) == 1 else ())


@_for(aten.cat.default)
def _cat(b: _Builder) -> Rule:
    result = b.results()[0]
    dim = int(argument(b.node, 1, 0)) % len(result)
    labels = _labels_but(len(result), dim)
    shapes = [b.shape(i) for i in range(len(b.operands))]
    operands: list[list[tuple[Label, ...]]] = [
        list(b.dims(s, labels)) if len(s) == len(result) else [()] * len(s) for s in shapes
    ]
    after = list(b.dims(result, labels))
    whole: list[Label] = []
    pieces = (
        _pieces(b, result[dim], [], [s[dim] for s in shapes]) if all(len(s) == len(result) for s in shapes) else None
    )
    if pieces is not None:
        after[dim] = pieces
        whole.append("chunks")
        for i, shape in enumerate(shapes):
            operands[i][dim] = (pieces[1],)
            if shape[dim] != b.sizes["width"]:
                b.sizes[f"count{i}"] = shape[dim] // b.sizes["width"]
                whole.append(f"count{i}")
                operands[i][dim] = (f"count{i}", pieces[1])
    return b.rule([tuple(o) for o in operands], [tuple(after)], whole=whole, linear=tuple(range(len(shapes))))


@_for(aten.stack.default)
def _stack(b: _Builder) -> Rule:
    result = b.results()[0]
    dim = int(argument(b.node, 1, 0)) % len(result)
    labels = _labels_but(len(result), dim)
    operands = [b.dims(b.shape(i), labels[:dim] + labels[dim + 1 :]) for i in range(len(b.operands))]
    return b.rule(operands, [b.dims(result, labels)], linear=tuple(range(len(operands))))


# -- reductions -------------------------------------------------------------------------------------------------------
def _reduced(node: fx.Node, count: int) -> list[int]:
    given = argument(node, 1, None)
    dims = [given] if isinstance(given, int) else list(given or range(count))
    return [d % count for d in dims] if count else []


@_for(aten.sum.default, aten.sum.dim_IntList, aten.amax.default, aten.amin.default)
def _reduction(b: _Builder) -> Rule | None:
    if b.node.target is aten.amin.default:
        return None
    shape, result = b.shape(0), b.results()[0]
    labels: list[Label | None] = list(_named("d", len(shape)))
    gone = _reduced(b.node, len(shape)) if b.node.target is not aten.sum.default else list(range(len(shape)))
    if len(result) == len(shape):
        result_labels = [None if d in gone else x for d, x in enumerate(labels)]
    else:
        result_labels = [x for d, x in enumerate(labels) if d not in gone]
    how = "max" if b.node.target is aten.amax.default else "sum"
    linear = (0,) if how == "sum" else ()
    return b.rule([b.dims(shape, labels)], [b.dims(result, result_labels)], reduction=how, linear=linear)


@_for(
    aten.mean.dim,
    aten.mean.default,
    aten.any.dim,
    aten.any.dims,
    aten.var_mean.correction,
    aten.argmax.default,
    aten.logsumexp.default,
)
def _whole_reduction(b: _Builder) -> Rule:
    """Return the rule of a reduction that can't be divided along the reduced dimensions."""
    shape = b.shape(0)
    labels = _named("d", len(shape))
    gone = _reduced(b.node, len(shape)) if b.node.target is not aten.mean.default else list(range(len(shape)))
    results = b.results()
    result_labels = labels if len(results[0]) == len(shape) else [x for d, x in enumerate(labels) if d not in gone]
    whole = [labels[d] for d in gone]
    return b.rule([b.dims(shape, labels)], [b.dims(r, result_labels) for r in results], whole=whole)


@_for(
    aten._softmax.default,
    aten._safe_softmax.default,
    aten._log_softmax.default,
    aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default,
)
def _softmax(b: _Builder) -> Rule:
    labels = _named("d", len(b.shape(0)))
    dims = [b.dims(b.shape(i), labels) for i in range(len(b.operands))]
    dim = int(b.node.args[len(b.operands)])  # type: ignore[arg-type]
    return b.rule(dims, [b.dims(b.results()[0], labels)], whole=[labels[dim]])


@_for(aten.native_layer_norm.default)
def _layer_norm(b: _Builder) -> Rule:
    shape = b.shape(0)
    inner = len(argument(b.node, 1))
    labels = _named("d", len(shape))
    normed = labels[len(shape) - inner :]
    operands = [b.dims(shape, labels)] + [b.dims(b.shape(i), normed) for i in range(1, len(b.operands))]
    return b.rule(operands, [b.dims(r, labels) for r in b.results()], whole=normed)


@_for(aten.native_layer_norm_backward.default)
def _layer_norm_backward(b: _Builder) -> Rule | None:
    if not all(b.node.args[7]):  # type: ignore[arg-type]
        return None
    shape = b.shape(0)
    inner = len(argument(b.node, 2))
    labels = _named("d", len(shape))
    normed = labels[len(shape) - inner :]
    operands = [b.dims(b.shape(i), labels) for i in range(4)] + [
        b.dims(b.shape(i), normed) for i in range(4, len(b.operands))
    ]
    results = [b.dims(shape, labels), *[b.dims(r, normed) for r in b.results()[1:]]]
    return b.rule(operands, results, whole=normed)


# -- attention --------------------------------------------------------------------------------------------------------
ATTENTION = {
    cpu_attention.FORWARD,
    cpu_attention.BACKWARD,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    PACKED,
    PACKED_BACKWARD,
    SPARSE,
    SPARSE_BACKWARD,
    SPARSE_BACKWARD_WITH_MASK,
}


_SPARSE = (SPARSE, SPARSE_BACKWARD, SPARSE_BACKWARD_WITH_MASK)

IN_ROWS = ("documents", "order")  # operands with a number for each row of queries and keys, [batch, rows]

# The label of the third dimension of their operands and results: the rows of queries, or those of keys.
_ROWS = {
    "query": "q",
    "out": "q",
    "output": "q",
    "grad_out": "q",
    "grad_out_": "q",
    "logsumexp": "q",
    "key": "k",
    "value": "k",
}


@_for(*ATTENTION)
def _attention(b: _Builder) -> Rule | None:
    """Return the rule of attention: sequences and heads are independent. Where keys have fewer heads than queries, heads have no label, but in
    sparse attention: a head of keys goes with its group of queries' heads. Rows can't be divided.
    """
    queries = b.shape(0)
    if len(queries) != 4:
        return None
    names = [a.name for a in b.node.target._schema.arguments]  # type: ignore[union-attr]
    arguments = [*zip(names, b.node.args, strict=False), *b.node.kwargs.items()]
    read = [name for name, arg in arguments if isinstance(arg, fx.Node)]
    rows = [_ROWS.get(name) for name in read]
    long = {label: b.shape(read.index(name))[2] for label, name in (("q", "query"), ("k", "key"))}
    heads = [b.shape(read.index(name))[1] for name in ("query", "key")]
    grouped = b.node.target in _SPARSE and heads[0] != heads[1]
    alone = heads[0] == heads[1] or grouped

    def dims(shape: Sequence[int], rows: Label | None) -> Dims:
        if len(shape) < 3 or shape[0] not in (1, queries[0]) or shape[1] not in (1, *heads):
            return ((),) * len(shape)
        row = rows if rows is not None and shape[2] == long[rows] else None  # (some sums are padded)
        labels = b.dims(shape, ["b", "h" if alone and not grouped else None, row, *([None] * (len(shape) - 3))])
        if not grouped or shape[1] == 1:
            return labels
        of_heads = {"h": heads[1], "g": heads[0] // heads[1] if shape[1] == heads[0] else 1}
        known = {label: size for label, size in of_heads.items() if size != 1}
        b.sizes.update(known)
        return (labels[0], tuple(known), *labels[2:])

    operands = [
        b.dims(b.shape(i), ["b", "q"]) if read[i] in IN_ROWS else dims(b.shape(i), rows[i]) for i in range(len(read))
    ]
    if alone and any(len(d) == 4 and not d[1] and b.shape(i)[1] != 1 for i, d in enumerate(operands)):
        return None
    shapes = [tuple(map(stand_in, v.shape)) if isinstance(v, torch.Tensor) else () for v in value(b.node)]
    backward = "grad_out" in names or "grad_out_" in names
    results = [dims(r, "k" if backward and i in (1, 2) else "q") for i, r in enumerate(shapes)]
    of_mask = 3 if b.node.target is SPARSE_BACKWARD_WITH_MASK else None  # (a sum over what the mask is one for)
    own = [(d, r) for i, (d, r) in enumerate(zip(results, shapes, strict=True)) if i != of_mask]
    if any(not d[0] or (alone and not d[1] and r[1] != 1) for d, r in own if len(d) > 2) and 1 not in queries[:2]:
        return None
    # Results without a dimension of heads are lengths, a random state that is not drawn from, or empty.
    alike = [i for i, d in enumerate(results) if len(d) < 3 and i != of_mask]
    # (What sparse attention drops depends on the number of a row; `heads_of_ranks` divides its heads.)
    whole = ("q", "k", "g", "b") if "seed" in read and b.node.target in _SPARSE else ("q", "k", "g")
    return b.rule(operands, results, whole=[x for x in whole if x in b.sizes], alike=alike)


# -- by index ---------------------------------------------------------------------------------------------------------
@_for(aten.embedding.default)
def _embedding(b: _Builder) -> Rule:
    places = _named("i", len(b.shape(1)))
    operands = [b.dims(b.shape(0), ["rows", "e"]), b.dims(b.shape(1), list(places))]
    return b.rule(operands, [b.dims(b.results()[0], [*places, "e"])], whole=["rows"])


@_for(aten.embedding_dense_backward.default)
def _embedding_backward(b: _Builder) -> Rule:
    places = _named("i", len(b.shape(1)))
    operands = [b.dims(b.shape(0), [*places, "e"]), b.dims(b.shape(1), list(places))]
    return b.rule(operands, [b.dims(b.results()[0], ["rows", "e"])], whole=["rows"], linear=(0,))


@_for(aten.gather.default, aten.scatter.src, aten.scatter.value, aten.scatter_add.default)
def _gather(b: _Builder) -> Rule | None:
    """Return the rule of gather(x, dim, index), scatter(x, dim, index, source) or scatter_add: other dimensions have
    labels where all have the same size.
    """
    shapes = [b.shape(i) for i in range(len(b.operands))]
    dim = int(argument(b.node, 1)) % max(1, len(shapes[0]))
    if any(len(s) != len(shapes[0]) for s in shapes):
        return None
    labels: list[Label | None] = list(_named("d", len(shapes[0])))
    for d in range(len(labels)):
        if d == dim or len({s[d] for s in shapes}) != 1:
            labels[d] = None
    rows = ["rows" if d == dim else x for d, x in enumerate(labels)]
    operands = [b.dims(s, labels if i else rows) for i, s in enumerate(shapes)]
    result_labels = labels if b.node.target is aten.gather.default else rows
    return b.rule(operands, [b.dims(r, result_labels) for r in b.results()], whole=["rows"])


@_for(aten.index.Tensor)
def _index(b: _Builder) -> Rule | None:
    """Return the rule of indexing one dimension by one tensor; the other dimensions keep their labels."""
    indices = list(argument(b.node, 1))
    used = [d for d, i in enumerate(indices) if i is not None]
    shape = b.shape(0)
    if len(used) != 1 or value(indices[used[0]]).dtype is torch.bool:
        return None
    labels: list[Label | None] = list(_named("d", len(shape)))
    places = _named("i", len(b.shape(1)))
    read = [None if d == used[0] else x for d, x in enumerate(labels)]
    result_labels = [*read[: used[0]], *places, *read[used[0] + 1 :]]
    return b.rule([b.dims(shape, read), b.dims(b.shape(1), list(places))], [b.dims(b.results()[0], result_labels)])


@_for(aten.index_put.default)
def _index_put(b: _Builder) -> Rule | None:
    """Return the rule of putting values at indices of one dimension, which has no label; nor have the indices."""
    given = list(argument(b.node, 1))
    used = [d for d, i in enumerate(given) if i is not None]
    shape, values = b.shape(0), b.shape(len(b.operands) - 1)
    if len(used) != 1 or value(given[used[0]]).dtype is torch.bool:
        return None
    extra = len(b.shape(1)) - 1
    if len(values) != len(shape) + extra:
        return None
    labels: list[Label | None] = [None if d == used[0] else f"d{d}" for d in range(len(shape))]
    put = [*labels[: used[0]], *([None] * (extra + 1)), *labels[used[0] + 1 :]]
    operands = [b.dims(shape, labels), ((),) * len(b.shape(1)), b.dims(values, put)]
    return b.rule(operands, [b.dims(b.results()[0], labels)])


@_for(aten.nll_loss_forward.default)
def _nll_loss(b: _Builder) -> Rule | None:
    if len(b.shape(0)) != 2 or len(b.operands) != 2:
        return None
    operands = [b.dims(b.shape(0), ["n", "c"]), b.dims(b.shape(1), ["n"])]
    return b.rule(operands, [b.dims(r, ["n"] * len(r)) for r in b.results()], whole="nc")


@_for(aten.nll_loss_backward.default)
def _nll_loss_backward(b: _Builder) -> Rule | None:
    if len(b.shape(1)) != 2 or len(b.operands) != 4:
        return None
    operands = [b.dims(b.shape(i), list("nc")[: len(b.shape(i))]) for i in range(4)]
    return b.rule(operands, [b.dims(b.results()[0], ["n", "c"])], whole="c")


# -- between ranks ----------------------------------------------------------------------------------------------------
RANKS = "ranks"
"""The label of consecutive pieces of which each rank gave, or will get, one."""


def _pieces_of_ranks(b: _Builder, shape: Sequence[int], ranks: int, label: Label = RANKS) -> Dims:
    dims = list(b.dims(shape, _named("d", len(shape))))
    b.sizes[label], b.sizes["d0"] = ranks, shape[0] // ranks
    dims[0] = (label, "d0") if b.sizes["d0"] > 1 else (label,)
    return tuple(dims)


@_for(collectives.ALL_GATHER)
def _all_gather(b: _Builder) -> Rule:
    before = b.dims(b.shape(0), _named("d", len(b.shape(0))))
    return b.rule([before], [_pieces_of_ranks(b, b.results()[0], int(b.node.args[1]))], whole=[RANKS], linear=(0,))  # type: ignore[arg-type]


@_for(collectives.REDUCE_SCATTER)
def _reduce_scatter(b: _Builder) -> Rule:
    after = b.dims(b.results()[0], _named("d", len(b.shape(0))))
    linear = (0,) if b.node.args[1] in _SUMS else ()
    before = _pieces_of_ranks(b, b.shape(0), int(b.node.args[2]))  # type: ignore[arg-type]
    return b.rule([before], [after], whole=[RANKS], linear=linear)


@_for(collectives.ALL_TO_ALL)
def _all_to_all(b: _Builder) -> Rule | None:
    given, taken = list(b.node.args[2]), list(b.node.args[1])  # type: ignore[arg-type]
    if len({*given, *taken}) != 1:  # (symbolic sizes are equal if their nodes are)
        return None
    before = _pieces_of_ranks(b, b.shape(0), len(given))
    after = _pieces_of_ranks(b, b.results()[0], len(taken), "others")
    return b.rule([before], [after], whole=[RANKS, "others"], linear=(0,))


@_for(collectives.ALL_REDUCE, collectives.SHIFT, collectives.WAIT)
def _all_reduce(b: _Builder) -> Rule:
    dims = b.dims(b.shape(0), _named("d", len(b.shape(0))))
    linear = (0,) if b.node.target is not collectives.ALL_REDUCE or b.node.args[1] in _SUMS else ()
    return b.rule([dims], [dims], linear=linear)


_SUMS = ("sum", "avg")


# -- made of nothing --------------------------------------------------------------------------------------------------
@_for(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default)
def _new(b: _Builder) -> Rule:
    result = b.results()[0]
    return b.rule([((),) * len(b.shape(0))], [b.dims(result, _named("d", len(result)))], unread=(0,))


@_for(aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format)
def _constant(b: _Builder) -> Rule:
    result = b.results()[0]
    return b.rule([], [b.dims(result, _named("d", len(result)))])


def getitem_of(node: fx.Node) -> int | None:
    """Return which result of its operator a `getitem` node picks; None for any other node."""
    return int(argument(node, 1)) if node.target is operator.getitem else None
