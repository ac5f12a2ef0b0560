"""What virtual ranks are: where each stands in the mesh, and what a collective gives it."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from zgraph.errors import UnsupportedError
from zgraph.program import collectives
from zgraph.program.node import NodeInfo, Phase
from zgraph.program.program import InputRole, OutputRole, Port, Program
from zgraph.verification.virtual_ranks import coordinates, group_ranks, run_virtual

pytestmark = pytest.mark.core
aten = torch.ops.aten


def program(build, mesh: dict[str, int], *shapes: tuple[int, ...]) -> Program:
    """A program of inputs of these shapes; `build(made, *inputs)` inserts nodes and returns the output."""
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(len(shapes))]
    graph.output(())
    mode = FakeTensorMode()
    inputs = [Port(InputRole.INPUT, f"input_{i}", i) for i in range(len(shapes))]
    made = Program("test", fx.GraphModule({}, graph), inputs, [], mesh, {}, mode)
    with mode:
        for node, shape in zip(nodes, shapes, strict=True):
            node.meta["val"] = torch.empty(shape)
    with graph.inserting_before(graph.output_node()):
        made.set_outputs([(Port(OutputRole.OUTPUT, "output_0", 0), build(made, *nodes))])
    return made


def call(made: Program, target, *args) -> fx.Node:
    return made.call(target, args, NodeInfo(Phase.FORWARD), name="made")


def gather(dim: str, size: int):
    return lambda made, x: call(made, collectives.WAIT, call(made, collectives.ALL_GATHER, x, size, dim))


def scatter(op: str, dim: str, size: int):
    return lambda made, x: call(made, collectives.WAIT, call(made, collectives.REDUCE_SCATTER, x, op, size, dim))


def reduce(op: str, dim: str):
    return lambda made, x: call(made, collectives.WAIT, call(made, collectives.ALL_REDUCE, x, op, dim))


def exchange(dim: str, sizes: list[int]):
    return lambda made, x: call(made, collectives.WAIT, call(made, collectives.ALL_TO_ALL, x, sizes, sizes, dim))


def on_ranks(made: Program, values: list[torch.Tensor]) -> list[torch.Tensor]:
    return [outputs[0] for outputs in run_virtual(made, [[v] for v in values])]


# -- the mesh --------------------------------------------------------------------------------------------------------
def test_the_last_dimension_of_a_mesh_varies_fastest():
    mesh = {"replicate": 2, "dp": 3}
    assert [tuple(coordinates(mesh, r).values()) for r in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert list(coordinates(mesh, 4)) == ["replicate", "dp"]


def test_a_group_holds_the_ranks_that_differ_in_its_dimension_alone():
    mesh = {"replicate": 2, "dp": 3}
    assert group_ranks(mesh, "dp", 4) == [3, 4, 5]
    assert group_ranks(mesh, "replicate", 4) == [1, 4]
    assert all(r in group_ranks(mesh, dim, r) for dim in mesh for r in range(6))


def test_coordinates_are_those_of_torchs_device_mesh():
    mesh = {"pp": 2, "replicate": 3, "dp": 4}
    ranks = torch.arange(24).view(2, 3, 4)
    for r in range(24):
        where = coordinates(mesh, r)
        assert ranks[where["pp"], where["replicate"], where["dp"]] == r
        assert group_ranks(mesh, "replicate", r) == ranks[where["pp"], :, where["dp"]].tolist()


# -- collectives -----------------------------------------------------------------------------------------------------
def test_a_gather_puts_shards_one_after_another_in_rank_order():
    made = program(gather("dp", 3), {"dp": 3}, (2, 2))
    shards = [torch.full((2, 2), float(r)) for r in range(3)]
    for whole in on_ranks(made, shards):
        assert torch.equal(whole, torch.cat(shards))


def test_a_gather_stays_within_its_group():
    made = program(gather("dp", 2), {"replicate": 2, "dp": 2}, (1,))
    results = on_ranks(made, [torch.tensor([float(r)]) for r in range(4)])
    assert [r.tolist() for r in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_a_gather_over_the_outer_dimension_takes_every_other_rank():
    made = program(gather("replicate", 2), {"replicate": 2, "dp": 2}, (1,))
    results = on_ranks(made, [torch.tensor([float(r)]) for r in range(4)])
    assert [r.tolist() for r in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_a_reduce_scatter_gives_each_rank_its_own_rows():
    made = program(scatter("sum", "dp", 2), {"dp": 2}, (4, 1))
    values = [torch.tensor([[1.0], [2], [3], [4]]), torch.tensor([[10.0], [20], [30], [40]])]
    a, b = on_ranks(made, values)
    assert a.tolist() == [[11], [22]] and b.tolist() == [[33], [44]]


def test_a_reduce_scatter_of_averages_divides_by_the_group_and_not_by_the_world():
    made = program(scatter("avg", "dp", 2), {"replicate": 3, "dp": 2}, (2,))
    results = on_ranks(made, [torch.full((2,), float(r)) for r in range(6)])
    assert [r.tolist() for r in results] == [[0.5], [0.5], [2.5], [2.5], [4.5], [4.5]]


@pytest.mark.parametrize("op,expected", [("sum", 6.0), ("avg", 2.0)])
def test_an_all_reduce_sums_or_averages(op, expected):
    made = program(reduce(op, "dp"), {"dp": 3}, ())
    assert [float(r) for r in on_ranks(made, [torch.tensor(float(r + 1)) for r in range(3)])] == [expected] * 3


def test_additions_are_made_in_rank_order():
    """In float32 1e8 + 1 is 1e8: from the first rank on, the small terms are lost; from the last, they are not."""
    made = program(reduce("sum", "dp"), {"dp": 3}, ())
    down = on_ranks(made, [torch.tensor(v) for v in (1e8, 3.0, 3.0)])
    up = on_ranks(made, [torch.tensor(v) for v in (3.0, 3.0, 1e8)])
    assert float(down[0]) == float(torch.tensor(1e8) + 3.0 + 3.0)
    assert float(up[0]) == float(torch.tensor(3.0) + 3.0 + 1e8)
    assert float(up[0]) != float(down[0])


def test_ranks_keep_their_own_operands():
    """A reduction must not write into a rank's value: another node reads it afterwards."""

    def build(made, x):
        total = reduce("sum", "dp")(made, x)
        return call(made, aten.sub.Tensor, total, x)

    made = program(build, {"dp": 2}, (3,))
    values = [torch.ones(3), torch.full((3,), 5.0)]
    assert [r.tolist() for r in on_ranks(made, values)] == [[5.0] * 3, [1.0] * 3]
    assert values[0].tolist() == [1.0] * 3


