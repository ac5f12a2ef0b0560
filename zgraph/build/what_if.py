"""Simulates a model's step by another plan, without compiling it, and finds the plans that fit into a budget."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from zgraph.build.build_context import BuildContext
from zgraph.build.memory_search import run_passes
from zgraph.build.resolve_auto_offload import placed
from zgraph.build.resolve_auto_wire import resolved
from zgraph.build.update_program import resident_of, whole_update
from zgraph.capture.tensor_parallel_layout import as_divided
from zgraph.errors import ZgraphError
from zgraph.parameters.layout import planned_layout
from zgraph.passes.analysis.costs import Costs
from zgraph.passes.analysis.simulator import simulate_step
from zgraph.plan.plan import Plan
from zgraph.program.program import STAGE_DIM, Program
from zgraph.record import Record
from zgraph.units import shown_bytes

CHANGES = 3  # the most changes that are listed


@dataclass(frozen=True)
class Taken:
    """The time and memory of a step."""

    seconds: float  # the time of a step
    peak: int  # bytes of the device at its peak


def step_by(plan: Plan, module: nn.Module, captured: Program, costs: Costs, device: torch.device) -> Taken:
    """Simulate a training step of `captured` (which is not changed) by this plan, on the mesh that it was captured for.

    Raises `PlanError` where it does not fit into the plan's memory budget.
    """
    plan = placed(plan, module, captured.mesh, device)
    specs = as_divided(planned_layout(module, captured.mesh, plan), captured.params, captured.mesh)
    program = captured.snapshot()
    program.params = {n: replace(specs[n], requires_grad=s.requires_grad) for n, s in captured.params.items()}
    costs = replace(costs, fused=plan.backend == "inductor")
    residents = resident_of(module, program.params, plan, captured.mesh, device, costs)
    context = resolved(program, BuildContext(plan, costs, residents), training=True)
    history, choice = run_passes(program, context)
    update = whole_update(module, program.params, plan, captured.mesh, device, choice.states)
    late = plan.offload.late
    step = simulate_step(history.program, update.program if update is not None else None, costs, late)
    peaks = [sum(f.peak.values()) for f in step.programs]
    peaks[0] += residents.at(choice.states).held
    return Taken(step.seconds, max(peaks))


def what_fits(plan: Plan, module: nn.Module, captured: Program, costs: Costs, device: torch.device, budget: int) -> str:
    """Return a text of the plan's changes by which a step takes at most `budget` bytes, the fastest first, or that
    there are none."""

    def tried(other: Plan) -> Taken | None:
        """Return the step by another plan; None where it does not fit, or is not possible."""
        try:
            return step_by(other, module, captured, costs, device)
        except ZgraphError:
            return None

    now = tried(plan)
    solutions: list[
        tuple[float, int, str]
    ] = []  # (seconds relative to now, position, line: with equal times the smaller change is first)
    whole = plan.mesh.get(STAGE_DIM, 1) == 1  # (a stage's budget is for more than its program)
    for changes in _candidates(plan, captured.mesh, device):
        within = {"memory_budget": budget} if whole and (plan.recompute == "auto" or "recompute" in changes) else {}
        for more in ({}, within) if changes else (within,):
            step = tried(plan.model_copy(update=changes | more))
            smaller = step is not None and (now is None or step.peak < now.peak)
            if step is not None and smaller and step.peak <= budget:
                slower = step.seconds / now.seconds - 1 if now is not None else 0.0
                text = f"{shown_bytes(step.peak)}, {slower:+.0%} time by the plan's hardware"
                solutions.append((round(slower, 2), len(solutions), f"{_written(changes | more)}: {text}"))
                break
    if not solutions:
        return f"nothing of what a plan can change fits into {shown_bytes(budget)}: a smaller batch, or more ranks"
    return "\n".join(
        [
            f"what fits into {shown_bytes(budget)}, the fastest first:",
            *(f"  {line}" for _, _, line in sorted(solutions)[:CHANGES]),
        ]
    )


def _candidates(plan: Plan, sizes: dict[str, int], device: torch.device) -> list[dict[str, Any]]:
    """Return changes of the plan's fields that need less memory, by themselves or within a budget; an empty one is the
    budget alone."""
    place = "cpu" if device.type == "cuda" else f"nvme:{plan.offload.folder() or 'FOLDER'}"
    changes: list[dict[str, Any]] = [{} if plan.recompute == "auto" else {"recompute": "auto"}]
    for kinds in (("activations",), ("optimizer",), ("activations", "optimizer")):
        here = all(plan.offload.tier(k) is None for k in kinds)
        if here and not ("optimizer" in kinds and plan.optimizer is None):
            changes.append({"offload": plan.offload.model_copy(update=dict.fromkeys(kinds, place))})
    if sizes.get("dp", 1) > 1:
        changes += [{"zero": stage} for stage in range(plan.zero + 1, 4)]
    return changes


def _written(changes: dict[str, Any]) -> str:
    """Return changes as a plan is written."""
    shown = {k: v.model_dump(exclude_defaults=True) if isinstance(v, Record) else v for k, v in changes.items()}
    return ", ".join(f"{k}={json.dumps(v)}" for k, v in shown.items())
