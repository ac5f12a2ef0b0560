"""Checkpoints of models in stages: independent of the cut, whole or not at all, and those of one process are theirs too."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sweeps import sweep
from torch import nn
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

import zgraph
from zgraph.checkpoint.comparison import compare
from zgraph.checkpoint.convert import convert
from zgraph.checkpoint.detect_format import open_checkpoint
from zgraph.checkpoint.write_pretrained import export
from zgraph.cli.app import app
from zgraph.errors import CheckpointError, StepError

pytestmark = pytest.mark.gloo
WORDS, WIDTH = 23, 8


class Net(nn.Module):
    """A tied weight, which the first and the last stage use; a buffer that nothing changes; a parameter that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)
        )
        self.register_buffer("gain", torch.full((WIDTH,), 0.5))
        self.register_parameter("shift", nn.Parameter(torch.full((WIDTH,), 0.1), requires_grad=False))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words, targets):
        hidden = self.embed(words)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return cross_entropy(
            self.head(hidden * self.gain.to(hidden.dtype) + self.shift).flatten(0, 1), targets.flatten()
        )


class Counted(nn.Module):
    """Buffers that the forward changes, in both stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 1)
        self.low, self.high = nn.BatchNorm1d(6), nn.BatchNorm1d(1)

    def forward(self, x):
        return (
            self.high(self.second(torch.relu(self.low(self.first(x))))).square().mean() + 0.1 * self.second.bias.sum()
        )


def built(dropout: float = 0.0, kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    model = kind()
    for child in model.modules():
        if isinstance(child, nn.Dropout):
            child.p = dropout
    return model


def batch(number: int, share: int = 0, of: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """This share of the rows of one batch."""
    generator = torch.Generator().manual_seed(number)
    words, targets = (torch.randint(WORDS, (16, 3), generator=generator) for _ in range(2))
    return words.chunk(of)[share], targets.chunk(of)[share]


def mine(plan: zgraph.Plan, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows, of however many see different ones."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    of = plan.resolve_mesh(ranks).get("dp", 1)
    return batch(number, dist.get_rank() % of if of > 1 else 0, of)


STAGED: dict[str, Any] = {"mesh": {"pp": 2}, "micro_batches": 4, "partition": ("layers.2",)}


def plan_of(**fields: Any) -> zgraph.Plan:
    return zgraph.Plan(**{"backend": "eager", "optimizer": zgraph.AdamW(lr=1e-2), **fields})


def model_of(plan: zgraph.Plan, dropout: float = 0.0) -> nn.Module:
    return zgraph.compile(built(dropout), plan, inputs=mine(plan, 0))


def steps(model: nn.Module, numbers: range) -> list[float]:
    return [float(model.train_step(*mine(model.zgraph.plan, n))) for n in numbers]


def went_on(where: str, fields: dict[str, Any]) -> tuple[list[float], list[float], list[str], list[str]]:
    """(losses after a save, of the run that saved; of one that loaded; what their last checkpoints differ in; what was logged)."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    plan = plan_of(**fields)
    one = model_of(plan, dropout=0.1)
    steps(one, range(3))
    one.save_checkpoint(where, "between", client_state={"rank": dist.get_rank(), "all": 7})
    first = steps(one, range(3, 6))
    one.save_checkpoint(where, "first")
    other = model_of(plan, dropout=0.1)
    torch.manual_seed(99)
    logging.getLogger("zgraph").addHandler(handler)
    try:
        client = other.load_checkpoint(where, "between")
        again = steps(other, range(3, 6))
    finally:
        logging.getLogger("zgraph").removeHandler(handler)
    assert client == {"rank": dist.get_rank(), "all": 7}
    assert other.zgraph.samples == one.zgraph.samples == 6 * 16
    other.save_checkpoint(where, "again")
    found = compare(open_checkpoint(Path(where), "first"), open_checkpoint(Path(where), "again"))
    return first, again, [*(d.name for d in found.different), *found.known, *found.only[0], *found.only[1]], said


RESUMED: dict[str, tuple[int, dict[str, Any]]] = {
    "two stages": (2, STAGED),
    "interleaved, clipped, averaged, scheduled": (
        2,
        {
            "mesh": {"pp": 2},
            "micro_batches": 2,
            "schedule": "interleaved1f1b",
            "partition": "uniform",
            "grad_clip": 0.2,
            "ema": 0.9,
            "lr_schedule": zgraph.Cosine(total_steps=20, warmup_steps=2),
        },
    ),
    "fp16": (2, STAGED | {"precision": "fp16"}),
    "bf16 with masters, ZeRO 2": (
        4,
        STAGED | {"mesh": {"pp": 2, "dp": 2}, "zero": 2, "precision": "bf16", "numerics": "deepspeed"},
    ),
}


