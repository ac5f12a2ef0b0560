"""The cases: a model, its inputs, and what is done to its output before the backward, each made anew from a seed."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

# Operators that draw are called as they are: each run here sets the seed itself, and dynamo can't trace who saves and sets it.
common_methods_invocations.wrapper_set_seed = lambda function, *args, **kwargs: function(*args, **kwargs)


@dataclass
class Made:
    """A case that can be run. `finish` is applied to the output: of an eigenvector, say, only the length is defined."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    finish: Callable[[Any], Any] = lambda output: output


@dataclass(frozen=True)
class Case:
    """One sample of one module or operator."""

    database: str  # "module" or "operator"
    name: str
    mode: str  # "train", "eval"; of an operator "inputs" or "buffers": what tensors other than the parameter are
    sample: int
    make: Callable[[], Made]

    @property
    def key(self) -> str:
        return f"{self.database} {self.name} {self.mode} {self.sample}"


class Operator(nn.Module):
    """An operator applied to a parameter, or to several of which it takes a list."""

    def __init__(self, function: Callable[..., Any], given: Any, others: Sequence[Any], *, as_buffers: bool) -> None:
        super().__init__()
        self.function = function
        self.several = not isinstance(given, torch.Tensor)
        trained = [nn.Parameter(x.detach(), x.requires_grad) for x in given] if self.several else [given]
        if self.several:
            self.given = nn.ParameterList(trained)
        else:
            self.given = nn.Parameter(given.detach(), given.requires_grad)
        for i, x in enumerate(others if as_buffers else ()):
            if isinstance(x, torch.Tensor):
                self.register_buffer(f"other{i}", x.detach())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args = tuple(getattr(self, f"other{i}", x) for i, x in enumerate(args))
        return self.function(list(self.given) if self.several else self.given, *args, **kwargs)


def seed(text: str) -> None:
    """Set every generator that samples are drawn from."""
    number = zlib.crc32(text.encode())
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def own(value: Any) -> Any:
    """A tensor that some graph of the sample's made, as one that can be differentiated to."""
    if not isinstance(value, torch.Tensor) or value.is_leaf:
        return value
    return value.detach().requires_grad_()


def spread(count: int, most: int) -> list[int]:
    """At most so many of `range(count)`, the first, the last and some between."""
    if most >= count:
        return list(range(count))
    return sorted({round(i * (count - 1) / max(most - 1, 1)) for i in range(most)})


def all_names() -> list[str]:
    """The names of all modules and operators."""
    return list(dict.fromkeys([*(m.name for m in module_db), *(o.formatted_name for o in op_db if differentiable(o))]))


def differentiable(entry: Any) -> bool:
    return bool(entry.supports_autograd) and torch.float32 in entry.dtypes


def modules(most: int, wanted: Callable[[str], bool]) -> Iterator[Case]:
    """Every module of `module_db` whose name is wanted, in train and in eval mode."""
    for entry in module_db:
        if not wanted(entry.name):
            continue
        for mode in ("train", "eval"):

            def samples(entry: Any = entry, mode: str = mode) -> list[Any]:
                seed(f"{entry.name} {mode}")
                how = {"device": "cpu", "dtype": torch.float32, "requires_grad": True, "training": mode == "train"}
                return list(entry.module_inputs_func(entry, **how))

            def make(at: int, entry: Any = entry, mode: str = mode, samples: Any = samples) -> Made:
                chosen = samples()[at]
                seed(f"{entry.name} {mode} {at}")
                built = chosen.constructor_input
                model = entry.module_cls(*built.args, **built.kwargs).to(torch.float32)
                model.train(mode == "train")
                given = chosen.forward_input
                args, kwargs = pytree.tree_map(own, (given.args, given.kwargs)) if given else ((), {})
                return Made(model, tuple(args), kwargs)

            for at in spread(len(samples()), most):
                yield Case("module", entry.name, mode, at, lambda at=at, make=make: make(at))


def operators(most: int, wanted: Callable[[str], bool]) -> Iterator[Case]:
    """Every operator of `op_db` whose name is wanted and that can be differentiated in float32, applied to a parameter."""
    for entry in op_db:
        if not differentiable(entry) or not wanted(entry.formatted_name):
            continue

        def samples(entry: Any = entry) -> list[Any]:
            seed(entry.formatted_name)
            return list(entry.sample_inputs("cpu", torch.float32, requires_grad=True))

        def make(at: int, as_buffers: bool, entry: Any = entry, samples: Any = samples) -> Made:
            chosen = samples()[at]
            others = () if as_buffers is False else chosen.args
            model = Operator(entry.op, chosen.input, others, as_buffers=as_buffers)
            args, kwargs = pytree.tree_map(own, (chosen.args, chosen.kwargs))
            args = tuple(None if as_buffers and isinstance(x, torch.Tensor) else x for x in args)
            return Made(model, args, kwargs, chosen.output_process_fn_grad)

        for number, at in enumerate(spread(len(samples()), most)):
            as_buffers = bool(number % 2)
            mode = "buffers" if as_buffers else "inputs"
            yield Case("operator", entry.formatted_name, mode, at, lambda at=at, b=as_buffers, make=make: make(at, b))


def tensors_of(value: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]
