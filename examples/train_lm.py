"""Train a small language model with zgraph: plain PyTorch, plus one line.

The model is a byte-level decoder in the style of Llama (RMSNorm, rotary positions, grouped-query
attention, SwiGLU; about one million parameters). The text is the language reference that ships with
Python (`pydoc_data.topics`), so nothing is downloaded. The last tenth of it is held back for validation.

    python examples/train_lm.py                                   # one process, CPU or GPU
    torchrun --nproc-per-node 2 examples/train_lm.py              # ZeRO-3 on two ranks
    torchrun --nproc-per-node 2 examples/train_lm.py --plan examples/plans/zero1.toml

Neither the model nor the loop knows how it is distributed. `zgraph.compile` takes the model and a
plan; what comes back is the same module, whose parameters are now shards, and the usual loop of
`loss.backward()`, `clip_grad_norm_` and `torch.optim.AdamW` trains it. A plan with an optimizer does all of that in
one call, `model.train_step(…)`, and in another precision if it says so.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import pydoc_data.topics
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zgraph

# ---------------------------------------------------------------------------------------------
# The model: plain PyTorch.


@dataclass(frozen=True)
class Config:
    """Sizes of the decoder. The vocabulary is the 256 values of a byte."""

    vocab: int = 256
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 448
    max_seq: int = 128
    tied: bool = False


@dataclass
class LMOutput:
    """`loss` where targets were given, else `logits`: training never keeps the logits alive."""

    loss: Tensor | None = None
    logits: Tensor | None = None


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (x.float() * scale).to(x.dtype) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al., 2021) on `x` of [batch, heads, seq, head_dim]."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.head_dim = config.dim // config.heads
        self.wq = nn.Linear(config.dim, self.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, self.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, self.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(self.heads * self.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q = self.wq(x).view(batch, seq, self.heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.kv_heads != self.heads:
            k = k.repeat_interleave(self.heads // self.kv_heads, dim=1)
            v = v.repeat_interleave(self.heads // self.kv_heads, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, seq, -1))


class MLP(nn.Module):
    """SwiGLU (Shazeer, 2020)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.dim)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class LM(nn.Module):
    """`model(tokens, targets)` gives the mean loss; `model(tokens)` gives logits of [batch, seq, vocab]."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        for block in self.layers:  # keeps the residual stream's size independent of the depth (GPT-2)
            for linear in (block.attention.wo, block.mlp.down):
                nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * config.layers))
        if config.tied:
            self.head.weight = self.embed.weight

        half = config.dim // config.heads // 2
        angles = torch.outer(torch.arange(config.max_seq), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> LMOutput:
        seq = tokens.shape[1]
        cos, sin = self.cos[:seq], self.sin[:seq]
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        if targets is None:
            return LMOutput(logits=logits)
        return LMOutput(loss=F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()))


def factory() -> tuple[LM, dict[str, Tensor]]:
    """The model and one training batch: what `zgraph dump train_lm` looks at."""
    torch.manual_seed(0)
    model = LM(Config())
    tokens, targets = Text.load().batch(seed=0, step=0, batch=8, seq=model.config.max_seq, ranks=Ranks())
    return model, {"tokens": tokens, "targets": targets}


# ---------------------------------------------------------------------------------------------
# The data, and who gets which part of it.


@dataclass(frozen=True)
class Ranks:
    """This process's place in the job.

    `data_rank` and `data_world` count only the mesh dimensions that split the batch: ranks that differ in
    another dimension get the same rows.
    """

    world: int = 1
    data_rank: int = 0
    data_world: int = 1

    @classmethod
    def of(cls, mesh: Any) -> Ranks:
        """Read it from `model.zgraph.mesh` (None in one process with no process group)."""
        if mesh is None:
            return cls()
        data_rank, data_world = 0, 1
        for dim, name in enumerate(mesh.mesh_dim_names):
            if name in ("replicate", "dp"):
                data_rank = data_rank * mesh.size(dim) + mesh.get_local_rank(name)
                data_world *= mesh.size(dim)
        return cls(mesh.size(), data_rank, data_world)

    def mean(self, value: Tensor) -> float:
        """The mean of a scalar over all ranks. Every rank has to call it."""
        value = value.detach().clone()
        if self.world > 1:
            dist.all_reduce(value)
        return value.item() / self.world


@dataclass(frozen=True)
class Text:
    """The corpus as bytes, cut in two: `train`, and the last tenth as `validation`."""

    train: Tensor
    validation: Tensor

    @classmethod
    def load(cls) -> Text:
        topics: dict[str, str] = pydoc_data.topics.topics
        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        cut = len(data) * 9 // 10
        return cls(data[:cut], data[cut:])

    def batch(self, *, seed: int, step: int, batch: int, seq: int, ranks: Ranks) -> tuple[Tensor, Tensor]:
        """This rank's rows of the global batch of a step.

        The global batch depends on the seed and the step alone: a run that is resumed sees the rows it would
        have seen, and two ranks of 8 rows see together what one process of 16 rows sees.
        """
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.train) - seq, (batch * ranks.data_world,), generator=generator)
        mine = starts[ranks.data_rank * batch : (ranks.data_rank + 1) * batch]
        return windows(self.train, mine, seq)

    def validation_batches(
        self, *, batch: int, seq: int, ranks: Ranks, count: int = 256
    ) -> list[tuple[Tensor, Tensor]]:
        """This rank's share of `count` windows, evenly spaced over the validation text.

        All batches have one shape, so that one program serves them. Where `batch` times the ranks doesn't
        divide `count`, the first windows come a second time to fill the last batches.
        """
        starts = torch.linspace(0, len(self.validation) - seq - 1, count).long()
        together = batch * ranks.data_world
        rounds = math.ceil(count / together)
        starts = starts[torch.arange(rounds * together) % count].view(rounds, ranks.data_world, batch)
        return [windows(self.validation, row, seq) for row in starts[:, ranks.data_rank]]


def windows(data: Tensor, starts: Tensor, seq: int) -> tuple[Tensor, Tensor]:
    """Tokens of [len(starts), seq], and as targets the same windows one byte later."""
    rows = data[starts[:, None] + torch.arange(seq + 1)].long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


# ---------------------------------------------------------------------------------------------
# Training: a user's own loop.


def learning_rate(step: int, steps: int, warmup: int) -> float:
    """The factor on the peak rate at `step` (from 0): linear warm-up, then half a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))


