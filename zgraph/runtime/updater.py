"""Runs the update program behind `model.step()`: fills in its inputs, and zeroes the gradients."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from zgraph.build.update_program import update_options
from zgraph.codegen.port_bindings import Sources
from zgraph.errors import PlanError, StepError
from zgraph.plan.optimizers import OneBitOptimizer, UpdateKind
from zgraph.program.program import InputRole, OutputRole
from zgraph.ranks import progress
from zgraph.ranks.foreseen_actions import Coming
from zgraph.runtime.delayed_updates import DelayedUpdates
from zgraph.runtime.ema_weights import EmaWeights
from zgraph.runtime.failed_updates import FailedUpdates
from zgraph.runtime.learning_rates import LearningRates
from zgraph.runtime.local_rounds import LocalRounds
from zgraph.runtime.out_of_memory import explained
from zgraph.runtime.rank import Rank
from zgraph.runtime.step_outcomes import StepOutcomes
from zgraph.runtime.update_programs import CompiledUpdate, UpdatePrograms
from zgraph.runtime.update_scalars import UpdateScalars
from zgraph.update.build_update import UpdateOptions, scalar_names
from zgraph.update.error_feedback import ErrorFeedback
from zgraph.update.hyperparameters import Hyperparameters
from zgraph.update.optimizer import PlanOptimizer
from zgraph.update.parameter_groups import members_of
from zgraph.update.states import States

if TYPE_CHECKING:
    from zgraph.build.step_program import StepProgram
    from zgraph.update.resume import Known

logger = logging.getLogger(__name__)


_GRADIENT = frozenset({InputRole.GRADIENT})


class Updater:
    """The optimizer's side of one compiled module. `optimizer` is None if the plan has none."""

    def __init__(self, runtime: Rank) -> None:
        self.runtime = runtime
        self.held = owned = runtime.held
        plan = runtime.plan
        self.scaling = plan.loss_scale()
        specs = runtime.shards.specs
        everywhere = members_of(runtime.module, specs, plan.optimizer) if plan.optimizer is not None else []
        members = [m for m in everywhere if owned is None or m.name in owned.own]
        self.options = update_options(plan, members, specs, held=owned)  # (until `offload` changes them)
        self.optimizer: PlanOptimizer | None = None
        self.rates: LearningRates | None = None
        runtime.shards.average_over(plan.gradient_dims)
        if plan.optimizer is not None:
            runtime.shards.keep_wide_gradients()
            own = None if owned is None else owned.own
            self.optimizer = PlanOptimizer(everywhere, runtime.shards.params(), self, own)
            self.rates = LearningRates(plan, self.optimizer)
        wanted = [w for w in scalar_names(everywhere, self.options) if w[0] >= 0]
        self.numbers = UpdateScalars(runtime, self.optimizer, wanted)
        home = runtime.tiers.of("optimizer")
        self.states = States(members, runtime.shards, self.options, runtime.device, self.optimizer, home)
        self.residuals = ErrorFeedback(runtime.device)
        self.rounds = LocalRounds(runtime.shards, self.states)
        self.grad_norm: torch.Tensor | None = None
        self.hooks: list[Callable[[dict[str, torch.Tensor]], None]] = []
        self.calls = 0
        self.averages = EmaWeights(runtime, self.states)
        self.consistency = FailedUpdates(runtime.shards)
        self.outcomes = StepOutcomes(runtime, self.states, self.scaling, self.rates)
        self._delayed = DelayedUpdates(runtime.shards, self.states, runtime.device)
        self.programs = UpdatePrograms(runtime, self.states)
        self._sources = Sources(
            {
                InputRole.STATE: self.states.__getitem__,
                InputRole.PARAMETER: runtime.shards.local,
                InputRole.RANK_INDEX: runtime.places.__getitem__,
            }
        )

    def adopt(self, old: Updater, *, copies: bool) -> None:
        """Continue from another updater of the same parameters: its states (or copies of them), counts, numbers and
        loss scale.
        """
        if len(old.runtime.shares) == 1 < len(self.runtime.shares):
            self.offload(self.options_with(old.runtime.shares[0]))  # (until the first program decides)
        if old.options.late() == self.options.late():
            old.wait()
        else:
            old.finish()
        self.states.adopt(old.states, copies=copies)
        self.residuals.adopt(old.residuals, copies=copies)
        sends, sent = self.runtime.plan.optimizer, old.runtime.plan.optimizer
        if isinstance(sent, OneBitOptimizer) and type(sends) is not type(sent):
            self.residuals.clear()  # (what was not sent is of another quantity)
        self.rounds.adopt(old.rounds)
        self._delayed.adopt(old._delayed)
        self.consistency.adopt(old.consistency)
        self.calls, self.hooks = old.calls, list(old.hooks)
        self.outcomes.adopt(old.outcomes)
        same = self.runtime.plan.optimizer == old.runtime.plan.optimizer
        if not copies and old.optimizer is not None:
            if same and self.optimizer is not None:
                self.optimizer.follow(old.optimizer)
            else:
                old.optimizer.retire()
        elif same and self.optimizer is not None and old.optimizer is not None:
            for mine, theirs in zip(self.optimizer.param_groups, old.optimizer.param_groups, strict=True):
                mine.update({k: v for k, v in theirs.items() if k not in ("params", "names")})
        if self.rates is not None and old.rates is not None:
            self.rates.adopt(old.rates)

    def options_with(self, share: float) -> UpdateOptions:
        """Return the options of updates with this share of the states offloaded."""
        members = list(self.states.members.values())
        return update_options(self.runtime.plan, members, self.runtime.shards.specs, share, self.held)

    def offload(self, options: UpdateOptions) -> None:
        """Store the states where these options say from now on."""
        self.finish()
        self.states.move(options)
        self.options = options
        self.programs.clear()

    @property
    def kind(self) -> UpdateKind:
        """What ranks share for the next update."""
        return self.runtime.plan.update_kind(self.calls + 1)

    @property
    def reduces(self) -> bool:
        """Whether the next update takes reduced gradients."""
        return self.kind.reduced

    def make_states(self) -> None:
        """Make the states that the first update would make; take over what the user has changed in the others."""
        self.runtime.shards.refresh()
        self._read_back()
        self.states.fill()

    def _read_back(self) -> dict[str, str]:
        """Take over what the user has changed in the optimizer; return the changes, in words, by parameter name."""
        if self.optimizer is None:
            return {}
        self.optimizer.look_up(self.runtime.shards.params())
        if self.optimizer.state.changed:
            self.wait()
            self.rounds.refuse_open("states of the optimizer were changed")
        changes = self.states.read_back()
        if changes:
            self.programs.forget_last()
        return changes

    def _changes(self) -> dict[str, str]:
        """Return what `_read_back` returns. Raises `StepError` if a user has written to counts of updates."""
        self.states.refuse_written_counts()
        return self._read_back()

    def wait(self) -> None:
        """Wait for a late update to end. Raises what it raised."""
        try:
            self._delayed.wait()
        except Exception:
            self.consistency.lose()
            raise

    def finish(self) -> None:
        """Bring the weights to the state after all updates. Raises `StepError` after an update that failed half way."""
        self.wait()
        self.consistency.refuse()
        names = self._delayed.publish()
        if names:
            self.runtime.weights_changed(names)
        self._delayed.published()

    def resume(self, counts: dict[torch.Tensor, float], done: int, fresh: Sequence[torch.Tensor]) -> None:
        """Continue from an optimizer's state dict: `counts` are the updates that each parameter has had, `done` is the
        schedule's position. The states of `fresh` parameters are cleared.
        """
        params = self.runtime.shards.params()
        named, anew = {n: counts[p] for n, p in params.items() if p in counts}, {id(p) for p in fresh}
        self.states.clear(n for n, p in params.items() if id(p) in anew)
        if not done and any(counts.values()) and self.runtime.plan.lr_schedule is not None:
            logger.warning("an optimizer's state dict has no count of updates: the schedule begins anew")
        self._go_on(named, done, done + self.outcomes.skipped())
        if self.scaling is not None:
            logger.warning("an optimizer's state dict holds no loss scale: it goes on where it is")
        if self.residuals.tensors:
            logger.warning(
                "an optimizer's state dict holds nothing of what was not sent of gradients and momenta: it goes on where it is"
            )

    def restore(self, known: Known, steps: int, counts: dict[str, float], whole: bool) -> None:
        """Continue from a checkpoint whose weights and states were loaded: the run has taken `steps` steps, `counts`
        are the updates that each parameter has had. Not `whole`: from its weights alone, as a new beginning.
        """
        self.consistency.restore()
        self.outcomes.restore(known, whole=whole)
        done = steps - known.skipped if whole else 0
        self._go_on(counts, done, done + self.outcomes.skipped())
        if whole:
            self.numbers.restore(known)
        elif self.rates is not None:
            self.rates.reset()

    def weights_loaded(self) -> None:
        """Go on from other weights, with the states and counts that there are."""
        self._delayed.loaded()
        self.programs.forget_last()

    def refuse_unusable(self) -> None:
        """Raise `StepError` if the weights are not those of a step: after an update that failed half way, or if they
        are averages. Waits for a late update.
        """
        self.wait()
        self.consistency.refuse()
        self.averages.refuse_checkpoint()

    def spoil(self) -> None:
        """Note that weights and states are of different steps: no step is taken until a checkpoint is loaded."""
        self.consistency.lose()

    def _go_on(self, counts: dict[str, float], done: int, calls: int) -> None:
        self.consistency.loaded()
        self._delayed.loaded()
        self.states.set_counts(counts)
        self.programs.forget_last()
        self.calls = calls
        if self.rates is not None:
            self.rates.restart(done)

    # -- a step -------------------------------------------------------------------------------------------------------
    def step(self) -> torch.Tensor | None:
        """Run one update with the gradients, and clear them. Return their norm before clipping, if asked for."""
        if self.optimizer is None:
            raise StepError(
                "the plan has no optimizer",
                where="optimizer",
                hint="give the plan one (zgraph.AdamW(lr=…)), or call your own optimizer's step",
            )
        return self.optimizer.step()  # type: ignore[no-any-return]  # (with its hooks)

    def update(self) -> torch.Tensor | None:
        """Run one update: the body of the optimizer's `step`."""
        runtime = self.runtime
        self.averages.refuse_update()
        self.finish()
        coming = self.coming()
        names = self.with_gradients()
        self.outcomes.settle(self.calls)
        if self.rates is not None:
            self.rates.set(self.calls - self.outcomes.skipped())
        self.numbers.agree(names, self._changes, coming)
        self.rounds.begin()
        self._turn_to(self.kind)
        if self.reduces:
            runtime.reduce_leftovers()
        self._run_hooks(names)
        late = self.options.late()
        timely = [n for n in names if n not in late]
        counted = self.states.nonfinite()
        before = counted.clone() if counted is not None else None
        with runtime.clock.timed("update"):
            try:
                runtime.first_gathers.begin(timely)
                norm = self._run(names)  # (if it refuses a changed field, gradients stay for the next step)
                for name in names:
                    runtime.shards.params()[name].grad = None
                self._refuse_infinite("this step has changed neither weights nor states; its gradients are gone")
            except Exception:
                runtime.first_gathers.drop()
                raise
            runtime.weights_changed(timely)
            self.rounds.stepped(names, local=self.options.kind.local)
            runtime.first_gathers.finish()
        self.calls += 1
        if runtime.nonfinite is not None and counted is not None and before is not None:
            runtime.nonfinite.stepped(self.calls, counted.ne(before))
        if self.calls <= (runtime.plan.offload.delayed_after or 0):
            self.finish()
        self.outcomes.note()
        runtime.clock.end_step()
        if runtime.nonfinite is not None and runtime.nonfinite.explains and runtime.device.type == "cpu":
            self.outcomes.settle(self.calls)
        return norm

    def _turn_to(self, kind: UpdateKind) -> None:
        """Let the next update be of this kind."""
        if kind is not self.options.kind:
            self.options = replace(self.options, kind=kind)
            self.programs.forget_last()
        record = self.runtime.plan.optimizer
        if isinstance(record, OneBitOptimizer) and record.begins_anew(self.calls + 1):
            self.residuals.clear()

    def coming(self) -> Coming:
        """Return what this rank tells in votes about the next update."""
        return self.numbers.coming(self.calls - self.outcomes.skipped())

    def zeroed(self) -> None:
        """Note that the gradients were thrown away."""
        if self.runtime.nonfinite is not None:
            self.runtime.nonfinite.forget()

    def give_up(self) -> None:
        """Clear the gradients of a step that has failed: they are not part of the next one. (Without an optimizer in
        the plan they are the user's.)
        """
        self.numbers.factor = 1.0
        self.runtime.needed_votes.give_up()
        if self.optimizer is not None:
            for param in self.runtime.shards.params().values():
                param.grad = None
            self.zeroed()

    def settle(self) -> None:
        """Read the outcome of the last step. Raises what the next step would, if it was not finite."""
        self.outcomes.settle(self.calls)

    def refuse_unscaled(self) -> None:
        """Raise `PlanError` for half precision's loss scale without an optimizer: nothing would skip the steps that
        overflow.
        """
        if self.scaling is not None and self.optimizer is None:
            raise PlanError(
                "training in fp16 needs an optimizer in the plan",
                where="optimizer",
                why="a step whose gradients overflow is skipped by the update program, on all ranks alike",
                hint="optimizer=zgraph.AdamW(lr=…), or precision='bf16'",
            )

    def clip_only(self) -> torch.Tensor | None:
        """Clip (and scale) the gradients in place, for the user's own optimizer."""
        if not self._changes_gradients:
            return None
        names = self.with_gradients()
        self.runtime.agree_on_update(names, Hyperparameters())
        self.runtime.reduce_leftovers()
        norm = self._run(names)
        self._refuse_infinite("the gradients are as they were: zero them before the next step")
        return norm

    @property
    def _changes_gradients(self) -> bool:
        """Whether gradients are changed for the user's own optimizer."""
        options = self.options
        ties = self.held is not None and self.held.ties  # (of any rank: all agree on what they do together)
        return options.clip_norm is not None or options.clip_value is not None or options.factor or bool(ties)

    def prepare(self, step: StepProgram) -> None:
        """Compile the update that follows a backward of this program, before anything runs."""
        ports = step.captured.outputs
        reached = {p.name for p in ports if p.role is OutputRole.GRADIENT and p.of is InputRole.PARAMETER}
        names = tuple(n for n in self.runtime.shards.params() if n in reached)
        if names and (self.optimizer is not None or self._changes_gradients):
            self._turn_to(self.kind)
            self.runtime.first_gathers.follow(step)
            self.programs.of(names, self.options)

    def with_gradients(self) -> tuple[str, ...]:
        """Return the parameters that have gradients, in order. Raises `StepError` if there is none."""
        runtime = self.runtime
        runtime.shards.refresh()
        names = tuple(n for n, p in runtime.shards.params().items() if p.grad is not None)
        if not names and (self.held is None or not runtime.clock.reduced):  # (a stage may train nothing)
            raise StepError(
                "step() was called before backward(): no parameter has a gradient",
                why="each step() takes the gradients of the backward passes since the last one",
                hint="call loss.backward() first, or train_step(…), which does it all",
            )
        return names

    def _run(self, names: tuple[str, ...]) -> torch.Tensor | None:
        update = self.programs.of(names, self.options)
        program = update.history.program
        self.runtime.clock.ran(program)
        with self.runtime.tiers.reused():
            results, clipped = self._results(update)
        self.runtime.tiers.settle()
        if not self.options.late():
            self.states.wrote_counts()
        for name, value in clipped:
            self.runtime.shards.write_gradient(name, value)
        self.grad_norm = None
        for port, value in zip(program.outputs, results, strict=True):
            if port.role is OutputRole.OUTPUT and port.name == "grad_norm":
                self.grad_norm = value
        return self.grad_norm

    def _refuse_infinite(self, left: str) -> None:
        """Raise `StepError` if the plan asks for a finite norm and the last one is not; `left` says what the step has
        changed.
        """
        clip, norm = self.runtime.plan.grad_clip, self.grad_norm
        if clip is not None and clip.error_if_nonfinite and norm is not None and not norm.isfinite():
            raise StepError(
                f"the norm of the gradients is {float(norm)}",
                where="grad_clip.error_if_nonfinite",
                hint=f"look for the loss that became infinite; {left}",
            )

    def _results(self, update: CompiledUpdate) -> tuple[list[Any], list[tuple[str, torch.Tensor]]]:
        """Run the program; return its results, and the gradients that it wrote to, by parameter name."""
        shards, program = self.runtime.shards, update.history.program
        inputs = self._sources.and_for_call(
            {
                InputRole.GRADIENT: lambda name: shards.local_gradient(name, program.params[name].grad_home),
                InputRole.SCALARS: lambda _: self.numbers.vector(update.numbers, self.options),
                InputRole.RESIDUAL: self.residuals.of(program),
            }
        )
        values = update.bindings.values(inputs)
        gradients = update.bindings.positions(_GRADIENT)
        clipped = [(name, values[at]) for at in gradients if (name := program.inputs[at].name) in update.clipped]
        try:
            with progress.runs_with(self.runtime.agreement), explained(self.runtime, program):
                results, rest = update.executable.run(values, self.runtime.first_gathers.written)
            if self.options.late():
                self._delayed.start(lambda: self._run_late(update, rest))
            return results, clipped
        except BaseException:
            self.consistency.lose()
            raise

    def _run_late(self, update: CompiledUpdate, rest: Callable[[], None]) -> None:
        with explained(self.runtime, update.history.program), self.runtime.tiers.reused():
            rest()

    @contextlib.contextmanager
    def unclipped(self) -> Iterator[None]:
        """Let updates inside neither measure the gradients' norm nor clip by it. All ranks must do so."""
        clip = self.options.clip_norm
        self._clip_at(None)
        try:
            yield
        finally:
            self._clip_at(clip)

    def _clip_at(self, norm: float | None) -> None:
        self.options = replace(self.options, clip_norm=norm)
        self.programs.forget_last()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the averages in place of the weights, and the weights back at the end."""
        if self.options.ema is None:
            raise StepError("the plan keeps no average of the weights", where="ema", hint="ema=0.999 in the plan")
        self.finish()
        with self.averages.shown():
            yield

    # -- for people who log -------------------------------------------------------------------------------------------
    def grad_norms(self) -> dict[str, torch.Tensor]:
        """Return the 2-norm of each gradient over all ranks: 0-dim float32 tensors by parameter name."""
        norms = {}
        for name, param in self.runtime.shards.params().items():
            if param.grad is None:
                continue
            grad = self.runtime.whole_gradient(name, param.grad)
            norm = torch.linalg.vector_norm(grad.detach(), dtype=torch.float32)
            norms[name] = (norm.full_tensor() if isinstance(norm, DTensor) else norm) * self._factor()
        return norms

    def _factor(self) -> float:
        """Return what the update program will multiply gradients by, so that whoever looks at them before sees their
        true size.
        """
        return float(self.numbers.factor) if self.options.factor else 1.0

    def _run_hooks(self, names: tuple[str, ...]) -> None:
        if self.hooks:
            params = self.runtime.shards.params()
            factor = self._factor()
            grads = {n: g if factor == 1.0 else g * factor for n in names if (g := params[n].grad) is not None}
            for hook in self.hooks:
                hook(grads)
            if self.numbers.have_changed():
                raise StepError(
                    "a hook of on_gradients has changed the optimizer's numbers",
                    why="ranks have compared them already: others may have other ones",
                    hint="change them before step(), on all ranks; register_step_pre_hook of model.zgraph.optimizer runs before",
                )
