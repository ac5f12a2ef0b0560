"""The plain model's training in one process, which `zgraph.verify(…, compiled=True)` compares a compiled model with.

Each data-parallel rank has a copy of the model with its own batch, buffers and random numbers; the copies have equal
weights. A gradient is the mean of theirs. An update is that of the plan's optimizer, as one program for one rank before
any pass, or of an optimizer of the user's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from zgraph.build.update_program import trained
from zgraph.capture.batch import Call
from zgraph.parameters.layout import planned_layout
from zgraph.parameters.mixed_precision import check, prepare
from zgraph.plan.offloading import Offload
from zgraph.plan.plan import Plan
from zgraph.program.program import InputRole, OutputRole, ParamSpec
from zgraph.runtime.train_step import for_forward, loss_of, named
from zgraph.update import scaler
from zgraph.update.build_update import AHEAD, EMA, MASTER, NONFINITE, build_update, scalar_names, states_of
from zgraph.update.parameter_groups import Member
from zgraph.verification.masked_attention import masks_of
from zgraph.verification.virtual_ranks import run_virtual
from zgraph.verification.virtual_step import SCALE, Called, cast_to, in_precision, own_copy

LossFn = Callable[..., torch.Tensor] | None
Grads = dict[str, torch.Tensor | None]
_LOSS = "loss"


def tensors_of(value: Any, name: str = "output") -> dict[str, torch.Tensor]:
    """Return the tensors in an output, by their paths in it. Pytrees, dataclasses and the attributes of plain objects
    are searched."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    leaves = pytree.tree_flatten_with_path(value)[0]
    if len(leaves) == 1 and leaves[0][1] is value:
        within = {k: v for k, v in getattr(value, "__dict__", {}).items() if not k.startswith("_")}
        return {n: t for key, part in within.items() for n, t in tensors_of(part, f"{name}.{key}").items()}
    return {n: t for path, leaf in leaves for n, t in tensors_of(leaf, name + pytree.keystr(path)).items()}


@dataclass
class Ran:
    """One forward of a model, and the roots of its backward."""

    outputs: dict[str, torch.Tensor]  # the tensors in its output, by their paths
    loss: torch.Tensor  # its loss
    # the gradient that the backward starts with at each root: an output by its path, or "loss"
    tangents: dict[str, torch.Tensor] = field(default_factory=dict)

    def backward(self) -> None:
        values = {**self.outputs, _LOSS: self.loss}
        torch.autograd.backward([values[n] for n in self.tangents], list(self.tangents.values()))

    def tangents_from_loss(self, weight: float) -> dict[str, torch.Tensor]:
        """Return the tangent of a backward that starts from the loss, times `weight`."""
        return {_LOSS: torch.full_like(self.loss.detach(), weight)}

    def tangents_from_outputs(self, weight: float, reverse: bool) -> dict[str, torch.Tensor]:
        """Return the tangents of a backward that starts from the model's outputs, if the loss is computed from them
        outside of the model; if the loss is an output itself, of one that starts from the loss.

        A gradient of an output may have any strides: here the first dimension has the largest stride, with `reverse`
        the smallest.
        """
        wanted = {n: t for n, t in self.outputs.items() if t.requires_grad and t is not self.loss}
        if not wanted or any(self.loss is t for t in self.outputs.values()):
            return self.tangents_from_loss(weight)
        start = torch.full_like(self.loss.detach(), weight)
        grads = torch.autograd.grad(self.loss, list(wanted.values()), start, retain_graph=True, allow_unused=True)
        return {n: _laid_out(g, reverse) for n, g in zip(wanted, grads, strict=True) if g is not None}


def _laid_out(grad: torch.Tensor, reverse: bool) -> torch.Tensor:
    order = sorted(range(grad.dim()), reverse=reverse)
    return grad.detach().permute(order).contiguous().permute(order).clone(memory_format=torch.preserve_format)


class PlainModel:
    """One copy of the plain model, in the precision that a plan computes in."""

    def __init__(self, module: nn.Module, plan: Plan, loss_fn: LossFn) -> None:
        self.module = module
        self.called = Called(module, getattr(module.forward, "__func__", None))
        self.precision = plan.resolved_precision()
        self.loss_fn = loss_fn
        self.attention = plan.attention

    def forward(self, call: Call) -> tuple[Any, Ran]:
        """Run one call; return (its output, the tensors in it and the loss)."""
        given, rest, others = for_forward(self.called, *call)
        args, kwargs = given
        low = self.precision.dtype("compute")
        if self.precision.cast_inputs and low is not None:
            args, kwargs = pytree.tree_map(lambda x: cast_to(x, low), given)
        out = self.precision.dtype("output")
        with masks_of(self.module, self.attention):
            output = pytree.tree_map(lambda v: cast_to(v, out), self.module(*args, **kwargs))
        loss = loss_of(output, self.loss_fn, named(self.called, given), rest, others)
        tensors = tensors_of(output)
        same = next((t for t in tensors.values() if t.dim() == 0 and loss is t), None)
        return output, Ran(tensors, loss if same is None else same)


