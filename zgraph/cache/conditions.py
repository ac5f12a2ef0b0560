"""The conditions that compiled programs depend on besides their graphs: versions, sources, environment variables, settings, the processor.

An entry of the cache is valid for one state of all of these. A condition too many costs a compilation; a missing one would give a wrong program. So
all environment variables of a kind count, not only those known to matter.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from zgraph._version import __version__
from zgraph.cache.store import hashed
from zgraph.ranks.host import text_of
from zgraph.torch_compat import torch_settings

Unknown = torch_settings.Unknown

# Variables that torch's compilers read: all with these prefixes, and some by name.
PREFIXES = (
    "AOT",
    "CUDA_",
    "CUTEDSL_",
    "CUTLASS_",
    "DUMP_",
    "ENABLE_",
    "HALIDE_",
    "INDUCTOR_",
    "KMP_",
    "LEVEL_ZERO_",
    "MKL_",
    "OMP_",
    "ONEAPI_",
    "PARTITIONER_",
    "PYTORCH_",
    "TORCH",
    "TRITON_",
    "XPU_",
    "ZGRAPH_",
)
NAMES = frozenset(
    {
        "ATEN_CPU_CAPABILITY",
        "CC",
        "CPLUS_INCLUDE_PATH",
        "CUBLAS_WORKSPACE_CONFIG",
        "CUDACXX",
        "CXX",
        "FAKE_ALLOW_META",
        "PT2_COMPILE_ID_PREFIX",
        "UNSAFE_SKIP_FSDP_MODULE_GUARDS",
        "_TORCHINDUCTOR_TEST",
    }
)
# Variables that programs do not depend on: folders of files, the ranks that take part, logging.
IGNORED = frozenset(
    {
        "CI",
        "CONDA_EXE",
        "CONDA_PREFIX",
        "CUDA_VISIBLE_DEVICES",  # (the device's own name and number of processors count)
        "LD_LIBRARY_PATH",
        "LOG_TLPARSE",
        "LOG_AUTOTUNE_RESULTS",
        "MAST_HPC_JOB_NAME",
        "ProgramFiles",
        "ROLE_RANK",
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCHINDUCTOR_COMPILE_THREADS",
        "TORCH_TRACE",
        "TRITON_CACHE_DIR",
        "WINDOWS_CUDA_HOME",
        "ZGRAPH_BUNDLE",
        "ZGRAPH_CACHE",
        "ZGRAPH_HARDWARE",  # (what it names is in the costs)
        "ZGRAPH_REPRO_DIR",
        "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",  # (torch sets it itself)
    }
)
# (torchrun sets variables of these kinds for its ranks: how they are started, and how long NCCL waits for them)
IGNORED_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_")


def is_read(name: str) -> bool:
    """Return whether programs may depend on an environment variable."""
    ignored = name in IGNORED or name.startswith(IGNORED_PREFIXES)
    return not ignored and (name in NAMES or name.startswith(PREFIXES))


def conditions(device: torch.device) -> dict[str, Any]:
    """Return the present conditions as JSON values. Raises `Unknown` with the name of a setting that can't be read."""
    return {
        "versions": _versions(),
        "source": source(),
        "variables": {name: value for name, value in sorted(os.environ.items()) if is_read(name)},
        "settings": torch_settings.settings(),
        "processor": _processor(),
        "device": _device(device),
    }


def key_of(table: dict[str, Any]) -> str:
    """Return the hash of conditions."""
    return hashed(json.dumps(table, sort_keys=True))


@functools.cache
def _versions() -> dict[str, str]:
    versions = {
        "zgraph": __version__,
        "torch": f"{torch.__version__} {torch.version.git_version} {torch.version.cuda}",
        "python": f"{platform.python_implementation()} {sys.version}",
    }
    for package in ("triton", "pytorch-triton", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = ""
    return versions


@functools.cache
def source() -> str:
    """Return the hash of zgraph's own source, including passes and code generation."""
    texts = []
    for package in ("zgraph", "zgraph.passes", "zgraph.codegen"):
        for place in getattr(importlib.util.find_spec(package), "submodule_search_locations", None) or ():
            for path in sorted(Path(place).rglob("*.py")):
                texts += [f"{package}/{path.relative_to(place)}", path.read_text(encoding="utf-8")]
    return hashed(*texts)


@functools.cache
def _processor() -> dict[str, Any]:
    """Return what compilers read of the processor."""
    lines = text_of("/proc/cpuinfo").splitlines()
    said = {
        key: next((line for line in lines if line.startswith(key)), "") for key in ("model name", "flags", "Features")
    }
    return {
        "machine": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "said": hashed(*said.values()),
    }


def _device(device: torch.device) -> list[Any]:
    if device.type != "cuda" or not torch.cuda.is_available():
        return [device.type]
    properties = torch.cuda.get_device_properties(device)
    return [
        "cuda",
        properties.name,
        properties.major,
        properties.minor,
        properties.multi_processor_count,
        properties.total_memory,
    ]
