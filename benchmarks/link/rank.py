"""One rank of one variant: builds it once, then measures when the driver says so, and sleeps in between.

A message is a line of JSON, in on stdin and out on what was stdout at the start. The first that goes out says
what was built, each later one answers a request.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

LOSSES = 3  # steps whose losses are compared


def main(
    name: str,
    model: str,
    rank: int,
    world: int,
    store: str,
    core: int,
    size: dict[str, int],
    latency_us: float,
    products: str,
) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    os.sched_setaffinity(0, {core})  # before torch starts threads

    def answer(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")

    import torch

    from zgraph.runtime import allocations

    allocations.count()
    torch.set_num_threads(1)
    import torch.distributed as dist

    from link import gpt, models, variants, zlink
    from zgraph.codegen import cpu_gemm

    if products == "torch":
        cpu_gemm.onednn = lambda: None
    dist.init_process_group(
        "zlink", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(minutes=20)
    )
    sizes = gpt.Size(**size)
    start = time.perf_counter()
    try:
        contender = variants.build(name, model, sizes, rank)
    except variants.NotInstalled as error:
        answer(not_installed=str(error))
        return
    losses = [float(contender.step()) for _ in range(LOSSES)]
    built = time.perf_counter() - start
    reference = variants.reference_losses(model, sizes, rank, world, LOSSES) if name.startswith("local") else None
    parameters = sum(p.numel() for p in models.make(model, sizes).parameters())
    give_back()
    answer(losses=losses, reference=reference, seconds=built, parameters=parameters, groups=len(zlink.backends))
    for line in sys.stdin:
        request = json.loads(line)
        zlink.set_link(request["rate"], latency_us)
        dist.barrier()
        contender.at_rate(request["rate"])
        found = measure(contender.step, request["steps"], request["warmup"])
        if request["memory"]:
            found |= memory_of(contender.step)
        if rank == 0 and contender.model is not None:
            from link.forecast import forecast

            found["forecast"] = forecast(contender.model)
        answer(**found)
        give_back()


def give_back() -> None:
    """Freed memory goes back to the system while others are measured: all variants' processes live at the same time."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def measure(step: Callable[[], Any], steps: int, warmup: int) -> dict[str, Any]:
    """Seconds of each step, from a barrier to its end on this rank; what the link had to do in a step, and the processor."""
    import torch.distributed as dist

    from link import zlink

    for _ in range(warmup):
        step()
    seconds, traffic = [], [0.0] * 4
    processor = time.process_time()
    for _ in range(steps):
        dist.barrier()
        zlink.stats(reset=True)  # (the barrier is none of the step's)
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
        traffic = [a + b for a, b in zip(traffic, zlink.stats(reset=True), strict=True)]
    ops, wire, link, copy = (t / steps for t in traffic)
    return {
        "seconds": seconds,
        "ops": ops,
        "wire_bytes": wire,
        "link": link,
        "copy": copy,
        "processor": time.process_time() - processor,
    }


def memory_of(step: Callable[[], Any]) -> dict[str, int]:
    """Bytes of torch's CPU allocator: held between steps, and at most during the two steps after that."""
    import torch.distributed as dist

    from zgraph.runtime import allocations

    gc.collect()
    dist.barrier()
    held = allocations.live()
    allocations.reset_peak()
    step()
    step()
    return {"held": held, "peak": allocations.peak()}


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
