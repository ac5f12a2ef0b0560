"""What DeepSpeed's own functions, classes and methods take, read from an installed DeepSpeed in a process of its own."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from deepspeed_scripts import eager, of_torch, ready

LOGGED = {"prof", "log_name", "debug"}  # arguments of all collectives


def named(root: Any, path: str) -> Any:
    """What a path as "runtime.zero.stage3.name" names, in modules that may have to be imported."""
    value = root
    for part in path.split("."):
        if not hasattr(value, part) and inspect.ismodule(value):
            importlib.import_module(f"{value.__name__}.{part}")
        value = getattr(value, part)
    return value


def parameters(function: Any) -> dict[str, Any]:
    """The arguments of a call by name, with their defaults; "…" where there is none, or no plain value."""
    if function.__class__.__name__ == "function" and function.__name__ == "log_wrapper":
        function = inspect.getclosurevars(function).nonlocals["func"]  # (a timed collective)
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name in {"self", *LOGGED}:
            continue
        plain = isinstance(parameter.default, (int, float, str, bool, tuple, type(None)))
        found[name] = parameter.default if plain else "…"
    return found


def answers(system: str, config: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """What an engine of a configuration says by its methods that take nothing, and by its properties. (0.19.8 has no longer all of them.)"""
    module, change = (
        (ready(), of_torch) if system == "deepspeed" else (importlib.import_module("zgraph.deepspeed"), eager)
    )
    module.init_distributed("gloo")
    engine, *_ = module.initialize(model=torch.nn.Linear(4, 4), config=change(config))
    values = {name: getattr(engine, name) for name in names if system != "deepspeed" or hasattr(engine, name)}
    return {name: value() if callable(value) else value for name, value in values.items()}


def of_deepspeed(paths: list[str]) -> dict[str, dict[str, Any] | None]:
    """The arguments of each; None of what is no function, as a property or a module."""
    root = ready()
    values = {path: named(root, path) for path in paths}
    return {path: parameters(value) if callable(value) else None for path, value in values.items()}


def engine_names() -> list[str]:
    """The public attributes and methods of an engine of DeepSpeed's own, besides those of every module."""
    module, model = ready(), torch.nn.Linear(4, 4)
    module.init_distributed("gloo")
    config = of_torch({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}})
    engine, *_ = module.initialize(model=model, config=config)
    plain = {*dir(torch.nn.Linear(4, 4))}
    return sorted(name for name in {*dir(engine), *vars(engine)} if not name.startswith("_") and name not in plain)


def names_of_zero() -> list[str]:
    """The public functions and classes of DeepSpeed's `zero`."""
    zero = ready().zero
    return sorted(n for n, value in vars(zero).items() if not n.startswith("_") and callable(value))
