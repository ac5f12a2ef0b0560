"""Values that the backward computes again: where the plan or the model says so, or as much as a memory budget needs."""

import itertools
from collections import Counter

import models
import pytest
import refusals
import torch
from oracle import Oracle
from sweeps import in_turn, sweep
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zgraph
from zgraph.build.planned_step import captured_program, programs
from zgraph.errors import PlanError, UnsupportedError
from zgraph.passes import verify_program
from zgraph.passes.analysis.costs import CPU, Costs
from zgraph.passes.analysis.simulator import simulate
from zgraph.passes.canonicalize.cleanup import cleanup
from zgraph.passes.remat.rematerialize import RematerializeOptions, rematerialize
from zgraph.passes.remat.segments import chain_of
from zgraph.passes.remat.solver import Rotor, Solver
from zgraph.program.aliases import is_random
from zgraph.program.node import Phase, info

COSTS = Costs(CPU, fused=False)
ONE = {"mesh": {"dp": 1}, "zero": 0, "backend": "eager"}
EVERY = [*models.TRANSFORMERS, *models.PLAIN]


class Layers(nn.Module):
    """Residual layers, of these widths inside, around `dim`: what is computed between two cuts is much more than what crosses."""

    def __init__(self, widths: list[int], dim: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, w), nn.GELU(), nn.Linear(w, w), nn.Tanh(), nn.Linear(w, dim)) for w in widths
        )

    def forward(self, x, y):
        for layer in self.layers:
            x = x + layer(x)
        return F.mse_loss(x, y)


def layers(widths: list[int], rows: int = 512) -> models.Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return models.Case(Layers(widths), (torch.randn(rows, 32), torch.randn(rows, 32)))


def captured(case: models.Case, **fields):
    program = captured_program(case.model, zgraph.Plan(**{**ONE, **fields}), case.inputs, 1)
    cleanup()(program)
    program.facts.add("clean")
    return program


def besides_inputs(program) -> int:
    """The peak of what lives between the forward and the backward."""
    found = simulate(program, COSTS).memory
    return max(sum(v for k, v in m.items() if k not in ("parameters", "inputs")) for m in found)


def gradients(case: models.Case, **fields):
    return models.gradients(case, **{**ONE, **fields})


def smallest(case: models.Case, world: int = 1, costs: Costs | None = COSTS, **fields) -> int:
    plan = zgraph.Plan(**{**ONE, **fields}, memory_budget=1)
    return refusals.smallest(lambda: programs(case.model, plan, case.inputs, world, costs))


# -- every model ----------------------------------------------------------------------------------------------------
@sweep("name, how", in_turn(EVERY, ["full", "smallest budget"]), quick=1)
def test_loss_and_gradients_are_bit_for_bit_those_of_keeping_all(name, how):
    fields = {"recompute": "full"} if how == "full" else {"memory_budget": smallest(models.build(name))}
    _, plain = gradients(models.build(name))
    model, again = gradients(models.build(name), **fields)
    assert models.equal(plain, again)
    for step in model.zgraph.programs.values():
        random = [n for n in step.history().program.graph.nodes if is_random(n)]
        assert all(info(n).copy_of is None for n in random)


@pytest.mark.parametrize(
    "name, zero",
    in_turn(["gpt2", "llama", "t5", "resnet", "unet", "mixtral", "transformer_encoder"], [3, 0, 2]),
)
@pytest.mark.slow
def test_likewise_on_virtual_ranks_at_every_stage(name, zero):
    case = models.build(name)
    found = zgraph.verify(
        case.model, zgraph.Plan(zero=zero, backend="eager", recompute="full"), 4, case.inputs, case.loss_fn
    )
    assert found.ok, str(found)


@pytest.mark.parametrize("name", ["gpt2", "unet"])
@pytest.mark.slow
def test_a_budget_holds_at_stage_3_and_numbers_stay(name):
    case = models.build(name)
    fields = {"mesh": {"dp": 2}, "zero": 3, "backend": "eager"}
    least = smallest(case, 2, **fields)
    plan = zgraph.Plan(**fields, memory_budget=least)
    history = programs(case.model, plan, case.inputs, 2, COSTS)
    assert sum(simulate(history.program, COSTS).peak.values()) <= least
    found = zgraph.verify(
        case.model, plan.model_copy(update={"memory_budget": 2 * least}), 2, case.inputs, case.loss_fn
    )
    assert found.ok, str(found)


