"""Weights are gathered in fewer bits (`plan.wire.gather`).

    shard -> to_blocks -> all_gather of bytes -> wait -> from_blocks -> the whole parameter

*Contract.* On entry parameters are gathered as they are. On exit those that `wire` says are sent in a format of
`zgraph.program.block_quantization`. All ranks compute with the same weights: a rank takes its own rows as they were
sent, too. Parameters that have no more bits than the format, and those that `exact` names, are gathered as before.
"""

from __future__ import annotations

from zgraph.passes.analysis.parameter_collectives import gathers_of
from zgraph.passes.compression.quantize_transfers import CompressOptions, QuantizedTransfer
from zgraph.passes.contract import graph_pass
from zgraph.program import collectives
from zgraph.program.program import Fact, Program


@graph_pass(
    "compress_gathers",
    "weights are gathered in fewer bits",
    options=CompressOptions,
    requires=(Fact.SHARDED,),
    conflicts=(Fact.BUCKETED,),
    bitwise=False,
)
def compress_gathers(program: Program, options: CompressOptions) -> dict[str, int]:
    # (Secondary shards, which the ranks of a node gather, are parts of weights that were sent in few bits already.)
    candidates = [t for t in gathers_of(program) if collectives.group_of(t.start) in program.mesh]
    gathers = [t for t in candidates if options.saved(t, 1)]
    saved = sum(options.saved(t, 1) for t in gathers)
    for gather in gathers:
        QuantizedTransfer(program, gather, options).gathered()
    return {"gathers": len(gathers), "bytes_saved": saved}
