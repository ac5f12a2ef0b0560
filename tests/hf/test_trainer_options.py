"""An attached Trainer logs what a plain one does, whatever its arguments and its script say of rows, optimizers, evaluations and files."""

from __future__ import annotations

import pytest
from ranks import Ranks
from sweeps import sweep
from trainer_options import CASES, run

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

# Losses are means of float32 numbers that ranks add in another order than DDP's buckets do.
TOLERANCE = {"rel": 1e-5, "abs": 1e-5, "nan_ok": True}
QUICK = [list(CASES).index(name) for name in ("an optimizer with groups",)]


@pytest.mark.gloo
@sweep("name", list(CASES), quick=QUICK)
def test_two_ranks_log_what_they_do_over_ddp(two: Ranks, tmp_path, name):
    plain = two.run(run, name, str(tmp_path / "plain"), False)
    mine = two.run(run, name, str(tmp_path / "mine"), True)
    for (logs, found), (others, expected) in zip(mine, plain, strict=True):
        compare(logs, others)
        assert found == pytest.approx(expected, **TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["loaders with workers that persist", "a rate for each group", "batches that are too large", "metrics of objects"],
)
def test_one_process_logs_what_it_does_without_a_plan(tmp_path, name):
    others, expected = run(name, str(tmp_path / "plain"), False)
    logs, found = run(name, str(tmp_path / "mine"), True)
    compare(logs, others)
    assert found == pytest.approx(expected, **TOLERANCE)


def compare(logs, others):
    assert len(logs) == len(others) and others
    for at, (one, other) in enumerate(zip(logs, others, strict=True)):
        assert one == pytest.approx(other, **TOLERANCE), at
