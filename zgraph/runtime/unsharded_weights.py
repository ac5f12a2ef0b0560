"""Keeps whole weights at ZeRO stages 1 and 2, from the first forward of an optimizer step to its reducing backward."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zgraph.parameters.shards import Shards
from zgraph.parameters.staleness import Staleness
from zgraph.parameters.tensor_bits import words_of


class UnshardedWeights:
    """Whole weights by the names of their parameters, valid as long as the shards do not change."""

    def __init__(self, shards: Shards, device: torch.device) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self._shards = shards
        self._versions: dict[str, tuple[int, ...]] = {}
        # (the bits, the dtype) of this rank's rows, if the host can read them
        self._words: dict[str, tuple[torch.Tensor, torch.dtype]] = {}
        self._unchanged = Staleness(shards, device, "an earlier forward had gathered them")

    def keep(self, name: str, weight: torch.Tensor) -> None:
        """Keep a weight that a forward has gathered."""
        self.weights[name] = weight
        self._versions[name] = self._shards.version(name)
        if weight.device.type == "cpu":
            mine = self._shards.mine_of(name, weight)
            self._words[name] = words_of(mine), weight.dtype

    def changed_here(self, *, again: bool = False) -> int:
        """Return whether this rank's shards have changed since their weights were kept (see `Staleness.changed`).

        A kept weight is compared with this rank's shard bit by bit: torch counts neither a write through `.data` nor a
        foreach operator on a DTensor.
        """
        if len(self._words) == len(self._versions):  # (comparing bits finds every change that versions show)
            return int(not all(self._shards.equals(name, *words) for name, words in self._words.items()))
        return self._unchanged.changed(self._versions, lambda: self._shards.differences(self.weights), again=again)

    def settle(self, worst: int) -> None:
        """Drop the weights if the shards have changed since on any rank. (Ranks must decide alike, and a change may be
        in one rank's rows only.)
        """
        if not self._unchanged.still(worst):
            self.drop()

    def are_there(self, names: Iterable[str]) -> bool:
        """Return whether all of these weights are kept."""
        return all(n in self.weights for n in names)

    def drop(self) -> None:
        """Forget the weights; the next forward gathers them again."""
        self.weights.clear()
        self._versions.clear()
        self._words.clear()
