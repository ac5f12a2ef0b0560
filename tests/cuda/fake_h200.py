"""Import this before torch: Inductor then generates code for an H200 (sm_90) on a machine without a GPU.

Two layers. `fake_guard.cpp`, built once by g++ and kept in the user's cache, lets fake tensors be on "cuda". Here,
`torch.cuda` and Triton's driver answer as they would for an H200. Nothing can be run on the device that is not there.
`why_not()` says, without importing torch, why this machine can't do it (None if it can).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("fake_guard.cpp")
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=143771 * 2**20, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    L2_cache_size=60 * 2**20, clock_rate=1980000, memory_clock_rate=3201000, memory_bus_width=6144, is_integrated=0,
    is_multi_gpu_board=0, gcnArchName="sm_90", uuid="0",
)  # fmt: skip


def _torch_root() -> Path | None:
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def why_not() -> str | None:
    """Why code for an H200 can't be generated here; None if it can."""
    root = _torch_root()
    if root is None:
        return "torch is not installed"
    if (root / "lib" / "libtorch_cuda.so").exists():
        return "this torch is a CUDA build: a device that is not there can only be stood in for on a CPU build"
    if not (root / "lib" / "libtorch_cpu.so").exists():
        return "this torch has no libtorch_cpu.so"
    if shutil.which("g++") is None:
        return "there is no g++, which builds the stand-in for the device"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


def _guard() -> Path:
    """The shared library of `fake_guard.cpp` for this torch, built if it is not there."""
    root = _torch_root()
    tag = hashlib.sha256(SOURCE.read_bytes() + f"{importlib.metadata.version('torch')} {root}".encode()).hexdigest()[
        :16
    ]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zgraph-tests"
    library = cache / f"fake_guard_{tag}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:  # (two processes may build at once)
            made = Path(scratch) / library.name
            subprocess.run(
                ["g++", "-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-D_GLIBCXX_USE_CXX11_ABI=1", f"-I{root}/include",
                 f"-I{root}/include/torch/csrc/api/include", str(SOURCE), f"-L{root}/lib", "-lc10", "-ltorch_cpu",
                 f"-Wl,-rpath,{root}/lib", "-o", str(made)], check=True,
            )  # fmt: skip
            os.replace(made, library)
    return library


def _install() -> None:
    if "torch" in sys.modules:
        raise ImportError("fake_h200 must be imported before torch")
    if ctypes.CDLL(str(_guard()), mode=ctypes.RTLD_GLOBAL).install() != 1:
        raise ImportError("torch did not take the stand-in for CUDA")
    import torch
    from torch._dynamo import device_interface
    from torch._inductor import config
    from torch._inductor.analysis import device_info
    from torch._subclasses.fake_tensor import FakeTensorMode

    # The engine's own thread for a device that is not there aborts now and then at exit.
    torch.autograd.set_multithreading_enabled(False)
    config.fx_graph_cache = False
    config.compile_threads = 1
    config.use_static_triton_launcher = False  # it wants a CUDA context
    config.joint_graph_constant_folding = False  # it computes constants on the device

    answers: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": PROPERTIES,
        "get_device_capability": (9, 0), "get_device_name": PROPERTIES.name, "is_bf16_supported": True,
        "synchronize": None, "memory_allocated": 0, "is_current_stream_capturing": False,
        "_exchange_device": 0, "_maybe_exchange_device": 0, "manual_seed": None, "manual_seed_all": None, "seed": None,
        "seed_all": None, "initial_seed": 0, "set_rng_state": None,
    }  # fmt: skip
    for name, answer in answers.items():  # (a function of its own each: dynamo keys its handlers on them)
        function = _constant(answer)
        setattr(torch.cuda, name, function)
        if hasattr(torch.cuda.random, name):
            setattr(torch.cuda.random, name, function)
    state = lambda device="cuda": torch.zeros(16, dtype=torch.uint8)  # noqa: E731
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = state
    torch.cuda._initialized = True
    torch.version.cuda = "13.0"
    torch._C._cuda_getCurrentRawStream = _constant(0)
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # else it builds real constants on the device

    interface = device_interface.CudaInterface
    for name in (
        "current_device",
        "device_count",
        "get_device_properties",
        "is_bf16_supported",
        "synchronize",
        "memory_allocated",
    ):
        setattr(interface, name, staticmethod(getattr(torch.cuda, name)))
    for name in ("get_raw_stream", "exchange_device", "maybe_exchange_device"):
        setattr(interface, name, staticmethod(_constant(0)))
    device_interface.caching_worker_device_properties["cuda"] = [PROPERTIES]
    known = device_info._device_mapping
    known.setdefault("NVIDIA H200", dataclasses.replace(known["NVIDIA H100"], dram_bw_gbs=4800.0, dram_gb=141.0))

    import triton
    from triton.backends import backends

    backends["nvidia"] = dataclasses.replace(backends["nvidia"], driver=_Driver)
    triton.runtime.driver.set_active(_Driver())


