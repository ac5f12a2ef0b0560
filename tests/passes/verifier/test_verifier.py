"""Each rule of the verifier refuses a good program that was broken on purpose, and names the node at fault."""

from __future__ import annotations

import models
import pytest
import torch
from programs import captured_mlp

import zgraph
from zgraph.build.planned_step import programs, update_program
from zgraph.codegen.partition import split
from zgraph.errors import VerifyError
from zgraph.passes import verifier
from zgraph.passes.verifier import ValueCache, verify_program, verify_ranks
from zgraph.program import collectives, ops
from zgraph.program.node import NodeInfo, Phase, Role, info, set_info, tensor
from zgraph.program.program import InputRole, Level, OutputRole, Program

pytestmark = pytest.mark.core
aten = torch.ops.aten
HSDP = {"replicate": 2, "dp": 2}

PLANS = {
    "stage 3": (zgraph.Plan(zero=3, backend="eager"), 3),
    "stage 2": (zgraph.Plan(zero=2, backend="eager"), 3),
    "HSDP": (zgraph.Plan(zero=3, mesh=HSDP, backend="eager"), 4),
    "Inductor": (zgraph.Plan(zero=3), 3),
}
_made: dict[tuple[str, str], zgraph.passes.History] = {}


def history(kind: str, name: str = "uneven_mlp"):
    if (kind, name) not in _made:
        plan, world = PLANS[kind]
        case = models.build(name)
        _made[kind, name] = programs(case.model, plan, case.inputs, world)
    return _made[kind, name]


def good(kind: str, name: str = "uneven_mlp") -> Program:
    """A program that the verifier accepts, for a test to break."""
    return history(kind, name).program.snapshot()


@pytest.fixture(params=list(PLANS))
def program(request) -> Program:
    return good(request.param)


def refuses(program: Program, node, *words: str) -> VerifyError:
    """The verifier refuses `program`, names `node`, and says `words`."""
    with pytest.raises(VerifyError) as caught:
        verify_program(program)
    name = node if isinstance(node, str) else node.name
    assert caught.value.node == name
    assert name in str(caught.value)
    for word in words:
        assert word in str(caught.value)
    return caught.value


def first(program: Program, test):
    return next(n for n in program.nodes if test(n))


def starts(program: Program, role: Role, phase: Phase | None = None):
    return [
        n for n in program.nodes
        if collectives.is_start(n) and info(n).role is role and (phase is None or info(n).phase is phase)
    ]  # fmt: skip


def wait_of(start):
    return next(u for u in start.users if collectives.is_wait(u))


def forward_compute(program: Program, target=None):
    return [
        n for n in program.nodes
        if n.op == "call_function" and info(n).role is Role.COMPUTE and info(n).phase is Phase.FORWARD and (target is None or n.target is target)
    ]  # fmt: skip


# -- good programs ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", [*verifier.RULES, verifier.all_faults], ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("kind", list(PLANS))
def test_every_rule_accepts_the_program_after_every_pass(kind, rule):
    for record in history(kind).records:
        assert list(rule(record.program)) == []


@pytest.mark.parametrize("kind", list(PLANS))
@pytest.mark.parametrize("name", ["tied", "channels_last", "batch_norm", "dropout", "shared_gradient"])
def test_every_rule_accepts_good_programs_of_other_models(kind, name):
    verify_program(good(kind, name))


def test_every_rule_accepts_the_parts_that_are_run(program):
    parts = split(program)
    verify_program(parts.forward)
    verify_program(parts.backward)


def test_ranks_with_the_same_program_agree(program):
    verify_ranks([program, program.snapshot(), program.snapshot()])


