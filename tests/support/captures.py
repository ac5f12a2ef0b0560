"""Captures that tests share which are about what comes after them: passes, forecasts, searches, what is shown of a step.

    pytestmark = pytest.mark.usefixtures("shared_captures")     # or a conftest.py, for a folder

A model that was captured with such inputs before, and has nothing that a second capture could see otherwise, is not captured again by
`zgraph.programs`, forecasts and `zgraph.verify`. (Those of compiled models are their own.)
"""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from zgraph.build import planned_step
from zgraph.capture.capture import Trace
from zgraph.program.program import Program
from zgraph.verification import virtual_step

_MOST = 48  # traces that are held
_traces: OrderedDict[Any, Trace] = OrderedDict()
_joints: dict[int, dict[Any, Program]] = {}  # programs of these, by the ids of what dynamo captured
_trace, _joint = planned_step.trace, Trace.joint
_TENSORS = ("tensor(", "Parameter", "DTensor", " at 0x")


@pytest.fixture(scope="module")
def shared_captures() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned_step, "trace", _shared_trace)
        patch.setattr(virtual_step, "trace", _shared_trace)
        patch.setattr(Trace, "joint", _shared_joint)
        yield


def _shared_trace(module: nn.Module, forward: Any, args: Any, kwargs: Any, params: Any, mesh: Any, *rest: Any) -> Trace:
    key = _key(module, forward, args, kwargs, params, rest)
    if (
        key is None or sys._getframe(1).f_code.co_name == "<lambda>"
    ):  # (who captures again wants to see whether it is the same)
        return _trace(module, forward, args, kwargs, params, mesh, *rest)
    if key not in _traces:
        made = _trace(module, forward, args, kwargs, params, mesh, *rest)
        if not made.flat.effects.is_empty or made.flat.takes_numbers or made.sizes:
            return made
        _traces[key] = made
        _joints[id(made.flat)] = {}
        if len(_traces) > _MOST:
            _, oldest = _traces.popitem(last=False)
            del _joints[id(oldest.flat)]
    _traces.move_to_end(key)
    return dataclasses.replace(_traces[key], params=params, mesh=mesh)


def _shared_joint(trace: Trace, differentiated: frozenset[int], decompositions: dict[Any, Any], name: str) -> Program:
    held = _joints.get(id(trace.flat))
    if held is None or not any(known.flat is trace.flat for known in _traces.values()):
        return _joint(trace, differentiated, decompositions, name)
    key = (differentiated, bool(decompositions), name)
    if key not in held:
        held[key] = _joint(trace, differentiated, decompositions, name)
    made = held[key].snapshot()
    made.params, made.mesh = dict(trace.params), dict(trace.mesh)
    return made


def _key(module: nn.Module, forward: Any, args: Any, kwargs: Any, params: Any, rest: Any) -> Any:
    """All that a capture may depend on; None where that can't be said."""
    parts: list[Any] = [
        forward,
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        repr(rest),
        dict(module.named_modules()).keys(),
    ]
    parts[-1] = tuple(parts[-1])
    for name, inner in module.named_modules(remove_duplicate=False):
        own = {k: v for k, v in vars(inner).items() if k not in ("_parameters", "_buffers", "_modules")}
        shown = repr(sorted(own.items(), key=lambda item: item[0]))
        if any(text in shown for text in _TENSORS):
            return None
        parts.append((name, type(inner), shown))
    leaves, form = pytree.tree_flatten((args, kwargs))
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    tensors = [*named, *((str(at), leaf) for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))]
    first: dict[Any, int] = {}
    for name, tensor in tensors:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or vars(tensor) or tensor.layout is not torch.strided:
            return None
        whose = [
            first.setdefault(one, len(first)) for one in (id(tensor), ("storage", tensor.untyped_storage()._cdata))
        ]
        form_of = (
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
        )
        parts.append((name, *whose, *form_of))
    others = repr([leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)])
    if any(text in others for text in _TENSORS):
        return None
    parts += [str(form), others]
    parts += [(s.name, s.whole_shape, s.whole_stride, s.compute_dtype, s.requires_grad) for s in params.values()]
    return tuple(parts)
