"""Ranks that divide layers or sequences exchange activations in fewer bits (`plan.wire.activations`), and their gradients.

    a rank's part of a sum -> to_blocks, a part for each rank -> all_to_all of bytes -> wait -> mean_of_blocks -> * ranks
    and, where all ranks need the whole, -> to_blocks -> all_gather of bytes -> wait -> from_blocks
    a rank's part of a value -> to_blocks -> all_gather of bytes -> wait -> from_blocks -> the whole value
    rows of all heads -> to_blocks, a part for each rank -> all_to_all of bytes -> wait -> from_blocks -> heads of all rows
    keys -> to_blocks -> shift of bytes -> wait -> from_blocks -> the keys of the rank before
                                             `--> shift of bytes -> …, once around the ring

*Contract.* On entry ranks exchange values as they are. On exit these exchanges are in a format of
`zgraph.program.block_quantization`. Of ranks that divide layers they are those that Megatron-LM makes: sums of what
matrix products and embeddings give, and gathers of what products read. Of ranks that divide sequences they are those of
attention: turns from rows to heads and back (Ulysses), and what goes around a ring (keys, values, and their gradients).
A value is rounded where it is sent, to the nearest, and added up in float32; where all ranks need the sum, it is rounded
once more. Keys and values are rounded once, and go around as bytes; a gradient that goes around is a sum that grows, and
is rounded at each rank. All ranks go on with the same values: a rank takes its own part as it was sent, too, but in a
ring, where it computes with its own keys first. As they are stay masks and numbers of documents, maxima, sums of
statistics (of norms and losses), weights and their gradients, what would get no smaller, and a sum whose second half
would cost more latency than it saves.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import fx

from zgraph.passes.analysis.parameter_collectives import ParameterCollective
from zgraph.passes.analysis.slices import PRODUCTS
from zgraph.passes.compression.quantize_transfers import CompressOptions, QuantizedTransfer
from zgraph.passes.contract import graph_pass
from zgraph.passes.spmd.sharding_rules import ATTENTION
from zgraph.program import collectives
from zgraph.program.aliases import is_cast, is_view
from zgraph.program.attention_of_heads import OF_HEADS
from zgraph.program.node import Role, info
from zgraph.program.program import CONTEXT_DIM, TENSOR_DIM, Fact, InputRole, OutputRole, Program

aten = torch.ops.aten

_MAKERS = PRODUCTS | {aten.embedding.default}
_CHANGES: Collection[Any] = {aten.clone.default, aten.add.Tensor, aten.mul.Tensor, aten.where.self}
"""What may stand between a product, whose terms it leaves what they are, and the exchange of it."""
_ATTENTION = ATTENTION | set(OF_HEADS.values())
_VALUES = {"query", "key", "value", "grad_out", "grad_out_", "out", "output"}
"""Operands of attention, by name, that are activations or their gradients: no masks."""
_TURNS = {aten.cat.default, torch.ops.prims.rev.default}
"""What puts the pieces of a sequence in order, besides views."""
_SERVES = (Role.LAYOUT, Role.WAIT, Role.GATHER, Role.REDUCE, Role.ACCUMULATE)


@graph_pass(
    "compress_exchanges",
    "ranks that divide layers or sequences exchange activations and their gradients in fewer bits",
    options=CompressOptions,
    requires=(Fact.DIVIDED, Fact.REDUCED),
    conflicts=(Fact.BUCKETED,),
    bitwise=False,
)
def compress_exchanges(program: Program, options: CompressOptions) -> dict[str, int]:
    exchanges = [t for t in _exchanges(program) if _is_worth_it(program, t, options)]
    saved = sum(_saved(program, t, options) for t in exchanges)
    counts = dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "shift"), 0)
    arrived: dict[fx.Node, fx.Node] = {}  # the bytes that a value of the ring was made of
    for exchange in exchanges:
        kind = collectives.kind(exchange.start)
        counts[kind] += 1
        quantized = QuantizedTransfer(program, exchange, options)
        if kind == "shift":
            quantized.passed_on(arrived)
        else:
            {"all_gather": quantized.gathered, "all_to_all": quantized.turned}.get(kind, quantized.reduced)()
    return {**counts, "bytes_saved": saved}


def _exchanges(program: Program) -> Iterable[ParameterCollective]:
    """Yield the exchanges of activations, and of their gradients, in the order of their starts."""
    weights = set(program.input_nodes(InputRole.PARAMETER).values())
    gradients = {n for p, n in program.output_items() if p.role is OutputRole.GRADIENT}

    def of_layers(start: fx.Node, wait: fx.Node) -> bool:
        if start.target is collectives.ALL_GATHER:
            fits = _reaches(wait.users, _readers, _is_layout, lambda n: n.target in PRODUCTS)
            return fits and not _reaches(start.all_input_nodes, _operands, _serves, weights.__contains__)
        fits = collectives.reduce_op_of(start) == "sum"
        fits = fits and _reaches(start.all_input_nodes, _operands, _keeps_terms, lambda n: n.target in _MAKERS)
        return (
            fits
            and wait not in gradients
            and not _reaches(wait.users, _readers, _adds_or_serves, gradients.__contains__)
        )

    fits = {TENSOR_DIM: of_layers, CONTEXT_DIM: _is_of_attention}
    for start in program.nodes:
        wait = collectives.wait_of(start) if collectives.is_start(start) else None
        if wait is None or info(start).role is not Role.EXCHANGE:
            continue
        rule = fits.get(collectives.group_of(start))
        if rule is not None and rule(start, wait):
            yield ParameterCollective(start, wait)


def _is_of_attention(start: fx.Node, wait: fx.Node) -> bool:
    """Return whether an exchange between ranks that divide sequences is of what attention reads or gives."""
    if start.target is collectives.SHIFT:
        return True
    if start.target is not collectives.ALL_TO_ALL:
        return False

    def is_value(node: fx.Node) -> bool:
        return node is wait or _is_turned(node)

    came = _reaches([wait], _readers, is_value, lambda n: is_value(n) and _is_read_by_attention(n))
    return came or _reaches(start.all_input_nodes, _operands, _is_turned, _is_made_by_attention)


def _is_turned(node: fx.Node) -> bool:
    return _is_layout(node) or node.target in _TURNS


def _is_read_by_attention(node: fx.Node) -> bool:
    """Return whether attention, or a matrix product, reads a value that is no mask."""
    return any(user.target in PRODUCTS or _reads(user, node) for user in node.users)


def _reads(attention: fx.Node, operand: fx.Node) -> bool:
    if attention.target not in _ATTENTION:
        return False
    names = [a.name for a in attention.target._schema.arguments]  # type: ignore[union-attr]
    return any(arg is operand and name in _VALUES for name, arg in zip(names, attention.args, strict=False))


def _is_made_by_attention(node: fx.Node) -> bool:
    """Return whether a value is what attention gives (its first result), a gradient of what it has read, or a product."""
    if node.target is not operator.getitem:
        return node.target in PRODUCTS
    attention, at = node.args[:2]
    assert isinstance(attention, fx.Node)
    backward = attention.target in _ATTENTION and "grad" in attention.target._schema.arguments[0].name  # type: ignore[union-attr]
    return attention.target in _ATTENTION and at in ((0, 1, 2) if backward else (0,))


def _reaches(
    first: Iterable[fx.Node],
    next_nodes: Callable[[fx.Node], Iterable[fx.Node]],
    goes_on: Callable[[fx.Node], bool],
    wanted: Callable[[fx.Node], bool],
) -> bool:
    """Return whether one of the `first` nodes is wanted, or one that follows from them by `next_nodes`, through nodes of
    which `goes_on` is true.
    """
    seen: set[fx.Node] = set()
    stack = list(first)
    while stack:
        at = stack.pop()
        if at in seen or at.op == "output":
            continue
        seen.add(at)
        if wanted(at):
            return True
        if goes_on(at):
            stack += next_nodes(at)
    return False


def _operands(node: fx.Node) -> Iterable[fx.Node]:
    return node.all_input_nodes


def _readers(node: fx.Node) -> Iterable[fx.Node]:
    return node.users


def _is_layout(node: fx.Node) -> bool:
    return is_view(node) or is_cast(node) or node.target is aten.clone.default


def _keeps_terms(node: fx.Node) -> bool:
    return _is_layout(node) or node.target in _CHANGES


def _serves(node: fx.Node) -> bool:
    return node.op != "placeholder" and (_is_layout(node) or info(node).role in _SERVES)


def _adds_or_serves(node: fx.Node) -> bool:
    return node.target is aten.add.Tensor or _serves(node)


def _saved(program: Program, exchange: ParameterCollective, options: CompressOptions) -> int:
    whole = exchange.start.target in (collectives.ALL_GATHER, collectives.SHIFT)  # (else a part for each rank)
    ranks = program.mesh[collectives.group_of(exchange.start)]
    return options.saved_of(exchange.start.all_input_nodes[0], 1 if whole else ranks)


def _is_worth_it(program: Program, exchange: ParameterCollective, options: CompressOptions) -> bool:
    saved = _saved(program, exchange, options)
    if exchange.start.target is not collectives.ALL_REDUCE:
        return saved > 0
    link = options.costs.hardware.link(collectives.group_of(exchange.start))
    return 2 * saved / link.bandwidth > link.latency  # (each rank sends and receives nearly all of it twice)
