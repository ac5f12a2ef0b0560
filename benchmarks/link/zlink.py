"""The c10d backend "zlink": exact collectives over a link of any rate, between processes of one machine.

`import link.zlink`, then `dist.init_process_group("zlink")`. `ZLINK_GBPS` is the rate in Gbit/s in each direction (0:
unlimited, without latency), `ZLINK_ALPHA_US` the latency of a ring step in microseconds; `set_link` changes both for
all groups of this process. zlink.cpp says what is modelled.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zgraph.runtime.native import load

_module = load(Path(__file__).parent / "zlink.cpp")
_link = [float(os.environ.get("ZLINK_GBPS", "0")), float(os.environ.get("ZLINK_ALPHA_US", "0"))]

backends: list[Any] = []  # of this process, one for each group


def set_link(gbps: float, latency_us: float) -> None:
    """From the next collective on, of groups that there are and will be. Ranks have to do the same between barriers."""
    _link[:] = [gbps, latency_us]
    for backend in backends:
        backend.set_link(gbps, latency_us)


def stats(reset: bool = False) -> list[float]:
    """Since the last reset, over all groups: collectives, wire bytes, seconds of the link, seconds of copying."""
    return [sum(column) for column in zip(*(backend.stats(reset) for backend in backends), strict=True)]


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    backend = _module.create(store, rank, size, timeout, *_link)
    backends.append(backend)
    return backend


dist.Backend.register_backend("zlink", _create, devices=["cpu"])
