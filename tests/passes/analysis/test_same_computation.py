"""Programs that only start and await transfers elsewhere are told from those that compute otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zgraph
from zgraph.build.planned_step import planned_step
from zgraph.build.step_program import StepProgram
from zgraph.passes.analysis.costs import CPU, Costs, Link, computes
from zgraph.passes.analysis.same_computation import difference
from zgraph.program import collectives
from zgraph.program.digest import collective_order
from zgraph.program.node import Role, info
from zgraph.program.program import Program

aten = torch.ops.aten


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, n), nn.GELU(), nn.Linear(n, 16)) for n in (16, 256) * 3)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def costs(bandwidth: float) -> Costs:
    link = Link(bandwidth=bandwidth, latency=1e-5)
    return Costs(CPU.model_copy(update={"links": {"*": link}}), fused=False)


@pytest.fixture(scope="module")
def step() -> StepProgram:
    torch.manual_seed(0)
    return planned_step(Net(), zgraph.Plan(backend="eager"), (torch.randn(64, 16),), 2, costs(3e8)).step


@pytest.fixture(scope="module")
def base(step) -> Program:
    return step.history().program


def test_another_order_of_transfers_computes_the_same(step, base):
    others = [step.rescheduled(costs(bandwidth)).history().program for bandwidth in (1e6, 1e7, 1e8, 1e9, 1e10)]
    assert any(collective_order(base) != collective_order(other) for other in others)
    assert all(difference(base, other) is None and difference(other, base) is None for other in others)


def test_names_do_not_count(base):
    other = base.snapshot()
    for number, node in enumerate(other.graph.nodes):
        if node.op == "call_function":
            node._rename(f"v{number}")
    assert difference(base, other) is None


def other_operand(p: Program) -> None:
    node = next(n for n in p.graph.nodes if n.target is aten.add.Tensor and n.args[0] is not n.args[1])
    node.args = (node.args[1], node.args[1])


def other_order(p: Program) -> None:
    """Two operators that do not read each other change places."""
    own = [n for n in p.graph.nodes if computes(n) and info(n).role is Role.COMPUTE]
    first, second = next(
        (a, b) for b in own for a in own if a < b and all(operand < a for operand in b.all_input_nodes)
    )
    first.prepend(second)


def other_operator(p: Program) -> None:
    next(n for n in p.graph.nodes if n.target is aten.gelu.default).target = aten.relu.default


def other_argument(p: Program) -> None:
    next(n for n in p.graph.nodes if collectives.is_start(n) and collectives.reduce_op_of(n)).update_arg(1, "sum")


def one_less(p: Program) -> None:
    wait = next(
        n for n in p.graph.nodes if collectives.is_wait(n) and collectives.reduce_op_of(collectives.start_of(n))
    )
    wait.replace_all_uses_with(collectives.start_of(wait))
    p.graph.erase_node(wait)


def other_result(p: Program) -> None:
    grads = list(p.output_node().args[0])
    same = [i for i, g in enumerate(grads) if g.meta["val"].shape == grads[-1].meta["val"].shape]
    grads[same[0]], grads[same[-1]] = grads[same[-1]], grads[same[0]]
    p.output_node().args = (tuple(grads),)


@pytest.mark.parametrize(
    "change",
    [other_operand, other_order, other_operator, other_argument, one_less, other_result],
    ids=lambda c: c.__name__,
)
def test_what_computes_otherwise_is_found(change, base):
    other = base.snapshot()
    change(other)
    assert difference(base, other) is not None and difference(other, base) is not None
