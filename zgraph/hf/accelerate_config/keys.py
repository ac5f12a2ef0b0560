"""Every key of the files that `accelerate config` writes, and how zgraph treats it.

The keys are those of accelerate 1.15.0: the fields of its `ClusterConfig`, and in each section the arguments of
`accelerate launch`. Keys that become fields of a plan are "applied" here; every other key has a reason.
"""

from __future__ import annotations

from zgraph.deepspeed.keys import Key, Kind

_LAUNCHER = "it is for the launcher: accelerate launch, torchrun, or zgraph launch"
_TPU = "there are no TPUs here"
_GRAPH = "each parameter is gathered before its own first use: bucket and prefetch in a plan say how much at once"


def _applied(kind: Kind) -> Key:
    return Key(kind, "applied")


def _launched(kind: Kind, why: str = _LAUNCHER) -> Key:
    return Key(kind, "no effect here", why)


KEYS: dict[str, Key] = {
    # -- ranks and machines ---------------------------------------------------------------------------------------------
    "compute_environment": _applied("text"),
    "distributed_type": _applied("text"),
    "num_processes": _applied("int"),
    "num_machines": _applied("int"),
    "use_cpu": Key("bool", "no effect here", "a model is trained where its parameters are"),
    "machine_rank": _launched("int"),
    "gpu_ids": _launched("any"),
    "main_process_ip": _launched("text"),
    "main_process_port": _launched("int"),
    "rdzv_backend": _launched("text"),
    "same_network": _launched("bool"),
    "main_training_function": _launched("text"),
    "enable_cpu_affinity": _launched("bool", "zgraph launch --bind_cores_to_rank binds ranks to cores"),
    "mpirun_config": _launched("table"),
    "debug": Key("bool", "equivalent", "ranks compare what they are about to run, always"),
    "downcast_bf16": _launched("bool", _TPU),
    "tpu_name": _launched("text", _TPU),
    "tpu_zone": _launched("text", _TPU),
    "tpu_use_cluster": _launched("bool", _TPU),
    "tpu_use_sudo": _launched("bool", _TPU),
    "tpu_vm": _launched("list", _TPU),
    "tpu_env": _launched("list", _TPU),
    "command_file": _launched("text", _TPU),
    "commands": _launched("list", _TPU),
    # -- precision, compiling -------------------------------------------------------------------------------------------
    "mixed_precision": _applied("text"),
    "fp16": _applied("bool"),
    "fp8_config": _launched("table", "it belongs to mixed_precision: fp8"),
    "dynamo_config": _applied("table"),
    "dynamo_config.dynamo_backend": _applied("text"),
    "dynamo_config.dynamo_mode": Key(
        "text", "no effect here", "the plan's passes and backend decide how it is compiled"
    ),
    "dynamo_config.dynamo_use_fullgraph": Key("bool", "equivalent", "a model's forward and backward are one graph"),
    "dynamo_config.dynamo_use_dynamic": Key("bool", "equivalent", 'shapes = "auto": sizes that differ become symbols'),
    "dynamo_config.dynamo_use_regional_compilation": Key("bool", "equivalent", "equal layers are compiled once"),
    # -- DeepSpeed ------------------------------------------------------------------------------------------------------
    "deepspeed_config": _applied("table"),
    "deepspeed_config.deepspeed_config_file": _applied("text"),
    "deepspeed_config.zero_stage": _applied("int"),
    "deepspeed_config.offload_optimizer_device": _applied("text"),
    "deepspeed_config.offload_optimizer_nvme_path": _applied("text"),
    "deepspeed_config.offload_param_device": _applied("text"),
    "deepspeed_config.offload_param_nvme_path": _applied("text"),
    "deepspeed_config.gradient_accumulation_steps": _applied("int"),
    "deepspeed_config.gradient_clipping": _applied("number"),
    "deepspeed_config.zero3_save_16bit_model": _applied("bool"),
    "deepspeed_config.zero3_init_flag": Key(
        "bool", "no effect here", "zgraph.load_pretrained builds a model without memory, at every stage"
    ),
    "deepspeed_config.deepspeed_moe_layer_cls_names": Key(
        "text", "no effect here", "the program is one graph: no module has to be a leaf of it"
    ),
    "deepspeed_config.deepspeed_hostfile": _launched("text", "zgraph launch --hostfile takes the same file"),
    "deepspeed_config.deepspeed_inclusion_filter": _launched("text", "zgraph launch --include takes the same text"),
    "deepspeed_config.deepspeed_exclusion_filter": _launched("text", "zgraph launch --exclude takes the same text"),
    "deepspeed_config.deepspeed_multinode_launcher": _launched(
        "text", "zgraph launch --launcher: ssh, pdsh, slurm or openmpi"
    ),
    # -- FSDP -----------------------------------------------------------------------------------------------------------
    "fsdp_config": _applied("table"),
    "fsdp_config.fsdp_version": _applied("int"),
    "fsdp_config.fsdp_sharding_strategy": _applied("any"),
    "fsdp_config.fsdp_reshard_after_forward": _applied("any"),
    "fsdp_config.fsdp_offload_params": _applied("bool"),
    "fsdp_config.fsdp_auto_wrap_policy": _applied("text"),
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": Key("text", "no effect here", _GRAPH),
    "fsdp_config.fsdp_min_num_params": Key("number", "no effect here", _GRAPH),
    "fsdp_config.fsdp_backward_prefetch": _applied("any"),
    "fsdp_config.fsdp_forward_prefetch": Key(
        "bool", "equivalent", "gathers start ahead of their use in both directions: prefetch in a plan says how far"
    ),
    "fsdp_config.fsdp_state_dict_type": _applied("any"),
    "fsdp_config.fsdp_use_orig_params": Key("bool", "equivalent", "parameters are the model's own, sharded in place"),
    "fsdp_config.fsdp_cpu_ram_efficient_loading": Key(
        "bool", "no effect here", "zgraph.load_pretrained reads on each rank the rows that it holds"
    ),
    "fsdp_config.fsdp_sync_module_states": Key(
        "bool", "equivalent", "parameters that differ between ranks at the start become rank 0's"
    ),
    "fsdp_config.fsdp_activation_checkpointing": _applied("bool"),
    "fsdp_config.fsdp_activation_checkpointing_offload": _applied("bool"),
    "fsdp_config.fsdp_ignored_modules": Key(
        "text",
        "refused",
        "a plan has all parameters of the model that it is given",
        "leave it out; param_persistence_threshold keeps small parameters whole, and compile(part, plan) takes a part",
    ),
    # -- what divides models over ranks ---------------------------------------------------------------------------------
    "parallelism_config": _applied("table"),
    "parallelism_config.parallelism_config_dp_replicate_size": _applied("int"),
    "parallelism_config.parallelism_config_dp_shard_size": _applied("int"),
    "parallelism_config.parallelism_config_tp_size": _applied("int"),
    "parallelism_config.parallelism_config_cp_size": _applied("int"),
    "parallelism_config.parallelism_config_sp_size": _applied("int"),
    "parallelism_config.parallelism_config_cp_backend": Key("text", "no effect here", "context_attention decides it"),
    "parallelism_config.parallelism_config_sp_backend": Key("text", "no effect here", "context_attention decides it"),
    "parallelism_config.parallelism_config_cp_comm_strategy": Key(
        "text", "no effect here", "keys and values are passed around in a ring, beside the computation"
    ),
    "parallelism_config.parallelism_config_sp_seq_length": Key("int", "no effect here", "lengths are those of calls"),
    "parallelism_config.parallelism_config_sp_seq_length_is_variable": Key(
        "bool", "equivalent", "one program serves all lengths"
    ),
    "parallelism_config.parallelism_config_sp_attn_implementation": Key(
        "text", "no effect here", "attention is the model's own, which is captured"
    ),
    "megatron_lm_config": Key("table", "no effect here", "it belongs to distributed_type: MEGATRON_LM"),
}

# The prefix of each section's keys, which accelerate adds where a file leaves it out.
PREFIXES = {"dynamo_config": "dynamo_", "fsdp_config": "fsdp_"}
