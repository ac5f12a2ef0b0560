"""Runs the programs of one stage for one step: its micro-batches' values from forward to backward, and its sums of
gradients.

[Note: gathers and reductions] A stage that ZeRO shards gathers its weights as its plan says: at stage 3 for each
use, at 1 and 2 once a step, in the first forward, which hides them behind its own work. At stages 2 and 3 each
backward reduces; at 0 and 1 the last one of the step does, with the sum of all.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zgraph.build.step_program import StepProgram
from zgraph.capture.storages import owned
from zgraph.codegen.executable import Executable
from zgraph.codegen.port_bindings import Sources
from zgraph.plan.pipeline_schedules.actions import Action, Kind
from zgraph.program.program import InputRole, OutputRole
from zgraph.ranks import progress
from zgraph.runtime.out_of_memory import explained
from zgraph.runtime.rank import Rank
from zgraph.stages.stage_tasks import StageTask
from zgraph.torch_compat import autograd_state

_USERS = (InputRole.INPUT, InputRole.BUFFER, InputRole.CONSTANT)
# Inputs that others still hold when a program ends.
_STAY = frozenset({*_USERS, InputRole.TANGENT, InputRole.UNSHARDED})


@dataclass
class _Batch:
    """The values of one micro-batch on this stage, between its actions."""

    flat: Sequence[Any]  # the inputs of the model's graph
    received: dict[str, torch.Tensor] = field(default_factory=dict)  # by name: what other stages sent
    saved: dict[str, torch.Tensor] = field(default_factory=dict)  # by name: saved values for the backward


class Worker:
    """One stage in one step."""

    def __init__(self, runtime: Rank, step: StepProgram, duty: StageTask) -> None:
        self.runtime = runtime
        self.step = step
        self.duty = duty
        self.gradients: dict[str, torch.Tensor] = {}
        self._parameter = functools.cache(runtime.shards.local)
        self._read_after: dict[Kind, set[str]] = {}
        self._kept: dict[str, torch.Tensor] = {}
        self._in_flight: dict[str, torch.Tensor] = {}
        self._batches: dict[int, _Batch] = {}
        self._sources = Sources(  # (no source refers to this worker, so its tensors are freed with it)
            {
                InputRole.PARAMETER: self._parameter,
                InputRole.UNSHARDED: self._kept.__getitem__,
                InputRole.IN_FLIGHT: self._in_flight.pop,
                InputRole.ACCUMULATOR: self.gradients.__getitem__,
                InputRole.SCALE: lambda _: runtime.updater.states["/scale"],
                InputRole.RANK_INDEX: lambda dim: runtime.places[dim],
            }
        )

    def begin(self) -> None:
        """Start the gathers that the next forward begins with, unless they are in flight or done: they need not wait
        for what the stage receives.
        """
        if self._kept or self._in_flight:
            return
        for executable in self.step.first_gathers():
            values = [self._parameter(port.name) for port in executable.program.inputs]
            with autograd_state.unrecorded():  # (a profile may end with the step)
                for port, value in self._run(executable, values):
                    self._in_flight[port.name] = value

    def forward(
        self, micro_batch: int, flat: Sequence[Any], received: dict[str, torch.Tensor]
    ) -> tuple[dict[int, Any], dict[str, torch.Tensor]]:
        """Run a forward; return (this stage's outputs, by position; what it sends, by name). `flat` are the inputs of
        the model's graph for this micro-batch. The `received` values are released as the program reads them: the dict
        loses what no backward reads.
        """
        self.begin()
        self.runtime.votes.random(self.step)
        executable = self.step.forward(bool(self._kept))
        batch = _Batch(flat, received)
        values = executable.bindings.values(self._of_call(batch, {}, {}))
        if self.step.differentiated and self.duty.last is not None:
            self._batches[micro_batch] = batch
            self._let_go(batch, Kind.F)
        else:
            received.clear()
        outputs: dict[int, Any] = {}
        sent: dict[str, torch.Tensor] = {}
        for port, value in self._run(executable, values):
            if port.role is OutputRole.SAVED:
                batch.saved[port.name] = value
            elif port.role is OutputRole.UNSHARDED:
                self._kept[port.name] = value
            elif port.role is OutputRole.SENT:
                sent[port.name] = value
            elif port.role is OutputRole.OUTPUT and port.index is not None:
                outputs[port.index] = value
            elif port.role is OutputRole.MUTATION and port.index is not None:
                with torch.no_grad():
                    flat[port.index].copy_(value)
        return outputs, sent

    def backward(
        self, action: Action, tangents: Mapping[int, torch.Tensor], returned: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Run a backward, or a part of one; return what it sends to earlier stages, by name. The `returned` values are
        released as in `forward`.
        """
        if not self.step.differentiated:  # (all parameters in this stage and before it are frozen)
            return {}
        reduce, accumulated = self.duty.reduction(action, self.runtime.once, bool(self.gradients))
        batch = self._batches[action.micro_batch]
        executable = self._backward(action.kind, reduce, accumulated)
        if action.kind is not Kind.I and self.gradients and not accumulated:
            executable = self.step.summing_backward(reduce, apart=action.kind is Kind.W)
        sent_values: dict[str, torch.Tensor] = {}
        if action.kind is Kind.I:
            batch.received |= returned
        if executable is not None:
            values = executable.bindings.values(self._of_call(batch, tangents, returned))
            stays = {id(values[at]) for at in executable.bindings.positions(_STAY)}
            if accumulated:
                self.gradients.clear()
        returned.clear()
        if action.kind is Kind.I:
            self._let_go(batch, Kind.I)
        else:
            del self._batches[action.micro_batch]
            batch.saved.clear()
            batch.received.clear()
        if executable is not None:
            results = list(self._run(executable, values))
            self.runtime.settle_gradients()
            for port, value in results:
                if port.role is OutputRole.RETURNED:
                    sent_values[port.name] = value
                elif port.role is OutputRole.SAVED:
                    batch.saved[port.name] = value
            gradients = {
                port.name: (value, at in executable.transferred)
                for at, (port, value) in enumerate(results)
                if port.role is OutputRole.GRADIENT
            }
            stays |= {id(value) for port, value in results if port.role is not OutputRole.GRADIENT}
            self._keep(gradients, stays)
        return sent_values

    def _let_go(self, batch: _Batch, kind: Kind) -> None:
        """Release the values of a micro-batch that no program reads after an action of this kind."""
        if kind not in self._read_after:
            left = {Kind.W} if kind is Kind.I else self.duty.kinds - {Kind.F}
            reduce = not self.runtime.once  # (the programs of the last micro-batch read the same values)
            later = [e for k in sorted(left) if (e := self._backward(k, reduce, False)) is not None]
            roles = (InputRole.SAVED, InputRole.RECEIVED, InputRole.RETURNED)
            self._read_after[kind] = {p.name for e in later for p in e.program.inputs if p.role in roles}
        for values in (batch.saved, batch.received):
            for name in values.keys() - self._read_after[kind]:
                del values[name]

    def _backward(self, kind: Kind, reduce: bool, accumulated: bool) -> Executable | None:
        if kind is Kind.B:
            return self.step.backward(reduce, accumulated) if self.step.differentiated else None
        inputs, weights = self.step.backward_apart(reduce, accumulated)
        return inputs if kind is Kind.I else weights

    def _keep(self, gradients: dict[str, tuple[torch.Tensor, bool]], others: set[int]) -> None:
        """Add a program's gradients to the sums; each comes with whether a collective returned it. The first of each
        becomes the sum, copied unless it owns its memory: it must not share memory with what is being sent, or with the
        `others`.
        """
        first = [name for name in gradients if name not in self.gradients]
        for name in gradients.keys() - set(first):  # (the program has not added it)
            self.gradients[name].add_(gradients[name][0])
        came = {at for at, name in enumerate(first) if gradients[name][1]}
        self.gradients |= dict(zip(first, owned([gradients[name][0] for name in first], others, came), strict=True))

    def _of_call(
        self, batch: _Batch, tangents: Mapping[int, torch.Tensor], returned: Mapping[str, torch.Tensor]
    ) -> Sources:
        """Return where a program's inputs come from in an action of this micro-batch."""
        sizes = self.step.sizes_of_call(batch.flat) if self.step.captured.sizes else {}
        return self._sources.and_for_call(
            {
                InputRole.SIZE: sizes.__getitem__,
                InputRole.SAVED: batch.saved.__getitem__,
                InputRole.RECEIVED: batch.received.__getitem__,
                InputRole.RETURNED: lambda name: returned[name] if name in returned else batch.received[name],
                InputRole.TANGENT: tangents.__getitem__,
                **dict.fromkeys(_USERS, batch.flat.__getitem__),
            }
        )

    def _run(self, executable: Executable, values: list[Any]) -> Any:
        runtime = self.runtime
        runtime.clock.ran(executable.program)
        bare = autograd_state.without_bases()
        with bare, progress.runs_with(runtime.agreement), explained(runtime, executable, self.step):
            results = executable.run(values)
        return zip(executable.program.outputs, results, strict=True)
