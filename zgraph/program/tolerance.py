"""How far two tensors are apart, and how far they may be where the one is the other but for rounding."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

# Relative errors, norm-wise, by dtype: a few hundred roundings of that dtype, as sums of a model's length make.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
# A gradient, or a buffer (a running mean), that is zero in exact arithmetic is nothing but rounding: a share of the norm of all is allowed.
FLOOR = {torch.float64: 1e-15}
DEFAULT_FLOOR = 3e-7


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bits as integers (as which not-a-number equals itself)."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype is torch.bool:
        return tensor
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


@dataclass(frozen=True)
class Difference:
    """One compared tensor on one rank: `what` is "output", "gradient", "buffer" or "kept weight"; of an update "parameter" or "state"; of a
    pipeline also "value for later stages", "gradient for earlier stages", and "part of a gradient" of what several stages hold. A "sent value"
    or "sent gradient" was sent in few bits: its `error` is a share of what the format allows.

    `error` is the norm-wise relative error, ‖mine - plain‖ / ‖plain‖ (inf for another type or shape, or a tensor that is
    missing), `allowed` the largest that is taken for rounding, `exact` whether all bits are equal. `stages` are those of a pipeline
    that made it, none without one. `phase` says when it was compared ("step 1, backward 2"), where several steps are.
    """

    what: str
    name: str
    rank: int
    error: float
    allowed: float
    exact: bool
    stages: tuple[int, ...] = ()
    phase: str = ""

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
    """`all_norm` is that of all gradients, or all buffers. `computed`: what it was computed in, where that is coarser than what it is kept in.
    `bound`: what is allowed instead of the tolerance of that dtype."""
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
    """The norm of all floating-point ones together, as far as they are finite."""
    norms = (float(t.detach().double().norm()) for t in tensors if t.is_floating_point())
    return math.hypot(*(n for n in norms if math.isfinite(n)), 0.0)


def same_bits(mine: Any, plain: Any) -> bool:
    """Are two tensors of one type equal in every bit? (Not a number equals itself here, and 0.0 is not -0.0.)"""
    return _comparable(mine, plain) and torch.equal(bits(mine.detach()), bits(plain.detach()))


def _comparable(mine: Any, plain: Any) -> bool:
    tensors = isinstance(mine, torch.Tensor) and isinstance(plain, torch.Tensor)
    return tensors and mine.shape == plain.shape and mine.dtype == plain.dtype