def _constant(answer: Any) -> Any:
    return lambda *args, **kwargs: answer


class _Driver:
    """Triton's driver for sm_90, as far as compiling asks it."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", 90, 32)
        limits = dict(
            max_shared_mem=PROPERTIES.shared_memory_per_block_optin, max_num_regs=65536, multiprocessor_count=132,
            warpSize=32, sm_clock_rate=1980000, mem_clock_rate=3201000, mem_bus_width=6144,
        )  # fmt: skip
        self.utils = types.SimpleNamespace(get_device_properties=lambda device=0: limits)

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        import torch

        return torch.cuda


@contextlib.contextmanager
def generating_only(folder: Path) -> Iterator[None]:
    """Inductor writes its code to `folder` and does not load it, which would need the device."""
    from torch._inductor.graph import GraphLowering

    original = GraphLowering._compile_to_module_lines

    def write(self: Any, code: Any) -> types.ModuleType:
        module = types.ModuleType("generated")
        path = folder / f"{hashlib.sha256(code.value.encode()).hexdigest()[:16]}.py"
        path.write_text(code.value)
        module.__file__ = str(path)
        module.call = lambda args: None
        module.key = path.stem
        module.runner = None
        self.cache_key, self.cache_path, self.cache_linemap = path.stem, str(path), []
        return module

    GraphLowering._compile_to_module_lines = write
    try:
        yield
    finally:
        GraphLowering._compile_to_module_lines = original


def compile_kernels(source: str, path: str) -> list[dict[str, Any]]:
    """Compile every configuration of every Triton kernel in Inductor's code for sm_90.

    For each: kernel, warps, bytes of the cubin, bytes of shared memory, registers, and bytes of stack and local memory a thread.
    """
    from torch._inductor import async_compile

    loaded: dict[str, Any] = {}

    def load(self: Any, name: str, text: str, device_str: str = "cuda") -> Any:
        loaded[name] = async_compile._load_triton_kernel_from_source(name, text)
        return loaded[name]

    async_compile.AsyncCompile.triton = load
    async_compile.AsyncCompile.wait = lambda self, scope: None
    text = source.replace("torch._C._dynamo.guards._empty_strided_cuda", "None")
    exec(compile(text, path, "exec"), {"__name__": "generated", "__file__": path})
    found = []
    for name, kernel in loaded.items():
        kernel._precompile_worker()
        for result in kernel.compile_results:
            cubin = result.kernel.asm["cubin"]
            found.append({
                "kernel": name, "warps": result.config.num_warps, "cubin": len(cubin),
                "target": next(line for line in result.kernel.asm["ptx"].splitlines() if line.startswith(".target")),
                "shared": result.kernel.metadata.shared, **_usage(cubin),
            })  # fmt: skip
    return found


def _usage(cubin: bytes) -> dict[str, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
    usage = dict(part.split(":")[:2] for part in text.split() if part.startswith(("REG:", "STACK:", "LOCAL:")))
    return {key.lower(): int(value) for key, value in usage.items()}


if (_reason := why_not()) is None and os.environ.get("ZGRAPH_FAKE_H200") == "1":
    _install()
