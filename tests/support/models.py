"""Small models with random weights and a global batch for each, shared by tests; at the end, what tests of steps train.

Sizes are odd on purpose: few dimensions are a multiple of the worlds that tests run at (2, 3, 4 and 8), all of which
divide the batch of 24. Each factory seeds its own weights and batch, so that a case is the same wherever it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zgraph
from zgraph.api.calibration import any_loss

BATCH = 24
WORDS = 97


@dataclass
class Case:
    """A model, the global batch for it, and the loss where the model's output holds none."""

    model: nn.Module
    inputs: Any
    loss_fn: Callable[[Any], torch.Tensor] | None = None


TRANSFORMERS: dict[str, Callable[[], Case]] = {}
PLAIN: dict[str, Callable[[], Case]] = {}


def build(name: str) -> Case:
    """A fresh case by name. The global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {**TRANSFORMERS, **PLAIN}[name]()


def shallow(name: str) -> Case:
    """A fresh case of transformers' whose model has only the first of its layers."""
    case = build(name)
    body = case.model.base_model
    layers = next(key for key, value in body.named_children() if isinstance(value, nn.ModuleList))
    setattr(body, layers, getattr(body, layers)[:1])
    case.model.config.num_hidden_layers = 1
    return case


def _transformers(make: Callable[[Any], Case]) -> Callable[[], Case]:
    def factory() -> Case:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        case = make(transformers)
        case.model.train()
        return case

    TRANSFORMERS[make.__name__] = factory
    return factory


def _plain(make: Callable[[], Case]) -> Callable[[], Case]:
    PLAIN[make.__name__] = make
    return make


# -- transformers ---------------------------------------------------------------------------------------------------
def _text(length: int = 7) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, WORDS, (BATCH, length))
    return {"input_ids": ids, "labels": ids}


def _images() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(0, 3, (BATCH,))}


@_transformers
def gpt2(hf: Any) -> Case:
    """Tied embeddings, and dropout in every block."""
    config = hf.GPT2Config(n_layer=2, n_embd=30, n_head=2, vocab_size=WORDS, n_positions=32)
    return Case(hf.GPT2LMHeadModel(config), _text())


@_transformers
def llama(hf: Any) -> Case:
    """Grouped-query attention: two heads of keys for four of queries. (Of torch's own, transformers 5.23 asks another way where it
    is captured, whose roundings differ.)"""
    config = hf.LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=50, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="eager",
    )  # fmt: skip
    return Case(hf.LlamaForCausalLM(config), _text())


@_transformers
def bert(hf: Any) -> Case:
    config = hf.BertConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=50, num_hidden_layers=2, num_attention_heads=4
    )
    return Case(hf.BertForMaskedLM(config), _text())


@_transformers
def t5(hf: Any) -> Case:
    """An embedding that encoder and decoder share, and a table of positions that every layer of each reads."""
    if torch.__version__.startswith("2.11."):
        pytest.skip("dynamo of torch 2.11 does not trace copy.deepcopy(config), which T5's forward calls")
    config = hf.T5Config(
        vocab_size=WORDS,
        d_model=30,
        d_kv=8,
        d_ff=50,
        num_layers=2,
        num_heads=3,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return Case(hf.T5ForConditionalGeneration(config), _text())


@_transformers
def vit(hf: Any) -> Case:
    config = hf.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=50, image_size=32, patch_size=8,
        num_labels=3,
    )  # fmt: skip
    return Case(hf.ViTForImageClassification(config), _images())


@_transformers
def resnet(hf: Any) -> Case:
    """BatchNorm, with running statistics in buffers."""
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[10, 14], depths=[1, 1], num_labels=3, layer_type="basic")
    return Case(hf.ResNetForImageClassification(config), _images())


@_transformers
def mixtral(hf: Any) -> Case:
    """Experts: which of them a token visits depends on the data."""
    config = hf.MixtralConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, attn_implementation="eager",
    )  # fmt: skip
    return Case(hf.MixtralForCausalLM(config), _text())


