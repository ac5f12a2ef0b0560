"""The first pass that changes what a step computes: its programs after each pass, run on virtual ranks.

A step's programs (forward and backward as a whole, then split) are compared with the plain model, an update's with the update before any
pass. A pass is accused if something differs by more than rounding after it, and did not before it; if its contract says that it keeps
every bit, and it does not; and if the verifier refuses what it leaves. Passes are run one after another: a later one may hide what an
earlier one did, so that half the pipeline says nothing of the other half.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from zgraph.build.pass_pipeline import PLAIN, Variant
from zgraph.errors import PassError, PlanError, VerifyError
from zgraph.inspection import diff
from zgraph.inspection.snapshot import of_record
from zgraph.passes import History
from zgraph.passes.verifier import ValueCache, verify_program
from zgraph.program.tolerance import Difference, difference, same_bits
from zgraph.verification.virtual_step import Results, virtual_step
from zgraph.verification.virtual_update import VirtualUpdate

if TYPE_CHECKING:
    import torch
    from torch import nn

    from zgraph.build.planned_step import Inputs
    from zgraph.passes import PassRecord
    from zgraph.passes.analysis.costs import Costs
    from zgraph.plan.plan import Plan

STEP, UPDATE = "step", "update"
SPLIT = "split"  # what comes after the last pass


@dataclass(frozen=True)
class Stage:
    """A program after one pass, run: `said_bitwise` is what the pass says of itself, `kept` whether it kept every bit of the program
    before it, `worst` the tensor that is furthest from what it should be, if any is compared."""

    program: str
    name: str
    said_bitwise: bool
    kept: bool
    worst: Difference | None


@dataclass(frozen=True)
class Culprit:
    """A pass that changed what is computed.

    `refused` is what the verifier has against its program, None for nothing. `beyond` are the tensors that differ by more than is
    allowed and did not before it, `bits` those that a pass changed which says that it keeps bits (their errors are relative to the
    program before it), the largest first. `changed` is what it did to the program; None of the capture and the split.
    """

    program: str
    name: str
    summary: str
    refused: str | None
    beyond: tuple[Difference, ...]
    bits: tuple[Difference, ...]
    changed: diff.Difference | None


@dataclass(frozen=True)
class Bisection:
    """What `bisect` found: each pass's program, and the passes to blame, in the order of the pipeline. `failure` is what a pass said that
    could not go on with what another left."""

    world: int
    stages: tuple[Stage, ...]
    culprits: tuple[Culprit, ...]
    failure: str | None = None

    @property
    def ok(self) -> bool:
        return not self.culprits

    @property
    def culprit(self) -> Culprit | None:
        """The first pass to blame."""
        return self.culprits[0] if self.culprits else None

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "world": self.world,
            "culprit": self.culprit.name if self.culprit else None,
            "failure": self.failure,
            "culprits": [
                {
                    "program": c.program,
                    "pass": c.name,
                    "summary": c.summary,
                    "refused": c.refused,
                    "beyond": [_data(d) for d in c.beyond],
                    "bits": [_data(d) for d in c.bits],
                    "changed": c.changed.to_json() if c.changed else None,
                }
                for c in self.culprits
            ],
            "stages": [
                {
                    "program": s.program,
                    "pass": s.name,
                    "bitwise": s.said_bitwise,
                    "kept": s.kept,
                    "worst": _data(s.worst) if s.worst else None,
                }
                for s in self.stages
            ],
        }


def bisect(
    model: nn.Module,
    plan: Plan,
    world: int,
    inputs: Inputs,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    bound: float | None = None,
) -> Bisection:
    """Run the programs of a step, and of its update, after each pass on `world` virtual ranks, and find the passes to blame.

    `inputs` (the global batch) and `loss_fn` are those of `zgraph.verify`, which says what is compared, and raises the same. `bound` is the
    relative error that is allowed; without, that of the dtype that is computed in (`zgraph.program.tolerance`). Raises `PlanError` for a plan with a
    pipeline: of the wrong stage `zgraph.verify` says which it is.
    """
    plan.refuse_pipeline(world, "search for a faulty pass")
    if plan.wire.compresses:
        raise PlanError(
            "a faulty pass is searched for by comparing with the plain model, and wire sends values in few bits",
            where="wire",
            hint="leave it out; zgraph verify compares each value that is sent so with what it was",
        )
    with virtual_step(model, plan, world, inputs, loss_fn) as virtual:
        step = virtual.unverified()
        search = _Search(virtual.costs)

        def look(variant: Variant) -> None:
            def compare(found: Results) -> list[Difference]:
                return virtual.differences(found, variant, bound)

            def points(records: list[PassRecord]) -> Iterator[_Point]:
                for record in records:
                    yield _Point.of(record, partial(virtual.of_program, record.program, variant))
                if variant == PLAIN and not search.found and search.failure is None:
                    parts = step.parts()
                    yield _Point(SPLIT, "into forward and backward", True, lambda: virtual.of_parts(parts), None)

            records = search.passed(lambda: step.history(variant))
            search.along(_name(variant), points(records), compare)

        look(PLAIN)
        for variant in step.variants() if search.failure is None else ():
            if variant != PLAIN:
                look(variant)
        if virtual.plan.optimizer is not None and virtual.step.differentiated:
            update = VirtualUpdate(virtual, step.states, search.passed)
            points = (_Point.of(record, partial(update.of_program, record.program)) for record in update.records)
            search.along(UPDATE, points, lambda found: update.differences(found, bound))
        if search.failure is not None and not search.found:
            raise search.failure
        failure = None if search.failure is None else search.failure.what
        return Bisection(world, tuple(search.stages), search.culprits(), failure)


def _name(variant: Variant) -> str:
    """ "step", or which of a step's other programs."""
    kinds = {
        "weights gathered before": variant.gathered_before,
        "gradients not reduced": not variant.reduce,
        "gradients added to earlier ones": variant.accumulated,
    }
    said = ", ".join(kind for kind, true in kinds.items() if true)
    return f"{STEP} ({said})" if said else STEP


