"""Ranks compare programs by hashes of all that must be equal on them, and of nothing else."""

from __future__ import annotations

import json

import programs
import pytest
import torch
from torch import fx

from zgraph.build.planned_step import programs as compiled_programs
from zgraph.plan.plan import Plan
from zgraph.program import collectives
from zgraph.program.digest import collective_order, digest, first_difference, node_digests
from zgraph.program.node import NodeInfo, Phase, info, set_info
from zgraph.program.program import Level, OutputRole, Port, Program
from zgraph.program.serialize import from_json, to_json

pytestmark = pytest.mark.core
aten = torch.ops.aten


def distributed() -> Program:
    return compiled_programs(programs.Mlp(), Plan(backend="eager"), (torch.randn(4, 6),), 2).program


@pytest.fixture(scope="module")
def made() -> Program:
    return distributed()


def named(program: Program, name: str) -> fx.Node:
    return next(n for n in program.nodes if n.name == name)


def changed(program: Program, change) -> Program:
    """A copy that `change` was let loose on; the records and fake values of its nodes are its own."""
    other = program.snapshot()
    change(other)
    return other


def difference(a: Program, b: Program) -> str | None:
    return first_difference(node_digests(a), node_digests(b))


# What does not count.


@pytest.mark.parametrize("make", [programs.captured_mlp, distributed])
def test_two_captures_of_one_model_have_one_digest(make):
    a, b = make(), make()
    assert digest(a) == digest(b) and difference(a, b) is None


def of_another_process() -> tuple[int, str]:
    """What tells how this process hashes, and its digest."""
    return hash("a text"), digest(distributed())


@pytest.mark.gloo
def test_another_process_makes_the_same_digest(two, made):
    """Nothing of it is a Python object's address, or in the order of a set."""
    for hashed, found in two.run(of_another_process):
        assert hashed != hash("a text") and found == digest(made)


def test_where_the_source_lies_and_what_modules_are_called_do_not_count(made):
    def elsewhere(program: Program) -> None:
        for node in program.nodes:
            if node.op != "output":
                set_info(node, info(node).replace(source="/other/machine/model.py:1", module="renamed"))

    assert digest(changed(made, elsewhere)) == digest(made)


def test_a_program_that_was_saved_and_loaded_has_the_same_digest(made):
    assert digest(from_json(json.loads(json.dumps(to_json(made))))) == digest(made)


def on_device(device: str) -> Program:
    program = programs.captured_mlp()
    with program.graph.inserting_before(program.output_node()):
        record = NodeInfo(Phase.FORWARD)
        where = torch.device(device)
        made = program.call(aten.arange.default, (4,), record, name="positions", kwargs={"device": where})
    program.set_outputs([*program.output_items(), (Port(OutputRole.OUTPUT, "output_1", 1), made)])
    return program


def test_each_ranks_own_device_number_does_not_count_but_its_kind_does():
    zero, one, cpu = on_device("cuda:0"), on_device("cuda:1"), on_device("cpu")
    assert digest(zero) == digest(one) and difference(zero, one) is None
    assert difference(zero, cpu) == "positions"


def test_a_plain_function_counts_by_its_name_and_not_its_address():
    def with_function(function) -> Program:
        program = programs.captured_mlp()
        with program.graph.inserting_before(program.output_node()):
            program.graph.call_function(function, (program.output_values()[0],), name="called")
        return program

    def make(name: str):
        def called(x):
            return x

        called.__qualname__ = name
        return called

    assert digest(with_function(make("f"))) == digest(with_function(make("f")))
    assert difference(with_function(make("f")), with_function(make("g"))) == "called"


# What does.


def another_argument(program: Program) -> None:
    named(program, "gather_up_weight").update_arg(2, "replicate")


def another_keyword(program: Program) -> None:
    named(program, "tanh").kwargs = {"approximate": 1.0}


def another_operator(program: Program) -> None:
    named(program, "tanh").target = aten.sin.default


def another_read(program: Program) -> None:
    named(program, "tanh").update_arg(0, named(program, "input_2"))


def another_shape(program: Program) -> None:
    with program.fake_mode:
        named(program, "tanh").meta["val"] = torch.empty(5, 10)


def another_stride(program: Program) -> None:
    with program.fake_mode:
        named(program, "tanh").meta["val"] = torch.empty(10, 4).t()


def another_dtype(program: Program) -> None:
    with program.fake_mode:
        named(program, "tanh").meta["val"] = torch.empty(4, 10, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "at"),
    [
        (another_argument, "gather_up_weight"),
        (another_keyword, "tanh"),
        (another_operator, "tanh"),
        (another_read, "tanh"),
        (another_shape, "tanh"),
        (another_stride, "tanh"),
        (another_dtype, "tanh"),
    ],
)
def test_a_node_that_differs_changes_the_digest_and_is_named(made, change, at):
    other = changed(made, change)
    assert digest(other) != digest(made)
    assert difference(made, other) == at
    assert [n for n, _ in node_digests(made)] == [n for n, _ in node_digests(other)]


def test_only_the_node_that_differs_has_another_hash(made):
    """A hash is of one node, not of all before it: a difference does not spread."""
    pairs = zip(node_digests(made), node_digests(changed(made, another_shape)), strict=True)
    assert [a[0] for a, b in pairs if a != b] == ["tanh"]


def rename_output(program: Program) -> None:
    program.outputs[-1] = Port(OutputRole.GRADIENT, "another", program.outputs[-1].index)


def change_level(program: Program) -> None:
    program.level = Level.EXECUTABLE


def change_mesh(program: Program) -> None:
    program.mesh["dp"] = 4


def turn_mesh(program: Program) -> None:
    program.mesh = dict(reversed(program.mesh.items()))


@pytest.mark.parametrize("change", [rename_output, change_level, change_mesh])
def test_ports_level_and_mesh_count_without_a_node_that_differs(made, change):
    other = changed(made, change)
    assert digest(other) != digest(made) and difference(made, other) is None


def test_the_order_of_mesh_dimensions_counts(made):
    wide = changed(made, lambda p: p.mesh.update(replicate=2))
    assert digest(changed(wide, turn_mesh)) != digest(wide)


# Nodes that one has and the other has not.


def test_a_node_more_on_one_side_is_named_on_either():
    longer, shorter = [("a", "1"), ("b", "2"), ("c", "3")], [("a", "1"), ("b", "2")]
    assert first_difference(longer, shorter) == first_difference(shorter, longer) == "c"


def test_nodes_that_change_places_are_named_with_both_names():
    assert first_difference([("a", "1"), ("b", "2")], [("b", "2"), ("a", "1")]) == "b (here a)"


# The order of collectives.


def test_collectives_are_listed_in_order_each_start_with_its_group_and_each_wait(made):
    lines = collective_order(made)
    nodes = [n for n in made.nodes if collectives.is_start(n) or collectives.is_wait(n)]
    assert [line.split(" = ")[0] for line in lines] == [n.name for n in nodes]
    assert any(line.startswith("gather_up_weight = _c10d_functional.all_gather_into_tensor") for line in lines)
    assert all("'dp'" in line for line in lines if "wait_tensor" not in line)
    assert sum("wait_tensor" in line for line in lines) * 2 == len(lines)


def test_collectives_in_another_order_are_another_order(made):
    def swap(program: Program) -> None:
        named(program, "gather_up_weight").prepend(named(program, "gather_down_weight"))

    other = changed(made, swap)
    assert collective_order(other) != collective_order(made)
    assert sorted(collective_order(other)) == sorted(collective_order(made))
    assert digest(other) != digest(made) and "gather" in difference(made, other)
