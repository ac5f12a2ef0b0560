"""Every name that documents say of DeepSpeed's interface is here, of the same kind, with DeepSpeed's own arguments in their order."""

import inspect

import deepspeed_interface
import pytest
import torch
from sweeps import sweep
from torch import nn

import zgraph.deepspeed as deepspeed
from zgraph.deepspeed import zero
from zgraph.deepspeed.pipe.module import Options
from zgraph.errors import PlanError, UnsupportedError

ENGINE = """forward backward step no_sync train eval save_checkpoint load_checkpoint save_16bit_model save_fp16_model
 get_global_grad_norm get_lr get_mom is_gradient_accumulation_boundary set_gradient_accumulation_boundary
 gradient_accumulation_steps train_micro_batch_size_per_gpu train_batch_size set_train_batch_size set_train_micro_batch_size get_batch_info
 zero_optimization_stage zero_optimization fp16_enabled bfloat16_enabled loss_scale dynamic_loss_scale communication_data_type
 state_dict load_state_dict module_state_dict load_module_state_dict destroy compile zero_grad deepspeed_io was_step_applied
 gradient_clipping steps_per_print wall_clock_breakdown"""
COLLECTIVES = """all_reduce all_gather all_gather_into_tensor all_gather_coalesced all_gather_object reduce_scatter reduce_scatter_tensor
 reduce_scatter_fn allgather_fn reduce broadcast broadcast_object_list all_to_all all_to_all_single gather scatter send recv isend irecv barrier
 monitored_barrier all_reduce_coalesced inference_all_reduce batch_isend_irecv init_distributed configure log_summary reset_log
 get_rank get_world_size get_local_rank get_world_group get_global_rank get_all_ranks_from_group new_group destroy_process_group is_initialized
 is_available has_all_gather_into_tensor has_reduce_scatter_tensor has_all_reduce_coalesced has_coalescing_manager initialize_mesh_device"""
PIPELINE = "train_batch eval_batch set_dataiterator set_dataloader set_batch_fn is_first_stage is_last_stage"
PIPELINE += " reset_activation_shape set_has_attention_mask get_additional_losses get_pipeline_parallel_rank"
GRID = """topology stage_to_global get_stage_id get_data_parallel_id get_pipe_parallel_rank get_pipe_parallel_world_size get_pipe_parallel_group
 get_data_parallel_rank get_data_parallel_world_size get_data_parallel_group get_data_parallel_group_ranks get_model_parallel_rank
 get_model_parallel_world_size get_model_parallel_group get_slice_parallel_rank get_slice_parallel_world_size get_slice_parallel_group"""
SCHEDULERS = ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"]
OPTIMIZERS = [
    "ops.adam.FusedAdam",
    "ops.adam.DeepSpeedCPUAdam",
    "ops.lamb.FusedLamb",
    "ops.lion.FusedLion",
    "ops.lion.DeepSpeedCPULion",
    "ops.adagrad.DeepSpeedCPUAdagrad",
]
NAMES = [
    "initialize",
    "add_config_arguments",
    "zero.Init",
    "zero.GatheredParameters",
    "zero.register_external_parameter",
    "checkpointing.checkpoint",
    "checkpointing.configure",
    "checkpointing.is_configured",
    "checkpointing.get_cuda_rng_tracker",
    "checkpointing.model_parallel_cuda_manual_seed",
    "checkpointing.model_parallel_reconfigure_tp_seed",
    "checkpointing.non_reentrant_checkpoint",
    "checkpointing.partition_activations_in_checkpoint",
    "checkpointing.set_num_layers",
    "checkpointing.reset",
    "utils.log_dist",
    "utils.RepeatingLoader",
    "utils.OnDevice",
    "runtime.utils.memory_status",
    "runtime.utils.see_memory_usage",
    "runtime.zero.stage3.estimate_zero3_model_states_mem_needs_all_live",
    "runtime.zero.stage3.estimate_zero3_model_states_mem_needs_all_cold",
    "runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs_all_live",
    "runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs_all_cold",
    "profiling.flops_profiler.get_model_profile",
    "utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint",
    "utils.zero_to_fp32.load_state_dict_from_zero_checkpoint",
    "utils.zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict",
    "pipe.PipelineModule",
    "pipe.LayerSpec",
    "pipe.TiedLayerSpec",
    "runtime.pipe.topology.ProcessTopology",
    "runtime.pipe.topology.PipeModelDataParallelTopology",
    "runtime.pipe.topology.PipeDataParallelTopology",
    "runtime.pipe.topology.PipelineParallelGrid",
    *OPTIMIZERS,
    *(
        f"utils.safe_{verb}_{part}_{what}"
        for verb in ("get", "set")
        for part in ("full", "local")
        for what in ("fp32_param", "grad", "optimizer_state")
    ),
    *(f"comm.{name}" for name in COLLECTIVES.split()),
    *(f"runtime.lr_schedules.{name}" for name in SCHEDULERS),
    *(f"runtime.lr_schedules.{name}.{method}" for name in SCHEDULERS for method in ("step", "get_lr", "get_last_lr")),
    *(f"runtime.engine.DeepSpeedEngine.{name}" for name in ENGINE.split()),
    *(f"runtime.pipe.engine.PipelineEngine.{name}" for name in PIPELINE.split()),
    *(f"runtime.pipe.topology.PipelineParallelGrid.{name}" for name in GRID.split()),
]
OTHERWISE: dict[
    str, set[str]
] = {}  # the names of DeepSpeed's arguments that are other ones here, or that nothing can come of
OF_OPTIONS = {  # what takes its arguments as **options, and the options that it knows
    "zero.Init": set(zero._OPTIONS),
    "pipe.PipelineModule": set(Options.__dataclass_fields__),
}


