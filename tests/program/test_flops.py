"""The operations of products: torch's formulas, and the same for attention on a CPU, which torch's table lacks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zgraph
from zgraph.build.planned_step import programs
from zgraph.program.flops import BEYOND_TORCH, product_flops
from zgraph.program.node import Phase, info
from zgraph.runtime.timings import model_flops

ROWS, HEADS, WIDTH = 3, 2, 8


class Attention(nn.Module):
    """Attention of a batch's words [rows, words, heads x width] to themselves, after one product with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(HEADS * WIDTH, HEADS * WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.project(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).square().mean()


@pytest.mark.parametrize("words", [16, 40])
def test_attention_on_a_cpu_counts_as_on_a_device(words: int) -> None:
    x = torch.randn(ROWS, words, HEADS * WIDTH)
    program = programs(Attention(), zgraph.Plan(backend="eager"), (x,), 1).program
    by_phase = {Phase.FORWARD: 0, Phase.BACKWARD: 0}
    for node in program.nodes:
        by_phase[info(node).phase] += product_flops(node)
    product = 2 * ROWS * words * (HEADS * WIDTH) ** 2
    scores = 2 * ROWS * HEADS * words * words * WIDTH  # of queries and keys; as many of these and values
    assert by_phase == {Phase.FORWARD: product + 2 * scores, Phase.BACKWARD: product + 5 * scores}
    assert model_flops(program) == sum(by_phase.values())


@pytest.mark.parametrize("heads", [HEADS, 1])
@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_attention_with_fewer_heads_of_keys_counts_each_of_the_queries(name: str, heads: int) -> None:
    shapes = (ROWS, HEADS, 16, WIDTH), *[(ROWS, heads, 24, WIDTH)] * 2
    scores = 2 * ROWS * HEADS * 16 * 24 * WIDTH
    aten = torch.ops.aten
    forward = BEYOND_TORCH[getattr(aten, f"_scaled_dot_product_{name}_attention")]
    backward = BEYOND_TORCH[getattr(aten, f"_scaled_dot_product_{name}_attention_backward")]
    assert (forward(*shapes), backward(shapes[0], *shapes)) == (2 * scores, 5 * scores)