# -- plain PyTorch --------------------------------------------------------------------------------------------------
class Regression(nn.Module):
    """`body` with a squared error on top: the scalar that most of the models below return."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x, y):
        return F.mse_loss(self.body(x), y)


def _regression(body: nn.Module, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Case:
    return Case(Regression(body), (torch.randn(BATCH, *inputs), torch.randn(BATCH, *outputs)))


@_plain
def uneven_mlp() -> Case:
    """No dimension is a multiple of any world; one is smaller than most worlds."""
    return _regression(nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.LayerNorm(13), nn.Linear(13, 1)), (7,), (1,))


@_plain
def even_mlp() -> Case:
    return _regression(nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 48)), (8,), (48,))


@_plain
def frozen() -> Case:
    """Frozen parameters before, between and after trained ones."""
    body = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(7, 7), nn.Tanh())))
    for at in (0, 4):
        body[at].requires_grad_(False)
    body[2].bias.requires_grad_(False)
    return _regression(body, (7,), (7,))


class Repeated(nn.Module):
    """One layer used three times, and its weight read by itself besides."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 7)
        self.head = nn.Linear(7, 5)

    def forward(self, x, y):
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        return F.mse_loss(self.head(x), y) + 0.1 * self.layer.weight.pow(2).sum()


@_plain
def used_several_times() -> Case:
    return Case(Repeated(), (torch.randn(BATCH, 7), torch.randn(BATCH, 5)))


class Unused(nn.Module):
    """A parameter that the forward never reads, and one that it reads without effect on the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 5)
        self.spare = nn.Linear(11, 3)
        self.idle = nn.Parameter(torch.randn(9))

    def forward(self, x, y):
        return F.mse_loss(self.layer(x), y), self.idle * 2


@_plain
def unused_parameter() -> Case:
    return Case(Unused(), (torch.randn(BATCH, 7), torch.randn(BATCH, 5)))


class SharedGradient(nn.Module):
    """Two pairs of parameters each have one gradient, the very same value."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(5, 7) for _ in range(4))

    def forward(self, x, y):
        a, b, c, d = self.weights
        return F.mse_loss(torch.tanh(x @ (a + b).t()) @ (c + d), y)


@_plain
def shared_gradient() -> Case:
    return Case(SharedGradient(), (torch.randn(BATCH, 7), torch.randn(BATCH, 7)))


class ConstantGradient(torch.autograd.Function):
    """Its gradient is a value of the forward, or an input, and asks nothing of the backward."""

    @staticmethod
    def forward(ctx, weight, bias, x):
        ctx.save_for_backward(x.sin().mean(0), x)
        return (x * weight).sum() + bias.sum()

    @staticmethod
    def backward(ctx, grad):
        made, x = ctx.saved_tensors
        return made, x, None


class OwnWeightAsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        ctx.save_for_backward(weight)
        return weight.pow(2).sum() / 2

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0]


class GradientOfForward(nn.Module):
    """Gradients that are an input, a value of the forward (of two parameters the same one), and the weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7))
        self.bias = nn.Parameter(torch.randn(3, 7))
        self.other = nn.Parameter(torch.randn(3, 7))
        self.decayed = nn.Parameter(torch.randn(5, 7))

    def forward(self, x, constant):
        loss = ConstantGradient.apply(self.weight, self.bias, constant)
        loss = loss + ConstantGradient.apply(self.weight, self.other, constant)
        return loss + OwnWeightAsGradient.apply(self.decayed) + x.sum()


@_plain
def gradient_of_forward() -> Case:
    return Case(GradientOfForward(), (torch.randn(BATCH, 7), torch.randn(3, 7)))


class Mixed(nn.Module):
    """A part in bfloat16 between parts in float32, and one in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 9)
        self.middle = nn.Linear(9, 11).to(torch.bfloat16)
        self.last = nn.Linear(11, 3).to(torch.float64)

    def forward(self, x, y):
        x = F.gelu(self.middle(self.first(x).to(torch.bfloat16)))
        return F.mse_loss(self.last(x.double()).float(), y)


@_plain
def mixed_dtypes() -> Case:
    return Case(Mixed(), (torch.randn(BATCH, 7), torch.randn(BATCH, 3)))


@_plain
def dropout() -> Case:
    body = nn.Sequential(
        nn.Linear(7, 13), nn.Dropout(0.3), nn.ReLU(), nn.Dropout(0.1), nn.Linear(13, 5), nn.Dropout(0.2)
    )
    return _regression(body, (7,), (5,))


@_plain
def channels_last() -> Case:
    """Convolution weights whose dimensions lie in memory in another order."""
    body = nn.Sequential(
        nn.Conv2d(3, 7, 3, padding=1), nn.ReLU(), nn.Conv2d(7, 5, 3, padding=1), nn.Flatten(), nn.Linear(180, 3)
    )
    case = _regression(body.to(memory_format=torch.channels_last), (3, 6, 6), (3,))
    case.inputs = (case.inputs[0].contiguous(memory_format=torch.channels_last), case.inputs[1])
    return case


