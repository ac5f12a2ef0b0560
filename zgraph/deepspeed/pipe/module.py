"""`PipelineModule`: a sequence of layers as one plain module, which the plan's passes cut into stages.

Every rank builds all layers, so that their initial values are those of a single process; once the model is compiled, a rank keeps only those of its
own stages. The contents of each stage are read from the captured graph, not by counting layers.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from zgraph.deepspeed import comm
from zgraph.deepspeed.pipe.topology import PipeDataParallelTopology, PipelineParallelGrid, ProcessTopology
from zgraph.deepspeed.utils.logging import logger
from zgraph.errors import ModelError, PlanError, UnsupportedError
from zgraph.names import did_you_mean


class PipelineError(ModelError):
    """The error for a call that a pipeline does not support."""


class LayerSpec:
    """A layer that is built with its pipeline: its class and its arguments."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (inspect.isclass(typename) and issubclass(typename, nn.Module)):
            raise ModelError(f"LayerSpec takes a class of nn.Module, not {typename!r}", hint="give a function as it is")
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """Build the layer; with `log`, log it."""
        if log:
            logger.info("[rank %d] building %r", comm.get_rank(), self)
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        given = [*map(repr, self.module_args), *(f"{k}={v!r}" for k, v in self.module_kwargs.items())]
        return f"{self.typename.__name__}({', '.join(given)})"


class TiedLayerSpec(LayerSpec):
    """A layer that is built once and shared by all specs of its `key`. `forward_fn(layer, x)`, if given, is called
    in place of the layer."""

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[..., Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


# Options that scripts may give, and that change no number.
_WITHOUT_EFFECT = {"activation_checkpoint_func", "checkpointable_layers", "dynamic_shape"}


@dataclass
class Options:
    """The options of a `PipelineModule`."""

    seed_layers: bool = False  # seed torch and `random` before each layer is built
    seed_fn: Callable[[int], Any] | None = None  # the function that sets a seed
    base_seed: int = 1234  # layer i is built with seed `base_seed` + i
    partition_method: str = "parameters"  # "parameters", "uniform" or "type:REGEX"
    activation_checkpoint_interval: int = 0  # above 0: recompute activations in the backward
    activation_checkpoint_func: Callable[..., Any] | None = None  # accepted, and has no effect
    checkpointable_layers: list[str] | None = None  # accepted, and has no effect
    dynamic_shape: bool = False  # accepted, and has no effect


class PipelineModule(nn.Module):
    """Layers (modules, `LayerSpec`s, functions) that run one after another, in `num_stages` stages or those of a `topology`.

    Called with inputs it returns the last layer's output; called with (inputs, labels) it returns `loss_fn(output, labels)`.
    `options` are the fields of `Options`. Raises `ModelError` for a layer that is not a module, a spec or a function,
    `PlanError` for an unknown option.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        known = [f.name for f in fields(Options)]
        for name in options:
            if name not in known:
                raise PlanError(f"PipelineModule has no option {name!r}", hint=did_you_mean(name, known))
        self.options = Options(**options)
        for name in _WITHOUT_EFFECT & options.keys():
            logger.warning(
                "PipelineModule(%s=…) has no effect here: the program's passes decide what is recomputed", name
            )
        if num_stages is None and topology is None:
            raise PlanError("a pipeline needs num_stages or a topology", hint="PipelineModule(layers, num_stages=2)")
        self.num_stages: int = topology.get_dim("pipe") if topology is not None else num_stages  # type: ignore[assignment]
        self.loss_fn = loss_fn
        self._topology = topology
        self.forward_funcs: list[Any] = []
        self.tied_modules = nn.ModuleDict()
        self._layer_specs = list(layers)
        for at, layer in enumerate(self._layer_specs):
            self._add(at, layer)

    def _add(self, at: int, layer: Any) -> None:
        if self.options.seed_layers:
            (self.options.seed_fn or _set_seed)(self.options.base_seed + at)
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in self.tied_modules:
                self.tied_modules[layer.key] = layer.build()
            tied = self.tied_modules[layer.key]
            self.forward_funcs.append(tied if layer.forward_fn is None else functools.partial(layer.forward_fn, tied))
            return
        built = layer.build() if isinstance(layer, LayerSpec) else layer
        if isinstance(built, PipelineModule):
            raise UnsupportedError(f"layer {at} is a pipeline itself", hint="put its layers into the outer one")
        if isinstance(built, nn.Module):
            self.add_module(str(at), built)
        elif not callable(built):
            raise ModelError(f"layer {at} is a {type(built).__name__}", hint="a module, a LayerSpec, or a function")
        self.forward_funcs.append(built)

    def forward(self, inputs: Any, labels: Any = None) -> Any:
        """Return the last layer's output, or the loss if `labels` are given and there is a `loss_fn`."""
        for layer in self.forward_funcs:
            inputs = layer(inputs)
        return inputs if labels is None or self.loss_fn is None else self.loss_fn(inputs, labels)

    def get_additional_losses(self) -> dict[str, torch.Tensor] | None:
        """Return None. DeepSpeed reports the losses that a subclass returns here beside that of `loss_fn`; here they are
        left out, with a warning."""
        return None

    # -- the configuration ----------------------------------------------------------------------------------------------
    def configure(self, config: dict[str, Any]) -> None:
        """Write this module's settings into a configuration: stages, their partition, recomputation, ranks that divide
        weights.

        Raises `PlanError` if the configuration has another number of stages.
        """
        section = config.setdefault("pipeline", {})
        stages = section.get("stages")
        if stages not in (None, "auto", self.num_stages):
            raise PlanError(
                f"pipeline.stages is {stages}, and the PipelineModule has {self.num_stages}",
                where="pipeline.stages",
                hint="leave it out of the configuration",
            )
        section["stages"] = self.num_stages
        if section.get("partition") in (None, "best"):
            section["partition"] = self.options.partition_method
        if self.options.activation_checkpoint_interval:
            section["activation_checkpoint_interval"] = self.options.activation_checkpoint_interval
        divided = self._topology.get_dim("model") if self._topology is not None else 0
        if divided > 1:
            config.setdefault("tensor_parallel", {}).setdefault("autotp_size", divided)

    # -- who is where -----------------------------------------------------------------------------------------------------
    def topology(self) -> ProcessTopology:
        """Return the topology of all ranks, by default of stages and data-parallel ranks. Raises `PlanError` if the
        stages do not divide the ranks."""
        if self._topology is None:
            world = comm.get_world_size()
            if world % self.num_stages:
                raise PlanError(f"{world} ranks can't be divided by {self.num_stages} stages", where="num_stages")
            self._topology = PipeDataParallelTopology(num_pp=self.num_stages, num_dp=world // self.num_stages)
        return self._topology

    def mpu(self) -> PipelineParallelGrid:
        """Return this rank's position in the topology."""
        return PipelineParallelGrid(self.topology())

    def num_pipeline_stages(self) -> int:
        return int(self.num_stages)


def _set_seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
