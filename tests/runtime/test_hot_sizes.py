"""Sizes that occur often have static programs of their own, beside the one that serves all: each rank takes the one for its own sizes."""

from __future__ import annotations

import logging
import random
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sweeps import sweep
from test_lengths import Placed, batch, difference, pair
from test_lengths_gloo import UNEVEN, Sentences, gradients, whole
from test_lengths_gloo import batch as words_and_targets
from torch import nn

import zgraph
from zgraph.build import programs_of_one_step
from zgraph.build.planned_step import captured_program
from zgraph.errors import PlanError
from zgraph.program.program import InputRole

warnings.filterwarnings("ignore")
NAMED = {"hot": [{"batch": 3, "seq": 12}, {"batch": 2, "seq": 7}]}
DECLARED = {"ids": {0: "batch", 1: "seq"}, "labels": {0: "batch", 1: "seq"}}


def test_named_sizes_have_static_programs_that_their_calls_run(caplog):
    hot = [{"batch": 3, "seq": 12}, {"batch": 3, "seq": 49}, {"seq": 4}, {"batch": 2, "seq": 7}]
    mine, plain = pair(Placed, shapes={"hot": hot}, dynamic=DECLARED)
    for rows, length in ((3, 12), (2, 7), (2, 9), (3, 12)):
        assert difference(mine, plain, batch(rows, length)) == 0.0
    programs = mine.zgraph.programs
    assert list(programs) == ["train0", "train0.batch3_seq12", "train0.batch2_seq7"]
    told = [r.getMessage() for r in caplog.records if "no program of its own" in r.getMessage()]
    assert ["for seq=4: batch is not said" in text for text in told] == [False, True]
    assert "for batch=3, seq=49: the program holds where seq is 2 to 48" in told[0]
    hot = programs["train0.batch2_seq7"].history().program
    assert not hot.sizes and not any(p.role is InputRole.SIZE for p in hot.inputs)
    taken = mine.zgraph.runtime.hot_sizes.chosen
    seen = [taken(programs["train0"], [torch.empty(2, n)] * 9).name for n in (7, 8)]
    assert seen == ["train0.batch2_seq7", "train0"]
    assert "train0.batch2_seq7" in str(mine.zgraph.report())


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"batch": 3, "sek": 12}, "did you mean 'seq'"),
        ({"batch": 3, "word_1": 12}, "the known ones are batch, seq, ids_0, labels_0"),
    ],
)
def test_a_name_that_no_size_can_have_is_refused(named, said):
    with pytest.raises(PlanError, match=said) as found:
        pair(Placed, shapes={"hot": [named]})
    assert found.value.where == "shapes.hot" and "no size can be named" in found.value.what
    pair(Placed, shapes={"hot": [{"batch": 3, "labels_1": 12}]})


@pytest.mark.slow
def test_a_name_that_no_program_has_is_told_once(caplog):
    mine, plain = pair(Placed, shapes={"hot": [{"batch": 3, "seq": 12, "labels_1": 12}, {"batch": 3, "seq": 12}]})
    for rows, length in ((3, 12), (2, 7), (1, 9), (3, 12)):
        assert difference(mine, plain, batch(rows, length)) == 0.0
    (told,) = [r.getMessage() for r in caplog.records if "has no size" in r.getMessage()]
    assert "train1 has no size 'labels_1'" in told and "batch, seq" in told
    assert "train1.batch3_seq12" in mine.zgraph.programs


def test_fractions_of_sizes_are_numbers_at_a_point():
    plan = zgraph.Plan(backend="inductor", dynamic={"input": {0: "rows"}})
    program = captured_program(nn.BatchNorm1d(3), plan, (torch.randn(6, 3),), 1).at({"rows": 5})
    given = [arg for node in program.nodes for arg in node.args if isinstance(arg, float)]
    assert 5 / 4 in given  # (that of the unbiased variance)


def test_the_most_frequent_sizes_are_found(caplog):
    mine, plain = pair(Placed, shapes={"hot": 1}, dynamic=DECLARED)
    draw = random.Random(0)
    caplog.set_level(logging.WARNING, "zgraph")
    for number in range(34):
        at = (4, 9) if number % 2 else (draw.randint(2, 5), draw.randint(2, 30))
        assert difference(mine, plain, batch(*at)) == 0.0
    assert list(mine.zgraph.programs) == ["train0", "train0.batch4_seq9"]
    assert "train0 has a program of its own for batch=4, seq=9" in caplog.text


