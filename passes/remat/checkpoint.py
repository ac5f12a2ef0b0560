"""Activation checkpointing: values of the forward are dropped, and computed again in the backward just before they are read.

`rematerialize` does it within so many bytes, as the schedule of `zgraph/passes/remat/solver.py` says: segments may be computed again
more than once. `checkpoint` does it where the user says so: in modules, by a policy, in the model's own
torch.utils.checkpoint regions. (Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost".)

What is computed again are copies in the backward phase, of the same operators on the same values: results are equal bit for
bit. Random operators and collectives are never copied; what they gave is kept.
"""

from __future__ import annotations

import traceback
from collections import ChainMap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import fx

from zgraph.errors import PlanError
from zgraph.names import matches
from zgraph.passes.analysis.costs import CPU, Costs
from zgraph.passes.contract import graph_pass
from zgraph.passes.remat.recompute import recompute_all_but
from zgraph.passes.remat.segments import Chain, Segment, chain_of
from zgraph.passes.remat.solver import Again, Keep, Schedule, Solver, every_segment_again
from zgraph.program import collectives
from zgraph.program.aliases import root_of
from zgraph.program.node import Phase, info
from zgraph.program.program import Program
from zgraph.torch_compat import torch_private


@dataclass(frozen=True)
class RematerializeOptions:
    """`bytes` is what values between the forward and the backward, and what segments need while they run, may take; None:
    every segment is computed again once. `costs` say how long operators take. `solver` is that of the program, or of one
    that it is a copy of, where there is one already. So many other micro-batches are `waiting` for their backward, and what
    the forward keeps for them counts in the bytes."""

    bytes: int | None = None
    costs: Costs = field(default_factory=lambda: Costs(CPU))
    solver: Solver | None = None
    waiting: int = 0


@graph_pass(
    "rematerialize",
    "values are computed again in the backward, the fastest way within a memory",
    options=RematerializeOptions,
    requires=("clean",),
    provides=("rematerialized",),
    conflicts=("sharded",),
)
def rematerialize(program: Program, options: RematerializeOptions) -> dict[str, int]:
    if all(info(n).phase is Phase.FORWARD for n in program.graph.nodes if n.op == "call_function"):
        return {"segments": 0, "recomputed": 0}
    if options.bytes is None:
        chain = chain_of(program, options.costs)
        schedule = every_segment_again(chain.segments)
    else:
        solver = options.solver or Solver(program, options.costs, options.waiting)
        chain, schedule = solver.schedule(options.bytes)
        chain = chain.on(program)
    made = Replay(program, chain).run(schedule)
    return {"segments": len(chain.segments), "recomputed": made, "deepest": _depth(schedule)}


@dataclass(frozen=True)
class CheckpointOptions:
    """`modules` are patterns of module paths ("blocks.*"): what runs inside of one is computed again, from what comes into it.
    `policy` says of a node whether it is. With both empty: what the model's own torch.utils.checkpoint says."""

    modules: tuple[str, ...] = ()
    policy: Callable[[fx.Node], bool] | None = None


@graph_pass(
    "checkpoint",
    "values of the forward are computed again in the backward where the user says so",
    options=CheckpointOptions,
    requires=("clean",),
    provides=("checkpointed",),
    conflicts=("sharded",),
)
def checkpoint(program: Program, options: CheckpointOptions) -> dict[str, int]:
    forward = [n for n in program.graph.nodes if n.op == "call_function" and info(n).phase is Phase.FORWARD]
    if options.policy is not None:
        again = {n for n in forward if _chosen(options.policy, n)}
    else:
        region = {
            n: _module_region(program, n, options.modules) if options.modules else torch_private.users_region(n)
            for n in forward
        }
        again = {n for n in forward if region[n] is not None and not _leaves(n, region)}
    made = recompute_all_but(program, {n.name for n in forward if n not in again}, by="checkpoint")
    return {"marked": len(again), "recomputed": made}


def _chosen(policy: Callable[[fx.Node], bool], node: fx.Node) -> bool:
    """What a user's policy says of a node. Raises `PlanError` where it raises."""
    try:
        return bool(policy(node))
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise PlanError(
            f"the policy failed for {node.name}, an {node.target}",
            where=f"recompute ({at.filename}:{at.lineno}, in {at.name})",
            why=f"{type(error).__name__}: {error}",
            hint="it gets each torch.fx.Node of the forward, and says whether the backward computes it again",
        ) from error


