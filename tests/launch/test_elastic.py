"""A plan with a batch that is the same on any number of ranks; runs that lose ranks, and get them back.

Functions at the top run on real ranks. The last tests start torchrun, and kill what it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as some
from ranks import Ranks
from torch import nn
from torch.distributed.tensor import DTensor

import zgraph
from zgraph.deepspeed.config_sections import elastic
from zgraph.errors import MeshError, PlanError, StepError
from zgraph.plan import elasticity
from zgraph.plan.elasticity import divisors
from zgraph.plan.plan import DATA_DIMENSIONS, Plan
from zgraph.program.program import DATA_DIMS

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_elastic.py"
BATCH = 12


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 11), nn.Linear(11, 5)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))).square().mean()


def built() -> Net:
    torch.manual_seed(0)
    return Net()


def batches(steps: int) -> list[torch.Tensor]:
    return list(torch.randn(steps, BATCH, 6, generator=torch.Generator().manual_seed(1)))


def elastic_plan(**fields) -> Plan:
    given = {"backend": "eager", "optimizer": zgraph.AdamW(lr=1e-2), "grad_clip": 0.5} | fields
    return Plan(**{"elastic": zgraph.Elastic(batch=BATCH, micro_batch=4)} | given)


def run(plan: Plan, steps: int = 5) -> tuple[list[torch.Tensor], float, int, int, int]:
    """(weights, the last loss of all ranks, rows of a rank, micro-batches, samples) after some steps of an elastic plan."""
    model = zgraph.compile(built(), plan)
    mine = model.zgraph.plan
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    loss = torch.zeros(())
    for whole in batches(steps):
        loss = model.train_step(whole[rank * mine.elastic.rows :][: mine.elastic.rows])
    if world > 1:
        dist.all_reduce(loss)
    weights = [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]
    return weights, float(loss) / world, mine.elastic.rows, mine.micro_batches, model.zgraph.samples


def refused() -> list[str]:
    """What a world says that the batch can't be on, and whether the model was left as it was."""
    model = built()
    try:
        zgraph.compile(model, elastic_plan(elastic={"batch": 9}))
    except MeshError as error:
        return [str(error), str(any(isinstance(p, DTensor) for p in model.parameters()))]
    return []


# -- what follows from a number of ranks ---------------------------------------------------------------------------------
BATCHES = some.integers(1, 240)
SIZES = some.none() | some.integers(1, 40) | some.lists(some.integers(1, 24), min_size=1, max_size=3).map(tuple)


def made(batch: int, micro_batch, mesh) -> Plan | None:
    """None where no number of ranks can have such a batch."""
    try:
        return Plan(mesh=mesh, elastic=zgraph.Elastic(batch=batch, micro_batch=micro_batch))
    except PlanError:
        return None


