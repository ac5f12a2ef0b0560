"""What a sweep leaves to `make test-all`."""

from __future__ import annotations

import itertools

import pytest
from sweeps import cover, in_turn, product, sweep


def quick(names, *values, of=sweep, **how):
    return [case for case in of(names, *values, **how).args[1] if not hasattr(case, "marks")]


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


def test_positions_are_those_that_are_named():
    assert quick("number", range(10), quick=(2, 7)) == [2, 7]
    with pytest.raises(AssertionError, match="there are 3 cases"):
        sweep("number", range(3), quick=(3,))


@pytest.mark.parametrize(("sizes", "most"), [((3, 5), 15), ((2, 2, 2), 4), ((5, 2, 2), 10), ((4, 3, 2, 2), 14)])
def test_a_cover_has_all_pairs_of_options(sizes, most):
    options = [range(size) for size in sizes]
    cases = [case for at, case in enumerate(itertools.product(*options)) if at in cover(sizes)]
    assert len(cases) <= most
    for one, other in itertools.combinations(range(len(sizes)), 2):
        assert {(c[one], c[other]) for c in cases} == set(itertools.product(options[one], options[other]))


def test_a_cover_of_single_options_has_each_once_or_as_often_as_the_longest_asks():
    cases = quick("word, number", "abc", [1, 2], together=1, of=product)
    assert {c[0] for c in cases} == set("abc") and {c[1] for c in cases} == {1, 2} and len(cases) == 3
