"""`attention.py COUNT SEED`: Triton's kernels of sparse attention, by the interpreter, beside whole attention in float64 with a mask.

COUNT random shapes, layouts, masks and dtypes. Prints one line of JSON: how many were compared, how many queries of them saw no key, and the
cases whose results are farther from float64 than their dtype allows, or have other layouts of memory than the meta functions say.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # (before triton)

import json
import random
import sys
from typing import Any

import interpret
import torch

import zgraph
from zgraph.codegen.kernels import block_sparse_attention
from zgraph.program import attention_dropout
from zgraph.program.cpu_attention import like_backward, like_forward
from zgraph.verification.masked_attention import layout_mask

interpret.round_to_nearest()
interpret.widen_products()

# The norm of an error over that of the result. In half precision weights, scores and the output are each rounded before a product reads them, by
# half of a last place (2^-11 or 2^-8) at most; in float32 sums are made in another order.
BOUNDS = {torch.float32: 2e-6, torch.float16: 3 * 2**-11, torch.bfloat16: 3 * 2**-8}


def nearby(batch, head, query, key):
    return ((query - key).abs() < 7 * (head + 1)) | (key < 3)


def documents(batch, head, query, key):
    return (query // 50 == key // 50) & (query >= key) & (query % 17 != 3)


def layout(draw: random.Random, heads: int, length: int) -> Any:
    block, apart = draw.choice([8, 16, 32, 64, 128]), draw.random() < 0.5
    direction = draw.choice(["unidirectional", "bidirectional"])
    kind = draw.choice(
        ["fixed", "bigbird", "longformer", "window", "own", "own", "nearby", "documents", "dense", "positions"]
    )
    if kind == "own":  # rows and columns of blocks may be empty
        blocks, share = -(-length // block), draw.choice([0.1, 0.5, 0.9])
        square = lambda: [[draw.random() < share for _ in range(blocks)] for _ in range(blocks)]  # noqa: E731
        return zgraph.BlockLayout(block=block, layout=[square() for _ in range(heads)] if apart else square())
    return {
        "fixed": lambda: zgraph.Fixed(block=block, num_local_blocks=2, attention=direction),
        "bigbird": lambda: zgraph.BigBird(block=block, different_layout_per_head=apart, attention=direction),
        "longformer": lambda: zgraph.Longformer(block=block, attention=direction),
        "window": lambda: zgraph.LocalWindow(block=block, attention=direction),
        "nearby": lambda: zgraph.MaskFunction(function=f"{__name__}:nearby", block=block),
        "documents": lambda: zgraph.MaskFunction(function=f"{__name__}:documents", block=block),
        "dense": lambda: zgraph.Dense(block=block),
        "positions": lambda: zgraph.SlidingWindow(block=block, window=draw.randint(1, 90), ahead=draw.choice([0, 5])),
    }[kind]()


def tensor(draw: random.Random, *shape: int) -> torch.Tensor:
    """Return random numbers, in one of several layouts of memory."""
    made = torch.Generator().manual_seed(draw.randrange(1 << 30))
    rows, heads, length, width = shape
    kind = draw.choice(["plain", "by row", "numbers apart"])
    if kind == "by row":
        return torch.randn(rows, length, heads, width, generator=made).transpose(1, 2)
    if kind == "numbers apart":
        return torch.randn(rows, heads, width, length, generator=made).transpose(2, 3)
    return torch.randn(shape, generator=made)


def mask(draw: random.Random, rows: int, heads: int, length: int) -> torch.Tensor | None:
    shape = draw.choice(
        [None, None, (length, length), (rows, 1, 1, length), (1, heads, length, length), (heads, 1, length)]
    )
    if shape is None:
        return None
    made = torch.Generator().manual_seed(draw.randrange(1 << 30))
    added = torch.randn(shape, generator=made)
    return added.masked_fill(torch.rand(shape, generator=made) < draw.choice([0.1, 0.6]), -torch.inf)


def expected(
    given: list[torch.Tensor],
    added: torch.Tensor | None,
    shown: torch.Tensor,
    scale: float | None,
    tangent: Any,
    dropout: tuple[torch.Tensor, float] | tuple[()],
) -> Any:
    """Return the results of whole attention, in float64: out, the logarithms of sums, and gradients; of what sees nothing, 0."""
    query, key, value = (x.double().requires_grad_() for x in given)
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    hidden = torch.zeros(shown.shape, dtype=torch.float64).masked_fill(~shown, -torch.inf)
    scores = scores + (hidden if added is None else hidden + added.double())
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0.0)
    factors: Any = 1.0
    if dropout:
        places = [torch.arange(n) for n in scores.shape]
        factors = attention_dropout.left(int(dropout[0]), dropout[1], places) / (1 - dropout[1])
    out = ((scores.softmax(-1) * factors) @ value.repeat_interleave(group, 1)).masked_fill(empty, 0.0)
    sums = scores.logsumexp(-1).masked_fill(empty.squeeze(-1), 0.0).detach()
    return [out.detach(), sums, *torch.autograd.grad(out, (query, key, value), tangent.double())], int(empty.sum())


def cancelled(
    given: list[torch.Tensor], added: torch.Tensor | None, shown: torch.Tensor, scale: float | None, tangent: Any
) -> float:
    """Return the norm of the gradients' terms that cancel where a query sees one key alone: its gradient is 0, and its error theirs."""
    query, key, value = (x.double() for x in given)
    seen = shown if added is None else shown & (added.double() > -torch.inf)
    alone = (seen.sum(-1, keepdim=True) == 1) & seen
    group = query.shape[1] // key.shape[1]
    products = (tangent.double() @ value.repeat_interleave(group, 1).mT).abs() * alone
    return float((products @ key.repeat_interleave(group, 1).abs()).norm()) * (
        query.shape[-1] ** -0.5 if scale is None else scale
    )


