"""The optimizer that `initialize` returns: the plan's, with the groups in the order that the script gave them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from zgraph.deepspeed.absent_names import AbsentName, refuse_of_optimizer
from zgraph.errors import PlanError
from zgraph.update.optimizer import PlanOptimizer
from zgraph.update.parameter_groups import members_of

if TYPE_CHECKING:
    from zgraph.api.handle import Handle
    from zgraph.plan.loss_scaling import LossScale


class LossScaleNow:
    """fp16's loss scale and the state that moves it, by DeepSpeed's names, always read after the last step."""

    scale_factor = 2.0

    def __init__(self, handle: Handle, scaling: LossScale) -> None:
        self._handle = handle
        self.dynamic_loss_scale = self.dynamic = scaling.static is None
        self.scale_window = scaling.loss_scale_window
        self.min_loss_scale = self.min_scale = scaling.min_loss_scale

    def _now(self, name: str) -> float:
        return float(self._handle.runtime.updater.states.of_scale()[name])

    @property
    def cur_scale(self) -> float:
        return self._now("scale")

    loss_scale = cur_scale

    @property
    def cur_iter(self) -> int:
        return int(self._now("iteration"))

    @property
    def last_overflow_iter(self) -> int:
        return int(self._now("last_overflow"))

    @property
    def cur_hysteresis(self) -> int:
        return int(self._now("hysteresis"))


class _Deferred:
    """A stand-in for the updater of a model that is not cut yet: each call goes to the runtime, and so raises
    `StepError` until the model is cut."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: getattr(self._handle.runtime.updater, name)(*args, **kwargs)


class EngineOptimizer(torch.optim.Optimizer):
    """The optimizer of an engine. Schedulers change its groups; `engine.step()` steps it.

    `param_groups` are those of `model.zgraph.optimizer`, in the order of the script's own groups. `loss_scale` and
    `cur_scale` are fp16's scale (1.0 without one); `overflow` is whether the last update was skipped. Other attributes are
    those of the plan's optimizer.
    """

    def __init__(
        self, handle: Handle, groups: Sequence[Sequence[str]] = (), labels: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self._handle = handle
        # the script's groups, whose further keys, such as names, are added to the optimizer's groups (without their parameters, of which
        # the model has others now: their memory would stay)
        self._labels = [{k: v for k, v in group.items() if k != "params"} for group in labels]
        self._order = [list(names) for names in groups]
        self.overflow = False
        self.clips_alone = True  # a step of the script's own clips, as one of the engine's does
        self._groups: list[dict[str, Any]] = []
        self._of: PlanOptimizer | None = None
        self._early: PlanOptimizer | None = None

    @property
    def optimizer(self) -> PlanOptimizer:
        """The plan's own optimizer. Before the model is cut, one without states, whose groups the cut model's
        optimizer takes over."""
        deferred = self._handle.deferred
        if deferred is None:
            optimizer = self._handle.optimizer
            assert optimizer is not None
            return optimizer
        if self._early is None:
            members = members_of(deferred.module, deferred.specs, self._handle.plan.optimizer)
            params = dict(deferred.module.named_parameters(remove_duplicate=False))
            self._early = PlanOptimizer(members, params, _Deferred(self._handle))
            self._handle.when_placed(self._hand_over)
        return self._early

    def _hand_over(self) -> None:
        """Move the groups, as schedulers have changed them so far, to the cut model's optimizer."""
        early, self._early = self._early, None
        optimizer = self.optimizer
        assert early is not None
        for mine, theirs in zip(early.param_groups, optimizer.param_groups, strict=True):
            mine["params"] = theirs["params"]
        optimizer.follow(early)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups, in the script's order. It is always the same list object, so that references to it stay valid."""
        inner = self.optimizer
        if inner is not self._of:
            by_name = {name: group for group in inner.param_groups for name in group["names"]}
            ordered = [by_name[names[0]] for names in self._order if names]
            rest = [g for g in inner.param_groups if not any(g is o for o in ordered)]
            self._groups[:] = ordered + rest
            for mine, theirs in zip(self._labels, ordered, strict=False):
                theirs.update({k: v for k, v in mine.items() if k not in theirs})
            self._of = inner
        return self._groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def zero_stage(self) -> int:
        """The plan's ZeRO stage."""
        return self._handle.plan.zero

    @property
    def loss_scale(self) -> float:
        scale = self._handle.loss_scale
        return 1.0 if scale is None else float(scale)

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        scaling = self._handle.plan.loss_scale()
        return scaling is not None and scaling.static is None

    def needs_scaler(self) -> bool:
        """Return whether the loss is scaled. (`engine.scale` need not be called: the compiled backward scales.)"""
        return self._handle.plan.loss_scale() is not None

    @property
    def loss_scale_config(self) -> LossScaleNow:
        """The loss scale and its counters, always up to date. Raises `AbsentName` if the loss is not scaled."""
        scaling = self._handle.plan.loss_scale()
        if scaling is None:
            raise AttributeError  # (as `__getattr__` does, with a sentence)
        return LossScaleNow(self._handle, scaling)

    loss_scaler = loss_scale_config  # (its name above stage 0)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Run one update of the plan's optimizer, as a script that leaves `engine.step()` out does.

        It clips as `engine.step()` does, but for fp32 without ZeRO, where DeepSpeed's engine clips and its optimizer does not
        (`clips_alone`).
        """
        if self.clips_alone:
            return self.optimizer.step(closure)
        with self._handle.runtime.updater.unclipped():
            return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise `PlanError`: see `PlanOptimizer.add_param_group`."""
        self.optimizer.add_param_group(param_group)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Raise `PlanError`: the engine runs the backward."""
        raise PlanError("the optimizer has no backward here", hint="engine.backward(loss)")

    def __repr__(self) -> str:
        return repr(self.optimizer)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_handle" not in self.__dict__:
            raise AttributeError(name)
        if name in ("loss_scale_config", "loss_scaler"):  # (a property of this class that raised)
            raise AbsentName(f"{name}: the plan scales no loss", hint="ask needs_scaler() first")
        try:
            return getattr(self.optimizer, name)
        except AttributeError:
            refuse_of_optimizer(name)


def follow(user: torch.optim.Optimizer, engine: EngineOptimizer) -> None:
    """Make an optimizer of the script's own follow the engine's.

    Whatever holds it, such as a scheduler, then changes the engine's groups, and its step is the engine's.
    """
    user.param_groups = engine.param_groups

    def step(closure: Callable[[], Any] | None = None) -> Any:
        user._opt_called = True  # type: ignore[attr-defined]  # (torch's schedulers warn where they run ahead)
        return engine.step(closure)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # (and where a step is not the one that they have seen)
    user.step = step  # type: ignore[method-assign]
    user.zero_grad = engine.zero_grad  # type: ignore[method-assign]
    user.state_dict = engine.state_dict  # type: ignore[method-assign]
    user.load_state_dict = engine.load_state_dict  # type: ignore[method-assign]


def rebind(user: torch.optim.Optimizer, names: Sequence[Sequence[str]], params: dict[str, Any]) -> None:
    """Replace the parameters of an optimizer that plans do not support by the model's present ones."""
    for group, mine in zip(user.param_groups, names, strict=True):
        group["params"] = [params[name] for name in mine]
