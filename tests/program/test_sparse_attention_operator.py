"""The operator of sparse attention beside whole attention with a mask of what its layout leaves out."""

from __future__ import annotations

import sys

import pytest
import torch
from sweeps import chosen
from torch.nn import functional as F

import zgraph
from zgraph.errors import PlanError
from zgraph.program.sparse_attention import (
    SPARSE,
    SPARSE_BACKWARD,
    SPARSE_BACKWARD_WITH_MASK,
    block_rows,
    counted_blocks,
    layout_text,
)

HEADS, WIDTH = 4, 8

# float64 and float32 differ by sums in another order; bfloat16's results are rounded to 8 bits, and gradients are sums of such.
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def far_and_near(batch, head, query, key):
    return (query >= key) & ((query - key < 5) | (key < 2))


def wider_by_head(batch, head, query, key):
    return (query - key).abs() < 3 * (head + 1)


LAYOUTS = {
    "dense": zgraph.Dense(block=8),
    "fixed": zgraph.Fixed(block=8, num_local_blocks=3),
    "heads_differ": zgraph.Fixed(
        block=8, num_local_blocks=2, different_layout_per_head=True, num_different_global_patterns=2
    ),
    "variable": zgraph.Variable(block=16, local_window_blocks=(1, 2)),
    "bigbird": zgraph.BigBird(block=8, different_layout_per_head=True),
    "longformer": zgraph.Longformer(block=16, global_block_indices=(1,)),
    "window": zgraph.LocalWindow(block=8),
    "positions": zgraph.SlidingWindow(window=11, ahead=3, block=8),
    # The second block of queries sees nothing, the third only keys behind it: with a causal mask nothing.
    "empty": zgraph.BlockLayout(block=16, layout=["1000", "0000", "0001", "0011"]),
    "function": zgraph.MaskFunction(function=f"{__name__}:far_and_near", block=16),
    "function_of_heads": zgraph.MaskFunction(function=f"{__name__}:wider_by_head", block=8),
}


