"""Models whose weights the ranks of "tp" divide, small, and in float64 throughout: nothing in them is rounded to float32 on the way.

They have one layer: a second is divided as the first one is, which the tests of collectives show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, ROWS, LENGTH, WORDS = 32, 4, 8, 64


class _Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def _turned(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    speeds = 100.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.outer(torch.arange(x.shape[-2], dtype=x.dtype), speeds)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class _Attention(nn.Module):
    """`fused`: one Linear gives queries, keys and values."""

    def __init__(self, heads: int, groups: int, fused: bool = False, rotary: bool = True) -> None:
        super().__init__()
        self.heads, self.groups, self.size, self.rotary = heads, groups, WIDTH // heads, rotary
        if fused:
            self.qkv_proj = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.q_proj = nn.Linear(WIDTH, heads * self.size, bias=False)
            self.k_proj = nn.Linear(WIDTH, groups * self.size, bias=False)
            self.v_proj = nn.Linear(WIDTH, groups * self.size, bias=False)
        self.o_proj = nn.Linear(heads * self.size, WIDTH, bias=fused)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        if hasattr(self, "qkv_proj"):
            made = self.qkv_proj(x).chunk(3, -1)
        else:
            made = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (t.view(rows, length, -1, self.size).transpose(1, 2) for t in made)
        if self.rotary:
            q, k = _turned(q), _turned(k)
        if self.groups != self.heads:
            k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))


class _LlamaLayer(nn.Module):
    def __init__(self, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.input_norm, self.mlp_norm = _Norm(), _Norm()
        self.attention = _Attention(heads, groups)
        self.gate_proj = nn.Linear(WIDTH, inner, bias=False)
        self.up_proj = nn.Linear(WIDTH, inner, bias=False)
        self.down_proj = nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.input_norm(x))
        y = self.mlp_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Llama(nn.Module):
    def __init__(self, heads: int = 8, groups: int = 4, inner: int = 48, words: int = WORDS, layers: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, WIDTH)
        self.layers = nn.ModuleList(_LlamaLayer(heads, groups, inner) for _ in range(layers))
        self.norm = _Norm()
        self.head = nn.Linear(WIDTH, words, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class _GptLayer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = _Attention(4, 4, fused=True, rotary=False)
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.ln_1(x)))
        return x + self.dropout(self.c_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh")))


class Gpt2(nn.Module):
    """Queries, keys and values by one matrix, and the head is the embedding."""

    def __init__(self, words: int = WORDS, dropout: float = 0.0, layers: int = 1) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(_GptLayer(dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.ln_f(x)).flatten(0, 1), labels.flatten())


class Encoder(nn.Module):
    """PyTorch's own layers, whose queries, keys and values come from one matrix of three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return (x + self.attention(x, x, x, need_weights=False)[0]).square().mean()


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.inner, self.head = nn.Linear(8 * 16, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.second(F.relu(self.first(x)))), 2).flatten(1)
        return F.cross_entropy(self.head(F.relu(self.inner(x))), labels)


def _words(words: int = WORDS) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(words, (ROWS, LENGTH)), torch.randint(words, (ROWS, LENGTH))


# What builds each, and its global batch.
OWN: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "llama": lambda: (Llama(), _words()),
    "llama with one key-value head": lambda: (Llama(groups=1), _words()),
    "llama of odd sizes": lambda: (Llama(heads=1, groups=1, inner=45, words=63), _words(63)),
    "gpt2": lambda: (Gpt2(), _words()),
    "gpt2 of odd vocabulary": lambda: (Gpt2(words=61), _words(61)),
    "gpt2 with dropout": lambda: (Gpt2(dropout=0.3), _words()),
    "encoder": lambda: (Encoder(), (torch.randn(ROWS, LENGTH, WIDTH).double(),)),
    "convolutions": lambda: (Convolutions(), (torch.randn(ROWS, 3, 8, 8).double(), torch.randint(10, (ROWS,)))),
}


def own(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    model, inputs = OWN[name]()
    return model.double(), inputs


def of_transformers(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A small model of transformers in float32, and its global batch."""
    import transformers as t

    torch.manual_seed(0)
    sizes = dict(vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=1)
    still = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_attention_heads=4)
    ids, labels = _words()
    batch: dict[str, Any] = {"input_ids": ids, "labels": labels}
    model: nn.Module
    match name:
        case "gpt2":
            still = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
            model = t.GPT2LMHeadModel(
                t.GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=WIDTH, n_layer=1, n_head=4, **still)
            )
        case "llama":
            model = t.LlamaForCausalLM(
                t.LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4, use_cache=False)
            )
        case "mixtral":
            heads = dict(num_attention_heads=8, num_key_value_heads=4, num_local_experts=4, use_cache=False)
            model = t.MixtralForCausalLM(t.MixtralConfig(**sizes, **heads))
        case "bert":
            model = t.BertForMaskedLM(t.BertConfig(**sizes, **still))
        case "t5":
            shape = dict(vocab_size=WORDS, d_model=WIDTH, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
            model = t.T5ForConditionalGeneration(
                t.T5Config(**shape, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0)
            )
        case _:
            sizes.pop("vocab_size")
            model = t.ViTForImageClassification(
                t.ViTConfig(**sizes, **still, image_size=16, patch_size=4, num_labels=8)
            )
            batch = {"pixel_values": torch.randn(ROWS, 3, 16, 16), "labels": torch.randint(8, (ROWS,))}
    return model, batch
