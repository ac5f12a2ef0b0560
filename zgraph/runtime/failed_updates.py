"""Tracks whether weights and states are of the same step; after an update that failed half way they are not, until both
are loaded.
"""

from __future__ import annotations

from zgraph.errors import StepError
from zgraph.parameters.shards import Shards


class FailedUpdates:
    """A record of whether one compiled module's weights and optimizer states are of the same step."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        # Versions of the weights when an update failed half way; empty if none did.
        self._versions: dict[str, tuple[int, ...]] = {}
        self._states_loaded = False  # whether the states were loaded since then

    def lose(self) -> None:
        """Note that weights and states are of different steps."""
        self._versions = {n: self.shards.version(n) for n in self.shards.params()}
        self._states_loaded = False

    def loaded(self) -> None:
        """Note that the states were loaded."""
        self._states_loaded = True

    def restore(self) -> None:
        """Note that weights and states were both loaded."""
        self._versions = {}

    def adopt(self, other: FailedUpdates) -> None:
        """Take over another's state, for the same parameters."""
        self._versions, self._states_loaded = dict(other._versions), other._states_loaded

    def refuse(self) -> None:
        """Raise `StepError` if the last update failed half way, and weights and states were not both loaded since."""
        if self._states_loaded and all(self.shards.version(n) != v for n, v in self._versions.items()):
            self._versions = {}
        if self._versions:
            raise StepError(
                "step() was called after an update that failed half way",
                why="some weights and states are of the next step, some of the last",
                hint="load both weights and optimizer state from a checkpoint",
            )
