"""Sends values between stages, point to point, over process groups of the ranks along "pp".

[Note: order] Between two ranks the messages of one direction are sent and received in one order, the sender's, which
every rank knows from the schedule before anything runs. There is one group for each direction (towards later ranks,
towards earlier ones): a receive that waits never blocks a send. NCCL needs no more, since transfers of a pair of ranks
go through one queue per group; over gloo the number of a message is its tag.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zgraph.passes.stages.cut_stages import StageMessage
from zgraph.plan.pipeline_schedules.actions import Action, Kind
from zgraph.plan.pipeline_schedules.schedule import Schedule
from zgraph.program.groups import positions_of
from zgraph.program.program import STAGE_DIM
from zgraph.program.sizes import formula
from zgraph.ranks import progress
from zgraph.torch_compat import process_groups

MOST_SIZES = 64  # sizes of calls whose transfers' shapes are cached
AHEAD = 2  # actions of this rank, from the next one on, whose receives are started


@dataclass(frozen=True)
class PipelineRanks:
    """The ranks along "pp" that this rank belongs to, with their process groups. None of these is the default group:
    groups are shut after an error, and the default group is the user's.
    """

    ranks: tuple[int, ...]  # their numbers, by position
    position: int  # this rank's own position
    up: Any  # the group for messages to later positions, of all of the ranks
    down: Any  # the group for messages to earlier positions, of all of the ranks
    parts: dict[str, Any]  # groups of some of the ranks, by name ("pp[0,3]")

    @property
    def whole(self) -> Any:
        """The group of all of the ranks."""
        return self.up

    def groups(self) -> dict[str, str]:
        """Return the names of their process groups, by the groups' names in programs."""
        return {n: str(self.group(n).group_name) for n in (STAGE_DIM, *self.parts)}

    def group(self, name: str) -> Any:
        """Return the process group that has this name in programs."""
        return self.whole if name == STAGE_DIM else self.parts[name]

    def all_groups(self) -> list[Any]:
        return [self.up, self.down, *self.parts.values()]

    def between(self, source: int, target: int) -> Any:
        """Return the group for messages from one position to another."""
        return self.up if source < target else self.down


def make_line(mesh: DeviceMesh, parts: Collection[str]) -> PipelineRanks:
    """Make the groups of all lines of the mesh, and return the line of this rank. `parts` name groups of some positions
    of a line. All ranks must call it.
    """
    names = list(mesh.mesh_dim_names or ())
    at = names.index(STAGE_DIM)
    lines = mesh.mesh.movedim(at, -1).reshape(-1, mesh.size(at)).tolist()
    own_line = next(line for line in lines if dist.get_rank() in line)
    timeout = process_groups.world_timeout()
    down = [dist.new_group(line, timeout=timeout) for line in lines][lines.index(own_line)]
    groups: dict[str, Any] = {}
    for part in sorted(parts):
        positions = positions_of(part, {STAGE_DIM: mesh.size(at)})
        group = [dist.new_group([line[p] for p in positions], timeout=timeout) for line in lines][lines.index(own_line)]
        if own_line.index(dist.get_rank()) in positions:
            groups[part] = group
    up = mesh.get_group(STAGE_DIM)
    if up is dist.group.WORLD:
        up = dist.new_group(own_line, timeout=timeout)
    return PipelineRanks(tuple(own_line), own_line.index(dist.get_rank()), up, down, groups)


@dataclass(frozen=True)
class Message:
    """One value of one micro-batch, on its way between two positions."""

    transfer: StageMessage  # which value, from which stage to which
    micro_batch: int  # its micro-batch
    source: int  # the sender's position
    target: int  # the receiver's position
    number: int  # counts the messages of this pair and direction
    made: int  # index of the action in the sender's row that produces it
    read: int  # index of the action in the receiver's row that reads it

    def read_before(self, other: Message) -> bool:
        """Return whether the receiver of this message sent `other`, and had read this one when it produced `other`."""
        return self.target == other.source and self.read <= other.made


