"""What compressed gradients leave for the next step: residuals (the compression errors), and the counter of stochastic
rounding.

A residual belongs to this rank alone, under the name of its RESIDUAL port: "layers.0.weight/dp" is what this rank has
not yet sent of its gradients of a parameter over a mesh dimension, "layers.0.weight/dp/mean" what it has not yet sent
of its part of their mean. It is created, as zeros, when a program first takes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from zgraph.program.node import tensor
from zgraph.program.program import InputRole, Program

logger = logging.getLogger(__name__)


class ErrorFeedback:
    """The residuals of one rank; `draws` counts the backward passes that drew random numbers."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tensors: dict[str, torch.Tensor] = {}
        self.draws = 0

    def of(self, program: Program) -> Callable[[str], torch.Tensor]:
        """Return a function that gives each residual of a program, by its port's name."""

        def found(name: str) -> torch.Tensor:
            shape = tensor(program.input_nodes(InputRole.RESIDUAL)[name]).shape
            residual = self.tensors.get(name)
            if residual is None or residual.shape != shape:
                if residual is not None:
                    logger.warning(
                        "the residual %s had %d elements, and has %d: it begins at zero", name, *residual.shape, *shape
                    )
                self.tensors[name] = residual = torch.zeros(shape, dtype=torch.float32, device=self.device)
            return residual

        return found

    def next_draw(self) -> torch.Tensor:
        """Advance the counter that stochastic rounding draws from, and return it: the next backward draws other
        numbers."""
        self.draws += 1
        return torch.tensor(self.draws, device=self.device)

    def last_draw(self) -> torch.Tensor:
        """Return the counter of the last backward, for running it again."""
        return torch.tensor(self.draws, device=self.device)

    def clear(self) -> None:
        """Drop all residuals: they begin at zero. The counter goes on."""
        self.tensors = {}

    def adopt(self, old: ErrorFeedback, *, copies: bool) -> None:
        """Take over another's residuals (or copies of them) and its counter."""
        self.tensors = {n: t.clone() if copies else t for n, t in old.tensors.items()}
        self.draws = old.draws

    def state(self) -> dict[str, Any] | None:
        """Return what a checkpoint saves of this rank's residuals, or None if there is nothing."""
        return {"residuals": dict(self.tensors), "draws": self.draws} if self.tensors or self.draws else None

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Restore what a checkpoint holds; with None, begin anew."""
        self.tensors = {} if saved is None else {n: t.to(self.device) for n, t in saved["residuals"].items()}
        self.draws = 0 if saved is None else saved["draws"]
