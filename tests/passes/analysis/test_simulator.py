"""A forecast is what can be worked out by hand for small programs, and its memory is what a run holds."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

import zgraph
from zgraph.build.planned_step import programs, update_program
from zgraph.errors import PlanError
from zgraph.passes.analysis.costs import KNOWN, Costs, Hardware, Link, flops_of, hardware, signature, size_of
from zgraph.passes.analysis.live_memory import memory_of
from zgraph.passes.analysis.simulator import simulate
from zgraph.program import collectives, ops
from zgraph.program.node import Phase, Role, info

pytestmark = pytest.mark.core
aten = torch.ops.aten


class Two(nn.Module):
    """Two products: 2 * 8 * 16 * 32 FLOP each way."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(32, 16))
        self.b = nn.Parameter(torch.randn(16, 32))

    def forward(self, x):
        return ((x @ self.a.t()) @ self.b.t()).sum()


def machine(**changes) -> Hardware:
    """One FLOP a nanosecond, memory that costs nothing, a byte a nanosecond between ranks."""
    values = {
        "name": "test",
        "flops": {"float32": 1e9},
        "memory": 1e30,
        "capacity": 1,
        "host": 1.0,
        "links": {"*": Link(bandwidth=1e9)},
    }
    return Hardware(**{**values, **changes})


ALONE = {"prefetch": {"enabled": False}, "bucket": {"gather": 0, "reduce": 0}}


def program_of(model: nn.Module, zero: int, world: int = 2, **plan):
    """The program in which nothing overlaps, unless the plan says otherwise."""
    plan = zgraph.Plan(**{"zero": zero, "backend": "eager", **ALONE, **plan})
    return programs(model, plan, (torch.randn(8, 16),), world).program


PRODUCT = 2 * 8 * 16 * 32  # nanoseconds of one product
WEIGHT = 16 * 32 * 4 // 2  # nanoseconds in which half a weight is sent


# -- time -----------------------------------------------------------------------------------------------------------------
def test_where_nothing_overlaps_a_step_is_the_sum_of_its_parts():
    program = program_of(Two(), 3)
    products = sum(n.target is aten.mm.default for n in program.nodes)
    starts = [n for n in program.nodes if collectives.is_start(n)]
    found = simulate(program, Costs(machine()))
    assert found.busy["compute"] == pytest.approx(products * PRODUCT * 1e-9)
    assert found.busy["link:*"] == pytest.approx(len(starts) * WEIGHT * 1e-9)
    assert found.seconds == pytest.approx(sum(found.busy.values()))
    assert sum(found.exposed.values()) == pytest.approx(found.busy["link:*"])
    assert len(found.stalls) == len(starts) and {s.role for s in found.stalls} == {Role.GATHER, Role.REDUCE}


def moved_early(program):
    """The second gather of the forward starts before the first product."""
    gathers = [n for n in program.nodes if collectives.is_start(n) and info(n).phase is Phase.FORWARD]
    product = next(n for n in program.nodes if n.target is aten.mm.default)
    product.prepend(gathers[1])
    return program


@pytest.mark.parametrize("bandwidth", [1e9, 1e8, 5e7])
def test_a_gather_behind_a_product_exposes_what_is_left_of_it(bandwidth):
    costs = Costs(machine(links={"dp": Link(bandwidth=bandwidth)}))
    plain, early = (simulate(p, costs) for p in (program_of(Two(), 3), moved_early(program_of(Two(), 3))))
    sent = WEIGHT / bandwidth
    hidden = min(sent, PRODUCT * 1e-9)
    assert plain.seconds - early.seconds == pytest.approx(hidden)
    assert plain.exposed["gather"] - early.exposed["gather"] == pytest.approx(hidden)
    assert early.busy["link:dp"] == pytest.approx(plain.busy["link:dp"])


def test_collectives_of_one_link_run_one_after_another():
    program = program_of(Two(), 3)
    gathers = [n for n in program.nodes if collectives.is_start(n) and info(n).phase is Phase.FORWARD]
    gathers[0].append(gathers[1])
    found = simulate(program, Costs(machine(flops={"float32": 1e30})))
    assert [s.seconds for s in found.stalls[:2]] == pytest.approx([WEIGHT * 1e-9, WEIGHT * 1e-9])


