"""AOTAutograd: forward and backward as one graph, and descriptions of its inputs and outputs."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import unittest.mock
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._inductor.lowering  # (registers lowerings before a joint trace: some models are captured only with it)
from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    AOTInput,
    AOTOutput,
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
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from zgraph.torch_compat.dynamo import recurrent_layers
from zgraph.torch_compat.element_sizes import given_elements, known_elements
from zgraph.torch_compat.fx_graphs import lazy_module
from zgraph.torch_compat.unbacked_sizes import _fakes_of_unknown_sizes

# An operator with effects in a traced graph: (token, operator, its arguments) -> (token, its results).
WITH_EFFECTS = torch.ops.higher_order.with_effects


def export_joint(
    graph_module: fx.GraphModule, inputs: Sequence[Any], fake_mode: Any, decompositions: dict[Any, Any]
) -> fx.GraphModule:
    """Return AOTAutograd's joint forward+backward graph (the forward alone where nothing requires a gradient)."""
    with (
        contextlib.ExitStack() as stack,
        tracing(TracingContext(fake_mode)),
        recurrent_layers(),
        _fakes_of_unknown_sizes(),
        known_elements(any(given_elements(x) is not None for x in inputs), inputs),
        _use_lazy_graph_module(True),  # (the intermediate graphs are never run)
    ):
        joint = aot_export_joint_with_descriptors(stack, graph_module, tuple(inputs), decompositions=decompositions)
        return joint.graph_module


def trace_function(
    function: Callable[..., Any], inputs: Sequence[Any], fake_mode: Any, decompositions: dict[Any, Any]
) -> fx.GraphModule:
    """Trace a function of fake tensors into a flat graph of aten operators that returns a tuple."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def flat(*values: Any) -> Any:  # (a default argument would count as an input)
        return function(*values)

    with fake_mode, torch.no_grad(), _use_lazy_graph_module(True):
        return make_fx(flat, decomposition_table=decompositions)(*inputs)


def is_token(desc: Any) -> bool:
    """Return whether this input or output of a joint graph is a token, which only keeps operators with effects in
    order."""
    return isinstance(
        desc, (ForwardTokenAOTInput, BackwardTokenAOTInput, ForwardTokenAOTOutput, BackwardTokenAOTOutput)
    )


def users_region(node: fx.Node) -> object:
    """Return the id of the torch.utils.checkpoint region that asks to recompute a node; None if none does."""
    asked = node.meta.get("recompute")
    return node.meta.get("ac_graph_id", 0) if asked is not None and "RECOMPUTE" in str(asked) else None


def describe_input(desc: Any) -> tuple[str, int]:
    """Return ("input" or "tangent", position among the flat inputs or outputs) for a placeholder of a joint graph.

    "mutation_tangent" is the tangent of an input that the forward writes to; any other descriptor gives ("unknown: …",
    -1).
    """
    if isinstance(desc, PlainAOTInput):
        return "input", desc.idx
    if isinstance(desc, TangentAOTInput) and isinstance(desc.output, PlainAOTOutput):
        return "tangent", desc.output.idx
    if isinstance(desc, TangentAOTInput) and isinstance(desc.output, InputMutationAOTOutput):
        return "mutation_tangent", describe_input(desc.output.mutated_input)[1]
    return f"unknown: {desc!r}", -1


def describe_output(desc: Any) -> tuple[str, int]:
    """Return ("output" | "mutation" | "gradient", position) for an output of a joint graph; ("unknown: …", -1) for any
    other."""
    if isinstance(desc, PlainAOTOutput):
        return "output", desc.idx
    if isinstance(desc, InputMutationAOTOutput):
        return "mutation", describe_input(desc.mutated_input)[1]
    if isinstance(desc, GradAOTOutput):
        return "gradient", describe_input(desc.grad_of)[1]
    return f"unknown: {desc!r}", -1


def with_inputs(desc: Any, position: Callable[[int], int]) -> Any:
    """Return a description of an input or output with other positions of the flat inputs that it names."""
    if isinstance(desc, PlainAOTInput):
        return dataclasses.replace(desc, idx=position(desc.idx))
    if not dataclasses.is_dataclass(desc) or isinstance(desc, type):
        return desc
    named = {f.name: getattr(desc, f.name) for f in dataclasses.fields(desc)}
    inner = {name: x for name, x in named.items() if isinstance(x, (AOTInput, AOTOutput))}
    return dataclasses.replace(desc, **{name: with_inputs(x, position) for name, x in inner.items()})


class _Extracted(Exception):
    """Ends the partitioner when its forward is there: what it does to both halves afterwards changes no saved value."""

    def __init__(self, forward: fx.GraphModule) -> None:
        super().__init__()
        self.forward = forward


def min_cut_saved(module: fx.GraphModule, forward_outputs: int, tangents: Sequence[str]) -> set[str]:
    """Return the names of the values that torch's min-cut partitioner would save for the backward (it runs on a copy).

    `tangents` names the inputs that only the backward has.
    """
    from torch._functorch import config as functorch_config
    from torch._functorch import partitioners

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
        producer = node.args[0] if node.target is operator.getitem else node
        if isinstance(producer, fx.Node) and (
            torch.Tag.nondeterministic_seeded in getattr(producer.target, "tags", ())
            or "recompute" not in producer.meta
        ):
            # Random numbers are saved even where a checkpoint region asks to recompute them, and so is what can't be
            # recomputed.
            node.meta.pop("recompute", None)
    extract = partitioners._extract_fwd_bwd_modules

    def extracted(*args: Any, **kwargs: Any) -> Any:
        raise _Extracted(extract(*args, **kwargs)[0])

    budget = functorch_config.patch(activation_memory_budget=1.0)  # (a plan has a budget of its own, in bytes)
    ended = unittest.mock.patch.object(partitioners, "_extract_fwd_bwd_modules", extracted)
    with budget, ended, _use_lazy_graph_module(True):  # (neither half is ever run)
        try:
            partitioners.min_cut_rematerialization_partition(
                lazy_module(module, graph), None, num_fwd_outputs=forward_outputs, static_lifetime_input_indices=[]
            )
        except _Extracted as found:
            forward = found.forward
    saved: Any = forward.graph.output_node().args[0]
    saved = saved[forward_outputs:]
    return {names.get(n.name, n.name) for n in saved if isinstance(n, fx.Node)}
