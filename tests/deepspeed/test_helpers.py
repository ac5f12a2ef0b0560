"""DeepSpeed's helpers: zero.Init, gathered parameters, whole values, collectives, launchers' variables, checkpointing, topologies."""

import argparse
import copy
import importlib
import logging
import math
import random
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sweeps import sweep
from torch import nn
from torch.distributed.tensor import DTensor

import zgraph.deepspeed as deepspeed
from zgraph.deepspeed import comm, utils, zero
from zgraph.deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from zgraph.deepspeed.launch_environment import first_host, rank_variables
from zgraph.deepspeed.lr_schedulers import OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from zgraph.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from zgraph.deepspeed.ops.lamb import FusedLamb
from zgraph.deepspeed.pipe import (
    LayerSpec,
    PipelineModule,
    PipeModelDataParallelTopology,
    ProcessTopology,
    TiedLayerSpec,
)
from zgraph.deepspeed.pipe.topology import PipeDataParallelTopology, PipelineParallelGrid
from zgraph.deepspeed.profiling.flops_profiler import FlopsProfiler
from zgraph.deepspeed.runtime.utils import set_random_seed
from zgraph.errors import MeshError, ModelError, PlanError, StepError, UnsupportedError

pytestmark = pytest.mark.usefixtures("no_group_left")

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3},
    "zgraph": {"backend": "eager"},
}


class Net(nn.Module):
    """Values that a constructor draws in several ways, a buffer, a tied weight."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8, padding_idx=0)
        self.inner = nn.Linear(8, 24)
        nn.init.xavier_uniform_(self.inner.weight)
        nn.init.constant_(self.inner.bias[:4], 3.0)
        self.scale = nn.Parameter(torch.full((24,), 0.5))
        self.outer = nn.Linear(24, 8)
        nn.init.trunc_normal_(self.outer.weight, std=0.02)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(8.0))

    def forward(self, ids):
        x = self.embedding(ids) + self.positions
        return self.head(self.outer(torch.tanh(self.inner(x)) * self.scale)).square().mean()


# -- zero -----------------------------------------------------------------------------------------------------------------
def test_init_builds_without_memory_and_keeps_what_constructors_do():
    with zero.Init(config_dict_or_path=CONFIG, dtype=torch.float32):
        model = Net()
        assert model.inner.weight.is_meta and model.embedding.weight.is_meta
    assert not model.scale.is_meta and not model.positions.is_meta  # (they have values)
    assert model.head.weight is model.embedding.weight
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG)
    whole = {n: p.detach().full_tensor() for n, p in model.named_parameters()}
    bound = math.sqrt(6 / (8 + 24))
    assert 0.5 * bound < whole["inner.weight"].abs().max() <= bound
    assert whole["inner.bias"][:4].eq(3).all() and whole["inner.bias"][4:].abs().max() <= 1 / math.sqrt(8)
    assert 0.01 < whole["outer.weight"].std() < 0.03 and whole["embedding.weight"][0].eq(0).all()
    assert whole["embedding.weight"][1:].std() > 0.5 and whole["scale"].eq(0.5).all()
    loss = engine(torch.randint(16, (2, 8)))
    engine.backward(loss)
    engine.step()
    assert engine.was_step_applied() and nn.Linear(2, 2).weight.device.type == "cpu"


def test_init_of_what_is_copied_from_nowhere_is_refused():
    class Copies(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, 4))
            other = nn.Linear(4, 4)
            with torch.no_grad():
                self.weight.copy_(other.weight)

        def forward(self, x):
            return (x @ self.weight).sum()

    with zero.Init():
        model = Copies()
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG)
    with pytest.raises(ModelError, match="weight"):
        engine(torch.ones(2, 4))


def test_init_of_an_initialiser_that_passes_over_the_meta_device_is_refused_where_it_can_not_be_seen():
    from torch.nn.init import orthogonal_  # (by this name nothing but the function itself is called)

    class Net(nn.Module):
        def __init__(self, initialise):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            initialise(self.layer.weight)

        def forward(self, x):
            return self.layer(x).sum()

    with zero.Init():
        refused, seen = Net(orthogonal_), Net(lambda w: nn.init.orthogonal_(w))
    engine, *_ = deepspeed.initialize(model=refused, config=CONFIG)
    with pytest.raises(ModelError, match=r"layer\.weight"):
        engine(torch.ones(2, 4))
    deepspeed.initialize(model=seen, config=CONFIG)
    weight = seen.layer.weight.full_tensor()
    torch.testing.assert_close(weight @ weight.T, torch.eye(4))


def test_init_that_is_not_enabled_does_nothing():
    with zero.Init(enabled=False):
        assert not nn.Linear(2, 2).weight.is_meta
    with pytest.raises(PlanError, match="no argument 'devicee'"):
        zero.Init(devicee="cpu")


def gathered():
    """On ranks: a weight changed in a context, refused without a modifier; before and after initialize."""
    with zero.Init():
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    with zero.GatheredParameters(model[0].weight, modifier_rank=0):
        if dist.get_rank() == 0:
            nn.init.ones_(model[0].weight)
    deepspeed.initialize(model=model, config=CONFIG)
    found = [model[0].weight.full_tensor().eq(1).all().item()]
    with zero.GatheredParameters([model[0].weight, model[1].bias], modifier_rank=1):
        found.append(list(model[0].weight.shape) == [6, 4] and type(model[0].weight) is nn.Parameter)
        if dist.get_rank() == 1:
            with torch.no_grad():
                model[0].weight.mul_(3)
    found.append(model[0].weight.full_tensor().eq(3).all().item())
    with zero.GatheredParameters(model.parameters()):
        found.append(model[0].weight.eq(3).all().item())
    try:
        with zero.GatheredParameters(model), torch.no_grad():
            model[1].bias.zero_()
    except ModelError as error:
        found.append("without a modifier_rank" in str(error))
    x = torch.ones(2, 4)
    first = nn.functional.linear(x, torch.full((6, 4), 3.0), model[0].bias.full_tensor())
    wanted = nn.functional.linear(first, model[1].weight.full_tensor(), model[1].bias.full_tensor())
    found.append(torch.allclose(model(x), wanted))
    return found


def test_gathered_parameters_are_whole_and_written_back(two):
    for found in two.run(gathered):
        assert found == [True] * 6


def whole_values(precision):
    """On ranks: the whole of weights, gradients and states, read and written."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    plain = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    plain.load_state_dict(model.state_dict())
    config = {**CONFIG, "gradient_clipping": 0, **({"bf16": {"enabled": True}} if precision == "bf16" else {})}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    x = torch.ones(2, 5, dtype=dtype) * (dist.get_rank() + 1)
    weight = model[0].weight
    before = utils.safe_get_full_fp32_param(weight)
    assert utils.safe_get_full_grad(weight) is None
    engine.backward(engine(x).float().square().mean())
    for rank in range(2):
        (plain(torch.ones(2, 5) * (rank + 1)).square().mean() / 2).backward()
    gradient = utils.safe_get_full_grad(weight).float()
    torch.testing.assert_close(
        gradient,
        plain[0].weight.grad,
        rtol=0.05 if precision == "bf16" else 1e-5,
        atol=0.05 if precision == "bf16" else 1e-6,
    )
    utils.safe_set_full_grad(weight, torch.ones_like(gradient))
    before += 2**-12  # (what a low weight does not hold, before there was any update)
    utils.safe_set_full_fp32_param(weight, before)
    assert torch.equal(utils.safe_get_full_fp32_param(weight), before)
    engine.step()
    first = utils.safe_get_full_optimizer_state(weight, "exp_avg")
    assert torch.allclose(first, torch.full((3, 5), 0.1)) and first.shape == (3, 5)
    torch.testing.assert_close(utils.safe_get_full_fp32_param(weight), before - 1e-2, rtol=0, atol=1e-6)
    utils.safe_set_full_optimizer_state(weight, torch.zeros(3, 5), "exp_avg")
    assert utils.safe_get_full_optimizer_state(weight, "exp_avg").eq(0).all()
    utils.safe_set_full_fp32_param(weight, torch.full((3, 5), 0.25))
    assert utils.safe_get_full_fp32_param(weight).eq(0.25).all()
    assert utils.safe_get_local_fp32_param(weight).eq(0.25).all() and len(utils.safe_get_local_fp32_param(weight)) < 3
    shown = engine(x).detach().float()
    low = [p.full_tensor().to(dtype) for p in model.parameters()]
    wanted = nn.functional.linear(
        nn.functional.linear(x, torch.full((3, 5), 0.25, dtype=dtype), low[1]), low[2], low[3]
    )
    near = torch.allclose(shown, wanted.float(), atol=1e-2)
    rank = dist.get_rank()
    mine = utils.safe_get_local_fp32_param(weight)
    utils.safe_set_local_fp32_param(weight, torch.full_like(mine, rank + 0.5))
    assert utils.safe_get_full_fp32_param(weight).unique().tolist() == [0.5, 1.5]
    utils.safe_set_local_optimizer_state(weight, torch.full_like(mine, rank + 2.0), "exp_avg")
    assert utils.safe_get_full_optimizer_state(weight, "exp_avg").unique().tolist() == [2.0, 3.0]
    weight.requires_grad_(False)
    assert utils.safe_get_full_fp32_param(weight) is None and utils.safe_get_local_fp32_param(weight) is None
    weight.requires_grad_(True)
    engine.backward(engine(x).float().square().mean())
    utils.safe_set_local_grad(weight, torch.full_like(utils.safe_get_local_grad(weight), rank + 1.0))
    utils.safe_update_full_grad_vectorized([weight], lambda grad, param: grad * 2)
    assert utils.safe_get_full_grad(weight).unique().tolist() == [2.0, 4.0]
    engine.empty_partition_cache()
    engine.step()
    return near


