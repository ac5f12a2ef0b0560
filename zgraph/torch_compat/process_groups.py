"""Process groups of torch.distributed: their names, ranks, timeouts and stores."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch


def backend_of(group: str, device: torch.device) -> tuple[str, int]:
    """("gloo", this process's rank) of the process group of that name; ("", 0) if there is none."""
    try:
        found = _group(group)
        return found._get_backend(device).name(), found.rank()
    except (RuntimeError, KeyError, LookupError):
        return "", 0


def world_timeout() -> timedelta | None:
    """How long the default process group waits for a collective; None where its backend does not say."""
    from torch.distributed import distributed_c10d

    return timeout_of(distributed_c10d.group.WORLD)


def timeout_of(group: Any) -> timedelta | None:
    """How long a process group waits for a collective; None where its backend does not say."""
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout  # type: ignore[no-any-return]
        except (RuntimeError, AttributeError):
            continue
    return None


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Let a process group wait so long for each collective from now on."""
    from torch.distributed import distributed_c10d

    vars(distributed_c10d)["_set_pg_timeout"](timeout, group)


def shut(group: Any) -> None:
    """Let a process group end on this rank: what it waits for there fails, and over gloo, at once, what other ranks wait for it for.

    gloo's own abort() does nothing. But a receive that runs into its timeout closes all connections of its group, so one is made to: from each
    rank in turn, as one that is gone lets it fail before.
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
    """This process's number in the world."""
    return int(torch.distributed.get_rank())


def is_fake(group: Any) -> bool:
    """Whether this process group is torch's fake one, with nobody behind it."""
    return torch.distributed.get_backend(group) == "fake"


def default_store() -> Any:
    """The default process group's store."""
    from torch.distributed import distributed_c10d

    return vars(distributed_c10d)["_get_default_store"]()


def own_store(store: Any, prefix: str) -> Any:
    """The same store under a prefix, over a connection of its own. What it takes longer than some seconds for, fails."""
    made = torch._C._distributed_c10d.PrefixStore(prefix, store.clone())
    made.set_timeout(timedelta(seconds=5))
    return made


def ranks_of(group: str) -> tuple[int, ...]:
    """The ranks of the process group of that name, in the world's numbers."""
    from torch.distributed import get_process_group_ranks

    return tuple(get_process_group_ranks(_group(group)))


def _group(name: str) -> Any:
    """The process group of that name."""
    from torch.distributed import distributed_c10d

    return vars(distributed_c10d)["_resolve_process_group"](name)
