"""What one program for every length costs: beside programs of one size each, and beside plain PyTorch in a Trainer.

    OMP_NUM_THREADS=1 python benchmarks/lengths.py [--layers 4] [--pairs 40] [--parts compile step new peak budget packed trainer at] [--write]

A Llama of width 256 (8 heads, 4 of keys, vocabulary 1,000), 2 rows, Inductor, one process. All seconds are the processor's, of the process and of
the compilers that it starts: other load on the machine changes them less than the clock's. Each part is measured in a process of its own.

    compile   from the first call to the end of its backward with empty caches: sizes declared as symbols / shapes="static"
    step      a step at one size by the symbolic program, the static one of that size, and a hot one (shapes.hot): medians of the ratios of steps
              that follow each other, in turns
    new       the first step at a length that was not called for before / the second one, of several lengths
    budget    the most bytes in a step at several lengths up to the maximum / a memory_budget of 0.9 of what a step at the maximum takes without
    packed    64 documents in 4 rows, computed document by document: a step / one of 64 rows padded to the longest, in turns, of equal losses; and the
              bytes that both take, and plain PyTorch, which makes the documents' mask
    peak      the most bytes that torch's allocator holds in a step at the declared maximum / what the forecast says
    at        seconds of `Program.at(sizes)`, which gives a static program: of Llama's and GPT-2's of 4 and of 12 layers (width 32, eager), as
              captured, forward and backward, the median of several sizes each
    trainer   transformers' Trainer with 10 steps of texts of 5 to 120 words, and an evaluation: after a run to warm up, compiled / plain

`--write` puts the rows, with day and commit, into the table of benchmarks/results/lengths.md.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import machine

RESULT = Path(__file__).parent / "results" / "lengths.md"
GOALS = {
    "compile": ("compile time, symbolic / static", 1.3),
    "step": ("a step's time, symbolic / static", 1.05),
    "new": ("the first step at a new length / the second", 2.0),
    "peak": ("measured peak at the largest sizes / forecast, off by", 0.03),
    "budget": ("measured peak at any size / memory_budget", 1.0),
    "packed": ("a step of packed documents / of padded ones", 1.0),
    "at": ("seconds of Program.at(sizes), the slowest of all programs", 0.2),
    "trainer": ("a Trainer's total time after a run to warm up, compiled / plain", 1.3),
}
ROWS, LENGTH, MAX = 2, 64, 256
ALLOWED, BUDGETED = 0.9, (33, LENGTH, 130, 200, MAX)
DOCUMENTS, PACKED_ROWS, PACKED_LENGTH = 64, 4, 1024
NEW = (20, 33, 57, 96, 128, 47, 81, 110, 150, 200)


def cpu() -> float:
    """Seconds of the processor so far, of this process and of those that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def llama(layers: int) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=MAX,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def compiled(layers: int, **fields: Any) -> Any:
    import zgraph

    sizes = {0: "batch", 1: zgraph.Size("seq", max=MAX, typical=LENGTH)}
    if fields.get("shapes") != "static":
        fields["dynamic"] = {"input_ids": sizes, "labels": {0: "batch", 1: "seq"}}
    return zgraph.compile(llama(layers), zgraph.Plan(**fields))


def step_of(model: Any, length: int = LENGTH, rows: int = ROWS) -> Callable[[], float]:
    """What runs a forward and its backward, and gives the seconds that they took."""
    import torch

    tokens = torch.randint(1000, (rows, length), generator=torch.Generator().manual_seed(length))

    def step() -> float:
        begin = cpu()
        model(input_ids=tokens, labels=tokens).loss.backward()
        seconds = cpu() - begin
        model.zero_grad(set_to_none=True)
        return seconds

    return step


# -- the parts, each in a process of its own ----------------------------------------------------------------------------
def compile_one(layers: int, shapes: str) -> dict[str, Any]:
    return {"seconds": step_of(compiled(layers, shapes=shapes))()}


def steps(layers: int, pairs: int) -> dict[str, Any]:
    hot = {"hot": [{"batch": ROWS, "seq": LENGTH}]}
    ways = {
        "symbolic": step_of(compiled(layers)),
        "static": step_of(compiled(layers, shapes="static")),
        "hot": step_of(compiled(layers, shapes=hot)),
    }
    for step in ways.values():
        for _ in range(5):
            step()
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(pairs):
        turn = list(ways) if number % 2 else list(reversed(ways))
        for name in turn:
            found[name].append(ways[name]())
    against = lambda name: statistics.median(a / b for a, b in zip(found[name], found["static"], strict=True))  # noqa: E731
    return {
        "ratio": against("symbolic"),
        "hot": against("hot"),
        **{f"{name} ms": 1000 * statistics.median(seconds) for name, seconds in found.items()},
    }


