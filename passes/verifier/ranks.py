"""The rule about several ranks: all run the same collectives in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from zgraph.passes.verifier.faults import fault
from zgraph.passes.verifier.values import type_of
from zgraph.program import collectives
from zgraph.program.node import value
from zgraph.program.program import Program


def verify_ranks(programs: Sequence[Program]) -> None:
    """Raise `VerifyError` unless all ranks run the same collectives in the same order on each group."""
    lists = [[n for n in p.graph.nodes if collectives.is_start(n) or collectives.is_wait(n)] for p in programs]
    for rank, (program, nodes) in enumerate(zip(programs, lists, strict=True)):
        for mine, first in zip(nodes, lists[0], strict=False):
            if (mine.name, _signature(mine)) != (first.name, _signature(first)):
                raise fault(
                    program,
                    mine,
                    f"rank {rank} and rank 0 communicate in different order: {mine.name!r} against {first.name!r}",
                    "ranks that disagree wait for each other for ever",
                )
        if len(nodes) != len(lists[0]):
            longer = max(nodes, lists[0], key=len)
            odd = longer[min(len(nodes), len(lists[0]))]
            raise fault(
                program,
                odd,
                f"rank {rank} has {len(nodes)} collective nodes, rank 0 has {len(lists[0])}; the first extra is {odd.name!r}",
                "ranks that disagree wait for each other for ever",
            )


def _signature(node: fx.Node) -> tuple[Any, ...]:
    return (
        str(node.target),
        type_of(value(node)),
        collectives.group_of(node) if collectives.is_start(node) else "",
    )
