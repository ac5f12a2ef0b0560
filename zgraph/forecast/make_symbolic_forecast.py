"""The forecast of a step as formulas in the number of ranks, the batch and the sequence length.

An operator takes the same time in every layer, and its floating-point operations and memory traffic are polynomials: of
degree 1 in the batch, of at most 2 in the sequence. They are fitted to a few captures, and checked at a size that they
were not fitted to. Communication is of parameters and gradients, whatever the batch: shards have ceil(n / ranks) rows
of n. A roofline and the ring's time (`zgraph.passes.analysis.costs`) then give seconds. The schedule, which the
simulator adds, has no formula: a step takes at least as long as its busiest stream, and at most as long as if nothing
overlapped.

    captures at a grid of sizes   ->  counts per node (`zgraph.forecast.counts`)  ->  polynomials  ->  kinds of equal operators
    runs of transfers, from which buckets are cut at any number of ranks                   ->  transfers, bytes
    one more capture, other ranks ->  counts and the simulator's busy seconds, which the formulas must give
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from torch import nn

from zgraph.build.build_context import BuildContext
from zgraph.build.memory_search import run_passes
from zgraph.build.pass_pipeline import build, costs_of
from zgraph.build.planned_step import Inputs, captured_program
from zgraph.build.update_program import update_options
from zgraph.errors import CaptureError, PlanError, SymbolicError
from zgraph.forecast.counts import Bytes, Counts, Operator, Run, count
from zgraph.forecast.several_sizes import Point, Polynomials, SizedInputs, batches, lengths
from zgraph.forecast.symbolic_forecast import Kind, SymbolicForecast, Transfers, symbols
from zgraph.parameters.layout import layout
from zgraph.passes import PassManager
from zgraph.passes.analysis.costs import Costs
from zgraph.passes.analysis.simulator import simulate
from zgraph.passes.overlap.bucket import cut
from zgraph.plan.communication import Bucket
from zgraph.plan.plan import Plan
from zgraph.program.program import STAGE_DIM, TEAM_DIMS, InputRole, OutputRole, ParamSpec, Program
from zgraph.update.build_update import states_of
from zgraph.update.parameter_groups import members_of

if TYPE_CHECKING:
    import sympy

logger = logging.getLogger(__name__)

UNBOUNDED = 1 << 62  # bytes of a bucket: a run of transfers that may share buckets stays in one piece
AGREE = 1e-9  # relative: how far the simulator's seconds may be from the formulas'


def symbolic_forecast(model: nn.Module, plan: Plan, inputs: Inputs, costs: Costs | None = None) -> SymbolicForecast:
    """Forecast forward and backward of `model` (not compiled, on any device, the meta device too) as formulas. Nothing
    runs.

    `inputs` are one rank's own (micro-)batch, and say which of their dimensions are the batch and the sequence (see
    `zgraph.forecast.several_sizes`); a model that can't be captured with another sequence length counts as one without
    a sequence. `costs` are by default those of the plan's hardware; its measured times of operators are not used,
    because they are of some sizes only.

    The formulas hold where the program has the operators that it has at the sampled sizes: a model may branch on sizes,
    and torch's min-cut may save other values at distant sizes. Raises `SymbolicError` where operators or costs already
    differ between the samples, `PlanError` for a plan without formulas (one with a memory budget, offloading or a
    pipeline, for example), and what `zgraph.build.planned_step.programs` does. The batch of an elastic plan is ignored:
    the formulas are of any world and batch.
    """
    plan = plan.model_copy(update={"elastic": None})
    _refuse(plan)
    costs = costs or costs_of(plan)
    timeless = Costs(costs.hardware.model_copy(update={"operators": {}}), costs.fused)
    return _Forecaster(model, plan, SizedInputs(inputs), timeless).run()


_NO_FORMULAS: tuple[tuple[str, str, Callable[[Plan], bool], str], ...] = (
    (
        "memory_budget",
        "a plan with a memory budget",
        lambda plan: plan.memory_budget is not None,
        "what is kept under a budget is decided anew for every size",
    ),
    (
        "offload",
        "a plan that offloads",
        lambda plan: bool(plan.offload.tiers()),
        "formulas know of memory on the device alone",
    ),
    (
        f"mesh.{STAGE_DIM}",
        "a plan with a pipeline",
        lambda plan: plan.mesh.get(STAGE_DIM, 1) != 1,
        "where the model is cut is decided anew for every size",
    ),
    (
        "wire.auto",
        "a plan that lets formats be chosen",
        lambda plan: plan.wire.auto,
        "which are fastest is decided anew for every size",
    ),
    (
        "wire.secondary",
        "a plan with a second copy of the weights in a node",
        lambda plan: plan.wire.secondary is not None,
        "formulas are found at numbers of ranks that are no nodes of so many",
    ),
    *(
        (
            f"mesh.{dim}",
            "a plan whose ranks compute parts of a layer",
            lambda plan, dim=dim: plan.mesh.get(dim, 1) != 1,
            "which values lie in parts is decided anew for every size",
        )
        for dim in TEAM_DIMS
    ),
)
"""(field, the plan in words, whether a plan is one, why it has no formulas)"""


def _refuse(plan: Plan) -> None:
    """Raise `PlanError` for a plan that has no forecast by formulas."""
    for where, what, when, why in _NO_FORMULAS:
        if when(plan):
            hint = "leave it out, or forecast one size at a time"
            raise PlanError(f"{what} has no forecast by formulas", where=where, why=why, hint=hint)


@dataclass(frozen=True)
class _Mesh:
    """The plan's mesh at some number of ranks."""

    free: str | None  # the dimension that -1 stands for; None without one
    known: int  # the ranks of the other dimensions together
    world: int  # the number of ranks

    def ranks(self, dim: str, plan: Plan) -> Any:
        """Return the number of ranks of a dimension (1 where the mesh has none of the name), as a formula."""
        import sympy

        if dim != self.free or self.world == self.known:
            return sympy.Integer(plan.resolve_mesh(self.world).get(dim, 1))
        return symbols()["world"] / self.known

    @property
    def shards(self) -> bool:
        """Whether shards depend on the number of ranks."""
        return self.free == "dp" and self.world != self.known


