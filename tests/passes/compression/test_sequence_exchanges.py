"""Ranks of context parallelism exchange heads, and keys and values of a ring, in few bits (`wire.activations`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from sweeps import sweep
from torch import Tensor, nn
from torch.nn import functional as F

import zgraph
from zgraph.build.planned_step import programs
from zgraph.codegen.kernels import cpu_blocks
from zgraph.passes.analysis.costs import CPU, Costs
from zgraph.program import collectives
from zgraph.program.block_quantization import FROM_BLOCKS, SENDERS, TO_BLOCKS, bytes_of
from zgraph.program.node import Role, info, tensor
from zgraph.program.program import Program

BLOCK, ROWS, LENGTH, HEADS, WIDTH = 16, 4, 16, 4, 32
PART = ROWS * LENGTH * WIDTH // 2  # elements of a rank of two


class Net(nn.Module):
    """One attention, with a mask that stays as it is."""

    def __init__(self, causal: bool = False, masked: bool = False) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.mixed, self.out = (nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(n)) for n in (3, 1))
        self.causal, self.masked = causal, masked

    def apart(self, x: Tensor, sent: Callable[[Tensor], Tensor] = lambda mixed: mixed) -> list[Tensor]:
        return [sent(layer(x)).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for layer in self.mixed]

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(LENGTH, LENGTH).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
        seen = F.scaled_dot_product_attention(
            *self.apart(x), attn_mask=mask if self.masked else None, is_causal=self.causal
        )
        return (x + self.out[0](seen.transpose(1, 2).flatten(2))).square().mean()


def batch() -> Tensor:
    return torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(3))


def plan(attention: str, activations: str = "int8", ranks: int = 2, **fields: Any) -> zgraph.Plan:
    wire = {"activations": activations, "block": BLOCK}
    given = {"mesh": {"dp": -1, "cp": ranks}, "zero": 0, "backend": "eager", "context_attention": attention}
    return zgraph.Plan(**{**given, "wire": wire, **fields})


def exchanges(model: nn.Module, asked: zgraph.Plan) -> tuple[Program, list[tuple[str, str, int]]]:
    """The program, and (kind, dtype, elements) of what a rank gives to each exchange of attention, in order."""
    ranks = asked.mesh["cp"]
    program = programs(model, asked, (batch(),), ranks, Costs(CPU)).program
    starts = [n for n in program.nodes if collectives.is_start(n) and info(n).role is Role.EXCHANGE]
    given = [(collectives.kind(n), tensor(n.all_input_nodes[0])) for n in starts]
    rows = [(kind, str(x.dtype).removeprefix("torch."), x.numel()) for kind, x in given]
    return program, [row for row in rows if row[0] in ("all_to_all", "shift")]


# -- what is sent -----------------------------------------------------------------------------------------------------
def test_turns_of_heads_are_in_the_bytes_of_the_format() -> None:
    _, exact = exchanges(Net(), plan("heads", "same"))
    assert exact == 8 * [("all_to_all", "float32", PART)], "three before attention and one behind it, and back"
    _, few = exchanges(Net(), plan("heads"))
    assert few == 8 * [("all_to_all", "uint8", 2 * bytes_of(PART // 2, "int8", BLOCK))]


@pytest.mark.parametrize("ranks", [2, 4])
def test_keys_and_values_are_quantized_once_and_go_around_as_bytes(ranks: int) -> None:
    part = 2 * PART // ranks
    _, exact = exchanges(Net(), plan("ring", "same", ranks))
    around = 2 * (ranks - 1)  # keys and values, forward; in the backward they go again, and their gradients to the end
    assert exact == (2 * around + 2 * ranks) * [("shift", "float32", part)]
    program, few = exchanges(Net(), plan("ring", "int4", ranks))
    assert few == len(exact) * [("shift", "uint8", bytes_of(part, "int4", BLOCK))]
    senders = [n for n in program.nodes if n.target in SENDERS]
    assert len(senders) == 2 + 2 + 2 * ranks


def test_masks_stay_as_they_are() -> None:
    model, inputs = Net(masked=True), (batch(),)
    found = zgraph.verify(model, plan("heads"), 2, inputs)
    assert found.ok, str(found)
    _, few = exchanges(model, plan("heads"))
    assert {dtype for _, dtype, _ in few} == {"uint8"} and len(few) == 8


# -- right ------------------------------------------------------------------------------------------------------------
WAYS: list[tuple[str, str, int, dict[str, Any], bool]] = [
    ("heads", "int8", 2, {}, False),
    ("ring", "int4", 4, {}, False),
    ("ring", "int8", 2, {}, True),
    ("heads", "fp8", 4, {"backend": "inductor"}, True),
    ("ring", "bf16", 2, {"backend": "inductor", "recompute": "full"}, True),
    ("ring", "int8", 2, {"mesh": {"dp": 2, "cp": 2}, "zero": 3}, True),
    ("heads", "int8", 2, {"mesh": {"cp": 2, "tp": 2}}, True),
    ("ring", "int8", 2, {"mesh": {"pp": 2, "cp": 2}, "micro_batches": 2}, False),
]


@sweep("attention, format, ranks, fields, causal", WAYS, quick=(0, 1, 2), ids=str)
def test_the_rest_is_the_plain_model_and_each_value_is_within_its_bound(
    attention: str, format: str, ranks: int, fields: dict[str, Any], causal: bool
) -> None:
    asked = plan(attention, format, ranks, **fields)
    world = 4 if len(fields.get("mesh", {})) == 2 else ranks
    found = zgraph.verify(Net(causal), asked, world, (batch(),))
    assert found.ok, str(found)
    sent = [d for d in found.differences if d.what == "sent value"]
    assert sent and max(d.error for d in sent) > 0.3


@pytest.mark.parametrize("attention", ["heads", "ring"])
def test_a_value_that_is_too_wrong_is_found(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = cpu_blocks.quantize
    monkeypatch.setattr(cpu_blocks, "quantize", lambda x, *told: honest(x * 0.9, *told))
    found = zgraph.verify(Net(), plan(attention), 2, (batch(),))
    assert not found.ok and found.first is not None and found.first.what == "sent value"


def as_sent(x: Tensor, parts: int = 1) -> Tensor:
    told = ("int4", BLOCK, parts)
    return FROM_BLOCKS(TO_BLOCKS(x.contiguous(), *told), *told, list(x.shape), x.dtype)


def turned(x: Tensor, source: int, target: int) -> Tensor:
    """Turn a value that ranks of two divide along one dimension to one that they divide along another, as it is sent;
    return the whole."""
    there = [torch.stack(part.chunk(2, target)) for part in x.chunk(2, source)]  # [rank that gets it, …] of each rank
    came = [as_sent(parts.flatten(0, 1), 2).view(parts.shape) for parts in there]
    return torch.cat([torch.cat([parts[rank] for parts in came], source) for rank in (0, 1)], target)


@torch.no_grad()
def by_hand(attention: str) -> float:
    """The loss of plain PyTorch whose attention gets what two ranks send each other."""
    net, x = Net(), batch()
    if attention == "heads":  # (what products give is turned, before it is cut into heads)
        q, k, v = net.apart(x, lambda mixed: turned(mixed, 1, 2))
        seen = turned(F.scaled_dot_product_attention(q, k, v), 1, 2)
    else:
        q, k, v = net.apart(x)
        qs, ks, vs = (t.chunk(2, 2) for t in (q, k, v))
        rows = []
        for rank in (0, 1):
            keys, values = (torch.cat([t[rank], as_sent(t[1 - rank])], 2) for t in (ks, vs))
            rows.append(F.scaled_dot_product_attention(qs[rank], keys, values))
        seen = torch.cat(rows, 2)
    return float((x + net.out[0](seen.transpose(1, 2).flatten(2))).square().mean())


def losses(attention: str, format: str, backend: str, steps: int) -> list[float]:
    asked = plan(attention, format, backend=backend, optimizer=zgraph.SGD(lr=0.5))
    model = zgraph.compile(Net(), asked)
    return [float(model.zgraph.train_step(batch())) for _ in range(steps)]


@pytest.mark.gloo
@sweep("attention", ["heads", "ring"], quick=1)
def test_two_ranks_compute_with_what_was_sent(two: Ranks, attention: str) -> None:
    exact = two.run(losses, attention, "same", "eager", 5)[0]
    few = two.run(losses, attention, "int4", "eager", 5)
    assert few[0] == few[1] and few[0] == pytest.approx(exact, rel=0.05)
    assert few[0][0] == pytest.approx(by_hand(attention), rel=2e-6)
    assert abs(few[0][0] - exact[0]) > 2e-5 * exact[0]
