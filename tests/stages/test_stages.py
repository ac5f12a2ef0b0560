"""The stages of a model, run one after another, give what plain PyTorch gives; only what has to cross does.

That is bit for bit but for the gradients of parameters that several stages hold, and for values that cross in another layout than
they had.
"""

from __future__ import annotations

import functools
import itertools
import re

import models
import pytest
import stage_models
import torch
from stage_models import Cuts
from stage_runs import Cutting, assert_equal, tied, with_passes
from sweeps import in_turn, product, sweep
from torch import nn

import zgraph
from zgraph.codegen.partition import Parts, split
from zgraph.errors import PlanError
from zgraph.passes import verify_program
from zgraph.passes.stages.cut_stages import Stages
from zgraph.passes.stages.min_cuts import made_again
from zgraph.program.node import info, tensor
from zgraph.program.program import InputRole, OutputRole, Program

Plan = zgraph.Plan
aten = torch.ops.aten
ROUNDED = {"gru", "lstm"}  # captured in parts of which PyTorch's own operators round otherwise
PARTED = {"buffer_update"}  # all of it reads or writes buffers that change


@functools.cache
def cutting(name: str) -> Cutting:
    return Cutting(stage_models.build(name) if name in stage_models.MODELS else models.build(name), micro_batches=3)


def assert_same(it: Cutting, stages: Stages, *, apart: bool = False, rounded: bool = False) -> None:
    within = 1e-6 if rounded or it.relaid(stages) else 0.0
    assert_equal(it.run(stages, apart=apart), it.plain(), tied=tied(stages), bound=within)


WAYS = [(2, "uniform", False), (3, "time", True)]


# -- the same numbers ---------------------------------------------------------------------------------------------------
@pytest.mark.core
@sweep("name, way", [*in_turn([*stage_models.MODELS], WAYS), *in_turn([*stage_models.MODELS], WAYS[::-1])], quick=5)
def test_stages_that_are_found_give_what_the_model_gives(name, way):
    it, (count, how, apart) = cutting(name), way
    assert_same(it, it.found(count, how), apart=apart)


@sweep("name, at", list(itertools.product(stage_models.MODELS, [(2, 0), (3, 1), (4, 3), (5, 4), (3, 7)])), quick=6)
def test_stages_at_random_operators_give_what_the_model_gives(name, at):
    it, (count, seed) = cutting(name), at
    assert_same(it, it.at_random(count, seed), apart=bool(seed % 2))


@sweep("name, at", in_turn(sorted({*models.PLAIN} - PARTED), [(3, 1), (4, 8)]), quick=3)
def test_any_model_can_be_cut_at_random_operators(name, at):
    it, (count, seed) = cutting(name), at
    assert_same(it, it.at_random(count, seed), apart=bool(seed % 2), rounded=name in ROUNDED)


@pytest.mark.parametrize("name", ["gpt2", "t5", "vit", "llama"])
@pytest.mark.slow
def test_a_transformer_can_be_cut(name):
    it = cutting(name)
    assert_same(it, it.found(3, "time"), apart=name == "gpt2")


def test_dropout_draws_what_the_model_draws():
    it = cutting("Drops")
    stages = it.found(4)
    draws = [sum(n.target is aten.native_dropout.default for n in p.nodes) for p in stages.programs]
    assert sum(draws) == 8
    assert all(draws)
    assert_same(it, stages)


# -- what crosses -------------------------------------------------------------------------------------------------------
def test_masks_and_rotary_tables_are_made_by_each_stage():
    stages = cutting("Rotary").found(3)
    assert {(t.source, t.target, tuple(t.like.shape)) for t in stages.transfers} == {
        (0, 1, (8, 5, 12)),
        (1, 2, (8, 5, 12)),
        (2, 1, (8, 5, 12)),
        (1, 0, (8, 5, 12)),
    }
    for program in stages.programs:
        assert any(n.target is aten.cos.default for n in program.nodes)


