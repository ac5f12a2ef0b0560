"""Explain a node, a parameter, a pass, the peak of memory, or what the passes missed.

The answer is a list of statements: what is the case, why, what it costs, and what would change it. All of it is read
from the programs after each pass, the simulated step and the passes' remarks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import fx

from zgraph.errors import TargetError
from zgraph.inspection.diff import Difference, compare
from zgraph.inspection.inspection import Inspection, PassTrace
from zgraph.inspection.memory import HELD, peak_of
from zgraph.inspection.stalls import exposed_by_transfer, transfer_of
from zgraph.names import did_you_mean
from zgraph.passes.analysis.costs import most_bytes
from zgraph.passes.analysis.simulator import Forecast
from zgraph.passes.analysis.timeline import Span
from zgraph.program import collectives, transfers_to_host
from zgraph.program.aliases import aliased_input
from zgraph.program.node import Phase, Role, has_info, info, value
from zgraph.program.printer import line, type_text
from zgraph.program.program import Division, InputRole, OutputRole, ParamSpec
from zgraph.units import milliseconds, shown_bytes

PEAK, MISSED = "peak", "missed"
KINDS = ("parameter", "pass", "node")

# What makes each category of memory smaller.
_SMALLER = {
    "activations": 'recompute="full", a memory_budget (which recomputes and offloads as much as it takes), or a smaller batch',
    "gathered": "prefetch.max_bytes, or zero=3 instead of 1 or 2, which keep weights gathered",
    "parameters": "zero=3 over more ranks, or offload.parameters",
    "gradients": "zero=2 or 3, or fewer bytes in precision.accumulate",
    "temporaries": "a smaller batch, or more micro_batches",
    "fetched": "a smaller offload.staging_bytes",
    HELD: "zero=1 or more, offload.optimizer, or an optimizer with smaller states (AdamW8bit)",
}


@dataclass(frozen=True)
class Statement:
    """One fact and, as far as they are known, its reason, its cost and a remedy."""

    what: str  # the fact
    why: str = ""  # the reason; "" if unknown
    cost: str = ""  # what it costs in time or bytes; "" if nothing
    remedy: str = ""  # what would change it; "" if nothing

    def __str__(self) -> str:
        parts = (("why", self.why), ("cost", self.cost), ("to do", self.remedy))
        return "\n".join([self.what, *(f"    {label}: {text}" for label, text in parts if text)])


@dataclass(frozen=True)
class Explanation:
    """The statements about one subject."""

    subject: str  # the name that was asked for
    kind: str  # "node", "parameter", "pass", "peak" or "missed"
    statements: tuple[Statement, ...]  # what there is to say of it

    def __str__(self) -> str:
        head = self.subject if self.subject == self.kind else f"{self.kind} {self.subject}"
        return "\n".join([head, *(f"  {text}" for s in self.statements for text in str(s).splitlines())])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def explain(inspection: Inspection, what: str) -> Explanation:
    """Explain `what`: "peak", "missed", or the name of a parameter, a pass or a node (of the finished programs, or of
    an earlier one). Where several have the name, "parameter:NAME", "pass:NAME" or "node:NAME" chooses one.

    Raises `TargetError` with the nearest names for anything else.
    """
    if what == PEAK:
        return Explanation(PEAK, PEAK, tuple(_peak(inspection)))
    if what == MISSED:
        return Explanation(MISSED, MISSED, tuple(_missed(inspection)))
    kind, colon, name = what.partition(":")
    kinds = (kind,) if colon and kind in KINDS else KINDS
    name = name if colon and kind in KINDS else what
    ways = inspection.step_ways()
    if "parameter" in kinds and name in ways[0].last.program.params:
        return Explanation(name, "parameter", tuple(_parameter(inspection, name)))
    for way in ways if "pass" in kinds else ():
        if any(s.name == name for s in way.snapshots):
            return Explanation(name, "pass", tuple(_pass(way, name)))
    for way in ways if "node" in kinds else ():
        if any(row["name"] == name for s in reversed(way.snapshots) for row in s.data["nodes"]):
            return Explanation(name, "node", tuple(_node(inspection, way, name)))
    known = [PEAK, MISSED, *ways[0].last.program.params]
    known += [s.name for way in ways for s in way.snapshots]
    known += [n.name for way in ways for n in way.last.program.graph.nodes]
    hint = did_you_mean(name, known)
    if not hint.startswith("did"):
        hint = "'peak', 'missed', or the name of a parameter, a pass or a node"
    raise TargetError(f"there is nothing called {what!r}", where=inspection.origin, hint=hint)


# -- the peak, and what was missed ----------------------------------------------------------------------------------------
def _peak(inspection: Inspection) -> Iterator[Statement]:
    peak = peak_of(inspection)
    yield Statement(
        f"{shown_bytes(peak.bytes)} at {peak.node} of {peak.program}, {milliseconds(peak.seconds)} after its start",
        why="of all positions of the step the one with most bytes alive",
    )
    for category, size in peak.categories.items():
        mine = [h for h in peak.holders if h.category == category][:3]
        named = ", ".join(f"{h.node} {shown_bytes(h.bytes)} ({h.module})" for h in mine)
        share = f"{size / max(peak.bytes, 1):.1%} of the peak"
        yield Statement(f"{category}: {shown_bytes(size)}", named, share, _SMALLER.get(category, ""))


def _missed(inspection: Inspection) -> Iterator[Statement]:
    remarks = inspection.remarks()
    yield from map(_missed_one, remarks)
    if not remarks:
        yield Statement("nothing was missed", why="no pass left a remark of something that costs time")


def _missed_one(remark: dict[str, Any]) -> Statement:
    cost = f"{milliseconds(remark['seconds'])} a step"
    return Statement(f"{remark['made_by']}: {remark['what']}", remark["why"], cost, remark["remedy"])


# -- a pass ---------------------------------------------------------------------------------------------------------------
def _pass(way: PassTrace, name: str) -> Iterator[Statement]:
    snapshot, before = way.after(name), way.before(name)
    facts = snapshot.facts
    options = ", ".join(f"{k}={v!r}" for k, v in facts["options"].items() if v is not None)
    yield Statement(
        f"{snapshot.summary} (of {way.name})", why=f"its options: {options}" if options else "it has no options"
    )
    if before is None:
        yield Statement(f"{facts['nodes']} nodes were captured")
        return
    if facts["requires"]:
        givers = [f"{fact} (by {_giver(way, fact)})" for fact in facts["requires"]]
        yield Statement(f"it stands here because it requires {', '.join(givers)}")
    changed = compare(before, snapshot)
    a, b = changed.figures
    counts = ", ".join(f"{len(getattr(changed, key))} {key}" for key in ("added", "removed", "moved", "changed"))
    cost = f"step {(b.seconds - a.seconds) * 1e3:+.3f} ms, exposed {(b.exposed - a.exposed) * 1e3:+.3f} ms"
    size = b.peak - a.peak
    cost += f", peak {'-' if size < 0 else '+'}{shown_bytes(abs(size))}; {facts['seconds']:.3f} s to run"
    bits = "" if facts["bitwise"] else "it may change the last bits of results"
    yield Statement(
        f"it changed the program: nodes {counts}" if not changed.empty else "it changed nothing", bits, cost
    )
    for what, operator, count, total in changed.by_operator()[:10]:
        yield Statement(f"  {what} {count} {operator}, {shown_bytes(total)}")
    stats = ", ".join(f"{count} {what}" for what, count in facts["stats"].items())
    if stats:
        yield Statement(f"it counts {stats}")
    yield from (_missed_one(remark) for remark in way.remarks if remark["made_by"] == name)


def _giver(way: PassTrace, fact: str) -> str:
    return next((s.name for s in way.snapshots if fact in s.facts["provides"]), "the capture")


# -- a node ---------------------------------------------------------------------------------------------------------------
def _node(inspection: Inspection, way: PassTrace, name: str) -> Iterator[Statement]:
    alive = {n.name: n for n in way.last.program.graph.nodes}
    node = alive.get(name) or _last_seen(way, name)
    if has_info(node):
        yield Statement(line(node).strip(), why=_purpose(way, node))
    yield from _made(way, node)
    for one, two in zip(way.snapshots, way.snapshots[1:], strict=False):
        yield from _touched(compare(one, two, simulate=False), name, two.summary)
    if name not in alive:
        return
    forecast = dict((w.name, f) for w, f in inspection.forecasts()).get(way.name)
    if forecast is not None:
        yield from _taken(forecast, node)
        yield from _kept(inspection, way, node)
    yield from (_missed_one(remark) for remark in way.remarks if remark["node"] == name)


def _last_seen(way: PassTrace, name: str) -> fx.Node:
    for snapshot in reversed(way.snapshots):
        for node in snapshot.program.graph.nodes:
            if node.name == name:
                return node
    raise KeyError(name)


def _purpose(way: PassTrace, node: fx.Node) -> str:
    record = info(node)
    where = f"module {record.module or '(root)'}{f', {record.source}' if record.source else ''}"
    if record.role is Role.COMPUTE:
        return f"{record.phase.value} of {where}"
    of = f" of {record.param}" if record.param else ""
    return f"{record.role.value}{of}, for the {record.phase.value} of {where}"


def _made(way: PassTrace, node: fx.Node) -> Iterator[Statement]:
    """Yield which pass inserted a node, and why, if it repeats another node."""
    if not has_info(node):
        return
    record = info(node)
    maker = next((s for s in way.snapshots if s.name == record.made_by), None)
    if record.made_by == "capture":
        yield Statement("it is the model's own: the capture has it")
    elif maker is not None:
        yield Statement(f"pass {record.made_by} made it", why=maker.summary)
    else:
        yield Statement(f"{record.made_by} made it")
    if not record.copy_of:
        return
    if aliased_input(node) is not None:
        yield Statement(
            f"it is {record.copy_of} again, for the backward", why="a view of a value that is there costs nothing"
        )
    elif maker is not None and maker.name == "regather":
        yield Statement(
            f"it does {record.copy_of} again, for the backward",
            why="the whole weight is let go behind the forward",
            remedy="a memory_budget with room keeps it",
        )
    else:
        yield Statement(
            f"it computes {record.copy_of} again, for the backward",
            why=f"{record.copy_of} is then not kept from the forward to the backward: {shown_bytes(most_bytes(node))} less",
            remedy='recompute="none" keeps it',
        )


def _touched(changed: Difference, name: str, summary: str) -> Iterator[Statement]:
    told = {
        "added": "came with pass",
        "removed": "was taken out by pass",
        "moved": "was moved by pass",
        "changed": "got other operands or another type from pass",
    }
    for key, words in told.items():
        if any(row.name == name for row in getattr(changed, key)):
            yield Statement(f"it {words} {changed.after}", why=summary)


def _taken(forecast: Forecast, node: fx.Node) -> Iterator[Statement]:
    spans = [s for s in forecast.spans if s.node == node.name]
    for span in spans:
        share = f"{milliseconds(span.seconds)}, {span.seconds / forecast.seconds:.2%} of the program's time"
        yield Statement(f"it occupies {span.lane} from {milliseconds(span.start)} on", cost=share)
    stalls = [s for s in forecast.stalls if s.node == node.name]
    for stall in stalls:
        yield Statement(
            f"{'computing' if stall.lane == 'compute' else 'the host'} waits here for a {stall.role.value}",
            why="what it waits for is not done yet when it is needed",
            cost=f"{milliseconds(stall.seconds)} exposed",
            remedy="`zgraph explain TARGET missed` says what stood in the way",
        )
    if collectives.is_start(node) and not spans:
        yield Statement(
            "it goes with its bucket's first", why=f"bucket {info(node).bucket}: one transfer for all of it"
        )


def _kept(inspection: Inspection, way: PassTrace, node: fx.Node) -> Iterator[Statement]:
    life = next((one for one in inspection.lives(way) if one.node is node), None)
    if life is None or not life.bytes:
        return
    nodes = way.last.program.nodes
    until = nodes[life.gone - 1].name if life.gone <= len(nodes) else "the end of the program"
    readers = ", ".join(u.name for u in list(node.users)[:4])
    yield Statement(
        f"its {shown_bytes(life.bytes)} of {life.category} are held from {nodes[life.born].name} to {until}",
        why=f"read by {readers}" if readers else "nothing reads it",
    )


# -- a parameter ----------------------------------------------------------------------------------------------------------
def _parameter(inspection: Inspection, name: str) -> Iterator[Statement]:
    way = inspection.step_ways()[0]
    program, plan = way.last.program, inspection.plan
    spec = program.params[name]
    if spec.division is not None:
        yield _divided(inspection, spec, spec.division)
    yield _layout(inspection, spec)
    if spec.compute is not None or spec.accumulate is not None:
        yield Statement(
            f"held as {_dtype(spec.dtype)}, computed with as {_dtype(spec.compute_dtype)}, "
            f"its gradient reduced as {_dtype(spec.reduce_dtype)} and kept as {_dtype(spec.grad_dtype)}",
            why=f"precision = {plan.precision!r}",
        )
    if spec.home is not None:
        yield Statement(f"it lies in {spec.home}", why="offload.parameters", remedy='offload={"parameters": "none"}')
    elif spec.grad_home is not None:
        said = f"its gradient goes to {spec.grad_home} as it is reduced, and is updated with there"
        yield Statement(said, why="offload.optimizer", remedy='offload={"update_on": "device"}')
    yield from _transfers(inspection, way, name)
    update = inspection.update
    if update is not None:
        yield from _updated(inspection, update, name)
    whole = re.compile(rf"(?<![\w.]){re.escape(name)}(?![\w.])")
    yield from (_missed_one(remark) for remark in inspection.remarks() if whole.search(str(remark["what"])))


def _divided(inspection: Inspection, spec: ParamSpec, division: Division) -> Statement:
    table = inspection.plan.tensor_parallel
    blocks = f", in each of its {division.blocks} equal blocks" if division.blocks > 1 else ""
    return Statement(
        f"{_dtype(spec.dtype)}{list(spec.whole_shape)} is divided along dimension {division.dim}{blocks} "
        f"among the {division.ranks} ranks of {division.mesh_dim!r}",
        why=f"tensor_parallel = {table!r}" if isinstance(table, str) else "a pattern of tensor_parallel",
        cost=f"{shown_bytes(spec.nbytes)} of {shown_bytes(spec.whole_nbytes)} on each, before it is sharded",
        remedy=f'tensor_parallel={{"{spec.name.rpartition(".")[0]}": "replicate", …}} leaves it whole',
    )


def _layout(inspection: Inspection, spec: ParamSpec) -> Statement:
    plan, mesh = inspection.plan, inspection.way().last.program.mesh
    shown = f"{'its part, ' if spec.division else ''}{_dtype(spec.dtype)}{list(spec.shape)}"
    if spec.shard_dim is not None:
        ranks = mesh[spec.shard_dim]
        padded = spec.rows * ranks - spec.shape[0]
        return Statement(
            f"{shown} is sharded on dimension 0 over {ranks} ranks of {spec.shard_dim!r}, {spec.rows} rows each",
            why=f"zero = {plan.zero}",
            cost=f"{shown_bytes(spec.nbytes / spec.shape[0] * spec.rows)} of {shown_bytes(spec.nbytes)} on each rank"
            + (f"; {padded} rows are padding" if padded else ""),
            remedy="zero = 0, or a param_persistence_threshold above its size, keeps it whole",
        )
    whole = f"{shown} is whole on every rank"
    cost = f"{shown_bytes(spec.nbytes)} on each"
    if mesh.get("dp", 1) == 1:
        return Statement(
            whole, "the mesh has no dimension 'dp' of more than one rank", cost, 'mesh={"dp": …} shards it'
        )
    if plan.zero == 0:
        return Statement(whole, "zero = 0", cost, "zero = 3 shards it")
    if spec.numel < plan.param_persistence_threshold:
        why = (
            f"its {spec.numel} elements are fewer than param_persistence_threshold = {plan.param_persistence_threshold}"
        )
        return Statement(whole, why, cost, "a lower threshold shards it")
    return Statement(whole, "it has no dimension to shard" if not spec.shape else "", cost)


def _transfers(inspection: Inspection, way: PassTrace, name: str) -> Iterator[Statement]:
    program = way.last.program
    forecast = inspection.forecast.programs[0]
    spans = {s.node: s for s in forecast.spans if s.lane.startswith("link:")}
    waits = exposed_by_transfer(way.last.program, forecast)
    counts: Counter[Phase] = Counter()
    for node in program.graph.nodes:
        if not has_info(node) or info(node).param != name:
            continue
        record = info(node)
        if collectives.is_start(node) and record.role is Role.GATHER:
            phase = _for(node)
            counts[phase] += 1
            again = phase is Phase.BACKWARD
            yield Statement(
                f"{node.name} gathers it for the {phase.value}",
                why="the forward's copy was let go after its last use there"
                if again
                else "the model computes with the whole of it",
                cost=_transfer_cost(node, spans, waits),
                remedy="a memory_budget with room keeps it gathered" if again else "",
            )
        elif collectives.is_start(node) and record.role is Role.REDUCE:
            op = collectives.reduce_op_of(node)
            yield Statement(
                f"{node.name} reduces its gradient ({op}) over {record.mesh_dim!r}",
                why="ranks see different data",
                cost=_transfer_cost(node, spans, waits),
            )
        elif record.role is Role.RELEASE:
            yield Statement(f"{node.name} lets the gathered copy go", why="nothing behind it reads it")
        elif transfers_to_host.is_start(node):
            yield Statement(
                f"{node.name}: {record.role.value} {shown_bytes(most_bytes(transfers_to_host.moved_value(node)))}"
            )
    if counts[Phase.FORWARD] and not counts[Phase.BACKWARD] and program.params[name].requires_grad:
        yield Statement("it is not gathered again for the backward", why=_why_once(inspection, way, name))


def _why_once(inspection: Inspection, way: PassTrace, name: str) -> str:
    program = way.last.program
    if any(port.name == name and port.role is OutputRole.UNSHARDED for port in program.outputs):
        return f"zero = {inspection.plan.zero} keeps what the forward gathered"
    gathers = [n for n in program.graph.nodes if collectives.is_start(n) and info(n).param == name]
    waits = [u for n in gathers if info(n).role is Role.GATHER for u in n.users if collectives.is_wait(u)]
    if not any(info(reader).phase is Phase.BACKWARD for wait in waits for reader in _readers(wait)):
        return "the backward does not read it"
    if inspection.plan.memory_budget is not None:
        return "the budget has room to hold it from the forward to the backward"
    return "the backward begins with it: it is held from its use in the forward"


def _readers(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that compute with a value, directly or through views."""
    readers = []
    for user in node.users:
        readers += _readers(user) if aliased_input(user) is not None else [user]
    return [n for n in readers if has_info(n) and info(n).role is Role.COMPUTE]


