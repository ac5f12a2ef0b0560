"""What each pipeline stage takes: seconds, parameters, the bytes that it saves for its backward and that it receives.

All of it is counted as *loads*: an amount, and the forward operators that cause it. A stage takes a load if it has at
least one of them, and takes it once. So a parameter is on each stage that reads it, a mask is made in each that needs
it, and a value that two stages save is held by both.

A backward node belongs to the operator whose derivative it is a part of (`origins`). Autograd numbers its operations,
and says of each node which number it belongs to. Sums of gradients have no operation of their own: they belong to the
earliest operator that a summand belongs to. No node belongs to a later operator than its operands do: gradients flow
towards the program's beginning.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import fx

from zgraph.passes.analysis.costs import Costs, own_bytes, size_of
from zgraph.passes.stages.min_cuts import AnchorChain, carrier, received
from zgraph.program.aliases import root_of
from zgraph.program.node import Phase, info, sequence
from zgraph.program.program import Program
from zgraph.units import columns, milliseconds, shown_bytes


@dataclass(frozen=True)
class Load:
    """An amount that every stage takes that has one of `nodes`."""

    amount: float  # in the unit of the list that it is in
    nodes: frozenset[fx.Node]  # operators of the forward


@dataclass(frozen=True)
class Loads:
    """The loads of a program."""

    forward: list[Load]  # seconds of the forward
    backward: list[Load]  # seconds of the backward
    elements: list[Load]  # elements of parameters
    parameters: list[Load]  # bytes of parameters
    saved: list[Load]  # bytes that are saved from the forward of a micro-batch for its backward


@dataclass(frozen=True)
class StageLoad:
    """What one stage takes."""

    first: str  # the path of its first module
    last: str  # the path of its last module
    elements: int  # elements of the parameters that it reads
    parameters: int  # bytes of the parameters that it reads
    forward: float  # simulated seconds of one micro-batch's forward
    backward: float  # simulated seconds of one micro-batch's backward
    saved: int  # bytes of a micro-batch that stay between them
    received: int  # bytes that come from earlier stages

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Balance:
    """What the stages of a pipeline take. As text, a table."""

    stages: tuple[StageLoad, ...]  # in order

    @property
    def ratio(self) -> float:
        """The slowest stage's seconds divided by the mean; 1.0 is even."""
        mean = sum(s.seconds for s in self.stages) / len(self.stages)
        return max(s.seconds for s in self.stages) / mean if mean else 1.0

    def __str__(self) -> str:
        rows = [("stage", "modules", "parameters", "forward", "backward", "saves", "receives")]
        for i, s in enumerate(self.stages):
            modules = " .. ".join(dict.fromkeys(m or "(model)" for m in (s.first, s.last)))
            seconds = (milliseconds(s.forward), milliseconds(s.backward))
            rows.append((str(i), modules, f"{s.elements:,}", *seconds, shown_bytes(s.saved), shown_bytes(s.received)))
        return "\n".join([*columns(rows, left=(1,)), f"slowest/mean {self.ratio:.3f}"])


def balance(program: Program, stages: Mapping[fx.Node, int], costs: Costs) -> Balance:
    """Return what each stage takes if the operators of the forward are in these `stages` (as `assign` gives them)."""
    line = AnchorChain(program)
    loads = loads_of(line, costs)
    count = max(stages.values(), default=0) + 1

    def total(of: list[Load]) -> list[float]:
        amounts = [0.0] * count
        for load in of:
            for stage in {stages[n] for n in load.nodes}:
                amounts[stage] += load.amount
        return amounts

    modules: dict[int, list[str]] = defaultdict(list)
    for anchor in line.anchors:
        modules[stages[anchor.node]].append(anchor.module)
    come = received(line, stages)
    forward, backward = total(loads.forward), total(loads.backward)
    elements, parameters, saved = total(loads.elements), total(loads.parameters), total(loads.saved)
    return Balance(
        tuple(
            StageLoad(
                first=modules[i][0] if modules[i] else "",
                last=modules[i][-1] if modules[i] else "",
                elements=int(elements[i]),
                parameters=int(parameters[i]),
                forward=forward[i],
                backward=backward[i],
                saved=int(saved[i]),
                received=sum(map(size_of, come.get(i, ()))),
            )
            for i in range(count)
        )
    )


def loads_of(line: AnchorChain, costs: Costs) -> Loads:
    """Return the loads of a captured program; their nodes are operators of the forward that are each in one stage."""
    program = line.program
    there_for: dict[fx.Node, frozenset[fx.Node]] = {n: frozenset([n]) for n in line.solid}
    for node in reversed(line.nodes):
        if node not in there_for:  # (free nodes belong to their readers, views to their base)
            made_for = frozenset().union(*(there_for[u] for u in node.users if u in there_for))
            there_for[node] = there_for.get(carrier(node), made_for)
    of = origins(program, {a.node for a in line.anchors})
    seconds = costs.compute(program)
    forward = [Load(seconds[n], there_for[n]) for n in line.nodes if seconds.get(n)]
    backward = [Load(seconds[n], there_for[o]) for n, o in of.items() if seconds.get(n)]
    saved_readers: dict[fx.Node, frozenset[fx.Node]] = defaultdict(frozenset)
    for node, origin in of.items():
        for root in map(root_of, node.all_input_nodes):
            if root in there_for:
                saved_readers[root] |= there_for[origin]
    readers: dict[str, set[fx.Node]] = {name: set() for name in program.params}
    for anchor in line.anchors:
        for name in anchor.params:
            readers[name].add(anchor.node)
    specs = [(program.params[n], frozenset(r or {a.node for a in line.anchors[:1]})) for n, r in readers.items()]
    return Loads(
        forward,
        backward,
        [Load(s.numel, nodes) for s, nodes in specs],
        [Load(s.nbytes, nodes) for s, nodes in specs],
        [Load(own_bytes(root), nodes) for root, nodes in saved_readers.items()],
    )


def origins(program: Program, anchors: Collection[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return, for each backward node, the forward operator whose derivative it belongs to.

    Of an operation's operators that is the last one among `anchors`, or, if none is, the first. An operation is known
    by autograd's number, or, where that number belongs to another module (as a custom Function's does), by its module.
    """
    at = {n: i for i, n in enumerate(program.graph.nodes)}
    operators = [n for n in at if n.op == "call_function" and info(n).phase is Phase.FORWARD]
    backward = [n for n in at if n.op == "call_function" and info(n).phase is Phase.BACKWARD]
    of: dict[int, fx.Node] = {}
    inside: dict[str, fx.Node] = {}
    for node in operators:
        number = sequence(node)
        if number is not None and (number not in of or node in anchors):
            of[number] = node
        if info(node).module and (info(node).module not in inside or node in anchors):
            inside[info(node).module] = node
    origin_of: dict[fx.Node, fx.Node] = {}
    for node in backward:
        number = sequence(node)
        near = [origin_of[a] for a in node.all_input_nodes if a in origin_of]
        known = of.get(number) if number is not None else None
        if known is None or info(known).module != info(node).module:
            known = inside.get(info(node).module, known)
        near += [known] if known is not None else []
        if near:
            origin_of[node] = min(near, key=lambda n: at[n])
    for node in reversed(backward):
        if node not in origin_of and operators:
            readers = [origin_of[u] for u in node.users if u in origin_of]
            origin_of[node] = max(readers, key=lambda n: at[n], default=operators[-1])
    return origin_of