class _Forecaster:
    def __init__(self, model: nn.Module, plan: Plan, inputs: SizedInputs, costs: Costs) -> None:
        self.model = model
        self.plan = plan
        self.inputs = inputs
        self.costs = costs
        free = next((d for d, size in plan.mesh.items() if size == -1), None)
        known = math.prod(size for size in plan.mesh.values() if size != -1)
        # On the fewest ranks programs have other operators: a parameter on one rank is not sharded, and so not gathered.
        self.fewest = _Mesh(free, known, known)
        self.mesh = _Mesh(free, known, known * self._undivided(free, known)) if free is not None else self.fewest
        self.meshes = list(dict.fromkeys([self.mesh, self.fewest]))
        runs = plan.model_copy(update={"bucket": Bucket(gather=UNBOUNDED, reduce=UNBOUNDED)})
        self.trained: list[str] = []  # parameters that have a gradient
        self._first: dict[Point, Program] = {}  # the capture that shows whether the model has a sequence
        self.passes = {t: build(runs, training=t, costs=costs) for t in (True, False)}

    def _undivided(self, free: str | None, known: int) -> int:
        """Return the fewest ranks, from 2, that divide no sharded parameter's rows."""
        specs = self._specs(2 * known).values()
        rows = {s.shape[0] for s in specs if s.shard_dim is not None} if free == "dp" else set()
        ranks = 2
        while any(n % ranks == 0 for n in rows):
            ranks += 1
        return ranks

    def _specs(self, world: int) -> dict[str, ParamSpec]:
        plan, sizes = self.plan, self.plan.resolve_mesh(world)
        return layout(self.model, sizes, plan.zero, plan.param_persistence_threshold, plan.resolved_precision())

    # -- samples -------------------------------------------------------------------------------------------------------
    def run(self) -> SymbolicForecast:
        first, second, third = batches(self.inputs.batch)
        sequences = self._sequences(first)
        fitted: list[int | None] = sequences[:3]
        points = [Point(b, s) for b in (first, second) for s in fitted]
        samples = [self._counts(p, self._first.pop(p) if p in self._first else self._captured(p)) for p in points]
        for point, sample in zip(points[1:], samples[1:], strict=True):
            for one, other in zip(samples[0], sample, strict=True):
                _same(one, other, points[0], point)
        self.polynomials = Polynomials(points)
        forecast = self._forecast([[s[i] for s in samples] for i in range(len(self.meshes))])
        self._check(forecast, samples, points, Point(third, sequences[-1]))
        return forecast

    def _sequences(self, batch: int) -> list[int | None]:
        """Return the lengths to sample at, the last one to check at; [None] for a model without a sequence."""
        if self.inputs.sequence is not None:
            sequences: list[int | None] = [*lengths(self.inputs.sequence)]
            point = Point(batch, sequences[1])
            try:
                self._first[point] = self._captured(point)
            except CaptureError as error:
                logger.info("the model has no sequence: it can't be captured with another (%s)", error.what)
            else:
                return sequences
        return [None]

    def _captured(self, point: Point) -> Program:
        plan = self.plan.model_copy(update={"dynamic": {}})  # (formulas are of programs whose sizes are numbers)
        return captured_program(self.model, plan, self.inputs.at(point), self.mesh.world)

    def _on(self, program: Program, world: int) -> Program:
        """Return a copy, for `world` ranks, of a program in which nothing is sharded yet."""
        other = program.snapshot()
        other.mesh, other.params = self.plan.resolve_mesh(world), self._specs(world)
        return other

    def _counts(self, point: Point, captured: Program) -> list[Counts]:
        """Count in the program at a point, on each mesh."""
        passes = self.passes[captured.name == "train"]
        names = [p.name for p in passes]
        shard, end = names.index("shard_parameters"), names.index("overlap")
        start = PassManager(passes[:shard], verify=False, snapshots=False).run(captured).program
        counts = []
        for mesh in self.meshes:
            program = self._on(start, mesh.world)
            PassManager(passes[shard:end], verify=False, snapshots=False).run(program)
            shared = program.mesh["dp"] if mesh.shards else None
            counts.append(count(program, self.costs, shared))
            if mesh == self.mesh:
                gradients = (p for p in program.outputs if p.role is OutputRole.GRADIENT)
                self.trained = [p.name for p in gradients if p.of is InputRole.PARAMETER]
        logger.debug("%s: %d operators", point, len(counts[0].operators))
        return counts

    def _check(
        self, forecast: SymbolicForecast, samples: list[list[Counts]], points: list[Point], point: Point
    ) -> None:
        """Raise `SymbolicError` unless the formulas hold at a point that they were not fitted to, and on other
        ranks."""
        captured = self._captured(point)
        program = captured.snapshot()
        for at, counts in enumerate(self._counts(point, captured)):
            _same(samples[0][at], counts, points[0], point)
            known = [s[at] for s in samples]
            for i, operator in enumerate(counts.operators):
                for what, read in (("floating-point operations", _flops), ("bytes", _fixed)):
                    fit = self.polynomials.through(read(s.operators[i]) for s in known)
                    if self.polynomials.value(fit, point) != read(operator):
                        raise _no_polynomial(operator, what, read(operator), self.polynomials.value(fit, point), point)
            fit = self.polynomials.through(s.activations for s in known)
            if self.polynomials.value(fit, point) != counts.activations:
                raise SymbolicError("what is saved for the backward is no polynomial of the sizes", where=str(point))
        world = self.fewest.known * (
            1 if self.mesh.free is None else 4 if self.mesh.world == 2 * self.mesh.known else 2
        )
        program = self._on(program, world)
        history, _ = run_passes(program, BuildContext(self.plan, self.costs), training=program.name == "train")
        busy = simulate(history.program, self.costs).busy
        predicted = forecast.at(world=world, batch=point.batch, sequence=point.sequence)
        real = {"compute": busy.pop("compute", 0.0), "communication": sum(busy.values())}
        for what, seconds in real.items():
            if not math.isclose(getattr(predicted, what), seconds, rel_tol=AGREE, abs_tol=1e-15):
                raise SymbolicError(
                    f"{what} is no formula of the sizes",
                    where=f"{point}, on {world} rank(s)",
                    why=f"the program's takes {seconds} seconds, the formula's {getattr(predicted, what)}",
                    hint="a pass of the plan's own that decides by sizes? forecast one size at a time",
                )

    # -- formulas --------------------------------------------------------------------------------------------------------
    def _forecast(self, samples: list[list[Counts]]) -> SymbolicForecast:
        """Return the forecast from samples by mesh, then by point."""
        import sympy

        kinds, transfers = self._kinds(self.mesh, samples[0]), self._transfers(self.mesh, samples[0][0].runs)
        compute, links = self._compute(kinds, transfers), self._links(transfers)
        activations = [self._fit(s.activations for s in at) for at in samples]
        saved = activations[0]
        if self.fewest != self.mesh:
            least = {symbols()["world"]: self.fewest.known}
            few, sent = self._kinds(self.fewest, samples[1]), self._transfers(self.fewest, samples[1][0].runs)
            if not _equal_kinds(kinds, few, least) or not _close(self._work(transfers).subs(least), self._work(sent)):
                compute = self._piecewise(self._compute(few, sent), compute)
            seconds = self._links(sent)
            for name in links:
                fewest = seconds.get(name, sympy.Integer(0))
                if not _close(links[name].subs(least), fewest):
                    links[name] = self._piecewise(fewest, links[name])
            if activations[1] != saved:
                saved = self._piecewise(activations[1], saved)
        communication = sympy.Add(*links.values())
        return SymbolicForecast(
            self.plan,
            self.costs.hardware,
            self.inputs.point if len(self.polynomials.powers) > 2 else replace(self.inputs.point, sequence=None),
            kinds,
            transfers,
            compute,
            links,
            communication,
            sympy.Max(compute, *links.values(), evaluate=False),
            compute + communication,
            **self._memory(),
            activations=saved,
        )

    def _piecewise(self, fewest: sympy.Expr, many: sympy.Expr) -> sympy.Expr:
        import sympy

        return sympy.Piecewise((fewest, sympy.Eq(symbols()["world"], self.fewest.known)), (many, True))

    def _fit(self, values: Any) -> sympy.Expr:
        known = symbols()
        return self.polynomials.formula(self.polynomials.through(values), known["batch"], known["sequence"])

    def _compute(self, kinds: Sequence[Kind], transfers: Sequence[Transfers]) -> sympy.Expr:
        import sympy

        return sympy.Add(*(k.seconds(self.costs.hardware) for k in kinds), self._work(transfers))

    def _work(self, transfers: Sequence[Transfers]) -> sympy.Expr:
        """Return the seconds that transfers take from the compute stream."""
        import sympy

        links = [(t, self.costs.hardware.link(t.dim)) for t in transfers]
        return sympy.Add(*(link.start * t.count + link.work * t.bytes for t, link in links if link.start or link.work))

    def _links(self, transfers: Sequence[Transfers]) -> dict[str, sympy.Expr]:
        """Return the seconds of each link: a mesh dimension's own, or "*"."""
        import sympy

        hardware = self.costs.hardware
        seconds: dict[str, sympy.Expr] = {}
        for transfer in transfers:
            name = transfer.dim if transfer.dim in hardware.links else "*"
            seconds[name] = seconds.get(name, sympy.Integer(0)) + transfer.seconds(hardware)
        return seconds

    def _kinds(self, mesh: _Mesh, samples: list[Counts]) -> tuple[Kind, ...]:
        import sympy

        ranks = mesh.ranks("dp", self.plan)
        grouped: Counter[Any] = Counter()
        for seen in zip(*(s.operators for s in samples), strict=True):
            one = seen[0]
            flops = self.polynomials.through(_flops(o) for o in seen)
            fixed = self.polynomials.through(_fixed(o) for o in seen)
            grouped[one.target, flops, fixed, one.moved.rows, one.rate, one.padding] += 1
        known = symbols()
        kinds = []
        for (target, flops, fixed, rows, rate, padding), number in grouped.items():
            # (n rows are padded only if the ranks do not divide n)
            factor = 1 if padding is None else sympy.ceiling(padding / ranks) - sympy.floor(padding / ranks)

            def formula(c: tuple[Fraction, ...]) -> Any:
                return self.polynomials.formula(c, known["batch"], known["sequence"])

            moved = Bytes(0, rows).formula(ranks, formula(fixed))
            kinds.append(Kind(target, sympy.sympify(number * factor), formula(flops), moved, rate))
        return tuple(kinds)

    def _transfers(self, mesh: _Mesh, runs: Sequence[Run]) -> tuple[Transfers, ...]:
        ranks = mesh.ranks("dp", self.plan)
        transfers = []
        for dim, kind in dict.fromkeys((r.dim, r.kind) for r in runs):
            kind_runs = [r for r in runs if (r.dim, r.kind) == (dim, kind)]
            whole = Bytes.sum(s for r in kind_runs for s in r.sizes)
            number = self._buckets(mesh, dim, kind, kind_runs)
            transfers.append(Transfers(dim, kind, mesh.ranks(dim, self.plan), number, whole.formula(ranks)))
        return tuple(transfers)

    def _buckets(self, mesh: _Mesh, dim: str, kind: str, runs: list[Run]) -> sympy.Expr:
        """Return the number of buckets that runs are cut into: a constant, or a function of the world that sympy calls
        with a number."""
        import sympy

        plan = self.plan
        gathers = kind == "all_gather"
        wanted = plan.bucket.gather if gathers else plan.bucket.reduce
        link = self.costs.hardware.link(dim)
        grouped = Counter(runs)

        def number(world: int) -> int:
            sizes = plan.resolve_mesh(int(world))
            shared = sizes.get("dp", 1)
            cuts = {r: len(cut([s.at(shared) for s in r.sizes], wanted, link, sizes[dim])) for r in grouped}
            return sum(cuts[r] * times for r, times in grouped.items())

        alone = wanted == 0 or all(len(r.sizes) == 1 for r in runs)
        if alone or mesh.world == mesh.known:
            return sympy.Integer(number(mesh.world))
        # A function of its own, with what `subs` and `lambdify` need to call it.
        name = f"{kind}s" if len(plan.mesh) == 1 else f"{kind}s_{dim}"
        body = {
            "eval": classmethod(lambda cls, at: sympy.Integer(number(int(at))) if at.is_Integer else None),
            "_imp_": staticmethod(number),
            "is_integer": True,
            "is_positive": True,
        }
        function: sympy.Expr = type(name, (sympy.Function,), body)(symbols()["world"])
        return function

    def _memory(self) -> dict[str, sympy.Expr]:
        """Return the bytes of parameters, gradients and states on a rank, padding of shards included."""
        specs = self._specs(self.mesh.world)
        ranks = self.mesh.ranks("dp", self.plan)
        shared = self.mesh.shards

        def of(shape: tuple[int, ...], itemsize: int, spec: ParamSpec) -> Bytes:
            return Bytes.of_shard(shape, itemsize, spec if shared else replace(spec, shard_dim=None))

        sizes = {
            "parameters": [of(s.shard_shape, s.dtype.itemsize, s) for s in specs.values()],
            "gradients": [of(specs[n].shard_shape, specs[n].grad_dtype.itemsize, specs[n]) for n in self.trained],
            "states": [],
        }
        if self.plan.optimizer is not None:
            members = members_of(self.model, specs, self.plan.optimizer)
            options = update_options(self.plan, members, specs)
            for member in members:
                spec = specs[member.name]
                if spec.requires_grad:
                    states = states_of(member, spec, options).values()
                    sizes["states"] += [of(tuple(s.shape), s.dtype.itemsize, spec) for s in states]
        return {name: Bytes.sum(parts).formula(ranks) for name, parts in sizes.items()}


