"""The Hugging Face interface: transformers' Trainer on compiled steps.

trainer = zgraph.hf.attach(Trainer(model, arguments, …), zgraph.Plan(zero=3))
trainer.train()

`Trainer` and `TrainingArguments` are loaded, and transformers with them, at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zgraph.hf.attach import attach

if TYPE_CHECKING:
    from zgraph.hf.drop_in import Trainer, TrainingArguments

__all__ = ["Trainer", "TrainingArguments", "attach"]


def __getattr__(name: str) -> Any:
    if name in ("Trainer", "TrainingArguments"):
        from zgraph.hf import drop_in

        return getattr(drop_in, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
