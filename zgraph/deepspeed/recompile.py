"""Compiling a compiled model again by another plan, with its weights and a fresh optimizer.

If the parameters' layout stays the same (ZeRO stages 1, 2 and 3 share one), the same shards run by the new plan.
Otherwise the model is made plain first, with whole parameters on every rank.
"""

from __future__ import annotations

import logging

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zgraph.api.compiler import compile
from zgraph.api.handle import Handle, detach
from zgraph.errors import MeshError, ModelError, UnsupportedError
from zgraph.parameters.replaced_parameters import replaced
from zgraph.plan.plan import Plan
from zgraph.stages.runtime import PipelineRuntime
from zgraph.torch_compat.dtensors import local_of
from zgraph.update.build_update import MASTER
from zgraph.update.resume import Known

logger = logging.getLogger(__name__)


def recompile(model: nn.Module, plan: Plan) -> None:
    """Run a compiled model by another plan. All ranks must call it.

    Raises `UnsupportedError` for another layout of a model in stages, or of one with offloaded parameters.
    """
    handle: Handle = model.__dict__["zgraph"]
    if handle.deferred is None:
        handle.finish()
        try:
            handle.recompile(plan)
        except (ModelError, MeshError) as error:
            logger.info("the model is made whole again, for another layout: %s", error.what)
        else:
            _begin_anew(handle)
            return
    _make_whole(model, handle)
    compile(model, plan)


def _begin_anew(handle: Handle) -> None:
    """Reset the optimizer as if it had made no update: no states, no count, the initial loss scale; master weights
    are copied from the parameters."""
    runtime = handle.runtime
    updater = runtime.updater
    for param in runtime.shards.params().values():
        param.grad = None
    updater.zeroed()
    if updater.optimizer is None:
        return
    updater.make_states()
    names = list(runtime.shards.params())
    updater.states.clear(names)
    for name in names:
        master = updater.states.tensors.get(f"{name}/{MASTER}")
        if master is not None:
            with torch.no_grad():
                local_of(master).copy_(runtime.shards.local(name))
    updater.restore(Known(0), 0, {}, False)


def _make_whole(model: nn.Module, handle: Handle) -> None:
    """Gather a model's shards into plain parameters, and remove its runtime."""
    if handle.deferred is None and (
        isinstance(handle.runtime, PipelineRuntime) or handle.plan.offload.tier("parameters") is not None
    ):
        raise UnsupportedError(
            "a model in stages, or with offloaded parameters, can't be initialized again with another layout",
            why="no rank could hold all of it",
            hint="save a checkpoint, build the model anew, initialize and load it",
        )
    optimizer = handle.optimizer if handle.deferred is None else None
    detach(model)
    if optimizer is not None:
        optimizer.retire()
    whole: dict[int, nn.Parameter] = {}
    for child in model.modules():
        for key, param in child._parameters.items():
            if not isinstance(param, DTensor):
                continue
            if id(param) not in whole:
                value = param.detach().full_tensor().clone()
                whole[id(param)] = fresh = nn.Parameter(value, requires_grad=param.requires_grad)
                replaced(
                    param,
                    fresh,
                    "the model was initialized again",
                    "the model has whole parameters by now, and new shards",
                )
            child._parameters[key] = whole[id(param)]