def test_a_skip_goes_past_the_stages_between():
    it = cutting("Ladder")
    stages = it.found(6, ("down.1", "down.2", "up.0", "up.1", "up.2"))
    skips = {(t.source, t.target) for t in stages.transfers if abs(t.source - t.target) > 1}
    assert skips == {(0, 5), (1, 4), (5, 1), (4, 2)}  # (back to the pooling, where its gradient is added)
    assert {(t.source, t.target) for t in stages.transfers} - skips == {
        *((s, s + 1) for s in range(5)),
        *((s + 1, s) for s in range(5)),
    }
    assert_same(it, stages)


def test_the_encoders_output_goes_to_each_decoder_stage_from_where_it_is_made():
    it = cutting("Translator")
    stages = it.found(3, ("decoder.1", "decoder.2"))
    ahead = [(t.name, t.source, t.target) for t in stages.transfers if not t.back]
    encoded = {name for name, _, target in ahead if target == 2} & {name for name, _, target in ahead if target == 1}
    assert len(encoded) == 1
    assert sorted((s, t) for _, s, t in ahead) == [(0, 1), (0, 1), (0, 2), (1, 2)]
    assert stages.holders["words.weight"] == (0, 2)


def test_whole_numbers_and_booleans_cross_and_have_no_gradient():
    it = cutting("Typed")
    stages = it.found(4, ("layers.1", "layers.2", "layers.3"))
    ahead = {(t.source, t.target, t.like.dtype) for t in stages.transfers if not t.back}
    assert {(1, 3, torch.bool), (1, 3, torch.int64)} <= ahead
    assert all(t.like.is_floating_point() for t in stages.transfers if t.back)


def test_outputs_of_early_stages_are_given_by_the_last():
    it = cutting("EarlyOutputs")
    stages = it.found(3, ("layers.1", "layers.2"))
    for program in stages.programs[:-1]:
        assert not any(p.role is OutputRole.OUTPUT for p in program.outputs)
    given = [p for p in it.joint.outputs if p.role is OutputRole.OUTPUT]
    assert len(given) == 5  # (what is given back as it came is no output)
    assert [p for p in stages.programs[-1].outputs if p.role is OutputRole.OUTPUT] == given
    assert_same(it, stages)


@sweep("name", ["gpt2", "t5", "Translator", "Thrice"], quick=(2, 3))
def test_the_gradient_of_a_tied_parameter_crosses_nothing(name):
    """Each use's part of it stays in the stage of that use."""
    it = cutting(name)
    stages = it.found(3, "time")
    assert tied(stages)
    shapes = {it.joint.params[n].shape for n in tied(stages)}
    assert not shapes & {tuple(t.like.shape) for t in stages.transfers}


def test_what_crosses_has_no_gaps():
    stages = cutting("Views").at_random(5, 4)
    assert cutting("Views").relaid(stages)
    for transfer in stages.transfers:
        assert aten.is_non_overlapping_and_dense(transfer.like)
        assert not transfer.like.storage_offset()


def test_a_part_of_a_buffer_that_changes_is_copied_before_it_leaves():
    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
            self.register_buffer("mean", torch.zeros(9))

        def forward(self, x):
            x = self.first(x)
            early = self.mean[:6].cos()
            self.mean.add_(1)
            return self.last(x).pow(2).mean() + (early * x.detach()).sum()

    it = Cutting(models.Case(Sliced(), (torch.randn(models.BATCH, 6),)), micro_batches=3)
    stages = it.before(aten.cos.default)
    sent = [n for p, n in stages.programs[0].output_items() if p.role is OutputRole.SENT and "slice" in p.name]
    assert [n.target for n in sent] == [aten.clone.default]
    assert_same(it, stages)


# -- parameters ---------------------------------------------------------------------------------------------------------
def test_each_stage_holds_the_parameters_that_it_reads_and_gives_their_gradients():
    stages = cutting("Thrice").found(4, ("own.1", "own.2", "own.3"))
    assert stages.holders["shared.weight"] == (0, 1, 3)
    assert stages.holders["own.1.weight"] == (1,)
    for stage, program in enumerate(stages.programs):
        assert set(program.params) == {n for n, held in stages.holders.items() if stage in held}
        given = {p.name for p in program.outputs if p.role is OutputRole.GRADIENT}
        assert given == {n for n, spec in program.params.items() if spec.requires_grad}


