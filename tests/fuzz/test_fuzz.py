"""Fixed seeds of the fuzzer, and the fuzzer itself: what is planted it finds, what it finds it makes smaller."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from .blocks import KINDS
from .case import Case, Line, draw, run_of
from .harness import Run, Kept, compare, differs
from .runner import Outcome, run
from .shrink import shrink
from .source import render, script

SEEDS: tuple[int, ...] = ()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_case_is_right_or_refused(seed: int) -> None:
    outcome = run(draw(seed))
    assert outcome.verdict.word in ("equal", "refused"), f"{outcome.verdict.reason}: {outcome.verdict.detail}\n{render(outcome.case)}"


# -- cases ------------------------------------------------------------------------------------------------------------
def test_there_are_kinds_enough() -> None:
    assert len(KINDS) >= 50


def test_a_case_is_its_seed() -> None:
    for seed in range(40):
        assert draw(seed) == draw(seed)
        assert render(draw(seed)) == render(draw(seed))


def test_a_case_is_the_same_in_another_process() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); from fuzz.case import draw; print([draw(s) for s in range(20)])"
    env = {"PYTHONHASHSEED": "3"}
    out = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).resolve().parent.parent)], capture_output=True, text=True, env=env, check=True
    )
    assert out.stdout.strip() == str([draw(s) for s in range(20)])


@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_kind_of_block_works_in_plain_pytorch(name: str) -> None:
    import random

    from . import harness
    from .runner import programs

    for layout in KINDS[name].layouts:
        for seed in range(2):
            case = replace(simple("eager"), layout=layout, lines=(Line("plain", (name,), seed),), width=4 if layout == "image" else 8)
            with programs(case) as load:
                program = load("plain")
                ran = harness.run_side(program, harness.Plain(program.PLAN))
            fails_by_design = name == "assert that fails later" or isinstance(ran.error, AssertionError)
            assert ran.error is None or fails_by_design, f"{layout}: {ran.error!r}\n{render(case)}"


def simple(run: str, **changes: Any) -> Case:
    """A case of one linear block that is right."""
    found = Case(
        seed=1, run=run, layout="flat", tokens=False, rows=4, width=8, lines=(Line("plain", ("linear",), 1),), loss="square", output="loss",
        argument=None, style="usual", options=(), inputs=(), optimizer="SGD", plan=(("backend", "eager"), ("zero", 0)), world=1, double=True,
    )  # fmt: skip
    return replace(found, **changes)


# -- comparing --------------------------------------------------------------------------------------------------------
def kept(value: Any, group: str = "gradient", name: str = "w") -> Kept:
    return Kept(0, group, name, value)


def test_a_gradient_off_by_a_thousandth_is_wrong() -> None:
    a = torch.ones(4)
    assert compare(Run([kept(a)]), Run([kept(a * 1.001)])).word == "wrong"
    assert compare(Run([kept(a)]), Run([kept(a * (1 + 1e-6))])).word == "equal"


def test_rounding_beside_a_large_gradient_is_equal() -> None:
    large, small = kept(torch.ones(100)), torch.full((2,), 1e-9)
    assert compare(Run([large, kept(small, name="b")]), Run([large, kept(-small, name="b")])).word == "equal"


def test_another_dtype_shape_or_type_is_wrong() -> None:
    a = torch.ones(4)
    assert differs(a.double(), a) and differs(a[None], a) and differs(None, a) and differs(1, True)


def test_what_only_plain_raises_is_wrong() -> None:
    assert compare(Run(error=RuntimeError("no")), Run()).word == "wrong"
    assert compare(Run(error=RuntimeError("no")), Run(error=RuntimeError("no"))).word == "equal"


def test_an_error_of_others_is_unclear() -> None:
    from zgraph.errors import CaptureError

    assert compare(Run(), Run(error=CaptureError("no"))).word == "refused"
    assert compare(Run(), Run(error=KeyError("no"))).word == "unclear"


def test_wrong_numbers_before_an_error_are_wrong() -> None:
    from zgraph.errors import CaptureError

    a = torch.ones(4)
    assert compare(Run([kept(a)]), Run([kept(a * 2)], CaptureError("no"))).word == "wrong"
