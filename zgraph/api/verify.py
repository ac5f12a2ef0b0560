"""`zgraph.verify`: a plan's program on N virtual ranks against the plain model, in one process; or the compiled code on real ones.

On virtual ranks the program is run operator by operator, as it is after the split into forward and backward. What Inductor makes of it
is not part of that comparison, but of the other (`zgraph.api.compiled_training`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from zgraph.api.compiled_training import compare_training
from zgraph.build.planned_step import Inputs
from zgraph.plan.plan import Plan
from zgraph.plan.wire import Wire
from zgraph.program.tolerance import Difference
from zgraph.verification.compressed_values import SentValues
from zgraph.verification.virtual_stages import VirtualPipeline
from zgraph.verification.virtual_step import VirtualStep, virtual_step


@dataclass(frozen=True)
class Verification:
    """What `verify` found. `ok`: everything within tolerance; `exact`: everything bit for bit equal. `compiled`: real ranks ran the generated
    code, and `differences` are in the order of the steps."""

    world: int
    plan: Plan
    differences: tuple[Difference, ...]
    compiled: bool = False

    @property
    def ok(self) -> bool:
        return all(d.ok for d in self.differences)

    @property
    def exact(self) -> bool:
        return all(d.exact for d in self.differences)

    @property
    def stage(self) -> int | None:
        """Of a pipeline, the stage in which the first wrong value was made; None if nothing is wrong, and without a pipeline."""
        return next((d.stages[0] for d in self.differences if d.stages and not d.ok), None)

    @property
    def first(self) -> Difference | None:
        """The first that is too large, in the order of `differences`; None if nothing is wrong."""
        return next((d for d in self.differences if not d.ok), None)

    def worst(self, count: int = 5) -> list[Difference]:
        """Those that differ most, first."""
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
    inputs: Inputs,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    *,
    compiled: bool = False,
) -> Verification:
    """Run the plan's program for `model` on `world` virtual ranks and compare it with the plain model.

    `inputs` is the *global* batch (a tuple of args or a dict of kwargs): tensors whose dimension 0 is the largest there
    is are split on it, all others go whole to every rank. `loss_fn(output)` gives the loss, a scalar, where the model's
    output holds none. Inputs whose values decide in forward have to be declared (`dynamic` of the plan). The model is not
    changed, nor is the random state. All ranks' values are held at once. For Inductor the program is its graph before it
    is made kernels, with random numbers drawn as plain PyTorch draws them.

    With mixed precision the plain model is PyTorch's own in that precision (parameters and inputs cast), and tolerances are
    those of the dtype that is computed in.

    Outputs and buffers are compared with those of the plain model on the same rank's part of the batch, gradients with
    the mean over ranks. Differences do not raise: read `.ok`, `.exact`, or print what is returned.

    Of a plan with a pipeline all ranks of all stages run, by the plan's schedule. The batch is split over the ranks that see different rows,
    then into micro-batches, whose losses count equally. Gradients of a parameter of several stages are compared summed, and each stage's
    part of them, like all that crosses between stages, with what the captured program gives there.

    Of a plan with `wire` the program that sends everything as it is is compared with the plain model, and each value that is sent in few bits
    with what it was: an element may be wrong by what its format allows (`zgraph.program.block_quantization`), and what is reported is the largest
    share of it.

    With `compiled` the generated code of the plan's backend trains a copy of the model on real tensors, beside the plain model: two steps of
    an own loop and two of `train_step` (of a pipeline these alone), in two micro-batches where the plan has one and the batch can be cut. A
    `world` of 1 is this process; a larger one is that of the process group (under torchrun it is made), all of whose ranks call this with the
    same global batch, and get the same result. Dropout draws what plain PyTorch draws.

    Raises `SignatureError` if the world does not divide the batch, `StepError` if micro-batches do not divide a rank's part of it,
    `ModelError` if there is no loss, the model is compiled or on the meta device, `MeshError` if the plan's mesh does not fit the world,
    `PlanError` if the model can't be cut as the plan says; with `compiled` `MeshError` for another number of processes than `world`,
    `RankMismatchError` for ranks with different batches, `UnsupportedError` for updates that run late;
    and what capture and passes raise (see `zgraph.compile`).
    """
    plan = plan or Plan()
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


def _sent(virtual: VirtualStep) -> list[Difference]:
    """How far values that are sent in few bits are from what they were."""
    virtual.watch = sent = SentValues()
    _ = VirtualPipeline(virtual).differences if virtual.pipelined else virtual.of_parts(virtual.step.parts())
    return sent.differences
