"""`zgraph.verify` of a plan with a pipeline: all ranks of all stages in one process, and a wrong stage is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest
import stage_models
import torch
from sweeps import product, sweep
from torch import nn
from typer.testing import CliRunner

import zgraph
from zgraph.api.verify import Verification
from zgraph.cli.app import app
from zgraph.errors import CaptureError, MeshError, PlanError, SignatureError, StepError

HERE = Path(__file__).parents[1] / "support"
TIED = {
    "OwnFunctions": {"noted", "unread"},
    "Thrice": {"shared.weight", "shared.bias"},
    "Translator": {"words.weight"},
    "gpt2": {"transformer.wte.weight"},
}


@pytest.fixture(autouse=True)
def in_tests_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    monkeypatch.syspath_prepend(str(HERE))


def verified(name: str, world: int, **fields: Any) -> Verification:
    case = stage_models.build(name) if name in stage_models.MODELS else models.build(name)
    return zgraph.verify(case.model, zgraph.Plan(**{"backend": "eager"} | fields), world, case.inputs, case.loss_fn)


def assert_same(found: Verification, name: str) -> None:
    """Bit for bit, but for the sums of what several stages hold."""
    assert found.ok, found
    assert found.stage is None
    inexact = {d.name for d in found.differences if not d.exact}
    assert inexact <= TIED.get(name, set()), found


def ranks_of(found: Verification, what: str, name: str) -> set[int]:
    return {d.rank for d in found.differences if (d.what, d.name) == (what, name)}


# -- what is right ------------------------------------------------------------------------------------------------------
@pytest.mark.core
@sweep("zero", [0, 1, 2, 3], quick=2)
@sweep("name, schedule", [("Thrice", "1f1b"), ("Norms", "zb"), ("EarlyOutputs", "gpipe")], quick=2)
def test_stages_sharded_over_ranks_give_what_the_model_gives(name: str, schedule: str, zero: int) -> None:
    found = verified(name, 4, mesh={"pp": 2, "dp": 2}, micro_batches=2, zero=zero, schedule=schedule)
    assert_same(found, name)


class Replaces(nn.Module):
    """Reads a buffer and puts another in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x) * self.mean
        self.mean = self.mean * 0.9 + x.detach().mean()
        return self.b(y).square().mean()


def test_what_a_pipeline_refuses_of_python_state_is_refused_here_too() -> None:
    plan = zgraph.Plan(backend="eager", mesh={"pp": 2}, micro_batches=2)
    with pytest.raises(CaptureError, match="reads a tensor and replaces it, in a pipeline"):
        zgraph.verify(Replaces(), plan, 2, (torch.ones(4, 4),))


