"""Numbers that stand for sizes: what holds of them holds of the sizes, at every point."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from zgraph.program import sizes
from zgraph.program.sizes import ProgramSize, largest, part_of, stand_in, static, stood_for
from zgraph.torch_compat import symbols

NAMES = ("batch", "seq")


@pytest.fixture
def mode_and_sizes():
    known = [ProgramSize("batch", 2, 8, 4, 0, 0), ProgramSize("seq", 2, 64, 12, 0, 1)]
    return sizes.new_mode(known, {"batch": 4, "seq": 12})


def some(batch: torch.SymInt, seq: torch.SymInt) -> list[object]:
    return [
        batch, seq, 2 * seq, seq * batch, 16 * batch * seq, seq - 1, 2 * seq + 2, batch * seq - batch, seq // 8, seq // 8 * 8, (seq + 1) * 3,
        torch.sym_max(seq, 16), seq * seq, 64 - seq, batch + seq, 8, 16, 3,
    ]  # fmt: skip


def at(size: object, point: tuple[int, int]) -> int:
    return symbols.evaluator(sizes.text(size), NAMES)(*point) if isinstance(size, torch.SymInt) else int(size)  # type: ignore[call-overload]


POINTS = [(2, 2), (3, 7), (8, 64), (5, 16), (7, 15), (2, 63)]


def test_what_holds_of_stand_ins_holds_of_sizes(mode_and_sizes):
    mode, known = mode_and_sizes
    env = mode.shape_env
    for one, other in itertools.product(some(**known), repeat=2):
        a, b = stand_in(one), stand_in(other)
        if a == b:
            assert all(at(one, p) == at(other, p) for p in POINTS)
        if b and a % b == 0:
            assert all(
                at(one, p) == a // b * at(other, p) if a // b < 2**20 else at(one, p) % max(at(other, p), 1) == 0
                for p in POINTS
            )
    assert stand_in(known["batch"] * known["seq"]) == stand_in(known["seq"] * known["batch"])
    assert stand_in(16 * known["seq"]) // stand_in(known["seq"]) == 16
    assert not symbols.known(env)  # (nothing was asked)


def test_a_stand_in_is_made_a_size_again(mode_and_sizes):
    mode, known = mode_and_sizes
    for size in some(**known):
        back = stood_for(stand_in(size), mode)
        assert all(at(back, p) == at(size, p) for p in POINTS)
    half = part_of(16 * known["seq"] * known["batch"], 2)
    assert static(half) == static(8 * known["seq"] * known["batch"])
    assert stand_in(12) == 12 and part_of(12, 4) == 3 and stood_for(12, mode) == 12
    assert not symbols.known(mode.shape_env)


def test_the_most_is_no_less_than_at_any_point(mode_and_sizes):
    mode, known = mode_and_sizes
    draws = random.Random(0)
    for size in some(**known):
        points = [(draws.randint(2, 8), draws.randint(2, 64)) for _ in range(50)]
        assert all(at(size, p) <= largest(size) for p in [*points, *POINTS])
    assert largest(known["batch"] * known["seq"] * 16) == 8 * 64 * 16
    assert not symbols.known(mode.shape_env)
