"""One joint program becomes one joint program for each pipeline stage.

*Contract.* On entry the program is captured: plain, whole parameters, forward and backward in one graph, and each
operator of its forward has a stage, none smaller than that of its operands. On exit each stage has a captured program
of its own:

    parameters, inputs, values of earlier stages (RECEIVED)         -> outputs, values for later stages (SENT)
    those, tangents, values that come back from later (RETURNED)    -> gradients, values for earlier stages (RETURNED)

`zgraph.passes.stages.stage_assignment` says which stage makes each value, and which read it. A value that is made in
one stage and read in another is a `StageMessage`, directly between the two. It arrives without gaps and with memory of its
own. Every stage has the gradient of each parameter that it holds: if several stages hold a parameter these are parts,
whose sum is the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zgraph.errors import PlanError
from zgraph.passes.stages.stage_assignment import StageAssignment
from zgraph.program.aliases import root_of
from zgraph.program.node import NodeInfo, Phase, info, set_info, tensor, value
from zgraph.program.program import InputRole, OutputRole, Port, Program, of_backward
from zgraph.program.sizes import static, typical
from zgraph.torch_compat import fx_graphs

aten = torch.ops.aten


@dataclass(frozen=True)
class StageMessage:
    """A value that one stage sends to another for each micro-batch."""

    name: str  # the name of its node in the joint program
    source: int  # the stage that sends it
    target: int  # the stage that receives it
    back: bool  # whether it is sent in the backward
    like: torch.Tensor  # its fake value as it arrives: shape, strides and dtype
    learned: bool  # whether parameters made it, or it is a gradient: an activation, not a mask or a table of positions

    @property
    def nbytes(self) -> int:
        """The bytes that are sent, at the typical sizes of the program."""
        return typical(self.like.numel()) * self.like.element_size()


@dataclass(frozen=True)
class Stages:
    """The programs of a pipeline's stages."""

    programs: tuple[Program, ...]  # in the order of the stages
    transfers: tuple[StageMessage, ...]  # what crosses between stages, in the order in which each stage makes it
    holders: dict[str, tuple[int, ...]]  # the stages that hold each parameter, by its name


def cut_stages(joint: Program, forward: Mapping[fx.Node, int], count: int) -> Stages:
    """Cut `joint`, which is not changed, into `count` programs; `forward` has the stage of each operator of its
    forward.

    Raises `PlanError` for a buffer that one stage changes and another reads, for an input that wants a gradient, for a
    Python number that crosses a cut, and for `as_strided` on a value that comes from another stage in another layout.
    """
    homes = StageAssignment(joint, forward, count)
    transfers = _transfers(homes)
    programs = tuple(_StageProgram(homes, transfers, stage).build() for stage in range(count))
    return Stages(programs, tuple(transfers), homes.holders)


def _transfers(homes: StageAssignment) -> list[StageMessage]:
    messages = []
    learned = {n for n, port in homes.ports.items() if port.role is InputRole.PARAMETER}
    for node in homes.nodes:
        if not learned.isdisjoint(node.all_input_nodes):
            learned.add(node)
    for node in (*homes.ports, *homes.nodes):
        if homes.everywhere(node):
            continue
        source = homes.home[node]
        for target in sorted(homes.readers[node] - {source}):
            if target > source and info(node).phase is Phase.BACKWARD:
                raise AssertionError(f"{node.name}: a gradient would flow from stage {source} to stage {target}")
            back = target < source
            like = _as_sent(node, homes.joint)
            messages.append(StageMessage(node.name, source, target, back, like, back or node in learned))
    return messages


def _as_sent(node: fx.Node, joint: Program) -> torch.Tensor:
    """Return the fake value that arrives: the one that was sent or, if that is part of a larger storage or has gaps, a
    dense one.
    """
    val = value(node)
    if not isinstance(val, torch.Tensor):
        raise PlanError(
            "the model turns a tensor into a Python number that another stage reads",
            where="partition",
            why=f"{node.name!r} is known only when the forward runs{f' ({info(node).source})' if info(node).source else ''}",
            hint="keep it a tensor (leave out .item(), float(), int()), or cut elsewhere: partition=[module paths]",
        )
    dense = bool(aten.is_non_overlapping_and_dense(val))
    whole = static(val.untyped_storage().nbytes()) == static(val.numel() * val.element_size())
    if dense and static(val.storage_offset()) == 0 and whole:
        return val
    with joint.fake_mode:
        if dense:
            return torch.empty_strided(val.size(), val.stride(), dtype=val.dtype, device=val.device)
        return torch.empty(val.size(), dtype=val.dtype, device=val.device)


