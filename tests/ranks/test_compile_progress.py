"""What is shown while a program is compiled: the stages in their order, times by what has gone before, a bar or lines, by one rank alone."""

from __future__ import annotations

import io
import time

import pytest
import torch
from ranks import Ranks
from torch import nn

import zgraph
from zgraph.ranks import compile_progress
from zgraph.ranks.compile_progress import BACKWARD, CAPTURE, FORWARD, JOINT, PASSES, Compiling


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def soon(monkeypatch):
    for name in ("EVERY", "REFRESH", "BRIEF"):
        monkeypatch.setattr(compile_progress, name, 0.01)


def wait_for(text: str, stream: io.StringIO) -> None:
    end = time.monotonic() + 20
    while text not in stream.getvalue() and time.monotonic() < end:
        time.sleep(0.01)


def shown(stream: io.StringIO, monkeypatch, **how) -> str:
    """What a stream gets while a program is compiled as far as its joint graph."""
    monkeypatch.setattr("sys.stderr", stream)
    with compile_progress.shown("Net", **{"here": True, "inductor": False, "searched": False, **how}):
        compile_progress.at(JOINT)
        if how.get("here", True):
            wait_for("joint graph", stream)
    return stream.getvalue()


def test_what_is_left_is_what_a_share_has_taken_for_those_that_are_not_done():
    now = [0.0]
    one = Compiling("Net", {CAPTURE: 2.0, JOINT: 3.0, PASSES: 5.0}, lambda: now[0])
    assert one.left() is None and one.times() == "0 s"
    now[0] = 4.0  # (a share takes two seconds)
    one.enter(JOINT)
    assert one.left() == 16.0 and one.share() == 0.2
    now[0] = 5.0
    assert one.left() == 15.0 and one.times() == "5 s, about 15 s left"
    one.enter(CAPTURE)  # (it may begin again)
    now[0] = 70.0
    assert one.left() == 10.0 and one.line() == "compiling Net: the joint graph (2 of 3)"
    assert one.times() == "1 min 10 s, about 10 s left"
    one.enter(PASSES)
    assert one.left() == 70.0


def test_a_line_is_written_where_there_is_no_terminal(soon, monkeypatch):
    text = shown(io.StringIO(), monkeypatch)
    assert "zgraph: compiling Net: the joint graph (2 of 5), 0 s, about" in text


def test_a_terminal_has_a_bar_and_no_trace_of_it_afterwards(soon, monkeypatch):
    text = shown(Terminal(), monkeypatch)
    assert "compiling Net: the joint graph (2 of 5)" in text and "zgraph:" not in text
    assert text.endswith("\x1b[2K")  # (its line is erased)


@pytest.mark.parametrize("how", [{"here": False}, {}])
def test_nothing_is_written_by_others_or_where_it_is_switched_off(soon, monkeypatch, how):
    if not how:
        monkeypatch.setenv("ZGRAPH_PROGRESS", "0")
        monkeypatch.setattr(f"{__name__}.wait_for", lambda *_: time.sleep(0.1))
    assert shown(io.StringIO(), monkeypatch, **how) == ""


class Bare:
    """No more than `print` needs."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None: ...

    def getvalue(self) -> str:
        return self.text


def test_a_stream_that_does_not_say_whether_it_is_a_terminal_gets_lines(soon, monkeypatch):
    assert "zgraph: compiling Net: the joint graph" in shown(Bare(), monkeypatch)


def test_a_stream_that_is_closed_meanwhile_harms_nobody(soon, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    with compile_progress.shown("Net", here=True, inductor=True, searched=False):
        stream.close()
        time.sleep(0.05)
    assert not compile_progress._now


@pytest.mark.parametrize("budget", [None, "1 MiB"])
def test_every_stage_of_a_step_is_entered_once_and_in_order(monkeypatch, budget):
    entered = [CAPTURE]
    enter = Compiling.enter

    def note(self: Compiling, stage: str) -> None:
        before = self._at
        enter(self, stage)
        entered.extend([stage] if self._at > before else [])

    monkeypatch.setattr(Compiling, "enter", note)
    model = zgraph.compile(nn.Linear(3, 2), zgraph.Plan(backend="eager", memory_budget=budget))
    model(torch.ones(4, 3)).sum().backward()
    assert entered == [CAPTURE, JOINT, PASSES, FORWARD, BACKWARD]
    model(torch.ones(4, 3))
    assert len(entered) == 5 and not compile_progress._now


def first_step() -> bool:
    """Whether this rank showed how far compiling was."""
    seen = []
    begin = Compiling.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Compiling, "__init__", lambda self, *given: (seen.append(1), begin(self, *given))[1])
        model = zgraph.compile(nn.Linear(3, 2), zgraph.Plan(mesh={"dp": -1}, backend="eager"))
        model(torch.ones(4, 3)).sum().backward()
    return bool(seen)


@pytest.mark.gloo
def test_of_several_ranks_the_first_shows_it(two: Ranks):
    assert two.run(first_step) == [True, False]
