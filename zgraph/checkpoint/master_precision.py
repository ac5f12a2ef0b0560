"""Where a weight is in most digits: in its fp32 master, unless it was changed since that was written.

Whoever writes to a weight by hand leaves its master behind: the weight counts then, as in the next update.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from zgraph.checkpoint.source import Source
from zgraph.program.tolerance import same_bits

logger = logging.getLogger(__name__)


def is_current(master: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the master rounds to the weight, in all its numbers."""
    return same_bits(master.to(weight.dtype), weight)


def is_current_in(source: Source, master: str, weight: str) -> bool:
    """The same of two tensors of a checkpoint, by their names in it, a block at a time. Raises `CheckpointError` if they can't be read."""
    blocks = source.tensors[weight].blocks
    if set(blocks) != set(source.tensors[master].blocks):
        return is_current(source.whole(master), source.whole(weight))
    return all(is_current(source.block(master, b), source.block(weight, b)) for b in blocks)


def tell_changed(names: Sequence[str]) -> None:
    """A warning, if there are weights that are not what their masters round to."""
    if names:
        logger.warning(
            "%d weights were changed since the last step (%s, …): they are taken as they are, not from their fp32 copies",
            len(names),
            names[0],
        )
