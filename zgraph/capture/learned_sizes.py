"""The sizes of a model's calls that differ, and the Python numbers among its arguments: learned from the calls, or
declared.

Calls of one *family* have inputs of the same structure, dtypes and numbers of dimensions. Dimensions that had several
sizes so far are *open*: they have names, and are symbols in programs. Two have the same name while they were equal in
every call. All other dimensions are numbers, and so is an open one in a call in which its size is 1 (torch computes
otherwise with these) or 0.

What is learned must be equal on all ranks: they learn together, from the calls of all.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from zgraph.capture.replaced_forward import signature_of
from zgraph.capture.symbolic_capture import OpenElement, SymbolicSizes, distinct
from zgraph.errors import PlanError, SignatureError
from zgraph.names import did_you_mean
from zgraph.plan.shapes import Size, declared
from zgraph.torch_compat.element_sizes import KNOWN_DTYPES, LARGEST

Place = tuple[int, int]
"""A dimension: (number of the tensor in the call, number of its dimension). Or an element of an input whose values are
constants: (-1 - number of the constant in the call, number of the element), or a column of them.
"""

Shapes = tuple[tuple[int, ...], ...]

Numbers = tuple[str, ...]
"""Python numbers among the arguments of a call, as text."""

Value = tuple[tuple[int, ...], tuple[int, ...]]
"""A tensor's shape, and its elements in order."""

MARK = "\0"  # around the number of a tensor in a signature, in place of its shape
VALUE = "\1"  # around the number of a Python number, in place of its value
CONSTANT = "\2"  # around the number of an input that is a constant, in place of its shape and values

MAX_SIZES = 64  # an input of more whole numbers has no elements that are symbols
EVERY = -1  # in the place of a column: all elements of a list, whose length differs from call to call


