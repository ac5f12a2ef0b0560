"""Attention that a model has written out, made sparse by a plan, beside the plain model whose softmaxes get the layouts' masks."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from masked_training import RATE, distance_after_training
from ranks import Ranks
from sweeps import product, sweep
from torch import nn
from torch.nn import functional as F

import zgraph
from zgraph.build.planned_step import programs
from zgraph.errors import PlanError
from zgraph.program.sparse_attention import SPARSE, SPARSE_BACKWARD, SPARSE_BACKWARD_WITH_MASK
from zgraph.verification.masked_attention import masks_of

WORDS, WIDTH, HEADS, LENGTH = 50, 32, 4, 40
BOUND = 2e-6  # of float32: sums of a block's keys and of a row's blocks come in another order

Form = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def scaled(m, q, k, v, seen):
    return (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1) @ v


def padded(m, q, k, v, seen):
    hidden = torch.where(seen, 0.0, torch.finfo(q.dtype).min)[:, None, None].to(q.dtype)
    return F.dropout(F.softmax(q @ k.mT * 0.3 + hidden, dim=-1), 0.0) @ v


def causal(m, q, k, v, seen):
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    return F.softmax(scores.masked_fill(m.triangle == 0, float("-inf")), dim=-1) @ v


def chosen_by_where(m, q, k, v, seen):
    scores = torch.where(m.triangle.bool(), q @ k.mT, torch.tensor(-torch.inf))
    return torch.softmax(scores.float(), -1).to(v.dtype) @ v


def learned(m, q, k, v, seen):
    """T5's: a bias for each head, and the padding's mask."""
    hidden = torch.where(seen, 0.0, torch.finfo(q.dtype).min)[:, None, None].to(q.dtype)
    return nn.Softmax(dim=-1)(q @ k.mT + m.bias + hidden) @ v


def learned_alone(m, q, k, v, seen):
    return (q @ k.mT + m.bias.unsqueeze(0)).softmax(-1) @ v


def learned_for_all_heads(m, q, k, v, seen):
    return (q @ k.mT * 0.2 + m.bias[0]).softmax(-1) @ v


def learned_for_keys(m, q, k, v, seen):
    return (m.bias[:, :1] + q @ k.mT).softmax(-1) @ v


def learned_and_filled(m, q, k, v, seen):
    return (q @ k.mT + m.bias).masked_fill(m.triangle == 0, -torch.inf).softmax(-1) @ v


def given_to_torch(m, q, k, v, seen):
    """Torch computes attention by a softmax where the mask has a gradient."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.where(seen[:, None, None], m.bias, -torch.inf))


def summed(m, q, k, v, seen):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).transpose(1, 2)


def flat(m, q, k, v, seen):
    """[rows * heads, length, width]"""
    shape = q.shape
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    mask = torch.zeros(1, LENGTH, LENGTH).masked_fill(m.triangle == 0, -torch.inf)
    return torch.bmm(torch.baddbmm(mask, q * 0.2, k.transpose(1, 2)).softmax(-1), v).view(shape)


FORMS = {
    f.__name__: f for f in (scaled, padded, causal, chosen_by_where, learned, learned_alone, learned_for_all_heads)
}
FORMS |= {f.__name__: f for f in (learned_for_keys, learned_and_filled, given_to_torch, summed, flat)}


class Layer(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form, self.norm = form, nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH))
        self.register_buffer("triangle", torch.ones(LENGTH, LENGTH).tril())

    def forward(self, x, seen):
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(self.form(self, q, k, v, seen).transpose(1, 2).flatten(2))


class Net(nn.Module):
    """A language model of layers, whose word 0 is hidden where a form looks at it."""

    def __init__(self, form: Form, layers: int = 2) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Layer(form) for _ in range(layers))

    def forward(self, words):
        x = self.words(words)
        for layer in self.layers:
            x = layer(x, words != 0)
        return F.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