@pytest.mark.parametrize(
    ("shapes", "more", "said"),
    [
        ({"hot": 0}, {}, "greater than or equal to 1"),
        ({"hot": [5]}, {}, "hot sizes are tables"),
        ({"hot": [{"seq": 1}]}, {}, "greater than or equal to 2"),
        ({"hot": 2, "buckets": [4]}, {}, "buckets"),
        ({"hot": 2}, {"mesh": {"pp": 2}}, "in a pipeline"),
        ({"hot": 2}, {"mesh": {"cp": 2}}, "mesh.cp is set"),
    ],
)
def test_what_can_not_be_is_refused(shapes, more, said):
    with pytest.raises(PlanError, match=said):
        zgraph.Plan(shapes=shapes, **more)


@pytest.mark.slow
def test_under_a_budget_what_is_decided_for_all_sizes_holds_for_these():
    sizes = {"ids": {0: "batch", 1: "seq"}, "labels": {0: zgraph.Size("batch", max=4), 1: "seq"}}
    for budget in ("16MiB", "100KiB"):
        mine, plain = pair(Placed, shapes={"hot": [{"batch": 4, "seq": 40}]}, dynamic=sizes, memory_budget=budget)
        for at in ((4, 40), (4, 12)):
            assert difference(mine, plain, batch(*at)) < 1e-6
        both = [mine.zgraph.programs[n].choice for n in ("train0", "train0.batch4_seq40")]
        assert both[0] == both[1]


@pytest.mark.slow
def test_inductor_compiles_them_too():
    mine, plain = pair(Placed, shapes=NAMED, backend="inductor")
    for rows, length in ((3, 12), (3, 7), (2, 7), (3, 12)):
        assert difference(mine, plain, batch(rows, length)) < 1e-6
    assert len(mine.zgraph.programs) == 4


STEPS = [((3, 12), (3, 12)), ((3, 12), (2, 7)), ((2, 7), (5, 9)), ((4, 8), (3, 12)), ((2, 7), (2, 7)), *UNEVEN[:2]]
HOT = {"hot": [{"batch": 3, "seq": 12}, {"batch": 2, "seq": 7}]}


@pytest.mark.gloo
@sweep("zero, backend", [(0, "eager"), (1, "eager"), (2, "eager"), (3, "inductor"), (3, "eager")], quick=1)
def test_ranks_run_hot_programs_beside_the_one_for_all(two, zero, backend):
    for worst, programs in two.run(gradients, zero, backend, STEPS, Sentences, HOT):
        assert worst < 2e-6
        assert programs == ["train0", "train1", "train1.batch3_seq12", "train1.batch2_seq7", "train2"]


def gradients_in_another_order() -> tuple[float, list[str]]:
    """`gradients`, where the program of a single row is made anew, as if it communicated otherwise than the one of several rows."""
    real = programs_of_one_step.difference
    programs_of_one_step.difference = lambda a, b, variant: ("", "") if b.symbolic is b else real(a, b, variant)
    try:
        return gradients(3, "eager", [*UNEVEN[:2], ((1, 9), (3, 12))], Sentences, {"hot": [{"seq": 9}]})
    finally:
        programs_of_one_step.difference = real


@pytest.mark.slow
@pytest.mark.gloo
def test_a_program_that_is_made_anew_keeps_those_for_certain_sizes(two):
    for worst, programs in two.run(gradients_in_another_order):
        assert worst < 2e-6
        assert [p for p in programs if p.endswith("seq9")]


def trained(zero: int, micro: int, shapes: Any) -> tuple[float, list[str]]:
    """The largest difference of a weight to plain PyTorch's after steps with an optimizer, an evaluation between them; the programs."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    plain, made = Sentences(), Sentences()
    made.load_state_dict(plain.state_dict())
    plan = zgraph.Plan(zero=zero, backend="eager", optimizer=zgraph.SGD(lr=0.1), micro_batches=micro, shapes=shapes)
    model = zgraph.compile(made, plan)
    draw = random.Random(1)
    for number in range(36):
        sizes = [(3, 12) if draw.random() < 0.5 else (draw.randint(2, 4), draw.randint(2, 30)) for _ in range(2)]
        sizes = [(rows * micro, length) for rows, length in sizes]
        model.train_step(**words_and_targets(*sizes[dist.get_rank()], number))
        for at in sizes:
            (plain(**words_and_targets(*at, number)) / 2).backward()
        with torch.no_grad():
            for p in plain.parameters():
                p -= 0.1 * p.grad
        plain.zero_grad()
        if number % 5 == 0:
            mine = model.eval_step(**words_and_targets(*sizes[dist.get_rank()], number))
            assert torch.isfinite(mine)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(float((whole(a) - b).abs().max()) for a, b in pairs), list(model.zgraph.programs)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(("zero", "micro"), [(3, 1), (1, 2), (0, 2)])
def test_steps_with_hot_programs_are_those_of_plain_pytorch(two, zero, micro):
    for worst, programs in two.run(trained, zero, micro, {"hot": 1}):
        assert worst < 1e-6
        assert any(p.endswith("batch3_seq12") for p in programs)