def shown_by(sparsity, length: int) -> torch.Tensor:
    """Return what a layout shows, [heads, length, length], element by element."""
    places = torch.arange(length)
    if isinstance(sparsity, zgraph.MaskFunction):
        function = {"far_and_near": far_and_near, "wider_by_head": wider_by_head}[sparsity.function.split(":")[1]]
        heads = torch.arange(HEADS).view(-1, 1, 1)
        return function(None, heads, places.view(1, -1, 1), places.view(1, 1, -1)).expand(HEADS, length, length)
    if isinstance(sparsity, zgraph.SlidingWindow):
        shown = [[0 <= q - k < sparsity.window or 0 < k - q <= sparsity.ahead for k in places] for q in places.tolist()]
        return torch.tensor(shown).expand(HEADS, length, length)
    blocks = -(-length // sparsity.block)
    rows = [sparsity.rows(blocks, head if sparsity.heads_differ else 0) for head in range(HEADS)]
    return torch.tensor(
        [
            [[k // sparsity.block in row[q // sparsity.block] for k in range(length)] for q in range(length)]
            for row in rows
        ]
    )


def masks(kind: str, length: int, dtype: torch.dtype) -> torch.Tensor | None:
    shown = torch.rand(length, length) > 0.2
    shown[3] = False  # (a query that sees nothing)
    of_keys = torch.arange(length) < torch.tensor([length, length - 3]).view(2, 1, 1, 1)
    mask = {"none": None, "rows": shown, "keys": of_keys, "heads": torch.rand(2, HEADS, length, length) > 0.2}[kind]
    return None if mask is None else torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf)


@pytest.mark.parametrize(
    ("layout", "length", "heads_of_keys", "is_causal", "mask", "dtype"),
    chosen(
        list(LAYOUTS),
        [33, 64, 5],
        [HEADS, 2],
        [False, True],
        ["none", "rows", "keys", "heads"],
        list(BOUNDS),
        together=3,
    ),
)
def test_results_and_gradients_are_those_of_whole_attention_with_a_mask(
    layout, length, heads_of_keys, is_causal, mask, dtype
):
    torch.manual_seed(0)
    sparsity, added = LAYOUTS[layout], masks(mask, length, torch.float64)
    sizes = ((2, HEADS, length, WIDTH), *[(2, heads_of_keys, length, WIDTH)] * 2)
    given = [torch.randn(size).to(dtype) for size in sizes]
    exact = [x.double().requires_grad_() for x in given]
    shown = shown_by(sparsity, length)
    if is_causal:
        shown = shown & torch.ones(length, length, dtype=torch.bool).tril()
    hidden = torch.zeros(shown.shape, dtype=torch.float64).masked_fill(~shown, -torch.inf)
    whole = hidden if added is None else added + hidden
    expected = F.scaled_dot_product_attention(*exact, attn_mask=whole, scale=0.3, enable_gqa=True)
    tangent = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, exact, tangent)
    options = (None if added is None else added.to(dtype), is_causal, 0.3, sparsity.model_dump_json())
    out, sums = SPARSE(*given, *options)
    results = (out, *SPARSE_BACKWARD(tangent.to(dtype), *given, out, sums, *options))
    for result, reference in zip(results, (expected, *gradients), strict=True):
        assert result.dtype is dtype and result.shape == reference.shape
        largest = max(1.0, float(reference.detach().abs().max()))
        assert float((result.double() - reference.detach()).abs().max()) <= BOUNDS[dtype] * largest


def learned_mask(kind: str, length: int) -> torch.Tensor:
    shape = {
        "one": (length, length),
        "heads": (1, HEADS, length, length),
        "rows": (2, 1, length, length),
        "keys": (2, HEADS, 1, length),
        "queries": (length, 1),
        "all": (2, HEADS, length, length),
    }[kind]
    mask = torch.randn(shape, dtype=torch.float64)
    return mask if kind != "all" else mask.masked_fill(torch.rand(shape) < 0.2, -torch.inf)


@pytest.mark.parametrize(
    ("layout", "length", "heads_of_keys", "is_causal", "mask", "dtype"),
    chosen(
        list(LAYOUTS),
        [33, 64, 5],
        [HEADS, 2],
        [False, True],
        ["one", "heads", "rows", "keys", "queries", "all"],
        list(BOUNDS),
        together=2,
    ),
)
def test_a_learned_mask_has_a_gradient(layout, length, heads_of_keys, is_causal, mask, dtype):
    torch.manual_seed(0)
    sparsity = LAYOUTS[layout]
    sizes = ((2, HEADS, length, WIDTH), *[(2, heads_of_keys, length, WIDTH)] * 2)
    given = [*[torch.randn(size).to(dtype) for size in sizes], learned_mask(mask, length).to(dtype)]
    exact = [x.double().clone().requires_grad_() for x in given]
    shown = shown_by(sparsity, length)
    if is_causal:
        shown = shown & torch.ones(length, length, dtype=torch.bool).tril()
    hidden = torch.zeros(shown.shape, dtype=torch.float64).masked_fill(~shown, -torch.inf)
    options = {"scale": 0.3, "enable_gqa": True}
    expected = F.scaled_dot_product_attention(*exact[:3], attn_mask=exact[3] + hidden, **options)
    tangent = torch.randn_like(expected)
    references = torch.autograd.grad(expected, exact, tangent)
    rest = (is_causal, 0.3, sparsity.model_dump_json())
    out, sums = SPARSE(*given, *rest)
    results = SPARSE_BACKWARD_WITH_MASK(tangent.to(dtype), *given[:3], out, sums, given[3], *rest)
    for result, reference in zip(results, references, strict=True):
        assert result.dtype is dtype and result.shape == reference.shape
        largest = max(1.0, float(reference.detach().abs().max()))
        assert float((result.double() - reference.detach()).abs().max()) <= BOUNDS[dtype] * largest


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["fixed", "bigbird", "window", "function"])
def test_half_precision_is_rounded_about_once(layout, dtype):
    """The error of each result is at most 3e-3 of it in bfloat16, whose numbers have 8 bits, and an eighth of that in float16, which has 11."""
    torch.manual_seed(0)
    sparsity = LAYOUTS[layout]
    given = [torch.randn(2, HEADS, 200, 32).to(dtype) for _ in range(3)]
    exact = [x.double().requires_grad_() for x in given]
    shown = shown_by(sparsity, 200) & torch.ones(200, 200, dtype=torch.bool).tril()
    expected = F.scaled_dot_product_attention(*exact, attn_mask=shown)
    tangent = torch.randn_like(expected).to(dtype)
    gradients = torch.autograd.grad(expected, exact, tangent.double())
    options = (None, True, None, sparsity.model_dump_json())
    out, sums = SPARSE(*given, *options)
    results = (out, *SPARSE_BACKWARD(tangent, *given, out, sums, *options))
    for result, reference in zip(results, (expected, *gradients), strict=True):
        error = (result.double() - reference).norm() / reference.norm()
        assert float(error) <= (3e-3 if dtype is torch.bfloat16 else 3e-3 / 8)


def test_the_fake_implementation_gives_the_same_layouts_of_memory():
    inputs = [torch.randn(2, 6, HEADS, WIDTH).transpose(1, 2) for _ in range(3)]
    options = (None, True, None, zgraph.LocalWindow(block=8).model_dump_json())
    real = SPARSE(*inputs, *options)
    fake = SPARSE(*[x.to("meta") for x in inputs], *options)
    assert [(x.shape, x.stride(), x.dtype) for x in real] == [(x.shape, x.stride(), x.dtype) for x in fake]
    backward = (torch.ones_like(real[0]), *inputs, *real)
    real, fake = SPARSE_BACKWARD(*backward, *options), SPARSE_BACKWARD(*[x.to("meta") for x in backward], *options)
    assert [(x.shape, x.stride(), x.dtype) for x in real] == [(x.shape, x.stride(), x.dtype) for x in fake]
    masked = (*backward, torch.randn(6, 1).expand(1, 1, 6, 6))
    real, fake = (SPARSE_BACKWARD_WITH_MASK(*given, *options[1:]) for given in (masked, [x.to("meta") for x in masked]))
    assert [(x.shape, x.stride(), x.dtype) for x in real] == [(x.shape, x.stride(), x.dtype) for x in fake]


