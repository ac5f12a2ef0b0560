"""Finds the target that a model's loss leaves out, from the calls of torch's classification losses in the capture and
in `loss_fn`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

from torch import fx
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from zgraph.errors import StepError

TARGETS = ("labels", "label", "targets", "target")  # names of arguments that hold targets
IGNORED = -100  # the target that torch's losses leave out, unless they are told another
LOSSES = {f: inspect.signature(f) for f in (functional.cross_entropy, functional.nll_loss)}

Ignores = tuple[int, bool]  # (the target that a loss leaves out, whether it is a mean weighted by classes)


def _ignores(function: Any, args: Any, kwargs: Any) -> Ignores | None:
    """Return what a call of one of torch's losses leaves out; None for any other call."""
    if function not in LOSSES:
        return None
    given = LOSSES[function].bind(*args, **kwargs)
    given.apply_defaults()
    named = given.arguments
    return int(named["ignore_index"]), named["weight"] is not None and named["reduction"] == "mean"


def ignored_in(module: fx.GraphModule) -> set[Ignores]:
    """Return what the losses that a captured forward calls leave out."""
    graphs = [m.graph for m in module.modules() if isinstance(m, fx.GraphModule)]
    calls = [n for g in graphs for n in g.nodes if n.op == "call_function" and _is_loss(n.target)]
    return {ignores for n in calls if (ignores := _ignores(n.target, n.args, n.kwargs)) is not None}


def _is_loss(target: Any) -> bool:
    return inspect.isfunction(target) and target in LOSSES


class LossesSeen(TorchFunctionMode):
    """Records what the losses called inside leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[Ignores] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        ignores = _ignores(func, args, kwargs or {}) if _is_loss(func) else None
        if ignores is not None:
            self.found.add(ignores)
        return func(*args, **(kwargs or {}))


def ignored_of(ignores: Collection[Ignores]) -> int:
    """Return the one target that does not count; -100 where no loss of torch's was seen. Raises `StepError` where
    losses differ, or weigh classes."""
    ids = sorted({number for number, _ in ignores})
    if len(ids) > 1:
        raise StepError(
            f"the model's losses ignore different targets: {', '.join(map(str, ids))}",
            where="loss_average",
            why="by token each micro-batch counts by its targets, and they leave out different ones",
            hint='give all losses one ignore_index; or loss_average="batch"',
        )
    if any(weighted for _, weighted in ignores):
        raise StepError(
            "a loss that weighs classes can't be averaged by token",
            where="loss_average",
            why="its mean is over the weights of its targets, and not over their number",
            hint='loss_average="batch", or weigh the terms of a loss with reduction="none"',
        )
    return ids[0] if ids else IGNORED
