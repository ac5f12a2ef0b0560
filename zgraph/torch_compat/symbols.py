"""Symbolic sizes in torch's terms: `torch.SymInt`, sympy expressions, and the shape environment that knows what holds
of them."""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import math
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from zgraph.torch_compat.products_of_sizes import add_element, factors_in, linear

Symbol: TypeAlias = Any  # (a sympy.Symbol: sympy has no types)

_FUNCTIONS = {
    "max": max,
    "min": min,
    "math": math,
    "float": float,
    "int": int,
    "round": round,
}  # the functions that PythonPrinter may write


@dataclass(frozen=True)
class FoundGuard:
    """A condition on sizes that tracing has relied on."""

    condition: Any  # an expression of the sizes' symbols
    where: str | None  # the user's line that asked, None if unknown


class Placed(Protocol):
    """A size that has a place among the flat inputs of a call."""

    @property
    def index(self) -> int:
        """The flat input."""

    @property
    def dim(self) -> int:
        """Its dimension."""

    @property
    def elements(self) -> tuple[Element, ...]:
        """The elements whose product it is; empty for the size of a dimension."""


@dataclass(frozen=True, order=True)
class Element:
    """An element of a flat input that is a size."""

    at: int  # its number
    unit: int  # the size is the element divided by this


@dataclass(frozen=True)
class SizePlace:
    """Where a size is among the flat inputs of a call."""

    index: int  # the flat input
    dim: int = 0  # its dimension
    elements: tuple[Element, ...] = ()  # the elements whose product it is; empty for the size of a dimension


