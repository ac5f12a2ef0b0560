"""From a plan to its update program, ready to be compiled: for the run time, the command line and tests alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from zgraph.passes import History, PassManager
from zgraph.pipeline import build_update_passes
from zgraph.program import torch_private
from zgraph.program.program import ParamSpec
from zgraph.update.build import UpdateOptions, build_update, states_of
from zgraph.update.groups import Member, members_of

if TYPE_CHECKING:
    from zgraph.plan import Plan


def update_options(plan: Plan) -> UpdateOptions:
    """What of a plan the update program depends on, besides its optimizer."""
    clip = plan.grad_clip
    return UpdateOptions(
        clip_norm=clip.norm if clip else None,
        norm_type=clip.norm_type if clip else 2.0,
        clip_value=clip.value if clip else None,
        factor=plan.loss_average == "token",
        ema=plan.ema.decay if plan.ema and plan.optimizer else None,
        loss_scale=plan.loss_scale() if plan.optimizer else None,
        finite_norm=clip is not None and clip.error_if_nonfinite,
        state_dtype=plan.resolved_precision().state_dtype(),
    )


def held_bytes(module: torch.nn.Module, specs: dict[str, ParamSpec], plan: Plan) -> int:
    """Bytes that a rank holds besides what forward and backward take and make: optimizer states, gradients between
    micro-batches."""
    total = 0
    if plan.optimizer is not None:
        options = update_options(plan)
        for member in members_of(module, specs, plan.optimizer):
            if specs[member.name].requires_grad:
                states = states_of(member, specs[member.name], options).values()
                total += sum(math.prod(s.shape) * s.dtype.itemsize for s in states)
    if plan.micro_batches > 1:
        # (stages 0 and 1 keep them whole until the last micro-batch)
        shapes = [
            (s.shard_shape if plan.zero > 1 else s.shape, s.grad_dtype) for s in specs.values() if s.requires_grad
        ]
        total += sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)
    return total


def update_history(
    plan: Plan,
    members: Sequence[Member],
    specs: dict[str, ParamSpec],
    sizes: dict[str, int],
    device: torch.device,
    name: str = "update",
) -> History:
    """Build the update of `members` and run the passes for it."""
    decompositions = torch_private.inductor_decompositions() if plan.backend == "inductor" else {}
    program = build_update(members, specs, sizes, device, update_options(plan), decompositions, name)
    return PassManager(build_update_passes()).run(program)
