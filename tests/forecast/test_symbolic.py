"""Formulas of a step give what the simulator finds in a capture at sizes that they were not made from."""

from __future__ import annotations

import functools
import json
from fractions import Fraction

import pytest
import torch
from models import build
from sweeps import sweep
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

import zgraph
from zgraph.build.planned_step import programs
from zgraph.build.update_program import resident_of
from zgraph.cli.app import app
from zgraph.errors import MeshError, PlanError, SymbolicError
from zgraph.forecast.make_symbolic_forecast import symbolic_forecast
from zgraph.forecast.several_sizes import Point, Polynomials, SizedInputs, batches, lengths
from zgraph.forecast.symbolic_forecast import SymbolicForecast
from zgraph.passes.analysis.costs import KNOWN, Costs, Hardware, Link
from zgraph.passes.analysis.simulator import simulate
from zgraph.plan.communication import Bucket

pytestmark = pytest.mark.core

# Links so slow to start that how many buckets there are depends on the ranks, and that take a part of the compute stream.
SLOW = Hardware(
    name="slow",
    flops={"float32": 1e10, "bfloat16": 3e10},
    memory=1e9,
    launch=1e-7,
    capacity=10**9,
    host=1e9,
    links={
        "dp": Link(bandwidth=1e8, latency=1e-8, scatter=2, work=1e-12, start=1e-8),
        "*": Link(bandwidth=1e7, latency=1e-5),
    },
)


def forecast(model: nn.Module, inputs, plan: zgraph.Plan) -> SymbolicForecast:
    return symbolic_forecast(model, plan, inputs, costs(plan))


def costs(plan: zgraph.Plan) -> Costs:
    return Costs(SLOW, fused=plan.backend == "inductor")


def agrees(found: SymbolicForecast, model: nn.Module, inputs, worlds: list[int], **sizes: int) -> None:
    """Do the formulas at these sizes say what a capture of them, simulated for each number of ranks, does?"""
    plan, given = found.plan, SizedInputs(inputs).at(Point(**sizes))
    for world in worlds:
        program = programs(model, plan, given, world, costs(plan)).program
        real, mine = simulate(program, costs(plan)), found.at(world=world, **sizes)
        assert mine.compute == pytest.approx(real.busy.pop("compute"), rel=1e-9)
        assert mine.communication == pytest.approx(sum(real.busy.values()), rel=1e-9)
        assert mine.lower <= real.seconds * (1 + 1e-9) and real.seconds <= mine.upper * (1 + 1e-9)
        assert mine.activations == max(m.get("activations", 0) for m in real.memory)
        assert mine.parameters == real.memory[-1]["parameters"]
        assert mine.gradients == real.memory[-1]["gradients"]
        held = resident_of(model, program.params, plan, program.mesh, torch.device("cpu"), costs(plan)).at(None).held
        assert mine.states == held


WORLDS = [1, 2, 3, 64]
PLANS = {
    "zero3": zgraph.Plan(zero=3, backend="eager", optimizer=zgraph.AdamW()),
    "zero2": zgraph.Plan(zero=2, backend="eager", optimizer=zgraph.SGD(momentum=0.9)),
    "zero0": zgraph.Plan(zero=0, backend="eager"),
    "bf16": zgraph.Plan(zero=3, backend="eager", precision="bf16", bucket=Bucket(gather=700, reduce=0)),
    "threshold": zgraph.Plan(zero=1, backend="eager", param_persistence_threshold=20),
}


# -- against the simulator ------------------------------------------------------------------------------------------------
@sweep(
    "name, plan",
    [*(("uneven_mlp", p) for p in PLANS), ("channels_last", "zero2"), ("channels_last", "bf16")],
    quick=1,
)
def test_formulas_agree_with_the_simulator_at_other_batches_and_worlds(name, plan):
    case, plan = build(name), PLANS[plan]
    found = forecast(case.model, case.inputs, plan)
    assert found.sizes == Point(24)
    agrees(found, case.model, case.inputs, WORLDS, batch=5)
    agrees(found, case.model, case.inputs, [4], batch=100)


