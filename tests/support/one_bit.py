"""What tests of 1-bit optimizers share: a small model, and the compressed all-reduce as its paper writes it."""

from __future__ import annotations

import math

import torch
from torch import nn

from zgraph.passes.analysis.costs import size_of
from zgraph.program import collectives


class Net(nn.Module):
    """Sizes that ranks and bytes do not divide; rows of an embedding that never have a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, 11)
        self.a, self.b = nn.Linear(11, 13), nn.Linear(13, 5)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, at):
        return (self.b(self.a(self.table(at)).tanh()) * self.gain).square().mean()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 7, (6,), generator=torch.Generator().manual_seed(10 * step + rank))


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    whole = lambda p: p.full_tensor() if hasattr(p, "full_tensor") else p  # noqa: E731
    return {n: whole(p.detach()).clone() for n, p in model.named_parameters()}


def signs_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(C(x), x - C(x)): signs, that of zero positive, times the norm over the root of the number of elements."""
    compressed = torch.where(x >= 0, 1.0, -1.0) * (x.norm() / math.sqrt(x.numel()))
    return compressed, x - compressed


class Shared:
    """The compressed all-reduce of Tang et al., 2021, Algorithm 1, for one parameter: lines 7 to 12."""

    def __init__(self, elements: int, ranks: int) -> None:
        unit = ranks * ranks * 8 // math.gcd(ranks, 8)
        self.elements, self.ranks = elements, ranks
        self.size = elements + -elements % unit
        self.workers = [torch.zeros(self.size) for _ in range(ranks)]
        self.servers = [torch.zeros(self.size // ranks) for _ in range(ranks)]

    def mean(self, given: list[torch.Tensor]) -> torch.Tensor:
        parts = []
        for rank, x in enumerate(given):
            flat = torch.cat([x.flatten().float(), torch.zeros(self.size - self.elements)])
            compressed, self.workers[rank] = signs_of(flat + self.workers[rank])
            parts.append(compressed.view(self.ranks, -1))
        found = []
        for rank in range(self.ranks):
            mean = torch.stack([p[rank] for p in parts]).sum(0) / self.ranks
            compressed, self.servers[rank] = signs_of(mean + self.servers[rank])
            found.append(compressed)
        return torch.cat(found)[: self.elements].view(given[0].shape)


def transfers(program) -> list[tuple[str, int]]:
    """The collectives of a program, and the bytes that each rank gives to one."""
    starts = [n for n in program.graph.nodes if collectives.is_start(n)]
    return [(collectives.kind(n), size_of(n.all_input_nodes[0])) for n in starts]


class Whole:
    """What one rank shares with itself."""

    def mean(self, given: list[torch.Tensor]) -> torch.Tensor:
        return given[0]
