"""TRL's trainers on a small Llama, as a user would call them: plain (over DDP on several ranks) or attached to a plan."""

from __future__ import annotations

import importlib
import random
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from trainers import EAGER, WORDS, adapted, as_launched, model_of

import zgraph


def tokenizer() -> Any:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, "w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", unk_token="w1", eos_token="w2")


def rows(kind: str, count: int) -> Any:
    """Texts of 4 to 20 words; pairs of answers; prompts."""
    from datasets import Dataset

    draw = random.Random(count)

    def text(least: int, most: int) -> str:
        return " ".join(f"w{draw.randrange(3, WORDS)}" for _ in range(draw.randint(least, most)))

    if kind == "kto":
        made = [{"prompt": text(3, 6), "completion": " " + text(2, 9), "label": at % 2 == 0} for at in range(count)]
    elif kind in ("dpo", "reward", "orpo", "cpo"):
        made = [{"prompt": text(3, 6), "chosen": " " + text(2, 9), "rejected": " " + text(2, 9)} for _ in range(count)]
    elif kind == "sdft":
        made = [{"prompt": text(3, 6), "privileged_context": text(3, 6)} for _ in range(count)]
    elif kind in ("grpo", "rloo", "distillation"):
        made = [{"prompt": text(3, 6)} for _ in range(count)]
    elif kind == "sft, completions":
        made = [{"prompt": text(3, 6), "completion": " " + text(2, 9)} for _ in range(count)]
    else:
        made = [{"text": text(4, 20)} for _ in range(count)]
    return Dataset.from_list(made)


def reward(completion_ids: list[list[int]], **rest: Any) -> list[float]:
    """How many of a completion's tokens are even."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def trainer_of(kind: str, folder: str, adapter: str | None = None, **options: Any) -> Any:
    import trl
    from safetensors.torch import save_model

    given = {
        "output_dir": folder,
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "bf16": False,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        **options,
    }
    model = model_of("llama") if adapter is None else adapted("llama", adapter)
    if kind == "reward":
        import transformers

        model.config.num_labels = 1
        model = transformers.LlamaForSequenceClassification(model.config)
    if (
        options.get("beta", kind == "rloo") or kind == "sdft"
    ) and adapter is None:  # (TRL loads the reference from there)
        origin = tempfile.mkdtemp(dir=Path(folder).parent)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(origin)
        save_model(model, f"{origin}/model.safetensors")  # (`save_pretrained` writes weights on one rank alone)
        model = type(model).from_pretrained(origin)
    data, words = rows(kind, 24), tokenizer()
    if kind == "distillation":
        teacher = model_of("llama")
        with torch.no_grad():
            for param in teacher.parameters():
                param.mul_(2.0)
        args = trl.DistillationConfig(**{"max_completion_length": 5, **given})
        return trl.DistillationTrainer(model, teacher, args=args, train_dataset=data, processing_class=words)
    if kind == "sdft":
        from trl.experimental.sdft import SDFTConfig, SDFTTrainer

        args = SDFTConfig(
            **{
                "num_generations": 2,
                "max_completion_length": 5,
                "teacher_model_kind": "ema",
                "distillation_topk": 9,
                **given,
            }
        )
        return SDFTTrainer(model, args=args, train_dataset=data, processing_class=words)
    if kind == "dpo":
        like = model_of("llama") if adapter is None else None  # (an adapter is switched off for the reference)
        args = trl.DPOConfig(**given)
        return trl.DPOTrainer(model, like, args=args, train_dataset=data, processing_class=words)
    if kind == "grpo":
        given = {"num_generations": 2, "max_completion_length": 5, **given}
        args = trl.GRPOConfig(**given)
        return trl.GRPOTrainer(model, reward, args=args, train_dataset=data, processing_class=words)
    if kind == "rloo":
        args = trl.RLOOConfig(**{"num_generations": 2, "max_completion_length": 5, **given})
        return trl.RLOOTrainer(model, reward, args=args, train_dataset=data, processing_class=words)
    if kind == "kto":
        like = model_of("llama") if adapter is None else None
        args = trl.KTOConfig(**given)
        return trl.KTOTrainer(model, like, args=args, train_dataset=data, processing_class=words)
    if kind in ("orpo", "cpo"):
        module = importlib.import_module(f"trl.experimental.{kind}")
        args = getattr(module, f"{kind.upper()}Config")(**given)
        return getattr(module, f"{kind.upper()}Trainer")(model, args=args, train_dataset=data, processing_class=words)
    if kind == "reward":
        args = trl.RewardConfig(**given)
        return trl.RewardTrainer(model, args=args, train_dataset=data, processing_class=words)
    return trl.SFTTrainer(model, args=trl.SFTConfig(**given), train_dataset=data, processing_class=words)


def trained(
    kind: str,
    folder: str,
    plan: dict[str, Any] | None,
    adapter: str | None,
    options: dict[str, Any],
    resume: str | None = None,
) -> Any:
    """What a run logged, but for times; and how many programs were made."""
    warnings.filterwarnings("ignore")
    with as_launched():
        trainer = trainer_of(kind, folder, adapter, **options)
        if plan is not None:
            zgraph.hf.attach(trainer, zgraph.Plan(**{**EAGER, **plan}))
        trainer.train(resume_from_checkpoint=resume)
        logs = [
            {k: float(v) for k, v in entry.items() if "time" not in k and "per_second" not in k and "runtime" not in k}
            for entry in trainer.state.log_history[:-1]
        ]
        return logs, len(trainer.model.zgraph.programs) if plan is not None else 0