@functools.cache
def of_tied(backend: str) -> SymbolicForecast:
    case = build("tied")
    plan = zgraph.Plan(backend=backend, optimizer=zgraph.AdamW(), precision="bf16")
    return forecast(case.model, case.inputs, plan)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.slow
def test_formulas_agree_at_other_sequence_lengths(backend):
    case, found = build("tied"), of_tied(backend)
    assert found.sizes == Point(24, 4)
    agrees(found, case.model, case.inputs, WORLDS, batch=20, sequence=9)
    agrees(found, case.model, case.inputs, [5], batch=31, sequence=2)


def test_inputs_that_are_one_tensor_are_one_at_every_size():
    """(A language model's labels are its inputs.)"""
    ids = torch.zeros(2, 6, dtype=torch.long)
    sized = SizedInputs({"input_ids": ids, "labels": ids})
    for point in (Point(2, 6), Point(4, 6), Point(4, 9)):
        found = sized.at(point)
        assert found["input_ids"] is found["labels"] and tuple(found["labels"].shape) == (point.batch, point.sequence)


@pytest.mark.slow
def test_formulas_of_a_llama_agree_with_the_simulator():
    case = build("llama")
    plan = zgraph.Plan(backend="eager", optimizer=zgraph.AdamW())
    found = forecast(case.model, case.inputs, plan)
    agrees(found, case.model, case.inputs, [1, 8], batch=5, sequence=11)
    agrees(found, case.model, case.inputs, [3], batch=40, sequence=3)
    assert any(k.count >= 4 and "mm" in k.operator for k in found.kinds), "equal layers are one kind"
    square = found.activations.coeff(sympy_symbol(found, "sequence"), 2)
    assert square.has(sympy_symbol(found, "batch")), "attention keeps a square of the sequence for each row"


@pytest.mark.parametrize(
    "mesh, worlds",
    [
        ({"replicate": 2, "dp": -1}, [2, 4, 10]),
        ({"replicate": -1, "dp": 2}, [2, 4, 10]),
        ({"replicate": -1}, [1, 3]),
        ({"dp": 4}, [4]),
    ],
)
@pytest.mark.slow
def test_the_world_is_what_the_mesh_leaves_free(mesh, worlds):
    case = build("uneven_mlp")
    for zero in (0, 3):
        found = forecast(case.model, case.inputs, zgraph.Plan(mesh=mesh, zero=zero, backend="eager"))
        agrees(found, case.model, case.inputs, worlds, batch=5)
        free = -1 in mesh.values()
        assert any(s.name == "world" for s in found.communication.free_symbols) == free
    with pytest.raises(MeshError):
        found.at(world=7 if -1 not in mesh.values() else 0, batch=5)


def test_buckets_are_counted_at_every_world():
    case = build("uneven_mlp")
    plan = PLANS["zero3"]
    found = forecast(case.model, case.inputs, plan)
    symbol = sympy_symbol(found, "world")
    seen = set()
    for world in (2, 16):
        program = programs(case.model, plan, case.inputs, world, costs(plan)).program
        buckets = simulate(program, Costs(SLOW.model_copy(update={"links": {"*": Link(bandwidth=1e30, latency=1.0)}})))
        counts = [int(t.count.subs(symbol, world)) for t in found.transfers]
        assert sum(buckets.busy.values()) - buckets.busy["compute"] == pytest.approx((world - 1) * sum(counts))
        seen.add(sum(counts))
    assert len(seen) > 1, "more ranks, fewer buckets"


