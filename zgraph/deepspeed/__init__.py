"""DeepSpeed's front door: its configuration as a plan, and its calls on compiled models.

    import zgraph.deepspeed as deepspeed

    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config="ds_config.json", training_data=data)

A configuration is taken without torch; what needs torch is loaded at first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zgraph.deepspeed.config import communication, elastic, offloading, publishing
from zgraph.deepspeed.translate import plan, report, usual_world

if TYPE_CHECKING:
    from zgraph.deepspeed import accelerator, checkpointing, comm, ops, pipe, runtime, utils, zero
    from zgraph.deepspeed.arguments import add_config_arguments
    from zgraph.deepspeed.comm import init_distributed
    from zgraph.deepspeed.engine import DeepSpeedEngine
    from zgraph.deepspeed.initialization import initialize
    from zgraph.deepspeed.pipe.engine import PipelineEngine
    from zgraph.deepspeed.pipe.module import PipelineModule

__all__ = [
    "DeepSpeedEngine",
    "PipelineEngine",
    "PipelineModule",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "communication",
    "elastic",
    "init_distributed",
    "initialize",
    "offloading",
    "ops",
    "pipe",
    "plan",
    "publishing",
    "report",
    "runtime",
    "usual_world",
    "utils",
    "zero",
]

_NAMES = {
    "DeepSpeedEngine": "zgraph.deepspeed.engine",
    "PipelineEngine": "zgraph.deepspeed.pipe.engine",
    "PipelineModule": "zgraph.deepspeed.pipe.module",
    "add_config_arguments": "zgraph.deepspeed.arguments",
    "init_distributed": "zgraph.deepspeed.comm",
    "initialize": "zgraph.deepspeed.initialization",
}
_MODULES = ("accelerator", "checkpointing", "comm", "ops", "pipe", "runtime", "utils", "zero")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name in _NAMES:
        value = globals()[name] = getattr(import_module(_NAMES[name]), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
