"""What scripts ask of parameters that are shards, and take for whole ones: a term of the loss, a value to set; and steps without a
gradient, or with one that is no number. It is right, or refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zgraph.deepspeed as deepspeed
from zgraph.deepspeed import utils
from zgraph.errors import ModelError, PlanError, StepError, UnsupportedError


def engine_of(stage, **others):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zgraph": {"backend": "eager"},
        **others,
    }
    return deepspeed.initialize(model=model, config=config)[0]


def loss_of(engine):
    return engine(torch.ones(2, 6) * (1 + dist.get_rank())).square().mean()


def refused(call, error):
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def penalties():
    engine = engine_of(2)
    terms = sum(p.square().sum() for p in engine.module.parameters())
    assert "full_tensor" in refused(lambda: engine.backward(loss_of(engine) + terms), UnsupportedError)
    assert "full_tensor" in refused(lambda: engine.backward(terms), StepError)
    loss = engine.module(torch.ones(2, 6)).sum()
    assert "full_tensor" in refused(lambda: (loss + terms).backward(), UnsupportedError)
    engine.zero_grad()
    before = [p.full_tensor().clone() for p in engine.module.parameters()]
    engine.backward(loss_of(engine))
    plain = [p.grad.full_tensor().clone() for p in engine.module.parameters()]
    engine.zero_grad()
    engine.backward(loss_of(engine) + 0.5 * sum(p.full_tensor().square().sum() for p in engine.module.parameters()))
    for param, grad, value in zip(engine.module.parameters(), plain, before, strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), grad + value)


def test_a_penalty_is_of_whole_parameters(two):
    two.run(penalties)


def setters():
    engine = engine_of(2)
    weight = engine.module[0].weight
    before = utils.safe_get_full_fp32_param(weight)
    engine.backward(loss_of(engine))
    said = refused(lambda: utils.safe_set_full_fp32_param(weight, torch.ones(3)), ModelError)
    assert "shape [3] was given for a parameter of shape [8, 6]" in said
    assert "the gradient of" in refused(lambda: utils.safe_set_full_grad(weight, torch.ones(6, 8)), ModelError)
    said = refused(lambda: utils.safe_set_local_fp32_param(weight, torch.ones(5)), ModelError)
    assert "for the rows [4, 6] of this rank" in said
    assert torch.equal(utils.safe_get_full_fp32_param(weight), before)


def test_values_of_another_shape_are_refused(two):
    two.run(setters)


def conversions(stage):
    engine = engine_of(stage)
    engine.backward(loss_of(engine))
    engine.step()
    before = [p.full_tensor().clone() for p in engine.module.parameters()]
    assert engine.to("cpu") is engine and engine.float() is engine and engine.to(torch.float32) is engine
    said = refused(engine.half, UnsupportedError)
    assert "0.weight is torch.float32 on cpu, and would be torch.float16 on cpu" in said and "fp16 in the conf" in said
    assert "in shared memory" in refused(engine.share_memory, UnsupportedError)
    assert all(torch.equal(a, b.full_tensor()) for a, b in zip(before, engine.module.parameters(), strict=True))
    engine.backward(loss_of(engine))
    engine.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_stays_as_it_is_when_it_is_moved_or_cast(two, stage):
    """A script says `engine.to(device)` in places; what it is on already is no change, and the rest is refused."""
    two.run(conversions, stage)


def under_autocast(stage, by_hand):
    section = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    engine = engine_of(stage, **({} if by_hand else section))
    losses = []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=by_hand):
            output = engine(torch.ones(2, 6) * (1 + dist.get_rank()))
        assert output.dtype == torch.bfloat16 and next(engine.module.parameters()).dtype == torch.float32
        loss = output.float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if not by_hand:
        rows = {row.key: row.verdict for row in engine.report.rows}
        assert rows["torch_autocast.enabled"] == rows["torch_autocast.dtype"] == "applied"
        said = refused(lambda: engine_of(stage, torch_autocast={"enabled": True, "dtype": "float16"}), PlanError)
        assert "torch_autocast.enabled" in said
    return losses


@pytest.mark.parametrize("stage", [0, 3])
def test_autocast_of_the_configuration_is_that_of_a_script(two, stage):
    assert two.run(under_autocast, stage, False) == two.run(under_autocast, stage, True)


def unused_weights(stage):
    """The weights of two heads after steps that use one, with weight decay and momentum."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(6, 4), nn.Linear(6, 4)

        def forward(self, x, which):
            return (self.other if which else self.one)(x)

    optimizer = {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.5}}
    torch.manual_seed(0)
    model = Heads()
    if stage is None:
        own = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    else:
        section = {"stage": stage, "stage3_param_persistence_threshold": 0}
        config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "optimizer": optimizer}
        config |= {"zero_optimization": section, "zgraph": {"backend": "eager"}}
        engine = deepspeed.initialize(model=model, config=config)[0]
    for which in (0, 1, 1, 0):
        x = torch.ones(2, 6)
        if stage is None:
            model(x, which).square().mean().backward()
            own.step()
            own.zero_grad()
        else:
            engine.backward(engine(x, which).square().mean())
            engine.step()
    return [(p if stage is None else p.full_tensor()).detach().tolist() for p in model.parameters()]


