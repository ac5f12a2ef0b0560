"""The rounds of local steps of one compiled module: between two synchronizations each rank has weights of its own.

A parameter's round begins with its first local step and ends when ranks share what they have moved. In between its
state `SYNCHRONIZED` is where the round began, which all ranks have; its value, its master weight and what its rule
calls `local` are this rank's alone. A checkpoint has the former as the weight, and the latter in each rank's own part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from zgraph.errors import StepError
from zgraph.parameters.shards import Shards
from zgraph.update.build_update import MASTER
from zgraph.update.optimizer_rule import LOCAL_STEPS, SYNCHRONIZED
from zgraph.update.optimizer_rules import RULES
from zgraph.update.states import States

_PARAMETER = "parameter"


class LocalRounds:
    """What of one rank's weights and states is in a round."""

    def __init__(self, shards: Shards, states: States) -> None:
        self.shards = shards
        self.states = states
        # versions of the weights in a round after the last update; None: not known yet
        self._versions: dict[str, tuple[int, ...] | None] = {}

    def begin(self) -> None:
        """Begin an update. Raises `StepError` where a user has written weights that are in a round."""
        changed = [n for n, v in self._versions.items() if v is not None and self.shards.version(n) != v]
        if not changed:
            return
        written = [n for n in changed if n in self.open()]
        for name in changed:
            del self._versions[name]
        if written:
            raise StepError(
                f"{written[0]!r} was written to between two synchronizations of local steps",
                why="each rank has its own there: the next synchronization would take what was written for a step",
                hint="write weights after a step that synchronizes; or load a checkpoint, which begins the rounds anew",
            )

    def stepped(self, names: Iterable[str], *, local: bool) -> None:
        """Note that these parameters were updated, each rank's by itself (`local`) or all alike."""
        for name in names:
            if local:
                self._versions[name] = self.shards.version(name)
            else:
                self._versions.pop(name, None)

    def open(self) -> list[str]:
        """Return the parameters that are in a round. The host waits for the device."""
        members = self.states.members.items()
        local = [n for n, m in members if m.record is not None and RULES[m.record.name].local]
        counts = {n: t for n in local if (t := self.states.tensors.get(f"{n}/{LOCAL_STEPS}")) is not None}
        if not counts:
            return []
        begun = torch.stack([t.to(torch.float64) for t in counts.values()]).gt(0).tolist()
        return [n for n, is_begun in zip(counts, begun, strict=True) if is_begun]

    def synchronized(self) -> dict[str, torch.Tensor]:
        """Return the last weights that all ranks had, of each parameter that is in a round: in the form of the
        parameter, and in the dtype that it is updated in."""
        return {n: self.shards.shown(n, self.states[f"{n}/{SYNCHRONIZED}"]) for n in self.open()}

    def own(self) -> dict[str, torch.Tensor]:
        """Return what is this rank's alone, by name: no copies."""
        return {name: tensor for param in self.open() for name, tensor in self._of(param).items()}

    def restore(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Go on with what a checkpoint has of this rank's own. A parameter whose round it does not have begins a new
        one where it is."""
        self._versions = {}
        for param in self.open():
            mine = self._of(param)
            if mine.keys() <= saved.keys():
                for name, tensor in mine.items():
                    tensor.copy_(saved[name])
            else:
                for key in RULES[self.states.members[param].record.name].of_round:
                    self.states.tensors[f"{param}/{key}"].zero_()

    def adopt(self, old: LocalRounds) -> None:
        """Go on with another's rounds, of the same weights and states or of copies."""
        self._versions = {n: self.shards.version(n) for n in old._versions}

    def refuse_open(self, what: str) -> None:
        """Raise `StepError` where a parameter is in a round: `what` would take its weight for that of all ranks."""
        if names := self.open():
            raise StepError(
                f"{what} between two synchronizations of local steps",
                why=f"each rank has weights of its own there ({names[0]!r} and {len(names) - 1} others)",
                hint="do it after a step that synchronizes",
            )

    def _of(self, param: str) -> dict[str, torch.Tensor]:
        rule, states = RULES[self.states.members[param].record.name], self.states.tensors
        tensors = {f"{param}/{key}": states[f"{param}/{key}"] for key in rule.local}
        if f"{param}/{MASTER}" in states:
            tensors[f"{param}/{MASTER}"] = states[f"{param}/{MASTER}"]
        return {f"{param}/{_PARAMETER}": self.shards.local(param), **tensors}
