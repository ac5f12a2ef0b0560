"""The methods in which an attached Trainer differs from transformers': its optimizer is the plan's, and all ranks
write its files."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping
from typing import Any

import torch

from zgraph.api.peft_adapters import FILE, is_adapted, load_adapter
from zgraph.hf.callbacks_of_trl import give_whole_weights
from zgraph.hf.optimizers import refuse_all_frozen, refuse_unfrozen
from zgraph.hf.schedules import scheduler_for
from zgraph.hf.vllm_weights import stream_to_vllm

FOLDER = "zgraph"
"""The folder in a checkpoint of the Trainer with everything that a run needs to continue."""
_SCHEDULER = "scheduler.pt"  # transformers' name


class Attached:
    """A mixin in front of a Trainer's own class (`attached_class`)."""

    attached_by_zgraph = True

    # The Trainer's own.
    model: Any
    args: Any
    lr_scheduler: Any
    state: Any
    optimizer: Any

    autocast_dtype: torch.dtype | None
    not_optimized: list[str]
    scheduler_section: Mapping[str, Any] | None

    def after_attach(
        self,
        autocast_dtype: torch.dtype | None,
        not_optimized: list[str],
        scheduler_section: Mapping[str, Any] | None,
    ) -> None:
        """Keep the Trainer from wrapping the model, and from saving it on rank 0 alone.

        This is transformers' own switch for models that are sharded already.
        """
        self.autocast_dtype, self.not_optimized = autocast_dtype, not_optimized
        self.scheduler_section = scheduler_section
        self.is_distributed_loading_by_transformers = True
        self.model._is_accelerate_prepared = True  # (accelerate would also apply autocast, which is done below)
        stream_to_vllm(self)
        give_whole_weights(self)
        self.create_optimizer()

    def add_callback(self, callback: Any) -> None:
        """Add a callback, which gets whole weights if it is one of TRL's that read them."""
        super().add_callback(callback)  # type: ignore[misc]
        give_whole_weights(self)

    def create_optimizer(self, model: Any = None) -> Any:
        """Set and return the plan's optimizer, which was made from the Trainer's."""
        self.optimizer = self.model.zgraph.optimizer
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, *args: Any, **kwargs: Any) -> Any:
        """Set and return the Trainer's own scheduler, or that of the DeepSpeed configuration that it was attached by; a training
        begins with it. Raises `ModelError` if nothing is to be trained."""
        refuse_all_frozen(self.model)
        if self.scheduler_section is None:
            return super().create_scheduler(num_training_steps, *args, **kwargs)  # type: ignore[misc]
        optimizer = self.model.zgraph.optimizer
        self.lr_scheduler = scheduler_for(self.scheduler_section, self.args, num_training_steps, optimizer)
        return self.lr_scheduler

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the Trainer's own step, and refuse parameters that were unfrozen since `attach`."""
        refuse_unfrozen(self.model, self.not_optimized)
        return super().training_step(model, *args, **kwargs)  # type: ignore[misc]

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        """Return a context with autocast for `bf16=True` and `fp16=True`, unless the plan has a precision.

        Accelerate applies autocast to models that it prepares, and this one it does not.
        """
        stack: contextlib.ExitStack = super().compute_loss_context_manager()  # type: ignore[misc]
        if self.autocast_dtype is not None:
            stack.enter_context(torch.autocast(self.args.device.type, dtype=self.autocast_dtype))
        return stack

    def _sync_replicated_trainable_parameters(self, model: Any) -> None:
        """Do nothing: programs reduce the gradients of all parameters, unsharded ones too."""

    # -- checkpoints --------------------------------------------------------------------------------------------------
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.model.save_checkpoint(output_dir, FOLDER, frozen=not is_adapted(self.model))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if _has_all(checkpoint):
            self.model.load_checkpoint(checkpoint, FOLDER)
        path = os.path.join(checkpoint, _SCHEDULER)
        if os.path.isfile(path):
            self.lr_scheduler.load_state_dict(torch.load(path, weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not _has_all(resume_from_checkpoint):  # (else the weights come with the optimizer's states)
            _load_weights(self.model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if _has_all(best):
            self.model.load_checkpoint(best, FOLDER, optimizer="keep")
        else:
            _load_weights(self.model, best)


def _has_all(folder: str) -> bool:
    return os.path.isdir(os.path.join(folder, FOLDER))


def _load_weights(model: Any, folder: str) -> None:
    if is_adapted(model) and os.path.isfile(os.path.join(folder, FILE)):
        load_adapter(model, folder)
    else:
        model.load_checkpoint(folder, optimizer="keep")


@functools.cache
def attached_class(kind: type) -> type:
    """Return the class of an attached trainer, made from its own class."""
    return type(kind.__name__, (Attached, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
