"""What groups of ranks have moved in a round of local steps is averaged in one exchange, in few bits if the plan says so.

    each parameter: moved -> all_reduce (avg) -> wait
becomes
    sent as they are:  all of one dtype, one after the other -> all_reduce -> the parts of each
    in few bits:       each parameter -> to_blocks, a part for each rank; all bytes -> all_to_all -> mean_of_blocks
                       each part's mean -> to_blocks; all bytes -> all_gather -> from_blocks

*Contract.* On entry each parameter's steps are averaged by an all-reduce of its own. On exit all of them wait for one
latency, or two. In few bits an element is rounded twice: where it is sent and in the mean; what is rounded is lost. All
ranks read the same bytes, so all go on from the same weights. Parameters that `exact` names, and those that would get
no smaller, are sent as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from zgraph.passes.analysis.costs import size_of
from zgraph.passes.analysis.parameter_collectives import ParameterCollective, reductions_of
from zgraph.passes.compression.quantize_transfers import CompressOptions
from zgraph.passes.contract import graph_pass
from zgraph.program import collectives
from zgraph.program.block_quantization import FROM_BLOCKS, MEAN_OF_BLOCKS, TO_BLOCKS
from zgraph.program.node import NodeInfo, Phase, Role, set_info, tensor
from zgraph.program.program import Fact, Program

aten = torch.ops.aten


@graph_pass(
    "share_rounds",
    "what groups of ranks have moved by themselves is averaged in one exchange",
    options=CompressOptions,
    conflicts=(Fact.IN_PLACE,),
    bitwise=False,
)
def share_rounds(program: Program, options: CompressOptions) -> dict[str, int]:
    dim = str(options.over)
    means = [t for t in reductions_of(program) if collectives.group_of(t.start) == dim]
    if not means:
        return {"parameters": 0, "in_few_bits": 0, "bytes": 0, "bytes_saved": 0}
    ranks = program.mesh[dim]
    saved = {t: 0 if options.format == "same" else options.saved(t, ranks) for t in means}
    spared, whole = sum(saved.values()), sum(size_of(_operand(t)) for t in means)
    exchange = _Exchange(program, options, ranks)
    with program.graph.inserting_before(means[0].start):
        small = exchange.in_few_bits([t for t in means if saved[t]])
        exact = exchange.as_they_are([t for t in means if not saved[t]])
    for transfer, mean in (small | exact).items():
        transfer.wait.replace_all_uses_with(mean)
        program.graph.erase_node(transfer.wait)
        program.graph.erase_node(transfer.start)
    sent = 2 * (ranks - 1) * (whole - spared) // ranks  # (of each part, and then of its mean, to all other ranks)
    return {
        "parameters": len(means),
        "in_few_bits": len(small),
        "bytes": sent,
        "bytes_saved": 2 * (ranks - 1) * whole // ranks - sent,
    }


class _Exchange:
    """Inserts the nodes that average the steps of several parameters. Results are by the transfer that they replace."""

    def __init__(self, program: Program, options: CompressOptions, ranks: int) -> None:
        self.program, self.ranks, self.dim = program, ranks, str(options.over)
        self.told = (options.format, options.block)

    def as_they_are(self, transfers: Sequence[ParameterCollective]) -> dict[ParameterCollective, fx.Node]:
        by_dtype: dict[torch.dtype, list[ParameterCollective]] = {}
        for transfer in transfers:
            by_dtype.setdefault(tensor(_operand(transfer)).dtype, []).append(transfer)
        means: dict[ParameterCollective, fx.Node] = {}
        for alike in by_dtype.values():
            flat = [self._call(aten.view.default, (_operand(t), [-1]), "flat") for t in alike]
            mean = self._waited(collectives.ALL_REDUCE, (self._joined(flat, 0), "avg", self.dim), "moved")
            parts = self._parted(mean, [tensor(f).shape[0] for f in flat], 0)
            for transfer, part in zip(alike, parts, strict=True):
                means[transfer] = self._call(aten.view.default, (part, list(tensor(transfer.wait).shape)), "mean")
        return means

    def in_few_bits(self, transfers: Sequence[ParameterCollective]) -> dict[ParameterCollective, fx.Node]:
        if not transfers:
            return {}
        padded = {t: self._padded(t) for t in transfers}
        sent = {t: self._of(t, TO_BLOCKS, (x, *self.told, self.ranks), "sent") for t, x in padded.items()}
        came = self._exchanged(sent, self.ranks)
        means: dict[ParameterCollective, fx.Node] = {}
        for t, rows in came.items():
            part = [tensor(padded[t]).shape[0] // self.ranks]
            means[t] = self._of(t, MEAN_OF_BLOCKS, (rows, *self.told, self.ranks, part, tensor(t.wait).dtype), "mean")
        sent = {t: self._of(t, TO_BLOCKS, (x, *self.told, 1), "mean_sent") for t, x in means.items()}
        came = self._exchanged(sent, 1)
        return {t: self._whole(t, rows, tensor(padded[t]).shape[0]) for t, rows in came.items()}

    def _padded(self, transfer: ParameterCollective) -> fx.Node:
        """Return what is sent of a parameter in one dimension, whose length the ranks divide."""
        flat = self._of(transfer, aten.view.default, (_operand(transfer), [-1]), "flat")
        missing = -tensor(flat).numel() % self.ranks
        return self._of(transfer, aten.constant_pad_nd.default, (flat, [0, missing]), "padded") if missing else flat

    def _whole(self, transfer: ParameterCollective, rows: fx.Node, length: int) -> fx.Node:
        like = tensor(transfer.wait)
        whole = self._of(transfer, FROM_BLOCKS, (rows, *self.told, self.ranks, [length], like.dtype), "whole")
        if length != like.numel():
            whole = self._of(transfer, aten.slice.Tensor, (whole, 0, 0, like.numel()), "cut")
        return self._of(transfer, aten.view.default, (whole, list(like.shape)), "shaped")

    def _exchanged(self, sent: Mapping[ParameterCollective, fx.Node], parts: int) -> dict[ParameterCollective, fx.Node]:
        """Insert the exchange of all parameters' bytes: of as many parts as there are ranks one to each, or the whole to
        all. Return what came of each parameter, the ranks' rows in one dimension."""
        rows = [self._call(aten.view.default, (n, [parts, -1]), "rows") for n in sent.values()]
        widths = [tensor(row).shape[1] for row in rows]
        flat = self._call(aten.view.default, (self._joined(rows, 1), [-1]), "bytes")
        if parts == 1:
            came = self._waited(collectives.ALL_GATHER, (flat, self.ranks, self.dim), "shared")
        else:
            sizes = [sum(widths)] * self.ranks
            came = self._waited(collectives.ALL_TO_ALL, (flat, sizes, sizes, self.dim), "moved")
        whole = self._call(aten.view.default, (came, [self.ranks, -1]), "came")
        parted = self._parted(whole, widths, 1)
        return {t: self._call(aten.view.default, (p, [-1]), "came") for t, p in zip(sent, parted, strict=True)}

    def _joined(self, nodes: Sequence[fx.Node], at: int) -> fx.Node:
        return self._call(aten.cat.default, (list(nodes), at), "joined")

    def _parted(self, node: fx.Node, sizes: Sequence[int], at: int) -> list[fx.Node]:
        """Insert copies of the parts of a tensor: what reads one of them needs to know nothing of the others."""
        parts, begin = [], 0
        for size in sizes:
            part = self._call(aten.slice.Tensor, (node, at, begin, begin + size), "part")
            parts.append(self._call(aten.clone.default, (part,), "part", memory_format=torch.contiguous_format))
            begin += size
        return parts

    def _of(self, transfer: ParameterCollective, target: object, args: tuple[object, ...], name: str) -> fx.Node:
        """Insert an operator on one parameter's values."""
        record = NodeInfo(Phase.UPDATE, Role.LAYOUT, param=transfer.name, made_by="share_rounds")
        return self.program.call(target, args, record, name=f"{transfer.start.name}_{name}")

    def _call(self, target: object, args: tuple[object, ...], name: str, **kwargs: object) -> fx.Node:
        """Insert an operator on what several parameters share."""
        record = NodeInfo(Phase.UPDATE, Role.LAYOUT, made_by="share_rounds")
        return self.program.call(target, args, record, name=f"rounds_{name}", kwargs=kwargs)

    def _waited(self, target: object, args: tuple[object, ...], name: str) -> fx.Node:
        """Insert a collective of what several parameters share, and its wait."""
        record = NodeInfo(
            Phase.UPDATE, Role.REDUCE, mesh_dim=self.dim, stream=f"comm:{self.dim}", made_by="share_rounds"
        )
        start = self.program.call(target, args, record, name=f"rounds_{name}")
        set_info(start, record.replace(transfer=start.name))
        waits = record.replace(role=Role.WAIT, stream="compute", transfer=start.name)
        return self.program.call(collectives.WAIT, (start,), waits, name=f"rounds_{name}_here")


def _operand(transfer: ParameterCollective) -> fx.Node:
    return transfer.start.all_input_nodes[0]
