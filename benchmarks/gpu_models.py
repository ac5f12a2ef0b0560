"""Ordinary PyTorch on one device, compiled against plain: what models, sizes, streams and precisions `gpu.py` compares."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import zgraph

BOUND = 1e-5  # norm-wise relative error of a float32 gradient
WORDS = 97


@dataclass(frozen=True)
class Difference:
    """Of tensors by name: the largest norm-wise relative error, and whether all are within `BOUND` (of their own norm,
    and of 3e-7 of the norm of all: a gradient that is zero in exact arithmetic is nothing but rounding)."""

    exact: bool
    within: bool
    error: float
    name: str

    def __str__(self) -> str:
        return "bit for bit" if self.exact else f"at most {self.error:.1e} ({self.name})"


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: (g.full_tensor() if hasattr(g, "full_tensor") else g).detach().clone() for n, g in grads.items()}


def difference(mine: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], bound: float = BOUND) -> Difference:
    if mine.keys() != plain.keys():
        raise AssertionError(f"other tensors: {sorted(mine.keys() ^ plain.keys())}")
    norms = {n: float(g.double().norm()) for n, g in plain.items()}
    apart = {n: float((mine[n].double() - g.double()).norm()) for n, g in plain.items()}
    total = sum(norm**2 for norm in norms.values()) ** 0.5
    worst = max(apart, key=lambda n: apart[n] / max(norms[n], 1e-300))
    return Difference(
        exact=all(torch.equal(mine[n], g) for n, g in plain.items()),
        within=all(apart[n] <= bound * norms[n] + 3e-7 * total for n in plain),
        error=apart[worst] / max(norms[worst], 1e-300),
        name=worst,
    )


# -- models -------------------------------------------------------------------------------------------------------
def language_model(kind: str) -> nn.Module:
    import transformers as t

    torch.manual_seed(0)
    ends: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    small: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": WORDS,
    }
    if kind == "gpt2":
        none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        sizes: dict[str, Any] = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
        return t.GPT2LMHeadModel(t.GPT2Config(vocab_size=WORDS, **sizes, **ends, **none))
    if kind == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(num_key_value_heads=1, **small, **ends))
    if kind == "t5":
        sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
        config = t.T5Config(vocab_size=WORDS, decoder_start_token_id=0, use_cache=False, **sizes)
        return t.T5ForConditionalGeneration(config)
    assert kind == "bert"
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return t.BertForSequenceClassification(t.BertConfig(num_labels=3, **small, **still))


class Pictures(nn.Sequential):
    """Convolutions with batch norms, whose statistics are written in the forward. (A bias in front of one has no gradient but rounding.)"""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(
            nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, stride=2, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5),
        )  # fmt: skip


class Recurrent(nn.Module):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.embed = nn.Embedding(WORDS, 32, padding_idx=0)
        self.layers = nn.LSTM(32, 32, 2, batch_first=True)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.layers(self.embed(words))[0]


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(128), nn.Linear(128, 8))


# -- cases --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Compared:
    """A model beside its plain copy on `device`, by a plan for `backend`."""

    device: torch.device
    backend: str

    def pair(self, model: nn.Module, **plan: Any) -> tuple[Any, Any]:
        plain: Any = model.to(self.device)
        mine = copy.deepcopy(plain)
        zgraph.compile(mine, zgraph.Plan(backend=self.backend, **plan))
        return plain, mine

    def step(self, models: tuple[Any, Any], loss: Callable[[Any], torch.Tensor], bound: float = BOUND) -> Difference:
        """Loss, gradients and buffers after one call and its backward, from one seed."""
        plain, mine = (self._found(m, loss) for m in models)
        return difference(mine, plain, bound)

    def _found(self, model: Any, loss: Callable[[Any], torch.Tensor]) -> dict[str, torch.Tensor]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        value = loss(model)
        value.backward()
        state = {n: b.detach().clone() for n, b in model.named_buffers() if b.is_floating_point()}
        return {"loss": value.detach(), **gradients(model), **state}

    def words(self, rows: int, length: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(length)
        return torch.randint(3, WORDS, (rows, length), generator=generator).to(self.device)


def worst(found: list[Difference]) -> tuple[bool, str]:
    return all(f.within for f in found), str(max(found, key=lambda f: f.error))


def padded(to: Compared, kind: str, rows: int, length: int) -> dict[str, torch.Tensor]:
    """A batch whose rows have other lengths, padded."""
    words = to.words(rows, length)
    mask = (
        torch.arange(length, device=to.device)[None]
        < torch.arange(length, length - rows, -1, device=to.device)[:, None]
    )
    inputs = {"input_ids": words * mask, "attention_mask": mask.long()}
    labels = torch.arange(rows, device=to.device) % 3 if kind == "bert" else words.masked_fill(~mask, -100)
    return {**inputs, "labels": labels}


def lengths(to: Compared, kind: str, **plan: Any) -> tuple[bool, str]:
    models = to.pair(language_model(kind), **plan)
    found = []
    for length in (24, 17, 40, 33):
        inputs = padded(to, kind, 4, length)
        found.append(to.step(models, lambda m, inputs=inputs: m(**inputs).loss))
    ok, said = worst(found)
    return ok and len(models[1].zgraph.programs) == 2, f"{said}; {len(models[1].zgraph.programs)} programs of 4 lengths"


def buckets(to: Compared) -> tuple[bool, str]:
    pad = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return lengths(to, "llama", shapes={"buckets": [32, 64], "pad": pad})


def packed(to: Compared) -> tuple[bool, str]:
    models, words = to.pair(language_model("llama")), to.words(1, 48)
    places = torch.cat([torch.arange(n) for n in (9, 20, 4, 15)])[None].to(to.device)
    return worst([to.step(models, lambda m: m(input_ids=words, position_ids=places, labels=words).loss)])


def checkpointed(to: Compared) -> tuple[bool, str]:
    model: Any = language_model("llama")
    model.gradient_checkpointing_enable()
    models, inputs = to.pair(model.train()), padded(to, "llama", 4, 24)
    return worst([to.step(models, lambda m: m(**inputs).loss)])


def dropout(to: Compared) -> tuple[bool, str]:
    """The masks of plain PyTorch with the backend eager; of its own, which differ from call to call, with Inductor."""
    models, x = to.pair(perceptron()), torch.randn(16, 64, device=to.device)
    if to.backend == "eager":
        found = to.step(models, lambda m: m(x).square().mean())
        return found.exact, str(found)
    one, other = (models[1](x).detach() for _ in range(2))
    return not torch.equal(one, other), "masks of two calls differ"


def autocast(to: Compared) -> tuple[bool, str]:
    models, x = to.pair(perceptron().eval()), torch.randn(16, 64, device=to.device)

    def loss(model: Any) -> torch.Tensor:
        with torch.autocast(to.device.type, torch.bfloat16):
            return model(x).float().square().mean()

    return worst([to.step(models, loss, 2 * torch.finfo(torch.bfloat16).eps)])


def pictures(to: Compared) -> tuple[bool, str]:
    models = to.pair(Pictures().to(memory_format=torch.channels_last))
    x = torch.randn(8, 3, 32, 32, device=to.device).to(memory_format=torch.channels_last)
    return worst([to.step(models, lambda m: m(x).square().mean()) for _ in range(2)])


def recurrent(to: Compared) -> tuple[bool, str]:
    models, words = to.pair(Recurrent()), to.words(4, 12)
    return worst([to.step(models, lambda m: m(words).square().mean())])


def side_stream(to: Compared) -> tuple[bool, str]:
    """Steps on a stream of the user's, whose inputs are late on it."""
    models, found = to.pair(perceptron().eval()), []
    stream = torch.cuda.Stream(to.device)
    for _ in range(3):
        there = torch.randn(4096, 64).pin_memory()

        def loss(model: Any, there: torch.Tensor = there) -> torch.Tensor:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                x = there.to(to.device, non_blocking=True)
                torch.cuda._sleep(20_000_000)
                value = model(x * 2).square().mean()
                value.backward()
            torch.cuda.current_stream().wait_stream(stream)
            return value.detach().clone().requires_grad_()

        found.append(to.step(models, loss))
    return worst(found)


