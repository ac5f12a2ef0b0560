"""Compiles the kernels for numbers in few bits for sm_90, with no GPU. Prints one line of JSON: each one's kind, target and bytes of code."""

from __future__ import annotations

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from zgraph.codegen.kernels import quantized_blocks
from zgraph.program.block_quantization import LARGEST

TYPES = {"count": "i64", "blocks": "i64", "size": "i64", "sent": "*u8"}
made = []
for kernel in (quantized_blocks.quantize_kernel, quantized_blocks.dequantize_kernel, quantized_blocks.mean_kernel):
    for format, kind in quantized_blocks.KINDS.items():
        for dtype in ("fp32", "bf16", "fp16"):
            values = {"BLOCK": 256, "LEN": 256, "KIND": kind, "LARGEST": LARGEST[format], "PARTS": 8}
            constants = {(at,): values[n] for at, n in enumerate(kernel.arg_names) if n in values}
            types = {n: "constexpr" if n in values else TYPES.get(n, f"*{dtype}") for n in kernel.arg_names}
            source = ASTSource(kernel, types, constants)
            found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
            target = next(line for line in found.asm["ptx"].splitlines() if line.startswith(".target"))
            fused = any(line.strip().startswith("fma") for line in found.asm["ptx"].splitlines())
            made.append([kernel.__name__, format, dtype, target, len(found.asm["cubin"]), fused])
print(json.dumps(made))