@given(BATCHES, SIZES, some.integers(1, 64), some.integers(1, 4))
def test_all_ranks_rows_are_the_batch_in_the_fewest_allowed_parts(batch, micro_batch, world, copies):
    plan = made(batch, micro_batch, {"replicate": copies, "dp": -1})
    if plan is None or world not in plan.worlds():
        return
    found = plan.for_world(world)
    rows, parts = found.elastic.rows, found.micro_batches
    assert rows * world == batch and rows % parts == 0

    def allowed(size: int) -> bool:
        if isinstance(micro_batch, tuple):
            return size in micro_batch
        return micro_batch is None or size <= micro_batch

    assert allowed(rows // parts)
    assert not any(rows % fewer == 0 and allowed(rows // fewer) for fewer in range(1, parts))


@given(BATCHES, SIZES, some.integers(1, 260), some.integers(1, 4))
def test_a_world_is_refused_with_the_worlds_that_work(batch, micro_batch, world, copies):
    plan = made(batch, micro_batch, {"replicate": copies, "dp": -1})
    sizes = micro_batch if isinstance(micro_batch, tuple) else (1,)
    works = [w for w in range(1, 261) if w % copies == 0 and any(batch % (w * size) == 0 for size in sizes)]
    assert (list(plan.worlds()) if plan else []) == works
    if plan is None or world in works:
        return
    with pytest.raises(MeshError) as caught:
        plan.for_world(world)
    if world % copies == 0:
        shown = re.match(r"worlds that can: ([\d, ]+)", caught.value.hint)[1]
        assert set(map(int, shown.split(", "))) <= set(works) and caught.value.where == "elastic"


@given(BATCHES, SIZES, some.data())
def test_a_plan_for_a_world_is_a_plan_and_can_be_made_for_another(batch, micro_batch, data):
    plan = made(batch, micro_batch, {"dp": -1})
    if plan is None:
        return
    one, other = (data.draw(some.sampled_from(plan.worlds())) for _ in range(2))
    found = plan.for_world(one)
    assert Plan.model_validate(json.loads(json.dumps(found.model_dump(mode="json")))) == found
    assert found.for_world(other) == plan.for_world(other) and found.for_world(one).hash() == found.hash()


@given(some.integers(1, 3000))
def test_divisors_are_all_of_them(number):
    assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


def test_a_prime_batch_is_looked_at_by_its_divisors(monkeypatch):
    looked = 0

    class Counted:
        def __init__(self, *bounds: int) -> None:
            self.numbers = range(*bounds)

        def __iter__(self) -> Iterator[int]:
            nonlocal looked
            for number in self.numbers:
                looked += 1
                yield number

    monkeypatch.setattr(elasticity, "range", Counted, raising=False)
    found = Plan(mesh={"dp": -1}, elastic=zgraph.Elastic(batch=20_000_003, micro_batch=8)).for_world(1)
    assert found.micro_batches == 20_000_003 and 0 < looked < 100_000


def test_only_ranks_with_rows_of_their_own_share_a_batch():
    assert set(DATA_DIMENSIONS) == set(DATA_DIMS)
    plan = Plan(mesh={"replicate": 2, "dp": 3, "tp": 1}, elastic={"batch": 24, "micro_batch": 3})
    assert plan.worlds() == (6,) and plan.for_world(6).elastic.rows == 4 and plan.for_world(6).micro_batches == 2


def test_a_plan_without_it_is_the_same_for_every_world():
    plan = Plan(micro_batches=3)
    assert plan.for_world(5) is plan
    with pytest.raises(PlanError, match="not elastic"):
        plan.worlds()


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"micro_batches": 2}, "micro_batches"),
        ({"elastic": {"batch": 12, "micro_batch": [5, 7]}}, "elastic.micro_batch"),
        ({"elastic": {"batch": 12, "micro_batch": []}}, "elastic.micro_batch"),
        ({"elastic": {"batch": 12, "worlds": [1, 5]}}, "elastic.worlds"),
        ({"elastic": {"batch": 12, "rows": 5}}, "elastic.rows"),
        ({"elastic": {"batch": 12, "micro_batch": 2.5}}, "elastic.micro_batch"),
        ({"elastic": {"batch": 12, "worlds": 2}}, "elastic.worlds"),
        ({"elastic": {"batch": 0}}, "elastic.batch"),
        ({"elastic": {"batch": 12, "micro_batches": 2}}, "elastic.micro_batches"),
        ({"mesh": {"dp": 5}}, "elastic.batch"),
    ],
    ids=str,
)
def test_what_can_not_be_is_refused_when_the_plan_is_made(fields, where):
    with pytest.raises(PlanError) as caught:
        elastic_plan(**fields)
    assert caught.value.where == where


def test_worlds_that_are_not_named_are_refused():
    plan = elastic_plan(elastic={"batch": 12, "worlds": [4, 2]})
    assert plan.worlds() == (2, 4)
    with pytest.raises(MeshError, match="worlds that can: 2, 4"):
        plan.for_world(3)


def test_a_plan_says_what_has_chosen_its_micro_batches(tmp_path):
    elastic_plan(optimizer=None).save(tmp_path / "plan.toml")
    plan = Plan.load(tmp_path / "plan.toml").for_world(1)
    assert plan.micro_batches == 3 and plan.origins()["micro_batches"] == "elastic"
    assert plan.origins()["elastic"] == f"file {tmp_path / 'plan.toml'}"


