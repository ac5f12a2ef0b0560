"""Dropout of sparse attention beside whole attention in float64, whose mask is made from the counter by numbers of Python."""

from __future__ import annotations

import functools

import pytest
import torch
from sweeps import chosen

import zgraph
from zgraph.program import attention_dropout, sparse_attention
from zgraph.program.attention_of_heads import OF_HEADS
from zgraph.program.sparse_attention import SPARSE, SPARSE_BACKWARD, SPARSE_BACKWARD_WITH_MASK
from zgraph.verification.masked_attention import layout_mask

ROWS, HEADS, WIDTH = 2, 4, 8
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-3}
LOW = 0xFFFFFFFF


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Return four random words by Philox4x32-10, as its paper writes it."""
    a, b, c, d = counter
    one, other = key
    for _ in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (second >> 32) ^ b ^ one, second & LOW, (first >> 32) ^ d ^ other, first & LOW
        one, other = (one + 0x9E3779B9) & LOW, (other + 0xBB67AE85) & LOW
    return a, b, c, d


@functools.cache
def left(seed: int, rate: float, rows: int, heads: int, length: int) -> torch.Tensor:
    """Return which weights are left, [rows, heads, length, length], one by one."""
    key, least = (seed & LOW, seed >> 32), rate * 2**32
    words = lambda *at: philox((at[3] // 4, at[2], at[1], at[0]), key)[at[3] % 4]  # noqa: E731
    at = [range(rows), range(heads), range(length), range(length)]
    return torch.tensor([[[[words(r, h, q, k) >= least for k in at[3]] for q in at[2]] for h in at[1]] for r in at[0]])


def test_words_are_those_of_philox_as_published():
    """The known answers of Random123, kat_vectors."""
    ones = LOW
    known = {
        ((0, 0, 0, 0), (0, 0)): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ((ones,) * 4, (ones, ones)): (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)): (
            0xD16CFE09,
            0x94FDCCEB,
            0x5001E420,
            0x24126EA1,
        ),
    }
    for (counter, key), words in known.items():
        assert philox(counter, key) == words
        given = [torch.tensor([n]) for n in counter]
        assert tuple(int(w) for w in attention_dropout.words(given, key[0] | key[1] << 32)) == words


def far_and_near(batch, head, query, key):
    return (query >= key) & ((query - key < 5) | (key < 2))


LAYOUTS = {
    "dense": zgraph.Dense(block=8),
    "heads differ": zgraph.BigBird(block=8, different_layout_per_head=True),
    "window": zgraph.LocalWindow(block=8),
    "positions": zgraph.SlidingWindow(window=11, ahead=3, block=8),
    "empty": zgraph.BlockLayout(block=16, layout=["1000", "0000", "0001", "0011"]),
    "function": zgraph.MaskFunction(function=f"{__name__}:far_and_near", block=16),
}


def reference(given, added, shown, drop, rate, tangent):
    """Return the output and the gradients of query, key, value and mask, in float64."""
    query, key, value, *mask = (
        x.double().detach().requires_grad_() for x in (*given, *([] if added is None else [added]))
    )
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).mT * 0.3
    scores = scores.masked_fill(~shown, -torch.inf) + (mask[0] if mask else 0.0)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    out = (weights * drop / max(1 - rate, 1e-30)) @ value.repeat_interleave(group, 1)
    return [out.detach(), *torch.autograd.grad(out, (query, key, value, *mask), tangent.double())]


@pytest.mark.parametrize(
    ("layout", "length", "heads_of_keys", "is_causal", "mask", "rate", "dtype", "at_once"),
    chosen(
        list(LAYOUTS),
        [33, 40, 5],
        [HEADS, 2],
        [False, True],
        ["none", "hidden", "learned"],
        [0.1, 0.6],
        list(BOUNDS),
        [1 << 20, 300],
        together=2,
    ),
)
def test_results_are_those_of_whole_attention_with_the_counters_mask(
    layout, length, heads_of_keys, is_causal, mask, rate, dtype, at_once, monkeypatch
):
    monkeypatch.setattr(sparse_attention, "_SCORES_AT_ONCE", at_once)
    torch.manual_seed(0)
    sparsity, seed = LAYOUTS[layout], torch.tensor([(1 << 62) + 12345])
    given = [torch.randn(ROWS, n, length, WIDTH).to(dtype) for n in (HEADS, heads_of_keys, heads_of_keys)]
    added = torch.randn(1, HEADS, length, length).to(dtype)
    added = {"none": None, "hidden": torch.zeros_like(added).masked_fill(added > 1, -torch.inf), "learned": added}[mask]
    shown = layout_mask(sparsity, HEADS, length)
    if is_causal:
        shown = shown & torch.ones(length, length, dtype=torch.bool).tril()
    tangent = torch.randn(ROWS, HEADS, length, WIDTH).to(dtype)
    expected = reference(given, added, shown, left(int(seed), rate, ROWS, HEADS, length), rate, tangent)
    rest = (is_causal, 0.3, sparsity.model_dump_json(), seed, rate)
    out, sums = SPARSE(*given, added, *rest)
    results = [out, *SPARSE_BACKWARD(tangent, *given, out, sums, added, *rest)]
    if mask == "learned":
        results = [out, *SPARSE_BACKWARD_WITH_MASK(tangent, *given, out, sums, added, *rest)]
    for result, right in zip(results, expected, strict=mask != "hidden"):
        assert result.dtype is dtype and result.shape == right.shape
        error = (result.double() - right).norm() / right.norm().clamp(min=1.0)
        assert float(error) <= BOUNDS[dtype]


def test_all_weights_may_be_dropped():
    x = torch.randn(1, 2, 20, WIDTH)
    rest = (None, True, None, zgraph.LocalWindow(block=8).model_dump_json(), torch.tensor([7]), 1.0)
    out, sums = SPARSE(x, x, x, *rest)
    assert not out.any() and not any(g.any() for g in SPARSE_BACKWARD(x, x, x, x, out, sums, *rest))


def test_a_part_of_the_heads_drops_what_all_heads_drop():
    torch.manual_seed(0)
    given = [torch.randn(ROWS, HEADS, 40, WIDTH, dtype=torch.float64) for _ in range(3)]
    for sparsity in (zgraph.LocalWindow(block=8), zgraph.BigBird(block=8, different_layout_per_head=True)):
        rest = (None, True, None, sparsity.model_dump_json(), torch.tensor([99]), 0.3)
        out, sums = SPARSE(*given, *rest)
        grads = SPARSE_BACKWARD(given[0], *given, out, sums, *rest)
        for place in range(2):
            heads = slice(2 * place, 2 * place + 2)
            part = [x[:, heads] for x in given]
            mine = OF_HEADS[SPARSE](*part, *rest, torch.tensor(place), 2)
            assert torch.equal(mine[0], out[:, heads])
            back = OF_HEADS[SPARSE_BACKWARD](part[0], *part, *mine, *rest, torch.tensor(place), 2)
            assert all(torch.allclose(a, b[:, heads], atol=1e-14) for a, b in zip(back, grads, strict=True))


def test_the_share_that_is_dropped_is_the_rate():
    """Of 2^17 weights, within five standard deviations; other seeds, rows, heads and queries drop others."""
    places = [torch.arange(n) for n in (2, 4, 64, 256)]
    for rate in (0.05, 0.1, 0.5):
        weights = attention_dropout.left(3, rate, places).double()
        assert abs(float(weights.mean()) - (1 - rate)) < 5 * (rate * (1 - rate) / weights.numel()) ** 0.5
        for other in (
            weights.roll(1, 0),
            weights.roll(1, 1),
            weights.roll(1, 2),
            attention_dropout.left(4, rate, places).double(),
        ):
            both = float((weights * other).mean())
            assert abs(both - (1 - rate) ** 2) < 5 * ((1 - (1 - rate) ** 2) / weights.numel()) ** 0.5


def test_in_a_models_own_code_a_seed_is_drawn_from_the_generator():
    x = torch.randn(1, 2, 40, WIDTH, dtype=torch.float64, requires_grad=True)
    sparsity = zgraph.LocalWindow(block=8)
    torch.manual_seed(5)
    first = zgraph.sparse_attention(x, x, x, sparsity, dropout_p=0.2)
    second = zgraph.sparse_attention(x, x, x, sparsity, dropout_p=0.2)
    torch.manual_seed(5)
    assert torch.equal(zgraph.sparse_attention(x, x, x, sparsity, dropout_p=0.2), first) and not torch.equal(
        first, second
    )

    def seeded(*given):
        torch.manual_seed(5)
        return zgraph.sparse_attention(*given, sparsity, dropout_p=0.2, is_causal=True)

    short = [torch.randn(1, 1, 11, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(seeded, short)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    zgraph.sparse_attention(x, x, x, sparsity)
    assert torch.equal(state, torch.get_rng_state())  # (without dropout nothing is drawn)
