"""The translation of DeepSpeed's `optimizer` and `scheduler` into those of a plan."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch

from zgraph.deepspeed.plan_draft import Draft
from zgraph.errors import PlanError
from zgraph.names import did_you_mean
from zgraph.plan import lr_schedules, optimizers
from zgraph.record import Record, short

# (DeepSpeed's type, in lower case) -> (the plan's, DeepSpeed's defaults where they differ)
_TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("AdamW", {"lr": 1e-3, "weight_decay": 0.0}),
    "adamw": ("AdamW", {"lr": 1e-3, "weight_decay": 0.0}),
    "adagrad": ("Adagrad", {"lr": 1e-2}),
    "lamb": ("LAMB", {"lr": 1e-3, "eps": 1e-8}),
    "onebitadam": ("OneBitAdam", {"lr": 1e-3}),
    "onebitlamb": ("OneBitLAMB", {"lr": 1e-3}),
    "zerooneadam": ("ZeroOneAdam", {"lr": 1e-3}),
    "lion": ("Lion", {"lr": 1e-3, "betas": [0.9, 0.999]}),
    "sgd": ("SGD", {"lr": 1e-3}),
}
_WITHOUT = {
    "muadam": "mup's Adam",
    "muadamw": "mup's AdamW",
    "musgd": "mup's SGD",
    "muon": "DeepSpeed's Muon (another iteration than that of a plan's Muon)",
}
# What torch has and no plan: `initialize` makes them, since an element's update is of that element alone, so that shards can step.
TORCHS_OWN = ("RMSprop", "Adamax", "RAdam", "NAdam", "Adadelta", "Rprop", "ASGD")
# Parameters with another name in DeepSpeed, by the plan's optimizer.
_RENAMED = {name: {"freeze_step": "freeze_steps"} for name in ("OneBitAdam", "OneBitLAMB")}
_IGNORED = (
    "torch_adam",
    "adam_w_mode",
    "fused",
    "foreach",
    "set_grad_none",
    "capturable",
    "differentiable",
    "fp32_optimizer_states",
)
_OF_ONE_BIT = (
    "cuda_aware",
    "comm_backend_name",
    "bias_correction",
)  # (DeepSpeed's 1-bit optimizers never correct their averages)


def optimizer(draft: Draft) -> None:
    """Translate the optimizer. DeepSpeed's Adam is AdamW unless `adam_w_mode` is false."""
    section, key = draft.get("optimizer"), "optimizer.type"
    if section is None or draft.is_refused(key) or draft.is_refused("optimizer.params"):
        return
    kind = section.get("type")
    if kind is None:
        draft.refuse(key, "it is missing", 'name the optimizer: "type": "AdamW"')
        return
    folded = kind.lower()
    if folded in _WITHOUT:
        draft.refuse(key, f"a plan has no {_WITHOUT[folded]}", "AdamW or another; or an optimizer object of your own")
        return
    if folded not in _TYPES:
        nearest = did_you_mean(kind, ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "SGD"))
        if kind in TORCHS_OWN:
            nearest = "initialize takes it as torch's own"
        draft.refuse(key, f"a plan has no {kind}", f"{nearest}; or an object of your own")
        return
    name, defaults = _TYPES[folded]
    params = dict(section.get("params") or {})
    note = ""
    if folded in ("adam", "adamw"):
        plain = params.get("torch_adam", False)
        decoupled = params.get("adam_w_mode", True) if folded == "adam" else True
        for option in ("torch_adam", "adam_w_mode"):
            if not isinstance(params.get(option, False), bool):
                draft.refuse(
                    f"optimizer.params.{option}", f"{short(params[option])} is not true or false", "one of them"
                )
                return
        if plain and decoupled:
            defaults = defaults | {"weight_decay": 1e-2}  # (torch's own AdamW)
        if not decoupled:
            name = "Adam"
        elif folded == "adam":
            note = "DeepSpeed's Adam decays weights as AdamW does, unless adam_w_mode is false"
    _with_params(draft, name, defaults, params, note)


def _with_params(draft: Draft, name: str, defaults: dict[str, Any], params: dict[str, Any], note: str) -> None:
    if "max_grad_norm" in params:
        draft.refuse(
            "optimizer.params.max_grad_norm", "DeepSpeed refuses it too", '"gradient_clipping" of the configuration'
        )
        return
    if params.get("fp32_optimizer_states", True) is not True:
        draft.refuse(
            "optimizer.params.fp32_optimizer_states",
            "states are float32, unless the plan's precision says otherwise",
            "leave it out; or optimizer_state of the plan's precision",
        )
        return
    record = getattr(optimizers, name)
    ignored = (*_IGNORED, *(_OF_ONE_BIT if issubclass(record, optimizers.OneBitOptimizer) else ()))
    renamed = {k: new for k, new in _RENAMED.get(name, {}).items() if k in params}
    params = {renamed.get(k, k): v for k, v in params.items()}
    asked = {new: old for old, new in renamed.items()}
    given = {k: v for k, v in params.items() if k not in ignored and not draft.is_refused(f"optimizer.params.{k}")}
    if given.get("bias_correction") is True and "bias_correction" not in record.model_fields:
        del given["bias_correction"]
        draft.say("optimizer.params.bias_correction", "equivalent", "averages are corrected")
    for key in [k for k in given if k not in record.model_fields or k in ("name", "groups", "decay")]:
        hint = did_you_mean(key, [k for k in record.model_fields if k not in ("name", "groups", "decay")])
        draft.refuse(f"optimizer.params.{key}", f"{name} has no such number", hint)
        del given[key]
    for key in _switches_for_numbers(record, given):
        draft.refuse(f"optimizer.params.{asked.get(key, key)}", f"{short(given[key])} is not a number", "give a number")
        del given[key]
    try:
        optimizer_record = record(**{**defaults, **given})
    except PlanError as error:
        _refuse_each(draft, "optimizer.params", error, asked)
        return
    draft.apply("optimizer.type", "optimizer", optimizer_record, note)
    draft.say("optimizer.type", "applied", f"optimizer = {name}{f': {note}' if note else ''}")
    for key in params:
        if key in ignored:
            draft.say(
                f"optimizer.params.{key}",
                "no effect here" if key not in ("torch_adam", "adam_w_mode") else "applied",
                _said(key, name),
            )
        elif key in given:
            draft.say(
                f"optimizer.params.{asked.get(key, key)}",
                "applied",
                f"optimizer.{key} = {short(getattr(optimizer_record, key))}",
            )
    for key, value in defaults.items():
        if key not in params:
            draft.say(f"optimizer.params.{key}", "applied", f"optimizer.{key} = {value}: DeepSpeed's default")


