"""On real ranks over gloo, a whole training step is that of one process on the whole batch.

Functions at the top of this file run on the ranks; each returns what the test compares.
"""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sweeps import sweep
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

import zgraph

pytestmark = pytest.mark.gloo
WORDS = 31
STEPS = 100


class Net(nn.Module):
    """Rows that neither two nor four ranks divide; parameters that some ranks have no row of."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 10)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(10), nn.Linear(10, 13), nn.GELU()) for _ in range(1))
        self.head = nn.Linear(13, WORDS)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, words, targets):
        hidden = self.embed(words)
        for layer in self.layers:
            hidden = layer(hidden)
        return cross_entropy(self.head(hidden * self.gain).flatten(0, 1), targets.flatten())


def built() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def batches(count: int, rows: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randint(WORDS, (rows, 3), generator=generator), torch.randint(WORDS, (rows, 3), generator=generator)


def mine(values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """This rank's rows of a batch."""
    return tuple(v.chunk(dist.get_world_size())[dist.get_rank()] for v in values)


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.detach().full_tensor() if isinstance(value, DTensor) else value.detach()).clone()


def furthest(model: nn.Module, other: nn.Module) -> float:
    pairs = zip(model.named_parameters(), other.named_parameters(), strict=True)
    return max(float((whole(a) - b.detach()).norm() / b.detach().norm().clamp(min=1e-12)) for (_, a), (_, b) in pairs)


TORCHS = {
    "AdamW": (zgraph.AdamW(lr=1e-2), lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False)),
    "Adam": (zgraph.Adam(lr=1e-2, amsgrad=True), lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, foreach=False)),
    "SGD": (
        zgraph.SGD(lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=False),
    ),
    "Adagrad": (zgraph.Adagrad(lr=1e-2), lambda p: torch.optim.Adagrad(p, lr=1e-2, foreach=False)),
}


