"""What commands look at: the target's model and inputs, the plan, the number of ranks.

package.module:factory    a callable that returns (model, inputs); the current directory is on the path
train_lm                  an example of a source checkout, found from the current directory upwards or next
                          to the package; its `factory` is called
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import math
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zgraph.errors import TargetError

if TYPE_CHECKING:
    from torch import nn

    from zgraph.compiler import Inputs
    from zgraph.passes import History, Pass
    from zgraph.plan import Plan

FACTORY = "factory"

TargetArgument = Annotated[
    str,
    typer.Argument(metavar="TARGET", help="package.module:factory, or an example's name.", show_default=False),
]
PlanOption = Annotated[
    Path | None,
    typer.Option("--plan", metavar="FILE", help="A plan as TOML, YAML or JSON. [default: Plan()]"),
]
WorldOption = Annotated[
    int | None,
    typer.Option("--world", metavar="N", min=1, help="The number of ranks. [default: the mesh's, 2 for its -1]"),
]
UpdateOption = Annotated[
    bool, typer.Option("--update", help="Show the program of the plan's optimizer instead of forward and backward.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for other tools.")]


@dataclass(frozen=True)
class Target:
    """A model that is not compiled, and the inputs (args or kwargs) of one rank's batch."""

    model: nn.Module
    inputs: Inputs


def load_target(text: str) -> Target:
    """Import a target and call its factory. Raises `TargetError` with the nearest right name."""
    if ":" in text:
        module_name, _, path = text.partition(":")
        module = _module(module_name, text)
    else:
        module, path = _example(text), FACTORY
    return _call(_attribute(module, path, text), text)


def load_plan(path: Path | None) -> Plan:
    """The plan in a file, the default one without. Raises `PlanError`."""
    from zgraph.plan import Plan

    return Plan() if path is None else Plan.load(path)


def resolve_world(plan: Plan, world: int | None) -> int:
    """The number of ranks asked for, else that of the plan's mesh with 2 for its -1. Raises `MeshError`."""
    if world is None:
        world = math.prod(2 if size == -1 else size for size in plan.mesh.values())
    plan.resolve_mesh(world)
    return world


def planned_passes(plan: Plan, update: bool, *, training: bool = True) -> list[Pass]:
    """The passes that a plan runs over a step, or over its update."""
    from zgraph.pipeline import build, build_update_passes

    return build_update_passes(plan) if update else build(plan, training=training)


