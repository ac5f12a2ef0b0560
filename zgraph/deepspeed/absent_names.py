"""Names of DeepSpeed's that zgraph has not: each is refused by a sentence that names it and says what to do.

An attribute of an engine or of its optimizer raises `AbsentName` when it is read. A function or class that scripts
import is an `Absent`, so that the import works and its use raises `UnsupportedError`: a script may import what it needs
only with other options.
"""

from __future__ import annotations

from typing import Any, NoReturn

from zgraph.errors import UnsupportedError


class AbsentName(UnsupportedError, AttributeError):
    """The error for an attribute of DeepSpeed's that zgraph has not: for `hasattr` it is not there."""


class Absent:
    """A stand-in for a function or class of DeepSpeed's: calling it, reading from it and deriving from it raise
    `UnsupportedError`, and nothing is an instance of it."""

    def __init__(self, name: str, why: str, hint: str) -> None:
        self._said = f"deepspeed.{name}", why, hint

    def _refuse(self) -> NoReturn:
        what, why, hint = self._said
        raise UnsupportedError(what, why=why, hint=hint)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> NoReturn:
        self._refuse()

    def __instancecheck__(self, instance: object) -> bool:
        return False

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()


_REDUCED = (
    "gradients are reduced by the compiled backward of a step's last micro-batch, in the plan's buckets",
    "engine.no_sync() for backward passes that do not reduce; torch.distributed for tensors of your own",
)
_TIMED = (
    "the engine's clock is another one",
    '"wall_clock_breakdown": true logs a step\'s phases; model.zgraph.timings()',
)
_TUNED = ("plans are tried by the command line", "zgraph plan --search")
_EXPERTS = ("zgraph compiles training steps of dense models", "leave it out")
_CURRICULA = ("a loader that changes its data has to be the script's own", "change what your loader yields")
_COMPILED = (
    "every step is compiled by the plan's passes, and no other compiler runs them",
    "zgraph passes lists the passes; `passes` of a plan adds one of yours",
)
_WRITTEN = (
    "zgraph's checkpoints are written by all ranks, in one format",
    "engine.save_checkpoint, engine.load_checkpoint, engine.save_16bit_model",
)
_CONFIGURED = (
    "the configuration is a plan here, and no object of DeepSpeed's",
    "engine.config is the configuration as it was given, engine.report says what became of it; engine.zero_optimization_stage() and others read it",
)
_INTERNAL = (
    "it belongs to how DeepSpeed's own engine runs a step",
    "leave it out; engine.module.zgraph shows how this one runs",
)

# Why an engine has not the names of DeepSpeed's, and what to do.
_OF_ENGINE: dict[tuple[str, str], str] = {
    _REDUCED: """all_gather_scalar allreduce_and_copy allreduce_bucket allreduce_no_retain buffered_allreduce_fallback sparse_all_gather
     sparse_allreduce sparse_allreduce_bucket sparse_allreduce_no_retain all_to_all_group local_all_to_all_group""",
    _TIMED: """backward_inner_timers backward_reduce_timers backward_timers engine_timers engine_timers_cache forward_timers get_wall_clock_timers
     global_timers micro_timers print_forward_breakdown step_timers timers flops_profiler""",
    _TUNED: """autotuning_end_profile_step autotuning_metric autotuning_metric_path autotuning_model_info_path autotuning_profile_model_info
     autotuning_start_profile_step flops""",
    _EXPERTS: "expert_data_parallel_group expert_parallel_group gate_modules load_moe_state_dict moe_layers",
    _CURRICULA: """curriculum_learning_config curriculum_scheduler_legacy data_efficiency_config data_sampling_config data_sampling_enabled
     random_ltd_config random_ltd_initialize random_ltd_scheduler set_custom_curriculum_learning_schedule""",
    _COMPILED: """compile_autosp compile_autotp compile_zero_optimization_stage get_autosp_backend get_autotp_backend get_compile_time
     get_deepcompile_backend get_deepspeed_compile_backend register_compile_pass uses_parallelization_pass_only""",
    _WRITTEN: """checkpoint_engine checkpoint_serialization_enabled checkpoint_writer_enabled loaded_checkpoint_dp_world_size
     loaded_checkpoint_mp_world_size save_non_zero_checkpoint save_zero_checkpoint checkpoint_mp_rank""",
    _CONFIGURED: "_config swap_tensor_config tensor_parallel_config zenflow zenflow_config get_optimizer_configuration",
    _INTERNAL: """auto_update dont_change_device eigenvalue first_dataloader_check flatten unflatten is_first_weights_partition_group
     mesh_device module_forward_post_hook module_forward_pre_hook optimized_linear_base_weight_sharding optimized_linear_lora_enabled
     progressive_layer_drop quantizer scale_wrt_gas torch_autocast_lower_precision_safe_modules torch_autocast_z0_gradscaler
     warn_unscaled_loss block_eigenvalue gas_boundary_ctr""",
    ("gradients are clipped by the compiled update", '"gradient_clipping" in the configuration'): "clip_fp32_gradients",
    ("it is Python's own", "gc.collect()"): "collect_python_gc",
    ("there are losses of the script's alone", "keep what engine(...) returns"): "losses",
    ("it is a number of the last step", "engine.get_global_grad_norm()"): "_global_grad_norm",
    (
        "micro-batches are counted by the engine",
        "engine.is_gradient_accumulation_boundary()",
    ): "_is_gradient_accumulation_boundary",
}
ENGINE: dict[str, tuple[str, str]] = {name: said for said, names in _OF_ENGINE.items() for name in names.split()}


def refuse_of_engine(name: str) -> None:
    """Raise `AbsentName` for an attribute that DeepSpeed's engine has and this one has not."""
    if name in ENGINE:
        why, hint = ENGINE[name]
        raise AbsentName(f"engine.{name} is DeepSpeed's, and this engine has none", why=why, hint=hint)


def refuse_of_optimizer(name: str) -> NoReturn:
    """Raise `AbsentName` for an attribute that the engine's optimizer has not."""
    raise AbsentName(
        f"the engine's optimizer has no {name}",
        why="DeepSpeed's optimizers keep flat partitions and buckets of their own, of which a compiled update has none",
        hint="param_groups and state; deepspeed.utils.safe_get_full_fp32_param(param), safe_get_full_grad, safe_get_full_optimizer_state",
    )
