"""The scripts in examples/deepspeed give DeepSpeed's own numbers: by both systems, on two ranks, with one import changed."""

import copy
import json

import deepspeed_scripts
import pytest
import torch
from deepspeed_scripts import EXAMPLES
from sweeps import sweep

WITHOUT_ARGUMENTS = sorted({p.stem for p in EXAMPLES.glob("*.py")} - {"checkpoint_by_tag", "training_data"})


def hold(mine, theirs):
    """Both ranks' numbers, within 1e-5."""
    for rank in range(2):
        assert mine[rank] == pytest.approx(theirs[rank], abs=1e-5, rel=1e-5)
        assert len(mine[rank]) > 2 and len(set(mine[rank])) > 1


@sweep("name", WITHOUT_ARGUMENTS, quick=1)
def test_a_script_gives_deepspeeds_numbers(two, deepspeeds, name):
    hold(two.run(deepspeed_scripts.run, name, "zgraph"), deepspeeds.run(deepspeed_scripts.run, name, "deepspeed"))


def arguments_in_bf16(name):
    """(What "communication" measures: sizes, repetitions, dtype.)"""
    return ((1024, 65536), 3, torch.bfloat16) if name == "communication" else ()


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT_ARGUMENTS)
def test_a_script_in_bf16_gives_deepspeeds_numbers_with_torchs_linear_layers(two, deepspeeds, name):
    run, args = deepspeed_scripts.run_in_bf16_with_torchs_linear, arguments_in_bf16(name)
    hold(two.run(run, name, "zgraph", *args), deepspeeds.run(run, name, "deepspeed", *args))


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT_ARGUMENTS)
def test_a_script_in_bf16_gives_deepspeeds_numbers(two, deepspeeds, name):
    run, args = deepspeed_scripts.run_in_bf16, arguments_in_bf16(name)
    hold_in_bf16(two.run(run, name, "zgraph", *args), deepspeeds.run(run, name, "deepspeed", *args))


def hold_in_bf16(mine, theirs):
    for rank in range(2):
        assert mine[rank] == pytest.approx(theirs[rank], abs=5e-3)
        assert len(mine[rank]) > 2 and len(set(mine[rank])) > 1


GRADIENTS = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 8,
    "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": True},
}


def summed_gradients(system, stage, sums_in=None):
    """How far an engine's gradients of 8 micro-batches are from the sums, in double precision, of those that it adds up: a norm."""
    module, change = deepspeed_scripts.system_of(system)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    plain = copy.deepcopy(model).bfloat16()
    config = change(GRADIENTS | {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}})
    if sums_in is not None:
        config["data_types"] = {"grad_accum_dtype": sums_in}
    engine, *_ = module.initialize(model=model, config=config)
    data, rank = torch.Generator().manual_seed(1), torch.distributed.get_rank()
    sums = [torch.zeros(p.shape, dtype=torch.float64) for p in plain.parameters()]
    for part in range(8):
        x = torch.randn(2, 2, 16, generator=data).bfloat16()  # (of both ranks)
        means = []
        for rows in x:
            (plain(rows).float().square().mean() / 8).backward()
            means.append([p.grad for p in plain.parameters()])
            plain.zero_grad()
        for total, *both in zip(sums, *means, strict=True):
            total += ((both[0] + both[1]) / 2).double()  # (reduced in bf16, as the configuration says)
        engine.backward(engine(x[rank]).float().square().mean())
        if part < 7:
            engine.step()
    grads = [module.utils.safe_get_full_grad(p).double() for p in engine.module.parameters()]
    return float(torch.stack([(g - s).norm() for g, s in zip(grads, sums, strict=True)]).norm())


@pytest.mark.slow
def test_gradients_of_micro_batches_add_up_as_deepspeeds_and_nearer_to_their_sum_where_fp32_is_asked_for(
    two, deepspeeds
):
    """Stage 2 reduces each micro-batch's, so that only how they are added up differs."""
    mine, theirs = (two.run(summed_gradients, "zgraph", 2)[0], deepspeeds.run(summed_gradients, "deepspeed", 2)[0])
    assert mine == pytest.approx(theirs, rel=1e-4)
    assert 10 * two.run(summed_gradients, "zgraph", 2, "fp32")[0] < theirs


@pytest.mark.slow
def test_a_linear_layer_rounds_once_where_deepspeeds_of_stage_3_rounds_twice(deepspeeds):
    once, twice = deepspeeds.run(linear_layers)[0]
    assert 1.05 * once < twice


def linear_layers():
    """How far a linear layer of three dimensions in bf16 is from double precision: torch's, which a compiled program calls, and DeepSpeed's."""
    deepspeed_scripts.ready()
    from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3

    data = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*sizes, generator=data).bfloat16() for sizes in ((4, 64, 32), (48, 32), (48,)))
    exact = x.double() @ weight.double().t() + bias.double()
    plain = torch.addmm(bias, x.flatten(0, 1), weight.t()).view(4, 64, 48)
    results = (plain, LinearFunctionForZeroStage3.apply(x, weight, bias))
    return [float((result.double() - exact).norm()) for result in results]


def test_a_checkpoint_by_tag_goes_on_as_deepspeeds(two, deepspeeds, tmp_path):
    mine = two.run(deepspeed_scripts.run, "checkpoint_by_tag", "zgraph", str(tmp_path / "mine"))
    hold(mine, deepspeeds.run(deepspeed_scripts.run, "checkpoint_by_tag", "deepspeed", str(tmp_path / "theirs")))
    assert mine[0][3:6] == mine[0][6:9]


@pytest.mark.slow
def test_a_checkpoint_by_tag_in_bf16_goes_on_as_deepspeeds(two, deepspeeds, tmp_path):
    name, run = "checkpoint_by_tag", deepspeed_scripts.run_in_bf16
    mine = two.run(run, name, "zgraph", str(tmp_path / "mine"))
    theirs = deepspeeds.run(run, name, "deepspeed", str(tmp_path / "theirs"))
    hold_in_bf16(mine, theirs)
    assert mine[0][3:6] == mine[0][6:9]


def arguments_of_a_file(tmp_path):
    """Arguments that name a file of the script's configuration."""
    path = tmp_path / "ds.json"
    namespace = {}
    exec((EXAMPLES / "training_data.py").read_text().partition("class Squares")[0], namespace)
    path.write_text(json.dumps(namespace["CONFIG"]))
    return ["--deepspeed", "--deepspeed_config", str(path)]


@pytest.mark.slow
def test_training_data_gives_each_rank_deepspeeds_rows(two, deepspeeds, tmp_path):
    arguments = arguments_of_a_file(tmp_path)
    mine = two.run(deepspeed_scripts.run, "training_data", "zgraph", arguments)
    hold(mine, deepspeeds.run(deepspeed_scripts.run, "training_data", "deepspeed", arguments))
    assert mine[0] != mine[1]


@pytest.mark.slow
def test_training_data_in_bf16_gives_each_rank_deepspeeds_rows(two, deepspeeds, tmp_path):
    arguments, run = arguments_of_a_file(tmp_path), deepspeed_scripts.run_in_bf16
    mine = two.run(run, "training_data", "zgraph", arguments)
    theirs = deepspeeds.run(run, "training_data", "deepspeed", arguments)
    hold_in_bf16(mine, theirs)
