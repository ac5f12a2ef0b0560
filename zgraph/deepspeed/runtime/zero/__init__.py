"""DeepSpeed's `runtime.zero`, where scripts import its helpers from."""

from zgraph.deepspeed.zero import GatheredParameters, Init, register_external_parameter

__all__ = ["GatheredParameters", "Init", "register_external_parameter"]
