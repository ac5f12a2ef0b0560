"""Describe a machine for a bug report: versions, devices, links, disks, limits, and what is missing and what that
costs.

Every section is read by itself: one that can't be read says why, and the others are still there. Nothing in it is
secret: of the environment variables only those of zgraph, PyTorch and the libraries below them are shown, without
passwords, and the home folder is written as ~.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from zgraph._version import __version__
from zgraph.ranks.host import host_free, text_of

PACKAGES = ("torch", "triton", "pydantic", "typer", "rich", "transformers", "numpy")
SUPPORTED = (2, 11), (2, 15)  # versions of torch, as in pyproject.toml: from, and before
PREFIXES = ("ZGRAPH_", "TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "PYTORCH_", "NCCL_", "CUDA_", "OMP_")
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|KEY", re.IGNORECASE)
_NO_DISKS = {"proc", "sysfs", "tmpfs", "devtmpfs", "devpts", "cgroup", "cgroup2", "mqueue", "squashfs", "securityfs"}
SECONDS = 10  # timeout of a program that is asked for its version
MOUNTS = 8  # folders that are listed at most


@dataclass(frozen=True)
class Missing:
    """Something that this machine lacks."""

    what: str  # what is missing
    cost: str  # what does not work without it
    hint: str  # what to do about it


@dataclass(frozen=True)
class Environment:
    """A machine, by sections: each is a mapping of what is known, or {"error": why it can't be read}."""

    versions: dict[str, Any]  # versions of zgraph, Python and packages, None for a missing one
    system: dict[str, Any]  # the operating system
    cpu: dict[str, Any]  # the processor, its cores and vector instructions
    memory: dict[str, Any]  # the host's memory, in bytes
    devices: dict[str, Any]  # CUDA devices and their driver
    links: dict[str, Any]  # communication libraries, and links between devices
    disks: dict[str, Any]  # free bytes and file system, by folder
    limits: dict[str, Any]  # limits of this process
    variables: dict[str, Any]  # environment variables that matter
    missing: tuple[Missing, ...]  # what is missing, and what that costs

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def environment() -> Environment:
    """Describe this machine. Never raises."""
    sections = {
        "variables": _variables,  # (first: importing torch sets some)
        "versions": _versions,
        "system": _system,
        "cpu": _cpu,
        "memory": _memory,
        "devices": _devices,
        "links": _links,
        "disks": _disks,
        "limits": _limits,
    }
    facts = {name: _said(look) for name, look in sections.items()}
    return Environment(**facts, missing=tuple(_missing(facts)))


def _said(look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return look()
    except Exception as error:
        return {"error": _plain(f"{type(error).__name__}: {error}")}


def _plain(text: str) -> str:
    """Replace the home folder, and so the user's name, in a text by ~."""
    home = str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text


# -- sections -----------------------------------------------------------------------------------------------------------
def _versions() -> dict[str, Any]:
    versions: dict[str, Any] = {"zgraph": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    versions["torch's CUDA"] = _said(lambda: {"found": importlib.import_module("torch").version.cuda}).get("found")
    versions["compiler"] = _said(lambda: {"found": _compiler()}).get("found")
    return versions


def _compiler() -> str | None:
    """Return the first line of the C++ compiler's version; None without a compiler."""
    path = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if path is None:
        return None
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=SECONDS, check=True)
    return done.stdout.splitlines()[0]


def _system() -> dict[str, Any]:
    release = platform.freedesktop_os_release() if hasattr(platform, "freedesktop_os_release") else {}
    return {
        "os": release.get("PRETTY_NAME", platform.system()),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "executable": _plain(sys.executable),
    }


def _cpu() -> dict[str, Any]:
    names = re.findall(r"^model name\s*:\s*(.+)$", text_of("/proc/cpuinfo"), re.MULTILINE)
    facts: dict[str, Any] = {
        "name": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "cores of this process": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }

    def of_torch() -> dict[str, Any]:
        import torch

        from zgraph.codegen import cpu_gemm

        torch_facts = {"torch's threads": torch.get_num_threads(), "vectors": torch.backends.cpu.get_cpu_capability()}
        return torch_facts | {"products of Inductor's code": "oneDNN" if cpu_gemm.onednn() else "torch's own library"}

    return facts | _said(of_torch)


def _memory() -> dict[str, Any]:
    rows = dict(re.findall(r"^(\w+):\s+(\d+) kB", text_of("/proc/meminfo"), re.MULTILINE))
    sizes: dict[str, Any] = {"total_bytes": int(rows["MemTotal"]) * 1024} if "MemTotal" in rows else {}
    sizes["swap_bytes"] = int(rows.get("SwapTotal", 0)) * 1024
    return sizes | {"free_bytes": host_free()}


def _devices() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {}
    devices: dict[str, Any] = {}
    for at in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(at)
        devices[f"cuda:{at}"] = {
            "name": facts.name,
            "memory_bytes": facts.total_memory,
            "capability": f"{facts.major}.{facts.minor}",
        }
    driver = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text_of("/proc/driver/nvidia/version"))
    return devices | {"driver": driver[1] if driver else None}


def _links() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return {"gloo": False, "nccl": None}
    nccl = dist.is_nccl_available() and torch.cuda.is_available()
    links: dict[str, Any] = {"gloo": dist.is_gloo_available()}
    links["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if nccl else None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count > 1:
        peers = [(a, b) for a in range(count) for b in range(count) if a != b]
        links["peer access"] = all(torch.cuda.can_device_access_peer(a, b) for a, b in peers)
        links["nvlink"] = _said(_nvlink).get("found")
    return links


def _nvlink() -> dict[str, Any]:
    """Return the kinds of NVLink between devices by `nvidia-smi topo -m`: NV18 means 18 links."""
    done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=SECONDS, check=True)
    return {"found": ", ".join(sorted(set(re.findall(r"\bNV\d+\b", done.stdout)))) or "none"}


def _disks() -> dict[str, Any]:
    """Describe the folders that values could be offloaded to: the current one, that for temporary files, and a writable
    one on each other disk."""
    mounts = [line.split() for line in text_of("/proc/mounts").splitlines()]
    kinds = {row[1].replace(r"\040", " "): row[2] for row in mounts if len(row) > 2}
    folders = [Path.cwd(), Path(tempfile.gettempdir())]
    others = [Path(p) for p, kind in kinds.items() if kind not in _NO_DISKS and Path(p).is_dir()]
    disks: dict[str, Any] = {}
    devices: set[int] = set()
    for folder in [*folders, *others]:
        if not os.access(folder, os.W_OK) or (folder in others and folder.stat().st_dev in devices):
            continue
        devices.add(folder.stat().st_dev)
        disks.setdefault(_plain(str(folder)), _said(partial(_disk, folder, kinds)))
        if len(disks) == MOUNTS:
            break
    return disks


def _disk(folder: Path, kinds: dict[str, str]) -> dict[str, Any]:
    above = [p for p in kinds if folder == Path(p) or Path(p) in folder.parents]
    facts: dict[str, Any] = {
        "filesystem": kinds[max(above, key=len)] if above else None,
        "free_bytes": shutil.disk_usage(folder).free,
    }

    def direct() -> dict[str, Any]:
        from zgraph.offload.files import FileStore

        with FileStore(folder, threads=1) as store:
            return {"direct": store.direct}

    return facts | _said(direct)


def _limits() -> dict[str, Any]:
    wanted = {"memlock": resource.RLIMIT_MEMLOCK, "open files": resource.RLIMIT_NOFILE}
    wanted |= {"file size": resource.RLIMIT_FSIZE, "address space": resource.RLIMIT_AS}
    return {name: _limit(resource.getrlimit(which)[0]) for name, which in wanted.items()}


def _limit(value: int) -> int | str:
    return "unlimited" if value == resource.RLIM_INFINITY else value


def _variables() -> dict[str, Any]:
    return {name: _shown(name, value) for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)}


