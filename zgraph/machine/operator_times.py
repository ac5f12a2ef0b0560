"""The times of a step's operators, from timed runs of its programs, and one table of them for all ranks."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import fx

from zgraph.codegen.instrumented import Run, Timed
from zgraph.passes.analysis.costs import Costs, dtype_of, flops_of, signature
from zgraph.program.program import Program


@dataclass(frozen=True)
class Sample:
    """One timed node. What it computes and moves gives the rates for nodes that were not timed."""

    key: str  # the signature of its operator and operands
    seconds: float  # its time
    flops: int  # its floating-point operations, if it is a product
    moved: int  # the bytes that it reads and writes
    dtype: str  # the dtype that it computes in


def samples(timed: Timed, runs: Sequence[Run], whole: Program, costs: Costs) -> Iterator[Sample]:
    """Yield a sample of each node that computes, in these runs of a timed program, which is a part of `whole`."""
    by_name = {n.name: n for n in whole.graph.nodes}  # (a split program's inputs may have other strides)
    for node, seconds in timed.seconds(runs, costs).items():
        yield sample(by_name.get(node.name, node), seconds, costs)


def sample(node: fx.Node, seconds: float, costs: Costs) -> Sample:
    """Return the sample of a node that took so many seconds."""
    return Sample(signature(node), seconds, flops_of(node), costs.traffic(node), dtype_of(node))


def slowest_samples(ranks: Sequence[Sequence[Sample]]) -> list[Sample]:
    """Return the samples of ranks, which run the same programs, with the slowest rank's times: the others wait for it."""
    return [replace(same[0], seconds=max(s.seconds for s in same)) for same in zip(*ranks, strict=True)]


def operator_table(rows: Sequence[Sample]) -> dict[str, float]:
    """Return the seconds of each operator by its signature, averaged over its samples: `Hardware.operators`."""
    by_key: dict[str, list[float]] = {}
    for row in rows:
        by_key.setdefault(row.key, []).append(row.seconds)
    return {key: short(statistics.fmean(seconds)) for key, seconds in sorted(by_key.items())}


def short(value: float) -> float:
    """Round to four digits: measurements are not more accurate."""
    return float(f"{value:.4g}")
