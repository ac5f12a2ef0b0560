"""Every schedule gives the gradients of accumulation in one process: all ranks of a pipeline run in this one, by the run time's own workers."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import models
import torch
from sweeps import in_turn, sweep
from torch import nn

import zgraph
from zgraph.build.build_context import BuildContext
from zgraph.build.pass_pipeline import costs_of
from zgraph.build.planned_step import captured_program
from zgraph.build.step_program import StepProgram
from zgraph.build.update_program import resident_of
from zgraph.passes.stages.cut_points import assign, find_cuts
from zgraph.passes.stages.cut_stages import Stages, cut_stages
from zgraph.plan.pipeline_schedules.actions import Action, Kind
from zgraph.plan.pipeline_schedules.make_schedule import make_schedule
from zgraph.plan.pipeline_schedules.schedule import Schedule
from zgraph.program.program import InputRole
from zgraph.stages.stage_tasks import StageTask, stage_tasks
from zgraph.stages.worker import Worker
from zgraph.verification.replay import replay

NAMES = ("gpt2", "llama", "t5", "vit", "unet")
SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved1f1b",
    "loopedbfs",
    "interleavedzerobubble",
    "zb",
    "zbv",
    "dualpipev",
)
ROUNDING = 1e-6  # norm-wise, of float32 sums in another order


class UNet(nn.Module):
    """What each level going down gives is read by that going up: skips past all the stages between."""

    def __init__(self, levels: int = 5, width: int = 4) -> None:
        super().__init__()
        self.into = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, stride=2) for _ in range(levels))
        self.up = nn.ModuleList(nn.Conv2d(2 * width, width, 3, padding=1) for _ in range(levels))
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        skips = []
        for layer in self.down:
            skips.append(x)
            x = torch.relu(layer(x))
        for layer in self.up:
            x = nn.functional.interpolate(x, scale_factor=2.0)
            x = torch.relu(layer(torch.cat([x, skips.pop()], dim=1)))
        return self.out(x).square().mean()


def build(name: str) -> Any:
    if name == "unet":
        torch.manual_seed(0)
        return SimpleNamespace(model=UNet(), inputs=(torch.randn(2, 3, 32, 32),))
    return models.build(name)


class Pipeline:
    """A model cut into stages, with what one micro-batch after another is given."""

    def __init__(self, name: str, stages: int) -> None:
        case = build(name)
        self.model = case.model
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.0
        self.plan = zgraph.Plan(mesh={"pp": 2}, backend="eager")
        self.joint = captured_program(self.model, self.plan, case.inputs, 2)
        costs = costs_of(self.plan)
        cuts = find_cuts(self.joint, stages, "time", costs)
        self.stages: Stages = cut_stages(self.joint, assign(self.joint, cuts), stages)
        residents = resident_of(self.model, self.joint.params, self.plan, {}, torch.device("cpu"), costs)
        self.steps = [StepProgram(p, BuildContext(self.plan, costs, residents)) for p in self.stages.programs]
        self.held = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        self.tied = {n for n, at in self.stages.holders.items() if len(at) > 1}

    def inputs(self, micro_batch: int) -> dict[int, torch.Tensor]:
        """The flat inputs of a micro-batch, by index: random ones of the right kind."""
        generator = torch.Generator().manual_seed(micro_batch)
        found: dict[int, torch.Tensor] = {}
        for port, node in self.joint.input_items():
            if port.index is None or port.role in (InputRole.PARAMETER, InputRole.TANGENT):
                continue
            like = node.meta["val"]
            if port.role is InputRole.BUFFER:
                found[port.index] = self.held[port.name].detach()
            elif like.dtype.is_floating_point:
                found[port.index] = torch.randn(like.shape, generator=generator, dtype=like.dtype)
            else:
                found[port.index] = torch.randint(0, 2, like.shape, generator=generator).to(like.dtype)
        return found

    def tangents(self) -> dict[int, torch.Tensor]:
        ports = [(p, n) for p, n in self.joint.input_items() if p.role is InputRole.TANGENT]
        return {p.index: torch.full_like(torch.empty(n.meta["val"].shape), 0.5) for p, n in ports}  # type: ignore[misc]

    def runtime(self) -> Any:
        shards = SimpleNamespace(local=lambda name: self.held[name].detach())
        alone = SimpleNamespace(ranks=[], group=None, heart=None)
        clock = SimpleNamespace(ran=lambda program: None)
        return SimpleNamespace(
            shards=shards,
            agreement=alone,
            clock=clock,
            once=False,
            plan=self.plan,
            votes=SimpleNamespace(random=lambda step: None),
            settle_gradients=lambda: None,
        )

    def whole(self, micro_batches: int) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """Gradients summed, and losses, of the uncut program."""
        residents = resident_of(
            self.model, self.joint.params, self.plan, {}, torch.device("cpu"), costs := costs_of(self.plan)
        )
        step = StepProgram(self.joint, BuildContext(self.plan, costs, residents))
        worker, runtime = None, self.runtime()
        losses = []
        for number in range(micro_batches):
            if worker is None:
                worker = Worker(
                    runtime, step, StageTask(frozenset({Kind.F, Kind.B}), Action(Kind.B, 0, micro_batches - 1))
                )
            outputs, _ = worker.forward(number, self.inputs(number), {})  # type: ignore[arg-type]
            losses.append(outputs)
            worker.backward(Action(Kind.B, 0, number), self.tangents(), {})
        assert worker is not None
        return worker.gradients, losses  # type: ignore[return-value]

    def run(self, schedule: Any) -> tuple[dict[str, torch.Tensor], list[dict[int, Any]]]:
        """Gradients summed over stages, and what the last stage gives, in one order that the schedule allows."""
        runtime = self.runtime()
        of: dict[int, StageTask] = {}
        for rank in range(schedule.ranks):
            of |= stage_tasks(schedule, rank)
        workers = [Worker(runtime, step, of[stage]) for stage, step in enumerate(self.steps)]
        outputs: list[dict[int, Any]] = [{} for _ in range(schedule.micro_batches)]

        def act(action: Action, came: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            stage, number = action.stage, action.micro_batch
            if action.kind is not Kind.F:
                return workers[stage].backward(action, self.tangents(), came)
            given, sent = workers[stage].forward(number, self.inputs(number), came)  # type: ignore[arg-type]
            outputs[number] |= given
            return sent

        replay(schedule, self.stages, act)
        total: dict[str, torch.Tensor] = {}
        for worker in workers:
            assert not worker._batches, "a micro-batch was not let go"
            for name, value in worker.gradients.items():
                total[name] = total[name] + value if name in total else value
        return total, outputs


def ordered(schedule: Schedule) -> bool:
    """Does each stage add its micro-batches' gradients first to last?"""
    numbers: dict[int, list[int]] = {}
    for rank in range(schedule.ranks):
        for action in schedule.of(rank):
            if action.kind in (Kind.B, Kind.W):
                numbers.setdefault(action.stage, []).append(action.micro_batch)
    return all(n == sorted(n) for n in numbers.values())


