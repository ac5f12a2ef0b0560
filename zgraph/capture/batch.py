"""Whether what `train_step` cuts into micro-batches is the batch, by the axes of the captured program (see `zgraph.passes.analysis.axes`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from zgraph.errors import StepError
from zgraph.passes.analysis.axes import Axes
from zgraph.program.node import Phase, info
from zgraph.program.program import InputRole, Program

aten = torch.ops.aten
_APART = {aten.select.int: (1, 0), aten.unbind.int: (1, 0), aten.split.Tensor: (2, 0)}
"""What takes a tensor apart, with the place of the dimension among its arguments and its default."""


def refuse_other_dimensions(program: Program, inputs: Sequence[tuple[str, torch.Tensor, int]], size: int) -> None:
    """Raises `StepError` for what was cut on dimension 0 as the batch is, and can't be the batch by what the program does with it. `inputs`
    are the tensors of a micro-batch of `size` rows, the first one first: what the user calls each, and its index among the flat inputs."""
    nodes = {port.index: node for port, node in program.input_items() if port.role is InputRole.INPUT}
    read = [(name, nodes[index]) for name, x, index in inputs if index in nodes and x.dim() and x.shape[0] == size]
    if len(read) == 0 or size < 2:
        return
    axes = Axes(program)
    forward = [n for n in program.graph.nodes if n.op == "call_function" and info(n).phase is Phase.FORWARD]
    name, first = read[0]
    if len(_selected(first, axes, forward)) > 1:
        raise StepError(
            f"dimension 0 of {name} is no batch: forward takes its elements one after the other",
            where="micro_batches",
            why="train_step cuts micro-batches on dimension 0; a sequence would be cut in time",
            hint="give the batch first (batch_first=True), or micro_batches=1",
        )
    batch = set(axes.shapes(first)[0][0])
    for name, node in read[1:]:
        mine = set(axes.shapes(node)[0][0])
        if mine and batch and not mine & batch and _known(mine, axes, forward):
            raise StepError(
                f"{name} has the size of the batch, and forward never reads it beside the batch's rows",
                where="micro_batches",
                why=f"train_step would cut it with the batch, whose size is that of dimension 0 of {read[0][0]}",
                hint="keep what is no part of the batch in a buffer, or give it with another shape ([1, n])",
            )


def _selected(source: fx.Node, axes: Axes, forward: Sequence[fx.Node]) -> set[int]:
    """The positions along dimension 0 of an input at which forward takes it, or what it makes of it, apart."""
    batch = axes.shapes(source)[0][0]
    found: set[int] = set()
    for node in forward:
        if node.target not in _APART or not isinstance(node.args[0], fx.Node):
            continue
        at, default = _APART[node.target]
        dim = node.args[at] if len(node.args) > at else default
        if not isinstance(dim, int) or axes.shape(node.args[0])[dim] != batch:
            continue
        if node.target is aten.select.int:
            found.add(int(node.args[2]))  # type: ignore[call-overload, arg-type]
        elif node.target is not aten.split.Tensor or node.args[1] == 1:
            found |= {0, 1}
    return found


def _known(mine: set[int], axes: Axes, forward: Sequence[fx.Node]) -> bool:
    """Does the program tell of every operator what it does along these axes?"""
    for node in forward:
        reads = any(mine & set(dim) for n in node.all_input_nodes for shape in axes.shapes(n) for dim in shape)
        if reads and node not in axes.rules:
            return False
    return True


def tensors_of(call: Any, flat: Sequence[Any]) -> list[tuple[str, torch.Tensor, int]]:
    """The tensors of a call's arguments, in their order, with their indices among the flat inputs of its program."""
    at = {id(x): i for i, x in enumerate(flat)}
    args, kwargs = call
    found = []
    for path, x in [*pytree.tree_leaves_with_path(list(args)), *pytree.tree_leaves_with_path(kwargs)]:
        if isinstance(x, torch.Tensor) and id(x) in at:
            found.append((f"input{pytree.keystr(path)}", x, at[id(x)]))
    return found
