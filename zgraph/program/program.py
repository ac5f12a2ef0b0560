"""`Program`: an FX graph of aten operators with the roles of its inputs and outputs, on a mesh, at a level."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Any

import torch
from torch import fx

from zgraph.names import around
from zgraph.program import fake_collectives
from zgraph.program.node import NodeInfo, Phase, Role, has_info, info, set_info, value
from zgraph.program.remark import Remark
from zgraph.program.sizes import NO_SIZES, Sizes, static_at, with_nodes
from zgraph.torch_compat import fx_graphs
from zgraph.torch_compat.symbols import evaluating

# The mesh dimensions over which ranks see different data, innermost first: gradients are averaged over them.
DATA_DIMS = ("dp", "replicate")

# The mesh dimension whose ranks hold the stages of a pipeline. Each program is of one stage; only update programs have collectives over it.
STAGE_DIM = "pp"

# The mesh dimension whose ranks see the same data, and divide weights and the work with them.
TENSOR_DIM = "tp"

# The mesh dimension whose ranks see the same data, have all weights, and divide the sequence.
CONTEXT_DIM = "cp"

# The mesh dimensions whose ranks compute one program together: they see the same rows, and must draw the same random numbers.
TEAM_DIMS = (CONTEXT_DIM, TENSOR_DIM)


class Level(IntEnum):
    """How far a program has come. Each level has invariants of its own (see `zgraph.passes.verifier`)."""

    CAPTURED = 1  # the plain single-device graph
    DISTRIBUTED = 2  # collectives are explicit, inputs are shards
    SCHEDULED = 3  # order has meaning
    EXECUTABLE = 4  # split into the parts that are run


class Fact(StrEnum):
    """What passes have done to a program; contracts are about these. A user's own pass may add facts of its own."""

    CLEAN = "clean"  # without identities and dead nodes
    NARROWED = "narrowed"  # slices are as early as they can be
    DIVIDED = "divided"  # ranks compute it together: over "tp", or over "cp"
    INTERLEAVED = "interleaved"  # products beside the transfers of tensor parallelism are in pieces
    PARTITIONED = "partitioned"  # saved activations are divided over "tp"
    INDUCTOR_READY = "inductor_ready"  # Inductor's joint-graph passes ran
    TILED = "tiled"  # regions of the plan run in slices of rows
    CHECKPOINTED = "checkpointed"  # regions that the model or the plan names are recomputed
    REMATERIALIZED = "rematerialized"  # activations are recomputed for a memory budget
    RECOMPUTED = "recomputed"  # cheap values are recomputed
    SHARDED = "sharded"  # parameters enter as shards
    REGATHERED = "regathered"  # the backward gathers weights again
    KEPT = "kept"  # gathered weights stay until the update
    SCALED = "scaled"  # tangents are multiplied by the loss scale
    REDUCED = "reduced"  # gradients are reduced, or, in a program that is partial as well, this rank's own
    IN_GROUPS = (
        "in_groups"  # gradients are averaged within groups of ranks alone: those of "replicate" train by themselves
    )
    COMPRESSED = (
        "compressed"  # values that cross between pipeline stages in few bits are bytes at its inputs and outputs
    )
    PARTIAL = "partial"  # gradients are this rank's own, not reduced
    BUCKETED = "bucketed"  # transfers that are sent as one have a bucket
    SCHEDULED = "scheduled"  # order has meaning
    RELEASED = "released"  # gathered buffers have a mark behind their last reader
    OFFLOADED = "offloaded"  # values are fetched from, and stored in, other memory
    IN_PLACE = "in_place"  # in an update: new values are written over the old ones
    GROUPED = "grouped"  # in an update: nodes that are compiled together have a group


