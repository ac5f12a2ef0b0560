"""Ranks of "tp" keep saved activations in parts, and nothing that is computed changes for it, bit for bit."""

from __future__ import annotations

import functools
import gc
import math

import pytest
import refusals
import torch
import torch.distributed as dist
from divided_models import LENGTH, ROWS, WIDTH, Llama, own
from ranks import Ranks
from torch import nn

import zgraph
from zgraph.build.pass_pipeline import build
from zgraph.build.planned_step import programs
from zgraph.errors import PlanError, UnsupportedError
from zgraph.passes import History
from zgraph.passes.analysis.costs import size_of
from zgraph.passes.analysis.live_memory import memory_of
from zgraph.passes.analysis.saved_values import crossings
from zgraph.passes.spmd.partition_activations import SMALL, same_on_all
from zgraph.program import collectives
from zgraph.program.aliases import root_of
from zgraph.program.node import Phase, info, tensor
from zgraph.program.program import InputRole, Program
from zgraph.runtime import allocations
from zgraph.verification.virtual_stages import VirtualPipeline
from zgraph.verification.virtual_step import virtual_step

PASS = "partition_activations"


def plan_of(**fields) -> zgraph.Plan:
    return zgraph.Plan(**{"mesh": {"tp": 2}, "backend": "eager", "zero": 0, PASS: True} | fields)


def without(plan: zgraph.Plan) -> zgraph.Plan:
    return plan.model_copy(update={PASS: False})


def made_of(model: nn.Module, inputs, plan: zgraph.Plan) -> History:
    return programs(model, plan, inputs, math.prod(plan.mesh.values()))


@functools.cache
def made(name: str, plan: zgraph.Plan) -> History:
    """Of a model of `divided_models`."""
    return made_of(*own(name), plan)


def stats_of(history: History) -> dict[str, int]:
    return next(record.stats for record in history.records if record.name == PASS)


def gathers_of(program: Program) -> list:
    return [n for n in program.nodes if collectives.is_start(n) and info(n).made_by == PASS]


def at_turn(program: Program) -> int:
    """The bytes of activations between the forward and the backward."""
    nodes = program.nodes
    first = min(i for i, n in enumerate(nodes) if n.op == "call_function" and info(n).phase is Phase.BACKWARD)
    return memory_of(program)[first - 1]["activations"]


# -- what is computed ---------------------------------------------------------------------------------------------------
def assert_nothing_changes(model: nn.Module, inputs, plan: zgraph.Plan, gathers: int = 1) -> None:
    """On virtual ranks: as the plain model, and bit for bit as by the same plan with whole activations."""
    found = []
    for asked in (plan, without(plan)):
        torch.manual_seed(1)
        with virtual_step(model, asked, math.prod(plan.mesh.values()), inputs) as step:
            parts = step.step.parts()
            assert (len(gathers_of(parts.backward)) >= gathers) == asked.partition_activations
            found.append(step.of_parts(parts))
            wrong = [d for d in step.differences(found[-1]) if not d.ok]
            assert not wrong, wrong
    for mine, others in zip(*found, strict=True):
        assert mine.keys() == others.keys() and any(what == "gradient" for what, _ in mine)
        assert all(torch.equal(mine[key], others[key]) for key in mine)


MESHES = [
    ({"tp": 2}, 0),
    ({"tp": 4}, 0),
    ({"dp": 2, "tp": 2}, 1),
    ({"dp": 2, "tp": 2}, 3),
]