# -- collectives -----------------------------------------------------------------------------------------------------
def test_two_collectives_exchanged_on_one_rank_are_refused(program):
    other = program.snapshot()
    gathers = starts(other, Role.GATHER, Phase.FORWARD)[:2]
    gathers[0].prepend(gathers[1])
    verify_program(other)  # a good program by itself
    with pytest.raises(VerifyError) as caught:
        verify_ranks([program, program.snapshot(), other])
    assert (
        caught.value.node == gathers[1].name and gathers[1].name in str(caught.value) and "rank 2" in str(caught.value)
    )


def test_a_collective_that_one_rank_leaves_out_is_refused(program):
    other = program.snapshot()
    last = starts(other, Role.REDUCE)[-1]
    wait = wait_of(last)
    wait.replace_all_uses_with(last.args[0])
    other.graph.erase_node(wait)
    other.graph.erase_node(last)
    with pytest.raises(VerifyError) as caught:
        verify_ranks([program, other])
    assert caught.value.node is not None and caught.value.node in str(caught.value)


def test_a_collective_that_is_never_waited_for_is_refused(program):
    start = starts(program, Role.GATHER)[0]
    wait = wait_of(start)
    wait.replace_all_uses_with(start)
    program.graph.erase_node(wait)
    refuses(program, start, "waited for 0 times")


def test_a_collective_waited_for_twice_is_refused(program):
    start = starts(program, Role.REDUCE)[0]
    with program.graph.inserting_after(wait_of(start)):
        program.call(collectives.WAIT, (start,), info(wait_of(start)), name="again")
    refuses(program, start, "waited for 2 times")


def test_a_wait_for_a_value_that_was_waited_for_is_refused(program):
    wait = wait_of(starts(program, Role.REDUCE)[0])
    with program.graph.inserting_after(wait):
        second = program.call(collectives.WAIT, (wait,), info(wait), name="again")
    refuses(program, second, "waits for no collective")


def test_a_read_of_bytes_that_have_not_arrived_is_refused(program):
    start = starts(program, Role.GATHER)[0]
    with program.graph.inserting_after(wait_of(start)):
        early = program.call(aten.neg.default, (start,), NodeInfo(Phase.FORWARD), name="early")
    refuses(program, early, "without waiting")


@pytest.mark.parametrize("kind", list(PLANS))
def test_a_gather_over_a_group_that_the_mesh_has_not_is_refused(kind):
    program = good(kind)
    start = starts(program, Role.GATHER)[0]
    collectives.set_group(start, "tp")
    refuses(program, start, "wrong group", "'tp'")


@pytest.mark.parametrize("role", [Role.GATHER, Role.REDUCE])
def test_a_collective_over_another_dimension_of_the_mesh_is_refused(role):
    """Of equal size, and its record says so too: only the parameter's layout tells."""
    program = good("HSDP")
    start = next(n for n in starts(program, role) if collectives.group_of(n) == "dp")
    collectives.set_group(start, "replicate")
    set_info(start, info(start).replace(mesh_dim="replicate"))
    refuses(program, start, "wrong group", "sharded over 'dp'")


def test_a_collective_that_states_another_number_of_ranks_is_refused(program):
    start = starts(program, Role.GATHER)[0]
    start.update_arg(1, 7)
    refuses(program, start, "7 ranks")


def test_a_reduce_scatter_that_sums_is_refused(program):
    start = next(n for n in starts(program, Role.REDUCE) if n.target is collectives.REDUCE_SCATTER)
    start.update_arg(1, "sum")
    refuses(program, start, "does not average", "'sum'")


def test_an_all_reduce_that_sums_is_refused():
    program = good("HSDP")
    start = next(n for n in starts(program, Role.REDUCE) if n.target is collectives.ALL_REDUCE)
    start.update_arg(1, "sum")
    refuses(program, start, "does not average")


def test_a_gradient_that_is_not_reduced_between_replicas_is_refused():
    program = good("HSDP")
    start = next(n for n in starts(program, Role.REDUCE) if n.target is collectives.ALL_REDUCE)
    name, wait = info(start).param, wait_of(start)
    wait.replace_all_uses_with(start.args[0])
    program.graph.erase_node(wait)
    program.graph.erase_node(start)
    node = next(n for p, n in program.output_items() if p.role is OutputRole.GRADIENT and p.name == name)
    refuses(program, node, f"gradient {name!r}", "not averaged")


