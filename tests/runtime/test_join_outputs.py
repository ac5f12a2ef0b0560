"""`train_step` puts the outputs of micro-batches together along the dimension that has the rows, whatever sizes are equal by chance."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zgraph


class Outputs(nn.Module):
    """Returns the rows in dimension 0, in others, and not at all; a micro-batch has 4 rows, as many as there are features."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.filters = nn.Linear(6, 4), nn.Conv2d(1, 2, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.register_buffer("table", torch.randn(4))

    def forward(self, x, levels):
        h = self.hidden(x)
        pooled = F.max_pool2d(
            self.filters(h.view(-1, 1, 2, 2).repeat(1, 1, 2, 2)), 2
        )  # (no rule says what its rows are)
        loss = h.pow(2).mean() + pooled.mean() + self.weight.sum()
        named = {
            "hidden": h,
            "time first": h.t(),
            "layers": h.unsqueeze(0).expand(4, -1, -1),
            "words": torch.cat([h, h], 1).reshape(-1, 4),
        }
        rows = {"pooled": pooled.flatten(1), "sorted": h.sort(1).values, "of a row's number": torch.ones(x.shape[0], 2)}
        return loss, named, rows, (self.weight * 2, self.table + 1, levels * 1)


def joined_as_whole(model, x, levels):
    whole = Outputs()(x, levels)
    output = model.train_step(x, levels)
    leaves = torch.utils._pytree.tree_leaves
    assert len(leaves(output)) == len(leaves(whole)) == 11
    for mine, other in zip(leaves(output), leaves(whole), strict=True):
        torch.testing.assert_close(mine, other.detach())


@pytest.mark.parametrize("rows", [8, 2], ids=["micro-batches of 4", "of 1"])
@pytest.mark.parametrize("shapes", ["static", "dynamic"])
def test_outputs_are_those_of_the_whole_batch(shapes, rows):
    model = zgraph.compile(Outputs(), zgraph.Plan(backend="eager", micro_batches=2, shapes=shapes))
    torch.manual_seed(1)
    for _ in range(2):
        joined_as_whole(model, torch.randn(rows, 6), torch.randn(5))


class Staged(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.out = nn.Linear(6, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.out(self.hidden(x).relu())
        return h.pow(2).mean(), {"time first": h.t(), "rows": h, "weight": self.out.weight * 2}


def in_stages():
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    model = zgraph.compile(Staged(), zgraph.Plan(backend="eager", mesh={"pp": 2}, micro_batches=2))
    return model.train_step(x)[1]


@pytest.mark.gloo
def test_a_pipeline_joins_them_alike(two):
    expected = Staged()(torch.randn(8, 6, generator=torch.Generator().manual_seed(1)))[1]
    given = [output for output in two.run(in_stages) if output["rows"] is not None]
    assert given
    for output in given:
        for name, whole in expected.items():
            torch.testing.assert_close(output[name], whole.detach())


class WordsFirst(nn.Module):
    """Rows behind the words in one dimension, as axes show it and after an operator that has no rule."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Linear(4, 4)

    def forward(self, x):
        h = self.hidden(x)
        sums = h.sort(-1).values
        return h.square().mean(), *(t.transpose(0, 1).reshape(-1, 4) for t in (h, sums))


@pytest.mark.parametrize("shapes", ["static", "dynamic"])
def test_rows_inside_of_another_dimension_are_told_and_not_put_in_another_order(shapes, caplog):
    model = zgraph.compile(WordsFirst(), zgraph.Plan(backend="eager", micro_batches=2, shapes=shapes))
    x = torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(1))
    output, last = model.train_step(x), WordsFirst()(x[2:])
    for mine, other in zip(output[1:], last[1:], strict=True):
        torch.testing.assert_close(mine, other.detach())
    assert sum("inside of another dimension" in r.getMessage() for r in caplog.records) == 2
