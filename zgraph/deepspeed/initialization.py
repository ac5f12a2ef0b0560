"""`initialize`: DeepSpeed's call, which returns an engine on a compiled model.

A configuration becomes a plan (`zgraph.deepspeed.translate`), together with the objects that a script passes: an optimizer, groups of parameters,
a scheduler. The model is compiled in place; one that is already compiled runs by the new plan from now on, with a fresh optimizer.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zgraph.api.compiler import compile
from zgraph.deepspeed import comm
from zgraph.deepspeed.client_optimizer import torchs_own
from zgraph.deepspeed.engine import Batch, DeepSpeedEngine, Training
from zgraph.deepspeed.engine_optimizer import EngineOptimizer, follow, rebind
from zgraph.deepspeed.engine_settings import value_of
from zgraph.deepspeed.lr_schedulers import (
    VALID_LR_SCHEDULES,
    Scheduler,
    by_groups,
    is_scheduler,
    refuse_another_optimizers,
)
from zgraph.deepspeed.parameter_groups import (
    freeze_others,
    groups_of,
    names_of,
    of_model_parameters,
    record_of,
)
from zgraph.deepspeed.pipe.engine import PipelineEngine
from zgraph.deepspeed.pipe.module import PipelineModule
from zgraph.deepspeed.read_config import Config, fill, read
from zgraph.deepspeed.recompile import recompile
from zgraph.deepspeed.report import Report, Row
from zgraph.deepspeed.step_hooks import clip_alone, pass_over
from zgraph.deepspeed.translate import DTYPES
from zgraph.deepspeed.translate import report as report_on
from zgraph.deepspeed.unsupported import InitializeMisuse
from zgraph.deepspeed.update_of_zeros import begins_with_zeros, update_of_zeros
from zgraph.deepspeed.utils.logging import LEVELS, set_log_level_from_string
from zgraph.errors import ModelError, PlanError, UnsupportedError
from zgraph.plan.clipping_and_ema import GradClip
from zgraph.plan.lr_schedules import AnySchedule, TorchSchedule
from zgraph.plan.plan import Plan
from zgraph.plan.precision import Precision, preset
from zgraph.runtime.compiled_models import is_compiled
from zgraph.update.torch_lr_schedulers import torch_scheduler

logger = logging.getLogger(__name__)

_UNBOUNDED = 3e38  # a norm that clips nothing: the gradients' norm is measured, and they stay unchanged


@dataclass
class Given:
    """The objects that a script has passed besides its model and configuration."""

    optimizer: Any = None  # an optimizer object, also if a function was given that makes one
    names: list[list[str]] | None = None  # the names of the parameters in each of `groups`
    scheduler: Any = None  # a scheduler object, or a function of the optimizer
    written: dict[str, str] = field(default_factory=dict)  # sections that an object was made of, and what it is
    groups: list[dict[str, Any]] | None = None  # the optimizer's groups, else those of `model_parameters`
    others: list[str] = field(default_factory=list)  # the names of the parameters that are in none of `groups`


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Config | None = None,
    mesh_param: Any = None,
    config_params: Config | None = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Compile the model by a DeepSpeed configuration; return (engine, optimizer, data loader, scheduler), with None for what is not given.

    `config` is a dict or a path; `args.deepspeed_config` and `config_params` are the same. Its section "zgraph" has fields of
    a plan that DeepSpeed has no key for ({"backend": "eager", "memory_budget": "20GiB"}). `optimizer` is an object of torch's
    or `zgraph.deepspeed.ops`, or a function of `model_parameters`; it takes precedence over the configuration's. Optimizers
    that plans support (Adam, AdamW, SGD, Adagrad, Lion, LAMB) run as the plan's compiled update; others, and those of
    torch's that the configuration names (`optimizers.TORCHS_OWN`), step by themselves, on shards. `lr_scheduler` is an
    object or a function of the optimizer; it takes precedence too. `training_data` gives a loader of this rank's micro-batches.

    All ranks must call it. A model that was initialized before keeps its weights and runs by the new configuration. Raises
    `PlanError` with a problem for each key that zgraph does not support, `ModelError` and others as `zgraph.compile` does.
    """
    if model is None:
        raise InitializeMisuse("initialize needs a model", hint="initialize(model=model, config=…)")
    if isinstance(model, DeepSpeedEngine):
        model = model.module
    if not isinstance(model, nn.Module):
        raise ModelError(f"initialize takes an nn.Module, not {type(model).__name__}")
    comm.init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    if hasattr(args, "local_rank"):  # (which torchrun says by a variable alone)
        args.local_rank = comm.get_local_rank()
    given_config = read(_config_of(args, config, config_params))
    if isinstance(given_config.get("zero_optimization"), bool):
        given_config["zero_optimization"] = {"stage": int(given_config["zero_optimization"])}
    fill(given_config, model, None)
    _refuse_other_groups(mpu, mesh_param, given_config)
    if isinstance(model, PipelineModule):
        model.configure(given_config)
    comm.configure(deepspeed_config=given_config)
    if isinstance(level := given_config.get("log_level"), str) and level.lower() in LEVELS:
        set_log_level_from_string(level)
    _to_device(model)
    written = _written(given_config, optimizer, lr_scheduler)
    given = _given(model, optimizer, model_parameters, lr_scheduler, written)
    plan, report = _planned(given_config, given, model)
    batch = _batch(given_config, plan)
    training = _training(model, plan, given, given_config)
    training.report, training.collate_fn, training.data, training.mpu = report, collate_fn, training_data, mpu
    if comm.get_rank() == 0:
        logger.info("what became of the configuration:\n%s", report)
    kind = PipelineEngine if isinstance(model, PipelineModule) else DeepSpeedEngine
    engine = kind(model, given_config, batch, training)
    if training_data is not None:
        training.loader = engine.training_loader(training_data)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


