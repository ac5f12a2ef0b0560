"""DeepSpeed's functions for process groups, which are all refused: groups are those of a plan's mesh."""

from __future__ import annotations

from typing import Any

from zgraph.errors import UnsupportedError


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise UnsupportedError(
        f"deepspeed.utils.groups.{name}",
        why="ranks are divided as the plan's mesh says, and there are no groups besides",
        hint="engine.dp_world_size, engine.data_rank() and engine.mp_world_size; torch.distributed.group.WORLD for all ranks",
    )
