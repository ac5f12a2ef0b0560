"""Resolving the arguments of commands: the target's model and inputs, the plan, the number of ranks.

package.module:factory    a callable that returns (model, inputs); the current directory is on the path
hf:DIR                    a folder with a transformers config.json; the model is made on the meta device
train_lm                  an example of a source checkout, found from the current directory upwards or next
                          to the package; its `factory` is called
./some/folder             a bundle (`zgraph.inspection.bundle`)
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import typer

from zgraph.cli.output import progress
from zgraph.errors import TargetError
from zgraph.names import did_you_mean

if TYPE_CHECKING:
    from torch import nn

    from zgraph.build.pass_pipeline import PassFilter
    from zgraph.build.planned_step import Inputs
    from zgraph.forecast.stages import PipelineForecast
    from zgraph.inspection.inspection import Inspection, PassTrace
    from zgraph.passes import Pass
    from zgraph.plan.plan import Plan

FACTORY = "factory"
HF = "hf:"
DEFAULT_HARDWARE = "h100-80g"


@dataclass(frozen=True)
class Target:
    """A plain model with inputs for it."""

    model: nn.Module  # not compiled
    inputs: Inputs  # the args or kwargs of one rank's batch


def load_target(text: str, batch: str | None = None, *, weights: bool = False) -> Target:
    """Import a target and call its factory; or make a transformers model with inputs of size `batch` ("4x512").

    With `weights` the transformers model has random weights, else it is on the meta device. Raises `TargetError` with the
    nearest known name.
    """
    if text.startswith(HF):
        from zgraph.cli.transformers_target import load

        return Target(*load(text.removeprefix(HF), batch, weights=weights))
    if batch is not None:
        raise TargetError("--batch is for hf:DIR", where=f"target {text!r}", hint="the factory makes its own inputs")
    if ":" in text:
        module_name, _, path = text.partition(":")
        module = _module(module_name, text)
    else:
        module, path = _example(text), FACTORY
    return _call(_attribute(module, path, text), text)


def load_plan(path: Path | None) -> Plan:
    """Return the plan in a file, or the default plan without one. Raises `PlanError`."""
    from zgraph.plan.plan import Plan

    return Plan() if path is None else Plan.load(path)


def resolve_world(plan: Plan, world: int | None) -> int:
    """Return the number of ranks asked for, else that of the plan's mesh with 2 for its -1. Raises `MeshError`."""
    if world is None:
        world = plan.usual_world()
    plan.resolve_mesh(world)
    return world


def planned_passes(plan: Plan, update: bool, *, training: bool = True) -> list[Pass]:
    """Return the passes that a plan runs on a step's program, or on its update program."""
    from zgraph.build.pass_pipeline import build, build_update_passes

    return build_update_passes(plan) if update else build(plan, training=training)


def look(
    text: str,
    plan: Path | None = None,
    world: int | None = None,
    hardware: str | None = None,
    batch: str | None = None,
    *,
    pass_filter: PassFilter | None = None,
    program: str | None = None,
    stage: int | None = None,
    at: Sequence[str] | None = None,
) -> Inspection:
    """Return the inspection of a target: of the step that the plan makes of a model, or of a bundle.

    For a plan with a pipeline it is that of one `stage`, by default the first, with a note on stderr. With sizes `at`
    ("seq=512") its programs have static sizes. Raises what loading and capturing raise, `TargetError` for an unknown
    `program`, for a stage of a plan without a pipeline, and for options with a bundle, which has its own plan, world
    and hardware.
    """
    sizes = parse_sizes(at or ())
    inspection = _look(text, plan, world, hardware, batch, pass_filter, stage).only(program)
    return inspection.at(sizes) if sizes else inspection


def parse_sizes(given: Sequence[str]) -> dict[str, int]:
    """Parse texts such as "seq=512" into sizes by name. Raises `TargetError` for an invalid one."""
    sizes = {}
    for text in given:
        name, sign, number = text.partition("=")
        if not sign or not name.isidentifier() or not number.isdecimal():
            raise TargetError(f"{text!r} is no size", where="--at", hint="a name and a number: --at seq=512")
        sizes[name] = int(number)
    return sizes


