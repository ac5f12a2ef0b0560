"""`zgraph.hf.Trainer` and `TrainingArguments` take the place of transformers' own: a script changes one import."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from ranks import Ranks
from trainers import ONE, Rows, as_launched, collator, history, model_of, trained

import zgraph
from zgraph.errors import ModelError, PlanError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
    "zgraph": {"backend": "eager"},
}


@pytest.fixture(autouse=True)
def launched():
    with as_launched():
        yield


def arguments(tmp_path, **options):
    usual = {"max_steps": 4, "per_device_train_batch_size": 2, "logging_steps": 1, "learning_rate": 1e-2}
    usual |= {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    return zgraph.hf.TrainingArguments(str(tmp_path), **{**usual, **options})


def trainer(args, cls=None, **options):
    data = Rows("gpt2", 28, ONE)
    cls = cls or zgraph.hf.Trainer
    return cls(model_of("gpt2"), args, train_dataset=data, data_collator=collator("gpt2"), **options)


def test_a_script_with_a_deepspeed_file_changes_one_import(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(DEEPSPEED))
    made = trainer(arguments(tmp_path, deepspeed=str(file), gradient_accumulation_steps=2))
    plan = made.model.zgraph.plan
    assert isinstance(made, zgraph.hf.Trainer) and isinstance(made, transformers.Trainer)
    assert (plan.zero, plan.bucket.reduce, plan.param_persistence_threshold) == (
        3,
        16 * 16 * 4,
        160,
    )  # (16 is the hidden size)
    assert (plan.optimizer.name, plan.optimizer.lr, plan.backend) == ("AdamW", 1e-2, "eager")
    assert made.args.plan == str(file) and made.args.deepspeed is None and not made.is_deepspeed_enabled
    made.train()
    for mine, other in zip(history(made), plain_run(str(tmp_path)), strict=True):
        assert mine == pytest.approx(other, rel=1e-5, abs=1e-6)


def by_a_deepspeed_file(folder):
    """What a run with one import changed logs, on this rank."""
    with as_launched():
        made = trainer(arguments(folder, deepspeed=DEEPSPEED, gradient_accumulation_steps=2))
        made.train()
        return history(made)


def plain_run(folder):
    options = {"eval_strategy": "no", "save_strategy": "no", "lengths": ONE, "gradient_accumulation_steps": 2}
    return trained("gpt2", folder, None, steps=4, **options)[0]


@pytest.mark.slow
@pytest.mark.gloo
def test_a_run_of_a_deepspeed_file_on_two_ranks_is_that_of_ddp(two: Ranks, tmp_path):
    plain = two.run(plain_run, str(tmp_path))
    for mine, theirs in zip(two.run(by_a_deepspeed_file, str(tmp_path)), plain, strict=True):
        assert len(mine) == 4
        for one, other in zip(mine, theirs, strict=True):
            assert one == pytest.approx(other, rel=1e-5, abs=1e-6)


def same(some, others):
    return all(one == pytest.approx(other, rel=1e-6) for one, other in zip(some, others, strict=True))


def rates(made):
    return [entry["learning_rate"] for entry in made.state.log_history if "learning_rate" in entry]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("WarmupLR", {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}),
        pytest.param(
            "WarmupDecayLR",
            {"warmup_max_lr": 1e-2, "warmup_num_steps": 2, "total_num_steps": "auto"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_scheduler_of_a_deepspeed_file_sets_the_rates(kind, params, tmp_path):
    schedulers = pytest.importorskip("deepspeed.runtime.lr_schedules")
    given = {**DEEPSPEED, "scheduler": {"type": kind, "params": params}}
    options = {"warmup_steps": 2, "save_strategy": "steps", "save_steps": 2}
    made = trainer(arguments(tmp_path, deepspeed=given, **options))
    made.train()
    plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1e-2)
    filled = {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-2, "warmup_num_steps": 2}
    filled |= {"total_num_steps": 4} if "total_num_steps" in params else {}
    theirs = getattr(schedulers, kind)(plain, **filled)
    expected = []
    for _ in range(4):
        expected.append(plain.param_groups[0]["lr"])  # (a Trainer logs the rate that an update had)
        theirs.step()
    assert rates(made) == pytest.approx(expected)
    again = trainer(arguments(tmp_path, deepspeed=given, **options))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert rates(again) == pytest.approx(expected) and same(history(again), history(made))


@pytest.mark.slow
def test_a_scheduler_that_says_other_than_the_arguments_is_refused_when_steps_are_known(tmp_path):
    given = {**DEEPSPEED, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}}
    made = trainer(arguments(tmp_path, deepspeed=given, warmup_steps=2))
    with pytest.raises(PlanError, match="warmup_steps is 2"):
        made.train()


def test_the_plan_may_be_given_in_other_ways(tmp_path):
    eager = zgraph.Plan(zero=2, backend="eager")
    eager.save(tmp_path / "plan.toml")
    for plan in (eager, tmp_path / "plan.toml", {"zero": 2, "backend": "eager"}, '{"zero": 2, "backend": "eager"}'):
        args = arguments(tmp_path, plan=plan)
        json.loads(args.to_json_string())  # (as loggers do)
        assert trainer(args).model.zgraph.plan.zero == 2
    made = trainer(arguments(tmp_path), plan=zgraph.Plan(zero=1, backend="eager"))
    assert made.model.zgraph.plan.zero == 1
    assert trainer(arguments(tmp_path)).model.zgraph.plan.zero == zgraph.Plan().zero
    args = transformers.HfArgumentParser(zgraph.hf.TrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--use_cpu", "--plan", "plan.toml"]
    )[0]
    assert args.plan == "plan.toml"


def test_a_subclass_is_attached_once_its_constructor_is_through(tmp_path):
    class Mine(zgraph.hf.Trainer):
        def __init__(self, *args, decay, **options):
            super().__init__(*args, **options)
            self.decay = decay

        def create_optimizer(self, *args):
            self.args.weight_decay = self.decay
            return super().create_optimizer(*args)

    made = trainer(arguments(tmp_path, plan={"backend": "eager"}), cls=Mine, decay=0.25)
    assert isinstance(made, Mine) and made.model.zgraph.plan.optimizer.weight_decay == 0.25


@pytest.mark.slow
def test_arguments_with_a_plan_do_not_train_without_it(tmp_path):
    args = arguments(tmp_path, plan={"backend": "eager"})
    with pytest.raises(PlanError, match="would train without it"):
        trainer(args, transformers.Trainer).train()
    attached = zgraph.hf.attach(trainer(args, transformers.Trainer))  # (its plan is that of the arguments)
    assert attached.train().global_step == 4


def test_two_plans_are_refused(tmp_path):
    with pytest.raises(PlanError, match="both say how to train"):
        arguments(tmp_path, plan="plan.toml", deepspeed="ds.json")
    with pytest.raises(PlanError, match="there are two plans"):
        trainer(arguments(tmp_path, plan={"zero": 2}), plan=zgraph.Plan(zero=1))


def test_arguments_of_transformers_with_a_deepspeed_file_are_told_what_to_change(tmp_path):
    args = arguments(tmp_path)
    args.deepspeed = "ds.json"  # (as transformers' own class has it after its constructor)
    with pytest.raises(PlanError, match=r"from zgraph\.hf import TrainingArguments"):
        trainer(args)


def test_a_second_attach_of_a_trainer_that_is_attached_by_its_class(tmp_path):
    made = trainer(arguments(tmp_path, plan={"backend": "eager"}))
    with pytest.raises(ModelError, match="attached already"):
        zgraph.hf.attach(made)


@pytest.mark.slow
def test_transformers_is_loaded_at_first_use_alone():
    code = "import sys, zgraph.hf; assert 'transformers' not in sys.modules; zgraph.hf.Trainer; assert 'transformers' in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