def test_a_gradient_that_is_not_reduced_at_all_is_refused():
    """Every rank would go on with the mean of its own batch: nothing of the shapes tells."""
    plan, world = zgraph.Plan(zero=0, backend="eager"), 3
    case = models.build("uneven_mlp")
    program = programs(case.model, plan, case.inputs, world).program
    start = starts(program, Role.REDUCE)[0]
    wait = wait_of(start)
    own = start.args[0]
    wait.replace_all_uses_with(own)
    program.graph.erase_node(wait)
    program.graph.erase_node(start)
    refuses(program, own, "not averaged")


def test_a_gradient_that_is_averaged_twice_is_refused():
    plan, world = zgraph.Plan(zero=0, backend="eager"), 3
    case = models.build("uneven_mlp")
    program = programs(case.model, plan, case.inputs, world).program
    start = starts(program, Role.REDUCE)[0]
    wait = wait_of(start)
    with program.graph.inserting_after(wait):
        second = program.call(collectives.ALL_REDUCE, (wait, "avg", "dp"), info(start), name="second")
    with program.graph.inserting_after(second):
        end = program.call(collectives.WAIT, (second,), info(wait), name="end")
    program.set_outputs([(p, end if n is wait else n) for p, n in program.output_items()])
    refuses(program, end, "not averaged", "['dp', 'dp']")


def test_a_gather_of_another_parameters_shard_is_refused(program):
    """Equal in shape and dtype: only its record tells."""
    start = next(n for n in starts(program, Role.GATHER) if info(n).param == "body.0.bias")
    other = program.input_nodes(InputRole.PARAMETER)["body.2.bias"]
    start.update_arg(0, other)
    refuses(program, start, "gathers 'body_2_bias'", "'body.0.bias'")


def test_a_collective_in_a_captured_program_is_refused(program):
    program.level = Level.CAPTURED
    program.facts.clear()
    program.params = {n: s for n, s in program.params.items()}
    start = first(program, collectives.is_start)
    with pytest.raises(VerifyError) as caught:
        raise next(verifier.check_pure(program))
    assert caught.value.node == start.name


# -- structure -------------------------------------------------------------------------------------------------------
def test_a_use_before_the_definition_is_refused(program):
    node = forward_compute(program)[-1]
    used = node.all_input_nodes[0]
    if used.op == "placeholder":
        used = node.all_input_nodes[-1]
    used.prepend(node)
    refuses(program, node, "before it is defined")


def test_a_cycle_is_refused(program):
    node = forward_compute(program, aten.tanh.default) or forward_compute(program)
    one = next(
        n for n in node if any(u.op == "call_function" for u in n.users) and isinstance(n.args[0], torch.fx.Node)
    )
    user = sorted(one.users)[0]
    one.update_arg(0, user)
    refuses(program, one, user.name, "cycle")


def test_a_node_without_a_record_is_refused(program):
    node = forward_compute(program)[1]
    node.meta.pop("zgraph")
    refuses(program, node, "no record")


def test_a_forward_value_made_of_a_backward_one_is_refused(program):
    backward = first(
        program,
        lambda n: (
            n.op == "call_function" and info(n).phase is Phase.BACKWARD and isinstance(n.meta["val"], torch.Tensor)
        ),
    )
    with program.graph.inserting_after(backward):
        node = program.call(aten.neg.default, (backward,), NodeInfo(Phase.FORWARD), name="too_early")
    refuses(program, node, "of the forward uses", backward.name)


def test_a_wrong_shape_is_refused(program):
    node = forward_compute(program)[2]
    with program.fake_mode:
        node.meta["val"] = torch.empty(5, 5)
    refuses(program, node, "wrong value", "(5, 5)")