def _for(start: fx.Node) -> Phase:
    """Return the phase that a transfer is for; the transfer may start in the phase before."""
    return next((info(user).phase for user in start.users if collectives.is_wait(user)), info(start).phase)


def _transfer_cost(start: fx.Node, spans: dict[str, Span], waits: dict[str, float]) -> str:
    bucket, span = info(start).bucket, spans.get(start.name)
    lasts = f"{milliseconds(span.seconds)} on {span.lane}" if span else f"goes with {bucket}"
    exposed = waits.get(transfer_of(start), 0.0)
    return f"{lasts}, {f'{milliseconds(exposed)} of waiting' if exposed else 'hidden'}"


def _updated(inspection: Inspection, update: PassTrace, name: str) -> Iterator[Statement]:
    program = update.last.program
    states = {
        port.name.rpartition("/")[2]: node
        for port, node in program.input_items()
        if port.role is InputRole.STATE and port.name.rpartition("/")[0] == name
    }
    if not any(port.name == name for port in program.inputs):
        spec = inspection.way().last.program.params[name]
        trained = any(p.role is OutputRole.GRADIENT and p.name == name for p in inspection.way().last.program.outputs)
        frozen, unused = "it is frozen (requires_grad is False)", "it has no gradient: the loss does not depend on it"
        why = "no group of the plan's optimizer has it" if trained else unused if spec.requires_grad else frozen
        yield Statement("no optimizer updates it", why=why)
        return
    optimizer = inspection.plan.optimizer
    shown = ", ".join(
        f"{key} {type_text(value(n))}{f' in {info(n).home}' if info(n).home else ''}" for key, n in states.items()
    )
    size = sum(most_bytes(n) for n in states.values() if info(n).home is None)
    mine = (info(n) for n in program.graph.nodes if has_info(n) and info(n).param == name)
    groups = sorted({record.group for record in mine if record.group})
    yield Statement(
        f"{type(optimizer).__name__} updates it{f' in {groups[0]}' if groups else ''}",
        why=f"its states: {shown}" if shown else "without states",
        cost=f"{shown_bytes(size)} of states on the device",
    )


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
