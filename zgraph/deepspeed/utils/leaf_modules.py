"""Modules that DeepSpeed gathers as one. A program's gathers follow from its graph, so there is nothing to say: the calls are noted, and change
nothing."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from zgraph.deepspeed.utils.logging import logger


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[type | str]) -> list[nn.Module]:
    """Note the modules of these classes; returns them."""
    kinds = list(leaf_module_classes)
    found = [m for m in model.modules() if type(m) in kinds or type(m).__name__ in kinds]
    for module in found:
        set_z3_leaf_module(module, True)
    logger.info("%d leaf modules: no effect here, the program is one graph", len(found))
    return found


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[type | str]) -> list[nn.Module]:
    """Forget the modules of these classes; returns them."""
    kinds = list(leaf_module_classes)
    found = [m for m in model.modules() if type(m) in kinds or type(m).__name__ in kinds]
    for module in found:
        set_z3_leaf_module(module, False)
    return found


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that were noted."""
    return [m for m in model.modules() if z3_leaf_module(m)]


def z3_leaf_module(module: nn.Module) -> bool:
    return bool(module.__dict__.get("_z3_leaf", False))


def set_z3_leaf_module(module: nn.Module, flag: bool) -> None:
    module.__dict__["_z3_leaf"] = flag
