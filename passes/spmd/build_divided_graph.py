"""Builds the program that ranks compute together from the decisions of how each node is computed.

Operands are converted to the placements that a node needs them in, once for all readers with the same need. On exit all
outputs are whole but the gradients, which have the placements of their parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from zgraph.passes.spmd.choose_placements import PlacementChoices, Strategy, ways_along
from zgraph.passes.spmd.divided_indexing import Build
from zgraph.passes.spmd.local_sizes import localise
from zgraph.passes.spmd.placements import REPLICATE, Partial, Placement, Placements, Replicate, Shard
from zgraph.passes.spmd.reshard import Resharder
from zgraph.passes.spmd.sharding_rules import argument, getitem_of, operands_of
from zgraph.program import collectives
from zgraph.program.node import NodeInfo, Phase, Role, info, set_info, tensor, value
from zgraph.program.program import Division, InputRole, OutputRole, ParamSpec, Program
from zgraph.program.sizes import is_symbolic
from zgraph.program.sparse_attention import SPARSE, SPARSE_BACKWARD, SPARSE_BACKWARD_WITH_MASK

aten = torch.ops.aten

_BLIND = frozenset(
    [
        aten.native_layer_norm_backward, aten.native_group_norm, aten.native_group_norm_backward,
        aten._weight_norm_interface, aten._weight_norm_interface_backward,
        aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention_for_cpu_backward,
        *(target.overloadpacket for target in (SPARSE, SPARSE_BACKWARD, SPARSE_BACKWARD_WITH_MASK)),
    ]
)  # fmt: skip
"""Operators whose kernels assume a memory layout of their operands, which plain PyTorch makes sure of before it calls them."""


class Builder:
    """A builder that turns each node of a captured program into a rank's, as decided."""

    def __init__(self, placements: Placements, decisions: PlacementChoices) -> None:
        self.program, self.placements, self.decisions = placements.program, placements, decisions
        self.axes, self.ranks = placements.axes, placements.ranks
        self.reshard = Resharder(placements)
        self._converted: dict[tuple[fx.Node, Placement, Phase], fx.Node] = {}

    def run(self) -> dict[str, int]:
        own = self.decisions.own
        turned = False
        for node in self.program.nodes:
            if node._erased:
                continue
            if node.op not in ("placeholder", "output") and not turned and info(node).phase is Phase.BACKWARD:
                turned = True
                self._make_outputs_whole(node)
            if node.op == "placeholder":
                self._enter(node, own.get(node))
            elif (at := getitem_of(node)) is not None:
                node.meta["val"] = value(node.args[0])[at]  # type: ignore[arg-type]
            elif node.op != "output":
                self._build(node, self.decisions.ways[node])
        self._leave(own)
        self.program.graph.eliminate_dead_code()  # (copies that were replaced by others)
        _fill(self.program)
        return self.reshard.counts

    def _enter(self, node: fx.Node, part: Shard | None) -> None:
        """Give a divided parameter's placeholder the shape that a rank holds."""
        if part is None:
            return
        spec = self._spec(node)
        old = tensor(node)
        with self.program.fake_mode:
            node.meta["val"] = torch.empty_strided(spec.shape, spec.stride, dtype=old.dtype, device=old.device)
        assert spec.division is not None
        if spec.division.blocks > 1 and node.users:
            # A rank holds a plain piece, which every checkpoint can describe: gather the parameter and cut parts of its blocks.
            users = sorted(node.users)
            record = info(node).replace(param=None, made_by="divide", phase=info(users[0]).phase)
            with self.program.graph.inserting_before(users[0]):
                whole = self.reshard.joined(node, spec.division.dim, 1, record)
                self.placements.stands_for(whole, node, [REPLICATE])
                mine = self.reshard.slice(whole, self.axes.shape(node), part, record)
            self.placements.stands_for(mine, node, [part])
            for user in users:
                user.replace_input_with(node, mine)

    def _held(self, gradient: fx.Node, part: Shard, division: Division, output: fx.Node) -> fx.Node:
        """Return a gradient in the plain piece that a rank holds of a parameter that is made of several blocks."""
        whole = self._converted_to(gradient, REPLICATE, output)
        record = info(whole).replace(role=Role.COMPUTE, param=None, made_by="divide", mesh_dim=None, stream="compute")
        sizes, d = list(tensor(whole).shape), division.dim
        with self.program.graph.inserting_before(output):
            opened = self.reshard.viewed(
                whole, [*sizes[:d], self.ranks, sizes[d] // self.ranks, *sizes[d + 1 :]], record
            )
            return self.reshard.viewed(
                self.reshard.picked(opened, d, record),
                [s // self.ranks if i == d else s for i, s in enumerate(sizes)],
                record,
            )

    def _spec(self, node: fx.Node) -> ParamSpec:
        return self.program.params[self.program.inputs[self.program.placeholders().index(node)].name]

    def _make_outputs_whole(self, first: fx.Node) -> None:
        """Make the forward's outputs whole before the first node of the backward."""
        with self.program.graph.inserting_before(first):
            anchor = self.program.graph.call_function(aten.sym_size.int, ())  # (a reader in the forward, removed below)
        set_info(anchor, NodeInfo(phase=Phase.FORWARD))
        for port, node in self.program.output_items():
            if (
                port.role is not OutputRole.GRADIENT
                and info(node).phase is Phase.FORWARD
                and node in self.placements.of_results
            ):
                self._converted_to(node, REPLICATE, anchor)
        self.program.graph.erase_node(anchor)

    def _leave(self, own: Mapping[fx.Node, Shard]) -> None:
        by_name = {p.name: n for p, n in self.program.input_items() if p.role is InputRole.PARAMETER}
        output = self.program.output_node()
        given: list[fx.Node | None] = []
        for port, node in self.program.output_items():
            state: Placement = REPLICATE
            if port.role is OutputRole.GRADIENT and port.of is InputRole.PARAMETER:
                state = own.get(by_name[port.name], REPLICATE) if port.name in by_name else REPLICATE
            division = self.program.params[port.name].division if isinstance(state, Shard) else None
            if division is not None and isinstance(state, Shard) and division.blocks > 1:
                given.append(self._held(node, state, division, output))
            else:
                given.append(self._converted_to(node, state, output) if isinstance(node, fx.Node) else node)
        output.args = (tuple(given),)

    def _build(self, node: fx.Node, way: Strategy) -> None:
        operands = operands_of(node)
        given = [self._converted_to(o, s, node) for o, s in zip(operands, way.operands, strict=True)]
        if getattr(node.target, "overloadpacket", None) in _BLIND:
            given = [self._laid_out(g, self.placements.captured[o], node) for g, o in zip(given, operands, strict=True)]
        if way.build is not None:
            self._by_hand(node, way, way.build, given)
            return
        new = any(
            g is not o or value(g) is not self.placements.captured.get(o) for g, o in zip(given, operands, strict=True)
        )
        left = iter(given)
        node.args = _with_tensors(node.args, lambda _: next(left))
        node.kwargs = _with_tensors(node.kwargs, lambda _: next(left))
        if any(isinstance(s, Shard) for s in (*way.operands, *way.results)):
            localise(node, way.results, self.ranks)
            new = True
        if new:
            self._evaluate(node)

    def _converted_to(self, node: fx.Node, target: Placement, user: fx.Node) -> fx.Node:
        """Return a value in another placement, made before its `user` or, where it is a sum over ranks, as soon as it
        can be.
        """
        state = self.placements.of(node)
        if state == target:
            return node
        phase = info(user).phase if user.op != "output" else info(node).phase
        reduces = isinstance(state, Partial)
        # A value that is made whole for the forward is not saved for the backward.
        grows = isinstance(state, Shard) and isinstance(target, Replicate)
        key = (node, target, phase if grows else info(node).phase)
        if key in self._converted:
            return self._converted[key]
        if (way := self._replayable(node, state, target)) is not None:
            self._converted[key] = converted = self._replay(node, way, user)
            return converted
        whole = self._converted.get((node, REPLICATE, key[2]))
        if whole is not None and isinstance(target, Shard) and (isinstance(state, Replicate) or reduces):
            node, reduces = whole, False
        at = self.program.behind(node).next if reduces else user
        record = info(node).replace(
            role=Role.COMPUTE, made_by="divide", param=None, copy_of=None, phase=info(node).phase if reduces else phase
        )
        with self.program.graph.inserting_before(at):
            converted = self.reshard.reshard(node, target, record)
        if reduces and phase is info(node).phase:
            _wait_late(converted, user)
        self._converted[key] = converted
        self.placements.stands_for(converted, node, [target])
        return converted

    def _replayable(self, node: fx.Node, state: Placement, target: Placement) -> Strategy | None:
        """Return how a view is made from its base in the other placement (so that all views of one value share its
        transfer), or None.
        """
        source = self.placements.source(node)
        if source is None or isinstance(state, Replicate) or type(self.placements.of(source)) is not type(state):
            return None
        if isinstance(target, Replicate):
            return Strategy((REPLICATE,), (REPLICATE,))
        assert isinstance(target, Shard)
        ways = ways_along(self.placements, node, target.axis)
        return next((w for w in ways if w.results == (target,) and isinstance(w.operands[0], Shard)), None)

    def _replay(self, node: fx.Node, way: Strategy, user: fx.Node) -> fx.Node:
        source = operands_of(node)[0]
        converted = self._converted_to(source, way.operands[0], user)
        args, kwargs = self.placements.arguments[node]
        new_args: tuple[Any, ...] = _with_tensors(args, lambda _: converted)
        phase = info(user).phase if user.op != "output" else info(node).phase
        with self.program.graph.inserting_before(user):
            new_node = self.program.graph.create_node(
                "call_function", node.target, new_args, dict(kwargs), name=node.name
            )
        set_info(new_node, info(node).replace(made_by="divide", phase=phase))
        new_node.meta["val"] = self.placements.captured[node]
        self.placements.stands_for(new_node, node, list(way.results))
        if not isinstance(way.results[0], Replicate):
            localise(new_node, way.results, self.ranks)
        self._evaluate(new_node)
        return new_node

    def _by_hand(self, node: fx.Node, way: Strategy, build: Build, given: list[fx.Node]) -> None:
        with self.program.graph.inserting_before(node):
            replacement = build(self.reshard, node, given, info(node).replace(made_by="divide"))
        picks = (
            {node: replacement}
            if isinstance(replacement, fx.Node)
            else {u: replacement[argument(u, 1)] for u in node.users}
        )
        for old, new in picks.items():
            old.replace_all_uses_with(new)
            self.placements.stands_for(new, old, [way.results[getitem_of(old) or 0]])
            self.program.graph.erase_node(old)
        if node not in picks:
            self.program.graph.erase_node(node)

    def _evaluate(self, node: fx.Node) -> None:
        try:
            node.meta["val"] = self.program.evaluate(node)
        except (RuntimeError, ValueError):  # (a view of a value that now has another memory layout)
            if node.target is not aten.view.default:
                raise
            source: fx.Node = node.args[0]  # type: ignore[assignment]
            with self.program.graph.inserting_before(node):
                packed = self.reshard.packed(source, info(node).replace(made_by="divide"))
            if packed is not source:
                self.placements.stands_for(packed, source, self.placements.of_results[source])
            node.update_arg(0, packed)
            node.meta["val"] = self.program.evaluate(node)

    def _laid_out(self, node: fx.Node, captured: Any, user: fx.Node) -> fx.Node:
        """Return a value with the captured memory layout, if a kernel may depend on it."""
        if not isinstance(captured, torch.Tensor) or captured.dim() == 0:
            return node
        now = tensor(node)
        dense, rows = captured.is_contiguous(), captured.stride(-1) == 1
        if (not dense or now.is_contiguous()) and (not rows or now.stride(-1) == 1 or now.shape[-1] == 1):
            return node
        with self.program.graph.inserting_before(user):
            return self.reshard.packed(node, info(user).replace(made_by="divide"))


def _with_tensors(arguments: Any, make: Callable[[fx.Node], fx.Node]) -> Any:
    """Return arguments with other tensors in place of tensors; sizes stay."""
    return fx.node.map_arg(arguments, lambda n: n if is_symbolic(value(n)) else make(n))


def _fill(program: Program) -> None:
    """Move earlier nodes that a collective does not need between its start and its wait.

    These are gradients of weights, while those of activations are summed (as Megatron-LM does by hand).
    """
    region: list[fx.Node] = []
    for node in program.nodes:
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


def _wait_late(new_node: fx.Node, user: fx.Node) -> None:
    """Move a sum's wait, and what follows it, before its first reader, so that other nodes run meanwhile."""
    late = [new_node]
    while not collectives.is_wait(late[0]):
        late.insert(0, late[0].all_input_nodes[0])
    for node in late:
        user.prepend(node)
