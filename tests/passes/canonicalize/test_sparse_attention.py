"""Sparse attention by a plan, beside the plain model whose attention is whole, with a mask of what the layouts leave out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from masked_training import RATE, distance_after_training
from ranks import Ranks
from sweeps import product, sweep
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zgraph
from zgraph.build.planned_step import programs
from zgraph.errors import PlanError
from zgraph.program.attention_of_heads import OF_HEADS
from zgraph.program.flops import product_flops
from zgraph.program.sparse_attention import SPARSE, SPARSE_BACKWARD
from zgraph.verification.masked_attention import masks_of

WORDS, WIDTH, HEADS = 50, 32, 4
BOUND = 2e-6  # of float32: sums of a block's keys and of a row's blocks come in another order


def near(batch, head, query, key):
    return (query >= key) & (query - key < 12)


class Attention(nn.Module):
    def __init__(self, heads_of_keys: int = HEADS, *, causal: bool = True) -> None:
        super().__init__()
        self.heads_of_keys, self.causal = heads_of_keys, causal
        self.q = nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH // HEADS * heads_of_keys)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask=None):
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = (y.unflatten(-1, (self.heads_of_keys, -1)).transpose(1, 2) for y in self.kv(x).chunk(2, -1))
        grouped = self.heads_of_keys != HEADS
        options = {"is_causal": self.causal, "enable_gqa": grouped}
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), Attention(**options)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())

    def forward(self, x, mask=None):
        x = x + self.attn(self.norm(x), mask)
        return x + self.mlp(x)


class Net(nn.Module):
    """A language model of layers; with `padded` word 0 is hidden from attention, with `again` layers are checkpointed."""

    def __init__(self, *, padded: bool = False, again: bool = False, layers: int = 2, **options: Any) -> None:
        super().__init__()
        self.padded, self.again = padded, again
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Layer(**options) for _ in range(layers))

    def forward(self, words):
        mask = (words != 0)[:, None, None, :] if self.padded else None
        x = self.words(words)
        for layer in self.layers:
            x = checkpoint(layer, x, mask, use_reentrant=False) if self.again else layer(x, mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


def words(rows: int = 2, length: int = 70, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def farthest(plain: nn.Module, compiled: Any, plan: zgraph.Plan, *calls: Any) -> float:
    """Return the largest difference of losses and gradients, in calls one after another."""
    worst = 0.0
    for call in calls:
        with masks_of(plain, plan.attention):
            expected = plain(call)
            expected.backward()
        loss = compiled(call)
        loss.backward()
        pairs = [
            (expected, loss),
            *((p.grad, q.grad) for p, q in zip(plain.parameters(), compiled.parameters(), strict=True)),
        ]
        worst = max(worst, *(float((a - b).detach().abs().max()) for a, b in pairs))
        plain.zero_grad()
        compiled.zero_grad()
    return worst


ATTENTIONS = {
    "one pattern": {"layers.*": zgraph.LocalWindow(block=8)},
    "a function, and another layer whole": {"layers.0.attn": f"{__name__}:near"},
    "the first pattern counts": {"layers.1": zgraph.BigBird(block=8), "*": zgraph.Fixed(block=16, num_local_blocks=2)},
    "heads differ": {"*": zgraph.BigBird(block=8, different_layout_per_head=True)},
}
MODELS: dict[str, dict[str, Any]] = {
    "causal": {},
    "grouped and padded": {"heads_of_keys": 2, "padded": True, "causal": False},
    "checkpointed": {"again": True},
}


@product("model, attention", list(MODELS), list(ATTENTIONS), together=1)
def test_a_step_is_that_of_the_plain_model_with_masks(model, attention):
    plan = zgraph.Plan(backend="eager", attention=ATTENTIONS[attention])
    plain = net(**MODELS[model])
    dense = plain(words())
    compiled = zgraph.compile(copy.deepcopy(plain), plan)
    assert farthest(plain, compiled, plan, words()) < BOUND
    assert (
        float((compiled(words()) - dense).detach().abs()) > 20 * BOUND
    )  # (it is another model than without the layouts)


@pytest.mark.slow
def test_inductor_gives_the_same():
    plan = zgraph.Plan(attention={"layers.0": zgraph.LocalWindow(block=8), "*": f"{__name__}:near"}, shapes="dynamic")
    plain = net(heads_of_keys=2)
    compiled = zgraph.compile(copy.deepcopy(plain), plan)
    assert farthest(plain, compiled, plan, words(), words(3, 33)) < BOUND
    assert len(compiled.zgraph.runtime.entries) == 1


@pytest.mark.slow
def test_one_program_serves_all_lengths():
    plan = zgraph.Plan(backend="eager", attention={"*": zgraph.BigBird(block=16)})
    plain = net(padded=True, causal=False)
    compiled = zgraph.compile(copy.deepcopy(plain), plan)
    assert (
        farthest(plain, compiled, plan, *[words(2 + n % 3, length) for n, length in enumerate((70, 16, 5, 33, 129))])
        < BOUND
    )
    assert len(compiled.zgraph.runtime.entries) == 2


PLANS = {
    "zero 3": {},
    "zero 1, twice the rows": {"zero": 1, "micro_batches": 2},
    "tensor parallel": {"mesh": {"tp": 2}},
    "context parallel": {"mesh": {"cp": 2}},
    "pipeline": {"mesh": {"pp": 2}, "micro_batches": 2},
    "recomputed": {"recompute": "full"},
    "tiled": {"tiles": {"layers.*.mlp": 2}},
    "half precision": {"precision": "bf16"},
    "offloaded": {"offload": {"activations": "cpu"}},
}


@sweep("more", list(PLANS), quick=3)
def test_plans_compute_the_same(more):
    plan = zgraph.Plan(backend="eager", attention={"*": zgraph.Fixed(block=8, num_local_blocks=2)}, **PLANS[more])
    result = zgraph.verify(net(), plan, 2, (words(4, 40),))
    assert result.ok, result


def wider_by_head(batch, head, query, key):
    return (query - key).abs() < 4 * (head + 1)


@product("layout, heads_of_keys, dim", ["blocks", "positions", "alike"], [HEADS, 2], ["tp", "cp"], together=1)
def test_ranks_have_the_layouts_of_their_heads(layout, heads_of_keys, dim):
    sparsities = {
        "blocks": zgraph.BigBird(block=8, different_layout_per_head=True),
        "positions": zgraph.MaskFunction(function=f"{__name__}:wider_by_head", block=8),
        "alike": zgraph.LocalWindow(block=8),
    }
    plan = zgraph.Plan(backend="eager", attention={"*": sparsities[layout]}, mesh={dim: 2})
    model = net(heads_of_keys=heads_of_keys, causal=False)
    result = zgraph.verify(model, plan, 2, (words(4, 40),))
    assert result.ok, result
    if dim == "tp" and heads_of_keys == 2:
        return  # (one product gives keys and values, whose heads tensor parallelism does not divide here)
    made = programs(model, plan, (words(4, 40),), 2)
    divided = made.after("divide" if dim == "tp" else "divide_context")
    target = SPARSE if layout == "alike" else OF_HEADS[SPARSE]
    shapes = [tuple(tuple(x.meta["val"].shape[:2]) for x in n.args[:2]) for n in divided.nodes if n.target is target]
    assert shapes == [((4, HEADS // 2), (4, heads_of_keys // 2))] * 2
    whole, part = (
        sum(product_flops(n) for n in program.nodes if "sparse_attention" in str(n.target))
        for program in (made.after("sparse_attention"), divided)
    )
    assert part == whole // 2


def test_verify_finds_a_layout_that_is_not_the_plans(monkeypatch):
    from zgraph.program import sparse_attention

    plan = zgraph.Plan(backend="eager", attention={"layers.1": zgraph.LocalWindow(block=8)})
    sound = sparse_attention.block_rows

    def with_a_block_more(layout, heads, length):
        first, *rest = sound(layout, heads, length)
        return ((*first[:-1], (0, *first[-1])), *rest)

    monkeypatch.setattr("zgraph.verification.masked_attention.block_rows", with_a_block_more)
    monkeypatch.setattr("zgraph.verification.masked_attention.layout_mask", _uncached_mask())
    assert not zgraph.verify(net(), plan, 2, (words(4, 40),)).ok


def _uncached_mask():
    from zgraph.verification import masked_attention

    return masked_attention.layout_mask.__wrapped__


@pytest.mark.slow
def test_compiled_code_is_compared_as_well():
    plan = zgraph.Plan(backend="eager", attention={"*": zgraph.LocalWindow(block=8)}, optimizer=zgraph.SGD(lr=0.1))
    result = zgraph.verify(net(again=True), plan, 1, (words(4, 40),), compiled=True)
    assert result.ok, result


def test_the_pass_is_listed_and_operations_are_those_of_blocks():
    plan = zgraph.Plan(backend="eager", attention={"*": zgraph.LocalWindow(block=8)})
    whole, sparse = (
        programs(net(causal=False), p, (words(2, 80),), 1).program for p in (zgraph.Plan(backend="eager"), plan)
    )
    targets = [n.target for n in sparse.nodes]
    assert targets.count(SPARSE) == targets.count(SPARSE_BACKWARD) == 2
    flops = {n.target: product_flops(n) for n in sparse.nodes if n.target in (SPARSE, SPARSE_BACKWARD)}
    of_whole = {str(n.target): product_flops(n) for n in whole.nodes if "flash_attention" in str(n.target)}
    assert [round(f / w, 6) for f, w in zip(flops.values(), of_whole.values(), strict=True)] == [0.19, 0.19]


class Alone(nn.Module):
    """Attention of one layer, written as `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, nn.Linear(8, 8)

    def forward(self, x):
        q = self.inner(x)
        keys = q[:, :, :5] if self.how == "other keys" else q
        if self.how == "capped":
            return (torch.tanh(q @ q.mT).softmax(-1) @ q).sum()
        return F.scaled_dot_product_attention(q, keys, keys).sum()


def refused(model: nn.Module, attention: dict[str, Any], *call: Any, backend: str = "eager") -> str:
    with pytest.raises(PlanError) as caught:
        zgraph.compile(model, zgraph.Plan(backend=backend, attention=attention))(*call)
    return str(caught.value)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("capped", "as a softmax over all keys"),
        ("other keys", "attention of 16 queries with 5 keys"),
    ],
)
def test_attention_that_can_not_be_sparse_is_refused_with_its_line(how, said, backend):
    text = refused(Alone(how), {"*": zgraph.Fixed()}, torch.randn(2, 2, 16, 8), backend=backend)
    assert said in text and "test_sparse_attention.py:" in text


def test_verify_refuses_it_in_the_same_words():
    plan = zgraph.Plan(backend="eager", attention={"*": zgraph.Fixed()})
    with pytest.raises(PlanError, match="attention of 16 queries with 5 keys can't be sparse"):
        zgraph.verify(Alone("other keys"), plan, 1, (torch.randn(2, 2, 16, 8),))


class Capped(nn.Module):
    def forward(self, x, mask=None):
        return torch.tanh(x @ x.mT).softmax(-1) @ x


def test_nothing_is_left_whole_in_silence_beside_what_is_sparse():
    """One layer of two caps its scores, and both match."""
    model = net()
    model.layers[1].attn = Capped()
    for backend in ("eager", "inductor"):
        assert "as a softmax over all keys" in refused(
            copy.deepcopy(model), {"layers.*": zgraph.Fixed()}, words(), backend=backend
        )


def test_patterns_that_match_nothing_are_refused():
    assert "did you mean 'layers" in refused(net(), {"layer.*": zgraph.Fixed()}, words())
    text = refused(net(), {"layers.*.mlp": zgraph.Fixed()}, words())
    assert "matches no attention" in text and "the modules with attention: layers, layers.0, layers.0.attn" in text
    assert "nothing calls torch's scaled_dot_product_attention" in refused(
        nn.Linear(8, 8), {"*": zgraph.Fixed()}, torch.randn(2, 8)
    )


def test_layouts_and_functions_that_do_not_fit_are_refused():
    assert "a mask function fails" in refused(net(layers=1), {"*": f"{__name__}:refused"}, words())
    assert "can't be loaded" in refused(net(layers=1), {"*": f"{__name__}:nobody"}, words())
    assert "a sequence has 5" in refused(net(layers=1), {"*": zgraph.BlockLayout(layout=["10", "11"])}, words())
    squares = zgraph.BlockLayout(block=128, layout=[["1"], ["1"]])
    assert "attention has 4" in refused(net(layers=1), {"*": squares}, words())


def two_ranks(backend: str, attention: dict[str, Any], more: dict[str, Any]) -> float:
    """Train three steps with other lengths on each rank; return how far this rank is from one process with all rows."""
    plan = zgraph.Plan(backend=backend, attention=attention, optimizer=zgraph.SGD(lr=RATE), **more)
    if more.get("mesh", {}).get("tp", 1) != 1:
        steps = [[words(2, 40, seed=step)] for step in range(3)]
    else:
        steps = [[words(2, 24 + 8 * rank + 16 * step, seed=rank) for rank in range(2)] for step in range(3)]
    return distance_after_training(net(heads_of_keys=2), plan, steps)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("backend", "more"),
    [
        ("eager", {"zero": 3}),
        pytest.param("inductor", {"zero": 3}, marks=pytest.mark.slow),
        pytest.param("inductor", {"mesh": {"tp": 2}}, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_train_as_one_process(two: Ranks, backend, more):
    attention = {"layers.0": f"{__name__}:near", "*": zgraph.BigBird(block=8, different_layout_per_head=True)}
    assert max(two.run(two_ranks, backend, attention, more)) < BOUND


def disagreeing(rank_seed: bool) -> str:
    rank = torch.distributed.get_rank()
    sparsity = zgraph.BigBird(block=8, seed=rank if rank_seed else 0)
    zgraph.compile(net(), zgraph.Plan(backend="eager", attention={"*": sparsity}))(words())
    return "ran"


@pytest.mark.gloo
def test_ranks_with_other_random_blocks_disagree(two: Ranks):
    assert two.run(disagreeing, False) == ["ran", "ran"]
    for outcome in two.attempt(disagreeing, True):
        assert isinstance(outcome.error, zgraph.errors.ZgraphError) and "disagree about the plan" in str(outcome.error)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_models_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": WORDS}
    torch.manual_seed(0)
    if name == "llama":
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, intermediate_size=48)
        model, pattern = transformers.LlamaForCausalLM(config), "model.layers.*"
    elif name == "gpt2":
        drops = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        model, pattern = (
            transformers.GPT2LMHeadModel(
                transformers.GPT2Config(n_layer=2, n_head=4, n_embd=32, vocab_size=WORDS, **drops)
            ),
            "*",
        )
    else:
        drops = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
        model, pattern = (
            transformers.BertForMaskedLM(transformers.BertConfig(**sizes, intermediate_size=48, **drops)),
            "*.layer.*",
        )
    plan = zgraph.Plan(backend="eager", attention={pattern: zgraph.Longformer(block=8)})
    compiled: Any = zgraph.compile(copy.deepcopy(model), plan)
    ids = words(2, 60)
    mask = torch.ones_like(ids)
    mask[1, 50:] = 0
    for given in ({"input_ids": ids, "labels": ids}, {"input_ids": ids, "labels": ids, "attention_mask": mask}):
        with masks_of(model, plan.attention):
            expected = model(**given)
        result = compiled(**given)
        expected.loss.backward()
        result.loss.backward()
        seen = given.get("attention_mask", torch.ones_like(ids)).bool()
        assert float((expected.logits - result.logits)[seen].detach().abs().max()) < 1e-5
        for p, q in zip(model.parameters(), compiled.parameters(), strict=True):
            if p.grad is not None:
                assert float((p.grad - q.grad).abs().max()) < 1e-5
        model.zero_grad()
        compiled.zero_grad()
    assert float((model(input_ids=ids, labels=ids).loss - expected.loss).detach().abs()) > 1e-5
