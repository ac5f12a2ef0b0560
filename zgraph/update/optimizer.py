"""A plan's optimizer as a `torch.optim.Optimizer`: what schedulers, checkpoints and loggers of torch's kind hold.

Its groups hold the numbers that the next update uses; its state shows the update program's own tensors, as DTensors
without padding. `step()` is the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from zgraph.errors import PlanError
from zgraph.update.groups import Member
from zgraph.update.rules import RULES


class PlanOptimizer(torch.optim.Optimizer):
    """The optimizer of a compiled model: `model.zgraph.optimizer`.

    `param_groups` has one group for each of the plan's that has parameters: "params", "names" and the fields of its
    record ("lr", "betas", …). A number may be changed at any time; nothing is compiled again. A weight decay or momentum
    that was zero in the plan can't become another number, since the program has no such operation: `PlanError`.
    """

    def __init__(self, members: Sequence[Member], params: dict[str, nn.Parameter], step: Callable[[], Any]) -> None:
        self._update = step
        self._records = {m.group: m.record for m in members}
        groups = []
        for number, record in self._records.items():
            names = [m.name for m in members if m.group == number]
            values = {k: v for k, v in record.model_dump().items() if k not in ("groups", "decay", "companion")}
            groups.append({"params": [params[n] for n in names], "names": names, **values})
        super().__init__(groups, {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update; the same as `model.step()`."""
        if closure is not None:
            raise PlanError("the plan's optimizer takes no closure", hint="run forward and backward before step()")
        return self._update()

    def numbers(self, wanted: Sequence[tuple[int, str]]) -> list[float]:
        """The values of (group, "lr" or "betas.0") as they are now."""
        groups = dict(zip(self._records, self.param_groups, strict=True))
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
