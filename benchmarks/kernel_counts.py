"""What Inductor makes of a program: kernels, the bytes that they move, and which fusions are one kernel; beside what has to be moved.

Bytes. *Library calls* (products and attention) read their operands and write their results. All else could at best be
one loop, which reads once what it needs of the program's inputs and of the library calls' results, and writes once what
a library call or the caller reads. That is a lower bound: a residual that is read before and after attention counts
once, and what a forward only writes for its backward does not count.

Places. Operators between the same library calls that read each other's values could be one kernel; they are a place.
"""

from __future__ import annotations

import logging
import operator
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fake_h200
from torch import fx
from torch._inductor import config, ir
from torch._inductor import scheduler as inductor_scheduler
from torch._inductor.dependencies import WeakDep
from torch.utils._ordered_set import OrderedSet

from zgraph.codegen import inductor
from zgraph.passes.analysis.costs import CPU, Costs, computes, size_of
from zgraph.passes.analysis.fusion import readers
from zgraph.passes.analysis.slices import PRODUCTS
from zgraph.passes.spmd.sharding_rules import ATTENTION
from zgraph.program.aliases import made_once, root_of
from zgraph.program.node import info
from zgraph.program.program import OutputRole, Program
from zgraph.torch_compat import inductor_code

NORM, ACTIVATION, ROTARY = "norm with residual", "bias, GELU or SwiGLU", "rotary"
DROPOUT, SOFTMAX, LOSS = "bias, dropout, residual", "softmax, scale, mask", "cross entropy"
# What other libraries have by hand: operators that belong to it, by the last name of their module and by their own.
FUSIONS = (
    (NORM, r"norm|ln_\d", r""),
    (ACTIVATION, r"^(intermediate_)?act(_fn)?$", r""),
    (ROTARY, r"attn|attention", r"^neg$"),
    (DROPOUT, r"dropout", r"^mul$"),
    (SOFTMAX, r"attn|attention", r"^(amax|exp|fma|_softmax)$"),
    (LOSS, r"^$", r"^(amax|exp|log|gather|scatter)$"),
)
NAMES = tuple(name for name, _, _ in FUSIONS)


@dataclass(frozen=True)
class Fusion:
    """What became of one of `FUSIONS` in a program."""

    name: str  # its name
    places: int  # places that have it
    kernels: int  # kernels that compute these places
    refusals: dict[str, int]  # why Inductor did not make two of a place's kernels one, and how often


@dataclass(frozen=True)
class Counts:
    """What Inductor makes of the forward or the backward of a layer."""

    operators: int  # that compute something
    library: int  # library calls
    kernels: int  # all else that is launched; on CPU, loops
    moved: int  # bytes, by Inductor's count
    estimate: int  # bytes, by zgraph's own count, which its simulator uses
    least: int  # bytes that have to be moved
    library_moved: int  # bytes of `moved` that library calls read and write
    library_least: int  # bytes of `least` that library calls read and write
    for_backward: int  # bytes that the forward writes for the backward alone
    fusions: tuple[Fusion, ...]  # those that the program has


# -- what has to be moved ---------------------------------------------------------------------------------------------
def calls_of(program: Program) -> list[fx.Node]:
    return [n for n in program.graph.nodes if computes(n)]


def is_library(node: fx.Node) -> bool:
    return node.target in PRODUCTS or node.target in ATTENTION


