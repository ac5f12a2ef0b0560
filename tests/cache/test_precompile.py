"""What one process compiles for ranks that are not there, these ranks find: they make nothing, and have plain PyTorch's numbers."""

from __future__ import annotations

import json
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, fresh_processes
from sweeps import sweep
from torch import nn
from typer.testing import CliRunner

import zgraph
from zgraph.api.precompile import precompile
from zgraph.capture.capture import Trace
from zgraph.cli.app import app
from zgraph.errors import MeshError, PlanError, UnsupportedError
from zgraph.torch_compat import inductor_code, process_groups

ROWS = 12  # of each rank's batch
PLAN = {"zero": 3, "backend": "eager", "optimizer": zgraph.AdamW(lr=0.1, eps=1e-3), "grad_clip": 0.5}
TOLERANCE = 1e-5  # float32, sums over ranks and micro-batches


class Net(nn.Module):
    """Two layers with a norm between them, and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.down = nn.Linear(8, 2)

    def forward(self, x, y):
        return (self.down(torch.nn.functional.gelu(self.norm(self.up(x)))) - y).square().mean()


def factory():
    torch.manual_seed(0)
    return Net(), (torch.randn(ROWS, 6), torch.randn(ROWS, 2))


def batch(number: int):
    torch.manual_seed(100 + number)
    return torch.randn(ROWS, 6), torch.randn(ROWS, 2)


def plain(batches: int):
    """The parameters after one step of plain PyTorch on all these batches together."""
    model, _ = factory()
    x, y = (torch.cat(parts) for parts in zip(*map(batch, range(batches)), strict=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3)
    model(x, y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return [p.detach() for p in model.parameters()]


def train(folder: str, plan: zgraph.Plan, data: list[int], measures: bool = False):
    """(what this rank has made itself, its parameters after one step, the name of the hardware that it scheduled by)."""
    made: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZGRAPH_CACHE", folder)
        if measures:
            patch.delenv("ZGRAPH_HARDWARE", raising=False)
        joint, compiled = Trace.joint, inductor_code.compile_with_inductor
        patch.setattr(Trace, "joint", lambda self, *rest: made.append(rest[2]) or joint(self, *rest))
        patch.setattr(inductor_code, "compile_with_inductor", lambda *a, **k: made.append("code") or compiled(*a, **k))
        model, _ = factory()
        zgraph.compile(model, plan)
        model.train_step(*batch(data[dist.get_rank()]))
        runtime = model.zgraph.runtime
        made += [f"{kind} written" for kind, _ in runtime.keeper.store.usage.written]
        return made, [p.full_tensor().detach() for p in model.parameters()], runtime.costs.hardware.name


@pytest.fixture(scope="module")
def fresh():
    """Two ranks that no other file has used: what a test leaves changed in torch's settings is part of a program's key."""
    with Ranks(2) as ranks:
        yield ranks


def surrounded(environment: dict[str, str]) -> None:
    """Give a process this environment: the server that it is forked from has the one from before all tests."""
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(scope="module")
def alone():
    """A process that no other file has used, which compiles for ranks."""
    with ProcessPoolExecutor(1, fresh_processes(), surrounded, (dict(os.environ),)) as pool:
        yield lambda *args: pool.submit(precompiled, *args).result()


def precompiled(folder: str, plan: zgraph.Plan, world: int, measures: bool = False):
    """What `precompile` returns, in a process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZGRAPH_CACHE", folder)
        if measures:
            patch.delenv("ZGRAPH_HARDWARE", raising=False)
        found = precompile(factory, plan, world)
    assert not dist.is_initialized()
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ZGRAPH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def same(found, expected):
    return all(torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE) for a, b in zip(found, expected, strict=True))


@pytest.mark.gloo
@sweep(
    "plan",
    [
        {"zero": 1, "micro_batches": 3},
        {},
        {"zero": 2, "micro_batches": 2},
        {"loss_average": "token", "micro_batches": 2},
        {"mesh": {"tp": 2}},
    ],
    ids=["waiting gradients", "plain", "kept weights", "targets", "tensor parallel"],
    quick={4},
)
@pytest.mark.slow
def test_ranks_make_nothing_of_what_one_process_has_compiled(fresh, alone, folder, plan):
    plan = zgraph.Plan(**{**PLAN, **plan})
    found = alone(str(folder), plan, 2)
    assert found.ok and [one.rank for one in found.ranks] == [0] and found.ranks[0].written == {"step": 1}
    data = [0, 0] if "tp" in plan.mesh else [0, 1]
    for made, parameters, _ in fresh.run(train, str(folder), plan, data):
        # (what is read of the joint graph in every process: how weights are divided, and whether micro-batches are cut along the batch)
        looked = ["train0"] if "tp" in plan.mesh or plan.micro_batches > 1 else []
        assert made == looked
        assert same(parameters, plain(len(set(data))))


@pytest.mark.gloo
@pytest.mark.inductor
@sweep("micro_batches", [1, 2], quick={0})
def test_code_without_a_rank_in_it_is_there_once_and_ranks_compile_nothing(fresh, alone, folder, micro_batches):
    plan = zgraph.Plan(**{**PLAN, "backend": "inductor", "micro_batches": micro_batches})
    first, second = alone(str(folder), plan, 2).ranks
    assert first.written["step"] == 1 and "step" not in second.written and second.found["step"] == 1
    assert second.written["code"] == 1 and second.found["code"] == first.written["code"] - 1  # (its backward alone)
    for made, parameters, _ in fresh.run(train, str(folder), plan, [0, 1]):
        assert made == ["train0"][: micro_batches - 1]  # (see above)
        assert same(parameters, plain(2))