# -- the command line ------------------------------------------------------------------------------------------------------
@pytest.fixture
def shell(tmp_path, monkeypatch):
    """Runs a command on a target of three rows and an elastic plan."""
    from typer.testing import CliRunner

    from zgraph.cli.app import app

    (tmp_path / "three_rows.py").write_text(
        "import sys, torch\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_elastic import built\n"
        "def factory():\n    return built(), (torch.zeros(3, 6),)\n"
    )
    elastic_plan().save(tmp_path / "plan.toml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda *words: CliRunner().invoke(app, [*words, "--plan", "plan.toml"])
    sys.modules.pop("three_rows", None)


@pytest.mark.slow
def test_every_command_looks_at_the_rows_that_a_rank_has(shell):
    for world, rows, parts in ((2, 6, 2), (3, 4, 1)):
        at = ("three_rows:factory", "--world", str(world))
        shown = shell("dump", *at).stdout
        assert f"f32[{rows // parts}, 6] = input" in shown or f"f32[{rows // parts}, 11]" in shown
        checked = shell("check", *at)
        cut = f", in {parts} micro-batches" if parts > 1 else ""
        assert f"{rows} row(s) of a rank{cut}: 12 of all {world} in a step" in " ".join(checked.stdout.split())
        runs = [p["runs"] for p in json.loads(shell("forecast", *at, "--json").stdout)["programs"]]
        assert sum(runs) == parts + 1  # (and the update)
        (found,) = json.loads(shell("plan", *at, "--json").stdout)["plans"]
        assert found["plan"]["elastic"]["rows"] is None  # what is written is elastic still


def test_every_command_refuses_a_world_that_can_not_be(shell):
    for command in ("dump", "check", "forecast", "verify", "plan"):
        done = shell(command, "three_rows:factory", "--world", "5")
        assert done.exit_code != 0 and "an elastic batch of 12 rows can't be on 5 rank(s)" in done.output
        assert (
            command == "plan" or "worlds that can: 1, 2, 3, 4, 6, 12" in done.output
        )  # (a table of plans has no hints)


@pytest.mark.slow
def test_a_search_keeps_the_batch_and_varies_the_rest(shell):
    done = shell("plan", "three_rows:factory", "--world", "2", "--search", "--json")
    assert [p["name"][7:] for p in json.loads(done.stdout)["plans"]] == ["micro_batches=2"] * 4


def test_formulas_are_of_every_world(shell):
    assert shell("forecast", "three_rows:factory", "--world", "2", "--symbolic").exit_code == 0


# -- steps -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rows", [3, 6, 24])
def test_a_batch_of_other_rows_is_refused_before_anything_ran(rows):
    model = zgraph.compile(built(), elastic_plan())
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(StepError, match=f"the batch has {rows} rows"):
        model.train_step(torch.zeros(rows, 6))
    assert model.zgraph.samples == 0 and all(map(torch.equal, before, model.parameters()))


def test_samples_are_rows_of_steps_and_none_of_an_evaluation():
    model = zgraph.compile(built(), elastic_plan())
    for number, whole in enumerate(batches(3), 1):
        model.train_step(whole)
        model.eval_step(whole)
        assert model.zgraph.samples == number * BATCH


def test_recompiling_keeps_the_batch_and_its_position():
    model = zgraph.compile(built(), elastic_plan())
    first, second = batches(2)
    model.train_step(first)
    model.zgraph.recompile(model.zgraph.plan.model_copy(update={"zero": 1}))
    assert model.zgraph.plan.micro_batches == 3
    model.zgraph.recompile(elastic_plan(elastic={"batch": 12, "micro_batch": 6}))
    assert model.zgraph.plan.micro_batches == 2 and model.zgraph.samples == BATCH
    model.train_step(second)
    with pytest.raises(MeshError, match="elastic"):
        model.zgraph.recompile(elastic_plan(elastic={"batch": 12, "worlds": [2]}))


def plain(steps: int = 5) -> tuple[list[torch.Tensor], float]:
    model = built()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = torch.zeros(())
    for whole in batches(steps):
        loss = model(whole)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()], loss.item()


