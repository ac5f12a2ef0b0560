"""On virtual ranks, every model's program gives what the plain model gives.

With `backend="eager"` that is bit for bit: outputs and buffers those of the rank's own batch, gradients the mean of
the ranks' plain gradients added in rank order. Inductor's decomposed operators round otherwise.
"""

from __future__ import annotations

import itertools

import models
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import product, sweep
from torch import nn

import zgraph
from zgraph.passes import graph_pass
from zgraph.program import collectives
from zgraph.program.node import NodeInfo, Phase, Role, info
from zgraph.program.program import InputRole, OutputRole, Port

Plan = zgraph.Plan
HSDP = {"replicate": 2, "dp": 2}

# These are captured in parts of which PyTorch's own, fused operators for CPU round otherwise.
ROUNDED = {"gru", "lstm"}
ZOO = [*models.PLAIN, *models.TRANSFORMERS]
# One (world, stage) for each model, so that each appears with many models.
GRID = [(2, 3), (3, 2), (4, 3), (8, 3), (3, 1), (2, 2), (4, 1), (3, 3), (8, 2)]


def verify(case: models.Case, plan: Plan, world: int):
    torch.manual_seed(1)
    return zgraph.verify(case.model, plan, world, case.inputs, case.loss_fn)


def assert_same(name: str, plan: Plan, world: int) -> None:
    found = verify(models.build(name), plan, world)
    assert found.ok if name in ROUNDED else found.exact, str(found)
    assert any(d.what == "gradient" for d in found.differences)
    assert any(d.what == "output" for d in found.differences)


@sweep("name,at", [(name, GRID[i % len(GRID)]) for i, name in enumerate(ZOO)], quick=(0,))
def test_a_model_is_bit_for_bit_the_plain_one(name, at):
    world, stage = at
    assert_same(name, Plan(zero=stage, backend="eager"), world)


@pytest.mark.core
@sweep("name", ["uneven_mlp", "tied", "dropout", "buffer_update", "shared_gradient", "frozen", "llama"], quick=range(3))
def test_stage_3_is_bit_for_bit_on_three_ranks(name):
    assert_same(name, Plan(zero=3, backend="eager"), 3)


@pytest.mark.core
@product("world, stage", [1, 2, 3, 4, 8], [0, 1, 2, 3], together=1)
def test_every_stage_is_bit_for_bit_at_every_world(stage, world):
    assert_same("uneven_mlp", Plan(zero=stage, backend="eager"), world)


@sweep("name, stage", itertools.product(["scalar_parameter", "channels_last", "gpt2"], range(4)), quick=(0, 2, 5, 7))
def test_every_stage_is_bit_for_bit_for_odd_models(name, stage):
    assert_same(name, Plan(zero=stage, backend="eager"), 4)


@pytest.mark.core
@product("name, stage", ["uneven_mlp", "tied", "batch_norm", "channels_last"], [0, 2, 3], together=1)
def test_sharding_within_and_replication_between_is_bit_for_bit(name, stage):
    assert_same(name, Plan(mesh=HSDP, zero=stage, backend="eager"), 4)


@sweep("name", ["t5", "gpt2", "tied"], quick=1)
def test_hsdp_of_eight_ranks_is_bit_for_bit(name):
    assert_same(name, Plan(mesh={"replicate": 2, "dp": 4}, zero=3, backend="eager"), 8)


@product("stage, threshold", [1, 2, 3], [20, 10**9], together=1)
def test_parameters_below_the_persistence_threshold_stay_whole_and_bit_for_bit(threshold, stage):
    assert_same("uneven_mlp", Plan(zero=stage, backend="eager", param_persistence_threshold=threshold), 3)


@pytest.mark.parametrize("name", ["uneven_mlp", "mixed_dtypes", "transformer_encoder"])
def test_a_model_in_eval_mode_without_gradients_has_the_plain_outputs(name):
    case = models.build(name)
    case.model.eval()
    with torch.no_grad():
        found = verify(case, Plan(zero=3, backend="eager"), 3)
    assert found.exact, str(found)
    assert {d.what for d in found.differences} == {"output"}


