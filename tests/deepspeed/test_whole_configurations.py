"""A whole DeepSpeed configuration is a plan, and each of its keys is told."""

import base64
import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import zgraph
from zgraph import deepspeed
from zgraph.cli.app import app
from zgraph.deepspeed.keys import KEYS
from zgraph.errors import PlanError

ZERO3 = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "optimizer": {"type": "Adam", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-4, "warmup_num_steps": 100}},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 1e6,
        "stage3_prefetch_bucket_size": 5e5,
        "stage3_param_persistence_threshold": 1e4,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 5},
        "sub_group_size": 1e9,
    },
    "steps_per_print": 10,
    "wall_clock_breakdown": False,
}


def test_a_configuration_of_stage_3_is_a_plan():
    plan, report = deepspeed.plan(ZERO3, world=8)
    assert plan.mesh == {"dp": 8} and plan.zero == 3 and plan.micro_batches == 2 and plan.grad_clip.norm == 0.5
    assert plan.precision == "bf16" and plan.numerics == "deepspeed" and plan.on_nonfinite == "skip"
    assert plan.optimizer == zgraph.AdamW(lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    assert plan.lr_schedule.name == "WarmupLR" and plan.lr_schedule.warmup_num_steps == 100
    assert plan.bucket.reduce == 2 * 10**6 and plan.prefetch.ahead_bytes == 10**6 and plan.prefetch.enabled
    assert plan.param_persistence_threshold == 10_000
    assert (plan.offload.optimizer, plan.offload.parameters) == ("cpu", "nvme:/local_nvme")
    assert plan.offload.sub_group_bytes == 16 * 10**9
    assert report.plan is plan and not report.refused


def leaves(table, prefix=""):
    for name, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_each_key_has_a_row():
    report = deepspeed.report(ZERO3, world=8)
    assert {row.key for row in report.rows if not row.implied} >= set(leaves(ZERO3))
    assert report["zero_optimization.stage"].said == "zero = 3"
    assert report["steps_per_print"].verdict == "no effect here"
    assert report["zero_optimization.contiguous_gradients"].verdict == "equivalent"
    text = str(report)
    assert all(f"{key} = " in text for key in leaves(ZERO3))
    assert json.loads(json.dumps(report.to_json()))["plan"]["zero"] == 3


def test_what_surprises_is_told():
    report = deepspeed.report(
        {"optimizer": {"type": "Adam"}, "bf16": {"enabled": True}, "zero_optimization": True}, world=2
    )
    assert "AdamW" in report["optimizer.type"].said and "unless adam_w_mode is false" in report["optimizer.type"].said
    assert (
        report["gradient_clipping"].implied
        and report["gradient_clipping"].said == "grad_clip = 1.0: DeepSpeed's default"
    )
    assert "reduction in bf16" in report["bf16.enabled"].said
    assert "updates nothing" in report["bf16.check_grad_overflow"].said
    assert report["zero_optimization.stage"].said == "zero = 1: true is stage 1" and report.plan.zero == 1
    warm = {"type": "WarmupDecayLR", "params": {"total_num_steps": 2000}}
    report = deepspeed.report({"optimizer": {"type": "AdamW"}, "scheduler": warm}, world=1)
    assert "logarithmic" in report["scheduler.type"].said


@pytest.mark.parametrize(
    ("params", "made"),
    [
        ({}, zgraph.AdamW(lr=1e-3, weight_decay=0.0)),
        ({"adam_w_mode": False, "weight_decay": 0.1}, zgraph.Adam(lr=1e-3, weight_decay=0.1)),
        ({"torch_adam": True, "lr": 0.1}, zgraph.AdamW(lr=0.1, weight_decay=1e-2)),  # (torch's own default)
        ({"bias_correction": True, "amsgrad": False}, zgraph.AdamW(lr=1e-3, weight_decay=0.0)),
    ],
)
def test_adam_is_adamw_unless_adam_w_mode_is_false(params, made):
    assert deepspeed.plan({"optimizer": {"type": "Adam", "params": params}}, world=1).plan.optimizer == made


@pytest.mark.parametrize(
    ("kind", "name"), [("AdamW", "AdamW"), ("Lamb", "LAMB"), ("lion", "Lion"), ("Adagrad", "Adagrad"), ("SGD", "SGD")]
)
def test_optimizers_have_deepspeeds_defaults(kind, name):
    optimizer = deepspeed.plan({"optimizer": {"type": kind}}, world=1).plan.optimizer
    rates = {"AdamW": 1e-3, "LAMB": 1e-3, "Lion": 1e-3, "Adagrad": 1e-2, "SGD": 1e-3}
    assert (optimizer.name, optimizer.lr, optimizer.weight_decay) == (name, rates[name], 0.0)


# -- the batch ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"train_batch_size": 32}, 1),
        ({"train_micro_batch_size_per_gpu": 4}, 1),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}, 4),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 2}, 2),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8}, 8),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8}, 8),
        ({}, 1),
    ],
)
def test_two_sizes_of_the_batch_give_the_third(given, parts):
    assert deepspeed.plan(given, world=4).plan.micro_batches == parts


