"""`interpret.py FOLDER CASE…`: runs the code that `lower.py` wrote on CPU tensors, its Triton kernels in the interpreter,
and compares loss and gradients with the plain model in eager PyTorch.

Writes `interpreted.json`: for each case, the norm-wise relative error of the loss and of every gradient; also of plain
PyTorch itself in that dtype against float32, as the measure of what the dtype costs.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # (before triton)

import contextlib
import copy
import json
import sys
import types
from pathlib import Path
from typing import Any

import cases
import numpy as np
import torch
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def round_to_nearest() -> None:
    """The interpreter cuts float32 to bfloat16; a GPU rounds to nearest even, as torch does."""
    bits = {"bf16": (torch.bfloat16, torch.int16, np.uint16)}
    cast, convert = InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp

    def down(source: Any, target: Any) -> Any:
        dtype, view, raw = bits[target.scalar.name]
        values = torch.from_numpy(np.ascontiguousarray(source.data)).to(dtype).view(view).numpy().view(raw)
        return TensorHandle(values.reshape(source.data.shape), target.scalar)

    def is_down(source: Any, target: Any) -> bool:
        return source.dtype.scalar == tl.float32 and target.scalar.name in bits

    InterpreterBuilder.cast_impl = lambda self, s, t: down(s, t) if is_down(s, t) else cast(self, s, t)
    InterpreterBuilder.create_fp_to_fp = lambda self, s, t, mode: (
        down(s, t) if is_down(s, t) else convert(self, s, t, mode)
    )


def widen_products() -> None:
    """The interpreter multiplies the bits of bfloat16 numbers as whole numbers; a GPU multiplies the numbers."""
    multiply = InterpreterBuilder.create_dot

    def wide(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        values = (x.data.astype(np.uint32) << 16).view(np.float32)
        return TensorHandle(values, tl.float32)

    InterpreterBuilder.create_dot = lambda self, a, b, d, *options: multiply(self, wide(a), wide(b), d, *options)


def _libdevice() -> None:
    """The interpreter has no libdevice: torch's own functions stand in."""

    def stand_in(function: Any) -> Any:
        def call(*args: Any) -> Any:
            first = next(a for a in args if isinstance(a, tl.core.tensor))
            values = [
                torch.from_numpy(np.ascontiguousarray(a.handle.data))
                if isinstance(a, tl.core.tensor)
                else torch.tensor(float(getattr(a, "value", a)))
                for a in args
            ]
            result = function(*values).numpy().astype(first.handle.data.dtype)
            return tl.core.tensor(TensorHandle(result.reshape(first.handle.data.shape), first.handle.dtype), first.type)

        return call

    for name in (
        "erf",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "log2",
        "rsqrt",
        "sqrt",
        "tanh",
        "sin",
        "cos",
        "pow",
    ):
        setattr(triton_helpers.libdevice, name, stand_in(getattr(torch, name)))


def load(source: str, name: str) -> Any:
    """The function that generated CUDA code defines, on CPU tensors."""
    for old, new in (
        ("torch._C._dynamo.guards._empty_strided_cuda", "torch._C._dynamo.guards._empty_strided_cpu"),
        (
            "from torch._C import _cuda_getCurrentRawStream as get_raw_stream",
            "get_raw_stream = lambda index: 0",
        ),
        ("with torch.cuda._DeviceGuard(0):", "with contextlib.nullcontext():"),
        ("torch.cuda.set_device(0)", "pass"),
        ("device=device(type='cuda', index=0)", "device='cpu'"),
    ):
        source = source.replace(old, new)
    module = types.ModuleType(name)
    module.__file__ = f"{name}.py"
    module.contextlib = contextlib
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    return module.call


def run(case: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    layers, dtype, _, _ = cases.CASES[case]
    model, tokens = cases.filled(cases.Model(layers, dtype)), cases.tokens()
    exact = cases.filled(cases.Model(layers, torch.float64).double())
    for plain in (model, exact):
        plain(tokens).backward()
    params = {name: p.detach() for name, p in model.named_parameters()}
    forward, backward = parts

    def given(role: str, name: str, saved: dict[str, Any]) -> Any:
        if role == "parameter":
            return params[name].clone()
        return {"input": tokens, "tangent": torch.ones(()), "saved": saved.get(name)}[role]

    outputs = load(forward["source"], forward["name"])([given(r, n, {}) for r, n in forward["inputs"]])
    results = {(r, n): value for (r, n), value in zip(forward["outputs"], outputs, strict=True)}
    saved = {n: value for (r, n), value in results.items() if r == "saved"}
    grads = load(backward["source"], backward["name"])([given(r, n, saved) for r, n in backward["inputs"]])
    loss = next(value for (r, _), value in results.items() if r == "output")
    mine = {n: g for (r, n), g in zip(backward["outputs"], grads, strict=True) if r == "gradient"}
    plain_grads = {n: p.grad for n, p in model.named_parameters()}
    exact_grads = {n: p.grad for n, p in exact.named_parameters()}

    def error(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a.double() - b.double()).norm() / b.double().norm())

    return {
        "loss": error(loss, exact(tokens).detach()), "loss of plain PyTorch": error(model(tokens).detach(), exact(tokens).detach()),
        "gradients": {n: error(mine[n], exact_grads[n]) for n in exact_grads},
        "gradients of plain PyTorch": {n: error(plain_grads[n], exact_grads[n]) for n in exact_grads},
    }  # fmt: skip


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    triton_helpers.set_driver_to_gpu = lambda: None
    round_to_nearest()
    _libdevice()
    lowered = json.loads((folder / "lowered.json").read_text())
    (folder / "interpreted.json").write_text(
        json.dumps({case: run(case, copy.deepcopy(lowered[case])) for case in sys.argv[2:]})
    )
