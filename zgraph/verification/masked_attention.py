"""The plain model with a plan's sparsity of attention: whole attention, with a mask of what the layouts leave out.

It is what `zgraph.verify` compares sparse attention with. Calls of torch's attention, and softmaxes of as many keys as queries (attention that
is written out), get the mask: those of a module's own code by the module whose method makes them, those of a captured graph by its records.
Dropout of weights draws a seed, and drops what the operator drops by it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from zgraph.names import around
from zgraph.plan.attention import Dense, Sparsity, pattern_of
from zgraph.program import attention_dropout
from zgraph.program.node import module_of
from zgraph.program.sparse_attention import block_rows, shown_by

_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_DROPOUT = torch.nn.functional.dropout
_SOFTMAX = (torch.nn.functional.softmax, torch.softmax, torch.Tensor.softmax)


@functools.lru_cache(maxsize=16)
def layout_mask(sparsity: Sparsity, heads: int, length: int) -> torch.Tensor:
    """Return what a sparsity shows, element by element: [heads or 1, length, length], booleans."""
    if sparsity.of_positions:
        places = torch.arange(length)
        return shown_by(sparsity, torch.arange(heads if sparsity.heads_differ else 1), places, places)
    rows, side = block_rows(sparsity.model_dump_json(), heads, length), sparsity.block
    blocks = torch.zeros((len(rows), -(-length // side), -(-length // side)), dtype=torch.bool)
    for head, of_head in enumerate(rows):
        for at, row in enumerate(of_head):
            blocks[head, at, list(row)] = True
    return blocks.repeat_interleave(side, 1).repeat_interleave(side, 2)[:, :length, :length]


def masked(
    sparsity: Sparsity, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Return torch's attention with the mask of a sparsity besides its own.

    Attention with keys of another length is left as it is: compiling refuses it.
    """
    if query.shape[-2] != key.shape[-2]:
        with torch._C.DisableTorchFunction():
            return _ATTENTION(query, key, value, *args, **kwargs)
    names = ("attn_mask", "dropout_p", "is_causal")
    options = dict(zip(names, args, strict=False)) | kwargs
    length = query.shape[-2]
    shown = layout_mask(sparsity, query.shape[-3], length)
    if options.pop("is_causal", False):
        shown = shown & torch.ones(length, length, dtype=torch.bool).tril()
    given = options.pop("attn_mask", None)
    if given is not None:
        hidden = torch.zeros(shown.shape, dtype=query.dtype).masked_fill(~shown, -torch.inf)
        shown = given & shown if given.dtype is torch.bool else given + hidden
    rate = options.pop("dropout_p", 0.0)
    with torch._C.DisableTorchFunction():
        if rate:
            return _attention_with_dropout(query, key, value, shown, rate, options.get("scale"))
        return _ATTENTION(query, key, value, attn_mask=shown, **options)


def _attention_with_dropout(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, rate: float, scale: float | None
) -> torch.Tensor:
    group = query.shape[-3] // key.shape[-3]
    keys, values = (x.repeat_interleave(group, -3) for x in (key, value))
    scores = query @ keys.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return dropped(weights, rate) @ values


def dropped(weights: torch.Tensor, rate: float) -> torch.Tensor:
    """Return weights, [rows, heads, queries, keys] or [rows, queries, keys], with the dropout of sparse attention, for a seed that is drawn."""
    with torch._C.DisableTorchFunction():
        seed = int(torch.randint(*attention_dropout.SEEDS, (1,), device=weights.device))
        heads = weights.shape[1] if weights.dim() == 4 else 1
        places = [torch.arange(n) for n in (len(weights), heads, *weights.shape[-2:])]
        left = attention_dropout.left(seed, rate, places).view(weights.shape).to(weights)
        return weights * left * attention_dropout.factor(rate)


