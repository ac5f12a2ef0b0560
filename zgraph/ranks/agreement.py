"""Ranks that disagree are found, not waited for.

Before each run of a program every rank votes with a hash of what it is about to do: one reduction of two integers
(about 0.1 ms over gloo). Where votes differ, ranks exchange what they voted for and all raise the same error, before
any of them starts a collective that the others will not join.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zgraph.errors import RankMismatchError, ZgraphError
from zgraph.ranks import progress
from zgraph.torch_compat import process_groups

T = TypeVar("T")
S = TypeVar("S")


def _around(text: str, at: int) -> str:
    """At most some 400 characters of `text`, with what is at position `at`."""
    first = max(0, at - 150) if len(text) > 400 else 0
    return ("… " if first else "") + text[first : first + 400] + (" …" if len(text) > first + 400 else "")


@contextlib.contextmanager
def _named(voters: Agreement, collective: str, ballot: str) -> Iterator[None]:
    """A failure in here is that of this collective: no module runs it, so what was voted for says where."""
    if voters.refuse_ended is not None:
        voters.refuse_ended()
    told = progress.enter(collective, voters)
    try:
        yield
    except RuntimeError as error:
        where = f"module (root), before it ran {_around(ballot, 0)}".rstrip()
        raise progress.failed_collective(f"{collective} failed", where, error) from error
    finally:
        if told:
            progress.leave()


def _number(text: str) -> int:
    """Equal for equal texts."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


