"""Pages of the site that are generated from the code, as Markdown.

Each function returns one page. Nothing here needs MkDocs, so the tests read the same pages as the site's readers.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from zgraph.plan.communication import parse_bytes

_TENSOR = {"mesh": {"dp": -1, "tp": 2}}
_CONTEXT = {"mesh": {"dp": -1, "cp": 2}}
_UPDATE = {"optimizer": {"name": "AdamW", "lr": 3e-4}}
NEEDS: dict[str, dict[str, Any]] = {
    "numerics": {"precision": "bf16"},
    "schedule": {"mesh": {"pp": 4, "dp": -1}, "micro_batches": 8},
    "partition": {"mesh": {"pp": 4, "dp": -1}},
    "virtual_stages": {"mesh": {"pp": 2, "dp": -1}, "schedule": "interleaved1f1b"},
    "tensor_parallel": _TENSOR,
    "sequence_parallel": _TENSOR,
    "async_tensor_parallel": _TENSOR,
    "partition_activations": _TENSOR,
    "sequence_dim": _CONTEXT,
    "context_attention": _CONTEXT,
    "lr_schedule": _UPDATE,
    "ema": _UPDATE,
    "elastic": _UPDATE,
    "offload": _UPDATE,
    "on_nonfinite": _UPDATE,
    "local_steps": {"mesh": {"replicate": 2, "dp": -1}, **_UPDATE},
}
"""What a field's example needs beside it to be a plan."""


def cell(text: str) -> str:
    """Text for a cell of a table."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# -- the plan ---------------------------------------------------------------------------------------------------------
def type_name(annotation: Any, records: set[type[BaseModel]]) -> str:
    """A type as a reader of a plan file would say it; records that it holds are added to `records`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return "bytes" if sizes(arguments) else type_name(arguments[0], records)
    if origin is Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in arguments)
    if origin in (Union, UnionType):
        names = [type_name(argument, records) for argument in arguments if argument is not type(None)]
        return " or ".join(dict.fromkeys(names))
    if origin is dict:
        return f"table from {type_name(arguments[0], records)} to {type_name(arguments[1], records)}"
    if origin in (tuple, list):
        return f"list of {type_name(arguments[0], records)}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        records.add(annotation)
        return f"[{annotation.__name__}](#{annotation.__name__.lower()}-record)"
    plain = {int: "integer", float: "number", str: "string", bool: "`true` or `false`"}
    return plain.get(annotation, "any value")


def sizes(metadata: Iterable[Any]) -> bool:
    """Does a type take bytes, as a number or as text?"""
    return any(getattr(item, "func", None) is parse_bytes for item in metadata)


def default_of(field: FieldInfo) -> str:
    """A field's default, as a plan file says it."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if isinstance(value, BaseModel):
        return f"`{type(value).__name__}()`"
    return f"`{json.dumps(value)}`"


def example_of(name: str, value: Any) -> dict[str, Any]:
    """A plan in which a field has this value, as a plan file holds it."""
    return {**NEEDS.get(name, {}), name: value}


def field_type(field: FieldInfo, records: set[type[BaseModel]]) -> str:
    """The type of a field; bytes are an integer, or text such as "20GiB"."""
    name = "bytes" if sizes(field.metadata) else type_name(field.annotation, records)
    return name.replace("bytes", 'bytes: an integer, or text such as `"20GiB"`')


def record_fields(record: type[BaseModel], records: set[type[BaseModel]]) -> str:
    """The table of a record's fields."""
    rows = [
        (
            f"`{name}`",
            cell(field_type(f, records)),
            cell(default_of(f)),
            cell(f.description or "says in a file which record it is"),
        )
        for name, f in record.model_fields.items()
    ]
    return table(("field", "type", "default", "meaning"), rows)


def plan() -> str:
    """Every field of a plan and of the records in it."""
    from zgraph.plan import planfile
    from zgraph.plan.plan import Plan

    records: set[type[BaseModel]] = set()
    parts = [
        "# Plan reference",
        "Every field of a `zgraph.Plan`, its type, its default, what it means and an example in TOML. "
        "[What a plan says](../features/plan.md) is the introduction. A field whose type is a record takes a table in a file, "
        "and a dict or the record itself in Python.",
    ]
    for name, field in Plan.model_fields.items():
        example = planfile.render(example_of(name, (field.examples or [])[0]), Path("plan.toml")).strip()
        parts += [
            f"## {name}",
            f"{sentence(field.description or '')}",
            table(("type", "default"), [(cell(field_type(field, records)), cell(default_of(field)))]),
            f"```toml\n{example}\n```",
        ]
    done: set[type[BaseModel]] = set()
    described = []
    while records - done:
        record = min(records - done, key=lambda r: r.__name__)
        done.add(record)
        described.append((record.__name__, docstring(record), record_fields(record, records)))
    for title, text, fields in sorted(described):
        parts += [f"## {title} (record)", text, fields]
    parts += ["## What does not go together", "Each of these is an error when the plan is made.", conflicts()]
    return "\n\n".join(part for part in parts if part) + "\n"


