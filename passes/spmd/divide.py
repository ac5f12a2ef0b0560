"""Lets the ranks of a mesh dimension compute one program together: values lie in parts, and collectives stand where they have to.

*Contract.* On entry the program is the plain single-device graph; the layouts of its parameters say which are divided, and how.
What every other value does follows from it, node by node, in order. A value is *whole* on each rank, a *part* (rank r has
the r-th of equal pieces along one axis), or a *share* (the sum over ranks, or their maximum, is the value). A node is computed in the way that
moves the fewest bytes. On exit all outputs are whole but the gradients, which lie as their parameters do.

    whole -> part     a slice                           part a -> part b   all_to_all
    part -> whole     all_gather                        share -> whole     all_reduce
                                                        share -> part      reduce_scatter

With Megatron's division of weights (columns, then rows: Shoeybi et al. 2019) this gives its two all-reduces a layer and direction; with
`sequence` they become a reduce_scatter and an all_gather each (Korthikanti et al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zgraph.errors import PassError
from zgraph.passes.analysis.axes import Axes, Axis, Shape
from zgraph.passes.analysis.decompositions import EXPANSIONS, expand
from zgraph.passes.contract import graph_pass
from zgraph.passes.spmd.sharding_rules import Label, Rule, argument, getitem_of, operands_of
from zgraph.program import collectives
from zgraph.program.aliases import is_view
from zgraph.program.node import NodeInfo, Phase, Role, info, set_info, tensor, tensors, value
from zgraph.program.program import Division, Fact, InputRole, Level, OutputRole, ParamSpec, Program

aten = torch.ops.aten

_BLIND = frozenset(
    [
        aten.native_layer_norm_backward, aten.native_group_norm, aten.native_group_norm_backward,
        aten._weight_norm_interface, aten._weight_norm_interface_backward,
        aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention_for_cpu_backward,
    ]
)  # fmt: skip
"""Operators whose kernels take it for granted how their operands lie in memory: plain PyTorch has seen to it before it calls them."""


@dataclass(frozen=True)
class Part:
    """Each rank has an equal piece of this dimension, along this one of its axes (which others of its dimensions may have as well)."""

    axis: Axis
    dim: int


@dataclass(frozen=True)
class Share:
    """Each rank's values are a term of the whole's sum, or of its maximum."""

    how: str


State = Part | Share | None
"""How a value lies over the ranks; None: whole on each."""


@dataclass(frozen=True)
class DivideOptions:
    """`dim` is the mesh dimension; with `sequence`, sums over ranks may leave their result in parts."""

    dim: str = "tp"
    sequence: bool = False


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
    return Divider(program, options).run()


Build = Callable[["Divider", fx.Node, list[fx.Node], NodeInfo], "fx.Node | tuple[fx.Node, ...]"]
"""Builds what a node gives (each of its results, where it has several) of its operands, as they lie."""


@dataclass(frozen=True)
class Way:
    """One way to compute a node: what its operands are needed as, what its results then are; and what builds it, where it is not the
    operator itself, of a rank's parts."""

    operands: tuple[State, ...]
    results: tuple[State, ...]
    build: Build | None = None


def _drops(node: fx.Node) -> bool:
    """Is this a dropout that leaves some values in?"""
    return node.target is aten.native_dropout.default and argument(node, 1) < 1 and argument(node, 2) is not False


def _in_what(state: State) -> object:
    """The axis of a part, which views have in other dimensions; else the state."""
    return state.axis if isinstance(state, Part) else state


_WEIGHT = 1000.0  # how much rather than an activation's bytes those of a weight stay where they are


