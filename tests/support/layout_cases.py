"""Layers whose derivatives or kernels look at strides, and tensors laid out in all the ways that a model makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Tensor = torch.Tensor


class Layer(nn.Module):
    """A function with parameters: `function(layer, x)` reads them as attributes."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **parameters: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        for name, shape in parameters.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class First(nn.Module):
    """The first output of a module that gives several; of attention, from three times the same."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.inner, nn.MultiheadAttention):
            return self.inner(x, x, x, need_weights=False)[0]
        return self.inner(x)[0]


def _bag(layer: Any, x: Tensor) -> Tensor:
    at = (x.reshape(-1, 3).detach().abs() * 3).long() % 8
    return F.embedding_bag(at, layer.w, mode="mean") * x.mean()


def _attention(layer: Any, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x * layer.w, x, x.tanh())


def _scatter(layer: Any, x: Tensor) -> Tensor:
    at = (x.detach() * 5).long().abs() % x.shape[-1]
    return torch.zeros_like(x).scatter_add(-1, at, x * layer.w)


def _gather(layer: Any, x: Tensor) -> Tensor:
    at = (x.detach() * 5).long().abs() % x.shape[-1]
    return (x * layer.w).gather(-1, at)


def _take(layer: Any, x: Tensor) -> Tensor:
    return (x * layer.w)[..., [0, 2, 2, 1]][:, [1, 0, 1]]


def _square(x: Tensor) -> Tensor:
    return x @ x.mT + 3 * torch.eye(x.shape[-2])


def _mixed(layer: Any, x: Tensor) -> Tensor:
    return torch.cat([x * layer.w, x.contiguous().sin(), x.transpose(-1, -2).contiguous().transpose(-1, -2)], 1)


W = {"w": (6,)}
# name: (shape of the input, a module of it)
LAYERS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "batch_norm": ((4, 6, 8), lambda: nn.BatchNorm1d(6)),
    "batch_norm_2d": ((4, 6, 5, 3), lambda: nn.BatchNorm2d(6)),
    "instance_norm": ((4, 6, 8), lambda: nn.InstanceNorm1d(6, affine=True, track_running_stats=True)),
    "group_norm": ((4, 6, 8), lambda: nn.GroupNorm(2, 6)),
    "group_norm_2d": ((4, 6, 5, 3), lambda: nn.GroupNorm(3, 6)),
    "layer_norm": ((4, 8, 6), lambda: nn.LayerNorm(6)),
    "layer_norm_2d": ((4, 8, 6), lambda: nn.LayerNorm((8, 6))),
    "rms_norm": ((4, 8, 6), lambda: nn.RMSNorm(6)),
    "local_response_norm": ((4, 6, 5, 3), lambda: nn.Sequential(nn.Conv2d(6, 6, 1), nn.LocalResponseNorm(3))),
    "dropout": ((4, 8, 6), lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3))),
    "alpha_dropout": ((4, 8, 6), lambda: nn.Sequential(nn.Linear(6, 6), nn.AlphaDropout(0.3))),
    "conv_1d": ((4, 6, 8), lambda: nn.Conv1d(6, 4, 3, padding=1)),
    "conv_2d": ((4, 6, 5, 3), lambda: nn.Conv2d(6, 4, 3, padding=1)),
    "conv_2d_last": ((4, 6, 5, 3), lambda: nn.Conv2d(6, 4, 3, padding=1).to(memory_format=torch.channels_last)),
    "conv_grouped": ((4, 6, 5, 3), lambda: nn.Conv2d(6, 6, 3, padding=1, groups=6)),
    "conv_3d": ((2, 6, 3, 4, 3), lambda: nn.Conv3d(6, 4, 3, padding=1)),
    "conv_transposed": ((4, 6, 5, 3), lambda: nn.ConvTranspose2d(6, 4, 3, stride=2)),
    "max_pool": ((4, 6, 5, 4), lambda: nn.Sequential(nn.Conv2d(6, 6, 1), nn.MaxPool2d(2))),
    "max_pool_only": ((4, 6, 5, 4), lambda: Layer(lambda m, x: F.max_pool2d(x * m.w, 2), w=(6, 1, 1))),
    "avg_pool": ((4, 6, 5, 4), lambda: Layer(lambda m, x: F.avg_pool2d(x * m.w, 2), w=(6, 1, 1))),
    "adaptive_avg": ((4, 6, 5, 4), lambda: Layer(lambda m, x: F.adaptive_avg_pool2d(x * m.w, 3), w=(6, 1, 1))),
    "adaptive_max": ((4, 6, 5, 4), lambda: Layer(lambda m, x: F.adaptive_max_pool2d(x * m.w, 3), w=(6, 1, 1))),
    "avg_pool_3d": ((2, 6, 3, 4, 4), lambda: Layer(lambda m, x: F.avg_pool3d(x * m.w, 2), w=(6, 1, 1, 1))),
    "max_pool_3d": ((2, 6, 3, 4, 4), lambda: Layer(lambda m, x: F.max_pool3d(x * m.w, 2), w=(6, 1, 1, 1))),
    "max_unpool": (
        (4, 6, 4, 4),
        lambda: Layer(lambda m, x: F.max_unpool2d(*F.max_pool2d(x * m.w, 2, return_indices=True), 2), w=(6, 1, 1)),
    ),
    "bilinear": (
        (4, 6, 5, 3),
        lambda: Layer(lambda m, x: F.interpolate(x * m.w, size=(7, 7), mode="bilinear"), w=(6, 1, 1)),
    ),
    "bicubic": (
        (4, 6, 5, 3),
        lambda: Layer(lambda m, x: F.interpolate(x * m.w, size=(7, 7), mode="bicubic"), w=(6, 1, 1)),
    ),
    "nearest": ((4, 6, 5, 3), lambda: Layer(lambda m, x: F.interpolate(x * m.w, scale_factor=2), w=(6, 1, 1))),
    "area": ((4, 6, 5, 3), lambda: Layer(lambda m, x: F.interpolate(x * m.w, size=(2, 2), mode="area"), w=(6, 1, 1))),
    "linear_up": ((4, 6, 5), lambda: Layer(lambda m, x: F.interpolate(x * m.w, size=9, mode="linear"), w=(6, 1))),
    "grid_sample": (
        (4, 6, 5, 3),
        lambda: Layer(
            lambda m, x: F.grid_sample(
                x * m.w, F.affine_grid(m.t.expand(4, 2, 3), [4, 6, 4, 4], align_corners=False), align_corners=False
            ),
            w=(6, 1, 1),
            t=(1, 2, 3),
        ),
    ),
    "pixel_shuffle": ((4, 8, 3, 3), lambda: Layer(lambda m, x: F.pixel_shuffle(x * m.w, 2), w=(8, 1, 1))),
    "channel_shuffle": ((4, 8, 3, 3), lambda: Layer(lambda m, x: F.channel_shuffle(x * m.w, 2), w=(8, 1, 1))),
    "unfold": ((4, 6, 5, 3), lambda: Layer(lambda m, x: F.unfold(x * m.w, 2), w=(6, 1, 1))),
    "attention": ((2, 3, 5, 6), lambda: Layer(_attention, **W)),
    "causal_attention": (
        (2, 3, 5, 6),
        lambda: Layer(lambda m, x: F.scaled_dot_product_attention(x * m.w, x, x, is_causal=True), **W),
    ),
    "masked_attention": (
        (2, 3, 5, 6),
        lambda: Layer(lambda m, x: F.scaled_dot_product_attention(x * m.w, x, x, attn_mask=(x @ x.mT).detach()), **W),
    ),
    "multihead": ((4, 8, 6), lambda: First(nn.MultiheadAttention(6, 2, batch_first=True))),
    "encoder": ((4, 8, 6), lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)),
    "encoder_first": ((8, 4, 6), lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0)),
    "lstm": ((4, 8, 6), lambda: First(nn.LSTM(6, 5, batch_first=True))),
    "lstm_two_ways": ((8, 4, 6), lambda: First(nn.LSTM(6, 5, 2, bidirectional=True))),
    "gru": ((4, 8, 6), lambda: First(nn.GRU(6, 5, batch_first=True))),
    "rnn": ((8, 4, 6), lambda: First(nn.RNN(6, 5))),
    "cdist": ((4, 8, 6), lambda: Layer(lambda m, x: torch.cdist(x, m.k.expand(4, 5, 6)), k=(5, 6))),
    "cdist_1": ((4, 8, 6), lambda: Layer(lambda m, x: torch.cdist(x, m.k.expand(4, 5, 6), p=1.0), k=(5, 6))),
    "pdist": ((8, 6), lambda: Layer(lambda m, x: F.pdist(x * m.w), **W)),
    "einsum": ((4, 8, 6), lambda: Layer(lambda m, x: torch.einsum("bij,kj,bkl->bil", x, m.k, x), k=(8, 6))),
    "bilinear_form": ((4, 8, 6), lambda: Layer(lambda m, x: F.bilinear(x, x.sin(), m.k), k=(3, 6, 6))),
    "linear": ((4, 8, 6), lambda: nn.Linear(6, 5)),
    "bmm": ((4, 8, 6), lambda: Layer(lambda m, x: torch.bmm(x * m.w, x.mT), **W)),
    "tensordot": ((4, 8, 6), lambda: Layer(lambda m, x: torch.tensordot(x, m.k, ([1, 2], [0, 1])), k=(8, 6, 3))),
    "fft": ((4, 8, 6), lambda: Layer(lambda m, x: torch.view_as_real(torch.fft.fft(x * m.w)), **W)),
    "rfft": ((4, 8, 6), lambda: Layer(lambda m, x: torch.view_as_real(torch.fft.rfft2(x * m.w)), **W)),
    "fft_first": ((4, 8, 6), lambda: Layer(lambda m, x: torch.fft.fftn(x * m.w, dim=(0, 1)).real, **W)),
    "irfft": ((4, 8, 6), lambda: Layer(lambda m, x: torch.fft.irfft(torch.fft.rfft(x * m.w) * 2), **W)),
    "stft": (
        (4, 32),
        lambda: Layer(lambda m, x: torch.view_as_real(torch.stft(x, 8, window=m.k, return_complex=True)), k=(8,)),
    ),
    "inv": ((4, 5, 6), lambda: Layer(lambda m, x: torch.linalg.inv(_square(x * m.w)), **W)),
    "solve": ((4, 5, 6), lambda: Layer(lambda m, x: torch.linalg.solve(_square(x), x * m.w), **W)),
    "cholesky": ((4, 5, 6), lambda: Layer(lambda m, x: torch.linalg.cholesky(_square(x * m.w)), **W)),
    "qr": ((4, 6, 5), lambda: Layer(lambda m, x: torch.linalg.qr(x * m.w)[1].abs(), w=(5,))),
    "svd": ((4, 5, 6), lambda: Layer(lambda m, x: torch.linalg.svdvals(x * m.w), **W)),
    "eigh": ((4, 5, 6), lambda: Layer(lambda m, x: torch.linalg.eigvalsh(_square(x * m.w)), **W)),
    "triangular": (
        (4, 5, 6),
        lambda: Layer(lambda m, x: torch.linalg.solve_triangular(_square(x).tril(), x * m.w, upper=False), **W),
    ),
    "slogdet": ((4, 5, 6), lambda: Layer(lambda m, x: torch.linalg.slogdet(_square(x * m.w))[1], **W)),
    "lstsq": ((4, 6, 5), lambda: Layer(lambda m, x: torch.linalg.pinv(x * m.w), w=(5,))),
    "matrix_exp": ((4, 5, 5), lambda: Layer(lambda m, x: torch.linalg.matrix_exp(x * m.w / 4), w=(5,))),
    "index": ((4, 8, 6), lambda: Layer(_take, **W)),
    "gather": ((4, 8, 6), lambda: Layer(_gather, **W)),
    "scatter": ((4, 8, 6), lambda: Layer(_scatter, **W)),
    "index_add": (
        (4, 8, 6),
        lambda: Layer(lambda m, x: (x * m.w).index_add(1, torch.tensor([0, 2, 2]), x[:, :3]), **W),
    ),
    "index_select": ((4, 8, 6), lambda: Layer(lambda m, x: (x * m.w).index_select(2, torch.tensor([3, 0, 0])), **W)),
    "index_put": ((4, 8, 6), lambda: Layer(lambda m, x: (x * m.w).index_put((torch.tensor([0, 2]),), x[1]), **W)),
    "masked_fill": ((4, 8, 6), lambda: Layer(lambda m, x: (x * m.w).masked_fill(x > 0.5, 0.25), **W)),
    "where": (
        (4, 8, 6),
        lambda: Layer(lambda m, x: torch.where(x > 0, x * m.w, x.transpose(1, 2).reshape(4, 8, 6)), **W),
    ),
    "embedding_bag": ((4, 8, 6), lambda: Layer(_bag, w=(8, 4))),
    "pad": ((4, 6, 5, 3), lambda: Layer(lambda m, x: F.pad(x * m.w, (1, 2, 0, 1)), w=(6, 1, 1))),
    "reflect": ((4, 6, 5, 3), lambda: Layer(lambda m, x: F.pad(x * m.w, (1, 2, 1, 1), mode="reflect"), w=(6, 1, 1))),
    "replicate": (
        (4, 6, 5, 3),
        lambda: Layer(lambda m, x: F.pad(x * m.w, (1, 2, 1, 1), mode="replicate"), w=(6, 1, 1)),
    ),
    "circular": ((4, 6, 5, 3), lambda: Layer(lambda m, x: F.pad(x * m.w, (1, 2, 1, 1), mode="circular"), w=(6, 1, 1))),
    "cat": ((4, 8, 6), lambda: Layer(_mixed, **W)),
    "stack": ((4, 8, 6), lambda: Layer(lambda m, x: torch.stack([x * m.w, x.sin()], 1), **W)),
    "topk": ((4, 8, 6), lambda: Layer(lambda m, x: torch.topk(x * m.w, 3)[0], **W)),
    "sort": ((4, 8, 6), lambda: Layer(lambda m, x: torch.sort(x * m.w, 1)[0], **W)),
    "kthvalue": ((4, 8, 6), lambda: Layer(lambda m, x: torch.kthvalue(x * m.w, 3, 1)[0], **W)),
    "median": ((4, 8, 6), lambda: Layer(lambda m, x: torch.median(x * m.w, 2)[0], **W)),
    "cumsum": ((4, 8, 6), lambda: Layer(lambda m, x: torch.cumsum(x * m.w, 1), **W)),
    "cumprod": ((4, 8, 6), lambda: Layer(lambda m, x: torch.cumprod(x * m.w, 1), **W)),
    "cummax": ((4, 8, 6), lambda: Layer(lambda m, x: torch.cummax(x * m.w, 1)[0], **W)),
    "logcumsumexp": ((4, 8, 6), lambda: Layer(lambda m, x: torch.logcumsumexp(x * m.w, 2), **W)),
    "softmax": ((4, 8, 6), lambda: Layer(lambda m, x: F.softmax(x * m.w, 1), **W)),
    "log_softmax": ((4, 8, 6), lambda: Layer(lambda m, x: F.log_softmax(x * m.w, -1), **W)),
    "amax": ((4, 8, 6), lambda: Layer(lambda m, x: torch.amax(x * m.w, 1), **W)),
    "logsumexp": ((4, 8, 6), lambda: Layer(lambda m, x: torch.logsumexp(x * m.w, 2), **W)),
    "norm": ((4, 8, 6), lambda: Layer(lambda m, x: torch.linalg.vector_norm(x * m.w, dim=1), **W)),
    "weight_norm": ((4, 8, 6), lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 5))),
    "renorm": ((4, 8, 6), lambda: Layer(lambda m, x: torch.renorm(x * m.w, 2, 1, 1.0), **W)),
    "prelu": ((4, 6, 8), lambda: nn.PReLU(6)),
    "glu": ((4, 8, 6), lambda: Layer(lambda m, x: F.glu(x * m.w), **W)),
    "gelu": ((4, 8, 6), lambda: Layer(lambda m, x: F.gelu(x * m.w), **W)),
    "roll": ((4, 8, 6), lambda: Layer(lambda m, x: torch.roll(x * m.w, 2, 1), **W)),
    "flip": ((4, 8, 6), lambda: Layer(lambda m, x: torch.flip(x * m.w, (0, 2)), **W)),
    "repeat": ((4, 8, 6), lambda: Layer(lambda m, x: (x * m.w).repeat(1, 2, 1), **W)),
    "repeat_interleave": ((4, 8, 6), lambda: Layer(lambda m, x: (x * m.w).repeat_interleave(2, 1), **W)),
    "tril": ((4, 8, 6), lambda: Layer(lambda m, x: torch.tril(x * m.w), **W)),
    "diag_embed": ((4, 8, 6), lambda: Layer(lambda m, x: torch.diag_embed(x * m.w), **W)),
    "cross": ((4, 8, 3), lambda: Layer(lambda m, x: torch.linalg.cross(x, (x * m.w).sin()), w=(3,))),
    "unfold_view": ((4, 8, 6), lambda: Layer(lambda m, x: (x * m.w).unfold(1, 3, 2), **W)),
    "var": ((4, 8, 6), lambda: Layer(lambda m, x: torch.var(x * m.w, 1), **W)),
    "addcmul": ((4, 8, 6), lambda: Layer(lambda m, x: torch.addcmul(x, x.contiguous(), m.w.expand(4, 8, 6)), **W)),
    "lerp": ((4, 8, 6), lambda: Layer(lambda m, x: torch.lerp(x.contiguous(), x, m.w), **W)),
    "smooth_l1": (
        (4, 8, 6),
        lambda: Layer(lambda m, x: F.smooth_l1_loss(x * m.w, x.contiguous().sin(), reduction="none"), **W),
    ),
    "cross_entropy": (
        (4, 6, 8),
        lambda: Layer(
            lambda m, x: F.cross_entropy(x * m.w, torch.arange(32).view(4, 8) % 6, reduction="none"), w=(6, 1)
        ),
    ),
    "cosine": ((4, 8, 6), lambda: Layer(lambda m, x: F.cosine_similarity(x, x.roll(1, 0) * m.w, 1), **W)),
    "ctc": (
        (8, 4, 6),
        lambda: Layer(
            lambda m, x: F.ctc_loss(
                F.log_softmax(x * m.w, -1), torch.ones(4, 2, dtype=torch.long), (8,) * 4, (2,) * 4, reduction="none"
            ),
            **W,
        ),
    ),
}


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def _reversed(x: Tensor) -> Tensor:
    order = list(range(x.dim()))[::-1]
    return x.permute(order).contiguous().permute(order)


def _outside(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _expanded(x: Tensor) -> Tensor:
    return x[:1].expand(x.shape)


def _last(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def _stepped(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, -1)[..., ::2]


def _none(x: Tensor) -> Tensor:
    return x[:0]


def _one(x: Tensor) -> Tensor:
    return x[:1].movedim(1, -1).contiguous().movedim(-1, 1)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.contiguous,
    "transposed": _transposed,
    "reversed": _reversed,
    "outside": _outside,
    "expanded": _expanded,
    "last": _last,
    "stepped": _stepped,
    "one": _one,
    "none": _none,
}


class Between(nn.Module):
    """A layer between two norms that work on another layout than it: they see the strides of its result and of its gradient."""

    def __init__(self, layer: nn.Module, layout: Callable[[Tensor], Tensor], back: bool) -> None:
        super().__init__()
        self.layer, self.layout, self.back = layer, layout, back
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        first = x.sin() * self.scale
        first = first + F.group_norm(first, 1) if x.numel() and x.dim() > 1 else first
        found = self.layer(self.layout(first).mul(1.25) if self.back else self.layout(first))
        if found.dim() < 3 or not found.numel():
            return found
        back = found.transpose(1, 2)
        return (F.group_norm(back, 1) + back.cos()).transpose(1, 2)


def weights(out: Tensor) -> Tensor:
    """What a loss outside of a model multiplies its output with."""
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
