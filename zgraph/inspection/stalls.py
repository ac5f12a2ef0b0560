"""The seconds that a simulated step waits for each transfer."""

from __future__ import annotations

from collections import Counter

from torch import fx

from zgraph.passes.analysis.simulator import Forecast
from zgraph.program.node import info
from zgraph.program.program import Program


def transfer_of(start: fx.Node) -> str:
    """Return the name of the transfer that a start belongs to: its bucket's, or its own."""
    return info(start).bucket or start.name


def exposed_by_transfer(program: Program, forecast: Forecast) -> dict[str, float]:
    """Return the seconds that the step waits for each transfer, by the name that `transfer_of` gives."""
    nodes = {node.name: node for node in program.graph.nodes}
    seconds: Counter[str] = Counter()
    for stall in forecast.stalls:
        seconds[transfer_of(nodes[stall.node].all_input_nodes[0])] += stall.seconds  # type: ignore[assignment]
    return dict(seconds)