# -- by hand ------------------------------------------------------------------------------------------------------------------
class Two(nn.Module):
    """Two products: 2 * 8 * 16 * 32 FLOP each way."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.a = nn.ParameterList(torch.randn(32, 16) for _ in range(layers))
        self.b = nn.ParameterList(torch.randn(16, 32) for _ in range(layers))

    def forward(self, x):
        for a, b in zip(self.a, self.b, strict=True):
            x = (x @ a.t()) @ b.t()
        return x.sum()


def sympy_symbol(found: SymbolicForecast, name: str):
    everything = found.compute.free_symbols | found.communication.free_symbols | found.activations.free_symbols
    return next(s for s in everything if s.name == name)


def test_formulas_of_two_products_are_those_on_paper():
    import sympy

    found = forecast(Two(), (torch.randn(8, 16),), zgraph.Plan(backend="eager"))
    world, batch = (sympy_symbol(found, n) for n in ("world", "batch"))
    shard = 64 * sympy.ceiling(32 / world) + 128 * sympy.ceiling(16 / world)
    assert sympy.simplify(found.parameters - shard) == 0 and found.states == 0
    assert {k.flops for k in found.kinds if ".mm." in k.operator} == {2 * 16 * 32 * batch}
    assert sum(k.count for k in found.kinds if ".mm." in k.operator) == 2 + 3  # (the input has no gradient)
    whole = {t.kind: t.bytes for t in found.transfers}
    assert sympy.simplify(whole["reduce_scatter"] - world * shard) == 0
    assert found.activations.coeff(batch) == 4 * 32  # what lies between the two products
    assert found.upper == found.compute + found.communication


@pytest.mark.slow
def test_equal_layers_are_one_kind():
    one, more = (forecast(Two(n), (torch.randn(8, 16),), zgraph.Plan(backend="eager")) for n in (2, 3))
    assert len(one.kinds) == len(more.kinds)
    assert sum(k.count for k in more.kinds if ".mm." in k.operator) == sum(
        k.count for k in one.kinds if ".mm." in k.operator
    ) + 2 * (1 + 2)


@pytest.mark.slow
def test_a_formula_can_be_made_a_function_of_numbers():
    import sympy

    found = of_tied("eager")
    names = ("world", "batch", "sequence")
    symbols = [sympy_symbol(found, n) for n in names]
    sizes = {"world": 6, "batch": 10, "sequence": 12}
    figures = found.at(**sizes)
    for name in ("compute", "communication", "lower", "upper"):
        made = sympy.lambdify(symbols, getattr(found, name), "numpy")
        assert float(made(*sizes.values())) == pytest.approx(getattr(figures, name), rel=1e-12)


# -- samples ------------------------------------------------------------------------------------------------------------------
def test_polynomials_go_through_every_point():
    points = [Point(b, s) for b in (4, 6) for s in (8, 7, 6)]
    fit = Polynomials(points)

    def values(at: Point) -> int:
        return 3 + 2 * at.batch + at.sequence * (at.sequence + 1) // 2 + 5 * at.batch * at.sequence**2

    found = fit.through(map(values, points))
    assert dict(zip(fit.powers, found, strict=True))[0, 2] == Fraction(1, 2)
    assert fit.value(found, Point(100, 33)) == values(Point(100, 33))


@pytest.mark.parametrize("given", [1, 2, 3, 7, 64, 100, 2048])
def test_samples_are_near_and_have_the_alignment_of_what_was_given(given):
    power = (given & -given) if given > 1 else 1
    for sizes in (batches(given), lengths(given)):
        assert len(set(sizes)) == len(sizes) and min(sizes) >= 2
        assert max(sizes) <= max(2 * given, 5) and all(n % min(power, max(given // 16, 1)) == 0 for n in sizes)
    assert given < 16 or max(lengths(given)) == given, "positions may be learnt up to it"


def test_inputs_vary_in_the_batch_and_in_the_sequence_of_the_first():
    images = torch.randn(6, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    inputs = {
        "ids": torch.ones(6, 9).long(),
        "images": images,
        "table": torch.ones(4, 9),
        "scale": torch.ones(()),
        "n": 3,
    }
    found = SizedInputs(inputs).at(Point(8, 7))
    shapes = {k: tuple(v.shape) for k, v in found.items() if k != "n"}
    assert shapes == {"ids": (8, 7), "images": (8, 3, 5, 5), "table": (4, 7), "scale": ()}
    assert found["ids"].dtype is torch.int64 and found["n"] == 3 and found["scale"] is inputs["scale"]
    assert found["images"].is_contiguous(memory_format=torch.channels_last)


# -- what is no formula -------------------------------------------------------------------------------------------------------
class Unrolled(nn.Module):
    """A recurrent cell, by a loop over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(5, 5)

    def forward(self, x):
        state = torch.zeros_like(x[:, 0])
        for step in x.unbind(1):
            state = torch.tanh(self.cell(step + state))
        return state.mean()


