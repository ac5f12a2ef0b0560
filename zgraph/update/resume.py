"""What training resumes from, besides tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Last:
    """The checkpoint that a run saved or loaded last."""

    folder: Path  # where it is
    optimizer: bool = True  # whether it has the optimizer's states


@dataclass
class Known:
    """What a checkpoint says besides tensors; None where it does not say."""

    steps: int | None = None  # optimizer steps taken, skipped ones included
    skipped: int = 0  # skipped steps
    samples: int | None = None  # rows seen over all ranks
    # the optimizer's parameter groups, each with "names" and its numbers ("lr", …)
    groups: list[dict[str, Any]] = field(default_factory=list)
    loss_scale: dict[str, float] | None = None  # half precision's, by the names of `zgraph.update.scaler`
    plan: dict[str, Any] | None = None  # the plan that it was saved by
    programs: dict[str, str] = field(default_factory=dict)  # digests of the programs of the run that saved it
    mesh: dict[str, int] = field(default_factory=dict)  # the mesh that it was saved on
    world: int = 1  # the number of ranks that saved it
    left_out: list[str] = field(default_factory=list)  # names of frozen weights that are not in it
