"""A pattern of a plan may use any name of a module or a parameter that has several."""

from __future__ import annotations

import pytest
import torch
from captures import shared_captures  # noqa: F401  (a fixture)
from sweeps import product
from torch import nn
from torch.nn import functional as F

import zgraph
from zgraph.build.planned_step import programs
from zgraph.errors import PlanError

pytestmark = pytest.mark.usefixtures("shared_captures")
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
    if pattern != "head.weight":  # (one of each style)
        found = zgraph.verify(Tied(), plan, 2, WORDS)
        assert found.ok, str(found)


def test_a_module_without_weights_is_no_wrong_name():
    plan = zgraph.Plan(mesh={"tp": 2}, backend="eager", tensor_parallel={"middle": "colwise"})
    with pytest.raises(PlanError, match="'middle' has no parameter of its own") as caught:
        programs(Tied(), plan, WORDS, 2)
    assert "middle.*" in str(caught.value)


@pytest.mark.parametrize("pattern", ["head", "head.weight", "embed", "hea*"])
def test_a_tied_weight_stays_in_float32_in_all_modules_that_have_it(pattern):
    plan = zgraph.Plan(
        backend="eager", precision=zgraph.Precision(compute="bfloat16", parameter="bfloat16", keep_fp32=(pattern,))
    )
    model = zgraph.compile(Tied(), plan)
    assert model.embed.weight.dtype is torch.float32 and model.middle[0].weight.dtype is torch.bfloat16
    if pattern == "head":  # (the others differ no more)
        model(*WORDS).backward()
        found = zgraph.verify(Tied(), plan, 2, WORDS)
        assert found.ok, str(found)


@pytest.mark.parametrize("pattern", ["head.*", "embed.weight", "*.weight"])
def test_a_group_matches_a_tied_weight_by_any_name(pattern):
    optimizer = zgraph.AdamW(lr=0.1, groups=[zgraph.ParamGroup(match=pattern, lr=0.2)])
    model = zgraph.compile(Tied(), zgraph.Plan(backend="eager", optimizer=optimizer))
    group = next(g for g in model.zgraph.optimizer.param_groups if any(p is model.embed.weight for p in g["params"]))
    assert group["lr"] == 0.2


def test_two_groups_that_match_a_tied_weight_are_refused_with_its_names():
    groups = [zgraph.ParamGroup(match="head.*", lr=0.2), zgraph.ParamGroup(match="embed.*", lr=0.3)]
    with pytest.raises(PlanError, match="is in two groups") as caught:
        zgraph.compile(Tied(), zgraph.Plan(backend="eager", optimizer=zgraph.AdamW(lr=0.1, groups=groups)))
    assert "'embed.weight' and 'head.weight'" in str(caught.value)


def test_a_companion_takes_what_is_embedded_or_named_by_any_name():
    optimizer = zgraph.Muon(lr=0.1, companion_modules=("nothing",))
    with pytest.raises(PlanError, match="'nothing' that matches no parameter"):
        zgraph.compile(Tied(), zgraph.Plan(backend="eager", optimizer=optimizer))

    class HeadFirst(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.embed, embed = None, self.embed
            self.late = embed  # (its weight goes by "head.weight")

        def forward(self, words):
            return F.cross_entropy(self.head(self.middle(self.late(words))).flatten(0, 1), words.flatten())

    for named in ((), ("late.*",)):
        optimizer = zgraph.Muon(lr=0.1, companion_modules=named)
        model = zgraph.compile(HeadFirst(), zgraph.Plan(backend="eager", optimizer=optimizer))
        model(*WORDS).backward()
        model.zgraph.step()
        assert "exp_avg" in model.zgraph.optimizer.state[model.head.weight]


class Shared(nn.Module):
    """A block with several names, which forward calls by those of `order`."""

    def __init__(self, order) -> None:
        super().__init__()
        self.order = order
        self.before = nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
        self.twin = self.block
        self.row = nn.Sequential(self.block, nn.Linear(8, 8))
        self.plain = [self.block]

    def forward(self, x):
        x = self.before(x)
        for name in self.order:
            x = self.plain[0](x) if name == "plain" else getattr(self, name)(x)
        return x.square().mean()


@product(
    "order, field",
    [("twin", "block"), ("block", "twin"), ("plain",), ("block", "row")],
    ["recompute", "tiles"],
    together=1,
)
def test_a_module_acts_by_any_of_its_names(order, field):
    torch.manual_seed(0)
    x = (torch.randn(64, 8),)

    def stats(name):
        plan = zgraph.Plan(backend="eager", **{field: [name] if field == "recompute" else {name: 2}})
        records = programs(Shared(order), plan, x, 1).records
        return next(r.stats for r in records if r.name == ("checkpoint" if field == "recompute" else "tile"))

    found = [stats(name) for name in ("block", "twin", "row.0")]
    assert found[0]["recomputed"] and all(f == found[0] for f in found[1:])
    plan = zgraph.Plan(backend="eager", **{field: ["twin"] if field == "recompute" else {"twin": 2}})
    assert zgraph.verify(Shared(order), plan, 1, x).ok


@pytest.mark.parametrize("name", ["block", "twin", "row"])
def test_a_stage_may_begin_with_any_name(name):
    plan = zgraph.Plan(mesh={"pp": 2}, micro_batches=2, backend="eager", partition=[name])
    found = zgraph.verify(Shared(("twin",)), plan, 2, (torch.randn(64, 8),))
    assert found.ok, str(found)


@pytest.mark.parametrize("name", ["block", "twin.0", "row.*"])
def test_a_shared_module_stays_in_float32_by_any_name(name):
    precision = zgraph.Precision(compute="bfloat16", parameter="bfloat16", keep_fp32=(name,))
    model = zgraph.compile(Shared(("twin",)), zgraph.Plan(backend="eager", precision=precision))
    model(torch.randn(4, 8)).backward()
    assert model.block[0].weight.dtype is torch.float32 and model.before.weight.dtype is torch.bfloat16
