"""DeepSpeed's `zero`: models that are built without memory, and parameters that are gathered for a while."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from enum import Enum
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from zgraph.api.full_weights import full_weights
from zgraph.deepspeed.absent_names import Absent
from zgraph.deepspeed.comm import init_distributed
from zgraph.deepspeed.deferred_init import deferred, materialise
from zgraph.deepspeed.utils.logging import no_effect
from zgraph.errors import ModelError, PlanError
from zgraph.names import did_you_mean
from zgraph.runtime.compiled_models import owner_of

__all__ = [
    "DeepSpeedTensorOverride",
    "DeepSpeedZeRoOffload",
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "ZeroParamType",
    "register_external_parameter",
    "restore_init_context",
    "shutdown_init_context",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]

logger = logging.getLogger(__name__)

_TILES = (
    "a product is divided by a pass, which changes no module",
    '"zgraph": {"tiles": …} in the configuration (docs/features/tiles.md)',
)
TiledLinear, TiledLinearReturnBias = Absent("zero.TiledLinear", *_TILES), Absent("zero.TiledLinearReturnBias", *_TILES)
DeepSpeedZeRoOffload = Absent(
    "zero.DeepSpeedZeRoOffload",
    "gathers and releases are in the compiled program, and no module has hooks for them",
    "initialize without an optimizer runs a model's forward on shards",
)
DeepSpeedTensorOverride = Absent(
    "zero.DeepSpeedTensorOverride", "zero.Init takes no tensors of the script's in place of its own", "leave it out"
)


class ZeroParamType(Enum):
    """DeepSpeed's kinds of parameters."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(Enum):
    """DeepSpeed's states of a parameter that is sharded, for scripts that ask one for its `ds_status` if it has one:
    parameters have none here."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


_OPTIONS = (
    "data_parallel_group",
    "mem_efficient_linear",
    "remote_device",
    "pin_memory",
    "config_dict_or_path",
    "config",
    "dtype",
    "mpu",
    "zero_param_parallel_group",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "sequence_data_parallel_group",
    "param_swapper",
    "tensor_overrides",
)


class Init:
    """A context in which models are built without memory for their parameters: `initialize` makes them real shard by shard.

    What constructors do to parameters is recorded, and replayed then: see `zgraph.deepspeed.deferred_init`. The configuration of
    `initialize` sets where values are stored, and their dtype: DeepSpeed's arguments for these have no effect here. The context
    creates the process group, if there is none; without `enabled` it does nothing. Raises `PlanError` for an unknown argument.
    """

    def __init__(self, module: nn.Module | None = None, *, enabled: bool = True, **options: Any) -> None:
        for name in options:
            if name not in _OPTIONS:
                raise PlanError(f"zero.Init has no argument {name!r}", hint=did_you_mean(name, _OPTIONS))
        for name in ("dtype", "remote_device", "pin_memory", "param_swapper", "tensor_overrides"):
            if options.get(name):
                no_effect(f"zero.Init({name}={options[name]!r})", "the configuration of initialize says it")
        self.enabled = enabled and module is None  # (`initialize` shards a module that exists already)
        self._inside = contextlib.ExitStack()

    def __enter__(self) -> Init:
        if self.enabled:
            init_distributed()
            self._inside.enter_context(deferred())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside.close()


def shutdown_init_context() -> None:
    """Do nothing: a context ends with its block."""


restore_init_context = shutdown_init_context


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing but log: the captured graph shows which parameters a module reads."""
    logger.info("register_external_parameter has no effect here: the graph shows which parameters are read where")


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: the captured graph shows which parameters a module reads."""


@contextlib.contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Gather the whole weights of an engine or of a compiled model inside the block, for `generate`: a call is the model's
    own eager code there, so that lengths compile nothing. Yields what it was given. All ranks must enter it.

    Raises `UnsupportedError` for a model in stages, and as `zgraph.full_weights` does for weights that were written to.
    """
    with full_weights(model if "zgraph" in model.__dict__ else model.module):  # type: ignore[arg-type]
        yield model


class GatheredParameters:
    """A context in which parameters are gathered: inside, their modules have whole, plain parameters.

    `params` is a parameter, several, or a module. Read them through their modules (`model.linear.weight`) inside. What
    `modifier_rank` writes to them is copied to the shards at the end. Without a `modifier_rank` they are for reading: a
    changed one raises `ModelError` at the end. `fwd_module` needs nothing: the captured graph shows what a module reads. All ranks
    must enter it.
    """

    def __init__(
        self, params: Any, modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True
    ) -> None:
        given: Iterable[Any] = [params] if isinstance(params, torch.Tensor) else params
        self._params = list(given.parameters() if isinstance(given, nn.Module) else given) if enabled else []
        self._modifier = modifier_rank
        self._held: list[tuple[nn.Parameter, nn.Parameter, list[tuple[nn.Module, str]], int]] = []

    def __enter__(self) -> GatheredParameters:
        for param in self._params:
            if param.is_meta:
                materialise(param)
                self._held.append((param, param, [], param._version))
            elif isinstance(param.data, DTensor):
                model = owner_of(param)
                if model is None:
                    raise ModelError(
                        "a shard that no compiled model has", hint="take it from engine.module.parameters()"
                    )
                whole = nn.Parameter(param.data.full_tensor().clone(), requires_grad=param.requires_grad)
                places = [(m, k) for m in model.modules() for k, p in m._parameters.items() if p is param]
                for module, key in places:
                    module._parameters[key] = whole
                self._held.append((param, whole, places, whole._version))
            else:
                self._held.append((param, param, [], param._version))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gathered, self._held = self._held, []
        for param, _, places, _ in gathered:
            for module, key in places:
                module._parameters[key] = param
        if kind is not None:
            return
        for param, whole, _, version in gathered:
            if self._modifier is None:
                if param is not whole and whole._version != version:
                    raise ModelError(
                        f"a gathered parameter of shape {list(whole.shape)} was written to",
                        why="without a modifier_rank its shards stay as they are, and the change is lost",
                        hint="GatheredParameters(params, modifier_rank=0)",
                    )
                continue
            with torch.no_grad():
                if dist.is_initialized():
                    dist.broadcast(whole.data, src=self._modifier)
                if param is not whole:
                    shard = param.data
                    assert isinstance(shard, DTensor)
                    shard.copy_(distribute_tensor(whole.data, shard.device_mesh, shard.placements))
