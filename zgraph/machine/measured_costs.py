"""The costs that ranks schedule from: the plan's hardware, else measurements of this machine and its links when a model is compiled.

*Belief.* Ranks that decide from different costs would wait for each other's collectives forever. So the ranks exchange what each has measured or
cached, make one table of it, and vote on the table.

A device is measured once: its rates are stored in the cache folder (`zgraph/machine/measurement_cache.py`), keyed by everything that they depend
on. Links are measured by each compile, since they change with time; if a link is within `STEADY` of the cached one, the cached one is used, so that a
restarted run has the same programs. Nothing is measured without real ranks or a real device: commands that plan for a cluster, and programs on
virtual ranks, use data sheets (`costs_of`), and are the same everywhere.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import socket
import time
from dataclasses import dataclass, replace
from importlib.metadata import version

import torch
from torch.distributed.device_mesh import DeviceMesh

from zgraph._version import __version__
from zgraph.build.memory_search import measured_rate
from zgraph.build.pass_pipeline import costs_of
from zgraph.codegen import cpu_gemm
from zgraph.errors import PlanError
from zgraph.machine import measurement_cache
from zgraph.machine.device_benchmark import Rates, measure_device, slowest
from zgraph.machine.link_benchmark import SIZES, measure_link
from zgraph.offload.run_transfers import Tiers
from zgraph.passes.analysis.costs import Costs, Hardware, Link, ring
from zgraph.plan.plan import Plan
from zgraph.ranks.agreement import Agreement
from zgraph.ranks.host import cache_folder, text_of
from zgraph.record import Record
from zgraph.torch_compat import process_groups

logger = logging.getLogger(__name__)

VARIABLE = "ZGRAPH_HARDWARE"
FORMAT = "1"  # the version of the measurements: a change makes cached ones invalid
STEADY = 1.25  # the largest ratio between the times of a transfer over two links that count as the same
LINK_SECONDS = 0.8  # for the links of all dimensions


class Links(Record, frozen=True):
    """The links of a mesh, by dimension."""

    links: dict[str, Link]  # the link of each mesh dimension


def agreed_costs(plan: Plan, device: torch.device, agreement: Agreement, mesh: DeviceMesh | None) -> Costs:
    """Return the costs that the ranks schedule from, equal on all ranks. `mesh` is that of all stages. All ranks must
    call it.

    Raises `PlanError` on every rank if one can't read the hardware's file, `RankMismatchError` if they are given
    different hardware.
    """

    def refused(rank: int, said: str) -> PlanError:
        return PlanError(
            f"rank {rank} can't read the hardware", where="hardware", why=said, hint="every rank needs the file"
        )

    named = named_hardware(plan)
    agreement.vote(
        "where costs come from",
        f"hardware {named or 'measured'}",
        hint=f"give every rank the same plan and the same {VARIABLE}",
    )
    told = plan.model_copy(update={"hardware": named})
    costs = agreement.together("the hardware's file", lambda: costs_of(told, device), refused)
    if named is None and _is_real(agreement):
        costs = replace(costs, hardware=_measured(costs, device, agreement, mesh))
    elif named is None and process_groups.stands_in():
        costs = replace(costs, hardware=_from_before(costs, device, agreement, mesh))
    agreement.vote("the table of costs (plan.hardware)", costs.hardware.model_dump_json())
    return costs


def named_hardware(plan: Plan) -> str | None:
    """Return the hardware that the plan names, or the environment's variable; None where it is measured."""
    return plan.hardware or os.environ.get(VARIABLE) or None


def at_disk_rate(costs: Costs, agreement: Agreement, tiers: Tiers) -> Costs:
    """Return the costs with the measured rate of the disk of `tiers`, on the slowest rank. All ranks must call it."""
    if tiers.preflight is None:
        return costs
    mine = min(tiers.preflight.read_rate, tiers.preflight.write_rate)
    slow = min(agreement.gather("the disk's rate", mine))
    return replace(costs, hardware=costs.hardware.model_copy(update={"nvme": measured_rate(slow)}))


