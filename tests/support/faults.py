"""Faulty passes, each of which leaves a program that the verifier takes; and a model in which each finds something to spoil."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx, nn

from zgraph.build import pass_pipeline
from zgraph.passes import graph_pass
from zgraph.passes.update.write_in_place import write_in_place
from zgraph.program import collectives
from zgraph.program.node import NodeInfo, Phase, Role, info, tensor
from zgraph.program.program import InputRole, OutputRole, Program

aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default


class Spoilt(nn.Module):
    """Has a slice, a difference, an activation, a norm, a buffer, and rows that no world here divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.norm = nn.LayerNorm(7)
        self.second = nn.Linear(7, 5)
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.first(x[:, 1:7])))
        out = self.second(hidden)
        self.seen.add_(out.detach().sum(0))
        return (out - y).pow(2).mean()


def in_update(monkeypatch: Any, type: Any) -> None:
    """Let a faulty pass stand in the place of the first that each update runs."""
    rows = [
        dataclasses.replace(row, type=type) if row.type.contract.name == "write_in_place" else row
        for row in pass_pipeline.UPDATE_PASSES
    ]
    assert any(row.type is type for row in rows)
    monkeypatch.setattr(pass_pipeline, "UPDATE_PASSES", tuple(rows))


def spoilt():
    torch.manual_seed(0)
    return Spoilt(), (torch.randn(4, 8), torch.randn(4, 5))


def _called(program: Program, target: Any, phase: Phase | None = None) -> list[fx.Node]:
    nodes = program.graph.find_nodes(op="call_function", target=target)
    return [n for n in nodes if phase is None or info(n).phase is phase]


def _behind(program: Program, node: fx.Node, *calls: tuple[Any, tuple[Any, ...]]) -> None:
    """Let what reads a node read what these calls make of it, one after another (each gets it as its first argument)."""
    users = list(node.users)
    record = NodeInfo(info(node).phase, made_by="fault")
    last = node
    for number, (target, args) in enumerate(calls):
        with program.graph.inserting_after(last):
            last = program.call(target, (last, *args), record, name=f"fault{number}")
    for user in users:
        user.replace_input_with(node, last)


def _gradient(program: Program) -> fx.Node:
    """The gradient of the first layer's weight, as it leaves the program."""
    return next(n for p, n in program.output_items() if p.role is OutputRole.GRADIENT and p.name == "first.weight")


def _spoil_gradient(program: Program, *calls: tuple[Any, tuple[Any, ...]]) -> None:
    grad = _gradient(program)
    items = list(program.output_items())
    last = grad
    record = NodeInfo(Phase.BACKWARD, made_by="fault")
    with program.graph.inserting_before(program.output_node()):
        for number, (target, args) in enumerate(calls):
            last = program.call(target, (last, *args), record, name=f"fault{number}")
    program.set_outputs([(port, last if node is grad else node) for port, node in items])


@graph_pass("scaled_gradient", "scales a gradient", bitwise=False)
def scaled_gradient(program: Program) -> None:
    _spoil_gradient(program, (aten.mul.Tensor, (1.001,)))


@graph_pass("last_bit", "changes a gradient by its last bit, and says that it keeps it")
def last_bit(program: Program) -> None:
    _spoil_gradient(program, (aten.mul.Tensor, (1 + 2.0**-23,)))


@graph_pass("zeroed_row", "zeroes the first row of a gradient")
def zeroed_row(program: Program) -> None:
    _spoil_gradient(program, (aten.slice.Tensor, (0, 1, 2**62)), (aten.constant_pad_nd.default, ([0, 0, 1, 0],)))


@graph_pass("summed", "adds gradients where they should be averaged", requires=("reduced",))
def summed(program: Program) -> None:
    for start in [n for n in program.nodes if collectives.is_start(n) and info(n).role is Role.REDUCE]:
        start.args = tuple("sum" if a == "avg" else a for a in start.args)


@graph_pass("unreduced", "forgets one reduction", requires=("reduced",), bitwise=False)
def unreduced(program: Program) -> None:
    start = next(n for n in program.nodes if n.target is collectives.ALL_REDUCE)
    (wait,) = start.users
    wait.replace_all_uses_with(start.args[0])
    program.graph.erase_node(wait)
    program.graph.erase_node(start)


