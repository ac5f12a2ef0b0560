"""Starts the gathers that a forward begins with in the update before it, as soon as their shards are written.

Between an update and the forward a user may change a weight. The gathers in flight are then dropped and started again;
a copy of each shard that was sent also reveals changes that torch does not count (`zgraph/parameters/staleness.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from zgraph.parameters.shards import Shards
from zgraph.parameters.staleness import Staleness
from zgraph.parameters.tensor_bits import differ
from zgraph.ranks import progress
from zgraph.ranks.agreement import Agreement
from zgraph.torch_compat import autograd_state, tensor_storage

if TYPE_CHECKING:
    from zgraph.build.step_program import StepProgram
    from zgraph.codegen.executable import Executable


class FirstGathers:
    """Starts and holds the first gathers of `step`, the training program that ran last."""

    def __init__(self, shards: Shards, agreement: Agreement, device: torch.device) -> None:
        self.shards = shards
        self.agreement = agreement
        self.step: StepProgram | None = None
        self.in_flight: dict[str, torch.Tensor] = {}
        self._sent: dict[str, torch.Tensor] = {}
        self._versions: dict[str, tuple[int, ...]] = {}
        self._left: list[Executable] = []
        self._unwritten: set[str] = set()
        self._unchanged = Staleness(shards, device, "step() had sent them to the other ranks")

    # -- the update's side --------------------------------------------------------------------------------------------
    def follow(self, step: StepProgram) -> None:
        """Take this program for the one that ran last."""
        self.step = step if step.first_gathers() else None

    def order(self) -> list[str]:
        """Return the parameters that the next forward needs first, in order."""
        return [p.name for e in self.step.first_gathers() for p in e.program.inputs] if self.step is not None else []

    def begin(self, names: Sequence[str]) -> None:
        """Begin an update of these parameters: drop what is in flight, and start the gathers of other parameters."""
        self.drop()
        self._left = list(self.step.first_gathers()) if self.step is not None else []
        self._unwritten = set(names)
        self.written(())

    def written(self, names: Sequence[str]) -> None:
        """Note that these shards have their new values, and start the gathers whose shards are all written."""
        self._unwritten.difference_update(names)
        while self._left and not any(p.name in self._unwritten for p in self._left[0].program.inputs):
            executable = self._left.pop(0)
            self._start(executable)
            for port in executable.program.inputs:
                self._sent[port.name] = self.shards.local(port.name).detach().clone()

    def finish(self) -> None:
        """Note that the update is over and its writes counted; start the gathers that are left."""
        self.written(tuple(self._unwritten))
        self._versions = {n: self.shards.version(n) for n in self._sent}

    # -- the forward's side -------------------------------------------------------------------------------------------
    def changed_here(self, *, again: bool = False) -> int:
        """Return whether shards that were sent have changed on this rank since (see `Staleness.changed`)."""
        return self._unchanged.changed(self._versions, self._differ, again=again) if self.in_flight else 0

    def settle(self, worst: int) -> None:
        """Drop the gathers in flight if their shards have changed since, on any rank."""
        if self.in_flight and not self._unchanged.still(worst):
            self.drop()

    def take(self, step: StepProgram) -> dict[str, torch.Tensor]:
        """Return the first gathers of a forward, in flight; start them if the update has not. All ranks must call
        it.
        """
        if self.in_flight and (self.step is None or step not in self.step.beside):
            self.drop()
        if not self.in_flight:
            for executable in step.first_gathers():
                self._start(executable)
        in_flight = self.in_flight
        self.in_flight, self._sent, self._versions = {}, {}, {}
        self.step = step
        return in_flight

    def drop(self) -> None:
        """Wait for the gathers in flight and forget them: torch holds a transfer until someone has waited for it."""
        tensor_storage.land(self.in_flight.values())
        self.in_flight, self._sent, self._versions, self._left = {}, {}, {}, []

    def __del__(self) -> None:
        self.drop()

    def _start(self, executable: Executable) -> None:
        values = [self.shards.local(p.name) for p in executable.program.inputs]
        with progress.runs_with(self.agreement), autograd_state.unrecorded():  # (a profile may end with the step)
            outputs = executable.run(values)
        self.in_flight.update({p.name: v for p, v in zip(executable.program.outputs, outputs, strict=True)})

    def _differ(self) -> list[torch.Tensor]:
        return [differ(self.shards.local(n), sent) for n, sent in self._sent.items() if sent.numel()]
