"""What `zgraph.hf.attach` can't do is refused before anything is changed, with the way out."""

from __future__ import annotations

import copy
import json
import types

import pytest
import torch
from fake_world import fake_world
from torch import nn
from trainers import as_launched, collator, model_of, trainer_of

import zgraph
from zgraph.errors import ArgumentError, ModelError, NonFiniteError, PlanError, ZgraphError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


PLAN = zgraph.Plan(backend="eager")


@pytest.fixture(autouse=True)
def launched():
    with as_launched():
        yield


def trainer(tmp_path, **options):
    return trainer_of("gpt2", str(tmp_path), **options)


def plain(tmp_path):
    return trainer(tmp_path, eval_strategy="no").args


def refused(made, plan, kind, *said, **more):
    """The error of attach, which changed neither trainer nor model."""
    before, cls = dict(vars(made.model)), type(made)
    with pytest.raises(kind) as caught:
        zgraph.hf.attach(made, plan, **more)
    error = caught.value
    assert isinstance(error, ZgraphError) and error.hint, error
    for part in said:
        assert part in str(error), str(error)
    assert type(made) is cls and vars(made.model).keys() == before.keys() and not hasattr(made.model, "zgraph")


ARGUMENTS = {
    "torch_compile": ({"torch_compile": True}, "attach compiles the model"),
    "deepspeed": ({"deepspeed": "ds.json"}, "from zgraph.hf import TrainingArguments"),
    "fsdp": ({"fsdp": True}, "zero of the plan is 3"),
    "n_gpu": ({"_n_gpu": 2}, "torchrun --nproc-per-node"),
    "bf16_full_eval": ({"bf16_full_eval": True}, "leave it out"),
    "fp16_full_eval": ({"fp16_full_eval": True}, "leave it out"),
    "debug": ({"debug": ["underflow_overflow"]}, 'on_nonfinite="stop"'),
    "activation_checkpointing_kwargs": ({"activation_checkpointing_kwargs": {"offload": True}}, "offload.activations"),
    "parallelism_config": ({"parallelism_config": object()}, "give the plan a mesh"),
}


@pytest.mark.parametrize("name", list(ARGUMENTS))
def test_an_argument_that_clashes(name, tmp_path):
    options, said = ARGUMENTS[name]
    made = trainer(tmp_path)
    for key, value in options.items():
        setattr(made.args, key, value)  # (some of them need a GPU to be given)
    refused(made, PLAN, PlanError, f"{name} of TrainingArguments", said)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"optimizer": zgraph.AdamW()}, "learning_rate"),
        ({"grad_clip": 0.5}, "max_grad_norm"),
        ({"grad_clip": zgraph.GradClip(value=1.0)}, "max_grad_norm"),
        ({"micro_batches": 2}, "gradient_accumulation_steps"),
        ({"loss_average": "token"}, "average_tokens_across_devices"),
        ({"elastic": zgraph.Elastic(batch=4, micro_batch=2)}, "per_device_train_batch_size"),
    ],
)
def test_a_plan_that_says_what_arguments_say(fields, said, tmp_path):
    refused(trainer(tmp_path), PLAN.model_copy(update=fields), PlanError, f"no {next(iter(fields))}", said)


@pytest.mark.parametrize("dim", ["pp", "tp", "cp"])
def test_a_mesh_whose_ranks_share_rows(dim, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "zgraph.hf.plans.dist", types.SimpleNamespace(is_initialized=lambda: True, get_world_size=lambda: 2)
    )
    why = "computes its loss outside of the model" if dim == "pp" else "these ranks would need the same"
    plan = PLAN.model_copy(update={"mesh": {dim: 2, "dp": 1}})
    refused(trainer(tmp_path), plan, PlanError, f"mesh dimension '{dim}'", why, "train_step in a loop of your own")


