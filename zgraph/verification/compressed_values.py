"""Compare the errors of values that were sent quantized, on virtual ranks, with the bound that their format gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zgraph.program import collectives
from zgraph.program.block_quantization import FROM_BLOCKS, MEAN_OF_BLOCKS, SENDERS, is_drawn, most_wrong
from zgraph.program.node import info
from zgraph.program.program import Program
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
        self._groups: dict[str | None, str] = {}

    def __call__(
        self, program: Program, node: fx.Node, environments: Sequence[dict[fx.Node, Any]], results: Sequence[Any]
    ) -> None:
        if node.target in SENDERS:
            self._sent[info(node).transfer] = node, [env[node.all_input_nodes[0]] for env in environments]
        elif collectives.is_start(node):
            self._groups[info(node).transfer] = collectives.group_of(node)
        elif node.target in (FROM_BLOCKS, MEAN_OF_BLOCKS):
            for rank, result in enumerate(results):
                self._compare(program, node, rank, result)

    def _compare(self, program: Program, node: fx.Node, rank: int, value: Tensor) -> None:
        transfer, name = info(node).transfer, str(info(node).param)
        sender, operands = self._sent[transfer]
        group = group_ranks(program.mesh, self._groups[transfer], rank)
        format, block, parts = sender.args[-3:]
        sent = [operands[r].reshape(-1) for r in group]
        bounds = [most_wrong(x, format, block, parts, is_drawn(sender)).reshape(-1) for x in sent]  # type: ignore[arg-type]
        if node.target is MEAN_OF_BLOCKS:
            at = group.index(rank)
            exact = torch.stack([x.double().chunk(len(group))[at] for x in sent]).mean(0)
            bound = torch.stack([b.chunk(len(group))[at] for b in bounds]).mean(0)
        else:
            exact, bound = torch.cat(sent).double(), torch.cat(bounds)
        bound = bound + exact.abs() * torch.finfo(value.dtype).eps * len(group)  # (rounding of the sum)
        wrong = (value.reshape(-1).double() - exact).abs()
        share = float((wrong / bound).max()) if wrong.numel() else 0.0
        what = "sent gradient" if node.target is MEAN_OF_BLOCKS else "sent value"
        self.differences.append(Difference(what, name, rank, share, 1.0, exact=not bool(wrong.any())))
