"""Ranks of tensor parallelism exchange activations and their gradients in few bits (`wire.activations`)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from sweeps import sweep
from torch import Tensor, nn

import zgraph
from zgraph.build.planned_step import programs
from zgraph.codegen.kernels import cpu_blocks
from zgraph.errors import PlanError
from zgraph.passes.analysis.costs import Costs, Hardware, Link
from zgraph.program import collectives
from zgraph.program.block_quantization import FROM_BLOCKS, TO_BLOCKS, bytes_of
from zgraph.program.node import Role, info, tensor

BLOCK = 16


class Net(nn.Module):
    """On ranks that divide it: a sum after the first layer and one after the last; in the backward one before `up`."""

    def __init__(self, width: int = 16, inner: int = 32) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.up, self.down = nn.Linear(width, width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return (x + self.down(torch.relu(self.up(x)))).square().mean()


def hardware(latency: float) -> Hardware:
    links = {"*": Link(bandwidth=1e9, latency=latency)}
    return Hardware(name="test", flops={"float32": 1e9}, memory=1e9, capacity=1, host=1.0, links=links)


def plan(activations: str = "int8", ranks: int = 2, **fields: Any) -> zgraph.Plan:
    wire = {"activations": activations, "block": BLOCK, **fields.pop("wire", {})}
    return zgraph.Plan(**{"mesh": {"dp": -1, "tp": ranks}, "zero": 0, "backend": "eager", "wire": wire, **fields})


def batch(rows: int = 6) -> Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(3))


def exchanged(
    model: nn.Module, asked: zgraph.Plan, inputs: tuple[Any, ...], latency: float = 0.0
) -> list[tuple[str, str, int]]:
    """(kind, dtype, bytes) of what a rank gives to each exchange, in order."""
    program = programs(model, asked, inputs, asked.mesh["tp"], Costs(hardware(latency))).program
    starts = [n for n in program.nodes if collectives.is_start(n) and info(n).role is Role.EXCHANGE]
    operands = [(collectives.kind(n), tensor(n.all_input_nodes[0])) for n in starts]
    return [(kind, str(x.dtype).removeprefix("torch."), x.numel() * x.element_size()) for kind, x in operands]


# -- what is sent -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks, format", [(2, "int8"), (4, "int4"), (2, "bf16")])
def test_sums_are_in_the_bytes_of_the_format(ranks: int, format: str) -> None:
    part = bytes_of(6 * 16 // ranks, format, BLOCK)
    halves = [("all_to_all", "uint8", ranks * part), ("all_gather", "uint8", part)]
    assert exchanged(Net(), plan(format, ranks), (batch(),)) == 3 * halves


def test_parts_of_a_sequence_are_in_the_bytes_of_the_format() -> None:
    found = exchanged(Net(), plan(sequence_parallel=True), (torch.randn(4, 8, 16),))
    size = 4 * 8 * 16
    few = [found[at] for at, (_, dtype, _) in enumerate(found) if dtype == "uint8"]
    assert set(few) == {
        ("all_to_all", "uint8", 2 * bytes_of(size // 2, "int8", BLOCK)),
        ("all_gather", "uint8", bytes_of(size // 2, "int8", BLOCK)),
    }
    exact = [f for f in found if f not in few]
    assert ("all_reduce", "float32", 4 * 16) in exact, "the gradient of a bias"
    assert ("reduce_scatter", "float32", 4 * 16 * 16) in exact, "the gradient of a weight"


def test_a_sum_stays_where_a_second_latency_costs_more_than_it_saves() -> None:
    assert {dtype for _, dtype, _ in exchanged(Net(), plan(), (batch(),), latency=1.0)} == {"float32"}


class Words(nn.Module):
    """Ranks divide its words: the loss is made of a maximum and sums over ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.words, self.layer, self.head = nn.Embedding(64, 16), nn.Linear(16, 16), nn.Linear(16, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layer(self.words(ids)).tanh()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.mark.slow
def test_statistics_and_losses_stay_as_they_are() -> None:
    ids = torch.randint(0, 64, (4, 8))
    few, exact = (exchanged(Words(), plan(f), (ids,)) for f in ("int8", "same"))
    statistics = [f for f in exact if f[2] <= 4 * ids.numel()]
    assert statistics and [f for f in few if f[1] != "uint8"] == statistics


# -- right ------------------------------------------------------------------------------------------------------------
WAYS = [
    ("gpt2", {"zero": 3, "mesh": {"dp": 2, "tp": 2}}, 4),
    ("even_mlp", {"sequence_parallel": True}, 2),
    ("gpt2", {"sequence_parallel": True}, 2),
    ("gpt2", {"backend": "inductor"}, 2),
    ("gpt2", {"sequence_parallel": True, "async_tensor_parallel": 2}, 2),
    ("gpt2", {"partition_activations": True, "recompute": "full"}, 2),
    ("gpt2", {"mesh": {"pp": 2, "tp": 2}, "micro_batches": 2}, 4),
    ("gpt2", {"mesh": {"tp": 4}}, 4),
]


@sweep("name, fields, world", WAYS, quick=(1,), ids=str)
def test_the_rest_is_the_plain_model_and_each_value_is_within_its_bound(
    name: str, fields: dict[str, Any], world: int, tmp_path: Path
) -> None:
    case = models.build(name)
    file = tmp_path / "test.json"
    file.write_text(hardware(0.0).model_dump_json())
    found = zgraph.verify(case.model, plan(**fields, hardware=str(file)), world, case.inputs, case.loss_fn)
    assert found.ok, str(found)
    sent = [d for d in found.differences if d.what == "sent value"]
    assert sent and max(d.error for d in sent) > 0.3


def test_a_sum_that_is_too_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = cpu_blocks.quantize
    monkeypatch.setattr(cpu_blocks, "quantize", lambda x, *told: honest(x * 0.9, *told))
    found = zgraph.verify(Net(), plan(sequence_parallel=True), 2, (torch.randn(4, 8, 16),))
    assert not found.ok and found.first is not None and found.first.what == "sent value"


def summed(parts: tuple[Tensor, ...], format: str) -> Tensor:
    """What ranks with these parts of a sum get, as the wire has it."""
    ranks = len(parts)
    flat = [p.reshape(-1) for p in parts]
    flat = [torch.cat([f, f.new_zeros(-f.numel() % ranks)]) for f in flat]
    told = (format, BLOCK)
    came = [FROM_BLOCKS(TO_BLOCKS(f, *told, ranks), *told, ranks, list(f.shape), f.dtype) for f in flat]
    total = sum(came[1:], came[0].clone())
    back = FROM_BLOCKS(TO_BLOCKS(total, *told, ranks), *told, ranks, list(total.shape), total.dtype)
    return back[: parts[0].numel()].view(parts[0].shape)


class Sum(torch.autograd.Function):
    """The sum of what ranks have, in few bits."""

    @staticmethod
    def forward(ctx, format, *parts):
        ctx.ranks = len(parts)
        return summed(parts, format)

    @staticmethod
    def backward(ctx, grad):
        return None, *[grad] * ctx.ranks


class Copies(torch.autograd.Function):
    """A value on each rank; its gradient is the sum of theirs, in few bits."""

    @staticmethod
    def forward(ctx, format, x, ranks):
        ctx.format = format
        return tuple(x.clone() for _ in range(ranks))

    @staticmethod
    def backward(ctx, *grads):
        return None, summed(grads, ctx.format), None


def by_hand(format: str, ranks: int) -> dict[str, Tensor]:
    """Gradients of plain PyTorch with each rank's part of each layer, and sums over ranks in few bits."""
    net = Net()
    cut = lambda x, dim: x.chunk(ranks, dim)  # noqa: E731
    parts = [x @ w.t() for x, w in zip(cut(batch(), 1), cut(net.first.weight, 1), strict=True)]
    y = (Sum.apply(format, *parts) + net.first.bias).tanh()
    copies = Copies.apply(format, y, ranks)
    ups = zip(copies, cut(net.up.weight, 0), cut(net.up.bias, 0), strict=True)
    inner = [torch.relu(c @ w.t() + b) for c, w, b in ups]
    parts = [x @ w.t() for x, w in zip(inner, cut(net.down.weight, 1), strict=True)]
    (y + Sum.apply(format, *parts) + net.down.bias).square().mean().backward()
    return {n: p.grad for n, p in net.named_parameters()}


def gradients(format: str, backend: str, file: str) -> dict[str, Tensor]:
    model = zgraph.compile(Net(), plan(format, dist.get_world_size(), backend=backend, hardware=file))
    model(batch()).backward()
    whole = {n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in model.named_parameters()}
    return {n: copy.deepcopy(g) for n, g in whole.items()}


def as_by_hand(ranks: Ranks, world: int, backend: str, folder: Path) -> None:
    file = folder / "test.json"
    file.write_text(hardware(0.0).model_dump_json())
    expected, exact = by_hand("int4", world), Net()
    exact(batch()).backward()
    for found in ranks.run(gradients, "int4", backend, str(file)):
        for name, param in exact.named_parameters():
            size = float(expected[name].norm())
            # (a value that is rounded otherwise by float32 may be sent as the next number)
            assert float((found[name] - expected[name]).norm()) <= 0.005 * size, name
            assert float((found[name] - param.grad).norm()) >= 0.02 * size, name


@pytest.mark.gloo
def test_two_ranks_compute_with_what_was_sent(two: Ranks, tmp_path: Path) -> None:
    as_by_hand(two, 2, "eager", tmp_path)


@pytest.mark.gloo
@pytest.mark.inductor
@pytest.mark.slow
def test_two_ranks_compute_with_what_was_sent_on_inductor(two: Ranks, tmp_path: Path) -> None:
    as_by_hand(two, 2, "inductor", tmp_path)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_four_ranks_compute_with_what_was_sent(four: Ranks, tmp_path: Path, backend: str) -> None:
    as_by_hand(four, 4, backend, tmp_path)


def lengths(format: str, file: str) -> list[float]:
    model = zgraph.compile(Net(), plan(format, 2, hardware=file, optimizer=zgraph.SGD(lr=0.5)))
    return [float(model.zgraph.train_step(batch(rows))) for rows in (6, 9, 4, 11)]


@pytest.mark.gloo
@pytest.mark.slow
def test_batches_that_differ_from_step_to_step(two: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "test.json"
    file.write_text(hardware(0.0).model_dump_json())
    exact, few = (two.run(lengths, format, str(file))[0] for format in ("same", "int8"))
    assert few != exact and few == pytest.approx(exact, rel=0.02)


class Odd(nn.Module):
    """Ranks sum up rows of three elements: two of them divide an even number of rows alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


def odd_lengths(format: str, file: str, shapes: str) -> list[float]:
    asked = plan(format, 2, hardware=file, optimizer=zgraph.SGD(lr=0.1), shapes=shapes)
    model = zgraph.compile(Odd(), asked)
    return [float(model.zgraph.train_step(batch(rows))) for rows in (7, 10, 5)]


@pytest.mark.slow
@pytest.mark.gloo
def test_lengths_that_ranks_do_not_divide_are_right_in_a_program_each(two: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "test.json"
    file.write_text(hardware(0.0).model_dump_json())
    exact = two.run(odd_lengths, "same", str(file), "static")[0]
    for shapes in ("static", "dynamic"):  # (one program for all is given up, with a line that says so)
        few = two.run(odd_lengths, "int8", str(file), shapes)[0]
        assert few != exact and few == pytest.approx(exact, rel=0.02)


def test_declared_lengths_that_ranks_do_not_divide_are_refused() -> None:
    declared = {"mesh": {"tp": 2}, "dynamic": {"x": {0: "rows"}}}
    assert exchanged(Net(), plan(**declared), (batch(),)), "rows of sixteen elements"
    with pytest.raises(PlanError, match="2 does not divide its elements at all lengths"):
        exchanged(Odd(), plan(**declared), (batch(),))


# -- refused ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mesh", [{"dp": -1}, {"replicate": 2, "dp": -1}])
def test_a_plan_that_sends_no_activations_is_refused(mesh: dict[str, int]) -> None:
    with pytest.raises(PlanError, match="no ranks exchange activations"):
        plan(mesh=mesh)