class _StageProgram:
    """A builder of one stage's program."""

    def __init__(self, homes: StageAssignment, transfers: list[StageMessage], stage: int) -> None:
        self.homes = homes
        self.stage = stage
        self.coming = [t for t in transfers if t.target == stage]
        self.leaving = [t for t in transfers if t.source == stage]
        self.by_name = {n.name: n for n in (*homes.ports, *homes.nodes)}
        self.results = [r for r in homes.results if r.stage == stage]
        self.graph = fx.Graph()
        self.inputs: list[Port] = []
        self.here: dict[fx.Node, fx.Node] = {}  # this program's node for each of the joint program's

    def build(self) -> Program:
        joint = self.homes.joint
        self._take()
        for node in self.homes.nodes:
            if self.stage in self.homes.made_in(node):
                self.here[node] = self.graph.node_copy(node, lambda n: self.here[n])
                self.here[node].meta = dict(node.meta)
                self._let_wait(self.here[node])
        set_info(self.graph.output(()), info(joint.output_node()))
        self.program = Program(
            name=f"{joint.name}.stage{self.stage}",
            module=fx_graphs.lazy_module(joint.module, self.graph),
            inputs=self.inputs,
            outputs=[],
            mesh=dict(joint.mesh),
            params={n: s for n, s in joint.params.items() if self.stage in self.homes.holders[n]},
            fake_mode=joint.fake_mode,
            aliases=joint.aliases,
            sizes=joint.sizes,
        )
        self._evaluate_again()
        results = [(r.port, self.here[r.node]) for r in self.results if r.port.role is not OutputRole.GRADIENT]
        outputs = [item for item in results if not of_backward(*item)]
        checked = [item for item in results if of_backward(*item)]
        sent, returned = self._give(OutputRole.SENT), self._give(OutputRole.RETURNED)
        self.program.set_outputs([*outputs, *sent, *self._gradients(), *checked, *returned])
        self.program.recompile()
        return self.program

    def _let_wait(self, node: fx.Node) -> None:
        """Move a view to the backward if its base comes from a later stage, which returns it only then."""
        late = any(info(a).phase is Phase.BACKWARD for a in node.all_input_nodes)
        if late and info(node).phase is Phase.FORWARD:
            set_info(node, info(node).replace(phase=Phase.BACKWARD))

    def _take(self) -> None:
        """Add the inputs: the joint program's, and the values that other stages send."""
        for node, port in self.homes.ports.items():
            if port.role is InputRole.PARAMETER:
                here = self.stage in self.homes.holders[port.name]
            elif port.role is InputRole.TANGENT:
                here = self.stage == self.homes.home[node]
            elif port.role is InputRole.SIZE:
                here = True
            else:
                here = self.stage in self.homes.readers[node]
            if here:
                self._place(node, port, info(node), value(node))
        for transfer in self.coming:
            node = self.by_name[transfer.name]
            role = InputRole.RETURNED if transfer.back else InputRole.RECEIVED
            phase = Phase.BACKWARD if transfer.back else Phase.FORWARD
            record = NodeInfo(phase, module=info(node).module, source=info(node).source, made_by="cut_stages")
            self._place(node, Port(role, transfer.name), record, transfer.like)

    def _place(self, node: fx.Node, port: Port, record: NodeInfo, fake: Any) -> None:
        placed = self.here[node] = self.graph.placeholder(node.name)
        placed.meta = {**node.meta, "val": fake}
        set_info(placed, record)
        self.inputs.append(port)

    def _evaluate_again(self) -> None:
        """Evaluate anew what is made of values that came in another layout: its layout may differ, too."""
        received = [self.here[self.by_name[t.name]] for t in self.coming if t.like is not value(self.by_name[t.name])]
        other = set(received)
        for node in self.program.nodes if other else ():
            if node.op != "call_function" or not any(a in other for a in node.all_input_nodes):
                continue
            if node.target is aten.as_strided.default:
                raise PlanError(
                    "as_strided looks at a value of another stage by its place in memory",
                    where="partition",
                    why=f"{node.name!r} ({info(node).source}): what arrives lies otherwise",
                    hint="use slices and views, or cut elsewhere: partition=[module paths]",
                )
            before, node.meta["val"] = value(node), self.program.evaluate(node)
            if not _same_layout(before, node.meta["val"]):
                other.add(node)

    def _give(self, role: OutputRole) -> list[tuple[Port, fx.Node]]:
        """Return the outputs that are sent to other stages."""
        likes = {t.name: t.like for t in self.leaving if t.back is (role is OutputRole.RETURNED)}
        return [(Port(role, name), self._as_it_leaves(self.by_name[name], like)) for name, like in likes.items()]

    def _as_it_leaves(self, node: fx.Node, like: torch.Tensor) -> fx.Node:
        """Return a value in the layout that its reader expects, copied if it is part of a buffer that is about to
        change.
        """
        here, record = self.here[node], info(node).replace(made_by="cut_stages")
        changed = {(p.of, p.name) for p in self.homes.joint.outputs if p.role is OutputRole.MUTATION}
        root = self.homes.ports.get(root_of(node))
        if _same_strides(tensor(here), like) and (root is None or (root.role, root.name) not in changed):
            return here
        order = sorted(range(like.dim()), key=lambda d: (-typical(like.stride()[d]), d))
        if order == sorted(order):
            return self._copied(here, record, f"dense_{node.name}")
        packed = self._call(aten.permute.default, (here, order), record, f"packed_{node.name}")
        packed = self._copied(packed, record, f"dense_{node.name}")
        back = [order.index(d) for d in range(like.dim())]
        return self._call(aten.permute.default, (packed, back), record, f"unpacked_{node.name}")

    def _gradients(self) -> list[tuple[Port, fx.Node]]:
        """Return the gradients of this stage's parameters: the sums of the terms that it has, zeros where it has none."""
        gradients = []
        for port, gradient in self.homes.joint.output_items():
            if port.role is not OutputRole.GRADIENT or self.stage not in self.homes.holders[port.name]:
                continue
            terms = [self.here[r.node] for r in self.results if r.port is port]
            record = info(gradient).replace(made_by="cut_stages")
            total = terms[0] if terms else self._zeros(gradient, record)
            for term in terms[1:]:
                total = self._call(aten.add.Tensor, (total, term), record, gradient.name)
            if info(total).phase is Phase.FORWARD:  # (a gradient has to be made in the backward: copy it)
                total = self._copied(total, record, f"own_{gradient.name}")
            gradients.append((port, total))
        return gradients

    def _zeros(self, gradient: fx.Node, record: NodeInfo) -> fx.Node:
        val = tensor(gradient)
        like = {"dtype": val.dtype, "device": val.device, "pin_memory": False}
        return self._call(aten.full.default, (list(val.shape), 0), record, f"no_{gradient.name}", like)

    def _copied(self, node: fx.Node, record: NodeInfo, name: str) -> fx.Node:
        rows = {"memory_format": torch.contiguous_format}
        return self._call(aten.clone.default, (node,), record, name, rows)

    def _call(
        self,
        target: Any,
        args: tuple[Any, ...],
        record: NodeInfo,
        name: str,
        kwargs: dict[str, Any] | None = None,
    ) -> fx.Node:
        with self.program.graph.inserting_before(self.program.output_node()):
            return self.program.call(target, args, record, name=name, kwargs=kwargs)


def _same_strides(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same strides. (The stride of a dimension of size 1 means nothing.)"""
    strides = zip(map(static, one.stride()), map(static, other.stride()), map(static, one.shape), strict=True)
    return all(a == b for a, b, n in strides if n != 1)


def _same_layout(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _same_strides(one, other) and static(one.storage_offset()) == static(other.storage_offset())
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return all(map(_same_layout, one, other))
    return bool(static(one) == static(other))
