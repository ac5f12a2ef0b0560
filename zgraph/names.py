"""What is said of a wrong name: the right one nearest to it. Loads nothing, so that the command line answers at once."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint: the known name nearest to a wrong one, or all of them where none is near."""
    names = list(dict.fromkeys(known))
    folded = {n.casefold(): n for n in names}
    near = difflib.get_close_matches(name.casefold(), folded, n=1)
    return f"did you mean {folded[near[0]]!r}?" if near else f"the known ones are {', '.join(names) or 'none'}"


def parameter_names(module: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter, by the first of them: a tied one has several, and plans may use any."""
    first: dict[int, str] = {}
    found: dict[str, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        found.setdefault(first.setdefault(id(param), name), []).append(name)
    return found


def tied_name(pattern: str, module: nn.Module) -> str | None:
    """The first name of a tied parameter that a pattern matches by another of its names; None where it matches none."""
    names = parameter_names(module).items()
    return next((first for first, every in names if any(fnmatch.fnmatchcase(n, pattern) for n in every[1:])), None)
