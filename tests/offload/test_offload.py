"""What lies in the host's memory or on disk while nothing reads it: the numbers are those of keeping all on the device."""

import copy
import errno
import functools
import os
import subprocess
import sys

import models
import pytest
import refusals
import torch
from divided_models import Llama
from sweeps import in_turn, product, sweep

import zgraph
from zgraph.build.pass_pipeline import costs_of
from zgraph.build.planned_step import planned_step, programs, update_program
from zgraph.codegen.partition import split
from zgraph.errors import OffloadError, PlanError, StepError, VerifyError
from zgraph.offload.files import Backend, FileStore
from zgraph.offload.host_gradients import Away
from zgraph.offload.run_transfers import Tiers, in_flight
from zgraph.parameters.layout import layout
from zgraph.parameters.shard_module import shard
from zgraph.passes import verify_program
from zgraph.passes.analysis.costs import CPU, Costs
from zgraph.passes.analysis.live_memory import memory_of
from zgraph.passes.analysis.simulator import simulate
from zgraph.program import transfers_to_host
from zgraph.program.aliases import root_of
from zgraph.program.node import Phase, info
from zgraph.program.program import InputRole, OutputRole

EVERY = [*models.TRANSFORMERS, *models.PLAIN]
ALL = ("activations", "optimizer", "parameters")
OPTIMIZERS = {
    "AdamW": zgraph.AdamW(lr=1e-2),
    "AdamW8bit": zgraph.AdamW8bit(lr=1e-2, min_row_size=8, block_size=4),
    "SGD": zgraph.SGD(lr=1e-2, momentum=0.9),
    "LAMB": zgraph.LAMB(lr=1e-2),
    "Muon": zgraph.Muon(lr=1e-2),
}


def offloaded(place: str, *what: str, **fields) -> dict:
    return {"least_bytes": 1, **dict.fromkeys(what or ALL, place), **fields}


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.slow), "nvme"])
def place(request, tmp_path) -> str:
    return "cpu" if request.param == "cpu" else f"nvme:{tmp_path}"


def gradients(case: models.Case, **fields):
    """The loss, the gradients, and the forward's changes of buffers."""
    model, found = models.gradients(case, **{"zero": 3, "backend": "eager", **fields})
    return {n: t.clone() for n, t in {**found, **dict(model.named_buffers())}.items()}


def trained(name: str = "tied", steps: int = 3, case: models.Case | None = None, **fields):
    torch.manual_seed(1)
    case = case or models.build(name)
    plan = {"zero": 3, "backend": "eager", "optimizer": zgraph.AdamW(lr=1e-2), "grad_clip": 1.0, **fields}
    model = zgraph.compile(case.model, zgraph.Plan(**plan), loss_fn=case.loss_fn)
    losses = {}
    for step in range(steps):
        losses[f"loss {step}"] = model.train_step(*case.inputs).detach().clone()
    return model, losses | models.weights(model)


# -- every model ----------------------------------------------------------------------------------------------------------
@functools.cache
def kept(name):
    """The same of all that stays on the device."""
    return gradients(models.build(name))


@sweep(
    "name, place",
    in_turn(EVERY, ["cpu", "nvme"]),
    quick=1,
    indirect=["place"],
)
@pytest.mark.slow
def test_loss_and_gradients_are_bit_for_bit_those_of_keeping_all_on_the_device(name, place):
    away = gradients(models.build(name), offload=offloaded(place, "activations", "parameters"))
    assert models.equal(kept(name), away) and in_flight() == 0


@sweep(
    "name, zero",
    in_turn(["gpt2", "llama", "t5", "resnet", "unet", "mixtral", "uneven_mlp", "transformer_encoder"], [3, 1, 3, 0]),
    quick=(6,),
)
def test_likewise_on_virtual_ranks(name, zero):
    case = models.build(name)
    what = ("activations", "parameters") if zero == 3 else ("activations",)
    plan = zgraph.Plan(zero=zero, backend="eager", offload=offloaded("cpu", *what))
    found = zgraph.verify(case.model, plan, 4, case.inputs, case.loss_fn)
    assert found.ok, str(found)


