"""Ranks make a program once for each cache folder, and compare what they have, wherever it is from."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zgraph
from zgraph.cache.store import Store
from zgraph.capture.capture import Trace
from zgraph.errors import RankMismatchError
from zgraph.runtime.compile_once import compilers_of


def test_who_makes_a_program():
    assert compilers_of([("f", "k", False)] * 4) == [0]
    assert compilers_of([("f", "k", False), ("f", "k", True)]) == []
    assert compilers_of([("f", "k", False), ("g", "k", False), ("g", "k", False)]) == [0, 1]
    assert compilers_of([None, ("f", "k", False), ("f", "j", False)]) == [1, 2]
    assert compilers_of([("", "k", False), None]) == []


def step(folders: list[str | None], zero: int = 3):
    """(how many programs were traced, the gradients of one step) with this rank's cache folder."""
    folder = folders[dist.get_rank()]
    os.environ.pop("ZGRAPH_CACHE", None)
    if folder is not None:
        os.environ["ZGRAPH_CACHE"] = folder
    made = []
    joint = Trace.joint
    Trace.joint = lambda self, *rest: made.append(rest[2]) or joint(self, *rest)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        zgraph.compile(model, zgraph.Plan(mesh={"dp": -1}, zero=zero, backend="eager"))
        model(torch.full((4, 6), 1.0 + dist.get_rank())).sum().backward()
        return len(made), [p.grad.full_tensor().tolist() for p in model.parameters()]
    finally:
        Trace.joint = joint
        os.environ.pop("ZGRAPH_CACHE", None)


@pytest.mark.gloo
def test_one_rank_makes_it_and_the_next_run_none(two, tmp_path):
    (_, plain), _ = two.run(step, [None, None])
    one = str(tmp_path / "one")
    first, second = two.run(step, [one, one]), two.run(step, [one, one])
    assert [[made for made, _ in run] for run in (first, second)] == [[1, 0], [0, 0]]
    assert all(grads == plain for _, grads in (*first, *second))


@pytest.mark.gloo
def test_ranks_with_other_folders_or_none_agree(two, tmp_path):
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    (_, plain), _ = two.run(step, [None, None])
    runs = [two.run(step, folders) for folders in ([a, None], [a, b], [a, b], [None, b])]
    assert [[made for made, _ in run] for run in runs] == [[1, 1], [0, 1], [0, 0], [1, 0]]
    assert all(grads == plain for run in runs for _, grads in run)


@pytest.mark.gloo
def test_ranks_that_have_kept_different_programs_say_in_what(two, tmp_path):
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    two.run(step, [a, b])
    _forge(Path(b))
    outcomes = two.attempt(step, [a, b], keep=True)
    for outcome in outcomes:
        assert isinstance(outcome.error, RankMismatchError), outcome.traceback
        assert "the first node that differs is 'tanh'" in str(outcome.error)


def _forge(folder: Path) -> None:
    """Let the kept step be another one, whole as it is: as one that was made by faulty code would be."""
    store = Store(folder / "programs")
    (found,) = [f for f in store.entries() if f.kind == "step"]
    head = json.loads(found.path.read_bytes().partition(b"\n")[0])
    data = store.get_json("step", head["key"])
    for rows in data["parts"].values():
        for row in rows:
            if row is not None and "aten.tanh.default" in row[0]:
                row[0] = row[0].replace('"aten.tanh.default"', '"aten.sin.default"')
                row[1] = "0" * 64
    store.put_json("step", head["key"], data, {})
