"""Ranks that each have a part of the sequence compute what one process does.

On virtual ranks, loss and every gradient: in float64 within 1e-12, in float32 within 1e-5 (transformers' norms and losses are in float32
whatever the model is); and the collectives are those of Ulysses, or of a ring.
"""

from __future__ import annotations

import logging
from collections import Counter

import divided_models
import pytest
import torch
from divided_models import OWN, ROWS, WIDTH, WORDS, Gpt2, Llama, of_transformers, own
from sweeps import in_turn, sweep
from torch import nn
from torch.nn import functional as F

import zgraph
from zgraph.build.planned_step import captured_program, programs
from zgraph.errors import PlanError
from zgraph.passes.analysis.costs import Costs, hardware
from zgraph.passes.analysis.simulator import simulate
from zgraph.passes.canonicalize.cleanup import cleanup
from zgraph.passes.spmd.divide_context import ContextOptions, divide_context
from zgraph.program import collectives
from zgraph.program.node import Phase, info, tensor
from zgraph.program.program import Program

TEXTS = [name for name in OWN if name != "convolutions"]


def assert_same(model, inputs, world, **plan):
    plan = zgraph.Plan(**{"backend": "eager", "zero": 0, **plan})
    torch.manual_seed(1)
    found = zgraph.verify(model, plan, world, inputs)
    assert found.ok, str(found)
    assert any(d.what == "output" for d in found.differences)
    assert any(d.what == "gradient" for d in found.differences)


@sweep(
    "name, ranks, attention",
    [
        (name, *way)
        for name, ways in in_turn(TEXTS, [((2, "heads"), (4, "ring")), ((4, "heads"), (2, "ring"))])
        for way in ways
    ],
    quick=1,
)
def test_parts_of_a_sequence_give_what_the_whole_gives(name, ranks, attention):
    assert_same(*own(name), ranks, mesh={"cp": ranks}, context_attention=attention)


@pytest.mark.parametrize(
    "mesh, fields, attention",
    [
        ({"dp": 2, "cp": 2}, {"zero": 1}, "heads"),
        ({"dp": 2, "cp": 2}, {"zero": 2}, "ring"),
        ({"dp": 2, "cp": 2}, {"zero": 3}, "heads"),
        ({"dp": 2, "cp": 2}, {"zero": 3}, "ring"),
        ({"cp": 2, "tp": 2}, {}, "ring"),
        ({"cp": 2, "tp": 2}, {"sequence_parallel": True}, "heads"),
        ({"dp": 2, "cp": 2, "tp": 2}, {"zero": 2}, "heads"),
        ({"pp": 2, "cp": 2}, {"micro_batches": 2}, "ring"),
        ({"pp": 2, "cp": 2}, {"micro_batches": 2}, "heads"),
        ({"cp": 2}, {"recompute": "full"}, "ring"),
        ({"cp": 2}, {"backend": "inductor"}, "heads"),
        ({"dp": 2, "cp": 2}, {"zero": 3, "backend": "inductor"}, "ring"),
    ],
    ids=str,
)
@pytest.mark.slow
def test_it_goes_together_with_everything_else(mesh, fields, attention):
    world = 2 ** len(mesh)
    model, inputs = own("gpt2" if attention == "heads" else "llama")
    if "pp" in mesh:
        # (Each stage has an attention: one layer may be cut before it, and a ring can't take it then.)
        model = type(model)(layers=2).double()
    assert_same(model, inputs, world, mesh=mesh, context_attention=attention, **fields)


