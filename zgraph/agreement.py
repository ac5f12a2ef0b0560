"""Ranks that disagree are found, not waited for.

Before each run of a program every rank votes with a hash of what it is about to do: one reduction of two integers
(about 0.1 ms over gloo). Where votes differ, ranks exchange what they voted for and all raise the same error, before
any of them starts a collective that the others will not join.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zgraph.errors import RankMismatchError


class Agreement:
    """Votes among the ranks of a mesh. Without a mesh every vote is unanimous."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.group: Any = None
        self.ranks: list[int] = []
        if mesh is None or mesh.size() == 1:
            return
        self.ranks = [int(r) for r in mesh.mesh.flatten().tolist()]
        whole = self.ranks == list(range(dist.get_world_size()))
        on_cpu = dist.get_backend() != "nccl"
        # Votes are read on the host: over NCCL each would stop the GPU.
        self.group = dist.group.WORLD if whole and on_cpu else dist.new_group(self.ranks, backend=None if on_cpu else "gloo")

    def vote(self, subject: str, ballot: str, explain: Callable[[], Any] | None = None, compare: Callable[[Sequence[Any]], str] | None = None) -> None:
        """Raise `RankMismatchError` on every rank unless all give the same `ballot`.

        On a difference, what `explain()` returns is exchanged, and `compare` says in words how they differ.
        """
        if self.group is None:
            return
        number = int.from_bytes(hashlib.sha256(ballot.encode()).digest()[:7], "little")
        both = torch.tensor([number, -number], dtype=torch.int64)
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self.group)
        if int(both[0]) == -int(both[1]):
            return
        views: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(views, (ballot, explain() if explain else None), group=self.group)
        different = [r for r, view in zip(self.ranks, views, strict=True) if view[0] != views[0][0]]
        why = compare([view[1] for view in views]) if compare and all(view[1] is not None for view in views) else None
        if why is None:
            shown = {r: view[0] if len(view[0]) < 400 else view[0][:400] + " …" for r, view in zip(self.ranks, views, strict=True)}
            why = "\n".join(f"rank {r}: {text}" for r, text in shown.items() if r == self.ranks[0] or r == different[0])
        raise RankMismatchError(
            f"ranks disagree about {subject}", where=f"rank(s) {different} differ from rank {self.ranks[0]}", why=why,
            hint="give every rank the same plan, model and shapes of inputs (drop or pad an uneven last batch)",
        )

    def any(self, mine: bool) -> bool:
        """Is it true on at least one rank?"""
        if self.group is None:
            return mine
        flag = torch.tensor([int(mine)], dtype=torch.int64)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group)
        return bool(flag.item())

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=self.ranks[0], group=self.group)
        return box[0]