def conflicts() -> str:
    """The table of fields that do not go together; values of a plan's own are left out."""
    from zgraph.plan.conflicts import CONFLICTS

    rows = [
        (
            f"`{row.where}`",
            cell(re.sub(r"(=)?\{plan\.\w+(!r)?\}", "", row.what).replace(" zero is", " zero is below 3")),
            cell(row.hint),
        )
        for row in CONFLICTS
    ]
    return table(("field", "what is wrong", "what to do"), rows)


def sentence(text: str) -> str:
    """A description with a capital and a full stop."""
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def docstring(thing: Any) -> str:
    """A docstring without its indentation, or nothing."""
    return (
        inspect.cleandoc(vars(thing).get("__doc__") or "") if isinstance(thing, type) else inspect.getdoc(thing) or ""
    )


# -- passes -----------------------------------------------------------------------------------------------------------
@cache
def pass_types() -> dict[str, Any]:
    """Every pass of zgraph's own by its name, as (module, pass type), in the order of the folders."""
    from zgraph import passes as package
    from zgraph.passes import PassType

    found: dict[str, Any] = {}
    for module in pkgutil.walk_packages(package.__path__, "zgraph.passes."):
        loaded = importlib.import_module(module.name)
        for value in vars(loaded).values():
            if isinstance(value, PassType) and value.function.__module__ == module.name:
                found[value.contract.name] = (module.name, value)
    return found


def idea(module: str) -> str:
    """The first paragraph of the text at the top of a pass's file, where the file has one pass."""
    own = [name for name, _ in pass_types().values() if name == module]
    return docstring(importlib.import_module(module)).partition("\n\n")[0] if len(own) == 1 else ""


def facts(names: frozenset[str]) -> str:
    """Facts for a cell of a table."""
    return ", ".join(f"`{name}`" for name in sorted(names)) or "nothing"


def passes() -> str:
    """Every pass with its contract and options."""
    parts = [
        "# Passes",
        "Every pass of zgraph's own, with its contract: the facts about a program that it requires, provides, and that must not hold before it. "
        "`zgraph passes --plan PLAN` prints those that a plan runs, in their order, and `zgraph passes --why` why it runs each, or does not. "
        "[Writing a pass](../writing-a-pass.md) explains contracts.",
    ]
    families: dict[str, list[Any]] = {}
    for module, step in pass_types().values():
        families.setdefault(module.split(".")[2], []).append((module, step))
    for family, steps in families.items():
        about = docstring(importlib.import_module(f"zgraph.passes.{family}"))
        parts += [f"## passes/{family}", about.partition("\n\n")[0]]
        for module, step in steps:
            contract = step.contract
            path = module.removeprefix("zgraph.").replace(".", "/")
            parts += [
                f"### {contract.name}",
                sentence(contract.summary),
                table(
                    ("requires", "provides", "conflicts with", "keeps values bit for bit", "defined in"),
                    [
                        (
                            facts(contract.requires),
                            facts(contract.provides),
                            facts(contract.conflicts),
                            "yes" if contract.bitwise else "no",
                            f"`{path}.py`",
                        )
                    ],
                ),
                docstring(step.function) or idea(module),
                options(step.options) if step.options else "",
            ]
    return "\n\n".join(part for part in parts if part) + "\n"


def options(record: type) -> str:
    """A pass's options, by name, type and default."""
    shown = [
        f"`{name}`" + (f" (default `{parameter.default!r}`)" if short(parameter) else "")
        for name, parameter in inspect.signature(record).parameters.items()
    ]
    return f"Options: {', '.join(shown)}."


def short(parameter: inspect.Parameter) -> bool:
    """Has it a default that fits a line?"""
    plain = (bool, int, float, str, type(None))
    return parameter.default is not inspect.Parameter.empty and isinstance(parameter.default, plain)


# -- the command line -------------------------------------------------------------------------------------------------
def commands() -> str:
    """Every command with its arguments and options."""
    import typer

    from zgraph.cli.app import app

    root: Any = typer.main.get_command(app)
    parts = ["# Command line", root.help, sentence(root.epilog)]
    for path, command in walk("zgraph", root):
        shown = [p for p in command.params if p.name != "help"]
        usage = " ".join([path, *(p.metavar or p.name.upper() for p in shown if p.param_type_name == "argument")])
        usage += " [OPTIONS]" if any(p.param_type_name == "option" for p in shown) else ""
        parts += [f"## {path}", plain(command.help or ""), f"```text\n{usage}\n```"]
        rows = [(names(p), cell(plain(getattr(p, "help", None) or ""))) for p in shown]
        parts += [table(("argument or option", "meaning"), rows)] if rows else []
    return "\n\n".join(parts) + "\n"


