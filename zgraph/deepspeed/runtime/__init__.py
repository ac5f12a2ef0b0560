"""DeepSpeed's `runtime`, from which scripts import schedulers and helpers."""

from importlib import import_module
from typing import Any

_MODULES = (
    "activation_checkpointing",
    "base_optimizer",
    "config",
    "dataloader",
    "engine",
    "lr_schedules",
    "pipe",
    "utils",
    "zero",
)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
