"""A model's step by another plan, simulated: what it would take, without compiling it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from zgraph.budget import run_passes
from zgraph.passes.costs import Costs
from zgraph.passes.simulator import simulate_step
from zgraph.pipeline import PLAIN
from zgraph.placing import placed
from zgraph.plan import Plan
from zgraph.program.program import Program
from zgraph.sharding import planned_layout
from zgraph.update.program import outside_of, whole_update


@dataclass(frozen=True)
class Taken:
    """What a step takes: seconds, and bytes of the device at its peak."""

    seconds: float
    peak: int


def step_by(plan: Plan, module: nn.Module, captured: Program, costs: Costs, device: torch.device) -> Taken:
    """What a training step of `captured` (which is not changed) would take by this plan, on the mesh that it was captured for.

    Raises `PlanError` where it does not fit into the plan's memory budget.
    """
    plan = placed(plan, module, captured.mesh, device)
    specs = planned_layout(module, captured.mesh, plan)
    program = captured.snapshot()
    program.params = {n: replace(specs[n], requires_grad=s.requires_grad) for n, s in captured.params.items()}
    costs = replace(costs, fused=plan.backend == "inductor")
    outsides = outside_of(module, program.params, plan, captured.mesh, device, costs)
    history, choice = run_passes(program, plan, costs, PLAIN, outsides=outsides)
    update = whole_update(module, program.params, plan, captured.mesh, device, choice.states)
    late = plan.offload.delayed_after is not None and bool(plan.offload.tier("optimizer"))
    step = simulate_step(history.program, update.program if update is not None else None, costs, late)
    peaks = [sum(f.peak.values()) for f in step.programs]
    peaks[0] += outsides.at(choice.states).held
    return Taken(step.seconds, max(peaks))
