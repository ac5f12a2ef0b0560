"""A pipeline's arguments as JSON and back: with the program, all that a reproducer needs to run its passes again."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from zgraph.build.pass_pipeline import MemoryDecision, PassFilter, Variant, build, build_update_passes
from zgraph.passes import Pass
from zgraph.passes.analysis.costs import Costs, Hardware
from zgraph.passes.overlap.follow_order import Start

if TYPE_CHECKING:
    from zgraph.plan.plan import Plan


def to_recipe(
    plan: Plan, costs: Costs, variant: Variant, training: bool, choice: MemoryDecision, pass_filter: PassFilter
) -> dict[str, Any]:
    """Return the arguments of `build` for a step's pipeline, as JSON."""
    return {
        "plan": plan.model_dump(mode="json"),
        "hardware": costs.hardware.model_dump(mode="json"),
        "variant": asdict(variant),
        "training": training,
        "choice": asdict(choice) | {"keep": sorted(choice.keep)},
        "without": sorted(pass_filter.without),
    }


def to_update_recipe(plan: Plan, first: tuple[str, ...]) -> dict[str, Any]:
    """Return the arguments of `build_update_passes`, as JSON."""
    return {"plan": plan.model_dump(mode="json"), "first": list(first)}


def passes_of(recipe: dict[str, Any]) -> list[Pass]:
    """Build the pipeline of a recipe again. Raises `PlanError` where something that it names can't be loaded."""
    from zgraph.plan.plan import Plan

    plan = Plan.model_validate(recipe["plan"])
    if "first" in recipe:
        return build_update_passes(plan, tuple(recipe["first"]))
    choice = MemoryDecision(**{**recipe["choice"], "keep": frozenset(recipe["choice"]["keep"])})

    def costs(described: Any) -> Costs:
        return Costs(Hardware.model_validate(described), fused=plan.backend == "inductor")

    return build(
        plan,
        Variant(**recipe["variant"]),
        training=recipe["training"],
        costs=costs(recipe["hardware"]),
        choice=choice,
        pass_filter=PassFilter(frozenset(recipe["without"])),
        order=tuple([Start(r, g, tuple(names), *rest) for r, g, names, *rest in recipe.get("order", ())]),
        schedule=costs(recipe["schedule"]) if "schedule" in recipe else None,
    )
