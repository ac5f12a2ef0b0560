"""Ranks of tensor parallelism exchange activations in fewer bits (`plan.wire.activations`), and gradients of these.

    a rank's part of a sum -> to_blocks, a part for each rank -> all_to_all of bytes -> wait -> mean_of_blocks -> * ranks
    and, where all ranks need the whole, -> to_blocks -> all_gather of bytes -> wait -> from_blocks
    a rank's part of a value -> to_blocks -> all_gather of bytes -> wait -> from_blocks -> the whole value

*Contract.* On entry ranks exchange values as they are. On exit those exchanges are in a format of
`zgraph.program.block_quantization` that Megatron-LM makes: sums of what matrix products and embeddings give, and gathers
of what products read. A value is rounded where it is sent, to the nearest, and added up in float32; where all ranks
need the sum, it is rounded once more. All ranks go on with the same values: a rank takes its own part as it was sent,
too. As they are stay maxima, sums of statistics (of norms and losses), weights and their gradients, what would get no
smaller, and a sum whose second half would cost more latency than it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import fx

from zgraph.passes.analysis.parameter_collectives import ParameterCollective
from zgraph.passes.analysis.slices import PRODUCTS
from zgraph.passes.compression.quantize_transfers import CompressOptions, QuantizedTransfer
from zgraph.passes.contract import graph_pass
from zgraph.program import collectives
from zgraph.program.aliases import is_cast, is_view
from zgraph.program.node import Role, info
from zgraph.program.program import Fact, InputRole, OutputRole, Program

aten = torch.ops.aten

_MAKERS = PRODUCTS | {aten.embedding.default}
_CHANGES: Collection[Any] = {aten.clone.default, aten.add.Tensor, aten.mul.Tensor, aten.where.self}
"""What may stand between a product, whose terms it leaves what they are, and the exchange of it."""
_SERVES = (Role.LAYOUT, Role.WAIT, Role.GATHER, Role.REDUCE, Role.ACCUMULATE)


@graph_pass(
    "compress_exchanges",
    "ranks of tensor parallelism exchange activations and their gradients in fewer bits",
    options=CompressOptions,
    requires=(Fact.DIVIDED, Fact.REDUCED),
    conflicts=(Fact.BUCKETED,),
    bitwise=False,
)
def compress_exchanges(program: Program, options: CompressOptions) -> dict[str, int]:
    exchanges = [t for t in _exchanges(program) if _is_worth_it(program, t, options)]
    saved = sum(_saved(program, t, options) for t in exchanges)
    counts = {"all_reduce": 0, "reduce_scatter": 0, "all_gather": 0}
    for exchange in exchanges:
        counts[collectives.kind(exchange.start)] += 1
        quantized = QuantizedTransfer(program, exchange, options)
        if exchange.start.target is collectives.ALL_GATHER:
            quantized.gathered()
        else:
            quantized.reduced()
    return {**counts, "bytes_saved": saved}


def _exchanges(program: Program) -> Iterable[ParameterCollective]:
    """Yield the exchanges of activations, and of their gradients, in the order of their starts."""
    weights = set(program.input_nodes(InputRole.PARAMETER).values())
    gradients = {n for p, n in program.output_items() if p.role is OutputRole.GRADIENT}
    for start in program.nodes:
        wait = collectives.wait_of(start) if collectives.is_start(start) else None
        if wait is None or info(start).role is not Role.EXCHANGE:
            continue
        if start.target is collectives.ALL_GATHER:
            fits = _reaches(wait.users, _readers, _is_layout, lambda n: n.target in PRODUCTS)
            fits = fits and not _reaches(start.all_input_nodes, _operands, _serves, weights.__contains__)
        else:
            fits = collectives.reduce_op_of(start) == "sum"
            fits = fits and _reaches(start.all_input_nodes, _operands, _keeps_terms, lambda n: n.target in _MAKERS)
            fits = fits and wait not in gradients
            fits = fits and not _reaches(wait.users, _readers, _adds_or_serves, gradients.__contains__)
        if fits:
            yield ParameterCollective(start, wait)


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
    gathers = exchange.start.target is collectives.ALL_GATHER
    ranks = program.mesh[collectives.group_of(exchange.start)]
    return options.saved_of(exchange.start.all_input_nodes[0], 1 if gathers else ranks)


def _is_worth_it(program: Program, exchange: ParameterCollective, options: CompressOptions) -> bool:
    dim, saved = collectives.group_of(exchange.start), _saved(program, exchange, options)
    if dim != options.over:
        return False
    if exchange.start.target is not collectives.ALL_REDUCE:
        return saved > 0
    link = options.costs.hardware.link(dim)
    return 2 * saved / link.bandwidth > link.latency  # (each rank sends and receives nearly all of it twice)