class InputRole(StrEnum):
    PARAMETER = "parameter"  # the shard, or the whole where a parameter is not sharded
    BUFFER = "buffer"
    CONSTANT = "constant"  # a tensor that the model holds but did not register
    INPUT = "input"  # the user's
    TANGENT = "tangent"
    UNSHARDED = "kept"  # a whole parameter that an earlier program gathered
    ACCUMULATOR = "accumulator"  # this rank's unreduced gradient of earlier micro-batches
    SAVED = "saved"  # from the forward program to the backward one
    IN_FLIGHT = "flying"  # a gather that was started before the forward program, which waits for it
    RECEIVED = "received"  # a value that an earlier pipeline stage has sent
    RETURNED = "returned"  # a gradient that a later pipeline stage has sent back
    SCALE = "scale"  # the loss scale of half precision, 0-dim float32
    GRADIENT = "gradient"  # in an update: the reduced gradient, in the layout of its parameter
    STATE = "state"  # what an optimizer keeps: "parameter/name", or "/name" for a number of the whole step
    SCALARS = "scalars"  # learning rates and other numbers of the optimizer's groups, 1-dim float64
    SIZE = "size"  # a size that differs from call to call, an int
    RANK_INDEX = "index"  # this rank's position in a mesh dimension, 0-dim int64
    RESIDUAL = "residual"  # quantization errors of earlier gradients, 1-dim float32, written in place: "parameter/mesh dimension"
    DRAWS = "draws"  # number of earlier backward passes, 0-dim int64: the counter that stochastic rounding draws from


class OutputRole(StrEnum):
    OUTPUT = "output"  # the user's
    MUTATION = "mutation"  # the new value of a buffer, constant or user input
    GRADIENT = "gradient"
    UNSHARDED = "kept"
    SAVED = "saved"
    IN_FLIGHT = "flying"  # a gather that this program starts and the forward waits for
    SENT = "sent"  # for later pipeline stages
    RETURNED = "returned"  # a gradient for an earlier pipeline stage
    CHECK = "check"  # the condition of an assertion in the model; its node raises where it does not hold


@dataclass(frozen=True, slots=True)
class Port:
    """One input or output of a program."""

    role: InputRole | OutputRole  # what it is for
    name: str  # path of the parameter or buffer, "input_3" for a user's input, node name of a saved value
    index: int | None = None  # position among the captured function's flat inputs (outputs), where it has one
    of: InputRole | None = None  # of a mutation: the role of the input that it changes
    few_bits: bool = False  # of a value between pipeline stages: whether it crosses as bytes of `block_quantization`


def of_backward(port: Port, node: fx.Node) -> bool:
    """Return whether the backward computes this output."""
    checked_late = port.role is OutputRole.CHECK and info(node).phase is Phase.BACKWARD
    return checked_late or port.role in (OutputRole.GRADIENT, OutputRole.RETURNED)


@dataclass(frozen=True, slots=True)
class Division:
    """How a parameter is divided among ranks that compute it together: each holds an equal part of one dimension."""

    mesh_dim: str  # the mesh dimension of these ranks
    ranks: int  # how many there are
    dim: int  # the dimension of the parameter that is divided
    blocks: int = 1  # equal blocks along it (queries, keys, values in one matrix): a rank computes with a part of each

    def part(self, whole: torch.Tensor, place: int) -> torch.Tensor:
        """Return the part of a whole tensor that the rank at position `place` holds; a view."""
        return whole.chunk(self.ranks, self.dim)[place]


