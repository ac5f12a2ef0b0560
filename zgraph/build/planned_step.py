"""A step and its update as a plan makes them of a model: captured and taken through all passes, without ranks and
without compiling."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from zgraph.build.build_context import BuildContext
from zgraph.build.pass_pipeline import EVERY_PASS, PassFilter, costs_of
from zgraph.build.resolve_auto_offload import placed
from zgraph.build.step_program import StepProgram
from zgraph.build.unmatched_patterns import refuse_unmatched
from zgraph.build.update_program import resident_of, whole_update
from zgraph.capture.call_signature import signed
from zgraph.capture.capture import trace
from zgraph.capture.former_storages import former_storages
from zgraph.capture.learned_sizes import LearnedSizes, Signature
from zgraph.capture.replaced_forward import signature_of, unbound
from zgraph.capture.symbolic_capture import SymbolicSizes
from zgraph.capture.tensor_parallel_layout import divided_layout
from zgraph.capture.value_inputs import ValueInputs, with_values
from zgraph.errors import ArgumentError, ModelError, PlanError, ZgraphError, refuse_unless
from zgraph.parameters.layout import planned_layout
from zgraph.parameters.mixed_precision import check, prepare
from zgraph.passes import History
from zgraph.passes.analysis.costs import Costs
from zgraph.plan.plan import Plan, plan_of
from zgraph.plan.shapes import sizes_in, values_in
from zgraph.program.program import TENSOR_DIM, OutputRole, ParamSpec, Program
from zgraph.torch_compat import inductor_code
from zgraph.update.owned_parameters import within

Inputs = tuple[Any, ...] | dict[str, Any]


def split_inputs(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) from example inputs, which are a tuple of args or a dict of kwargs."""
    if isinstance(inputs, dict):
        return (), inputs
    if isinstance(inputs, tuple):
        return inputs, {}
    raise ArgumentError(
        f"inputs are a tuple of args or a dict of kwargs, not a value of type {type(inputs).__name__}", hint="(x,), say"
    )


def programs(model: nn.Module, plan: Plan, inputs: Inputs, world: int, costs: Costs | None = None) -> History:
    """Capture `model` (not compiled, on any device) and run the plan's pipeline for `world` ranks, without any.

    `inputs` are one rank's own batch; decisions are made from `costs` (by default the plan's). The history's first
    record is the captured program, the last one the finished program, not yet split into forward and backward; it is
    the same on every rank. Raises what `compile` does, except `LoweringError`: nothing is compiled, and the model is
    not changed.
    """
    refuse_unless(isinstance(model, nn.Module), "zgraph.programs(model=…)", model, "an nn.Module")
    refuse_unless(costs is None or isinstance(costs, Costs), "zgraph.programs(costs=…)", costs, "a Costs or None")
    return planned_step(model, plan_of(plan), inputs, world, costs).step.history()


@dataclass(frozen=True)
class PlannedStep:
    """A step as a plan makes it for some ranks: its programs, and those of its update."""

    step: StepProgram  # the programs of the step
    # makes the update, None where nothing is updated; a memory budget decides how many states are offloaded
    update: Callable[[], History | None]
    # makes the update of a step that ends a round of local steps; None without them
    round: Callable[[], History | None]
    late: bool  # whether the update runs beside the next step


def planned_step(
    model: nn.Module,
    plan: Plan,
    inputs: Inputs,
    world: int,
    costs: Costs | None = None,
    pass_filter: PassFilter = EVERY_PASS,
    captured: Program | None = None,
) -> PlannedStep:
    """Make a step's programs, and the update that belongs to it.

    `inputs` are those of a micro-batch. A `pass_filter` leaves passes out of the step's pipeline. A program already
    `captured` from the model with this plan is used as it is, and not changed. Raises `PlanError` for a plan with
    pipeline stages, whose programs `zgraph.forecast.pipeline_plan` makes.
    """
    plan.refuse_pipeline(world, "program for all ranks")
    plan, sizes = plan.for_world(world), plan.resolve_mesh(world)
    costs = costs or costs_of(plan, device_of(model))
    plan, device = placed_for(model, plan, sizes, costs)
    captured = captured_program(model, plan, inputs, world) if captured is None else captured
    specs = trained_layout(captured)
    residents = resident_of(model, specs, plan, sizes, device, costs)
    step = StepProgram(captured, BuildContext(plan, costs, residents, pass_filter))

    def update(ends_round: bool = False) -> History | None:
        step.history()
        if not step.differentiated:
            return None
        return whole_update(model, specs, plan, sizes, device, step.states, ends_round=ends_round)

    return PlannedStep(step, update, functools.partial(update, True), plan.offload.late)


def trained_layout(captured: Program) -> dict[str, ParamSpec]:
    """Return the layout of a captured program's parameters, with those that have no gradient marked as not trained."""
    reached = {p.name for p in captured.outputs if p.role is OutputRole.GRADIENT}
    return {n: replace(s, requires_grad=n in reached) for n, s in captured.params.items()}


def placed_for(model: nn.Module, plan: Plan, sizes: dict[str, int], costs: Costs) -> tuple[Plan, torch.device]:
    """Return the plan with its places, and the device of its programs: the hardware's where something is offloaded,
    else the model's."""
    device = torch.device("cuda", 0) if costs.hardware.device == "cuda" else device_of(model)
    plan = placed(plan, model, sizes, device)
    return plan, device if plan.offload.tiers() else device_of(model)