def test_only_blocks_of_the_layout_are_computed(monkeypatch):
    """The kernel gets little more than the keys that its queries see, and no value is of the sequence's squared length."""
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            results = func(*args, **(kwargs or {}))
            seen.extend(x.numel() for x in torch.utils._pytree.tree_leaves(results) if isinstance(x, torch.Tensor))
            return results

    from zgraph.program import sparse_attention

    x = torch.randn(1, 1, 512, WIDTH)
    with Watch():
        sparse_attention.forward(x, x, x, None, True, None, zgraph.LocalWindow(block=16).model_dump_json())
    assert max(seen) < 512 * 512 // 16


def test_blocks_are_counted():
    window = zgraph.LocalWindow(block=16).model_dump_json()
    assert counted_blocks(window, HEADS, 160) == (19, 100)
    assert counted_blocks(zgraph.Dense().model_dump_json(), HEADS, 160) == (100, 100)
    heads = zgraph.BigBird(different_layout_per_head=True).model_dump_json()
    assert len(block_rows(heads, HEADS, 160)) == HEADS


def returns_a_number(batch, head, query, key):
    return query - key


def asks_a_value(batch, head, query, key):
    return query >= key if query > 3 else query == key


def of_the_first_row(batch, head, query, key):
    return (query >= key) | (batch > 0)


@pytest.mark.parametrize(
    ("sparsity", "said"),
    [
        (zgraph.BlockLayout(layout=["10", "11"]), "the layout has 2 x 2 blocks, and a sequence has 4"),
        (zgraph.BlockLayout(layout=[["1"], ["1"], ["1"]]), "the layout is for 3 heads, and attention has 4"),
        (zgraph.MaskFunction(function=f"{__name__}:returns_a_number"), "gives torch.int64, not booleans"),
        (zgraph.MaskFunction(function=f"{__name__}:asks_a_value"), "a mask function fails"),
        (zgraph.MaskFunction(function=f"{__name__}:of_the_first_row"), "shows rows of a batch different keys"),
        (zgraph.MaskFunction(function=f"{__name__}:nothing"), "can't be loaded"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_layouts_that_do_not_fit_are_refused(sparsity, said):
    x = torch.randn(1, HEADS, 64, WIDTH)
    with pytest.raises(PlanError) as caught:
        SPARSE(x, x, x, None, False, None, sparsity.model_dump_json())
    assert said in str(caught.value)


def test_the_function_differentiates_in_plain_pytorch():
    given = [torch.randn(1, 2, 20, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    sparsity = zgraph.LocalWindow(block=8)
    seen = torch.rand(20, 20) > 0.3
    assert torch.autograd.gradcheck(
        lambda *x: zgraph.sparse_attention(*x, sparsity, attn_mask=seen, is_causal=True), given
    )
    bias = torch.randn(2, 20, 20, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *x: zgraph.sparse_attention(*x[:3], sparsity, attn_mask=x[3].unsqueeze(0), is_causal=True),
        (*given, bias),
    )
    with pytest.raises(zgraph.errors.UnsupportedError, match="sparse attention on meta"):
        zgraph.sparse_attention(*[x.to("meta") for x in given], sparsity)


REACH, TABLE = 4, torch.ones(3, dtype=torch.bool)


def inside(distance):
    return distance.abs() < REACH


def of_a_number(batch, head, query, key):
    return inside(query - key)


def of_a_table(batch, head, query, key):
    return TABLE[query % 3] & (query >= key)


def test_a_mask_function_that_reads_another_number_than_before_is_refused(monkeypatch):
    x, sparsity = torch.randn(1, 1, 40, WIDTH), zgraph.MaskFunction(function=f"{__name__}:of_a_number", block=8)
    text = layout_text(sparsity)
    first = SPARSE(x, x, x, None, False, None, text)[0]
    monkeypatch.setattr(sys.modules[__name__], "REACH", 20)
    with pytest.raises(PlanError, match="has changed since the model was compiled"):
        SPARSE(x, x, x, None, False, None, text)
    wider = zgraph.sparse_attention(x, x, x, sparsity)
    places = torch.arange(40)
    assert torch.allclose(
        wider, F.scaled_dot_product_attention(x, x, x, attn_mask=inside(places[:, None] - places)), atol=1e-6
    )
    assert not torch.allclose(wider, first)


def test_a_mask_function_that_reads_what_may_change_unseen_is_refused():
    with pytest.raises(PlanError, match="reads 'TABLE', which may change without being seen"):
        layout_text(zgraph.MaskFunction(function=f"{__name__}:of_a_table"))
