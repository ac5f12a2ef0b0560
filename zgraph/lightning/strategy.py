"""`ZGraphStrategy`: a strategy with which Lightning's Trainer runs the modules of a LightningModule as compiled
steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from zgraph.api.full_state_dict import as_held, full_optimizer_state
from zgraph.api.full_weights import full_weights
from zgraph.lightning.compiled_modules import compile_modules, compiled_modules
from zgraph.lightning.logged_values import log_as_before, log_whole_values
from zgraph.lightning.state_dicts import cut_state, same_buffers, whole_state
from zgraph.lightning.uncompiled_steps import explained, explained_update, refuse_divided, refuse_plain_loss
from zgraph.lightning.unsupported import (
    refuse_optimizers,
    refuse_plan,
    refuse_precision,
    refuse_several_parts,
    refuse_trainer,
    refuse_two_clippings,
)
from zgraph.plan.plan import Plan
from zgraph.update.optimizer import PlanOptimizer


class ZGraphStrategy(DDPStrategy):
    """A strategy of Lightning that compiles the modules of a LightningModule by a plan, and leaves the step itself in Python.

    `plan`: a plan, or the path of its file; by default `Plan()`, ZeRO-3 over all ranks. `modules`: paths of the modules to
    compile; by default the outermost ones that have parameters and a forward. "self" is the LightningModule itself, by its
    `forward`. Each rank has rows of its own, as with Lightning's DDPStrategy, and results are the same. The optimizers are
    those of `configure_optimizers`, over shards; to use the plan's, return `self.model.zgraph.optimizer` there. Checkpoints
    are Lightning's, with whole weights under the plain names.

    Raises `PlanError` or `ModelError` before the first step for what is not supported.
    """

    strategy_name = "zgraph"

    model: Any  # (Lightning's own: the LightningModule)

    def __init__(
        self,
        plan: Plan | str | PathLike[str] | None = None,
        *,
        modules: str | Sequence[str] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Any = "popen",
        **lightning: Any,
    ) -> None:
        # (`lightning` has the arguments of any strategy of Lightning: accelerator, cluster_environment, …)
        super().__init__(
            process_group_backend=process_group_backend, timeout=timeout, start_method=start_method, **lightning
        )
        if self._ddp_kwargs:
            raise TypeError(f"ZGraphStrategy has no argument {next(iter(self._ddp_kwargs))!r}")
        self.plan = plan if isinstance(plan, Plan) else Plan.load(plan) if plan is not None else Plan()
        self.modules = modules
        self.parts: dict[str, nn.Module] = {}
        self._whole = contextlib.ExitStack()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Do nothing: `zgraph.lightning` registers the strategy."""

    # -- before the first step ----------------------------------------------------------------------------------------
    def setup(self, trainer: Any) -> None:
        """Compile the modules, then create the optimizers over their shards."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        plan, fitting = self.plan, trainer.state.fn == TrainerFn.FITTING
        refuse_trainer(trainer, self._layer_sync)
        refuse_plan(plan, self.world_size)
        refuse_precision(self.precision_plugin, plan)
        refuse_two_clippings(plan, trainer.gradient_clip_val)
        parts = compiled_modules(self.model, self.modules)
        refuse_several_parts(plan, parts)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        same_buffers(self.model, but=parts.values())
        compile_modules(parts, plan, self.root_device, self.world_size)
        self.parts = parts
        self._reset_optimizers_and_schedulers()
        if fitting:
            self.setup_optimizers(trainer)
            refuse_optimizers(self.optimizers, self.model, plan)
        self.setup_precision_plugin()
        log_whole_values(self.model)

    def model_to_device(self) -> None:
        """Move what has memory to this rank's device: tensors on the meta device get their memory when they are
        compiled."""
        _to_device(self.model, self.root_device)

    # -- steps --------------------------------------------------------------------------------------------------------
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the LightningModule's own step, and refuse a loss that is sharded."""
        with explained("training_step"):
            output = super().training_step(*args, **kwargs)
        refuse_divided(output)
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the LightningModule's own step."""
        with explained("validation_step"):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the LightningModule's own step."""
        with explained("test_step"):
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the LightningModule's own step."""
        with explained("predict_step"):
            return super().predict_step(*args, **kwargs)

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """Raise `ModelError` for a loss that is sharded, or does not come from compiled modules."""
        refuse_divided(closure_loss)
        refuse_plain_loss(closure_loss, self.parts)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Let backward passes inside accumulate without reducing."""
        with contextlib.ExitStack() as stack:
            for part in self.parts.values():
                stack.enter_context(part.zgraph.no_sync())  # type: ignore[union-attr, operator]
            yield

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the closure, then Lightning's own step of an optimizer without it; the plan's
        optimizer takes no closure."""
        with explained("optimizer_step"):
            if not isinstance(optimizer, PlanOptimizer):
                result = closure()
                with explained_update(optimizer):
                    return super().optimizer_step(optimizer, lambda: result, model, **kwargs)
        result = self.precision_plugin._wrap_closure(model or self.lightning_module, optimizer, closure)
        optimizer.step()
        return result

    # -- evaluation ---------------------------------------------------------------------------------------------------
    def on_validation_start(self) -> None:
        """Prepare an evaluation: see `_prepare_evaluation`."""
        trainer = self._trainer()
        self._prepare_evaluation(trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)

    def on_test_start(self) -> None:
        """Prepare an evaluation: see `_prepare_evaluation`."""
        self._prepare_evaluation(self._trainer().num_test_batches)

    def on_predict_start(self) -> None:
        """Prepare an evaluation: see `_prepare_evaluation`."""
        self._prepare_evaluation(self._trainer().num_predict_batches)

    def on_validation_end(self) -> None:
        """Free the whole weights."""
        self._divided_again()

    on_test_end = on_predict_end = on_validation_end

    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def _prepare_evaluation(self, batches: Sequence[float]) -> None:
        """Copy rank 0's buffers to all ranks, and gather the weights if ranks have different numbers of batches.

        Rank 0's buffers are those that are saved. Numbers of batches differ in `predict`, which repeats none: each rank
        then evaluates the plain modules, since the collectives of programs need all ranks.
        """
        same_buffers(self.model)
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, list(batches))
        if any(other != everyone[0] for other in everyone):
            with torch.inference_mode(False):
                for part in self.parts.values():
                    self._whole.enter_context(full_weights(part))

    def _divided_again(self) -> None:
        with torch.inference_mode(False):
            self._whole.close()

    # -- checkpoints --------------------------------------------------------------------------------------------------
    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: a checkpoint is read into shards."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the whole weights on rank 0. All ranks must call it."""
        assert self.lightning_module is not None
        return whole_state(self.lightning_module, self.parts)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's shards of the weights."""
        assert self.lightning_module is not None
        state = cut_state(self.lightning_module, checkpoint["state_dict"])
        self.lightning_module.load_state_dict(state, strict=strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the whole states on rank 0. All ranks must call it."""
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return full_optimizer_state(list(self.parts.values()), inner, ranks=[0])

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's shards of the states."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(as_held(state, optimizer))

    # -- after it -----------------------------------------------------------------------------------------------------
    def on_exception(self, exception: BaseException) -> None:
        """Do nothing: Lightning's advice is about DistributedDataParallel."""

    def teardown(self) -> None:
        """Tear down, but leave the model on its device: its programs are compiled for it."""
        assert self.cluster_environment is not None and self.accelerator is not None
        self._whole.pop_all()
        log_as_before(self.model)
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _to_device(module: nn.Module, device: torch.device) -> None:
    if not any(t.is_meta for t in [*module.parameters(), *module.buffers()]):
        module.to(device)
        return
    for child in module.children():
        _to_device(child, device)
    for table in (module._parameters, module._buffers):
        for tensor in table.values():
            if tensor is not None and not tensor.is_meta:
                tensor.data = tensor.data.to(device)
