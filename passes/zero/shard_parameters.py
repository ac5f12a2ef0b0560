"""ZeRO as four passes over the joint graph (after Rajbhandari et al., 2020, "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models").

*Contract.* On entry the program is the plain single-device graph: parameters are whole, gradients are this rank's.
On exit every sharded parameter enters as this rank's padded shard (or, where an earlier program of the same step
gathered it, whole), and every gradient leaves averaged over the data-parallel ranks, in the layout of its parameter.

    shard_parameters    p[n, …]            ->  shard[rows, …] -> all_gather -> wait (-> slice to n) before its first use
    regather            uses in backward   ->  a second gather, before the first of them           (stage 3)
    keep_gathered       the gathered value becomes an output, or comes in as an input              (stages 1 and 2)
    reduce_gradients    grad[n, …]         ->  (pad ->) reduce_scatter "avg" -> wait -> [rows, …]; all_reduce where
                                               the parameter is whole, and over `replicate`

Sharding is on dimension 0 in rows = ceil(n / ranks), padded at the end: a gather lands in the whole parameter and a
reduce-scatter reads the gradient, both without a copy where ranks divide n.
"""

from __future__ import annotations

import bisect
import itertools
import re
from dataclasses import dataclass

import torch
from torch import fx

from zgraph.passes.analysis.parameter_collectives import largest_layer
from zgraph.passes.contract import graph_pass
from zgraph.program import collectives
from zgraph.program.aliases import is_view
from zgraph.program.node import NodeInfo, Phase, Role, info, set_info, tensor
from zgraph.program.program import DATA_DIMS, InputRole, Level, OutputRole, ParamSpec, Port, Program

aten = torch.ops.aten


@dataclass(frozen=True)
class KeepOptions:
    """`gathered_before`: an earlier program of this optimizer step has gathered the weights; they come in whole."""

    gathered_before: bool = False


@dataclass(frozen=True)
class RegatherOptions:
    """Weights that are held from the forward to the backward: those named in `keep`, and those between whose two uses no
    more than `reuse_bytes` of other weights are used (DeepSpeed's stage3_max_reuse_distance; None: 1% of the largest layer):
    at the turn from forward to backward a weight would be let go just to be gathered again. Not where other micro-batches come between the
    two (no `turn`)."""

    reuse_bytes: int | None = None
    keep: frozenset[str] = frozenset()
    turn: bool = True


@dataclass(frozen=True)
class ReduceOptions:
    """`reduce`: False leaves each gradient as this rank's own, for a later program to add and reduce.
    `accumulated`: such gradients of earlier micro-batches come in and are added before the reduction."""

    reduce: bool = True
    accumulated: bool = False


@graph_pass(
    "shard_parameters",
    "parameters enter as shards and are gathered before their first use",
    requires=("clean",),
    provides=("sharded",),
    conflicts=("sharded",),
    level=Level.DISTRIBUTED,
)
def shard_parameters(program: Program) -> dict[str, int]:
    gathers = gathered_bytes = 0
    for name, node in program.input_nodes(InputRole.PARAMETER).items():
        spec = program.params[name]
        if not node.users or (spec.shard_dim is None and spec.compute_dtype is spec.dtype):
            continue
        users = sorted(node.users)
        phase = info(users[0]).phase
        _enter(program, node, spec)
        with program.graph.inserting_before(users[0]):
            if spec.shard_dim is None:
                base = _record(spec, phase, users[0])
                whole = _cast(program, node, spec.compute_dtype, base.but(role=Role.LAYOUT), f"cast_{_slug(name)}")
            else:
                whole = _gather(program, node, spec, phase, like=users[0])
                gathers += 1
                gathered_bytes += spec.numel * spec.compute_dtype.itemsize
        for user in users:
            user.replace_input_with(node, whole)
    return {"gathers": gathers, "gathered_bytes": gathered_bytes}


def _enter(program: Program, node: fx.Node, spec: ParamSpec) -> None:
    """Let a parameter's placeholder have the shape and dtype that a rank holds."""
    device = tensor(node).device
    with program.fake_mode:
        if spec.shard_dim is None:
            node.meta["val"] = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
        else:
            held = torch.empty(_physical(spec.shard_shape, spec), dtype=spec.dtype, device=device)
            node.meta["val"] = held.permute(_inverse(_order(spec)))
    set_info(node, info(node).but(param=spec.name))


