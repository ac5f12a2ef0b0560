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

# The mesh dimension whose ranks hold the stages of a pipeline. Programs of a step are of one stage; updates meet over it.
STAGE_DIM = "pp"

# The mesh dimension whose ranks see the same data, and divide weights and the work with them.
TENSOR_DIM = "tp"

# The one whose ranks see the same data, have all weights, and divide the sequence.
CONTEXT_DIM = "cp"

# Those whose ranks compute one program together: they see the same rows, and must draw the same random numbers.
TEAM_DIMS = (CONTEXT_DIM, TENSOR_DIM)


class Level(IntEnum):
    """How far a program has come. Each level has invariants of its own (see `zgraph.passes.verifier`)."""

    CAPTURED = 1  # the plain single-device graph
    DISTRIBUTED = 2  # collectives are explicit, inputs are shards
    SCHEDULED = 3  # order has meaning
    EXECUTABLE = 4  # split into the parts that are run


class Fact(StrEnum):
    """What passes have made of a program; contracts are about these. (A pass of a user's own may speak of others.)"""

    CLEAN = "clean"  # without identities and dead nodes
    NARROWED = "narrowed"  # slices stand as early as they can
    DIVIDED = "divided"  # ranks compute it together: over "tp", or over "cp"
    INTERLEAVED = "interleaved"  # products beside the transfers of tensor parallelism are in pieces
    PARTITIONED = "partitioned"  # saved activations are divided over "tp"
    INDUCTOR_READY = "inductor_ready"  # Inductor's joint-graph passes ran
    TILED = "tiled"  # regions of the plan run in slices of rows
    CHECKPOINTED = "checkpointed"  # regions of the model's or the plan's are recomputed
    REMATERIALIZED = "rematerialized"  # activations are recomputed for a memory budget
    RECOMPUTED = "recomputed"  # cheap values are recomputed
    SHARDED = "sharded"  # parameters enter as shards
    REGATHERED = "regathered"  # the backward gathers weights again
    KEPT = "kept"  # gathered weights stay until the update
    SCALED = "scaled"  # tangents are multiplied by the loss scale
    REDUCED = "reduced"  # gradients leave reduced, or are this rank's own where they are partial as well
    PARTIAL = "partial"  # gradients are this rank's own
    BUCKETED = "bucketed"  # transfers that are sent as one have a bucket
    SCHEDULED = "scheduled"  # order has meaning
    RELEASED = "released"  # gathered buffers have a last point at which they are read
    OFFLOADED = "offloaded"  # values are fetched from, and stored in, other memory
    IN_PLACE = "in_place"  # an update's: new values are written where the old ones are
    GROUPED = "grouped"  # an update's: what is updated together has a group


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
    RECEIVED = "received"  # what an earlier pipeline stage has sent
    RETURNED = "returned"  # what a later one has sent back, for the backward
    SCALE = "scale"  # the loss scale of half precision, 0-dim float32
    GRADIENT = "gradient"  # an update's: the reduced gradient, in the layout of its parameter
    STATE = "state"  # what an optimizer keeps: "parameter/name", or "/name" for a number of the whole step
    SCALARS = "scalars"  # learning rates and other numbers of the optimizer's groups, 1-dim float64
    SIZE = "size"  # a size that differs from call to call, an int
    RANK_INDEX = "index"  # this rank's position in a mesh dimension, 0-dim int64
    RESIDUAL = "residual"  # what of earlier gradients was not sent, 1-dim float32, written in place: "parameter/mesh dimension"
    DRAWS = "draws"  # how many backward passes there were before, 0-dim int64: what is drawn by chance is drawn of it


class OutputRole(StrEnum):
    OUTPUT = "output"  # the user's
    MUTATION = "mutation"  # the new value of a buffer, constant or user input
    GRADIENT = "gradient"
    UNSHARDED = "kept"
    SAVED = "saved"
    IN_FLIGHT = "flying"  # a gather that this program starts and the forward waits for
    SENT = "sent"  # for later pipeline stages
    RETURNED = "returned"  # for earlier ones: what their backward goes on from
    CHECK = "check"  # the condition of an assertion of the model's, which raises where it does not hold


@dataclass(frozen=True, slots=True)
class Port:
    """One input or output of a program.

    `name` is the parameter's or buffer's path, "input_3" for the user's, the node's name for a saved value. `index` is
    the position among the flat inputs (outputs) of the captured function, where there is one. A mutation has the
    role of what it changes in `of`.
    """

    role: InputRole | OutputRole
    name: str
    index: int | None = None
    of: InputRole | None = None


