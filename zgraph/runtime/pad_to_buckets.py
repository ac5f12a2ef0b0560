"""Pads batches to few sizes inside of a call, and returns the outputs without the padding (`shapes = {"buckets": …}`).

All ranks pad to the same bucket: the smallest that holds the batches of all. Which dimensions of a program's outputs
are padded is found by capturing the model at a second size: the dimensions that change with it. (A dimension of the
padded size need not be padded: a width may be 256 as well.)
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.utils import _pytree as pytree

from zgraph.capture.call_signature import signed
from zgraph.capture.capture import Trace, flat_values
from zgraph.capture.ignored_targets import TARGETS
from zgraph.capture.learned_sizes import inputs_by_path
from zgraph.capture.replaced_forward import signature_of
from zgraph.errors import CaptureError, RankMismatchError, SignatureError, UnsupportedError, ZgraphError
from zgraph.plan.shapes import Buckets, Pad
from zgraph.program.program import DATA_DIMS
from zgraph.ranks.agreement import Agreement
from zgraph.runtime.rank_votes import SAME_ROWS
from zgraph.torch_compat.tensor_storage import storage_address

logger = logging.getLogger(__name__)

Call = tuple[tuple[Any, ...], dict[str, Any]]

Lengths = Mapping[str, int]
"""Sizes, by their names in the plan."""

Follows = Mapping[int, Mapping[int, str]]
"""By flat output and dimension: the name of the padded size that the dimension follows."""


@dataclass(frozen=True)
class Cut:
    """The cut of one output of a padded call to the size of the batch."""

    shape: tuple[int, ...]  # shape of the padded output
    lengths: Mapping[int, int]  # the batch's sizes, by the dimension that is cut
    copied: bool  # whether the result is made contiguous, not a view

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """Return the output without the padding: a view, or a contiguous copy if `copied`."""
        for dim, length in self.lengths.items():
            value = value.narrow(dim, 0, length)
        return value.contiguous() if self.copied else value

    def filled(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the padded output: zeros where it was cut off."""
        missing = [whole - had for whole, had in zip(self.shape, gradient.shape, strict=True)]
        return functional.pad(gradient, [n for dim in reversed(missing) for n in (0, dim)])


@dataclass
class Padding:
    """A count of the padding that this rank's programs computed with: elements of the padded inputs, over all calls so
    far.
    """

    calls: dict[int, int] = field(default_factory=dict)  # number of calls, by the bucket of the first size
    given: int = 0  # elements of the user's batches
    padded: int = 0  # elements of the padded inputs

    @property
    def share(self) -> float:
        """The share of elements that are padding; 0 if nothing was padded."""
        return 1.0 - self.given / self.padded if self.padded else 0.0

    def __str__(self) -> str:
        buckets = ", ".join(f"{count} of {bucket}" for bucket, count in sorted(self.calls.items()))
        return f"padding: {self.share:.1%} of what {sum(self.calls.values())} calls computed with ({buckets})"


@dataclass(frozen=True)
class Padded:
    """A call with its inputs padded."""

    call: Call  # the padded call
    real: Lengths  # the sizes before padding
    lengths: Lengths  # the sizes after padding
    made: frozenset[int]  # addresses of the storages that padding allocated, which are not the user's
    inputs: tuple[tuple[str, torch.Tensor, Pad], ...]  # (name, padded tensor, how it is padded) of each input that is
    anywhere: bool  # whether a batch is smaller than the bucket, on this rank or another


@dataclass(frozen=True)
class _Seen:
    """The shapes of a capture's flat outputs at certain padded sizes."""

    lengths: Lengths  # the padded sizes
    shapes: tuple[tuple[int, ...] | None, ...]  # of each flat output; None for one that is not a tensor
    constants: tuple[str, ...]  # the Python numbers and text in the code around the graph


