"""A forecast as formulas: its expressions, their values at given sizes, and its text.

`zgraph.forecast.make_symbolic_forecast` makes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zgraph.errors import SymbolicError
from zgraph.forecast.several_sizes import Point
from zgraph.passes.analysis.costs import Hardware, ring, rounds
from zgraph.plan.plan import Plan

if TYPE_CHECKING:
    import sympy

SHOWN = 16  # kinds of operators that the text lists at most


def symbols() -> dict[str, sympy.Symbol]:
    """Return the symbols of the formulas: "world", "batch" and "sequence"."""
    import sympy

    return {n: sympy.Symbol(n, integer=True, positive=True) for n in ("world", "batch", "sequence")}


@dataclass(frozen=True)
class Kind:
    """Operators of equal cost: each takes max(flops / rate, bytes / memory) + launch seconds."""

    operator: str  # what they call
    count: sympy.Expr  # how many there are
    flops: sympy.Expr  # floating-point operations of each
    bytes: sympy.Expr  # bytes that each reads and writes
    rate: float  # floating-point operations in a second

    def seconds(self, hardware: Hardware) -> sympy.Expr:
        """Return the seconds of all of them together."""
        import sympy

        moved = self.bytes / hardware.memory
        if self.flops == 0:
            return self.count * (moved + (hardware.launch if self.bytes != 0 else 0))
        longer = sympy.Max(self.flops / self.rate, moved, evaluate=False)
        return self.count * (longer + (hardware.launch if self.bytes != 0 else 0))


@dataclass(frozen=True)
class Transfers:
    """All collectives of one kind over one mesh dimension."""

    dim: str  # the mesh dimension
    kind: str  # the collective
    ranks: sympy.Expr  # the ranks of the dimension
    count: sympy.Expr  # how many there are
    bytes: sympy.Expr  # their bytes together, before they are divided among ranks

    def seconds(self, hardware: Hardware) -> sympy.Expr:
        import sympy

        return sympy.sympify(ring(hardware.link(self.dim), self.kind, self.bytes, self.ranks, self.count))


@dataclass(frozen=True)
class Figures:
    """A forecast at some sizes. A step takes between `lower` and `upper` seconds."""

    compute: float  # seconds of the compute stream
    communication: float  # seconds of all links, one after the other
    lower: float  # seconds of the busiest of the compute stream and the links
    upper: float  # seconds of all of them, one after the other
    parameters: int  # bytes of parameters on each rank
    gradients: int  # bytes of gradients on each rank
    states: int  # bytes of optimizer states on each rank
    activations: int  # bytes saved for the backward on each rank

    def __str__(self) -> str:
        memory = ", ".join(f"{n} {getattr(self, n) / 2**20:.1f} MiB" for n in _MEMORY)
        return (
            f"step {self.lower * 1e3:.3f} to {self.upper * 1e3:.3f} ms "
            f"(compute {self.compute * 1e3:.3f} ms, communication {self.communication * 1e3:.3f} ms); {memory}"
        )


_SECONDS = ("compute", "communication", "lower", "upper")
_MEMORY = ("parameters", "gradients", "states", "activations")


@dataclass(frozen=True)
class SymbolicForecast:
    """A forecast as sympy expressions in `world` (ranks), `batch` (rows of one rank) and `sequence`.

    Times are in seconds, sizes in bytes of one rank. If the mesh has no free dimension (-1), `world` is in none of
    them.
    """

    plan: Plan  # the plan
    hardware: Hardware  # the hardware whose rates are in the formulas
    sizes: Point  # the sizes of the inputs that it was made from; its `sequence` is None for a model without one
    kinds: tuple[Kind, ...]  # the operators, on more than the fewest ranks
    transfers: tuple[Transfers, ...]  # the collectives, on more than the fewest ranks
    compute: sympy.Expr  # seconds of the compute stream
    links: dict[str, sympy.Expr]  # seconds of each link, by mesh dimension, or "*" for the hardware's common link
    communication: sympy.Expr  # seconds of all links, one after the other
    lower: sympy.Expr  # seconds of the busiest of the compute stream and the links
    upper: sympy.Expr  # seconds of all of them, one after the other
    parameters: sympy.Expr  # bytes of parameters
    gradients: sympy.Expr  # bytes of gradients
    states: sympy.Expr  # bytes of the plan's optimizer's states
    activations: sympy.Expr  # bytes saved from the forward for the backward

    def at(self, *, world: int, batch: int, sequence: int | None = None) -> Figures:
        """Return the numbers at these sizes. Raises `MeshError` for a world that the plan's mesh does not divide,
        `SymbolicError` for sizes below 1, and for a sequence if the model has none (and the other way round)."""
        self.plan.resolve_mesh(world)
        given = {"batch": batch, "sequence": sequence}
        if (sequence is None) != (self.sizes.sequence is None):
            has = "no sequence" if self.sizes.sequence is None else "a sequence"
            raise SymbolicError(
                f"the forecast is of a model with {has}", hint="give `at` a sequence just if it has one"
            )
        for name, size in given.items():
            if size is not None and size < 1:
                raise SymbolicError(f"{name} is {size}", hint="sizes are 1 or more")
        known = symbols()
        values = {known[n]: v for n, v in {"world": world, **given}.items() if v is not None}
        compute, parts = float(self.compute.subs(values)), [float(e.subs(values)) for e in self.links.values()]
        memory = {n: int(getattr(self, n).subs(values)) for n in _MEMORY}
        return Figures(compute, sum(parts), max([compute, *parts]), compute + sum(parts), **memory)

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain data, with expressions as text that sympy reads."""
        formulas = {n: str(getattr(self, n)) for n in (*_SECONDS, *_MEMORY)}
        kinds = [
            {
                "operator": k.operator,
                "count": str(k.count),
                "flops": str(k.flops),
                "bytes": str(k.bytes),
                "rate": k.rate,
            }
            for k in self.kinds
        ]
        transfers = [
            {"dim": t.dim, "kind": t.kind, "ranks": str(t.ranks), "count": str(t.count), "bytes": str(t.bytes)}
            for t in self.transfers
        ]
        sizes = {"batch": self.sizes.batch, "sequence": self.sizes.sequence}
        return {"sizes": sizes, "formulas": formulas, "kinds": kinds, "transfers": transfers}

    def __str__(self) -> str:
        return _text(self)