def captured_program(model: nn.Module, plan: Plan, inputs: Inputs, world: int) -> Program:
    """Return the captured program that `programs` runs the plan's pipeline over, with symbols for the sizes that the
    plan declares.

    It is named "train", or "eval" if the model can't be differentiated. For a plan with pipeline stages it is the whole
    model, for the ranks of one stage.
    """
    sizes = within(plan.resolve_mesh(world))
    precision = plan.resolved_precision()
    specs = planned_layout(model, sizes, plan)
    device = device_of(model)
    args, kwargs = split_inputs(inputs)
    forward = unbound(model, model.forward)
    check(model, precision, specs)
    refuse_unmatched(plan, model)
    with contextlib.ExitStack() as undo:
        if math.prod(plan.resolve_mesh(world).values()) > 1:
            undo.callback(former_storages(model).note_early(model))
        undo.enter_context(prepare(model, precision, specs))
        trace_of = functools.partial(
            trace, model, forward, args, kwargs, specs, sizes, device, precision
        )  # (takes the open sizes)
        decompositions = inductor_code.inductor_decompositions() if plan.backend == "inductor" else {}

        def captured(opened: SymbolicSizes | None) -> Program:
            traced = trace_of(opened)
            return traced.joint(traced.pattern, decompositions, "train" if traced.pattern else "eval")

        joint = _with_found_values(captured, model, plan, forward, (args, kwargs))
    joint.params = divided_layout(joint, plan, costs_of(plan, device), model)
    return joint


def _with_found_values(
    captured: Callable[[SymbolicSizes | None], Program],
    model: nn.Module,
    plan: Plan,
    forward: Callable[..., Any],
    call: tuple[tuple[Any, ...], dict[str, Any]],
) -> Program:
    """Return the program that `captured` makes of a call with its open sizes. Where forward decides by the values of
    inputs these are constants, and those of their elements that only set sizes are symbols, as in a run's first program
    (without ranks, and without learning which sizes can't be symbols: then all elements are numbers).
    """
    values = ValueInputs(plan.dynamic, forward)
    while True:
        constants = values.of(*call)
        signature = signed(model, *call, constants)
        opened = declared_sizes(plan, forward, signature)
        tries = [with_values(opened, constants)]
        if values.names != values_in(plan.dynamic):
            tries.insert(0, with_values(declared_sizes(plan, forward, signature, elements=True), constants))
        for sizes in tries:
            try:
                return captured(sizes)
            except ZgraphError as error:
                failed = error
        if not values.next_try(failed, signature):
            raise failed


def declared_sizes(
    plan: Plan, forward: Callable[..., Any], call: Signature, *, elements: bool = False
) -> SymbolicSizes | None:
    """Return the sizes of a call that a plan declares to differ from call to call; None where it declares none. With
    `elements` also those of constants, and the sizes that are likely to differ with these."""
    parameters = list(signature_of(forward).parameters.values())[1:]
    dynamic = sizes_in(plan.dynamic)
    if not dynamic and not elements:
        return None
    return LearnedSizes(dynamic, parameters, values=values_in(plan.dynamic)).opened(call, anticipate=elements)


def update_program(model: nn.Module, plan: Plan, world: int) -> History:
    """Build the update of all of `model`'s parameters that train, by the plan's optimizer, for `world` ranks, without
    any.

    The model is not compiled, may be on the meta device, and is not changed. Where a budget decides how many states are
    offloaded, as few as possible are here: the real number depends on the step's memory (`planned_step`). Raises
    `PlanError` if the plan has no optimizer, groups that do not fit the model, stages, or ranks that divide weights.
    """
    if plan.optimizer is None:
        raise PlanError("the plan has no optimizer", where="optimizer", hint="optimizer=zgraph.AdamW(lr=…)")
    plan.refuse_pipeline(world, "update for all ranks")
    plan, sizes = plan.for_world(world), plan.resolve_mesh(world)
    if sizes.get(TENSOR_DIM, 1) > 1:
        raise PlanError(
            "the update of weights that ranks divide can't be built alone",
            where=f"mesh.{TENSOR_DIM}",
            why="which they divide is known when the model was captured",
            hint="planned_step captures it, and has the update as well",
        )
    plan, device = placed_for(model, plan, sizes, costs_of(plan, device_of(model)))
    history = whole_update(model, planned_layout(model, sizes, plan), plan, sizes, device)
    if history is None:
        raise ModelError("no parameter of the model trains", hint="requires_grad_() on those that are to")
    return history


def device_of(model: nn.Module) -> torch.device:
    """Return the one device of the model (where it will be, for a model on the meta device). Raises `ModelError` for
    several."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    by_device: dict[torch.device, str] = {}
    for name, tensor in tensors.items():
        if not tensor.is_meta:
            by_device.setdefault(tensor.device, name)
    if len(by_device) > 1:
        shown = ", ".join(f"{name!r} on {device}" for device, name in by_device.items())
        raise ModelError(
            "the model's tensors are on several devices",
            why=shown,
            hint="move the model to one device: model.to(device)",
        )
    if by_device:
        return next(iter(by_device))
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
    return torch.device("cpu")
