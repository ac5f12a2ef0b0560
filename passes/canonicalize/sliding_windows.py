"""Attention whose own mask is a window of positions computes the blocks of the window alone.

    shown = (key <= query) & (key > query - 4096)      (the sliding windows of Mistral, Gemma, Phi, and others)

*Contract.* The pass looks at the CPU's attention operators with a mask that no pattern of the plan's `attention` matches, and takes the mask
apart: what it says of the distance between query and key, by positions 0, 1, 2, … that it compares, is an interval. A mask that says just
this is no longer computed; of one that says more besides (padding, documents) the blocks outside of the window are left out, and it holds
in the others. Numbers stay those of the mask: a mask that says something else of the distance, or could hide all keys from a query by
another number than -inf, stays as it is. It is taken where it pays: where at most half of the blocks are left, of a sequence of
at least `MIN_LENGTH`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from zgraph.passes.canonicalize.sparse_attention import forward_of, replace_by_sparse
from zgraph.passes.contract import graph_pass
from zgraph.passes.spmd.sharding_rules import argument
from zgraph.plan.attention import SlidingWindow, Sparsity, pattern_of
from zgraph.program.counting import COUNTS, start_and_step
from zgraph.program.cpu_attention import FORWARD, TENSORS
from zgraph.program.node import info, tensor
from zgraph.program.program import Fact, Program
from zgraph.program.remark import Remark
from zgraph.program.sizes import typical
from zgraph.program.sparse_attention import counted_blocks, layout_text
from zgraph.torch_compat.symbols import expression

aten, prims = torch.ops.aten, torch.ops.prims

MIN_LENGTH = 1024
MAX_SHARE = 0.5
"""The shortest sequence, and the largest share of blocks, that pay: docs/features/sparse-attention.md has what was measured on both sides."""

_KEYS, _QUERIES = -1, -2  # dimensions of a mask


@dataclass(frozen=True)
class SlidingOptions:
    """Options of `sliding_windows`."""

    attention: tuple[tuple[str, Sparsity], ...] = ()  # the plan's patterns, whose attention stays as it is


@dataclass(frozen=True)
class _Position:
    """The positions along a dimension, plus a number."""

    dim: int  # the dimension, counted from behind
    plus: int = 0  # what is added to each


@dataclass(frozen=True)
class _Distance:
    """The position of the query less that of the key, times a sign, plus a number."""

    sign: int  # 1 or -1
    plus: int = 0  # what is added to each


@dataclass(frozen=True)
class _Magnitude:
    """The distance between query and key, whichever comes first."""


@dataclass(frozen=True)
class _Number:
    value: float  # the number that each element has


@dataclass(frozen=True)
class _Band:
    """Booleans that are true only where query - key is between two numbers, or with `outside` false only there."""

    low: float = -math.inf  # the least distance
    high: float = math.inf  # the largest one
    exact: bool = False  # whether they are so all over it
    outside: bool = False  # whether they are false there


@dataclass(frozen=True)
class _Added:
    """Numbers that are 0 where a band is true, and low elsewhere."""

    band: _Band  # where keys are shown
    hidden: float  # the number elsewhere


_Meaning = _Position | _Distance | _Magnitude | _Number | _Band | _Added | None


@graph_pass(
    "sliding_windows",
    "attention whose own mask is a window of positions computes the blocks of the window alone",
    options=SlidingOptions,
    requires=(Fact.CLEAN,),
    bitwise=False,
)
def sliding_windows(program: Program, options: SlidingOptions) -> dict[str, int]:
    meanings = _Meanings()
    windows: dict[fx.Node, tuple[SlidingWindow, fx.Node | None]] = {}
    for node in program.nodes:
        if node.target is FORWARD and pattern_of(dict(options.attention), program.modules_around(node)) is None:
            window_and_mask = _window_of(meanings, node)
            if window_and_mask is not None:
                windows[node] = window_and_mask
    if not windows:
        return {"attentions": 0}
    for node in reversed(program.nodes):
        forward = node if node.target is FORWARD else forward_of(node)
        if forward is not None and forward in windows:
            window, mask = windows[forward]
            replace_by_sparse(program, node, mask, layout_text(window))
    program.graph.eliminate_dead_code()
    _tell(program, windows)
    return {"attentions": len(windows)}


def _tell(program: Program, windows: dict[fx.Node, tuple[SlidingWindow, fx.Node | None]]) -> None:
    for window in dict.fromkeys(window for window, _ in windows.values()):
        nodes = [node for node, (other, _) in windows.items() if other == window]
        what = f"attention of {len(nodes)} modules ({info(nodes[0]).module or '(root)'}, …) computes the blocks of its window alone"
        why = f"the model's own mask hides keys that are {window.window} or more before a query"
        remedy = 'attention={"*": zgraph.Dense()} computes all of it'
        program.remarks.append(Remark("sliding_windows", nodes[0].name, what, why, 0.0, remedy))


def _window_of(meanings: _Meanings, node: fx.Node) -> tuple[SlidingWindow, fx.Node | None] | None:
    """Return the window of an attention, and its mask if that says more; None where it has no window, or does not pay."""
    mask = node.kwargs.get("attn_mask")
    if not isinstance(mask, fx.Node) or any(node.args[TENSORS[FORWARD] :][:1]):  # (not with dropout)
        return None
    meaning = meanings.of(mask)
    if not isinstance(meaning, _Added) or meaning.band.outside:
        return None
    band, kind = meaning.band, tensor(mask)
    sizes = {expression(n) for n in (*kind.shape[-2:], *(tensor(x).shape[2] for x in node.args[:2]))}  # type: ignore[arg-type]
    if len(sizes) != 1 or not -math.inf < band.low <= 0 <= band.high < math.inf:
        return None
    if meaning.hidden > (torch.finfo(kind.dtype).min if band.exact else -math.inf):
        return None
    window = SlidingWindow(window=int(band.high) + 1, ahead=int(-band.low), block=_block(int(band.high - band.low) + 1))
    length = typical(kind.shape[-1])
    computed, every = counted_blocks(window.model_dump_json(), 1, length)
    if length < MIN_LENGTH or computed > MAX_SHARE * every:
        return None
    return window, None if band.exact else mask


def _block(width: int) -> int:
    """Return the side of blocks for a window of some positions: about a quarter of it, so that little outside of it is computed."""
    return max(16, min(128, 2 ** ((width // 4).bit_length() - 1 if width >= 4 else 0)))


class _Meanings:
    """The meaning of each node that a mask of positions can be made of."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, _Meaning] = {}

    def of(self, node: Any) -> _Meaning:
        """Return the meaning of a node or a number, None if it has none of these."""
        if isinstance(node, bool | int | float):
            return _Number(node)
        if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
            return None
        if node not in self._known:
            self._known[node] = None  # (replaced below; a graph has no cycles)
            rule = _RULES.get(node.target)
            meaning = rule(self, node) if rule is not None else None
            if meaning is None and tensor(node).dtype is torch.bool:
                meaning = _Band()  # (booleans of anything)
            self._known[node] = meaning
        return self._known[node]


