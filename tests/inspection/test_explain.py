"""What is explained is true: reasons are those of the plan, costs those of the simulation, caps those that stopped a pass."""

from __future__ import annotations

import re

import models
import pytest
from torch import nn
from typer.testing import CliRunner

import zgraph
from zgraph.cli.app import app
from zgraph.errors import TargetError
from zgraph.inspection.explain import explain
from zgraph.inspection.make_inspection import of_model
from zgraph.inspection.memory import peak_of

PLAN = zgraph.Plan(mesh={"dp": -1}, backend="eager", optimizer=zgraph.AdamW(lr=1e-3), hardware="h100-80g")


def inspected(plan: zgraph.Plan = PLAN, world: int = 4, case: models.Case | None = None):
    case = case or models.stack(1)
    return of_model(case.model, plan, case.inputs, world)


@pytest.fixture(scope="module")
def found():
    return inspected(case=models.shallow("llama"))


def text(inspection, what: str) -> str:
    return str(explain(inspection, what))


WEIGHT = "model.layers.0.mlp.up_proj.weight"
OF_STACK = "layers.0.1.weight"


@pytest.mark.slow
def test_a_parameter_is_explained_from_its_shard_to_its_update(found):
    said = text(found, WEIGHT)
    order = ["is sharded on dimension 0 over 4 ranks", "gathers it for the forward", "gathers it for the backward"]
    order += ["reduces its gradient (avg) over 'dp'", "AdamW updates it"]
    assert [said.index(part) for part in order] == sorted(said.index(part) for part in order)
    assert "why: zero = 3" in said


@pytest.mark.parametrize(
    "changes, world, reason",
    [
        ({"zero": 0}, 4, "zero = 0"),
        ({"param_persistence_threshold": 10**9}, 4, "fewer than param_persistence_threshold = 1000000000"),
        ({}, 1, "the mesh has no dimension 'dp' of more than one rank"),
    ],
)
def test_why_a_parameter_is_whole(changes, world, reason):
    assert reason in text(inspected(PLAN.model_copy(update=changes), world), OF_STACK)


def test_weights_that_a_stage_keeps_are_not_gathered_again_and_that_is_said():
    said = text(inspected(PLAN.model_copy(update={"zero": 2})), OF_STACK)
    assert "gathers it for the backward" not in said and "zero = 2 keeps what the forward gathered" in said


def test_the_dtypes_of_a_parameter_are_those_of_the_precision():
    said = text(inspected(PLAN.model_copy(update={"precision": "bf16"})), OF_STACK)
    assert "held as float32, computed with as bfloat16" in said


def test_a_frozen_parameter_has_no_optimizer():
    case = models.build("frozen")
    found = of_model(case.model, PLAN, case.inputs, 2)
    name = next(n for n, p in case.model.named_parameters() if not p.requires_grad)
    assert "no optimizer updates it" in text(found, name)


def test_the_peak_is_what_memory_says(found):
    peak = peak_of(found)
    said = text(found, "peak")
    assert f"at {peak.node} of {peak.program}" in said
    assert all(category in said for category in peak.categories)


def test_a_node_is_explained_by_who_made_it_and_who_moved_it(found):
    node = next(
        n.name for n in found.way().last.program.graph.nodes if n.name.startswith("gather_") and "up_proj" in n.name
    )
    said = text(found, node)
    assert "pass shard_parameters made it" in said and "are held from" in said


@pytest.mark.slow
def test_a_node_that_is_computed_again_names_what_it_repeats():
    found = inspected(PLAN.model_copy(update={"recompute": "full"}), case=models.shallow("llama"))
    from zgraph.program.node import info

    node = next(n for n in found.way().last.program.graph.nodes if n.op == "call_function" and info(n).copy_of)
    assert f"it computes {info(node).copy_of} again, for the backward" in text(found, node.name)


def test_a_node_that_a_pass_took_out_says_which(found):
    way = found.way()
    gone = {r["name"] for r in way.snapshots[0].data["nodes"]} - {n.name for n in way.last.program.graph.nodes}
    name = next(n for n in sorted(gone) if not n.startswith("output"))
    assert "was taken out by pass cleanup" in text(found, name)


def test_a_pass_is_explained_by_what_it_changed(found):
    said = text(found, "release")
    assert "it stands here because it requires sharded (by shard_parameters)" in said
    assert re.search(r"nodes \d+ added, 0 removed, 0 moved, 0 changed", said)


class Deep(nn.Module):
    """Layers of which a small cap holds one: the next one's weight can't be gathered ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x.mean()


def test_what_was_missed_names_the_cap_that_stopped_a_prefetch_and_a_cap_that_would_not():
    import torch

    one = 256 * 256 * 4
    plan = PLAN.model_copy(update={"prefetch": {"max_bytes": one}})
    found = of_model(Deep(), plan, (torch.randn(4, 256),), 4)
    said = text(found, "missed")
    assert "not hoisted above" in said and "cap 256.00 KiB" in said.replace("262144 bytes", "256.00 KiB")
    remedy = int(re.search(r"to do: prefetch.max_bytes=(\d+)", said)[1])
    wider = of_model(Deep(), PLAN.model_copy(update={"prefetch": {"max_bytes": remedy}}), (torch.randn(4, 256),), 4)
    assert wider.forecast.seconds < found.forecast.seconds


def test_a_wrong_name_is_answered_with_the_nearest(found):
    with pytest.raises(TargetError, match=r"did you mean 'model.layers.0.mlp.up_proj.weight'"):
        explain(found, "model.layers.0.mlp.up_prj.weight")
    with pytest.raises(TargetError, match="the name of a parameter, a pass or a node"):
        explain(found, "§§§")


@pytest.mark.parametrize("args, said", [([], "WHAT, or --missed"), (["peak", "--missed"], "not both")])
def test_one_thing_is_explained_at_a_time(args, said):
    done = CliRunner().invoke(app, ["explain", "train_lm", *args])
    assert done.exit_code == 2 and said in " ".join(done.stderr.split())
