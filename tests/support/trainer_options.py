"""Options of transformers' Trainer that change its loaders, optimizers, schedules, evaluations and files: each a case that a plain and an attached
Trainer run alike."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from trainers import EAGER, ONE, VARYING, as_launched, history, trainer_of

import zgraph


def train(trainer: Any, folder: str) -> float:
    return float(trainer.train().training_loss)


class Case(NamedTuple):
    """A Trainer, and what is done with it."""

    options: Mapping[str, Any] = MappingProxyType({})  # of `trainer_of`
    change: Callable[[Any], None] | None = None  # what the script does to the trainer before it is attached
    act: Callable[[Any, str], Any] = train  # what it does with the trainer, and what it finds
    kind: str = "gpt2"  # of the model


def run(name: str, folder: str, attached: bool) -> tuple[list[dict[str, float]], Any]:
    """What a case logs, and what it finds."""
    case = CASES[name]
    with as_launched():
        torch.manual_seed(3)
        usual = {"lengths": ONE, "eval_strategy": "no", "save_strategy": "no", "steps": 5}
        trainer = trainer_of(case.kind, folder, **{**usual, **case.options})
        if case.change is not None:
            case.change(trainer)
        if attached:
            zgraph.hf.attach(trainer, zgraph.Plan(**EAGER, zero=3))
        torch.manual_seed(5)
        found = case.act(trainer, folder)
        return history(trainer), found


# -- rows ---------------------------------------------------------------------------------------------------------------
class Stream(torch.utils.data.IterableDataset):
    """Rows without a length."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter([self.rows[at] for at in range(len(self.rows))])


def streamed(trainer: Any) -> None:
    trainer.train_dataset = Stream(trainer.train_dataset)


def streamed_evaluation(trainer: Any) -> None:
    trainer.eval_dataset = Stream(trainer.eval_dataset)


def more_columns(trainer: Any) -> None:
    """Rows have columns that the model does not take."""
    import datasets

    rows = [{**row, "text": "x" * at, "id": at} for at, row in enumerate(trainer.train_dataset.rows)]
    trainer.train_dataset = datasets.Dataset.from_list(rows)


def weighted_rows(trainer: Any) -> None:
    """A collator that makes a weight of a column, and a loss that takes it."""
    more_columns(trainer)
    collate = trainer.data_collator

    def weighted(rows: list[dict[str, Any]]) -> dict[str, Any]:
        weights = torch.tensor([1.0 + row["id"] for row in rows])
        return {**collate([{k: v for k, v in r.items() if k not in ("text", "id")} for r in rows]), "weights": weights}

    class Weighted(type(trainer)):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            weights = inputs.pop("weights")
            outputs, labels = model(**inputs), inputs["labels"][:, 1:]
            each = nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="none")
            loss = (each.view(labels.shape).mean(1) * weights).sum() / weights.sum()
            return (loss, outputs) if return_outputs else loss

    trainer.data_collator, trainer.__class__ = weighted, Weighted


def in_order(trainer: Any) -> None:
    class InOrder(type(trainer)):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    trainer.__class__ = InOrder


def own_loader(trainer: Any) -> None:
    class Drawn(type(trainer)):
        def get_train_dataloader(self) -> Any:
            draw = torch.utils.data.WeightedRandomSampler(
                torch.ones(28), 24, generator=torch.Generator().manual_seed(1)
            )
            loader = torch.utils.data.DataLoader(
                self.train_dataset, batch_size=3, collate_fn=self.data_collator, sampler=draw
            )
            return self.accelerator.prepare(loader)

    trainer.__class__ = Drawn


# -- optimizers and schedules -------------------------------------------------------------------------------------------
def two_groups(trainer: Any) -> None:
    """An optimizer whose first group is not that of the model's first parameter."""
    norms = [p for n, p in trainer.model.named_parameters() if "ln" in n]
    rest = [p for n, p in trainer.model.named_parameters() if "ln" not in n]
    groups = [{"params": norms, "lr": 1e-3, "weight_decay": 0.0}, {"params": rest, "lr": 5e-3}]
    trainer.optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.95))


def a_rate_for_each_group(trainer: Any) -> None:
    two_groups(trainer)

    class Each(type(trainer)):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            each = [lambda n: 0.5**n, lambda n: 1.0]
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, each)
            self._created_lr_scheduler = True
            return self.lr_scheduler

    trainer.__class__ = Each


