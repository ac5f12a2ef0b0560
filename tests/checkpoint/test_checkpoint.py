"""Checkpoints of compiled models: what comes back, what is refused, and that nothing is ever lost or half done."""

from __future__ import annotations

import inspect
import itertools
import json
import logging
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from sweeps import product, sweep
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader

import zgraph
from zgraph.checkpoint import folder, manifest, tensorfile
from zgraph.checkpoint.read_native import Checkpoint
from zgraph.checkpoint.user_values import PerRank
from zgraph.errors import CheckpointError, StepError


class Net(nn.Module):
    """Uneven rows, a buffer that changes, one that is not saved, dropout, a scalar parameter, a tied weight."""

    def __init__(self, width: int = 13) -> None:
        super().__init__()
        self.first = nn.Linear(10, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.1)
        self.last = nn.Linear(width, 7)
        self.again = nn.Linear(width, 7, bias=False)
        self.again.weight = self.last.weight
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("table", torch.arange(7.0), persistent=False)

    def forward(self, x):
        hidden = self.drop(self.norm(self.first(x)))
        return ((self.last(hidden) + self.again(hidden)) * self.scale + self.table.to(x.dtype)).square().mean()


def compiled(width: int = 13, seed: int = 0, **fields) -> Net:
    torch.manual_seed(seed)
    plan = {"backend": "eager", "optimizer": zgraph.AdamW(lr=1e-2)} | fields
    return zgraph.compile(Net(width), zgraph.Plan(**plan))