class Agreement:
    """Votes among the ranks of a mesh. Without a mesh every vote is unanimous."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.mesh = mesh
        self.group: Any = None
        self.ranks: list[int] = []
        self.heart: object | None = (
            None  # a `zgraph.ranks.heartbeat.Heart` (while this lives, its ranks watch each other)
        )
        self.refuse_ended: Callable[[], None] | None = None  # (raises why they vote no more, once they don't)
        self._limited: dict[Any, tuple[timedelta, timedelta]] = {}  # the plan's timeout of a group, and the one it had
        self._relaxed = False
        if mesh is None or mesh.size() == 1:
            return
        self.ranks = [int(r) for r in mesh.mesh.flatten().tolist()]
        # A group of their own: votes are read on the host. Over NCCL each would stop the GPU, and in a group that
        # programs use they would wait behind the transfers in flight. (Only its own ranks make that of a mesh over part of the world:
        # other meshes have others. torch then names it by the number of groups that a rank knows, which must be equal on all.)
        backend = "fake" if dist.get_backend() == "fake" else "gloo"
        timeout = process_groups.world_timeout()
        alone = len(self.ranks) < dist.get_world_size()
        self.group = dist.new_group(self.ranks, backend=backend, timeout=timeout, use_local_synchronization=alone)

    def set_timeout(self, seconds: float | None, groups: Sequence[Any]) -> None:
        """Let votes, and these process groups, wait so long for all ranks; None: as long as they did before."""
        self.relax()
        known, self._limited, self._relaxed = self._limited, {}, False
        if seconds is None:
            return
        for group in (self.group, *groups):
            usual = known[group][1] if group in known else process_groups.timeout_of(group)
            if usual is not None:
                self._limited[group] = timedelta(seconds=seconds), usual
        self._tighten()

    def relax(self) -> None:
        """Until the next vote, ranks wait as long as they would without the plan's timeout: they compile, or write files, and one may take
        longer than another."""
        for group, (_, usual) in self._limited.items():
            process_groups.set_timeout(group, usual)
        self._relaxed = bool(self._limited)

    def _tighten(self) -> None:
        for group, (limit, _) in self._limited.items():
            process_groups.set_timeout(group, limit)
        self._relaxed = False

    def rank(self) -> int:
        """This rank's number among those that vote."""
        return self.ranks.index(dist.get_rank()) if self.ranks else 0

    def first(self) -> bool:
        """Whether this is the rank that does what only one does."""
        return self.rank() == 0

    def vote(
        self,
        subject: str,
        ballot: str,
        explain: Callable[[], Any] | None = None,
        compare: Callable[[Sequence[Any]], str | None] | None = None,
        *,
        team: int = 0,
        teams: int = 1,
        flag: bool = False,
        proposal: str | None = None,
        hint: str = "give every rank the same plan, model and shapes of inputs (drop or pad an uneven last batch)",
    ) -> bool:
        """Raise `RankMismatchError` on every rank unless all give the same `ballot`; of several `teams`, all of each. Has any raised its `flag`,
        or made another `proposal`?

        On a difference, what `explain()` returns is exchanged, and `compare` says in words how they differ.
        """
        if self.group is None:
            return flag
        number = _number(ballot)
        # (Of one size whatever the vote is about: ranks that vote about different things must find out.)
        both = torch.full((5, teams), torch.iinfo(torch.int64).min)
        both[0, team], both[1, team], both[2] = number, -number, int(flag)
        both[3] = _number(proposal or "")
        both[4] = -both[3]
        views: list[Any] = [None] * len(self.ranks)
        with _named(self, f"the ranks' vote about {subject} (all_reduce)", ballot):
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self.group)
            if torch.equal(both[0], -both[1]):
                if self._relaxed:
                    self._tighten()
                return bool(both[2, 0] or both[3, 0] != -both[4, 0])
            dist.all_gather_object(views, (ballot, explain() if explain else None, team), group=self.group)
        voted = {r: view[0] for r, view in zip(self.ranks, views, strict=True)}
        leads: dict[int, int] = {}  # the first rank of each team
        begins = {r: leads.setdefault(view[2], r) for r, view in zip(self.ranks, views, strict=True)}
        base = next(begins[r] for r in self.ranks if voted[r] != voted[begins[r]])
        different = [r for r in self.ranks if begins[r] == base and voted[r] != voted[base]]
        why = compare([view[1] for view in views]) if compare and all(view[1] is not None for view in views) else None
        if why is None:
            pair = (base, different[0])
            first, other = (voted[r] for r in pair)
            common = next((i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), 0)
            why = "\n".join(f"rank {r}: {_around(voted[r], common)}" for r in pair)
        raise RankMismatchError(
            f"ranks disagree about {subject}",
            where=f"rank(s) {different} differ from rank {base}",
            why=why,
            hint=hint,
        )

    def most(self, subject: str, mine: int) -> int:
        """The largest of what the ranks give."""
        if self.group is None:
            return mine
        flag = torch.tensor([mine], dtype=torch.int64)
        with _named(self, f"the ranks' vote about {subject} (all_reduce)", ""):
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group)
        return int(flag.item())

    def any(self, subject: str, mine: bool) -> bool:
        """Whether it is true on at least one rank."""
        return bool(self.most(subject, int(mine)))

    def gather(self, subject: str, mine: Any) -> list[Any]:
        """What each rank gives (any picklable object), in order."""
        if self.group is None:
            return [mine]
        views: list[Any] = [None] * len(self.ranks)
        with _named(self, f"the exchange of {subject} (all_gather_object)", ""):
            dist.all_gather_object(views, mine, group=self.group)
        return views

    def together(self, subject: str, attempt: Callable[[], T], refused: Callable[[int, str], ZgraphError]) -> T:
        """What `attempt` gives on this rank, if it raises nothing on any; else each rank raises its own, or `refused(rank, what that rank
        was told)`."""
        return self.exchange(subject, attempt, lambda found: None, refused)[0]

    def exchange(
        self, subject: str, attempt: Callable[[], T], told: Callable[[T], S], refused: Callable[[int, str], ZgraphError]
    ) -> tuple[T, list[S]]:
        """As `together`; and what every rank tells of what it found (any picklable object), in their order."""
        problem: Exception | None = None
        mine: tuple[str | None, S | None]
        try:
            found = attempt()
            mine = None, told(found)
        except Exception as error:
            problem = error
            mine = str(error) if isinstance(error, ZgraphError) else f"{type(error).__name__}: {error}", None
        views = self.gather(f"what is wrong with {subject}", mine)
        if problem is not None:
            raise problem
        for rank, (said, _) in enumerate(views):
            if said is not None:
                raise refused(self.ranks[rank], said)
        return found, [view for _, view in views]

    def broadcast(self, value: int) -> int:
        """Rank 0's value (63 bits of it), on every rank."""
        value &= 2**63 - 1
        if self.group is None:
            return value
        box = torch.tensor([value], dtype=torch.int64)
        with _named(self, "the broadcast of rank 0's seed", ""):
            dist.broadcast(box, src=self.ranks[0], group=self.group)
        return int(box.item())
