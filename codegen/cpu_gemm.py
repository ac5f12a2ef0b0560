"""Which library computes float32 matrix products on a machine's processors.

torch uses MKL, which does not use all of a processor that is not Intel's: on AMD EPYCs with AVX-512 it reaches 97
GFLOP/s a core where oneDNN reaches 217 (Zen 5), and 94 where oneDNN reaches 103 (Zen 4; torch 2.13, products of 512 x
512 x 2048). On these oneDNN, which torch comes with, computes the products that Inductor's code calls. The choice
depends on the processor alone: a plan gives the same numbers each time that it runs on a machine.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from zgraph.program.node import tensor
from zgraph.program.program import Program
from zgraph.program.sizes import largest
from zgraph.torch_compat.onednn import onednn_product

MIN_FLOP = 2**23  # FLOP: below it a call of oneDNN costs as much as it saves
SCRATCH = 700_000  # bytes that one of its calls allocates on each thread, at most (673 kB measured, for matrices of all sizes)
THIN = 16  # rows or columns: products with fewer are bound by memory


@functools.cache
def onednn() -> Any:
    """Return oneDNN's product, `product(a, b, into, beta)`, or None where torch has none or where MKL is as fast on
    this processor."""
    try:
        processors = Path("/proc/cpuinfo").read_text()
    except OSError:
        return None
    faster = "AuthenticAMD" in processors and torch.cpu._is_avx512_supported()
    return onednn_product() if faster else None


def library(kernels: Any) -> Any:
    """Return a replacement for `kernels`, the library calls of Inductor's code, or `kernels` itself where they are the
    fastest."""
    product = onednn()
    return kernels if product is None or isinstance(kernels, Products) else Products(kernels, product)


def scratch(program: Program) -> int:
    """Return the bytes that oneDNN allocates, beyond what the program's tensors take, while it computes one of its
    products."""
    if onednn() is None or not any(_large(n) for n in program.graph.nodes):
        return 0
    return SCRATCH * torch.get_num_threads()


def _large(node: fx.Node) -> bool:
    if node.target not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        return False
    output, inner = tensor(node), tensor(node.all_input_nodes[-1]).shape[0]
    return _worth(output, [*map(largest, output.shape)], largest(inner))


def _worth(result: torch.Tensor, shape: Sequence[int], inner: int) -> bool:
    """Return whether oneDNN computes a product of this result, shape and inner dimension faster."""
    if result.dtype is not torch.float32 or result.device.type != "cpu":
        return False
    return min(*shape, inner) >= THIN and 2 * math.prod(shape) * inner >= MIN_FLOP


class Products:
    """Inductor's `extern_kernels`, with large float32 products on the CPU by `product(a, b, into, beta)`: into = beta
    * into + a @ b."""

    def __init__(self, kernels: Any, product: Any) -> None:
        self._kernels = kernels
        self._product = product

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def mm(self, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        if not _taken(a, b, out):
            return self._kernels.mm(a, b, out=out)  # type: ignore[no-any-return]
        self._product(a, b, out, 0.0)
        return out

    def addmm(
        self, bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, alpha: float, beta: float, out: torch.Tensor
    ) -> torch.Tensor:
        if not (alpha == beta == 1 and _taken(a, b, out)):
            return self._kernels.addmm(bias, a, b, alpha=alpha, beta=beta, out=out)  # type: ignore[no-any-return]
        self._product(a, b, out.copy_(bias), 1.0)
        return out


def _taken(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> bool:
    """Return whether oneDNN computes this product.

    It does not where an operand has gaps between its rows: oneDNN would copy it, and no forecast counts that copy.
    """
    return _worth(out, out.shape, a.shape[1]) and out.is_contiguous() and _dense(a) and _dense(b)


def _dense(x: torch.Tensor) -> bool:
    return x.is_contiguous() or x.t().is_contiguous()