def new_lengths(layers: int) -> dict[str, Any]:
    model = compiled(layers)
    for _ in range(3):
        step_of(model)()
    ratios = {}
    for length in NEW:
        step = step_of(model, length)
        first = step()
        ratios[length] = first / step()
    return {"ratio": max(ratios.values()), "median": statistics.median(ratios.values()), "lengths": ratios}


def peaks(layers: int, lengths: Sequence[int], **fields: Any) -> tuple[dict[int, int], int]:
    """Return (the most bytes that the allocator holds in a step, by length, and what the forecast says of the largest sizes)."""
    from zgraph.runtime import allocations

    allocations.count()
    import torch

    import zgraph
    from zgraph.passes.analysis.simulator import simulate

    dynamic = {
        "input_ids": {0: "batch", 1: "seq"},
        "labels": {0: zgraph.Size("batch", max=ROWS), 1: zgraph.Size("seq", max=MAX)},
    }
    gc.collect()
    before = allocations.live()
    model = zgraph.compile(llama(layers), zgraph.Plan(dynamic=dynamic, optimizer=zgraph.SGD(lr=1e-3), **fields))
    found = {}
    for length in lengths:
        tokens = torch.randint(1000, (ROWS, length))
        model.train_step(input_ids=tokens, labels=tokens)
        gc.collect()
        allocations.reset_peak()
        model.train_step(input_ids=tokens, labels=tokens)
        found[length] = allocations.peak() - before
    (step,) = model.zgraph.programs.values()
    said = simulate(step.history().program, model.zgraph.runtime.costs)
    return found, sum(said.peak.values()) + step.outside.held


def peak(layers: int) -> dict[str, Any]:
    found, forecast = peaks(layers, (LENGTH, MAX))
    return {
        "peak": found[MAX],
        "at_typical": found[LENGTH],
        "forecast": forecast,
        "ratio": abs(found[MAX] / forecast - 1),
    }


def budget(layers: int) -> dict[str, Any]:
    _, forecast = peaks(layers, (LENGTH,))
    allowed = int(ALLOWED * forecast)
    found, _ = peaks(layers, BUDGETED, memory_budget=allowed)
    return {"ratio": max(found.values()) / allowed, "budget": allowed, "forecast": forecast, "peaks": found}