def history_of(target: Target, plan: Plan, world: int, update: bool) -> History:
    """What the plan's passes make of a target: of its step, or of its update."""
    from zgraph.compiler import programs, update_program

    made = update_program if update else programs
    return made(target.model, plan, inputs=target.inputs, world=world)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint: the known name nearest to a wrong one, or all of them where none is near."""
    names = list(dict.fromkeys(known))
    folded = {n.casefold(): n for n in names}
    near = difflib.get_close_matches(name.casefold(), folded, n=1)
    return f"did you mean {folded[near[0]]!r}?" if near else f"there are: {', '.join(names) or 'none'}"


def use_color(stream: Any) -> bool:
    """Colour is for a terminal, and not where NO_COLOR (https://no-color.org) is set to anything but ""."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and bool(stream.isatty())


def write(text: str, output: Path | None) -> None:
    """Print text, or put it in a file (a line on stderr says so)."""
    text = text.rstrip("\n")
    if output is None:
        typer.echo(text)
        return
    try:
        output.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise TargetError("the output can't be written", where=str(output), why=error.strerror) from error
    typer.echo(f"wrote {output}", err=True)


# -- finding a factory -------------------------------------------------------------------------
def _module(name: str, target: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if not name:
        raise TargetError(f"target {target!r} names no module", hint="write package.module:factory")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not (name == missing or name.startswith(missing + ".")):
            raise _import_failed(name, error) from error  # the module is there; something it imports is not
        raise TargetError(
            f"there is no module {missing!r}",
            where=f"target {target!r}",
            why="it is neither installed nor in the current directory",
            hint=did_you_mean(missing, _siblings(missing)),
        ) from error
    except Exception as error:
        raise _import_failed(name, error) from error


def _siblings(name: str) -> list[str]:
    """The modules next to where `name` would be: in its package, or in the current directory."""
    package, _, _ = name.rpartition(".")
    if not package:
        return [m.name for m in pkgutil.iter_modules([os.getcwd()])]
    path = getattr(sys.modules.get(package), "__path__", None)
    return [f"{package}.{m.name}" for m in pkgutil.iter_modules(path)] if path else []


def _example(name: str) -> ModuleType:
    found = _examples()
    if name not in found:
        hint = did_you_mean(name, found) if found else "write package.module:factory"
        where = ", ".join(str(d) for d in _example_folders()) or "no folder of examples was found"
        raise TargetError(
            f"there is no example {name!r}",
            where=where,
            why="a target without ':' is an example's name",
            hint=hint,
        )
    path = found[name]
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as if it ran as a script
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _import_failed(name, error) from error
    return module


def _examples() -> dict[str, Path]:
    """The examples by name; the nearest folder counts first."""
    found: dict[str, Path] = {}
    for folder in _example_folders():
        for path in sorted(folder.glob("*.py")):
            if not path.name.startswith("_"):
                found.setdefault(path.stem, path)
    return found


def _example_folders() -> list[Path]:
    here = Path.cwd()
    roots = [here, *here.parents, Path(__file__).resolve().parents[2]]
    checkouts = [r for r in roots if all((r / part).exists() for part in ("pyproject.toml", "zgraph", "examples"))]
    return list(dict.fromkeys(r / "examples" for r in checkouts))


def _attribute(module: ModuleType, path: str, target: str) -> Callable[[], Any]:
    found: Any = module
    for part in path.split("."):
        if not hasattr(found, part):
            callables = [n for n in dir(found) if not n.startswith("_") and callable(getattr(found, n))]
            own = [n for n in callables if getattr(getattr(found, n), "__module__", None) == module.__name__]
            raise TargetError(
                f"{getattr(found, '__name__', path)!r} has no attribute {part!r}",
                where=f"target {target!r}",
                hint=did_you_mean(part, own or callables),
            )
        found = getattr(found, part)
    if not callable(found):
        raise TargetError(
            f"target {target!r} is not callable but {type(found).__name__}",
            hint="name a function without arguments that returns (model, inputs)",
        )
    return found  # type: ignore[no-any-return]


def _call(factory: Callable[[], Any], target: str) -> Target:
    from torch import nn

    hint = "return (model, inputs): an nn.Module, and a tuple of args or a dict of kwargs"
    try:
        made = factory()
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise TargetError(f"target {target!r} failed", where=_frame(error), why=why) from error
    if not isinstance(made, tuple) or len(made) != 2:
        raise TargetError(f"target {target!r} returned {type(made).__name__}, not a pair", hint=hint)
    model, inputs = made
    if not isinstance(model, nn.Module):
        raise TargetError(f"target {target!r} returned no model but {type(model).__name__}", hint=hint)
    if not isinstance(inputs, (tuple, dict)):
        raise TargetError(f"target {target!r} returned inputs of type {type(inputs).__name__}", hint=hint)
    return Target(model, inputs)


def _import_failed(name: str, error: Exception) -> TargetError:
    why = f"{type(error).__name__}: {error}"
    return TargetError(f"module {name!r} can't be imported", where=_frame(error), why=why)


def _frame(error: BaseException) -> str | None:
    """The innermost "file:line" of the user's that an exception went through."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    mine = Path(__file__).parent
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).parent != mine]
    user = [f for f in frames if not f.filename.startswith("<") and "site-packages" not in f.filename]
    user = [f for f in user if Path(f.filename).parent != Path(importlib.__file__).parent]
    return f"{user[-1].filename}:{user[-1].lineno}" if user else None
