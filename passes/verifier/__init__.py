"""Checks a program against the invariants of its level; runs after capture and after every pass.

Each rule is one function over the program that yields a `VerifyError` for each node at fault. `RULES` lists them; each
file of this folder has the rules about one subject.
"""

from __future__ import annotations

from collections.abc import Callable

from zgraph.passes.verifier.collectives import (
    check_ahead,
    check_buckets,
    check_groups,
    check_pure,
    check_reductions,
    check_waits,
)
from zgraph.passes.verifier.faults import Faults
from zgraph.passes.verifier.lifetimes import check_host_transfers, check_releases
from zgraph.passes.verifier.ports import check_ports
from zgraph.passes.verifier.ranks import verify_ranks
from zgraph.passes.verifier.sizes import check_guards, check_sizes
from zgraph.passes.verifier.structure import check_mutation, check_order, check_phases, check_random
from zgraph.passes.verifier.values import ValueCache, check_values
from zgraph.program.program import Program

__all__ = ["RULES", "ValueCache", "all_faults", "verify_program", "verify_ranks"]

Rule = Callable[[Program], Faults]
RULES: tuple[Rule, ...] = (
    check_order,
    check_phases,
    check_ports,
    check_pure,
    check_waits,
    check_host_transfers,
    check_groups,
    check_reductions,
    check_buckets,
    check_ahead,
    check_releases,
    check_random,
    check_mutation,
    check_sizes,
)


def all_faults(program: Program, values: ValueCache | None = None) -> Faults:
    """Yield each fault of a program, in the order of the rules. A rule that raises after an earlier rule found a fault
    ends there.
    """
    cache = values or ValueCache()
    has_fault = False
    for rule in (*RULES, lambda program: check_values(program, cache), check_guards):
        try:
            for error in rule(program):
                has_fault = True
                yield error
        except Exception:
            if not has_fault:
                raise
        if has_fault and rule is check_order:
            return


def verify_program(program: Program, values: ValueCache | None = None) -> None:
    """Raise `VerifyError`, naming the node, unless the program keeps every invariant of its level. The error's `others`
    are all further faults.

    `values` remembers operators that were evaluated before: give the same one to successive calls over one program.
    """
    faults = all_faults(program, values)
    first = next(faults, None)
    if first is not None:
        first.others = tuple(faults)
        raise first