@pytest.mark.parametrize("stage", [0, 3])
def test_weights_that_a_step_does_not_use_are_plain_pytorchs(two, stage):
    wanted = two.run(unused_weights, None)[0]
    for found in two.run(unused_weights, stage):
        for mine, plain in zip(found, wanted, strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(plain))


def steps_of_the_optimizer_alone(stage):
    """How far `optimizer.step()` moves weights by a large gradient, of the norm that clipping leaves."""
    engine = engine_of(stage, gradient_clipping=0.25)
    before = [p.full_tensor().clone() for p in engine.module.parameters()]
    engine.backward(100 * loss_of(engine))
    norm = torch.stack([p.grad.full_tensor().norm() for p in engine.module.parameters()]).norm()
    engine.optimizer.step()
    moved = [a - b.full_tensor() for a, b in zip(before, engine.module.parameters(), strict=True)]
    found = torch.stack([m.norm() for m in moved]).norm() / 0.1
    engine.backward(100 * loss_of(engine))
    engine.step()
    return float(found), float(norm)


@pytest.mark.parametrize("stage", [0, 2])
def test_steps_that_no_engine_makes_clip_with_zero_alone(two, stage):
    """DeepSpeed's engine clips at stage 0 in fp32, and its optimizer does not."""
    for found, norm in two.run(steps_of_the_optimizer_alone, stage):
        assert norm > 1 and found == pytest.approx(0.25 if stage else norm, rel=1e-4)


def thawed(known):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    model[0].requires_grad_(False)
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    config |= {"zero_optimization": {"stage": 2}, "zgraph": {"backend": "eager"}}
    groups = model.parameters() if known else model[2].parameters()
    engine = deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]
    moved = []
    for thaws in (False, True):
        model[0].requires_grad_(thaws)
        before = model[0].weight.full_tensor().clone()
        engine.backward(loss_of(engine))
        engine.step()
        moved.append(not torch.equal(before, model[0].weight.full_tensor()))
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    before = model[0].weight.full_tensor().clone()
    engine.backward(loss_of(engine))
    engine.step()
    return [*moved, not torch.equal(before, model[0].weight.full_tensor())]


@pytest.mark.parametrize("known", [True, False])
def test_thawed_weights_train_if_they_are_in_a_group(two, known):
    assert two.run(thawed, known) == [[False, known, True]] * 2


def a_step_of_no_numbers(stage, section):
    engine = engine_of(stage, zero_optimization={"stage": stage, **section})
    before = [p.full_tensor().clone() for p in engine.module.parameters()]
    engine.backward(loss_of(engine) * (float("nan") if dist.get_rank() else 1.0))
    engine.step()
    same = all(torch.equal(a, b.full_tensor()) for a, b in zip(before, engine.module.parameters(), strict=True))
    return engine.skipped_steps, engine.was_step_applied(), same


@pytest.mark.parametrize(
    "stage, section, wanted",
    [(0, {}, (0, True, False)), (2, {}, (1, False, True)), (2, {"compute_grad_norm": False}, (0, True, False))],
)
def test_zero_leaves_out_steps_in_fp32_whose_gradients_are_no_numbers(two, stage, section, wanted):
    assert two.run(a_step_of_no_numbers, stage, section) == [wanted] * 2
