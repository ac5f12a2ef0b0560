"""How far two tensors are apart, and how far they may be if they differ by rounding alone."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

# Relative errors, norm-wise, by dtype: a few hundred roundings of that dtype, as sums of a model's lengths cause.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
# A gradient or buffer (a running mean) that is zero in exact arithmetic consists of rounding errors: a share of the norm of all is allowed.
FLOOR = {torch.float64: 1e-15}
DEFAULT_FLOOR = 3e-7


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits as integers, which compare NaN equal to itself."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype is torch.bool:
        return tensor
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


@dataclass(frozen=True)
class Difference:
    """One compared tensor on one rank."""

    # "output", "gradient", "buffer", "kept weight"; of an update "parameter" or "state"; of a pipeline also "value for
    # later stages", "gradient for earlier stages", and "part of a gradient" of parameters that several stages hold;
    # "sent value" or "sent gradient" for what was sent quantized
    what: str
    name: str  # the tensor's name
    rank: int  # the rank that computed it
    # ‖mine - plain‖ / ‖plain‖ (inf for another type or shape, or a missing tensor); of a quantized value the share of
    # the error that its format allows
    error: float
    allowed: float  # the largest error that is taken for rounding
    exact: bool  # whether all bits are equal
    stages: tuple[int, ...] = ()  # the pipeline stages that computed it, none without a pipeline
    phase: str = ""  # when it was compared ("step 1, backward 2"), where there are several steps

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed

    def __str__(self) -> str:
        of = (
            f", stage{'s' if len(self.stages) > 1 else ''} {' and '.join(map(str, self.stages))}" if self.stages else ""
        )
        when = f"{self.phase}: " if self.phase else ""
        error = "of the error that its format allows" if self.what.startswith("sent") else "relative error"
        told = (
            f"{self.error:.3g} {error}"
            if self.what.startswith("sent")
            else f"{error} {self.error:.3g}, allowed {self.allowed:.3g}"
        )
        return f"{when}{self.what} {self.name} (rank {self.rank}{of}): {told}"


def difference(
    what: str,
    name: str,
    rank: int,
    mine: Any,
    plain: Any,
    all_norm: float = 0.0,
    computed: torch.dtype | None = None,
    bound: float | None = None,
    stages: tuple[int, ...] = (),
) -> Difference:
    """Compare a tensor with that of plain PyTorch.

    `all_norm` is the norm of all gradients, or all buffers, together. `computed` is the dtype of the computation,
    where it is coarser than the tensor's own. `bound` replaces the tolerance of this dtype.
    """
    if not _comparable(mine, plain):
        return Difference(what, f"{name} (another type)", rank, float("inf"), 0.0, False, stages)
    mine, plain = mine.detach(), plain.detach()
    exact = torch.equal(mine, plain)
    if exact or not (mine.dtype.is_floating_point or mine.dtype.is_complex):
        return Difference(what, name, rank, 0.0 if exact else float("inf"), 0.0, exact, stages)
    wide = torch.complex128 if mine.dtype.is_complex else torch.float64
    a, b = mine.to(wide), plain.to(wide)
    finite = torch.isfinite(b)
    if not torch.equal(torch.nan_to_num(a[~finite]), torch.nan_to_num(b[~finite])):
        return Difference(what, name, rank, float("inf"), 0.0, False, stages)
    norm = float(b[finite].norm())
    dtype = computed or mine.dtype
    usual = TOLERANCE.get(dtype, TOLERANCE[torch.float32])
    floor = FLOOR.get(dtype, DEFAULT_FLOOR * usual / TOLERANCE[torch.float32])
    allowed = (usual if bound is None else bound) + floor * all_norm / max(norm, 1e-300)
    error = float((a - b)[finite].norm()) / max(norm, 1e-300)
    return Difference(what, name, rank, error if error == error else float("inf"), allowed, False, stages)


def norm_of(tensors: Iterable[torch.Tensor]) -> float:
    """Return the norm of all floating-point tensors together; tensors that are not finite are left out."""
    norms = (float(t.detach().double().norm()) for t in tensors if t.is_floating_point())
    return math.hypot(*(n for n in norms if math.isfinite(n)), 0.0)


def same_bits(mine: Any, plain: Any) -> bool:
    """Return whether two tensors of one type are equal in every bit: NaN equals itself, and 0.0 is not -0.0."""
    return _comparable(mine, plain) and equal_bits(mine.detach(), plain.detach())


def equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one shape and dtype are equal in every bit."""
    strides = one.stride()
    if strides == other.stride() and not one.is_contiguous():
        order = sorted(range(one.dim()), key=lambda d: -strides[d])
        one, other = one.permute(order), other.permute(order)
    if _is_plain_memory(one) and _is_plain_memory(other):
        return not _compare(one.data_ptr(), other.data_ptr(), one.nbytes)
    return torch.equal(bits(one), bits(other))


def _is_plain_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements are in the host's memory one behind the other, just as they are."""
    there = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.is_contiguous()
    return there and not tensor.is_conj() and not tensor.is_neg()


# Takes two thirds of the time of `torch.equal` for integers of 64 bits, and two fifths of that for 32 bits.
_compare = ctypes.CDLL(None).memcmp
_compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def _comparable(mine: Any, plain: Any) -> bool:
    tensors = isinstance(mine, torch.Tensor) and isinstance(plain, torch.Tensor)
    return tensors and mine.shape == plain.shape and mine.dtype == plain.dtype
