"""What a node costs: a roofline for operators, latency and bandwidth for collectives, or what was measured here.

An operator takes as long as its arithmetic or its memory traffic, whichever is more (Williams et al., 2009,
"Roofline"). Pointwise operators and reductions are taken as fused, as Inductor fuses them: values between them do not
go through memory. A collective over n ranks takes (n - 1) latencies and sends (n - 1) / n of its bytes, an all-reduce
twice that (the ring algorithm: Thakur et al., 2005, "Optimization of Collective Communication Operations in MPICH").
"""

from __future__ import annotations

import json
import operator
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import fx

from zgraph.errors import PlanError
from zgraph.names import did_you_mean
from zgraph.passes.analysis.fusion import fusible, readers, together
from zgraph.program import collectives, ops, transfers_to_host
from zgraph.program.aliases import aliased_input, root_of
from zgraph.program.flops import product_flops
from zgraph.program.groups import dim_of
from zgraph.program.node import info, tensors, value
from zgraph.program.program import Program
from zgraph.program.sizes import largest, typical
from zgraph.record import Record

Rate = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(ge=0)]


class Link(Record, frozen=True):
    """The connection of one rank to the others over a mesh dimension."""

    bandwidth: Rate = Field(description="bytes per second that one rank sends")
    latency: Seconds = Field(default=0.0, description="seconds that each message takes besides")
    scatter: Rate = Field(default=1.0, description="how many times its bytes a reduce-scatter moves (gloo: 2)")
    work: Seconds = Field(default=0.0, description="seconds of computing that each byte costs the rank besides")
    start: Seconds = Field(default=0.0, description="seconds of computing that each start of a transfer costs the rank")
    joins: bool = Field(default=True, description="whether a bucket is one transfer (gloo: each of its members is one)")

    def transfers(self, members: int) -> int:
        """Return the number of transfers that a bucket with this many members is sent as."""
        return 1 if self.joins else members


class Hardware(Record, frozen=True):
    """One device and its links.

    The rates of known devices are the dense ones of data sheets, which no program reaches; those of `zgraph.calibrate`
    are what a model's own operators reached, and its `operators` what they took.
    """

    name: str = Field(description="what it is called")
    device: Literal["cpu", "cuda"] = Field(default="cuda", description="what torch calls such devices")
    flops: dict[str, Rate] = Field(description="FLOP/s of products by dtype; float32 is that of every other")
    memory: Rate = Field(description="bytes per second of the device's memory")
    launch: Seconds = Field(default=0.0, description="seconds that a kernel takes besides")
    capacity: Annotated[int, Field(gt=0)] = Field(description="bytes of the device's memory")
    host: Rate = Field(description="bytes per second between host and device, each way")
    host_memory: Rate = Field(
        default=50e9, description="bytes per second of the host's memory, as its processors reach it"
    )
    nvme: Rate = Field(default=3e9, description="bytes per second of a local NVMe disk")
    links: dict[str, Link] = Field(
        description='by mesh dimension, or blocks of one ("dp/8"); "*" for those without one of their own'
    )
    operators: dict[str, Seconds] = Field(
        default={}, description="seconds of operators that were timed, by zgraph.passes.analysis.costs.signature"
    )
    step: Seconds = Field(default=0.0, description="seconds that a step takes besides its programs")

    @property
    def measured(self) -> bool:
        """True for hardware that `zgraph.calibrate` measured."""
        return bool(self.operators)

    def link_name(self, group: str) -> str:
        """Return the key of `links` that a group takes: its own name (as of blocks, "dp/8"), else its mesh dimension's,
        else "*".
        """
        return next((name for name in (group, dim_of(group)) if name in self.links), "*")

    def link(self, group: str) -> Link:
        """Return the link that a group takes. Raises `PlanError` if there is none."""
        link = self.links.get(self.link_name(group))
        if link is None:
            dim = dim_of(group)
            raise PlanError(
                f"hardware {self.name!r} has no link for mesh dimension {dim!r}",
                where=f"links.{dim}",
                hint=f'it has {", ".join(self.links) or "none"}; "*" stands for all others',
            )
        return link