@graph_pass(
    "regather",
    "what the forward gathered is gathered (or fetched) again for the backward, not kept",
    options=RegatherOptions,
    requires=("sharded",),
    provides=("regathered",),
    conflicts=("kept",),
)
def regather(program: Program, options: RegatherOptions) -> dict[str, int]:
    regathered = held = 0
    wholes = gathered(program, Phase.FORWARD) | _coming(program)
    reuse = _Reuse(program, wholes)
    close = largest_layer(program) // 100 if options.reuse_bytes is None else options.reuse_bytes
    for name, whole in wholes.items():
        chain = _forward_chain(whole)
        late = sorted({user for link in chain for user in _backward_users(link)})
        if not late:
            continue
        if name in options.keep or (options.turn and reuse.distance(name) <= close):
            held += 1
            continue
        spec = program.params[name]
        shard = program.input_nodes(InputRole.PARAMETER)[name]
        reaches = [link for link in chain[1:] if any(_backward_users(late_link) for late_link in _reach(link, chain))]
        for readers in reuse.visits(name, late, close):
            with program.graph.inserting_before(readers[0]):
                copies = {whole: _gather(program, shard, spec, Phase.BACKWARD, like=readers[0])}
                for link in reaches:
                    copies[link] = program.repeat(link, copies, "regather")
            for user in readers:
                for link, copied in copies.items():
                    user.replace_input_with(link, copied)
            regathered += 1
    return {"regathered": regathered, "held": held}


class _Reuse:
    """How much else is used between a weight's last use in the forward and its first in the backward."""

    def __init__(self, program: Program, wholes: dict[str, fx.Node]) -> None:
        at = {node: i for i, node in enumerate(program.graph.nodes)}
        self._sizes = {
            name: program.params[name].numel * program.params[name].compute_dtype.itemsize for name in wholes
        }
        self._at = at
        self._readers = {name: self._positions(whole, at) for name, whole in wholes.items()}
        reads = sorted((r, n) for n, (f, b) in self._readers.items() for r in (*f, *b))
        self._order, self._names = [r for r, _ in reads], [n for _, n in reads]

    @staticmethod
    def _positions(whole: fx.Node, at: dict[fx.Node, int]) -> tuple[list[int], list[int]]:
        """Where the forward and the backward read a weight, also through views of either."""
        links = dict.fromkeys(_forward_chain(whole))
        stack = list(links)
        while stack:
            views = [u for u in stack.pop().users if is_view(u) and u not in links]
            links |= dict.fromkeys(views)
            stack += views
        users = {u for link in links for u in link.users if u.op != "output" and not is_view(u)}
        forward = sorted(at[u] for u in users if info(u).phase is Phase.FORWARD)
        return forward, sorted(at[u] for u in users if info(u).phase is Phase.BACKWARD)

    def visits(self, name: str, late: list[fx.Node], close: int) -> list[list[fx.Node]]:
        """The readers of a weight in the backward, parted where more bytes of others than `close` are read between two: a
        layer that is computed again long before its own backward gathers its weights twice."""
        found = [[late[0]]]
        for earlier, later in itertools.pairwise(late):
            if self._between(name, self._at[earlier], self._at[later] + 1) > close:
                found.append([])
            found[-1].append(later)
        return found

    def distance(self, name: str) -> int:
        """Bytes of the other weights that are read in between."""
        forward, backward = self._readers[name]
        if not forward or not backward:
            return sum(self._sizes.values())
        return self._between(name, forward[-1], backward[0])

    def _between(self, name: str, low: int, high: int) -> int:
        """Bytes of the other weights that are read after position `low` and before `high`."""
        reads = self._names[bisect.bisect_right(self._order, low) : bisect.bisect_left(self._order, high)]
        return sum(self._sizes[n] for n in {*reads} - {name})


