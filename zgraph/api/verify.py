"""`zgraph.verify`: compares a plan's program on virtual ranks, in one process, or its compiled code on real ranks, with
the plain model.

On virtual ranks the program runs operator by operator, as it is after the split into forward and backward. The code
that Inductor generates is not part of this comparison, but of the one on real ranks (`zgraph.api.compiled_training`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zgraph.api.compiled_training import compare_training
from zgraph.errors import refuse_no_bool, refuse_no_function, refuse_unless
from zgraph.plan.plan import Plan, plan_of
from zgraph.plan.wire import Wire
from zgraph.program.tolerance import Difference
from zgraph.verification.quantization_errors import CompressedValues
from zgraph.verification.virtual_stages import VirtualPipeline
from zgraph.verification.virtual_step import GlobalBatch, VirtualStep, virtual_step


@dataclass(frozen=True)
class Verification:
    """The result of `verify`. `ok`: everything is within tolerance; `exact`: everything is bit for bit equal."""

    world: int  # the number of ranks
    plan: Plan  # the plan that was run
    differences: tuple[Difference, ...]  # one for each tensor compared; with `compiled` in the order of the steps
    compiled: bool = False  # real ranks ran the generated code

    @property
    def ok(self) -> bool:
        return all(d.ok for d in self.differences)

    @property
    def exact(self) -> bool:
        return all(d.exact for d in self.differences)

    @property
    def stage(self) -> int | None:
        """The pipeline stage that made the first wrong value; None if nothing is wrong, and without a pipeline."""
        return next((d.stages[0] for d in self.differences if d.stages and not d.ok), None)

    @property
    def first(self) -> Difference | None:
        """The first difference above tolerance, in the order of `differences`; None if nothing is wrong."""
        return next((d for d in self.differences if not d.ok), None)

    def worst(self, count: int = 5) -> list[Difference]:
        """Return the largest differences, the largest first."""
        return sorted(self.differences, key=lambda d: (d.ok, -d.error))[:count]

    def __str__(self) -> str:
        bad = sum(not d.ok for d in self.differences)
        plan, ranks = self.plan, self.plan.pipeline_ranks(self.world)
        of = (
            f" ({ranks} for stages, {plan.micro_batches} micro-batches by schedule {plan.schedule})"
            if ranks > 1
            else ""
        )
        where = (
            f"{self.world} real rank{'s' if self.world > 1 else ''}, compiled"
            if self.compiled
            else f"{self.world} virtual ranks"
        )
        head = f"verify: {len(self.differences)} tensors on {where}{of}, zero {plan.zero}, backend {plan.backend}: "
        if self.exact:
            return head + "all bit for bit equal to the plain model"
        lines = [head + (f"{bad} differ too much" if bad else "all within tolerance")]
        lines += [f"  it begins in stage {self.stage}"] if self.stage is not None else []
        shown = [d for d in self.differences if not d.ok][:5] if self.compiled and bad else self.worst()
        lines += [f"  {'ok ' if d.ok else 'BAD'} {d}" for d in shown if not d.exact]
        return "\n".join(lines)


def verify(
    model: nn.Module,
    plan: Plan | None,
    world: int,
    inputs: GlobalBatch,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    *,
    compiled: bool = False,
) -> Verification:
    """Run the plan's program for `model` on `world` virtual ranks and compare it with the plain model.

    `inputs` is the *global* batch (a tuple of args or a dict of kwargs): tensors with the largest dimension 0 are split on it,
    all others go whole to every rank. It may be a list of each data rank's own batch, of equal sizes. `loss_fn(output)` returns
    the loss, a scalar, if the model's output has none. Inputs whose values decide in forward have to be declared (`dynamic` of
    the plan). The model and the random state are not changed. All ranks' values are held at once. For Inductor the program is
    its graph before kernels are generated, with random numbers drawn as plain PyTorch draws them.

    With mixed precision the plain model is PyTorch's own in that precision (parameters and inputs cast), and tolerances are
    those of the compute dtype.

    Outputs and buffers are compared with those of the plain model on the same rank's part of the batch, gradients with
    the mean over ranks. Differences do not raise: read `.ok`, `.exact`, or print the result.

    For a plan with a pipeline, all ranks of all stages run, by the plan's schedule. The batch is split over the
    data-parallel ranks, then into micro-batches, whose losses count equally. The gradient of a parameter that several
    stages use is compared as a sum; each stage's part of it, and every value sent between stages, is compared with the
    captured program's.

    For a plan with `wire`, the program without compression is compared with the plain model, and each compressed value with
    its original: an element may be wrong by what its format allows (`zgraph.program.block_quantization`), and the largest
    error as a fraction of that is reported.

    With `compiled` the generated code of the plan's backend trains a copy of the model on real tensors, beside the plain
    model: two steps of a hand-written loop and two of `train_step` (in a pipeline only the latter), with two micro-batches
    if the plan has one and the batch can be cut. A `world` of 1 is this process; a larger one is that of the process group
    (created under torchrun), whose ranks all call this with the same global batch, and get the same result. Dropout draws
    what plain PyTorch draws.

    Raises `SignatureError` if the world does not divide the batch, or the model does not take a rank's part of it, `StepError`
    if micro-batches do not divide that, `ModelError` if there is no loss, the model is compiled or on the meta device,
    `MeshError` if the plan's mesh does not fit the world, `PlanError` if the model can't be cut by the plan; with `compiled`
    `MeshError` if the number of processes is not `world`, `RankMismatchError` for ranks with different batches,
    `UnsupportedError` for updates that run late and for `wire`; and what capture and passes raise (see `zgraph.compile`).
    """
    plan = plan_of(plan)
    _refuse_others(model, loss_fn, compiled)
    if compiled:
        run, differences = compare_training(model, plan, world, inputs, loss_fn)
        return Verification(world, run, tuple(differences), compiled=True)
    exact = plan.model_copy(update={"wire": Wire(secondary=plan.wire.secondary)})
    with virtual_step(model, exact, world, inputs, loss_fn) as virtual:
        run = virtual.plan
        if virtual.pipelined:
            differences = list(VirtualPipeline(virtual).differences)
        else:
            differences = virtual.differences(virtual.of_parts(virtual.step.parts()))
    if plan.wire.compresses:
        with virtual_step(model, plan, world, inputs, loss_fn) as virtual:
            run, differences = virtual.plan, differences + _sent(virtual)
    return Verification(world, run, tuple(differences))


def _refuse_others(model: Any, loss_fn: Any, compiled: Any) -> None:
    """Raise `ArgumentError` for arguments of wrong types."""
    refuse_unless(isinstance(model, nn.Module), "zgraph.verify(model=…)", model, "an nn.Module")
    refuse_no_function("zgraph.verify(loss_fn=…)", loss_fn)
    refuse_no_bool("zgraph.verify(compiled=…)", compiled)


def _sent(virtual: VirtualStep) -> list[Difference]:
    """Return the differences between compressed values and their originals."""
    virtual.watch = sent = CompressedValues()
    _ = VirtualPipeline(virtual).differences if virtual.pipelined else virtual.of_parts(virtual.step.parts())
    return sent.differences