def _whole(meaning: _Meaning) -> int | None:
    """Return the whole number that each element has; None where they have another one, or several."""
    fits = isinstance(meaning, _Number) and math.isfinite(meaning.value) and meaning.value == int(meaning.value)
    return int(meaning.value) if fits else None  # type: ignore[union-attr]


def _size(node: Any, dim: int) -> Any:
    """Return a size as an expression, which can be compared without a guard; 1 for a dimension that a tensor lacks."""
    shape = tensor(node).shape
    return expression(shape[dim]) if len(shape) >= -dim else 1


# -- bands ------------------------------------------------------------------------------------------------------------
def _simple(band: _Band) -> _Band:
    """Return a band that is not `outside`, if there is an equal one."""
    if not band.outside:
        return band
    if not band.exact:
        return band if band.low > -math.inf or band.high < math.inf else _Band()
    if band.low == -math.inf and band.high < math.inf:
        return _Band(band.high + 1, math.inf, True)
    if band.high == math.inf and band.low > -math.inf:
        return _Band(-math.inf, band.low - 1, True)
    return band


def _not(band: _Band) -> _Band:
    return _simple(replace(band, outside=not band.outside))


def _both(one: _Band, other: _Band) -> _Band:
    """Return a band of where both are true."""
    if one.outside and other.outside:
        return _Band()
    if one.outside or other.outside:
        return replace(other if one.outside else one, exact=False)
    return _Band(max(one.low, other.low), min(one.high, other.high), one.exact and other.exact)