def test_a_wrong_dtype_is_refused(program):
    node = forward_compute(program)[2]
    with program.fake_mode:
        node.meta["val"] = tensor(node).double()
    refuses(program, node, "wrong value", "float64")


def test_a_wrong_stride_is_refused(program):
    def is_matrix(n):
        val = n.meta["val"]
        computed = n.op == "call_function" and info(n).role is Role.COMPUTE and isinstance(val, torch.Tensor)
        return computed and val.dim() == 2 and min(val.shape) > 1

    node = first(program, is_matrix)
    with program.fake_mode:
        node.meta["val"] = torch.empty_strided(tensor(node).shape, tensor(node).stride()[::-1])
    refuses(program, node, "wrong value")


def test_a_shard_of_the_wrong_size_is_refused(program):
    name, node = next(iter(program.input_nodes(InputRole.PARAMETER).items()))
    with program.fake_mode:
        node.meta["val"] = torch.empty(program.params[name].shape)
    refuses(program, node, "wrong type")


def test_an_operator_that_can_not_take_its_arguments_is_refused(program):
    node = first(program, lambda n: n.target in (aten.addmm.default, aten.mm.default))
    node.args = (node.args[0], node.args[0], *node.args[2:])
    refuses(program, node)


# -- roles -----------------------------------------------------------------------------------------------------------
def exchanged(program: Program, a, b) -> None:
    items = list(program.output_items())
    i = next(i for i, (p, _) in enumerate(items) if (p.role, p.name) == a)
    j = next(j for j, (p, _) in enumerate(items) if (p.role, p.name) == b)
    (pi, ni), (pj, nj) = items[i], items[j]
    items[i], items[j] = (pi, nj), (pj, ni)
    program.set_outputs(items)


def test_two_gradients_of_equal_shape_exchanged_are_refused(program):
    """The bias of the first layer and the norm's: equal in shape, dtype and phase."""
    a, b = (OutputRole.GRADIENT, "body.0.bias"), (OutputRole.GRADIENT, "body.2.bias")
    grads = {p.name: n for p, n in program.output_items() if p.role is OutputRole.GRADIENT}
    assert tensor(grads[a[1]]).shape == tensor(grads[b[1]]).shape
    exchanged(program, a, b)
    refuses(program, grads[b[1]], "body.0.bias", "exchanged")


def test_two_kept_weights_exchanged_are_refused():
    program = good("stage 2")
    kept = {p.name: n for p, n in program.output_items() if p.role is OutputRole.UNSHARDED}
    exchanged(program, (OutputRole.UNSHARDED, "body.0.bias"), (OutputRole.UNSHARDED, "body.2.bias"))
    refuses(program, kept["body.2.bias"], "body.0.bias", "exchanged")


def test_two_shards_exchanged_are_refused(program):
    at = {p.name: i for i, p in enumerate(program.inputs)}
    i, j = at["body.0.bias"], at["body.2.bias"]
    program.inputs[i], program.inputs[j] = program.inputs[j], program.inputs[i]
    refuses(program, program.placeholders()[i], "exchanged")


def test_an_output_and_a_gradient_exchanged_are_refused(program):
    output = next(p.name for p in program.outputs if p.role is OutputRole.OUTPUT)
    grad = next(n for p, n in program.output_items() if p.name == "body.0.bias" and p.role is OutputRole.GRADIENT)
    exchanged(program, (OutputRole.OUTPUT, output), (OutputRole.GRADIENT, "body.0.bias"))
    refuses(program, grad, "exchanged")


def test_a_gradient_of_the_whole_shape_is_refused_where_its_parameter_is_sharded(program):
    start = next(
        n
        for n in starts(program, Role.REDUCE)
        if info(n).param == "body.0.bias" and n.target is collectives.REDUCE_SCATTER
    )
    name = "body.0.bias"
    own = start.args[0]
    program.set_outputs(
        [(p, own if p.role is OutputRole.GRADIENT and p.name == name else n) for p, n in program.output_items()]
    )
    refuses(program, own)


