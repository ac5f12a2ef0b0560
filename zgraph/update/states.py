"""The tensors that an update keeps from step to step, by the names of its program's STATE ports.

"layers.0.weight/exp_avg" is a state of one parameter (this rank's rows, with padding), created when first needed;
"/step" a count of updates; "/scale" and its like half precision's loss scale; "/nonfinite" the count of steps that
were not finite.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from zgraph.errors import StepError
from zgraph.offload.run_transfers import Tier
from zgraph.parameters.layout import row_by_row
from zgraph.parameters.shards import Shards
from zgraph.update import scaler
from zgraph.update.build_update import AHEAD, EMA, MASTER, NONFINITE, UpdateOptions, state_bytes_of, states_of
from zgraph.update.optimizer import PlanOptimizer, copy_state
from zgraph.update.optimizer_rules import RULES
from zgraph.update.optimizer_state import OfParam
from zgraph.update.parameter_groups import STEP, Member
from zgraph.update.rule_interface import Rule, State

logger = logging.getLogger(__name__)

STEP_KEY = "step"  # what the optimizer calls a parameter's count of updates


class States:
    """The states of one updater. `members` say which count each parameter uses; states that `options` offload are
    stored in `home`."""

    def __init__(
        self,
        members: Sequence[Member],
        shards: Shards,
        options: UpdateOptions,
        device: torch.device,
        optimizer: PlanOptimizer | None,
        home: Tier | None,
    ) -> None:
        self.members = {m.name: m for m in members}
        self.shards = shards
        self.options = options
        self.device = device
        self.optimizer = optimizer
        self.home = home
        self._shown: dict[
            str, tuple[OfParam, dict[str, Any]]
        ] = {}  # what the optimizer shows, and the values as they were shown
        self._written: dict[
            str, tuple[torch.Tensor, int]
        ] = {}  # counts of updates, with their versions after the last update
        self.tensors: dict[str, torch.Tensor] = {STEP: torch.zeros((), dtype=torch.float64, device=device)}
        if options.loss_scale is not None:
            first = scaler.initial(options.loss_scale)
            self.tensors |= {f"/{key}": value.to(device) for key, value in first.items()}
        if options.nonfinite:
            self.tensors[f"/{NONFINITE}"] = torch.zeros((), dtype=torch.int64, device=device)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            self._make(name.rpartition("/")[0])
            tensor = self.tensors[name]
        return tensor

    def scale(self, key: str) -> torch.Tensor | None:
        """Return a tensor of the loss scale (see `zgraph.update.scaler`), or None without one."""
        return self.tensors.get(f"/{key}")

    def of_scale(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the loss scale, by the names of `zgraph.update.scaler`; none without one."""
        return {n[1:]: t for n, t in self.tensors.items() if _is_of_scale(n)}

    def nonfinite(self) -> torch.Tensor | None:
        """Return how many steps were not finite, except for overflows of a loss scale; None where the plan ignores it."""
        return self.tensors.get(f"/{NONFINITE}")

    def skipped(self) -> torch.Tensor | None:
        """Return how many steps were skipped; None where none can be."""
        scaled = self.scale("skipped")
        return self.nonfinite() if scaled is None else scaled

    def own(self) -> dict[str, torch.Tensor]:
        """Return the states of single parameters that were created so far."""
        return {n: t for n, t in self.tensors.items() if not n.startswith("/")}

    def _make(self, param: str) -> None:
        """Create a parameter's missing states, and show all of them in the optimizer."""
        local = self.shards.local(param)
        member = self.members[param]
        shown: dict[str, torch.Tensor] = {"step": self.tensors[member.count]}
        for key, state in states_of(member, self.shards.specs[param], self.options).items():
            name = f"{param}/{key}"
            if name not in self.tensors:
                storage = self._room(param, state, local)
                self.tensors[name] = storage.copy_(local) if key in (MASTER, EMA, AHEAD) else storage.fill_(state.fill)
            shown[key] = self.shards.shown(param, self.tensors[name], of_rows=state.of_rows)
        if self.optimizer is not None:
            self._shown[param] = self.optimizer.state.show(self.shards.params()[param], shown), shown

    def _show(self, param: str, key: str, tensor: torch.Tensor) -> None:
        """Show a new tensor in the optimizer, if the parameter's states are shown."""
        if param in self._shown:
            states, shown = self._shown[param]
            shown[key] = tensor
            dict.__setitem__(states, key, tensor)

    def bytes_at(self, options: UpdateOptions) -> int:
        """Return the bytes of the states that these options offload."""
        return sum(state_bytes_of(self.members[n], self.shards.specs[n], options) for n in options.homes)

    def move(self, options: UpdateOptions) -> None:
        """Store the states where these options say, also those that exist already."""
        before, self.options = self.options.homes, options
        for name, tensor in self.own().items():
            param = name.rpartition("/")[0]
            if (param in before) != (param in options.homes):
                self.tensors[name] = self._copy(name, tensor)
                key = name.rpartition("/")[2]
                state = states_of(self.members[param], self.shards.specs[param], options)[key]
                self._show(param, key, self.shards.shown(param, self.tensors[name], of_rows=state.of_rows))

    def _room(self, param: str, state: State, local: torch.Tensor) -> torch.Tensor:
        """Return a new tensor for a state, with the strides of its parameter's rows where it has their shape."""
        like = tuple(state.shape) == tuple(local.shape)
        if self.home is not None and param in self.options.homes:
            return self.home.tensor(state.shape, local.stride() if like else row_by_row(state.shape), state.dtype)
        if like:
            return torch.empty_like(local, dtype=state.dtype, device=self.device)
        return torch.empty(state.shape, dtype=state.dtype, device=self.device)

    def fill(self) -> None:
        """Create the states of every parameter that trains, before its first update."""
        for name, param in self.shards.params().items():
            if name in self.members and param.requires_grad and (self.optimizer is None or name not in self._shown):
                self._make(name)

    def clear(self, names: Iterable[str]) -> None:
        """Reset what the rules keep of these parameters to its values before the first update."""
        for name in names:
            if name not in self.members:
                continue
            for key, state in states_of(self.members[name], self.shards.specs[name], self.options).items():
                if key not in (MASTER, EMA, AHEAD) and f"{name}/{key}" in self.tensors:
                    self.tensors[f"{name}/{key}"].fill_(state.fill)

    def counts(self) -> dict[str, float]:
        """Return how many updates each parameter has had. The host waits for the device."""
        known = {name: float(self.tensors[name]) for name in {m.count for m in self.members.values()}}
        return {name: known[m.count] for name, m in self.members.items()}

    # -- what the user changes ----------------------------------------------------------------------------------------
    def read_back(self) -> dict[str, str]:
        """Take over what a user has written to the optimizer's states, or removed, since they were shown.

        Returns what was changed, in words, by the parameter's name. Tensors are copied into the update's own, which
        are shown again. A parameter whose states are gone begins anew. Raises `StepError` for what no update can go on
        from; then nothing was changed.
        """
        optimizer = self.optimizer
        if optimizer is None or not optimizer.state.changed:
            return {}
        params, counts = self.shards.params(), {}
        changes: list[tuple[str, dict[str, Any]]] = []
        for name, member in self.members.items():
            if member.record is None:
                continue
            now = optimizer.state.get(params[name]) or {}
            if name not in self._shown:
                if not now:
                    continue
                self._make(name)
                dict.__setitem__(optimizer.state, params[name], now)  # (until it is known to be right)
            changed = _changes(name, self._shown[name][1], now, RULES[member.record.name])
            if changed is not None:
                changes.append((name, changed))
        counted = self.counts() if changes else {}
        for name, changed in changes:
            mine, rule = self._shown[name][1], RULES[self.members[name].record.name]
            if not changed:
                self.clear([name])
            for key, value in changed.items():
                if value is None:
                    mine[key].zero_()
                elif key != STEP_KEY:
                    copy_state(mine[key], value)
            counts[name] = _count_after(changed, counted[name], rule)
        for name, (_, shown) in self._shown.items():
            self._shown[name] = optimizer.state.show(params[name], shown), shown
        optimizer.state.changed = False
        if counts and any(counted[n] != c for n, c in counts.items()):
            self.set_counts(counted | counts)
        return {n: f"{sorted(f)} {counts[n]}" for n, f in changes}

    def wrote_counts(self) -> None:
        """Record the versions of the counts that an update has written."""
        self._written = {n: (t, t._version) for n, t in self.tensors.items() if n.startswith(STEP)}

    def refuse_written_counts(self) -> None:
        """Raise `StepError` where someone else has written into a count of updates."""
        for name, (tensor, version) in self._written.items():
            if self.tensors.get(name) is tensor and tensor._version != version:
                raise StepError(
                    "a count of updates in the optimizer's state was written to in place",
                    where="model.zgraph.optimizer.state",
                    why="parameters that were updated equally often share one",
                    hint="assign each parameter's: optimizer.state[param]['step'] = number; then load the states, or make them anew",
                )

    def set_counts(self, counts: Mapping[str, float]) -> None:
        """Set the number of updates that each parameter has had: 0 for one that is not named."""
        numbers = sorted({counts.get(n, 0.0) for n in self.members}, reverse=True)
        names = {value: STEP if i == 0 else f"{STEP}{i}" for i, value in enumerate(numbers)}
        self.tensors = {n: t for n, t in self.tensors.items() if not n.startswith(STEP)}
        for value, name in names.items():
            self.tensors[name] = torch.full((), value, dtype=torch.float64, device=self.device)
        for name, member in self.members.items():
            count = names[counts.get(name, 0.0)]
            self.members[name] = replace(member, count=count)
            self._show(name, "step", self.tensors[count])

    def count_apart(self, names: Iterable[str]) -> None:
        """Give parameters that are not in `names`, those with a gradient this time, a count of their own, as torch
        does."""
        chosen = set(names)
        for count in sorted({m.count for m in self.members.values()}):
            sharing = [n for n, m in self.members.items() if m.count == count]
            left_out = [n for n in sharing if n not in chosen]
            if not left_out or len(left_out) == len(sharing):
                continue
            number = 1
            while (apart := f"{STEP}{number}") in self.tensors:
                number += 1
            self.tensors[apart] = self.tensors[count].clone()
            for name in left_out:
                self.members[name] = replace(self.members[name], count=apart)
                self._show(name, "step", self.tensors[apart])

    def adopt(self, old: States, *, copies: bool) -> None:
        """Take over the tensors of another `States`, or copies of them.

        States that this plan's optimizer does not keep are left out, those that it alone keeps begin anew; a warning
        says so. Counts of updates are taken over for parameters that both have.
        """
        wanted = {
            f"{name}/{key}"
            for name, m in self.members.items()
            for key in states_of(m, self.shards.specs[name], self.options)
        }
        had = old.own().keys()
        touched = {n.rpartition("/")[0] for n in had}
        _tell_of_others(had - wanted, {n for n in wanted - had if n.rpartition("/")[0] in touched})
        for name in self.members.keys() & old.members.keys():  # (without an optimizer a plan has no members)
            self.members[name] = replace(self.members[name], count=old.members[name].count)
        counts = {m.count for m in old.members.values()}
        same_scale = self.options.loss_scale == old.options.loss_scale
        for name, tensor in old.tensors.items():
            number = (_is_of_scale(name) and same_scale) or (name == f"/{NONFINITE}" and self.options.nonfinite)
            param = name.rpartition("/")[0]
            elsewhere = (param in self.options.homes) != (param in old.options.homes)
            if name in wanted or name in counts or number:
                self.tensors[name] = self._copy(name, tensor) if copies or elsewhere else tensor
        for param in touched & self.members.keys():
            self._make(param)

    def _copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a state, in the memory where such states are stored."""
        if self.home is None or name.rpartition("/")[0] not in self.options.homes:
            return tensor.to(self.device, copy=True)
        return self.home.tensor(tensor.shape, tensor.stride(), tensor.dtype).copy_(tensor)

    def averaged(self) -> list[str]:
        """Return the parameters that have a moving average."""
        return [n for n in self.members if f"{n}/{EMA}" in self.tensors]


def _tell_of_others(left_out: set[str], anew: set[str]) -> None:
    """Warn of states that begin anew, and of those that are left out, by their keys."""
    parts = [
        f"{what}: {', '.join(sorted({name.rpartition('/')[2] for name in names}))}"
        for what, names in (("begun anew", anew), ("left out", left_out))
        if names
    ]
    if parts:
        logger.warning("the plan's optimizer keeps other states than the one before; %s", "; ".join(parts))


def _changes(name: str, shown: dict[str, Any], now: Any, rule: Rule) -> dict[str, Any] | None:
    """Return what a user has changed of a parameter's states, by key (None: it begins anew).

    Returns an empty dict where all states are gone, None where nothing was changed. Raises `StepError` for a state
    that no update can go on from.
    """
    if not now:
        return {}
    changes: dict[str, Any] = {}
    for key, mine in shown.items():
        value = now.get(key)
        if value is mine:
            continue
        number = key == STEP_KEY and isinstance(value, (int, float))
        if value is None and key == rule.begins:
            changes[key] = None
        elif value is None and key == STEP_KEY and not rule.counts:
            continue
        elif number or (isinstance(value, torch.Tensor) and value.shape == mine.shape):
            changes[key] = value
        else:
            form = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise StepError(
                f"the optimizer's state {key!r} of {name!r} is "
                + ("gone" if value is None else f"{form} now, and was {list(mine.shape)}"),
                where="model.zgraph.optimizer.state",
                why="the update goes on from it",
                hint="del optimizer.state[param] lets the parameter begin anew; or put a tensor of its shape there",
            )
    return changes or None


def _count_after(changed: dict[str, Any], before: float, rule: Rule) -> float:
    """Return how many updates a parameter has had after a user's changes."""
    if STEP_KEY in changed:
        return float(changed[STEP_KEY])
    if not changed or (rule.begins in changed and changed[rule.begins] is None):
        return 0.0
    return max(before, rule.first_count(changed))


def _is_of_scale(name: str) -> bool:
    return name.startswith("/") and not name.startswith(STEP) and name != f"/{NONFINITE}"
