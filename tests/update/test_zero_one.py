"""0/1 Adam, step for step what a reference written from the paper and DeepSpeed 0.19.6's semantics does; programs, bytes, restarts, refusals."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from one_bit import Net, Shared, Whole, batch, transfers, weights
from ranks import Ranks

import zgraph
from zgraph.errors import PlanError, StepError
from zgraph.plan.optimizers import UpdateKind
from zgraph.update.sign_compression import bytes_of

STEPS = 60
FREEZE, KAPPA, SCALER, CLIPPER = 20, 4, 8, 4
SCHEDULE = {
    "var_freeze_step": FREEZE,
    "var_update_scaler": KAPPA,
    "local_step_scaler": SCALER,
    "local_step_clipper": CLIPPER,
}
ADAM = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.99)}
# Exact gradients at 1 … 4, 6, 8, 10, 12, 16 and 20; a synchronization at each of 21 … 28, at every second to 36, then at every fourth.
MIDDLE = 38  # two steps into a round of four


def record(**fields) -> zgraph.ZeroOneAdam:
    return zgraph.ZeroOneAdam(**{**SCHEDULE, **ADAM, **fields})


def plan(**fields) -> zgraph.Plan:
    return zgraph.Plan(**{"mesh": {"dp": -1}, "zero": 0, "backend": "eager", "optimizer": record(), **fields})


# -- when ranks share what ---------------------------------------------------------------------------------------------
class Counters:
    """DeepSpeed's counters of 0/1 Adam, which say what is shared at each step; here the first step is an update."""

    def __init__(self, rule: zgraph.ZeroOneAdam) -> None:
        self.rule, self.step = rule, 0
        self.var_interval, self.var_counter = 1, 0
        self.local_interval, self.local_counter = 1, 0

    def next(self) -> UpdateKind:
        self.step += 1
        if self.step <= self.rule.var_freeze_step:
            if self.step % self.var_interval:
                return UpdateKind.GRADIENT_SIGNS
            self.var_counter += 1
            if self.var_counter == self.rule.var_update_scaler:
                self.var_counter, self.var_interval = 0, 2 * self.var_interval
            return UpdateKind.GRADIENTS
        found = UpdateKind.NOTHING if self.step % self.local_interval else UpdateKind.ROUND_SIGNS
        self.local_counter += 1
        if self.local_counter == self.rule.local_step_scaler:
            self.local_counter = 0
            self.local_interval = min(self.rule.local_step_clipper, 2 * self.local_interval)
        return found


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"var_update_scaler": 1},
        {"local_step_clipper": 6, "local_step_scaler": 3},
        {"local_step_clipper": 1, "local_step_scaler": 1},
        {"var_freeze_step": 1, "local_step_scaler": 5, "local_step_clipper": 300},
        {"var_freeze_step": 700, "var_update_scaler": 16},
    ],
)
def test_the_kind_of_each_step_is_that_of_deepspeeds_counters(fields) -> None:
    rule = record(**fields)
    counters = Counters(rule)
    for step in range(1, 1500):
        assert rule.kind(step) is counters.next(), step
    assert rule.kind(10**15) in (UpdateKind.NOTHING, UpdateKind.ROUND_SIGNS)


def test_names_and_defaults_are_deepspeeds() -> None:
    made = zgraph.ZeroOneAdam()
    assert (made.lr, made.betas, made.eps, made.weight_decay) == (1e-3, (0.9, 0.999), 1e-8, 0.0)
    assert (made.var_freeze_step, made.var_update_scaler) == (100_000, 16)
    assert (made.local_step_scaler, made.local_step_clipper) == (32_678, 16)