def words(rows: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def net(form: Form, layers: int = 2) -> Net:
    torch.manual_seed(0)
    return Net(form, layers)


def farthest(plain: nn.Module, compiled: Any, plan: zgraph.Plan, call: torch.Tensor) -> float:
    """Return the largest difference of losses and gradients."""
    with masks_of(plain, plan.attention):
        expected = plain(call)
        expected.backward()
    loss = compiled(call)
    loss.backward()
    pairs = [(expected, loss)]
    for p, q in zip(plain.parameters(), compiled.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        pairs += [] if p.grad is None else [(p.grad, q.grad)]
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize(
    "backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)]
)  # (the pass on Inductor's capture: below)
@sweep("form", list(FORMS), quick=3)
def test_a_step_is_that_of_the_plain_model_with_masks(form, backend):
    plan = zgraph.Plan(
        backend=backend, attention={"layers.0": zgraph.LocalWindow(block=8), "*": zgraph.BigBird(block=16)}
    )
    plain = net(FORMS[form])
    dense = plain(words())
    compiled = zgraph.compile(copy.deepcopy(plain), plan)
    assert farthest(plain, compiled, plan, words()) < BOUND
    assert (
        float((compiled(words()) - dense).detach().abs()) > 20 * BOUND
    )  # (it is another model than without the layouts)


@sweep("form, backend", list(itertools.product(FORMS, ["eager", "inductor"])), quick=(12, 23))
def test_nothing_of_it_is_left(form, backend):
    """No softmax, and no value of length x length but the model's own masks and biases."""
    plan = zgraph.Plan(backend=backend, attention={"*": zgraph.LocalWindow(block=8)})
    program = programs(net(FORMS[form]), plan, (words(3),), 1).after("sparse_attention")
    targets = [n.target for n in program.nodes]
    learns = "learned" in form or form == "given_to_torch"
    assert targets.count(SPARSE) == 2
    assert targets.count(SPARSE_BACKWARD_WITH_MASK if learns else SPARSE_BACKWARD) == 2
    assert not [t for t in targets if "bmm" in str(t)]
    scores = (3, HEADS, LENGTH, LENGTH)
    whole = [n for n in program.nodes if getattr(n.meta.get("val"), "shape", None) == scores]
    assert bool(whole) == (form in ("learned", "learned_and_filled", "given_to_torch"))


def test_a_learned_bias_of_all_rows_has_a_gradient_of_its_own_size():
    plan = zgraph.Plan(backend="eager", attention={"*": zgraph.LocalWindow(block=8)})
    program = programs(net(learned_alone, layers=1), plan, (words(3),), 1).after("sparse_attention")
    (shape,) = {n.meta["val"][3].shape for n in program.nodes if n.target is SPARSE_BACKWARD_WITH_MASK}
    assert shape == (1, HEADS, LENGTH, LENGTH)


PLANS: dict[str, dict[str, Any]] = {
    "zero 3": {},
    "tensor parallel": {"mesh": {"tp": 2}},
    "context parallel": {"mesh": {"cp": 2}},
    "pipeline": {"mesh": {"pp": 2}, "micro_batches": 2},
    "recomputed": {"recompute": "full"},
    "half precision": {"precision": "bf16"},
}


@sweep("form, more", list(itertools.product(["learned", "causal"], PLANS)), quick=(2, 7))
def test_plans_compute_the_same(form, more):
    plan = zgraph.Plan(backend="eager", attention={"*": zgraph.Fixed(block=8, num_local_blocks=2)}, **PLANS[more])
    result = zgraph.verify(net(FORMS[form]), plan, 2, (words(4),))
    assert result.ok, result


@pytest.mark.slow
def test_compiled_code_is_compared_as_well():
    plan = zgraph.Plan(backend="eager", attention={"*": zgraph.LocalWindow(block=8)}, optimizer=zgraph.SGD(lr=0.1))
    result = zgraph.verify(net(learned), plan, 1, (words(4),), compiled=True)
    assert result.ok, result


@pytest.mark.slow
def test_other_lengths_have_one_program():
    plan = zgraph.Plan(backend="eager", attention={"*": zgraph.LocalWindow(block=8)}, shapes="dynamic")
    plain = net(padded)
    compiled: Any = zgraph.compile(copy.deepcopy(plain), plan)
    for length in (40, 24, 33):
        assert farthest(plain, compiled, plan, words(2 + length % 3)[:, :length].contiguous()) < BOUND
        plain.zero_grad()
        compiled.zero_grad()
    assert len(compiled.zgraph.runtime.entries) == 1


def test_dense_leaves_it_as_it_is():
    plan = zgraph.Plan(backend="eager", attention={"layers.0": zgraph.Dense(), "*": zgraph.LocalWindow(block=8)})
    program = programs(net(scaled), plan, (words(),), 1).after("sparse_attention")
    assert [n.target for n in program.nodes].count(SPARSE) == 1
    assert [n.target for n in program.nodes].count(torch.ops.aten._softmax.default) == 1
    compiled = zgraph.compile(net(scaled), plan)
    assert farthest(net(scaled), compiled, plan, words()) < BOUND


def two_ranks(backend: str, mesh: dict[str, int]) -> float:
    """Train three steps; return how far this rank is from one process with all rows."""
    attention = {"layers.0": zgraph.LocalWindow(block=8), "*": zgraph.BigBird(block=8)}
    plan = zgraph.Plan(backend=backend, attention=attention, optimizer=zgraph.SGD(lr=RATE), mesh=mesh)
    ranks = range(2) if "dp" in mesh else range(1)
    return distance_after_training(
        net(learned), plan, [[words(2, seed=3 * r + step) for r in ranks] for step in range(3)]
    )


@pytest.mark.gloo
@pytest.mark.slow  # (on virtual ranks: above; what sparse attention is on real ones: test_sparse_attention.py, test_sparse_ring.py)
@pytest.mark.parametrize(
    ("backend", "mesh"), [("eager", {"dp": 2}), ("eager", {"cp": 2}), ("inductor", {"dp": 2}), ("inductor", {"tp": 2})]
)
def test_two_ranks_train_as_one_process(two: Ranks, backend, mesh):
    assert max(two.run(two_ranks, backend, mesh)) < BOUND


def multiplied(m, q, k, v, seen):
    weights = (q @ k.mT).softmax(-1)
    return (weights * m.bias.sigmoid()) @ v


def dropped(m, q, k, v, seen):
    weights = (q @ k.mT).softmax(-1)
    return (weights * (torch.rand(weights.shape) > 0.1)) @ v


def filled(m, q, k, v, seen):
    return (q @ k.mT).masked_fill(~seen[:, None, None], -1e9).softmax(-1) @ v


def scaled_behind(m, q, k, v, seen):
    return ((q @ k.mT + m.bias) * 0.3).softmax(-1) @ v


def capped(m, q, k, v, seen):
    return ((q @ k.mT / 5).tanh() * 5).softmax(-1) @ v


def of_two_products(m, q, k, v, seen):
    return (q @ k.mT + k @ k.mT).softmax(-1) @ v


REFUSED = {
    "dropped": (dropped, "it has dropout in a form that is not known"),
    "multiplied": (multiplied, "its weights are read elsewhere (aten.mul.Tensor"),
    "filled": (filled, "it fills the scores of hidden keys with -1000000000.0"),
    "scaled_behind": (scaled_behind, "its scores are scaled behind a mask"),
    "capped": (capped, "its scores are no product of queries and keys"),
    "of_two_products": (of_two_products, "its scores are a sum of products"),
}


@product("form, backend", list(REFUSED), ["eager", "inductor"], together=1)
def test_what_it_can_not_be_is_refused_with_its_line(form, backend):
    function, said = REFUSED[form]
    plan = zgraph.Plan(backend=backend, attention={"layers.*": zgraph.LocalWindow(block=8)})
    with pytest.raises(PlanError) as caught:
        programs(net(function, layers=1), plan, (words(),), 1)
    assert said in str(caught.value) and "test_written_attention.py:" in str(caught.value)


def test_heads_that_are_rows_can_not_differ():
    plan = zgraph.Plan(backend="eager", attention={"*": zgraph.BigBird(different_layout_per_head=True)})
    with pytest.raises(PlanError, match="its heads are rows as well"):
        programs(net(flat), plan, (words(),), 1)


class Encoder(nn.Module):
    """Torch's own modules, whose attention gives weights that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.attention = nn.Embedding(WORDS, WIDTH), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, words):
        x = self.words(words)
        return self.attention(x, x, x, key_padding_mask=words == 0)[0].square().mean()


def test_multihead_attention_with_weights_that_nobody_reads():
    plan = zgraph.Plan(backend="eager", attention={"attention": zgraph.LocalWindow(block=8)})
    torch.manual_seed(0)
    plain = Encoder()
    assert farthest(plain, zgraph.compile(copy.deepcopy(plain), plan), plan, words()) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "bert", "gpt2", "llama"])
def test_models_of_transformers_with_eager_attention(name):
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": WORDS}
    eager = {"attn_implementation": "eager"}
    torch.manual_seed(0)
    if name == "t5":
        config = transformers.T5Config(
            vocab_size=WORDS,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            **eager,
        )
        model, pattern = transformers.T5ForConditionalGeneration(config), "*.layer.0"
    elif name == "llama":
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, intermediate_size=48, **eager)
        model, pattern = transformers.LlamaForCausalLM(config), "model.layers.*"
    elif name == "gpt2":
        drops = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=32, vocab_size=WORDS, **drops, **eager)
        model, pattern = transformers.GPT2LMHeadModel(config), "*"
    else:
        drops = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
        config = transformers.BertConfig(**sizes, intermediate_size=48, **drops, **eager)
        model, pattern = transformers.BertForMaskedLM(config), "*.layer.*"
    plan = zgraph.Plan(backend="eager", attention={pattern: zgraph.Longformer(block=8)})
    compiled: Any = zgraph.compile(copy.deepcopy(model), plan)
    ids = words(2)
    mask = torch.ones_like(ids)
    mask[1, 30:] = 0
    for given in ({"input_ids": ids, "labels": ids}, {"input_ids": ids, "labels": ids, "attention_mask": mask}):
        with masks_of(model, plan.attention):
            expected = model(**given)
            expected.loss.backward()
        result = compiled(**given)
        result.loss.backward()
        for p, q in zip(model.parameters(), compiled.parameters(), strict=True):
            if p.grad is not None:
                assert float((p.grad - q.grad).abs().max()) < 1e-5
        assert float((expected.loss - result.loss).detach().abs()) < 1e-5
        model.zero_grad()
        compiled.zero_grad()
    assert float((model(input_ids=ids, labels=ids).loss - expected.loss).detach().abs()) > 1e-5