@sweep("precision", ["fp32", "bf16"], quick=(0,))
def test_whole_values_are_read_and_written(two, precision):
    assert two.run(whole_values, precision) == [True, True]


def test_a_parameter_of_no_engine_has_no_states():
    with pytest.raises(ModelError, match="no compiled model's"):
        utils.safe_get_full_optimizer_state(nn.Parameter(torch.ones(2)), "exp_avg")


# -- ranks ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "environ, found",
    [
        ({}, {}),
        (
            {
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_SIZE": "8",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "MASTER_ADDR": "a",
            },
            ("3", "8", "1", "a"),
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"},
            ("0", "4", "0", "10.0.0.4"),
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "SM_HOSTS": '["algo-1","algo-2"]'},
            ("1", "2", "0", "algo-1"),
        ),
        (
            {"SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "gpu[003-005,9]"},
            ("5", "6", "1", "gpu003"),
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, ("0", "1", "0", "127.0.0.1")),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            ("1", "2", "1", "127.0.0.1"),
        ),
    ],
)
def test_a_launchers_variables_are_found(environ, found):
    made = rank_variables(environ, 1234)
    if found:
        found = dict(zip(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"), found, strict=True)) | {
            "MASTER_PORT": "1234"
        }
    assert made == found


def test_torchs_variables_come_first_and_a_missing_address_is_named():
    torch_s = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    assert rank_variables({**torch_s, "SLURM_PROCID": "7", "SLURM_NTASKS": "9"})["RANK"] == "1"
    for others in ({}, {"MPI_LOCALNRANKS": "2"}):
        with pytest.raises(MeshError, match="nothing says where rank 0 of 4 is"):
            rank_variables({"PMI_RANK": "0", "PMI_SIZE": "4", **others})
    assert first_host("node7") == "node7" and first_host("a1,b[2-3]") == "a1" and first_host("a[12]-x,b") == "a12-x"


def collectives():
    comm.reset_log()
    comm.configure(deepspeed_config={"comms_logger": {"enabled": True, "prof_ops": ["all_reduce"]}})
    tensor = torch.ones(256) * comm.get_rank()
    comm.all_reduce(tensor, op=comm.ReduceOp.SUM, prof=True, log_name="mine")
    comm.inference_all_reduce(tensor, debug="here")
    parts = [torch.empty(2) for _ in range(comm.get_world_size())]
    comm.all_gather(parts, torch.full((2,), float(comm.get_rank())))
    measured = comm.log_summary(show_straggler=True, return_dict=True)
    comm.configure(enabled=False)
    return tensor[0].item(), [p[0].item() for p in parts], measured


def test_collectives_are_torchs_and_are_measured(two):
    for total, parts, measured in two.run(collectives):
        assert total == 2.0 and parts == [0.0, 1.0]
        assert list(measured["summary"]) == ["mine", "all_reduce | here"]
        assert all(sizes[1024]["count"] == 1 for sizes in measured["summary"].values())
        assert measured["straggler_analysis"]["mine"] >= 0


def collectives_by_name():
    """What collectives give whose arguments have DeepSpeed's names."""
    rank, whole = float(comm.get_rank()), torch.empty(4)
    comm.all_gather_into_tensor(output_tensor=whole, tensor=torch.full((2,), rank))
    parts, ours = [torch.empty(2), torch.empty(4)], torch.empty(2)
    comm.all_gather_coalesced(output_tensors=parts, input_tensors=[torch.full((1,), rank), torch.full((2,), rank)])
    late = [torch.empty(2)]
    comm.all_gather_coalesced(late, [torch.full((1,), rank)], async_op=True).wait()
    comm.reduce_scatter_fn(output_tensor=ours, tensor=torch.arange(4.0))
    swapped = torch.empty(2)
    comm.all_to_all_single(output=swapped, tensor=torch.full((2,), rank))
    return [t.tolist() for t in (whole, *parts, *late, ours, swapped)]


def test_collectives_take_deepspeeds_names(two):
    shared = [[0.0, 0.0, 1.0, 1.0], [0.0, 1.0], [0.0, 0.0, 1.0, 1.0], [0.0, 1.0]]
    assert two.run(collectives_by_name) == [[*shared, ours, [0.0, 1.0]] for ours in ([0.0, 2.0], [4.0, 6.0])]


def groups_of_a_grid():
    """The ranks of each group of a grid of two stages, and a sum over the pipeline."""
    grid = PipelineParallelGrid(PipeDataParallelTopology(num_pp=2, num_dp=1))
    groups = [grid.get_pipe_parallel_group(), grid.get_data_parallel_group(), grid.get_model_parallel_group()]
    total = torch.ones(1) + grid.get_stage_id()
    comm.all_reduce(total, group=grid.get_pipe_parallel_group())
    assert groups[0] is groups[2] is grid.get_pipe_parallel_group()
    return [comm.get_all_ranks_from_group(group) for group in groups], total.item(), grid.is_first_stage


def test_a_grid_has_process_groups(two):
    assert two.run(groups_of_a_grid) == [([[0, 1], [rank], [0, 1]], 3.0, not rank) for rank in range(2)]


def test_nccl_without_a_gpu_is_gloo_and_says_so(caplog, monkeypatch):
    if torch.cuda.is_available() or dist.is_initialized():
        dist.destroy_process_group() if dist.is_initialized() else pytest.skip("there is a GPU")
    with caplog.at_level(logging.WARNING):
        deepspeed.init_distributed("nccl")
    assert "the process group is over gloo" in caplog.text and dist.get_backend() == "gloo"
    dist.destroy_process_group()
    with pytest.raises(MeshError, match="dist_init_required=False"):
        deepspeed.init_distributed(dist_init_required=False)


def test_a_group_of_one_beside_ranks_of_a_launcher_is_refused(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    deepspeed.init_distributed()
    assert dist.get_world_size() == 1
    for launched in ("1", "many"):
        monkeypatch.setenv("WORLD_SIZE", launched)
        deepspeed.init_distributed()
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(MeshError, match=r"alone, and WORLD_SIZE is 8\n.*each rank would train a model of its own"):
        deepspeed.initialize(model=nn.Linear(2, 2), config=CONFIG)


@pytest.mark.parametrize(
    "environ, options, minutes",
    [
        ({}, {}, 30),
        ({"DEEPSPEED_TIMEOUT": "7"}, {}, 7),
        ({"DEEPSPEED_TIMEOUT": "7"}, {"timeout": timedelta(minutes=2)}, 2),
    ],
)
def test_a_collective_may_take_as_long_as_the_environment_or_the_script_says(monkeypatch, environ, options, minutes):
    asked = []
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: asked.append((args, kwargs)))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    deepspeed.init_distributed("gloo", **options)
    deepspeed.init_distributed("gloo", init_method="tcp://here:1", rank=1, world_size=2, **options)
    assert [kwargs["timeout"] for _, kwargs in asked] == [timedelta(minutes=minutes)] * 2
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "1")
    with pytest.raises(MeshError, match="this process is rank 0 of 1 by those of another launcher"):
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    assert asked[1][1]["init_method"] == "tcp://here:1" and (asked[1][1]["rank"], asked[1][1]["world_size"]) == (1, 2)


