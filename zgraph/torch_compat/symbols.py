"""Symbolic sizes in torch's terms: `torch.SymInt`, sympy expressions, and the shape environment that knows what holds
of them."""

from __future__ import annotations

import ast
import functools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import Mod, PythonMod
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

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
    return int(bound_sympy(expr, {symbol: ValueRanges(low, high) for symbol, low, high in ranges}).upper)


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
    """Return the smallest and the largest number that a symbol may be; None for the largest where nothing bounds it."""
    known = env.var_to_range[symbol]
    return int(known.lower), (None if known.upper is int_oo or not known.upper.is_finite else int(known.upper))


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


def known(env: Any) -> int:
    """Return the number of guards so far."""
    return len(env.guards)


def evaluating() -> Any:
    """Return a context for evaluating operators on symbolic sizes: Python implementations replace torch's C++ ones,
    which take numbers only."""
    return enable_python_dispatcher()


def new_mode(points: Mapping[str, tuple[int, int | None, int]]) -> tuple[Any, dict[str, torch.SymInt]]:
    """Return (a new fake mode, its sizes by name) for these names with (smallest, largest, point to decide at)."""
    env = ShapeEnv()
    sizes: dict[str, Any] = {}
    for name, (low, high, point) in points.items():
        symbol = env.create_symbol(point, ConstantSource(name), DimDynamic.DYNAMIC)
        env.constrain_symbol_range(symbol, low, int_oo if high is None else high)
        sizes[name] = env.create_symintnode(symbol, hint=point)
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=env), sizes


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
