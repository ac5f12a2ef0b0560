"""Checks that refuse what a Trainer and its TrainingArguments can't be combined with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from zgraph.errors import ModelError, PlanError
from zgraph.plan.plan import Plan
from zgraph.runtime.compiled_models import is_compiled
from zgraph.torch_compat.private_names import refuse_release


def refuse_trainer(trainer: Any) -> None:
    """Raise `ModelError` for an object that is not a Trainer, or is one that `attach` does not support."""
    import transformers

    if not isinstance(trainer, transformers.Trainer):
        raise ModelError(
            f"{type(trainer).__name__} is no Trainer of transformers",
            hint="zgraph.hf.attach(Trainer(model, arguments, …), plan)",
        )
    if getattr(trainer, "attached_by_zgraph", False):
        raise ModelError(
            "the trainer is attached already",
            hint="trainer.model.zgraph.recompile(plan) changes its plan",
        )
    refuse_release("trainers")
    refuse_release("published models")
    _refuse_model(trainer)
    for callback in trainer.callback_handler.callbacks:
        if type(callback).__name__ == "PEFTAdapterEMACallback":  # (TRL's name)
            raise ModelError(
                "TRL adds an adapter for the teacher when training begins",
                where='teacher_model_kind="ema"',
                why="a compiled model has the parameters that it had when it was compiled",
                hint='teacher_model_kind="base" or "live"; or "ema" without an adapter',
            )


def _refuse_model(trainer: Any) -> None:
    model = trainer.model
    if trainer.model_init is not None:
        raise ModelError(
            "the trainer makes its model anew at each train() (model_init)",
            why="the new one would train without the plan",
            hint="give the Trainer the model itself",
        )
    if trainer.model_wrapped is not model or trainer.accelerator.unwrap_model(model) is not model:
        raise ModelError(
            f"the trainer's model is wrapped already, in {type(trainer.model_wrapped).__name__}",
            why="train() or another library has prepared it",
            hint="attach before train(), to a new Trainer with the plain model",
        )
    if type(model).__name__ == "OptimizedModule":
        raise ModelError(
            "the trainer's model is wrapped already, in OptimizedModule",
            why="torch.compile would stand around what attach compiles",
            hint="give the Trainer the model without torch.compile",
        )
    if is_compiled(model):
        raise ModelError(
            "the trainer's model is compiled already",
            why="its optimizer and clipping would be the plan's of that compile",
            hint="give the Trainer the plain model: attach compiles it",
        )


class _Refused(NamedTuple):
    argument: str  # the name of a TrainingArguments' field
    clashes: Callable[[Any], bool]  # returns whether the arguments ask for it
    why: str  # the reason, for the error
    hint: str  # what to do, for the error


_REFUSED = (
    _Refused(
        "torch_compile",
        lambda args: args.torch_compile,
        "the plan's compiler captures the model's whole step, and torch.compile would stand around it",
        "leave it out: attach compiles the model",
    ),
    _Refused(
        "deepspeed",
        lambda args: bool(args.deepspeed),
        "DeepSpeed's engine would train in the plan's place",
        "from zgraph.hf import TrainingArguments, whose field is read by zgraph; or leave it out, and give the same file to "
        "zgraph.hf.attach(trainer, file)",
    ),
    _Refused(
        "fsdp",
        lambda args: bool(args.fsdp),
        "FSDP would divide the weights that the plan divides",
        "leave it out: zero of the plan is 3 for the same division",
    ),
    _Refused(
        "n_gpu",
        lambda args: args.n_gpu > 1,
        "one process has several GPUs, over which transformers' DataParallel would copy the model",
        "start a process for each GPU: torchrun --nproc-per-node N, or zgraph launch",
    ),
    _Refused(
        "bf16_full_eval",
        lambda args: args.bf16_full_eval,
        "it casts the weights for good, and these are divided over the ranks",
        "leave it out: bf16=True evaluates in bfloat16 as well",
    ),
    _Refused(
        "fp16_full_eval",
        lambda args: args.fp16_full_eval,
        "it casts the weights for good, and these are divided over the ranks",
        "leave it out",
    ),
    _Refused(
        "debug",
        lambda args: any(getattr(option, "value", option) == "underflow_overflow" for option in args.debug),
        "underflow_overflow looks at the numbers of each module while the model runs, and programs hand out none",
        'leave it out: on_nonfinite="stop" of the plan names the first value that became infinite or NaN',
    ),
    _Refused(
        "activation_checkpointing_kwargs",
        lambda args: bool((getattr(args, "activation_checkpointing_kwargs", None) or {}).get("offload")),
        "offload=True keeps saved activations in the host's memory by hooks that no graph can hold",
        "leave offload out: offload.activations of the plan moves them, beside other work",
    ),
    _Refused(
        "parallelism_config",
        lambda args: args.parallelism_config is not None,
        "accelerate would divide the model that the plan divides",
        "leave it out, and give the plan a mesh",
    ),
)


def refuse_arguments(trainer: Any) -> None:
    """Raise `PlanError` for an argument that does not work with a plan."""
    for refused in _REFUSED:
        if refused.clashes(trainer.args):
            raise PlanError(
                f"{refused.argument} of TrainingArguments can't be had with a plan",
                where=refused.argument,
                why=refused.why,
                hint=refused.hint,
            )
    for system, enabled in (("DeepSpeed", trainer.is_deepspeed_enabled), ("FSDP", trainer.is_fsdp_enabled)):
        if enabled:
            raise PlanError(
                f"the ranks were started for {system}, by a file of accelerate config",
                where="distributed_type",
                why=f"{system} would train in the plan's place",
                hint="zgraph plan --from-accelerate FILE -o plan.toml makes a plan of it; start ranks with accelerate launch --multi_gpu",
            )
    if trainer.lr_scheduler is not None:
        raise PlanError(
            "the Trainer was given a scheduler object",
            where="optimizers of the Trainer",
            why="it moves the rates of an optimizer that attach replaces by the plan's",
            hint="optimizers=(optimizer, None), and lr_scheduler_type; or override create_scheduler",
        )


def notes_on(trainer: Any, plan: Plan) -> list[str]:
    """Return a log line for each argument that overlaps with a field of the plan. Raises `PlanError` if both ask for
    recomputation."""
    args, usual = trainer.args, Plan()
    notes = []
    checkpoints = getattr(args, "activation_checkpointing", False) or getattr(args, "gradient_checkpointing", False)
    if checkpoints and plan.recompute != usual.recompute:
        raise PlanError(
            "gradient_checkpointing of TrainingArguments and recompute of the plan both say what is computed again",
            where="recompute",
            hint="leave one of them out",
        )
    if checkpoints:
        notes.append("gradient_checkpointing: layers are computed again as the model marks them")
    for asked in ("bf16", "fp16"):
        if getattr(args, asked) and plan.precision != usual.precision:
            notes.append(f"{asked}: the plan's precision, in place of autocast")
        elif getattr(args, asked):
            notes.append(f"{asked}: autocast around the model, as the Trainer has it")
    return notes
