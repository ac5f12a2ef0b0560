"""The memory that sparse attention takes on a CPU while it runs, besides its operands and results: that of its largest piece.

A piece has keys and values that are gathered, if they do not lie side by side, a mask, if it needs one, and results of its own, in the backward
gradients of its keys too. Where weights are dropped, or a mask has a gradient, all of its scores are there as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zgraph.program.attention_of_heads import OF_HEADS
from zgraph.program.attention_of_rows import OF_ROWS
from zgraph.program.attention_pieces import Piece, as_indices
from zgraph.program.node import tensor
from zgraph.program.sizes import largest
from zgraph.program.sparse_attention import (
    SPARSE,
    SPARSE_BACKWARD,
    SPARSE_BACKWARD_WITH_MASK,
    Attention,
    divided_pieces,
    pieces_at_once,
)

# Bytes that the kernel of whole attention takes for the blocks that it works on.
_BLOCKS = 1 << 20
# Values of all scores that are there at once where they are written out: in the forward, in the backward.
_SCORES = (7, 12)

_WHOLE: dict[Any, Any] = {target: target for target in (SPARSE, SPARSE_BACKWARD, SPARSE_BACKWARD_WITH_MASK)}
_WHOLE |= {part: whole for whole, part in (*OF_HEADS.items(), *OF_ROWS.items())}
"""Each operator of sparse attention, and the one for whole sequences and all heads that it is a part of."""


def working_bytes(node: fx.Node) -> int:
    """Return the bytes that a node allocates while it runs, and frees, at the largest sizes: 0 for all but sparse attention on a CPU."""
    whole = _WHOLE.get(node.target)
    if whole is None:
        return 0
    given: dict[str, Any] = dict(zip((a.name for a in whole._schema.arguments), node.args, strict=False))
    query, key, mask = tensor(given["query"]), tensor(given["key"]), given["attn_mask"]
    if query.device.type != "cpu":
        return 0
    rows, heads, length, width = (largest(size) for size in query.shape)
    sizes = [largest(size) for size in tensor(mask).shape] if mask is not None else []
    call = _Call(
        Attention(given["layout"], heads, length, given["is_causal"]),
        (rows, largest(key.shape[1]), width),
        query.dtype,
        whole is not SPARSE,
        (sizes[0] * sizes[1] if len(sizes) == 4 else 1) if sizes else 0,
    )
    return call.bytes(written_out=given.get("seed") is not None or whole is SPARSE_BACKWARD_WITH_MASK)


@dataclass(frozen=True)
class _Call:
    """A call of sparse attention."""

    attention: Attention  # what is computed
    sizes: tuple[int, int, int]  # the rows of the batch, the heads of keys, the width of a head
    dtype: torch.dtype  # of queries, keys and values
    is_backward: bool  # whether it computes gradients
    masks: int  # rows times heads for which its mask has numbers of their own

    def bytes(self, *, written_out: bool) -> int:
        rows, heads_of_keys, width = self.sizes
        heads, length = self.attention.heads, self.attention.length
        pieces = pieces_at_once(self.attention, rows) if written_out else self._pieces()
        most = max((self._of_piece(piece, written_out) for piece in pieces), default=0)
        sums = rows * length * width * (heads + 2 * heads_of_keys) * self._wide
        return most + (sums if self.is_backward and (self._is_half or written_out) else 0)

    def _pieces(self) -> Any:
        return divided_pieces(self.attention, parts=self.is_backward or not self._is_half)

    @property
    def _is_half(self) -> bool:
        return self.dtype.itemsize < self._wide

    @property
    def _wide(self) -> int:
        """The bytes of a number in which gradients are summed."""
        return torch.promote_types(self.dtype, torch.float32).itemsize

    def _masks_of(self, piece: Piece, each: int) -> int:
        """Return how many numbers there are for each score in a piece's masks."""
        shown = max(1, self.masks) if piece.partial or piece.seen is not None else 0
        gathered = self.masks if isinstance(piece.keys, torch.Tensor) else 0
        return shown + gathered + (max(shown, self.masks) if each != self.dtype.itemsize else 0)

    def _of_piece(self, piece: Piece, written_out: bool) -> int:
        (rows, heads_of_keys, width), queries = self.sizes, piece.queries.stop - piece.queries.start
        keys, own_heads = len(as_indices(piece.keys)), isinstance(piece.heads, torch.Tensor)
        heads = len(piece.heads) if isinstance(piece.heads, torch.Tensor) else self.attention.heads
        of_queries = rows * heads * queries * width
        of_keys = 2 * rows * (heads if own_heads or written_out else heads_of_keys) * keys * width
        each = self._wide if self.is_backward or written_out else self.dtype.itemsize
        copies = of_queries * (3 if own_heads or each != self.dtype.itemsize else 0)
        gathered = of_keys if own_heads or isinstance(piece.keys, torch.Tensor) or each != self.dtype.itemsize else 0
        results = of_queries * (1 if piece.alone else 4) + (of_keys * (1 + own_heads) if self.is_backward else 0)
        masks = 2 * self.masks + bool(piece.partial or piece.seen is not None)
        total = (
            _BLOCKS + each * (copies + gathered + results + queries * keys * masks) + queries * keys * 2 * bool(masks)
        )
        return total + (_SCORES[self.is_backward] * rows * heads * queries * keys * each if written_out else 0)