@graph_pass(
    "keep_gathered",
    "what the first forward of a step gathers is kept until the weights change",
    options=KeepOptions,
    requires=("sharded",),
    provides=("kept",),
    conflicts=("regathered",),
)
def keep_gathered(program: Program, options: KeepOptions) -> dict[str, int]:
    items = list(program.output_items())
    kept = gathered(program, Phase.FORWARD)
    shards = program.input_nodes(InputRole.PARAMETER)
    for name, whole in kept.items():
        if not options.gathered_before:
            items.append((Port(OutputRole.KEPT, name), whole))
            continue
        record = NodeInfo(phase=Phase.FORWARD, param=name, made_by="keep_gathered")
        held = program.add_input(Port(InputRole.KEPT, name), tensor(whole), record, name=whole.name)
        whole.replace_all_uses_with(held)
        node = whole
        while node is not shards[name]:
            source = node.all_input_nodes[0]
            program.graph.erase_node(node)
            node = source
        if not shards[name].users:
            program.remove_input(shards[name])
    program.set_outputs(items)
    return {"taken" if options.gathered_before else "kept": len(kept)}


@graph_pass(
    "reduce_gradients",
    "gradients are averaged over the data-parallel ranks as soon as they are made",
    options=ReduceOptions,
    requires=("sharded",),
    conflicts=("reduced",),
    provides=("reduced",),
    level=Level.DISTRIBUTED,
)
def reduce_gradients(program: Program, options: ReduceOptions) -> dict[str, int]:
    items: list[tuple[Port, fx.Node]] = []
    pending: list[fx.Node] = []  # waits of the reduction in flight, to stand before the next one starts
    scattered = reduced = 0
    grads = {
        p.name: n for p, n in program.output_items() if p.role is OutputRole.GRADIENT and p.of is InputRole.PARAMETER
    }
    final: dict[str, fx.Node] = {}
    built: dict[fx.Node | None, fx.Node] = {}  # what stands behind a gradient already: parameters may share one
    for name, grad in sorted(grads.items(), key=lambda item: item[1]):
        spec = program.params[name]
        at = None if grad.op == "placeholder" else grad
        with program.graph.inserting_after(built.get(at, at or program.placeholders()[-1])):
            anchor = program.graph.call_function(torch.ops.aten.sym_size.int, ())  # where to build, removed below
        with program.graph.inserting_before(anchor):
            record = NodeInfo(
                phase=Phase.BACKWARD,
                module=info(grad).module,
                source=info(grad).source,
                param=name,
                made_by="reduce_gradients",
            )
            node = grad
            if options.accumulated:
                node = _accumulate(program, node, spec, record)
            starts: list[fx.Node] = []
            if options.reduce:
                node, starts, scatter = _reduce(program, node, spec, record)
                scattered += scatter
                reduced += len(starts) - scatter
            node = _leave(program, node, spec, record)
            if starts and pending:
                for wait in pending:
                    starts[0].prepend(wait)
            if options.reduce:
                pending = _movable(node) if len(starts) == 1 else []
            if node is not grad:
                built[at] = starts[0] if options.reduce and pending else node
        program.graph.erase_node(anchor)
        final[name] = node
    output = program.output_node()
    for wait in pending:
        output.prepend(wait)
    for port, node in program.output_items():
        items.append(
            (port, final[port.name]) if port.role is OutputRole.GRADIENT and port.name in final else (port, node)
        )
    program.set_outputs(items)
    if not options.reduce:
        program.facts.add("partial")
    return {"reduce_scatters": scattered, "all_reduces": reduced}


def gathered(program: Program, phase: Phase) -> dict[str, fx.Node]:
    """The whole value of each parameter that this phase gathers, by name: the last node of its gather."""
    found: dict[str, fx.Node] = {}
    for node in program.nodes:
        if (
            node.op == "call_function"
            and collectives.is_start(node)
            and info(node).role is Role.GATHER
            and info(node).phase is phase
        ):
            last = node
            while (
                following := next((u for u in last.users if info(u).role in (Role.WAIT, Role.LAYOUT)), None)
            ) is not None:
                last = following
            found[str(info(node).param)] = last
    return found


