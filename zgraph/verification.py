"""`zgraph.verify`: a plan's program on N virtual ranks against the plain model, in one process.

The program is run operator by operator, as it is after the split into forward and backward. What Inductor makes of it
is not part of the comparison.

Each virtual rank gets its part of the global batch. The plain model runs on each part as well; the program's outputs
and updated buffers must equal those of the same rank, its gradients the mean over ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from zgraph.capture import find_loss
from zgraph.casts import check, prepare
from zgraph.compiled import Entry
from zgraph.compiler import Inputs, split_inputs
from zgraph.errors import ModelError, SignatureError
from zgraph.passes.virtual import coordinates, run_virtual
from zgraph.pipeline import costs_of
from zgraph.placing import placed
from zgraph.plan import Plan
from zgraph.program import torch_private
from zgraph.program.program import InputRole, OutputRole, ParamSpec, Port, Program
from zgraph.sharding import planned_layout
from zgraph.update.program import outside_of

# Relative errors, norm-wise, by dtype: a few hundred roundings of that dtype, as sums of a model's length make.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
# A gradient that is zero in exact arithmetic is nothing but rounding: its share of all gradients' norm is allowed.
FLOOR = {torch.float64: 1e-15}
DEFAULT_FLOOR = 3e-7
SCALE = 2.0**8  # the loss scale of half precision here: a power of two, which changes no gradient that it does not save


@dataclass(frozen=True)
class Difference:
    """One compared tensor on one rank: `what` is "output", "gradient" or "buffer".

    `error` is the norm-wise relative error, ‖mine - plain‖ / ‖plain‖ (inf for another type or shape, or a tensor that is
    missing), `allowed` the largest that is taken for rounding, `exact` whether all bits are equal.
    """

    what: str
    name: str
    rank: int
    error: float
    allowed: float
    exact: bool

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed


@dataclass(frozen=True)
class Verification:
    """What `verify` found. `ok`: everything within tolerance; `exact`: everything bit for bit equal."""

    world: int
    plan: Plan
    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        return all(d.ok for d in self.differences)

    @property
    def exact(self) -> bool:
        return all(d.exact for d in self.differences)

    def worst(self, count: int = 5) -> list[Difference]:
        """Those that differ most, first."""
        return sorted(self.differences, key=lambda d: (d.ok, -d.error))[:count]

    def __str__(self) -> str:
        bad = sum(not d.ok for d in self.differences)
        head = f"verify: {len(self.differences)} tensors on {self.world} virtual ranks, zero {self.plan.zero}, backend {self.plan.backend}: "
        if self.exact:
            return head + "all bit for bit equal to the plain model"
        lines = [head + (f"{bad} differ too much" if bad else "all within tolerance")]
        lines += [
            f"  {'ok ' if d.ok else 'BAD'} {d.what} {d.name} (rank {d.rank}): relative error {d.error:.3g}, allowed {d.allowed:.3g}"
            for d in self.worst()
            if not d.exact
        ]
        return "\n".join(lines)


def verify(
    model: nn.Module,
    plan: Plan | None,
    world: int,
    inputs: Inputs,
    loss_fn: Callable[..., torch.Tensor] | None = None,
) -> Verification:
    """Run the plan's program for `model` on `world` virtual ranks and compare it with the plain model.

    `inputs` is the *global* batch (a tuple of args or a dict of kwargs): tensors whose dimension 0 is the largest there
    is are split on it, all others go whole to every rank. `loss_fn(output)` gives the loss, a scalar, where the model's
    output holds none. The model is not changed, nor is the random state. All ranks' values are held at once. For
    Inductor the program is its graph before it is made kernels, with random numbers drawn as plain PyTorch draws them.

    With mixed precision the plain model is PyTorch's own in that precision (parameters and inputs cast), and tolerances are
    those of the dtype that is computed in.

    Outputs and buffers are compared with those of the plain model on the same rank's part of the batch, gradients with
    the mean over ranks. Differences do not raise: read `.ok`, `.exact`, or print what is returned. Raises
    `SignatureError` if the world does not divide the batch, `ModelError` if there is no loss or the model is compiled,
    `MeshError` if the plan's mesh does not fit the world, and what capture and passes raise (see `zgraph.compile`).
    """
    from zgraph.handle import is_compiled

    plan = plan or Plan()
    if is_compiled(model):
        raise ModelError("verify takes a plain model", why="this one is compiled", hint="build it again")
    sizes = plan.resolve_mesh(world)
    model = copy.deepcopy(model)
    precision = plan.resolved_precision()
    plan = placed(plan, model, sizes, _device(model))
    specs = planned_layout(model, sizes, plan)
    check(model, precision, specs)
    prepare(model, precision, specs)
    plain = _in_precision(model, specs)
    batches = [_part(inputs, r, world) for r in range(world)]
    args, kwargs = split_inputs(batches[0])
    forward = getattr(model.forward, "__func__", None)
    costs = costs_of(plan, _device(model))
    entry = Entry(
        "verify",
        "",
        model,
        forward,
        args,
        kwargs,
        specs,
        sizes,
        plan,
        {},
        costs,
        outside_of(model, specs, plan, sizes, _device(model), costs),
        _device(model),
    )
    state = torch.get_rng_state()
    try:
        runs = [_Rank(model, plain, entry, b, loss_fn) for b in batches]
        with torch_private.eager_random_numbers():
            differences = _compare(entry, specs, sizes, runs, model)
        return Verification(world, plan, tuple(differences))
    finally:
        torch.set_rng_state(state)


def _device(model: nn.Module) -> torch.device:
    return next((t.device for t in [*model.parameters(), *model.buffers()]), torch.device("cpu"))


def _part(inputs: Inputs, rank: int, world: int) -> Inputs:
    sizes = {leaf.shape[0] for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.dim()}
    batch = max(sizes, default=0)

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != batch:
            return leaf
        if batch % world:
            raise SignatureError(
                f"a batch of {batch} can't be split over {world} ranks",
                hint="give a batch that the world divides",
            )
        # (memory of its own: of two slices of one batch some libraries' products differ in the last bit, by their alignment)
        return leaf.chunk(world)[rank].clone()

    return pytree.tree_map(cut, inputs)  # type: ignore[no-any-return]


class _Rank:
    """The plain model on one rank's batch: its outputs, gradients and updated buffers, and what the program needs."""

    def __init__(
        self,
        model: nn.Module,
        reference: nn.Module,
        entry: Entry,
        inputs: Inputs,
        loss_fn: Callable[..., torch.Tensor] | None,
    ) -> None:
        args, kwargs = split_inputs(inputs)
        plain = copy.deepcopy(reference)
        self.flat = entry.trace.flat.flatten(model, args, kwargs)
        self.flat = tuple(
            v.detach().clone().requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v for v in self.flat
        )
        self.random = torch.get_rng_state()
        precision = entry.plan.resolved_precision()
        if precision.cast_inputs and (low := precision.dtype("compute")) is not None:
            args, kwargs = pytree.tree_map(
                lambda x: x.to(low) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, (args, kwargs)
            )
        out = precision.dtype("output")
        values: list[Any] = []

        def capture(*flat: Any) -> Sequence[Any]:
            with torch.no_grad():
                made = [_cast(v, out) for v in entry.trace.flat.graph_module(*flat)]
            # Each output is a leaf, so that a tangent is the loss's derivative by this output and no other.
            values.extend(
                v.detach().requires_grad_() if i in entry.trace.differentiable else v for i, v in enumerate(made)
            )
            return values

        # The plain model itself decides the numbers; dynamo's flat graph on the same state tells its outputs apart.
        torch.set_rng_state(self.random)
        output = pytree.tree_map(lambda v: _cast(v, out), plain(*args, **kwargs))
        self.grads: dict[str, torch.Tensor | None] = {}
        self.tangents: dict[int, torch.Tensor] = {}
        twin = copy.deepcopy(reference)
        torch.set_rng_state(self.random)
        flat_output = entry.trace.flat.bind(capture)(twin, *args, **kwargs)
        self.outputs = values
        self.plain_leaves = _tensors(output)
        self.flat_leaves = _tensors(flat_output)
        if entry.trace.differentiable:
            loss = loss_fn(output) if loss_fn else find_loss(output)
            flat_loss = loss_fn(flat_output) if loss_fn else find_loss(flat_output)
            if loss is None or flat_loss is None:
                raise ModelError("the model's output holds no loss", hint="give verify a loss_fn")
            loss.backward()
            wanted = sorted(entry.trace.differentiable)
            found = torch.autograd.grad(flat_loss, [values[i] for i in wanted], allow_unused=True)
            self.tangents = {i: g for i, g in zip(wanted, found, strict=True) if g is not None}
            self.grads = {n: p.grad for n, p in plain.named_parameters()}
        self.buffers = dict(plain.named_buffers())


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    floats = dtype is not None and isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if floats else value


