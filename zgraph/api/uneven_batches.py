"""Refusing loaders of accelerate's that give ranks different numbers of batches, before the first of them is computed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from zgraph.errors import ModelError
from zgraph.runtime.compiled_models import is_compiled


class EvenBatches:
    """A hook before a compiled model's forward, which looks at each loader that accelerate iterates over, once.

    A forward communicates in evaluation as in training, so that a rank without a batch keeps the others waiting. Inside
    `zgraph.full_weights` it does not, and any loader will do.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._accepted: Any = None  # the loader that was looked at last

    def __call__(self, module: nn.Module, args: Any) -> None:
        state = sys.modules["accelerate.state"]
        loader = state.GradientState().active_dataloader
        if loader is None or loader is self._accepted or self._handle.whole is not None:
            return
        counts = batches_of_ranks(loader)
        if len(set(counts)) > 1:
            fewer = next(rank for rank, count in enumerate(counts) if count < counts[0])
            raise ModelError(
                f"the loader gives rank 0 {counts[0]} batches, and rank {fewer} {counts[fewer]}",
                where="even_batches",
                why="a compiled model communicates whenever it is called, and the ranks that have more would wait for the others",
                hint="even_batches=True, and gather_for_metrics for metrics of all rows once; or drop_last=True; "
                "or evaluate inside zgraph.full_weights(model)",
            )
        self._accepted = loader


def watch_batches(module: nn.Module, handle: Any) -> None:
    """Let a compiled model look at the loaders of accelerate's that its batches come from."""
    if not any(isinstance(hook, EvenBatches) for hook in module._forward_pre_hooks.values()):
        module.register_forward_pre_hook(EvenBatches(handle))


def batches_of_ranks(loader: Any) -> list[int]:
    """Return how many batches of a loader of accelerate's each rank gets; nothing if its ranks have equally many, or it can't be told."""
    shards: Any = sys.modules["accelerate.data_loader"]
    sampler = getattr(loader, "batch_sampler", None)
    while isinstance(sampler, shards.SkipBatchSampler):
        sampler = sampler.batch_sampler
    if not isinstance(sampler, shards.BatchSamplerShard) or sampler.even_batches or sampler.drop_last:
        return []
    try:
        whole = len(sampler.batch_sampler)
        if not sampler.split_batches:
            ranks = range(sampler.num_processes)
            return [whole // sampler.num_processes + (rank < whole % sampler.num_processes) for rank in ranks]
        part, rest = (
            sampler.batch_size // sampler.num_processes,
            len(sampler.batch_sampler.sampler) % sampler.batch_size,
        )
    except (AttributeError, TypeError):  # (a sampler of the user's own, without a length)
        return []
    full = whole - (rest > 0)
    return [full + (rest > part * rank) for rank in range(sampler.num_processes)]


def join_uneven_inputs(
    accelerator: Any, own: Callable[..., Any], joinables: Any, even_batches: bool | None = None
) -> Any:
    """Return accelerate's context, which joins ranks with fewer batches. Raises `ModelError` for a compiled model where it would do so."""
    wanted = accelerator.even_batches if even_batches is None else even_batches
    if accelerator.multi_device and not wanted and any(is_compiled(joined) for joined in joinables):
        raise ModelError(
            "join_uneven_inputs can't be had with a compiled model",
            why="it stands in for the collectives of DistributedDataParallel's backward on ranks without batches, and a plan has others",
            hint="leave it out, with even_batches=True, by which all ranks have equally many batches; or drop_last=True",
        )
    return own(joinables, even_batches)
