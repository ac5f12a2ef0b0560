"""Operators that count: 0, 1, 2, … or with another start and step."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
_WITH_START = (_aten.arange.start, _aten.arange.start_step)

COUNTS = (_aten.arange.default, *_WITH_START, torch.ops.prims.iota.default)


def start_and_step(node: fx.Node) -> tuple[Any, Any]:
    """Return (the first number, the distance between two numbers) of a node whose target is among `COUNTS`: numbers, or
    nodes where sizes of a call decide."""
    if node.target in _WITH_START:
        return node.args[0], node.args[2] if len(node.args) > 2 else 1
    return node.kwargs.get("start", 0), node.kwargs.get("step", 1)