def _flops(operator: Operator) -> int:
    return operator.flops


def _fixed(operator: Operator) -> int:
    return operator.moved.fixed


def _same(one: Counts, other: Counts, here: Point, there: Point) -> None:
    """Raise `SymbolicError` unless two programs have the same operators, node by node."""
    for a, b in zip(one.nodes, other.nodes, strict=False):
        if not a.like(b):
            raise _differ(f"node {a.name!r}", f"{a.target} at {here}, {b.target} ({b.name!r}) at {there}", here, there)
    if len(one.nodes) != len(other.nodes):
        raise _differ("the end", f"{len(one.nodes)} nodes at {here}, {len(other.nodes)} at {there}", here, there)
    for x, y in zip(one.operators, other.operators, strict=True):
        if (x.moved.rows, x.rate) != (y.moved.rows, y.rate):
            raise _differ(f"node {x.node!r}", "it reads other parameters, or another dtype", here, there)
    if one.runs != other.runs:
        raise _differ("the transfers", "other parameters are gathered or reduced together", here, there)


def _differ(node: str, why: str, here: Point, there: Point) -> SymbolicError:
    return SymbolicError(
        "the step is another program at another size",
        where=f"{node}; {here} against {there}",
        why=why,
        hint="a model that branches on its sizes, or values that are recomputed at some of them only: forecast one size at a time",
    )


def _no_polynomial(operator: Operator, what: str, actual: int, expected: Fraction, point: Point) -> SymbolicError:
    return SymbolicError(
        f"the {what} of {operator.target} are no polynomial of the sizes",
        where=f"node {operator.node!r}, {point}",
        why=f"{actual}, where the polynomial through the other sizes gives {expected}",
        hint="forecast one size at a time",
    )


def _close(one: Any, other: Any) -> bool:
    return math.isclose(float(one), float(other), rel_tol=1e-12, abs_tol=1e-18)


def _equal_kinds(many: Sequence[Kind], fewest: Sequence[Kind], least: dict[Any, int]) -> bool:
    """Return whether the kinds of many ranks, at the fewest ranks' world `least`, are the kinds of the fewest ranks."""

    def table(kinds: Sequence[Kind], values: dict[Any, int]) -> Counter[Any]:
        counts: Counter[Any] = Counter()
        for k in kinds:
            counts[k.flops, k.bytes.subs(values), k.rate] += int(k.count.subs(values))
        return +counts

    return table(many, least) == table(fewest, {})