def _look(
    text: str,
    plan: Path | None,
    world: int | None,
    hardware: str | None,
    batch: str | None,
    pass_filter: PassFilter | None,
    stage: int | None,
) -> Inspection:
    folder = bundle_folder(text)
    if folder is not None:
        given = [
            f"--{name}"
            for name, value in (("plan", plan), ("world", world), ("hw", hardware), ("batch", batch))
            if value
        ]
        given += ["--stage"] if stage is not None else []
        given += ["--stop-after or --disable"] if pass_filter is not None else []
        if given:
            raise TargetError(
                f"a bundle takes no {', no '.join(given)}",
                where=text,
                why="it holds what was compiled, for its own plan, world and hardware",
                hint="name the model instead",
            )
        from zgraph.inspection.bundle import read

        return read(folder)
    the_plan = with_hardware(load_plan(plan), hardware)
    ranks = resolve_world(the_plan, world)
    staged = the_plan.pipeline_ranks(ranks) > 1
    if stage is not None and not staged:
        raise TargetError(f"there is no stage {stage}", where="--stage", why="the plan has no pipeline (mesh.pp)")
    target = load_target(text, batch)

    from zgraph.inspection import make_inspection

    with progress(f"compiling {text} for {ranks} ranks"):
        if not staged:
            return make_inspection.of_model(
                target.model, the_plan, target.inputs, ranks, origin=text, pass_filter=pass_filter
            )
        inspection = make_inspection.of_stage(
            target.model, the_plan, target.inputs, ranks, stage or 0, origin=text, pass_filter=pass_filter
        )
    if stage is None:
        typer.echo(f"note: this is {inspection.origin}; --stage K shows another", err=True)
    return inspection


def look_at_pipeline(
    text: str,
    plan: Path | None = None,
    world: int | None = None,
    hardware: str | None = None,
    batch: str | None = None,
) -> PipelineForecast | None:
    """Forecast the whole pipeline of a plan on a model; return None for a plan without a pipeline, and for a bundle.
    Raises what `look` does."""
    if bundle_folder(text) is not None:
        return None
    the_plan = with_hardware(load_plan(plan), hardware)
    ranks = resolve_world(the_plan, world)
    if the_plan.pipeline_ranks(ranks) == 1:
        return None
    target = load_target(text, batch)

    from zgraph.forecast.stages import forecast_pipeline

    with progress(f"compiling the stages of {text} for {ranks} ranks"):
        return forecast_pipeline(target.model, the_plan, target.inputs, ranks)


def way_of(inspection: Inspection, program: str | None, update: bool) -> PassTrace:
    """Return the program of a step that options ask for. Raises `TargetError` for an unknown one, `PlanError` if
    there is no update."""
    if program is not None:
        return inspection.way(program)
    if not update:
        return inspection.way()
    if inspection.update is None:
        from zgraph.errors import PlanError

        raise PlanError("the plan has no optimizer", where="optimizer", hint='optimizer = {name = "AdamW", lr = 3e-4}')
    return inspection.update


def bundle_folder(text: str) -> Path | None:
    """Return the folder that a target's text names, if it is a path, or a folder without an example of that name;
    else None."""
    path = Path(text)
    if text.startswith("hf:") or (":" in text and not path.exists()):
        return None
    if (path / "bundle.json").exists() or os.sep in text:
        return path
    return path if path.is_dir() and text not in _examples() else None


def with_hardware(plan: Plan, hardware: str | None) -> Plan:
    """Return the plan with the hardware that is asked for, else its own, else the default, since schedules depend on
    it. Raises `PlanError`."""
    from zgraph.build.pass_pipeline import costs_of

    plan = plan.model_copy(update={"hardware": hardware or plan.hardware or DEFAULT_HARDWARE})
    costs_of(plan)  # (raises before the capture if the hardware is wrong)
    return plan


def refuse_bundle(text: str, command: str) -> None:
    """Raise `TargetError` for a folder, which may be a bundle: it has programs and no model."""
    if bundle_folder(text) is not None:
        raise TargetError(
            f"zgraph {command} needs the model",
            where=f"target {text!r}",
            why="a folder may hold a bundle: programs, without the model that they were made of",
            hint="name the model: package.module:factory, hf:DIR, or an example",
        )


