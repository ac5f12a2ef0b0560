"""Every private torch API that zgraph stands on, in one place, for torch 2.11 to 2.13.

A torch release that moves one of these breaks this file, or `torch_guards`, and no other.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import dis
import functools
import inspect
import linecache
import logging
import math
import operator
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
import torch._inductor.lowering  # (registers lowerings before a joint trace: some models are captured only with it)
from torch import fx
from torch._decomp import decompositions as torch_decompositions
from torch._dynamo import config as dynamo_config
from torch._dynamo.convert_frame import fullgraph_capture
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.functional_export import _compiling_state_context  # type: ignore[attr-defined]
from torch._dynamo.pgo import auto_dynamic
from torch._dynamo.utils import dynamo_timed, get_metrics_context
from torch._dynamo.variables import builder
from torch._functorch._aot_autograd.descriptors import (
    BackwardTokenAOTInput,
    BackwardTokenAOTOutput,
    ForwardTokenAOTInput,
    ForwardTokenAOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.fx.experimental import _config as symbol_config
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from zgraph.torch_compat import stand_ins
from zgraph.torch_compat.guards import Effects, Failing, Guards, Scope, live, recorded
from zgraph.torch_compat.numbers import Numbers, split_numbers

DynamoError = TorchDynamoException

# An operator with effects in a traced graph: (token, operator, its arguments) -> (token, its results).
WITH_EFFECTS = torch.ops.higher_order.with_effects

# What tracing raises where it would have to know a value.
ValueDependent = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)

# Held while dynamo, AOTAutograd or Inductor works: their state is the process's, not a thread's.
ONE_AT_A_TIME = threading.RLock()


class _LogMethod(str):
    """A method of `logging.Logger`: equal to it, but text to who wants to write it down (torch 2.11 logs its config)."""

    function: Any

    def __new__(cls, function: Any) -> _LogMethod:
        made = super().__new__(cls, function.__qualname__)
        made.function = function
        return made

    def __deepcopy__(self, memo: Any) -> _LogMethod:
        return self

    def __eq__(self, other: object) -> bool:
        return self.function is getattr(other, "function", other)

    def __hash__(self) -> int:
        return hash(self.function)

    def __reduce__(self) -> Any:  # (dynamo copies its configuration to log it)
        return _LogMethod, (self.function,)


def _log_methods() -> set[Any]:
    """What dynamo may leave out: it refuses to trace a call of a logger, but a log line is no part of a training step.

    Looked up at each capture: libraries add methods of their own (`warning_once`) when they are imported.
    """
    names = (
        "debug",
        "info",
        "warning",
        "warn",
        "error",
        "log",
        "exception",
        "warning_once",
        "warning_advice",
        "info_once",
    )
    return {_LogMethod(method) for name in names if (method := getattr(logging.Logger, name, None)) is not None}


class _Stop(Exception):
    """Ends the replay of dynamo's bytecode once it has handed over the graph's inputs."""


@dataclass
class FlatCapture:
    """What dynamo captured: a graph with flat inputs and outputs, and the bytecode around it.

    `graph_module` takes the graph's inputs (parameters, buffers and the user's tensors alike, in dynamo's order) and
    returns a flat tuple. `crops` has (flat output, dimension, flat output that is its size)
    for each output that the graph gives as long as it can be, because its size depends on values; these sizes stand behind the model's own
    outputs. `bind` runs the user's own calling convention around any function of that type.
    """

    graph_module: fx.GraphModule
    fake_mode: Any
    effects: Effects
    _output: Any
    _function: FunctionType
    _guards: Guards
    _numbers: Numbers | None = None
    crops: tuple[tuple[int, int, int], ...] = ()
    _bound: Callable[..., Any] | None = None
    _within: Callable[..., Sequence[Any]] | None = None

    def stale(self, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Failing | None:
        """What of the Python state that this capture depends on is another for this call; None if nothing is.

        That is everything the forward read on its way: arguments, attributes of the module and of what hangs on it (flags, a config,
        the lengths of lists, hooks), its closure, globals, and the forms of tensors found there. Costs some 10 µs a layer.
        """
        return self._guards.failing(owner, args, kwargs)

    def draws_floats(self) -> bool:
        """Does the forward draw a float from Python's `random`?"""
        inputs = self.graph_module.graph.find_nodes(op="placeholder")
        drawn = [n.meta["example_value"] for n in inputs if n.name.startswith("random_value_")]  # (dynamo's name)
        return any(v.is_floating_point() for v in drawn)

    @property
    def takes_numbers(self) -> bool:
        """Does the program take Python numbers that the forward itself changes?"""
        return self.number_inputs > 0

    @property
    def number_inputs(self) -> int:
        """How many of the flat inputs, the last ones, are such numbers."""
        return len(self._numbers.into) if self._numbers is not None else 0

    def changed_numbers(self, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """The names of the Python numbers that this capture takes for constants, and that are others now."""
        return self._guards.changed_numbers(owner, args, kwargs)

    def bind(self, compiled: Callable[..., Sequence[Any]]) -> Callable[..., Any]:
        """A function of the user's signature (with the module first) that runs `compiled` on the flat inputs."""

        def cropped(*flat: Any) -> Sequence[Any]:
            return self._cropped(compiled(*flat))

        within: Callable[..., Sequence[Any]] = cropped if self.crops else compiled
        if self._numbers is not None:
            within = self._numbers.around(within)
        # (torch 2.11 leaves builtins out of what its replay may refer to)
        names = {**vars(builtins), **self._output.graph_capture_output.f_globals}
        replay = self._output.forward_callable(compiled_fn=within, extra_globals=names)
        return live(replay, self._function, self._output.backend_input.backend_id)

    def _cropped(self, given: Sequence[Any]) -> Sequence[Any]:
        """The flat outputs of the model, of those of the graph: see `crops`."""
        values = list(given)
        for at, dim, of_size in self.crops:
            if isinstance(size := values[of_size], torch.Tensor) and not isinstance(size, FakeTensor):
                values[at] = values[at].narrow(dim, 0, int(size))
        return values[: len(values) - len({of_size for _, _, of_size in self.crops})]

    def around(
        self, within: Callable[..., Sequence[Any]], owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What a call gives whose graph is `within` this once. (Binding takes as long as ten calls.)"""
        if self._bound is None:
            self._bound = self.bind(self._run_within)
        self._within = within
        try:
            return self._bound(owner, *args, **kwargs)
        finally:
            self._within = None

    def _run_within(self, *flat: Any) -> Sequence[Any]:
        assert self._within is not None
        return self._within(*flat)

    def flatten(self, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The graph's inputs for a call."""
        found: list[tuple[Any, ...]] = []

        def stop(*inputs: Any) -> Sequence[Any]:
            found.append(inputs)
            raise _Stop

        with contextlib.suppress(_Stop):
            self.around(stop, owner, args, kwargs)
        return found[0] if found else ()


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for inner in kind.__subclasses__():
        yield from _subclasses(inner)


@contextlib.contextmanager
def _asserts_on_values() -> Iterator[None]:
    """Let dynamo trace every assertion on a tensor's values: by itself it refuses `assert not x`, `assert x and y`, `torch._assert(x, …)` and
    one whose message is put together where it fails."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    handlers = TorchInGraphFunctionVariable._get_handlers()
    constants = handlers.get(torch._assert)
    tables: list[tuple[list[Any], int, Any]] = []
    for kind in _subclasses(InstructionTranslatorBase):
        for code, jump in enumerate(kind.dispatch_table):
            name = dis.opname[code]
            if jump is not None and name.startswith("POP_JUMP") and name.endswith(("IF_TRUE", "IF_FALSE")):
                tables.append((kind.dispatch_table, code, jump))
                kind.dispatch_table[code] = _asserting(jump, name.endswith("IF_TRUE"))

    def called(variable: Any, tx: Any, condition: Any, message: Any = None) -> Any:
        from torch._dynamo.variables import ConstantVariable

        if _on_values(condition):
            constant = message is not None and message.is_python_constant()
            said = str(message.as_python_constant()) if constant else "an assertion of the model"
            _assert_in_graph(tx, condition, said, holds=True)
            return ConstantVariable.create(None)
        return constants(variable, tx, condition, message) if constants is not None else None

    handlers[torch._assert] = called
    try:
        yield
    finally:
        if constants is not None:
            handlers[torch._assert] = constants
        else:
            del handlers[torch._assert]
        for table, code, jump in tables:
            table[code] = jump


def _asserting(jump: Callable[[Any, Any], Any], if_true: bool) -> Callable[[Any, Any], Any]:
    """A jump over, or to, code that only raises (`assert`, or `if …: raise`) as an assertion of the graph; others as they are."""

    def inner(tx: Any, inst: Any) -> Any:
        over, to = _raises(tx, tx.instruction_pointer), _raises(tx, tx.indexof[inst.target])
        if not (over or to) or not _on_values(tx.stack[-1]) or _is_caught(tx):
            return jump(tx, inst)
        condition = tx.pop()
        message = _message(tx, tx.instruction_pointer if over else tx.indexof[inst.target])
        _assert_in_graph(tx, condition, message, holds=if_true == over)
        return tx.jump(inst) if over else None

    return inner


_MAY_RAISE = 100  # instructions that put together what is raised


def _raises(tx: Any, at: int) -> bool:
    """Does the code here do nothing but raise?"""
    for inst in tx.instructions[at : at + _MAY_RAISE]:
        name = inst.opname
        if name == "RAISE_VARARGS":
            return True
        stores = name.startswith(("STORE_", "DELETE_")) and not name.startswith("STORE_FAST")
        if stores or "JUMP" in name or name.startswith(("RETURN", "FOR_", "YIELD", "SEND", "RERAISE", "BEFORE_WITH")):
            return False
    return False


def _is_caught(tx: Any) -> bool:
    """May an exception that is raised here be handled in the function, or in one that called it? (A `with` lets it pass.)"""
    while tx is not None:
        entry = tx.current_instruction.exn_tab_entry
        if entry is not None:
            begin = tx.indexof[entry.target]
            if all(i.opname != "WITH_EXCEPT_START" for i in tx.instructions[begin : begin + 3]):
                return True
        tx = getattr(tx, "parent", None)
    return False


def _on_values(variable: Any) -> bool:
    """Is this a tensor, or a number that is made of a tensor's values?"""
    from torch._dynamo.variables import TensorVariable
    from torch._dynamo.variables.tensor import SymNodeVariable
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    variable = variable.realize()
    if isinstance(variable, SymNodeVariable):
        return bool(free_unbacked_symbols(variable.sym_num))
    return isinstance(variable, TensorVariable)


def _assert_in_graph(tx: Any, condition: Any, message: str, holds: bool) -> None:
    """Insert `torch._assert_async` of a condition that must be true, or must not be."""
    from torch._dynamo.variables.tensor import SymNodeVariable

    proxy = condition.realize().as_proxy()
    if isinstance(condition.realize(), SymNodeVariable):
        proxy = _traced(tx, torch.scalar_tensor, proxy)
    if not holds:
        proxy = _traced(tx, torch.logical_not, proxy)
    tx.output.create_proxy("call_function", torch._assert_async, (proxy, message), {})


def _traced(tx: Any, function: Any, operand: Any) -> Any:
    from torch._dynamo.variables.builder import wrap_fx_proxy

    return wrap_fx_proxy(tx, tx.output.create_proxy("call_function", function, (operand,), {})).as_proxy()


def _message(tx: Any, at: int) -> str:
    """What is said by code that only raises: its message if that is a constant, else its text in the source."""
    written = _said(tx)
    if written is not None:
        return written
    found = (i.argval for i in tx.instructions[at : at + 5] if i.opname == "LOAD_CONST" and isinstance(i.argval, str))
    return next(found, "an assertion of the model")


def _said(tx: Any) -> str | None:
    """The message of the assertion that is being traced, or what it asserts if it has none, as it is written in the source."""
    with contextlib.suppress(SyntaxError, ValueError):
        source = "".join(linecache.getlines(tx.f_code.co_filename))
        line = tx.current_instruction.positions.lineno or tx.lineno
        found: list[tuple[int, ast.expr]] = []
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Assert) and _covers(node, line):
                found.append((node.lineno, node.msg or node.test))
            elif isinstance(node, ast.If) and _covers(node.test, line) and isinstance(node.body[-1], ast.Raise):
                error = node.body[-1].exc or node.test
                found.append((node.lineno, error.args[0] if isinstance(error, ast.Call) and error.args else error))
        if found:
            _, said = max(found, key=lambda item: item[0])
            if isinstance(said, ast.Constant) and isinstance(said.value, str):
                return said.value
            return ast.get_source_segment(source, said)
    return None


def _covers(node: ast.stmt | ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """Let dynamo trace `stand_ins` in place of what they stand for."""
    import torch.nn.functional as F
    from torch._dynamo import variables
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    kinds: Any = variables  # (its types are not told to checkers)

    def stands(function: Any, where: Callable[[dict[str, Any]], bool] = lambda given: True) -> Callable[..., Any]:
        """A handler that traces `function`, but only where its arguments by name are so."""

        def called(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            given = dict(zip(inspect.signature(function).parameters, args, strict=False)) | kwargs
            if not where({name: value.realize() for name, value in given.items()}):
                return None  # (torch's own)
            return kinds.UserFunctionVariable(function).call_function(tx, list(args), kwargs)

        return called

    def call(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if variable.fn is torch.nn.modules.transformer._detect_is_causal_mask:
            return traced(kinds.UserFunctionVariable(stand_ins.detect_is_causal_mask), tx, args, kwargs)
        return traced(variable, tx, args, kwargs)

    handlers: dict[Any, Any] = TorchInGraphFunctionVariable._get_handlers()
    ours = {
        torch.cov: stands(stand_ins.cov),
        torch.corrcoef: stands(stand_ins.corrcoef),
        F.batch_norm: stands(
            stand_ins.batch_norm, lambda given: isinstance(given.get("momentum"), kinds.SymNodeVariable)
        ),
        F.ctc_loss: stands(
            stand_ins.ctc_loss, lambda given: not isinstance(given["target_lengths"], kinds.TensorVariable)
        ),
        F.gaussian_nll_loss: stands(F.gaussian_nll_loss),  # (traced itself: it raises by a value)
    }
    theirs = {function: handlers[function] for function in ours if function in handlers}
    traced = kinds.UserFunctionVariable.call_function
    handlers.update(ours)
    kinds.UserFunctionVariable.call_function = call
    try:
        yield
    finally:
        kinds.UserFunctionVariable.call_function = traced
        for function in ours:
            del handlers[function]
        handlers.update(theirs)


@contextlib.contextmanager
def _fakes_of_unknown_sizes() -> Iterator[None]:
    """Fake implementations of operators of which torch has none, with sizes that are symbols where they depend on values."""
    from torch._subclasses.fake_impls import op_implementations_dict

    aten = torch.ops.aten
    ours = {aten._ctc_loss.default: _fake_ctc, aten._ctc_loss.Tensor: _fake_ctc, aten.linalg_lstsq.default: _fake_lstsq}
    ours |= {o: _fake_ctc_backward for o in (aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor)}
    ours = {target: fake for target, fake in ours.items() if target not in op_implementations_dict}
    selecting = (aten.nonzero.default, aten.masked_select.default)
    theirs = {target: op_implementations_dict[target] for target in selecting}
    op_implementations_dict.update(ours)
    op_implementations_dict.update({target: _bounded(fake) for target, fake in theirs.items()})
    try:
        yield
    finally:
        for target in ours:
            del op_implementations_dict[target]
        op_implementations_dict.update(theirs)


# How large the sizes can be that the fake implementations of `selecting` operators make, by symbol. (Torch itself bounds none by two or
# less, and forgets that a mask may be larger than what it selects from.)
_bounds: weakref.WeakKeyDictionary[Any, dict[Any, int]] = weakref.WeakKeyDictionary()


def _bounded(fake: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(fake_mode: Any, func: Any, *tensors: Any, **named: Any) -> Any:
        selected = fake(fake_mode, func, *tensors, **named)
        shape = torch.broadcast_shapes(*(t.shape for t in (*tensors, *named.values())))
        if isinstance(selected.shape[0], torch.SymInt) and all(isinstance(n, int) for n in shape):
            _bounds.setdefault(fake_mode.shape_env, {})[selected.shape[0].node.expr] = math.prod(shape)
        return selected

    return bounded


def _unknown_size(fake_mode: Any) -> Any:
    from torch.fx.experimental.symbolic_shapes import _constrain_range_for_size

    with (
        fake_mode.shape_env.ignore_fresh_unbacked_symbols()
    ):  # (torch looks for it among the results of whoever calls the operator)
        size = fake_mode.shape_env.create_unbacked_symint()
    _constrain_range_for_size(size)
    return size


def _fake_ctc(fake_mode: Any, func: Any, log_probs: Any, *rest: Any, **named: Any) -> Any:
    time, batch, _ = log_probs.shape
    return log_probs.new_empty(batch), log_probs.new_empty(batch, time, _unknown_size(fake_mode))


def _fake_ctc_backward(fake_mode: Any, func: Any, grad: Any, log_probs: Any, *rest: Any, **named: Any) -> Any:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _fake_lstsq(fake_mode: Any, func: Any, a: Any, b: Any, rcond: Any = None, *, driver: str | None = None) -> Any:
    if (driver or ("gels" if a.device.type == "cuda" else "gelsy")) != "gelsy":
        raise DynamicOutputShapeException(func)
    vector = b.dim() == 1 or (b.dim() == a.dim() - 1 and b.shape == a.shape[:-1])
    shape = (
        (*a.shape[:-2], a.shape[-1])
        if vector
        else (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-1], b.shape[-1])
    )
    none = a.new_empty(_unknown_size(fake_mode))
    return a.new_empty(shape), none, a.new_empty(a.shape[:-2], dtype=torch.int64), a.new_empty(0)


def largest(size: Any) -> int | None:
    """The largest number that a symbolic size can be, None where nothing bounds it."""
    from torch.utils._sympy.value_ranges import bound_sympy

    known = _bounds.get(size.node.shape_env, {})
    if size.node.expr in known:
        return known[size.node.expr]
    upper = bound_sympy(size.node.expr, size.node.shape_env.var_to_range).upper
    return int(upper) if upper.is_finite and int(upper) < 1 << 40 else None


def capture_mode() -> Any:
    """The fake tensors of a capture: all sizes are numbers, but for those that depend on values, which are symbols."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def capture_flat(
    bound: MethodType,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    numbers: Sequence[str] = (),
    lists: Sequence[Any] = (),
) -> FlatCapture:
    """Capture a bound forward whole with dynamo. Raises dynamo's own errors (`DynamoError`).

    `numbers` that forward changes (by their names in guards) are no constants of the capture, and `lists` that it appends to may hold
    anything by then. Raises `NumberInGraphError` for a number that must be one.
    """
    function: Any = bound.__func__
    torch._dynamo.reset()
    with (
        _compiling_state_context(),
        dynamo_config.patch(
            ignore_logging_functions=_log_methods(),
            automatic_dynamic_shapes=False,
            assume_static_by_default=True,
            specialize_int=not numbers,
            specialize_float=not numbers,
            allow_rnn=True,
            skip_nnmodule_hook_guards=False,
            capture_dynamic_output_shape_ops=True,
            capture_scalar_outputs=True,
            reorderable_logging_functions={*dynamo_config.reorderable_logging_functions, warnings.warn},
        ),
        # (A composite operator may have such sizes that none of its results shows.)
        symbol_config.patch(soft_pending_unbacked_not_found_error=True),  # type: ignore[attr-defined]
        _symbolic(numbers),
        get_metrics_context(),
        dynamo_timed("fullgraph_capture"),
        _asserts_on_values(),
        _stand_ins(),
        _fakes_of_unknown_sizes(),
        recorded(function, lists) as effects,
    ):
        output = fullgraph_capture(bound, args, kwargs)
        if output.backend_input is None:
            raise ValueError("the model's forward computes nothing with tensors")
        scope = Scope(function)
        guards = Guards(output, scope, function.__code__, effects, scope.of(bound.__self__, args, kwargs))
    graph_module, fake_mode = output.backend_input.graph_module, output.backend_input.fake_mode
    apart = None
    if numbers:
        graph_module, apart = split_numbers(graph_module, fake_mode)
    return FlatCapture(graph_module, fake_mode, effects, output, function, guards, apart)


def hung_on(tensor: torch.Tensor) -> dict[str, Any]:
    """What a user has set on a tensor, without dynamo's marks of its sizes."""
    return {k: v for k, v in vars(tensor).items() if not k.startswith("_dynamo_") and k not in _MARKS}


_MARKS = ("_has_dynamo_dim_marking", "_specialize_on")


@contextlib.contextmanager
def _symbolic(names: Sequence[str]) -> Iterator[None]:
    """Let dynamo take these numbers as inputs of its graph, and nothing else: what is marked as dynamic (`torch._dynamo.mark_dynamic`,
    `torch.compiler.config.dynamic_sources`) is so for torch.compile, and a program has its sizes in its signature."""
    there: Any = builder
    process, asked, form = there.process_automatic_dynamic, there.is_dynamic_source, there._automatic_dynamic
    literal = there.VariableBuilder.wrap_literal

    def wrap(self: Any, value: Any) -> Any:  # (a float would be looked at late, and be a constant by then)
        return self.wrap_symfloat(value) if type(value) is float and self.source.name in names else literal(self, value)

    def of_floats(tx: Any, name: str, *rest: Any, **named: Any) -> Any:
        entry = process(tx, name, *rest, **named)
        return replace(entry, scalar=auto_dynamic) if name in names else entry

    def of_integers(name: str, *rest: Any, **named: Any) -> bool:
        return name in names

    def of_tensors(tensor: Any, tx: Any, source: Any, static_shapes: bool, *rest: Any, **named: Any) -> Any:
        return form(tensor, tx, source, True, *rest, **named)

    there.process_automatic_dynamic, there.is_dynamic_source = of_floats, of_integers
    there._automatic_dynamic = of_tensors
    there.VariableBuilder.wrap_literal = wrap
    try:
        yield
    finally:
        there.process_automatic_dynamic, there.is_dynamic_source = process, asked
        there._automatic_dynamic = form
        there.VariableBuilder.wrap_literal = literal


def export_joint(
    graph_module: fx.GraphModule, inputs: Sequence[Any], fake_mode: Any, decompositions: dict[Any, Any]
) -> fx.GraphModule:
    """AOTAutograd's joint forward+backward graph (the forward alone where nothing requires a gradient)."""
    with (
        contextlib.ExitStack() as stack,
        tracing(TracingContext(fake_mode)),
        _lstm_of_plain_operators(),
        _fakes_of_unknown_sizes(),
    ):
        joint = aot_export_joint_with_descriptors(stack, graph_module, tuple(inputs), decompositions=decompositions)
        return joint.graph_module


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Torch logs no error while something is tried that may well fail: the exception says it all."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _lstm_of_plain_operators() -> Iterator[None]:
    """Trace a trained LSTM on CPU without oneDNN's operator for a layer.

    That operator gives what its backward needs only in grad mode, and no program runs in it.
    """
    chosen = torch_decompositions.select_one_layer_lstm_function
    if torch.is_grad_enabled():
        torch_decompositions.select_one_layer_lstm_function = lambda *_: torch_decompositions.one_layer_lstm
    try:
        yield
    finally:
        torch_decompositions.select_one_layer_lstm_function = chosen


def trace_function(
    function: Callable[..., Any], inputs: Sequence[Any], fake_mode: Any, decompositions: dict[Any, Any]
) -> fx.GraphModule:
    """A function of fake tensors as a flat graph of aten operators; it returns a tuple."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def flat(*values: Any) -> Any:  # (a default argument would count as an input)
        return function(*values)

    with fake_mode, torch.no_grad():
        return make_fx(flat, decomposition_table=decompositions)(*inputs)


def is_token(desc: Any) -> bool:
    """Is this input or output of a joint graph one that only keeps operators with effects in order?"""
    return isinstance(
        desc, (ForwardTokenAOTInput, BackwardTokenAOTInput, ForwardTokenAOTOutput, BackwardTokenAOTOutput)
    )


def users_region(node: fx.Node) -> object:
    """The torch.utils.checkpoint region of a node that is to be computed again, None for none."""
    asked = node.meta.get("recompute")
    return node.meta.get("ac_graph_id", 0) if asked is not None and "RECOMPUTE" in str(asked) else None


def describe_input(desc: Any) -> tuple[str, int]:
    """("input" or "tangent", position among the flat inputs or outputs) of a placeholder of a joint graph."""
    if isinstance(desc, PlainAOTInput):
        return "input", desc.idx
    if isinstance(desc, TangentAOTInput) and isinstance(desc.output, PlainAOTOutput):
        return "tangent", desc.output.idx
    if isinstance(desc, TangentAOTInput) and isinstance(desc.output, InputMutationAOTOutput):
        return "mutation_tangent", describe_input(desc.output.mutated_input)[1]
    return f"unknown: {desc!r}", -1


def describe_output(desc: Any) -> tuple[str, int]:
    """("output" | "mutation" | "gradient", position) of an output of a joint graph."""
    if isinstance(desc, PlainAOTOutput):
        return "output", desc.idx
    if isinstance(desc, InputMutationAOTOutput):
        return "mutation", describe_input(desc.mutated_input)[1]
    if isinstance(desc, GradAOTOutput):
        return "gradient", describe_input(desc.grad_of)[1]
    return f"unknown: {desc!r}", -1


def keeps_graph() -> bool:
    """Is the running backward pass one with retain_graph=True?"""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def inductor_joint_passes(module: fx.GraphModule, fake_mode: Any) -> None:
    """Inductor's own passes over a joint graph (random operators become functions of seeds, patterns are replaced)."""
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    with V.set_fake_mode(fake_mode):
        joint_graph_passes(module)


@contextlib.contextmanager
def eager_random_numbers() -> Iterator[None]:
    """Inductor's programs made inside draw what plain PyTorch draws (by itself Inductor has a generator of its own)."""
    from torch._inductor import config

    with config.patch(fallback_random=True):
        yield


def inductor_decompositions() -> dict[Any, Any]:
    """The decompositions that Inductor needs at capture."""
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def draws_by_seed(target: Any) -> bool:
    """Is this operator one of Inductor's for seeds, and random numbers of them? Their plain implementations draw others than its code does."""
    prims = torch.ops.prims
    return target in (prims.inductor_seeds.default, prims.inductor_random.default, prims.inductor_randint.default)


def drawn_by_inductor(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """What Inductor's code draws for such an operator."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    if target is torch.ops.prims.inductor_seeds.default:
        count, device = args
        seeds = torch.empty(count, dtype=torch.int64, device=device)
        return torch.ops.aten.randint.low_out(-(2**63), 2**63 - 1, [count], out=seeds)  # type: ignore[no-any-return]
    seed = next(a for a in args if isinstance(a, torch.Tensor))
    mode = FakeTensorMode()
    graph = fx.Graph()
    given = graph.placeholder("seed")
    given.meta["val"] = mode.from_tensor(seed)
    made = graph.call_function(target, tuple(given if a is seed else a for a in args), kwargs)
    with mode:
        made.meta["val"] = target(*(given.meta["val"] if a is seed else a for a in args), **kwargs)
    graph.output((made,))
    module = fx.GraphModule(torch.nn.Module(), graph)
    function, _, _ = compile_with_inductor(module, [given.meta["val"]], mode, False, False, False)
    return function([seed])[0]  # type: ignore[no-any-return]


def min_cut_saved(module: fx.GraphModule, forward_outputs: int, tangents: Sequence[str]) -> set[str]:
    """The names of the values that torch's min-cut partitioner would save for the backward (it runs on a copy). `tangents` names the
    inputs that only the backward has."""
    from torch._functorch import config as functorch_config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    graph = fx.Graph()
    memo: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, memo))
    for old, new in memo.items():
        new.meta = dict(old.meta)
    names = {new.name: old.name for old, new in memo.items()}
    graph.output_node().meta["desc"] = [None] * len(graph.output_node().args[0])  # type: ignore[arg-type]
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta.setdefault("desc", None)
            late = names[node.name] in tangents
            node.target = f"{'tangents' if late else 'primals'}_{node.name}"  # (the partitioner knows them by this)
        drawn = node.args[0] if node.target is operator.getitem else node
        if isinstance(drawn, fx.Node) and torch.Tag.nondeterministic_seeded in getattr(drawn.target, "tags", ()):
            node.meta.pop("recompute", None)  # (a checkpoint region asks for it; what was drawn is saved all the same)
    with functorch_config.patch(activation_memory_budget=1.0):  # (a plan has a budget of its own, in bytes)
        forward, _ = min_cut_rematerialization_partition(
            lazy_module(module, graph), None, num_fwd_outputs=forward_outputs, static_lifetime_input_indices=[]
        )
    saved: Any = forward.graph.output_node().args[0]
    saved = saved[forward_outputs:]
    return {names.get(n.name, n.name) for n in saved if isinstance(n, fx.Node)}


def boxed(graph: fx.Graph) -> None:
    """Let a graph take its inputs as one list that it empties, so that each dies after its last use."""
    from torch.fx.graph import _BoxedCodeGen

    graph.set_codegen(_BoxedCodeGen())


def backend_of(group: str, device: torch.device) -> tuple[str, int]:
    """("gloo", this process's rank) of the process group of that name; ("", 0) if there is none."""
    try:
        found = _group(group)
        return found._get_backend(device).name(), found.rank()
    except (RuntimeError, KeyError, LookupError):
        return "", 0


def world_timeout() -> timedelta | None:
    """How long the default process group waits for a collective; None where its backend does not say."""
    from torch.distributed import distributed_c10d

    return timeout_of(distributed_c10d.group.WORLD)


def timeout_of(group: Any) -> timedelta | None:
    """How long a process group waits for a collective; None where its backend does not say."""
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout  # type: ignore[no-any-return]
        except (RuntimeError, AttributeError):
            continue
    return None


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Let a process group wait so long for each collective from now on."""
    from torch.distributed import distributed_c10d

    vars(distributed_c10d)["_set_pg_timeout"](timeout, group)


def shut(group: Any) -> None:
    """Let a process group end on this rank: what it waits for there fails, and over gloo, at once, what other ranks wait for it for.

    gloo's own abort() does nothing. But a receive that runs into its timeout closes all connections of its group, so one is made to: from each
    rank in turn, as one that is gone lets it fail before.
    """
    try:
        gloo = group._get_backend(torch.device("cpu")).name() == "gloo"
    except RuntimeError:
        gloo = False
    never = 2**31 - 1  # (a tag that no message has)
    for rank in range(group.size()) if gloo else ():
        with contextlib.suppress(RuntimeError):
            if rank != group.rank():
                group.recv([torch.empty(1)], rank, never).wait(timedelta(milliseconds=1))
    with contextlib.suppress(RuntimeError):
        backend = group._get_backend(torch.device("cuda"))
        if backend.name() == "nccl":
            backend.abort()


def is_fake(group: Any) -> bool:
    """Is there nobody behind this process group?"""
    return torch.distributed.get_backend(group) == "fake"


def default_store() -> Any:
    """The default process group's store."""
    from torch.distributed import distributed_c10d

    return vars(distributed_c10d)["_get_default_store"]()


def own_store(store: Any, prefix: str) -> Any:
    """The same store under a prefix, over a connection of its own. What it takes longer than some seconds for, fails."""
    made = torch._C._distributed_c10d.PrefixStore(prefix, store.clone())
    made.set_timeout(timedelta(seconds=5))
    return made


def ranks_of(group: str) -> tuple[int, ...]:
    """The ranks of the process group of that name, in the world's numbers."""
    from torch.distributed import get_process_group_ranks

    return tuple(get_process_group_ranks(_group(group)))


def _group(name: str) -> Any:
    """The process group of that name."""
    from torch.distributed import distributed_c10d

    return vars(distributed_c10d)["_resolve_process_group"](name)


def lazy_module(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """A graph module whose Python code is written when someone reads or calls it, not at each change."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph)


def name_origins(graph: fx.Graph) -> None:
    """Let Inductor's comments name this graph's own nodes, and its kernels the operators that passes inserted."""
    from torch.fx.traceback import NodeSource

    for node in graph.nodes:
        if node.op != "call_function":
            continue
        node.meta.pop("from_node", None)
        node.meta["from_node"] = [NodeSource(node, "zgraph")]
        unnamed = node.meta.get("original_aten") is None and isinstance(node.target, torch._ops.OpOverload)
        if unnamed and node.target.namespace != "_c10d_functional":  # (else it names the kernel of its operand)
            node.meta["original_aten"] = node.target


def name_held(inputs: Sequence[fx.Node]) -> None:
    """Tell Inductor, by their names, which inputs outlive the graph. It takes all others to be free behind their last reader, and holds a
    buffer for a later one of its size as long as that is not above the peak: which weights, let go one by one, would put at the start."""
    for node in inputs:
        node._rename(f"primals_{node.name}")
        node.target = node.name


@functools.cache
def order_keeper(turns: tuple[tuple[str, str], ...] = ()) -> Any:
    """A pass over Inductor's scheduler that lets no fusion move collectives and library calls past each other, nor what is of one of the
    `turns` (the names of nodes, each with that of its turn) past the turn before it: two turns' values would be there at once.

    Fusion puts a group of operators where the first of them stood, and what the others need (a wait, a product) before
    that. A chain of control dependencies through all kernels that are not Inductor's own forbids this; it extends no
    buffer's life.
    """
    from torch._inductor import custom_graph_pass, ir
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.scheduler import SchedulerNode

    base = getattr(
        custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass
    )  # torch 2.11: the latter

    class KeepOrder(base):  # type: ignore[misc, valid-type]
        def __call__(self, nodes: list[Any]) -> list[Any]:
            last: str | None = None
            for node in nodes:
                if not isinstance(node.node, (ir.ExternKernel, ir.TemplateBuffer)) or isinstance(
                    node.node, ir.MultiOutput
                ):
                    if isinstance(node, SchedulerNode):  # (else many loops as one, which no backend takes anew)
                        self._hold(node)
                    continue
                own = next((b.get_name() for b in node.get_outputs()), None)
                if own is None:
                    continue
                if last is not None:
                    node.add_fake_dep(WeakDep(last, own, is_fake=True))
                last = own
            apart = self._apart(nodes)
            if last is not None or apart:
                nodes[0].scheduler.compute_ancestors()
            return nodes

        @staticmethod
        def _hold(node: Any) -> None:
            # Of a kernel that reads what another wrote in place (what was waited for), the C++ backend forgets so when it takes its loops
            # anew, and fuses it in front of the wait: unless it has a dependency that was added.
            for read in sorted({d.name for d in node.read_writes.reads} & set(node.mutation_renames.values())):
                node.add_fake_dep(WeakDep(read, read, is_fake=True))

        def _apart(self, nodes: list[Any]) -> bool:
            turn_of = dict(turns)
            now: str | None = None
            before: list[str] = []  # what the turn before has made
            made: list[str] = []
            for node in nodes:
                of = {turn_of[o.name] for o in node.node.get_origins() if o.name in turn_of} if turns else ()
                if len(of) != 1:
                    continue
                (turn,) = of
                if turn != now:
                    now, before, made = turn, made, []
                for name in before:
                    node.add_fake_dep(
                        WeakDep(name, name, is_fake=True)
                    )  # (nothing is mutated: it names no write of the node's)
                made += [b.get_name() for b in node.get_outputs()]
            return bool(made)

        def uuid(self) -> Any:
            return custom_graph_pass.get_hash_for_files((__file__,)), turns

    return KeepOrder()


def compile_with_inductor(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    fake_mode: Any,
    is_backward: bool,
    combine: bool,
    round_each: bool,
    library: Callable[[Any], Any] = lambda kernels: kernels,
    reuse: bool = True,
    turns: tuple[tuple[str, str], ...] = (),
) -> tuple[Callable[[list[Any]], Sequence[Any]], str, list[Any]]:
    """(the boxed callable, its source, the strides of its outputs) of Inductor's compilation of one graph.

    `library` gives what its library calls are made of, for what it would make them of. With `combine` kernels that do not depend on
    each other become one (on CUDA, where each launch costs microseconds).
    Without `reuse` a buffer is freed where it dies: Inductor else holds it for the next of its size, where its own estimate of the peak, which
    knows of no homes, allows it. With `round_each` a fused kernel rounds to a low dtype wherever its operators would, one by one.
    The order of collectives and library calls is that of the graph: what fuses around them does not move them, and
    Inductor's own reorder passes are off (they move the start of a collective next to its wait). `turns`: see `order_keeper`.
    """
    import torch._inductor.config as inductor_config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    keep = {
        "reorder_for_locality": False,
        "reorder_for_peak_memory": False,
        "_pre_fusion_custom_pass": order_keeper(turns),
        "combo_kernels": combine,
        "emulate_precision_casts": round_each,
        "allow_buffer_reuse": reuse,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(V.set_fake_mode(fake_mode))
        stack.enter_context(tracing(TracingContext(fake_mode)))
        stack.enter_context(inductor_config.patch(keep))
        stack.enter_context(_known_sizes())
        stack.enter_context(_products_where_they_are())
        compiled = compile_fx_inner(module, list(inputs), is_backward=is_backward)
    if not hasattr(compiled, "output_strides"):  # (a graph without an operator is not compiled at all)
        values = [getattr(n, "meta", {}).get("val") for n in module.graph.output_node().args[0]]  # type: ignore[union-attr]
        return compiled, "", [v.stride() if isinstance(v, torch.Tensor) else None for v in values]
    if (runner := compiled.compiled_fn_runner) is not None:  # type: ignore[attr-defined]
        names = type(runner).call.__globals__
        names["extern_kernels"] = library(names["extern_kernels"])
    strides = [None if s is None else tuple(int(i) for i in s) for s in compiled.output_strides]
    return compiled, compiled.source_code, strides  # type: ignore[attr-defined]


@contextlib.contextmanager
def _known_sizes() -> Iterator[None]:
    """Let Inductor know the sizes of a graph's buffers where it weighs whether one may be held for a later one of its size. It only
    finds them where it reorders for the peak, and else takes all that a graph makes for nothing: nearly every buffer would be held."""
    from torch._inductor.codegen.wrapper import EfficientPeakEstimate
    from torch._inductor.memory import assign_memory_planning_info_for_scheduler_buffers
    from torch._inductor.virtualized import V

    made = EfficientPeakEstimate.__init__

    def counted(self: Any) -> None:
        scheduler = V.graph.scheduler
        assign_memory_planning_info_for_scheduler_buffers(scheduler.nodes, scheduler.name_to_buf)
        made(self)

    EfficientPeakEstimate.__init__ = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        EfficientPeakEstimate.__init__ = made  # type: ignore[method-assign]


@contextlib.contextmanager
def _products_where_they_are() -> Iterator[None]:
    """Let Inductor make one call of a product and the sum with something else only where the product need not wait for that: the first part
    of the gradient of a weight that is used twice would be computed where the last one is, and its operands held until then."""
    from torch._inductor.fx_passes import post_grad

    unfused = post_grad.should_prefer_unfused_addmm

    def moves_it(match: Any) -> bool:
        total = match.output_node()
        product = next(a for a in total.all_input_nodes if a.target is torch.ops.aten.mm.default)
        node = product.next
        while node is not total and _is_light(node):
            node = node.next
        return node is not total or bool(unfused(match))

    post_grad.should_prefer_unfused_addmm = moves_it
    try:
        yield
    finally:
        post_grad.should_prefer_unfused_addmm = unfused


def _is_light(node: fx.Node) -> bool:
    """Is this a view, or an operator of which fusion makes a loop?"""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    views = any(a.alias_info is not None for a in node.target._schema.arguments)
    return views or torch.Tag.pointwise in node.target.tags


def rebuild_inductor(
    compiled: Any, library: Callable[[Any], Any], source: str, names: dict[str, Any]
) -> Callable[[list[Any]], Sequence[Any]]:
    """The boxed callable of `compiled` with another `source` (its own one, changed) and `names` in the source's module. `library`: see
    `compile_with_inductor`."""
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.utils import align_inputs_from_check_idxs
    from torch.utils._ordered_set import OrderedSet

    key, path = PyCodeCache.write(source)
    module = PyCodeCache.load_by_key_path(key, path, attrs={**(getattr(compiled, "constants", None) or {}), **names})
    module.__dict__["extern_kernels"] = library(module.__dict__["extern_kernels"])
    written = OrderedSet(getattr(compiled, "mutated_input_idxs", ()))
    return align_inputs_from_check_idxs(module.call, getattr(compiled, "inputs_to_check", ()), written)


def onednn_product() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], None] | None:
    """product(a, b, into, beta): into = beta * into + a @ b by the oneDNN that torch comes with, for float32 matrices on the CPU. None where
    this torch has none. (torch itself calls it for other dtypes alone; it raises nothing that could be caught.)"""
    if not torch.backends.mkldnn.is_available() or torch.__version__ < "2.13":
        return None
    try:
        function = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))[
            "_ZN2at6native13mkldnn_matmulERKNS_6TensorES3_S3_ff"
        ]
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = [ctypes.POINTER(ctypes.c_void_p)] * 3 + [ctypes.c_float] * 2, None

    def product(a: torch.Tensor, b: torch.Tensor, into: torch.Tensor, beta: float) -> None:
        # (a Tensor of C++ is a pointer to what `_cdata` is the address of)
        function(*(ctypes.c_void_p(x._cdata) for x in (a, b, into)), beta, 1.0)

    return product


def dtensor(local: torch.Tensor, like: DTensorSpec) -> DTensor:
    """The DTensor of this layout whose local tensor is `local`: `DTensor.from_local` without autograd, in a tenth of the time."""
    return DTensor(local, like, requires_grad=False)  # type: ignore[call-arg]


def layout(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> DTensorSpec:
    """The layout of a DTensor, for `dtensor`."""
    return DTensorSpec(mesh, tuple(placements), TensorMeta(torch.Size(shape), tuple(stride), dtype))


def holders(tensor: torch.Tensor) -> int:
    """How many tensors there are on this one's storage, itself among them."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - 1  # (the storage object here)


def has_storage(tensor: torch.Tensor) -> bool:
    return bool(torch._C._has_storage(tensor))  # type: ignore[attr-defined]


def weak_storage(tensor: torch.Tensor) -> Any:
    """A weak reference to a tensor's storage: while it lives no other storage has its `storage_key`."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Are several elements of this tensor known to be at one address?"""
    return torch._debug_has_internal_overlap(tensor) == 1  # type: ignore[attr-defined,no-any-return]


def storage_address(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage; 0 where there is none (a sparse tensor, a subclass around others)."""
    around_others = isinstance(tensor, DTensor)  # (it has a storage, whose address torch refuses to give)
    return tensor.untyped_storage().data_ptr() if has_storage(tensor) and not around_others else 0


def version(tensor: torch.Tensor) -> int:
    """How often a tensor was written to in place, as autograd counts. (It does not for what was made in inference mode.)"""
    return 0 if tensor.is_inference() else tensor._version


def storage_key(tensor: torch.Tensor) -> int:
    """A number of a tensor's storage (which a fake one has too), the same for all tensors on it while one of them lives."""
    return int(tensor.untyped_storage()._cdata)


def user_source(placeholder: fx.Node) -> str:
    """What the user calls a flat input that dynamo found: "L['x']" is x. Its name in the graph where torch does not say."""
    source = getattr(placeholder, "_dynamo_source", None)
    name = getattr(source, "name", None)
    name = name() if callable(name) else name
    return re.sub(r"\b[LG]\['(\w+)'\]", r"\1", name) if isinstance(name, str) else placeholder.name


def elements_are_apart(tensor: torch.Tensor) -> bool:
    """Is each element of this tensor known to be at an address of its own? (Not so of an expanded one, nor of one with gaps.)"""
    return tensor.is_contiguous() or torch._debug_has_internal_overlap(tensor) == 0  # type: ignore[attr-defined]


def accumulates(node: Any) -> bool:
    """Does the running backward add to `.grad` of the leaf that this AccumulateGrad node is of? (Not so of one by `torch.autograd.grad`, and
    of one with `inputs` only of these.)"""
    try:
        return bool(torch._C._will_engine_execute_node(node))  # type: ignore[attr-defined]
    except RuntimeError:  # (torch's answer for a leaf whose gradient `torch.autograd.grad` returns)
        return False


def fix_strides(node: fx.Node) -> None:
    """Let Inductor make this value with the strides that it has in the program: a reader that needs them would else get a copy,
    and another one the value itself."""
    if node.op == "call_function":
        node.meta = {**node.meta, "inductor_realize_to_strides": True}


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that `torch.compile` calls as it is, at a graph break, and does not trace."""
    reason = "zgraph runs a compiled model: torch.compile around it calls it as a whole (fullgraph=True can't)"
    return torch._dynamo.disable(function, reason=reason)  # type: ignore[no-any-return, no-untyped-call]


def is_transformed() -> bool:
    """Is this inside of a transform of `torch.func`, or of `torch.jit.trace`?"""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None


def in_forward_mode() -> bool:
    """Is this inside of forward-mode differentiation?"""
    return forward_ad._current_level >= 0


def has_tangent(tensor: torch.Tensor) -> bool:
    """Does forward-mode differentiation follow this tensor?"""
    return in_forward_mode() and forward_ad.unpack_dual(tensor).tangent is not None


def call_module(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a module's class does to call it: hooks, and its forward."""
    return type(module)._call_impl(module, *args, **kwargs)


def below_autograd() -> Any:
    """Operators inside run without a look at autograd: a program has its own backward. (A collective's start costs 15 us less.)"""
    return torch._C._AutoDispatchBelowAutograd()


def without_bases() -> Any:
    """Views that are made inside do not keep alive what they are views of, and writes are not counted: what a program makes inside is nobody
    else's."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView))


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """What starts inside is in no profile. gloo's threads write into a profile when a transfer ends, and crash where the
    profile has ended before it."""
    autograd: Any = torch._C._autograd
    autograd._enable_record_function(False)
    try:
        yield
    finally:
        autograd._enable_record_function(True)


def land(values: Iterable[torch.Tensor]) -> None:
    """Wait for transfers that nobody reads: torch holds them and their buffers until someone has. For finalisers: those
    run anywhere, while somebody traces too, and when the process group may be gone."""
    if sys.is_finalizing():
        return
    with contextlib.suppress(RuntimeError), _disable_current_modes():
        for value in values:
            torch.ops._c10d_functional.wait_tensor(value)


class _WithoutCopies(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias.default(args[0])
        return func(*args, **(kwargs or {}))


def without_copies() -> Any:
    """A context in which a copy of a tensor is a view of it: what is made by taking parts is then seen to be that."""
    return _WithoutCopies()


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Put a text among what TORCH_TRACE collects, for tlparse; without TORCH_TRACE nothing is made."""
    torch._logging.trace_structured(  # type: ignore[attr-defined]
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=text,
        expect_trace_id=False,
    )


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # a tensor's, by the functions that register them


def has_hooks(param: torch.Tensor) -> bool:
    """Has a parameter hooks that autograd calls?"""
    return bool(param._backward_hooks or param._post_accumulate_grad_hooks)  # type: ignore[attr-defined]


def has_hook_over_several(param: torch.Tensor) -> bool:
    """Is one of them that of `torch.autograd.graph.register_multi_grad_hook`, which knows its tensors by their nodes?"""
    hooks = param._backward_hooks or {}
    return any(getattr(h, "__module__", None) == "torch.autograd.graph" for h in hooks.values())


def move_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Let one tensor have another's hooks; what removes them goes on to do so."""
    for name in _HOOKS:
        hooks = getattr(old, name)
        if hooks:
            setattr(new, name, hooks)


OPTIMIZER_HOOKS = tuple(
    f"_optimizer_{call}_{when}_hooks" for call in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")
)  # what an optimizer of torch's keeps its hooks in


def shard_of_another_rank(value: Any) -> tuple[int, ...] | None:
    """The place in its mesh of the rank that a shard was pickled by, where that is not this rank's; None for what is no such shard."""
    if not isinstance(value, DTensor) or all(p.is_replicate() for p in value.placements):
        return None
    mesh = value.device_mesh
    theirs = mesh.get_coordinate()  # (pickled with the mesh)
    mine = (mesh.mesh == torch.distributed.get_rank()).nonzero()
    if theirs is None or (len(mine) == 1 and mine[0].tolist() == list(theirs)):
        return None
    return tuple(theirs)
