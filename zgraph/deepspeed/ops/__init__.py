"""DeepSpeed's optimizers by name: what `initialize` takes for the plan's compiled update."""

from zgraph.deepspeed.ops import adagrad, adam, lamb, lion

__all__ = ["adagrad", "adam", "lamb", "lion"]