class Fused(nn.Module):
    """One attention, whose queries, keys and values are taken out of one product; the second of two stages has none."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.embed, self.mixed, self.out = nn.Embedding(WORDS, 16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.inner = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 96), nn.GELU(), nn.Linear(96, 16))
        self.head = nn.Linear(16, WORDS)
        self.heads = heads

    def forward(self, ids, labels):
        x = self.embed(ids)
        apart = self.mixed(x).view(*ids.shape, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*apart.unbind(0), is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x + self.inner(x)).flatten(0, 1), labels.flatten())


@sweep("mesh, attention", [({"cp": 2}, "ring"), ({"cp": 2}, "heads"), ({"pp": 2, "cp": 2}, "ring")], quick=1)
def test_queries_keys_and_values_may_be_parts_of_one_product_and_a_stage_may_have_none(mesh, attention):
    torch.manual_seed(0)
    inputs = (torch.randint(WORDS, (4, 16)), torch.randint(WORDS, (4, 16)))
    fields = {"micro_batches": 2} if "pp" in mesh else {}
    assert_same(Fused().double(), inputs, 2 ** len(mesh), mesh=mesh, context_attention=attention, **fields)


class Apart(Fused):
    """The parts lie along the last dimension, so that torch computes attention by plain products."""

    def forward(self, ids, labels):
        x = self.embed(ids)
        apart = self.mixed(x).view(*ids.shape, self.heads, -1, 3).transpose(1, 2)
        seen = F.scaled_dot_product_attention(*apart.unbind(-1), is_causal=True)
        return F.cross_entropy(self.head(x + seen.transpose(1, 2).flatten(2)).flatten(0, 1), labels.flatten())


class Without(Fused):
    """No attention at all."""

    def forward(self, ids, labels):
        x = self.embed(ids)
        return F.cross_entropy(self.head(x + self.inner(x)).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("model", [Apart, Without])
def test_a_ring_that_no_stage_can_have_is_refused(model):
    plan = zgraph.Plan(backend="eager", mesh={"pp": 2, "cp": 2}, micro_batches=2, context_attention="ring")
    inputs = (torch.randint(WORDS, (4, 16)), torch.randint(WORDS, (4, 16)))
    with pytest.raises(PlanError, match="no attention operator"):
        zgraph.verify(model(), plan, 4, inputs)


def transformers_model(name: str):
    """As `of_transformers`; a picture has as many patches as four ranks divide with the class's own."""
    pytest.importorskip("transformers")
    if name != "vit":
        return of_transformers(name)
    import transformers as t

    torch.manual_seed(0)
    sizes = dict(hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_labels=8)
    still = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config = t.ViTConfig(**sizes, **still, image_size=(12, 20), patch_size=4)
    batch = {"pixel_values": torch.randn(ROWS, 3, 12, 20), "labels": torch.randint(8, (ROWS,))}
    return t.ViTForImageClassification(config), batch


@pytest.mark.parametrize(
    "name, attention, ranks",
    [
        ("gpt2", "heads", 2),
        ("llama", "ring", 4),
        ("bert", "heads", 4),
        ("t5", "ring", 4),
        ("t5", "heads", 2),
        ("vit", "ring", 4),
        ("mixtral", "heads", 4),
        ("mixtral", "ring", 4),
    ],
)
@pytest.mark.slow
def test_models_of_transformers_too(name, ranks, attention):
    """(Their masks are known, or are biases that are learned.)"""
    assert_same(*transformers_model(name), ranks, mesh={"cp": ranks}, context_attention=attention)


@pytest.mark.parametrize("name", ["bert", "t5", "vit"])
@pytest.mark.slow
def test_in_float64_they_are_the_same_within_a_strict_bound(name):
    model, batch = transformers_model(name)
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    assert_same(model.double(), batch, 2, mesh={"cp": 2})


# -- collectives ------------------------------------------------------------------------------------------------------
Seen = Counter[tuple[str, str]]


def program_of(model: nn.Module, length: int, ranks: int, attention: str = "auto", rows: int = 1) -> Program:
    words = torch.randint(WORDS, (rows, length))
    plan = zgraph.Plan(mesh={"cp": ranks}, backend="eager", zero=0)
    program = captured_program(model, plan, (words, words), ranks)
    cleanup()(program)
    divide_context(ContextOptions(attention=attention))(program)
    return program


def starts_of(program: Program) -> list:
    return [n for n in program.nodes if n.op == "call_function" and collectives.is_start(n)]


def of_a_layer(attention: str, ranks: int) -> tuple[Counter, Counter]:
    """How many transfers of activations a second layer of a Llama adds, and the elements that a rank gives to them."""
    counts, sizes = [], []
    for layers in (1, 2):
        starts = starts_of(program_of(Llama(layers=layers).double(), 32, ranks, attention))
        moved = [n for n in starts if collectives.kind(n) != "all_reduce"]
        kinds = [(info(n).phase.value, collectives.kind(n)) for n in moved]
        counts.append(Counter(kinds))
        sizes.append(Counter())
        for key, node in zip(kinds, moved, strict=True):
            sizes[-1][key] += tensor(node.all_input_nodes[0]).numel()
    added = [Counter({k: many[k] - few[k] for k in many if many[k] != few[k]}) for few, many in (counts, sizes)]
    return added[0], added[1]


@pytest.mark.slow
def test_by_heads_a_layer_turns_queries_keys_values_and_outputs_once_in_each_direction():
    """The least there is (Ulysses): keys and values before they are repeated for their groups."""
    counts, elements = of_a_layer("heads", 4)
    forward, backward = ((phase.value, "all_to_all") for phase in (Phase.FORWARD, Phase.BACKWARD))
    part = 32 * WIDTH // 4
    assert counts == {forward: 4, backward: 4}
    assert elements == {
        forward: 3 * part,
        backward: 3 * part,
    }  # (queries, outputs, and half as much each of keys and values)


