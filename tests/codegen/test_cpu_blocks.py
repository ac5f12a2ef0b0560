"""The C++ kernels for numbers in few bits: the bits that torch's operators give, and these operators where there is no compiler."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest
import torch

from zgraph.codegen.kernels import cpu_blocks
from zgraph.program import block_quantization as blocks
from zgraph.torch_compat import cpp_library

ODD = (float("inf"), float("-inf"), float("nan"), -0.0, 1e-45, -1e-40, 3e38)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def values(draw: random.Random, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of one size, of many sizes, mostly zeros, or with some that are odd."""
    made = torch.Generator().manual_seed(draw.randrange(1 << 30))
    x = torch.randn(count, generator=made) * 10 ** draw.uniform(-30, 30)
    kind = draw.choice(["plain", "wide", "zero", "odd"])
    if kind == "wide":
        x = torch.randn(count, generator=made) * torch.randn(count, generator=made).mul(6).exp()
    elif kind == "zero":
        x[torch.rand(count, generator=made) < 0.9] = 0.0
    elif kind == "odd":
        for value in ODD:
            x[draw.randrange(count)] = value
    return x.to(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits; NaN is NaN."""
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    numbers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    alike = one.view(numbers) == other.view(numbers)
    return bool((alike | (one.isnan() & other.isnan())).all())


def wrong(draw: random.Random) -> list[str]:
    format, dtype = draw.choice(blocks.FORMATS), draw.choice(DTYPES)
    block, parts, count = draw.choice([1, 2, 7, 8, 100, 256, 1000]), draw.randint(1, 4), draw.randint(1, 900)
    told = (format, block, parts)
    x = values(draw, parts * count, dtype).view(parts, count)
    if draw.random() < 0.3:
        x = x.t().contiguous().t()  # (as a weight that is transposed)
    draws, places = torch.tensor(draw.randrange(1 << 40)), [torch.tensor([draw.randrange(8)])]
    sent = blocks.to_blocks(x, *told)
    drawn = blocks.to_blocks(x, *told, blocks.key_of(draws, places))
    pairs = {
        "to_blocks": (blocks.TO_BLOCKS(x, *told), sent),
        "to_blocks_drawn": (blocks.TO_BLOCKS_DRAWN(x, draws, places, *told), drawn),
        "from_blocks": (
            blocks.FROM_BLOCKS(sent, *told, [parts, count], dtype),
            blocks.from_blocks(sent, *told, [parts, count], dtype),
        ),
        "mean_of_blocks": (
            blocks.MEAN_OF_BLOCKS(sent, *told, [count], dtype),
            blocks.mean_of_blocks(sent, *told, [count], dtype),
        ),
    }
    return [f"{name} {told} {count} {dtype}" for name, (one, other) in pairs.items() if not same(one, other)]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_kernels_give_the_bits_of_torchs_operators(threads: int) -> None:
    assert cpu_blocks.quantizes("int8", 256) and cpu_blocks.dequantizes("bf16", 256)
    draw = random.Random(threads)
    assert [case for _ in range(150) for case in wrong(draw)] == []


def test_results_of_torchs_operators_are_contiguous_as_their_fakes() -> None:
    """(A part that no block divides was a slice, whose strides Inductor's code refuses.)"""
    sent = blocks.to_blocks(torch.ones(2, 301), "int8", 256, 2)
    assert blocks.from_blocks(sent, "int8", 256, 2, [2, 301], torch.float32).stride() == (301, 1)


def test_an_empty_tensor_is_no_bytes() -> None:
    sent = blocks.TO_BLOCKS(torch.empty(0), "int8", 256, 2)
    assert sent.numel() == 0 and blocks.FROM_BLOCKS(sent, "int8", 256, 2, [0, 3], torch.float32).shape == (0, 3)


def test_half_bytes_of_odd_blocks_are_left_to_torchs_operators() -> None:
    assert not cpu_blocks.quantizes("int4", 7) and not cpu_blocks.dequantizes("int4", 7)
    assert not cpu_blocks.quantizes("fp8", 8, drawn=True) and not cpu_blocks.quantizes("bf16", 8)


def test_without_a_compiler_torchs_operators_run_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(source: str) -> None:
        raise FileNotFoundError("no g++ here")

    monkeypatch.setattr(cpp_library, "load", fails)
    cpu_blocks._library.cache_clear()
    x = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    try:
        with caplog.at_level(logging.WARNING):
            sent = blocks.TO_BLOCKS(x, "int8", 32, 1)
        assert torch.equal(sent, blocks.to_blocks(x, "int8", 32, 1))
        assert "torch's operators quantize" in caplog.text and "no g++ here" in caplog.text
    finally:
        cpu_blocks._library.cache_clear()