# -- rules ------------------------------------------------------------------------------------------------------------
_Rule = Callable[[_Meanings, fx.Node], _Meaning]


def _count(meanings: _Meanings, node: fx.Node) -> _Meaning:
    start, step = start_and_step(node)
    return _Position(-1, start) if type(start) is int and _fits(node, start) and step == 1 else None


def _fits(node: fx.Node, plus: int) -> bool:
    """Return whether positions of a node's dtype to which a number is added do not wrap around."""
    return tensor(node).dtype in (torch.int32, torch.int64) and abs(plus) < 2**30


def _same(meanings: _Meanings, node: fx.Node) -> _Meaning:
    return meanings.of(node.args[0])


def _converted(meanings: _Meanings, node: fx.Node) -> _Meaning:
    """Return the meaning of a cast: whole numbers stay so, and numbers that hide stay as low."""
    meaning, before, after = meanings.of(node.args[0]), tensor(node.args[0]).dtype, tensor(node).dtype  # type: ignore[arg-type]
    if isinstance(meaning, _Added | _Number):
        return meaning if after.is_floating_point else None
    if isinstance(meaning, _Band):
        return meaning if after is torch.bool else None
    wide = not after.is_floating_point and after is not torch.bool and after.itemsize >= before.itemsize
    return meaning if wide else None


def _viewed(meanings: _Meanings, node: fx.Node) -> _Meaning:
    """Return the meaning of a view: of a row of positions along one dimension, or of a mask with other dimensions before its last two."""
    meaning = meanings.of(node.args[0])
    before, after = ([expression(n) for n in tensor(x).shape] for x in (node.args[0], node))  # type: ignore[arg-type]
    if isinstance(meaning, _Position):
        dims = [dim for dim, n in enumerate(after) if n != 1]
        alone = len(dims) == 1 and [n for n in before if n != 1] == [after[dims[0]]]
        return replace(meaning, dim=dims[0] - len(after)) if alone else None
    if isinstance(meaning, _Number):
        return meaning
    return meaning if len(after) >= 2 and before[-2:] == after[-2:] else None


def _sliced(meanings: _Meanings, node: fx.Node) -> _Meaning:
    """Return the meaning of a slice: positions along the dimension that is cut begin later."""
    meaning = meanings.of(node.args[0])
    dim, start, step = (argument(node, at, default) for at, default in ((1, 0), (2, None), (4, 1)))
    if not isinstance(meaning, _Position) or not isinstance(dim, int):
        return _viewed(meanings, node)
    if (dim if dim < 0 else dim - tensor(node).dim()) != meaning.dim:
        return meaning
    first = 0 if start is None else start
    return replace(meaning, plus=meaning.plus + first) if type(first) is int and first >= 0 and step == 1 else None


