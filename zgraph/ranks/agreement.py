"""Finds ranks that are about to do different things, before any of them waits for the others forever.

Before each run of a program every rank votes with a hash of what it is about to do: one reduction of a few integers
(about 0.1 ms over gloo). If votes differ, ranks exchange what they voted for and all raise the same error, before any
of them starts a collective that the others will not join. What all ranks foresee needs no vote
(`zgraph/ranks/foreseen_actions.py`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zgraph.errors import RankMismatchError, StepError, ZgraphError
from zgraph.program.program import DATA_DIMS, TEAM_DIMS
from zgraph.ranks import progress
from zgraph.ranks.foreseen_actions import UPDATE, Act, Coming, ForeseenActions, around, shown_difference
from zgraph.ranks.tree_maximum import TreeMaximum
from zgraph.torch_compat import process_groups

T = TypeVar("T")
S = TypeVar("S")


NOBODY = torch.iinfo(torch.int64).min  # what a rank gives for the teams that it is not in


@dataclass(frozen=True)
class Verdict:
    """The result of a vote."""

    flag: bool  # whether any rank raised its flag, or proposals differ
    worst: int = 0  # the largest `worst` of all ranks
    alike: bool = True  # whether all ranks announced the same coming update


@dataclass(frozen=True)
class _View:
    """What a rank tells the others if votes differ."""

    explained: Any  # the result of its `explain()`
    team: tuple[int, int]  # the team that it votes in, and how many teams there are
    acts: tuple[Act, ...]  # those since the last vote, and the one that it votes on
    said: Coming | None  # what it announced about its last update


@contextlib.contextmanager
def _named(voters: Agreement, collective: str, ballot: str) -> Iterator[None]:
    """Turn a failure inside into one of this collective. No module runs it, so the error says where by what was voted
    on.
    """
    if voters.refuse_ended is not None:
        voters.refuse_ended()
    told = progress.enter(collective, voters)
    try:
        yield
    except RuntimeError as error:
        where = f"module (root), before it ran {around(ballot, 0)}".rstrip()
        raise progress.failed_collective(f"{collective} failed", where, error) from error
    finally:
        if told:
            progress.leave()


@functools.lru_cache(maxsize=256)
def _number(text: str) -> int:
    """Return a hash of a text, below 2**56."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


def _pairs(texts: Sequence[str]) -> list[int]:
    """Return the hash of each text, and its negative: all ranks' are equal if the greatest of one is minus that of the
    other.
    """
    return [number for text in texts for number in (_number(text), -_number(text))]


def _first_difference(
    pair: tuple[int, int],
    views: Sequence[_View],
    ranks: Sequence[int],
    compare: Callable[[Sequence[Any]], str | None],
) -> tuple[str, str]:
    """Return (the subject, the difference) of the first act in which two ranks differ."""
    rows = [views[ranks.index(r)].acts for r in pair]
    at = next((i for i, acts in enumerate(zip(*rows, strict=False)) if acts[0] != acts[1]), None)
    if at is None:  # (one votes on what the other has done as foreseen)
        at = min(map(len, rows)) - 1
        asks = pair[0] if len(rows[0]) == at + 1 else pair[1]
        return rows[0][at].subject, f"rank {asks} has changed weights since they were gathered, others have not"
    acts = [row[at] for row in rows]
    why = None
    if acts[0].subject == acts[1].subject == UPDATE and all(view.said is not None for view in views):
        why = compare([view.said[1] for view in views if view.said is not None])
    return acts[0].subject, why or shown_difference(list(zip(pair, acts, strict=True)))


def _most_teams(mesh: DeviceMesh) -> int:
    """Return the largest number of teams that ranks vote in: the positions in the mesh, apart from those of ranks that
    see the same rows.
    """
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=False))
    if all(size == 1 or dim in DATA_DIMS for dim, size in sizes.items()):
        return 1
    return math.prod(size for dim, size in sizes.items() if dim not in TEAM_DIMS)


