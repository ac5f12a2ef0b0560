"""Random states of this process and its device: taken before something runs, and put back while it runs again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

RandomStates = tuple[torch.Tensor, torch.Tensor | None]


def random_states(device: torch.device) -> RandomStates:
    """The host's generator's state, and the device's."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


@contextlib.contextmanager
def restored(states: RandomStates | None, device: torch.device) -> Iterator[None]:
    """Inside, generators go on from these states; afterwards they are as they were."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if states is not None:
            torch.set_rng_state(states[0])
            if states[1] is not None:
                torch.cuda.set_rng_state(states[1], device)
        yield