@dataclass(frozen=True)
class Signature:
    """Everything about a call that a capture specialises on."""

    form: str  # the call in words, with marks for the tensors' shapes, the numbers' values, and both of constants
    family: str  # the part of `form` about the inputs, without modes
    tensors: tuple[torch.Tensor, ...]  # the tensors whose shapes are marks in `form`
    numbers: Numbers  # the Python numbers whose values are marks in `form`
    leaves: tuple[str, ...]  # each of the inputs, in words
    constants: tuple[torch.Tensor, ...]  # inputs whose values are constants of a capture
    values: tuple[Value, ...]  # the shapes and values of the constants
    call: tuple[tuple[Any, ...], dict[str, Any]] = field(repr=False)  # (args, kwargs)

    @property
    def inputs(self) -> str:
        """The part of the form about the inputs themselves, without their structure and the modes."""
        return self.form[: self.form.index("; structure ")]

    @property
    def shapes(self) -> Shapes:
        return tuple([tuple(t.shape) for t in self.tensors])

    def at(self, shapes: Shapes, values: tuple[Value, ...], device: str | None = None) -> Signature:
        """Return the same call with tensors of other shapes (without values) and other constants; on `device`, by
        default on its own devices."""
        stand_ins = {
            id(t): _stand_in(t, shape, device or t.device)
            for t, shape in zip(self.tensors, shapes, strict=True)
            if tuple(t.shape) != shape
        }
        for constant, value, own in zip(self.constants, values, self.values, strict=True):
            if value != own:
                numbers = torch.tensor(value[1], dtype=constant.dtype, device=constant.device)
                stand_ins[id(constant)] = numbers.reshape(value[0])
        return replace(
            self,
            tensors=tuple([stand_ins.get(id(t), t) for t in self.tensors]),
            constants=tuple([stand_ins.get(id(t), t) for t in self.constants]),
            values=values,
            call=pytree.tree_map(lambda leaf: stand_ins.get(id(leaf), leaf), self.call),
        )

    def paths(self, positional: Sequence[str]) -> tuple[str, ...]:
        """Return the name of each of the tensors: "input_ids", "batch.labels". `positional` are the names of forward's
        parameters."""
        paths_by_id = {id(leaf): path for path, leaf in inputs_by_path(positional, *self.call).items()}
        return tuple(paths_by_id[id(t)] for t in self.tensors)

    def sources(self, parameters: Sequence[inspect.Parameter]) -> tuple[str, ...]:
        """Return the name that a capture gives each of the numbers: "L['temperature']". `parameters` are forward's,
        without the module."""
        plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        others = {p.kind: p.name for p in parameters}
        named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        sources = []
        for path, leaf in pytree.tree_leaves_with_path((list(self.call[0]), self.call[1])):
            if type(leaf) not in (int, float):
                continue
            inner = pytree.keystr(path[2:])
            if path[0].idx == 0:  # type: ignore[attr-defined]
                at: int = path[1].idx  # type: ignore[attr-defined]
                rest = at - len(plain)
                own = (
                    f"L[{plain[at]!r}]" if rest < 0 else f"L[{others.get(inspect.Parameter.VAR_POSITIONAL)!r}][{rest}]"
                )
            else:
                key = path[1].key  # type: ignore[attr-defined]
                own = f"L[{key!r}]" if key in named else f"L[{others.get(inspect.Parameter.VAR_KEYWORD)!r}][{key!r}]"
            sources.append(own + inner)
        return tuple(sources)

    def text(self, names: Mapping[Place, str] = MappingProxyType({}), given: Collection[int] = ()) -> str:
        """Return the signature as text.

        Sizes that have `names` are shown by these, except 0 and 1. Python numbers are shown by their values, except
        those that are `given` to the program.
        """
        shapes = [
            ", ".join(str(names.get((number, d), n) if n > 1 else n) for d, n in enumerate(tensor.shape))
            for number, tensor in enumerate(self.tensors)
        ]
        values = []
        for constant, (shape, numbers) in enumerate(self.values):
            elements = [str(names.get((~constant, at), n)) for at, n in enumerate(numbers)]
            values.append(f"{list(shape)} of value [{', '.join(elements)}]")
        return self._filled(shapes, ["any" if at in given else value for at, value in enumerate(self.numbers)], values)

    @property
    def outline(self) -> str:
        """The signature with a question mark for each size, number and constant that may differ from call to call."""
        unknown = ["?"] * len(self.numbers), ["?"] * len(self.values)
        return self._filled([", ".join("?" * t.dim()) for t in self.tensors], *unknown)

    def _filled(self, shapes: Sequence[str], numbers: Sequence[str], values: Sequence[str]) -> str:
        """Return the form with these texts in place of its marks."""
        parts = self.form.split(MARK)
        parts[1::2] = [f"[{shape}]" for shape in shapes]
        parts = "".join(parts).split(VALUE)
        parts[1::2] = numbers
        parts = "".join(parts).split(CONSTANT)
        parts[1::2] = [
            values[int(mark.partition(" ")[0])] for mark in parts[1::2]
        ]  # (an input given twice has two marks)
        return "".join(parts)


