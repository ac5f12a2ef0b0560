"""DeepSpeed's `runtime.activation_checkpointing`: its module is the package's `checkpointing`."""

from zgraph.deepspeed.runtime.activation_checkpointing import checkpointing

__all__ = ["checkpointing"]