def writers(nodes: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return the storages of these nodes, each once, with the node that writes it."""
    storages = dict.fromkeys(root_of(n) for n in nodes)
    return {s: root_of(s.args[0]) if s.target is operator.getitem else s for s in storages}  # type: ignore[arg-type]


def bytes_read(storage: fx.Node, by: Iterable[fx.Node]) -> int:
    """Return the bytes of a storage that these operators read: of views of it, at most the whole."""
    views = {o for reader in by for o in reader.all_input_nodes if root_of(o) is storage}
    return min(size_of(storage), sum(size_of(v) for v in views))


@dataclass(frozen=True)
class Least:
    """The bytes that a program has to move."""

    library: int  # by library calls
    rest: int  # by all else
    for_backward: int  # what it writes besides, for the backward alone


def least(program: Program) -> Least:
    """Return what has to be moved: see the top of this file."""
    library = [n for n in calls_of(program) if is_library(n)]
    rest = [n for n in calls_of(program) if not is_library(n)]
    own = set(rest)
    by_library = sum(size_of(n) + sum(bytes_read(s, [n]) for s in writers(n.all_input_nodes)) for n in library)
    operands = writers(o for n in rest for o in n.all_input_nodes)
    reads = sum(bytes_read(s, rest) for s, writer in operands.items() if writer not in own)
    results = [n for port, n in program.output_items() if n is not None and port.role is not OutputRole.SAVED]
    needed = writers([*(o for n in library for o in n.all_input_nodes), *results])
    saved = writers(n for port, n in program.output_items() if port.role is OutputRole.SAVED)
    written = sum(size_of(s) for s, writer in needed.items() if writer in own)
    besides = sum(size_of(s) for s, writer in saved.items() if writer in own and s not in needed)
    return Least(by_library, reads + written, besides)


# -- places -----------------------------------------------------------------------------------------------------------
def places(program: Program) -> list[set[fx.Node]]:
    """Return the operators between library calls, those that could be one loop in one set."""
    calls = calls_of(program)
    sources = {n: list(writers(n.all_input_nodes).values()) for n in calls}
    level = _levels(program, sources)
    loops = [n for n in calls if not is_library(n) and not made_once(n)]  # (seeds are drawn by a call of their own)
    place = {n: {n} for n in loops}
    for node in place:
        for source in sources[node]:
            if source in place and level[source] == level[node] and place[source] is not place[node]:
                place[node] |= place[source]
                place.update(dict.fromkeys(place[node], place[node]))
    return list({id(nodes): nodes for nodes in place.values()}.values())


def _levels(program: Program, sources: dict[fx.Node, list[fx.Node]]) -> dict[fx.Node, int]:
    """Return how many library calls are on the longest way to each operator, by `sources`: the operators that write what
    each reads. One that only other operators between library calls read counts with the first of these: it can be
    computed there."""
    level: dict[fx.Node, int] = {}
    for node in sources:
        level[node] = max((level[s] + is_library(s) for s in sources[node] if s in level), default=0)
    results = set(writers(n for n in program.output_values() if n is not None).values())
    for node in reversed(sources):
        users = [u for u in readers(node) if u in level]
        if not is_library(node) and node not in results and users and not any(map(is_library, users)):
            level[node] = min(level[u] for u in users)
    return level


def fusions_of(place: Iterable[fx.Node]) -> set[str]:
    """Return which of `FUSIONS` a place has. (Dropout behind a softmax or an activation is part of these, as is what a
    softmax negates.)"""
    names = {name for node in place for name in _fusions_of(node)}
    return names - ({DROPOUT, ROTARY} if SOFTMAX in names else {DROPOUT} if ACTIVATION in names else set())


def _fusions_of(node: fx.Node) -> Iterator[str]:
    packet = getattr(node.target, "overloadpacket", None)
    own = packet.__name__ if packet is not None else ""
    module = info(node).module.rsplit(".", 1)[-1].lower()
    for name, modules, operators in FUSIONS:
        if re.search(modules, module) and re.search(operators, own):
            yield name


# -- what Inductor makes ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Launch:
    """A kernel or a library call."""

    library: bool  # whether it is a library call
    operators: frozenset[str]  # the program's operators in it
    steps: frozenset[str]  # Inductor's own names of what is fused in it
    moved: int  # the bytes that it reads and writes


@dataclass
class Generated:
    """What Inductor makes of the programs that are compiled while `generating`."""

    launches: list[Launch] = field(default_factory=list)  # all kernels and library calls
    refusals: list[tuple[set[str], set[str], str]] = field(default_factory=list)  # (steps, steps, why they stay apart)

    def list_launches(self, nodes: list[Any]) -> list[Any]:
        """Note what is launched after all fusion; a pass over Inductor's scheduler, which changes nothing."""
        for node in nodes:
            seeds = isinstance(node.node, ir.RandomSeeds)
            moved = 0 if seeds or isinstance(node, inductor_scheduler.NopKernelSchedulerNode) else _moved(node)
            if moved:
                operators = frozenset(o.name for part in node.get_nodes() for o in part.node.origins)
                steps = frozenset(part.get_name() for part in node.get_nodes())
                self.launches.append(Launch(node.is_extern(), operators, steps, moved))
        return nodes

    def reason(self, one: Launch, other: Launch) -> str | None:
        """Return why Inductor did not make two kernels one: what it said last; None if it said nothing."""
        for first, second, why in reversed(self.refusals):
            if (first <= one.steps and second <= other.steps) or (first <= other.steps and second <= one.steps):
                return why
        return None


def _moved(node: Any) -> int:
    """Return Inductor's count of the bytes that a kernel reads and writes, without the reads that only pin its place."""
    before = node.read_writes
    node.read_writes = replace(before, reads=OrderedSet(r for r in before.reads if not isinstance(r, WeakDep)))
    try:
        return node.get_read_write_buffers_sizes_impl(include_reads=True, include_writes=True)
    finally:
        node.read_writes = before


class _Refusals(logging.Handler):
    """Lists what Inductor's log of fusions says."""

    def __init__(self, generated: Generated) -> None:
        super().__init__(logging.DEBUG)
        self.generated = generated

    def emit(self, record: logging.LogRecord) -> None:
        why = record.msg
        if isinstance(why, inductor_scheduler.WhyNoFuse):
            reason = why.reason.partition(" (%s")[0].partition(": %s")[0]
            self.generated.refusals.append((set(why.name1.split("_")), set(why.name2.split("_")), reason))


@contextmanager
def generating() -> Iterator[Generated]:
    """Let Inductor generate code, whole (equal parts would be counted once), and load none of it."""
    generated = Generated()
    log, handler = inductor_scheduler.fusion_log, _Refusals(generated)
    level, propagates = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    log.propagate = False
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            fake_h200.generating_only(Path(folder)),
            patch.object(inductor_code, "rebuild_inductor", lambda *code: (None, {})),
            patch.object(inductor, "sections", lambda *program: []),
            config.patch(fx_graph_cache=False, _post_fusion_custom_pass=generated.list_launches),
        ):
            yield generated
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagates


