"""What training goes on from, besides tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Last:
    """The checkpoint that a run saved or loaded last, with its optimizer's states or without."""

    folder: Path
    optimizer: bool = True


@dataclass
class Known:
    """What a checkpoint says besides tensors; None where it does not say.

    `steps`: optimizer steps taken, those that were skipped included. `skipped`: those. `samples`: rows seen over all ranks. `groups`: the
    optimizer's parameter groups, each with "names" and its numbers ("lr", …). `loss_scale`: half precision's, by the names of
    `zgraph.update.scaler`. `plan`, `programs`, `mesh`, `world`: what it was saved by. `left_out`: the names of frozen weights that are not in it.
    """

    steps: int | None = None
    skipped: int = 0
    samples: int | None = None
    groups: list[dict[str, Any]] = field(default_factory=list)
    loss_scale: dict[str, float] | None = None
    plan: dict[str, Any] | None = None
    programs: dict[str, str] = field(default_factory=dict)
    mesh: dict[str, int] = field(default_factory=dict)
    world: int = 1
    left_out: list[str] = field(default_factory=list)