# -- the configuration ----------------------------------------------------------------------------------------------------
def _config_of(args: Any, config: Config | None, config_params: Config | None) -> Config:
    """Return the one configuration that is given. Raises `PlanError` if there is none, and if there are two."""
    of_args = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    configs = [c for c in (config, config_params, of_args) if c is not None]
    if not configs:
        raise PlanError(
            "initialize needs a configuration",
            hint="config=…, a dict or the path of a JSON file; or --deepspeed_config",
        )
    if len(configs) > 1:
        raise PlanError(
            "a configuration is given twice: by two of args.deepspeed_config, config and config_params",
            hint="leave one out",
        )
    return configs[0]


def _refuse_other_groups(mpu: Any, mesh_param: Any, config: dict[str, Any]) -> None:
    """Raise `UnsupportedError` for groups of ranks that are not those of the plan's mesh."""
    if mesh_param is not None:
        raise UnsupportedError(
            "initialize does not take mesh_param",
            why="the mesh follows from the configuration",
            hint='"sequence_parallel_size" in the configuration',
        )
    if mpu is None:
        return
    size, ranks = (_of_mpu(mpu, name) for name in ("world_size", "group"))
    asked = value_of(config, "tensor_parallel.autotp_size") or value_of(config, "tensor_parallel.tp.tp_size") or 1
    if size is None or size not in (1, asked):
        raise UnsupportedError(
            "initialize(mpu=…) with a model that is divided already",
            why=f"it says {size} ranks divide the model, and the configuration {asked}: its layers would communicate by themselves, and the captured "
            "program has to know all that does",
            hint='give the undivided model, and "tensor_parallel": {"autotp_size": N} in the configuration',
        )
    first = comm.get_rank() // size * size
    own = list(range(first, first + size))
    if size > 1 and ranks is not None and dist.get_process_group_ranks(ranks) != own:
        raise UnsupportedError(
            f"the mpu's model-parallel group has ranks {dist.get_process_group_ranks(ranks)}",
            why=f"ranks that divide weights stand side by side in a plan's mesh: they are {own}",
            hint="make groups of consecutive ranks, or leave mpu out",
        )


