"""A pipeline as a plan makes it of a model, for any number of ranks and without any: the cut, each stage's programs, each rank's update."""

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
from zgraph.update.owned_parameters import Held, held_at, within


@dataclass(frozen=True, eq=False)
class PlannedStages:
    """`joint` is the whole captured model, `steps` are the programs of its stages in order, which run their passes when they are looked at;
    `held` is what each rank along "pp" holds, `residents` what of it besides its programs. `sizes` is the mesh within a stage. `layout`
    has all parameters."""

    model: nn.Module
    plan: Plan
    world: int
    sizes: dict[str, int]
    device: torch.device
    costs: Costs
    layout: dict[str, ParamSpec]
    joint: Program
    partition: Partition
    stages: Stages
    held: tuple[Held, ...]
    residents: tuple[ResidentMemoryByShare, ...]
    steps: Sequence[StepProgram]

    @property
    def once(self) -> bool:
        """Whether a step reduces its gradients once, after the backwards of all micro-batches."""
        return reduces_once(self.plan, self.sizes)

    @property
    def balance(self) -> Balance:
        """What each stage takes, by the captured program."""
        return balance(self.joint, assign(self.joint, self.partition.cuts), self.costs)

    def step(self, stage: int) -> StepProgram:
        """A stage's programs. Raises `PlanError` if there is none of that number."""
        if not 0 <= stage < len(self.steps):
            raise PlanError(
                f"there is no stage {stage}",
                where="stage",
                why=f"the plan cuts the model into {len(self.steps)}, counted from 0",
            )
        return self.steps[stage]

    def memory(self, position: int) -> RankMemory:
        """What the rank at this position of "pp" holds at each of its actions, for any programs."""
        return memory_of_rank(self.joint, self.stages, self.partition.schedule, position)

    def share(self, position: int) -> float | None:
        """The share of the optimizer's states that is offloaded there; None: as the plan says."""
        return self.steps[self.partition.schedule.stages_of(position)[0]].states

    def outside(self, position: int) -> ResidentMemory:
        """What that rank holds besides its programs."""
        return self.residents[position].at(self.share(position))

    def update(self, position: int) -> History | None:
        """The update of the rank at this position of "pp"; None for a plan without an optimizer, and a model that does not train."""
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
    """What a plan with a pipeline makes of `model` (not compiled, on any device, also meta; it is not changed) for `world` ranks.

    `inputs` are those of a micro-batch. A `pass_filter` leaves passes out of the stages' pipelines; what was `captured` of the model by this plan
    already is not captured again. The model is captured once, and then cut. Raises `PlanError` for a plan without a pipeline on so many ranks,
    for a model that can't be cut as it says, and for a schedule that can't be, and what capture raises (see `zgraph.compile`).
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
    stages = cut(joint, parted)
    holders = parted.holders(stages)
    held = tuple(held_at(position, holders, ranks) for position in range(ranks))
    residents = tuple(resident_of(model, layout, plan, sizes, device, costs, held=h) for h in held)
    steps: list[StepProgram] = []
    made = PlannedStages(
        model, plan, world, sizes, device, costs, layout, joint, parted, stages, held, residents, steps
    )
    contexts = [BuildContext(plan, costs, resident, pass_filter) for resident in residents]
    budgets = _Budgets(made, contexts)
    for stage, program in enumerate(stages.programs):
        decide = functools.partial(budgets.decision, stage) if plan.memory_budget is not None else None
        steps.append(StepProgram(program, contexts[parted.schedule.rank_of[stage]], decide))
    return made


class _Budgets:
    """The decisions of all ranks, made when one is first looked at. Raises `PlanError` if a rank can't hold the plan's budget."""

    def __init__(self, made: PlannedStages, contexts: Sequence[BuildContext]) -> None:
        self.made = made
        self.contexts = contexts

    @functools.cached_property
    def ranks(self) -> list[RankBudget]:
        made = self.made
        found = [
            RankBudget(
                made.memory(rank),
                {s: made.stages.programs[s] for s in made.partition.schedule.stages_of(rank)},
                self.contexts[rank],
                made.once,
            )
            for rank in range(made.partition.schedule.ranks)
        ]
        refuse(made.plan, [rank.refusal for rank in found])
        return found

    def decision(self, stage: int) -> SearchResult:
        return self.ranks[self.made.partition.schedule.rank_of[stage]].decision(stage)
