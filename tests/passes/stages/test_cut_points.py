"""Cuts are where they were asked for or where brute force would put them, and part nothing that belongs together."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator

import models
import programs
import pytest
import torch
from sweeps import sweep
from torch import fx, nn
from torch.nn import functional as F

import zgraph
from zgraph.build.planned_step import captured_program
from zgraph.errors import PlanError
from zgraph.passes.analysis.costs import CPU, Costs, size_of
from zgraph.passes.analysis.repeated_layers import repeated_layers
from zgraph.passes.stages.cut_points import CutPosition, Cuts, StageBudget, assign, find_cuts
from zgraph.passes.stages.min_cuts import AnchorChain, forward_nodes, made_again, received
from zgraph.passes.stages.stage_costs import Balance, balance, origins
from zgraph.program.node import Phase, info
from zgraph.program.program import OutputRole, Program

pytestmark = pytest.mark.core
COSTS = Costs(CPU, fused=False)
TRANSFORMERS = ("gpt2", "llama", "t5", "vit", "mixtral")


class Ladder(nn.Module):
    """A U-Net of three levels: each skip crosses all that is deeper, and the first is read last."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(3 if i == 0 else 4, 4, 3, padding=1) for i in range(3))
        self.up = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=1) for _ in range(3))

    def forward(self, x):
        skips = []
        for layer in self.down:
            x = F.relu(layer(x))
            skips.append(x.sin())
            x = F.avg_pool2d(x, 2)
        for layer in self.up:
            x = layer(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1)).tanh()
        return x.pow(2).mean()


class Headed(nn.Module):
    """Small blocks under a large vocabulary."""

    def __init__(self, blocks: int = 6, dim: int = 8, words: int = 700) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, dim)
        self.h = nn.ModuleList(nn.Linear(dim, dim) for _ in range(blocks))
        self.head = nn.Linear(dim, words)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.h:
            x = x + layer(x).tanh()
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Masked(nn.Module):
    """A mask from the ids and a table that each of the layers reads, and views that several read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x, ids):
        mask = (ids > 3).float()[..., None] * torch.arange(6).cos()
        wide = F.dropout(self.a(x), 0.3).unsqueeze(0).expand(3, *x.shape)
        return (self.c(self.b(x * mask + wide[0]) * mask + wide[1]).transpose(0, 1) + wide.sum()).mean()


class Once(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(6, 3)

    def forward(self, x):
        return self.only(x).pow(2).sum()


@functools.cache
def case(name: str) -> tuple[Program, dict[str, str]]:
    """A captured program, and the class name of each of its model's modules."""
    if name in (*models.TRANSFORMERS, *models.PLAIN):
        made = models.build(name)
        model, inputs = made.model, made.inputs
    else:
        images, ids, x = torch.randn(2, 3, 8, 8), torch.randint(0, 90, (4, 5)), torch.randn(4, 6)
        model, inputs = {
            "ladder": lambda: (Ladder(), (images,)),
            "headed": lambda: (Headed(), (ids,)),
            "masked": lambda: (Masked(), (x, ids[:, 0])),
            "mlp": lambda: (programs.Mlp(), (x,)),
            "once": lambda: (Once(), (x,)),
        }[name]()
    return programs.captured(model, inputs), types_of(model)


def types_of(model: nn.Module) -> dict[str, str]:
    return {path: type(module).__name__ for path, module in model.named_modules()}


def cut(name: str, stages: int, how: str | tuple[str, ...], **options) -> Balance:
    """What the stages take, if so cut."""
    program, types = case(name)
    return balance(program, assign(program, find_cuts(program, stages, how, COSTS, types=types, **options)), COSTS)


def partitions(name: str, stages: int) -> Iterator[Balance]:
    """All that are possible."""
    program, _ = case(name)
    line = AnchorChain(program)
    for positions in itertools.combinations(line.positions, stages - 1):
        yield balance(program, line.assign(positions), COSTS)


def slowest(of: Balance) -> float:
    return max(s.seconds for s in of.stages)


def held(program: Program, stages: dict[fx.Node, int]) -> list[set[str]]:
    """The parameters that each stage reads."""
    found: list[set[str]] = [set() for _ in range(max(stages.values()) + 1)]
    for anchor in AnchorChain(program).anchors:
        found[stages[anchor.node]].update(anchor.params)
    return found


