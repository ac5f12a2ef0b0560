"""What is said of a wrong name: the right one nearest to it. Loads nothing, so that the command line answers at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint: the known name nearest to a wrong one, or all of them where none is near."""
    names = list(dict.fromkeys(known))
    folded = {n.casefold(): n for n in names}
    near = difflib.get_close_matches(name.casefold(), folded, n=1)
    return f"did you mean {folded[near[0]]!r}?" if near else f"the known ones are {', '.join(names) or 'none'}"
