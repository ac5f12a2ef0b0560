"""`zgraph.compile`: turns a plain module into a sharded, compiled one, in place."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from zgraph.api.accelerators import refuse_dispatched, refuse_other_engines
from zgraph.api.deferred_layout import DeferredLayout
from zgraph.api.handle import attach, started
from zgraph.build.planned_step import Inputs, device_of, split_inputs
from zgraph.build.resolve_auto_offload import placed
from zgraph.build.unmatched_patterns import refuse_unmatched
from zgraph.capture.former_storages import refuse_shared_memory
from zgraph.capture.learned_sizes import refuse_unknown_arguments, refuse_unknown_sizes
from zgraph.capture.refuse_inputs import refuse_state
from zgraph.capture.replaced_forward import unbound
from zgraph.codegen import debug_mode
from zgraph.errors import MeshError, ModelError, refuse_no_function, refuse_unless
from zgraph.machine.measured_costs import agreed_costs, at_disk_rate
from zgraph.parameters.layout import planned_layout
from zgraph.parameters.mixed_precision import check, overflow_error, prepare, too_large_for
from zgraph.parameters.replaced_parameters import refuse_unmovable
from zgraph.parameters.shard_module import shard
from zgraph.parameters.tensor_bits import fingerprint
from zgraph.plan.lr_schedules import TorchSchedule
from zgraph.plan.plan import MESH_DIMENSIONS, Plan, plan_of
from zgraph.plan.shapes import Size, buckets_of, hot_names
from zgraph.program.program import STAGE_DIM, TENSOR_DIM, ParamSpec
from zgraph.ranks.agreement import Agreement
from zgraph.runtime.compiled_models import free_dropped_models, is_compiled
from zgraph.runtime.rank import RankContext, opened_tiers
from zgraph.runtime.runtime import Runtime
from zgraph.stages.partition_model import DeferredPipeline
from zgraph.stages.runtime import PipelineRuntime
from zgraph.stages.step import compile_first
from zgraph.torch_compat.dtensors import forget_destroyed_meshes
from zgraph.torch_compat.library_functions import refuse_hooked_layers, refuse_layers
from zgraph.update.optimizer import PlanOptimizer
from zgraph.update.parameter_groups import members_of, refuse_complex_clipping
from zgraph.update.torch_lr_schedulers import torch_scheduler

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=nn.Module)


def compile(
    model: M,
    plan: Plan | None = None,
    *,
    inputs: Inputs | None = None,
    loss_fn: Callable[..., Any] | None = None,
    mesh: DeviceMesh | None = None,
    dynamic: Mapping[str, Mapping[int, str | Size] | Literal["value"]] | None = None,
) -> M:
    """Shard `model` by `plan`, and make its forward and backward run as compiled programs.

    Returns the same module object: the same class, the same parameter names, parameters now `DTensor` shards (plain
    tensors in one process without a process group). With `inputs` (a tuple of args or a dict of kwargs of this rank's
    own batch) it captures and compiles now, else at the first call; each new input signature is compiled once.
    `mesh` is a DeviceMesh whose dimension names and sizes are those of the plan; by default one is made over all
    ranks. Under torchrun without a process group, one is initialised. Parameters and buffers that differ between ranks
    become rank 0's, with a warning; those on the meta device are initialised shard by shard. `loss_fn(output, …)` computes
    the loss for `train_step` if the model's output has none: after the output it gets the arguments of `train_step` that
    `forward` does not take, or else the arguments of `forward`, as many as it needs. `dynamic` is the plan's: the sizes of
    arguments that differ from call to call, `{"input_ids": {0: "batch", 1: zgraph.Size("seq", max=2048)}}`, and the
    arguments whose every value gets its own program, `{"image_grid_thw": "value"}`.

    All ranks must call it. Raises `ModelError` (compiled already, parameters on several devices, dispatched by
    accelerate, or that started for DeepSpeed or FSDP), `MeshError` (a mesh that is not the world), `RankMismatchError`
    (ranks with different plans or models), `UnsupportedError` (lazy modules). With `inputs`, else at the first call: `CaptureError` with the user's
    file and line (a model that can't be captured whole), `UnsupportedError` (a forward that changes a parameter in place), `PlanError` (a pass of the
    user's that can't be loaded), `PassError` (a pass that failed, or left a program that the verifier refuses),
    `LoweringError` (Inductor can't compile an operator).

    Make optimizers, and lists of parameters, after it: they must hold the shards. An optimizer made before raises
    `StepError` at its first use (except for reading values, which are those from before); without a process group it keeps
    working. Hooks of parameters stay: they are called with the reduced gradient of each backward, a `DTensor`.
    """
    debug_mode.wanted()  # (an invalid value of the debug mode is refused now)
    _refuse_arguments(model, loss_fn, mesh)
    refuse_other_engines()
    free_dropped_models()
    plan = plan_of(plan)
    if dynamic is not None:
        plan = plan.model_copy(update={"dynamic": dynamic})
    forward = unbound(model, model.forward)
    _refuse_unknown_names(plan, forward)
    agreed = _agree(model, plan, mesh)
    _refuse_unfit(model, agreed)
    if agreed.sizes.get(STAGE_DIM, 1) > 1 or agreed.sizes.get(TENSOR_DIM, 1) > 1:
        _attach_deferred(model, forward, agreed, inputs, loss_fn)
        return model
    plan, device, agreement = agreed.plan, agreed.device, agreed.agreement
    tiers = opened_tiers(model, plan, agreed.specs, device, agreement)
    costs = at_disk_rate(agreed_costs(plan, device, agreement, agreed.mesh), agreement, tiers)
    context = RankContext(agreed.sizes, agreed.mesh, device, agreement, agreement, costs, tiers)
    shards = shard(model, agreed.specs, agreed.mesh, device, agreed.seed, tiers.of("parameters"))
    prepare(model, plan.resolved_precision(), agreed.specs)
    runtime = started(Runtime(model, forward, plan, shards, context))
    attach(model, runtime, loss_fn)
    if inputs is not None:
        runtime.compile_for(*split_inputs(inputs))
    return model


def _refuse_unknown_names(plan: Plan, forward: Callable[..., Any]) -> None:
    """Raise `PlanError` for names of inputs, or of their sizes, that calls of forward can't have."""
    refuse_unknown_arguments(plan.dynamic, forward, "dynamic")
    if (buckets := buckets_of(plan)) is not None:
        refuse_unknown_arguments(buckets.pad, forward, "shapes.pad")
    refuse_unknown_sizes(hot_names(plan), plan.dynamic, forward, "shapes.hot")


@dataclass(frozen=True, eq=False)
class _Agreed:
    """What all ranks have agreed on before the model is changed."""

    plan: Plan  # the plan, resolved for the present ranks
    sizes: dict[str, int]  # the sizes of the mesh, by dimension
    mesh: DeviceMesh | None  # None without a process group
    device: torch.device  # this rank's device
    agreement: Agreement  # votes and exchanges between all ranks of the mesh
    specs: dict[str, ParamSpec]  # the layout of each parameter, by name
    seed: int  # for parameters on the meta device


def _refuse_arguments(model: nn.Module, loss_fn: Callable[..., Any] | None, mesh: DeviceMesh | None) -> None:
    """Raise `ModelError` for an object that is not a module, is compiled already, contains a compiled module or was dispatched
    by accelerate, `UnsupportedError` for one with layers that can't be captured, and `ArgumentError` for others of a wrong type."""
    refuse_no_function("zgraph.compile(loss_fn=…)", loss_fn)
    refuse_unless(mesh is None or isinstance(mesh, DeviceMesh), "zgraph.compile(mesh=…)", mesh, "a DeviceMesh or None")
    if not isinstance(model, nn.Module):
        raise ModelError(f"zgraph.compile takes an nn.Module, not {type(model).__name__}")
    if is_compiled(model):
        raise ModelError(
            "the model is compiled already",
            hint="model.zgraph.recompile(plan) runs the same weights by another plan",
        )
    inner = next((name for name, child in model.named_modules() if is_compiled(child)), None)
    if inner is not None:
        raise ModelError(f"module {inner!r} of the model is compiled already", hint="compile only the outermost module")
    refuse_dispatched(model)
    refuse_layers(model)
    _refuse_divided(model)


def _refuse_divided(model: nn.Module) -> None:
    """Raise `ModelError` for a parameter or a buffer that is divided already: by another compiled model that has the same module, or
    by torch."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    name = next((name for name, tensor in tensors.items() if isinstance(tensor, DTensor)), None)
    if name is not None:
        raise ModelError(
            f"{name} is a DTensor already",
            where="the model",
            why="another compiled model has the same module, or fully_shard or distribute_tensor has divided it",
            hint="compile one module that holds what several models share, whose forward says which of them it runs; leave out fully_shard",
        )


def _agree(model: nn.Module, plan: Plan, mesh: DeviceMesh | None) -> _Agreed:
    """Make all ranks agree on the plan and the model, and take rank 0's values of parameters and buffers that
    differ."""
    device = device_of(model)
    init_process_group(device)
    mesh, sizes = _mesh(plan, mesh, device)
    if mesh is not None:
        refuse_hooked_layers(model)
    plan = plan.for_world(math.prod(sizes.values()))
    agreement = Agreement(mesh)
    agreement.vote("the plan", f"{plan.hash()} mesh {sizes}")
    plan = placed(plan, model, sizes, device, lambda mine: agreement.any("room in the host's memory", mine))
    specs = planned_layout(model, sizes, plan)
    refuse_state(model)
    agreement.vote(
        "the model",
        "; ".join(f"{s.name}: {s.dtype}{list(s.shape)}{'' if s.requires_grad else ' frozen'}" for s in specs.values()),
    )
    _same_values(model, agreement)
    on_meta = any(p.is_meta for p in [*model.parameters(), *model.buffers()])
    seed = agreement.broadcast(torch.initial_seed()) if on_meta else 0
    return _Agreed(plan, sizes, mesh, device, agreement, specs, seed)


def _refuse_unfit(model: nn.Module, agreed: _Agreed) -> None:
    """Raise the error for a model that the plan can't train, before the model is changed."""
    plan, specs, mesh, precision = agreed.plan, agreed.specs, agreed.mesh, agreed.plan.resolved_precision()
    check(model, precision, specs)
    refuse_unmatched(plan, model)
    refuse_shared_memory(model, moved_parameters(model, specs, mesh), updates=plan.optimizer is not None)
    refuse_unmovable(model, replaces=mesh is not None, in_stages=agreed.sizes.get(STAGE_DIM, 1) > 1)
    refuse_complex_clipping(plan, specs)
    if plan.optimizer is not None:
        optimizer = PlanOptimizer(members_of(model, specs, plan.optimizer), dict(model.named_parameters()), None)
        if isinstance(plan.lr_schedule, TorchSchedule):
            torch_scheduler(plan.lr_schedule, optimizer)
    too_large = too_large_for(model, precision)
    if agreed.agreement.any("weights beyond the range of the low dtype", bool(too_large)):
        raise overflow_error(too_large or ["(of another rank)"])


def _attach_deferred(
    model: nn.Module,
    forward: Callable[..., Any],
    agreed: _Agreed,
    inputs: Inputs | None,
    loss_fn: Callable[..., Any] | None,
) -> None:
    """Attach a runtime that is made at the model's first call, since its partitioning is only known after capture."""
    assert agreed.mesh is not None
    kind = DeferredPipeline if agreed.sizes.get(STAGE_DIM, 1) > 1 else DeferredLayout
    deferred = kind(
        model,
        forward,
        agreed.plan,
        agreed.sizes,
        agreed.mesh,
        agreed.specs,
        agreed.device,
        agreed.agreement,
        agreed.seed,
        loss_fn,
    )
    first = started(deferred.runtime(*split_inputs(inputs))) if inputs is not None else deferred
    attach(model, first, loss_fn)  # (if the line above raised, the model is unchanged)
    if inputs is not None and isinstance(first, PipelineRuntime):
        compile_first(first, *split_inputs(inputs))
    elif inputs is not None and isinstance(first, Runtime):
        first.compile_for(*split_inputs(inputs))


def moved_parameters(model: nn.Module, specs: dict[str, ParamSpec], mesh: DeviceMesh | None) -> set[str]:
    """Return the names of parameters that get new memory: all on several ranks, else those whose home, strides or
    dtype change."""
    return {
        name
        for name, param in model.named_parameters()
        if mesh is not None
        or specs[name].home is not None
        or (param.stride(), param.dtype) != (specs[name].whole_stride, specs[name].dtype)
    }


def init_process_group(device: torch.device) -> None:
    """Create a process group if torchrun's variables are set and there is none; otherwise change nothing global."""
    if dist.is_initialized() or not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend)
    logger.info("initialised a process group of %d ranks over %s", dist.get_world_size(), backend)