def _switches_for_numbers(record: type[Record], given: dict[str, Any]) -> list[str]:
    """Return the keys of numbers whose values are true or false, which Python would take for 1 and 0."""
    fields = record.model_fields
    return [k for k, v in given.items() if isinstance(v, bool) and k in fields and fields[k].annotation is not bool]


def _refuse_each(draft: Draft, section: str, error: PlanError, asked: Mapping[str, str] | None = None) -> None:
    """Refuse the keys of a section whose values the plan's record refuses. `asked` has the names that DeepSpeed gives
    some fields."""
    for problem in error.problems or (error,):
        field = re.split(r"[.\[]", problem.where or "")[0]
        field = (asked or {}).get(field, field)
        draft.refuse(
            f"{section}.{field}" if field else section, problem.what, problem.hint or problem.why or "another value"
        )


def _try_once(draft: Draft, schedule: lr_schedules.TorchSchedule) -> None:
    """Refuse one of torch's schedules that can't be made for the plan's optimizer, or that has no first step. (One of functions, which it
    names, is made where it trains.)"""
    record = draft.fields.get("optimizer")
    if record is None or any(isinstance(v, str) and ":" in v for v in schedule.args.values()):
        return
    from zgraph.update.torch_lr_schedulers import torch_scheduler

    numbers = record.model_dump()
    optimizer = torch.optim.Optimizer([{"params": [torch.zeros(())], **numbers}], numbers)
    optimizer._opt_called = True  # type: ignore[attr-defined]  # (torch's schedulers warn where they run ahead)
    try:
        torch_scheduler(schedule, optimizer).step()
    except PlanError as error:
        draft.refuse("scheduler.params", error.why or error.what, error.hint or "another schedule")
    except ArithmeticError as error:
        draft.refuse("scheduler.params", f"the first step raises {type(error).__name__}: {error}", "other numbers")


def _said(key: str, name: str) -> str:
    return f"optimizer = {name}" if key in ("torch_adam", "adam_w_mode") else "the update is one compiled program"


_SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


def scheduler(draft: Draft) -> None:
    """Translate the schedule: DeepSpeed's by their own names, or any of `torch.optim.lr_scheduler`."""
    section, key = draft.get("scheduler"), "scheduler.type"
    if section is None or draft.is_refused(key) or draft.is_refused("scheduler.params"):
        return
    kind, params = section.get("type"), dict(section.get("params") or {})
    if kind is None:
        draft.refuse(
            key, "it is missing", f"name the schedule: {', '.join(_SCHEDULES)}, or one of torch.optim.lr_scheduler"
        )
        return
    if draft.get("optimizer") is None:
        why = "a plan's schedule moves the plan's optimizer, and none is given"
        draft.refuse(key, why, "give optimizer as well, or step a scheduler of your own")
        return
    if any(draft.is_refused(f"scheduler.params.{name}") for name in params):
        return
    if (last := params.pop("last_batch_iteration", None)) not in (None, -1):
        draft.refuse(
            "scheduler.params.last_batch_iteration",
            "a schedule goes on from a checkpoint",
            "load the checkpoint, and leave it out",
        )
        return
    if last is not None:
        draft.say("scheduler.params.last_batch_iteration", "equivalent", "a schedule begins at its beginning")
    from torch.optim import lr_scheduler

    try:
        if kind in _SCHEDULES:
            record = getattr(lr_schedules, kind)
            for name in _switches_for_numbers(record, params):
                draft.refuse(f"scheduler.params.{name}", f"{short(params.pop(name))} is not a number", "give a number")
            schedule = record(**params)
        elif inspect.isclass(getattr(lr_scheduler, kind, None)):
            schedule = lr_schedules.TorchSchedule(scheduler=kind, args=params)
            _try_once(draft, schedule)
        else:
            draft.refuse(key, f"there is no schedule {kind!r}", did_you_mean(kind, _SCHEDULES))
            return
    except PlanError as error:
        _refuse_each(draft, "scheduler.params", error)
        return
    if any(draft.is_refused(place) for place in ("scheduler.params", key)):
        return
    draft.apply(key, "lr_schedule", schedule)
    logarithmic = getattr(schedule, "warmup_type", "") == "log" and "warmup_type" not in params
    warm = "; its warm-up is logarithmic, as DeepSpeed's default is" if logarithmic else ""
    draft.say(key, "applied", f"lr_schedule = {kind}{warm}")
    for name, value in params.items():
        draft.say(f"scheduler.params.{name}", "applied", f"lr_schedule.{name} = {short(value)}")
