"""Computes what a stage's program has on the device while each of its parts runs, and what a micro-batch keeps between
the parts.

A stage is captured as one program and run in parts: a forward, and a backward or its two parts. While it runs, each
part releases what no later part reads, including values received from other stages; what a part returns no longer
belongs to the program when the part ends. What is on the device during the whole step is not counted here: parameters,
inputs, kept whole weights, sums of gradients that are added to in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from torch import fx

from zgraph.passes.analysis.fusion import sources
from zgraph.passes.analysis.live_memory import Life, lives
from zgraph.plan.pipeline_schedules.actions import Kind
from zgraph.program.node import Phase, info
from zgraph.program.program import InputRole, OutputRole, Program

_ALWAYS = {InputRole.PARAMETER, InputRole.INPUT, InputRole.UNSHARDED}
_COMES = {InputRole.RECEIVED, InputRole.RETURNED, InputRole.TANGENT, InputRole.ACCUMULATOR}


@dataclass(frozen=True)
class Values:
    """The bytes that the parts of a stage's program have on the device."""

    peaks: dict[Kind, dict[str, int]]  # at the peak of each kind of part, by category
    saved: int  # kept by a micro-batch from its forward to its backward
    kept: int  # kept by a micro-batch between the two parts of its backward
    lent: frozenset[str]  # names of values that are sent to other stages, and stay here too until the backward


def values_of(program: Program, fused: bool, first: Collection[str] | None = None, *, adds: bool = False) -> Values:
    """Return the bytes of a joint program of any level. `fused`: see `zgraph.passes.analysis.live_memory.lives`. If the
    backward has two parts, `first` names the nodes of the first one. `adds`: the backward adds to sums of gradients
    in place.
    """
    if first is not None:
        program = _second_last(program, first)
    nodes = list(program.graph.nodes)
    turn = 1 + max((i for i, n in enumerate(nodes) if n.op != "output" and info(n).phase is Phase.FORWARD), default=-1)
    end = len(nodes)
    middle = end - 1
    if first is not None:
        later = (i for i, n in enumerate(nodes[:-1]) if i >= turn and n.op != "placeholder" and n.name not in first)
        middle = next(later, end - 1)
    lifetimes = _lives(program, fused, turn, middle if first is not None else end, adds)
    spans = {Kind.F: (0, turn), Kind.B: (turn, end)}
    if first is not None:
        # (if the first part computes nothing, it has what the second begins with)
        spans |= {Kind.I: (turn, max(middle, turn + 1)), Kind.W: (middle, end)}
    peaks = {kind: _most(lifetimes, start, stop) for kind, (start, stop) in spans.items()}
    stays = {life.node for life in lifetimes if life.born < turn < life.gone}
    on = sources(nodes, fused)
    resident_nodes = stays | {n for role in _ALWAYS for n in program.input_nodes(role).values()}
    sent = ((p.name, on[n]) for p, n in program.output_items() if p.role is OutputRole.SENT and n in on)
    return Values(
        peaks,
        sum(life.bytes for life in lifetimes if life.node in stays),
        sum(life.bytes for life in lifetimes if life.born < middle < life.gone) if first is not None else 0,
        frozenset(name for name, made_of in sent if resident_nodes.issuperset(made_of)),
    )


def _second_last(program: Program, first: Collection[str]) -> Program:
    """Return a copy with the backward's nodes in the order of its parts."""
    snapshot = program.snapshot()
    for node in list(snapshot.graph.nodes):
        if node.op not in ("placeholder", "output") and info(node).phase is Phase.BACKWARD and node.name not in first:
            snapshot.output_node().prepend(node)
    return snapshot


def _lives(program: Program, fused: bool, turn: int, middle: int, adds: bool) -> list[Life]:
    """Return the life of each value of the parts, from when it is on the device until it is released. The first part of
    the backward ends at `middle`.
    """
    nodes = list(program.graph.nodes)
    on = sources(nodes, fused)
    inputs = {node: port.role for port, node in program.input_items()}
    gives: dict[fx.Node, set[InputRole | OutputRole]] = {}
    for port, node in program.output_items():
        for root in on.get(node, ()):
            gives.setdefault(root, set()).add(port.role)
    always = _ALWAYS | ({InputRole.ACCUMULATOR} if adds else set())
    lifetimes = []
    for life in lives(program, fused):
        role, born, gone = inputs.get(life.node), life.born, life.gone
        if role in always:
            continue
        if role in _COMES:
            born = 0 if role is InputRole.RECEIVED else turn - (role is InputRole.TANGENT)
            gone = len(nodes) if role is InputRole.TANGENT else max(life.read, born) + 1
        given_roles = gives.get(life.node, set())
        if given_roles:
            over = next(stop for stop in (turn, middle, len(nodes)) if born < stop)
            gone = len(nodes) if OutputRole.GRADIENT in given_roles else max(life.read + 1, over)
        lifetimes.append(Life(life.node, life.category, life.bytes, born, gone, life.read))
    return lifetimes


def _most(lives: list[Life], start: int, stop: int) -> dict[str, int]:
    """Return the bytes by category at the peak, in positions from `start` to before `stop`."""
    changes: dict[int, Counter[str]] = {}
    for life in lives:
        born = max(life.born, start)
        if born < stop and life.gone > born:
            changes.setdefault(born, Counter())[life.category] += life.bytes
            changes.setdefault(life.gone, Counter())[life.category] -= life.bytes
    live: Counter[str] = Counter()
    most: dict[str, int] = {}
    for at in sorted(at for at in changes if at < stop):
        live.update(changes[at])
        if sum(live.values()) > sum(most.values()):
            most = {name: size for name, size in live.items() if size}
    return most
