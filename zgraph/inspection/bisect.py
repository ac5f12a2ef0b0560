"""Find the first pass that changes what a step computes, by running its programs after each pass on virtual ranks.

A step's programs (forward and backward as a whole, then split) are compared with the plain model, an update's with the
update before any pass. A pass is to blame if something differs by more than rounding after it and did not before it; if
its contract says that it keeps every bit and it does not; and if the verifier refuses the program that it leaves.
Passes are run one after another rather than bisected, because a later pass may hide what an earlier one did.
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
SPLIT = "split"  # the step after the last pass


@dataclass(frozen=True)
class Stage:
    """A program after one pass, run on virtual ranks."""

    program: str  # the pipeline's name: "step", one of its variants, or "update"
    name: str  # the pass
    said_bitwise: bool  # whether the pass's contract says that it keeps every bit
    kept: bool  # whether it kept every bit of the results of the program before it
    worst: Difference | None  # the tensor that differs most; None if none is compared


@dataclass(frozen=True)
class Culprit:
    """A pass that changed what is computed."""

    program: str  # the pipeline's name: "step", one of its variants, or "update"
    name: str  # the pass
    summary: str  # what the pass does
    refused: str | None  # why the verifier refuses the program after it; None if it does not
    # tensors that differ by more than is allowed and did not before it, the largest error first
    beyond: tuple[Difference, ...]
    # tensors that it changed though it says that it keeps every bit, by errors relative to the program before
    bits: tuple[Difference, ...]
    changed: diff.Difference | None  # what it did to the program; None for the capture and the split


@dataclass(frozen=True)
class Bisection:
    """The result of `bisect`."""

    world: int  # the number of virtual ranks
    stages: tuple[Stage, ...]  # each pass's program, in the order they ran
    culprits: tuple[Culprit, ...]  # the passes to blame, in the order of the pipeline
    # the error of a pass that could not handle the program that an earlier one left; None if all ran
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
    """Run the programs of a step, and of its update, after each pass on `world` virtual ranks, and find the passes to
    blame.

    `inputs` (the global batch) and `loss_fn` are as in `zgraph.verify`, which documents what is compared, and raises
    the same errors. `bound` is the allowed relative error, by default that of the dtype that is computed in
    (`zgraph.program.tolerance`). Raises `PlanError` for a plan with a pipeline: `zgraph.verify` says which of its
    stages is wrong.
    """
    plan.refuse_pipeline(world, "search for a faulty pass")
    local = plan.local_steps
    if plan.wire.compresses or (local is not None and local.wire != "same"):
        where = "wire" if plan.wire.compresses else "local_steps.wire"
        raise PlanError(
            f"a faulty pass is searched for by comparing with the plain model, and {where} sends values in few bits",
            where=where,
            hint="leave it out; zgraph verify compares each value that is sent so with what it was",
        )
    with virtual_step(model, plan, world, inputs, loss_fn) as virtual:
        step = virtual.unverified()
        search = _Search(virtual.costs)

        def look(variant: Variant) -> None:
            def compare(results: Results) -> list[Difference]:
                return virtual.differences(results, variant, bound)

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
    """Return "step", with a text that tells a variant of the step from the others."""
    kinds = {
        "weights gathered before": variant.gathered_before,
        "gradients not reduced": not variant.reduce,
        "gradients added to earlier ones": variant.accumulated,
    }
    said = ", ".join(kind for kind, true in kinds.items() if true)
    return f"{STEP} ({said})" if said else STEP


@dataclass(frozen=True)
class _Point:
    """A position in a pipeline: the program there, and how to run it."""

    name: str  # the pass before it
    summary: str  # what the pass does
    bitwise: bool  # whether the pass says that it keeps every bit
    run: Callable[[], Results]  # runs the program
    record: PassRecord | None  # the pass's record; None for the split

    @classmethod
    def of(cls, record: PassRecord, run: Callable[[], Results]) -> _Point:
        bitwise = record.contract is not None and record.contract.bitwise
        return cls(record.name, record.summary, bitwise, run, record)


class _Search:
    """The findings so far. `failure` is the error of a pass that failed."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.stages: list[Stage] = []
        self.found: list[tuple[int, Culprit]] = []  # (position in its pipeline, culprit)
        self.failure: PassError | None = None

    def passed(self, run: Callable[[], History]) -> list[PassRecord]:
        """Run a pipeline and return its records; if a pass fails, note the failure and return the records before it,
        since the fault may be there."""
        try:
            return run().records
        except PassError as error:
            if not isinstance(error.history, History):
                raise
            self.failure = error
            return error.history.records

    def along(self, program: str, points: Iterable[_Point], compare: Callable[[Results], list[Difference]]) -> None:
        """Run a pipeline's programs one after another, and note what each pass does to the results of the program
        before it."""
        known: set[tuple[str, str, int]] = set()
        last: _Point | None = None
        before: Results = []
        refused: str | None = None
        values = ValueCache()
        for at, point in enumerate(points):
            refusal = self._refusal(point, values) if refused is None else None
            refused = refused or refusal
            try:
                now = point.run()
            except Exception:
                if refused is None:
                    raise
                now = []  # (a program that the verifier refuses need not run)
            compared = compare(now) if now else []
            beyond = [d for d in compared if not d.ok and (d.what, d.name, d.rank) not in known]
            bits = _changed_bits(before, now) if now else []
            # (bits say nothing after a program that does not repeat its own)
            if bits and last is not None and _changed_bits(last.run(), before):
                bits = []
            worst = max(compared, key=lambda d: (not d.ok, d.error), default=None)
            self.stages.append(Stage(program, point.name, point.bitwise, not bits, worst))
            broken = bits if point.bitwise else []
            if known:  # (after a fault, tensors that were wrong before say nothing: they may carry it on)
                beyond, broken, refusal = [d for d in beyond if (d.what, d.name) in before[d.rank]], [], None
            known |= {(d.what, d.name, d.rank) for d in beyond}
            if beyond or broken or refusal:
                changed = self._changes(last, point)
                culprit = Culprit(
                    program, point.name, point.summary, refusal, _sorted(beyond), _sorted(broken), changed
                )
                self.found.append((at, culprit))
            if not now:
                break
            last, before = point, now

    def _refusal(self, point: _Point, values: ValueCache) -> str | None:
        """Return why the verifier refuses a program; None if it does not."""
        if point.record is None:
            return None
        try:
            verify_program(point.record.program, values)
        except VerifyError as error:
            return f"{error.what}: {error.why}" if error.why else error.what
        return None

    def culprits(self) -> tuple[Culprit, ...]:
        """Return the passes to blame in the order of the pipelines, the step's before the update's, each once."""
        first: dict[tuple[bool, str], Culprit] = {}
        for _, culprit in sorted(self.found, key=lambda f: (f[1].program == UPDATE, f[0])):
            first.setdefault((culprit.program == UPDATE, culprit.name), culprit)
        return tuple(first.values())

    def _changes(self, before: _Point | None, point: _Point) -> diff.Difference | None:
        if before is None or before.record is None or point.record is None:
            return None
        return diff.compare(of_record(before.record, self.costs), of_record(point.record, self.costs), simulate=False)


def _changed_bits(before: Results, now: Results) -> list[Difference]:
    """Return the differences between the results of two programs, with errors relative to the earlier. Results of the
    later only don't count: weights may be kept that were not before."""
    return [
        replace(difference(what, name, rank, values.get((what, name)), old), allowed=0.0, exact=False)
        for rank, (earlier, values) in enumerate(zip(before, now, strict=False))  # (the first program follows none)
        for (what, name), old in earlier.items()
        if not same_bits(values.get((what, name)), old)
    ]


def _sorted(differences: list[Difference]) -> tuple[Difference, ...]:
    return tuple(sorted(differences, key=lambda d: -d.error))


def _data(difference: Difference) -> dict[str, Any]:
    """Return a difference as JSON, with null for an error that is not finite."""
    error = difference.error if math.isfinite(difference.error) else None
    return asdict(difference) | {"error": error, "ok": difference.ok}