# -- optimizers, schedulers, checkpointing, arguments -----------------------------------------------------------------------
def test_a_seed_is_that_of_all_random_numbers():
    drawn = []
    for seed in (2**40 + 3, 2**40 + 3, 5):
        set_random_seed(seed)
        drawn.append((random.random(), np.random.rand(), float(torch.rand(()))))
    assert drawn[0] == drawn[1] and all(one != other for one, other in zip(drawn[0], drawn[2], strict=True))


def test_schedulers_say_what_they_were_given():
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = torch.optim.Adam([{"params": [p], "lr": rate} for p, rate in zip(parameters, (0.1, 0.2), strict=True)])
    warm = WarmupLR(optimizer, warmup_num_steps=1, warmup_type="linear")
    assert (warm.min_lrs, warm.max_lrs, warm.warmup_num_steps, warm.warmup_type) == ([0, 0], [0.1, 0.2], 2, "linear")
    for group, rate in zip(optimizer.param_groups, (0.1, 0.2), strict=True):
        group["lr"] = rate
    cosine = WarmupCosineLR(optimizer, total_num_steps=10, warmup_num_steps=10, cos_min_ratio=0.1)
    assert cosine.get_lr_ratio() == 0
    cosine.step(12)
    assert cosine.get_lr_ratio() == pytest.approx(0.1) and cosine.get_lr() == pytest.approx([0.01, 0.02])
    cycle = OneCycle(optimizer, [0.01, 0.02], [0.1, 0.2], cycle_first_step_size=6, cycle_second_step_size=2)
    assert (cycle.min_lrs, cycle.max_lrs, cycle.step_ratio) == ([0.01, 0.02], [0.1, 0.2], 0.75)


