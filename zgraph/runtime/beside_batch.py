"""Remembers which tensors of a model's calls are no part of the batch: one that has another size than the batch in one
step has its size by chance in another.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zgraph.capture.call_signature import batch_size
from zgraph.capture.learned_sizes import inputs_by_path
from zgraph.capture.replaced_forward import signature_of


class BesideBatch:
    """The inputs of one model that are no part of its batches, as far as its steps have shown."""

    def __init__(self) -> None:
        self._known: set[tuple[str, int]] = set()  # (name, number of dimensions) of each
        self._now: dict[tuple[str, int], torch.Tensor] = {}  # those that are given whole in the step under way
        # what is known of the outputs' rows (see `MicroBatch.rows_of_outputs`), by the parts (names, numbers of dimensions) and the number
        # of outputs of the micro-batches that were checked to be of a batch
        self.checked: dict[tuple[tuple[tuple[str, int], ...], int], dict[int, int | None]] = {}
        self._uncut: list[torch.Tensor] = []  # these, and tensors of a single row that are for all rows

    def of(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
        """Begin a step with this whole batch for forward; return the numbers of its flat inputs that are no part of it.
        (One of a single row may be for all rows in this step, and have a row for each in the next.)
        """
        kinds = inspect.Parameter
        parameters = list(signature_of(forward).parameters.values())[1:]
        positional = [p.name for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
        rows = batch_size(args, kwargs)
        beside = set()
        self._now, self._uncut = {}, []
        for number, (path, leaf) in enumerate(inputs_by_path(positional, args, kwargs).items()):
            if not isinstance(leaf, torch.Tensor) or not leaf.dim():
                continue
            if leaf.shape[0] != rows:
                self._uncut.append(leaf)
            if leaf.shape[0] not in (1, rows) or (path, leaf.dim()) in self._known:
                self._now[path, leaf.dim()] = leaf
                beside.add(number)
        return beside

    def is_part(self, x: torch.Tensor) -> bool:
        """Return whether a tensor of a micro-batch of the step under way is cut from the batch."""
        return not any(x is whole for whole in (*self._now.values(), *self._uncut))

    @contextlib.contextmanager
    def step(self, parts: int) -> Iterator[None]:
        """Run the step that has begun, in so many micro-batches: keep what it has shown, or tell with its error what each
        of them was given whole.
        """
        try:
            yield
        except Exception as error:
            if parts > 1 and self._now:
                given = ", ".join(f"{path} {list(x.shape)}" for (path, _), x in self._now.items())
                error.add_note(
                    f"the batch was cut into {parts} micro-batches on dimension 0, and each was given whole: {given} "
                    "(only what has as many rows as the batch is cut)"
                )
            raise
        self._known |= self._now.keys()