def assert_plain(found, rows: int, parts: int) -> None:
    weights, loss, own, micro, samples = found
    expected, expected_loss = plain()
    assert (own, micro, samples) == (rows, parts, 5 * BATCH)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    assert loss == pytest.approx(expected_loss, rel=1e-5)


def test_alone_a_step_is_the_plain_models():
    assert_plain(run(elastic_plan()), 12, 3)


@pytest.mark.gloo
@pytest.mark.parametrize(
    "world, rows, parts, fields",
    [
        (2, 6, 2, {"zero": 1}),
        (3, 4, 1, {"zero": 3}),
        (4, 3, 1, {"zero": 2, "mesh": {"replicate": 2, "dp": -1}}),
    ],
    ids=["2", "3", "4, in two copies"],
)
@pytest.mark.slow
def test_on_any_number_of_ranks_a_step_is_the_plain_models(world, rows, parts, fields):
    with Ranks(world) as ranks:
        for found in ranks.run(run, elastic_plan(**fields)):
            assert_plain(found, rows, parts)
        if world == 2:
            for said, changed in ranks.run(refused):
                assert "worlds that can: 1, 3, 9" in said and changed == "False"


# -- data ------------------------------------------------------------------------------------------------------------------
class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.full((6,), float(number))


@pytest.mark.filterwarnings("ignore:.*set_vital:UserWarning", "ignore:torch.distributed is disabled")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_data_loader_goes_on_with_the_next_batch(tmp_path, workers):
    """Bit for bit, over the end of an epoch."""
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    samplers = pytest.importorskip("torchdata.stateful_dataloader.sampler")

    def loader():
        sampler = samplers.StatefulDistributedSampler(Numbers(), num_replicas=1, rank=0, shuffle=True)
        return loaders.StatefulDataLoader(Numbers(), BATCH, sampler=sampler, num_workers=workers, drop_last=True)

    def epochs(of, first: int) -> Iterator[tuple[int, torch.Tensor]]:
        for epoch in range(first, 3):
            of.sampler.set_epoch(epoch)
            yield from ((epoch, values) for values in of)

    model, data = zgraph.compile(built(), elastic_plan()), loader()
    seen = []
    for epoch, values in epochs(data, 0):
        model.train_step(values)
        seen.append(values)
        if len(seen) == 4:  # (one batch into the second epoch)
            model.save_checkpoint(tmp_path, client_state={"data": data, "epoch": epoch})
    assert len(seen) == 9
    model, data = zgraph.compile(built(), elastic_plan()), loader()
    found = model.load_checkpoint(tmp_path, client_state={"data": data})
    assert model.zgraph.samples == 4 * BATCH
    again = [values for _, values in epochs(data, found["epoch"])]
    assert len(again) == 5 and all(map(torch.equal, again, seen[4:]))


# -- DeepSpeed -------------------------------------------------------------------------------------------------------------
TESTED = {  # of DeepSpeed's own tests of elasticity
    "enabled": True,
    "max_train_batch_size": 10000,
    "micro_batch_sizes": [8, 12, 16, 17],
    "min_gpus": 32,
    "max_gpus": 1500,
    "min_time": 20,
    "version": 0.1,
}


def test_the_batch_and_the_worlds_are_deepspeeds():
    fields = elastic(TESTED)["elastic"]
    assert fields["batch"] == 9792 and len(fields["worlds"]) == 23
    plan = Plan(elastic=fields)
    assert 64 in fields["worlds"] and 128 not in fields["worlds"]
    found = plan.for_world(64)
    assert found.elastic.rows // found.micro_batches == 17


def test_a_small_batch_keeps_within_its_bound_and_takes_the_largest_micro_batch():
    section = TESTED | {"max_train_batch_size": 32, "micro_batch_sizes": [1, 2, 3, 7], "min_gpus": 1}
    plan = Plan(**elastic(section))
    assert plan.elastic.batch <= 32
    found = plan.for_world(4)
    assert found.elastic.rows // found.micro_batches == 3
    section = TESTED | {"max_train_batch_size": 100, "micro_batch_sizes": [8, 10, 12], "min_gpus": 1}
    assert elastic(section)["elastic"]["batch"] <= 100