def test_schedulers_take_values_by_place_and_for_each_group():
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = torch.optim.Adam([{"params": [p]} for p in parameters], lr=1.0)
    schedule = WarmupLR(optimizer, 0.0, [0.1, 0.2], 4, "linear")
    for _ in range(3):
        schedule.step()
    assert (
        schedule.get_last_lr() == [pytest.approx(0.05), pytest.approx(0.1)] == [g["lr"] for g in optimizer.param_groups]
    )
    other = WarmupLR(optimizer, 0.0, [0.1, 0.2], 4, "linear")
    other.load_state_dict(schedule.state_dict())
    other.step()
    assert other.get_last_lr() == [pytest.approx(0.075), pytest.approx(0.15)]
    OneCycle(optimizer, 0.01, 0.1)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.99)
    with pytest.raises(PlanError, match="no argument 'warmup_steps'"):
        WarmupDecayLR(optimizer, total_num_steps=3, warmup_steps=1)
    with pytest.raises(PlanError, match="3 values for 2 groups"):
        WarmupLR(optimizer, warmup_max_lr=[1.0, 2.0, 3.0])
    with pytest.raises(TypeError, match="is not a subclass"):
        WarmupLR(3)


def test_deepspeeds_optimizers_refuse_what_they_are_not():
    parameters = [nn.Parameter(torch.ones(1))]
    with pytest.raises(StepError, match="makes no step by itself"):
        FusedLamb(parameters).step()
    with pytest.raises(PlanError, match="bias_correction=False"):
        FusedAdam(parameters, bias_correction=False)
    with pytest.raises(PlanError, match="no argument 'momentum'"):
        FusedAdam(parameters, momentum=0.9)
    assert DeepSpeedCPUAdam(parameters, 1e-2, True, (0.8, 0.9), 1e-7, 0.3).param_groups[0]["weight_decay"] == 0.3


def test_checkpointing_settings_that_belong_to_the_configuration_are_refused(caplog):
    with pytest.raises(UnsupportedError, match="cpu_checkpointing"):
        deepspeed.checkpointing.configure(None, checkpoint_in_cpu=True)
    config = {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": False}}
    deepspeed.checkpointing.configure(None, config, num_checkpoints=2)
    told = [record.getMessage() for record in caplog.records]
    assert ["partition_activations" in told[0], "num_checkpoints=2" in told[1], len(told)] == [True, True, 2]
    assert deepspeed.checkpointing.is_configured()
    with deepspeed.checkpointing.get_cuda_rng_tracker().fork():
        x = torch.ones(3, requires_grad=True)
        deepspeed.checkpointing.checkpoint(torch.sin, x).sum().backward()
    torch.testing.assert_close(x.grad, torch.cos(torch.ones(3)))


def test_older_calls_of_checkpointing_are_there():
    deepspeed.checkpointing.partition_activations_in_checkpoint(False)
    deepspeed.checkpointing.set_num_layers(4)
    with pytest.raises(UnsupportedError, match=r"partition_activations=True"):
        deepspeed.checkpointing.partition_activations_in_checkpoint(True)


def test_arguments_that_nothing_comes_of_are_told(caplog):
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    profiler = FlopsProfiler(model, recompute_fwd_factor=1.0)
    profiler.start_profile(ignore_list=[nn.ReLU])
    model(x)
    profiler.stop_profile()
    profiler.print_model_profile(top_modules=3)
    deepspeed.zero.Init(enabled=False, dtype=torch.bfloat16, config_dict_or_path={})
    deepspeed.checkpointing.get_cuda_rng_tracker().add("model-parallel-rng", 3)
    said = [
        r.getMessage().partition(" has no effect here: ")[0] for r in caplog.records if "no effect" in r.getMessage()
    ]
    assert said == [
        "FlopsProfiler(recompute_fwd_factor)",
        "start_profile(ignore_list)",
        "print_model_profile(top_modules)",
        "zero.Init(dtype=torch.bfloat16)",
        "get_cuda_rng_tracker().add('model-parallel-rng', 3)",
    ]
    accelerator = deepspeed.get_accelerator()
    assert torch.equal(accelerator.pin_memory(x, 1), x)
    with pytest.raises(UnsupportedError, match="make_copy=False"):
        accelerator.pin_memory(x, make_copy=False)


def test_arguments_are_deepspeeds():
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "a.json"])
    assert args.deepspeed and args.deepspeed_config == "a.json"


