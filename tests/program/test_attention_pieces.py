"""Pieces of sparse attention: each pair of a query and a key that it sees is computed once, and numbers are those of whole attention."""

from __future__ import annotations

import random

import pytest
import torch

import zgraph
from zgraph.program import attention_pieces, sparse_attention
from zgraph.program.attention_pieces import as_indices, divided
from zgraph.program.sparse_attention import SPARSE, SPARSE_BACKWARD, pieces_of

HEADS, BLOCK = 2, 8

# float64 and float32 differ by sums in another order.
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}


@pytest.fixture
def many_parts(monkeypatch):
    """Let parts cost nothing besides their keys, so that short sequences are divided as long ones are."""
    monkeypatch.setattr(attention_pieces, "_OF_A_PIECE", 0)
    monkeypatch.setattr(attention_pieces, "_OF_A_SUM", 0)
    sparse_attention.divided_pieces.cache_clear()
    yield
    sparse_attention.divided_pieces.cache_clear()


def random_layout(seed: int) -> zgraph.BlockLayout:
    """Return a layout in which neighbours see much the same; some rows see nothing."""
    chance = random.Random(seed)
    blocks = chance.randint(1, 14)
    squares = []
    for _ in range(chance.choice([1, HEADS])):
        row = [chance.random() < 0.6 for _ in range(blocks)]
        square = []
        for _ in range(blocks):
            row = [x if chance.random() < 0.8 else not x for x in row]
            square.append("".join("01"[x] for x in row) if chance.random() < 0.9 else "0" * blocks)
        squares.append(square)
    return zgraph.BlockLayout(block=BLOCK, layout=squares)


def shown_by(layout: zgraph.BlockLayout, length: int) -> torch.Tensor:
    squares = torch.tensor([[[x == "1" for x in row] for row in square] for square in layout.layout])
    whole = squares.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    return whole.expand(HEADS, -1, -1)[:, :length, :length]


@pytest.mark.parametrize("parts", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
def test_each_pair_is_computed_once(is_causal, parts, many_parts):
    most = 0
    for seed in range(60):
        layout = random_layout(seed)
        length = len(layout.layout[0]) * BLOCK - seed % BLOCK
        counts = torch.zeros(HEADS, length, length, dtype=torch.int64)
        pieces = list(divided(pieces_of(layout.model_dump_json(), HEADS, length, is_causal), BLOCK, parts=parts))
        of_query = torch.zeros(HEADS, length, dtype=torch.int64)
        for piece in pieces:
            queries, keys = as_indices(piece.queries), as_indices(piece.keys)
            shown = piece.shown(queries)
            shown = torch.ones(len(queries), len(keys), dtype=torch.bool) if shown is None else shown
            if is_causal and piece.partial:
                shown = shown & (keys <= queries.unsqueeze(1))
            heads = torch.arange(HEADS) if isinstance(piece.heads, slice) else piece.heads
            for head in heads.tolist():
                counts[head, queries.unsqueeze(1), keys] += shown
                of_query[head, queries] += shown.any(1)
                assert not piece.alone or int(of_query[head, queries].max()) <= 1
        expected = shown_by(layout, length)
        assert torch.equal(counts, (expected.tril() if is_causal else expected).long())
        most = max(most, int(of_query.max()))
    assert (most > 1) == parts


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("kind", ["none", "padding", "hides all", "of heads"])
def test_numbers_are_those_of_whole_attention(kind, dtype, many_parts):
    """Also where a mask hides all keys of a part, or of a query, from some queries."""
    for seed in range(12):
        torch.manual_seed(seed)
        layout, is_causal = random_layout(seed), seed % 2 == 0
        length = len(layout.layout[0]) * BLOCK
        query, key, value, tangent = (torch.randn(2, HEADS, length, 4, dtype=dtype) for _ in range(4))
        mask = mask_of(kind, length, dtype)
        shown = shown_by(layout, length)
        hidden = ~(shown.tril() if is_causal else shown) | (False if mask is None else mask == -torch.inf)
        leaves = [x.requires_grad_() for x in (query, key, value)]
        weights = (query @ key.mT * 0.5).exp().masked_fill(hidden, 0.0)
        expected = weights / weights.sum(-1, keepdim=True).clamp(min=1e-9) @ value
        gradients = torch.autograd.grad((expected * tangent).sum(), leaves)
        given = [x.detach() for x in leaves]
        options = (mask, is_causal, None, layout.model_dump_json())
        results = SPARSE(*given, *options)
        computed = (results[0], *SPARSE_BACKWARD(tangent, *given, *results, *options))
        for x, y in zip(computed, (expected, *gradients), strict=True):
            assert (x - y).abs().max() <= BOUNDS[dtype] * max(1.0, float(y.abs().max()))


def mask_of(kind: str, length: int, dtype: torch.dtype) -> torch.Tensor | None:
    if kind == "none":
        return None
    hidden = {
        "padding": torch.arange(length).expand(2, 1, 1, length) >= torch.tensor([length // 2, length]).view(2, 1, 1, 1),
        "hides all": torch.rand(length, length) < torch.tensor([0.3, 1.0])[torch.arange(length) % 2].unsqueeze(1),
        "of heads": torch.rand(2, HEADS, 1, length) < 0.5,
    }[kind]
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, -torch.inf)


def test_half_precision_rounds_an_output_once(many_parts):
    """The keys of a query are in one piece of the forward: outputs are those of rows of blocks, one by one."""
    layout = zgraph.LocalWindow(block=BLOCK, num_sliding_window_blocks=7, attention="bidirectional")
    text, length = layout.model_dump_json(), 16 * BLOCK
    pieces = sparse_attention.divided_pieces(sparse_attention.Attention(text, HEADS, length, False), parts=False)
    assert 1 < len(pieces) < 16 and all(piece.alone for piece in pieces)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, HEADS, length, 16, dtype=torch.bfloat16) for _ in range(3))
    wide = SPARSE(*(x.double() for x in (query, key, value)), None, False, None, text)[0]
    error = (SPARSE(query, key, value, None, False, None, text)[0].double() - wide).norm() / wide.norm()
    assert error < 2**-8


def test_what_neighbours_share_is_computed_at_once():
    """Of a wide window most keys are computed for many queries at once, without a mask."""
    layout = zgraph.LocalWindow(block=64, num_sliding_window_blocks=65, attention="bidirectional")
    rows = pieces_of(layout.model_dump_json(), 1, 8192, False)
    pieces = list(divided(rows, 64, parts=True))

    def scores(pieces):
        return sum(len(as_indices(p.queries)) * len(as_indices(p.keys)) for p in pieces)

    large = [p for p in pieces if len(as_indices(p.queries)) >= 512 and p.seen is None]
    assert scores(large) > 0.6 * scores(rows) and scores(pieces) < 1.05 * scores(rows)