Step = Callable[[Tensor, Tensor], tuple[Tensor, float]]


def own_step(model: nn.Module, args: argparse.Namespace) -> Step:
    """A step as one writes it without zgraph: the loss and the learning rate of one batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate(step, args.steps, min(args.warmup, args.steps))
    )

    def step(tokens: Tensor, targets: Tensor) -> tuple[Tensor, float]:
        loss = model(tokens, targets).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        rate = schedule.get_last_lr()[0]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        return loss.detach(), rate

    return step


def plans_step(model: nn.Module) -> Step:
    """The same by a plan that has an optimizer: one call, in the plan's precision, with its schedule and clipping."""

    def step(tokens: Tensor, targets: Tensor) -> tuple[Tensor, float]:
        loss = model.train_step(tokens, targets).loss
        return loss.float(), model.zgraph.optimizer.param_groups[0]["lr"]

    return step


@torch.no_grad()
def validate(model: nn.Module, batches: list[tuple[Tensor, Tensor]], ranks: Ranks) -> float:
    """Mean validation loss over all ranks, in nats a byte."""
    model.eval()
    loss = torch.stack([model(tokens, targets).loss for tokens, targets in batches]).mean()
    model.train()
    return ranks.mean(loss)


TEMPERATURE = 0.7


@torch.no_grad()
def generate(model: nn.Module, prompt: str, count: int, *, seq: int, device: torch.device, seed: int) -> str:
    """`prompt` and `count` bytes after it.

    The context always has the shape [1, seq], padded on the right (attention is causal: no position sees the
    padding), so that a single program makes every byte. Weights are sharded, therefore all ranks call this
    together; the same seed makes them draw the same bytes.
    """
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt.encode())
    for _ in range(count):
        context = text[-seq:]
        tokens = torch.tensor([context + [0] * (seq - len(context))], device=device)
        logits = model(tokens).logits[0, len(context) - 1].float().cpu()
        text.append(int(torch.multinomial(F.softmax(logits / TEMPERATURE, dim=-1), 1, generator=generator)))
    model.train()
    return bytes(text).decode(errors="replace")


