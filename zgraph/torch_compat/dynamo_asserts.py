"""Assertions on values, which dynamo would leave out or break the graph at, become operators of the graph."""

from __future__ import annotations

import ast
import contextlib
import dis
import linecache
from collections.abc import Callable, Iterator
from typing import Any

import torch


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for inner in kind.__subclasses__():
        yield from _subclasses(inner)


@contextlib.contextmanager
def asserts_on_values() -> Iterator[None]:
    """Let dynamo trace every assertion on a tensor's values.

    By itself it refuses `assert not x`, `assert x and y`, `torch._assert(x, …)` and an assertion whose message is
    computed where it fails, and takes `torch._check_tensor_all` for a check of a Python number.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    handlers = TorchInGraphFunctionVariable._get_handlers()
    before = {function: handlers.get(function) for function in (torch._assert, torch._check_tensor_all)}
    tables: list[tuple[list[Any], int, Any]] = []
    for kind in _subclasses(InstructionTranslatorBase):
        for code, jump in enumerate(kind.dispatch_table):
            name = dis.opname[code]
            if jump is not None and name.startswith("POP_JUMP") and name.endswith(("IF_TRUE", "IF_FALSE")):
                tables.append((kind.dispatch_table, code, jump))
                kind.dispatch_table[code] = _asserting(jump, name.endswith("IF_TRUE"))

    for function, handler in before.items():
        handlers[function] = _called(handler, every=function is torch._check_tensor_all)
    try:
        yield
    finally:
        for function, handler in before.items():
            if handler is not None:
                handlers[function] = handler
            else:
                del handlers[function]
        for table, code, jump in tables:
            table[code] = jump


@contextlib.contextmanager
def texts_of_sizes(active: bool) -> Iterator[None]:
    """Let dynamo trace text that has a size in it (the message of a check, most often) without making the size a
    number.

    It does the same for tensors: a text that is returned is put together after the graph has run.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase as Translator
    from torch._dynamo.variables import StringFormatVariable
    from torch._dynamo.variables.tensor import SymNodeVariable

    if not active:
        yield
        return
    theirs = Translator._format_value

    def format_value(tx: Any, form: Any, flags: int) -> None:
        value = tx.stack[-1].realize()
        if not isinstance(value, SymNodeVariable) or not form.is_python_constant():
            return theirs(tx, form, flags)
        tx.pop()
        return tx.push(StringFormatVariable("{:" + form.as_python_constant() + "}", [value], {}))

    Translator._format_value = format_value  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Translator._format_value = theirs  # type: ignore[method-assign]


def _called(handler: Any, every: bool) -> Any:
    """Return a handler that turns a call of an assertion function into an assertion of the graph.

    It checks `every` element of a tensor, or its only one; a condition that is no tensor goes to dynamo's own
    `handler`.
    """

    def called(variable: Any, tx: Any, condition: Any, message: Any = None) -> Any:
        from torch._dynamo.variables import ConstantVariable

        if not _on_values(condition):
            return handler(variable, tx, condition, message) if handler is not None else None
        said = message.as_python_constant() if message is not None and message.is_python_constant() else None
        if callable(said):
            with contextlib.suppress(Exception):  # (it may need what only a run has)
                said = said()
        said = said if isinstance(said, str) else "an assertion of the model"
        _assert_in_graph(tx, condition, said, holds=True, every=every)
        return ConstantVariable.create(None)

    return called


def _asserting(jump: Callable[[Any, Any], Any], if_true: bool) -> Callable[[Any, Any], Any]:
    """Return a jump handler that turns a jump over, or to, code that only raises into an assertion of the graph.

    Such code is `assert`, or `if …: raise`. Other jumps go to `jump`.
    """

    def inner(tx: Any, inst: Any) -> Any:
        known = _known_value(tx.stack[-1])
        if known is not None:
            tx.stack[-1] = known
            return jump(tx, inst)
        over, to = _raises(tx, tx.instruction_pointer), _raises(tx, tx.indexof[inst.target])
        if not (over or to) or not _on_values(tx.stack[-1]) or _is_caught(tx):
            return jump(tx, inst)
        condition = tx.pop()
        message = _message(tx, tx.instruction_pointer if over else tx.indexof[inst.target])
        _assert_in_graph(tx, condition, message, holds=if_true == over)
        return tx.jump(inst) if over else None

    return inner