class Divider:
    """Decides and builds for one program. What is computed from weights is divided along the axes in `along` without being told to by
    how a weight lies, and rather than along others; `batch` are the axes of the rows of inputs, which are not. Of a `folded` axis rank r
    of n has the r-th and the r-th last of 2n pieces: of rows that see what is before them, each rank's then see as much as another's."""

    def __init__(
        self,
        program: Program,
        options: DivideOptions,
        axes: Axes | None = None,
        along: frozenset[Axis] = frozenset(),
        batch: frozenset[Axis] = frozenset(),
        folded: frozenset[Axis] = frozenset(),
    ) -> None:
        self.program, self.options = program, options
        self.ranks = program.mesh[options.dim]
        self.axes = axes or Axes(program)
        self.along, self.batch, self.folded = along, batch, folded
        self.trained: set[fx.Node] = set()  # parameters, and what is computed from them
        self.states: dict[fx.Node, list[State]] = {}
        self.weights: set[fx.Node] = set()  # parameters, and views of them
        self.wanted: dict[fx.Node, State] = {}
        self.ways: dict[fx.Node, Way] = {}
        self.counts = {"all_gather": 0, "all_reduce": 0, "reduce_scatter": 0, "all_to_all": 0, "bytes": 0}
        self._paid: set[tuple[fx.Node, object]] = set()  # (what is made once serves all of its readers)
        self._fakes = {n: value(n) for n in program.graph.nodes}
        self._arguments = {n: (n.args, n.kwargs) for n in program.graph.nodes}
        self._converted: dict[tuple[fx.Node, State, Phase], fx.Node] = {}
        self._index: fx.Node | None = None
        self._both: fx.Node | None = None

    def run(self) -> dict[str, int]:
        own = self._parameters()
        self._decide(own)
        turned = False
        for node in self.program.nodes:
            if node._erased:
                continue
            if node.op not in ("placeholder", "output") and not turned and info(node).phase is Phase.BACKWARD:
                turned = True
                self._turn(node)
            if node.op == "placeholder":
                self._enter(node, own.get(node))
            elif (at := getitem_of(node)) is not None:
                node.meta["val"] = value(node.args[0])[at]  # type: ignore[arg-type]
            elif node.op != "output":
                self._build(node, self.ways[node])
        self._leave(own)
        self.program.graph.eliminate_dead_code()  # (copies that were made again elsewhere)
        self._fill()
        return self.counts

    def _fill(self) -> None:
        """Between a collective's start and its wait runs what came before it and is not needed for it: gradients of weights, while those of
        activations are summed (as Megatron-LM does by hand)."""
        region: list[fx.Node] = []
        for node in self.program.nodes:
            if not (collectives.is_start(node) and info(node).role is Role.EXCHANGE):
                region = [] if collectives.is_wait(node) or node.op == "placeholder" else [*region, node]
                continue
            needed = {node}
            for earlier in reversed(region):
                if any(user in needed for user in earlier.users):
                    needed.add(earlier)
            at = node
            for earlier in region:
                if earlier not in needed and info(earlier).phase is info(node).phase:
                    at.append(earlier)
                    at = earlier
            region = [n for n in region if n not in needed]

    def _decide(self, own: Mapping[fx.Node, Part]) -> None:
        """How each node is computed, while all fake values are still whole."""
        self._want(own)
        parameters = set(self.program.input_nodes(InputRole.PARAMETER).values())
        node = next(iter(self.program.graph.nodes))
        while node.op != "output":
            following = node.next
            if not self.trained.isdisjoint(node.all_input_nodes):
                self.trained.add(node)
            if node.op == "placeholder":
                self.states[node] = [own.get(node)]
                if node in own:
                    self.weights.add(node)
                if node in parameters:
                    self.trained.add(node)
            elif (at := getitem_of(node)) is not None:
                self.states[node] = [self.states[node.args[0]][at]]  # type: ignore[index]
            elif (first := self._expanded(node)) is not None:
                following = first
            else:
                self.ways[node] = way = self._way(node)
                self.states[node] = list(way.results)
                for operand, target in zip(operands_of(node), way.operands, strict=True):
                    self._paid.add((self._origin(operand), _in_what(target)))
                    if operand in self.weights and is_view(node):
                        self.weights.add(node)
            node = following

    # -- inputs and outputs -------------------------------------------------------------------------------------------
    def _parameters(self) -> dict[fx.Node, Part]:
        found = {}
        for name, node in self.program.input_nodes(InputRole.PARAMETER).items():
            division = self.program.params[name].division
            if division is not None and division.mesh_dim == self.options.dim:
                found[node] = Part(self._axis_of(name, node, division), division.dim)
        return found

    def _axis_of(self, name: str, node: fx.Node, division: Division) -> Axis:
        outer = 1
        for axis in self.axes.shape(node)[division.dim]:
            if outer == division.blocks and self._divides(axis):
                return axis
            outer *= self.axes.size(axis)
        raise PassError(
            f"parameter {name!r} can't be divided into {self.ranks} parts along dimension {division.dim}",
            why=f"it is made of {' x '.join(str(self.axes.size(a)) for a in self.axes.shape(node)[division.dim]) or '1'}",
        )

    def _want(self, own: Mapping[fx.Node, Part]) -> None:
        """How the gradients are to lie, and what is on the way to them."""
        by_name = {p.name: n for p, n in self.program.input_items() if p.role is InputRole.PARAMETER}
        for port, node in self.program.output_items():
            if port.role is OutputRole.GRADIENT and port.of is InputRole.PARAMETER and port.name in by_name:
                state = own.get(by_name[port.name])
                stack = [node]
                while stack:
                    at = stack.pop()
                    if at in self.wanted or at.op != "call_function":
                        continue
                    self.wanted[at] = state
                    if is_view(at) or at.target in _PASSED_ON:
                        stack += at.all_input_nodes

    def _enter(self, node: fx.Node, part: Part | None) -> None:
        """Let a divided parameter come in as a rank holds it."""
        if part is None:
            return
        spec = self._spec(node)
        old = tensor(node)
        with self.program.fake_mode:
            node.meta["val"] = torch.empty_strided(spec.shape, spec.stride, dtype=old.dtype, device=old.device)
        assert spec.division is not None
        if spec.division.blocks > 1 and node.users:
            # Held in plain pieces, which every checkpoint can describe, it is made whole and cut again into parts of its blocks.
            users = sorted(node.users)
            record = info(node).replace(param=None, made_by="divide", phase=info(users[0]).phase)
            with self.program.graph.inserting_before(users[0]):
                whole = self._joined(node, spec.division.dim, 1, record)
                self._stands_for(whole, node, [None])
                mine = self._slice(whole, self.axes.shape(node), part, record)
            self._stands_for(mine, node, [part])
            self.weights.add(mine)
            for user in users:
                user.replace_input_with(node, mine)

    def _held(self, gradient: fx.Node, part: Part, division: Division, output: fx.Node) -> fx.Node:
        """A gradient in the pieces that ranks hold of a parameter that is made of several blocks."""
        whole = self._as(gradient, None, output)
        record = info(whole).replace(role=Role.COMPUTE, param=None, made_by="divide", mesh_dim=None, stream="compute")
        sizes, d = list(tensor(whole).shape), division.dim
        with self.program.graph.inserting_before(output):
            opened = self._viewed(whole, [*sizes[:d], self.ranks, sizes[d] // self.ranks, *sizes[d + 1 :]], record)
            return self._viewed(
                self._picked(opened, d, record), [s // self.ranks if i == d else s for i, s in enumerate(sizes)], record
            )

    def _spec(self, node: fx.Node) -> ParamSpec:
        return self.program.params[self.program.inputs[self.program.placeholders().index(node)].name]

    def _turn(self, first: fx.Node) -> None:
        """Make whole what the forward gives, in front of the first node of the backward."""
        with self.program.graph.inserting_before(first):
            anchor = self.program.graph.call_function(aten.sym_size.int, ())  # (a reader in the forward, removed below)
        set_info(anchor, NodeInfo(phase=Phase.FORWARD))
        for port, node in self.program.output_items():
            if port.role is not OutputRole.GRADIENT and info(node).phase is Phase.FORWARD and node in self.states:
                self._as(node, None, anchor)
        self.program.graph.erase_node(anchor)

    def _leave(self, own: Mapping[fx.Node, Part]) -> None:
        by_name = {p.name: n for p, n in self.program.input_items() if p.role is InputRole.PARAMETER}
        output = self.program.output_node()
        given: list[fx.Node | None] = []
        for port, node in self.program.output_items():
            state: State = None
            if port.role is OutputRole.GRADIENT and port.of is InputRole.PARAMETER:
                state = own.get(by_name[port.name]) if port.name in by_name else None
            division = self.program.params[port.name].division if state is not None else None
            if division is not None and isinstance(state, Part) and division.blocks > 1:
                given.append(self._held(node, state, division, output))
            else:
                given.append(self._as(node, state, output) if isinstance(node, fx.Node) else node)
        output.args = (tuple(given),)

    # -- one node -----------------------------------------------------------------------------------------------------
    def _way(self, node: fx.Node) -> Way:
        operands = operands_of(node)
        if collectives.is_wait(
            node
        ):  # (between a start over other ranks and its wait nothing can be done with the value)
            state = self.states[operands[0]][0]
            return Way((state,), (state,))
        rule = self.axes.rules.get(node)
        whole = Way(self._whole(rule, operands), (None,) * len(self.axes.shapes(node)))
        ways = [whole] if rule is None else [*self._ways(node, rule, operands), whole]
        if _drops(node) and isinstance(state := self.states[operands[0]][0], Part):
            ways.insert(0, Way((state,), (state, state), Divider._dropout))
        if node in self.wanted:
            # Gradients of weights are sums over a sequence, however short it is: else all of it would be on each rank.
            sums = [w for w in ways if any(isinstance(s, Part) and s.axis in self.along for s in w.operands)]
            ways = sums or ways
        return min(ways, key=lambda w: self._cost(node, operands, w))

    def _whole(self, rule: Rule | None, operands: Sequence[fx.Node]) -> tuple[State, ...]:
        """What operands are needed as for whole results: whole, but for those of which at most the shape is read."""
        states = [self.states[o][0] for o in operands]
        kept = [
            rule is not None and i in rule.unread and (isinstance(s, Share) or not any(rule.operands[i]))
            for i, s in enumerate(states)
        ]
        return tuple(s if k else None for s, k in zip(states, kept, strict=True))

    def _build(self, node: fx.Node, way: Way) -> None:
        operands = operands_of(node)
        given = [self._as(o, s, node) for o, s in zip(operands, way.operands, strict=True)]
        if getattr(node.target, "overloadpacket", None) in _BLIND:
            given = [self._laid_out(g, self._fakes[o], node) for g, o in zip(given, operands, strict=True)]
        if way.build is not None:
            self._by_hand(node, way, way.build, given)
            return
        new = any(g is not o or value(g) is not self._fakes.get(o) for g, o in zip(given, operands, strict=True))
        left = iter(given)
        node.args = fx.node.map_arg(node.args, lambda _: next(left))  # type: ignore[assignment]
        node.kwargs = fx.node.map_arg(node.kwargs, lambda _: next(left))  # type: ignore[assignment]
        if any(isinstance(s, Part) for s in (*way.operands, *way.results)):
            self._localise(node, way)
            new = True
        if new:
            self._evaluate(node)

    def _ways(self, node: fx.Node, rule: Rule, operands: Sequence[fx.Node]) -> list[Way]:
        states = [self.states[o][0] for o in operands]
        found: list[Way] = []
        linear = [states[i] for i in rule.linear]
        if linear and all(isinstance(s, Share) and s.how == "sum" for s in linear):
            given = tuple(Share("sum") if i in rule.linear else None for i in range(len(operands)))
            found.append(Way(given, (Share("sum"),) * len(rule.results)))
        candidates = {s.axis: None for s in states if isinstance(s, Part)}
        wish = self.wanted.get(node)
        if isinstance(wish, Part):
            candidates[wish.axis] = None
        if self.options.sequence:
            for operand, state in zip(operands, states, strict=True):
                shape = self.axes.shape(operand)
                if isinstance(state, Share) and shape[:-1] and shape[-1]:  # (statistics of rows are not worth it)
                    candidates |= {a: None for dim in shape[:-1] for a in dim if self._divides(a)}
        if node in self.trained:
            candidates |= dict.fromkeys(self.along)
        for axis in candidates:
            found += self._along(node, rule, operands, axis)
        parted = any(isinstance(s, Part) for s in states)
        if self.along and parted and node not in self.wanted and all(self._cost(node, operands, w)[0] for w in found):
            # Where parts of a sequence do not do (in attention), parts of something else may.
            every = {a: None for x in rule.sizes for a in self.axes.under(node, rule, x) if self._divides(a)}
            for axis in every:
                if axis not in candidates and axis not in self.batch:
                    found += self._along(node, rule, operands, axis)
        return found

    def _divides(self, axis: Axis) -> bool:
        return self.axes.size(axis) > 0 and self.axes.size(axis) % self.ranks == 0

    def _along(self, node: fx.Node, rule: Rule, operands: Sequence[fx.Node], axis: Axis) -> list[Way]:
        """The ways to compute a node in parts along an axis: one for each label that it is under."""
        labels = [x for x in rule.sizes if axis in self.axes.under(node, rule, x)]
        return [way for x in labels for way in self._along_label(node, rule, operands, axis, x)]

    def _along_label(
        self, node: fx.Node, rule: Rule, operands: Sequence[fx.Node], axis: Axis, label: Label
    ) -> list[Way]:
        if label in rule.whole:
            return self._indexed(node, operands, axis) if label == "rows" else []
        given: list[State] = []
        for i, (operand, dims) in enumerate(zip(operands, rule.operands, strict=True)):
            here = next((d for d, dim in enumerate(dims) if label in dim), None)
            if i in rule.unread:
                state = self.states[operand][0]
                if any(dims) and (here is None or state != Part(axis, here)):
                    return []  # (its shape is the result's)
                given.append(state)
                continue
            if here is not None and self.axes.shape(operand)[here].count(axis) != 1:
                return []
            given.append(None if here is None else Part(axis, here))
        parted = any(isinstance(s, Part) for i, s in enumerate(given) if i not in rule.unread)
        results: list[State] = []
        for i, (shape, dims) in enumerate(zip(self.axes.shapes(node), rule.results, strict=True)):
            here = next((d for d, dim in enumerate(dims) if label in dim), None)
            if here is None:
                results.append(Share(rule.reduction) if parted and i not in rule.alike else None)
                continue
            if shape[here].count(axis) != 1:
                return []
            results.append(Part(axis, here))
        return [Way(tuple(given), tuple(results))]

    def _indexed(self, node: fx.Node, operands: Sequence[fx.Node], axis: Axis) -> list[Way]:
        """The way to look up, or to put, only what is in a rank's part of the dimension that is indexed."""
        if node.target not in INDEXED or axis in self.folded:
            return []  # (of a folded axis a rank's part is no range)
        lead = _LEADS.get(node.target)
        at = 0 if lead is None else argument(node, lead) % len(self.axes.shapes(node)[0])
        read, others = Part(axis, at), (None,) * (len(operands) - 1)
        table = node if node.target not in _LOOK_UP else operands[0]
        if self.axes.shapes(table)[0][at][:1] != (axis,):
            return []
        if node.target in _LOOK_UP:
            return [Way((read, *others), (Share("sum"),), INDEXED[node.target])]
        first: State = None if node.target is aten.embedding_dense_backward.default else read
        return [Way((first, *others), (read,), INDEXED[node.target])]

    def _cost(self, node: fx.Node, operands: Sequence[fx.Node], way: Way) -> tuple[float, int]:
        """Bytes that a rank sends; of equals the way that computes the least."""
        total = 0.0
        for operand, state in {(o, s): None for o, s in zip(operands, way.operands, strict=True)}:
            weight = _WEIGHT if operand in self.weights else 1.0
            total += weight * self._moved(operand, self.states[operand][0], state)
        if node in self.wanted and len(way.results) == 1:
            total += self._moved(node, way.results[0], self.wanted[node])
        elif (
            self.along
        ):  # (a sum over ranks is wanted in parts of the sequence; of the only operand, it is there already)
            spread = [i for i, s in enumerate(way.results) if isinstance(s, Share)]
            if not any(isinstance(s, Share) for s in way.operands):
                made = list(tensors(node))
                total += sum(self._bytes(made[i]) for i in spread if self._runs_along(node, i))
        return total, sum(s is None for s in way.results) + sum(isinstance(s, Share) for s in way.results)

    def _runs_along(self, node: fx.Node, at: int) -> bool:
        return any(axis in self.along for dim in self.axes.shapes(node)[at] for axis in dim)

    def _moved(self, node: fx.Node, state: State, target: State) -> float:
        """Bytes that a rank sends to have a value in another state."""
        if (
            state == target
            or state is None
            or (self._origin(node) if node in self.states else node, _in_what(target)) in self._paid
        ):
            return 0.0
        nbytes = sum(self._bytes(t) for t in tensors(node))
        if isinstance(state, Share):
            return nbytes * (1 if isinstance(target, Part) else 2)
        return nbytes / self.ranks if isinstance(target, Part) else nbytes

    @staticmethod
    def _bytes(t: torch.Tensor) -> float:
        return float(math.prod(s if isinstance(s, int) else 1 for s in t.shape) * t.element_size())

    # -- from one state to another ------------------------------------------------------------------------------------
    def _as(self, node: fx.Node, target: State, user: fx.Node) -> fx.Node:
        """A value in another state, made in front of its `user` or, where it is a sum over ranks, as soon as it can be."""
        state = self.states[node][0]
        if state == target:
            return node
        phase = info(user).phase if user.op != "output" else info(node).phase
        reduces = isinstance(state, Share)
        grows = (
            isinstance(state, Part) and target is None
        )  # (what is made for the forward is then not kept for the backward)
        key = (node, target, phase if grows else info(node).phase)
        if key in self._converted:
            return self._converted[key]
        if (way := self._replayable(node, state, target)) is not None:
            self._converted[key] = made = self._replay(node, way, user)
            return made
        if isinstance(target, Part) and (state is None or reduces) and (node, None, key[2]) in self._converted:
            node, state, reduces = self._converted[node, None, key[2]], None, False
        at = self.program.behind(node).next if reduces else user
        record = info(node).replace(
            role=Role.COMPUTE, made_by="divide", param=None, copy_of=None, phase=info(node).phase if reduces else phase
        )
        shape = self.axes.shape(node)
        with self.program.graph.inserting_before(at):
            if state is None:
                assert isinstance(target, Part)
                made = self._slice(node, shape, target, record)
            elif isinstance(state, Share):
                if isinstance(target, Part):
                    made = self._reduce_scatter(node, shape, target, record)
                else:
                    made = self._all_reduce(node, state.how, record)
            elif isinstance(target, Part):
                made = self._all_to_all(node, shape, state, target, record)
            else:
                made = self._all_gather(node, shape, state, record)
        if reduces and phase is info(node).phase:
            self._wait_late(made, user)
        self._converted[key] = made
        self._stands_for(made, node, [target])
        return made

    def _wait_late(self, made: fx.Node, user: fx.Node) -> None:
        """Let what is between a sum's start and its first reader run meanwhile."""
        late = [made]
        while not collectives.is_wait(late[0]):
            late.insert(0, late[0].all_input_nodes[0])
        for node in late:
            user.prepend(node)

    def _stands_for(self, made: fx.Node, node: fx.Node, states: list[State]) -> None:
        """A new node has the value of another, which lies so."""
        self.states[made] = states
        self.axes.alias(made, node)
        self._fakes[made] = self._fakes[node]

    def _source(self, node: fx.Node) -> fx.Node | None:
        """What a view that shows all of another value, and more than once perhaps, is a view of; and what a copy of one that shows it more
        than once is a copy of."""
        copied = node.target is aten.clone.default
        if not (is_view(node) or copied) or len(operands_of(node)) != 1 or node not in self.axes.rules:
            return None
        source = operands_of(node)[0]
        if copied:
            return source if self._size(self._origin(source)) < self._size(node) else None
        return source if self._size(source) <= self._size(node) else None

    def _replayable(self, node: fx.Node, state: State, target: State) -> Way | None:
        """How a view is made of what it shows in that other state (so that all views of one value share its transfer)."""
        source = self._source(node)
        if source is None or state is None or type(self.states[source][0]) is not type(state):
            return None
        if target is None:
            return Way((None,), (None,))
        assert isinstance(target, Part)
        ways = self._along(node, self.axes.rules[node], [source], target.axis)
        return next((w for w in ways if w.results == (target,) and isinstance(w.operands[0], Part)), None)

    def _replay(self, node: fx.Node, way: Way, user: fx.Node) -> fx.Node:
        source = operands_of(node)[0]
        converted = self._as(source, way.operands[0], user)
        args, kwargs = self._arguments[node]
        given: tuple[Any, ...] = fx.node.map_arg(args, lambda _: converted)  # type: ignore[assignment]
        phase = info(user).phase if user.op != "output" else info(node).phase
        with self.program.graph.inserting_before(user):
            made = self.program.graph.create_node("call_function", node.target, given, dict(kwargs), name=node.name)
        set_info(made, info(node).replace(made_by="divide", phase=phase))
        made.meta["val"] = self._fakes[node]
        self._stands_for(made, node, list(way.results))
        if way.results[0] is not None:
            self._localise(made, way)
        self._evaluate(made)
        return made

    def _size(self, node: fx.Node) -> int:
        return math.prod(s if isinstance(s, int) else 1 for s in self._fakes[node].shape)

    def _origin(self, node: fx.Node) -> fx.Node:
        """The value that is sent where a view is needed in another state."""
        while (source := self._source(node)) is not None and type(self.states[source][0]) is type(self.states[node][0]):
            node = source
        return node

    def _call(self, target: object, args: tuple[object, ...], record: NodeInfo, name: str, **kwargs: object) -> fx.Node:
        return self.program.call(target, args, record, name=name, kwargs=kwargs)  # type: ignore[arg-type]

    def _start(self, target: object, args: tuple[object, ...], record: NodeInfo, name: str) -> fx.Node:
        dim = self.options.dim
        dtype = tensor(args[0]).dtype  # type: ignore[arg-type]
        if dtype is torch.bool:  # (Inductor would send integers of eight bytes, and not wait for them)
            args = (self._call(_CONVERT, (args[0], torch.uint8), record, f"{name}_as_bytes"), *args[1:])
        there = record.replace(role=Role.EXCHANGE, mesh_dim=dim, stream=f"comm:{dim}")
        start = self._call(target, (*args, dim), there, name)
        kind = collectives.kind(start)
        self.counts[kind] += 1
        self.counts["bytes"] += int(self._bytes(tensor(start.all_input_nodes[0])))
        wait = self._call(collectives.WAIT, (start,), there.replace(role=Role.WAIT), f"{name}_wait")
        return wait if dtype is not torch.bool else self._call(_CONVERT, (wait, dtype), record, name)

    def _packed(self, node: fx.Node, record: NodeInfo) -> fx.Node:
        if tensor(node).is_contiguous():
            return node
        return self._call(aten.clone.default, (node,), record, "packed", memory_format=torch.contiguous_format)

    def _laid_out(self, node: fx.Node, captured: Any, user: fx.Node) -> fx.Node:
        """A value laid out as it was captured, as far as a kernel may read it by that."""
        if not isinstance(captured, torch.Tensor) or captured.dim() == 0:
            return node
        now = tensor(node)
        dense, rows = captured.is_contiguous(), captured.stride(-1) == 1
        if (not dense or now.is_contiguous()) and (not rows or now.stride(-1) == 1 or now.shape[-1] == 1):
            return node
        with self.program.graph.inserting_before(user):
            return self._packed(node, info(user).replace(made_by="divide"))

    def _viewed(self, node: fx.Node, shape: Sequence[int], record: NodeInfo) -> fx.Node:
        if tuple(tensor(node).shape) == tuple(shape):
            return node
        return self._call(aten.view.default, (self._packed(node, record), list(shape)), record, "viewed")

    def _moved_dim(self, node: fx.Node, source: int, to: int, record: NodeInfo) -> fx.Node:
        order = [d for d in range(tensor(node).dim()) if d != source]
        order.insert(to, source)
        if order == sorted(order):
            return node
        return self._call(aten.permute.default, (node, order), record, "moved")

    def _where(self, shape: Shape, part: Part) -> tuple[int, int, int]:
        """The dimension of a part, and the sizes of the axes outside and inside of its own."""
        dim = shape[part.dim]
        at = dim.index(part.axis)
        outer, inner = (math.prod(self.axes.size(a) for a in some) for some in (dim[:at], dim[at + 1 :]))
        return part.dim, outer, inner

    def _opened(self, node: fx.Node, shape: Shape, part: Part, pieces: int, record: NodeInfo) -> tuple[fx.Node, int]:
        """A view in which the pieces of a part's axis have a dimension of their own, in front of what is in each; and which."""
        d, outer, inner = self._where(shape, part)
        sizes = list(tensor(node).shape)
        each = sizes[d] // (outer * inner * pieces) * inner
        return self._viewed(node, [*sizes[:d], outer, pieces, each, *sizes[d + 1 :]], record), d + 1

    def _by_rank(self, node: fx.Node, shape: Shape, part: Part, record: NodeInfo) -> tuple[fx.Node, int]:
        """Likewise, with one dimension for the ranks, in front of what each has."""
        if part.axis not in self.folded:
            return self._opened(node, shape, part, self.ranks, record)
        opened, at = self._opened(node, shape, part, 2 * self.ranks, record)
        first, last = (
            self._call(aten.slice.Tensor, (opened, at, begin, begin + self.ranks), record, "half")
            for begin in (0, self.ranks)
        )
        back = self._call(torch.ops.prims.rev.default, (last, [at]), record, "from_behind")
        both = [self._call(aten.unsqueeze.default, (x, at + 1), record, "half") for x in (first, back)]
        folded = self._call(aten.cat.default, (both, at + 1), record, "folded")
        sizes = list(tensor(folded).shape)
        return self._viewed(folded, [*sizes[: at + 1], 2 * sizes[at + 2], *sizes[at + 3 :]], record), at

    def _in_order(self, node: fx.Node, at: int, record: NodeInfo) -> fx.Node:
        """Of a folded axis: what ranks have, by rank in a dimension and the next, as it stands in the whole."""
        sizes = list(tensor(node).shape)
        opened = self._viewed(node, [*sizes[: at + 1], 2, sizes[at + 1] // 2, *sizes[at + 2 :]], record)
        first, last = (self._call(aten.select.int, (opened, at + 1, half), record, "half") for half in (0, 1))
        back = self._call(torch.ops.prims.rev.default, (last, [at]), record, "from_behind")
        return self._call(aten.cat.default, ([first, back], at), record, "in_order")

    def _slice(self, node: fx.Node, shape: Shape, part: Part, record: NodeInfo) -> fx.Node:
        pieces = 2 * self.ranks if part.axis in self.folded else self.ranks
        opened, at = self._opened(node, shape, part, pieces, record)
        return self._viewed(self._picked(opened, at, record), self._local(node, part), record)

    def _picked(self, opened: fx.Node, dim: int, record: NodeInfo) -> fx.Node:
        """This rank's of the parts that stand along a dimension: one, or the two of a folded axis."""
        place = self._place() if tensor(opened).shape[dim] == self.ranks else self._places()
        return self._call(aten.index.Tensor, (opened, [*([None] * dim), place]), record, "mine")

    def _local(self, whole: fx.Node, part: Part) -> list[int]:
        """The shape of a whole value's part."""
        return [s // self.ranks if i == part.dim else s for i, s in enumerate(tensor(whole).shape)]

    def _place(self) -> fx.Node:
        """This rank's position, as a tensor of one element."""
        if self._index is None:
            self._index = self.program.position(self.options.dim, "divide")
        return self._index

    def _places(self) -> fx.Node:
        """This rank's two positions in a folded axis."""
        if self._both is None:
            place = self._place()
            record = info(place)
            with self.program.graph.inserting_after(place):
                back = self._call(aten.sub.Tensor, (place, 2 * self.ranks - 1), record, "from_behind")
            with self.program.graph.inserting_after(back):
                back = self._call(aten.neg.default, (back,), record, "from_behind")
            with self.program.graph.inserting_after(back):
                self._both = self._call(aten.cat.default, ([place, back],), record, "places")
        return self._both

    def _all_reduce(self, node: fx.Node, how: str, record: NodeInfo) -> fx.Node:
        return self._start(collectives.ALL_REDUCE, (self._packed(node, record), how), record, f"{node.name}_{how}")

    def _all_gather(self, node: fx.Node, shape: Shape, part: Part, record: NodeInfo) -> fx.Node:
        d, outer, _ = self._where(shape, part)
        return self._joined(node, d, outer, record, part.axis in self.folded)

    def _joined(self, node: fx.Node, d: int, outer: int, record: NodeInfo, folded: bool = False) -> fx.Node:
        """The ranks' parts behind one another in dimension d, in each of the `outer` blocks that it has."""
        local = list(tensor(node).shape)
        source, at = node, 0
        if outer > 1 or d or folded:
            source, at = self._viewed(node, [*local[:d], outer, local[d] // outer, *local[d + 1 :]], record), d + 1
        opened = list(tensor(source).shape)
        whole = self._start(
            collectives.ALL_GATHER, (self._packed(source, record), self.ranks), record, f"{node.name}_whole"
        )
        if at:
            whole = self._moved_dim(self._viewed(whole, [self.ranks, *opened], record), 0, at, record)
        if folded:
            whole = self._in_order(whole, at, record)
        return self._viewed(whole, [s * self.ranks if i == d else s for i, s in enumerate(local)], record)

    def _reduce_scatter(self, node: fx.Node, shape: Shape, part: Part, record: NodeInfo) -> fx.Node:
        local = self._local(node, part)
        opened, at = self._by_rank(node, shape, part, record)
        front = self._packed(self._moved_dim(opened, at, 0, record), record)
        sizes = list(tensor(front).shape)
        flat = self._viewed(front, [sizes[0] * sizes[1], *sizes[2:]], record)
        mine = self._start(collectives.REDUCE_SCATTER, (flat, "sum", self.ranks), record, f"{node.name}_part")
        return self._viewed(mine, local, record)

    def _all_to_all(self, node: fx.Node, shape: Shape, one: Part, other: Part, record: NodeInfo) -> fx.Node:
        """Parts of one kind become those of another."""
        d, outer, inner = self._where(shape, one)
        sizes = list(tensor(node).shape)
        e = other.dim
        if d == e:  # (of one dimension: made whole, then cut)
            whole = self._all_gather(node, shape, one, record)
            self._stands_for(whole, node, [None])
            return self._slice(whole, shape, other, record)
        opened, at = self._by_rank(node, shape, other, record)
        front = self._packed(self._moved_dim(opened, at, 0, record), record)
        swapped = list(tensor(front).shape)
        flat = self._viewed(front, [swapped[0] * swapped[1], *swapped[2:]], record)
        even = [swapped[1]] * self.ranks
        came = self._start(collectives.ALL_TO_ALL, (flat, even, even), record, f"{node.name}_turned")
        mine = [s // self.ranks if i == e else s for i, s in enumerate(sizes)]
        part = sizes[d] // (outer * inner)
        spread = self._viewed(came, [self.ranks, *mine[:d], outer, part * inner, *mine[d + 1 :]], record)
        joined = self._moved_dim(spread, 0, d + 1, record)
        if one.axis in self.folded:
            joined = self._in_order(joined, d + 1, record)
        return self._viewed(joined, [s * self.ranks if i == d else s for i, s in enumerate(mine)], record)

    # -- what an operator's arguments say of sizes --------------------------------------------------------------------
    def _localise(self, node: fx.Node, way: Way) -> None:
        """Let the sizes among a node's arguments be those of a rank's parts."""
        at = SIZES.get(node.target)
        if node.target is collectives.ALL_TO_ALL and way.results[0] is not None:
            if isinstance(way.results[0], Part) and way.results[0].dim == 0:
                for place in (1, 2):
                    sizes: list[int] = argument(node, place)
                    node.update_arg(place, [n // self.ranks for n in sizes])
            return
        if at is None and node.target not in _CUTS:
            return
        shapes = [list(t.shape) for t in tensors(node)]
        local = [
            [n // self.ranks if d == s.dim else n for d, n in enumerate(shapes[i])]
            if isinstance(s, Part)
            else list(shapes[i])
            for i, s in enumerate(way.results)
        ]
        if at is not None:
            node.update_arg(at, local[0])
        else:
            self._localise_cut(node, way, shapes, local)

    def _localise_cut(self, node: fx.Node, way: Way, shapes: list[list[int]], local: list[list[int]]) -> None:
        if node.target is aten.slice.Tensor:
            dim = argument(node, 1, 0) % len(shapes[0])
            if shapes[0][dim] != local[0][dim]:
                start, end = argument(node, 2) or 0, argument(node, 3)
                node.update_arg(2, start // self.ranks)
                if end is not None and end < 2**31:
                    node.update_arg(3, end // self.ranks)
            return
        dim = argument(node, 2, 0) % len(shapes[0])
        if node.target is aten.split.Tensor:
            node.update_arg(1, local[0][dim])
        else:
            node.update_arg(1, [shape[dim] for shape in local])

    def _evaluate(self, node: fx.Node) -> None:
        try:
            node.meta["val"] = self.program.evaluate(node)
        except (RuntimeError, ValueError):  # (a view of what now lies in another order)
            if node.target is not aten.view.default:
                raise
            source: fx.Node = node.args[0]  # type: ignore[assignment]
            with self.program.graph.inserting_before(node):
                packed = self._packed(source, info(node).replace(made_by="divide"))
            if packed is not source:
                self._stands_for(packed, source, self.states[source])
            node.update_arg(0, packed)
            node.meta["val"] = self.program.evaluate(node)

    # -- operators that are made of others where they have to be ------------------------------------------------------
    def _expanded(self, node: fx.Node) -> fx.Node | None:
        """The first of the nodes that now stand for one that can be divided only so; None if it stays."""
        expansion = EXPANSIONS.get(node.target)
        rule = self.axes.rules.get(node)
        if expansion is None or rule is None:
            return None
        states = [self.states[o][0] for o in operands_of(node)]
        needed = any(
            isinstance(state, Part) and x in rule.whole and state.axis in self.axes.under(node, rule, x)
            for state, dims in zip(states, rule.operands, strict=True)
            for x in (dims[state.dim] if isinstance(state, Part) else ())
        )
        if not needed:
            return None
        before = node.prev
        return before.next if expand(self.program, node, expansion, self._note, self._stand_for) else None

    def _note(self, node: fx.Node) -> None:
        self.axes.add(node)
        self._fakes[node] = value(node)
        self._arguments[node] = node.args, node.kwargs

    def _stand_for(self, made: fx.Node, old: fx.Node) -> None:
        self.axes.merge(made, old)
        if old in self.wanted:
            self.wanted[made] = self.wanted[old]

    # -- what is not the operator itself ------------------------------------------------------------------------------
    def _by_hand(self, node: fx.Node, way: Way, build: Build, given: list[fx.Node]) -> None:
        with self.program.graph.inserting_before(node):
            made = build(self, node, given, info(node).replace(made_by="divide"))
        picks = {node: made} if isinstance(made, fx.Node) else {u: made[argument(u, 1)] for u in node.users}
        for old, new in picks.items():
            old.replace_all_uses_with(new)
            self._stands_for(new, old, [way.results[getitem_of(old) or 0]])
            self.program.graph.erase_node(old)
        if node not in picks:
            self.program.graph.erase_node(node)

    def _dropout(self, node: fx.Node, given: list[fx.Node], record: NodeInfo) -> tuple[fx.Node, fx.Node]:
        """Each rank draws for all, as one process would, and keeps what is its own."""
        whole, like = self._fakes[operands_of(node)[0]], tensor(given[0])
        rate: float = argument(node, 1)
        sizes = {"dtype": torch.bool, "device": like.device}
        places = self._call(aten.empty.memory_format, (list(whole.shape),), record, "places", **sizes)
        drawn = self._call(aten.bernoulli.p, (places, 1 - rate), record, "drawn")
        part = self.states[operands_of(node)[0]][0]
        assert isinstance(part, Part)
        mask = self._slice(drawn, self.axes.shape(operands_of(node)[0]), part, record)
        kept = self._call(aten.mul.Tensor, (given[0], mask), record, "kept")
        return self._call(aten.mul.Scalar, (kept, 1 / (1 - rate)), record, node.name), mask

    # -- by index -----------------------------------------------------------------------------------------------------

    def _near(self, index: fx.Node, rows: int, record: NodeInfo) -> tuple[fx.Node, fx.Node]:
        """Indices into this rank's `rows` (some row for those that are another's), and which are its own."""
        first = self._call(aten.mul.Scalar, (self._place(), rows), record, "first_row")
        moved = self._call(aten.sub.Tensor, (index, first), record, "local_index")
        low = self._call(aten.ge.Scalar, (moved, 0), record, "not_below")
        high = self._call(aten.lt.Scalar, (moved, rows), record, "not_above")
        own = self._call(aten.bitwise_and.Tensor, (low, high), record, "own")
        return self._chosen(own, moved, 0, record, "own_index"), own

    def _masked(self, values: fx.Node, own: fx.Node, record: NodeInfo) -> fx.Node:
        """Zero where a row is another rank's."""
        for _ in range(tensor(values).dim() - tensor(own).dim()):
            own = self._call(aten.unsqueeze.default, (own, -1), record, "own")
        return self._chosen(own, values, 0, record, "masked")

    def _chosen(self, where: fx.Node, values: fx.Node, other: int, record: NodeInfo, name: str) -> fx.Node:
        """The values where something is true, one number elsewhere."""
        like = tensor(values)
        number = self._call(aten.full.default, ([], other), record, "number", dtype=like.dtype, device=like.device)
        return self._call(aten.where.self, (where, values, number), record, name)

    def _embedding(self, node: fx.Node, given: list[fx.Node], record: NodeInfo) -> fx.Node:
        near, own = self._near(given[1], tensor(given[0]).shape[0], record)
        found = self._call(aten.embedding.default, (given[0], near), record, node.name)
        return self._masked(found, own, record)

    def _embedding_backward(self, node: fx.Node, given: list[fx.Node], record: NodeInfo) -> fx.Node:
        index = given[1]
        count, padding, by_frequency = (argument(node, at) for at in (2, 3, 4))
        rows = count // self.ranks
        near, own = self._near(index, rows, record)
        if padding is not None and padding >= 0:
            real = self._call(aten.ne.Scalar, (index, padding), record, "not_padding")
            own = self._call(aten.bitwise_and.Tensor, (own, real), record, "own")
        grads = self._masked(given[0], own, record)
        return self._call(
            aten.embedding_dense_backward.default, (grads, near, rows, -1, by_frequency), record, node.name
        )

    def _gather(self, node: fx.Node, given: list[fx.Node], record: NodeInfo) -> fx.Node:
        dim: int = argument(node, 1)
        near, own = self._near(given[1], tensor(given[0]).shape[dim], record)
        found = self._call(aten.gather.default, (given[0], dim, near), record, node.name)
        return self._masked(found, own, record)

    def _scatter(self, node: fx.Node, given: list[fx.Node], record: NodeInfo) -> fx.Node:
        """What goes to another rank's rows goes to one more row here, which is dropped."""
        dim: int = argument(node, 1)
        shape = list(tensor(given[0]).shape)
        rows = shape[dim]
        near, own = self._near(given[1], rows, record)
        near = self._chosen(own, near, rows, record, "own_or_beyond")
        like = tensor(given[0])
        more = [1 if d == dim % len(shape) else s for d, s in enumerate(shape)]
        row = self._call(aten.full.default, (more, 0), record, "one_more", dtype=like.dtype, device=like.device)
        wide = self._call(aten.cat.default, ([given[0], row], dim), record, "wide")
        source = given[2] if len(given) > 2 else node.args[3]
        put = self._call(node.target, (wide, dim, near, source), record, node.name)
        return self._call(aten.slice.Tensor, (put, dim, 0, rows), record, "narrow")


_CONVERT = torch.ops.prims.convert_element_type.default
_LOOK_UP = {aten.embedding.default, aten.gather.default}
# Which argument says what dimension is indexed; the first of those that have none.
_LEADS: dict[object, int] = {aten.gather.default: 1, aten.scatter.src: 1, aten.scatter.value: 1}
# Operators that can be computed by a rank's own indices into a dimension that is divided.
INDEXED: dict[object, Build] = {
    aten.embedding.default: Divider._embedding,
    aten.embedding_dense_backward.default: Divider._embedding_backward,
    aten.gather.default: Divider._gather,
    aten.scatter.src: Divider._scatter,
    aten.scatter.value: Divider._scatter,
}

# What gives pieces of its operand.
_CUTS = {aten.split.Tensor, aten.split_with_sizes.default, aten.slice.Tensor}

# Which argument says how large the result is.
SIZES: dict[object, int] = {
    aten.view.default: 1,
    aten._unsafe_view.default: 1,
    aten.reshape.default: 1,
    aten.expand.default: 1,
    aten.new_zeros.default: 1,
    aten.new_ones.default: 1,
    aten.new_full.default: 1,
    aten.new_empty.default: 1,
    aten.full.default: 0,
    aten.zeros.default: 0,
    aten.ones.default: 0,
    aten.empty.memory_format: 0,
    aten.slice_backward.default: 1,
    aten.select_backward.default: 1,
}

# What a gradient goes through unchanged, or as one of several terms, on its way out.
_PASSED_ON = {aten.clone.default, aten._to_copy.default, aten.add.Tensor, _CONVERT}
