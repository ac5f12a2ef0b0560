"""DeepSpeed's hooks for gathers, which are refused: gathers are in the compiled program here."""

from zgraph.deepspeed.zero import DeepSpeedZeRoOffload

__all__ = ["DeepSpeedZeRoOffload"]
