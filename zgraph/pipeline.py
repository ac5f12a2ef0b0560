"""From a plan to a pipeline: which passes run, with which options, in which order."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zgraph.errors import PlanError
from zgraph.passes import Pass, PassType
from zgraph.passes.cleanup import cleanup
from zgraph.passes.gloo import wait_for_gloo
from zgraph.passes.in_place import write_in_place
from zgraph.passes.inductor_prepare import inductor_prepare
from zgraph.passes.loss_scale import scale_loss
from zgraph.passes.recompute import recompute
from zgraph.passes.release import release
from zgraph.passes.zero import (
    KeepOptions,
    ReduceOptions,
    keep_gathered,
    reduce_gradients,
    regather,
    shard_parameters,
)

if TYPE_CHECKING:
    from zgraph.plan import Plan


@dataclass(frozen=True)
class Variant:
    """Which of a step's programs: has an earlier one gathered the weights (stages 1 and 2), does this one reduce its
    gradients, and do unreduced gradients of earlier micro-batches come in?"""

    gathered_before: bool = False
    reduce: bool = True
    accumulated: bool = False


PLAIN = Variant()  # a step of one micro-batch


def build(plan: Plan, variant: Variant = PLAIN, *, training: bool = True) -> list[Pass]:
    """The pipeline of a plan. Raises `PlanError` for a user's pass that is not there.

    A program that is not for `training` (it has no gradients) keeps no weights, whatever the stage.
    """
    keep = training and plan.zero in (1, 2)
    passes = [cleanup()]
    if plan.backend == "inductor":
        passes += [inductor_prepare(), recompute()]
    passes.append(shard_parameters())
    passes.append(keep_gathered(KeepOptions(variant.gathered_before)) if keep else regather())
    if training and plan.loss_scale() is not None:
        passes.append(scale_loss())
    passes.append(reduce_gradients(ReduceOptions(variant.reduce, variant.accumulated)))
    if not keep:
        passes.append(release())
    passes.append(wait_for_gloo())  # the last one: whatever order the others chose, it must be safe to run
    for user in plan.user_passes():
        _place(passes, user.ref, user.position, user.anchor)
    return passes


def build_update_passes() -> list[Pass]:
    """The pipeline of update programs, whatever the plan."""
    return [write_in_place()]


def _place(passes: list[Pass], ref: str, position: str | None, anchor: str | None) -> None:
    mine = load_pass(ref)
    names = [p.name for p in passes]
    if anchor is None:
        position, anchor = "before", "wait_for_gloo"
    if anchor not in names:
        raise PlanError(
            f"pass {ref!r} is to stand {position} {anchor!r}, which is not in the pipeline",
            hint=f"there are: {', '.join(names)}",
        )
    passes.insert(names.index(anchor) + (position == "after"), mine)


def load_pass(ref: str) -> Pass:
    """The pass that "package.module:name" names."""
    module_name, _, attribute = ref.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise PlanError(
            f"pass {ref!r} can't be loaded",
            why=f"{type(error).__name__}: {error}",
            hint="is the module on the Python path?",
        ) from error
    made = found() if isinstance(found, PassType) else found
    if not isinstance(made, Pass):
        raise PlanError(
            f"{ref!r} is no pass but {type(found).__name__}",
            hint="decorate the function with zgraph.passes.graph_pass",
        )
    return made
