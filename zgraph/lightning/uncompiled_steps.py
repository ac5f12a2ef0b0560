"""Checks that a step's loss goes through the compiled modules, and errors that explain a step that does not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zgraph.errors import ModelError, ZgraphError
from zgraph.runtime.autograd_function import Step
from zgraph.torch_compat.plain_operands import MIXED
from zgraph.torch_compat.submodules import CALLED


def refuse_plain_loss(loss: torch.Tensor, parts: Iterable[str]) -> None:
    """Raise `ModelError` for a loss that comes from no compiled forward."""
    if not loss.requires_grad:
        return  # (its backward raises)
    compiled: Any = Step._backward_cls  # type: ignore[attr-defined]
    seen: set[Any] = set()
    todo = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if isinstance(node, compiled):
            return
        if node is not None and node not in seen:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
    raise ModelError(
        "the loss comes from none of the modules that are compiled",
        where=", ".join(path or "self" for path in parts),
        why="the step would train without the plan",
        hint="let training_step call these modules as they are, self.model(…); or name those that it calls: ZGraphStrategy(plan, modules=…)",
    )


def refuse_divided(output: Any) -> None:
    """Raise `ModelError` for a loss computed from sharded weights outside of the compiled modules: its number would
    be a rank's part."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, DTensor):
        raise ModelError(
            "the loss is a DTensor: something in it is computed of weights outside of the modules that are compiled",
            why="weights are divided over the ranks there, and so is what is computed of them",
            hint="weight_decay of the optimizer for a penalty on weights; or compute it in a module's forward; or penalty.full_tensor()",
        )


@contextlib.contextmanager
def explained(step: str) -> Iterator[None]:
    """Turn the errors of a step that reads a sharded weight outside of its module into a `ModelError` with advice."""
    try:
        yield
    except (RuntimeError, ModelError) as error:
        if isinstance(error, ModelError) and CALLED not in str(error) and MIXED not in str(error):
            raise
        if "data is not allocated yet" in str(error) and "DTensor" not in str(error):
            raise ModelError(
                f"{step} makes a plain tensor of values that are divided over the ranks",
                why=f"weights and gradients are DTensors ({str(error).splitlines()[0]})",
                hint="self.model.zgraph.grad_norms() for norms of gradients; value.full_tensor() for another value",
            ) from error
        if MIXED not in str(error) and CALLED not in str(error):
            raise
        raise ModelError(
            f"{step} reads a weight of a compiled module, and does not call the module",
            why=f"the weight is divided over the ranks, and whole only inside of the module's compiled forward ({str(error).splitlines()[0]})",
            hint="call the module itself; or name the modules that are called: ZGraphStrategy(plan, modules=[…])",
        ) from error


@contextlib.contextmanager
def explained_update(optimizer: Any) -> Iterator[None]:
    """Turn the error of an optimizer that uses an operator which torch does not have for shards into a `ModelError`."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, ZgraphError) or ("harding" not in str(error) and "DTensor" not in str(error)):
            raise
        raise ModelError(
            f"{type(optimizer).__name__} can't update weights that are divided over the ranks",
            where="configure_optimizers",
            why=str(error).splitlines()[0],
            hint="zero=0 in the plan, with which each rank has whole weights; or an optimizer that updates each element by its own gradient",
        ) from error
