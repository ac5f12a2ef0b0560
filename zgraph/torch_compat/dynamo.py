"""Dynamo: a forward captured whole, as one graph of flat inputs."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType, MethodType
from typing import Any

import torch
import torch._inductor.lowering  # (registers lowerings before a joint trace: some models are captured only with it)
from torch import fx
from torch._decomp import decompositions as torch_decompositions
from torch._dynamo import config as dynamo_config
from torch._dynamo.convert_frame import fullgraph_capture
from torch._dynamo.exc import TorchDynamoException, Unsupported
from torch._dynamo.functional_export import _compiling_state_context  # type: ignore[attr-defined]
from torch._dynamo.pgo import auto_dynamic
from torch._dynamo.source import TensorProperty, TensorPropertySource
from torch._dynamo.utils import dynamo_timed, get_metrics_context
from torch._dynamo.variables import builder
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental import _config as symbol_config
from torch.fx.experimental.symbolic_shapes import DimDynamic, GuardOnDataDependentSymNode, ShapeEnv

from zgraph.torch_compat import fake_tensors, library_functions, symbols, traceable_functions
from zgraph.torch_compat.changing_numbers import split_numbers
from zgraph.torch_compat.dynamo_asserts import asserts_on_values, texts_of_sizes
from zgraph.torch_compat.dynamo_cache import fresh_dynamo_cache
from zgraph.torch_compat.element_sizes import first_elements, give_elements, known_elements
from zgraph.torch_compat.flat_capture import FlatCapture
from zgraph.torch_compat.guards import Effects, Guards, Scope, recorded
from zgraph.torch_compat.unbacked_sizes import _fakes_of_unknown_sizes

DynamoError = TorchDynamoException


# What tracing raises where it would need a tensor's value.
ValueDependent = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)


def depends_on_values(error: Exception) -> bool:
    """Return whether a capture failed because the model decides by values of tensors, as far as the error's message
    shows."""
    names = r"data.dependent|DynamicOutputShape|DataDependent|Python number that depends on values"
    return re.search(names, str(error), re.IGNORECASE) is not None


class _LogMethod(str):
    """A method of `logging.Logger` that is also a string: equal to the method, but printable (torch 2.11 logs its
    configuration)."""

    function: Any

    def __new__(cls, function: Any) -> _LogMethod:
        method = super().__new__(cls, function.__qualname__)
        method.function = function
        return method

    def __deepcopy__(self, memo: Any) -> _LogMethod:
        return self

    def __eq__(self, other: object) -> bool:
        return self.function is getattr(other, "function", other)

    def __hash__(self) -> int:
        return hash(self.function)

    def __reduce__(self) -> Any:  # (dynamo copies its configuration to log it)
        return _LogMethod, (self.function,)


def _log_methods() -> set[Any]:
    """Return the logging methods whose calls dynamo leaves out: by itself it refuses to trace a call of a logger.

    They are looked up at each capture: libraries add methods of their own (`warning_once`) when they are imported.
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


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """Let dynamo trace the functions of `traceable_functions` and `library_functions` in place of the libraries' own."""
    import torch.nn.functional as F
    from torch._dynamo import variables
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    kinds: Any = variables  # (torch exports it without types)

    def stands(function: Any, where: Callable[[dict[str, Any]], bool] = lambda given: True) -> Callable[..., Any]:
        """Return a handler that traces `function`, but leaves the call to torch where `where` is false of its arguments
        by name."""

        def called(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            given = dict(zip(inspect.signature(function).parameters, args, strict=False)) | kwargs
            if not where({name: value.realize() for name, value in given.items()}):
                return None  # (torch's own)
            return kinds.UserFunctionVariable(function).call_function(tx, list(args), kwargs)

        return called

    functions = {
        torch.nn.modules.transformer._detect_is_causal_mask: traceable_functions.detect_is_causal_mask,
        **library_functions.stand_ins(),
    }

    def call(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        function = functions.get(variable.fn)
        if function is None:
            return traced(variable, tx, args, kwargs)
        return traced(kinds.UserFunctionVariable(function), tx, [*variable.self_args(), *args], kwargs)

    def apply(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        function = functions.get(variable.fn_cls)
        if function is None:
            return applied(variable, tx, args, kwargs)
        return traced(kinds.UserFunctionVariable(function), tx, args, kwargs)

    handlers: dict[Any, Any] = TorchInGraphFunctionVariable._get_handlers()
    ours = {
        torch.cov: stands(traceable_functions.cov),
        torch.corrcoef: stands(traceable_functions.corrcoef),
        F.batch_norm: stands(
            traceable_functions.batch_norm, lambda given: isinstance(given.get("momentum"), kinds.SymNodeVariable)
        ),
        F.ctc_loss: stands(
            traceable_functions.ctc_loss, lambda given: not isinstance(given["target_lengths"], kinds.TensorVariable)
        ),
        F.gaussian_nll_loss: stands(F.gaussian_nll_loss),  # (traced itself: it raises by a value)
    }
    theirs = {function: handlers[function] for function in ours if function in handlers}
    traced, applied = kinds.UserFunctionVariable.call_function, kinds.AutogradFunctionVariable.call_apply
    handlers.update(ours)
    kinds.UserFunctionVariable.call_function, kinds.AutogradFunctionVariable.call_apply = call, apply
    try:
        yield
    finally:
        kinds.UserFunctionVariable.call_function, kinds.AutogradFunctionVariable.call_apply = traced, applied
        for function in ours:
            del handlers[function]
        handlers.update(theirs)


@contextlib.contextmanager
def _leaves_within() -> Iterator[None]:
    """Leave out that a tensor of the forward's own begins to require gradients, if outputs are computed of it.

    Transformers and PEFT let the output of frozen embeddings require gradients, for torch's older checkpoints: a backward gives the
    parameters the same gradients without it. By itself dynamo refuses this. It still does where such a tensor is itself an output, or
    kept by the model, whose `grad` could be asked for.
    """
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.variables.builtin import SetAttrBuiltinVariable
    from torch._dynamo.variables.tensor import TensorVariable

    checked, assigned = OutputGraph._check_requires_grad_intermediate_outputs, SetAttrBuiltinVariable._call_setattr

    def check(output: Any, values: Any, tx: Any) -> None:
        try:
            checked(output, values, tx)
        except Unsupported:
            leaves = {v.as_proxy().node for v in output.leaf_var_creation_order if not v.source}
            if leaves & {v.as_proxy().node for v in values if isinstance(v, TensorVariable)}:
                raise
            allowed = torch._C._functorch.set_inplace_requires_grad_allowed
            for node in [n for n in output.graph.nodes if n.target in ("requires_grad_", allowed)]:
                output.graph.erase_node(node)

    def assign(variable: Any, tx: Any, obj: Any, name: Any, value: Any) -> Any:
        if isinstance(obj, TensorVariable) and obj.source is None and name.as_python_constant() == "requires_grad":
            obj.method_requires_grad_(tx, value)
            return value
        return assigned(variable, tx, obj, name, value)

    there: Any = OutputGraph
    builtin: Any = SetAttrBuiltinVariable
    there._check_requires_grad_intermediate_outputs, builtin._call_setattr = check, assign
    try:
        yield
    finally:
        there._check_requires_grad_intermediate_outputs, builtin._call_setattr = checked, assigned


@contextlib.contextmanager
def _traced_otherwise() -> Iterator[None]:
    """Let dynamo trace what it refuses by itself, and what it would trace as another function than is meant."""
    with _stand_ins(), _leaves_within():
        yield


def capture_mode() -> Any:
    """Return the mode of a capture's fake tensors: sizes are numbers, except those that depend on values, which are
    symbols."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def capture_flat(
    bound: MethodType,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    numbers: Sequence[str] = (),
    lists: Sequence[Any] = (),
    open_dims: Mapping[int, Mapping[int, str]] = MappingProxyType({}),
    values: Mapping[int, torch.Tensor] = MappingProxyType({}),
    open_elements: Mapping[int, Mapping[int, Any]] = MappingProxyType({}),
) -> FlatCapture:
    """Capture a bound forward whole with dynamo. Raises dynamo's own errors (`DynamoError`).

    `numbers` names (as guards do) the Python numbers that the forward changes: they become inputs, not constants. `lists` are lists that it
    appends to, whose contents may change between calls. `open_dims` names the symbolic dimensions of fake tensors, by the tensors' ids: equal
    sizes share a symbol. `values` has the values of fake tensors that are constants, by id; their `open_elements` are symbols (times their
    `unit`), and then sizes share one by their names. Raises `NumberInGraphError` for a number that must be a constant.
    """
    function: Any = bound.__func__
    with (
        quiet(),
        fresh_dynamo_cache(),
        _compiling_state_context(),
        dynamo_config.patch(
            skip_guards_on_constant_func_defaults=False,  # (torch 2.11 keeps no guard on them unless it is told to)
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
        # (A composite operator may make symbols for sizes that none of its results has.)
        symbol_config.patch(soft_pending_unbacked_not_found_error=True),  # type: ignore[attr-defined]
        _symbolic(numbers, open_dims),
        _known(values, open_elements, open_dims),
        get_metrics_context(),
        dynamo_timed("fullgraph_capture"),
        asserts_on_values(),
        _traced_otherwise(),
        _fakes_of_unknown_sizes(),
        recorded(function, lists) as effects,
        _cached_calls(effects),
    ):
        output = fullgraph_capture(bound, args, kwargs)
        if output.backend_input is None:
            raise ValueError("the model's forward computes nothing with tensors")
        bindings = (scope := Scope(function)).of(bound.__self__, args, kwargs)
        if values:
            _fold_known(output.backend_input.graph_module.graph, repeats=bool(open_elements))
        with symbols.without_guards(output.backend_input.fake_mode.shape_env if open_elements else None):
            guards = Guards(output, scope, function.__code__, effects, bindings, bool(open_dims or open_elements))
    graph_module, fake_mode = output.backend_input.graph_module, output.backend_input.fake_mode
    # (Dynamo adds the graph to the globals of the user's module, for its generated code; a replay has its own globals.)
    function.__globals__.pop(output.backend_input.backend_id, None)
    graph_module, apart = split_numbers(graph_module, fake_mode) if numbers else (graph_module, None)
    return FlatCapture(graph_module, fake_mode, effects, output, function, guards, apart)


@contextlib.contextmanager
def _cached_calls(effects: Effects) -> Iterator[None]:
    """Call a function behind functools.lru_cache at capture if its arguments are constants, and note a constant that it
    returns.

    By itself dynamo traces the function behind the cache, whose result may differ from the cached one. It still does
    where the result is no constant.
    """
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.functions import WrapperUserFunctionVariable as Wrapper

    through = Wrapper.call_function

    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        own = type(self.wrapper_obj) is _CACHE and not _module_of(self.wrapper_obj).startswith("torch")
        if own and all(v.is_python_constant() for v in [*args, *kwargs.values()]):
            given = tuple(v.as_python_constant() for v in args), {k: v.as_python_constant() for k, v in kwargs.items()}
            with contextlib.suppress(Exception):  # (if it raises, tracing through it raises the same)
                value = self.wrapper_obj(*given[0], **given[1])
                if type(value) in (type(None), bool, int, float, str):
                    effects.cached.append((self.wrapper_obj, *given, value))
                    return ConstantVariable.create(value)
        return through(self, tx, args, kwargs)

    Wrapper.call_function = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        Wrapper.call_function = through  # type: ignore[method-assign]


_CACHE = type(functools.lru_cache(lambda: None))


def _module_of(function: Any) -> str:
    return getattr(function, "__module__", None) or ""


def hung_on(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that a user has set on a tensor, without dynamo's marks of its sizes."""
    return {k: v for k, v in vars(tensor).items() if not k.startswith("_dynamo_") and k not in _MARKS}


_MARKS = ("_has_dynamo_dim_marking", "_specialize_on")


@contextlib.contextmanager
def _symbolic(names: Sequence[str], open_dims: Mapping[int, Collection[int]]) -> Iterator[None]:
    """Let dynamo take these numbers as inputs of its graph and these dimensions as symbols, and no others.

    What is marked as dynamic (`torch._dynamo.mark_dynamic`, `torch.compiler.config.dynamic_sources`) is meant for
    torch.compile: a program's signature has its sizes.
    """
    there: Any = builder
    process, asked, form = there.process_automatic_dynamic, there.is_dynamic_source, there._automatic_dynamic
    literal = there.VariableBuilder.wrap_literal

    def wrap(self: Any, value: Any) -> Any:  # (dynamo would wrap a float late, after making it a constant)
        return self.wrap_symfloat(value) if type(value) is float and self.source.name in names else literal(self, value)

    def of_floats(tx: Any, name: str, *rest: Any, **named: Any) -> Any:
        entry = process(tx, name, *rest, **named)
        return replace(entry, scalar=auto_dynamic) if name in names else entry

    def of_integers(name: str, *rest: Any, **named: Any) -> bool:
        return name in names

    def of_tensors(tensor: Any, tx: Any, source: Any, static_shapes: bool, *rest: Any, **named: Any) -> Any:
        context = form(tensor, tx, source, True, *rest, **named)
        return symbols.contexts(context, open_dims[id(tensor)]) if id(tensor) in open_dims else context

    there.process_automatic_dynamic, there.is_dynamic_source = of_floats, of_integers
    there._automatic_dynamic = of_tensors
    there.VariableBuilder.wrap_literal = wrap
    try:
        yield
    finally:
        there.process_automatic_dynamic, there.is_dynamic_source = process, asked
        there._automatic_dynamic = form
        there.VariableBuilder.wrap_literal = literal


@contextlib.contextmanager
def _known(
    values: Mapping[int, torch.Tensor],
    open_elements: Mapping[int, Mapping[int, Any]],
    open_dims: Mapping[int, Mapping[int, str]],
) -> Iterator[None]:
    """Let dynamo know the values of fake inputs, and what it computes from them alone (see `capture_flat`)."""
    are_open = bool(open_elements)
    with (
        _by_name(open_dims if are_open else {}),
        fake_tensors.known_values(bool(values)),
        known_elements(are_open),
        _with_values(values, open_elements),
        texts_of_sizes(are_open),
    ):
        yield


@contextlib.contextmanager
def _by_name(open_dims: Mapping[int, Mapping[int, str]]) -> Iterator[None]:
    """Give dimensions of fake tensors, by the tensors' ids, one symbol for each name, also where two names have equal
    sizes."""
    there: Any = builder
    if not open_dims:
        yield
        return
    form, create = there._automatic_dynamic, ShapeEnv.create_symbol
    names: dict[Any, str] = {}  # by (source of the tensor, dimension)

    def of_tensors(tensor: Any, tx: Any, source: Any, *rest: Any, **named: Any) -> Any:
        names.update({(source, dim): name for dim, name in open_dims.get(id(tensor), {}).items()})
        return form(tensor, tx, source, *rest, **named)

    def created(env: Any, val: Any, source: Any, dynamic_dim: Any = DimDynamic.DUCK, *rest: Any, **named: Any) -> Any:
        of_size = isinstance(source, TensorPropertySource) and source.prop is TensorProperty.SIZE
        name = names.get((source.base, source.idx)) if of_size and dynamic_dim is DimDynamic.DUCK else None
        if name is None:
            return create(env, val, source, dynamic_dim, *rest, **named)
        return symbols.by_name(env, name, val, lambda: create(env, val, source, DimDynamic.DYNAMIC, *rest, **named))

    there._automatic_dynamic, ShapeEnv.create_symbol = of_tensors, created  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        there._automatic_dynamic, ShapeEnv.create_symbol = form, create  # type: ignore[method-assign]


@contextlib.contextmanager
def _with_values(values: Mapping[int, torch.Tensor], open_elements: Mapping[int, Mapping[int, Any]]) -> Iterator[None]:
    """Tell dynamo the values of these fake inputs, by their ids; it then also knows what is computed from them alone.
    Elements that are open are symbols."""
    there: Any = builder
    wrap = there.wrap_to_fake_tensor_and_record

    def wrapped(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        fake = wrap(tensor, *args, **kwargs)
        if id(tensor) in open_elements:
            numbers, env = values[id(tensor)].reshape(-1).tolist(), fake.fake_mode.shape_env
            is_open = open_elements[id(tensor)]
            sizes = {at: symbols.element(env, one.name, numbers[at], one.unit) for at, one in is_open.items()}
            give_elements(fake, [sizes.get(at, n) for at, n in enumerate(numbers)])
        elif id(tensor) in values:
            fake.constant = values[id(tensor)]
        return fake

    there.wrap_to_fake_tensor_and_record = wrapped
    try:
        yield
    finally:
        there.wrap_to_fake_tensor_and_record = wrap


def _fold_known(graph: fx.Graph, *, repeats: bool) -> None:
    """Replace nodes of known value by constants where the operator's sizes depend on values, then forget all known
    values; with `repeats`, before that, what repeats elements by known numbers.

    They are forgotten because torch takes a view of a known tensor for a tensor of its own.
    """
    if repeats:
        _fold_repeats(graph)
    for node in list(graph.nodes):
        value = node.meta.get("example_value")
        if getattr(value, "constant", None) is None:
            continue
        numbers, value.constant = value.constant.reshape(-1).tolist(), None
        if node.op == "placeholder":
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("example_value"))
        run = functools.partial(getattr(args[0], node.target), *args[1:]) if node.op == "call_method" else node.target
        mode = value.fake_mode
        with contextlib.suppress(Exception), mode, mode.shape_env.ignore_fresh_unbacked_symbols():
            new_value = run(**kwargs) if node.op == "call_method" else run(*args, **kwargs)
            if all(type(size) is int for size in new_value.shape):
                node.meta["example_value"], new_value.constant = new_value, None
                continue
        with graph.inserting_after(node):
            flat = graph.call_function(torch.tensor, (numbers,), {"dtype": value.dtype, "device": value.device})
        with graph.inserting_after(flat):
            reshape = graph.call_method("reshape", (flat, tuple(value.shape)))
        flat.meta, reshape.meta = {**node.meta, "example_value": value.reshape(-1)}, dict(node.meta)
        node.replace_all_uses_with(reshape)
        graph.erase_node(node)


def _fold_repeats(graph: fx.Graph) -> None:
    """Replace what repeats elements as often as known numbers, or symbols, say by their concatenation."""
    for node in list(graph.nodes):
        if node.target not in (torch.repeat_interleave, "repeat_interleave") or len(node.args) != 2 or node.kwargs:
            continue
        rows, repeats = node.args
        of: Any = repeats.meta.get("example_value") if isinstance(repeats, fx.Node) else None
        numbers = first_elements(of) or []
        if not numbers and getattr(of, "constant", None) is not None:
            numbers = of.constant.tolist()
        shape = rows.meta["example_value"].shape
        unknown = not numbers or symbols.is_unknown(node.meta["example_value"].shape[0])  # (after a write, too)
        if unknown or len(shape) != 1 or type(shape[0]) is not int or shape[0] != len(numbers):
            continue
        with graph.inserting_before(node):
            pieces: list[fx.Node] = []
            new_nodes: list[fx.Node] = []
            for at, number in enumerate(numbers):
                piece = graph.call_method("narrow", (rows, 0, at, 1))
                element = graph.call_method("select", (repeats, 0, at)) if symbols.is_symbolic(number) else None
                count = number if element is None else graph.call_method("item", (element,))
                pieces.append(graph.call_method("expand", (piece, count)))
                new_nodes += [n for n in (piece, element, count, pieces[-1]) if isinstance(n, fx.Node)]
            selected = graph.call_function(torch.cat, (pieces,))
        for inner in new_nodes:
            inner.meta = {k: v for k, v in node.meta.items() if k != "example_value"}
        selected.meta = dict(node.meta)
        node.replace_all_uses_with(selected)
        graph.erase_node(node)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from logging the traceback of an operator that can't be traced: the exception has it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def nothing(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.CRITICAL

    logger.addFilter(nothing)
    try:
        yield
    finally:
        logger.removeFilter(nothing)


@contextlib.contextmanager
def recurrent_layers() -> Iterator[None]:
    """Trace recurrent layers as they are computed in plain PyTorch.

    Torch's decomposition of several layers leaves out the dropout between them (a comparison is the wrong way round). A
    trained LSTM on CPU is traced without oneDNN's operator, which saves what its backward needs only in grad mode, and
    programs run outside of it.
    """
    chosen, layers = torch_decompositions.select_one_layer_lstm_function, torch_decompositions._rnn_helper
    if torch.is_grad_enabled():
        torch_decompositions.select_one_layer_lstm_function = lambda *_: torch_decompositions.one_layer_lstm
    torch_decompositions._rnn_helper = functools.partial(_with_dropout, layers)
    try:
        yield
    finally:
        torch_decompositions.select_one_layer_lstm_function = chosen
        torch_decompositions._rnn_helper = layers


def _with_dropout(
    of_layers: Callable[..., Any],
    input: torch.Tensor,
    hidden: Sequence[Any],
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    layer: Callable[..., Any],
) -> tuple[torch.Tensor, list[Any]]:
    """Run the layers one by one with torch's helper for recurrent layers, with dropout between them."""
    input = input.transpose(0, 1) if batch_first else input
    width, finals = 2 if bidirectional else 1, []
    for number in range(num_layers):
        here = slice(number * width, (number + 1) * width)
        input, last = of_layers(
            input, hidden[here], params[here], has_biases, 1, 0.0, train, bidirectional, False, layer
        )
        finals += last
        if dropout and train and number < num_layers - 1:
            input = torch.dropout(input, dropout, True)
    return input.transpose(0, 1) if batch_first else input, finals


def user_source(placeholder: fx.Node) -> str:
    """Return the user's name of a flat input ("L['x']" is x); its name in the graph where torch does not record one."""
    source = getattr(placeholder, "_dynamo_source", None)
    name = getattr(source, "name", None)
    name = name() if callable(name) else name
    return re.sub(r"\b[LG]\['(\w+)'\]", r"\1", name) if isinstance(name, str) else placeholder.name
