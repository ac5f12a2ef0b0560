"""The faults that `tests/mutations.py` plants: one place of the sources each, and the tests that are to find it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "zgraph": "zgraph",
    "passes": "zgraph/passes",
    "codegen": "zgraph/codegen",
}  # a folder, and where it is installed


def sources() -> dict[Path, str]:
    """The text of each file of the package, by its path in the repository."""
    files = [p for folder in PACKAGES for p in (ROOT / folder).rglob("*.py")]
    return {p.relative_to(ROOT): p.read_text() for p in sorted(files)}


@dataclass(frozen=True)
class Fault:
    """Somewhere in the sources, in whatever file, `before` becomes `after`. `wall` is what should have stopped it: storage, versions, layout,
    Python, optimizers, ranks. Of the `tests` (files, or tests in them) the first is the likeliest to find it."""

    name: str
    wall: str
    what: str
    before: str
    after: str
    tests: tuple[str, ...]

    def planted(self, texts: Mapping[Path, str]) -> tuple[Path, str]:
        """The file where the fault goes, and its text with it. Raises `ValueError` unless the place is there once."""
        places = [path for path, text in texts.items() for _ in range(text.count(self.before))]
        if len(places) != 1:
            raise ValueError(f"{self.name}: {len(places)} places in the sources are {self.before!r}")
        return places[0], texts[places[0]].replace(self.before, self.after)


FAULTS: tuple[Fault, ...] = (
    # -- storage: what leaves a program is owned ----------------------------------------------------------------------
    Fault(
        "gradients-in-one-storage",
        "storage",
        "the same storage is handed out for two gradients",
        "        if not own:\n            value = value.clone()",
        "        if not own and not value.numel():\n            value = value.clone()",
        ("tests/capture/test_gradients_are_owned.py::test_equal_gradients_are_two_tensors",),
    ),
    Fault(
        "expanded-gradient",
        "storage",
        "a gradient whose elements are one in memory is handed out as it is",
        "own = id(value) not in used_ids and ",
        "own = id(value) not in used_ids or not ",
        ("tests/capture/test_storages.py",),
    ),
    Fault(
        "tangent-as-gradient",
        "storage",
        "the user's own tangent becomes a gradient that is added to",
        "    used_ids = set(others)\n",
        "    used_ids = set[int]()\n",
        ("tests/capture/test_gradients_are_owned.py::test_a_group_of_one_rank_hands_out_owned_gradients",),
    ),
    Fault(
        "output-is-a-view",
        "storage",
        "an output that is a view of what the program made can't be written to",
        "        return value.detach() if value._is_view() else value",
        "        return value",
        ("tests/capture/test_outputs_are_owned.py::test_an_output_that_is_a_view_may_be_written_to",),
    ),
    Fault(
        "output-in-an-inputs-memory",
        "storage",
        "an output that plain PyTorch makes anew is handed out in an input's or a weight's memory",
        "            if lent or mixed or here in gathers:",
        "            if mixed or here in gathers:",
        ("tests/capture/test_outputs_are_owned.py::test_an_output_that_is_an_input_only_in_the_program_is_a_copy",),
    ),
    Fault(
        "autograd-grad-takes-what-waits",
        "storage",
        "torch.autograd.grad is given the gradients that wait for a reduction as well",
        "        return Reduction(added=into & waiting, rest=bool(into))",
        "        return Reduction(added=frozenset(waiting), rest=True)",
        ("tests/runtime/test_pending_gradients.py::test_autograd_grad_leaves_waiting_gradients_alone",),
    ),
    # -- versions: what a backward reads is as it was -----------------------------------------------------------------
    Fault(
        "outputs-version-unread",
        "versions",
        "an output that the backward reads is changed in place",
        "version(seen) != then:",
        "version(seen) < then:",
        ("tests/runtime/test_version_counters.py::test_a_write_before_the_backward_is_what_it_is_in_plain_pytorch",),
    ),
    Fault(
        "inputs-version-unread",
        "versions",
        "an input or a buffer that the backward reads is changed in place",
        "        inputs = range(len(flat)) if whole else late | self.sharing.read_inputs",
        "        inputs = range(len(flat)) if whole else frozenset()",
        ("tests/runtime/test_version_counters.py::test_a_write_before_the_backward_is_what_it_is_in_plain_pytorch",),
    ),
    Fault(
        "views-version-unread",
        "versions",
        "an input or a buffer is changed in place of which the backward reads a view that was saved",
        "late | self.sharing.read_inputs",
        "late",
        ("tests/runtime/test_version_counters.py::test_a_write_to_what_a_saved_value_is_a_view_of_is_refused",),
    ),
    Fault(
        "weights-version-unread",
        "versions",
        "a weight is changed between a forward and its backward",
        "            if name in read and self.of_param(name) != self.params[name]:",
        "            if name in read and self.of_param(name) == ():",
        ("tests/runtime/test_version_counters.py::test_a_write_before_the_backward_is_what_it_is_in_plain_pytorch",),
    ),
    Fault(
        "too-strict",
        "versions",
        "a change of what no backward reads is an error",
        "        inputs = range(len(flat)) if whole else late | self.sharing.read_inputs",
        "        inputs = range(len(flat))",
        ("tests/runtime/test_version_counters.py::test_a_write_before_the_backward_is_what_it_is_in_plain_pytorch",),
    ),
    # -- layout: values lie as their programs were captured for -------------------------------------------------------
    Fault(
        "stride-off",
        "layout",
        "an operator's result with other strides than promised is read as if it had these",
        "            if not has_strides(value, self._strides[name]):",
        "            if value.dim() < 0:",
        ("tests/codegen/test_layouts.py::test_results_with_other_strides_than_promised_change_no_number",),
    ),
    Fault(
        "inputs-stride-off",
        "layout",
        "tangents and inputs come in with whatever strides they have",
        "            if values[at].stride() != strides:",
        "            if values[at].dim() < 0:",
        ("tests/codegen/test_layouts.py::test_tangents_of_any_strides_are_those_of_plain_pytorch",),
    ),
    Fault(
        "strides-noted-only",
        "layout",
        "the run that finds results with other strides than promised does not lay them out itself",
        "            return self._as_promised(name, value)\n\n        results",
        "            return value\n\n        results",
        ("tests/codegen/test_layouts.py::test_results_with_other_strides_than_promised_change_no_number",),
    ),
    Fault(
        "too-many-copies",
        "layout",
        "every result is laid out anew",
        "            if not has_strides(value, self._strides[name]):",
        "            if value.dim():",
        ("tests/codegen/test_layouts.py::test_a_program_lays_out_only_what_lies_otherwise",),
    ),
    # -- Python: what forward reads and changes -----------------------------------------------------------------------
    Fault(
        "tensor-guards-dropped",
        "Python",
        "a tensor that forward finds in an attribute, a list or a global takes another form unnoticed",
        "            not isinstance(e.value, FakeTensor)",
        "            not isinstance(e.value, torch.Tensor)",
        ("tests/capture/test_python_state.py::test_a_tensor_that_forward_finds_may_take_another_form",),
    ),
    Fault(
        "guards-dropped",
        "Python",
        "nothing that forward reads is looked at again",
        "        if guards.check(scope):\n            return self._other_gradient(scope)",
        "        if guards.check(scope) or scope:\n            return None",
        ("tests/capture/test_python_state.py::test_what_a_forward_reads_of_its_surroundings_is_never_stale",),
    ),
    Fault(
        "closures-unread",
        "Python",
        "what forward's own closure holds is as it was at the capture",
        "self._cells = list(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))",
        "self._cells = [(n, types.CellType(c.cell_contents)) for n, c in zip(function.__code__.co_freevars, function.__closure__ or ())]",
        ("tests/capture/test_python_state.py::test_the_closure_of_forward_itself_is_read_at_every_call",),
    ),
    Fault(
        "appended-item-lost",
        "Python",
        "a list that a hook appends to gets one item too few",
        '    new = variable.__dict__["items"][known:]',
        '    new = variable.__dict__["items"][known + 1 :]',
        ("tests/capture/test_python_state.py::test_what_a_forward_changes_is_changed_at_every_call",),
    ),
    Fault(
        "read-list-taken-for-appended",
        "Python",
        "a list whose length forward reads is taken for one that it only appends to",
        "            mutation.is_read = True",
        "            mutation.is_read = False",
        ("tests/capture/test_python_state.py::test_a_state_that_is_another_at_every_call_is_refused",),
    ),
    Fault(
        "global-effect-lost",
        "Python",
        "a global that forward assigns keeps its old value",
        "                    there[name] = names[name]",
        "                    there.setdefault(name, names[name])",
        ("tests/capture/test_python_state.py::test_what_a_forward_changes_is_changed_at_every_call",),
    ),
    Fault(
        "number-input-stale",
        "Python",
        "a number that forward changes comes into the program as it was at the capture",
        "            return [numbers[at] if number else results[at] for number, at in self.outputs]",
        "            return [(numbers[at] and 1) if number else results[at] for number, at in self.outputs]",
        ("tests/capture/test_python_state.py::test_what_a_forward_changes_is_changed_at_every_call",),
    ),
    Fault(
        "buffers-gradient-unread",
        "Python",
        "a buffer that is to have a gradient from now on gets none",
        """{', grad' if b.requires_grad else ''}" for b in""",
        """" for b in""",
        ("tests/capture/test_python_state.py::test_a_gradient_that_is_asked_for_after_the_first_call_is_given",),
    ),
    Fault(
        "assertion-dropped",
        "Python",
        "what a model asserts of values is no part of its program",
        "            checks.append((Port(OutputRole.CHECK, new_node.name), new_node))",
        "            checks += [(Port(OutputRole.CHECK, new_node.name), new_node)][1:]",
        ("tests/capture/test_asserts.py::test_an_assertion_fails_as_in_plain_pytorch_and_names_its_line",),
    ),
    Fault(
        "aliased-inputs-unseen",
        "storage",
        "a program for two tensors runs for one tensor given twice",
        """family = f"inputs ({inputs}{same});""",
        """family = f"inputs ({inputs}{same[:0]});""",
        ("tests/capture/test_aliased_inputs.py::test_a_call_with_aliased_tensors_is_right_or_refused",),
    ),
    # -- ranks and optimizers -----------------------------------------------------------------------------------------
    Fault(
        "another-ranks-shard",
        "ranks",
        "a rank loads the shards that another one has saved",
        "        if theirs is not None:",
        "        if theirs == ():",
        ("tests/parameters/test_foreign_shards.py::test_shards_of_another_rank_are_refused",),
    ),
    Fault(
        "buffers-differ",
        "ranks",
        "buffers that differ between ranks stay different",
        "{**dict(model.named_parameters()), **dict(model.named_buffers())}\n    tensors = {n",
        "{**dict(model.named_parameters())}\n    tensors = {n",
        ("tests/ranks/test_rank_votes.py::test_buffers_that_differ_become_those_of_rank_0",),
    ),
    Fault(
        "learning-rates-differ",
        "ranks",
        "ranks update by different learning rates",
        "hashlib.sha256(packed).hexdigest()[:16]",
        "len(packed)",
        ("tests/update/test_optimizer_state.py::test_numbers_and_states_that_differ_between_ranks_are_refused_on_all",),
    ),
    Fault(
        "hooks-lost",
        "ranks",
        "hooks of a parameter do not go over to its shard",
        "    tensor_hooks.move_hooks(old, fresh)\n",
        "",
        (
            "tests/capture/test_made_before_compile.py::test_hooks_and_gradients_stay_with_a_parameter_that_is_stored_anew",
            "tests/capture/test_made_before_compile.py::test_hooks_registered_before_act_on_the_reduced_gradient_of_each_backward",
        ),
    ),
    Fault(
        "old-optimizer-trains-nothing",
        "ranks",
        "an optimizer that holds the parameters of before compile steps in silence",
        "        old.__class__ = ReplacedParameter",
        "        pass",
        (
            "tests/capture/test_made_before_compile.py::test_an_optimizer_made_before_on_the_meta_device_is_refused",
            "tests/capture/test_made_before_compile.py::test_what_holds_parameters_that_were_replaced_is_refused_at_first_use",
        ),
    ),
    Fault(
        "momentum-lost",
        "ranks",
        "momentum that torch has saved begins anew",
        ', _sgd, counts=False, begins="momentum_buffer"',
        ", _sgd, counts=False",
        ("tests/update/test_optimizer_state.py::test_a_state_dict_of_torch_goes_on_as_torch_does_and_back",),
    ),
    Fault(
        "pad-targets-counted",
        "ranks",
        "targets count that the model's own loss leaves out",
        "    return ids[0] if ids else IGNORED",
        "    return IGNORED",
        ("tests/capture/test_ignored_targets.py::test_a_models_own_ignore_index_is_what_does_not_count",),
    ),
    Fault(
        "outputs-in-one-memory",
        "storage",
        "two outputs that plain PyTorch makes each by itself are handed out in one memory",
        "not plain.same(port.index, other)",
        "other is None",
        ("tests/capture/test_outputs_are_owned.py::test_writes_to_outputs_reach_nothing_else",),
    ),
    Fault(
        "overlap-unseen",
        "storage",
        "a forward writes to one of two buffers that view each other",
        "if pair and overlap(span(flat[one]), span(flat[other])):",
        "if pair and span(flat[one]) == (0, 0):",
        ("tests/capture/test_aliased_inputs.py::test_buffers_that_view_each_other_are_refused_where_one_is_written",),
    ),
    Fault(
        "virtual-stride-off",
        "layout",
        "values on virtual ranks have whatever strides their operators give",
        "env[node] = result if strides is None else laid_out(result, strides)",
        "env[node] = result",
        ("tests/verification/test_virtual.py::test_a_view_of_what_is_laid_out_otherwise_than_captured_is_a_copy",),
    ),
    Fault(
        "offset-unseen",
        "layout",
        "as_strided reads a tensor that begins within its storage",
        "        if flat[at].storage_offset():",
        "        if flat[at].storage_offset() < 0:",
        ("tests/capture/test_value_sizes.py::test_as_strided_of_what_begins_within_its_storage_is_refused",),
    ),
    Fault(
        "debug-mode-blind",
        "layout",
        "the debug mode looks at no strides",
        "tuple(given.shape) == tuple(fake.shape) and has_strides(given, expected)",
        "tuple(given.shape) == tuple(fake.shape)",
        ("tests/codegen/test_debug_mode.py::test_strides_that_are_not_kept_are_found",),
    ),
    Fault(
        "defaults-unread",
        "Python",
        "forward's defaults are those of the capture",
        "        self._binder.__defaults__ = self._function.__defaults__",
        "        self._binder.__defaults__ = self._binder.__defaults__ or self._function.__defaults__",
        ("tests/capture/test_python_state.py::test_defaults_of_forward_itself_are_read_at_every_call",),
    ),
    Fault(
        "classes-unread",
        "Python",
        "a method or a number of a class is replaced unnoticed",
        "            if get(kind, name) is not value:",
        "            if get(kind, name) is None:",
        ("tests/capture/test_python_state.py::test_what_a_forward_reads_of_its_surroundings_is_never_stale",),
    ),
    Fault(
        "missing-attribute-unread",
        "Python",
        "an attribute that was missing at the capture is there unnoticed",
        "            if len(table) != size and",
        "            if len(table) < 0 and",
        ("tests/capture/test_python_state.py::test_what_a_forward_reads_of_its_surroundings_is_never_stale",),
    ),
    Fault(
        "arguments-aliases-unread",
        "Python",
        "two arguments become one object unnoticed",
        "        if _aliases(scope) != self._aliases:",
        "        if len(_aliases(scope)) != len(self._aliases):",
        ("tests/capture/test_python_state.py::test_which_arguments_are_one_object_is_read_at_every_call",),
    ),
    Fault(
        "global-hooks-unread",
        "Python",
        "a hook of all modules is registered unnoticed",
        "            if (hooks or before) and tuple",
        "            if (hooks and before) and tuple",
        ("tests/capture/test_python_state.py::test_what_a_forward_reads_of_its_surroundings_is_never_stale",),
    ),
    Fault(
        "environment-unread",
        "Python",
        "an environment variable is another one unnoticed",
        "        if self._environment is not None and",
        "        if self._environment is None and",
        ("tests/capture/test_python_state.py::test_what_a_forward_reads_of_its_surroundings_is_never_stale",),
    ),
    Fault(
        "effects-of-the-capture",
        "Python",
        "what forward changes is changed by its capture as well",
        "            for step in reversed(undo):",
        "            for step in undo[:0]:",
        ("tests/capture/test_python_state.py::test_what_a_forward_changes_is_changed_at_every_call",),
    ),
    Fault(
        "dynamic-sizes",
        "Python",
        "a size that is marked as dynamic for torch.compile becomes a symbol of the capture",
        "form(tensor, tx, source, True, ",
        "form(tensor, tx, source, static_shapes, ",
        ("tests/capture/test_odd_calls.py::test_what_torch_compile_is_told_of_sizes_changes_nothing",),
    ),
    Fault(
        "replaced-forward-unseen",
        "Python",
        "a forward that is put on the model is run without zgraph",
        "        elif given is not self._wrapper:",
        "        elif given is None:",
        ("tests/capture/test_replaced_forward.py::test_a_forward_that_is_replaced_after_compile_is_what_runs",),
    ),
    Fault(
        "conjugate-unread",
        "Python",
        "an input that is marked as a conjugate is read without the mark",
        "        return x.resolve_conj().resolve_neg()",
        "        return x.resolve_neg()",
        ("tests/capture/test_odd_calls.py::test_inputs_that_are_marked_as_conjugate_or_negative_are_read_as_such",),
    ),
    Fault(
        "states-not-read-back",
        "optimizers",
        "what a user puts into an optimizer's state is shown and not used",
        "                elif key != STEP_KEY:\n                    copy_state(mine[key], value)\n",
        "",
        ("tests/update/test_optimizer_state.py::test_what_is_changed_in_the_state_acts_as_in_torch",),
    ),
    Fault(
        "written-count-unseen",
        "optimizers",
        "a count of updates that parameters share is written to for one of them",
        "tensor._version != version",
        "tensor._version < version",
        ("tests/update/test_optimizer_state.py::test_what_no_update_can_go_on_from_is_refused_and_changes_nothing",),
    ),
    Fault(
        "sequence-cut",
        "optimizers",
        "train_step cuts a sequence that comes first in time",
        "    if len(_selected(first, axes, forward)) > 1:",
        "    if len(_selected(first, axes, forward)) < 0:",
        ("tests/capture/test_what_is_the_batch.py::test_a_sequence_that_comes_first_is_not_cut",),
    ),
    Fault(
        "class-weights-cut",
        "optimizers",
        "train_step cuts a vector that has the batch's size by coincidence",
        "not mine & batch and _known(",
        "not mine and _known(",
        ("tests/capture/test_what_is_the_batch.py::test_what_has_the_batchs_size_by_coincidence_is_not_cut",),
    ),
    Fault(
        "labels-beside-unknown-rows",
        "optimizers",
        "labels are no part of the batch where rows have gone through an operator whose axes are not known",
        "        if mine & read or (batch & read and",
        "        if mine & read or (not batch and",
        ("tests/capture/test_what_is_the_batch.py::test_labels_of_rows_that_went_through_what_is_not_known_are_cut",),
    ),
    Fault(
        "blocks-cut",
        "optimizers",
        "a rank of `tp` has parts of the blocks of 8-bit states",
        "    return shape[2:] != whole[2:] or math.prod(shape[1:]) % block != 0",
        "    return False",
        ("tests/update/test_8bit_divided.py::test_a_checkpoint_goes_on_bit_for_bit_and_as_on_undivided_weights",),
    ),
    Fault(
        "first-death-by-time-alone",
        "ranks",
        "the rank whose death is told first is another than the one that the others have lost",
        "key=lambda entry: (entry[0].followed(), entry[0].asked, entry[2])",
        "key=lambda entry: (entry[0].asked, entry[2])",
        ("tests/launch/test_launch.py::test_a_rank_that_lost_another_is_told_after_one_that_says_nothing_of_it",),
    ),
    Fault(
        "former-memory-unread",
        "ranks",
        "a slice of a parameter that became a shard keeps the values from before",
        "if overlap(mine, _extent(f.form))]",
        "if mine == _extent(f.form)]",
        ("tests/capture/test_shared_parameters.py::test_ranks_read_the_parameter_as_it_is_now",),
    ),
    Fault(
        "records-overwritten",
        "layout",
        "what torch's passes remove leaves its record and its strides on what takes its place",
        "            node.meta = before.meta[node]\n",
        "",
        (
            "tests/passes/canonicalize/test_inductor_prepare.py::test_losses_against_constants",
            "tests/passes/canonicalize/test_inductor_prepare.py::test_operators_that_do_nothing",
        ),
    ),
    Fault(
        "gradient-of-the-forward",
        "storage",
        "a gradient that torch's passes have made a value of the forward is handed out as that value",
        "        if port.role is OutputRole.GRADIENT and info(node).phase is not Phase.BACKWARD:",
        "        if port.role is OutputRole.GRADIENT and info(node).phase is None:",
        (
            "tests/passes/canonicalize/test_inductor_prepare.py::test_a_gradient_that_is_a_value_of_the_forward_is_its_own",
        ),
    ),
    Fault(
        "saved-in-a-written-buffer",
        "storage",
        "what a backward reads is saved in the memory of a buffer that the forward then updates",
        "        elif (port.role is OutputRole.SAVED and written) or (",
        "        elif (port.role is OutputRole.SAVED and written - inputs[here]) or (",
        ("tests/capture/test_outputs_are_owned.py::test_a_buffer_that_forward_updates_is_saved_as_it_was",),
    ),
    Fault(
        "library-results-strides-off",
        "layout",
        "a kernel of Inductor reads a library's result by the strides that were promised, whatever they are",
        "    return value if value.stride() == strides else laid_out(value, strides)",
        "    return value",
        (
            "tests/codegen/test_layouts.py::test_norms_between_transposes",
            "tests/codegen/test_layouts.py::test_a_library_result_with_other_strides_is_laid_out_for_inductor",
        ),
    ),
    Fault(
        "recurrent-dropout-lost",
        "Python",
        "nothing is dropped between the layers of an LSTM, GRU or RNN",
        "        if dropout and train and number < num_layers - 1:",
        "        if dropout and train and num_layers < number - 1:",
        ("tests/capture/test_recurrent_layers.py::test_values_are_dropped_between_layers_as_in_plain_pytorch",),
    ),
    # -- ranks: what one of them reads, another sends -----------------------------------------------------------------
    Fault(
        "keys-that-all-ranks-read",
        "ranks",
        "of sparse attention in a ring only rows are sent that every rank reads",
        "for place in range(ranks)]).any(0)",
        "for place in range(ranks)]).all(0)",
        ("tests/passes/spmd/test_sparse_ring.py::test_a_window_is_read_from_neighbours_alone",),
    ),
    Fault(
        "gradients-of-keys-go-on",
        "ranks",
        "gradients of a hop's keys go on to the next ranks, not back to where the keys came from",
        "distances = [self.ranks - hop.distance for hop in self.hops]",
        "distances = [hop.distance for hop in self.hops]",
        ("tests/passes/spmd/test_sparse_ring.py::test_hops_are_skipped_and_rows_that_nobody_reads_stay",),
    ),
    Fault(
        "mask-of-the-first-rows",
        "layout",
        "a rank's queries get the first rows of the whole sequence's mask",
        "        rows = _rows_of(self.rank.place, self.rank.ranks, self.rank.pieces, self.length)\n        columns",
        "        rows = _rows_of(0, self.rank.ranks, self.rank.pieces, self.length)\n        columns",
        ("tests/passes/spmd/test_sparse_ring.py::test_masks_of_the_model_hide_what_the_layout_shows",),
    ),
    Fault(
        "hidden-in-a-part",
        "layout",
        "a query that sees no key of a part counts as one that sees one of score 0",
        "    if mask is not None:\n        # (The kernel gives 0",
        "    if False:\n        # (The kernel gives 0",
        ("tests/program/test_attention_pieces.py::test_numbers_are_those_of_whole_attention",),
    ),
    Fault(
        "shared-keys-twice",
        "layout",
        "what rows of blocks share is computed for all of them, and once more for each half",
        "            taken |= shared\n",
        "            pass\n",
        ("tests/program/test_attention_pieces.py::test_each_pair_is_computed_once",),
    ),
)
