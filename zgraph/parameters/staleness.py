"""Checks whether weights have changed since something was made from them (a whole weight, a gather in flight).

Torch counts most changes (`Shards.version`), but neither a write through `.data` nor a foreach operator on DTensors. So
bits are compared as well. On CPU the answer is immediate. On CUDA it is read at the next check, a step later, so that
nothing waits for the device: a change that torch did not count is then an error that says so, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zgraph.errors import StepError
from zgraph.parameters.shards import Shards


class Staleness:
    """The checks for one use of weights, which `what` names in the error."""

    def __init__(self, shards: Shards, device: torch.device, what: str) -> None:
        self.shards = shards
        self.device = device
        self.what = what
        self._answer: torch.Tensor | None = None  # in pinned memory
        self._there: Any = None
        self._late = False

    def changed(
        self, versions: dict[str, tuple[int, ...]], differ: Callable[[], Sequence[torch.Tensor]], *, again: bool
    ) -> int:
        """Return 0 if weights are unchanged on this rank since these versions, by name, 1 if they have changed, and 2
        if the check before finds only now, too late, that they had. `differ` returns 0-dim bools on the device: whether
        bits differ from those that were used. `again`: a second check follows at once, so on CUDA bits are left to that
        one.
        """
        if again and self.device.type == "cuda":
            return int(any(self.shards.version(name) != version for name, version in versions.items()))
        self._late = self._read()
        return 2 if self._late else int(not self._local_rows(versions, differ))

    def still(self, worst: int) -> bool:
        """Return whether weights are unchanged on all ranks; `worst` is the largest answer of any rank. Raises
        `StepError` if it is too late.
        """
        if worst == 2:
            raise StepError(
                f"weights were changed in a way that torch does not count, after {self.what}",
                where="this rank" if self._late else "another rank",
                why="a write through .data, or a foreach operator: the last forward used some of them as they were before",
                hint="change weights by in-place operators under torch.no_grad(), or through their optimizer",
            )
        return worst == 0

    def _local_rows(self, versions: dict[str, tuple[int, ...]], differ: Callable[[], Sequence[torch.Tensor]]) -> bool:
        if any(self.shards.version(name) != version for name, version in versions.items()):
            return False
        answers = differ()
        if not answers:
            return True
        differs = torch.stack(list(answers)).any()
        if self.device.type != "cuda":
            return not bool(differs)
        self._answer = torch.empty((), dtype=torch.bool, pin_memory=True)
        self._answer.copy_(differs, non_blocking=True)
        self._there = torch.cuda.Event()
        self._there.record()
        return True

    def _read(self) -> bool:
        """Return whether the check before has turned out to find changed bits."""
        if self._answer is None:
            return False
        self._there.synchronize()  # (the device was given the next step long ago)
        changed, self._answer = bool(self._answer), None
        return changed