def _in_precision(model: nn.Module, specs: dict[str, ParamSpec]) -> nn.Module:
    """A copy whose parameters have the dtypes that are computed in; `model`'s own become those that ranks hold."""
    plain = copy.deepcopy(model)
    for (name, param), own in zip(plain.named_parameters(), model.parameters(), strict=True):
        own.data = own.data.to(specs[name].dtype)
        param.data = own.data.to(specs[name].compute_dtype)
    return plain


def _tensors(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def _compare(
    entry: Entry, specs: dict[str, ParamSpec], sizes: dict[str, int], runs: list[_Rank], model: nn.Module
) -> list[Difference]:
    step = entry.program(frozenset(runs[0].tangents))
    parts = step.parts()
    params = {n: p.detach() for n, p in model.named_parameters()}
    found: list[Difference] = []

    def given(rank: int, program: Program, extra: dict[tuple[Any, str], Any]) -> list[Any]:
        return [_input(p, rank, runs[rank], specs, sizes, params, extra) for p in program.inputs]

    states = [r.random.clone() for r in runs]
    extras: list[dict[tuple[Any, str], Any]] = [{} for _ in runs]
    for part in parts.ahead:
        for extra, values in zip(
            extras, run_virtual(part, [given(r, part, {}) for r in range(len(runs))]), strict=True
        ):
            extra.update({(InputRole.FLYING, p.name): v for p, v in zip(part.outputs, values, strict=True)})
    results = run_virtual(parts.forward, [given(r, parts.forward, extras[r]) for r in range(len(runs))], states)
    for rank, (run, values) in enumerate(zip(runs, results, strict=True)):
        for port, value in zip(parts.forward.outputs, values, strict=True):
            if port.role is OutputRole.SAVED:
                extras[rank][InputRole.SAVED, port.name] = value
            elif port.role is OutputRole.KEPT:
                extras[rank][InputRole.KEPT, port.name] = value
            elif port.role is OutputRole.OUTPUT and port.index is not None:
                found.append(
                    _difference(
                        "output",
                        _output_name(run, port.index),
                        rank,
                        value,
                        _plain_output(run, port.index),
                        0.0,
                        entry.plan.resolved_precision().dtype("compute"),
                    )
                )
            elif port.role is OutputRole.MUTATION and port.of is InputRole.BUFFER:
                found.append(_difference("buffer", port.name, rank, value, run.buffers[port.name], 0.0))
    if parts.backward is None:
        return found
    tangents = {(InputRole.TANGENT, f"output_{i}") for i in runs[0].tangents}
    for rank, run in enumerate(runs):
        extras[rank].update({key: run.tangents[int(key[1].removeprefix("output_"))].contiguous() for key in tangents})
    results = run_virtual(parts.backward, [given(r, parts.backward, extras[r]) for r in range(len(runs))], states)
    means = {n: _mean([r.grads[n] for r in runs], sizes, specs[n]) for n in params}
    norm = float(torch.stack([g.double().norm() for g in means.values() if g is not None] or [torch.zeros(())]).norm())
    reached = {p.name for p in parts.backward.outputs if p.of is InputRole.PARAMETER}
    for name, mean in means.items():
        if (mean is not None) != (name in reached):
            found.append(
                Difference(
                    "gradient",
                    f"{name} ({'missing' if mean is not None else 'should not be there'})",
                    0,
                    float("inf"),
                    0.0,
                    False,
                )
            )
    for rank, values in enumerate(results):
        for port, value in zip(parts.backward.outputs, values, strict=True):
            mean = means.get(port.name) if port.of is InputRole.PARAMETER else None
            if mean is not None:
                found.append(
                    _difference(
                        "gradient",
                        port.name,
                        rank,
                        value,
                        _shard(mean, specs[port.name], rank, sizes),
                        norm,
                        specs[port.name].compute_dtype,
                    )
                )
    return found


def _plain_output(run: _Rank, index: int) -> torch.Tensor:
    """The plain model's own output where its structure can be flattened, else the flat graph's."""
    value = run.outputs[index]
    for mine, plain in zip(run.flat_leaves, run.plain_leaves, strict=False):
        if mine is value:
            return plain
    return value  # type: ignore[no-any-return]


def _output_name(run: _Rank, index: int) -> str:
    at = next((i for i, leaf in enumerate(run.flat_leaves) if leaf is run.outputs[index]), None)
    return f"output {index}" if at is None else f"leaf {at}"


def _input(
    port: Port,
    rank: int,
    run: _Rank,
    specs: dict[str, ParamSpec],
    sizes: dict[str, int],
    params: dict[str, torch.Tensor],
    extra: dict[tuple[Any, str], Any],
) -> Any:
    if port.role is InputRole.PARAMETER:
        return _shard(params[port.name], specs[port.name], rank, sizes)
    if (port.role, port.name) in extra:
        return extra[port.role, port.name]
    if port.role is InputRole.SCALE:
        return torch.tensor(SCALE)
    assert port.index is not None
    value = run.flat[port.index]
    return value.detach() if isinstance(value, torch.Tensor) else value


def _shard(whole: torch.Tensor, spec: ParamSpec, rank: int, sizes: dict[str, int]) -> torch.Tensor:
    """A virtual rank's padded shard of a whole parameter or gradient."""
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


def _mean(grads: list[torch.Tensor | None], sizes: dict[str, int], spec: ParamSpec) -> torch.Tensor | None:
    """The mean over ranks, in rank order, first within each `dp` group as the program does it."""
    if any(g is None for g in grads):
        return None
    values = [g.to(spec.reduce_dtype) for g in grads if g is not None]
    for dim in ("dp", "replicate"):
        if sizes.get(dim, 1) == 1:
            continue
        groups = [values[i : i + sizes[dim]] for i in range(0, len(values), sizes[dim])]
        values = []
        for group in groups:
            total = group[0].clone()
            for g in group[1:]:
                total += g
            values.append(total / len(group))
    return values[0].to(spec.grad_dtype)


def _difference(
    what: str, name: str, rank: int, mine: Any, plain: Any, all_norm: float, computed: torch.dtype | None = None
) -> Difference:
    """`computed`: what it was computed in, where that is coarser than what it is kept in."""
    if (
        not isinstance(mine, torch.Tensor)
        or not isinstance(plain, torch.Tensor)
        or mine.shape != plain.shape
        or mine.dtype != plain.dtype
    ):
        return Difference(what, f"{name} (another type)", rank, float("inf"), 0.0, False)
    mine, plain = mine.detach(), plain.detach()
    exact = torch.equal(mine, plain)
    if exact or not (mine.dtype.is_floating_point or mine.dtype.is_complex):
        return Difference(what, name, rank, 0.0 if exact else float("inf"), 0.0, exact)
    a, b = mine.double(), plain.double()
    finite = torch.isfinite(b)
    if not torch.equal(torch.nan_to_num(a[~finite]), torch.nan_to_num(b[~finite])):
        return Difference(what, name, rank, float("inf"), 0.0, False)
    norm = float(b[finite].norm())
    dtype = computed or mine.dtype
    floor = FLOOR.get(dtype, DEFAULT_FLOOR * TOLERANCE.get(dtype, 1e-5) / TOLERANCE[torch.float32])
    tolerance = TOLERANCE.get(dtype, 1e-5) + floor * all_norm / max(norm, 1e-300)
    return Difference(what, name, rank, float((a - b)[finite].norm()) / max(norm, 1e-300), tolerance, False)
