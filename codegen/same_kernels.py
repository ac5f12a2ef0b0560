"""Tells whether two compilations of one computation run the same code.

*Belief.* Generated kernels round by how their loops are cut and what is fused. Two compiled steps give the same numbers, bit for
bit, if they launch the same kernels as often, and call the same library functions as often; an eager program runs
torch's own operators, of which the graph says everything.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from zgraph.codegen.executable import Executable

_DEFINITION = re.compile(r"^(?P<name>\w+) = async_compile\.(?P<code>.*?^'''[^\n]*\))", re.M | re.S)
_NUMBERED = re.compile(r"\b((?:cpp|triton)\w*?_fused_\w*?)_?\d+\b")


def difference(one: Sequence[Executable], other: Sequence[Executable]) -> str | None:
    """Return, in words, what the second step's executables run otherwise than the first one's; None if they run the
    same."""
    first, second = _launches(one), _launches(other)
    if first == second:
        return None
    more, fewer = second - first, first - second
    return f"{more.total()} launches of kernels or library functions are others, in place of {fewer.total()}"


def _launches(executables: Sequence[Executable]) -> Counter[str]:
    """Return how often each kernel, by its code without its number, and each library function is called."""
    calls: Counter[str] = Counter()
    for executable in executables:
        definitions = _definitions(executable.source) if executable.kernels else {}
        for kernel in executable.kernels:
            # (code of another form is like no other)
            calls[definitions.get(kernel.name, f"{kernel.name} of {id(executable)}")] += kernel.calls
        for called in executable.library:
            calls[called.name] += called.calls
    return calls


def _definitions(source: str) -> dict[str, str]:
    """Return the code of each kernel that a generated source defines, by the kernel's name."""
    return {match["name"]: _NUMBERED.sub(r"\1", match["code"]) for match in _DEFINITION.finditer(source)}
