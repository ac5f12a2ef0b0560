"""`PipelineModule`: a sequence of layers as one plain module, which the plan's passes cut into stages.

Every rank makes all layers, so that their values are those of one process; only those of its own stages stay once the model is compiled. What each
stage holds is found in the captured graph, not by counting layers on the way.
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
from zgraph.errors import ModelError, PlanError, UnsupportedError
from zgraph.names import did_you_mean


class PipelineError(ModelError):
    """A call that a pipeline has not."""


class LayerSpec:
    """A layer that is made when the pipeline is: its class and what that is called with."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (inspect.isclass(typename) and issubclass(typename, nn.Module)):
            raise ModelError(f"LayerSpec takes a class of nn.Module, not {typename!r}", hint="give a function as it is")
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """The layer."""
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        given = [*map(repr, self.module_args), *(f"{k}={v!r}" for k, v in self.module_kwargs.items())]
        return f"{self.typename.__name__}({', '.join(given)})"


class TiedLayerSpec(LayerSpec):
    """A layer that is one with the others of its `key`: it is made once. `forward_fn(layer, x)` is called in place of the layer, where given."""

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


@dataclass
class Options:
    """What a `PipelineModule` takes by name."""

    seed_layers: bool = False
    seed_fn: Callable[[int], Any] | None = None
    base_seed: int = 1234
    partition_method: str = "parameters"
    activation_checkpoint_interval: int = 0
    activation_checkpoint_func: Callable[..., Any] | None = None
    checkpointable_layers: list[str] | None = None
    dynamic_shape: bool = False


class PipelineModule(nn.Module):
    """Layers (modules, `LayerSpec`s, functions) that run one after another, in `num_stages` stages or those of a `topology`.

    `loss_fn(output, labels)` is the loss. `partition_method` is "parameters", "uniform" or "type:REGEX"; with `seed_layers` layer i is made by seed
    `base_seed` + i (`seed_fn` sets it); `activation_checkpoint_interval` above 0 computes activations again in the backward. Called with
    inputs it gives the last layer's output, called with (inputs, labels) the loss. Raises `ModelError` for a layer that is none, `PlanError` for an
    unknown option or way of cutting.
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
        made = layer.build() if isinstance(layer, LayerSpec) else layer
        if isinstance(made, PipelineModule):
            raise UnsupportedError(f"layer {at} is a pipeline itself", hint="put its layers into the outer one")
        if isinstance(made, nn.Module):
            self.add_module(str(at), made)
        elif not callable(made):
            raise ModelError(f"layer {at} is a {type(made).__name__}", hint="a module, a LayerSpec, or a function")
        self.forward_funcs.append(made)

    def forward(self, inputs: Any, labels: Any = None) -> Any:
        """The last layer's output; with `labels` and a `loss_fn` the loss."""
        for layer in self.forward_funcs:
            inputs = layer(inputs)
        return inputs if labels is None or self.loss_fn is None else self.loss_fn(inputs, labels)

    # -- the configuration ----------------------------------------------------------------------------------------------
    def configure(self, config: dict[str, Any]) -> None:
        """Write into a configuration what this module says: stages, how they are cut, ranks that divide weights, what is computed again. Raises
        `PlanError` where the configuration says otherwise."""
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
        """Stages and the other axes of all ranks. Raises `PlanError` where the stages do not divide them."""
        if self._topology is None:
            world = comm.get_world_size()
            if world % self.num_stages:
                raise PlanError(f"{world} ranks can't be divided by {self.num_stages} stages", where="num_stages")
            self._topology = PipeDataParallelTopology(num_pp=self.num_stages, num_dp=world // self.num_stages)
        return self._topology

    def mpu(self) -> PipelineParallelGrid:
        """This rank's place."""
        return PipelineParallelGrid(self.topology())

    def num_pipeline_stages(self) -> int:
        return int(self.num_stages)


def _set_seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
