"""Lets the ranks of a mesh dimension compute one program together: values are stored in parts, with collectives where
they are needed.

*Contract.* On entry the program is the plain single-device graph; the layouts of its parameters say which are divided,
and how. The placement of every other value follows from it, node by node, in order. A value is `Replicate` (whole on
each rank), `Shard` (rank r has the r-th of equal pieces along one axis), or `Partial` (the sum over ranks, or their
maximum, is the value): DTensor's words. `choose_placements` chooses for each node the way that sends the fewest bytes, `Builder`
makes the program from these decisions. On exit all outputs are whole but the gradients, which are stored as their
parameters are.

With Megatron's division of weights (columns, then rows: Shoeybi et al. 2019) this gives its two all-reduces a layer and
direction; with `sequence` they become a reduce_scatter and an all_gather each (Korthikanti et al. 2022).
"""

from __future__ import annotations

from dataclasses import dataclass

from zgraph.passes.analysis.axes import Axes
from zgraph.passes.contract import graph_pass
from zgraph.passes.spmd.build_divided_graph import Builder
from zgraph.passes.spmd.choose_placements import Goal, choose_placements
from zgraph.passes.spmd.heads_of_ranks import WAYS
from zgraph.passes.spmd.placements import Placements
from zgraph.program.program import Fact, Level, Program


@dataclass(frozen=True)
class DivideOptions:
    """Options of `divide`."""

    dim: str = "tp"  # the mesh dimension
    sequence: bool = False  # whether sums over ranks may leave their result sharded


@graph_pass(
    "divide",
    "the ranks of a mesh dimension compute the program together, in parts",
    options=DivideOptions,
    requires=(Fact.CLEAN,),
    provides=(Fact.DIVIDED,),
    conflicts=(Fact.SHARDED,),
    bitwise=False,
    level=Level.DISTRIBUTED,
)
def divide(program: Program, options: DivideOptions) -> dict[str, int]:
    if program.mesh.get(options.dim, 1) == 1:
        return {}
    return divide_program(Placements(program, options.dim, Axes(program)), Goal(options.sequence, ways=WAYS))


def divide_program(placements: Placements, goal: Goal) -> dict[str, int]:
    """Decide how each node is computed, then build the program. Return the counts of collectives, and their bytes."""
    return Builder(placements, choose_placements(placements, goal)).run()
