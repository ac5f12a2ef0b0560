"""zgraph: a compiler for training steps.

    import zgraph

    model = zgraph.compile(model, zgraph.Plan(mesh={"dp": 8}, zero=3))

Names are loaded at first use (PEP 562): `import zgraph` loads neither torch nor pydantic, so the command line
answers at once. The modules behind `zgraph.compile` and `zgraph.verify` are named otherwise (`compiler`,
`verification`): importing a submodule of the same name would replace the function by the module.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from zgraph import errors
from zgraph._version import __version__

if TYPE_CHECKING:
    from zgraph.calibration import calibrate
    from zgraph.compiler import compile
    from zgraph.elasticity import Elastic
    from zgraph.loss_scaling import LossScale
    from zgraph.optimizers import LAMB, SGD, Adagrad, Adam, AdamW, AdamW8bit, Lion, Muon, ParamGroup
    from zgraph.plan import Plan
    from zgraph.precision import Precision
    from zgraph.schedules import (
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
    from zgraph.training import EMA, GradClip
    from zgraph.verification import verify
    from zgraph.watching import Watch

__all__ = [
    "EMA",
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "AdamW8bit",
    "Constant",
    "Cosine",
    "Elastic",
    "GradClip",
    "LRRangeTest",
    "Linear",
    "Lion",
    "LossScale",
    "Muon",
    "OneCycle",
    "ParamGroup",
    "PerRank",
    "Plan",
    "Precision",
    "TorchSchedule",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "Watch",
    "__version__",
    "calibrate",
    "compile",
    "errors",
    "verify",
]

_OPTIMIZERS = ("Adam", "AdamW", "AdamW8bit", "Adagrad", "LAMB", "Lion", "Muon", "ParamGroup", "SGD")
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
    "EMA": "zgraph.training",
    "Elastic": "zgraph.elasticity",
    "GradClip": "zgraph.training",
    "LossScale": "zgraph.loss_scaling",
    "PerRank": "zgraph.checkpoint.values",
    "Plan": "zgraph.plan",
    "Precision": "zgraph.precision",
    "Watch": "zgraph.watching",
    "calibrate": "zgraph.calibration",
    "compile": "zgraph.compiler",
    "verify": "zgraph.verification",
    **dict.fromkeys(_OPTIMIZERS, "zgraph.optimizers"),
    **dict.fromkeys(_SCHEDULES, "zgraph.schedules"),
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = globals()[name] = getattr(import_module(_LAZY[name]), name)
        return value
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")  # (a module of zgraph's needs no import of its own)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
