"""DeepSpeed's tiled layers, which are refused: a pass divides products here."""

from zgraph.deepspeed.zero import TiledLinear, TiledLinearReturnBias

__all__ = ["TiledLinear", "TiledLinearReturnBias"]