def _put_before(meanings: _Meanings, node: fx.Node) -> _Meaning:
    """Return the meaning of positions with the one before the first of them put before them."""
    parts: Any = node.args[0]
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    one, other = [meanings.of(x) for x in parts] if len(parts) == 2 else (None, None)
    if not isinstance(one, _Position) or not isinstance(other, _Position):
        return None
    along = dim if dim < 0 else dim - tensor(node).dim()
    before = replace(other, plus=other.plus - 1)
    return one if along == other.dim and one == before and _size(parts[0], along) == 1 else None


def _indexed(meanings: _Meanings, node: fx.Node) -> _Meaning:
    """Return the meaning of elements at positions: of positions these again, of a number the number."""
    meaning, indices = meanings.of(node.args[0]), node.args[1]
    if isinstance(meaning, _Number):
        return meaning
    source = tensor(node.args[0])  # type: ignore[arg-type]
    if not isinstance(meaning, _Position) or len(indices) != source.dim() or None in indices:  # type: ignore[arg-type, operator]
        return None
    index = meanings.of(indices[meaning.dim])  # type: ignore[index, call-overload]
    if not isinstance(index, _Position) or index.plus < 0:
        return None
    return replace(index, plus=index.plus + meaning.plus)


def _counted(meanings: _Meanings, node: fx.Node) -> _Meaning:
    """Return the meaning of a running sum of zeros."""
    meaning = meanings.of(node.args[0])
    return meaning if meaning == _Number(0.0) else None


def _equality(equal: bool) -> _Rule:
    """Return the rule of a comparison of two numbers: booleans that are all true, or the number 0 for all false."""

    def rule(meanings: _Meanings, node: fx.Node) -> _Meaning:
        one, other = (meanings.of(x) for x in node.args[:2])
        if not isinstance(one, _Number) or not isinstance(other, _Number):
            return None
        return _Band(exact=True) if (one == other) == equal else _Number(0.0)

    return rule


def _expanded(meanings: _Meanings, node: fx.Node) -> _Meaning:
    """Return the meaning of an expansion, which leaves the dimensions of positions as they are."""
    meaning = meanings.of(node.args[0])
    if isinstance(meaning, _Position):
        return meaning if _size(node, meaning.dim) == _size(node.args[0], meaning.dim) else None
    if isinstance(meaning, _Number):
        return meaning
    whole = all(_size(node, dim) == _size(node.args[0], dim) for dim in (_KEYS, _QUERIES))
    return meaning if whole else None


def _sum(sign: int) -> _Rule:
    """Return the rule of a sum (sign 1) or a difference of two operands."""

    def rule(meanings: _Meanings, node: fx.Node) -> _Meaning:
        if node.kwargs or len(node.args) != 2:
            return None
        one, other = (meanings.of(x) for x in node.args)
        if isinstance(one, _Position | _Distance) and (number := _whole(other)) is not None:
            plus = one.plus + sign * number
            return replace(one, plus=plus) if _fits(node, plus) else None
        if sign == 1 and isinstance(other, _Position | _Distance) and (number := _whole(one)) is not None:
            plus = other.plus + number
            return replace(other, plus=plus) if _fits(node, plus) else None
        if (
            sign == 1
            and isinstance(one, _Added)
            and isinstance(other, _Added)
            and one.hidden == other.hidden == -math.inf
        ):
            return _Added(_both(one.band, other.band), -math.inf) if _same_sizes(node, one.band, other.band) else None
        if sign == -1 and isinstance(one, _Position) and isinstance(other, _Position) and one.dim == other.dim:
            sizes = {_size(x, one.dim) for x in (*node.args, node)}
            return _Number(one.plus - other.plus) if len(sizes) == 1 else None
        return _difference(one, other, node) if sign == -1 else None

    return rule


def _difference(one: _Meaning, other: _Meaning, node: fx.Node) -> _Distance | None:
    """Return the distance that the difference of two rows of positions is, whose operands an operator broadcasts; None of anything else."""
    if not isinstance(one, _Position) or not isinstance(other, _Position) or {one.dim, other.dim} != {_KEYS, _QUERIES}:
        return None
    for operand, meaning in zip(node.args[:2], (one, other), strict=True):
        if _size(operand, meaning.dim) != _size(node, meaning.dim):
            return None  # (a broadcast element would stand for all positions)
    return _Distance(1 if one.dim == _QUERIES else -1, one.plus - other.plus)


