"""An epoch as loops have it: nested batches with a mask made of lengths, a single row on one rank in its middle, evaluations between, other dtypes.

Functions at the top of this file run on the ranks; each returns what the test compares.
"""

from __future__ import annotations

import copy
import logging
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sweeps import sweep
from test_lengths_gloo import whole
from torch import nn

import zgraph
from zgraph.errors import SignatureError

WORDS = 31


class Masks(nn.Module):
    """Attention over words that a mask made of the rows' lengths leaves, of a batch that is a dict of a dict and a list."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(WORDS, dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, WORDS)

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        words, lengths = batch["text"]["words"], batch["text"]["lengths"]
        places = torch.arange(words.shape[1], device=words.device)
        real = places[None, :] < lengths[:, None]
        q, k, v = self.qkv(self.embed(words)).unsqueeze(1).chunk(3, -1)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=real[:, None, None, :]).squeeze(1)
        mean = (seen * real[..., None]).sum(1) / lengths[:, None]
        logits = self.head(seen)
        if "targets" not in batch:
            return {"logits": logits, "mean": mean}
        targets = batch["targets"][0].masked_fill(~real, -100)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return {"loss": loss + mean.square().mean(), "logits": logits}


def batch(
    rows: int, length: int, seed: int, *, targets: bool = True, words: torch.dtype = torch.int64
) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(1000 * seed + 10 * rows + length)
    text = {
        "words": torch.randint(0, WORDS, (rows, length), generator=draw).to(words),
        "lengths": torch.randint(1, length + 1, (rows,), generator=draw),
    }
    return (
        {"text": text, "targets": [torch.randint(0, WORDS, (rows, length), generator=draw)]}
        if targets
        else {"text": text}
    )


def pair(**fields: Any) -> tuple[nn.Module, nn.Module]:
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    plain = Masks()
    return zgraph.compile(copy.deepcopy(plain), zgraph.Plan(**{"backend": "eager", **fields})), plain


def stepped(mine: nn.Module, plain: nn.Module, number: int, sizes: list[tuple[int, int]]) -> float:
    """The largest relative difference of a gradient to plain PyTorch's after a step in which each rank has its sizes."""
    here = dist.get_rank() if dist.is_initialized() else 0
    mine.train()
    plain.train()
    mine(batch(*sizes[here], number))["loss"].backward()
    for at in sizes:
        (plain(batch(*at, number))["loss"] / len(sizes)).backward()
    pairs = list(zip(mine.parameters(), plain.parameters(), strict=True))
    worst = max(float((whole(a.grad) - b.grad).norm() / b.grad.norm()) for a, b in pairs)
    mine.zero_grad()
    plain.zero_grad()
    return worst


def evaluated(mine: nn.Module, plain: nn.Module, number: int, sizes: list[tuple[int, int]], *, targets: bool) -> float:
    """The largest difference of an output to plain PyTorch's in an evaluation in which each rank has its sizes."""
    here = dist.get_rank() if dist.is_initialized() else 0
    mine.eval()
    plain.eval()
    with torch.no_grad():
        outs = [model(batch(*sizes[here], number, targets=targets)) for model in (mine, plain)]
    assert outs[0].keys() == outs[1].keys()
    return max(float((outs[0][name] - outs[1][name]).abs().max()) for name in outs[1])


TRAINED = [
    [(4, 9), (4, 13)],
    [(4, 21), (3, 5)],
    [(4, 12), (1, 17)],
    [(2, 30), (4, 8)],
    [(1, 6), (1, 11)],
    [(3, 7), (4, 7)],
]
EVALUATED = [[(4, 8), (4, 19)], [(4, 5), (2, 31)], [(1, 12), (4, 6)]]


