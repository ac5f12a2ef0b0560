"""The faults that `tests/mutations.py` plants: one place of the sources each, and the tests that are to find it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """In `file`, `before` becomes `after`. `wall` is what should have stopped it: storage, versions, layout, Python, ranks."""

    name: str
    wall: str
    what: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    def planted(self, source: str) -> str:
        """The source with the fault. Raises `ValueError` unless the place is there once."""
        if source.count(self.before) != 1:
            raise ValueError(f"{self.name}: {source.count(self.before)} places in {self.file} are {self.before!r}")
        return source.replace(self.before, self.after)


FAULTS: tuple[Fault, ...] = (
    # -- storage: what leaves a program is owned ----------------------------------------------------------------------
    Fault(
        "gradients-in-one-storage",
        "storage",
        "the same storage is handed out for two gradients",
        "zgraph/capture/storages.py",
        "        if not own:\n            value = value.clone()",
        "        if not own and not value.numel():\n            value = value.clone()",
        ("tests/test_gradients_are_owned.py",),
    ),
    Fault(
        "expanded-gradient",
        "storage",
        "a gradient whose elements are one in memory is handed out as it is",
        "zgraph/capture/storages.py",
        "own = id(value) not in taken and torch_private.elements_are_apart(value)",
        "own = id(value) not in taken",
        ("tests/test_storages.py",),
    ),
    Fault(
        "tangent-as-gradient",
        "storage",
        "the user's own tangent becomes a gradient that is added to",
        "zgraph/capture/storages.py",
        "    taken = set(others)\n",
        "    taken = set[int]()\n",
        ("tests/test_gradients_are_owned.py",),
    ),
    Fault(
        "output-is-a-view",
        "storage",
        "an output that is a view of what the program made can't be written to",
        "zgraph/capture/storages.py",
        "        return value.detach() if value._is_view() else value",
        "        return value",
        ("tests/test_outputs_are_owned.py",),
    ),
    Fault(
        "autograd-grad-takes-what-waits",
        "storage",
        "torch.autograd.grad is given the gradients that wait for a reduction as well",
        "zgraph/runtime/runtime.py",
        "        return _Reduction(added=into & waiting, rest=bool(into))",
        "        return _Reduction(added=frozenset(waiting), rest=True)",
        ("tests/test_waiting_gradients.py",),
    ),
    # -- versions: what a backward reads is as it was -----------------------------------------------------------------
    Fault(
        "outputs-version-unread",
        "versions",
        "an output that the backward reads is changed in place",
        "zgraph/runtime/versions.py",
        "                if torch_private.version(seen) != then:",
        "                if torch_private.version(seen) < then:",
        ("tests/test_versions.py",),
    ),
    Fault(
        "inputs-version-unread",
        "versions",
        "an input or a buffer that the backward reads is changed in place",
        "zgraph/runtime/versions.py",
        "        inputs = range(len(flat)) if whole else late | self.sharing.read_inputs",
        "        inputs = range(len(flat)) if whole else frozenset()",
        ("tests/test_versions.py",),
    ),
    Fault(
        "weights-version-unread",
        "versions",
        "a weight is changed between a forward and its backward",
        "zgraph/runtime/versions.py",
        "            if name in read and self.of_param(name) != self.params[name]:",
        "            if name in read and self.of_param(name) == ():",
        ("tests/test_versions.py", "tests/test_compile.py"),
    ),
    Fault(
        "too-strict",
        "versions",
        "a change of what no backward reads is an error",
        "zgraph/runtime/versions.py",
        "        inputs = range(len(flat)) if whole else late | self.sharing.read_inputs",
        "        inputs = range(len(flat))",
        ("tests/test_versions.py",),
    ),
    # -- layout: values lie as their programs were captured for -------------------------------------------------------
    Fault(
        "stride-off",
        "layout",
        "an operator's result with other strides than promised is read as if it had these",
        "codegen/eager.py",
        "            if not lies_as(value, self._strides[name]):",
        "            if value.dim() < 0:",
        ("tests/test_layouts.py",),
    ),
    Fault(
        "inputs-stride-off",
        "layout",
        "tangents and inputs come in with whatever strides they have",
        "codegen/executable.py",
        "            if values[at].stride() != strides:",
        "            if values[at].dim() < 0:",
        ("tests/test_layouts.py",),
    ),
    Fault(
        "too-many-copies",
        "layout",
        "every result is laid out anew",
        "codegen/eager.py",
        "            if not lies_as(value, self._strides[name]):",
        "            if value.dim():",
        ("tests/test_layouts.py",),
    ),
    # -- Python: what forward reads and changes -----------------------------------------------------------------------
    Fault(
        "tensor-guards-dropped",
        "Python",
        "a tensor that forward finds in an attribute, a list or a global takes another form unnoticed",
        "zgraph/torch_compat/guards.py",
        "            not isinstance(e.value, FakeTensor)",
        "            not isinstance(e.value, torch.Tensor)",
        ("tests/test_python_state.py",),
    ),
    Fault(
        "guards-dropped",
        "Python",
        "nothing that forward reads is looked at again",
        "zgraph/torch_compat/guards.py",
        "        if guards.check(scope):\n            return None",
        "        if guards.check(scope) or scope:\n            return None",
        ("tests/test_python_state.py",),
    ),
    Fault(
        "closures-unread",
        "Python",
        "what forward's own closure holds is as it was at the capture",
        "zgraph/torch_compat/guards.py",
        "                found[name] = cell.cell_contents",
        "                found.setdefault(name, self._function.__closure__ and cell.cell_contents if owner is None else None)",
        ("tests/test_python_state.py",),
    ),
    Fault(
        "appended-item-lost",
        "Python",
        "a list that a hook appends to gets one item too few",
        "zgraph/torch_compat/guards.py",
        '    new = variable.__dict__["items"][known:]',
        '    new = variable.__dict__["items"][known + 1 :]',
        ("tests/test_python_state.py",),
    ),
    Fault(
        "read-list-taken-for-appended",
        "Python",
        "a list whose length forward reads is taken for one that it only appends to",
        "zgraph/torch_compat/guards.py",
        "            mutation.is_read = True",
        "            mutation.is_read = False",
        ("tests/test_python_state.py",),
    ),
    Fault(
        "global-effect-lost",
        "Python",
        "a global that forward assigns keeps its old value",
        "zgraph/torch_compat/guards.py",
        "                    there[name] = names[name]",
        "                    there.setdefault(name, names[name])",
        ("tests/test_python_state.py",),
    ),
    Fault(
        "number-input-stale",
        "Python",
        "a number that forward changes comes into the program as it was at the capture",
        "zgraph/torch_compat/numbers.py",
        "            return [numbers[at] if number else results[at] for number, at in self.outputs]",
        "            return [(numbers[at] and 1) if number else results[at] for number, at in self.outputs]",
        ("tests/test_python_state.py",),
    ),
    Fault(
        "buffers-gradient-unread",
        "Python",
        "a buffer that is to have a gradient from now on gets none",
        "zgraph/capture/cache_key.py",
        """{', grad' if b.requires_grad else ''}" for b in""",
        """" for b in""",
        ("tests/test_python_state.py",),
    ),
    Fault(
        "assertion-dropped",
        "Python",
        "what a model asserts of values is no part of its program",
        "zgraph/capture/asserts.py",
        "            results.append((Port(OutputRole.CHECK, made.name), made))",
        "            results += [(Port(OutputRole.CHECK, made.name), made)][1:]",
        ("tests/test_asserts.py",),
    ),
    Fault(
        "aliased-inputs-unseen",
        "storage",
        "a program for two tensors runs for one tensor given twice",
        "zgraph/capture/cache_key.py",
        """return f"inputs ({inputs}{same});""",
        """return f"inputs ({inputs}{same[:0]});""",
        ("tests/test_aliased_inputs.py",),
    ),
    # -- ranks and optimizers -----------------------------------------------------------------------------------------
    Fault(
        "another-ranks-shard",
        "ranks",
        "a rank loads the shards that another one has saved",
        "zgraph/parameters/foreign.py",
        "        if theirs is not None:",
        "        if theirs == ():",
        ("tests/test_foreign_shards.py",),
    ),
    Fault(
        "buffers-differ",
        "ranks",
        "buffers that differ between ranks stay different",
        "zgraph/api/compiler.py",
        "{**dict(model.named_parameters()), **dict(model.named_buffers())}\n    tensors = {n",
        "{**dict(model.named_parameters())}\n    tensors = {n",
        ("tests/test_same_on_all_ranks.py",),
    ),
    Fault(
        "learning-rates-differ",
        "ranks",
        "ranks update by different learning rates",
        "zgraph/update/numbers.py",
        '        return f"numbers {hashlib.sha256(packed).hexdigest()[:16]} {self.changed}"',
        '        return f"numbers {len(packed)} {self.changed}"',
        ("tests/test_optimizer_state.py",),
    ),
    Fault(
        "hooks-lost",
        "ranks",
        "hooks of a parameter do not go over to its shard",
        "zgraph/parameters/replaced.py",
        "    torch_private.move_hooks(old, fresh)\n",
        "",
        ("tests/test_made_before_compile.py",),
    ),
    Fault(
        "old-optimizer-trains-nothing",
        "ranks",
        "an optimizer that holds the parameters of before compile steps in silence",
        "zgraph/parameters/replaced.py",
        "        old.__class__ = ReplacedParameter",
        "        pass",
        ("tests/test_made_before_compile.py",),
    ),
    Fault(
        "momentum-lost",
        "ranks",
        "momentum that torch has saved begins anew",
        "zgraph/update/rules.py",
        ', _sgd, counts=False, begins="momentum_buffer"',
        ", _sgd, counts=False",
        ("tests/test_optimizer_state.py",),
    ),
    Fault(
        "pad-targets-counted",
        "ranks",
        "targets count that the model's own loss leaves out",
        "zgraph/capture/targets.py",
        "    return ids[0] if ids else IGNORED",
        "    return IGNORED",
        ("tests/test_ignored_targets.py",),
    ),
)
