"""The example: its model and data are what they claim to be, and it trains, alone and on two ranks."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import zgraph

EXAMPLES = Path(__file__).parents[2] / "examples"
EAGER = EXAMPLES / "plans" / "eager.toml"


def load_example():
    spec = spec_from_file_location("train_lm", EXAMPLES / "train_lm.py")
    module = sys.modules["train_lm"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


train_lm = load_example()

SMALL = train_lm.Config(dim=32, layers=2, heads=4, kv_heads=2, hidden=48, max_seq=16)


def model_of(config, seed: int = 0):
    torch.manual_seed(seed)
    return train_lm.LM(config)


def bytes_of(*shape: int) -> torch.Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(1))


# The model.


@pytest.mark.core
def test_the_default_model_has_about_a_million_parameters():
    parameters = sum(p.numel() for p in model_of(train_lm.Config()).parameters())
    assert 0.9e6 < parameters < 1.1e6


@pytest.mark.core
def test_an_untrained_model_knows_nothing():
    model, inputs = train_lm.factory()
    assert model(**inputs).loss.item() == pytest.approx(math.log(256), abs=0.15)


def test_training_keeps_no_logits_and_inference_makes_no_loss():
    model, tokens = model_of(SMALL), bytes_of(2, 16)
    assert model(tokens, tokens).logits is None
    out = model(tokens)
    assert out.loss is None and out.logits.shape == (2, 16, 256)


def test_the_loss_is_that_of_the_logits():
    model, tokens, targets = model_of(SMALL), bytes_of(2, 16), bytes_of(2, 16).flip(1)
    log_probabilities = model(tokens).logits.log_softmax(-1)
    by_hand = -log_probabilities.gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(model(tokens, targets).loss, by_hand)


def test_no_position_sees_a_later_byte():
    model, tokens = model_of(SMALL), bytes_of(1, 16)
    changed = tokens.clone()
    changed[0, 9:] = (changed[0, 9:] + 1) % 256
    before, after = model(tokens).logits, model(changed).logits
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=0)
    assert (before[:, 9:] != after[:, 9:]).any()


def test_rotary_scores_depend_on_the_distance_alone():
    model = model_of(SMALL)
    q, k = torch.randn(2, 1, 1, 1, 8).unbind()

    def score(i: int, j: int) -> torch.Tensor:
        at = [train_lm.rotate(x, model.cos[p], model.sin[p]) for x, p in ((q, i), (k, j))]
        return (at[0] * at[1]).sum()

    torch.testing.assert_close(score(3, 1), score(12, 10))
    assert not torch.isclose(score(3, 1), score(3, 2))


def test_grouped_query_attention_is_full_attention_with_repeated_heads():
    grouped = model_of(SMALL)
    full = model_of(replace(SMALL, kv_heads=SMALL.heads))
    weights = grouped.state_dict()
    for name, weight in weights.items():
        if name.endswith(("wk.weight", "wv.weight")):
            heads = weight.view(SMALL.kv_heads, -1, SMALL.dim)
            repeated = heads.repeat_interleave(SMALL.heads // SMALL.kv_heads, dim=0)
            weights[name] = repeated.reshape(-1, SMALL.dim)
    full.load_state_dict(weights)
    tokens = bytes_of(2, 16)
    torch.testing.assert_close(grouped(tokens).logits, full(tokens).logits)


def test_a_tied_head_is_the_embedding():
    tied, untied = model_of(replace(SMALL, tied=True)), model_of(SMALL)
    assert tied.head.weight is tied.embed.weight
    saved = 256 * SMALL.dim
    count = [sum(p.numel() for p in model.parameters()) for model in (tied, untied)]
    assert count[1] - count[0] == saved


# The data.


def test_the_last_tenth_is_held_back():
    text = train_lm.Text.load()
    everything = len(text.train) + len(text.validation)
    assert everything > 400_000
    assert len(text.validation) == pytest.approx(everything / 10, abs=1)


def test_a_target_is_the_next_byte():
    data = torch.arange(100, dtype=torch.uint8)
    tokens, targets = train_lm.windows(data, torch.tensor([0, 83]), 16)
    assert tokens.shape == (2, 16) and tokens[1, 0] == 83
    torch.testing.assert_close(targets, tokens + 1)


def test_ranks_see_together_what_one_process_sees():
    text = train_lm.Text.load()
    shared = {"seed": 3, "step": 7, "seq": 16}
    together, _ = text.batch(batch=12, ranks=train_lm.Ranks(), **shared)
    shares = [text.batch(batch=4, ranks=train_lm.Ranks(3, rank, 3), **shared)[0] for rank in range(3)]
    torch.testing.assert_close(torch.cat(shares), together)
    assert len({tuple(row.tolist()) for row in together}) == 12


def test_every_step_and_seed_draws_other_rows():
    text = train_lm.Text.load()
    drawn = {
        tuple(text.batch(seed=seed, step=step, batch=1, seq=16, ranks=train_lm.Ranks())[0][0].tolist())
        for seed in range(3)
        for step in range(3)
    }
    assert len(drawn) == 9


@pytest.mark.parametrize(("world", "batch"), [(1, 8), (2, 8), (4, 16)])
def test_every_world_validates_on_the_same_windows_once(world, batch):
    rows = validation_rows(world, batch)
    assert len(rows) == 256
    assert sorted(rows) == sorted(validation_rows(1, 256))


def test_an_odd_world_leaves_no_validation_window_out():
    rows = validation_rows(3, 8)
    assert len(rows) == 264
    assert set(rows) == set(validation_rows(1, 256))


def validation_rows(world: int, batch: int) -> list[tuple[int, ...]]:
    text, rows = train_lm.Text.load(), []
    for rank in range(world):
        ranks = train_lm.Ranks(world, rank, world)
        for tokens, _ in text.validation_batches(batch=batch, seq=128, ranks=ranks):
            assert tokens.shape == (batch, 128)
            rows += [tuple(row.tolist()) for row in tokens]
    return rows


def test_only_data_parallel_dimensions_split_the_batch():
    place = {"replicate": 1, "dp": 2, "tp": 1}
    sizes = {"replicate": 2, "dp": 3, "tp": 2}

    def mesh(*names: str) -> SimpleNamespace:
        def size(dim: int | None = None) -> int:
            return math.prod(sizes[n] for n in names) if dim is None else sizes[names[dim]]

        return SimpleNamespace(mesh_dim_names=names, size=size, get_local_rank=place.__getitem__)

    assert train_lm.Ranks.of(None) == train_lm.Ranks(1, 0, 1)
    assert train_lm.Ranks.of(mesh("dp")) == train_lm.Ranks(3, 2, 3)
    assert train_lm.Ranks.of(mesh("replicate", "dp")) == train_lm.Ranks(6, 5, 6)
    assert train_lm.Ranks.of(mesh("dp", "tp")) == train_lm.Ranks(6, 2, 3)


# The loop.


def test_the_learning_rate_warms_up_and_falls_to_a_tenth():
    rates = [train_lm.learning_rate(step, steps=100, warmup=10) for step in range(101)]
    assert [rates[step] for step in (0, 9, 100)] == pytest.approx([0.1, 1.0, 0.1])
    assert rates[:10] == sorted(rates[:10]) and rates[9:] == sorted(rates[9:], reverse=True)


class CountsUp(torch.nn.Module):
    """Predicts the byte after the one it sees, and remembers the shapes that it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def forward(self, tokens: torch.Tensor) -> SimpleNamespace:
        self.shapes.add(tuple(tokens.shape))
        return SimpleNamespace(logits=100.0 * torch.nn.functional.one_hot((tokens + 1) % 256, 256))