def test_a_step_that_is_unrolled_over_its_sequence_is_refused():
    with pytest.raises(SymbolicError, match="another program at another size") as caught:
        forecast(Unrolled(), (torch.randn(4, 6, 5),), zgraph.Plan(backend="eager"))
    assert "node '" in caught.value.where and "batch 4, sequence 6 against batch 4, sequence 5" in caught.value.where


class Cubic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        s = x.shape[1]
        return (x.sum(-1).unsqueeze(-1).unsqueeze(-1).expand(-1, s, s, s) + self.scale.sum()).exp().mean()


def test_bytes_that_grow_faster_than_a_square_are_refused():
    with pytest.raises(SymbolicError, match=r"bytes of aten\.\S+ are no polynomial") as caught:
        forecast(Cubic(), (torch.randn(4, 8, 3),), zgraph.Plan(backend="eager"))
    assert caught.value.where.endswith("batch 6, sequence 5")


class Branches(nn.Module):
    """Another function for short sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return F.relu(self.layer(x)).mean() if x.shape[1] > 13 else self.layer(x).sin().mean()


def test_a_model_that_branches_on_its_sizes_is_refused_where_it_differs():
    with pytest.raises(SymbolicError) as caught:
        forecast(Branches(), (torch.randn(4, 16, 3),), zgraph.Plan(backend="eager"))
    assert "relu" in caught.value.why and "sin" in caught.value.why


def test_a_memory_budget_is_refused():
    with pytest.raises(PlanError, match="memory budget"):
        forecast(Two(), (torch.randn(8, 16),), zgraph.Plan(backend="eager", memory_budget="1GiB"))


def test_sizes_that_the_model_has_not_are_refused():
    found = forecast(Two(), (torch.randn(8, 16),), zgraph.Plan(backend="eager"))
    with pytest.raises(SymbolicError, match="no sequence"):
        found.at(world=2, batch=8, sequence=3)
    with pytest.raises(SymbolicError, match="batch is 0"):
        found.at(world=2, batch=0)
    with pytest.raises(SymbolicError, match="no batch"):
        forecast(Two(), (3,), zgraph.Plan(backend="eager"))


@pytest.mark.slow
def test_a_model_on_the_meta_device_is_forecast():
    with torch.device("meta"):
        model = Two()
    found = forecast(model, (torch.empty(8, 16, device="meta"),), zgraph.Plan(backend="eager"))
    real = forecast(Two(), (torch.randn(8, 16),), zgraph.Plan(backend="eager"))
    assert found.at(world=4, batch=3) == real.at(world=4, batch=3)


# -- text and command line ------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_the_command_prints_formulas_and_figures(monkeypatch):
    from pathlib import Path

    monkeypatch.chdir(Path(__file__).parents[1] / "support")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "support"))
    command = ["forecast", "cli_targets:factory", "--symbolic", "--world", "8", "--hardware", "a100-80g"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    for part in (
        "compute [s] = sum of",
        "all_gather over dp: world ranks",
        "parameters [bytes] =",
        "at world 8, batch",
    ):
        assert part in done.stdout
    found = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert found["hardware"]["name"] == "a100-80g" and found["at"]["world"] == 8
    assert found["at"]["lower"] <= found["at"]["upper"] and found["kinds"] and found["transfers"]


def test_what_costs_much_is_shown_first():
    found = forecast(Two(), (torch.randn(8, 16),), zgraph.Plan(backend="eager"))
    assert str(found).startswith("forward and backward on slow, by world, batch (batch: rows of one rank)\n")
    assert "and 1e-08 for each reduce_scatter over dp, 1e-12 for each of its bytes" in str(found)
    assert KNOWN["cpu"].name == "cpu" and str(found.at(world=2, batch=8)).startswith("step ")
