"""`zgraph ckpt` tells what a checkpoint is, finds every damage, and makes other checkpoints of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import zgraph
from zgraph.cli.app import app

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.second = nn.Linear(5, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return self.second(self.first(x).tanh()).pow(2).mean()


def run(*args: object) -> Any:
    return CliRunner().invoke(app, ["ckpt", *(str(a) for a in args)])


def ok(*args: object) -> str:
    done = run(*args)
    assert done.exit_code == 0, done.output
    return done.stdout


def told(*args: object) -> Any:
    return json.loads(ok(*args, "--json"))


def fails(code: int, *args: object) -> str:
    done = run(*args)
    assert done.exit_code == code and "Traceback" not in done.output, done.output
    return done.output


def model_of(**fields: Any) -> nn.Module:
    torch.manual_seed(0)
    fields = {"backend": "eager", "optimizer": zgraph.AdamW(lr=0.1)} | fields
    return zgraph.compile(Net(), zgraph.Plan(**fields))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """step1 and step2 of a run, with client state in step2."""
    folder = tmp_path_factory.mktemp("run")
    model = model_of()
    for number in (1, 2):
        model.train_step(torch.randn(6, 4, generator=torch.Generator().manual_seed(number)))
        model.save_checkpoint(folder, client_state={"epoch": 3, "seen": torch.ones(2)} if number == 2 else None)
    return folder


@pytest.fixture
def copied(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# -- inspect ----------------------------------------------------------------------------------------------------------
def test_inspect_tells_what_a_checkpoint_is(saved):
    data = told("inspect", saved)
    assert (data["kind"], data["steps"], data["samples"], data["world"]) == ("zgraph", 2, 12, 1)
    assert data["client_keys"] == ["epoch", "seen"] and data["plan"]["optimizer"]["name"] == "AdamW"
    assert [(t["tag"], t["steps"], t["latest"], t["damaged"]) for t in data["tags"]] == [
        ("step2", 2, True, None),
        ("step1", 1, False, None),
    ]
    sizes = {t["tag"]: t["bytes"] for t in data["tags"]}
    assert sizes["step2"] == sum(p.stat().st_size for p in (saved / "step2").iterdir())
    (weight,) = (t for t in data["tensors"] if t["name"] == "model.first.weight")
    assert weight == {
        "name": "model.first.weight", "kind": "weights", "dtype": "float32", "shape": [5, 4], "blocks": 1, "bytes": 80,
    }  # fmt: skip
    assert data["totals"]["weights"] == {"tensors": 5, "bytes": 31 * 4 + 8}
    assert data["totals"]["client"] == {"tensors": 1, "bytes": 8}
    assert sum(t["bytes"] for t in data["totals"].values()) == sum(t["bytes"] for t in data["tensors"])


def test_inspect_says_the_same_to_people(saved):
    text = ok("inspect", saved, "--tag", "step2")
    assert "prefetch" not in text  # (which is as it is by default)
    for words in (
        "zgraph",
        "steps         2",
        "epoch, seen",
        "latest",
        "model.first.weight",
        "[5, 4]",
        '"name": "AdamW"',
    ):
        assert words in text, text
    assert "step1" in text and "epoch" not in ok("inspect", saved, "--tag", "step1")


@pytest.mark.parametrize("pattern", ["first.*", "model.first.*", "*first.bias"])
def test_a_filter_takes_names_with_and_without_what_they_begin_with(saved, pattern):
    names = [t["name"] for t in told("inspect", saved, "--filter", pattern)["tensors"]]
    assert names and all("first" in name for name in names) and "model.first.bias" in names
    assert ("model.first.weight" in names) == (pattern != "*first.bias")


def test_a_filter_that_matches_nothing_is_an_error(saved):
    assert "no tensor matches 'fist.*'" in fails(2, "inspect", saved, "--filter", "fist.*")


def test_a_damaged_manifest_is_listed_as_such(copied):
    flip(copied / "step1" / "manifest.json", 40)
    damaged = {t["tag"]: t["damaged"] for t in told("inspect", copied)["tags"]}
    assert damaged["step2"] is None and "manifest.json is damaged" in damaged["step1"]


@pytest.mark.parametrize("command", ["inspect", "verify", "export", "convert", "compare"])
def test_what_is_no_checkpoint_is_an_error(command, tmp_path):
    more = [tmp_path / "to"] if command in ("export", "convert", "compare") else []
    fails(2, command, tmp_path / "nothing", *more)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_tag_is_answered_with_those_that_there_are(saved):
    assert "step2, step1" in fails(2, "inspect", saved, "--tag", "step3")
    assert "no checkpoint" in fails(2, "verify", saved, "--tag", "step3")


def test_help_loads_no_torch():
    code = "import sys; from zgraph.cli.app import app; app(sys.argv[1:], standalone_mode=False)"
    for args in (["ckpt", "--help"], ["ckpt", "export", "--help"]):
        command = [sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)", *args]
        assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0


# -- verify -----------------------------------------------------------------------------------------------------------
def test_verify_passes_what_is_whole(saved):
    assert "whole" in ok("verify", saved)
    assert [(r["tag"], r["ok"]) for r in told("verify", saved, "--all")["checkpoints"]] == [
        ("step2", True), ("step1", True), (None, True),
    ]  # fmt: skip


def files() -> list[str]:
    return ["shard-00001-model-00001-of-00001.safetensors", "rank-00000.json", "manifest.json"]


@pytest.mark.parametrize("file", files())
@pytest.mark.parametrize("at", [0, 30, -1])
def test_verify_finds_a_bit_that_is_wrong_in_any_file(copied, file, at):
    path = copied / "step2" / file
    flip(path, at)
    assert "damaged" in fails(1, "verify", copied, "--tag", "step2")
    data = json.loads(fails(1, "verify", copied, "--all", "--json"))
    assert not data["ok"]
    assert {r["tag"]: r["ok"] for r in data["checkpoints"]} == {"step2": False, "step1": True, None: False}


def test_verify_names_the_tensor_that_is_damaged(copied):
    flip(copied / "step2" / files()[0], -1)
    assert "its checksum is not the manifest's" in fails(1, "verify", copied)


def test_verify_finds_a_file_that_is_gone_and_a_latest_that_lies(copied):
    (copied / "step1" / files()[0]).unlink()
    assert files()[0] in fails(1, "verify", copied, "--tag", "step1")
    (copied / "latest").write_text("step1 " + "0" * 32 + "\n")
    assert "latest is damaged" in fails(1, "verify", copied)


def test_verify_takes_one_tag_or_all(saved):
    assert "not both" in fails(2, "verify", saved, "--tag", "step1", "--all")


# -- compare ----------------------------------------------------------------------------------------------------------
def test_a_checkpoint_is_equal_to_itself(saved, copied):
    assert "are equal, bit for bit" in ok("compare", saved, copied)
    assert told("compare", saved / "step1", copied / "step1")["equal"]


def test_compare_says_where_and_how_far(saved):
    data = json.loads(fails(1, "compare", saved / "step1", saved / "step2", "--json"))
    assert data["known"]["steps"] == [1, 2] and data["only"] == [[], ["client.0.0"]]
    (weight,) = (d for d in data["different"] if d["name"] == "model.first.weight")
    one, two = (load_file(saved / tag / files()[0])["model.first.weight"] for tag in ("step1", "step2"))
    assert weight["differing"] == int((one != two).sum()) and weight["elements"] == 20
    assert weight["first"] == (one != two).nonzero()[0].tolist()
    assert weight["largest"] == pytest.approx(float((one - two).abs().max()))
    assert weight["relative"] == pytest.approx(float((one - two).norm() / two.norm()), rel=1e-6)
    assert data["same"] == 1  # (the buffer)
    text = fails(1, "compare", saved / "step1", saved / "step2")
    assert "model.first.weight" in text and "of 20" in text and "steps: 1 in" in text


def test_compare_looks_only_at_what_is_asked_for(saved):
    assert "1 tensors are equal" in ok("compare", saved / "step1", saved / "step2", "--filter", "model.seen")


def test_compare_tells_types_and_shapes_apart(saved, tmp_path):
    weights = {"a": torch.ones(2), "b": torch.ones(3), "c": torch.tensor([0.0, float("nan")])}
    other = {"a": torch.ones(2).bfloat16(), "b": torch.ones(4), "c": torch.tensor([-0.0, float("nan")])}
    for name, tensors in (("one", weights), ("two", other)):
        model = nn.ParameterDict({k: nn.Parameter(v.clone()) for k, v in tensors.items()})
        zgraph.compile(Holder(model)).save_checkpoint(tmp_path / name)
    data = json.loads(fails(1, "compare", tmp_path / "one", tmp_path / "two", "--json"))
    why = {d["name"].rpartition(".")[2]: (d["why"], d["differing"]) for d in data["different"]}
    assert why == {
        "a": ("it is float32 and bfloat16", 0), "b": ("it is [3] and [4]", None), "c": ("other numbers", 0),
    }  # fmt: skip


class Holder(nn.Module):
    def __init__(self, held: nn.Module) -> None:
        super().__init__()
        self.held = held

    def forward(self):
        return sum(p.sum() for p in self.held.values())


# -- export and convert -----------------------------------------------------------------------------------------------
def test_export_writes_the_weights_alone(saved, tmp_path):
    ok("export", saved, tmp_path / "to", "--dtype", "bf16")
    found = load_file(tmp_path / "to" / "model.safetensors")
    held = load_file(saved / "step2" / files()[0])
    assert {f"model.{n}" for n in found} == {n for n in held if n.startswith("model.")}
    assert torch.equal(found["first.weight"], held["model.first.weight"].bfloat16())
    assert found["seen"].dtype is torch.int64


def test_export_with_a_config_is_what_from_pretrained_reads(tmp_path):
    case = models.build("mixtral")
    case.model.config.use_cache = True
    case.model.generation_config.do_sample, case.model.generation_config.top_k = True, 7
    case.model.config.save_pretrained(tmp_path / "config")
    case.model.generation_config.save_pretrained(tmp_path / "config")
    model = zgraph.compile(case.model, zgraph.Plan(backend="eager", optimizer=zgraph.AdamW(), precision="bf16"))
    model.save_checkpoint(tmp_path / "run")
    ok("export", tmp_path / "run", tmp_path / "to", "--config", tmp_path / "config", "--max-shard-size", "20KB")
    loaded, info = type(model).from_pretrained(tmp_path / "to", output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.config.use_cache and loaded.generation_config.top_k == 7
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert len(list((tmp_path / "to").glob("model-*.safetensors"))) > 3


def test_export_with_another_models_config_is_refused(saved, tmp_path):
    models.build("gpt2").model.config.save_pretrained(tmp_path / "config")
    assert "another model than the config" in fails(
        2, "export", saved, tmp_path / "to", "--config", tmp_path / "config"
    )
    assert "there is no config.json" in fails(2, "export", saved, tmp_path / "to", "--config", tmp_path)
    assert "'fp8' is no dtype" in fails(2, "export", saved, tmp_path / "to", "--dtype", "fp8")
    assert not (tmp_path / "to").exists()


def test_export_to_a_full_disk_leaves_what_was_there(saved, tmp_path, monkeypatch):
    save_file({"before": torch.ones(1)}, tmp_path / "model.safetensors")

    def full(*_: Any) -> int:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        assert "No space left" in fails(2, "export", saved, tmp_path)
    assert list(load_file(tmp_path / "model.safetensors")) == ["before"] and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("system", ["zgraph", "dcp"])
def test_convert_keeps_weights_and_states(saved, tmp_path, system):
    ok("convert", saved, tmp_path, "--to", system, "--as", "there")
    data = json.loads(run("compare", saved, tmp_path / "there", "--filter", "*[a-z].*", "--json").stdout)
    assert not data["different"] and not any(n.startswith(("model.", "optimizer.")) for ns in data["only"] for n in ns)


@pytest.mark.parametrize("kind", ["torch.distributed.checkpoint", "safetensors"])
def test_checkpoints_of_other_systems_are_looked_at_alike(saved, tmp_path, kind):
    if kind != "safetensors":
        ok("convert", saved, tmp_path, "--to", "dcp", "--as", "there")
    else:
        ok("export", saved, tmp_path / "there")
    data = told("inspect", tmp_path / "there")
    assert data["kind"] == kind and data["totals"]["weights"] == {"tensors": 5, "bytes": 31 * 4 + 8}
    assert "model.first.weight" in ok("inspect", tmp_path / "there")
    assert "whole" in ok("verify", tmp_path / "there")
    assert "5 tensors are equal" in ok("compare", tmp_path / "there", saved, "--filter", "model.*")
    largest = max((tmp_path / "there").iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-9])
    fails(1, "verify", tmp_path / "there")


def test_convert_to_what_there_is_not_is_refused(saved, tmp_path):
    assert "did you mean 'dcp'" in fails(2, "convert", saved, tmp_path / "to", "--to", "dpc")


@pytest.mark.parametrize("system", ["zgraph", "dcp"])
def test_convert_replaces_no_checkpoint(copied, saved, tmp_path, system):
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    said = fails(2, "convert", saved, copied, "--to", system)
    assert "there is something already" in said and "step2" in said and "--as" in said
    assert {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()} == before
