"""A world of ranks over which nothing is sent: this process is its first rank."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def fake_world(size: int, groups: int = 0) -> Iterator[None]:
    """Make a world of `size` ranks, in which so many groups were made before."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        for _ in range(groups):
            dist.new_group([0, 1])
        yield
    finally:
        dist.destroy_process_group()
