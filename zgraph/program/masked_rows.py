"""The rows that a mask selects, where it is known how many they are: what is put in their place, or added to them, has as many.

`zgraph::masked_rows(x, mask, dim, rows)` is `x[mask]` (behind `dim` whole dimensions). torch's own operator gives a size
that depends on the mask's values, and passes need sizes that are numbers, or arithmetic on those of inputs.
"""

from __future__ import annotations

from typing import Any

import torch

from zgraph.errors import StepError
from zgraph.program.ops import library


def _masked_rows(x: torch.Tensor, mask: torch.Tensor, dim: int, rows: int) -> torch.Tensor:
    at: list[slice | torch.Tensor] = [slice(None)] * dim + [mask]
    selected = x[tuple(at)].contiguous()
    if selected.shape[dim] != rows:
        raise StepError(
            f"a mask selects {selected.shape[dim]} rows, and what they are to be combined with has {rows}",
            why="the model adds what a mask selects to, or puts it in the place of, as many rows",
            hint="compare the number of marked places with the rows that are given for them (words of images, patches)",
        )
    return selected


def _like_rows(x: torch.Tensor, mask: torch.Tensor, dim: int, rows: Any) -> torch.Tensor:
    return x.new_empty([*x.shape[:dim], rows, *x.shape[dim + mask.dim() :]])


library.define("masked_rows(Tensor x, Tensor mask, int dim, SymInt rows) -> Tensor")
library.impl("masked_rows", _masked_rows, "CompositeExplicitAutograd")
torch.library.register_fake("zgraph::masked_rows", _like_rows, lib=library)

MASKED_ROWS = torch.ops.zgraph.masked_rows.default
