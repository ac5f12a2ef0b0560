"""`backend="eager"`: the program operator by operator, as PyTorch itself would run it.

[Note: promised strides] An operator's real result may have other strides than its fake one, for which the program was
captured. So in its first run a program looks at each result; from then on it lays just those out as promised that were
not, and looks at no other. Inputs are laid out before a program is called (see `Executable.run`).
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from zgraph.codegen.executable import Executable, lowered, positions_of_sizes
from zgraph.codegen.profiled import run_profiled
from zgraph.program.aliases import mutates
from zgraph.program.layout import Strides, has_strides, laid_out, promised, promised_at
from zgraph.program.program import Program
from zgraph.torch_compat import fx_graphs

_KEEP = "zgraph_as_promised"
_CALL = re.compile(r"    (\w+)(?: : [^=]+)? = ")


def compile_eager(program: Program, groups: dict[str, str]) -> Executable:
    """Make a callable of `program`; `groups` gives each mesh dimension's process group by name."""
    ready = lowered(program, groups)
    fx_graphs.boxed(ready.graph)
    ready.module.recompile()
    code = SizedCode(program, ready.module) if program.sizes else Code(program.name, ready.module)
    return Executable(program, code, code.source, calls=_calls(code.source, program), rebuild=code.rebuild)


class Code:
    """The generated code of a program, which lays each node's result out with the strides that its fake value has."""

    def __init__(self, name: str, module: fx.GraphModule) -> None:
        self.name, self.module = name, module
        self.source = module.code  # (generates the code, so that `forward` below is the one of this source)
        self._forward: Any = module.forward
        nodes = [n for n in module.graph.nodes if n.op == "call_function"]
        self._strides: dict[str, Strides] = {
            n.name: s for n in nodes if not mutates(n) and (s := promised(n)) is not None
        }
        self._others: dict[str, None] | None = None  # nodes whose results have other strides; None before the first run

    def __call__(self, values: list[Any]) -> Sequence[Any]:
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            return run_profiled(self.module, values, self._as_promised)
        if self._others is None:
            return self._first(values)
        return self._forward(values)  # type: ignore[no-any-return]

    def rebuild(self, changed: str, names: dict[str, Any]) -> Callable[[list[Any]], Sequence[Any]]:
        """Return a callable of `changed`, an edited version of this source, with `names` in its scope."""
        return self._build(changed, self._every if self._others is None else self._others, names)

    def observed_by(self, seen: Callable[[str, Any], None]) -> Callable[[list[Any]], Sequence[Any]]:
        """Return a callable of this code that calls `seen(node name, value)` for each value as soon as it is computed.

        The value is already laid out as its readers get it.
        """

        def show(name: str, value: Any) -> Any:
            result = self._as_promised(name, value)
            seen(name, result)
            return result

        return self._build(self.source, self._every, {_KEEP: show})

    def _first(self, values: list[Any]) -> Sequence[Any]:
        others: dict[str, None] = {}

        def note(name: str, value: torch.Tensor) -> torch.Tensor:
            if not has_strides(value, self._strides[name]):
                others[name] = None
            return self._as_promised(name, value)

        results = self._build(self.source, self._strides, {_KEEP: note})(values)
        if others:
            self._forward = self._build(self.source, others, {})
        self._others = others
        return results

    def _as_promised(self, name: str, value: Any) -> Any:
        strides = self._strides.get(name)
        return value if strides is None else laid_out(value, strides)

    @property
    def _every(self) -> Collection[str]:
        """The nodes whose results have promised strides."""
        return self._strides

    def _build(
        self, source: str, watched: Collection[str], names: dict[str, Any]
    ) -> Callable[[list[Any]], Sequence[Any]]:
        """Return a callable of a source in which the results of the `watched` nodes are laid out with their promised
        strides.

        The layout call is put on the line that computes the result: errors find nodes by their lines.
        """
        lines = source.splitlines()
        for at, line in enumerate(lines):
            match = _CALL.match(line)
            if match and match[1] in watched:
                lines[at] = f"{line}; {match[1]} = {_KEEP}({match[1]!r}, {match[1]})"
        scope = {**self.module.forward.__func__.__globals__, _KEEP: self._as_promised, **names}  # type: ignore[attr-defined]
        exec(compile("\n".join(lines), f"<{self.name}>", "exec"), scope)
        return functools.partial(scope["forward"], self.module)


MOST_POINTS = 4096  # combinations of sizes that are remembered as checked


class SizedCode(Code):
    """The code of a program with symbolic sizes, whose promised strides depend on the sizes of a call.

    Results are checked in the first run at each combination of sizes.
    """

    def __init__(self, program: Program, module: fx.GraphModule) -> None:
        super().__init__(program.name, module)
        names = tuple(s.name for s in program.sizes.symbols)
        self._at = positions_of_sizes(program)
        nodes = [n for n in module.graph.nodes if n.op == "call_function" and not mutates(n)]
        self._formulas = {n.name: f for n in nodes if (f := promised_at(n, names)) is not None}
        self._others = {}
        self._points: set[tuple[int, ...]] = set()
        self._now = threading.local()  # (the sizes of the call that a thread is in)
        self._found: dict[str, None] = {}
        self._looking = self._build(self.source, self._every, {_KEEP: self._look})
        self._forward = self._build(self.source, (), {})

    def __call__(self, values: list[Any]) -> Sequence[Any]:
        point = tuple(values[at] for at in self._at)
        if point in self._points or torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            self._now.point = point
            return super().__call__(values)
        results = self._looking(values)
        if len(self._points) >= MOST_POINTS:
            self._points.clear()
        self._points.add(point)
        if self._found.keys() - (self._others or {}).keys():
            self._others = dict(self._found)
            self._forward = self._build(self.source, self._others, {})
        return results

    @property
    def _every(self) -> Collection[str]:
        return [*self._strides, *self._formulas]

    def _promised(self, name: str) -> Strides | None:
        formula = self._formulas.get(name)
        return formula(*self._now.point) if formula is not None else self._strides.get(name)

    def _as_promised(self, name: str, value: Any) -> Any:
        strides = self._promised(name)
        return value if strides is None else laid_out(value, strides)

    def _look(self, name: str, value: torch.Tensor) -> torch.Tensor:
        strides = self._promised(name)
        if strides is not None and not has_strides(value, strides):
            self._found[name] = None
        return self._as_promised(name, value)

    def _build(
        self, source: str, watched: Collection[str], names: dict[str, Any]
    ) -> Callable[[list[Any]], Sequence[Any]]:
        function = super()._build(source, watched, names)

        def at_point(values: list[Any]) -> Sequence[Any]:
            self._now.point = tuple(values[at] for at in self._at)
            return function(values)

        return at_point


def _calls(source: str, program: Program) -> tuple[tuple[int, int], ...]:
    """Return (line of the source, position in the graph) of each operator."""
    at = {n.name: i for i, n in enumerate(program.graph.nodes) if n.op == "call_function"}
    matches = [(line, _CALL.match(text)) for line, text in enumerate(source.splitlines())]
    return tuple((line, at[match[1]]) for line, match in matches if match and match[1] in at)