# -- plans ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "fields, said",
    [
        ({"zero": 3}, "not reduced, and zero is 3"),
        ({"mesh": {"pp": 2, "dp": -1}}, "over the ranks of dp"),
        ({"wire": {"reduce": "int8"}}, "wire is set"),
        ({"offload": {"optimizer": "cpu"}}, "offload.optimizer is set"),
        ({"ema": zgraph.EMA(decay=0.9)}, "each rank has weights of its own"),
    ],
)
def test_a_wrong_plan_is_refused(fields, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plan(**fields)


@pytest.mark.parametrize("field", SCHEDULE)
def test_a_wrong_record_is_refused(field: str) -> None:
    with pytest.raises(PlanError, match=field):
        zgraph.ZeroOneAdam(**{field: 0})
    with pytest.raises(PlanError, match=f"unknown key '{field}'"):
        zgraph.ZeroOneAdam(groups=(zgraph.ParamGroup(match="*", **{field: 3}),))


# -- the reference ----------------------------------------------------------------------------------------------------
class Reference:
    """0/1 Adam (Lu et al., 2022, Algorithm 1) on all ranks at once; each has weights and a momentum of its own.

    Elements of which no exact gradient was other than zero take no part, as by DeepSpeed's `exp_avg_mask`.
    """

    def __init__(self, ranks: int, dtype: torch.dtype = torch.float32, rates=lambda step: ADAM["lr"]) -> None:
        self.ranks, self.counters, self.rates = ranks, Counters(record()), rates
        self.nets = [Net().to(dtype) for _ in range(ranks)]
        named = {n: p.detach() for n, p in self.nets[0].named_parameters()}
        self.v = {n: torch.zeros_like(p) for n, p in named.items()}
        self.m = [{n: torch.zeros_like(p) for n, p in named.items()} for _ in range(ranks)]
        self.u = [{n: torch.zeros_like(p) for n, p in named.items()} for _ in range(ranks)]
        self.lrs = 0.0
        self.shared = self.exchanges()

    def exchanges(self) -> dict[str, Shared]:
        return {n: Shared(v.numel(), self.ranks) for n, v in self.v.items()}

    def gradients(self, batches) -> list[dict[str, torch.Tensor]]:
        found = []
        for net, parts in zip(self.nets, batches, strict=True):
            net.zero_grad()
            for part in parts:
                (net(part) / len(parts)).backward()
            found.append({n: p.grad.clone() for n, p in net.named_parameters()})
        return found

    @torch.no_grad()
    def _step(self, name: str, grads, kind: UpdateKind, lr: float) -> None:
        (b1, b2), v = ADAM["betas"], self.v[name]
        own = [g[name] for g in grads]
        if kind is UpdateKind.GRADIENTS:
            mean = torch.stack(own).sum(0) / self.ranks
            own = [mean] * self.ranks
            v = self.v[name] = b2 * v + (1 - b2) * mean * mean
        elif kind is UpdateKind.GRADIENT_SIGNS:
            own = [self.shared[name].mean(own)] * self.ranks
        mask, root = v > 0, v.sqrt() + 1e-8
        for rank, net in enumerate(self.nets):
            p, m = net.get_parameter(name), self.m[rank]
            m[name] = b1 * m[name] + (1 - b1) * own[rank] * mask
            step = -lr * (m[name] / root + ADAM["weight_decay"] * p)
            p += step
            self.u[rank][name] += step
        if kind is not UpdateKind.ROUND_SIGNS:
            return
        mean = self.shared[name].mean([u[name] * root for u in self.u]) * mask
        for rank, net in enumerate(self.nets):
            p = net.get_parameter(name)
            p += mean / root - self.u[rank][name]
            self.m[rank][name] = -mean / (self.lrs + lr)

    def step(self, batches) -> list[dict[str, torch.Tensor]]:
        """The weights of all ranks after a step; `batches` has each rank's micro-batches."""
        kind, grads = self.counters.next(), self.gradients(batches)
        if self.counters.step == FREEZE + 1:  # (errors of gradients say nothing of steps)
            self.shared = self.exchanges()
        lr = self.rates(self.counters.step)
        for name in self.v:
            self._step(name, grads, kind, lr)
        ended = kind is not UpdateKind.NOTHING
        self.lrs = 0.0 if ended else self.lrs + lr
        for u in self.u if ended else []:
            u.update({n: torch.zeros_like(t) for n, t in u.items()})
        return [weights(net) for net in self.nets]


# -- ranks ------------------------------------------------------------------------------------------------------------
def path(steps: int, micro_batches: int, fields: dict, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """The weights of this rank after each step."""
    model = zgraph.compile(Net().to(dtype), plan(micro_batches=micro_batches, **fields))
    found = []
    for step in range(steps):
        parts = [batch(2 * step + n, dist.get_rank()) for n in range(micro_batches)]
        model.zgraph.train_step(torch.cat(parts))
        found.append(weights(model))
    return found


def follows(
    ranks: Ranks,
    world: int,
    steps: int = STEPS,
    micro_batches: int = 1,
    dtype: torch.dtype = torch.float64,
    rates=lambda step: ADAM["lr"],
    **fields,
) -> float:
    """How far weights were from the reference's at most. After each step that shares something all ranks have the same."""
    reference, worst = Reference(world, dtype, rates), 0.0
    found = ranks.run(path, steps, micro_batches, fields, dtype)
    for step in range(steps):
        batches = [[batch(2 * step + n, rank) for n in range(micro_batches)] for rank in range(world)]
        mine = [of_rank[step] for of_rank in found]
        for own, expected in zip(mine, reference.step(batches), strict=True):
            worst = max(worst, *(float((own[n] - value).abs().max()) for n, value in expected.items()))
        alike = all(torch.equal(mine[0][n], other[n]) for other in mine[1:] for n in mine[0])
        assert alike == (record().kind(step + 1) is not UpdateKind.NOTHING), step
    return worst


@pytest.mark.gloo
def test_two_ranks_do_what_the_algorithm_says(two: Ranks) -> None:
    assert follows(two, 2) <= 1e-6


@pytest.mark.gloo
@pytest.mark.slow
def test_four_ranks_do_what_the_algorithm_says(four: Ranks) -> None:
    assert follows(four, 4) <= 1e-6


@pytest.mark.gloo
@pytest.mark.slow
def test_in_single_precision_too(two: Ranks) -> None:
    assert follows(two, 2, FREEZE + 3, dtype=torch.float32) <= 1e-5


@pytest.mark.gloo
@pytest.mark.slow
def test_gradients_of_micro_batches_are_added_up_unreduced(two: Ranks) -> None:
    assert follows(two, 2, FREEZE + SCALER + 4, micro_batches=2) <= 1e-6


@pytest.mark.gloo
@pytest.mark.slow
def test_learning_rates_change_at_each_step(two: Ranks) -> None:
    lrs = zgraph.Linear(warmup_steps=10, total_steps=STEPS + 20)
    rates = lambda step: lrs.at(step - 1, ADAM["lr"], 0.9).lr  # noqa: E731
    assert follows(two, 2, rates=rates, lr_schedule=lrs) <= 1e-6


@pytest.mark.gloo
@pytest.mark.inductor
@pytest.mark.slow
def test_inductor_does_the_same(two: Ranks) -> None:
    assert follows(two, 2, MIDDLE, backend="inductor") <= 1e-6


def programs_of_a_run() -> tuple[dict[str, list], int, int]:
    """The transfers of the step of each kind, and how many update programs and backwards were made."""
    model = zgraph.compile(Net(), plan())
    runtime = model.zgraph.runtime
    found = {}
    for step in range(MIDDLE + 2):
        kind = record().kind(step + 1)
        model.zgraph.train_step(batch(step, dist.get_rank()))
        entry = runtime.entries[next(iter(runtime.entries))].program()
        backward = entry.backward(kind is UpdateKind.GRADIENTS, False).program
        update = runtime.updater.programs.of(tuple(runtime.shards.params()), runtime.updater.options)
        sent = transfers(backward) + transfers(update.history.program)
        assert found.setdefault(kind.value, sent) == sent
    return found, len(runtime.updater.programs.histories()), len(runtime.entries)


@pytest.mark.gloo
@pytest.mark.slow
def test_each_kind_of_step_has_one_program_and_sends_its_bytes(two: Ranks) -> None:
    sizes = [p.numel() for p in Net().parameters()]
    each = sum(bytes_of(n, 2) for n in sizes)
    signs = [("all_to_all", 2 * each), ("all_gather", each)]
    for found, updates, entries in two.run(programs_of_a_run):
        exact = found.pop("gradients")
        assert {kind for kind, _ in exact} == {"all_reduce"} and sum(b for _, b in exact) == 4 * sum(sizes)
        assert found == {"signs of gradients": signs, "nothing": [], "signs of a round's steps": signs}
        assert (updates, entries) == (4, 1)


def test_one_rank_sends_nothing_and_takes_rounds_all_the_same() -> None:
    model, reference = zgraph.compile(Net().double(), plan(mesh={"dp": 1})), Reference(1, torch.float64)
    reference.exchanges = lambda: dict.fromkeys(reference.v, Whole())
    reference.shared = reference.exchanges()
    for step in range(STEPS):
        model.zgraph.train_step(batch(step, 0))
        (expected,) = reference.step([[batch(step, 0)]])
    found = weights(model)
    assert all((found[n] - v).abs().max() <= 1e-6 for n, v in expected.items())


# -- restarts ---------------------------------------------------------------------------------------------------------
def restarted(folder: Path, at: int, fields: dict) -> tuple[dict, dict, dict]:
    """The weights of a run, of one that was saved and loaded into a new model, and those that were saved."""
    first, second = (zgraph.compile(Net(), plan(**fields)) for _ in range(2))
    for step in range(MIDDLE + 6):
        if step == at:
            first.save_checkpoint(folder)
        first.zgraph.train_step(batch(step, dist.get_rank()))
    second.load_checkpoint(folder)
    saved = weights(second)
    for step in range(at, MIDDLE + 6):
        second.zgraph.train_step(batch(step, dist.get_rank()))
    return weights(first), weights(second), saved


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize(
    "at, fields",
    [(MIDDLE, {}), (7, {}), (FREEZE, {}), (FREEZE + SCALER, {}), (MIDDLE, {"precision": "bf16"})],
)
def test_a_restart_in_the_middle_is_bit_for_bit(
    two: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture, at: int, fields
) -> None:
    ranks = two.run(restarted, tmp_path, at, fields)
    for one, other, _ in ranks:
        assert all(torch.equal(one[n], other[n]) for n in one)
    (_, _, mine), (_, _, theirs) = ranks
    apart = [n for n in mine if not torch.equal(mine[n], theirs[n])]
    assert bool(apart) == (at == MIDDLE)  # (in a round each rank has weights of its own)
    alone = zgraph.compile(Net(), plan(mesh={"dp": 1}, **fields))
    with caplog.at_level(logging.WARNING, "zgraph"):
        alone.load_checkpoint(tmp_path)
    assert ("local steps since the last synchronization are of the ranks of mesh {'dp': 2}" in caplog.text) == bool(
        apart
    )
    for step in range(at, MIDDLE + 6):
        alone.zgraph.train_step(batch(step, 0))
    assert all(w.isfinite().all() for w in weights(alone).values())


def saved_in_a_round(folder: Path) -> tuple[dict, dict]:
    """The weights where a round began, and those that a plain model reads from a checkpoint of its middle."""
    model = zgraph.compile(Net(), plan())
    for step in range(MIDDLE):
        if step == MIDDLE - 2:
            began = weights(model)
        model.zgraph.train_step(batch(step, dist.get_rank()))
    model.save_checkpoint(folder)
    fresh = zgraph.compile(Net(), plan())
    fresh.load_checkpoint(folder, optimizer=False)
    return began, weights(fresh)


@pytest.mark.gloo
@pytest.mark.slow
def test_a_checkpoint_in_a_round_has_the_weights_where_it_began(two: Ranks, tmp_path: Path) -> None:
    for began, read in two.run(saved_in_a_round, tmp_path):
        assert all(torch.equal(began[n], read[n]) for n in began)


# -- what interrupts a round -------------------------------------------------------------------------------------------
def in_a_round() -> zgraph.api.handle.Handle:
    model = zgraph.compile(Net(), plan(mesh={"dp": 1}))
    for step in range(MIDDLE):
        model.zgraph.train_step(batch(step, 0))
    return model


def test_weights_that_are_written_in_a_round_are_refused() -> None:
    model = in_a_round()
    with torch.no_grad():
        model.gain.mul_(2)
    with pytest.raises(StepError, match="'gain' was written to between two synchronizations"):
        model.zgraph.train_step(batch(0, 0))


def test_another_optimizer_in_a_round_is_refused_and_the_same_goes_on() -> None:
    model = in_a_round()
    with pytest.raises(StepError, match="between two synchronizations of local steps"):
        model.zgraph.recompile(plan(mesh={"dp": 1}, optimizer=zgraph.AdamW()))
    model.zgraph.recompile(plan(mesh={"dp": 1}, memory_budget="1GiB"))
    for step in range(2):
        model.zgraph.train_step(batch(step, 0))
    model.zgraph.recompile(plan(mesh={"dp": 1}, optimizer=zgraph.AdamW()))


def test_a_state_dict_within_a_round_is_told_and_no_model_is_published(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = in_a_round()
    with caplog.at_level(logging.WARNING, "zgraph"):
        model.state_dict()
    assert "state_dict() within a round of local steps has this rank's own weights" in caplog.text
    with pytest.raises(StepError, match="a model can't be published between two synchronizations"):
        model.save_pretrained(tmp_path)


def with_a_loss_that_is_no_number(lost: int) -> dict[str, torch.Tensor]:
    """The weights after a round of which one step has, on one rank, a loss that is no number, and one more round."""
    model = zgraph.compile(Net(), plan(on_nonfinite="skip"))
    for step in range(MIDDLE + 6):
        factor = math.nan if step == lost and dist.get_rank() == 1 else 1.0
        (model(batch(step, dist.get_rank())) * factor).backward()
        model.step()
    return weights(model)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("lost", [MIDDLE + 1, MIDDLE - 2, MIDDLE, 25, 4])
def test_ranks_come_together_though_a_step_of_the_round_was_skipped(two: Ranks, lost: int) -> None:
    one, other = two.run(with_a_loss_that_is_no_number, lost)
    assert all(torch.equal(one[n], other[n]) and one[n].isfinite().all() for n in one)
