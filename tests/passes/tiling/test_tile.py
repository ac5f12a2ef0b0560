"""Regions that run in chunks compute what they compute as a whole, and nothing inside of them is ever whole.

On virtual ranks, loss and every gradient: in float64 within 1e-12. Memory is forecast from the program, and counted as it runs.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from divided_models import of_transformers, own
from sweeps import product, sweep
from torch import nn

import zgraph
from zgraph.build.pass_pipeline import build
from zgraph.build.planned_step import captured_program
from zgraph.errors import PlanError
from zgraph.passes import PassManager
from zgraph.passes.analysis.live_memory import memory_of
from zgraph.program.node import Phase, info, tensors
from zgraph.program.program import Program

HERE = Path(__file__).parent
WIDTH, WORDS, TOKENS = 32, 8192, 256
LOGITS = TOKENS * WORDS * 4  # bytes, of what is inside of the MLP below as well
WEIGHT = WIDTH * WORDS * 4


class Mlp(nn.Module):
    """`kind`: "plain", "gated", "dropout" at its end, "inner dropout", or "cumsum" along the rows."""

    def __init__(self, kind: str = "gated", width: int = 8, inner: int = 24) -> None:
        super().__init__()
        self.kind = kind
        self.gate, self.up, self.down = nn.Linear(width, inner), nn.Linear(width, inner), nn.Linear(inner, width)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "gated":
            return self.down(F.silu(self.gate(x)) * self.up(x))
        if self.kind == "cumsum":
            return self.down(self.up(x).cumsum(1))
        if self.kind == "inner dropout":
            return self.down(self.dropout(self.up(x)))
        made = self.down(F.gelu(self.up(x)))
        return self.dropout(made) if self.kind == "dropout" else made


class Net(nn.Module):
    """`shift`: how a row's target is the word of the next: "none" (it is given so), "targets" (padded) or "logits" (cut). `how` are the
    loss's options. With `twice` one MLP is called twice."""

    def __init__(
        self, kind: str = "gated", shift: str = "none", twice: bool = False, bias: bool = False, **how
    ) -> None:
        super().__init__()
        self.shift, self.how = shift, how
        self.embed = nn.Embedding(40, 8)
        self.mlps = nn.ModuleList(Mlp(kind) for _ in range(1 if twice else 2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 40, bias=bias)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for mlp in (self.mlps[0], self.mlps[-1]):
            x = x + mlp(self.norm(x))
        logits = self.head(x)
        if self.shift == "logits":
            logits, labels = logits[:, :-1].contiguous(), labels[:, 1:]
        elif self.shift == "targets":
            labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
        if logits.dtype is torch.bfloat16:
            logits = logits.float()
        return F.cross_entropy(logits.reshape(-1, 40), labels.reshape(-1), **self.how)


class Head(nn.Module):
    """Its logits are most of its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), ids.flatten())


class Wide(nn.Module):
    """What is inside of its MLP is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mlp = nn.Embedding(64, WIDTH), Mlp("plain", WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.embed(ids)).pow(2).mean()


def batch(rows: int = 4, length: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randint(40, (rows, length)), torch.randint(40, (rows, length))


def assert_same(model, inputs, world=1, **plan):
    torch.manual_seed(1)
    found = zgraph.verify(model, zgraph.Plan(**{"backend": "eager", "zero": 0, **plan}), world, inputs)
    assert found.ok, str(found)
    assert any(d.what == "output" for d in found.differences)
    assert any(d.what == "gradient" for d in found.differences)


def program_of(model, inputs, **plan) -> Program:
    plan = zgraph.Plan(**{"backend": "eager", "zero": 0, "mesh": {"dp": 1}, **plan})
    program = captured_program(model, plan, inputs, 1)
    PassManager(build(plan)).run(program)
    return program


def chunks_of(program: Program) -> set[str]:
    return {info(n).chunk for n in program.nodes if n.op == "call_function"} - {None}


BACKENDS = pytest.mark.parametrize("backend", ["eager", "inductor"])
BOTH = {"loss": 4, "mlps.*": 4}
HOW = [{"ignore_index": 3}, {"reduction": "sum"}, {"label_smoothing": 0.1}]


# -- what is computed -------------------------------------------------------------------------------------------------
@sweep(
    "backend, shift, rows",
    [(b, *case) for b in ("eager", "inductor") for case in (("none", 1), ("targets", 3), ("logits", 3))]
    + [("eager", "logits", 1)],
    quick=(6,),
)
def test_a_loss_in_turns_is_the_loss(backend, shift, rows):
    """Nine tokens are eight chunks of one or two."""
    model = Net(shift=shift, bias=rows == 1).double()
    assert_same(model, batch(rows, 9), tiles={"loss": 8}, backend=backend)
    chunks = chunks_of(program_of(model, batch(rows, 9), tiles={"loss": 8}, backend=backend))
    assert chunks == {f"loss {phase.value} {i}" for phase in (Phase.FORWARD, Phase.BACKWARD) for i in range(8)}


@product("how, backend", HOW, ["eager", "inductor"], together=1)
def test_a_mean_over_the_targets_that_count_stays_one(backend, how):
    assert_same(Net(shift="logits", **how).double(), batch(), tiles={"loss": 3}, backend=backend)


@sweep(
    "kind, twice, backend",
    [
        (*case, backend)
        for backend in ("eager", "inductor")
        for case in (("plain", False), ("gated", False), ("gated", True), ("dropout", False))
    ],
    quick=(3,),
)
def test_an_mlp_in_turns_is_the_mlp(backend, kind, twice):
    model = Net(kind, twice=twice).double()
    assert_same(model, batch(), tiles={"mlps.*": 3}, backend=backend)
    assert len(chunks_of(program_of(model, batch(), tiles={"mlps.*": 3}, backend=backend))) == 12


@sweep("stage", [0, 1, 2, 3], quick=(1,))
def test_turns_are_sharded_over_data_ranks_as_well(stage):
    assert_same(Net().double(), batch(), 2, tiles=BOTH, mesh={"dp": 2}, zero=stage)


@product("recompute, backend", ["full", "none", ("mlps.0",)], ["eager", "inductor"], together=1)
@pytest.mark.slow
def test_what_is_around_turns_is_computed_again(backend, recompute):
    assert_same(Net().double(), batch(), tiles=BOTH, recompute=recompute, backend=backend)


@sweep("backend", ["inductor", "eager"], quick=1)
def test_turns_fit_a_memory_budget(backend):
    assert_same(Net().double(), batch(), tiles=BOTH, memory_budget="64KiB", backend=backend)


@pytest.mark.parametrize(
    "plan", [{"mesh": {"tp": 2}}, {"mesh": {"tp": 2}, "sequence_parallel": True}, {"mesh": {"cp": 2}}]
)
@pytest.mark.slow
def test_ranks_that_divide_a_model_take_turns_together(plan):
    """A vocabulary, or a sequence, in parts: each chunk has the collectives that the whole has."""
    assert_same(*own("llama"), 2, tiles={"loss": 4}, **plan)
    assert_same(Net().double(), batch(), 2, tiles={"mlps.*": 4}, **plan)


@pytest.mark.parametrize("plan", [{}, {"mesh": {"tp": 2}}])
@pytest.mark.slow
def test_whole_layers_take_turns_over_sequences(plan):
    """The forward and the backward of a layer both read what comes into it, each its own slice."""
    assert_same(*own("llama"), 2 if plan else 1, tiles={"layers.*": 2}, **plan)


def test_what_changes_hands_between_ranks_as_a_whole_is_named():
    model, inputs = own("llama")
    with pytest.raises(PlanError, match=r"all_to_all.* at .*divided_models.py:\d+ \(module layers.0.attention\)"):
        assert_same(model, inputs, 2, tiles={"layers.*.attention": 2}, mesh={"cp": 2}, context_attention="heads")


class OnlyLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, labels=labels).loss


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.slow
def test_models_of_transformers_take_turns(name):
    pytest.importorskip("transformers")
    model, inputs = of_transformers(name)
    assert_same(OnlyLoss(model), inputs, tiles={"loss": 3, "*.mlp": 4})


@pytest.mark.slow
def test_the_last_stage_of_a_pipeline_has_the_loss():
    plan = {"mesh": {"pp": 2}, "micro_batches": 2}
    assert_same(*own("llama"), 2, tiles={"loss": 4, "layers.0": 2}, **plan)
    with pytest.raises(PlanError, match="matches no module"):
        assert_same(*own("llama"), 2, tiles={"loss": 4, "layer.0": 2}, **plan)


def trained(tiles: dict[str, int], **plan) -> tuple[list[torch.Tensor], nn.Module]:
    torch.manual_seed(0)
    model = zgraph.compile(
        Net(shift="targets"), zgraph.Plan(tiles=tiles, backend="eager", optimizer=zgraph.SGD(lr=0.1), **plan)
    )
    return [model.train_step(*batch()).detach() for _ in range(3)], model


@pytest.mark.parametrize("plan", [{}, {"micro_batches": 2}, {"precision": "bf16"}])
@pytest.mark.slow
def test_steps_in_turns_are_the_steps(plan):
    (plain, one), (tiled, other) = trained({}, **plan), trained({"loss": 3, "mlps.*": 2}, **plan)
    low = "precision" in plan
    torch.testing.assert_close(plain, tiled, rtol=2e-2 if low else 1e-5, atol=1e-6)
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert (mine - theirs).norm() <= (2**-7 if low else 1e-5) * mine.norm()
    with torch.no_grad():
        torch.testing.assert_close(
            one.eval_step(*batch()), other.eval_step(*batch()), rtol=2e-2 if low else 1e-5, atol=1e-6
        )


# -- what is whole ----------------------------------------------------------------------------------------------------
@BACKENDS
@sweep("recompute", ["auto", "full"], quick=1)
@pytest.mark.parametrize("model,tiles,weights", [(Head, {"loss": 8}, 1), (Wide, {"mlp": 8}, 2)])
def test_at_most_an_eighth_of_the_large_values_is_there(backend, recompute, model, tiles, weights):
    """Of each weight's gradient the sum so far is there beside them, which is else made after them. (Some KiB more are for rows.)"""
    peaks = []
    for chosen in ({}, tiles):
        program = program_of(
            model(), (torch.zeros(1, TOKENS, dtype=torch.long),), tiles=chosen, backend=backend, recompute=recompute
        )
        peaks.append(max(sum(m.values()) for m in memory_of(program, backend == "inductor")))
        sizes = {
            t.numel() * 4 for n in program.nodes if n.op == "call_function" for t in tensors(n) if TOKENS in t.shape
        }
        assert (LOGITS in sizes) == (not chosen)
    large = peaks[0] // LOGITS
    assert large >= 2
    assert peaks[0] - peaks[1] >= large * LOGITS * 7 // 8 - weights * WEIGHT - 2**18


MEASURED = """
from zgraph import allocations
allocations.count()
import torch, zgraph
torch.set_num_threads(1)
import test_tile as here
ids = torch.zeros(1, here.TOKENS, dtype=torch.long)
for make, tiles in (here.Head, {"loss": 8}), (here.Wide, {"mlp": 8}):
    for chosen in {}, tiles:
        torch.manual_seed(0)
        model = zgraph.compile(make(), zgraph.Plan(tiles=chosen, backend="BACKEND"))
        for _ in range(2):
            model.zero_grad()
            before = allocations.live()
            allocations.reset_peak()
            loss = model(ids)
            loss.backward()
        print(allocations.peak() - before, loss.item(), *(p.grad.norm().item() for p in model.parameters() if p.grad is not None))
"""


@pytest.mark.parametrize("backend", [pytest.param("inductor", marks=pytest.mark.inductor), "eager"])
@pytest.mark.slow
def test_a_run_takes_as_little_memory_and_computes_the_same(backend):
    """On Inductor, what is fused must not take two chunks' values together."""
    code = textwrap.dedent(MEASURED).replace("BACKEND", backend)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, timeout=280, check=False
    )
    if "can't be counted" in done.stderr:
        pytest.skip("no C++ compiler")
    assert done.returncode == 0, done.stderr
    rows = [[float(text) for text in line.split()] for line in done.stdout.splitlines()]
    for (plain, *values), (tiled, *others), weights in ((*rows[:2], 1), (*rows[2:], 2)):
        large = plain // LOGITS
        assert large >= 2
        assert plain - tiled >= large * LOGITS * 7 / 8 - weights * WEIGHT - 2**18
        assert values == pytest.approx(others, rel=1e-5)


