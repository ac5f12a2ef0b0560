"""From a plain module and example inputs to a captured `Program`.

Dynamo captures the module's forward whole, on fake tensors: parameters have their full shapes there, whatever a
rank really holds, so a model on the meta device or one that is sharded already is captured the same way.
AOTAutograd then makes the joint forward+backward graph. Both speak of flat inputs; which of these are parameters,
buffers or the user's is read from the identity of what dynamo's bytecode hands over, never from positions or names.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import random
import re
import sys
import time
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from zgraph.capture import equal_layers, masked_rows, repeated_layers
from zgraph.capture.asserts import keep_asserts, name_asserts
from zgraph.capture.data_dependent_sizes import fold_data_dependent_sizes, fold_effects, pad_outputs
from zgraph.capture.fake_inputs import Fakes
from zgraph.capture.former_storages import Former, FormerStorages, former_storages, insert, moved, seen_as
from zgraph.capture.ignored_targets import Ignores, ignored_in
from zgraph.capture.position_table_bounds import refuse_beyond_tables
from zgraph.capture.refuse_inputs import refuse_state
from zgraph.capture.storages import PlainStorages, written_twice
from zgraph.capture.symbolic_capture import (
    SymbolicSizes,
    TracedSize,
    canonical,
    refuse_numbers,
    refuse_unknown,
    take_out_numbers,
    traced_sizes,
    with_own_sizes,
    with_products,
)
from zgraph.errors import CaptureError, SignatureError, SizeError, UnsupportedError
from zgraph.names import module_names
from zgraph.plan.precision import Precision
from zgraph.program import ops
from zgraph.program.aliases import root_of
from zgraph.program.node import NodeInfo, Phase, info, module_of, set_info, source_of
from zgraph.program.program import InputRole, OutputRole, ParamSpec, Port, Program, of_backward
from zgraph.ranks import compile_progress
from zgraph.torch_compat import aot, compile_lock, dynamo, fake_tensors, fx_graphs, symbols, tensor_storage
from zgraph.torch_compat.element_sizes import given_elements
from zgraph.torch_compat.flat_capture import CONSTANTS, FlatCapture

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FlatInput:
    """One flat input of the captured forward."""

    role: InputRole  # parameter, buffer, the user's input, or a constant
    name: str  # the name of its port


@dataclass
class Trace:
    """A forward that dynamo captured for one input signature."""

    flat: FlatCapture  # dynamo's capture
    inputs: list[FlatInput]  # what each flat input is
    differentiable: frozenset[int]  # the flat outputs that can carry a gradient
    loss: int | None  # the flat output that is the model's own loss, differentiated or not; None if it returns none
    params: dict[str, ParamSpec]  # the layout of each parameter
    mesh: dict[str, int]  # the number of ranks along each mesh dimension
    casts: dict[int, torch.dtype]  # the dtype of each flat input that the program casts to the compute dtype
    output_dtype: torch.dtype | None  # the dtype that the program casts floating-point outputs to; None for no cast
    # flat inputs whose storage `as_strided` reads: they must begin where it begins
    from_start: set[int] = field(default_factory=set)
    # the flat inputs that are read from a parameter, because they are stored in its former memory
    former: dict[int, Former] = field(default_factory=dict)
    # all names of each module that the model has under several, by each of them
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    seconds: float = 0.0  # the time that the capture took
    sizes: tuple[TracedSize, ...] = ()  # the sizes that are symbols, and where they are
    open_sizes: SymbolicSizes | None = None  # the sizes that were to be symbols

    @property
    def pattern(self) -> frozenset[int]:
        """The flat outputs that a step starts its backward from: the loss, or all differentiable ones if the model
        returns no loss."""
        return frozenset(i for i in self.differentiable if i == self.loss) or self.differentiable

    @functools.cached_property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters among the flat inputs."""
        return tuple(port.name for port in self.inputs if port.role is InputRole.PARAMETER)

    @functools.cached_property
    def others(self) -> tuple[int, ...]:
        """The positions of the flat inputs that are no parameters."""
        return tuple(at for at, port in enumerate(self.inputs) if port.role is not InputRole.PARAMETER)

    @functools.cached_property
    def upstream(self) -> dict[int, frozenset[int]]:
        """For each flat output that others are computed from: those others, if their gradients reach it."""
        nodes: Any = self.flat.graph_module.graph.output_node().args[0]
        dependents: dict[int, set[int]] = {}
        for at in self.differentiable:
            before = _followed(nodes[at])
            for other in self.differentiable - {at}:
                if nodes[other] in before and nodes[other] is not nodes[at]:
                    dependents.setdefault(other, set()).add(at)
        return {at: frozenset(others) for at, others in dependents.items()}

    @functools.cached_property
    def reached(self) -> frozenset[int]:
        """The flat inputs that a gradient of any of the outputs may reach."""
        graph = self.flat.graph_module.graph
        nodes: Any = graph.output_node().args[0]
        before: set[fx.Node] = set()
        for at in self.differentiable:
            before |= _followed(nodes[at])
        return frozenset(i for i, node in enumerate(graph.find_nodes(op="placeholder")) if node in before)

    @functools.cached_property
    def ignored(self) -> set[Ignores]:
        """The targets that the model's classification losses leave out, and those of `loss_fn` as far as they were
        seen."""
        return ignored_in(self.flat.graph_module)

    @functools.cached_property
    def storages(self) -> PlainStorages:
        """The storages of the plain model's flat inputs and outputs, to see which are shared."""
        graph = self.flat.graph_module.graph

        def key(value: Any) -> int | None:
            value = value.meta.get("example_value") if isinstance(value, fx.Node) else None
            return tensor_storage.storage_key(value) if isinstance(value, torch.Tensor) else None

        inputs = tuple(key(n) for n in graph.find_nodes(op="placeholder"))
        return PlainStorages(inputs, tuple(key(n) for n in graph.output_node().args[0]))  # type: ignore[union-attr]

    def shapes_in(self, flat: Sequence[Any]) -> Callable[[torch.Tensor], tuple[int, ...]]:
        """Return a function that gives the shape of a fake tensor of the capture in a call with these flat inputs."""
        point = dict(zip([size.symbol for size in self.sizes], symbols.numbers_at(self.sizes, flat), strict=True))
        return lambda fake: tuple(symbols.substituted(symbols.expression(size), point) for size in fake.shape)

    def every_size(self) -> tuple[TracedSize, ...]:
        """Return the sizes that are symbols, and the products of elements that are symbols by now."""
        return with_products(self.sizes, self.flat.fake_mode.shape_env) if self.sizes else ()

    def source(self, index: int) -> str:
        """Return the user's name of a flat input."""
        port = self.inputs[index]
        if port.role in (InputRole.BUFFER, InputRole.PARAMETER) and index not in self.former:
            return f"self.{port.name}"
        return dynamo.user_source(self.flat.graph_module.graph.find_nodes(op="placeholder")[index])

    def refuse_moved(self, flat: Sequence[Any], memory: FormerStorages) -> None:
        """Raise `StepError` for a flat input that is in a replaced parameter's former memory now and was not at the
        capture, or the reverse.

        (A program reads the first kind from the parameter, and the second as it is.)
        """
        for at, former in self.former.items():
            if not memory.holds(flat[at]) or memory.former_of(flat[at], self.source(at)) is not former:
                raise moved(self.source(at), former.name)
        if memory.is_empty:
            return
        for at, (port, value) in enumerate(zip(self.inputs, flat, strict=True)):
            others = port.role is not InputRole.PARAMETER and at not in self.former and isinstance(value, torch.Tensor)
            if others and memory.holds(value) and memory.former_of(value, self.source(at)) is not None:
                raise moved(self.source(at), "")

    def refuse_overlap(self, written: Collection[int], flat: Sequence[Any], *, whole: bool) -> None:
        """Raise `SignatureError` where the forward writes to a flat input whose memory overlaps another's.

        Only pairs with a tensor of the call or a constant are checked, unless `whole` asks for all.
        """
        kinds = (InputRole.INPUT, InputRole.CONSTANT)
        others = range(len(flat)) if whole else [i for i, p in enumerate(self.inputs) if p.role in kinds]
        pair = written_twice(written, flat, others)
        if pair is not None:
            one, other = (self.source(at) for at in pair)
            raise SignatureError(
                f"forward writes to {one}, which shares memory with {other}",
                why="a program takes each tensor for one by itself: what is written to one would not reach the other",
                hint=f"give or register a copy ({other}.clone()), or take the view in forward ({one}[…])",
            )

    def buffers_kept(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, int]:
        """Return, for each flat output that is a buffer which forward has written to and stores in its own state
        without returning it, the buffer's flat input.

        (A spectral norm's, say.)
        """
        if self.flat.effects.is_empty:
            return {}
        values = flat_values(self.flat)
        returned = pytree.tree_leaves(self._replayed(module, args, kwargs, otherwise=()))
        returned_ids = {id(leaf) for leaf in returned}
        fakes = [n.meta.get("example_value") for n in self.flat.graph_module.graph.find_nodes(op="placeholder")]
        buffers = [i for i, port in enumerate(self.inputs) if port.role is InputRole.BUFFER]
        written_buffers: dict[int, int] = {}
        for at, value in enumerate(values):
            if isinstance(value, torch.Tensor) and id(value) not in returned_ids:
                written_buffers.update((at, i) for i in buffers if _same_place(value, fakes[i]))
        return written_buffers

    def gives_constants(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether forward returns Python numbers or text, or changes Python objects, which may then hold some."""
        if not self.flat.effects.is_empty:
            return True
        returned = self._replayed(module, args, kwargs, otherwise=0)
        return any(type(item) in CONSTANTS for item in _reachable(returned))

    def _replayed(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], otherwise: Any) -> Any:
        """Return what forward returns on the capture's fake tensors, `otherwise` where the model's own code fails on
        these. (If a call raises, it raises again when it is made.)"""
        values = flat_values(self.flat)
        with self.flat.effects.undone(), contextlib.suppress(Exception):
            return self.flat.around(lambda *_: values, module, args, kwargs)
        return otherwise

    def joint(self, differentiated: frozenset[int], decompositions: dict[Any, Any], name: str) -> Program:
        """Make the captured program in which only the `differentiated` flat outputs have tangents.

        With none (or under no_grad) it is the forward alone.
        """
        compile_progress.at(compile_progress.JOINT)
        graph_module = _with_output_marks(self.flat.graph_module, differentiated, self)
        context = torch.enable_grad() if differentiated else torch.no_grad()
        with context, compile_lock.ONE_AT_A_TIME:
            try:
                joint = self._joint(graph_module, decompositions)
            except dynamo.ValueDependent as error:
                raise _capture_error(error) from error
            except AssertionError as error:
                if "set_ on a graph input" not in str(error):
                    raise
                raise UnsupportedError(
                    "the model's forward gives a parameter or an input other memory (weight.data = …)",
                    why="a program reads each tensor where it is, and a sharded parameter has no whole tensor to replace",
                    hint="compute what is used (F.normalize(self.weight)), or change the weights after each step, outside of forward",
                ) from error
        return _program(joint, self, name)

    def _joint(self, graph_module: fx.GraphModule, decompositions: dict[Any, Any]) -> fx.GraphModule:
        """Return the joint graph of a marked forward. Of equal layers AOTAutograd traces a few."""

        def export(forward: fx.GraphModule) -> fx.GraphModule:
            fakes = [node.meta["example_value"] for node in forward.graph.find_nodes(op="placeholder")]
            return aot.export_joint(forward, fakes, self.flat.fake_mode, decompositions)

        inputs = graph_module.graph.find_nodes(op="placeholder")
        is_open = self.sizes or any(given_elements(node.meta["example_value"]) is not None for node in inputs)
        steps = [] if is_open else equal_layers.shortened(graph_module)
        joint = repeated_layers.whole(steps, export(steps[-1].module)) if steps else None
        return joint if joint is not None else export(graph_module)


def trace(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    params: dict[str, ParamSpec],
    mesh: dict[str, int],
    device: torch.device,
    precision: Precision | None = None,
    open_sizes: SymbolicSizes | None = None,
) -> Trace:
    """Capture `forward` (the class's own, unbound) of `module` for inputs of this signature.

    `params` gives the whole shapes of the parameters by name, `device` is where the program will run. With mixed
    `precision` the forward sees inputs of the compute dtype; casts of inputs and outputs are part of the graph. Sizes
    that are `open_sizes` become symbols. Raises `CaptureError` with the user's file and line if the model can't be
    captured whole, `SizeError` for a size that can't be open.
    """
    start = time.perf_counter()
    refuse_state(module)
    precision = precision or Precision()
    fakes = Fakes(params, device, precision.dtype("compute") if precision.cast_inputs else None, open_sizes)
    memory = former_storages(module)
    with compile_lock.ONE_AT_A_TIME, fakes.in_place_of_state(module), memory.readable(), _same_draws():
        fake_args, fake_kwargs = fakes.inputs((args, kwargs))
        flat = _captured(types.MethodType(forward, module), fake_args, fake_kwargs, fakes)
        name_asserts(flat.graph_module)
        is_open = bool(fakes.open_dims or fakes.open_elements)
        flat.output_numbers = take_out_numbers(flat.graph_module) if is_open else None
        flat.crops = pad_outputs(flat.graph_module)
        given = flat.flatten(module, fake_args, fake_kwargs)
        inputs = _roles(given, fakes, fake_args, fake_kwargs)
        sizes = traced_sizes(flat, given, fakes.open_dims, fakes.open_elements) if is_open else ()
        former = _read_from_parameters(flat.graph_module.graph, given, inputs, memory, fakes)
        values = flat_values(flat)
        loss = _find_loss(flat, module, fake_args, fake_kwargs, values)
    grad = torch.is_grad_enabled()
    return Trace(
        flat,
        inputs,
        frozenset(i for i, v in enumerate(values) if grad and isinstance(v, torch.Tensor) and v.requires_grad),
        loss,
        params,
        mesh,
        casts={i: fakes.given_dtypes[id(x)] for i, x in enumerate(given) if id(x) in fakes.given_dtypes},
        output_dtype=precision.dtype("output"),
        former=former,
        aliases=_aliases(module, flat.graph_module.graph),
        seconds=time.perf_counter() - start,
        sizes=sizes,
        open_sizes=open_sizes,
    )


def _followed(node: fx.Node) -> set[fx.Node]:
    """Return the nodes that a value is computed from by operators that gradients flow through, itself included."""
    ancestors, stack = {node}, [node]
    while stack:
        for argument in stack.pop().all_input_nodes:
            value = argument.meta.get("example_value")
            if argument not in ancestors and (not isinstance(value, torch.Tensor) or value.requires_grad):
                ancestors.add(argument)
                stack.append(argument)
    return ancestors


def _aliases(module: nn.Module, graph: fx.Graph) -> dict[str, tuple[str, ...]]:
    """Return all names of each module that has several, by each of them.

    A path on which forward reaches a module that is registered elsewhere (an item of a plain list) counts as a key too.
    """
    names = module_names(module)
    aliases = {n: every for n, every in names.items() if every[1:]}
    first = {id(child): n for n, child in module.named_modules()}
    for path in {module_of(node.meta) for node in graph.nodes} - names.keys():
        inner = _at(module, path)
        if id(inner) in first and inner is not module:
            aliases[path] = names[first[id(inner)]]
    return aliases


def _at(module: nn.Module, path: str) -> Any:
    """Return what is at a path of attributes and items, None if nothing is."""
    inner: Any = module
    try:
        for part in path.split("."):
            inner = getattr(inner, part) if hasattr(inner, part) else inner[int(part) if part.isdigit() else part]
    except (LookupError, TypeError, ValueError):
        return None
    return inner


def _roles(given: Sequence[Any], fakes: Fakes, args: Any, kwargs: Any) -> list[FlatInput]:
    """Return what the flat inputs are: registered, the user's own, or something else that the model holds."""
    user = {id(leaf) for leaf in pytree.tree_leaves((args, kwargs))}
    flat_inputs = []
    for i, x in enumerate(given):
        if id(x) in fakes.names:
            flat_inputs.append(FlatInput(*fakes.names[id(x)]))
            continue
        role = InputRole.INPUT if id(x) in user or _inside(x, args, kwargs) else InputRole.CONSTANT
        flat_inputs.append(FlatInput(role, f"{role}_{i}"))
    return flat_inputs


def _read_from_parameters(
    graph: fx.Graph,
    given: Sequence[Any],
    inputs: list[FlatInput],
    memory: FormerStorages,
    fakes: Fakes,
) -> dict[int, Former]:
    """Make the graph read each flat input that is stored in a parameter's former memory from that parameter; return
    these inputs.

    Where the graph does not read the parameter itself, the first such input becomes it.
    """
    nodes = graph.find_nodes(op="placeholder")
    parameter_nodes = {p.name: node for p, node in zip(inputs, nodes, strict=True) if p.role is InputRole.PARAMETER}
    formers: dict[int, Former] = {}
    for at, (value, node) in enumerate(zip(given, nodes, strict=True)):
        if inputs[at].role is not InputRole.CONSTANT or not isinstance(value, torch.Tensor):
            continue
        former = memory.former_of(value, dynamo.user_source(node))
        if former is None:
            continue
        formers[at], memory.is_read = former, True
        if former.name not in parameter_nodes:
            inputs[at] = FlatInput(InputRole.PARAMETER, former.name)
            parameter_nodes[former.name] = node
            node.meta["example_value"] = fakes.parameter(former.name)
        source = parameter_nodes[former.name]
        insert(graph, node, source, seen_as(source.meta["example_value"], former.form, value))
    return formers


@contextlib.contextmanager
def _same_draws() -> Iterator[None]:
    """Leave Python's and numpy's generators as they were: the call itself draws again what a capture draws."""
    numpy = sys.modules.get("numpy")
    python, other = random.getstate(), numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(other)


def _captured(bound: types.MethodType, args: tuple[Any, ...], kwargs: dict[str, Any], fakes: Fakes) -> FlatCapture:
    """Capture so that numbers that forward itself changes or that are open, and lists that it appends to, are no
    constants.

    (They would differ at each call.) A number that must be a constant, because it is a size say, stays one.
    """
    flat = _capture(bound, args, kwargs, fakes)
    if flat.draws_floats():
        raise CaptureError(
            "the model's forward draws a float from Python's random module",
            why="it comes into a program as a float64 tensor, which promotes what it meets",
            hint="draw from torch (torch.rand), or outside of forward, and give it as an argument",
        )
    if flat.effects.consumed:
        raise CaptureError(
            "the model's forward takes from an iterator, or draws from a random.Random, that outlives the call",
            where=flat.effects.consumed[0] or None,
            why="what is left in it can't be compared before a call, nor put back after a capture",
            hint="take from it outside of forward, and give what it gave as an argument",
        )
    capture = functools.partial(
        dynamo.capture_flat,
        bound,
        args,
        kwargs,
        open_dims=fakes.open_dims,
        values=fakes.values,
        open_elements=fakes.open_elements,
    )
    numbers = list(fakes.open_sizes.numbers) if fakes.open_sizes is not None else []
    lists: list[Any] = []
    if numbers:
        flat, numbers = _with_numbers(capture, numbers, lists)
    for _ in range(3):  # (a branch that was not taken before may change other numbers)
        changed = _changed_numbers(flat, bound, args, kwargs)
        longer = [x for x in flat.effects.containers if isinstance(x, (list, deque)) and not any(x is y for y in lists)]
        if not changed and not longer:
            break
        numbers, lists = [*numbers, *changed], [*lists, *longer]
        flat, numbers = _with_numbers(capture, numbers, lists)
    else:  # (what still changes has to be a constant)
        changed = _changed_numbers(flat, bound, args, kwargs) if fakes.open_dims else {}
        of_sizes = [name for name, value in changed.items() if isinstance(value, torch.SymInt)]
        if of_sizes:
            raise SizeError(
                "the model makes a number that it keeps and reads from a size",
                where=", ".join(of_sizes),
                why="a program of symbols would have the number as a constant, and it changes at every call",
                hint="keep it in a buffer, or outside of forward",
            )
    return flat


def _with_numbers(
    capture: Callable[..., FlatCapture], numbers: list[str], lists: list[Any]
) -> tuple[FlatCapture, list[str]]:
    """Return (a capture, those of the numbers that are no constants of it)."""

    def attempt(chosen: list[str]) -> FlatCapture | None:
        try:
            return capture(numbers=chosen, lists=lists)
        except Exception as error:  # (dynamo raises many types for a number that it can't leave open)
            logger.debug("numbers %s have to be constants: %s", chosen, error)
            return None

    flat = attempt(numbers)
    if flat is None and len(numbers) > 1:
        numbers = [n for n in numbers if attempt([n]) is not None]
        flat = attempt(numbers)
    if flat is not None:
        return flat, numbers
    return capture(lists=lists), []


def _changed_numbers(
    flat: FlatCapture, bound: types.MethodType, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the numbers that a replay of forward's side effects changes, with their new values; none where it can't be
    replayed on fake tensors."""
    values = flat_values(flat)
    try:
        with flat.effects.undone():
            flat.bind(lambda *_: values)(bound.__self__, *args, **kwargs)
            return flat.changed_numbers(bound.__self__, args, kwargs)
    except Exception as error:  # (the user's own code, which raises anything; the call itself raises it again)
        logger.debug("forward's side effects can't be replayed on fake tensors: %s", error)
        return {}


def _same_place(one: torch.Tensor, other: torch.Tensor) -> bool:
    keys = (tensor_storage.storage_key(t) for t in (one, other))
    geometries = [(t.shape, t.stride(), t.storage_offset(), t.dtype) for t in (one, other)]
    return len(set(keys)) == 1 and geometries[0] == geometries[1]


def flat_values(flat: FlatCapture) -> tuple[Any, ...]:
    """Return the fake flat outputs of a capture."""
    returned: Any = flat.graph_module.graph.output_node().args[0]
    return tuple(n.meta.get("example_value") if isinstance(n, fx.Node) else n for n in returned)


def _capture(bound: types.MethodType, args: tuple[Any, ...], kwargs: dict[str, Any], fakes: Fakes) -> FlatCapture:
    """Capture a forward; where that fails, run it once on fake tensors and try again.

    Some models finish their construction in their first forward (under locks, with hooks), which can't be traced.
    """

    capture = functools.partial(
        dynamo.capture_flat, open_dims=fakes.open_dims, values=fakes.values, open_elements=fakes.open_elements
    )

    def run() -> None:
        with dynamo.quiet(), fakes.mode, torch.no_grad():
            bound(*args, **kwargs)

    try:
        return capture(bound, args, kwargs)
    except Exception as first:  # (dynamo's own errors are of many types)
        if fakes.open_elements:  # (the next capture has them as constants)
            raise _capture_error(first) from first
        with fake_tensors.held_after() as tensors:
            try:
                run()
            except Exception as error:
                logger.debug("forward does not run on fake tensors: %s", error)
                if dynamo.depends_on_values(first):  # (another capture fails at the same line)
                    raise _capture_error(first) from first
        if tensors:  # (the first forward made a table, say, and the model or something else keeps it)
            raise CaptureError(
                "the model's forward can be captured only after it has run once, and that run keeps a tensor",
                where=_capture_error(first).where,
                why=f"the run on fake tensors that capture would need left one of shape {list(tensors[0].shape)}, without values",
                hint="build the model anew, run it once before compiling it, or make the tensor in the constructor",
            ) from first
        try:
            flat = capture(bound, args, kwargs)
        except Exception as error:
            raise _capture_error(error) from _caused_by(error, first)
        if not (
            flat.effects.is_empty or flat.effects.unchanged_by(run)
        ):  # (unchanged by a forward that sets a flag and resets it, say)
            raise CaptureError(
                "the model's forward can be captured only after it has run once, and it changes Python objects",
                where=_capture_error(first).where,
                why="the run on fake tensors that capture would need changes them once more than plain PyTorch does",
                hint="run the model once before compiling it",
            ) from first
        return flat


def _caused_by(error: Exception, first: Exception) -> Exception:
    """Return `error`, with `first` as the last of its causes, so that a traceback shows both."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    if first not in chain:
        chain[-1].__cause__ = first
    return error


def _inside(x: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an object among the arguments that is no pytree (a dataclass, a cache) holds `x`."""
    return any(item is x for item in _reachable(args, kwargs))


def _reachable(*roots: Any) -> Iterator[Any]:
    """Yield these values and all that is in them: items of containers, and attributes of objects that are no modules."""
    seen: set[int] = set()
    stack = list(roots)
    while stack:
        item = stack.pop()
        yield item
        if id(item) in seen or isinstance(item, (torch.Tensor, nn.Module, type, types.ModuleType)):
            continue
        seen.add(id(item))
        if isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
        elif hasattr(item, "__dict__"):
            stack.extend(vars(item).values())


def _find_loss(flat: FlatCapture, module: nn.Module, args: Any, kwargs: Any, values: Sequence[Any]) -> int | None:
    """Return the flat output that is the loss: the output itself if it is a scalar, `.loss`, `["loss"]`, or the first
    element."""
    try:
        with flat.effects.undone():
            loss = find_loss(flat.bind(lambda *_: tuple(values))(module, *args, **kwargs))
    except Exception as error:  # (as in `_changed_numbers`)
        logger.debug("forward's output can't be read on fake tensors: %s", error)
        return None
    return next((i for i, v in enumerate(values) if v is loss), None) if loss is not None else None


def find_loss(output: Any) -> torch.Tensor | None:
    """Return the loss in a model's output: a scalar itself, `.loss`, `["loss"]`, or the first element; None if there is
    none."""
    candidates = [output, getattr(output, "loss", None)]
    if isinstance(output, dict):
        candidates.append(output.get("loss"))
    if isinstance(output, (tuple, list)) and output:
        candidates.append(output[0])
    for item in candidates:
        if isinstance(item, torch.Tensor) and item.dim() == 0 and item.is_floating_point():
            return item
    return None


def _with_output_marks(graph_module: fx.GraphModule, differentiated: frozenset[int], trace: Trace) -> fx.GraphModule:
    """Copy a graph with each output marked (`zgraph.program.ops`), and detached unless differentiated; with casts of
    inputs and outputs."""
    graph = fx.Graph()
    memo: dict[fx.Node, fx.Node] = {}
    returned = graph.graph_copy(graph_module.graph, memo)
    for old, new in memo.items():
        new.meta = dict(old.meta)
    for i, node in enumerate(graph.find_nodes(op="placeholder")):
        if i in trace.casts:
            _cast_input(graph, node, trace.casts[i], trace.flat.fake_mode)
    marked = []
    for i, item in enumerate(returned):  # type: ignore[arg-type]
        if isinstance(item, fx.Node) and isinstance(item.meta.get("example_value"), torch.Tensor):
            low = item.meta["example_value"].dtype
            if trace.output_dtype is not None and low.is_floating_point and low is not trace.output_dtype:
                item = graph.call_method("to", (item, trace.output_dtype))
            if i not in differentiated:
                item = graph.call_method("detach", (item,))
            item = graph.call_function(ops.OUTPUT, (item,))
        marked.append(item)
    graph.output(tuple(marked))
    return fx_graphs.lazy_module(graph_module, graph)


def _cast_input(graph: fx.Graph, node: fx.Node, dtype: torch.dtype, fake_mode: FakeTensorMode) -> None:
    """Give a placeholder the `dtype`, and cast it to what the captured forward computes in."""
    low = node.meta["example_value"]
    with fake_mode:
        wide = torch.empty_strided(low.size(), low.stride(), dtype=dtype, device=low.device)
    node.meta["example_value"] = wide.requires_grad_(low.requires_grad)
    last = graph.find_nodes(op="placeholder")[-1]
    users = list(node.users)
    with graph.inserting_after(last):
        cast = graph.call_method("to", (node, low.dtype))
    for user in users:
        user.replace_input_with(node, cast)


def _program(joint: fx.GraphModule, trace: Trace, name: str) -> Program:
    graph = joint.graph
    graph.set_codegen(fx.graph.CodeGen())  # flat: roles, not a pytree, say what inputs and outputs are
    _annotate(graph)
    fold_effects(graph)
    by_node = _fold_sizes(graph, trace)
    inputs: list[Port] = []
    outputs: list[tuple[Port, fx.Node]] = []
    for node in graph.find_nodes(op="placeholder"):
        if node in by_node:
            inputs.append(Port(InputRole.SIZE, by_node[node].name))
            continue
        kind, at = aot.describe_input(node.meta.get("desc"))
        if kind == "input":
            flat = trace.inputs[at]
            inputs.append(Port(flat.role, flat.name, at))
        elif kind == "tangent":
            inputs.append(Port(InputRole.TANGENT, f"output_{at}", at))
        elif kind == "mutation_tangent" and trace.inputs[at].role is InputRole.PARAMETER:
            raise _changed_parameter(trace.inputs[at].name)
        else:
            raise UnsupportedError(
                "the model's autograd graph has an input that zgraph does not know",
                why=f"{node.name}: {kind}",
                hint="if the model changes a tensor that requires a gradient in place, write it without",
            )
    seen: set[tuple[str, int]] = set()
    output = graph.output_node()
    for node, desc in zip(output.args[0], output.meta["desc"], strict=True):  # type: ignore[arg-type]
        if not isinstance(node, fx.Node):
            continue
        kind, at = aot.describe_output(desc)
        if (kind, at) in seen:
            continue
        seen.add((kind, at))
        outputs.append((_output_port(kind, at, trace), node))
    program = Program(
        name=name,
        module=fx_graphs.lazy_module(joint, graph),
        inputs=inputs,
        outputs=[],
        mesh=dict(trace.mesh),
        params=dict(trace.params),
        fake_mode=trace.flat.fake_mode,
        aliases=trace.aliases,
    )
    _refuse_mixed_products(graph)
    if any(port.role is InputRole.TANGENT for port in inputs):
        _refuse_changed_twice(graph, outputs)
    checks = keep_asserts(program)
    outputs = [*outputs, *checks]
    outputs.sort(key=lambda item: of_backward(*item))  # (what the forward gives is first)
    program.set_outputs([(port, _own_gradient(program, port, node)) for port, node in outputs])
    for port, node in program.input_items():
        prefix = "tangent_" if port.role is InputRole.TANGENT else "size_" if port.role is InputRole.SIZE else ""
        node._rename(_identifier(f"{prefix}{port.name}"))
    for node in graph.nodes:
        node.meta.pop("desc", None)
    program.recompile()
    return with_own_sizes(program, trace.every_size(), trace.open_sizes)


def _fold_sizes(graph: fx.Graph, trace: Trace) -> dict[fx.Node, TracedSize]:
    """Turn all sizes into numbers, except the capture's symbols, which get inputs of their own; return these inputs."""
    size_inputs: dict[fx.Node, TracedSize] = {}
    env = trace.flat.fake_mode.shape_env
    symbols.solve_unknown(env)
    if trace.sizes:
        sizes = trace.every_size()
        refuse_numbers(sizes, env)
        refuse_unknown(graph, functools.partial(_user_name, trace))
        masked_rows.forget_assumptions(graph)
        size_inputs = {node: size for size, node in canonical(graph, sizes, env)}
        masked_rows.give_known_sizes(graph)
    else:
        masked_rows.give_known_sizes(graph)
        masked_rows.settle(graph)
        fold_data_dependent_sizes(graph)
        _note_as_strided(graph, trace)
    refuse_beyond_tables(graph)
    return size_inputs


def _user_name(trace: Trace, placeholder: fx.Node) -> str | None:
    """Return the user's name of an input of a joint graph; None for any other."""
    kind, at = aot.describe_input(placeholder.meta.get("desc"))
    return trace.source(at) if kind == "input" and trace.inputs[at].role is InputRole.INPUT else None


def _note_as_strided(graph: fx.Graph, trace: Trace) -> None:
    """Note the inputs whose storage `as_strided` reads. Raises `UnsupportedError` where it reads beyond the input
    itself."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default):
        source = root_of(node)
        kind, at = aot.describe_input(source.meta.get("desc"))
        if kind != "input":
            continue
        if (
            len(node.args) > 3 or "storage_offset" in node.kwargs
        ):  # (without an offset it starts where the tensor starts)
            trace.from_start.add(at)
        size, stride = node.meta["val"].shape, node.meta["val"].stride()
        last = node.meta["val"].storage_offset() + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        if 0 not in size and last >= source.meta["val"].untyped_storage().nbytes() // source.meta["val"].itemsize:
            raise UnsupportedError(
                "as_strided looks beyond the tensor that it is given",
                where=info(node).source or None,
                why=f"{trace.inputs[at].name!r} has {source.meta['val'].numel()} elements, and element {last} of its storage is read",
                hint="give the model the tensor that has the whole storage",
            )


def _own_gradient(program: Program, port: Port, node: fx.Node) -> fx.Node:
    """Copy a gradient that is itself a value of the forward (that of w**2 / 2 is w, say) in the backward."""
    if port.role is not OutputRole.GRADIENT or info(node).phase is Phase.BACKWARD:
        return node
    with program.graph.inserting_before(program.output_node()):
        return program.call(
            torch.ops.aten.clone.default, (node,), info(node).replace(phase=Phase.BACKWARD), name=f"own_{node.name}"
        )


def _identifier(path: str) -> str:
    """Return a name that FX keeps when it copies an input: "layer.SelfAttention.q" -> "layer_self_attention_q"."""
    return re.sub(r"\W+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", path)).lower()


def _changed_parameter(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"the model's forward changes its parameter {name!r} in place",
        where=name,
        why="a sharded parameter has no whole tensor to change",
        hint="keep such state in a buffer; in place of an embedding's max_norm, scale what was looked up, or the weights after each step",
    )


def _output_port(kind: str, at: int, trace: Trace) -> Port:
    if kind == "output":
        return Port(OutputRole.OUTPUT, f"output_{at}", at)
    flat = trace.inputs[at] if at >= 0 else None
    if kind == "mutation" and flat is not None:
        if flat.role is InputRole.PARAMETER:
            raise _changed_parameter(flat.name)
        return Port(OutputRole.MUTATION, flat.name, at, of=flat.role)
    if kind == "gradient" and flat is not None:
        return Port(OutputRole.GRADIENT, flat.name, at, of=flat.role)
    raise UnsupportedError("the model's autograd graph has an output that zgraph does not know", why=kind)


_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "mv", "addmv", "dot")


def _refuse_mixed_products(graph: fx.Graph) -> None:
    """Raise `CaptureError` for a matrix product of several dtypes: torch refuses it only when the program runs, as its
    fake operators take it."""
    for node in graph.nodes:
        if getattr(node.target, "namespace", "") != "aten" or node.target.overloadpacket.__name__ not in _PRODUCTS:
            continue
        values = [n.meta["val"] for n in node.all_input_nodes]  # (a convolution's padding may be a symbolic size)
        dtypes = list(dict.fromkeys(v.dtype for v in values if isinstance(v, torch.Tensor)))
        if len(dtypes) > 1:
            shown = " and ".join(str(d).removeprefix("torch.") for d in dtypes)
            raise CaptureError(
                f"the model multiplies {shown}",
                where=info(node).source or None,
                why="torch multiplies values of one dtype; a buffer, a constant or an input has another than the weights",
                hint="cast it in the model (x.to(weight.dtype)), or give precision a dtype for buffers, or cast_inputs",
            )


def _refuse_changed_twice(graph: fx.Graph, outputs: Sequence[tuple[Port, fx.Node]]) -> None:
    """Raise `UnsupportedError` for a region of torch.utils.checkpoint that changes a tensor in place, based on its old
    value.

    Plain PyTorch changes it a second time in the backward, and zgraph does not. (The region's own reads of the tensor
    would differ as well.)
    """
    again = {n for n in graph.nodes if aot.users_region(n) is not None}
    for port, last in outputs if again else ():
        if port.role is not OutputRole.MUTATION:
            continue
        of_old: set[fx.Node] = set()
        for node in graph.nodes:
            if node.op == "placeholder":
                same = aot.describe_input(node.meta.get("desc")) == ("input", port.index)
                of_old |= {node} if same else set()
            elif any(a in of_old for a in node.all_input_nodes):
                of_old.add(node)
        stack, seen = [last], set()
        while stack:
            node = stack.pop()
            if node in seen or node not in of_old:
                continue
            seen.add(node)
            stack += node.all_input_nodes
            if node in again:
                what = "buffer" if port.of is InputRole.BUFFER else "tensor"
                raise UnsupportedError(
                    f"a region of torch.utils.checkpoint changes {what} {port.name!r} in place",
                    where=info(node).source or None,
                    why="plain PyTorch runs the region, and so the change, a second time in the backward (BatchNorm counts each batch twice)",
                    hint="keep the layer out of the region; or call it without checkpoint, and name it in the plan's recompute: "
                    "zgraph computes it again without changing anything twice",
                )


def _annotate(graph: fx.Graph) -> None:
    """Give each captured node its record. A node that depends on a tangent is backward, whatever its tag says."""
    for node in graph.nodes:
        backward = node.meta.get("partitioner_tag") == "is_backward" or node.name.startswith("tangents_")
        if node.target is operator.getitem:  # part of the node that made the tuple
            backward = False
        backward = backward or any(info(a).phase is Phase.BACKWARD for a in node.all_input_nodes)
        phase = Phase.BACKWARD if backward else Phase.FORWARD
        set_info(node, NodeInfo(phase=phase, module=module_of(node.meta), source=source_of(node.meta)))


_USER_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TWO_DEVICES = re.compile(
    r"found (?:two different devices|at least two devices,) (\w+(?::\d+)?),? (?:and )?(\w+(?::\d+)?)"
)


def _capture_error(error: BaseException) -> CaptureError:
    """Return dynamo's error as one with the user's own line, the reason and a way out."""
    text = str(error)
    _, _, user = text.partition("from user code:")
    frames = _USER_FRAME.findall(user or text)
    where = f"{frames[-1][0]}:{frames[-1][1]}" if frames else None
    reason = text.split("\n\n")[0].split("Developer debug context")[0].split("from user code")[0].strip()
    hints = [line.strip()[6:] for line in text.splitlines() if line.strip().startswith("Hint: ")]
    hint = "write this part without control flow that depends on tensor values (torch.where, masks) or calls that can't be traced"
    if hints:
        hint += f"; torch says: {hints[0]}"
    if devices := _TWO_DEVICES.search(text):
        here, there = devices.groups()
        hint = f"what meets here is on {here} and on {there}; move one: an input is not moved to the model's device (x.to(device))"
    if where is not None and "torch/distributions" in where:
        hint = "torch.distributions.Distribution.set_default_validate_args(False) before the first call: what checks arguments looks at values"
    return CaptureError(
        "the model can't be captured as one graph",
        where=where,
        why=f"{type(error).__name__}: {reason}",
        hint=hint,
    )