def of_backward(port: Port, node: fx.Node) -> bool:
    """Whether the backward gives this output."""
    checked_late = port.role is OutputRole.CHECK and info(node).phase is Phase.BACKWARD
    return checked_late or port.role in (OutputRole.GRADIENT, OutputRole.RETURNED)


@dataclass(frozen=True, slots=True)
class Division:
    """How a parameter is divided among the `ranks` of a mesh dimension that compute it together: each holds an equal part of dimension
    `dim`. Where this is made of several equal `blocks` (queries, keys and values in one matrix), a rank computes with a part of each."""

    mesh_dim: str
    ranks: int
    dim: int
    blocks: int = 1

    def part(self, whole: torch.Tensor, place: int) -> torch.Tensor:
        """What the rank at this position holds of a whole tensor; a view of it."""
        return whole.chunk(self.ranks, self.dim)[place]


@functools.lru_cache(4096)  # (asked for each parameter at each call)
def _stride_of_rows(sizes: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of dense rows of these sizes, whose other dimensions are in the order of `stride`."""
    order = [0, *sorted(range(1, len(sizes)), key=lambda d: (-stride[d], d))]
    strides = [1] * len(order)
    for at in range(len(order) - 2, -1, -1):
        strides[order[at]] = strides[order[at + 1]] * sizes[order[at + 1]]
    return tuple(strides)


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """How one parameter is laid out.

    `shape` and `stride` (elements) are those of what programs compute with: the whole parameter, or a rank's part where
    `division` divides it. `shard_dim` is the mesh dimension over which dimension 0 of this is split, None where every
    rank holds all of it. `home` is the tier ("cpu", "nvme") that a rank's part lies in, `grad_home` that of its reduced gradient,
    None for the device. `rows` is the number of rows in each rank's padded shard: ceil(shape[0] / ranks), as torch's own `Shard(0)`
    splits. `dtype` is what a rank holds; the others are those
    of mixed precision, None where they are the same.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    shard_dim: str | None = None
    rows: int = 0
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    accumulate: torch.dtype | None = None
    home: str | None = None
    grad_home: str | None = None
    division: Division | None = None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape that the user's model gave it."""
        if self.division is None:
            return self.shape
        return tuple(s * self.division.ranks if d == self.division.dim else s for d, s in enumerate(self.shape))

    @property
    def whole_stride(self) -> tuple[int, ...]:
        """The strides that it then has, in elements: in the order in which `stride` has the dimensions."""
        return self.stride if self.division is None else _dense(self.whole_shape, self.stride)

    @property
    def compute_dtype(self) -> torch.dtype:
        """What the model computes with: the dtype of the whole parameter in programs."""
        return self.compute or self.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """What its gradient is averaged in over ranks."""
        return self.reduce or self.compute_dtype

    @property
    def grad_dtype(self) -> torch.dtype:
        """What its gradient is kept in, from micro-batch to micro-batch."""
        return self.accumulate or self.dtype

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())

    @property
    def nbytes(self) -> int:
        """Bytes of what programs compute with."""
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
        """The strides of that shard, in elements, in the order in which `stride` has the dimensions behind its rows."""
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
        """The layout of a rank's part of it on a mesh of these sizes. (What is sharded over another dimension stays so.)"""
        shape = tuple(s // division.ranks if d == division.dim else s for d, s in enumerate(self.shape))
        rows = -(-shape[0] // mesh[self.shard_dim]) if self.shard_dim else 0
        return replace(self, shape=shape, stride=_dense(shape, self.stride), rows=rows, division=division)

    def sharded(self, mesh_dim: str, ranks: int) -> ParamSpec:
        return replace(self, shard_dim=mesh_dim, rows=-(-self.shape[0] // ranks))


def with_gradients_in(homes: Mapping[str, str], specs: Mapping[str, ParamSpec]) -> dict[str, ParamSpec]:
    """The layouts with gradients in these tiers, by their parameters' names. One of a parameter with a home lies with it."""
    return {n: replace(s, grad_home=s.home or homes.get(n)) for n, s in specs.items()}


def _dense(shape: tuple[int, ...], like: tuple[int, ...]) -> tuple[int, ...]:
    """Strides without gaps for a shape, in the order of others."""
    stride, step = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (like[d], -d)):
        stride[d], step = step, step * shape[d]
    return tuple(stride)


@dataclass
class Program:
    """What passes take and change.

    `inputs` are in the order of the graph's placeholders, `outputs` in that of its output node, whose argument is a
    flat tuple of nodes. `mesh` gives the sizes of the mesh dimensions by name, outermost first, in ranks. `params` has
    the layout of every parameter of the model by name, used here or not. `fake_mode` made the nodes' fake values, and
    makes those of inserted nodes. `facts` are what passes have provided so far (their contracts speak of these), `remarks`
    what they would have liked to do and could not. `aliases` has all names of each module that the model has under several, by each of them.
    `sizes` are those that differ from call to call (none: all sizes are numbers).

    Shapes are those of one rank: from the level distributed on, a sharded parameter enters with its `shard_shape`.
    """

    name: str
    module: fx.GraphModule
    inputs: list[Port]
    outputs: list[Port]
    mesh: dict[str, int]
    params: dict[str, ParamSpec]
    fake_mode: Any
    level: Level = Level.CAPTURED
    facts: set[str] = field(default_factory=set)
    remarks: list[Remark] = field(default_factory=list, repr=False)
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    sizes: Sizes = NO_SIZES

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
        """The placeholders of one role, by name."""
        return {port.name: node for port, node in self.input_items() if port.role is role}

    def modules_around(self, node: fx.Node) -> list[str]:
        """The paths of the module that a node is of and of those around it, by all of their names; the outermost first."""
        path = info(node).module
        return around(self.aliases.get(path, (path,)))

    def first_name(self, path: str) -> str:
        """The name of a module by which it is counted where it has several."""
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
        """Insert an operator at the graph's insertion point; its fake value is computed from its arguments'.

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
        """The node behind which something may stand that reads `node`: itself, or the last input."""
        return node if node.op != "placeholder" else self.placeholders()[-1]

    def repeat(self, node: fx.Node, copies: Mapping[fx.Node, fx.Node], made_by: str) -> fx.Node:
        """Insert a copy of `node` at the graph's insertion point, for the backward: the same operator, on the `copies`
        of its operands where there are some. `made_by` is the pass that wants it."""
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
        """Let an input come in where it lies: as a tensor of the host, or of a mapped file."""
        val = value(node)
        with self.fake_mode:
            node.meta["val"] = torch.empty_strided(val.size(), val.stride(), dtype=val.dtype, device="cpu")
        set_info(node, info(node).replace(home=tier))

    def evaluate(self, node: fx.Node) -> Any:
        """The fake value that a node's operator gives for its arguments' fake values."""

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
        held = self.placeholders()
        with self.graph.inserting_after(held[-1]) if held else self.graph.inserting_before():
            node = self.graph.placeholder(name)
        set_info(node, record)
        node.meta["val"] = fake
        self.inputs.append(port)
        return node

    def position(self, dim: str, made_by: str) -> fx.Node:
        """This rank's position in a mesh dimension, as an int64 tensor of one element. The pass `made_by` adds the input for it where there
        is none."""
        index = self.rank_index(dim, made_by)
        record = NodeInfo(phase=Phase.FORWARD, made_by=made_by)
        with self.graph.inserting_after(self.placeholders()[-1]):
            return self.call(torch.ops.aten.unsqueeze.default, (index, 0), record, name="place")

    def rank_index(self, dim: str, made_by: str) -> fx.Node:
        """The input that `position` looks at."""
        port = Port(InputRole.RANK_INDEX, dim)
        return self.number_input(port, NodeInfo(phase=Phase.FORWARD, made_by=made_by), name=f"rank_in_{dim}")

    def number_input(self, port: Port, record: NodeInfo, *, name: str) -> fx.Node:
        """The 0-dim int64 input of a role and a name; it is added where there is none."""
        found = self.input_nodes(port.role).get(port.name)  # type: ignore[arg-type]
        if found is not None:
            return found
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
        """Replace all outputs: ports and the nodes that give them, in order."""
        self.output_node().args = (tuple(node for _, node in items),)
        self.outputs = [port for port, _ in items]

    def recompile(self) -> None:
        """Check the graph's structure and let its module follow the graph; the manager does this after each pass."""
        self.graph.lint()
        self.module.recompile()

    def snapshot(self) -> Program:
        """A copy that later passes do not change: the graph is copied, fake values are shared."""
        graph = fx.Graph()
        memo: dict[fx.Node, fx.Node] = {}
        out = graph.graph_copy(self.graph, memo)
        graph.output(out)
        for old, new in memo.items():
            new.meta = dict(old.meta)
        graph.output_node().meta = dict(self.output_node().meta)
        return self._with(fx_graphs.lazy_module(self.module, graph))

    def frozen(self, graph: fx_graphs.FrozenGraph) -> Callable[[], Program]:
        """The same, where `graph` is this program's graph: what makes the copy, of which all such share the graph."""
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
        """This program at these sizes by name: a static one, a copy. One whose sizes are numbers is itself."""
        return static_at(self, sizes) if self.sizes else self

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        return self.snapshot()

    def renamed(self, name: str) -> Program:
        other = copy.copy(self)
        other.name = name
        return other
