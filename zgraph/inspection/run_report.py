"""A report of what was compiled, for people: `print(model.zgraph.report())`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from zgraph.codegen.executable import Executable, Kernel
from zgraph.inspection.html_report import html_report
from zgraph.inspection.make_inspection import of_runtime
from zgraph.passes.analysis.simulator import simulate
from zgraph.plan.plan import GROUPS
from zgraph.program import collectives
from zgraph.program.node import Role, info
from zgraph.program.program import Program
from zgraph.runtime.memory import table
from zgraph.units import shown_bytes
from zgraph.update.owned_parameters import mesh_of

if TYPE_CHECKING:
    from zgraph.build.step_program import StepProgram
    from zgraph.runtime.runtime import Runtime

SHOWN = 10  # remarks that are printed at most


@dataclass(frozen=True)
class PartReport:
    """One program that runs."""

    name: str  # its name
    nodes: int  # how many nodes it has
    gathers: int  # how many all-gathers it starts
    reductions: int  # how many reductions of gradients it starts
    kernels: tuple[Kernel, ...]  # its fused kernels
    library: tuple[Kernel, ...]  # the library kernels that it calls


class Report:
    """Layouts, passes, collectives and kernels of everything compiled so far. `str()` gives the text."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.parts = [
            _part(e) for entry in runtime.entries.values() for step in entry.every_program() for e in step.executables()
        ]
        self.parts += [_part(e) for e in runtime.updater.programs.executables()]

    def kernels(self) -> tuple[Kernel, ...]:
        """Return all fused kernels, each with the model's operators (before their decomposition) that it computes."""
        return tuple(k for part in self.parts for k in part.kernels)

    def library_calls(self) -> tuple[Kernel, ...]:
        """Return the calls outside fused kernels: BLAS products and torch's own kernels, without collectives."""
        return tuple(k for part in self.parts for k in part.library)

    def html(self) -> str:
        """Return the report as one HTML page, which needs no other files."""
        return html_report(of_runtime(self._runtime))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the HTML page to a file."""
        Path(path).write_text(self.html(), encoding="utf-8")

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the page in a frame."""
        page = escape(self.html(), quote=True)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 800px; border: 0" title="zgraph report"></iframe>'

    def __str__(self) -> str:
        runtime = self._runtime
        specs = [s for n, s in runtime.shards.specs.items() if runtime.holds(n)]
        sharded = [s for s in specs if s.shard_dim]
        divided = [s.division for s in specs if s.division is not None]
        parts = f"{len(divided)} divided by {divided[0].ranks}, " if divided else ""
        whole = sum(s.whole_nbytes for s in specs)
        ranks = runtime.sizes.get("dp", 1)
        rank_bytes = sum(
            s.nbytes // s.shape[0] * s.rows if s.shard_dim else s.nbytes for s in specs if s.shape or not s.shard_dim
        )
        mesh = mesh_of(runtime.sizes, runtime.held)
        lines = [
            f"plan: zero {runtime.plan.zero}, backend {runtime.plan.backend}, mesh {mesh}",
            *runtime.told(),
            *([str(runtime.wire)] if runtime.plan.wire.auto else []),
            f"parameters: {len(specs)} ({parts}{len(sharded)} sharded over {ranks}), "
            f"{shown_bytes(whole)} in all, {shown_bytes(rank_bytes)} on this rank",
        ]
        for entry in runtime.entries.values():
            lines += [
                "",
                f"program {entry.name}: {entry.shown}",
                f"  captured in {entry.capture_seconds:.2f} s",
            ]
            for step in entry.programs():
                for record in step.history().records[1:]:
                    counts = ", ".join(f"{k} {v}" for k, v in record.stats.items())
                    lines.append(
                        f"  pass {record.name:18} {record.seconds * 1e3:7.1f} ms  {record.nodes:6} nodes  {counts}"
                    )
        if runtime.buckets is not None:
            lines += ["", str(runtime.buckets.padding)]
        trained = [s for e in runtime.entries.values() for s in e.programs() if s.differentiated]
        if trained:
            outside_bytes = max(step.outside.held for step in trained)
            lines += [
                "",
                *table(
                    [s.history().program for s in trained], runtime.costs.fused, outside_bytes, runtime.memory.measured
                ),
            ]
        lines += self._rounds() + self._disk(trained)
        remarks = runtime.remarks()
        if remarks:
            lines += ["", f"missed, {len(remarks)} remarks, the costliest first:"]
            lines += [f"  {remark}" for remark in remarks[:SHOWN]]
        for part in self.parts:
            lines += [
                "",
                f"{part.name}: {part.nodes} nodes, {part.gathers} gathers, {part.reductions} reductions, {len(part.kernels)} fused kernels",
            ]
            lines += [f"  {k.name}: {', '.join(k.operators)}{_times(k.calls)}" for k in part.kernels]
            if part.library:
                lines.append(f"  library calls: {', '.join(k.name + _times(k.calls) for k in part.library)}")
        return "\n".join(lines)

    def _rounds(self) -> list[str]:
        """Return lines on local steps, and on what the last step of a round sends, once it has run."""
        runtime = self._runtime
        local = runtime.plan.local_steps
        if local is None:
            return []
        how = "as they are" if local.wire == "same" else f"in {local.wire}"
        lines = [
            "",
            f"local steps: {runtime.sizes.get(GROUPS, 1)} groups of {GROUPS} train by themselves; at each step that {local.every} divides all go on "
            f"from an outer step ({local.outer!r}) by the mean of theirs, sent {how}",
        ]
        for name, history in runtime.updater.programs.histories().items():
            stats = next(r.stats for r in history.records[1:] if r.name == "share_rounds")
            if stats["parameters"]:
                whole = stats["bytes"] + stats["bytes_saved"]
                lines.append(
                    f"  {name}: {stats['in_few_bits']} of {stats['parameters']} parameters in few bits; each rank sends "
                    f"{shown_bytes(stats['bytes'])}, exactly it would be {shown_bytes(whole)}"
                )
        return lines

    def _disk(self, trained: list[StepProgram]) -> list[str]:
        """Return lines on what a step is to read from and write to disk, what has been moved so far, and the disk's
        measured rates."""
        runtime = self._runtime
        seen = runtime.tiers.preflight
        if seen is None or not trained:
            return []
        programs = [trained[-1].history().program, *(h.program for h in runtime.updater.programs.histories().values())]
        planned: Counter[str] = Counter()
        for program in programs:
            planned.update(simulate(program, runtime.costs).moved)
        read, written = runtime.tiers.moved_bytes()
        rates = f"{shown_bytes(seen.read_rate)}/s and {shown_bytes(seen.write_rate)}/s before the first step"
        return [
            "",
            f"disk: {seen.folder}, {'past the page cache' if seen.direct else 'through the page cache: the file system has no O_DIRECT'}",
            f"  a step reads {shown_bytes(planned['nvme read'])}, writes {shown_bytes(planned['nvme write'])}; {rates}",
            f"  so far read {shown_bytes(read)}, written {shown_bytes(written)}",
        ]


def _part(executable: Executable) -> PartReport:
    program: Program = executable.program
    starts = [n for n in program.graph.nodes if collectives.is_start(n)]
    return PartReport(
        program.name,
        len(program.graph.nodes),
        sum(info(n).role is Role.GATHER for n in starts),
        sum(info(n).role is Role.REDUCE for n in starts),
        executable.kernels,
        executable.library,
    )


def _times(calls: int) -> str:
    return f" ({calls} times)" if calls != 1 else ""