# -- anchors and free nodes ----------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_anchors_read_parameters_or_do_arithmetic():
    anchors = AnchorChain(case("gpt2")[0]).anchors
    assert [a.module.removeprefix("transformer.") for a in anchors[:7]] == [
        *("wte", "wpe", "h.0.ln_1", "h.0.attn.c_attn"),
        *("h.0.attn", "h.0.attn", "h.0.attn.c_proj"),
    ]
    assert anchors[-1].params == ("transformer.wte.weight",)  # tied, and read through a transpose
    assert [a.params for a in anchors[4:6]] == [(), ()]


@pytest.mark.parametrize("name", ["t5", "gpt2", "llama"])
@pytest.mark.slow
def test_masks_are_free(name):
    line = AnchorChain(case(name)[0])
    assert line.free and not any(info(n).phase is Phase.BACKWARD for n in line.free)
    assert not {a.node for a in line.anchors} & line.free


@pytest.mark.slow
def test_rotary_tables_are_free_and_what_is_drawn_or_read_from_parameters_is_not():
    program, _ = case("llama")
    rotary = [n for n in forward_nodes(program) if n.target in (torch.ops.aten.cos.default, torch.ops.aten.sin.default)]
    assert rotary and set(rotary) <= AnchorChain(program).free  # though an outer product makes the angles
    program, _ = case("masked")
    assert not any("dropout" in n.name for n in AnchorChain(program).free)


# -- minimum cuts --------------------------------------------------------------------------------------------------------
SMALL = ["gpt2", "llama", "ladder", "masked", "headed", "batch_norm", "multihead_attention"]


@sweep("name", [*SMALL, *sorted({*TRANSFORMERS} - {*SMALL})], quick=range(2))
def test_stages_are_monotone_nested_and_cross_no_more_than_any_place_in_the_order_of_the_graph(name):
    program, _ = case(name)
    line = AnchorChain(program)
    assert line.positions
    smaller: frozenset[fx.Node] = frozenset()
    order = {n: i for i, n in enumerate(line.nodes)}
    for position in line.positions:
        side = line.near(position)
        assert smaller <= side.near
        smaller = side.near
        stages = line.assign([position])
        assert stages.keys() == set(line.nodes)
        assert all(stages[a] <= stages[n] for n in stages for a in n.all_input_nodes if a in stages)
        assert all(stages[a.node] == (i >= position) for i, a in enumerate(line.anchors))
        begin, end = (order[line.anchors[i].node] for i in (position - 1, position))
        for at in range(begin + 1, end + 1):
            linear = {n: int(order[n] >= at) for n in line.nodes}
            if all(linear[n] == linear[u] for n in line.nodes if not is_tensor(n) for u in n.users if u in linear):
                assert side.bytes <= crossing(line, linear)
        assert side.bytes == crossing(line, stages)
    every = line.assign(line.positions)
    assert all(every[a] <= every[n] for n in every for a in n.all_input_nodes if a in every)
    assert set(every.values()) == set(range(len(line.positions) + 1))


def is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], torch.Tensor)


def crossing(line: AnchorChain, stages: dict[fx.Node, int]) -> int:
    """Bytes that two stages exchange in the forward."""
    return sum(size_of(n) for nodes in received(line, stages).values() for n in nodes)


@pytest.mark.parametrize("name", ["masked", "ladder", "mlp"])
def test_no_set_of_operators_that_could_be_before_a_cut_crosses_fewer_bytes(name):
    line = AnchorChain(case(name)[0])
    for position in line.positions:
        first = {a.node: i for i, a in enumerate(line.anchors)}
        least = min(crossing(line, stages) for stages in closed(line, first, position))
        assert line.near(position).bytes == least


def closed(line: AnchorChain, first: dict[fx.Node, int], position: int) -> Iterator[dict[fx.Node, int]]:
    """Every way of giving the operators two stages that keeps the anchors, the order and members of tuples."""

    def grow(at: int, stages: dict[fx.Node, int]) -> Iterator[dict[fx.Node, int]]:
        if at == len(line.nodes):
            yield dict(stages)
            return
        node = line.nodes[at]
        low = max((stages[a] for a in node.all_input_nodes if a in stages), default=0)
        choice = [int(first[node] >= position)] if node in first else [0] if node in line.free else [0, 1]
        member = [stages[a] for a in node.all_input_nodes if a in stages and not is_tensor(a)]
        for stage in member or choice:
            if stage >= low:
                yield from grow(at + 1, stages | {node: stage})

    return grow(0, {})