@sweep(
    "name,stage",
    [("uneven_mlp", 3), ("dropout", 2), ("checkpoint_regions", 3), ("t5", 3), ("lstm", 1), ("unet", 3)],
    quick=2,
)
def test_inductors_program_is_the_plain_model_but_for_rounding(name, stage):
    found = verify(models.build(name), Plan(zero=stage), 3)
    assert found.ok, str(found)


@pytest.mark.slow
def test_inductors_program_of_a_resnet_is_the_plain_one_in_double_precision():
    """In single precision one rounding can turn a ReLU on or off, and nothing is near then."""
    case = models.build("resnet")
    case.model.double()
    case.inputs["pixel_values"] = case.inputs["pixel_values"].double()
    found = verify(case, Plan(zero=3), 4)
    assert found.ok, str(found)


def test_verify_leaves_the_model_and_the_random_state_alone():
    case = models.build("buffer_update")
    before = {k: v.clone() for k, v in case.model.state_dict().items()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    zgraph.verify(case.model, Plan(backend="eager"), 2, case.inputs)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in case.model.state_dict().items())
    assert all(p.grad is None for p in case.model.parameters())


def test_a_batch_that_the_world_does_not_divide_is_refused():
    case = models.build("uneven_mlp")
    with pytest.raises(zgraph.errors.SignatureError, match="24 can't be split over 5"):
        verify(case, Plan(backend="eager"), 5)


# -- broken on purpose -----------------------------------------------------------------------------------------------
# Each pass below keeps every invariant that the verifier knows: only the numbers tell.
@graph_pass("scale_one_gradient", "makes one gradient one and a half times as large")
def scale_one_gradient(program):
    items = list(program.output_items())
    for i, (port, node) in enumerate(items):
        if port.role is OutputRole.GRADIENT and port.name == "body.0.weight":
            with program.graph.inserting_before(program.output_node()):
                made = program.call(
                    torch.ops.aten.mul.Tensor, (node, 1.5), info(node).replace(role=Role.LAYOUT), name="scaled"
                )
            items[i] = (port, made)
    program.set_outputs(items)


@graph_pass("drop_one_add", "leaves out the second term of a sum")
def drop_one_add(program):
    adds = [n for n in program.nodes if n.target is torch.ops.aten.add.Tensor and info(n).phase is Phase.FORWARD]
    adds[-1].replace_all_uses_with(adds[-1].args[0])


@graph_pass("slightly_off", "changes one gradient by a thousandth")
def slightly_off(program):
    grad = next(n for p, n in program.output_items() if p.role is OutputRole.GRADIENT and p.name == "body.3.bias")
    start = next(
        n
        for n in program.nodes
        if collectives.is_start(n) and info(n).param == "body.3.bias" and info(n).role is Role.REDUCE
    )
    assert grad is not start
    with program.graph.inserting_before(start):
        made = program.call(torch.ops.aten.mul.Tensor, (start.args[0], 1.001), NodeInfo(Phase.BACKWARD), name="off")
    start.update_arg(0, made)


@graph_pass("stale_buffer", "returns a buffer as it was before its update", requires=("clean",))
def stale_buffer(program):
    before = program.input_nodes(InputRole.BUFFER)
    items = [
        (p, before[p.name] if p.role is OutputRole.MUTATION and p.name == "mean" else n)
        for p, n in program.output_items()
    ]
    program.set_outputs(items)


@graph_pass("lose_one_gradient", "returns no gradient for one parameter")
def lose_one_gradient(program):
    program.set_outputs(
        [
            i
            for i in program.output_items()
            if i[0] != Port(OutputRole.GRADIENT, "body.0.bias", i[0].index, InputRole.PARAMETER)
        ]
    )
    program.graph.eliminate_dead_code()


def broken(name: str, user_pass: str):
    found = verify(models.build(name), Plan(zero=3, backend="eager", passes=(f"{__name__}:{user_pass}",)), 2)
    assert not found.ok and not found.exact
    return found


def names(found, what: str) -> set[str]:
    return {d.name for d in found.differences if d.what == what and not d.ok}


