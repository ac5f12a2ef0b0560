"""`Trainer` and `TrainingArguments` in the place of transformers' own: a script that has a DeepSpeed file changes one import."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

import transformers

from zgraph.errors import PlanError
from zgraph.hf.attach import attach
from zgraph.plan.plan import Plan


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """transformers' `TrainingArguments` with a field `plan`: a `Plan` (or a dict of its fields), or the path of its file.

    `deepspeed=` is read by zgraph: its dict or path becomes `plan`, with "auto" as transformers fills it, and `deepspeed` is None then.
    Raises `PlanError` if both are given. With a Trainer that is not attached to the plan, training raises `PlanError`.
    """

    plan: dict[str, Any] | str | None = field(  # what it is trained by
        default=None,
        metadata={"help": "The plan to train by: the path of its file, or of a DeepSpeed configuration, or a dict."},
    )

    def __post_init__(self) -> None:
        given: Any = self.plan
        file, self.deepspeed = vars(self)["deepspeed"], None
        if file:
            if given:
                raise PlanError(
                    "deepspeed and plan of TrainingArguments both say how to train",
                    where="plan",
                    hint="leave one of them out",
                )
            given = file
        if isinstance(given, Plan):
            given = given.model_dump(mode="json")
        elif isinstance(given, str) and given.lstrip().startswith("{"):
            given = json.loads(given)  # (as transformers reads dicts on the command line)
        elif isinstance(given, os.PathLike):
            given = os.fspath(given)
        self.plan = given
        super().__post_init__()

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Return the number of warm-up steps, which a Trainer asks for when it begins to train."""
        if self.plan is not None and not getattr(self, "attached_by_zgraph", False):
            raise PlanError(
                "the TrainingArguments have a plan, and the Trainer would train without it",
                where="plan",
                why="it is transformers' own, and is not attached",
                hint="from zgraph.hf import Trainer; or zgraph.hf.attach(trainer), for a Trainer of another class",
            )
        return int(super().get_warmup_steps(num_training_steps))


class _Attaches(type):
    """The type of `Trainer`: it attaches a trainer once its constructor, which may be a subclass's, is through."""

    def __call__(cls, *args: Any, plan: Any = None, **kwargs: Any) -> Any:
        trainer = super().__call__(*args, **kwargs)
        if plan is None and getattr(trainer.args, "plan", None) is None:
            plan = Plan()
        return attach(trainer, plan)


class Trainer(transformers.Trainer, metaclass=_Attaches):
    """transformers' Trainer, attached to a plan when it is made: see `attach`.

    The plan is the argument `plan`, else that of `TrainingArguments`, else `zgraph.Plan()`.
    """