@pytest.mark.slow
def test_a_value_that_skips_stages_is_received_once_by_each_that_reads_it():
    program, _ = case("ladder")
    line = AnchorChain(program)
    stages = line.assign([1, 2, 3, 4, 5])  # one convolution each
    come = received(line, stages)
    assert sorted(stages[n] for n in come[5]) == [
        1,
        4,
    ]  # the first skip, from the stage that made it; and what comes up
    assert all(len(nodes) == len(set(nodes)) for nodes in come.values())
    program, _ = case("t5")
    line = AnchorChain(program)
    cuts = find_cuts(program, 4, "uniform", COSTS)
    stages = assign(program, cuts)
    come = received(line, stages)
    for stage in (2, 3):  # the decoder's stages each read what the encoder gives
        assert len(come[stage]) == len(set(come[stage]))
        assert any(info(n).module.startswith("encoder") for n in come[stage])


def test_of_a_wide_view_its_base_is_sent_and_of_a_narrow_one_itself():
    program, _ = case("masked")
    line = AnchorChain(program)
    for position in line.positions:
        for nodes in received(line, line.assign([position])).values():
            assert not any(made_again(n) for n in nodes)
            assert not any(n in line.free for n in nodes)


# -- how ---------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_uniform_gives_each_stage_as_many_blocks():
    assert [s.first for s in cut("gpt2", 2, "uniform").stages] == ["transformer.wte", "transformer.h.1.ln_1"]
    t5 = [s.first for s in cut("t5", 4, "uniform").stages]
    assert [path[: path.index("block") + 7] for path in t5[1:]] == [
        "encoder.block.1",
        "decoder.block.0",
        "decoder.block.1",
    ]
    vit = cut("vit", 2, "uniform").stages
    assert ".0." in vit[0].last and ".1." in vit[1].first
    assert [s.first for s in cut("ladder", 3, "uniform").stages] == ["down.0", "down.2", "up.1"]


class Nested(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)

    def forward(self, x):
        return self.parts(x).sum()


def test_blocks_are_found_inside_of_lists_of_unlike_modules():
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(4)))
    stem = nn.Sequential(nn.Linear(3, 4, bias=False), nn.PReLU())
    program = programs.captured(Nested(stem, blocks, nn.Linear(4, 2, bias=False)), (torch.randn(5, 3),))
    anchors = AnchorChain(program).anchors
    assert [anchors[i].module for i in repeated_layers(anchors)] == [f"parts.1.{i}.0" for i in range(4)]


def test_a_model_without_blocks_is_cut_between_modules():
    stages = cut("mlp", 2, "uniform").stages
    assert [(s.first, s.last) for s in stages] == [("up", "up"), ("down", "down")]


@sweep("name,stages", [("gpt2", 2), ("headed", 2), ("headed", 3), ("ladder", 3), ("t5", 2)], quick=range(4))
def test_parameters_makes_the_largest_stage_as_small_as_can_be(name, stages):
    found = max(s.elements for s in cut(name, stages, "parameters").stages)
    assert found == min(max(s.elements for s in way.stages) for way in partitions(name, stages))


def test_a_tied_parameter_counts_in_each_stage_that_reads_it():
    program, _ = case("gpt2")
    found = cut("gpt2", 2, "uniform")
    assert sum(s.elements for s in found.stages) == sum(p.numel for p in program.params.values()) + models.WORDS * 30


def test_type_balances_the_modules_of_a_class():
    assert cut("gpt2", 2, "type:gpt2block") == cut("gpt2", 2, "uniform")
    assert [s.first for s in cut("headed", 3, "type:^Linear$").stages] == ["embed", "h.3", "h.5"]


@sweep(
    "name,stages",
    [("mlp", 2), ("headed", 2), ("headed", 4), ("ladder", 2), ("ladder", 4), ("masked", 3), ("gpt2", 2), ("vit", 3)],
    quick=range(7),
)
@sweep("fused", [False, True], quick=1)
def test_the_slowest_stage_of_time_is_as_fast_as_the_best_of_all_partitions(name, stages, fused, monkeypatch):
    monkeypatch.setitem(globals(), "COSTS", Costs(CPU, fused))
    best = min(slowest(way) for way in partitions(name, stages))
    assert slowest(cut(name, stages, "time")) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("name,stages", [("ladder", 4), ("ladder", 3), ("headed", 3), ("gpt2", 2)])
