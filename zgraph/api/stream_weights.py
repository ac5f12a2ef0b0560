"""A stream of a compiled model's weights, one whole tensor after another, for inference engines."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import nn

from zgraph.api.gathered_weights import bytes_of, ranks_of, ready
from zgraph.checkpoint import pretrained
from zgraph.checkpoint.write_pretrained import dtype_of
from zgraph.parameters.reused_memory import ReusedMemory
from zgraph.parameters.whole_tensors import BUCKET, Wanted, gathered


def stream_weights(
    model: nn.Module,
    *,
    ranks: Collection[int] | None = None,
    max_bytes: int | str = BUCKET,
    dtype: str | torch.dtype | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) of every weight of a compiled model, on its device, for example for an inference engine.

    Names and tensors are those that `save_pretrained` writes (as in a transformers checkpoint, tied ones once), in the same
    order on all ranks. `dtype` (such as "bf16") is that of floating-point weights. Weights are gathered in buckets: at most
    `max_bytes`, or one and a half of the largest tensor, are held at a time, unless you keep them. `ranks`: the global numbers of the ranks
    that need them, by default all; the others only send, and yield nothing. All ranks must consume the whole stream.
    """
    runtime = ready(model, "a stream of weights")
    wanted, most = dtype_of(dtype), bytes_of(max_bytes)
    pretrained.refuse_special(model)
    views: dict[str, list[pretrained.View]] = {}
    for view in pretrained.views(model):
        views.setdefault(view.source, []).append(view)
    weights = pretrained.tensors(model)
    chosen = ranks_of(runtime, ranks)
    runtime.everyone.vote("a stream of weights", f"{most} {wanted} {len(views)} tensors, {chosen}")

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        cast = lambda t: wanted if wanted is not None and t.is_floating_point() else t.dtype  # noqa: E731
        tensors = [Wanted(weights[name], cast(weights[name])) for name in views]
        # (so that the memory of an embedding is there for the head)
        largest = max((tensor.nbytes for tensor in tensors), default=0)
        memory = ReusedMemory(runtime.device, max(most, largest * 3 // 2), runtime.resting)
        wholes = gathered(tensors, runtime.device, most, memory, chosen)
        for named in views.values():
            whole = next(wholes)
            if whole is None:
                continue
            for view in named:
                if view.sizes == tuple(whole.shape) and not view.offset:
                    yield view.name, whole
                else:
                    flat = whole.contiguous().view(-1)
                    yield view.name, flat.as_strided(view.sizes, view.strides, view.offset + flat.storage_offset())
                    del flat
            del whole  # (its memory is used again)
        memory.rest()

    return stream()
