"""The update of zero gradients with which DeepSpeed's optimizers of low weights begin at stage 0.

DeepSpeed (0.19.8, `FP16_Optimizer` and `FP16_UnfusedOptimizer`) fills an optimizer's states by one step with gradients of zero, at the rates of
its groups before a schedule sets them. After it Adam's count of updates is one ahead of its moments, so that the first updates are smaller, and
weight decay has been applied once, to the master weights alone: the low ones get it with the first step that is not skipped (`_Decayed`). An
engine makes the same update, and its losses are DeepSpeed's. It counts nowhere else: not as a step, not for the loss scale.
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
        before = {n: t.clone() for n, t in _weights(handle).items()} if any(_decays(g) for g in groups) else {}
        optimizer.step()
        updater.settle()
        updater.calls = 0
        for name, value in updater.states.of_scale().items():
            value.copy_(scale[name])
        for group, rate in zip(groups, scheduled, strict=True):
            group["lr"] = rate
        if before:
            _Decayed(handle, before).wait_for_a_step()

    handle.when_placed(run)


def _decays(group: Mapping[str, Any]) -> bool:
    return bool(group.get("weight_decay"))


def _weights(handle: Handle) -> dict[str, torch.Tensor]:
    """Return this rank's weights that train, as the programs take them."""
    shards = handle.runtime.shards
    return {n: shards.local(n) for n, p in shards.params().items() if p.requires_grad and not p.is_meta}


class _Decayed:
    """Low weights that the update of zeros has decayed, put aside until the first step: forwards before it run with
    those that it began with.

    An update takes the master weight where that rounds to the low one, and the low one where it does not (a script has
    changed it). So the decayed ones are there while an update runs, and stay if it was not skipped. A parameter that
    was written to meanwhile, by a script or from a checkpoint, stays as it is.
    """

    def __init__(self, handle: Handle, before: Mapping[str, torch.Tensor]) -> None:
        self._handle = handle
        self._before = dict(before)
        self._after = {name: weight.clone() for name, weight in _weights(handle).items()}
        self._shards = handle.runtime.shards  # (others, with counts of their own, once the model is compiled again)
        self._versions: dict[str, tuple[int, ...]] = {}
        self._hooks: list[Any] = []
        self._skipped = 0

    def wait_for_a_step(self) -> None:
        """Put the weights aside until the first step that is not skipped."""
        self._write(self._before)
        optimizer = self._handle.runtime.updater.optimizer
        assert optimizer is not None
        self._hooks = [optimizer.register_step_pre_hook(self._step), optimizer.register_step_post_hook(self._stepped)]

    def _step(self, *_: Any) -> None:
        weights = _weights(self._handle)
        self._before = {n: w for n, w in self._before.items() if n in weights and self._is_untouched(n, weights[n])}
        self._skipped = self._handle.runtime.updater.outcomes.skipped()
        self._write(self._after)

    def _is_untouched(self, name: str, weight: torch.Tensor) -> bool:
        shards = self._handle.runtime.shards
        if shards is self._shards:
            return shards.version(name) == self._versions[name]
        return torch.equal(weight, self._before[name])

    def _stepped(self, *_: Any) -> None:
        updater = self._handle.runtime.updater
        updater.settle()
        if updater.outcomes.skipped() > self._skipped:
            self._write(self._before)
            return
        for hook in self._hooks:
            hook.remove()
        self._before = self._after = {}

    def _write(self, values: Mapping[str, torch.Tensor]) -> None:
        runtime = self._handle.runtime
        for name, weight in _weights(self._handle).items():
            if name in self._before:
                weight.copy_(values[name])
        runtime.weights_changed(list(self._before))
        self._shards = runtime.shards
        self._versions = {name: runtime.shards.version(name) for name in self._before}