def test_of_equally_good_partitions_the_one_that_receives_fewest_bytes_is_taken(name, stages):
    for how, worst in (("time", slowest), ("parameters", lambda way: max(s.elements for s in way.stages))):
        ways = list(partitions(name, stages))
        best = min(map(worst, ways)) * (1 + 1e-9)
        least = min(sum(s.received for s in way.stages) for way in ways if worst(way) <= best)
        assert sum(s.received for s in cut(name, stages, how).stages) == least


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_time_is_at_least_a_tenth_faster_than_uniform_under_a_large_vocabulary(stages):
    assert slowest(cut("headed", stages, "time")) <= 0.9 * slowest(cut("headed", stages, "uniform"))


@pytest.mark.slow
def test_all_seconds_of_a_program_are_in_its_stages():
    for name in ("gpt2", "t5", "ladder"):
        program, _ = case(name)
        whole = {Phase.FORWARD: 0.0, Phase.BACKWARD: 0.0}
        for node, seconds in COSTS.compute(program).items():
            whole[info(node).phase] += seconds
        one = balance(program, AnchorChain(program).assign([]), COSTS).stages[0]
        assert (one.forward, one.backward) == pytest.approx(tuple(whole.values()), rel=0.01)


@pytest.mark.slow
def test_a_backward_node_is_there_for_an_operator_of_its_module():
    program, _ = case("llama")
    anchors = {a.node for a in AnchorChain(program).anchors}
    products = {n: o for n, o in origins(program, anchors).items() if n.target in (torch.ops.aten.mm.default,)}
    assert products and all(info(n).module == info(o).module for n, o in products.items())
    assert {o for o in products.values()} <= anchors


# -- memory --------------------------------------------------------------------------------------------------------------
def needs(of: Balance, room: StageBudget) -> int:
    return max(int(s.parameters * room.states + s.saved * n) for s, n in zip(of.stages, room.in_flight, strict=True))


def test_time_stays_within_memory_and_is_the_fastest_that_does():
    room = StageBudget(0, 4.0, (9, 2, 1))
    ways = [(needs(way, room), slowest(way)) for way in partitions("ladder", 3)]
    fastest = min(ways, key=lambda w: w[1])
    tighter = sorted(need for need, _ in ways if need < fastest[0])
    assert tighter and fastest[1] == pytest.approx(slowest(cut("ladder", 3, "time")))
    for budget in (fastest[0], tighter[-1], tighter[0]):
        room = StageBudget(budget, 4.0, (9, 2, 1))
        found = cut("ladder", 3, "time", room=room)
        assert needs(found, room) <= budget
        assert slowest(found) == pytest.approx(min(t for need, t in ways if need <= budget), rel=1e-9)
    with pytest.raises(PlanError) as error:
        cut("ladder", 3, "time", room=StageBudget(tighter[0] - 1, 4.0, (9, 2, 1)))
    assert error.value.where == "memory_budget" and f"memory_budget={tighter[0]}" in str(error.value.hint)


# -- the same cuts elsewhere ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", TRANSFORMERS[:4])
@pytest.mark.parametrize("how", ["uniform", "time"])
@pytest.mark.slow
def test_cuts_hold_for_other_shapes_and_for_evaluation(name, how):
    program, _ = case(name)
    cuts = find_cuts(program, 2, how, COSTS)
    other = models.build(name)
    inputs = {k: v[:1] if k == "pixel_values" or v.dim() == 1 else v[:1, :1] for k, v in other.inputs.items()}
    changed = programs.captured(other.model.eval(), inputs, "eval")
    assert held(changed, assign(changed, cuts)) == held(program, assign(program, cuts))


@functools.cache
def short_gpt2() -> Program:
    made = models.build("gpt2")
    return programs.captured(made.model, {k: v[:, :1] for k, v in made.inputs.items()})