# -- finding a factory -------------------------------------------------------------------------
def on_path() -> None:
    """Make modules of the current directory importable."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _module(name: str, target: str) -> ModuleType:
    on_path()
    if not name:
        raise TargetError(f"target {target!r} names no module", hint="write package.module:factory")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not (name == missing or name.startswith(missing + ".")):
            raise _import_failed(name, error) from error  # the module is there; something it imports is not
        raise TargetError(
            f"there is no module {missing!r}",
            where=f"target {target!r}",
            why="it is neither installed nor in the current directory",
            hint=f"write {name.removesuffix('.py')}:…"
            if name.endswith(".py")
            else did_you_mean(missing, _siblings(missing)),
        ) from error
    except (Exception, SystemExit) as error:
        raise _import_failed(name, error) from error


def _siblings(name: str) -> list[str]:
    """Return the modules next to where `name` would be: in its package, or in the current directory."""
    package, _, _ = name.rpartition(".")
    if not package:
        return [m.name for m in pkgutil.iter_modules([os.getcwd()])]
    path = getattr(sys.modules.get(package), "__path__", None)
    return [f"{package}.{m.name}" for m in pkgutil.iter_modules(path)] if path else []


def _example(name: str) -> ModuleType:
    examples = _examples()
    if name not in examples:
        hint = did_you_mean(name, examples) if examples else "write package.module:factory"
        where = ", ".join(str(d) for d in _example_folders()) or "no folder of examples was found"
        raise TargetError(
            f"there is no example {name!r}",
            where=where,
            why="a target without ':' is an example's name",
            hint=hint,
        )
    path = examples[name]
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as if it ran as a script
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with contextlib.redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _import_failed(name, error) from error
    return module


def _examples() -> dict[str, Path]:
    """Return the examples by name, preferring those of the nearest folder."""
    examples: dict[str, Path] = {}
    for folder in _example_folders():
        for path in sorted(folder.glob("*.py")):
            if not path.name.startswith("_"):
                examples.setdefault(path.stem, path)
    return examples


def _example_folders() -> list[Path]:
    here = Path.cwd()
    roots = [here, *here.parents, Path(__file__).resolve().parents[2]]
    checkouts = [r for r in roots if all((r / part).exists() for part in ("pyproject.toml", "zgraph", "examples"))]
    return list(dict.fromkeys(r / "examples" for r in checkouts))


def _attribute(module: ModuleType, path: str, target: str) -> Callable[[], Any]:
    attribute: Any = module
    for part in path.split("."):
        if not hasattr(attribute, part):
            callables = [n for n in dir(attribute) if not n.startswith("_") and callable(getattr(attribute, n))]
            own = [n for n in callables if getattr(getattr(attribute, n), "__module__", None) == module.__name__]
            raise TargetError(
                f"{getattr(attribute, '__name__', path)!r} has no attribute {part!r}",
                where=f"target {target!r}",
                hint=did_you_mean(part, own or callables),
            )
        attribute = getattr(attribute, part)
    if not callable(attribute):
        raise TargetError(
            f"target {target!r} is not callable but {type(attribute).__name__}",
            hint="name a function without arguments that returns (model, inputs)",
        )
    return attribute  # type: ignore[no-any-return]


def _call(factory: Callable[[], Any], target: str) -> Target:
    from torch import nn

    hint = "return (model, inputs): an nn.Module, and a tuple of args or a dict of kwargs"
    try:
        with contextlib.redirect_stdout(sys.stderr):  # (stdout is for the answer)
            pair = factory()
    except (Exception, SystemExit) as error:
        why = f"{type(error).__name__}: {error}"
        raise TargetError(f"target {target!r} failed", where=_frame(error), why=why) from error
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise TargetError(f"target {target!r} returned {type(pair).__name__}, not a pair", hint=hint)
    model, inputs = pair
    if not isinstance(model, nn.Module):
        raise TargetError(f"target {target!r} returned no model but {type(model).__name__}", hint=hint)
    if not isinstance(inputs, (tuple, dict)):
        raise TargetError(f"target {target!r} returned inputs of type {type(inputs).__name__}", hint=hint)
    return Target(model, inputs)


def _import_failed(name: str, error: BaseException) -> TargetError:
    why = f"{type(error).__name__}: {error}"
    return TargetError(f"module {name!r} can't be imported", where=_frame(error), why=why)


def _frame(error: BaseException) -> str | None:
    """Return the user's innermost "file:line" that an exception went through; None if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    mine = Path(__file__).parent
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).parent != mine]
    user = [f for f in frames if not f.filename.startswith("<") and "site-packages" not in f.filename]
    user = [f for f in user if Path(f.filename).parent != Path(importlib.__file__).parent]
    return f"{user[-1].filename}:{user[-1].lineno}" if user else None
