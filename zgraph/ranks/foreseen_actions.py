"""Foresees what the ranks of a group do next, act by act: an act that all ranks foresee needs no vote.

An act is a forward, a backward, an update, or a vote about anything else. After a vote all ranks know that they have
done the same so far, and foresee the same: the act that followed when this step and the one before last went this way.
A rank that does what is foreseen goes on at once. A rank that does anything else votes, and waits there for the others.
If the others went on as foreseen, they are in a program that waits for this rank: so no two different programs ever
meet, but all ranks wait. Counting acts reveals this. A rank that waits in a vote writes its number of acts into the
process group's store; on a rank that has gone past that number without a vote, the heartbeat's thread answers. That
proves that they differ, and tells how. The rank that found it writes it to the store and shuts its process groups, so
that nobody waits there: all raise the same error.

Several models of the same ranks vote in groups of their own, where a rank that calls another model than the others
meets nobody. So ranks also publish their numbers of acts with each model. Ranks that make the same calls in the same
order are each ahead of the other with every model, or with none; if one is ahead with one model and behind with
another, their orders differ.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from zgraph.errors import RankMismatchError
from zgraph.torch_compat import process_groups

Coming = tuple[str, Any]
"""What a rank announces about the coming update: a text that is equal on ranks that agree, and data that shows how
they differ.
"""

UPDATE = "an update"
ORDER = "the order in which they call models"
LONGEST = 256  # most acts in a row without a vote
KNOWN = 20_000  # most remembered positions in steps; more are forgotten
_WAITS, _PASSED, _DIFFERENCE = "waits", "passed", "difference"


@dataclass(frozen=True)
class Act:
    """What a rank does in a step."""

    subject: str  # what the act is about
    text: str  # what all ranks must have in common


class ForeseenActions:
    """The acts of this rank with a group of ranks. `name` identifies the group, on all of its ranks alike; `groups` are
    the process groups in which they wait for each other.
    """

    of_all: ClassVar[weakref.WeakSet[ForeseenActions]] = weakref.WeakSet()
    # by ranks: the course that was last in an act
    last: ClassVar[weakref.WeakValueDictionary[tuple[int, ...], ForeseenActions]] = weakref.WeakValueDictionary()

    def __init__(self, name: str, ranks: Sequence[int], groups: Sequence[Any]) -> None:
        self.ranks = tuple(ranks)
        self.groups = groups
        self.position = 0  # acts so far
        self.voted = 0  # the position of the last vote
        self._voted_before = 0  # the position of the vote before it
        self.past: list[Act] = []  # acts since the last vote
        self.coming: Callable[[], Coming] | None = None
        # says how ranks differ that announced this about an update
        self.compare: Callable[[Sequence[Any]], str | None] = lambda said: None
        self.said: Coming | None = None  # what this rank has announced about the update that it is about to run
        self.agreed: Coming | None = None  # what all ranks announced alike about the coming update, in the last vote
        self.active = True
        # what ranks disagreed about, after which their process groups are shut
        self.found: RankMismatchError | None = None
        self.promised: list[Act] = []  # acts that ranks have voted on in advance, the next one last
        self._following: dict[tuple[int, int], Act] = {}
        self._before = self._step = 0  # hashes of the step before, and of this step so far
        self.name = name
        self._root = process_groups.default_store()
        self._store = process_groups.own_store(self._root, f"zgraph/course/{name}")
        self.waits_in: tuple[int, Act] | None = None  # the vote that this rank waits in for others, and its position
        self._published = ""  # what this rank has last published of its models
        self._newest = ""  # the model that these ranks have compiled last
        self._compared = 0  # acts until then, in which ranks need not have been alike: an error may have ended some
        self._lock = threading.Lock()
        ForeseenActions.of_all.add(self)
        for course in self._models():
            course._compared = course.position
            course._newest = name

    # -- what is foreseen ---------------------------------------------------------------------------------------------
    def foreseen(self) -> Act | None:
        """Return the act that all ranks foresee; None if they foresee none."""
        act = self._following.get((self._before, self._step))
        return self.promised[-1] if act is None and self.promised else act

    def passes(self, act: Act) -> bool:
        """Go on without a vote and return True if this act is foreseen. It is not if another model of the same ranks
        has been in an act since.
        """
        others = ForeseenActions.last.get(self.ranks) is not self
        if not self.active or others or len(self.past) >= LONGEST or self.foreseen() != act:
            return False
        if self.promised and self.promised[-1] == act:
            self.promised.pop()
        self.past.append(act)
        self.position += 1
        return True

    def did(self, act: Act, *, ends: bool = False) -> None:
        """Learn from an act that all ranks have voted on or foreseen. `ends`: it ends the step."""
        ForeseenActions.last[self.ranks] = self
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
        """Forget what was foreseen: the plan has changed."""
        self._following.clear()
        self.promised.clear()
        self._before = self._step = 0
        self.agreed = None

    # -- votes --------------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def waiting(self, act: Act) -> Iterator[None]:
        """Wait for the other ranks inside, in a vote on this act."""
        self._voted_before = self.voted
        self.voted = self.position + 1  # (`voted` first: a thread that reads in between finds no act past a vote)
        self.position = self.voted
        self.waits_in = self.position, act
        try:
            yield
        finally:
            self.waits_in = None

    def leave_vote(self, agreed: Coming | None) -> None:
        """Leave a vote in which all ranks agreed."""
        self.past.clear()
        self.agreed = agreed

    def before_vote(self) -> tuple[tuple[Act, ...], Coming | None]:
        """Return the acts since the last vote, and what this rank announces about the coming update. Raises what ranks
        disagreed about before.
        """
        if self.found is not None:
            raise self.found
        return tuple(self.past), self.coming() if self.coming is not None and self.active else None

    def look(self) -> None:
        """End the vote in which this rank waits, if another rank has gone past it, by shutting the process groups. Called
        by the heartbeat's thread.
        """
        waiting = self.waits_in  # (the thread that trains may leave the vote meanwhile)
        if waiting is None or self.difference() is not None or self._look_at_other_models(waiting[1]):
            return
        position, mine = waiting
        with self._lock:
            waits = self._waits()
            # (if another rank waits where this rank went past, that one differed first)
            if self._voted_before < waits < position:
                self._store.set(_PASSED, json.dumps([waits, process_groups.my_rank()]))
            elif waits != position:
                self._store.set(_WAITS, str(position))
            said = json.loads(self._store.get(_PASSED)) if self._store.check([_PASSED]) else None
        foreseen = self.foreseen()
        if said is None or said[0] != position or foreseen is None:
            return
        subject, ballot = mine.subject, mine.text
        here, why = process_groups.my_rank(), None
        if foreseen.subject == subject == UPDATE and self.said is not None and self.agreed is not None:
            why = self.compare([(self.said if rank == here else self.agreed)[1] for rank in self.ranks])
        about = foreseen.subject
        is_same = foreseen.subject == subject and ballot.startswith(foreseen.text)  # (numbers follow in an update's)
        if why is None and is_same and len(self._models()) > 1:
            about = ORDER
            why = (
                f"before {subject}, rank {here} has called another model or changed weights, and rank {said[1]} has not"
            )
        why = why or shown_difference([(said[1], foreseen), (here, mine)])
        self._tell({"subject": about, "where": f"rank(s) [{here}] differ from rank {said[1]}", "why": why})

    def answer(self) -> None:
        """Tell a rank that waits in a vote that this rank has gone past it without one. Called by the heartbeat's
        thread.
        """
        voted, position = self.voted, self.position
        if voted == position or not self.active or not self._lock.acquire(blocking=False):
            return
        try:
            waits = self._waits()
            if voted < waits <= position:
                self._store.set(_PASSED, json.dumps([waits, process_groups.my_rank()]))
        except RuntimeError:  # (the store has ended with its process group: nobody asks there any more)
            self.active = False
        finally:
            self._lock.release()

    # -- several models -----------------------------------------------------------------------------------------------
    def _models(self) -> list[ForeseenActions]:
        """Return the courses of all models of these ranks, by name."""
        courses = [c for c in list(ForeseenActions.of_all) if c.ranks == self.ranks and c._root is self._root]
        return sorted(courses, key=lambda course: course.name)

    def _positions(self) -> tuple[str, dict[str, int]]:
        """Return the newest model, and this rank's numbers of acts with each model since it was compiled, as they were at
        one moment."""
        while True:  # (the thread that trains may be in an act, or compile)
            models = self._models()
            first, second = [[(c._newest, c.position - c._compared) for c in models] for _ in range(2)]
            if first == second and len({newest for newest, _ in first}) == 1:
                return first[0][0], {course.name: acts for course, (_, acts) in zip(models, first, strict=True)}

    def publish(self) -> bool:
        """Publish how far this rank is with each model of these ranks, and the vote that it waits in; return whether there
        are several. Called by the heartbeat's thread, and while this rank waits.
        """
        models = self._models()
        if len(models) < 2:
            return False
        waiting = next((course.waits_in for course in models if course.waits_in is not None), None)
        known = json.dumps([*self._positions(), waiting and [waiting[1].subject, around(waiting[1].text, 0)]])
        first = models[0]
        with first._lock:
            if known != first._published:
                first._between_models.set(str(process_groups.my_rank()), known)
                first._published = known
        return True

    def _look_at_other_models(self, mine: Act) -> bool:
        """Return whether a rank beside this one, which waits in a vote, calls models in another order; end their waits
        then.

        All ranks wait, or will: if any two differ, two that are neighbours do.
        """
        if not self.publish():
            return False
        (last_compiled, acts_of), here = self._positions(), process_groups.my_rank()
        at = self.ranks.index(here)
        for rank in {self.ranks[at - 1], self.ranks[(at + 1) % len(self.ranks)]} - {here}:
            with self._lock:
                key, store = str(rank), self._between_models
                published = store.get(key) if store.check([key]) else None
            newest, theirs, waiting = json.loads(published) if published is not None else ("", {}, None)
            ahead = [name for name in acts_of if theirs.get(name, 0) > acts_of[name]]
            if (
                newest != last_compiled
                or not ahead
                or not any(theirs[name] < acts_of[name] for name in acts_of.keys() & theirs.keys())
            ):
                continue
            other = waiting or ["a call", "begun already"]
            acts = [
                (rank, Act(f"{other[0]} of model {ahead[0]}", other[1])),
                (here, Act(f"{mine.subject} of model {self.name}", mine.text)),
            ]
            where = f"rank(s) [{here}] differ from rank {rank}"
            self._tell({"subject": ORDER, "where": where, "why": shown_difference(acts)})
            return True
        return False

    @functools.cached_property
    def _between_models(self) -> Any:
        """The store in which ranks publish how far they are with each model."""
        return process_groups.own_store(self._root, f"zgraph/models/{' '.join(map(str, self.ranks))}")

    def _waits(self) -> int:
        """Return the position of the vote in which a rank waits, or last waited; 0 if none ever did. Of several ranks,
        the first position counts.
        """
        return int(self._store.get(_WAITS)) if self._store.check([_WAITS]) else 0

    def difference(self) -> RankMismatchError | None:
        """Return the error that any rank has found, after shutting this rank's groups too; None if there is none, or
        the store is gone.
        """
        if self.found is not None:
            return self.found
        try:
            with self._lock:
                message = self._store.get(_DIFFERENCE) if self._store.check([_DIFFERENCE]) else None
        except RuntimeError:
            return None
        if message is None:
            return None
        fields = json.loads(message)
        return self.end(f"ranks disagree about {fields['subject']}", fields["where"], fields["why"])

    def end(self, what: str, where: str, why: str) -> RankMismatchError:
        """Return the error to raise if ranks have done different things, and shut the process groups: transfers that
        some ranks have begun wait for the others, so no rank uses these groups any more.
        """
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

    def _tell(self, said: dict[str, str]) -> None:
        """Write how ranks differ to the store, for each model that one of them may wait in, and end the waits of this
        rank."""
        for course in self._models():
            with course._lock:
                course._store.compare_set(_DIFFERENCE, "", json.dumps(said))
            course.difference()


def answer_all() -> None:
    """Let each course of this process answer, and look. Called by the heartbeat's thread, which holds no course between two beats
    (a course refers to its model).
    """
    try:
        living = list(ForeseenActions.of_all)
    except RuntimeError:  # (another thread has just made one)
        return
    for course in living:
        course.answer()
        with contextlib.suppress(RuntimeError):  # (its store has ended, or another thread has just made a course)
            course.publish()
            course.look()


def shown_difference(acts: Sequence[tuple[int, Act]]) -> str:
    """Return how the acts of several ranks differ: a line for each rank."""
    texts = [f"{act.subject}: {act.text}" if len({a.subject for _, a in acts}) > 1 else act.text for _, act in acts]
    common = next(
        (i for i, column in enumerate(zip(*texts, strict=False)) if len(set(column)) > 1), min(map(len, texts))
    )
    return "\n".join(f"rank {rank}: {around(text, common)}" for (rank, _), text in zip(acts, texts, strict=True))


def around(text: str, at: int) -> str:
    """Return about 400 characters of `text`, around position `at`."""
    first = max(0, at - 150) if len(text) > 400 else 0
    return ("… " if first else "") + text[first : first + 400] + (" …" if len(text) > first + 400 else "")
