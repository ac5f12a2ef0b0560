"""Names of modules and parameters, and hints for wrong names. Loads nothing, so that the command line answers at
once."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint: the known name nearest to a wrong one, or all of them if none is near."""
    names = list(dict.fromkeys(known))
    folded = {n.casefold(): n for n in names}
    near = difflib.get_close_matches(name.casefold(), folded, n=1)
    return f"did you mean {folded[near[0]]!r}?" if near else f"the known ones are {', '.join(names) or 'none'}"


def parameter_names(module: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter, keyed by the first. A tied parameter has several, and plans may use any."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(first.setdefault(id(param), name), []).append(name)
    return names


def module_names(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return all names of each submodule, keyed by each of them. A shared module has several, and plans may use any."""
    groups: dict[int, list[str]] = {}
    for name, child in module.named_modules(remove_duplicate=False):
        groups.setdefault(id(child), []).append(name)
    return {name: tuple(group) for group in groups.values() for name in group}


def around(names: Iterable[str]) -> list[str]:
    """Return these names of a module or a parameter, and those of the modules around it, the outermost first."""
    depths = {n: n.count(".") for name in names if name for n in _prefixes(name)}
    return sorted(depths, key=depths.__getitem__)


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[: depth + 1]) for depth in range(len(parts)))


def matches(names: Iterable[str], patterns: Iterable[str]) -> bool:
    """Return whether a pattern matches one of these names."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns for name in names)


def layer_path(module: str, depth: int) -> str | None:
    """Return the path of the layer that a module is in: its own path up to the `depth`th number. None outside of layers."""
    parts = module.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbers[depth - 1] + 1]) if len(numbers) >= depth else None