@sweep("position", range(1, 20), quick=7)
def test_a_cut_at_any_anchor_holds_where_attention_is_too_short_to_be_one(position):
    program, _ = case("gpt2")
    line = AnchorChain(program)
    before = line.anchors[:position]
    behind = next(i for i in range(position, -1, -1) if i == 0 or line.anchors[i - 1].params)
    between = next(i for i in range(position, len(line.anchors)) if line.anchors[i].params) - behind
    reads = tuple(n for a in line.anchors for n in a.params)
    cuts = Cuts(
        reads=reads,
        places=(CutPosition(reads=sum(len(a.params) for a in before), passed=position - behind, between=between),),
    )
    assert assign(program, cuts) == line.assign([position])
    other = short_gpt2()
    assert len(AnchorChain(other).anchors) < len(line.anchors)
    assert held(other, assign(other, cuts)) == held(program, line.assign([position]))


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
@pytest.mark.slow
def test_cuts_hold_where_operators_are_decomposed_and_in_evaluation_otherwise(name):
    made = models.build(name)
    train = captured_program(made.model, zgraph.Plan(backend="inductor"), made.inputs, 1)
    made.model.eval()
    evaluate = captured_program(made.model, zgraph.Plan(backend="inductor"), made.inputs, 1)
    for stages, how in ((2, "uniform"), (4, "time")):
        cuts = find_cuts(train, stages, how, COSTS)
        assert held(evaluate, assign(evaluate, cuts)) == held(train, assign(train, cuts))


class Turned(nn.Module):
    """Its second layer's input is contiguous, and so one operator does it, only if there is one row."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x):
        return self.c(self.b(self.a(x).view(x.shape[0], 6, -1).transpose(1, 2))).sum()


def test_cuts_hold_where_one_operator_reads_what_two_did():
    two, one = (programs.captured(Turned(), (torch.randn(4, rows, 6),)) for rows in (3, 1))
    assert len(AnchorChain(two).anchors) > len(AnchorChain(one).anchors)
    for path in ("b", "c"):
        cuts = find_cuts(two, 2, (path,), COSTS)
        assert held(one, assign(one, cuts)) == held(two, assign(two, cuts))
        assert find_cuts(one, 2, (path,), COSTS).fingerprint == cuts.fingerprint
    apart = next(q for q, a in enumerate(AnchorChain(two).anchors) if a.params == ("b.bias",))
    reads = tuple(n for a in AnchorChain(two).anchors for n in a.params)
    between = Cuts(reads=reads, places=(CutPosition(reads=apart + 1, passed=0, between=0),))
    assert held(two, assign(two, between))[1] == {"b.bias", "c.weight", "c.bias"}
    with pytest.raises(PlanError, match=r"b\.weight.*one operator"):
        assign(one, between)


def test_cuts_of_another_model_are_refused_with_the_read_that_differs():
    program, _ = case("headed")
    cuts = find_cuts(program, 2, "uniform", COSTS)
    other = programs.captured(Headed(blocks=7), (torch.randint(0, 90, (4, 5)),))
    with pytest.raises(PlanError, match="reads other parameters") as error:
        assign(other, cuts)
    assert "'head.bias'" in str(error.value.why) and "'h.6.bias'" in str(error.value.why)


def test_cuts_can_be_hashed_compared_and_written():
    program, types = case("llama")
    cuts = find_cuts(program, 3, "time", COSTS, types=types)
    again = Cuts.model_validate(json.loads(json.dumps(cuts.model_dump(mode="json"))))
    assert again == cuts and hash(again) == hash(cuts) and cuts.stages == 3
    assert find_cuts(program, 2, "uniform", COSTS).fingerprint == cuts.fingerprint
    assert find_cuts(case("gpt2")[0], 2, "uniform", COSTS).fingerprint != cuts.fingerprint


# -- what belongs together -----------------------------------------------------------------------------------------------
library = torch.library.Library("zgraph_cuts", "DEF")
library.define("noise(Tensor x, Tensor key) -> (Tensor, Tensor)", tags=torch.Tag.nondeterministic_seeded)
library.impl("noise", lambda x, key: (torch.rand_like(x), key + 1), "CompositeExplicitAutograd")
torch.library.register_fake(
    "zgraph_cuts::noise", lambda x, key: (torch.empty_like(x), torch.empty_like(key)), lib=library
)


class Keyed(nn.Module):
    """Layers whose noise is drawn with a key; `passed` from each to the next, or of its own for each."""

    def __init__(self, passed: bool) -> None:
        super().__init__()
        self.passed = passed
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x, key):
        for layer in self.layers:
            x = layer(x)
            noise, left = torch.ops.zgraph_cuts.noise(x.detach(), key)
            key = left if self.passed else key
            x = x * noise
        return x.sum()


def test_a_cut_through_the_state_of_random_operators_is_refused():
    inputs = (torch.randn(4, 6), torch.zeros(2, dtype=torch.int64))
    program = programs.captured(Keyed(passed=True), inputs)
    for how in ("uniform", ("layers.2",)):
        with pytest.raises(PlanError, match="can't be cut") as error:
            find_cuts(program, 2, how, COSTS)
        assert error.value.where == "partition" and "zgraph_cuts.noise" in str(error.value.why)
    with pytest.raises(PlanError, match="2 at most") as error:
        find_cuts(program, 3, "time", COSTS)
    assert "random state" in str(error.value.why)
    stages = assign(program, find_cuts(program, 2, "time", COSTS))  # all noise is behind the first layer
    assert {stages[n] for n in stages if n.target is torch.ops.zgraph_cuts.noise.default} == {1}
    program = programs.captured(Keyed(passed=False), inputs)
    assert len(find_cuts(program, 3, "time", COSTS).places) == 2


def test_masks_of_dropout_may_cross():
    for name in ("gpt2", "dropout"):
        line = AnchorChain(case(name)[0])
        assert line.positions == list(range(1, len(line.anchors)))


class Changed(nn.Module):
    """A buffer that the first layer reads gets its new value from the layer `at`."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x - self.mean) if i == 0 else layer(x)
            if i == self.at:
                self.mean.copy_(x.detach().mean(0))
        return x.sum()


