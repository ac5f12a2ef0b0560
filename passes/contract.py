"""What a pass is: a function over a `Program`, its options, and a contract that is checked before anything runs.

A pass of one's own, whole:

    from zgraph.passes import graph_pass

    @graph_pass("count_matmuls", "counts the matrix products", requires=())
    def count_matmuls(program):
        return {"matmuls": sum("mm" in str(node.target) for node in program.nodes)}

and in a plan: `passes = ["my_package.my_module:count_matmuls after reduce_gradients"]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zgraph.program.program import Level, Program

Statistics = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Contract:
    """What a pass needs, gives and keeps. The manager checks it for a whole pipeline before anything runs.

    `requires` and `provides` are facts about a program, `conflicts` are facts that must not hold before it. `bitwise`
    says that every output keeps its value bit for bit. `level` is the level that the program has after it (None: as
    before).
    """

    name: str
    summary: str
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset()
    conflicts: frozenset[str] = frozenset()
    bitwise: bool = True
    level: Level | None = None


@dataclass(frozen=True)
class Pass:
    """A pass with its options, ready to run: `pass_(program)` changes the program and returns its statistics."""

    contract: Contract
    function: Callable[..., Statistics | None]
    options: Any = None

    @property
    def name(self) -> str:
        return self.contract.name

    def __call__(self, program: Program) -> Statistics:
        return (self.function(program) if self.options is None else self.function(program, self.options)) or {}


@dataclass(frozen=True)
class PassType:
    """A pass whose options are still open; calling it with them (or with none) gives a `Pass`."""

    contract: Contract
    function: Callable[..., Statistics | None]
    options: type | None = None

    def __call__(self, options: Any = None) -> Pass:
        if options is None and self.options is not None:
            options = self.options()
        if self.options is not None and not isinstance(options, self.options):
            raise TypeError(
                f"pass {self.contract.name!r} takes options of type {self.options.__name__}, not {type(options).__name__}"
            )
        if self.options is None and options is not None:
            raise TypeError(f"pass {self.contract.name!r} takes no options")
        return Pass(self.contract, self.function, options)


def graph_pass(
    name: str,
    summary: str,
    *,
    options: type | None = None,
    requires: tuple[str, ...] = (),
    provides: tuple[str, ...] = (),
    conflicts: tuple[str, ...] = (),
    bitwise: bool = True,
    level: Level | None = None,
) -> Callable[[Callable[..., Statistics | None]], PassType]:
    """Make a function over a `Program` a pass. It changes the program in place and returns counts by name (or None).

    `name` is what plans, `zgraph dump --after` and errors call it, `summary` one line for people. `options` is a frozen
    dataclass with defaults; the function gets one as its second argument. The rest is the pass's `Contract`, where a
    fact is one of `zgraph.program.program.Fact`, or any string that passes agree on. The decorated function becomes a
    `PassType`: call it, with options if it has some, to get a `Pass`.
    """
    needed, given, refused = (frozenset(map(str, facts)) for facts in (requires, provides, conflicts))
    contract = Contract(name, summary, needed, given, refused, bitwise, level)

    def decorate(function: Callable[..., Statistics | None]) -> PassType:
        return PassType(contract, function, options)

    return decorate
