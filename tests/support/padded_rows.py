"""Two layers with rows that ranks divide, and rows that they pad: what is sent of them shows how."""

from __future__ import annotations

import torch
from torch import nn


class PaddedRows(nn.Module):
    """A matrix whose rows ranks divide, one whose rows they pad, and a bias of few elements."""

    def __init__(self, width: int = 40, inner: int = 60, out: int = 37) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(width, inner, bias=False), nn.Linear(inner, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh()).square().mean()
