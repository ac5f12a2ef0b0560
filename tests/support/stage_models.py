"""Models that are awkward to cut: what their parts hand to each other is more than one activation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from models import BATCH, Case
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

MODELS: dict[str, Callable[[], Case]] = {}


def _case(*shapes: tuple[int, ...]) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """A model's inputs: normal numbers, a batch of each of these shapes."""

    def add(cls: type[nn.Module]) -> type[nn.Module]:
        MODELS[cls.__name__] = lambda: Case(cls(), tuple(torch.randn(BATCH, *s) for s in shapes))
        return cls

    return add


def build(name: str) -> Case:
    """A fresh case by name. The global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name]()


def _words(count: int, length: int = 5) -> torch.Tensor:
    return torch.randint(1, count, (BATCH, length))


@_case((3, 16, 16))
class Ladder(nn.Module):
    """A U-Net of three levels: the first skip is read last, past all stages between."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(3 if i == 0 else 4, 4, 3, padding=1) for i in range(3))
        self.up = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=1) for _ in range(3))

    def forward(self, x):
        skips = []
        for layer in self.down:
            x = F.relu(layer(x))
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        for layer in self.up:
            x = layer(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1)).tanh()
        return x.pow(2).mean()


class Translator(nn.Module):
    """The encoder's output goes to every layer of the decoder; encoder, decoder and head share one table of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(31, 8)
        self.encoder = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.decoder = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(3))

    def forward(self, source, target):
        x, y = self.words(source), self.words(target)
        for layer in self.encoder:
            x = x + layer(x).tanh()
        for layer in self.decoder:
            y = y + layer(y, x, x, need_weights=False)[0]
        return F.cross_entropy((y @ self.words.weight.t()).flatten(0, 1), target.flatten())


MODELS["Translator"] = lambda: Case(Translator(), (_words(31), _words(31)))


@_case((7,))
class Typed(nn.Module):
    """Whole numbers and booleans that are made of activations cross."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))
        self.table = nn.Embedding(7, 7)

    def forward(self, x):
        first = self.layers[0](x)
        positive, largest = first > 0, first.argmax(1)
        x = self.layers[1](first.sin())
        x = self.layers[2](torch.where(positive, x, x.cos()))
        return (self.layers[3](x) * positive + self.table(largest)).pow(2).mean(), positive, largest


class Rotary(nn.Module):
    """Attention with grouped keys, a causal and a padding mask, and rotary tables: all stages make these for themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(31, 12)
        self.layers = nn.ModuleList(nn.Linear(12, 24) for _ in range(3))
        self.head = nn.Linear(12, 31)
        self.register_buffer("frequencies", 1 / 10 ** torch.arange(3))

    def forward(self, ids):
        angles = torch.arange(ids.shape[1])[:, None] * self.frequencies
        cos, sin = (t.to(self.head.weight.dtype) for t in (angles.cos(), angles.sin()))
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril() & (ids > 2)[:, None, None]
        x = self.words(ids)
        mask = torch.where(mask, 0.0, -1e4).to(x.dtype)
        for layer in self.layers:
            q, k, v = layer(x).split([12, 6, 6], -1)
            q, k = (self.turned(t, cos, sin) for t in (q, k))
            v = v.unflatten(-1, (1, 6)).transpose(1, 2)
            made = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
            x = x + made.transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())

    @staticmethod
    def turned(x, cos, sin):
        a, b = x.unflatten(-1, (-1, 6)).transpose(1, 2).chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


MODELS["Rotary"] = lambda: Case(Rotary(), (_words(31),))


@_case((7,))
class Norms(nn.Module):
    """Running statistics, a count and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(7, 7), nn.BatchNorm1d(7), nn.ReLU())))
        self.layers[3].requires_grad_(False)
        self.layers[4].requires_grad_(False)
        self.spare = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return self.layers(x).pow(2).mean()


