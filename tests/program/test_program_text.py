"""A program is read as Python: one operator a line, types inline, and what it is for behind it."""

from __future__ import annotations

import re
from pathlib import Path

import programs
import pytest
import torch
from torch import nn

from zgraph.build.planned_step import programs as compiled_programs
from zgraph.errors import FilterError
from zgraph.plan.plan import Plan
from zgraph.program.node import NodeInfo, Phase, Role, has_info, info, set_info
from zgraph.program.printer import diff, render
from zgraph.program.program import Program

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def captured() -> Program:
    return programs.captured_mlp()


@pytest.fixture(scope="module")
def history():
    """The same model through every pass, on four ranks: 10 rows of `up` are 3, 3, 3 and 1."""
    return compiled_programs(programs.Mlp(), Plan(backend="eager"), (torch.randn(4, 6),), 4)


def lines(text: str) -> list[tuple[str, str]]:
    """(code, comment) of each line."""
    split = [line.partition("  # ") for line in text.splitlines()]
    return [(code.strip(), comment.strip()) for code, _, comment in split]


def comment_of(text: str, start: str) -> str:
    (found,) = (comment for code, comment in lines(text) if code.startswith(start))
    return found


# One line.


def test_the_head_says_name_level_mesh_and_counts(captured, history):
    first, second = render(captured).splitlines()[:2]
    assert first == f"# program train: captured, mesh dp 2, {len(captured.nodes)} nodes"
    assert second == "# 4 parameters of 103 elements; facts: none"
    last = history.program
    text = render(last).splitlines()
    assert text[0].startswith("# program train: scheduled, mesh dp 4, ")
    assert text[1].endswith(f"facts: {', '.join(sorted(last.facts))}") and "sharded" in text[1]


def test_every_input_operator_and_output_has_one_line_in_the_graphs_order(captured):
    code = [c for c, _ in lines(render(captured))]
    names = [n.name for n in captured.nodes if n.op != "output"]
    shown = [m[1] for c in code if (m := re.match(r"(\w+): ", c))]
    assert shown == names
    at = code.index("return (")
    assert code[at + 1 : -1] == [f"{n.name}," for n in captured.output_values()]


def test_an_operator_shows_its_type_and_arguments(captured):
    code = [c for c, _ in lines(render(captured))]
    assert "addmm: f32[4, 10] = aten.addmm(up_bias, input_2, t)" in code
    assert any(c.endswith(", -inf)") and c.startswith("masked_fill: f32[4, 10]") for c in code)
    assert any(c.startswith("gt: bool[4, 10] = aten.gt.Scalar(tanh, 2") for c in code)


def test_module_path_and_source_line_stand_behind_an_operator_without_folders(captured):
    source = Path(programs.__file__)
    (line,) = (i for i, t in enumerate(source.open(), 1) if "torch.tanh(self.up" in t)
    assert comment_of(render(captured), "addmm: ") == f"up · programs.py:{line}"
    assert comment_of(render(captured), "tanh: ") == f"programs.py:{line}"
    assert str(source.parent) not in render(captured)


def test_each_phase_is_announced_once_and_before_its_first_operator(captured):
    text = render(captured)
    assert re.findall(r"# ---- (\w+) ----", text) == ["forward", "backward"]
    assert text.index("    mm: ") > text.index("# ---- backward ----") > text.index("    tanh: ")


def test_outputs_say_what_they_are_of(captured):
    assert comment_of(render(captured).partition("return (")[2], "output,") == "output output_0"
    assert "gradient up.weight" in render(captured) and "gradient down.bias" in render(captured)


def test_a_changed_buffer_is_an_output_of_its_own():
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            return self.norm(x).square().sum()

    text = render(programs.captured(Normed(), (torch.randn(4, 3),)))
    assert "# mutation norm.running_mean" in text and "# buffer norm.running_mean" in text


def test_strings_with_quotes_stay_one_string(captured):
    program = captured.snapshot()
    node = next(n for n in program.nodes if n.name == "tanh")
    node.kwargs = {"approximate": 'a"b'}
    assert r'approximate="a\"b")' in render(program)


def test_a_node_that_a_pass_has_not_described_yet_is_printed():
    program = programs.captured_mlp()
    with program.graph.inserting_before(program.output_node()):
        program.graph.call_function(torch.ops.aten.neg.default, (program.output_values()[0],), name="fresh")
    assert "    fresh = aten.neg(output)\n" in render(program)
    assert "    fresh = aten.neg(output)\n" in render(program, filter="fresh")