def test_a_mesh_of_other_ranks(tmp_path):
    plan = PLAN.model_copy(update={"mesh": {"dp": 4}})
    refused(trainer(tmp_path), plan, PlanError, "is for a world of 4, and this one is of 1")


def test_values_that_agree_with_the_arguments_are_taken(tmp_path):
    plan = PLAN.model_copy(update={"grad_clip": 0.5, "micro_batches": 2})
    made = trainer(tmp_path, max_grad_norm=0.5, gradient_accumulation_steps=2)
    plan = zgraph.hf.attach(made, plan).model.zgraph.plan
    assert plan.grad_clip is None and plan.micro_batches == 1  # (the Trainer clips and accumulates)


def test_no_plan_and_a_dict_with_a_key_that_plans_have_not(tmp_path):
    refused(trainer(tmp_path), None, PlanError, "there is no plan")
    refused(trainer(tmp_path), {"zero": 2, "backends": "eager"}, PlanError, "backends")


@pytest.mark.parametrize("given", [zgraph.Plan, 3, [zgraph.Plan()]])
def test_what_is_no_plan(given, tmp_path):
    refused(trainer(tmp_path), given, ArgumentError, "the plan of a Trainer takes a zgraph.Plan, a dict, or the path")
    if given == 3:
        with pytest.raises(ArgumentError, match="the path of a file, not a value of type int"):
            arguments = zgraph.hf.TrainingArguments(str(tmp_path), deepspeed=given, use_cpu=True, report_to=[])
            zgraph.hf.Trainer(model_of("gpt2"), arguments)


def test_keys_of_a_plan_that_are_no_texts(tmp_path):
    refused(trainer(tmp_path), {"shapes": {1: [8]}}, PlanError, "is no text")


def test_a_model_of_which_nothing_trains(tmp_path):
    model = model_of("gpt2").requires_grad_(False)
    made = zgraph.hf.attach(transformers.Trainer(model, plain(tmp_path), train_dataset=[{"labels": 1}]), PLAN)
    with pytest.raises(ModelError, match="no parameter of the trainer's model trains"):
        made.train()


def test_a_model_that_torch_has_compiled(tmp_path):
    made = transformers.Trainer(torch.compile(model_of("gpt2")), plain(tmp_path))
    refused(made, PLAN, ModelError, "wrapped already, in OptimizedModule")


def test_what_needs_an_optimizer_goes_into_a_dict_or_a_file(tmp_path):
    given = {"backend": "eager", "on_nonfinite": "skip", "ema": 0.9, "offload": {"optimizer": "cpu"}}
    (tmp_path / "plan.json").write_text(json.dumps(given))
    for plan in (given, tmp_path / "plan.json"):
        found = zgraph.hf.attach(trainer(tmp_path, weight_decay=0.1), plan).model.zgraph.plan
        assert found.on_nonfinite == "skip" and found.offload.optimizer == "cpu" and found.ema.decay == 0.9
        assert (found.optimizer.name, found.optimizer.weight_decay) == ("AdamW", 0.1)
        assert not found.origins()["optimizer"].startswith("file")
    more = {"optimizer": zgraph.SGD(lr=0.1), "on_nonfinite": "skip"}
    refused(trainer(tmp_path), zgraph.Plan(**more), PlanError, "no optimizer", "into a dict or a file")


@pytest.mark.slow
def test_a_step_that_is_not_finite_is_skipped_as_the_plan_says(tmp_path):
    class Spoiled(transformers.Trainer):
        """Has a loss that is NaN in its second step."""

        def compute_loss(self, *args, **more):
            loss = super().compute_loss(*args, **more)
            return loss * float("nan") if self.state.global_step == 1 else loss

    options = {"eval_strategy": "no", "save_strategy": "no", "steps": 3, "lengths": (9, 9), "cls": Spoiled}
    made = zgraph.hf.attach(trainer(tmp_path, **options), {"backend": "eager", "on_nonfinite": "skip"})
    made.train()
    assert made.model.zgraph.skipped_steps == 1 and all(p.isfinite().all() for p in made.model.parameters())
    stops = zgraph.hf.attach(trainer(tmp_path, **options), {"backend": "eager", "on_nonfinite": "stop"})
    with pytest.raises(NonFiniteError):
        stops.train()


