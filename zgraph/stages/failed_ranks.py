"""Handles a rank that fails alone in a step of a pipeline: the others learn why, and stop waiting for it.

The failed rank writes its error into the process group's store, and shuts its side of the groups that it shares with
others. A rank that waits for it there gets an error at once, reads the store, and does the same for those that wait for
it. So all ranks leave the step, with the error of the first. Messages were lost on the way, so neither these groups nor
the model can be used again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from zgraph.errors import CollectiveError, PeerError, PlanError, RankMismatchError, StepError
from zgraph.plan.pipeline_schedules.actions import Action, Kind
from zgraph.ranks import progress
from zgraph.ranks.agreement import Agreement
from zgraph.torch_compat import process_groups

__all__ = ["FailedRank", "FailureBoard", "FailureMarker"]

_FIRST = "first"
_LONGEST = 4000  # characters of an error that are kept
_ALIKE = (PlanError, RankMismatchError, StepError)  # raised by an update on all ranks, or on none


@dataclass(frozen=True)
class FailedRank:
    """A rank's error, as the others are told."""

    rank: int  # the rank that failed
    stage: int | None  # the stage that it was running; None outside of the schedule
    micro_batch: int | None  # its micro-batch; None outside of the schedule
    where: str  # what it was doing, in words
    said: str  # the type and text of its error

    def error(self) -> PeerError:
        """Return the error that the other ranks raise."""
        error = PeerError(
            f"rank {self.rank} has failed in this step",
            where=self.where,
            why=self.said,
            hint="look at that rank's output; this rank waits for it no more, and the step has no result",
        )
        error.rank, error.stage, error.micro_batch = self.rank, self.stage, self.micro_batch
        error.absent = (self.rank,)
        return error


@dataclass
class FailureMarker:
    """The position of this rank in its row of a schedule."""

    action: Action | None = None  # the action that it runs; None after the schedule

    def fault(self, error: BaseException) -> FailedRank:
        """Return this rank's fault, for an error that it raised here."""
        action, rank = self.action, dist.get_rank()
        said = f"{type(error).__name__}: {error}"[:_LONGEST]
        if action is None:
            return FailedRank(rank, None, None, "after the schedule, in the update or the exchange of losses", said)
        kind = "forward" if action.kind is Kind.F else "backward"
        where = f"stage {action.stage}, the {kind} of micro-batch {action.micro_batch}"
        return FailedRank(rank, action.stage, action.micro_batch, where, said)


class FailureBoard:
    """The place where ranks write why they have left a step. `name` belongs to these ranks alone, and is the same on
    all of them. `groups` are those in which they wait for each other, besides the groups of the `voters`, which refuse
    to vote after a failure. `known` is the first fault, once this rank has failed too.
    """

    def __init__(self, name: str, groups: Sequence[Any], voters: Sequence[Agreement]) -> None:
        self.name = name
        self.groups = list(dict.fromkeys((*groups, *(g for v in voters for g in v.groups()))))
        self.known: FailedRank | None = None
        for agreement in voters:
            agreement.refuse_ended = self.refuse_broken

    def refuse_broken(self) -> None:
        """Raise `StepError` after a step that failed."""
        if self.known is not None:
            raise StepError(
                "the pipeline can't go on after a step that failed on one rank alone",
                where="mesh.pp",
                why=f"rank {self.known.rank} ({self.known.where}) said: {self.known.said}",
                hint="the ranks no longer know what is on its way between them: start all of them again, from the last checkpoint",
            )

    @contextlib.contextmanager
    def watched(self) -> Iterator[FailureMarker]:
        """Watch what ranks do together in a step. An error raised inside on this rank is told to the others, and ends
        their waits; if another rank failed first, `PeerError` with its text is raised. Errors that all ranks raise
        alike, after the schedule, pass.
        """
        global _watching
        self.refuse_broken()
        marker = FailureMarker()
        _watching = weakref.ref(self)
        try:
            yield marker
        except _ALIKE as error:
            if marker.action is None:
                raise
            self._leave(marker.fault(error))
            raise
        except BaseException as error:
            first = self._leave(marker.fault(error))
            followed = first.rank != dist.get_rank() and isinstance(error, (CollectiveError, RuntimeError))
            if followed:
                raise first.error() from error
            raise
        finally:
            _watching = None

    @functools.cached_property
    def _store(self) -> Any:
        return process_groups.own_store(process_groups.default_store(), f"zgraph/faults/{self.name}")

    def first(self) -> FailedRank | None:
        """Return the fault of the first rank that failed; None if none has, or the store is gone with it."""
        try:
            text = self._store.get(_FIRST) if self._store.check([_FIRST]) else None
        except RuntimeError:
            return None
        return FailedRank(**json.loads(text)) if text is not None else None

    def _leave(self, mine: FailedRank) -> FailedRank:
        """Write this rank's fault, unless another rank was first; then shut the groups, so that nobody waits for this
        rank. Return the first fault.
        """
        first_fault = self.first()
        if first_fault is None:
            with contextlib.suppress(RuntimeError):
                self._store.compare_set(_FIRST, "", json.dumps(asdict(mine)))
            first_fault = self.first() or mine
        self.known = first_fault
        for group in self.groups:
            process_groups.shut(group)
        return first_fault


_watching: weakref.ref[FailureBoard] | None = None


def _report(node: Any) -> tuple[str, tuple[int, ...]] | None:
    """Return why a collective has failed, and which rank is absent, if a rank has written it."""
    board = _watching() if _watching is not None else None
    fault = board.first() if board is not None else None
    if fault is None or fault.rank == dist.get_rank():
        return None
    return f"rank {fault.rank} has failed before ({fault.where}): {fault.said}", (fault.rank,)


progress.report_by(_report, first=True)