@pytest.fixture(scope="module")
def theirs(deepspeeds):
    """DeepSpeed's arguments of each name."""
    return deepspeeds.run(deepspeed_interface.of_deepspeed, NAMES)[0]


def problem(path, takes):
    """What is wrong with a name, if DeepSpeed's takes these arguments."""
    try:
        own = deepspeed_interface.named(deepspeed, path)
    except (AttributeError, ModuleNotFoundError) as error:
        return str(error)
    if takes is None or not callable(own):
        return None if takes is None and not callable(own) else "another kind"
    parameters = {n: p for n, p in inspect.signature(own).parameters.items() if n != "self"}
    options = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    places = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    known = OF_OPTIONS.get(path, takes.keys() if options else set()) | parameters.keys() | OTHERWISE.get(path, set())
    lost = [name for name in takes if name not in known]
    shared = [name for name in takes if name in places]
    order = [name for name in places if name in shared] != shared
    return f"does not take {lost}" if lost else "another order" if order else None


def test_every_name_is_there_with_deepspeeds_arguments(theirs):
    problems = {path: said for path in NAMES if (said := problem(path, theirs[path]))}
    assert not problems


@pytest.mark.parametrize("path", OPTIMIZERS)
def test_optimizers_take_deepspeeds_arguments_by_name_and_by_place(theirs, path):
    _, *named = theirs[path].items()
    assert len(named) > 3
    kind = deepspeed_interface.named(deepspeed, path)
    weights = [nn.Parameter(torch.zeros(2))]
    defaults = kind(weights).defaults
    assert kind(weights, **dict(named)).defaults == defaults
    assert kind(weights, *(value for _, value in named)).defaults == defaults
    assert all(defaults[name] == value for name, value in named if name in ("lr", "betas", "eps", "weight_decay"))


@pytest.mark.parametrize(
    "path, options",
    [("ops.lamb.FusedLamb", {"max_grad_norm": 1.0}), ("ops.lamb.FusedLamb", {"eps_inside_sqrt": True})]
    + [(path, {"fp32_optimizer_states": False}) for path in OPTIMIZERS if "CPU" in path],
)
def test_what_an_optimizer_can_not_have_is_refused_by_name(path, options):
    (name,) = options
    with pytest.raises(PlanError, match=f"does not support {name}=") as caught:
        deepspeed_interface.named(deepspeed, path)([nn.Parameter(torch.zeros(2))], **options)
    assert caught.value.where == name and caught.value.hint


@pytest.mark.parametrize("kind", ["AdamW", "Lamb", "Lion", "Adagrad"])
def test_a_configurations_optimizer_has_deepspeeds_defaults(theirs, kind):
    path = {"AdamW": "ops.adam.FusedAdam", "Adagrad": "ops.adagrad.DeepSpeedCPUAdagrad"}.get(
        kind, f"ops.{kind.lower()}.Fused{kind}"
    )
    record = deepspeed.plan({"optimizer": {"type": kind}}, world=1).plan.optimizer
    assert {name: getattr(record, name, value) for name, value in theirs[path].items()} == theirs[path]
    given = {"optimizer": {"type": kind, "params": {"fp32_optimizer_states": True}}}
    assert deepspeed.plan(given, world=1).plan.optimizer == record
    given["optimizer"]["params"]["fp32_optimizer_states"] = False
    with pytest.raises(PlanError, match="fp32_optimizer_states"):
        deepspeed.plan(given, world=1)


NEEDED = {"total_num_steps": 10, "warmup_num_steps": 5, "warmup_max_lr": 0.1, "cycle_min_lr": 0.1, "cycle_max_lr": 0.2}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_take_deepspeeds_arguments_by_name_and_by_place(theirs, name):
    _, *named = theirs[f"runtime.lr_schedules.{name}"].items()
    values = {key: NEEDED.get(key, value) for key, value in named}
    rates = []
    for args, kwargs in (
        ((), values),
        (values.values(), {}),
        ((), {key: value for key, value in values.items() if key in NEEDED}),
    ):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
        scheduler = getattr(deepspeed.runtime.lr_schedules, name)(optimizer, *args, **kwargs)
        scheduler.step()
        scheduler.step(4)
        rates.append(scheduler.get_last_lr())
    assert rates[0] == rates[1] == rates[2]


