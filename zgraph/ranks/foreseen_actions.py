"""What the ranks of a group do together, act by act, and what they are foreseen to do next: an act that all foresee needs no vote.

An act is a forward, a backward, an update, or a vote about anything else. After a vote all ranks know that they have done the same so far, and
foresee the same: what followed the last time that a step and the one before it went so. Who then does what is foreseen goes on at once.
Who does anything else votes, and waits there for the others. If these went on as foreseen they are in a program that waits for this rank: so
no two programs meet that differ, and everybody waits. That is found by the numbers of acts. Who waits in a vote writes its number into the
process group's store; the heartbeats' thread of a rank that has gone by there without a vote answers. Then it is certain that they differ, and
how. The one that has found it says so in the store and shuts its process groups, so that nobody waits there: all raise the same error.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from zgraph.errors import RankMismatchError
from zgraph.torch_compat import process_groups

Coming = tuple[str, Any]
"""What a rank says of the update to come: in words that are equal on ranks that agree, and whatever tells how others differ."""

UPDATE = "an update"
LONGEST = 256  # acts without a vote
KNOWN = 20_000  # places in steps from which it is known how they went on
_WAITS, _PASSED, _DIFFERENCE = "waits", "passed", "difference"


@dataclass(frozen=True)
class Act:
    """What a rank does: what that is about, and what all ranks must have alike."""

    subject: str
    text: str


class Course:
    """The acts of this rank with a group of ranks. `name` is the group's, alike on all of them and of no other; `groups` are the process groups
    that they wait for each other in."""

    of_all: ClassVar[weakref.WeakSet[Course]] = weakref.WeakSet()
    last: ClassVar[weakref.WeakValueDictionary[tuple[int, ...], Course]] = (
        weakref.WeakValueDictionary()
    )  # of those of the same ranks the one that was last in an act

    def __init__(self, name: str, ranks: Sequence[int], groups: Sequence[Any]) -> None:
        self.ranks = tuple(ranks)
        self.groups = groups
        self.position = 0  # acts so far
        self.voted = 0  # the position of the last vote
        self._voted_before = 0  # that of the one before
        self.past: list[Act] = []  # acts since then
        self.coming: Callable[[], Coming] | None = None
        self.compare: Callable[[Sequence[Any]], str | None] = lambda said: (
            None
        )  # in what ranks differ that said this of an update
        self.said: Coming | None = None  # what this rank says of the update that it is about to run
        self.agreed: Coming | None = None  # what ranks said alike, when they last voted, of the update to come
        self.active = True
        self.found: RankMismatchError | None = None  # what ranks disagreed about: then their process groups are shut
        self.promised: list[Act] = []  # acts that ranks have voted on before they come, the next one last
        self._following: dict[tuple[int, int], Act] = {}
        self._before = self._step = 0  # marks of the step before, and of this one so far
        self._store = process_groups.own_store(process_groups.default_store(), f"zgraph/course/{name}")
        self._lock = threading.Lock()
        Course.of_all.add(self)

    # -- what is foreseen ---------------------------------------------------------------------------------------------
    def foreseen(self) -> Act | None:
        """The act that all ranks foresee; None where they foresee none."""
        found = self._following.get((self._before, self._step))
        return self.promised[-1] if found is None and self.promised else found

    def passes(self, act: Act) -> bool:
        """Go on without a vote, if this act is foreseen. Another model of the same ranks may have been in an act since: then it is not."""
        others = Course.last.get(self.ranks) is not self
        if not self.active or others or len(self.past) >= LONGEST or self.foreseen() != act:
            return False
        if self.promised and self.promised[-1] == act:
            self.promised.pop()
        self.past.append(act)
        self.position += 1
        return True

    def did(self, act: Act, *, ends: bool = False) -> None:
        """Learn from an act, which all ranks have voted on or foreseen. Does it end the step?"""
        Course.last[self.ranks] = self
        if len(self._following) >= KNOWN:
            self._following.clear()
        self._following[self._before, self._step] = act
        self._step = hash((self._step, act))
        if ends:
            self._before, self._step = self._step, 0

    @property
    def begins(self) -> bool:
        """Whether a step begins with the next act."""
        return self._step == 0

    def begin_anew(self) -> None:
        """Foresee nothing: what comes is of another plan."""
        self._following.clear()
        self.promised.clear()
        self._before = self._step = 0
        self.agreed = None

    # -- votes --------------------------------------------------------------------------------------------------------
    def enter_vote(self) -> None:
        """This rank votes now."""
        self._voted_before = self.voted
        self.voted = self.position + 1  # (first: a thread that looks in between finds nothing that went by)
        self.position = self.voted

    def leave_vote(self, agreed: Coming | None) -> None:
        """All ranks have voted alike."""
        self.past.clear()
        self.agreed = agreed

    def before_vote(self) -> tuple[tuple[Act, ...], Coming | None]:
        """What this rank has done since the last vote, and what it says of the update to come. Raises what ranks disagreed about before."""
        if self.found is not None:
            raise self.found
        return tuple(self.past), self.coming() if self.coming is not None and self.active else None

    def look(self, subject: str, ballot: str) -> None:
        """While this rank waits in a vote: raise `RankMismatchError` if another has gone by here."""
        self.raise_difference()
        with self._lock:
            waits = self._waits()
            if (
                self._voted_before < waits < self.position
            ):  # (another waits where this rank went by: it is the first that is astray)
                self._store.set(_PASSED, json.dumps([waits, process_groups.my_rank()]))
            elif waits != self.position:
                self._store.set(_WAITS, str(self.position))
            said = json.loads(self._store.get(_PASSED)) if self._store.check([_PASSED]) else None
        foreseen = self.foreseen()
        if said is None or said[0] != self.position or foreseen is None:
            return
        here, why = process_groups.my_rank(), None
        if foreseen.subject == subject == UPDATE and self.said is not None and self.agreed is not None:
            why = self.compare([(self.said if rank == here else self.agreed)[1] for rank in self.ranks])
        why = why or shown_difference([(said[1], foreseen), (here, Act(subject, ballot))])
        self._tell({"subject": foreseen.subject, "where": f"rank(s) [{here}] differ from rank {said[1]}", "why": why})

    def answer(self) -> None:
        """For the thread of heartbeats: tell who waits in a vote that this rank has gone by there without one."""
        voted, position = self.voted, self.position
        if voted == position or not self.active or not self._lock.acquire(blocking=False):
            return
        try:
            waits = self._waits()
            if voted < waits <= position:
                self._store.set(_PASSED, json.dumps([waits, process_groups.my_rank()]))
        except RuntimeError:  # (the store has ended, with its process group: nobody asks there any more)
            self.active = False
        finally:
            self._lock.release()

    def _waits(self) -> int:
        """The position of the vote in which a rank waits, of several the first; or in which one did."""
        return int(self._store.get(_WAITS)) if self._store.check([_WAITS]) else 0

    def difference(self) -> RankMismatchError | None:
        """The error that a rank has found, if any did, after which this rank's groups are shut too. None as well where the store is gone."""
        if self.found is not None:
            return self.found
        try:
            with self._lock:
                found = self._store.get(_DIFFERENCE) if self._store.check([_DIFFERENCE]) else None
        except RuntimeError:
            return None
        if found is None:
            return None
        said = json.loads(found)
        return self.end(f"ranks disagree about {said['subject']}", said["where"], said["why"])

    def end(self, what: str, where: str, why: str) -> RankMismatchError:
        """The error to raise where ranks have done different things. Transfers that some have begun wait for the others: so no rank uses these
        process groups any more."""
        self.active = False
        for group in self.groups:
            process_groups.shut(group)
        self.found = RankMismatchError(
            what,
            where=where,
            why=why,
            hint="let every rank make the same calls in the same order, with the same numbers in its optimizer; then start all of them again: "
            'their process groups are shut, since some had gone on already (by watch={"vote": "call"} none does before all have voted)',
        )
        return self.found

    def raise_difference(self) -> None:
        """Raise what a rank has found, if any did."""
        found = self.difference()
        if found is not None:
            raise found

    def _tell(self, said: dict[str, str]) -> None:
        with self._lock:
            self._store.compare_set(_DIFFERENCE, "", json.dumps(said))
        self.raise_difference()


def answer_all() -> None:
    """For the thread of heartbeats, which keeps no course between two beats (a course has its model): let each of this process answer."""
    try:
        living = list(Course.of_all)
    except RuntimeError:  # (one is made just now, by another thread)
        return
    for course in living:
        course.answer()


def shown_difference(acts: Sequence[tuple[int, Act]]) -> str:
    """In what acts of several ranks differ: a line for each."""
    texts = [f"{act.subject}: {act.text}" if len({a.subject for _, a in acts}) > 1 else act.text for _, act in acts]
    common = next(
        (i for i, column in enumerate(zip(*texts, strict=False)) if len(set(column)) > 1), min(map(len, texts))
    )
    return "\n".join(f"rank {rank}: {around(text, common)}" for (rank, _), text in zip(acts, texts, strict=True))


def around(text: str, at: int) -> str:
    """At most some 400 characters of `text`, with what is at position `at`."""
    first = max(0, at - 150) if len(text) > 400 else 0
    return ("… " if first else "") + text[first : first + 400] + (" …" if len(text) > first + 400 else "")
