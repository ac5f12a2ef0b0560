"""Products of sizes that are elements of tensors: each is a symbol of its own, so that all arithmetic stays linear.

Images of h1 x w1, h2 x w2 and h3 x w3 patches have h1 * w1 + h2 * w2 + h3 * w3 rows together. Torch solves no such
equation, and is slow with what it does not solve. With a symbol for each product it is a sum of three symbols. That the
symbol of a product is the product torch is not told: what a program assumes of symbols is checked at each call, in
which each has its value, computed of the call's own elements.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import sympy
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic

Factors = tuple[Any, ...]
"""What tells elements of tensors apart, in order: an element is the product of itself alone."""


class _Products:
    """The symbols of elements, and of their products, in one environment."""

    def __init__(self) -> None:
        self.factors: dict[Any, Factors] = {}  # of each symbol
        self.symbols: dict[Factors, Any] = {}  # by factors
        self.values: dict[Hashable, int] = {}  # of each element, at the environment's point
        self.grows = False  # whether a product that is met for the first time gets a symbol

    def add(self, symbol: Any, factors: Factors) -> None:
        self.factors[symbol] = factors
        self.symbols[factors] = symbol


_products: weakref.WeakKeyDictionary[Any, _Products] = weakref.WeakKeyDictionary()


def add_element(env: Any, symbol: Any, element: Any, value: int) -> None:
    """Note the symbol of an element in an environment of a capture, where each product of elements gets a symbol when it
    is met."""
    products = _products.setdefault(env, _Products())
    products.grows = True
    products.values[element] = value
    products.add(symbol, (element,))


def add_known(env: Any, factors: Mapping[Any, Factors]) -> None:
    """Note the symbols of an environment that are products of elements, and of which."""
    products = _products.setdefault(env, _Products())
    for symbol, of in factors.items():
        products.add(symbol, of)


def factors_in(env: Any) -> Mapping[Any, Factors]:
    """Return the symbols of an environment that are elements of tensors, or products of them, and of which."""
    return _products[env].factors if env in _products else {}


@contextlib.contextmanager
def linear() -> Iterator[None]:
    """Let torch give the symbol of a product where it multiplies elements, in environments that have any."""
    kind: Any = SymNode
    theirs = kind._mul

    def multiplied(one: Any, other: Any) -> Any:
        node = theirs(one, other)
        if get_proxy_mode() is not None or node.shape_env not in _products or node.pytype is not int:
            return node
        expr = _linear(node.shape_env, node.expr)
        return node if expr is node.expr else SymNode(expr, node.shape_env, int, node.hint)

    kind._mul = multiplied
    try:
        yield
    finally:
        kind._mul = theirs


def _linear(env: Any, expr: Any) -> Any:
    """Return an expression with the symbols of products in place of products."""
    products = _products[env]
    if expr.is_Symbol or products.factors.keys().isdisjoint(expr.free_symbols):
        return expr
    terms = [_term(env, products, term) for term in sympy.Add.make_args(sympy.expand(expr))]
    return sympy.Add(*terms)


def _term(env: Any, products: _Products, term: Any) -> Any:
    """Return a product with one symbol in place of all that are elements, or products of them."""
    factors: list[Any] = []
    rest: list[Any] = []
    for factor in sympy.Mul.make_args(term):
        base, exponent = factor.as_base_exp()
        if base in products.factors and exponent.is_Integer and exponent > 0:
            factors += products.factors[base] * int(exponent)
        else:
            rest.append(factor)
    of = tuple(sorted(factors))
    if of not in products.symbols:
        if not products.grows or len(set(of)) < max(len(of), 2):  # (squares are left: scores of attention)
            return term
        value = math.prod(products.values[element] for element in of)
        name = ConstantSource("_times_".join(map(str, of)))
        products.add(env.create_symbol(value, name, DimDynamic.DYNAMIC), of)
    return sympy.Mul(products.symbols[of], *rest)
