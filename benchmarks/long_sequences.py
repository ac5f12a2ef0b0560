"""What sparse attention makes possible: long sequences in little memory, and what a model learns with it.

    OMP_NUM_THREADS=1 python benchmarks/long_sequences.py [--parts step budget learn] [--steps 600] [--seeds 2] [--write]

    step     a training step of the example's model (examples/train_lm.py) with one sequence of 65,536 tokens: its peak, beside 4 GiB
    budget   a BERT that writes its attention out: the longest sequence that a `memory_budget` allows with whole attention, and a step with one ten
             times as long with a BigBird layout, by the same budget
    learn    validation losses at length 2,048 after some hundred steps on the example's text, of whole and of sparse attention: a ModernBERT that
             fills in masked bytes with BigBird, and the example's causal model with Fixed. (A BERT, which has learned positions, needs many thousand
             steps until it looks at neighbours.)

Peaks are of all tensors at once, parameters and states of the optimizer among them, as torch's allocator has them. Each part runs in a process of
its own. `--write` puts what they print, with date and conditions, into benchmarks/results/long_sequences.md.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import machine
import torch

import zgraph
from zgraph.errors import ZgraphError
from zgraph.runtime import allocations

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import train_lm

RESULT = Path(__file__).parent / "results" / "long_sequences.md"
PARTS = ("step", "budget", "learn")
LONG, GIB = 65_536, 4
BUDGET, TIMES = 192, 10
LENGTH, GOAL = 2048, 0.03
BYTES, MASK = 256, 256


def peak_of_step(model: Any, **inputs: torch.Tensor) -> tuple[int, float, float]:
    """Return (bytes at the peak, seconds, loss) of a second training step."""
    model.train_step(**inputs)
    allocations.reset_peak()
    start = time.perf_counter()
    loss = model.train_step(**inputs).loss
    return allocations.peak(), time.perf_counter() - start, float(loss)


def written_out_bert(length: int) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=BYTES + 1,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=192,
        max_position_embeddings=length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    return transformers.BertForMaskedLM(config)


def modern_bert() -> Any:
    import transformers

    config = transformers.ModernBertConfig(
        vocab_size=BYTES + 1,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
        global_attn_every_n_layers=1,
        pad_token_id=MASK,
        cls_token_id=None,
        sep_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.ModernBertForMaskedLM(config)


# -- parts ------------------------------------------------------------------------------------------------------------
def step() -> Iterator[str]:
    """The example's model with one long sequence."""
    torch.manual_seed(0)
    model = train_lm.LM(train_lm.Config(max_seq=LONG))
    layout = zgraph.Fixed(block=128, num_local_blocks=8, num_global_blocks=1, attention="unidirectional")
    plan = zgraph.Plan(optimizer=zgraph.AdamW(lr=3e-3), attention={"*": layout}, memory_budget=f"{GIB}GiB")
    tokens, targets = train_lm.Text.load().batch(seed=0, step=0, batch=1, seq=LONG, ranks=train_lm.Ranks())
    peak, seconds, loss = peak_of_step(zgraph.compile(model, plan), tokens=tokens, targets=targets)
    yield (
        f"- One sequence of {LONG:,} tokens, the example's model, `Fixed` with {layout.num_local_blocks} local blocks of {layout.block}: "
        f"a step takes {seconds:.0f} s; its peak is {peak / 2**20:,.0f} MiB (goal: under {GIB * 1024:,}); loss {loss:.3f}."
    )


