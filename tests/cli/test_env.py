"""`zgraph env` tells what a machine has and lacks, whatever is missing, and nothing secret."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sweeps import sweep
from typer.testing import CliRunner

from zgraph import __version__
from zgraph.cli.app import app
from zgraph.inspection import environment
from zgraph.inspection.environment import SUPPORTED

HERE = Path(__file__).parents[1]


def lacking() -> dict[str, environment.Missing]:
    return {m.what: m for m in environment.environment().missing}


def test_versions_and_the_machine_are_told():
    found = environment.environment()
    assert found.versions["zgraph"] == __version__
    assert found.versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found.cpu["cores"] == os.cpu_count() and found.cpu["vectors"] == torch.backends.cpu.get_cpu_capability()
    assert found.memory["total_bytes"] > found.memory["free_bytes"] > 0
    assert found.limits["open files"] and "memlock" in found.limits
    assert found.links["gloo"] is torch.distributed.is_gloo_available()
    assert all(not isinstance(section, dict) or "error" not in section for section in vars(found).values())


def test_disks_are_told_with_what_offloading_needs(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    facts = environment.environment().disks[str(tmp_path)]
    assert facts["filesystem"] and 0 < facts["free_bytes"] <= shutil.disk_usage(tmp_path).total
    assert isinstance(facts["direct"], bool)
    assert not list(tmp_path.iterdir()), "what was tried there is gone"


def test_of_variables_only_those_of_zgraph_and_torch_are_shown_and_no_secrets(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    for name, value in {
        "ZGRAPH_REPRO_DIR": "/home/someone/repros",
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "3",
        "TORCH_HUB_TOKEN": "hush",
        "CUDA_MIRROR": "https://me:hush@example.org/x",
        "AWS_REGION": "hush",
        "MY_TORCH_DIR": "hush",
    }.items():
        monkeypatch.setenv(name, value)
    shown = environment.environment().variables
    assert shown["ZGRAPH_REPRO_DIR"] == "~/repros" and shown["NCCL_DEBUG"] == "INFO" and shown["OMP_NUM_THREADS"] == "3"
    assert shown["TORCH_HUB_TOKEN"] == "(set)" and shown["CUDA_MIRROR"] == "https://(…)@example.org/x"
    assert "AWS_REGION" not in shown and "MY_TORCH_DIR" not in shown
    assert "hush" not in CliRunner().invoke(app, ["env"]).stdout


# -- what is missing


def test_a_compiler_that_is_missing_is_told_with_what_it_costs(monkeypatch):
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    missing = lacking()["a C++ compiler"]
    assert "inductor" in missing.cost and "eager" in missing.hint


@pytest.mark.parametrize("name", ["triton", "transformers"])
def test_a_package_that_is_missing_is_told_with_what_it_costs(monkeypatch, name):
    real = importlib.metadata.version

    def version(wanted: str) -> str:
        if wanted == name:
            raise importlib.metadata.PackageNotFoundError(wanted)
        return real(wanted)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert environment.environment().versions[name] is None
    assert {"triton": "kernels", "transformers": "hf:DIR"}[name] in lacking()[name.replace("triton", "Triton")].cost


@pytest.mark.parametrize(
    ("version", "fine"),
    [("2.10.1", False), ("2.11.0+cpu", True), ("2.14.1", True), ("2.15.0.dev20260101", False), ("3.0", False)],
)
def test_a_torch_outside_of_the_range_is_told(monkeypatch, version, fine):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "torch" else real(name))
    assert any("a supported torch" in what for what in lacking()) is not fine


def test_the_range_is_that_of_the_package():
    wanted = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]["dependencies"]
    low, high = re.findall(r"(\d+)\.(\d+)", next(w for w in wanted if w.startswith("torch")))
    assert (tuple(map(int, low)), tuple(map(int, high))) == SUPPORTED


def test_a_folder_without_direct_access_is_told(monkeypatch, tmp_path):
    from zgraph.offload.files import FileStore

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(FileStore, "_try_direct", lambda self: (self._fd, 1))
    (what,) = [w for w in lacking() if w.startswith(f"O_DIRECT in {tmp_path}")]
    assert "page cache" in lacking()[what].cost


def test_devices_are_told_with_their_links(monkeypatch):
    facts = SimpleNamespace(name="H100", total_memory=80 * 10**9, major=9, minor=0)
    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_properties": lambda at: facts,
        "can_device_access_peer": lambda a, b: True,
    }
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.setattr(
        environment.subprocess, "run", lambda *a, **k: SimpleNamespace(stdout="GPU0  X  NV18\nGPU1  NV18  X\n")
    )
    found = environment.environment()
    assert found.devices["cuda:1"] == {"name": "H100", "memory_bytes": 80 * 10**9, "capability": "9.0"}
    assert found.links["peer access"] and found.links["nvlink"] == "NV18"
    missing = {m.what for m in found.missing}
    assert "NCCL" in missing and "a CUDA device" not in missing


@sweep("gone", ["torch", "zgraph.offload.files", "zgraph.runtime.memory", "rich", "numpy"], quick=(0,))
def test_it_answers_without_this_module(gone):
    code = f"""
import sys
sys.modules[{gone!r}] = None
from zgraph.cli.app import app
app(["env", "--json"], standalone_mode=False)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if gone == "torch":
        assert "error" in found["devices"] and found["missing"][0]["what"] == "a torch that can be imported"


def test_a_part_that_fails_says_why_and_the_others_are_there(monkeypatch):
    def fails(*_: object) -> None:
        raise OSError(f"no such device below {Path.home()}")

    monkeypatch.setattr(environment.resource, "getrlimit", fails)
    found = environment.environment()
    assert found.limits["error"].startswith("OSError: no such device") and str(Path.home()) not in found.limits["error"]
    assert found.versions["python"] and "error" not in found.cpu


# -- the command


def test_the_command_prints_text_and_json(tmp_path):
    done = CliRunner().invoke(app, ["env"])
    assert done.exit_code == 0 and re.search(rf"zgraph +{re.escape(__version__)}", done.stdout)
    out = tmp_path / "env.json"
    assert CliRunner().invoke(app, ["env", "--json", "-o", str(out)]).exit_code == 0
    found = json.loads(out.read_text())
    assert set(found) == {f for f in environment.Environment.__dataclass_fields__}


@pytest.mark.parametrize("args", [["somewhere"], ["--world", "2"]])
def test_it_takes_no_target(args):
    assert CliRunner().invoke(app, ["env", *args]).exit_code == 2


def test_its_help_does_not_load_torch():
    code = "import sys; from zgraph.cli.app import app; app(['env', '--help'], standalone_mode=False)"
    assert subprocess.run([sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)"]).returncode == 0