@sweep("name", RESUMED, quick=(1,))
def test_a_run_in_stages_goes_on_bit_for_bit(two, four, name, tmp_path):
    world, fields = RESUMED[name]
    for first, again, different, said in {2: two, 4: four}[world].run(went_on, str(tmp_path), fields):
        assert again == first
        assert not different
        assert not said


def saved(where: str, tag: str, fields: dict[str, Any], dropout: float = 0.0) -> list[float]:
    """Losses of the steps after a checkpoint."""
    model = model_of(plan_of(**fields))
    steps(model, range(3))
    model.save_checkpoint(where, tag)
    return steps(model, range(3, 6))


def loaded(where: str, tag: str, again: str, fields: dict[str, Any]) -> list[float]:
    """Load a checkpoint, save it again at once, and go on."""
    model = model_of(plan_of(**fields))
    steps(model, range(7, 9))  # (what is there is to be written over)
    model.load_checkpoint(where, tag)
    model.save_checkpoint(where, again)
    return steps(model, range(3, 6))


def alone(where: str, tag: str, again: str) -> list[float]:
    return loaded(where, tag, again, {"mesh": {"dp": 1}, "zero": 0})


OTHERS: dict[str, tuple[int, dict[str, Any]]] = {
    "two stages": (2, STAGED),
    "cut elsewhere, by another schedule": (
        2,
        STAGED | {"partition": ("layers.1",), "schedule": "gpipe", "micro_batches": 2},
    ),
    "four stages on two ranks": (
        2,
        {"mesh": {"pp": 2}, "micro_batches": 2, "schedule": "interleaved1f1b", "partition": "uniform"},
    ),
    "no stages": (2, {"mesh": {"dp": 2}, "zero": 3}),
    "two stages of two ranks": (4, STAGED | {"mesh": {"pp": 2, "dp": 2}, "zero": 1}),
}


@pytest.mark.slow
def test_any_plan_loads_what_any_other_saved(two, four, tmp_path):
    """Each loads the first one's and saves it again at once: bit for bit the same. So does one process, and the first what that saved."""
    where = str(tmp_path)
    worlds = {2: two, 4: four}
    losses = two.run(saved, where, "staged", STAGED)[0]
    before = "staged"
    for name, (world, fields) in OTHERS.items():
        again = f"by {name}".replace(" ", "_").replace(",", "")
        for found in worlds[world].run(loaded, where, before, again, fields):
            if "dp" not in fields["mesh"]:
                assert found == pytest.approx(losses, rel=1e-5)
        same = compare(open_checkpoint(tmp_path, "staged"), open_checkpoint(tmp_path, again))
        assert same.equal, (name, same.to_json())
        before = again
    assert alone(where, before, "alone") == pytest.approx(losses, rel=1e-5)
    assert compare(open_checkpoint(tmp_path, "staged"), open_checkpoint(tmp_path, "alone")).equal
    found = two.run(loaded, where, "alone", "back", STAGED)
    assert found[0] == found[1] == losses


@pytest.mark.slow
def test_a_checkpoint_in_stages_is_like_any_other_to_the_commands(four, tmp_path):
    four.run(saved, str(tmp_path), "staged", STAGED | {"mesh": {"pp": 2, "dp": 2}, "zero": 3})
    run = CliRunner().invoke
    assert run(app, ["ckpt", "verify", str(tmp_path)]).exit_code == 0
    shown = run(app, ["ckpt", "inspect", str(tmp_path)]).output
    assert "pp" in shown and "4" in shown and "embed.weight" in shown
    source = open_checkpoint(tmp_path, "staged")
    assert source.known.mesh == {"pp": 2, "dp": 2} and source.known.world == 4
    names = [n for group in source.known.groups for n in group["names"]]
    assert {"embed.weight", "layers.0.1.weight", "layers.3.1.weight"} <= set(names)
    plain = open_checkpoint(convert(source, tmp_path / "plain", "all", "dcp"))
    assert torch.equal(plain.whole("model.layers.3.1.weight"), source.whole("model.layers.3.1.weight"))
    export(source, tmp_path / "exported")
    assert "layers.3.1.weight" in {n.removeprefix("model.") for n in open_checkpoint(tmp_path / "exported").tensors}


