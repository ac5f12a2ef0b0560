"""Which stage of a pipeline makes each value of a joint program, and which stages read it.

The stages of the forward are given. A node of the backward has the stage of the forward operator whose derivative it
belongs to (`zgraph.passes.stages.stage_costs.origins`), or the stage nearest to it that fits the flow of gradients,
towards earlier stages alone:

- no later than the stages of its operands;
- no earlier than a stage that holds a parameter whose gradient is made of it, or (if there is only one) a parameter that it reads;
- a node that no gradient flows into is in the stage that reads it first; members of an operator's tuple are in the operator's.

Some values have no one stage, but are made in each that reads them: those of inputs and constants alone, and views
(`free_nodes`, `made_again`). A parameter is in every stage that reads it. Its gradient is in as many *terms* as
autograd adds up, each in the nearest of these stages that it can flow to.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import fx

from zgraph.errors import PlanError
from zgraph.passes.stages.min_cuts import anchors_of, free_nodes, made_again
from zgraph.passes.stages.stage_costs import origins
from zgraph.program.aliases import is_random, is_view, made_once
from zgraph.program.node import Phase, info, tensor
from zgraph.program.program import InputRole, OutputRole, Port, Program
from zgraph.program.sizes import static


class Result(NamedTuple):
    """One stage's part of an output of the joint program: its value, or one term of a gradient."""

    port: Port  # the joint program's output
    node: fx.Node  # the value or the term
    stage: int  # the stage that gives it