def test_a_sample_continues_the_prompt_in_one_shape():
    model = CountsUp()
    sample = train_lm.generate(model, "AB", 8, seq=4, device=torch.device("cpu"), seed=0)
    assert sample == "ABCDEFGHIJ"
    assert model.shapes == {(1, 4)}
    assert model.training


@pytest.mark.parametrize("option", ["--batch=0", "--steps=-1", "--plan=missing.toml", "--device=tpu"])
def test_a_bad_option_is_refused(option, capsys):
    with pytest.raises(SystemExit) as stopped:
        train_lm.parse([option])
    assert stopped.value.code == 2
    assert option.split("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted((EXAMPLES / "plans").iterdir()), ids=lambda path: path.name)
def test_every_example_plan_loads_and_is_described(path):
    plan = zgraph.Plan.load(path)
    assert {"mesh", "zero"} <= plan.model_fields_set
    assert f"`{path.name}`" in (EXAMPLES / "README.md").read_text()


# Training, in one process.

SHORT = ["--device=cpu", "--steps=20", "--batch=4", "--seq=32", "--eval-every=20", "--warmup=5"]


@pytest.fixture
def of_few_weights(monkeypatch):
    """Let the example train one narrow layer, and validate on a few windows."""
    make, windows = train_lm.Config, train_lm.Text.validation_batches
    monkeypatch.setattr(
        train_lm, "Config", lambda **given: make(dim=32, layers=1, heads=4, kv_heads=2, hidden=48, **given)
    )
    few = lambda text, **given: itertools.islice(windows(text, **given), 4)  # noqa: E731
    monkeypatch.setattr(train_lm.Text, "validation_batches", few)


def test_a_run_says_and_writes_what_it_did(tmp_path, capsys, of_few_weights):
    out = tmp_path / "curve.json"
    assert train_lm.main([*SHORT, f"--plan={EAGER}", "--sample=8", f"--json={out}"]) == 0
    record = json.loads(out.read_text())
    assert [point["step"] for point in record["validation"]] == [0, 20]
    assert record["validation"][1]["loss"] < record["validation"][0]["loss"] - 0.1
    assert [point["step"] for point in record["train"]] == [1, 20]
    assert record["sample"].startswith("The ") and record["world"] == 1
    said = capsys.readouterr().out
    assert re.search(r"step +20  train loss \d\.\d+  lr \S+  [\d,]+ tokens/s", said)
    assert record["sample"] in said


@pytest.mark.slow
def test_loss_falls_in_one_process(tmp_path, capsys):
    out = tmp_path / "curve.json"
    assert train_lm.main([*SHORT, f"--plan={EAGER}", "--sample=8", f"--json={out}"]) == 0
    record = json.loads(out.read_text())
    assert [point["step"] for point in record["validation"]] == [0, 20]
    assert record["validation"][0]["loss"] == pytest.approx(math.log(256), abs=0.2)
    assert record["validation"][1]["loss"] < 4
    assert [point["step"] for point in record["train"]] == [1, 20]
    assert record["sample"].startswith("The ")
    assert record["world"] == 1

    said = capsys.readouterr().out
    assert re.search(r"step +20  train loss \d\.\d+  lr \S+  [\d,]+ tokens/s", said)
    assert record["sample"] in said


@pytest.mark.slow
def test_eager_in_one_process_trains_as_plain_pytorch_does(monkeypatch, of_few_weights):
    args = train_lm.parse([*SHORT, f"--plan={EAGER}", "--sample=8"])
    compiled = train_lm.train(args, say=lambda line: None)

    def leave_as_it_is(model, plan):
        model.zgraph = SimpleNamespace(mesh=None)
        return model

    monkeypatch.setattr(zgraph, "compile", leave_as_it_is)
    plain = train_lm.train(args, say=lambda line: None)
    assert losses(compiled) == losses(plain)
    assert compiled.sample == plain.sample


def losses(record) -> list[float]:
    record = record if isinstance(record, dict) else vars(record)
    return [point["loss"] for point in record["validation"] + record["train"]]


# Training, on two ranks.


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def torchrun(script: Path, *arguments: object, timeout: float = 800) -> str:
    """What two ranks of the script print; on failure, all that they said."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    done = subprocess.run(
        [str(part) for part in (*command, *arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# Each stage in turn, in one launch: starting two processes takes longer than training.
EVERY_STAGE = """
import json, os, sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, {examples!r})
import train_lm

