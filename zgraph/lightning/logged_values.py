"""`self.log` of values that are computed from sharded weights or gradients: without it, a logged number would be
this rank's part."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor


def log_whole_values(model: nn.Module) -> None:
    """Make a LightningModule log the whole value of a DTensor. All ranks must log it."""
    own: Any = model.log  # type: ignore[operator]

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        own(name, value.full_tensor() if isinstance(value, DTensor) else value, *args, **kwargs)

    model.__dict__["log"] = log


def log_as_before(model: nn.Module) -> None:
    """Restore the LightningModule's own `log`."""
    model.__dict__.pop("log", None)
