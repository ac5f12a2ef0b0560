"""Shards of the suite: each test is in one of them, and they take about as long."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from shards import Shard, longest_first


@dataclass(frozen=True)
class Item:
    nodeid: str
    marks: tuple[str, ...] = ()

    def iter_markers(self):
        return [SimpleNamespace(name=name) for name in self.marks]


ITEMS = [
    Item(f"tests/test_{file}.py::test_{at}", ("slow",) if file % 5 == 0 else ("core", "gloo") if file % 3 == 0 else ())
    for file in range(40)
    for at in range(1 + file % 7)
]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_each_test_is_in_one_shard_and_files_stay_whole(count):
    shards = [Shard(number, count).of(ITEMS) for number in range(1, count + 1)]
    assert sorted(i.nodeid for shard in shards for i in shard) == sorted(i.nodeid for i in ITEMS)
    files = [{i.nodeid.partition("::")[0] for i in shard} for shard in shards]
    assert sum(map(len, files)) == 40


def test_shards_take_about_as_long():
    costs = [
        sum(8 if "slow" in i.marks else 6 if "gloo" in i.marks else 1 for i in Shard(number, 4).of(ITEMS))
        for number in range(1, 5)
    ]
    assert max(costs) <= 1.1 * min(costs)


def test_it_does_not_matter_in_which_order_tests_are_collected():
    assert {i.nodeid for i in Shard(2, 3).of(ITEMS)} == {i.nodeid for i in Shard(2, 3).of(ITEMS[::-1])}


def test_the_longest_files_come_first_each_whole():
    found = longest_first(ITEMS)
    assert sorted(i.nodeid for i in found) == sorted(i.nodeid for i in ITEMS)
    files = [i.nodeid.partition("::")[0] for i in found]
    assert len({*files}) == sum(a != b for a, b in zip(files, ["", *files], strict=False)) == 40
    assert files[0] == "tests/test_20.py" and files[-1] == "tests/test_28.py", "seven slow tests; one that is not"


@pytest.mark.parametrize("text", ["", "2", "0/2", "3/2", "1/0", "a/b", "-1/2"])
def test_what_is_no_shard_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is no shard"):
        Shard.parse(text)