records = {{}}
for stage in range(4):
    plan = Path({folder!r}) / f"plan{{stage}}.toml"
    record = asdict(train_lm.train(train_lm.parse([*{options!r}, f"--plan={{plan}}"]), say=lambda line: None))
    records[stage] = {{key: record[key] for key in ("world", "train", "validation", "sample")}}
Path({folder!r}, f"rank{{os.environ['RANK']}}.json").write_text(json.dumps(records))
dist.destroy_process_group()
"""


@pytest.mark.gloo
@pytest.mark.slow
def test_two_ranks_agree_with_each_other_and_with_one_process_at_every_stage(tmp_path):
    for stage in range(4):
        (tmp_path / f"plan{stage}.toml").write_text(f'zero = {stage}\nbackend = "eager"\n')
    half = [option.replace("--batch=4", "--batch=2") for option in SHORT] + ["--sample=8"]
    worker = tmp_path / "worker.py"
    worker.write_text(textwrap.dedent(EVERY_STAGE).format(examples=str(EXAMPLES), folder=str(tmp_path), options=half))
    torchrun(worker)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]

    alone = train_lm.train(train_lm.parse([*SHORT, "--sample=8", f"--plan={EAGER}"]), say=lambda line: None)
    for stage in map(str, range(4)):
        first, second = (records[stage] for records in ranks)
        assert first["world"] == second["world"] == 2
        assert losses(first) == losses(second)
        assert first["sample"] == second["sample"]
        assert losses(first) == pytest.approx(losses(alone), rel=1e-4)
        assert first["validation"][1]["loss"] < 4


@pytest.mark.inductor
@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_half_precision_learns_what_float32_does(tmp_path):
    """A whole schedule of 80 steps, down to its small rates; benchmarks/results/precision.md has the runs of 400."""
    ends = {}
    for precision in ("fp32", "bf16", "fp16"):
        text = (EXAMPLES / "plans" / f"step_{precision}.toml").read_text()
        plan = tmp_path / f"{precision}.toml"
        plan.write_text(text.replace("warmup_steps = 20, total_steps = 400", "warmup_steps = 10, total_steps = 80"))
        options = ["--device=cpu", "--batch=8", "--steps=80", "--eval-every=80", "--sample=0", f"--plan={plan}"]
        record = train_lm.train(train_lm.parse(options), say=lambda line: None)
        ends[precision] = record.validation[-1]["loss"]
        assert record.train[-1]["lr"] < 4e-4
    assert ends["fp32"] < 2.6
    assert ends["bf16"] == pytest.approx(ends["fp32"], abs=0.03)
    assert ends["fp16"] == pytest.approx(ends["fp32"], abs=0.03)


@pytest.mark.slow
@pytest.mark.gloo
def test_ctrl_c_ends_every_rank():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, EXAMPLES / "train_lm.py", *SHORT, f"--plan={EAGER}", "--steps=100000"],
            env=environment()
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(
                signal.SIGINT, signal.default_int_handler
            ),  # (a background job ignores it)
        )
        for rank in range(2)
    ]
    try:
        for line in ranks[0].stdout:
            if line.startswith("step   20"):
                break
        for rank in ranks:
            rank.send_signal(signal.SIGINT)
        said = [rank.communicate(timeout=300)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [train_lm.INTERRUPTED] * 2, "\n".join(said)
    assert "stopped by Ctrl-C" in said[0] and "stopped" not in said[1]
    assert not any("Traceback" in text for text in said), "\n".join(said)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.inductor
@pytest.mark.timeout(1300)
def test_two_compiled_ranks_learn_english(tmp_path):
    out = tmp_path / "curve.json"
    said = torchrun(EXAMPLES / "train_lm.py", "--device=cpu", f"--json={out}", timeout=1200)
    record = json.loads(out.read_text())
    assert record["world"] == 2
    assert record["validation"][0]["loss"] > 5
    assert record["validation"][-1]["loss"] < 2, said
