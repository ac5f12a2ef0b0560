"""Fixed seeds of the fuzzer, and the fuzzer itself: what is planted it finds, what it finds it makes smaller."""

from __future__ import annotations

import logging
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sweeps import sweep

from .blocks import KINDS
from .case import Case, Line, draw, run_of
from .harness import Kept, Run, compare, differs, rounded_as_much, sensitive
from .runner import Outcome, run
from .shrink import shrink
from .source import render, script

SEEDS = (3001, 3005, 3012, 3013, 3019, 3036, 3053, 3070, 3125, 3202, 725, 4015)
"""With each kind of run but Inductor's, layout, output, way of a loop and stage."""
LONG = (16, 247, 257, 390, 508, 520, 571, 691, 821, 1093, 1559, 1767, 1898, 2043, 3107)
"""The same, of programs that take seconds."""


@pytest.fixture(scope="module")
def workers(two: Any) -> Iterator[Any]:
    from .ranks import Workers

    with Workers(two) as ranks:
        yield ranks


@sweep("seed", [*SEEDS, *LONG], quick=range(0, len(SEEDS) - 2, 2))
def test_a_case_is_right_or_refused(seed: int, workers: Any) -> None:
    case = draw(seed)
    outcome = workers.run(case) if case.run == "ranks" else run(case)
    assert outcome.verdict.word in ("equal", "refused"), (
        f"{outcome.verdict.reason}: {outcome.verdict.detail}\n{render(outcome.case)}"
    )


# -- cases ------------------------------------------------------------------------------------------------------------
def test_there_are_kinds_enough() -> None:
    assert len(KINDS) >= 50


def test_a_case_is_its_seed() -> None:
    for seed in range(40):
        assert draw(seed) == draw(seed)
        assert render(draw(seed)) == render(draw(seed))


def test_a_case_is_the_same_in_another_process() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from fuzz.case import draw; print([draw(s) for s in range(20)])"
    )
    env = {"PYTHONHASHSEED": "3"}
    out = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).resolve().parent.parent)],
        capture_output=True,
        text=True,
        env=env,
        check=True,
    )
    assert out.stdout.strip() == str([draw(s) for s in range(20)])


@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_kind_of_block_works_in_plain_pytorch(name: str) -> None:
    from . import harness
    from .runner import programs

    for layout in KINDS[name].layouts:
        case = replace(
            simple("eager"),
            layout=layout,
            lines=(Line("plain", (name,), 1),),
            width=4 if layout == "image" else 8,
        )
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


def test_numbers_as_near_to_the_exact_ones_as_plain_pytorchs_are_rounding() -> None:
    exact, plain = torch.ones(3, dtype=torch.float64), torch.full((3,), 1.001, dtype=torch.float64)
    run = lambda value: Run([Kept(0, "gradient", "a", value)])  # noqa: E731
    assert rounded_as_much(run(plain), run(exact * 0.998), run(exact)) == {(0, "gradient", "a")}
    assert rounded_as_much(run(plain), run(exact * 0.99), run(exact)) == set()
    assert rounded_as_much(run(plain), run(exact), run(exact * 3)) == set()  # (other numbers altogether)


def test_numbers_that_a_rounding_changes_as_much_are_no_fault_and_others_are() -> None:
    steady, wild = torch.ones(3, dtype=torch.float64), torch.full((3,), 1e38, dtype=torch.float64)
    plain = Run([Kept(0, "gradient", "a", steady), Kept(2, "gradient", "a", wild)])
    nudged = Run([Kept(0, "gradient", "a", steady * (1 + 1e-15)), Kept(2, "gradient", "a", -wild)])
    loose = sensitive(plain, nudged, None)
    assert loose == {(2, "gradient", "a")}
    assert compare(plain, Run([plain.kept[0], Kept(2, "gradient", "a", 3 * wild)]), None, loose).word == "equal"
    off = Run([Kept(0, "gradient", "a", steady * 1.001), plain.kept[1]])
    assert compare(plain, off, None, loose).word == "wrong"
    assert compare(plain, Run([plain.kept[0], Kept(2, "gradient", "a", None)]), None, loose).word == "wrong"


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


def test_what_a_stage_does_not_have_is_wrong_if_no_rank_has_it() -> None:
    from ranks import Outcome as OfRank

    from .ranks import joined

    plain = Run([kept(torch.ones(2)), kept(torch.ones(2), "buffer", "b")])
    has = Run([kept(torch.ones(2)), kept(torch.ones(2), "buffer", "b")])
    elsewhere = {(0, "gradient", "w"), (0, "buffer", "b")}
    lacks = Run([kept(torch.zeros(2), "buffer", "b")], elsewhere=elsewhere)
    wrong = Run([kept(torch.zeros(2), "buffer", "b")], elsewhere={(0, "gradient", "w")})
    assert compare(plain, wrong).word == "wrong"
    assert joined([OfRank(value=compare(plain, run)) for run in (has, lacks)]).word == "equal"
    assert joined([OfRank(value=compare(plain, run)) for run in (lacks, lacks)]).word == "wrong"


def test_wrong_numbers_before_an_error_are_wrong() -> None:
    from zgraph.errors import CaptureError

    a = torch.ones(4)
    assert compare(Run([kept(a)]), Run([kept(a * 2)], CaptureError("no"))).word == "wrong"


