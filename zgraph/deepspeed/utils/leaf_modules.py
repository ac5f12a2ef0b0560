"""Modules that DeepSpeed gathers as one. A program's gathers follow from its graph, so there is nothing to say: the calls are noted, and change
nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from zgraph.deepspeed.utils.logging import logger


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Note the modules of these classes, or of ones made from them; returns them. A text is a class's name, alone or with its module's. Raises
    `ValueError` where there are none."""
    found = _of_classes(model, leaf_module_classes, raise_if_not_found)
    _note(found, True)
    return found


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Forget the modules of these classes; returns them. Raises `ValueError` where there are none."""
    found = _of_classes(model, leaf_module_classes, raise_if_not_found)
    _note(found, False)
    return found


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Note (or forget) the modules of these names; returns them, and names of none. Raises `ValueError` for such a name."""
    return _by(model, module_names, str.__eq__, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Note (or forget) the modules whose names end so; returns them, and endings of none. Raises `ValueError` for such an ending."""
    return _by(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def _of_classes(model: nn.Module, classes: Iterable[type | str], must: bool) -> list[nn.Module]:
    kinds = list(classes)
    names = {kind for kind in kinds if isinstance(kind, str)}
    types = tuple(kind for kind in kinds if isinstance(kind, type))
    found = [m for m in model.modules() if isinstance(m, types) or names & _names_of(type(m))]
    if must and not found:
        raise ValueError(f"the model has no module of {', '.join(str(k) for k in kinds)}")
    return found


def _names_of(kind: type) -> set[str]:
    return {kind.__name__, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}"}


def _by(
    model: nn.Module, wanted: Iterable[str], fits: Callable[[str, str], bool], flag: bool, must: bool
) -> tuple[list[nn.Module], list[str]]:
    held, found, missing = dict(model.named_modules()), list[nn.Module](), list[str]()
    for text in wanted:
        mine = [module for name, module in held.items() if fits(name, text)]
        found += [module for module in mine if not any(module is other for other in found)]
        missing += [] if mine else [text]
    if must and missing:
        raise ValueError(f"the model has no module {', '.join(missing)}")
    _note(found, flag)
    return found, missing


def _note(modules: Iterable[nn.Module], flag: bool) -> None:
    for module in modules:
        set_z3_leaf_module(module, flag)
    logger.info("leaf modules have no effect here: the program is one graph")


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that were noted."""
    return [m for m in model.modules() if z3_leaf_module(m)]


def z3_leaf_module(module: nn.Module) -> bool:
    return bool(module.__dict__.get("_z3_leaf", False))


def set_z3_leaf_module(module: nn.Module, flag: bool) -> None:
    module.__dict__["_z3_leaf"] = flag