def _negative(meanings: _Meanings, node: fx.Node) -> _Meaning:
    meaning = meanings.of(node.args[0])
    return _Distance(-meaning.sign, -meaning.plus) if isinstance(meaning, _Distance) else None


def _magnitude(meanings: _Meanings, node: fx.Node) -> _Meaning:
    meaning = meanings.of(node.args[0])
    return _Magnitude() if isinstance(meaning, _Distance) and not meaning.plus else None


def _comparison(compare: Callable[[Any, Any], bool]) -> _Rule:
    """Return the rule of a comparison of two rows of positions, or of a distance with a number."""
    below = compare(0, 1)  # (it is true for less)
    bound = int(not compare(0, 0))  # (and for equal numbers, or from 1 on)

    def rule(meanings: _Meanings, node: fx.Node) -> _Meaning:
        one, other = (meanings.of(x) for x in node.args[:2])
        number = _whole(other)
        if isinstance(one, _Magnitude) and number is not None:
            band = _Band(-number + bound, number - bound, True)
            return band if below else _not(_Band(1 - number - bound, number + bound - 1, True))
        distance = _difference(one, other, node)
        if distance is None and isinstance(one, _Distance) and number is not None:
            distance = _Distance(one.sign, one.plus - number)
        if distance is None:
            return None
        # sign * (query - key) + plus <= -bound, or >= bound
        upper = below == (distance.sign == 1)
        limit = (-bound if below else bound) - distance.plus
        limit *= distance.sign
        return _Band(-math.inf, limit, True) if upper else _Band(limit, math.inf, True)

    return rule


def _joined(meanings: _Meanings, node: fx.Node) -> _Meaning:
    one, other = (meanings.of(x) for x in node.args[:2])
    if not isinstance(one, _Band) or not isinstance(other, _Band) or not _same_sizes(node, one, other):
        return None
    return _both(one, other)


def _either(meanings: _Meanings, node: fx.Node) -> _Meaning:
    one, other = (meanings.of(x) for x in node.args[:2])
    if not isinstance(one, _Band) or not isinstance(other, _Band) or not _same_sizes(node, one, other):
        return None
    return _not(_both(_not(one), _not(other)))


def _same_sizes(node: fx.Node, *bands: _Meaning) -> bool:
    """Return whether the first operands, which mean these, have the result's queries and keys where they say something of a distance."""
    for operand, band in zip(node.args, bands, strict=False):
        says = isinstance(band, _Band) and (band.low > -math.inf or band.high < math.inf)
        if says and any(_size(operand, dim) != _size(node, dim) for dim in (_KEYS, _QUERIES)):
            return False
    return True


def _negated(meanings: _Meanings, node: fx.Node) -> _Meaning:
    meaning = meanings.of(node.args[0])
    return _not(meaning) if isinstance(meaning, _Band) and tensor(node).dtype is torch.bool else None


def _filled(at: int) -> _Rule:
    """Return the rule for a tensor of one number, which is argument `at` (-1: the number is 1, -2: it is 0)."""

    def rule(meanings: _Meanings, node: fx.Node) -> _Meaning:
        number = node.args[at] if at >= 0 else float(at == -1)
        if not isinstance(number, bool | int | float):
            return None
        if tensor(node).dtype is torch.bool:
            return _Band(exact=True) if number else None
        return _Number(float(number))

    return rule


