"""Plans compared for one model, and the best looked for: step time and peak by simulation, on the same batch.

Every plan gets the same batch of a rank, cut into its micro-batches. The search goes over ZeRO stages and numbers of micro-batches; what to
compute again, to offload and to keep gathered is the budget's own search for each of them (`zgraph/budget.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from zgraph.compiled import StepProgram
from zgraph.compiler import Inputs, captured_program, placed_for
from zgraph.errors import ZgraphError
from zgraph.passes.simulator import simulate
from zgraph.pipeline import Variant, costs_of
from zgraph.plan import Plan
from zgraph.update.program import outside_of, whole_update

RESERVE = 0.95  # of a device's memory, where no budget is given: the rest is the allocator's and the libraries'


@dataclass(frozen=True)
class Evaluation:
    """What a plan takes for a rank's batch: `seconds` of a step with its update, `exposed` seconds of communication, `peak` bytes; or the
    `problem` with it."""

    name: str
    plan: Plan
    seconds: float = float("inf")
    exposed: float = 0.0
    peak: int = 0
    problem: str = ""

    @property
    def possible(self) -> bool:
        return not self.problem

    def fits(self, limit: int) -> bool:
        return self.possible and self.peak <= limit

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "seconds": self.seconds if self.possible else None,
            "exposed": self.exposed,
            "peak": self.peak,
            "problem": self.problem or None,
            "plan": self.plan.model_dump(mode="json"),
        }


def limit_of(plan: Plan) -> int:
    """The bytes that a plan may take: its budget, else most of what its hardware has."""
    return plan.memory_budget or int(costs_of(plan).hardware.capacity * RESERVE)


def evaluate(model: nn.Module, inputs: Inputs, plan: Plan, world: int, name: str) -> Evaluation:
    """One plan, for `world` ranks; what is wrong with it is its `problem`."""
    try:
        return _evaluate(model, inputs, plan, world, name)
    except ZgraphError as error:
        return Evaluation(name, plan, problem="; ".join(text for text in (error.what, error.why) if text))


def search(
    model: nn.Module,
    inputs: Inputs,
    base: Plan,
    world: int,
    limit: int,
    said: Callable[[str], None] = lambda name: None,
) -> list[Evaluation]:
    """Plans like `base` of every ZeRO stage and of 1, 2, 4 … micro-batches, within `limit` bytes. `said` is told of each before it is
    evaluated. The fastest comes first, those that don't fit last."""
    found = []
    for plan in _variations(base, inputs, world, limit):
        name = f"zero={plan.zero} micro_batches={plan.micro_batches}"
        said(name)
        found.append(evaluate(model, inputs, plan, world, name))
    return sorted(found, key=lambda e: (not e.fits(limit), e.seconds, e.peak))


def _variations(base: Plan, inputs: Inputs, world: int, limit: int) -> Iterator[Plan]:
    sharded = base.resolve_mesh(world).get("dp", 1) > 1
    rows = rows_of(inputs)
    for zero in (0, 1, 2, 3) if sharded else (base.zero,):
        micro = 1
        while micro <= rows and rows % micro == 0:
            yield base.model_copy(update={"zero": zero, "micro_batches": micro, "memory_budget": limit})
            micro *= 2


def _evaluate(model: nn.Module, inputs: Inputs, plan: Plan, world: int, name: str) -> Evaluation:
    costs, sizes, micro = costs_of(plan), plan.resolve_mesh(world), plan.micro_batches
    plan, device = placed_for(model, plan, sizes, costs)
    captured = captured_program(model, plan, part_of(inputs, micro), world)
    outsides = outside_of(model, captured.params, plan, sizes, device, costs)
    step = StepProgram(captured.name, captured, plan, {}, costs, outsides, lambda program: None)
    step.history()  # (the budget's search, which says where states lie)
    update = whole_update(model, captured.params, plan, sizes, device, step.states)
    taken = simulate(update.program, costs) if update is not None else None
    late = plan.offload.delayed_after is not None and bool(plan.offload.tier("optimizer"))
    between = taken.seconds if taken is not None and not late else 0.0
    whole = plan.zero < 2
    seconds = exposed = 0.0
    peak = max(step.outside.update, sum(taken.peak.values())) if taken is not None else 0
    for at in range(micro):
        last = at == micro - 1
        variant = Variant(step.keeps and at > 0, last or not whole, whole and last and micro > 1)
        found = simulate(step.history(variant).program, costs, lead=0.0 if at else between)
        seconds += found.seconds
        exposed += sum(found.exposed.values())
        peak = max(peak, sum(found.peak.values()) + step.outside.held)
    if taken is not None:
        seconds = max(seconds, taken.seconds) if late else seconds + between
        exposed += sum(taken.exposed.values())
    return Evaluation(name, plan, seconds + costs.hardware.step, exposed, peak)


def rows_of(inputs: Inputs) -> int:
    """The rows of a batch: dimension 0 of its tensors, the largest."""
    return max((x.shape[0] for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor) and x.dim()), default=1)


def part_of(inputs: Inputs, parts: int) -> Inputs:
    """The first micro-batch of a batch that is cut into so many."""
    rows = rows_of(inputs)

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != rows:
            return leaf
        return leaf[: rows // parts]

    return pytree.tree_map(cut, inputs)  # type: ignore[no-any-return]
