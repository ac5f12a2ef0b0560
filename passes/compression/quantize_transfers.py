"""Replaces a transfer's start and wait by those of bytes of `zgraph.program.block_quantization`, for the passes that
compress collectives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zgraph.errors import PlanError
from zgraph.names import matches
from zgraph.passes.analysis.costs import CPU, Costs
from zgraph.passes.analysis.parameter_collectives import ParameterCollective
from zgraph.passes.zero.gathers import identifier_of
from zgraph.program import collectives
from zgraph.program.block_quantization import (
    FROM_BLOCKS,
    MEAN_OF_BLOCKS,
    TO_BLOCKS,
    TO_BLOCKS_DRAWN,
    TO_BLOCKS_FED,
    bytes_of,
)
from zgraph.program.node import NodeInfo, Phase, Role, info, set_info, tensor
from zgraph.program.program import InputRole, Port, Program
from zgraph.program.sizes import part_of, static, typical

aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default


@dataclass(frozen=True)
class Correction:
    """How a gradient makes up for the few bits that it is sent in."""

    drawn: bool = False  # whether elements are rounded stochastically
    feedback: bool = False  # whether the rounding error is added to the next gradient


@dataclass(frozen=True)
class CompressOptions:
    """Options of the passes that compress."""

    format: str  # the format that is sent
    block: int = 256  # elements in a block
    exact: tuple[str, ...] = ()  # patterns of parameters that are sent as they are
    costs: Costs = field(default_factory=lambda: Costs(CPU))  # has the latency and bandwidth of the links
    over: str | None = None  # of gradients: the mesh dimension over which they are sent in few bits, None for any
    correction: Correction = Correction()  # of gradients: what makes up for few bits

    def saved(self, transfer: ParameterCollective, parts: int) -> int:
        """Return the bytes of a transfer that need not be sent in this format; 0 for an exact parameter, or a tensor of
        no floating point.
        """
        return 0 if matches([transfer.name], self.exact) else self.saved_of(transfer.start.all_input_nodes[0], parts)

    def saved_of(self, operand: fx.Node, parts: int) -> int:
        """Return the bytes of a value that need not be sent in this format, in so many parts; 0 for a tensor of no
        floating point.
        """
        val = tensor(operand)
        if not val.dtype.is_floating_point:
            return 0
        count = typical(val.numel())
        return max(0, count * val.element_size() - parts * bytes_of(-(-count // parts), self.format, self.block))


class QuantizedTransfer:
    """A transfer whose start and wait are replaced by those of bytes."""

    def __init__(self, program: Program, transfer: ParameterCollective, options: CompressOptions) -> None:
        self.program, self.start, self.wait, self.after = program, transfer.start, transfer.wait, transfer.after
        self.dim = collectives.group_of(self.start)
        self.ranks = program.mesh[self.dim]
        self.options = options
        self.told = (options.format, options.block)
        self.over, self.waits = info(self.start), info(self.wait)
        self.sums = collectives.reduce_op_of(self.start) == "sum"
        # (a value that ranks compute together may be saved or offloaded as any other)
        layout: dict[str, Any] = {"role": Role.LAYOUT, "stream": None}
        if self.over.role is Role.EXCHANGE:
            layout = {"role": Role.COMPUTE, "stream": "compute"}
        self.layout = self.over.replace(mesh_dim=None, **layout)
        self.operand, self.like = self.start.all_input_nodes[0], tensor(self.wait)

    def gathered(self) -> None:
        with self.program.graph.inserting_before(self.start):
            sent = self._layout(TO_BLOCKS, (self.operand, *self.told, 1), "sent")
            start = self._collective(collectives.ALL_GATHER, (sent, self.ranks, self.dim), "bytes")
        with self.program.graph.inserting_before(self.wait):
            self._replace(start, self._back(FROM_BLOCKS, start, list(self.like.shape)))

    def reduced(self) -> None:
        whole = self.start.target is collectives.ALL_REDUCE
        with self.program.graph.inserting_before(self.start):
            operand = self._in_parts() if whole else self.operand
            sent = self._sent(operand, self.ranks, "sent", self.dim)
            sizes = [bytes_of(part_of(tensor(operand).numel(), self.ranks), *self.told)] * self.ranks
            start = self._collective(collectives.ALL_TO_ALL, (sent, sizes, sizes, self.dim), "bytes")
        with self.program.graph.inserting_before(self.wait):
            part = [part_of(tensor(operand).shape[0], self.ranks)] if whole else list(self.like.shape)
            mean = self._sum(start, part, whole) if self.sums else self._back(MEAN_OF_BLOCKS, start, part)
            self._replace(start, self._whole(mean) if whole else mean)

    def turned(self) -> None:
        """Send each rank its part of the operand, which an all-to-all exchanges."""
        with self.program.graph.inserting_before(self.start):
            sent = self._layout(TO_BLOCKS, (self.operand, *self.told, self.ranks), "sent")
            sizes = [bytes_of(part_of(tensor(self.operand).numel(), self.ranks), *self.told)] * self.ranks
            start = self._collective(collectives.ALL_TO_ALL, (sent, sizes, sizes, self.dim), "bytes")
        with self.program.graph.inserting_before(self.wait):
            self._replace(start, self._back(FROM_BLOCKS, start, list(self.like.shape)))

    def passed_on(self, arrived: dict[fx.Node, fx.Node]) -> None:
        """Send the operand to another rank. What was made of bytes that have `arrived` goes on as these bytes; add
        the value that comes to them."""
        with self.program.graph.inserting_before(self.start):
            sent = arrived.get(self.operand) or self._layout(TO_BLOCKS, (self.operand, *self.told, 1), "sent")
            start = self._collective(collectives.SHIFT, (sent, *self.start.args[1:]), "bytes")
        with self.program.graph.inserting_before(self.wait):
            value = self._back(FROM_BLOCKS, start, list(self.like.shape), parts=1)
            arrived[value] = value.all_input_nodes[0]
            self._replace(start, value)

    def _in_parts(self) -> fx.Node:
        """Return the operand in one dimension, padded so that the number of ranks divides its length."""
        flat = self._layout(aten.view.default, (self.operand, [-1]), "flat")
        missing = static(-tensor(flat).numel() % self.ranks)
        if not isinstance(missing, int):
            raise PlanError(
                f"{self.operand.name!r} can't be sent in few bits: {self.ranks} does not divide its elements at all lengths",
                where="wire.activations",
                why="each rank adds up an equal part of them",
                hint='shapes="static": a program for each length; or wire.activations="same"',
            )
        return self._layout(aten.constant_pad_nd.default, (flat, [0, missing]), "padded") if missing else flat

    def _sum(self, start: fx.Node, part: list[int], whole: bool) -> fx.Node:
        """Return a part of what the ranks' values add up to; in float32 if it is going to be sent on."""
        mean = self._back(MEAN_OF_BLOCKS, start, part, torch.float32)
        total = self._layout(aten.mul.Tensor, (mean, self.ranks), "sum")
        same = whole or self.like.dtype is torch.float32
        return total if same else self._layout(_CAST, (total, self.like.dtype), "rounded")

    def _whole(self, mean: fx.Node) -> fx.Node:
        """Gather the ranks' parts of the mean, and return the whole mean: a transfer of its own, after the first."""
        first, self.layout = self.layout, self.layout.replace(transfer=f"{self.start.name}_shared")
        sent = self._sent(mean, 1, "mean_sent", f"{self.dim}/mean")
        self.over, self.waits = (r.replace(transfer=self.layout.transfer) for r in (self.over, self.waits))
        start = self._collective(collectives.ALL_GATHER, (sent, self.ranks, self.dim), "shared")
        whole_mean = self._back(FROM_BLOCKS, start, [tensor(mean).shape[0] * self.ranks])
        count = self.like.numel()
        if static(tensor(whole_mean).shape[0]) != static(count):
            whole_mean = self._layout(aten.slice.Tensor, (whole_mean, 0, 0, count), "cut")
        whole_mean = self._layout(aten.view.default, (whole_mean, list(self.like.shape)), "shaped")
        for node in self.after:
            set_info(node, info(node).replace(transfer=self.layout.transfer))
        self.layout = first
        return whole_mean

    def _sent(self, operand: fx.Node, parts: int, name: str, place: str) -> fx.Node:
        """Return the bytes of (a part of) a gradient. With error feedback its rounding error is the residual of this
        `place`.
        """
        chosen, made_by = self.options.correction, self.layout.made_by
        draws: fx.Node | None = None
        places: list[fx.Node] = []
        record = NodeInfo(Phase.BACKWARD, made_by=made_by)
        if chosen.drawn:
            draws = self.program.number_input(Port(InputRole.DRAWS, "draws"), record, name="draws")
            places = [self.program.rank_index(dim, made_by) for dim, n in self.program.mesh.items() if n > 1]
        if chosen.feedback:
            port = Port(InputRole.RESIDUAL, f"{self.layout.param}/{place}")
            like = tensor(operand)
            with self.program.fake_mode:
                fake = torch.empty(like.numel(), dtype=torch.float32, device=like.device)
            slug = f"residual_{identifier_of(port.name)}"
            residual = self.program.add_input(port, fake, record.replace(param=self.layout.param), name=slug)
            scale = self.program.input_nodes(InputRole.SCALE).get("loss_scale")
            return self._layout(TO_BLOCKS_FED, (operand, residual, draws, places, scale, *self.told, parts), name)
        if draws is not None:
            return self._layout(TO_BLOCKS_DRAWN, (operand, draws, places, *self.told, parts), name)
        return self._layout(TO_BLOCKS, (operand, *self.told, parts), name)

    def _layout(self, target: object, args: tuple[object, ...], name: str) -> fx.Node:
        return self.program.call(target, args, self.layout, name=f"{self.start.name}_{name}")

    def _collective(self, target: object, args: tuple[object, ...], name: str) -> fx.Node:
        return self.program.call(target, args, self.over, name=f"{self.start.name}_{name}")

    def _back(
        self,
        target: object,
        start: fx.Node,
        shape: list[int],
        dtype: torch.dtype | None = None,
        parts: int | None = None,
    ) -> fx.Node:
        came = self.program.call(collectives.WAIT, (start,), self.waits, name=f"{start.name}_here")
        return self._layout(target, (came, *self.told, parts or self.ranks, shape, dtype or self.like.dtype), "back")

    def _replace(self, start: fx.Node, result: fx.Node) -> None:
        """Replace the wait by `result`; `start` gets the name of the old start, which is the transfer's."""
        name = self.start.name
        self.wait.replace_all_uses_with(result)
        self.program.graph.erase_node(self.wait)
        self.program.graph.erase_node(self.start)
        start.name = name
