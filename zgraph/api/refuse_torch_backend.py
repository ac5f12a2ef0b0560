"""`torch.compile(model, backend="zgraph")`: refused, with what to call (an entry point of `torch_dynamo_backends`, see pyproject.toml)."""

from __future__ import annotations

from typing import Any

from zgraph.errors import UnsupportedError


def refuse(graph_module: Any, example_inputs: Any, **options: Any) -> Any:
    """Raise `UnsupportedError`: a backend gets parts of a forward, without the module they belong to."""
    raise UnsupportedError(
        "zgraph is no backend of torch.compile",
        why="a backend is given parts of a forward, and not the parameters that are to be divided, the loss, or the plan",
        hint='model = zgraph.compile(model, zgraph.Plan(…)); in one process without a plan torch.compile(model) itself, by "inductor", does the same',
    )
