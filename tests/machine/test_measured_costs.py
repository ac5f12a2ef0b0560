"""What ranks schedule from without being told: measured once on a machine, the same on all ranks, and never believed blindly.

Nothing here says how long anything takes.
"""

from __future__ import annotations

import json
import os
import random

import pytest
import torch
from torch import nn

import zgraph
from zgraph.build.pass_pipeline import costs_of
from zgraph.build.planned_step import programs
from zgraph.machine import measured_costs, measurement_cache
from zgraph.machine.device_benchmark import Rates, measure_device, slowest
from zgraph.machine.measured_costs import FORMAT, VARIABLE, agreed_costs, alike
from zgraph.passes.analysis.costs import CPU, Link
from zgraph.ranks.agreement import Agreement

CPU_DEVICE = torch.device("cpu")
RATES = Rates(flops={"float32": 2e11, "bfloat16": 1e11}, memory=2e10, launch=1e-6, host=1e10)
PLAN = zgraph.Plan(backend="eager")


def alone(plan: zgraph.Plan = PLAN):
    return agreed_costs(plan, CPU_DEVICE, Agreement(None), None).hardware


class Measures:
    """Stands for the measurement of a device, and counts how often it was asked for."""

    def __init__(self, rates: Rates = RATES) -> None:
        self.rates, self.count = rates, 0

    def __call__(self, device: torch.device, fused: bool) -> Rates:
        self.count += 1
        return self.rates


