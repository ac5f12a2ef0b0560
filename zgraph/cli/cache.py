"""`zgraph cache`: the compiled programs that are kept for later processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from zgraph.cli.options import JsonOption, OutputOption
from zgraph.cli.output import CHECK_FAILED, give
from zgraph.units import shown_bytes

if TYPE_CHECKING:
    from zgraph.cache.store import Found, Store


def cache(
    verify: Annotated[bool, typer.Option("--check", help="Exit with 1 if an entry is damaged.")] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Delete all entries.")] = False,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """List, check or clear the programs that are kept for later processes, in ZGRAPH_CACHE (else in zgraph's folder of the user's cache).

    Each entry is read, and its sum compared.
    """
    from zgraph.cache.store import opened

    store = opened()
    if store is None:
        typer.echo("the folder is not used: others can write to it", err=True)
        raise typer.Exit(CHECK_FAILED)
    if clear:
        count, size = store.clear()
        typer.echo(f"{count} files deleted, {shown_bytes(size)}")
        return
    entries = list(store.entries())
    give(_data(store, entries), _text(store, entries), as_json, output)
    if verify and any(entry.fault for entry in entries):
        raise typer.Exit(CHECK_FAILED)


def _data(store: Store, entries: list[Found]) -> dict[str, Any]:
    rows = [
        {"file": str(e.path), "bytes": e.size, "kind": e.kind, "fault": e.fault or None, **dict(e.words)}
        for e in entries
    ]
    return {"folder": str(store.folder), "entries": rows}


def _text(store: Store, entries: list[Found]) -> str:
    """Return text with the sizes of each model's programs in the folder, and the damaged entries."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for entry in entries:
        if not entry.fault:
            key = (entry.words.get("model", "(shared)"), entry.words.get("program", ""), entry.kind)
            groups.setdefault(key, []).append(entry.size)
    total = sum(entry.size for entry in entries)
    lines = [f"{store.folder}: {len(entries)} entries, {shown_bytes(total)}"]
    for (model, program, kind), sizes in sorted(groups.items()):
        lines.append(f"  {model:24} {program:12} {kind:8} {len(sizes):5}  {shown_bytes(sum(sizes))}")
    lines += [f"  damaged: {entry.path}: {entry.fault}" for entry in entries if entry.fault]
    return "\n".join(lines)
