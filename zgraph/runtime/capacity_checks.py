"""Refuses a step that does not fit into the plan's memory budget, or onto the disk that the plan offloads to."""

from __future__ import annotations

from zgraph.build.step_program import StepProgram
from zgraph.errors import OffloadError
from zgraph.runtime.rank import Rank


def check_capacity(rank: Rank, step: StepProgram) -> None:
    """Build the programs of a step with the passes. Raises `PlanError` if one does not fit into the plan's memory
    budget, `SizeError` for a size without a bound beside such a budget, `OffloadError` if the disk has no room for the
    offloaded activations.
    """
    if rank.plan.memory_budget is not None and step.differentiated and step.known is None:
        for variant in step.variants():
            step.history(variant)  # (a program that does not fit is refused now, not in the middle of a step)
    _require(rank, "activations", step.offloaded)
    if step.differentiated and step.states is not None and len(rank.shares) > 1:
        rank.agreement.vote("the share of the optimizer's states that is offloaded", str(step.states))
        options = rank.updater.options_with(step.states)
        _require(rank, "optimizer", rank.updater.states.bytes_at(options))
        rank.updater.offload(options)
        rank.shares = step.context.residents.shares = (step.states,)


def _require(rank: Rank, what: str, size: int) -> None:
    """Raise `OffloadError` on every rank if any rank's disk has no room for `size` bytes of `what`."""
    if rank.tiers.preflight is not None:

        def refused(number: int, said: str) -> OffloadError:
            return OffloadError(f"rank {number} has no room for {what}", where=rank.plan.offload.folder(), why=said)

        rank.agreement.together("the disk", lambda: rank.tiers.require(what, size), refused)
