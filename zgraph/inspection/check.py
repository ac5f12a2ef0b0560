"""Check a plan against a model, a number of ranks and hardware, and report everything that would fail at once.

Each check is a method that yields what it finds. If one fails, only checks that need its result are skipped. A plan
with faults is checked without the keys that have them, so that the rest of it is checked as well.
"""

from __future__ import annotations

import contextlib
import math
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Embedding, EmbeddingBag

from zgraph.build.pass_pipeline import Variant, build, build_update_passes, load_pass, load_policy
from zgraph.build.planned_step import captured_program, placed_for, split_inputs
from zgraph.build.unmatched_patterns import unmatched, without
from zgraph.build.update_program import away_bytes, state_bytes
from zgraph.build.what_if import what_fits
from zgraph.errors import OffloadError, PlanError, ZgraphError
from zgraph.forecast.stages import forecast_pipeline
from zgraph.inspection.compare_plans import RESERVE, rows_of
from zgraph.inspection.make_inspection import of_model
from zgraph.inspection.memory import peak_of
from zgraph.offload.files import FileStore
from zgraph.parameters import mixed_precision
from zgraph.parameters.layout import planned_layout
from zgraph.passes import PassManager, verify_program
from zgraph.passes.analysis.costs import Costs, Hardware, hardware, hardware_like
from zgraph.plan import planfile
from zgraph.plan.lr_schedules import TorchSchedule
from zgraph.plan.plan import Plan, located
from zgraph.program.node import info
from zgraph.program.program import DATA_DIMS, InputRole, OutputRole, ParamSpec, Program
from zgraph.ranks.host import host_free
from zgraph.runtime.compiled_models import is_compiled
from zgraph.runtime.train_step import first_part
from zgraph.units import shown_bytes
from zgraph.update.optimizer import PlanOptimizer
from zgraph.update.parameter_groups import faults_of, members_of
from zgraph.update.torch_lr_schedulers import torch_scheduler

if TYPE_CHECKING:
    from torch import nn

    from zgraph.build.planned_step import Inputs

ERROR, WARNING, NOTE = "error", "warning", "note"
NAMED = 3  # parameters or tensors that a finding names at most
_STAND_INS = {"optimizer": {"name": "AdamW"}}  # replacements for faulty keys that other keys depend on
_FAR = 10**6  # a late step at which learning-rate schedules are tried


@dataclass(frozen=True)
class Finding:
    """One finding of a check."""

    check: str  # the check's name
    level: str  # "error" (it will fail), "warning" (it costs or surprises) or "note"
    what: str  # what is the case
    where: str | None = None  # the key, module, file or line; None if there is none
    why: str | None = None  # the reason, None where `what` says all
    hint: str | None = None  # what to do about it, None if there is nothing