def test_an_all_to_all_gives_each_rank_a_piece_of_every_other():
    made = program(exchange("dp", [2, 2, 2]), {"dp": 3}, (6,))
    results = on_ranks(made, [torch.arange(6.0) + 10 * r for r in range(3)])
    assert [r.tolist() for r in results] == [
        [0, 1, 10, 11, 20, 21],
        [2, 3, 12, 13, 22, 23],
        [4, 5, 14, 15, 24, 25],
    ]


def test_an_all_to_all_stays_within_its_group():
    made = program(exchange("replicate", [1, 1]), {"replicate": 2, "dp": 2}, (2, 1))
    results = on_ranks(made, [torch.tensor([[float(r)], [r + 10.0]]) for r in range(4)])
    assert [r.flatten().tolist() for r in results] == [[0, 2], [1, 3], [10, 12], [11, 13]]


def test_a_reduction_that_is_not_there_is_refused():
    made = program(reduce("min", "dp"), {"dp": 2}, (4,))
    with pytest.raises(UnsupportedError, match="'min' on virtual ranks"):
        on_ranks(made, [torch.ones(4), torch.ones(4)])


# -- ranks -----------------------------------------------------------------------------------------------------------
def test_each_rank_draws_from_its_own_random_state():
    made = program(lambda made, x: call(made, aten.bernoulli.p, x, 0.5), {"dp": 3}, (64,))
    states = [torch.Generator().manual_seed(s).get_state() for s in (1, 2, 1)]
    before = [s.clone() for s in states]
    a, b, c = (out[0] for out in run_virtual(made, [[torch.ones(64)]] * 3, states))
    assert torch.equal(a, c) and not torch.equal(a, b)
    assert torch.equal(a, torch.ones(64).bernoulli(0.5, generator=torch.Generator().manual_seed(1)))
    assert all(not torch.equal(s, old) for s, old in zip(states, before, strict=True))


def test_states_go_on_where_an_earlier_program_stopped():
    made = program(lambda made, x: call(made, aten.bernoulli.p, x, 0.5), {"dp": 1}, (64,))
    states = [torch.Generator().manual_seed(1).get_state()]
    first = run_virtual(made, [[torch.ones(64)]], states)[0][0]
    second = run_virtual(made, [[torch.ones(64)]], states)[0][0]
    generator = torch.Generator().manual_seed(1)
    assert torch.equal(first, torch.ones(64).bernoulli(0.5, generator=generator))
    assert torch.equal(second, torch.ones(64).bernoulli(0.5, generator=generator))


def test_values_of_fewer_ranks_than_the_mesh_has_are_refused():
    made = program(reduce("sum", "dp"), {"dp": 3}, ())
    with pytest.raises(ValueError, match="2 ranks' inputs for a mesh of 3"):
        on_ranks(made, [torch.ones(()), torch.ones(())])


def test_a_view_of_what_is_laid_out_otherwise_than_captured_is_a_copy():
    made = program(lambda made, x: call(made, aten.view.default, x, [6]), {"dp": 1}, (2, 3))
    assert on_ranks(made, [torch.arange(6.0).view(3, 2).t()])[0].tolist() == [0, 2, 4, 1, 3, 5]