def test_a_stage_that_reads_a_tied_parameter_without_a_gradient_gives_zeros():
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            x = self.shared(x)
            return self.other(x).pow(2).mean() + (x @ self.shared.weight.detach()).sin().mean()

    it = Cutting(models.Case(Half(), (torch.randn(models.BATCH, 6),)))
    stages = it.before(aten.mm.default)
    assert stages.holders["shared.weight"] == (0, 1)
    parts = it.run(stages).parts["shared.weight"]
    assert not parts[1].any()
    assert_same(it, stages)


def test_a_parameter_that_nothing_reads_is_on_the_first_stage():
    assert cutting("Norms").found(3).holders["spare.weight"] == (0,)


# -- a backward in two parts ------------------------------------------------------------------------------------------------
def gradients(program: Program | None) -> set[str]:
    return {p.name for p in program.outputs if p.role is OutputRole.GRADIENT} if program is not None else set()


def parts_of(stages: Stages) -> list[Parts]:
    return [split(program, apart=True) for program in stages.programs]


@pytest.mark.core
def test_what_earlier_stages_wait_for_needs_no_gradient_of_a_weight():
    it = cutting("even_mlp")
    for number, (parts, program) in enumerate(zip(parts_of(it.found(2)), it.found(2).programs, strict=True)):
        assert gradients(parts.weights) == {n for n in program.params}
        if number == 0:
            assert parts.backward is None
            continue
        assert parts.backward is not None
        assert not gradients(parts.backward)
        products = [n for n in parts.backward.nodes if n.target is aten.mm.default]
        assert [tuple(tensor(n).shape) for n in products] == [
            (8, 24)
        ]  # rows of the batch: of the input, not of a weight
        later = [n for n in parts.weights.nodes if n.target is aten.mm.default]
        assert [tuple(tensor(n).shape) for n in later] == [(48, 24)]


@sweep("name", [*stage_models.MODELS, "gpt2", "unet", "lstm"], quick=range(0, len(stage_models.MODELS), 2))
def test_both_parts_of_a_backward_give_the_whole_ones_gradients_bit_for_bit(name):
    it = cutting(name)
    stages = it.found(2, "time")
    for parts in parts_of(stages):
        assert not gradients(parts.backward)
    whole, apart = it.run(stages).parts, it.run(stages, apart=True).parts
    assert whole.keys() == apart.keys()
    for param, of in whole.items():
        assert all(torch.equal(apart[param][stage], gradient) for stage, gradient in of.items()), param


@sweep("name", ["gpt2", "unet", "Views"], quick=1)
def test_the_second_part_computes_nothing_that_the_first_has_computed(name):
    for parts in parts_of(cutting(name).found(3, "time")):
        if parts.backward is None or parts.weights is None:
            continue
        verify_program(parts.backward)
        first = {n.name for n in parts.backward.nodes if n.op == "call_function" and not made_again(n)}
        second = {n.name for n in parts.weights.nodes if n.op == "call_function" and not made_again(n)}
        assert not first & second
        handed = {p.name for p in parts.backward.outputs if p.role is OutputRole.SAVED}
        taken = {p.name for p in parts.weights.inputs if p.role is InputRole.SAVED}
        assert handed <= taken


def test_a_frozen_stage_has_no_second_part():
    it = cutting("Norms")
    stages = it.found(4, ("layers.3", "layers.6", "layers.9"))
    parts = parts_of(stages)[1]
    assert parts.backward is not None
    assert parts.weights is None
    assert_same(it, stages, apart=True)


# -- with a plan's passes -----------------------------------------------------------------------------------------------------
def case_of(name: str) -> models.Case:
    if name == "stack":
        return models.stack(6)
    return stage_models.build(name) if name in stage_models.MODELS else models.build(name)


def assert_passes_keep(
    name: str, plan: Plan, count: int, *, world: int = 2, apart: bool = False, exact: bool = True
) -> list:
    found, steps = with_passes(case_of(name), plan, world, count, apart=apart)
    assert any(d.what == "gradient" for d in found)
    assert any(d.what == "output" for d in found)
    several = {n for n in steps[0].captured.params if any(n in s.captured.params for s in steps[1:])}
    for difference in found:
        assert difference.ok, difference
        assert difference.exact or not exact or any(difference.name.startswith(n) for n in several), difference
    return steps


