"""A GPT of 29.5 M parameters by default: 8 layers of width 512, a vocabulary of 8192 whose table is also the head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Size:
    """Of the model, and of a rank's batch: `batch` sequences of `seq` tokens."""

    layers: int = 8
    dim: int = 512
    vocab: int = 8192
    positions: int = 256
    batch: int = 4
    seq: int = 128

    @property
    def heads(self) -> int:
        return max(1, self.dim // 64)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Token indices and targets in, both [batch, length]; the mean loss out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocab, size.dim)
        self.positions = nn.Parameter(torch.zeros(size.positions, size.dim))
        self.blocks = nn.ModuleList(Block(size.dim, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.dim)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, indices: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(indices) + self.positions[: indices.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.embedding.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make(size: Size) -> GPT:
    """The same weights on every rank and in every process."""
    torch.manual_seed(0)
    return GPT(size)


def data(size: Size, rank: int) -> tuple[Tensor, Tensor]:
    """That rank's batch: indices and targets."""
    generator = torch.Generator().manual_seed(rank)
    indices, targets = (torch.randint(0, size.vocab, (size.batch, size.seq), generator=generator) for _ in range(2))
    return indices, targets
