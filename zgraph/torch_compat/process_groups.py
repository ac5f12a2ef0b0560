"""Process groups of torch.distributed: their names, ranks, timeouts and stores."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch

STAND_IN = "gloo"  # the backend of the ranks that `standing_in` stands in for
_stands_in = False


def backend_of(group: str, device: torch.device) -> tuple[str, int]:
    """Return (the backend's name such as "gloo", this process's rank) of the process group of this name; ("", 0) if
    there is none."""
    try:
        process_group = _group(group)
        name = process_group._get_backend(device).name()
        return STAND_IN if _stands_in and name == "fake" else name, process_group.rank()
    except (RuntimeError, KeyError, LookupError):
        return "", 0


@contextlib.contextmanager
def standing_in(rank: int, world: int) -> Iterator[None]:
    """Let this process be one of `world` ranks over gloo inside the block, with no other process: for compiling what
    that rank would, never for running it.

    Groups have the names that they have on that rank, and `backend_of` calls them gloo; collectives exchange nothing.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    global _stands_in
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    _stands_in = True
    try:
        yield
    finally:
        _stands_in = False
        torch.distributed.destroy_process_group()


def stands_in() -> bool:
    """Return whether this process stands in for a rank: see `standing_in`."""
    return _stands_in


def all_gather(into: torch.Tensor, mine: torch.Tensor, group: Any) -> None:
    """Gather equal parts of all ranks into a tensor, of which this rank's may be a view."""
    gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
    gather(into, mine, group=group)  # (2.13 has renamed it)


def world_timeout() -> timedelta | None:
    """Return the timeout of the default process group's collectives; None where its backend does not say."""
    from torch.distributed import distributed_c10d

    return timeout_of(distributed_c10d.group.WORLD)


def timeout_of(group: Any) -> timedelta | None:
    """Return the timeout of a process group's collectives; None where its backend does not say."""
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout  # type: ignore[no-any-return]
        except (RuntimeError, AttributeError):
            continue
    return None


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Set a process group's timeout for each collective from now on."""
    from torch.distributed import distributed_c10d

    vars(distributed_c10d)["_set_pg_timeout"](timeout, group)


def shut(group: Any) -> None:
    """End a process group on this rank: what it waits for fails, and over gloo other ranks' waits for this rank fail at
    once.

    gloo's own abort() does nothing. But a receive that times out closes all connections of its group, so one is started
    here: from each rank in turn, because a receive from a rank that is gone fails earlier.
    """
    try:
        gloo = group._get_backend(torch.device("cpu")).name() == "gloo"
    except RuntimeError:
        gloo = False
    never = 2**31 - 1  # (a tag that no message has)
    for rank in range(group.size()) if gloo else ():
        with contextlib.suppress(RuntimeError):
            if rank != group.rank():
                group.recv([torch.empty(1)], rank, never).wait(timedelta(milliseconds=1))
    with contextlib.suppress(RuntimeError):
        backend = group._get_backend(torch.device("cuda"))
        if backend.name() == "nccl":
            backend.abort()


def my_rank() -> int:
    """Return this process's rank in the world."""
    return int(torch.distributed.get_rank())


def is_fake(group: Any) -> bool:
    """Return whether this process group is torch's fake one, with no other ranks behind it."""
    return torch.distributed.get_backend(group) == "fake"


def default_store() -> Any:
    """Return the default process group's store."""
    from torch.distributed import distributed_c10d

    return vars(distributed_c10d)["_get_default_store"]()


def own_store(store: Any, prefix: str) -> Any:
    """Return the same store under a prefix, over a connection of its own, whose requests time out after 5 seconds."""
    connection = torch._C._distributed_c10d.PrefixStore(prefix, store.clone())
    connection.set_timeout(timedelta(seconds=5))
    return connection


def ranks_of(group: str) -> tuple[int, ...]:
    """Return the world ranks of the process group of this name."""
    from torch.distributed import get_process_group_ranks

    return tuple(get_process_group_ranks(_group(group)))


def _group(name: str) -> Any:
    """Return the process group of this name."""
    from torch.distributed import distributed_c10d

    return vars(distributed_c10d)["_resolve_process_group"](name)
