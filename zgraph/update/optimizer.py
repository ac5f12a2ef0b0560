"""A plan's optimizer as a `torch.optim.Optimizer`, for schedulers, checkpoints and loggers that expect one.

Its groups hold the numbers that the next update uses; its state shows the update program's own tensors, as DTensors
without padding. `step()` runs the model's step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from zgraph.errors import ModelError, PlanError, StepError
from zgraph.parameters.foreign_shards import refuse_foreign
from zgraph.torch_compat import tensor_hooks
from zgraph.update.build_update import AHEAD, DERIVED
from zgraph.update.optimizer_rules import RULES
from zgraph.update.optimizer_state import OfParam, OptimizerState
from zgraph.update.parameter_groups import Member


class Updates(Protocol):
    """What the optimizer needs of the model's updater."""

    def update(self) -> Any: ...

    def zeroed(self) -> None: ...

    def make_states(self) -> None: ...

    def wait(self) -> None: ...

    def resume(self, counts: dict[torch.Tensor, float], done: int, fresh: Sequence[torch.Tensor]) -> None: ...


def copy_state(mine: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a saved state, whole or sharded in any way, into one that is sharded like its parameter."""
    with torch.no_grad():
        if isinstance(mine, DTensor):
            if not isinstance(value, DTensor):
                value = distribute_tensor(value.to(mine.device), mine.device_mesh, mine.placements)
            mine.copy_(value.redistribute(mine.device_mesh, mine.placements))
        else:
            mine.copy_(value.full_tensor() if isinstance(value, DTensor) else value)


class PlanOptimizer(torch.optim.Optimizer):
    """The optimizer of a compiled model: `model.zgraph.optimizer`.

    `param_groups` has one group for each group of the plan that has parameters, in the plan's order behind the one of all
    other parameters: "params", "names" and the fields of its record ("lr", "betas", …). In a pipeline every rank has the
    groups of the whole model, with all their names (`members`), and in "params" only its `own` parameters. A number that
    the program takes (rates, betas, decay, …) may be changed at any time; nothing is compiled again. Other fields can't be
    changed (`maximize`, say), nor can a weight decay or momentum that was zero in the plan become another number, since the
    program has no such operation: `PlanError` at the next step. A plan's `lr_schedule` sets what it schedules before each
    step. `state_dict()` and `load_state_dict()` are torch's, so torch.distributed.checkpoint works; half precision's loss
    scale is not in them.

    The next step takes over what was written to `state` or removed from it: it copies tensors, and restarts states
    that are gone, as torch does. Hooks of `step()` run with every step, those of `train_step` too. Parameters stay in
    the groups of the plan: `StepError` where they were moved.
    """

    counts_updates = True  # (its weights need not have changed when `step` returns: updates may run late)

    def __init__(
        self,
        members: Sequence[Member],
        params: dict[str, nn.Parameter],
        updater: Updates | None,
        own: Collection[str] | None = None,
    ) -> None:
        self._behind = updater
        self._complete = False
        self._newer: PlanOptimizer | None = None
        self._records = dict(sorted({m.group: m.record for m in members}.items()))
        self._fixed: dict[int, dict[str, Any]] = {}
        groups = []
        for number, record in self._records.items():
            names = [m.name for m in members if m.group == number]
            values = {k: v for k, v in record.model_dump().items() if k not in ("name", "groups", "decay", "companion")}
            group_params = [params[n] for n in names if own is None or n in own]
            groups.append({"params": group_params, "names": names, **values})
            inputs = {path.partition(".")[0] for path in RULES[record.name].scalars}
            self._fixed[number] = {
                k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k not in inputs
            }
        first = groups[0] if groups else {}
        super().__init__(groups, {k: v for k, v in first.items() if k not in ("params", "names")})
        self._shown = OptimizerState(updater.make_states if updater is not None else None)
        self._held = [list(group["params"]) for group in self.param_groups]  # only the model may change these
        self._names = [[n for n in g["names"] if own is None or n in own] for g in self.param_groups]
        self._complete = True

    @property  # type: ignore[override]
    def state(self) -> OptimizerState:
        """The states of each parameter; see the class."""
        return self._shown if self._newer is None else self._newer.state

    @state.setter
    def state(self, value: Any) -> None:
        if self._complete:  # (torch's own constructor sets an empty one)
            given = {param: dict(states) for param, states in value.items()}
            self.state.clear()
            for param, states in given.items():
                self.state[param].update(states)

    def _updater(self) -> Updates:
        if self._newer is not None:
            return self._newer._updater()
        if self._behind is None:
            raise StepError(
                "this optimizer is no longer the model's",
                why="the model was compiled again by a plan with another optimizer",
                hint="take model.zgraph.optimizer anew after recompile",
            )
        return self._behind

    def follow(self, old: PlanOptimizer) -> None:
        """Take over the groups and hooks of another optimizer of the same parameters; whoever holds that one (a
        scheduler, say) then uses this one."""
        self.param_groups = old.param_groups
        for name in tensor_hooks.OPTIMIZER_HOOKS:
            setattr(self, name, getattr(old, name))
        old._newer = self

    def retire(self) -> None:
        """Refuse all further use: another optimizer has taken this one's place."""
        self._behind = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise `PlanError`: the update program is that of the plan's groups."""
        if not self._complete:
            super().add_param_group(param_group)
            return
        raise PlanError(
            "the plan's optimizer takes no further groups (add_param_group)",
            where="optimizer.groups",
            why="the update program was made for the model's parameters, in the plan's groups",
            hint="give the plan the group (optimizer.groups); for parameters that are not the model's make an optimizer of torch's",
        )

    def look_up(self, params: Mapping[str, nn.Parameter]) -> None:
        """Replace parameters in the groups by the model's parameters of the same names, which
        `load_state_dict(assign=True)` may have replaced.

        Raises `StepError` where someone else has changed which parameters are in a group.
        """
        for number, (group, before) in enumerate(zip(self._groups(), self._held, strict=True)):
            now = group.get("params", ())
            if len(now) != len(before) or not all(map(operator.is_, now, before)):
                raise _moved(f"group {number} has {len(now)} parameters now, and not the {len(before)} of the plan")
            names = self._names[number]
            if not all(map(operator.is_, before, map(params.__getitem__, names))):
                fresh = [params[n] for n in names]
                for old, new in zip(before, fresh, strict=True):
                    if old is not new:
                        self._shown.show_again(old, new)
                group["params"], self._held[number] = fresh, list(fresh)

    def _groups(self) -> list[dict[str, Any]]:
        """Return the groups. Raises `StepError` if there are more or fewer than the plan has."""
        if len(self.param_groups) != len(self._held):
            raise _moved(f"there are {len(self.param_groups)} groups, and {len(self._held)} in the plan")
        return self.param_groups

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Do one update, as `model.step()` does, which calls it."""
        if closure is not None:
            raise PlanError("the plan's optimizer takes no closure", hint="run forward and backward before step()")
        return self._updater().update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as torch's optimizers do."""
        super().zero_grad(set_to_none)
        self._updater().zeroed()

    def state_dict(self) -> dict[str, Any]:
        """Return every state of every trained parameter, as torch's optimizers do; states that do not exist yet are
        created.

        Tensors are the update's own, except for counts of updates, which several parameters may share.
        """
        self._updater().wait()
        self._updater().make_states()
        saved = super().state_dict()
        for key, states in saved["state"].items():
            if isinstance(states, OfParam):
                saved["state"][key] = {k: v.clone() if k == "step" else v for k, v in states.items()}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states, counts of updates and the groups' numbers; a schedule goes on from the count.

        A parameter without saved states begins anew. Tensors may be DTensors of any placement or whole ones. Load the
        weights first: where updates run late, here or in the run that saved, states and weights are derived from each
        other. Raises `ModelError` for other groups, parameters, states or shapes; then nothing was changed.
        """
        self._updater().wait()
        self._updater().make_states()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict.copy()) or state_dict
        pairs = [(p, record, self._checked(p, record, saved)) for p, record, saved in self._pairs(state_dict)]
        counts: dict[torch.Tensor, float] = {}
        done, fresh = 0, []
        for param, record, saved in pairs:
            mine, rule = self.state[param], RULES[record.name]
            counts[param] = float(saved["step"]) if "step" in saved else rule.first_count(saved)
            done = max(done, int(float(saved.get("step", 0.0))))
            if not saved.keys() - {"step", *DERIVED}:
                fresh.append(param)
                counts[param] = 0.0 if rule.begins in mine else counts[param]
            for key, value in saved.items():
                if key in mine and key != "step":
                    copy_state(mine[key], value)
            if AHEAD in mine and AHEAD not in saved:
                copy_state(mine[AHEAD], param)
            if AHEAD in saved and AHEAD not in mine:  # (updates are not late here: the weight is the newest value)
                copy_state(param, saved[AHEAD])
        for group, other in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({k: v for k, v in other.items() if k not in ("params", "names")})
        self._updater().resume(counts, done, fresh)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _checked(self, param: torch.Tensor, record: Any, saved: dict[str, Any]) -> dict[str, Any]:
        """Return the saved states of a parameter if they fit its states here, or if they are empty because it had not
        begun.

        Raises `ModelError` for others.
        """
        rule, mine = RULES[record.name], self.state[param]
        refuse_foreign(saved)
        saved = {k: v for k, v in saved.items() if v is not None}
        if not saved.keys() - {"step", *DERIVED} and (rule.begins is not None or not saved):
            return saved
        for key in (saved.keys() | mine.keys()) - {AHEAD, "step"}:
            shapes = [tuple(s[key].shape) if key in s else None for s in (saved, mine)]
            if len(set(shapes)) > 1:
                raise ModelError(
                    f"the optimizer's saved state {key!r} has shape {shapes[0]}, this plan's {shapes[1]}",
                    why="it was saved by another optimizer, or of another model",
                    hint="load it with the plan that it was saved with",
                )
        if rule.counts and "step" not in saved:
            raise ModelError(
                "the optimizer's saved state has no count of updates ('step')",
                why=f"{record.name} works with it",
                hint="add to each parameter's state the number of updates that it has had",
            )
        return saved

    def _pairs(self, state_dict: dict[str, Any]) -> Iterator[tuple[torch.Tensor, Any, dict[str, Any]]]:
        saved_groups = state_dict["param_groups"]
        sizes = [[len(g["params"]) for g in groups] for groups in (saved_groups, self.param_groups)]
        if sizes[0] != sizes[1]:
            raise ModelError(
                f"the saved optimizer has groups of {sizes[0]} parameters, this one of {sizes[1]}",
                hint="load it with the plan and the model that it was saved with",
            )
        for saved, mine, record in zip(saved_groups, self.param_groups, self._records.values(), strict=True):
            for key, param in zip(saved["params"], mine["params"], strict=True):
                if param in self.state:
                    yield param, record, state_dict["state"].get(key, {})

    def numbers(self, wanted: Sequence[tuple[int, str]]) -> list[float]:
        """Return the current values of (group, "lr" or "betas.0"). Raises `PlanError` where fixed fields were changed."""
        groups = dict(zip(self._records, self._groups(), strict=True))
        missing = [(n, k) for n, path in wanted if (k := path.partition(".")[0]) not in groups[n]]
        if missing:
            number, key = missing[0]
            raise PlanError(f"group {number} of the optimizer has no {key} any more", where=f"optimizer.{key}")
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
        values: list[float] = []
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
            values.append(float(now))
        return values


def _moved(why: str) -> StepError:
    return StepError(
        "the optimizer's groups no longer hold the parameters that the plan gave them",
        why=why,
        hint="put them back; freeze a parameter by requires_grad_(False), and give the plan other groups by model.zgraph.recompile(plan)",
    )
