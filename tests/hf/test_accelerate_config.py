"""A file of `accelerate config` is a plan, and each of its keys is told."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import yaml
from sweeps import sweep
from typer.testing import CliRunner

import zgraph
from zgraph.cli.app import app
from zgraph.errors import PlanError
from zgraph.hf.accelerate_config import report
from zgraph.hf.accelerate_config.keys import KEYS

MACHINE = {"compute_environment": "LOCAL_MACHINE", "num_machines": 1, "num_processes": 8, "machine_rank": 0}
FSDP1 = {
    "fsdp_version": 1, "fsdp_sharding_strategy": "FULL_SHARD", "fsdp_offload_params": False,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": "GPT2Block",
    "fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_forward_prefetch": False, "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_use_orig_params": True, "fsdp_cpu_ram_efficient_loading": True, "fsdp_sync_module_states": True,
    "fsdp_activation_checkpointing": True,
}  # fmt: skip
FSDP2 = {"fsdp_version": 2, "fsdp_reshard_after_forward": True}


def deepspeed(**section):
    return {**MACHINE, "distributed_type": "DEEPSPEED", "deepspeed_config": section}


def fsdp(version=2, **section):
    return {**MACHINE, "distributed_type": "FSDP", "fsdp_config": {**(FSDP1 if version == 1 else FSDP2), **section}}


@pytest.fixture
def told(tmp_path):
    """The report on a file with these keys."""

    def write(given, **options):
        file = tmp_path / "accelerate.yaml"
        file.write_text(given if isinstance(given, str) else yaml.safe_dump(given))
        return report(file, **options).report

    return write


def leaves(table, prefix=""):
    for name, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name


# -- plans ------------------------------------------------------------------------------------------------------------------
def test_a_deepspeed_section_of_stage_3_is_a_plan(told):
    given = deepspeed(
        zero_stage=3, offload_param_device="nvme", offload_param_nvme_path="/disk", gradient_accumulation_steps=4,
        gradient_clipping=0.5, zero3_init_flag=True, zero3_save_16bit_model=True, deepspeed_multinode_launcher="pdsh",
    )  # fmt: skip
    found = told({**given, "mixed_precision": "bf16", "debug": True})
    plan = found.plan
    assert (plan.zero, plan.mesh, plan.precision, plan.numerics) == (3, {"dp": 8}, "bf16", "deepspeed")
    assert plan.offload.parameters == "nvme:/disk" and plan.micro_batches == 4 and plan.grad_clip.norm == 0.5
    assert {row.key for row in found.rows if not row.implied} >= set(leaves(given)) | {"mixed_precision", "debug"}
    assert found["deepspeed_config.zero_stage"].said == "zero = 3" and found["deepspeed_config.zero_stage"].value == 3
    assert found["deepspeed_config.zero3_init_flag"].verdict == "no effect here"
    assert found["deepspeed_config.zero3_save_16bit_model"].verdict == "equivalent"
    assert json.loads(json.dumps(found.to_json()))["plan"]["zero"] == 3


def test_an_optimizer_that_the_file_does_not_have_is_not_offloaded_and_that_is_told(told):
    row = told(deepspeed(zero_stage=2, offload_optimizer_device="cpu"))["deepspeed_config.offload_optimizer_device"]
    assert row.verdict == "no effect here" and 'offload = {optimizer = "cpu"}' in row.said


def test_defaults_are_accelerates(told):
    found = told(deepspeed(gradient_accumulation_steps=1))
    assert found.plan.zero == 2 and found.plan.grad_clip.norm == 1.0
    assert found["deepspeed_config.zero_stage"].implied and found["deepspeed_config.gradient_clipping"].implied
    found = told({**MACHINE, "distributed_type": "FSDP", "fsdp_config": {"fsdp_auto_wrap_policy": "NO_WRAP"}})
    assert found.plan.zero == 3 and "accelerate's default" in found["fsdp_config.fsdp_sharding_strategy"].said


@pytest.mark.parametrize(
    ("strategy", "zero", "mesh"),
    [
        ("FULL_SHARD", 3, {"dp": 8}),
        ("SHARD_GRAD_OP", 2, {"dp": 8}),
        ("NO_SHARD", 0, {"dp": 8}),
        ("HYBRID_SHARD", 3, {"replicate": 2, "dp": 4}),
        ("_HYBRID_SHARD_ZERO2", 2, {"replicate": 2, "dp": 4}),
        (2, 2, {"dp": 8}),
        ("4", 3, {"replicate": 2, "dp": 4}),
    ],
)
def test_each_strategy_of_fsdp_1_is_a_stage_and_a_mesh(told, strategy, zero, mesh):
    given = {**fsdp(1, fsdp_sharding_strategy=strategy), "num_machines": 2, "mixed_precision": "bf16"}
    found = told(given)
    assert (found.plan.zero, found.plan.mesh) == (zero, mesh)
    assert (found.plan.precision, found.plan.numerics, found.plan.recompute) == ("bf16", "fsdp2", "full")
    assert {row.key for row in found.rows if not row.implied} >= set(leaves(given))


def test_the_key_that_accelerate_itself_does_not_read_for_fsdp_1_is_read_and_told(told):
    section = {k: v for k, v in FSDP1.items() if k != "fsdp_sharding_strategy"}
    given = {
        **MACHINE,
        "distributed_type": "FSDP",
        "fsdp_config": {**section, "fsdp_reshard_after_forward": "SHARD_GRAD_OP"},
    }
    found = told(given)
    assert found.plan.zero == 2 and "trains FULL_SHARD" in found["fsdp_config.fsdp_reshard_after_forward"].said


@pytest.mark.parametrize(("reshard", "zero"), [(True, 3), (False, 2), ("true", 3), ("no", 2)])
def test_fsdp_2_reshards_or_does_not(told, reshard, zero):
    found = told(fsdp(fsdp_reshard_after_forward=reshard, fsdp_state_dict_type="FULL_STATE_DICT"))
    assert found.plan.zero == zero and found["fsdp_config.fsdp_state_dict_type"].verdict == "no effect here"


def test_what_fsdp_2_offloads_and_recomputes(told):
    section = {
        "fsdp_offload_params": True,
        "fsdp_activation_checkpointing": True,
        "fsdp_activation_checkpointing_offload": True,
    }
    plan = told(fsdp(**section)).plan
    assert (plan.offload.parameters, plan.offload.activations, plan.recompute) == ("cpu", "cpu", "full")


def test_ranks_that_divide_more_than_data(told):
    sizes = {"dp_replicate_size": 2, "dp_shard_size": 2, "cp_size": 2, "tp_size": 1}
    given = {**fsdp(), "parallelism_config": {f"parallelism_config_{k}": v for k, v in sizes.items()}}
    found = told(given)
    assert found.plan.mesh == {"replicate": 2, "dp": 2, "cp": 2} and found.plan.context_attention == "ring"
    given["parallelism_config"] = {"parallelism_config_tp_size": 2, "parallelism_config_dp_shard_size": 4}
    assert told(given).plan.mesh == {"dp": 4, "tp": 2}
    given = {
        **deepspeed(zero_stage=3),
        "parallelism_config": {"parallelism_config_sp_size": 2, "parallelism_config_dp_shard_size": 4},
    }
    found = told(given)
    assert found.plan.mesh == {"dp": 4, "cp": 2} and found.plan.context_attention == "heads"
    assert found["parallelism_config.parallelism_config_sp_size"].verdict == "applied"


def test_without_a_section_each_rank_has_all_weights(told):
    plan = told({**MACHINE, "distributed_type": "MULTI_GPU", "mixed_precision": "bf16"}).plan
    assert (plan.zero, plan.mesh, plan.precision, plan.numerics) == (0, {"dp": 8}, "bf16", None)
    found = told(
        {**MACHINE, "distributed_type": "MULTI_CPU", "mixed_precision": "fp16", "dynamo_config": {"backend": "EAGER"}}
    )
    scale = found.plan.loss_scale()
    assert (scale.loss_scale_window, scale.hysteresis, found.plan.backend) == (2000, 1, "eager")
    found = told("distributed_type: NO\nmixed_precision: no\nnum_processes: 8\n")  # (YAML reads both as false)
    assert found.plan.mesh == {"dp": 1} and found["num_processes"].verdict == "no effect here"


def test_a_section_that_accelerate_does_not_read_has_no_effect(told):
    given = {**fsdp(), "distributed_type": "MULTI_GPU", "deepspeed_config": {"zero_stage": 3}}
    found = told(given)
    rows = [row for row in found.rows if row.key.startswith(("fsdp_config.", "deepspeed_config."))]
    assert len(rows) == 3 and {row.verdict for row in rows} == {"no effect here"} and found.plan.zero == 0


def test_the_number_of_ranks_may_be_another(told):
    found = told({**deepspeed(zero_stage=3), "num_processes": -1}, world=4)
    assert found.plan.mesh == {"dp": 4} and found["num_processes"].verdict == "no effect here"


# -- a DeepSpeed file -------------------------------------------------------------------------------------------------------
DS = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2,
    "gradient_clipping": "auto", "zero_optimization": {"stage": 3, "overlap_comm": True, "stage3_gather_16bit_weights_on_model_save": "auto"},
    "fp16": {"enabled": False},
}  # fmt: skip


def test_a_deepspeed_file_is_read_with_what_accelerate_fills(told, tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(DS))
    found = told(deepspeed(deepspeed_config_file="ds.json", zero3_init_flag=False))
    plan = found.plan
    assert (plan.zero, plan.micro_batches, plan.grad_clip.norm, plan.prefetch.enabled) == (3, 2, 1.0, True)
    assert found["ds.json: zero_optimization.stage"].said == "zero = 3"
    assert found["ds.json: train_micro_batch_size_per_gpu"].verdict == "no effect here"
    assert {row.key for row in found.rows} >= {f"ds.json: {key}" for key in leaves(DS)}


def test_keys_beside_a_deepspeed_file_are_refused_as_accelerate_does(told, tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(DS))
    found = told({**deepspeed(deepspeed_config_file="ds.json", zero_stage=3), "mixed_precision": "bf16"})
    assert {row.key for row in found.refused} == {"deepspeed_config.zero_stage", "mixed_precision"}
    (tmp_path / "ds.json").write_text(json.dumps({**DS, "zero_optimizaton": {"stage": 2}}))
    found = told(deepspeed(deepspeed_config_file="ds.json"))
    assert [row.key for row in found.refused] == ["ds.json: zero_optimizaton"]
    assert "zero_optimization" in found.refused[0].hint
    assert told(deepspeed(deepspeed_config_file="none.json")).refused[0].key == "deepspeed_config.deepspeed_config_file"


# -- what is refused --------------------------------------------------------------------------------------------------------
WRONG = [
    ("fsdp_config.fsdp_sharding_stratgy", fsdp(fsdp_sharding_stratgy="FULL_SHARD"), "fsdp_sharding_strategy"),
    (
        "fsdp_config.fsdp_backward_prefetch_policy",
        fsdp(1, fsdp_backward_prefetch_policy="BACKWARD_PRE"),
        "fsdp_backward_prefetch",
    ),
    ("deepspeed_config.zero_stages", deepspeed(zero_stages=3), "zero_stage"),
    ("mixed_precison", {**deepspeed(zero_stage=3), "mixed_precison": "bf16"}, "mixed_precision"),
    ("deepspeed_config.zero_stage", deepspeed(zero_stage=4), "0, 1, 2 or 3"),
    ("deepspeed_config.zero_stage", deepspeed(zero_stage="three"), "whole number"),
    ("deepspeed_config.offload_param_device", deepspeed(zero_stage=2, offload_param_device="cpu"), "stage 3"),
    ("deepspeed_config.offload_param_device", deepspeed(zero_stage=3, offload_param_device="nvme"), "nvme_path"),
    ("deepspeed_config.offload_optimizer_device", deepspeed(zero_stage=3, offload_optimizer_device="gpu"), '"cpu"'),
    ("deepspeed_config.gradient_accumulation_steps", deepspeed(gradient_accumulation_steps=0), "1 or more"),
    ("deepspeed_config.gradient_clipping", deepspeed(gradient_clipping=-1.0), "above 0"),
    ("fsdp_config.fsdp_version", fsdp(fsdp_version=3), "1 or 2"),
    ("fsdp_config.fsdp_sharding_strategy", fsdp(1, fsdp_sharding_strategy="FULL_SHRAD"), "FULL_SHARD"),
    ("fsdp_config.fsdp_sharding_strategy", fsdp(1, fsdp_sharding_strategy=6), "FULL_SHARD"),
    ("fsdp_config.fsdp_reshard_after_forward", fsdp(fsdp_reshard_after_forward="FULL_SHARD"), "true for FULL_SHARD"),
    ("fsdp_config.fsdp_offload_params", fsdp(fsdp_reshard_after_forward=False, fsdp_offload_params=True), "FULL_SHARD"),
    ("fsdp_config.fsdp_auto_wrap_policy", fsdp(fsdp_auto_wrap_policy="TRANSFORMER_WRAP"), "TRANSFORMER_BASED_WRAP"),
    ("fsdp_config.fsdp_backward_prefetch", fsdp(1, fsdp_backward_prefetch="BACKWARD"), "BACKWARD_P"),
    ("fsdp_config.fsdp_state_dict_type", fsdp(fsdp_state_dict_type="LOCAL_STATE_DICT"), "SHARDED_STATE_DICT"),
    ("fsdp_config.fsdp_activation_checkpointing", fsdp(fsdp_activation_checkpointing="perhaps"), "true or false"),
    (
        "fsdp_config.fsdp_activation_checkpointing_offload",
        fsdp(fsdp_activation_checkpointing_offload=True),
        "fsdp_version: 2",
    ),
    ("fsdp_config.fsdp_ignored_modules", fsdp(fsdp_ignored_modules=".*embed.*"), "leave it out"),
    ("mixed_precision", {**fsdp(), "mixed_precision": "fp8"}, "bf16"),
    ("mixed_precision", {**fsdp(), "mixed_precision": "bf61"}, "bf16"),
    ("distributed_type", {**MACHINE, "distributed_type": "FDSP"}, "FSDP"),
    ("distributed_type", {**MACHINE, "distributed_type": "MEGATRON_LM"}, '"tp": 4'),
    ("distributed_type", {**MACHINE, "distributed_type": "XLA"}, "MULTI_GPU"),
    ("distributed_type", MACHINE, "FSDP"),
    ("num_processes", {**fsdp(), "num_processes": -1}, "--world"),
    ("num_machines", {**fsdp(1, fsdp_sharding_strategy="HYBRID_SHARD"), "num_machines": 3}, "another number"),
    ("compute_environment", {**fsdp(), "compute_environment": "AMAZON_SAGEMAKER"}, "LOCAL_MACHINE"),
    ("dynamo_config.dynamo_backend", {**fsdp(), "dynamo_config": {"dynamo_backend": "TENSORRT"}}, "INDUCTOR"),
    (
        "parallelism_config.parallelism_config_tp_size",
        {**fsdp(), "parallelism_config": {"parallelism_config_tp_size": 2}},
        "product",
    ),
    (
        "parallelism_config.parallelism_config_cp_size",
        {**fsdp(1), "parallelism_config": {"parallelism_config_cp_size": 8}},
        "fsdp_version: 2",
    ),
    (
        "parallelism_config.parallelism_config_sp_size",
        {**fsdp(), "parallelism_config": {"parallelism_config_sp_size": 8}},
        "cp_size",
    ),
]


@pytest.mark.parametrize(("key", "given", "remedy"), WRONG, ids=[f"{key}-{n}" for n, (key, *_) in enumerate(WRONG)])
def test_what_is_wrong_is_refused_with_key_reason_and_remedy(told, key, given, remedy):
    found = told(given)
    rows = {row.key: row for row in found.refused}
    assert key in rows, str(found)
    assert found.plan is None and rows[key].said and remedy in f"{rows[key].said}; {rows[key].hint}", str(rows[key])
    with pytest.raises(PlanError):
        found.require_plan()


def test_a_file_that_cannot_be_read_is_refused(told, tmp_path):
    with pytest.raises(PlanError, match="no such configuration of accelerate"):
        report(tmp_path / "missing.yaml")
    with pytest.raises(PlanError, match="given twice"):
        told("distributed_type: FSDP\ndistributed_type: DEEPSPEED\n")
    with pytest.raises(PlanError, match="given twice"):
        told({**MACHINE, "distributed_type": "FSDP", "fsdp_config": {"version": 2, "fsdp_version": 1}})


ODD = (None, [], {}, True, 0, -1, 2, 3.5, float("nan"), "x", "no", {"a": 1})


@sweep("kind", ["DEEPSPEED", "FSDP"], quick=1)
def test_no_value_of_any_key_crashes_or_is_passed_over(told, kind, tmp_path):
    for name in KEYS:
        for value in ODD:
            given = {**MACHINE, "distributed_type": kind}
            *outer, last = name.split(".")
            table = given
            for part in outer:
                table = table.setdefault(part, {})
            table[last] = value
            found = told(json.dumps(given) if value == value else yaml.safe_dump(given))
            rows = {row.key for row in found.rows}
            if found.plan is None:
                assert found.refused, (name, value)
            elif value is not None and value != {}:
                assert name in rows or any(row.startswith(f"{name}.") for row in rows), (name, value)


# -- accelerate itself, and what it ships -----------------------------------------------------------------------------------
def test_the_table_has_every_key_that_accelerate_has():
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    sections = {name for name, key in KEYS.items() if key.kind == "table"}
    assert {name for name in ClusterConfig.__dataclass_fields__} <= KEYS.keys()
    ours = {name.split(".")[1] for name in KEYS if "." in name}
    arguments = {action.dest for action in launch_command_parser()._actions}
    prefixes = ("fsdp_", "parallelism_config_", "deepspeed_", "zero", "offload_", "gradient_", "dynamo_")
    theirs = {name for name in arguments if name.startswith(prefixes)}
    assert theirs - ours == set() and {"fsdp_config", "deepspeed_config"} <= sections


TRL = importlib.util.find_spec("trl")


@pytest.mark.skipif(TRL is None, reason="TRL's files are read")
@pytest.mark.parametrize(
    ("name", "zero"),
    [("zero1", 1), ("zero2", 2), ("zero3", 3), ("fsdp1", 3), ("fsdp2", 3), ("multi_gpu", 0), ("single_gpu", 0)],
)
def test_the_files_that_trl_ships_are_plans(name, zero):
    file = Path(TRL.origin).parent / "accelerate_configs" / f"{name}.yaml"
    found, world = report(file)
    assert found.plan.zero == zero and found.plan.precision == "bf16" and world == (1 if name == "single_gpu" else 8)
    assert {row.key for row in found.rows if not row.implied} >= set(leaves(yaml.safe_load(file.read_text())))


# -- the command line -------------------------------------------------------------------------------------------------------
def test_the_command_shows_the_report_and_writes_the_plan(tmp_path):
    path, written = tmp_path / "fsdp.yaml", tmp_path / "plan.toml"
    path.write_text(yaml.safe_dump(fsdp()))
    shown = CliRunner().invoke(app, ["plan", "--from-accelerate", str(path), "-o", str(written)])
    assert shown.exit_code == 0, shown.output
    assert "fsdp_config.fsdp_reshard_after_forward = true: zero = 3" in shown.output and "8 rank(s)" in shown.output
    assert zgraph.Plan.load(written) == report(path).report.plan
    path.write_text(yaml.safe_dump(fsdp(fsdp_versions=2)))
    wrong = CliRunner().invoke(app, ["plan", "--from-accelerate", str(path), "--json"])
    assert wrong.exit_code == 1 and json.loads(wrong.output)["plan"] is None
    both = CliRunner().invoke(app, ["plan", "--from-accelerate", str(path), "--from-deepspeed", str(path)])
    assert both.exit_code == 2
