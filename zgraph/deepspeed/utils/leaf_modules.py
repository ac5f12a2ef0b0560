"""DeepSpeed's leaf modules, which it gathers as one. Here gathers follow from the program's graph, so the calls are
noted and have no effect."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from zgraph.deepspeed.utils.logging import logger


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Note the modules of these classes and their subclasses; return them.

    A text is a class's name, with or without its module's. Raises `ValueError` if there are none.
    """
    modules = _of_classes(model, leaf_module_classes, raise_if_not_found)
    _note(modules, True)
    return modules


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Forget the modules of these classes; return them. Raises `ValueError` if there are none."""
    modules = _of_classes(model, leaf_module_classes, raise_if_not_found)
    _note(modules, False)
    return modules


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Note (or forget) the modules of these names; return them, and the names without a module. Raises `ValueError`
    for such a name."""
    return _by(model, module_names, str.__eq__, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Note (or forget) the modules whose names have these suffixes; return them, and the suffixes without a module.

    Raises `ValueError` for such a suffix.
    """
    return _by(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def _of_classes(model: nn.Module, classes: Iterable[type | str], must: bool) -> list[nn.Module]:
    kinds = list(classes)
    names = {kind for kind in kinds if isinstance(kind, str)}
    types = tuple(kind for kind in kinds if isinstance(kind, type))
    modules = [m for m in model.modules() if isinstance(m, types) or names & _names_of(type(m))]
    if must and not modules:
        raise ValueError(f"the model has no module of {', '.join(str(k) for k in kinds)}")
    return modules


def _names_of(kind: type) -> set[str]:
    return {kind.__name__, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}"}


def _by(
    model: nn.Module, wanted: Iterable[str], fits: Callable[[str, str], bool], flag: bool, must: bool
) -> tuple[list[nn.Module], list[str]]:
    modules, matches, missing = dict(model.named_modules()), list[nn.Module](), list[str]()
    for text in wanted:
        mine = [module for name, module in modules.items() if fits(name, text)]
        matches += [module for module in mine if not any(module is other for other in matches)]
        missing += [] if mine else [text]
    if must and missing:
        raise ValueError(f"the model has no module {', '.join(missing)}")
    _note(matches, flag)
    return matches, missing


def _note(modules: Iterable[nn.Module], flag: bool) -> None:
    for module in modules:
        set_z3_leaf_module(module, flag)
    logger.info("leaf modules have no effect here: the program is one graph")


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that were noted."""
    return [m for m in model.modules() if z3_leaf_module(m)]


def z3_leaf_module(module: nn.Module) -> bool:
    return bool(module.__dict__.get("_z3_leaf", False))


def set_z3_leaf_module(module: nn.Module, flag: bool) -> None:
    module.__dict__["_z3_leaf"] = flag