class ReferenceTraining:
    """The training of `count` copies of the plain model: see the module's text."""

    def __init__(self, model: nn.Module, plan: Plan, count: int, loss_fn: LossFn) -> None:
        self.plan = plan.model_copy(
            update={"offload": Offload(activations="none", optimizer="none", parameters="none")}
        )
        reference = own_copy(model)
        self.specs: dict[str, ParamSpec] = planned_layout(reference, {}, self.plan)
        precision = plan.resolved_precision()
        check(reference, precision, self.specs)
        prepare(reference, precision, self.specs)
        low = in_precision(reference, self.specs)
        self.weights = {n: p.detach().clone() for n, p in reference.named_parameters()}
        self.copies = [PlainModel(copy.deepcopy(low), plan, loss_fn) for _ in range(count)]
        for replica in self.copies:
            copy_hooks(model, replica.module)
        self.scale = SCALE if torch.float16 in (precision.dtype("compute"), precision.dtype("parameter")) else 1.0
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._own: torch.optim.Optimizer | None = None
        self._update = _Update(reference, self.specs, self.plan, self.device) if plan.optimizer is not None else None

    # -- gradients ----------------------------------------------------------------------------------------------------
    def backward(self, rank: int, ran: Ran) -> None:
        """Add the gradients of one copy's backward to those it has, scaling the loss of half precision meanwhile."""
        with masks_of(self.copies[rank].module, self.plan.attention):  # (a checkpointed region runs once more)
            self._backward(rank, ran)

    def _backward(self, rank: int, ran: Ran) -> None:
        if self.scale == 1.0:
            ran.backward()
            return
        params = list(self.copies[rank].module.parameters())
        before = [p.grad for p in params]
        for param in params:
            param.grad = None
        replace(ran, tangents={n: t * self.scale for n, t in ran.tangents.items()}).backward()
        for param, old in zip(params, before, strict=True):
            new = None if param.grad is None else param.grad / self.scale
            param.grad = new if old is None else old if new is None else old + new

    def grads(self) -> Grads:
        """Return the mean of the copies' gradients, by parameter; None for a parameter without one."""
        means: Grads = {}
        of_copies = [dict(c.module.named_parameters()) for c in self.copies]
        for name, spec in self.specs.items():
            own = [params[name].grad for params in of_copies]
            present = [g.to(spec.grad_dtype) for g in own if g is not None]
            means[name] = torch.stack(present).sum(0) / len(own) if present else None
        return means

    def set_grads(self, grads: Mapping[str, torch.Tensor | None]) -> None:
        """Set the gradients of every copy."""
        for replica in self.copies:
            for name, param in replica.module.named_parameters():
                grad = grads.get(name)
                param.grad = None if grad is None else grad.to(param.dtype, copy=True)

    def clip(self, largest: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients by the norm of all together; return the norm before."""
        mean = self.grads()
        params = [nn.Parameter(torch.empty_like(g)) for g in mean.values() if g is not None]
        for param, grad in zip(params, (g for g in mean.values() if g is not None), strict=True):
            param.grad = grad
        norm = torch.nn.utils.clip_grad_norm_(params, largest, norm_type)
        self.set_grads(mean)
        return norm

    def clip_as_planned(self) -> None:
        """Clip as the plan says, for an update that is not the plan's own."""
        clip = self.plan.grad_clip
        if clip is not None and clip.norm is not None:
            self.clip(clip.norm, clip.norm_type)
        if clip is not None and clip.value is not None:
            bound = clip.value
            self.set_grads({n: None if g is None else g.clamp(-bound, bound) for n, g in self.grads().items()})

    # -- updates ------------------------------------------------------------------------------------------------------
    def update(self, grads: Mapping[str, torch.Tensor], groups: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Run the plan's update with these gradients and the options of the optimizer's parameter groups, and drop the
        copies' gradients. Return what the update program outputs ("grad_norm")."""
        assert self._update is not None
        shown = self._update.run(self.weights, grads, groups)
        self._share()
        self.set_grads({})
        return shown

    def states(self, name: str) -> dict[str, torch.Tensor]:
        """Return what the plan's optimizer keeps of a parameter."""
        return {} if self._update is None else self._update.states.get(name, {})

    def own_update(self, optimizer: Callable[[Any], torch.optim.Optimizer], grads: Mapping[str, torch.Tensor]) -> None:
        """Run an update by an optimizer of the user's own with these gradients, and drop the copies' gradients."""
        params = {n: nn.Parameter(w, w.is_floating_point()) for n, w in self.weights.items()}
        if self._own is None:
            self._own = optimizer([p for n, p in params.items() if self.specs[n].requires_grad])
            self._own_params = params
        for name, param in self._own_params.items():
            given = grads.get(name)
            param.grad = None if given is None else given.to(param.dtype)
        self._own.step()
        self.weights = {n: p.detach() for n, p in self._own_params.items()}
        self._share()
        self.set_grads({})

    def _share(self) -> None:
        with torch.no_grad():
            for replica in self.copies:
                for name, param in replica.module.named_parameters():
                    param.copy_(self.weights[name])


class _Update:
    """The update of a plan's optimizer for one rank, run operator by operator, with its states."""

    def __init__(self, model: nn.Module, specs: dict[str, ParamSpec], plan: Plan, device: torch.device) -> None:
        members, self.options = trained(model, specs, plan, 0.0)
        self.specs, self.device = specs, device
        # (each parameter has its own count of updates)
        self.members = {m.name: replace(m, count=f"/step/{m.name}") for m in members}
        self.held: dict[tuple[Any, str], torch.Tensor] = {}
        self.states: dict[str, dict[str, torch.Tensor]] = {}
        for key, first in (scaler.initial(self.options.loss_scale) if self.options.loss_scale else {}).items():
            self.held[InputRole.STATE, f"/{key}"] = first
        self.held[InputRole.STATE, f"/{NONFINITE}"] = torch.tensor(0)

    def run(
        self,
        weights: dict[str, torch.Tensor],
        grads: Mapping[str, torch.Tensor],
        groups: Sequence[Mapping[str, Any]],
    ) -> dict[str, torch.Tensor]:
        chosen = [m for n, m in self.members.items() if n in grads]
        program = build_update(chosen, self.specs, {}, self.device, self.options, {})
        for member in chosen:
            self.held[InputRole.PARAMETER, member.name] = weights[member.name]
            self.held[InputRole.GRADIENT, member.name] = grads[member.name]
            self._begin(member, weights[member.name])
        numbers = [_number(groups, at, path) for at, path in scalar_names(chosen, self.options)]
        self.held[InputRole.SCALARS, "scalars"] = torch.tensor(numbers, dtype=torch.float64)
        given = [self._laid_out(p.role, p.name, n.meta["val"]) for p, n in program.input_items()]
        (values,) = run_virtual(program, [given])
        outputs: dict[str, torch.Tensor] = {}
        for port, value in zip(program.outputs, values, strict=True):
            if port.role is OutputRole.OUTPUT:
                outputs[port.name] = value
            elif port.of is InputRole.PARAMETER:
                weights[port.name] = value
            elif port.of is InputRole.STATE:
                self.held[InputRole.STATE, port.name] = value
        for member in chosen:
            states = states_of(member, self.specs[member.name], self.options)
            self.states[member.name] = {k: self.held[InputRole.STATE, f"{member.name}/{k}"] for k in states}
            if states:  # (as in torch, a parameter without other states has no count that anyone sees)
                self.states[member.name]["step"] = self.held[InputRole.STATE, member.count]
        return outputs

    def _begin(self, member: Member, weight: torch.Tensor) -> None:
        if member.name in self.states:
            return
        self.held[InputRole.STATE, member.count] = torch.zeros((), dtype=torch.float64)
        for key, state in states_of(member, self.specs[member.name], self.options).items():
            tensor = torch.full(state.shape, state.fill, dtype=state.dtype, device=self.device)
            copied = key in (MASTER, EMA, AHEAD)
            self.held[InputRole.STATE, f"{member.name}/{key}"] = tensor.copy_(weight) if copied else tensor

    def _laid_out(self, role: Any, name: str, like: torch.Tensor) -> torch.Tensor:
        tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self.device)
        return tensor.copy_(self.held[role, name])


def _number(groups: Sequence[Mapping[str, Any]], at: int, path: str) -> float:
    """Return a scalar of the update: an option of a parameter group, or 1.0 for factors on gradients and the loss,
    which stay as they are."""
    if at < 0:
        return 1.0
    key, _, index = path.partition(".")
    value = groups[at][key]
    return float(value[int(index)] if index else value)


def copy_hooks(model: nn.Module, twin: nn.Module) -> None:
    """Register a model's hooks on gradients with the parameters of its deep copy: a copy of a tensor has none."""
    for old, new in zip(model.parameters(), twin.parameters(), strict=True):
        if not new.requires_grad:
            continue
        for hook in (old._backward_hooks or {}).values():
            new.register_hook(hook)
        for hook in (getattr(old, "_post_accumulate_grad_hooks", None) or {}).values():
            new.register_post_accumulate_grad_hook(hook)
