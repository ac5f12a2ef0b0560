"""The collectives of a program over ranks that have different rows, in their order.

Two programs with the same order can run in one step, each on some of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from zgraph.build.pass_pipeline import Variant
from zgraph.codegen.partition import Parts
from zgraph.errors import RankMismatchError
from zgraph.program import collectives
from zgraph.program.groups import dim_of
from zgraph.program.node import info, tensor
from zgraph.program.program import DATA_DIMS, OutputRole, Program

S = TypeVar("S", bound="Step")


class Step(Protocol):
    """The programs of a step, by their variants."""

    @property
    def name(self) -> str: ...

    def parts(self, variant: Variant = ...) -> Parts: ...


def lacking(beside: Sequence[S], variant: Variant, is_made: Callable[[S], bool]) -> list[S]:
    """Return those of the programs that run beside each other that still have to make what a variant needs.

    Raises `RankMismatchError` where their collectives differ in this variant.
    """
    lacking_steps = [one for one in beside if not is_made(one)]
    if lacking_steps and len(beside) > 1:
        refuse_unlike(beside, variant)
    return lacking_steps


def refuse_unlike(steps: Sequence[Step], variant: Variant) -> None:
    """Raise `RankMismatchError` unless these programs have the same collectives, so that each rank can run any of them."""
    for step in steps[1:]:
        if mismatch := difference(steps[0], step, variant):
            where, why = mismatch
            raise RankMismatchError(
                "ranks have batches that no one program serves, and the programs communicate in different ways",
                where=f"programs {steps[0].name} and {step.name}, {where}",
                why=why,
                hint="give each rank several rows, of several tokens (drop or pad an uneven last batch)",
            )


def difference(one: Step, other: Step, variant: Variant) -> tuple[str, str] | None:
    """Return (where, how) the collectives of two programs first differ; None where they do not."""
    first, second = _meetings_of(one, variant), _meetings_of(other, variant)
    if first == second:
        return None
    both = zip(first, second, strict=False)
    at = next((i for i, (a, b) in enumerate(both) if a != b), min(len(first), len(second)))
    shown = [repr(x[at]) if at < len(x) else "nothing" for x in (first, second)]
    return f"what they do together as number {at}", f"one has {shown[0]}, the other {shown[1]}"


def _meetings_of(step: Step, variant: Variant) -> list[str]:
    parts = step.parts(variant)
    return [
        f"{number}: {line}"
        for number, program in enumerate((*parts.ahead, parts.forward, parts.backward))
        if program is not None
        for line in collectives_in_order(program)
    ]


def collectives_in_order(program: Program) -> list[str]:
    """Return the collectives over ranks with different rows, one readable line each, in order.

    At the end are the whole weights that the program hands on, because later programs then need not gather them.
    """
    lines: list[str] = []
    buckets: dict[str, int] = {}
    for node in program.graph.nodes:
        if collectives.is_start(node) and dim_of(collectives.group_of(node)) in DATA_DIMS:
            operand = tensor(node.all_input_nodes[0])
            bucket = info(node).bucket
            together = f", sent with others as {buckets.setdefault(bucket, len(buckets))}" if bucket else ""
            how = " ".join(filter(None, (collectives.kind(node), collectives.reduce_op_of(node))))
            lines.append(
                f"{how} of {info(node).param} over {collectives.group_of(node)}, {operand.dtype}{list(operand.shape)}{together}"
            )
    return lines + [f"whole {p.name}" for p in program.outputs if p.role is OutputRole.UNSHARDED]
