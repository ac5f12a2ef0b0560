"""The gathers that a forward begins with start during the update before it."""

import gc

import models
import pytest
import torch
import torch.distributed as dist
from sweeps import sweep

import zgraph
from zgraph.build.planned_step import programs
from zgraph.codegen.partition import split
from zgraph.program import collectives
from zgraph.program.program import InputRole, OutputRole

pytestmark = pytest.mark.gloo


def plan(across: bool, **fields):
    return zgraph.Plan(
        **{"zero": 3, "backend": "eager", "optimizer": zgraph.AdamW(lr=1e-2), **fields},
        prefetch={"across_steps": across},
    )


def compiled(across: bool, **fields):
    case = models.stack(3, dim=8)
    return zgraph.compile(case.model, plan(across, **fields)), case.inputs


def losses(model, inputs, between=lambda model, step: None):
    found = []
    for step in range(5):
        out = model.train_step(*inputs) if isinstance(inputs, tuple) else model.train_step(**inputs)
        found.append(float(getattr(out, "loss", out)))
        between(model, step)
    return found, [p.full_tensor().tolist() if hasattr(p, "full_tensor") else p.tolist() for p in model.parameters()]


def weight_of(model):
    """A weight that the next forward gathers first."""
    return next(iter(model.named_parameters()))


def in_place(model, step):
    if step == 1:
        with torch.no_grad():
            weight_of(model)[1].mul_(1.5)


def behind_torchs_back(model, step):
    if step == 1 and dist.get_rank() == 1:  # (on one rank alone)
        weight_of(model)[1].data._local_tensor.add_(0.25)


def by_load(model, step):
    if step == 1:
        name, weight = weight_of(model)
        model.load_state_dict({name: weight.detach() * 0.5}, strict=False)


CHANGES = {
    "nothing": lambda model, step: None,
    "in place": in_place,
    "behind torch's back": behind_torchs_back,
    "a load": by_load,
}


def with_and_without(change, fields):
    results = []
    for across in (True, False):
        model, inputs = compiled(across, **fields)
        results.append(losses(model, inputs, CHANGES[change]))
        started = model.zgraph.runtime.first_gathers.order()
        assert bool(started) == across, started
    return results[0] == results[1], results[0][0]


@sweep("change", list(CHANGES), quick=1)
@sweep("zero", [1, 3], quick=1)
@pytest.mark.slow
def test_numbers_are_those_without_it_bit_for_bit_whatever_happens_between(two, change, zero):
    for equal, _ in two.run(with_and_without, change, {"zero": zero}):
        assert equal


@pytest.mark.slow
def test_also_in_half_precision_with_micro_batches_and_clipping(two):
    for equal, _ in two.run(with_and_without, "nothing", {"precision": "bf16", "micro_batches": 2, "grad_clip": 1.0}):
        assert equal


@pytest.mark.slow
@pytest.mark.inductor
def test_also_compiled_by_inductor(two):
    for equal, _ in two.run(with_and_without, "in place", {"backend": "inductor"}):
        assert equal


def what_is_in_flight():
    model, inputs = compiled(True)
    losses(model, inputs)
    gathers = model.zgraph.runtime.first_gathers
    flying = sorted(gathers.in_flight)
    model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    return flying, sorted(set(gathers.order())), sorted(gathers.in_flight)


def test_an_update_leaves_them_in_flight_and_the_forward_takes_them(two):
    for flying, order, after in two.run(what_is_in_flight):
        assert flying == order and flying and after == []


def transfers_that_nobody_waits_for():
    from torch._C._distributed_c10d import _get_work_registry_size

    gc.collect()  # (models of tests before)
    found = [_get_work_registry_size()]
    model, inputs = compiled(True)
    zgraph.calibrate(model_of_its_own(), plan(True), inputs, steps=2)
    gc.collect()
    found.append(_get_work_registry_size())
    losses(model, inputs)
    found.append(_get_work_registry_size())
    del model
    gc.collect()
    return [*found, _get_work_registry_size()]


