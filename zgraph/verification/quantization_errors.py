"""Compare the errors of values that were sent quantized, on virtual ranks, with the bound that their format gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zgraph.program import collectives
from zgraph.program.block_quantization import FROM_BLOCKS, MEAN_OF_BLOCKS, SENDERS, is_drawn, most_wrong
from zgraph.program.node import info
from zgraph.program.program import InputRole, OutputRole, Program
from zgraph.program.tolerance import Difference
from zgraph.verification.virtual_ranks import group_ranks


class CompressedValues:
    """A watch of virtual ranks (`run_virtual`) that compares what each rank gets with what all have sent.

    A difference's `error` is the largest ratio of an element's error to its bound, `allowed` is 1.
    """

    def __init__(self) -> None:
        self.differences: list[Difference] = []
        self._sent: dict[
            str | None, tuple[fx.Node, list[Tensor]]
        ] = {}  # by transfer: the operator that quantizes, and its operand on each rank
        self._starts: dict[str | None, fx.Node] = {}  # by transfer: its collective
        # by name of a value between pipeline stages: (the operator that quantizes, its operand and its result on each rank)
        self._messages: dict[tuple[str, bool], list[tuple[fx.Node, list[Tensor], Sequence[Any]]]] = {}

    def __call__(
        self, program: Program, node: fx.Node, environments: Sequence[dict[fx.Node, Any]], results: Sequence[Any]
    ) -> None:
        message = _message_of(program, node)
        if message is not None and node.target in SENDERS:
            operands = [env[node.all_input_nodes[0]] for env in environments]
            self._messages.setdefault(message, []).append((node, operands, results))
        elif message is not None:
            for rank, result in enumerate(results):
                self._compare_message(message, rank, environments[rank][node.all_input_nodes[0]], result)
        elif node.target in SENDERS:
            self._sent[info(node).transfer] = node, [env[node.all_input_nodes[0]] for env in environments]
        elif collectives.is_start(node):
            self._starts[info(node).transfer] = node
            if node.target is collectives.SHIFT:
                self._pass_on(program, node)
        elif node.target in (FROM_BLOCKS, MEAN_OF_BLOCKS):
            for rank, result in enumerate(results):
                self._compare(program, node, rank, result)

    def _compare_message(self, message: tuple[str, bool], rank: int, came: Tensor, value: Tensor) -> None:
        """Compare what a stage gets for a micro-batch with what another has sent: the one with the same bytes."""
        name, back = message
        what = "sent gradient" if back else "sent value"
        for sender, operands, results in self._messages.get(message, ()):
            if torch.equal(results[rank], came):
                format, block, parts = sender.args[-3:]
                exact = operands[rank]
                bound = most_wrong(exact, format, block, parts).to(torch.float64)  # type: ignore[arg-type]
                wrong = (value.double() - exact.double()).abs()
                bound = bound + exact.double().abs() * torch.finfo(value.dtype).eps
                share = float((wrong / bound).max()) if wrong.numel() else 0.0
                self.differences.append(Difference(what, name, rank, share, 1.0, exact=not bool(wrong.any())))
                return
        self.differences.append(Difference(what, f"{name} (not the bytes that were sent)", rank, math.inf, 1.0, False))

    def _pass_on(self, program: Program, start: fx.Node) -> None:
        """Note, of a shift of bytes that came by a shift before, what they were made of: a value of an earlier rank."""
        operand = start.all_input_nodes[0]
        if not collectives.is_wait(operand) or info(operand).transfer not in self._sent:
            return
        sender, operands = self._sent[info(operand).transfer]
        dim = collectives.group_of(start)
        groups = [group_ranks(program.mesh, dim, rank) for rank in range(len(operands))]
        self._sent[info(start).transfer] = (
            sender,
            [operands[g[g.index(rank) - collectives.distance_of(start)]] for rank, g in enumerate(groups)],
        )

    def _compare(self, program: Program, node: fx.Node, rank: int, value: Tensor) -> None:
        transfer = info(node).transfer
        name = str(info(node).param or transfer)
        sender, operands = self._sent[transfer]
        start = self._starts[transfer]
        group = group_ranks(program.mesh, collectives.group_of(start), rank)
        at = group.index(rank)
        format, block, parts = sender.args[-3:]
        sent = [operands[r].reshape(-1) for r in group]
        bounds = [most_wrong(x, format, block, parts, is_drawn(sender)).reshape(-1) for x in sent]  # type: ignore[arg-type]
        if node.target is MEAN_OF_BLOCKS:
            exact = torch.stack([x.double().chunk(len(group))[at] for x in sent]).mean(0)
            bound = torch.stack([b.chunk(len(group))[at] for b in bounds]).mean(0)
        elif start.target is collectives.ALL_TO_ALL:
            exact, bound = (torch.cat([x.chunk(len(group))[at] for x in row]).double() for row in (sent, bounds))
        elif start.target is collectives.SHIFT:
            source = at - collectives.distance_of(start)
            exact, bound = sent[source].double(), bounds[source]
        else:
            exact, bound = torch.cat(sent).double(), torch.cat(bounds)
        bound = bound + exact.abs() * torch.finfo(value.dtype).eps * len(group)  # (rounding of the sum)
        wrong = (value.reshape(-1).double() - exact).abs()
        share = float((wrong / bound).max()) if wrong.numel() else 0.0
        what = "sent gradient" if node.target is MEAN_OF_BLOCKS and info(node).param is not None else "sent value"
        self.differences.append(Difference(what, name, rank, share, 1.0, exact=not bool(wrong.any())))


def _message_of(program: Program, node: fx.Node) -> tuple[str, bool] | None:
    """Return (the name, whether it goes to an earlier stage) of the value between pipeline stages that a node quantizes
    for sending, or dequantizes; None for any other node.
    """
    if node.target is FROM_BLOCKS:
        at = node.all_input_nodes[0]
        ports = (port for port, came in program.input_items() if came is at and port.few_bits)
    elif node.target in SENDERS:
        ports = (port for port, sent in program.output_items() if sent is node and port.few_bits)
    else:
        return None
    return next(((port.name, port.role in (InputRole.RETURNED, OutputRole.RETURNED)) for port in ports), None)
