"""1-bit Adam and LAMB, step for step what references written from the papers and DeepSpeed 0.19.6's semantics do; bytes, restarts, refusals."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from one_bit import Net, Shared, Whole, batch, transfers, weights
from ranks import Ranks
from sweeps import sweep

import zgraph
from zgraph.errors import PlanError
from zgraph.update.sign_compression import bytes_of, padded, read, residual_sizes, sent

STEPS, FREEZE = 60, 9
ADAM = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.99)}
LAMB = {
    "max_coeff": 3.0,
    "min_coeff": 0.05,
    "coeff_beta": 0.8,
    "factor_max": 2.0,
    "factor_min": 0.6,
    "factor_threshold": 0.2,
}


def plan(*, lamb: bool = False, **fields) -> zgraph.Plan:
    kind = zgraph.OneBitLAMB(freeze_steps=FREEZE, **ADAM, **LAMB) if lamb else None
    record = kind or zgraph.OneBitAdam(freeze_steps=FREEZE, **ADAM)
    return zgraph.Plan(**{"mesh": {"dp": -1}, "zero": 0, "backend": "eager", "optimizer": record, **fields})


# -- signs ------------------------------------------------------------------------------------------------------------
def test_padding_is_deepspeeds() -> None:
    for ranks in (2, 3, 4, 8, 12):
        divider = ranks * 8 // math.gcd(ranks, 8)
        for elements in (1, 7, 16, 1000):
            missing = -elements % (ranks * divider)
            assert padded(elements, ranks) == elements + missing
            assert bytes_of(elements, ranks) * 8 == (elements + missing) // ranks + 32
    assert residual_sizes(17, 2) == {"worker_error": 32, "server_error": 16} and residual_sizes(17, 1) == {}


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_what_is_read_is_what_was_sent_and_the_rest_is_left(parts: int) -> None:
    x, error = torch.randn(5, 13), torch.randn(96) / 4
    rows, left = sent(x, error, parts)
    flat = torch.cat([x.flatten(), torch.zeros(31)]) + error
    got = read(rows).flatten()
    assert rows.shape == (parts, 96 // parts // 8 + 4) and rows.dtype is torch.uint8
    assert torch.equal(got.sign(), torch.where(flat >= 0, 1.0, -1.0))
    assert torch.equal(got.abs(), (flat.norm() / math.sqrt(96)).expand(96)) and torch.equal(left, flat - got)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_not_sent_as_if_it_were(value: float) -> None:
    x = torch.ones(16)
    x[3] = value
    assert not read(sent(x, torch.zeros(16), 2)[0]).isfinite().any()


# -- plans ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "fields, said",
    [
        ({"zero": 2}, "not reduced, and zero is 2"),
        ({"mesh": {"replicate": 2, "dp": -1}}, "over the ranks of dp"),
        ({"grad_clip": {"norm": 1.0, "error_if_nonfinite": True}}, "error_if_nonfinite is set together with a 1-bit"),
        ({"wire": {"reduce": "int8"}}, "wire is set"),
        ({"offload": {"optimizer": "cpu"}}, "offload.optimizer is set"),
    ],
)
def test_a_wrong_plan_is_refused(fields, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plan(**fields)


def test_a_wrong_record_is_refused() -> None:
    with pytest.raises(PlanError, match="freeze_steps"):
        zgraph.OneBitAdam(freeze_steps=0)
    with pytest.raises(PlanError, match="unknown key 'freeze_steps'"):
        zgraph.OneBitAdam(groups=(zgraph.ParamGroup(match="*", freeze_steps=3),))
    with pytest.raises(PlanError, match=r"min_coeff is above max_coeff, 1\.0"):
        zgraph.OneBitLAMB(max_coeff=1.0, min_coeff=2.0)
    with pytest.raises(PlanError, match=r"factor_min is above factor_max, 0\.2"):
        zgraph.OneBitLAMB(factor_max=0.2)


# -- the reference ----------------------------------------------------------------------------------------------------
class Reference:
    """1-bit Adam on all ranks at once: Adam without bias corrections; then v stays, and momenta are shared by `Shared`."""

    def __init__(self, ranks: int, dtype: torch.dtype = torch.float32, clip: float | None = None) -> None:
        self.clip = clip
        self.net, self.ranks, self.steps = Net().to(dtype), ranks, 0
        named = dict(self.net.named_parameters())
        self.m = {n: torch.zeros_like(p) for n, p in named.items()}
        self.v = {n: torch.zeros_like(p) for n, p in named.items()}
        self.shared = {n: Shared(p.numel(), ranks) for n, p in named.items()}

    def step(self, batches: list[list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The weights after a step; `batches` has each rank's micro-batches."""
        grads: list[dict[str, torch.Tensor]] = []
        for parts in batches:
            self.net.zero_grad()
            for part in parts:
                (self.net(part) / len(parts)).backward()
            grads.append({n: p.grad.clone() for n, p in self.net.named_parameters()})
        (b1, b2), frozen = ADAM["betas"], self.steps >= FREEZE
        self.steps += 1
        if not frozen:
            grads = [{n: torch.stack([g[n] for g in grads]).sum(0) / self.ranks for n in self.m}]
        for given in grads if self.clip is not None else []:
            norm = torch.stack([g.norm() for g in given.values()]).norm()
            for name, g in given.items():
                given[name] = g * (self.clip / (norm + 1e-6)).clamp(max=1.0)
        with torch.no_grad():
            for name, p in self.net.named_parameters():
                before = self.m[name]
                if frozen:
                    mean = self.shared[name].mean([b1 * before + (1 - b1) * g[name] for g in grads])
                    self.m[name] = mean * (self.v[name] > 0)
                else:
                    g = grads[0][name]
                    self.m[name] = b1 * before + (1 - b1) * g
                    self.v[name] = b2 * self.v[name] + (1 - b2) * g * g
                update = self.m[name] / (self.v[name].sqrt() + 1e-8) + ADAM["weight_decay"] * p
                p -= ADAM["lr"] * self.coefficient(name, p, update, before, frozen) * update
        return weights(self.net)

    def coefficient(self, name, p, update, before, frozen) -> float:
        return 1.0