def test_an_output_that_has_no_role_is_refused(program):
    program.outputs.pop()
    with pytest.raises(VerifyError, match="outputs and their roles differ"):
        verify_program(program)


# -- lifetimes -------------------------------------------------------------------------------------------------------
def released(program: Program):
    mark = first(program, lambda n: n.target is ops.RELEASE)
    return mark, mark.args[0]


@pytest.mark.parametrize("kind", ["stage 3", "HSDP", "Inductor"])
def test_a_read_after_the_release_is_refused(kind):
    program = good(kind)
    mark, whole = released(program)
    with program.graph.inserting_after(mark):
        node = program.call(aten.neg.default, (whole,), NodeInfo(Phase.FORWARD), name="late")
    refuses(program, node, "after its release", mark.name)


@pytest.mark.parametrize("kind", ["stage 3", "HSDP", "Inductor"])
def test_a_read_after_the_release_through_views_is_refused(kind):
    program = good(kind)
    mark, whole = released(program)
    with program.graph.inserting_before(mark):
        view = program.call(aten.unsqueeze.default, (whole, 0), NodeInfo(Phase.FORWARD), name="view")
        view = program.call(aten.slice.Tensor, (view, 0, 0, 1), NodeInfo(Phase.FORWARD), name="view_of_view")
    with program.graph.inserting_after(mark):
        node = program.call(aten.neg.default, (view,), NodeInfo(Phase.FORWARD), name="late")
    refuses(program, node, "after its release")


@pytest.mark.parametrize("kind", ["stage 3", "HSDP", "Inductor"])
def test_a_second_release_is_refused(kind):
    program = good(kind)
    mark, whole = released(program)
    with program.graph.inserting_after(mark):
        node = program.call(ops.RELEASE, (whole,), info(mark), name="again")
    refuses(program, node, "after its release")


def test_a_release_of_what_was_not_gathered_is_refused(program):
    value = forward_compute(program)[-1]
    with program.graph.inserting_after(value):
        node = program.call(ops.RELEASE, (value,), NodeInfo(Phase.FORWARD, Role.RELEASE), name="wrong")
    refuses(program, node, "not gathered")


def test_a_release_of_a_reduced_gradient_is_refused(program):
    wait = wait_of(starts(program, Role.REDUCE)[-1])
    with program.graph.inserting_before(program.output_node()):
        node = program.call(ops.RELEASE, (wait,), NodeInfo(Phase.BACKWARD, Role.RELEASE), name="wrong")
    refuses(program, node)


# -- operators -------------------------------------------------------------------------------------------------------
def test_an_operator_that_writes_in_place_is_refused(program):
    value = forward_compute(program)[0]
    with program.graph.inserting_after(value):
        node = program.call(aten.add_.Tensor, (value, value), NodeInfo(Phase.FORWARD), name="in_place")
    refuses(program, node, "changes its argument")


@pytest.mark.parametrize("kind", ["stage 3", "stage 2", "HSDP"])
def test_a_random_operator_that_is_repeated_is_refused(kind):
    program = good(kind, "dropout")
    drawn = first(program, lambda n: torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()))
    with program.graph.inserting_after(drawn):
        node = program.graph.node_copy(drawn)
    node.meta = dict(drawn.meta)
    set_info(node, info(drawn).replace(phase=Phase.BACKWARD, copy_of=drawn.name))
    refuses(program, node, "random", drawn.name)


# -- buckets ---------------------------------------------------------------------------------------------------------
def bucketed(program: Program, role: Role):
    """The starts of the first bucket of several with this role."""
    found: dict[str, list] = {}
    for start in starts(program, role):
        if info(start).bucket is not None:
            found.setdefault(str(info(start).bucket), []).append(start)
    return next(members for members in found.values() if len(members) > 1)