def _rate_of(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> float:
    """Return the rate of a call of dropout; 0 for one that drops nothing."""
    return p if training else 0.0


def masked_softmax(
    sparsity: Sparsity, function: Callable[..., Any], scores: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Return a softmax whose scores, [rows, heads, length, length] or [rows, length, length], are hidden where a sparsity leaves them out,
    and whose rows without keys are 0; any other softmax as it is."""
    dim = args[0] if args else kwargs.get("dim")
    with torch._C.DisableTorchFunction():
        if dim not in (-1, scores.dim() - 1) or scores.dim() not in (3, 4) or scores.shape[-1] != scores.shape[-2]:
            return function(scores, *args, **kwargs)  # type: ignore[no-any-return]
        heads = scores.shape[1] if scores.dim() == 4 else 1
        hidden = (scores == -torch.inf) | ~layout_mask(sparsity, heads, scores.shape[-1])
        empty = hidden.all(-1, keepdim=True)
        shown = scores.masked_fill(hidden & ~empty, -torch.inf).masked_fill(empty, 0.0)
        weights: torch.Tensor = function(shown, *args, **kwargs)
        return weights.masked_fill(empty, 0.0)


class MaskedAttention(TorchFunctionMode):
    """Gives the attention of a plain model the masks of a plan's layouts, while the mode is on."""

    def __init__(self, model: nn.Module, attention: Mapping[str, Sparsity]) -> None:
        super().__init__()
        self.attention = attention
        # The shape of the last softmax that got a mask: a dropout of this shape is of its weights.
        self.softmax: torch.Size | None = None
        self.paths: dict[int, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self.paths.setdefault(id(module), []).append(name)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.backward:  # (a checkpointed region runs once more in it)
            with self:
                return _backward(*args, **kwargs)
        if func is _ATTENTION or func is _DROPOUT or func in _SOFTMAX:
            return self._run(self._sparsity(), func, *args, **kwargs)
        return func(*args, **kwargs)

    def _run(self, sparsity: Sparsity | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run attention, a softmax or dropout in a module with this sparsity."""
        if sparsity is None:
            return function(*args, **kwargs)
        if function is not _DROPOUT:
            result = _masked_call(sparsity, function, *args, **kwargs)
            square = result.dim() > 2 and result.shape[-1] == result.shape[-2]
            self.softmax = result.shape if function is not _ATTENTION and square else None
            return result
        weights, rate = args[0] if args else kwargs["input"], _rate_of(*args, **kwargs)
        if not rate or weights.shape != self.softmax:
            return function(*args, **kwargs)
        self.softmax = None
        return dropped(weights, rate)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one in place of torch's function: inside of another one (multi_head_attention_forward) no mode is on."""
        return self._run(self._sparsity(), function, *args, **kwargs)

    def _sparsity(self) -> Sparsity | None:
        """Return the sparsity for the module whose code makes the call."""
        frame = sys._getframe(2)
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in self.paths:
                return _of(around(tuple(self.paths[id(owner)])), self.attention)
            frame = frame.f_back  # type: ignore[assignment]
        return None


def _masked_call(sparsity: Sparsity, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if function is _ATTENTION:
        return masked(sparsity, *args, **kwargs)
    return masked_softmax(sparsity, function, *args, **kwargs)


def _backward(tensor: torch.Tensor, gradient: Any = None, *args: Any, **kwargs: Any) -> None:
    """Run `Tensor.backward` in the modes that are on."""
    torch.autograd.backward(tensor, gradient, *args[:2], **kwargs)


def _of(paths: list[str], attention: Mapping[str, Sparsity]) -> Sparsity | None:
    pattern = pattern_of(attention, paths)
    return None if pattern is None or isinstance(attention[pattern], Dense) else attention[pattern]


@contextlib.contextmanager
def masks_of(model: nn.Module, attention: Mapping[str, Sparsity]) -> Iterator[None]:
    """Give a plain model's attention the masks of a plan's layouts inside of the context."""
    if not attention:
        yield
        return
    mode = MaskedAttention(model, attention)
    functional = torch.nn.functional
    softmax = functional.softmax
    functional.scaled_dot_product_attention = functools.partial(mode.call, _ATTENTION)
    functional.softmax = functools.partial(mode.call, softmax)
    functional.dropout = functools.partial(mode.call, _DROPOUT)
    try:
        with mode:
            yield
    finally:
        functional.scaled_dot_product_attention, functional.softmax, functional.dropout = _ATTENTION, softmax, _DROPOUT


class _Masked(nn.Module):
    """Attention, or a softmax, with the mask of a sparsity, as a module that a graph can call."""

    def __init__(self, sparsity: Sparsity, function: Callable[..., Any]) -> None:
        super().__init__()
        self.sparsity, self.function = sparsity, function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _masked_call(self.sparsity, self.function, *args, **kwargs)


class _Dropped(nn.Module):
    """Dropout of attention's weights as a module that a graph can call."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        weights, rate = args[0] if args else kwargs["input"], _rate_of(*args, **kwargs)
        return dropped(weights, rate) if rate else weights


_CASTS = ("to", "type", "type_as", "float", "half", "bfloat16")


def _drops_weights(part: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a node is dropout of weights whose softmax got a mask."""
    source = node.all_input_nodes[0] if node.target is _DROPOUT else None
    while source is not None and source.op == "call_method" and source.target in _CASTS:
        source = source.all_input_nodes[0]
    if source is None or source.op != "call_module":
        return False
    called = part.get_submodule(str(source.target))
    return isinstance(called, _Masked) and called.function is not _ATTENTION


def with_masks(
    graph_module: fx.GraphModule, aliases: Mapping[str, tuple[str, ...]], attention: Mapping[str, Sparsity]
) -> fx.GraphModule:
    """Return a captured graph of torch functions with the masks of a plan's layouts; the graph itself without `attention`."""
    if not attention:
        return graph_module
    graph_module = copy.deepcopy(graph_module)
    for part in [m for m in graph_module.modules() if isinstance(m, fx.GraphModule)]:
        for node in part.graph.nodes:
            function = torch.Tensor.softmax if (node.op, node.target) == ("call_method", "softmax") else node.target
            if _drops_weights(part, node):
                part.add_submodule(f"dropped_{node.name}", _Dropped())
                node.op, node.target = "call_module", f"dropped_{node.name}"
                continue
            if function is not _ATTENTION and function not in _SOFTMAX:
                continue
            path = module_of(node.meta)
            sparsity = _of(around(aliases.get(path, (path,))), attention)
            if sparsity is not None:
                name = f"masked_{node.name}"
                part.add_submodule(name, _Masked(sparsity, function))
                node.op, node.target = "call_module", name
        part.recompile()
    return graph_module
