"""Programs of small models that Inductor lowers for eight ranks which are not there: their code is read, not run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import zgraph
from zgraph.build.planned_step import programs
from zgraph.codegen.executable import Executable
from zgraph.codegen.inductor import adopt_strides, compile_inductor
from zgraph.codegen.partition import split
from zgraph.passes.analysis.simulator import bucket_of
from zgraph.program import collectives
from zgraph.program.program import Program

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default}
WIDTH, LAYERS, WORLD = 64, 4, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


def ordered(program: Program) -> list[str]:
    """Starts, waits and products, in the program's order; of a bucket, which is one collective, its first start."""
    joined = {m for n in program.graph.nodes if collectives.is_start(n) for m in bucket_of(n)[1:]}
    return [
        n.name
        for n in program.graph.nodes
        if n not in joined and (collectives.is_start(n) or collectives.is_wait(n) or n.target in PRODUCTS)
    ]


def compiled_parts(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], group: dict[str, str], *passes: str, zero: int = 3, **plan: Any
) -> list[Executable]:
    plan = zgraph.Plan(mesh={"dp": WORLD}, zero=zero, passes=passes, **plan)
    parts = split(programs(model, plan, inputs, WORLD).program)
    assert parts.backward is not None
    forward = compile_inductor(parts.forward, group)
    adopt_strides(parts.backward, forward)
    return [forward, compile_inductor(parts.backward, group, is_backward=True)]