def _coming(program: Program) -> dict[str, fx.Node]:
    """Likewise for whole parameters that lie elsewhere: what the forward reads of one that is fetched for it."""
    found = {}
    for name, node in program.input_nodes(InputRole.PARAMETER).items():
        spec = program.params[name]
        if spec.home is not None and spec.shard_dim is None and node.users:
            cast = next((u for u in node.users if info(u).role is Role.LAYOUT), node)
            found[name] = cast
    return found


# -- building -------------------------------------------------------------------------------------------------------
def _slug(name: str) -> str:
    return re.sub(r"\W+", "_", name)


def _order(spec: ParamSpec) -> list[int]:
    """The dimensions in the order in which they lie in memory (channels-last weights differ from 0, 1, 2, …)."""
    inner = sorted(range(1, len(spec.shape)), key=lambda d: (-spec.stride[d], d))
    return [0, *inner] if spec.shape else []


def _inverse(order: list[int]) -> list[int]:
    return [order.index(d) for d in range(len(order))]


def _physical(shape: tuple[int, ...], spec: ParamSpec) -> list[int]:
    return [shape[d] for d in _order(spec)]


def _gather(program: Program, shard: fx.Node, spec: ParamSpec, phase: Phase, like: fx.Node) -> fx.Node:
    """(cast ->) all_gather -> wait (-> slice) (-> permute): the whole parameter. `like` is its first user."""
    base = _record(spec, phase, like)
    layout = base.but(role=Role.LAYOUT)
    slug = _slug(spec.name) + ("" if phase is Phase.FORWARD else "_again")
    order = _order(spec)
    node = _cast(program, shard, spec.compute_dtype, layout, f"cast_{slug}")
    if spec.shard_dim is None:
        return node  # (it comes whole)
    dim, ranks = spec.shard_dim, program.mesh[spec.shard_dim]
    if order != sorted(order):
        node = program.call(aten.permute.default, (node, order), layout, name=f"packed_{slug}")
    start = program.call(
        collectives.ALL_GATHER,
        (node, ranks, dim),
        base.but(role=Role.GATHER, mesh_dim=dim, stream=f"comm:{dim}"),
        name=f"gather_{slug}",
    )
    node = program.call(collectives.WAIT, (start,), base.but(role=Role.WAIT, mesh_dim=dim), name=f"whole_{slug}")
    if spec.rows * ranks != spec.shape[0]:
        node = program.call(aten.slice.Tensor, (node, 0, 0, spec.shape[0]), layout, name=f"cut_{slug}")
    if order != sorted(order):
        node = program.call(aten.permute.default, (node, _inverse(order)), layout, name=f"unpacked_{slug}")
    return node


def _record(spec: ParamSpec, phase: Phase, like: fx.Node) -> NodeInfo:
    module, source = info(like).module, info(like).source
    return NodeInfo(phase, module=module, source=source, param=spec.name, made_by="shard_parameters")


def _cast(program: Program, node: fx.Node, dtype: torch.dtype, record: NodeInfo, name: str) -> fx.Node:
    if tensor(node).dtype is dtype:
        return node
    return program.call(torch.ops.prims.convert_element_type.default, (node, dtype), record, name=name)


def _accumulate(program: Program, grad: fx.Node, spec: ParamSpec, record: NodeInfo) -> fx.Node:
    """held (* loss scale) + grad, in the dtype that gradients are kept in. What is held was divided by the scale."""
    slug = _slug(spec.name)
    with program.fake_mode:
        fake = torch.empty_strided(spec.shape, tensor(grad).stride(), dtype=spec.grad_dtype, device=tensor(grad).device)
    mine = record.but(role=Role.ACCUMULATE)
    node = program.add_input(Port(InputRole.ACCUMULATOR, spec.name), fake, mine, name=f"accumulated_{slug}")
    scale = program.input_nodes(InputRole.SCALE).get("loss_scale")
    if scale is not None:
        node = program.call(aten.mul.Tensor, (node, scale), mine, name=f"rescaled_{slug}")
    wide = _cast(program, grad, spec.grad_dtype, mine, f"wide_{slug}")
    return program.call(aten.add.Tensor, (node, wide), mine, name=f"sum_{slug}")


