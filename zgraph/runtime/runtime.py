"""Runs compiled programs behind the user's own calls: `model(x)`, `loss.backward()`.

[Note: who holds what] Parameters are the user's (`Shards` finds them). A step of autograd holds what the forward saved
in a list that the backward empties as it goes, so that activations die one by one. Whole weights that stages 1 and 2
keep live in `UnshardedWeights`, from the first forward of an optimizer step to its reducing backward, and less if a shard changes;
each forward's own backward holds those that it ran with. Gradients that wait to be reduced (stages 0 and 1 inside `no_sync`)
are the user's own `.grad`, as DTensors that say so: placement `Partial("avg")`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zgraph.build.context import BuildContext
from zgraph.build.step_program import Entry, StepProgram
from zgraph.build.update_program import resident_of
from zgraph.capture.cache_key import batch_rows, brief, shared, signature
from zgraph.capture.capture import trace
from zgraph.capture.former_memory import former_memory
from zgraph.capture.inputs import refuse_inputs, resolved
from zgraph.capture.storages import Sharing, owned, sharing
from zgraph.codegen.executable import Executable
from zgraph.errors import CaptureError, ModelError, OffloadError, SignatureError
from zgraph.parameters.sharding import Shards, still_unset, with_requires_grad
from zgraph.passes.analysis.costs import size_of
from zgraph.plan.plan import Plan
from zgraph.program import transfers_to_host
from zgraph.program.node import info
from zgraph.program.program import InputRole, OutputRole, Port
from zgraph.program.remark import Remark
from zgraph.ranks import heartbeat, progress
from zgraph.runtime.autograd import Saved, Step
from zgraph.runtime.explain_nonfinite import NonFinite
from zgraph.runtime.out_of_memory import explained
from zgraph.runtime.prefetch import FirstGathers
from zgraph.runtime.rank import Rank, RankContext
from zgraph.runtime.timings import KEEP, Clock, Timings, median_step, model_flops
from zgraph.runtime.unsharded import UnshardedWeights
from zgraph.runtime.updater import Updater
from zgraph.torch_compat import autograd_state, tensor_hooks
from zgraph.torch_compat.guards import Failing

logger = logging.getLogger(__name__)


_STATE = "; python state "  # in the keys of programs: before the number of the state that one is for


class Runtime(Rank):
    """The run time of one compiled module."""

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], plan: Plan, shards: Shards, context: RankContext
    ) -> None:
        super().__init__(module, plan, shards, context)
        agreement, device = self.agreement, self.device
        self.forward_function = forward
        self.forwards_replaced = 0  # how often it has become another one
        self.entered: Entry | None = None  # that of the last forward
        self._calls: dict[str, Callable[..., Any]] = {}
        self._one_at_a_time = threading.RLock()  # (threads that call for the first time at once compile once)
        self.unsharded = UnshardedWeights(shards, agreement, device)
        self.accumulating = False
        self.first_gathers = FirstGathers(shards, agreement, device)
        self.clock = Clock(device, on_begin=self.memory.begin, on_end=self._ended)
        self.steps = self.forwards = 0  # steps here; forwards of the one that is under way
        self.own_steps = 0  # backward passes that a user's own optimizer may have followed
        self.samples = 0  # rows of batches that were trained on, over all ranks
        self.updater = Updater(self)
        heartbeat.watch(plan.watch, self.everyone, self.process_groups())
        self.nonfinite = NonFinite(self) if plan.on_nonfinite != "ignore" else None

    @property
    def updates(self) -> int:
        """Optimizer steps so far, those that were skipped included."""
        return self.own_steps if self.updater.optimizer is None else self.updater.calls

    def end_own_step(self) -> None:
        """End the step before this call, if its update was the user's own."""
        if self.plan.optimizer is None and self.clock.reduced:
            self.clock.end_step()

    def _ended(self) -> None:
        """A step is over."""
        self.memory.end()
        self.steps, self.forwards = self.steps + 1, 0
        if self.recorder is not None:
            self.recorder.stepped()

    # -- calls ------------------------------------------------------------------------------------------------------
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        self.end_own_step()
        self.tell_place(self.forwards)
        with self._one_at_a_time:
            key, entry = self.entry(args, kwargs)
        self.entered = entry
        trains = entry.program().differentiated and torch.is_grad_enabled()
        self.forwards += trains
        with self.clock.timed("forward") if trains else contextlib.nullcontext():
            result = self._calls[key](self.module, *args, **kwargs)
        if trains:
            self.samples += entry.rows * self.data_ranks()
        if not entry.settled:
            self.settle(entry, args, kwargs)
        return result

    def entry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Entry]:
        """The compiled entry for inputs of this signature; a new signature is captured and compiled, on all ranks alike."""
        refuse_inputs(self.forward_function, args, kwargs)
        self.shards.refresh()
        self.shards.fetch()
        signed = self._signed(args, kwargs)
        key, known = signed, 0  # the same inputs may have programs for several states of the Python attributes
        while key in self.entries and (stale := self.entries[key].trace.flat.stale(self.module, args, kwargs)):
            logger.info("%s is not for this call: no longer %s", self.entries[key].name, stale.what)
            known += 1
            key = f"{signed}{_STATE}{known}"
        new = key not in self.entries
        self.everyone.vote("the inputs of a call", f"{shared(key)}; {'new' if new else 'known'}")
        if new:
            self.relax()
            self.refuse_unset()
            self._check_devices(args, kwargs)
            made = self._compile(key, args, kwargs)
            _refuse_unstable(made.trace.flat.stale(self.module, args, kwargs))
            before = f"{signed}{_STATE}{known - 1}" if known > 1 else signed
            made.unsettled_before = known > 0 and self.entries[before].unsettled
            self.entries[key] = made
            self._calls[key] = made.trace.flat.bind(lambda *flat: self._execute(made, flat))
            if self.recorder is not None:
                self.recorder.compiled()
        return key, self.entries[key]

    def _signed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        signed = signature(self.module, args, kwargs)
        return f"{signed}; forward {self.forwards_replaced}" if self.forwards_replaced else signed

    def settle(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """After a program's first run: has the forward itself changed the Python state that it depends on?

        Once is how a model finishes its construction, and it may go back and forth between states that have a program. Twice in a row to a
        state that has none, it would be compiled again at every call.
        """
        entry.settled = True
        stale = entry.trace.flat.stale(self.module, args, kwargs)
        entry.unsettled = stale is not None and stale.lasts
        if stale is None or not entry.unsettled or not entry.unsettled_before:
            return
        signed = self._signed(args, kwargs)
        states = [e for k, e in self.entries.items() if k.split(_STATE)[0] == signed]
        if all(e.trace.flat.stale(self.module, args, kwargs) for e in states):
            raise CaptureError(
                "the model's forward changes Python state that it depends on, at every call",
                where=stale.where,
                why=f"no longer true after the call: {stale.what}",
                hint="keep such state in a buffer (register_buffer), or change it outside of forward",
            )

    def _compile(self, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        shown = brief(self.module, args, kwargs)
        name = self._name_new(shown)
        specs = with_requires_grad(self.shards.specs, self.shards.params())
        traced = trace(
            self.module,
            self.forward_function,
            args,
            kwargs,
            specs,
            self.sizes,
            self.device,
            self.plan.resolved_precision(),
        )
        residents = resident_of(self.module, specs, self.plan, self.sizes, self.device, self.costs, self.shares)
        context = BuildContext(self.plan, self.costs, residents, groups=self.groups, agree=self.votes.program)
        entry = Entry(name, shown, traced, batch_rows(args, kwargs), context)
        if entry.program().differentiated:
            self.updater.refuse_unscaled()
        self.prepare(entry.program())
        return entry

    def _name_new(self, shown: str) -> str:
        """The name of the program for a new signature, which is told to the user."""
        name = f"{'train' if torch.is_grad_enabled() and self.module.training else 'eval'}{len(self.entries)}"
        log = logger.warning if self.entries and self.everyone.first() else logger.info
        log("new input signature: compiling program %s for %s", name, shown)
        return name

    def prepare(self, step: StepProgram) -> None:
        """Compile what a plain step needs, before anything runs. (Ranks compare each program before it is compiled.) Raises what `fit` does."""
        self.fit(step)
        step.first_gathers()
        step.forward()
        if step.parts().backward is not None:
            step.backward()

    def fit(self, step: StepProgram) -> None:
        """Raise `PlanError` if a program that a step takes does not fit into the plan's memory budget, `OffloadError` if the disk has no
        room for the activations that go there."""
        if self.plan.memory_budget is not None and step.differentiated:
            for variant in step.variants():
                step.history(variant)  # (what does not fit is refused now, not in the middle of a step)
        nodes = step.history().program.nodes
        away = [n for n in nodes if n.target is transfers_to_host.OFFLOAD and info(n).param is None]
        self._require("activations", sum(map(size_of, away)))
        if step.differentiated and step.states is not None and len(self.shares) > 1:
            self.agreement.vote("the share of the optimizer's states that is offloaded", str(step.states))
            options = self.updater.options_with(step.states)
            self._require("optimizer", self.updater.states.bytes_at(options))
            self.updater.offload(options)
            self.shares = step.context.residents.shares = (step.states,)

    def _require(self, what: str, size: int) -> None:
        """Raise `OffloadError` on every rank if the disk of one has no room for so many bytes of this kind."""
        if self.tiers.preflight is not None:

            def refused(rank: int, said: str) -> OffloadError:
                return OffloadError(f"rank {rank} has no room for {what}", where=self.plan.offload.folder(), why=said)

            self.agreement.together("the disk", lambda: self.tiers.require(what, size), refused)

    def refuse_unset(self) -> None:
        """Raise `ModelError` if the model has values yet to be loaded."""
        if not self.shards.pending:
            return
        missing = list(still_unset(self.shards))
        if missing:
            raise ModelError(
                f"{len(missing)} tensors of the model have no values yet: {', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}",
                why="the model was built on the meta device and its modules have no initialisation for them",
                hint="load a checkpoint first, or give their modules a reset_parameters method",
            )
        self.shards.pending.clear()

    def _check_devices(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for leaf in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.device.type not in (self.device.type, "cpu"):
                raise SignatureError(
                    f"an input is on {leaf.device}, the model on {self.device}",
                    hint=f"move it: x.to({str(self.device)!r})",
                )

    def _execute(self, entry: Entry, flat: tuple[Any, ...]) -> tuple[Any, ...]:
        step = entry.program()
        entry.trace.refuse_moved(flat, former_memory(self.module))
        if step.mutated:
            entry.trace.refuse_overlap(step.mutated, flat, whole=not step.apart)
            step.apart = True
        self.votes.batch(entry, step, flat)
        self.votes.random(step)
        _refuse_offsets(entry, flat)
        if not (step.differentiated and torch.is_grad_enabled()):
            outputs, _ = self.run_forward(entry, step, flat)
            return tuple(outputs)
        params = self.shards.params()
        names = [p.name for p in entry.trace.inputs if p.role is InputRole.PARAMETER and params[p.name].requires_grad]
        tensors = [params[n] for n in names]
        loose = [
            i
            for i, port in enumerate(entry.trace.inputs)
            if port.role is not InputRole.PARAMETER and isinstance(flat[i], torch.Tensor) and flat[i].requires_grad
        ]
        return tuple(Step.apply(self, entry, flat, names, loose, *tensors, *(flat[i] for i in loose)))

    # -- forward ----------------------------------------------------------------------------------------------------
    def run_forward(
        self, entry: Entry, step: StepProgram, flat: Sequence[Any], *, mutate: bool = True
    ) -> tuple[list[Any], Saved]:
        """(the flat outputs, the saved values) of one forward; buffers are updated unless `mutate` is False."""
        gathered_before = step.keeps and bool(self.unsharded.weights) and self.unsharded.are_there(step.unsharded)
        executable = step.forward(gathered_before)
        in_flight = self.first_gathers.take(step) if step.first_gathers() and not gathered_before else {}
        self.clock.ran(executable.program)
        given = [
            in_flight.pop(p.name) if p.role is InputRole.IN_FLIGHT else self._input(p, flat)
            for p in executable.program.inputs
        ]
        with progress.runs_with(self.agreement), explained(self, executable, step):
            values = executable.run(given)
        known = step.sharing.get(gathered_before)
        if known is None:
            known = step.sharing[gathered_before] = self._sharing(entry, executable, values, flat)
        outputs = list(entry.constants)
        saved = Saved(known)
        given_out = {
            id(v) for p, v in zip(executable.program.outputs, values, strict=True) if p.role is OutputRole.OUTPUT
        }
        with torch.no_grad():
            values = [v.clone() if at in known.copied else v for at, v in enumerate(values)]
            for port, value in zip(executable.program.outputs, values, strict=True):
                if port.role is OutputRole.SAVED:
                    # (an output itself would hold autograd's node of this call, which holds what is saved)
                    saved.append(value.detach() if id(value) in given_out else value)
                    if port.name in executable.flying:
                        saved.in_flight.append(value)
                elif port.role is OutputRole.UNSHARDED:
                    self.unsharded.keep(port.name, value)
                elif port.role is OutputRole.OUTPUT and port.index is not None:
                    outputs[port.index] = known.handed(port.index, value)
            for port, value in zip(executable.program.outputs, values, strict=True):
                if mutate and port.role is OutputRole.MUTATION and port.index is not None:
                    flat[port.index].copy_(value)
        return outputs, saved

    def _sharing(self, entry: Entry, executable: Executable, values: Sequence[Any], flat: Sequence[Any]) -> Sharing:
        """With whom what a forward has given shares memory."""
        program = executable.program
        own = {p.name: self.shards.local(p.name) for p in program.inputs if p.role is InputRole.PARAMETER}
        kept = [v for p, v in zip(program.outputs, values, strict=True) if p.role is OutputRole.UNSHARDED]
        of_user = [None if p.role is InputRole.PARAMETER else v for p, v in zip(entry.trace.inputs, flat, strict=True)]
        return sharing(program, values, of_user, own, [*self.unsharded.weights.values(), *kept], entry.trace.storages)

    def _input(self, port: Port, flat: Sequence[Any]) -> Any:
        if port.role is InputRole.PARAMETER:
            return self.shards.local(port.name)
        if port.role is InputRole.UNSHARDED:
            return self.unsharded.weights[port.name]
        if port.role is InputRole.RANK_INDEX:
            return self.places[port.name]
        assert port.index is not None
        return resolved(flat[port.index])

    def weights_changed(self, names: Sequence[str]) -> None:
        """The update program has written these parameters' shards."""
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
        """The gradients of one backward, by role and name of what they are of; `unsharded` are the whole weights that its forward ran with, and
        `adds` says to which parameters' `.grad` the backward adds."""
        reduction = self._reduction(adds)
        executable = step.backward(reduction.now, bool(reduction.added))
        at = {p.name: i for i, p in enumerate(p for p in executable.program.inputs if p.role is InputRole.SAVED)}
        values: list[Any] = []
        stays: set[int] = set()  # ids of what is still somebody's when the program is over
        for port in executable.program.inputs:
            if port.role is InputRole.SAVED:
                values.append(saved[at[port.name]])
            elif port.role is InputRole.TANGENT:
                assert port.index is not None
                values.append(tangents[port.index])
            elif port.role is InputRole.ACCUMULATOR:
                values.append(self._take_partial(port.name, port.name in reduction.added))
            elif port.role is InputRole.UNSHARDED:
                values.append(unsharded[port.name])
            elif port.role is InputRole.SCALE:
                values.append(self.updater.states["/scale"])
            else:
                values.append(self._input(port, flat))
            if port.role not in _LET_GO and not (clear and port.role is InputRole.SAVED):
                stays.add(id(values[-1]))
        if clear:
            saved.clear()
        self.clock.ran(executable.program)
        bare = autograd_state.without_bases()
        with bare, progress.runs_with(self.agreement), explained(self, executable, step):
            results = executable.run(values)
        self.settle_gradients()
        gradients = self._handed_out(executable, results, stays, partial=not reduction.now)
        if reduction.rest:
            self.reduce_leftovers()
        if not self.accumulating:
            self.unsharded.drop()  # an update follows
            self.own_steps += 1
            self.clock.reduced = True
        return gradients

    def _handed_out(
        self, executable: Executable, results: Sequence[torch.Tensor], stays: set[int], *, partial: bool
    ) -> dict[tuple[InputRole | None, str], torch.Tensor]:
        """The gradients that a backward gave, each in memory of its own, those of parameters in the form of these. (One that leaves the
        device is where it was taken, by itself.)"""
        here = [at for at in range(len(results)) if at not in executable.away]
        came = {i for i, at in enumerate(here) if at in executable.transferred}
        own = iter(owned([results[at] for at in here], stays, came))
        gradients: dict[tuple[InputRole | None, str], torch.Tensor] = {}
        for at, port in enumerate(executable.program.outputs):
            value = results[at] if at in executable.away else next(own)
            if port.of is InputRole.PARAMETER:
                value = self.shards.gradient(port.name, value, partial=partial)
            gradients[port.of, port.name] = value
        return gradients

    def settle_gradients(self) -> None:
        """Wait until gradients that leave the device are there for the host to read, and to be added to."""
        if self.plan.offload.gradients or self.plan.offload.tier("parameters") is not None:
            self.tiers.settle()

    def _reduction(self, adds: Callable[[], frozenset[str]]) -> _Reduction:
        """How the gradients of the backward that runs are reduced. Stages 2 and 3 reduce each time: only shards are kept. So do parameters
        with hooks: each is called with the gradient of one backward, as autograd has it, and not with the sum of several."""
        if self.plan.zero > 1 or self.mesh is None or self.mesh.size() == 1:
            return _Reduction()
        params = self.shards.params()
        if any(map(tensor_hooks.has_hooks, params.values())):
            self.reduce_leftovers()
            return _Reduction()
        grads = {n: p.grad for n, p in params.items() if p.grad is not None}
        waiting = {n for n, g in grads.items() if _is_partial(g)}
        if self.accumulating and len(waiting) == len(grads):
            return _Reduction(now=False)
        if not waiting:
            return _Reduction()
        into = adds()
        return _Reduction(added=into & waiting, rest=bool(into))

    def _take_partial(self, name: str, added: bool) -> torch.Tensor:
        """The gradient of a parameter that waits, which is its `.grad` no longer; zeros if it is not to be `added` to this backward's."""
        param = self.shards.params()[name]
        spec = self.shards.specs[name]
        if not added:
            return torch.zeros(spec.shape, dtype=spec.grad_dtype, device=self.device)
        held, param.grad = param.grad, None
        return held._local_tensor  # type: ignore[union-attr,no-any-return]

    def reduce_leftovers(self) -> None:
        """Gradients that wait, of parameters that this program did not reach, are reduced as well."""
        for name, param in self.shards.params().items():
            if param.grad is not None and _is_partial(param.grad):
                param.grad = param.grad.redistribute(placements=self.shards.placements(self.shards.specs[name]))  # type: ignore[attr-defined]

    def remarks(self) -> list[Remark]:
        """What passes would have liked to do for the programs made so far and could not, the costliest first."""
        found = [r for e in self.entries.values() for step in e.programs() for r in step.history().program.remarks]
        return sorted(found, key=lambda r: -r.seconds)

    def timings(self, tokens: int | None, peak_flops: float | None) -> Timings:
        """See `zgraph.api.handle.Handle.timings`."""
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
        """FLOP that the model takes for one forward and its backward, by the program that was made last for training."""
        trained = [e.program().captured for e in self.entries.values() if e.program().differentiated]
        return model_flops(trained[-1]) if trained else 0.0

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate (see `zgraph.api.handle.Handle.no_sync`)."""
        before, self.accumulating = self.accumulating, True
        try:
            yield
        finally:
            self.accumulating = before


@dataclass(frozen=True)
class _Reduction:
    """How the gradients of one backward are reduced: `now`, or not yet; together with those of the `added` parameters that waited; and then
    the `rest` of those that wait."""

    now: bool = True
    added: frozenset[str] = frozenset()
    rest: bool = False


# Inputs of a backward that nothing holds when it is over, or that are held by a parameter as well.
_LET_GO = (InputRole.PARAMETER, InputRole.ACCUMULATOR)


def _refuse_offsets(entry: Entry, flat: Sequence[Any]) -> None:
    """Raise `SignatureError` for a tensor that begins within a storage of which the model looks at other parts."""
    for at in entry.trace.from_start - entry.trace.former.keys():
        if flat[at].storage_offset():
            raise SignatureError(
                f"{entry.trace.inputs[at].name!r} begins within its storage, and the model's as_strided counts from the storage's start",
                hint="clone it",
            )


def _refuse_unstable(stale: Failing | None) -> None:
    """Raise `CaptureError` if what a forward has just been captured with is not so."""
    if stale is not None:
        raise CaptureError(
            "the model's forward reads Python state that is another at every read",
            where=stale.where,
            why=f"not true straight after the capture: {stale.what}",
            hint="let what it reads (a property, a function's result) be the same object, or an equal value, while nothing has changed",
        )


def _is_partial(grad: torch.Tensor) -> bool:
    return isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements)