NVLINK4, NVLINK3 = Link(bandwidth=450e9, latency=3e-6), Link(bandwidth=300e9, latency=3e-6)
CPU = Hardware(
    name="cpu",  # one core with AVX-512 of a server, and 1 Gbit/s
    device="cpu",
    flops={"float32": 150e9, "float64": 75e9},
    memory=13e9,
    launch=2e-6,
    capacity=16 * 10**9,
    host=13e9,
    links={"*": Link(bandwidth=125e6, latency=50e-6, scatter=2, joins=False)},
)
H100 = Hardware(
    name="h100-80g",
    flops={"bfloat16": 989e12, "float16": 989e12, "float32": 67e12, "float64": 67e12},
    memory=3.35e12,
    launch=3e-6,
    capacity=80 * 10**9,
    host=64e9,
    links={"*": NVLINK4},
)
KNOWN = {
    h.name: h
    for h in (
        CPU,
        H100,
        H100.model_copy(update={"name": "h200-141g", "memory": 4.8e12, "capacity": 141 * 10**9}),
        Hardware(
            name="a100-80g",
            flops={"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12, "float64": 19.5e12},
            memory=2.04e12,
            launch=3e-6,
            capacity=80 * 10**9,
            host=32e9,
            links={"*": NVLINK3},
        ),
    )
}


def hardware(name: str) -> Hardware:
    """Return a known device by name, or the one that a TOML or JSON file describes. Raises `PlanError` for neither, or
    a file with faults.
    """
    if name in KNOWN:
        return KNOWN[name]
    path = Path(name)
    if path.suffix not in (".toml", ".json"):
        raise PlanError(f"there is no hardware {name!r}", where="hardware", hint=did_you_mean(name, KNOWN))
    try:
        text = path.read_text(encoding="utf-8")
        return Hardware.model_validate(tomllib.loads(text) if path.suffix == ".toml" else json.loads(text))
    except PlanError as error:  # (a ValueError as well)
        raise PlanError(
            f"the hardware's file has a fault: {error.what}",
            where=f"{name}: {error.where}" if error.where else name,
            why=error.why,
            hint=error.hint,
        ) from error
    except (OSError, ValueError) as error:
        raise PlanError("the hardware's file can't be read", where=name, why=str(error)) from error


def hardware_like(device: str, name: str = "") -> Hardware:
    """Return the known hardware for a device of this type and `name` (as torch.cuda.get_device_name gives it), h100-80g
    if none fits.
    """
    if device == "cpu":
        return CPU
    return next((h for key, h in KNOWN.items() if key.split("-")[0] in name.lower()), KNOWN["h100-80g"])


@dataclass(frozen=True)
class Costs:
    """The seconds that each node of a program takes."""

    hardware: Hardware  # the device and its links
    fused: bool = True  # whether the backend fuses operators into kernels

    def transfer(self, starts: Sequence[fx.Node], ranks: int) -> float:
        """Return the seconds that a bucket (collectives of one kind that start together) takes on its link, alone."""
        link = self.hardware.link(str(info(starts[0]).mesh_dim))
        whole = sum(bytes_of(s) for s in starts)
        return float(ring(link, collectives.kind(starts[0]), whole, ranks, link.transfers(len(starts))))

    def work(self, starts: Sequence[fx.Node]) -> float:
        """Return the seconds that a bucket takes from the compute stream (on CPUs, which move the bytes themselves)."""
        link = self.hardware.link(str(info(starts[0]).mesh_dim))
        return link.start * link.transfers(len(starts)) + link.work * sum(bytes_of(s) for s in starts)

    def move(self, start: fx.Node) -> float:
        """Return the seconds that a move between the device and a tier takes, alone."""
        rate = self.hardware.nvme if tier_of(start) == "nvme" else self.hardware.host
        return size_of(transfers_to_host.moved_value(start)) / rate

    def compute(self, program: Program) -> dict[fx.Node, float]:
        """Return the seconds of every operator that is no collective."""
        return {n: self.operator(n) for n in program.graph.nodes if computes(n)}

    def operator(self, node: fx.Node) -> float:
        """Return the seconds of an operator that is no collective."""
        known = self.hardware.operators.get(signature(node)) if self.hardware.operators else None
        if known is not None:
            return known
        moved = self.traffic(node)
        if on_host(node):
            return moved / self.hardware.host_memory
        launched = self.hardware.launch if moved else 0.0
        return max(flops_of(node) / self.rate(node), moved / self.hardware.memory) + launched

    def rate(self, node: fx.Node) -> float:
        """Return the FLOP/s at which a node computes."""
        return self.hardware.flops.get(dtype_of(node), self.hardware.flops.get("float32", 1e12))

    def traffic(self, node: fx.Node) -> int:
        """Return the bytes that a node reads and writes, less those that stay inside a fused kernel."""
        return sum(size_of(n) for n in self.moved(node))

    def moved(self, node: fx.Node) -> list[fx.Node]:
        """Return the values that a node reads from memory or writes to it."""
        is_fused = self.fused and fusible(node)
        roots = dict.fromkeys(root_of(a) for a in node.all_input_nodes)
        read = [r for r in roots if not (is_fused and together(r, node))]
        users = readers(node)
        stays_in_kernel = is_fused and users and all(fusible(u) and together(node, u) for u in users)
        return read if stays_in_kernel else [*read, node]


def ring(link: Link, kind: str, whole: Any, ranks: Any, transfers: Any = 1) -> Any:
    """Return the seconds of collectives of one kind that move `whole` bytes in `transfers` parts; numbers or formulas."""
    if kind == "shift":
        return link.latency * transfers + whole / link.bandwidth
    turns = rounds(link, kind)
    return (ranks - 1) * (max(1, round(turns)) * link.latency * transfers + turns * whole / ranks / link.bandwidth)


def rounds(link: Link, kind: str) -> float:
    """Return how many times the ring sends the bytes of a collective."""
    return {"all_reduce": 2.0, "reduce_scatter": link.scatter}.get(kind, 1.0)


def size_of(node: fx.Node) -> int:
    """Return the bytes of a node's own tensors, at the typical sizes of its program."""
    return sum(typical(t.numel()) * t.element_size() for t in tensors(node))


def most_bytes(node: fx.Node) -> int:
    """Return the bytes of a node's own tensors, at the largest sizes of its program, which the device must have memory
    for.
    """
    return sum(largest(t.numel()) * t.element_size() for t in tensors(node))


def own_bytes(node: fx.Node) -> int:
    """Return the bytes of a node's storage, at the largest sizes; for an operator with several results, of those that
    no `getitem` node takes.
    """
    return most_bytes(node) - sum(most_bytes(u) for u in node.users if u.target is operator.getitem and root_of(u) is u)


def on_host(node: fx.Node) -> bool:
    """Return whether a value is made on the host, beside the device; for a fetch, whether its copy goes to the host."""
    return node.op == "call_function" and node.target is not transfers_to_host.OFFLOAD and info(node).home == "cpu"


def tier_of(start: fx.Node) -> str:
    """Return the tier that a move goes to or comes from."""
    return str(info(start if start.target is transfers_to_host.OFFLOAD else start.all_input_nodes[0]).home)


def bytes_of(start: fx.Node) -> int:
    """Return the bytes of the whole value that a collective gathers or reduces."""
    return max(size_of(start), sum(size_of(a) for a in start.all_input_nodes))


def flops_of(node: fx.Node) -> int:
    """Return the floating-point operations of a product, at the typical sizes; 0 for every other node."""
    return typical(product_flops(node))


def signature(node: fx.Node) -> str:
    """Return a text that is equal for operators that do the same on values of the same types."""

    def shown(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return leaf.type  # (the rank's index does not matter)
        if not isinstance(leaf, fx.Node):
            return leaf
        if isinstance(value(leaf), torch.SymInt):
            return typical(value(leaf))
        types = ((t.dtype, list(map(typical, t.shape)), list(map(typical, t.stride()))) for t in tensors(leaf))
        return "; ".join(f"{dtype}{shape}{stride}" for dtype, shape, stride in types)

    args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), shown)
    return f"{node.target} {args!r} {kwargs!r}"


def computes(node: fx.Node) -> bool:
    """Return whether a node takes time on the compute stream: views, members of a tuple, collectives, moves and waits
    do not.
    """
    if node.op != "call_function" or node.target in (operator.getitem, ops.RELEASE):
        return False
    transfers = collectives.is_start(node) or collectives.is_wait(node) or transfers_to_host.is_host_transfer(node)
    return not transfers and aliased_input(node) is None


def dtype_of(node: fx.Node) -> str:
    """Return the dtype of a node's first operand, as rates are named: "float32"."""
    first = next((t for a in node.all_input_nodes for t in tensors(a)), None)
    return str(first.dtype).removeprefix("torch.") if first is not None else "float32"
