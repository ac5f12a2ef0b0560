"""Fake tensors in place of a module's state and of a call's inputs, for a capture."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from zgraph.capture.symbolic_capture import OpenElement, SymbolicSizes
from zgraph.program.program import InputRole, ParamSpec
from zgraph.torch_compat import dynamo


class Fakes:
    """Makes the fake tensors of one capture: parameters with their whole shapes, everything else in its own form.

    Inputs have the dtype `compute`, where one is given. A real tensor that is passed twice, or is also registered, has
    one fake tensor. Sizes of inputs that are among `open_sizes` are those at their points.
    """

    def __init__(
        self,
        params: dict[str, ParamSpec],
        device: torch.device,
        compute: torch.dtype | None,
        open_sizes: SymbolicSizes | None = None,
    ) -> None:
        self.mode = dynamo.capture_mode()
        self.params = params
        self.device = device
        self.compute = compute
        self.open_sizes = open_sizes
        self.open_dims: dict[int, dict[int, str]] = {}  # names of the sizes that are open, by the ids of fake tensors
        self.names: dict[
            int, tuple[InputRole, str]
        ] = {}  # role and name of registered tensors, by the ids of fake tensors
        self.values: dict[int, torch.Tensor] = {}  # values of inputs that are constants, by the ids of fake tensors
        # those of their elements that are open sizes, by the ids of fake tensors and the elements' numbers
        self.open_elements: dict[int, dict[int, OpenElement]] = {}
        self.given_dtypes: dict[int, torch.dtype] = {}  # dtypes of inputs before their cast, by the ids of fake tensors
        self._registered: dict[int, Any] = {}  # fakes of registered tensors, by the ids of real ones
        self._inputs: dict[int, Any] = {}  # fakes of inputs, by the ids of real tensors

    def parameter(self, name: str) -> nn.Parameter:
        """Return a fake parameter as the model computes with it: whole, in the compute dtype."""
        spec = self.params[name]
        with self.mode:
            whole = torch.empty_strided(
                spec.whole_shape, spec.whole_stride, dtype=spec.compute_dtype, device=self.device
            )
        return nn.Parameter(whole, requires_grad=spec.requires_grad)

    def inputs(self, value: Any) -> Any:
        """Return a call's inputs with fake tensors."""
        return _mapped(self._input, value, {})

    @contextlib.contextmanager
    def in_place_of_state(self, module: nn.Module) -> Iterator[None]:
        """Put fake tensors of whole shapes in place of all parameters and buffers, and note their `names`."""
        replaced: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for path, child in module.named_modules(remove_duplicate=False):
                for table, role in ((child._parameters, InputRole.PARAMETER), (child._buffers, InputRole.BUFFER)):
                    for key, real in list(table.items()):
                        if real is None or isinstance(real, FakeTensor):
                            continue
                        replaced.append((table, key, real))
                        table[key] = self._state(real, role, f"{path}.{key}" if path else key)
            for child in module.modules():
                if isinstance(child, nn.RNNBase):
                    _list_weights_anew(child, replaced)
            yield
        finally:
            for table, key, real in reversed(replaced):
                table[key] = real

    def _state(self, real: torch.Tensor, role: InputRole, name: str) -> torch.Tensor:
        if id(real) not in self._registered:
            fake = self.parameter(name) if role is InputRole.PARAMETER else self._like(real)
            self._registered[id(real)] = fake = _with_attributes(real, fake)
            self.names[id(fake)] = role, name
        return self._registered[id(real)]

    def _like(self, x: torch.Tensor) -> torch.Tensor:
        where = self.device if x.device.type == "meta" else x.device
        with self.mode:
            y = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=where)
        return _with_attributes(x, y.requires_grad_(x.requires_grad))

    def _input(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or isinstance(x, FakeTensor):
            return x
        if id(x) not in self._inputs:
            fake = self._registered[id(x)] if id(x) in self._registered else self._like(x)
            names = self.open_sizes.names.get(id(x)) if self.open_sizes is not None else None
            if names and id(x) not in self._registered:
                fake = self._open(x, names)
            self._inputs[id(x)] = fake_input = _with_attributes(x, self._computed(fake))
            if names and id(x) not in self._registered:
                self.open_dims[id(fake_input)] = names
            if self.open_sizes is not None and id(x) in self.open_sizes.values:
                self.values[id(fake_input)] = x.detach().clone(memory_format=torch.contiguous_format)
                if elements := self.open_sizes.elements.get(id(x)):
                    self.open_elements[id(fake_input)] = elements
                    for at, element in elements.items():
                        point = self.open_sizes.points[element.name]
                        self.values[id(fake_input)].view(-1)[at] = element.unit * point
        return self._inputs[id(x)]

    def _open(self, x: torch.Tensor, names: dict[int, str]) -> torch.Tensor:
        """Return a fake of a (contiguous) input with its open sizes at their points."""
        assert self.open_sizes is not None
        points = self.open_sizes.points
        shape = [points[names[d]] if d in names else n for d, n in enumerate(x.shape)]
        with self.mode:
            y = torch.empty(shape, dtype=x.dtype, device=self.device if x.device.type == "meta" else x.device)
        return y.requires_grad_(x.requires_grad)

    def _computed(self, y: torch.Tensor) -> torch.Tensor:
        """Return an input in the dtype that the model computes with."""
        if self.compute is None or not y.is_floating_point() or y.dtype is self.compute:
            return y
        with self.mode:
            low = torch.empty_strided(y.size(), y.stride(), dtype=self.compute, device=y.device)
        low.requires_grad_(y.requires_grad)
        self.given_dtypes[id(low)] = y.dtype
        return low


def _list_weights_anew(layer: nn.RNNBase, replaced: list[tuple[dict[str, Any], str, Any]]) -> None:
    """Rebuild a recurrent layer's lists of its weights from its current ones, and note the old lists in `replaced`.

    (The layer's forward does so when it finds other weights, but in a checkpointed region it may not.)
    """
    replaced += [(vars(layer), key, vars(layer)[key]) for key in ("_flat_weights", "_flat_weight_refs")]
    weights = [getattr(layer, name, None) for name in layer._flat_weights_names]
    refs = [None if w is None else weakref.ref(w) for w in weights]
    vars(layer).update(_flat_weights=weights, _flat_weight_refs=refs)


def _with_attributes(real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """Copy the attributes that the user has set on the real tensor to the fake one: forward may read them."""
    known = dynamo.hung_on(real).items() if type(real) in (torch.Tensor, nn.Parameter, DTensor) else ()
    fake.__dict__.update({k: v for k, v in known if k not in ("_spec", "_local_tensor")})  # (these are DTensor's own)
    return fake


def _mapped(function: Callable[[Any], Any], value: Any, copies: dict[int, Any]) -> Any:
    """Apply a function to a tree's leaves; a list or dict that occurs twice stays one object. (`pytree.tree_map` makes
    two.)"""
    if id(value) in copies:
        return copies[id(value)]
    if type(value) is tuple:
        return tuple(_mapped(function, v, copies) for v in value)
    if type(value) is list:
        items = copies[id(value)] = []
        items += [_mapped(function, v, copies) for v in value]
        return items
    if type(value) is dict:
        table = copies[id(value)] = {}
        table |= {k: _mapped(function, v, copies) for k, v in value.items()}
        return table
    if isinstance(value, torch.Size):  # (it would become a plain tuple, which forward may tell from it)
        return value
    return pytree.tree_map(function, value)
