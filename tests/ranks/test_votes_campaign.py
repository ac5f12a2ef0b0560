"""Many random runs of what `test_one_vote.py` tries a few of: 40 planted disagreements are found, in 200 healthy schedules nothing is.

Functions at the top of this file run on the ranks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from ranks import Ranks
from test_one_vote import STEPS, Beside, check_found

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

WORLDS = (2, 3, 4)
SCHEDULES = 10  # with the programs of one model, one after another


@pytest.fixture(params=WORLDS)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param, timeout=60.0) as started:
        yield started


def of_world(seeds: range, world: int) -> list[int]:
    """The seeds that are tried on so many ranks: each on one number of them."""
    return [seed for seed in seeds if WORLDS[seed % len(WORLDS)] == world]


def test_all_of_40_planted_disagreements_are_found_on_all_ranks(ranks):
    for seed in of_world(range(1000, 1040), ranks.world):
        check_found(ranks, seed)


def healthy_schedules(seed: int) -> list[float]:
    """Schedules of calls that are drawn alike on all ranks; after each, the largest difference from plain weights."""
    both = Beside(seed)
    differences = []
    for number in range(SCHEDULES):
        both.draw = random.Random(f"{seed} {number}")
        both.often = both.draw.sample(STEPS, 2)
        both.run()
        differences.append(both.furthest())
    return differences


def test_200_healthy_schedules_raise_nothing_and_train_as_plain_pytorch(ranks):
    for seed in of_world(range(2000, 2020), ranks.world):
        for differences in ranks.run(healthy_schedules, seed, limit=300):
            assert max(differences) < 1e-9, (seed, differences)