class Pads(Protocol):
    """A rank whose calls are padded."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def forward_function(self) -> Callable[..., Any]: ...
    @property
    def sizes(self) -> dict[str, int]: ...
    @property
    def everyone(self) -> Agreement: ...
    @property
    def mesh(self) -> DeviceMesh | None: ...


class PaddedCalls:
    """The calls of one compiled module whose plan has `buckets`."""

    def __init__(self, rank: Pads, buckets: Buckets) -> None:
        self.rank = rank
        self.buckets = buckets.buckets
        self.pads = buckets.padded()
        self.told = frozenset(buckets.pad)
        self.padding = Padding()
        self._apart: set[tuple[str, int]] = set()  # dimensions of other inputs that do not follow the padded sizes
        self._seen: dict[Any, list[_Seen]] = {}  # captures by all that calls have in common but the padded sizes
        self._now = threading.local()
        self._warned = False
        self._probed: set[Any] = set()  # the buckets, and modes, in which padding was checked to count for nothing

    # -- in -----------------------------------------------------------------------------------------------------------
    def padded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Padded:
        """Return the padded call as `agreed` does, for a call that will run: count its padding."""
        padded_call = self.agreed(args, kwargs)
        self._warn_of_missing(args, kwargs)
        self._count(args, kwargs, padded_call.call, padded_call.lengths)
        return padded_call

    def agreed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Padded:
        """Return a call padded to the buckets that all ranks take. All ranks must call it. Raises `SignatureError`, on
        every rank, for a call that can't be padded, `RankMismatchError` if ranks of one group have different sizes.
        """
        everyone = self.rank.everyone

        def refused(rank: int, said: str) -> SignatureError:
            return SignatureError(
                f"the batch of rank {rank} can't be padded", where="shapes", why=said, hint="see that rank's error"
            )

        place = (
            tuple(self.rank.mesh.get_local_rank(d) for d in DATA_DIMS if d in self.rank.sizes) if self.rank.mesh else ()
        )
        real, views = everyone.exchange(
            "the sizes of a batch", lambda: self._sizes(args, kwargs), lambda found: (place, found), refused
        )
        first: dict[Any, tuple[int, Lengths]] = {}
        for rank, (at, lengths) in enumerate(views):
            among, same = first.setdefault(at, (rank, lengths))
            if same != lengths:
                raise RankMismatchError(
                    "ranks that see the same rows have batches of different sizes",
                    why=f"{_shown(same)} on rank {among}, {_shown(lengths)} on rank {rank}",
                    hint=SAME_ROWS,
                )
        lengths = {name: max(self._bucket(view.get(name, 0)) for _, view in views) for name in real}
        call = self._with(args, kwargs, lengths)
        new_addresses = _addresses(call) - _addresses((args, kwargs)) - {0}
        named = zip(self._leaves(*call), pytree.tree_leaves(call), strict=True)
        inputs = tuple((path, x, self.pads[path]) for (path, _), x in named if path in self.pads and x is not None)
        anywhere = any(view != lengths for _, view in views if view)
        return Padded(call, real, lengths, new_addresses, inputs, anywhere)

    def _leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
        """Return the (path, value) of each input of a call, in order."""
        positional = list(signature_of(self.rank.forward_function).parameters)[1:]
        return list(inputs_by_path(positional, args, kwargs).items())

    def _bucket(self, length: int) -> int:
        return next(bucket for bucket in self.buckets if bucket >= length)

    def _sizes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, int]:
        """Return the sizes of a call that are padded, by name. Raises `SignatureError` if it can't be padded."""
        leaves = self._leaves(args, kwargs)
        lengths: dict[str, tuple[int, str]] = {}
        rows: set[int] = set()
        for path, leaf in leaves:
            pad = self.pads.get(path)
            if pad is None or leaf is None:
                continue
            _refuse_unfit(path, pad, leaf)
            rows |= {leaf.shape[0]} if 0 not in pad.dims else set()
            for dim in pad.dims:
                length, other = lengths.setdefault(pad.size, (leaf.shape[dim], f"dimension {dim} of {path}"))
                if leaf.shape[dim] != length:
                    raise SignatureError(
                        f"size {pad.size!r} is {length} and {leaf.shape[dim]} in one call",
                        where=f"{other}, dimension {dim} of {path}",
                        why="inputs that are padded together have one size",
                        hint=f'give one of them another size in shapes.pad: {path} = {{ value = {pad.value}, size = "other" }}',
                    )
                self._refuse_too_long(length, f"dimension {dim} of {path}")
        if not lengths:
            raise SignatureError(
                f"nothing of this call is padded: it has {', '.join(path for path, _ in leaves) or 'no inputs'}",
                where="shapes.pad",
                why=f"shapes.pad names {', '.join(self.pads)}",
                hint="name the inputs as forward does; as they are shown above",
            )
        self._refuse_untold(leaves, {length: name for name, (length, _) in lengths.items()}, rows)
        return {name: length for name, (length, _) in lengths.items()}

    def _refuse_too_long(self, length: int, where: str) -> None:
        if length > self.buckets[-1]:
            raise SignatureError(
                f"a batch of {length} is larger than the largest bucket, {self.buckets[-1]}",
                where=where,
                hint=f"add a bucket of {length} or more to shapes.buckets, or cut the batch",
            )

    def _refuse_untold(self, leaves: Sequence[tuple[str, Any]], names: Mapping[int, str], rows: set[int]) -> None:
        """Raise `SignatureError` for an input that seems to have a padded size, but that the plan does not mention. (A
        dimension that has ever had another size does not follow the padded one.)
        """
        for path, leaf in leaves:
            if path in self.told or not isinstance(leaf, torch.Tensor):
                continue
            for dim, length in enumerate(leaf.shape):
                batch = dim == 0 and length in rows
                if length == 1 or batch or (path, dim) in self._apart:
                    continue
                if length not in names:
                    self._apart.add((path, dim))
                    continue
                raise SignatureError(
                    f"{path} has size {names[length]!r} too, and no value to be padded with",
                    where=f"dimension {dim} of {path}",
                    why=f"it is {length} there, as the inputs are that shapes.pad names",
                    hint=f'give one: shapes.pad.{path} = {{ value = 0, dims = [{dim}] }}; or "none", if it is {length} by chance',
                )

    def _with(self, args: tuple[Any, ...], kwargs: dict[str, Any], lengths: Lengths) -> Call:
        """Return a call with its inputs padded to these sizes."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        pads = [self.pads.get(path) for path, _ in self._leaves(args, kwargs)]
        padded_leaves = [
            _longer(x, pad, lengths[pad.size]) if pad is not None and x is not None else x
            for x, pad in zip(leaves, pads, strict=True)
        ]
        return pytree.tree_unflatten(padded_leaves, spec)  # type: ignore[return-value]

    def _warn_of_missing(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Warn once of inputs that the plan pads and the first call does not have: one may be what masks the
        padding.
        """
        if self._warned:
            return
        self._warned = True
        given = {path for path, leaf in self._leaves(args, kwargs) if leaf is not None}
        missing = [name for name in self.pads if name not in given and name not in TARGETS]
        if missing and self.rank.everyone.first():
            logger.warning(
                "shapes.pad names %s, which this call does not have: if it masks the padding, give it in every call",
                ", ".join(missing),
            )

    def _count(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call, lengths: Lengths) -> None:
        first = next(iter(lengths.values()))
        self.padding.calls[first] = self.padding.calls.get(first, 0) + 1
        for (path, before), after in zip(self._leaves(args, kwargs), pytree.tree_leaves(call), strict=True):
            if path in self.pads and isinstance(before, torch.Tensor):
                self.padding.given += before.numel()
                self.padding.padded += after.numel()

    # -- out ----------------------------------------------------------------------------------------------------------
    def follows(self, trace: Trace, call: Call, capture: Callable[[Call], Trace]) -> Follows:
        """Return which dimensions of the flat outputs of a padded call's capture (`trace`) have a padded size, found by
        one more `capture` at another size, or by an earlier one. Raises `CaptureError` for an output whose padding
        can't be told.
        """
        args, kwargs = call
        lengths: Lengths = self._now.padded.lengths
        flat = trace.flat.flatten(self.rank.module, args, kwargs)
        shape_of = trace.shapes_in(flat)
        shapes = tuple(shape_of(v) if isinstance(v, torch.Tensor) else None for v in flat_values(trace.flat))
        if not any(shapes) and not trace.gives_constants(self.rank.module, args, kwargs):
            return {}
        named = {(i, d): pad.size for i, pad in self._numbered(args, kwargs) for d in pad.dims}
        rest = tuple(
            tuple(named.get((i, d), n) for d, n in enumerate(x.shape)) if isinstance(x, torch.Tensor) else None
            for i, x in enumerate(pytree.tree_leaves((args, kwargs)))
        )
        known = self._seen.setdefault((signed(self.rank.module, args, kwargs).form, rest), [])
        here = _Seen(lengths, shapes, trace.flat.code_constants)
        sizes_by_output: dict[int, dict[int, str]] = {}
        for name in lengths:
            other = next((seen for seen in known if _differs_in(seen, here) == {name}), None)
            if other is None or other.constants != here.constants:
                other = self._at_another(call, name, here, capture)
            followers = _followers(here, other, name)
            if followers and not _tells(other.lengths[name], lengths[name]):
                self._refuse_rounded(call, name, here, followers, capture)
            for at, dim in followers:
                sizes_by_output.setdefault(at, {})[dim] = name
        known.append(here)
        return sizes_by_output

    def _numbered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[int, Pad]]:
        for number, (path, leaf) in enumerate(self._leaves(args, kwargs)):
            if path in self.pads and leaf is not None:
                yield number, self.pads[path]

    def _at_another(self, call: Call, name: str, here: _Seen, capture: Callable[[Call], Trace]) -> _Seen:
        """Return the outputs' shapes with one size changed: to that of another bucket, else of the call before padding,
        else to half.
        """
        length, real = here.lengths[name], self._now.padded.real[name]
        others = [*(b for b in self.buckets if b not in here.lengths.values()), real, length // 2]
        other = next(n for n in others if n != length)
        try:
            flat = capture(self._sized(call, name, other)).flat
        except ZgraphError as error:
            raise _untold(
                "the model can't be captured at another size", f"at {name} = {other}: {error.what}"
            ) from error
        return _seen_at(name, other, flat, here)

    def _refuse_rounded(
        self, call: Call, name: str, here: _Seen, followers: list[tuple[int, int]], capture: Callable[[Call], Trace]
    ) -> None:
        """Raise `CaptureError` if other dimensions follow this size where it is one that `_tells`. Nothing is known where
        there is no such size, or the model does not take it.
        """
        length = here.lengths[name]
        shorter = (n for n in range(length // 2, 1, -1) if _tells(n, length) and n not in here.lengths.values())
        if (other := next(shorter, None)) is None:
            return
        try:
            flat = capture(self._sized(call, name, other)).flat
        except ZgraphError:
            return
        apart = set(followers).symmetric_difference(_followers(here, _seen_at(name, other, flat, here), name))
        if apart:
            at, dim = min(apart)
            raise _untold(
                f"dimension {dim} of output {at} (counted flat) is as long as {name} at some sizes and not at others",
                f"{name} was {length} and {other}, and which part of it is padding is not known",
            )

    def _sized(self, call: Call, name: str, length: int) -> Call:
        """Return a padded call with other inputs, in which one size is `length`."""
        leaves, spec = pytree.tree_flatten(call)
        for number, pad in self._numbered(*call):
            if pad.size == name:
                x = leaves[number]
                shape = [length if d in pad.dims else n for d, n in enumerate(x.shape)]
                leaves[number] = torch.empty(shape, dtype=x.dtype, device=x.device).requires_grad_(x.requires_grad)
        return pytree.tree_unflatten(leaves, spec)  # type: ignore[return-value]

    @contextmanager
    def runs(self, padded: Padded) -> Iterator[None]:
        """Use this padded call's sizes in `follows`, `cuts` and `refuse_written` while it runs."""
        self._now.padded = padded
        try:
            yield
        finally:
            self._now.padded = None

    def to_probe(self) -> Padded | None:
        """Return the running call if it is the first one with padding, on any rank, of its buckets and mode."""
        padded: Padded = self._now.padded
        key = *padded.lengths.items(), self.rank.module.training
        if not padded.anywhere or key in self._probed:
            return None
        self._probed.add(key)
        return padded

    def cuts(self, follows: Follows, outputs: Sequence[Any], *, copied: bool) -> dict[int, Cut]:
        """Return how the flat outputs of the running call are cut, by their position."""
        padded: Padded = self._now.padded
        if padded.real == padded.lengths:
            return {}
        return {
            at: Cut(tuple(outputs[at].shape), {dim: padded.real[name] for dim, name in dims.items()}, copied)
            for at, dims in follows.items()
            if outputs[at] is not None  # (None: a rank of another stage has it)
        }

    def refuse_written(self, written: Sequence[int], flat: Sequence[Any]) -> None:
        """Raise `UnsupportedError` if forward writes to an input of the running call that was padded: the write would
        not reach the user's tensor.
        """
        padded: Padded = self._now.padded
        if any(storage_address(flat[at]) in padded.made for at in written):
            raise UnsupportedError(
                "forward writes to an input that is padded",
                where="shapes.pad",
                why="it writes to the padded copy, and the caller's tensor would stay as it is",
                hint="let forward write to a copy (x = x.clone())",
            )


def _addresses(call: Any) -> frozenset[int]:
    return frozenset(storage_address(x) for x in pytree.tree_leaves(call) if isinstance(x, torch.Tensor))


def _shown(lengths: Lengths) -> str:
    return ", ".join(f"{name} {length}" for name, length in lengths.items())


def _refuse_unfit(path: str, pad: Pad, leaf: Any) -> None:
    """Raise `SignatureError` for an input that can't be padded as the plan says."""
    if not isinstance(leaf, torch.Tensor):
        raise SignatureError(
            f"{path} can't be padded: it is no tensor, but a {type(leaf).__name__}",
            where=f"shapes.pad.{path}",
            hint="name tensors: those inside of a dict or a list by their place: batch['input_ids']",
        )
    if max(pad.dims) >= leaf.dim():
        raise SignatureError(
            f"shapes.pad pads dimension {max(pad.dims)} of {path}, which has {leaf.dim()} dimensions",
            where=f"shapes.pad.{path}",
            hint=f"say which: {{ value = {pad.value}, dims = [{max(leaf.dim() - 1, 0)}] }}; dimensions count from 0",
        )
    rounded = torch.tensor(pad.value).to(leaf.dtype)
    if rounded.item() != pad.value:
        raise SignatureError(
            f"{path} can't be padded with {pad.value}: it holds {str(leaf.dtype).removeprefix('torch.')}",
            where=f"shapes.pad.{path}",
            hint="give a value of that type",
        )


def _longer(x: torch.Tensor, pad: Pad, length: int) -> torch.Tensor:
    """Return a tensor padded at the end to this length; itself if there is nothing to pad."""
    missing = [length - n if dim in pad.dims else 0 for dim, n in enumerate(x.shape)]
    if not any(missing):
        return x
    return functional.pad(x, [n for dim in reversed(missing) for n in (0, dim)], value=pad.value)


def _differs_in(one: _Seen, other: _Seen) -> set[str]:
    """Return the names of the sizes in which two captures differ; none if their outputs differ in number."""
    if len(one.shapes) != len(other.shapes):
        return set()
    return {
        name for name in one.lengths.keys() | other.lengths.keys() if one.lengths.get(name) != other.lengths.get(name)
    }


def _tells(other: int, length: int) -> bool:
    """Return whether a capture at another size tells a dimension that follows a padded `length` from one that is rounded
    to a multiple of some number k: where k divides `length`, it is neither `length` nor `other` there.
    """
    return math.gcd(other, length) == 1 and not length <= 2 * other <= 2 * length


def _only(one: _Seen, other: _Seen) -> str:
    """Return the constants that one capture has more often than another."""
    return ", ".join((Counter(one.constants) - Counter(other.constants)).elements()) or "none"


def _seen_at(name: str, other: int, flat: Any, here: _Seen) -> _Seen:
    """Return what a capture shows in which the size of this name is `other`. Raises `CaptureError` for other outputs."""
    shapes = [v.shape if isinstance(v, torch.Tensor) else None for v in flat_values(flat)]
    fixed_shapes = tuple(tuple(map(int, shape)) if shape is not None else None for shape in shapes)
    if [s if s is None else len(s) for s in fixed_shapes] != [s if s is None else len(s) for s in here.shapes]:
        raise _untold(
            "other outputs come of it at another size",
            f"{len(here.shapes)} at {here.lengths[name]}, {len(fixed_shapes)} at {other}",
        )
    return _Seen({**here.lengths, name: other}, fixed_shapes, flat.code_constants)


def _followers(here: _Seen, other: _Seen, name: str) -> list[tuple[int, int]]:
    """Return (flat output, dimension) of each dimension that follows the size of this name. Raises `CaptureError` for
    one that is computed from it, and for Python numbers and texts that are.
    """
    if other.constants != here.constants:
        raise _untold(
            f"a Python number or text that forward returns, or keeps, differs with {name}",
            f"where {name} is {here.lengths[name]} it has {_only(here, other)}, where that is {other.lengths[name]} {_only(other, here)}",
        )
    found = []
    for at, (mine, its) in enumerate(zip(here.shapes, other.shapes, strict=True)):
        if (mine is None) != (its is None) or len(mine or ()) != len(its or ()):
            raise _untold(f"output {at} has another form at another size", f"{mine} and {its}")
        for dim, (size, that) in enumerate(zip(mine or (), its or (), strict=True)):
            if size == that:
                continue
            if (size, that) != (here.lengths[name], other.lengths[name]):
                raise _untold(
                    f"dimension {dim} of output {at} (counted flat) is {size} where {name} is {here.lengths[name]}, and {that} where that is "
                    f"{other.lengths[name]}",
                    "it is computed of the padded size, and which part of it is padding is not known",
                )
            found.append((at, dim))
    return found


def _untold(what: str, why: str) -> CaptureError:
    return CaptureError(
        f"the padding of an output can't be told: {what}",
        where="shapes.buckets",
        why=why,
        hint="let forward give tensors with the size of its inputs (and reshape, shift or join them outside), or leave it out (of a cache "
        'of transformers: use_cache=False); or shapes="auto"',
    )
