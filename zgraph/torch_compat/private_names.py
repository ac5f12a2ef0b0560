"""The private names of other libraries that zgraph calls, overrides or reads: a release that lacks one is refused."""

from __future__ import annotations

import functools
import importlib
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from zgraph.errors import ModelError


@dataclass(frozen=True)
class Names:
    """The private names of one library that one part of zgraph needs.

    A name is "module:path". With "has", the code of that path uses a name or string; with "takes", its arguments are
    those given. Of two names with "or" between them one is enough.
    """

    library: str  # the library's name
    known: str  # the release that zgraph was run with
    why: str  # why a missing name is an error, for the message
    names: tuple[str, ...]  # the names that it must have


NAMES = {
    "trainers": Names(
        "transformers",
        "5.24",
        "attach changes how a Trainer saves, loads and makes its optimizer, and that is no public interface",
        (
            "transformers:Trainer._load_best_model",
            "transformers:Trainer._load_from_checkpoint",
            "transformers:Trainer._load_optimizer_and_scheduler",
            "transformers:Trainer._save_optimizer_and_scheduler",
            "transformers:Trainer._sync_replicated_trainable_parameters",
            "transformers:Trainer.compute_loss_context_manager",
            "transformers:Trainer.create_optimizer",
            "transformers:Trainer.__init__ has is_distributed_loading_by_transformers",
            "transformers:Trainer.__init__ has model_wrapped",
            "transformers:Trainer._save has is_distributed_loading_by_transformers"
            " or transformers:Trainer.save_model has is_distributed_loading_by_transformers",
            "transformers:Trainer._prepare_for_training has is_distributed_loading_by_transformers",
        ),
    ),
    "published models": Names(
        "transformers",
        "5.24",
        "files of a compiled model have the names and ties of transformers' own, for which there is no public interface",
        (
            "transformers:PreTrainedModel._auto_class",
            "transformers:PreTrainedModel._from_config",
            "transformers:PreTrainedModel._keys_to_ignore_on_save",
            "transformers:PreTrainedModel.post_init has all_tied_weights_keys",
        ),
    ),
    "loaded models": Names(
        "transformers",
        "5.24",
        "the names of older files, and what stays in float32 when a model is loaded in half precision, have no public interface",
        (
            "transformers:PreTrainedModel._get_dtype_plan",
            "transformers.conversion_mapping:get_model_conversion_mapping",
            "transformers.core_model_loading:WeightRenaming",
            "transformers.core_model_loading:rename_source_key",
        ),
    ),
    "accelerators": Names(
        "accelerate",
        "1.15",
        "a compiled model goes through prepare untouched, and is saved and loaded by all ranks, for which accelerate has no public interface",
        (
            "accelerate:Accelerator.__init__ has _models",
            "accelerate:Accelerator.__init__ has _optimizers",
            "accelerate:Accelerator.prepare_model has _is_accelerate_prepared",
            "accelerate.state:AcceleratorState._shared_state",
        ),
    ),
    "loss scaling": Names(
        "accelerate",
        "1.15",
        "with fp16 accelerate is told of skipped steps as its own GradScaler tells it, and that is no public interface",
        ("accelerate.optimizer:AcceleratedOptimizer.step has _accelerate_step_called",),
    ),
    "prompts": Names(
        "peft",
        "0.21",
        "prompts of divided models are saved and loaded by PEFT's own code while their encoder is whole, and that is no public interface",
        (
            "peft:PeftModel.get_prompt_embedding_to_save has prompt_encoder",
            "peft:PeftModel._setup_prompt_encoder has prompt_encoder",
        ),
    ),
    "DoRA": Names(
        "peft",
        "0.21",
        "functions of DoRA's layers are captured as others that compute the same, and that is no public interface",
        (
            "peft.tuners.lora.dora:DoraLinearLayer.forward has dequantize_module_weight",
            "peft.tuners.lora.dora:DoraLinearLayer.get_weight_norm has transpose",
            "peft.tuners.lora.dora:dequantize_module_weight",
            "peft.tuners.lora.dora:transpose",
        ),
    ),
    "adapted parameters": Names(
        "peft",
        "0.21",
        "the call of a layer whose parameters are adapted (target_parameters) is captured as another that computes the same, and that is no "
        "public interface",
        (
            "peft.tuners.lora.layer:ParamWrapper._activate_lora has get_delta_factors",
            "peft.tuners.lora.layer:LoraLayer._check_forward_args",
            "peft.tuners.lora.layer:ParamWrapper.forward has _activate_lora",
            "peft.tuners.lora.layer:ParamWrapper.get_delta_factors",
        ),
    ),
    "LoHa and LoKr": Names(
        "peft",
        "0.21",
        "the call of a layer with LoHa or LoKr is captured as another that computes the same, and that is no public interface",
        (
            "peft.tuners.loha.layer:LoHaLayer.forward has _get_delta_activations",
            "peft.tuners.loha.layer:LoHaLayer.forward has module_dropout",
            "peft.tuners.lokr.layer:LoKrLayer.forward has _get_delta_activations",
            "peft.tuners.lokr.layer:LoKrLayer.forward has module_dropout",
        ),
    ),
    "SHiRA": Names(
        "peft",
        "0.21",
        "the sparse update of SHiRA's layers is captured as a dense one, and that is no public interface",
        (
            "peft.tuners.shira.layer:Linear.get_delta_weight has shira_indices",
            "peft.tuners.shira.layer:Linear.get_delta_weight has shira_weight",
        ),
    ),
    "VB-LoRA": Names(
        "peft",
        "0.21",
        "matrices of VB-LoRA are captured as by another method that computes the same, and that is no public interface",
        (
            "peft.tuners.vblora.layer:VBLoRALayer.__init__ has vblora_logits_A",
            "peft.tuners.vblora.layer:Linear._get_lora_matrices has vblora_vector_bank",
            "peft.tuners.vblora.layer:Linear._get_low_rank_matrix",
        ),
    ),
    "fused heads": Names(
        "trl",
        "1.16",
        "TRL's fused head is captured as another that computes the same, and that is no public interface",
        (
            "trl.kernels.chunked_logprob:ChunkedLogProbFunction.forward takes ctx hidden weight bias targets temperature chunk_size"
            " final_logit_softcapping logit_scale outputs",
            "trl.kernels.chunked_logprob:_use_triton",
            "trl.trainer.utils:_ChunkedLogProbFunction",
            "trl.trainer.utils:_use_triton",
            "trl.trainer.utils:add_fused_lm_head has _ChunkedLogProbFunction",
            "trl.trainer.utils:add_fused_lm_head has _use_triton",
        ),
    ),
    "vLLM": Names(
        "trl",
        "1.16",
        "vLLM is sent weights that are gathered from the shards, and how TRL sends them is no public interface",
        (
            "trl.generation.vllm_generation:VLLMGeneration.sync_weights has _iter_named_params",
            "trl.generation.vllm_generation:VLLMGeneration.__init__ has model",
        ),
    ),
    "callbacks of TRL": Names(
        "trl",
        "1.16",
        "reference models, teachers and averages follow the trained model by weights that are gathered from the shards, and how TRL's callbacks "
        "read them is no public interface",
        (
            "trl.trainer.callbacks:SyncRefModelCallback.on_step_end has sync_target_model",
            "trl.trainer.callbacks:BEMACallback.__init__ has param_names",
            "trl.trainer.callbacks:BEMACallback.__init__ has thetat_params",
            "trl.trainer.callbacks:BEMACallback.on_step_end has update_after",
            "trl.trainer.callbacks:BEMACallback.on_step_end has update_freq",
        ),
    ),
    "backbones": Names(
        "trl",
        "1.16",
        "DistillationTrainer's backbone runs as a program of the model, and how it calls it is no public interface",
        (
            "trl.trainer.distillation_trainer:DistillationTrainer._get_last_hidden_state has base_model",
            "trl.trainer.distillation_trainer:DistillationTrainer.compute_loss has _forward_redirection",
        ),
    ),
    "Lightning": Names(
        "lightning",
        "2.6",
        "ZGraphStrategy overrides what Lightning's DDPStrategy does, part of which is no public interface",
        (
            "lightning.fabric.plugins.collectives.torch_collective:default_pg_timeout",
            "lightning.fabric.strategies.strategy:_BackwardSyncControl.no_backward_sync",
            "lightning.fabric.strategies:DDPStrategy.__init__ has _backward_sync_control",
            "lightning.fabric.strategies:DDPStrategy.__init__ has _ddp_kwargs",
            "lightning.fabric.strategies:Strategy.register_strategies",
            "lightning.pytorch.core.optimizer:LightningOptimizer.optimizer has _optimizer",
            "lightning.pytorch.plugins:Precision._wrap_closure",
            "lightning.pytorch.strategies:DDPStrategy.__init__ has _ddp_kwargs",
            "lightning.pytorch.strategies:ParallelStrategy.__init__ has _layer_sync",
            "lightning.pytorch.strategies:DDPStrategy.block_backward_sync",
            "lightning.pytorch.strategies:Strategy.pre_backward",
            "lightning.pytorch.strategies:Strategy.register_strategies",
            "lightning.pytorch.strategies:Strategy._reset_optimizers_and_schedulers",
            "lightning.pytorch.strategies:Strategy.restore_checkpoint_after_setup",
            "lightning.pytorch.trainer.states:TrainerFn",
            "lightning.pytorch.utilities.compile:from_compiled has _compiler_ctx",
        ),
    ),
}


