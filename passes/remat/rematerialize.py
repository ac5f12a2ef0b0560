"""Chooses what the forward saves and what the backward recomputes: the fastest schedule that a solver finds within a
memory budget.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from zgraph.passes.analysis.costs import CPU, Costs
from zgraph.passes.contract import graph_pass
from zgraph.passes.remat.replay_schedule import Replay, depth_of
from zgraph.passes.remat.segments import chain_of
from zgraph.passes.remat.solver import Solver, recompute_every_segment
from zgraph.program.node import Phase, info
from zgraph.program.program import Fact, Program


@dataclass(frozen=True)
class RematerializeOptions:
    """Options of `rematerialize`."""

    # the most bytes of values between the forward and the backward, and of segments while they run, with what the forward
    # saves for `waiting` micro-batches; None: every segment is recomputed once
    bytes: int | None = None
    costs: Costs = field(default_factory=lambda: Costs(CPU))  # says how long operators take
    solver: Solver | None = None  # that of the program, or of one that it is a copy of; None to make one
    waiting: int = 0  # how many other micro-batches wait for their backward


@graph_pass(
    "rematerialize",
    "values are computed again in the backward, the fastest way within a memory",
    options=RematerializeOptions,
    requires=(Fact.CLEAN,),
    provides=(Fact.REMATERIALIZED,),
    conflicts=(Fact.SHARDED,),
)
def rematerialize(program: Program, options: RematerializeOptions) -> dict[str, int]:
    if all(info(n).phase is Phase.FORWARD for n in program.graph.nodes if n.op == "call_function"):
        return {"segments": 0, "recomputed": 0}
    if options.bytes is None:
        chain = chain_of(program, options.costs)
        schedule = recompute_every_segment(chain.segments)
    else:
        solver = options.solver or Solver(program, options.costs, options.waiting)
        chain, schedule = solver.schedule(options.bytes)
        chain = chain.on(program)
    recomputed = Replay(program, chain).run(schedule)
    return {"segments": len(chain.segments), "recomputed": recomputed, "deepest": depth_of(schedule)}
