"""What is measured on a machine adds up, is the same on every rank, and is what schedules and forecasts are made from.

Nothing here says how long anything takes.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch
from sweeps import sweep
from torch import fx, nn

import zgraph
from zgraph.build.planned_step import programs
from zgraph.codegen.eager import compile_eager
from zgraph.codegen.executable import Executable
from zgraph.codegen.instrumented import Stopwatch, Timed, instrumented, shared
from zgraph.codegen.partition import split
from zgraph.errors import PlanError, RankMismatchError
from zgraph.machine.link_benchmark import fit_line
from zgraph.passes.analysis.costs import CPU, Costs, Hardware, Link, computes, hardware, signature
from zgraph.passes.analysis.simulator import simulate
from zgraph.program import collectives
from zgraph.program.aliases import is_view

BACKENDS = ["eager", pytest.param("inductor", marks=pytest.mark.inductor)]
WATCH = Stopwatch(torch.device("cpu"))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.second = nn.Linear(8, 1)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps.add_(1)
        return self.second(torch.relu(self.norm(self.first(x)))).square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch() -> tuple[torch.Tensor]:
    return (torch.randn(4, 6),)


def plan_of(backend: str, **more) -> zgraph.Plan:
    return zgraph.Plan(backend=backend, optimizer=zgraph.AdamW(lr=1e-3), grad_clip=1.0, **more)


# -- timing one program ---------------------------------------------------------------------------------------------------
def forward_of(world: int = 1) -> Executable:
    program = programs(net(), plan_of("eager"), batch(), world).program
    return compile_eager(split(program).forward, {})


@pytest.mark.core
def test_the_seconds_of_nodes_add_up_to_those_of_the_program():
    executable = forward_of()
    estimate = Costs(CPU, fused=False).compute(executable.program)
    intervals = [float(i) for i in range(2 * len(executable.calls) + 1)]
    found = shared(intervals, executable, estimate)
    assert set(found) == set(estimate) and all(computes(n) for n in found)
    assert sum(found.values()) == pytest.approx(sum(intervals))


@pytest.mark.core
def test_a_view_takes_no_time_and_what_it_takes_is_the_next_nodes():
    executable = forward_of()
    nodes = list(executable.program.graph.nodes)
    called = [nodes[at] for _, at in executable.calls]
    view = next(i for i, n in enumerate(called) if is_view(n) and computes(called[i + 1]))
    intervals = [0.0] * (2 * len(called) + 1)
    intervals[2 * view + 1] = 3.0
    intervals[2 * view + 3] = 4.0
    found = shared(intervals, executable, Costs(CPU, fused=False).compute(executable.program))
    assert called[view] not in found and found[called[view + 1]] == 7.0


@pytest.mark.core
def test_transfers_are_waited_for_where_they_start_and_are_no_operators_time():
    executable = forward_of(world=2)
    nodes = list(executable.program.graph.nodes)
    called = [nodes[at] for _, at in executable.calls]
    starts = [n for n in called if collectives.is_start(n)]
    assert starts and instrumented(executable).count("zgraph_settle(") == len(starts)
    moved = [collectives.is_start(n) or collectives.is_wait(n) for n in called]
    intervals = [0.0] * (2 * len(called) + 1)
    for i, is_moved in enumerate(moved):
        intervals[2 * i + 1] = 100.0 if is_moved else 1.0
    found = shared(intervals, executable, Costs(CPU, fused=False).compute(executable.program))
    assert sum(found.values()) == moved.count(False)


@sweep("backend", BACKENDS, quick=(0,))
def test_a_timed_program_computes_the_same_and_all_of_its_time_is_its_nodes(backend):
    model, twin, (x,) = net(), net(), batch()
    zgraph.compile(model, plan_of(backend), inputs=(x,))
    zgraph.compile(twin, plan_of(backend), inputs=(x,))
    (step,) = model.zgraph.programs.values()
    timed = [Timed(e, WATCH) for e in step.executables()]
    originals = [e.function for e in step.executables()]
    for each in timed:
        each.install()
    for m in (model, twin):
        m(x).backward()
    assert torch.equal(model.steps, twin.steps)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)
    for each, original in zip(timed, originals, strict=True):
        (run,) = each.take()
        assert len(run.intervals) == 2 * len(each.executable.calls) + 1
        seconds = each.seconds([run], Costs(CPU))
        assert sum(seconds.values()) == pytest.approx(run.seconds) and min(seconds.values()) >= 0.0
        assert each.starts(run) == (0, 0) and not each.take()
        each.remove()
        assert each.executable.function is original


@pytest.mark.inductor
@pytest.mark.slow
def test_a_tensor_that_the_generated_code_holds_is_there_when_it_is_timed():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return (x * self.weight * torch.tensor([1.0, 2.0, 3.0])).sum()

    model = Scaled()
    zgraph.compile(model, zgraph.Plan(), inputs=(torch.ones(3),))
    for executable in model.zgraph.programs["train0"].executables():
        Timed(executable, WATCH).install()
    out = model(torch.ones(3))
    out.backward()
    assert out == 6.0 and torch.equal(model.weight.grad, torch.tensor([1.0, 2.0, 3.0]))


# -- calibrating ----------------------------------------------------------------------------------------------------------
@sweep("backend", BACKENDS, quick=(0,))
def test_calibrate_leaves_the_model_alone_and_covers_the_step(backend, tmp_path):
    model, inputs, path = net(), batch(), tmp_path / "here.json"
    before = {k: v.clone() for k, v in model.state_dict().items()}
    random = torch.get_rng_state()
    found = zgraph.calibrate(model, plan_of(backend), inputs, path=path, steps=2)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random) and not hasattr(model, "zgraph")
    assert hardware(str(path)) == found and found.measured and not list(tmp_path.glob("*.part"))
    assert found.links == CPU.links and found.capacity == CPU.capacity
    zgraph.compile(model, plan_of(backend, hardware=str(path)))
    model.train_step(*inputs)
    costs = model.zgraph.runtime.costs
    (step,) = model.zgraph.programs.values()
    (update,) = model.zgraph.updates.values()
    nodes = [n for p in (step.history().program, update.program) for n in costs.compute(p)]
    assert {signature(n) for n in nodes} == set(found.operators)
    forecast = model.zgraph.forecast()
    assert forecast.seconds == pytest.approx(sum(found.operators[signature(n)] for n in nodes) + found.step)
    assert forecast.exposed == 0.0 and "besides" in str(forecast)


@pytest.mark.core
def test_a_model_without_a_loss_or_an_optimizer_can_be_calibrated():
    found = zgraph.calibrate(nn.Linear(3, 2), zgraph.Plan(backend="eager"), (torch.randn(4, 3),), steps=1)
    assert any("aten.addmm" in key or "aten.mm" in key for key in found.operators)


@pytest.mark.core
def test_what_took_no_time_of_its_own_is_not_reckoned():
    program = programs(net(), plan_of("eager"), batch(), 1).program
    made = CPU.model_copy(update={"operators": {signature(n): 0.0 for n in Costs(CPU).compute(program)}})
    assert simulate(program, Costs(made)).seconds == 0.0


@pytest.mark.core
def test_there_is_no_forecast_before_a_training_program():
    model = zgraph.compile(net(), plan_of("eager"))
    with pytest.raises(zgraph.errors.StepError, match="no training program yet"):
        model.zgraph.forecast()


@pytest.mark.core
def test_a_file_that_cant_be_written_is_named(tmp_path):
    with pytest.raises(PlanError, match="can't be written") as caught:
        zgraph.calibrate(net(), plan_of("eager"), batch(), path=tmp_path / "none" / "here.json", steps=1)
    assert str(tmp_path / "none") in str(caught.value.where)


# -- links ----------------------------------------------------------------------------------------------------------------
@pytest.mark.core
def test_a_line_is_found_again():
    sizes = [4**k for k in range(6, 13)]
    assert fit_line(sizes, [3e-5 + s * 8e-9 for s in sizes]) == pytest.approx((3e-5, 8e-9))


@pytest.mark.core
@pytest.mark.parametrize("times", [[1e-5, 1e-3, 1.0], [1e-3, 1e-3, 1e-3], [3e-3, 2e-3, 1e-3]])
def test_no_latency_and_no_rate_is_negative(times):
    fixed, slope = fit_line([1e3, 1e5, 1e7], times)
    assert fixed >= 0.0 and slope > 0.0


# -- ranks ----------------------------------------------------------------------------------------------------------------
def calibrate_and_step(path: str, backend: str) -> tuple[str, float, float]:
    torch.manual_seed(torch.distributed.get_rank())
    inputs = batch()
    found = zgraph.calibrate(net(), plan_of(backend), inputs, path=path, steps=2)
    assert hardware(path) == found
    model = zgraph.compile(net(), plan_of(backend, hardware=path))
    for _ in range(2):
        model.train_step(*inputs)
    made = model.zgraph.forecast()
    return found.model_dump_json(), made.seconds, made.exposed


def compile_with_tables(folder: str, tables: list[Hardware | None]) -> None:
    """The same plan on every rank, and in its file that rank's table; None: no file."""
    rank = torch.distributed.get_rank()
    mine = Path(folder) / str(rank)
    mine.mkdir()
    if (table := tables[rank]) is not None:
        (mine / "here.json").write_text(table.model_dump_json())
    with contextlib.chdir(mine):
        zgraph.compile(net(), plan_of("eager", hardware="here.json"))


