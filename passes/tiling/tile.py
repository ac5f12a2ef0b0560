"""Regions of the model run in chunks, over slices of their rows: the logits of a long sequence, or the values inside of
an MLP, are never whole.

A region is a module, with its backward, or the classification loss (or log-probabilities and entropies of each row)
with the product that gives its logits. Its rows (tokens) are an axis that all of its operators can be sliced along. Of
a region only its inputs are saved for the backward: the backward's chunks recompute the rest. Nothing is rounded
otherwise but sums over rows, whose order changes. (TiledMLP and the tiled loss of Bekman et al. 2025, "Arctic Long
Sequence Training"; of the loss also Hsu et al. 2024, "Liger Kernel", and Wijmans et al. 2024, "Cut Your Losses in
Large-Vocabulary Language Models".)

*Contract.* As `zgraph.passes.tiling.chunks`: nothing outside of a region is changed. It comes before the passes that
decide about memory and transfers, but after `recompute`, whose min-cut would save values that chunks are to recompute.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from zgraph.errors import PlanError
from zgraph.names import did_you_mean, matches
from zgraph.passes.analysis.axes import Axes, Axis
from zgraph.passes.analysis.classification_losses import logits_of, weights_of
from zgraph.passes.analysis.slices import elements, rows_of
from zgraph.passes.contract import graph_pass
from zgraph.passes.spmd.sharding_rules import getitem_of, operands_of
from zgraph.passes.tiling.chunks import Chunks, Obstacle, Sorted, sort
from zgraph.program.aliases import is_random, is_view
from zgraph.program.node import Phase, info, sequence
from zgraph.program.program import Fact, InputRole, OutputRole, Program
from zgraph.program.remark import Remark
from zgraph.record import joined

aten = torch.ops.aten
LOSS = "loss"
_OF_STAGES = {InputRole.RECEIVED, OutputRole.SENT}
_MEAN, _SUM = 1, 2  # torch's numbers for a loss's reduction


@dataclass(frozen=True)
class TileOptions:
    """Options of `tile`."""

    tiles: tuple[tuple[str, int], ...] = ()  # patterns of module paths, or "loss", each with a number of chunks


@graph_pass(
    "tile",
    "regions run in chunks over slices of their rows",
    options=TileOptions,
    requires=(Fact.CLEAN,),
    provides=(Fact.TILED,),
    conflicts=(Fact.SHARDED, Fact.CHECKPOINTED, Fact.REMATERIALIZED),
    bitwise=False,
)
def tile(program: Program, options: TileOptions) -> dict[str, int]:
    return _Tiler(program, options).run()


def check_names(program: Program, tiles: Collection[str]) -> None:
    """Raise `PlanError` for a name in a plan's `tiles` that matches nothing in a whole model's program. (A stage of it
    may lack what others have.)
    """
    faults = _wrong_names(program, tiles)
    if faults:
        raise joined(faults)


def _wrong_names(program: Program, tiles: Collection[str]) -> list[PlanError]:
    faults: list[PlanError] = []
    forward = [n for n in program.graph.nodes if _of(Phase.FORWARD, n)]
    if LOSS in tiles and not logits_of(program):
        faults.append(_no_loss())
    paths = dict.fromkeys(path for n in forward for path in program.modules_around(n))
    for pattern in tiles:
        if pattern != LOSS and not matches(paths, [pattern]):
            what = f"tiles has a pattern {pattern!r} that matches no module"
            faults.append(PlanError(what, where=f"tiles.{pattern}", hint=did_you_mean(pattern, paths)))
    return faults


def _no_loss() -> PlanError:
    return PlanError(
        "there is no classification loss, log-probability or entropy that is computed from a product with a weight",
        where=f"tiles.{LOSS}",
        hint="let the model's forward compute the cross entropy or the log-probabilities of its logits, and return these",
    )


@dataclass(frozen=True)
class _Region:
    """Nodes of the forward that run in chunks."""

    name: str  # what the plan calls it
    path: str  # what chunks are named by
    count: int  # the number of chunks
    nodes: dict[fx.Node, None]  # the forward's nodes
    # the most elements of a value that may be whole, None: those of the largest input or output
    bound: int | None = None
    small: int | None = None  # the most elements of values whose sums are computed at once, None: as `bound`
    given: fx.Node | None = None  # logits that are an output of the model

    def error(self, what: str, why: str, hint: str) -> PlanError:
        return PlanError(what, where=f"tiles.{self.name}", why=why, hint=hint)


class _Tiler:
    def __init__(self, program: Program, options: TileOptions) -> None:
        self.program, self.tiles = program, dict(options.tiles)
        self.trained = any(p.role in (OutputRole.GRADIENT, OutputRole.RETURNED) for p in program.outputs)
        roles = {p.role for p in (*program.inputs, *program.outputs)}
        self.whole = self.trained and roles.isdisjoint(_OF_STAGES)  # (a program without a backward may have no loss)
        self.counts = {"regions": 0, "chunks": 0, "recomputed": 0}
        if LOSS in self.tiles:
            _sum_losses(program)
        self.axes = Axes(program)
        self.done: set[fx.Node] = set()
        self.results = set(program.output_values())
        self.weights = weights_of(program)

    def run(self) -> dict[str, int]:
        faults = _wrong_names(self.program, self.tiles) if self.whole else []
        losses = [] if any(f.where == f"tiles.{LOSS}" for f in faults) else self._losses()
        for region, rows in [*losses, *self._modules()]:
            try:
                self._tile(region, rows)
            except PlanError as error:
                if self.trained:  # (only the first region of each pattern: the others have the same fault)
                    faults += [error] if error.where not in {f.where for f in faults} else []
                    continue
                # (outside of training a program may well have to return whole logits)
                why, hint = str(error.why), str(error.hint)
                self.program.remarks.append(Remark("tile", next(iter(region.nodes)).name, error.what, why, 0.0, hint))
        if faults:
            raise joined(faults)
        self.program.graph.eliminate_dead_code()
        return self.counts

    def _forward(self) -> list[fx.Node]:
        return [n for n in self.program.graph.nodes if _of(Phase.FORWARD, n)]

    # -- the loss -----------------------------------------------------------------------------------------------------
    def _losses(self) -> list[tuple[_Region, list[Axis]]]:
        """Return a region for each product that gives logits, with all that the forward computes from it, and the axes
        of its rows.
        """
        if LOSS not in self.tiles:
            return []
        regions = []
        for product, logits in logits_of(self.program).items():
            nodes = _behind(self.program, product)
            classes = set(self._axes_of(w for w in product.all_input_nodes if w in self.weights))
            bound = max(elements(o) for o in operands_of(product) if o not in self.weights)
            given = next((n for n in nodes if n in self.results and not classes.isdisjoint(self._axes_of([n]))), None)
            regions.append(
                (
                    _Region(LOSS, LOSS, self.tiles[LOSS], nodes, bound, elements(product) - 1, given),
                    self._axes_of([logits]),
                )
            )
        return regions

    # -- modules ------------------------------------------------------------------------------------------------------
    def _modules(self) -> list[tuple[_Region, list[Axis]]]:
        patterns = {p: n for p, n in self.tiles.items() if p != LOSS}
        nodes: dict[tuple[str, str], list[fx.Node]] = {}
        for node in self._forward():
            hits = _named(self.program, node, patterns)
            if len(hits) > 1:
                (one, _), (other, path) = [*hits.items()][:2]
                raise PlanError(
                    f"two patterns name the module {path!r} or what is around it: {one!r} and {other!r}",
                    where=f"tiles.{other}",
                    hint="let one pattern name a module",
                )
            for hit in hits.items():
                if node not in self.weights:
                    nodes.setdefault(hit, []).append(node)
        regions = []
        for (pattern, path), all_of_it in nodes.items():
            calls = [(call, self._given(call)) for call in _calls(all_of_it)]
            calls = [(call, given) for call, given in calls if given]  # (a call without inputs computes constants)
            for number, (call, given) in enumerate(calls, 1):
                name = path if len(calls) == 1 else f"{path} (call {number})"
                regions.append((_Region(pattern, name, patterns[pattern], call), self._axes_of(given)))
        return regions

    def _given(self, nodes: Collection[fx.Node]) -> list[fx.Node]:
        """Return the inputs of a region, without weights."""
        return [o for n in nodes for o in n.all_input_nodes if o not in nodes and o not in self.weights]

    # -- any of them --------------------------------------------------------------------------------------------------
    def _axes_of(self, nodes: Iterable[fx.Node]) -> list[Axis]:
        return [*dict.fromkeys(a for n in nodes for shape in self.axes.shapes(n) for dim in shape for a in dim)]

    def _tile(self, region: _Region, rows: list[Axis]) -> None:
        """Run a region in chunks along the first of these axes that allows it.

        Axes that divide into equal chunks come first, in their order. An axis of a weight that the region reads is no
        axis of rows.
        """
        if region.given is not None:
            raise region.error(
                "the logits are an output of the model: they would have to be whole",
                f"{region.given.name!r} of {_place(region.given)} leaves the program",
                "let the model return only the loss",
            )
        if region.name == LOSS and next(iter(region.nodes)) in self.done:
            return  # (the product is in the chunks of other logits, which its own are compared with)
        if not self.done.isdisjoint(region.nodes):
            region = replace(region, nodes={n: None for n in region.nodes if n not in self.done})
        if not region.nodes:
            raise region.error(
                f"all of {region.path!r} runs in chunks already",
                "another key names what it is part of",
                "let one key name it",
            )
        columns = set(self._axes_of(o for n in region.nodes for o in n.all_input_nodes if o in self.weights))
        enough = [a for a in rows if self.axes.size(a) >= region.count and a not in columns]
        enough.sort(key=lambda a: self.axes.size(a) % region.count != 0)
        obstacles = []
        for axis in enough:
            halves = self._sorted(region, axis)
            if isinstance(halves, Obstacle):
                obstacles.append(halves)
            if halves is None or isinstance(halves, Obstacle):
                continue
            self.done |= {n for half in halves if half is not None for n in half.nodes}
            self.counts["recomputed"] += Chunks(self.program, self.axes, region.path, region.count, *halves).build()
            self.counts["regions"] += 1
            self.counts["chunks"] += region.count
            return
        if obstacles:
            raise self._refusal(region, obstacles[0].node)
        if not enough:
            most = max((self.axes.size(a) for a in rows if a not in columns), default=0)
            raise region.error(
                f"{region.path!r} can't run in {region.count} chunks",
                f"no dimension that comes into it has so many rows; the longest has {most}",
                "a smaller number, or more rows",
            )
        raise region.error(
            f"{region.path!r} would run in chunks for nothing",
            "what is inside of it is smaller than what comes in or goes out",
            "leave it out, or name the module around it",
        )

    def _refusal(self, region: _Region, node: fx.Node) -> PlanError:
        if is_random(node):
            why, hint = (
                f"{node.target} at {_place(node)} draws its numbers for all rows at once",
                "name a module without it",
            )
        else:
            why = f"{node.target} at {_place(node)} walks the rows' dimension as a whole, or can't be cut along it"
            hint = (
                "name a smaller module, without this operator, or write it with operators that take each row for itself"
            )
        return region.error(f"{region.path!r} can't be tiled", why, hint)

    def _sorted(self, region: _Region, axis: Axis) -> tuple[Sorted, Sorted | None] | Obstacle | None:
        """Return the forward and the backward of a region, sorted for an axis; None where nothing would run in chunks."""
        bound = self._bound(region.nodes, axis) if region.bound is None else region.bound
        small = bound if region.small is None else min(bound, region.small)
        forward = self._grown(region.nodes, axis, bound, small, Phase.FORWARD)
        if isinstance(forward, Obstacle):
            return forward
        inner = [n for n in forward.parts if not self._escapes(n, forward.nodes)]
        if region.bound is None and sum(elements(n) for n in inner if not is_view(n)) < bound:
            return None
        numbers = {sequence(n) for n in forward.nodes} - {None}
        seeds = {n for n in self.program.graph.nodes if _of(Phase.BACKWARD, n) and sequence(n) in numbers}
        seeds |= {u for n in inner for u in n.users if _of(Phase.BACKWARD, u)}
        backward = self._grown(_between(self.program, seeds), axis, bound, small, Phase.BACKWARD)
        if isinstance(backward, Obstacle):
            return backward
        return forward, backward if backward.nodes else None

    def _bound(self, nodes: Collection[fx.Node], axis: Axis) -> int:
        """Return the number of elements of the region's largest input or output."""
        given = {o for n in nodes for o in n.all_input_nodes if o not in nodes}
        given |= {n for n in nodes if self._escapes(n, nodes)}
        return max((elements(n) for n in given if rows_of(self.axes, n, axis)), default=0)

    def _escapes(self, node: fx.Node, nodes: Collection[fx.Node]) -> bool:
        """Return whether the rest of the forward reads a value, or it leaves the program."""
        return node in self.results or any(_of(Phase.FORWARD, u) and u not in nodes for u in node.users)

    def _grown(self, nodes: Collection[fx.Node], axis: Axis, bound: int, small: int, phase: Phase) -> Sorted | Obstacle:
        """Return a region with all nodes of its phase that make, or read, values larger than the bound."""
        region = {n for n in nodes if info(n).chunk is None}
        while True:
            outcome = sort(self.program, self.axes, region, axis, bound, small)
            if isinstance(outcome, Obstacle):
                return outcome
            read = {o for n in outcome.nodes for o in n.all_input_nodes if rows_of(self.axes, o, axis)}
            near = {*read, *(u for n in outcome.parts if elements(n) > bound for u in n.users)}
            more = {n for n in near - region if _of(phase, n) and (n not in read or elements(n) > bound)}
            if not more:
                return outcome
            region |= more