def _mesh(plan: Plan, mesh: DeviceMesh | None, device: torch.device) -> tuple[DeviceMesh | None, dict[str, int]]:
    forget_destroyed_meshes()
    if mesh is not None:
        names = mesh.mesh_dim_names
        if not names:
            raise MeshError("the mesh's dimensions have no names", hint="init_device_mesh(…, mesh_dim_names=('dp',))")
        sizes = plan.resolve_mesh(mesh.size())
        given = dict(zip(names, mesh.shape, strict=True))
        if given != sizes:
            other = [name for name in names if name not in MESH_DIMENSIONS]
            raise MeshError(
                f"the mesh given is {given}, the plan's is {sizes}",
                why=f"a plan calls no dimension {other[0]!r}: they are {', '.join(MESH_DIMENSIONS)}" if other else None,
                hint="give one of the plan's names and sizes, or change plan.mesh",
            )
        return mesh, sizes
    if not dist.is_initialized():
        return None, plan.resolve_mesh(1)
    sizes = plan.resolve_mesh(dist.get_world_size())
    if not sizes:
        raise MeshError("the plan's mesh is empty", hint='mesh={"dp": -1} is all ranks')
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)), sizes


def _same_values(model: nn.Module, agreement: Agreement) -> None:
    """Copy rank 0's parameters and buffers to every rank if they differ, as DDP does; comparing equal ones costs one
    integer each."""
    if agreement.group is None:
        return
    tensors: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors = {n: t.detach() for n, t in tensors.items() if not t.is_meta}
    agreement.vote(
        "the model's tensors",
        "; ".join(f"{n}: {t.dtype}{list(t.shape)}" for n, t in tensors.items()),
        hint="build the same model on every rank",
    )
    if not tensors:
        return
    bits = torch.stack([fingerprint(t) for t in tensors.values()])
    both = torch.stack([bits, -bits])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=agreement.group)
    names = [n for n, d in zip(tensors, (both[0] != -both[1]).tolist(), strict=True) if d]
    if names:
        logger.warning("%d tensors of the model differ between ranks (%s …): taking rank 0's", len(names), names[0])
    for name in names:
        _take_first_ranks(tensors[name], agreement)


def _take_first_ranks(tensor: torch.Tensor, agreement: Agreement) -> None:
    """Write the first rank's values into a tensor of any dtype and strides; the elements of an expanded one are
    written once."""
    once = tensor[tuple(slice(0, 1) if s == 0 else slice(None) for s in tensor.stride())]
    whole = once.clone(memory_format=torch.contiguous_format)
    group = agreement.group if tensor.device.type == "cpu" else None
    dist.broadcast(whole.reshape(-1).view(torch.uint8), src=agreement.ranks[0], group=group)
    once.copy_(whole)