@pytest.mark.slow
def test_memory_is_told(caplog):
    with caplog.at_level(logging.INFO):
        utils.see_memory_usage("unasked")
        utils.see_memory_usage("asked", force=True)
    assert "asked: host" in caplog.text and "unasked" not in caplog.text
    assert utils.memory_status()["resident"] > 2**20


# -- pipelines ----------------------------------------------------------------------------------------------------------------
def test_topologies_are_deepspeeds():
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=3)
    assert topology.world_size() == 12 and topology.get_rank(pipe=1, data=2, model=0) == 10
    assert topology.get_coord(7) == (1, 0, 1) and topology.get_dim("model") == 2 and topology.get_dim("expert") == 0
    assert topology.get_axis_comm_lists("pipe")[0] == [0, 6] and topology.filter_match(pipe=0, data=1) == [2, 3]
    assert topology.get_axis_list("model", 1) == [1, 3, 5, 7, 9, 11] and topology.get_rank_repr(7) == "model_01"
    grid = PipelineParallelGrid(topology, rank=7)
    assert (grid.get_stage_id(), grid.get_data_parallel_id(), grid.get_slice_parallel_rank()) == (1, 0, 1)
    assert grid.stage_to_global(0) == 1 and grid.topology() is topology
    # (all ranks that have one copy of the model: stages and divided weights)
    assert (grid.get_model_parallel_rank(), grid.get_model_parallel_world_size()) == (3, 4)
    assert (grid.dp_group, grid.pp_group, grid.slice_group) == ([7, 9, 11], [1, 7], [6, 7])
    with pytest.raises(MeshError, match="name each axis"):
        topology.get_rank(pipe=0)
    with pytest.raises(MeshError, match=f"the topology has 12 ranks, and there are {comm.get_world_size()}"):
        PipelineParallelGrid(topology)
    with pytest.raises(MeshError, match="one size for each axis"):
        ProcessTopology(["a", "a"], [1, 2])


@pytest.mark.parametrize(
    "layers, options, error, said",
    [
        ([nn.Linear(2, 2)], {}, PlanError, "needs num_stages or a topology"),
        ([3], {"num_stages": 1}, ModelError, "layer 0 is a int"),
        (
            [nn.Linear(2, 2)],
            {"num_stages": 1, "partition_methods": "uniform"},
            PlanError,
            "no option 'partition_methods'",
        ),
        ([PipelineModule([nn.Linear(2, 2)], num_stages=1)], {"num_stages": 1}, UnsupportedError, "a pipeline itself"),
    ],
)
def test_bad_pipelines_are_refused(layers, options, error, said):
    with pytest.raises(error, match=said):
        PipelineModule(layers, **options)
    with pytest.raises(ModelError, match="takes a class of"):
        LayerSpec(torch.sin)


def test_options_that_change_no_number_are_told(caplog):
    PipelineModule([nn.Linear(2, 2)], num_stages=1, dynamic_shape=True, seed_layers=True)
    (told,) = [r.getMessage() for r in caplog.records if "PipelineModule" in r.getMessage()]
    assert "dynamic_shape=…) has no effect here" in told


def test_losses_that_are_not_the_mean_are_refused():
    model = PipelineModule([nn.Linear(2, 2)], num_stages=1, loss_fn=nn.functional.mse_loss)
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG)
    with pytest.raises(UnsupportedError, match="reduce_output=None"):
        engine.eval_batch(iter([(torch.ones(2, 2), torch.ones(2, 2))]), reduce_output=None)


def drawn(**options):
    """What layers draw: one of a spec, one that is tied, one that is built already, and the last again."""
    torch.manual_seed(9)
    layers = [
        LayerSpec(nn.Linear, 2, 2),
        TiedLayerSpec("t", nn.Linear, 2, 2),
        TiedLayerSpec("t", nn.Linear, 2, 2),
        LayerSpec(nn.Linear, 2, 2),
    ]
    model = PipelineModule(layers, num_stages=1, **options)
    return [layer.weight.detach()[0, 0].item() for layer in model.forward_funcs]


def seeded(*seeds):
    found = []
    for seed in seeds:
        torch.manual_seed(seed)
        found.append(nn.Linear(2, 2).weight.detach()[0, 0].item())
    return found


def test_layers_draw_by_seeds_of_their_own():
    """(A layer's seed is that of the pipeline and its place, as in DeepSpeed; a tied one is drawn where it comes first.)"""
    at = seeded(1234, 1235, 1237)
    assert drawn(seed_layers=True) == [at[0], at[1], at[1], at[2]]
    at = seeded(7, 8, 10)
    assert drawn(seed_layers=True, base_seed=7) == [at[0], at[1], at[1], at[2]]
    at = seeded(14, 16, 20)
    assert drawn(seed_layers=True, base_seed=7, seed_fn=lambda seed: torch.manual_seed(2 * seed)) == [
        at[0],
        at[1],
        at[1],
        at[2],
    ]
    assert drawn(seed_fn=lambda seed: torch.manual_seed(0)) == drawn() != drawn(seed_layers=True)


