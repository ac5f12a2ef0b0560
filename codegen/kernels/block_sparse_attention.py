"""Sparse attention by Triton, forward and backward: flash attention that computes the tiles of a layout alone.

Flash attention (Dao et al. 2022; Dao 2023) with a list of tiles for each program (`attention_tiles`). A program of `forward_kernel` serves a row
of tiles of one head: it goes through the tiles of keys that the row sees, keeps the largest score and the sum of each query, and writes the
output and the logarithm of the sum once. The backward has no atomic operations, so it gives the same bits each time: `query_kernel` goes
through rows of tiles, as the forward does, and `key_kernel` through columns, for one head of keys and all heads of queries that read it. All sums
are in float32; what a product reads is rounded to the tensors' dtype. A product of float32 is three products of TF32, which is about as exact (as
in torch's memory-efficient attention), or one where torch is told that this will do (`torch.set_float32_matmul_precision`).

For t computed tiles (of T x T positions, all heads and rows of the batch counted), a width of D numbers of e bytes, n queries and m keys:

    kernel          operations      of these needed by what is shown      bytes read and written
    forward_kernel  4 t T^2 D       4 D for each pair that is shown       n (2 D e + 4) + 2 t T D e
    query_kernel    6 t T^2 D       4 D (its scores, and dQ)              n (4 D e + 8) + 2 t T D e
    key_kernel      8 t T^2 D       6 D (dP, dV and dK)                   4 m D e + t T (2 D e + 8)

Dropped weights are recomputed in each kernel, from their places (`zgraph.program.attention_dropout`).

A width that is no power of two counts as the next one in operations. The second terms of the bytes are read from the cache where several rows
see the same tiles; what has to be read of them is every key and value once. How fast they run on a GPU was not measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zgraph.codegen.kernels.attention_tiles import Tiles, tiles_of
from zgraph.plan.attention import sparsity_of
from zgraph.program.attention_dropout import factor, threshold
from zgraph.program.cpu_attention import like_backward, like_forward
from zgraph.program.sparse_attention import first_head


# -- parts ------------------------------------------------------------------------------------------------------------
@triton.jit
def _load_tile(at, rows, stride, step, WIDTH: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr):
    """Load a tile of TILE x DIM numbers; 0 behind the last row, and behind WIDTH numbers."""
    row, number = tl.arange(0, TILE)[:, None], tl.arange(0, DIM)[None, :]
    inside = row < rows
    if WIDTH < DIM:
        inside = inside & (number < WIDTH)
    return tl.load(at + row * stride + number * step, mask=inside, other=0.0)


@triton.jit
def _store_tile(at, numbers, rows, stride, step, WIDTH: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr):
    row, number = tl.arange(0, TILE)[:, None], tl.arange(0, DIM)[None, :]
    inside = row < rows
    if WIDTH < DIM:
        inside = inside & (number < WIDTH)
    tl.store(at + row * stride + number * step, numbers.to(at.dtype.element_ty), mask=inside)


@triton.jit
def _scores(
    left, right, scale, query, key, seen, mask, mask_l, mask_k, queries, keys,
    PARTLY: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the scores of a tile, the rows of `left` by those of `right`, -inf where a key is hidden. `query` and `key` are the
    positions in the tile along both; `queries` and `keys` say how many of them there are."""
    scores = tl.dot(left, tl.trans(right), input_precision=PRECISION) * scale
    if MASKED:
        inside = (query < queries) & (key < keys)
        at = mask + query.to(tl.int64) * mask_l + key.to(tl.int64) * mask_k
        scores += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if PARTLY:
        byte = tl.load(seen + query * (TILE // 8) + key // 8).to(tl.int32)
        scores = tl.where(((byte >> (key % 8)) & 1) != 0, scores, float("-inf"))
    return scores


@triton.jit
def _left(seed, row, head, first_query, first_key, least, TILE: tl.constexpr):
    """Return which weights of a tile are left, queries by keys, 1 or 0 (`zgraph.program.attention_dropout`). Philox gives four keys' words
    at once."""
    query = (first_query + tl.arange(0, TILE)).to(tl.uint32)[:, None]
    fours = (first_key // 4 + tl.arange(0, TILE // 4)).to(tl.uint32)[None, :]
    none = tl.zeros((TILE, TILE // 4), tl.uint32)
    a, b, c, d = tl.philox(seed, fours + none, query + none, head.to(tl.uint32) + none, row.to(tl.uint32) + none)
    even = tl.interleave((a >= least).to(tl.int8), (c >= least).to(tl.int8))
    odd = tl.interleave((b >= least).to(tl.int8), (d >= least).to(tl.int8))
    return tl.interleave(even, odd)


# -- kernels ----------------------------------------------------------------------------------------------------------
@triton.jit
def forward_kernel(
    query, key, value, mask, out, sums, kinds, bounds, tiles, patterns, bits,
    query_b, query_h, query_l, query_d, key_b, key_h, key_l, key_d, value_b, value_h, value_l, value_d,
    mask_b, mask_h, mask_l, mask_k, out_b, out_h, out_l, out_d, sums_b, sums_h, sums_l,
    heads, group, length, count, scale, seed, first_head, least, factor,
    WIDTH: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    at, which = tl.program_id(0) % count, tl.program_id(0) // count
    head, row = (which % heads).to(tl.int64), (which // heads).to(tl.int64)
    first = at.to(tl.int64) * TILE
    queries, place = length - first, tl.arange(0, TILE)
    q = _load_tile(
        query + row * query_b + head * query_h + first * query_l, queries, query_l, query_d, WIDTH, DIM, TILE
    )
    key += row * key_b + (head // group) * key_h
    value += row * value_b + (head // group) * value_h
    mask += row * mask_b + head * mask_h + first * mask_l
    bounds += (tl.load(kinds + head) * count + at) * 3
    largest = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    summed = tl.zeros((TILE, DIM), tl.float32)
    for half in tl.static_range(2):
        for each in range(tl.load(bounds + half), tl.load(bounds + half + 1)):
            start = tl.load(tiles + each).to(tl.int64) * TILE
            seen = bits + tl.load(patterns + each).to(tl.int64) * (TILE * TILE // 8)
            k = _load_tile(key + start * key_l, length - start, key_l, key_d, WIDTH, DIM, TILE)
            scores = _scores(
                q, k, scale, place[:, None], place[None, :], seen, mask + start * mask_k, mask_l, mask_k,
                queries, length - start, half == 0, MASKED, TILE, PRECISION,
            )  # fmt: skip
            above = tl.maximum(largest, tl.max(scores, 1))
            base = tl.where(above == float("-inf"), 0.0, above)  # (of a query that has seen no key)
            weights = tl.exp(scores - base[:, None])
            shrunk = tl.exp(largest - base)
            v = _load_tile(value + start * value_l, length - start, value_l, value_d, WIDTH, DIM, TILE)
            total = total * shrunk + tl.sum(weights, 1)
            if DROPS:
                left = _left(tl.load(seed), row, head + first_head, first, start, least, TILE)
                weights = tl.where(left != 0, weights * factor, 0.0)
            summed = summed * shrunk[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
            largest = above
    whole = tl.where(total == 0, 1.0, total)
    out += row * out_b + head * out_h + first * out_l
    _store_tile(out, summed / whole[:, None], queries, out_l, out_d, WIDTH, DIM, TILE)
    sums += row * sums_b + head * sums_h + first * sums_l
    tl.store(sums + place * sums_l, tl.where(total == 0, 0.0, largest + tl.log(whole)), mask=place < queries)


@triton.jit
def query_kernel(
    query, key, value, mask, grad_out, out, sums, products, grad_query, kinds, bounds, tiles, patterns, bits,
    query_b, query_h, query_l, query_d, key_b, key_h, key_l, key_d, value_b, value_h, value_l, value_d,
    mask_b, mask_h, mask_l, mask_k, grad_b, grad_h, grad_l, grad_d, out_b, out_h, out_l, out_d, sums_b, sums_h, sums_l,
    to_b, to_h, to_l, to_d,
    heads, group, length, count, scale, seed, first_head, least, factor,
    WIDTH: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    at, which = tl.program_id(0) % count, tl.program_id(0) // count
    head, row = (which % heads).to(tl.int64), (which // heads).to(tl.int64)
    first = at.to(tl.int64) * TILE
    queries, place = length - first, tl.arange(0, TILE)
    q = _load_tile(
        query + row * query_b + head * query_h + first * query_l, queries, query_l, query_d, WIDTH, DIM, TILE
    )
    grad = _load_tile(
        grad_out + row * grad_b + head * grad_h + first * grad_l, queries, grad_l, grad_d, WIDTH, DIM, TILE
    )
    o = _load_tile(out + row * out_b + head * out_h + first * out_l, queries, out_l, out_d, WIDTH, DIM, TILE)
    product = tl.sum(grad.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(products + (row * heads + head) * length + first + place, product, mask=place < queries)
    sums += row * sums_b + head * sums_h + first * sums_l
    log_sum = tl.load(sums + place * sums_l, mask=place < queries, other=float("inf"))
    key += row * key_b + (head // group) * key_h
    value += row * value_b + (head // group) * value_h
    mask += row * mask_b + head * mask_h + first * mask_l
    bounds += (tl.load(kinds + head) * count + at) * 3
    summed = tl.zeros((TILE, DIM), tl.float32)
    for half in tl.static_range(2):
        for each in range(tl.load(bounds + half), tl.load(bounds + half + 1)):
            start = tl.load(tiles + each).to(tl.int64) * TILE
            seen = bits + tl.load(patterns + each).to(tl.int64) * (TILE * TILE // 8)
            k = _load_tile(key + start * key_l, length - start, key_l, key_d, WIDTH, DIM, TILE)
            v = _load_tile(value + start * value_l, length - start, value_l, value_d, WIDTH, DIM, TILE)
            scores = _scores(
                q, k, scale, place[:, None], place[None, :], seen, mask + start * mask_k, mask_l, mask_k,
                queries, length - start, half == 0, MASKED, TILE, PRECISION,
            )  # fmt: skip
            of_weights = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
            if DROPS:
                left = _left(tl.load(seed), row, head + first_head, first, start, least, TILE)
                of_weights = tl.where(left != 0, of_weights * factor, 0.0)
            of_scores = tl.exp(scores - log_sum[:, None]) * (of_weights - product[:, None])
            summed += tl.dot(of_scores.to(k.dtype), k, input_precision=PRECISION)
    grad_query += row * to_b + head * to_h + first * to_l
    _store_tile(grad_query, summed * scale, queries, to_l, to_d, WIDTH, DIM, TILE)


@triton.jit
def key_kernel(
    query, key, value, mask, grad_out, sums, products, grad_key, grad_value, kinds, bounds, tiles, patterns, bits,
    query_b, query_h, query_l, query_d, key_b, key_h, key_l, key_d, value_b, value_h, value_l, value_d,
    mask_b, mask_h, mask_l, mask_k, grad_b, grad_h, grad_l, grad_d, sums_b, sums_h, sums_l,
    to_key_b, to_key_h, to_key_l, to_key_d, to_value_b, to_value_h, to_value_l, to_value_d,
    heads, group, length, count, scale, seed, first_head, least, factor,
    WIDTH: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    at, which = tl.program_id(0) % count, tl.program_id(0) // count
    owner, row = (which % (heads // group)).to(tl.int64), (which // (heads // group)).to(tl.int64)
    first = at.to(tl.int64) * TILE
    keys, place = length - first, tl.arange(0, TILE)
    k = _load_tile(key + row * key_b + owner * key_h + first * key_l, keys, key_l, key_d, WIDTH, DIM, TILE)
    v = _load_tile(value + row * value_b + owner * value_h + first * value_l, keys, value_l, value_d, WIDTH, DIM, TILE)
    of_key = tl.zeros((TILE, DIM), tl.float32)
    of_value = tl.zeros((TILE, DIM), tl.float32)
    for member in range(group):
        head = owner * group + member
        of_queries, of_grad = query + row * query_b + head * query_h, grad_out + row * grad_b + head * grad_h
        masks, logs = mask + row * mask_b + head * mask_h + first * mask_k, sums + row * sums_b + head * sums_h
        of_products = products + (row * heads + head) * length
        list_at = bounds + (tl.load(kinds + head) * count + at) * 3
        for half in tl.static_range(2):
            for each in range(tl.load(list_at + half), tl.load(list_at + half + 1)):
                start = tl.load(tiles + each).to(tl.int64) * TILE
                queries = length - start
                seen = bits + tl.load(patterns + each).to(tl.int64) * (TILE * TILE // 8)
                q = _load_tile(of_queries + start * query_l, queries, query_l, query_d, WIDTH, DIM, TILE)
                grad = _load_tile(of_grad + start * grad_l, queries, grad_l, grad_d, WIDTH, DIM, TILE)
                log_sum = tl.load(logs + (start + place) * sums_l, mask=place < queries, other=float("inf"))
                product = tl.load(of_products + start + place, mask=place < queries, other=0.0)
                scores = _scores(
                    k, q, scale, place[None, :], place[:, None], seen, masks + start * mask_l, mask_l, mask_k,
                    queries, keys, half == 0, MASKED, TILE, PRECISION,
                )  # fmt: skip
                weights = tl.exp(scores - log_sum[None, :])
                of_weights = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
                dropped = weights
                if DROPS:
                    left = tl.trans(_left(tl.load(seed), row, head + first_head, start, first, least, TILE))
                    dropped = tl.where(left != 0, weights * factor, 0.0)
                    of_weights = tl.where(left != 0, of_weights * factor, 0.0)
                of_value += tl.dot(dropped.to(grad.dtype), grad, input_precision=PRECISION)
                of_scores = weights * (of_weights - product[None, :])
                of_key += tl.dot(of_scores.to(q.dtype), q, input_precision=PRECISION)
    grad_key += row * to_key_b + owner * to_key_h + first * to_key_l
    grad_value += row * to_value_b + owner * to_value_h + first * to_value_l
    _store_tile(grad_key, of_key * scale, keys, to_key_l, to_key_d, WIDTH, DIM, TILE)
    _store_tile(grad_value, of_value, keys, to_value_l, to_value_d, WIDTH, DIM, TILE)


# -- calls ------------------------------------------------------------------------------------------------------------
def sizes_for(width: int, dtype: torch.dtype) -> dict[str, int]:
    """Return what kernels for heads of a width are compiled with: the numbers of a row, the side of a tile, warps and stages."""
    wide = triton.next_power_of_2(max(width, 16))
    if dtype is torch.float32:
        return {"DIM": wide, "TILE": 32, "num_warps": 8 if wide > 128 else 4, "num_stages": 1}
    return {"DIM": wide, "TILE": 64, "num_warps": 8 if wide > 128 else 4, "num_stages": 2}


@dataclass(frozen=True)
class _Call:
    """What the kernels of one attention have in common."""

    tiles: Tiles  # what is computed
    # heads, heads of queries for one of keys, length, rows of tiles, scale; the seed, the first head of all, the least word, the factor
    numbers: tuple[Any, ...]
    options: dict[str, Any]  # what kernels are compiled with
    mask: Tensor  # the mask, one number for each score (by strides of 0); without a mask any tensor
    mask_strides: tuple[int, ...]  # of rows, heads, queries and keys

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        scale: float | None,
        layout: str,
        seed: Tensor | None,
        dropout_p: float,
    ) -> _Call:
        rows, heads, length, width = query.shape
        options: dict[str, Any] = sizes_for(width, query.dtype)
        exact = torch.get_float32_matmul_precision() == "highest"
        options |= {"WIDTH": width, "MASKED": attn_mask is not None, "DROPS": seed is not None}
        options |= {"PRECISION": "tf32x3" if exact else "tf32"}
        tiles = tiles_of(layout, heads, length, is_causal, options["TILE"], query.device)
        group = heads // key.shape[1]
        sizes = (heads, group, length, tiles.count, 1 / math.sqrt(width) if scale is None else float(scale))
        drops = (first_head(sparsity_of(layout)), threshold(dropout_p), float(factor(dropout_p)))
        numbers = (*sizes, query if seed is None else seed, *drops)
        mask = query if attn_mask is None else attn_mask.expand(rows, heads, length, length)
        return cls(tiles, numbers, options, mask, (0, 0, 0, 0) if attn_mask is None else mask.stride())

    def lists(self, *, by_column: bool = False) -> tuple[Tensor, ...]:
        lists = self.tiles.of_columns if by_column else self.tiles.of_rows
        return self.tiles.kinds, lists.bounds, lists.tiles, lists.patterns, self.tiles.bits


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    layout: str,
    seed: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Run `zgraph::sparse_attention`."""
    out, sums = like_forward(query, key, value)
    if query.numel():
        call = _Call.of(query, key, attn_mask, is_causal, scale, layout, seed, dropout_p)
        strides = (*query.stride(), *key.stride(), *value.stride(), *call.mask_strides, *out.stride(), *sums.stride())
        with torch.cuda.device_of(query):
            forward_kernel[(call.tiles.count * query.shape[0] * query.shape[1],)](
                query, key, value, call.mask, out, sums, *call.lists(), *strides, *call.numbers, **call.options
            )
    return out, sums


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    layout: str,
    seed: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `zgraph::sparse_attention_backward`."""
    grads = like_backward(grad_out, query, key, value)
    if not query.numel():
        return grads
    call = _Call.of(query, key, attn_mask, is_causal, scale, layout, seed, dropout_p)
    products = torch.empty(logsumexp.shape, dtype=torch.float32, device=query.device)
    read = (*query.stride(), *key.stride(), *value.stride(), *call.mask_strides, *grad_out.stride())
    of_rows = (*read, *out.stride(), *logsumexp.stride(), *grads[0].stride())
    of_columns = (*read, *logsumexp.stride(), *grads[1].stride(), *grads[2].stride())
    given = (query, key, value, call.mask, grad_out)
    count, rows = call.tiles.count, query.shape[0]
    with torch.cuda.device_of(query):
        query_kernel[(count * rows * query.shape[1],)](
            *given, out, logsumexp, products, grads[0], *call.lists(), *of_rows, *call.numbers, **call.options
        )
        key_kernel[(count * rows * key.shape[1],)](
            *given,
            logsumexp,
            products,
            *grads[1:],
            *call.lists(by_column=True),
            *of_columns,
            *call.numbers,
            **call.options,
        )
    return grads