def counted(where: str, mesh: dict[str, int]) -> dict[str, torch.Tensor]:
    """Train with buffers that change, save, load into a model that saw other rows, and save that."""
    plan = plan_of(mesh=mesh, micro_batches=2, partition=("second",) if "pp" in mesh else "time")
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(8, 4, generator=generator) for _ in range(4)]
    one, other = (zgraph.compile(built(kind=Counted), plan, inputs=(rows[0],)) for _ in range(2))
    for x in rows[:3]:
        one.train_step(x)
    one.save_checkpoint(where, "staged" if "pp" in mesh else "alone")
    other.train_step(rows[3])
    other.load_checkpoint(where)
    other.save_checkpoint(where, "again")
    assert float(one.eval_step(rows[3])) == float(other.eval_step(rows[3]))
    return {n: b.clone() for n, b in other.named_buffers()}


@pytest.mark.slow
def test_buffers_are_those_of_the_stage_that_changes_them(two, tmp_path):
    first, second = two.run(counted, str(tmp_path), {"pp": 2})
    counted(str(tmp_path), {"dp": 1})
    staged, alone = (open_checkpoint(tmp_path, tag) for tag in ("staged", "alone"))
    for name in first:
        torch.testing.assert_close(staged.whole(f"model.{name}"), alone.whole(f"model.{name}"), rtol=1e-5, atol=1e-6)
        assert torch.equal(first[name], second[name]), "all ranks load all buffers"
    assert int(staged.whole("model.high.num_batches_tracked")) == 6


def in_background(where: str) -> tuple[list[float], list[float]]:
    plan = plan_of(**STAGED)
    one = model_of(plan)
    steps(one, range(2))
    one.save_checkpoint(where, "aside", async_=True)
    first = steps(one, range(2, 4))  # (while it is written)
    one.zgraph.finish()
    one.save_checkpoint(where, "later", async_=True)
    one.zgraph.finish()
    other = model_of(plan)
    other.load_checkpoint(where, "aside")
    return first, steps(other, range(2, 4))


@pytest.mark.slow
def test_a_save_in_the_background_is_of_the_step_that_it_was_begun_at(two, tmp_path):
    for first, again in two.run(in_background, str(tmp_path)):
        assert first == again


def published(where: str, fields: dict[str, Any], averaged: bool) -> dict[str, torch.Tensor]:
    """What was published, and this rank's weights."""
    model = model_of(plan_of(**fields))
    steps(model, range(2))
    model.save_checkpoint(where, "beside")
    model.save_pretrained(f"{where}/published", max_shard_size=600, averaged=averaged)
    return {}


@pytest.mark.parametrize("averaged", [False, True], ids=["weights", "averages"])
@pytest.mark.slow
def test_a_model_in_stages_is_published_whole(four, averaged, tmp_path):
    fields = STAGED | {"mesh": {"pp": 2, "dp": 2}, "ema": 0.9, "precision": "bf16", "numerics": "deepspeed"}
    four.run(published, str(tmp_path), fields, averaged)
    found, source = open_checkpoint(tmp_path / "published"), open_checkpoint(tmp_path, "beside")
    names = {n.removeprefix("model.") for n in found.tensors}
    assert names == built().state_dict().keys() - {"head.weight"}
    for name in names - {"gain"}:
        wanted = f"optimizer.state.{name}.ema" if averaged and name != "shift" else f"model.{name}"
        assert torch.equal(found.whole(f"model.{name}").float(), source.whole(wanted).float().bfloat16().float()), name


def refusals(where: str, damaged: str) -> list[str]:
    said = []
    plan = plan_of(**STAGED)
    uncut = zgraph.compile(built(), plan)
    for attempt in (lambda: uncut.load_checkpoint(where, "whole"), lambda: uncut.save_checkpoint(where, "none")):
        with pytest.raises(StepError) as refused:
            attempt()
        said.append(str(refused.value))
    model = model_of(plan)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if not p.is_meta}
    with pytest.raises(CheckpointError) as refused:
        model.load_checkpoint(where, damaged)
    said.append(str(refused.value))
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters() if not p.is_meta)
    assert steps(model, range(1)), "a refused load leaves a model that goes on"
    return said


@pytest.mark.slow
def test_what_cannot_be_loaded_changes_nothing_on_any_stage(two, tmp_path):
    two.run(saved, str(tmp_path), "whole", STAGED)
    two.run(saved, str(tmp_path), "damaged", STAGED)
    file = sorted((tmp_path / "damaged").glob("*.safetensors"))[-1]
    data = bytearray(file.read_bytes())
    data[-5] ^= 255
    file.write_bytes(data)
    for said in two.run(refusals, str(tmp_path), "damaged"):
        assert "not cut into stages yet" in said[0] and "inputs=" in said[0] and "not cut" in said[1]
        assert file.name in said[2]
