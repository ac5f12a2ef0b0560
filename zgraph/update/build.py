"""The update program: everything between reduced gradients and new weights, as one graph over all parameters.

    gradients -> scale -> norm (all_reduce) -> clip -> rule of each parameter -> skip on overflow -> new weights, states
                                                                             -> moving average

Rules are plain functions (see `zgraph.update.rule`), traced once for each kind of parameter and put in once for each
parameter. Arithmetic on single numbers (step sizes, bias corrections) is shared by all parameters and done in float64.
Programs are pure here: new values are outputs, which the pass `write_in_place` makes writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from zgraph.loss_scaling import LossScale
from zgraph.program import collectives, torch_private
from zgraph.program.node import NodeInfo, Phase, Role, info, set_info, tensor
from zgraph.program.program import DATA_DIMS, InputRole, Level, OutputRole, ParamSpec, Port, Program
from zgraph.update import scaler
from zgraph.update.groups import Member
from zgraph.update.rule import Rule, State, Unsharded
from zgraph.update.rules import RULES

MASTER = "master"
EMA = "ema"
STEP = "/step"


@dataclass(frozen=True)
class UpdateOptions:
    """What of a plan the update program depends on, besides the optimizer.

    `clip_norm` and `norm_type` are those of `torch.nn.utils.clip_grad_norm_`, `clip_value` that of
    `clip_grad_value_`; None: not done. `factor`: gradients are multiplied by an input of the program first. `ema` is
    the share of the old average, None for no average. `loss_scale` is given where an overflow skips the update.
    """

    clip_norm: float | None = None
    norm_type: float = 2.0
    clip_value: float | None = None
    factor: bool = False
    ema: float | None = None
    loss_scale: LossScale | None = None
    state_dtype: torch.dtype = torch.float32


def states_of(member: Member, spec: ParamSpec, options: UpdateOptions) -> dict[str, State]:
    """What is kept for one parameter on this rank, padding rows included, the fp32 master weight first."""
    held: dict[str, State] = {}
    if spec.dtype in (torch.float16, torch.bfloat16):
        held[MASTER] = State(spec.shard_shape)
    rule = RULES[member.record.name]
    for name, state in rule.states(member.record, spec.shard_shape, torch.float32).items():
        low = state.dtype is torch.float32 and len(state.shape) == len(spec.shape)
        held[name] = State(state.shape, options.state_dtype, state.fill) if low else state
    if options.ema is not None:
        held[EMA] = State(spec.shard_shape)
    return held


def build_update(
    members: Sequence[Member],
    specs: dict[str, ParamSpec],
    mesh: dict[str, int],
    device: torch.device,
    options: UpdateOptions,
    decompositions: dict[Any, Any],
    name: str = "update",
) -> Program:
    """The program that updates `members`, in their order.

    Inputs, by role: PARAMETER and GRADIENT of each member (this rank's padded rows), its STATEs, the STATE "/step" and
    those of the loss scale, SCALARS (`scalar_names`), INDEX. Outputs: MUTATION of the parameters and states, and
    OUTPUT "grad_norm" where gradients are clipped by their norm. Members without a rule (`record` None) only have their
    gradients clipped: MUTATION of GRADIENT.
    """
    return _Builder(specs, mesh, device, options, decompositions, name).build(members)


def scalar_names(members: Sequence[Member], options: UpdateOptions) -> list[tuple[int, str]]:
    """(group, field) of each number in SCALARS; (-1, "factor") is what gradients are multiplied by."""
    found: dict[tuple[int, str], None] = {}
    for member in members:
        if member.record is not None:
            found.update(dict.fromkeys((member.group, s) for s in RULES[member.record.name].scalars))
    if options.factor:
        found[-1, "factor"] = None
    return list(found)


class _Sharded:
    """The `Part` of a parameter whose rows lie on several ranks: collectives, as the tracer sees them."""

    def __init__(self, spec: ParamSpec, ranks: int, index: Tensor) -> None:
        self.shape = spec.shape
        self._dim = str(spec.shard_dim)
        self._rows = spec.rows
        self._ranks = ranks
        self._index = index

    def total(self, x: Tensor) -> Tensor:
        return _all_reduce(x, "sum", self._dim)

    def whole(self, x: Tensor) -> Tensor:
        gathered: Tensor = collectives.ALL_GATHER(x.contiguous(), self._ranks, self._dim)
        return collectives.WAIT(gathered)[: self.shape[0]]  # type: ignore[no-any-return]

    def own(self, x: Tensor) -> Tensor:
        missing = self._rows * self._ranks - self.shape[0]
        padded = torch.constant_pad_nd(x, [0, 0] * (x.dim() - 1) + [0, missing]) if missing else x
        return padded.reshape(self._ranks, self._rows, *x.shape[1:]).index_select(0, self._index.reshape(1)).squeeze(0)


def _all_reduce(x: Tensor, op: str, dim: str) -> Tensor:
    return collectives.WAIT(collectives.ALL_REDUCE(x, op, dim))  # type: ignore[no-any-return]


@dataclass
class _Builder:
    specs: dict[str, ParamSpec]
    mesh: dict[str, int]
    device: torch.device
    options: UpdateOptions
    decompositions: dict[Any, Any]
    name: str
    program: Program = field(init=False)
    numbers: dict[fx.Node, None] = field(default_factory=dict)
    shared: dict[Any, fx.Node] = field(default_factory=dict)
    templates: dict[Any, fx.GraphModule] = field(default_factory=dict)
    constants: dict[Any, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph = fx.Graph()
        output = graph.output(())
        set_info(output, NodeInfo(Phase.UPDATE))
        self.program = Program(
            name=self.name,
            module=torch_private.lazy_module(torch.nn.Module(), graph),
            inputs=[],
            outputs=[],
            mesh=dict(self.mesh),
            params=dict(self.specs),
            fake_mode=FakeTensorMode(),
            level=Level.DISTRIBUTED,
        )

    # -- the whole ----------------------------------------------------------------------------------------------------
    def build(self, members: Sequence[Member]) -> Program:
        updated = [m for m in members if m.record is not None]
        names = scalar_names(members, self.options)
        step = self._input(Port(InputRole.STATE, STEP), (), torch.float64) if updated else None
        vector = self._input(Port(InputRole.SCALARS, "scalars"), (len(names),), torch.float64) if names else None
        scaling = {
            key: self._input(Port(InputRole.STATE, f"/{key}"), (), first.dtype)
            for key, first in (scaler.initial(self.options.loss_scale) if self.options.loss_scale else {}).items()
        }
        dims = sorted({str(self.specs[m.name].shard_dim) for m in updated if self.specs[m.name].shard_dim})
        indices = {d: self._input(Port(InputRole.INDEX, d), (), torch.int64) for d in dims}
        params: dict[str, fx.Node] = {}
        grads: dict[str, fx.Node] = {}
        states: dict[str, dict[str, fx.Node]] = {}
        for member in members:
            spec = self.specs[member.name]
            port = Port(InputRole.PARAMETER, member.name)
            if member.record is not None:
                params[member.name] = self._input(port, spec.shard_shape, spec.dtype, spec)
            port = Port(InputRole.GRADIENT, member.name)
            grads[member.name] = self._input(port, spec.shard_shape, spec.grad_dtype, spec)
            kept = states_of(member, spec, self.options) if member.record is not None else {}
            states[member.name] = {
                key: self._input(Port(InputRole.STATE, f"{member.name}/{key}"), s.shape, s.dtype, spec)
                for key, s in kept.items()
            }
        self.numbers.update(
            dict.fromkeys([*([step] if step else []), *([vector] if vector else []), *scaling.values()])
        )
        results: list[tuple[Port, fx.Node]] = []
        scalars = self._select(names, vector)
        given = dict(grads)
        if self.options.factor:
            given = {
                n: self._of(n, lambda g, f: (g * f.to(g.dtype),), [g, scalars[-1, "factor"]])[0]
                for n, g in given.items()
            }
        given, norm = self._clip(given)
        if norm is not None:
            results.append((Port(OutputRole.OUTPUT, "grad_norm"), norm))
        overflow = self._overflow(grads) if scaling else None
        if overflow is not None:
            advanced = self._numbers(
                lambda o, *v: tuple(
                    scaler.advance(self.options.loss_scale, dict(zip(scaling, v, strict=True)), o)[k] for k in scaling
                ),  # type: ignore[arg-type]
                [overflow, *scaling.values()],
            )
            results += [
                (Port(OutputRole.MUTATION, f"/{key}", of=InputRole.STATE), new)
                for key, new in zip(scaling, advanced, strict=True)
                if new is not scaling[key]
            ]
        if step is not None:
            (following,) = self._numbers(lambda s: (s + 1,), [step])
            kept_step = following
            if overflow is not None:
                (kept_step,) = self._numbers(
                    lambda o, old, new: (torch.where(o, old, new),), [overflow, step, following]
                )
            results.append((Port(OutputRole.MUTATION, STEP, of=InputRole.STATE), kept_step))
            for member in updated:
                results += self._update(
                    member,
                    params[member.name],
                    given[member.name],
                    states[member.name],
                    scalars,
                    following,
                    indices,
                    overflow,
                )
        for member in members:
            if member.record is None and given[member.name] is not grads[member.name]:
                results.append((Port(OutputRole.MUTATION, member.name, of=InputRole.GRADIENT), given[member.name]))
        self.program.set_outputs(results)
        self._drop_unused()
        self.program.recompile()
        return self.program

    def _update(
        self,
        member: Member,
        param: fx.Node,
        grad: fx.Node,
        states: dict[str, fx.Node],
        scalars: dict[tuple[int, str], fx.Node],
        step: fx.Node,
        indices: dict[str, fx.Node],
        overflow: fx.Node | None,
    ) -> list[tuple[Port, fx.Node]]:
        assert member.record is not None
        spec, record = self.specs[member.name], member.record
        rule = RULES[record.name]
        keys = list(states)
        fields = list(rule.scalars)
        index = [indices[str(spec.shard_dim)]] if spec.shard_dim else []
        options, ranks = self.options, self.mesh.get(str(spec.shard_dim), 1)

        def one(*values: Tensor) -> tuple[Tensor, ...]:
            left = list(values)
            old = dict(zip(keys, left[2 : 2 + len(keys)], strict=True))
            rest = left[2 + len(keys) :]
            named = dict(zip(fields, rest[: len(fields)], strict=True))
            count = rest[len(fields)]
            part = _Sharded(spec, ranks, rest[len(fields) + 1]) if index else Unsharded(spec.shape)
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

        inputs = [param, grad, *states.values(), *(scalars[member.group, f] for f in fields), step, *index]
        if overflow is not None:
            inputs.append(overflow)
        key = (record.model_copy(update={"groups": ()}), spec.shape, spec.shard_shape, spec.dtype, spec.shard_dim)
        new = self._of(member.name, one, inputs, key=key)
        names = [member.name, *(f"{member.name}/{k}" for k in keys)]
        roles = [InputRole.PARAMETER, *(InputRole.STATE for _ in keys)]
        return [
            (Port(OutputRole.MUTATION, n, of=role), value)
            for n, role, value, old in zip(names, roles, new, [param, *states.values()], strict=True)
            if value is not old
        ]

    # -- gradients ----------------------------------------------------------------------------------------------------
    def _clip(self, grads: dict[str, fx.Node]) -> tuple[dict[str, fx.Node], fx.Node | None]:
        norm: fx.Node | None = None
        if self.options.clip_norm is not None:
            limit, p = self.options.clip_norm, self.options.norm_type
            norm = self.norm(grads, p)
            (coefficient,) = self._numbers(lambda n: (torch.clamp(limit / (n + 1e-6), max=1.0),), [norm])
            grads = {n: self._of(n, lambda g, c: (g * c.to(g.dtype),), [g, coefficient])[0] for n, g in grads.items()}
        if self.options.clip_value is not None:
            bound = self.options.clip_value
            grads = {n: self._of(n, lambda g: (g.clamp(-bound, bound),), [g])[0] for n, g in grads.items()}
        return grads, norm

    def norm(self, grads: dict[str, fx.Node], p: float) -> fx.Node:
        """The norm of all gradients together, over all ranks: 0-dim float32."""
        if math.isinf(p):
            return self._over_ranks(
                grads,
                lambda g: g.abs().max().to(torch.float32) if g.numel() else g.new_zeros((), dtype=torch.float32),
                "max",
            )
        power = (lambda g: (g * g).sum()) if p == 2 else (lambda g: g.abs().pow(p).sum())
        total = self._over_ranks(grads, lambda g: power(g.to(torch.float32)), "sum")
        (root,) = self._numbers(lambda t: (t.sqrt() if p == 2 else t.pow(1 / p),), [total])
        return root

    def _overflow(self, grads: dict[str, fx.Node]) -> fx.Node:
        """0-dim bool: is any gradient of any rank infinite or no number?"""
        found = self._over_ranks(grads, lambda g: (~g.isfinite()).any().to(torch.float32), "max")
        (flag,) = self._numbers(lambda t: (t > 0,), [found])
        return flag

    def _over_ranks(self, grads: dict[str, fx.Node], local: Callable[[Tensor], Tensor], op: str) -> fx.Node:
        """One number for all gradients: `local` of each, added or the largest taken over parameters and ranks.

        What every rank has whole counts once.
        """
        by_dim: dict[str | None, list[fx.Node]] = {}
        for name, grad in grads.items():
            by_dim.setdefault(self.specs[name].shard_dim, []).append(
                self._of(name, lambda g: (local(g),), [grad], key=(local.__code__, op))[0]
            )
        totals: list[fx.Node] = []
        for dim, parts in by_dim.items():
            if op == "max":  # a rank that saw an overflow alone must not update alone
                dims = [d for d in DATA_DIMS if self.mesh.get(d, 1) > 1]
            else:
                dims = [dim] if dim is not None else []
            totals.append(
                self._global(
                    lambda *v, dims=dims: (_reduced(torch.stack(v), op, dims),),
                    parts,
                )[0]
            )
        if len(totals) == 1:
            return totals[0]
        return self._numbers(lambda *v: (torch.stack(v).sum() if op == "sum" else torch.stack(v).max(),), totals)[0]

    # -- building -----------------------------------------------------------------------------------------------------
    def _input(self, port: Port, shape: tuple[int, ...], dtype: torch.dtype, spec: ParamSpec | None = None) -> fx.Node:
        with self.program.fake_mode:
            if (spec is not None and tuple(shape) == spec.shard_shape and port.role is not InputRole.STATE) or (
                spec is not None and tuple(shape) == spec.shard_shape
            ):
                fake = torch.empty_strided(shape, _strides(spec), dtype=dtype, device=self.device)
            else:
                fake = torch.empty(shape, dtype=dtype, device=self.device)
        label = "".join(c if c.isalnum() else "_" for c in port.name).strip("_")
        placeholders = self.program.placeholders()
        prefix = {InputRole.GRADIENT: "grad_", InputRole.INDEX: "rank_in_"}.get(port.role, "")  # type: ignore[call-overload]
        record = NodeInfo(Phase.UPDATE, param=spec.name if spec is not None else None, made_by="update")
        if placeholders:
            return self.program.add_input(port, fake, record, name=prefix + label)
        with self.program.graph.inserting_before(self.program.output_node()):
            node = self.program.graph.placeholder(prefix + label)
        set_info(node, record)
        node.meta["val"] = fake
        self.program.inputs.append(port)
        return node

    def _select(self, names: list[tuple[int, str]], vector: fx.Node | None) -> dict[tuple[int, str], fx.Node]:
        if vector is None:
            return {}
        return {n: self._numbers(lambda v, i=i: (v[i],), [vector])[0] for i, n in enumerate(names)}

    def _numbers(self, function: Callable[..., tuple[Tensor, ...]], inputs: list[fx.Node]) -> list[fx.Node]:
        """Arithmetic on single numbers."""
        return self._inline(self._trace(function, inputs), inputs, None)

    def _global(self, function: Callable[..., tuple[Tensor, ...]], inputs: list[fx.Node]) -> list[fx.Node]:
        made = self._inline(self._trace(function, inputs), inputs, None)
        self.numbers.update(dict.fromkeys(made))
        return made

    def _of(
        self, name: str, function: Callable[..., tuple[Tensor, ...]], inputs: list[fx.Node], key: Any = None
    ) -> list[fx.Node]:
        """A function of one parameter's tensors (and of numbers)."""
        if key is None:
            return self._inline(self._trace(function, inputs), inputs, name)
        full = (key, tuple((tensor(n).dtype, tuple(tensor(n).shape), tensor(n).stride()) for n in inputs))
        if full not in self.templates:
            self.templates[full] = self._trace(function, inputs)
        return self._inline(self.templates[full], inputs, name)

    def _trace(self, function: Callable[..., tuple[Tensor, ...]], inputs: list[fx.Node]) -> fx.GraphModule:
        fakes = [tensor(n) for n in inputs]
        return torch_private.trace_function(function, fakes, self.program.fake_mode, self.decompositions)

    def _inline(self, template: fx.GraphModule, inputs: list[fx.Node], param: str | None) -> list[fx.Node]:
        """Put a traced function's nodes at the end of the program; arithmetic on numbers only once."""
        graph = self.program.graph
        memo: dict[fx.Node, fx.Node] = {}
        given = iter(inputs)
        with graph.inserting_before(self.program.output_node()):
            for node in template.graph.nodes:
                if node.op == "placeholder":
                    memo[node] = next(given)
                elif node.op == "output":
                    return [memo[n] for n in node.args[0]]
                else:
                    memo[node] = self._copy(template, node, memo, param)
        raise AssertionError("a traced function has no output")

    def _copy(
        self, template: fx.GraphModule, node: fx.Node, memo: dict[fx.Node, fx.Node], param: str | None
    ) -> fx.Node:
        number = all(memo[a] in self.numbers for a in node.all_input_nodes) and node.op == "call_function"
        key = None
        if number or node.op == "get_attr":
            args: Any = fx.node.map_arg((node.args, node.kwargs), lambda n: memo[n])
            constant = _bytes(getattr(template, str(node.target))) if node.op == "get_attr" else None
            key = repr((node.op, str(node.target) if constant is None else constant, args))
            if key in self.shared:
                return self.shared[key]
        made = self.program.graph.node_copy(node, lambda n: memo[n])
        made.meta = {"val": node.meta.get("val")}
        if node.op == "get_attr":
            held = getattr(template, str(node.target))
            name = f"constant_{len(self.constants)}"
            self.constants[key] = name
            setattr(self.program.module, name, held)
            made.target = name
            if made.meta["val"] is None:
                made.meta["val"] = self.program.fake_mode.from_tensor(held)
        record = NodeInfo(Phase.UPDATE, param=None if key is not None else param, made_by="update")
        if collectives.is_start(made):
            gathers = made.target is collectives.ALL_GATHER
            dim = collectives.group_of(made)
            record = record.but(role=Role.GATHER if gathers else Role.REDUCE, mesh_dim=dim, stream=f"comm:{dim}")
        elif collectives.is_wait(made):
            record = record.but(role=Role.WAIT, mesh_dim=info(made.all_input_nodes[0]).mesh_dim)
        set_info(made, record)
        if key is not None:
            self.shared[key] = made
            self.numbers[made] = None
        return made

    def _drop_unused(self) -> None:
        for node in reversed(self.program.nodes):
            if node.op not in ("placeholder", "output") and not node.users:
                self.program.graph.erase_node(node)
        written = {(port.of, port.name) for port in self.program.outputs}
        for port, node in list(self.program.input_items()):
            if not node.users and (port.role, port.name) not in written:
                self.program.remove_input(node)


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
    """One parameter's update, with what stands around its rule: master weight, average, skipping."""
    weight = states.get(MASTER, param).to(torch.float32) if param.dtype is not torch.float64 else param
    own = {k: v for k, v in states.items() if k not in (MASTER, EMA)}
    wide = {k: v.to(torch.float32) if v.dtype in (torch.float16, torch.bfloat16) else v for k, v in own.items()}
    new, changed = rule.update(record, weight, grad.to(weight.dtype), wide, scalars, step, part)
    results = {k: v.to(own[k].dtype) for k, v in changed.items()}
    if MASTER in states:
        results[MASTER] = new
    if EMA in states:
        assert options.ema is not None
        results[EMA] = torch.lerp(states[EMA], new.to(torch.float32), 1.0 - options.ema)
    out = [new.to(param.dtype), *(results[k] for k in states)]
    if overflow is not None:
        out = [torch.where(overflow, old, value) for old, value in zip([param, *states.values()], out, strict=True)]
    return tuple(out)


def _reduced(x: Tensor, op: str, dims: list[str]) -> Tensor:
    x = x.sum() if op == "sum" else x.max()
    for dim in dims:
        x = _all_reduce(x, op, dim)
    return x


def _strides(spec: ParamSpec) -> tuple[int, ...]:
    """Those of a rank's padded rows."""
    if not spec.shard_dim:
        return spec.stride
    order = [0, *sorted(range(1, len(spec.shape)), key=lambda d: (-spec.stride[d], d))]
    sizes, strides = spec.shard_shape, [1] * len(order)
    for at in range(len(order) - 2, -1, -1):
        strides[order[at]] = strides[order[at + 1]] * sizes[order[at + 1]]
    return tuple(strides)


def _bytes(constant: Tensor) -> tuple[Any, ...]:
    flat = constant.detach().contiguous().view(-1)
    return (constant.dtype, tuple(constant.shape), bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b"")