# Every optimizer; and of float32 and quantised states, whatever else lies with them.
TRAINED = [(optimizer, {}) for optimizer in OPTIMIZERS]
TRAINED += [
    (o, more) for o in ("AdamW", "AdamW8bit") for more in ({"ema": 0.9}, {"precision": "bf16"}, {"precision": "fp16"})
]


@sweep("optimizer, more", TRAINED, quick=(0,), ids=str)
def test_training_is_bit_for_bit_that_in_memory(optimizer, more, tmp_path):
    fields = {"optimizer": OPTIMIZERS[optimizer], **more}
    _, plain = trained(**fields)
    model, away = trained(**fields, offload=offloaded(f"nvme:{tmp_path}"))
    assert models.equal(plain, away)
    assert all(model.zgraph.runtime.tiers.moved_bytes())


def one_weight() -> models.Case:
    torch.manual_seed(0)
    body = torch.nn.Sequential(torch.nn.Linear(7, 7, bias=False), torch.nn.Tanh())
    return models.Case(models.Regression(body), (torch.ones(4, 7), torch.zeros(4, 7)))


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["transformer_encoder", "channels_last", "even_mlp", "one weight"])
@pytest.mark.slow
def test_also_compiled_by_inductor(name, tmp_path):
    small = name == "one weight"
    case = one_weight if small else lambda: models.build(name)
    fields = {"backend": "inductor", **({"optimizer": OPTIMIZERS["SGD"]} if small else {})}
    _, plain = trained(case=case(), **fields)
    model, away = trained(case=case(), **fields, offload=offloaded(f"nvme:{tmp_path}"))
    assert all(model.zgraph.runtime.tiers.moved_bytes())
    for key, value in plain.items():
        torch.testing.assert_close(away[key], value, rtol=1e-5, atol=1e-6, msg=key)  # kernels end where values go


@sweep("ratio", [0.0, 0.3, 1.0], quick=1)
def test_a_ratio_keeps_a_share_of_the_states_on_the_device(ratio):
    _, plain = trained()
    model, away = trained(offload=offloaded("cpu", "optimizer", ratio=ratio))
    assert models.equal(plain, away)
    states = model.zgraph.runtime.updater.states
    bytes_ = {n: t.nbytes for n, t in states.own().items()}
    gone = sum(b for n, b in bytes_.items() if n.rpartition("/")[0] in states.options.homes)
    largest = max(bytes_.values()) * 2
    assert ratio * sum(bytes_.values()) <= gone <= ratio * sum(bytes_.values()) + largest


@sweep("fields", [{"micro_batches": 2}, {"memory_budget": "64MiB"}, {"recompute": "full"}], quick=1, ids=str)
@pytest.mark.slow
def test_it_goes_with_micro_batches_budgets_and_recomputation(fields, place):
    case = lambda: models.stack(3, dim=16)  # noqa: E731
    _, plain = trained(case=case(), **fields)
    _, away = trained(case=case(), **fields, offload=offloaded(place))
    assert models.equal(plain, away)


# -- what the user sees -------------------------------------------------------------------------------------------------------
def test_parameters_are_where_they_were_and_can_be_read_and_written(place):
    fields = {"offload": offloaded(place), "optimizer": zgraph.SGD(lr=0.1), "grad_clip": None}
    model, _ = trained(**fields)
    names = [n for n, _ in model.named_parameters()]
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    other, _ = trained(**fields, steps=0)
    other.load_state_dict(model.state_dict())
    assert [n for n, _ in other.named_parameters()] == names
    assert all(torch.equal(p, 0.5 * before[n]) for n, p in other.named_parameters())
    case = models.build("tied")
    plain = zgraph.compile(case.model, zgraph.Plan(backend="eager"))
    plain.load_state_dict(model.state_dict())
    mine, others = (m(*case.inputs) for m in (model, plain))
    assert torch.equal(mine, others)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    mine.backward(), others.backward()
    model.step(), optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_evaluation_fetches_weights_and_leaves_nothing_behind(place):
    model, _ = trained(offload=offloaded(place))
    case = models.build("tied")
    model.eval()
    with torch.no_grad():
        first, second = model(*case.inputs), model(*case.inputs)
    assert torch.equal(first, second) and in_flight() == 0
    program = model.zgraph.programs["eval1"].history().program
    assert not any(n.target is transfers_to_host.OFFLOAD for n in program.nodes) and any(
        n.target is transfers_to_host.FETCH for n in program.nodes
    )