@pytest.mark.parametrize("mesh, zero", MESHES, ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2 with dropout"])
@pytest.mark.slow
def test_values_kept_in_parts_are_those_kept_whole(name, mesh, zero):
    assert_nothing_changes(*own(name), plan_of(mesh=mesh, zero=zero))


@pytest.mark.parametrize("name", ["encoder", "convolutions"])
@pytest.mark.slow
def test_so_they_are_of_other_models(name):
    assert_nothing_changes(*own(name), plan_of())


@pytest.mark.parametrize(
    "fields",
    [
        {"recompute": "full"},
        {"recompute": ("layers.*",)},
        {"sequence_parallel": True},
        {"backend": "inductor"},
        {"backend": "inductor", "recompute": "full"},
        {"offload": {"activations": "cpu", "least_bytes": 0}},
    ],
    ids=str,
)
@pytest.mark.slow
def test_so_they_are_with_the_rest_of_a_plan(fields):
    assert_nothing_changes(*own("llama"), plan_of(**fields))


@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
@pytest.mark.slow
def test_so_they_are_in_the_stages_of_a_pipeline(schedule):
    plan = plan_of(mesh={"pp": 2, "tp": 2}, micro_batches=2, schedule=schedule)
    model, inputs = own("llama")
    with virtual_step(model, plan, 4, inputs) as step:
        run = VirtualPipeline(step)
        wrong = [d for d in run.differences if not d.ok]
        assert not wrong, wrong
    for stage in run.planned.steps:
        parts = stage.parts(apart=schedule == "zb")
        backwards = [p for p in (parts.backward, parts.weights) if p is not None]
        assert any(gathers_of(p) for p in backwards)
        assert not any(p.input_nodes(InputRole.RECEIVED) for p in backwards)  # (what came from the stage before, too)


# -- what is kept -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks, recompute", [(2, "none"), (4, "full")])
@pytest.mark.slow
def test_of_what_was_whole_a_rank_keeps_its_share(ranks, recompute):
    plan = plan_of(mesh={"tp": ranks}, recompute=recompute)
    parted, whole = made("llama", plan), made("llama", without(plan)).program
    same = same_on_all(whole, "tp")
    before = sum(size_of(c.root) for c in crossings(whole) if c.root in same and c.root.op != "placeholder")
    stats = stats_of(parted)
    assert stats["whole_bytes"] >= (1 - SMALL) * before > 0
    assert stats["kept_bytes"] * ranks == stats["whole_bytes"]
    assert at_turn(whole) - at_turn(parted.program) == stats["whole_bytes"] - stats["kept_bytes"]


def test_checkpoints_of_full_recomputation_are_all_that_is_gathered():
    """What ranks of "tp" have parts of already, heads and inner widths, is not touched."""
    program = made("llama", plan_of(recompute="full")).program
    activation = ROWS * LENGTH * WIDTH
    large = [n for n in gathers_of(program) if tensor(n).numel() >= activation]
    assert {tensor(n).numel() for n in large} == {activation}
    same = same_on_all(program, "tp")
    assert not any(
        root_of(n.all_input_nodes[0]) in same for n in gathers_of(program)
    )  # (of each a rank has another part)


def test_what_is_the_same_on_all_ranks_follows_from_the_graph():
    """Weights that are divided are not, nor what is made of them alone; sums over ranks are."""
    program = made("llama", without(plan_of())).program
    same = same_on_all(program, "tp")
    params = program.input_nodes(InputRole.PARAMETER)
    assert params["norm.weight"] in same and params["layers.0.up_proj.weight"] not in same
    sums = [n for n in program.nodes if collectives.is_start(n)]
    assert sums and all(n in same and n.all_input_nodes[0] not in same for n in sums)


@pytest.mark.slow
def test_with_sequence_parallelism_there_is_next_to_nothing_left_to_part():
    some, few = (stats_of(made("llama", plan_of(sequence_parallel=s)))["whole_bytes"] for s in (False, True))
    assert few < some / 10


@pytest.mark.slow
def test_parts_are_cut_when_the_forward_is_done_with_the_whole():
    program = made("gpt2", plan_of()).program
    nodes = program.nodes
    at = {node: i for i, node in enumerate(nodes)}
    for gather in gathers_of(program):
        cut = gather.all_input_nodes[0]
        while info(cut).made_by == PASS and not collectives.is_wait(cut):
            cut, last = cut.all_input_nodes[0], cut
        readers = [n for n in nodes if any(root_of(a) is root_of(cut) for a in n.all_input_nodes) and n.op != "output"]
        assert all(info(n).phase is Phase.FORWARD for n in readers)
        assert not [n for n in readers if info(n).made_by != PASS and at[n] > at[last]]


def test_gathers_start_ahead_with_two_of_the_largest_values_on_their_way_at_most():
    program = made("llama", plan_of()).program
    starts = gathers_of(program)
    most = 2 * max(size_of(n) for n in starts)
    flying = 0
    ahead = 0
    for node in program.nodes:
        if node in starts:
            flying += size_of(node)
            ahead += node.next is not collectives.wait_of(node)
        elif collectives.is_wait(node) and collectives.start_of(node) in starts:
            flying -= size_of(node)
        assert flying <= most
    assert ahead > len(starts) / 2


class Turned(nn.Module):
    """Keeps values of several dtypes, also such as lie in memory in another order, and one through several views."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.down(self.up(x).tanh())
        turned = made.transpose(0, 2).exp() * made.transpose(0, 2).sigmoid()
        first, second = turned.split(turned.shape[0] // 2)
        return ((first * second).square() * (first > 0)).mean()


def test_a_value_lies_as_it_did_when_it_comes_back():
    torch.manual_seed(0)
    model, inputs = Turned().double(), (torch.randn(2, 6, WIDTH).double(),)
    plan = plan_of()
    assert_nothing_changes(model, inputs, plan, gathers=3)
    program = made_of(model, inputs, plan).program
    assert any(n.target is torch.ops.aten.permute.default and info(n).made_by == PASS for n in program.nodes)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh()).tanh().mean()


def test_a_value_that_ranks_do_not_divide_is_kept_whole_and_remarked_upon():
    torch.manual_seed(0)
    found = made_of(Odd().double(), (torch.randn(3, 5, 3).double(),), plan_of())
    (remark,) = [r for r in found.program.remarks if r.made_by == PASS]
    assert "45 elements are no multiple of 2" in str(remark) and not gathers_of(found.program)


# -- plans --------------------------------------------------------------------------------------------------------------
def test_it_is_refused_without_ranks_that_would_keep_the_same():
    with pytest.raises(PlanError, match="partition_activations is set without ranks that divide weights"):
        zgraph.Plan(partition_activations=True)


def test_it_is_no_part_of_a_pipeline_that_has_no_backward():
    names = [p.name for p in build(plan_of(), training=False)]
    assert PASS not in names and PASS in [p.name for p in build(plan_of())]


@pytest.mark.slow
def test_a_memory_budget_counts_parts():
    """A smaller one can be met, also where most is computed again; and what it then makes is the model."""
    model, inputs = own("llama")

    def least(plan: zgraph.Plan) -> int:
        return refusals.smallest(lambda: made_of(model, inputs, plan.model_copy(update={"memory_budget": 1})))

    plan = plan_of(async_tensor_parallel="off")  # (pieces of such small values are all copies)
    parted, whole = least(plan), least(without(plan))
    assert parted < whole
    plan = plan.model_copy(update={"memory_budget": parted})
    history = made_of(model, inputs, plan)
    assert gathers_of(history.program) and "rematerialize" in [r.name for r in history.records]
    found = zgraph.verify(model, plan, 2, inputs)
    assert found.ok, str(found)


# -- on ranks -----------------------------------------------------------------------------------------------------------
def wide() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Many tokens, so that activations are what a forward leaves."""
    torch.manual_seed(0)
    words = torch.randint(64, (16, 64))
    return Llama().double(), (words, words)


def kept_after_a_forward(plan: zgraph.Plan) -> tuple[int, list[torch.Tensor]] | None:
    """(the bytes that this rank's allocator holds for a backward, the gradients); None where bytes can't be counted."""
    try:
        allocations.count()
    except UnsupportedError:
        return None
    model, inputs = wide()
    zgraph.compile(model, plan)

    def live() -> int:
        gc.collect()
        dist.barrier()  # (what a collective took is let go when it is over)
        return allocations.live()

    for _ in range(2):
        model.zero_grad()
        before = live()
        loss = model(*inputs)
        held = live() - before
        loss.backward()
    return held, [p.grad.full_tensor() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.gloo
def test_ranks_are_counted_to_hold_so_much_less_and_have_the_same_gradients():
    plan = plan_of(recompute="full")
    with Ranks(2) as ranks:
        parted, whole = ranks.run(kept_after_a_forward, plan), ranks.run(kept_after_a_forward, without(plan))
    if None in parted:
        pytest.skip("no C++ compiler")
    model, inputs = wide()
    said = stats_of(made_of(model, inputs, plan))
    saved = said["whole_bytes"] - said["kept_bytes"]
    for (less, mine), (more, others) in zip(parted, whole, strict=True):
        assert more - less == pytest.approx(saved, rel=0.01) and saved > more / 4
        assert all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))


def compiled_gradients(plan: zgraph.Plan) -> list[torch.Tensor]:
    model, inputs = own("gpt2 with dropout")
    zgraph.compile(model, plan)
    torch.manual_seed(1)
    model(*inputs).backward()
    return [p.grad.full_tensor() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.inductor
def test_compiled_ranks_read_what_is_gathered_when_it_has_come():
    """Masks are read by kernels that fuse with those in front of the wait."""
    plan = plan_of(backend="inductor")
    with Ranks(2) as ranks:
        parted, whole = ranks.run(compiled_gradients, plan), ranks.run(compiled_gradients, without(plan))
    for mine, others in zip(parted, whole, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))
