"""Products and the collectives beside them, in pieces: what is computed is the same, and a piece is on the link while the next is multiplied.

On virtual ranks in float64 within 1e-12, in float32 within 1e-5; that it is faster where it is chosen, the simulator says.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from divided_models import OWN, of_transformers, own
from golden_models import Llama
from pydantic import ValidationError
from sweeps import in_turn, product, sweep

import zgraph
from zgraph.build.pass_pipeline import PassFilter, build
from zgraph.build.planned_step import captured_program
from zgraph.errors import PlanError
from zgraph.passes.analysis.costs import H100, Costs, Hardware, Link
from zgraph.passes.analysis.simulator import simulate
from zgraph.passes.spmd.interleave import InterleaveOptions, interleave
from zgraph.program import collectives
from zgraph.program.node import info
from zgraph.program.program import Program

TP = 4
SLOW = H100.model_copy(update={"name": "h100-slow", "links": {"*": Link(bandwidth=100e9, latency=3e-6)}})


def assert_same(model, inputs, world, **plan):
    plan = zgraph.Plan(**{"backend": "eager", "zero": 0, "async_tensor_parallel": 2, **plan})
    torch.manual_seed(1)
    found = zgraph.verify(model, plan, world, inputs)
    assert found.ok, str(found)
    assert any(d.what == "gradient" for d in found.differences)


@sweep(
    "name, sequence, pieces",
    [(n, *way) for n, way in in_turn([*OWN], [(False, 2), (True, 3)])] + [("llama", True, 3)],
    quick=1,
)
def test_pieces_give_what_the_whole_gives(name, sequence, pieces):
    assert_same(*own(name), 2, mesh={"tp": 2}, sequence_parallel=sequence, async_tensor_parallel=pieces)


@pytest.mark.parametrize("name", ["gpt2", "t5", "mixtral"])
@pytest.mark.slow
def test_models_of_transformers_too(name):
    pytest.importorskip("transformers")
    assert_same(*of_transformers(name), 2, mesh={"tp": 2}, sequence_parallel=True)


@pytest.mark.parametrize(
    "mesh,fields",
    [
        ({"tp": 4}, {}),
        ({"dp": 2, "tp": 2}, {"zero": 1}),
        ({"dp": 2, "tp": 2}, {"zero": 3, "sequence_parallel": True}),
        ({"dp": 2, "tp": 2}, {"zero": 3, "backend": "inductor", "sequence_parallel": True}),
        ({"tp": 2}, {"backend": "inductor"}),
        ({"tp": 2}, {"recompute": "full", "sequence_parallel": True}),
        ({"tp": 2}, {"recompute": "full", "partition_activations": True}),
        ({"tp": 2}, {"tiles": {"loss": 2}}),
        ({"tp": 2}, {"tiles": {"loss": 4}, "sequence_parallel": True}),
        ({"tp": 2}, {"precision": "bf16"}),
        ({"pp": 2, "tp": 2}, {"micro_batches": 2}),
        ({"pp": 2, "tp": 2}, {"micro_batches": 2, "schedule": "zb"}),
        ({"cp": 2, "tp": 2}, {"sequence_parallel": True}),
    ],
    ids=str,
)
@pytest.mark.slow
def test_it_goes_together_with_everything_else(mesh, fields):
    world = 2 ** len(mesh) if mesh != {"tp": 4} else 4
    assert_same(*own("gpt2"), world, mesh=mesh, **fields)


# -- what is written --------------------------------------------------------------------------------------------------------
def divided(
    rows: int, length: int, hardware: Hardware, sequence: bool, width: int = 1024, layers: int = 1
) -> tuple[Program, Costs]:
    """A llama's program as the pass meets it. Nothing is computed: shapes may be large."""
    with torch.device("meta"):
        model, words = Llama(layers, width, 4096), torch.zeros(rows, length, dtype=torch.int64)
    plan = zgraph.Plan(mesh={"tp": TP}, zero=0, sequence_parallel=sequence, precision="bf16")
    costs = Costs(hardware)
    program = captured_program(model, plan, (words, words), TP)
    for before in PassFilter(until="interleave").cut(build(plan, costs=costs))[:-1]:
        before(program)
    return program, costs


def starts(program: Program) -> list:
    return [n for n in program.nodes if collectives.is_start(n) and info(n).mesh_dim == "tp"]


def sent(program: Program) -> Counter:
    found = Counter()
    for start in starts(program):
        found[collectives.kind(start)] += start.all_input_nodes[0].meta["val"].nbytes
    return found