class Roots(nn.Module):
    """The gradient of `a` is no number: of a square root at zero, times zero."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(x + (self.a(x) * 0).square().sum(-1, keepdim=True).sqrt()).square().mean()


def test_a_gradient_that_is_no_number_leaves_the_others_their_tolerance() -> None:
    torch.manual_seed(0)
    plan = zgraph.Plan(backend="eager", mesh={"pp": 2}, micro_batches=2)
    found = zgraph.verify(Roots(), plan, 2, (torch.randn(4, 4),))
    assert found.ok, found
    assert all(d.allowed == d.allowed for d in found.differences)


@pytest.mark.parametrize("schedule", ["gpipe", "zb"])
def test_gradients_that_are_stored_on_the_host_are_summed_over_micro_batches(schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128))
    plan = zgraph.Plan(
        backend="eager", mesh={"pp": 2}, micro_batches=2, zero=3, offload={"parameters": "cpu"}, schedule=schedule
    )
    found = zgraph.verify(model, plan, 2, (torch.randn(4, 128),), lambda out: out.square().mean())
    assert found.ok, found


@sweep(
    "schedule, micro_batches, world",
    [("interleaved1f1b", 4, 2), ("loopedbfs", 2, 2), ("zbv", 4, 2), ("dualpipev", 4, 2), ("1f1b", 1, 3), ("zb", 4, 3)],
    quick=3,
)
@sweep("name", ["gpt2", "Thrice"], quick=1)
def test_each_schedule_gives_what_the_model_gives(name: str, schedule: str, micro_batches: int, world: int) -> None:
    assert_same(verified(name, world, mesh={"pp": world}, micro_batches=micro_batches, schedule=schedule), name)


@sweep("name", ["Ladder", "Translator", "Typed", "Drops", "OwnFunctions"], quick=3)
def test_what_crosses_is_compared_and_right(name: str) -> None:
    found = verified(name, 3, mesh={"pp": 3}, micro_batches=2)
    assert_same(found, name)
    for what in ("value for later stages", "gradient for earlier stages"):
        assert any(d.what == what and d.name.endswith(", micro-batch 1") for d in found.differences), what


def test_stages_within_replicas_are_right() -> None:
    mesh = {"pp": 2, "replicate": 2, "dp": 2}
    assert_same(verified("Ladder", 8, mesh=mesh, micro_batches=1, zero=3, schedule="zb"), "Ladder")


@product("precision, zero", ["bf16", "fp16"], [1, 3], together=1)
def test_half_precision_stays_within_its_rounding(precision: str, zero: int) -> None:
    fields = {"mesh": {"pp": 2, "dp": 2}, "micro_batches": 2, "zero": zero, "precision": precision}
    found = verified("Ladder", 4, **fields, schedule="zb")
    assert found.ok, found
    assert all(d.exact for d in found.differences if d.what.endswith("stages"))


@pytest.mark.slow
def test_clipping_recomputation_and_an_optimizer_change_nothing_of_it() -> None:
    fields = {"mesh": {"pp": 2, "dp": 2}, "micro_batches": 2, "recompute": "full", "grad_clip": 0.1}
    assert_same(verified("Rotary", 4, **fields, optimizer=zgraph.AdamW(lr=1e-3)), "Rotary")


@pytest.mark.slow
def test_the_program_for_inductor_is_right_as_a_graph() -> None:
    found = verified("gpt2", 4, mesh={"pp": 2, "dp": 2}, micro_batches=2, backend="inductor")
    assert found.ok, found


def test_a_loss_function_is_of_each_micro_batch() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    plan = zgraph.Plan(mesh={"pp": 2, "dp": 2}, micro_batches=2, backend="eager")
    found = zgraph.verify(model, plan, 4, (torch.randn(8, 4),), lambda output: output.pow(2).mean())
    assert found.exact, found
    assert ranks_of(found, "output", "leaf 0, micro-batch 1") == {2, 3}


def test_a_model_that_is_only_evaluated_has_no_gradients() -> None:
    case = stage_models.build("Thrice")
    plan = zgraph.Plan(mesh={"pp": 2}, micro_batches=2, backend="eager")
    found = zgraph.verify(case.model.requires_grad_(False).eval(), plan, 2, case.inputs)
    assert found.exact
    assert {d.what for d in found.differences} == {"value for later stages", "output"}


def test_each_holder_of_a_parameter_and_no_other_rank_has_its_gradient() -> None:
    found = verified("Thrice", 6, mesh={"pp": 3, "dp": 2}, micro_batches=2, partition=["own.1", "own.3"])
    assert ranks_of(found, "gradient", "own.0.weight") == {0, 1}
    assert ranks_of(found, "gradient", "own.2.weight") == {2, 3}
    assert ranks_of(found, "gradient", "own.3.weight") == {4, 5}
    assert ranks_of(found, "gradient", "shared.weight") == {0, 1, 2, 3, 4, 5}


def test_running_statistics_go_from_micro_batch_to_micro_batch() -> None:
    found = verified("Norms", 2, mesh={"pp": 2}, micro_batches=4)
    assert_same(found, "Norms")
    assert {d.stages for d in found.differences if d.what == "buffer"} == {(0,), (1,)}


class Normed(nn.Module):
    """The second norm's running mean is nothing but rounding: what comes in has a mean of zero. Forward puts a hook on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norms = nn.Linear(8, 8), nn.Sequential(nn.BatchNorm1d(8), nn.BatchNorm1d(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if h.requires_grad:
            h.register_hook(lambda g: g * 2)
        return self.norms(h).pow(4).mean()


def test_a_buffer_that_is_nothing_but_rounding_is_right_and_so_is_a_hook_on_a_value() -> None:
    torch.manual_seed(0)
    plan = zgraph.Plan(backend="eager", mesh={"pp": 2, "dp": 2}, micro_batches=2, partition=["norms"], zero=1)
    found = zgraph.verify(Normed(), plan, 4, (torch.randn(16, 8),))
    assert found.ok, found
    assert any(d.what == "buffer" and d.name == "norms.1.running_mean" for d in found.differences)


