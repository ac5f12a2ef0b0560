"""The update of zero gradients with which DeepSpeed's optimizers of low weights begin at stage 0.

DeepSpeed (0.19.8, `FP16_Optimizer` and `FP16_UnfusedOptimizer`) fills an optimizer's states by one step with gradients of zero, at the rates of
its groups before a schedule sets them. After it Adam's count of updates is one ahead of its moments, so that the first updates are smaller, and
weight decay has been applied once. An engine makes the same update, and its losses are DeepSpeed's. It counts nowhere else: not as a step, not
for the loss scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zgraph.api.handle import Handle
from zgraph.deepspeed.engine_settings import value_of
from zgraph.plan.optimizers import OneBitOptimizer
from zgraph.plan.plan import Plan


def begins_with_zeros(config: Mapping[str, Any], plan: Plan, *, pipelined: bool) -> bool:
    """Return whether DeepSpeed begins with such an update. (A pipeline in bf16 has another optimizer of low weights, and 1-bit
    optimizers are not of 0.19.8.)"""
    low = value_of(config, "fp16.enabled", False) or (value_of(config, "bf16.enabled", False) and not pipelined)
    share = isinstance(plan.optimizer, OneBitOptimizer) or plan.local_steps is not None
    return bool(low and plan.zero == 0 and plan.optimizer is not None and not share)


def update_of_zeros(handle: Handle, optimizer: Any) -> None:
    """Make the update, as soon as the model is cut; `optimizer` is the engine's."""
    rates = [group["lr"] for group in optimizer.param_groups]

    def run() -> None:
        runtime, groups = handle.runtime, optimizer.param_groups
        updater = runtime.updater
        scheduled = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        for param in runtime.shards.params().values():
            if param.requires_grad and not param.is_meta:
                param.grad = torch.zeros_like(param, dtype=param.grad_dtype or param.dtype)
        updater.make_states()
        scale = {name: value.clone() for name, value in updater.states.of_scale().items()}
        optimizer.step()
        updater.settle()
        updater.calls = 0
        for name, value in updater.states.of_scale().items():
            value.copy_(scale[name])
        for group, rate in zip(groups, scheduled, strict=True):
            group["lr"] = rate

    handle.when_placed(run)


def count_ahead(handle: Handle) -> None:
    """Let an optimizer that begins anew, with weights of a checkpoint, count the update of zeros."""
    updater = handle.runtime.updater
    updater.make_states()
    updater.states.set_counts(dict.fromkeys(updater.states.members, 1.0))