# -- budgets --------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("widths", [[128] * 12, [32, 256, 64, 512, 128, 48, 320, 96]])
def test_every_budget_is_honoured_and_more_memory_is_never_slower(widths):
    case = layers(widths)
    most = sum(simulate(programs(case.model, zgraph.Plan(**ONE), case.inputs, 1, COSTS).program, COSTS).peak.values())
    least = smallest(case)
    assert least < 0.7 * most
    found = []
    for at in range(12):
        budget = least + (most - least) * at // 11
        plan = zgraph.Plan(**ONE, memory_budget=budget)
        forecast = simulate(programs(case.model, plan, case.inputs, 1, COSTS).program, COSTS)
        assert sum(forecast.peak.values()) <= budget
        found.append(forecast.seconds)
    assert found == sorted(found, reverse=True) and found[0] > found[-1]


def test_nothing_is_computed_again_where_all_fits():
    case = layers([64] * 4)
    most = sum(simulate(programs(case.model, zgraph.Plan(**ONE), case.inputs, 1, COSTS).program, COSTS).peak.values())
    history = programs(case.model, zgraph.Plan(**ONE, memory_budget=most), case.inputs, 1, COSTS)
    assert "rematerialize" not in [r.name for r in history.records]


def test_a_budget_is_not_met_by_recomputing_against_the_plan():
    case = layers([64] * 4)
    most = sum(simulate(programs(case.model, zgraph.Plan(**ONE), case.inputs, 1, COSTS).program, COSTS).peak.values())
    with pytest.raises(PlanError, match='recompute="auto"'):
        programs(case.model, zgraph.Plan(**ONE, recompute="none", memory_budget=most - 10_000), case.inputs, 1, COSTS)


def test_what_is_too_small_says_what_holds_the_peak_and_what_it_costs():
    with pytest.raises(PlanError) as caught:
        programs(layers([64] * 4).model, zgraph.Plan(**ONE, memory_budget="1KiB"), layers([64] * 4).inputs, 1, COSTS)
    assert all(word in str(caught.value) for word in ("parameters", "temporaries", " ms ", "the smallest that works"))


# -- against the oracle ---------------------------------------------------------------------------------------------
CHAINS = {
    **{f"{n} equal layers": [96] * n for n in (4, 12, 24)},
    **{f"{n} layers of all widths": [32 + 37 * (i * i % 11) for i in range(n)] for n in (6, 16)},
}


@sweep("name", list(CHAINS), quick=(0,))
def test_the_smallest_memory_and_the_time_are_near_the_optimum(name):
    """Of the peak besides parameters: at most 1.10 of the oracle's smallest; the time that recomputing takes within 5% at
    five budgets between (and 5% of nothing is 1% of the step: slots are counted, not bytes)."""
    program = captured(layers(CHAINS[name]))
    chain = chain_of(program, COSTS)
    oracle, rotor = Oracle(chain.segments), Rotor(chain.segments)
    made = program.snapshot()
    rematerialize(RematerializeOptions(rotor.least(), COSTS))(made)
    pinned = sum(t.numel() * t.element_size() for n in chain.pinned for t in [n.meta["val"]])
    assert besides_inputs(made) - pinned <= 1.10 * oracle.least()
    plain = simulate(program, COSTS).seconds
    for at in range(1, 6):
        size = oracle.least() + (rotor.bytes - oracle.least()) * at // 6
        made = program.snapshot()
        rematerialize(RematerializeOptions(size, COSTS))(made)
        made.recompile()
        verify_program(made)
        best = oracle.seconds(size) - plain
        assert simulate(made, COSTS).seconds - plain <= 1.05 * best + 0.01 * plain
        assert besides_inputs(made) - pinned <= size + rotor.bytes // 100