class Vision(PipelineModule):
    """A pipeline as posts write it: settings of its own, a plain model's layers in a row with functions between them."""

    def __init__(self, classes, **options):
        self.classes = classes
        self.specs = [
            LayerSpec(nn.Conv2d, 1, 4, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d((2, 2)),
            lambda x: torch.flatten(x, 1),
            LayerSpec(nn.Linear, 16, 16),
            nn.ReLU(inplace=True),
            LayerSpec(nn.Linear, 16, self.classes),
        ]
        super().__init__(layers=self.specs, loss_fn=nn.CrossEntropyLoss(), **options)
        self.scale = 1.0

    def count(self):
        return sum(p.numel() for p in self.parameters())


def trained_vision(stages, options):
    """The losses of three steps of two micro-batches, and of the same layers in plain PyTorch."""
    torch.manual_seed(3)
    model = Vision(5, num_stages=stages, **options)
    torch.manual_seed(3)
    plain = nn.Sequential(
        *(layer if isinstance(layer, nn.Module) else nn.Flatten(1) for layer in Vision(5, num_stages=1).forward_funcs)
    )
    count = model.count()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0)
    config = {**CONFIG, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=config
    )
    data = torch.Generator().manual_seed(0)
    batches = [(torch.randn(2, 1, 6, 6, generator=data), torch.randint(5, (2,), generator=data)) for _ in range(6)]
    loader, mine, theirs = iter(batches), [], []
    for step in range(3):
        mine.append(engine.train_batch(data_iter=loader).item())
        losses = [nn.functional.cross_entropy(plain(x), y) / 2 for x, y in batches[2 * step : 2 * step + 2]]
        sum(losses).backward()
        theirs.append(sum(losses).item())
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert (
        engine.module.scale == 1.0
        and engine.classes == 5
        and engine.num_stages == stages
        and count == sum(p.numel() for p in plain.parameters())
    )
    return mine, theirs


def test_a_subclass_of_a_pipeline_trains_as_its_layers_do():
    mine, theirs = trained_vision(1, {})
    assert mine == pytest.approx(theirs, rel=1e-5) and len(set(mine)) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"activation_checkpoint_interval": 1, "partition_method": "type:Linear|Conv2d"}], ids=str
)
def test_a_subclass_of_a_pipeline_trains_in_stages(two, options):
    for mine, theirs in two.run(trained_vision, 2, options):
        assert mine == pytest.approx(theirs, rel=1e-5) and len(set(mine)) == 3


def test_a_pipeline_evaluates_to_its_loss_its_output_or_both():
    model = PipelineModule([nn.Linear(2, 2)], num_stages=1, loss_fn=nn.functional.mse_loss)
    engine, *_ = deepspeed.initialize(model=model, config={**CONFIG, "gradient_accumulation_steps": 2})
    batches = [(torch.randn(2, 2), torch.randn(2, 2)) for _ in range(2)]
    with torch.no_grad():
        wanted = torch.cat([model(x) for x, _ in batches])
    mean = nn.functional.mse_loss(wanted, torch.cat([y for _, y in batches]))
    loss, output = engine.eval_batch(iter(batches), return_logits=True)
    torch.testing.assert_close((loss, output), (mean, wanted))
    torch.testing.assert_close(engine.eval_batch(iter(batches), compute_loss=False), wanted)
    torch.testing.assert_close(
        engine.eval_batch(iter(batches[:1]), num_micro_batches=1), nn.functional.mse_loss(wanted[:2], batches[0][1])
    )
    assert not engine.module.training and engine.global_steps == 0


def test_an_iterator_or_a_loader_may_be_set_where_no_data_was_given():
    """The gradient of a step is that of the mean over its micro-batches, once."""
    batch = (torch.ones(1, 1), torch.zeros(1, 1))
    for set_it, given in (
        ("set_dataiterator", deepspeed.utils.RepeatingLoader([batch])),
        ("set_dataiterator", [batch] * 2),
        ("set_dataloader", [batch]),
    ):
        layers = [nn.Linear(1, 1, bias=False) for _ in range(2)]
        for layer in layers:
            nn.init.ones_(layer.weight)
        model = PipelineModule(layers, num_stages=1, loss_fn=nn.MSELoss())
        config = {**CONFIG, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0}
        config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
        engine, *_ = deepspeed.initialize(model=model, config=config)
        getattr(engine, set_it)(given)
        assert engine.train_batch().item() == pytest.approx(1.0)
        for weight in engine.module.parameters():
            torch.testing.assert_close(weight.full_tensor().detach(), torch.tensor([[0.8]]))


def test_micro_batches_of_different_sizes_are_refused():
    model = PipelineModule([nn.Linear(2, 2)], num_stages=1, loss_fn=nn.functional.mse_loss)
    engine, *_ = deepspeed.initialize(model=model, config={**CONFIG, "gradient_accumulation_steps": 2})
    with pytest.raises(StepError, match="have different sizes"):
        engine.train_batch(iter([(torch.ones(2, 2), torch.ones(2, 2)), (torch.ones(1, 2), torch.ones(1, 2))]))
    rows = torch.ones(2, 2)
    for others, said in [
        ([2.0, 3.0], "one has 2.0, another 3.0"),
        ([torch.tensor(1), torch.tensor(4)], "different values that are no rows"),
        ([{"a": 1.0}, {"b": 1.0}], "different structures"),
    ]:
        with pytest.raises(StepError, match=said):
            engine.train_batch(iter([((rows, other), rows) for other in others]))
    with pytest.raises(StepError, match=r"no pair \(inputs, labels\)"):
        engine.train_batch(iter([torch.ones(2, 2)] * 2))
    engine.set_batch_fn(lambda x: (x, x))
    assert engine.train_batch(iter([torch.ones(2, 2)] * 2)).dim() == 0 and engine.global_steps == 1


def doubled(layer, x):
    return layer(x) * 2


