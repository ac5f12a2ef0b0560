"""The methods of a DeepSpeed engine that read its configuration: `engine.zero_optimization_stage()`,
`engine.fp16_enabled()`, …"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from zgraph.deepspeed.translate import DTYPES

_OWN_OPTIMIZERS = ("adagrad", "adam", "adamw", "lamb", "lion", "muadam", "muadamw", "musgd", "muon")

# The methods that return one key: (the key, DeepSpeed's default).
_KEYS: dict[str, tuple[str, Any]] = {
    "gradient_allreduce_op": ("gradient_allreduce_op", "mean"),
    "gradient_predivide_factor": ("gradient_predivide_factor", 1.0),
    "steps_per_print": ("steps_per_print", None),
    "dump_state": ("dump_state", False),
    "wall_clock_breakdown": ("wall_clock_breakdown", False),
    "memory_breakdown": ("memory_breakdown", False),
    "dataloader_drop_last": ("dataloader_drop_last", False),
    "managed_gradient_accumulation": ("managed_gradient_accumulation", True),
    "gradient_clipping": ("gradient_clipping", 1.0),
    "optimizer_params": ("optimizer.params", None),
    "scheduler_name": ("scheduler.type", None),
    "scheduler_params": ("scheduler.params", None),
    "fp16_enabled": ("fp16.enabled", False),
    "fp16_auto_cast": ("fp16.auto_cast", False),
    "loss_scale": ("fp16.loss_scale", 0),
    "bfloat16_enabled": ("bf16.enabled", False),
    "bf16_optimizer_states": ("bf16.bf16_optimizer_states", False),
    "zero_optimization_stage": ("zero_optimization.stage", 0),
    "zero_reduce_scatter": ("zero_optimization.reduce_scatter", True),
    "zero_offload_optimizer": ("zero_optimization.offload_optimizer", None),
    "zero_offload_param": ("zero_optimization.offload_param", None),
    "zero_sub_group_size": ("zero_optimization.sub_group_size", 1e9),
    "zero_reduce_bucket_size": ("zero_optimization.reduce_bucket_size", 5e8),
    "zero_allgather_bucket_size": ("zero_optimization.allgather_bucket_size", 5e8),
    "zero_prefetch_bucket_size": ("zero_optimization.stage3_prefetch_bucket_size", 5e7),
    "zero_param_persistence_threshold": ("zero_optimization.stage3_param_persistence_threshold", 1e5),
    "zero_max_live_parameters": ("zero_optimization.stage3_max_live_parameters", 1e9),
    "zero_max_reuse_distance": ("zero_optimization.stage3_max_reuse_distance", 1e9),
    "zero_gather_16bit_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        False,
    ),
    "zero_contiguous_gradients": ("zero_optimization.contiguous_gradients", True),
    "zero_compute_grad_norm": ("zero_optimization.compute_grad_norm", True),
    "zero_ignore_unused_parameters": ("zero_optimization.ignore_unused_parameters", True),
    "load_universal_checkpoint": ("checkpoint.load_universal", False),
    "use_node_local_storage": ("checkpoint.use_node_local_storage", False),
    "flops_profiler_enabled": ("flops_profiler.enabled", False),
    "flops_profiler_profile_step": ("flops_profiler.profile_step", 1),
    "flops_profiler_module_depth": ("flops_profiler.module_depth", -1),
    "flops_profiler_top_modules": ("flops_profiler.top_modules", 1),
    "flops_profiler_detailed": ("flops_profiler.detailed", True),
    "flops_profiler_output_file": ("flops_profiler.output_file", None),
    "zero_allow_untested_optimizer": ("zero_allow_untested_optimizer", False),
    "zero_force_ds_cpu_optimizer": ("zero_force_ds_cpu_optimizer", True),
    "zero_allgather_partitions": ("zero_optimization.allgather_partitions", True),
    "zero_round_robin_gradients": ("zero_optimization.round_robin_gradients", False),
    "zero_load_from_fp32_weights": ("zero_optimization.load_from_fp32_weights", True),
    "zero_elastic_checkpoint": ("zero_optimization.elastic_checkpoint", False),
    "zero_legacy_stage1": ("zero_optimization.legacy_stage1", False),
    "zero_hpz_partition_size": ("zero_optimization.zero_hpz_partition_size", 1),
    "zero_quantized_weights": ("zero_optimization.zero_quantized_weights", False),
    "zero_quantized_gradients": ("zero_optimization.zero_quantized_gradients", False),
    "autotp_size": ("tensor_parallel.autotp_size", 0),
    "torch_autocast_enabled": ("torch_autocast.enabled", False),
    "is_deepcompile_enabled": ("compile.deepcompile", False),
    "log_level": ("log_level", None),
    "curriculum_learning_enabled": ("curriculum_learning.enabled", False),
    "data_efficiency_enabled": ("data_efficiency.enabled", False),
    "random_ltd_enabled": ("data_efficiency.data_routing.random_ltd.enabled", False),
    "autotuning_enabled": ("autotuning.enabled", False),
    "amp_enabled": ("amp.enabled", False),
    "elasticity_enabled": ("elasticity.enabled", False),
    "flops_profiler_recompute_fwd_factor": ("flops_profiler.recompute_fwd_factor", 0.0),
    "zero_module_granularity_threshold": ("zero_optimization.stage3_module_granularity_threshold", 0),
    "zero_model_persistence_threshold": ("zero_optimization.stage3_model_persistence_threshold", sys.maxsize),
    "zero_allgather_sequential": ("zero_optimization.stage3_allgather_sequential", False),
    "zero_multi_rank_bucket_allreduce": ("zero_optimization.use_multi_rank_bucket_allreduce", True),
    "zero_quantized_nontrainable_weights": ("zero_optimization.zero_quantized_nontrainable_weights", False),
    "zero_log_trace_cache_warnings": ("zero_optimization.log_trace_cache_warnings", False),
    "is_sanity_checks_enabled": ("zero_optimization.enable_sanity_checks", False),
    "optimizer_legacy_fusion": ("optimizer.legacy_fusion", False),
    "aio_config": ("aio", None),
    "fp16_master_weights_and_gradients": ("fp16.fp16_master_weights_and_grads", False),
    "bf16_master_weights_and_gradients": ("bf16.bf16_master_weights_and_grads", False),
    "zero_parameter_alignment": ("zero_optimization.parameter_alignment", False),
    "zero_save_muon_momentum_buffer_in_memory": ("zero_optimization.save_muon_momentum_buffer_in_memory", False),
    "zero_partial_offload": ("zero_optimization.offload_optimizer.ratio", 1.0),
    "super_offload": ("zero_optimization.offload_optimizer.super_offload", False),
    "cpuadam_cores_perc": ("zero_optimization.offload_optimizer.cpuadam_cores_perc", 0.9),
}


def value_of(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return the value of a key ("fp16.enabled"), or the default if it is missing or null."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return default if value is None else value


class Settings:
    """The methods of an engine that read its configuration. `config` is the configuration as it was given, with
    "auto" filled."""

    config: dict[str, Any]
    sparse_tensor_module_names: frozenset[str] = frozenset()  # (gradients of embeddings are dense here)

    def zero_optimization(self) -> bool:
        """Return whether the ZeRO stage is above 0."""
        return bool(self.zero_optimization_stage() > 0)  # type: ignore[attr-defined]

    def zero_optimization_partition_gradients(self) -> bool:
        return bool(self.zero_optimization_stage() >= 2)  # type: ignore[attr-defined]

    def zero_optimization_partition_weights(self) -> bool:
        return bool(self.zero_optimization_stage() >= 3)  # type: ignore[attr-defined]

    def zero_cpu_offload(self) -> bool:
        """Return whether the optimizer's states are in the host's memory."""
        return value_of(self.config, "zero_optimization.offload_optimizer.device") == "cpu"

    def zero_use_cpu_optimizer(self) -> bool:
        """Return whether the optimizer's states are in the host's memory or in files."""
        return value_of(self.config, "zero_optimization.offload_optimizer.device") in ("cpu", "nvme")

    def zero_nvme_offload_optimizer(self) -> bool:
        """Return whether the optimizer's states are in files."""
        return value_of(self.config, "zero_optimization.offload_optimizer.device") == "nvme"

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype in which gradients are reduced: the configuration's, else the model's."""
        named = value_of(self.config, "communication_data_type")
        if named is not None:
            return getattr(torch, DTYPES[str(named).lower()])  # type: ignore[no-any-return]
        if self.fp16_enabled():  # type: ignore[attr-defined]
            return torch.float16
        return torch.bfloat16 if self.bfloat16_enabled() else torch.float32  # type: ignore[attr-defined]

    def postscale_gradients(self) -> bool:
        return not value_of(self.config, "prescale_gradients", False)

    def checkpoint_tag_validation_enabled(self) -> bool:
        """Return True: tags that differ between ranks are always refused."""
        return True

    def checkpoint_tag_validation_fail(self) -> bool:
        """Return True: tags that differ between ranks are an error."""
        return True

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """Return the dtype that `torch_autocast` names; None without the section."""
        named = value_of(self.config, "torch_autocast.dtype")
        return None if named is None else getattr(torch, DTYPES.get(str(named).lower(), str(named)))

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """Return the numbers of fp16's dynamic loss scale, by DeepSpeed's names."""
        section = value_of(self.config, "fp16", {})
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": section.get("loss_scale_window", 1000),
            "delayed_shift": section.get("hysteresis", 2),
            "consecutive_hysteresis": section.get("consecutive_hysteresis", False),
            "min_scale": section.get("min_loss_scale", 1),
        }

    def initial_dynamic_scale(self) -> int:
        """Return the loss scale that fp16 begins with."""
        return int(2 ** value_of(self.config, "fp16.initial_scale_power", 16))

    def dynamic_loss_scale(self) -> bool:
        """Return whether fp16's loss scale would follow its overflows, also where fp16 is not enabled."""
        return bool(self.loss_scale() == 0)  # type: ignore[attr-defined]

    def optimizer_name(self) -> str | None:
        """Return the class of the script's own optimizer, else the configuration's type, in lower case if DeepSpeed has it
        itself."""
        client = self.client_optimizer  # type: ignore[attr-defined]
        if client is not None:
            return type(client).__name__
        kind = value_of(self.config, "optimizer.type")
        return kind.lower() if kind is not None and kind.lower() in _OWN_OPTIMIZERS else kind

    def zero_overlap_comm(self) -> bool:
        return bool(value_of(self.config, "zero_optimization.overlap_comm", self.zero_optimization_stage() == 3))  # type: ignore[attr-defined]


def _method(name: str, key: str, default: Any) -> Callable[[Settings], Any]:
    def get(self: Settings) -> Any:
        return value_of(self.config, key, default)

    get.__name__ = name
    get.__qualname__ = f"Settings.{name}"
    get.__doc__ = f"The configuration's `{key}`; by default {default}."
    return get


for _name, (_key, _default) in _KEYS.items():
    setattr(Settings, _name, _method(_name, _key, _default))
