"""A pattern that names a tied parameter by its second name means it, or is told what it is tied to."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zgraph
from zgraph.compiler import programs
from zgraph.errors import PlanError

WORDS = (torch.zeros(2, 4, dtype=torch.long),)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(12, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words):
        return F.cross_entropy(self.head(self.middle(self.embed(words))).flatten(0, 1), words.flatten())


@pytest.mark.parametrize("pattern", ["head", "head.weight", "embed"])
def test_a_table_of_tensor_parallel_may_use_any_name(pattern):
    style = "colwise" if "head" in pattern else "rowwise"
    plan = zgraph.Plan(mesh={"tp": 2}, backend="eager", tensor_parallel={pattern: style})
    assert programs(Tied(), plan, WORDS, 2).program.params["embed.weight"].division is not None
    found = zgraph.verify(Tied(), plan, 2, WORDS)
    assert found.ok, str(found)


def test_a_module_without_weights_is_no_wrong_name():
    plan = zgraph.Plan(mesh={"tp": 2}, backend="eager", tensor_parallel={"middle": "colwise"})
    with pytest.raises(PlanError, match="'middle' has no parameter of its own") as caught:
        programs(Tied(), plan, WORDS, 2)
    assert "middle.*" in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": zgraph.AdamW(lr=0.1, groups=[zgraph.ParamGroup(match="head.*", lr=0.2)])},
        {"precision": zgraph.Precision(compute="bfloat16", keep_fp32=("head.weight",))},
    ],
    ids=["group", "keep_fp32"],
)
def test_names_of_parameters_are_their_first_ones_and_others_are_told(options):
    with pytest.raises(PlanError, match=r"is tied to 'embed\.weight'"):
        zgraph.compile(Tied(), zgraph.Plan(backend="eager", **options))