@pytest.mark.core
@product("name, zero", ["uneven_mlp", "Thrice", "EarlyOutputs", "Norms"], [0, 1, 2, 3], together=1)
def test_a_stage_is_sharded_like_any_other_program(name, zero):
    plan = Plan(backend="eager", mesh={"dp": 2}, zero=zero)
    assert_passes_keep(name, plan, 2, apart=zero % 2 == 1)


def test_a_stage_is_sharded_within_replicas():
    assert_passes_keep("Ladder", Plan(backend="eager", mesh={"replicate": 2, "dp": 2}, zero=3), 3, world=4, apart=True)


@pytest.mark.parametrize("zero", [1, 3])
def test_a_stages_gradients_of_half_precision_are_scaled_once(zero):
    plan = Plan(backend="eager", mesh={"dp": 2}, zero=zero, precision="fp16")
    steps = assert_passes_keep("Ladder", plan, 3, exact=False)
    for step in steps:
        backward = step.parts().backward
        assert backward is not None
        assert any(p.role is InputRole.SCALE for p in backward.inputs)
    multiplied = [n for s in steps for n in s.history().program.nodes if n.name.startswith("scaled_")]
    assert len(multiplied) == 1


@sweep("name", ["Rotary", "Double"], quick=1)
def test_stages_compute_in_bfloat16(name):
    assert_passes_keep(name, Plan(backend="eager", mesh={"dp": 2}, zero=2, precision="bf16"), 2, exact=False)


@sweep("name", ["Drops", "Ladder", "Views", "OwnFunctions"], quick=(1,))
def test_a_stages_forward_is_computed_again(name):
    plan = Plan(backend="eager", mesh={"dp": 2}, zero=3, recompute="full")
    steps = assert_passes_keep(name, plan, 3, apart=name == "Ladder")
    assert any(info(n).copy_of for s in steps for n in s.history().program.nodes)


@pytest.mark.slow
def test_a_stage_is_made_to_fit_into_a_budget():
    """Each has what the others have: the smallest budget that all can do with."""
    budget = 1
    for _ in range(4):
        try:
            steps = assert_passes_keep("stack", Plan(backend="eager", mesh={"dp": 2}, zero=3, memory_budget=budget), 2)
        except PlanError as error:
            smallest = re.search(r"smallest that works is (\d+)", str(error))
            assert smallest, error
            assert int(smallest[1]) > budget
            budget = int(smallest[1])
        else:
            break
    assert any(info(n).copy_of for s in steps for n in s.history().program.nodes)


@pytest.mark.slow  # (on two ranks: test_inductor_does in test_stage_state.py)
@pytest.mark.inductor
@pytest.mark.parametrize("name,count,apart", [("Rotary", 3, False), ("Thrice", 2, True)])
def test_stages_compiled_by_inductor_give_what_the_model_gives(name, count, apart):
    assert_passes_keep(name, Plan(), count, world=1, apart=apart, exact=False)


# -- what can't be cut --------------------------------------------------------------------------------------------------------
def cuts(what: str, *, requires_grad: bool = False) -> Cutting:
    x = torch.randn(models.BATCH, 6).requires_grad_(requires_grad)
    return Cutting(models.Case(Cuts(what), (x,)))


def test_a_buffer_that_changes_is_not_read_in_two_stages():
    with pytest.raises(
        PlanError, match=r"buffer 'mean' is changed by the forward and read in stages \[0, 1\]"
    ) as raised:
        cuts("buffer").before(aten.mul.Tensor)
    assert raised.value.where == "partition"


def test_an_input_has_no_gradient():
    with pytest.raises(PlanError, match="wants a gradient") as raised:
        cuts("strided", requires_grad=True).before(aten.mean.default)
    assert raised.value.where == "mesh.pp"


def test_as_strided_does_not_look_into_another_stage():
    with pytest.raises(PlanError, match="as_strided looks at a value of another stage"):
        cuts("strided").before(aten.as_strided.default)
    assert_same(cuts("strided"), cuts("strided").before(aten.mean.default))


def test_a_number_is_not_sent():
    assert_same(cuts("number"), cuts("number").before(aten.mean.default))
