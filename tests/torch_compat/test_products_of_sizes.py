"""Products of elements are symbols of their own while operators are evaluated."""

from __future__ import annotations

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from zgraph.torch_compat import symbols
from zgraph.torch_compat.products_of_sizes import add_known, factors_in, linear


def elements(env: ShapeEnv, **values: int) -> list[torch.SymInt]:
    return [symbols.element(env, name, value, 1) for name, value in values.items()]


def test_a_product_of_elements_is_a_symbol_and_arithmetic_on_it_is_linear():
    env = ShapeEnv()
    a, b, c, d = elements(env, a=4, b=6, c=8, d=10)
    with linear():
        rows = a * b + (2 * c) * (2 * d)
        again = b * a
    assert rows.node.expr.as_poly().total_degree() == 1
    assert symbols.hint(rows) == 24 + 4 * 80
    assert symbols.expression(again) in factors_in(env)
    assert set(factors_in(env).values()) == {("a",), ("b",), ("c",), ("d",), ("a", "b"), ("c", "d")}


def test_products_of_products_and_of_sums_are_symbols_too():
    env = ShapeEnv()
    a, b, c = elements(env, a=4, b=6, c=8)
    with linear():
        assert symbols.expression((a * b) * c) == symbols.expression(a * (b * c))
        assert symbols.expression((a + b) * c) == symbols.expression(a * c + b * c)
    assert ("a", "b", "c") in factors_in(env).values()


def test_squares_are_left_and_so_is_all_outside():
    env = ShapeEnv()
    a, b = elements(env, a=4, b=6)
    with linear():
        assert symbols.expression(a * a).as_poly().total_degree() == 2
    assert symbols.expression(a * b).as_poly().total_degree() == 2
    assert set(factors_in(env).values()) == {("a",), ("b",)}


def test_only_products_that_a_finished_program_knows_are_symbols_in_it():
    mode, sizes = symbols.new_mode(
        {name: (2, None, point) for name, point in {"a": 4, "b": 6, "c": 8, "ab": 24}.items()}
    )
    a, b, c, ab = (sizes[name] for name in ("a", "b", "c", "ab"))
    of = {"a": ("a",), "b": ("b",), "c": ("c",), "ab": ("a", "b")}
    add_known(mode.shape_env, {sizes[name].node.expr: factors for name, factors in of.items()})
    with linear():
        assert symbols.expression(b * a) == symbols.expression(ab)
        assert symbols.expression(a * c).as_poly().total_degree() == 2


def test_other_sizes_multiply_as_before():
    _, sizes = symbols.new_mode({"rows": (2, None, 4), "seq": (2, None, 6)})
    with linear():
        product = sizes["rows"] * sizes["seq"]
    assert symbols.expression(product).as_poly().total_degree() == 2
