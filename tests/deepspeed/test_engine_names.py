"""Each public name of DeepSpeed's engine is there, or is refused by a sentence that names it and says what to do."""

import deepspeed_interface
import pytest
import torch
from torch import nn

import zgraph.deepspeed as deepspeed
from zgraph.deepspeed.absent_names import ENGINE, AbsentName
from zgraph.errors import StepError, UnsupportedError

pytestmark = pytest.mark.usefixtures("no_group_left")
CONFIG = {
    "train_batch_size": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 1},
    "zgraph": {"backend": "eager"},
}


@pytest.fixture
def engine():
    return deepspeed.initialize(model=nn.Linear(4, 4), config=CONFIG)[0]


def step(engine):
    engine.backward(engine(torch.ones(4, 4)).square().mean())
    engine.step()


def test_every_name_of_deepspeeds_engine_is_there_or_refused(deepspeeds, engine):
    names = deepspeeds.run(deepspeed_interface.engine_names)[0]
    assert len(names) > 150 and set(names) >= {"backward", "global_steps", "timers"}
    absent = set()
    for name in names:
        try:
            getattr(engine, name)
        except AbsentName as error:
            assert name in error.what and error.why and error.hint
            absent.add(name)
    assert absent <= ENGINE.keys() and len(absent) < len(names) / 3
    assert not hasattr(engine, "timers") and getattr(engine, "timers", None) is None


def test_no_absent_name_is_an_attribute_of_the_engine():
    assert not ENGINE.keys() & {*dir(deepspeed.DeepSpeedEngine)}


def test_every_name_of_deepspeeds_zero_is_there(deepspeeds):
    names = deepspeeds.run(deepspeed_interface.names_of_zero)[0]
    assert len(names) > 8 and not [name for name in names if not hasattr(deepspeed.zero, name)]
    assert not [name for name in names if not hasattr(deepspeed.runtime.zero, name)]


def test_what_only_deepspeed_has_is_imported_and_refused_at_its_use():
    from zgraph.deepspeed.runtime.zero.config import DeepSpeedZeroConfig, ZeroStageEnum
    from zgraph.deepspeed.runtime.zero.tiling import TiledLinear

    assert ZeroStageEnum.weights == 3 and not isinstance(nn.Linear(2, 2), TiledLinear)
    with pytest.raises(UnsupportedError, match=r"deepspeed\.zero\.TiledLinear") as caught:
        TiledLinear(4, 4, in_splits=2)
    assert "tiles" in caught.value.hint
    with pytest.raises(UnsupportedError, match=r"deepspeed\.zero\.TiledLinear"):

        class Mine(TiledLinear):
            pass

    with pytest.raises(UnsupportedError, match="DeepSpeedZeroConfig"):
        DeepSpeedZeroConfig.model_validate({})


def test_what_can_not_be_set_says_so(engine):
    for name in ("optimizer", "gradient_average", "enable_backward_allreduce", "dp_world_size", "training_dataloader"):
        with pytest.raises(StepError, match=f"engine.{name} can't be set") as caught:
            setattr(engine, name, False)
        assert caught.value.hint
    engine.note = "a script's own"
    assert engine.note == "a script's own"


def test_a_script_may_set_counters_and_the_scheduler(engine):
    step(engine)
    engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps = 10, 40, 10, 0
    engine.lr_scheduler = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    step(engine)
    assert engine.global_steps == 11 and engine.get_lr() == [pytest.approx(5e-3)]
    engine.lr_scheduler = None
    step(engine)
    assert engine.get_lr() == [pytest.approx(5e-3)]
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    with pytest.raises(AssertionError, match="another optimizer"):
        engine.lr_scheduler = torch.optim.lr_scheduler.StepLR(other, step_size=1)


def test_an_optimizers_internals_are_refused_by_name(engine):
    for name in ("fp32_groups_flat", "bit16_groups", "parameter_offload", "averaged_gradients"):
        assert not hasattr(engine.optimizer, name)
        with pytest.raises(AbsentName, match=name) as caught:
            getattr(engine.optimizer, name)
        assert "safe_get_full" in caught.value.hint


