"""Training a compiled copy of a model beside the plain one, on real tensors: the implementation of `zgraph.verify(…, compiled=True)`.

Each rank compiles a copy, and trains it as a user would: two steps of a hand-written loop (backwards inside and outside of `no_sync`, from the loss
and from the outputs, clipped between them, gradients added to clipped ones), then two of `train_step`. Inputs are one set of buffers, overwritten for
each call. Beside it `zgraph.verification.reference_training` does the same on the whole global batch. Everything that a user can see is compared
after each call.

Gradients are compared first; then the plain model's update is computed from the compiled model's gradients, and compared. Otherwise an optimizer
could make a large difference of gradients that differ by rounding only.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from zgraph.api.compiler import compile, init_process_group
from zgraph.api.handle import Handle
from zgraph.build.planned_step import Inputs, split_inputs
from zgraph.capture.batch import Call
from zgraph.capture.call_signature import batch_size
from zgraph.capture.ignored_targets import ignored_of
from zgraph.errors import MeshError, ModelError, RankMismatchError, UnsupportedError
from zgraph.parameters.tensor_bits import fingerprint
from zgraph.plan.plan import Plan
from zgraph.program.program import STAGE_DIM, TENSOR_DIM
from zgraph.program.tolerance import Difference, difference, norm_of, same_bits
from zgraph.ranks.rng import random_states, restored
from zgraph.runtime.join_outputs import join_outputs
from zgraph.runtime.train_step import (
    count_targets,
    for_forward,
    in_order,
    loss_of,
    named,
    split_batch,
)
from zgraph.torch_compat import inductor_code
from zgraph.verification.reference_training import LossFn, Ran, ReferenceTraining, copy_hooks, tensors_of
from zgraph.verification.unshared_inputs import own_inputs, share_memory
from zgraph.verification.virtual_step import SCALE, GlobalBatch, data_rank, own_copy, rows_of, told_if_parted

# The fraction of their norm by which a user's own optimizer moves the weights: a stale weight is then seen in any dtype.
MOVED = 0.05
OWN_STEPS = PLANNED_STEPS = 2
_CODES = 0.05  # the allowed relative error (in the norm) of 8-bit codes: one may be rounded to its neighbour


def compare_training(
    model: nn.Module, plan: Plan, world: int, inputs: GlobalBatch, loss_fn: LossFn
) -> tuple[Plan, list[Difference]]:
    """Train both models; return the plan that was run, and the differences on all ranks in the order of the steps.

    `inputs` are the global batch. Every rank must call it. The model and the random state are not changed. Raises what
    `zgraph.verify` says.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    _refuse_world(world)
    _refuse_plan(plan, model)
    if world > 1:
        init_process_group(device)
        _refuse_other_batch(inputs, world)
    plan = plan.for_world(world)
    with (
        told_if_parted(model, inputs, plan.data_ranks(world)),
        restored(random_states(device), device),
        inductor_code.eager_random_numbers(),
    ):
        training = _Training(model, plan, world, inputs, loss_fn)
        training.run()
    own_differences, everyone = training.found, [training.found]
    if world > 1:
        everyone = [[] for _ in range(world)]
        dist.all_gather_object(everyone, own_differences)
    ordered = sorted(
        ((number, d.rank, d) for differences in everyone for number, d in differences), key=lambda x: x[:2]
    )
    return training.plan, [d for _, _, d in ordered]


def _refuse_world(world: int) -> None:
    there = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    if there != world:
        raise MeshError(
            f"the compiled program of {world} ranks runs on {world} processes, and there {'is 1' if there == 1 else f'are {there}'}",
            why="it is compared on real ranks, of which each is a process",
            hint=f"torchrun --nproc-per-node {world} with the same call on each; or leave out compiled, for virtual ranks",
        )


def _refuse_other_batch(inputs: GlobalBatch, world: int) -> None:
    mine = [int(fingerprint(x)) for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor)]
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, mine)
    others = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
    if others:
        raise RankMismatchError(
            "ranks verify with different batches",
            where=f"rank(s) {others} differ from rank 0",
            why="each takes its part of one global batch, and computes all of it by the plain model",
            hint="make the inputs from the same seed on every rank",
        )


