"""Parts of the suite that several machines can run: `pytest --shard 2/4`."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_COSTS = {"slow": 8, "inductor": 10, "gloo": 6}
"""What a test with a marker takes, where one without takes 1: means of a whole run, rounded."""


@dataclass(frozen=True)
class Shard:
    """The `number`th, from 1, of `count` parts."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        number, _, count = text.partition("/")
        if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise argparse.ArgumentTypeError(f"{text!r} is no shard: 2/4 is the second of four")
        return cls(int(number), int(count))

    def of(self, items: Iterable[Any]) -> Sequence[Any]:
        """The pytest items of this part. Files stay whole: each goes, the longest first, to the part that has least to do so far."""
        files = _by_file(items)
        costs = {name: sum(map(_cost, tests)) for name, tests in files.items()}
        loads, mine = [0] * self.count, set()
        for name in sorted(files, key=lambda name: (-costs[name], name)):
            least = loads.index(min(loads))
            loads[least] += costs[name]
            if least == self.number - 1:
                mine.add(name)
        return [item for name, tests in files.items() if name in mine for item in tests]


def longest_first(items: Iterable[Any]) -> list[Any]:
    """The items with their files in the order in which workers that take the next one end at about the same time."""
    return [
        item for tests in sorted(_by_file(items).values(), key=lambda tests: -sum(map(_cost, tests))) for item in tests
    ]


def _by_file(items: Iterable[Any]) -> dict[str, list[Any]]:
    files: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        files[item.nodeid.partition("::")[0]].append(item)
    return files


def _cost(item: Any) -> int:
    return max([1, *(_COSTS.get(mark.name, 1) for mark in item.iter_markers())])
