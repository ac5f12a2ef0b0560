"""The update program: everything between reduced gradients and new weights, as one graph over all parameters.

    gradients -> scale -> norm (all_reduce) -> clip -> rule of each parameter -> skip if not finite -> new weights, states
                                                                             -> moving average

In a pipeline each rank updates the parameters of its own stages, by a program of its own. The norm, and whether the
step is skipped, are reduced over the mesh dimension "pp" as well; and gradients of a parameter that several stages
hold are summed over these stages before anything else. Programs of different stages share these collectives alone, in
this order: the sums by their parameters' names, the norm, the skip.

Where gradients are not reduced, ranks share something else in signs (`zgraph.update.compressed_means`): before the
rules, in place of gradients, or after them, where each rank's own updates end in a synchronization. So do those of
groups of ranks (`zgraph.update.local_steps`), whose means the pass `share_rounds` sends together.

Rules are plain functions (see `zgraph.update.rule_interface`), traced once for each kind of parameter and put in once
for each parameter. Arithmetic on single numbers (step sizes, bias corrections) is shared by all parameters and done in
float64. Programs are pure here: new values are outputs, which the pass `write_in_place` turns into writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from zgraph.plan.local_steps import LocalSteps
from zgraph.plan.loss_scaling import LossScale
from zgraph.plan.optimizers import UpdateKind
from zgraph.program import collectives
from zgraph.program.node import tensor
from zgraph.program.program import DATA_DIMS, STAGE_DIM, InputRole, OutputRole, ParamSpec, Port, Program
from zgraph.update import scaler
from zgraph.update.assembler import Assembler, all_reduce
from zgraph.update.compressed_means import CompressedMeans
from zgraph.update.optimizer_rules import RULES, rule_of
from zgraph.update.parameter_groups import Member
from zgraph.update.rule_interface import Part, Rule, State, Synchronization, Unreduced, Unsharded
from zgraph.update.skip_nonfinite import found_nonfinite

MASTER = "master"
EMA = "ema"
DATA_DIM, GROUP_DIM = DATA_DIMS  # what is shared in signs is averaged over the first, a round's steps over the second
AHEAD = "ahead"  # the newest value of a parameter whose updates run late: the model gets it one step later
DERIVED = (MASTER, EMA, AHEAD)  # states that can be initialized from the weight
NONFINITE = "nonfinite"  # the number of steps that were not finite, except for overflows that a loss scale causes


@dataclass(frozen=True)
class UpdateOptions:
    """What the update program depends on in a plan, besides the optimizer."""

    clip_norm: float | None = None  # `max_norm` of `torch.nn.utils.clip_grad_norm_`, None for no clipping
    norm_type: float = 2.0  # its `norm_type`
    clip_value: float | None = None  # that of `torch.nn.utils.clip_grad_value_`, None for no clipping
    factor: bool = False  # gradients are multiplied by an input of the program first
    ema: float | None = None  # the share of the old moving average, None for no average
    loss_scale: LossScale | None = None  # given where an overflow skips the update
    finite_norm: bool = False  # skip the update where the norm is not finite
    nonfinite: bool = False  # skip it where a gradient or the loss (an input) is not finite, and count such steps
    state_dtype: torch.dtype = torch.float32  # of states with the parameter's shape
    # the group of ranks ("pp[0,3]") that sums a parameter's gradients, for those that several stages hold
    tied: Mapping[str, str] = field(default_factory=dict)
    uncounted: frozenset[str] = frozenset()  # parameters of these that another stage counts in the norm
    # tiers of offloaded states, by parameter; those of other parameters are on the device
    homes: Mapping[str, str] = field(default_factory=dict)
    delayed: bool = False  # offloaded updates run late, on a copy of the parameter in the same tier
    kind: UpdateKind = UpdateKind.GRADIENTS  # what ranks share
    local_steps: LocalSteps | None = None  # given where groups of ranks train by themselves between rounds

    def late(self) -> frozenset[str]:
        """Return the parameters whose updates run late."""
        return frozenset(self.homes) if self.delayed else frozenset()


def states_of(member: Member, spec: ParamSpec, options: UpdateOptions) -> dict[str, State]:
    """Return the states of one parameter on this rank, padding rows included, the fp32 master weight first."""
    by_name: dict[str, State] = {}
    wide = _wide(spec)
    if spec.dtype in (torch.float16, torch.bfloat16):
        by_name[MASTER] = State(spec.shard_shape)
    rule = rule_of(member.record, options.local_steps)
    for name, state in rule.states(member.record, spec.shard_shape, wide, spec.whole_shape).items():
        low = state.dtype is torch.float32 and len(state.shape) == len(spec.shape)
        low = low and not (state.of_rows or state.weight)
        by_name[name] = replace(state, dtype=options.state_dtype) if low else state
    if options.ema is not None:
        by_name[EMA] = State(spec.shard_shape, wide)
    if member.name in options.late():
        by_name[AHEAD] = State(spec.shard_shape, spec.dtype)
    return by_name


def _wide(spec: ParamSpec) -> torch.dtype:
    """Return the dtype that a parameter is updated in."""
    return torch.float64 if spec.dtype is torch.float64 else torch.float32


def state_bytes_of(member: Member, spec: ParamSpec, options: UpdateOptions) -> int:
    """Return the bytes of one parameter's states on this rank."""
    return sum(math.prod(s.shape) * s.dtype.itemsize for s in states_of(member, spec, options).values())


