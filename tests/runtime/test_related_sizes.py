"""Sizes that only go together in a call: sums and products of others; and those that were equal by accident at first."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from test_lengths import difference, pair
from test_lengths_gloo import whole
from torch import nn

import zgraph
from zgraph.torch_compat import dynamo


class Joined(nn.Module):
    """Puts a prompt before an answer; has a weight for each word of both, and the words of all rows one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, prompt, answer, weights, flat):
        both = torch.cat([self.mix(prompt), self.out(answer)], 1) * weights.unsqueeze(-1)
        return (both + flat.view(len(prompt), -1, 4)).square().mean()


def joined(rows: int, before: int, after: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * rows + 10 * before + after)
    sizes = {"prompt": (rows, before, 4), "answer": (rows, after, 4), "weights": (rows, before + after)}
    return {
        name: torch.randn(size, generator=draw)
        for name, size in {**sizes, "flat": (rows * (before + after), 4)}.items()
    }


def test_a_length_that_is_the_sum_of_two_others_is_a_size():
    mine, plain = pair(Joined)
    for sizes in ((3, 4, 9), (2, 7, 4), (5, 3, 6), (4, 6, 6), (2, 30, 9)):  # (the largest of each do not go together)
        assert difference(mine, plain, joined(*sizes)) < 1e-6
    assert len(mine.zgraph.programs) == 2


@pytest.mark.slow
def test_declared_sizes_with_typical_ones_that_do_not_go_together():
    sizes = {
        "prompt": {0: "rows", 1: zgraph.Size("before", typical=8)},
        "answer": {0: "rows", 1: zgraph.Size("after", typical=8)},
        "weights": {0: "rows", 1: zgraph.Size("all", typical=12)},
        "flat": {0: "words"},
    }
    mine, plain = pair(Joined, dynamic=sizes)
    for one in ((3, 4, 9), (2, 7, 4), (5, 3, 6)):
        assert difference(mine, plain, joined(*one)) < 1e-6
    assert len(mine.zgraph.programs) == 1


class Squares(nn.Module):
    """Is written for one length (a Python loop); its rows are free."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x):
        for at in range(x.shape[1]):
            x = x * (1 + at / 10)
        return self.mix(x).square().mean()


def test_a_size_that_was_equal_to_one_that_is_a_number_is_free_once_they_differ(caplog):
    mine, plain = pair(Squares)
    with caplog.at_level(logging.WARNING, "zgraph"):
        for rows, length in ((4, 4), (6, 6), (5, 3), (7, 3), (2, 3), (9, 5), (3, 5)):
            assert difference(mine, plain, {"x": torch.randn(rows, length, 4)}) < 1e-6
    assert len(mine.zgraph.programs) == 4  # (of the two first calls, and one for each of two lengths)
    told = [r.getMessage() for r in caplog.records if "is a program of its own" in r.getMessage()]
    assert "each batch is" in told[0] and "each seq is" in told[1]


class Windows(nn.Module):
    """Pads to a multiple of a window, and mixes within each."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x):
        rows, length, width = x.shape
        padded = nn.functional.pad(self.mix(x), (0, 0, 0, -length % 4)).view(rows, -1, 4, width)
        return padded.cumsum(2).flatten(1, 2)[:, :length].square().mean()


def test_lengths_that_are_padded_to_a_multiple_within_the_model():
    mine, plain = pair(Windows)
    for rows, length in ((3, 9), (2, 14), (5, 6), (4, 17), (2, 30)):
        assert difference(mine, plain, {"x": torch.randn(rows, length, 4)}) < 1e-6
    assert len(mine.zgraph.programs) == 2


@pytest.mark.slow
def test_a_capture_that_fails_is_not_repeated_without_numbers_that_there_are_none_of(monkeypatch):
    captures = []
    captured = dynamo.capture_flat

    def counted(*args, open_dims=(), **kwargs):
        captures.append(tuple(sorted(name for dims in dict(open_dims).values() for name in dims.values())))
        if open_dims:
            raise RuntimeError("this can't be traced")
        return captured(*args, open_dims=open_dims, **kwargs)

    monkeypatch.setattr(dynamo, "capture_flat", counted)
    mine, plain = pair(Squares)
    for rows, length in ((3, 8), (3, 12)):
        assert difference(mine, plain, {"x": torch.randn(rows, length, 4)}) < 1e-6
    # (a capture that fails runs forward once and is tried again)
    assert captures == [(), *[("batch", "seq")] * 2, *[("seq",)] * 2, ()]


def on_ranks(steps: list[list[tuple[int, int, int]]]) -> tuple[float, int]:
    mine, plain = pair(Joined, zero=3)
    worst = 0.0
    for each in steps:
        mine(**joined(*each[dist.get_rank()])).backward()
        for sizes in each:
            (plain(**joined(*sizes)) / len(each)).backward()
        for a, b in zip(mine.parameters(), plain.parameters(), strict=True):
            worst = max(worst, float((whole(a.grad) - b.grad).norm() / b.grad.norm()))
        mine.zero_grad()
        plain.zero_grad()
    return worst, len(mine.zgraph.programs)


@pytest.mark.gloo
@pytest.mark.slow
def test_ranks_learn_sizes_that_go_together(two):
    steps = [[(3, 4, 9), (3, 4, 9)], [(2, 7, 4), (5, 3, 6)], [(4, 6, 6), (2, 30, 9)], [(6, 2, 3), (3, 4, 4)]]
    for worst, programs in two.run(on_ranks, steps):
        assert worst < 2e-6 and programs == 2
