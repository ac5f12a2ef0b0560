"""Replacing a compiled model's parameters by whole plain weights, for as long as eager code needs them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from zgraph.api.gathered_weights import bytes_of, handle_of, ranks_of, ready
from zgraph.checkpoint.write_pretrained import dtype_of
from zgraph.errors import ModelError, PlanError, refuse_no_bool
from zgraph.parameters.reused_memory import ReusedMemory
from zgraph.parameters.whole_tensors import BUCKET, Wanted, gathered
from zgraph.program.tolerance import same_bits
from zgraph.torch_compat.dtensors import local_of

if TYPE_CHECKING:
    from zgraph.runtime.runtime import Runtime


@contextlib.contextmanager
def full_weights(
    model: nn.Module,
    *,
    ranks: Collection[int] | None = None,
    dtype: str | torch.dtype | None = None,
    max_bytes: int | str | None = None,
    by_block: bool = False,
    write: bool = False,
) -> Iterator[nn.Module]:
    """Gather the model's parameters inside the block: they are whole plain tensors, and calls run the model's own eager code.

    Use it for what is not a training step: an evaluation by other code, a merge of adapters, reading weights. It yields the model. `ranks`: the
    global numbers of the ranks that need whole weights, by default all; on others the model can't be called inside. `dtype`: the dtype of
    floating-point weights ("fp32", "bf16", …, or "compute" for that of programs), by default the stored one. `max_bytes`: raise `ModelError` if
    whole weights take more.

    With `by_block` each block of the model (a member of one of its `nn.ModuleList`s) is gathered when it is called, and freed when it returns:
    only one block is whole at a time, besides the parameters outside of blocks. All ranks must then call the same blocks in the same order,
    and `ranks` is refused.

    If weights were written to inside, the end of the block raises `ModelError` on all ranks, and the shards keep their values; weights that a
    rank stores whole (in one process, all of them) keep what was written, since they are the model's own memory. With `write` each rank copies
    its part of its own whole weights to its shards instead. Gradients are refused. All ranks must enter the block; it may be nested. Inside,
    steps and checkpoints of the model raise `StepError`. Raises `UnsupportedError` for a model in stages.
    """
    handle = handle_of(model)
    refuse_no_bool("zgraph.full_weights(by_block=…)", by_block)
    refuse_no_bool("zgraph.full_weights(write=…)", write)
    if handle.whole is not None:
        yield model
        return
    if handle.deferred is not None and not handle.deferred.staged:  # (nothing is divided before its first call)
        handle.whole = True
        try:
            yield model
        finally:
            handle.whole = None
        return
    runtime = ready(model, "whole weights")
    chosen = ranks_of(runtime, ranks)
    _refuse_together(write and dtype is not None, by_block and chosen is not None)
    runtime.everyone.vote("whole weights", f"{chosen} {dtype} {max_bytes} {by_block} {write}")
    here = chosen is None or dist.get_rank() in chosen
    places = _Places(runtime, dtype, chosen, write=write)
    blocks = _blocks(model) if by_block else []
    if max_bytes is not None:
        places.refuse_above(bytes_of(max_bytes), blocks)
    within = {name for block in blocks for name in places.names(block)}
    with contextlib.ExitStack() as stack:
        for block in blocks:
            stack.enter_context(_when_called(block, places))
        stack.callback(places.end)
        places.put([n for n in runtime.shards.params() if n not in within])
        handle.whole = here
        try:
            yield model
        finally:
            handle.whole = None
        places.take_back()
        places.settle()


def _refuse_together(written_as_another: bool, blocks_of_some: bool) -> None:
    """Raise `PlanError` for arguments of `full_weights` that don't go together."""
    if written_as_another:
        raise PlanError(
            "full_weights takes a dtype only without write=True", hint="leave dtype out: weights are written as held"
        )
    if blocks_of_some:
        raise PlanError(
            "full_weights takes either ranks or by_block=True",
            why="blocks are gathered by all ranks when they are called, and ranks without whole weights call nothing",
            hint="leave ranks out; or by_block",
        )