def build_update(
    members: Sequence[Member],
    specs: dict[str, ParamSpec],
    mesh: dict[str, int],
    device: torch.device,
    options: UpdateOptions,
    decompositions: dict[Any, Any],
    name: str = "update",
) -> Program:
    """Return the program that updates `members`, in their order. `mesh` has "pp" where there are other stages.

    Inputs, by role: PARAMETER (except for late ones) and GRADIENT of each member (this rank's padded rows), its
    STATEs, the STATEs that count updates ("/step", …), steps that were not finite ("/nonfinite"), and those of the
    loss scale, SCALARS (`scalar_names`), RANK_INDEX. Outputs: MUTATION of the parameters and states, and OUTPUT
    "grad_norm" where gradients are clipped by their norm. Members without a rule (`record` None) only have their
    gradients clipped: MUTATION of GRADIENT. Raises `MeshError` for a `tied` group that the mesh has not.
    """
    return _Builder(specs, mesh, options, Assembler(name, specs, mesh, device, decompositions)).build(members)


def scalar_names(members: Sequence[Member], options: UpdateOptions) -> list[tuple[int, str]]:
    """Return (group, field) of each number in SCALARS.

    (-1, "factor") is the number that gradients are multiplied by, (-1, "loss") this rank's loss, or any number that is
    finite if the loss is.
    """
    wanted: dict[tuple[int, str], None] = {}
    for member in members:
        if member.record is not None:
            wanted.update(dict.fromkeys((member.group, s) for s in RULES[member.record.name].scalars))
    if options.factor:
        wanted[-1, "factor"] = None
    if options.nonfinite:
        wanted[-1, "loss"] = None
    return list(wanted)


class _Sharded:
    """The `Part` of a parameter whose rows are sharded over ranks: collectives, as the tracer records them."""

    def __init__(self, spec: ParamSpec, ranks: int, index: Tensor) -> None:
        self.shape = spec.shape
        self._dim = str(spec.shard_dim)
        self._rows = spec.rows
        self._ranks = ranks
        self._index = index

    def total(self, x: Tensor) -> Tensor:
        return all_reduce(x, "sum", self._dim)

    def whole(self, x: Tensor) -> Tensor:
        gathered: Tensor = collectives.ALL_GATHER(x.contiguous(), self._ranks, self._dim)
        return collectives.WAIT(gathered).narrow(0, 0, self.shape[0])  # type: ignore[no-any-return]

    def own(self, x: Tensor) -> Tensor:
        missing = self._rows * self._ranks - self.shape[0]
        padded = torch.constant_pad_nd(x, [0, 0] * (x.dim() - 1) + [0, missing]) if missing else x
        return padded.reshape(self._ranks, self._rows, *x.shape[1:]).index_select(0, self._index.reshape(1)).squeeze(0)

    def within_rows(self, shape: tuple[int, ...]) -> Tensor | None:
        return None

    def largest_in_rows(self, x: Tensor) -> Tensor:
        return x


