"""The weights of ZeRO stage 3 are gathered again in the backward, before their first use there."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from zgraph.passes.analysis.parameter_collectives import largest_layer
from zgraph.passes.contract import graph_pass
from zgraph.passes.zero.gathers import add_gather, gathered
from zgraph.passes.zero.keep_gathered import coming_in
from zgraph.program.aliases import is_cast, is_view
from zgraph.program.node import Phase, info
from zgraph.program.program import Fact, InputRole, Program

if TYPE_CHECKING:
    from zgraph.passes.overlap.follow_order import Start


@dataclass(frozen=True)
class RegatherOptions:
    """Options of `regather`."""

    # A weight is held from the forward to the backward, as far as `turn` lets it, if between its two uses no more bytes of
    # other weights are used: it would be released just to be gathered again (DeepSpeed's stage3_max_reuse_distance).
    reuse_bytes: int | None = None  # None: 1% of the largest layer
    keep: frozenset[str] = frozenset()  # names of further weights that are held from the forward to the backward
    turn: bool = True  # whether the backward follows its forward directly, with no other micro-batches between the two
    # another program's order, whose ranks gather together with those of this one: a weight that is held there is held here, and one
    # that is gathered again there is gathered again, as often
    order: tuple[Start, ...] = ()


@graph_pass(
    "regather",
    "what the forward gathered is gathered (or fetched) again for the backward, not kept",
    options=RegatherOptions,
    requires=(Fact.SHARDED,),
    provides=(Fact.REGATHERED,),
    conflicts=(Fact.KEPT,),
)
def regather(program: Program, options: RegatherOptions) -> dict[str, int]:
    regathered = held_count = 0
    wholes = gathered(program, Phase.FORWARD) | coming_in(program)
    reuse = _Reuse(program, wholes)
    close = largest_layer(program) // 100 if options.reuse_bytes is None else options.reuse_bytes
    there = Counter(name for start in options.order if not start.reduces for name in start.names)
    for name, whole in wholes.items():
        chain = _forward_chain(whole)
        late = sorted({user for link in chain for user in _backward_users(link)})
        if not late:
            continue
        near = options.turn and reuse.distance(name) <= close
        if there[name] == 1 or name in options.keep or (near and not there[name]):
            held_count += 1
            continue
        spec = program.params[name]
        shard = program.input_nodes(InputRole.PARAMETER)[name]
        reaches = [link for link in chain[1:] if any(_backward_users(late_link) for late_link in _reach(link, chain))]
        visits = reuse.visits(name, late, close)
        if 1 < there[name] <= len(visits):
            visits = [*visits[: there[name] - 2], [*itertools.chain(*visits[there[name] - 2 :])]]
        for readers in visits:
            with program.graph.inserting_before(readers[0]):
                copies = {whole: add_gather(program, shard, spec, Phase.BACKWARD, like=readers[0])}
                for link in reaches:
                    copies[link] = program.repeat(link, copies, "regather")
            for user in readers:
                for link, copied in copies.items():
                    user.replace_input_with(link, copied)
            regathered += 1
    return {"regathered": regathered, "held": held_count}


class _Reuse:
    """The bytes of other weights that are read between two reads of a weight."""

    def __init__(self, program: Program, wholes: dict[str, fx.Node]) -> None:
        at = {node: i for i, node in enumerate(program.graph.nodes)}
        self._sizes = {
            name: program.params[name].numel * program.params[name].compute_dtype.itemsize for name in wholes
        }
        self._at = at
        self._readers = {name: self._positions(whole, at) for name, whole in wholes.items()}
        reads = sorted((r, n) for n, (f, b) in self._readers.items() for r in (*f, *b))
        self._order, self._names = [r for r, _ in reads], [n for _, n in reads]

    @staticmethod
    def _positions(whole: fx.Node, at: dict[fx.Node, int]) -> tuple[list[int], list[int]]:
        """Return the positions at which the forward and the backward read a weight, also through views of either."""
        links = dict.fromkeys(_forward_chain(whole))
        stack = list(links)
        while stack:
            views = [u for u in stack.pop().users if is_view(u) and u not in links]
            links |= dict.fromkeys(views)
            stack += views
        users = {u for link in links for u in link.users if u.op != "output" and not is_view(u)}
        forward = sorted(at[u] for u in users if info(u).phase is Phase.FORWARD)
        return forward, sorted(at[u] for u in users if info(u).phase is Phase.BACKWARD)

    def visits(self, name: str, late: list[fx.Node], close: int) -> list[list[fx.Node]]:
        """Return a weight's readers in the backward, in groups: a new one begins where more than `close` bytes of other
        weights are read in between.

        A layer that is recomputed long before its own backward gathers its weights twice.
        """
        visits = [[late[0]]]
        for earlier, later in itertools.pairwise(late):
            if self._between(name, self._at[earlier], self._at[later] + 1) > close:
                visits.append([])
            visits[-1].append(later)
        return visits

    def distance(self, name: str) -> int:
        """Return the bytes of other weights that are read between a weight's last read in the forward and its first in
        the backward.
        """
        forward, backward = self._readers[name]
        if not forward or not backward:
            return sum(self._sizes.values())
        return self._between(name, forward[-1], backward[0])

    def _between(self, name: str, low: int, high: int) -> int:
        """Return the bytes of other weights that are read after position `low` and before `high`."""
        reads = self._names[bisect.bisect_right(self._order, low) : bisect.bisect_left(self._order, high)]
        return sum(self._sizes[n] for n in {*reads} - {name})


def _forward_chain(whole: fx.Node) -> list[fx.Node]:
    """Return the gathered value and the forward's views and casts of it: cheap to recompute, and as large to keep."""
    chain = [whole]
    for link in chain:
        for user in sorted(link.users):
            only = all(a is link for a in user.all_input_nodes)
            if info(user).phase is Phase.FORWARD and only and (is_view(user) or is_cast(user)) and user not in chain:
                chain.append(user)
    return sorted(chain)


def _backward_users(link: fx.Node) -> list[fx.Node]:
    """Return the backward's readers of a value, without the program's output."""
    return [user for user in link.users if user.op != "output" and info(user).phase is Phase.BACKWARD]


def _reach(link: fx.Node, chain: list[fx.Node]) -> list[fx.Node]:
    """Return `link` and the nodes of the chain that are made from it."""
    nodes = [link]
    for other in chain:
        if any(a in nodes for a in other.all_input_nodes) and other not in nodes:
            nodes.append(other)
    return nodes
