"""A second copy of the weights within a node: the backward gathers from it, over the node's ranks alone, and the numbers are those of ZeRO-3."""

from __future__ import annotations

import sys

import pytest
import torch
from ranks import Ranks
from sweeps import sweep
from torch import nn
from torch.nn import functional as F

import zgraph
from zgraph.build.pass_pipeline import build
from zgraph.errors import MeshError, PlanError, VerifyError
from zgraph.forecast.make_symbolic_forecast import symbolic_forecast
from zgraph.passes import PassManager, verify_program
from zgraph.passes.analysis.costs import CPU, Costs, Link
from zgraph.passes.analysis.simulator import simulate
from zgraph.passes.overlap.follow_order import order_of
from zgraph.program import collectives
from zgraph.program.groups import block_of, dim_of, lines_of, ranks_in
from zgraph.program.node import Phase, info, set_info


class Net(nn.Module):
    """Rows that no number of ranks divides, and small tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))
        self.head = nn.Linear(10, 3)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x).square().mean()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.mix = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        return F.cross_entropy(self.head(self.mix(self.table(tokens)).tanh()).flatten(0, 1), tokens.flatten())


class Turned(nn.Module):
    """Weights whose rows lie in another order, a buffer, and a weight of one element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 7, 3), nn.Conv2d(7, 5, 3)).to(memory_format=torch.channels_last)
        self.norm, self.gain = nn.BatchNorm2d(5), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return (self.norm(self.body(x)) * self.gain).square().mean()


INPUTS = {
    Net: lambda: torch.randn(24, 10),
    Tied: lambda: torch.randint(11, (24, 4)),
    Turned: lambda: torch.randn(24, 3, 6, 6),
}


def plan(**fields) -> zgraph.Plan:
    return zgraph.Plan(**{"mesh": {"dp": -1}, "zero": 3, "backend": "eager", "wire": {"secondary": 2}, **fields})


def program_of(world: int = 4, **fields):
    return zgraph.programs(Net(), plan(**fields), (INPUTS[Net](),), world).program


def groups_by_phase(program) -> dict[Phase, set[str]]:
    """The groups that weights are gathered over, by the phase of who reads them."""
    found: dict[Phase, set[str]] = {Phase.FORWARD: set(), Phase.BACKWARD: set()}
    for node in program.graph.nodes:
        if collectives.is_start(node) and collectives.kind(node) == "all_gather":
            found[Phase.BACKWARD if "_again" in node.name else Phase.FORWARD].add(collectives.group_of(node))
    return found


# -- groups -------------------------------------------------------------------------------------------------------------
def test_blocks_of_a_dimension_have_one_name():
    mesh = {"replicate": 2, "dp": 8}
    assert block_of("dp", 4, mesh) == "dp/4" and block_of("dp", 8, mesh) == "dp"
    assert lines_of("dp/4", mesh) == [(0, 1, 2, 3), (4, 5, 6, 7)] and lines_of("dp", mesh) == [tuple(range(8))]
    assert ranks_in("dp/4", mesh) == 4 and dim_of("dp/4") == "dp"
    for size in (3, 1, 16):
        with pytest.raises(MeshError, match="can't be blocks of"):
            block_of("dp", size, mesh)
    for name in ("dp/8", "dp/04", "tp/2"):
        with pytest.raises(MeshError):
            lines_of(name, mesh)


# -- programs -----------------------------------------------------------------------------------------------------------
def test_the_backward_gathers_within_a_node_alone():
    assert groups_by_phase(program_of()) == {Phase.FORWARD: {"dp"}, Phase.BACKWARD: {"dp/2"}}
    for same in ({"wire": {}}, {"wire": {"secondary": 4}}):  # (one node is all ranks)
        assert groups_by_phase(program_of(**same)) == {Phase.FORWARD: {"dp"}, Phase.BACKWARD: {"dp"}}


def test_a_node_keeps_one_copy_of_what_the_backward_gathers():
    made = zgraph.programs(Net(), plan(), (INPUTS[Net](),), 4)
    (record,) = [r for r in made.records if r.name == "secondary_shards"]
    # (Two layers' weights are gathered again, of 12 padded rows of 10 each; the last one's are not let go at the turn.)
    rows = {n.name: n for n in made.program.graph.nodes if n.name.startswith("part_")}
    assert record.stats["gathers"] == len(rows) > 0
    assert record.stats["kept_bytes"] == sum(n.meta["val"].nbytes for n in rows.values()) == len(rows) * 6 * 10 * 4


def test_a_link_of_the_nodes_own_is_what_the_backward_takes():
    program = program_of()
    fast = Link(bandwidth=1e12, latency=0.0)
    slow = CPU.model_copy(update={"links": {"*": Link(bandwidth=1e6, latency=0.0)}})
    own = slow.model_copy(update={"links": {**slow.links, "dp/2": fast}})
    assert simulate(program, Costs(own)).seconds < simulate(program, Costs(slow)).seconds


@pytest.mark.parametrize("bandwidth", [1e3, 1e8])
def test_in_another_programs_order_nothing_starts_before_its_part_is_there(bandwidth):
    made = zgraph.programs(Net(), plan(bucket={"gather": 0, "reduce": 0}), (INPUTS[Net](),), 4)
    costs = Costs(CPU.model_copy(update={"links": {"*": Link(bandwidth=bandwidth, latency=0.0)}}))
    passes = build(plan(bucket={"gather": 0, "reduce": 0}), costs=costs, order=order_of(made.program))
    found = PassManager(passes).run(made.records[0].program.snapshot()).program
    assert order_of(found) == order_of(made.program)