def places(results: Any) -> list[Any]:
    return [(x.shape, x.stride(), x.dtype) for x in results]


def compare(draw: random.Random) -> tuple[int, bool, list[str]]:
    dtype = draw.choice(list(BOUNDS))
    width = draw.choice([32, 64, 64, 128, 80, 20, 256])
    length = draw.choice([draw.randint(1, 70), draw.randint(1, 70), draw.randint(60, 260)])
    group, of_keys = draw.choice([(1, 1), (1, 2), (2, 1), (3, 1), (2, 2)])
    rows = draw.choice([1, 2]) if length * group * of_keys < 200 else 1
    heads, is_causal, scale = group * of_keys, draw.random() < 0.4, draw.choice([None, 0.3])
    sparsity = layout(draw, heads, length)
    given = [tensor(draw, rows, n, length, width).to(dtype) for n in (heads, of_keys, of_keys)]
    tangent = tensor(draw, rows, heads, length, width).to(dtype)
    added = mask(draw, rows, heads, length)
    added = None if added is None else added.to(draw.choice([dtype, torch.float32]))
    options = (added, is_causal, scale, sparsity.model_dump_json())
    shown = layout_mask(sparsity, heads, length)
    if is_causal:
        shown = shown & torch.ones(length, length, dtype=torch.bool).tril()
    chance = random.Random()  # (of its own: the other draws are those without dropout)
    chance.setstate(draw.getstate())
    dropout = (torch.tensor([chance.randrange(1 << 62)]), chance.choice([0.1, 0.6])) if chance.random() < 0.5 else ()
    right, empty = expected(given, added, shown, scale, tangent, dropout)
    out = block_sparse_attention.forward(*given, *options, *dropout)
    results = [*out, *block_sparse_attention.backward(tangent, *given, *out, *options, *dropout)]
    case = f"{sparsity.kind} {sparsity.block}, {dtype}, {rows} x {heads}/{of_keys} x {length} x {width}, causal {is_causal}"
    case += f", dropout {dropout[1:]}, mask {None if added is None else (*added.shape, added.dtype)}"
    wrong, terms = [], cancelled(given, added, shown, scale, tangent) / (1 - dropout[1] if dropout else 1)
    for name, result, reference in zip(["out", "sums", "dq", "dk", "dv"], results, right, strict=True):
        least = max(0.1, terms if name in ("dq", "dk") else 0.0)
        error = float((result.double() - reference).norm() / reference.norm().clamp(min=least))
        if not error <= BOUNDS[dtype]:
            wrong.append(f"{name} of {case}: {error:.1e}")
    if places(results) != places([*like_forward(*given), *like_backward(tangent, *given)]):
        wrong.append(f"layouts of memory of {case}")
    return empty, bool(dropout), wrong


def main() -> None:
    count, seed = map(int, sys.argv[1:])
    draw = random.Random(seed)
    results = [compare(draw) for _ in range(count)]
    wrong = [case for _, _, cases in results for case in cases]
    dropped = sum(drops for _, drops, _ in results)
    print(
        json.dumps(
            {"compared": count, "empty": sum(empty for empty, _, _ in results), "dropped": dropped, "wrong": wrong}
        )
    )


main()