# -- text -----------------------------------------------------------------------------------------------------------------
def _text(forecast: SymbolicForecast) -> str:
    import sympy

    hardware, plan, world, batch, sequence = forecast.hardware, forecast.plan, *symbols().values()
    free = -1 in plan.mesh.values()
    known = math.prod(size for size in plan.mesh.values() if size != -1)
    ranks = known * 2 if free else known
    names = [*(["world"] if free else []), "batch", *(["sequence"] if forecast.sizes.sequence is not None else [])]
    lines = [
        f"forward and backward on {hardware.name}, by {', '.join(names)} (batch: rows of one rank)",
        "",
        f"compute [s] = sum of count * (Max(FLOP / rate, bytes / {hardware.memory:.4g}) + {hardware.launch:.4g})",
    ]
    sizes = {world: ranks, batch: forecast.sizes.batch, sequence: forecast.sizes.sequence}
    values = {symbol: size for symbol, size in sizes.items() if size is not None}
    ranked = sorted(forecast.kinds, key=lambda k: -float(k.seconds(hardware).subs(values)))
    rows = [("count", "operator", "FLOP", "rate", "bytes")]
    rows += [
        (str(k.count), k.operator, str(k.flops), f"{k.rate:.3g}" if k.flops != 0 else "", str(k.bytes))
        for k in ranked[:SHOWN]
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines += [f"  {a:>{widths[0]}}  {b:{widths[1]}}  {c:{widths[2]}}  {d:{widths[3]}}  {e}" for a, b, c, d, e in rows]
    if len(ranked) > SHOWN:
        lines.append(f"  and {len(ranked) - SHOWN} kinds that take less at {forecast.sizes}, on {ranks} rank(s)")
    if forecast.compute.has(sympy.Piecewise):
        lines.append(f"  (not on {known} rank(s), where other operators run)")
    works = [(t, hardware.link(t.dim)) for t in forecast.transfers]
    lines += [
        f"  and {link.start:.4g} for each {t.kind} over {t.dim}, {link.work:.4g} for each of its bytes"
        for t, link in works
        if link.start or link.work
    ]
    lines += ["", "communication [s] = sum of (ranks - 1) * rounds * (latency * transfers + bytes / ranks / bandwidth)"]
    for t in forecast.transfers:
        link = hardware.link(t.dim)
        lines.append(
            f"  {t.kind} over {t.dim}: {t.ranks} ranks, {rounds(link, t.kind):g} round(s), latency {link.latency:.4g}, "
            f"bandwidth {link.bandwidth:.4g}, {t.count} transfers"
        )
        lines.append(f"    bytes {t.bytes}")
    if not forecast.transfers:
        lines.append("  none")
    lines += ["", *(f"{name} [bytes] = {getattr(forecast, name)}" for name in _MEMORY)]
    lines += ["", "a step takes at least Max(compute, communication), at most compute + communication"]
    return "\n".join(lines)
