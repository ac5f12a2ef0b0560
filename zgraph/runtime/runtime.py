"""Runs compiled programs behind the user's own calls: `model(x)`, `loss.backward()`.

[Note: who holds what] Parameters are the user's (`Shards` finds them). A step of autograd holds what the forward
saved in a list that the backward empties as it goes, so that activations die one by one. Whole weights that stages 1
and 2 keep live in `UnshardedWeights`, from the first forward of an optimizer step to its reducing backward, and less
if a shard changes; each forward's own backward holds those that it ran with. Gradients that wait to be reduced
(stages 0 and 1 inside `no_sync`) are the user's own `.grad`, as DTensors that say so: placement `Partial("avg")`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zgraph.build.build_context import BuildContext
from zgraph.build.step_program import Entry, StepProgram
from zgraph.build.update_program import resident_of
from zgraph.capture.batch import Call
from zgraph.capture.call_signature import batch_rows, brief
from zgraph.capture.capture import Trace, trace
from zgraph.capture.former_storages import former_storages
from zgraph.capture.refuse_inputs import resolved
from zgraph.capture.storages import Sharing, owned, sharing
from zgraph.capture.symbolic_capture import SymbolicSizes
from zgraph.codegen.executable import Executable
from zgraph.codegen.port_bindings import Sources
from zgraph.errors import SignatureError, UnsupportedError
from zgraph.parameters.layout import with_requires_grad
from zgraph.parameters.reused_memory import RestingMemory
from zgraph.parameters.shards import Shards, Sums
from zgraph.plan.plan import Plan
from zgraph.plan.shapes import buckets_of
from zgraph.program.program import InputRole, OutputRole, ParamSpec, Program
from zgraph.program.remark import Remark
from zgraph.ranks import heartbeat, progress
from zgraph.ranks.rng import restored
from zgraph.runtime.adapted_schedule import AdaptedSchedule
from zgraph.runtime.autograd_function import Saved, Step
from zgraph.runtime.beside_batch import BesideBatch
from zgraph.runtime.calls import Calls
from zgraph.runtime.capacity_checks import check_capacity
from zgraph.runtime.compile_once import compile_all, compile_once
from zgraph.runtime.counted_padding import other_padding, warn_of_counted
from zgraph.runtime.explain_nonfinite import NonFinite
from zgraph.runtime.hot_sizes import HotSizes
from zgraph.runtime.out_of_memory import explained
from zgraph.runtime.pad_to_buckets import Cut, Padded, PaddedCalls
from zgraph.runtime.pending_gradients import PendingGradients
from zgraph.runtime.prefetch import FirstGathers
from zgraph.runtime.rank import Rank, RankContext
from zgraph.runtime.timings import KEEP, Clock, Timings, median_step, model_flops
from zgraph.runtime.unsharded_weights import UnshardedWeights
from zgraph.runtime.updater import Updater
from zgraph.torch_compat import autograd_state
from zgraph.torch_compat.compile_lock import RARE_COLLECTIONS

logger = logging.getLogger(__name__)

# Roles of a backward's inputs that others may still hold when it ends: not parameters (`owned` sees that their storage
# has another holder), and not pending gradients, which were taken.
_STAY = frozenset(InputRole) - {InputRole.PARAMETER, InputRole.ACCUMULATOR}
_STAY_BUT_SAVED = _STAY - {InputRole.SAVED}
_USERS = (InputRole.INPUT, InputRole.BUFFER, InputRole.CONSTANT)


class Runtime(Rank):
    """The run time of one compiled module."""

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], plan: Plan, shards: Shards, context: RankContext
    ) -> None:
        super().__init__(module, plan, shards, context)
        agreement, device = self.agreement, self.device
        self.forward_function = forward
        self.entered: Entry | None = None  # the entry of the last forward
        self._told_of_packing = False  # whether it was told that hooks on saved tensors do nothing here
        self.handed: Sequence[Any] | None = None  # the flat outputs of the running call; None if nobody asks for them
        self.beside_batch = BesideBatch()
        self.resting = RestingMemory()  # of whole weights, between their uses
        buckets = buckets_of(plan)
        self.buckets = PaddedCalls(self, buckets) if buckets is not None else None
        self.calls = Calls(self, self._compile, self._execute)
        self.hot_sizes = HotSizes(self, self._make)
        self.adapted_schedule = AdaptedSchedule(self)
        self.unsharded = UnshardedWeights(shards, device)
        reduces = plan.zero > 1 or self.mesh is None or self.mesh.size() == 1
        self.waiting = PendingGradients(shards, device, reduces=reduces)
        self.accumulating = False
        self.first_gathers = FirstGathers(shards, agreement, device)
        self.clock = Clock(device, on_begin=self.memory.begin, on_end=self._ended)
        self.steps = self.forwards = 0  # steps run so far; forwards in the current one
        self.own_steps = 0  # backward passes that a user's own optimizer may have followed
        self.backwards = 0  # all backward passes
        self.samples = 0  # rows trained on, over all ranks
        self.updater = Updater(self)
        heartbeat.watch(plan.watch, self.everyone, self.process_groups())
        if agreement is self.everyone:
            agreement.foresee(self.process_groups(), on=plan.watch.by_steps)
        self.needed_votes.say_of_update(self.updater.coming)
        self.nonfinite = NonFinite(self) if plan.on_nonfinite != "ignore" else None
        self._sources = Sources(
            {
                InputRole.PARAMETER: shards.local,
                InputRole.UNSHARDED: self.unsharded.weights.__getitem__,
                InputRole.RANK_INDEX: self.places.__getitem__,
                InputRole.SCALE: lambda _: self.updater.states["/scale"],
            }
        )

    @property
    def updates(self) -> int:
        """The number of optimizer steps so far, including skipped ones."""
        return self.own_steps if self.updater.optimizer is None else self.updater.calls

    def told(self) -> list[str]:
        """Return the report's lines on this rank: what has become of its schedule."""
        return [self.adapted_schedule.told] if self.adapted_schedule.told else []

    def end_own_step(self) -> None:
        """End the step before this call, if its update was made by the user's own optimizer."""
        if self.plan.optimizer is None and self.clock.reduced:
            self.clock.end_step()

    def _ended(self) -> None:
        """Record the end of a step."""
        self.memory.end()
        self.steps, self.forwards = self.steps + 1, 0
        if self.recorder is not None:
            self.recorder.stepped()

    # -- calls ------------------------------------------------------------------------------------------------------
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        self.end_own_step()
        self.tell_place(self.forwards)
        padded, given = self.buckets.padded(args, kwargs) if self.buckets is not None else None, (args, kwargs)
        args, kwargs = padded.call if padded is not None else given
        with self.calls.lock, self._padded_by(padded):
            key, entry = self.entry(args, kwargs)
            self.hot_sizes.called(self.entries, begins=not self.forwards)
            if not self.forwards:
                self.adapted_schedule.step_begins(entry)
        self.entered = entry
        trains = entry.program().differentiated and torch.is_grad_enabled()
        self.forwards += trains
        with self.clock.timed("forward") if trains else contextlib.nullcontext(), self._padded_by(padded):
            result = self.calls.run(key, args, kwargs)
        if trains:
            self.samples += (batch_rows(*given) if entry.open or padded is not None else entry.rows) * self.data_ranks()
        if not entry.settled:
            self.settle(entry, args, kwargs)
        return result

    def compile_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compile the program for calls like this one."""
        with self.padded(args, kwargs) as call:
            self.entry(*call)

    @contextlib.contextmanager
    def padded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Yield the arguments, padded while the call runs; as they are if the plan pads nothing. All ranks must call
        it.
        """
        padded_call = self.buckets.padded(args, kwargs) if self.buckets is not None else None
        with self._padded_by(padded_call):
            yield padded_call.call if padded_call is not None else (args, kwargs)

    def _padded_by(self, padded: Padded | None) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a padded call runs; an empty one for a call that is not padded."""
        return contextlib.nullcontext() if padded is None or self.buckets is None else self.buckets.runs(padded)

    def entry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Entry]:
        """Return the key and the program for these inputs (see `Calls.entry`)."""
        return self.calls.entry(args, kwargs)

    def settle(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check whether a program's first run changed what the program depends on (see `Calls.settle`)."""
        self.calls.settle(entry, args, kwargs)

    @RARE_COLLECTIONS
    def _compile(
        self, key: str, args: tuple[Any, ...], kwargs: dict[str, Any], open_sizes: SymbolicSizes | None = None
    ) -> Entry:
        shown = brief(self.module, args, kwargs)
        name = self.calls.name_new(shown)
        specs = with_requires_grad(self.shards.specs, self.shards.params())
        traced = self._trace((args, kwargs), specs, open_sizes)
        residents = resident_of(self.module, specs, self.plan, self.sizes, self.device, self.costs, self.shares)
        context = BuildContext(
            self.plan,
            self.costs,
            residents,
            groups=self.groups,
            agree=self.votes.program,
            keeper=self.keeper,
            wire=self.wire,
        )
        entry = Entry(name, shown, traced, batch_rows(args, kwargs), context)
        compile_once(self, entry)
        if self.buckets is not None:
            entry.follows = self.buckets.follows(traced, (args, kwargs), lambda call: self._trace(call, specs))
        if entry.program().differentiated:
            self.updater.refuse_unscaled()
        self.prepare(entry.program())
        return entry

    def _trace(
        self,
        call: Call,
        specs: dict[str, ParamSpec],
        open_sizes: SymbolicSizes | None = None,
    ) -> Trace:
        precision = self.plan.resolved_precision()
        return trace(self.module, self.forward_function, *call, specs, self.sizes, self.device, precision, open_sizes)

    def captured_at(self, call: Call) -> tuple[Program, Sequence[Any]]:
        """Return the program that is captured for another call, and this call's flat inputs."""
        traced = self._trace(call, with_requires_grad(self.shards.specs, self.shards.params()))
        return traced.joint(traced.pattern, {}, "whole"), traced.flat.flatten(self.module, *call)

    def prepare(self, step: StepProgram) -> None:
        """Compile what a plain step needs, before anything runs. (Ranks compare each program before it is compiled.)
        Raises what `check_capacity` raises.
        """
        self._make(step)
        self.hot_sizes.made(step)

    def prepare_step(self, step: StepProgram) -> None:
        """Compile what the rest of a training step needs after `prepare`, before anything runs: the programs of the
        other micro-batches, and the update.
        """
        if not step.differentiated:
            return
        for _, variant, _ in step.runs():
            step.forward(variant.gathered_before)
            if self.waiting.reduces:
                step.backward()
            elif self.updater.reduces:
                step.backward(variant.reduce, variant.accumulated)
            else:
                step.backward(reduce=False)
        self.updater.prepare(step)

    def _make(self, step: StepProgram) -> None:
        compile_all(step, lambda: check_capacity(self, step))

    def _execute(self, entry: Entry, flat: tuple[Any, ...]) -> tuple[Any, ...]:
        outputs = self._outputs(entry, flat)
        if self.handed is not None:
            self.handed = outputs
        return outputs

    def _outputs(self, entry: Entry, flat: tuple[Any, ...]) -> tuple[Any, ...]:
        step = self.hot_sizes.chosen(entry.program(), flat)
        entry.trace.refuse_moved(flat, former_storages(self.module))
        if step.mutated:
            entry.trace.refuse_overlap(step.mutated, flat, whole=not step.apart)
            step.apart = True
        if self.buckets is not None:
            self.buckets.refuse_written(step.mutated, flat)
        self.votes.batch(entry, step, flat)
        self.votes.random(step)
        _refuse_offsets(entry, flat)
        probe = self._probe(entry, step, flat)
        outputs = self._run(entry, step, flat)
        if probe is not None:
            warn_of_counted(outputs, *probe)
        return outputs

    def _probe(self, entry: Entry, step: StepProgram, flat: tuple[Any, ...]) -> tuple[list[Any], list[str]] | None:
        """Return (the flat outputs, the names of the inputs) of a padded call with other padding, if it has to be checked; all ranks
        run it together.
        """
        padded = self.buckets.to_probe() if self.buckets is not None else None
        if padded is None:
            return None
        changed = other_padding(entry.program().captured, flat, padded)
        given = [changed[at][1] if at in changed else x for at, x in enumerate(flat)]
        whole = bool(self.unsharded.weights)
        with restored(None, self.device), torch.no_grad():
            outputs, _ = self.run_forward(entry, step, given, mutate=False)
        if not whole:
            self.unsharded.drop()
        cuts = self.cuts(entry, outputs)
        return [cuts[at].of(x) if at in cuts else x for at, x in enumerate(outputs)], [
            name for name, _ in changed.values()
        ]

    def _run(self, entry: Entry, step: StepProgram, flat: tuple[Any, ...]) -> tuple[Any, ...]:
        if not (entry.trace.differentiable and torch.is_grad_enabled()):
            outputs, _ = self.run_forward(entry, step, flat)
            cuts = self.cuts(entry, outputs)
            return tuple(cuts[at].of(value) if at in cuts else value for at, value in enumerate(outputs))
        self._refuse_packing()
        params = self.shards.params()
        names = [n for n in entry.trace.parameters if params[n].requires_grad]
        tensors = [params[n] for n in names]
        # (An input with no gradient here would keep the graph that computed it: the graph of the call before, and so of
        # all calls.)
        others = [i for i in entry.trace.others if isinstance(flat[i], torch.Tensor) and flat[i].requires_grad]
        loose = [i for i in others if i in step.reached or i in entry.trace.reached]
        return tuple(Step.apply(self, entry, step, flat, names, loose, *tensors, *(flat[i] for i in loose)))

    def _refuse_packing(self) -> None:
        """Raise `UnsupportedError` in a context of saved-tensor hooks of the user's own; warn once in one of torch's, which change no
        number.
        """
        pack = autograd_state.packs_saved_tensors()
        if pack is None:
            return
        what = "what a program keeps for its backward does not go through hooks on saved tensors"
        way_out = 'plan.offload (activations = "cpu") keeps it on the host, plan.recompute computes it again'
        if not str(getattr(pack, "__module__", "")).startswith("torch."):
            raise UnsupportedError(
                "a compiled model is called inside of saved_tensors_hooks", why=what, hint=f"leave them out; {way_out}"
            )
        if not self._told_of_packing:
            self._told_of_packing = True
            logger.warning("%s (save_on_cpu, checkpoint): these save no memory here; %s", what, way_out)

    def cuts(self, entry: Entry, outputs: Sequence[Any]) -> dict[int, Cut]:
        """Return how the flat outputs of the running call are cut, by their position. If the model returns no loss of
        its own, outputs are made contiguous: the code that computes the loss may need that.
        """
        return (
            self.buckets.cuts(entry.follows, outputs, copied=entry.trace.loss is None)
            if self.buckets is not None
            else {}
        )

    # -- forward ----------------------------------------------------------------------------------------------------
    def run_forward(
        self, entry: Entry, step: StepProgram, flat: Sequence[Any], *, mutate: bool = True
    ) -> tuple[list[Any], Saved]:
        """Run one forward; return (the flat outputs, the saved values). Buffers are updated unless `mutate` is
        False.
        """
        gathered_before = step.keeps and bool(self.unsharded.weights) and self.unsharded.are_there(step.unsharded)
        executable = step.forward(gathered_before)
        bindings = executable.bindings
        in_flight = self.first_gathers.take(step) if step.first_gathers() and not gathered_before else {}
        self.clock.ran(executable.program)
        sizes = step.sizes_of_call(flat) if step.captured.sizes else {}
        inputs = self._of_call(flat, sizes).and_for_call({InputRole.IN_FLIGHT: in_flight.pop})
        with progress.runs_with(self.agreement), explained(self, executable, step):
            given = executable.run(bindings.values(inputs))
        known = step.sharing.get(gathered_before)
        if known is None:
            known = step.sharing[gathered_before] = self._sharing(entry, executable, given, flat)
        outputs = list(entry.constants)
        saved = Saved(known, sizes)
        handed_out = {id(given[at]) for at, _ in bindings.outputs(OutputRole.OUTPUT)}
        with torch.no_grad():
            values = [v.clone() if at in known.copied else v for at, v in enumerate(given)]
            for at, port in bindings.outputs(OutputRole.SAVED):
                value = values[at]
                # (an output itself would hold autograd's node of this call, which holds what is saved)
                saved.append(value.detach() if id(value) in handed_out else value)
                if port.name in executable.flying:
                    saved.in_flight.append(value)
            for at, port in bindings.outputs(OutputRole.UNSHARDED):
                self.unsharded.keep(port.name, values[at])
            for at, port in bindings.outputs(OutputRole.OUTPUT):
                assert port.index is not None
                outputs[port.index] = known.handed(port.index, values[at])
            for at, port in bindings.outputs(OutputRole.MUTATION) if mutate else ():
                flat[port.index].copy_(values[at])  # type: ignore[index]
        return outputs, saved

    def _of_call(self, flat: Sequence[Any], sizes: Mapping[str, int]) -> Sources:
        """Return where a program's inputs come from in a call with these flat inputs, and these sizes by name."""
        users = lambda index: resolved(flat[index])  # noqa: E731
        of_call: dict[InputRole, Callable[[Any], Any]] = dict.fromkeys(_USERS, users)
        return self._sources.and_for_call({**of_call, InputRole.SIZE: sizes.__getitem__})

    def _sharing(self, entry: Entry, executable: Executable, values: Sequence[Any], flat: Sequence[Any]) -> Sharing:
        """Return which outputs of a forward share memory with its inputs, parameters and kept weights."""
        program = executable.program
        own = {p.name: self.shards.local(p.name) for p in program.inputs if p.role is InputRole.PARAMETER}
        unsharded = [v for p, v in zip(program.outputs, values, strict=True) if p.role is OutputRole.UNSHARDED]
        of_user = [None if p.role is InputRole.PARAMETER else v for p, v in zip(entry.trace.inputs, flat, strict=True)]
        return sharing(
            program, values, of_user, own, [*self.unsharded.weights.values(), *unsharded], entry.trace.storages
        )

    def changed_here(self, *, again: bool = False) -> int:
        """Return what `Rank.changed_here` does; 3 if it is too late for the gathers that an update started."""
        sent = self.first_gathers.changed_here(again=again)
        return max(self.unsharded.changed_here(again=again), 3 if sent == 2 else sent)

    def settle_changes(self, worst: int) -> None:
        if worst != 3:
            self.unsharded.settle(worst)
        if worst != 2:
            self.first_gathers.settle(min(worst, 2))

    def weights_changed(self, names: Sequence[str]) -> None:
        """Drop whole weights, and count the update program's writes to these parameters' shards."""
        self.unsharded.drop()
        self.shards.count_update(names)

    # -- backward ---------------------------------------------------------------------------------------------------
    def run_backward(
        self,
        step: StepProgram,
        saved: Saved,
        flat: Sequence[Any],
        tangents: dict[int, torch.Tensor],
        unsharded: dict[str, torch.Tensor],
        *,
        adds: Callable[[], frozenset[str]],
        clear: bool,
    ) -> dict[tuple[InputRole | None, str], torch.Tensor]:
        """Run one backward; return its gradients by the role and name of the input that each is for. `unsharded` are
        the whole weights that the forward ran with, `adds` returns the parameters whose `.grad` the backward adds to.
        """
        adds = functools.cache(adds)
        reduction = self.waiting.reduction(adds, accumulating=self.accumulating, never=not self.updater.reduces)
        executable = step.backward(reduction.now, bool(reduction.added))
        bindings, left = executable.bindings, iter(saved)
        residuals = self.updater.residuals
        inputs = self._of_call(flat, saved.sizes).and_for_call(
            {
                InputRole.SAVED: lambda _: next(left),  # (saved in the order in which the backward takes them)
                InputRole.TANGENT: tangents.__getitem__,
                InputRole.ACCUMULATOR: lambda n: (self.waiting.take if n in reduction.added else self.waiting.zeros)(n),
                InputRole.UNSHARDED: unsharded.__getitem__,
                InputRole.RESIDUAL: residuals.of(executable.program),
                InputRole.DRAWS: lambda _: residuals.next_draw(),
            }
        )
        values = bindings.values(inputs)
        stays = {id(values[at]) for at in bindings.positions(_STAY_BUT_SAVED if clear else _STAY)}
        if clear:
            saved.clear()
        self.clock.ran(executable.program)
        bare = autograd_state.without_bases()
        with bare, progress.runs_with(self.agreement), explained(self, executable, step):
            results = executable.run(values)
        self.settle_gradients()
        self.backwards += 1
        gradients = self._handed_out(executable, results, stays, adds(), partial=not reduction.now)
        if reduction.rest:
            self.reduce_leftovers()
        if not self.accumulating:
            self.unsharded.drop()  # an update follows
            self.own_steps += 1
            self.clock.reduced = True
        return gradients

    def _handed_out(
        self,
        executable: Executable,
        results: Sequence[torch.Tensor],
        stays: set[int],
        adds: frozenset[str],
        *,
        partial: bool,
    ) -> dict[tuple[InputRole | None, str], torch.Tensor]:
        """Return the gradients of a backward, each in memory of its own, parameters' in the form of the parameter.
        Those of parameters in `adds` are added to `.grad` where it can take them, and left out. (An offloaded gradient
        is in the host's memory already, in a storage of its own.)
        """
        sums = Sums()
        here = [at for at in range(len(results)) if at not in executable.away]
        came = {i for i, at in enumerate(here) if at in executable.transferred}
        own = iter(owned([results[at] for at in here], stays, came))
        gradients: dict[tuple[InputRole | None, str], torch.Tensor] = {}
        for at, port in enumerate(executable.program.outputs):
            value = results[at] if at in executable.away else next(own)
            left: torch.Tensor | None = value
            if port.of is InputRole.PARAMETER and port.name in adds:
                left = self.shards.accumulate(port.name, value, sums, partial=partial)
            elif port.of is InputRole.PARAMETER:
                left = self.shards.gradient(port.name, value, partial=partial)
            if left is not None:
                gradients[port.of, port.name] = left
        sums.add()
        return gradients

    def settle_gradients(self) -> None:
        """Wait until offloaded gradients have arrived, so that the host can read and add to them."""
        if self.plan.offload.gradients or self.plan.offload.tier("parameters") is not None:
            self.tiers.settle()

    def reduce_leftovers(self) -> None:
        """Reduce the pending gradients of parameters that the last program did not reach."""
        self.waiting.reduce()

    def remarks(self) -> list[Remark]:
        """Return what passes could not do for the programs made so far, the costliest first."""
        remarks = [r for e in self.entries.values() for step in e.programs() for r in step.history().program.remarks]
        return sorted(remarks, key=lambda r: -r.seconds)

    def timings(self, tokens: int | None, peak_flops: float | None) -> Timings:
        """Return the timings of the last steps (see `zgraph.api.handle.Handle.timings`)."""
        mine = median_step(self.clock)
        self.clock.wants_sample = True
        ranks = self.everyone.gather("timings", mine)
        step = max((r["step"] for r in ranks if "step" in r), default=0.0)
        flops = self._flops_of_forward() * mine.get("forwards", 1.0)
        return Timings(
            tuple(ranks),
            min(len(self.clock.steps), KEEP),
            tokens * self.data_ranks() / step if tokens is not None and step else None,
            flops / step / peak_flops if peak_flops is not None and step else None,
        )

    def _flops_of_forward(self) -> float:
        """Return the FLOP of one forward and its backward, by the training program that was compiled last."""
        trained = [e.program().captured for e in self.entries.values() if e.program().differentiated]
        return model_flops(trained[-1]) if trained else 0.0

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate only in the backward passes inside (see `zgraph.api.handle.Handle.no_sync`)."""
        before, self.accumulating = self.accumulating, True
        try:
            yield
        finally:
            self.accumulating = before


def _refuse_offsets(entry: Entry, flat: Sequence[Any]) -> None:
    """Raise `SignatureError` for a tensor that begins within its storage, if the model also reads other parts of that
    storage.
    """
    for at in entry.trace.from_start - entry.trace.former.keys():
        if flat[at].storage_offset():
            raise SignatureError(
                f"{entry.trace.inputs[at].name!r} begins within its storage, and the model's as_strided counts from the storage's start",
                hint="clone it",
            )
