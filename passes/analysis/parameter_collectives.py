"""A program's transfers as passes that move them see them: one start with its wait, and the layout nodes around both.

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
class Transfer:
    """One collective that gathers a parameter or reduces a gradient.

    `before` and `after` are the layout nodes that serve it alone, in order. `source` is what it can't start before
    (None: nothing but inputs). `bytes` are those that it holds: of a gather the whole parameter, from its start to its
    last use; of a gradient that is scattered, or leaves the device, the whole one, until its wait; of another none.
    """

    start: fx.Node
    wait: fx.Node
    before: list[fx.Node] = field(default_factory=list)
    after: list[fx.Node] = field(default_factory=list)
    source: fx.Node | None = None
    bytes: int = 0

    @property
    def name(self) -> str:
        return str(info(self.start).param)

    @property
    def nodes(self) -> list[fx.Node]:
        return [*self.before, self.start, self.wait, *self.after]

    @property
    def operand(self) -> fx.Node:
        """What the first of these nodes reads."""
        return (self.before or [self.start])[0].all_input_nodes[0]

    @property
    def last(self) -> fx.Node:
        """What the rest of the program reads."""
        return self.after[-1] if self.after else self.wait

    def readers(self) -> list[fx.Node]:
        """Who reads a gathered parameter, also through views; in graph order. The views themselves are not among them."""
        found = {u for alias in aliases_of(self.last) for u in alias.users if not is_view(u)}
        return sorted(found)


def gathers_of(program: Program) -> list[Transfer]:
    """The gathers of parameters, in the order of their starts."""
    return _transfers(program, Role.GATHER)


def reductions_of(program: Program) -> list[Transfer]:
    """The reductions of gradients, in the order of their starts."""
    return _transfers(program, Role.REDUCE)


def _transfers(program: Program, role: Role) -> list[Transfer]:
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


def _transfer(program: Program, start: fx.Node, layout: list[fx.Node]) -> Transfer:
    wait = collectives.wait_of(start)
    assert wait is not None, f"{start.name} has no wait in its program"
    # As far as nothing else stands between: what a user's pass puts there is no part of the transfer, nor is what comes behind it.
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
    held = max(map(size_of, [wait, *after])) if gathers else size_of(start.all_input_nodes[0])
    spec = program.params.get(str(info(start).param))
    if collectives.kind(start) == "all_reduce" and (spec is None or spec.grad_home is None):
        held = 0  # (what comes out stays)
    found = Transfer(start, wait, before, after, None, held)
    found.source = None if found.operand.op == "placeholder" else found.operand
    return found


def layers_of(program: Program) -> dict[str, str]:
    """The layer of each sharded parameter by its name: what is gathered and let go together.

    It is the shallowest numbered module ("blocks.3" of "blocks.3.mlp.up.weight") that holds at most half of all bytes;
    else, as for an embedding, the module that owns the parameter.
    """
    specs = [s for s in program.params.values() if s.shard_dim is not None]
    total = sum(s.nbytes for s in specs)
    held: dict[str, int] = {}
    for spec in specs:
        parts = spec.name.split(".")
        for depth in range(1, len(parts)):
            prefix = ".".join(parts[:depth])
            held[prefix] = held.get(prefix, 0) + spec.nbytes
    found = {}
    for spec in specs:
        parts = spec.name.split(".")
        prefixes = (".".join(parts[:d]) for d in range(1, len(parts)) if parts[d - 1].isdigit())
        found[spec.name] = next((p for p in prefixes if 2 * held[p] <= total), ".".join(parts[:-1]))
    return found


def largest_layer(program: Program) -> int:
    """Bytes, in the dtypes that programs compute with, of the layer that has most; 0 if nothing is sharded."""
    sizes: dict[str, int] = {}
    for name, layer in layers_of(program).items():
        spec = program.params[name]
        sizes[layer] = sizes.get(layer, 0) + spec.numel * spec.compute_dtype.itemsize
    return max(sizes.values(), default=0)