def _module_region(program: Program, node: fx.Node, patterns: tuple[str, ...]) -> object:
    """The outermost module around a node that one of the patterns names, None for none."""
    return next((program.first_name(path) for path in program.modules_around(node) if matches([path], patterns)), None)


def _leaves(node: fx.Node, region: dict[fx.Node, object]) -> bool:
    """Does the forward read a value of a region outside of it, through views or not? Then it is kept: what runs there would
    else be computed again from here on."""
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if user in region and region[user] != region[node]:
                return True
            if user in region and root_of(user) is root_of(node):
                stack.append(user)
    return False


class Replay:
    """Writes a schedule into a program: puts the backward's nodes into its order, with copies of the forward's between them."""

    def __init__(self, program: Program, chain: Chain) -> None:
        self.program = program
        self.chain = chain
        self.here: dict[fx.Node, fx.Node] = {n: n for n in chain.pinned}  # by storage: the value that is there now
        self.copies = 0
        self.output = program.output_node()

    def run(self, schedule: Schedule) -> int:
        """Returns the number of copies."""
        for node in self.chain.loose:
            self._place(node, {})
        self._follow(schedule, first=True)
        self.program.graph.eliminate_dead_code()  # (forward nodes that only the backward read, and that it has copies of)
        return self.copies

    def _follow(self, schedule: Schedule, first: bool) -> None:
        segments = self.chain.segments
        if isinstance(schedule, Again):
            if schedule.rest is not None:
                held = self._keep(segments[schedule.until].before, first)
                self._follow(schedule.rest, first)
                self._drop(held)
            self._follow(schedule.later, first=False)
            return
        segment = segments[schedule.segment]
        stays = segment.ways[schedule.way].kept if first or schedule.rest is not None else frozenset()
        behind = segment.behind - stays if schedule.rest is not None else frozenset()
        held = self._keep([*stays, *behind], first)
        if schedule.rest is not None:
            self._follow(schedule.rest, first)
            self._drop(behind.intersection(held))
            held = [value for value in held if value not in behind]
        self._backward(segment)
        self._drop(held)

    def _keep(self, values: Iterable[fx.Node], first: bool) -> list[fx.Node]:
        """Let these storages be there: as the forward has made them, or computed again. Returns those that were not."""
        wanted = [v for v in dict.fromkeys(values) if v not in self.here]
        memo: dict[fx.Node, fx.Node] = {}
        for value in sorted(wanted):
            made = value if first else self._again(value, memo)
            memo[value] = made
        self.here.update({v: memo[v] for v in wanted})
        return wanted

    def _drop(self, values: Iterable[fx.Node]) -> None:
        for value in values:
            del self.here[value]

    def _backward(self, segment: Segment) -> None:
        memo: dict[fx.Node, fx.Node] = {}
        for node in segment.backward:
            self._place(node, memo)

    def _place(self, node: fx.Node, memo: dict[fx.Node, fx.Node]) -> None:
        """Put a backward node next, after copies of what it reads of the forward that is not there."""
        for used in node.all_input_nodes:
            if used.op == "call_function" and info(used).phase is Phase.FORWARD:
                now = self._again(used, memo)
                if now is not used:
                    node.replace_input_with(used, now)
        self.output.prepend(node)

    def _again(self, node: fx.Node, memo: dict[fx.Node, fx.Node]) -> fx.Node:
        """The value of a forward node now: itself, or a copy at the end of what is placed so far."""
        if node.op != "call_function" or info(node).phase is not Phase.FORWARD:
            return node
        root = root_of(node)
        # Of an input the forward's own view serves; and what came from other ranks is kept.
        if root.op == "placeholder" or self.here.get(root) is root or collectives.is_wait(node):
            return node
        if node is root and node in self.here:
            return self.here[node]
        if node in memo:
            return memo[node]
        for used in node.all_input_nodes:
            self._again(used, memo)
        with self.program.graph.inserting_before(self.output):
            memo[node] = self.program.repeat(node, ChainMap(self.here, memo), "rematerialize")
        self.copies += 1
        return memo[node]


def _depth(schedule: Schedule) -> int:
    """How often a segment is computed at most, besides in the forward."""
    if isinstance(schedule, Keep):
        return 0 if schedule.rest is None else _depth(schedule.rest)
    rest = 0 if schedule.rest is None else _depth(schedule.rest)
    return max(rest, 1 + _depth(schedule.later))