@pytest.mark.parametrize("sequence", [False, True], ids=["sums", "sequence"])
@pytest.mark.slow
def test_each_rank_sends_the_same_bytes_in_more_messages(sequence):
    program, costs = divided(4, 256, SLOW, sequence)
    before, count = sent(program), len(starts(program))
    found = interleave(InterleaveOptions(pieces=4, costs=costs))(program)
    assert found["collectives"] >= 4 and found["pieces"] == 4 * found["collectives"]
    assert sent(program) == before
    assert len(starts(program)) == count + 3 * found["collectives"]


@pytest.mark.parametrize("sequence", [False, True], ids=["sums", "sequence"])
@pytest.mark.slow
def test_a_piece_is_on_the_link_while_the_next_is_multiplied(sequence):
    program, costs = divided(4, 256, SLOW, sequence)
    interleave(InterleaveOptions(pieces=2, costs=costs))(program)
    order = {n: i for i, n in enumerate(program.graph.nodes)}
    beside = Counter()
    for start in starts(program):
        between = [n for n in program.graph.nodes if order[start] < order[n] < order[collectives.wait_of(start)]]
        if info(start).made_by == "interleave":
            beside[collectives.kind(start)] += any(n.target is torch.ops.aten.mm.default for n in between)
    assert all(beside.values()) and set(beside) == ({"all_gather", "reduce_scatter"} if sequence else {"all_reduce"})


@pytest.mark.parametrize(
    "rows,length,width,hardware,sequence,chosen",
    [
        (4, 2048, 1024, SLOW, True, True),
        (1, 8192, 1024, SLOW, True, True),
        (3, 1000, 1024, SLOW, True, True),
        (2, 4096, 4096, SLOW, False, True),
        (2, 4096, 4096, H100, True, True),
        (4, 2048, 1024, H100, True, False),
        (4, 2048, 1024, SLOW, False, False),
    ],
)
@pytest.mark.slow
def test_it_is_done_where_the_simulator_says_that_it_is_faster(rows, length, width, hardware, sequence, chosen):
    program, costs = divided(rows, length, hardware, sequence, width=width)
    whole = simulate(program, costs)
    found = interleave(InterleaveOptions(costs=costs))(program)
    pieces = simulate(program, costs)
    assert (found["collectives"] > 0) is chosen
    assert pieces.seconds < whole.seconds if chosen else pieces.seconds == whole.seconds


@product("pieces, sequence", [None, 5000], [False, True], together=1)
def test_what_can_t_be_had_in_pieces_or_is_not_worth_it_stays_whole_and_says_so(sequence, pieces):
    program, costs = divided(1, 8, H100, sequence)
    nodes = [(n.name, str(n.target)) for n in program.nodes]
    found = interleave(InterleaveOptions(pieces=pieces, costs=costs))(program)
    said = [r for r in program.remarks if r.made_by == "interleave"]
    assert found["collectives"] == 0 < found["left"] == len(said)
    assert all(("5000" in r.why) is (pieces is not None) for r in said)
    assert [(n.name, str(n.target)) for n in program.nodes] == nodes


@pytest.mark.slow
def test_equal_layers_are_decided_alike():
    program, costs = divided(4, 2048, SLOW, True, layers=2)
    interleave(InterleaveOptions(costs=costs))(program)
    by_layer = [Counter(), Counter()]
    for start in starts(program):
        module = info(start).module or ""
        if module.startswith("layers."):
            by_layer[int(module.split(".")[1])][tuple(module.split(".")[2:]), collectives.kind(start)] += 1
    assert by_layer[0] and by_layer[0] == by_layer[1]


@pytest.mark.parametrize("asked", [1, 0, "on", True])
def test_what_means_nothing_is_refused(asked):
    with pytest.raises((PlanError, ValidationError), match="async_tensor_parallel"):
        zgraph.Plan(mesh={"tp": 2}, async_tensor_parallel=asked)


def test_without_divided_weights_it_is_refused_and_off_leaves_it_out():
    with pytest.raises(PlanError, match="async_tensor_parallel"):
        zgraph.Plan(async_tensor_parallel=2)
    names = [p.name for p in build(zgraph.Plan(mesh={"tp": 2}, async_tensor_parallel="off"))]
    assert "interleave" not in names and "interleave" in [p.name for p in build(zgraph.Plan(mesh={"tp": 2}))]