class StageAssignment:
    """The stages of the values of `joint`, if the operators of its forward are in the stages `forward` (of `count`).

    `home` has the stage that makes each value that is made once; `readers` the stages that read each value; `results`
    what each stage gives of the joint program's outputs; `holders` the stages that have each parameter, in order.
    """

    def __init__(self, joint: Program, forward: Mapping[fx.Node, int], count: int) -> None:
        self.joint = joint
        self.last = count - 1
        self.ports = dict(zip(joint.placeholders(), joint.inputs, strict=True))
        self.nodes = [n for n in joint.nodes if n.op not in ("placeholder", "output")]
        self._backward = [n for n in self.nodes if info(n).phase is Phase.BACKWARD]
        self._free = free_nodes(joint) | {n for n in self.nodes if n.op == "get_attr"}
        for node in self._backward:  # (constants of the backward)
            if not made_once(node) and all(a in self._free for a in node.all_input_nodes):
                self._free.add(node)
        self.home = {n: self.last for n, p in self.ports.items() if p.role is InputRole.TANGENT}
        for node, stage in forward.items():
            if node not in self._free:
                self.home[node] = self.home[node.all_input_nodes[0]] if _is_member(node) else stage
        reading_stages = {n: self._forward_readers(n) for n, p in self.ports.items() if p.role is InputRole.PARAMETER}
        self._held = {self.ports[n].name: sorted(stages) or [0] for n, stages in reading_stages.items()}
        self._terms = {
            port: self._terms_of(port, node) for port, node in joint.output_items() if port.role is OutputRole.GRADIENT
        }
        self._place_backward()
        self.results = [*self._given(), *self._gradients()]
        self.readers: dict[fx.Node, set[int]] = {n: set() for n in (*self.ports, *self.nodes)}
        self._find_readers()
        self.holders = self._find_holders()
        self._refuse_parted_buffers()

    def made_in(self, node: fx.Node) -> set[int]:
        """Return the stages that make a value; none for a value that nobody reads."""
        if self.everywhere(node):
            return self.readers[node]
        return {self.home[node]} if self.readers[node] or is_random(node) else set()

    def everywhere(self, node: fx.Node) -> bool:
        """Return whether a value is made in each stage that reads it, and never sent."""
        return node in self._free or made_again(node) or (node in self.ports and node not in self.home)

    # -- the backward ---------------------------------------------------------------------------------------------------
    def _place_backward(self) -> None:
        like = self._origins()
        low = self._lowest(like)
        flowing = {n for n in self.ports if n in self.home}  # tangents, and values that depend on them
        for node in self._backward:
            above = [self.home[a] for a in node.all_input_nodes if a in flowing]
            if not above or node in self._free:
                continue
            flowing.add(node)
            high = min(above)
            if _is_member(node):
                self.home[node] = high
                continue
            stage = min(max(like.get(node, high), low[node]), high)
            candidates = [s for s in self._stages_with_parameters(node) if low[node] <= s <= stage]
            self.home[node] = max(candidates, default=stage)
        for node in reversed(self._backward):
            if node not in flowing and node not in self._free and not _is_member(node):
                self.home[node] = max([low[node], *(self.home[u] for u in _users(node) if u in self.home)])
        for node in self._backward:
            if _is_member(node) and node not in self._free:
                self.home[node] = self.home[node.all_input_nodes[0]]

    def _origins(self) -> dict[fx.Node, int]:
        """Return, for each node of the backward, the stage of the forward operator whose derivative it belongs to."""
        origin_of = origins(self.joint, {a.node for a in anchors_of(self.joint)})
        return {node: self.home[of] for node, of in origin_of.items() if of in self.home}

    def _lowest(self, like: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
        """Return the first stage that each node of the backward may be in."""
        low = dict.fromkeys(self._backward, 0)
        for port, terms in self._terms.items():
            for term in terms:
                if term in low:
                    low[term] = max(low[term], self._nearest(port.name, like.get(_maker(term), self.last)))
        for node in reversed(self._backward):
            stages = self._stages_with_parameters(node)
            low[node] = max([low[node], *(stages if len(stages) == 1 else ())])
            for operand in node.all_input_nodes:
                if operand in low:
                    low[operand] = max(low[operand], low[node])
        return low

    def _stages_with_parameters(self, node: fx.Node) -> list[int]:
        """Return the stages whose forward reads all parameters that a node reads; none if it reads none."""
        stages = [set(self._held[name]) for name in self._parameters_of(node)]
        return sorted(set.intersection(*stages)) if stages else []

    def _parameters_of(self, node: fx.Node) -> Iterator[str]:
        stack = list(node.all_input_nodes)
        while stack:
            at = stack.pop()
            if at in self.ports and self.ports[at].role is InputRole.PARAMETER:
                yield self.ports[at].name
            elif made_again(at):
                stack += at.all_input_nodes

    # -- gradients ------------------------------------------------------------------------------------------------------
    def _terms_of(self, port: Port, gradient: fx.Node) -> list[fx.Node]:
        """Return the terms whose sum is a gradient, if several stages hold its parameter; else the gradient itself."""
        if port.of is not InputRole.PARAMETER:
            raise PlanError(
                f"{port.of} {port.name!r} wants a gradient",
                where="mesh.pp",
                why="a pipeline gives those of parameters alone",
                hint="detach it",
            )
        if len(self._held[port.name]) == 1:
            return [gradient]
        terms, stack = [], [gradient]
        while stack:
            node = stack.pop()
            if (node is gradient or len(node.users) == 1) and _is_sum(node):
                stack += reversed(node.all_input_nodes)
            else:
                terms.append(node)
        return terms

    def _nearest(self, param: str, stage: int) -> int:
        """Return the last stage that holds a parameter and is not after `stage`; if there is none, the first that holds
        it.
        """
        stages = self._held[param]
        return max((s for s in stages if s <= stage), default=stages[0])

    def _gradients(self) -> Iterator[Result]:
        for port, terms in self._terms.items():
            for term in terms:
                yield Result(port, term, self._nearest(port.name, self.home.get(term, self.last)))

    # -- who reads what -------------------------------------------------------------------------------------------------
    def _given(self) -> Iterator[Result]:
        """Yield all results but gradients: outputs from the last stage, checks where they are made, a buffer's new
        value where the old one is read.
        """
        buffers = {(p.role, p.name): n for n, p in self.ports.items()}
        for port, node in self.joint.output_items():
            if port.role is OutputRole.OUTPUT:
                yield Result(port, node, self.last)
            elif port.role is OutputRole.CHECK:
                yield Result(port, node, self.home.get(node, 0))
            elif port.role is OutputRole.MUTATION and port.of is not None:
                maker_stages = {self.home[n] for n in [_maker(node)] if n in self.home}
                stages = maker_stages | self._forward_readers(buffers[port.of, port.name])
                yield Result(port, node, max(stages, default=0))

    def _forward_readers(self, node: fx.Node) -> set[int]:
        """Return the stages whose forward reads a value, also through views of it."""
        stages: set[int] = set()
        for user in node.users:
            if user.op == "output" or info(user).phase is not Phase.FORWARD:
                continue
            if made_again(user):
                stages |= self._forward_readers(user)
            elif user in self.home:
                stages.add(self.home[user])
        return stages

    def _find_readers(self) -> None:
        for result in self.results:
            self.readers[result.node].add(result.stage)
        for node in reversed(self.nodes):
            for operand in node.all_input_nodes:
                self.readers[operand] |= self.made_in(node)

    def _find_holders(self) -> dict[str, tuple[int, ...]]:
        """Return the stages that read a parameter or give its gradient; the first stage if none does."""
        holders: dict[str, set[int]] = {name: set() for name in self.joint.params}
        for node, port in self.ports.items():
            if port.role is InputRole.PARAMETER:
                holders[port.name] |= self.readers[node]
        for port, _, stage in self.results:
            if port.role is OutputRole.GRADIENT:
                holders[port.name].add(stage)
        return {name: tuple(sorted(stages)) or (0,) for name, stages in holders.items()}

    def _refuse_parted_buffers(self) -> None:
        """Refuse a buffer that the forward changes and that several stages read: only one stage's would change."""
        buffers = {(p.role, p.name): n for n, p in self.ports.items()}
        for port, _, stage in self.results:
            if port.role is not OutputRole.MUTATION or port.of is None:
                continue
            stages = self.readers[buffers[port.of, port.name]] | {stage}
            if len(stages) > 1:
                raise PlanError(
                    f"{port.of} {port.name!r} is changed by the forward and read in stages {sorted(stages)}",
                    where="partition",
                    why="each stage would have another value of it",
                    hint="cut elsewhere (partition=[module paths]), or keep it in one module",
                )


def _is_member(node: fx.Node) -> bool:
    """Return whether this is one of the results of an operator that has several."""
    return node.target is operator.getitem


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that read a value, or a member of it."""
    for user in node.users:
        if _is_member(user):
            yield from _users(user)
        else:
            yield user


def _maker(node: fx.Node) -> fx.Node:
    """Return the value that a view is of, through other views; any other value itself."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_sum(node: fx.Node) -> bool:
    """Return whether this is a sum of two values of the same type, as autograd adds up gradients."""
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return False
    return all(
        [*map(static, tensor(a).shape)] == [*map(static, tensor(node).shape)] and tensor(a).dtype is tensor(node).dtype
        for a in node.all_input_nodes
    )