def test_a_scaled_gradient_is_found_and_named():
    found = broken("uneven_mlp", "scale_one_gradient")
    assert names(found, "gradient") == {"body.0.weight"}
    assert found.worst(1)[0].error == pytest.approx(0.5, rel=1e-3)
    assert "BAD gradient body.0.weight" in str(found)


def test_a_gradient_off_by_a_thousandth_is_found_and_named():
    assert names(broken("uneven_mlp", "slightly_off"), "gradient") == {"body.3.bias"}


def test_a_dropped_term_of_a_sum_is_found_in_the_output():
    assert "leaf 0" in names(broken("used_several_times", "drop_one_add"), "output")


def test_a_buffer_that_was_not_updated_is_found_and_named():
    found = broken("buffer_update", "stale_buffer")
    assert names(found, "buffer") == {"mean"} and not names(found, "gradient")


def test_a_gradient_that_is_missing_is_found_and_named():
    assert names(broken("uneven_mlp", "lose_one_gradient"), "gradient") == {"body.0.bias (missing)"}


# -- random models ---------------------------------------------------------------------------------------------------
KINDS = ("linear", "norm", "tanh", "gelu", "relu", "residual", "again", "dropout", "tied", "frozen", "scale")


class Random(nn.Module):
    """A chain of layers of one width, as drawn; "again" repeats the layer before, "tied" shares the first weight."""

    def __init__(self, kinds: list[str], dim: int) -> None:
        super().__init__()
        self.kinds = kinds
        self.layers = nn.ModuleList([nn.Linear(dim, dim)])
        self.gains = nn.ParameterList()
        for kind in kinds:
            if kind in ("linear", "residual", "tied", "frozen"):
                self.layers.append(nn.Linear(dim, dim, bias=kind != "residual"))
            elif kind == "norm":
                self.layers.append(nn.LayerNorm(dim))
            elif kind == "scale":
                self.gains.append(nn.Parameter(torch.tensor(1.25)))
            if kind == "tied":
                self.layers[-1].weight = self.layers[0].weight
            if kind == "frozen":
                self.layers[-1].weight.requires_grad_(False)
        self.head = nn.Linear(dim, 1)

    def forward(self, x, y):
        layers, gains = iter(self.layers), iter(self.gains)
        last = next(layers)
        x = last(x)
        for kind in self.kinds:
            if kind in ("linear", "norm", "tied", "frozen"):
                last = next(layers)
                x = last(x)
            elif kind == "residual":
                last = next(layers)
                x = x + torch.tanh(last(x))
            elif kind == "again":
                x = last(x)
            elif kind == "dropout":
                x = nn.functional.dropout(x, 0.25)
            elif kind == "scale":
                x = x * next(gains)
            else:
                x = getattr(torch.nn.functional, kind)(x)
        return nn.functional.mse_loss(self.head(x), y)


@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(
    kinds=st.lists(st.sampled_from(KINDS), max_size=8),
    dim=st.integers(1, 11),
    world=st.sampled_from([2, 3, 4]),
    stage=st.sampled_from([0, 1, 2, 3]),
    threshold=st.sampled_from([0, 0, 12]),
    replicated=st.booleans(),
)
def test_any_chain_of_layers_is_bit_for_bit_the_plain_one(kinds, dim, world, stage, threshold, replicated):
    torch.manual_seed(0)
    case = models.Case(Random(kinds, dim), (torch.randn(24, dim), torch.randn(24, 1)))
    mesh = HSDP if replicated and world == 4 else {"dp": -1}
    found = verify(case, Plan(mesh=mesh, zero=stage, backend="eager", param_persistence_threshold=threshold), world)
    assert found.exact, str(found)


class InAList(nn.Module):
    """Reads a weight a second time, from a list that holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.weights = [self.inner.weight]

    def forward(self, x):
        return (self.inner(x) * self.weights[0].mean()).square().mean()


@pytest.mark.parametrize("world", [1, 2])
def test_a_weight_that_a_list_holds_has_one_gradient(world):
    result = zgraph.verify(InAList(), zgraph.Plan(backend="eager"), world, (torch.randn(4, 4),))
    assert result.ok and any(d.name == "inner.weight" for d in result.differences), result
