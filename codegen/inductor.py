"""`backend="inductor"`: Inductor makes fused kernels of a program, in the order that passes decided.

The order of collectives and library calls is pinned (see `inductor_code.order_keeper`) and read back from the
generated code. The strides that Inductor chose for the forward's saved values are those that the backward is compiled
for.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import fx

from zgraph.codegen.code_cache import Code, CodeCache
from zgraph.codegen.cpu_gemm import library
from zgraph.codegen.executable import Executable, Kernel, lowered
from zgraph.codegen.join_sections import GeneratedCode, UnknownFormError, join
from zgraph.codegen.sections import Section, sections
from zgraph.codegen.stored_lookups import store_shared_lookups
from zgraph.errors import LayoutError, LoweringError
from zgraph.program import collectives, transfers_to_host
from zgraph.program.layout import laid_out
from zgraph.program.node import has_info, info
from zgraph.program.program import InputRole, OutputRole, Program
from zgraph.program.sizes import guards_of, remade
from zgraph.torch_compat import compile_lock, fx_graphs, inductor_code, symbols
from zgraph.torch_compat.kernel_files import kernels_together, places_of

logger = logging.getLogger(__name__)

# Inputs that the caller of a program drops when it passes them in: their buffers may be reused.
_LET_GO = (InputRole.SAVED, InputRole.IN_FLIGHT, InputRole.RECEIVED, InputRole.RETURNED)


def compile_inductor(
    program: Program,
    groups: dict[str, str],
    *,
    is_backward: bool = False,
    fix_saved: bool = False,
    combine: bool = False,
    round_each: bool = False,
    hold: bool = True,
    kept: CodeCache | None = None,
) -> Executable:
    """Compile `program`, or take its code from the cache `kept`; `groups` gives each mesh dimension's process group by
    name.

    With `fix_saved` saved values keep the strides that they have in the program; else Inductor chooses. With `combine`
    kernels that do not depend on each other are launched as one (on CUDA). With `round_each` results are rounded to
    low dtypes as often as single operators would round them. With `hold` a dead buffer may be kept for the next one of
    its size; without, the live bytes are those that forecasts say. Raises `LoweringError` with the operator and the
    user's line if Inductor can't lower it, or if the generated code communicates in another order than the program:
    nothing falls back.
    """
    how = _How(groups, is_backward, fix_saved, combine, round_each, hold)
    key = kept.key(program, asdict(how)) if kept is not None else None
    code = kept.take(key) if kept is not None and key is not None else None
    if code is not None and (loaded := _loaded(program, code)) is not None:
        return loaded
    with kernels_together() as waiting:
        compiled = _compiled(program, how)
        executable = compiled.executable
        if kept is not None and key is not None:
            waiting.then(functools.partial(_keep, compiled, kept, key))
    if not program.sizes:
        return executable
    names = tuple(s.name for s in program.sizes.symbols)
    executable.function = SizedFunction(program, how, executable.sized, names, [(compiled.fits, executable.function)])
    return executable


@dataclass(frozen=True)
class _How:
    """The options with which a program is compiled: see `compile_inductor`."""

    groups: dict[str, str]  # each mesh dimension's process group, by name
    is_backward: bool  # the program is a backward
    fix_saved: bool  # saved values keep the program's strides
    combine: bool  # independent kernels are launched as one (on CUDA)
    round_each: bool  # round to low dtypes as often as single operators would
    hold: bool  # dead buffers may be kept for reuse


@dataclass(frozen=True)
class _Compiled:
    executable: Executable  # the program, ready to run when its kernels are compiled
    fits: Callable[..., bool]  # whether its kernels are right at given sizes
    loader: _Loader  # what has loaded its code


class _Loader:
    """Loads the code of a program, and edited versions of it, whose kernels are then those of the first."""

    def __init__(self, compiled: Any, record: inductor_code.CodeRecord | None) -> None:
        self._compiled = compiled
        self._record = record  # what another process needs to run the code; None where that can't be
        self._scope: dict[str, Any] = {}  # the names of the code that was loaded first

    @property
    def record(self) -> inductor_code.CodeRecord | None:
        """What another process needs to run the code; None where that can't be. For code whose kernels are compiled."""
        places = places_of(self._scope)
        return replace(self._record, places=places) if self._record is not None and places is not None else None

    def __call__(self, source: str, names: dict[str, Any]) -> Callable[[list[Any]], Sequence[Any]]:
        """Return the callable of the code with this source and some names in its scope.

        Generated kernels assume that results of torch's own operators have the strides of their fake implementations:
        other results are laid out so.
        """
        laid = _FALLBACK_RESULT.sub(
            rf"\g<indent>\g<name> = {_AS_PROMISED}(\g<name>, \g<size>, \g<strides>, '\g<of>')", source
        )
        known = places_of(self._scope) if self._scope else getattr(self._record, "places", ())
        names = {_AS_PROMISED: _as_promised, **names}
        function, scope = inductor_code.rebuild_inductor(self._compiled, library, laid, names, known or ())
        self._scope = self._scope or scope
        return function


