"""What a model asserts about values holds in programs too: forward and backward, on both backends, in every plan."""

import asserting_models
import pytest
import torch
from asserting_models import Net, OfGradient
from sweeps import product, sweep

import zgraph
from zgraph.build.planned_step import programs
from zgraph.codegen.partition import split
from zgraph.errors import AssertionError as Failed
from zgraph.errors import CaptureError
from zgraph.program.program import OutputRole

GOOD, BAD = torch.ones(4, 4), torch.full((4, 4), 1000.0)


FORMS = {
    "statement": "too large",
    "negated": "too large",
    "conjunction": "too large",
    "built": 'f"too large for {limit}"',
    "bare": r"\(h < 100\).all\(\)",
    "function": "too large",
    "asynchronous": "too large",
    "unnamed": "single nonzero value",
    "number": "too large",
    "checked": "too large",
    "checked_all": "too large",
    "checkpointed": "too large",
    "raised_with_a_text": 'f"more than {most}"',
}


@sweep("form, message", FORMS.items(), quick=6)
def test_an_assertion_fails_as_in_plain_pytorch_and_names_its_line(form, message):
    model = zgraph.compile(Net(form), zgraph.Plan(backend="eager"))
    assert torch.equal(model(GOOD), Net(form)(GOOD))
    with pytest.raises(Failed, match=message) as raised:
        model(BAD)
    assert raised.value.where.split(":")[0] == asserting_models.__file__
    with torch.no_grad(), pytest.raises(RuntimeError, match=message):
        model.eval()(BAD)


@sweep("form", ["statement", "number"], quick=1)
def test_an_assertion_fails_in_what_inductor_has_compiled(form):
    model = zgraph.compile(Net(form), zgraph.Plan())
    model(GOOD).backward()
    with pytest.raises(AssertionError, match="too large"):
        model(BAD)


@sweep("backend", ["eager", "inductor"], quick=(0,))
def test_an_assertion_of_a_backward_fails_in_the_backward(backend):
    model = zgraph.compile(OfGradient("statement"), zgraph.Plan(backend=backend))
    model(GOOD).backward()
    loss = model(BAD)
    with pytest.raises(Failed, match="gradient too large"):
        loss.backward(torch.tensor(1000.0))


@pytest.mark.slow
def test_an_error_that_is_raised_for_values_is_an_assertion_unless_it_is_handled():
    model = zgraph.compile(Net("raised"), zgraph.Plan(backend="eager"))
    assert torch.equal(model(GOOD), Net("raised")(GOOD))
    with pytest.raises(Failed, match="too large"):
        model(BAD)
    model.eval()
    torch.testing.assert_close(model(BAD), Net("raised").eval()(BAD))
    with pytest.raises(CaptureError, match="can't be captured"):
        zgraph.compile(Net("handled"), zgraph.Plan(backend="eager"))(GOOD)


def test_an_assertion_of_python_values_is_no_part_of_the_program():
    model = Net("in_python")
    found = programs(model, zgraph.Plan(backend="eager"), (GOOD,), 1).program
    assert not [p for p in found.outputs if p.role is OutputRole.CHECK]


def test_a_step_whose_assertion_fails_changes_nothing():
    model = zgraph.compile(
        Net("statement"), zgraph.Plan(backend="eager", optimizer=zgraph.SGD(lr=0.1), micro_batches=2)
    )
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(Failed, match="too large"):
        model.train_step(torch.cat([GOOD, BAD]))
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())
    model.train_step(torch.cat([GOOD, GOOD]))


PLANS = [
    dict(mesh={"dp": 2}, zero=3),
    dict(mesh={"dp": 2}, zero=1, recompute="full"),
    dict(mesh={"dp": 2}, zero=2, recompute="auto", memory_budget="1GiB"),
    dict(mesh={"tp": 2}, tensor_parallel={"first": "colwise", "second": "rowwise"}),
    dict(mesh={"tp": 2}, tensor_parallel={"first": "rowwise"}),
    dict(mesh={"dp": 2}, precision="bf16"),
]


@product("options, backend", PLANS, ["eager", "inductor"], together=1, ids=str)
def test_every_plan_keeps_it_once_and_is_verified(options, backend):
    plan = zgraph.Plan(backend=backend, **options)
    world = 2
    parts = split(programs(Net("statement"), plan, (GOOD,), world).program)
    kept = [p.name for p in parts.forward.outputs if p.role is OutputRole.CHECK]
    assert len(kept) == 1
    assert not [p for p in parts.backward.outputs if p.role is OutputRole.CHECK]
    zgraph.verify(Net("statement"), plan, world, (torch.rand(8, 4),))


def fail_on_ranks(options, bad):
    """What each rank raises in a step whose input is bad on the ranks `bad`, after a step that is right."""
    rank = torch.distributed.get_rank()
    plan = zgraph.Plan(backend="eager", optimizer=zgraph.SGD(lr=0.1), **options)
    model = zgraph.compile(Net("statement"), plan)
    model.train_step(torch.cat([GOOD, GOOD]))
    x = BAD if rank in bad else GOOD
    try:
        model.train_step(torch.cat([GOOD, x]))
    except Exception as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.gloo
@sweep(
    "options, bad",
    [
        (dict(mesh={"tp": 2}, tensor_parallel={"first": "colwise", "second": "rowwise"}), (0, 1)),
        (dict(mesh={"pp": 2}, micro_batches=2, partition=["second"]), (0, 1)),
        (dict(mesh={"cp": 2}, sequence_dim=0), (0, 1)),
    ],
    quick={0},
    ids=str,
)
def test_an_assertion_fails_where_ranks_compute_together(two, options, bad):
    for found in two.run(fail_on_ranks, options, bad):
        assert found is not None
        assert found[0] in ("AssertionError", "PeerError")
        assert "too large" in found[1]


@pytest.mark.gloo
@pytest.mark.slow
def test_a_rank_whose_rows_fail_says_so_and_the_other_does_not_wait_for_ever(two):
    outcomes = two.run(fail_and_leave, limit=60.0)
    assert outcomes[1] == ("AssertionError", True)
    assert outcomes[0][0] in ("CollectiveError", "PeerError")


def fail_and_leave():
    """The failing rank's error, and that its message is kept; it then leaves the group, as a process that ends does."""
    found = fail_on_ranks(dict(mesh={"dp": 2}, watch=dict(timeout=5.0)), (1,))
    return found[0], "too large" in found[1]