@pytest.mark.gloo
@pytest.mark.inductor
@pytest.mark.slow
def test_ranks_of_a_mesh_of_several_dimensions_have_code_over_their_own_groups(alone, folder):
    plan = zgraph.Plan(**{**PLAN, "backend": "inductor", "mesh": {"replicate": 2, "dp": 2}})
    assert alone(str(folder), plan, 4).ok
    with Ranks(4) as four:
        results = four.run(train, str(folder), plan, [0, 1, 2, 3])
    for made, parameters, _ in results:
        assert made == []
        assert same(parameters, plain(4))


def test_the_command_says_what_it_has_done(folder, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"zero": 2, "backend": "eager"}))
    words = ["precompile", f"{__name__}:factory", "--plan", str(path), "--world", "3"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert f"{folder / 'programs'}: for 3 ranks" in shown.output
    assert "each rank: train0: 1 step written" in shown.output
    again = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert again["ok"] and again["ranks"] == [{"rank": 0, "programs": ["train0"], "written": {}, "found": {"step": 1}}]


@pytest.mark.slow
def test_one_process_needs_no_group(folder):
    plan = zgraph.Plan(**{**PLAN, "zero": 0, "mesh": {"dp": 1}})
    assert precompile(factory, plan, 1).ranks[0].written == {"step": 1}
    assert precompile(factory, plan, 1).ranks[0].found == {"step": 1}


@torch.library.custom_op("tests_precompile::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, gradient: gradient * 2)


class Foreign(nn.Module):
    """A model with an operator of its own, whose gradient no text shows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 2)

    def forward(self, x):
        return doubled(self.up(x)).sum()


def foreign():
    return Foreign(), (torch.randn(4, 6),)


def test_what_can_not_be_kept_is_said_and_is_no_success(folder, tmp_path):
    found = precompile(foreign, zgraph.Plan(backend="eager"), 2)
    assert not found.ok and found.ranks[0].written == {}
    assert "train0 is not kept for later processes: tests_precompile" in found.refused[0]
    path = tmp_path / "plan.json"
    path.write_text('{"backend": "eager"}')
    shown = CliRunner().invoke(app, ["precompile", f"{__name__}:foreign", "--plan", str(path), "--world", "2"])
    assert shown.exit_code == 1 and "not kept: train0 is not kept" in shown.output
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "plan, world, words",
    [
        ({"mesh": {"pp": 2, "dp": -1}, "micro_batches": 2}, 2, "cache of a plan with a pipeline"),
        ({"dynamic": {"x": {0: "rows"}}}, 2, "declared to differ"),
        ({"mesh": {"dp": 3}}, 2, "world"),
        ({"recompute": "package.module:policy"}, 2, "your own passes or policy"),
    ],
    ids=["pipeline", "sizes", "mesh", "policy"],
)
def test_what_is_never_kept_is_refused_before_anything_is_made(folder, plan, world, words):
    def never():
        raise AssertionError("the model was made")

    with pytest.raises(PlanError, match=words):
        precompile(never, zgraph.Plan(**{"backend": "eager", **plan}), world)
    assert not list(folder.rglob("*.kept"))


def test_a_folder_is_needed_that_ranks_take_programs_from(tmp_path, monkeypatch):
    plan = zgraph.Plan(backend="eager")
    monkeypatch.delenv("ZGRAPH_CACHE", raising=False)
    with pytest.raises(PlanError, match="no folder to keep programs in"):
        precompile(factory, plan, 2)
    (tmp_path / "open" / "programs").mkdir(parents=True)
    (tmp_path / "open" / "programs").chmod(0o777)
    monkeypatch.setenv("ZGRAPH_CACHE", str(tmp_path / "open"))
    with pytest.raises(PlanError, match="other users could have written"):
        precompile(factory, plan, 2)


def test_a_rank_is_no_stand_in_for_others(folder):
    with process_groups.standing_in(0, 2), pytest.raises(MeshError, match="is a rank already"):
        precompile(factory, zgraph.Plan(backend="eager"), 2)
    assert not process_groups.stands_in()


def test_ranks_that_see_a_gpu_are_refused(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UnsupportedError, match="sees a GPU"):
        precompile(factory, zgraph.Plan(backend="eager"), 2)


@pytest.mark.slow
def test_without_hardware_nobody_claims_to_know_what_ranks_will_measure(folder, monkeypatch):
    monkeypatch.delenv("ZGRAPH_HARDWARE")
    with pytest.raises(PlanError, match="nobody knows yet what 2 ranks will schedule by") as error:
        precompile(factory, zgraph.Plan(backend="eager"), 2)
    assert "zgraph calibrate" in str(error.value) and not list(folder.rglob("*.kept"))
    assert precompile(factory, zgraph.Plan(backend="eager", hardware="cpu"), 2).ok


@pytest.mark.slow
@pytest.mark.gloo
def test_costs_that_ranks_have_measured_here_are_taken_and_said_to_be_measured_again(fresh, alone, folder):
    plan = zgraph.Plan(**PLAN)
    (made, _, hardware), _ = fresh.run(train, str(folder), plan, [0, 1], True)
    assert "train0" in made and hardware.endswith("measured")
    found = alone(str(folder), plan, 2, True)
    assert found.ranks[0].found == {"step": 1} and found.ranks[0].written == {}  # (the key that these ranks had)
    assert "each run measures its links again" in found.depends[0]
