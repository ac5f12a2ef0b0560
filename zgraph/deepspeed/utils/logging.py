"""The logger of DeepSpeed's messages, and messages of some ranks only. `DEEPSPEED_LOG_LEVEL` (debug, info, warning,
error) sets its level."""

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


def no_effect(what: str, why: str) -> None:
    """Say of an argument that a script gave that nothing comes of it here."""
    logger.warning("%s has no effect here: %s", what, why)


def log_dist(message: str, ranks: Collection[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on these ranks; on all if none are named, or if -1 is among them."""
    rank = comm.get_rank()
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[rank %d] %s", rank, message)


def set_log_level_from_string(level: str) -> None:
    """Set the level of the logger ("info"). Raises `ValueError` for an unknown level."""
    if level.lower() not in LEVELS:
        raise ValueError(f"{level!r} is no level: {', '.join(LEVELS)}")
    logger.setLevel(LEVELS[level.lower()])
