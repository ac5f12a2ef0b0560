"""Shards: the parameters of a compiled module, each a part of the user's own.

A sharded parameter is a plain `DTensor` under its own name, `Shard(0)` as torch cuts (uneven sizes included). Its local
tensor is a view of a buffer padded to the rows that every rank has, so programs are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from zgraph.capture.former_storages import former_storages
from zgraph.errors import ModelError, UnsupportedError
from zgraph.offload.host_gradients import Away, storage_of
from zgraph.parameters.layout import row_by_row
from zgraph.parameters.optimizer_steps import count_steps_on, steps_on, watch_optimizers
from zgraph.parameters.replaced_parameters import replaced
from zgraph.parameters.tensor_bits import differ, words_of
from zgraph.program.program import DATA_DIMS, ParamSpec
from zgraph.torch_compat import dtensors
from zgraph.torch_compat.dtensors import local_of
from zgraph.torch_compat.methods_of_shards import replace_methods
from zgraph.torch_compat.modules import Registered, registered
from zgraph.torch_compat.operators_of_shards import treat_operators
from zgraph.torch_compat.tensor_hooks import has_hooks
from zgraph.torch_compat.treatments_of_shards import treatments

if TYPE_CHECKING:
    from zgraph.offload.run_transfers import Tier


@dataclass
class Sums:
    """Gradients, and what a backward adds to them, all with one operator."""

    to: list[torch.Tensor] = field(default_factory=list)  # gradients that are added to
    added: list[torch.Tensor] = field(default_factory=list)  # what is added to each

    def add(self) -> None:
        if self.to:
            with torch.no_grad():
                torch._foreach_add_(self.to, self.added)


@dataclass
class Shards:
    """The parameters of one compiled module."""

    module: nn.Module  # the user's module
    specs: dict[str, ParamSpec]  # each parameter's layout, by name
    mesh: DeviceMesh | None  # None in one process without a process group; parameters are plain tensors then
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)  # each sharded parameter's padded buffer
    # tensors of a model from the meta device that it could not initialise: to be loaded before the first run
    pending: set[str] = field(default_factory=set)
    home: Tier | None = None  # the tier of parameters whose layout has one
    elsewhere: frozenset[str] = frozenset()  # parameters of other stages, on the meta device
    # the module's parameters, as they were last looked up
    _params: dict[str, nn.Parameter] = field(default_factory=dict)
    # of each DTensor among them: its shard, and the storage of its outside (see `_refuse_assigned`)
    _outsides: dict[str, tuple[torch.Tensor, torch.UntypedStorage]] = field(default_factory=dict)
    _updates: dict[str, int] = field(default_factory=dict)  # how often programs have written each parameter
    _tier_addresses: dict[str, int] = field(
        default_factory=dict
    )  # addresses of whole parameters that are stored in `home`
    _places: dict[str, int] = field(default_factory=dict)  # this rank's position, by mesh dimension
    averaged: tuple[str, ...] = DATA_DIMS  # the mesh dimensions over which gradients are averaged
    # DTensor layouts of gradients, by (name, dtype, whether it is partial)
    _layouts: dict[tuple[str, torch.dtype, bool], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mesh is not None:
            watch_optimizers(self)
            treat_operators(self, self.mesh, treatments())
            replace_methods(self)

    def params(self) -> dict[str, nn.Parameter]:
        """Return the module's parameters by name, as they were last looked up."""
        return self._params

    def refresh(self) -> Registered:
        """Look up the module's parameters again (`load_state_dict(assign=True)` may have replaced them), and return
        what the module has registered. Raises `ModelError` if their names or forms differ from those that programs were
        compiled for.
        """
        now_registered = self.look_up()
        if self._params.keys() != self.specs.keys():
            gone, new = (
                sorted(self.specs.keys() - self._params.keys()),
                sorted(self._params.keys() - self.specs.keys()),
            )
            raise ModelError(
                "the model's parameters are no longer those that were compiled",
                why="; ".join(
                    f"{what}: {', '.join(names[:5])}" for what, names in (("gone", gone), ("new", new)) if names
                ),
                hint="change the model first, then compile it",
            )
        self._refuse_assigned()
        changed = [(n, *forms) for n, p in self._params.items() if (forms := self._other_form(self.specs[n], p))]
        if changed:
            name, now, then = changed[0]
            others = f", and {len(changed) - 1} others" if len(changed) > 1 else ""
            raise ModelError(
                f"the parameter {name} is {now} now, and was {then} when the model was compiled{others}",
                hint="change the model first, then compile it; load_state_dict without assign=True casts to what the model has",
            )
        return now_registered

    def _refuse_assigned(self) -> None:
        """Raise `ModelError` for a divided parameter whose `.data` was assigned: torch changes the DTensor's outside then, and not the
        shard that programs read. (Each DTensor has a storage of its own, without memory, which an assignment replaces.)"""
        if self.mesh is None:
            return
        for name, param in self._params.items():
            if not isinstance(param, DTensor):
                continue
            shard, storage, known = param._local_tensor, param.untyped_storage(), self._outsides.get(name)
            if known is None or known[0] is not shard:  # (module.to() gives a parameter another shard and outside)
                self._outsides[name] = shard, storage
            elif known[1]._cdata != storage._cdata:
                raise ModelError(
                    f"{name}.data was assigned, which does not change a divided weight",
                    why="the weight is a DTensor, and its shard stays as it was",
                    hint="under torch.no_grad(): weight.copy_(value), or weight.mul_(0.9).add_(other, alpha=0.1)",
                )

    def look_up(self) -> Registered:
        """Look up the module's parameters, and return what the module has registered."""
        now_registered = registered(self.module)
        self._params = now_registered.parameters
        if self.mesh is not None:
            for param in self._params.values():
                count_steps_on(param)
        return now_registered

    def _other_form(self, spec: ParamSpec, param: nn.Parameter) -> tuple[str, str] | None:
        """Return (what a parameter is, what its layout says) if its dtype, shape, device or strides differ from its
        layout; else None.
        """
        if param.dtype is not spec.dtype:
            return str(param.dtype).removeprefix("torch."), str(spec.dtype).removeprefix("torch.")
        if param.shape != spec.whole_shape:
            return f"of shape {list(param.shape)}", str(list(spec.whole_shape))
        if self.mesh is not None and not isinstance(param, DTensor) and spec.name not in self.elsewhere:
            return "a whole tensor", "this rank's part of a DTensor"
        mine = local_of(param)
        if mine.is_meta and spec.home is None and spec.name not in self.elsewhere | self.pending:
            return "on the meta device", "on a real one"
        # (a plain tensor belongs to another stage)
        stride = spec.shard_stride if isinstance(param, DTensor) else spec.whole_stride
        now = mine.stride()
        if (
            now != stride
            and spec.home is None
            and any(a != b for a, b, n in zip(now, stride, mine.shape, strict=True) if n > 1)
        ):
            return f"of strides {list(now)}", str(list(stride))
        return None

    def local(self, name: str) -> torch.Tensor:
        """Return what a program takes for a parameter: its padded shard, or the whole if it is not sharded."""
        mine = self._local_rows(name)
        padded = self.buffers.get(name)
        if padded is None or mine.numel() == padded.numel():
            return mine
        # (the user has replaced it by a tensor without padding)
        if mine.numel() and mine.data_ptr() != padded.data_ptr():
            padded[: mine.shape[0]].copy_(mine)
        return padded

    def _local_rows(self, name: str) -> torch.Tensor:
        """Return this rank's rows of a parameter, without padding; a write to them writes to the parameter."""
        param = self._params[name]
        return local_of(param).detach()

    def version(self, name: str) -> tuple[int, ...]:
        """Return a version that changes whenever the parameter's value may have: by an in-place operator, an optimizer,
        or a program.

        (An operator on a DTensor counts on the DTensor, not inside; a foreach operator on DTensors counts nowhere, so
        optimizers' steps are counted here.)
        """
        param = self._params[name]
        mine = local_of(param)
        return (
            mine.data_ptr(),
            mine._version,
            param._version,
            steps_on(param),
            self._updates.get(name, 0),
        )

    def count_update(self, names: Sequence[str]) -> None:
        """Count a program's write to these parameters, which torch does not count."""
        for name in names:
            self._updates[name] = self._updates.get(name, 0) + 1

    def average_over(self, dims: tuple[str, ...]) -> None:
        """Let gradients that are not reduced yet be averaged over these mesh dimensions."""
        self.averaged = dims
        self._layouts.clear()

    def keep_wide_gradients(self) -> None:
        """Let `.grad` have the dtype that programs return, if autograd would round it to a parameter's narrower one."""
        for name, param in self._params.items():
            wide = self.specs[name].grad_dtype
            if wide is not param.dtype:
                grad, param.grad = param.grad, None  # torch takes another dtype only if there is no gradient
                param.grad_dtype = wide
                param.grad = grad.to(wide) if grad is not None else None

    def local_gradient(self, name: str, home: str | None = None) -> torch.Tensor:
        """Return what an update program takes for a parameter's gradient: its local tensor in the layout of
        `local(name)`, on the host if the program fetches it from a `home`.
        """
        grad = self._params[name].grad
        assert grad is not None
        spec = self.specs[name]
        mine = storage_of(local_of(grad))
        param = self.buffers.get(name, self._params[name])
        device = param.device if home is None else torch.device("cpu")
        same = mine.shape == param.shape and mine.stride() == param.stride() and mine.device == device
        if same and mine.dtype is spec.grad_dtype:
            return mine
        like = self.local(name)
        padded = torch.zeros_like(like, dtype=spec.grad_dtype, device=device)
        padded[: mine.shape[0]].copy_(mine) if spec.shard_dim is not None else padded.copy_(mine)
        return padded

    def write_gradient(self, name: str, value: torch.Tensor) -> None:
        """Write to `.grad` what a program wrote into `value`, which `local_gradient` may have made as a copy."""
        grad = self._params[name].grad
        assert grad is not None
        mine = storage_of(local_of(grad))
        if mine.data_ptr() != value.data_ptr():
            mine.copy_(value[: mine.shape[0]] if self.specs[name].shard_dim is not None else value)

    def differences(self, whole: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return for each of these whole parameters a 0-dim bool: whether this rank's rows differ in any bit from its
        current shard.
        """
        flags = (
            differ(mine, self._local_rows(n).to(mine.dtype))
            for n, v in whole.items()
            if (mine := self.mine_of(n, v)).numel()
        )
        return list(flags)

    def mine_of(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a whole parameter (of its part along a divided dimension)."""
        spec = self.specs[name]
        if spec.shard_dim is None:
            return whole
        first = spec.rows * self.index(spec)
        return whole[first : first + self.rows(spec)]

    def own_part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole parameter of the user's model, in the shape of its local tensor."""
        return self.mine_of(name, self._divided(self.specs[name], whole) if self.mesh is not None else whole)

    def equals(self, name: str, words: torch.Tensor, dtype: torch.dtype) -> bool:
        """Return whether this rank's rows, cast to this dtype, have these bits (see `words_of`)."""
        mine = local_of(self._params[name])
        if mine.dtype is not dtype:
            mine = mine.to(dtype)
        return torch.equal(words, words_of(mine))

    def placements(self, spec: ParamSpec) -> list[Placement]:
        names = self.mesh.mesh_dim_names if self.mesh is not None else ()
        return [_placement(spec, dim) for dim in names or ()]

    def rows(self, spec: ParamSpec) -> int:
        """Return the number of rows of this rank's shard, without padding."""
        return max(0, min(spec.rows, spec.shape[0] - spec.rows * self.index(spec)))

    def index(self, spec: ParamSpec) -> int:
        assert self.mesh is not None and spec.shard_dim is not None
        if spec.shard_dim not in self._places:
            self._places[spec.shard_dim] = int(self.mesh.get_local_rank(spec.shard_dim))
        return self._places[spec.shard_dim]

    def accumulate(self, name: str, value: torch.Tensor, sums: Sums, *, partial: bool) -> torch.Tensor | None:
        """Set or add to a parameter's `.grad` in place of autograd, which would run some DTensor operators for each,
        and return None. The first gradient becomes `.grad`; later ones are put into `sums`, to be added. Return the
        gradient, for autograd to add, if the parameter has hooks, or its `.grad` has another dtype, layout or
        placement.
        """
        param = self._params[name]
        there = param.grad
        if self.mesh is None or has_hooks(param):
            return self.gradient(name, value, partial=partial)
        if there is None:
            given, spec = self.gradient(name, value, partial=partial), self.specs[name]
            mine, like = local_of(given), spec.whole_stride if partial else local_of(param).stride()
            if type(mine) is not torch.Tensor or mine.dtype is not param.dtype or mine.stride() != like:
                return given
            param.grad = given
            return None
        layout = self._layouts.get((name, value.dtype, partial))
        if type(there) is DTensor and not there.requires_grad and (there._spec is layout or there._spec == layout):
            grad, mine = there._local_tensor, self._without_padding(name, value, partial=partial)
            if type(grad) is torch.Tensor and grad.shape == mine.shape and grad.device == mine.device:
                sums.to.append(grad)
                sums.added.append(mine)
                return None
        return self.gradient(name, value, partial=partial)

    def _without_padding(self, name: str, value: torch.Tensor, *, partial: bool) -> torch.Tensor:
        spec = self.specs[name]
        if self.mesh is None or spec.shard_dim is None or partial:
            return value
        rows = self.rows(spec)
        return value if rows == value.shape[0] else value[:rows]

    def gradient(self, name: str, value: torch.Tensor, *, partial: bool = False) -> torch.Tensor:
        """Return a program's gradient in the form of its parameter: on its device, without padding, as a DTensor. With
        `partial` it is whole on each rank, and not reduced yet.
        """
        spec = self.specs[name]
        value = self._without_padding(name, value, partial=partial)
        device = local_of(self._params[name]).device
        if value.device != device:
            value = Away(value, device)
        if self.mesh is None:
            return value
        key = (name, value.dtype, partial)
        if key not in self._layouts:
            where = self.placements(spec)
            if partial:
                names = self.mesh.mesh_dim_names or ()
                where = [Partial("avg") if d in self.averaged else p for d, p in zip(names, where, strict=True)]
            self._layouts[key] = dtensors.layout(self.mesh, where, spec.whole_shape, spec.whole_stride, value.dtype)
        return dtensors.dtensor(value, self._layouts[key])

    def shown(self, name: str, value: torch.Tensor, *, of_rows: bool = False) -> torch.Tensor:
        """Return what a program keeps for a parameter in the form of the parameter: with its rows, as a DTensor cut
        like it. If its other dimensions differ from the parameter's, it is contiguous; if it is `of_rows`, it is the
        same on the ranks that divide the parameter's other dimensions.

        A `value` without such rows is shown as it is.
        """
        spec = self.specs[name]
        if self.mesh is None or value.shape == spec.shard_shape:
            return value if self.mesh is None else self.gradient(name, value)
        if not value.dim() or value.shape[:1] != spec.shard_shape[:1]:
            return value
        by, shape, where = spec.division, [spec.whole_shape[0], *value.shape[1:]], self.placements(spec)
        if by is not None and by.dim > 0:
            at = (self.mesh.mesh_dim_names or ()).index(by.mesh_dim)
            where[at] = Replicate() if of_rows else Shard(1)
            shape[1] *= 1 if of_rows else by.ranks
        mine = value[: self.rows(spec)] if spec.shard_dim is not None else value
        whole = torch.Size(shape)
        return DTensor.from_local(mine, self.mesh, where, run_check=False, shape=whole, stride=row_by_row(whole))

    def install(self, name: str, whole: torch.Tensor) -> nn.Parameter:
        """Cut this rank's part out of a whole parameter, and put it in the module under every name of the parameter."""
        spec = self.specs[name]
        old = self._params[name]
        memory = former_storages(self.module)
        memory.note(name, old)
        whole = whole.to(spec.dtype)
        if self.mesh is None:
            part = (
                whole.as_strided(spec.shape, spec.stride)
                if whole.stride() == spec.stride
                else _restrided(whole, spec.stride)
            )
            fresh = nn.Parameter(part, spec.requires_grad) if old.is_meta else _refill(old, part)
        else:
            fresh = self._part_of(name, whole)
        if fresh is not old:
            replaced(
                old,
                fresh,
                "the model's weights were divided" if self.mesh is not None else "the model got its weights",
                f"it holds {name!r} as it was; the model has "
                + ("a part of it now" if self.mesh is not None else "another now, that is not on the meta device"),
            )
            for table, key in owners(self.module, old):
                table[key] = fresh
            self._params[name] = fresh
        self._move_to_tier(name)
        memory.forget_if_there(name, fresh)
        return fresh

    def _part_of(self, name: str, whole: torch.Tensor) -> nn.Parameter:
        """Return this rank's part of a whole parameter, as a parameter."""
        spec = self.specs[name]
        part = self._divided(spec, whole.detach())
        local = _restrided(part.clone(), spec.stride) if spec.shard_dim is None else self._cut_rows(name, part)
        with torch.no_grad():
            sharded = DTensor.from_local(
                local,
                self.mesh,
                self.placements(spec),
                run_check=False,
                shape=torch.Size(spec.whole_shape),
                stride=spec.whole_stride,
            )
        return nn.Parameter(sharded, requires_grad=spec.requires_grad)

    def drop_to_meta(self, name: str) -> None:
        """Put a parameter that another rank stores on the meta device here, under every name that it had."""
        old, spec = self._params[name], self.specs[name]
        former_storages(self.module).note(name, old)
        placeholder = torch.empty_strided(spec.whole_shape, spec.whole_stride, dtype=spec.dtype, device="meta")
        fresh = nn.Parameter(placeholder, requires_grad=old.requires_grad)
        replaced(old, fresh, "the model was cut into stages", f"it holds {name!r} as it was; another rank has it now")
        for table, key in owners(self.module, old):
            table[key] = fresh
        self._params[name] = fresh

    def adopt(self, twin: nn.Module) -> Shards:
        """Return the shards of a deep copy of the module: the same layouts, with padded buffers of their own."""
        if former_storages(self.module).is_read:
            raise UnsupportedError(
                "a model that reads a parameter through another tensor in its memory can't be copied",
                why="the copy's tensor would not lie in the memory of the copy's parameter",
                hint="read the parameter itself in forward",
            )
        other = Shards(twin, dict(self.specs), self.mesh, {}, set(self.pending), self.home, self.elsewhere)
        other.refresh()
        for name, param in other.params().items():
            if isinstance(param, DTensor) and name in self.buffers:
                buffer = self.buffers[name]
                padded = self._copy_in_tier(self.specs[name], buffer)
                padded = buffer.clone() if padded is buffer else padded
                rows = param._local_tensor.shape[0]
                padded[:rows].copy_(param._local_tensor)
                param._local_tensor = padded[:rows]
                other.buffers[name] = padded
        other.fetch()
        return other

    def fetch(self) -> None:
        """Move whole parameters that the user has replaced (`load_state_dict(assign=True)`, `p.data = …`) to their
        tier.
        """
        if self.home is not None:
            for name in self._params:
                self._move_to_tier(name)

    def _move_to_tier(self, name: str) -> None:
        spec, param = self.specs[name], self._params[name]
        if spec.home is None or name in self.buffers or param.is_meta:
            return
        mine = self._local_rows(name)
        if self._tier_addresses.get(name) == mine.data_ptr():
            return
        away = self._copy_in_tier(spec, mine)
        if isinstance(param, DTensor):
            param._local_tensor = away
        else:
            param.data = away
        self._tier_addresses[name] = away.data_ptr()

    def _divided(self, spec: ParamSpec, whole: torch.Tensor) -> torch.Tensor:
        """Return the part of a whole parameter that this rank computes with under tensor parallelism."""
        if spec.division is None:
            return whole
        assert self.mesh is not None
        return spec.division.part(whole, self.mesh.get_local_rank(spec.division.mesh_dim))

    def _cut_rows(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        spec = self.specs[name]
        rows, first = self.rows(spec), spec.rows * self.index(spec)
        order = [0, *sorted(range(1, len(spec.shape)), key=lambda d: (-spec.stride[d], d))]
        shape = [spec.shard_shape[d] for d in order]
        padded = self._zeros_in_tier(spec, shape, whole).permute([order.index(d) for d in range(len(order))])
        padded[:rows].copy_(whole[first : first + rows])
        self.buffers[name] = padded
        return padded[:rows]

    def _zeros_in_tier(self, spec: ParamSpec, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Return contiguous zeros in a parameter's tier, or on the device of `like`."""
        if spec.home is None or self.home is None:
            return like.new_zeros(tuple(shape))
        return self.home.tensor(shape, row_by_row(shape), like.dtype).zero_()

    def _copy_in_tier(self, spec: ParamSpec, whole: torch.Tensor) -> torch.Tensor:
        """Return a copy of a whole parameter in its tier; itself if it has none."""
        if spec.home is None or self.home is None:
            return whole
        return self.home.tensor(whole.shape, whole.stride(), whole.dtype).copy_(whole)


def _placement(spec: ParamSpec, dim: str) -> Placement:
    if dim == spec.shard_dim:
        return Shard(0)
    if spec.division is not None and dim == spec.division.mesh_dim:
        return Shard(spec.division.dim)
    return Replicate()


def _restrided(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    if tensor.stride() == stride:
        return tensor
    fresh = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return fresh.copy_(tensor)


def _refill(param: nn.Parameter, part: torch.Tensor) -> nn.Parameter:
    """Set a parameter's values, with their dtype and strides, and keep the object that optimizers hold."""
    if part.data_ptr() == param.data_ptr() and (part.stride(), part.dtype) == (param.stride(), param.dtype):
        return param
    grad, param.grad = param.grad, None
    param.data = part
    param.grad = _restrided(grad.to(part.dtype), part.stride()) if grad is not None else None
    return param


def owners(module: nn.Module, param: torch.Tensor) -> list[tuple[dict[str, Any], str]]:
    """Return every (table, key) in the module that holds this parameter."""
    return [
        (child._parameters, key)
        for child in module.modules()
        for key, owned in child._parameters.items()
        if owned is param
    ]
