"""Every error says what, where, why and what to do, survives pickling, and can be caught as what it is."""

from __future__ import annotations

import pickle

import pytest

from zgraph import errors

TYPES = [getattr(errors, name) for name in errors.__all__]

pytestmark = pytest.mark.core


def test_an_error_puts_each_part_on_a_line_of_its_own():
    error = errors.CaptureError(
        "the model can't be captured", where="model.py:7", why="a branch", hint="use torch.where"
    )
    assert str(error).splitlines() == [
        "the model can't be captured",
        "  where: model.py:7",
        "  why: a branch",
        "  to do: use torch.where",
    ]


def test_a_part_that_is_missing_takes_no_line():
    assert str(errors.ZgraphError("only this")) == "only this"


def test_a_part_of_several_lines_is_indented_below_its_label():
    assert str(errors.PassError("what", why="one\ntwo")).splitlines() == [
        "what",
        "  why:",
        "    one",
        "    two",
    ]


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_is_a_zgraph_error_and_documented(kind):
    assert issubclass(kind, errors.ZgraphError)
    assert kind.__doc__


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_comes_whole_through_pickle(kind):
    # Ranks send each other their errors.
    error = kind("what", where="where", why="why", hint="hint")
    error.add_note("a note")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert (copy.what, copy.where, copy.why, copy.hint) == ("what", "where", "why", "hint")
    assert copy.__notes__ == ["a note"]


def test_a_verify_error_keeps_its_node_through_pickle():
    assert pickle.loads(pickle.dumps(errors.VerifyError("waited twice", node="wait_3"))).node == "wait_3"


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.PlanError, ValueError),
        (errors.MeshError, ValueError),
        (errors.FilterError, ValueError),
        (errors.UnsupportedError, NotImplementedError),
    ],
)
def test_errors_that_python_has_a_name_for_are_caught_by_it(kind, builtin):
    with pytest.raises(builtin):
        raise kind("what")


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (errors.MeshError, errors.PlanError),
        (errors.ContractError, errors.PassError),
        (errors.VerifyError, errors.PassError),
    ],
)
def test_narrow_errors_are_caught_by_the_wider(kind, base):
    assert issubclass(kind, base)