def _keep(compiled: _Compiled, kept: CodeCache, key: str) -> None:
    record = compiled.loader.record
    if record is not None:
        kept.keep(key, Code.of(compiled.executable, record))
    else:
        kept.refuse(compiled.executable.program, "Inductor's code of it can't be loaded by another process")


class SizedFunction:
    """The function of a program with symbolic sizes.

    Inductor specializes on the sizes that it is given, and records what it assumed of them. For sizes that break these
    assumptions the same program is compiled once more, on this rank alone: the collectives are the program's, and do
    not depend on it.
    """

    def __init__(
        self,
        program: Program,
        how: _How,
        at: tuple[int, ...],
        names: tuple[str, ...],
        functions: list[tuple[Callable[..., bool], Callable[[list[Any]], Sequence[Any]]]],
    ) -> None:
        self.program, self.how, self.at, self.names, self.made = program, how, at, names, functions

    def __call__(self, values: list[Any]) -> Sequence[Any]:
        point = [values[at] for at in self.at]
        for fits, function in self.made:
            if fits(*point):
                return function(values)
        sizes = dict(zip(self.names, point, strict=True))
        logger.info("%s: compiled once more, for sizes like %s", self.program.name, sizes)
        with compile_lock.ONE_AT_A_TIME:
            compiled = _compiled(self.program, self.how, sizes)
        self.made.append((compiled.fits, compiled.executable.function))
        return compiled.executable.function(values)


def _compiled(program: Program, how: _How, point: Mapping[str, int] | None = None) -> _Compiled:
    """Compile a program; one with symbolic sizes is compiled for sizes like those of `point`."""
    groups = how.groups
    decided = remade(program, point) if program.sizes else program
    known = symbols.known(decided.fake_mode.shape_env) if program.sizes else 0
    ready = lowered(decided, groups)
    held_inputs = [n for p, n in ready.input_items() if p.role not in _LET_GO]
    fixed = [
        i
        for i, (port, node) in enumerate(program.output_items())
        if how.fix_saved or program.sizes or port.role is not OutputRole.SAVED or _in_flight(node)
    ]
    try:
        function, source, strides = _generated(ready, held_inputs, fixed, how)
    except Exception as error:
        raise _lowering_error(error, program) from error
    _check_order(source, program, ready)
    at = {node: i for i, node in enumerate(program.graph.nodes)}
    joined = isinstance(function, GeneratedCode)
    load = _Loader(function, function.record if joined else inductor_code.record_of(function))
    if joined or _IS_LOADED_ANEW.search(source):
        function = load(source, {})
    executable = Executable(
        program,
        function,
        source,
        kernels(source, program),
        library_calls(source),
        strides,
        tuple((line, at[node]) for line, node in launch_lines(source, program)),
        load,
    )
    return _Compiled(executable, _fits(decided, known), load)


def _loaded(program: Program, code: Code) -> Executable | None:
    """Return an executable of cached code; None, with a warning, where the code can't be loaded here."""
    load = _Loader(code.record, code.record)
    try:
        function = load(code.source, {})
    except Exception as error:  # (a missing library of the system, a folder that nothing may be run from)
        logger.warning("the kept code of %s can't be loaded, and is compiled anew: %s", program.name, error)
        return None
    return Executable(program, function, code.source, code.kernels, code.library, list(code.strides), code.calls, load)


