"""From a plan to its update program, ready to be compiled: for the run time, the command line and tests alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from zgraph.budget import Outside
from zgraph.passes import History, PassManager
from zgraph.passes.simulator import memory_of
from zgraph.pipeline import build_update_passes
from zgraph.program import torch_private
from zgraph.program.program import ParamSpec
from zgraph.update.build import UpdateOptions, build_update, states_of
from zgraph.update.groups import Member, members_of

if TYPE_CHECKING:
    from zgraph.plan import Plan


def update_options(plan: Plan, members: Sequence[Member], specs: dict[str, ParamSpec]) -> UpdateOptions:
    """What of a plan the update program of `members` depends on, besides its optimizer."""
    clip = plan.grad_clip
    options = UpdateOptions(
        clip_norm=clip.norm if clip else None,
        norm_type=clip.norm_type if clip else 2.0,
        clip_value=clip.value if clip else None,
        factor=plan.loss_average == "token",
        ema=plan.ema.decay if plan.ema and plan.optimizer else None,
        loss_scale=plan.loss_scale() if plan.optimizer else None,
        finite_norm=clip is not None and clip.error_if_nonfinite,
        state_dtype=plan.resolved_precision().state_dtype(),
    )
    return replace(options, homes=_homes(plan, members, specs, options))


def _homes(
    plan: Plan, members: Sequence[Member], specs: dict[str, ParamSpec], options: UpdateOptions
) -> dict[str, str]:
    """The tier of each parameter whose states are offloaded: the plan's share of all their bytes at least, the largest first."""
    tier = plan.offload.tier("optimizer")
    if tier is None:
        return {}
    sizes = {m.name: _state_bytes(m, specs[m.name], options) for m in members if m.record is not None}
    wanted = plan.offload.ratio * sum(sizes.values())
    found: dict[str, str] = {}
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        if wanted <= 0 or sizes[name] < plan.offload.least_bytes:
            break
        found[name] = tier
        wanted -= sizes[name]
    return found


def _state_bytes(member: Member, spec: ParamSpec, options: UpdateOptions) -> int:
    return sum(math.prod(s.shape) * s.dtype.itemsize for s in states_of(member, spec, options).values())


def outside_of(
    module: torch.nn.Module, specs: dict[str, ParamSpec], plan: Plan, sizes: dict[str, int], device: torch.device
) -> Outside:
    """What a rank holds besides what forward and backward take and make; where the update brings states to the device under a
    budget, also its own peak."""
    members, options = _updated(module, specs, plan)
    trained = [m for m in members if specs[m.name].requires_grad]
    held = sum(_state_bytes(m, specs[m.name], options) for m in trained if m.name not in options.homes)
    held += _waiting_bytes(specs, plan)
    if plan.memory_budget is None or not trained or not plan.offload.tiers():
        return Outside(held)
    program = update_history(plan, trained, specs, sizes, device, options).program
    peaks = [sum(at.values()) for at in memory_of(program, plan.backend == "inductor")]
    return Outside(held, max(peaks, default=0))


def _updated(module: torch.nn.Module, specs: dict[str, ParamSpec], plan: Plan) -> tuple[list[Member], UpdateOptions]:
    """What the plan's optimizer updates (nothing without one), and how."""
    members = members_of(module, specs, plan.optimizer) if plan.optimizer is not None else []
    return members, update_options(plan, members, specs)


def _waiting_bytes(specs: dict[str, ParamSpec], plan: Plan) -> int:
    """Bytes of gradients between micro-batches."""
    total = 0
    if plan.micro_batches > 1:
        # (stages 0 and 1 keep them whole until the last micro-batch)
        shapes = [
            (s.shard_shape if plan.zero > 1 else s.shape, s.grad_dtype)
            for s in specs.values()
            if s.requires_grad and s.home is None
        ]
        total += sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)
    return total


def away_bytes(module: torch.nn.Module, specs: dict[str, ParamSpec], plan: Plan) -> int:
    """Bytes that a rank keeps on disk from step to step: what lies there of weights, gradients and states."""
    total = 0
    if plan.offload.tier("parameters") == "nvme":
        for spec in (s for s in specs.values() if s.home is not None):
            grad = spec.grad_dtype.itemsize if spec.requires_grad else 0
            total += math.prod(spec.shard_shape) * (spec.dtype.itemsize + grad)
    if plan.offload.tier("optimizer") == "nvme":
        members, options = _updated(module, specs, plan)
        total += sum(_state_bytes(m, specs[m.name], options) for m in members if m.name in options.homes)
    return total


def update_history(
    plan: Plan,
    members: Sequence[Member],
    specs: dict[str, ParamSpec],
    sizes: dict[str, int],
    device: torch.device,
    options: UpdateOptions,
    name: str = "update",
    first: Sequence[str] = (),
) -> History:
    """Build the update of `members` and run the passes for it; parameters named in `first` are updated as early as they can be."""
    decompositions = torch_private.inductor_decompositions() if plan.backend == "inductor" else {}
    program = build_update(members, specs, sizes, device, options, decompositions, name)
    return PassManager(build_update_passes(plan, tuple(first))).run(program)