@pytest.mark.gloo
@sweep("backend", BACKENDS[::-1], quick=1)
def test_ranks_measure_together_and_have_one_table(two, tmp_path, backend):
    first, second = two.run(calibrate_and_step, str(tmp_path / "here.json"), backend)
    assert first == second
    found = Hardware.model_validate_json(first[0])
    assert set(found.links) == {"*", "dp"} and found.links["*"] == CPU.links["*"]
    assert found.links["dp"].work <= 1.01 / found.links["dp"].bandwidth and found.links["dp"].start > 0.0
    assert first[1] >= first[2] > 0.0


@pytest.mark.gloo
def test_ranks_with_different_tables_are_refused_before_anything_is_compiled(two, tmp_path):
    for outcome in two.attempt(
        compile_with_tables, str(tmp_path), [CPU.model_copy(update={"memory": 1e9 + r}) for r in (0, 1)]
    ):
        assert isinstance(outcome.error, RankMismatchError), outcome.traceback
        assert "table of costs" in str(outcome.error) and "1000000001" in str(outcome.error)


# -- files with faults ------------------------------------------------------------------------------------------------------
def refused(plan: zgraph.Plan) -> PlanError:
    with pytest.raises(PlanError) as caught:
        zgraph.compile(net(), plan)
    return caught.value