class Scalars(nn.Module):
    """A parameter without dimensions, one of one element, an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 5)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor([0.3]))
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x, y):
        return F.mse_loss(self.layer(x) * self.gain + self.shift, y) + self.empty.sum()


@_plain
def scalar_parameter() -> Case:
    return Case(Scalars(), (torch.randn(BATCH, 7), torch.randn(BATCH, 5)))


class Tied(nn.Module):
    """The weights of the embedding are those of the head, under both names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 9)
        self.layer = nn.Linear(9, 9)
        self.head = nn.Linear(9, 31, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words, targets):
        return F.cross_entropy(self.head(torch.relu(self.layer(self.embed(words)))).flatten(0, 1), targets.flatten())


@_plain
def tied() -> Case:
    return Case(Tied(), (torch.randint(0, 31, (BATCH, 4)), torch.randint(0, 31, (BATCH, 4))))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells = kind(5, 7, num_layers=2, batch_first=True)
        self.head = nn.Linear(7, 3)

    def forward(self, x, y):
        hidden, _ = self.cells(x)
        return F.mse_loss(self.head(hidden[:, -1]), y)


@_plain
def lstm() -> Case:
    return Case(Recurrent(nn.LSTM), (torch.randn(BATCH, 6, 5), torch.randn(BATCH, 3)))


@_plain
def gru() -> Case:
    return Case(Recurrent(nn.GRU), (torch.randn(BATCH, 6, 5), torch.randn(BATCH, 3)))


@dataclass
class Result:
    """No pytree to torch: nothing is registered for it."""

    loss: torch.Tensor
    prediction: torch.Tensor
    note: str = "fine"
    nothing: None = None


class GivesDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 5)

    def forward(self, x, y):
        prediction = self.layer(x)
        return Result(F.mse_loss(prediction, y), prediction)


@_plain
def dataclass_output() -> Case:
    return Case(GivesDataclass(), (torch.randn(BATCH, 7), torch.randn(BATCH, 5)))


class GivesNested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 5)

    def forward(self, batch):
        hidden = self.layer(batch["x"])
        return {"parts": [hidden, (hidden.relu(), {"sum": hidden.sum(1), "name": "hidden", "none": None})], "count": 3}


@_plain
def nested_output() -> Case:
    """The loss is made outside, of two outputs deep in a nested structure; others are not differentiated."""
    return Case(
        GivesNested(),
        ({"x": torch.randn(BATCH, 7)},),
        lambda out: out["parts"][0].pow(2).mean() + out["parts"][1][1]["sum"].mean(),
    )


class GivesViews(nn.Module):
    """Returns its input as it came, views of one value, one value twice, a parameter, and a view of one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 6)

    def forward(self, x):
        hidden = self.layer(x)
        return (
            hidden.pow(2).mean(),
            x,
            x.t(),
            hidden[:, :3],
            hidden.view(-1),
            hidden,
            self.layer.weight,
            self.layer.weight.t(),
            self.layer.bias * 2,
        )


@_plain
def input_and_views_output() -> Case:
    return Case(GivesViews(), (torch.randn(BATCH, 8),))


class Counts(nn.Module):
    """Updates its buffers in place: a count, a moving mean that the same forward reads before, one through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("last", torch.zeros(2, 5), persistent=False)

    def forward(self, x, y):
        hidden = self.layer(x)
        loss = F.mse_loss(hidden - self.mean.sin() * hidden, y)
        self.calls += 1
        self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        self.last[1].copy_(hidden.detach()[0])
        return loss


@_plain
def buffer_update() -> Case:
    return Case(Counts(), (torch.randn(BATCH, 7), torch.randn(BATCH, 5)))


@_plain
def batch_norm() -> Case:
    return _regression(nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 5)), (7,), (5,))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(10, 2, batch_first=True)

    def forward(self, x, y):
        made, weights = self.attention(x, x, x)
        return F.mse_loss(made, y), weights


@_plain
def multihead_attention() -> Case:
    return Case(Attends(), (torch.randn(BATCH, 5, 10), torch.randn(BATCH, 5, 10)))


@_plain
def transformer_encoder() -> Case:
    layer = nn.TransformerEncoderLayer(10, 2, 17, dropout=0.1, batch_first=True, norm_first=True)
    return _regression(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (5, 10), (5, 10))


