"""Run a plan's step on virtual ranks in one process and compare it with the plain model, for `zgraph.verify` and
`zgraph bisect`.

Each virtual rank gets its part of the global batch. The plain model runs on each part as well; outputs and updated
buffers must equal those of the same rank, gradients the mean over ranks. For a plan with a pipeline this module runs
the whole model on the ranks of one stage, with the plain model run on each micro-batch;
`zgraph.verification.virtual_stages` cuts it.

Programs are run operator by operator: whole ones as any pass left them, or split ones as they are compiled. The inputs
and outputs of a whole program depend on the passes that it has been through, which its facts tell. Before it is
"sharded" its parameters are whole. Before it is "reduced" its gradients are each rank's own, multiplied by the loss
scale if it is "scaled". Such gradients are reduced here, with the same roundings as in `reduce_gradients`, so that the
results of any two programs can be compared.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from zgraph.build.build_context import BuildContext
from zgraph.build.pass_pipeline import PLAIN, PassFilter, Variant, costs_of
from zgraph.build.planned_step import Inputs, split_inputs
from zgraph.build.resolve_auto_offload import placed
from zgraph.build.step_program import Entry, StepProgram
from zgraph.build.unmatched_patterns import refuse_unmatched
from zgraph.build.update_program import resident_of
from zgraph.capture.call_signature import batch_rows
from zgraph.capture.capture import find_loss, trace
from zgraph.capture.former_storages import former_storages
from zgraph.capture.replaced_forward import method_of
from zgraph.capture.symbolic_capture import SymbolicSizes
from zgraph.capture.tensor_parallel_layout import divided_layout
from zgraph.capture.value_inputs import declared_values, with_values
from zgraph.codegen.partition import Parts
from zgraph.errors import ModelError, SignatureError
from zgraph.parameters.layout import planned_layout
from zgraph.parameters.mixed_precision import check, prepare
from zgraph.passes.canonicalize.sparse_attention import SparseOptions, sparse_attention
from zgraph.plan.attention import Sparsity
from zgraph.plan.plan import Plan
from zgraph.plan.shapes import values_in
from zgraph.program.node import tensor
from zgraph.program.program import DATA_DIMS, STAGE_DIM, Fact, InputRole, OutputRole, ParamSpec, Port, Program
from zgraph.program.tolerance import Difference, difference, norm_of
from zgraph.runtime.compiled_models import is_compiled
from zgraph.runtime.train_step import in_order, split_batch
from zgraph.stages.stage_programs import refuse_state
from zgraph.torch_compat import inductor_code
from zgraph.update.owned_parameters import within
from zgraph.verification.masked_attention import masks_of, with_masks
from zgraph.verification.unshared_inputs import own_inputs
from zgraph.verification.virtual_ranks import Watch, coordinates, group_ranks, run_virtual

SCALE = 2.0**8  # the loss scale of half precision here; a power of two only saves gradients from underflow

SHAKEN = 3  # runs of a model in double precision, each with other last bits
OWN_ROUNDING = 8.0  # how many times the plain model's own rounding error the same operations in another order may have
_SAME_LOSS = 1e-2  # the largest difference of a loss in double precision that is still the same computation

GlobalBatch = Inputs | list[Inputs]
"""A batch of all ranks: one that is split, or a list of each rank's own."""

Results = list[dict[tuple[str, str], torch.Tensor]]
"""A program's results, rank by rank: by what each is (see `Difference.what`) and its name."""

HANDED: dict[InputRole | OutputRole, InputRole] = {
    OutputRole.IN_FLIGHT: InputRole.IN_FLIGHT,
    OutputRole.SAVED: InputRole.SAVED,
    OutputRole.UNSHARDED: InputRole.UNSHARDED,
}
"""Outputs of one part of a program that are inputs of another on the same rank, with the role they have there."""


@contextlib.contextmanager
def virtual_step(
    model: nn.Module,
    plan: Plan,
    world: int,
    inputs: GlobalBatch,
    loss_fn: Callable[..., torch.Tensor] | None = None,
) -> Iterator[VirtualStep]:
    """Prepare the step of `model` by `plan` on `world` virtual ranks. `inputs` are the global batch. Inside the context
    random numbers are drawn as plain PyTorch draws them; after it the random state is what it was. Raises what
    `zgraph.verify` does."""
    state = torch.get_rng_state()
    try:
        with inductor_code.eager_random_numbers():
            with told_if_parted(model, inputs, plan.for_world(world).data_ranks(world)):
                step = VirtualStep(model, plan, world, inputs, loss_fn)
            yield step
    finally:
        torch.set_rng_state(state)