def numbers_at(places: Iterable[Placed], flat: Sequence[Any]) -> list[int]:
    """Return the sizes at these places in a call with these flat inputs; 0 for an element that is not divisible by its
    unit, which no program serves. (Elements are read once: a device waits.)"""
    read: dict[int, list[int]] = {}
    numbers = []
    for place in places:
        if not place.elements:
            numbers.append(flat[place.index].shape[place.dim])
            continue
        if place.index not in read:
            read[place.index] = flat[place.index].reshape(-1).tolist()
        values = [(read[place.index][element.at], element.unit) for element in place.elements]
        numbers.append(0 if any(n % unit for n, unit in values) else math.prod(n // unit for n, unit in values))
    return numbers


def is_symbolic(value: Any) -> bool:
    """Return whether a number is an expression of symbols."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def has_unknown(value: Any) -> bool:
    """Return whether a value, or a size of it, depends on values of tensors."""
    return any(bool(free_unbacked_symbols(leaf)) for leaf in _measures(value))


def has_symbol(value: Any) -> bool:
    """Return whether a value, or a size of it, is an expression of symbols rather than a number, even if its value is
    known by now."""
    return any(is_symbolic(number) for number in _measures(value))


def is_unknown(size: Any) -> bool:
    """Return whether a size depends on values of tensors."""
    return isinstance(size, torch.SymInt) and bool(free_unbacked_symbols(size))


def was_unknown(value: Any) -> bool:
    """Return whether a value, or a size of it, was given as one that depends on values of tensors, whatever is known of it
    since."""
    return any(bool(free_unbacked_symbols(leaf.node._expr)) for leaf in _measures(value) if is_symbolic(leaf))


def solve_unknown(env: Any) -> None:
    """Let each size that depends on values be what tracing has assumed it to be equal to, where that depends on none.

    (Torch leaves a size of its own where what it is equal to may be larger than a selection can be.)
    """
    for symbol, assumed in list(env.deferred_runtime_asserts.items()):
        for condition in (one.expr for one in assumed):
            if symbol is None or not isinstance(condition, sympy.Eq) or env.replace(symbol) != symbol:
                continue
            difference = sympy.expand(condition.lhs - condition.rhs)
            times = difference.coeff(symbol)
            equal = env.replace(symbol - times * difference)
            if times in (1, -1) and not free_unbacked_symbols(equal):
                _replace(env, symbol, equal)
    for symbol, same in list(env.replacements.items()):
        equal = env.replace(same)
        if equal != same and free_unbacked_symbols(symbol) and not free_unbacked_symbols(equal):
            _replace(env, symbol, equal)


def _replace(env: Any, symbol: Symbol, equal: Any) -> None:
    """Let a symbol be an expression, whatever is known of how large both may be."""
    env.var_to_range[symbol] = ValueRanges(-int_oo, int_oo)
    env.size_like.discard(symbol)
    env._set_replacement(symbol, equal, "assumed")


def _measures(value: Any) -> Iterable[Any]:
    """Yield the numbers in a value: itself, or sizes, strides and offsets of its tensors."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            if leaf.layout is torch.strided:
                yield from (*leaf.shape, *leaf.stride(), leaf.storage_offset())
        elif is_symbolic(leaf):
            yield leaf


def expression(size: Any) -> Any:
    """Return a size in a form that can be hashed and compared without adding a guard: an int, or an expression."""
    if not isinstance(size, torch.SymInt):
        return size
    expr = size.node.expr
    return int(expr) if expr.is_number else expr


def given_symbol(size: Any) -> Symbol | None:
    """Return the symbol that an input's size was given, whatever is known of it since; None for a number."""
    if not isinstance(size, torch.SymInt):
        return None
    expr = size.node._expr
    return expr if isinstance(expr, sympy.Symbol) else None


def free_symbols(value: Any) -> set[Symbol]:
    """Return the symbols in a value's numbers."""
    symbols: set[Symbol] = set()
    for number in _measures(value):
        if is_symbolic(number):
            symbols |= number.node.expr.free_symbols
    return symbols


def environment(value: Any) -> Any:
    """Return the shape environment of a symbolic size."""
    return value.node.shape_env


def hint(size: Any) -> int:
    """Return the number that a size has at its environment's point (the sizes it was made with); adds no guard."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expr = size.node.expr
    return int(expr) if expr.is_number else int(expr.xreplace(_values(size.node.shape_env)))


def most(size: Any) -> int:
    """Return an upper bound of a size, from the bounds of its symbols; adds no guard.

    A symbol without an upper bound counts with its value at the environment's point. The bound may not be reached where
    a size falls as another grows.
    """
    if not isinstance(size, torch.SymInt):
        return int(size)
    env, expr = size.node.shape_env, size.node.expr
    if expr.is_number:
        return int(expr)
    ranges = []
    for symbol in expr.free_symbols:
        low, high = bounds(env, symbol)
        ranges.append((symbol, low, max(low, point(env, symbol)) if high is None else high))
    return _upper(expr, frozenset(ranges))


@functools.lru_cache(4096)
def _upper(expr: Any, ranges: frozenset[tuple[Any, int, int]]) -> int:
    """Return the upper bound of an expression whose symbols have these ranges (symbol, least, most)."""
    bound = bound_sympy(expr, {symbol: ValueRanges(low, high) for symbol, low, high in ranges}).upper
    if bound is not int_oo and bound.is_finite:
        return int(bound)
    # (A quotient of rounded sizes whose divisor is no 0, which the ranges alone do not say: padded // (padded // 4).)
    names = [symbol for symbol, *_ in ranges]
    ends = itertools.product(*((low, high) for _, low, high in ranges))
    values = [expr.xreplace(dict(zip(names, map(sympy.Integer, end), strict=True))) for end in ends]
    return max(int(value) for value in values if value.is_finite)


def upper_bound(env: Any, symbol: Symbol, ranges: Mapping[Symbol, tuple[int, int | None]]) -> int | None:
    """Return the largest number of a symbol that is arithmetic on others, which have these ranges; None of any other."""
    expr = env.replace(symbol)
    known = {s: (low, high) for s, (low, high) in ranges.items() if high is not None}
    if expr == symbol or expr.is_number or not expr.free_symbols <= known.keys():
        return None
    return _upper(expr, frozenset((s, *known[s]) for s in expr.free_symbols))


FIRST_STAND_IN = 2**40  # (no size is as large)


class StandIns:
    """Numbers that stand for the sizes of one environment.

    A size is a number times factors that are no numbers (symbols, sums, quotients), and each such factor has a large
    prime of its own. So two sizes are equal, or one a multiple of the other, if their stand-ins are. What holds of
    sizes for reasons that their factors do not show is missed.
    """

    def __init__(self) -> None:
        self._primes: dict[Any, int] = {}
        self._known: dict[Any, int] = {}

    def of(self, size: Any) -> int:
        """Return the number that stands for a size; a number stands for itself."""
        expr = expression(size)
        if isinstance(expr, int):
            return expr
        if expr not in self._known:
            self._known[expr] = self._product(expr)
        return self._known[expr]

    def size(self, number: int, env: Any) -> Any:
        """Return the size that a number stands for. Adds no guard."""
        expr: Any = sympy.Integer(1)
        for factor, prime in self._primes.items():
            while number and number % prime == 0:
                expr, number = expr * factor, number // prime
        return substituted(expr * number, {}, env)

    def _product(self, expression: Any) -> int:
        content, rest = (
            sympy.factor(expression).as_content_primitive()
            if isinstance(expression, sympy.Add)
            else expression.as_coeff_Mul()
        )
        if not (content.is_Integer and content > 0):
            content, rest = sympy.Integer(1), expression
        number = int(content)
        for factor in sympy.Mul.make_args(rest):
            base, exponent = factor.as_base_exp()
            if not (exponent.is_Integer and exponent > 0):
                base, exponent = factor, sympy.Integer(1)
            if base not in self._primes:
                self._primes[base] = sympy.nextprime(max(self._primes.values(), default=FIRST_STAND_IN))
            number *= self._primes[base] ** int(exponent)
        return number


def point(env: Any, symbol: Symbol) -> int:
    """Return the number that a symbol has at its environment's point."""
    return int(_values(env)[symbol])


def _values(env: Any) -> Any:
    return env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val


def bounds(env: Any, symbol: Symbol) -> tuple[int, int | None]:
    """Return the smallest and the largest number that a symbol may be; None for the largest where nothing bounds it (or
    only what a mask can select at most, which torch takes for almost 2 ** 63)."""
    known = env.var_to_range[symbol]
    free = known.upper is int_oo or not known.upper.is_finite or int(known.upper) >= FIRST_STAND_IN
    return int(known.lower), (None if free else int(known.upper))


def bounded_by(env: Any, symbol: Symbol) -> str | None:
    """Return the user's line that gave a symbol its largest number, or made it one number; None if unknown."""
    asked = guards(env)
    pinned = [g.where for g in asked if g.where and _pins(env, g.condition, symbol)]
    if pinned:
        return pinned[0]
    lines = [g.where for g in asked if g.where and symbol in g.condition.free_symbols]
    known = env.var_to_range_sloc.get(symbol)
    upper = getattr(getattr(known, "upper", None), "maybe_user_loc", None)
    return upper or (lines[-1] if lines else None)


def specialised(env: Any, symbol: Symbol) -> int | None:
    """Return the one number that a symbol can still be; None while it may be several."""
    replacement = env.replace(symbol)
    if replacement.is_number:
        return int(replacement)
    return point(env, symbol) if any(_pins(env, g.condition, symbol) for g in guards(env)) else None


def _pins(env: Any, condition: Any, symbol: Symbol) -> bool:
    """Return whether a condition fixes arithmetic on this symbol alone to a number: (n // 8) ** 2 == 16 does, n % 8 ==
    0 and n // (n // 2) == 2 (n is even) do not."""
    if not isinstance(condition, sympy.Eq) or condition.free_symbols != {symbol} or condition.has(Mod, PythonMod):
        return False
    multiples = (sympy.Integer(times * point(env, symbol)) for times in (2, 3, 4))
    holds = any(condition.xreplace({symbol: number}) == sympy.true for number in multiples)
    return not holds and any(side.is_number for side in condition.args)


def guards(env: Any) -> list[FoundGuard]:
    """Return all conditions on sizes that tracing has relied on so far, which must hold wherever its result runs."""
    return [FoundGuard(g.expr, getattr(g.sloc, "maybe_user_loc", None)) for g in env.guards]


@contextlib.contextmanager
def without_guards(env: Any) -> Iterator[None]:
    """Hide an environment's guards, if there is one: dynamo can't write those on elements of tensors."""
    if env is None:
        yield
        return
    hidden, env.guards = env.guards, []
    try:
        yield
    finally:
        env.guards = hidden


def known(env: Any) -> int:
    """Return the number of guards so far."""
    return len(env.guards)


@contextlib.contextmanager
def evaluating() -> Iterator[None]:
    """Evaluate operators on symbolic sizes: Python implementations replace torch's C++ ones, which take numbers only."""
    with enable_python_dispatcher(), linear():
        yield


def new_mode(points: Mapping[str, tuple[int, int | None, int]]) -> tuple[Any, dict[str, torch.SymInt]]:
    """Return (a new fake mode, its sizes by name) for these names with (smallest, largest, point to decide at)."""
    env = ShapeEnv()
    sizes: dict[str, Any] = {}
    for name, (low, high, point) in points.items():
        symbol = env.create_symbol(point, ConstantSource(name), DimDynamic.DYNAMIC)
        env.constrain_symbol_range(symbol, low, int_oo if high is None else high)
        sizes[name] = env.create_symintnode(symbol, hint=point)
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=env), sizes


# The symbols that captures have given to sizes by their names and numbers, by shape environment.
_by_name: weakref.WeakKeyDictionary[Any, dict[tuple[str, int], Symbol]] = weakref.WeakKeyDictionary()


def by_name(env: Any, name: str, number: int, create: Callable[[], Symbol]) -> Symbol:
    """Return the symbol of a name in an environment of a capture; `create` it the first time."""
    symbols = _by_name.setdefault(env, {})
    if (name, number) not in symbols:
        symbols[name, number] = create()
    return symbols[name, number]


def element(env: Any, name: str, number: int, unit: int) -> torch.SymInt:
    """Return the element of a tensor that has this name in an environment of a capture, in which it is `number`: the
    `unit` times a symbol."""
    point = number // unit
    symbol = by_name(env, name, point, lambda: env.create_symbol(point, ConstantSource(name), DimDynamic.DYNAMIC))
    add_element(env, symbol, name, point)
    return unit * env.create_symintnode(symbol, hint=point)  # type: ignore[no-any-return]


def multiple_of(number: Any) -> tuple[int, Symbol | None]:
    """Return the unit and the symbol of what `element` gave; no symbol for a number."""
    if not isinstance(number, torch.SymInt):
        return 1, None
    unit, symbol = number.node._expr.as_coeff_Mul()
    return int(unit), symbol


def is_element(number: Any) -> bool:
    """Return whether a number is an element of a tensor that is a symbol (or a multiple of one), not a product of
    them."""
    if not isinstance(number, torch.SymInt):
        return False
    symbol = number.node.expr.as_coeff_Mul()[1]
    return len(factors_in(number.node.shape_env).get(symbol, ())) == 1


@contextlib.contextmanager
def solved_for_sizes() -> Iterator[None]:
    """Let torch take a size for a sum of elements and their products where it asks whether both are equal, however long
    that is.

    (The rows of many images. Torch solves equations of up to five symbols.)
    """
    theirs = ShapeEnv._maybe_guard_rel

    def related(env: Any, condition: Any) -> None:
        elements = factors_in(env)
        if isinstance(condition, sympy.Eq) and not condition.has(FloorDiv, Mod, PythonMod):
            for size, sum_of_elements in (condition.args, reversed(condition.args)):
                others = sum_of_elements.free_symbols
                if isinstance(size, sympy.Symbol) and size not in elements and others and others <= elements.keys():
                    env._set_replacement(size, env._find(sum_of_elements), "elements of tensors")
                    return
        theirs(env, condition)

    ShapeEnv._maybe_guard_rel = related  # type: ignore[method-assign, assignment]
    try:
        with linear():
            yield
    finally:
        ShapeEnv._maybe_guard_rel = theirs  # type: ignore[method-assign]


def asked_elements(env: Any) -> set[str]:
    """Return the names of the elements that guards of an environment of a capture are about."""
    asked = set().union(*(guard.condition.free_symbols for guard in guards(env)))
    factors = factors_in(env)
    return {name for symbol in factors if symbol in asked or env.replace(symbol) != symbol for name in factors[symbol]}


def within(size: torch.SymInt, limit: int, most: int) -> list[Any]:
    """Return the conditions, without those that always hold, under which a size is at least -limit and below limit.
    Elements of tensors are `most` at most."""
    env, expr = size.node.shape_env, size.node.expr
    factors = factors_in(env)
    ranges = {s: env.var_to_range[s] for s in expr.free_symbols}
    ranges |= {s: ValueRanges(ranges[s].lower, most ** len(factors[s])) for s in ranges.keys() & factors.keys()}
    bounds = bound_sympy(expr, ranges)
    conditions = [] if bounds.upper < limit else [expr < limit]
    return conditions if bounds.lower >= -limit else [*conditions, expr >= -limit]


def assume(env: Any, condition: Any) -> None:
    """Tell an environment that a condition holds."""
    if condition not in (sympy.true, sympy.false):
        env.evaluate_expr(condition)


def substituted(
    expression: Any, symbols: Mapping[Symbol, Any], env: Any = None, kind: type[int] | type[float] = int
) -> Any:
    """Return an expression with its symbols replaced by numbers or sizes of `env`: a number of this kind, or a symbolic
    one of `env`."""
    if not isinstance(expression, sympy.Basic):
        return expression
    replaced = expression.xreplace(
        {s: v.node.expr if isinstance(v, torch.SymInt) else sympy.Integer(v) for s, v in symbols.items()}
    )
    if replaced.is_number:
        return kind(replaced)
    create = env.create_symintnode if kind is int else env.create_symfloatnode
    return create(replaced, hint=kind(replaced.xreplace(_values(env))))


def condition_of(env: Any, expression: Any, symbols: Mapping[Symbol, Symbol]) -> Any:
    """Return a condition of one environment, written with the symbols of another."""
    return env.replace(expression).xreplace(dict(symbols))


class _Printer(PythonPrinter):  # type: ignore[misc]
    """A printer of expressions that writes symbols by given names."""

    def __init__(self, names: Mapping[Symbol, str]) -> None:
        super().__init__()
        self._names = names

    def _print_Symbol(self, symbol: Symbol) -> str:
        return self._names.get(symbol, symbol.name)

    def _print_ToFloat(self, expression: Any) -> str:  # (torch's own are functions of torch)
        return f"float({self._print(expression.args[0])})"

    def _helper_sqrt(self, expression: Any) -> str:
        return f"math.sqrt({self._print(expression)})"


def line_of(expression: Any, symbol: Symbol) -> tuple[int, int] | None:
    """Return (a, b) of an expression that is a * symbol + b with whole numbers; None of any other."""
    slope = sympy.diff(expression, symbol)
    constant = expression.xreplace({symbol: sympy.Integer(0)})
    if not slope.is_Integer or not constant.is_Integer:
        return None
    return int(slope), int(constant)


def text(expression: Any, names: Mapping[Symbol, str]) -> str:
    """Return an expression or condition as Python source, with these names for its symbols."""
    return str(_Printer(names).doprint(expression)) if isinstance(expression, sympy.Basic) else str(expression)


@functools.lru_cache(maxsize=4096)
def evaluator(written: str, names: tuple[str, ...]) -> Callable[..., Any]:
    """Return a function that evaluates a text of `text`, with the numbers for these names, in their order, as
    arguments."""
    return eval(f"lambda {', '.join(names)}: {written}", dict(_FUNCTIONS))  # type: ignore[no-any-return]


class _Arithmetic(PythonReferenceAnalysis):  # type: ignore[misc]
    """Makes nodes of an expression's operators, also of roundings, which torch computes of numbers alone."""

    @staticmethod
    def trunc_to_int(x: Any, dtype: Any) -> Any:
        return _rounded(math.trunc, x)

    @staticmethod
    def floor_to_int(x: Any, dtype: Any) -> Any:
        return _rounded(math.floor, x)

    @staticmethod
    def ceil_to_int(x: Any, dtype: Any) -> Any:
        return _rounded(math.ceil, x)

    @staticmethod
    def round_to_int(x: Any, dtype: Any) -> Any:
        return _rounded(round, x)


def _rounded(function: Callable[[Any], int], x: Any) -> Any:
    return x.tracer.create_proxy("call_function", function, (x,), {}) if isinstance(x, fx.Proxy) else function(x)


def calculation(expression: Any, places: Mapping[Symbol, fx.Node], graph: fx.Graph) -> fx.Node | int:
    """Insert nodes that compute an expression from its symbols' nodes, at the graph's insertion point; return the last,
    or a number."""
    tracer = fx.proxy.GraphAppendingTracer(graph)
    proxies = {s: fx.Proxy(places[s], tracer) for s in expression.free_symbols}
    result = sympy_interp(_Arithmetic, proxies, expression)
    return result.node if isinstance(result, fx.Proxy) else int(result)


def read(written: str, sizes: Mapping[str, Any]) -> Any:
    """Return the size that a text of `text` means, given sizes by name. Raises `ValueError` for anything but
    arithmetic."""
    operators: dict[type, Callable[..., Any]] = {
        ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
        ast.Pow: operator.pow, ast.Div: operator.truediv,
    }  # fmt: skip

    def value(node: Any) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return node.value
        if isinstance(node, ast.Name) and node.id in sizes:
            return sizes[node.id]
        if isinstance(node, ast.BinOp) and type(node.op) in operators:
            return operators[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("max", "min"):
            of = torch.sym_max if node.func.id == "max" else torch.sym_min
            return functools.reduce(of, map(value, node.args))
        if isinstance(node, ast.Call) and len(node.args) == 1 and (function := _ROUNDINGS.get(ast.unparse(node.func))):
            return function(value(node.args[0]))
        raise ValueError(f"{written!r} is no arithmetic on {', '.join(sizes)}")

    return value(ast.parse(written, mode="eval").body)


_ROUNDINGS: dict[str, Callable[[Any], Any]] = {
    "float": torch.sym_float,
    "math.trunc": math.trunc,
    "math.floor": math.floor,
    "math.ceil": math.ceil,
    "math.sqrt": torch._sym_sqrt,  # type: ignore[attr-defined]
    "round": round,
}

_ARITHMETIC = (
    ast.Expression, ast.Constant, ast.Name, ast.Load, ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.Call, ast.operator, ast.unaryop,
    ast.cmpop, ast.boolop,
)  # fmt: skip


def is_readable(written: str) -> bool:
    """Return whether `read` knows all functions of a text of `text`."""
    calls = (n.func for n in ast.walk(ast.parse(written, mode="eval")) if isinstance(n, ast.Call))
    return all(ast.unparse(function) in ("max", "min", *_ROUNDINGS) for function in calls)


def refuse_code(written: str, names: Collection[str]) -> None:
    """Raise `ValueError` if a text from outside is more than arithmetic on and comparisons of these names."""
    nodes = list(ast.walk(ast.parse(written, mode="eval")))
    roundings = [n.func for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) in _ROUNDINGS]
    inside = {id(inner) for function in roundings for inner in ast.walk(function)}
    for node in nodes:
        if id(node) in inside:
            continue
        strange = isinstance(node, ast.Name) and node.id not in (*names, "max", "min")
        calls = isinstance(node, ast.Call) and not isinstance(node.func, ast.Name) and id(node.func) not in inside
        value = isinstance(node, ast.Constant) and not isinstance(node.value, (int, float))
        if strange or calls or value or not isinstance(node, _ARITHMETIC):
            raise ValueError(f"{written!r} is no condition on {', '.join(names)}")


def symbols_of(sizes: Mapping[str, Any]) -> dict[Symbol, str]:
    """Return the names of symbolic sizes by their symbols."""
    return {s.node.expr: name for name, s in sizes.items() if isinstance(s, torch.SymInt)}


def contexts(static: Any, dims: Collection[int]) -> Any:
    """Return the symbolic context of a tensor with these dimensions open: equal numbers share a symbol."""
    open_dims = [DimDynamic.DUCK if d in dims else was for d, was in enumerate(static.dynamic_sizes)]
    return replace(static, dynamic_sizes=open_dims)