def torchs_optimizer(to: Compared) -> tuple[bool, str]:
    """A fused AdamW of torch's behind a GradScaler and clipping."""
    models, x = to.pair(perceptron().eval()), torch.randn(16, 64, device=to.device)
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        scaler = torch.amp.GradScaler(to.device.type)
        for _ in range(5):
            scaler.scale(model(x).square().mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    plain, mine = ({n: p.detach() for n, p in m.named_parameters()} for m in models)
    return worst([difference(mine, plain)])


def narrow(to: Compared, precision: str) -> tuple[bool, str]:
    """Eight steps of clipped AdamW in a precision, beside float32: losses differ by its rounding."""
    plain: Any = language_model("llama").to(to.device)
    mine: Any = copy.deepcopy(plain)
    plan = zgraph.Plan(backend=to.backend, precision=precision, optimizer=zgraph.AdamW(lr=1e-3), grad_clip=1.0)
    zgraph.compile(mine, plan)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    inputs, apart = padded(to, "llama", 4, 24), 0.0
    for _ in range(8):
        loss = plain(**inputs).loss
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        apart = max(apart, abs(float(mine.train_step(**inputs).loss) - float(loss)) / float(loss))
    eps = torch.finfo({"bf16": torch.bfloat16, "fp16": torch.float16}[precision]).eps
    return apart <= eps, f"losses differ by at most {apart:.1e}"


def evaluated(to: Compared) -> tuple[bool, str]:
    models, inputs = to.pair(language_model("gpt2").eval()), padded(to, "gpt2", 4, 24)
    found = []
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            plain, mine = ({"logits": m(**inputs).logits} for m in models)
        found.append(difference(mine, plain))
    return worst(found)


def elsewhere(to: Compared) -> tuple[bool, str]:
    """An input on the host is refused in words."""
    _, mine = to.pair(perceptron())
    try:
        mine(torch.randn(16, 64))
    except zgraph.errors.ZgraphError as error:
        return "x.to(device)" in str(error), str(error).splitlines()[-1].strip()
    return False, "it was taken"


def written(to: Compared) -> tuple[bool, str]:
    """A model that keeps a running mean by its own hand, and a loss of several parts."""

    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(64, 8)
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            self.mean.lerp_(y.detach().mean(0), 0.1)
            return F.smooth_l1_loss(y - self.mean, torch.zeros_like(y)) + y.logsumexp(-1).mean()

    models, x = to.pair(Running()), torch.randn(16, 64, device=to.device)
    return worst([to.step(models, lambda m: m(x)) for _ in range(3)])


CASES: dict[str, Callable[[Compared], tuple[bool, str]]] = {
    **{
        f"{kind}, lengths that vary": lambda to, kind=kind: lengths(to, kind)
        for kind in ("gpt2", "llama", "bert", "t5")
    },
    "llama, padded to buckets": buckets,
    "llama, packed documents": packed,
    "llama, checkpointed by the user": checkpointed,
    "dropout": dropout,
    "autocast to bfloat16": autocast,
    "convolutions and batch norms, channels last": pictures,
    "an LSTM": recurrent,
    "a buffer written by hand": written,
    "no_grad and inference_mode": evaluated,
    "eight steps in bf16, against float32": lambda to: narrow(to, "bf16"),
    "eight steps in fp16, against float32": lambda to: narrow(to, "fp16"),
    "an input on the host is refused": elsewhere,
    "a stream of the user's": side_stream,
    "torch's fused AdamW behind a GradScaler": torchs_optimizer,
}
ON_CUDA = ("an input on the host is refused", "a stream of the user's", "torch's fused AdamW behind a GradScaler")
