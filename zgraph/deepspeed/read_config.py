"""Reading a DeepSpeed configuration from a file or a dict, with every key and type checked, and "auto" filled."""

from __future__ import annotations

import base64
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zgraph.deepspeed.keys import ALIASES, KEYS, Key, names_in
from zgraph.deepspeed.plan_draft import Draft
from zgraph.errors import PlanError
from zgraph.names import did_you_mean
from zgraph.record import short

Config = Mapping[str, Any] | str | os.PathLike[str]

FREE = ("optimizer.params", "scheduler.params", "zgraph")  # sections whose keys depend on a type, or are a plan's
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("true or false", lambda v: isinstance(v, bool)),
    "int": ("a whole number", lambda v: _is_number(v) and v % 1 == 0),
    "number": ("a number", lambda v: _is_number(v)),
    "positive": ("a number above 0", lambda v: _is_number(v) and v > 0),
    "text": ("a text", lambda v: isinstance(v, str)),
    "list": ("a list", lambda v: isinstance(v, (list, tuple))),
    "table": ("a section: {…}", lambda v: isinstance(v, Mapping)),
    "any": ("", lambda v: True),
}


def read(config: Config) -> dict[str, Any]:
    """Return the configuration as a new dict.

    Raises `PlanError` for a file that can't be read, is not JSON (nor Hjson, which DeepSpeed reads), or has a key
    twice.
    """
    if isinstance(config, Mapping):
        return _own(config)
    if not isinstance(config, (str, os.PathLike)):
        raise PlanError(f"the configuration is {short(config)}", hint="give a dict, or the path of a JSON file")
    path = Path(config)
    try:
        encoded = _of_base64(config) if isinstance(config, str) else None
        config_dict = _parsed(path.read_text(encoding="utf-8") if encoded is None else encoded)
    except OSError as error:
        raise PlanError(
            "the configuration can't be read",
            where=short(str(path)),
            why=error.strerror or str(error),
            hint="give a dict, or the path of a JSON file",
        ) from error
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}"
        raise PlanError("the configuration is no JSON", where=where, why=error.msg, hint=_MEND) from error
    except UnicodeDecodeError as error:
        raise PlanError("the configuration is no text", where=str(path), why=str(error)) from error
    except PlanError as error:
        raise PlanError(error.what, where=f"{path}: {error.where}", hint=error.hint) from None
    if not isinstance(config_dict, dict):
        raise PlanError(f"the configuration is {short(config_dict)}", where=str(path), hint="it is a table: {…}")
    return _own(config_dict)


