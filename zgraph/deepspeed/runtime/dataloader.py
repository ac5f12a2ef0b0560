"""DeepSpeed's loaders, where scripts import them from."""

from zgraph.deepspeed.dataloader import DeepSpeedDataLoader, RepeatingLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
