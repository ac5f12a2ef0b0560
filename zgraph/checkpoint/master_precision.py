"""The choice between a weight and its fp32 master: the master, which has more digits, unless the weight was changed
since the master was written.

A weight that the user has written to no longer matches its master. Then the weight counts, as it does in the next
update.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from zgraph.checkpoint.source import Source
from zgraph.program.tolerance import same_bits

logger = logging.getLogger(__name__)


def is_current(master: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether the master, rounded to the weight's dtype, equals the weight bit for bit."""
    return same_bits(master.to(weight.dtype), weight)


def is_current_in(source: Source, master: str, weight: str) -> bool:
    """Return whether a master is current, for two tensors of a checkpoint by their names in it, one block at a time.
    Raises `CheckpointError` if they can't be read."""
    blocks = source.tensors[weight].blocks
    if set(blocks) != set(source.tensors[master].blocks):
        return is_current(source.whole(master), source.whole(weight))
    return all(is_current(source.block(master, b), source.block(weight, b)) for b in blocks)


def tell_changed(names: Sequence[str]) -> None:
    """Log a warning if `names`, the weights that differ from their rounded masters, is not empty."""
    if names:
        logger.warning(
            "%d weights were changed since the last step (%s, …): they are taken as they are, not from their fp32 copies",
            len(names),
            names[0],
        )
