"""Means over the ranks of what each has of its own of a parameter (a gradient, a momentum), exchanged as signs.

own tensor, residual -> rows of bytes                        (each parameter)
all rows, one after the other -> all_to_all                  (all together)
mean of this rank's part, residual -> bytes                  (each parameter)
all bytes, one after the other -> all_gather                 (all together)
rows of all parts -> the mean                                (each parameter)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zgraph.program import collectives
from zgraph.program.node import tensor
from zgraph.program.program import InputRole, OutputRole, ParamSpec, Port
from zgraph.update import sign_compression
from zgraph.update.assembler import Assembler

Results = list[tuple[Port, fx.Node]]


class CompressedMeans:
    """The means of one update's parameters over the ranks of a mesh dimension."""

    def __init__(self, assembler: Assembler, specs: Mapping[str, ParamSpec], dim: str, ranks: int) -> None:
        self.assembler, self.specs = assembler, specs
        self.dim, self.ranks = dim, ranks

    def means(self, own: Mapping[str, fx.Node], overflow: fx.Node | None, results: Results) -> dict[str, fx.Node]:
        """Return the mean of each parameter's tensors. The new residuals (what was not sent) are added to `results`; where
        `overflow` is true they stay as they were."""
        if self.ranks == 1 or not own:
            return dict(own)
        rows = {n: self._sent(n, m, sign_compression.WORKER, self.ranks, overflow, results) for n, m in own.items()}
        came = self._exchanged(rows, self._to_each)
        means = {
            n: self.assembler.of(n, lambda r: (sign_compression.mean_of(r),), [r], key=("mean",))[0]
            for n, r in came.items()
        }
        rows = {n: self._sent(n, m, sign_compression.SERVER, 1, overflow, results) for n, m in means.items()}
        came = self._exchanged(rows, self._to_all)
        return {n: self._read(n, r) for n, r in came.items()}

    def _sent(
        self, name: str, x: fx.Node, kept: str, parts: int, overflow: fx.Node | None, results: Results
    ) -> fx.Node:
        """Insert the compression of a tensor to rows of bytes; what is not sent becomes the new residual `kept`, in
        `results`."""
        size = sign_compression.residual_sizes(math.prod(self.specs[name].shape), self.ranks)[kept]
        port = Port(InputRole.RESIDUAL, f"{name}/{kept}")
        error = self.assembler.input(port, (size,), torch.float32, self.specs[name])
        rows, left = self.assembler.of(
            name, lambda x, e: sign_compression.sent(x, e, parts), [x, error], key=("sent", parts)
        )
        if overflow is not None:
            given = [overflow, error, left]
            (left,) = self.assembler.of(name, lambda o, a, b: (torch.where(o, a, b),), given, key=("kept",))
        results.append((Port(OutputRole.MUTATION, port.name, of=InputRole.RESIDUAL), left))
        return rows

    def _exchanged(self, rows: Mapping[str, fx.Node], exchange: Callable[[Tensor], Tensor]) -> dict[str, fx.Node]:
        """Insert the exchange of all parameters' rows; return the received rows of each parameter, one from each rank."""
        sizes = [tensor(r).shape[1] for r in rows.values()]

        def together(*given: Tensor) -> tuple[Tensor, ...]:
            return tuple(part.contiguous() for part in exchange(torch.cat(given, 1)).split(sizes, 1))

        return dict(zip(rows, self.assembler.together(together, list(rows.values())), strict=True))

    def _to_each(self, rows: Tensor) -> Tensor:
        sizes: Sequence[Any] = [rows.shape[1]] * self.ranks
        came = collectives.WAIT(collectives.ALL_TO_ALL(rows.reshape(-1), sizes, sizes, self.dim))
        return came.reshape(self.ranks, -1)  # type: ignore[no-any-return]

    def _to_all(self, rows: Tensor) -> Tensor:
        return collectives.WAIT(collectives.ALL_GATHER(rows, self.ranks, self.dim))  # type: ignore[no-any-return]

    def _read(self, name: str, rows: fx.Node) -> fx.Node:
        shape = self.specs[name].shape
        size = math.prod(shape)
        read = lambda r: (sign_compression.read(r).flatten()[:size].reshape(shape),)  # noqa: E731
        return self.assembler.of(name, read, [rows], key=("read", shape))[0]