# -- both -------------------------------------------------------------------------------------------------------------
def counts(program: Program, generated: Generated) -> Counts:
    """Return the counts of a program and of what Inductor made of it. Raises `RuntimeError` where these are not the
    same library calls: the least would then be that of another program."""
    calls = calls_of(program)
    kernels = [launch for launch in generated.launches if not launch.library]
    library = [launch for launch in generated.launches if launch.library]
    wanted = [n.name for n in calls if is_library(n)]
    if len(library) != len(wanted):
        raise RuntimeError(
            f"{program.name} has library calls {wanted}, its code {[sorted(c.operators) for c in library]}"
        )
    must = least(program)
    costs = Costs(CPU)
    moved = sum(launch.moved for launch in library)
    return Counts(
        operators=len(calls),
        library=len(library),
        kernels=len(kernels),
        moved=moved + sum(launch.moved for launch in kernels),
        estimate=sum(costs.traffic(n) for n in calls),
        least=must.library + must.rest,
        library_moved=moved,
        library_least=must.library,
        for_backward=must.for_backward,
        fusions=tuple(_fusions(program, kernels, generated)),
    )


def _fusions(program: Program, kernels: list[Launch], generated: Generated) -> Iterator[Fusion]:
    written = [_written(program, kernel) for kernel in kernels]
    having = [({n.name for n in place}, fusions_of(place)) for place in places(program)]
    for name in NAMES:
        where = [names for names, fusions in having if name in fusions]
        in_place = [[k for k, own in zip(kernels, written, strict=True) if own & names] for names in where]
        together = {kernel for own in in_place for kernel in own}
        refusals = Counter(
            generated.reason(one, other) or "it did not try" for own in in_place for one, other in combinations(own, 2)
        )
        if where:
            yield Fusion(name, len(where), len(together), dict(refusals))


def _written(program: Program, kernel: Launch) -> set[str]:
    """Return the operators of a kernel whose values nothing else in it reads (others may be computed elsewhere too)."""
    own = [n for n in program.graph.nodes if n.name in kernel.operators]
    return {n.name for n in own if not any(r.name in kernel.operators for r in readers(n))}