def _place(node: fx.Node) -> str:
    record = info(node)
    return f"{record.source or 'an unknown line'} (module {record.module or 'root'})"


def _of(phase: Phase, node: fx.Node) -> bool:
    return node.op == "call_function" and info(node).phase is phase


def _named(program: Program, node: fx.Node, patterns: Collection[str]) -> dict[str, str]:
    """Return, by pattern, the outermost module around a node that it names."""
    hits: dict[str, str] = {}
    for path in program.modules_around(node):
        for pattern in patterns:
            if matches([path], [pattern]):
                hits.setdefault(pattern, program.first_name(path))
    return hits


def _behind(program: Program, first: fx.Node) -> dict[fx.Node, None]:
    """Return a forward's node and all nodes that are computed from it."""
    nodes = {first: None}
    for node in program.graph.nodes:
        if _of(Phase.FORWARD, node) and any(o in nodes for o in node.all_input_nodes):
            nodes[node] = None
    return nodes


def _between(program: Program, seeds: Collection[fx.Node]) -> set[fx.Node]:
    """Return these nodes and all nodes of the backward on a path from one of them to another."""
    below, above = set(seeds), set(seeds)
    for node in program.graph.nodes:
        if _of(Phase.BACKWARD, node) and any(o in below for o in node.all_input_nodes):
            below.add(node)
    for node in reversed(program.graph.nodes):
        if _of(Phase.BACKWARD, node) and any(u in above for u in node.users):
            above.add(node)
    return below & above