SAID = """
 amp_enabled autotp_size autotuning_enabled bfloat16_enabled checkpoint_tag_validation_enabled communication_data_type
 curriculum_learning_enabled data_efficiency_enabled dataloader_drop_last dump_state dynamic_loss_scale elasticity_enabled fp16_auto_cast
 flops_profiler_detailed flops_profiler_enabled flops_profiler_module_depth flops_profiler_output_file flops_profiler_profile_step
 flops_profiler_recompute_fwd_factor flops_profiler_top_modules fp16_enabled get_lr get_mom global_rank global_samples global_steps
 gradient_accumulation_steps gradient_clipping gradient_predivide_factor initial_dynamic_scale is_gradient_accumulation_boundary
 is_sanity_checks_enabled load_universal_checkpoint local_rank loss_scale memory_breakdown micro_steps optimizer_name postscale_gradients
 random_ltd_enabled scheduler_name scheduler_params skipped_steps steps_per_print torch_autocast_enabled train_batch_size
 train_micro_batch_size_per_gpu use_node_local_storage wall_clock_breakdown world_size zero_allgather_bucket_size
 zero_allgather_partitions zero_allow_untested_optimizer zero_contiguous_gradients zero_cpu_offload zero_elastic_checkpoint
 zero_force_ds_cpu_optimizer zero_gather_16bit_weights_on_model_save zero_hpz_partition_size zero_ignore_unused_parameters zero_legacy_stage1
 zero_load_from_fp32_weights zero_max_live_parameters zero_max_reuse_distance zero_model_persistence_threshold
 zero_module_granularity_threshold zero_multi_rank_bucket_allreduce zero_offload_optimizer zero_offload_param zero_optimization
 zero_optimization_partition_gradients zero_optimization_partition_weights zero_optimization_stage zero_overlap_comm
 zero_param_persistence_threshold zero_prefetch_bucket_size zero_quantized_gradients zero_quantized_nontrainable_weights
 zero_quantized_weights zero_reduce_bucket_size zero_reduce_scatter zero_round_robin_gradients zero_sub_group_size
 bf16_master_weights_and_gradients checkpoint_tag_validation_enabled cpuadam_cores_perc dist_backend dp_world_size dynamic_loss_scale_args
 enable_backward_allreduce fp16_master_weights_and_gradients get_type gradient_average has_moe_layers inside_no_sync_ctxt is_deepcompile_active
 mp_world_size mpu pipeline_parallelism seq_dp_world_size sequence_parallel_size super_offload torch_autocast_dtype training_data use_ds_comm
 zero_nvme_offload_optimizer zero_parameter_alignment zero_partial_offload zero_save_muon_momentum_buffer_in_memory zero_use_cpu_optimizer"""
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
WARM = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.01}}


@sweep(
    "config",
    [
        {
            "train_batch_size": 8,
            **ADAM,
            "zero_optimization": {"stage": 2},
            "bf16": {"enabled": True},
            "scheduler": WARM,
        },
        {
            "train_micro_batch_size_per_gpu": 2,
            **ADAM,
            "zero_optimization": {"stage": 3},
            "gradient_clipping": 0.5,
            "steps_per_print": 7,
        },
        {
            "train_micro_batch_size_per_gpu": 2,
            **ADAM,
            "fp16": {"enabled": True, "initial_scale_power": 8},
            "wall_clock_breakdown": True,
        },
        {"train_batch_size": 12, "gradient_accumulation_steps": 3, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    ],
    quick=1,
    ids=["bf16, stage 2", "stage 3", "fp16, stage 0", "SGD"],
)
def test_an_engine_says_of_itself_what_deepspeeds_says(two, deepspeeds, config):
    mine = two.run(deepspeed_interface.answers, "zgraph", config, SAID.split())
    theirs = deepspeeds.run(deepspeed_interface.answers, "deepspeed", config, SAID.split())
    for own, other in zip(mine, theirs, strict=True):
        assert len(other) > 60
        assert {name: (own[name], value) for name, value in other.items() if own[name] != value} == {}


def test_what_deepspeed_has_and_zgraph_has_not_is_named_with_what_to_do():
    for name in ("moe", "DeepSpeedHybridEngine", "sequence", "DeepSpeedConfig"):
        with pytest.raises(AttributeError, match=f"zgraph.deepspeed has no {name}, which DeepSpeed has: "):
            getattr(deepspeed, name)
    assert deepspeed.dist is deepspeed.comm and deepspeed.logger is deepspeed.utils.logger
    with pytest.raises(UnsupportedError, match=r"utils\.groups\.get_data_parallel_group"):
        deepspeed.utils.groups.get_data_parallel_group()