@pytest.fixture
def measures(monkeypatch, tmp_path) -> Measures:
    found = Measures()
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("ZGRAPH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measured_costs, "measure_device", found)
    return found


# -- when it is measured --------------------------------------------------------------------------------------------------
def test_the_first_compile_measures_and_the_next_one_reads_what_was_kept(measures, caplog):
    with caplog.at_level("INFO", logger="zgraph"):
        first = alone()
    assert first.flops["float32"] == 2e11 and first.memory == first.host_memory == 2e10 and first.launch == 1e-6
    assert first.flops["float64"] == CPU.flops["float64"] and first.links == CPU.links
    (line,) = [r.getMessage() for r in caplog.records if "costs of" in r.getMessage()]
    assert "float32 200 GFLOP/s" in line and "rates measured" in line
    assert alone() == first and measures.count == 1
    model = zgraph.compile(nn.Linear(3, 2), PLAN)
    assert model.zgraph.runtime.costs.hardware == first and measures.count == 1


def test_programs_that_run_nowhere_are_made_from_data_sheets(measures):
    programs(nn.Linear(3, 2), PLAN, (torch.randn(4, 3),), 8)
    assert costs_of(PLAN).hardware == CPU and measures.count == 0


@pytest.mark.parametrize("how", ["plan", "variable", "sheet"])
def test_measuring_is_switched_off(how, measures, monkeypatch):
    if how == "variable":
        monkeypatch.setenv(VARIABLE, "default")
    plan = PLAN.model_copy(update={"hardware": {"plan": "default", "variable": None, "sheet": "cpu"}[how]})
    assert alone(plan) == CPU and measures.count == 0


def test_the_plan_goes_before_the_variable(measures, monkeypatch):
    monkeypatch.setenv(VARIABLE, "h100-80g")
    assert alone().name == "h100-80g" and alone(PLAN.model_copy(update={"hardware": "cpu"})) == CPU


def test_a_device_with_no_room_for_it_has_the_rates_of_data_sheets(measures, monkeypatch, caplog):
    def full(*_):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(measured_costs, "measure_device", full)
    found = alone()
    assert found.flops == CPU.flops and found.memory == CPU.memory and "can't be measured (no memory)" in caplog.text


def test_a_real_measurement_is_plausible_and_leaves_random_numbers_alone():
    before = torch.get_rng_state()
    found = measure_device(CPU_DEVICE, fused=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.flops["float32"] > 1e8 and found.memory > 1e8 and found.host > 1e7 and found.launch < 1e-3


# -- what is kept ---------------------------------------------------------------------------------------------------------
KEY = {"device": "one", "threads": "2"}


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("ZGRAPH_CACHE", str(tmp_path))
    return tmp_path


def test_what_was_written_is_read_and_is_in_one_file(folder):
    measurement_cache.write("device", KEY, RATES)
    assert measurement_cache.read("device", KEY, Rates) == RATES
    assert [f for f in folder.rglob("*") if f.is_file()] == [measurement_cache.entry("device", KEY)]


def test_no_damage_gives_other_numbers(folder):
    """Bytes are changed, cut off, doubled, or come from elsewhere: it is as it was, or it is nothing."""
    measurement_cache.write("device", KEY, RATES)
    path, chance = measurement_cache.entry("device", KEY), random.Random(0)
    whole = path.read_bytes()
    used = 0
    for number in range(200):
        damaged = bytearray(whole)
        at = chance.randrange(len(whole))
        if number % 4 == 0:
            damaged = damaged[:at]
        elif number % 4 == 1:
            damaged[at] ^= 1 << chance.randrange(8)
        elif number % 4 == 2:
            damaged[at:at] = whole[at : at + chance.randrange(1, 40)]
        else:
            damaged[at : at + 8] = chance.randbytes(8)
        path.write_bytes(damaged)
        found = measurement_cache.read("device", KEY, Rates)
        assert found in (None, RATES)
        used += found is not None
    assert used < 20  # (a space that was a line's end, and the like)


@pytest.mark.parametrize("content", ["", "[]", "null", "{}", '{"key": {}, "value": {}, "sum": ""}', "[" * 100_000])
def test_a_file_that_is_something_else_is_measured_again(content, measures):
    first = alone()
    (path,) = measurement_cache.entry("device", {}).parent.glob("device-*.json")
    path.write_text(content)
    assert alone() == first and measures.count == 2
    assert alone() == first and measures.count == 2  # (it was written anew)


def test_an_entry_of_another_key_is_foreign(folder):
    measurement_cache.write("device", KEY, RATES)
    other = KEY | {"threads": "3"}
    assert measurement_cache.read("device", other, Rates) is None
    measurement_cache.entry("device", other).write_bytes(measurement_cache.entry("device", KEY).read_bytes())
    assert measurement_cache.read("device", other, Rates) is None


@pytest.mark.parametrize("value", [{"memory": -1.0}, {"memory": "NaN"}, {"launch": 3.0}, {"flops": {"float32": 1e300}}])
def test_what_can_not_be_true_is_not_believed_though_its_sum_is_right(value, folder):
    data = RATES.model_dump(mode="json") | value
    measurement_cache.write("device", KEY, RATES)
    whole = {
        "key": KEY,
        "value": data,
        "sum": measurement_cache._hash(measurement_cache._text(KEY) + measurement_cache._text(data)),
    }
    measurement_cache.entry("device", KEY).write_text(json.dumps(whole))
    assert measurement_cache.read("device", KEY, Rates) is None


def test_where_nothing_can_be_kept_a_warning_says_so(measures, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZGRAPH_CACHE", str(tmp_path / "file"))
    assert alone().memory == 2e10 and "can't be kept" in caplog.text


@pytest.mark.parametrize("change", ["threads", "version", "torch", "products", "affinity"])
def test_what_the_rates_depend_on_is_part_of_the_key(change, measures, monkeypatch):
    alone()
    threads = torch.get_num_threads()
    plan = PLAN
    if change == "threads":
        torch.set_num_threads(threads + 1)
    elif change == "version":
        monkeypatch.setattr(measured_costs, "FORMAT", FORMAT + "x")
    elif change == "torch":
        monkeypatch.setattr(measured_costs, "version", lambda package: "0.0")
    elif change == "affinity":
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(77)))
    else:
        monkeypatch.setattr(measured_costs.cpu_gemm, "onednn", lambda: print)
        plan = PLAN.model_copy(update={"backend": "inductor"})
    try:
        alone(plan)
    finally:
        torch.set_num_threads(threads)
    assert measures.count == 2


# -- links ----------------------------------------------------------------------------------------------------------------
def test_links_that_differ_little_are_the_same_ones():
    link = Link(bandwidth=1e9, latency=2e-5, scatter=2.0, joins=False)
    assert alike(link, link.model_copy(update={"bandwidth": 1.2e9, "latency": 2.2e-5}), 4)
    for other in ({"bandwidth": 1.3e9}, {"latency": 4e-5}, {"scatter": 1.0}, {"joins": True}, {"work": 4e-10}):
        assert not alike(link, link.model_copy(update=other), 4)


# -- ranks ----------------------------------------------------------------------------------------------------------------
class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x):
        return self.layers(x).square().mean()


