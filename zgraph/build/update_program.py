"""From a plan to its update program, ready to be compiled: for the runtime, the command line and tests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from zgraph.build.build_context import ResidentMemory, ResidentMemoryByShare
from zgraph.build.offloaded_states import gradient_homes, homes_of_states, shares_of
from zgraph.build.pass_pipeline import build_update_passes
from zgraph.build.recipe import to_update_recipe
from zgraph.passes import History, PassManager
from zgraph.passes.analysis.costs import Costs
from zgraph.passes.analysis.simulator import simulate
from zgraph.plan.optimizers import UpdateKind
from zgraph.program.program import ParamSpec, with_gradients_in
from zgraph.torch_compat import inductor_code
from zgraph.update.build_update import DATA_DIM, UpdateOptions, build_update, state_bytes_of
from zgraph.update.optimizer_rules import RULES
from zgraph.update.owned_parameters import OwnedParameters, mesh_of, specs_here
from zgraph.update.parameter_groups import Member, members_of
from zgraph.update.sign_compression import residual_sizes

if TYPE_CHECKING:
    from zgraph.plan.plan import Plan


def update_options(
    plan: Plan,
    members: Sequence[Member],
    specs: dict[str, ParamSpec],
    share: float | None = None,
    held: OwnedParameters | None = None,
) -> UpdateOptions:
    """Return the options of the update program of `members`: all that it depends on of the plan besides the optimizer.

    `share` is the share of the states that is offloaded, by default the plan's; `held` is what this rank of a pipeline
    holds, None without a pipeline.
    """
    clip = plan.grad_clip
    options = UpdateOptions(
        clip_norm=clip.norm if clip else None,
        norm_type=clip.norm_type if clip else 2.0,
        clip_value=clip.value if clip else None,
        factor=plan.loss_average == "token",
        ema=plan.ema.decay if plan.ema and plan.optimizer else None,
        loss_scale=plan.loss_scale() if plan.optimizer else None,
        finite_norm=clip is not None and clip.error_if_nonfinite,
        nonfinite=plan.on_nonfinite != "ignore",
        state_dtype=plan.resolved_precision().state_dtype(),
        delayed=plan.offload.delayed_after is not None,
        tied=dict(held.tied) if held is not None else {},
        uncounted=held.uncounted if held is not None else frozenset(),
        kind=plan.update_kind(1),
        local_steps=plan.local_steps,
    )
    return replace(
        options, homes=homes_of_states(plan, members, specs, options, shares_of(plan)[0] if share is None else share)
    )


def resident_of(
    module: torch.nn.Module,
    specs: dict[str, ParamSpec],
    plan: Plan,
    sizes: dict[str, int],
    device: torch.device,
    costs: Costs,
    shares: tuple[float, ...] | None = None,
    held: OwnedParameters | None = None,
) -> ResidentMemoryByShare:
    """Return what a rank holds besides what forward and backward take and make, by the share of the states that is
    offloaded; with `wire.auto`, also what the update takes.

    `shares` are those to choose from, by default `shares_of` the plan. Where a budget lets the update bring states to
    the device, and in a pipeline or with local steps, with a budget, the update's own peak is included. `specs` are those of the whole
    model, `sizes` those of the mesh without stages; `held` is what a rank of a pipeline holds, None without a pipeline.
    """
    whole, specs = specs, specs_here(specs, held)
    shares = shares or shares_of(plan)

    def at(share: float) -> ResidentMemory:
        members, options = trained(module, whole, plan, share, held)
        size = sum(state_bytes_of(m, specs[m.name], options) for m in members if m.name not in options.homes)
        size += unsent_bytes(members, specs, sizes)
        homes = gradient_homes(plan, options, device)
        laid = with_gradients_in(homes, specs)
        waiting = waiting_bytes(laid, plan)
        late = (laid[m.name] for m in members if m.name in options.late() and laid[m.name].grad_home is None)
        size += sum(math.prod(s.shard_shape) * s.grad_dtype.itemsize for s in late)  # (gradients of the previous step)
        peaks = held is not None or bool(plan.offload.tiers()) or plan.local_steps is not None
        peaks = peaks and plan.memory_budget is not None
        if peaks and plan.local_steps is not None:  # (a round's end takes the most)
            options = replace(options, kind=UpdateKind.ROUNDS)
        if not members or not (peaks or plan.wire.auto):
            return ResidentMemory(size + waiting, waiting, homes=homes)
        update_forecast = simulate(
            update_history(plan, members, specs, mesh_of(sizes, held), device, options).program, costs
        )
        if not peaks:  # (`wire.auto` forecasts a whole step)
            return ResidentMemory(size + waiting, waiting, 0, update_forecast.seconds, bool(options.late()), homes)
        if options.late():  # (what it brings to the device is there during a step)
            counted_bytes = sum(update_forecast.peak.get(k, 0) for k in ("parameters", "gradients", "states"))
            size += sum(update_forecast.peak.values()) - counted_bytes
        return ResidentMemory(
            size + waiting,
            waiting,
            sum(update_forecast.peak.values()),
            update_forecast.seconds,
            bool(options.late()),
            homes,
        )

    return ResidentMemoryByShare(shares, at)


def unsent_bytes(members: Sequence[Member], specs: Mapping[str, ParamSpec], sizes: Mapping[str, int]) -> int:
    """Return the bytes of what a rank has not sent of what it shares in signs (the residuals), once it does."""
    ranks = sizes.get(DATA_DIM, 1)
    sending = [m.name for m in members if m.record is not None and RULES[m.record.name].unreduced]
    return 4 * sum(sum(residual_sizes(math.prod(specs[n].shape), ranks).values()) for n in sending)


def whole_update(
    module: torch.nn.Module,
    specs: dict[str, ParamSpec],
    plan: Plan,
    sizes: dict[str, int],
    device: torch.device,
    share: float | None = None,
    held: OwnedParameters | None = None,
    *,
    ends_round: bool = False,
) -> History | None:
    """Build the update of every parameter that trains; return None for a plan without an optimizer, or a model without
    such parameters.

    It is that of the first step, or of one that `ends_round` (None without local steps). `share`: see `update_options`;
    `specs`, `sizes` and `held`: see `resident_of`. A pipeline stage that trains nothing has an update too: it takes
    part in what all stages decide together.
    """
    members, options = trained(module, specs, plan, share, held)
    if not members and (held is None or plan.optimizer is None):
        return None
    name = "update"
    if ends_round:
        if plan.local_steps is None:
            return None
        options, name = replace(options, kind=UpdateKind.ROUNDS), "round"
    return update_history(plan, members, specs_here(specs, held), mesh_of(sizes, held), device, options, name)


def state_bytes(
    module: torch.nn.Module, specs: dict[str, ParamSpec], plan: Plan, held: OwnedParameters | None = None
) -> int:
    """Return the bytes of a rank's optimizer states, wherever they are stored. `specs` and `held`: see `resident_of`."""
    members, options = trained(module, specs, plan, held=held)
    return sum(state_bytes_of(m, specs[m.name], options) for m in members)


