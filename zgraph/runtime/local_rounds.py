"""The rounds of local steps of one compiled module: between two synchronizations each rank, or each group of ranks, has
weights of its own.

A parameter's round begins with its first local step and ends when ranks share what they have moved. In between its
state `SYNCHRONIZED` is where the round began, which all ranks have; its value, its master weight and what its rule
calls `local` are this rank's alone. A checkpoint has the former as the weight, and the latter in each rank's own part.
States that are `apart` are a rank's own between rounds, too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import torch

from zgraph.errors import StepError
from zgraph.parameters.shards import Shards
from zgraph.update.build_update import DERIVED, MASTER
from zgraph.update.optimizer_rules import rule_of
from zgraph.update.rule_interface import LOCAL_STEPS, SYNCHRONIZED, Rule
from zgraph.update.states import States

logger = logging.getLogger(__name__)

_PARAMETER = "parameter"


class LocalRounds:
    """What of one rank's weights and states is in a round."""

    def __init__(self, shards: Shards, states: States) -> None:
        self.shards = shards
        self.states = states
        # versions of the weights in a round after the last update; None: not known yet
        self._versions: dict[str, tuple[int, ...] | None] = {}
        self._told = False  # whether the user knows, in this round, whose weights were asked for

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
        """Note that these parameters were updated, each rank's by itself (`local`) or all alike. Warn where the latter
        leaves a parameter in a round."""
        for name in names:
            if local:
                self._versions[name] = self.shards.version(name)
            else:
                self._versions.pop(name, None)
        self._told = self._told and local
        if not local and self._versions:
            logger.warning(
                "%r and %d others have no gradient at the last step of a round in which they were updated: each rank goes on with weights of its own "
                "of them, until a round ends at which they have one",
                next(iter(self._versions)),
                len(self._versions) - 1,
            )

    def open(self) -> list[str]:
        """Return the parameters that are in a round. The host waits for the device."""
        counts = {n: t for n in self._local() if (t := self.states.tensors.get(f"{n}/{LOCAL_STEPS}")) is not None}
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
        begun = set(self.open())
        return {
            name: tensor
            for param, rule in self._local().items()
            for name, tensor in self._of(param, rule, begun=param in begun).items()
        }

    def apart(self) -> set[str]:
        """Return the states that are this rank's own between rounds, too, as "param.key"."""
        local = {n: rule for n, rule in self._local().items() if rule.apart}
        parts = [name.rpartition("/") for name in self.states.own()]
        return {f"{n}.{key}" for n, _, key in parts if n in local and _is_local(local[n], key)}

    def restore(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Go on with what a checkpoint has of this rank's own. A parameter whose round it does not have begins a new
        one where it is."""
        begun = set(self.open())
        self._versions = {}
        for param, rule in self._local().items():
            mine = self._of(param, rule, begun=param in begun)
            if mine.keys() <= saved.keys():
                for name, tensor in mine.items():
                    tensor.copy_(saved[name])
                if param in begun:
                    self._versions[param] = None
            elif param in begun:
                for key in rule.of_round:
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

    def tell(self, what: str) -> None:
        """Warn, once in a round, that weights which someone asks for are this rank's own."""
        if not self._told and (names := self.open()):
            self._told = True
            logger.warning(
                "%s within a round of local steps has this rank's own weights, of %r and %d others: all ranks have the same after the round's "
                "last step; save_checkpoint saves those where the round began, and what each rank has of its own",
                what,
                names[0],
                len(names) - 1,
            )

    def _local(self) -> dict[str, Rule]:
        """Return the rules of the parameters that are updated in local steps."""
        members, local = self.states.members.items(), self.states.options.local_steps
        rules = {n: rule_of(m.record, local) for n, m in members if m.record is not None}
        return {n: rule for n, rule in rules.items() if rule.local is not None}

    def _of(self, param: str, rule: Rule, *, begun: bool) -> dict[str, torch.Tensor]:
        """Return what is this rank's alone of a parameter, whose round has `begun` or not."""
        if not (begun or rule.apart):
            return {}
        weights: dict[str, torch.Tensor] = {}
        states = {n: t for n, t in self.states.tensors.items() if n.rpartition("/")[0] == param}
        if begun:
            weights = {n: t for n, t in states.items() if n == f"{param}/{MASTER}"}
            weights[f"{param}/{_PARAMETER}"] = self.shards.local(param)
        return weights | {n: t for n, t in states.items() if _is_local(rule, n.rpartition("/")[2])}


def is_weight(name: str) -> bool:
    """Return whether a name in `LocalRounds.own` is that of a parameter's value, which is saved within a round alone."""
    return name.endswith(f"/{_PARAMETER}")


def _is_local(rule: Rule, key: str) -> bool:
    return rule.local is not None and key not in DERIVED and rule.local(key)