def own_copy(model: nn.Module) -> nn.Module:
    """Return a deep copy of a model that is to be compared. Raises `ModelError` if it can't be copied."""
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise ModelError(
            "the model can't be copied, so it can't be compared",
            why=f"copy.deepcopy(model): {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            hint="let it hold no tensor that was computed from its parameters (self.part = self.weight[:2]): compute that in forward",
        ) from error


def _refuse_incomparable(model: nn.Module) -> None:
    """Raise `ModelError` for a model that is compiled, or has no numbers."""
    if is_compiled(model):
        raise ModelError(
            "a plain model is compared, on virtual ranks", why="this one is compiled", hint="build it again"
        )
    without = next((n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta), None)
    if without is not None:
        raise ModelError(
            "the model has no numbers to compare",
            why=f"{without!r} is on the meta device",
            hint="build the model on a real device",
        )


class VirtualStep:
    """A step on virtual ranks: see `virtual_step`. `model` is a copy whose parameters have the dtypes that ranks hold;
    `params` are its whole parameters.

    `mesh` has all of the `world` ranks, `sizes` those within a stage (without a pipeline, all). `calls` has, for each
    micro-batch, the plain model's run on each rank within a stage; `ranks` are the runs of the first micro-batch.
    Without a pipeline a rank's batch is one micro-batch. `watch` is called after each operator that runs (see
    `run_virtual`).
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        world: int,
        inputs: GlobalBatch,
        loss_fn: Callable[..., torch.Tensor] | None,
    ) -> None:
        _refuse_incomparable(model)
        self.watch: Watch | None = None
        plan, self.world, self.mesh = plan.for_world(world), world, plan.resolve_mesh(world)
        self.sizes = within(self.mesh)
        self.model = own_copy(model)
        self.device = _device(model)
        precision = plan.resolved_precision()
        self.plan = placed(plan, self.model, self.sizes, self.device)
        self.specs = planned_layout(self.model, self.sizes, self.plan)
        check(self.model, precision, self.specs)
        refuse_unmatched(self.plan, self.model)
        prepare(self.model, precision, self.specs)
        former_storages(self.model).note_early(self.model)
        plain = in_precision(self.model, self.specs)
        count, forward = math.prod(self.sizes.values()), method_of(model)
        parts = self.plan.micro_batches if self.pipelined else 1
        data = [data_rank(self.sizes, r) for r in range(count)]
        called = Called(self.model, forward)
        batches = [_micro_batches(called, rows_of(inputs, d, max(data) + 1), parts) for d in range(max(data) + 1)]
        self.costs = costs_of(self.plan, self.device)
        residents = resident_of(self.model, self.specs, self.plan, self.sizes, self.device, self.costs)
        call = split_inputs(batches[0][0])
        opened = _with_constants(self.plan, forward, [split_inputs(rows) for of_rank in batches for rows in of_rank])
        traced = trace(self.model, forward, *call, self.specs, self.sizes, self.device, precision, opened)
        self.entry = Entry("step", "", traced, batch_rows(*call), BuildContext(self.plan, self.costs, residents))
        if self.pipelined:
            again = lambda: trace(self.model, forward, *call, self.specs, self.sizes, self.device, precision, opened)  # noqa: E731
            refuse_state(traced, again, self.plan.micro_batches, self.model, *call)
        each = [list(_in_turn(self.model, plain, self.entry, rows, loss_fn)) for rows in batches]
        self.calls = [list(column) for column in zip(*(each[d] for d in data), strict=True)]
        self.ranks = self.calls[0]
        self._refuse_overlap(split_inputs(batches[0][0]))
        captured = self.step.captured
        if self.plan.attention:  # (it is to change what is computed; no other pass is)
            sparse_attention(SparseOptions(tuple(self.plan.attention.items())))(captured)
        captured.params = self.specs = divided_layout(captured, self.plan, self.costs, self.model)
        self.params = {n: p.detach() for n, p in self.model.named_parameters()}

    def _refuse_overlap(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        """Raise `SignatureError` for overlapping inputs, as a call would: here each tensor has memory of its own."""
        if self.step.mutated:
            flat = self.entry.trace.flat.flatten(self.model, *call)
            self.entry.trace.refuse_overlap(self.step.mutated, flat, whole=True)

    @property
    def pipelined(self) -> bool:
        """Whether the plan cuts the model into stages."""
        return self.mesh.get(STAGE_DIM, 1) > 1

    @cached_property
    def step(self) -> StepProgram:
        """The programs of the step; with a pipeline, of the whole model before it is cut."""
        return self.entry.program(frozenset(self.ranks[0].tangents))

    def unverified(self) -> StepProgram:
        """Return the same programs, made by passes without verification."""
        context = replace(self.step.context, pass_filter=PassFilter(verified=False))
        return StepProgram(self.step.captured, context)

    # -- what programs give -------------------------------------------------------------------------------------------
    def of_program(self, program: Program, variant: Variant = PLAIN) -> Results:
        """Run a whole program, as any pass left it, and return its results."""
        given = [
            [self.input_of(port, node, rank, run, program, {}) for port, node in program.input_items()]
            for rank, run in enumerate(self.ranks)
        ]
        values = run_virtual(program, given, self.random_states(), self.watch)
        results = [named(program, run, row) for run, row in zip(self.ranks, values, strict=True)]
        if Fact.REDUCED not in program.facts:
            self._reduce(results, variant, program.facts)
        return results

    def of_parts(self, parts: Parts) -> Results:
        """Run a split program, its forward and then its backward, and return its results."""
        extras: list[dict[tuple[Any, str], Any]] = [{} for _ in self.ranks]

        def run(part: Program, states: list[torch.Tensor] | None = None) -> list[tuple[Any, ...]]:
            given = [
                [self.input_of(port, node, rank, self.ranks[rank], part, extra) for port, node in part.input_items()]
                for rank, extra in enumerate(extras)
            ]
            return run_virtual(part, given, states, self.watch)

        states = self.random_states()
        results: Results = [{} for _ in self.ranks]
        for part in (*parts.ahead, parts.forward, parts.backward):
            if part is None:
                continue
            for rank, values in enumerate(run(part, None if part in parts.ahead else states)):
                results[rank] |= named(part, self.ranks[rank], values)
                extras[rank] |= {
                    (HANDED[p.role], p.name): v for p, v in zip(part.outputs, values, strict=True) if p.role in HANDED
                }
        return results

    def random_states(self, micro_batch: int = 0) -> list[torch.Tensor]:
        """Return each rank's random state before this micro-batch."""
        return [r.random.clone() for r in self.calls[micro_batch]]

    def input_of(
        self, port: Port, node: fx.Node, rank: int, run: PlainRun, program: Program, extra: dict[tuple[Any, str], Any]
    ) -> Any:
        """Return the input of a program at a port on a rank, in the call of `run`. `extra` has inputs that are neither
        the call's nor the model's, by role and name."""
        if (port.role, port.name) in extra:
            return extra[port.role, port.name]
        if port.role is InputRole.PARAMETER and Fact.SHARDED in program.facts:
            mine = self._mine(port.name, self.params[port.name], rank)
            return shard_of(mine, self.specs[port.name], rank, self.sizes)
        if port.role in (InputRole.PARAMETER, InputRole.UNSHARDED):
            whole = self.params[port.name]
            return _laid_out(self._mine(port.name, whole, rank) if Fact.DIVIDED in program.facts else whole, node)
        if port.role is InputRole.ACCUMULATOR:
            return _laid_out(self._mine(port.name, run.waiting(port.name, self.specs[port.name]), rank), node)
        if port.role is InputRole.RANK_INDEX:
            return torch.tensor(coordinates(self.sizes, rank)[port.name])
        if port.role is InputRole.TANGENT:
            return _laid_out(run.tangents[int(port.name.removeprefix("output_"))], node)
        if port.role is InputRole.SCALE:
            return torch.tensor(SCALE)
        if port.role is InputRole.RESIDUAL:
            return torch.zeros(tensor(node).shape)
        if port.role is InputRole.DRAWS:
            return torch.tensor(0)
        assert port.index is not None
        value = run.flat[port.index]
        return value.detach() if isinstance(value, torch.Tensor) else value

    def _mine(self, name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the part of a whole parameter or gradient that a rank computes with."""
        return part_of(whole, self.specs[name], rank, self.sizes)

    # -- gradients ----------------------------------------------------------------------------------------------------
    def _reduce(self, results: Results, variant: Variant, facts: Collection[str]) -> None:
        """Put gradients that are each rank's own into the form in which the finished program returns them."""
        for what, name in list(results[0]):
            if what == "gradient" and name in self.specs:
                given = [r[what, name] for r in results]
                if Fact.DIVIDED not in facts:
                    given = [self._mine(name, g, rank) for rank, g in enumerate(given)]
                mine = self._finished(name, given, variant, Fact.SCALED in facts)
                for rank, part in enumerate(self._parted(name, mine, variant)):
                    results[rank][what, name] = part

    def _finished(
        self, name: str, grads: Sequence[torch.Tensor], variant: Variant, scaled: bool = False
    ) -> list[torch.Tensor]:
        """Return, for each rank, the gradient of the part of a parameter that it computes with: added to earlier
        micro-batches' and averaged over ranks, as `variant` says."""
        spec = self.specs[name]
        scale = torch.tensor(SCALE) if scaled else None
        if variant.accumulated:
            earlier_grads = [self._mine(name, r.waiting(name, spec), rank) for rank, r in enumerate(self.ranks)]
            earlier_grads = earlier_grads if scale is None else [h * scale for h in earlier_grads]
            grads = [h + g.to(spec.grad_dtype) for h, g in zip(earlier_grads, grads, strict=True)]
        means = mean_of(grads, self.sizes, spec, self.plan.gradient_dims) if variant.reduce else list(grads)
        means = [g.to(spec.grad_dtype) for g in means]
        return means if scale is None else [g / scale for g in means]

    def gradient(self, name: str, rank: int) -> torch.Tensor:
        """Return a rank's part of the plain model's gradient, zeros if there is none."""
        own = [r.grads.get(name) for r in self.ranks]
        zeros = torch.zeros(self.specs[name].whole_shape)
        given = [self._mine(name, zeros if g is None else g, at) for at, g in enumerate(own)]
        return self._parted(name, self._finished(name, given, PLAIN), PLAIN)[rank]

    def _parted(self, name: str, parts: list[torch.Tensor], variant: Variant) -> list[torch.Tensor]:
        if not variant.reduce:
            return parts
        return [shard_of(part, self.specs[name], rank, self.sizes) for rank, part in enumerate(parts)]

    # -- comparing ----------------------------------------------------------------------------------------------------
    def differences(self, results: Results, variant: Variant = PLAIN, bound: float | None = None) -> list[Difference]:
        """Return how far each result is from the plain model's. `bound`: see `zgraph.program.tolerance.difference`."""
        wholes: dict[str, list[torch.Tensor]] = {}
        for name in self.params:
            own = [r.grads.get(name) for r in self.ranks]
            given = [self._mine(name, g, rank) for rank, g in enumerate(own) if g is not None]
            if len(given) == len(own):
                wholes[name] = self._finished(name, given, variant)
        norm = norm_of(w[0] for w in wholes.values())
        parted = {n: self._parted(n, w, variant) for n, w in wholes.items()}
        compared: list[Difference] = []
        reached = {name for what, name in results[0] if what == "gradient"}
        if self.step.differentiated:
            for name in sorted(wholes.keys() ^ reached):
                how = "missing" if name in wholes else "should not be there"
                compared.append(Difference("gradient", f"{name} ({how})", 0, float("inf"), 0.0, False))
        computed = self.plan.resolved_precision().dtype("compute")
        for rank, (run, values) in enumerate(zip(self.ranks, results, strict=True)):
            for (what, name), value in values.items():
                if what == "output":
                    compared.append(
                        difference(what, name, rank, value, run.plain[name], computed=computed, bound=bound)
                    )
                elif what == "buffer":
                    scale = norm_of(run.buffers.values())
                    compared.append(difference(what, name, rank, value, run.buffers[name], scale, bound=bound))
                elif what == "changed input" and name in run.changed:
                    compared.append(difference(what, name, rank, value, run.changed[name], bound=bound))
                elif what == "kept weight":
                    whole = self._mine(name, self.params[name], rank).to(self.specs[name].compute_dtype)
                    compared.append(difference(what, name, rank, value, whole, bound=bound))
                elif what == "gradient" and name in parted:
                    low = self.specs[name].compute_dtype
                    compared.append(difference(what, name, rank, value, parted[name][rank], norm, low, bound))
        return [self._allowed_for(d, parted) for d in compared] if bound is None else compared

    def _allowed_for(self, difference: Difference, grads: Mapping[str, Sequence[torch.Tensor]]) -> Difference:
        """Return the difference with the plain model's own rounding error allowed: see `allowing`."""
        if difference.ok or difference.what not in ("output", "buffer", "gradient"):
            return difference
        of_gradient = difference.what == "gradient" and difference.name in grads
        size = float(grads[difference.name][difference.rank].double().norm()) if of_gradient else None
        return allowing(
            difference,
            difference.name,
            [[r] for r in (self.ranks if of_gradient else [self.ranks[difference.rank]])],
            size,
        )


def allowing(
    difference: Difference, name: str, runs: Sequence[Sequence[PlainRun]], size: float | None = None
) -> Difference:
    """Return a difference of an output, buffer or gradient; if it is too large, add the plain model's own rounding
    error to what is allowed. `runs`: for each rank, the runs whose numbers are added up; `size`: the norm of what was
    compared, by default that of the first rank's numbers."""
    if difference.ok or not math.isfinite(difference.error):
        return difference
    own, norms = [], []
    for calls in runs:
        pairs = [run.pair(difference.what, name) for run in calls]
        if any(a is None or b is None or a.shape != b.shape for a, b in pairs):
            return difference
        plain, exact = (sum(pair[at].detach().double() for pair in pairs) for at in (0, 1))
        own.append(float((plain - exact).norm()))
        norms.append(float(plain.norm()))
    size = norms[0] if size is None else size
    return replace(difference, allowed=difference.allowed + OWN_ROUNDING * sum(own) / len(own) / max(size, 1e-300))


class PlainRun:
    """The plain model's run on one rank's batch, or a micro-batch of it: its outputs, the gradients of `weight` times
    its loss, its updated buffers, its inputs after the run (`changed`), and what the program needs. `plain` is a copy
    of the model, whose gradients and buffers change."""

    def __init__(
        self,
        model: nn.Module,
        plain: nn.Module,
        entry: Entry,
        inputs: Inputs,
        loss_fn: Callable[..., torch.Tensor] | None,
        weight: float = 1.0,
    ) -> None:
        call = split_inputs(inputs)
        twin, before = copy.deepcopy(plain), copy.deepcopy(plain)
        self.flat = own_inputs(entry.trace.flat.flatten(model, *call))
        self.random = torch.get_rng_state()
        precision = entry.context.plan.resolved_precision()
        if precision.cast_inputs and (low := precision.dtype("compute")) is not None:
            call = pytree.tree_map(lambda x: cast_to(x, low), call)
        out = precision.dtype("output")
        values: list[Any] = []
        attention = entry.context.plan.attention
        graph_module = with_masks(entry.trace.flat.graph_module, entry.trace.aliases, attention)

        def capture(*flat: Any) -> Sequence[Any]:
            # (Gradients stay enabled: a hook that forward registers needs a value that requires one.)
            outputs = [cast_to(v, out) for v in graph_module(*flat)]
            # Each output is a leaf, so that a tangent is the loss's derivative by this output and no other.
            values.extend(
                v.detach().requires_grad_() if i in entry.trace.differentiable else v for i, v in enumerate(outputs)
            )
            return values

        # The numbers are the plain model's own; dynamo's flat graph, run from the same state, identifies its outputs.
        torch.set_rng_state(self.random)
        given = own_inputs(call)
        with masks_of(plain, attention):
            output = pytree.tree_map(lambda v: cast_to(v, out), plain(*given[0], **given[1]))
        self.changed = {
            port.name: value
            for port, value in zip(entry.trace.inputs, entry.trace.flat.flatten(model, *given), strict=True)
            if port.role is InputRole.INPUT
        }
        self.grads: dict[str, torch.Tensor | None] = {}
        self.tangents: dict[int, torch.Tensor] = {}
        self.loss = torch.zeros(())
        torch.set_rng_state(self.random)
        given_flat = own_inputs(call)
        flat_output = entry.trace.flat.bind(capture)(twin, *given_flat[0], **given_flat[1])
        self._flat_leaves, self._outputs = _tensors(flat_output), values
        plain_leaves = {id(f): p for f, p in zip(self._flat_leaves, _tensors(output), strict=False)}
        # (if the output's structure can't be flattened, the flat graph's own output replaces the plain model's)
        self.plain = {self.output_name(i): plain_leaves.get(id(v), v) for i, v in enumerate(values)}
        if entry.trace.differentiable:
            losses = [loss_fn(x) if loss_fn else find_loss(x) for x in (output, flat_output)]
            with masks_of(plain, attention):  # (a checkpointed region runs once more)
                self._differentiate(plain, losses, {i: values[i] for i in sorted(entry.trace.differentiable)}, weight)
        self.buffers = dict(plain.named_buffers())
        self._precise = lambda seed: _precise(
            attention, copy.deepcopy(before), own_inputs(call), loss_fn, weight, self.random, seed
        )

    def _differentiate(
        self,
        plain: nn.Module,
        losses: Sequence[torch.Tensor | None],
        outputs: Mapping[int, torch.Tensor],
        weight: float,
    ) -> None:
        """Compute the gradients of `weight` times the plain model's loss, and the tangents of the flat graph's
        `outputs` from its own loss; `losses` are the two. Raises `ModelError` if the output holds no loss."""
        loss, flat_loss = losses
        if loss is None or flat_loss is None:
            raise ModelError("the model's output holds no loss", hint="give a loss_fn")
        self.loss = loss.detach()
        share = torch.as_tensor(weight, dtype=loss.dtype, device=loss.device)
        loss.backward(share.reshape(loss.shape))
        tangents = torch.autograd.grad(
            flat_loss, list(outputs.values()), share.reshape(flat_loss.shape), allow_unused=True
        )
        self.tangents = {i: g for i, g in zip(outputs, tangents, strict=True) if g is not None}
        self.grads = {n: p.grad for n, p in plain.named_parameters()}

    @cached_property
    def exact(self) -> list[PreciseRun]:
        """The same run in double precision, to measure the rounding error of the plain model's own numbers. There are
        several runs if parts are in double precision already, since these are changed at random. Empty if the model
        does not run in it, or gives another loss (it draws other random numbers, or takes another branch)."""
        runs = []
        for seed in range(SHAKEN):
            run = self._precise(seed)
            if run is None or not torch.allclose(
                run.loss.double(), self.loss.double(), rtol=_SAME_LOSS, atol=_SAME_LOSS
            ):
                return []
            runs.append(run)
            if not run.shaken:
                break
        return runs

    def pair(self, what: str, name: str) -> tuple[Any, Any]:
        """Return a number of the plain model, and the same in double precision (of several runs the farthest); None for
        one that does not exist."""
        plain_value = {"output": self.plain, "buffer": self.buffers, "gradient": self.grads}[what].get(name)  # type: ignore[attr-defined]
        runs = (
            {"output": run.outputs, "buffer": run.buffers, "gradient": run.grads}[what].get(name) for run in self.exact
        )
        exact_values = [value for value in runs if value is not None]
        if plain_value is None or any(value.shape != plain_value.shape for value in exact_values):
            return plain_value, None
        return plain_value, max(
            exact_values, key=lambda value: float((plain_value.detach().double() - value).norm()), default=None
        )

    def output_name(self, index: int) -> str:
        """Return the name of a flat output: by its position in the model's output if it has one."""
        at = next((i for i, leaf in enumerate(self._flat_leaves) if leaf is self._outputs[index]), None)
        return f"output {index}" if at is None else f"leaf {at}"

    def waiting(self, name: str, spec: ParamSpec) -> torch.Tensor:
        """Return the unreduced gradient that earlier micro-batches left; here this micro-batch's own gradient stands in
        for it."""
        grad = self.grads.get(name)
        return torch.zeros(spec.whole_shape, dtype=spec.grad_dtype) if grad is None else grad.to(spec.grad_dtype)


@dataclass(frozen=True)
class PreciseRun:
    """The plain model's run in double precision."""

    loss: torch.Tensor  # its loss
    outputs: dict[str, torch.Tensor]  # the tensors in its output, by their names
    grads: dict[str, torch.Tensor]  # the gradients of parameters that have one
    buffers: dict[str, torch.Tensor]  # the updated buffers
    shaken: bool  # whether something was in double precision before


def _precise(attention: Mapping[str, Sparsity], model: nn.Module, *args: Any) -> PreciseRun | None:
    with masks_of(model, attention):
        return precise_run(model, *args)


def precise_run(
    model: nn.Module,
    call: tuple[Any, Any],
    loss_fn: Callable[..., torch.Tensor] | None,
    weight: float,
    random: torch.Tensor,
    seed: int = 0,
) -> PreciseRun | None:
    """Run a model in double precision from this random state; return None if it can't be. Model and inputs are changed.
    Numbers in double precision already are changed in the last place, at random by `seed`: two such runs differ as
    results that only rounding tells apart (Parker's Monte Carlo arithmetic)."""
    try:
        shaken = _shake([*model.parameters(), *_tensors(call)], seed)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(random)
            args, kwargs = pytree.tree_map(lambda x: cast_to(x, torch.float64), call)
            output = model.double()(*args, **kwargs)
            loss = loss_fn(output) if loss_fn else find_loss(output)
            if loss is None or not loss.requires_grad:
                return None
            (loss * weight).backward()
    except Exception:  # (a user's code may be made for one dtype)
        return None
    outputs = {f"leaf {i}": leaf.detach() for i, leaf in enumerate(_tensors(output))}
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return PreciseRun(loss.detach(), outputs, grads, dict(model.named_buffers()), shaken)


def _shake(tensors: Sequence[torch.Tensor], seed: int) -> bool:
    """Change each number in double precision by a last place, up or down at random. Return whether there is any."""
    random = torch.Generator().manual_seed(seed)
    doubles = [t for t in tensors if t.dtype is torch.float64]
    with torch.no_grad():
        for tensor in doubles:
            up = torch.randint(0, 2, tensor.shape, generator=random).to(tensor)
            tensor.mul_(1 + (2 * up - 1) * torch.finfo(torch.float64).eps)
    return bool(doubles)


def named(program: Program, run: PlainRun, values: Sequence[Any]) -> dict[tuple[str, str], torch.Tensor]:
    """Return a program's results by what they are and their names, in the call of `run`, without those that are only
    inputs of another part."""
    results: dict[tuple[str, str], torch.Tensor] = {}
    for port, value in zip(program.outputs, values, strict=True):
        if port.role is OutputRole.OUTPUT and port.index is not None:
            results["output", run.output_name(port.index)] = value
        elif port.role is OutputRole.MUTATION:
            results["buffer" if port.of is InputRole.BUFFER else "changed input", port.name] = value
        elif port.role is OutputRole.UNSHARDED:
            results["kept weight", port.name] = value
        elif port.role is OutputRole.GRADIENT:
            results["gradient" if port.of is InputRole.PARAMETER else "gradient of input", port.name] = value
    return results


@dataclass(frozen=True)
class Called:
    """A module and its class's forward."""

    module: nn.Module  # the module
    forward_function: Any  # the function that its forward is


def _micro_batches(called: Called, inputs: Inputs, parts: int) -> list[Inputs]:
    """Cut a rank's batch into micro-batches, as `train_step` does."""
    if parts == 1:
        return [inputs]
    args, kwargs = split_inputs(inputs)
    calls = split_batch(args, in_order(called, kwargs), parts, uneven=None)
    own = [own_inputs(call) for call in calls]  # (copies, for the reason given in `rows_of`)
    return [kwargs if isinstance(inputs, dict) else args for args, kwargs in own]


def _in_turn(
    model: nn.Module,
    reference: nn.Module,
    entry: Entry,
    batches: Sequence[Inputs],
    loss_fn: Callable[..., torch.Tensor] | None,
) -> Iterator[PlainRun]:
    """Yield the plain model's runs on a rank's micro-batches: each starts with the buffers that the one before left,
    and all have the same weight."""
    buffers: dict[str, torch.Tensor] = {}
    for batch in batches:
        plain = copy.deepcopy(reference)
        with torch.no_grad():
            for name, value in buffers.items():
                plain.get_buffer(name).copy_(value)
        run = PlainRun(model, plain, entry, batch, loss_fn, 1.0 / len(batches))
        buffers = run.buffers
        yield run


def _device(model: nn.Module) -> torch.device:
    return next((t.device for t in [*model.parameters(), *model.buffers()]), torch.device("cpu"))


def _with_constants(plan: Plan, forward: Callable[..., Any], calls: list[Any]) -> SymbolicSizes | None:
    """Return the inputs that a plan declares to be constants of a program, with the values of the first call. Raises
    `SignatureError` if another call has other values."""
    first, *others = [declared_values(plan.dynamic, forward, *call) for call in calls]
    for other in others:
        if len(first) != len(other) or not all(torch.equal(a, b) for a, b in zip(first, other, strict=True)):
            raise SignatureError(
                "ranks or micro-batches have other values of an input that is a constant of the program",
                where=", ".join(sorted(values_in(plan.dynamic))),
                why="each value has a program of its own, and one is verified",
                hint="a batch whose parts have the same values there",
            )
    return with_values(None, first)


def rows_of(inputs: GlobalBatch, rank: int, world: int) -> Inputs:
    """Return a rank's part of the global batch: a slice of each tensor with the most rows, all others whole. Of a list
    it is the rank's own. Raises `SignatureError` for a list of another length, or of batches of other sizes."""
    if isinstance(inputs, list):
        return own_inputs(_own_of(inputs, rank, world))  # type: ignore[no-any-return]
    sizes = {leaf.shape[0] for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.dim()}
    batch = max(sizes, default=0)

    parts: dict[int, torch.Tensor] = {}  # (a tensor that occurs twice is one tensor in each part too)

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != batch:
            return leaf
        if batch % world:
            raise SignatureError(
                f"a batch of {batch} can't be split over {world} ranks",
                hint="give a batch that the world divides",
            )
        return parts.setdefault(id(leaf), leaf.chunk(world)[rank])

    # (copies: products of two slices of one batch may differ in the last bit in some libraries, by their alignment)
    return own_inputs(pytree.tree_map(cut, inputs))  # type: ignore[no-any-return]


def _own_of(batches: list[Inputs], rank: int, world: int) -> Inputs:
    if len(batches) != world:
        raise SignatureError(
            f"{len(batches)} batches are given for {world} ranks that compute batches of their own",
            where="inputs",
            hint="a list has one for each; a tuple or dict is the batch of all, and is split",
        )
    leaves = [pytree.tree_leaves_with_path(one) for one in batches]
    sizes = [{pytree.keystr(p): list(x.shape) for p, x in of if isinstance(x, torch.Tensor)} for of in leaves]
    other = next((number for number, one in enumerate(sizes) if one != sizes[0]), None)
    if other is not None:
        path = next(path for path in [*sizes[0], *sizes[other]] if sizes[0].get(path) != sizes[other].get(path))
        raise SignatureError(
            f"ranks' batches have other sizes: inputs[0]{path} is {sizes[0].get(path)}, inputs[{other}]{path} {sizes[other].get(path)}",
            where="inputs",
            why="one program is verified, with the sizes of its inputs as numbers",
            hint="give batches of equal sizes",
        )
    return batches[rank]


@contextlib.contextmanager
def told_if_parted(model: nn.Module, inputs: GlobalBatch, ranks: int) -> Iterator[None]:
    """Raise `SignatureError` in place of an error inside if the plain model takes the batch whole, and not a rank's part of it."""
    try:
        yield
    except Exception as error:
        if isinstance(inputs, list) or ranks < 2 or isinstance(error, SignatureError) or _refusal(model, inputs):
            raise
        refusals = {rank: _refusal(model, rows_of(inputs, rank, ranks)) for rank in range(ranks)}
        refused = next((rank for rank, said in refusals.items() if said), None)
        if refused is None:
            raise
        raise SignatureError(
            f"the model takes the batch whole, and not the part of it that rank {refused} of {ranks} would compute",
            where="inputs",
            why=f"what has the most rows is split over the ranks, and does not go with what is given whole: {refusals[refused]}",
            hint="give a list of each rank's own batch: inputs=[(…), (…)]",
        ) from error


def _refusal(model: nn.Module, inputs: Inputs) -> str:
    """Return the first line of the plain model's error with these inputs; "" if there is none."""
    args, kwargs = own_inputs(split_inputs(inputs))
    try:
        with torch.no_grad():
            own_copy(model)(*args, **kwargs)
    except Exception as error:
        return str(error).partition("\n")[0] or type(error).__name__
    return ""


def cast_to(value: Any, dtype: torch.dtype | None) -> Any:
    """Return a floating-point tensor in this dtype; anything else, or with no dtype given, unchanged."""
    floats = dtype is not None and isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if floats else value


def in_precision(model: nn.Module, specs: dict[str, ParamSpec]) -> nn.Module:
    """Return a copy whose parameters have the dtypes that are computed in; cast `model`'s own to the dtypes that ranks
    hold."""
    plain = copy.deepcopy(model)
    for (name, param), own in zip(plain.named_parameters(), model.parameters(), strict=True):
        own.data = own.data.to(specs[name].dtype)
        param.data = own.data.to(specs[name].compute_dtype)
    return plain


def _tensors(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def _laid_out(value: torch.Tensor, node: fx.Node) -> torch.Tensor:
    """Return a copy with the dtype and strides of the program's input."""
    like = tensor(node)
    return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype).copy_(value)


def data_rank(sizes: Mapping[str, int], rank: int) -> int:
    """Return which part of the global batch a rank is given: the same for ranks that divide weights."""
    where, index = coordinates(dict(sizes), rank), 0
    for dim, size in sizes.items():
        if dim in DATA_DIMS:
            index = index * size + where[dim]
    return index


def part_of(whole: torch.Tensor, spec: ParamSpec, rank: int, sizes: dict[str, int]) -> torch.Tensor:
    """Return the part of a whole parameter or gradient that a virtual rank computes with."""
    if spec.division is None:
        return whole
    return spec.division.part(whole, coordinates(sizes, rank)[spec.division.mesh_dim])


def shard_of(whole: torch.Tensor, spec: ParamSpec, rank: int, sizes: dict[str, int]) -> torch.Tensor:
    """Return a virtual rank's padded shard of the part of a parameter or gradient that it computes with."""
    if spec.shard_dim is None:
        return whole
    first = spec.rows * coordinates(sizes, rank)[spec.shard_dim]
    padded = whole.new_zeros(spec.shard_shape)
    mine = whole[first : first + spec.rows]
    padded[: mine.shape[0]] = mine
    if padded.stride() != spec.stride and whole.dim() > 1 and not whole.is_contiguous():
        order = sorted(range(1, whole.dim()), key=lambda d: (-spec.stride[d], d))
        packed = padded.permute(0, *order).contiguous()
        return packed.permute([[0, *order].index(d) for d in range(whole.dim())])
    return padded


def mean_of(
    grads: Sequence[torch.Tensor], sizes: dict[str, int], spec: ParamSpec, over: Collection[str] = DATA_DIMS
) -> list[torch.Tensor]:
    """Return, for each rank, the mean over the ranks that see different data, of the mesh dimensions `over`: added in
    rank order, in the dtype that is reduced in, first within each `dp` group as the program does."""
    dims = [d for d in DATA_DIMS if d in over and sizes.get(d, 1) > 1]
    values = [g.to(spec.reduce_dtype) for g in grads] if dims else list(grads)
    for dim in dims:
        means: dict[tuple[int, ...], torch.Tensor] = {}
        groups = [tuple(group_ranks(sizes, dim, rank)) for rank in range(len(values))]
        for group in groups:
            if group not in means:
                total = values[group[0]].clone()
                for rank in group[1:]:
                    total += values[rank]
                means[group] = total / len(group)
        values = [means[group] for group in groups]
    return values
