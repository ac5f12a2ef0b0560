"""Where a captured program is cut into pipeline stages.

`find_cuts` decides, once, on the first training program: by blocks, parameters, modules of a class or of a name, or
simulated time. Its result, `Cuts`, can be compared between ranks and applied (`assign`) to the program of every other
signature of the model: it counts the reads of parameters, which are the same in all, and not other operators, which
depend on shapes and modes.

"time" and "parameters" are min-max partitions of a row into contiguous parts: exact dynamic programs over the places
between anchors, in O(stages x anchors²) (Hansen and Lih, 1992, "Improved algorithms for partitioning problems in
parallel, pipelined, and distributed computing"). Since the near sides of all minimum cuts are nested, what a stage
takes depends on its own two cuts only. Of all partitions with the smallest maximum the one whose stages receive fewest
bytes is taken: each stage counts a value that it reads of earlier stages once.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import fx

from zgraph.errors import PlanError
from zgraph.names import did_you_mean
from zgraph.passes.analysis.costs import Costs, size_of
from zgraph.passes.analysis.repeated_layers import repeated_layers
from zgraph.passes.stages.min_cuts import Anchor, AnchorChain
from zgraph.passes.stages.stage_costs import Load, loads_of
from zgraph.program.program import Program
from zgraph.record import Record, joined
from zgraph.units import shown_bytes

Table = NDArray[np.float64]
EQUAL = 1e-9  # relative: times that differ by less are sums of the same terms, rounded differently


class CutPosition(Record, frozen=True):
    """One cut of a model's forward, in terms that hold for all of the model's programs."""

    reads: int  # the number of parameters' reads before the cut
    passed: int  # how many of the anchors between the last read before it and the next read come before it
    between: int  # the number of these anchors


class Cuts(Record, frozen=True):
    """Where a model is cut."""

    reads: tuple[str, ...]  # the parameters that its forward reads, in order; the places count them
    places: tuple[CutPosition, ...]  # in order, one fewer than stages

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.places) + 1

    @property
    def fingerprint(self) -> str:
        """A hash that is equal for cuts of models that read the same parameters in the same order."""
        return hashlib.sha256("\n".join(_settled(self.reads)).encode()).hexdigest()


@dataclass(frozen=True)
class StageBudget:
    """The memory that a stage may take, for "time": `states` times its parameters' bytes plus `in_flight` times what a
    micro-batch saves.
    """

    budget: int  # bytes that a stage may take (stages of one rank share its memory: this is for one of them)
    # what a rank holds for each byte of parameters: the weight, its gradient, optimizer states, as far as not sharded
    states: float
    in_flight: tuple[int, ...]  # how many micro-batches wait for their backward at most, by stage


def assign(program: Program, cuts: Cuts) -> dict[fx.Node, int]:
    """Return the stage of each operator of the program's forward, never smaller than that of an operand.

    Operators that every stage makes for itself (`zgraph.passes.stages.min_cuts.free_nodes`) have the first stage that
    reads them. Raises `PlanError` if this program does not read the parameters that `cuts` were found by, or would have
    a stage without anything to do, or if a cut would separate a random operator from its state, or a buffer that
    changes from its readers.
    """
    line = AnchorChain(program)
    positions = _positions(line, cuts)
    _refuse(line, positions)
    return line.assign(positions)


def find_cuts(
    program: Program,
    stages: int,
    how: str | tuple[str, ...],
    costs: Costs,
    *,
    types: Mapping[str, str] | None = None,
    room: StageBudget | None = None,
) -> Cuts:
    """Return the cuts of a captured program into this number of stages.

    `how` is one of

    - "uniform": equal numbers of the model's repeated blocks (`zgraph.passes.analysis.repeated_layers`);
    - "parameters": the most parameter elements of a stage are as few as can be; one that several stages read counts in each;
    - "type:REGEX": equal numbers of modules whose class name matches, in any case, anywhere in the name (DeepSpeed's). `types` has the class
      name of each module by path;
    - "time": the slowest stage's simulated seconds, of forward and backward, are as few as can be, within `room`;
    - paths of modules, each the first of a stage but the first one, in the order in which the model calls them.

    Raises `PlanError` (`where` "partition") for anything else, for more stages than there can be, and for cuts that `assign` would refuse;
    (`where` "memory_budget") if nothing fits into `room`, with the smallest budget that would do.
    """
    line = AnchorChain(program)
    _refuse_number(stages, len(line.anchors), "operators that read parameters or do real arithmetic")
    if not isinstance(how, str):
        positions = _named(line, stages, how, types or {})
    elif how == "uniform":
        positions = _equal(repeated_layers(line.anchors), stages, "blocks")
    elif how.startswith("type:"):
        positions = _equal(_matching(line, how.removeprefix("type:"), types or {}), stages, f"modules of {how}")
    elif how in ("time", "parameters"):
        positions = _searched(line, stages, how, costs, room)
    else:
        raise PlanError(
            f"there is no partition {how!r}",
            where="partition",
            hint=did_you_mean(how, ("uniform", "parameters", "type:REGEX", "time")),
        )
    _refuse(line, positions)
    places = tuple(_place(line.anchors, q) for q in positions)
    return Cuts(reads=_reads(line.anchors), places=places)


def _refuse_number(stages: int, most: int, of: str, why: str | None = None) -> None:
    if stages > max(most, 1):
        raise PlanError(
            f"the model can't be cut into {stages} stages: {max(most, 1)} at most",
            where="partition",
            why=why or f"it has {most} {of}",
            hint=f"mesh.pp times virtual_stages of {max(most, 1)} or fewer",
        )


def _refuse(line: AnchorChain, positions: Iterable[int]) -> None:
    for position in positions:
        why = line.refusal(position)
        if why is not None:
            anchor = line.anchors[position]
            raise PlanError(
                f"the model can't be cut before {anchor.module or 'the model'} ({anchor.node.name})",
                where="partition",
                why=why,
                hint="cut elsewhere: partition=(module paths) says where",
            )


# -- places in other programs of the same model --------------------------------------------------------------------------
def _reads(anchors: Sequence[Anchor]) -> tuple[str, ...]:
    return tuple(name for anchor in anchors for name in anchor.params)


def _place(anchors: Sequence[Anchor], position: int) -> CutPosition:
    start = position
    while start and not anchors[start - 1].params:
        start -= 1
    end = next((i for i in range(position, len(anchors)) if anchors[i].params), len(anchors))
    return CutPosition(reads=len(_reads(anchors[:position])), passed=position - start, between=end - start)


def _positions(line: AnchorChain, cuts: Cuts) -> list[int]:
    """Return the positions of `cuts` in a program; if it has other operators between the same reads, at the same share
    of them.
    """
    anchors, reads = line.anchors, _reads(line.anchors)
    own_reads, cut_reads = _settled(reads), _settled(cuts.reads)
    if own_reads != cut_reads:
        positions = _between_parameters(anchors, cuts)
        if positions is None:
            at = next(
                (i for i, (a, b) in enumerate(zip(own_reads, cut_reads, strict=False)) if a != b),
                min(len(own_reads), len(cut_reads)),
            )
            names = [repr(s[at]) if at < len(s) else "none" for s in (cut_reads, own_reads)]
            raise PlanError(
                "the model reads other parameters here than where its stages were cut",
                where="partition",
                why=f"read {at + 1} was of {names[0]} and is of {names[1]} in {line.program.name!r}",
                hint="each stage holds the parameters that it read then: let the model call the same modules whatever its inputs",
            )
        return _parted(line, positions)
    positions = []
    passed = list(itertools.accumulate((len(a.params) for a in anchors), initial=0))
    for place in cuts.places:
        starts = [q for q, count in enumerate(passed) if count == place.reads]
        before = Counter(cuts.reads[: place.reads])
        if not starts or Counter(reads[: place.reads]) != before:
            raise PlanError(
                f"stages were cut behind the read of {cuts.reads[place.reads - 1]!r}, where {line.program.name!r} has one operator",
                where="partition",
                why="it reads this parameter with others that are of the next stage",
                hint="cut between modules: partition=(module paths)",
            )
        between = len(starts) - 1
        positions.append(starts[0] + (round(place.passed * between / place.between) if place.between else 0))
    return _parted(line, positions)


def _between_parameters(anchors: Sequence[Anchor], cuts: Cuts) -> list[int] | None:
    """Return the positions of cuts in a program that reads fewer parameters, or in another order (an evaluation without
    a head that only trains).

    Each comes after all anchors with a parameter that only the stages before it read, and before all with one that only
    the stages after it read. None where there is no such position.
    """
    if any(set(a.params) - set(cuts.reads) for a in anchors):
        return None
    positions = []
    for place in cuts.places:
        before, behind = set(cuts.reads[: place.reads]), set(cuts.reads[place.reads :])
        low = max((i + 1 for i, a in enumerate(anchors) if set(a.params) - behind), default=0)
        high = min((i for i, a in enumerate(anchors) if set(a.params) - before), default=len(anchors))
        if low > high:
            return None
        positions.append(high)
    return positions


def _parted(line: AnchorChain, positions: list[int]) -> list[int]:
    """Return these positions. Raises `PlanError` where there is nothing between two."""
    bounds = [0, *positions, len(line.anchors)]
    if any(a >= b for a, b in itertools.pairwise(bounds)):
        raise PlanError(
            f"a stage would have nothing to do in {line.program.name!r}",
            where="partition",
            why="where the stages were cut, between reads of parameters, this program has fewer operators",
            hint="cut between modules: partition=(module paths)",
        )
    return positions


def _settled(reads: Sequence[str]) -> list[str]:
    """Return reads with those of one module in order of their names: whether a weight or a bias is read first depends
    on the operator.
    """
    ordered_reads: list[str] = []
    run: list[str] = []
    for name in reads:
        if run and run[-1].rpartition(".")[0] != name.rpartition(".")[0]:
            ordered_reads += sorted(run)
            run = []
        run.append(name)
    return ordered_reads + sorted(run)


# -- cuts that a plan names --------------------------------------------------------------------------------------------
def _firsts(line: AnchorChain) -> dict[str, int]:
    """Return the first anchor of each module, by all of its names."""
    firsts: dict[str, int] = {}
    for i, anchor in enumerate(line.anchors):
        for path in line.program.modules_around(anchor.node):
            firsts.setdefault(path, i)
    return firsts


def _named(line: AnchorChain, stages: int, paths: Sequence[str], types: Mapping[str, str]) -> list[int]:
    firsts = _firsts(line)
    faults = [
        PlanError(
            f"the model has no module {path!r}",
            where=f"partition.{i}",
            hint=did_you_mean(path, [*firsts, *filter(None, types)]),
        )
        for i, path in enumerate(paths)
        if path not in firsts and path not in types
    ]
    if len(paths) + 1 != stages:
        faults.append(
            PlanError(
                f"{len(paths)} modules begin {len(paths) + 1} stages, and there are to be {stages}",
                where="partition",
                hint="name the first module of each stage but the first one",
            )
        )
    if faults:
        raise joined(faults)
    positions: list[int] = []
    for i, path in enumerate(paths):
        where = f"partition.{i}"
        at = firsts.get(path)
        if at is None:
            raise PlanError(
                f"no stage can begin with {path!r}",
                where=where,
                why="the forward reads none of its parameters and does no arithmetic in it",
                hint="name the first module behind it that has parameters",
            )
        if at == 0:
            raise PlanError(f"nothing comes before {path!r}", where=where, why="the first stage would be empty")
        if positions and at <= positions[-1]:
            raise PlanError(
                f"{path!r} does not come after {paths[i - 1]!r}",
                where=where,
                why="the model calls them in another order",
                hint="name modules in the order in which the forward calls them",
            )
        positions.append(at)
    return positions


def _matching(line: AnchorChain, pattern: str, types: Mapping[str, str]) -> list[int]:
    """Return the first anchors of the modules whose class name matches."""
    try:
        regex = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise PlanError(f"{pattern!r} is no regular expression", where="partition", why=str(error)) from error
    paths = [path for path, name in types.items() if regex.search(name)]
    if not paths:
        raise PlanError(
            f"no module's class name matches {pattern!r}", where="partition", hint=did_you_mean(pattern, types.values())
        )
    firsts = _firsts(line) | ({"": 0} if line.anchors else {})
    return sorted({firsts[path] for path in paths if path in firsts})


def _equal(starts: Sequence[int], stages: int, of: str) -> list[int]:
    """Return cuts between blocks that begin at `starts`, so that stages have equally many, or the earlier ones one
    more.
    """
    _refuse_number(stages, len(starts), of)
    return [starts[-(-k * len(starts) // stages)] for k in range(1, stages)]


# -- cuts that are found -------------------------------------------------------------------------------------------------
def _searched(line: AnchorChain, stages: int, how: str, costs: Costs, room: StageBudget | None) -> list[int]:
    points = [0, *line.positions, len(line.anchors)]
    _refuse_number(stages, len(points) - 1, "places for cuts", why=next((b.why for b in line.bonds), None))
    sides = [line.near(q) for q in line.positions]
    at = dict.fromkeys(line.solid, len(points) - 1)
    for i, side in reversed(list(enumerate(sides, 1))):
        at.update(dict.fromkeys(side.near, i))
    loads = loads_of(line, costs)
    amounts = _table(loads.elements if how == "parameters" else [*loads.forward, *loads.backward], at, len(points))
    by_stage = [amounts] * stages
    if how == "time" and room is not None:
        parameter_bytes, saved_bytes = _table(loads.parameters, at, len(points)), _table(loads.saved, at, len(points))
        needs = [parameter_bytes * room.states + saved_bytes * n for n in room.in_flight]
        by_stage = [np.where(need <= room.budget, amounts, np.inf) for need in needs]
        least = _least(needs)
        if np.isinf(_least(by_stage)):
            raise PlanError(
                f"no partition into {stages} stages is within {shown_bytes(room.budget)} a stage",
                where="memory_budget",
                why=f"{shown_bytes(least)} is the least that the largest stage can do with",
                hint=f"memory_budget={int(np.ceil(least))}, more stages, recompute, or offload",
            )
    end = len(points) - 1
    sent = [(size_of(n), at[n], {end if r is None else at[r] for r in rs} - {at[n]}) for n, rs in line.readers.items()]
    return [points[i] for i in _lightest(by_stage, _least(by_stage) * (1 + EQUAL), _between(sent, len(points)))]


def _table(loads: Iterable[Load], at: Mapping[fx.Node, int], count: int) -> Table:
    """Return [a, b]: the amount that a stage between points `a` and `b` takes, for operators that are `at` their
    points; infinite if b <= a.
    """
    return _between([(load.amount, 0, {at[n] for n in load.nodes}) for load in loads], count)


def _between(amounts: Iterable[tuple[float, int, set[int]]], count: int) -> Table:
    """Return [a, b]: the sum of the amounts whose start is not after `a` and that have another point after `a` and not
    after `b`.

    It is infinite if b <= a.
    """
    table = np.zeros((count + 1, count + 1))
    for amount, start, others in amounts:
        before = start
        for point in sorted(others):  # (each counts for the a from the point before it on)
            table[before, point] += amount
            table[point, point] -= amount
            before = point
    table = table.cumsum(axis=0).cumsum(axis=1)[:count, :count]
    table[np.tril_indices(count)] = np.inf
    return table


def _least(by_stage: Sequence[Table]) -> float:
    """Return the smallest maximum over stages of what each takes."""
    best = by_stage[0][0]
    for table in by_stage[1:]:
        best = np.maximum(best[:, None], table).min(axis=0)
    return float(best[-1])


def _lightest(by_stage: Sequence[Table], limit: float, received: Table) -> list[int]:
    """Return the points of the cuts whose stages receive fewest bytes, among cuts for which no stage takes more than
    `limit`.
    """
    total = np.where(by_stage[0][0] <= limit, 0.0, np.inf)
    before = []
    for table in by_stage[1:]:
        ways = total[:, None] + np.where(table <= limit, received, np.inf)
        before.append(ways.argmin(axis=0))
        total = ways.min(axis=0)
    point, points = len(received) - 1, []
    for choice in reversed(before):
        point = int(choice[point])
        points.append(point)
    return points[::-1]
