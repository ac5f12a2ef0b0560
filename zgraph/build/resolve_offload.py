"""What "auto" means in a plan's `offload`: which memory a budget may use besides the device's.

Without a budget it is the device. With one, it is the memory of the host where that is another than the device's, else the disk of a
folder that the plan names. Activations and states are then taken there as far as the budget needs it (`zgraph/build/memory_search.py`, after
capture); parameters all or none, before it: where weights, and the gradients and states that stay, leave little room for anything else.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from zgraph.build.update_program import state_bytes
from zgraph.parameters.sharding import planned_layout
from zgraph.passes.update.group_updates import default_bytes
from zgraph.plan.offloading import KINDS
from zgraph.program.program import STAGE_DIM, TENSOR_DIM
from zgraph.ranks.host import host_free

if TYPE_CHECKING:
    from zgraph.plan.plan import Plan

STAGES = 3  # groups of an update that are on the device at once, nearly
STAY = 0.7  # of a budget, at most, for what lies on the device all the time
HOST_SHARE = 0.8  # of the host's memory that is free may be used


def placed(
    plan: Plan,
    module: nn.Module,
    sizes: dict[str, int],
    device: torch.device,
    any_rank: Callable[[bool], bool] = bool,
) -> Plan:
    """The plan with a place for each "auto" of its `offload`, if it has a budget. `sizes` is the mesh, with its stages.
    `any_rank` says whether something is true on one
    rank at least: all place alike."""
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
    found = {what: _place(getattr(offload, what), host) for what in auto}
    if plan.optimizer is None and "optimizer" in found:
        found["optimizer"] = "none"
    if "parameters" in found:
        away = found.get("optimizer", offload.optimizer) != "none"
        if away and offload.update_on == "host" and device.type != "cpu":
            weights -= sum(s.grad_bytes for s in specs.values()) // parts
        stay = STAGES * (offload.sub_group_bytes or default_bytes(states)) if away else states
        whole = max((s.nbytes for s in specs.values()), default=0) // among
        if plan.zero < 3 or weights + stay + whole <= STAY * plan.memory_budget:
            found["parameters"] = "none"
    return plan.model_copy(update={"offload": offload.placed(found)})


def placed_as(plan: Plan, other: Plan) -> Plan:
    """The plan with each "auto" where the model runs by now, by the `other` plan."""
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
    """The ranks that share this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
