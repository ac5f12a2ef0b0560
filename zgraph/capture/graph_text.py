"""A capture as text: with the same plan and versions, equal texts make equal programs.

The text has everything that AOTAutograd and passes read of a dynamo graph: operators with their arguments, the types of
all values, the origin of each node (module, file and line: errors name them), constants bit by bit, graphs within it. A
graph with anything else has no text, and is compiled anew in each process: one with an operator of the user's own, say,
whose gradient is code that no text shows.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from zgraph.capture.capture import Trace
from zgraph.errors import UnsupportedError
from zgraph.program.node import module_of, source_of
from zgraph.torch_compat import fx_graphs

_META = ("seq_nr", "partitioner_tag", "recompute", "ac_graph_id", "has_backward_hook", "custom")
_LIBRARIES = ("aten", "prims", "prim", "zgraph", "_c10d_functional", "inductor")
_REGIONS = ("tag_activation_checkpoint", "wrap_activation_checkpoint", "autograd_function_apply")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
_NAMED = (torch.dtype, torch.device, torch.memory_format, torch.layout)
_LARGEST = 1 << 26  # the most bytes of a constant


def text_of_trace(trace: Trace) -> str:
    """Return the text of a capture. Raises `UnsupportedError`, which names the first thing without a text, if it has
    none."""
    if trace.sizes or trace.open_sizes is not None:
        raise UnsupportedError("sizes, numbers or values of inputs are open in it")
    said = [
        ("inputs", [(str(port.role), port.name) for port in trace.inputs]),
        ("former", sorted((at, former.name, repr(former.form)) for at, former in trace.former.items())),
        ("differentiable", sorted(trace.differentiable)),
        ("loss", trace.loss),
        ("casts", sorted((at, str(dtype)) for at, dtype in trace.casts.items())),
        ("output_dtype", str(trace.output_dtype)),
        ("crops", trace.flat.crops),
        ("numbers", trace.flat.number_inputs),
        ("mesh", list(trace.mesh.items())),
        ("params", [dataclasses.astuple(spec) for spec in trace.params.values()]),
        ("aliases", sorted(trace.aliases.items())),
    ]
    return "\n".join([*(f"{name}: {value!r}" for name, value in said), *_lines(trace.flat.graph_module)])


def _lines(module: fx.GraphModule) -> Iterable[str]:
    for node in module.graph.nodes:
        yield _line(node, module)


def _line(node: fx.Node, module: fx.GraphModule) -> str:
    value = node.meta.get("example_value", node.meta.get("val"))
    meta = [(key, _text(node.meta[key])) for key in _META if node.meta.get(key) is not None]
    return (
        f"{node.name} = {node.op} {_target(node, module)} {_text(node.args)} {_text(node.kwargs)} -> {_type(value)} "
        f"{meta} of {module_of(node.meta)} at {source_of(node.meta)}"
    )


def _target(node: fx.Node, module: fx.GraphModule) -> str:
    if node.op == "call_function":
        return _function(node.target)
    if node.op == "get_attr":
        return f"{node.target}: {_constant(operator.attrgetter(str(node.target))(module))}"
    if node.op in ("placeholder", "output", "call_method"):
        return str(node.target)
    raise UnsupportedError(f"a {node.op} of {node.target} has no text")


def _function(target: Any) -> str:
    """Return the name of a function of torch's, or of Python's operators."""
    if isinstance(target, torch._ops.HigherOrderOperator):
        if target.name() in _REGIONS:
            return f"region {target.name()}"
        raise UnsupportedError(f"operator {target.name()} has no text")
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        name = str(target)
        if name.partition(".")[0] in _LIBRARIES:
            return f"operator {name}"
        raise UnsupportedError(f"{name} is an operator of somebody else than torch")
    home, name = getattr(target, "__module__", None) or "", getattr(target, "__qualname__", "")
    known = home in ("_operator", "operator", "builtins", "math") or home.partition(".")[0] == "torch"
    if name and "<" not in name and (known or fx_graphs.is_torchs(target)):
        return f"function {home}.{name}"
    raise UnsupportedError(f"{home}.{name or target!r} is no function of torch's")


def _constant(held: Any) -> str:
    """Return the text of a graph's attribute: a hash of a tensor's bits, or another graph's lines."""
    if isinstance(held, fx.GraphModule):
        return "{" + "\n".join(_lines(held)) + "}"
    if type(held) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or held.layout is not torch.strided:
        raise UnsupportedError(f"a constant of type {type(held).__name__} has no text")
    if held.is_meta or held.nbytes > _LARGEST:
        raise UnsupportedError(f"a constant of {held.nbytes} bytes on {held.device} has no text")
    raw = held.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() if held.numel() else b""
    return f"{_type(held)} {hashlib.sha256(raw).hexdigest()}"


def _text(item: Any) -> str:
    """Return the text of an argument: equal texts are equal arguments."""
    if isinstance(item, fx.Node):
        return item.name
    if isinstance(item, enum.Enum):
        return f"{type(item).__qualname__}.{item.name}"
    if isinstance(item, _PLAIN):
        return repr(item)
    if isinstance(item, _NAMED):
        return f"{type(item).__name__} {item}"
    if isinstance(item, (tuple, list)):
        return f"{type(item).__name__}[{', '.join(map(_text, item))}]"
    if isinstance(item, dict):
        return "{" + ", ".join(f"{_text(k)}: {_text(v)}" for k, v in item.items()) + "}"
    if isinstance(item, slice):
        return f"slice{_text((item.start, item.stop, item.step))}"
    if callable(item):
        return _function(item)
    raise UnsupportedError(f"a value of type {type(item).__name__} has no text")


def _type(value: Any) -> str:
    """Return the text of the kind of value that a node has."""
    if isinstance(value, torch.Tensor):
        if not isinstance(value, torch._subclasses.FakeTensor) and type(value) not in (
            torch.Tensor,
            torch.nn.Parameter,
        ):
            raise UnsupportedError(f"a tensor of type {type(value).__name__} has no text")
        if value.layout is not torch.strided:
            raise UnsupportedError(f"a tensor with layout {value.layout} has no text")
        sizes = (*value.shape, *value.stride(), value.storage_offset())
        if any(isinstance(size, torch.SymInt) for size in sizes):
            raise UnsupportedError("a size depends on values")
        return (
            f"{value.dtype}{list(value.shape)}{list(value.stride())}+{value.storage_offset()} {value.device}"
            f"{' grad' if value.requires_grad else ''}{' conj' if value.is_conj() else ''}{' neg' if value.is_neg() else ''}"
        )
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_type, value))})"
    if isinstance(value, _PLAIN):
        return repr(value)
    return type(value).__name__
