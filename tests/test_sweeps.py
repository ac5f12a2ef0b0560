"""What a sweep leaves to `make test-all`."""

from __future__ import annotations

import pytest
from sweeps import in_turn, sweep


def quick(names, values, **how):
    return [case for case in sweep(names, values, **how).args[1] if not hasattr(case, "marks")]


@pytest.mark.parametrize(
    ("count", "kept"), [(1, [9]), (2, [0, 9]), (3, [0, 4, 9]), (4, [0, 3, 6, 9]), (9, [0, 1, 2, 3, 4, 6, 7, 8, 9])]
)
def test_cases_are_spread_from_the_first_to_the_last(count, kept):
    assert quick("number", range(10), quick=count) == kept


def test_no_case_is_lost_and_marks_stay():
    marked = pytest.param("c", "d", marks=pytest.mark.inductor, id="other")
    sweeping = sweep("first, second", [("a", "b"), marked, ("e", "f")], quick=1)
    names, cases = sweeping.args
    assert names == "first, second" and [getattr(case, "values", case) for case in cases] == [
        ("a", "b"),
        ("c", "d"),
        ("e", "f"),
    ]
    assert [mark.name for mark in cases[1].marks] == ["inductor", "slow"] and cases[1].id == "other"
    assert quick("name", ["one", "two"], quick=1) == ["two"], "a word is one value"


def test_a_sweep_leaves_something_out():
    with pytest.raises(AssertionError, match="3 of 3 cases"):
        sweep("name", [1, 2, 3], quick=3)


def test_values_in_turn_meet_each_option():
    assert in_turn("abcde", [1, 2], [True, False]) == [
        ("a", 1, True),
        ("b", 2, True),
        ("c", 1, False),
        ("d", 2, False),
        ("e", 1, True),
    ]
