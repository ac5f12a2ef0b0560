"""Every key of a DeepSpeed configuration, and how zgraph treats it.

The keys are those of DeepSpeed 0.19.8, and those that 0.19.6 was the last to have (1-bit optimizers, sparse attention,
elasticity, MiCS, curricula). A key that `zgraph.deepspeed.translate` makes into fields of a plan is `APPLIED` here;
every other key has a reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["bool", "int", "number", "positive", "text", "list", "table", "any"]
Verdict = Literal["applied", "equivalent", "no effect here", "refused"]


@dataclass(frozen=True)
class Key:
    """One key: the values that it takes, and how zgraph treats it."""

    kind: Kind  # the type of its values
    verdict: Verdict  # how zgraph treats it
    why: str = ""  # the reason for the verdict
    hint: str = ""  # what to do about a refused value
    default: Any = None  # the value that a refused key may still have, since it asks for nothing

    @property
    def whole(self) -> bool:
        """Whether it is a section that is judged as one, together with all keys in it."""
        return self.kind == "table" and self.verdict != "applied"


def _applied(kind: Kind) -> Key:
    return Key(kind, "applied")


def _same(kind: Kind, why: str) -> Key:
    return Key(kind, "equivalent", why)


def _nothing(kind: Kind, why: str) -> Key:
    return Key(kind, "no effect here", why)


def _refused(kind: Kind, why: str, hint: str, default: Any = None) -> Key:
    return Key(kind, "refused", why, hint, default)


def _each(section: str, keys: dict[str, Kind], make: Any) -> dict[str, Key]:
    return {f"{section}.{name}": make(kind) for name, kind in keys.items()}


_GRAPH = "the program is one graph: its passes decide this, and the verifier checks it"
_PLACED = "the run time chooses it; host memory is pinned where the device is a GPU"
_DISK = "offload.threads and the sub-groups' size say how a disk is read and written"
_LOGGED = "the engine of initialize writes it; a plan alone logs nothing"
_PROFILED = "model.zgraph.timings(), report() and zgraph timeline show it"
_GONE = "DeepSpeed has it no more since 0.19.8, and zgraph has nothing like it"
_LEAVE = "leave it out"

KEYS: dict[str, Key] = {
    # -- batch ------------------------------------------------------------------------------------------------------------
    "train_batch_size": _applied("int"),
    "train_micro_batch_size_per_gpu": _applied("int"),
    "gradient_accumulation_steps": _applied("int"),
    "managed_gradient_accumulation": _same("bool", "train_step accumulates, and no_sync() does in a loop of your own"),
    "dataloader_drop_last": _nothing("bool", "a plan has no data loader: tell yours"),
    # -- gradients --------------------------------------------------------------------------------------------------------
    "gradient_clipping": _applied("number"),
    "prescale_gradients": _nothing("bool", "a gradient is averaged once, in the dtype that it is reduced in"),
    "gradient_predivide_factor": _nothing(
        "positive", "a gradient is averaged once, in the dtype that it is reduced in"
    ),
    "gradient_allreduce_op": _refused(
        "text",
        "a plan averages gradients over ranks",
        "multiply the loss by the number of data-parallel ranks; initialize's engine does it, but a pipeline's",
        "mean",
    ),
    "communication_data_type": _applied("text"),
    "compress_communication": _applied("bool"),
    "seq_parallel_communication_data_type": _nothing(
        "text", "attention's exchanges between ranks have the dtype that is computed in"
    ),
    "disable_allgather": _nothing("bool", _GRAPH),
    "sparse_gradients": _nothing("bool", "embeddings' gradients are reduced as dense ones: the same numbers"),
    # -- precision --------------------------------------------------------------------------------------------------------
    "fp16": _applied("table"),
    "fp16.enabled": _applied("bool"),
    "fp16.auto_cast": _applied("bool"),
    "fp16.loss_scale": _applied("number"),
    "fp16.initial_scale_power": _applied("int"),
    "fp16.loss_scale_window": _applied("int"),
    "fp16.hysteresis": _applied("int"),
    "fp16.consecutive_hysteresis": _applied("bool"),
    "fp16.min_loss_scale": _applied("number"),
    "fp16.fp16_master_weights_and_grads": _refused(
        "bool", "updates are of fp32 master weights", "leave it out: the numbers are better, at 2 bytes more", False
    ),
    "bf16": _applied("table"),
    "bf16.enabled": _applied("bool"),
    "bf16.immediate_grad_update": _same("bool", "a gradient is reduced as soon as it is there"),
    "bf16.check_grad_overflow": _applied("bool"),
    "bf16.bf16_master_weights_and_grads": _refused(
        "bool", "updates are of fp32 master weights", "leave it out: the numbers are better, at 2 bytes more", False
    ),
    "bf16.bf16_optimizer_states": _applied("bool"),
    "amp": _refused(
        "table", "Apex's mixed precision changes the model's own functions", '"bf16": {"enabled": true}, or fp16'
    ),
    "torch_autocast": _applied("table"),
    "torch_autocast.enabled": _refused(
        "bool",
        "a plan has one precision, which is no context",
        "call the model inside torch.autocast, which is captured with it, or ask for bf16; initialize's engine does it for bfloat16, "
        "but a pipeline's",
        False,
    ),
    "torch_autocast.dtype": _nothing("text", "it belongs to autocast"),
    "torch_autocast.lower_precision_safe_modules": _nothing(
        "list", "DeepSpeed reduces the gradients of these modules in autocast's dtype; here they keep their own"
    ),
    "data_types": _applied("table"),
    "data_types.grad_accum_dtype": _applied("text"),
    "data_types.param_dtype": _refused(
        "text", "the precision says it", "ask for bf16 or fp16, or leave it out for fp32"
    ),
    "data_types.buffer_dtype": _applied("text"),
    "data_types.keep_in_fp32_modules": _applied("list"),
    # -- optimizer --------------------------------------------------------------------------------------------------------
    "optimizer": _applied("table"),
    "optimizer.type": _applied("text"),
    "optimizer.params": _applied("table"),
    "optimizer.legacy_fusion": _nothing("bool", "the update is one compiled program"),
    "scheduler": _applied("table"),
    "scheduler.type": _applied("text"),
    "scheduler.params": _applied("table"),
    "zero_allow_untested_optimizer": _same(
        "bool", "an optimizer of your own works on any stage, where its update is elementwise"
    ),
    "zero_force_ds_cpu_optimizer": _same("bool", "the update is compiled for where its states lie"),
    # -- ZeRO -------------------------------------------------------------------------------------------------------------
    "zero_optimization": _applied("table"),
    "zero_optimization.stage": _applied("int"),
    "zero_optimization.contiguous_gradients": _same("bool", _GRAPH),
    "zero_optimization.reduce_scatter": _same("bool", "gradients of sharded parameters are scattered"),
    "zero_optimization.reduce_bucket_size": _applied("number"),
    "zero_optimization.use_multi_rank_bucket_allreduce": _same("bool", _GRAPH),
    "zero_optimization.allgather_partitions": _same("bool", _GRAPH),
    "zero_optimization.allgather_bucket_size": _applied("number"),
    "zero_optimization.overlap_comm": _applied("bool"),
    "zero_optimization.compute_grad_norm": _same(
        "bool", "the norm is computed where the plan clips or shows it, or leaves out a step that is not finite"
    ),
    "zero_optimization.load_from_fp32_weights": _nothing(
        "bool", "checkpoints hold the fp32 master weights, and these are loaded, as DeepSpeed does by default"
    ),
    "zero_optimization.elastic_checkpoint": _same("bool", "every checkpoint loads on any number of ranks"),
    "zero_optimization.offload_param": _applied("table"),
    "zero_optimization.offload_param.device": _applied("text"),
    "zero_optimization.offload_param.nvme_path": _applied("text"),
    **_each(
        "zero_optimization.offload_param",
        {"buffer_count": "int", "buffer_size": "number", "max_in_cpu": "number", "pin_memory": "bool"},
        lambda kind: _nothing(kind, _PLACED),
    ),
    "zero_optimization.offload_optimizer": _applied("table"),
    "zero_optimization.offload_optimizer.device": _applied("text"),
    "zero_optimization.offload_optimizer.nvme_path": _applied("text"),
    "zero_optimization.offload_optimizer.ratio": _applied("number"),
    **_each(
        "zero_optimization.offload_optimizer",
        {
            "buffer_count": "int",
            "pin_memory": "bool",
            "pipeline": "bool",
            "pipeline_read": "bool",
            "pipeline_write": "bool",
            "fast_init": "bool",
            "cpuadam_cores_perc": "number",
            "super_offload": "bool",
        },
        lambda kind: _nothing(kind, _PLACED),
    ),
    "zero_optimization.zenflow": _refused(
        "table", "it updates some columns of the weights more often than others", "offload.delayed_after in a plan"
    ),
    "zero_optimization.sub_group_size": _applied("number"),
    "zero_optimization.stage3_prefetch_bucket_size": _applied("number"),
    "zero_optimization.stage3_param_persistence_threshold": _applied("number"),
    "zero_optimization.stage3_model_persistence_threshold": _nothing(
        "number", "stage3_param_persistence_threshold alone says what stays whole"
    ),
    "zero_optimization.stage3_max_live_parameters": _applied("number"),
    "zero_optimization.stage3_max_reuse_distance": _applied("number"),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _same(
        "bool", 'model.save_pretrained(…, dtype="bf16") writes them, and gathers nothing'
    ),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _same(
        "bool", 'model.save_pretrained(…, dtype="fp16") writes them, and gathers nothing'
    ),
    "zero_optimization.stage3_module_granularity_threshold": _nothing("number", _GRAPH),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _nothing("bool", _GRAPH),
    "zero_optimization.stage3_allgather_sequential": _nothing("bool", _GRAPH),
    "zero_optimization.ignore_unused_parameters": _same(
        "bool", "a parameter that a step does not reach has no gradient"
    ),
    "zero_optimization.legacy_stage1": _nothing("bool", _GRAPH),
    "zero_optimization.round_robin_gradients": _nothing("bool", _GRAPH),
    "zero_optimization.parameter_alignment": _nothing("any", _GRAPH),
    "zero_optimization.zero_hpz_partition_size": _applied("int"),
    "zero_optimization.zero_quantized_weights": _applied("bool"),
    "zero_optimization.zero_quantized_nontrainable_weights": _refused(
        "bool", "weights that are trained and others are gathered alike", "zero_quantized_weights, for both", False
    ),
    "zero_optimization.zero_quantized_gradients": _applied("bool"),
    "zero_optimization.memory_efficient_linear": _same("bool", "what the backward needs is decided in the graph"),
    "zero_optimization.pipeline_loading_checkpoint": _nothing("bool", "a rank reads the rows that it holds"),
    "zero_optimization.override_module_apply": _same("bool", "parameters keep their names and places"),
    "zero_optimization.log_trace_cache_warnings": _nothing(
        "bool", "there is no trace of modules: the order is the graph's"
    ),
    "zero_optimization.enable_sanity_checks": _same("bool", "each program is verified before it is compiled"),
    "zero_optimization.save_muon_momentum_buffer_in_memory": _nothing("bool", _PLACED),
    "zero_optimization.leaf_module": _applied("table"),
    **_each(
        "zero_optimization.leaf_module",
        {"classes": "list", "names": "list", "name_suffixes": "list"},
        lambda kind: _nothing(kind, _GRAPH),
    ),
    "zero_optimization.compress_communication": _applied("bool"),
    "zero_optimization.cpu_offload": _applied("bool"),
    "zero_optimization.cpu_offload_param": _applied("bool"),
    "zero_optimization.cpu_offload_use_pin_memory": _nothing("bool", _PLACED),
    "zero_optimization.mics_shard_size": _applied("int"),
    "zero_optimization.mics_hierarchical_params_gather": _nothing("bool", _GRAPH),
    "zero_optimization.zeropp_loco_param": _refused("table", _GONE, _LEAVE),
    # -- parallelism ------------------------------------------------------------------------------------------------------
    "tensor_parallel": _applied("table"),
    "tensor_parallel.autotp_size": _applied("int"),
    "tensor_parallel.tp": _applied("table"),
    "tensor_parallel.tp.tp_size": _applied("int"),
    "tensor_parallel.tp.tp_grain_size": _nothing("int", "a dimension is divided where the ranks divide it"),
    "tensor_parallel.dtype": _nothing("text", "the precision says it"),
    "tensor_parallel.tp_overlap_comm": _same(
        "bool", "async_tensor_parallel overlaps where that is forecast to be faster"
    ),
    "tensor_parallel.vocab_parallel_lm_head": _same(
        "bool", "the head and its loss are divided where the graph allows it"
    ),
    "tensor_parallel.vocab_parallel_ce_backend": _nothing("text", _GRAPH),
    "tensor_parallel.partition_config": _refused(
        "table", "it names weights by DeepSpeed's own rules", "a plan's tensor_parallel: a table of module patterns"
    ),
    "tensor_parallel.preset_model": _nothing("text", "which weights are divided is found in the graph"),
    "sequence_parallel_size": _applied("int"),
    "pipeline": _applied("table"),
    "pipeline.stages": _applied("any"),
    "pipeline.partition": _applied("text"),
    "pipeline.seed_layers": _nothing("bool", "each module is initialised by a seed of its own, whatever the stage"),
    "pipeline.activation_checkpoint_interval": _applied("int"),
    "pipeline.pipe_partitioned": _nothing("bool", "stages hand over what is there, divided or whole"),
    "pipeline.grad_partitioned": _nothing("bool", "stages hand over what is there, divided or whole"),
    "pipeline.use_reentrant": _nothing("bool", "recomputing is a pass, and enters nothing again"),
    "pipeline_parallel": _applied("table"),
    "pipeline_parallel.enabled": _applied("bool"),
    "pipeline_parallel.pp_size": _applied("int"),
    "pipeline_parallel.micro_batches": _applied("int"),
    "expert_parallel": _refused("table", "there is no expert parallelism here", _LEAVE),
    "use_data_before_expert_parallelism": _nothing("bool", "there is no expert parallelism here"),
    "data_parallel_group": _nothing("any", "the mesh says which ranks see different data"),
    "data_parallel_size": _nothing(
        "int", "data-parallel are the ranks that other sizes leave; DeepSpeed has no such key"
    ),
    # -- memory -----------------------------------------------------------------------------------------------------------
    "activation_checkpointing": _applied("table"),
    "activation_checkpointing.partition_activations": _applied("bool"),
    "activation_checkpointing.cpu_checkpointing": _applied("bool"),
    "activation_checkpointing.number_checkpoints": _nothing("int", "recompute in a plan says what is computed again"),
    "activation_checkpointing.contiguous_memory_optimization": _nothing("bool", _GRAPH),
    "activation_checkpointing.synchronize_checkpoint_boundary": _nothing("bool", _GRAPH),
    "activation_checkpointing.profile": _nothing("bool", _PROFILED),
    "aio": _applied("table"),
    **_each(
        "aio",
        {
            "block_size": "int",
            "queue_depth": "int",
            "intra_op_parallelism": "int",
            "single_submit": "bool",
            "overlap_events": "bool",
            "use_gds": "bool",
        },
        lambda kind: _nothing(kind, _DISK),
    ),
    "elasticity": _applied("table"),
    **_each(
        "elasticity",
        {
            "enabled": "bool",
            "max_train_batch_size": "int",
            "micro_batch_sizes": "list",
            "min_gpus": "int",
            "max_gpus": "int",
            "min_time": "number",
            "prefer_larger_batch": "bool",
            "ignore_non_elastic_batch_info": "bool",
            "version": "number",
            "num_gpus_per_node": "int",
            "model_parallel_size": "int",
        },
        _applied,
    ),
    # -- checkpoints ------------------------------------------------------------------------------------------------------
    "checkpoint": _applied("table"),
    "checkpoint.tag_validation": _applied("text"),
    "checkpoint.load_universal": _same("bool", "which kind a checkpoint is, is found when it is loaded"),
    "checkpoint.use_node_local_storage": _refused(
        "bool", "a checkpoint is one folder, which all ranks write", "save to a folder that all nodes share", False
    ),
    "checkpoint.parallel_write": _applied("table"),
    "checkpoint.parallel_write.pipeline_stage": _same("bool", "each rank writes what it holds"),
    # -- logs and tools ---------------------------------------------------------------------------------------------------
    "steps_per_print": _nothing("int", _LOGGED),
    "wall_clock_breakdown": _nothing("bool", _LOGGED),
    "memory_breakdown": _nothing("bool", _LOGGED),
    "dump_state": _nothing("bool", "print(plan) and zgraph dump show it"),
    "log_level": _nothing(
        "text", 'initialize sets its own logger so; of a plan alone, logging.getLogger("zgraph").setLevel(…)'
    ),
    "disable_python_gc": _nothing("bool", "call gc.disable() yourself"),
    "comms_logger": _applied("table"),
    **_each(
        "comms_logger",
        {"enabled": "bool", "verbose": "bool", "prof_all": "bool", "debug": "bool", "prof_ops": "list"},
        lambda kind: _nothing(
            kind,
            "the engine counts the collectives of its steps; comm.log_summary() shows them, and times calls of zgraph.deepspeed.comm",
        ),
    ),
    "timers": _applied("table"),
    "timers.throughput": _applied("table"),
    **_each("timers.throughput", {"enabled": "bool", "synchronized": "bool"}, lambda kind: _nothing(kind, _LOGGED)),
    "flops_profiler": _applied("table"),
    **_each(
        "flops_profiler",
        {
            "enabled": "bool",
            "recompute_fwd_factor": "number",
            "profile_step": "int",
            "module_depth": "int",
            "top_modules": "int",
            "detailed": "bool",
            "output_file": "text",
        },
        lambda kind: _nothing(kind, _LOGGED),
    ),
    "tensorboard": _applied("table"),
    "csv_monitor": _applied("table"),
    "wandb": _applied("table"),
    **_each(
        "tensorboard",
        {"enabled": "bool", "output_path": "text", "job_name": "text"},
        lambda kind: _nothing(kind, _LOGGED),
    ),
    **_each(
        "csv_monitor",
        {"enabled": "bool", "output_path": "text", "job_name": "text"},
        lambda kind: _nothing(kind, _LOGGED),
    ),
    **_each(
        "wandb",
        {"enabled": "bool", "group": "text", "team": "text", "project": "text"},
        lambda kind: _nothing(kind, _LOGGED),
    ),
    "comet": _nothing("table", "log what the engine returns, or engine.monitor: CSV, TensorBoard, wandb"),
    "compile": _applied("table"),
    "compile.deepcompile": _same("bool", "every step is compiled"),
    "compile.offload_activation": _applied("bool"),
    "compile.offload_opt_states": _applied("bool"),
    "compile.offload_parameters": _applied("bool"),
    **_each(
        "compile",
        {
            "free_activation": "bool",
            "free_activation_threshold": "number",
            "offload_activation_pin_memory": "bool",
            "double_buffer": "bool",
            "symmetric_memory": "bool",
            "debug_log": "bool",
            "sync_before_reduce": "bool",
            "sync_after_reduce": "bool",
            "sync_before_allgather": "bool",
            "sync_after_allgather": "bool",
            "keep_int_input_tensors": "bool",
            "keep_all_input_tensors": "bool",
            "passes": "list",
            "autoep_non_moe": "bool",
        },
        lambda kind: _nothing(kind, _GRAPH),
    ),
    "graph_harvesting": _nothing("bool", _GRAPH),
    "autotuning": _refused("table", "it launches jobs of its own", "zgraph plan --search, which needs no accelerator"),
    "hybrid_engine": _refused("table", "nothing generates between steps here", _LEAVE),
    "datastates": _refused("table", "checkpoints are written by torch.distributed.checkpoint", _LEAVE),
    "nebula": _refused("table", _GONE, _LEAVE),
    # -- fields of a plan that DeepSpeed has no key for -------------------------------------------------------------------
    "zgraph": _applied("table"),
    # -- data, and what changes a model -----------------------------------------------------------------------------------
    "data_efficiency": _refused("table", "a plan has no data loader, and changes no model", "sample in your loader"),
    "curriculum_learning": _refused("table", "a plan has no data loader", "cut sequences in your loader"),
    "progressive_layer_drop": _refused("table", _GONE, "drop layers in the model's forward"),
    "sparse_attention": _applied("table"),
    **_each(
        "sparse_attention",
        {
            "mode": "text",
            "block": "int",
            "different_layout_per_head": "bool",
            "num_local_blocks": "int",
            "num_global_blocks": "int",
            "attention": "text",
            "horizontal_global_attention": "bool",
            "num_differnt_global_patterns": "int",
            "num_random_blocks": "int",
            "local_window_blocks": "list",
            "global_block_indices": "list",
            "global_block_end_indices": "list",
            "num_sliding_window_blocks": "int",
        },
        _applied,
    ),
    "eigenvalue": _refused("table", _GONE, _LEAVE),
    "quantize_training": _refused("table", _GONE, _LEAVE),
    "compression_training": _refused("table", _GONE, _LEAVE),
}

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")

# Keys by their other names: older ones, and the names of DeepSpeed's fields, which it accepts as well.
ALIASES = {
    "bfloat16": "bf16",
    "aio.thread_count": "intra_op_parallelism",
    **{
        f"zero_optimization.{name}": f"stage3_{name}"
        for name in (
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
            "gather_16bit_weights_on_model_save",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
        )
    },
}


def names_in(section: str, keys: Mapping[str, Key] = KEYS) -> list[str]:
    """Return the keys that a section may have; for "", the top-level keys."""
    prefix = f"{section}." if section else ""
    rest = [name.removeprefix(prefix) for name in keys if name.startswith(prefix)]
    return [name for name in rest if "." not in name]
