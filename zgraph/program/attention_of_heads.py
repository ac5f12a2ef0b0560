"""Sparse attention of a rank's part of the heads, whose layouts differ: the operators of `zgraph.program.sparse_attention` with the rank's place.

`zgraph::sparse_attention_of_heads(query, …, layout, seed, dropout_p, place, ranks)` has all arguments of `zgraph::sparse_attention`, with a
layout, and a seed of what is dropped, for the heads of all ranks; the heads of `query` are those of the rank at `place` (a tensor of one
element), of so many `ranks` with as many each.
So the program is the same on each rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zgraph.plan.attention import PartOfHeads, sparsity_of
from zgraph.program.ops import library
from zgraph.program.sparse_attention import (
    LAYOUT_AT,
    SPARSE,
    SPARSE_BACKWARD,
    SPARSE_BACKWARD_WITH_MASK,
    fakes,
    schema_of,
)

OF_HEADS: dict[Any, Any] = {}
"""For each operator of sparse attention the one for a part of the heads."""


def _define(whole: Any, query_at: int) -> None:
    """Define the operator for a part of the heads that computes what `whole` does for all; `query_at` is the argument that is the queries."""
    of_all, given, results = schema_of(whole)
    name = f"{of_all}_of_heads"
    library.define(f"{name}({given}, Tensor place, int ranks) -> {results}")

    def run(*given: Any) -> tuple[Tensor, ...]:
        *arguments, place, ranks = given
        heads, layout = arguments[query_at].shape[1], arguments[LAYOUT_AT[whole]]
        block = sparsity_of(layout).block
        part = PartOfHeads(block=block, whole=layout, first=int(place) * heads, heads=ranks * heads)
        arguments[LAYOUT_AT[whole]] = part.model_dump_json()
        results: tuple[Tensor, ...] = whole(*arguments)
        return results

    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"zgraph::{name}", lambda *given: fakes[whole](*given[:-2]), lib=library)
    OF_HEADS[whole] = getattr(torch.ops.zgraph, name).default


_define(SPARSE, 0)
_define(SPARSE_BACKWARD, 1)
_define(SPARSE_BACKWARD_WITH_MASK, 1)
