"""Hooks that copy slices of a batch, as in `self.model(tokens[:, :-1])`, before they are given to a compiled module: the strides of a slice are those
of the longer row, which a program for all lengths can't follow."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from zgraph.errors import ModelError


class DenseInputs:
    """Hooks before and after a module's forward that give it dense copies of strided arguments."""

    def __init__(self, module: nn.Module) -> None:
        self._copies: list[torch.Tensor] = []
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._copies.clear()
        return pytree.tree_map_only(torch.Tensor, self._dense, (args, kwargs))

    def _dense(self, given: torch.Tensor) -> torch.Tensor:
        if type(given) is not torch.Tensor or given.layout != torch.strided:
            return given
        if torch.ops.aten.is_non_overlapping_and_dense(given):
            return given
        copy = given.contiguous()
        self._copies.append(copy)
        return copy

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Raise `ModelError` if a copy was written to, since the slice that it was copied from would miss the
        change."""
        written = [c for c in self._copies if not c.is_inference() and c.grad_fn is None and c._version]
        self._copies.clear()
        if written:
            raise ModelError(
                f"{type(module).__name__} writes to an argument that is a slice of another tensor",
                where=f"shape {list(written[0].shape)}",
                why="it was given a copy, so that one program serves slices of all lengths",
                hint="give it x.contiguous(), and read the result from that; or let it return what it writes",
            )
