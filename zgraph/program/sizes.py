"""Sizes of a program that differ from call to call: symbols, the conditions on them, and programs at fixed sizes.

A program with symbolic sizes has one input for each symbol (role SIZE, an int). Every other size is arithmetic on
these: what is saved for a backward is never a size. Tensors' fake values have expressions of the symbols as sizes;
torch answers a question about them (is this size larger than that one?) by adding a guard, and the program then holds
only where the guard does. So nothing here asks: `static` is for comparing, `typical` for deciding about time,
`largest` for deciding about memory, and the verifier (`zgraph.passes.verifier`) refuses a pass that added a guard.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from zgraph.program.node import info, set_info
from zgraph.torch_compat import fake_tensors, symbols
from zgraph.torch_compat.products_of_sizes import add_known
from zgraph.torch_compat.symbols import Element, is_symbolic

__all__ = [
    "NO_SIZES",
    "ProgramSize",
    "SizeGuard",
    "Sizes",
    "is_stand_in",
    "is_symbolic",
    "largest",
    "part_of",
    "remade",
    "stand_in",
    "static",
    "static_at",
    "stood_for",
    "text",
    "typical",
]


@dataclass(frozen=True)
class ProgramSize:
    """A size that differs from call to call."""

    name: str  # its name in texts and conditions
    low: int  # the smallest value
    high: int | None  # the largest value, None where nothing bounds it
    typical: int  # the value for which decisions about time are made
    index: int  # the flat input of a call that has it
    dim: int  # the dimension of that input
    where: str | None = None  # the user's line that bounds it
    # the elements of that input whose product it is; empty for the size of a dimension
    elements: tuple[Element, ...] = ()
    factors: tuple[str, ...] = ()  # the names of the sizes that these elements are

    @property
    def range(self) -> str:
        """In words: "2 to 256"."""
        return f"{self.low} to {self.high}" if self.high is not None else f"{self.low} and more"

    def at(self, point: Mapping[str, int]) -> int:
        """Return its value where sizes have those of a point, which may leave out products of others."""
        return point[self.name] if self.name in point else math.prod(point[name] for name in self.factors)


@dataclass(frozen=True)
class SizeGuard:
    """A condition on sizes under which a program holds."""

    condition: str  # as a Python expression
    where: str | None = None  # the user's line that made it a condition


@dataclass(frozen=True)
class Sizes:
    """All sizes of a program that differ from call to call, and the conditions on them; empty (and false) if all are
    numbers."""

    symbols: tuple[ProgramSize, ...] = ()  # the sizes that are inputs of the program
    guards: tuple[SizeGuard, ...] = ()  # the conditions under which it holds
    # Sizes that are no inputs of the program, because guards make them arithmetic on the symbols.
    tied: tuple[ProgramSize, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.symbols)

    @property
    def every(self) -> tuple[ProgramSize, ...]:
        return (*self.symbols, *self.tied)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(s.name for s in self.every)

    @property
    def typical(self) -> dict[str, int]:
        """The point at which decisions about time are made."""
        return {s.name: s.typical for s in self.every}

    @property
    def unbounded(self) -> tuple[str, ...]:
        """The names of the sizes that nothing bounds (without products of others)."""
        return tuple(s.name for s in self.every if s.high is None and len(s.factors) < 2)

    @property
    def largest(self) -> dict[str, int]:
        """The point at which decisions about memory are made."""
        most = {s.name: s.typical if s.high is None else s.high for s in self.every if len(s.factors) < 2}
        return {s.name: s.at(most) if s.high is None else s.high for s in self.every}

    def point(self, given: Mapping[str, int]) -> dict[str, int]:
        """Return all sizes, by name, where some are given: others are arithmetic on these, or typical. (A product that is
        given, and is not that of its factors, is no point at which a program holds: see `hold`.)"""
        point = {s.name: s.typical for s in self.every if len(s.factors) < 2} | dict(given)
        for name, value in self._equal.items():
            if name not in given:
                point[name] = int(value(*(s.at(point) for s in self.every)))
        return {s.name: s.at(point) for s in self.every}

    @property
    def needed(self) -> tuple[str, ...]:
        """The names of the sizes that decide all: without products of others, and those that guards make arithmetic on
        others."""
        return tuple(s.name for s in self.every if len(s.factors) < 2 and s.name not in self._equal)

    @functools.cached_property
    def _equal(self) -> dict[str, Callable[..., Any]]:
        """The sizes that guards make arithmetic on others (rows of all images), as functions of all sizes in order."""
        sums = {}
        for guard in self.guards:
            name, equal, arithmetic = guard.condition.partition(" == ")
            if equal and name in self.names and name not in arithmetic and name not in sums:
                sums[name] = symbols.evaluator(arithmetic, self.names)
        return {s.name: sums[s.name] for s in self.tied if s.name in sums and not s.elements}

    def of_call(self, flat: Any) -> dict[str, int]:
        """Return the sizes of a call by name, from its flat inputs."""
        return dict(zip(self.names, self.key(flat), strict=True))

    def key(self, flat: Any) -> tuple[int, ...]:
        """Return the sizes of a call in the order of `every`, from its flat inputs."""
        return tuple(symbols.numbers_at(self.every, flat))

    @functools.cached_property
    def _hold(self) -> Callable[..., bool]:
        conditions = [f"{s.low} <= {s.name}" + (f" <= {s.high}" if s.high is not None else "") for s in self.every]
        conditions += [f"({g.condition})" for g in (*self._products, *self.guards)]
        return symbols.evaluator(" and ".join(conditions), self.names)

    @functools.cached_property
    def _products(self) -> tuple[SizeGuard, ...]:
        """What holds of products of sizes, in each call by itself."""
        products = [s for s in self.every if len(s.factors) > 1 and set(s.factors) <= set(self.names)]
        return tuple(SizeGuard(f"{s.name} == {' * '.join(s.factors)}") for s in products)

    def hold(self, point: Mapping[str, int]) -> bool:
        """Return whether a program with these sizes holds at a point."""
        return bool(self._hold(*(s.at(point) for s in self.every)))

    def broken(self, point: Mapping[str, int]) -> tuple[str, str | None]:
        """Return (the first condition that does not hold at a point, the user's line that made it one)."""
        for s in self.every:
            if not s.low <= s.at(point) <= (s.high if s.high is not None else s.at(point)):
                return f"{s.name} is {s.range}", s.where
        values = [s.at(point) for s in self.every]
        for guard in (*self._products, *self.guards):
            if not symbols.evaluator(guard.condition, self.names)(*values):
                return guard.condition, guard.where
        return "", None


NO_SIZES = Sizes()

# The names of symbols, by their shape environment.
_names: weakref.WeakKeyDictionary[Any, dict[Any, str]] = weakref.WeakKeyDictionary()
_stand_ins: weakref.WeakKeyDictionary[Any, symbols.StandIns] = weakref.WeakKeyDictionary()
# The number of guards that each environment had when it was sealed.
_sealed: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def static(size: Any) -> Any:
    """Return a size as a number or an expression, which can be hashed, and compared with another without adding a
    guard."""
    return symbols.expression(size)


def typical(size: Any) -> int:
    """Return a size at the typical point of its program."""
    return size if type(size) is int else symbols.hint(size)


def largest(size: Any) -> int:
    """Return a size at the largest sizes of its program; symbols that nothing bounds are at their typical values."""
    return size if type(size) is int else symbols.most(size)


def stand_in(size: Any) -> int:
    """Return a number that stands for a size where axes are compared and cut; a size that is a number stands for
    itself.

    Sizes are equal, and one is a multiple of another, if these numbers are (see `symbols.StandIns`).
    """
    if type(size) is int:
        return size
    return _stand_ins.setdefault(symbols.environment(size), symbols.StandIns()).of(size)


def is_stand_in(number: int) -> bool:
    """Return whether a number stands for a symbolic size."""
    return number > symbols.FIRST_STAND_IN


def stood_for(number: int, mode: Any) -> Any:
    """Return the size, in a fake mode, that a number stands for."""
    env = getattr(mode, "shape_env", None)
    return _stand_ins[env].size(number, env) if env in _stand_ins else number


def part_of(size: Any, count: int) -> Any:
    """Return one of `count` equal parts of a size that is divisible by it."""
    if type(size) is int:
        return size // count
    env = symbols.environment(size)
    return _stand_ins.setdefault(env, symbols.StandIns()).size(stand_in(size) // count, env)


def text(size: Any) -> str:
    """Return a size as texts show it: "12", "2*seq"."""
    if not is_symbolic(size):
        return str(size)
    return symbols.text(size.node.expr, _names.get(symbols.environment(size), {}))


def texts(sizes: Any) -> str:
    """Return a shape as texts show it: "[2, seq]"."""
    return f"[{', '.join(map(text, sizes))}]"


def formula(numbers: Sequence[Any], names: tuple[str, ...]) -> Callable[..., tuple[int, ...]]:
    """Return several numbers of a program as one function of its sizes by these names, in this order."""
    return symbols.evaluator(f"({''.join(f'{text(n)}, ' for n in numbers)})", names)


def number_node(graph: fx.Graph, size: Any, beside: Collection[fx.Node] = ()) -> fx.Node | int:
    """Return the node of a program's graph that computes a size, or an int where the size is a number.

    Nodes in `beside` are left out. Where there is none the arithmetic is inserted behind the inputs.
    """
    expr = symbols.expression(size)
    if isinstance(expr, int):
        return expr
    numbers = [n for n in graph.nodes if isinstance(n.meta.get("val"), torch.SymInt) and n not in beside]
    for node in numbers:
        if symbols.expression(node.meta["val"]) == expr:
            return node
    places = {symbols.expression(n.meta["val"]): n for n in numbers if n.op == "placeholder"}
    last = graph.find_nodes(op="placeholder")[-1]
    before = set(graph.nodes)
    with graph.inserting_before(last.next):
        new_node = symbols.calculation(expr, places, graph)
    for node in graph.nodes:
        if node not in before:
            evaluate_number(node, next(iter(places.values())))
    return new_node


def evaluate_number(node: fx.Node, like: fx.Node) -> None:
    """Give a node of arithmetic on sizes its value, and the record of `like`."""
    args: Any = fx.node.map_arg(node.args, lambda a: a.meta["val"])
    kwargs: Any = fx.node.map_arg(node.kwargs, lambda a: a.meta["val"])
    node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
    set_info(node, info(like))


def with_nodes(graph: fx.Graph, arguments: Any) -> Any:
    """Return a node's arguments with nodes in place of symbolic sizes."""
    return fx.node.map_aggregate(arguments, lambda a: number_node(graph, a) if isinstance(a, torch.SymInt) else a)


def named(mode: Any, sizes: Mapping[str, Any]) -> None:
    """Set the names by which texts show the symbols of a fake mode."""
    named_symbols(mode.shape_env, symbols.symbols_of(sizes))


def named_symbols(env: Any, names: Mapping[Any, str]) -> None:
    """Set the names by which texts show these symbols of an environment."""
    _names[env] = dict(names)


class _Program(Protocol):
    fake_mode: Any
    sizes: Sizes

    @property
    def graph(self) -> Any: ...
    def snapshot(self) -> Any: ...
    def recompile(self) -> None: ...


P = TypeVar("P", bound=_Program)


def remade(program: P, typical: Mapping[str, int] | None = None) -> P:
    """Return a copy with a shape environment of its own, decided for at another point: guards added to it do not reach
    the original."""
    point = typical or program.sizes.typical
    mode, sizes = new_mode(program.sizes.symbols, point)
    given = tuple(replace(s, typical=s.at(point)) for s in program.sizes.symbols)
    return converted(program, mode, sizes, replace(program.sizes, symbols=given))


def new_mode(sizes: Sequence[ProgramSize], point: Mapping[str, int]) -> tuple[Any, dict[str, torch.SymInt]]:
    """Return (a fake mode, its symbolic sizes by name) with the values of `point` as hints."""
    mode, symbolic_sizes = symbols.new_mode({s.name: (s.low, s.high, s.at(point)) for s in sizes})
    products = {
        symbolic_sizes[s.name].node.expr: tuple(sorted((s.index, e) for e in s.elements)) for s in sizes if s.elements
    }
    if products:
        add_known(mode.shape_env, products)
    named(mode, symbolic_sizes)
    return mode, symbolic_sizes


def static_at(program: P, point: Mapping[str, int]) -> P:
    """Return a static copy of the program at these sizes: all of its sizes are numbers."""
    new_program: Any = converted(
        program, FakeTensorMode(), {s.name: s.at(point) for s in program.sizes.symbols}, NO_SIZES
    )
    numbers = [n for n in new_program.graph.nodes if type(n.meta.get("val")) in (int, float)]
    for node in numbers:
        if node.op == "call_function":  # (as Python calculates it: an expression's value may be rounded otherwise)
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            node.meta["val"] = node.target(*args, **kwargs)
    for node in reversed(numbers):
        number = node.meta["val"]
        for user in list(node.users):
            replace_number(user, node, number)
        if node.op == "placeholder":
            new_program.remove_input(node)
        else:
            new_program.graph.erase_node(node)
    new_program.recompile()
    return new_program  # type: ignore[no-any-return]


def replace_number(user: fx.Node, node: fx.Node, number: fx.Node | int) -> None:
    """Make `user` read `number` (or the node of one) wherever it read `node`."""
    user.args = fx.node.map_arg(user.args, lambda a: number if a is node else a)
    user.kwargs = fx.node.map_arg(user.kwargs, lambda a: number if a is node else a)


def converted(program: P, mode: Any, sizes: Mapping[str, Any], known: Sizes) -> P:
    """Return a copy in the fake mode `mode`, whose values have these `sizes` by name in place of symbols."""
    new_program: Any = program.snapshot()
    env = program.fake_mode.shape_env
    by_symbol = {s: sizes[name] for s, name in _names[env].items() if name in sizes}
    target = getattr(mode, "shape_env", None)
    numbers: dict[Any, Any] = {}

    def number(size: Any) -> Any:
        if not is_symbolic(size):
            return size
        expr, kind = size.node.expr, float if isinstance(size, torch.SymFloat) else int
        if (expr, kind) not in numbers:
            numbers[expr, kind] = symbols.substituted(expr, by_symbol, target, kind)
        return numbers[expr, kind]

    if known and target is not None:
        old_to_new = {s: v.node.expr for s, v in by_symbol.items() if isinstance(v, torch.SymInt)}
        for guard in symbols.guards(env):
            symbols.assume(target, symbols.condition_of(env, guard.condition, old_to_new))
    for node in new_program.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = _convert(node.meta["val"], mode, number)
    new_program.fake_mode, new_program.sizes = mode, known
    return new_program  # type: ignore[no-any-return]


def seal(program: _Program) -> None:
    """Record how many guards a program's sizes have: it holds under these, and passes must add none."""
    env = program.fake_mode.shape_env
    _sealed[env] = symbols.known(env)


def asked_since(program: _Program) -> list[SizeGuard]:
    """Return the guards that were added to a program's sizes since it was sealed."""
    env = getattr(program.fake_mode, "shape_env", None)
    if env is None or env not in _sealed:
        return []
    return guards_of(env)[_sealed[env] :]


def guards_of(env: Any) -> list[SizeGuard]:
    """Return all guards of an environment, with sizes by their names."""
    return [SizeGuard(symbols.text(g.condition, _names.get(env, {})), g.where) for g in symbols.guards(env)]


def _convert(val: Any, mode: Any, number: Callable[[Any], Any]) -> Any:
    if isinstance(val, torch.Tensor):
        shape, stride = [number(s) for s in val.shape], [number(s) for s in val.stride()]
        fake = fake_tensors.empty(mode, shape, stride, val.dtype, val.device)
        return fake.requires_grad_() if val.requires_grad else fake
    if isinstance(val, (tuple, list)):
        return type(val)(_convert(v, mode, number) for v in val)
    return number(val)