def test_a_cut_between_a_buffer_and_what_changes_it_is_refused():
    late, soon = (programs.captured(Changed(at), (torch.randn(4, 6),)) for at in (2, 0))
    with pytest.raises(PlanError, match="can't be cut before") as error:
        find_cuts(late, 3, "uniform", COSTS)
    assert "'mean'" in str(error.value.why)
    stages = assign(soon, find_cuts(soon, 3, "uniform", COSTS))
    assert [stages[n] for p, n in soon.output_items() if p.role is OutputRole.MUTATION] == [0]


@sweep("name", TRANSFORMERS, quick=(0,))
def test_members_of_a_tuple_are_in_one_stage(name):
    line = AnchorChain(case(name)[0])
    members = [(n, u) for n in line.solid if not is_tensor(n) for u in n.users]
    assert members
    for position in line.positions:
        stages = line.assign([position])
        assert all(stages[n] == stages[u] for n, u in members if u in stages)


# -- what can't be done --------------------------------------------------------------------------------------------------
def test_more_stages_than_there_can_be_are_refused_with_how_many_there_can():
    for name, stages, how, most in (
        ("once", 2, "time", 1),
        ("once", 2, "parameters", 1),
        ("mlp", 3, "time", 2),
        ("gpt2", 3, "uniform", 2),
        ("gpt2", 3, "type:GPT2Block", 2),
        ("headed", 9, "time", 8),
    ):
        with pytest.raises(PlanError, match=f"{most} at most") as error:
            cut(name, stages, how)
        assert error.value.where == "partition"
    assert len(cut("once", 1, "time").stages) == len(cut("headed", 1, "uniform").stages) == 1
    assert len(cut("headed", 8, "time").stages) == 8


@pytest.mark.parametrize(
    "how,said",
    [
        ("tiem", "did you mean 'time'"),
        ("type:(", "no regular expression"),
        ("type:Transformer", "matches 'Transformer'"),
        (("h.2", "h.4", "head"), "begin 4 stages"),
        (("h.3", "haed"), "did you mean 'head'"),
        (("h.3", "h.3"), "does not come after"),
        (("h.3", "h.1"), "does not come after"),
        (("embed", "h.1"), "nothing comes before"),
    ],
)
def test_a_partition_that_means_nothing_is_refused(how, said):
    with pytest.raises(PlanError) as error:
        cut("headed", 3, how)
    assert said in str(error.value) and str(error.value.where).startswith("partition")


def test_a_module_without_anchors_can_begin_no_stage():
    with pytest.raises(PlanError, match=r"no stage can begin with 'transformer\.drop'"):
        cut("gpt2", 2, ("transformer.drop",))


def test_named_modules_begin_their_stages():
    found = cut("gpt2", 3, ("transformer.h.0.mlp", "lm_head")).stages
    assert [s.first for s in found] == ["transformer.wte", "transformer.h.0.mlp.c_fc", "lm_head"]
    assert cut("headed", 3, ("h.1", "head")).stages[1].last == "h.5"


def test_the_balance_is_a_table():
    found = cut("headed", 2, "time")
    lines = str(found).splitlines()
    assert len(lines) == 4 and "embed .. h.4" in lines[1]
    assert lines[-1] == f"slowest/mean {found.ratio:.3f}"
    assert found.ratio == pytest.approx(slowest(found) / (sum(s.seconds for s in found.stages) / 2))