def rank() -> int:
    return torch.distributed.get_rank()


def ranks_measure(folder: str):
    """Each rank measures other rates, and has a cache of its own: (costs of three compiles, how often it measured, gradients)."""
    own = Measures(RATES.model_copy(update={"memory": 1e10 * (1 + rank()), "launch": 1e-6 * (1 + rank())}))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(VARIABLE, raising=False)
        patch.setattr(measured_costs, "measure_device", own)
        found, counts = [], []
        for compiles in range(3):
            patch.setenv("ZGRAPH_CACHE", f"{folder}/{rank() if compiles < 2 else 'shared'}")
            torch.manual_seed(0)
            model = zgraph.compile(Net(), zgraph.Plan(mesh={"dp": 2}, zero=3, backend="eager"))
            found.append(model.zgraph.runtime.costs.hardware)
            counts.append(own.count)
        model(torch.ones(4, 16)).backward()
        return found, counts, {n: p.grad.full_tensor() for n, p in model.named_parameters()}


def test_ranks_with_different_measurements_and_caches_have_the_costs_of_the_slowest(two, tmp_path):
    (found, counts, gradients), (others, other_counts, _) = two.run(ranks_measure, str(tmp_path))
    assert found == others and counts == other_counts == [1, 2, 3]
    assert all(h.memory == 1e10 and h.launch == 2e-6 for h in found)
    assert set(found[0].links) == {"*", "dp"} and found[0].links["dp"] != CPU.links["*"]
    torch.manual_seed(0)
    plain = Net()
    plain(torch.ones(4, 16)).backward()
    assert all(torch.equal(p.grad, gradients[n]) for n, p in plain.named_parameters())


def rank_told_otherwise():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "cpu" if rank() else "default")
        zgraph.compile(Net(), zgraph.Plan(mesh={"dp": 2}, backend="eager"))


def test_ranks_that_are_told_to_take_different_costs_are_refused(two):
    for outcome in two.attempt(rank_told_otherwise):
        assert isinstance(outcome.error, zgraph.errors.RankMismatchError) and VARIABLE in str(outcome.error)


def ranks_keep_links(folder: str):
    """The links of three compiles: the second is measured 1.1 times as fast, the third ten times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(VARIABLE, raising=False)
        patch.setenv("ZGRAPH_CACHE", folder)
        patch.setattr(measured_costs, "measure_device", Measures())
        found = []
        for factor in (1.0, 1.1, 10.0):
            mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
            patch.setattr(measured_costs, "measure_link", lambda *_, factor=factor: Link(bandwidth=1e9 * factor))
            costs = agreed_costs(zgraph.Plan(mesh={"dp": 2}), CPU_DEVICE, Agreement(mesh), mesh)
            found.append(costs.hardware.links["dp"].bandwidth)
        return found


def test_a_link_is_what_it_was_until_it_is_another(two, tmp_path):
    assert two.run(ranks_keep_links, str(tmp_path)) == [[1e9, 1e9, 1e10]] * 2


def test_the_slowest_rank_counts():
    other = Rates(flops={"float32": 3e11}, memory=1e10, launch=5e-7, host=2e10)
    assert slowest([RATES, other]) == Rates(flops={"float32": 2e11}, memory=1e10, launch=1e-6, host=1e10)