@_case((7,))
class EarlyOutputs(nn.Module):
    """Gives what each layer made, its input, a view of it, and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))

    def forward(self, x):
        a = self.layers[0](x)
        b = self.layers[1](a.tanh())
        c = self.layers[2](b.tanh())
        return {
            "loss": c.pow(2).mean() + a.mean(),
            "made": [a, b[:, 1:4], c.t()],
            "given": (x, x.t(), self.layers[0].weight),
        }


@_case((7,))
class Thrice(nn.Module):
    """One weight is read in the first, the middle and the last layer; another part is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(7, 7)
        self.own = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))
        self.own[1].requires_grad_(False)

    def forward(self, x):
        for i, layer in enumerate(self.own):
            x = layer(x).tanh()
            if i != 2:
                x = self.shared(x).sin()
        return x.pow(2).mean()


class Noted(torch.autograd.Function):
    """The gradient of a weight is a value of the forward: it asks nothing of the backward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x.mean(0))
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        (mean,) = ctx.saved_tensors
        return grad, mean


class Unread(torch.autograd.Function):
    """Its backward reads a weight that its forward does not."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        return grad @ weight, grad.t() @ grad


@_case((7,))
class OwnFunctions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))
        self.noted = nn.Parameter(torch.randn(7))
        self.unread = nn.Parameter(torch.randn(7, 7))

    def forward(self, x):
        x = Noted.apply(self.layers[0](x), self.noted)
        x = Unread.apply(self.layers[1](x), self.unread)
        x = Noted.apply(self.layers[2](x), self.noted)
        return self.layers[3](x).pow(2).mean()


@_case((6,))
class Views(nn.Module):
    """Later layers look at what the first made in many ways: some are as large as it, some have gaps or overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.wide = nn.Linear(12, 4)

    def forward(self, x):
        made = self.first(x)
        low, high = made.chunk(2, 1)
        steps, wide = made[:, ::2], made[:, :1].expand(-1, 6)
        turned = made.view(-1, 3, 4).permute(2, 0, 1)
        x = self.layers[0](low.sin()) + high
        x = self.layers[1](x + wide) * made.view(-1, 2, 6)[:, 1]
        x = self.layers[2](x) + torch.cat([steps[:, 1:], low[:, 3:4]], 1)
        x = x + turned.reshape(-1, 3).mean() + self.wide(made[2:]).mean()
        return x.pow(2).mean()


@_case((8,))
class Tuples(nn.Module):
    """Operators that give several values, of which different layers read different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.parts = nn.Linear(3, 8)

    def forward(self, x):
        top, where = self.layers[0](x).topk(3, 1)
        deviation, mean = torch.std_mean(self.layers[1](self.parts(top).tanh()), 1)
        parts = torch.split(self.layers[2](mean[:, None] + self.layers[1].weight.sum(0)), 3, 1)
        return (parts[0] * top + parts[1] * where).pow(2).mean() + (parts[2].sum(1) * deviation).mean(), where


@_case((7,))
class Drops(nn.Module):
    """Dropout before, in and behind regions that PyTorch computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 13), nn.Dropout(0.3), nn.GELU(), nn.Linear(13, 7)) for _ in range(4)
        )

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = F.dropout(x, 0.1) + (checkpoint(block, x, use_reentrant=False) if i % 2 else block(x))
        return x.pow(2).mean()


@_case((7,))
class Double(nn.Module):
    """In double precision, but for a layer in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 7).double(), nn.Linear(7, 7).double()
        self.middle = nn.Linear(7, 7).bfloat16()

    def forward(self, x):
        x = self.first(x.double()).tanh()
        return self.last(self.middle(x.bfloat16()).double() + x).pow(2).mean()


class Cuts(nn.Module):
    """What can't be cut everywhere: `what` says how."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.what = what

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        if self.what == "buffer":
            x = x + self.mean
            self.mean.mul_(0.9).add_(x.detach().mean(0))
            return self.last(x * self.mean.sin()).pow(2).mean()
        if self.what == "number":
            return self.last(x * x.sum().item()).pow(2).mean()
        return self.last(x[2:].as_strided((4, 6), (6, 1), 12)).pow(2).mean()
