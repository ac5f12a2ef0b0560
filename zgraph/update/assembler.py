"""Puts traced functions into a program: an update's formulas are plain functions of tensors, and become nodes here.

A function of one parameter's tensors is traced once per process for each kind of parameter, and put in once for each
parameter; arithmetic that depends on single numbers alone (a step size) is put in once for all.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from zgraph.program import collectives
from zgraph.program.node import NodeInfo, Phase, Role, info, set_info, tensor
from zgraph.program.program import InputRole, Level, ParamSpec, Port, Program
from zgraph.program.transfers import mark_transfers
from zgraph.torch_compat import aot, fx_graphs

aten = torch.ops.aten

# The functions that were traced in this process, by all that the trace depends on; the least recently used are dropped.
_TEMPLATES: OrderedDict[Any, fx.GraphModule] = OrderedDict()
_MOST = 1000


@functools.cache
def _fake_mode() -> FakeTensorMode:
    """Return the fake mode of all update programs: one mode, so that what was traced for one can be put into another."""
    return FakeTensorMode()


class Assembler:
    """A program that is being built. `decompositions` are those of the backend that will compile it."""

    def __init__(
        self,
        name: str,
        specs: dict[str, ParamSpec],
        mesh: dict[str, int],
        device: torch.device,
        decompositions: dict[Any, Any],
    ) -> None:
        graph = fx.Graph()
        set_info(graph.output(()), NodeInfo(Phase.UPDATE))
        self.program = Program(
            name=name,
            module=fx_graphs.lazy_module(torch.nn.Module(), graph),
            inputs=[],
            outputs=[],
            mesh=dict(mesh),
            params=dict(specs),
            fake_mode=_fake_mode(),
            level=Level.DISTRIBUTED,
        )
        self.device = device
        self.decompositions = decompositions
        self._known: dict[fx.Node, None] = {}  # nodes that are single numbers, or computed from single numbers alone
        self._shared: dict[Any, fx.Node] = {}
        # (a backend's table of decompositions is one of two: torch's for Inductor, with or without those of random operators)
        surroundings = (torch.get_default_dtype(), torch.is_autocast_enabled(device.type))
        self._kind = (device, len(decompositions), torch.are_deterministic_algorithms_enabled(), *surroundings)
        self._constants: dict[Any, str] = {}

    def input(
        self,
        port: Port,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        spec: ParamSpec | None = None,
        home: str | None = None,
    ) -> fx.Node:
        """Add an input; it has the strides of `spec`'s rows where it has their shape.

        An input without `spec` is for numbers. `home` is the tier that will store it.
        """
        with self.program.fake_mode:
            if spec is not None and tuple(shape) == spec.shard_shape:
                fake = torch.empty_strided(shape, spec.shard_stride, dtype=dtype, device=self.device)
            else:
                fake = torch.empty(shape, dtype=dtype, device=self.device)
        label = "".join(c if c.isalnum() else "_" for c in port.name).strip("_")
        placeholders = self.program.placeholders()
        prefix = "grad_" if port.role is InputRole.GRADIENT else "rank_in_" if port.role is InputRole.RANK_INDEX else ""
        name = prefix + label if (prefix + label).isidentifier() else f"_{label}"
        record = NodeInfo(Phase.UPDATE, param=spec.name if spec is not None else None, made_by="update", home=home)
        if placeholders:
            node = self.program.add_input(port, fake, record, name=name)
        else:
            with self.program.graph.inserting_before(self.program.output_node()):
                node = self.program.graph.placeholder(name)
            set_info(node, record)
            node.meta["val"] = fake
            self.program.inputs.append(port)
        if spec is None and port.role is not InputRole.RANK_INDEX:
            self._known[node] = None
        return node

    def numbers(
        self, function: Callable[..., tuple[Tensor, ...]], inputs: list[fx.Node], key: tuple[Any, ...] | None = None
    ) -> list[fx.Node]:
        """Insert arithmetic on single numbers. For `key` see `of`."""
        return self._inline(self._template(function, inputs, key), inputs, None)

    def total(self, function: Callable[..., tuple[Tensor, ...]], inputs: list[fx.Node]) -> list[fx.Node]:
        totals = self.together(function, inputs)
        self._known.update(dict.fromkeys(totals))
        return totals

    def together(self, function: Callable[..., tuple[Tensor, ...]], inputs: list[fx.Node]) -> list[fx.Node]:
        """Insert a function of tensors of several parameters."""
        return self._inline(self._trace(function, inputs), inputs, None)

    def summed(self, name: str, x: fx.Node, group: str) -> fx.Node:
        """Insert an all-reduce (sum) of a parameter's tensor over the ranks of a group.

        Its nodes name no parameter: ranks of the group may run other programs, so the sum must keep the program's
        order and not run with the parameter's own nodes, at a time of their own.
        """
        program, label = self.program, "".join(c if c.isalnum() else "_" for c in name)
        stride = tensor(x).stride()
        order = sorted(range(len(stride)), key=lambda d: (-stride[d], d))
        here = NodeInfo(Phase.UPDATE, Role.LAYOUT, made_by="update")
        there = here.replace(role=Role.REDUCE, mesh_dim=group, stream=f"comm:{group}")
        chain = [x]

        def call(target: Any, args: tuple[Any, ...], record: NodeInfo, what: str) -> None:
            chain.append(program.call(target, (chain[-1], *args), record, name=f"{what}_{label}"))

        with program.graph.inserting_before(program.output_node()):
            if order != sorted(order):  # (a collective needs contiguous rows)
                call(aten.permute.default, (order,), here, "packed")
            call(collectives.ALL_REDUCE, ("sum", group), there, "tied")
            call(collectives.WAIT, (), there.replace(role=Role.WAIT, stream="compute"), "sum")
            if order != sorted(order):
                call(aten.permute.default, ([order.index(d) for d in range(len(order))],), here, "unpacked")
        mark_transfers(chain[1:])
        return chain[-1]

    def of(
        self, name: str, function: Callable[..., tuple[Tensor, ...]], inputs: list[fx.Node], key: tuple[Any, ...]
    ) -> list[fx.Node]:
        """Insert a function of one parameter's tensors (and of numbers).

        `key` says all that the function does, except for its inputs' types: functions with equal keys are traced once.
        """
        return self._inline(self._template(function, inputs, key), inputs, name)

    def _template(
        self, function: Callable[..., tuple[Tensor, ...]], inputs: list[fx.Node], key: tuple[Any, ...] | None
    ) -> fx.GraphModule:
        if key is None:
            return self._trace(function, inputs)
        full = (self._kind, key, tuple((t.dtype, tuple(t.shape), t.stride()) for t in map(tensor, inputs)))
        if full not in _TEMPLATES:
            _TEMPLATES[full] = self._trace(function, inputs)
            if len(_TEMPLATES) > _MOST:
                _TEMPLATES.popitem(last=False)
        _TEMPLATES.move_to_end(full)
        return _TEMPLATES[full]

    def _trace(self, function: Callable[..., tuple[Tensor, ...]], inputs: list[fx.Node]) -> fx.GraphModule:
        # Copies of a template share their nodes' fake tensors, and a tracer takes one tensor given twice for one input.
        with self.program.fake_mode:
            fakes = [
                torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=self.device) for t in map(tensor, inputs)
            ]
        return aot.trace_function(function, fakes, self.program.fake_mode, self.decompositions)

    def _inline(self, template: fx.GraphModule, inputs: list[fx.Node], param: str | None) -> list[fx.Node]:
        """Insert a traced function's nodes at the end of the program; arithmetic on numbers is inserted only once."""
        graph = self.program.graph
        memo: dict[fx.Node, fx.Node] = {}
        given = iter(inputs)
        with graph.inserting_before(self.program.output_node()):
            for node in template.graph.nodes:
                if node.op == "placeholder":
                    memo[node] = next(given)
                elif node.op == "output":
                    return [memo[n] for n in node.args[0]]
                else:
                    memo[node] = self._copy(template, node, memo, param)
        raise AssertionError("a traced function has no output")

    def _copy(
        self, template: fx.GraphModule, node: fx.Node, memo: dict[fx.Node, fx.Node], param: str | None
    ) -> fx.Node:
        number = all(memo[a] in self._known for a in node.all_input_nodes) and node.op == "call_function"
        key = None
        if number or node.op == "get_attr":
            args: Any = fx.node.map_arg((node.args, node.kwargs), lambda n: memo[n])
            constant = _bytes(getattr(template, str(node.target))) if node.op == "get_attr" else None
            key = repr((node.op, str(node.target) if constant is None else constant, args))
            if key in self._shared:
                return self._shared[key]
        new_node = self.program.graph.node_copy(node, lambda n: memo[n])
        new_node.meta = {"val": node.meta.get("val")}
        if node.op == "get_attr":
            stored = getattr(template, str(node.target))
            name = f"constant_{len(self._constants)}"
            self._constants[key] = name
            setattr(self.program.module, name, stored)
            new_node.target = name
            if new_node.meta["val"] is None:
                new_node.meta["val"] = self.program.fake_mode.from_tensor(stored)
        record = NodeInfo(Phase.UPDATE, param=None if key is not None else param, made_by="update")
        if collectives.is_start(new_node):
            gathers = new_node.target is collectives.ALL_GATHER
            dim = collectives.group_of(new_node)
            role = Role.GATHER if gathers else Role.REDUCE
            record = record.replace(role=role, mesh_dim=dim, stream=f"comm:{dim}", transfer=new_node.name)
        elif collectives.is_wait(new_node):
            start = info(new_node.all_input_nodes[0])
            record = record.replace(role=Role.WAIT, mesh_dim=start.mesh_dim, transfer=start.transfer)
        set_info(new_node, record)
        if key is not None:
            self._shared[key] = new_node
            self._known[new_node] = None
        return new_node

    def finish(self, results: list[tuple[Port, fx.Node]]) -> Program:
        """Return the program with these outputs, without nodes and inputs that nothing needs."""
        program = self.program
        program.set_outputs(results)
        for node in reversed(program.nodes):
            if node.op not in ("placeholder", "output") and not node.users:
                program.graph.erase_node(node)
        written = {(port.of, port.name) for port in program.outputs}
        for port, node in list(program.input_items()):
            if not node.users and (port.role, port.name) not in written:
                program.remove_input(node)
        program.recompile()
        return program


def _bytes(constant: Tensor) -> tuple[Any, ...]:
    flat = constant.detach().contiguous().view(-1)
    return (constant.dtype, tuple(constant.shape), bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b"")


def all_reduce(x: Tensor, op: str, dim: str) -> Tensor:
    """Return `x` summed (or its largest, for "max") over a mesh dimension, as a collective that the tracer records."""
    return collectives.WAIT(collectives.ALL_REDUCE(x, op, dim))  # type: ignore[no-any-return]