class Plain(nn.Module):
    """Linear layers and a cheap function between them: no value is much smaller than those around it."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def plain(widths: list[int]) -> models.Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return models.Case(Plain(widths), (torch.randn(2048, widths[0]),))


@pytest.mark.parametrize(
    "widths, least",
    [([64] * 25, 0.15), ([16 * 2 ** (i // 4) for i in range(20)], 0.4), ([32, 48] * 12, 0.2)],
    ids=["of one width", "wider and wider", "by turns"],
)
@pytest.mark.slow
def test_layers_between_which_nothing_is_small_are_cut_as_well(widths, least):
    solver = Solver(captured(plain(widths)), COSTS)
    assert solver.least() <= least * solver.bytes
    model, kept = gradients(plain(widths))
    budget = int(sum(model.zgraph.forecast().programs[0].peak.values()) * 0.6)
    _, again = gradients(plain(widths), memory_budget=budget)
    assert models.equal(kept, again)


SEARCHED = {
    "llama": lambda: models.build("llama"),
    "layers between which nothing is small": lambda: plain([64] * 25),
    "layers of all widths": lambda: layers([32, 256, 64, 512, 128, 48, 320, 96]),
}


@pytest.mark.parametrize("name, count", [(name, count) for count in (14, 5) for name in SEARCHED])
@pytest.mark.slow
def test_of_a_dozen_budgets_each_is_kept_and_none_is_slower_than_a_smaller_one(name, count):
    case = SEARCHED[name]()
    most = sum(simulate(programs(case.model, zgraph.Plan(**ONE), case.inputs, 1, COSTS).program, COSTS).peak.values())
    least = smallest(case)
    found = []
    for at in range(count):
        budget = least + int((1.02 * most - least) * at / (count - 1))
        plan = zgraph.Plan(**ONE, memory_budget=budget)
        forecast = simulate(programs(case.model, plan, case.inputs, 1, COSTS).program, COSTS)
        assert sum(forecast.peak.values()) <= budget
        found.append(forecast.seconds)
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("name", ["llama", "layers of all widths"])
@pytest.mark.slow
def test_what_keeping_all_takes_is_known_before_it_is_tried(name):
    """What comes into a segment counts only where its backward reads it."""
    program = captured(SEARCHED[name]())
    pinned = sum(t.numel() * t.element_size() for n in chain_of(program, COSTS).pinned for t in [n.meta["val"]])
    assert Solver(program, COSTS).bytes == pytest.approx(besides_inputs(program) - pinned, rel=0.05)


@pytest.mark.slow
def test_segments_may_be_computed_again_more_than_once():
    program = captured(layers([96] * 12))
    rematerialize(RematerializeOptions(0, COSTS))(program)
    copies = Counter(info(n).copy_of for n in program.graph.nodes if info(n).copy_of)
    assert max(copies.values()) >= 2


# -- what the user says -----------------------------------------------------------------------------------------------
def copied_modules(history) -> set[str]:
    return {info(n).module for n in history.program.graph.nodes if info(n).copy_of is not None}


@pytest.mark.slow
def test_patterns_of_modules():
    case = layers([64] * 4)
    plan = zgraph.Plan(**ONE, recompute=["layers.[13]"])
    again = copied_modules(programs(case.model, plan, case.inputs, 1))
    assert {m.split(".")[1] for m in again} == {"1", "3"}
    _, plain = gradients(layers([64] * 4))
    _, other = gradients(layers([64] * 4), recompute=["layers.*"])
    assert models.equal(plain, other)


def test_a_pattern_that_matches_no_module_is_refused():
    """On the model's way to be compiled, to be planned, and when it runs by another plan."""
    plan = zgraph.Plan(**ONE, recompute=["layer.*"])
    case = layers([64] * 4)
    with pytest.raises(PlanError, match=r"'layer\.\*' that matches no module"):
        programs(case.model, plan, case.inputs, 1)
    with pytest.raises(PlanError, match=r"did you mean 'layers"):
        zgraph.compile(layers([64] * 4).model, plan)
    model, _ = gradients(case)
    with pytest.raises(PlanError, match="matches no module"):
        model.zgraph.recompile(plan)


def raises(node):
    raise KeyError(node.name)


def test_a_policy_that_raises_is_told_with_its_line():
    case = layers([64] * 4)
    with pytest.raises(PlanError, match=r"(?s)the policy failed for .*test_checkpointing\.py:\d+, in raises.*KeyError"):
        programs(case.model, zgraph.Plan(**ONE, recompute=f"{__name__}:raises"), case.inputs, 1)


def no_products(node):
    return node.target not in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)


def test_a_policy_over_nodes():
    case = layers([64] * 4)
    plan = zgraph.Plan(**ONE, recompute=f"{__name__}:no_products")
    history = programs(case.model, plan, case.inputs, 1)
    copies = [n for n in history.program.graph.nodes if info(n).copy_of is not None]
    assert copies and all(no_products(n) for n in copies)
    _, plain = gradients(layers([64] * 4))
    _, other = gradients(layers([64] * 4), recompute=f"{__name__}:no_products")
    assert models.equal(plain, other)