def test_in_a_ring_keys_and_values_go_once_around_and_their_gradients_home():
    counts, elements = of_a_layer("ring", 4)
    forward, backward = ((phase.value, "shift") for phase in (Phase.FORWARD, Phase.BACKWARD))
    part = 32 * WIDTH // 4  # (repeated for their groups by the model)
    assert counts == {forward: 3 * 2, backward: 3 * 4 + 2}
    assert elements == {forward: 6 * part, backward: 14 * part}


def test_weights_gradients_are_all_that_is_summed_and_the_loss():
    program = program_of(Llama(layers=1).double(), 32, 4)
    sums = [n for n in starts_of(program) if collectives.kind(n) == "all_reduce"]
    assert sum(info(n).phase is Phase.FORWARD for n in sums) == 1
    backward = [tensor(n).numel() for n in sums if info(n).phase is Phase.BACKWARD]
    assert sum(backward) == sum(p.numel() for p in Llama(layers=1).parameters())


@pytest.mark.parametrize("attention", ["heads", "ring"])
@pytest.mark.slow
def test_no_activation_is_whole_anywhere(attention):
    program = program_of(Llama().double(), 64, 4, attention)
    floats = [t for n in program.nodes if n.op == "call_function" for t in [n.meta.get("val")]]
    floats = [t for t in floats if isinstance(t, torch.Tensor) and t.is_floating_point()]
    of_parameters = max(p.numel() for p in Llama().parameters())
    assert max(t.numel() for t in floats) <= max(of_parameters, 64 * WORDS // 4)


def test_a_ring_looks_at_what_is_seen_and_at_nothing_else():
    """Of n queries a rank and r ranks: its own keys, then half of the others' in two blocks of half as many queries each."""
    program = program_of(Llama(layers=1).double(), 64, 4, "ring")
    calls = [n for n in program.nodes if "flash_attention_for_cpu.default" in str(n.target)]
    areas = [tensor_of(n, 0).shape[2] * tensor_of(n, 1).shape[2] for n in calls]
    assert areas == [16 * 16, *([8 * 8] * 6)]


def test_a_dropout_gathers_nothing():
    """Each rank draws for all rows, and keeps what is its own."""
    kinds = {collectives.kind(n) for n in starts_of(program_of(Gpt2(dropout=0.3).double(), divided_models.LENGTH, 4))}
    assert kinds == {"all_reduce", "all_to_all"}


def tensor_of(node, at: int) -> torch.Tensor:
    return node.args[at].meta["val"]


# -- memory -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("attention", ["heads", "ring"])
@pytest.mark.slow
def test_the_peak_of_a_long_sequence_falls_as_the_ranks_grow(attention):
    """Within a tenth of 1 / ranks; what is left is that weights are whole."""
    peaks = {}
    for ranks in (1, 4):
        model = Llama(layers=2)
        words = torch.randint(WORDS, (1, 4096))
        fields = {"context_attention": attention} if ranks > 1 else {}
        plan = zgraph.Plan(mesh={"cp": ranks}, backend="eager", zero=0, **fields)
        history = programs(model, plan, (words, words), ranks)
        found = simulate(history.program, Costs(hardware("cpu"), fused=False))
        weights = 2 * sum(p.numel() * p.element_size() for p in model.parameters())
        peaks[ranks] = sum(found.peak.values()) - weights
    assert peaks[4] <= 1.1 * peaks[1] / 4


# -- what can't be had ------------------------------------------------------------------------------------------------
def refused(model: nn.Module, inputs, mesh=None, **fields) -> PlanError:
    with pytest.raises(PlanError) as caught:
        world = 2
        programs(model, zgraph.Plan(mesh=mesh or {"cp": world}, backend="eager", **fields), inputs, world)
    return caught.value


class Grid(nn.Module):
    """Values over time and place, both in front of the width."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.inner(x).square().mean()


def test_a_model_without_a_sequence_is_refused():
    assert "can't be told" in str(refused(*own("convolutions")))


def test_of_two_dimensions_the_plan_says_which():
    x = torch.randn(2, 4, 6, WIDTH)
    error = refused(Grid(), (x,))
    assert "several dimensions" in str(error) and "sequence_dim" in error.hint and "inner" in str(error)
    for dim in (1, 2):
        assert_same(Grid().double(), (x.double(),), 2, mesh={"cp": 2}, sequence_dim=dim)
    assert "no input has a dimension 7" in str(refused(Grid(), (x,), sequence_dim=7))


def test_a_length_that_ranks_do_not_divide_is_refused():
    words = torch.randint(WORDS, (2, 7))
    error = refused(Llama(), (words, words))
    assert "a sequence of 7 can't be divided among 2 ranks" in str(error) and "multiple of 2" in error.hint


def test_a_ring_that_a_mask_forbids_is_refused_where_it_is_asked_for():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, mask):
            q = self.inner(x).unflatten(-1, (3 if WIDTH % 3 == 0 else 1, -1)).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).square().mean()

    inputs = (torch.randn(2, 8, WIDTH), torch.rand(8, 8) < 0.5)
    error = refused(Masked(), inputs, context_attention="ring")
    assert error.where == "context_attention" and "a mask" in str(error)


def test_attention_that_is_computed_whole_is_told_of(caplog):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, mask):
            q = self.inner(x).unsqueeze(1)
            return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).square().mean()

    mask = torch.zeros(8, 8).double()
    with caplog.at_level(logging.WARNING, "zgraph"):
        assert_same(Masked().double(), (torch.randn(2, 8, WIDTH).double(), mask), 2, mesh={"cp": 2})
    assert "computed whole on each rank" in caplog.text and "a mask" in caplog.text


@pytest.mark.parametrize("fields", [{"sequence_dim": 1}, {"context_attention": "ring"}], ids=str)
def test_fields_without_such_ranks_are_refused(fields):
    with pytest.raises(PlanError, match="without ranks that divide a sequence"):
        zgraph.Plan(mesh={"dp": 2}, **fields)


def test_a_running_sum_over_the_sequence_is_computed_for_parts_of_the_width():
    class Running(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.inner(self.inner(x).cumsum(1)).square().mean()

    assert_same(Running().double(), (torch.randn(2, 8, WIDTH).double(),), 2, mesh={"cp": 2})


@pytest.mark.slow
def test_logits_shifted_against_their_targets_are_too(monkeypatch):
    class Shifted(Gpt2):
        def forward(self, ids, labels):
            x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
            for layer in self.layers:
                x = layer(x)
            logits = self.head(self.ln_f(x))[:, :-1]
            return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=3)

    words = torch.randint(WORDS, (2, divided_models.LENGTH))
    assert_same(Shifted().double(), (words, words), 4, mesh={"cp": 4})


class Mixed(nn.Module):
    """Positions are an input, targets are flat, and rows are looked up in another order."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(8, WIDTH)
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids, places, labels):
        x = self.words(ids) + self.places(places)
        q = self.inner(x).unflatten(-1, (4, -1)).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        x = x.gather(1, places.flip(0)[None, :, None].expand(ids.shape[0], -1, WIDTH))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels)