# -- planted faults ---------------------------------------------------------------------------------------------------
def handed_out_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that are one tensor stay one."""
    monkeypatch.setattr("zgraph.runtime.runtime.owned", lambda values, *_: list(values))


def dropped_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """What forward reads of Python may change unseen."""
    monkeypatch.setattr("zgraph.torch_compat.guards.Guards.failing", lambda self, *_, **__: None)


def unread_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a backward reads may have been overwritten."""
    monkeypatch.setattr("zgraph.runtime.version_counters.VersionCounters.check", lambda self, *_, **__: None)


def lost_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers are not updated."""
    from zgraph.runtime.runtime import Runtime

    real = Runtime.run_forward
    monkeypatch.setattr(Runtime, "run_forward", lambda self, *a, **k: real(self, *a, **{**k, "mutate": False}))


def strides_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A saved value of two dimensions is read as its own transpose, where it has as many rows as columns."""
    from zgraph.runtime.runtime import Runtime

    real = Runtime.run_backward

    def run(self: Any, step: Any, saved: Any, *a: Any, **k: Any) -> Any:
        for at, value in enumerate(saved):
            if isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[-1] == value.shape[-2]:
                saved[at] = value.mT
        return real(self, step, saved, *a, **k)

    monkeypatch.setattr(Runtime, "run_backward", run)


def another_ranks_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank computes with the shard of the next."""
    import math

    from zgraph.verification import virtual_step

    real = virtual_step.shard_of
    monkeypatch.setattr(
        virtual_step,
        "shard_of",
        lambda whole, spec, rank, sizes: real(whole, spec, (rank + 1) % math.prod(sizes.values()), sizes),
    )


PLANTED = {
    handed_out_twice: ("one rank", 150, 100_085),
    dropped_guards: ("eager", 60, 100_011),
    unread_versions: ("eager", 60, 100_009),
    lost_effect: ("eager", 60, 100_007),
    strides_off: ("eager", 60, 100_006),
    another_ranks_shard: ("virtual", 20, 100_033),
}
"""Each fault, the kind of run that must find it, among how many cases, and a seed whose case does."""


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@sweep("among, plant", [(among, plant) for among in ("all", "one") for plant in PLANTED], quick=(9, 11))
def test_a_planted_fault_is_found(
    among: str, plant: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    kind, count, seed = PLANTED[plant]
    grouped = kind == "one rank"
    if grouped:
        request.getfixturevalue("one_rank")
    seeds = [s for s in range(100_000, 100_000 + 10 * count) if run_of(s) == ("eager" if grouped else kind)][:count]
    assert seed in seeds
    for case in map(draw, seeds if among == "all" else [seed]):
        if plant is unread_versions:  # (one in a hundred cases does this by itself)
            case = replace(case, style="usual", options=("input overwritten",))
        if grouped:
            case = replace(case, plan=(*case.plan, ("mesh", {"dp": 1})))
        with monkeypatch.context() as planted:
            plant(planted)
            found = run(case)
        if found.bad and not run(case).bad:
            return
    pytest.fail("no case found it")


# -- making failures smaller ------------------------------------------------------------------------------------------
def large() -> Case:
    lines = tuple(
        Line(way, (kind,), 1) for way, kind in (("residual", "mlp"), ("plain", "counter buffer"), ("tied", "linear"))
    )
    plan = (("backend", "eager"), ("zero", 2), ("recompute", "full"), ("bucket", {"gather": 0}))
    return simple("eager", lines=lines, plan=plan, options=("clipped", "ema"), output="dict", loss="huber")


@pytest.mark.slow
def test_a_failure_becomes_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(large()).verdict.word == "equal"
    lost_effect(monkeypatch)
    found = run(large())
    assert found.bad
    case = shrink(found, run).case
    assert [k for line in case.lines for k in line.kinds] == ["counter buffer"]
    assert (case.options, case.output, case.loss) == ((), "loss", "square")
    assert {k for k, _ in case.plan} == {"backend", "zero"}
    assert case.steps < 3


def test_a_failure_of_another_kind_is_not_taken_for_it() -> None:
    from .harness import Verdict

    def unclear(case: Case) -> Outcome:
        return Outcome(case, Verdict("unclear", "another"), 0.0)

    found = Outcome(large(), Verdict("wrong", "gradient"), 0.0)
    assert shrink(found, unclear) == found


def test_a_script_stands_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without any module of the tests."""
    tests = str(Path(__file__).resolve().parent.parent)
    for name, module in list(sys.modules.items()):
        if name != "__main__" and str(getattr(module, "__file__", None) or "").startswith(tests):
            monkeypatch.setitem(sys.modules, name, None)  # (can't be imported)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if not folder.startswith(tests)])
    path = tmp_path / "alone.py"
    path.write_text(script(simple("eager"), "wrong: nothing"))
    logger = logging.getLogger("zgraph")
    level = logger.level
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(path), run_name="__main__")
    finally:
        logger.setLevel(level)  # (which the script sets)
    assert ended.value.code in (0, None) and capsys.readouterr().out.strip() == "equal"
