"""Dynamo's guards and the side effects of a captured forward: as torch.compile knows them."""

from __future__ import annotations

import contextlib
import dis
import logging
import re
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo.guards
from torch import nn
from torch._dynamo.bytecode_transformation import create_call_method, create_instruction
from torch._dynamo.hooks import Hooks
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import CellVariable, ListVariable, NewGlobalVariable
from torch._dynamo.variables.base import AttributeMutationNew
from torch._dynamo.variables.lists import DequeVariable
from torch._subclasses.fake_tensor import FakeTensor

from zgraph.torch_compat.unguarded_state import UnguardedState

logger = logging.getLogger(__name__)

# Set in the __dict__ of a compiled model's former parameters: a program reads the parameters that replaced them.
REPLACED = "_zgraph_replaced"

_MISSING = object()


class Scope:
    """Binds a call to what dynamo's guards read: the arguments by the names of forward's parameters, and its closure."""

    def __init__(self, function: types.FunctionType) -> None:
        self._function = function
        self._binder = _binder(function.__code__)
        self._cells = list(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    @property
    def owner(self) -> str:
        """The name of the parameter that the module is bound to."""
        code = self._function.__code__
        return f"L['{code.co_varnames[0]}']" + ("" if code.co_argcount else "[0]")

    def lasts(self, guard: str, scope: dict[str, Any]) -> bool:
        """Return whether a guard is on something that outlives the call: the module, a global, a cell, a default."""
        root = re.search(r"\bL\['(\w+)'\]", guard)
        if root is None or root.group().startswith(self.owner) or self.owner in guard:
            return True
        if root.group(1) in self._function.__code__.co_freevars:
            return True
        defaults = [*(self._function.__defaults__ or ()), *(self._function.__kwdefaults__ or {}).values()]
        return any(scope.get(root.group(1)) is x for x in defaults)

    def readable(self, guard: str) -> str:
        """Return a guard's text in the user's words."""
        return re.sub(r"\b[LG]\['(\w+)'\]", r"\1", guard.replace(self.owner, "self"))

    def of(self, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the locals of forward's frame for this call."""
        self._binder.__defaults__ = self._function.__defaults__  # (they may have been replaced)
        self._binder.__kwdefaults__ = self._function.__kwdefaults__
        frame_locals: dict[str, Any] = self._binder(owner, *args, **kwargs)
        for name, cell in self._cells:
            with contextlib.suppress(ValueError):  # (an empty cell has no value to compare)
                frame_locals[name] = cell.cell_contents
        return frame_locals


def _binder(code: types.CodeType) -> types.FunctionType:
    """Return a function with the same parameters that returns them by name."""
    names = list(code.co_varnames)
    plain, keywords = names[: code.co_argcount], names[code.co_argcount :][: code.co_kwonlyargcount]
    rest = names[code.co_argcount + code.co_kwonlyargcount :]
    parts = [*plain]
    if code.co_posonlyargcount:
        parts.insert(code.co_posonlyargcount, "/")
    if code.co_flags & 0x04:
        parts.append(f"*{rest.pop(0)}")
    elif keywords:
        parts.append("*")
    parts += keywords
    if code.co_flags & 0x08:
        parts.append(f"**{rest[0]}")
    namespace: dict[str, Any] = {}
    exec(f"def bind({', '.join(parts)}): return locals()", namespace)
    return namespace["bind"]  # type: ignore[no-any-return]


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or (one != one and other != other))


@contextlib.contextmanager
def _quickly() -> Iterator[None]:
    """Build guards without timing them and without their verbose texts.

    For the timing dynamo empties the processor's caches (16 ms). The texts say where in forward each guard comes from,
    take a third of the remaining time, and nobody reads them.
    """
    there: Any = torch._dynamo.guards
    theirs = there.profile_guard_manager, there.get_verbose_code_part
    there.profile_guard_manager, there.get_verbose_code_part = lambda *_: 0.0, lambda part, _: part
    try:
        yield
    finally:
        there.profile_guard_manager, there.get_verbose_code_part = theirs


class Guards:
    """Everything that dynamo found a captured forward to depend on, to be checked before each call.

    Left out are guards on tensors that were fake at capture (parameters, buffers and the call's own tensors, whose
    forms are part of the signature), and on the lengths of lists that forward only appends to.
    """

    def __init__(
        self,
        output: Any,
        scope: Scope,
        code: types.CodeType,
        effects: Effects,
        bound: dict[str, Any],
        open_sizes: bool = False,
    ) -> None:
        """Build the guards of a capture. `bound` is the captured call, as `scope` binds it. With `open_sizes` guards on
        sizes are left out: the program checks them itself."""
        self._open = open_sizes
        self._scope = scope
        self._globals: dict[str, Any] = effects.namespace
        self._appended = {id(x) for x in effects.appended}
        self._numbers: dict[str, Any] = {}  # numbers that are constants of the capture, by their names in guards
        self._objects: list[Any] = []  # the guarded objects
        # Tensors that were not fake at capture, by their names in guards: the compiled name and requires_grad, which
        # torch 2.11 does not compare.
        self._trained: dict[str, tuple[types.CodeType, bool]] = {}
        self._held: list[Any] = []  # objects that guards know by their address, so they must stay alive
        captured = output.graph_capture_output
        with _quickly():
            self._manager = captured.build_guards(code, hooks=Hooks(guard_filter_fn=self._wanted))
        changed = [(x, n) for x, names in effects.objects for n in names]
        self._around = UnguardedState(captured.traced_code, self._objects, bound, changed)
        self._objects.clear()
        self._cached = effects.cached

    def failing(self, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Failing | None:
        """Return the first guard that no longer holds; None if all do."""
        scope = self._scope.of(owner, args, kwargs)
        changed = self._around.changed(scope)
        for function, given, named, value in self._cached:
            if changed is None and not _same(function(*given, **named), value):
                changed = f"{function.__qualname__} gives {value!r}"
        if changed is not None:
            return Failing(changed, None, lasts=True)
        guards = self._manager.guard_manager
        if guards.check(scope):
            return self._other_gradient(scope)
        failure = guards.check_verbose(scope)
        parts = [str(p).split("#")[0].strip() for p in failure.verbose_code_parts] or ["a global mode of torch"]
        stack = getattr(failure, "user_stack", None)
        where = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else None
        return Failing(self._scope.readable(parts[0]), where, self._scope.lasts(parts[0], scope))

    def _other_gradient(self, scope: dict[str, Any]) -> Failing | None:
        """Return a guard on a tensor whose `requires_grad` is not what it was at capture; None if there is none."""
        names = {"L": scope, "G": self._globals}
        for name, (read, before) in self._trained.items():
            with contextlib.suppress(Exception):  # (what can't be read by its name alone)
                if eval(read, names).requires_grad != before:
                    what = f"{self._scope.readable(name)}.requires_grad is {before}"
                    return Failing(what, None, self._scope.lasts(name, scope))
        return None

    @property
    def constant_numbers(self) -> Collection[str]:
        """The names of the numbers that are constants of the capture."""
        return self._numbers.keys()

    def changed_numbers(self, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the constant numbers that have another value now, or one that is made from a size, by name."""
        names = {"L": self._scope.of(owner, args, kwargs), "G": self._globals}
        changed: dict[str, Any] = {}
        for name, before in self._numbers.items():
            with contextlib.suppress(Exception):  # (what can't be read by its name alone stays a constant)
                now = eval(name, dict(names))
                if isinstance(now, torch.SymInt) or (type(now) is type(before) and now != before):
                    changed[name] = now
        return changed

    def _wanted(self, entries: Sequence[Any]) -> Sequence[bool]:
        for e in entries:  # guards are built twice, and a property may have given another object the first time
            e.orig_guard.obj_weakref = e.orig_guard.guarded_class_weakref = None
            real = e.guard_type == "TENSOR_MATCH" and not isinstance(e.value, FakeTensor)
            if real and REPLACED not in vars(e.value):
                name = e.orig_guard.name
                with contextlib.suppress(SyntaxError):
                    self._trained[name] = compile(name, name, "eval"), e.value.requires_grad
            if isinstance(e.value, torch.Tensor) or not e.has_value:
                continue
            self._objects.append(e.value)
            if "ID_MATCH" in e.derived_guard_types and not isinstance(e.value, nn.Module):
                self._held.append(e.value)
            if e.guard_type in ("CONSTANT_MATCH", "EQUALS_MATCH") and type(e.value) in (int, float):
                self._numbers[e.orig_guard.name] = e.value
        return [
            not isinstance(e.value, FakeTensor)
            and not (e.guard_type == "SHAPE_ENV" and self._open)
            and not (isinstance(e.value, torch.Tensor) and REPLACED in vars(e.value))
            and not (e.guard_type == "SEQUENCE_LENGTH" and id(e.value) in self._appended)
            for e in entries
        ]


@dataclass(frozen=True)
class Failing:
    """A guard that does not hold."""

    what: str  # the guard's text, in the user's words
    where: str | None  # the user's line that read it
    lasts: bool  # whether it is on something that outlives the call, not on an argument


@dataclass
class Effects:
    """The changes that a replay of a captured forward makes to Python objects that existed before."""

    containers: list[Any] = field(default_factory=list)  # lists, dicts, sets that are changed
    # objects whose attributes are set, with their names
    objects: list[tuple[Any, list[str]]] = field(default_factory=list)
    cells: list[types.CellType] = field(default_factory=list)  # closure cells that are written to
    globals: list[str] = field(default_factory=list)  # names of globals that are written to
    # the user's lines that take from an iterator, or draw from a random.Random
    consumed: list[str] = field(default_factory=list)
    appended: list[Any] = field(default_factory=list)  # watched lists that are only appended to
    namespace: dict[str, Any] = field(default_factory=dict)  # the globals of forward's module
    # calls of functions behind functools.lru_cache: function, arguments, keywords, result
    cached: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether a replay changes nothing."""
        return not (self.containers or self.objects or self.cells or self.globals)

    def held(self) -> list[Any]:
        """Return the current values of all that a replay writes to, in one list."""
        values: list[Any] = []
        for container in self.containers:
            values += [len(container), *container, *(container.values() if isinstance(container, dict) else ())]
        values += [getattr(value, name, _MISSING) for value, names in self.objects for name in names]
        values += [getattr(cell, "cell_contents", _MISSING) for cell in self.cells]
        return values + [self.namespace.get(name, _MISSING) for name in self.globals]

    def unchanged_by(self, run: Callable[[], Any]) -> bool:
        """Return whether `run` succeeds and leaves all that a replay writes to as it was. Its changes are undone."""
        before = self.held()
        try:
            with self.undone():
                run()
                after = self.held()
        except Exception as error:  # (the user's own code, which raises anything)
            logger.debug("forward does not run a second time: %s", error)
            return False
        return len(before) == len(after) and all(map(_as_it_was, before, after))

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Undo at the end the changes that a replay makes inside."""
        undo = [
            *(_container(c) for c in self.containers),
            *(_attributes(o, names) for o, names in self.objects),
            *(_cell(c) for c in self.cells),
            *(_item(self.namespace, name) for name in self.globals),
        ]
        try:
            yield
        finally:
            for step in reversed(undo):
                step()


def _as_it_was(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, int | float | str | bytes) and one == other)


def _container(value: Any) -> Callable[[], None]:
    if isinstance(value, dict):
        kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        items = list(kind.items(value))

        def restore() -> None:
            if len(value) != len(items) or any(
                a is not c or b is not d for (a, b), (c, d) in zip(kind.items(value), items, strict=True)
            ):
                kind.clear(value)
                for key, item in items:
                    kind.__setitem__(value, key, item)

        return restore
    before = list(value)

    def refill() -> None:
        if len(value) != len(before) or any(a is not b for a, b in zip(value, before, strict=True)):
            value.clear()
            (value.update if isinstance(value, set) else value.extend)(before)

    return refill


def _attributes(value: Any, names: Sequence[str]) -> Callable[[], None]:
    if isinstance(value, type):
        former_values = {n: value.__dict__.get(n, _MISSING) for n in names}
    else:
        slots = [n for n in names if isinstance(getattr(type(value), n, None), types.MemberDescriptorType)]
        former_values = {n: getattr(value, n, _MISSING) for n in slots}
    tables = [t for t in (getattr(value, "__dict__", None),) if isinstance(t, dict)]
    if isinstance(value, nn.Module):  # (an attribute that is a tensor or module is kept in one of these)
        tables += [value._parameters, value._buffers, value._modules]
    steps = [_container(t) for t in tables]

    def restore() -> None:
        for step in steps:
            step()
        for name, old in former_values.items():
            if old is _MISSING:
                with contextlib.suppress(AttributeError):
                    delattr(value, name)
            else:
                setattr(value, name, old)

    return restore


def _cell(cell: types.CellType) -> Callable[[], None]:
    try:
        before = cell.cell_contents
    except ValueError:
        before = _MISSING

    def restore() -> None:
        if before is _MISSING:
            with contextlib.suppress(ValueError):
                del cell.cell_contents
        else:
            cell.cell_contents = before

    return restore


def _item(table: dict[str, Any], name: str) -> Callable[[], None]:
    before = table.get(name, _MISSING)

    def restore() -> None:
        if before is _MISSING:
            table.pop(name, None)
        else:
            table[name] = before

    return restore


@contextlib.contextmanager
def recorded(function: types.FunctionType, watched: Sequence[Any] = ()) -> Iterator[Effects]:
    """Record the side effects of the forward that dynamo captures inside.

    A `watched` list that forward only appends to gets the new items appended at each replay, whatever it holds then.
    (By itself dynamo writes the whole list as it was at capture.)
    """
    effects = Effects(namespace=function.__globals__)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    update, track = SideEffects.codegen_update_mutated, SideEffects.track_mutable
    ids = {id(x) for x in watched}

    def track_watched(self: Any, item: Any, variable: Any, *rest: Any, **named: Any) -> Any:
        variable = track(self, item, variable, *rest, **named)
        if id(item) in ids and type(variable) in _WATCHED and getattr(item, "maxlen", None) is None:
            variable.__class__ = _WATCHED[type(variable)]
            variable.mutation_type.is_read = False
        return variable

    def noting(self: Any, cg: Any, *rest: Any, **named: Any) -> Any:
        _note(self, effects, cells)
        by_id = {id(x): x for x in self.keepalive}
        appending = [
            (by_id[key], v)
            for key, v in self.id_to_variable.items()
            if isinstance(v, _Appended) and not v.is_read and self.is_modified(v)
        ]
        effects.appended = [x for x, _ in appending]
        for watched_list, variable in appending:
            _extend(cg, variable, len(watched_list))
            variable.mutation_type.is_modified = False
        try:
            return update(self, cg, *rest, **named)
        finally:
            for _, variable in appending:
                variable.mutation_type.is_modified = True

    SideEffects.codegen_update_mutated = noting  # type: ignore[method-assign]
    SideEffects.track_mutable = track_watched  # type: ignore[method-assign,assignment]
    try:
        yield effects
    finally:
        SideEffects.codegen_update_mutated = update  # type: ignore[method-assign]
        SideEffects.track_mutable = track  # type: ignore[method-assign]


class _Appended:
    """Mixed into dynamo's variable for a list: records whether the list is read, or only appended to."""

    mutation_type: Any

    # The notes are kept on the mutation type: dynamo copies its variables with everything in their dictionaries.
    @property
    def items(self) -> Any:
        mutation = self.__dict__.get("mutation_type")
        if mutation is not None and not getattr(mutation, "appending", False):
            mutation.is_read = True
        return self.__dict__["items"]

    @items.setter
    def items(self, value: Any) -> None:
        self.__dict__["items"] = value

    @property
    def is_read(self) -> bool:
        return bool(getattr(self.__dict__.get("mutation_type"), "is_read", True))

    def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name not in ("append", "extend"):
            return super().call_method(tx, name, args, kwargs)  # type: ignore[misc]
        mutation = self.__dict__["mutation_type"]
        before, mutation.appending = getattr(mutation, "appending", False), True
        try:
            return super().call_method(tx, name, args, kwargs)  # type: ignore[misc]
        finally:
            mutation.appending = before


class _AppendedList(_Appended, ListVariable):
    pass


class _AppendedDeque(_Appended, DequeVariable):
    pass


_WATCHED: dict[type, type] = {ListVariable: _AppendedList, DequeVariable: _AppendedDeque}


def _extend(cg: Any, variable: Any, known: int) -> None:
    """Write bytecode that appends to a list the items that it got after its first `known` ones."""
    new = variable.__dict__["items"][known:]
    cg(variable.source)
    cg.load_method("extend")
    cg.foreach(new)
    cg.append_output(create_instruction("BUILD_LIST", arg=len(new)))
    cg.extend_output([*create_call_method(1), create_instruction("POP_TOP")])


def _note(effects: Any, noted: Effects, cells: dict[str, types.CellType]) -> None:
    for notes in (noted.containers, noted.objects, noted.cells, noted.globals, noted.consumed):
        notes.clear()  # (dynamo writes its code twice)
    by_id = {id(x): x for x in effects.keepalive}
    for key, variable in effects.id_to_variable.items():
        if getattr(variable, "source", None) is None or not effects.is_modified(variable):
            continue
        target = by_id.get(key)
        names = list(effects.store_attr_mutations.get(variable, ()))
        if isinstance(variable, CellVariable):
            cell = target if isinstance(target, types.CellType) else cells.get(variable.local_name or "")
            if cell is not None:
                noted.cells.append(cell)
        elif isinstance(variable, NewGlobalVariable):
            noted.globals += names
        elif isinstance(target, (list, dict, set, deque)):
            noted.containers.append(target)
            if names:
                noted.objects.append((target, names))
        elif names:
            noted.objects.append((target, names))
        elif not isinstance(
            variable.mutation_type, AttributeMutationNew
        ):  # (a tensor that forward makes is new, so its mutation changes nothing)
            noted.consumed.append(_line(effects, variable))


def _line(effects: Any, variable: Any) -> str:
    stacks = effects.mutation_user_stacks.get(variable)
    return f"{stacks[0][-1].filename}:{stacks[0][-1].lineno}" if stacks else ""


def live(replay: types.FunctionType, function: types.FunctionType, graph: str) -> Callable[..., Any]:
    """Return a call of dynamo's replay that reads and writes globals, and takes defaults, as the captured function does
    at that time.

    (By itself dynamo gives the replay copies of both.) `graph` is the name by which the replay calls the graph.
    """
    code, names = replay.__code__, replay.__globals__
    there = function.__globals__
    used = [(i.opname, i.argval) for i in dis.get_instructions(code)]
    written = {n for op, n in used if op in ("STORE_GLOBAL", "DELETE_GLOBAL")}
    read = {n for op, n in used if op == "LOAD_GLOBAL" and n in there and n != graph} | written

    def call(*args: Any, **kwargs: Any) -> Any:
        replay.__defaults__, replay.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
        for name in read:
            if name in there:
                names[name] = there[name]
            else:
                names.pop(name, None)
        try:
            return replay(*args, **kwargs)
        finally:
            for name in written:
                if name in names:
                    there[name] = names[name]
                else:
                    there.pop(name, None)

    return call
