"""A plan's optimizer as a `torch.optim.Optimizer`: what schedulers, checkpoints and loggers of torch's kind hold.

Its groups hold the numbers that the next update uses; its state shows the update program's own tensors, as DTensors
without padding. `step()` is the model's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from zgraph.errors import ModelError, PlanError
from zgraph.update.build import AHEAD
from zgraph.update.groups import Member
from zgraph.update.rules import RULES


class Updates(Protocol):
    """What stands behind the optimizer."""

    def step(self) -> Any: ...

    def zeroed(self) -> None: ...

    def make_states(self) -> None: ...

    def wait(self) -> None: ...

    def resume(self, counts: dict[torch.Tensor, float]) -> None: ...


class _MadeWhenAsked(defaultdict[torch.Tensor, Any]):
    """An optimizer's state, which is never empty to who asks: torch.distributed.checkpoint would else make it by a step."""

    def __init__(self, updater: Updates | None) -> None:
        super().__init__(dict)
        self._updater = updater

    def __bool__(self) -> bool:
        if self._updater is not None:
            self._updater.make_states()
        return len(self) > 0

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _copy(mine: torch.Tensor, value: torch.Tensor) -> None:
    """Write a saved state, whole or cut in any way, into one that is cut like its parameter."""
    with torch.no_grad():
        if isinstance(mine, DTensor):
            if not isinstance(value, DTensor):
                value = distribute_tensor(value.to(mine.device), mine.device_mesh, mine.placements)
            mine.copy_(value.redistribute(mine.device_mesh, mine.placements))
        else:
            mine.copy_(value.full_tensor() if isinstance(value, DTensor) else value)


class PlanOptimizer(torch.optim.Optimizer):
    """The optimizer of a compiled model: `model.zgraph.optimizer`.

    `param_groups` has one group for each of the plan's that has parameters: "params", "names" and the fields of its
    record ("lr", "betas", …). In a pipeline every rank has the groups of the whole model, with all their names (`members`), and the
    parameters of them that are its `own`. A number that the program takes (rates, betas, decay, …) may be changed at any time; nothing is
    compiled again. Other fields can't (`maximize`, say), nor can a weight decay or momentum that was zero in the plan become
    another number, since the program has no such operation: `PlanError` by the next step. A plan's `lr_schedule` sets what it
    schedules before each step.
    `state_dict()` and `load_state_dict()` are torch's, so torch.distributed.checkpoint works; half precision's loss scale
    is not in them.
    """

    def __init__(
        self,
        members: Sequence[Member],
        params: dict[str, nn.Parameter],
        updater: Updates | None,
        own: Collection[str] | None = None,
    ) -> None:
        self._behind = updater
        self._records = {m.group: m.record for m in members}
        self._fixed: dict[int, dict[str, Any]] = {}
        groups = []
        for number, record in self._records.items():
            names = [m.name for m in members if m.group == number]
            values = {k: v for k, v in record.model_dump().items() if k not in ("groups", "decay", "companion")}
            held = [params[n] for n in names if own is None or n in own]
            groups.append({"params": held, "names": names, **values})
            inputs = {path.partition(".")[0] for path in RULES[record.name].scalars}
            self._fixed[number] = {
                k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k not in inputs
            }
        first = groups[0] if groups else {}
        super().__init__(groups, {k: v for k, v in first.items() if k not in ("params", "names")})
        self.state = _MadeWhenAsked(updater)

    def _updater(self) -> Updates:
        assert self._behind is not None
        return self._behind

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update; the same as `model.step()`."""
        if closure is not None:
            raise PlanError("the plan's optimizer takes no closure", hint="run forward and backward before step()")
        return self._updater().step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Throw the gradients away, as torch's optimizers do."""
        super().zero_grad(set_to_none)
        self._updater().zeroed()

    def state_dict(self) -> dict[str, Any]:
        """Every state of every parameter that trains, as torch's optimizers have it; those not made yet are made."""
        self._updater().wait()
        self._updater().make_states()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over states, counts of updates and the groups' numbers; a schedule goes on from the count.

        Tensors may be DTensors of any placement or whole ones. Load the weights before: where updates run late, here or where it was
        saved, they go on from each other. Raises `ModelError` for other groups, parameters, states
        or shapes; then nothing was changed.
        """
        self._updater().wait()
        self._updater().make_states()
        pairs = list(self._pairs(state_dict))
        for param, saved in pairs:
            mine = self.state[param]
            for key in (saved.keys() | mine.keys()) - {AHEAD}:
                shapes = [tuple(s[key].shape) if key in s else None for s in (saved, mine) if key != "step"]
                if len(set(shapes)) > 1:
                    raise ModelError(
                        f"the optimizer's saved state {key!r} has shape {shapes[0]}, this plan's {shapes[1]}",
                        why="it was saved by another optimizer, or of another model",
                        hint="load it with the plan that it was saved with",
                    )
        counts: dict[torch.Tensor, float] = {}
        for param, saved in pairs:
            counts[param] = float(saved["step"]) if "step" in saved else 0.0
            mine = self.state[param]
            for key, value in saved.items():
                if key in mine and key != "step":
                    _copy(mine[key], value)
            if AHEAD in mine and AHEAD not in saved:
                _copy(mine[AHEAD], param)
            if AHEAD in saved and AHEAD not in mine:  # (here updates are in time: so is the weight)
                _copy(param, saved[AHEAD])
        for group, other in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({k: v for k, v in other.items() if k not in ("params", "names")})
        self._updater().resume(counts)

    def _pairs(self, state_dict: dict[str, Any]) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        saved_groups = state_dict["param_groups"]
        sizes = [[len(g["params"]) for g in groups] for groups in (saved_groups, self.param_groups)]
        if sizes[0] != sizes[1]:
            raise ModelError(
                f"the saved optimizer has groups of {sizes[0]} parameters, this one of {sizes[1]}",
                hint="load it with the plan and the model that it was saved with",
            )
        for saved, mine in zip(saved_groups, self.param_groups, strict=True):
            for key, param in zip(saved["params"], mine["params"], strict=True):
                if key in state_dict["state"] and param in self.state:
                    yield param, state_dict["state"][key]

    def numbers(self, wanted: Sequence[tuple[int, str]]) -> list[float]:
        """The values of (group, "lr" or "betas.0") as they are now."""
        groups = dict(zip(self._records, self.param_groups, strict=True))
        for number, fixed in self._fixed.items():
            for key, before in fixed.items():
                now = groups[number].get(key)
                if (tuple(now) if isinstance(now, list) else now) != before:
                    raise PlanError(
                        f"{key} of group {number} was {before} in the plan and is {now} now",
                        where=f"optimizer.{key}",
                        why="the update program was made for it: only numbers of its inputs can be changed",
                        hint="model.zgraph.recompile(plan) with another plan",
                    )
        found: list[float] = []
        for number, path in wanted:
            key, _, at = path.partition(".")
            group, record = groups[number], self._records[number]
            now = group[key][int(at)] if at else group[key]
            before = getattr(record, key)[int(at)] if at else getattr(record, key)
            if (before == 0) != (now == 0) and key != "lr" and path in RULES[record.name].scalars and before == 0:
                raise PlanError(
                    f"{key} of group {number} was 0 in the plan and is {now} now",
                    where=f"optimizer.{key}",
                    why="the update program has no operation for it",
                    hint="give the plan a value other than 0, and change it at run time as you like",
                )
            found.append(float(now))
        return found
