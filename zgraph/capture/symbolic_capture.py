"""Captures in which sizes of inputs are symbols, so that one program serves every call that differs in them.

A size has a name; dimensions of one name are equal in every call. Dynamo and AOTAutograd trace with a symbol for each
name, at a point (numbers that no two names share: equal ones are one symbol; where elements of inputs are sizes, names
decide: `symbols.by_name`), and record as guards what they relied on.
Afterwards the program gets an environment of its own, one input for each symbol, and the guards as its `Sizes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from zgraph.capture.data_dependent_sizes import LOOKED_AT
from zgraph.capture.masked_rows import masked_dim
from zgraph.capture.position_table_bounds import TableBound, refuse_beyond_table, table_bounds
from zgraph.errors import SizeError
from zgraph.passes.verifier.values import ValueCache, check_values
from zgraph.program import sizes
from zgraph.program.node import NodeInfo, Phase, info, set_info
from zgraph.program.program import InputRole, Program
from zgraph.program.sizes import ProgramSize, SizeGuard, Sizes, is_symbolic
from zgraph.torch_compat import symbols
from zgraph.torch_compat.element_sizes import fits, given_elements
from zgraph.torch_compat.flat_capture import FlatCapture, OutputNumbers
from zgraph.torch_compat.products_of_sizes import factors_in
from zgraph.torch_compat.symbols import Element, SizePlace


@dataclass(frozen=True)
class OpenElement:
    """An element of an input that is a size."""

    name: str  # the size's name
    unit: int  # the size is the element divided by this


@dataclass(frozen=True)
class SymbolicSizes:
    """The sizes of a call that are to be symbols."""

    names: Mapping[int, dict[int, str]]  # the name of each such dimension, by the tensors' ids
    points: Mapping[str, int]  # the sizes that they are traced at, by name
    # (smallest, largest) as a user has declared, by name
    ranges: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    numbers: tuple[str, ...] = ()  # Python numbers that are given to the program, by their names in captures
    values: frozenset[int] = frozenset()  # ids of tensors whose values are constants of the program
    # those of their elements that are sizes, by the tensors' ids and the elements' numbers
    elements: Mapping[int, dict[int, OpenElement]] = field(default_factory=dict)
    asked: Mapping[str, int] = field(default_factory=dict)  # sizes that an earlier program refused, by name


@dataclass(frozen=True)
class TracedSize:
    """A size in a capture: its symbol, and its place among the flat inputs of a call."""

    name: str  # the size's name
    symbol: Any  # a sympy symbol
    index: int  # the flat input that has it
    dim: int = 0  # the dimension of that input
    # the elements of that input whose product it is; empty for the size of a dimension
    elements: tuple[Element, ...] = ()
    factors: tuple[str, ...] = ()  # the names of the sizes that these elements are


def distinct(points: Mapping[str, int], exact: Collection[str] = (), *, stay: bool = False) -> dict[str, int]:
    """Return the points changed so that none are equal, and none is 0 or 1.

    They grow by as little as possible; those that are `exact` change only if there is no other way, and not at all if
    they are to `stay`.
    """
    distinct_points: dict[str, int] = {}
    for name in sorted(points, key=lambda name: (name not in exact, name)):
        point = max(points[name], 2)
        while point in distinct_points.values() and not (stay and name in exact):
            point += 1
        distinct_points[name] = point
    return distinct_points


def traced_sizes(
    flat: FlatCapture,
    given: Sequence[Any],
    open_dims: Mapping[int, Mapping[int, str]],
    open_elements: Mapping[int, Mapping[int, OpenElement]],
) -> tuple[TracedSize, ...]:
    """Return the sizes of a capture by its flat inputs. Raises `SizeError` for one that the model has turned into a
    number."""
    traced: dict[str, TracedSize] = {}
    for index, (value, node) in enumerate(
        zip(given, flat.graph_module.graph.find_nodes(op="placeholder"), strict=True)
    ):
        example = node.meta["example_value"]
        for dim, name in open_dims.get(id(value), {}).items():
            symbol = symbols.given_symbol(example.shape[dim])
            if symbol is None:
                raise _of_size(
                    (name,),
                    f"size {name!r} can't differ from call to call",
                    why=f"dimension {dim} of flat input {index} became the number {example.shape[dim]}",
                )
            known = traced.setdefault(name, TracedSize(name, symbol, index, dim))
            assert known.symbol == symbol, f"{name}: {known.symbol} and {symbol}"
        elements = given_elements(example) or []
        for at, one in open_elements.get(id(value), {}).items() if elements else ():
            symbol = symbols.multiple_of(elements[at])[1]
            elements_of = (Element(at, one.unit),)
            traced[one.name] = TracedSize(one.name, symbol, index, elements=elements_of, factors=(one.name,))
    env = flat.fake_mode.shape_env
    refuse_numbers(with_products(tuple(traced.values()), env), env)
    if elsewhere := symbols.asked_elements(env) - traced.keys():
        raise _of_size(
            tuple(sorted(elsewhere)),
            f"forward decides by {', '.join(sorted(elsewhere))}, and computes nothing with that input",
            why="a program has no such input, so it could not check its values",
        )
    return tuple(traced.values())


def with_products(traced: Sequence[TracedSize], env: Any) -> tuple[TracedSize, ...]:
    """Return the sizes of a capture, and the products of elements that have a symbol in its environment by now.

    Raises `SizeError` for a product of elements of several inputs.
    """
    by_name = {size.name: size for size in traced if size.elements}
    known = {size.symbol for size in traced}
    products = []
    for symbol, factors in factors_in(env).items():
        if symbol in known or not by_name.keys() >= set(factors):  # (of an input that no graph has: see `traced_sizes`)
            continue
        sizes = [by_name[name] for name in factors]
        if len({size.index for size in sizes}) > 1:
            raise _of_size(
                factors, "elements of several inputs are multiplied", why="a size is made of those of one input"
            )
        elements = tuple(element for size in sizes for element in size.elements)
        name = "_times_".join(factors)
        products.append(TracedSize(name, symbol, sizes[0].index, elements=elements, factors=factors))
    return (*traced, *products)


def take_out_numbers(module: fx.GraphModule) -> OutputNumbers | None:
    """Take the whole numbers that are made from sizes of inputs out of a captured forward's outputs, and return them.

    Raises `SizeError` for one that depends on something else.
    """
    output = module.graph.output_node()
    returned: Any = output.args[0]
    values = [node.meta.get("example_value") if isinstance(node, fx.Node) else None for node in returned]
    numbers = {at: v for at, v in enumerate(values) if isinstance(v, torch.SymInt) and not symbols.is_unknown(v)}
    if not numbers:
        return None
    output.args = (tuple(item for at, item in enumerate(returned) if at not in numbers),)
    for node in reversed(list(module.graph.nodes)):
        of_size = node.op == "call_function" and isinstance(node.meta.get("example_value"), torch.SymInt)
        if of_size and not node.users:
            module.graph.erase_node(node)
    module.recompile()
    places: dict[Any, SizePlace] = {}
    for index, node in enumerate(module.graph.find_nodes(op="placeholder")):
        for dim, size in enumerate(getattr(node.meta["example_value"], "shape", ())):
            places.setdefault(symbols.given_symbol(size), SizePlace(index, dim))
        for at, number in enumerate(given_elements(node.meta["example_value"]) or ()):
            unit, symbol = symbols.multiple_of(number)
            if symbol is not None:
                places.setdefault(symbol, SizePlace(index, elements=(Element(at, unit),)))
    env = next((symbols.environment(number) for number in numbers.values()), None)
    by_name = {factors[0]: symbol for symbol, factors in factors_in(env).items() if len(factors) == 1}
    for symbol, factors in factors_in(env).items():
        of = [places[by_name[name]] for name in factors if by_name[name] in places]
        if len(of) == len(factors) > 1 and len({place.index for place in of}) == 1:
            places[symbol] = SizePlace(of[0].index, elements=tuple(e for place in of for e in place.elements))
    free = symbols.free_symbols(tuple(numbers.values()))
    if free - places.keys():
        raise SizeError(
            "the model returns, or keeps, a number that depends on something else than sizes of inputs",
            why=f"{free - places.keys()}",
            hint="return a tensor, or compute the number outside of forward",
        )
    return OutputNumbers(numbers, {symbol: places[symbol] for symbol in free})


def refuse_numbers(traced: Sequence[TracedSize], env: Any) -> None:
    """Raise `SizeError` for a size that the trace in this environment has turned into a number (for all elements of
    inputs together)."""
    numbers = {size: symbols.specialised(env, size.symbol) for size in traced}
    gone = [size for size in traced if numbers[size] is not None]
    if not gone:
        return
    first, name = gone[0], gone[0].name
    raise _of_size(
        tuple({name: None for size in gone for name in size.factors}) if first.elements else (name,),
        f"size {name!r} can't differ from call to call",
        where=symbols.bounded_by(env, first.symbol),
        why=f"the model is written for one number there, {numbers[first]} in this call",
        hint=f"leave {name!r} out of dynamic: each of its sizes is a program of its own",
    )


def _of_size(names: tuple[str, ...], what: str, **told: str | None) -> SizeError:
    """Return an error that records which sizes it is about."""
    error = SizeError(what, **told)
    error.sizes = names
    return error


def refuse_unknown(graph: fx.Graph, user_name: Callable[[fx.Node], str | None]) -> None:
    """Raise `SizeError` where sizes depend on values: such nodes become regions, whose own sizes must be numbers.

    `user_name` gives the user's name of an input, None for others than the user's.
    """
    for node in graph.nodes:
        if symbols.has_unknown(node.meta.get("val")) or node.target in LOOKED_AT or _selects(node):
            error = SizeError(
                "the model has sizes that depend on values (a mask that selects, nonzero)",
                where=info(node).source or None,
                why="programs whose sizes differ from call to call have none",
                hint="use torch.where or a mask of weights in place of selecting",
            )
            error.of_values = True
            names = {user_name(read) for read in _read_by(node)}
            error.inputs = tuple(sorted(name for name in names if name is not None)) if None not in names else ()
            raise error
        if node.target is torch.ops.aten.as_strided.default and symbols.free_symbols(node.meta.get("val")):
            raise SizeError(
                "as_strided is given sizes that differ from call to call",
                where=info(node).source or None,
                why="what it looks at of the storage can't be compared with the storage's size",
                hint="use views and slices",
            )


def _selects(node: fx.Node) -> bool:
    """Return whether the size of a node's result depends on values by the node's own operator, which can't be told what
    is known of that size (see `masked_rows`)."""
    if node.op != "call_function" or not symbols.was_unknown(node.meta.get("val")) or masked_dim(node) is not None:
        return False
    return not any(symbols.was_unknown(n.meta.get("val")) for n in node.all_input_nodes)


def _read_by(node: fx.Node) -> set[fx.Node]:
    """Return the placeholders that a node depends on."""
    seen, todo = {node}, [node]
    while todo:
        new = set(todo.pop().all_input_nodes) - seen
        seen |= new
        todo += new
    return {n for n in seen if n.op == "placeholder"}


def canonical(graph: fx.Graph, traced: Sequence[TracedSize], env: Any) -> list[tuple[TracedSize, fx.Node]]:
    """Rewrite every number of the graph as arithmetic on one new input for each symbol of its environment; return these
    inputs.

    Raises `SizeError` for an output that is a number (a whole one was taken out before).
    """
    output = graph.output_node()
    for node in output.all_input_nodes:
        if is_symbolic(node.meta.get("val")):
            raise SizeError(
                "the model returns, or keeps, a number that is made from a size",
                where=info(node).source or None,
                why="programs give tensors",
                hint="take it from the shape of a tensor, outside of forward; keep no size of a call in the model",
            )
    free = set().union(*(symbols.free_symbols(n.meta.get("val")) for n in graph.nodes))
    by_symbol = {t.symbol: t for t in reversed(traced)}
    if free - by_symbol.keys():
        raise SizeError("sizes depend on something else than sizes of inputs", why=f"{free - by_symbol.keys()}")
    last = graph.find_nodes(op="placeholder")[-1]
    size_inputs = []
    for size in [t for t in traced if t.symbol in free and by_symbol[t.symbol] is t]:
        with graph.inserting_after(last):
            last = graph.placeholder(f"size_{size.name}")
        last.meta["val"] = env.create_symintnode(size.symbol, hint=symbols.point(env, size.symbol))
        set_info(last, NodeInfo(phase=Phase.FORWARD))
        size_inputs.append((size, last))
    inputs = {node for _, node in size_inputs}
    numbers = [n for n in graph.nodes if isinstance(n.meta.get("val"), torch.SymInt) and n not in inputs]
    for node in numbers:
        expression = symbols.expression(node.meta["val"])
        number = (
            expression
            if isinstance(expression, int)
            else sizes.number_node(graph, node.meta["val"], beside=set(numbers))
        )
        for user in list(node.users):
            sizes.replace_number(user, node, number)
    for node in reversed(numbers):
        if not node.users:
            graph.erase_node(node)
    for node in list(reversed(graph.nodes)):
        if is_symbolic(node.meta.get("val")):
            if node.op == "call_function" and not node.users:
                graph.erase_node(node)
            elif node.op == "call_function":
                set_info(node, info(node).replace(phase=Phase.FORWARD))
    return size_inputs


def with_own_sizes(program: Program, traced: Sequence[TracedSize], declared: SymbolicSizes | None) -> Program:
    """Return the captured program with an environment of its own and the conditions that it holds for; the program
    itself where all sizes are numbers."""
    if declared is None or not traced:
        return program
    env = program.fake_mode.shape_env
    symbols_of = {t.symbol: t.name for t in reversed(traced)}
    sizes.named_symbols(env, symbols_of)
    conditions = [(g.condition, g.where) for g in symbols.guards(env)]
    conditions += [(c, None) for c in map(env.replace, fits(env)) if not c.is_Boolean or c.free_symbols]
    asked = [
        SizeGuard(symbols.text(c, symbols_of), where) for c, where in conditions if c.free_symbols <= symbols_of.keys()
    ]
    if len(asked) < len(conditions):
        raise SizeError(
            "sizes are compared with numbers that the model changes", why="a program can't be told of these"
        )
    own = {port.name for port in program.inputs if port.role is InputRole.SIZE}
    tables = table_bounds(program.graph, symbols_of)
    every = _with_bounds(tuple(_known_size(t, env, declared, tables.get(t.name)) for t in traced), traced, env)
    own_sizes = Sizes(tuple(s for s in every if s.name in own), (), tuple(s for s in every if s.name not in own))
    if not own_sizes:  # (the model decides by elements of inputs, and computes nothing with them)
        program.sizes = replace(own_sizes, guards=tuple(dict.fromkeys(asked)))
        return program
    mode, given = sizes.new_mode(own_sizes.symbols, own_sizes.typical)
    new_program = sizes.converted(program, mode, given, own_sizes)
    for _ in check_values(
        new_program, ValueCache()
    ):  # (the guards of evaluating the operators once more are among its conditions)
        pass
    new_guards = sizes.guards_of(mode.shape_env)
    by_condition = {guard.condition: guard for guard in reversed([*asked, *new_guards])}  # (the first one has a line)
    new_program.sizes = replace(own_sizes, guards=tuple(reversed(by_condition.values())))
    sizes.seal(new_program)
    return new_program


def _with_bounds(every: tuple[ProgramSize, ...], traced: Sequence[TracedSize], env: Any) -> tuple[ProgramSize, ...]:
    """Return sizes with those that are products of others, or other arithmetic on them, as large as these may make
    them."""
    by_name = {size.name: size for size in every}
    for size in (size for size in every if len(size.factors) > 1):
        factors = [by_name[name] for name in size.factors]
        most = [factor.high for factor in factors if factor.high is not None]
        if len(most) == len(factors) and (size.high is None or math.prod(most) < size.high):
            by_name[size.name] = replace(size, high=math.prod(most), where=factors[0].where)
    ranges = {t.symbol: (by_name[t.name].low, by_name[t.name].high) for t in traced}
    for one in traced:
        most_rows = symbols.upper_bound(env, one.symbol, ranges)
        if by_name[one.name].high is None and most_rows is not None:
            by_name[one.name] = replace(by_name[one.name], high=most_rows)
    return tuple(by_name[size.name] for size in every)


def _known_size(traced: TracedSize, env: Any, declared: SymbolicSizes, table: TableBound | None) -> ProgramSize:
    low, high = symbols.bounds(env, traced.symbol)
    where = symbols.bounded_by(env, traced.symbol)
    if table is not None and (high is None or table.most < high):
        high, where = table.most, table.where
        refuse_beyond_table(declared.asked.get(traced.name, 0), table)
    bounded = high is not None  # (the model bounds it)
    wanted = declared.ranges.get(traced.name)
    if wanted is not None:
        if wanted[0] < low or (wanted[1] is not None and high is not None and wanted[1] > high):
            upper = "and more" if wanted[1] is None else f"to {wanted[1]}"
            raise _of_size(
                (traced.name,),
                f"size {traced.name!r} is declared to be {wanted[0]} {upper}",
                where=where,
                why=f"the model takes {low} {'and more' if high is None else f'to {high}'}",
                hint="declare a range within that, or enlarge what bounds it (a table of positions, say); where the model's code only branches "
                "on the size, leave max out: each side has a program",
            )
        low = max(low, wanted[0])
        high = wanted[1] if high is None else high if wanted[1] is None else min(high, wanted[1])
    point = math.prod(declared.points[name] for name in traced.factors or (traced.name,))
    typical = max(low, min(point, high or point))
    return ProgramSize(
        traced.name,
        low,
        high,
        typical,
        traced.index,
        traced.dim,
        where if bounded else None,
        traced.elements,
        traced.factors,
    )