class _Divided:
    """The `Part` of a parameter that ranks divide (tensor parallelism); `within` is the `Part` of what each of them
    computes with."""

    def __init__(self, spec: ParamSpec, within: Part, index: Tensor) -> None:
        assert spec.division is not None
        self.shape = spec.whole_shape
        self._division = spec.division
        self._within = within
        self._index = index

    def total(self, x: Tensor) -> Tensor:
        return all_reduce(self._within.total(x), "sum", self._division.mesh_dim)

    def whole(self, x: Tensor) -> Tensor:
        mine, by = self._within.whole(x).contiguous(), self._division
        came: Tensor = collectives.WAIT(collectives.ALL_GATHER(mine, by.ranks, by.mesh_dim))
        parts = came.reshape(by.ranks, *mine.shape)
        return parts.movedim(0, by.dim).reshape(self.shape) if by.dim else came

    def own(self, x: Tensor) -> Tensor:
        by, shape = self._division, x.shape
        opened = x.reshape(*shape[: by.dim], by.ranks, shape[by.dim] // by.ranks, *shape[by.dim + 1 :])
        return self._within.own(opened.index_select(by.dim, self._index.reshape(1)).squeeze(by.dim))

    def within_rows(self, shape: tuple[int, ...]) -> Tensor | None:
        if self._division.dim == 0:
            return None
        at = self._index.new_zeros(())
        for d in range(1, len(shape)):
            here = torch.arange(shape[d], device=self._index.device)
            if d == self._division.dim:
                here = here + self._index * shape[d]
            at = at.unsqueeze(-1) * self.shape[d] + here
        return at.flatten()

    def largest_in_rows(self, x: Tensor) -> Tensor:
        return all_reduce(x, "max", self._division.mesh_dim) if self._division.dim else x


def _parted_over(spec: ParamSpec) -> tuple[str, ...]:
    """Return the mesh dimensions whose ranks hold different parts of a parameter."""
    return (*([spec.division.mesh_dim] if spec.division else []), *([spec.shard_dim] if spec.shard_dim else []))


@dataclass(frozen=True)
class _Inputs:
    """The inputs of an update's program."""

    counts: dict[str, fx.Node]  # updates so far, by their states' names
    scalars: dict[tuple[int, str], fx.Node]  # see `scalar_names`
    scaling: dict[str, fx.Node]  # the states of the loss scale
    nonfinite: fx.Node | None  # steps that were not finite
    indices: dict[str, fx.Node]  # this rank's positions, by mesh dimension
    params: dict[str, fx.Node]  # the parameters, by name; without those updated late
    grads: dict[str, fx.Node]  # the gradients, by the parameter's name
    states: dict[str, dict[str, fx.Node]]  # each parameter's states, by the parameter's name and the state's key


class _Builder:
    """Builds one update program."""

    def __init__(
        self, specs: dict[str, ParamSpec], mesh: dict[str, int], options: UpdateOptions, assembler: Assembler
    ) -> None:
        self.specs = specs
        self.mesh = mesh
        self.staged = mesh.get(STAGE_DIM, 1) > 1
        self.options = options
        self.assembler = assembler

    # -- the whole ----------------------------------------------------------------------------------------------------
    def build(self, members: Sequence[Member]) -> Program:
        updated = [m for m in members if m.record is not None]
        inputs = self._inputs(members, updated)
        results: list[tuple[Port, fx.Node]] = []
        grads = self._tied(inputs.grads)
        # Gradients are scaled for the norm and again for the update: kept between the two, the scaled ones would double their memory.
        counted = {n: g for n, g in grads.items() if n not in self.options.uncounted}
        norm = self._norm(self._scaled(counted, inputs.scalars)) if self.options.clip_norm is not None else None
        clipped = self._clip(self._scaled(grads, inputs.scalars), norm)
        if norm is not None:
            results.append((Port(OutputRole.OUTPUT, "grad_norm"), norm))
        overflow = self._skip(inputs, grads, norm, results)
        self._advance_scale(inputs.scaling, overflow, results)
        steps = self._advance_counts(inputs.counts, overflow, results)
        taken = self._shared(updated, inputs, clipped, overflow, results)
        new = {m.name: self._update(m, inputs, taken[m.name], steps[m.count], overflow) for m in updated}
        self._synchronize(updated, inputs, new, results)
        for member in updated:
            results += self._written(member, inputs, new[member.name])
        for member in members:
            old, clip = inputs.grads[member.name], clipped[member.name]
            if member.record is None and clip is not old:
                if overflow is not None:
                    given = [overflow, old, clip]
                    (clip,) = self.assembler.of(
                        member.name, lambda o, a, b: (torch.where(o, a, b),), given, key=("kept",)
                    )
                if tensor(clip).dtype is not tensor(old).dtype:
                    dtype = tensor(old).dtype
                    (clip,) = self.assembler.of(
                        member.name, lambda g, dtype=dtype: (g.to(dtype),), [clip], key=("low", dtype)
                    )
                results.append((Port(OutputRole.MUTATION, member.name, of=InputRole.GRADIENT), clip))
        return self.assembler.finish(results)

    def _unreduced(self, member: Member) -> Unreduced | None:
        """Return how a parameter is updated by gradients that are not reduced; None where they are."""
        return rule_of(member.record, self.options.local_steps).unreduced.get(self.options.kind)

    def _means(self) -> CompressedMeans:
        return CompressedMeans(self.assembler, self.specs, DATA_DIM, self.mesh.get(DATA_DIM, 1))

    def _shared(
        self,
        updated: Sequence[Member],
        inputs: _Inputs,
        grads: dict[str, fx.Node],
        overflow: fx.Node | None,
        results: list[tuple[Port, fx.Node]],
    ) -> dict[str, fx.Node]:
        """Return what the rules take in place of gradients, by the parameter's name: the ranks' means of what they share
        before the update, or the gradients."""
        own: dict[str, fx.Node] = {}
        for member in updated:
            how = self._unreduced(member)
            if how is not None and how.shared is not None:
                own[member.name] = self._own(member, how.shared, inputs, grads[member.name])
        return {**grads, **self._means().means(own, overflow, results)}

    def _own(self, member: Member, shared: Callable[..., Tensor], inputs: _Inputs, grad: fx.Node) -> fx.Node:
        """Insert what this rank shares of a parameter before the update."""
        record, wide = member.record, _wide(self.specs[member.name])
        states = {k: v for k, v in inputs.states[member.name].items() if k not in DERIVED}
        scalars = {f: inputs.scalars[member.group, f] for f in RULES[record.name].scalars}

        def one(g: Tensor, *rest: Tensor) -> tuple[Tensor]:
            old = {k: v.to(wide) for k, v in zip(states, rest, strict=False)}
            numbers = dict(zip(scalars, rest[len(states) :], strict=True))
            return (shared(record, g.to(wide), old, numbers),)

        key = ("shared", shared, record, tuple(states), wide)
        return self.assembler.of(member.name, one, [grad, *states.values(), *scalars.values()], key=key)[0]

    def _synchronize(
        self,
        updated: Sequence[Member],
        inputs: _Inputs,
        new: dict[str, dict[str, fx.Node]],
        results: list[tuple[Port, fx.Node]],
    ) -> None:
        """Let the ranks' own updates end in a synchronization, where they do: `new` (see `_update`) becomes what all go
        on from. It is never skipped, or ranks would go on apart."""
        moved: dict[str, fx.Node] = {}
        for member in updated:
            how = self._unreduced(member)
            if how is not None and how.synchronization is not None:
                moved[member.name] = self._settled(member, how.synchronization, inputs, new[member.name], None)[""]
        if self.options.kind is UpdateKind.ROUNDS:
            means = {n: self._mean_over_groups(n, x) for n, x in moved.items()}
        else:
            means = self._means().means(moved, None, results)
        for member in updated:
            if member.name in means:
                how = self._unreduced(member)
                assert how is not None and how.synchronization is not None
                mean = means[member.name]
                new[member.name] = self._settled(member, how.synchronization, inputs, new[member.name], mean)

    def _mean_over_groups(self, name: str, moved: fx.Node) -> fx.Node:
        """Insert the mean over groups of ranks of what they have moved of a parameter."""
        if self.mesh.get(GROUP_DIM, 1) == 1:
            return moved
        return self.assembler.of(name, lambda x: (all_reduce(x, "avg", GROUP_DIM),), [moved], key=("mean", GROUP_DIM))[
            0
        ]

    def _settled(
        self,
        member: Member,
        how: Synchronization,
        inputs: _Inputs,
        new: dict[str, fx.Node],
        mean: fx.Node | None,
    ) -> dict[str, fx.Node]:
        """Insert the end of a parameter's synchronization, given the ranks' mean; without it the beginning: what this
        rank shares, under the key of the parameter."""
        record, wide, dtype = member.record, _wide(self.specs[member.name]), self.specs[member.name].dtype
        keys, fields, weight = [k for k in new if k not in ("", *DERIVED)], RULES[record.name].scalars, ""
        if MASTER in new:
            weight = MASTER
        low = [tensor(new[k]).dtype for k in keys]
        scalars = [inputs.scalars[member.group, f] for f in fields]

        def one(*given: Tensor) -> tuple[Tensor, ...]:
            states = {k: v.to(wide) for k, v in zip(keys, given[1:], strict=False)}
            numbers = dict(zip(fields, given[1 + len(keys) :], strict=False))
            if mean is None:
                return (how.moved(record, given[0], states, numbers),)
            param, after = how.settled(record, given[0], given[-1].to(wide), states, numbers)
            new_states = [
                after[k].to(d) if after[k] is not states[k] else v
                for k, d, v in zip(keys, low, given[1:], strict=False)
            ]
            return (param.to(dtype), *new_states, *([param] if weight else []))

        given = [new[weight], *(new[k] for k in keys), *scalars, *([mean] if mean is not None else [])]
        key = ("settled" if mean is not None else "moved", how, record, tuple(keys), weight, wide)
        nodes = self.assembler.of(member.name, one, given, key=key)
        return dict(zip(["", *keys, *([weight] if weight else [])], nodes, strict=False))

    def _inputs(self, members: Sequence[Member], updated: Sequence[Member]) -> _Inputs:
        """Add the program's inputs, in their order."""
        names = scalar_names(members, self.options)
        counts = {
            name: self.assembler.input(Port(InputRole.STATE, name), (), torch.float64)
            for name in dict.fromkeys(m.count for m in updated)
        }
        vector = (
            self.assembler.input(Port(InputRole.SCALARS, "scalars"), (len(names),), torch.float64) if names else None
        )
        scaling = {
            key: self.assembler.input(Port(InputRole.STATE, f"/{key}"), (), first.dtype)
            for key, first in (scaler.initial(self.options.loss_scale) if self.options.loss_scale else {}).items()
        }
        nonfinite = (
            self.assembler.input(Port(InputRole.STATE, f"/{NONFINITE}"), (), torch.int64)
            if self.options.nonfinite
            else None
        )
        dims = sorted({dim for m in updated for dim in _parted_over(self.specs[m.name])})
        indices = {d: self.assembler.input(Port(InputRole.RANK_INDEX, d), (), torch.int64) for d in dims}
        params: dict[str, fx.Node] = {}
        grads: dict[str, fx.Node] = {}
        states: dict[str, dict[str, fx.Node]] = {}
        for member in members:
            spec = self.specs[member.name]
            port = Port(InputRole.PARAMETER, member.name)
            if member.record is not None and member.name not in self.options.late():
                params[member.name] = self.assembler.input(port, spec.shard_shape, spec.dtype, spec, spec.home)
            port = Port(InputRole.GRADIENT, member.name)
            grads[member.name] = self.assembler.input(port, spec.shard_shape, spec.grad_dtype, spec, spec.grad_home)
            states[member.name] = self._states(member, spec) if member.record is not None else {}
        scalars = self._select(names, vector)
        return _Inputs(counts, scalars, scaling, nonfinite, indices, params, grads, states)

    def _states(self, member: Member, spec: ParamSpec) -> dict[str, fx.Node]:
        return {
            key: self.assembler.input(
                Port(InputRole.STATE, f"{member.name}/{key}"),
                s.shape,
                s.dtype,
                spec,
                self.options.homes.get(member.name),
            )
            for key, s in states_of(member, spec, self.options).items()
        }

    def _skip(
        self,
        inputs: _Inputs,
        grads: dict[str, fx.Node],
        norm: fx.Node | None,
        results: list[tuple[Port, fx.Node]],
    ) -> fx.Node | None:
        """Return a 0-dim bool node that says whether the update is skipped, or None where no update ever is."""
        if inputs.nonfinite is not None:
            overflow, lost = found_nonfinite(self.assembler, self.mesh, grads, inputs.scalars[-1, "loss"])
            # (with a loss scale, overflowing gradients are counted by the scale)
            bad = lost if inputs.scaling else overflow
            (after,) = self.assembler.numbers(lambda n, bad: (n + bad,), [inputs.nonfinite, bad])
            results.append((Port(OutputRole.MUTATION, f"/{NONFINITE}", of=InputRole.STATE), after))
            return overflow
        if inputs.scaling:
            (overflow,) = found_nonfinite(self.assembler, self.mesh, grads)
            return overflow
        if norm is not None and self.options.finite_norm:
            (overflow,) = self.assembler.numbers(lambda n: (n.isfinite().logical_not(),), [norm])
            return overflow
        return None

    def _advance_scale(
        self, scaling: dict[str, fx.Node], overflow: fx.Node | None, results: list[tuple[Port, fx.Node]]
    ) -> None:
        """Add the loss scale's states after this step to `results`."""
        loss_scale = self.options.loss_scale
        if overflow is None or loss_scale is None:
            return
        advanced = self.assembler.numbers(
            lambda o, *v: tuple(scaler.advance(loss_scale, dict(zip(scaling, v, strict=True)), o)[k] for k in scaling),
            [overflow, *scaling.values()],
        )
        results += [
            (Port(OutputRole.MUTATION, f"/{key}", of=InputRole.STATE), new)
            for key, new in zip(scaling, advanced, strict=True)
            if new is not scaling[key]
        ]

    def _advance_counts(
        self, counts: dict[str, fx.Node], overflow: fx.Node | None, results: list[tuple[Port, fx.Node]]
    ) -> dict[str, fx.Node]:
        """Return the number of this update, by the name of its count, and add the new counts to `results`.

        A skipped update is not counted.
        """
        steps: dict[str, fx.Node] = {}
        for name, count in counts.items():
            (after,) = self.assembler.numbers(lambda s: (s + 1,), [count], key=("next",))
            steps[name] = after
            if overflow is not None:
                (after,) = self.assembler.numbers(
                    lambda o, old, new: (torch.where(o, old, new),), [overflow, count, after]
                )
            results.append((Port(OutputRole.MUTATION, name, of=InputRole.STATE), after))
        return steps

    def _update(
        self, member: Member, inputs: _Inputs, grad: fx.Node, step: fx.Node, overflow: fx.Node | None
    ) -> dict[str, fx.Node]:
        """Insert the update of one parameter; return its new value (under "") and its new states, by key."""
        assert member.record is not None
        param, states = self._old(member, inputs)
        spec, record = self.specs[member.name], member.record
        rule = rule_of(record, self.options.local_steps)
        if (how := self._unreduced(member)) is not None:
            rule = replace(rule, update=how.update)
        keys = list(states)
        fields = list(rule.scalars)
        index = [inputs.indices[dim] for dim in _parted_over(spec)]
        options, ranks = self.options, self.mesh.get(str(spec.shard_dim), 1)

        def one(*values: Tensor) -> tuple[Tensor, ...]:
            left = list(values)
            old = dict(zip(keys, left[2 : 2 + len(keys)], strict=True))
            rest = left[2 + len(keys) :]
            named = dict(zip(fields, rest[: len(fields)], strict=True))
            count = rest[len(fields)]
            places = rest[len(fields) + 1 : len(fields) + 1 + len(index)]
            part: Part = _Sharded(spec, ranks, places[-1]) if spec.shard_dim else Unsharded(spec.shape)
            part = _Divided(spec, part, places[0]) if spec.division is not None else part
            return _member(
                rule,
                record,
                options,
                left[0],
                left[1],
                old,
                named,
                count,
                part,
                rest[-1] if overflow is not None else None,
            )

        scalars = [inputs.scalars[member.group, f] for f in fields]
        read = [param, grad, *states.values(), *scalars, step, *index]
        if overflow is not None:
            read.append(overflow)
        layout = (spec.shape, spec.whole_shape, spec.shard_shape, spec.dtype, spec.shard_dim, ranks, spec.division)
        around = (tuple(keys), options.ema, overflow is not None)
        key = ("update", rule, record.model_copy(update={"groups": ()}), *around, *layout)
        return dict(zip(["", *keys], self.assembler.of(member.name, one, read, key=key), strict=True))

    def _old(self, member: Member, inputs: _Inputs) -> tuple[fx.Node, dict[str, fx.Node]]:
        """Return a parameter's value before the update, the one that is updated, and its states."""
        states = inputs.states[member.name]
        if member.name in inputs.params:
            return inputs.params[member.name], states
        return states[AHEAD], {k: v for k, v in states.items() if k != AHEAD}

    def _written(self, member: Member, inputs: _Inputs, new: dict[str, fx.Node]) -> list[tuple[Port, fx.Node]]:
        """Return the outputs for a parameter's new value and states (see `_update`): those that have changed."""
        param, states = self._old(member, inputs)
        place = Port(OutputRole.MUTATION, member.name, of=InputRole.PARAMETER)
        if member.name not in inputs.params:
            place = Port(OutputRole.MUTATION, f"{member.name}/{AHEAD}", of=InputRole.STATE)
        places = {"": place, **{k: Port(OutputRole.MUTATION, f"{member.name}/{k}", of=InputRole.STATE) for k in states}}
        old = {"": param, **states}
        return [(places[key], new[key]) for key in places if new[key] is not old[key]]

    def _select(self, names: list[tuple[int, str]], vector: fx.Node | None) -> dict[tuple[int, str], fx.Node]:
        if vector is None:
            return {}
        return {
            n: self.assembler.numbers(lambda v, i=i: (v.select(0, i),), [vector], key=("select", i))[0]
            for i, n in enumerate(names)
        }

    # -- gradients ----------------------------------------------------------------------------------------------------
    def _tied(self, grads: dict[str, fx.Node]) -> dict[str, fx.Node]:
        """Return the gradients, with those of parameters that several stages hold summed over these stages.

        The sums are in the order of the parameters' names, which all stages have.
        """
        tied = self.options.tied
        sums = {n: self.assembler.summed(n, grads[n], tied[n]) for n in sorted(tied.keys() & grads.keys())}
        return {n: sums.get(n, g) for n, g in grads.items()}

    def _scaled(self, grads: dict[str, fx.Node], scalars: dict[tuple[int, str], fx.Node]) -> dict[str, fx.Node]:
        if not self.options.factor:
            return dict(grads)
        return {
            n: self.assembler.of(n, _times, [g, scalars[-1, "factor"]], key=("times",))[0] for n, g in grads.items()
        }

    def _clip(self, grads: dict[str, fx.Node], norm: fx.Node | None) -> dict[str, fx.Node]:
        limit, bound = self.options.clip_norm, self.options.clip_value
        if limit is not None and norm is not None:
            (coefficient,) = self.assembler.numbers(lambda n: (torch.clamp(limit / (n + 1e-6), max=1.0),), [norm])
            grads = {n: self.assembler.of(n, _times, [g, coefficient], key=("times",))[0] for n, g in grads.items()}
        if bound is not None:
            grads = {
                n: self.assembler.of(n, lambda g: (g.clamp(-bound, bound),), [g], key=("clamp", bound))[0]
                for n, g in grads.items()
            }
        return grads

    def _norm(self, grads: dict[str, fx.Node]) -> fx.Node:
        """Return the norm of all gradients together, over all ranks: 0-dim float32 (float64 if all gradients are).

        It is the norm of each gradient's norm, as in torch.nn.utils.get_total_norm: where nothing is sharded, bit for
        bit. Between ranks, powers of norms are added; between stages, which do not know each other's dtypes, in
        float64.
        """
        p = self.options.norm_type
        wide = bool(grads) and all(tensor(g).dtype is torch.float64 for g in grads.values())
        dtype = torch.float64 if wide else torch.float32
        by_dim: dict[tuple[str, ...], list[fx.Node]] = {}
        for name, grad in grads.items():
            (one,) = self.assembler.of(name, lambda g: (_norm_of(g, p, dtype),), [grad], key=("norm", p, dtype))
            by_dim.setdefault(_parted_over(self.specs[name]), []).append(one)
        norms = {
            dim: self.assembler.total(lambda *v: (_norm_of(torch.stack(v), p, dtype),), ones)[0]
            for dim, ones in by_dim.items()
        }
        if list(norms) == [()] and not self.staged:
            return norms[()]
        over = list(norms)

        def combined(x: Tensor, op: str, dims: tuple[str, ...]) -> Tensor:
            for dim in dims:
                x = all_reduce(x, op, dim)
            return x

        def together(*values: Tensor) -> tuple[Tensor]:
            if math.isinf(p):
                # A collective's max of NaN and a number may be the number, so NaN becomes infinity here.
                safe = [torch.where(v.isnan(), math.inf, v) for v in values]
                terms = [combined(v, "max", d) for d, v in zip(over, safe, strict=True)]
                return (self._over_stages(torch.stack(terms or [self._zero()]).max(), "max").to(dtype),)
            terms = [combined(v**p, "sum", d) for d, v in zip(over, values, strict=True)]
            total = self._over_stages(torch.stack(terms or [self._zero()]).sum(), "sum")
            return ((total.sqrt() if p == 2 else total ** (1 / p)).to(dtype),)

        return self.assembler.total(together, list(norms.values()))[0]

    def _over_stages(self, x: Tensor, op: str) -> Tensor:
        return all_reduce(x.to(torch.float64), op, STAGE_DIM) if self.staged else x

    def _zero(self) -> Tensor:
        """Return the norm of a stage that has no gradients."""
        return torch.zeros((), dtype=torch.float32, device=self.assembler.device)


def _times(x: Tensor, number: Tensor) -> tuple[Tensor]:
    """Multiply a gradient by a number, a low one in float32: the product would be rounded otherwise."""
    wide = x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
    return (wide * number.to(wide.dtype),)


def _norm_of(x: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    if not x.numel():
        return x.new_zeros((), dtype=dtype)
    return torch.linalg.vector_norm(x, p, dtype=dtype)


def _member(
    rule: Rule,
    record: Any,
    options: UpdateOptions,
    param: Tensor,
    grad: Tensor,
    states: dict[str, Tensor],
    scalars: dict[str, Tensor],
    step: Tensor,
    part: Any,
    overflow: Tensor | None,
) -> tuple[Tensor, ...]:
    """Compute one parameter's update: its rule, with master weight, moving average and skipping around it."""
    weight = param
    if MASTER in states:  # where it does not round to the parameter, the user has loaded or changed the parameter
        unchanged = states[MASTER].to(param.dtype) == param
        weight = torch.where(unchanged, states[MASTER], param.to(torch.float32))
    own = {k: v for k, v in states.items() if k not in (MASTER, EMA)}
    wide = {k: v.to(torch.float32) if v.dtype in (torch.float16, torch.bfloat16) else v for k, v in own.items()}
    new, changed = rule.update(record, weight, grad.to(weight.dtype), wide, scalars, step, part)
    results = {k: v.to(own[k].dtype) for k, v in changed.items()}
    if MASTER in states:
        results[MASTER] = new
    if EMA in states:
        assert options.ema is not None
        results[EMA] = torch.lerp(states[EMA], new.to(states[EMA].dtype), 1.0 - options.ema)
    out = [new.to(param.dtype), *(results[k] for k in states)]
    if overflow is not None:
        before = [param, *states.values()]
        out = [v if v is old else torch.where(overflow, old, v) for old, v in zip(before, out, strict=True)]
    return tuple(out)