# -- precision ------------------------------------------------------------------------------------------------------------
def test_fp16_has_its_loss_scale():
    section = {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "hysteresis": 3, "min_loss_scale": 2}
    whole = {"fp16": section, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 1}}
    plan = deepspeed.plan(whole, world=2).plan
    scale = plan.loss_scale()
    assert (scale.initial_scale_power, scale.hysteresis, scale.min_loss_scale, scale.static) == (12, 3, 2.0, None)
    assert scale.ends_at_minimum
    without, told = deepspeed.plan(
        whole | {"zero_optimization": {"stage": 0}}, world=2
    )  # (where DeepSpeed's is another)
    assert (without.loss_scale().hysteresis, without.loss_scale().ends_at_minimum) == (1, False)
    assert told["fp16.hysteresis"].verdict == "no effect here"
    assert plan.resolved_precision().parameter == "float16" and plan.on_nonfinite == "ignore"
    fixed = deepspeed.plan({"fp16": {"enabled": True, "loss_scale": 128}, "optimizer": {"type": "AdamW"}}, world=2).plan
    assert fixed.loss_scale().static == 128.0


@pytest.mark.parametrize(
    ("given", "reduce"),
    [
        ({"communication_data_type": "fp32", "bf16": {"enabled": True}}, "float32"),
        ({"communication_data_type": "fp16", "fp16": {"enabled": True}}, "float16"),
        ({"communication_data_type": "fp16"}, "float16"),
        ({"compress_communication": True}, "bfloat16"),
        ({"compress_communication": True, "fp16": {"enabled": True}}, "float16"),
        ({"zero_optimization": {"stage": 2, "compress_communication": True}}, "bfloat16"),
        ({"compress_communication": False}, None),
    ],
)
def test_what_gradients_are_reduced_in(given, reduce):
    plan = deepspeed.plan({**given, "optimizer": {"type": "AdamW"}}, world=2).plan
    assert plan.resolved_precision().reduce == reduce


# -- parallelism ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "mesh"),
    [
        ({"tensor_parallel": {"autotp_size": 2}}, {"dp": 4, "tp": 2}),
        ({"tensor_parallel": {"tp": {"tp_size": 4}}}, {"dp": 2, "tp": 4}),
        ({"sequence_parallel_size": 2}, {"dp": 4, "cp": 2}),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 4}}, {"replicate": 2, "dp": 4}),
        ({"pipeline_parallel": {"enabled": True, "pp_size": 2, "micro_batches": 4}}, {"pp": 2, "dp": 4}),
        ({"pipeline_parallel": {"enabled": False, "pp_size": 2, "micro_batches": 4}}, {"dp": 8}),
        (
            {
                "pipeline": {"stages": 2, "partition": "type:.*Block"},
                "gradient_accumulation_steps": 2,
                "train_micro_batch_size_per_gpu": 1,
            },
            {"pp": 2, "dp": 4},
        ),
        ({"pipeline": {"stages": "auto"}}, {"dp": 8}),
    ],
)
def test_ranks_divide_as_the_sections_say(given, mesh):
    plan, report = deepspeed.plan(given, world=8)
    assert plan.mesh == mesh and set(leaves(given)) <= {row.key for row in report.rows}


def test_elasticity_says_how_large_a_batch_is():
    section = {"enabled": True, "max_train_batch_size": 100, "micro_batch_sizes": [2, 4]}
    plan, report = deepspeed.plan({"elasticity": section, "optimizer": {"type": "AdamW"}}, world=4)
    assert plan.elastic is not None and set(leaves({"elasticity": section})) <= {row.key for row in report.rows}


def test_a_pipeline_in_bf16_is_a_plan_unless_its_overflows_are_to_be_checked():
    """(DeepSpeed checks them by default, which stages can't do.)"""
    given = {
        "pipeline": {"stages": 2},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "train_batch_size": 8,
    }
    plan, report = deepspeed.plan(given, world=4)
    assert plan.mesh == {"pp": 2, "dp": 2} and plan.on_nonfinite == "ignore"
    assert report["bf16.check_grad_overflow"].verdict == "no effect here" and report["bf16.check_grad_overflow"].implied
    given["bf16"]["check_grad_overflow"] = True
    assert [row.key for row in deepspeed.report(given, world=4).refused] == ["bf16.check_grad_overflow"]


# -- "auto" -----------------------------------------------------------------------------------------------------------------
AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    },
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
}
ARGUMENTS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.7,
    "bf16": True,
    "fp16": False,
    "learning_rate": 2e-5,
    "adam_beta1": 0.9,
    "adam_beta2": 0.98,
    "adam_epsilon": 1e-6,
    "weight_decay": 0.05,
    "warmup_steps": 20,
    "max_steps": 200,
}
MODEL = SimpleNamespace(config=SimpleNamespace(hidden_size=100))


