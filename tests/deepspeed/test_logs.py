"""What an engine tells of its steps: monitors, the time of each phase, operations by module; estimates of memory; whole weights of a checkpoint."""

import csv
import importlib.machinery
import json
import logging
import sys
import types

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zgraph.deepspeed as deepspeed
from zgraph.deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile
from zgraph.deepspeed.runtime.config import DeepSpeedConfigError
from zgraph.deepspeed.runtime.zero.stage3 import (
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from zgraph.deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs_all_live
from zgraph.deepspeed.utils.timer import ThroughputTimer
from zgraph.deepspeed.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    convert_zero_checkpoint_to_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from zgraph.errors import CheckpointError, PlanError, StepError

pytestmark = pytest.mark.usefixtures("no_group_left")

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zgraph": {"backend": "eager"},
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def run(config, steps=2, model=None):
    """An engine after some steps, and the mean losses of these."""
    engine, *_ = deepspeed.initialize(model=net() if model is None else model, config=CONFIG | config)
    means = []
    for step in range(steps):
        losses = []
        for part in range(2):
            rows = torch.randn(2, 8, generator=torch.Generator().manual_seed(2 * step + part))
            loss = engine(rows.to(engine.module[0].weight.dtype)).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        means.append(sum(losses) / 2)
    return engine, means


def test_csv_files_have_a_row_for_each_step(tmp_path):
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    engine, means = run({"csv_monitor": section, "fp16": {"enabled": True, "initial_scale_power": 4}})
    engine.monitor.write_events([("Own/number", 3.5, 7)])

    def rows(name):
        with (tmp_path / "job" / f"{name}.csv").open() as file:
            return [[float(v) for v in row] for row in list(csv.reader(file))[1:]]

    assert [row[0] for row in rows("Train_Samples_lr")] == [4.0, 8.0]
    assert rows("Train_Samples_train_loss") == [[4.0, pytest.approx(means[0])], [8.0, pytest.approx(means[1])]]
    assert rows("Train_Samples_loss_scale") == [[4.0, 16.0], [8.0, 16.0]]
    assert rows("Own_number") == [[7.0, 3.5]]


def test_wandb_is_written_by_its_library(monkeypatch):
    written = []
    fake = types.ModuleType("wandb")
    fake.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    fake.init = lambda **options: written.append(options)
    fake.log = lambda row, step: written.append((row, step))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run({"wandb": {"enabled": True, "project": "mine", "team": "us"}}, steps=1)
    assert written[0] == {"project": "mine", "group": None, "entity": "us"}
    assert ({"Train/Samples/lr": 0.01}, 4) in written[1:]


def test_tensorboard_is_written_by_its_library(monkeypatch, tmp_path):
    written = []

    class SummaryWriter:
        def __init__(self, log_dir):
            written.append(log_dir)

        def add_scalar(self, name, value, position):
            written.append((name, value, position))

        def flush(self):
            written.append("flush")

    library = types.ModuleType("torch.utils.tensorboard")
    library.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", library)
    monkeypatch.setattr("zgraph.deepspeed.monitor._LIBRARIES", {})
    run({"tensorboard": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}, steps=1)
    assert written[0] == str(tmp_path / "job") and written[-1] == "flush"
    assert ("Train/Samples/lr", 0.01, 4) in written


@pytest.mark.parametrize("asked, level", [("debug", logging.DEBUG), ("ERROR", logging.ERROR), ("loud", logging.NOTSET)])
def test_the_environment_sets_the_level_of_messages(monkeypatch, asked, level):
    messages = importlib.import_module("zgraph.deepspeed.utils.logging")
    monkeypatch.setattr(messages.logger, "level", logging.NOTSET)
    monkeypatch.setenv("DEEPSPEED_LOG_LEVEL", asked)
    importlib.reload(messages)
    assert messages.logger.level == level
    messages.set_log_level_from_string("warning")
    assert messages.logger.level == logging.WARNING
    with pytest.raises(ValueError, match="'loud' is no level: debug, info, warning, error"):
        messages.set_log_level_from_string("loud")


def test_a_monitor_without_its_library_is_refused(monkeypatch):
    monkeypatch.setattr("zgraph.deepspeed.monitor._LIBRARIES", {"tensorboard": ("no_such_library",)})
    with pytest.raises(PlanError, match="no_such_library is not installed") as error:
        run({"tensorboard": {"enabled": True}})
    assert error.value.where == "tensorboard.enabled"
    run({"tensorboard": {"enabled": False}}, steps=1)


def test_the_time_of_each_phase_is_logged(caplog):
    with caplog.at_level(logging.INFO, logger="zgraph.deepspeed"):
        run({"wall_clock_breakdown": True, "steps_per_print": 2})
    lines = [r.getMessage() for r in caplog.records if "time (ms)" in r.getMessage()]
    assert len(lines) == 1 and lines[0].startswith("step 2, ")
    assert all(f" {phase}: " in lines[0] for phase in ("forward", "backward", "step"))
    assert any(r.getMessage().startswith("step=2, skipped=0, lr=[0.01]") for r in caplog.records)


def test_rows_a_second_are_logged_as_deepspeed_does(caplog):
    with caplog.at_level(logging.INFO, logger="zgraph.deepspeed"):
        engine, _ = run({"steps_per_print": 2}, steps=4)
    lines = [r.getMessage() for r in caplog.records if "SamplesPerSec" in r.getMessage()]
    assert len(lines) == 1 and lines[0].startswith("epoch=0/micro_step=8/global_step=4, RunningAvgSamplesPerSec=")
    words = dict(word.split("=", 1) for word in lines[0].split(", "))
    assert float(words["RunningAvgSamplesPerSec"]) == engine.tput_timer.avg_samples_per_sec() > 0
    assert float(words["CurrSamplesPerSec"]) > 0 and words["MaxMemAllocated"].endswith("GB")
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="zgraph.deepspeed"):
        run({"steps_per_print": 1, "timers": {"throughput": {"enabled": False}}}, steps=3)
    assert "step=3" in caplog.text and "SamplesPerSec" not in caplog.text


