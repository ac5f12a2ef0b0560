"""What dynamo captured, and how a call's arguments become its flat inputs."""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from zgraph.torch_compat import symbols
from zgraph.torch_compat.changing_numbers import ChangingNumbers
from zgraph.torch_compat.guards import Effects, Failing, Guards, live
from zgraph.torch_compat.symbols import SizePlace

CONSTANTS = (int, float, bool, str)  # types of what a replay returns or keeps as it was captured


class _Stop(Exception):
    """Ends the replay of dynamo's bytecode once it has handed over the graph's inputs."""


@dataclass(frozen=True)
class OutputNumbers:
    """The Python numbers among a model's flat outputs that are computed from sizes of its inputs: a program gives none.

    (The length that a cache of keys has, which transformers' models return.)
    """

    numbers: dict[int, torch.SymInt]  # each number as it was captured, by its position among the flat outputs
    places: dict[Any, SizePlace]  # of the size that is each symbol

    def of_call(self, flat: Sequence[Any]) -> dict[int, Any]:
        """Return the numbers in a call with these flat inputs, by their positions; as they were captured, of its inputs."""
        elements = (flat[place.index] for place in self.places.values() if place.elements)
        if any(isinstance(given, FakeTensor) for given in elements):
            return dict(self.numbers)
        sizes = dict(zip(self.places, symbols.numbers_at(self.places.values(), flat), strict=True))
        if any(isinstance(size, torch.SymInt) for size in sizes.values()):
            return dict(self.numbers)
        return {at: symbols.substituted(symbols.expression(number), sizes) for at, number in self.numbers.items()}


@dataclass
class FlatCapture:
    """What dynamo captured: a graph with flat inputs and outputs, and the bytecode around it."""

    # takes parameters, buffers and the user's tensors in dynamo's order, returns a flat tuple
    graph_module: fx.GraphModule
    fake_mode: Any  # the mode of its fake tensors
    effects: Effects  # what a replay changes of Python objects
    _output: Any  # dynamo's own record of the capture, with its bytecode
    _function: FunctionType  # the forward that was captured
    _guards: Guards  # the checks of the Python state that it read
    _numbers: ChangingNumbers | None = None  # the half that computes Python numbers; None if there are none
    # (flat output, dimension, flat output that is its size): outputs given at their largest size; the sizes come last
    crops: tuple[tuple[int, int, int], ...] = ()
    output_numbers: OutputNumbers | None = None  # outputs that are computed beside the graph; None if there are none
    _bound: Callable[..., Any] | None = None  # the replay that `around` made at its first call
    _within: Callable[..., Sequence[Any]] | None = None  # the graph that `around` runs at this call

    def stale(self, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Failing | None:
        """Return which part of the Python state that the forward read has changed for this call; None if nothing has.

        That state is: arguments, attributes of the module and of objects it holds (flags, a config, the lengths of
        lists, hooks), its closure, globals, and the forms of tensors found there. A check costs some 10 µs a layer.
        """
        return self._guards.failing(owner, args, kwargs)

    def draws_floats(self) -> bool:
        """Return whether the forward draws a float from Python's `random`."""
        inputs = self.graph_module.graph.find_nodes(op="placeholder")
        drawn = [n.meta["example_value"] for n in inputs if n.name.startswith("random_value_")]  # (dynamo's name)
        return any(v.is_floating_point() for v in drawn)

    @property
    def takes_numbers(self) -> bool:
        """Whether the program takes Python numbers that the forward itself changes."""
        return self.number_inputs > 0

    @property
    def number_inputs(self) -> int:
        """The number of flat inputs, at the end of all, that are Python numbers which the forward itself changes."""
        return len(self._numbers.into) if self._numbers is not None else 0

    @property
    def constant_numbers(self) -> Collection[str]:
        """The names of the Python numbers that are constants of this capture."""
        return self._guards.constant_numbers

    def changed_numbers(self, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the Python numbers that are constants of this capture and have another value now, by name."""
        return self._guards.changed_numbers(owner, args, kwargs)

    @property
    def code_constants(self) -> tuple[str, ...]:
        """The Python numbers and text, as they are written, in the code around the graph: what the model returns or keeps
        is among them.
        """
        constants = pytree.tree_leaves(self._output.graph_capture_output.bytecode.co_consts)
        return tuple(sorted(repr(c) for c in constants if type(c) in CONSTANTS))

    def bind(self, compiled: Callable[..., Sequence[Any]]) -> Callable[..., Any]:
        """Return a function with the user's signature (the module first) that runs `compiled` on the flat inputs."""

        def completed(*flat: Any) -> Sequence[Any]:
            # (before the program runs: it may write to an input whose elements are sizes)
            numbers = self.output_numbers.of_call(flat) if self.output_numbers is not None else {}
            results = list(self._cropped(compiled(*flat)) if self.crops else compiled(*flat))
            for at, number in numbers.items():
                results.insert(at, number)
            return results

        complete = not self.crops and self.output_numbers is None
        within: Callable[..., Sequence[Any]] = compiled if complete else completed
        if self._numbers is not None:
            within = self._numbers.around(within)
        # (torch 2.11 leaves builtins out of what its replay may refer to)
        names = {**vars(builtins), **self._output.graph_capture_output.f_globals}
        replay = self._output.forward_callable(compiled_fn=within, extra_globals=names)
        return live(replay, self._function, self._output.backend_input.backend_id)

    def _cropped(self, given: Sequence[Any]) -> Sequence[Any]:
        """Return the model's flat outputs, given the graph's: cut to their sizes, without these sizes (see `crops`)."""
        values = list(given)
        for at, dim, of_size in self.crops:
            if isinstance(size := values[of_size], torch.Tensor) and not isinstance(size, FakeTensor):
                values[at] = values[at].narrow(dim, 0, int(size))
        return values[: len(values) - len({of_size for _, _, of_size in self.crops})]

    def around(
        self, within: Callable[..., Sequence[Any]], owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the forward with `within` in place of its graph, this once, and return the result. (Binding anew takes
        as long as ten calls.)"""
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
        """Return the graph's flat inputs for a call."""
        calls: list[tuple[Any, ...]] = []

        def stop(*inputs: Any) -> Sequence[Any]:
            calls.append(inputs)
            raise _Stop

        with contextlib.suppress(_Stop):
            self.around(stop, owner, args, kwargs)
        return calls[0] if calls else ()