@pytest.mark.parametrize("system", ["DeepSpeed", "FSDP"])
def test_ranks_that_accelerate_started_for_another_system(system, tmp_path):
    made = trainer(tmp_path)
    setattr(made, f"is_{system.lower()}_enabled", True)  # (which the Trainer reads of accelerate's state)
    refused(
        made, PLAN, PlanError, f"started for {system}", "zgraph plan --from-accelerate", "accelerate launch --multi_gpu"
    )


def test_loss_scales_that_are_no_powers_of_two(tmp_path):
    made = trainer(tmp_path)
    made.args.fp16 = True
    made.accelerator.scaler = torch.amp.GradScaler("cpu", growth_factor=3.0)
    refused(made, PLAN, PlanError, "a plan can't scale losses", "powers of two")


def test_recompute_beside_gradient_checkpointing(tmp_path):
    made = trainer(tmp_path, gradient_checkpointing=True)
    refused(made, PLAN.model_copy(update={"recompute": "full"}), PlanError, "both say what is computed again")


def test_an_optimizer_that_a_plan_has_not(tmp_path):
    made = trainer(tmp_path, optim="adafactor")
    refused(made, PLAN, PlanError, "Adafactor", "adamw_torch")
    assert made.optimizer is None


def test_an_optimizer_that_has_made_steps(tmp_path):
    model = model_of("gpt2")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)).loss.backward()
    optimizer.step()
    made = transformers.Trainer(model, plain(tmp_path), optimizers=(optimizer, None))
    refused(made, PLAN, ZgraphError, "has made steps")


def test_a_scheduler_object(tmp_path):
    model = model_of("gpt2")
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    made = transformers.Trainer(model, plain(tmp_path), optimizers=(optimizer, scheduler))
    refused(made, PLAN, PlanError, "scheduler object", "create_scheduler")


def test_what_is_no_trainer():
    with pytest.raises(ModelError, match="no Trainer"):
        zgraph.hf.attach(nn.Linear(2, 2), PLAN)


def test_a_trainer_that_makes_models(tmp_path):
    made = transformers.Trainer(args=plain(tmp_path), model_init=lambda: model_of("gpt2"))
    refused(made, PLAN, ModelError, "model_init")


def test_a_second_attach_and_a_model_that_is_compiled(tmp_path):
    made = zgraph.hf.attach(trainer(tmp_path), PLAN)
    with pytest.raises(ModelError, match="attached already"):
        zgraph.hf.attach(made, PLAN)
    again = transformers.Trainer(made.model, plain(tmp_path))
    with pytest.raises(ModelError, match="compiled already"):
        zgraph.hf.attach(again, PLAN)


def test_a_wrapped_model(tmp_path):
    made = trainer(tmp_path)
    made.model_wrapped = nn.DataParallel(made.model)
    refused(made, PLAN, ModelError, "wrapped already, in DataParallel")


def test_a_release_without_a_name(tmp_path, monkeypatch):
    monkeypatch.delattr(transformers.Trainer, "_load_best_model")
    refused(trainer(tmp_path), PLAN, ModelError, "no Trainer._load_best_model", "transformers 5.24 is known to work")


def test_a_plan_file_that_is_not_there(tmp_path):
    refused(trainer(tmp_path), tmp_path / "plan.toml", PlanError, "plan.toml")