def test_what_a_node_is_for_is_said_unless_it_computes(captured):
    program = captured.snapshot()
    tanh = next(n for n in program.nodes if n.name == "tanh")
    tanh.meta = dict(tanh.meta)
    record = NodeInfo(Phase.FORWARD, Role.LAYOUT, module="up", param="up.weight", mesh_dim="dp", copy_of="gt")
    set_info(tanh, record)
    assert comment_of(render(program), "tanh: ") == "layout up.weight @dp · again gt · up"


# Distributed programs.


def test_a_sharded_parameter_shows_its_shard_and_its_whole(history):
    text = render(history.program)
    assert "up_weight: f32[3, 6]," in [c for c, _ in lines(text)]
    assert comment_of(text, "up_weight: ") == "parameter up.weight, Shard(0)@dp of f32[10, 6]"


def test_before_parameters_are_sharded_none_is_called_so(history):
    assert "Shard(" not in render(history.records[0].program)


def test_collectives_read_as_such_with_their_group(history):
    code = [c for c, _ in lines(render(history.program))]
    assert 'gather_up_weight: f32[12, 6] = dist.all_gather(up_weight, 4, "dp")' in code
    assert "whole_up_weight: f32[12, 6] = dist.wait(gather_up_weight)" in code
    assert any(
        re.match(r'scatter_grad_up_weight: f32\[3, 6\] = dist\.reduce_scatter\(\w+, "avg", 4, "dp"\)', c) for c in code
    )
    assert "zgraph.release(whole_up_weight)" in code
    assert "_c10d_functional" not in render(history.program)


def test_a_name_means_the_same_operator_after_every_pass(history):
    meant: dict[str, str] = {}
    for record in history.records:
        for node in record.program.nodes:
            if node.op == "output":  # nothing reads it, and no line shows its name
                continue
            assert meant.setdefault(node.name, str(node.target)) == str(node.target), (record.name, node.name)


# Filters and colours.


@pytest.mark.parametrize(
    "pattern, belongs",
    [
        ("whole_*", lambda n: n.name.startswith("whole_")),
        ("down", lambda n: info(n).module == "down"),
        ("up.*", lambda n: (info(n).param or "").startswith("up.")),
    ],
    ids=["node", "module", "parameter"],
)
def test_a_filter_keeps_exactly_what_its_glob_matches(history, pattern, belongs):
    text = render(history.program, filter=pattern)
    wanted = [n for n in history.program.nodes if n.op != "output" and has_info(n) and belongs(n)]
    assert wanted
    shown = [c for c, comment in lines(text) if c and not c.startswith("#")]
    assert len(shown) == len(wanted)
    for node, code in zip(wanted, shown, strict=True):
        assert node.name in code or "zgraph.release" in code
    assert "def forward" not in text and "return (" not in text


def test_a_filter_that_matches_nothing_names_what_is_near(captured):
    with pytest.raises(FilterError, match="no node matches 'up_wieght'") as caught:
        render(captured, filter="up_wieght")
    assert "up_weight" in caught.value.hint
    with pytest.raises(ValueError):
        render(captured, filter="§")


def test_colour_changes_nothing_but_escapes(history):
    plain, colored = render(history.program), render(history.program, color=True)
    assert "\x1b" not in plain and colored != plain
    assert re.sub(r"\x1b\[\d+m", "", colored) == plain


# Differences.


def test_equal_programs_have_no_difference(captured):
    assert diff(captured, captured.snapshot()) == ""


def test_a_difference_shows_what_changed_and_little_around_it():
    before = programs.captured_tiny_llama()
    after = before.snapshot()
    node = next(n for n in after.nodes if n.name == "silu")
    node._rename("gate")
    text = diff(before, after)
    changed = [line for line in text.splitlines()[2:] if line[0] in "+-"]
    assert any(line.startswith("-    silu: ") for line in changed)
    assert any(line.startswith("+    gate: ") for line in changed)
    readers = len(node.users)
    assert len(changed) == 2 * (1 + readers), "the node and those that read it, before and after"
    marks = "".join(line[0] for line in text.splitlines()[2:])
    for at, mark in enumerate(marks):
        if mark == " ":
            assert set(marks[max(0, at - 2) : at + 3]) & {"+", "-"}, "no more than two lines around a change"
    assert " " in marks


def test_a_difference_of_a_pass_is_the_lines_of_both_texts(history):
    before, after = history.records[0].program, history.program
    old, new = render(before).splitlines(), render(after).splitlines()
    for line in diff(before, after).splitlines()[2:]:
        if line[0] == "-":
            assert line[1:] in old
        elif line[0] == "+":
            assert line[1:] in new
    assert "+    whole_up_weight: f32[12, 6] = dist.wait(gather_up_weight)" in diff(before, after)