@functools.cache
def pipeline(name: str, stages: int) -> Pipeline:
    return Pipeline(name, stages)


@functools.cache
def whole(name: str, micro_batches: int) -> Any:
    return pipeline(name, 2).whole(micro_batches)


@sweep(
    "which, name, ranks",
    [(which, *way) for which in SCHEDULES for way in in_turn(NAMES, [2, 4])],
    quick=(24,),
)
def test_a_schedule_gives_the_gradients_of_accumulation_in_one_process(which: str, ranks: int, name: str) -> None:
    ran = 0
    for micro_batches in range(1, 9):
        try:
            schedule = make_schedule(which, ranks, micro_batches)
        except zgraph.errors.PlanError:
            continue  # (not every number of micro-batches is one of every schedule)
        staged = pipeline(name, schedule.stages)
        found, outputs = staged.run(schedule)
        expected, losses = whole(name, micro_batches)
        for mine, theirs in zip(outputs, losses, strict=True):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[i], theirs[i]) for i in theirs if isinstance(theirs[i], torch.Tensor))
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            if key in staged.tied or not ordered(
                schedule
            ):  # (of a tied one, stages' parts are summed over micro-batches first)
                assert float((found[key] - value).norm()) <= ROUNDING * float(value.norm()), key
            else:
                assert torch.equal(found[key], value), key
        ran += 1
    assert ran >= (1 if which == "dualpipev" else 2)
