"""Compiles the kernels of sparse attention for sm_90, with no GPU, for each width of heads and dtype.

Prints one line of JSON: each one's name, width, dtype, target, bytes of code and of shared memory, registers, and bytes that a thread keeps
in memory because it has no registers for them.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import fake_h200
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from zgraph.codegen.kernels import DTYPES, block_sparse_attention

KERNELS = [getattr(block_sparse_attention, f"{name}_kernel") for name in ("forward", "query", "key")]
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
POINTERS = {
    "sums": "*fp32",
    "products": "*fp32",
    "bits": "*u8",
    "seed": "*i64",
    **dict.fromkeys(("kinds", "bounds", "tiles", "patterns"), "*i32"),
}
TENSORS = ("query", "key", "value", "mask", "out", "grad_out", "grad_query", "grad_key", "grad_value")
NUMBERS = {
    "scale": "fp32",
    "factor": "fp32",
    "least": "i64",
    **dict.fromkeys(("heads", "group", "length", "count", "first_head"), "i32"),
}


def compiled(kernel: Any, width: int, dtype: torch.dtype) -> list[Any]:
    """Compile as a call with a mask and tensors in order does, whose last strides are 1, and whose others 16 divides."""
    sizes = block_sparse_attention.sizes_for(width, dtype)
    values = {
        "WIDTH": width,
        "MASKED": True,
        "DROPS": True,
        "PRECISION": "tf32x3",
        "DIM": sizes["DIM"],
        "TILE": sizes["TILE"],
    }
    types, constants, aligned = {}, {}, {}
    for at, name in enumerate(kernel.arg_names):
        if name in values or name.endswith("_d") or name in ("mask_k", "sums_h"):
            types[name], constants[(at,)] = "constexpr", values.get(name, 1)
            continue
        pointer = POINTERS.get(name) or (f"*{NAMES[dtype]}" if name in TENSORS else None)
        types[name] = pointer or NUMBERS.get(name, "i32")
        if pointer or (name not in NUMBERS and not name.startswith("sums_")):
            aligned[(at,)] = [["tt.divisibility", 16]]
    options = {"num_warps": sizes["num_warps"], "num_stages": sizes["num_stages"]}
    code = triton.compile(
        ASTSource(kernel, types, constants, aligned), target=GPUTarget("cuda", 90, 32), options=options
    )
    target = next(line for line in code.asm["ptx"].splitlines() if line.startswith(".target"))
    usage = fake_h200._usage(code.asm["cubin"])
    found = [
        len(code.asm["cubin"]),
        code.metadata.shared,
        usage.get("reg", 0),
        usage.get("stack", 0) + usage.get("local", 0),
    ]
    return [kernel.__name__, width, NAMES[dtype], target, *found]


def main() -> None:
    widths = [int(width) for width in sys.argv[1:]]
    print(json.dumps([compiled(k, w, d) for k in KERNELS for w in widths for d in DTYPES]))


if __name__ == "__main__":
    main()