class Agreement:
    """Votes among the ranks of a mesh. Without a mesh every vote is unanimous."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.mesh = mesh
        self.group: Any = None
        self.ranks: list[int] = []
        self._greatest: TreeMaximum | None = None  # over the ranks; None where no others are there
        self._teams = 1  # most teams of a vote
        self.heart: object | None = None  # a `zgraph.ranks.heartbeat.Heart`; while it lives, its ranks watch each other
        self.foreseen: ForeseenActions | None = (
            None  # the acts that need no vote if they are foreseen; None: all are voted on
        )
        self.refuse_ended: Callable[[], None] | None = None  # (raises the reason once the ranks vote no more)
        # by group: the plan's timeout, and the one it had before
        self._limited: dict[Any, tuple[timedelta, timedelta]] = {}
        self._relaxed = False
        if mesh is None or mesh.size() == 1:
            return
        self._world = weakref.ref(dist.group.WORLD)  # the default process group, whose end is that of the mesh's groups
        self.ranks = [int(r) for r in mesh.mesh.flatten().tolist()]
        # A group of its own: votes are read on the host. Over NCCL each would stop the GPU, and in a group that
        # programs use they would wait behind the transfers in flight. (For a mesh over part of the world, only its own
        # ranks make the group: other meshes make others. torch then names it by the number of groups that a rank knows,
        # which must be equal on all.)
        backend = "fake" if dist.get_backend() == "fake" else "gloo"
        timeout = process_groups.world_timeout()
        alone = len(self.ranks) < dist.get_world_size()
        self.group = dist.new_group(self.ranks, backend=backend, timeout=timeout, use_local_synchronization=alone)
        self._teams = _most_teams(mesh)
        if backend == "gloo":
            self._greatest = TreeMaximum(self.group, 10 + 2 * self._teams)

    def groups(self) -> list[Any]:
        """Return the process group for votes and for the exchanges after them; [] if this rank is alone."""
        return [self.group] if self.group is not None else []

    def set_timeout(self, seconds: float | None, groups: Sequence[Any]) -> None:
        """Limit how long votes, and these process groups, wait for all ranks; None restores the limits from before."""
        self.relax()
        known, self._limited, self._relaxed = self._limited, {}, False
        if seconds is None:
            return
        for group in dict.fromkeys((*self.groups(), *groups)):
            usual = known[group][1] if group in known else process_groups.timeout_of(group)
            if usual is not None:
                self._limited[group] = timedelta(seconds=seconds), usual
        self._tighten()

    def relax(self) -> None:
        """Lift the plan's timeout until the next vote: ranks compile, or write files, and one may take longer than
        another.
        """
        for group, (_, usual) in self._limited.items():
            process_groups.set_timeout(group, usual)
        self._relaxed = bool(self._limited)

    def _tighten(self) -> None:
        for group, (limit, _) in self._limited.items():
            process_groups.set_timeout(group, limit)
        self._relaxed = False

    def refuse_destroyed_groups(self) -> None:
        """Raise `StepError` if the process groups of the mesh were destroyed. Programs call groups by names, which torch gives again to
        groups of other ranks."""
        if self.group is None:
            return
        world = self._world()
        if world is None or world is not dist.group.WORLD:
            raise StepError(
                "the process groups that the model was compiled over were destroyed",
                why="its programs would communicate over whatever groups have their names now",
                hint="call zgraph.compile on a model made anew after init_process_group, and load a checkpoint",
            )

    def rank(self) -> int:
        """Return this rank's number among those that vote."""
        return self.ranks.index(dist.get_rank()) if self.ranks else 0

    def first(self) -> bool:
        """Return whether this is the rank that does what only one rank does."""
        return self.rank() == 0

    def foresee(self, groups: Sequence[Any], *, on: bool) -> None:
        """Turn on, or off (`on` is False), that foreseen acts need no vote; `groups` are the process groups of the
        mesh. Forgets what was foreseen. All ranks must call it.
        """
        if self.foreseen is None and on and self.heart is not None:
            shared = dict.fromkeys((*groups, *self.groups()))
            self.foreseen = ForeseenActions(str(self.group.group_name), self.ranks, list(shared))
        if self.foreseen is not None:
            self.foreseen.begin_anew()
            self.foreseen.active = on

    def passes(self, subject: str, text: str) -> bool:
        """Return whether all ranks foresee this act, so that it needs no vote."""
        self.refuse_destroyed_groups()
        return self.foreseen is not None and self.foreseen.passes(Act(subject, text))

    def did(self, subject: str, text: str, *, ends: bool = False) -> None:
        """Note an act that all ranks have voted on or foreseen, to foresee it the next time. `ends`: it ends a step."""
        if self.foreseen is not None:
            self.foreseen.did(Act(subject, text), ends=ends)

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
        worst: int = 0,
        tighten: bool = True,
        hint: str = "give every rank the same plan, model and shapes of inputs (drop or pad an uneven last batch)",
    ) -> Verdict:
        """Vote: raise `RankMismatchError` on every rank unless all ranks (with several `teams`, all of each team) give
        the same `ballot`, and have done the same since the last vote. The verdict has what is not compared. With
        `tighten`, the plan's timeout applies again.

        If ballots differ, ranks exchange what `explain()` returns, and `compare` describes the difference.
        """
        if self.group is None:
            return Verdict(flag, worst)
        self.refuse_destroyed_groups()
        foreseen = self.foreseen
        past, coming = foreseen.before_vote() if foreseen is not None else ((), None)
        done = " ".join(str(_number(f"{act.subject}: {act.text}")) for act in past)
        told = f"{subject}, {teams} teams", done, proposal or "", coming[0] if coming is not None else ""
        # (The size is the same whatever the vote is about: ranks that vote on different things must find out.)
        ballots = [NOBODY] * (2 * self._teams)
        ballots[2 * team : 2 * team + 2] = _pairs([ballot])
        with _named(self, f"the ranks' vote about {subject}", ballot):
            with foreseen.waiting(Act(subject, ballot)) if foreseen is not None else contextlib.nullcontext():
                greatest = self._over_ranks([*_pairs(told), int(flag), worst, *ballots])
            kind, acts, proposals, updates = (a == -b for a, b in zip(greatest[:8:2], greatest[1:8:2], strict=True))
            voted = zip(greatest[10::2], greatest[11::2], strict=True)
            if kind and acts and all(a == -b or a == NOBODY for a, b in voted):
                if self._relaxed and tighten:
                    self._tighten()
                if foreseen is not None:
                    foreseen.leave_vote(coming if updates else None)
                return Verdict(bool(greatest[8]) or not proposals, greatest[9], updates)
            view = _View(
                explain() if explain else None,
                (team, teams),
                (*past, Act(subject, ballot)),
                foreseen.said if foreseen else None,
            )
            views: list[Any] = [None] * len(self.ranks)
            dist.all_gather_object(views, view, group=self.group)
        raise self._difference(views, compare, hint)

    def _over_ranks(self, row: list[int]) -> list[int]:
        """Return the greatest numbers of all ranks."""
        if self._greatest is None:
            return row
        return self._greatest(row, process_groups.timeout_of(self.group))

    def _difference(
        self, views: Sequence[_View], compare: Callable[[Sequence[Any]], str | None] | None, hint: str
    ) -> RankMismatchError:
        """Return the error for ranks that voted differently, or did different things before."""
        voted = dict(zip(self.ranks, views, strict=True))
        first = self.ranks[0]
        astray = [r for r in self.ranks if voted[r].acts[:-1] != voted[first].acts[:-1]]
        if astray and self.foreseen is not None:
            subject, why = _first_difference((first, astray[0]), views, self.ranks, self.foreseen.compare)
            return self.foreseen.end(
                f"ranks disagree about {subject}", f"rank(s) {astray} differ from rank {first}", why
            )
        alike = len({(view.acts[-1].subject, view.team[1]) for view in views}) == 1  # (what they voted about)
        leads: dict[int, int] = {}  # the first rank of each team
        begins = {r: leads.setdefault(view.team[0] if alike else 0, r) for r, view in voted.items()}
        ballots = {r: (view.acts[-1], view.team[1]) for r, view in voted.items()}
        base = next(begins[r] for r in self.ranks if ballots[r] != ballots[begins[r]])
        different = [r for r in self.ranks if begins[r] == base and ballots[r] != ballots[base]]
        explained = [view.explained for view in views]
        can_compare = alike and compare is not None and all(one is not None for one in explained)
        said = compare(explained) if compare is not None and can_compare else None
        if said is None:
            said = shown_difference([(r, ballots[r][0]) for r in (base, different[0])])
        return RankMismatchError(
            f"ranks disagree about {ballots[base][0].subject}",
            where=f"rank(s) {different} differ from rank {base}",
            why=said,
            hint=hint,
        )

    def disagreement(self) -> RankMismatchError | None:
        """Return, after a collective has failed, what ranks disagree about, if one of them shut its groups for that
        reason.
        """
        return self.foreseen.difference() if self.foreseen is not None else None

    def most(self, subject: str, mine: int) -> int:
        """Return the largest value that a rank gives."""
        return self.vote(subject, "", worst=mine, tighten=False).worst

    def any(self, subject: str, mine: bool) -> bool:
        """Return whether `mine` is true on at least one rank."""
        return bool(self.most(subject, int(mine)))

    def gather(self, subject: str, mine: Any) -> list[Any]:
        """Return what each rank gives (any picklable object), in the order of ranks."""
        if self.group is None:
            return [mine]
        self.vote(subject, "", tighten=False)  # (a rank that does something else meets a vote here, not the exchange)
        views: list[Any] = [None] * len(self.ranks)
        with _named(self, f"the exchange of {subject} (all_gather_object)", ""):
            dist.all_gather_object(views, mine, group=self.group)
        return views

    def together(self, subject: str, attempt: Callable[[], T], refused: Callable[[int, str], ZgraphError]) -> T:
        """Return what `attempt` returns, if it raises on no rank; else each rank raises its own error, or
        `refused(rank, error text of that rank)`.
        """
        return self.exchange(subject, attempt, lambda found: None, refused)[0]

    def exchange(
        self, subject: str, attempt: Callable[[], T], told: Callable[[T], S], refused: Callable[[int, str], ZgraphError]
    ) -> tuple[T, list[S]]:
        """Return, as `together` does, what `attempt` returns, and `told` of every rank's result (any picklable object),
        in the order of ranks.
        """
        problem: Exception | None = None
        mine: tuple[str | None, S | None]
        try:
            result = attempt()
            mine = None, told(result)
        except Exception as error:
            problem = error
            mine = str(error) if isinstance(error, ZgraphError) else f"{type(error).__name__}: {error}", None
        views = self.gather(f"what is wrong with {subject}", mine)
        if problem is not None:
            raise problem
        for rank, (said, _) in enumerate(views):
            if said is not None:
                raise refused(self.ranks[rank], said)
        return result, [view for _, view in views]

    def broadcast(self, value: int) -> int:
        """Return rank 0's value (its lowest 63 bits) on every rank."""
        value &= 2**63 - 1
        return self.most("the broadcast of rank 0's seed", value if self.first() else -1)
