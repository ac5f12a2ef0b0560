"""Decides which of a rank's acts in a step need a vote: forwards, backwards and updates that all ranks foresee need
none.

With `plan.watch.vote = "step"` a step has one vote. In `train_step` it comes at the beginning and covers the forwards
of all micro-batches; in the user's own loop it comes with the step's first forward, and with each forward if sizes may
differ from call to call, since ranks learn different sizes together. Each vote also covers what has happened since the
last one, and the numbers of the coming update: an update with these numbers needs no other vote.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from zgraph.capture.call_signature import shared
from zgraph.ranks.agreement import Agreement
from zgraph.ranks.foreseen_actions import UPDATE, Act, Coming
from zgraph.runtime.rank_votes import INPUTS
from zgraph.update.hyperparameters import compare_updates

BACKWARD = "a backward pass"


@functools.lru_cache(maxsize=64)
def forward_of(key: str) -> str:
    """Return what ranks must agree on for a forward by the program with this key."""
    return f"{shared(key)}; known"


class NeededVotes:
    """The acts of one compiled module, among the ranks of `agreement`. (In a pipeline each is voted on.) With `updates`
    an update ends a step, else a backward that reduces.
    """

    def __init__(self, agreement: Agreement, *, updates: bool) -> None:
        self.agreement = agreement
        self.updates = updates

    # -- forwards -----------------------------------------------------------------------------------------------------
    def passes_forward(self, key: str, *, learns: bool, changed: int) -> bool:
        """Return whether the forward by the program with this key needs no vote. It needs one if weights have
        `changed`, or if ranks do not foresee it; and, unless the forwards of the whole step were voted on together,
        if it is the first of a step, or if ranks learn sizes from calls.
        """
        foreseen, act = self.agreement.foreseen, Act(INPUTS, forward_of(key))
        if foreseen is None or changed:
            return False
        promised = bool(foreseen.promised) and foreseen.promised[-1] == act
        if not (promised or not (learns or foreseen.begins)) or not foreseen.passes(act):
            foreseen.promised.clear()
            return False
        foreseen.did(act)
        return True

    def did_forward(self, key: str) -> None:
        """Note that ranks have voted on this forward."""
        self.agreement.did(INPUTS, forward_of(key))

    def by_steps(self) -> bool:
        """Return whether ranks vote once on the forwards of a whole step."""
        foreseen = self.agreement.foreseen
        return foreseen is not None and foreseen.active

    def promise(self, keys: Sequence[str]) -> None:
        """Note that ranks have voted on the forwards of all micro-batches of a step that begins."""
        foreseen = self.agreement.foreseen
        assert foreseen is not None
        texts = [forward_of(key) for key in keys]
        foreseen.did(Act("a step", " | ".join(texts)))
        foreseen.promised = [Act(INPUTS, text) for text in reversed(texts)]

    def give_up(self) -> None:
        """Forget the forwards that were voted on: the step has failed."""
        if self.agreement.foreseen is not None:
            self.agreement.foreseen.promised.clear()

    # -- backwards and updates ------------------------------------------------------------------------------------------
    def backward(self, name: str, outputs: Sequence[int], *, accumulates: bool) -> None:
        """Let ranks vote on a backward, unless they foresee it. Raises `RankMismatchError` on every rank if they do not
        all begin it.
        """
        text = f"{name}, outputs {list(outputs)}, {'only accumulating' if accumulates else 'reducing'}"
        if not self.agreement.passes(BACKWARD, text):
            self.agreement.vote(BACKWARD, text)
        self.agreement.did(BACKWARD, text, ends=not accumulates and not self.updates)

    def say_of_update(self, coming: Callable[[], Coming]) -> None:
        """Include what `coming` returns about the next update in the votes."""
        if self.agreement.foreseen is not None:
            self.agreement.foreseen.coming, self.agreement.foreseen.compare = coming, compare_updates

    def passes_update(self, names: Sequence[str], coming: Coming) -> bool:
        """Return whether an update of these parameters needs no vote: ranks foresee it, and this rank's numbers for it
        are those of the last vote.
        """
        foreseen = self.agreement.foreseen
        if foreseen is None:
            return False
        foreseen.said = coming
        return (
            foreseen.agreed is not None
            and foreseen.agreed[0] == coming[0]
            and self.agreement.passes(UPDATE, gradients(names))
        )

    def did_update(self, names: Sequence[str]) -> None:
        """Note that ranks are about to update these parameters."""
        self.agreement.did(UPDATE, gradients(names), ends=True)


def gradients(names: Sequence[str]) -> str:
    """Return a text that names the parameters with gradients."""
    return f"{len(names)} gradients: {' '.join(names)}"
