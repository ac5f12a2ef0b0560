"""Small models whose programs are lowered for a GPU. Every shape is tiny: one of them runs in Triton's interpreter."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 32


class Block(nn.Module):
    """Causal attention and a gated unit, each behind a norm and inside a residual, products in `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Parameter(torch.empty(3 * WIDTH, WIDTH))
        self.out, self.gate = (
            nn.Parameter(torch.empty(WIDTH, WIDTH)),
            nn.Parameter(torch.empty(2 * WIDTH, WIDTH)),
        )
        self.down = nn.Linear(WIDTH, WIDTH)

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(self.dtype), weight.to(self.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.product(self.norm1(x), self.qkv).chunk(3, dim=-1)
        scores = (q @ k.transpose(-1, -2)) / WIDTH**0.5
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        attended = scores.masked_fill(~seen, -1e4).softmax(-1) @ v
        x = x + self.product(attended, self.out).to(x.dtype)
        gate, value = self.product(self.norm2(x), self.gate).chunk(2, dim=-1)
        return x + F.gelu(self.down((F.silu(gate) * value).to(x.dtype)))


class Model(nn.Module):
    """`layers` blocks between an embedding and a tied head; its loss is in float32."""

    def __init__(self, layers: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, WIDTH)
        self.layers = nn.ModuleList(Block(dtype) for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(F.linear(x, self.embed.weight).flatten(0, 1).float(), tokens.flatten())


def filled(model: nn.Module) -> nn.Module:
    """The model with values that depend on nothing but its shapes."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(
                torch.randn(p.shape, generator=generator) / (p.shape[-1] ** 0.5 if p.dim() > 1 else 4) + (p.dim() == 1)
            )
    return model


def tokens() -> torch.Tensor:
    return torch.arange(2 * 8).reshape(2, 8) * 7 % 48


# Which model, which plan, on how many ranks. The cases of one rank are those that the interpreter can run.
CASES: dict[str, tuple[int, torch.dtype, int, int]] = {  # layers, dtype of products, zero, world
    "float32 on one rank": (1, torch.float32, 3, 1),
    "bfloat16 on one rank": (1, torch.bfloat16, 3, 1),
    "bfloat16, ZeRO-3 on 8 ranks": (2, torch.bfloat16, 3, 8),
}
