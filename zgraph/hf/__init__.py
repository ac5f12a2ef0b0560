"""The Hugging Face interface: transformers' Trainer on compiled steps.

trainer = zgraph.hf.attach(Trainer(model, arguments, …), zgraph.Plan(zero=3))
trainer.train()
"""

from __future__ import annotations

from zgraph.hf.attach import attach

__all__ = ["attach"]