class Routes:
    """What each action of this position receives and sends, for one schedule and one cut."""

    def __init__(self, schedule: Schedule, transfers: Sequence[StageMessage], position: int) -> None:
        self.incoming: dict[Action, list[Message]] = {}
        self.outgoing: dict[Action, list[Message]] = {}
        self.order: dict[int, list[Message]] = {}  # by source: its messages to this position, in order
        readers = {
            (a.stage, a.micro_batch, a.kind is Kind.F): (at, a)
            for rank in range(schedule.ranks)
            for at, a in enumerate(schedule.of(rank))
            if a.kind is not Kind.W
        }
        by_source: dict[tuple[int, bool], list[StageMessage]] = {}
        for transfer in transfers:
            by_source.setdefault((transfer.source, transfer.back), []).append(transfer)
        counts: dict[tuple[int, int], int] = {}
        for source in range(schedule.ranks):
            for index, action in enumerate(schedule.of(source)):
                if action.kind is Kind.W:
                    continue
                for transfer in by_source.get((action.stage, action.kind is not Kind.F), ()):
                    target = schedule.rank_of[transfer.target]
                    number = counts[source, target] = counts.get((source, target), -1) + 1
                    read, reader = readers[transfer.target, action.micro_batch, not transfer.back]
                    message = Message(transfer, action.micro_batch, source, target, number, index, read)
                    if source == position:
                        self.outgoing.setdefault(action, []).append(message)
                    if target == position:
                        self.incoming.setdefault(reader, []).append(message)
                        self.order.setdefault(source, []).append(message)


Likes: TypeAlias = Mapping[StageMessage, torch.Tensor]
"""For each transfer an empty tensor with the shape, strides and dtype that it has in a call."""


def likes_of(transfers: Sequence[StageMessage], names: tuple[str, ...]) -> Callable[[tuple[int, ...]], Likes]:
    """Return a function that gives, for sizes of a call (the sizes of these `names`), the shapes of the transfers."""
    if not names:
        fixed = {transfer: transfer.like for transfer in transfers}
        return lambda sizes: fixed
    formulas = [(t, formula(t.like.shape, names), formula(t.like.stride(), names)) for t in transfers]

    @functools.lru_cache(maxsize=MOST_SIZES)
    def at(sizes: tuple[int, ...]) -> Likes:
        return {
            t: torch.empty_strided(shape(*sizes), stride(*sizes), dtype=t.like.dtype, device="meta")
            for t, shape, stride in formulas
        }

    return at


