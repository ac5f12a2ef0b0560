"""Faulty passes, each of which spoils the program of one stage alone, in a way that the verifier takes; and a model for them."""

from __future__ import annotations

import stage_models
import torch
from torch import fx

from zgraph.passes import graph_pass
from zgraph.program.node import info
from zgraph.program.program import OutputRole, Port, Program


def _larger(program: Program, stage: int, role: OutputRole, name: str | None = None) -> None:
    """Let a stage give 1.001 times what it gives in this role."""

    def spoilt(port: Port, node: fx.Node) -> fx.Node:
        if port.role is not role or name not in (None, port.name):
            return node
        with program.graph.inserting_before(program.output_node()):
            return program.call(torch.ops.aten.mul.Tensor, (node, 1.001), info(node), name=f"spoilt_{port.name}")

    if program.name.endswith(f".stage{stage}"):
        program.set_outputs([(port, spoilt(port, node)) for port, node in program.output_items()])


@graph_pass("sends", "stage 1 sends something else", bitwise=False)
def sends(program: Program) -> None:
    _larger(program, 1, OutputRole.SENT)


@graph_pass("returns", "stage 2 gives other gradients back", bitwise=False)
def returns(program: Program) -> None:
    _larger(program, 2, OutputRole.RETURNED)


@graph_pass("own_weight", "stage 1 has another gradient of a weight", bitwise=False)
def own_weight(program: Program) -> None:
    _larger(program, 1, OutputRole.GRADIENT, "own.1.weight")


@graph_pass("shared_weight", "stage 2 has another part of the gradient of a weight that others hold too", bitwise=False)
def shared_weight(program: Program) -> None:
    _larger(program, 2, OutputRole.GRADIENT, "shared.weight")


def thrice() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """A model for the command line, with a weight that three stages hold."""
    case = stage_models.build("Thrice")
    return case.model, case.inputs