def _generated(ready: Program, held: list[fx.Node], fixed: list[int], how: _How) -> tuple[Any, str, list[Any]]:
    """Return (what Inductor compiled, its source, the strides of the outputs) of a program.

    A program with equal sections (see `sections`) is compiled once for each kind of section, and is returned as
    `GeneratedCode` without a function; any other one is compiled whole.
    """
    store_shared_lookups(ready)
    results = ready.output_values()
    equal_sections = sections(ready, set(held), {results[at] for at in fixed})
    if equal_sections:
        try:
            return _of_sections(ready, equal_sections, how)
        except UnknownFormError as error:
            logger.warning("%s: Inductor compiles it whole: of the code for its sections, %s", ready.name, error)
    return _of_graph(ready.module, ready, held, fixed, how)


def _of_sections(ready: Program, sections: list[Section], how: _How) -> tuple[GeneratedCode, str, list[Any]]:
    codes: dict[str, GeneratedCode] = {}
    strides: dict[fx.Node, Any] = {}
    chosen: dict[str, list[Any]] = {}
    for section in sections:
        if section.key not in codes:
            module, at = section.module(ready.module), section.names()
            by_name = {n.name: n for n in module.graph.nodes}
            fixed = [i for i, n in enumerate(section.gives) if n in section.fixed]
            held_inputs = [by_name[at[n]] for n in section.takes if n in section.held]
            compiled, source, chosen[section.key] = _of_graph(module, ready, held_inputs, fixed, how)
            codes[section.key] = GeneratedCode(
                source,
                inductor_code.constants_of(compiled),
                compiled.inputs_to_check,
                sorted(compiled.mutated_input_idxs),
                inductor_code.record_of(compiled),
            )
        strides.update(zip(section.gives, chosen[section.key], strict=True))
    joined = join(ready, sections, codes)
    outputs = [strides.get(n) or tuple(n.meta["val"].stride()) for n in ready.output_values()]
    return joined, joined.source, outputs


def _of_graph(
    module: fx.GraphModule, ready: Program, held: list[fx.Node], fixed: list[int], how: _How
) -> tuple[Any, str, list[Any]]:
    """Compile one graph, that of a program or of a section; return as `_generated` does."""
    graph = module.graph
    inductor_code.name_origins(graph)
    inductor_code.renew_input_values(graph)
    inductor_code.name_held(held)
    inputs = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    graph.output_node().meta["user_visible_output_idxs"] = fixed
    # (for the key of Inductor's cache, which leaves out what nodes carry)
    module.__dict__["fixed_outputs"] = tuple(fixed)
    module.__dict__["stored"] = fx_graphs.with_fixed_strides(graph)
    return inductor_code.compile_with_inductor(
        module,
        inputs,
        ready.fake_mode,
        how.is_backward,
        how.combine,
        how.round_each,
        library=library,
        reuse=how.hold and not any(transfers_to_host.is_host_transfer(n) for n in graph.nodes),
        chunks=tuple((n.name, chunk) for n in graph.nodes if has_info(n) and (chunk := info(n).chunk) is not None),
        copies=tuple(n.name for n in graph.nodes if has_info(n) and info(n).copy_of is not None),
    )


def _fits(program: Program, known: int) -> Callable[..., bool]:
    """Return a function that says at which sizes all that Inductor has asked of them, after the first `known` guards,
    has the same answers."""
    if not program.sizes:
        return lambda: True
    conditions = [g.condition for g in guards_of(program.fake_mode.shape_env)[known:]]
    names = tuple(s.name for s in program.sizes.symbols)
    return symbols.evaluator(" and ".join(f"({c})" for c in conditions) or "True", names)


_AS_PROMISED = "zgraph_as_promised"
_FALLBACK_RESULT = re.compile(
    r"^(?P<indent> +)assert_size_stride\((?P<name>\w+), (?P<size>\((?:[^()]|\([^()]*\))*\)), "
    r"(?P<strides>\((?:[^()]|\([^()]*\))*\)), "
    r"'(?P<of>torch\.ops\.(?!_c10d_functional|zgraph)[\w.]+)'\)",
    re.M,
)