def documents() -> tuple[list[int], dict[str, Any], dict[str, Any]]:
    """Return (the documents' lengths, a batch of them packed into rows, and one of a row for each, padded)."""
    import torch

    draw = random.Random(0)
    rows = []
    for _ in range(PACKED_ROWS):
        cuts = sorted(draw.sample(range(1, PACKED_LENGTH), DOCUMENTS // PACKED_ROWS - 1))
        rows.append([b - a for a, b in zip([0, *cuts], [*cuts, PACKED_LENGTH], strict=True)])
    lengths = [n for row in rows for n in row]
    words = torch.randint(1, 1000, (PACKED_ROWS, PACKED_LENGTH), generator=torch.Generator().manual_seed(0))
    places = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    labels = words.masked_fill(places == 0, -100)
    pad = lambda x, by: torch.nn.utils.rnn.pad_sequence(x.flatten().split(lengths), True, by)  # noqa: E731
    padded = {"input_ids": pad(words, 0), "labels": pad(labels, -100), "attention_mask": pad(words.clamp(max=1), 0)}
    return lengths, {"input_ids": words, "labels": labels, "position_ids": places}, padded


def packed(layers: int, turns: int) -> dict[str, Any]:
    from zgraph.runtime import allocations

    allocations.count()
    import zgraph

    lengths, together, padded = documents()
    ways = {
        "packed": (zgraph.compile(llama(layers), zgraph.Plan()), together),
        "masked": (llama(layers), together),
        "padded": (zgraph.compile(llama(layers), zgraph.Plan()), padded),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    most, losses = {}, {}
    for turn in range(1 + turns):
        for name, (model, batch) in ways.items():
            gc.collect()
            before, begin = allocations.live(), cpu()
            allocations.reset_peak()
            loss = model(**batch).loss
            loss.backward()
            if turn:  # (the first one compiles)
                seconds[name].append(cpu() - begin)
            most[name], losses[name] = allocations.peak() - before, float(loss.detach())
            model.zero_grad(set_to_none=True)
    worst = max(abs(loss / losses["masked"] - 1) for loss in losses.values())
    assert worst < 1e-5, losses
    ratios = [a / b for a, b in zip(seconds["packed"], seconds["padded"], strict=True)]
    times = {name: statistics.median(each) for name, each in seconds.items()}
    return {"ratio": statistics.median(ratios), "seconds": times, "peaks": most, "longest": max(lengths)}


def trainer(layers: int) -> dict[str, Any]:
    import torch
    import transformers

    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    draw = random.Random(0)
    rows = []
    for _ in range(60):
        words = [draw.randrange(1000) for _ in range(draw.randint(5, 120))]
        rows.append({"input_ids": words, "labels": words})

    def collated(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in batch)
        pad = lambda name, by: torch.tensor([row[name] + [by] * (longest - len(row[name])) for row in batch])  # noqa: E731
        return {
            "input_ids": pad("input_ids", 0),
            "labels": pad("labels", -100),
            "attention_mask": (pad("labels", -100) != -100).long(),
        }

    def seconds(model: Any, folder: str, seed: int) -> float:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            max_steps=10,
            eval_strategy="steps",
            eval_steps=10,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=seed,
            data_seed=seed,
        )
        made = transformers.Trainer(
            model, arguments, train_dataset=rows, eval_dataset=rows[:18], data_collator=collated
        )
        begin = cpu()
        made.train()
        return cpu() - begin

    import zgraph

    models = {"plain": llama(layers), "compiled": zgraph.compile(llama(layers), zgraph.Plan())}
    with tempfile.TemporaryDirectory() as folder:
        first = {name: seconds(model, folder, 0) for name, model in models.items()}
        later = {name: [] for name in models}
        for seed in range(1, 6):
            for name, model in models.items():
                later[name].append(seconds(model, folder, seed))
    ratios = [a / b for a, b in zip(later["compiled"], later["plain"], strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "first": first,
        "later": {name: statistics.median(found) for name, found in later.items()},
        "programs": list(models["compiled"].zgraph.programs),
    }


def static_programs() -> dict[str, Any]:
    import torch
    import transformers as t

    import zgraph

    sizes = {0: "batch", 1: "seq"}
    seconds: dict[str, float] = {}
    for depth in (4, 12):
        words = {"vocab_size": 100, "use_cache": False, "bos_token_id": 1, "eos_token_id": 1}
        width = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
        models = {
            "GPT-2": t.GPT2LMHeadModel(t.GPT2Config(n_layer=depth, n_embd=32, n_head=2, n_positions=MAX, **words)),
            "Llama": t.LlamaForCausalLM(t.LlamaConfig(num_hidden_layers=depth, **width, **words)),
        }
        for name, plain in models.items():
            model = zgraph.compile(plain, zgraph.Plan(backend="eager"), dynamic={"input_ids": sizes, "labels": sizes})
            tokens = torch.randint(100, (ROWS, 16))
            model(input_ids=tokens, labels=tokens).loss.backward()
            (step,) = model.zgraph.programs.values()
            parts = step.parts()
            for part, program in (
                ("captured", step.captured),
                ("forward", parts.forward),
                ("backward", parts.backward),
            ):
                times = []
                for length in NEW[:5]:
                    begin = cpu()
                    program.at({"batch": 3, "seq": length})
                    times.append(cpu() - begin)
                seconds[f"{name} {depth} {part}"] = statistics.median(times)
    return {"ratio": max(seconds.values()), "seconds": seconds}


# -- all of it ----------------------------------------------------------------------------------------------------------
def in_own_process(part: str, layers: int, pairs: int, folder: str, *more: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--layers", str(layers), "--pairs", str(pairs), "--one", part, *more]
    folders = {"ZGRAPH_CACHE": f"{folder}/zgraph", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | folders)
    return json.loads(run.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def measured(part: str, layers: int, pairs: int, folder: str) -> dict[str, Any]:
    if part != "compile":
        return in_own_process(part, layers, pairs, folder)
    found = {}
    for shapes in ("auto", "static"):  # (each with folders that are empty)
        with tempfile.TemporaryDirectory() as own:
            found[shapes] = in_own_process(part, layers, pairs, own, shapes)["seconds"]
    return {"ratio": found["auto"] / found["static"], **found}


def shown(part: str, found: dict[str, Any]) -> str:
    """What is behind a ratio, in words."""
    if part == "compile":
        return f"{found['auto']:.1f} s / {found['static']:.1f} s"
    if part == "step":
        times = ", ".join(f"{name} {found[f'{name} ms']:.1f} ms" for name in ("symbolic", "static", "hot"))
        return f"{times}; hot / static {found['hot']:.3f}"
    if part == "new":
        return f"the largest of {len(found['lengths'])} lengths; their median {found['median']:.2f}"
    if part == "peak":
        most, said, typical = (f"{found[name] / 2**20:.1f} MiB" for name in ("peak", "forecast", "at_typical"))
        return f"{most}, forecast {said}; {typical} at length {LENGTH}"
    if part == "budget":
        by_length = ", ".join(f"{most / 2**20:.1f} MiB at {length}" for length, most in found["peaks"].items())
        return f"{by_length}; budget {found['budget'] / 2**20:.1f} MiB, without one {found['forecast'] / 2**20:.1f} MiB"
    if part == "packed":
        words = {"packed": "packed", "padded": f"padded to {found['longest']}", "masked": "plain PyTorch, packed"}
        each = (
            f"{word} {found['seconds'][name]:.2f} s, {found['peaks'][name] / 2**20:.0f} MiB"
            for name, word in words.items()
        )
        return "; ".join(each)
    if part == "at":
        return ", ".join(f"{program} {seconds:.3f} s" for program, seconds in found["seconds"].items())
    later, first = found["later"], found["first"]
    return (
        f"{later['compiled']:.2f} s / {later['plain']:.2f} s (the run to warm up: {first['compiled']:.1f} s / {first['plain']:.1f} s); "
        f"programs {', '.join(found['programs'])}"
    )


def row_of(part: str, result: dict[str, Any], commit: str) -> str:
    what, goal = GOALS[part]
    verdict = "met" if result["ratio"] <= goal else "missed"
    of, day = shown(part, result), datetime.date.today()
    return f"| {what} | {goal} | {result['ratio']:.3f} | {verdict} | {of} | {day}, {commit} |"


def table(rows: Sequence[str]) -> str:
    return "\n".join(
        ["| measured | goal, at most | found | | of | when, at which commit |", "|---|---:|---:|---|---|---|", *rows]
    )


def merged(text: str, rows: Sequence[str]) -> list[str]:
    """The rows of the results' page with these, in place of those of the same parts, in the order of the parts."""
    by_name = {row.split("|")[1].strip(): row for row in [*text.splitlines(), *rows] if row.startswith("| ")}
    return [by_name[what] for what, _ in GOALS.values() if what in by_name]


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "step": lambda args: steps(args.layers, args.pairs),
    "new": lambda args: new_lengths(args.layers),
    "peak": lambda args: peak(args.layers),
    "budget": lambda args: budget(args.layers),
    "packed": lambda args: packed(args.layers, max(3, args.pairs // 8)),
    "trainer": lambda args: trainer(args.layers),
    "at": lambda args: static_programs(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=40, help="steps that are timed of each program")
    parser.add_argument("--parts", nargs="+", default=list(GOALS), choices=list(GOALS))
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        part, *more = args.one
        print(json.dumps(compile_one(args.layers, *more) if part == "compile" else PARTS[part](args)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for part in args.parts:
            rows.append(row_of(part, measured(part, args.layers, args.pairs, folder), machine.commit()))
            print(rows[-1], flush=True)
    print(table(rows))
    if args.write:
        table_before, heading, batches = RESULT.read_text().partition(
            "\n## "
        )  # (the runs of tests/support/lengths_campaign.py)
        load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
        RESULT.write_text(
            "# One program for every length\n\n"
            f"`OMP_NUM_THREADS=1 python benchmarks/lengths.py --write`: a Llama of {args.layers} layers, width 256, "
            f"vocabulary 1,000, {ROWS} rows of {LENGTH} tokens (the peak: of {MAX}; the Trainer: 4 rows of 5 to 120), one process, ZeRO 0, Inductor. "
            "Seconds of the processor. `--parts` measures some of them, and leaves the others' rows as they are.\n\n"
            f"{table(merged(table_before, rows))}\n\n"
            f"Conditions of the latest run ({', '.join(args.parts)}): {machine.conditions()}, load average {load} at the end; "
            f"the machine was shared.\n{heading}{batches}"
        )


if __name__ == "__main__":
    main()