@pytest.mark.parametrize("arguments", [ARGUMENTS, SimpleNamespace(**ARGUMENTS)])
def test_auto_is_filled_as_transformers_fills_it(arguments):
    plan = deepspeed.plan(AUTO, world=2, model=MODEL, arguments=arguments).plan
    assert plan.micro_batches == 2 and plan.grad_clip.norm == 0.7 and plan.precision == "bf16"
    assert plan.optimizer == zgraph.AdamW(lr=2e-5, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.05)
    assert (plan.lr_schedule.warmup_max_lr, plan.lr_schedule.warmup_num_steps, plan.lr_schedule.total_num_steps) == (
        2e-5,
        20,
        200,
    )
    assert plan.bucket.reduce == 2 * 100**2 and plan.prefetch.ahead_bytes == 2 * 9000
    assert plan.param_persistence_threshold == 1000


def test_auto_that_nothing_fills_is_refused_by_name():
    found = deepspeed.report(AUTO, world=2)
    assert {"gradient_clipping", "optimizer.params.lr", "zero_optimization.reduce_bucket_size"} <= {
        r.key for r in found.refused
    }
    many = {**ARGUMENTS, "max_steps": -1}
    (row,) = deepspeed.report(AUTO, world=2, model=MODEL, arguments=many).refused
    assert row.key == "scheduler.params.total_num_steps" and "number of steps" in row.said
    nested = SimpleNamespace(config=SimpleNamespace(text_config=SimpleNamespace(hidden_sizes=[8, 100])))
    assert deepspeed.plan(AUTO, world=2, model=nested, arguments=ARGUMENTS).plan.param_persistence_threshold == 1000


# -- files ------------------------------------------------------------------------------------------------------------------
def test_a_file_is_read(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ZERO3))
    assert deepspeed.plan(path, world=8).plan == deepspeed.plan(ZERO3, world=8).plan
    assert deepspeed.plan(str(path), world=8).plan.zero == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no JSON"),
        ('{"bf16": {"enabled": true}, "bf16": {}}', "given twice"),
        ('{"bf16": {"enabled": true}, "bfloat16": {}}', "given twice"),
        ("[1]", "it is a table"),
    ],
)
def test_a_file_with_a_fault_is_refused(tmp_path, text, said):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=said):
        deepspeed.plan(path, world=1)
    with pytest.raises(PlanError, match="can't be read"):
        deepspeed.plan(tmp_path / "none.json", world=1)


def test_a_file_with_comments_is_read_as_deepspeed_reads_it(tmp_path, monkeypatch):
    pytest.importorskip("hjson")
    path = tmp_path / "ds.json"
    path.write_text('{\n  # Hjson\n  train_batch_size: 8\n  "zero_optimization": {"stage": 2},  // quoted\n}\n')
    plan, _ = deepspeed.plan(path, world=4)
    assert (plan.zero, plan.mesh) == (2, {"dp": 4})
    monkeypatch.setitem(sys.modules, "hjson", None)
    with pytest.raises(PlanError, match="package hjson"):
        deepspeed.plan(path, world=4)


