"""Attention by a plan's sparsity: blocks of queries see blocks of keys, and what a layout leaves out is not computed.

*Contract.* The pass looks at torch's attention operators, of CPUs and of accelerators, whose module, or a module around it, a pattern of the plan
matches (the first that does counts), and on CPUs at attention that is written out there as products and a softmax (`written_attention`). Forward
and backward become one operator each (`zgraph.program.sparse_attention`), with the layout as an argument; the mask that the model has itself
holds besides. Dropout stays, with other random numbers: a seed is drawn where a mask was (`zgraph.program.attention_dropout`). The pass changes
what the model computes, as it is asked to; every other pass keeps that. Attention that it can't take is an error: on other sequences than its
own, written out in another form.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from zgraph.errors import PlanError
from zgraph.names import did_you_mean, matches
from zgraph.passes.canonicalize import written_attention
from zgraph.passes.contract import graph_pass
from zgraph.plan.attention import Dense, Sparsity, pattern_of
from zgraph.program import attention_calls
from zgraph.program.attention_calls import FORWARDS, AttentionCall
from zgraph.program.node import Phase, info, tensor
from zgraph.program.program import Fact, InputRole, OutputRole, Program
from zgraph.program.sparse_attention import SPARSE, SPARSE_BACKWARD, layout_text
from zgraph.torch_compat.symbols import expression

aten = torch.ops.aten

_SOFTMAX = ("aten._softmax.default", "aten._safe_softmax.default")
_DEVICES = ("cpu", "cuda", "meta")  # (a model on the meta device is captured for any)


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
    sparsities = dict(options.attention)
    layouts = {pattern: layout_text(sparsity) for pattern, sparsity in options.attention}
    count = _take_written(program, sparsities, layouts)
    _check_patterns(program, options)
    seeds: dict[fx.Node | None, fx.Node] = {}
    for node in reversed(program.nodes):
        call = attention_calls.read(node)
        forward = node if call is not None and call.is_forward else forward_of(node)
        pattern = pattern_of(layouts, program.modules_around(forward)) if forward is not None else None
        if call is None or pattern is None or isinstance(sparsities[pattern], Dense):
            continue
        _refuse(node, call, pattern)
        count += info(node).phase is Phase.FORWARD and call.is_forward
        if call.dropout and forward not in seeds:
            assert forward is not None
            with program.graph.inserting_before(forward):
                seeds[forward] = written_attention.drawn_seed(program, forward)
        dropout = (seeds[forward], call.dropout) if call.dropout else ()
        replace_by_sparse(program, node, call.attn_mask, layouts[pattern], dropout)
    return {"attentions": count}


def _take_written(program: Program, sparsities: Mapping[str, Sparsity], layouts: Mapping[str, str]) -> int:
    """Put the operator in the place of attention that is written out; return how often. Raises `PlanError` for a form that it does not have."""
    count = 0
    for weights, scores in list(written_attention.softmaxes(program)):
        pattern = pattern_of(layouts, program.modules_around(weights))
        if pattern is None or isinstance(sparsities[pattern], Dense):
            continue
        try:
            if tensor(weights).device.type != "cpu":
                raise written_attention.NotTakenError(f"it is on {tensor(weights).device.type}")
            if tensor(weights).dim() == 3 and sparsities[pattern].heads_differ:
                raise written_attention.NotTakenError("its heads are rows as well, and the layout has heads of its own")
            written_attention.write(program, written_attention.read(weights, scores), layouts[pattern])
        except written_attention.NotTakenError as error:
            raise _can_not_be_sparse(weights, pattern, error.why, error.hint) from None
        count += 1
    return count


def _can_not_be_sparse(node: fx.Node, pattern: str, why: str, hint: str) -> PlanError:
    return PlanError(
        "attention that is computed as a softmax over all keys can't be sparse",
        where=f"attention.{pattern} ({info(node).source})",
        why=why,
        hint=hint,
    )


def _check_patterns(program: Program, options: SparseOptions) -> None:
    """Raise `PlanError` for a pattern that matches no attention in a whole model's program, and for attention that it matches and that is
    still computed as a softmax. (A stage of a model may lack what others have.)"""
    whole = [weights for weights, _ in written_attention.softmaxes(program)]
    attentions = [n for n in program.graph.nodes if n.target in FORWARDS or n.target is SPARSE or n in whole]
    paths = dict.fromkeys(path for n in attentions for path in program.modules_around(n) or [""])
    of_model = dict.fromkeys(path for n in program.nodes for path in program.modules_around(n) or [""])
    staged = any(p.role in (InputRole.RECEIVED, OutputRole.SENT) for p in (*program.inputs, *program.outputs))
    for pattern, sparsity in options.attention:
        written = None if isinstance(sparsity, Dense) else _written_out(program, options, pattern)
        if written is not None:
            why = "it is written in a form that is not known"
            hint = "call torch.nn.functional.scaled_dot_product_attention (transformers: attn_implementation='sdpa')"
            raise _can_not_be_sparse(written, pattern, why, f"{hint}; or leave this module out of the pattern")
        if not staged and not matches(paths, [pattern]):
            raise _unmatched(pattern, [path for path in paths if path], [path for path in of_model if path])


def _unmatched(pattern: str, attentions: list[str], modules: list[str]) -> PlanError:
    what, where = f"attention has a pattern {pattern!r} that matches no attention", f"attention.{pattern}"
    if attentions:
        return PlanError(what, where=where, hint=f"the modules with attention: {', '.join(attentions[:4])}")
    if not matches(modules or [""], [pattern]):
        return PlanError(what, where=where, hint=did_you_mean(pattern, modules))
    why = "in what it matches nothing calls torch's scaled_dot_product_attention on a CPU or a CUDA device"
    return PlanError(what, where=where, why=why, hint="call it there; there are no kernels for other devices")


def _written_out(program: Program, options: SparseOptions, pattern: str) -> fx.Node | None:
    """Return a softmax of scores, queries by as many keys, in the modules for which a pattern counts. (For Inductor a softmax is captured as
    several operators, which say what they were.)"""
    patterns = dict(options.attention)
    for node in program.nodes:
        if str(node.meta.get("original_aten", node.target)) not in _SOFTMAX or info(node).phase is not Phase.FORWARD:
            continue
        shape = [expression(size) for size in tensor(node).shape]
        if len(shape) > 2 and shape[-1] == shape[-2] and pattern_of(patterns, program.modules_around(node)) == pattern:
            return node
    return None


def replace_by_sparse(
    program: Program, node: fx.Node, mask: object, layout: str, dropout: tuple[fx.Node, float] | tuple[()] = ()
) -> None:
    """Put the operator with a layout in the place of torch's, forward or backward, with this mask; a backward before its forward. `dropout` is
    a seed and a rate. Raises `PlanError` where more than its output, or the gradients, is read."""
    call = attention_calls.read(node)
    assert call is not None
    target = SPARSE if call.is_forward else SPARSE_BACKWARD
    with program.graph.inserting_before(node):
        args = (*call.operands, mask, call.is_causal, call.scale, layout, *dropout)
        attention = program.call(target, args, info(node), name=target.__name__.split(".")[0])
    results = attention.meta["val"]
    for reader in list(node.users):
        at: Any = reader.args[1]
        if not reader.users:
            program.graph.erase_node(reader)
        elif at >= len(results) or (
            call.is_forward and at and any(u.target is not SPARSE_BACKWARD for u in reader.users)
        ):
            what = f"attention of which more is read than its output ({reader.name}) can't be sparse"
            raise PlanError(what, where=f"attention ({info(node).source})", hint="leave this module out of the pattern")
        else:
            order = None if call.is_forward and at else _order_of(reader.meta["val"])
            reader.args, reader.meta["val"] = (attention, at), results[at]
            if order is not None and order != _order_of(results[at]):
                _reorder(program, reader, order)
    program.graph.erase_node(node)


def _order_of(value: Tensor) -> tuple[int, ...] | None:
    """Return the dimensions of a tensor without holes in the order of memory; None for one with holes."""
    shape, strides = ([expression(size) for size in sizes] for sizes in (value.shape, value.stride()))
    for order in itertools.permutations(range(value.dim())):
        expected: Any = 1
        for dim in reversed(order):
            if strides[dim] != expected:
                break
            expected = expected * shape[dim]
        else:
            return order
    return None


def _reorder(program: Program, node: fx.Node, order: tuple[int, ...]) -> None:
    """Let the readers of a node read it in another order of memory, which they were captured for."""
    readers = list(node.users)
    back = [order.index(dim) for dim in range(len(order))]
    with program.graph.inserting_before(node.next):
        moved = program.call(aten.permute.default, (node, list(order)), info(node), name=f"{node.name}_moved")
        whole = {"memory_format": torch.contiguous_format}
        dense = program.call(aten.clone.default, (moved,), info(node), name=f"{node.name}_dense", kwargs=whole)
        ordered = program.call(aten.permute.default, (dense, back), info(node), name=f"{node.name}_ordered")
    for reader in readers:
        reader.replace_input_with(node, ordered)


def forward_of(backward: fx.Node) -> fx.Node | None:
    """Return the attention that a backward operator belongs to, which made its `logsumexp`; None for another node."""
    call = attention_calls.read(backward)
    if call is None or call.is_forward:
        return None
    source = call.operands[-1]
    if isinstance(source, fx.Node) and source.target is operator.getitem:
        source = source.args[0]
    return source if isinstance(source, fx.Node) and source.target in FORWARDS else None


def _refuse(node: fx.Node, call: AttentionCall, pattern: str) -> None:
    for what, why, hint in _obstacles(node, call):
        raise PlanError(
            f"{what} can't be sparse", where=f"attention.{pattern} ({info(node).source})", why=why, hint=hint
        )


def _obstacles(node: fx.Node, call: AttentionCall) -> Iterator[tuple[str, str, str]]:
    leave = "leave this module out of the pattern"
    query, key, value = (tensor(operand) for operand in call.inputs)
    queries, keys = expression(query.shape[2]), expression(key.shape[2])
    if queries != keys:
        why = "layouts are squares: queries and keys are positions of one sequence"
        yield f"attention of {queries} queries with {keys} keys", why, leave
    if query.device.type not in _DEVICES:
        yield f"attention on {query.device.type}", "there are kernels for CPUs and CUDA devices alone", leave
    if query.device.type == "cuda" and (what := attention_calls.unserved(query, key, value)) is not None:
        yield what, "the kernels of CUDA devices do not serve it", leave
    if not call.is_forward and any(u.args[1] == 3 and u.users for u in node.users if u.target is operator.getitem):
        yield (
            "attention with a mask that has a gradient",
            "the kernels give none",
            "mask.detach(), if it is not learned",
        )
