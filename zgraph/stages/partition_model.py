"""Makes a run time from a module and a plan with stages: the whole model is captured, and only this rank's parameters
become real.

The cuts are only known after capture, so until then a compiled model waits for the inputs of its first call.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zgraph.capture.former_storages import former_storages
from zgraph.capture.tensor_parallel_layout import divided_layout
from zgraph.errors import ModelError, PlanError
from zgraph.machine.measured_costs import agreed_costs, at_disk_rate
from zgraph.parameters.layout import with_requires_grad
from zgraph.parameters.mixed_precision import prepare
from zgraph.parameters.shard_module import shard
from zgraph.parameters.shards import Shards
from zgraph.passes.stages.cut_points import assign
from zgraph.passes.stages.cut_stages import Stages
from zgraph.passes.stages.stage_costs import balance
from zgraph.plan.pipeline_schedules.make_schedule import make_schedule
from zgraph.plan.plan import Plan
from zgraph.plan.shapes import buckets_of
from zgraph.program import ops
from zgraph.program.aliases import aliases_of, is_view
from zgraph.program.program import STAGE_DIM, InputRole, ParamSpec
from zgraph.ranks.agreement import Agreement
from zgraph.runtime.pad_to_buckets import PaddedCalls
from zgraph.runtime.rank import RankContext, opened_tiers
from zgraph.runtime.runtime import Runtime
from zgraph.runtime.train_step import in_order
from zgraph.stages.channels import make_line
from zgraph.stages.runtime import Cut, PipelineRuntime
from zgraph.stages.stage_programs import Capture, Partition, cut, partition
from zgraph.stages.whole_model import WholeModel
from zgraph.units import shown_bytes
from zgraph.update.owned_parameters import held_at, within

logger = logging.getLogger(__name__)


class DeferredPipeline(WholeModel):
    """A compiled model in stages before its first call, with all that is needed to cut it. `mesh` and `everyone` are of
    all stages.
    """

    def runtime(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Runtime:
        """Cut the model for a call with these arguments, a rank's whole batch, and make the run time. This rank's
        parameters get their storage; those of other stages go to the meta device. All ranks must call it. Raises what
        `zgraph.compile` does with inputs.
        """
        buckets = buckets_of(self.plan)
        if buckets is not None:  # (the cuts could be different for batches of other sizes)
            args, kwargs = PaddedCalls(self, buckets).agreed(args, in_order(self, kwargs)).call
        inner = within(self.sizes)
        params = dict(self.module.named_parameters(remove_duplicate=False))
        whole = with_requires_grad(self.specs, params)
        precision = self.plan.resolved_precision()
        costs = agreed_costs(self.plan, self.device, self.everyone, self.mesh)

        def attempt() -> tuple[Capture, Partition, Stages, dict[str, ParamSpec]]:
            with prepare(self.module, precision, whole), as_in_training(self.module) as trains:
                capture = self.to_cut_by(args, in_order(self, kwargs), trains)
            capture.joint.params = specs = divided_layout(capture.joint, self.plan, costs, self.module)
            parted = partition(capture.joint, self.plan, self.sizes[STAGE_DIM], costs, self.module)
            stages = cut(capture.joint, parted, self.plan)
            if self.everyone.first():
                logger.info(
                    "stages of the model:\n%s", balance(capture.joint, assign(capture.joint, parted.cuts), costs)
                )
                _tell_outputs(stages)
            return capture, parted, stages, specs

        def refused(rank: int, said: str) -> PlanError:
            return PlanError(f"rank {rank} can't cut the model into stages", where="mesh.pp", why=said)

        with contextlib.ExitStack() as undo:
            undo.callback(former_storages(self.module).note_early(self.module))
            first_capture, parted, stages, specs = self.everyone.together("the cut into stages", attempt, refused)
            undo.pop_all()
        holders = parted.holders(stages)
        divisions = {n: s.division for n, s in specs.items() if s.division is not None}
        self.everyone.vote("where the model is cut into stages, and their schedule", repr((parted, divisions)))
        position = self.mesh.get_local_rank(STAGE_DIM)
        owned = held_at(position, holders, self.sizes[STAGE_DIM])
        owned_by_position = [held_at(p, holders, self.sizes[STAGE_DIM]) for p in range(self.sizes[STAGE_DIM])]
        line = make_line(self.mesh, {g for h in owned_by_position for g in h.tied.values() if g != STAGE_DIM})
        inside = self.mesh[tuple(inner)] if inner else None
        agreement = Agreement(inside)
        tiers = opened_tiers(self.module, self.plan, specs, self.device, self.everyone, owned)
        costs = at_disk_rate(costs, self.everyone, tiers)
        shards = shard(self.module, specs, inside, self.device, self.seed, tiers.of("parameters"), frozenset(owned.own))
        prepare(self.module, precision, specs)
        context = RankContext(inner, inside, self.device, agreement, self.everyone, costs, tiers, owned)
        runtime = PipelineRuntime(
            self.module, self.forward_function, self.plan, shards, context, Cut(line, parted, self)
        )
        if not former_storages(
            self.module
        ).is_read:  # (else guards on a parameter that is read through another tensor refer to the former object)
            runtime.first = first_capture
        return runtime


@contextlib.contextmanager
def as_in_training(module: nn.Module) -> Iterator[bool]:
    """Enable gradients and train mode inside, whatever the first call is: a model is cut as it trains. Yields whether
    gradients were enabled before; if so, a module that trains in eval mode stays in it.
    """
    trains = torch.is_grad_enabled()
    modes = {child: child.training for child in module.modules()}
    try:
        if not trains:
            module.train()
        with torch.enable_grad():
            yield trains
    finally:
        for child, training in modes.items():
            child.training = training


def _tell_outputs(stages: Stages) -> None:
    """Warn if outputs of earlier stages are a large part (over 10%) of what is sent forward: the model may return
    outputs that nobody uses.
    """
    last = stages.programs[-1]
    only = {
        port.name
        for port, node in last.input_items()
        if port.role is InputRole.RECEIVED
        and all(u.target in ("output", ops.OUTPUT) for a in aliases_of(node) for u in a.users if not is_view(u))
    }
    forward = [t for t in stages.transfers if not t.back]
    given = [t for t in forward if t.name in only and t.target == len(stages.programs) - 1]
    size = sum(t.nbytes for t in given)
    if 10 * size > sum(t.nbytes for t in forward):
        logger.warning(
            "%d outputs of earlier stages go to the last one, %s for each micro-batch: let the model leave out what is not wanted "
            "(use_cache=False, output_hidden_states=False)",
            len(given),
            shown_bytes(size),
        )


def made_again(old: PipelineRuntime, module: nn.Module, shards: Shards, plan: Plan) -> PipelineRuntime:
    """Return a run time of the same stages for another plan, or for a copy of the module. Raises `ModelError` if the
    plan has other stages.
    """
    schedule = make_schedule(plan.schedule, len(old.line.ranks), plan.micro_batches, plan.virtual_stages)
    if plan.partition != old.plan.partition or schedule.rank_of != old.partition.schedule.rank_of:
        raise ModelError(
            "the plan cuts the model into other stages",
            where="mesh.pp",
            why="parameters would lie on other ranks than they do",
            hint="keep partition, and schedules with the same stages on each rank; else compile a fresh model, and load a checkpoint",
        )
    if plan is not old.plan:
        old.everyone.vote("the schedule of recompile", repr(schedule))
    costs = old.costs
    if plan is not old.plan:
        costs = at_disk_rate(agreed_costs(plan, old.device, old.everyone, old.origin.mesh), old.everyone, old.tiers)
    context = replace(old.context, costs=costs)
    origin = replace(old.origin, module=module, plan=plan)
    cut = Cut(old.line, replace(old.partition, schedule=schedule), origin, old.board)
    runtime = PipelineRuntime(module, old.forward_function, plan, shards, context, cut)
    runtime.buffers = copy.copy(old.buffers)
    return runtime
