"""Compare plans for one model, and search for the best: step time and peak by simulation, on the same batch.

Every plan gets the same batch of a rank, cut into its micro-batches. The search tries ZeRO stages and numbers of
micro-batches; for each, the memory budget's own search (`zgraph/build/memory_search.py`) decides what to recompute, to
offload and to keep gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from zgraph.build.pass_pipeline import costs_of
from zgraph.build.planned_step import Inputs
from zgraph.errors import ZgraphError
from zgraph.forecast.stages import forecast_pipeline
from zgraph.inspection.make_inspection import of_model
from zgraph.inspection.memory import peak_of
from zgraph.plan.plan import Plan

RESERVE = (
    0.95  # the part of a device's memory that a plan without a budget may use; allocator and libraries need the rest
)


@dataclass(frozen=True)
class Evaluation:
    """The time and memory that a plan takes for a rank's batch, by simulation; with a pipeline, on the rank that takes
    most."""

    name: str  # the plan's name in the comparison
    plan: Plan  # the plan
    limit: int  # the bytes that it may use
    seconds: float = float("inf")  # a step with its update
    exposed: float = 0.0  # seconds of communication that are not hidden
    peak: int = 0  # the most bytes of the device in use
    problem: str = ""  # why it can't be used; "" if it can
    bubble: float | None = None  # the part of all ranks' time in which they idle in a pipeline; None without one

    @property
    def possible(self) -> bool:
        return not self.problem

    @property
    def fits(self) -> bool:
        return self.possible and self.peak <= self.limit

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "seconds": self.seconds if self.possible else None,
            "exposed": self.exposed,
            "peak": self.peak,
            **({"bubble": self.bubble} if self.bubble is not None else {}),
            "limit": self.limit,
            "fits": self.fits,
            "problem": self.problem or None,
            "plan": self.plan.model_dump(mode="json"),
        }


def limit_of(plan: Plan) -> int:
    """Return the bytes that a plan may use: its budget, else most of its hardware's memory."""
    return plan.memory_budget or int(costs_of(plan).hardware.capacity * RESERVE)


def evaluate(
    model: nn.Module, inputs: Inputs, plan: Plan, world: int, name: str, limit: int | None = None
) -> Evaluation:
    """Evaluate one plan for `world` ranks within `limit` bytes (by default `limit_of` it). An error becomes the
    result's `problem`."""
    limit = limit_of(plan) if limit is None else limit
    try:
        if plan.pipeline_ranks(world) > 1:
            whole = forecast_pipeline(model, plan, inputs, world)
            peak, bubble = whole.worst.peak, whole.timeline.bubble
            return Evaluation(name, plan, limit, whole.seconds, whole.exposed, peak, bubble=bubble)
        inspection = of_model(model, plan, inputs, world)
        step = inspection.forecast
        return Evaluation(name, plan, limit, step.seconds, step.exposed, peak_of(inspection).bytes)
    except ZgraphError as error:
        return Evaluation(name, plan, limit, problem="; ".join(text for text in (error.what, error.why) if text))


def ranked(evaluations: list[Evaluation]) -> list[Evaluation]:
    """Sort evaluations: the fastest that fits first, those that don't fit last."""
    return sorted(evaluations, key=lambda e: (not e.fits, e.seconds, e.peak))


def search(
    model: nn.Module,
    inputs: Inputs,
    base: Plan,
    world: int,
    limit: int,
    said: Callable[[str], None] = lambda name: None,
) -> tuple[list[Evaluation], bool]:
    """Evaluate plans like `base` with every ZeRO stage and 1, 2, 4 … micro-batches (an elastic plan's own number),
    within `limit` bytes; return them `ranked`, and whether all were evaluated. `said` is called with each plan's name
    before. An interrupt (KeyboardInterrupt) ends the search early."""
    evaluations: list[Evaluation] = []
    try:
        for plan in _variations(base, inputs, world, limit):
            name = f"zero={plan.zero} micro_batches={plan.for_world(world).micro_batches}"
            said(name)
            evaluations.append(evaluate(model, inputs, plan, world, name, limit))
    except KeyboardInterrupt:
        return ranked(evaluations), False
    return ranked(evaluations), True


def _variations(base: Plan, inputs: Inputs, world: int, limit: int) -> Iterator[Plan]:
    sharded = base.resolve_mesh(world).get("dp", 1) > 1
    rows = rows_of(inputs)
    for zero in (0, 1, 2, 3) if sharded else (base.zero,):
        if base.elastic is not None:
            yield base.model_copy(update={"zero": zero, "memory_budget": limit})
            continue
        micro = 1
        while micro <= rows and rows % micro == 0:
            yield base.model_copy(update={"zero": zero, "micro_batches": micro, "memory_budget": limit})
            micro *= 2


def rows_of(inputs: Inputs) -> int:
    """Return the rows of a batch: the largest dimension 0 of its tensors."""
    return max((x.shape[0] for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor) and x.dim()), default=1)