def _is_real(agreement: Agreement) -> bool:
    """Return whether the process group is a real one, or this process is the only rank."""
    return agreement.group is None or not process_groups.is_fake(agreement.group)


# -- the device -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Seen:
    """What a rank tells the others before any of them measures."""

    host: str  # the name of its machine
    key: dict[str, str]  # what the rates of its device depend on
    kept: Rates | None  # the cached rates of its device; None if there are none


def _measured(costs: Costs, device: torch.device, agreement: Agreement, mesh: DeviceMesh | None) -> Hardware:
    began = time.perf_counter()
    host = socket.gethostname()
    hosts = agreement.gather("the ranks' machines", host)
    key = _device_key(device, costs.fused, hosts.count(host))
    seen = agreement.gather("what is kept of machines", _Seen(host, key, measurement_cache.read("device", key, Rates)))
    missing = {s.host for s in seen if s.kept is None}
    rates = [s.kept for s in seen if s.kept is not None]
    if missing:
        own_rates = seen[agreement.rank()].kept
        rates = agreement.gather(
            "the rates of devices", own_rates if own_rates and host not in missing else _measure(device, costs, key)
        )
        like = [at for at, s in enumerate(seen) if (s.host, s.key) == (host, key)]
        if host in missing and like[0] == agreement.rank():
            measurement_cache.write("device", key, slowest([rates[at] for at in like]))
    links = _links(device, agreement, mesh, sorted(set(hosts)))
    hardware = _hardware(costs, key, rates, links)
    if agreement.first():
        origin = "measured" if missing else "kept from before"
        logger.info("%s; rates %s, %.1f s in all", _in_words(hardware, links), origin, time.perf_counter() - began)
    return hardware


def _hardware(costs: Costs, key: dict[str, str], rates: list[Rates], links: dict[str, Link]) -> Hardware:
    hardware = slowest(rates).of(costs.hardware, f"{key['device']}, measured")
    return hardware.model_copy(update={"links": {**hardware.links, **links}})


def _from_before(costs: Costs, device: torch.device, agreement: Agreement, mesh: DeviceMesh | None) -> Hardware:
    """Return what ranks have measured in an earlier run in which all of them were on this machine. Raises `PlanError`
    if nothing of that is cached."""
    host, ranks = socket.gethostname(), len(agreement.ranks)
    key, dims = _device_key(device, costs.fused, ranks), _dims(mesh)
    rates = measurement_cache.read("device", key, Rates)
    links = Links(links={})
    if mesh is not None and dims:
        links = measurement_cache.read("links", _links_key(device, mesh, dims, [host]), Links) or links
    if rates is None or not dims.keys() <= links.links.keys():
        raise PlanError(
            f"nobody knows yet what {ranks} ranks will schedule by",
            where="hardware",
            why="without it ranks measure their devices and links when a model is compiled, programs depend on that, and"
            f" {cache_folder()} has no such measurement of {ranks} ranks on {host}",
            hint=f"name the hardware in the plan, or in {VARIABLE} here and for the ranks: a file of zgraph calibrate, say;"
            " or let the ranks run once, which keeps what they measure",
        )
    return _hardware(costs, key, [rates], links.links)


def _measure(device: torch.device, costs: Costs, key: dict[str, str]) -> Rates:
    """Measure this rank's device; return the rates of data sheets if that fails, for example for lack of memory."""
    try:
        return measure_device(device, costs.fused)
    except RuntimeError as error:
        logger.warning("%s can't be measured (%s): its costs are those of data sheets", key["device"], error)
        sheet = costs.hardware
        return Rates(flops=sheet.flops, memory=sheet.memory, launch=sheet.launch, host=sheet.host)


