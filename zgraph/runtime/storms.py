"""Says which argument makes program after program: a number that counts steps, a new object, a length."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch.utils import _pytree as pytree

from zgraph.capture.varying_sizes import MARK, Signature

logger = logging.getLogger(__name__)

MANY = 4  # programs of one structure, after which it is said


class Storms:
    """The calls that programs were made for, by the structure of their arguments."""

    def __init__(self) -> None:
        self._calls: dict[str, list[tuple[tuple[str, ...], str]]] = {}

    def made(self, call: Signature, *, many: bool, tell: bool) -> None:
        """Note that a program was made for a call, and warn at the fourth for calls of one structure, where this rank is to `tell`. One for `many`
        sizes, made because sizes differ, does not count: there are few of these."""
        structure = call.form.removeprefix(call.inputs)
        calls = self._calls.setdefault(structure, [])
        text = call.text()
        sizes_alone = all(leaves == call.leaves and said != text for leaves, said in calls)
        if len(calls) >= MANY or (many and calls and sizes_alone):
            return
        calls.append((call.leaves, text))
        if len(calls) == MANY and tell:
            logger.warning("%d programs were compiled for calls of one structure: %s", MANY, _why(call, calls))


def _why(call: Signature, calls: Sequence[tuple[tuple[str, ...], str]]) -> str:
    """What differs, and what to do."""
    args, kwargs = call.call
    paths = [pytree.keystr(path) for path, _ in pytree.tree_leaves_with_path((list(args), kwargs))]
    for at, path in enumerate(paths):
        values = list(dict.fromkeys(leaves[at] for leaves, _ in calls))
        if len(values) > 1:
            name = (
                "argument " + path.replace("[1]['", "'", 1).replace("']", "'", 1)
                if path.startswith("[1]")
                else f"argument {path[3:]}"
            )
            if MARK in values[-1]:
                return f"{name} has another form from call to call; give it one dtype and number of dimensions"
            hint = "give a number that changes as a tensor (torch.tensor(x)), and text or objects outside of forward"
            return f"{name} differs from call to call ({', '.join(values)}), and each value is a constant of its program; {hint}"
    if len({text for _, text in calls}) > 1:
        return "sizes of the inputs differ, and could not be symbols of one program; pad batches to few lengths, or see shapes in the plan"
    return "attributes of the model differ from call to call; keep what changes in a buffer"