@pytest.mark.parametrize("role", [Role.GATHER, Role.REDUCE])
def test_a_bucket_whose_starts_do_not_stand_side_by_side_is_refused(program, role):
    one, two = bucketed(program, role)[:2]
    with program.graph.inserting_before(two):
        program.call(aten.clone.default, (one.args[0],), NodeInfo(info(one).phase), name="between")
    refuses(program, two, one.name, "bucket", "stands elsewhere")


@pytest.mark.parametrize("kind", ["stage 3", "HSDP"])
def test_a_bucket_of_two_dtypes_is_refused(kind):
    """The first layer is in float32, the second in bfloat16: their buckets made one."""
    program = good(kind, "mixed_dtypes")
    one, two = (
        next(n for n in starts(program, Role.GATHER) if info(n).param == f"{m}.weight") for m in ("first", "middle")
    )
    for start in starts(program, Role.GATHER):
        set_info(start, info(start).replace(bucket=None))
    for start in (one, two):
        set_info(start, info(start).replace(bucket="mixed"))
    one.append(two)
    refuses(program, two, one.name, "of another kind")


def test_a_bucket_over_two_mesh_dimensions_is_refused():
    program = good("HSDP")
    scatter = next(n for n in starts(program, Role.REDUCE) if collectives.group_of(n) == "dp")
    other = next(n for n in starts(program, Role.REDUCE) if collectives.group_of(n) == "replicate")
    wait = wait_of(scatter)
    for start in (scatter, other):
        set_info(start, info(start).replace(bucket="both"))
    assert scatter < wait
    following = [n for n in starts(program, Role.REDUCE) if n > scatter and n is not other]
    for start in following:
        set_info(start, info(start).replace(bucket=None))
    other.prepend(scatter) if info(other).param != info(scatter).param else None
    with pytest.raises(VerifyError, match="does not fit its bucket"):
        raise next(verifier.check_buckets(program))


# -- what crosses from the forward to the backward --------------------------------------------------------------------
@pytest.fixture
def across() -> Program:
    """A forward that ends while the backward's first gather is on its way."""
    program = split(good("stage 3")).forward
    verify_program(program)
    assert flying(program)
    return program


def flying(program: Program):
    saved = {n for p, n in program.output_items() if p.role is OutputRole.SAVED}
    return [n for n in program.nodes if collectives.is_start(n) and n in saved]


def test_a_start_that_is_saved_for_the_backward_needs_no_wait(across):
    assert not any(collectives.is_wait(u) for start in flying(across) for u in start.users)


def test_a_start_without_a_wait_that_nobody_takes_over_is_refused(across):
    start = flying(across)[0]
    across.set_outputs([(p, n) for p, n in across.output_items() if n is not start])
    refuses(across, start, "waited for 0 times")


def test_a_start_without_a_wait_is_refused_where_the_user_gets_it(across):
    """An output of the model: nobody would wait for it."""
    start = flying(across)[0]
    items = [(p, n) for p, n in across.output_items() if n is not start]
    at = next(i for i, (p, _) in enumerate(items) if p.role is OutputRole.OUTPUT)
    items[at] = (items[at][0], start)
    across.set_outputs(items)
    with pytest.raises(VerifyError) as caught:
        raise next(verifier.check_waits(across))
    assert caught.value.node == start.name


def test_a_joint_program_waits_for_all_that_it_starts(across):
    """Only the split may part a start from its wait."""
    across.level = Level.SCHEDULED
    with pytest.raises(VerifyError) as caught:
        raise next(verifier.check_waits(across))
    assert caught.value.node == flying(across)[0].name


# -- updates ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def update() -> Program:
    plan = zgraph.Plan(zero=3, backend="eager", optimizer=zgraph.AdamW(), grad_clip=1.0)
    return update_program(models.build("uneven_mlp").model, plan, 3).program.snapshot()