@pytest.mark.parametrize("group", ["dp", "dp/4"])
def test_the_verifier_refuses_another_group(group):
    program = program_of(world=8, wire={"secondary": 2})
    start = next(n for n in program.graph.nodes if collectives.is_start(n) and collectives.group_of(n) == "dp/2")
    collectives.set_group(start, group)
    set_info(start, info(start).replace(mesh_dim=group))
    with pytest.raises(VerifyError, match="states 2 ranks"):
        verify_program(program)


# -- numbers ------------------------------------------------------------------------------------------------------------
CASES = [
    (Net, 4, {}),
    (Turned, 6, {"wire": {"secondary": 3}}),
    (Tied, 4, {"recompute": "full", "precision": "bf16"}),
    (Net, 8, {"mesh": {"replicate": 2, "dp": 4}}),
    (Turned, 4, {}),
    (Tied, 4, {}),
    (Net, 4, {"recompute": ("layers.*",)}),
    (Net, 4, {"micro_batches": 3, "bucket": {"gather": 1_000_000, "reduce": 0}}),
    (Net, 4, {"memory_budget": "20 KiB"}),
    (Net, 6, {"prefetch": {"reuse_bytes": 0}}),
    (Net, 4, {"prefetch": {"enabled": False}}),
]


@sweep("model, world, fields", CASES, quick=(0, 1, 2, 3))
def test_numbers_are_those_of_the_plain_model_bit_for_bit(model, world, fields):
    torch.manual_seed(1)
    found = zgraph.verify(model(), plan(**fields), world, (INPUTS[model](),))
    assert found.exact, found


@sweep("mesh", [{"dp": 4, "tp": 2}, {"dp": 4, "cp": 2}], quick=1)
def test_it_goes_together_with_divided_layers_and_sequences(mesh):
    torch.manual_seed(1)
    assert zgraph.verify(Tied(), plan(mesh=mesh), 8, (INPUTS[Tied](),)).ok


def test_few_bits_go_between_nodes_and_what_came_goes_within_one():
    fields = {"wire": {"secondary": 2, "gather": "int8", "reduce": "int8", "block": 16}}
    assert zgraph.verify(Net(), plan(**fields), 4, (INPUTS[Net](),)).ok
    sent = [n for n in program_of(**fields).graph.nodes if collectives.is_start(n)]
    found = {
        (collectives.group_of(n), n.meta["val"].dtype) for n in sent if "weight" in n.name and "grad" not in n.name
    }
    assert found == {("dp", torch.uint8), ("dp/2", torch.float32)}


def test_a_part_of_another_place_is_found(monkeypatch):
    module = sys.modules["zgraph.passes.zero.secondary_shards"]
    right = module._place
    monkeypatch.setattr(module, "_place", lambda program, *rest: _turned(program, right(program, *rest)))
    assert not zgraph.verify(Net(), plan(), 4, (INPUTS[Net](),)).ok


def _turned(program, place):
    with program.graph.inserting_after(place):
        return program.call(torch.ops.aten.rsub.Scalar, (place, 1), info(place), name="turned")


# -- ranks --------------------------------------------------------------------------------------------------------------
def trained(backend: str, wire: dict) -> list[torch.Tensor]:
    """The weights after three steps, of two micro-batches each in the last."""
    model = zgraph.compile(Net(), plan(backend=backend, wire=wire, optimizer=zgraph.AdamW(lr=0.1)))
    torch.manual_seed(torch.distributed.get_rank())
    for step in range(3):
        for _ in range(1 + step // 2):
            model(torch.randn(3, 10)).backward()
        model.step()
    return [p.full_tensor().detach() for p in model.parameters()]


@pytest.mark.gloo
@sweep("backend", [pytest.param("inductor", marks=pytest.mark.inductor), "eager"], quick=1)
def test_ranks_train_as_without_it_bit_for_bit(four: Ranks, backend: str):
    with_it, without = (four.run(trained, backend, wire) for wire in ({"secondary": 2}, {}))
    for mine, its in zip(with_it, without, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))


# -- what can't be ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "fields, said",
    [
        ({"zero": 2}, "wire.secondary is set, and zero is 2"),
        ({"mesh": {"pp": 2, "dp": -1}, "micro_batches": 2}, "wire.secondary is set, in a pipeline"),
        ({"offload": {"parameters": "cpu"}}, "offload.parameters as well"),
        ({"wire": {"secondary": 1}}, "wire.secondary"),
    ],
)
def test_a_wrong_plan_is_refused(fields, said):
    with pytest.raises(PlanError, match=said):
        plan(**fields)


def test_it_has_no_forecast_by_formulas():
    inputs = {"x": torch.randn(3, 10)}
    with pytest.raises(PlanError, match="a second copy of the weights in a node has no forecast by formulas"):
        symbolic_forecast(Net(), plan(), inputs)


def test_nodes_that_do_not_divide_the_ranks_are_refused():
    with pytest.raises(MeshError, match=r"wire\.secondary is 3, and mesh.dp is 4"):
        zgraph.verify(Net(), plan(wire={"secondary": 3}), 4, (INPUTS[Net](),))