def test_neither_the_model_nor_the_random_state_changes() -> None:
    case = stage_models.build("Drops")
    before = {n: t.clone() for n, t in case.model.state_dict().items()}
    state = torch.get_rng_state()
    zgraph.verify(case.model, zgraph.Plan(mesh={"pp": 2}, micro_batches=2, backend="eager"), 2, case.inputs)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(t, before[n]) for n, t in case.model.state_dict().items())
    assert all(p.grad is None for p in case.model.parameters())


# -- what is wrong ------------------------------------------------------------------------------------------------------
@pytest.mark.core
@sweep("schedule", ["1f1b", "zb"], quick=1)
@pytest.mark.parametrize(
    ("fault", "stage", "what", "name", "right"),
    [
        ("sends", 1, "value for later stages", "", ()),
        ("returns", 2, "gradient for earlier stages", "", ("output", "value for later stages")),
        ("own_weight", 1, "gradient", "own.1.weight", ("output", "gradient for earlier stages")),
        ("shared_weight", 2, "part of a gradient", "shared.weight", ("output", "gradient for earlier stages")),
    ],
)
def test_a_pass_that_spoils_one_stage_is_found_and_the_stage_named(
    fault: str, stage: int, what: str, name: str, right: tuple[str, ...], schedule: str
) -> None:
    case = stage_models.build("Thrice")
    case.model.own[1].requires_grad_(True)
    plan = zgraph.Plan(
        mesh={"pp": 3, "dp": 2},
        micro_batches=2,
        backend="eager",
        schedule=schedule,
        partition=["own.1", "own.3"],
        passes=[f"stage_faults:{fault} after cleanup"],
    )
    found = zgraph.verify(case.model, plan, 6, case.inputs)
    assert not found.ok
    assert found.stage == stage
    assert f"it begins in stage {stage}" in str(found)
    first = next(d for d in found.differences if not d.ok)
    assert (first.what, first.stages) == (what, (stage,))
    assert first.rank // 2 == stage
    assert first.name.startswith(name)
    assert not [d for d in found.differences if d.what in right and not d.ok]


@pytest.mark.parametrize(
    ("world", "fields", "error", "said"),
    [
        (2, {"mesh": {"pp": 2}, "micro_batches": 5}, StepError, "do not divide a batch of 24"),
        (10, {"mesh": {"pp": 2, "dp": 5}}, SignatureError, "split over 5 ranks"),
        (6, {"mesh": {"pp": 2, "dp": 5}}, MeshError, "is for a world of 10"),
        (6, {"mesh": {"pp": 6}, "partition": ["own.1"]}, PlanError, "stages"),
    ],
)
def test_what_can_t_be_cut_is_refused(world: int, fields: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        verified("Thrice", world, **fields)


# -- the command line ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("passes", [[], ["stage_faults:sends after cleanup"]])
def test_the_command_line_verifies_a_pipeline(tmp_path: Path, passes: list[str]) -> None:
    plan = tmp_path / "plan.json"
    fields = {"mesh": {"pp": 3, "dp": 2}, "micro_batches": 2, "backend": "eager", "partition": ["own.1", "own.3"]}
    plan.write_text(json.dumps(fields | {"passes": passes}))
    made = CliRunner().invoke(app, ["verify", "stage_faults:thrice", "--plan", str(plan), "--world", "6", "--json"])
    assert made.exit_code == len(passes), made.output
    values = json.loads(made.stdout)
    assert (values["ok"], values["stage"]) == ((True, None) if not passes else (False, 1))
    assert all(d["stages"] for d in values["worst"])


class _Squared(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Bilinear(16, 16, 16)

    def forward(self, x):
        return torch.tanh(self.inner(x, x))


class _Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))

    def forward(self, x):
        return torch.tanh(self.inner(x))


class _Again(nn.Module):
    """Its first module runs twice, and a stage begins between: the view that autograd has saved of the second run is read by both."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = _Squared(), _Normed(), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.second(self.first(self.first(x))))


def test_a_view_of_what_a_later_stage_returns_is_made_in_the_backward():
    plan = zgraph.Plan(backend="eager", mesh={"pp": 4}, micro_batches=4)
    loss = lambda out: nn.functional.mse_loss(out, torch.zeros_like(out))  # noqa: E731
    assert zgraph.verify(_Again(), plan, 4, (torch.randn(8, 8, 16),), loss).ok