# -- what is refused --------------------------------------------------------------------------------------------------------
ADAM = {"optimizer": {"type": "AdamW"}}
WRONG = [
    ("zero_optimizaton", {"zero_optimizaton": {"stage": 3}}, "zero_optimization"),
    ("zero_optimization.stge", {"zero_optimization": {"stge": 3}}, "stage"),
    ("zero_optimization.stage", {"zero_optimization": {"stage": 4}}, "0, 1, 2 or 3"),
    ("zero_optimization.stage", {"zero_optimization": {"stage": "three"}}, "whole number"),
    ("zero_optimization.stage", {"zero_optimization": {"stage": 2.5}}, "whole number"),
    ("zero_optimization", {"zero_optimization": 3}, "section"),
    ("zero_optimization.reduce_bucket_size", {"zero_optimization": {"reduce_bucket_size": -1}}, "5e8"),
    ("zero_optimization.reduce_bucket_size", {"zero_optimization": {"reduce_bucket_size": "5e8B"}}, "number"),
    ("zero_optimization.reduce_bucket_size", {"zero_optimization": {"reduce_bucket_size": float("inf")}}, "number"),
    ("zero_optimization.overlap_comm", {"zero_optimization": {"overlap_comm": "yess"}}, "true or false"),
    ("zero_optimization.overlap_comm", {"zero_optimization": {"overlap_comm": 2}}, "true or false"),
    ("zero_optimization.offload_param.device", {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "nvme_path"),
    ("zero_optimization.offload_param.device", {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "stage 3"),
    ("zero_optimization.offload_param.device", {"zero_optimization": {"stage": 3, "offload_param": {"device": "disk"}}}, "nvme"),
    ("zero_optimization.offload_optimizer", {"zero_optimization": {"stage": 3, "offload_optimizer": "cpu"}}, "section"),
    ("zero_optimization.offload_optimizer.devise", {"zero_optimization": {"stage": 3, "offload_optimizer": {"devise": "cpu"}}}, "device"),
    ("zero_optimization.offload_optimizer.device", {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, **ADAM}, "stage 1"),
    ("zero_optimization.offload_optimizer.ratio",
     {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 2}}, **ADAM}, "from 0 to 1"),
    ("zero_optimization.sub_group_size", {"zero_optimization": {"sub_group_size": 0}}, "1e9"),
    ("zero_optimization.zero_quantized_weights", {"zero_optimization": {"zero_quantized_weights": 8}}, "true or false"),
    ("zero_optimization.zero_quantized_nontrainable_weights",
     {"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}}, "zero_quantized_weights"),
    ("zero_optimization.zero_hpz_partition_size", {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 0}}, "devices of a node"),
    ("zero_optimization.zero_hpz_partition_size", {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}, "divides"),
    ("zero_optimization.mics_shard_size", {"zero_optimization": {"stage": 3, "mics_shard_size": 3}}, "divides"),
    ("zero_optimization.zenflow", {"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "delayed_after"),
    ("train_batch_size", {"train_batch_size": 30}, "multiple"),
    ("train_batch_size", {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}, "two of the three"),
    ("train_batch_size", {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4}, "multiple"),
    ("train_batch_size", {"train_batch_size": 0}, "from 1"),
    ("train_batch_size", {"train_batch_size": "many"}, "number"),
    ("train_micro_batch_size_per_gpu", {"train_micro_batch_size_per_gpu": -2}, "from 1"),
    ("gradient_accumulation_steps", {"gradient_accumulation_steps": 4}, "train_micro_batch_size_per_gpu"),
    ("gradient_clipping", {"gradient_clipping": -1}, "above 0"),
    ("gradient_clipping", {"gradient_clipping": True}, "number"),
    ("gradient_clipping", {"gradient_clipping": "auto"}, "training arguments"),
    ("gradient_allreduce_op", {"gradient_allreduce_op": "sum"}, "multiply the loss"),
    ("communication_data_type", {"communication_data_type": "int8"}, "bf16"),
    ("fp16.enabled", {"fp16": {"enabled": True}, "bf16": {"enabled": True}, **ADAM}, "one of them"),
    ("fp16.enabled", {"fp16": {"enabled": "yess"}}, "true or false"),
    ("log_level", {"log_level": "loud"}, "no level"),
    ("fp16.loss_scale_windw", {"fp16": {"enabled": True, "loss_scale_windw": 5}, **ADAM}, "loss_scale_window"),
    ("fp16.loss_scale_window", {"fp16": {"enabled": True, "loss_scale_window": 0}, **ADAM}, ""),
    ("fp16.initial_scale_power", {"fp16": {"enabled": True, "initial_scale_power": 300}, **ADAM}, ""),
    ("fp16.fp16_master_weights_and_grads", {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}, **ADAM}, "leave it out"),
    ("bf16.bf16_master_weights_and_grads", {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, **ADAM}, "leave it out"),
    ("amp", {"amp": {"enabled": True, "opt_level": "O1"}}, "bf16"),
    ("torch_autocast.enabled", {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "torch.autocast"),
    ("data_types.grad_accum_dtype", {"data_types": {"grad_accum_dtype": "fp8"}}, "bf16"),
    ("data_types.keep_in_fp32_modules", {"data_types": {"keep_in_fp32_modules": "norm"}}, "list"),
    ("optimizer.type", {"optimizer": {"type": "MuAdam"}}, "AdamW"),
    ("optimizer.type", {"optimizer": {"type": "Adan"}}, "Adam"),
    ("optimizer.type", {"optimizer": {"params": {"lr": 1}}}, "name the optimizer"),
    ("optimizer.params.learning_rate", {"optimizer": {"type": "Adam", "params": {"learning_rate": 1e-3}}}, ""),
    ("optimizer.params.lr", {"optimizer": {"type": "Adam", "params": {"lr": -1}}}, ""),
    ("optimizer.params.lr", {"optimizer": {"type": "Adam", "params": {"lr": "auto"}}}, "training arguments"),
    ("optimizer.params.betas", {"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}, ""),
    ("optimizer.params.max_grad_norm", {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}, "gradient_clipping"),
    ("optimizer.params.adam_w_mode", {"optimizer": {"type": "Adam", "params": {"adam_w_mode": "no"}}}, ""),
    ("optimizer", {"optimizer": "Adam"}, "section"),
    ("scheduler.type", {"scheduler": {"type": "WarmupLR"}}, "optimizer"),
    ("scheduler.type", {"scheduler": {"type": "WarmUpLR"}, **ADAM}, "WarmupLR"),
    ("scheduler.params.total_num_steps", {"scheduler": {"type": "WarmupDecayLR"}, **ADAM}, ""),
    ("scheduler.params.warmup_num_step", {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_step": 5}}, **ADAM}, ""),
    ("scheduler.params.last_batch_iteration", {"scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": 7}}, **ADAM}, "checkpoint"),
    ("tensor_parallel.autotp_size", {"tensor_parallel": {"autotp_size": 3}}, "another size"),
    ("tensor_parallel.tp.tp_size", {"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}}, "one of them"),
    ("tensor_parallel.autotp_size", {"tensor_parallel": {"autotp_size": 16}}, "ranks"),
    ("sequence_parallel_size", {"sequence_parallel_size": -1}, "ranks"),
    ("pipeline.stages", {"pipeline": {"stages": "all"}}, "auto"),
    ("pipeline.partition", {"pipeline": {"stages": 2, "partition": "profile"}, "train_micro_batch_size_per_gpu": 1,
                            "gradient_accumulation_steps": 4}, "uniform"),
    ("pipeline_parallel.enabled", {"pipeline_parallel": {"enabled": True}}, "pp_size"),
    ("pipeline_parallel.micro_batches",
     {"pipeline_parallel": {"enabled": True, "pp_size": 2, "micro_batches": 4}, "train_micro_batch_size_per_gpu": 1,
      "gradient_accumulation_steps": 2}, "one of them"),
    ("expert_parallel", {"expert_parallel": {"enabled": True}}, "leave it out"),
    ("activation_checkpointing.cpu_checkpointing", {"activation_checkpointing": {"cpu_checkpointing": "yess"}}, "true or false"),
    ("elasticity.micro_batch_sizes", {"elasticity": {"enabled": True, "max_train_batch_size": 20, "micro_batch_sizes": []}, **ADAM}, ""),
    ("train_batch_size", {"train_batch_size": 8, "elasticity": {"enabled": True, "max_train_batch_size": 20, "micro_batch_sizes": [2]}, **ADAM}, ""),
    ("checkpoint.use_node_local_storage", {"checkpoint": {"use_node_local_storage": True}}, "share"),
    ("sparse_attention.mode", {"sparse_attention": {"mode": "fixd"}}, "fixed"),
    ("sparse_attention.block", {"sparse_attention": {"mode": "bigbird", "block": 12}}, "power of two"),
    ("sparse_attention.num_sliding_blocks", {"sparse_attention": {"num_sliding_blocks": 3}}, "num_sliding_window_blocks"),
    ("data_efficiency", {"data_efficiency": {"enabled": True}}, "loader"),
    ("curriculum_learning", {"curriculum_learning": {"enabled": True}}, "loader"),
    ("compression_training", {"compression_training": {"weight_quantization": {}}}, "leave it out"),
    ("autotuning", {"autotuning": {"enabled": True}}, "zgraph plan --search"),
    ("aio.block_sise", {"aio": {"block_sise": 5}}, "block_size"),
    ("tensorboard", {"tensorboard": True}, "section"),
    ("steps_per_print", {"steps_per_print": "often"}, "number"),
    ("zero_optimization.stage", {"zero_optimization.stage": 3}, '"zero_optimization": {"stage": …}'),
    ("zero_optimization.offload_optimizer.devic", {"zero_optimization": {"stage": 2, "offload_optimizer": {"devic": "cpu"}}, **ADAM}, "device"),
    ("zero_optimization.leaf_module.clases", {"zero_optimization": {"stage": 3, "leaf_module": {"clases": ["Block"]}}}, "classes"),
    ("zero_optimization.cpu_offload", {"zero_optimization": {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "none"}}, **ADAM},
     "offload_optimizer says it"),
    ("tensor_parallel.tp.tp_sise", {"tensor_parallel": {"tp": {"tp_sise": 2}}}, "tp_size"),
    ("checkpoint.parallel_write.pipeline_stages", {"checkpoint": {"parallel_write": {"pipeline_stages": True}}}, "pipeline_stage"),
    ("timers.throughput.enable", {"timers": {"throughput": {"enable": False}}}, "enabled"),
    ("timers.throughput.enabled", {"timers": {"throughput": {"enabled": "noo"}}}, "true or false"),
    ("flops_profiler.profil_step", {"flops_profiler": {"enabled": True, "profil_step": 3}}, "profile_step"),
    ("flops_profiler.profile_step", {"flops_profiler": {"enabled": True, "profile_step": "first"}}, "whole number"),
    ("csv_monitor.job_nam", {"csv_monitor": {"enabled": True, "job_nam": "x"}}, "job_name"),
    ("tensorboard.output_path", {"tensorboard": {"enabled": True, "output_path": 5}}, "text"),
    ("wandb.projct", {"wandb": {"enabled": True, "projct": "x"}}, "project"),
    ("comms_logger.prof_ops", {"comms_logger": {"enabled": True, "prof_ops": "all_reduce"}}, "list"),
    ("gradient_predivide_factor", {"gradient_predivide_factor": 0}, "above 0"),
    ("gradient_predivide_factor", {"gradient_predivide_factor": -2.0}, "above 0"),
    ("pipeline.stages", {"pipeline": {"stages": 0}}, "from 1"),
    ("optimizer.params.lr", {"optimizer": {"type": "Adam", "params": {"lr": True}}}, "not a number"),
    ("optimizer.params.params", {"optimizer": {"type": "Adam", "params": {"params": {"lr": 1}}}}, "lr"),
    ("optimizer.params", {"optimizer": {"type": "Adam", "params": [1e-3]}}, "section"),
    ("optimizer.params.nesterov", {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "nesterov": True}}}, "momentum"),
    ("scheduler.params.warmup_max_lr", {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": True}}, **ADAM}, "not a number"),
    ("scheduler.params.warmup_num_steps", {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 5, "warmup_num_steps": 10}}, **ADAM},
     "longer"),
    ("zero_optimization.stage", {"zero_optimization": {"stage": [3]}}, "whole number"),
    ("zero_optimization.reduce_bucket_size", {"zero_optimization": {"stage": 2, "reduce_bucket_size": 0.5}}, "5e8"),
    ("zero_optimization.stage3_max_live_parameters", {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": -5}}, "5e8"),
    ("zero_optimization.offload_optimizer.device", {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}, **ADAM}, "nvme_path"),
    ("zero_optimization.leaf_module.classes", {"zero_optimization": {"stage": 3, "leaf_module": {"classes": "Block"}}}, "list"),
    ("train_micro_batch_size", {"train_micro_batch_size": 4}, "train_micro_batch_size_per_gpu"),
    ("train_batch_size", {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 16}, "multiple"),
    ("gradient_accumulation_steps", {"train_batch_size": 16, "gradient_accumulation_steps": 0}, "from 1"),
    ("gradient_clipping", {"gradient_clipping": float("nan")}, "number"),
    ("gradient_allreduce_op", {"gradient_allreduce_op": "max"}, "multiply the loss"),
    ("bf16", {"bf16": True, **ADAM}, "section"),
    ("bf16.enable", {"bf16": {"enable": True}, **ADAM}, "enabled"),
    ("fp16.min_loss_scale", {"fp16": {"enabled": True, "min_loss_scale": 0}, "zero_optimization": {"stage": 1}, **ADAM}, "smallest scale"),
    ("fp16.loss_scale", {"fp16": {"enabled": True, "loss_scale": -1}, **ADAM}, "fixed scale"),
    ("fp16.hysteresis", {"fp16": {"enabled": True, "hysteresis": 0}, "zero_optimization": {"stage": 1}, **ADAM}, ""),
    ("data_types.keep_in_fp32_modules", {"data_types": {"keep_in_fp32_modules": [1, 2]}, "bf16": {"enabled": True}, **ADAM}, "names"),
    ("optimizer.lr", {"optimizer": {"type": "Adam", "lr": 1e-3}}, "params"),
    ("optimizer.params.betas", {"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.0]}}}, ""),
    ("optimizer.params.freeze_step", {"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": -1}}}, "steps before"),
    ("scheduler.params", {"scheduler": {"type": "StepLR"}, **ADAM}, "step_size"),
    ("scheduler.params", {"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 0}}, **ADAM}, "other numbers"),
    ("scheduler.params", {"scheduler": {"type": "ReduceLROnPlateau"}, **ADAM}, "metrics"),
    ("scheduler.type", {"scheduler": {"type": "linear"}, **ADAM}, "WarmupLR"),
    ("scheduler.params.total_num_steps", {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}, **ADAM}, "arguments"),
    ("tensor_parallel", {"tensor_parallel": 2}, "section"),
    ("sequence_parallel_size", {"sequence_parallel_size": "two"}, "whole number"),
    ("pipeline.activation_checkpoint_interval", {"pipeline": {"stages": 2, "activation_checkpoint_interval": -1}}, "0 for none"),
    ("pipeline_parallel.pp_size", {"pipeline_parallel": {"enabled": True, "pp_size": 0}}, "from 1"),
    ("elasticity.version", {"elasticity": {"enabled": True, "max_train_batch_size": 20, "micro_batch_sizes": [2], "version": 0.3}, **ADAM}, "0.2"),
    ("checkpoint.tag_validation", {"checkpoint": {"tag_validation": "WARNING"}}, "Warn"),
    ("moe", {"moe": {"enabled": True}}, ""),
    ("Zero_Optimization", {"Zero_Optimization": {"stage": 3}}, "zero_optimization"),
    ("zgraph.zero", {"zero_optimization": {"stage": 3}, "zgraph": {"zero": 1}}, "give one of them"),
    ("zgraph.prefetch", {"zero_optimization": {"stage": 3, "overlap_comm": True}, "zgraph": {"prefetch": {"enabled": False}}}, "overlap_comm"),
    ("zgraph.memory_budgt", {"zgraph": {"memory_budgt": "1GiB"}}, "memory_budget"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "given", "remedy"), WRONG, ids=lambda v: v if isinstance(v, str) else "")
def test_what_is_wrong_is_refused_with_key_reason_and_remedy(key, given, remedy):
    found = deepspeed.report(given, world=8)
    rows = {row.key: row for row in found.refused}
    assert key in rows, str(found)
    assert found.plan is None and rows[key].said and rows[key].hint and remedy in f"{rows[key].said}; {rows[key].hint}"
    with pytest.raises(PlanError, match=key.replace(".", r"\.")):
        deepspeed.plan(given, world=8)


def test_all_that_is_refused_is_told_at_once():
    with pytest.raises(PlanError) as caught:
        deepspeed.plan({"zero_optimizaton": {}, "gradient_clipping": -1, "fp16": {"enabled": "yess"}}, world=2)
    assert {p.where for p in caught.value.problems} == {"zero_optimizaton", "gradient_clipping", "fp16.enabled"}


@pytest.mark.parametrize("config", [None, 5, [], '{"train_batch_size": 8}', "/nowhere/ds.json"])
def test_what_is_no_configuration_is_refused_with_what_to_give(config):
    with pytest.raises(PlanError, match="a dict, or the path of a JSON file"):
        deepspeed.plan(config, world=2)


def test_no_ranks_are_refused():
    with pytest.raises(PlanError, match="0 ranks"):
        deepspeed.plan({"train_batch_size": 8}, world=0)


def test_a_configuration_in_base64_is_read_as_deepspeed_reads_it():
    text = base64.urlsafe_b64encode(json.dumps({"zero_optimization": {"stage": 2}}).encode()).decode()
    assert deepspeed.plan(text, world=2).plan.zero == 2


def test_texts_that_stand_for_numbers_and_switches_are_these():
    """YAML reads 5e8 and 1e-3 as texts, and DeepSpeed's sections take "500000000", "3" and "true"."""
    numbers = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "overlap_comm": False, "reduce_bucket_size": 5e8, "sub_group_size": 10**9},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "adam_w_mode": False}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-4, "warmup_num_steps": 100}},
    }

    def written(value):
        if isinstance(value, dict):
            return {name: written(inner) for name, inner in value.items()}
        return [str(item) for item in value] if isinstance(value, list) else str(value)

    assert deepspeed.plan(written(numbers), world=2)[0] == deepspeed.plan(numbers, world=2)[0]


def test_a_key_that_is_no_text_is_refused():
    with pytest.raises(PlanError, match="keys are texts"):
        deepspeed.plan({"zero_optimization": {3: True}}, world=2)


def test_a_field_that_a_key_sets_as_well_may_be_said_again():
    plan, _ = deepspeed.plan({"zero_optimization": {"stage": 2}, "zgraph": {"zero": 2, "grad_clip": None}}, world=2)
    assert plan.zero == 2 and plan.grad_clip is None  # (the clipping of 1.0 is a default)


def test_sections_that_are_off_ask_for_nothing():
    off = {
        name: {"enabled": False}
        for name, key in KEYS.items()
        if key.verdict == "refused" and key.kind == "table" and "." not in name
    }
    report = deepspeed.report(off, world=2)
    assert report.plan is not None and {row.verdict for row in report.rows if row.key in off} == {"equivalent"}


def test_every_key_of_the_table_is_taken_alone():
    """No key crashes, and none is passed over."""
    samples = {"bool": True, "int": 2, "number": 2.0, "positive": 2.0, "text": "fp32", "list": ["x"], "any": 2}
    for name, key in KEYS.items():
        if key.kind == "table":
            continue
        given = samples[key.kind]
        for part in reversed(name.split(".")):
            given = {part: given}
        report = deepspeed.report(given, world=8)
        assert name in {row.key for row in report.rows}, name


ODD = (None, "auto", [], {}, True, 0, -1, 2, 3.5, float("nan"), "x", {"a": 1}, object())


@pytest.mark.parametrize("rest", [{}, {"fp16": {"enabled": True}, "optimizer": {"type": "Adam"}}])
def test_no_value_of_any_key_crashes_or_is_passed_over(rest):
    for name in KEYS:
        for value in ODD:
            given = copy.deepcopy(rest)
            *outer, last = name.split(".")
            table = given
            for part in outer:
                table = table.setdefault(part, {})
            table[last] = value
            report = deepspeed.report(given, world=8)
            told = {row.key for row in report.rows}
            if report.plan is None or value is None or value == {}:
                assert report.plan is not None or report.refused, (name, value)
            elif not (isinstance(value, dict) and KEYS[name].kind == "any"):
                assert name in told or any(row.startswith(f"{name}.") for row in told), (name, value)


# -- the command line -------------------------------------------------------------------------------------------------------
def test_commands_show_the_report_and_write_the_plan(tmp_path):
    path, written = tmp_path / "ds.json", tmp_path / "plan.toml"
    path.write_text(json.dumps(ZERO3))
    shown = CliRunner().invoke(app, ["check", str(path)])
    assert (
        shown.exit_code == 0 and "zero_optimization.stage = 3: zero = 3" in shown.output and "8 rank(s)" in shown.output
    )
    made = CliRunner().invoke(app, ["plan", "--from-deepspeed", str(path), "-o", str(written)])
    assert made.exit_code == 0 and zgraph.Plan.load(written) == deepspeed.plan(ZERO3, world=8).plan
    path.write_text(json.dumps({**ZERO3, "zero_optimizaton": {}}))
    wrong = CliRunner().invoke(app, ["check", str(path), "--json"])
    assert wrong.exit_code == 1 and json.loads(wrong.output)["plan"] is None
    nothing = CliRunner().invoke(app, ["plan"])
    assert nothing.exit_code == 2 and "--from-deepspeed" in nothing.output


def test_the_table_has_every_key_that_deepspeed_has():
    """(Of 0.19.8's sections, and those that 0.19.6 was the last to have.)"""
    text = (Path(__file__).parents[1] / "data/deepspeed_keys.txt").read_text()
    names = [line.split("#")[0].strip() for line in text.splitlines() if line.split("#")[0].strip()]
    assert len(names) > 200 and not [name for name in names if name not in KEYS]


# -- the plan trains --------------------------------------------------------------------------------------------------------
STAGES = {
    "1": {"stage": 1, "reduce_bucket_size": 5e8},
    "2": {"stage": 2, "contiguous_gradients": True, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}},
    "3": {"stage": 3, "stage3_max_live_parameters": 1e9, "stage3_prefetch_bucket_size": 5e7, "sub_group_size": 1e9},
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_plan_trains_as_the_configuration_says(stage):
    """Five steps of AdamW beside torch's own, with DeepSpeed's clipping, accumulation and warm-up."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"},
        },
        "zero_optimization": STAGES[stage],
    }
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.0, weight_decay=0.1, foreach=False)
    plan = deepspeed.plan(config, world=1).plan.model_copy(update={"backend": "eager"})
    model = zgraph.compile(model, plan, loss_fn=lambda out: 10 * out.square().mean())
    for step in range(5):
        x = torch.randn(4, 4)
        model.train_step(x)
        for part in x.chunk(2):
            (10 * plain(part).square().mean() / 2).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = (
            1e-2 * max(step - 1, 0) / 4
        )  # (DeepSpeed steps the schedule after the optimizer, from -1)
        optimizer.step()
        optimizer.zero_grad()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_zero_plus_plus_sends_fewer_bits_at_stage_3():
    keys = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 2}
    plan, _ = deepspeed.plan({"train_batch_size": 8, "zero_optimization": {"stage": 3, **keys}}, world=4)
    assert (plan.wire.gather, plan.wire.reduce, plan.wire.secondary) == ("int8", "int4", 2)
    plan, report = deepspeed.plan({"train_batch_size": 8, "zero_optimization": {"stage": 2, **keys}}, world=4)
    assert not plan.wire.compresses and plan.wire.secondary is None
    for key in keys:
        assert report[f"zero_optimization.{key}"].verdict == "no effect here"


def test_one_bit_adam_and_lamb_keep_their_numbers():
    params = {"lr": 4e-4, "freeze_step": 400, "cuda_aware": False, "comm_backend_name": "nccl", "betas": [0.8, 0.9]}
    given = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "OneBitAdam", "params": params}}
    plan, report = deepspeed.plan(given, world=2)
    assert plan.optimizer == zgraph.OneBitAdam(lr=4e-4, freeze_steps=400, betas=(0.8, 0.9)) and plan.zero == 0
    assert not report.refused and "optimizer.params.freeze_step" in str(report)
    params = {"freeze_step": 400, "max_coeff": 0.5, "coeff_beta": 0.8, "factor_max": 3.0, "bias_correction": True}
    lamb, report = deepspeed.plan({**given, "optimizer": {"type": "OneBitLamb", "params": params}}, world=2)
    assert lamb.optimizer == zgraph.OneBitLAMB(lr=1e-3, freeze_steps=400, max_coeff=0.5, coeff_beta=0.8, factor_max=3.0)
    assert not report.refused
    with pytest.raises(PlanError, match="not reduced, and zero is 2"):
        deepspeed.plan({**given, "zero_optimization": {"stage": 2}}, world=2)


def test_zero_one_adam_keeps_its_numbers():
    numbers = {"var_freeze_step": 400, "var_update_scaler": 8, "local_step_scaler": 100, "local_step_clipper": 4}
    params = {"lr": 4e-4, "cuda_aware": False, "comm_backend_name": "nccl", "bias_correction": True, **numbers}
    given = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "ZeroOneAdam", "params": params}}
    plan, report = deepspeed.plan(given, world=2)
    assert plan.optimizer == zgraph.ZeroOneAdam(lr=4e-4, **numbers) and plan.zero == 0 and not report.refused
    assert all(report[f"optimizer.params.{key}"].verdict == "applied" for key in numbers)
    with pytest.raises(PlanError, match="not reduced, and zero is 3"):
        deepspeed.plan({**given, "zero_optimization": {"stage": 3}}, world=2)


def test_keys_have_their_other_names_too():
    """DeepSpeed takes the names of its fields as well, and older files have `thread_count`."""
    section = {"stage": 3, "prefetch_bucket_size": 1e6, "gather_16bit_weights_on_model_save": 1}
    config = {"zero_optimization": section, "aio": {"thread_count": 2}, "optimizer": {"type": "AdamW"}}
    found = deepspeed.report(config, world=2)
    assert (
        found["zero_optimization.stage3_prefetch_bucket_size"].verdict == "applied"
        and found.plan.prefetch.ahead_bytes == 4_000_000
    )
    assert found["zero_optimization.stage3_gather_16bit_weights_on_model_save"].value is True
    assert found["aio.intra_op_parallelism"].verdict != "refused"
    with pytest.raises(PlanError, match="stage3_prefetch_bucket_size is given twice"):
        deepspeed.report({"zero_optimization": {"stage3_prefetch_bucket_size": 1, "prefetch_bucket_size": 1}}, world=2)


def test_offloading_of_an_optimizer_that_the_script_gives_is_no_fault_of_a_configuration():
    config = {"train_batch_size": 4, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    found = deepspeed.report(config, world=2)
    assert found["zero_optimization.offload_optimizer.device"].verdict == "no effect here" and found.plan is not None
