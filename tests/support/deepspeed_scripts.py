"""Scripts for DeepSpeed on ranks, by DeepSpeed itself or by zgraph's front door: the same source, with another import.

DeepSpeed is made ready for ranks of a test: torch's variables are set, its C++ extensions, which compile for minutes, are replaced by what torch has
(AdamW is torch's own, offloading is left out), and nothing else. zgraph runs its eager backend, unless a test says otherwise.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import os
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

EXAMPLES = Path(__file__).parents[2] / "examples" / "deepspeed"


def ready() -> Any:
    """DeepSpeed itself."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "DS_ACCELERATOR": "cpu"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    import deepspeed

    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.utils.groups.mpu = (
        None  # (a pipeline leaves its ranks behind, for which the next engine would take its own)
    )
    # (it asks for fast kernels; torch has slow ones)
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    return deepspeed


def of_torch(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration without what DeepSpeed would compile C++ for."""
    config = copy.deepcopy(config)
    optimizer = config.get("optimizer", {})
    if optimizer.get("type", "").lower() in ("adam", "adamw"):
        params = optimizer.setdefault("params", {})
        if "torch_adam" not in params:  # (whose default weight decay is another than that of DeepSpeed's own)
            params |= {"torch_adam": True, "weight_decay": params.get("weight_decay", 0.0)}
    for key in ("offload_optimizer", "offload_param"):
        config.get("zero_optimization", {}).pop(key, None)
    config.pop("zgraph", None)
    return config


def eager(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration for zgraph's eager backend."""
    return {"zgraph": {"backend": "eager"}, **copy.deepcopy(config)}


@contextlib.contextmanager
def initializing(module: Any, change: Any) -> Iterator[None]:
    """Inside, `module.initialize` has its configuration changed. (Behind it linear layers are torch's again, which DeepSpeed's stage 3 replaces for
    the process.)"""
    original, linear = module.initialize, torch.nn.functional.linear

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.pop("args", None)
        path = getattr(given, "deepspeed_config", None)
        if path is not None:
            import json

            kwargs["config"] = json.loads(Path(path).read_text())
            given.deepspeed_config = None
        return original(*args, args=given, **{**kwargs, "config": change(kwargs["config"])})

    module.initialize = initialize
    try:
        yield
    finally:
        module.initialize, torch.nn.functional.linear = original, linear


def system_of(name: str) -> tuple[Any, Any]:
    """(a system's module, how its configurations are changed)."""
    return (ready(), of_torch) if name == "deepspeed" else (importlib.import_module("zgraph.deepspeed"), eager)


def script(name: str, system: str) -> tuple[types.ModuleType, Any, Any]:
    """(an example as a module, the system that it imports, how its configurations are changed)."""
    path = EXAMPLES / f"{name}.py"
    source = path.read_text()
    system_module, change = system_of(system)
    if system == "deepspeed":
        source = source.replace("import zgraph.deepspeed as deepspeed", "import deepspeed")
        source = source.replace("from zgraph.deepspeed", "from deepspeed")
    folder = tempfile.mkdtemp()  # (a file: processes that load data import it)
    Path(folder, f"{name}_by_{system}.py").write_text(source)
    sys.path.insert(0, folder)
    return importlib.import_module(f"{name}_by_{system}"), system_module, change


def run(name: str, system: str, *args: Any) -> list[float]:
    """What an example's `main` returns."""
    module, system_module, change = script(name, system)
    with initializing(system_module, change):
        return module.main(*args)


def run_in_bf16(name: str, system: str, *args: Any) -> list[float]:
    """What an example's `main` returns whose models are bf16, and get rows in bf16."""
    module, system_module, change = script(name, system)
    with (
        rows_in_bf16(system_module),
        initializing(system_module, lambda given: change(given) | {"bf16": {"enabled": True}}),
    ):
        return module.main(*args)


def run_in_bf16_with_torchs_linear(name: str, system: str, *args: Any) -> list[float]:
    """The same, where linear layers round as torch's do by either system."""
    with torchs_linear() if system == "deepspeed" else contextlib.nullcontext():
        return run_in_bf16(name, system, *args)


@contextlib.contextmanager
def torchs_linear() -> Iterator[None]:
    """Inside, DeepSpeed's linear layers, which it replaces for the process at ZeRO stage 3, add the bias before the product is rounded, as
    torch does, not after."""
    ready()
    parameters = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
    linear, functional = parameters.zero3_linear_wrap, torch.nn.functional
    present = functional.linear
    plain = getattr(parameters.InsertPostInitMethodToModuleSubClasses, "linear_bk", present)
    parameters.zero3_linear_wrap = functional.linear = plain
    try:
        yield
    finally:
        parameters.zero3_linear_wrap, functional.linear = linear, present


@contextlib.contextmanager
def rows_in_bf16(system: Any) -> Iterator[None]:
    """Inside, engines cast floating-point rows, which a script for bf16 does itself, and outputs back. (Those of pipelines don't: it
    would be what stages send each other.)"""
    engine, pipeline = system.DeepSpeedEngine, system.PipelineEngine
    original = engine.forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, pipeline):
            return original(self, *args, **kwargs)
        cast = [a.bfloat16() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
        return original(self, *cast, **kwargs).float()

    engine.forward = forward
    try:
        yield
    finally:
        engine.forward = original
