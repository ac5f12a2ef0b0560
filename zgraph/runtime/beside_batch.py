"""Remembers which tensors of a model's calls are no part of the batch: one that has another size than the batch in one
call has its size by chance in another.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from zgraph.capture.call_signature import batch_size
from zgraph.capture.learned_sizes import inputs_by_path
from zgraph.capture.replaced_forward import signature_of


class BesideBatch:
    """The inputs of one model that are no part of its batches, as far as its calls have shown."""

    def __init__(self) -> None:
        self._known: set[tuple[str, int]] = set()  # (name, number of dimensions) of each

    def of(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
        """Take in the whole batch of a call of this forward; return the numbers of its flat inputs that are no part of
        it. (One of a single row may be for all rows in this call, and have a row for each in the next.)
        """
        kinds = inspect.Parameter
        parameters = list(signature_of(forward).parameters.values())[1:]
        positional = [p.name for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
        rows = batch_size(args, kwargs)
        beside = set()
        for number, (path, leaf) in enumerate(inputs_by_path(positional, args, kwargs).items()):
            if not isinstance(leaf, torch.Tensor) or not leaf.dim():
                continue
            if leaf.shape[0] not in (1, rows):
                self._known.add((path, leaf.dim()))
            if (path, leaf.dim()) in self._known:
                beside.add(number)
        return beside
