"""`OnDevice`, and DeepSpeed's calls for inference, which are refused."""

from __future__ import annotations

from types import TracebackType
from typing import Any, NoReturn

import torch

from zgraph.errors import UnsupportedError


class OnDevice:
    """A context in which modules are built on a device ("meta": without memory) and in a dtype."""

    def __init__(
        self, dtype: torch.dtype | None = None, device: str | torch.device = "meta", enabled: bool = True
    ) -> None:
        self._dtype, self._device, self._enabled = dtype, torch.device(device), enabled
        self._before = torch.get_default_dtype()

    def __enter__(self) -> OnDevice:
        if self._enabled:
            self._before = torch.get_default_dtype()
            if self._dtype is not None:
                torch.set_default_dtype(self._dtype)
            self._device.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._enabled:
            self._device.__exit__(kind, error, trace)
            torch.set_default_dtype(self._before)


def init_inference(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise `UnsupportedError`: zgraph compiles training steps."""
    raise UnsupportedError(
        "init_inference is not supported",
        why="zgraph compiles training steps, and evaluates a model that it trains",
        hint="an inference engine, with what engine.module.save_pretrained writes",
    )


def tp_model_init(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise `UnsupportedError`: the configuration divides the model."""
    raise UnsupportedError(
        "tp_model_init is not supported",
        why="the graph's passes divide the model when it is compiled",
        hint='give initialize the undivided model, and "tensor_parallel": {"autotp_size": N}',
    )