def refuse_release(part: str) -> None:
    """Raise `ModelError` if the release of a library that is installed lacks a name of this part of the table."""
    needed = NAMES[part]
    for name in needed.names:
        lacks = _lacks(name)
        if lacks is not None:
            raise ModelError(
                f"{needed.library} {version(needed.library)} has no {lacks}",
                why=needed.why,
                hint=f"{needed.library} {needed.known} is known to work",
            )


def _lacks(name: str) -> str | None:
    """Return what is missing of a name, in words; None if nothing is."""
    missing = [_one_lacks(one) for one in name.split(" or ")]
    return None if None in missing else missing[0]


def _one_lacks(name: str) -> str | None:
    place, _, rest = name.partition(" ")
    module, _, path = place.partition(":")
    try:
        member: Any = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        return path
    asked, *words = rest.split() or [""]
    if asked == "has" and _is_of(member, module) and words[0] not in set(_words(_code(member))):
        return f"{words[0]} in {path}"
    if asked == "takes":
        takes = [p for p in inspect.signature(member).parameters if p not in ("args", "kwargs")]
        if takes != words:
            return f"{path}({', '.join(words)})"
    return None


def _is_of(member: Any, module: str) -> bool:
    """Return whether a function is the library's own: one that another library has put in its place says nothing of the release."""
    found: str = inspect.unwrap(getattr(member, "fget", member)).__module__
    return found.partition(".")[0] == module.partition(".")[0]


def _code(member: Any) -> types.CodeType | None:
    function = getattr(member, "fget", member)
    return getattr(inspect.unwrap(function), "__code__", None)


def _words(code: types.CodeType | None) -> Iterator[str]:
    """Yield the names and strings in a function's code and in the code of functions inside it."""
    if code is not None:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, str):
                yield constant
            elif isinstance(constant, types.CodeType):
                yield from _words(constant)
