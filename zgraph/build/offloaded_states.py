"""Decide which parameters' optimizer states and gradients are offloaded, and to which tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from zgraph.program.program import ParamSpec
from zgraph.update.build_update import UpdateOptions, state_bytes_of
from zgraph.update.parameter_groups import Member

if TYPE_CHECKING:
    from zgraph.plan.plan import Plan

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # shares of the optimizer's states that a memory budget chooses from


def shares_of(plan: Plan) -> tuple[float, ...]:
    """Return the shares of the optimizer's states that may be offloaded: the plan's, or those that a budget chooses
    from."""
    ratio, decides = plan.offload.ratio, plan.memory_budget is not None and plan.offload.tier("optimizer") is not None
    return SHARES if ratio is None and decides else (1.0 if ratio is None else ratio,)


def homes_of_states(
    plan: Plan, members: Sequence[Member], specs: dict[str, ParamSpec], options: UpdateOptions, share: float
) -> dict[str, str]:
    """Return the tier of each parameter whose states are offloaded: the largest first, until they have this share of
    all state bytes."""
    tier = plan.offload.tier("optimizer")
    if tier is None:
        return {}
    sizes = {m.name: state_bytes_of(m, specs[m.name], options) for m in members if m.record is not None}
    wanted = share * sum(sizes.values())
    homes: dict[str, str] = {}
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        if wanted <= 0 or sizes[name] < plan.offload.least_bytes:
            break
        homes[name] = tier
        wanted -= sizes[name]
    return homes


def gradient_homes(plan: Plan, options: UpdateOptions, device: torch.device) -> dict[str, str]:
    """Return the tier that each gradient goes to as it is made, by its parameter's name: the memory of the host that
    updates it.

    (Where the device is the host itself, gradients for states on a disk are in the right place already.)
    """
    there = {"cpu"} if device.type == "cpu" else {"cpu", "nvme"}
    return {n: "cpu" for n, tier in options.homes.items() if plan.offload.gradients and tier in there}
