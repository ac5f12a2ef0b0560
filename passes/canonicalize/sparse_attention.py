"""Attention by a plan's sparsity: blocks of queries see blocks of keys, and what a layout leaves out is not computed.

*Contract.* The pass looks at the CPU's attention operators whose module, or a module around it, a pattern of the plan matches (the first that
does counts). Forward and backward become one operator each (`zgraph.program.sparse_attention`), with the layout as an argument; the mask that
the model has itself holds besides. It changes what the model computes, as it is asked to; every other pass keeps that. Attention that it
can't take is an error: with dropout, on other sequences than its own, written out as products and a softmax.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from zgraph.errors import PlanError
from zgraph.names import did_you_mean, matches
from zgraph.passes.contract import graph_pass
from zgraph.plan.attention import Dense, Sparsity, pattern_of
from zgraph.program.cpu_attention import BACKWARD, FORWARD, TENSORS
from zgraph.program.node import Phase, info, tensor
from zgraph.program.program import Fact, InputRole, OutputRole, Program
from zgraph.program.sparse_attention import SPARSE, SPARSE_BACKWARD, layout_text
from zgraph.torch_compat.symbols import expression

_SOFTMAX = ("aten._softmax.default", "aten._safe_softmax.default")
_SPARSE = {FORWARD: SPARSE, BACKWARD: SPARSE_BACKWARD}


@dataclass(frozen=True)
class SparseOptions:
    """Options of `sparse_attention`."""

    attention: tuple[tuple[str, Sparsity], ...] = ()  # patterns of module paths, each with a sparsity


@graph_pass(
    "sparse_attention",
    "attention computes only the blocks of a layout",
    options=SparseOptions,
    requires=(Fact.CLEAN,),
    bitwise=False,
)
def sparse_attention(program: Program, options: SparseOptions) -> dict[str, int]:
    _check_patterns(program, options)
    sparsities = dict(options.attention)
    layouts = {pattern: layout_text(sparsity) for pattern, sparsity in options.attention}
    count = 0
    for node in list(program.nodes):
        if node.target not in _SPARSE:
            continue
        forward = node if node.target is FORWARD else _forward_of(node)
        pattern = pattern_of(layouts, program.modules_around(forward)) if forward is not None else None
        if pattern is None or isinstance(sparsities[pattern], Dense):
            continue
        _refuse(node, pattern)
        tensors = TENSORS[node.target]
        is_causal = len(node.args) > tensors + 1 and bool(node.args[tensors + 1])
        options_ = (node.kwargs.get("attn_mask"), is_causal, node.kwargs.get("scale"), layouts[pattern])
        target = _SPARSE[node.target]
        with program.graph.inserting_before(node):
            attention = program.call(
                target, (*node.args[:tensors], *options_), info(node), name=target.__name__.split(".")[0]
            )
        node.replace_all_uses_with(attention)
        program.graph.erase_node(node)
        count += info(attention).phase is Phase.FORWARD
    return {"attentions": count}


def _check_patterns(program: Program, options: SparseOptions) -> None:
    """Raise `PlanError` for a pattern that matches no attention in a whole model's program, and for attention that it matches and that is
    computed as a softmax. (A stage of a model may lack what others have.)"""
    attentions = [n for n in program.graph.nodes if n.target in (FORWARD, SPARSE)]
    paths = dict.fromkeys(path for n in attentions for path in program.modules_around(n) or [""])
    of_model = dict.fromkeys(path for n in program.nodes for path in program.modules_around(n) or [""])
    staged = any(p.role in (InputRole.RECEIVED, OutputRole.SENT) for p in (*program.inputs, *program.outputs))
    for pattern, _ in options.attention:
        if matches(of_model, [pattern]) and (written := _written_out(program, pattern)) is not None:
            raise PlanError(
                "attention that is computed as a softmax over all keys can't be sparse",
                where=f"attention.{pattern} ({info(written).source})",
                why="the model has it written out, or torch computes its own so: with dropout, with a mask that has a gradient, "
                "or for tensors that are not [rows, heads, length, width]",
                hint="call torch.nn.functional.scaled_dot_product_attention (transformers: attn_implementation='sdpa') without these; "
                "or leave this module out of the pattern",
            )
        if not staged and not matches(paths, [pattern]):
            raise _unmatched(pattern, [path for path in paths if path], [path for path in of_model if path])


def _unmatched(pattern: str, attentions: list[str], modules: list[str]) -> PlanError:
    what, where = f"attention has a pattern {pattern!r} that matches no attention", f"attention.{pattern}"
    if attentions:
        return PlanError(what, where=where, hint=f"the modules with attention: {', '.join(attentions[:4])}")
    if not matches(modules or [""], [pattern]):
        return PlanError(what, where=where, hint=did_you_mean(pattern, modules))
    why = "in what it matches nothing calls torch's scaled_dot_product_attention on a CPU"
    return PlanError(what, where=where, why=why, hint="call it there; there is no kernel for other devices yet")


def _written_out(program: Program, pattern: str) -> fx.Node | None:
    """Return a softmax of scores, queries by as many keys, in the modules that a pattern matches. (For Inductor a softmax is captured as
    several operators, which say what they were.)"""
    for node in program.nodes:
        if str(node.meta.get("original_aten", node.target)) not in _SOFTMAX or info(node).phase is not Phase.FORWARD:
            continue
        shape = [expression(size) for size in tensor(node).shape]
        if len(shape) > 2 and shape[-1] == shape[-2] and matches(program.modules_around(node) or [""], [pattern]):
            return node
    return None


def _forward_of(backward: fx.Node) -> fx.Node | None:
    """Return the attention that a backward operator belongs to, which made its `logsumexp`."""
    source = backward.args[5]
    if isinstance(source, fx.Node) and source.target is operator.getitem:
        source = source.args[0]
    return source if isinstance(source, fx.Node) and source.target in (FORWARD, SPARSE) else None


def _refuse(node: fx.Node, pattern: str) -> None:
    for what, why, hint in _obstacles(node):
        raise PlanError(
            f"{what} can't be sparse", where=f"attention.{pattern} ({info(node).source})", why=why, hint=hint
        )


def _obstacles(node: fx.Node) -> Iterator[tuple[str, str, str]]:
    tensors = TENSORS[node.target]  # type: ignore[index]
    first = 0 if node.target is FORWARD else 1
    queries, keys = (expression(tensor(node.args[at]).shape[2]) for at in (first, first + 1))  # type: ignore[arg-type]
    if len(node.args) > tensors and node.args[tensors]:
        yield "attention with dropout", "its random numbers are drawn for all keys", "set the dropout of attention to 0"
    if queries != keys:
        yield (
            f"attention of {queries} queries with {keys} keys",
            "layouts are squares: queries and keys are positions of one sequence",
            "leave this module out of the pattern",
        )
