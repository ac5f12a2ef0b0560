"""Dropout of sparse attention in compiled models, beside the plain model whose attention drops what the operator drops."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from masked_training import RATE, distance_after_training
from ranks import Ranks
from sweeps import chosen, sweep
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zgraph
from zgraph.build.planned_step import programs
from zgraph.errors import PlanError
from zgraph.program.attention_of_heads import OF_HEADS
from zgraph.program.sparse_attention import SPARSE, SPARSE_BACKWARD
from zgraph.verification.masked_attention import masks_of

WORDS, WIDTH, HEADS = 50, 32, 4
BOUND = 2e-6  # of float32: sums of a block's keys and of a row's blocks come in another order
aten = torch.ops.aten


class Attention(nn.Module):
    def __init__(self, how: str = "called", heads_of_keys: int = HEADS) -> None:
        super().__init__()
        self.how, self.heads_of_keys, self.drop = how, heads_of_keys, nn.Dropout(0.2)
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH // HEADS * heads_of_keys)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = (y.unflatten(-1, (self.heads_of_keys, -1)).transpose(1, 2) for y in self.kv(x).chunk(2, -1))
        if self.how == "called":
            rate = self.drop.p if self.training else 0.0
            grouped = self.heads_of_keys != HEADS
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True, enable_gqa=grouped)
        else:
            hidden = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)
            scores = q @ k.mT * 0.3 + hidden
            out = self.drop(scores.softmax(-1, dtype=torch.float32).to(v.dtype)) @ v
        return self.out(out.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(
        self, how: str = "called", heads_of_keys: int = HEADS, *, again: bool = False, layers: int = 2
    ) -> None:
        super().__init__()
        self.again = again
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Attention(how, heads_of_keys) for _ in range(layers))
        self.drop = nn.Dropout(0.1)  # (other random numbers, between those of attention)

    def forward(self, words):
        x = self.drop(self.words(words))
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.again else self.drop(layer(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


def words(rows: int = 2, length: int = 40, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))


def net(*args: Any, **options: Any) -> Net:
    torch.manual_seed(0)
    return Net(*args, **options)


def losses_and_gradients(model: Any, call: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(3)
    loss = model(call)
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return [loss.detach(), *gradients]


def farthest(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


LAYOUTS = {
    "alike": {"*": zgraph.LocalWindow(block=8)},
    "heads differ": {"layers.0": zgraph.BigBird(block=8, different_layout_per_head=True), "*": zgraph.Fixed(block=8)},
}
MODELS: dict[str, Any] = {
    "called": lambda: net(),
    "grouped": lambda: net(heads_of_keys=2),
    "written": lambda: net("written"),
    "checkpointed": lambda: net(again=True),
}


@pytest.mark.parametrize("layouts, model", chosen(list(LAYOUTS), list(MODELS), together=1))
def test_a_step_is_that_of_the_plain_model_with_the_counters_masks(model, layouts):
    plan = zgraph.Plan(backend="eager", attention=LAYOUTS[layouts])
    plain = MODELS[model]()
    compiled = zgraph.compile(copy.deepcopy(plain), plan)
    with masks_of(plain, plan.attention):
        expected = losses_and_gradients(plain, words())
    results = losses_and_gradients(compiled, words())
    assert farthest(expected, results) < BOUND
    assert farthest(results, losses_and_gradients(compiled, words())) == 0.0
    plain.eval()
    compiled.eval()
    with masks_of(plain, plan.attention):
        loss = plain(words()).detach()
    assert farthest([loss], [compiled(words()).detach()]) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("model", ["called", "written"])
def test_inductor_drops_the_same(model):
    plan = zgraph.Plan(attention=LAYOUTS["alike"])
    plain = MODELS[model]()
    with torch._inductor.config.patch(fallback_random=True), masks_of(plain, plan.attention):
        expected = losses_and_gradients(plain, words())
    with torch._inductor.config.patch(fallback_random=True):
        compiled = zgraph.compile(copy.deepcopy(plain), plan)
        assert farthest(expected, losses_and_gradients(compiled, words())) < BOUND
    own = zgraph.compile(copy.deepcopy(plain), plan)  # (with seeds of Inductor's own)
    first, second = losses_and_gradients(own, words()), losses_and_gradients(own, words())
    assert farthest(first, second) < BOUND and farthest(expected, first) > 20 * BOUND


class Multihead(nn.Module):
    """Torch's own layer, whose heads and rows are one dimension where it gives its weights."""

    def __init__(self, weights: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.attn, self.weights = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.2, batch_first=True), weights

    def forward(self, words):
        x = self.words(words)
        x = self.attn(x, x, x, need_weights=self.weights)[0]
        return F.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