def hundred_steps(name: str, zero: int, backend: str = "eager", steps: int = STEPS) -> tuple[float, float]:
    """(how far the weights are from torch's on the whole batch, the same of the last norm)."""
    record, make = TORCHS[name]
    plan = zgraph.Plan(backend=backend, zero=zero, optimizer=record, grad_clip=0.3, micro_batches=2)
    model, plain = zgraph.compile(built(), plan), built()
    optimizer = make(plain.parameters())
    norm = norm_of_torch = torch.zeros(())
    for values in batches(steps, 8):
        model.train_step(*mine(values))
        plain(*values).backward()
        norm_of_torch = clip_grad_norm_(plain.parameters(), 0.3, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
        norm = model.zgraph.runtime.updater.grad_norm
    return furthest(model, plain), float(abs(norm - norm_of_torch) / norm_of_torch)


def others(name: str, arguments: dict[str, Any], stages: Sequence[int], steps: int = 20) -> list[float]:
    """How far each stage's weights are from those of the first, 0, where nothing is sharded."""
    first: list[torch.Tensor] = []
    found = []
    for zero in stages:
        plan = zgraph.Plan(backend="eager", zero=zero, optimizer=getattr(zgraph, name)(**arguments), ema=0.9)
        model = zgraph.compile(built(), plan)
        for values in batches(steps, 8):
            model.train_step(*mine(values))
        with model.zgraph.averaged_weights():
            ends = [whole(p) for p in model.parameters()]
        first = first or ends
        found.append(max(float((a - b).norm() / b.norm()) for a, b in zip(ends, first, strict=True)))
    return found


def by_token(zero: int) -> float:
    """Uneven micro-batches and ranks with other numbers of targets, against the mean over all tokens at once."""
    plan = zgraph.Plan(
        backend="eager", zero=zero, optimizer=zgraph.SGD(lr=0.5), micro_batches=2, loss_average="token", grad_clip=10.0
    )
    model, plain = zgraph.compile(built(), plan), built()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for words, targets in batches(5, 10):
        targets[0] = targets[3, 1:] = targets[7, 0] = -100
        model.train_step(*mine((words, targets)))
        plain(words, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return furthest(model, plain)


def a_rank_without_targets() -> tuple[bool, float]:
    plan = zgraph.Plan(backend="eager", optimizer=zgraph.SGD(lr=0.5), micro_batches=2, loss_average="token")
    model, plain = zgraph.compile(built(), plan), built()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for words, targets in batches(3, 8):
        targets[4:] = -100  # the second rank's
        model.train_step(*mine((words, targets)))
        plain(words, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return True, furthest(model, plain)


def refused_then_compiled() -> bool:
    """A plan that does not fit leaves the model as it was, to be compiled by another."""
    model = built()
    wrong = zgraph.AdamW(groups=(zgraph.ParamGroup(match="nope", lr=0.1),))
    with contextlib.suppress(zgraph.errors.PlanError):
        zgraph.compile(model, zgraph.Plan(backend="eager", optimizer=wrong))
    plain = not any(isinstance(p, DTensor) for p in model.parameters())
    (values,) = batches(1, 4)
    zgraph.compile(model, zgraph.Plan(backend="eager", optimizer=zgraph.AdamW())).train_step(*mine(values))
    return plain


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 5)

    def forward(self, x, factor):
        return (self.inner(x).float() * factor).mean()


def overflow_on_one_rank(zero: int) -> list[Any]:
    torch.manual_seed(0)
    scale = zgraph.LossScale(initial_scale_power=4, hysteresis=1)
    half = zgraph.Precision(parameter="float32", compute="float16", reduce="float32", loss_scale=scale)
    plan = zgraph.Plan(backend="eager", zero=zero, optimizer=zgraph.AdamW(lr=0.1), precision=half)
    model = zgraph.compile(Scaled(), plan)
    seen: list[Any] = []
    for step in range(4):
        bad = step == 1 and dist.get_rank() == dist.get_world_size() - 1
        model.train_step(torch.ones(2, 6), torch.tensor(math.inf if bad else 1.0))
        seen.append(
            (float(model.zgraph.loss_scale), int(model.zgraph.skipped_steps), whole(model.inner.weight).tolist())
        )
    return seen


def rank_without_backward() -> str:
    model = zgraph.compile(built(), zgraph.Plan(backend="eager", optimizer=zgraph.AdamW()))
    (values,) = batches(1, 4)
    model(*mine(values)).backward()
    if dist.get_rank() == 1:
        model.layers[0][1].weight.grad = None  # this rank's update is another program
    try:
        model.step()
    except zgraph.errors.RankMismatchError as error:
        return str(error)
    return "no error"


def schedulers_of_torch() -> float:
    """The user's own optimizer and scheduler on the gradients that train_step leaves."""
    model, plain = zgraph.compile(built(), zgraph.Plan(backend="eager", micro_batches=2, grad_clip=0.3)), built()
    pairs = []
    for m in (model, plain):
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
        pairs.append((optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20)))
    for values in batches(20, 8):
        model.train_step(*mine(values))
        plain(*values).backward()
        clip_grad_norm_(plain.parameters(), 0.3)
        for optimizer, scheduler in pairs:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return furthest(model, plain)


def resumed(name: str, arguments: dict[str, Any], zero: int, folder: str) -> float:
    """A run that is saved by torch.distributed.checkpoint and loaded into another stage, against one without a break."""
    plans = [
        zgraph.Plan(backend="eager", zero=z, optimizer=getattr(zgraph, name)(**arguments), ema=0.9) for z in (3, zero)
    ]
    straight, other = (zgraph.compile(built(), plan) for plan in plans)
    for values in batches(3, 8):
        straight.train_step(*mine(values))
    dcp.save(dict(zip("mo", get_state_dict(straight, straight.zgraph.optimizer), strict=True)), checkpoint_id=folder)
    loaded = dict(zip("mo", get_state_dict(other, other.zgraph.optimizer), strict=True))
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(other, other.zgraph.optimizer, model_state_dict=loaded["m"], optim_state_dict=loaded["o"])
    for values in batches(3, 8):
        straight.train_step(*mine(values))
        other.train_step(*mine(values))
    pairs = list(zip(straight.parameters(), other.parameters(), strict=True))
    return max(float((whole(a) - whole(b)).norm() / whole(b).norm()) for a, b in pairs)


class Cast(nn.Module):
    """FSDP2 casts inputs; its loss is in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(10, 13), nn.LayerNorm(13), nn.Linear(13, 6)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x)))).float().square().mean()


def fsdp2_in_bfloat16() -> list[str]:
    """What differs from `fully_shard` with a policy of bfloat16, over five steps."""
    torch.manual_seed(0)
    plain = Cast()
    mine = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(backend="eager", precision="bf16", numerics="fsdp2"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    fully_shard(plain, mp_policy=policy)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (mine, plain)]
    generator = torch.Generator().manual_seed(dist.get_rank())
    wrong = []
    for step in range(5):
        x = torch.randn(4, 10, generator=generator)
        losses = [m(x) for m in (mine, plain)]
        for loss in losses:
            loss.backward()
        wrong += [f"loss {step}"] if not torch.equal(*losses) else []
        for (name, a), b in zip(mine.named_parameters(), plain.parameters(), strict=True):
            wrong += [f"gradient {name} {step}"] if not torch.equal(whole(a.grad), whole(b.grad)) else []
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, a), b in zip(mine.named_parameters(), plain.parameters(), strict=True):
            wrong += [f"weight {name} {step}"] if not torch.equal(whole(a), whole(b)) else []
    return wrong


def timed() -> tuple[str, list[dict[str, float]]]:
    model = zgraph.compile(built(), zgraph.Plan(backend="eager", zero=3, optimizer=zgraph.AdamW(), grad_clip=1.0))
    for values in batches(4, 8):
        model.train_step(*mine(values))
    model.zgraph.timings()  # the next step is looked at more closely
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for values in batches(2, 8):
            model.train_step(*mine(values))
    timings = model.zgraph.timings(tokens=12)
    return str(timings), list(timings.ranks)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", list(TORCHS))
@pytest.mark.slow
def test_a_hundred_clipped_accumulated_steps_are_torchs(two, name, zero):
    for far, norm in two.run(hundred_steps, name, zero):
        assert far < 1e-5 and norm < 1e-5  # a hundred steps of float32 (6e-8) whose sums are in another order


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
def test_a_hundred_steps_on_four_ranks_are_torchs(four, zero):
    for far, norm in four.run(hundred_steps, "AdamW", zero):
        assert far < 1e-5 and norm < 1e-5


@pytest.mark.slow  # eagerly below; with Inductor on one rank in test_train_step.py, and on two in test_gloo.py
@pytest.mark.inductor
def test_a_hundred_steps_with_inductor_are_torchs(two):
    for far, norm in two.run(hundred_steps, "AdamW", 2, "inductor"):
        assert far < 1e-4 and norm < 1e-4  # kernels fuse and contract products: each gradient rounds in another way


@pytest.mark.parametrize(
    "name, arguments, tolerance, stages",
    [
        ("Lion", {"lr": 1e-3}, 0.0, (0, 1, 2, 3)),
        ("LAMB", {"lr": 1e-2, "weight_decay": 0.1}, 1e-6, (0, 1, 2, 3)),  # norms are summed over ranks
        ("Muon", {"lr": 1e-2}, 0.0, (0, 1, 2, 3)),
        ("AdamW8bit", {"lr": 1e-2, "min_row_size": 8, "block_size": 4}, 0.0, (0, 1, 2, 3)),
        ("AdamW8bit", {"lr": 1e-2, "min_row_size": 8, "block_size": 4}, 0.0, (0, 3)),
    ],
)
@pytest.mark.slow
def test_stages_do_not_change_an_update(two, name, arguments, tolerance, stages):
    for far in two.run(others, name, arguments, stages):
        assert max(far) <= tolerance, far


@sweep("zero", [0, 1, 3], quick=1)
def test_by_token_uneven_ranks_and_micro_batches_are_one_batch(two, zero):
    assert max(two.run(by_token, zero)) < 1e-6  # a sum in another order


def test_a_rank_without_targets_takes_part(two):
    assert all(done and far < 1e-6 for done, far in two.run(a_rank_without_targets))  # a sum in another order


def test_a_model_that_was_refused_can_be_compiled(two):
    assert two.run(refused_then_compiled) == [True, True]


@sweep("zero", [0, 2, 3], quick=1)
def test_an_overflow_of_one_rank_skips_the_step_on_all(two, zero):
    one, other = two.run(overflow_on_one_rank, zero)
    assert one == other
    assert [s for s, _, _ in one] == [16.0, 8.0, 8.0, 8.0] and [k for _, k, _ in one] == [0, 1, 1, 1]
    assert one[0][2] == one[1][2] != one[2][2]


def test_ranks_that_would_update_other_parameters_are_told(two):
    for said in two.run(rank_without_backward):
        assert "layers.0.1.weight" in said, said


@pytest.mark.slow
def test_the_users_own_optimizer_and_scheduler_work_on_clipped_gradients(two):
    assert max(two.run(schedulers_of_torch)) < 1e-5


def test_fsdp2s_numerics_are_fully_shards_bit_for_bit(two):
    assert two.run(fsdp2_in_bfloat16) == [[], []]


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize(
    "name, arguments",
    [("AdamW", {"lr": 1e-2}), ("AdamW8bit", {"lr": 1e-2, "min_row_size": 8, "block_size": 4})],
)
@pytest.mark.slow
def test_a_checkpoint_goes_on_in_another_stage(two, tmp_path, name, arguments, zero):
    assert two.run(resumed, name, arguments, zero, str(tmp_path)) == [0.0, 0.0]


def test_timings_have_every_ranks_phases_and_what_was_waited_for(two):
    for text, ranks in two.run(timed):
        assert len(ranks) == 2
        for rank in ranks:
            assert 0 < rank["gather"] + rank["reduce"] < rank["step"] * 3
        assert "exposed gather" in text and "tokens/s" in text