@pytest.mark.parametrize("recompute", ["auto", "none"])
def test_the_models_own_regions_are_honoured_without_kernels_too(recompute):
    case = models.build("checkpoint_regions")
    again = copied_modules(programs(case.model, zgraph.Plan(**ONE, recompute=recompute), case.inputs, 1))
    assert {m.split(".")[1] for m in again} == {"1", "2"}


class Region(nn.Module):
    """A region of torch.utils.checkpoint around a layer, which may be behind one that changes a buffer."""

    def __init__(self, layer, outside=None):
        super().__init__()
        self.outside, self.layer = outside or nn.Identity(), nn.Sequential(nn.Linear(4, 4), layer)

    def forward(self, x):
        return checkpoint(self.layer, self.outside(x), use_reentrant=False).pow(2).mean()


def test_a_region_that_changes_a_buffer_in_place_is_refused():
    # Plain PyTorch changes it again in the backward: BatchNorm counts each batch twice.
    x = torch.randn(8, 4, requires_grad=True)
    model = zgraph.compile(Region(nn.BatchNorm1d(4)), zgraph.Plan(backend="eager"))
    with pytest.raises(UnsupportedError, match=r"region of torch.utils.checkpoint changes buffer 'layer.1"):
        model(x)
    assert model.layer[1].num_batches_tracked == 0
    for right in (nn.LayerNorm(4), nn.BatchNorm1d(4, track_running_stats=False)):
        assert zgraph.verify(Region(right, nn.BatchNorm1d(4)), zgraph.Plan(backend="eager"), 1, (x,)).ok
    with torch.no_grad():
        assert torch.equal(model(x), Region.forward(model, x)) and model.layer[1].num_batches_tracked == 2


def test_none_recomputes_nothing_on_inductor_either():
    case = layers([64] * 4)
    plan = zgraph.Plan(**{**ONE, "backend": "inductor"}, recompute="none")
    assert not copied_modules(programs(case.model, plan, case.inputs, 1))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("ful", "full"),
        ("a b:c", "package.module:function"),
        ([], "an empty list, or has an empty pattern"),
        (no_products, f"{__name__}:no_products"),
    ],
)
def test_what_is_no_way_of_recomputing_is_refused(value, said):
    with pytest.raises(PlanError, match="recompute") as caught:
        zgraph.Plan(recompute=value)
    assert said in str(caught.value)


def test_a_policy_that_is_not_there_is_refused():
    case = layers([64])
    with pytest.raises(PlanError, match="can't be loaded"):
        programs(case.model, zgraph.Plan(**ONE, recompute="no.such:thing"), case.inputs, 1)


# -- chains -----------------------------------------------------------------------------------------------------------
@sweep("depth", [3, 8, 40, 150], quick=(1,))
def test_layers_are_found_without_their_names(depth):
    chain = chain_of(captured(layers([64] * depth)), COSTS)
    assert depth / 2 <= len(chain.segments) <= 2 * depth + 2 or len(chain.segments) >= 60
    assert sorted(itertools.chain.from_iterable(s.nodes for s in chain.segments)) == [
        n for n in chain.segments[0].nodes[0].graph.nodes if n.op == "call_function" and info(n).phase is Phase.FORWARD
    ]


@pytest.mark.inductor
@pytest.mark.slow
def test_compiled_by_inductor_within_a_budget():
    fields = {**ONE, "backend": "inductor"}
    least = smallest(layers([128] * 2), costs=None, backend="inductor")
    _, plain = gradients(layers([128] * 2), **fields)
    _, again = gradients(layers([128] * 2), **fields, memory_budget=least + 100_000)
    for name, value in plain.items():
        torch.testing.assert_close(again[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.slow
def test_micro_batches_and_budgets_go_together(zero):
    """Every variant of a program saves what the first one decided, and all are tried before the first step."""
    fields = {**ONE, "zero": zero, "micro_batches": 2, "optimizer": zgraph.SGD(lr=0.1)}

    def trained(**more) -> dict[str, torch.Tensor]:
        case = layers([128] * 2)
        model = zgraph.compile(case.model, zgraph.Plan(**fields, **more))
        for _ in range(2):
            model.train_step(*case.inputs)
        return models.weights(model)

    least = refusals.smallest(lambda: trained(memory_budget=1))
    assert models.equal(trained(), trained(memory_budget=least * 3 // 2))
