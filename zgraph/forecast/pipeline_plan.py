"""A pipeline as a plan makes it of a model, for any number of ranks that need not exist: the cuts, each stage's
programs, each rank's update."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zgraph.build.build_context import BuildContext, ResidentMemory, ResidentMemoryByShare
from zgraph.build.memory_search import SearchResult
from zgraph.build.pass_pipeline import EVERY_PASS, PassFilter, costs_of
from zgraph.build.planned_step import Inputs, captured_program, placed_for, trained_layout
from zgraph.build.step_program import StepProgram
from zgraph.build.update_program import resident_of, whole_update
from zgraph.errors import PlanError
from zgraph.passes import History
from zgraph.passes.analysis.costs import Costs
from zgraph.passes.stages.cut_points import assign
from zgraph.passes.stages.cut_stages import Stages
from zgraph.passes.stages.stage_costs import Balance, balance
from zgraph.plan.plan import Plan
from zgraph.program.program import ParamSpec, Program
from zgraph.stages.memory_search import RankBudget, refuse
from zgraph.stages.rank_memory import RankMemory, memory_of_rank
from zgraph.stages.stage_programs import Partition, cut, partition, reduces_once
from zgraph.update.owned_parameters import OwnedParameters, held_at, within


@dataclass(frozen=True, eq=False)
class PlannedStages:
    """A model cut into pipeline stages by a plan. The programs in `steps` run their passes when they are first looked
    at."""

    model: nn.Module  # the model, not changed
    plan: Plan  # the plan, with offload tiers resolved
    world: int  # the number of ranks
    sizes: dict[str, int]  # the mesh within a stage
    device: torch.device  # the device that is compiled for
    costs: Costs  # the costs that decisions are made from
    layout: dict[str, ParamSpec]  # the layout of all parameters, by name
    joint: Program  # the whole captured model
    partition: Partition  # where the model is cut, and the schedule
    stages: Stages  # the captured programs of the stages, and the values that they send each other
    held: tuple[OwnedParameters, ...]  # the parameters that each rank along "pp" holds
    residents: tuple[ResidentMemoryByShare, ...]  # the memory that each rank along "pp" needs besides its programs
    steps: Sequence[StepProgram]  # the programs of each stage, in order

    @property
    def once(self) -> bool:
        """Whether a step reduces its gradients once, after the backwards of all micro-batches."""
        return reduces_once(self.plan, self.sizes)

    @property
    def balance(self) -> Balance:
        """The time and memory of each stage, according to the captured program."""
        return balance(self.joint, assign(self.joint, self.partition.cuts), self.costs)

    def step(self, stage: int) -> StepProgram:
        """Return a stage's programs. Raises `PlanError` if the stage does not exist."""
        if not 0 <= stage < len(self.steps):
            raise PlanError(
                f"there is no stage {stage}",
                where="stage",
                why=f"the plan cuts the model into {len(self.steps)}, counted from 0",
            )
        return self.steps[stage]

    def memory(self, position: int) -> RankMemory:
        """Return the model of the memory that the rank at this position of "pp" holds at each of its actions, for any
        programs."""
        return memory_of_rank(self.joint, self.stages, self.partition.schedule, position)

    def share(self, position: int) -> float | None:
        """Return the share of the optimizer's states that the rank at this position of "pp" offloads; None: as the plan
        says."""
        return self.steps[self.partition.schedule.stages_of(position)[0]].states

    def outside(self, position: int) -> ResidentMemory:
        """Return what the rank at this position of "pp" holds besides its programs."""
        return self.residents[position].at(self.share(position))

    def update(self, position: int) -> History | None:
        """Return the update of the rank at this position of "pp"; None for a plan without an optimizer, and a model
        that does not train."""
        if not any(spec.requires_grad for spec in self.layout.values()):
            return None
        return whole_update(
            self.model, self.layout, self.plan, self.sizes, self.device, self.share(position), self.held[position]
        )


def planned_stages(
    model: nn.Module,
    plan: Plan,
    inputs: Inputs,
    world: int,
    costs: Costs | None = None,
    pass_filter: PassFilter = EVERY_PASS,
    captured: Program | None = None,
) -> PlannedStages:
    """Cut `model` (not compiled, on any device, also meta; it is not changed) by a plan with a pipeline for `world`
    ranks.

    `inputs` are those of a micro-batch. A `pass_filter` leaves passes out of the stages' pipelines. `captured`: the
    model as captured by this plan already, or None to capture it here. Raises `PlanError` for a plan without a pipeline
    on `world` ranks, for a model that can't be cut as the plan says, and for an impossible schedule, and what capture
    raises (see `zgraph.compile`).
    """
    plan, ranks = plan.for_world(world), plan.pipeline_ranks(world)
    if ranks == 1:
        raise PlanError("the plan has no pipeline", where="mesh.pp", hint='mesh={"pp": 2, "dp": -1} has two stages')
    sizes = within(plan.resolve_mesh(world))
    costs = costs or costs_of(plan)
    plan, device = placed_for(model, plan, plan.resolve_mesh(world), costs)
    joint = captured_program(model, plan, inputs, world) if captured is None else captured
    layout = trained_layout(joint)
    parted = partition(joint, plan, ranks, costs, model)
    stages = cut(joint, parted, plan)
    holders = parted.holders(stages)
    owned = tuple(held_at(position, holders, ranks) for position in range(ranks))
    residents = tuple(resident_of(model, layout, plan, sizes, device, costs, held=h) for h in owned)
    steps: list[StepProgram] = []
    planned = PlannedStages(
        model, plan, world, sizes, device, costs, layout, joint, parted, stages, owned, residents, steps
    )
    contexts = [BuildContext(plan, costs, resident, pass_filter) for resident in residents]
    budgets = _Budgets(planned, contexts)
    for stage, program in enumerate(stages.programs):
        decide = functools.partial(budgets.decision, stage) if plan.memory_budget is not None else None
        steps.append(StepProgram(program, contexts[parted.schedule.rank_of[stage]], decide))
    return planned


class _Budgets:
    """The memory decisions of all ranks, made when the first is asked for. Raises `PlanError` if a rank can't keep the
    plan's budget."""

    def __init__(self, stages: PlannedStages, contexts: Sequence[BuildContext]) -> None:
        self.made = stages
        self.contexts = contexts

    @functools.cached_property
    def ranks(self) -> list[RankBudget]:
        planned = self.made
        budgets = [
            RankBudget(
                planned.memory(rank),
                {s: planned.stages.programs[s] for s in planned.partition.schedule.stages_of(rank)},
                self.contexts[rank],
                planned.once,
            )
            for rank in range(planned.partition.schedule.ranks)
        ]
        refuse(planned.plan, [rank.refusal for rank in budgets])
        return budgets

    def decision(self, stage: int) -> SearchResult:
        return self.ranks[self.made.partition.schedule.rank_of[stage]].decision(stage)
