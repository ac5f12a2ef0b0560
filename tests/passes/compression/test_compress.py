"""Weights and gradients in few bits on the wire: what is sent, how wrong it may be, and that a step is that of what was sent."""

from __future__ import annotations

import copy

import models
import pytest
import torch
import torch.distributed as dist
from padded_rows import PaddedRows
from ranks import Ranks
from sweeps import sweep
from torch import nn

import zgraph
from zgraph.build.planned_step import programs
from zgraph.codegen.kernels import cpu_blocks
from zgraph.errors import PlanError, UnsupportedError
from zgraph.inspection.bisect import bisect
from zgraph.passes.analysis.costs import Costs, Hardware, Link, size_of
from zgraph.program import collectives
from zgraph.program.block_quantization import FROM_BLOCKS, MEAN_OF_BLOCKS, TO_BLOCKS, bytes_of
from zgraph.program.node import info, tensor
from zgraph.program.program import Program

FULL = {"gather": "int8", "reduce": "int4"}


def plan(**fields) -> zgraph.Plan:
    return zgraph.Plan(**{"mesh": {"dp": -1}, "zero": 3, "backend": "eager", **fields})


def compressed(world: int, **fields) -> Program:
    return programs(PaddedRows(), plan(**fields), (torch.randn(8, 40),), world).program


def senders(program: Program) -> dict[str, int]:
    """Bytes that a rank gives to each collective that carries blocks, by parameter and kind."""
    found = {}
    for node in program.nodes:
        if collectives.is_start(node) and node.all_input_nodes[0].target is TO_BLOCKS:
            key = f"{info(node).param} {collectives.kind(node)}"
            found[key] = found.get(key, 0) + size_of(node.all_input_nodes[0])
    return found


# -- what is sent -----------------------------------------------------------------------------------------------------
def test_bytes_on_the_wire_are_those_of_the_formats() -> None:
    found = senders(compressed(4, wire={**FULL, "block": 100}))
    rows = 10 * 60  # of b, whose 37 rows are padded to 40
    assert found == {
        "a.weight all_gather": bytes_of(600, "int8", 100),
        "b.weight all_gather": bytes_of(rows, "int8", 100),
        "b.bias all_gather": bytes_of(10, "int8", 100),
        "a.weight all_to_all": 4 * bytes_of(600, "int4", 100),
        "b.weight all_to_all": 4 * bytes_of(rows, "int4", 100),
        "b.bias all_to_all": 4 * bytes_of(10, "int4", 100),
    }


def test_what_is_to_be_exact_and_what_gets_no_smaller_stays() -> None:
    found = senders(compressed(2, wire={"gather": "bf16", "reduce": "bf16", "exact": ("b.*",)}))
    assert found == {"a.weight all_gather": 2 * 1200, "a.weight all_to_all": 2 * 2400}
    low = compressed(
        2, precision={"compute": "bfloat16", "reduce": "bfloat16"}, wire={"gather": "fp16", "reduce": "bf16"}
    )
    assert not senders(low)


def test_a_parameter_of_one_element_stays_as_it_is() -> None:
    class Scaled(PaddedRows):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return self.gain.sum() * super().forward(x)

    options = plan(wire={"gather": "int4", "reduce": "int4", "block": 9})  # (no block divides a part either)
    found = senders(programs(Scaled(), options, (torch.randn(8, 40),), 2).program)
    assert "a.weight all_to_all" in found and not any(key.startswith("gain") for key in found)


def linked(latency: float) -> Costs:
    links = {"*": Link(bandwidth=1e9, latency=latency)}
    return Costs(Hardware(name="test", flops={"float32": 1e9}, memory=1e9, capacity=1, host=1.0, links=links))


def test_both_halves_of_an_all_reduce_are_small_where_that_saves_more_than_it_costs() -> None:
    def found(latency: float, **fields) -> dict[str, int]:
        options = plan(wire={"reduce": "int8"}, **fields)
        return senders(programs(PaddedRows(), options, (torch.randn(8, 40),), 4, linked(latency)).program)

    half = bytes_of(600, "int8", 256)  # a quarter of a
    alone = found(0.0, zero=0)
    assert (alone["a.weight all_to_all"], alone["a.weight all_gather"]) == (4 * half, half)
    assert not found(1.0, zero=0), "a second latency for each"
    grouped = found(0.0, mesh={"replicate": 2, "dp": 2})
    of_groups = 2 * bytes_of(1200, "int8", 256) + 2 * half  # within a group, and then of a rank's half between groups
    assert (grouped["a.weight all_to_all"], grouped["a.weight all_gather"]) == (of_groups, half)