def _known_value(variable: Any) -> Any:
    """Return the constant truth value of a one-element tensor whose value tracing knows (computed from known inputs
    alone), else None."""
    from torch._dynamo.variables import ConstantVariable, TensorVariable

    variable = variable.realize()
    fake = variable.as_proxy().node.meta.get("example_value") if isinstance(variable, TensorVariable) else None
    value = getattr(fake, "constant", None)
    return ConstantVariable.create(bool(value)) if value is not None and value.numel() == 1 else None


_MAY_RAISE = 100  # instructions that may build the exception before it is raised


def _raises(tx: Any, at: int) -> bool:
    """Return whether the code that begins at this instruction does nothing but raise."""
    for inst in tx.instructions[at : at + _MAY_RAISE]:
        name = inst.opname
        if name == "RAISE_VARARGS":
            return True
        stores = name.startswith(("STORE_", "DELETE_")) and not name.startswith("STORE_FAST")
        if stores or "JUMP" in name or name.startswith(("RETURN", "FOR_", "YIELD", "SEND", "RERAISE", "BEFORE_WITH")):
            return False
    return False


def _is_caught(tx: Any) -> bool:
    """Return whether an exception raised here may be handled in the function or in one of its callers. (A `with` does
    not handle it.)"""
    while tx is not None:
        entry = tx.current_instruction.exn_tab_entry
        if entry is not None:
            begin = tx.indexof[entry.target]
            if all(i.opname != "WITH_EXCEPT_START" for i in tx.instructions[begin : begin + 3]):
                return True
        tx = getattr(tx, "parent", None)
    return False


def _on_values(variable: Any) -> bool:
    """Return whether this is a tensor, or a number that depends on a tensor's values."""
    from torch._dynamo.variables import TensorVariable
    from torch._dynamo.variables.tensor import SymNodeVariable
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    variable = variable.realize()
    if isinstance(variable, SymNodeVariable):
        return bool(free_unbacked_symbols(variable.sym_num))
    return isinstance(variable, TensorVariable)


def _assert_in_graph(tx: Any, condition: Any, message: str, holds: bool, every: bool = False) -> None:
    """Insert `torch._assert_async` of a condition that must be true (or false, without `holds`), of `every` element of
    it if asked."""
    from torch._dynamo.variables.tensor import SymNodeVariable

    proxy = condition.realize().as_proxy()
    if isinstance(condition.realize(), SymNodeVariable):
        proxy = _traced(tx, torch.scalar_tensor, proxy)
    if every:
        proxy = _traced(tx, torch.all, proxy)
    if not holds:
        proxy = _traced(tx, torch.logical_not, proxy)
    tx.output.create_proxy("call_function", torch._assert_async, (proxy, message), {})


def _traced(tx: Any, function: Any, operand: Any) -> Any:
    from torch._dynamo.variables.builder import wrap_fx_proxy

    return wrap_fx_proxy(tx, tx.output.create_proxy("call_function", function, (operand,), {})).as_proxy()


def _message(tx: Any, at: int) -> str:
    """Return the message of code that only raises: its source text, else a string constant of its first instructions."""
    source_text = _said(tx)
    if source_text is not None:
        return source_text
    constants = (
        i.argval for i in tx.instructions[at : at + 5] if i.opname == "LOAD_CONST" and isinstance(i.argval, str)
    )
    return next(constants, "an assertion of the model")


def _said(tx: Any) -> str | None:
    """Return the message of the assertion being traced, or its condition if it has none, as the source has it; None if
    not found."""
    with contextlib.suppress(SyntaxError, ValueError):
        source = "".join(linecache.getlines(tx.f_code.co_filename))
        line = tx.current_instruction.positions.lineno or tx.lineno
        messages: list[tuple[int, ast.expr]] = []
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Assert) and _covers(node, line):
                messages.append((node.lineno, node.msg or node.test))
            elif isinstance(node, ast.If) and _covers(node.test, line) and isinstance(node.body[-1], ast.Raise):
                error = node.body[-1].exc or node.test
                messages.append((node.lineno, error.args[0] if isinstance(error, ast.Call) and error.args else error))
        if messages:
            _, message = max(messages, key=lambda item: item[0])
            if isinstance(message, ast.Constant) and isinstance(message.value, str):
                return message.value
            return ast.get_source_segment(source, message)
    return None


def _covers(node: ast.stmt | ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)
