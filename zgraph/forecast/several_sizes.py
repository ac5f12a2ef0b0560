"""A model at several sizes: its inputs at another batch and sequence length, and exact polynomials through what was
counted.

The batch is dimension 0 of the first tensor among the inputs, and of all tensors of the same size in that dimension;
the sequence length is dimension 1 of the first tensor, and of all of the same size in it. Sampled sizes are close
together. Sequence lengths are sampled at the given length and below it, where it is long enough (positions are often
learnt up to some length). Polynomials are fitted in exact fractions, so close points are as good as distant ones, and
close sizes have the same operators more often.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch.utils import _pytree as pytree

from zgraph.build.planned_step import Inputs
from zgraph.errors import SymbolicError

MIN_SIZE = 2  # a size of 1 broadcasts: operators and strides differ there


@dataclass(frozen=True)
class Point:
    """The sizes of a sample."""

    batch: int  # rows of one rank
    sequence: int | None = None  # the sequence length; None for a model without a sequence

    def __str__(self) -> str:
        return f"batch {self.batch}" + ("" if self.sequence is None else f", sequence {self.sequence}")


class SizedInputs:
    """Example inputs that can be resized, as tensors on the meta device. Raises `SymbolicError` if there is no
    batch."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        tensors = [x for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor)]
        if not tensors or not tensors[0].dim():
            raise SymbolicError(
                "the inputs have no batch", why="the first tensor among them has none, or there is no tensor"
            )
        self.batch = tensors[0].shape[0]
        self.sequence = tensors[0].shape[1] if tensors[0].dim() > 1 else None

    @property
    def point(self) -> Point:
        return Point(self.batch, self.sequence)

    def at(self, point: Point) -> Inputs:
        """Return the inputs at these sizes. Without a sequence length in `point` theirs is kept."""

        def sized(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or not x.dim():
                return x
            shape = list(x.shape)
            if shape[0] == self.batch:
                shape[0] = point.batch
            if point.sequence is not None and len(shape) > 1 and shape[1] == self.sequence:
                shape[1] = point.sequence
            if shape == list(x.shape):
                return x
            strides = x.stride()
            order = sorted(range(x.dim()), key=lambda d: (-strides[d], d))
            tensor = torch.empty_permuted(shape, order, dtype=x.dtype, device="meta")
            return tensor.requires_grad_(x.requires_grad)

        # (a tensor that occurs twice, such as inputs that are the labels too, is one tensor at every size)
        sized_tensors: dict[int, Any] = {}
        inputs: Inputs = pytree.tree_map(
            lambda x: sized_tensors[id(x)] if id(x) in sized_tensors else sized_tensors.setdefault(id(x), sized(x)),
            self._inputs,
        )
        return inputs


def batches(given: int) -> list[int]:
    """Return two batch sizes to fit a line through, and a third to check it at."""
    first, step = max(given, MIN_SIZE), _step(given)
    return [first, first + step, first + 2 * step]


def lengths(given: int) -> list[int]:
    """Return three sequence lengths to fit a parabola through, and a fourth to check it at."""
    step = _step(given)
    if given - 3 * step < MIN_SIZE:
        return [max(given, MIN_SIZE) + n * step for n in range(4)]
    return [given - n * step for n in range(4)]


def _step(size: int) -> int:
    """Return the largest power of two that divides a size and is no more than an eighth of it: kernels are chosen by
    alignment."""
    step = 1
    while size % (2 * step) == 0 and 16 * step <= size:
        step *= 2
    return step


class Polynomials:
    """Polynomials of degree 1 in the batch and 2 in the sequence, through values at a grid of `points`."""

    def __init__(self, points: Sequence[Point]) -> None:
        squared = points[0].sequence is not None
        self.powers = [(i, j) for i in (0, 1) for j in ((0, 1, 2) if squared else (0,))]
        assert len(points) == len(self.powers)
        self._inverse = _inverted([self._terms(p) for p in points])
        self._found: dict[tuple[int, ...], tuple[Fraction, ...]] = {}

    def through(self, values: Iterable[int]) -> tuple[Fraction, ...]:
        """Return the coefficients of `powers` from values in the order of the points."""
        key = tuple(values)
        if key not in self._found:
            self._found[key] = tuple(
                sum((a * v for a, v in zip(row, key, strict=True)), Fraction()) for row in self._inverse
            )
        return self._found[key]

    def value(self, coefficients: Sequence[Fraction], point: Point) -> Fraction:
        return sum((c * t for c, t in zip(coefficients, self._terms(point), strict=True)), Fraction())

    def formula(self, coefficients: Sequence[Fraction], batch: Any, sequence: Any) -> Any:
        """Return the polynomial as a sympy expression in these symbols."""
        import sympy

        terms = (
            sympy.Rational(c.numerator, c.denominator) * batch**i * (sequence**j if j else 1)
            for c, (i, j) in zip(coefficients, self.powers, strict=True)
        )
        return sympy.Add(*terms)

    def _terms(self, point: Point) -> list[Fraction]:
        return [Fraction(point.batch**i * (point.sequence or 0) ** j) for i, j in self.powers]


def _inverted(matrix: list[list[Fraction]]) -> list[list[Fraction]]:
    """Return the inverse of a matrix by Gauss-Jordan elimination. The matrix of a grid of points is never singular."""
    size = len(matrix)
    rows = [[*row, *(Fraction(int(i == j)) for j in range(size))] for i, row in enumerate(matrix)]
    for at in range(size):
        pivot = next(i for i in range(at, size) if rows[i][at])
        rows[at], rows[pivot] = rows[pivot], rows[at]
        rows[at] = [x / rows[at][at] for x in rows[at]]
        for i in range(size):
            if i != at and rows[i][at]:
                rows[i] = [x - rows[i][at] * y for x, y in zip(rows[i], rows[at], strict=True)]
    return [row[size:] for row in rows]
