"""Resolves "auto" in a plan's `offload`: the memory that a budget may use besides the device's.

Without a budget there is none. With one, it is the host's memory where that is another than the device's, else the disk
of a folder that the plan names. As many activations and states are then offloaded as the budget needs
(`zgraph/build/memory_search.py`, after capture); parameters all or none, before capture: where weights, and the
gradients and states that stay, leave little room for anything else.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from zgraph.build.update_program import state_bytes
from zgraph.parameters.layout import planned_layout
from zgraph.passes.update.group_updates import default_bytes
from zgraph.plan.offloading import KINDS
from zgraph.program.program import STAGE_DIM, TENSOR_DIM
from zgraph.ranks.host import host_free

if TYPE_CHECKING:
    from zgraph.plan.plan import Plan

STAGES = 3  # about the number of groups of an update that are on the device at once
STAY = 0.7  # the largest part of a budget for what stays on the device all the time
HOST_SHARE = 0.8  # the part of the host's free memory that may be used


def placed(
    plan: Plan,
    module: nn.Module,
    sizes: dict[str, int],
    device: torch.device,
    any_rank: Callable[[bool], bool] = bool,
) -> Plan:
    """Return the plan with a place for each "auto" of its `offload`, if it has a budget.

    `sizes` is the mesh, with its stages. `any_rank` returns whether something is true on at least one rank: all ranks
    choose alike.
    """
    offload = plan.offload
    auto = [what for what in KINDS if getattr(offload, what).startswith("auto")]
    if plan.memory_budget is None:
        return plan
    if not auto:
        return plan.model_copy(update={"offload": offload.placed({})})
    specs = planned_layout(module, sizes, plan)
    among = sizes.get(TENSOR_DIM, 1)
    parts = sizes.get(STAGE_DIM, 1) * among  # (before a model is cut, its ranks are taken to have equal parts)
    states = state_bytes(module, specs, plan) // parts
    weights = sum(s.rank_bytes for s in specs.values()) // parts
    host = device.type != "cpu" and not any_rank(states + weights > HOST_SHARE * host_free() / _ranks_here())
    places = {what: _place(getattr(offload, what), host) for what in auto}
    if "optimizer" in places and (plan.optimizer is None or plan.local_steps is not None):
        places["optimizer"] = "none"
    if "parameters" in places and plan.local_steps is not None:
        places["parameters"] = "none"
    if "parameters" in places:
        away = places.get("optimizer", offload.optimizer) != "none"
        if away and offload.update_on == "host" and device.type != "cpu":
            weights -= sum(s.grad_bytes for s in specs.values()) // parts
        stay = STAGES * (offload.sub_group_bytes or default_bytes(states)) if away else states
        whole = max((s.nbytes for s in specs.values()), default=0) // among
        if plan.zero < 3 or weights + stay + whole <= STAY * plan.memory_budget:
            places["parameters"] = "none"
    return plan.model_copy(update={"offload": offload.placed(places)})


def placed_as(plan: Plan, other: Plan) -> Plan:
    """Return the plan with each "auto" replaced by the place that the `other` plan, which the model runs by, has for
    it."""
    if plan.memory_budget is None:
        return plan
    there = {what: str(getattr(other.offload, what)) for what in KINDS}
    return plan.model_copy(
        update={"offload": plan.offload.placed({k: "none" if v.startswith("auto") else v for k, v in there.items()})}
    )


def _place(auto: str, host: bool) -> str:
    folder = auto.partition(":")[2]
    if host:
        return "cpu"
    return f"nvme:{folder}" if folder else "none"


def _ranks_here() -> int:
    """Return the number of ranks that share this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