def _refuse_plan(plan: Plan, model: nn.Module) -> None:
    if plan.offload.late:
        raise UnsupportedError(
            "updates that run late can't be compared with the plain model's",
            where="offload.delayed_after",
            why="each is of the gradients of the step before",
            hint="leave it out to compare the rest of the plan",
        )
    if plan.local_steps is not None:
        raise UnsupportedError(
            "groups of ranks that train by themselves can't be compared with one plain model",
            where="local_steps",
            why="each has weights of its own within a round",
            hint="leave out compiled: virtual ranks compare each group's gradients; or leave out local_steps to compare the rest of the plan",
        )
    if plan.wire.compresses:
        raise UnsupportedError(
            "values that are sent in few bits can't be compared with the plain model's on real ranks",
            where="wire",
            why="what an error in a weight does to a gradient has no bound",
            hint="leave out compiled: virtual ranks compare each value with what was sent; or leave out wire to compare the rest of the plan",
        )
    if any(t.is_meta for t in [*model.parameters(), *model.buffers()]):
        raise ModelError("the model has no numbers to compare", hint="build the model on a real device")


class _Training:
    """The steps of both models, with the numbered list of differences `found`, in the order of the comparisons."""

    def __init__(self, model: nn.Module, plan: Plan, world: int, inputs: GlobalBatch, loss_fn: LossFn) -> None:
        sizes, ranks = plan.resolve_mesh(world), plan.data_ranks(world)
        self.staged = sizes.get(STAGE_DIM, 1) > 1
        self.world, self.rank = world, dist.get_rank() if world > 1 else 0
        self.mine = data_rank(sizes, self.rank)
        self.loss_fn = loss_fn
        self.plain = ReferenceTraining(_as_on_rank_0(model, world), plan, ranks, loss_fn)
        self.batches = [_call(self.plain, rows_of(inputs, d, ranks)) for d in range(ranks)]
        for leaf in pytree.tree_leaves(self.batches):
            if isinstance(leaf, torch.Tensor):
                leaf.requires_grad_(False)
        self.plan = self._planned(_with_low_scale(plan))
        self.buffers = own_inputs(self.batches[self.mine])
        self.seed, self.calls = int(_agreed(torch.initial_seed(), world)), 0
        self.found: list[tuple[int, Difference]] = []
        self.phase, self.number = "", 0
        self.gradients: dict[str, torch.Tensor] = {}  # the gradients of the plan's last update
        twin = own_copy(model)
        copy_hooks(model, twin)
        self.compiled = compile(twin, self.plan, inputs=self._first_inputs(sizes), loss_fn=loss_fn)
        self.handle: Handle = self.compiled.zgraph  # type: ignore[assignment]

    def _planned(self, plan: Plan) -> Plan:
        """Return the plan, with two micro-batches instead of one if the batch can be cut."""
        if plan.micro_batches > 1 or plan.elastic is not None or self.staged:
            return plan
        args, kwargs = self.batches[self.mine]
        size = batch_size(args, kwargs)
        if size is None or size < 2 or size % 2:
            return plan
        trial = copy.deepcopy(self.plain.copies[self.mine])
        try:
            for call in split_batch(args, kwargs, 2, uneven=None):
                with torch.no_grad():
                    trial.forward(own_inputs(call))
        except Exception:  # (the model only takes a batch of this size, for example if loss_fn has targets of its own)
            return plan
        return plan.model_copy(update={"micro_batches": 2})

    def _first_inputs(self, sizes: Mapping[str, int]) -> Inputs | None:
        """Return the inputs from which the model is captured when it is compiled, if the capture decides what a rank
        holds; else None."""
        if self.staged:
            args, kwargs = self.buffers
        elif sizes.get(TENSOR_DIM, 1) > 1:
            (args, kwargs), _, _ = for_forward(self.plain.copies[self.mine].called, *self.buffers)
        else:
            return None
        return dict(named(self.plain.copies[self.mine].called, (args, kwargs))) if args and kwargs else kwargs or args

    def run(self) -> None:
        """Run all steps. Raises `ModelError` if the loss depends on no parameter that trains."""
        with self._gradients_noted():
            steps = [self.planned_step] * PLANNED_STEPS
            for number, step in enumerate(steps if self.staged else [self.own_step] * OWN_STEPS + steps):
                self.number = number + 1
                step()
        self.handle.finish()

    @contextlib.contextmanager
    def _gradients_noted(self) -> Iterator[None]:
        """Record the gradients of each of the plan's updates in `gradients` inside the block."""

        def note(grads: dict[str, torch.Tensor]) -> None:
            self.gradients = {n: _whole(g) for n, g in grads.items()}

        remove = self.handle.on_gradients(note) if self.plan.optimizer is not None else lambda: None
        yield
        remove()

    # -- a step of a hand-written loop --------------------------------------------------------------------------------
    def own_step(self) -> None:
        """Run three backwards, with the gradients clipped after the second, then an update."""
        for number in range(3):
            calls = [_turned(batch, self.calls) for batch in self.batches]
            with self.handle.no_sync() if number == 0 else contextlib.nullcontext():
                self.backward(number + 1, calls, from_outputs=number == 1)
            if number == 1:
                self.clip()
        if self.plan.optimizer is not None:
            self.handle.step()
            self.compare_planned_update()
        else:
            self.compare_own_update()

    def backward(self, number: int, calls: Sequence[Call], *, from_outputs: bool) -> None:
        """Run one forward and its backward of both models, and compare."""
        weight = 0.75
        seeds = self._seeds()
        rans: list[Ran] = []
        for rank, call in enumerate(calls):
            torch.manual_seed(seeds[rank])
            given = own_inputs(call)
            _, ran = self.plain.copies[rank].forward(given)
            _refuse_untrained(ran.loss)
            ran.tangents = (
                ran.tangents_from_outputs(weight, self.number % 2 == 0)
                if from_outputs
                else ran.tangents_from_loss(weight)
            )
            rans.append(ran)
            if rank == self.mine:
                plain_inputs = given
        _overwrite(self.buffers, calls[self.mine])
        torch.manual_seed(seeds[self.mine])
        mine = self._forward(self.buffers)
        plain = rans[self.mine]
        self._at(f"forward {number}")
        self.compare_outputs(mine, plain)
        self.compare_buffers()
        original_tangents = {n: t.clone(memory_format=torch.preserve_format) for n, t in plain.tangents.items()}
        mine.tangents = {n: t.clone(memory_format=torch.preserve_format) for n, t in plain.tangents.items()}
        for rank, ran in enumerate(rans):
            self.plain.backward(rank, ran)
        mine.backward()
        self._at(f"backward {number}")
        self.compare_gradients()
        self.compare_unchanged(mine.tangents, original_tangents, "tangent of")
        self.compare_unchanged(tensors_of(self.buffers, "input"), tensors_of(plain_inputs, "input"), "input")
        self._tangents = mine.tangents, original_tangents

    def _forward(self, call: Call) -> Ran:
        given, rest, others = for_forward(self.handle.runtime, *call)
        output = self.compiled(*given[0], **given[1])
        loss = loss_of(output, self.loss_fn, named(self.handle.runtime, given), rest, others)
        outputs = tensors_of(output)
        return Ran(outputs, next((t for t in outputs.values() if t.dim() == 0 and loss is t), loss))

    def clip(self) -> None:
        """Clip the gradients of both models to half of their norm, in place, and compare."""
        norm = norm_of(g for g in self.plain.grads().values() if g is not None)
        largest = _agreed((norm or 1.0) / 2, self.world)
        mine = _whole(torch.nn.utils.clip_grad_norm_(self.compiled.parameters(), largest))
        self._at("clipping")
        plain = self.plain.clip(largest)
        self.compare("norm", "of all gradients", mine.to(plain.dtype), plain, computed=self._low())
        self.compare_gradients()
        self.compare_unchanged(*self._tangents, "tangent of")

    # -- a step by train_step -----------------------------------------------------------------------------------------
    def planned_step(self) -> None:
        """Run one `train_step` and the same of the plain model, and compare."""
        calls = [_turned(batch, self.calls) for batch in self.batches]
        seeds, outputs = self._seeds(), []
        parts = [self._cut(call) for call in calls]
        weights = self._weights(parts)
        for rank, cut in enumerate(parts):
            torch.manual_seed(seeds[rank])
            given = []
            for call, weight in zip(cut, weights[rank], strict=True):
                output, ran = self.plain.copies[rank].forward(own_inputs(call))
                _refuse_untrained(ran.loss)
                ran.tangents = ran.tangents_from_loss(weight / len(cut))
                self.plain.backward(rank, ran)
                given.append(pytree.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, output))
            total = sum(weights[rank])
            shares = [w / total if total else 1.0 / len(cut) for w in weights[rank]]
            outputs.append((given, shares, [batch_size(*call) for call in cut]))
        _overwrite(self.buffers, calls[self.mine])
        torch.manual_seed(seeds[self.mine])
        output = self.handle.train_step(*self.buffers[0], **self.buffers[1])
        self._at("train_step")
        entered = self.handle.runtime.entered
        whole = join_outputs(*outputs[self.mine], entered.rows_by_place if entered is not None else {})
        mine, plain = tensors_of(output), tensors_of(whole)
        self.compare_all("output", mine, {n: t for n, t in plain.items() if n in mine or not self.staged})
        self.compare_buffers()
        if self.plan.optimizer is not None:
            self.compare_planned_update()
        else:
            self.plain.clip_as_planned()
            self.compare_gradients()
            self.compare_own_update()

    def _cut(self, call: Call) -> list[Call]:
        args, kwargs = call
        uneven = None if self.staged else self.plan.loss_average == "token"
        return split_batch(args, kwargs, self.plan.micro_batches, uneven=uneven)

    def _weights(self, parts: Sequence[Sequence[Call]]) -> list[list[float]]:
        """Return the weight of each micro-batch of each data rank in the loss, 1 on average."""
        if self.plan.loss_average != "token":
            return [[1.0] * len(cut) for cut in parts]
        entered = self.handle.runtime.entered
        ignored = ignored_of(entered.trace.ignored if entered is not None else ())
        module = self.plain.copies[0].module
        counts = [[count_targets(module, *call, ignored=ignored) for call in cut] for cut in parts]
        mean = sum(map(sum, counts)) / len(parts) / len(parts[0])
        return [[c / mean for c in row] for row in counts]

    # -- comparing ----------------------------------------------------------------------------------------------------
    def _at(self, what: str) -> None:
        self.phase = f"step {self.number}, {what}"

    def _low(self) -> torch.dtype | None:
        low: torch.dtype | None = self.plan.resolved_precision().dtype("compute")
        return low

    def _note(self, difference: Difference) -> None:
        self.found.append((len(self.found), replace(difference, phase=self.phase)))

    def compare(self, what: str, name: str, mine: Any, plain: Any, **options: Any) -> None:
        """Record how far two tensors are apart; see `zgraph.program.tolerance.difference`."""
        self._note(difference(what, name, self.rank, mine, plain, **options))

    def compare_all(self, what: str, mine: Mapping[str, torch.Tensor], plain: Mapping[str, torch.Tensor]) -> None:
        """Compare tensors by name; a tensor that only one model has is a difference."""
        for name in plain.keys() - mine.keys():
            self._note(Difference(what, f"{name} (missing)", self.rank, math.inf, 0.0, False))
        for name in mine.keys() - plain.keys():
            self._note(Difference(what, f"{name} (should not be there)", self.rank, math.inf, 0.0, False))
        for name in plain:
            if name in mine:
                self.compare(what, name, mine[name].detach(), plain[name].detach(), computed=self._low())

    def compare_outputs(self, mine: Ran, plain: Ran) -> None:
        self.compare_all("output", mine.outputs, plain.outputs)
        self.compare_all("loss", {"": mine.loss}, {"": plain.loss})
        for name in mine.outputs.keys() & plain.outputs.keys():
            if mine.outputs[name].requires_grad != plain.outputs[name].requires_grad:
                how = "has no gradient" if plain.outputs[name].requires_grad else "has a gradient"
                self._note(Difference("output", f"{name} ({how})", self.rank, math.inf, 0.0, False))

    def compare_buffers(self) -> None:
        plain = dict(self.plain.copies[self.mine].module.named_buffers())
        scale = norm_of(plain.values())
        for name, buffer in self.compiled.named_buffers():
            if self.handle.runtime.has_buffer(name):
                self.compare("buffer", name, buffer, plain[name], all_norm=scale, computed=self._low())

    def compare_gradients(self) -> None:
        """Compare `.grad` of all parameters that this rank has."""
        plain = self.plain.grads()
        norm = norm_of(g for g in plain.values() if g is not None)
        for name, param in self._params():
            grad, wanted = param.grad, plain[name]
            if grad is None or wanted is None:
                if (grad is None) != (wanted is None):
                    how = "missing" if grad is None else "should not be there"
                    self._note(Difference("gradient", f"{name} ({how})", self.rank, math.inf, 0.0, False))
                continue
            low = self._low() or self.plain.specs[name].compute_dtype
            self.compare("gradient", name, _whole(grad), wanted, all_norm=norm, computed=low)

    def compare_unchanged(self, mine: Mapping[str, Any], before: Mapping[str, Any], what: str) -> None:
        """Check, bit for bit, that the caller's tensors are unchanged."""
        for name, value in mine.items():
            if name in before and not same_bits(value, before[name]):
                self.compare(what, f"{name} (it was changed)", value, before[name], bound=0.0)

    def compare_planned_update(self) -> None:
        """Compute the plan's update from the gradients that it used, and compare weights and states."""
        if self.staged:  # (each stage has its own part of the gradient of what several stages use)
            self.gradients = self._of_stages(self.gradients, lambda mine, other: mine + other)
        self.compare_gradients_of_update()
        groups = [dict(g) for g in self.handle.optimizer.param_groups]  # type: ignore[union-attr]
        self.plain.update(self.gradients, groups)
        self._at("update")
        self.compare_weights()
        state = self.handle.optimizer.state  # type: ignore[union-attr]
        for name, param in self._params():
            if param.grad is not None:
                self._note(Difference("gradient", f"{name} (should be gone)", self.rank, math.inf, 0.0, False))
            wanted = self.plain.states(name)
            actual_states = {k: _whole(v) for k, v in state[param].items()} if wanted else {}
            for key in wanted.keys() & actual_states.keys():
                codes = wanted[key].dtype is torch.uint8
                mine, plain = (
                    (actual_states[key].float(), wanted[key].float()) if codes else (actual_states[key], wanted[key])
                )
                self.compare("state", f"{name}/{key}", mine, plain, bound=_CODES if codes else None)
            for key in wanted.keys() - actual_states.keys():
                self._note(Difference("state", f"{name}/{key} (missing)", self.rank, math.inf, 0.0, False))

    def compare_gradients_of_update(self) -> None:
        """Compare the gradients that the plan's update used, before clipping."""
        plain = self.plain.grads()
        norm = norm_of(g for g in plain.values() if g is not None)
        for name, wanted in plain.items():
            if (name in self.gradients) != (wanted is not None):
                how = "missing" if wanted is not None else "should not be there"
                self._note(Difference("gradient", f"{name} ({how})", self.rank, math.inf, 0.0, False))
            elif wanted is not None:
                low = self._low() or self.plain.specs[name].compute_dtype
                self.compare("gradient", name, self.gradients[name], wanted, all_norm=norm, computed=low)

    def compare_own_update(self) -> None:
        """Update both models by a user's own optimizer, SGD with momentum, and compare the weights."""
        grads = {n: _whole(p.grad) for n, p in self._params() if p.grad is not None}
        if self.staged:
            grads = self._of_stages(grads, lambda mine, other: mine)
        if not hasattr(self, "_own"):
            size = norm_of(self.plain.weights.values())
            slope = norm_of(grads.values())
            rate = _agreed(MOVED * (size or 1.0) / (slope or 1.0), self.world)
            self._make = lambda params: torch.optim.SGD(params, lr=rate, momentum=0.9)
            self._own = self._make([p for p in self.compiled.parameters() if p.requires_grad])
        self._own.step()
        self._own.zero_grad(set_to_none=self.number % 2 == 1)
        self.plain.own_update(self._make, grads)
        self._at("update")
        self.compare_weights()

    def _of_stages(
        self,
        mine: dict[str, torch.Tensor],
        join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Return the gradients of all stages of a pipeline. `join` combines those of two stages that use the same
        parameter."""
        everyone: list[Any] = [None] * self.world
        position = self.handle.mesh.get_local_rank(STAGE_DIM)  # type: ignore[union-attr]
        dist.all_gather_object(everyone, (position, mine))
        gradients: dict[str, torch.Tensor] = {}
        for grads in dict(everyone).values():
            gradients |= {n: join(gradients[n], g) if n in gradients else g for n, g in grads.items()}
        return gradients

    def compare_weights(self) -> None:
        for name, param in self._params():
            self.compare("parameter", name, _whole(param), self.plain.weights[name])

    def _params(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that this rank has; in a pipeline it does not have those of other stages."""
        return [(n, p) for n, p in self.compiled.named_parameters() if not p.is_meta]

    def _seeds(self) -> list[int]:
        """Return one seed for each data rank's next call, the same on all ranks."""
        self.calls += 1
        return [self.seed + 7919 * self.calls + d for d in range(len(self.batches))]


def _with_low_scale(plan: Plan) -> Plan:
    """Return the plan with an initial loss scale at which no step should overflow, since a skipped step compares
    nothing."""
    scaling, record = plan.loss_scale(), plan.resolved_precision()
    if scaling is None or scaling.static is not None or 2.0**scaling.initial_scale_power <= SCALE:
        return plan
    low = {"initial_scale_power": int(math.log2(SCALE)), "min_loss_scale": min(scaling.min_loss_scale, SCALE)}
    record = record.model_copy(update={"loss_scale": scaling.model_copy(update=low)})
    return plan.model_copy(update={"precision": record, "numerics": None})


def _call(plain: ReferenceTraining, inputs: Inputs) -> Call:
    """Return a rank's part of the global batch, ordered as `train_step` orders it."""
    args, kwargs = split_inputs(inputs)
    return args, in_order(plain.copies[0].called, kwargs)


def _turned(call: Call, by: int) -> Call:
    """Return a batch with its rows rotated: the same data in all, other data in each micro-batch, and other outputs.

    A batch whose tensors share memory is returned as it is, since shared memory is part of what is compared.
    """
    if share_memory(call):
        return call
    leaves, spec = pytree.tree_flatten(call)
    rows = max((x.shape[0] for x in leaves if isinstance(x, torch.Tensor) and x.dim()), default=0)
    turned = [x.roll(by, 0) if isinstance(x, torch.Tensor) and x.dim() and x.shape[0] == rows else x for x in leaves]
    return pytree.tree_unflatten(turned, spec)  # type: ignore[no-any-return]


def _overwrite(buffers: Call, call: Call) -> None:
    """Write a call's tensors over those of the call before, as a loader with one set of buffers does."""
    for mine, value in zip(pytree.tree_leaves(buffers), pytree.tree_leaves(call), strict=True):
        if isinstance(mine, torch.Tensor):
            with torch.no_grad():
                mine.copy_(value)


def _whole(value: torch.Tensor) -> torch.Tensor:
    """Return a copy of a whole tensor. All ranks that have parts of it must call it."""
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def _agreed(value: float, world: int) -> float:
    """Return rank 0's value."""
    if world == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _as_on_rank_0(model: nn.Module, world: int) -> nn.Module:
    """Return a copy of the model with rank 0's parameters and buffers, with which a compiled model begins; with one
    rank the model itself."""
    if world == 1:
        return model
    box = [{n: t.detach().cpu() for n, t in [*model.named_parameters(), *model.named_buffers()]}]
    dist.broadcast_object_list(box, src=0)
    twin = own_copy(model)
    with torch.no_grad():
        for name, tensor in [*twin.named_parameters(), *twin.named_buffers()]:
            if name in box[0] and box[0][name].shape == tensor.shape:
                tensor.copy_(box[0][name])
    copy_hooks(model, twin)
    return twin


def _refuse_untrained(loss: torch.Tensor) -> None:
    if not loss.requires_grad:
        raise ModelError(
            "the loss depends on no parameter that trains",
            why="the compiled model is compared in training",
            hint="requires_grad_() on those that are to train; or leave out compiled to compare a forward alone",
        )
