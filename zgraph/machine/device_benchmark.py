"""The benchmark of a device's rates, without a model: matrix products, sums of tensors that are larger than caches, and empty kernels.

All ranks of a machine measure at the same time, since they also train at the same time and share memory bandwidth and power. Other load makes a
measurement longer, never shorter, so the shortest of several counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Annotated

import torch
from pydantic import Field

from zgraph.codegen import cpu_gemm
from zgraph.codegen.instrumented import Stopwatch
from zgraph.passes.analysis.costs import Hardware
from zgraph.record import Record

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIDES = {"cpu": (256, 512, 1024), "cuda": (1024, 2048, 4096, 8192)}  # side lengths of the matrices in products
LONG = {"cpu": 4e-3, "cuda": 1e-3}  # seconds of a product beside which the host's launch time is negligible
BYTES = {"cpu": 2**25, "cuda": 2**26}  # bytes of each operand of a sum: no cache holds three of them
SECONDS = 0.06  # for each measurement
CALLS = 200  # launches of the empty kernel in one run


class Rates(Record, frozen=True):
    """The measured rates of a device, with the fields of `Hardware`, limited to what any device can have."""

    flops: dict[str, Annotated[float, Field(gt=1e6, lt=1e18)]]  # FLOP/s of matrix products, by dtype
    memory: Annotated[float, Field(gt=1e6, lt=1e16)]  # bytes/s of the device's memory
    launch: Annotated[float, Field(ge=0, lt=0.1)]  # seconds of a kernel launch
    host: Annotated[float, Field(gt=1e5, lt=1e15)]  # bytes/s of copies between device and host

    def of(self, base: Hardware, name: str) -> Hardware:
        """Return `base` with these rates."""
        changes: dict[str, object] = {"name": name, "flops": {**base.flops, **self.flops}, "memory": self.memory}
        changes |= {"launch": self.launch, "host": self.host}
        if base.device == "cpu":
            changes["host_memory"] = self.memory
        return base.model_copy(update=changes)


def slowest(ranks: list[Rates]) -> Rates:
    """Return the lowest of each rate over ranks: all others wait for that rank."""
    dtypes = set.intersection(*(set(r.flops) for r in ranks))
    flops = {d: min(r.flops[d] for r in ranks) for d in sorted(dtypes)}
    return Rates(
        flops=flops,
        memory=min(r.memory for r in ranks),
        launch=max(r.launch for r in ranks),
        host=min(r.host for r in ranks),
    )


@torch.no_grad()
def measure_device(device: torch.device, fused: bool) -> Rates:
    """Measure the rates of this rank's device; `fused` as in `Costs`, since compiled programs may use another library
    for products.

    Raises what torch raises if there is not enough memory.
    """
    watch = Stopwatch(device)
    products = {str(d).removeprefix("torch."): _products(d, device, fused, watch) for d in DTYPES}
    count = BYTES[device.type] // 4
    a, b, c = (torch.ones(count, device=device) for _ in range(3))
    moved = 3 * count * 4 / _shortest(lambda: torch.add(a, b, out=c), watch)
    host = torch.empty(count, pin_memory=device.type == "cuda") if device.type == "cuda" else b
    copied = count * 4 / max(_shortest(lambda: a.copy_(host), watch), _shortest(lambda: host.copy_(a), watch))
    return Rates(
        flops={d: rate for d, rate in products.items() if rate},
        memory=moved,
        launch=_launch(device, watch),
        host=copied,
    )


def _products(dtype: torch.dtype, device: torch.device, fused: bool, watch: Stopwatch) -> float:
    """Measure FLOP/s of square products; 0.0 if torch has no product of this dtype on the device."""
    product = cpu_gemm.onednn() if fused and device.type == "cpu" and dtype is torch.float32 else None
    rate = 0.0
    for side in SIDES[device.type]:
        a, b, c = (torch.ones(side, side, device=device, dtype=dtype) for _ in range(3))

        def multiply(a: torch.Tensor = a, b: torch.Tensor = b, c: torch.Tensor = c) -> None:
            if product is None:
                torch.mm(a, b, out=c)
            else:
                product(a, b, c, 0.0)

        try:
            seconds = _shortest(multiply, watch)
        except (RuntimeError, NotImplementedError) as error:
            logger.debug("no products of %s: %s", dtype, error)
            return rate
        rate = 2 * side**3 / seconds
        if seconds >= LONG[device.type]:
            break
    return rate


def _launch(device: torch.device, watch: Stopwatch) -> float:
    """Measure the seconds of an almost empty kernel."""
    small = torch.zeros(16, device=device)

    def many() -> None:
        for _ in range(CALLS):
            torch.add(small, small, out=small)

    return _shortest(many, watch) / CALLS


def _shortest(run: Callable[[], object], watch: Stopwatch) -> float:
    """Measure the seconds of a function: the shortest of several runs, after a warm-up."""
    run()
    best, spent, runs = float("inf"), 0.0, 0
    while runs < 3 or (spent < SECONDS and runs < 50):
        begin = watch.now()
        run()
        seconds = watch.between(begin, watch.now())
        best, spent, runs = min(best, seconds), spent + seconds, runs + 1
    return max(best, 1e-9)