@graph_pass("swapped", "swaps the operands of a difference", bitwise=False)
def swapped(program: Program) -> None:
    node = _called(program, aten.sub.Tensor, Phase.FORWARD)[0]
    node.args = (node.args[1], node.args[0])


@graph_pass("other_shard", "reads a gathered weight from another rank's rows on", requires=("sharded",))
def other_shard(program: Program) -> None:
    wait = next(n for n in program.nodes if collectives.is_wait(n) and info(n).param == "second.weight")
    _behind(program, wait, (aten.roll.default, ([program.params["second.weight"].rows], [0])))


@graph_pass("other_epsilon", "changes the epsilon of a norm")
def other_epsilon(program: Program) -> None:
    (node,) = _called(program, aten.native_layer_norm.default)
    node.args = (*node.args[:-1], 1e-3)


@graph_pass("straight_through", "takes the derivative of tanh for one", bitwise=False)
def straight_through(program: Program) -> None:
    (node,) = _called(program, aten.tanh_backward.default)
    node.replace_all_uses_with(node.args[0])
    program.graph.erase_node(node)


@graph_pass("off_by_one", "slices one too early")
def off_by_one(program: Program) -> None:
    node = next(n for n in _called(program, aten.slice.Tensor) if n.args[1:] == (1, 1, 7))
    node.args = (node.args[0], 1, 0, 6)


@graph_pass("rounded", "rounds an activation to bfloat16", bitwise=False)
def rounded(program: Program) -> None:
    (node,) = _called(program, aten.tanh.default)
    _behind(program, node, (CAST, (torch.bfloat16,)), (CAST, (torch.float32,)))


@graph_pass("stale_buffer", "gives a buffer back as it was", bitwise=False)
def stale_buffer(program: Program) -> None:
    old = program.input_nodes(InputRole.BUFFER)["seen"]
    with program.graph.inserting_before(program.output_node()):
        record = NodeInfo(Phase.FORWARD, made_by="fault")
        copied = program.call(aten.clone.default, (old,), record, name="stale")
    program.set_outputs([(p, copied if p.role is OutputRole.MUTATION else n) for p, n in program.output_items()])


@graph_pass("forgotten", "forgets the gradients of earlier micro-batches", requires=("reduced",))
def forgotten(program: Program) -> None:
    for node in [n for n in _called(program, aten.add.Tensor) if info(n).role is Role.ACCUMULATE]:
        own = next(a for a in node.args if a.op != "placeholder")
        node.replace_all_uses_with(own)
        program.graph.erase_node(node)


@graph_pass("kept_too_small", "keeps half of a gathered weight", requires=("kept",))
def kept_too_small(program: Program) -> None:
    items = list(program.output_items())
    if not any(p.role is OutputRole.UNSHARDED for p, _ in items):
        return
    made = []
    for port, node in items:
        if port.role is OutputRole.UNSHARDED and port.name == "second.weight":
            with program.graph.inserting_before(program.output_node()):
                record = info(node).replace(role=Role.COMPUTE, made_by="fault")
                node = program.call(aten.mul.Tensor, (node, 0.5), record, name="halved")
        made.append((port, node))
    program.set_outputs(made)


@graph_pass("write_in_place", "writes what would come out with the other sign", provides=("in_place",))
def other_sign(program: Program) -> None:
    """Stands for the pass of the same name: users' passes have no place in an update."""
    write_in_place.function(program)
    write = next(n for n in _called(program, aten.copy_.default) if n.args[0].name == "first_weight")
    with program.graph.inserting_before(write):
        new = program.call(aten.neg.default, (write.args[1],), info(write), name="negated")
    write.args = (write.args[0], new)


@graph_pass("breaks", "leaves a program that the verifier refuses")
def breaks(program: Program) -> None:
    node = _called(program, aten.tanh.default)[0]
    node.meta["val"] = tensor(node).new_empty(1)


@graph_pass("raises", "can't do it")
def raises(program: Program) -> None:
    raise ZeroDivisionError("no bytes to share")


@graph_pass("write_in_place", "can't do it in an update", provides=("in_place",))
def raises_in_update(program: Program) -> None:
    raise ZeroDivisionError("no states to share")


@graph_pass("raises_late", "can't do it where weights are sharded", requires=("sharded",))
def raises_late(program: Program) -> None:
    raise ZeroDivisionError("no shards to share")