def _shown(name: str, value: str) -> str:
    if _SECRET.search(name):
        return "(set)"
    return _plain(re.sub(r"(\w+://)[^/@\s]+@", r"\1(…)@", value))


# -- what is missing ----------------------------------------------------------------------------------------------------
def _missing(environment: dict[str, dict[str, Any]]) -> list[Missing]:
    versions, devices, links = environment["versions"], environment["devices"], environment["links"]
    missing: list[Missing] = []

    def lacks(what: str, cost: str, hint: str) -> None:
        missing.append(Missing(what, cost, hint))

    broken = devices.get("error")
    if versions.get("torch") is None:
        lacks("torch", "nothing can be compiled or run", "pip install 'torch>=2.11,<2.15'")
    elif broken is not None:
        lacks("a torch that can be imported", f"nothing can be compiled or run ({broken})", "install torch again")
    elif not _supported(str(versions["torch"])):
        low, high = (".".join(map(str, v)) for v in SUPPORTED)
        cost = f"zgraph was made for {low} up to and without {high}: captures and kernels may fail"
        lacks(f"a supported torch (this is {versions['torch']})", cost, f"pip install 'torch>={low},<{high}'")
    for name in ("pydantic", "typer", "numpy"):
        if name in versions and versions[name] is None:
            lacks(name, "zgraph needs it", f"pip install {name}")
    cuda = any(name.startswith("cuda:") for name in devices)
    if versions.get("compiler") is None:
        cost = "backend=\"inductor\" can't compile for CPUs, and the memory of CPUs can't be counted"
        lacks("a C++ compiler", cost, 'install g++, name one in CXX, or use backend="eager"')
    if not cuda:
        built = "" if versions.get("torch's CUDA") else ", and this torch is built without CUDA"
        cost = f"programs run on the CPU, and what they take on GPUs is a forecast{built}"
        lacks("a CUDA device", cost, "none needed to look at programs")
    if versions.get("triton") is None:
        cost = 'backend="inductor" makes no kernels for GPUs' + ("" if cuda else ", of which there are none here")
        lacks("Triton", cost, "pip install 'zgraph[gpu]'")
    if "error" not in links and not links.get("gloo"):
        lacks("gloo", "several processes can't vote, nor train on CPUs", "install a torch that is built with it")
    if cuda and not links.get("nccl"):
        lacks("NCCL", "several GPUs can't exchange bytes", "install a torch that is built with it")
    for folder, facts in environment["disks"].items():
        if isinstance(facts, dict) and facts.get("direct") is False:
            cost = "what is offloaded there is copied once more, and takes the host's memory"
            what = f"O_DIRECT in {folder} ({facts.get('filesystem')})"
            lacks(
                what, f"reads and writes go through the page cache: {cost}", "offload to a local disk with ext4 or XFS"
            )
    if versions.get("transformers") is None:
        lacks("transformers", "targets hf:DIR can't be read", "pip install transformers")
    return missing


def _supported(version: str) -> bool:
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    return SUPPORTED[0] <= numbers < SUPPORTED[1]
