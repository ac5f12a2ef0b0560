"""Are weights still what they were when something was made of them (a whole weight, a gather on its way)?

Torch counts most changes (`Shards.version`), but neither a write through `.data` nor a foreach operator on DTensors. So bits
are compared as well. On CPU the answer is there at once. On CUDA it is read at the next question, a step later, so that
nothing waits for the device: a change behind torch's back is then an error that says so, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zgraph.errors import StepError
from zgraph.parameters.sharding import Shards


class Unchanged:
    """Answers for one kind of use, which `what` names in the error."""

    def __init__(self, shards: Shards, device: torch.device, what: str) -> None:
        self.shards = shards
        self.device = device
        self.what = what
        self._answer: torch.Tensor | None = None  # (pinned)
        self._there: Any = None
        self._late = False

    def changed(
        self, versions: dict[str, tuple[int, ...]], differ: Callable[[], Sequence[torch.Tensor]], *, again: bool
    ) -> int:
        """Whether they have changed on this rank since these versions, by name: 1; 2 if that is the answer to the question before, and it was
        too late. `differ` gives 0-dim bools on the device: which bits are not those that were used. Where one asks `again` at once, that is
        left to the second time if the answer would not be there."""
        if again and self.device.type == "cuda":
            return int(any(self.shards.version(name) != version for name, version in versions.items()))
        self._late = self._read()
        return 2 if self._late else int(not self._mine(versions, differ))

    def still(self, worst: int) -> bool:
        """Whether they are as they were, where this is the worst that any rank has answered. Raises `StepError` if it was too late."""
        if worst == 2:
            raise StepError(
                f"weights were changed in a way that torch does not count, after {self.what}",
                where="this rank" if self._late else "another rank",
                why="a write through .data, or a foreach operator: the last forward used some of them as they were before",
                hint="change weights by in-place operators under torch.no_grad(), or through their optimizer",
            )
        return worst == 0

    def _mine(self, versions: dict[str, tuple[int, ...]], differ: Callable[[], Sequence[torch.Tensor]]) -> bool:
        if any(self.shards.version(name) != version for name, version in versions.items()):
            return False
        answers = differ()
        if not answers:
            return True
        found = torch.stack(list(answers)).any()
        if self.device.type != "cuda":
            return not bool(found)
        self._answer = torch.empty((), dtype=torch.bool, pin_memory=True)
        self._answer.copy_(found, non_blocking=True)
        self._there = torch.cuda.Event()
        self._there.record()
        return True

    def _read(self) -> bool:
        """Whether the question before has turned out to have the answer no."""
        if self._answer is None:
            return False
        self._there.synchronize()  # (the device has long been given the next step)
        changed, self._answer = bool(self._answer), None
        return changed
