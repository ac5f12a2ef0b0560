"""Which parameters the ranks of a mesh dimension divide among themselves, and along which axes.

An axis (see `zgraph.passes.analysis.axes`) can be divided if no operator needs it whole: the heads of an attention
block, the inner width of an MLP, the words of a vocabulary. Dividing it divides all parameters that have it, each along
the dimension that it is in. So a choice is made among axes, not among parameters; a table of module patterns names axes
by what a weight does with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from zgraph.passes.analysis.axes import Axes, Axis
from zgraph.passes.analysis.decompositions import EXPANSIONS
from zgraph.passes.spmd.divided_indexing import INDEXED
from zgraph.passes.spmd.sharding_rules import operands_of
from zgraph.program.node import Phase, info
from zgraph.program.program import Division, InputRole, ParamSpec, Program

aten = torch.ops.aten


@dataclass(frozen=True)
class Choice:
    """An axis that may be divided."""

    axis: Axis  # the axis
    size: int  # its number of positions
    divisions: Mapping[str, Division]  # how each parameter that has it is divided then

    def nbytes(self, params: Mapping[str, ParamSpec]) -> int:
        return sum(params[name].nbytes for name in self.divisions)


def choices(program: Program, dim: str, ranks: int) -> list[Choice]:
    """Return all axes of a captured program's parameters that `ranks` may divide, those of most bytes first."""
    axes = Axes(program)
    fixed = fixed_axes(program, axes)
    by_axis: dict[Axis, dict[str, Division]] = {}
    for name, node in program.input_nodes(InputRole.PARAMETER).items():
        shape = axes.shape(node) if node.users else ()
        for d, within in enumerate(shape):
            for at, axis in enumerate(within):
                many = sum(other.count(axis) for other in shape) > 1
                if axis in fixed or many or axes.size(axis) % ranks:
                    continue
                blocks = math.prod(axes.size(a) for a in within[:at])
                by_axis.setdefault(axis, {})[name] = Division(dim, ranks, d, blocks)
    all_choices = [Choice(axis, axes.size(axis), divisions) for axis, divisions in by_axis.items()]
    return sorted(all_choices, key=lambda c: -c.nbytes(program.params))


def fixed_axes(program: Program, axes: Axes) -> set[Axis]:
    """Return the axes that some operator needs whole."""
    fixed: set[Axis] = set()
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        rule = axes.rules.get(node)
        operands = operands_of(node)
        if rule is None:
            if not _picks(node):
                fixed.update(a for o in operands for s in axes.shapes(o) for dim in s for a in dim)
            continue
        if node.target in EXPANSIONS or node.target in INDEXED:
            continue
        for i, (operand, dims) in enumerate(zip(operands, rule.operands, strict=True)):
            if i in rule.unread:
                continue
            for labels, within in zip(dims, axes.shape(operand), strict=True):
                if not labels:
                    fixed.update(within)
        for label in rule.whole:
            fixed.update(axes.under(node, rule, label))
    return fixed


def _picks(node: fx.Node) -> bool:
    return not isinstance(node.target, torch._ops.OpOverload)


def divided(program: Program, divisions: Mapping[str, Division]) -> dict[str, ParamSpec]:
    """Return the layouts of a captured program's parameters with these divisions."""
    return {
        name: spec.divided(divisions[name], program.mesh) if name in divisions else spec
        for name, spec in program.params.items()
    }


def compatible(chosen: Iterable[Choice]) -> dict[str, Division]:
    """Return the divisions of several choices: each parameter's by the first choice that has it."""
    divisions: dict[str, Division] = {}
    for choice in chosen:
        for name, division in choice.divisions.items():
            divisions.setdefault(name, division)
    return divisions


# What the labels of operators that have weights mean for the weights.
_ROLES = {
    aten.mm.default: {"n": "out", "k": "in"},
    aten.addmm.default: {"n": "out", "k": "in"},
    aten.bmm.default: {"n": "out", "k": "in"},
    aten.convolution.default: {"o": "out", "c": "in"},
    aten.embedding.default: {"rows": "rows", "e": "out"},
    aten._grouped_mm.default: {"n": "out", "k": "in"},
}


def uses_of(program: Program, axes: Axes) -> dict[str, dict[int, set[str]]]:
    """Return what a parameter's dimensions are for, by parameter and dimension: "out", "in" (summed over), "rows"
    (looked up).

    A vocabulary's rows are "out" and "rows" where one matrix is both.
    """
    roles: dict[Axis, set[str]] = {}
    for node in program.graph.nodes:
        if node.op != "call_function" or info(node).phase is not Phase.FORWARD or node not in axes.rules:
            continue
        rule = axes.rules[node]
        known = _ROLES.get(node.target) or ({"n": "out", "k": "in"} if {"t", "e", "k", "n"} == set(rule.sizes) else {})
        for label, role in known.items():
            for axis in axes.under(node, rule, label) if label in rule.sizes else ():
                roles.setdefault(axis, set()).add(role)
    uses: dict[str, dict[int, set[str]]] = {}
    for name, node in program.input_nodes(InputRole.PARAMETER).items():
        for d, within in enumerate(axes.shape(node)):
            uses.setdefault(name, {})[d] = {r for a in within for r in roles.get(a, ())}
    return uses