@dataclass(frozen=True)
class Checked:
    """The result of all checks."""

    world: int | None  # the ranks that were checked for; None without a mesh that fits
    findings: tuple[Finding, ...]  # what was found, in the order of the checks
    passed: tuple[str, ...]  # the checks that found no error
    skipped: dict[str, str]  # the checks that could not run, with what they needed

    @property
    def ok(self) -> bool:
        return not any(f.level == ERROR for f in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def check(
    find: Callable[[], tuple[nn.Module, Inputs]],
    plan: Plan | Path | None = None,
    world: int | None = None,
    device: str | None = None,
    otherwise: str | None = None,
) -> Checked:
    """Check a plan, or a file that should hold one, for a model and the inputs of one rank's batch, which `find`
    returns.

    `world` is by default the mesh's number of ranks. `device` names the hardware in place of the plan's, `otherwise`
    the hardware for a plan that names none (by default this machine's). Faults are returned as findings, not raised.
    """
    return _Checks(find, plan, world, device, otherwise).run()


class _Checks:
    """The checks in their order, and what they find for each other; an attribute is None if its check has not found
    it."""

    def __init__(
        self,
        find: Callable[[], tuple[nn.Module, Inputs]],
        source: Plan | Path | None,
        asked: int | None,
        device: str | None,
        otherwise: str | None,
    ) -> None:
        self.find = find
        self.source = source
        self.asked = asked
        self.device = device
        self.otherwise = otherwise
        self.plan: Plan | None = None
        self.world: int | None = None
        self.sizes: dict[str, int] | None = None
        self.assumed: tuple[int, dict[str, int]] = 1, {}  # a world and its mesh, also if the ones asked for don't fit
        self.hardware: Hardware | None = None
        self.costs: Costs | None = None
        self.model: nn.Module | None = None
        self.inputs: Inputs | None = None
        self.part: Inputs | None = None
        self.sound: bool | None = None
        self.specs: dict[str, ParamSpec] | None = None
        self.updatable: bool | None = None
        self.captured: Program | None = None
        self.runnable: bool | None = None

    def run(self) -> Checked:
        findings: list[Finding] = []
        passed: list[str] = []
        skipped: dict[str, str] = {}
        for name, look, needs in self._all():
            lacking = [
                said for attribute, said in _SAID.items() if attribute in needs and getattr(self, attribute) is None
            ]
            if lacking:
                skipped[name] = f"needs {' and '.join(lacking)}"
                continue
            new_findings = list(_caught(name, look))
            findings += [f for f in new_findings if (f.what, f.where) not in {(g.what, g.where) for g in findings}]
            if not any(f.level == ERROR for f in new_findings):
                passed.append(name)
        return Checked(self.world, tuple(findings), tuple(passed), skipped)

    def _all(self) -> Iterable[tuple[str, Callable[[], Iterator[Finding]], tuple[str, ...]]]:
        return (
            ("plan", self._plan, ()),
            ("mesh", self._mesh, ("plan",)),
            ("hardware", self._hardware, ("plan",)),
            ("target", self._target, ()),
            ("passes", self._passes, ("plan",)),
            ("batch", self._batch, ("plan", "inputs")),
            ("parameters", self._parameters, ("plan", "model")),
            ("precision", self._precision, ("plan", "specs")),
            ("recompute", lambda: self._unmatched("recompute"), ("plan", "model")),
            ("tiles", lambda: self._unmatched("tiles"), ("plan", "model")),
            ("attention", lambda: self._unmatched("attention"), ("plan", "model")),
            ("tensor_parallel", lambda: self._unmatched("tensor_parallel"), ("plan", "model")),
            ("optimizer", self._optimizer, ("plan", "specs")),
            ("schedule", self._schedule, ("plan", "specs")),
            ("offload", self._offload, ("plan", "specs")),
            ("capture", self._capture, ("model", "part")),
            ("operators", self._operators, ("captured",)),
            ("gradients", self._gradients, ("captured",)),
            ("memory", self._memory, ("sizes", "costs", "sound", "updatable", "captured", "runnable")),
        )

    # -- plan and machine ---------------------------------------------------------------------------------------------
    def _plan(self) -> Iterator[Finding]:
        if not isinstance(self.source, Path):
            self.plan = self.source or Plan()
            return
        data = planfile.parse(planfile.read(self.source), self.source)
        with contextlib.suppress(PlanError):
            self.plan = Plan.load(self.source)
            return
        text = self.source.read_text(encoding="utf-8-sig")
        left_out: list[str] = []
        while self.plan is None:
            try:
                self.plan = Plan.model_validate(data)
            except PlanError as error:
                problems = error.problems or (error,)
                keys = {(p.where or "").partition(".")[0].partition("[")[0] for p in problems} & data.keys()
                yield from (_finding("plan", located(p, self.source, text)) for p in problems)
                if not keys:
                    return
                left_out += sorted(keys)
                data = {k: v for k, v in data.items() if k not in keys}
                data |= {k: v for k, v in _STAND_INS.items() if k in keys}
        stands = "".join(f"; {key} is taken to be {_STAND_INS[key]}" for key in left_out if key in _STAND_INS)
        yield Finding("plan", NOTE, f"the rest is checked without {', '.join(left_out)}{stands}")

    def _mesh(self) -> Iterator[Finding]:
        assert self.plan is not None
        usual = self.plan.usual_world()
        self.assumed = usual, self.plan.resolve_mesh(usual)
        world = usual if self.asked is None else self.asked
        self.sizes = self.plan.resolve_mesh(world)
        self.plan = self.plan.for_world(world)
        self.world = world
        self.assumed = world, self.sizes
        if math.prod(self.sizes.get(d, 1) for d in DATA_DIMS) == 1 < self.plan.zero:
            yield Finding("mesh", NOTE, f"on one rank stage {self.plan.zero} shards nothing")

    def _hardware(self) -> Iterator[Finding]:
        assert self.plan is not None
        name = self.device or self.plan.named_hardware or self.otherwise
        device_hardware = (
            hardware(name) if name is not None else hardware_like("cuda" if torch.cuda.is_available() else "cpu")
        )
        self.hardware = device_hardware
        fits = True
        for dim in self.plan.mesh:
            try:
                device_hardware.link(dim)
            except PlanError as error:
                fits = False
                yield _finding("hardware", error)
        precision = self.plan.resolved_precision()
        low = precision.compute or precision.parameter or "float32"
        if low not in device_hardware.flops:
            yield Finding(
                "hardware",
                NOTE,
                f"{device_hardware.name} has no rate for {low}",
                why="its products are taken to run as in float32",
            )
        budget = self.plan.memory_budget
        if budget is not None and budget > device_hardware.capacity:
            yield Finding(
                "hardware",
                ERROR,
                f"the budget is more than {device_hardware.name} has",
                where="memory_budget",
                why=f"{shown_bytes(budget)} of {shown_bytes(device_hardware.capacity)}",
                hint=f"memory_budget={int(device_hardware.capacity * RESERVE)}",
            )
        if fits:
            self.costs = Costs(device_hardware, fused=self.plan.backend == "inductor")

    def _target(self) -> Iterator[Finding]:
        self.model, self.inputs = self.find()
        if is_compiled(self.model):
            self.model = None
            yield Finding("target", ERROR, "the model is compiled already", hint="give a plain one")
        elif not self.model.training:
            yield Finding("target", NOTE, "the model is in eval mode", hint="model.train(), for a training step")

    def _passes(self) -> Iterator[Finding]:
        """Load each of the user's passes, and a policy for recomputation, and check the contracts of the pipelines with
        those that load."""
        plan = self.plan
        assert plan is not None
        broken: list[str] = []
        for text, user in zip(plan.passes, plan.user_passes(), strict=True):
            try:
                load_pass(user.ref)
            except PlanError as error:
                broken.append(text)
                yield _finding("passes", error, where=f"passes: {text}")
        changes: dict[str, Any] = {"passes": tuple(p for p in plan.passes if p not in broken)}
        if isinstance(plan.recompute, str) and ":" in plan.recompute:
            try:
                load_policy(plan.recompute)
            except PlanError as error:
                broken.append(plan.recompute)
                changes["recompute"] = "auto"
                yield _finding("passes", error, where=f"recompute: {plan.recompute}")
        costs = self.costs or Costs(hardware_like("cpu"))
        fits = not broken
        while True:
            try:
                sound_plan = plan.model_copy(update=changes)
                variants = [(v, t) for v in (Variant(), Variant(reduce=False)) for t in (True, False)]
                pipelines = [build(sound_plan, v, training=t, costs=costs) for v, t in variants]
                break
            except PlanError as error:  # (a pass is to run at a position that the pipeline lacks)
                fits = False
                lost = next((p for p in changes["passes"] if repr(p.split()[0]) in error.what), None)
                yield _finding("passes", error, where=f"passes: {lost}" if lost else None)
                if lost is None:
                    return
                changes["passes"] = tuple(p for p in changes["passes"] if p != lost)
        told: set[str] = set()
        for passes in [*pipelines, build_update_passes(sound_plan)]:
            for fault in PassManager(passes).faults():
                fits = False
                if str(fault) not in told:
                    told.add(str(fault))
                    yield _finding("passes", fault)
        self.sound = fits or None

    # -- the model ----------------------------------------------------------------------------------------------------
    def _batch(self) -> Iterator[Finding]:
        assert self.plan is not None and self.inputs is not None
        self.part = self.inputs
        args, kwargs = first_part(self.plan, *split_inputs(self.inputs))
        parts = self.plan.micro_batches
        self.part = kwargs if isinstance(self.inputs, dict) else args
        if self.sizes is not None:
            own = rows_of(self.inputs)
            rows = own if self.plan.elastic is None else self.plan.elastic.rows or own
            ranks = math.prod(self.sizes.get(d, 1) for d in DATA_DIMS)
            cut = f", in {parts} micro-batches" if parts > 1 else ""
            yield Finding("batch", NOTE, f"{rows} row(s) of a rank{cut}: {rows * ranks} of all {ranks} in a step")

    def _parameters(self) -> Iterator[Finding]:
        assert self.plan is not None and self.model is not None
        self.specs = planned_layout(self.model, self.assumed[1], self.plan)
        if not any(s.requires_grad for s in self.specs.values()):
            hint = "requires_grad_() on those that are to"
            yield Finding("parameters", WARNING, "no parameter of the model trains", hint=hint)
        if self.sizes is None:
            return
        small = [s for s in self.specs.values() if s.shard_dim and s.shape[0] < self.sizes[s.shard_dim]]
        if small:
            ranks = self.sizes[str(small[0].shard_dim)]
            wasted = sum(ranks * math.prod(s.shard_shape) * s.dtype.itemsize - s.nbytes for s in small)
            largest = max(s.numel for s in small)
            yield Finding(
                "parameters",
                WARNING,
                f"{len(small)} parameter(s) have fewer rows than there are ranks: {_some([s.name for s in small])}",
                why=f"{ranks} ranks hold a row each, {shown_bytes(wasted)} of them padding",
                hint=f"param_persistence_threshold={largest + 1} leaves them whole",
            )

    def _unmatched(self, field: str) -> Iterator[Finding]:
        """Yield the patterns of one field that match nothing, and remove them from the plan for the later checks."""
        assert self.plan is not None and self.model is not None
        patterns = [f for f in unmatched(self.plan, self.model) if f.field == field]
        yield from (_finding(field, f.error) for f in patterns)
        self.plan = without(self.plan, patterns)

    def _precision(self) -> Iterator[Finding]:
        assert self.plan is not None and self.model is not None and self.specs is not None
        precision = self.plan.resolved_precision()
        faults = list(mixed_precision.faults_of(self.model, precision, self.specs))
        yield from (_finding("precision", fault) for fault in faults)
        if faults:
            fitting = mixed_precision.without_faults(self.model, precision)
            self.plan = self.plan.model_copy(update={"precision": fitting})
        too_large = mixed_precision.too_large_for(self.model, precision)
        if too_large:
            yield _finding("precision", mixed_precision.overflow_error(too_large))

    def _optimizer(self) -> Iterator[Finding]:
        assert self.plan is not None and self.model is not None and self.specs is not None
        self.updatable = True
        if self.plan.optimizer is None:
            yield Finding("optimizer", NOTE, "the plan has no optimizer", why="step() is an optimizer's of your own")
            return
        for fault in faults_of(self.specs, self.plan.optimizer, self.model):
            self.updatable = None
            yield _finding("optimizer", fault)

    def _schedule(self) -> Iterator[Finding]:
        assert self.plan is not None and self.model is not None and self.specs is not None
        schedule, optimizer = self.plan.lr_schedule, self.plan.optimizer
        if schedule is None or optimizer is None:
            return
        if not isinstance(schedule, TorchSchedule):
            rates = [schedule.at(step, 1.0, 0.9).lr for step in (0, 1, _FAR)]
            if not all(map(math.isfinite, rates)):
                yield Finding("schedule", ERROR, "the learning rate is no number at some step", where="lr_schedule")
            return
        wanted = optimizer if self.updatable else optimizer.model_copy(update={"groups": ()})
        members = members_of(self.model, self.specs, wanted)
        torch_scheduler(schedule, PlanOptimizer(members, dict(self.model.named_parameters()), None))

    def _placed(self) -> Plan:
        """Return the plan with offload tiers resolved, where hardware and optimizer are known."""
        assert self.plan is not None and self.model is not None
        if self.costs is None or self.updatable is None:
            return self.plan
        return placed_for(self.model, self.plan, self.assumed[1], self.costs)[0]

    def _offload(self) -> Iterator[Finding]:
        assert self.plan is not None and self.model is not None and self.specs is not None
        plan, known = self._placed(), self.updatable is not None
        if "cpu" in plan.offload.tiers():
            host_bytes = sum(s.rank_bytes for s in self.specs.values() if s.home == "cpu")
            if known and plan.offload.tier("optimizer") == "cpu":
                host_bytes += state_bytes(self.model, self.specs, plan)
                if plan.offload.gradients:
                    host_bytes += sum(s.grad_bytes for s in self.specs.values() if s.home is None)
            if host_bytes > host_free():
                yield Finding(
                    "offload",
                    WARNING,
                    "what is offloaded to the host has no room in this one's memory",
                    why=f"{shown_bytes(host_bytes)} of each rank, {shown_bytes(host_free())} are free",
                )
        folder = plan.offload.folder()
        if folder is not None and "nvme" in plan.offload.tiers():
            needed = away_bytes(self.model, self.specs, plan) if known else 0
            yield from self._folder(Path(folder).expanduser(), needed)

    def _folder(self, folder: Path, needed: int) -> Iterator[Finding]:
        """Check the folder that values are offloaded to, on this machine: that it can be written, and has room for this
        rank's `needed` bytes and, as a warning, for those of all ranks."""
        there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
        if there != folder and os.access(there, os.W_OK) and there.is_dir():
            yield Finding("offload", NOTE, "the folder is not there yet, and will be made", where=str(folder))
        elif there != folder:
            raise OffloadError(
                "the folder is not there and can't be made",
                where=str(folder),
                why=f"{there} {'is no folder' if not there.is_dir() else 'may not be written to'}",
                hint="name a folder on a local disk that this process may write to",
            )
        with FileStore(there, threads=1) as store:
            free, _ = store.require(needed)
            if not store.direct:
                yield Finding(
                    "offload",
                    WARNING,
                    "the folder's file system has no O_DIRECT",
                    where=str(folder),
                    why="reads and writes go through the page cache",
                    hint="a local disk with ext4 or XFS",
                )
        whole = needed * (self.world or 1)
        if whole > free:
            yield Finding(
                "offload",
                WARNING,
                "the disk has no room for all ranks",
                where=str(folder),
                why=f"{self.world} ranks need {shown_bytes(whole)}, {shown_bytes(free)} are free here",
                hint="make room, unless each rank has a disk of its own",
            )

    # -- programs -----------------------------------------------------------------------------------------------------
    def _capture(self) -> Iterator[Finding]:
        """Capture the model for the plan and its mesh if these are valid, else for default ones."""
        assert self.model is not None and self.part is not None
        plan, world = Plan(backend="eager"), 1
        if self.plan is not None and self.specs is not None:
            world = self.assumed[0]
            plan = self._placed()
        self.captured = captured_program(self.model, plan, self.part, world)
        yield from ()

    def _operators(self) -> Iterator[Finding]:
        assert self.captured is not None and self.model is not None
        fits = True
        for path, module in self.model.named_modules():
            if isinstance(module, (Embedding, EmbeddingBag)) and module.sparse:
                fits = False
                yield Finding(
                    "operators",
                    ERROR,
                    f"module {path or 'the model itself'!r} makes sparse gradients",
                    why="gradients are reduced and updated as dense tensors",
                    hint="sparse=False",
                )
        own: dict[str, str] = {}
        for node in self.captured.nodes:
            for val in node.meta["val"] if isinstance(node.meta.get("val"), (tuple, list)) else (node.meta.get("val"),):
                if not isinstance(val, torch.Tensor):
                    continue
                if fits and val.layout is not torch.strided:
                    fits = False
                    yield Finding(
                        "operators",
                        ERROR,
                        f"{node.name!r} is a sparse tensor",
                        where=info(node).source or None,
                        why="values are dense in programs",
                        hint="make it dense",
                    )
            space = getattr(node.target, "namespace", None)
            if space is not None and space not in (
                "aten",
                "prims",
                "prim",
                "zgraph",
                "_c10d_functional",
                "inductor_prims",
            ):
                own.setdefault(str(node.target), info(node).source)
        for operator, source in own.items():
            yield Finding(
                "operators",
                NOTE,
                f"{operator} is no operator of PyTorch's",
                where=source or None,
                why="it runs as it is, and is not fused",
            )
        if fits:
            verify_program(self.captured)
            self.runnable = True

    def _gradients(self) -> Iterator[Finding]:
        assert self.captured is not None
        names = {p.name for p in self.captured.outputs if p.role is OutputRole.GRADIENT and p.of is InputRole.PARAMETER}
        without = [n for n, s in self.captured.params.items() if s.requires_grad and n not in names]
        if without:
            yield Finding(
                "gradients",
                WARNING,
                f"{len(without)} parameter(s) get no gradient: {_some(without)}",
                why="what is differentiated does not depend on them",
                hint="requires_grad_(False), if that is meant: they take memory as those that train",
            )
        tangents = [n for p, n in self.captured.input_items() if p.role is InputRole.TANGENT]
        if tangents and not (len(tangents) == 1 and tangents[0].meta["val"].dim() == 0):
            yield Finding(
                "gradients",
                NOTE,
                "the model's output has no loss of its own",
                hint="train_step needs compile's loss_fn",
            )

    def _memory(self) -> Iterator[Finding]:
        model, inputs = self.model, self.inputs
        assert self.plan is not None and self.hardware is not None and self.costs is not None and self.sizes is not None
        assert model is not None and inputs is not None and self.world is not None and self.captured is not None
        plan = self.plan.model_copy(update={"hardware": self.device or self.plan.named_hardware or self.otherwise})
        limit = int(self.hardware.capacity * RESERVE)
        if plan.pipeline_ranks(self.world) > 1:
            yield from self._stages(plan, limit)
            return
        try:
            inspection = of_model(model, plan, inputs, self.world, captured=self.captured)
        except PlanError as error:
            if error.where != "memory_budget":
                raise
            yield _finding("memory", error)
            yield Finding(
                "memory",
                NOTE,
                f"without the budget of {shown_bytes(plan.memory_budget or 0)}",
                hint=self._fitting(limit),
            )
            return
        peak = peak_of(inspection)
        holders = [f"{h.node} {shown_bytes(h.bytes)} ({h.category}, {h.module})" for h in peak.holders[:NAMED]]
        said = f"{shown_bytes(peak.bytes)} in {peak.program} at {peak.node}"
        if peak.bytes > limit:
            over = peak.bytes > self.hardware.capacity
            yield Finding(
                "memory",
                ERROR if over else WARNING,
                f"a step {'does not fit into' if over else 'hardly fits into'} {self.hardware.name}",
                why="\n".join(
                    [f"{said}; the device has {shown_bytes(self.hardware.capacity)}", "the largest there:", *holders]
                ),
                hint=self._fitting(limit),
            )
        else:
            share = peak.bytes / self.hardware.capacity
            yield Finding("memory", NOTE, f"the peak is {said}: {share:.1%} of {self.hardware.name}")

    def _stages(self, plan: Plan, limit: int) -> Iterator[Finding]:
        """Forecast a plan with a pipeline, and compare the memory of the rank that needs most with the device's."""
        assert (
            self.model is not None and self.inputs is not None and self.world is not None and self.hardware is not None
        )
        forecast = forecast_pipeline(self.model, plan, self.inputs, self.world, self.captured)
        worst, capacity = forecast.worst, self.hardware.capacity
        said = f"{shown_bytes(worst.peak)} on rank {worst.rank} of pp, in {worst.where}"
        bubble = f"{len(forecast.stages)} stages on {len(forecast.ranks)} ranks idle for {forecast.timeline.bubble:.1%} of {plan.schedule}'s time"
        yield Finding("memory", NOTE, bubble)
        if worst.peak <= limit:
            yield Finding("memory", NOTE, f"the peak is {said}: {worst.peak / capacity:.1%} of {self.hardware.name}")
            return
        over = worst.peak > capacity
        largest = sorted(worst.categories.items(), key=lambda c: -c[1])[:NAMED]
        yield Finding(
            "memory",
            ERROR if over else WARNING,
            f"a step {'does not fit into' if over else 'hardly fits into'} {self.hardware.name}",
            why="\n".join(
                [
                    f"{said}; the device has {shown_bytes(capacity)}",
                    "the largest there:",
                    *(f"{name} {shown_bytes(size)}" for name, size in largest),
                ]
            ),
            hint="more stages or micro-batches, recompute, offload, or a schedule with fewer micro-batches in flight",
        )

    def _fitting(self, limit: int) -> str:
        assert self.plan is not None and self.model is not None and self.costs is not None and self.sizes is not None
        assert self.captured is not None
        plan = self.plan.model_copy(update={"memory_budget": None})
        _, device = placed_for(self.model, plan, self.sizes, self.costs)
        return what_fits(plan, self.model, self.captured, self.costs, device, limit)


_SAID = {
    "plan": "a plan that can be read",
    "sizes": "a mesh for this world",
    "costs": "hardware with a link for each mesh dimension",
    "model": "the model",
    "inputs": "the model's inputs",
    "part": "a batch that can be cut",
    "specs": "the parameters' layout",
    "sound": "passes that are there and fit",
    "updatable": "an optimizer that fits the parameters",
    "captured": "the captured model",
    "runnable": "operators that programs can run",
}


def _caught(name: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Yield a check's findings, and whatever it raises as one more: the user's code may raise anything."""
    try:
        yield from look()
    except ZgraphError as error:
        problems = error.problems if isinstance(error, PlanError) and error.problems else (error,)
        yield from (_finding(name, problem) for problem in problems)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None
        yield Finding(name, ERROR, f"{type(error).__name__}: {error}", where=where)


def _finding(name: str, error: ZgraphError, where: str | None = None) -> Finding:
    return Finding(name, ERROR, error.what, where or error.where, error.why, error.hint)


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" … {len(names) - NAMED} more" if len(names) > NAMED else "")
