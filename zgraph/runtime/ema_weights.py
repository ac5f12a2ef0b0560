"""Puts the moving averages of the weights in place of the weights, for as long as a user looks at them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from zgraph.errors import StepError
from zgraph.runtime.rank import Rank
from zgraph.update.build_update import EMA
from zgraph.update.states import States


class EmaWeights:
    """The moving averages that the updates of one compiled module keep."""

    def __init__(self, rank: Rank, states: States) -> None:
        self.rank = rank
        self.states = states
        self._shown = False

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Put the averages in place of the weights, and the weights back at the end."""
        shards, names = self.rank.shards, self.states.averaged()
        shards.refresh()
        weights = {n: shards.local(n).clone() for n in names}
        for name in names:
            shards.local(name).copy_(self.states[f"{name}/{EMA}"])
        self.rank.weights_changed(names)
        self._shown = True
        try:
            yield
        finally:
            self._shown = False
            for name, weight in weights.items():
                shards.local(name).copy_(weight)
            self.rank.weights_changed(names)

    def refuse_update(self) -> None:
        """Raise `StepError` inside `shown`: an update would be lost."""
        if self._shown:
            raise StepError(
                "step() was called inside averaged_weights()",
                why="the weights are their averages there, and come back when it ends: the update would be lost",
                hint="leave the with block first",
            )

    def refuse_checkpoint(self) -> None:
        """Raise `StepError` inside `shown`: what is loaded would be lost, and the averages would be saved instead of
        the weights.
        """
        if self._shown:
            raise StepError(
                "a checkpoint can't be saved or loaded inside averaged_weights()",
                why="the weights are their averages there, and come back when it ends",
                hint="leave the with block first",
            )