@functools.lru_cache(4096)  # (asked for each parameter at each call)
def _stride_of_rows(sizes: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of dense rows of these sizes, whose other dimensions are in the order of `stride`."""
    order = [0, *sorted(range(1, len(sizes)), key=lambda d: (-stride[d], d))]
    strides = [1] * len(order)
    for at in range(len(order) - 2, -1, -1):
        strides[order[at]] = strides[order[at + 1]] * sizes[order[at + 1]]
    return tuple(strides)


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """How one parameter is laid out."""

    name: str  # its path in the model
    # of what programs compute with: the whole parameter, or a rank's part where `division` divides it
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # strides of the same, in elements
    dtype: torch.dtype  # what a rank holds
    requires_grad: bool  # whether it is trained
    # mesh dimension over which dimension 0 of `shape` is sharded; None where every rank holds all
    shard_dim: str | None = None
    rows: int = 0  # rows of a rank's padded shard: ceil(shape[0] / ranks), as torch's own `Shard(0)` splits
    compute: torch.dtype | None = None  # dtype that the model computes with, None where it is `dtype`
    reduce: torch.dtype | None = None  # dtype that gradients are reduced in, None where it is the compute dtype
    accumulate: torch.dtype | None = None  # dtype that gradients are accumulated in, None where it is `dtype`
    home: str | None = None  # tier ("cpu", "nvme") of a rank's part, None for the device
    grad_home: str | None = None  # tier of its reduced gradient, None for the device
    division: Division | None = None  # how ranks that compute it together divide it

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape that the user's model gave it."""
        if self.division is None:
            return self.shape
        return tuple(s * self.division.ranks if d == self.division.dim else s for d, s in enumerate(self.shape))

    @property
    def whole_stride(self) -> tuple[int, ...]:
        """The strides of `whole_shape`, in elements: its dimensions are in the order that `stride` has."""
        return self.stride if self.division is None else _dense(self.whole_shape, self.stride)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that the model computes with: that of the whole parameter in programs."""
        return self.compute or self.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which its gradient is averaged over ranks."""
        return self.reduce or self.compute_dtype

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype in which its gradient is accumulated over micro-batches."""
        return self.accumulate or self.dtype

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())

    @property
    def nbytes(self) -> int:
        """Bytes of `shape` in the dtype that a rank holds."""
        return self.numel * self.dtype.itemsize

    @property
    def whole_nbytes(self) -> int:
        """Bytes of the parameter as the user's model has it."""
        return self.nbytes * (self.division.ranks if self.division is not None else 1)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of a rank's padded shard (the whole shape where it is not sharded)."""
        return (self.rows, *self.shape[1:]) if self.shard_dim else self.shape

    @property
    def shard_stride(self) -> tuple[int, ...]:
        """The strides of that shard, in elements; the dimensions behind its rows are in the order that `stride` has."""
        if not self.shard_dim:
            return self.stride
        return _stride_of_rows(self.shard_shape, self.stride)

    @property
    def rank_bytes(self) -> int:
        """Bytes of a rank's shard, and of its gradient."""
        return math.prod(self.shard_shape) * self.dtype.itemsize + self.grad_bytes

    @property
    def grad_bytes(self) -> int:
        """Bytes of the gradient of a rank's shard."""
        return math.prod(self.shard_shape) * self.grad_dtype.itemsize if self.requires_grad else 0

    def divided(self, division: Division, mesh: Mapping[str, int]) -> ParamSpec:
        """Return the layout of a rank's part on a mesh of these sizes; a sharded parameter stays sharded over its mesh
        dimension."""
        shape = tuple(s // division.ranks if d == division.dim else s for d, s in enumerate(self.shape))
        rows = -(-shape[0] // mesh[self.shard_dim]) if self.shard_dim else 0
        return replace(self, shape=shape, stride=_dense(shape, self.stride), rows=rows, division=division)

    def sharded(self, mesh_dim: str, ranks: int) -> ParamSpec:
        return replace(self, shard_dim=mesh_dim, rows=-(-self.shape[0] // ranks))


def with_gradients_in(homes: Mapping[str, str], specs: Mapping[str, ParamSpec]) -> dict[str, ParamSpec]:
    """Return the layouts with gradients in these tiers, by parameter; an offloaded parameter's gradient is stored in
    its own tier."""
    return {n: replace(s, grad_home=s.home or homes.get(n)) for n, s in specs.items()}


def _dense(shape: tuple[int, ...], like: tuple[int, ...]) -> tuple[int, ...]:
    """Return dense strides for a shape, with dimensions in the order of the strides `like`."""
    stride, step = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (like[d], -d)):
        stride[d], step = step, step * shape[d]
    return tuple(stride)


@dataclass
class Program:
    """The graph that passes take and change, with what its inputs, outputs and parameters are.

    Shapes are those of one rank: from the level distributed on, a sharded parameter enters with its `shard_shape`.
    """

    name: str  # what errors and texts call it
    module: fx.GraphModule  # holds the graph and the constants that it reads
    inputs: list[Port]  # ports in the order of the graph's placeholders
    outputs: list[Port]  # ports in the order of the output node's argument, a flat tuple of nodes
    mesh: dict[str, int]  # sizes of the mesh dimensions in ranks, outermost first
    params: dict[str, ParamSpec]  # the layout of every parameter of the model by name, used here or not
    fake_mode: Any  # makes the fake values of its nodes
    level: Level = Level.CAPTURED  # how far it has come
    facts: set[str] = field(default_factory=set)  # what passes have provided so far
    remarks: list[Remark] = field(default_factory=list, repr=False)  # what passes could not do
    # all names of each module that the model has under several, by each of them
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    sizes: Sizes = NO_SIZES  # sizes that differ from call to call; none: all are numbers

    # -- reading ---------------------------------------------------------------------------------------------------
    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def nodes(self) -> list[fx.Node]:
        return list(self.graph.nodes)

    @property
    def world(self) -> int:
        """The number of ranks in the mesh."""
        size = 1
        for n in self.mesh.values():
            size *= n
        return size

    def placeholders(self) -> list[fx.Node]:
        return list(self.graph.find_nodes(op="placeholder"))

    def output_node(self) -> fx.Node:
        return self.graph.output_node()

    def output_values(self) -> tuple[fx.Node, ...]:
        return tuple(self.output_node().args[0])  # type: ignore[arg-type]

    def input_items(self) -> Iterator[tuple[Port, fx.Node]]:
        return zip(self.inputs, self.placeholders(), strict=True)

    def output_items(self) -> Iterator[tuple[Port, fx.Node]]:
        return zip(self.outputs, self.output_values(), strict=True)

    def input_nodes(self, role: InputRole) -> dict[str, fx.Node]:
        """Return the placeholders of one role, by name."""
        return {port.name: node for port, node in self.input_items() if port.role is role}

    def modules_around(self, node: fx.Node) -> list[str]:
        """Return the paths of a node's module and of the modules around it, by all of their names; the outermost
        first."""
        path = info(node).module
        return around(self.aliases.get(path, (path,)))

    def first_name(self, path: str) -> str:
        """Return the first of a module's names: the one under which it is counted."""
        return self.aliases.get(path, (path,))[0]

    # -- changing --------------------------------------------------------------------------------------------------
    def call(
        self,
        target: Any,
        args: tuple[Any, ...],
        record: NodeInfo,
        *,
        name: str,
        kwargs: dict[str, Any] | None = None,
    ) -> fx.Node:
        """Insert an operator at the graph's insertion point; its fake value is computed from those of its arguments.

        `name` is made unique by a suffix if another node has it. Raises what the operator's fake implementation raises
        for arguments that do not fit.
        """
        if self.sizes:
            args, kwargs = with_nodes(self.graph, (args, kwargs or {}))
        node = self.graph.create_node("call_function", target, args, kwargs or {}, name=name)
        set_info(node, record)
        node.meta["val"] = self.evaluate(node)
        return node

    def behind(self, node: fx.Node) -> fx.Node:
        """Return the node after which a reader of `node` may be inserted: `node` itself, or the last input if it is an
        input."""
        return node if node.op != "placeholder" else self.placeholders()[-1]

    def repeat(self, node: fx.Node, copies: Mapping[fx.Node, fx.Node], made_by: str) -> fx.Node:
        """Insert a copy of `node` at the graph's insertion point, for the backward: the same operator, on the `copies`
        of its operands where there are any. `made_by` is the pass that asks for it."""
        copied = self.graph.node_copy(node, lambda n: copies.get(n, n))
        copied.meta = dict(node.meta)
        record = info(node).replace(phase=Phase.BACKWARD, copy_of=node.name, made_by=made_by, transfer=None)
        operand = copied.all_input_nodes[0] if record.role is Role.WAIT else None
        if record.role is Role.EXCHANGE:
            record = record.replace(transfer=copied.name)
        elif operand is not None and has_info(operand) and info(operand).role is Role.EXCHANGE:
            record = record.replace(transfer=info(operand).transfer)
        set_info(copied, record)
        return copied

    def put_home(self, node: fx.Node, tier: str) -> None:
        """Make an input's fake value one of the tier that stores it: a tensor in host memory, or in a mapped file."""
        val = value(node)
        with self.fake_mode:
            node.meta["val"] = torch.empty_strided(val.size(), val.stride(), dtype=val.dtype, device="cpu")
        set_info(node, info(node).replace(home=tier))

    def evaluate(self, node: fx.Node) -> Any:
        """Return the fake value that a node's operator gives for its arguments' fake values."""

        def read(arg: fx.Node) -> Any:
            return value(arg)

        args: Any = fx.node.map_arg(node.args, read)
        kwargs: Any = fx.node.map_arg(node.kwargs, read)
        if node.target is operator.getitem:
            return args[0][args[1]]
        if fake_collectives.is_remembered(node.target, args, kwargs):
            return fake_collectives.value_of(node.target, args, self.fake_mode)
        with self.fake_mode, torch.no_grad(), evaluating() if self.sizes else contextlib.nullcontext():
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def add_input(self, port: Port, fake: torch.Tensor, record: NodeInfo, *, name: str) -> fx.Node:
        """Append a placeholder after the last one, and its port; `fake` is its fake value."""
        placeholders = self.placeholders()
        with self.graph.inserting_after(placeholders[-1]) if placeholders else self.graph.inserting_before():
            node = self.graph.placeholder(name)
        set_info(node, record)
        node.meta["val"] = fake
        self.inputs.append(port)
        return node

    def position(self, dim: str, made_by: str) -> fx.Node:
        """Return the node of this rank's position in a mesh dimension, an int64 tensor of one element.

        Adds the input for it, made by the pass `made_by`, where the program has none.
        """
        index = self.rank_index(dim, made_by)
        record = NodeInfo(phase=Phase.FORWARD, made_by=made_by)
        with self.graph.inserting_after(self.placeholders()[-1]):
            return self.call(torch.ops.aten.unsqueeze.default, (index, 0), record, name="place")

    def rank_index(self, dim: str, made_by: str) -> fx.Node:
        """Return the input for this rank's position in a mesh dimension, a 0-dim tensor; add it where there is none."""
        port = Port(InputRole.RANK_INDEX, dim)
        return self.number_input(port, NodeInfo(phase=Phase.FORWARD, made_by=made_by), name=f"rank_in_{dim}")

    def number_input(self, port: Port, record: NodeInfo, *, name: str) -> fx.Node:
        """Return the 0-dim int64 input with this role and name; add it where there is none."""
        node = self.input_nodes(port.role).get(port.name)  # type: ignore[arg-type]
        if node is not None:
            return node
        params = self.input_nodes(InputRole.PARAMETER).values()
        device = next((value(n).device for n in params), None)
        with self.fake_mode:
            fake = torch.empty((), dtype=torch.int64, device=device)
        return self.add_input(port, fake, record, name=name)

    def remove_input(self, node: fx.Node) -> None:
        """Remove a placeholder that nothing uses, and its port."""
        at = self.placeholders().index(node)
        self.graph.erase_node(node)
        del self.inputs[at]

    def set_outputs(self, items: list[tuple[Port, fx.Node]]) -> None:
        """Replace all outputs by these ports and nodes, in order."""
        self.output_node().args = (tuple(node for _, node in items),)
        self.outputs = [port for port, _ in items]

    def recompile(self) -> None:
        """Check the graph's structure and update the module to the graph; the manager does this after each pass."""
        self.graph.lint()
        self.module.recompile()

    def snapshot(self) -> Program:
        """Return a copy that later passes do not change: the graph is copied, fake values are shared."""
        graph = fx.Graph()
        memo: dict[fx.Node, fx.Node] = {}
        out = graph.graph_copy(self.graph, memo)
        graph.output(out)
        for old, new in memo.items():
            new.meta = dict(old.meta)
        graph.output_node().meta = dict(self.output_node().meta)
        return self._with(fx_graphs.lazy_module(self.module, graph))

    def frozen(self, graph: fx_graphs.FrozenGraph) -> Callable[[], Program]:
        """Return a function that returns a copy of this program as it is now; `graph` is this program's graph, which
        all such copies share."""
        other = self._with(self.module)

        def made() -> Program:
            other.module = graph.module
            return other

        return made

    def _with(self, module: fx.GraphModule) -> Program:
        return Program(
            name=self.name,
            module=module,
            inputs=list(self.inputs),
            outputs=list(self.outputs),
            mesh=dict(self.mesh),
            params=dict(self.params),
            fake_mode=self.fake_mode,
            level=self.level,
            facts=set(self.facts),
            remarks=list(self.remarks),
            aliases=self.aliases,
            sizes=self.sizes,
        )

    def at(self, sizes: Mapping[str, int]) -> Program:
        """Return this program at these sizes by name: a static copy, or itself if its sizes are numbers."""
        return static_at(self, sizes) if self.sizes else self

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        return self.snapshot()

    def renamed(self, name: str) -> Program:
        other = copy.copy(self)
        other.name = name
        return other
