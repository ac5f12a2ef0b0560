"""Runs the update program behind `model.step()`: holds its states, fills in its numbers, and zeroes the gradients.

[Note: no waiting] Whether a step is skipped, the loss scale and the number of updates live on the device. The host reads
them one step late: a copy to pinned memory is started after each update and read before the next, when the device has
long been given the next forward and backward. Only half precision's end of the run and schedules need it.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from zgraph.codegen.chunks import UpdateExecutable, compile_chunk, compile_chunks
from zgraph.codegen.eager import compile_eager
from zgraph.codegen.executable import Executable
from zgraph.errors import OverflowError, PlanError, StepError
from zgraph.passes import History, verify_program
from zgraph.program.program import InputRole, OutputRole, ParamSpec, Port, Program
from zgraph.schedules import TorchSchedule
from zgraph.update import scaler
from zgraph.update.build import EMA, MASTER, scalar_names, states_of
from zgraph.update.groups import STEP, Member, members_of
from zgraph.update.optimizer import PlanOptimizer
from zgraph.update.program import update_history, update_options
from zgraph.update.schedule import torch_scheduler

if TYPE_CHECKING:
    from zgraph.runtime import Runtime

logger = logging.getLogger(__name__)


class Updater:
    """The optimizer's side of one compiled module. `optimizer` is None where the plan has none."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        plan = runtime.plan
        self.scaling = plan.loss_scale()
        self.options = update_options(plan)
        specs = runtime.shards.specs
        self.members: list[Member] = (
            members_of(runtime.module, specs, plan.optimizer) if plan.optimizer is not None else []
        )
        self.states: dict[str, torch.Tensor] = {}
        device = runtime.device
        self.counts = {STEP: torch.zeros((), dtype=torch.float64, device=device)}
        self.scale_state = {k: v.to(device) for k, v in scaler.initial(self.scaling).items()} if self.scaling else {}
        self.optimizer: PlanOptimizer | None = None
        self.scheduler: Any = None
        if plan.optimizer is not None:
            self.optimizer = PlanOptimizer(self.members, runtime.shards.params(), self.step)
            self._base = [dict(g) for g in self.optimizer.param_groups]
            if isinstance(plan.lr_schedule, TorchSchedule):
                self.scheduler = torch_scheduler(plan.lr_schedule, self.optimizer)
        self.grad_norm: torch.Tensor | None = None
        self.hooks: list[Callable[[dict[str, torch.Tensor]], None]] = []
        self.factor: torch.Tensor | float = 1.0
        self.calls = 0
        self._late: _Late | None = None
        self._programs: dict[tuple[tuple[str, str], ...], tuple[History, UpdateExecutable]] = {}
        self._indices = (
            {d: torch.tensor(runtime.mesh.get_local_rank(d), device=device) for d in runtime.sizes}
            if runtime.mesh is not None
            else {}
        )

    def adopt(self, old: Updater, *, copies: bool) -> None:
        """Go on where another updater of the same parameters is: states, counts, numbers, the loss scale.

        With `copies` the tensors are copies. States that this plan's optimizer does not have are left out, those that it
        alone has begin anew; a warning says so.
        """
        own = {f"{m.name}/{key}" for m in self.members for key in states_of(m, self._spec(m.name), self.options)}
        kept = {n: t.clone() if copies else t for n, t in old.states.items() if n in own}
        held = {n.rpartition("/")[0] for n in old.states}
        if kept.keys() != old.states.keys() or any(n.rpartition("/")[0] in held and n not in kept for n in own):
            logger.warning("the plan's optimizer keeps other states than the one before: those begin anew")
        count_of = {m.name: m.count for m in old.members}
        self.members = [replace(m, count=count_of.get(m.name, STEP)) for m in self.members]
        self.counts = {n: t.clone() if copies else t for n, t in old.counts.items()}
        for name in {n.rpartition("/")[0] for n in kept}:
            self._make_states(name, kept)
        self.calls, self.hooks = old.calls, list(old.hooks)
        if self.scale_state.keys() == old.scale_state.keys():
            self.scale_state = {k: v.clone() if copies else v for k, v in old.scale_state.items()}
            self._late = copy.copy(old._late)
        same = self.runtime.plan.optimizer == old.runtime.plan.optimizer
        if same and self.optimizer is not None and old.optimizer is not None:
            for mine, theirs in zip(self.optimizer.param_groups, old.optimizer.param_groups, strict=True):
                mine.update({k: v for k, v in theirs.items() if k not in ("params", "names")})
        if self.scheduler is not None and old.scheduler is not None:
            self.scheduler.load_state_dict(old.scheduler.state_dict())

    def _spec(self, name: str) -> ParamSpec:
        return self.runtime.shards.specs[name]

    # -- programs -----------------------------------------------------------------------------------------------------
    def histories(self) -> dict[str, History]:
        """The way of each update program through its passes, by name: "update0", …"""
        return {history.program.name: history for history, _ in self._programs.values()}

    def executables(self) -> list[Executable]:
        return [e for _, executable in self._programs.values() for e in executable.executables]

    def program(self, names: tuple[str, ...]) -> tuple[History, UpdateExecutable]:
        """The update of the parameters of these names (a parameter without a gradient is left alone, as torch does)."""
        by_name = {m.name: m for m in self.members}
        chosen = [by_name.get(n, Member(n, None, -1)) for n in names]
        key = tuple((m.name, m.count) for m in chosen)
        if key not in self._programs:
            runtime = self.runtime
            inductor = runtime.plan.backend == "inductor"
            name = f"update{len(self._programs)}"
            history = update_history(runtime.plan, chosen, runtime.shards.specs, runtime.sizes, runtime.device, name)
            runtime.agree(history.program)
            made = compile_chunks(history.program, self._compile) if inductor else _whole(history.program, runtime)
            self._programs[key] = (history, made)
            for chunk in made.chunks:
                verify_program(chunk.executable.program)
        return self._programs[key]

    def _compile(self, part: Program) -> Executable:
        return compile_chunk(part, self.runtime.groups)

    # -- a step -------------------------------------------------------------------------------------------------------
    def step(self) -> torch.Tensor | None:
        """One update from the gradients that are there; they are gone afterwards. The norm before clipping, if asked for."""
        runtime = self.runtime
        if self.optimizer is None:
            raise StepError(
                "the plan has no optimizer",
                where="optimizer",
                hint="give the plan one (zgraph.AdamW(lr=…)), or call your own optimizer's step",
            )
        names = self._with_gradients()
        runtime.agreement.vote("an update", f"{len(names)} gradients: {' '.join(names)}")
        self._settle_previous()
        self._run_hooks(names)
        self._schedule()
        self._count_apart(names)
        with runtime.clock.timed("update"):
            norm = self._run(names)
            for name in names:
                runtime.shards.params()[name].grad = None
            runtime.weights_changed(names)
        self.calls += 1
        self._after()
        runtime.clock.end_step()
        return norm

    def refuse_unscaled(self) -> None:
        """Half precision's loss scale needs someone who decides about skipped steps."""
        if self.scaling is not None and self.optimizer is None:
            raise PlanError(
                "training in fp16 needs an optimizer in the plan",
                where="optimizer",
                why="a step whose gradients overflow is skipped by the update program, on all ranks alike",
                hint="optimizer=zgraph.AdamW(lr=…), or precision='bf16'",
            )

    def clip_only(self) -> torch.Tensor | None:
        """Clip (and scale) the gradients where they are, for an optimizer of the user's own."""
        if self.options.clip_norm is None and self.options.clip_value is None and not self.options.factor:
            return None
        return self._run(self._with_gradients())

    def _with_gradients(self) -> tuple[str, ...]:
        runtime = self.runtime
        runtime.shards.refresh()
        runtime.reduce_leftovers()
        names = tuple(n for n, p in runtime.shards.params().items() if p.grad is not None)
        if not names:
            raise StepError(
                "step() before backward(): no parameter has a gradient",
                why="each step() takes the gradients of the backward passes since the last one",
                hint="call loss.backward() first, or train_step(…), which does it all",
            )
        return names

    def _count_apart(self, names: tuple[str, ...]) -> None:
        """Parameters that have no gradient this time count their updates apart from those that have, as torch does."""
        chosen = set(names)
        for count in list(self.counts):
            sharing = [m.name for m in self.members if m.count == count]
            left_out = [n for n in sharing if n not in chosen]
            if left_out and len(left_out) < len(sharing):
                apart = f"{STEP}{len(self.counts)}"
                self.counts[apart] = self.counts[count].clone()
                self.members = [replace(m, count=apart) if m.name in left_out else m for m in self.members]
                shown = self.optimizer.state if self.optimizer is not None else {}
                for name in left_out:
                    if (state := shown.get(self.runtime.shards.params()[name])) is not None:
                        state["step"] = self.counts[apart]

    def _run(self, names: tuple[str, ...]) -> torch.Tensor | None:
        history, executable = self.program(names)
        values = [self._value(port) for port in history.program.inputs]
        updated = {m.name for m in self.members}
        clipped = [
            (p.name, v)
            for p, v in zip(history.program.inputs, values, strict=True)
            if p.role is InputRole.GRADIENT and p.name not in updated
        ]
        self.runtime.clock.ran(history.program)
        results = executable.run(values)
        for name, value in clipped:
            self.runtime.shards.write_gradient(name, value)
        self.grad_norm = None
        for port, value in zip(history.program.outputs, results, strict=True):
            if port.role is OutputRole.OUTPUT and port.name == "grad_norm":
                self.grad_norm = value
        clip = self.runtime.plan.grad_clip
        if (
            self.grad_norm is not None
            and clip is not None
            and clip.error_if_nonfinite
            and not self.grad_norm.isfinite()
        ):
            raise StepError(
                f"the norm of the gradients is {float(self.grad_norm)}",
                where="grad_clip.error_if_nonfinite",
                hint="look for the loss that became infinite; this step has changed neither weights nor states",
            )
        return self.grad_norm

    def _value(self, port: Port) -> torch.Tensor:
        shards = self.runtime.shards
        if port.role is InputRole.PARAMETER:
            return shards.local(port.name)
        if port.role is InputRole.GRADIENT:
            return shards.local_gradient(port.name)
        if port.role is InputRole.INDEX:
            return self._indices[port.name]
        if port.role is InputRole.SCALARS:
            return self._scalars()
        if port.name in self.counts:
            return self.counts[port.name]
        if port.name.startswith("/"):
            return self.scale_state[port.name[1:]]
        return self.state(port.name)

    def _scalars(self) -> torch.Tensor:
        wanted = scalar_names(self._chosen(), self.options)
        ours = [w for w in wanted if w[0] >= 0]
        values = self.optimizer.numbers(ours) if self.optimizer is not None else []
        vector = torch.tensor(values, dtype=torch.float64)
        if self.runtime.device.type == "cuda":
            vector = vector.pin_memory().to(self.runtime.device, non_blocking=True)
        if self.options.factor:
            factor = torch.as_tensor(self.factor, dtype=torch.float64).to(self.runtime.device).reshape(1)
            vector = torch.cat([vector, factor])
            self.factor = 1.0  # it was for these gradients
        return vector

    def _chosen(self) -> list[Member]:
        have = {n for n, p in self.runtime.shards.params().items() if p.grad is not None}
        return [m for m in self.members if m.name in have]

    # -- states -------------------------------------------------------------------------------------------------------
    def state(self, name: str) -> torch.Tensor:
        """A state by "parameter/key", with padding rows; made when first needed."""
        if name not in self.states:
            param, _, _key = name.rpartition("/")
            self._make_states(param)
        return self.states[name]

    def _make_states(self, param: str, known: dict[str, torch.Tensor] | None = None) -> None:
        """Make a parameter's states, but for those that are `known`."""
        shards = self.runtime.shards
        spec = shards.specs[param]
        member = next(m for m in self.members if m.name == param)
        shown: dict[str, torch.Tensor] = {"step": self.counts[member.count]}
        for key, state in states_of(member, spec, self.options).items():
            local = shards.local(param)
            made = (known or {}).get(f"{param}/{key}")
            if made is not None:
                pass
            elif tuple(state.shape) == tuple(local.shape):
                made = torch.full_like(local, state.fill, dtype=state.dtype)
            else:
                made = torch.full(state.shape, state.fill, dtype=state.dtype, device=self.runtime.device)
            if key in (MASTER, EMA) and f"{param}/{key}" not in (known or {}):
                made.copy_(local)
            self.states[f"{param}/{key}"] = made
            shown[key] = shards.gradient(param, made) if tuple(state.shape) == tuple(local.shape) else made
        if self.optimizer is not None:
            self.optimizer.state[shards.params()[param]] = shown

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Swap the weights with their averages."""
        if self.options.ema is None:
            raise StepError("the plan keeps no average of the weights", where="ema", hint="ema=0.999 in the plan")
        names = [m.name for m in self.members if f"{m.name}/{EMA}" in self.states]  # of the others it is the weight
        self._swap(names)
        try:
            yield
        finally:
            self._swap(names)

    def _swap(self, names: Sequence[str]) -> None:
        shards = self.runtime.shards
        shards.refresh()
        for name in names:
            weight, average = shards.local(name), self.state(f"{name}/{EMA}")
            before = weight.clone()
            weight.copy_(average)
            average.copy_(before)
        self.runtime.weights_changed(names)

    # -- schedules and half precision ---------------------------------------------------------------------------------
    def _schedule(self) -> None:
        plan = self.runtime.plan
        if plan.lr_schedule is None or isinstance(plan.lr_schedule, TorchSchedule) or self.optimizer is None:
            return
        done = self.calls - self.skipped()
        for base, group in zip(self._base, self.optimizer.param_groups, strict=True):
            momentum = base["betas"][0] if "betas" in base else base.get("momentum", 0.0)
            point = plan.lr_schedule.at(done, base["lr"], momentum)
            group["lr"] = point.lr
            if "betas" in base:
                group["betas"] = (point.momentum, *base["betas"][1:])
            elif base.get("momentum"):
                group["momentum"] = point.momentum

    def skipped(self) -> int:
        """How many steps were skipped for an overflow, as far as the host has read it (all but the last step's)."""
        return self._late.skipped if self._late is not None else 0

    def _after(self) -> None:
        if not self.scaling:
            self._advance_scheduler()
            return
        if self._late is None:
            self._late = _Late(self.runtime.device)
        self._late.start(self.scale_state)

    def _settle_previous(self) -> None:
        if self._late is None:
            return
        before = self._late.skipped
        self._late.read()
        if self._late.exhausted:
            raise OverflowError(
                "the loss scale is at its minimum already, and the gradients still overflow",
                where="precision.loss_scale.min_loss_scale",
                why=f"the scale is {self._late.scale}; {self._late.skipped} steps were skipped so far",
                hint="look for infinite losses or inputs, lower the learning rate, or use bf16, which needs no scale",
            )
        if self._late.skipped == before:
            self._advance_scheduler()

    def _advance_scheduler(self) -> None:
        if self.scheduler is not None:
            self.optimizer._opt_called = True  # type: ignore[union-attr]  # torch warns of a scheduler that runs ahead
            self.scheduler.step()

    # -- for people who log -------------------------------------------------------------------------------------------
    def grad_norms(self) -> dict[str, torch.Tensor]:
        """The 2-norm of each gradient that is there, over all ranks: 0-dim float32 tensors by parameter name."""
        found = {}
        for name, param in self.runtime.shards.params().items():
            if param.grad is None:
                continue
            grad = param.grad
            norm = torch.linalg.vector_norm(grad.detach(), dtype=torch.float32)
            found[name] = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return found

    def _run_hooks(self, names: tuple[str, ...]) -> None:
        if self.hooks:
            params = self.runtime.shards.params()
            grads = {n: g for n in names if (g := params[n].grad) is not None}
            for hook in self.hooks:
                hook(grads)


class _Late:
    """What the device knew after the last update, read before the next one (see [Note: no waiting])."""

    def __init__(self, device: torch.device) -> None:
        self.skipped = 0
        self.scale = 0.0
        self.exhausted = False
        pinned = device.type == "cuda"
        self._held = torch.zeros(3, dtype=torch.float64, pin_memory=pinned)
        self._event = torch.cuda.Event() if pinned else None
        self._started = False

    def start(self, state: dict[str, torch.Tensor]) -> None:
        now = torch.stack([state[k].to(torch.float64) for k in ("skipped", "scale", "exhausted")])
        self._held.copy_(now, non_blocking=True)
        if self._event is not None:
            self._event.record()
        self._started = True

    def read(self) -> None:
        if not self._started:
            return
        if self._event is not None:
            self._event.synchronize()
        skipped, self.scale, exhausted = self._held.tolist()
        self.skipped, self.exhausted = int(skipped), bool(exhausted)


def _whole(program: Program, runtime: Runtime) -> UpdateExecutable:
    return compile_chunks(program, lambda part: compile_eager(part, runtime.groups))
