"""Calls in orders that nobody planned for: each gives what DeepSpeed gives, or plain PyTorch where DeepSpeed's stages differ, or is a clear error.

DeepSpeed's stage 2 loses all but one of several backward passes of a micro-batch where a step has several, keeps gradients that `zero_grad` threw
away, and moves weights that were frozen between steps; its stage 0 does as PyTorch.
"""

import deepspeed_scripts
import pytest
import torch
import torch.distributed as dist
from sweeps import sweep
from torch import nn

LR, CLIP = 3e-2, 0.3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.two(self.one(x).tanh())


def rows(number, rank):
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(100 * number + rank))


def loss_of(engine, number):
    return (engine(rows(number, dist.get_rank())) - 1).square().mean()


def micro_batch(engine, number):
    loss = loss_of(engine, number)
    engine.backward(loss)
    engine.step()
    return loss.item()


def steps(engine, *numbers):
    """The last loss of each whole step."""
    parts = engine.gradient_accumulation_steps()
    return [[micro_batch(engine, 10 * n + part) for part in range(parts)][-1] for n in numbers]


# -- orders, each giving numbers ----------------------------------------------------------------------------------------------
def an_evaluation_between(engine):
    found = steps(engine, 0)
    found.append(micro_batch(engine, 5))
    engine.eval()
    with torch.no_grad():
        found.append(loss_of(engine, 78).item())
    engine.train()
    found += [micro_batch(engine, 6 + part) for part in range(engine.gradient_accumulation_steps() - 1)]
    return found + steps(engine, 3)


def forwards_without_a_backward(engine):
    found = steps(engine, 0)
    found += [loss_of(engine, 77).item(), loss_of(engine, 78).item()]
    return found + steps(engine, 1, 2)


def another_number_of_micro_batches(engine):
    found = steps(engine, 0)
    engine.set_train_batch_size(engine.train_batch_size() * 2)
    found += steps(engine, 1)
    engine.set_train_batch_size(4)
    return [*found, *steps(engine, 2, 3), engine.global_steps, engine.micro_steps]


def another_number_within_a_step(engine):
    found = [micro_batch(engine, 0)]
    engine.set_train_batch_size(engine.train_batch_size() * 2)
    return [*found, *(micro_batch(engine, 1 + n) for n in range(7)), engine.global_steps]


def boundaries_by_hand(engine):
    found = []
    for number in range(6):
        engine.set_gradient_accumulation_boundary(number % 3 == 2)
        found.append(micro_batch(engine, number))
    return [*found, engine.global_steps, loss_of(engine, 9).item()]


def a_checkpoint_that_is_not_there(engine):
    return [float(engine.load_checkpoint("/nowhere")[0] is None), *steps(engine, 0, 1)]


def rates_by_hand(engine):
    found = steps(engine, 0)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.5
    return found + steps(engine, 1, 2)


def several_backwards(engine):
    found = []
    for number in range(4):
        first = loss_of(engine, number)
        engine.backward(first)
        engine.backward(loss_of(engine, 50 + number))
        engine.step()
        found.append(first.item())
    return found


def a_graph_kept_for_a_second_backward(engine):
    found = []
    for number in range(4):
        loss = loss_of(engine, number)
        engine.backward(loss, retain_graph=True)
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def backwards_in_the_other_order(engine):
    found = []
    for number in range(4):
        first, second = loss_of(engine, number), loss_of(engine, 50 + number)
        engine.backward(second)
        engine.backward(first)
        engine.step()
        found.append(first.item())
    return found


def frozen_between_steps(engine):
    found = steps(engine, 0)
    for param in engine.module.one.parameters():
        param.requires_grad_(False)
    return found + steps(engine, 1, 2)


def run(system, order, stage, parts):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": parts,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    if system == "zgraph":
        import zgraph.deepspeed as deepspeed

        config = deepspeed_scripts.eager(config)
    else:
        deepspeed, config = deepspeed_scripts.ready(), deepspeed_scripts.of_torch(config)
    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(model=Net(), config=config)
    found = order(engine)
    engine.destroy()
    return found


EQUAL = [
    an_evaluation_between,
    another_number_within_a_step,
    boundaries_by_hand,
    *(
        pytest.param(order, marks=pytest.mark.slow)
        for order in (
            forwards_without_a_backward,
            another_number_of_micro_batches,
            a_checkpoint_that_is_not_there,
            rates_by_hand,
        )
    ),
]


@sweep("order", EQUAL, quick=2)
def test_an_order_of_calls_gives_deepspeeds_numbers(two, deepspeeds, order):
    mine = two.run(run, "zgraph", order, 2, 2)
    theirs = deepspeeds.run(run, "deepspeed", order, 2, 2)
    for rank in range(2):
        assert mine[rank] == pytest.approx(theirs[rank], abs=1e-5)


AS_PLAIN = [
    several_backwards,
    frozen_between_steps,
    *(
        pytest.param(order, marks=pytest.mark.slow)
        for order in (a_graph_kept_for_a_second_backward, backwards_in_the_other_order)
    ),
]


@pytest.mark.parametrize("order", AS_PLAIN)
@pytest.mark.slow
def test_an_order_of_calls_is_the_same_at_every_stage_and_in_deepspeeds_first(two, deepspeeds, order):
    theirs = deepspeeds.run(run, "deepspeed", order, 0, 1)
    for stage in (0, 2, 3):
        mine = two.run(run, "zgraph", order, stage, 1)
        assert mine[0] == pytest.approx(theirs[0], abs=1e-5)


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.slow
def test_several_backwards_of_several_micro_batches_are_plain_pytorchs(two, stage):
    torch.manual_seed(0)
    plain = Net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, weight_decay=0.0)
    wanted = []
    for number in range(4):
        found = [(plain(rows(n, rank)) - 1).square().mean() for n in (number, 50 + number) for rank in range(2)]
        (sum(found) / 2 / 2).backward()
        wanted.append(found[0].item())
        if number % 2:
            nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    assert two.run(run, "zgraph", several_backwards, stage, 2)[0] == pytest.approx(wanted, abs=1e-5)