def _leave(program: Program, node: fx.Node, spec: ParamSpec, record: NodeInfo) -> fx.Node:
    """(cast ->) (/ loss scale): a gradient as it leaves the program."""
    layout, slug = record.but(role=Role.LAYOUT), _slug(spec.name)
    node = _cast(program, node, spec.grad_dtype, layout, f"kept_grad_{slug}")
    scale = program.input_nodes(InputRole.SCALE).get("loss_scale")
    if scale is not None:
        node = program.call(aten.div.Tensor, (node, scale), layout, name=f"unscaled_grad_{slug}")
    return node


def _reduce(program: Program, grad: fx.Node, spec: ParamSpec, record: NodeInfo) -> tuple[fx.Node, list[fx.Node], int]:
    """(the reduced gradient, the starts of its collectives, 1 if it is scattered)."""
    slug = _slug(spec.name)
    layout = record.but(role=Role.LAYOUT)
    order = _order(spec)
    node = grad
    starts: list[fx.Node] = []
    dims = [d for d in DATA_DIMS if program.mesh.get(d, 1) > 1]
    if not dims:
        return node, starts, 0
    node = _cast(program, node, spec.reduce_dtype, layout, f"cast_grad_{slug}")
    if order != sorted(order):
        node = program.call(aten.permute.default, (node, order), layout, name=f"packed_grad_{slug}")
    if not tensor(node).is_contiguous():
        node = program.call(
            aten.clone.default,
            (node,),
            layout,
            kwargs={"memory_format": torch.contiguous_format},
            name=f"dense_grad_{slug}",
        )
    scatter = 0
    for dim in dims:
        ranks = program.mesh[dim]
        here = record.but(role=Role.REDUCE, mesh_dim=dim, stream=f"comm:{dim}")
        if dim == spec.shard_dim:
            missing = spec.rows * ranks - spec.shape[0]
            if missing:
                pad = [0, 0] * (len(spec.shape) - 1) + [0, missing]
                node = program.call(aten.constant_pad_nd.default, (node, pad), layout, name=f"padded_grad_{slug}")
            node = program.call(
                collectives.REDUCE_SCATTER, (node, "avg", ranks, dim), here, name=f"scatter_grad_{slug}"
            )
            scatter = 1
        else:
            node = program.call(collectives.ALL_REDUCE, (node, "avg", dim), here, name=f"reduce_grad_{slug}")
        starts.append(node)
        node = program.call(collectives.WAIT, (node,), record.but(role=Role.WAIT, mesh_dim=dim), name=f"grad_{slug}")
    if order != sorted(order):
        node = program.call(aten.permute.default, (node, _inverse(order)), layout, name=f"unpacked_grad_{slug}")
    return node, starts, scatter


def _movable(last: fx.Node) -> list[fx.Node]:
    """The wait of a reduction and the layout nodes after it, in order."""
    found = [last]
    while not collectives.is_wait(found[0]):
        found.insert(0, found[0].all_input_nodes[0])
    return found


# -- what of the forward hangs on a gathered parameter ---------------------------------------------------------------
_CASTS = {aten._to_copy.default, torch.ops.prims.convert_element_type.default}


def _forward_chain(whole: fx.Node) -> list[fx.Node]:
    """The gathered value and the forward's views and casts of it: cheap to make again, and as large to keep."""
    chain = [whole]
    for link in chain:
        for user in sorted(link.users):
            only = all(a is link for a in user.all_input_nodes)
            if (
                info(user).phase is Phase.FORWARD
                and only
                and (is_view(user) or user.target in _CASTS)
                and user not in chain
            ):
                chain.append(user)
    return sorted(chain)


def _backward_users(link: fx.Node) -> list[fx.Node]:
    """The backward's readers of a value; what the model returns is the forward's."""
    return [user for user in link.users if user.op != "output" and info(user).phase is Phase.BACKWARD]


def _reach(link: fx.Node, chain: list[fx.Node]) -> list[fx.Node]:
    """`link` and those of the chain that are made from it."""
    found = [link]
    for other in chain:
        if any(a in found for a in other.all_input_nodes) and other not in found:
            found.append(other)
    return found
