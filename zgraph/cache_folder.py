"""The folder in which zgraph keeps what it has made or measured once, for later processes."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "ZGRAPH_CACHE"


def cache_folder() -> Path:
    """`ZGRAPH_CACHE`, else "zgraph" where the user's programs keep such things. It need not be there yet."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zgraph"
