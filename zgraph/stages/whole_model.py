"""Captures the whole model of a pipeline for a micro-batch: to cut it, and for each new input signature."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zgraph.capture.batch import Call, MicroBatch
from zgraph.capture.call_signature import batch_size, signature
from zgraph.capture.capture import Trace, trace
from zgraph.capture.ignored_targets import LossesSeen
from zgraph.capture.symbolic_capture import SymbolicSizes
from zgraph.parameters.layout import with_requires_grad
from zgraph.plan.plan import Plan
from zgraph.program.program import STAGE_DIM, ParamSpec, Program
from zgraph.ranks.agreement import Agreement
from zgraph.runtime.beside_batch import BesideBatch
from zgraph.runtime.train_step import cut_batch, for_forward, loss_of, named
from zgraph.stages.stage_programs import (
    Capture,
    joint_of,
    loss_pattern,
    refuse_state,
    without_fast_path,
)
from zgraph.update.owned_parameters import within


@dataclass
class WholeModel:
    """What is needed to capture a compiled model whole."""

    module: nn.Module  # the user's model
    forward_function: Callable[..., Any]  # the module's own forward
    plan: Plan  # the user's plan
    sizes: dict[str, int]  # of the mesh, by dimension
    mesh: DeviceMesh  # of all stages
    specs: dict[str, ParamSpec]  # each parameter's layout, by name
    device: torch.device  # where the model computes
    everyone: Agreement  # the ranks of all stages
    seed: int  # for initialising parameters
    loss_fn: Callable[..., Any] | None  # the user's loss of the output; None if the model returns its loss
    beside_batch: BesideBatch = field(default_factory=BesideBatch)  # the inputs that are no part of the batch

    @property
    def staged(self) -> bool:
        """Whether the model will be cut into stages, and not only divided."""
        return self.sizes.get(STAGE_DIM, 1) > 1

    def to_cut_by(self, args: tuple[Any, ...], kwargs: dict[str, Any], trains: bool) -> Capture:
        """Capture the model in training, for a call's first micro-batch. If the call does not train, and so may have no
        targets, all outputs are differentiated.
        """
        size, parts = batch_size(args, kwargs), self.plan.micro_batches
        parts = 1 if not trains and size is not None and size % parts else parts
        first, rest, others = for_forward(self, *cut_batch(self, args, kwargs, parts, uneven=None)[0])
        return self.captured("train0", *first, rest=rest, others=others, by_loss=trains)

    def _captured_at(self, call: Call) -> tuple[Program, Sequence[Any]]:
        """Return the program that is captured for another call, and this call's flat inputs."""
        specs = with_requires_grad(self.specs, dict(self.module.named_parameters(remove_duplicate=False)))
        of_mesh, precision = within(self.sizes), self.plan.resolved_precision()
        with without_fast_path():
            traced = trace(self.module, self.forward_function, *call, specs, of_mesh, self.device, precision)
        return traced.joint(traced.pattern, {}, "whole"), traced.flat.flatten(self.module, *call)

    def captured(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rest: Any = (),
        others: Any = None,
        by_loss: bool = True,
        open_sizes: SymbolicSizes | None = None,
    ) -> Capture:
        """Capture the whole model for one micro-batch. The outputs that the loss reads are differentiated, if
        `by_loss`. Sizes in `open_sizes` are symbols.
        """
        start = time.perf_counter()
        inner = within(self.sizes)
        precision = self.plan.resolved_precision()
        specs = with_requires_grad(self.specs, dict(self.module.named_parameters(remove_duplicate=False)))

        def traced_now() -> Trace:
            return trace(
                self.module, self.forward_function, args, kwargs, specs, inner, self.device, precision, open_sizes
            )

        with without_fast_path():
            traced = traced_now()
            if self.staged:
                kept_buffers = refuse_state(traced, traced_now, self.plan.micro_batches, self.module, args, kwargs)
            else:
                kept_buffers = traced.buffers_kept(self.module, args, kwargs)

        def loss(output: Any) -> torch.Tensor:
            with LossesSeen() as seen:
                loss_value = loss_of(output, self.loss_fn, named(self, (args, kwargs)), rest, others or {})
            traced.ignored.update(seen.found)
            return loss_value

        wanted = loss if self.loss_fn is not None and by_loss else None
        pattern = loss_pattern(traced, wanted, self.module, args, kwargs)
        joint = joint_of(traced, self.plan, name, pattern)
        rows_of_outputs: Mapping[int, int | None] = {}
        if self.staged and self.plan.micro_batches > 1:
            flat = traced.flat.flatten(self.module, args, kwargs)
            here = MicroBatch(joint, (args, kwargs), flat, self.beside_batch.is_part, self._captured_at)
            if (shown := here.of_several_rows()) is not None:
                shown.refuse_no_batch()
                rows_of_outputs = shown.rows_of_outputs()
        return Capture(
            signature(self.module, args, kwargs),
            traced,
            pattern,
            joint,
            time.perf_counter() - start,
            by_loss,
            kept_buffers,
            rows_of_outputs,
        )