def _calls(nodes: Sequence[fx.Node]) -> list[dict[fx.Node, None]]:
    """Return the nodes of each call of a module: those of one call read each other's values, those of two don't."""
    call: dict[fx.Node, list[fx.Node]] = {n: [n] for n in nodes}
    for node in nodes:
        for used in node.all_input_nodes:
            if used in call and call[used] is not call[node]:
                call[used] += call[node]
                call.update(dict.fromkeys(call[node], call[used]))
    return [dict.fromkeys(sorted(c)) for c in {id(c): c for c in call.values()}.values()]


# -- losses -----------------------------------------------------------------------------------------------------------
def _sum_losses(program: Program) -> None:
    """Rewrite a mean over targets as their sum, divided by their number after it: the sum can be computed in chunks."""
    for node in program.graph.find_nodes(op="call_function", target=aten.nll_loss_forward.default):
        results = {getitem_of(user): user for user in node.users}
        if node.args[3] != _MEAN or 0 not in results:
            continue
        node.update_arg(3, _SUM)
        mean = results[0]
        record = info(mean).replace(made_by="tile")
        with program.graph.inserting_after(max(results.values())):
            total = results.get(1) or program.call(operator.getitem, (node, 1), record, name=f"{node.name}_total")
        with program.graph.inserting_after(max(total, mean)):
            new_mean = program.call(aten.div.Tensor, (mean, total), record, name=f"{node.name}_mean")
        for user in list(mean.users):
            if user is not new_mean:
                user.replace_input_with(mean, new_mean)