# Code with a call of torch's own operators, or with C++ kernels, which Inductor has not compiled.
_IS_LOADED_ANEW = re.compile(rf"{_FALLBACK_RESULT.pattern}|^\w+ = async_compile\.cpp_pybinding\(", re.M)


def _as_promised(value: torch.Tensor, size: tuple[int, ...], strides: tuple[int, ...], operator: str) -> torch.Tensor:
    if value.size() != size:
        raise LayoutError(
            f"{operator} gave a tensor of size {tuple(value.size())}, where its fake implementation gives {size}",
            hint='use backend="eager", and report this: it is a fault of this torch',
        )
    return value if value.stride() == strides else laid_out(value, strides)


def adopt_strides(backward: Program, forward: Executable) -> None:
    """Give the backward's saved inputs the strides that the forward really returns."""
    if not forward.strides:
        return
    chosen = {
        port.name: strides
        for port, strides in zip(forward.program.outputs, forward.strides, strict=True)
        if port.role is OutputRole.SAVED and strides is not None
    }
    for port, node in backward.input_items():
        if port.role is InputRole.SAVED and port.name in chosen:
            val = node.meta["val"]
            strides = tuple(int(s) for s in chosen[port.name])
            if strides != val.stride():
                with backward.fake_mode:
                    node.meta["val"] = val.as_strided(val.size(), strides)


def _in_flight(saved: fx.Node) -> bool:
    """Return whether a collective on this value is running when the program ends, or the value is offloaded.

    Other strides would need a copy, made during the transfer or outside the device.
    """
    if info(saved).home is not None:
        return True
    starts = [n for n in (saved, *saved.users) if collectives.is_start(n)]
    return any(collectives.wait_of(start) is None for start in starts)


