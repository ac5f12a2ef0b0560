"""Every transfer says which nodes it has: the collective's start gives its name to its wait and to the layout nodes around both."""

from __future__ import annotations

import torch
from divided_models import ROWS, WORDS, Llama
from sweeps import sweep

import zgraph
from zgraph.build.planned_step import programs
from zgraph.program import collectives
from zgraph.program.node import Role, info
from zgraph.program.serialize import from_json, to_json

PARTS = (Role.GATHER, Role.REDUCE, Role.EXCHANGE, Role.WAIT, Role.LAYOUT, Role.RELEASE)


@sweep(
    "fields",
    [
        {"mesh": {"dp": 2, "tp": 2}, "zero": 3, "async_tensor_parallel": 2},
        {"mesh": {"dp": 1, "tp": 2}, "sequence_parallel": True, "partition_activations": True},
        {"mesh": {"dp": 1, "tp": 2}, "recompute": "full", "tiles": {"loss": 2}},
        {"mesh": {"dp": 2, "cp": 2}, "zero": 1, "context_attention": "ring"},
        {"mesh": {"dp": 1, "cp": 2}, "context_attention": "heads"},
    ],
    quick={3},
    ids=["pieces", "sequence", "recompute", "ring", "heads"],
)
def test_a_start_and_its_wait_are_one_transfer(fields):
    world = 4 if fields["mesh"]["dp"] == 2 else 2
    words = torch.randint(WORDS, (ROWS, 32))
    program = programs(Llama().double(), zgraph.Plan(backend="eager", **fields), (words, words), world).program
    starts = [n for n in program.nodes if n.op == "call_function" and collectives.is_start(n)]
    assert any(info(n).role is Role.EXCHANGE for n in starts)
    for start in starts:
        assert info(start).transfer == start.name
        assert info(collectives.wait_of(start)).transfer == start.name
    names = {n.name for n in starts}
    for node in program.nodes:
        if node.op == "call_function" and info(node).transfer is not None:
            assert info(node).transfer in names and info(node).role in PARTS

    data = to_json(program)
    for row in data["nodes"]:
        row.get("info", {}).pop("transfer", None)
    again = from_json(data)  # (as it was written before records had it)
    exchanges = [n.name for n in starts if info(n).role is Role.EXCHANGE]
    for node in again.nodes:
        if node.name in exchanges:
            assert info(node).transfer == node.name == info(collectives.wait_of(node)).transfer
