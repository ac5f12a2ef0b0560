"""The run time of a rank that runs some stages of a model, as `Runtime` runs all of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from zgraph.build.build_context import BuildContext
from zgraph.build.memory_search import refuse_unbounded
from zgraph.build.step_program import StepProgram
from zgraph.build.update_program import resident_of
from zgraph.capture.call_signature import batch_rows, brief
from zgraph.capture.former_storages import former_storages
from zgraph.capture.symbolic_capture import SymbolicSizes
from zgraph.capture.tensor_parallel_layout import as_divided
from zgraph.errors import CaptureError, PlanError, RankMismatchError, StepError, UnsupportedError
from zgraph.parameters.layout import with_requires_grad
from zgraph.parameters.shards import Shards
from zgraph.parameters.tensor_bits import fingerprint
from zgraph.plan.pipeline_schedules.actions import Kind
from zgraph.plan.pipeline_schedules.schedule import Schedule
from zgraph.plan.plan import Plan
from zgraph.program.program import DATA_DIMS, InputRole, OutputRole
from zgraph.ranks import heartbeat, progress
from zgraph.runtime.capacity_checks import check_capacity
from zgraph.runtime.rank import RankContext
from zgraph.runtime.runtime import Runtime
from zgraph.runtime.timings import model_flops
from zgraph.stages.channels import AHEAD, Channels, PipelineRanks, Routes
from zgraph.stages.failed_ranks import FailureBoard, FailureMarker
from zgraph.stages.memory_search import refuse
from zgraph.stages.module_buffers import Buffers
from zgraph.stages.stage_programs import Capture, Partition, RankStages, Staged, reduces_once, without_fast_path
from zgraph.stages.stage_tasks import stage_tasks
from zgraph.stages.whole_model import WholeModel
from zgraph.stages.worker import Worker
from zgraph.torch_compat.dtensors import local_of
from zgraph.update.hyperparameters import UPDATE_HINT, Hyperparameters, compare_tied, compare_updates
from zgraph.update.shared_collectives import check_collective_order, shared_collectives

Tangents = Callable[[int, list[Any]], dict[int, torch.Tensor]]


@dataclass(frozen=True)
class Cut:
    """How a model was cut into stages."""

    line: PipelineRanks  # the ranks along "pp"
    partition: Partition  # where the model is cut, and which rank runs which stage
    origin: WholeModel  # captures the whole model for the inputs of a micro-batch
    board: FailureBoard | None = None  # the board of an earlier run time of the same ranks


class PipelineRuntime(Runtime):
    """The run time of one compiled module of which this rank runs some stages."""

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        plan: Plan,
        shards: Shards,
        context: RankContext,
        cut: Cut,
    ) -> None:
        self.line = cut.line
        super().__init__(module, forward, plan, shards, context)
        voters = [self.agreement, self.everyone]
        self.board = cut.board or FailureBoard(str(self.everyone.group.group_name), self.process_groups(), voters)
        heartbeat.watch(self.plan.watch, self.agreement, [])
        self.partition = cut.partition
        self.groups |= cut.line.groups()
        self.origin = cut.origin
        self.beside_batch = cut.origin.beside_batch
        self.first: Capture | None = None  # the capture that the model was cut by, until it is used
        self.buffers = Buffers()
        self._updates_met = 0
        # arguments that loss_fn gets in the current call, besides the output
        self.beside: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    # -- programs -----------------------------------------------------------------------------------------------------
    def entry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the key and the programs for these inputs. (The fast path is off, as in the capture: its guards are
        compared.)
        """
        with without_fast_path():
            return super().entry(args, kwargs)

    def settle(self, entry: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with without_fast_path():
            super().settle(entry, args, kwargs)

    def _compile(
        self, key: str, args: tuple[Any, ...], kwargs: dict[str, Any], open_sizes: SymbolicSizes | None = None
    ) -> Any:
        shown = brief(self.module, args, kwargs)
        name = self.calls.name_new(shown)
        first, self.first = self.first, None
        if first is not None and first.key == key and first.of_loss:
            model_capture = first
        else:
            # (Python numbers are constants: the inputs of all micro-batches are read before the first one runs)
            sizes = replace(open_sizes, numbers=()) if open_sizes is not None and open_sizes.names else None

            def capture() -> Capture:
                new_capture = self.origin.captured(name, args, kwargs, *self.beside, open_sizes=sizes)
                refuse_unbounded(self.plan, new_capture.joint.sizes)
                return new_capture

            model_capture = self.everyone.together(
                "the capture of new inputs",
                capture,
                lambda rank, said: CaptureError(f"rank {rank} can't capture the model", where="mesh.pp", why=said),
            )
            model_capture.joint.params = as_divided(model_capture.joint.params, self.shards.specs, self.sizes)
        specs = with_requires_grad(self.shards.specs, self.shards.params())
        owned = self.held
        residents = resident_of(self.module, specs, self.plan, self.sizes, self.device, self.costs, self.shares, owned)
        context = BuildContext(self.plan, self.costs, residents, groups=self.groups, agree=self.votes.program)
        here = RankStages(self.partition, self.line.position, self.once)
        staged = Staged(name, shown, model_capture, batch_rows(args, kwargs), here, context)
        self.buffers.note(name, staged.stages.programs, self.partition.schedule.rank_of)

        def attempt() -> None:
            self._refuse_moved(staged)
            if self.buckets is not None:
                at_another = lambda call: self.origin.captured(name, call[0], call[1], by_loss=False).trace  # noqa: E731
                staged.follows = self.buckets.follows(model_capture.trace, (args, kwargs), at_another)
            of = stage_tasks(self.partition.schedule, self.line.position)
            for stage, step in staged.steps.items():
                if step.differentiated:
                    self.updater.refuse_unscaled()
                self.prepare(step, of[stage].kinds)

        def refused(rank: int, said: str) -> PlanError:
            return PlanError(f"rank {rank} can't make the programs of its stages", where="mesh.pp", why=said)

        budget = staged.budget
        if budget is not None:
            said = "the memory of stages"
            _, refusals = self.everyone.exchange(said, lambda: budget.refusal, lambda refusal: refusal, refused)
            refuse(self.plan, refusals)
        self.everyone.together("the programs of stages", attempt, refused)
        self.relax()  # (some ranks waited without the plan's timeout until now)
        return staged

    def refuse_other_batch(self, staged: Staged, call: Any) -> None:
        """Raise `RankMismatchError` on every rank if ranks of one pipeline were given different batches. Compared once
        per signature.
        """
        if staged.seen:
            return
        staged.seen = True
        mine = [int(fingerprint(x)) for x in pytree.tree_leaves(call) if isinstance(x, torch.Tensor)]
        at = [self.mesh.get_local_rank(d) for d in DATA_DIMS if d in self.sizes] if self.mesh is not None else []
        views = self.everyone.gather("the batches of pipelines", (at, mine))
        for among, marks in views:
            alike = [
                (rank, theirs) for rank, (its, theirs) in zip(self.everyone.ranks, views, strict=True) if its == among
            ]
            if marks != alike[0][1]:
                raise RankMismatchError(
                    f"ranks {[rank for rank, _ in alike]}, of one pipeline, have different batches",
                    where="mesh.pp",
                    why="one's inputs would meet another's targets, or be put together with parts of other rows",
                    hint='a rank\'s part of the data is that of model.zgraph.mesh.get_local_rank("dp"); "pp" is outermost in the mesh',
                )

    def refuse_aliases(self, staged: Staged, flats: Sequence[Sequence[Any]]) -> None:
        """Raise `StepError` or `SignatureError` if tensors of the micro-batches' graphs share memory in a way that
        programs don't support.
        """
        ports = [p for program in staged.stages.programs for p in program.outputs if p.role is OutputRole.MUTATION]
        written = {p.index for p in ports if p.index is not None}
        for flat in flats:
            staged.trace.refuse_moved(flat, former_storages(self.module))
            if written:
                staged.trace.refuse_overlap(written, flat, whole=flat is flats[0])
            if written and self.buckets is not None:
                self.buckets.refuse_written(sorted(written), flat)

    def _refuse_moved(self, staged: Staged) -> None:
        """Raise `UnsupportedError` if another signature reads a parameter on a rank that does not store it."""
        assert self.held is not None
        for name, holders in self.partition.holders(staged.stages).items():
            read = any(name in p.input_nodes(InputRole.PARAMETER) for p in staged.stages.programs)
            if read and self.line.position in holders and name not in self.held.own:
                raise UnsupportedError(
                    f"{staged.name} reads {name!r} in a stage of this rank, which does not hold it",
                    where="partition",
                    why="the model was cut by other inputs, for which it was read elsewhere",
                    hint="partition=[module paths], with the module inside a stage",
                )

    def prepare(self, step: StepProgram, kinds: frozenset[Kind] = frozenset({Kind.F, Kind.B})) -> None:
        """Compile the programs of a stage that runs these kinds of actions in a step."""
        check_capacity(self, step)
        step.first_gathers()
        step.forward()
        if not step.differentiated:
            return
        several = self.plan.micro_batches > 1
        for reduce, accumulated in [(False, False), (True, True)] if self.once and several else [(True, False)]:
            if Kind.B in kinds:
                step.backward(reduce, accumulated)
            if Kind.W in kinds:
                step.backward_apart(reduce, accumulated)
        summed = any(port.role is OutputRole.GRADIENT for port in step.captured.outputs)
        if summed and self.plan.micro_batches > (2 if self.once else 1):
            for kind in (Kind.B, Kind.W):  # (in this order on all ranks: they compare each program)
                if kind in kinds:
                    step.summing_backward(not self.once, apart=kind is Kind.W)
        if step.keeps and several:
            step.forward(True)

    @property
    def once(self) -> bool:
        """Whether gradients are reduced once per step, not in every backward."""
        return reduces_once(self.plan, self.sizes)

    def agree_on_update(self, names: Sequence[str], numbers: Hyperparameters) -> None:
        """Let ranks compare the update as `Runtime` does; if a stage's update is new, let stages compare what their
        updates do together.
        """
        super().agree_on_update(names, numbers)
        program = self.updater.programs.of(tuple(names), self.updater.options).history.program
        update_count = len(self.updater.programs.compiled())
        new = self.everyone.vote(
            "the optimizer's numbers",
            numbers.ballot(states=False),
            lambda: ("", replace(numbers, changed={})),
            compare_updates,
            flag=update_count != self._updates_met or bool(numbers.changed),
            hint=UPDATE_HINT,
        ).flag
        if new:
            self._compare_tied(numbers)
            self._updates_met = update_count
            check_collective_order(
                self._by_position(self.everyone.gather("the stages' updates", shared_collectives(program)))
            )

    def _compare_tied(self, numbers: Hyperparameters) -> None:
        """Raise `RankMismatchError` if the ranks that share a parameter have not all changed its optimizer state
        alike.
        """
        changes = {n: numbers.changed.get(n, "") for n in self.updater.states.members}
        why = compare_tied(self.everyone.gather("what was changed in the optimizer", changes))
        if why is not None:
            raise RankMismatchError("ranks disagree about the optimizer's numbers", why=why, hint=UPDATE_HINT)

    def stage_position(self) -> int:
        return self.line.position

    def told(self) -> list[str]:
        schedule, position = self.partition.schedule, self.line.position
        mine = ", ".join(map(str, schedule.stages_of(position)))
        return [
            f"pipeline: position {position} of {schedule.ranks} has stage(s) {mine} of {schedule.stages}, by schedule {schedule.name}"
        ]

    def process_groups(self) -> list[Any]:
        return [*super().process_groups(), *self.line.all_groups()]

    def has_buffer(self, name: str) -> bool:
        return self.buffers.at(name) == self.line.position

    def whole_gradient(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        assert self.held is not None
        group = self.held.tied.get(name)
        if group is None or self.updater.optimizer is None:  # (without an optimizer in the plan it is summed already)
            return grad
        local = local_of(grad).detach().clone()
        dist.all_reduce(local, group=self.line.group(group))
        return self.shards.gradient(name, local)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Raise `StepError`: the user runs no backward."""
        raise StepError(
            "a model in stages has no no_sync()",
            where="mesh.pp",
            why="train_step(…) runs the backward passes of all micro-batches, and reduces as the plan says",
            hint="micro_batches in the plan; or train_step(…) several times without an optimizer in the plan, which adds gradients up",
        )
        yield

    def _flops_of_forward(self) -> float:
        """Return the mean over this rank's stages, each of which runs its own forwards."""
        trained = [s for s in self.entries.values() if s.program().differentiated]
        steps = trained[-1].programs() if trained else []
        return sum(model_flops(step.captured) for step in steps) / len(steps) if steps else 0.0

    def _by_position(self, views: Sequence[Any]) -> list[Any]:
        """Return the views of the ranks of this line, among those of all ranks."""
        return [views[self.everyone.ranks.index(rank)] for rank in self.line.ranks]

    # -- running ------------------------------------------------------------------------------------------------------
    def run(
        self,
        staged: Staged,
        schedule: Schedule,
        flats: Sequence[Sequence[Any]],
        tangents_of: Tangents | None,
        marker: FailureMarker,
    ) -> list[list[Any]]:
        """Run this rank's row of a schedule. Return each micro-batch's flat outputs; only the rank with the last stage
        has tensors in them.

        `flats` are the inputs of the model's graph, by micro-batch. `tangents_of` returns the tangents of a
        micro-batch's outputs; None for a forward alone. After a backward, gradients are where an update finds them. The
        `marker` records this rank's position.
        """
        key = (schedule.name, schedule.micro_batches)
        if key not in staged.routes:
            transfers = [t for t in staged.stages.transfers if tangents_of is not None or not t.back]
            staged.routes[key] = Routes(schedule, transfers, self.line.position)
        channels = Channels(self.line, staged.routes[key], self.device, staged.likes(flats[0]), self.everyone.heart)
        of = stage_tasks(schedule, self.line.position)
        workers = {stage: Worker(self, step, of[stage]) for stage, step in staged.steps.items()}
        actions = schedule.of(self.line.position)
        outputs = [list(staged.constants) for _ in flats]
        tangents: dict[int, dict[int, torch.Tensor]] = {}
        for at, action in enumerate(actions):
            number, worker = action.micro_batch, workers[action.stage]
            marker.action = action
            self.tell_place(number)
            channels.ask(actions[at : at + AHEAD])
            if action.kind is Kind.F:
                worker.begin()
            came = channels.take(action)
            if action.kind is Kind.F:
                with self.clock.timed("forward"):
                    given, sent = worker.forward(number, flats[number], came)
                for index, value in given.items():
                    outputs[number][index] = value
                if action.stage == schedule.stages - 1 and tangents_of is not None:
                    tangents[number] = tangents_of(number, outputs[number])
            else:
                with self.clock.timed("backward"):
                    sent = worker.backward(action, tangents.get(number, {}), came)
                if action.stage == schedule.stages - 1 and action.kind is not Kind.I:
                    tangents.pop(number, None)
            channels.send(action, sent)
            del sent  # (until it has left, the channels hold it)
        channels.finish()
        if tangents_of is not None:
            self._leave_gradients(workers.values())
        marker.action = None
        return outputs

    def _leave_gradients(self, workers: Any) -> None:
        """Put the sums of gradients where an update, or the user, finds them."""
        sums: dict[str, torch.Tensor] = {}
        for worker in workers:
            for name, value in worker.gradients.items():  # (two stages of this rank may share a parameter)
                sums[name] = sums[name].add_(value) if name in sums else value
        params = self.shards.params()
        for name, value in sums.items():
            gradient = self.shards.gradient(name, value)
            earlier_sum = params[name].grad
            if earlier_sum is not None and self.counts(name):  # (the sum over earlier calls is added on one stage only)
                gradient = earlier_sum + gradient
            params[name].grad = gradient
        self.own_steps += 1
        self.clock.reduced = True

    def everywhere(self, losses: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Return the micro-batches' losses, which the rank with the last stage has, on all ranks: 0-dim float64."""
        source = self.line.ranks[self.partition.schedule.rank_of[-1]]
        vector = torch.zeros(len(losses), dtype=torch.float64, device=self.device)
        if dist.get_rank() == source:
            vector = torch.stack([x.detach() for x in losses if x is not None]).to(torch.float64)
        said = "the losses of a step on their way from the rank with the last stage"
        told = progress.enter(said, self.everyone)
        try:
            dist.broadcast(vector, src=source, group=self.line.whole)
        except RuntimeError as error:
            raise progress.failed_collective(f"{said} did not arrive", said, error) from error
        finally:
            if told:
                progress.leave()
        return list(vector.unbind())
