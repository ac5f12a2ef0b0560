"""Checks that refuse what a Trainer, a Fabric, a plan and a LightningModule can't be combined with."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.plugins import precision as of_fabric
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import precision as of_trainer

from zgraph.errors import ModelError, PlanError
from zgraph.plan.plan import Plan
from zgraph.update.optimizer import PlanOptimizer

# Fields of a plan that Lightning sets, with Lightning's own way to set them.
_BY_LIGHTNING = {
    "micro_batches": "accumulate_grad_batches",
    "loss_average": "what training_step returns",
    "elastic": "the DataLoader's batch_size, and accumulate_grad_batches",
    "ema": "a callback of your own; Lightning's checkpoints would not hold the plan's average",
}
_PRECISIONS = (
    of_trainer.MixedPrecision,
    of_trainer.HalfPrecision,
    of_trainer.DoublePrecision,
    of_fabric.MixedPrecision,
    of_fabric.HalfPrecision,
    of_fabric.DoublePrecision,
)
_PLAIN = (of_trainer.Precision, of_fabric.Precision)


def refuse_plan(plan: Plan, world: int) -> None:
    """Raise `PlanError` for a plan with fields that Lightning sets, and for a mesh whose ranks share rows."""
    usual = Plan()
    for field, said in _BY_LIGHTNING.items():
        if getattr(plan, field) != getattr(usual, field):
            raise PlanError(
                f"the plan of a ZGraphStrategy has no {field}",
                where=field,
                why=f"Lightning says it: {said}",
                hint="leave it out of the plan",
            )
    if plan.optimizer is None:
        for field in ("lr_schedule", "grad_clip"):
            if getattr(plan, field) is not None:
                raise PlanError(
                    f"the plan has {field} and no optimizer",
                    where=field,
                    why="the optimizer of configure_optimizers knows nothing of it",
                    hint="leave it out, and say it in Lightning; or give the plan the optimizer",
                )
    if plan.resolved_precision().scaling() is not None:
        raise PlanError(
            "the plan of a ZGraphStrategy scales no losses",
            where="precision",
            why="Lightning's checkpoints would not hold the scale",
            hint='precision="16-mixed" of the Trainer, whose GradScaler is saved; or bf16',
        )
    for name, size in plan.resolve_mesh(world).items():
        if name not in ("dp", "replicate") and size > 1:
            raise PlanError(
                f"a ZGraphStrategy can't train over mesh dimension {name!r}",
                where=f"mesh.{name}",
                why="Lightning gives each rank rows of its own, and training_step computes outside of what is compiled",
                hint="dp and replicate; or model.train_step in a loop of your own",
            )


def refuse_precision(plugin: Any, plan: Plan) -> None:
    """Raise `PlanError` for a precision plugin that compiled modules do not support, and for a plugin and a plan
    that both set the precision."""
    if type(plugin) not in _PLAIN and not isinstance(plugin, _PRECISIONS):
        raise PlanError(
            f"{type(plugin).__name__} can't be had with ZGraphStrategy",
            where="precision",
            why="it replaces modules or tensors by its own, which the compiler does not know",
            hint='precision="bf16-mixed", "16-mixed", "bf16-true", "16-true", "32-true" or "64-true"; or the plan\'s precision',
        )
    if plan.optimizer is not None and getattr(plugin, "scaler", None) is not None:
        raise PlanError(
            f"the plan has an optimizer, and Lightning's precision {plugin.precision!r} scales the loss",
            where="optimizer",
            why="the GradScaler would have to divide gradients by its scale that the plan's update has already in its hands",
            hint='precision="bf16-mixed"; or make the optimizer in configure_optimizers',
        )
    if type(plugin) not in _PLAIN and plan.precision != Plan().precision:
        raise PlanError(
            f"Lightning's precision is {plugin.precision!r}, and the plan has one as well",
            where="precision",
            why="both say what is computed in which dtype",
            hint="leave one of them out",
        )


def refuse_trainer(trainer: Any, layer_sync: Any) -> None:
    """Raise `PlanError` for features of a Trainer that compiled modules do not support, `ModelError` for a
    LightningModule compiled by torch.compile."""
    model = trainer.lightning_module
    if getattr(model, "_compiler_ctx", None) is not None:
        raise ModelError(
            "the LightningModule is compiled by torch.compile",
            why="the strategy captures its modules, and torch.compile would stand around them",
            hint="leave torch.compile out",
        )
    if layer_sync is not None:
        raise PlanError(
            "sync_batchnorm can't be had with ZGraphStrategy",
            where="sync_batchnorm",
            why="its layers communicate inside of forward, where only the plan's programs do",
            hint="leave it out; or use GroupNorm, or the batch normalization of each rank's rows",
        )
    for callback in trainer.callbacks:
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging | ModelPruning):
            raise PlanError(
                f"{type(callback).__name__} can't be had with ZGraphStrategy",
                where="callbacks",
                why="it works on a copy of the whole model, or replaces parameters, and these are divided over the ranks",
                hint="a callback that averages pl_module.parameters() in place: operations on them work on shards",
            )
    if trainer.strategy.root_device.type not in ("cpu", "cuda"):
        raise PlanError(
            f"a plan has no programs for {trainer.strategy.root_device.type}",
            where="accelerator",
            hint='accelerator="cpu" or "gpu"',
        )


def refuse_optimizers(optimizers: list[torch.optim.Optimizer], model: torch.nn.Module, plan: Plan) -> None:
    """Raise `PlanError` for optimizers that do not work with the plan or with shards, `ModelError` for one that
    holds parameters from before sharding."""
    current = {id(p) for p in model.parameters()}
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if isinstance(optimizer, torch.optim.LBFGS) or hasattr(optimizer, "consolidate_state_dict"):
            raise PlanError(
                f"{name} can't be had with ZGraphStrategy",
                where="configure_optimizers",
                why="it joins all parameters in one vector, or divides them itself, and these are divided already",
                hint="an optimizer that updates each parameter by its own gradient",
            )
        if any(id(p) not in current for group in optimizer.param_groups for p in group["params"]):
            raise ModelError(
                f"{name} holds parameters that are not the model's as it is now",
                where="configure_optimizers",
                why="the strategy has put shards in their places",
                hint="make the optimizer in configure_optimizers, of self.parameters()",
            )
    planned = [o for o in optimizers if isinstance(o, PlanOptimizer)]
    if plan.optimizer is not None and (len(optimizers) != 1 or not planned):
        raise PlanError(
            f"the plan has an optimizer, and configure_optimizers returns {', '.join(type(o).__name__ for o in optimizers) or 'none'}",
            where="optimizer",
            hint="return the plan's, self.model.zgraph.optimizer of the compiled module; or leave it out of the plan",
        )


def refuse_two_clippings(plan: Plan, clip_val: Any) -> None:
    """Raise `PlanError` if the plan and the Trainer both clip."""
    if plan.grad_clip is not None and clip_val:
        raise PlanError(
            "gradient_clip_val of the Trainer and grad_clip of the plan both clip gradients",
            where="grad_clip",
            hint="leave one of them out",
        )


def refuse_several_parts(plan: Plan, parts: Any) -> None:
    """Raise `PlanError` for a plan with an optimizer if several modules are compiled, each of which would get its
    own."""
    if plan.optimizer is not None and len(parts) > 1:
        raise PlanError(
            f"the plan has an optimizer, and {len(parts)} modules are compiled: {', '.join(parts)}",
            where="optimizer",
            why="each would have an optimizer of its own, that knows the norm of its own gradients alone",
            hint='modules="self" compiles the LightningModule by its forward; or make the optimizer in configure_optimizers',
        )
