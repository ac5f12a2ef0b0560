"""The DeepSpeed interface: its configuration as a plan, and its calls on compiled models.

    import zgraph.deepspeed as deepspeed

    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config="ds_config.json", training_data=data)

Configurations are translated without torch; names that need torch are loaded at first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zgraph.deepspeed.config_sections import communication, elastic, offloading, publishing
from zgraph.deepspeed.translate import plan, report, usual_world

if TYPE_CHECKING:
    from zgraph.deepspeed import accelerator, checkpoint, checkpointing, comm, ops, pipe, runtime, utils, zero
    from zgraph.deepspeed import comm as dist
    from zgraph.deepspeed.accelerator import get_accelerator
    from zgraph.deepspeed.arguments import add_config_arguments
    from zgraph.deepspeed.comm import init_distributed
    from zgraph.deepspeed.engine import DeepSpeedEngine
    from zgraph.deepspeed.initialization import initialize
    from zgraph.deepspeed.on_device import OnDevice, init_inference, tp_model_init
    from zgraph.deepspeed.pipe.engine import PipelineEngine
    from zgraph.deepspeed.pipe.module import PipelineModule
    from zgraph.deepspeed.runtime.base_optimizer import DeepSpeedOptimizer, ZeROOptimizer
    from zgraph.deepspeed.runtime.config import DeepSpeedConfigError
    from zgraph.deepspeed.utils.logging import log_dist, logger

__all__ = [
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "DeepSpeedOptimizer",
    "OnDevice",
    "PipelineEngine",
    "PipelineModule",
    "ZeROOptimizer",
    "accelerator",
    "add_config_arguments",
    "checkpoint",
    "checkpointing",
    "comm",
    "communication",
    "dist",
    "elastic",
    "get_accelerator",
    "init_distributed",
    "init_inference",
    "initialize",
    "log_dist",
    "logger",
    "offloading",
    "ops",
    "pipe",
    "plan",
    "publishing",
    "report",
    "runtime",
    "tp_model_init",
    "usual_world",
    "utils",
    "zero",
]

__version__ = version = "0.19.8"  # of the DeepSpeed whose interface this is
__version_major__, __version_minor__, __version_patch__ = 0, 19, 8
__git_hash__ = __git_branch__ = None

_NAMES = {
    "DeepSpeedConfigError": "zgraph.deepspeed.runtime.config",
    "DeepSpeedOptimizer": "zgraph.deepspeed.runtime.base_optimizer",
    "OnDevice": "zgraph.deepspeed.on_device",
    "ZeROOptimizer": "zgraph.deepspeed.runtime.base_optimizer",
    "get_accelerator": "zgraph.deepspeed.accelerator",
    "init_inference": "zgraph.deepspeed.on_device",
    "log_dist": "zgraph.deepspeed.utils.logging",
    "logger": "zgraph.deepspeed.utils.logging",
    "tp_model_init": "zgraph.deepspeed.on_device",
    "DeepSpeedEngine": "zgraph.deepspeed.engine",
    "PipelineEngine": "zgraph.deepspeed.pipe.engine",
    "PipelineModule": "zgraph.deepspeed.pipe.module",
    "add_config_arguments": "zgraph.deepspeed.arguments",
    "init_distributed": "zgraph.deepspeed.comm",
    "initialize": "zgraph.deepspeed.initialization",
}
_MODULES = ("accelerator", "checkpoint", "checkpointing", "comm", "ops", "pipe", "runtime", "utils", "zero")


# What DeepSpeed has and a script may ask for, and what to do without it.
_ABSENT = {
    **dict.fromkeys(
        ("moe", "InferenceEngine", "inference", "module_inject"), "zgraph compiles training steps of dense models"
    ),
    **dict.fromkeys(
        ("DeepSpeedHybridEngine", "DeepSpeedInferenceConfig"), "generate with the model that save_16bit_model writes"
    ),
    **dict.fromkeys(("DeepSpeedTransformerLayer", "DeepSpeedTransformerConfig"), "a layer of torch's is compiled"),
    **dict.fromkeys(
        ("DualPipeVModule", "DualPipeVEngine"), 'the schedule of a plan: "zgraph": {"schedule": "dualpipev"}'
    ),
    "sequence": '"sequence_parallel_size" in the configuration divides any attention',
    "linear": "LoRA is PEFT's, in a compiled model",
    "autotuning": "zgraph plan --search tries plans",
    "elasticity": 'the section "elasticity" of the configuration, or zgraph.Elastic',
    "DeepSpeedConfig": "zgraph.deepspeed.plan(config, world=N) gives the plan and the report",
    "set_autotp_mode": '"tensor_parallel": {"autotp_size": N} in the configuration',
}


def __getattr__(name: str) -> Any:
    if name == "dist":
        return import_module(f"{__name__}.comm")
    if name in _ABSENT:
        raise AttributeError(f"zgraph.deepspeed has no {name}, which DeepSpeed has: {_ABSENT[name]}")
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name in _NAMES:
        value = globals()[name] = getattr(import_module(_NAMES[name]), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
