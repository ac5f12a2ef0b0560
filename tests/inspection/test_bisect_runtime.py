"""`zgraph bisect --runtime`: the first node that compiled code computes otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._inductor import config, lowering
from typer.testing import CliRunner

import zgraph
from zgraph.api.bisect_runtime import bisect_runtime
from zgraph.cli.app import app
from zgraph.codegen import eager
from zgraph.errors import PlanError

X = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.g = nn.Linear(6, 6), nn.LayerNorm(6), nn.GroupNorm(1, 6)

    def forward(self, x):
        h = self.g(self.first(x).transpose(1, 2)).transpose(1, 2)
        h = self.norm(h.exp())
        return self.g(h.sin().transpose(1, 2)).transpose(1, 2).square().mean()


class Sines(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)

    def forward(self, x):
        return self.first(x.exp()).sin().square().mean()


@pytest.mark.slow
def test_a_wrong_lowering_is_named(monkeypatch):
    sin, cos = torch.ops.aten.sin.default, torch.ops.aten.cos.default
    monkeypatch.setitem(lowering.lowerings, sin, lowering.lowerings[cos])
    with config.patch(fx_graph_cache=False):
        made = bisect_runtime(Sines(), zgraph.Plan(), (X,))
    first = made.suspects[0]
    assert (first.program, first.operator) == ("train0.forward", "aten.sin.default")
    assert first.source.startswith(__file__)


def test_strides_that_are_not_kept_are_named(monkeypatch):
    monkeypatch.setattr(eager, "laid_out", lambda value, strides: value)
    made = bisect_runtime(Model(), zgraph.Plan(backend="eager"), (X,))
    assert [s.program for s in made.suspects] == ["train0.backward"]
    assert made.suspects[0].module == "g"


def test_right_code_is_not_accused():
    assert bisect_runtime(Model(), zgraph.Plan(backend="eager"), (X,)).ok


def test_a_pipeline_is_refused():
    with pytest.raises(PlanError):
        bisect_runtime(Model(), zgraph.Plan(mesh={"pp": 2}), (X,))


def test_the_command(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text('backend = "eager"')
    done = CliRunner().invoke(app, ["bisect", "faults:spoilt", "--plan", str(plan), "--runtime"])
    assert done.exit_code == 0, done.output
    assert "every value is what plain operators give" in done.stdout
    done = CliRunner().invoke(app, ["bisect", "faults:spoilt", "--runtime", "--world", "2"])
    assert done.exit_code == 2
