"""DeepSpeed's sparse attention by its names: configurations, the module, and what adapts a model of transformers."""

from __future__ import annotations

import copy
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zgraph
from zgraph.deepspeed.ops import sparse_attention as ops
from zgraph.errors import ModelError, PlanError, SignatureError, UnsupportedError

ROWS, HEADS, WIDTH = 2, 4, 8


def of_layout(layout: torch.Tensor, block: int, length: int) -> torch.Tensor:
    shown = layout.bool().repeat_interleave(block, 1).repeat_interleave(block, 2)
    return shown[:, :length, :length]


CONFIGS = [
    ops.DenseSparsityConfig(HEADS),
    ops.FixedSparsityConfig(HEADS, num_local_blocks=3),  # (its last window depends on the longest length)
    ops.FixedSparsityConfig(HEADS, 16, True, 4, 1, "bidirectional", True, 4),
    ops.VariableSparsityConfig(HEADS, local_window_blocks=[1, 2], global_block_indices=[0, 2]),
    ops.BigBirdSparsityConfig(HEADS, different_layout_per_head=True),
    ops.BSLongformerSparsityConfig(HEADS, global_block_indices=[0], global_block_end_indices=[2]),
    ops.LocalSlidingWindowSparsityConfig(HEADS),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("length", [128, 64])
def test_the_module_is_whole_attention_with_the_layouts_mask(config, length):
    torch.manual_seed(0)
    module = ops.SparseSelfAttention(config, max_seq_length=128)
    given = [torch.randn(ROWS, HEADS, length, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    of_keys = torch.zeros(ROWS, length, dtype=torch.float64)
    of_keys[1, -9:] = -1e4
    causal = torch.ones(length, length).tril()
    bias = torch.randn(length, length, dtype=torch.float64, requires_grad=True)
    out = module(*given, rpe=bias, key_padding_mask=of_keys, attn_mask=causal)
    shown = of_layout(config.make_layout(128), config.block, length) & causal.bool()
    mask = torch.zeros(shown.shape, dtype=torch.float64).masked_fill(~shown, -torch.inf) + bias + of_keys[:, None, None]
    expected = F.scaled_dot_product_attention(*given, attn_mask=mask)
    tangent = torch.randn_like(out)
    gradients = (torch.autograd.grad(x, [*given, bias], tangent) for x in (out, expected))
    pairs = [(out, expected), *zip(*gradients, strict=True)]
    assert max(float((a - b).detach().abs().max()) for a, b in pairs) < 1e-12


def test_masks_by_multiplication_and_transposed_keys():
    module = ops.SparseSelfAttention(CONFIGS[4], key_padding_mask_mode="mul", max_seq_length=64)
    q, k, v = (torch.randn(ROWS, HEADS, 64, WIDTH) for _ in range(3))
    hidden = torch.ones(ROWS, 64)
    hidden[0, 3:] = 0
    out = module(q, k.transpose(2, 3), v, key_padding_mask=hidden)
    assert torch.equal(out, module(q, k, v, key_padding_mask=hidden))
    assert not torch.equal(out, module(q, k, v))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = ops.BertSparseSelfAttention(
            types.SimpleNamespace(hidden_size=32, num_attention_heads=HEADS, max_position_embeddings=128), CONFIGS[1]
        )

    def forward(self, x, mask):
        return self.attention(x, mask).square().mean()


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_model_of_it_is_compiled_for_all_lengths(backend):
    torch.manual_seed(0)
    plain = Net()
    compiled = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(backend=backend))
    for length in (64, 32, 96):
        x, mask = torch.randn(ROWS, length, 32), torch.zeros(ROWS, length)
        mask[1, -5:] = -1e4
        losses = [model(x, mask) for model in (plain, compiled)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-7)
        for p, q in zip(plain.parameters(), compiled.parameters(), strict=True):
            assert float((p.grad - q.grad).abs().max()) < 1e-6
        plain.zero_grad()
        compiled.zero_grad()
    assert len(compiled.zgraph.runtime.entries) == 2


def test_what_does_not_fit_is_refused():
    with pytest.raises(PlanError, match="SparsityConfig has no layout"):
        ops.SparsityConfig(HEADS)
    with pytest.raises(PlanError, match="did you mean 'num_random_blocks'"):
        ops.BigBirdSparsityConfig(HEADS, num_random_block=2)
    with pytest.raises(PlanError, match="takes 3 arguments after num_heads"):
        ops.LocalSlidingWindowSparsityConfig(HEADS, 16, 3, "unidirectional", True)
    with pytest.raises(SignatureError, match="is not a number of blocks of 16"):
        CONFIGS[0].make_layout(20)
    module = ops.SparseSelfAttention(CONFIGS[4], max_seq_length=64)
    x = torch.randn(1, HEADS, 128, WIDTH)
    with pytest.raises(SignatureError, match="longer than max_seq_length, 64"):
        module(x, x, x)
    with pytest.raises(SignatureError, match="is not a number of blocks"):
        module(x[:, :, :40], x[:, :, :40], x[:, :, :40])
    with pytest.raises(UnsupportedError, match="with other keys"):
        module(x[:, :, :32], x[:, :2, :32], x[:, :2, :32])
    with pytest.raises(PlanError, match="applied by 'plus'"):
        ops.SparseSelfAttention(CONFIGS[4], "plus")
    with pytest.raises(UnsupportedError, match="layers of a model are not replaced"):
        ops.SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(
            nn.Linear(2, 2), 64, CONFIGS[4]
        )
    with pytest.raises(ModelError, match="only a BERT's or RoBERTa's"):
        ops.SparseAttentionUtils.extend_position_embedding(nn.Linear(2, 2), 64)


@pytest.mark.parametrize(("name", "reserved"), [("Bert", 0), ("Roberta", 2)])
def test_positions_are_extended(name, reserved):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 50,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    config = getattr(transformers, f"{name}Config")(**sizes, max_position_embeddings=20 + reserved)
    model = getattr(transformers, f"{name}ForMaskedLM")(config).eval()
    before = copy.deepcopy(model)
    longer = ops.SparseAttentionUtils.extend_position_embedding(model, 50)
    ids = torch.randint(3, 50, (2, 20))
    assert torch.equal(longer(input_ids=ids).logits, before(input_ids=ids).logits)
    assert longer(input_ids=torch.randint(3, 50, (1, 50))).logits.shape == (1, 50, 50)
    table = getattr(longer, name.lower()).embeddings.position_embeddings.weight
    assert torch.equal(table[reserved : 20 + reserved], table[20 + reserved : 40 + reserved])
    with pytest.raises(ModelError, match="has 50 rows"):
        ops.SparseAttentionUtils.extend_position_embedding(model, 50)


def test_inputs_are_padded_to_blocks_and_outputs_cut():
    table = nn.Embedding(10, 4)
    ids, ones = torch.randint(1, 10, (2, 13)), torch.ones(2, 13, dtype=torch.int64)
    pad, *padded = ops.SparseAttentionUtils.pad_to_block_size(16, ids, ones, ones, None, table(ids), 0, table)
    assert pad == 3 and [x.shape[1] for x in padded if x is not None] == [16] * 4 and padded[3] is None
    assert padded[1].sum() == 26 and torch.equal(padded[4][:, 13:], table(torch.zeros(2, 3, dtype=torch.int64)))
    assert ops.SparseAttentionUtils.unpad_sequence_output(pad, padded[4]).shape == (2, 13, 4)
    assert ops.SparseAttentionUtils.pad_to_block_size(13, ids, ones, ones, None, None, 0, None)[0] == 0
    tokenizer = types.SimpleNamespace(model_max_length=5, init_kwargs={})
    assert ops.SparseAttentionUtils.update_tokenizer_model_max_length(tokenizer, 64).init_kwargs == {
        "model_max_length": 64
    }