# -- what the generated code says ------------------------------------------------------------------------------------
_DEFINITION = re.compile(r"^(?P<name>(?:cpp|triton)\w*?_fused_(?P<operators>\w*?)_?\d+) = async_compile\.", re.M)
_EXTERN = re.compile(r"\bextern_kernels\.(\w+)\(")
_FALLBACK = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)\.\w+\(")
_COMMENT = re.compile(r"# (?:Topologically Sorted|Unsorted) Source Nodes: \[([^\]]*)\]")
_COLLECTIVES = "_c10d_functional"


def _start(lines: list[str]) -> int:
    """Return the line at which the generated `call` function begins; the kernels' own code is above."""
    return next((i for i, line in enumerate(lines) if re.match(r"\s*def call\(", line)), 0)


def _body(source: str) -> list[str]:
    lines = source.splitlines()
    return lines[_start(lines) :]


def kernels(source: str, program: Program) -> tuple[Kernel, ...]:
    """Return the fused kernels of Inductor's generated code, each with the operators that it computes.

    A kernel's name is its operators, sorted and joined by underscores; the program's own operators tell where one
    ends. These are the model's operators, before their decomposition.
    """
    known = {_base(str(n.target)) for n in program.graph.nodes}
    known |= {
        _base(str(n.meta["original_aten"])) for n in program.graph.nodes if n.meta.get("original_aten") is not None
    }
    body = "\n".join(_body(source))
    fused_kernels = []
    for match in _DEFINITION.finditer(source):
        calls = len(re.findall(rf"\b{match['name']}(?:\.run)?\(", body))
        fused_kernels.append(
            Kernel(match["name"], _operators(match["operators"], known) or (match["operators"],), calls)
        )
    return tuple(fused_kernels)


def library_calls(source: str) -> tuple[Kernel, ...]:
    """Return what the generated code calls that Inductor did not generate: BLAS products and torch's own kernels."""
    counts: dict[tuple[str, str], int] = {}
    for line in _body(source):
        if line.lstrip().startswith("#"):
            continue
        for name in _EXTERN.findall(line):
            counts[f"extern_kernels.{name}", name] = counts.get((f"extern_kernels.{name}", name), 0) + 1
        call = line.split("assert_size_stride")[0].split("assert_alignment")[0]
        for namespace, name in _FALLBACK.findall(call):
            if namespace != _COLLECTIVES:
                key = (f"torch.ops.{namespace}.{name}", name)
                counts[key] = counts.get(key, 0) + 1
    return tuple(Kernel(name, (operator,), calls) for (name, operator), calls in counts.items())


def launches(source: str, program: Program) -> list[fx.Node]:
    """Return the program's nodes that the generated code runs by a call of their own, in the order of the calls.

    These are collectives, products and other library calls.
    """
    return [node for _, node in launch_lines(source, program)]


def launch_lines(source: str, program: Program) -> list[tuple[int, fx.Node]]:
    """Return (line of the call from 0, node) of each of these `launches`."""
    by_name = {n.name: n for n in program.graph.nodes if n.op == "call_function"}
    calls: list[tuple[int, fx.Node]] = []
    origins: list[str] = []
    lines = source.splitlines()
    for at, line in enumerate(lines[_start(lines) :], _start(lines)):
        if comment := _COMMENT.search(line):
            origins = comment.group(1).split(", ")
        elif origins and (_EXTERN.search(line) or re.search(r"= torch\.ops\.|^\s*torch\.ops\.", line)):
            calls += [(at, by_name[n]) for n in origins if n in by_name][-1:]  # (a product's views stand before it)
            origins = []
    return calls


def _check_order(source: str, program: Program, ready: Program) -> None:
    """Refuse generated code that starts or awaits collectives in another order than the program: ranks would wait for
    each other for ever.

    A bucket is one collective in `ready`, which is what was compiled: its first member stands for it.
    """
    compiled_names = {n.name for n in ready.graph.nodes}
    expected = [n for n in program.graph.nodes if collectives.is_start(n) or collectives.is_wait(n)]
    expected = [n for n in expected if n.name in compiled_names]
    actual = [n for n in launches(source, program) if collectives.is_start(n) or collectives.is_wait(n)]
    if actual == expected:
        return
    at = next(
        (i for i, (a, b) in enumerate(zip(actual, expected, strict=False)) if a is not b),
        min(len(actual), len(expected)),
    )
    node = expected[at] if at < len(expected) else actual[at]
    raise LoweringError(
        f"Inductor's code for {program.name} communicates in another order than the program: the first that differs is {node.name!r}",
        where=f"{info(node).source or 'unknown line'} (module {info(node).module or 'root'})",
        why=f"the program has {[n.name for n in expected[at : at + 3]]} there, the code {[n.name for n in actual[at : at + 3]]}",
        hint='use backend="eager", and report this: it is a fault of zgraph or of this torch',
    )


def _base(target: str) -> str:
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else target


def _operators(text: str, known: set[str]) -> tuple[str, ...]:
    """Split a kernel's name: "add__to_copy" -> ("add", "_to_copy"); the first split, longest names first, that uses up
    the text."""
    if not text:
        return ()
    for end in sorted(
        (i for i in range(1, len(text) + 1) if text[:i] in known and (i == len(text) or text[i] == "_")),
        reverse=True,
    ):
        rest = _operators(text[end + 1 :], known)
        if rest or end == len(text):
            return (text[:end], *rest)
    return ()


def _lowering_error(error: Exception, program: Program) -> LoweringError:
    text = str(error)
    target = re.search(r"target: (\S+)", text)
    name = target.group(1) if target else None
    places = list(
        dict.fromkeys(
            f"{info(n).source or 'unknown line'} (module {info(n).module or 'root'})"
            for n in program.graph.nodes
            if name and str(n.target) == name
        )
    )
    shown = "\n".join(places[:5]) + (f"\n… and {len(places) - 5} more" if len(places) > 5 else "")
    return LoweringError(
        f"Inductor can't compile {program.name}" + (f": operator {name}" if name else ""),
        where=shown or None,
        why=f"{type(error).__name__}: {text.splitlines()[0] if text else ''}",
        hint='use backend="eager" for this model, or write this part with other operators',
    )