def a_write(program: Program):
    return first(program, lambda n: n.target is aten.copy_.default and len(tensor(n).shape) == 2)


def test_a_read_after_the_write_is_refused(update):
    verify_program(update)
    write = a_write(update)
    with update.graph.inserting_after(write):
        reader = update.call(aten.neg.default, (write.args[0],), info(write), name="late")
    refuses(update, reader, "after it was written")


def test_a_read_through_a_view_after_the_write_is_refused(update):
    write = a_write(update)
    with update.graph.inserting_before(write):
        view = update.call(aten.t.default, (write.args[0],), info(write), name="view")
    with update.graph.inserting_after(write):
        reader = update.call(aten.neg.default, (view,), info(write), name="late")
    refuses(update, reader, "after it was written")


def test_a_write_to_what_is_no_input_is_refused(update):
    write = a_write(update)
    with update.graph.inserting_before(write):
        made = update.call(aten.neg.default, (write.args[1],), info(write), name="made")
        node = update.call(aten.copy_.default, (made, write.args[1]), info(write), name="wrong")
    refuses(update, node, "changes its argument")


def test_a_fault_is_shown_with_the_nodes_around_it_and_the_users_line(program):
    node = forward_compute(program)[2]
    node.meta.pop("val")
    error = refuses(program, node)
    assert node.prev.name in str(error) and "models.py:" in str(error)


# -- several faults ---------------------------------------------------------------------------------------------------
def test_all_faults_of_a_program_are_listed(program):
    wrong = forward_compute(program)[:: len(forward_compute(program)) - 1]
    for node in wrong:
        node.meta["val"] = node.meta["val"].to(torch.float64)
    gather = starts(program, Role.GATHER)[0]
    gather.args = (*gather.args[:-1], "nowhere")
    with pytest.raises(VerifyError) as caught:
        verify_program(program)
    found = [caught.value, *caught.value.others]
    assert {gather.name, *(n.name for n in wrong)} <= {error.node for error in found}
    assert [e.node for e in found] == [e.node for e in verifier.all_faults(program)]


def test_what_was_right_before_is_looked_at_again_once_anything_of_it_is_another():
    """With the cache that a manager gives to successive checks."""
    program, values = captured_mlp(), ValueCache()
    verify_program(program, values)
    product = next(n for n in program.nodes if n.target is torch.ops.aten.addmm.default)
    right, args = product.meta["val"], product.args
    with program.fake_mode:
        wrong = right.new_empty(1, 2)
    product.meta["val"] = wrong
    with pytest.raises(VerifyError, match=f"{product.name!r} has the wrong value"):
        verify_program(program, values)
    product.meta["val"] = right
    verify_program(program, values)
    product.args = (args[0], args[1], args[1])
    with pytest.raises(VerifyError, match=f"{product.name!r} can't be evaluated"):
        verify_program(program, values)
    product.args = args
    operand, given = args[1], args[1].meta["val"]
    with program.fake_mode:
        operand.meta["val"] = given.new_empty(given.shape[0] + 1, given.shape[1])
    with pytest.raises(VerifyError) as found:
        verify_program(program, values)
    assert any(product.name in str(fault) for fault in (found.value, *found.value.others))


def test_what_an_operator_gives_by_the_default_dtype_is_not_remembered_for_another():
    def program():
        made = captured_mlp()
        with made.graph.inserting_before(made.output_node()):
            made.call(
                torch.ops.aten.arange.default,
                (3.0,),
                NodeInfo(Phase.FORWARD),
                name="numbers",
                kwargs={"device": torch.device("cpu")},
            )
        return made

    verify_program(program())
    torch.set_default_dtype(torch.float64)
    try:
        made = program()
        assert next(n for n in made.nodes if n.name == "numbers").meta["val"].dtype is torch.float64
        verify_program(made)
    finally:
        torch.set_default_dtype(torch.float32)
