"""A program as one pass left it, as a graph or as JSON: each is made from the other when it is asked for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zgraph.errors import BundleError

if TYPE_CHECKING:
    from zgraph.passes import Contract, PassRecord
    from zgraph.passes.analysis.costs import Costs
    from zgraph.program.program import Program


# The keys of a pass's facts: of every pass, and of one that has run.
FACTS = ("name", "summary", "requires", "provides", "conflicts", "bitwise", "level", "options")
RUN_FACTS = ("seconds", "verify_seconds", "nodes", "stats")


@dataclass(frozen=True)
class Figures:
    """The time and memory that a program takes, by simulation."""

    seconds: float  # a run
    exposed: float  # seconds of communication in it that are not hidden
    peak: int  # the most bytes of the device in use


@dataclass(eq=False)
class Snapshot:
    """The program after one pass, with what the pass is and what it says it did."""

    facts: dict[str, Any]  # the pass's facts: `FACTS` and `RUN_FACTS`
    make_program: Callable[[], Program]  # makes `program`
    make_data: Callable[[], dict[str, Any]]  # makes `data`
    make_figures: Callable[[], Figures]  # makes `figures`

    @property
    def name(self) -> str:
        return str(self.facts["name"])

    @property
    def summary(self) -> str:
        return str(self.facts["summary"])

    @cached_property
    def program(self) -> Program:
        """The graph."""
        return self.make_program()

    @cached_property
    def data(self) -> dict[str, Any]:
        """The program as JSON, as `zgraph.program.serialize` writes it."""
        return self.make_data()

    @cached_property
    def figures(self) -> Figures:
        """The time and memory that the program takes, by simulation."""
        return self.make_figures()


def at_sizes(snapshot: Snapshot, sizes: Mapping[str, int], costs: Costs) -> Snapshot:
    """Return a snapshot of the program at these sizes, by name."""

    def program() -> Program:
        return snapshot.program.at(snapshot.program.sizes.point(sizes))

    def data() -> dict[str, Any]:
        from zgraph.program.serialize import to_json

        return to_json(sized.program, constants=False)

    sized = Snapshot(snapshot.facts, program, data, lambda: figures_of(sized.program, costs))
    return sized


def of_record(record: PassRecord, costs: Costs) -> Snapshot:
    """Return a snapshot of a pass that has run."""

    def data() -> dict[str, Any]:
        from zgraph.program.serialize import to_json

        return to_json(record.program, constants=False)

    facts = facts_of(record.name, record.summary, record.contract, record.options)
    facts |= {"seconds": record.seconds, "verify_seconds": record.verify_seconds}
    facts |= {"nodes": record.nodes, "stats": dict(record.stats)}
    return Snapshot(facts, lambda: record.program, data, lambda: figures_of(record.program, costs))


def of_file(facts: dict[str, Any], figures: Figures, path: Path) -> Snapshot:
    """Return a snapshot stored in a bundle. Reading it raises `BundleError` if the file is damaged or missing."""

    def data() -> dict[str, Any]:
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
            if not all(isinstance(row["name"], str) and "op" in row and "target" in row for row in table["nodes"]):
                raise ValueError("a node has no name, kind or operator")
            return table  # type: ignore[no-any-return]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise BundleError(
                "a program of the bundle can't be read", where=str(path), why=str(error), hint="write the bundle again"
            ) from error

    def program() -> Program:
        from zgraph.errors import ZgraphError
        from zgraph.program.serialize import from_json

        try:
            return from_json(snapshot.data)
        except BundleError:
            raise
        except ZgraphError as error:
            raise BundleError(error.what, where=str(path), why=error.why, hint=error.hint) from error

    snapshot = Snapshot(facts, program, data, lambda: figures)
    return snapshot


def figures_of(program: Program, costs: Costs) -> Figures:
    from zgraph.passes.analysis.simulator import simulate

    forecast = simulate(program, costs)
    return Figures(forecast.seconds, sum(forecast.exposed.values(), 0.0), sum(forecast.peak.values()))


def facts_of(name: str, summary: str, contract: Contract | None, options: Any) -> dict[str, Any]:
    """Return what a pass is, as JSON; the capture, which is no pass, has no contract."""
    return {
        "name": name,
        "summary": summary,
        "requires": sorted(contract.requires) if contract else [],
        "provides": sorted(contract.provides) if contract else [],
        "conflicts": sorted(contract.conflicts) if contract else [],
        "bitwise": contract.bitwise if contract else True,
        "level": contract.level.name.lower() if contract and contract.level is not None else None,
        "options": {f.name: _shown(getattr(options, f.name)) for f in _fields(options)},
    }


def _fields(options: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(options) if dataclasses.is_dataclass(options) else ()


def _shown(option: Any) -> Any:
    """Return an option as short JSON: hardware by its name, a function by its reference."""
    from zgraph.passes.analysis.costs import Costs

    if option is None or isinstance(option, (bool, int, float, str)):
        return option
    if isinstance(option, Costs):
        return option.hardware.name
    if isinstance(option, (set, frozenset)):
        return sorted(map(str, option))
    if isinstance(option, (list, tuple)):
        return [_shown(o) for o in option]
    if callable(option):
        return f"{getattr(option, '__module__', '')}:{getattr(option, '__qualname__', type(option).__name__)}"
    return type(option).__name__