def batches(count: int, first: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    made = [torch.randn(6, 10, generator=generator) for _ in range(first + count)]
    return made[first:]


def trained(steps: int = 3, **fields) -> Net:
    model = compiled(**fields)
    for x in batches(steps):
        model.train_step(x)
    return model


def everything(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of all that a checkpoint is to bring back, by name."""
    found = {n: t.detach().clone() for n, t in model.state_dict().items()}
    optimizer = model.zgraph.optimizer
    if optimizer is not None:
        model.zgraph.runtime.updater.make_states()
        names = {id(p): n for n, p in model.named_parameters()}
        for param, states in optimizer.state.items():
            found |= {f"{names[id(param)]}/{k}": v.detach().clone() for k, v in states.items()}
    found |= {f"/{k}": torch.as_tensor(v).clone() for k, v in model.zgraph.runtime.updater.states.of_scale().items()}
    found["samples"] = torch.tensor(model.zgraph.runtime.samples)
    found["calls"] = torch.tensor(model.zgraph.runtime.updater.calls)
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """The names of what differs in any bit."""
    names = sorted(one.keys() | other.keys())
    return [n for n in names if n not in one or n not in other or not torch.equal(one[n], other[n])]


PLANS = {
    "plain": {},
    "schedule": {"lr_schedule": zgraph.Cosine(total_steps=9, warmup_steps=2), "grad_clip": 0.3},
    "torch's schedule": {"lr_schedule": {"name": "TorchSchedule", "scheduler": "StepLR", "args": {"step_size": 2}}},
    "average": {"ema": 0.9},
    "micro-batches": {"micro_batches": 3},
    "sgd": {"optimizer": zgraph.SGD(lr=1e-2, momentum=0.9)},
    "8 bits": {"optimizer": zgraph.AdamW8bit(lr=1e-2, min_row_size=8, block_size=4)},
    "fp16": {"precision": "fp16"},
    "fp16, torch's schedule": {
        "precision": "fp16",
        "lr_schedule": {"name": "TorchSchedule", "scheduler": "ExponentialLR", "args": {"gamma": 0.5}},
    },
    "skips, torch's schedule": {
        "on_nonfinite": "skip",
        "lr_schedule": {"name": "TorchSchedule", "scheduler": "ExponentialLR", "args": {"gamma": 0.5}},
    },
    "fp16 masters": {"precision": "fp16", "numerics": "deepspeed", "ema": 0.9},
    "bf16 masters": {"precision": "bf16", "numerics": "deepspeed"},
    "states in memory": {"offload": {"optimizer": "cpu"}},
    "late": {"offload": {"optimizer": "cpu", "delayed_after": 1}},
}


def cast(x: torch.Tensor, fields: dict) -> torch.Tensor:
    return x.to({"fp16": torch.float16, "bf16": torch.bfloat16}[fields["precision"]]) if "numerics" in fields else x


@sweep("name", PLANS, quick=2)
def test_a_resumed_run_goes_on_bit_for_bit(name, tmp_path):
    fields = PLANS[name]
    model = compiled(**fields)
    first = model.first.weight.detach().clone()
    for x in batches(3):
        model.train_step(cast(x, fields))
    steps = 3
    while model.first.weight.equal(first) and steps < 20:  # (fp16's first steps are skipped)
        model.train_step(cast(batches(3)[-1], fields))
        steps += 1
    assert model.save_checkpoint(tmp_path) == f"step{steps}" and not model.first.weight.equal(first)
    straight = [model.train_step(cast(x, fields)) for x in batches(4, 3)]
    other = compiled(seed=1, **fields)
    other.train_step(cast(batches(1)[0], fields))  # (what it was before is gone)
    assert other.load_checkpoint(tmp_path) == {}
    resumed = [other.train_step(cast(x, fields)) for x in batches(4, 3)]
    assert [float(a) for a in resumed] == [float(b) for b in straight]
    for each in (model, other):
        each.zgraph.finish()
    assert same(everything(model), everything(other)) == []


@pytest.mark.parametrize("kind", ["parameters", "optimizer"])
def test_what_lies_on_disk_is_saved_and_loaded(kind, tmp_path):
    (tmp_path / "tier").mkdir()
    offload = {"offload": {kind: f"nvme:{tmp_path / 'tier'}"}}
    model = trained(**offload)
    model.save_checkpoint(tmp_path / "c", async_=True)
    there, back = compiled(seed=1, **offload), compiled(seed=2)
    model.zgraph.finish()
    for other in (there, back):
        other.load_checkpoint(tmp_path / "c")
        assert same(everything(model), everything(other)) == []


def test_python_numpy_and_torch_draw_what_they_would_have(tmp_path):
    model = trained()
    model.save_checkpoint(tmp_path)
    drawn = torch.rand(3), random.random(), np.random.rand(3)
    compiled(seed=5).load_checkpoint(tmp_path)
    again = torch.rand(3), random.random(), np.random.rand(3)
    assert torch.equal(drawn[0], again[0]) and drawn[1] == again[1] and (drawn[2] == again[2]).all()


# -- other plans


@product(
    "of, to",
    ["plain", "bf16 masters", "fp16 masters", "average", "late"],
    ["plain", "bf16 masters", "fp16 masters", "average", "states in memory", "late"],
    together=1,
)
def test_weights_and_states_go_from_one_plan_to_another(of, to, tmp_path):
    """In the widest precision that there is: a weight in float32 from a master copy, and the reverse."""
    model = compiled(**PLANS[of])
    for x in batches(3):
        model.train_step(cast(x, PLANS[of]))
    model.save_checkpoint(tmp_path)
    model.zgraph.finish()
    other = compiled(seed=1, **PLANS[to])
    other.load_checkpoint(tmp_path)
    other.zgraph.finish()
    one, two = everything(model), everything(other)
    for name in dict(model.named_parameters()):
        a, b = (t.get(f"{name}/master", t[name]) for t in (one, two))
        assert torch.equal(a.float(), b.float()), name
        assert torch.equal(two[name], two.get(f"{name}/master", two[name]).to(two[name].dtype)), name
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(one[f"{name}/{key}"], two[f"{name}/{key}"]), (name, key)


def test_another_optimizer_is_refused_and_the_weights_alone_are_not(tmp_path):
    trained().save_checkpoint(tmp_path)
    other = compiled(seed=1, optimizer=zgraph.SGD(lr=0.1, momentum=0.9))
    before = everything(other)
    with pytest.raises(CheckpointError, match="keeps exp_avg, exp_avg_sq"):
        other.load_checkpoint(tmp_path)
    assert same(before, everything(other)) == []
    other.load_checkpoint(tmp_path, optimizer=False)
    assert same(before, everything(other)) != [] and int(other.zgraph.runtime.updater.calls) == 0


@sweep("name", [n for n in PLANS if "fp16" not in n and n != "late"], quick=2)
def test_weights_alone_are_loaded_beside_the_states_that_there_are(name, tmp_path):
    """As plain PyTorch has it, whose weights are loaded in the middle of a run."""
    fields = PLANS[name]
    model = compiled(**fields)
    model.train_step(cast(batches(1)[0], fields))
    model.save_checkpoint(tmp_path)
    earlier = everything(model)
    for x in batches(2, first=1):
        model.train_step(cast(x, fields))
    before, draws = everything(model), torch.get_rng_state()
    model.load_checkpoint(tmp_path, optimizer="keep")
    after = everything(model)
    weights = set(model.state_dict())
    changed = weights | {n for n in after if n.endswith("/master")}
    assert same(after, earlier | {n: t for n, t in before.items() if n not in changed}) == []
    assert torch.equal(torch.get_rng_state(), draws)
    other = compiled(seed=1, **fields)
    model.save_checkpoint(tmp_path, "merged")
    other.load_checkpoint(tmp_path, "merged")
    for x in batches(2, first=3):
        torch.set_rng_state(draws)
        mine = model.train_step(cast(x, fields))
        torch.set_rng_state(draws)
        assert torch.equal(mine, other.train_step(cast(x, fields)))
    assert same(everything(model), everything(other)) == []


def test_numbers_of_a_plan_hold_where_it_was_changed(tmp_path, caplog):
    model = trained()
    model.zgraph.optimizer.param_groups[0]["lr"] = 5e-4
    model.save_checkpoint(tmp_path)
    same_plan, another = compiled(), compiled(optimizer=zgraph.AdamW(lr=3e-3))
    same_plan.load_checkpoint(tmp_path)
    assert same_plan.zgraph.optimizer.param_groups[0]["lr"] == 5e-4
    with caplog.at_level(logging.WARNING):
        another.load_checkpoint(tmp_path)
    assert another.zgraph.optimizer.param_groups[0]["lr"] == 3e-3 and "the plan's hold" in caplog.text


def test_other_programs_of_the_same_plan_are_told(tmp_path, caplog):
    """(A newer torch or zgraph may make others; so does another batch.)"""
    model = trained()
    place = tmp_path / model.save_checkpoint(tmp_path)
    programs = Checkpoint(place).known.programs
    assert {"train0.forward", "train0.backward", "update0"} <= programs.keys()
    for changed, said in ((False, False), (True, True)):
        caplog.clear()
        if changed:
            forged(place, lambda d: d["known"]["programs"].update({"train0.forward": "another"}))
        other = compiled()
        other.load_checkpoint(place)
        with caplog.at_level(logging.WARNING):
            other.train_step(batches(1)[0])
        assert ("program train0.forward is another" in caplog.text) == said


def test_a_plan_without_an_optimizer_takes_the_weights_and_says_so(tmp_path, caplog):
    model = trained()
    model.save_checkpoint(tmp_path)
    other = compiled(seed=1, optimizer=None)
    with caplog.at_level(logging.WARNING):
        other.load_checkpoint(tmp_path)
    assert same({n: t for n, t in model.state_dict().items()}, dict(other.state_dict())) == []
    assert "left out" in caplog.text


def test_a_model_from_the_meta_device_takes_its_weights_from_a_checkpoint(tmp_path):
    model = trained()
    model.save_checkpoint(tmp_path)
    with torch.device("meta"):
        fresh = nn.Module()
        fresh.raw = nn.Parameter(torch.empty(3))  # (nothing initialises it)
    assert zgraph.compile(fresh, zgraph.Plan(backend="eager")).zgraph.runtime.shards.pending == {"raw"}
    with pytest.raises(zgraph.errors.ModelError, match="no values yet"):
        fresh.save_checkpoint(tmp_path)


@pytest.mark.parametrize("width", [12, 14])
def test_another_model_is_refused_before_anything_changes(width, tmp_path):
    trained().save_checkpoint(tmp_path)
    other = compiled(width, seed=1)
    before = everything(other)
    with pytest.raises(CheckpointError, match=r"is \[13\] in the checkpoint and"):
        other.load_checkpoint(tmp_path)
    renamed = zgraph.compile(nn.Sequential(nn.Linear(10, 13)), zgraph.Plan(backend="eager"))
    with pytest.raises(CheckpointError, match=r"the checkpoint lacks: 0.bias, 0.weight; the model lacks: again.weight"):
        renamed.load_checkpoint(tmp_path)
    assert same(before, everything(other)) == []


def test_plain_torch_reads_weights_and_states(tmp_path):
    model = trained()
    place = tmp_path / model.save_checkpoint(tmp_path)
    plain = Net()
    optimizer = torch.optim.AdamW(plain.parameters())
    plain(batches(1)[0]).backward()
    optimizer.step()
    wanted = {"model": plain.state_dict()}
    dcp.load(wanted, storage_reader=HuggingFaceStorageReader(str(place)))
    assert same(wanted["model"], dict(model.state_dict())) == []
    names = {f"optimizer.state.{n}.exp_avg": torch.zeros_like(p) for n, p in plain.named_parameters()}
    dcp.load(names, storage_reader=HuggingFaceStorageReader(str(place)))
    states = everything(model)
    assert all(torch.equal(t, states[f"{n[16:-8]}/exp_avg"]) for n, t in names.items())


# -- what a user adds


class Loader:
    def __init__(self) -> None:
        self.at = 0

    def state_dict(self):
        return {"at": self.at, "history": [1, (2, None)], "seen": {3, 4}}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_client_state_comes_back_as_it_was(tmp_path):
    model, loader = trained(), Loader()
    loader.at = 17
    given = {
        "loader": loader,
        "numbers": {1: 2.5, "x": float("inf"), (1, "a"): None, "nan": float("nan"), "big": 2**80, "flag": True},
        "tensor": torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(),
        "array": np.arange(4, dtype=">f8").reshape(2, 2),
        "number": np.float32(1.5),
        "bytes": b"\x00\xff",
        "empty": [],
        "name": {"name": "client.0.7"},
        "__zgraph__": "not ours",
    }
    model.save_checkpoint(tmp_path, client_state=given)
    fresh = Loader()
    found = compiled().load_checkpoint(tmp_path, client_state={"loader": fresh})
    assert fresh.at == 17 and found["loader"] == loader.state_dict()
    assert found["numbers"].pop("nan") != found["numbers"].get("nan")
    assert found["numbers"] == {k: v for k, v in given["numbers"].items() if k != "nan"}
    assert torch.equal(found["tensor"], given["tensor"]) and found["tensor"].dtype is torch.bfloat16
    assert (found["array"] == given["array"]).all() and found["number"] == np.float32(1.5)
    assert type(found["number"]) is np.float32
    assert found["name"] == given["name"] and (found["bytes"], found["empty"], found["__zgraph__"]) == (
        b"\x00\xff",
        [],
        "not ours",
    )


def test_what_only_pickle_could_save_is_refused(tmp_path):
    model = trained()
    for value in (lambda: 0, object(), torch.nn.Linear, np.array([None]), {"deep": [lambda: 0]}):
        with pytest.raises(CheckpointError, match=r"client_state\['it'\].* is a"):
            model.save_checkpoint(tmp_path, client_state={"it": value})
        assert not list(tmp_path.iterdir())


def test_state_that_modules_add_is_saved(tmp_path):
    class Extra(nn.Linear):
        note = "new"

        def get_extra_state(self):
            return {"note": self.note, "t": torch.ones(2)}

        def set_extra_state(self, state):
            self.note = state["note"]

    model = zgraph.compile(nn.Sequential(Extra(3, 3)), zgraph.Plan(backend="eager"))
    model[0].note = "seen"
    model.save_checkpoint(tmp_path)
    other = zgraph.compile(nn.Sequential(Extra(3, 3)), zgraph.Plan(backend="eager"))
    other.load_checkpoint(tmp_path)
    assert other[0].note == "seen"


class Extra(nn.Linear):
    note = "new"

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        if state["note"] == "bad":
            raise KeyError("bad")
        self.note = state["note"]


@pytest.mark.parametrize(("of", "to"), [(Extra, nn.Linear), (nn.Linear, Extra)])
def test_state_that_only_one_side_has_is_refused_before_anything_changes(of, to, tmp_path):
    made = [zgraph.compile(nn.Sequential(kind(3, 3)), zgraph.Plan(backend="eager")) for kind in (of, to)]
    made[0].save_checkpoint(tmp_path)
    before = {n: t.clone() for n, t in made[1].named_parameters()}
    with pytest.raises(CheckpointError, match="get_extra_state"):
        made[1].load_checkpoint(tmp_path)
    assert same(before, dict(made[1].named_parameters())) == []


def test_objects_that_take_no_state_are_refused_before_anything_changes(tmp_path):
    trained().save_checkpoint(tmp_path, client_state={"it": 1})
    other = compiled(seed=1)
    before = everything(other)
    for objects in ({"it": 5}, {"more": Loader()}):
        with pytest.raises(CheckpointError, match=r"no load_state_dict|no client state 'more'"):
            other.load_checkpoint(tmp_path, client_state=objects)
    assert same(before, everything(other)) == []


@pytest.mark.parametrize(
    ("saved", "there"),
    [(torch.tensor([0.5, 1.7]), torch.tensor([1, 2])), (torch.tensor([1j, 2]), torch.tensor([1.0, 2.0])),
     (torch.tensor([1, 2]), torch.tensor([True, False])), (torch.tensor([300, 2]), torch.tensor([1, 2], dtype=torch.int8))],
)  # fmt: skip
def test_buffers_of_another_kind_are_refused(saved, there, tmp_path):
    models = []
    for buffer in (saved, there):
        module = nn.Linear(2, 2)
        module.register_buffer("it", buffer)
        models.append(zgraph.compile(module, zgraph.Plan(backend="eager")))
    models[0].save_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"model.it is torch"):
        models[1].load_checkpoint(tmp_path)


def test_two_weights_do_not_become_one_in_silence(tmp_path):
    class Twice(nn.Module):
        def __init__(self, tied):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            if tied:
                self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x)).sum()

    models = [zgraph.compile(Twice(tied), zgraph.Plan(backend="eager")) for tied in (False, True, True)]
    models[0].save_checkpoint(tmp_path / "two")
    with pytest.raises(CheckpointError, match="one weight in the model, and two in the checkpoint"):
        models[1].load_checkpoint(tmp_path / "two")
    models[1].save_checkpoint(tmp_path / "one")
    models[2].load_checkpoint(tmp_path / "one")
    models[0].load_checkpoint(tmp_path / "one")  # (both are it)
    assert torch.equal(models[0].a.weight, models[1].a.weight) and torch.equal(models[0].b.weight, models[1].a.weight)


def test_steps_of_a_users_own_optimizer_are_counted(tmp_path):
    model = compiled(optimizer=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches(3):
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.save_checkpoint(tmp_path) == "step3"
    other = compiled(seed=1, optimizer=None)
    other.load_checkpoint(tmp_path)
    other(batches(1)[0]).backward()
    assert other.save_checkpoint(tmp_path) == "step4" and other.zgraph.samples == 24


def test_gradients_that_wait_are_not_lost_in_silence(tmp_path):
    model = trained()
    model(batches(1)[0]).backward()
    with pytest.raises(StepError, match="between backward"):
        model.save_checkpoint(tmp_path)
    model.step()
    model.save_checkpoint(tmp_path)


def test_averages_are_not_saved_as_weights(tmp_path):
    model = trained(ema=0.9)
    with model.zgraph.averaged_weights(), pytest.raises(StepError, match="averaged_weights"):
        model.save_checkpoint(tmp_path)


# -- tags, and saves that were interrupted


def test_tags_latest_and_retention(tmp_path):
    model = trained()
    for number in range(5):
        model.save_checkpoint(tmp_path, f"t{number}", keep_last=3)
    assert folder.tags(tmp_path) == ["t4", "t3", "t2"] and folder.latest(tmp_path) == "t4"
    with pytest.raises(CheckpointError, match=r"no checkpoint 't0'(.|\n)*t4, t3, t2"):
        model.load_checkpoint(tmp_path, "t0")
    model.load_checkpoint(tmp_path, "t2")
    model.load_checkpoint(tmp_path / "t3")
    with pytest.raises(CheckpointError, match="keep_last is 0, and must be at least 1"):
        model.save_checkpoint(tmp_path, keep_last=0)


def test_a_tag_is_a_plain_name(tmp_path):
    model = trained(1)
    for tag in ("", "..", "../up", "a/b", ".hidden", "latest", "a\0b", "x" * 300, "a b", "-x"):
        with pytest.raises(CheckpointError, match="no tag"):
            model.save_checkpoint(tmp_path / "c", tag)
        with pytest.raises(CheckpointError, match="no tag"):
            model.load_checkpoint(tmp_path / "c", tag)
        assert not list(tmp_path.iterdir()), tag


def test_a_tag_is_saved_again_in_one_move(tmp_path):
    model = trained()
    model.save_checkpoint(tmp_path, "it")
    model.train_step(batches(1)[0])
    model.save_checkpoint(tmp_path, "it")
    other = compiled(seed=1)
    other.load_checkpoint(tmp_path)
    assert same(everything(model), everything(other)) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["it", "latest"]


def test_what_an_interrupted_save_leaves_is_no_checkpoint_and_goes(tmp_path):
    model = trained()
    place = tmp_path / model.save_checkpoint(tmp_path)
    half = tmp_path / ".zgraph-step9.partial"
    shutil.copytree(place, half)
    assert folder.tags(tmp_path) == ["step3"]
    compiled().load_checkpoint(tmp_path)
    model.save_checkpoint(tmp_path, "next")
    assert not half.exists()


def test_what_else_lies_in_the_folder_is_left_alone(tmp_path):
    for name in ("notes", ".git", "step1.partial", ".ssh.old", ".download.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("mine")
    (tmp_path / "file").write_text("mine")
    model = trained()
    model.save_checkpoint(tmp_path, keep_last=1)
    assert folder.tags(tmp_path) == ["step3"]
    there = {"notes", ".git", "step1.partial", ".ssh.old", ".download.partial", "file"}
    assert {p.name for p in tmp_path.iterdir()} == there | {"latest", "step3"}
    (tmp_path / "link").symlink_to("step3")
    for tag in ("notes", "file", "link"):
        with pytest.raises(CheckpointError, match="is there, and is no checkpoint"):
            model.save_checkpoint(tmp_path, tag)
    assert (tmp_path / "notes" / "manifest.json").read_text() == (tmp_path / "file").read_text() == "mine"


def test_two_models_save_into_one_folder_at_once(tmp_path):
    models = {"g": trained(1), "d": trained(2)}
    for number in range(10):
        for name, model in models.items():
            model.save_checkpoint(tmp_path, f"{name}{number}", async_=True)
    for model in models.values():
        model.zgraph.finish()
    assert len(folder.tags(tmp_path)) == 20
    for tag in folder.tags(tmp_path):
        Checkpoint(tmp_path / tag).verify()


def test_a_save_that_begins_is_not_taken_for_one_that_was_left(tmp_path):
    def save(name):
        for number in range(100):
            made = folder.begin(tmp_path, f"{name}{number}")
            (made.path / "value").write_text(name)
            made.commit()
        return [(tmp_path / f"{name}{number}" / "value").read_text() for number in range(100)]

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(save, "abcd")) == [[name] * 100 for name in "abcd"]


def test_a_tag_that_is_being_saved_is_not_saved_twice(tmp_path):
    model = trained(1)
    going = folder.begin(tmp_path, "it")
    with pytest.raises(CheckpointError, match="another save of it is on its way"):
        model.save_checkpoint(tmp_path, "it")
    going.discard()
    model.save_checkpoint(tmp_path, "it")


def test_old_checkpoints_that_cannot_be_removed_are_a_warning(tmp_path, monkeypatch, caplog):
    model = trained()
    model.save_checkpoint(tmp_path, "one")
    original = Path.rename

    def stuck(self, target):
        if self.name == "one":
            raise OSError(13, "Permission denied")
        return original(self, target)

    monkeypatch.setattr(Path, "rename", stuck)
    with caplog.at_level(logging.WARNING):
        model.save_checkpoint(tmp_path, "two", keep_last=1)
    assert folder.tags(tmp_path) == ["two", "one"] and "could not be removed" in caplog.text


def test_there_is_nothing_to_load(tmp_path):
    model = compiled()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        model.load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        model.load_checkpoint(tmp_path)
    trained().save_checkpoint(tmp_path)
    (tmp_path / "latest").unlink()
    with pytest.raises(CheckpointError, match=r"without its file latest(.|\n)*step3"):
        model.load_checkpoint(tmp_path)


# -- in the background


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """The weights of the step that was saved, though the next steps have changed them before a byte was written."""
    import threading

    go = threading.Event()
    original = tensorfile.write

    def slow(*args):
        assert go.wait(60)
        return original(*args)

    monkeypatch.setattr("zgraph.checkpoint.write_native.write", slow)
    model = trained(ema=0.9)
    model.save_checkpoint(tmp_path, async_=True)
    saved = everything(model)
    for x in batches(2, 3):
        model.train_step(x)
    assert not (tmp_path / "latest").exists()
    go.set()
    model.zgraph.finish()
    other = compiled(seed=1, ema=0.9)
    other.load_checkpoint(tmp_path)
    assert same(saved, everything(other)) == [] and same(saved, everything(model)) != []


@pytest.mark.parametrize("call", ["save", "load", "finish"])
def test_an_error_in_the_background_comes_with_the_next_call(call, tmp_path, monkeypatch):
    model = trained()
    model.save_checkpoint(tmp_path, "good")
    with monkeypatch.context() as patched:

        def full(*args):
            raise OSError(28, "No space left on device")

        patched.setattr("zgraph.checkpoint.write_native.write", full)
        model.save_checkpoint(tmp_path, "bad", async_=True)
        with pytest.raises(CheckpointError, match=r"could not be saved(.|\n)*No space left"):
            {"save": lambda: model.save_checkpoint(tmp_path), "load": lambda: model.load_checkpoint(tmp_path)}.get(
                call, model.zgraph.finish
            )()
    assert folder.tags(tmp_path) == ["good"] and folder.latest(tmp_path) == "good"
    model.train_step(batches(1)[0])
    model.save_checkpoint(tmp_path, "after")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["after", "good", "latest"]


# -- damage


def parts(path: Path, pieces: int) -> list[tuple[int, int]]:
    """The bytes of a file, cut into regions."""
    size = path.stat().st_size
    edges = sorted({round(size * i / pieces) for i in range(pieces + 1)})
    return list(itertools.pairwise(edges))


def test_every_region_flipped_truncated_or_removed_is_refused(tmp_path):
    """Over 500 damages of a small checkpoint, of every file and every region: nothing of the model has changed at any."""
    model = trained(ema=0.9)
    model.save_checkpoint(tmp_path / "good", client_state={"at": 3, "t": torch.arange(5)})
    other = compiled(seed=1, ema=0.9)
    other.train_step(batches(1)[0])
    before = everything(other)
    drawn = torch.get_rng_state()
    source = random.Random(0)
    cases = 0

    def refused(what: str) -> None:
        nonlocal cases
        cases += 1
        with pytest.raises(CheckpointError):
            other.load_checkpoint(bad)
            pytest.fail(f"{what} was taken for a checkpoint")
        changed = same(before, everything(other))
        assert changed == [] and torch.equal(drawn, torch.get_rng_state()), (what, changed)

    bad = tmp_path / "bad"
    files = sorted(p.relative_to(tmp_path / "good") for p in (tmp_path / "good").rglob("*") if p.is_file())
    assert len(files) == 4
    shutil.copytree(tmp_path / "good", bad)
    for name in files:
        original = (bad / name).read_bytes()
        for first, last in parts(bad / name, 60):
            at = source.randrange(first, last)
            flipped = bytearray(original)
            flipped[at] ^= 1 << source.randrange(8)
            (bad / name).write_bytes(flipped)
            refused(f"{name}: a bit of byte {at} flipped")
            (bad / name).write_bytes(original[:first])
            refused(f"{name}: cut off at byte {first}")
            (bad / name).write_bytes(original[:first] + original[last:])
            refused(f"{name}: without bytes {first} to {last}")
        (bad / name).write_bytes(original + b"\0")
        refused(f"{name}: a byte longer")
        (bad / name).unlink()
        refused(f"{name}: gone")
        (bad / name).write_bytes(original)
    assert cases > 500
    other.load_checkpoint(bad)  # (it is whole again)
    assert same(everything(model), everything(other)) == []


def test_the_last_good_one_is_loaded_when_asked_for(tmp_path, caplog):
    model = trained()
    model.save_checkpoint(tmp_path, "good")
    kept = everything(model)
    model.train_step(batches(1)[0])
    model.save_checkpoint(tmp_path, "bad")
    shard = next((tmp_path / "bad").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    other = compiled(seed=1)
    with pytest.raises(CheckpointError, match=r"safetensors is damaged(.|\n)*its checksum is not the manifest's"):
        other.load_checkpoint(tmp_path)
    with caplog.at_level(logging.WARNING):
        other.load_checkpoint(tmp_path, fallback=True)
    assert same(kept, everything(other)) == [] and "bad" in caplog.text


@pytest.mark.slow
def test_a_read_that_fails_in_the_end_leaves_no_model_that_seems_whole(tmp_path, monkeypatch):
    model = trained()
    model.save_checkpoint(tmp_path)
    other = compiled(seed=1)
    other.train_step(batches(1)[0])
    original = os.preadv

    def failing(descriptor, buffers, offset):
        if any(f.function == "read_data" for f in inspect.stack()) and offset > 2000:
            raise OSError(5, "Input/output error")
        return original(descriptor, buffers, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", failing)
        with pytest.raises(CheckpointError, match="could not be read to its end"):
            other.load_checkpoint(tmp_path)
    with pytest.raises(StepError, match="failed half way"):
        other.train_step(batches(1)[0])
    other = compiled(seed=1)
    other.load_checkpoint(tmp_path)
    other.train_step(batches(1)[0])


def test_a_disk_that_cannot_be_read_is_found_before_anything_changes(tmp_path, monkeypatch):
    model = trained()
    model.save_checkpoint(tmp_path)
    before = everything(model)
    for error in (OSError(5, "Input/output error"), None):

        def failing(descriptor, buffers, offset, error=error):
            if error is not None:
                raise error
            return 0

        with monkeypatch.context() as patched:
            patched.setattr(os, "preadv", failing)
            with pytest.raises(CheckpointError, match=r"can't be read|is damaged"):
                model.load_checkpoint(tmp_path)
        assert same(before, everything(model)) == []


def test_a_disk_full_at_any_write_leaves_the_last_good_one(tmp_path, monkeypatch):
    """Each write, rename and sync of a save fails in turn: the run goes on, the checkpoint before is whole, nothing is left."""
    model = trained()
    model.save_checkpoint(tmp_path, "good")
    kept, steps = everything(model), 0
    originals = {name: getattr(os, name) for name in ("fsync", "rename", "mkdir")}
    opened = open

    class Full:
        def __init__(self, at: int) -> None:
            self.left = at

        def passed(self) -> None:
            self.left -= 1
            if self.left == 0:
                raise OSError(28, "No space left on device")

    def counting(full: Full, patched: pytest.MonkeyPatch) -> None:
        def wrapped(original):
            def call(*args, **kwargs):
                full.passed()
                return original(*args, **kwargs)

            return call

        for name, original in originals.items():
            patched.setattr(os, name, wrapped(original))

        def fake(path, mode="r", *args, **kwargs):
            file = opened(path, mode, *args, **kwargs)
            if "x" in mode:
                write = file.write
                proxy = type("Proxy", (), {
                    "__enter__": lambda s: s, "__exit__": lambda s, *e: file.__exit__(*e),
                    "write": lambda s, data: (full.passed(), write(data))[1],
                    "__getattr__": lambda s, key: getattr(file, key),
                })  # fmt: skip
                return proxy()
            return file

        patched.setattr(tensorfile, "open", fake, raising=False)

    for at in range(1, 200):
        with monkeypatch.context() as patched:
            full = Full(at)
            counting(full, patched)
            try:
                model.save_checkpoint(tmp_path, "bad")
            except CheckpointError as error:
                assert "No space left" in str(error)
                steps += 1
            if full.left > 0:
                break
        Checkpoint(tmp_path / folder.latest(tmp_path)).verify()
        assert "good" in folder.tags(tmp_path) and not list(tmp_path.glob(".*.partial")), at
        Checkpoint(tmp_path / "good").verify()
        model.train_step(batches(1)[0])
    assert steps > 20
    other = compiled(seed=1)
    other.load_checkpoint(tmp_path, "good")
    assert same(kept, everything(other)) == []


# -- malice


def forged(place: Path, change) -> None:
    """Change the manifest, and give it the checksum that fits."""
    path = place / manifest.NAME
    data = json.loads(path.read_bytes())
    data.pop("checksum")
    change(data)
    body = json.dumps(data, separators=(",", ":")).encode()[:-1]
    path.write_bytes(body + manifest.MARK + tensorfile.checksum(body).encode() + b'"}\n')


def renamed(data, new):
    name = next(n for n in data["files"] if n.endswith("safetensors"))
    data["files"][new] = data["files"].pop(name)


def entry(data):
    return next(v for n, v in data["files"].items() if n.endswith("safetensors"))


FORGERIES = {
    "a path that leads out": lambda d: renamed(d, "../../outside.safetensors"),
    "an absolute path": lambda d: renamed(d, "/etc/passwd"),
    "a hidden file": lambda d: renamed(d, ".hidden"),
    "the manifest itself": lambda d: renamed(d, manifest.NAME),
    "an absurd shape": lambda d: d["tensors"].update({"model.first.weight": ["F32", [2**40, 2**40]]}),
    "a negative shape": lambda d: d["tensors"].update({"model.first.weight": ["F32", [-13, 10]]}),
    "a shape of fractions": lambda d: d["tensors"].update({"model.first.weight": ["F32", [13.0, 10]]}),
    "many dimensions": lambda d: d["tensors"].update({"model.first.weight": ["F32", [1] * 100000]}),
    "another type": lambda d: d["tensors"].update({"model.first.weight": ["I32", [13, 10]]}),
    "a type that is none": lambda d: d["tensors"].update({"model.first.weight": ["O", [13, 10]]}),
    "a tensor that is nowhere": lambda d: d["tensors"].update({"model.more": ["F32", [3]]}),
    "a block twice": lambda d: entry(d)["pieces"].append(entry(d)["pieces"][0]),
    "a block too few": lambda d: entry(d)["pieces"].pop(),
    "a block elsewhere": lambda d: entry(d)["pieces"][0].__setitem__(3, 0),
    "a file of another size": lambda d: entry(d).update(bytes=10),
    "a header of another size": lambda d: entry(d).update(header=[8, "0" * 32]),
    "no files": lambda d: d.update(files={}),
    "a format of the future": lambda d: d.update(format=99),
    "a list for a table": lambda d: d.update(tensors=[]),
    "steps that are no number": lambda d: d["known"].update(steps="many"),
    "ranks without files": lambda d: d.update(own=["rank-00000.json", "rank-00001.json"]),
    "a client tensor that is nowhere": lambda d: d["client"].update(
        x={"value": {"__zgraph__": "tensor", "name": "client.9.9"}}
    ),
    "an object for the client": lambda d: d["client"].update(x={"value": {"__zgraph__": "object", "is": "os.system"}}),
    "an array of objects": lambda d: d["client"].update(
        x={"value": {"__zgraph__": "array", "dtype": "O", "shape": [1], "name": "model.scale"}}
    ),
}


@pytest.fixture(scope="module")
def once_trained():
    """For tests that show that nothing of it changes."""
    return trained(1)


@pytest.mark.parametrize("what", FORGERIES)
def test_a_manifest_that_lies_is_refused(once_trained, what, tmp_path):
    model = once_trained
    place = tmp_path / "c" / model.save_checkpoint(tmp_path / "c")
    (tmp_path / "outside.safetensors").write_bytes(b"x" * 64)
    forged(place, FORGERIES[what])
    before = everything(model)
    with pytest.raises(CheckpointError):
        model.load_checkpoint(place)
    assert same(before, everything(model)) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "outside.safetensors"]


def test_a_pickle_in_a_checkpoint_is_never_run(tmp_path):
    import pickle

    model = trained(1)
    place = tmp_path / model.save_checkpoint(tmp_path)

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    payload = pickle.dumps(Evil())
    for name in ("rank-00000.json", "manifest.json", next(place.glob("*.safetensors")).name):
        original = (place / name).read_bytes()
        (place / name).write_bytes(payload)
        with pytest.raises(CheckpointError):
            model.load_checkpoint(tmp_path)
        (place / name).write_bytes(original)
    own = json.dumps({"random": {"torch": "AA=="}, "client": {}, "extra": {}}).encode()
    (place / "rank-00000.json").write_bytes(own)
    forged(place, lambda d: d["files"]["rank-00000.json"].update(bytes=len(own), checksum=tensorfile.checksum(own)))
    with pytest.raises(CheckpointError, match="random states"):
        model.load_checkpoint(place)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["rank-00000.json", "manifest.json", "latest"])
def test_links_and_pipes_are_no_files_of_a_checkpoint(name, tmp_path):
    model = trained(1)
    place = tmp_path / "c" / model.save_checkpoint(tmp_path / "c")
    path = place / name if name != "latest" else tmp_path / "c" / name
    shutil.move(path, tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    with pytest.raises(CheckpointError):
        model.load_checkpoint(tmp_path / "c")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError):
        model.load_checkpoint(tmp_path / "c")  # (and it does not wait for who writes)


def test_a_deeply_nested_manifest_is_refused(tmp_path):
    model = trained(1)
    place = tmp_path / model.save_checkpoint(tmp_path)
    body = b'{"format":1,"client":' + b"[" * 200_000 + b"]" * 200_000
    (place / manifest.NAME).write_bytes(body + manifest.MARK + tensorfile.checksum(body).encode() + b'"}\n')
    with pytest.raises(CheckpointError):
        model.load_checkpoint(place)


def test_values_of_other_ranks_are_a_list():
    assert isinstance(PerRank([1, 2]), list) and zgraph.PerRank is PerRank