def test_the_backward_computes_the_logits_of_a_turn_again():
    program = program_of(Net(), batch(), tiles={"loss": 4})
    again = [n for n in program.nodes if n.target is torch.ops.aten.mm.default and info(n).copy_of is not None]
    assert [info(n).chunk for n in again] == [f"loss backward {i}" for i in range(4)]
    assert all(info(n).made_by == "tile" for n in again)


def test_one_turn_is_done_before_the_next_begins():
    order = [info(n).chunk for n in program_of(Net(), batch(), tiles={"loss": 4}).nodes if n.op == "call_function"]
    order = [chunk for chunk in order if chunk is not None]
    changes = [chunk for chunk, before in zip(order, [None, *order], strict=False) if chunk != before]
    assert changes == [f"loss {phase} {i}" for phase in ("forward", "backward") for i in range(4)]


# -- what can't be ----------------------------------------------------------------------------------------------------
class Shown(Net):
    def forward(self, ids, labels):
        logits = self.head(self.embed(ids))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


@pytest.mark.parametrize(
    "model,tiles,said",
    [
        (Net(), {"mlp.*": 2}, r"did you mean 'mlps\.\d'"),
        (Net(), {"mlps.*": 2, "mlps.1": 4}, "two patterns name the module 'mlps.1'"),
        (Net(), {"mlps.*": 2, "mlps.*.up": 4}, "two patterns name the module 'mlps.0.up'"),
        (Net(), {"loss": 64}, "the longest has 8"),
        (Net("cumsum"), {"mlps.*": 8}, r"cumsum.* at .*test_tile.py:\d+ \(module mlps.0\)"),
        (Net("inner dropout"), {"mlps.*": 2}, "draws its numbers for all rows at once"),
        (Shown(), {"loss": 2}, "let the model return only the loss"),
        (Wide(), {"loss": 2}, "no classification loss"),
    ],
)
def test_what_can_not_be_tiled_is_refused(model, tiles, said):
    inputs = (batch()[0],) if isinstance(model, Wide) else batch()
    with pytest.raises(PlanError, match=said) as caught:
        program_of(model, inputs, tiles=tiles)
    assert caught.value.where in {f"tiles.{pattern}" for pattern in tiles}


def test_a_forward_without_gradients_may_give_whole_logits():
    model = zgraph.compile(Shown(), zgraph.Plan(tiles={"loss": 2}, backend="eager"))
    with torch.no_grad():
        loss, logits = model(*batch())
    assert logits.shape == (4, 8, 40) and loss.isfinite()


def test_tiles_are_a_table_of_a_plan(tmp_path):
    plan = zgraph.Plan(tiles={"loss": 8, "model.layers.*.mlp": 4})
    plan.save(tmp_path / "plan.toml")
    assert zgraph.Plan.load(tmp_path / "plan.toml") == plan
    assert hash(plan) == hash(zgraph.Plan(tiles={"loss": 8, "model.layers.*.mlp": 4}))
    with pytest.raises(PlanError, match="2 or more"):
        zgraph.Plan(tiles={"loss": 1})


def test_a_plan_without_tiles_has_no_pass_for_them():
    assert not {"tile", "narrow"} & {p.name for p in build(zgraph.Plan())}
    assert {"tile", "narrow"} <= {p.name for p in build(zgraph.Plan(tiles={"loss": 2}))}
