"""`ZGraphStrategy` of Lightning's Fabric: modules that `fabric.setup` is given run compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from os import PathLike
from typing import Any

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.tensor import DTensor

from zgraph.api.full_state_dict import as_held, full_optimizer_state
from zgraph.errors import ModelError, PlanError
from zgraph.lightning.compiled_modules import SELF, compile_modules, compiled_modules
from zgraph.lightning.state_dicts import cut_state, same_buffers, whole_state
from zgraph.lightning.uncompiled_steps import explained_update, refuse_divided, refuse_plain_loss
from zgraph.lightning.unsupported import refuse_optimizers, refuse_plan, refuse_precision, refuse_several_parts
from zgraph.plan.plan import Plan
from zgraph.update.optimizer import PlanOptimizer


class ZGraphStrategy(DDPStrategy):
    """A strategy of Fabric that compiles the modules given to `fabric.setup` and `fabric.setup_module`, by a plan.

    `plan`: a plan, or the path of its file; by default `Plan()`, ZeRO-3 over all ranks. `modules`: paths of the modules to
    compile; by default a module is compiled whole, by its forward, and of a LightningModule the outermost modules that have
    parameters and a forward. In an optimizer that is set up with its module, the shards replace the parameters. Files of
    `fabric.save` have whole weights and states under the plain names.

    Raises `PlanError` or `ModelError` at set-up for what is not supported.
    """

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
        super().__init__(
            process_group_backend=process_group_backend, timeout=timeout, start_method=start_method, **lightning
        )
        if self._ddp_kwargs:
            raise TypeError(f"ZGraphStrategy has no argument {next(iter(self._ddp_kwargs))!r}")
        self.plan = plan if isinstance(plan, Plan) else Plan.load(plan) if plan is not None else Plan()
        self.modules = modules
        self._set_up: list[tuple[nn.Module, dict[str, nn.Module]]] = []
        self._backward_sync_control = _NoSync(self)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Do nothing: `zgraph.lightning` registers the strategy."""

    def parts(self, module: nn.Module) -> dict[str, nn.Module]:
        """Return the compiled parts of a module, by path. Raises `ModelError` for a module that was not set up."""
        for known, parts in self._set_up:
            if known is module:
                return parts
        raise ModelError(
            f"{type(module).__name__} was not set up by this strategy", hint="give fabric what fabric.setup returned"
        )

    # -- set-up -------------------------------------------------------------------------------------------------------
    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """Compile the module in place and return it."""
        refuse_plan(self.plan, self.world_size)
        refuse_precision(self.precision, self.plan)
        whole = SELF if not isinstance(module, LightningModule) else None
        parts = compiled_modules(module, whole if self.modules is None else self.modules)
        refuse_several_parts(self.plan, parts)
        same_buffers(module, but=parts.values())
        compile_modules(parts, self.plan, self.root_device, self.world_size)
        self._set_up.append((module, parts))
        return module

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Any], scheduler: Any = None
    ) -> tuple[nn.Module, list[Any], Any]:
        """Compile the module, and replace its parameters in the optimizers' groups by the shards."""
        if self.plan.optimizer is not None:
            raise PlanError(
                "the plan has an optimizer, and fabric.setup is given another",
                where="optimizer",
                hint="model = fabric.setup_module(model), then fabric.setup_optimizers(model.zgraph.optimizer)",
            )
        for optimizer in optimizers:
            if any(optimizer.state.values()):
                raise ModelError(
                    f"{type(optimizer).__name__} has made steps before fabric.setup",
                    why="its states are of whole parameters",
                    hint="give fabric.setup a new optimizer, and load a checkpoint after it",
                )
        names = {id(p): name for name, p in module.named_parameters()}
        module = self.setup_module(module)
        fresh = dict(module.named_parameters())
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [fresh[names[id(p)]] if id(p) in names else p for p in group["params"]]
        refuse_optimizers(optimizers, module, self.plan)
        return module, optimizers, scheduler

    def module_to_device(self, module: nn.Module) -> None:
        """Move the module to this rank's device."""
        module.to(self.root_device)

    # -- steps --------------------------------------------------------------------------------------------------------
    def backward(self, tensor: torch.Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run Fabric's own backward, and refuse a loss that does not come from compiled modules."""
        refuse_divided(tensor)
        refuse_plain_loss(tensor, [path for _, parts in self._set_up for path in parts])
        super().backward(tensor, module, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Run a closure, if there is one, then Fabric's own step without it."""
        if isinstance(optimizer, PlanOptimizer):
            return super().optimizer_step(optimizer, **kwargs)
        closure = kwargs.pop("closure", None)
        result = closure() if closure is not None else None
        given = {"closure": lambda: result} if closure is not None else {}
        with explained_update(optimizer):
            return super().optimizer_step(optimizer, **given, **kwargs)

    def clip_gradients_norm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Clip by the norm of all gradients over all ranks; return the norm as a plain tensor."""
        norm = super().clip_gradients_norm(*args, **kwargs)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    # -- checkpoints --------------------------------------------------------------------------------------------------
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the whole weights on rank 0. All ranks must call it."""
        return whole_state(module, self.parts(module))

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load this rank's shards of whole weights."""
        module.load_state_dict(cut_state(module, state_dict), strict=strict)

    def get_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the whole states on rank 0. All ranks must call it."""
        parts = [part for _, parts in self._set_up for part in parts.values()]
        return full_optimizer_state(parts, optimizer, ranks=[0])

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a file as Fabric does, and this rank's shards of optimizer states."""
        if isinstance(state, torch.optim.Optimizer):
            state.load_state_dict(as_held(self.checkpoint_io.load_checkpoint(path), state))
            return {}
        if not isinstance(state, dict):
            return super().load_checkpoint(path, state, strict, weights_only)
        given = {k: _ReadsWhole(v) if isinstance(v, torch.optim.Optimizer) else v for k, v in state.items()}
        rest = super().load_checkpoint(path, given, strict, weights_only)
        state.update({k: v for k, v in given.items() if not isinstance(v, _ReadsWhole)})
        return rest


class _ReadsWhole:
    """A stand-in for an optimizer while a file with whole states is read: it loads this rank's shards of them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict(as_held(dict(state), self._optimizer))


class _NoSync(_BackwardSyncControl):
    """The control behind `fabric.no_backward_sync`."""

    def __init__(self, strategy: ZGraphStrategy) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        stack = contextlib.ExitStack()
        for part in self._strategy.parts(module).values() if enabled else ():
            stack.enter_context(part.zgraph.no_sync())  # type: ignore[union-attr, operator]
        return stack
