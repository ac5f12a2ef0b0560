"""Saves the random states of this process and its device before something runs, and restores them while it runs
again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

RandomStates = tuple[torch.Tensor, torch.Tensor | None]


def random_states(device: torch.device) -> RandomStates:
    """Return the random states of the host's generator and of the device's (None on CPU)."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


@contextlib.contextmanager
def restored(states: RandomStates | None, device: torch.device) -> Iterator[None]:
    """Start the generators from these states inside, and put them back as they were afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if states is not None:
            torch.set_rng_state(states[0])
            if states[1] is not None:
                torch.cuda.set_rng_state(states[1], device)
        yield