def test_each_mesh_dimension_may_have_a_link_of_its_own():
    plan = {"mesh": {"replicate": 2, "dp": 2}}
    links = {"dp": Link(bandwidth=1e9), "replicate": Link(bandwidth=1e8, latency=1e-3)}
    found = simulate(program_of(Two(), 3, 4, **plan), Costs(machine(links=links)))
    assert set(found.busy) == {"compute", "link:dp", "link:replicate"}
    shard = 16 * 32 * 4 / 2  # bytes that two replicas average, twice over the link
    assert found.busy["link:replicate"] == pytest.approx(2 * 2 * (1e-3 + shard / 2 / 1e8))
    with pytest.raises(PlanError, match="no link for mesh dimension 'replicate'") as caught:
        simulate(program_of(Two(), 3, 4, **plan), Costs(machine(links={"dp": Link(bandwidth=1.0)})))
    assert caught.value.where == "links.replicate"


@pytest.mark.parametrize("world", [2, 4, 8])
def test_collectives_take_the_rings_time(world):
    costs = Costs(machine(links={"*": Link(bandwidth=1e6, latency=1e-4)}))
    whole = 16 * 32 * 4
    for zero in (0, 3):
        for node in program_of(Two(), zero, world).nodes:
            if collectives.is_start(node):
                rounds = 2 if node.target is collectives.ALL_REDUCE else 1
                expected = rounds * (world - 1) * (1e-4 + whole / world / 1e6)
                assert costs.transfer([node], world) == pytest.approx(expected)


@pytest.mark.parametrize("zero", [0, 3])
def test_a_bucket_is_one_transfer_which_pays_the_latency_once(zero):
    hardware = machine(flops={"float32": 1e30}, links={"*": Link(bandwidth=1e6, latency=1e-4)})
    one, alone = (
        simulate(program_of(Two(), zero, 4, bucket={"gather": size, "reduce": size}), Costs(hardware))
        for size in (10**6, 0)
    )
    starts = [n for n in program_of(Two(), zero, 4).nodes if collectives.is_start(n)]
    joined = len(starts) // 2  # (a and b stand in one layer)
    latencies = 3 * 1e-4 * (2 if zero == 0 else 1)
    assert alone.busy["link:*"] - one.busy["link:*"] == pytest.approx(joined * latencies)


def test_a_link_may_move_the_bytes_of_a_reduce_scatter_twice():
    """As gloo does, whose reduce-scatter is an all-reduce."""
    plain, twice = (Costs(machine(links={"*": Link(bandwidth=1e6, latency=1e-4, scatter=s)})) for s in (1, 2))
    for node in program_of(Two(), 3, 4).nodes:
        if collectives.is_start(node):
            times = 2 if node.target is collectives.REDUCE_SCATTER else 1
            assert twice.transfer([node], 4) == pytest.approx(times * plain.transfer([node], 4))


def test_a_transfer_that_the_rank_computes_for_takes_time_from_computing():
    program = program_of(Two(), 3)
    found = [simulate(program, Costs(machine(links={"*": Link(bandwidth=1e9, work=w)}))) for w in (0.0, 1e-9)]
    carried = sum(2 * 16 * 32 for n in program.nodes if collectives.is_start(n)) * 2  # bytes of whole weights
    assert found[1].busy["compute"] - found[0].busy["compute"] == pytest.approx(carried * 1e-9)


# -- operators --------------------------------------------------------------------------------------------------------------
def test_a_product_takes_the_longer_of_arithmetic_and_memory():
    program = program_of(Two(), 0, 1)
    product = next(n for n in program.nodes if n.target is aten.mm.default)
    moved = (8 * 16 + 16 * 32 + 8 * 32) * 4
    assert flops_of(product) == PRODUCT
    for memory, expected in ((1e30, PRODUCT / 1e9), (1e6, moved / 1e6)):
        costs = Costs(machine(memory=memory))
        assert costs.compute(program)[product] == pytest.approx(expected)
    launched = Costs(machine(launch=1.0)).compute(program)
    assert launched[product] == pytest.approx(1.0 + PRODUCT / 1e9)
    assert not any(n.target is aten.t.default for n in launched), "views cost nothing"


def test_what_a_fused_kernel_keeps_to_itself_costs_no_memory_traffic():
    class Pointwise(nn.Module):
        def forward(self, x):
            return ((x.sin() + 1) * 2).cos()

    program = programs(Pointwise(), zgraph.Plan(backend="eager"), (torch.randn(8, 16),), 1).program
    seconds = [sum(Costs(machine(memory=1e6), fused=f).compute(program).values()) for f in (True, False)]
    size = 8 * 16 * 4
    assert seconds == pytest.approx([2 * size / 1e6, 4 * 2 * size / 1e6])


