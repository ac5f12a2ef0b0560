"""Reads the number of skipped steps and the loss scale from the device one step late (see [Note: no waiting] in
step_outcomes.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

KEYS = ("skipped", "scale", "exhausted", "nonfinite")


class DelayedReadback:
    """The values `skipped`, `scale`, `exhausted` and `nonfinite`, as of the update before the last `read`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.skipped = 0
        self.scale = 0.0
        self.exhausted = False
        self.nonfinite = 0
        pinned = device.type == "cuda"
        self._held = torch.zeros(len(KEYS), dtype=torch.float64, pin_memory=pinned)
        self._event = torch.cuda.Event() if pinned else None
        self._started = False

    def copy(self) -> DelayedReadback:
        """Return a copy that goes on independently."""
        copied = DelayedReadback(self.device)
        copied.skipped, copied.scale, copied.exhausted = self.skipped, self.scale, self.exhausted
        copied.nonfinite = self.nonfinite
        if self._event is not None:
            self._event.synchronize()
        copied._held.copy_(self._held)
        copied._started = self._started
        return copied

    def start(self, values: Mapping[str, torch.Tensor]) -> None:
        """Start copying those of `KEYS` that are in `values` to the host; the device does so when it gets there."""
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        self._held.copy_(torch.stack([values.get(k, zero).to(torch.float64) for k in KEYS]), non_blocking=True)
        if self._event is not None:
            self._event.record()
        self._started = True

    def read(self) -> bool:
        """Wait for the copy that was started last; return whether there was one since the last `read`."""
        if not self._started:
            return False
        self._started = False
        if self._event is not None:
            self._event.synchronize()
        skipped, self.scale, exhausted, nonfinite = self._held.tolist()
        self.skipped, self.exhausted, self.nonfinite = int(skipped), bool(exhausted), int(nonfinite)
        return True