class LambReference(Reference):
    """1-bit LAMB (Li et al., 2021, Algorithm 2): the coefficient's average is frozen, and scaled by what the squares have become since.

    Each parameter has its own scale of signs, where the paper gives all the same, and scales momenta before so that it fits them.
    """

    def __init__(self, ranks: int, dtype: torch.dtype = torch.float32, clip: float | None = None) -> None:
        super().__init__(ranks, dtype, clip)
        self.average, self.last, self.fresh = dict.fromkeys(self.m, 0.0), dict.fromkeys(self.m, 1.0), {}

    def coefficient(self, name, p, update, before, frozen) -> float:
        (b1, b2), v = ADAM["betas"], self.v[name]
        if not frozen:
            ratio = 1.0
            if p.norm() != 0 and update.norm() != 0:
                ratio = min(max(float(p.norm() / update.norm()), LAMB["min_coeff"]), LAMB["max_coeff"])
            if ratio != 1.0:
                beta = LAMB["coeff_beta"]
                self.average[name] = beta * self.average[name] + (1 - beta) * ratio
            self.fresh[name] = v.clone()
            return ratio
        g = (self.m[name] - b1 * before) / (1 - b1)
        self.fresh[name] = b2 * self.fresh[name] + (1 - b2) * g * g
        denominator = v.sqrt() + 1e-8
        factor = float((denominator / (self.fresh[name].sqrt() + 1e-8)).max())
        share = min(1.0, float((self.m[name] / denominator).norm() / update.norm()))
        factor = factor * share + 1 - share
        factor = min(max(factor, LAMB["factor_min"]), LAMB["factor_max"])
        last, threshold = self.last[name], LAMB["factor_threshold"]
        self.last[name] = min(max(factor, last * (1 - threshold)), last * (1 + threshold))
        return self.average[name] * self.last[name]


# -- ranks ------------------------------------------------------------------------------------------------------------
def path(
    steps: int, micro_batches: int, backend: str, own_loop: bool, dtype: torch.dtype, clip: float | None, lamb: bool
) -> list[dict[str, torch.Tensor]]:
    """The weights after each step."""
    model = zgraph.compile(
        Net().to(dtype),
        plan(lamb=lamb, backend=backend, grad_clip=clip, micro_batches=1 if own_loop else micro_batches),
    )
    found = []
    for step in range(steps):
        parts = [batch(2 * step + n, dist.get_rank()) for n in range(micro_batches)]
        if own_loop:
            for at, part in enumerate(parts):
                with model.no_sync() if at + 1 < len(parts) else torch.enable_grad():
                    (model(part) / len(parts)).backward()
            model.step()
        else:
            model.zgraph.train_step(torch.cat(parts))
        found.append(weights(model))
    return found


def follows(
    ranks: Ranks,
    world: int,
    steps: int,
    micro_batches: int = 1,
    backend: str = "eager",
    own: bool = False,
    dtype: torch.dtype = torch.float32,
    clip: float | None = None,
    lamb: bool = False,
) -> float:
    """How far weights were from the reference's at most."""
    reference, worst = (LambReference if lamb else Reference)(world, dtype, clip), 0.0
    found, *others = ranks.run(path, steps, micro_batches, backend, own, dtype, clip, lamb)
    for step, mine in enumerate(found):
        batches = [[batch(2 * step + n, rank) for n in range(micro_batches)] for rank in range(world)]
        for name, value in reference.step(batches).items():
            worst = max(worst, float((value - mine[name]).abs().max()))
    assert all(torch.equal(found[-1][n], other[-1][n]) for other in others for n in found[-1])
    return worst


@pytest.mark.gloo
@sweep("steps", [STEPS, 3 * FREEZE], quick=1)
def test_two_ranks_do_what_the_algorithm_says(two: Ranks, steps: int) -> None:
    assert follows(two, 2, steps) <= 1e-6