def _of_mpu(mpu: Any, what: str) -> Any:
    """Return what an object for groups of ranks says of tensor parallelism, by either of its names; None if it says nothing."""
    names = (f"get_model_parallel_{what}", f"get_tensor_model_parallel_{what}")
    ask = next((getattr(mpu, name) for name in names if hasattr(mpu, name)), None)
    return None if ask is None else ask()


def _planned(config: dict[str, Any], given: Given, model: nn.Module) -> tuple[Plan, Report]:
    """Return the plan of a configuration and of the objects that the script has passed, with the report on the
    configuration."""
    own = given.optimizer is not None
    translated = dict(config)
    if own:  # (a schedule needs an optimizer; this one is replaced below)
        translated["optimizer"] = {"type": "AdamW"}
    if given.scheduler is not None:
        translated.pop("scheduler", None)
    by_engine = [] if isinstance(model, PipelineModule) else _by_engine(translated)
    report = report_on(translated, world=comm.get_world_size(), model=model)
    plan = report.require_plan()
    if own:
        report = _overridden(report, config, "optimizer", given.written)
    if given.scheduler is not None:
        report = _overridden(report, config, "scheduler", given.written)
    keys = {row.key for row in by_engine}
    report = replace(report, rows=(*(row for row in report.rows if row.key not in keys), *by_engine))
    record = _of_model(plan.resolved_precision(), config)
    fields: dict[str, Any] = {"precision": _precision(record)}
    if own:
        assert given.names is not None
        fields["optimizer"] = record_of(given.optimizer, given.names)
    elif plan.optimizer is not None and given.groups is not None:
        assert given.names is not None
        fields["optimizer"] = of_model_parameters(plan.optimizer, given.groups, given.names)
    if fields.get("optimizer", plan.optimizer) is None:
        _refuse_in_stages(given.optimizer, model)
        _refuse_offloaded(given.optimizer, plan)
        fields |= {"optimizer": None, "lr_schedule": None, "grad_clip": None, "on_nonfinite": "ignore"}
        fields["precision"] = _for_own_optimizer(record, given)
        report = _without_accumulation(report)
    else:
        # (the engine's scheduler changes the groups; and the norm is always measured)
        fields |= {"lr_schedule": None, "grad_clip": plan.grad_clip or GradClip(norm=_UNBOUNDED)}
    if fields["precision"] != "fp32":
        fields["numerics"] = None
    asked = config.get("zgraph") or {}  # (the plan has these fields already)
    return plan.model_copy(update={k: v for k, v in fields.items() if k not in asked}), report


def _by_engine(config: dict[str, Any]) -> list[Row]:
    """Take out of a configuration what an engine does and no plan; return the report's rows on it."""
    rows = []
    if config.get("gradient_allreduce_op") == "sum":
        del config["gradient_allreduce_op"]
        said = "the engine multiplies each loss by the data-parallel ranks, over which the plan averages"
        rows.append(Row("gradient_allreduce_op", "sum", "applied", said))
    section, enabled, dtype = config.get("torch_autocast"), "torch_autocast.enabled", "torch_autocast.dtype"
    if value_of(config, enabled) is True and DTYPES.get(str(value_of(config, dtype)).lower()) == "bfloat16":
        config["torch_autocast"] = {**section, "enabled": False}  # type: ignore[dict-item]
        said = "the engine's forward runs in torch.autocast; weights, and the reduction of their gradients, keep their dtype"
        rows += [Row(enabled, True, "applied", said), Row(dtype, section["dtype"], "applied", "torch.bfloat16")]  # type: ignore[index]
    return rows


