"""Rows of several documents: attention by a mask that is made of the documents' numbers is computed document by
document, without the mask.

*Contract.* The pass looks at the CPU's attention operators with a mask. It takes the mask apart: it must say "of the
same document", by comparing two views of one [rows, length] (or [length]) tensor of whole numbers, and may say "not
behind", by position or by one such tensor; nothing else. transformers makes such masks of `position_ids` that start
again, models of their own make them of cumulated lengths. The numbers are read when the operator runs
(`zgraph.program.packed_attention`), which gives the same whatever they are. A mask that is made of constants is left to
`known_masks`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from zgraph.passes.contract import graph_pass
from zgraph.program.counting import COUNTS, start_and_step
from zgraph.program.cpu_attention import BACKWARD, FORWARD, TENSORS
from zgraph.program.node import Phase, info, tensor
from zgraph.program.packed_attention import PACKED, PACKED_BACKWARD
from zgraph.program.program import Fact, Program
from zgraph.torch_compat.symbols import expression

aten = torch.ops.aten

_TAKEN = {FORWARD: PACKED, BACKWARD: PACKED_BACKWARD}

_KEYS, _QUERIES, _ROWS = -1, -2, -4  # dimensions of a mask


@dataclass(frozen=True)
class _Places:
    """The positions along a dimension: 0, 1, 2, …"""

    dim: int  # the dimension, counted from behind


@dataclass(frozen=True)
class _Numbers:
    """A tensor of whole numbers, as a broadcast operand of a mask."""

    of: fx.Node  # the tensor, [rows, length] or [length]
    rows: int | None  # the dimension of the mask that its rows are, counted from behind; None without rows
    dim: int  # the dimension of the mask that its length is, counted from behind


@dataclass(frozen=True)
class _Shown:
    """A mask that is true where all conditions in `said` hold, or false there if it is `hidden`."""

    # ("same", tensor): key and query have one number; ("before", tensor or None): the key's number, or position, is not
    # greater than the query's
    said: frozenset[tuple[str, fx.Node | None]]
    rows: int | None = None  # the dimension of the batch, None if the mask is the same for all rows
    hidden: bool = False  # whether it is true where a condition does not hold


@dataclass(frozen=True)
class _Scalar:
    value: float  # the number that each element has


_Meaning = _Places | _Numbers | _Shown | _Scalar | None


@dataclass(frozen=True)
class PackedOptions:
    """Options of `packed_documents`."""

    # whether the operator takes each key's position for "not behind": ranks will have parts of the rows
    numbered: bool = False


@graph_pass(
    "packed_documents",
    "attention inside of packed documents is computed without a mask",
    options=PackedOptions,
    requires=(Fact.CLEAN,),
    bitwise=False,
)
def packed_documents(program: Program, options: PackedOptions) -> dict[str, int]:
    meanings, in_rows = _Meanings(), _InRows(program)
    count = 0
    for node in list(program.nodes):
        mask = node.kwargs.get("attn_mask")
        if node.target not in _TAKEN or not isinstance(mask, fx.Node) or _drops(node):
            continue
        meaning = meanings.of(mask)
        if not isinstance(meaning, _Shown) or meaning.hidden or not _fits(meaning, node, mask):
            continue
        same = [of for kind, of in meaning.said if kind == "same"]
        before = [of for kind, of in meaning.said if kind == "before"]
        if len(same) != 1 or len(before) > 1 or not _is_given(same[0]):
            continue
        with program.graph.inserting_before(node):
            documents, order = (in_rows.of(x, node) for x in (same[0], before[0] if before else None))
            if before and order is None and options.numbered:
                order = in_rows.places(documents, node)
            operands = node.args[: TENSORS[node.target]]
            args = (*operands, documents, order, bool(before), node.kwargs.get("scale"))
            attention = program.call(
                _TAKEN[node.target], args, info(node), name=_TAKEN[node.target].__name__.split(".")[0]
            )
        node.replace_all_uses_with(attention)
        program.graph.erase_node(node)
        count += 1
    if count:
        program.graph.eliminate_dead_code()
    return {"attentions": count}


def _drops(node: fx.Node) -> bool:
    """Return whether attention has dropout, or is causal besides its mask."""
    first = TENSORS[node.target]  # type: ignore[index]
    return any(node.args[first : first + 2])


def _fits(shown: _Shown, node: fx.Node, mask: fx.Node) -> bool:
    """Return whether the mask is for as many keys as queries, and has no rows or those of the batch."""
    at = 0 if node.target is FORWARD else 1
    queries, keys = (_size(node.args[i], _QUERIES) for i in (at, at + 1))
    if tensor(mask).dim() not in (2, 4) or not queries == keys == _size(mask, _KEYS) == _size(mask, _QUERIES):
        return False
    return shown.rows in (None, _ROWS)


def _size(node: Any, dim: int) -> Any:
    """Return a size as an expression, which can be compared without a guard."""
    return expression(tensor(node).shape[dim])


def _is_given(numbers: fx.Node | None) -> bool:
    """Return whether a value is computed from an input tensor."""
    stack, seen = [numbers], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor):
            return True
        seen.add(node)
        stack += node.all_input_nodes
    return False


class _InRows:
    """The numbers of documents and positions as tensors [rows or 1, length]."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._made: dict[fx.Node, fx.Node] = {}
        self._places: dict[int, fx.Node] = {}

    def of(self, numbers: fx.Node | None, beside: fx.Node) -> fx.Node | None:
        if numbers is None or tensor(numbers).dim() == 2:
            return numbers
        if numbers not in self._made:  # (the first attention that needs it is in the forward)
            record = info(beside).replace(phase=Phase.FORWARD)
            self._made[numbers] = self.program.call(
                aten.unsqueeze.default, (numbers, 0), record, name=f"{numbers.name}_row"
            )
        return self._made[numbers]

    def places(self, documents: fx.Node | None, beside: fx.Node) -> fx.Node:
        """Return 0, 1, 2, … as one row, with the length of a row of documents."""
        kind = tensor(documents)  # type: ignore[arg-type]
        length = kind.shape[-1]
        if length not in self._places:
            record = info(beside).replace(phase=Phase.FORWARD)
            how = {"start": 0, "step": 1, "dtype": torch.int64, "device": kind.device, "requires_grad": False}
            iota = self.program.call(torch.ops.prims.iota.default, (length,), record, name="places", kwargs=how)
            self._places[length] = self.program.call(aten.unsqueeze.default, (iota, 0), record, name="places_row")
        return self._places[length]