@pytest.mark.parametrize("weights", [False, True])
def test_multihead_attention_of_torch(weights):
    plan = zgraph.Plan(backend="eager", attention=LAYOUTS["alike"])
    plain = Multihead(weights)
    compiled = zgraph.compile(copy.deepcopy(plain), plan)
    with masks_of(plain, plan.attention):
        expected = losses_and_gradients(plain, words())
    assert farthest(expected, losses_and_gradients(compiled, words())) < BOUND
    divided = zgraph.Plan(backend="eager", attention=LAYOUTS["alike"], mesh={"cp": 2})
    result = zgraph.verify(Multihead(weights), divided, 2, (words(4),))
    assert result.ok, result


@pytest.mark.parametrize("model", ["called", pytest.param("written", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_one_program_serves_all_lengths(model):
    plan = zgraph.Plan(backend="eager", attention=LAYOUTS["alike"], shapes="dynamic")
    plain = MODELS[model]()
    compiled = zgraph.compile(copy.deepcopy(plain), plan)
    for rows, length in ((2, 40), (3, 33), (4, 57)):
        with masks_of(plain, plan.attention):
            expected = losses_and_gradients(plain, words(rows, length))
        assert farthest(expected, losses_and_gradients(compiled, words(rows, length))) < BOUND
    assert len(compiled.zgraph.runtime.entries) == 1


@sweep(
    "model, backend",
    [(model, backend) for model in ("called", "grouped", "written") for backend in ("eager", "inductor")],
    quick=(3, 4),
)
def test_programs_have_a_seed_and_no_mask(model, backend):
    plan = zgraph.Plan(backend=backend, attention=LAYOUTS["alike"])
    program = programs(MODELS[model](), plan, (words(),), 1).after("sparse_attention")
    attentions = [n for n in program.nodes if n.target in (SPARSE, SPARSE_BACKWARD)]
    assert [n.target for n in attentions] == [SPARSE] * 2 + [SPARSE_BACKWARD] * 2
    assert attentions[0].args[-2:] == attentions[3].args[-2:] and attentions[1].args[-2:] == attentions[2].args[-2:]
    assert attentions[0].args[-2] is not attentions[1].args[-2] and attentions[0].args[-1] == 0.2
    sizes = [n.meta["val"].shape for n in program.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    squares = [
        size for size in sizes if size[-2:] == (40, 40) and size.numel() > 40 * 40
    ]  # (the model's own mask is one for all)
    assert not squares
    still = programs(MODELS[model]().eval(), plan, (words(),), 1).after("sparse_attention")
    assert not [n for n in still.nodes if n.target is aten.randint.low]


PLANS = {
    "zero 3": {},
    "zero 1, twice the rows": {"zero": 1, "micro_batches": 2},
    "tensor parallel": {"mesh": {"tp": 2}},
    "tensor parallel, by tokens": {"mesh": {"tp": 2}, "sequence_parallel": True},
    "context parallel": {"mesh": {"cp": 2}},
    "four ranks of it": {"mesh": {"cp": 4}},
    "in a ring": {"mesh": {"cp": 4}, "context_attention": "ring"},
    "recomputed": {"recompute": "full"},
    "half precision": {"precision": "bf16"},
}


@sweep("more, model", chosen(list(PLANS), ["called", "written"], together=1), quick=(0, 3))
def test_plans_drop_the_same(more, model):
    plan = zgraph.Plan(backend="eager", attention=LAYOUTS["alike"], **PLANS[more])
    result = zgraph.verify(net(model, layers=1), plan, 4 if PLANS[more].get("mesh") == {"cp": 4} else 2, (words(4),))
    assert result.ok, result


@pytest.mark.parametrize("layouts, dim", chosen(list(LAYOUTS), ["tp", "cp"], together=1))
def test_ranks_drop_by_the_numbers_of_all_heads(layouts, dim):
    plan = zgraph.Plan(backend="eager", attention=LAYOUTS[layouts], mesh={dim: 2})
    result = zgraph.verify(net(heads_of_keys=2), plan, 2, (words(4),))
    assert result.ok, result
    divided = programs(net(), plan, (words(4),), 2).after("divide" if dim == "tp" else "divide_context")
    assert [n.args[0].meta["val"].shape[1] for n in divided.nodes if n.target is OF_HEADS[SPARSE]] == [HEADS // 2] * 2


def test_recomputed_attention_drops_the_same_bit_for_bit():
    plans = [zgraph.Plan(backend="eager", attention=LAYOUTS["alike"], recompute=how) for how in ("none", "full")]
    results = [losses_and_gradients(zgraph.compile(net(), plan), words()) for plan in plans]
    assert farthest(*results) == 0.0


def test_heads_that_two_dimensions_divide_are_refused():
    plan = zgraph.Plan(backend="eager", attention=LAYOUTS["alike"], mesh={"tp": 2, "cp": 2})
    with pytest.raises(PlanError, match=r"both mesh\.tp and mesh\.cp divide its heads"):
        zgraph.verify(net(), plan, 4, (words(4),))


@sweep("name, kernel", chosen(["llama", "gpt2", "bert"], ["sdpa", "eager"], together=1), quick=1)
def test_models_of_transformers(name, kernel):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": WORDS,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "attn_implementation": kernel,
    }
    torch.manual_seed(0)
    if name == "llama":
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, intermediate_size=48, attention_dropout=0.1)
        model = transformers.LlamaForCausalLM(config)
    elif name == "gpt2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, attn_pdrop=0.1))
    else:
        model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, intermediate_size=48))
    model.train()
    plan = zgraph.Plan(backend="eager", attention={"*": zgraph.Longformer(block=8)})
    compiled: Any = zgraph.compile(copy.deepcopy(model), plan)
    ids, results = words(), []
    for each, layouts in ((model, plan.attention), (compiled, {})):
        with masks_of(model, layouts):
            torch.manual_seed(4)
            loss = each(input_ids=ids, labels=ids).loss
            loss.backward()
        results.append([loss.detach(), *(p.grad for p in each.parameters() if p.grad is not None)])
    assert farthest(*results) < 1e-5


def two_ranks(backend: str, mesh: dict[str, int]) -> float:
    """Train three steps; return how far this rank is from one process."""
    plan = zgraph.Plan(backend=backend, attention=LAYOUTS["heads differ"], optimizer=zgraph.SGD(lr=RATE), mesh=mesh)
    return distance_after_training(net(heads_of_keys=2), plan, [[words(seed=step)] for step in range(3)])


@pytest.mark.gloo
@pytest.mark.slow  # (on virtual ranks: above; real ones train with layouts of their heads in test_sparse_attention.py)
@pytest.mark.parametrize("dim", ["tp", "cp"])
def test_two_ranks_train_as_one_process(two: Ranks, dim):
    assert max(two.run(two_ranks, "eager", {dim: 2})) < BOUND
