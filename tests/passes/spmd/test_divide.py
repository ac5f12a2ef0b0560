"""Ranks that divide a model compute what one process does, with no more collectives than Megatron's scheme has.

On virtual ranks, loss and every gradient: in float64 within 1e-12, in float32 within 1e-5 (transformers' norms and losses are in float32
whatever the model is).
"""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from divided_models import LENGTH, OWN, ROWS, WIDTH, Llama, of_transformers, own
from sweeps import in_turn, sweep

import zgraph
from zgraph.build.planned_step import captured_program
from zgraph.passes.analysis.axes import Axes
from zgraph.passes.canonicalize.cleanup import cleanup
from zgraph.passes.spmd.choose_placements import Goal, choose_placements
from zgraph.passes.spmd.divide import DivideOptions, divide
from zgraph.passes.spmd.placements import Partial, Placements, Replicate, Shard
from zgraph.program import collectives
from zgraph.program.node import Phase, info, tensor, value
from zgraph.program.program import Program

SEQUENCE = [False, True]
# Two of the models in both ways on both numbers of ranks, all others once on each.
GRID = [(name, ranks, sequence) for name in OWN for ranks, sequence in ((2, True), (4, False))]
GRID += [(name, ranks, sequence) for name in ("llama", "gpt2") for ranks, sequence in ((2, False), (4, True))]


def assert_same(model, inputs, world, **plan):
    plan = zgraph.Plan(**{"tensor_parallel": "auto", "backend": "eager", "zero": 0, **plan})
    torch.manual_seed(1)
    found = zgraph.verify(model, plan, world, inputs)
    assert found.ok, str(found)
    assert any(d.what == "output" for d in found.differences)
    assert any(d.what == "gradient" for d in found.differences)


@sweep("name,ranks,sequence", GRID, quick=(0,))
def test_a_divided_model_is_the_model(name, ranks, sequence):
    assert_same(*own(name), ranks, mesh={"tp": ranks}, sequence_parallel=sequence)


@sweep("name, stage", [("llama", 0), ("gpt2", 1), ("gpt2", 2), ("llama", 3), ("gpt2", 3)], quick=1)
def test_a_divided_model_is_sharded_over_data_ranks_as_well(name, stage):
    sequence = (stage > 1) == (name == "llama")
    assert_same(*own(name), 4, mesh={"dp": 2, "tp": 2}, zero=stage, sequence_parallel=sequence)


@pytest.mark.slow
@pytest.mark.parametrize("sequence", SEQUENCE)
@pytest.mark.parametrize("name,mesh", [("llama", {"pp": 2, "tp": 2}), ("gpt2", {"pp": 2, "dp": 2, "tp": 2})])
def test_the_stages_of_a_pipeline_are_divided(name, mesh, sequence):
    world, zero = 2 ** len(mesh), int("dp" in mesh)
    assert_same(*own(name), world, mesh=mesh, zero=zero, micro_batches=2, sequence_parallel=sequence)


@pytest.mark.parametrize(
    "name, backend",
    [*in_turn(["gpt2", "llama", "bert", "t5", "vit", "mixtral"], ["eager", "inductor"]), ("llama", "eager")],
)
@pytest.mark.slow
def test_a_divided_model_of_transformers_is_the_model(name, backend):
    pytest.importorskip("transformers")
    sequence, ranks = backend == "inductor", 4 if backend == "eager" else 2
    assert_same(*of_transformers(name), ranks, mesh={"tp": ranks}, sequence_parallel=sequence, backend=backend)


@pytest.mark.parametrize("name", ["bert", "t5", "vit"])
@pytest.mark.slow
def test_a_divided_model_of_transformers_is_the_model_in_float64(name):
    pytest.importorskip("transformers")
    model, batch = of_transformers(name)
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    assert_same(model.double(), batch, 2, mesh={"tp": 2}, sequence_parallel=True)


# -- collectives ------------------------------------------------------------------------------------------------------
Seen = Counter[tuple[str, str, int]]


def program_of(model, inputs, ranks: int, sequence: bool, table="auto") -> Program:
    plan = zgraph.Plan(mesh={"tp": ranks}, tensor_parallel=table, sequence_parallel=sequence, backend="eager", zero=0)
    program = captured_program(model, plan, inputs, ranks)
    cleanup()(program)
    divide(DivideOptions("tp", sequence))(program)
    return program


def sent(program: Program) -> Seen:
    """The collectives of a program: in which phase, of what kind, and how many elements a rank gives."""
    starts = [n for n in program.nodes if n.op == "call_function" and collectives.is_start(n)]
    return Counter((info(n).phase.value, collectives.kind(n), tensor(n.all_input_nodes[0]).numel()) for n in starts)


