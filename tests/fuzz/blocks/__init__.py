"""The kinds of block that models are made of. A block is written as source, so that a failing model is a script that anyone can read.

A kind is a function that takes a `Draw` and returns a `Part`; `block` registers it. Its `forward` takes `x` and returns a tensor of the
same shape, in one of three layouts: flat [batch, width], seq [batch, time, width], image [batch, width, 4, 4].
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

LAYOUTS = ("flat", "seq", "image")


@dataclass(frozen=True)
class Part:
    """The source of one block. `{n}` in each text is the block's number, which makes global names its own."""

    init: str  # the body of __init__, after super().__init__()
    forward: str  # the body of forward
    top: str = ""  # what stands before the class
    between: str = (
        ""  # what the caller does between two steps, with the block as `b` and the number of the step as `step`
    )
    state: str = ""  # an expression of what Python remembers, with the block as `b`: compared after each step


@dataclass(frozen=True)
class Draw:
    """What a kind may use: sizes, and choices of its own."""

    layout: str
    width: int
    time: int
    rng: random.Random

    @property
    def d(self) -> int:
        return self.width

    def pick(self, *options: str) -> str:
        return self.rng.choice(options)

    def number(self) -> float:
        return round(self.rng.uniform(0.3, 1.7), 2)


Make = Callable[[Draw], Part]


@dataclass(frozen=True)
class Kind:
    """A registered kind. `border`: it is about what surrounds the numbers (storage, Python, versions), not about an operator."""

    name: str
    layouts: tuple[str, ...]
    make: Make
    border: bool
    smooth: bool  # a small change of the input changes the output little: it can be compared in bfloat16
    remembers: bool  # Python remembers something from call to call
    random: bool  # it draws random numbers, which Inductor's kernels draw otherwise


KINDS: dict[str, Kind] = {}


def block(
    name: str,
    layouts: str = "flat seq image",
    *,
    border: bool = False,
    smooth: bool = False,
    remembers: bool = False,
    random: bool = False,
) -> Callable[[Make], Make]:
    """Register a kind of block under its name, for these layouts."""

    def register(make: Make) -> Make:
        assert name not in KINDS, name
        KINDS[name] = Kind(name, tuple(layouts.split()), make, border, smooth, remembers, random)
        return make

    return register


from . import aliases, arithmetic, attention, layers, python  # noqa: E402, F401  (they register their kinds)
