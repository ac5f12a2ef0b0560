"""What a rule of the verifier yields: an error that shows the node at fault and those around it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from zgraph.errors import VerifyError
from zgraph.program.node import has_info, info
from zgraph.program.program import Program

AROUND = 5  # nodes shown on each side of a fault


Faults = Iterator[VerifyError]


def fault(program: Program, node: fx.Node | None, what: str, why: str) -> VerifyError:
    name = node.name if node is not None else None
    where = None
    if node is not None:
        nodes = program.nodes
        at = nodes.index(node) if node in nodes else 0
        lines = [f"{'>' if n is node else ' '} {n.format_node()}" for n in nodes[max(0, at - AROUND) : at + AROUND + 1]]
        source = info(node).source if has_info(node) else ""
        where = "\n".join([*([source] if source else []), f"program {program.name!r}, node {name!r}:", *lines])
    return VerifyError(
        what,
        where=where,
        why=why,
        hint="the pass that ran last made this program; its options or its code are wrong",
        node=name,
    )


def awaited_once(program: Program, start: fx.Node, waits: list[fx.Node], what: str, *, handed_on: bool) -> Faults:
    """Yield a fault unless exactly one of `waits` waits for this start and nothing else reads it.

    A start that is `handed_on` leaves the program, and may have no wait.
    """
    if len(waits) != 1 and not (handed_on and not waits):
        yield fault(
            program,
            start,
            f"{what} {start.name!r} is waited for {len(waits)} times",
            "each start has exactly one wait",
        )
    others = [u for u in start.users if u not in waits and not (handed_on and u.op == "output")]
    if others:
        yield fault(
            program,
            others[0],
            f"node {others[0].name!r} reads {start.name!r} without waiting for it",
            "its bytes have not arrived there",
        )