def test_the_example_of_its_documentation():
    fields = elastic({"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "version": 0.2})
    assert fields["elastic"]["batch"] == 1680 and set(fields["elastic"]["worlds"]) == {
        n for n in range(1, 841) if 840 % n == 0
    }
    smaller = elastic(
        {"enabled": True, "max_train_batch_size": 12, "micro_batch_sizes": [1, 2], "prefer_larger_batch": False}
    )
    assert smaller["elastic"]["batch"] == 12


def test_version_two_counts_nodes():
    fields = elastic(TESTED | {"version": 0.2, "num_gpus_per_node": 8, "min_gpus": 8})["elastic"]
    assert all(world % 8 == 0 for world in fields["worlds"]) and fields["batch"] % 8 == 0


def test_what_is_not_enabled_is_nothing_and_what_is_left_out_is_said(caplog):
    assert elastic({"enabled": False}) == {} == elastic({})
    with caplog.at_level("WARNING", "zgraph"):
        elastic(TESTED)
    assert "elasticity.min_time=20 is left out" in caplog.text


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"prefer_large_batch": True}, "elasticity.prefer_large_batch"),
        ({"version": 0.3}, "elasticity.version"),
        ({"micro_batch_sizes": [1, 4, -1]}, "elasticity.micro_batch_sizes"),
        ({"micro_batch_sizes": 5}, "elasticity.micro_batch_sizes"),
        ({"micro_batch_sizes": [2, 0.5]}, "elasticity.micro_batch_sizes"),
        ({"max_train_batch_size": 16}, "elasticity.max_train_batch_size"),
        ({"min_gpus": -1}, "elasticity.min_gpus"),
        ({"min_gpus": 1400, "max_gpus": 1401}, "elasticity.min_gpus"),
        ({"model_parallel_size": 4, "version": 0.2}, "elasticity.model_parallel_size"),
    ],
    ids=str,
)
def test_a_section_that_means_nothing_is_refused_with_its_key(change, where):
    with pytest.raises(PlanError) as caught:
        elastic(TESTED | change)
    assert caught.value.where == where


@pytest.mark.parametrize("key", ["max_train_batch_size", "micro_batch_sizes"])
def test_what_an_elastic_run_needs_is_asked_for(key):
    with pytest.raises(PlanError, match=f"{key} is missing"):
        elastic({k: v for k, v in TESTED.items() if k != key})


# -- torchrun --------------------------------------------------------------------------------------------------------------
ROWS = 24  # of a step of the example
EVERY = 5  # steps from checkpoint to checkpoint
LIMIT = 300.0  # seconds that anything may take on a slow machine
LINE = re.compile(r"step (\d+) world (\d+) rows (\d+) to (\d+) loss ([\d.]+)")


class Agent:
    """A torchrun of the example, and what its ranks print. What it started can be killed with it, as when a machine is lost."""

    def __init__(self, folder: Path, name: str, launch: list[str], *options: str) -> None:
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        command = [sys.executable, "-m", "torch.distributed.run", *launch, str(EXAMPLE)]
        command += ["--folder", str(folder / "checkpoints"), "--save-every", str(EVERY), *options]
        # (without the last, torch 2.13's agents never tell one that joins later where to meet)
        env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(command, stdout=out, stderr=err, env=os.environ | env)

    def workers(self) -> list[int]:
        """The processes that it has started."""
        found = []
        for thread in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, thread.read_text().split())
        return found

    def lines(self) -> list[tuple[int, int, int, int, float]]:
        """(step, world, first row, last row, loss) in the order they were printed."""
        return [(*map(int, m[:4]), float(m[4])) for m in LINE.findall(self.out.read_text())]  # type: ignore[misc]

    def kill(self) -> None:
        for pid in [self.process.pid, *self.workers()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def wait_for(self, seen: Callable[[list[tuple[int, int, int, int, float]]], bool]) -> None:
        """Until it has printed this."""
        end = time.monotonic() + LIMIT
        while not seen(self.lines()):
            ended = self.process.poll() is not None
            if ended or time.monotonic() > end:
                said = f"{self.out.read_text()[-2000:]}\n{self.err.read_text()[-6000:]}"
                pytest.fail(f"{self.out.stem} {'ended' if ended else 'did not come that far'}:\n{said}")
            time.sleep(0.1)


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Agent]]:
    agents: list[Agent] = []

    def make(name: str, launch: list[str], *options: str) -> Agent:
        agents.append(Agent(tmp_path, name, launch, *options))
        return agents[-1]

    yield make
    for agent in agents:
        agent.kill()