def _overridden(report: Report, config: dict[str, Any], section: str, written: Mapping[str, str]) -> Report:
    """Return the report with a section's keys as without effect, and say so: `initialize` was given an object in its
    place. An object that was made of the section itself is `written`: its keys are applied."""
    rows = [row for row in report.rows if row.key.split(".")[0] != section]
    given = config.get(section)
    if section in written:
        rows += [Row(f"{section}.{key}", value, "applied", written[section]) for key, value in config[section].items()]
    elif given:
        said = f"initialize was given {'an' if section[0] in 'aeiou' else 'a'} {section}, which takes precedence"
        logger.warning("the configuration's %s is left out: %s", section, said)
        rows += [Row(f"{section}.{key}", value, "no effect here", said) for key, value in given.items()]
    return replace(report, rows=tuple(rows))


def _of_model(record: Precision, config: dict[str, Any]) -> Precision:
    """Return a plan's precision with the model's buffers as they are, unless the configuration asks for another dtype
    of theirs."""
    if record.buffer is None or value_of(config, "data_types.buffer_dtype") is not None:
        return record
    return record.model_copy(update={"buffer": None})


def _precision(record: Precision) -> str | Precision:
    """Return the precision of the plan's optimizer: DeepSpeed's dtypes, low parameters with fp32 master weights.

    With fp16, outputs are float32, so that the gradient of a loss outside of the model does not overflow or vanish
    before it is scaled.
    """
    if record == Precision():
        return "fp32"
    if record.compute == "float16" and record.output is None:
        return record.model_copy(update={"output": "float32"})
    return record


def _for_own_optimizer(record: Precision, given: Given) -> str | Precision:
    """Return the precision for an optimizer that plans do not support: fp32 weights, which it updates itself.

    Raises `PlanError` for fp16.
    """
    if record.compute == "float16" and given.optimizer is not None:
        raise PlanError(
            f"fp16 is enabled, and {type(given.optimizer).__name__} is no optimizer that a plan has",
            where="fp16.enabled",
            why="a step whose gradients overflow is skipped by the compiled update, which a plan has no such optimizer for",
            hint="Adam, AdamW, SGD, Adagrad, Lion or LAMB; or bf16",
        )
    if record == Precision():
        return "fp32"
    low = {"float16": "fp16", "bfloat16": "bf16"}.get(str(record.compute))
    usual, own = (preset(low, "deepspeed"), preset(low, None)) if low is not None else (Precision(), Precision())
    asked: dict[str, Any] = {"buffer": record.buffer, "keep_fp32": record.keep_fp32}
    if record.reduce != usual.reduce:
        asked["reduce"] = record.reduce
    return own.model_copy(update=asked)


def _without_accumulation(report: Report) -> Report:
    """Return the report with the gradients' dtype as without effect: the script's own optimizer takes them in the
    dtype of their parameters."""
    key, said = (
        "data_types.grad_accum_dtype",
        "the script's own optimizer takes gradients in its parameters' dtype, fp32",
    )
    rows = (Row(key, row.value, "no effect here", said) if row.key == key else row for row in report.rows)
    return replace(report, rows=tuple(rows))


def _batch(config: dict[str, Any], plan: Plan) -> Batch:
    """Return the sizes of a step. Raises `PlanError` if the configuration does not say how many rows there are."""
    world = comm.get_world_size()
    plan = plan.for_world(world)
    ranks = plan.data_ranks(world)
    rows, total = config.get("train_micro_batch_size_per_gpu"), config.get("train_batch_size")
    if plan.elastic is not None and plan.elastic.rows is not None:
        rows = plan.elastic.rows // plan.micro_batches
    if not isinstance(rows, int):
        if not isinstance(total, int):
            raise PlanError(
                "the configuration does not say how many rows a step has",
                where="train_batch_size",
                hint="give train_batch_size or train_micro_batch_size_per_gpu",
            )
        rows = total // (plan.micro_batches * ranks)
    return Batch(int(rows), plan.micro_batches, ranks)