def test_rows_a_second_leave_out_the_first_steps(monkeypatch):
    now = iter(
        (0.0, 100.0, 100.0, 150.0, 160.0, 162.0, 164.0, 165.0)
    )  # the begin and the end of four steps, two seconds between the last
    monkeypatch.setattr("zgraph.deepspeed.utils.timer.time.perf_counter", lambda: next(now))
    timer = ThroughputTimer(None)
    assert timer.avg_samples_per_sec() == float("-inf")
    for _ in range(4):
        timer.start()
        timer.start()  # (a second micro-batch)
        timer.stop(30)
    assert timer.avg_samples_per_sec() == 60 / 15.0 and timer.step_elapsed_time == 1.0
    assert not timer.due(4)


def test_operations_are_told_by_module(tmp_path):
    file = tmp_path / "profile.txt"
    run({"flops_profiler": {"enabled": True, "profile_step": 1, "output_file": str(file)}})
    text = file.read_text()
    forward = 2 * 2 * (8 * 16 + 16 * 4)  # two rows, a product and a sum for each weight
    assert f"products of a forward: {forward} FLOP, of a backward: 1.02 kFLOP" in text
    assert f"  0: {2 * 2 * 8 * 16} FLOP" in text and f"  2: {2 * 2 * 16 * 4} FLOP" in text
    assert "parameters of the model: 212" in text and "FLOP/s" in text


def test_a_plain_model_is_profiled(tmp_path):
    model = net()
    flops, macs, parameters = get_model_profile(model, input_shape=(3, 8), print_profile=False, as_string=False)
    assert (flops, macs, parameters) == (2 * 3 * 192, 3 * 192, 212)
    assert model.training
    get_model_profile(model, input_shape=(3, 8), output_file=tmp_path / "profile")
    lines = (tmp_path / "profile").read_text().splitlines()
    assert lines[0].startswith("step 1: parameters 212, 1.15 KFLOPS") and lines[1].split() == [
        "module",
        "FLOPs",
        "share",
    ]
    assert [line.split() for line in lines[2:]] == [
        ["Sequential", "1.15", "KFLOPS", "100.0%"],
        ["Sequential.0", "768", "FLOPS", "66.7%"],
        ["Sequential.2", "384", "FLOPS", "33.3%"],
    ]
    get_model_profile(model, input_shape=(3, 8), module_depth=0, output_file=tmp_path / "profile")
    assert len((tmp_path / "profile").read_text().splitlines()) == 3
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)  # (in eval one fused operator of torch's)
    products = 2 * 8 * (3 * 16 * 16 + 16 * 16 + 2 * 16 * 32) + 2 * 2 * 2 * 2 * 4 * 4 * 8
    found = get_model_profile(encoder, args=(torch.randn(2, 4, 16),), print_profile=False, as_string=False)
    assert found[0] == products and torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(StepError, match="needs an input"):
        get_model_profile(model)
    with pytest.raises(StepError, match="nothing was counted"):
        FlopsProfiler(model).get_total_flops()


def test_estimates_count_states_and_forecast_a_step(capsys):
    model = net()
    two = {need.offloaded: need for need in estimate_zero2_model_states_mem_needs_all_live(model, 4)}
    assert two[()].gpu == 2 * 212 + 16 * 53 and two[()].host == 0
    assert two["optimizer",].gpu == 2 * 212 + 4 * 53 and two["optimizer",].host == int(12 * 53 * 1.5)
    three = {n.offloaded: n for n in estimate_zero3_model_states_mem_needs_all_live(model, 2, 2)}
    assert three[()].gpu == 4 * 144 + 16 * 53
    assert estimate_zero3_model_states_mem_needs_all_cold(212, 144, 4) == list(three.values())
    assert "nothing" in capsys.readouterr().out


@pytest.mark.slow
def test_an_estimate_with_inputs_has_the_peak_of_a_step():
    """(More where less is in the host's memory; with what is gathered, and activations.)"""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    few, many = (
        estimate_zero3_model_states_mem_needs_all_live(model, 2, inputs=(torch.randn(n, 64),)) for n in (1, 512)
    )
    assert few[0].peak < few[1].peak < few[2].peak
    assert all(more.peak > less.peak + 512 * 256 * 2 for more, less in zip(many, few, strict=True))