def example_losses(steps: int) -> list[float]:
    """Of the example's steps in plain PyTorch."""
    spec = spec_from_file_location("train_elastic", EXAMPLE)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    model, data = module.Net(), module.Data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = []
    for step in range(steps):
        loss = model(*data.rows(step * ROWS, ROWS))
        found.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def assert_one_run(lines: list[tuple[int, int, int, int, float]]) -> None:
    """Every step was taken, each row of it once by the ranks that there were, with the loss of a run that nothing has happened to."""
    parts = defaultdict(set)  # (a step that was taken again by as many ranks has the same ones again)
    for step, world, first, last, _ in lines:
        parts[step, world].add((first, last))
    whole = set()
    for (step, world), found in parts.items():
        size = ROWS // world
        every = {(at, at + size - 1) for at in range((step - 1) * ROWS, step * ROWS, size)}
        assert found <= every
        whole |= {step} if found == every else set()
    last = max(step for step, *_ in lines)
    assert whole >= set(range(1, last))  # (some ranks may not have come to tell of the last one)
    expected = example_losses(last)
    worst = max(abs(loss / expected[step - 1] - 1) for step, *_, loss in lines)
    assert worst < 1e-3  # float32 sums in another order, through so many steps; losses are printed with six digits


def restarts(lines: list[tuple[int, int, int, int, float]]) -> list[int]:
    """The steps that a rank of an agent with one began with: it is another run after another step, and with other ranks."""
    pairs = zip([(-1, 0), *lines], lines, strict=False)
    return [step for (before, former, *_), (step, world, *_) in pairs if (step, world) != (before + 1, former)]


@pytest.mark.gloo
@pytest.mark.slow
def test_a_run_goes_on_when_a_machine_is_lost_and_when_it_comes_back(start):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    quickly = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    launch = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d"]
    launch += [f"--rdzv-endpoint=localhost:{port}", "--local-addr=localhost"]
    options = ("--steps", "1000000", "--pause", "0.05")
    stays = start("stays", [*launch, f"--rdzv-conf={quickly},is_host=1"], *options)
    goes = start("goes", [*launch, f"--rdzv-conf={quickly},is_host=0"], *options)
    stays.wait_for(lambda lines: sum(world == 2 for _, world, *_ in lines) > EVERY + 2)
    goes.kill()
    before = len(stays.lines())
    stays.wait_for(lambda lines: any(world == 1 for _, world, *_ in lines[before:]))
    comes = start("comes", [*launch, f"--rdzv-conf={quickly},is_host=0"], *options)
    comes.wait_for(lambda lines: len(lines) > EVERY)
    stays.kill()
    comes.kill()
    lines = stays.lines()
    assert_one_run([*lines, *goes.lines(), *comes.lines()])
    assert [step % EVERY for step in restarts(lines)[-2:]] == [1, 1]
    assert restarts(comes.lines())[0] in restarts(lines)
    assert all(world == 2 for _, world, *_ in comes.lines())


@pytest.mark.gloo
@pytest.mark.slow
def test_a_worker_that_is_killed_is_started_again_with_the_others(start):
    launch = ["--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    agent = start("agent", launch, "--steps", "20", "--pause", "0.3")
    agent.wait_for(lambda lines: len(lines) > 2 * EVERY + 2)
    os.kill(agent.workers()[-1], signal.SIGKILL)
    assert agent.process.wait(LIMIT) == 0
    lines = agent.lines()
    assert "exitcode: -9" in agent.err.read_text()
    assert {world for _, world, *_ in lines} == {2} and max(lines)[0] == 20
    assert_one_run(lines)