class _Meanings:
    """The meaning of each node that a mask of documents can be made of."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, _Meaning] = {}

    def of(self, node: Any) -> _Meaning:
        """Return the meaning of a node or a number, None if it has none of these."""
        if isinstance(node, bool | int | float):
            return _Scalar(node)
        if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
            return None
        if node not in self._known:
            self._known[node] = None  # (replaced below; a graph has no cycles)
            rule = _RULES.get(node.target)
            meaning = rule(self, node) if rule is not None else None
            self._known[node] = meaning if meaning is not None else _leaf(node)
        return self._known[node]


def _leaf(node: fx.Node) -> _Meaning:
    """Return a tensor of whole numbers with one or two dimensions as numbers in rows; None for any other."""
    kind = tensor(node)
    if kind.dtype.is_floating_point or kind.dtype.is_complex or kind.dtype is torch.bool or kind.dim() not in (1, 2):
        return None
    return _Numbers(node, -2 if kind.dim() == 2 else None, -1)


def _moved(meaning: _Meaning, to: Callable[[int], int | None]) -> _Meaning:
    """Return positions or numbers with their dimensions moved by `to`; None if one of them is gone."""
    if isinstance(meaning, _Places):
        dim = to(meaning.dim)
        return _Places(dim) if dim is not None else None
    if isinstance(meaning, _Numbers):
        dim, rows = to(meaning.dim), to(meaning.rows) if meaning.rows is not None else None
        return _Numbers(meaning.of, rows, dim) if dim is not None and (rows is None) == (meaning.rows is None) else None
    return None


def _arange(meanings: _Meanings, node: fx.Node) -> _Meaning:
    whole = not tensor(node).dtype.is_floating_point
    return _Places(-1) if whole and start_and_step(node) == (0, 1) else None


def _unsqueeze(meanings: _Meanings, node: fx.Node) -> _Meaning:
    meaning = meanings.of(node.args[0])
    at: int = node.args[1]  # type: ignore[assignment]
    new = at if at < 0 else at - tensor(node).dim()  # counted from behind
    to: Callable[[int], int] = lambda dim: dim if dim > new else dim - 1  # noqa: E731
    if isinstance(meaning, _Shown):
        rows = to(meaning.rows) if meaning.rows is not None else None
        return replace(meaning, rows=rows) if new < _QUERIES else None
    return meaning if isinstance(meaning, _Scalar) else _moved(meaning, to)


def _same_value(meanings: _Meanings, node: fx.Node) -> _Meaning:
    return meanings.of(node.args[0])


def _converted(meanings: _Meanings, node: fx.Node) -> _Meaning:
    before, after = tensor(node.args[0]).dtype, tensor(node).dtype  # type: ignore[arg-type]
    meaning = meanings.of(node.args[0])
    widened = not after.is_floating_point and after.itemsize >= before.itemsize
    return meaning if before is after or (isinstance(meaning, _Places | _Numbers) and widened) else None


def _expand(meanings: _Meanings, node: fx.Node) -> _Meaning:
    meaning = meanings.of(node.args[0])
    if isinstance(meaning, _Numbers) and meaning.of is node.args[0]:
        return None  # (its result, with equal rows, counts as numbers itself)
    return meaning


def _slice(meanings: _Meanings, node: fx.Node) -> _Meaning:
    before, after = ([expression(n) for n in tensor(x).shape] for x in (node.args[0], node))  # type: ignore[arg-type]
    return meanings.of(node.args[0]) if before == after else None


def _tril(meanings: _Meanings, node: fx.Node) -> _Meaning:
    meaning = meanings.of(node.args[0])
    if not isinstance(meaning, _Shown) or meaning.hidden or node.args[1:] not in ((), (0,)):
        return None
    return replace(meaning, said=meaning.said | {("before", None)})


def _plus_nothing(meanings: _Meanings, node: fx.Node) -> _Meaning:
    return meanings.of(node.args[0]) if node.args[1] == 0 and type(node.args[1]) is int else None


def _filled(at: int) -> Callable[[_Meanings, fx.Node], _Meaning]:
    """Return the rule for a tensor of one number, which is argument `at` (-1: the number is 1, -2: it is 0)."""

    def rule(meanings: _Meanings, node: fx.Node) -> _Meaning:
        number = node.args[at] if at >= 0 else float(at == -1)
        if tensor(node).dtype is torch.bool:
            return _Shown(frozenset()) if number else None
        return _Scalar(float(number)) if isinstance(number, bool | int | float) else None

    return rule


def _index(meanings: _Meanings, node: fx.Node) -> _Meaning:
    """Return the meaning of numbers[rows, positions]: the numbers themselves, with the dimensions of their indices."""
    source, indices = node.args[0], node.args[1]
    of = tensor(source)  # type: ignore[arg-type]
    index_meanings = [meanings.of(i) for i in indices]  # type: ignore[union-attr]
    if not isinstance(_leaf(source), _Numbers) or len(index_meanings) != of.dim():  # type: ignore[arg-type]
        return None
    dims = []
    for size, meaning, index in zip(of.shape, index_meanings, indices, strict=True):  # type: ignore[arg-type]
        if not isinstance(meaning, _Places) or _size(index, meaning.dim) != expression(size):
            return None
        dims.append(meaning.dim)
    return _Numbers(source, dims[0] if len(dims) == 2 else None, dims[-1])  # type: ignore[arg-type]


def _comparison(*, hidden: bool, keys: int | None = None) -> Callable[[_Meanings, fx.Node], _Meaning]:
    """Return the rule for a comparison of keys and queries: equal (`keys` None), or argument `keys` not greater than
    the other.
    """

    def rule(meanings: _Meanings, node: fx.Node) -> _Meaning:
        given = node.args[1::-1] if keys == 1 else node.args[:2]
        one, other = (meanings.of(x) for x in given)
        if not isinstance(one, _Places | _Numbers) or not isinstance(other, _Places | _Numbers):
            return None
        dims = (one.dim, other.dim)
        if dims != (_KEYS, _QUERIES) and not (keys is None and dims == (_QUERIES, _KEYS)):
            return None
        if any(_size(x, at) != _size(node, at) for x, at in zip(given, dims, strict=True)):
            return None  # (a broadcast element would stand for all positions)
        if isinstance(one, _Places) or isinstance(other, _Places):
            both = keys is not None and isinstance(one, _Places) and isinstance(other, _Places)
            return _Shown(frozenset([("before", None)]), None, hidden) if both else None
        rows = {None if _size(x.of, 0) == 1 else x.rows for x in (one, other)}
        if one.of is not other.of or len(rows) != 1:
            return None
        return _Shown(frozenset([("same" if keys is None else "before", one.of)]), rows.pop(), hidden)

    return rule


def _joined(*, hidden: bool) -> Callable[[_Meanings, fx.Node], _Meaning]:
    """Return the rule for two masks joined: what both show, or (`hidden`) what either hides."""

    def rule(meanings: _Meanings, node: fx.Node) -> _Meaning:
        one, other = (meanings.of(x) for x in node.args[:2])
        if not isinstance(one, _Shown) or not isinstance(other, _Shown) or tensor(node).dtype is not torch.bool:
            return None
        rows = {one.rows, other.rows} - {None}
        if one.hidden != hidden or other.hidden != hidden or len(rows) > 1:
            return None
        return _Shown(one.said | other.said, rows.pop() if rows else None, hidden)

    return rule


def _negated(meanings: _Meanings, node: fx.Node) -> _Meaning:
    meaning = meanings.of(node.args[0])
    return (
        replace(meaning, hidden=not meaning.hidden)
        if isinstance(meaning, _Shown) and tensor(node).dtype is torch.bool
        else None
    )


def _added(meanings: _Meanings, node: fx.Node) -> _Meaning:
    """Return the mask that an added tensor stands for: 0 where it shows, and where it hides a number so low that
    softmax gives 0.
    """
    if node.target is aten.where.self:
        mask, shown, hidden = (meanings.of(x) for x in node.args)
    else:
        hidden_by = meanings.of(node.args[1])
        mask = replace(hidden_by, hidden=not hidden_by.hidden) if isinstance(hidden_by, _Shown) else None
        shown, hidden = meanings.of(node.args[0]), meanings.of(node.args[2])
    if isinstance(mask, _Shown) and mask.hidden:
        mask, shown, hidden = replace(mask, hidden=False), hidden, shown
    if not isinstance(mask, _Shown) or shown != _Scalar(0.0) or not isinstance(hidden, _Scalar):
        return None
    return mask if hidden.value <= torch.finfo(tensor(node).dtype).min else None


_RULES: dict[Any, Callable[[_Meanings, fx.Node], _Meaning]] = {
    **dict.fromkeys(COUNTS, _arange),
    aten.unsqueeze.default: _unsqueeze,
    **dict.fromkeys((aten.alias.default, aten.clone.default, aten.detach.default), _same_value),
    **dict.fromkeys((aten._to_copy.default, torch.ops.prims.convert_element_type.default), _converted),
    aten.expand.default: _expand,
    aten.slice.Tensor: _slice,
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor), _plus_nothing),
    **dict.fromkeys((aten.ones.default, aten.new_ones.default, aten.ones_like.default), _filled(-1)),
    **dict.fromkeys((aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default), _filled(-2)),
    **dict.fromkeys((aten.full.default, aten.full_like.default), _filled(1)),
    aten.new_full.default: _filled(2),
    aten.scalar_tensor.default: _filled(0),
    aten.index.Tensor: _index,
    aten.tril.default: _tril,
    aten.eq.Tensor: _comparison(hidden=False),
    aten.ne.Tensor: _comparison(hidden=True),
    aten.le.Tensor: _comparison(hidden=False, keys=0),
    aten.ge.Tensor: _comparison(hidden=False, keys=1),
    aten.gt.Tensor: _comparison(hidden=True, keys=0),
    aten.lt.Tensor: _comparison(hidden=True, keys=1),
    **dict.fromkeys((aten.bitwise_and.Tensor, aten.logical_and.default), _joined(hidden=False)),
    **dict.fromkeys((aten.bitwise_or.Tensor, aten.logical_or.default), _joined(hidden=True)),
    **dict.fromkeys((aten.bitwise_not.default, aten.logical_not.default), _negated),
    **dict.fromkeys((aten.where.self, aten.masked_fill.Scalar, aten.masked_fill.Tensor), _added),
}
