"""Checks that the dimension which `train_step` cuts into micro-batches is the batch, by the axes of the captured
program (`zgraph.passes.analysis.axes`)."""

from __future__ import annotations

import dataclasses
import logging
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from zgraph.capture.call_signature import batch_size
from zgraph.errors import StepError
from zgraph.passes.analysis.axes import Axes
from zgraph.passes.spmd.sharding_rules import operands_of
from zgraph.program.counting import COUNTS
from zgraph.program.node import NodeInfo, Phase, info, set_info, value
from zgraph.program.program import InputRole, OutputRole, Program
from zgraph.program.sizes import is_symbolic, stand_in, static

logger = logging.getLogger(__name__)

aten = torch.ops.aten
_PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)
Call = tuple[tuple[Any, ...], dict[str, Any]]
_SOFTMAX = (aten._softmax.default, aten._safe_softmax.default)
_APART = {aten.select.int: (1, 0), aten.unbind.int: (1, 0), aten.split.Tensor: (2, 0)}
"""Operators that take a tensor apart: (position of the dimension among the arguments, its default)."""


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch, and what the program that is captured for it shows of the dimension that it was cut on."""

    program: Program  # the joint program
    call: Call  # the model's arguments
    flat: Sequence[Any]  # the call's flat inputs
    is_part: Callable[[torch.Tensor], bool]  # whether a tensor of the call is cut from the batch
    captured_at: Callable[[Call], tuple[Program, Sequence[Any]]]  # the program and the flat inputs of another call

    def of_several_rows(self) -> MicroBatch | None:
        """Return this one; for a single row, which shows nothing, one that has the row twice, captured for it. None if the model
        can't be captured for two rows, or there are none.
        """
        rows = batch_size(*self.call)
        return (self if rows > 1 else self.twice()) if rows else None

    def twice(self) -> MicroBatch | None:
        """Return the micro-batch that has each row twice, captured for it; None if the model can't be captured for that."""
        call = _twice(self.call, batch_size(*self.call), self.is_part)
        try:
            program, flat = self.captured_at(call)
        except Exception:  # (a model that takes one row at a time: what its rows are is not known)
            return None
        return dataclasses.replace(self, program=program, call=call, flat=flat)

    def refuse_no_batch(self) -> None:
        """Raise `StepError` if the program shows that what was cut from the batch is none."""
        size = batch_size(*self.call)
        assert size is not None
        refuse_other_dimensions(self.program, parts_of(self.call, self.flat, self.is_part), size)

    def rows_of_outputs(self) -> dict[int, int | None]:
        """Return the dimension of each of the model's flat outputs along which it has the batch's rows, by its number; None for
        one that has them along none. What is not known is left out.

        Where axes do not tell (an operator has no rule, or a tensor is made with the batch's size), the model is captured once more, for
        each row twice: the dimension that is longer then is the batch's.
        """
        nodes = {port.index: node for port, node in self.program.input_items() if port.role is InputRole.INPUT}
        parts = [nodes[at] for _, x, at in parts_of(self.call, self.flat, self.is_part) if at in nodes and x.dim()]
        axes, outputs = Axes(self.program), _outputs(self.program)
        batches = [axes.shape(node)[0] for node in parts if axes.shape(node)[0]]
        if not batches:
            return {}
        rows = value(parts[0]).shape[0]
        others = {
            axis
            for _, node in self.program.input_items()
            for shape in axes.shapes(node)
            for dim in shape
            for axis in dim
        }
        others.difference_update(*batches)
        found: dict[int, int | None] = {}
        for at, node in outputs.items():
            dims = [*zip(axes.shape(node), value(node).shape, strict=True)]
            of_rows = [d for d, (dim, _) in enumerate(dims) if any(dim[: len(b)] == b for b in batches)]
            if of_rows or all(others.issuperset(dim) for dim, n in dims if stand_in(n) % stand_in(rows) == 0):
                found[at] = of_rows[0] if of_rows else None
            elif any(axis in dim for dim, _ in dims for b in batches for axis in b):
                found[at] = _inside(at)
        for at in outputs.keys() - found.keys() if is_symbolic(rows) else ():
            mine = [d for d, n in enumerate(value(outputs[at]).shape) if _symbols(n) & _symbols(rows)]
            alone = [d for d in mine if static(value(outputs[at]).shape[d]) == static(rows)]
            found[at] = alone[0] if alone else _inside(at) if mine else None
        return found if len(found) == len(outputs) else {**self._longer(outputs.keys() - found.keys()), **found}

    def _longer(self, numbers: Iterable[int]) -> dict[int, int | None]:
        """Return the dimension of each of these flat outputs that is twice as long as the batch where that has each row twice."""
        doubled = self.twice()
        if doubled is None:
            return {}
        once = self.captured_at(self.call)[0] if self.program.sizes.symbols else self.program
        before, after = _outputs(once), _outputs(doubled.program)
        found: dict[int, int | None] = {}
        rows = batch_size(*self.call)
        for at in {*numbers} & before.keys() & after.keys():
            sizes = zip(value(before[at]).shape, value(after[at]).shape, strict=True)
            longer = {d: n for d, (n, more) in enumerate(sizes) if n != more}
            alone = [d for d, n in longer.items() if n == rows]
            found[at] = alone[0] if alone else _inside(at) if longer else None
        return found