def test_an_optimizer_is_of_deepspeeds_class_for_its_stage(engine):
    from zgraph.deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from zgraph.deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    assert isinstance(engine.optimizer, DeepSpeedZeroOptimizer)
    assert not isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3)
    with pytest.raises(UnsupportedError, match="DeepSpeedZeroOptimizer_Stage3"):
        DeepSpeedZeroOptimizer_Stage3(engine.module, None)


def whole_weights_for_generate():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    model.load_state_dict(plain.state_dict())
    config = CONFIG | {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    engine = deepspeed.initialize(model=model, config=config)[0]
    with deepspeed.zero.unwrap_model_for_generation(engine) as unwrapped, torch.no_grad():
        for length in range(1, 4):
            x = torch.ones(length, 4)
            assert torch.equal(unwrapped(x), plain(x)) and model[0].weight.shape == (8, 4)
    programs = len(engine.handle.programs)
    step(engine)
    facts = (
        engine.pipeline_parallelism,
        engine.seq_dp_world_size,
        engine.get_tensor_parallel_rank(),
        engine.data_rank(),
    )
    group = torch.distributed.get_process_group_ranks(engine.data_parallel_group)
    assert list(engine.param_names.values()) == [name for name, _ in model.named_parameters()]
    return programs, facts, group, engine.get_data_types()


def test_weights_are_whole_for_generate_and_ranks_say_where_they_are(two):
    for rank, (programs, facts, group, dtypes) in enumerate(two.run(whole_weights_for_generate)):
        assert programs == 0 and facts == (False, 2, 0, rank) and group == [0, 1]
        assert dtypes == (torch.float32, torch.float32)


def test_weights_alone_are_loaded_after_a_skipped_step_and_leave_random_numbers_alone(tmp_path):
    config = CONFIG | {"fp16": {"enabled": True, "initial_scale_power": 4}}
    engine = deepspeed.initialize(model=nn.Linear(4, 4), config=config)[0]
    engine.save_checkpoint(tmp_path, tag="base")
    engine.backward(engine(torch.ones(4, 4).half()).sum() * float("inf"))
    engine.step()
    assert engine.skipped_steps == 1 and not engine.was_step_applied()
    torch.manual_seed(3)
    engine.load_checkpoint(tmp_path, tag="base", load_module_only=True)
    assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(3)))
    engine.backward(engine(torch.ones(4, 4).half()).square().mean())
    engine.step()
    assert engine.was_step_applied() and engine.skipped_steps == 1 and engine.global_steps == 2


class Unit:
    """Groups of ranks as scripts for tensor parallelism make them."""

    def __init__(self, divided, ranks):
        self.size = divided
        groups = [torch.distributed.new_group(part) for part in ranks]
        mine = torch.distributed.get_rank()
        self.group = next(g for g, part in zip(groups, ranks, strict=True) if mine in part)

    def get_model_parallel_world_size(self):
        return self.size

    def get_model_parallel_group(self):
        return self.group


def with_groups_of_its_own():
    """Losses of an undivided model without and with a script's groups, and what is said of others."""
    losses, said = [], []
    for mpu in (None, Unit(2, [[0, 1]])):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        config = CONFIG | {"tensor_parallel": {"autotp_size": 2}, "data_parallel_size": 1}
        engine = deepspeed.initialize(model=model, config=config, mpu=mpu)[0]
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
        for _ in range(3):
            loss = nn.functional.mse_loss(engine(x), x.sin())
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    for mpu in (Unit(2, [[0, 1]]), Unit(4, [[0, 1]]), Unit(2, [[1, 0]]), object()):
        try:
            deepspeed.initialize(model=nn.Linear(4, 4), config=CONFIG, mpu=mpu)
        except UnsupportedError as error:
            said.append(error.why)
    return losses, said


def test_groups_of_a_script_that_are_the_meshs_are_taken_and_others_refused(two):
    for losses, said in two.run(with_groups_of_its_own):
        assert losses[:3] == losses[3:] and len(set(losses)) == 3
        assert len(said) == 4 and all("ranks divide the model" in why for why in said)
