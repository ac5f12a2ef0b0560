"""The files that `accelerate config` writes, as plans."""

from __future__ import annotations

from zgraph.hf.accelerate_config.translate import report

__all__ = ["report"]