def epoch(zero: int, backend: str) -> tuple[float, float, list[str]]:
    """(the largest difference of a gradient, of an evaluation's output, the programs) in an epoch with evaluations between."""
    mine, plain = pair(zero=zero, backend=backend)
    gradient = output = 0.0
    for number, sizes in enumerate(TRAINED):
        gradient = max(gradient, stepped(mine, plain, number, sizes))
        if number % 2:
            at = EVALUATED[number // 2]
            output = max(output, evaluated(mine, plain, number, at, targets=number != 3))
    return gradient, output, list(mine.zgraph.programs)


@pytest.mark.gloo
@sweep(
    "zero, backend",
    [(3, "eager"), (0, "eager"), (1, "eager"), (2, "eager"), pytest.param(3, "inductor", marks=pytest.mark.inductor)],
    quick=(0,),
)
@pytest.mark.slow
def test_an_epoch_with_a_single_row_on_one_rank_and_evaluations_between(two, zero, backend):
    tolerance = 2e-6 if backend == "eager" else 5e-6
    found = two.run(epoch, zero, backend)
    for gradient, output, programs in found:
        assert gradient < tolerance and output < tolerance
        # (training: the first, all others, and single rows)
        assert sum(name.startswith("train") for name in programs) <= 3
        assert programs == found[0][2]


@pytest.mark.slow
def test_each_dtype_of_an_input_has_its_programs_and_keeps_them():
    mine, plain = pair()
    for number, (rows, length, words) in enumerate(
        [
            (3, 9, torch.int64),
            (2, 5, torch.int64),
            (3, 9, torch.int32),
            (4, 6, torch.int32),
            (2, 17, torch.int64),
            (5, 3, torch.int32),
        ]
    ):
        losses = []
        for model in (mine, plain):
            model.zero_grad()
            losses.append(model(batch(rows, length, number, words=words))["loss"])
            losses[-1].backward()
        assert torch.equal(*losses)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(mine.parameters(), plain.parameters(), strict=True))
    assert len(mine.zgraph.programs) == 4  # (two of each dtype)


@pytest.mark.slow
def test_autocast_between_steps_has_its_programs_and_changes_no_other():
    mine, plain = pair()
    for number, low in enumerate([False, False, True, True, False, True]):
        losses = []
        for model in (mine, plain):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                losses.append(model(batch(3, 5 + 2 * number, number))["loss"])
            losses[-1].backward()
        assert torch.equal(*losses)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(mine.parameters(), plain.parameters(), strict=True))
    assert len(mine.zgraph.programs) <= 4


# Declared sizes of what is inside of a dict or a list.
ROWS, LENGTH = "rows", zgraph.Size("length", max=40)
NESTED = {
    "batch['text']['words']": {0: ROWS, 1: LENGTH},
    "batch['text']['lengths']": {0: ROWS},
    "batch['targets'][0]": {0: ROWS, 1: "length"},
}


def test_sizes_inside_of_dicts_and_lists_are_declared_by_their_place():
    mine, plain = pair(dynamic=NESTED)
    for number, (rows, length) in enumerate([(3, 9), (2, 40)]):
        losses = [model(batch(rows, length, number))["loss"] for model in (mine, plain)]
        assert torch.equal(*losses)
    (step,) = mine.zgraph.programs.values()
    assert [(s.name, s.high) for s in step.captured.sizes.symbols] == [("rows", None), ("length", 40)]
    with pytest.raises(SignatureError, match="'length' is 41 in this call, and declared to be 40 at most"):
        mine(batch(2, 41, 0))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x, scale=1.0):
        return (self.mix(x) * scale).square().mean()


@pytest.mark.parametrize(
    ("model", "dynamic", "given", "said"),
    [
        (Masks, {"batch": {0: "rows"}}, (batch(3, 9, 0),), r"sizes of batch, which has inputs inside"),
        (Masks, {"batch['text']": {0: "rows"}}, (batch(3, 9, 0),), r"which has inputs inside"),
        (Scaled, {"scale": {0: "rows"}}, (torch.ones(3, 4), 2.0), "sizes of scale, which is no tensor, but a float"),
    ],
    ids=["a dict", "a dict inside", "a number"],
)
def test_sizes_that_are_declared_of_no_tensor_are_refused(model, dynamic, given, said):
    mine = zgraph.compile(model(), zgraph.Plan(backend="eager", dynamic=dynamic))
    with pytest.raises(SignatureError, match=said) as found:
        mine(*given)
    assert found.value.where == f"dynamic.{next(iter(dynamic))}"
    assert "has inputs inside" not in said or "name one of them: \"batch['text']" in found.value.hint


def test_a_declared_input_that_is_not_contiguous_is_told(caplog):
    mine = zgraph.compile(Scaled(), zgraph.Plan(backend="eager", dynamic={"x": {0: "rows"}}))
    with caplog.at_level(logging.WARNING, "zgraph"):
        for rows in (3, 5):
            mine(torch.ones(4, rows).t())
    (told,) = [r.getMessage() for r in caplog.records if "though dynamic declares it" in r.getMessage()]
    assert "x.contiguous()" in told and len(mine.zgraph.programs) == 2
