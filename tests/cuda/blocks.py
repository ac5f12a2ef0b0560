"""`quantized_blocks.py COUNT SEED`: Triton's kernels for numbers in few bits, by the interpreter, beside the operators of torch that they stand for.

COUNT random shapes, dtypes, blocks and formats, with infinities and NaN among the numbers. Prints one line of JSON: how many were compared,
and the cases that differ in a bit (NaN is NaN).
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # (before triton)

import json
import random
import sys

import interpret
import torch

from zgraph.codegen.kernels import DTYPES, quantized_blocks, served
from zgraph.program import block_quantization

interpret.round_to_nearest()


def values(draw: random.Random, count: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.Generator().manual_seed(draw.randrange(1 << 30))
    x = torch.randn(count, generator=made) * 10 ** draw.uniform(-6, 4)
    kind = draw.choice(["plain", "plain", "wide", "zero", "odd"])
    if kind == "wide":
        x *= torch.randn(count, generator=made).mul(6).exp()
    elif kind == "zero":
        x[torch.rand(count, generator=made) < 0.9] = 0.0
    elif kind == "odd":
        for value in (float("inf"), float("-inf"), float("nan")):
            if draw.random() < 0.5:
                x[draw.randrange(count)] = value
    return x.to(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype is torch.uint8:
        return torch.equal(one, other)
    numbers = {2: torch.int16, 4: torch.int32}[one.element_size()]
    alike = one.view(numbers).eq(other.view(numbers)) | (one.isnan() & other.isnan())
    return one.shape == other.shape and one.dtype is other.dtype and bool(alike.all())


def compare(draw: random.Random) -> list[str]:
    format, dtype = draw.choice(list(quantized_blocks.KINDS)), draw.choice(DTYPES)
    block, parts, count = draw.choice([8, 10, 32, 100, 256]), draw.randint(1, 4), draw.randint(1, 700)
    count = min(count, 12 * block)
    assert served(format, block, dtype)
    told = (format, block, parts)
    x = values(draw, parts * count, dtype)
    sent = block_quantization.to_blocks(x, *told)
    pairs = {
        "quantize": (quantized_blocks.quantize(x, *told), sent),
        "dequantize": tuple(
            f(sent, *told, [parts, count], dtype) for f in (quantized_blocks.dequantize, block_quantization.from_blocks)
        ),
        "mean": tuple(
            f(sent, *told, [count], dtype) for f in (quantized_blocks.mean, block_quantization.mean_of_blocks)
        ),
    }
    return [f"{name} {told} {count} {dtype}" for name, (one, other) in pairs.items() if not same(one, other)]


def main() -> None:
    count, seed = map(int, sys.argv[1:])
    draw = random.Random(seed)
    wrong = [case for _ in range(count) for case in compare(draw)]
    print(json.dumps({"compared": count, "wrong": wrong}))


main()