def walk(path: str, group: Any) -> Iterator[tuple[str, Any]]:
    """Every command below a group, with the words that call it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from walk(f"{path} {name}", command)
        else:
            yield f"{path} {name}", command


def names(parameter: Any) -> str:
    """What a parameter of a command is called, with what it takes."""
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    takes = "" if parameter.is_flag else f" {parameter.metavar or choices(parameter)}"
    return f"`{', '.join(parameter.opts)}{takes}`".replace("|", "\\|")


def choices(parameter: Any) -> str:
    """The values that an option takes, where it has a list of them."""
    return (
        "|".join(str(value.value) for value in type(parameter.default))
        if isinstance(parameter.default, Enum)
        else "VALUE"
    )


def plain(text: str) -> str:
    """Help as Markdown: no brackets that could be links, no patterns that could be emphasis."""
    return inspect.cleandoc(text).replace("\b\n", "").replace("[", "\\[").replace("*", "\\*").replace("<", "&lt;")


# -- errors and the public API ----------------------------------------------------------------------------------------
def errors() -> str:
    """Every error by its name."""
    from zgraph import errors as module

    parts = [
        "# Errors",
        "Every error that zgraph raises on purpose is a `zgraph.errors.ZgraphError`. Its text says what is wrong; below that stand the lines "
        "`where`, `why` and `to do`, as far as they are known. The same four parts are attributes: `what`, `where`, `why` and `hint`.",
    ]
    for name in module.__all__:
        kind = getattr(module, name)
        bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
        parts += [f"## {name}", f"Caught as {bases}.", docstring(kind)]
    return "\n\n".join(parts) + "\n"


INTERNAL = ("runtime", "saver", "uncut", "cut", "adopt_forward", "forward", "loss_fn")
"""Members of a handle that are there for zgraph itself."""


def api() -> str:
    """Every public name, for mkdocstrings to describe."""
    import zgraph
    from zgraph import deepspeed
    from zgraph import passes as passes_package

    own = [name for name in zgraph.__all__ if name not in ("__version__", "errors")]
    functions = [n for n in own if inspect.isfunction(getattr(zgraph, n))]
    records = [n for n in own if n not in functions]
    sections = [
        ("Functions", [getattr(zgraph, name) for name in functions]),
        ("A compiled model", [importlib.import_module("zgraph.api.handle").Handle]),
        ("Records", [getattr(zgraph, name) for name in records]),
        ("Passes", [getattr(passes_package, name) for name in passes_package.__all__]),
        ("DeepSpeed's configuration", [getattr(deepspeed, name) for name in deepspeed.__all__]),
    ]
    parts = [
        "# Python API",
        "`model.zgraph` of a compiled model is a `Handle`; its `train_step`, `step`, `eval_step`, `no_sync`, `save_checkpoint`, "
        "`load_checkpoint` and `save_pretrained` are methods of the model as well. What each field of a record means is in the "
        "[plan reference](plan.md); errors have [a page of their own](errors.md).",
    ]
    for title, things in sections:
        parts.append(f"## {title}")
        parts += [f"::: {thing.__module__}.{thing.__qualname__}" for thing in things if hasattr(thing, "__qualname__")]
        if title == "A compiled model":
            parts[-1] += f'\n    options:\n      filters: ["!^_", "!^({"|".join(INTERNAL)})$"]'
    return "\n\n".join(parts) + "\n"


# -- DeepSpeed's keys -----------------------------------------------------------------------------------------------------
def deepspeed_keys() -> str:
    """Every key of a DeepSpeed configuration, and what becomes of it."""
    from zgraph.deepspeed.keys import KEYS

    rows = []
    for name, key in KEYS.items():
        said = "; ".join(filter(None, (key.why, f"to do: {key.hint}" if key.hint else "")))
        if key.verdict == "refused" and key.default is not None:
            said += f" ({json.dumps(key.default)} asks for nothing)"
        rows.append(
            (f"`{name}`", key.verdict, cell(said) if said else "[a field of the plan](../migrate/deepspeed.md)")
        )
    return (
        "# DeepSpeed's keys\n\nWhat `zgraph.deepspeed.plan` makes of each key of a configuration. A key that is none of these is refused, with the "
        'nearest of them. What stands in a section that is judged as one, such as `wandb`, belongs to it; one with `"enabled": false` asks for '
        "nothing.\n\n" + table(("key", "verdict", "why"), rows) + "\n"
    )


PAGES = {
    "reference/plan.md": plan,
    "reference/passes.md": passes,
    "reference/commands.md": commands,
    "reference/errors.md": errors,
    "reference/api.md": api,
    "reference/deepspeed-keys.md": deepspeed_keys,
}
