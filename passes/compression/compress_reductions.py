"""Gradients are averaged in fewer bits (`plan.wire.reduce`).

    gradient -> to_blocks, a part for each rank -> all_to_all of bytes -> wait -> mean_of_blocks -> this rank's rows
    and, where all ranks need the whole, -> to_blocks -> all_gather of bytes -> wait -> from_blocks

*Contract.* On entry gradients are averaged as they are. On exit those that `wire` says are sent in a format of
`zgraph.program.block_quantization`. A gradient is rounded where it is sent, and added up in float32 (so in ZeRO++, Wang
et al. 2023, whose all-to-all this is); where it was reduced by an all-reduce the mean is rounded once more. On a mesh
with `replicate` and `dp` gradients are scattered within a group and reduced between groups, each in few bits, or
between groups alone (`hierarchical`: an element is then rounded twice at most). With error feedback each gradient has
one more input, the residual, which the sending operator writes; stochastic rounding adds one input for all, a counter.
Gradients that have no more bits than the format, and those that `exact` names, are reduced as before, as is an
all-reduce whose second half would cost more latency than it saves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from zgraph.passes.analysis.parameter_collectives import ParameterCollective, reductions_of
from zgraph.passes.compression.quantize_transfers import CompressOptions, QuantizedTransfer
from zgraph.passes.contract import graph_pass
from zgraph.program import collectives
from zgraph.program.program import Fact, Program


@graph_pass(
    "compress_reductions",
    "gradients are averaged in fewer bits",
    options=CompressOptions,
    requires=(Fact.REDUCED,),
    conflicts=(Fact.BUCKETED,),
    bitwise=False,
)
def compress_reductions(program: Program, options: CompressOptions) -> dict[str, int]:
    reductions = [t for t in reductions_of(program) if _is_worth_it(program, t, options)]
    saved = sum(options.saved(t, _ranks(program, t)) for t in reductions)
    for reduction in reductions:
        QuantizedTransfer(program, reduction, options).reduced()
    return {"reductions": len(reductions), "bytes_saved": saved, "roundings": _roundings(reductions)}


def _roundings(reductions: Sequence[ParameterCollective]) -> int:
    """Return how often an element is rounded, of the gradient that is rounded most often."""
    times: Counter[str] = Counter()
    for reduction in reductions:
        times[reduction.name] += 2 if reduction.start.target is collectives.ALL_REDUCE else 1
    return max(times.values(), default=0)


def _ranks(program: Program, transfer: ParameterCollective) -> int:
    return program.mesh[collectives.group_of(transfer.start)]


def _is_worth_it(program: Program, transfer: ParameterCollective, options: CompressOptions) -> bool:
    saved = options.saved(transfer, _ranks(program, transfer))
    if options.over not in (None, collectives.group_of(transfer.start)):
        return False
    if transfer.start.target is not collectives.ALL_REDUCE:
        return saved > 0
    link = options.costs.hardware.link(collectives.group_of(transfer.start))
    return 2 * saved / link.bandwidth > link.latency  # (each rank sends and receives nearly all of it twice)
