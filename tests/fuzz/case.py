"""A case: all that a seed decides. It is plain data, so that a smaller case is the same data with something left out."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass, replace
from typing import Any

from . import plans
from .blocks import KINDS, LAYOUTS
from .scenarios import ARGUMENTS, INPUTS, LOSSES, OPTIMIZERS, OPTIONS, OUTPUTS, STYLES, fits

RUNS = ("eager", "inductor", "virtual", "ranks")
"""Kinds of run: in this process without a process group by either backend, on virtual ranks, on real ones."""
SHARES = (45, 15, 28, 12)

WAYS = ("plain", "plain", "residual", "residual", "parallel", "repeated", "tied", "checkpoint", "scaled")
"""How a line of the model's forward uses its blocks."""


@dataclass(frozen=True)
class Line:
    """One line of the model's forward: `way` it uses its blocks, of which `parallel` has two. `seed` is of their own choices."""

    way: str
    kinds: tuple[str, ...]
    seed: int


@dataclass(frozen=True)
class Case:
    """See `draw`. `plan` are the fields of the plan, `world` is the number of ranks, 1 without any."""

    seed: int
    run: str
    layout: str
    tokens: bool
    rows: int
    width: int
    lines: tuple[Line, ...]
    loss: str
    output: str
    argument: str | None
    style: str
    options: tuple[str, ...]
    inputs: tuple[str, ...]
    optimizer: str | None
    plan: tuple[tuple[str, Any], ...]
    world: int
    double: bool
    steps: int = 3

    @property
    def mesh(self) -> dict[str, int]:
        return dict(dict(self.plan).get("mesh", {}))

    @property
    def time(self) -> int:
        return 8

    @property
    def data_ranks(self) -> int:
        return math.prod(self.mesh.get(d, 1) for d in ("dp", "replicate"))


def run_of(seed: int) -> str:
    """The kind of run that a seed has."""
    return random.Random(f"run {seed}").choices(RUNS, SHARES)[0]


def draw(seed: int) -> Case:
    """The case that a seed is. Only `random.Random` of the seed is asked, so it is the same on each machine."""
    rng = random.Random(seed)
    run = run_of(seed)
    mesh, world = plans.mesh(rng, run)
    inner = sorted(set(mesh) & {"tp", "cp", "pp"})
    layout = "seq" if "cp" in mesh else rng.choices(LAYOUTS, (4, 5, 3) if not inner else (4, 6, 1))[0]
    low = run in ("eager", "inductor", "virtual") and rng.random() < 0.08
    border = {"eager": 0.45, "inductor": 0.35, "virtual": 0.15, "ranks": 0.3}[run]
    known = [
        k
        for k in KINDS.values()
        if layout in k.layouts
        and ((k.smooth and not k.border) or not low)
        and not (k.random and (run == "inductor" or inner))
        and not (k.remembers and run == "virtual")
    ]
    weights = [
        border / sum(k.border for k in known) if k.border else (1 - border) / sum(not k.border for k in known)
        for k in known
    ]
    count = rng.randint(1, 2) if run == "inductor" else rng.randint(3, 5) if "pp" in mesh else rng.randint(1, 4)
    lines = []
    for _ in range(count):
        way = rng.choice(WAYS)
        kinds = rng.choices(known, weights, k=2 if way == "parallel" else 1)
        lines.append(Line(way, tuple(k.name for k in kinds), rng.randrange(10**6)))
    output = rng.choice(list(OUTPUTS))
    outside = run == "virtual" and output in ("out", "nested")
    case = Case(
        seed=seed,
        run=run,
        layout=layout,
        tokens=layout == "seq" and rng.random() < 0.3 and not low,
        rows=rng.choice([4, 8]) if mesh else 4,
        width=4 if layout == "image" else rng.choice([8, 8, 16]),
        lines=tuple(lines),
        loss=rng.choice(
            [n for n, x in LOSSES.items() if (x.smooth or not low) and not (outside and re.search(r"\by\b", x.text))]
        ),
        output=output,
        argument=rng.choice(list(ARGUMENTS)) if rng.random() < (0.3 if not mesh else 0.08) and not low else None,
        style="usual",
        options=(),
        inputs=tuple(sorted(n for n in INPUTS if rng.random() < 0.12)) if not inner else (),
        optimizer=rng.choice(list(OPTIMIZERS)),
        plan=(),
        world=world,
        double=not low and rng.random() < 0.5,
    )
    case = replace(case, plan=plans.draw(rng, case, mesh, low))
    if dict(case.plan).get("optimizer") is not None:
        case = replace(case, optimizer=None)
    styles = [n for n in STYLES if fits(n, case)]
    case = replace(case, style=rng.choice(styles))
    options = tuple(n for n in OPTIONS if rng.random() < 0.08 and fits(n, case))
    return replace(case, options=options)
