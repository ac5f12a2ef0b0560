"""Numbers in few bits: how many bytes they take, how wrong they are, and that what is not finite stays so."""

from __future__ import annotations

import math

import pytest
import torch

from zgraph.program.block_quantization import FORMATS, FROM_BLOCKS, MEAN_OF_BLOCKS, TO_BLOCKS, bytes_of, most_wrong

pytestmark = pytest.mark.core

SHAPES = [((1,), 1), ((7,), 1), ((256,), 1), ((257, 3), 1), ((4, 5, 6), 2), ((6, 111), 3), ((8, 64), 4)]


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Of very different sizes, in each block."""
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=draw) * torch.rand(shape, generator=draw).mul(8).exp()).to(dtype)


def there_and_back(x: torch.Tensor, format: str, block: int, parts: int) -> torch.Tensor:
    sent = TO_BLOCKS(x, format, block, parts)
    assert sent.dtype is torch.uint8 and sent.shape == (parts * bytes_of(x.numel() // parts, format, block),)
    return FROM_BLOCKS(sent, format, block, parts, list(x.shape), x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block", [8, 100, 256])
@pytest.mark.parametrize("format", FORMATS)
def test_no_element_is_more_wrong_than_its_bound(format: str, block: int, dtype: torch.dtype) -> None:
    for seed, (shape, parts) in enumerate(SHAPES):
        x = values(shape, dtype, seed)
        got = there_and_back(x, format, block, parts)
        assert got.shape == x.shape and got.dtype is dtype
        given_back = x.double().abs() * torch.finfo(dtype).eps  # (what is rounded to the dtype in the end)
        assert ((got.double() - x.double()).abs() <= most_wrong(x, format, block, parts) + 2 * given_back).all(), shape


@pytest.mark.parametrize(
    "format, size", [("int8", 1000 + 4 * 4), ("int4", 500 + 4 * 4), ("fp8", 1016), ("bf16", 2000), ("fp16", 2000)]
)
def test_so_many_bytes_are_sent(format: str, size: int) -> None:
    assert bytes_of(1000, format, 256) == size


def test_an_odd_number_of_halves_is_rounded_up() -> None:
    assert bytes_of(7, "int4", 256) == 4 + 4


@pytest.mark.parametrize("format", FORMATS)
def test_zeros_and_the_largest_are_exact(format: str) -> None:
    x = torch.zeros(600)
    x[300:400] = torch.tensor([7.0, -7.0]).repeat(50)
    assert torch.equal(there_and_back(x, format, 100, 1), x)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_not_finite_is_never_sent_as_if_it_were(format: str, value: float) -> None:
    x = torch.ones(3, 64)
    x[1, 5] = value
    got = there_and_back(x, format, 64, 3)
    assert not got[1, 5].isfinite() and torch.equal(got[::2], x[::2])


def test_fp16_of_what_is_too_large_is_infinite() -> None:
    assert there_and_back(torch.tensor([1e5, 1.0]), "fp16", 8, 1).tolist() == [math.inf, 1.0]


@pytest.mark.parametrize("format", FORMATS)
def test_a_mean_is_that_of_what_was_sent_added_in_order(format: str) -> None:
    sent = [values((2, 9), torch.float32, seed) for seed in range(3)]
    parts = [TO_BLOCKS(x, format, 8, 1) for x in sent]
    back = [FROM_BLOCKS(p, format, 8, 1, [2, 9], torch.float32) for p in parts]
    mean = MEAN_OF_BLOCKS(torch.cat(parts), format, 8, 3, [2, 9], torch.float32)
    assert torch.equal(mean, (back[0] + back[1] + back[2]) / 3)
