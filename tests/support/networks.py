"""Small random networks, meshes and hardware, for tests of claims about any of them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import zgraph
from zgraph.build.pass_pipeline import build
from zgraph.build.planned_step import programs
from zgraph.passes import PassManager
from zgraph.passes.analysis.costs import Costs, Hardware, Link
from zgraph.passes.manager import History
from zgraph.program.program import Program
from zgraph.verification.virtual_ranks import run_virtual

ROWS = 4
KINDS = ("linear", "wide", "branch", "again", "tied", "frozen", "norm", "table")
ALONE: dict[str, Any] = {"prefetch": {"enabled": False}, "bucket": {"gather": 0, "reduce": 0}}


class Network(nn.Module):
    """A chain of layers of these kinds; "again" uses the first layer again, "tied" its weight. What a "table" adds to the
    activations has its tangent, an input of the backward, for a gradient if it comes last."""

    def __init__(self, kinds: tuple[str, ...], width: int, loss: bool) -> None:
        super().__init__()
        self.kinds, self.loss = kinds, loss
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(self._layer(kind, width) for kind in kinds)

    def _layer(self, kind: str, width: int) -> nn.Module:
        match kind:
            case "linear" | "frozen":
                return nn.Linear(width, width).requires_grad_(kind != "frozen")
            case "wide":
                return nn.Sequential(nn.Linear(width, 3 * width + 1), nn.ReLU(), nn.Linear(3 * width + 1, width))
            case "branch":
                return nn.ModuleList([nn.Linear(width, width, bias=False), nn.Linear(width, width)])
            case "norm":
                return nn.LayerNorm(width)
            case "table":
                return nn.ParameterList([torch.randn(ROWS, width)])
        return nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            match kind:
                case "again":
                    x = torch.tanh(self.first(x))
                case "tied":
                    x = torch.tanh(F.linear(x, self.first.weight.t()))
                case "branch":
                    x = torch.tanh(layer[0](x)) + layer[1](x)
                case "table":
                    x = x + layer[0]
                case _:
                    x = torch.tanh(layer(x))
        return x.pow(2).mean() if self.loss else x


@dataclass(frozen=True)
class Case:
    """A network and where it runs. `plan` are the fields that decide what is transferred, not when."""

    kinds: tuple[str, ...]
    width: int
    loss: bool
    plan: dict[str, Any]
    world: int

    def plain(self) -> History:
        """Captured, and with each transfer by itself, waited for where it starts."""
        torch.manual_seed(0)
        model = Network(self.kinds, self.width, self.loss)
        plan = zgraph.Plan(**{**self.plan, **ALONE})
        return programs(model, plan, (torch.randn(ROWS, self.width),), self.world)

    def scheduled(self, captured: Program, costs: Costs, **plan: Any) -> History:
        """Every pass is verified by the manager."""
        return PassManager(build(zgraph.Plan(**{**self.plan, **plan}), costs=costs)).run(captured.snapshot())


@st.composite
def cases(draw: st.DrawFn, stages: tuple[int, ...] = (0, 1, 2, 3)) -> Case:
    dp = draw(st.integers(2, 4))
    mesh, world = draw(st.sampled_from([({"dp": dp}, dp), ({"replicate": 2, "dp": 2}, 4)]))
    plan: dict[str, Any] = {
        "mesh": mesh,
        "zero": draw(st.sampled_from(stages)),
        "backend": "eager",
        "precision": draw(st.sampled_from(["fp32", "fp32", "bf16"])),
    }
    if draw(st.booleans()):  # an optimizer's update starts the first gathers of the next forward
        plan["optimizer"] = zgraph.AdamW()
    kinds = tuple(draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=6)))
    return Case(kinds, draw(st.sampled_from([5, 7, 8])), draw(st.booleans()), plan, world)


@st.composite
def tables(draw: st.DrawFn) -> Costs:
    """Rates and latencies over orders of magnitude; mesh dimensions with one link or with two."""

    def between(low: int, high: int) -> float:
        return 10.0 ** draw(st.integers(low, high))

    def link() -> Link:
        return Link(
            bandwidth=between(2, 12),
            latency=draw(st.sampled_from([0.0, 1e-6, 1e-3])),
            scatter=draw(st.sampled_from([1.0, 2.0])),
            work=draw(st.sampled_from([0.0, 1e-9, 1e-6])),
        )

    links = {"*": link()} if draw(st.booleans()) else {"dp": link(), "replicate": link()}
    rates = {
        "flops": {"float32": between(4, 15)},
        "memory": between(6, 13),
        "launch": draw(st.sampled_from([0.0, 1e-5])),
    }
    return Costs(Hardware(name="drawn", capacity=1, host=1.0, links=links, **rates), fused=draw(st.booleans()))


def inputs(program: Program) -> list[list[torch.Tensor]]:
    """Values for each rank, which depend on ports' names alone."""
    given = []
    for rank in range(program.world):
        values = []
        for port, node in program.input_items():
            fake = node.meta["val"]
            generator = torch.Generator().manual_seed(zlib.crc32(f"{port.role} {port.name} {rank}".encode()))
            made = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
            values.append(made.copy_(torch.randn(fake.shape, generator=generator)))
        given.append(values)
    return given


def outputs(program: Program) -> dict[tuple[str, str, int], torch.Tensor]:
    """What a program that is not split gives for these on virtual ranks, by role, name and rank."""
    return {
        (port.role.value, port.name, rank): value
        for rank, values in enumerate(run_virtual(program, inputs(program)))
        for port, value in zip(program.outputs, values, strict=True)
    }
