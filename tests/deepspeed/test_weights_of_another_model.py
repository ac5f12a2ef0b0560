"""`load_checkpoint` of another model's weights: by name where both have them (`load_module_strict=False`), or by a function of the script's own."""

import itertools
import logging

import deepspeed_scripts
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import zgraph.deepspeed as deepspeed
from zgraph.errors import CheckpointError, UnsupportedError

pytestmark = pytest.mark.usefixtures("no_group_left")


def config(stage, precision="fp32"):
    section = {} if precision == "fp32" else {precision: {"enabled": True}}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **section,
    }


def net(seed, *widths):
    """Linear layers "0", "1", … of these widths."""
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))


def trained(engine, steps):
    """Losses of steps of two micro-batches."""
    data = torch.Generator().manual_seed(3 + engine.global_rank)
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    losses = []
    for _ in range(2 * steps):
        x = torch.randn(2, 8, generator=data)
        loss = nn.functional.mse_loss(engine(x.to(dtype)).float(), x[:, :4].sin())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def weights(model):
    """Whole parameters by name."""
    values = {name: param.detach() for name, param in model.named_parameters()}
    return {n: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for n, v in values.items()}


def what_fits(src, dst):
    """Copy what fits of each saved weight."""
    with torch.no_grad():
        for name, param in dst.named_parameters():
            if name in src:
                part = tuple(slice(min(sizes)) for sizes in zip(param.shape, src[name].shape, strict=True))
                param[part] = src[name][part].to(param.dtype)


