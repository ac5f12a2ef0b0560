"""Activation checkpointing by DeepSpeed's calls: what is recomputed becomes part of the captured graph.

`checkpoint` marks a region as torch's checkpointing does, and a plan's passes decide how to recompute it; random states
are those of the program. A plan's `recompute` and `memory_budget` need no such calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch

from zgraph.deepspeed.read_config import read
from zgraph.deepspeed.utils.logging import no_effect
from zgraph.errors import UnsupportedError

_configured = False


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args)`, and let the backward recompute the activations that it needs. A tuple is returned as
    it is."""
    return checkpoint_of_torch(function, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Accept DeepSpeed's settings of checkpointing.

    Raises `UnsupportedError` for those that decide where activations are stored, and names the key of `initialize`'s
    configuration to set instead, as it says of a configuration's that it is `initialize` that they count for. The others have no effect,
    since passes decide what they ask for.
    """
    global _configured
    if deepspeed_config is not None:
        section = read(deepspeed_config).get("activation_checkpointing") or {}
        for key in ("partition_activations", "cpu_checkpointing"):
            if section.get(key):
                no_effect(
                    f'configure(deepspeed_config: "{key}")', "it is the configuration of initialize that it counts in"
                )
    if getattr(mpu_, "get_model_parallel_world_size", lambda: 1)() > 1:
        no_effect("configure(mpu_=…)", "what ranks share of activations follows from the plan's mesh")
    for asked, name, key in (
        (partition_activations, "partition_activations", "partition_activations"),
        (checkpoint_in_cpu, "checkpoint_in_cpu", "cpu_checkpointing"),
    ):
        if asked:
            raise UnsupportedError(
                f"checkpointing.configure({name}=True)",
                why="where activations lie is part of the compiled program",
                hint=f'"activation_checkpointing": {{"{key}": true}} in the configuration of initialize',
            )
    for value, name in (
        (contiguous_checkpointing, "contiguous_checkpointing"),
        (num_checkpoints, "num_checkpoints"),
        (synchronize, "synchronize"),
        (profile, "profile"),
    ):
        if value:
            no_effect(f"checkpointing.configure({name}={value})", "the program's passes decide it")
    _configured = True


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Accept False. Raises `UnsupportedError` for True, as `configure` does."""
    configure(partition_activations=partition_activation)


def set_num_layers(nlayers: int) -> None:
    """Do nothing: no buffers are made for layers in advance."""


def is_configured() -> bool:
    return _configured


def reset() -> None:
    """Do nothing: no buffers are kept between steps."""


class _Tracker:
    """Named random states, as model code in Megatron's style uses them."""

    def add(self, name: str, seed: int) -> None:
        """Do nothing but say so: each rank's program draws the random numbers that the whole model would."""
        no_effect(
            f"get_cuda_rng_tracker().add({name!r}, {seed})", "a rank draws the numbers that the whole model would"
        )

    def reset(self) -> None:
        """Do nothing: no states are kept."""

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Do nothing, whatever the `name`: see `add`."""
        yield


_tracker = _Tracker()


def get_cuda_rng_tracker() -> _Tracker:
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed torch's generators."""
    torch.manual_seed(seed)


model_parallel_reconfigure_tp_seed = model_parallel_cuda_manual_seed