def by_class(kind: type, **numbers: Any) -> Callable[[Any], None]:
    def change(trainer: Any) -> None:
        trainer.optimizer_cls_and_kwargs = (kind, numbers)

    return change


# -- steps that go wrong ------------------------------------------------------------------------------------------------
def out_of_memory(trainer: Any) -> None:
    """The third step of batches of more than two rows is out of memory."""

    class Full(type(trainer)):
        def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
            if len(inputs["input_ids"]) > 2 and self.state.global_step == 2:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(model, inputs, *rest)

    trainer.__class__ = Full


def spoiled(by: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    """The loss of one step is another."""

    def change(trainer: Any) -> None:
        class Spoiled(type(trainer)):
            def compute_loss(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
                loss = super().compute_loss(model, inputs, *rest, **more)
                return by(loss) if model.training and self.state.global_step == 2 else loss

        trainer.__class__ = Spoiled

    return change


# -- evaluations --------------------------------------------------------------------------------------------------------
def logits_of(predictions: Any) -> Any:
    return predictions[0] if isinstance(predictions, tuple) else predictions


def summed(trainer: Any) -> None:
    def metrics(found: Any) -> dict[str, float]:
        logits = np.asarray(logits_of(found.predictions), dtype=np.float64)
        return {"rows": len(logits), "sum": float(logits.sum())}

    trainer.compute_metrics = metrics


def summed_in_batches(trainer: Any) -> None:
    sums: list[torch.Tensor] = []

    def metrics(found: Any, compute_result: bool = False) -> Any:
        sums.append(logits_of(found.predictions).double().sum())
        if compute_result:
            total = {"batches": len(sums), "sum": float(sum(sums))}
            sums.clear()
            return total
        return None

    trainer.compute_metrics = metrics


def counted_batches(trainer: Any) -> None:
    trainer.compute_metrics = lambda found: {"batches": len(found.predictions)}


def evaluated(trainer: Any, folder: str) -> list[float]:
    loss = train(trainer, folder)
    whole = trainer.predict(trainer.eval_dataset)
    return [loss, trainer.evaluate()["eval_loss"], float(logits_of(whole.predictions).sum())]


# -- files --------------------------------------------------------------------------------------------------------------
def checkpoints(trainer: Any, folder: str) -> list[int]:
    trainer.train()
    return sorted(int(name.removeprefix("checkpoint-")) for name in os.listdir(folder))


def resumed(trainer: Any, folder: str) -> float:
    """Go on in the middle of an epoch."""
    trainer.train()
    trainer.args.max_steps = 8
    return float(trainer.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-4")).training_loss)


def trained_again(trainer: Any, folder: str) -> float:
    """Go on from the best weights, with the optimizer's states of the last step."""
    trainer.train()
    trainer.args.max_steps = 9
    return train(trainer, folder)


EACH_2 = {"eval_strategy": "steps", "eval_steps": 2}
SAVED = {"save_strategy": "steps", "save_steps": 2}
EPOCHS = {"steps": -1, "num_train_epochs": 2.0, "eval_strategy": "epoch"}
WORKERS = {"dataloader_num_workers": 1}

CASES = {
    "loaders with workers that persist": Case(
        {**WORKERS, "dataloader_persistent_workers": True, "dataloader_prefetch_factor": 3, **EACH_2}
    ),
    "epochs with a last batch of other rows": Case({**EPOCHS, "rows": 13, "save_strategy": "epoch"}),
    "epochs with a last step of fewer batches": Case({**EPOCHS, "rows": 23, "gradient_accumulation_steps": 3}),
    "the same, averaged by rank": Case(
        {**EPOCHS, "rows": 23, "gradient_accumulation_steps": 3, "average_tokens_across_devices": False}
    ),
    "a half epoch": Case({"steps": -1, "num_train_epochs": 0.5}),
    "rows without a length, begun anew": Case({"rows": 9, "steps": 7}, streamed),
    "rows without a length, of workers": Case(WORKERS, streamed),
    "rows without a length, sent by the first rank": Case({"accelerator_config": {"dispatch_batches": True}}, streamed),
    "evaluation rows without a length": Case(EACH_2, streamed_evaluation),
    "batches divided over the ranks": Case({"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": 4}),
    "no last batch": Case({**EPOCHS, "rows": 13, "dataloader_drop_last": True}),
    "columns that the model does not take": Case({}, more_columns),
    "columns that a loss of one's own takes": Case({"remove_unused_columns": False}, weighted_rows),
    "a sampler of one's own": Case({}, in_order),
    "a loader of one's own": Case({}, own_loader),
    "rows by their length": Case({"train_sampling_strategy": "group_by_length", "lengths": VARYING}),
    "a seed for the rows": Case({"data_seed": 7}),
    "an optimizer with groups": Case({}, two_groups),
    "a rate for each group": Case({}, a_rate_for_each_group),
    "AdamW by its class": Case({}, by_class(torch.optim.AdamW, lr=3e-3, betas=(0.7, 0.9), amsgrad=True)),
    "SGD by its class": Case({}, by_class(torch.optim.SGD, lr=3e-2, momentum=0.9, nesterov=True, weight_decay=0.1)),
    "Adam that goes up": Case({}, by_class(torch.optim.Adam, lr=3e-3, maximize=True)),
    "SGD with arguments": Case({"optim": "sgd", "optim_args": "momentum=0.9"}),
    "Adagrad": Case({"optim": "adagrad"}),
    "a rate with a plateau": Case(
        {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0}, "eval_strategy": "steps", "eval_steps": 1}
    ),
    "a rate in three phases": Case(
        {
            "lr_scheduler_type": "warmup_stable_decay",
            "warmup_steps": 1,
            "lr_scheduler_kwargs": {"num_decay_steps": 2, "num_stable_steps": 2},
        }
    ),
    "batches that are too large": Case({"auto_find_batch_size": True, "per_device_train_batch_size": 4}, out_of_memory),
    "a loss that is NaN": Case({}, spoiled(lambda loss: loss * float("nan"))),
    "a loss that is NaN, logged": Case({"logging_nan_inf_filter": False}, spoiled(lambda loss: loss * float("nan"))),
    "a loss that is infinite": Case({}, spoiled(lambda loss: loss + float("inf"))),
    "the best checkpoint alone": Case(
        {
            "save_strategy": "best",
            "metric_for_best_model": "eval_sum",
            "greater_is_better": True,
            "load_best_model_at_end": True,
            "save_total_limit": 1,
            **EACH_2,
        },
        summed,
        evaluated,
    ),
    "further steps from the best weights": Case(
        {
            **SAVED,
            **EACH_2,
            "steps": 6,
            "load_best_model_at_end": True,
            "metric_for_best_model": "eval_loss",
            "greater_is_better": True,
        },
        act=trained_again,
    ),
    "a resume from weights alone": Case({"save_only_model": True, **SAVED}, act=resumed),
    "two checkpoints": Case({"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}, act=checkpoints),
    "tokens counted": Case({"include_num_input_tokens_seen": "non_padding", "lengths": VARYING}),
    "DDP's arguments": Case({"ddp_find_unused_parameters": False, "ddp_bucket_cap_mb": 1, "ddp_broadcast_buffers": False}),
    "memory freed at each step": Case({"torch_empty_cache_steps": 1}),
    "an evaluation before the first step": Case({"eval_on_start": True, "eval_delay": 3, **EACH_2}),
    "metrics of batches": Case({"batch_eval_metrics": True, **EACH_2}, summed_in_batches),
    "metrics of batches that are not joined": Case({"eval_do_concat_batches": False, **EACH_2}, counted_batches),
    "metrics of objects": Case({"eval_use_gather_object": True, "eval_accumulation_steps": 1, **EACH_2}, summed),
    "metrics of rows of any length": Case({"lengths": VARYING, **EACH_2}, summed),
    "losses alone": Case({"prediction_loss_only": True, **EACH_2}),
    "noise in embeddings": Case({"neftune_noise_alpha": 5.0}, act=evaluated, kind="llama"),
    "every second layer computed again": Case(
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 2}}, kind="llama"
    ),
    "a resume in an epoch, with workers": Case({**WORKERS, **SAVED}, act=resumed),
    "a resume in an epoch, with its first rows": Case({"ignore_data_skip": True, **SAVED}, act=resumed),
    "a resume of rows without a length": Case(SAVED, streamed, resumed),
    "a resume of steps with several batches": Case({"gradient_accumulation_steps": 2, **SAVED}, act=resumed),
}  # fmt: skip