@contextlib.contextmanager
def whole_parameters(model: nn.Module, params: Collection[Any], *, write: bool = False) -> Iterator[None]:
    """Gather some of a compiled model's parameters inside the block, and refuse steps, as `full_weights` does.

    `params` that are not the model's are ignored. All ranks must enter it.
    """
    handle = handle_of(model)
    if handle.whole is not None or (handle.deferred is not None and not handle.deferred.staged):
        yield  # (they are whole already)
        return
    runtime = ready(model, "whole adapters")
    wanted = {id(p) for p in params}
    names = [n for n, p in runtime.shards.params().items() if id(p) in wanted]
    runtime.everyone.vote("whole parameters", f"{names} {write}")
    places = _Places(runtime, None, None, write=write)
    with contextlib.ExitStack() as stack:
        stack.callback(places.end)
        places.put(names)
        handle.whole = False
        try:
            yield
        finally:
            handle.whole = None
        places.take_back()
        places.settle()


def keep_whole(model: nn.Module) -> None:
    """Replace a compiled model's parameters by whole plain tensors for good. All ranks must call it."""
    runtime = ready(model, "whole weights")
    runtime.everyone.vote("whole weights", "for good")
    places = _Places(runtime, None, None, write=True)
    places.put(list(runtime.shards.params()))


class _Places:
    """The places of a model's parameters in its modules, in which whole tensors replace them for a while."""

    def __init__(
        self, runtime: Runtime, dtype: str | torch.dtype | None, ranks: Collection[int] | None, *, write: bool
    ) -> None:
        self.runtime = runtime
        self.ranks, self.write = ranks, write
        self._given = dtype if dtype == "compute" else dtype_of(dtype)
        self._params = dict(runtime.shards.params())
        self._names = {id(p): n for n, p in self._params.items()}
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = {n: [] for n in self._params}
        for module in runtime.module.modules():
            for key, param in module._parameters.items():
                if param is not None:
                    self._places[self._names[id(param)]].append((module._parameters, key))
        self._held: dict[str, tuple[nn.Parameter, int]] = {}
        self._wrong: list[tuple[str, str]] = []  # (parameter, what was done to it)
        self._memory = ReusedMemory(runtime.device, self.least(), runtime.resting)  # (blocks take it one after another)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a parameter's whole tensor."""
        param_dtype = self._params[name].dtype
        if self._given is None or not param_dtype.is_floating_point:
            return param_dtype
        return self._given if isinstance(self._given, torch.dtype) else self.runtime.shards.specs[name].compute_dtype

    def names(self, block: nn.Module) -> list[str]:
        """Return the names of a submodule's parameters that are not whole now."""
        return list(dict.fromkeys(self._names[id(p)] for p in block.parameters() if id(p) in self._names))

    def _sizes(self) -> dict[str, int]:
        return {n: p.numel() * self.dtype(n).itemsize for n, p in self._params.items()}

    def least(self) -> int:
        """Return the bytes of whole weights if only one block is whole at a time."""
        sizes = self._sizes()
        of_block = [sum(sizes[n] for n in self.names(block)) for block in _blocks(self.runtime.module)]
        return sum(sizes.values()) - sum(of_block) + max(of_block, default=0)

    def refuse_above(self, limit: int, blocks: list[nn.Module]) -> None:
        """Raise `ModelError` if whole weights take more bytes than `limit`."""
        whole, least = sum(self._sizes().values()), self.least()
        takes = least if blocks else whole
        if takes > limit:
            less = f"; or by_block=True, which takes {_mib(least)}" if not blocks and least < whole else ""
            raise ModelError(
                f"whole weights take {_mib(takes)}, and max_bytes is {_mib(limit)}",
                where="full_weights",
                hint="a larger max_bytes, or a narrower dtype" + less,
            )

    def put(self, names: Collection[str]) -> None:
        """Gather these parameters and put the whole tensors in their places. All ranks must call it."""
        wanted = [Wanted(self._params[n], self.dtype(n)) for n in names]
        wholes = gathered(wanted, self.runtime.device, BUCKET, self._memory, self.ranks)
        for name, whole in zip(names, wholes, strict=True):
            if whole is not None:
                param = self._params[name]
                fresh = nn.Parameter(whole, requires_grad=param.requires_grad)
                for table, key in self._places[name]:
                    table[key] = fresh
                self._held[name] = fresh, fresh._version

    def take_back(self, names: Collection[str] | None = None) -> None:
        """Put parameters back in their places; with `write`, copy what was written to their whole tensors."""
        for name in list(self._held) if names is None else [n for n in names if n in self._held]:
            fresh, version = self._held[name]
            mine = self.runtime.shards.own_part(name, fresh.detach())
            own = local_of(self._params[name]).detach()
            changed = fresh._version != version or not same_bits(mine, own.to(mine.device, mine.dtype))
            if any(table.get(key) is not fresh for table, key in self._places[name]):
                self._wrong.append((name, "replaced"))
            elif fresh.grad is not None:
                self._wrong.append((name, "given a gradient"))
            elif changed and not self.write:
                self._wrong.append((name, "written to"))
            elif changed:
                own.copy_(mine)
        self.restore(names)

    def settle(self) -> None:
        """Raise `ModelError` on every rank if on any a whole tensor was replaced, got a gradient, or was written to
        without `write`."""
        worst = self.runtime.everyone.most("what was done to whole weights", len(self._wrong))
        if worst or self.write:
            self.runtime.weights_changed(list(self._params))  # (all of them, so that all ranks do the same)
        if worst:
            name, done = self._wrong[0] if self._wrong else ("a weight", "changed on another rank")
            raise ModelError(
                f"{name} was {done} inside full_weights",
                why="what a rank holds a part of is as it was, what it holds whole as it was written",
                hint="a backward belongs outside, and torch.no_grad() around calls inside"
                if done == "given a gradient"
                else "write to weights in place, in full_weights(model, write=True)",
            )

    def restore(self, names: Collection[str] | None = None) -> None:
        """Put parameters back in their places, without looking at their whole tensors."""
        for name in list(self._held) if names is None else [n for n in names if n in self._held]:
            fresh, _ = self._held.pop(name)
            if fresh.requires_grad:
                fresh.register_hook(functools.partial(_refuse_late, name))
            for table, key in self._places[name]:
                table[key] = self._params[name]

    def end(self) -> None:
        """Put what is left back in its place, and let the memory of whole tensors rest."""
        self.restore()
        self._memory.rest()