DEEPSPEED = {
    "zero_optimization": {"stage": 2},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"gradient_clipping": 0.5}, "max_grad_norm is 1.0"),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, "gradient_accumulation_steps is 1"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}, "learning_rate is 0.01"),
        ({"train_micro_batch_size_per_gpu": 4}, "per_device_train_batch_size is 2"),
        ({"bf16": {"enabled": True}}, "bf16 is False"),
        ({"scheduler": {"type": "WarmupRL"}}, "WarmupLR"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5}}}, "learning_rate is 0.01"),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_step": "auto"}}}, "total_num_step"),
        ({"zero_optimizaton": {"stage": 2}}, "zero_optimization"),
    ],
)
def test_a_deepspeed_configuration_that_says_otherwise(keys, said, tmp_path):
    refused(trainer(tmp_path), {**DEEPSPEED, **keys}, PlanError, said)


def test_a_deepspeed_configuration_is_a_plan(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(DEEPSPEED))
    plan = zgraph.hf.attach(trainer(tmp_path, weight_decay=0.1), file).model.zgraph.plan
    assert plan.zero == 2 and plan.micro_batches == 1 and plan.grad_clip is None
    assert (plan.optimizer.name, plan.optimizer.lr, plan.optimizer.weight_decay) == ("AdamW", 1e-2, 0.1)
    assert [group.overrides["weight_decay"] for group in plan.optimizer.groups] == [0.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", [{}, {"optimizer": DEEPSPEED["optimizer"]}], ids=["of the arguments", "of the file"]
)
def test_a_deepspeed_configuration_offloads_the_trainers_optimizer(optimizer, tmp_path):
    given = {k: v for k, v in DEEPSPEED.items() if k != "optimizer"} | optimizer
    stage = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    given |= {"zero_optimization": stage, "zgraph": {"backend": "eager"}}
    made = zgraph.hf.attach(trainer(tmp_path, eval_strategy="no", save_strategy="no", steps=2), given)
    plan = made.model.zgraph.plan
    assert plan.offload.optimizer == "cpu" and (plan.optimizer.name, plan.optimizer.lr) == ("AdamW", 1e-2)
    assert made.train().global_step == 2


def test_a_loss_of_the_users_own_and_a_subclass_are_kept(tmp_path):
    class Mine(transformers.Trainer):
        """Has a loss of its own."""

        def compute_loss(self, model, inputs, **more):
            return super().compute_loss(model, inputs, **more)

    made = trainer(tmp_path, cls=Mine)
    made.callback_handler.callbacks.append(mark := types.SimpleNamespace())
    assert zgraph.hf.attach(made, PLAN) is made
    assert isinstance(made, Mine) and type(made).__name__ == "Mine" and mark in made.callback_handler.callbacks
    assert type(made).compute_loss is Mine.compute_loss and isinstance(made.data_collator, type(collator("gpt2")))


def test_a_parameter_that_is_unfrozen_is_found_without_a_walk_through_the_model(monkeypatch):
    from zgraph.hf.optimizers import refuse_unfrozen

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    model = zgraph.compile(model, PLAN)
    without = ["0.weight", "0.bias"]
    with monkeypatch.context() as patched:
        patched.setattr(nn.Module, "named_parameters", lambda *_: pytest.fail("all parameters were looked up"))
        refuse_unfrozen(model, without)
        model[0].bias.requires_grad_(True)
        with pytest.raises(ModelError, match=r"0\.bias is trained now, and was frozen"):
            refuse_unfrozen(model, without)
        refuse_unfrozen(model, [])
    model[0].bias.requires_grad_(False)
    model[0].weight = nn.Parameter(torch.ones(3, 3))  # (another, which is trained)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(ModelError, match=r"0\.weight is trained now"):
        refuse_unfrozen(model, without)


def test_embeddings_are_not_resized_once_they_are_divided():
    plain = model_of("llama")
    with fake_world(2):
        model = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(backend="eager", mesh={"dp": 2}, zero=3))
        with pytest.raises(ModelError, match="resize_token_embeddings makes other weights"):
            model.resize_token_embeddings(128)
    plain.resize_token_embeddings(128)