def model_of_its_own():
    return models.stack(3, dim=8).model


@pytest.mark.slow
def test_none_outlives_a_calibration_or_the_model(two):
    """torch holds a transfer's tensors until it has been waited for."""
    for before, calibrated, trained, gone in two.run(transfers_that_nobody_waits_for):
        assert before == calibrated == gone < trained


def dies_while_someone_traces():
    from torch._C._distributed_c10d import _get_work_registry_size
    from torch._subclasses import FakeTensorMode

    gc.collect()
    before = _get_work_registry_size()
    model, inputs = compiled(True)
    losses(model, inputs)
    assert _get_work_registry_size() > before
    with FakeTensorMode():
        del model
        gc.collect()
        return before, _get_work_registry_size()


def test_none_outlives_a_model_that_goes_in_the_middle_of_a_trace(two):
    for before, gone in two.run(dies_while_someone_traces):
        assert before == gone


def profiled_in_parts():
    """Transfers of a model in flight after a forward, after one under a profiler that also recorded their starts, and after an
    update, with the starts that its profile has."""
    from torch._C._distributed_c10d import _get_work_registry_size

    gc.collect()
    others = _get_work_registry_size()  # (of models that other tests still hold)
    case = models.stack(5, dim=8)
    model = zgraph.compile(case.model, plan(True), inputs=case.inputs)
    model.train_step(*case.inputs)
    loss = model(*case.inputs)
    found = [_get_work_registry_size() - others]
    loss.backward()
    model.step()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities):
        loss = model(*case.inputs)
    found.append(_get_work_registry_size() - others)
    loss.backward()
    with torch.profiler.profile(activities=activities) as update:
        model.step()
    starts = [e.name for e in update.events() if "all_gather" in e.name]
    return *found, _get_work_registry_size() - others, starts


def test_no_transfer_outlives_a_profile_that_has_its_start(two):
    """(gloo's threads write to a profile when a transfer ends, and crash where the profile has gone before.)"""
    for forward, profiled, update, starts in two.run(profiled_in_parts):
        assert forward > 0 and profiled == 0
        assert update > 0 and not starts


def a_step_that_fails():
    model, inputs = compiled(True, grad_clip={"norm": 1.0, "error_if_nonfinite": True})
    losses(model, inputs)
    out = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    getattr(out, "loss", out).backward()
    next(p for p in model.parameters() if p.grad is not None).grad._local_tensor.fill_(float("inf"))
    with pytest.raises(zgraph.errors.StepError):
        model.step()
    return sorted(model.zgraph.runtime.first_gathers.in_flight), losses(model, inputs)[0]


def test_an_update_that_fails_leaves_nothing_in_flight(two):
    for flying, after in two.run(a_step_that_fails):
        assert flying == [] and all(torch.tensor(after).isfinite())


def test_they_are_programs_of_their_own_cut_out_of_the_forward():
    case = models.stack(3, dim=8)
    made = programs(case.model, plan(True, mesh={"dp": 2}), case.inputs, 2).program
    parts = split(made)
    assert parts.ahead
    for part in parts.ahead:
        assert {p.role for p in part.inputs} == {InputRole.PARAMETER}
        assert {p.role for p in part.outputs} == {OutputRole.IN_FLIGHT}
        assert all(collectives.is_start(n) for _, n in part.output_items())
    given = {p.name for p in parts.forward.inputs if p.role is InputRole.IN_FLIGHT}
    assert given == {p.name for part in parts.ahead for p in part.outputs}


def test_without_a_plans_optimizer_no_update_could_start_them():
    case = models.stack(3, dim=8)
    own = zgraph.Plan(zero=3, backend="eager", mesh={"dp": 2})
    assert split(programs(case.model, own, case.inputs, 2).program).ahead == ()
