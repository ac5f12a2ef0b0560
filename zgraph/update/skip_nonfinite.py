"""Whether an update is skipped: the ranks' vote on gradients and losses that are not finite."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx

from zgraph.program.program import DATA_DIMS, STAGE_DIM, TENSOR_DIM
from zgraph.update.assembler import Assembler, all_reduce


def found_nonfinite(
    assembler: Assembler, mesh: Mapping[str, int], grads: Mapping[str, fx.Node], loss: fx.Node | None = None
) -> list[fx.Node]:
    """Insert the ranks' vote on whether any gradient (or loss) of any rank and stage is infinite or NaN: a 0-dim bool.

    With a loss, a second one says whether any loss is. A rank that saw it alone must not skip alone.
    """
    checks = [
        assembler.of(n, lambda g: (g.isfinite().logical_not().any().to(torch.float32),), [g], key=("overflow",))[0]
        for n, g in grads.items()
    ]
    dims = [d for d in (*DATA_DIMS, TENSOR_DIM, STAGE_DIM) if mesh.get(d, 1) > 1]

    def anywhere(*values: Tensor) -> tuple[Tensor, ...]:
        # (a stage may have no gradients)
        none = torch.zeros((), dtype=torch.float32, device=assembler.device)
        largest = torch.stack(list(values[: len(checks)]) or [none]).max()
        if loss is not None:
            lost = values[-1].isfinite().logical_not().to(torch.float32)
            largest = torch.stack([torch.maximum(largest, lost), lost])
        for dim in dims:
            largest = all_reduce(largest, "max", dim)
        return (largest > 0,) if loss is None else (largest.select(0, 0) > 0, largest.select(0, 1) > 0)

    return assembler.total(anywhere, [*checks, *([loss] if loss is not None else [])])