def _refuse_late(name: str, gradient: torch.Tensor) -> None:
    raise ModelError(
        f"a backward after full_weights reaches the whole tensor that {name} was inside",
        why="the model's own weights would get no gradient",
        hint="compute the loss outside, by the compiled model or of weight.full_tensor(); torch.no_grad() around calls inside",
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the members of a model's outermost module lists that share no parameter with anything else."""
    members: list[nn.Module] = []
    inner: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and id(module) not in inner:
            members += [member for member in module if not isinstance(member, nn.ModuleList | nn.ModuleDict)]
            inner.update(id(m) for member in module for m in member.modules())
    uses: dict[int, int] = {}
    for module in model.modules():
        for param in module._parameters.values():
            uses[id(param)] = uses.get(id(param), 0) + 1
    return [block for block in dict.fromkeys(members) if all(uses[id(p)] == 1 for p in block.parameters())]


@contextlib.contextmanager
def _when_called(block: nn.Module, places: _Places) -> Iterator[None]:
    """Gather a block's weights while it runs."""
    own = places.names(block)
    handles = [
        block.register_forward_pre_hook(lambda *_: places.put(own), prepend=True),
        block.register_forward_hook(lambda *_: places.take_back(own), always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def generate_of(model: nn.Module) -> Callable[..., Any] | None:
    """Return a replacement for the `generate` of a model of transformers or PEFT; None for any other model.

    It runs eager code with whole weights: compiled programs would need one for each number of tokens, and communicate
    for each token. With `synced_gpus=True`, with which transformers keeps all ranks running until the last one is done,
    blocks are gathered one at a time.
    """
    libraries = ("transformers.", "peft.")
    own = getattr(type(model), "generate", None)
    if own is None or not any(c.__module__.startswith(libraries) for c in type(model).__mro__):
        return None

    @functools.wraps(own)
    def generate(*args: Any, **kwargs: Any) -> Any:
        with full_weights(model, dtype="compute", by_block=bool(kwargs.get("synced_gpus"))):
            return own(model, *args, **kwargs)

    return generate