def inputs_by_path(positional: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all inputs of a call by their names: "input_ids", "batch.labels"."""
    named = dict(zip([*positional, *(f"args_{i}" for i in range(len(args)))], args, strict=False)) | kwargs
    leaves = pytree.tree_leaves_with_path(named)
    return {pytree.keystr(path)[2:].replace("']", "", 1): leaf for path, leaf in leaves}


def _stand_in(tensor: torch.Tensor, shape: tuple[int, ...], device: torch.device | str) -> torch.Tensor:
    stand_in = torch.empty(shape, dtype=tensor.dtype, device=device)
    vars(stand_in).update(vars(tensor))
    return stand_in.requires_grad_(tensor.requires_grad)


KNOWN_VALUES = 256  # the most sets of constants that a family remembers
RECENT = 8  # calls whose shapes a family remembers


@dataclass
class Family:
    """What is known of the sizes of calls with inputs of one form."""

    paths: tuple[str, ...]  # the names of the tensors
    whole: tuple[bool, ...]  # whether each tensor is of whole numbers
    sources: tuple[str, ...] = ()  # the names that captures give the Python numbers
    declared: dict[Place, Size] = field(default_factory=dict)  # the sizes that the plan declares
    # inputs whose sizes the plan declares, and which can't be symbols because the inputs are not contiguous
    scattered: tuple[str, ...] = ()
    padded: set[Place] = field(default_factory=set)  # dimensions that are padded to buckets: numbers in each program
    # the names of the inputs whose values are constants, and their elements perhaps sizes, by the constants' numbers
    elements: Mapping[int, str] = field(default_factory=dict)
    first: Shapes = ()  # the shapes of the first call
    first_values: tuple[Value, ...] = ()  # the shapes and values of its constants
    differed: set[Place] = field(default_factory=set)  # dimensions, and columns of constants, that had several sizes
    # a number for each dimension: dimensions with the same number were equal in every call
    equal: dict[Place, int] = field(default_factory=dict)
    points: dict[Place, int] = field(default_factory=dict)  # the largest size of each so far
    # dimensions, and columns of constants, that the model needs as numbers, and why
    closed: dict[Place, str] = field(default_factory=dict)
    # those that were closed together because they were equal in every call: they may be open again once they differ
    closed_as_one: list[frozenset[Place]] = field(default_factory=list)
    recent: tuple[Shapes, ...] = ()  # the shapes of the latest calls
    # dimensions that did not differ, and are open because they are equal to others that are
    alike: set[Place] = field(default_factory=set)
    # dimensions that did not differ, and that the model needs as numbers
    fixed: set[Place] = field(default_factory=set)
    free: set[Place] = field(default_factory=set)  # dimensions that differed while the constants did not
    tied: set[Place] = field(default_factory=set)  # dimensions whose sizes the constants decide, as far as is known
    # the shapes of the first call with each of the latest constants
    by_values: dict[tuple[Value, ...], Shapes] = field(default_factory=dict)
    anticipate: bool = False  # whether sizes that are likely to differ are open before they do
    names: dict[Place, str] = field(default_factory=dict)  # the names of the open dimensions (not of elements)
    # what all elements in a column of a constant were multiples of, besides 0 and 1
    divisors: dict[Place, int] = field(default_factory=dict)
    first_numbers: Numbers | None = None  # the Python numbers of the first call
    given: set[int] = field(default_factory=set)  # Python numbers that had several values, and are given to programs
    constant: set[int] = field(default_factory=set)  # Python numbers that a program can't be given

    def learn_numbers(self, numbers: Sequence[Numbers]) -> None:
        """Take in calls with these Python numbers."""
        for one in numbers:
            self.first_numbers = self.first_numbers or one
            differ = {at for at, (a, b) in enumerate(zip(self.first_numbers, one, strict=True)) if a != b}
            self.given |= differ - self.constant

    def learn(self, calls: Sequence[tuple[Shapes, tuple[Value, ...]]], *, anticipate: bool) -> None:
        """Take in calls with these shapes and constants. With `anticipate`, sizes that are likely to differ are open
        before they do."""
        self.anticipate = anticipate
        for one, values in calls:
            before = self.by_values.setdefault(values, one)
            self.free |= {(t, d) for t, shape in enumerate(one) for d, n in enumerate(shape) if before[t][d] != n}
            while len(self.by_values) > KNOWN_VALUES:
                del self.by_values[next(iter(self.by_values))]
            if not self.first:
                self.first, self.first_values = one, values
            self.recent = (*self.recent, one)[-RECENT:]
            sizes = {(t, d): size for t, shape in enumerate(one) for d, size in enumerate(shape)}
            numbers: dict[tuple[int, int], int] = {}
            for place, size in sizes.items():
                self.points[place] = max(size, self.points.get(place, 0))
                if size != self.first[place[0]][place[1]] and place not in self.padded:
                    self.differed.add(place)
                self.equal[place] = numbers.setdefault((self.equal.get(place, 0), size), len(numbers))
            for constant in self.elements:
                self._learn_elements(constant, values[constant])
        self._open_parted()
        self._name(self._open())

    def _open_parted(self) -> None:
        """Open dimensions again that were closed as one size and have differed from each other since: perhaps only one of
        them can't be a symbol."""
        for places in [one for one in self.closed_as_one if len({self.equal[p] for p in one}) > 1]:
            self.closed_as_one.remove(places)
            for place in places:
                self.closed.pop(place, None)

    def expect(self, shapes: Shapes, values: tuple[Value, ...], *, anticipate: bool) -> None:
        """Give names to the sizes of this rank's first call, which ranks have not learned from together: which call was
        the first, all ranks must know alike."""
        self.learn([(shapes, values)], anticipate=anticipate)
        self.first, self.first_values, self.by_values, self.recent = (), (), {}, ()

    def _learn_elements(self, constant: int, value: Value) -> None:
        """Take in a value of a constant whose elements may be sizes."""
        other = _other_columns(self.first_values[constant], value)
        self.differed |= {(~constant, column) for column in other}
        shape, numbers = value
        for at, number in enumerate(numbers if len(shape) > 1 else ()):
            if number > 1:
                column = (~constant, at % _width(shape))
                self.divisors[column] = math.gcd(self.divisors.get(column, 0), number)

    def unit(self, column: Place) -> int:
        """Return the number of which all elements in a column of a constant are multiples: a symbol is so many times
        smaller.

        (Heights of images are even: h // 2 is a symbol then, and 2 * (h // 2) is h, which torch could not tell.)
        """
        divisor = self.divisors.get(column, 1)
        return next((prime for prime in (2, 3, 5, 7) if divisor % prime == 0), 1)

    def size(self, shapes: Shapes, values: tuple[Value, ...], place: Place) -> int:
        """Return the size of an open dimension in a call; of an element of a constant, how many units it is."""
        number, at = place
        if number >= 0:
            return shapes[number][at]
        shape, numbers = values[~number]
        return numbers[at] // self.unit((number, at % _width(shape)))

    def names_in(self, signature: Signature) -> Mapping[Place, str]:
        """Return the names of the open dimensions, and of the elements of constants that are symbols in this call."""
        return self._names_for(signature.values)

    def _names_for(self, values: tuple[Value, ...]) -> Mapping[Place, str]:
        if not self.elements or not (self.anticipate or any(number < 0 for number, _ in self.differed)):
            return self.names
        names = dict(self.names)
        taken = {*names.values(), *(size.name for size in self.declared.values())}
        for constant, path in self.elements.items():
            shape, numbers = values[constant]
            if len(numbers) > MAX_SIZES:
                continue
            every = self.anticipate or (~constant, EVERY) in self.differed
            for at, number in enumerate(numbers):
                column = (~constant, at % _width(shape))
                unit = self.unit(column)
                fits = unit < number <= LARGEST and number % unit == 0
                if (every or column in self.differed) and column not in self.closed and fits:
                    index = "_".join(map(str, _index(at, shape)))
                    name = f"{_identifier(path)}_{index}" + (f"_by_{unit}" if unit > 1 else "")
                    while name in taken:
                        name += "_"
                    taken.add(name)
                    names[~constant, at] = name
        return names

    def presumed(self, names: Collection[str]) -> set[Place]:
        """Return the dimensions of these names that are open and have not differed themselves."""
        return {place for place, name in self.names.items() if name in names} - self.differed - self.declared.keys()

    def close_elements(self, signature: Signature, names: Collection[str], why: str) -> list[str]:
        """Make elements of constants numbers from now on, which a capture could not have as symbols: all in the columns
        of those that have these names in a call. Return what they are, in words."""
        gone: dict[int, dict[int, str]] = {}  # what to say of each column, by constants' numbers
        left = set()  # constants that have other columns
        for (number, at), name in self.names_in(signature).items():
            if number >= 0:
                continue
            shape = signature.values[~number][0]
            column = at % _width(shape)
            if name in names:
                index = ", ".join([*[":"] * (len(shape) - 1), str(column)])
                gone.setdefault(~number, {})[column] = f"{self.elements[~number]}[{index}]"
            else:
                left.add(~number)
        self.closed |= {(~constant, column): why for constant, columns in gone.items() for column in columns}
        return [
            word
            for constant, columns in gone.items()
            for word in (columns.values() if constant in left or len(columns) == 1 else [self.elements[constant]])
        ]

    def close_constants(self, *, anticipate: bool) -> None:
        """Make all elements of constants numbers from now on; `anticipate`: see `learn`."""
        self.elements, self.anticipate = {}, anticipate
        self._name(self._open())

    def close(self, names: Sequence[str], why: str) -> bool:
        """Make the sizes of these names, which a capture could not have as symbols, numbers from now on; return whether
        that is final.

        It is not final for dimensions that have not differed themselves, or whose sizes constants decide: they may
        become symbols when they differ.
        """
        places, presumed = {place for place, name in self.names.items() if name in names}, self.presumed(names)
        decided = {p for p in places if len(self.by_values) > 1 and p not in self.free} - self.declared.keys()
        if presumed:
            numbers = {self.equal[p] for p in presumed}
            more = {p for p in self.equal if self.equal[p] in numbers} - places - self.fixed - self.closed.keys()
            # (position_ids of 3 x batch x seq, in calls with a batch of 3)
            likely = presumed if self.anticipate else presumed & self.alike
            by_chance = {(t, d) for t, d in presumed if d == 0 and any(p[0] == t and p[1] for p in likely)}
            self.alike |= more  # (a batch that is dimension 1 of another input)
            self.fixed |= set() if more else by_chance or presumed
        elif decided:
            self.tied |= decided
        else:
            self.closed.update(dict.fromkeys(places, why))
            by_name: dict[str, set[Place]] = {}
            for place in places:
                by_name.setdefault(self.names[place], set()).add(place)
            self.closed_as_one += [frozenset(one) for one in by_name.values() if len(one) > 1]
        self._name(self._open())
        return not presumed and not decided

    def _open(self) -> list[Place]:
        """Return the dimensions that are declared, or that differed.

        Where a dimension of a tensor differed, its rows are taken for a batch, which will differ too.
        """
        rows = {(t, 0) for t, _ in self.differed if t >= 0}
        likely = {(t, d) for t, d in self.equal if self.anticipate and (d == 0 or self.whole[t])}
        batches = {self.equal[p] for p in rows if p in self.equal}
        presumed = likely | self.alike | {p for p in self.equal if p[1] == 0 and self.equal[p] in batches}
        open_places = (self.differed | (presumed - self.fixed)) - (self.tied - self.free)
        return [
            p
            for p in self.equal
            if (p in open_places or p in self.declared) and p not in self.closed.keys() | self.padded
        ]

    def _name(self, places: Sequence[Place]) -> None:
        """Give one name to all dimensions that were equal in every call: the declared one, else one that describes
        them."""
        classes: dict[int | str, list[Place]] = {}
        for place in places:
            declared = self.declared.get(place)
            classes.setdefault(declared.name if declared is not None else self.equal[place], []).append(place)
        taken = {size.name for size in self.declared.values()}
        before, self.names = self.names, {}
        former = {key: {before[p] for p in members if p in before} for key, members in classes.items()}
        for key in sorted(
            classes, key=lambda key: not former[key]
        ):  # (a dimension keeps the name that it has: programs are found by it)
            free_names = [name for name in former[key] if name not in taken]
            name = (
                key
                if isinstance(key, str)
                else free_names[0]
                if len(free_names) == 1
                else self._invented(classes[key], taken)
            )
            taken.add(name)
            self.names.update(dict.fromkeys(classes[key], name))

    def _invented(self, members: Sequence[Place], taken: set[str]) -> str:
        number, dim = members[0]
        simple = "batch" if dim == 0 else "seq" if dim == 1 else ""
        if simple and simple not in taken:
            return simple
        name = f"{_identifier(self.paths[number])}_{dim}"
        while name in taken:
            name += "_"
        return name

    def point(self, signature: Signature) -> dict[str, int]:
        """Return the sizes of a call by their names, except those that are 0 or 1. Raises `SignatureError` for a size
        that is not as declared."""
        sizes: dict[str, int] = {}
        where: dict[str, Place] = {}
        for place, name in self.names_in(signature).items():
            size = self.size(signature.shapes, signature.values, place)
            declared = self.declared.get(place)
            if declared is not None:
                self._check(place, size, declared, sizes, where)
            if size > 1:
                sizes.setdefault(name, size)
                where.setdefault(name, place)
        return sizes

    def small(self, signature: Signature) -> set[Place]:
        """Return the open dimensions whose size is 0 or 1 in this call: numbers in its program."""
        return {(number, dim) for number, dim in self.names if signature.tensors[number].shape[dim] <= 1}

    def _check(self, place: Place, size: int, declared: Size, sizes: dict[str, int], where: dict[str, Place]) -> None:
        path = self.paths[place[0]]
        if declared.max is not None and size > declared.max:
            raise SignatureError(
                f"size {declared.name!r} is {size} in this call, and declared to be {declared.max} at most",
                where=f"dimension {place[1]} of {path}",
                hint="declare a larger max, or cut the batch",
            )
        if size == 0:
            raise SignatureError(
                f"size {declared.name!r} is 0 in this call",
                where=f"dimension {place[1]} of {path}",
                hint="leave such a batch out",
            )
        if sizes.get(declared.name, size) != size:
            other = where[declared.name]
            raise SignatureError(
                f"size {declared.name!r} is {sizes[declared.name]} and {size} in one call",
                where=f"dimension {other[1]} of {self.paths[other[0]]}, dimension {place[1]} of {path}",
                hint="sizes of one name are equal in every call; give them two names",
            )

    def serves(self, signature: Signature) -> bool:
        """Return whether dimensions of one name have one size in this call, as in all before."""
        sizes: dict[str, int] = {}
        return all(
            sizes.setdefault(name, size) == size
            for place, name in self.names.items()
            for size in (signature.tensors[place[0]].shape[place[1]],)
        )

    def of_one_call(self, names: Collection[str]) -> dict[str, int] | None:
        """Return the sizes of these names in one of the latest calls: of the last one in which all are different, and
        none is 0 or 1; None where there is none."""
        for shapes in reversed(self.recent):
            point = {name: shapes[number][dim] for (number, dim), name in self.names.items() if name in names}
            if len({*point.values()} - {0, 1}) == len(point) == len(names):
                return point
        return None

    def open_sizes(
        self,
        signature: Signature,
        at: Mapping[str, int] | None = None,
        without: Collection[str] = (),
        beside: Mapping[str, int] | None = None,
    ) -> SymbolicSizes | None:
        """Return the sizes that a capture for this call has as symbols, except those in `without`; None where all of
        its sizes are numbers.

        The capture is made `at` these sizes that a program has refused, else at those `beside` each other in one call,
        by default at the typical ones, else at the largest so far. Elements of constants, and sizes that constants may
        decide, have those of the first call that has such constants.
        """
        here = {n: size for n, size in self.point(signature).items() if n not in without}
        given = tuple(self.sources[at] for at in sorted(self.given))
        if not here:
            return SymbolicSizes({}, {}, {}, given) if given else None
        names: dict[int, dict[int, str]] = {}
        elements: dict[int, dict[int, OpenElement]] = {}
        points: dict[str, int] = {}
        names_here = self.names_in(signature)
        shapes, values = self._first_like(signature)
        for (number, dim), name in names_here.items():
            if name not in here or self.size(signature.shapes, signature.values, (number, dim)) <= 1:
                continue
            if number < 0:
                unit = self.unit((number, dim % _width(signature.values[~number][0])))
                elements.setdefault(id(signature.constants[~number]), {})[dim] = OpenElement(name, unit)
                points[name] = self.size(shapes, values, (number, dim))
            else:
                names.setdefault(id(signature.tensors[number]), {})[dim] = name
                decided = bool(values) and (number, dim) not in self.free
                points[name] = max(points.get(name, 0), shapes[number][dim] if decided else self.points[number, dim])
        ranges: dict[str, tuple[int, int | None]] = {}
        for size in self.declared.values():
            if size.max is not None:
                ranges[size.name] = (2, size.max)
            if size.typical is not None and size.name in points:
                points[size.name] = size.typical
        points |= {n: size for n, size in (at or beside or {}).items() if n in points}
        bounded = {n: min(p, ranges[n][1] or p) if n in ranges else p for n, p in points.items()}
        exact = {name for place, name in names_here.items() if signature.values and place not in self.free}
        return SymbolicSizes(
            names, distinct(bounded, exact, stay=bool(elements)), ranges, given, elements=elements, asked=dict(at or {})
        )

    def _first_like(self, signature: Signature) -> tuple[Shapes, tuple[Value, ...]]:
        """Return the shapes and constants of the first call with constants that the same program serves: the same on all
        ranks, which must make equal programs."""
        form = self._form(signature.shapes, signature.values)
        for values, shapes in self.by_values.items():
            if self._form(shapes, values) == form:
                return shapes, values
        return self.by_values.get(signature.values, signature.shapes), signature.values

    def _form(self, shapes: Shapes, values: tuple[Value, ...]) -> Any:
        """Return what calls have in common that one program may serve."""
        names = self._names_for(values)
        dims = [
            tuple(names.get((number, dim), size) if size > 1 else size for dim, size in enumerate(shape))
            for number, shape in enumerate(shapes)
        ]
        elements = [
            (shape, tuple(names.get((~constant, at), number) for at, number in enumerate(numbers)))
            for constant, (shape, numbers) in enumerate(values)
        ]
        return dims, elements

    def note_constants(self, constants: Collection[str]) -> None:
        """Make Python numbers that a program could not be given constants again, by their names in captures."""
        positions = {at for at, source in enumerate(self.sources) if source in constants}
        self.constant |= positions & self.given
        self.given -= positions


def _identifier(path: str) -> str:
    """Return the name of an input as the beginning of names of sizes."""
    argument = "".join(c if c.isalnum() else "_" for c in path).strip("_") or "input"
    return argument if argument.isidentifier() else f"input_{argument}"


def _width(shape: tuple[int, ...]) -> int:
    """Return how many columns a constant has: those of a table; of a list each element is one."""
    return max(shape[-1], 1) if shape else 1


def _index(at: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of an element in a tensor of this shape."""
    index: list[int] = []
    for size in reversed(shape):
        index.insert(0, at % size)
        at //= size
    return tuple(index) or (0,)


def _other_columns(one: Value, other: Value) -> set[int]:
    """Return the columns in which two values of a constant differ. (Of tables with other numbers of rows these are the
    columns with other numbers in them.)"""
    (shape, elements), (other_shape, other_elements) = one, other
    width = _width(shape)
    if width != _width(other_shape):
        return {EVERY}
    if shape == other_shape:
        return {at % width for at, (a, b) in enumerate(zip(elements, other_elements, strict=True)) if a != b}
    return {column for column in range(width) if set(elements[column::width]) != set(other_elements[column::width])}


class LearnedSizes:
    """The families of a model's calls. Dimensions that are `padded` are numbers in programs, and so is each element of
    the inputs that `values` names."""

    def __init__(
        self,
        dynamic: Mapping[str, Mapping[str, Size]],
        parameters: Sequence[inspect.Parameter],
        padded: Mapping[str, Collection[int]] = MappingProxyType({}),
        values: Collection[str] = (),
    ) -> None:
        self.dynamic, self.parameters, self.padded = dynamic, tuple(parameters), padded
        self.sizes = declared(dict(dynamic))  # type: ignore[arg-type]
        self.values = frozenset(values)
        self._families: dict[str, Family] = {}

    def family(self, signature: Signature) -> Family:
        """Return the family of calls of this form. Raises `SignatureError` where the plan declares a dimension that an
        argument does not have, or sizes of what is no tensor."""
        known = self._families.get(signature.family)
        if known is None:
            paths = signature.paths([p.name for p in self.parameters])
            whole = tuple(not t.is_floating_point() and not t.is_complex() for t in signature.tensors)
            known = self._families[signature.family] = Family(
                paths, whole, signature.sources(self.parameters), self._declared(signature, paths)
            )
            known.elements = self._elements(signature)
            known.scattered = self._scattered(signature, paths)
            known.padded = {(number, dim) for number, path in enumerate(paths) for dim in self.padded.get(path, ())}
        return known

    def _elements(self, signature: Signature) -> dict[int, str]:
        """Return the names of the constants whose elements may be sizes, by their numbers: those that are not declared
        to be constants."""
        leaves = inputs_by_path([p.name for p in self.parameters], *signature.call) if signature.constants else {}
        paths_by_id = {id(leaf): path for path, leaf in leaves.items()}
        named = [(at, paths_by_id[id(constant)]) for at, constant in enumerate(signature.constants)]
        known = {at for at, constant in enumerate(signature.constants) if constant.dtype in KNOWN_DTYPES}
        return {at: path for at, path in named if path not in self.values and at in known}

    def opened(self, signature: Signature, *, anticipate: bool = False) -> SymbolicSizes | None:
        """Return the sizes that a capture for one call has as symbols: the declared ones, and those that are likely to
        differ if it is to `anticipate` them. Raises as `family` and `Family.point` do."""
        family = self.family(signature)
        family.learn([(signature.shapes, signature.values)], anticipate=anticipate)
        return family.open_sizes(signature)

    def _declared(self, signature: Signature, paths: Sequence[str]) -> dict[Place, Size]:
        declared_sizes: dict[Place, Size] = {}
        for number, path in enumerate(paths):
            for dim, size in self.dynamic.get(path, {}).items():
                if int(dim) >= signature.tensors[number].dim():
                    raise SignatureError(
                        f"dynamic names dimension {dim} of {path}, which has {signature.tensors[number].dim()} dimensions",
                        where=f"dynamic.{path}",
                        hint="dimensions count from 0",
                    )
                declared_sizes[number, int(dim)] = self.sizes[size.name]
        return declared_sizes

    def _scattered(self, signature: Signature, paths: Sequence[str]) -> tuple[str, ...]:
        """Return the inputs whose sizes the plan declares and that are not contiguous. Raises `SignatureError` for what
        has no sizes."""
        others = [name for name in self.dynamic if name not in paths]
        leaves = inputs_by_path([p.name for p in self.parameters], *signature.call) if others else {}
        scattered = []
        for name in others:
            leaf = leaves.get(name)  # (None: a batch without it)
            inside = [path for path in leaves if path.startswith((f"{name}.", f"{name}["))]
            if inside or not (leaf is None or isinstance(leaf, torch.Tensor)):
                raise SignatureError(
                    f"dynamic declares sizes of {name}, which {'has inputs inside' if inside else f'is no tensor, but a {type(leaf).__name__}'}",
                    where=f"dynamic.{name}",
                    hint=f"name one of them: {inside[0]!r}" if inside else "leave it out",
                )
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_contiguous():
                scattered.append(name)
        return tuple(scattered)


def refuse_unknown_arguments(named: Mapping[str, object], forward: Callable[..., Any], where: str) -> None:
    """Raise `PlanError` for an argument, `named` by a field of the plan, that forward does not have."""
    parameters = list(signature_of(forward).parameters.values())[1:]
    kinds = inspect.Parameter
    if any(p.kind is kinds.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters]
    for name in named:
        if re.split(r"[.\[]", name)[0] not in known:
            raise PlanError(
                f"forward has no argument {name!r}", where=f"{where}.{name}", hint=did_you_mean(name, known)
            )


def refuse_unknown_sizes(
    named: Iterable[str], dynamic: Mapping[str, Any], forward: Callable[..., Any], where: str
) -> None:
    """Raise `PlanError` for a name, in a field of the plan, that no size of a call can have: neither a declared one nor
    one that `Family` invents."""
    parameters = list(signature_of(forward).parameters.values())[1:]
    inputs = "|".join(r"\w+" if p.kind is p.VAR_KEYWORD else re.escape(p.name) for p in parameters)
    of_input = re.compile(rf"(?:{inputs})\w*_\d+(?:_by_\d+)?_*")
    simple = [*declared(dict(dynamic)), "batch", "seq"]
    for name in named:
        if name not in simple and not of_input.fullmatch(name):
            raise PlanError(
                f"no size can be named {name!r}",
                where=where,
                why="sizes have the names that dynamic declares, batch, seq, or those of an input and of one of its dimensions or elements",
                hint=did_you_mean(name, [*simple, *(f"{p.name}_0" for p in parameters)]),
            )