def _triangle(sign: int) -> _Rule:
    """Return the rule of `tril` (sign 1) and `triu`: of booleans, or of one number."""

    def rule(meanings: _Meanings, node: fx.Node) -> _Meaning:
        meaning, diagonal = meanings.of(node.args[0]), node.args[1] if len(node.args) > 1 else 0
        if not isinstance(diagonal, int) or tensor(node).dim() < 2:
            return None
        inside = _Band(-diagonal, math.inf, True) if sign == 1 else _Band(-math.inf, -diagonal, True)
        if isinstance(meaning, _Band):
            return _both(meaning, inside)
        return _Added(_not(inside), meaning.value) if isinstance(meaning, _Number) else None

    return rule


def _added(meanings: _Meanings, node: fx.Node) -> _Meaning:
    """Return what a mask adds: 0 where it shows, and where it hides a number so low that softmax gives 0."""
    meant = [meanings.of(x) for x in node.args]
    if tensor(node).dim() < 2 or not _same_sizes(node, *(m.band if isinstance(m, _Added) else m for m in meant)):
        return None
    mask, shown, hidden = meant if node.target is aten.where.self else (meant[1], meant[0], meant[2])
    if not isinstance(mask, _Band):
        return None
    if node.target is not aten.where.self:
        mask = _not(mask)
    elif isinstance(shown, _Number) and shown.value != 0:
        mask, shown, hidden = _not(mask), hidden, shown
    if not isinstance(hidden, _Number):
        return None
    if isinstance(shown, _Added) and shown.hidden == hidden.value:
        return _Added(_both(shown.band, mask), hidden.value)
    return _Added(mask, hidden.value) if shown == _Number(0.0) else None


_RULES: dict[Any, _Rule] = {
    **dict.fromkeys(COUNTS, _count),
    **dict.fromkeys((aten.alias.default, aten.clone.default, aten.detach.default), _same),
    **dict.fromkeys((aten._to_copy.default, prims.convert_element_type.default), _converted),
    **dict.fromkeys((aten.unsqueeze.default, aten.squeeze.dim, aten.view.default, aten._unsafe_view.default), _viewed),
    aten.reshape.default: _viewed,
    aten.slice.Tensor: _sliced,
    aten.cat.default: _put_before,
    aten.index.Tensor: _indexed,
    aten.cumsum.default: _counted,
    **dict.fromkeys((aten.eq.Tensor, aten.eq.Scalar), _equality(True)),
    **dict.fromkeys((aten.ne.Tensor, aten.ne.Scalar), _equality(False)),
    aten.expand.default: _expanded,
    aten.add.Tensor: _sum(1),
    aten.sub.Tensor: _sum(-1),
    aten.neg.default: _negative,
    aten.abs.default: _magnitude,
    **dict.fromkeys((aten.ones.default, aten.new_ones.default, aten.ones_like.default), _filled(-1)),
    **dict.fromkeys((aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default), _filled(-2)),
    **dict.fromkeys((aten.full.default, aten.full_like.default), _filled(1)),
    aten.new_full.default: _filled(2),
    aten.scalar_tensor.default: _filled(0),
    aten.tril.default: _triangle(1),
    aten.triu.default: _triangle(-1),
    **dict.fromkeys((aten.le.Tensor, aten.le.Scalar), _comparison(operator.le)),
    **dict.fromkeys((aten.lt.Tensor, aten.lt.Scalar), _comparison(operator.lt)),
    **dict.fromkeys((aten.ge.Tensor, aten.ge.Scalar), _comparison(operator.ge)),
    **dict.fromkeys((aten.gt.Tensor, aten.gt.Scalar), _comparison(operator.gt)),
    **dict.fromkeys((aten.bitwise_and.Tensor, aten.logical_and.default), _joined),
    **dict.fromkeys((aten.bitwise_or.Tensor, aten.logical_or.default), _either),
    **dict.fromkeys((aten.bitwise_not.default, aten.logical_not.default), _negated),
    **dict.fromkeys((aten.where.self, aten.masked_fill.Scalar, aten.masked_fill.Tensor), _added),
}
