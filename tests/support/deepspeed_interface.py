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
