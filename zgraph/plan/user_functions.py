"""Loads what a plan names as "package.module:name"."""

from __future__ import annotations

import importlib
from typing import Any

from zgraph.errors import PlanError


def load_named(ref: str, kind: str) -> Any:
    """Return what "package.module:name" names. Raises `PlanError` if there is none; `kind` says what it is to be."""
    module_name, _, attribute = ref.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise PlanError(
            f"{kind} {ref!r} can't be loaded",
            why=f"{type(error).__name__}: {error}",
            hint="is the module on the Python path?",
        ) from error