def _of_base64(text: str) -> str | None:
    """Return the configuration that a text is in base64, as DeepSpeed's command line gives it; None for any other, such as a path."""
    if Path(text[:200]).exists():
        return None
    try:
        decoded = base64.b64decode(text, altchars=b"-_", validate=True).decode("utf-8")
    except (ValueError, UnicodeDecodeError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


_MEND = "mend that line; comments and keys without quotes are Hjson, which is read where the package hjson is installed"


def _parsed(text: str) -> Any:
    """Parse a file's text as JSON, or as Hjson if that is installed. Raises `json.JSONDecodeError`."""
    try:
        return json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError:
        try:
            import hjson
        except ImportError:
            hjson = None
        if hjson is None:
            raise
        try:
            return hjson.loads(text, object_pairs_hook=_once)
        except hjson.HjsonDecodeError:
            pass
        raise


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_SWITCHES = {
    **dict.fromkeys((True, "true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys((False, "false", "f", "no", "n", "off", "0"), False),
}


def _of_text(value: Any, key: str) -> Any:
    """Return the number or switch that a text (or 0 or 1) stands for, as pydantic reads DeepSpeed's sections; all else as it is.

    (YAML reads 1e-3 and 5e8 as texts.) What the numbers of an optimizer or a schedule are named is free; their lists are read too.
    """
    free = key.startswith(tuple(f"{section}." for section in FREE[:2]))
    if free and isinstance(value, (list, tuple)):
        return type(value)(_of_text(item, key) for item in value)
    kind = "free" if free else KEYS[key].kind if key in KEYS else "any"
    small = value.lower() if isinstance(value, str) else value
    if kind == "bool" and type(value) in (str, int) and small in _SWITCHES:
        return _SWITCHES[small]
    if free and small in ("true", "false"):
        return small == "true"
    if isinstance(value, str) and kind in ("free", "int", "number", "positive") and _NUMBER.fullmatch(value):
        return int(value) if value.lstrip("+-").isdecimal() else float(value)
    return value


def _own(config: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return a copy with the present names of keys, and texts that stand for numbers and switches as these."""
    renamed: dict[str, Any] = {}
    for given, value in config.items():
        if not isinstance(given, str):
            raise PlanError(
                f"{short(given)} is no key",
                where=section.rstrip(".") or "the configuration",
                hint="keys are texts, as in JSON",
            )
        name = ALIASES.get(f"{section}{given}", given)
        key = f"{section}{name}"
        if name in renamed:
            raise PlanError(
                f"{key} is given twice", where=key, hint=f"keep one of them (it has two names, of which one is {given})"
            )
        renamed[name] = _own(value, f"{key}.") if isinstance(value, Mapping) else _of_text(value, key)
    return renamed


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            raise PlanError(f"{name!r} is given twice", where=name, hint="keep one of them")
        table[name] = value
    return table


# -- keys and types ---------------------------------------------------------------------------------------------------------
def check(draft: Draft, keys: Mapping[str, Key] = KEYS, system: str = "DeepSpeed") -> None:
    """Record the verdict on each key that is not applied, and refuse values of another type, and keys that the table
    `keys` of a system does not have."""
    _check_section(draft, keys, system, "", draft.config)


def _check_section(draft: Draft, keys: Mapping[str, Key], system: str, section: str, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        key = f"{section}.{name}" if section else name
        if "." in name and key in keys:
            draft.refuse(key, "a key has no dot in it", f"give {_nested(name)}")
        elif key not in keys:
            draft.refuse(key, f"{system} has no such key", did_you_mean(name, names_in(section, keys)))
        elif value is not None and _fits(draft, key, keys[key], value):
            if keys[key].kind == "table" and not keys[key].whole and key not in FREE:
                _check_section(draft, keys, system, key, value)
            else:
                _judge(draft, key, keys[key], value)


def _nested(name: str) -> str:
    """Return what a key with dots is as sections."""
    *outer, last = name.split(".")
    return "".join(f'"{part}": {{' for part in outer) + f'"{last}": …' + "}" * len(outer)


def _fits(draft: Draft, key: str, known: Key, value: Any) -> bool:
    """Return whether a value has the type of its key; refuse it if not."""
    text, fits = _KINDS[known.kind]
    open_section = known.kind == "table" and not known.whole and key not in FREE
    if fits(value) or (value == "auto" and not open_section):
        return True
    draft.refuse(key, f"{short(value)} is not {text}", f"give {text}, or leave it out")
    return False


def _judge(draft: Draft, key: str, known: Key, value: Any) -> None:
    """Record the verdict on a key that is not applied."""
    if known.verdict == "applied":
        return
    off = value == known.default if known.kind != "table" else not value or _is_off(value)
    if known.verdict != "refused":
        draft.say(key, known.verdict, known.why)
    elif off:
        draft.say(key, "equivalent", "it asks for nothing")
    else:
        draft.refuse(key, known.why, known.hint)


def _is_off(section: Any) -> bool:
    return isinstance(section, Mapping) and section.get("enabled") is False


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


# -- "auto" -----------------------------------------------------------------------------------------------------------------
def fill(config: dict[str, Any], model: Any, arguments: Any) -> dict[str, str]:
    """Replace each "auto" as transformers would: by its `TrainingArguments` (or a dict of them), and by the model's
    hidden size.

    Returns the reason for each key that can't be filled, by key.
    """
    missing: dict[str, str] = {}

    def walk(table: dict[str, Any], prefix: str) -> None:
        for name, value in list(table.items()):
            key = prefix + str(name)
            if isinstance(value, dict):
                walk(value, f"{key}.")
            elif isinstance(value, str) and value == "auto" and key not in _OWN_AUTO:
                try:
                    table[name] = _filled(key, model, arguments)
                except LookupError as error:
                    missing[key] = str(error)

    walk(config, "")
    return missing


# Keys whose "auto" DeepSpeed itself resolves, from other keys.
_OWN_AUTO = ("pipeline.stages", "train_batch_size")

# The field of transformers' TrainingArguments that fills a key.
FROM_ARGUMENTS = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
    "checkpoint.use_node_local_storage": "save_on_each_node",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "max_steps",
}
_FROM_HIDDEN: dict[str, Callable[[int], int]] = {
    "zero_optimization.reduce_bucket_size": lambda n: n * n,
    "zero_optimization.stage3_prefetch_bucket_size": lambda n: int(0.9 * n * n),
    "zero_optimization.stage3_param_persistence_threshold": lambda n: 10 * n,
}


def _filled(key: str, model: Any, arguments: Any) -> Any:
    """Return the value that "auto" stands for. Raises `LookupError` with the reason if it is not known."""
    if key in _FROM_HIDDEN:
        return _FROM_HIDDEN[key](_hidden_size(model))
    if key == "scheduler.params.warmup_min_lr":
        return 0.0
    if key == "optimizer.params.betas":
        return [_argument(arguments, "adam_beta1"), _argument(arguments, "adam_beta2")]
    if key not in FROM_ARGUMENTS:
        raise LookupError('nothing says what "auto" stands for here')
    name = FROM_ARGUMENTS[key]
    value = _argument(arguments, name)
    if name in ("max_steps", "warmup_steps") and value <= 0 and not (name == "warmup_steps" and _no_ratio(arguments)):
        raise LookupError(f"the number of steps is not known before the data is ({name} is {value})")
    return value


def _no_ratio(arguments: Any) -> bool:
    """Return whether the arguments have no `warmup_ratio`, so that `warmup_steps` of 0 means no warm-up."""
    try:
        return not _argument(arguments, "warmup_ratio")
    except LookupError:
        return True


def _argument(arguments: Any, name: str) -> Any:
    if arguments is None:
        raise LookupError(f'"auto" is the training arguments\' {name}, and none are given')
    argument = arguments.get(name) if isinstance(arguments, Mapping) else getattr(arguments, name, None)
    if argument is None:
        raise LookupError(f'"auto" is the training arguments\' {name}, and these have none')
    return argument


def _hidden_size(model: Any) -> int:
    config = getattr(model, "config", None)
    for place in (config, getattr(config, "text_config", None)):
        size = getattr(place, "hidden_size", None)
        sizes = getattr(place, "hidden_sizes", None)
        if size:
            return int(size)
        if sizes:
            return int(max(sizes))
    raise LookupError(
        '"auto" follows the hidden size of a transformers model, and '
        + ("none is given" if model is None else f"a {type(model).__name__} has no config.hidden_size")
    )