def test_whole_weights_come_out_of_a_checkpoint(tmp_path):
    engine, _ = run({"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}})
    engine.save_checkpoint(tmp_path, tag="one")
    state = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    for name, param in engine.module.named_parameters():
        assert state[name].dtype is torch.float32
        assert torch.equal(state[name].bfloat16(), param.full_tensor())
    assert any(not torch.equal(v, v.bfloat16().float()) for v in state.values())  # (those of the masters)
    plain = load_state_dict_from_zero_checkpoint(net(), tmp_path, "one")
    assert all(torch.equal(p, state[n]) for n, p in plain.named_parameters())
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "whole")
    loaded = torch.load(tmp_path / "whole" / "pytorch_model.bin")
    assert all(torch.equal(loaded[n], v) for n, v in state.items())
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "safe", safe_serialization=True)
    assert [p.suffix for p in (tmp_path / "safe").iterdir()] == [".safetensors"]


@pytest.mark.parametrize("bf16", [True, False])
def test_tied_weights_come_out_as_one_from_their_master(tmp_path, bf16):
    """(The optimizer keeps a master under one of the names: the other's was the weight that rounds.)"""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    model[0].weight = model[2].weight
    engine, _ = run({"bf16": {"enabled": bf16}, "zero_optimization": {"stage": 3}}, model=model)
    engine.save_checkpoint(tmp_path, tag="one")
    state = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert state["0.weight"] is state["2.weight"] and state["1.weight"] is not state["0.weight"]
    assert not torch.equal(state["0.weight"], state["0.weight"].bfloat16().float())
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "whole")
    loaded = torch.load(tmp_path / "whole" / "pytorch_model.bin")
    assert loaded["0.weight"] is loaded["2.weight"] and torch.equal(loaded["0.weight"], state["0.weight"])


def test_whole_weights_are_written_in_parts_in_a_dtype_and_without_frozen_ones(tmp_path):
    model = net()
    model[0].weight.requires_grad_(False)
    model[1].register_buffer("seen", torch.ones(3))
    engine, _ = run({"zero_optimization": {"stage": 3}}, model=model)
    engine.save_checkpoint(tmp_path, tag="one")
    names = [name for name in engine.module.state_dict() if name != "0.weight"]
    state = get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True)
    assert sorted(state) == sorted(names)
    for folder, safe in (("bin", False), ("safe", True)):
        convert_zero_checkpoint_to_state_dict(tmp_path, tmp_path / folder, "bf16", 100, safe, None, True)
        index = json.loads(next((tmp_path / folder).glob("*.index.json")).read_text())
        assert sorted(index["weight_map"]) == sorted(names) and len(set(index["weight_map"].values())) > 1
        for name, file in index["weight_map"].items():
            path = tmp_path / folder / file
            loaded = load_file(path) if safe else torch.load(path)
            assert torch.equal(loaded[name], state[name].bfloat16())
    with pytest.raises(CheckpointError, match="no size"):
        convert_zero_checkpoint_to_state_dict(tmp_path, tmp_path / "x", max_shard_size="5 apples")


def test_a_configuration_error_is_caught_by_deepspeeds_name():
    with pytest.raises(DeepSpeedConfigError, match="tag_validation"):
        run({"checkpoint": {"tag_validation": "foo"}})
    engine, *_ = deepspeed.initialize(model=net(), config=CONFIG | {"checkpoint": {"tag_validation": "Warn"}})
    with pytest.raises(ValueError, match="save_dir"):
        engine.save_checkpoint("")


def communicated(stage, ops):
    """What `comms_logger` says of 4 steps on this rank."""
    from zgraph.deepspeed import comm

    comm.reset_log()
    section = {"enabled": True, "prof_all": not ops, "prof_ops": ops}
    engine, _ = run({"comms_logger": section, "zero_optimization": {"stage": stage}}, steps=4)
    comm.all_reduce(torch.ones(3))
    found = comm.log_summary(return_dict=True)
    comm.configure(enabled=False)
    engine.destroy()
    return found


def bytes_of(found, name):
    return sum(row["bytes_per_step"] for row in found["compiled"].get(name, {}).values())


def test_collectives_of_compiled_steps_are_counted_with_their_bytes(two):
    weights = 4 * (8 * 16 + 16 + 16 * 4 + 4)
    for found in two.run(communicated, 3, []):
        assert found["steps"] == 4 and found["summary"]["all_reduce"][12]["count"] == 1
        assert bytes_of(found, "reduce_scatter_tensor") == 2 * weights  # (stage 3 reduces each micro-batch)
        assert 2 * weights <= bytes_of(found, "all_gather_into_tensor") <= 4 * weights
        assert found["waited_ms"].keys() == {"gather", "reduce"}
    only = two.run(communicated, 3, ["all_gather_into_tensor"])[0]
    assert only["compiled"].keys() == {"all_gather_into_tensor"} and not only["summary"]
