"""Plan files: text in TOML, YAML or JSON to plain data, and back. Knows the formats, not what a plan means.

Each format's reader refuses what would be dropped in silence (a key given twice); errors name file and line.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import yaml

from zgraph.errors import PlanError


def read(file: Path) -> str:
    """Return the file's text. Raises `PlanError` if it can't be read or its suffix is none that zgraph knows."""
    _format(file)
    try:
        return file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise PlanError("there is no such plan file", where=str(file), hint=f"looked in {Path.cwd()}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError("the plan file can't be read", where=str(file), why=str(error)) from error


def parse(text: str, file: Path) -> dict[str, Any]:
    """Return the mapping that `text` holds, in the format that the suffix of `file` names. Raises `PlanError`."""
    try:
        data = _format(file)[0](text)
    except _DuplicateKeyError as error:
        lines = [error.line] if error.line else lines_of_key(text, error.key)[1:]
        where = f"{file}:{lines[-1]}" if lines else str(file)
        raise PlanError(f"key {error.key!r} is given twice", where=where, hint="keep one of them") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        line = _line_of(error, text)
        where = f"{file}:{line}" if line else str(file)
        raise PlanError(f"this is not valid {file.suffix[1:].upper()}", where=where, why=str(error)) from error
    if data is None:  # an empty YAML file
        return {}
    if not isinstance(data, dict):
        raise PlanError(
            "a plan file must hold keys and values", where=str(file), why=f"it holds a {type(data).__name__}"
        )
    return data


def render(data: dict[str, Any], file: Path) -> str:
    """Return `data` (JSON's types) as text in the format that the suffix of `file` names."""
    return _format(file)[1](data)


def lines_of_key(text: str, key: str) -> list[int]:
    """Return the lines, from 1, on which `key` seems to be given or to head a table: one search for all formats."""
    pattern = re.compile(rf"""(?:^|[{{,\s.\[])["']?{re.escape(key)}["']?\s*[=:\]]""")
    return [number for number, line in enumerate(text.splitlines(), 1) if pattern.search(line.split("#")[0])]


def _line_of(error: Exception, text: str) -> int | None:
    if isinstance(error, json.JSONDecodeError):
        return error.lineno
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return int(mark.line) + 1
    if "(at end of document)" in str(error):  # tomllib's wording; attributes come with Python 3.14
        return len(text.splitlines())
    match = re.search(r"\(at line (\d+)", str(error))
    return int(match[1]) if match else None


class _DuplicateKeyError(Exception):
    def __init__(self, key: str, line: int | None = None) -> None:
        self.key, self.line = key, line


def _parse_json(text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for key, value in pairs:
            if key in fields:
                raise _DuplicateKeyError(key)
            fields[key] = value
        return fields

    return json.loads(text, object_pairs_hook=unique)


class _YamlLoader(yaml.SafeLoader):
    """The safe loader, which also refuses a key given twice in a mapping (`<<` merges may be overridden)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge" or not isinstance(key_node, yaml.ScalarNode):
                continue
            key = self.construct_object(key_node)
            if key in seen:
                raise _DuplicateKeyError(str(key), key_node.start_mark.line + 1)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _parse_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_YamlLoader)  # a SafeLoader


def _render_yaml(data: dict[str, Any]) -> str:
    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))


def _render_json(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def _render_toml(data: dict[str, Any]) -> str:
    return "\n".join(_toml_table(data, ())) + "\n"


def _toml_table(table: dict[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """Yield a table's own values first, then its tables: a value after a table would belong to that table."""
    if path:
        yield f"\n[{'.'.join(map(_toml_key, path))}]"
    for key, value in table.items():
        if value is not None and not isinstance(value, dict):  # TOML has no null: absent means the default
            yield f"{_toml_key(key)} = {_toml_value(value)}"
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _toml_table(value, (*path, key))


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_key(key)} = {_toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str):  # JSON's escapes are TOML's, but for DEL
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


_FORMATS: dict[str, tuple[Callable[[str], Any], Callable[[dict[str, Any]], str]]] = {
    ".toml": (tomllib.loads, _render_toml),
    ".yaml": (_parse_yaml, _render_yaml),
    ".yml": (_parse_yaml, _render_yaml),
    ".json": (_parse_json, _render_json),
}


def _format(file: Path) -> tuple[Callable[[str], Any], Callable[[dict[str, Any]], str]]:
    try:
        return _FORMATS[file.suffix.lower()]
    except KeyError:
        raise PlanError(
            f"{file.suffix or 'no suffix'!r} is no format of a plan file",
            where=str(file),
            hint="use .toml, .yaml or .json",
        ) from None