def _inside(number: int) -> int | None:
    """Warn that an output has the batch's rows behind another dimension's, so that those of micro-batches do not follow each other;
    return that it has them along no dimension."""
    logger.warning(
        "output %d (counted flat) may have the batch's rows inside of another dimension (reshaped with another one before them): "
        "train_step returns that of the last micro-batch. Return it with a dimension for the rows, or with the rows first",
        number,
    )
    return None


def _symbols(size: Any) -> set[Any]:
    return getattr(static(size), "free_symbols", set())


def _outputs(program: Program) -> dict[int, fx.Node]:
    """Return the nodes of the model's own outputs that have dimensions, by their numbers among the flat outputs."""
    items = [(port.index, node) for port, node in program.output_items() if port.role is OutputRole.OUTPUT]
    return {at: n for at, n in items if at is not None and isinstance(value(n), torch.Tensor) and value(n).dim()}


def _twice(call: Call, rows: int | None, is_part: Callable[[torch.Tensor], bool]) -> Call:
    """Return a call of so many rows with each of its parts twice: a tensor that occurs in several places is one tensor again."""
    made: dict[int, torch.Tensor] = {}

    def twice(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != rows or not is_part(leaf):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = torch.cat([leaf.detach(), leaf.detach()]).requires_grad_(leaf.requires_grad)
        return made[id(leaf)]

    return pytree.tree_map(twice, call)  # type: ignore[no-any-return]


def refuse_other_dimensions(program: Program, inputs: Sequence[tuple[str, torch.Tensor, int]], size: int) -> None:
    """Raise `StepError` for an input that was cut on dimension 0 although the program does not use this dimension as the batch.

    `inputs` are the tensors of a micro-batch of `size` rows that are cut from the batch, in order: (the user's name, the tensor, its
    index among the flat inputs). One of other rows was given whole.
    """
    nodes = {port.index: node for port, node in program.input_items() if port.role is InputRole.INPUT}
    read = [(name, nodes[index]) for name, x, index in inputs if index in nodes and x.dim() and x.shape[0] == size]
    if len(read) == 0 or size < 2:
        return
    axes = Axes(program)
    forward = [n for n in program.graph.nodes if n.op == "call_function" and info(n).phase is Phase.FORWARD]
    name, first = read[0]
    why = _Order(program, axes, forward, set(axes.shapes(first)[0][0])).found()
    if len(_selected(first, axes, forward)) > 1:
        why = "takes its elements one after the other", None
    if why is not None:
        raise StepError(
            f"dimension 0 of {name} is no batch: forward {why[0]}",
            where=why[1],
            why="train_step cuts micro-batches on dimension 0; a sequence would be cut in time, and rows that belong together be parted",
            hint="give the batch first (batch_first=True), and what belongs together as one row or as several inputs; or micro_batches=1",
        )
    batch = set(axes.shapes(first)[0][0])
    for name, node in read[1:]:
        mine = set(axes.shapes(node)[0][0])
        if mine and batch and not mine & batch and _known(mine, batch, axes, forward):
            raise StepError(
                f"{name} has the size of the batch, and forward never reads it beside the batch's rows",
                where="micro_batches",
                why=f"train_step would cut it with the batch, whose size is that of dimension 0 of {read[0][0]}",
                hint="keep what is no part of the batch in a buffer, or give it with another shape ([1, n])",
            )


class LossOperators(TorchDispatchMode):
    """Records the operators that a loss function runs on which tensors: it is the user's own, and is not captured."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self._nodes: dict[int, fx.Node] = {}
        self._held: list[torch.Tensor] = []  # (keeps the tensors alive whose ids are keys of `_nodes`)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = lambda leaf: self._node(leaf) if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731
        node = self.graph.call_function(func, *pytree.tree_map(tensors, (tuple(args), dict(kwargs or {}))))
        self._note(node, result)
        for at, one in enumerate(result) if isinstance(result, (tuple, list)) else ():
            self._note(self.graph.call_function(operator.getitem, (node, at)), one)
        return result

    def _node(self, tensor: torch.Tensor) -> fx.Node:
        if id(tensor) not in self._nodes:
            self._note(self.graph.placeholder(f"given_{len(self._nodes)}"), tensor)
        return self._nodes[id(tensor)]

    def _note(self, node: fx.Node, value: Any) -> None:
        like = lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")  # noqa: E731
        node.meta["val"] = pytree.tree_map(lambda leaf: like(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)
        set_info(node, NodeInfo(Phase.FORWARD))
        if isinstance(value, torch.Tensor):
            self._nodes[id(value)] = node
            self._held.append(value)

    def refuse_other_dimensions(
        self, output: Any, others: Any, size: int, is_part: Callable[[torch.Tensor], bool]
    ) -> None:
        """Raise `StepError` for a tensor among the loss function's `others` that was cut on dimension 0 although it is no part of the batch:
        it is never read beside the rows of the `output`. What is no part by `is_part` was not cut."""
        cut = lambda x: (  # noqa: E731
            isinstance(x, torch.Tensor) and x.dim() and x.shape[0] == size and id(x) in self._nodes and is_part(x)
        )
        axes = Axes(None, self.graph.nodes)
        operators = [n for n in self.graph.nodes if n.op == "call_function"]
        rows = lambda x: set(axes.shapes(self._nodes[id(x)])[0][0])  # noqa: E731
        batch = set().union(*(rows(x) for x in pytree.tree_leaves(output) if cut(x)))
        for path, x in pytree.tree_leaves_with_path(others):
            apart = cut(x) and batch and rows(x) and not rows(x) & batch
            if apart and _known(rows(x), batch, axes, operators) and not _only_reduced(rows(x), axes, operators):
                raise StepError(
                    f"an argument of loss_fn (others{pytree.keystr(path)}) has the size of the batch, and is never read beside the output's rows",
                    where="micro_batches",
                    why="train_step would cut it with the batch",
                    hint="let loss_fn hold what is no part of the batch, or give it with another shape ([1, n])",
                )


_REDUCTIONS = (
    "sum",
    "mean",
    "any",
    "all",
    "max",
    "amax",
    "min",
    "amin",
    "prod",
    "std",
    "var",
    "norm",
    "linalg_vector_norm",
    "count_nonzero",
)


def _only_reduced(mine: set[int], axes: Axes, operators: Sequence[fx.Node]) -> bool:
    """Return whether these axes end only in reductions such as sums (a count of each row's targets, say)."""
    has = lambda n: any(mine & set(dim) for shape in axes.shapes(n) for dim in shape)  # noqa: E731
    ends = [n for n in operators if any(map(has, n.all_input_nodes)) and not has(n)]
    return all(getattr(getattr(n.target, "overloadpacket", None), "__name__", "") in _REDUCTIONS for n in ends)


class _Order:
    """Looks for operations of a forward along dimension 0 that make no sense for a batch: rows selected by position, or
    combined with their neighbours.

    Losses, which may compare all rows with all, do not count.
    """

    def __init__(self, program: Program, axes: Axes, forward: Sequence[fx.Node], batch: set[int]) -> None:
        self.axes, self.forward, self.batch = axes, forward, batch
        roles = (InputRole.PARAMETER, InputRole.BUFFER)
        self.own = {
            n for port, n in program.input_items() if port.role in roles
        }  # nodes computed from the model's own tensors alone
        self.counts: set[fx.Node] = set()  # nodes computed from 0, 1, 2, … along the batch alone
        for node in forward:
            operands = operands_of(node)
            if operands and self.own.issuperset(operands):
                self.own.add(node)
            if operands and self.counts.issuperset(operands):
                self.counts.add(node)
            if node.target in COUNTS and self._has(node, (0,)):
                self.counts.add(node)

    def found(self) -> tuple[str, str | None] | None:
        """Return (what the forward does, the user's line); None where it does nothing of the kind."""
        for node in self.forward if self.batch else ():
            what = self._what(node)
            if what is not None:
                return what, info(node).source or None
        return None

    def _what(self, node: fx.Node) -> str | None:
        packet = getattr(node.target, "overloadpacket", None)
        name, operands = getattr(packet, "__name__", ""), operands_of(node)
        if name.startswith("_scaled_dot_product") and any(self._has(o, (-2,)) for o in operands[:2]):
            return "attends over it"
        if (name == "convolution" and self._has(operands[0], range(1, 9))) or (
            ("pool" in name or "upsample" in name) and self._has(operands[0], range(2, 9))
        ):
            return "moves a window over it"
        if name in ("mm", "bmm") and self._has(operands[0], (-1,)) and self._weighs(operands[0]):
            return "attends over it"
        if name in ("slice", "split", "split_with_sizes") and self._takes_part(node, name):
            return "takes rows by their places"
        if name == "embedding" and operands[-1] in self.counts:
            return "gives its rows places (by an embedding)"
        return None

    def _has(self, node: fx.Node, dims: Iterable[int]) -> bool:
        """Return whether axes of the batch are among these dimensions of a value."""
        shape = self.axes.shapes(node)[0]
        return any(self.batch & set(shape[d]) for d in dims if -len(shape) <= d < len(shape))

    def _weighs(self, node: fx.Node) -> bool:
        """Return whether a value is a softmax over the batch, possibly after operators other than matrix products."""
        seen, stack = set(), [node]
        while stack:
            at = stack.pop()
            if at in seen or at.op != "call_function" or at.target in _PRODUCTS:
                continue
            seen.add(at)
            if at.target in _SOFTMAX and self._has(at, (int(at.args[1]),)):  # type: ignore[arg-type]
                return True
            stack += at.all_input_nodes
        return False

    def _takes_part(self, node: fx.Node, name: str) -> bool:
        """Return whether a slice takes a part of the batch, or takes rows of the model's own tensors along the batch's
        axis."""
        of = node.all_input_nodes[0]
        at, default = (1, 0) if name == "slice" else (2, 0)
        dim = node.args[at] if len(node.args) > at else default
        part = node.meta["val"] if name == "slice" else node.meta["val"][0]
        if not isinstance(dim, int) or static(part.shape[dim]) == static(of.meta["val"].shape[dim]):
            return False
        if of in self.own:
            return name == "slice" and bool(self.batch & set(self.axes.shape(node)[dim]))
        return set(self.axes.shapes(of)[0][dim]) == self.batch


def _selected(source: fx.Node, axes: Axes, forward: Sequence[fx.Node]) -> set[int]:
    """Return the positions along dimension 0 at which forward takes an input, or what it computes from it, apart."""
    batch = axes.shapes(source)[0][0]
    positions: set[int] = set()
    for node in forward:
        if node.target not in _APART or not isinstance(node.args[0], fx.Node):
            continue
        at, default = _APART[node.target]
        dim = node.args[at] if len(node.args) > at else default
        if not isinstance(dim, int) or axes.shape(node.args[0])[dim] != batch:
            continue
        if node.target is aten.select.int:
            positions.add(int(node.args[2]))  # type: ignore[call-overload, arg-type]
        elif node.target is not aten.split.Tensor or node.args[1] == 1:
            positions |= {0, 1}
    return positions


def _known(mine: set[int], batch: set[int], axes: Axes, operators: Sequence[fx.Node]) -> bool:
    """Return whether it is known for every operator what it does along these axes, and of the batch's where it leads them: an operator
    without a rule, such as pooling, has the batch's rows under other axes in its result."""
    for node in operators:
        if node in axes.rules or node.target is operator.getitem:
            continue
        read = {axis for n in node.all_input_nodes for shape in axes.shapes(n) for dim in shape for axis in dim}
        if mine & read or (batch & read and any(any(shape) for shape in axes.shapes(node))):
            return False
    return True


def parts_of(
    call: Any, flat: Sequence[Any], is_part: Callable[[torch.Tensor], bool]
) -> list[tuple[str, torch.Tensor, int]]:
    """Return (name, tensor, index among the program's flat inputs) for the tensors of a micro-batch's arguments that are cut from the
    batch, in order: what is no part by `is_part` was given whole, and may have as many rows by chance."""
    at = {id(x): i for i, x in enumerate(flat)}
    args, kwargs = call
    tensors = []
    for path, x in [*pytree.tree_leaves_with_path(list(args)), *pytree.tree_leaves_with_path(kwargs)]:
        if isinstance(x, torch.Tensor) and id(x) in at and is_part(x):
            tensors.append((f"input{pytree.keystr(path)}", x, at[id(x)]))
    return tensors