@pytest.mark.gloo
@pytest.mark.slow
def test_four_ranks_do_what_the_algorithm_says(four: Ranks) -> None:
    # (The sum of four gradients has an order, and elements with few gradients divide by little: float32 would differ by more.)
    assert follows(four, 4, STEPS, dtype=torch.float64) <= 1e-6


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("world, steps", [(2, STEPS), (4, STEPS), (2, 2 * FREEZE)])
def test_ranks_do_what_the_algorithm_of_lamb_says(two: Ranks, four: Ranks, world: int, steps: int) -> None:
    assert follows(two if world == 2 else four, world, steps, dtype=torch.float64, lamb=True) <= 1e-6


@pytest.mark.gloo
@sweep("own", [False, True], quick=(1,))
def test_gradients_of_micro_batches_are_added_up_unreduced(two: Ranks, own: bool) -> None:
    assert follows(two, 2, FREEZE + 6, micro_batches=2, own=own) <= 1e-6


@pytest.mark.gloo
@pytest.mark.slow
def test_each_rank_clips_its_own_gradient_by_its_own_norm(two: Ranks) -> None:
    assert follows(two, 2, FREEZE + 6, dtype=torch.float64, clip=0.05) <= 1e-6


@pytest.mark.gloo
@pytest.mark.inductor
@pytest.mark.slow
@pytest.mark.parametrize("lamb", [False, True])
def test_inductor_sends_signs_too(two: Ranks, lamb: bool) -> None:
    assert follows(two, 2, FREEZE + 6, backend="inductor", lamb=lamb) <= 1e-5


def sent_by_step() -> tuple[list, list, int]:
    model = zgraph.compile(Net(), plan())
    runtime = model.zgraph.runtime
    programs = []
    for step in range(FREEZE + 3):
        model.zgraph.train_step(batch(step, dist.get_rank()))
        if step in (FREEZE - 1, FREEZE):
            update = runtime.updater.programs.histories()
            backward = runtime.entries[next(iter(runtime.entries))].program().backward(step < FREEZE, False).program
            programs.append(transfers(backward) + transfers(list(update.values())[-1].program))
    return (*programs, len(runtime.updater.programs.histories()))


@pytest.mark.gloo
def test_bytes_after_the_freeze_are_the_formulas_and_two_programs_are_made(two: Ranks) -> None:
    sizes = [p.numel() for p in Net().parameters()]
    for warm, frozen, programs in two.run(sent_by_step):
        assert {kind for kind, _ in warm} == {"all_reduce"} and sum(b for _, b in warm) == 4 * sum(sizes)
        each = sum(bytes_of(n, 2) for n in sizes)
        assert frozen == [("all_to_all", 2 * each), ("all_gather", each)]
        assert programs == 2


def restarted(folder: Path, lamb: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights of a run, and of one that was saved once it was frozen and loaded into a new model."""
    first, second = (zgraph.compile(Net(), plan(lamb=lamb)) for _ in range(2))
    for step in range(FREEZE + 6):
        if step == FREEZE + 3:
            first.save_checkpoint(folder)
        first.zgraph.train_step(batch(step, dist.get_rank()))
    second.load_checkpoint(folder)
    for step in range(FREEZE + 3, FREEZE + 6):
        second.zgraph.train_step(batch(step, dist.get_rank()))
    return weights(first), weights(second)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("lamb", [False, True])
def test_a_restart_in_the_middle_is_bit_for_bit(
    two: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture, lamb: bool
) -> None:
    for one, other in two.run(restarted, tmp_path, lamb):
        assert all(torch.equal(one[n], other[n]) for n in one)
    alone = zgraph.compile(Net(), plan(lamb=lamb, mesh={"dp": 1}))
    with caplog.at_level(logging.WARNING, "zgraph"):
        alone.load_checkpoint(tmp_path)
    assert "begin at zero" in caplog.text and "momenta is of the ranks of mesh {'dp': 2}" in caplog.text


def with_a_loss_that_is_no_number(lost: int | None) -> dict[str, torch.Tensor]:
    """The weights after steps of which one has, on one rank, a loss that is no number; or is left out."""
    model = zgraph.compile(Net(), plan(on_nonfinite="skip"))
    for step in range(FREEZE + 4):
        if step == FREEZE + 2 and lost is None:
            continue
        factor = math.nan if step == FREEZE + 2 and lost == dist.get_rank() else 1.0
        (model(batch(step, dist.get_rank())) * factor).backward()
        model.step()
    return weights(model)


@pytest.mark.gloo
@pytest.mark.slow
def test_a_step_that_is_not_finite_changes_nothing_of_what_is_kept(two: Ranks) -> None:
    lost, left_out = (two.run(with_a_loss_that_is_no_number, at)[0] for at in (1, None))
    assert all(torch.equal(lost[n], left_out[n]) for n in lost)


def test_one_rank_sends_nothing_and_freezes_all_the_same() -> None:
    model, reference = zgraph.compile(Net(), plan(mesh={"dp": 1})), Reference(1)
    reference.shared = dict.fromkeys(reference.m, Whole())
    for step in range(FREEZE + 4):
        model.zgraph.train_step(batch(step, 0))
        expected = reference.step([[batch(step, 0)]])
    found = weights(model)
    assert all((found[n] - v).abs().max() <= 1e-6 for n, v in expected.items())
