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
    """What a pass requires of a program, provides, and must not meet. The manager checks the contracts of a whole
    pipeline before anything runs.
    """

    name: str  # what plans, `zgraph dump --after` and errors call the pass
    summary: str  # one line for people
    requires: frozenset[str] = frozenset()  # facts that must hold before the pass
    provides: frozenset[str] = frozenset()  # facts that hold after the pass
    conflicts: frozenset[str] = frozenset()  # facts that must not hold before the pass
    bitwise: bool = True  # whether every output keeps its value bit for bit
    level: Level | None = None  # the level of the program after the pass, None if it stays the same


@dataclass(frozen=True)
class Pass:
    """A pass with its options, ready to run: `pass_(program)` changes the program and returns its statistics."""

    contract: Contract  # what the pass requires, provides and must not meet
    function: Callable[..., Statistics | None]  # takes the program, and the options if there are any
    options: Any = None  # the options that the function gets, None if it takes none

    @property
    def name(self) -> str:
        return self.contract.name

    def __call__(self, program: Program) -> Statistics:
        return (self.function(program) if self.options is None else self.function(program, self.options)) or {}


@dataclass(frozen=True)
class PassType:
    """A pass whose options are not chosen yet; calling it with them (or with none) gives a `Pass`."""

    contract: Contract  # what the pass requires, provides and must not meet
    function: Callable[..., Statistics | None]  # takes the program, and the options if there are any
    options: type | None = None  # the dataclass of the options, None if the pass takes none

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
    """Make a pass of a function over a `Program` that changes the program in place and returns counts by name (or
    None).

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
