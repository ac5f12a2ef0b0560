"""What a rank does in a step, and whether it votes on it: forwards, backwards and updates that all ranks foresee go on at once.

By `plan.watch.vote = "step"` a step has one vote. That of `train_step` is at its beginning, about the forwards of all its micro-batches; in
the user's own loop it is that of the step's first forward, and of each where sizes may differ from call to call: ranks with other sizes have
something to learn together. What has happened since the last vote is part of each, and so is what the update to come would be: an update by
the numbers that were voted on needs no other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from zgraph.capture.cache_key import shared
from zgraph.ranks.agreement import Agreement
from zgraph.ranks.foreseen_actions import UPDATE, Act, Coming
from zgraph.runtime.same_on_all_ranks import INPUTS
from zgraph.update.hyperparameters import compare_updates

BACKWARD = "a backward pass"


@functools.lru_cache(maxsize=64)
def forward_of(key: str) -> str:
    """What ranks have alike in a forward by the program with this key."""
    return f"{shared(key)}; known"


class Acts:
    """Those of one compiled module, among the ranks of `agreement`. (Of a pipeline each is voted on.) With `updates` an update ends a step, else a
    backward that reduces."""

    def __init__(self, agreement: Agreement, *, updates: bool) -> None:
        self.agreement = agreement
        self.updates = updates

    # -- forwards -----------------------------------------------------------------------------------------------------
    def passes_forward(self, key: str, *, learns: bool, changed: int) -> bool:
        """Whether the forward by the program with this `key` needs no vote. It does where weights have `changed`; where it is the first of a
        step; and where ranks learn the sizes of calls that they see. (But for those of a whole step, which were voted on before.)"""
        course, act = self.agreement.course, Act(INPUTS, forward_of(key))
        if course is None or changed:
            return False
        promised = bool(course.promised) and course.promised[-1] == act
        if not (promised or not (learns or course.begins)) or not course.passes(act):
            course.promised.clear()
            return False
        course.did(act)
        return True

    def did_forward(self, key: str) -> None:
        """Note that ranks have voted on this forward."""
        self.agreement.did(INPUTS, forward_of(key))

    def by_steps(self) -> bool:
        """Whether ranks vote once on the forwards of a whole step."""
        course = self.agreement.course
        return course is not None and course.active

    def promise(self, keys: Sequence[str]) -> None:
        """Note that ranks have voted on these forwards, of all micro-batches of a step that begins."""
        course = self.agreement.course
        assert course is not None
        texts = [forward_of(key) for key in keys]
        course.did(Act("a step", " | ".join(texts)))
        course.promised = [Act(INPUTS, text) for text in reversed(texts)]

    def give_up(self) -> None:
        """A whole step has failed."""
        if self.agreement.course is not None:
            self.agreement.course.promised.clear()

    # -- backwards and updates ------------------------------------------------------------------------------------------
    def backward(self, name: str, outputs: Sequence[int], *, accumulates: bool) -> None:
        """Raise `RankMismatchError` on every rank unless all begin this backward."""
        text = f"{name}, outputs {list(outputs)}, {'only accumulating' if accumulates else 'reducing'}"
        if not self.agreement.passes(BACKWARD, text):
            self.agreement.vote(BACKWARD, text)
        self.agreement.did(BACKWARD, text, ends=not accumulates and not self.updates)

    def say_of_update(self, coming: Callable[[], Coming]) -> None:
        """Let votes compare what ranks say of the update to come."""
        if self.agreement.course is not None:
            self.agreement.course.coming, self.agreement.course.compare = coming, compare_updates

    def passes_update(self, names: Sequence[str], coming: Coming) -> bool:
        """Whether an update of these parameters needs no vote, of which a rank says what it said in the last one."""
        course = self.agreement.course
        if course is None:
            return False
        course.said = coming
        return (
            course.agreed is not None
            and course.agreed[0] == coming[0]
            and self.agreement.passes(UPDATE, gradients(names))
        )

    def did_update(self, names: Sequence[str]) -> None:
        """Note that ranks are about to update these parameters."""
        self.agreement.did(UPDATE, gradients(names), ends=True)


def gradients(names: Sequence[str]) -> str:
    """Of which parameters there are gradients, in words."""
    return f"{len(names)} gradients: {' '.join(names)}"