@pytest.mark.parametrize("attention", ["heads", "ring"])
def test_inputs_that_begin_with_the_sequence_are_no_batch_and_look_ups_see_all_rows(attention):
    ids, labels = torch.randint(WORDS, (2, 8)), torch.randint(WORDS, (16,))
    assert_same(Mixed().double(), (ids, torch.arange(8), labels), 2, mesh={"cp": 2}, context_attention=attention)


@pytest.mark.slow
def test_what_is_summed_over_other_ranks_is_divided_behind_its_wait():
    class Mixer(nn.Module):
        """Products along the sequence and along the width: with both divided, norms' gradients are sums over either."""

        def __init__(self):
            super().__init__()
            self.one, self.two = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.across = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
            self.along = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

        def forward(self, x):
            x = x + self.across(self.one(x).transpose(1, 2)).transpose(1, 2)
            return (x + self.along(self.two(x))).square().mean()

    torch.manual_seed(0)
    mesh = {"cp": 2, "tp": 2}
    assert_same(Mixer().double(), (torch.randn(4, 8, WIDTH).double(),), 4, mesh=mesh, sequence_parallel=True)


class Selects(nn.Module):
    """What runs along the whole sequence turns the gradient of a layer before it, for whose weight a kernel runs that reads no strides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.head = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 3)

    def forward(self, x):
        h = x + torch.tanh(self.a(x))
        return self.head(torch.zeros_like(h).scatter(1, h.topk(2, 1)[1], h.topk(2, 1)[0])).square().mean()


def test_operands_of_kernels_that_read_no_strides_lie_as_they_were_captured():
    plan = zgraph.Plan(backend="eager", mesh={"cp": 2}, sequence_dim=1, zero=0)
    found = zgraph.verify(Selects(), plan, 2, (torch.randn(4, 8, 8),))
    assert found.ok, found