def test_gradients_are_small_between_groups_alone() -> None:
    wire = {"gather": "same", "reduce": "int4", "hierarchical": True}
    options = plan(mesh={"replicate": 2, "dp": 2}, wire=wire)
    program = programs(PaddedRows(), options, (torch.randn(8, 40),), 4, linked(0.0)).program
    half = 1200  # of a, which a rank of two keeps of its group's mean
    assert senders(program) == {
        "a.weight all_to_all": 2 * bytes_of(half // 2, "int4", 256),  # once to the other group, and its mean once to it
        "a.weight all_gather": bytes_of(half // 2, "int4", 256),
        "b.weight all_to_all": 2 * bytes_of(19 * 60 // 2, "int4", 256),
        "b.weight all_gather": bytes_of(19 * 60 // 2, "int4", 256),
        "b.bias all_to_all": 2 * bytes_of(10, "int4", 256),
        "b.bias all_gather": bytes_of(10, "int4", 256),
    }
    exact = [n for n in program.nodes if n.target is collectives.REDUCE_SCATTER]
    assert {collectives.group_of(n) for n in exact} == {"dp"} and len(exact) == 3


def test_the_mean_that_groups_share_moves_into_a_bucket_with_what_it_is_of() -> None:
    """Three transfers one behind the other: within groups, which a bucket moves, between them, and of the mean."""
    case = models.build("vit")
    wire = {"reduce": "int4", "hierarchical": True}
    program = programs(case.model, plan(mesh={"replicate": 2, "dp": 2}, wire=wire), case.inputs, 4).program
    buckets = {info(n).bucket for n in program.nodes if n.target is collectives.REDUCE_SCATTER}
    assert len(buckets - {None}) > 0
    assert all(used < node for node in program.nodes for used in node.all_input_nodes)


# -- right ------------------------------------------------------------------------------------------------------------
WAYS = [
    (0, {"dp": -1}, 3, {"reduce": "int8"}),
    (1, {"dp": -1}, 3, FULL),
    (2, {"replicate": 2, "dp": 2}, 4, {"gather": "fp8", "reduce": "int8"}),
    (3, {"dp": -1}, 4, {"gather": "bf16", "reduce": "fp16"}),
    (3, {"replicate": 2, "dp": 2}, 4, {"gather": "int4", "reduce": "fp8", "block": 16}),
    (3, {"replicate": 2, "dp": 2}, 4, {"gather": "int8", "reduce": "int4", "hierarchical": True}),
]


@sweep("name", ["uneven_mlp", "channels_last", "tied", "gpt2", "vit", "bert", "lstm", "unet"], quick=(0, 1))
@pytest.mark.parametrize("zero, mesh, world, wire", WAYS, ids=str)
def test_the_rest_is_the_plain_model_and_each_value_is_within_its_bound(name, zero, mesh, world, wire) -> None:
    case = models.build(name)
    found = zgraph.verify(case.model, plan(zero=zero, mesh=mesh, wire=wire), world, case.inputs, case.loss_fn)
    assert found.ok, str(found)
    sent = [d for d in found.differences if d.what.startswith("sent")]
    assert all(d.error <= 1 for d in sent) and (zero == 0 or max(d.error for d in sent) > 0.3)


def test_a_stage_of_a_pipeline_sends_few_bits_to_its_replicas() -> None:
    case = models.build("even_mlp")
    found = zgraph.verify(
        case.model, plan(mesh={"pp": 2, "dp": 2}, wire=FULL, micro_batches=2), 4, case.inputs, case.loss_fn
    )
    assert found.ok and any(d.what == "sent gradient" for d in found.differences), str(found)


def test_a_value_that_is_too_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = cpu_blocks.quantize
    monkeypatch.setattr(cpu_blocks, "quantize", lambda x, *told: honest(x * 0.9, *told))
    found = zgraph.verify(PaddedRows(), plan(wire={"gather": "int8"}), 2, (torch.randn(8, 40),))
    assert not found.ok and found.first is not None and found.first.what == "sent value"


def as_sent(x: torch.Tensor, format: str, parts: int = 1) -> torch.Tensor:
    if format == "same":
        return x
    return FROM_BLOCKS(TO_BLOCKS(x.contiguous(), format, 256, parts), format, 256, parts, list(x.shape), x.dtype)


def rows_of(x: torch.Tensor, world: int) -> torch.Tensor:
    missing = -x.shape[0] % world
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def by_hand(batches: list[torch.Tensor], gather: str, reduce: str) -> dict[str, torch.Tensor]:
    """Gradients of plain PyTorch, with weights as all ranks get them and gradients as each sends them."""
    world, net = len(batches), PaddedRows()
    with torch.no_grad():
        for p in net.parameters():
            shards = rows_of(p, world).chunk(world)
            p.copy_(torch.cat([as_sent(s, gather) for s in shards])[: p.shape[0]])
    given: list[list[torch.Tensor]] = []
    for x in batches:
        net.zero_grad()
        net(x).backward()
        given.append([as_sent(rows_of(p.grad, world), reduce, world) for p in net.parameters()])
    means = [sum(grads[1:], grads[0].clone()) / world for grads in zip(*given, strict=True)]
    return {n: m[: p.shape[0]] for (n, p), m in zip(net.named_parameters(), means, strict=True)}


def batches(world: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return list(torch.randn(world, 4, 40, generator=draw))


def gradients(zero: int, backend: str, wire: dict[str, str]) -> dict[str, torch.Tensor]:
    model = zgraph.compile(PaddedRows(), plan(zero=zero, backend=backend, wire=wire))
    model(batches(dist.get_world_size())[dist.get_rank()]).backward()
    whole = {n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in model.named_parameters()}
    return {n: copy.deepcopy(g) for n, g in whole.items()}


REAL = [
    (3, "eager", FULL),
    (1, "eager", {"gather": "fp8", "reduce": "bf16"}),
    (3, "inductor", FULL),
    (2, "eager", {"reduce": "int8"}),
]


@pytest.mark.gloo
@sweep("zero, backend, wire", REAL, quick=(0, 1), ids=str)
def test_ranks_compute_with_what_was_sent(two: Ranks, zero, backend, wire) -> None:
    expected = by_hand(batches(2), wire.get("gather", "same"), wire.get("reduce", "same"))
    for found in two.run(gradients, zero, backend, wire):
        for name, grad in found.items():
            if backend == "eager":
                assert torch.equal(grad, expected[name]), name
            else:  # (a gradient that is rounded otherwise by float32 may be sent as the next number)
                assert (grad - expected[name]).norm() <= 0.02 * expected[name].norm(), name


def trained(wire: dict[str, str], micro_batches: int) -> list[float]:
    model = zgraph.compile(
        PaddedRows(),
        plan(zero=2, wire=wire, micro_batches=micro_batches, optimizer=zgraph.AdamW(lr=1e-2), grad_clip=1.0),
    )
    x = batches(dist.get_world_size())[dist.get_rank()]
    return [float(model.zgraph.train_step(x)) for _ in range(20)]


@pytest.mark.gloo
def test_it_learns_with_micro_batches_and_clipping(two: Ranks) -> None:
    exact, sent = (two.run(trained, wire, 2)[0] for wire in ({}, {"gather": "int8", "reduce": "int8"}))
    assert sent[-1] < 0.6 * sent[0] and abs(sent[-1] - exact[-1]) < 0.02 * exact[0] and sent != exact


# -- refused ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "fields, said",
    [
        ({"wire": {"gather": "int8"}, "zero": 0}, "zero is 0"),
        ({"wire": {"gather": "int3"}}, "gather"),
        ({"wire": {"gathers": "int8"}}, "gather"),
        ({"wire": "int8"}, r'wire={"gather": "int8", "reduce": "int8"}'),
        ({"wire": "auto"}, r'wire={"auto": True, "max_error": 0.005}'),
        ({"wire": {"reduce": "int8", "block": 1}}, "block"),
        ({"wire": {"hierarchical": True}, "mesh": {"replicate": 2, "dp": 2}}, "as they are"),
        ({"wire": {"reduce": "int4", "hierarchical": True}}, "mesh.replicate is 1"),
    ],
)
def test_a_wrong_plan_is_refused(fields, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plan(**fields)


@pytest.mark.parametrize("pattern, said", [("b.wieght", "b.weight"), ("second.weight", "'first.weight'")])
def test_a_pattern_that_names_no_parameter_is_refused(pattern: str, said: str) -> None:
    net: nn.Module = PaddedRows()
    if "second" in pattern:
        net = nn.Module()
        net.first = net.second = nn.Linear(2, 2)
        net.forward = lambda x: net.first(x).mean()  # type: ignore[method-assign]
    with pytest.raises(PlanError, match=said):
        zgraph.compile(net, plan(wire={"gather": "int8", "exact": (pattern,)}))(torch.randn(2, 2))


def test_what_compares_with_plain_numbers_refuses_it() -> None:
    with pytest.raises(UnsupportedError, match="real ranks"):
        zgraph.verify(
            PaddedRows(), plan(mesh={"dp": 1}, wire={"gather": "int8"}), 1, (torch.randn(8, 40),), compiled=True
        )
    with pytest.raises(PlanError, match="few bits"):
        bisect(PaddedRows(), plan(wire={"gather": "int8"}), 2, (torch.randn(8, 40),))


def test_a_gather_holds_the_weight_that_it_becomes() -> None:
    program = compressed(4, wire=FULL)
    backs = [n for n in program.nodes if n.target in (FROM_BLOCKS, MEAN_OF_BLOCKS)]
    assert {tensor(n).dtype for n in backs} == {torch.float32}