def test_what_was_measured_goes_before_what_is_reckoned():
    program = program_of(Two(), 0, 1)
    product = next(n for n in program.nodes if n.target is aten.mm.default)
    costs = Costs(machine(operators={signature(product): 7.0}))
    assert costs.compute(program)[product] == 7.0


# -- memory -----------------------------------------------------------------------------------------------------------------
def held_by_a_run(program) -> list[int]:
    """Bytes of distinct storages that are alive after each node of a run on one rank."""
    nodes = list(program.graph.nodes)
    last = {n: max([nodes.index(u) for u in n.users], default=nodes.index(n)) for n in nodes}
    environment: dict[fx.Node, object] = {}
    found = []
    for at, node in enumerate(nodes):
        for gone in [n for n in environment if last[n] < at and n.op != "placeholder"]:
            del environment[gone]
        if node.op == "placeholder":
            value = node.meta["val"]
            made = torch.ones(value.shape, dtype=value.dtype)
            environment[node] = made.as_strided(value.shape, value.stride())
        elif node.op == "get_attr":
            environment[node] = getattr(program.module, node.target)
        elif node.op == "call_function" and node.target is not ops.RELEASE:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: environment[n])
            environment[node] = node.target(*args, **kwargs)
        tensors = [t for v in environment.values() for t in torch.utils._pytree.tree_leaves(v)]
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if torch.is_tensor(t)}
        found.append(sum(storages.values()))
    return found


class Attention(nn.Module):
    """Views of views, an operator with several results, values that only the backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 5, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        mixed = (q @ k.t()).softmax(-1) @ v
        return self.out(torch.nn.functional.gelu(mixed.reshape(2, -1).reshape(8, 16)) + x).exp().sum()


@pytest.mark.parametrize("model", [Two, Attention])
def test_forecast_memory_is_what_a_run_holds(model):
    program = program_of(model(), 3, 1)
    first = sum(n.op == "placeholder" for n in program.nodes)  # (before it, inputs arrive one by one)
    forecast = [sum(m.values()) for m in memory_of(program)][first:-1]
    assert forecast == held_by_a_run(program)[first:-1]


def test_memory_is_told_by_category():
    program = program_of(Two(), 3)
    found = memory_of(program)
    weight = 16 * 32 * 4
    assert max(m.get("gathered", 0) for m in found) == weight, "one whole weight at a time"
    both = memory_of(program_of(Two(), 3, prefetch={"max_bytes": 2 * weight}))
    assert max(m.get("gathered", 0) for m in both) == 2 * weight, "and one on its way"
    assert found[-1]["gradients"] == weight and found[-1]["parameters"] == weight  # two halves each
    assert max(m.get("gathered", 0) for m in memory_of(program_of(Two(), 2))) == 2 * weight
    update = update_program(Two(), zgraph.Plan(backend="eager", optimizer=zgraph.AdamW()), 2).program
    states = {n: size_of(node) for (port, node) in update.input_items() if (n := port.name).endswith("exp_avg")}
    assert memory_of(update)[-2]["states"] >= 2 * sum(states.values())


# -- hardware ---------------------------------------------------------------------------------------------------------------
def test_hardware_has_a_name_or_a_file(tmp_path):
    assert hardware("h200-141g") is KNOWN["h200-141g"]
    with pytest.raises(PlanError, match="there is no hardware 'h100'") as caught:
        hardware("h100")
    assert caught.value.hint == "did you mean 'h100-80g'?"
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nmemory = 1e12\ncapacity = 1\nhost = 1e9\n[flops]\nfloat32 = 1e12\n[links]\n')
    assert hardware(str(path)).memory == 1e12
    path.write_text('name = "mine"\n')
    with pytest.raises(PlanError, match="has 5 errors"):
        hardware(str(path))
    with pytest.raises(PlanError, match="can't be read"):
        hardware(str(tmp_path / "none.toml"))
    path = tmp_path / "mine.json"
    path.write_text(machine(operators={"mm": 7.0}).model_dump_json())
    assert hardware(str(path)) == machine(operators={"mm": 7.0})


def test_a_forecast_tells_its_parts():
    text = str(simulate(program_of(Two(), 3), Costs(KNOWN["cpu"])))
    assert all(word in text for word in ("compute", "link:*", "exposed gather", "exposed reduce", "peak memory"))
