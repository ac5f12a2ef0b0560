"""Damaged and foreign files of the cache are made again, and none is used."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from torch import nn

import zgraph
from zgraph.cache.store import SUFFIX, Store
from zgraph.capture.capture import Trace
from zgraph.torch_compat import inductor_code, kernel_files


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ZGRAPH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "programs"


def gradients(backend="eager", activation=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), activation or nn.GELU(), nn.Linear(5, 1))
    zgraph.compile(model, zgraph.Plan(mesh={"dp": 1}, zero=0, backend=backend))
    model(torch.linspace(-1, 1, 12).reshape(3, 4)).sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("times", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_random_damages_are_made_again_and_none_is_used(cache, monkeypatch, times):
    made = []
    joint = Trace.joint
    monkeypatch.setattr(Trace, "joint", lambda self, *rest: made.append(1) or joint(self, *rest))
    plain = gradients()
    (path,) = cache.glob(f"*/*{SUFFIX}")
    draw = random.Random(times)
    for number in range(times):
        before = len(made)
        data = path.read_bytes()
        at = draw.randrange(len(data))
        damaged = [data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :], data[:at], data + b"\n"]
        path.write_bytes(draw.choice([*damaged, b"", draw.randbytes(100)]))
        found = gradients()
        assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True)), number
        assert len(made) == before + 1, number
        assert len(path.read_bytes()) > 100
    gradients()
    assert len(made) == times + 1  # (the last one that was made again is used)


@pytest.mark.inductor
def test_code_is_taken_with_its_libraries_whatever_lies_in_inductors_folder(cache, monkeypatch, caplog):
    compiled = []
    function = inductor_code.compile_with_inductor
    monkeypatch.setattr(inductor_code, "compile_with_inductor", lambda *a, **k: compiled.append(1) or function(*a, **k))
    folder = Path(kernel_files.inductor_folder())
    bound = 0.716253  # (no other test's kernels hold it: tests that run beside this one write to the folder as well)

    def found():
        return gradients("inductor", nn.Hardtanh(-bound, bound))

    def kernels():
        return sorted(p for p in folder.glob("*/*.cpp") if str(bound) in p.read_text())

    cold = found()
    count = len(compiled)
    assert count >= 2
    kept = {p: p.read_bytes() for p in cache.glob("*/*-library" + SUFFIX)}
    there = kernels()
    assert kept and there
    warm = found()
    assert len(compiled) == count and kernels() == there  # (no kernel was compiled by another name)
    library = folder / _libraries(cache)[0]
    before = library.read_bytes()
    library.unlink()  # (a new file: this process has loaded the old one)
    library.write_bytes(b"damaged")
    again = found()
    assert len(compiled) == count and library.read_bytes() == before
    for path, data in kept.items():
        path.write_bytes(data[:-1])
    library.unlink()
    last = found()
    library.write_bytes(before)  # (Inductor has loaded it, and does not look for it)
    assert len(compiled) > count and "can't be used" in caplog.text
    for grads in (warm, again, last):
        assert all(torch.equal(a, b) for a, b in zip(cold, grads, strict=True))


def _libraries(cache):
    """The paths of all libraries that code is kept with."""
    store = Store(cache)
    lines = [f.path.read_bytes().partition(b"\n")[0] for f in store.entries() if f.kind == "code"]
    entries = [store.get_json("code", json.loads(line)["key"]) for line in lines]
    return [path for entry in entries for path, _ in entry["libraries"]]


@pytest.mark.inductor
@pytest.mark.slow
def test_a_model_in_training_looks_at_no_graph_of_a_kept_step(cache):
    def steps():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 1))
        zgraph.compile(model, zgraph.Plan(mesh={"dp": 1}, zero=0, optimizer=zgraph.AdamW(lr=0.1)))
        for _ in range(2):
            model(torch.ones(3, 4)).sum().backward()
            model.step()
        return model

    cold, warm = steps(), steps()
    assert all(torch.equal(a, b) for a, b in zip(cold.parameters(), warm.parameters(), strict=True))
    codes = [f for f in Store(cache).entries() if f.kind == "code"]
    assert {f.words["program"] for f in codes} == {
        "train0",
        "update0",
    }  # (the first process keeps the update's as well)
    (step,) = warm.zgraph.programs.values()
    assert not step.captured.is_made and not any(e.program.is_made for e in step.executables())