@pytest.mark.core
def test_a_link_that_is_missing_is_named(tmp_path):
    path = tmp_path / "here.json"
    made = CPU.model_copy(update={"links": {"replicate": Link(bandwidth=1e9)}})
    path.write_text(made.model_dump_json())
    error = refused(plan_of("eager", hardware=str(path)))
    assert error.where == "links.dp" and "it has replicate" in str(error.hint)


@pytest.mark.core
def test_hardware_of_an_unknown_name_is_refused():
    error = refused(plan_of("eager", hardware="h20-141g"))
    assert error.where == "hardware" and "h200-141g" in str(error.hint)


@pytest.mark.core
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text[: len(text) // 2], "can't be read"),
        (lambda text: text.replace('"memory"', '"memori"'), "memori"),
        (lambda text: json.dumps({**json.loads(text), "operators": {"aten.mm": -1.0}}), "operators"),
        (lambda text: "[]", "has a fault"),
        (lambda text: "\0", "can't be read"),
    ],
)
def test_a_damaged_file_is_refused_with_its_name(tmp_path, change, said):
    path = tmp_path / "here.json"
    path.write_text(change(CPU.model_dump_json()))
    error = refused(plan_of("eager", hardware=str(path)))
    assert said in str(error) and "here.json" in str(error.where)


@pytest.mark.gloo
def test_a_table_that_one_rank_can_not_read_is_an_error_on_all(two, tmp_path):
    """(The other would wait in a vote for ever.)"""
    first, second = two.attempt(compile_with_tables, str(tmp_path), [CPU, None])
    assert isinstance(first.error, PlanError) and "rank 1 can't read the hardware" in str(first.error), first.traceback
    assert isinstance(second.error, PlanError) and "can't be read" in str(second.error), second.traceback


class TwoOutputs(nn.Module):
    """Its loss is made of the first output: training runs another program than was compiled first, for both."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 5), nn.Linear(6, 4)

    def forward(self, x):
        return self.one(x), self.two(x)


def test_programs_that_training_does_not_run_are_left_out():
    torch.manual_seed(0)
    found = zgraph.calibrate(
        TwoOutputs(), plan_of("eager"), batch(), steps=2, loss_fn=lambda output, *_: output[0].square().mean()
    )
    assert found.measured and found.operators


def test_operators_are_the_same_on_every_device_of_a_kind():
    """(An operator that makes a tensor names its device, which is another one on every rank.)"""
    keys = []
    for index in (0, 1):
        graph = fx.Graph()
        made = graph.call_function(
            torch.ops.aten.full.default, ([4], 1.0), {"device": torch.device("cuda", index), "pin_memory": False}
        )
        made.meta["val"] = torch.empty(4, device="meta")
        keys.append(signature(made))
    assert keys[0] == keys[1] and "cuda" in keys[0]
