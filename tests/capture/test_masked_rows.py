"""What a mask selects has a known size where as many rows are added to it, or put in its place: one program for all lengths."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from sweeps import sweep
from torch import nn
from torch.distributed.tensor import DTensor

import zgraph
from zgraph.errors import StepError
from zgraph.program.masked_rows import MASKED_ROWS

TOLERANCE = 2e-6  # of a gradient over its norm: float32 rounding


class Stacked(nn.Module):
    """Adds features to the words that a mask marks, after each layer (as Qwen3-VL does with those of its images)."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.features = nn.Embedding(20, 6), nn.Linear(3, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, ids, cells):
        x, marked, features = self.words(ids), ids == 3, self.features(cells)
        for layer in self.layers:
            x = layer(x).clone()
            together = x[marked, :] + features
            x[marked, :] = together.sin()
        return x.square().mean()


class Columns(Stacked):
    """The same along the second dimension, with a mask of one dimension, and a product of what two masks select."""

    def forward(self, ids, cells):
        x, marked, features = self.words(ids), ids[0] == 3, self.features(cells)
        x = x + x[:, marked].mul(features).mean() + (x[ids == 3] * x.cos()[ids == 3] * 2).sum()
        return x.square().mean()


def batch(rows: int, length: int, images: int = 2) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * rows + length)
    ids = torch.randint(4, 20, (rows, length), generator=draw)
    ids[:, 1 : 1 + images] = 3
    return {"ids": ids, "cells": torch.randn(rows * images, 3, generator=draw)}


def pair(model: type[nn.Module] = Stacked, dynamic: object = None, **plan: object) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = model()
    return zgraph.compile(copy.deepcopy(plain), zgraph.Plan(**{"backend": "eager", **plan}), dynamic=dynamic), plain


def same(mine: nn.Module, plain: nn.Module, given: dict[str, torch.Tensor]) -> bool:
    losses = []
    for model in (mine, plain):
        model.zero_grad()
        losses.append(model(**given))
        losses[-1].backward()
    grads = [(a.grad, b.grad) for a, b in zip(mine.parameters(), plain.parameters(), strict=True) if b.grad is not None]
    tensors = [losses, *grads]
    return all(float((a - b).detach().norm()) <= TOLERANCE * float(b.detach().norm()) for a, b in tensors)


def selections(model: nn.Module) -> int:
    step = list(model.zgraph.programs.values())[-1]
    return len(step.captured.graph.find_nodes(op="call_function", target=MASKED_ROWS))


@sweep("shapes", ["static", "dynamic", "auto"], quick=1)
def test_rows_that_are_added_to_are_as_many(shapes):
    mine, plain = pair(shapes=shapes)
    for rows, length, images in ((2, 7, 2), (3, 9, 2), (4, 5, 3), (2, 11, 4)):
        assert same(mine, plain, batch(rows, length, images))
    assert len(mine.zgraph.programs) == {"auto": 2, "static": 4, "dynamic": 1}[shapes]
    assert selections(mine) >= 2


def test_a_mask_may_index_another_dimension():
    mine, plain = pair(Columns, shapes="static")
    for rows, length in ((2, 7), (3, 9)):
        given = batch(rows, length)
        given["cells"] = given["cells"][:2]
        assert same(mine, plain, given)


@pytest.mark.slow
def test_a_mask_that_selects_another_number_of_rows_is_refused_as_in_plain_pytorch():
    mine, plain = pair()
    assert same(mine, plain, batch(2, 7))
    assert same(mine, plain, batch(3, 9))
    wrong = batch(3, 8)
    wrong["ids"][0, 1] = 5
    with pytest.raises(RuntimeError):
        plain(**wrong)
    with pytest.raises(StepError) as error:
        mine(**wrong)
    assert "selects 5 rows" in str(error.value) and "has 6" in str(error.value)
    assert same(mine, plain, batch(3, 8))


@pytest.mark.inductor
@pytest.mark.slow
def test_inductor_takes_them():
    mine, plain = pair(backend="inductor")
    for rows, length, images in ((2, 7, 2), (3, 9, 2), (4, 5, 3)):
        assert same(mine, plain, batch(rows, length, images))
    assert len(mine.zgraph.programs) == 2


def on_ranks(zero: int) -> tuple[float, int]:
    mine, plain = pair(zero=zero)
    worst = 0.0
    for lengths in ((7, 9), (5, 5), (12, 6)):
        mine(**batch(3, lengths[dist.get_rank()])).backward()
        for length in lengths:
            (plain(**batch(3, length)) / len(lengths)).backward()
        for a, b in zip(mine.parameters(), plain.parameters(), strict=True):
            grad = a.grad.full_tensor() if isinstance(a.grad, DTensor) else a.grad
            worst = max(worst, float((grad - b.grad).norm() / b.grad.norm()))
        mine.zero_grad()
        plain.zero_grad()
    return worst, len(mine.zgraph.programs)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
def test_ranks_have_other_lengths(two, zero):
    for worst, programs in two.run(on_ranks, zero):
        assert worst < TOLERANCE and programs <= 2


@pytest.mark.slow
def test_verify_compares_them_with_the_plain_model():
    found = zgraph.verify(Stacked(), zgraph.Plan(zero=3, backend="eager"), 2, batch(4, 7, 1))
    assert found.ok, str(found)


def trained_in_parts(fields: dict[str, object]) -> tuple[float, int]:
    """(how far weights are from plain PyTorch's after steps, the programs) where ranks compute one batch together."""
    mine, plain = pair(optimizer=zgraph.SGD(lr=0.1), **fields)
    for rows, length in ((4, 7), (6, 9), (8, 5)):
        mine.train_step(**batch(rows, length, 1))
        plain(**batch(rows, length, 1)).backward()
        for p in plain.parameters():
            p.data -= 0.1 * p.grad
            p.grad = None
    weights = zip(mine.parameters(), plain.parameters(), strict=True)
    whole = [(a.full_tensor() if isinstance(a, DTensor) else a, b) for a, b in weights if a.device.type != "meta"]
    return max(float((a - b).detach().abs().max()) for a, b in whole), len(mine.zgraph.programs)


DIVIDED = [
    {"mesh": {"tp": 2}, "tensor_parallel": "auto"},
    {"mesh": {"tp": 2}, "tensor_parallel": "auto", "zero": 3, "sequence_parallel": True, "recompute": "full"},
    {"mesh": {"pp": 2}, "micro_batches": 2},
]


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("fields", DIVIDED, ids=["tp", "tp with all", "pp"])
def test_ranks_that_divide_a_model_select_from_whole_values(two, fields):
    for worst, programs in two.run(trained_in_parts, fields):
        assert worst < TOLERANCE and programs == 2