class UNet(nn.Module):
    """Down, up, and a skip connection between: the first value of the forward is the last that the backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Conv2d(3, 5, 3, padding=1)
        self.down = nn.Conv2d(5, 9, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(3, 9)
        self.up = nn.ConvTranspose2d(9, 5, 2, stride=2)
        self.outward = nn.Conv2d(10, 3, 1)

    def forward(self, image, target):
        skip = F.silu(self.inward(image))
        deep = F.silu(self.norm(self.down(skip)))
        return F.mse_loss(self.outward(torch.cat([self.up(deep), skip], 1)), target)


@_plain
def unet() -> Case:
    return Case(UNet(), (torch.randn(BATCH, 3, 8, 8), torch.randn(BATCH, 3, 8, 8)))


class TakesAnything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 7)

    def forward(self, x, y, *, repeat=1, mask=None, reduction="sum", scale=1.0, flags=()):
        for _ in range(repeat):
            x = torch.tanh(self.layer(x)) * scale
        if mask is not None:
            x = x * mask
        return {"loss": F.mse_loss(x, y, reduction=reduction), "flags": flags}


@_plain
def other_kwargs() -> Case:
    batch = dict(x=torch.randn(BATCH, 7), y=torch.randn(BATCH, 7), repeat=2, mask=None, reduction="mean", scale=0.5)
    return Case(TakesAnything(), batch)


class Clipped(torch.autograd.Function):
    """A gradient that is not that of its forward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 0.5 + x * 0.25


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 5)

    def forward(self, x, y):
        return F.mse_loss(Clipped.apply(self.layer(x)), y)


@_plain
def autograd_function() -> Case:
    return Case(OwnFunction(), (torch.randn(BATCH, 7), torch.randn(BATCH, 5)))


class Checkpointed(nn.Module):
    """Two of its blocks are regions that PyTorch computes again in the backward; one of them draws at random."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 13), nn.ReLU(), nn.Dropout(0.2 * i), nn.Linear(13, 7)) for i in range(3)
        )

    def forward(self, x, y):
        for i, block in enumerate(self.blocks):
            x = x + (checkpoint(block, x, use_reentrant=False) if i else block(x))
        return F.mse_loss(x, y)


@_plain
def checkpoint_regions() -> Case:
    return Case(Checkpointed(), (torch.randn(BATCH, 7), torch.randn(BATCH, 7)))


class Stack(nn.Module):
    """`depth` equal layers of three weights each: what tests of memory count in."""

    def __init__(self, depth: int, dim: int = 7) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(dim, elementwise_affine=False),
                nn.Linear(dim, 2 * dim + 1),
                nn.Tanh(),
                nn.Linear(2 * dim + 1, dim),
            )
            for _ in range(depth)
        )

    def forward(self, x, y):
        for layer in self.layers:
            x = x + layer(x)
        return F.mse_loss(x, y)


def stack(depth: int, dim: int = 7) -> Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Case(Stack(depth, dim), (torch.randn(BATCH, dim), torch.randn(BATCH, dim)))


# -- training steps -------------------------------------------------------------------------------------------------
class Net(nn.Module):
    """Its output is its loss, a mean over rows: what tests of training steps train."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 12)
        self.norm = nn.LayerNorm(12)
        self.last = nn.Linear(12, 5)

    def logits(self, x):
        return self.last(F.gelu(self.norm(self.first(x))))

    def forward(self, x, targets):
        return F.cross_entropy(self.logits(x), targets)


def built(cls: Callable[[], nn.Module] = Net) -> nn.Module:
    """A model that has the same weights whenever it is made; sets the global generator."""
    torch.manual_seed(0)
    return cls()


def compiled(cls: Callable[[], nn.Module] = Net, *, loss_fn: Any = None, backend: str = "eager", **plan) -> nn.Module:
    """`built(cls)`, compiled by the plan of these fields."""
    return zgraph.compile(built(cls), zgraph.Plan(backend=backend, **plan), loss_fn=loss_fn)


def feed(count: int, rows: int = 8, seed: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches for `Net`."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randn(rows, 7, generator=generator), torch.randint(5, (rows,), generator=generator)


def batch(rows: int = 8, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    return next(feed(1, rows, seed))


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def gradients(case: Case, **plan) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The case's model, compiled by the plan of these fields and run once: its loss, and its gradients by name."""
    torch.manual_seed(1)
    model = zgraph.compile(case.model, zgraph.Plan(**plan))
    output = model(**case.inputs) if isinstance(case.inputs, dict) else model(*case.inputs)
    loss = case.loss_fn(output) if case.loss_fn else any_loss(output)
    loss.backward()
    return model, {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


def equal(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Are they bit for bit the same tensors, by name?"""
    return mine.keys() == other.keys() and all(torch.equal(mine[n], other[n]) for n in other)