class Channels:
    """The transfers of one step: starts receives before values are needed, and holds what is sent until it has left."""

    def __init__(
        self, line: PipelineRanks, routes: Routes, device: torch.device, likes: Likes, heart: Any = None
    ) -> None:
        self.line = line
        self.likes = likes
        self.heart = heart
        self.routes = routes
        self.device = device
        self._asked: dict[Message, tuple[Any, torch.Tensor]] = {}
        self._next: dict[int, int] = {}
        self._here: dict[tuple[int, str], torch.Tensor] = {}  # (sent from one stage to another on this rank)
        self._leaving: list[tuple[Any, torch.Tensor, Message]] = []

    def ask(self, actions: Iterable[Action]) -> None:
        """Start to receive what these actions, the next ones of this rank, need."""
        for action in actions:
            for message in self.routes.incoming.get(action, ()):
                if message.source != message.target:
                    self._ask_until(message)

    def take(self, action: Action) -> dict[str, torch.Tensor]:
        """Wait for what an action reads from other stages, and return it by name. Raises `CollectiveError` if a rank is
        gone.
        """
        values = {}
        for message in self.routes.incoming.get(action, ()):
            name = message.transfer.name
            if message.source == message.target:
                values[name] = self._here.pop((message.transfer.target, f"{name} {message.micro_batch}"))
                continue
            self._ask_until(message)
            work, buffer = self._asked.pop(message)
            self._wait(work, message, receiving=True)
            self._let_go(message)
            values[name] = _shown(buffer, self.likes[message.transfer])
        return values

    def _let_go(self, came: Message) -> None:
        """Release the sent buffers that the sender of `came` had read when it produced it. (Over gloo a send ends only
        when someone waits for it.)
        """
        left = []
        for work, buffer, message in self._leaving:
            if message.read_before(came):
                self._wait(work, message, receiving=False)
            else:
                left.append((work, buffer, message))
        self._leaving = left

    def send(self, action: Action, values: Mapping[str, torch.Tensor]) -> None:
        """Start to send what an action produced; `values` are by name."""
        self._leaving = [entry for entry in self._leaving if not entry[0].is_completed()]
        for message in self.routes.outgoing.get(action, ()):
            value, like = values[message.transfer.name], self.likes[message.transfer]
            if message.source == message.target:
                laid = value if value.stride() == like.stride() else _shown(_flat(value, like), like)
                self._here[message.transfer.target, f"{message.transfer.name} {message.micro_batch}"] = laid
                continue
            flat = _flat(value, like)
            group = self.line.between(message.source, message.target)
            work = dist.isend(flat, self.line.ranks[message.target], group=group, tag=message.number)
            self._leaving.append((work, flat, message))

    def finish(self) -> None:
        """Wait until all sends have completed. Raises what `take` raises."""
        for work, _, message in self._leaving:
            self._wait(work, message, receiving=False)
        self._leaving.clear()

    def _ask_until(self, message: Message) -> None:
        coming = self.routes.order[message.source]
        at = self._next.get(message.source, 0)
        while at <= message.number:
            wanted = coming[at]
            like = self.likes[wanted.transfer]
            buffer = torch.empty(like.numel(), dtype=like.dtype, device=self.device)
            group = self.line.between(wanted.source, wanted.target)
            work = dist.irecv(buffer, self.line.ranks[wanted.source], group=group, tag=wanted.number)
            self._asked[wanted] = work, buffer
            at += 1
        self._next[message.source] = at

    def _wait(self, work: Any, message: Message, *, receiving: bool) -> None:
        transfer, ranks = message.transfer, self.line.ranks
        here, other = (transfer.target, message.source) if receiving else (transfer.source, message.target)
        said = (
            f"the {'backward' if transfer.back else 'forward'} of micro-batch {message.micro_batch}: {transfer.name!r} on its way from "
            f"stage {transfer.source} to stage {transfer.target}"
        )
        # (the larger rank first, so that this is counted separately from what the two do in a larger group)
        both = _Pair(sorted((ranks[message.source], ranks[message.target]), reverse=True), self.heart)
        told = progress.enter(said, both)
        try:
            work.wait()
        except RuntimeError as error:
            raise progress.failed_collective(f"stage {here} has lost rank {ranks[other]}", said, error) from error
        finally:
            if told:
                progress.leave()


@dataclass
class _Pair:
    """Two ranks, one of which waits for the other; looks like an `Agreement` to the heartbeat."""

    ranks: list[int]  # their numbers, the larger first
    heart: Any  # the heart of the run, if its ranks watch each other
    group: Any = None  # none: the two do not vote

    def disagreement(self) -> None:
        """Return None: a pipeline's ranks vote on each step."""


def _flat(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a value's elements in the memory order of `like`, without a copy if the value has that order already. (The
    program determines `like`; a backend may produce another layout.)
    """
    return value.detach().permute(_order(like)).contiguous().view(-1)


def _shown(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a received buffer as a tensor with the shape and strides of `like`; if these have gaps or overlaps, with
    dense strides in the same order.
    """
    order = _order(like)
    laid = buffer.view([like.shape[d] for d in order]).permute([order.index(d) for d in range(like.dim())])
    same = all(a == b or n == 1 for a, b, n in zip(laid.stride(), like.stride(), like.shape, strict=True))
    return buffer.as_strided(like.shape, like.stride()) if same else laid


def _order(like: torch.Tensor) -> list[int]:
    """Return the dimensions in memory order, the outermost first."""
    stride = like.stride()
    return sorted(range(like.dim()), key=lambda d: (-stride[d], d))
