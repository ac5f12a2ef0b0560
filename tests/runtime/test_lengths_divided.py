"""Sizes that differ from call to call, where ranks compute one program together: tensor parallelism, and a pipeline.

Functions at the top of this file run on the ranks; each returns what the test compares.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import test_lengths
import torch
import torch.distributed as dist
from sweeps import sweep
from test_lengths_gloo import Attention, Sentences, batch, whole
from torch import nn

import zgraph
from zgraph.errors import RankMismatchError, SizeError
from zgraph.program import collectives

pytestmark = pytest.mark.gloo
SIZES = [(4, 12), (4, 7), (6, 31), (8, 40)]


def plan_of(mesh: dict[str, int], **fields: Any) -> zgraph.Plan:
    own: dict[str, Any] = {"tensor_parallel": "auto"} if "tp" in mesh else {"micro_batches": 2}
    return zgraph.Plan(**{"mesh": mesh, "backend": "eager", "optimizer": zgraph.SGD(lr=0.1), **own, **fields})


def trained(model: nn.Module, plain: nn.Module, calls: list[dict[str, torch.Tensor]]) -> float:
    """The largest difference of a weight, or of a loss, to plain PyTorch's after steps with these calls."""
    worst = 0.0
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for call in calls:
        losses = [
            made if isinstance(made, torch.Tensor) else made.loss for made in (model.train_step(**call), plain(**call))
        ]
        losses[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        here = [(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True) if a.device.type != "meta"]
        differences = [float((whole(a) - b).abs().max()) for a, b in here]
        worst = max(worst, float((losses[0] - losses[1]).abs() / losses[1].abs()), *differences)
    return worst


class Pair(nn.Module):
    """What Inductor compiles in a second: a matrix that is divided by its rows, and one by its columns."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(31, 8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, words, targets):
        rows = self.down(torch.nn.functional.gelu(self.up(self.embed(words))))
        return (rows.square().mean(-1) * (targets >= 0)).mean()


def sizes_for(fields: dict[str, Any]) -> list[tuple[int, int]]:
    """The first is a program of its own unless all sizes are symbols from the first call on."""
    return SIZES[1:3] if "shapes" in fields else SIZES[:3]


def own_model(
    mesh: dict[str, int], fields: dict[str, Any], make: type[nn.Module] = Attention
) -> tuple[float, list[str], nn.Module]:
    """(as `trained`, the programs, the model) after steps of several lengths."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    plain = make()
    model = zgraph.compile(copy.deepcopy(plain), plan_of(mesh, **fields))
    worst = trained(model, plain, [batch(*at, 0) for at in sizes_for(fields)])
    return worst, [name.split(".")[0] for name in model.zgraph.programs], model


def on_inductor(mesh: dict[str, int]) -> tuple[float, list[str]]:
    return own_model(mesh, {"backend": "inductor", "shapes": "dynamic"}, Pair)[:2]


def beside_static(mesh: dict[str, int], fields: dict[str, Any]) -> tuple[float, list[str], list[float]]:
    """(as `trained`, the programs, how far each weight is from that of a model whose programs have numbers)."""
    worst, programs, model = own_model(mesh, fields)
    torch.manual_seed(0)
    static = zgraph.compile(Attention(), plan_of(mesh, **(fields | {"shapes": "static"})))
    for at in sizes_for(fields):
        static.train_step(**batch(*at, 0))
    pairs = zip(model.parameters(), static.parameters(), strict=True)
    return worst, programs, [float((whole(a) - whole(b)).abs().max()) for a, b in pairs if a.device.type != "meta"]


ONE_PROGRAM = ["train0", "train1"]


@sweep(
    "mesh, fields",
    [
        ({"tp": 2}, {}),
        ({"tp": 2}, {"zero": 3, "partition_activations": True, "recompute": "full"}),
        ({"tp": 2}, {"sequence_parallel": True, "async_tensor_parallel": 2, "shapes": "dynamic"}),
        ({"pp": 2}, {}),
        ({"pp": 2}, {"schedule": "zb", "recompute": "full", "shapes": "dynamic"}),
        ({"pp": 2}, {"precision": "fp16", "shapes": "dynamic"}),
    ],
    quick={4},
)
def test_one_program_serves_all_lengths_and_computes_what_static_ones_do(two, mesh, fields):
    for worst, programs, apart in two.run(beside_static, mesh, fields):
        assert worst < (2e-6 if "precision" not in fields else 2e-2)
        assert programs == (ONE_PROGRAM if "shapes" not in fields else ["train0"])[: len(programs)]
        assert max(apart) == 0.0 or "sequence_parallel" in fields  # (numbers divide the sequence, too)


@pytest.mark.inductor
@pytest.mark.parametrize("mesh", [{"pp": 2}, {"tp": 2}], ids=["pp", "tp"])
@pytest.mark.slow
def test_on_inductor_within_rounding(two, mesh):
    for worst, programs in two.run(on_inductor, mesh):
        assert worst < 3e-6 and programs == ["train0"]


def hugging_face(name: str, mesh: dict[str, int], backend: str) -> tuple[float, int]:
    warnings.filterwarnings("ignore")
    plain = test_lengths._model(name)
    model = zgraph.compile(copy.deepcopy(plain), plan_of(mesh, backend=backend))
    calls = [test_lengths._batch(name, *at) for at in [*SIZES, (4, 90)]]
    return trained(model, plain, calls), len(model.zgraph.programs)


@pytest.mark.slow  # (their captures with sizes: test_lengths.py; divided: above)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}], ids=["tp", "pp"])
def test_models_of_transformers(two, mesh, name):
    pytest.importorskip("transformers")
    for worst, programs in two.run(hugging_face, name, mesh, "eager"):
        assert worst < 2e-6 and programs <= 3


def collectives_of() -> list[list[str]]:
    """What the ranks send, by a program of symbolic sizes and by one of numbers."""
    found = []
    for shapes in ("dynamic", "static"):
        torch.manual_seed(0)
        model = zgraph.compile(Sentences(), plan_of({"tp": 2}, shapes=shapes))
        model.train_step(**batch(4, 12, 0))
        (step,) = model.zgraph.programs.values()
        nodes = step.history().program.nodes
        found.append([collectives.kind(n) for n in nodes if collectives.is_start(n)])
    return found


@pytest.mark.slow
def test_symbolic_sizes_are_divided_as_numbers_are(two):
    for symbolic, static in two.run(collectives_of):
        assert symbolic == static and "all_reduce" in static


def other_sizes(mesh: dict[str, int], first: bool) -> list[str]:
    """What is said where the second rank's batch is longer, at the first call or at a later one."""
    model = zgraph.compile(Sentences(), plan_of(mesh))
    if not first:
        for length in (12, 7):
            model.train_step(**batch(4, length, 0))
    with pytest.raises(RankMismatchError) as found:
        model.train_step(**batch(4, 20 + dist.get_rank(), 0))
    return str(found.value)


@sweep(
    "mesh, first", [({"pp": 2}, False), ({"tp": 2}, True), ({"tp": 2}, False), ({"pp": 2}, True)], quick=(2,), ids=str
)
def test_ranks_of_one_group_with_other_sizes_are_refused_on_all(two, mesh, first):
    for said in two.run(other_sizes, mesh, first):
        assert "rank(s) [1] differ from rank 0" in said and "20" in said and "21" in said
        assert first or "padded to one length" in said
        assert said.replace("\n", "").isprintable()


def budgeted() -> tuple[float, int]:
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    plain = Sentences()
    sizes = {0: zgraph.Size("rows", max=6), 1: zgraph.Size("length", max=40)}
    plan = plan_of({"pp": 2}, memory_budget="4MiB", dynamic={"words": sizes, "targets": {0: "rows", 1: "length"}})
    model = zgraph.compile(copy.deepcopy(plain), plan)
    return trained(model, plain, [batch(*at, 0) for at in SIZES[1:3]]), len(model.zgraph.programs)


@pytest.mark.slow
def test_a_pipeline_fits_a_budget_at_every_size(two):
    for worst, programs in two.run(budgeted):
        assert worst < 2e-6 and programs == 1


def unbounded() -> None:
    model = zgraph.compile(nn.Linear(4, 4), plan_of({"tp": 2}, memory_budget="4MiB", dynamic={"input": {0: "rows"}}))
    model(torch.randn(6, 4))


def test_a_budget_with_a_size_that_nothing_bounds_is_refused_on_all_ranks(two):
    for outcome in two.attempt(unbounded):
        assert isinstance(outcome.error, SizeError) and "no maximum" in str(outcome.error), outcome.traceback


def single_rows() -> tuple[float, int]:
    """(the largest relative difference of a gradient to plain PyTorch's, the number of programs), where one of two teams has a single row."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    plain = Attention()
    mesh = {"dp": 2, "tp": 2}
    model = zgraph.compile(
        copy.deepcopy(plain), zgraph.Plan(mesh=mesh, tensor_parallel="auto", zero=3, backend="eager")
    )
    here = model.zgraph.mesh.get_local_rank("dp")
    worst = 0.0
    for sizes in [((1, 9), (3, 20)), ((3, 12), (1, 31))]:
        model(**batch(*sizes[here], 0)).backward()
        for at in sizes:
            (plain(**batch(*at, 0)) / 2).backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            worst = max(worst, float((whole(mine.grad) - theirs.grad).norm() / theirs.grad.norm()))
            mine.grad = theirs.grad = None
    return worst, len(model.zgraph.programs)


@pytest.mark.slow
def test_a_single_row_in_one_of_two_teams(four):
    for worst, programs in four.run(single_rows):
        assert worst < 5e-6
        assert programs == 2