def trained(
    module: torch.nn.Module,
    specs: dict[str, ParamSpec],
    plan: Plan,
    share: float | None = None,
    held: OwnedParameters | None = None,
    *,
    frozen: bool = False,
) -> tuple[list[Member], UpdateOptions]:
    """Return the parameters of this rank that the plan's optimizer updates (none without one), and the options of their
    update.

    With `frozen`, those without a gradient are included. `share`: see `update_options`; `specs` and `held`: see
    `resident_of`.
    """
    everywhere = members_of(module, specs, plan.optimizer) if plan.optimizer is not None else []
    members = [m for m in everywhere if held is None or m.name in held.own]
    options = update_options(plan, members, specs, share, held)
    return [m for m in members if frozen or specs[m.name].requires_grad], options


def waiting_bytes(specs: Mapping[str, ParamSpec], plan: Plan) -> int:
    """Return the bytes of gradients on the device between micro-batches."""
    total = 0
    if plan.micro_batches > 1:
        # (ZeRO stages 0 and 1 keep them whole and on the device until the last micro-batch)
        shapes = [
            (s.shard_shape if plan.zero > 1 else s.shape, s.grad_dtype)
            for s in specs.values()
            if s.requires_grad and (plan.zero < 2 or s.grad_home is None)
        ]
        total += sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)
    return total


def away_bytes(
    module: torch.nn.Module, specs: dict[str, ParamSpec], plan: Plan, held: OwnedParameters | None = None
) -> int:
    """Return the bytes of weights, gradients and states that a rank keeps on disk from step to step. `specs` and
    `held`: see `resident_of`."""
    total = 0
    if plan.offload.tier("parameters") == "nvme":
        total += sum(s.rank_bytes for s in specs_here(specs, held).values() if s.home is not None)
    if (
        plan.offload.tier("optimizer") == "nvme" and len(shares_of(plan)) == 1
    ):  # (with several shares it is not known yet)
        members, options = trained(module, specs, plan, held=held, frozen=True)
        total += sum(state_bytes_of(m, specs[m.name], options) for m in members if m.name in options.homes)
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
    verified: bool = True,
) -> History:
    """Build the update of `members` and run its passes; parameters named in `first` are updated as early as they can
    be.

    With `verified` the verifier checks the result of each pass. `specs` are those of the parameters that this rank
    holds; `sizes` has "pp" where there are other stages.
    """
    decompositions = inductor_code.inductor_decompositions() if plan.backend == "inductor" else {}
    specs = with_gradients_in(gradient_homes(plan, options, device), specs)
    program = build_update(members, specs, sizes, device, options, decompositions, name)
    recipe = to_update_recipe(plan, tuple(first))
    return PassManager(build_update_passes(plan, tuple(first)), verify=verified, recipe=recipe).run(program)
