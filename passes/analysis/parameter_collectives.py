"""A program's transfers of parameters and gradients: for each, one start with its wait, and the layout nodes around
both.

    gather:     shard -> (cast, pack ->) start -> wait (-> cut, unpack) -> first use … last use
    reduction:  gradient -> (cast, pack, pad ->) start -> wait (-> unpack, cast, unscale) -> the program's output

Over two mesh dimensions a gradient is reduced twice: then the second transfer's operand is the first one's wait.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from zgraph.passes.analysis.costs import size_of
from zgraph.program import collectives
from zgraph.program.aliases import aliases_of, is_view
from zgraph.program.node import Role, info
from zgraph.program.program import Program


@dataclass(eq=False)
class ParameterCollective:
    """One collective that gathers a parameter or reduces a gradient."""

    start: fx.Node  # the node that starts the collective
    wait: fx.Node  # the node that waits for it
    # the layout nodes that serve it alone before the start, in order
    before: list[fx.Node] = field(default_factory=list)
    after: list[fx.Node] = field(default_factory=list)  # those after the wait, in order
    source: fx.Node | None = None  # the node that it can't start before, None if it reads nothing but inputs
    # the bytes that it holds: of a gather the whole parameter, from its start to its last use; of a gradient that is
    # scattered, or leaves the device, the whole gradient, until its wait; of any other gradient none
    bytes: int = 0

    @property
    def name(self) -> str:
        return str(info(self.start).param)

    @property
    def nodes(self) -> list[fx.Node]:
        return [*self.before, self.start, self.wait, *self.after]

    @property
    def operand(self) -> fx.Node:
        """The value that the first of these nodes reads."""
        return (self.before or [self.start])[0].all_input_nodes[0]

    @property
    def last(self) -> fx.Node:
        """The value that the rest of the program reads."""
        return self.after[-1] if self.after else self.wait

    def readers(self) -> list[fx.Node]:
        """Return the nodes that read a gathered parameter, also through views, in graph order. The views themselves are
        left out.
        """
        users = {u for alias in aliases_of(self.last) for u in alias.users if not is_view(u)}
        return sorted(users)


def gathers_of(program: Program) -> list[ParameterCollective]:
    """Return the gathers of parameters, in the order of their starts."""
    return _transfers(program, Role.GATHER)


def reductions_of(program: Program) -> list[ParameterCollective]:
    """Return the reductions of gradients, in the order of their starts."""
    return _transfers(program, Role.REDUCE)


def _transfers(program: Program, role: Role) -> list[ParameterCollective]:
    layout: dict[str, list[fx.Node]] = {}
    starts = []
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        record = info(node)
        if record.role is Role.LAYOUT and record.transfer is not None:
            layout.setdefault(record.transfer, []).append(node)
        if record.role is role and collectives.is_start(node):
            starts.append(node)
    return [_transfer(program, start, layout.get(str(info(start).transfer), [])) for start in starts]


def _transfer(program: Program, start: fx.Node, layout: list[fx.Node]) -> ParameterCollective:
    wait = collectives.wait_of(start)
    assert wait is not None, f"{start.name} has no wait in its program"
    # Layout nodes count as long as they are directly connected: a user pass's node in between, and all beyond it, are no part.
    before: list[fx.Node] = []
    for node in reversed([n for n in layout if n < start]):
        if (before or [start])[0].all_input_nodes[0] is not node:
            break
        before.insert(0, node)
    after: list[fx.Node] = []
    for node in [n for n in layout if n > start]:
        if node.all_input_nodes[0] is not (after or [wait])[-1]:
            break
        after.append(node)
    gathers = info(start).role is Role.GATHER
    live_bytes = max(map(size_of, [wait, *after])) if gathers else size_of(start.all_input_nodes[0])
    spec = program.params.get(str(info(start).param))
    if collectives.kind(start) == "all_reduce" and (spec is None or spec.grad_home is None):
        live_bytes = 0  # (the reduced gradient stays on the device)
    transfer = ParameterCollective(start, wait, before, after, None, live_bytes)
    transfer.source = None if transfer.operand.op == "placeholder" else transfer.operand
    return transfer


def layers_of(program: Program) -> dict[str, str]:
    """Return the layer of each sharded parameter by its name. The parameters of a layer are gathered and released
    together.

    It is the shallowest numbered module ("blocks.3" of "blocks.3.mlp.up.weight") that holds at most half of all bytes;
    else, as for an embedding, the module that owns the parameter.
    """
    specs = [s for s in program.params.values() if s.shard_dim is not None]
    total = sum(s.nbytes for s in specs)
    module_bytes: dict[str, int] = {}
    for spec in specs:
        parts = spec.name.split(".")
        for depth in range(1, len(parts)):
            prefix = ".".join(parts[:depth])
            module_bytes[prefix] = module_bytes.get(prefix, 0) + spec.nbytes
    layers = {}
    for spec in specs:
        parts = spec.name.split(".")
        prefixes = (".".join(parts[:d]) for d in range(1, len(parts)) if parts[d - 1].isdigit())
        layers[spec.name] = next((p for p in prefixes if 2 * module_bytes[p] <= total), ".".join(parts[:-1]))
    return layers


def largest_layer(program: Program) -> int:
    """Return the bytes, in the dtypes that programs compute with, of the largest layer; 0 if nothing is sharded."""
    sizes: dict[str, int] = {}
    for name, layer in layers_of(program).items():
        spec = program.params[name]
        sizes[layer] = sizes.get(layer, 0) + spec.numel * spec.compute_dtype.itemsize
    return max(sizes.values(), default=0)
