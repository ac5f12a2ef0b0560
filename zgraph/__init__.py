"""zgraph: a compiler for training steps.

    import zgraph

    model = zgraph.compile(model, zgraph.Plan(mesh={"dp": 8}, zero=3))

Names are loaded at first use (PEP 562): `import zgraph` loads neither torch nor pydantic, so the command line
answers at once. No module at the top of the package is named as a function is: importing it would replace the function.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from zgraph import errors
from zgraph._version import __version__

if TYPE_CHECKING:
    from zgraph.api.calibration import calibrate
    from zgraph.api.compiler import compile
    from zgraph.api.full_state_dict import full_state_dict
    from zgraph.api.full_weights import full_weights
    from zgraph.api.load_pretrained import load_pretrained
    from zgraph.api.sparse_attention import sparse_attention
    from zgraph.api.stream_weights import stream_weights
    from zgraph.api.verify import verify
    from zgraph.build.planned_step import programs
    from zgraph.plan.attention import (
        BigBird,
        BlockLayout,
        Dense,
        Fixed,
        LocalWindow,
        Longformer,
        MaskFunction,
        SlidingWindow,
        Variable,
    )
    from zgraph.plan.clipping_and_ema import EMA, GradClip
    from zgraph.plan.elasticity import Elastic
    from zgraph.plan.local_steps import LocalSteps
    from zgraph.plan.loss_scaling import LossScale
    from zgraph.plan.lr_schedules import (
        Constant,
        Cosine,
        Linear,
        LRRangeTest,
        OneCycle,
        TorchSchedule,
        WarmupCosineLR,
        WarmupDecayLR,
        WarmupLR,
    )
    from zgraph.plan.optimizers import (
        LAMB,
        SGD,
        Adagrad,
        Adam,
        AdamW,
        AdamW8bit,
        Lion,
        Muon,
        OneBitAdam,
        OneBitLAMB,
        ParamGroup,
        ZeroOneAdam,
    )
    from zgraph.plan.plan import Plan
    from zgraph.plan.precision import Precision
    from zgraph.plan.shapes import Size
    from zgraph.plan.watchdog import Watch

__all__ = [
    "EMA",
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "AdamW8bit",
    "BigBird",
    "BlockLayout",
    "Constant",
    "Cosine",
    "Dense",
    "Elastic",
    "Fixed",
    "GradClip",
    "LRRangeTest",
    "Linear",
    "Lion",
    "LocalSteps",
    "LocalWindow",
    "Longformer",
    "LossScale",
    "MaskFunction",
    "Muon",
    "OneBitAdam",
    "OneBitLAMB",
    "OneCycle",
    "ParamGroup",
    "PerRank",
    "Plan",
    "Precision",
    "Size",
    "SlidingWindow",
    "TorchSchedule",
    "Variable",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "Watch",
    "ZeroOneAdam",
    "__version__",
    "calibrate",
    "compile",
    "errors",
    "full_state_dict",
    "full_weights",
    "load_pretrained",
    "programs",
    "sparse_attention",
    "stream_weights",
    "verify",
]

_OPTIMIZERS = (
    "Adam",
    "AdamW",
    "AdamW8bit",
    "Adagrad",
    "LAMB",
    "Lion",
    "Muon",
    "OneBitAdam",
    "OneBitLAMB",
    "ParamGroup",
    "SGD",
    "ZeroOneAdam",
)
_SPARSITIES = (
    "BigBird",
    "BlockLayout",
    "Dense",
    "Fixed",
    "LocalWindow",
    "Longformer",
    "MaskFunction",
    "SlidingWindow",
    "Variable",
)
_SCHEDULES = (
    "Constant",
    "Cosine",
    "LRRangeTest",
    "Linear",
    "OneCycle",
    "TorchSchedule",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
)
_LAZY = {
    "EMA": "zgraph.plan.clipping_and_ema",
    "Elastic": "zgraph.plan.elasticity",
    "GradClip": "zgraph.plan.clipping_and_ema",
    "LocalSteps": "zgraph.plan.local_steps",
    "LossScale": "zgraph.plan.loss_scaling",
    "PerRank": "zgraph.checkpoint.user_values",
    "Plan": "zgraph.plan.plan",
    "Precision": "zgraph.plan.precision",
    "Size": "zgraph.plan.shapes",
    "Watch": "zgraph.plan.watchdog",
    "calibrate": "zgraph.api.calibration",
    "compile": "zgraph.api.compiler",
    "full_state_dict": "zgraph.api.full_state_dict",
    "full_weights": "zgraph.api.full_weights",
    "load_pretrained": "zgraph.api.load_pretrained",
    "programs": "zgraph.build.planned_step",
    "sparse_attention": "zgraph.api.sparse_attention",
    "stream_weights": "zgraph.api.stream_weights",
    "verify": "zgraph.api.verify",
    **dict.fromkeys(_OPTIMIZERS, "zgraph.plan.optimizers"),
    **dict.fromkeys(_SPARSITIES, "zgraph.plan.attention"),
    **dict.fromkeys(_SCHEDULES, "zgraph.plan.lr_schedules"),
}


# Modules that were at the top of the package before, by the names that documents use.
_MODULES = {"allocations": "zgraph.runtime.allocations", "symbolic": "zgraph.forecast.make_symbolic_forecast"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name in _LAZY:
        value = globals()[name] = getattr(import_module(_LAZY[name]), name)
        return value
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")  # (a module of zgraph's needs no import of its own)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