def budget() -> Iterator[str]:
    """The longest sequence by a budget, and one ten times as long."""
    layout = zgraph.BigBird(block=64, num_random_blocks=2, num_sliding_window_blocks=3, num_global_blocks=1)

    def compiled(length: int, sparse: bool, backend: str) -> tuple[Any, dict[str, torch.Tensor]]:
        plan = zgraph.Plan(
            optimizer=zgraph.AdamW(lr=1e-3),
            attention={"*": layout} if sparse else {},
            memory_budget=f"{BUDGET}MiB",
            backend=backend,
        )
        tokens = torch.randint(BYTES, (1, length))
        return zgraph.compile(written_out_bert(length), plan), {"input_ids": tokens, "labels": tokens}

    def fits(length: int) -> bool:
        model, inputs = compiled(length, sparse=False, backend="eager")
        try:
            model.train_step(**inputs)
        except ZgraphError:
            return False
        return True

    longest = 256
    while fits(longest + 256):
        longest += 256
    for length, sparse in ((longest, False), (TIMES * longest, True)):
        model, inputs = compiled(length, sparse, "inductor")
        peak, seconds, _ = peak_of_step(model, **inputs)
        name = "`BigBird`" if sparse else "whole attention, the longest (in steps of 256) that is not refused"
        yield f"- {length:,} tokens by a budget of {BUDGET} MiB, {name}: peak {peak / 2**20:,.0f} MiB, {seconds:.1f} s a step."


def learn(steps: int, seeds: int) -> Iterator[str]:
    """Losses of whole and sparse attention after the same steps."""
    layouts = {
        "causal": zgraph.Fixed(block=64, num_local_blocks=4, num_global_blocks=1, attention="unidirectional"),
        "ModernBERT": zgraph.BigBird(block=64, num_random_blocks=3, num_sliding_window_blocks=3, num_global_blocks=2),
    }
    for kind, layout in layouts.items():
        losses = {
            name: [_loss_after(kind, attention, steps, seed) for seed in range(seeds)]
            for name, attention in (("whole", {}), ("sparse", {"*": layout}))
        }
        gap = statistics.mean(losses["sparse"]) - statistics.mean(losses["whole"])
        told = {name: ", ".join(f"{x:.3f}" for x in values) for name, values in losses.items()}
        yield (
            f"- {kind}, length {LENGTH:,}, {steps} steps, `{type(layout).__name__}` beside whole attention: validation loss {told['sparse']} beside "
            f"{told['whole']}, in the mean {gap:+.3f} (goal: at most {GOAL})."
        )


def _loss_after(kind: str, attention: dict[str, Any], steps: int, seed: int) -> float:
    torch.manual_seed(seed)
    text = train_lm.Text.load()
    if kind == "causal":
        model: Any = train_lm.LM(train_lm.Config(max_seq=LENGTH, dim=64, hidden=192, layers=3))
    else:
        model = modern_bert()
    optimizer = zgraph.AdamW(lr=3e-3, betas=(0.9, 0.95))
    schedule = zgraph.Cosine(total_steps=steps, warmup_steps=max(1, steps // 10))
    model = zgraph.compile(model, zgraph.Plan(optimizer=optimizer, lr_schedule=schedule, attention=attention))
    for at in range(steps):
        rows = text.batch(seed=seed, step=at, batch=2, seq=LENGTH, ranks=train_lm.Ranks())
        model.train_step(**_inputs(kind, *rows, seed=seed * 1_000_003 + at))
    rows_of = text.validation_batches(batch=2, seq=LENGTH, ranks=train_lm.Ranks(), count=32)
    model.eval()
    with torch.no_grad():
        losses = [float(model(**_inputs(kind, *rows, seed=at)).loss) for at, rows in enumerate(rows_of)]
    return statistics.mean(losses)


def _inputs(kind: str, tokens: torch.Tensor, targets: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    if kind == "causal":
        return {"tokens": tokens, "targets": targets}
    hidden = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed)) < 0.15
    return {"input_ids": tokens.masked_fill(hidden, MASK), "labels": tokens.masked_fill(~hidden, -100)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    parser.add_argument("--one", choices=PARTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        torch.set_num_threads(1)
        allocations.count()
        lines = {"step": step, "budget": budget, "learn": lambda: learn(given.steps, given.seeds)}[given.one]()
        for line in lines:
            print(line, flush=True)
        return
    text = [machine.conditions() + ", one thread, float32, Inductor.", ""]
    for part in given.parts:
        command = [sys.executable, __file__, "--one", part, "--steps", str(given.steps), "--seeds", str(given.seeds)]
        text += subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
        print(text[-1], flush=True)
    if given.write:
        RESULT.write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
