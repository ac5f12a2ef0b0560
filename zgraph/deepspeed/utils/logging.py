"""Messages for people: a logger, and messages of some ranks alone. `DEEPSPEED_LOG_LEVEL` (debug, info, warning, error) sets the level."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection

from zgraph.deepspeed import comm
from zgraph.deepspeed.keys import LOG_LEVELS

logger = logging.getLogger("zgraph.deepspeed")

LEVELS = {name: getattr(logging, name.upper()) for name in LOG_LEVELS}
if (_asked := os.environ.get("DEEPSPEED_LOG_LEVEL", "").lower()) in LEVELS:
    logger.setLevel(LEVELS[_asked])


def log_dist(message: str, ranks: Collection[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on these ranks; on all where none are named, or -1 is."""
    rank = comm.get_rank()
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[rank %d] %s", rank, message)


def set_log_level_from_string(level: str) -> None:
    """Log from this level on ("info"). Raises `ValueError` for another word."""
    if level.lower() not in LEVELS:
        raise ValueError(f"{level!r} is no level: {', '.join(LEVELS)}")
    logger.setLevel(LEVELS[level.lower()])