@functools.cache
def of_a_layer(sequence: bool) -> Seen:
    """What a second layer of a Llama adds."""
    few, many = (sent(program_of(Llama(layers=layers).double(), _batch(), 2, sequence)) for layers in (1, 2))
    added = Counter(many)
    added.subtract(few)
    return Counter({key: count for key, count in added.items() if count})


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(64, (ROWS, LENGTH))
    return ids, ids


def test_how_nodes_are_computed_is_decided_before_anything_is_built():
    model, inputs = own("encoder")
    program = captured_program(model, zgraph.Plan(mesh={"tp": 2}, backend="eager", zero=0), inputs, 2)
    cleanup()(program)
    before = {n: value(n) for n in program.nodes}
    placements = Placements(program, "tp", Axes(program))
    decisions = choose_placements(placements, Goal())
    assert not any(collectives.is_start(n) for n in program.nodes)
    assert all(value(n) is before[n] for n in program.nodes if n in before)  # (all are whole yet)
    assert decisions.own and all(placements.of(node) == shard for node, shard in decisions.own.items())
    found = {type(p) for results in placements.of_results.values() for p in results}
    assert found == {Shard, Partial, Replicate}


@pytest.mark.slow
def test_a_layer_of_llama_has_two_all_reduces_in_each_direction():
    activation = ROWS * LENGTH * WIDTH
    assert of_a_layer(sequence=False) == {
        (Phase.FORWARD.value, "all_reduce", activation): 2,
        (Phase.BACKWARD.value, "all_reduce", activation): 2,
    }


@pytest.mark.slow
def test_with_sequence_parallelism_a_reduce_scatter_and_an_all_gather_stand_for_each():
    """In the backward what was saved in parts is gathered again, for the weights' gradients, as Megatron does; and the norms' weights have
    a gradient on each rank, which are summed."""
    activation = ROWS * LENGTH * WIDTH
    assert of_a_layer(sequence=True) == {
        (Phase.FORWARD.value, "reduce_scatter", activation): 2,
        (Phase.FORWARD.value, "all_gather", activation // 2): 2,
        (Phase.BACKWARD.value, "reduce_scatter", activation): 2,
        (Phase.BACKWARD.value, "all_gather", activation // 2): 4,
        (Phase.BACKWARD.value, "all_reduce", WIDTH): 2,
    }


@pytest.mark.slow
def test_the_head_and_its_loss_send_no_logits():
    vocabulary = sent(program_of(Llama(layers=1).double(), _batch(), 2, sequence=False))
    rows, activation = ROWS * LENGTH, ROWS * LENGTH * WIDTH
    vocabulary.subtract(of_a_layer(sequence=False))
    assert {key: count for key, count in vocabulary.items() if count} == {
        (Phase.FORWARD.value, "all_reduce", activation): 1,  # the words' vectors
        (Phase.FORWARD.value, "all_reduce", rows): 3,  # the largest logit, the sum of exponentials, the target's
        (Phase.BACKWARD.value, "all_reduce", rows): 1,  # the sum of the gradient over words
        (Phase.BACKWARD.value, "all_reduce", activation): 1,  # the head's input
    }


def test_what_has_the_shape_of_a_sum_over_ranks_has_a_whole_shape():
    """`zeros_like` of a value that is a share on each rank, which `sequence_parallel` would divide."""

    class Zeros(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = torch.nn.Linear(WIDTH, 64), torch.nn.Linear(64, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = self.outer(self.inner(x).relu())
            return (torch.full_like(made, 0.5) + made).square().mean()

    torch.manual_seed(0)
    inputs = (torch.randn(ROWS, LENGTH, WIDTH).double(),)
    assert_same(Zeros().double(), inputs, 2, mesh={"tp": 2}, sequence_parallel=True)


@pytest.mark.slow
def test_a_graph_alone_gives_the_divisions_of_llamas_own_table():
    pytest.importorskip("transformers")
    model, batch = of_transformers("llama")
    auto, own_table = (program_of(model, batch, 2, False, table).params for table in ("auto", "model"))
    divided = {name: spec.division for name, spec in own_table.items() if spec.division is not None}
    assert len(divided) == 9  # (the embedding, the seven products of a layer, the head)
    assert {name: auto[name].division for name in divided} == divided


@sweep("fields", [{"recompute": "full"}, {"recompute": ["layers.*"]}], quick=1)
def test_what_is_computed_again_does_not_ask_other_ranks_again(fields):
    """The collectives' results are kept: no rank may wait for others in the backward for what it has had."""
    assert_same(*own("llama"), 2, mesh={"tp": 2}, **fields)