def loaded_from_another(system, folder, stage, precision, how):
    """Losses after loading a checkpoint of another model, and what was loaded."""
    module, change = deepspeed_scripts.system_of(system)
    engine, *_ = module.initialize(
        model=(one := net(1, 8, 16, 4)), model_parameters=one.parameters(), config=change(config(stage, precision))
    )
    trained(engine, 2)
    engine.save_checkpoint(folder, tag="a", client_state={"epoch": 4})
    engine.destroy()
    widths = (8, 16, 4) if how == "function" else (8, 16, 6, 4)
    other = net(2, *(8, 20, 4)) if how == "rows" else net(2, *widths)
    if how == "names":
        other[1] = nn.Sequential(net(5, 16, 6))  # (whose names are "1.0.0", which the checkpoint has not: it has "1")
    engine, *_ = module.initialize(
        model=other, model_parameters=other.parameters(), config=change(config(stage, precision))
    )
    options = {"load_module_strict": False} if how == "names" else {"custom_load_fn": what_fits}
    # (DeepSpeed's optimizer without ZeRO goes on from the master weights of before, unless the module alone is loaded)
    alone = {"load_module_only": True} if (stage, precision) == (0, "bf16") else {"load_optimizer_states": False}
    _, client = engine.load_checkpoint(folder, tag="a", **alone, **options)
    return [client["epoch"], engine.global_steps, *trained(engine, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["names", "function", "rows"])
@pytest.mark.parametrize("stage, precision", [(0, "fp32"), (2, "fp32"), (1, "bf16"), (0, "bf16")])
def test_another_models_weights_are_loaded_as_deepspeed_loads_them(two, deepspeeds, tmp_path, stage, precision, how):
    args = (stage, precision, how)
    mine = two.run(loaded_from_another, "zgraph", str(tmp_path / "mine"), *args)
    theirs = deepspeeds.run(loaded_from_another, "deepspeed", str(tmp_path / "theirs"), *args)
    for rank in range(2):
        assert mine[rank] == pytest.approx(theirs[rank], abs=1e-5 if precision == "fp32" else 5e-3)


def initialized(model, stage=1, precision="fp32"):
    return deepspeed.initialize(model=model, config={**config(stage, precision), "zgraph": {"backend": "eager"}})[0]


@pytest.mark.parametrize("stage", [0, 3])
def test_names_that_only_one_has_are_told_and_those_of_the_model_stay(tmp_path, caplog, stage):
    engine = initialized(net(1, 8, 16, 4), stage)
    trained(engine, 2)
    engine.save_checkpoint(tmp_path, tag="a")
    saved = weights(engine.module)
    other = initialized(nn.Sequential(net(2, 8, 16)[0], net(3, 16, 4)), stage)
    trained(other, 1)  # (it has states of its own)
    before = weights(other.module)
    with pytest.raises(CheckpointError, match="another model") as caught:
        other.load_checkpoint(tmp_path, tag="a")
    assert "load_module_strict=False" in str(caught.value)
    assert all(torch.equal(v, before[n]) for n, v in weights(other.module).items())
    with caplog.at_level(logging.WARNING):
        other.load_checkpoint(tmp_path, tag="a", load_module_strict=False)
    now = weights(other.module)
    assert torch.equal(now["0.weight"], saved["0.weight"]) and torch.equal(now["1.0.weight"], before["1.0.weight"])
    assert "which stay as they are: 1.0.weight, 1.0.bias" in caplog.text
    assert "which are left out: 1.bias, 1.weight" in caplog.text
    states = other.optimizer.state
    for name, param in other.module.named_parameters():
        assert float(states[param]["step"]) == (2 if name.startswith("0.") else 0), name
    trained(other, 1)
    with pytest.raises(CheckpointError, match=r"0\.weight is"):  # (a name with another shape is nobody's to guess)
        initialized(net(2, 8, 20, 4), stage).load_checkpoint(tmp_path, tag="a", load_module_strict=False)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_function_that_copies_goes_on_as_the_run_that_was_saved(tmp_path, stage):
    """With the optimizer's states, its counts and the counters."""
    engine = initialized(net(1, 8, 16, 4), stage)
    trained(engine, 2)
    engine.save_checkpoint(tmp_path)
    wanted = trained(engine, 2)
    calls = []

    def load(src, dst):
        calls.append(sorted(src))
        what_fits(src, dst)

    other = initialized(net(2, 8, 16, 4), stage)
    other.load_checkpoint(tmp_path, custom_load_fn=load)
    assert calls == [["0.bias", "0.weight", "1.bias", "1.weight"]] and other.global_steps == 2
    assert trained(other, 2) == wanted


def test_states_of_another_shape_begin_anew_and_are_told(tmp_path, caplog):
    engine = initialized(net(1, 8, 16, 4))
    trained(engine, 2)
    engine.save_checkpoint(tmp_path)
    other = initialized(net(2, 8, 20, 4))
    with caplog.at_level(logging.WARNING):
        other.load_checkpoint(tmp_path, custom_load_fn=what_fits)
    assert "states of 0.weight have another shape in the checkpoint: they begin anew" in caplog.text
    counts = {n: float(other.optimizer.state[p]["step"]) for n, p in other.module.named_parameters()}
    assert counts == {"0.weight": 0, "0.bias": 0, "1.weight": 0, "1.bias": 2}
    trained(other, 1)


def test_a_function_that_fails_leaves_all_as_it_was(tmp_path):
    engine = initialized(net(1, 8, 16, 4))
    trained(engine, 1)
    engine.save_checkpoint(tmp_path)
    before, steps = weights(engine.module), engine.global_steps

    def load(src, dst):
        what_fits({name: value + 1 for name, value in src.items()}, dst)
        raise KeyError("head.weight")

    with pytest.raises(KeyError, match=r"head\.weight"):
        engine.load_checkpoint(tmp_path, custom_load_fn=load)
    assert engine.global_steps == steps and all(torch.equal(v, before[n]) for n, v in weights(engine.module).items())


def through_a_pipeline(folder, precision):
    """Losses of a pipeline that a function loads before its first step, and the refusal after it."""
    dist.barrier()
    layers = [deepspeed.pipe.LayerSpec(nn.Linear, 8, 8) for _ in range(3)]
    losses = []
    for load in (None, what_fits):
        torch.manual_seed(0 if load is None else 1)
        model = deepspeed.pipe.PipelineModule(layers=layers, num_stages=2, loss_fn=nn.functional.mse_loss)
        section = {**config(1, precision), "zgraph": {"backend": "eager"}}
        engine, *_ = deepspeed.initialize(model=model, config=section)
        data = ((x, x.sin()) for x in torch.randn(16, 2, 8, generator=torch.Generator().manual_seed(1)))
        if load is None:
            engine.train_batch(data)
            engine.save_checkpoint(folder)
        else:
            next(data), next(data)
            engine.load_checkpoint(folder, custom_load_fn=load)
        losses.append([float(engine.train_batch(data)) for _ in range(2)])
    try:
        engine.load_checkpoint(folder, custom_load_fn=what_fits)
    except UnsupportedError as error:
        return *losses, str(error)
    return losses


@pytest.mark.slow
def test_a_function_loads_a_pipeline_before_its_first_step(two, tmp_path):
    for first, second, said in two.run(through_a_pipeline, str(tmp_path), "fp32"):
        assert first == second and "load before the first step" in said