@pytest.mark.slow
def test_parameters_that_the_user_replaces_and_copies_of_the_model_lie_there_too(tmp_path):
    model, _ = trained("even_mlp", offload=offloaded(f"nvme:{tmp_path}"))
    store = model.zgraph.runtime.tiers.of("parameters").store
    model.load_state_dict({n: t.clone() for n, t in model.state_dict().items()}, assign=True)
    first = next(model.parameters())
    first.data = first.data * 0.5
    twin = copy.deepcopy(model)
    case = models.build("even_mlp")
    losses = [m.train_step(*case.inputs) for m in (model, twin)]
    assert torch.equal(*losses) and models.equal(models.weights(model), models.weights(twin))
    for one in (model, twin):
        assert all(store.holds(p.detach()) for p in one.parameters())
        assert all(store.holds(t) for t in one.zgraph.runtime.updater.states.own().values())


def test_evaluation_in_inference_mode(place):
    model, _ = trained(offload=offloaded(place, "parameters"))
    case = models.build("tied")
    model.eval()
    with torch.inference_mode():
        first = model(*case.inputs)
    with torch.no_grad():
        assert torch.equal(first, model(*case.inputs))


class Spread(torch.nn.Module):
    """A parameter with channels last, whose gradient is one number everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 3, 5, 5).contiguous(memory_format=torch.channels_last))

    def forward(self, x):
        return self.weight.sum() * x.mean()


def test_a_gradient_that_is_not_dense_goes_with_the_strides_of_its_parameter(place):
    case = lambda: models.Case(Spread(), (torch.ones(3),))  # noqa: E731
    torch.manual_seed(0)
    plain = gradients(case())
    torch.manual_seed(0)
    away = gradients(case(), offload=offloaded(place, "parameters"))
    assert torch.equal(plain["weight"], away["weight"])


# -- graphs -----------------------------------------------------------------------------------------------------------------
def history(world: int = 1, place: str = "cpu", case: models.Case | None = None, costs: Costs | None = None, **fields):
    case = case or models.stack(4, dim=64)
    plan = zgraph.Plan(
        **{"zero": 3, "backend": "eager", "offload": offloaded(place), "optimizer": zgraph.AdamW(), **fields}
    )
    return programs(case.model, plan, case.inputs, world, costs)


def test_what_lies_elsewhere_takes_no_memory_in_the_forecast():
    plain = simulate(history(offload={}).program, Costs(CPU, fused=False))
    away = simulate(history().program, Costs(CPU, fused=False))
    assert plain.peak["parameters"] > 0 and away.peak.get("parameters", 0) == 0
    assert sum(away.peak.values()) < 0.5 * sum(plain.peak.values())
    turn = max(away.memory, key=lambda m: m.get("activations", 0))
    assert turn.get("activations", 0) < 0.2 * max(m.get("activations", 0) for m in plain.memory)


@pytest.mark.parametrize("world", [1, 2])
def test_fetches_start_before_their_readers_within_what_may_be_in_flight(world):
    slow = Costs(CPU.model_copy(update={"host": 1e8, "memory": 1e9, "flops": {"float32": 1e9}}), fused=False)
    size = 64 * 129 * 4
    counts = []
    for staging in (size, 4 * size):
        program = history(world, costs=slow, offload=offloaded("cpu", staging_bytes=staging)).program
        flying = most = apart = 0
        for node in program.nodes:
            if node.target is transfers_to_host.FETCH:
                flying += node.meta["val"].nbytes
                most = max(most, flying)
                apart += not transfers_to_host.is_host_transfer(node.next)
            elif transfers_to_host.is_wait(node) and transfers_to_host.start_of(node).target is transfers_to_host.FETCH:
                flying -= node.meta["val"].nbytes
        assert most <= staging and flying == 0
        counts.append(apart)
    assert counts[1] > 0


def test_a_view_is_made_again_of_what_comes_back_and_a_storage_goes_once():
    words = torch.randint(64, (1, 8))
    program = history(case=models.Case(Llama(layers=1), (words, words))).program
    gone = [n for n in program.nodes if n.target is transfers_to_host.OFFLOAD and info(n).phase is Phase.FORWARD]
    assert len({transfers_to_host.moved_value(n) for n in gone}) == len(gone)
    crossing = [
        n
        for n in split(program).forward.output_items()
        if n[0].role is OutputRole.SAVED and info(n[1]).home is None and info(root_of(n[1])).param is None
    ]
    assert not [n.name for _, n in crossing if n.op == "call_function" and n.meta["val"].nbytes > 64]


def test_an_update_brings_no_more_than_a_sub_group_at_a_time():
    case = models.stack(6, dim=32)
    for limit in (20_000, 100_000):
        away = offloaded("cpu", sub_group_bytes=limit, update_on="device")
        plan = zgraph.Plan(backend="eager", optimizer=zgraph.AdamW(), offload=away)
        program = update_program(case.model, plan, 1).program
        largest = max(sum(m.values()) for m in memory_of(program))
        assert largest < 4 * limit + 8 * 32 * 65 * 4, largest
        assert not any(p.role is OutputRole.MUTATION for p in program.outputs)
        stored = [n for n in program.nodes if n.target is transfers_to_host.STORE]
        assert len(stored) == 3 * sum(p.role is InputRole.GRADIENT for p in program.inputs)


@pytest.mark.parametrize("fault", ["no wait", "let go", "read early", "read at home"])
def test_the_verifier_refuses_moves_that_would_give_other_numbers(fault):
    program = history().program
    fetch = next(n for n in program.nodes if n.target is transfers_to_host.FETCH)
    wait = next(u for u in fetch.users if transfers_to_host.is_wait(u))
    reader = next(u for u in wait.users if u.op == "call_function" and not transfers_to_host.is_host_transfer(u))
    if fault == "no wait":
        wait.replace_all_uses_with(fetch)
        program.graph.erase_node(wait)
    elif fault == "let go":
        wait.update_arg(1, fetch)
    elif fault == "read early":
        reader.replace_input_with(wait, fetch)
    else:
        reader.replace_input_with(wait, fetch.args[0])
    with pytest.raises(VerifyError):
        verify_program(program)


# -- gradients of parameters that stay on the device ------------------------------------------------------------------------------
def planned(world: int, **fields):
    case = models.stack(6, dim=64)
    plan = zgraph.Plan(**{"backend": "eager", "optimizer": zgraph.AdamW(), "hardware": "h100-80g", **fields})
    return planned_step(case.model, plan, case.inputs, world), costs_of(plan)


def sent(program) -> list[str]:
    """The parameters whose gradients leave the device, in the order in which they start to."""
    return [str(info(n).param) for n in program.nodes if n.target is transfers_to_host.OFFLOAD and info(n).param]


@product("zero, world", [0, 1, 2, 3], [1, 2], together=1)
def test_gradients_leave_while_the_backward_runs(world, zero, place):
    small = {"reduce": 20_000}  # (a layer's gradients)
    step, _ = planned(world, zero=zero, offload=offloaded(place, "optimizer"), grad_clip=1.0, bucket=small)
    program = step.step.history().program
    assert sorted(sent(program)) == sorted(program.params)
    backward = [n for n in program.nodes if n.op == "call_function" and info(n).phase is Phase.BACKWARD]
    products = [i for i, n in enumerate(backward) if n.target is torch.ops.aten.mm.default]
    starts = [i for i, n in enumerate(backward) if n.target is transfers_to_host.OFFLOAD]
    assert starts[0] < products[len(products) // 2] and starts[len(starts) // 2] < products[-1]


@pytest.mark.slow
def test_an_update_fetches_no_gradient_that_came_to_the_host(place):
    step, costs = planned(1, offload=offloaded(place, "optimizer"), grad_clip=1.0, precision="fp16")
    program = step.update().program
    verify_program(program)
    gradients = set(program.input_nodes(InputRole.GRADIENT).values())
    assert {info(n).home for n in gradients} == {"cpu"}
    assert not any(gradients & set(n.all_input_nodes) for n in program.nodes if n.target is transfers_to_host.FETCH)
    assert simulate(program, costs).peak.get("gradients", 0) == 0


@pytest.mark.parametrize("more", [{"micro_batches": 4}, {}], ids=str)
def test_the_forecast_has_less_on_the_device(more):
    peaks = {}
    for on in ("host", "device"):
        step, costs = planned(1, offload=offloaded("cpu", "optimizer", update_on=on), **more)
        found = simulate(step.step.history().program, costs)
        peaks[on] = sum(found.peak.values()) + step.step.outside.held
        assert bool(found.peak.get("gradients")) == (on == "device")
    assert peaks["host"] < peaks["device"]


def test_only_gradients_of_states_that_are_elsewhere_go_and_only_reduced_ones():
    step, _ = planned(2, zero=1, micro_batches=2, offload=offloaded("cpu", "optimizer", ratio=0.5))
    programs = {name: step.step.history(variant).program for name, variant, _ in step.step.runs()}
    states = {p.name for p, n in step.update().program.input_items() if p.role is InputRole.STATE and info(n).home}
    assert not sent(programs["first"])
    assert set(sent(programs["last"])) == {n.partition("/")[0] for n in states} < set(programs["last"].params)


@pytest.mark.parametrize("update_on", ["device", "host"])
def test_they_stay_where_the_device_updates(update_on):
    step, _ = planned(1, offload=offloaded("cpu", "optimizer", update_on=update_on))
    assert bool(sent(step.step.history().program)) == (update_on == "host")


@pytest.mark.parametrize(
    "more",
    [{}, {"micro_batches": 2}, {"micro_batches": 2, "zero": 1}, {"precision": "bf16"}, {"precision": "fp16"}],
    ids=str,
)
@pytest.mark.slow
def test_training_is_bit_for_bit_that_with_gradients_on_the_device(more, place):
    _, plain = trained(**more)
    model, away = trained(**more, offload=offloaded(place, "optimizer"))
    assert models.equal(plain, away) and in_flight() == 0
    (entry,) = model.zgraph.runtime.entries.values()
    assert bool(sent(entry.program().history().program)) == (place == "cpu")  # (of a disk's, it is the host's already)


def test_backward_passes_of_ones_own_add_up_where_gradients_are():
    grads = {}
    for away in ({}, offloaded("cpu", "optimizer")):
        torch.manual_seed(0)
        case = models.stack(3)
        plan = zgraph.Plan(backend="eager", optimizer=zgraph.AdamW(), offload=away)
        model = zgraph.compile(case.model, plan)
        for _ in range(3):
            model(*case.inputs).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        grads[bool(away)] = {n: p.grad.clone() for n, p in model.named_parameters()}
    assert models.equal(grads[False], grads[True])


THERE = torch.device("meta")  # (a device that is not the host)


def test_a_gradient_of_the_device_is_held_by_the_host_and_taken_by_the_update_as_it_lies():
    model = torch.nn.Linear(3, 2)
    shards = shard(model, layout(model, {}, 0, 0), None, torch.device("cpu"), 0)
    model.weight = torch.nn.Parameter(torch.zeros(2, 3, device=THERE))
    shards.look_up()
    value = torch.ones(2, 3)
    model.weight.grad = shards.gradient("weight", value)
    assert model.weight.grad.device == THERE
    assert shards.local_gradient("weight", "cpu") is value
    model.weight.grad += shards.gradient("weight", torch.full((2, 3), 2.0))
    torch.nn.utils.clip_grad_value_([model.weight], 2.5)
    model.weight.grad[:1].zero_()
    assert torch.equal(value, torch.tensor([[0.0] * 3, [2.5] * 3]))


def test_what_is_computed_with_it_is_a_tensor_of_the_device():
    home = torch.arange(6.0).view(2, 3)
    away = Away(home, torch.device("cpu"))
    plain = torch.ones(2, 3)
    for found, expected in (
        (away * 2, home * 2),
        (torch.linalg.vector_norm(away), home.norm()),
        (plain + away, home + 1),
    ):
        assert type(found) is torch.Tensor and torch.equal(found, expected)
    assert torch.equal(plain.copy_(away), home) and type(plain) is torch.Tensor
    twin = copy.deepcopy(away)
    assert type(twin) is Away and torch.equal(twin.home, home) and twin.home.data_ptr() != home.data_ptr()
    param = torch.nn.Parameter(torch.zeros(2, 3))
    param.grad = away
    assert torch.nn.utils.clip_grad_norm_([param], 1.0) == torch.arange(6.0).norm()
    torch.testing.assert_close(home.norm(), torch.tensor(1.0))


# -- ranks --------------------------------------------------------------------------------------------------------------------
def on_ranks(away: dict, fields: dict):
    found = []
    for offload in ({}, away):
        _, result = trained(case=models.stack(1, dim=9), offload=offload, **fields)
        found.append({n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in result.items()})
    return models.equal(*found), in_flight()


@pytest.mark.gloo
@sweep("backend", [pytest.param("inductor", marks=pytest.mark.inductor), "eager"], quick=1)
def test_two_ranks_train_as_in_memory(two, tmp_path, backend):
    assert two.run(on_ranks, offloaded(f"nvme:{tmp_path}"), {"backend": backend}) == [(True, 0)] * 2


@pytest.mark.gloo
@sweep("micro_batches, zero", [(m, z) for m in (1, 2) for z in (0, 1, 2, 3)], quick=1)
def test_two_ranks_train_as_with_gradients_on_the_device(two, zero, micro_batches):
    fields = {"backend": "eager", "zero": zero, "micro_batches": micro_batches}
    assert two.run(on_ranks, offloaded("cpu", "optimizer"), fields) == [(True, 0)] * 2


def refused_on_one_rank(folder: str, file: str):
    """(The same plan on both: the folder's name means a file on the other machine.)"""
    if torch.distributed.get_rank() == 1:
        Tiers.__init__, plain = lambda self, plan, device, away: FileStore(file), Tiers.__init__
    try:
        zgraph.compile(
            models.stack(2).model, zgraph.Plan(backend="eager", offload=offloaded(f"nvme:{folder}", "parameters"))
        )
    finally:
        if torch.distributed.get_rank() == 1:
            Tiers.__init__ = plain


@pytest.mark.gloo
def test_a_disk_that_one_rank_can_not_use_is_an_error_on_all(two, tmp_path):
    (tmp_path / "file").touch()
    first, second = two.attempt(refused_on_one_rank, str(tmp_path), str(tmp_path / "file"))
    assert isinstance(first.error, OffloadError) and "rank 1 can't offload" in str(first.error), first.traceback
    assert isinstance(second.error, OffloadError) and "file" in str(second.error), second.traceback


# -- budgets ------------------------------------------------------------------------------------------------------------------
def wide(depth: int) -> models.Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return models.Case(models.Stack(depth, 32), (torch.randn(512, 32), torch.randn(512, 32)))


@pytest.mark.parametrize("host", [1e8, 4e9, 1e12])
@pytest.mark.slow
def test_a_budget_is_met_by_the_cheaper_of_computing_again_and_offloading(host):
    costs = Costs(CPU.model_copy(update={"host": host}), fused=False)
    fields = {"place": "cpu", "case": wide(4), "costs": costs, "optimizer": None}
    plain = simulate(history(**fields, offload={}).program, costs)
    budget = sum(plain.peak.values()) * 2 // 3
    found = {}
    for name, more in {
        "again": {"offload": {}},
        "away": {"offload": offloaded("cpu", "activations"), "recompute": "none"},
        "either": {"offload": offloaded("cpu", "activations")},
    }.items():
        found[name] = simulate(history(**fields, memory_budget=budget, **more).program, costs)
        assert sum(found[name].peak.values()) <= budget
    assert found["either"].seconds <= 1.001 * min(found["again"].seconds, found["away"].seconds)
    assert bool(found["either"].moved) == (host > 1e9)


def test_a_budget_too_small_names_what_works():
    fields = {"case": wide(2), "offload": offloaded("cpu"), "costs": Costs(CPU, fused=False)}
    least = refusals.smallest(lambda: history(**fields, memory_budget=1))
    made = history(**fields, memory_budget=least).program
    assert sum(simulate(made, fields["costs"]).peak.values()) <= least


@pytest.mark.slow
def test_weights_gradients_and_states_of_four_times_the_budget_train(tmp_path):
    case = lambda: models.stack(8, dim=48)  # noqa: E731
    _, plain = trained(case=case())
    whole = 4 * sum(p.nbytes for p in case().model.parameters())
    fields = {"memory_budget": whole // 4, "offload": offloaded(f"nvme:{tmp_path}", sub_group_bytes=2**17)}
    _, away = trained(case=case(), **fields)
    assert models.equal(plain, away)


# -- faults -------------------------------------------------------------------------------------------------------------------
def failing(monkeypatch, call: str, number: int, fault) -> None:
    """The `number`-th system call of this kind from now on has a fault."""
    plain, left = getattr(Backend, call), [number]

    def run(self, fd, *args):
        left[0] -= 1
        return fault() if left[0] == 0 else plain(self, fd, *args)

    monkeypatch.setattr(Backend, call, run)


def raising(number: int):
    def fault():
        raise OSError(number, os.strerror(number))

    return fault


FAULTS = {
    "disk full": ("pwritev", raising(errno.ENOSPC), "No space left"),
    "read error": ("preadv", raising(errno.EIO), "Input/output error"),
    "short read": ("preadv", lambda: 0, "short"),
}


@pytest.mark.parametrize("fault", list(FAULTS))
@sweep("at", [1, 30, 7], quick=1)
def test_a_fault_in_the_middle_of_a_step_names_the_folder_and_is_no_wrong_number(monkeypatch, tmp_path, fault, at):
    call, what, said = FAULTS[fault]
    case = models.stack(2, dim=16)
    plan = {"zero": 3, "backend": "eager", "optimizer": zgraph.AdamW(lr=1e-2), "offload": offloaded(f"nvme:{tmp_path}")}
    model = zgraph.compile(case.model, zgraph.Plan(**plan))
    losses = [float(model.train_step(*case.inputs)) for _ in range(2)]
    saved = copy.deepcopy((model.state_dict(), model.zgraph.optimizer.state_dict()))
    expected = [float(model.train_step(*case.inputs)) for _ in range(2)]
    model.load_state_dict(saved[0])
    model.zgraph.optimizer.load_state_dict(saved[1])
    with monkeypatch.context() as patch:
        failing(patch, call, at, what)
        with pytest.raises(OffloadError) as caught:
            for _ in range(10):
                model.train_step(*case.inputs)
    assert str(tmp_path) in str(caught.value) and said in str(caught.value)
    assert in_flight() == 0 and os.listdir(tmp_path) == []
    for param in model.parameters():
        param.grad = None
    model.load_state_dict(saved[0])
    model.zgraph.optimizer.load_state_dict(saved[1])
    assert losses and [float(model.train_step(*case.inputs)) for _ in range(2)] == expected


def test_a_disk_without_room_is_an_error_when_room_is_taken(monkeypatch, tmp_path):
    case = models.stack(2, dim=16)
    monkeypatch.setattr("zgraph.offload.files.TRIAL", 4096)  # (what a preflight writes is room for what comes)
    failing(monkeypatch, "fallocate", 9, raising(errno.ENOSPC))
    with pytest.raises(OffloadError, match="free") as caught:
        trained(case=case, offload=offloaded(f"nvme:{tmp_path}"))
    assert str(tmp_path) in str(caught.value) and in_flight() == 0


def test_after_an_update_that_failed_half_way_there_is_no_next(monkeypatch, tmp_path):
    case = models.stack(2, dim=16)
    fields = {
        "backend": "eager",
        "optimizer": zgraph.AdamW(lr=1e-2),
        "offload": offloaded(f"nvme:{tmp_path}", "optimizer"),
    }
    model = zgraph.compile(case.model, zgraph.Plan(**fields))
    model.train_step(*case.inputs)
    with monkeypatch.context() as patch:
        failing(patch, "pwritev", 3, raising(errno.ENOSPC))
        with pytest.raises(OffloadError):
            model.train_step(*case.inputs)
    for param in model.parameters():
        param.grad = None
    for other in (model, copy.deepcopy(model)):
        with pytest.raises(StepError, match="failed half way"):
            other.train_step(*case.inputs)
        other.zero_grad()
    model.zgraph.optimizer.load_state_dict(model.zgraph.optimizer.state_dict())
    with pytest.raises(StepError, match="both weights and optimizer state"):
        model.train_step(*case.inputs)


def test_a_disk_that_fails_for_a_while_is_used_again_after_a_checkpoint_was_loaded(monkeypatch, tmp_path):
    case = models.stack(2, dim=16)
    plan = {"zero": 3, "backend": "eager", "optimizer": zgraph.AdamW(lr=1e-2), "offload": offloaded(f"nvme:{tmp_path}")}
    model = zgraph.compile(case.model, zgraph.Plan(**plan))
    model.train_step(*case.inputs)
    saved = copy.deepcopy((model.state_dict(), model.zgraph.optimizer.state_dict()))
    expected = float(model.train_step(*case.inputs))
    model.load_state_dict(saved[0]), model.zgraph.optimizer.load_state_dict(saved[1])
    model(*case.inputs).backward()
    with monkeypatch.context() as patch:
        patch.setattr(Backend, "pwritev", lambda *_: raising(errno.EIO)())
        with pytest.raises(OffloadError):
            model.step()
    model.zero_grad()
    model.load_state_dict(saved[0]), model.zgraph.optimizer.load_state_dict(saved[1])
    assert float(model.train_step(*case.inputs)) == expected


def test_a_program_that_fails_leaves_nothing_on_its_way(tmp_path):
    model, _ = trained(offload=offloaded(f"nvme:{tmp_path}"))
    words, targets = models.build("tied").inputs
    with pytest.raises(Exception, match="index"):
        model(words + 10**6, targets)
    assert in_flight() == 0


KILLED = """
import sys, torch, zgraph
sys.path.insert(0, {tests!r})
import models
case = models.stack(6, dim=64)
where = dict.fromkeys(("activations", "optimizer", "parameters"), "nvme:" + {folder!r})
plan = zgraph.Plan(zero=3, backend="eager", optimizer=zgraph.AdamW(lr=1e-2), offload={{"least_bytes": 1, **where}})
model = zgraph.compile(case.model, plan)
while True:
    print(float(model.train_step(*case.inputs)), flush=True)
"""


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_nothing_and_starts_again(tmp_path):
    seen = []
    for _ in range(2):
        code = KILLED.format(tests=os.path.dirname(models.__file__), folder=str(tmp_path))
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
            seen.append([process.stdout.readline() for _ in range(3)])
            process.kill()
        assert os.listdir(tmp_path) == []
    assert seen[0] == seen[1] and all(line.strip() for line in seen[0])


# -- refusals -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"offload": {"parameters": "cpu"}, "zero": 2}, "zero is 2"),
        ({"offload": {"optimizer": "cpu"}}, "no optimizer"),
        ({"offload": {"activations": "disk"}}, "is no place"),
        ({"offload": {"activations": "nvme:"}}, "is no place"),
        ({"offload": {"activations": "nvme:/a", "parameters": "nvme:/b"}}, "two folders"),
        ({"offload": {"activation": "cpu"}}, "activations"),
    ],
)
def test_what_can_not_be_had_is_refused(fields, said):
    with pytest.raises(PlanError) as caught:
        zgraph.Plan(**fields)
    assert said in str(caught.value)


def test_a_folder_that_can_not_be_had_is_an_error_before_the_model_is_changed(tmp_path):
    (tmp_path / "file").touch()
    model = models.stack(2).model
    before = [id(p) for p in model.parameters()]
    with pytest.raises(OffloadError) as caught:
        zgraph.compile(model, zgraph.Plan(offload=offloaded(f"nvme:{tmp_path / 'file'}", "parameters")))
    assert str(tmp_path / "file") in str(caught.value)
    assert [id(p) for p in model.parameters()] == before and not hasattr(model, "zgraph")
