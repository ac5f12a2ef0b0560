"""Cases on real ranks: processes over gloo that stay between cases, and are given programs. See `tests/support/ranks.py`."""

from __future__ import annotations

import time
from typing import Any

from ranks import Outcome as RankOutcome
from ranks import Ranks

from .case import Case
from .harness import Verdict, data_rank, run_pair
from .runner import LIMITS, Outcome, programs, quiet, tidy

CASES = 40
"""After so many cases the processes are started anew: each compiled model has process groups of its own."""


class Workers:
    """The processes of each number of ranks that was asked for; only those asked for last are kept, but `given` ones, which are not stopped."""

    def __init__(self, given: Ranks | None = None) -> None:
        self._given = given
        self._ranks: Ranks | None = None
        self._cases = 0

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self._ranks is not None:
            self._ranks.stop()
        self._ranks, self._cases = None, 0

    def run(self, case: Case) -> Outcome:
        """Run a case on as many ranks as it has."""
        begin = time.monotonic()
        if self._given is not None and self._given.world == case.world:
            return self._run(self._given, case, begin)
        if self._ranks is None or self._ranks.world != case.world or self._cases >= CASES:
            self.stop()
            self._ranks = Ranks(case.world, timeout=60.0)
        self._cases += 1
        return self._run(self._ranks, case, begin)

    def _run(self, ranks: Ranks, case: Case, begin: float) -> Outcome:
        try:
            outcomes = ranks.attempt(on_rank, case, limit=LIMITS["ranks"])
            verdict = joined(outcomes)
        except AssertionError as error:
            verdict = Verdict("unclear", "a rank does not return", str(error))
        if verdict.word != "equal":
            ranks.stop()  # ranks that stopped somewhere may be out of step
        return Outcome(case, verdict, time.monotonic() - begin)


def on_rank(case: Case) -> Verdict:
    """What one rank finds."""
    import torch.distributed as dist

    with quiet(), programs(case) as load:
        verdict = run_pair(load, True, data_rank(case.mesh, dist.get_rank()))
    tidy()
    return verdict


def joined(outcomes: list[RankOutcome]) -> Verdict:
    """The worst that a rank has found; "wrong" where no rank has something that another was thought to have."""
    order = ("equal", "refused", "unclear", "wrong")
    found: list[Any] = []
    for rank, outcome in enumerate(outcomes):
        if outcome.died:
            found.append(Verdict("unclear", "a rank died", f"rank {rank}"))
        elif outcome.error is not None:
            found.append(Verdict("unclear", f"harness: {type(outcome.error).__name__}", outcome.traceback))
        else:
            found.append(outcome.value)
    worst = max(found, key=lambda v: order.index(v.word))
    nowhere = sorted(frozenset.intersection(*(v.elsewhere for v in found)))
    if worst.word == "equal" and nowhere:
        step, group, name = nowhere[0]
        return Verdict(
            "wrong", f"{group} nowhere", f"step {step}: {group} {name} is on no rank what it is in plain PyTorch"
        )
    return worst