def _to_device(model: nn.Module) -> None:
    """Move a model to this rank's GPU, as DeepSpeed does."""
    if not torch.cuda.is_available() or is_compiled(model):
        return
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if any(p.device.type == "cpu" for p in model.parameters()) and not any(p.is_meta for p in model.parameters()):
        model.to(device)


# -- what the script has handed over ----------------------------------------------------------------------------------------
def _given(
    model: nn.Module,
    optimizer: Any,
    model_parameters: Iterable[Any] | None,
    scheduler: Any,
    written: Mapping[str, tuple[Any, str]],
) -> Given:
    """Return the objects that were passed or are `written`, with the names of their parameters, before anything of the
    model is changed."""
    optimizer = written["optimizer"][0] if "optimizer" in written else optimizer
    scheduler = written["scheduler"][0] if "scheduler" in written else scheduler
    refuse_another_optimizers(scheduler, (optimizer,))
    groups = None if model_parameters is None else groups_of(_parameters(model_parameters))
    objects = Given(scheduler=scheduler, written={section: said for section, (_, said) in written.items()})
    if isinstance(optimizer, (EngineOptimizer, DeepSpeedEngine)):
        raise ModelError(
            "this optimizer is an engine's already", hint="leave it out: the configuration has one; or make another"
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        if not callable(optimizer):
            raise ModelError(f"optimizer is a {type(optimizer).__name__}, no optimizer and no function that makes one")
        new_optimizer = optimizer(groups if groups is not None else [p for p in model.parameters() if p.requires_grad])
        if not isinstance(new_optimizer, torch.optim.Optimizer):
            raise ModelError(f"the function that makes the optimizer has made a {type(new_optimizer).__name__}")
        optimizer = new_optimizer
    if optimizer is not None:
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        objects.optimizer, groups = optimizer, list(optimizer.param_groups)
    if groups is not None:
        objects.groups = groups = [group for group in groups if group["params"]]
        objects.names = names_of(model, groups)
        objects.others = freeze_others(model, objects.names)
    return objects


def _written(config: dict[str, Any], optimizer: Any, scheduler: Any) -> dict[str, tuple[Any, str]]:
    """Return the functions that make objects of sections of the configuration which no plan has, where the script has
    passed none, and what the report says of each."""
    functions = {
        "optimizer": (torchs_own(config), "torch's own optimizer, which steps by itself, on shards"),
        "scheduler": (by_groups(config), "a list has a value for each of the optimizer's groups"),
    }
    passed = {"optimizer": optimizer, "scheduler": scheduler}
    return {s: (made, said) for s, (made, said) in functions.items() if made is not None and passed[s] is None}


def _parameters(given: Iterable[Any]) -> Iterable[Any]:
    """Return a module's parameters, or what is given if it is not a module."""
    return given.parameters() if isinstance(given, nn.Module) else given


def _training(model: nn.Module, plan: Plan, given: Given, config: dict[str, Any]) -> Training:
    """Compile the model, and connect the script's own objects to it."""
    if is_compiled(model):
        recompile(model, plan)
    else:
        compile(model, plan)
    handle: Any = model.__dict__["zgraph"]
    if value_of(config, "fp16.enabled"):
        _take_any_gradients(model)
    client = None if "optimizer" in given.written else given.optimizer
    training = Training(client=client, clips=float(value_of(config, "gradient_clipping", 1.0)))
    if plan.optimizer is not None:
        training.optimizer = EngineOptimizer(handle, given.names or (), given.groups or ())
        training.optimizer.clips_alone = _clips_alone(config, plan)
        pass_over(model, given.others, training.optimizer.optimizer)
        training.zeros = begins_with_zeros(config, plan, pipelined=isinstance(model, PipelineModule))
        if training.zeros:
            update_of_zeros(handle, training.optimizer)
        if given.optimizer is not None:
            follow(given.optimizer, training.optimizer)
    elif given.optimizer is not None:
        names: Any = given.names
        handle.when_placed(lambda: rebind(given.optimizer, names, dict(model.named_parameters())))
        training.planned, training.optimizer = False, given.optimizer
        training.skips = _skips(config)
        clip_alone(model, training, _clips_alone(config, plan))
    training.client_scheduler = None if "scheduler" in given.written else given.scheduler
    training.scheduler = _scheduler(training, given.scheduler, config)
    return training


def _clips_alone(config: dict[str, Any], plan: Plan) -> bool:
    """Return whether a step of the optimizer that no engine calls clips: DeepSpeed's optimizers of ZeRO and of low weights do, and torch's
    own does not, which trains fp32 weights at stage 0. (A plan's own `grad_clip` always does.)"""
    low = value_of(config, "fp16.enabled") or value_of(config, "bf16.enabled")
    return bool(plan.zero or low or value_of(config, "zgraph.grad_clip"))


def _skips(config: dict[str, Any]) -> bool:
    """Return whether DeepSpeed leaves out a step whose gradients are not finite: in bf16, and in fp32 with ZeRO."""
    if value_of(config, "bf16.enabled"):
        return bool(value_of(config, "bf16.check_grad_overflow", True))
    return bool(
        value_of(config, "zero_optimization.stage", 0) and value_of(config, "zero_optimization.compute_grad_norm", True)
    )


def _refuse_offloaded(optimizer: Any, plan: Plan) -> None:
    if optimizer is not None and plan.offload.optimizer not in ("auto", "none"):
        raise PlanError(
            f"offload_optimizer is set, but the script's own {type(optimizer).__name__} can't be offloaded",
            where="zero_optimization.offload_optimizer.device",
            why="it steps by itself, and keeps its states where its parameters are",
            hint="Adam, AdamW, SGD, Adagrad, Lion or LAMB, which a plan has; or leave offload_optimizer out",
        )


def _refuse_in_stages(optimizer: Any, model: nn.Module) -> None:
    if optimizer is not None and isinstance(model, PipelineModule) and model.num_stages > 1:
        raise UnsupportedError(
            f"the script's own {type(optimizer).__name__} can't update a pipeline",
            why="it steps by itself, on one rank's parameters, and the norm of the gradients is that of all stages",
            hint="Adam, AdamW, SGD, Adagrad, Lion or LAMB, which a plan has",
        )


def _take_any_gradients(model: nn.Module) -> None:
    """Allow a script to assign gradients of the parameters' own dtype (`p.grad = torch.zeros_like(p)`), where
    programs give wider ones."""
    for param in model.parameters():
        if param.requires_grad and param.grad is None:
            param.grad_dtype = None


def _schedule(config: dict[str, Any], world: int) -> AnySchedule | None:
    """Return the configuration's schedule; None if it has none."""
    if not config.get("scheduler"):
        return None
    part = {"scheduler": config["scheduler"], "optimizer": {"type": "AdamW"}}
    return report_on(part, world=world).require_plan().lr_schedule


def _scheduler(training: Training, given: Any, config: dict[str, Any]) -> Any:
    """Return the script's own scheduler, else the configuration's on the engine's optimizer; None without an
    optimizer, or if neither gives one."""
    optimizer = training.optimizer
    if optimizer is None:
        if given is not None:
            logger.warning("lr_scheduler is left out: there is no optimizer, so the engine makes no steps")
        return None
    if given is not None:
        return given if is_scheduler(given) else given(training.client or optimizer)
    record = _schedule(config, comm.get_world_size())
    if record is None:
        return None
    if isinstance(record, TorchSchedule):
        return torch_scheduler(record, optimizer)
    if record.name not in VALID_LR_SCHEDULES:
        raise PlanError(f"there is no scheduler {record.name!r}", where="scheduler.type")
    return Scheduler.of(record, optimizer)
