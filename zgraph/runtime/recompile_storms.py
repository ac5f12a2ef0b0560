"""Warns of an argument that causes one compilation after another: a step counter, a new object, a length."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from zgraph.capture.learned_sizes import MARK, Signature, inputs_by_path
from zgraph.capture.replaced_forward import signature_of

logger = logging.getLogger(__name__)

MANY = 4  # programs for calls of one structure at which the warning comes


class RecompileStorms:
    """The calls that programs were made for, by the structure of their arguments."""

    def __init__(self, forward: Callable[..., Any], most: int) -> None:
        self.most = most  # max_programs: how many are kept
        self.positional = list(signature_of(forward).parameters)[1:]
        self._calls: dict[str, list[tuple[tuple[str, ...], str]]] = {}

    def made(self, call: Signature, changed: str | None, *, many: bool, tell: bool) -> None:
        """Note that a program was made for a call; warn, if `tell`, at the fourth for calls of one structure. A program
        that serves `many` sizes, made because sizes differ, does not count: there are few of these. `changed` is the
        Python state that the last program depends on and that does not hold any more.
        """
        structure = call.form.removeprefix(call.inputs)
        calls = self._calls.setdefault(structure, [])
        text = call.text()
        again = changed is None and (call.leaves, text) in calls  # (the program for this very call was dropped)
        sizes_alone = all(leaves == call.leaves and said != text for leaves, said in calls)
        if len(calls) >= MANY or (many and calls and sizes_alone):
            return
        calls.append((call.leaves, text))
        if len(calls) == MANY and tell:
            logger.warning(
                "%d programs were compiled for calls of one structure: %s",
                MANY,
                f"calls come back to programs that were let go, as no more than max_programs = {self.most} are kept; set it higher in the plan"
                if again
                else _why(call, calls, self.positional, changed),
            )


def _why(
    call: Signature, calls: Sequence[tuple[tuple[str, ...], str]], positional: Sequence[str], changed: str | None
) -> str:
    """Return what differs between the calls, and what to do."""
    constants = {id(x) for x in call.constants}
    for at, (path, leaf) in enumerate(inputs_by_path(positional, *call.call).items()):
        values = list(dict.fromkeys(leaves[at] for leaves, _ in calls))
        if len(values) > 1:
            name = f"argument {path!r}"
            if MARK in values[-1]:
                return f"{name} has another form from call to call; give it one dtype and number of dimensions"
            hint = (
                "forward decides by its values: let few of them occur (batches of few numbers of images, of few formats)"
                if id(leaf) in constants
                else "give a number that changes as a tensor (torch.tensor(x)), and text or objects outside of forward"
            )
            return f"{name} differs from call to call ({', '.join(values)}), and each value is a constant of its program; {hint}"
    if len({text for _, text in calls}) > 1:
        return "sizes of the inputs differ, and could not be symbols of one program; pad batches to few lengths, or see shapes in the plan"
    told = f" (no longer so: {changed})" if changed is not None else ""
    return f"attributes of the model differ from call to call{told}; keep what changes in a buffer (register_buffer)"