def pick_device(name: str) -> torch.device:
    """The device of this rank. `auto` takes CUDA where each rank of this machine has a GPU of its own."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= local_world else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


@dataclass
class Record:
    """What a run leaves behind; `--json` writes it. Equal on every rank, but for the times."""

    args: dict[str, Any]
    world: int
    device: str
    parameters: int
    train: list[dict[str, float]]
    validation: list[dict[str, float]]
    seconds: float = 0.0
    sample: str = ""


def train(args: argparse.Namespace, say: Callable[[str], None]) -> Record:
    started = time.perf_counter()
    device = pick_device(args.device)
    torch.manual_seed(args.seed)  # the same weights on every rank, whatever the number of ranks
    model = LM(Config(max_seq=args.seq, tied=args.tied)).to(device)
    parameters = sum(p.numel() for p in model.parameters())

    plan = zgraph.Plan.load(args.plan) if args.plan else zgraph.Plan(zero=3)
    model = zgraph.compile(model, plan)

    ranks = Ranks.of(model.zgraph.mesh)
    step_of = plans_step(model) if plan.optimizer is not None else own_step(model, args)

    text = Text.load()
    held_back = [
        (tokens.to(device), targets.to(device))
        for tokens, targets in text.validation_batches(batch=args.batch, seq=args.seq, ranks=ranks)
    ]
    record = Record(vars(args), ranks.world, str(device), parameters, train=[], validation=[])
    say(
        f"{parameters:,} parameters on {ranks.world} rank(s), {device.type}; "
        f"{len(text.train):,} bytes of text, {len(text.validation):,} held back; "
        f"{args.batch * ranks.data_world} x {args.seq} tokens a step"
    )

    def report_validation(step: int) -> None:
        loss = validate(model, held_back, ranks)
        record.validation.append({"step": step, "loss": loss})
        say(f"step {step:4d}  validation loss {loss:.3f}  ({time.perf_counter() - started:.0f} s)")

    say("compiling ...")
    report_validation(0)
    model.train()
    losses: list[Tensor] = []
    clock = time.perf_counter()
    for step in range(1, args.steps + 1):
        if args.then and step == args.then_after + 1:
            model.zgraph.recompile(zgraph.Plan.load(args.then))  # (weights and states go on)
        tokens, targets = text.batch(seed=args.seed, step=step, batch=args.batch, seq=args.seq, ranks=ranks)
        loss, rate = step_of(tokens.to(device), targets.to(device))
        losses.append(loss)

        # The first step stands alone: it compiles, and would spoil the tokens per second of its interval.
        if step == 1 or step % args.log_every == 0 or step == args.steps:
            mean = ranks.mean(torch.stack(losses).mean())
            seconds = time.perf_counter() - clock
            speed = len(losses) * args.batch * ranks.data_world * args.seq / seconds
            record.train.append({"step": step, "loss": mean, "lr": rate, "tokens_per_second": speed})
            pace = f"{seconds:.1f} s, compilation included" if step == 1 else f"{speed:,.0f} tokens/s"
            say(f"step {step:4d}  train loss {mean:.3f}  lr {rate:.2e}  {pace}")
            losses.clear()
            clock = time.perf_counter()
        if step % args.eval_every == 0 or step == args.steps:
            report_validation(step)
            clock = time.perf_counter()

    if args.sample:
        record.sample = generate(model, "The ", args.sample, seq=args.seq, device=device, seed=args.seed)
    record.seconds = time.perf_counter() - started

    if args.sample:
        say(f"\n--- a sample\n{record.sample}\n---\n")
    if args.report:
        say(str(model.zgraph.report()))
    first, last = record.validation[0]["loss"], record.validation[-1]["loss"]
    say(f"validation loss {first:.3f} -> {last:.3f} in {args.steps} steps, {record.seconds:.0f} s in all")
    return record


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level language model of a million parameters on Python's documentation.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--plan", type=Path, help="a plan file (TOML, YAML or JSON); without one: ZeRO-3")
    parser.add_argument("--then", type=Path, metavar="PLAN", help="another plan file, to go on with")
    parser.add_argument("--then-after", type=int, default=100, metavar="STEPS", help="after which it is taken")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--seq", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=20, help="steps of linear warm-up")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--tied", action="store_true", help="the head shares the embedding's weight")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the batches and the sample")
    parser.add_argument("--log-every", type=int, default=20, metavar="STEPS", help="between progress lines")
    parser.add_argument("--eval-every", type=int, default=100, metavar="STEPS", help="between validations")
    parser.add_argument("--sample", type=int, default=300, metavar="BYTES", help="to generate at the end")
    parser.add_argument("--report", action="store_true", help="print what zgraph made of the model")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the loss curve here")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    args = parser.parse_args(argv)
    for name in ("batch", "seq", "log_every", "eval_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    for name in ("steps", "warmup", "sample"):
        if getattr(args, name) < 0:
            parser.error(f"--{name} must not be negative")
    if args.plan and not args.plan.is_file():
        parser.error(f"--plan: no such file: {args.plan}")
    return args


# ---------------------------------------------------------------------------------------------
# The script: one voice, and a clean end on every rank.

INTERRUPTED = 130  # what a shell reports for a program that ended on Ctrl-C


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    first = int(os.environ.get("RANK", 0)) == 0

    def say(line: str) -> None:
        if first and not args.quiet:
            print(line, flush=True)

    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    if first and not args.quiet:
        logging.getLogger("zgraph").setLevel(logging.INFO)
    try:
        try:
            record = train(args, say)
        except Exception:
            # Where Ctrl-C reached another rank first, this one sees a broken connection before its signal.
            if dist.is_initialized():
                time.sleep(1.0)
            raise
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # torchrun repeats the terminal's signal
        if first:
            print("\nstopped by Ctrl-C", file=sys.stderr, flush=True)
        return INTERRUPTED
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if args.json and first:
        args.json.write_text(json.dumps(asdict(record), indent=1, default=str) + "\n")
    return 0


if __name__ == "__main__":
    code = main()
    if code == INTERRUPTED:
        # A collective that Ctrl-C cut short may still have a thread; Python's own way out would abort on it.
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
