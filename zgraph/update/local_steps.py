"""Local steps (DiLoCo, Douillard et al., 2023) around any optimizer's rule.

Groups of ranks update by themselves, with gradients that are averaged within the group. A round's first step notes
where it begins. After its last one groups share the outer gradient, that is how far they are from there, and all go on
from where the outer optimizer steps to from there by the mean. What the inner optimizer keeps is each group's own for
the whole run; the outer momentum is the same on all.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zgraph.plan.local_steps import LocalSteps
from zgraph.plan.optimizers import UpdateKind
from zgraph.update.rule_interface import (
    LOCAL_STEPS,
    SYNCHRONIZED,
    Part,
    Rule,
    State,
    Synchronization,
    Unreduced,
    Unsharded,
)

OUTER = "outer_"  # the outer optimizer's states
OUTER_STEPS = f"{OUTER}steps"  # rounds that have ended


@functools.lru_cache(maxsize=64)  # (programs of equal rules share what was traced)
def with_local_steps(inner: Rule, outer: Rule, local: LocalSteps) -> Rule:
    """Return the rule of an optimizer whose updates are local steps; `outer` is the rule of the outer optimizer."""

    def states(record: Any, shape: tuple[int, ...], dtype: torch.dtype, whole: tuple[int, ...]) -> dict[str, State]:
        kept = outer.states(local.outer, shape, dtype, whole)
        numbers = {key: State((), dtype, of_rows=True) for key in (LOCAL_STEPS, OUTER_STEPS)}
        weights = {SYNCHRONIZED: State(shape, dtype), **{OUTER + k: s for k, s in kept.items()}}
        common = {k: replace(s, weight=True) for k, s in weights.items()}
        return {**inner.states(record, shape, dtype, whole), **common, **numbers}

    def update(
        record: Any, p: Tensor, g: Tensor, old: Mapping[str, Tensor], s: Mapping[str, Tensor], step: Tensor, part: Part
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mine = {k: v for k, v in old.items() if not _is_common(k)}
        new, changed = inner.update(record, p, g, mine, s, step, part)
        begun = torch.where(old[LOCAL_STEPS] > 0, old[SYNCHRONIZED], p)
        return new, {**old, **changed, SYNCHRONIZED: begun, LOCAL_STEPS: old[LOCAL_STEPS] + 1}

    def moved(record: Any, p: Tensor, states: Mapping[str, Tensor], s: Mapping[str, Tensor]) -> Tensor:
        return (states[SYNCHRONIZED] - p).contiguous()

    def settled(
        record: Any, p: Tensor, mean: Tensor, states: Mapping[str, Tensor], s: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        rounds = states[OUTER_STEPS] + 1
        numbers = {
            f: torch.full((), getattr(local.outer, f), dtype=torch.float64, device=p.device) for f in outer.scalars
        }
        old = {k.removeprefix(OUTER): v for k, v in states.items() if k.startswith(OUTER) and k != OUTER_STEPS}
        part = Unsharded(tuple(p.shape))
        new, changed = outer.update(local.outer, states[SYNCHRONIZED], mean, old, numbers, rounds, part)
        ended = {LOCAL_STEPS: torch.zeros_like(states[LOCAL_STEPS]), OUTER_STEPS: rounds}
        return new, {**states, **{OUTER + k: v for k, v in changed.items()}, **ended}

    return replace(
        inner,
        states=states,
        update=update,
        unreduced={
            UpdateKind.IN_GROUPS: Unreduced(update),
            UpdateKind.ROUNDS: Unreduced(update, synchronization=Synchronization(moved, settled)),
        },
        local=lambda key: not _is_common(key),
        apart=True,
        of_round=(LOCAL_STEPS,),
    )


def _is_common(key: str) -> bool:
    """Return whether all groups have the same values of a state between rounds."""
    return key in (SYNCHRONIZED, LOCAL_STEPS) or key.startswith(OUTER)