@dataclass(frozen=True)
class _Point:
    """A place in a pipeline: what stands before it, and what the program there gives."""

    name: str
    summary: str
    bitwise: bool
    run: Callable[[], Results]
    record: PassRecord | None

    @classmethod
    def of(cls, record: PassRecord, run: Callable[[], Results]) -> _Point:
        bitwise = record.contract is not None and record.contract.bitwise
        return cls(record.name, record.summary, bitwise, run, record)


class _Search:
    """What was found so far: `failure` is that of a pass that did not come to its end."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.stages: list[Stage] = []
        self.found: list[tuple[int, Culprit]] = []  # each with its place in its pipeline
        self.failure: PassError | None = None

    def passed(self, run: Callable[[], History]) -> list[PassRecord]:
        """The records of a pipeline, as far as it came: what is wrong may be wrong before it fails."""
        try:
            return run().records
        except PassError as error:
            if not isinstance(error.history, History):
                raise
            self.failure = error
            return error.history.records

    def along(self, program: str, points: Iterable[_Point], compare: Callable[[Results], list[Difference]]) -> None:
        """Run a pipeline's programs, and note what each does to the results of the one before it."""
        known: set[tuple[str, str, int]] = set()
        last: _Point | None = None
        before: Results = []
        refused: str | None = None
        values = ValueCache()
        for at, point in enumerate(points):
            said = self._refusal(point, values) if refused is None else None
            refused = refused or said
            try:
                now = point.run()
            except Exception:
                if refused is None:
                    raise
                now = []  # (a program that breaks an invariant need not run)
            compared = compare(now) if now else []
            beyond = [d for d in compared if not d.ok and (d.what, d.name, d.rank) not in known]
            bits = _changed_bits(before, now) if now else []
            if bits and last is not None and _changed_bits(last.run(), before):  # (it differs from itself)
                bits = []
            worst = max(compared, key=lambda d: (not d.ok, d.error), default=None)
            self.stages.append(Stage(program, point.name, point.bitwise, not bits, worst))
            broken = bits if point.bitwise else []
            if known:  # (after a fault only what was right says something: the rest hands on what is wrong)
                beyond, broken, said = [d for d in beyond if (d.what, d.name) in before[d.rank]], [], None
            known |= {(d.what, d.name, d.rank) for d in beyond}
            if beyond or broken or said:
                changed = self._changes(last, point)
                found = Culprit(program, point.name, point.summary, said, _sorted(beyond), _sorted(broken), changed)
                self.found.append((at, found))
            if not now:
                break
            last, before = point, now

    def _refusal(self, point: _Point, values: ValueCache) -> str | None:
        """What the verifier has against a program; None for nothing."""
        if point.record is None:
            return None
        try:
            verify_program(point.record.program, values)
        except VerifyError as error:
            return f"{error.what}: {error.why}" if error.why else error.what
        return None

    def culprits(self) -> tuple[Culprit, ...]:
        """In the order of the pipelines, the step's before the update's; a pass of several programs once."""
        first: dict[tuple[bool, str], Culprit] = {}
        for _, culprit in sorted(self.found, key=lambda f: (f[1].program == UPDATE, f[0])):
            first.setdefault((culprit.program == UPDATE, culprit.name), culprit)
        return tuple(first.values())

    def _changes(self, before: _Point | None, point: _Point) -> diff.Difference | None:
        if before is None or before.record is None or point.record is None:
            return None
        return diff.compare(of_record(before.record, self.costs), of_record(point.record, self.costs), simulate=False)


def _changed_bits(before: Results, now: Results) -> list[Difference]:
    """What a program gives otherwise than another did, with errors relative to that. Weights may be kept that were not."""
    return [
        replace(difference(what, name, rank, values.get((what, name)), old), allowed=0.0, exact=False)
        for rank, (earlier, values) in enumerate(zip(before, now, strict=False))  # (nothing is before the first)
        for (what, name), old in earlier.items()
        if not same_bits(values.get((what, name)), old)
    ]


def _sorted(differences: list[Difference]) -> tuple[Difference, ...]:
    return tuple(sorted(differences, key=lambda d: -d.error))


def _data(difference: Difference) -> dict[str, Any]:
    """(JSON has no infinity: an error that can't be measured is null there.)"""
    error = difference.error if math.isfinite(difference.error) else None
    return asdict(difference) | {"error": error, "ok": difference.ok}