def piped(stage, method, parts):
    """On ranks: two stages against the same layers in one process; tuples as inputs, a function as a layer."""

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, pair):
            x, shift = pair
            return self.layer(x) + shift

    def layers():
        torch.manual_seed(1)
        tied = TiedLayerSpec("t", nn.Linear, 6, 6)
        return [
            LayerSpec(First),
            torch.tanh,
            tied,
            nn.Linear(6, 6),
            TiedLayerSpec("t", nn.Linear, 6, 6, forward_fn=doubled),
            nn.Linear(6, 3),
        ]

    def loss_fn(output, labels):
        return nn.functional.cross_entropy(output, labels)

    config = {**CONFIG, "gradient_accumulation_steps": parts, "zero_optimization": {"stage": stage}}
    model = PipelineModule(layers(), num_stages=2, loss_fn=loss_fn, partition_method=method)
    plain = PipelineModule(layers(), num_stages=2, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    data = torch.Generator().manual_seed(0)
    batches = [
        ((torch.randn(2, 6, generator=data), torch.randn(2, 6, generator=data)), torch.randint(3, (2,), generator=data))
        for _ in range(3 * parts)
    ]
    mine, theirs = [], []
    for step in range(2):
        now = batches[step * parts : (step + 1) * parts]
        mine.append(engine.train_batch(iter(now)).item())
        losses = [plain(*batch) / parts for batch in now]
        sum(losses).backward()
        theirs.append(sum(losses).item())
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    left = batches[2 * parts :]
    mine.append(engine.eval_batch(iter(left)).item())
    with torch.no_grad():
        theirs.append(sum(plain(*batch).item() for batch in left) / parts)
    whole = tuple(torch.cat([b[0][i] for b in left]) for i in range(2)), torch.cat([b[1] for b in left])
    mine.append(engine.train_batch(data=whole[0], targets=whole[1]).item())
    theirs.append(theirs[-1])
    assert engine.global_steps == 3 and engine.is_pipe_parallel() and engine.stage_id == dist.get_rank()
    assert engine.get_global_grad_norm() > 0
    try:
        engine(whole[0])
    except ModelError as error:
        assert "no forward of its own" in str(error)
    return mine, theirs


@sweep("stage, method, parts", [(1, "uniform", 2), (3, "parameters", 2), (0, "type:Linear", 1)], quick=(1,))
def test_a_pipeline_trains_as_its_layers_do(two, stage, method, parts):
    for mine, theirs in two.run(piped, stage, method, parts):
        assert mine == pytest.approx(theirs, abs=1e-5)


def resumed(divided, folder):
    """A model in stages, or with divided weights, goes on from a checkpoint that is loaded before its first call: what is known at once, and the
    losses and rates of two steps of the run that saved it and of the one that goes on."""
    config = {
        **CONFIG,
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": 5e-2, "warmup_num_steps": 4, "warmup_type": "linear"},
        },
    }
    if divided:
        config |= {"tensor_parallel": {"autotp_size": 2}}
    data = torch.Generator().manual_seed(0)
    batches = [(torch.randn(2, 6, generator=data), torch.randint(4, (2,), generator=data)) for _ in range(12)]

    def made(seed):
        torch.manual_seed(seed)
        layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)]
        model = (
            nn.Sequential(*layers)
            if divided
            else PipelineModule(layers, num_stages=2, loss_fn=nn.functional.cross_entropy)
        )
        return deepspeed.initialize(model=model, config=config)[0]

    def step(engine, number):
        losses = []
        parts = engine.gradient_accumulation_steps()
        now = batches[number * parts : (number + 1) * parts]
        if not divided:
            return engine.train_batch(iter(now)).item()
        for inputs, labels in now:
            loss = nn.functional.cross_entropy(engine(inputs), labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return sum(losses) / parts

    engine = made(0)
    for number in range(2):
        step(engine, number)
    engine.save_checkpoint(folder, client_state={"epoch": 7})
    said = engine.global_steps, engine.get_lr()
    other = made(1)
    path, client = other.load_checkpoint(folder)
    assert path.endswith("global_step2") and client == {"epoch": 7}
    assert (other.global_steps, other.get_lr()) == said
    for name, param in other.module.named_parameters():
        held = dict(engine.module.named_parameters())[name]
        if not held.is_meta:  # (of another stage)
            assert torch.equal(param, held.full_tensor() if isinstance(held, DTensor) else held)
    one, two = ([(step(e, n), e.get_lr()) for n in (2, 3)] for e in (engine, other))
    return one, two


@sweep("divided", [False, True], quick=1)
def test_a_checkpoint_is_loaded_before_a_models_first_call(two, tmp_path, divided):
    for one, other in two.run(resumed, divided, str(tmp_path)):
        assert one == other


def stepped_by_its_own(rank_count):
    """An optimizer that no plan has: of a model with divided weights the largest difference to plain PyTorch's, and what is said of one in stages."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    model = copy.deepcopy(plain)
    config = {k: v for k, v in CONFIG.items() if k != "optimizer"} | {"tensor_parallel": {"autotp_size": rank_count}}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.RAdam(model.parameters(), lr=0.1), config=config
    )
    optimizer = torch.optim.RAdam(plain.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(0)
    apart = []
    for _ in range(3):
        x = torch.randn(2, 6, generator=data)
        loss, theirs = engine(x).square().mean(), plain(x).square().mean()
        apart.append(abs(loss.item() - theirs.item()))
        engine.backward(loss)
        engine.step()
        theirs.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    staged = PipelineModule(
        [nn.Linear(6, 8), nn.Linear(8, 4)], num_stages=rank_count, loss_fn=nn.functional.cross_entropy
    )
    try:
        deepspeed.initialize(model=staged, optimizer=torch.optim.RAdam(staged.parameters()), config=CONFIG)
    except UnsupportedError as error:
        return max(apart), str(error)


def test_an_optimizer_of_the_scripts_own_steps_divided_weights_and_no_stages(two):
    for apart, said in two.run(stepped_by_its_own, 2):
        assert apart < 1e-6
        assert "the script's own RAdam can't update a pipeline" in said


def test_leaf_modules_are_found_by_class_name_and_ending():
    class Own(nn.Linear):
        pass

    model = nn.ModuleDict({"experts": nn.Sequential(Own(2, 2), nn.Linear(2, 2)), "head": nn.Linear(2, 2)})
    own = model["experts"][0]
    assert utils.set_z3_leaf_modules(model, [Own]) == [own] and utils.get_z3_leaf_modules(model) == [own]
    assert utils.unset_z3_leaf_modules(model, [f"{Own.__module__}.{Own.__qualname__}"]) == [own]
    assert len(utils.set_z3_leaf_modules(model, [nn.Linear])) == 3  # classes made from it as well
    assert utils.set_z3_leaf_modules_by_name(model, ["head", "tail"], raise_if_not_found=False) == (
        [model["head"]],
        ["tail"],
    )
    assert utils.set_z3_leaf_modules_by_suffix(model, [".0"]) == ([own], [])
    assert utils.set_z3_leaf_modules(model, ["Conv2d"], raise_if_not_found=False) == []
    for call, asked in [
        (utils.set_z3_leaf_modules, [nn.Conv2d]),
        (utils.set_z3_leaf_modules_by_name, ["tail"]),
        (utils.set_z3_leaf_modules_by_suffix, ["tail"]),
    ]:
        with pytest.raises(ValueError, match="the model has no module"):
            call(model, asked)


def test_modules_are_built_on_a_device_and_in_a_dtype():
    before = torch.get_default_dtype()
    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        made = nn.Linear(2, 3)
    assert made.weight.is_meta and made.weight.dtype is torch.bfloat16
    assert torch.get_default_dtype() is before and not nn.Linear(2, 2).weight.is_meta
    with deepspeed.OnDevice(dtype=torch.bfloat16, enabled=False):
        assert nn.Linear(2, 2).weight.dtype is before


@pytest.mark.parametrize("name", ["init_inference", "tp_model_init"])
def test_what_is_for_inference_is_refused(name):
    with pytest.raises(UnsupportedError, match=name):
        getattr(deepspeed, name)(nn.Linear(2, 2))


def test_names_of_deepspeeds_are_there_without_imports_of_their_own():
    assert deepspeed.__version__ == deepspeed.version
    assert deepspeed.runtime.lr_schedules.WarmupLR is not None
    assert deepspeed.get_accelerator().device_name() in ("cpu", "cuda")
    assert issubclass(deepspeed.DeepSpeedConfigError, ValueError)
    with pytest.raises(AttributeError, match="no attribute"):
        _ = deepspeed.runtime.nothing


PLACES = [
    "checkpoint.utils.clone_tensors_for_torch_save",
    "profiling.flops_profiler.get_model_profile",
    "profiling.flops_profiler.profiler.FlopsProfiler",
    "runtime.activation_checkpointing.checkpointing.checkpoint",
    "runtime.config.DeepSpeedConfigError",
    "runtime.dataloader.RepeatingLoader",
    "runtime.engine.DeepSpeedEngine",
    "runtime.lr_schedules.WarmupLR",
    "runtime.pipe.engine.PipelineEngine",
    "runtime.pipe.module.PipelineModule",
    "runtime.pipe.topology.PipeModelDataParallelTopology",
    "runtime.utils.see_memory_usage",
    "runtime.zero.partition_parameters.GatheredParameters",
    "runtime.zero.partition_parameters.ZeroParamStatus",
    "runtime.zero.stage3.estimate_zero3_model_states_mem_needs_all_live",
    "utils.OnDevice",
    "ops.adam.DeepSpeedCPUAdam",
    "ops.lamb.FusedLamb",
    "ops.lion.FusedLion",
    "utils.logger",
    "utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint",
]


@pytest.mark.parametrize("place", PLACES)
def test_names_are_imported_from_where_scripts_import_them(place):
    module, name = f"zgraph.deepspeed.{place}".rsplit(".", 1)
    assert hasattr(importlib.import_module(module), name)
    found = deepspeed
    for part in place.split("."):
        found = getattr(found, part)
    assert found is getattr(importlib.import_module(module), name)


def test_clones_for_torch_save_are_whole_tensors(two):
    x = torch.arange(6.0)
    copied = clone_tensors_for_torch_save({"a": [x[:2], (x[2:], 3)]})
    assert torch.equal(copied["a"][1][0], x[2:]) and copied["a"][0].untyped_storage().nbytes() == 8
    assert copied["a"][1][1] == 3
    assert two.run(cloned_shard) == [True, True]


def cloned_shard():
    engine, *_ = deepspeed.initialize(model=nn.Linear(4, 4), config={**CONFIG, "zero_optimization": {"stage": 1}})
    with pytest.raises(UnsupportedError, match="save_16bit_model"):
        clone_tensors_for_torch_save(engine.module.state_dict())
    return True


def test_what_deepspeed_does_between_steps_is_refused_by_name():
    engine, *_ = deepspeed.initialize(
        model=nn.Linear(2, 2),
        config={
            "train_batch_size": 2,
            "optimizer": {"type": "SGD"},
            "zgraph": {"backend": "eager"},
            "flops_profiler": {"module_depth": 2},
        },
    )
    for name in ("offload_states", "reload_states"):
        with pytest.raises(UnsupportedError, match=f"engine.{name}"):
            getattr(engine, name)()
    with pytest.raises(UnsupportedError, match=r"utils\.groups\._get_data_parallel_group"):
        deepspeed.utils.groups._get_data_parallel_group()
    assert (engine.flops_profiler_module_depth(), engine.zero_allgather_partitions(), engine.autotp_size()) == (
        2,
        True,
        0,
    )
    dist.destroy_process_group()
