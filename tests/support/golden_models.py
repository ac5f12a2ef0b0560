"""The models of the golden files: GPT-2 with 2 layers and Llama with 12, written out here so that no other package's release changes them.

Their sizes are small, their structure is the published one (Radford et al., 2019; Touvron et al., 2023).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

HEADS = 4


class Attention(nn.Module):
    """Causal attention; `rotary` positions, or none."""

    def __init__(self, dim: int, bias: bool, rotary: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(dim, dim, bias=bias)
        self.k_proj = nn.Linear(dim, dim, bias=bias)
        self.v_proj = nn.Linear(dim, dim, bias=bias)
        self.o_proj = nn.Linear(dim, dim, bias=bias)
        self.rotary = rotary

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, dim = x.shape
        q, k, v = (
            p(x).view(rows, length, HEADS, dim // HEADS).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.rotary:
            q, k = rotated(q), rotated(k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, dim))


def rotated(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[-2]), 10000.0 ** (-torch.arange(half) / half))
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1).to(x.dtype)


class GptBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, bias=True, rotary=False)
        self.ln_2 = nn.LayerNorm(dim)
        self.c_fc = nn.Linear(dim, 4 * dim)
        self.c_proj = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    """Learned positions, and the output's weights are the embedding's."""

    def __init__(self, layers: int = 2, dim: int = 32, vocabulary: int = 96, length: int = 16) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, dim)
        self.wpe = nn.Embedding(length, dim)
        self.h = nn.ModuleList(GptBlock(dim) for _ in range(layers))
        self.ln_f = nn.LayerNorm(dim)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class LlamaBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(dim)
        self.self_attn = Attention(dim, bias=False, rotary=True)
        self.post_attention_layernorm = nn.RMSNorm(dim)
        self.gate_proj = nn.Linear(dim, 3 * dim, bias=False)
        self.up_proj = nn.Linear(dim, 3 * dim, bias=False)
        self.down_proj = nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Llama(nn.Module):
    def __init__(self, layers: int = 12, dim: int = 512, vocabulary: int = 1000) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(LlamaBlock(dim) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.lm_head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)
        for block in self.layers:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1), labels.flatten())


def gpt2() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return Gpt2(), (torch.randint(96, (2, 16)), torch.randint(96, (2, 16)))


def llama() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    with torch.device("meta"):
        model = Llama()
    return model, (torch.zeros(2, 128, dtype=torch.int64), torch.zeros(2, 128, dtype=torch.int64))


def small_llama() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """As deep as the other, and with numbers."""
    torch.manual_seed(0)
    return Llama(dim=16, vocabulary=32), (torch.randint(32, (1, 8)), torch.randint(32, (1, 8)))