def _device_key(device: torch.device, fused: bool, ranks: int) -> dict[str, str]:
    """Return everything that a device's rates depend on."""
    cuda = device.type == "cuda"
    names = re.findall(r"^model name\s*:\s*(.+)$", text_of("/proc/cpuinfo"), re.MULTILINE)
    cpu = names[0] if names else platform.machine()
    return {
        "device": torch.cuda.get_device_name(device) if cuda else cpu,
        "processor": f"{cpu}, {torch.backends.cpu.get_cpu_capability()}, {len(os.sched_getaffinity(0))} for this process",
        "threads": str(torch.get_num_threads()),
        "ranks": str(ranks),
        "products": "oneDNN" if fused and cpu_gemm.onednn() is not None else "torch",
        "float32": torch.get_float32_matmul_precision(),
        "torch": f"{version('torch')}, CUDA {torch.version.cuda}",
        "zgraph": f"{__version__}, {FORMAT}",
    }


# -- links ----------------------------------------------------------------------------------------------------------------
def _links(device: torch.device, agreement: Agreement, mesh: DeviceMesh | None, hosts: list[str]) -> dict[str, Link]:
    """Return the links of the mesh's dimensions: the cached ones if the new measurements are alike, else the new
    ones."""
    dims = _dims(mesh)
    if mesh is None or not dims:
        return {}
    each = LINK_SECONDS / len(dims)
    now = {d: measure_link(_group(mesh, d), ranks, device, agreement, each) for d, ranks in dims.items()}
    key = _links_key(device, mesh, dims, hosts)
    before = measurement_cache.read("links", key, Links) if agreement.first() else None
    before = agreement.gather("what is kept of links", before)[0]
    same = {d for d, ranks in dims.items() if before and d in before.links and alike(before.links[d], now[d], ranks)}
    links = {d: before.links[d] if before and d in same else now[d] for d in dims}
    if len(same) < len(dims) and agreement.first():
        measurement_cache.write("links", key, Links(links=links))
    return links


def _dims(mesh: DeviceMesh | None) -> dict[str, int]:
    """Return the sizes of a mesh's dimensions with links."""
    dims = {} if mesh is None else dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    return {dim: size for dim, size in dims.items() if size > 1}


def _group(mesh: DeviceMesh, dim: str) -> str:
    return str(mesh.get_group(dim).group_name)


def _links_key(device: torch.device, mesh: DeviceMesh, dims: dict[str, int], hosts: list[str]) -> dict[str, str]:
    """Return everything that the links of a mesh depend on."""
    return {
        "hosts": " ".join(hosts),
        "mesh": repr(mesh.mesh.tolist()),
        "dims": repr(dims),
        "backends": repr({dim: process_groups.backend_of(_group(mesh, dim), device)[0] for dim in dims}),
        "threads": str(torch.get_num_threads()),
        "versions": f"torch {version('torch')}, zgraph {__version__}, {FORMAT}",
    }


def alike(old: Link, new: Link, ranks: int) -> bool:
    """Return whether two links are alike: transfers, and their slowdown of computation, take about as long."""
    if old.joins != new.joins:
        return False
    pairs = [
        (ring(old, kind, size, ranks), ring(new, kind, size, ranks))
        for kind in ("all_gather", "reduce_scatter")
        for size in (SIZES[0], SIZES[-1])
    ]
    work = abs(old.work - new.work) * max(old.bandwidth, new.bandwidth)  # as a fraction of a transfer's time
    return all(max(a, b) <= STEADY * min(a, b) for a, b in pairs) and work <= STEADY - 1


def _in_words(hardware: Hardware, links: dict[str, Link]) -> str:
    rates = ", ".join(f"{d} {rate / 1e9:,.0f} GFLOP/s" for d, rate in hardware.flops.items() if d != "float64")
    text = f"costs of {hardware.name}: {rates}, memory {hardware.memory / 1e9:.3g} GB/s, launch {hardware.launch * 1e6:.2g} us"
    for dim, link in links.items():
        text += f"; {dim}: {link.bandwidth / 1e9:.3g} GB/s, {link.latency * 1e6:.3g} us"
    return text
