"""DeepSpeed's `checkpoint`, from which scripts import a helper. (`zgraph.checkpoint` reads and writes checkpoints.)"""

from zgraph.deepspeed.checkpoint import utils

__all__ = ["utils"]
