"""The slots of the machines that a job runs on: a hostfile, and which of its slots are included or excluded.

A hostfile has a line `NAME slots=N` for each machine; `#` begins a comment. `--include` and `--exclude` name machines, joined by @, each with
slots or with all of them: "worker-2:0@worker-3:0,1".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from zgraph.errors import MeshError
from zgraph.names import did_you_mean

Hosts = dict[str, list[int]]
"""The slots of each machine, in the order of the hostfile, which is the order of the nodes' ranks."""

_LINE = re.compile(r"(\S+)\s+slots=(\d+)\s*(?:#.*)?")
_NODE = re.compile(r"([^:@\s]+)(?::(\d+(?:,\d+)*))?")


def read_hostfile(path: Path) -> Hosts:
    """Return the machines of a hostfile with all of their slots. Raises `MeshError` with file and line."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise MeshError("the hostfile can't be read", where=str(path), why=str(error)) from error
    hosts: Hosts = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _LINE.fullmatch(text)
        where = f"{path}:{number}"
        if match is None:
            raise MeshError(
                f"{text!r} is no line of a hostfile", where=where, hint="NAME slots=N, such as: worker-1 slots=8"
            )
        if match[1] in hosts:
            raise MeshError(f"{match[1]} stands in the hostfile twice", where=where, hint="one line for each machine")
        if match[1].startswith("-"):
            raise MeshError(f"{match[1]} is no name of a machine", where=where, why="ssh would take it for an option")
        if not int(match[2]):
            raise MeshError(f"{match[1]} has no slots", where=where, hint="leave the line out, or slots=1 and more")
        hosts[match[1]] = list(range(int(match[2])))
    if not hosts:
        raise MeshError("the hostfile names no machine", where=str(path), hint="NAME slots=N for each")
    return hosts


def chosen(hosts: Hosts, include: str = "", exclude: str = "") -> Hosts:
    """Return the included machines and slots. Raises `MeshError` for unknown ones, if both options are given, and if
    nothing is left."""
    if include and exclude:
        raise MeshError("--include and --exclude are given together", hint="give one of them")
    if not include and not exclude:
        return hosts
    option = "--include" if include else "--exclude"
    named = _named(hosts, include or exclude, option)
    selection: Hosts = {}
    for host, slots in hosts.items():
        if include:
            chosen_slots = [s for s in slots if s in named.get(host, [])]
        else:
            chosen_slots = [s for s in slots if s not in named.get(host, [])]
        if chosen_slots:
            selection[host] = chosen_slots
    if not selection:
        raise MeshError("no slot is left", where=option, why=f"{include or exclude!r} names all that there are")
    return selection


def _named(hosts: Mapping[str, list[int]], text: str, option: str) -> Hosts:
    """Return the slots that a text like "worker-2:0@worker-3:0,1" names."""
    selection: Hosts = {}
    for part in text.split("@"):
        match = _NODE.fullmatch(part.strip())
        if match is None:
            raise MeshError(f"{part!r} names no machine", where=option, hint="NAME or NAME:SLOT,SLOT, joined by @")
        host = match[1]
        if host not in hosts:
            raise MeshError(f"there is no machine {host!r}", where=option, hint=did_you_mean(host, hosts))
        slots = [int(s) for s in match[2].split(",")] if match[2] else list(hosts[host])
        for slot in slots:
            if slot not in hosts[host]:
                raise MeshError(
                    f"{host} has no slot {slot}", where=option, hint=f"slots {hosts[host][0]} to {hosts[host][-1]}"
                )
        selection.setdefault(host, []).extend(s for s in slots if s not in selection.get(host, []))
    return selection


def limited(hosts: Hosts, nodes: int | None = None, each: int | None = None) -> Hosts:
    """Keep the first `nodes` machines and the first `each` slots of each. Raises `MeshError` if there are fewer."""
    if nodes is not None:
        if not 1 <= nodes <= len(hosts):
            raise MeshError(
                f"--num_nodes is {nodes}, and the hostfile has {len(hosts)} nodes",
                where="--num_nodes",
                hint=f"a number from 1 to {len(hosts)}",
            )
        hosts = dict(list(hosts.items())[:nodes])
    if each is not None:
        short = next((host for host, slots in hosts.items() if not 1 <= each <= len(slots)), None)
        if short is not None:
            raise MeshError(f"--num_gpus is {each}, and {short} has {len(hosts[short])} slots", where="--num_gpus")
        hosts = {host: slots[:each] for host, slots in hosts.items()}
    return hosts
