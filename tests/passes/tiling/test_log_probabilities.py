"""Per-token log-probabilities and entropies in chunks are those of whole logits, which are never there.

As trainers of policies write them: a log-softmax that is gathered at the labels, a logit less the logarithm of the sum of exponentials (of all
rows, or of one sequence after another, as TRL's `selective_log_softmax`), and entropies of either, or of a softmax.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from sweeps import sweep
from torch import nn

import zgraph
from zgraph.build.pass_pipeline import build
from zgraph.build.planned_step import captured_program
from zgraph.errors import PlanError
from zgraph.passes import PassManager
from zgraph.passes.analysis.classification_losses import logits_of
from zgraph.passes.analysis.live_memory import memory_of
from zgraph.program.node import info, tensors
from zgraph.program.program import Program

HERE = Path(__file__).parent
WIDTH, WORDS, ROWS, LENGTH = 32, 8192, 2, 128
LOGITS, WEIGHT = ROWS * LENGTH * WORDS * 4, WIDTH * WORDS * 4  # bytes

LOG_PROBABILITIES = {
    "log-softmax": lambda z, at: z.log_softmax(-1).gather(-1, at).squeeze(-1),
    "sum of exponentials": lambda z, at: (z.gather(-1, at) - z.logsumexp(-1, keepdim=True)).squeeze(-1),
    "by sequence": lambda z, at: (
        z.gather(-1, at).squeeze(-1) - torch.stack([torch.logsumexp(one, dim=-1) for one in z])
    ),
    "rows of sequences": lambda z, at: torch.stack([
        F.log_softmax(one, dim=-1).gather(-1, of).squeeze(-1) for one, of in zip(z, at, strict=True)
    ]),
}  # fmt: skip
ENTROPIES = {
    "log-softmax": lambda z: -(z.log_softmax(-1).exp() * z.log_softmax(-1)).sum(-1),
    "sum of exponentials": lambda z: z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1),
    "softmax": lambda z: -(z.softmax(-1) * z.softmax(-1).log()).sum(-1),
    "categorical": lambda z: torch.distributions.Categorical(logits=z, validate_args=False).entropy(),
}


class Policy(nn.Module):
    """Returns log-probabilities and entropies of labels, or one of both, by the names of these ways. With `shift` a row's label is the next word.
    With `layer`, attention that is written out and a router of experts are between the words and the head."""

    def __init__(
        self,
        of_labels: str | None = "log-softmax",
        entropy: str | None = None,
        *,
        temperature: float = 1.0,
        shift: bool = False,
        layer: bool = False,
        words: int = 40,
        width: int = 8,
    ) -> None:
        super().__init__()
        self.of_labels, self.entropy, self.temperature, self.shift = of_labels, entropy, temperature, shift
        self.embed, self.head = nn.Embedding(64, width), nn.Linear(width, words, bias=False)
        self.q, self.v, self.router, self.experts = [nn.Linear(width, width) for _ in range(4)] if layer else [None] * 4

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        if self.q is not None:
            x = x + (self.q(x) @ x.transpose(1, 2)).softmax(-1) @ self.v(x)
            x = x + self.experts(x) * self.router(x).softmax(-1)
        return x

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = self.head(self.hidden(ids))
        if self.shift:
            z, labels = z[:, :-1], labels[:, 1:]
        z = (z.float() if z.dtype is torch.bfloat16 else z) / self.temperature
        found = []
        if self.of_labels is not None:
            found.append(LOG_PROBABILITIES[self.of_labels](z, labels.unsqueeze(-1)))
        if self.entropy is not None:
            found.append(ENTROPIES[self.entropy](z))
        return tuple(found)


class Loss(Policy):
    """A clipped policy loss with a bonus for entropy, inside of forward."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        log_probabilities, entropy = super().forward(ids, labels)
        ratio = (log_probabilities - log_probabilities.detach() * 0.9).exp()
        worth = torch.where(labels % 2 == 0, 1.0, -0.5)[:, -ratio.shape[1] :]
        per_token = -torch.min(ratio * worth, ratio.clamp(0.8, 1.2) * worth) - 0.01 * entropy
        mask = (labels != 3)[:, -ratio.shape[1] :]
        return (per_token * mask).sum() / mask.sum().clamp(min=1)


class Compared(Loss):
    """The logits of a teacher and of a student in one loss; the teacher, which is the student on other words, may be trained as well."""

    def __init__(self, *, detached: bool) -> None:
        super().__init__()
        self.detached = detached

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        teacher = self.head(self.hidden(labels))
        aims = (teacher.detach() if self.detached else teacher).softmax(-1)
        return F.kl_div(F.log_softmax(self.head(self.hidden(ids)), -1), aims, reduction="batchmean")


def batch(rows: int = 4, length: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randint(40, (rows, length)), torch.randint(40, (rows, length))


def weighted(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """A loss in which each output counts otherwise at each token."""
    return sum((o * (i + 1) * torch.linspace(0.5, 2.0, o.shape[1])).mean() for i, o in enumerate(outputs))


def assert_same(model: nn.Module, world: int = 1, rows: int = 4, **plan) -> None:
    torch.manual_seed(1)
    plan = {"backend": "eager", "zero": 0, "tiles": {"loss": 3}, **plan}
    found = zgraph.verify(
        model, zgraph.Plan(**plan), world, batch(rows), loss_fn=None if isinstance(model, Loss) else weighted
    )
    assert found.ok, str(found)
    assert any(d.what == "output" for d in found.differences)
    assert any(d.what == "gradient" for d in found.differences)


@pytest.mark.parametrize("detached", [True, False])
def test_logits_that_are_compared_with_others_run_in_the_same_chunks(detached):
    model = Compared(detached=detached)
    assert_same(model)
    assert {info(n).chunk is not None for n in products(program_of(model, batch(), tiles={"loss": 3}))} == {True}


def products(program: Program) -> list:
    """The forward's matrix products with the head's columns."""
    return [n for n in program.nodes if n.target is torch.ops.aten.mm.default and n.meta["val"].shape[-1] == 40]


def program_of(model: nn.Module, inputs: tuple[torch.Tensor, ...], **plan) -> Program:
    plan = zgraph.Plan(**{"backend": "eager", "zero": 0, "mesh": {"dp": 1}, **plan})
    program = captured_program(model, plan, inputs, 1)
    PassManager(build(plan)).run(program)
    return program


# The first of these is quick with each backend: all ways to write either, with what may be around them.
WAYS = [
    ("sum of exponentials", "sum of exponentials", {"temperature": 0.7, "shift": True}),
    ("log-softmax", None, {}),
    ("log-softmax", "log-softmax", {"shift": True}),
    ("by sequence", "softmax", {"temperature": 1.3}),
    ("rows of sequences", "log-softmax", {"shift": True}),
    (None, "categorical", {}),
    (None, "softmax", {"temperature": 0.9}),
]


# -- what is computed -------------------------------------------------------------------------------------------------
@sweep(
    "of_labels, entropy, how, backend",
    [(*way, backend) for backend in ("eager", "inductor") for way in WAYS],
    quick=(0, 3, 7),
)
def test_log_probabilities_and_entropies_in_chunks_are_those_of_whole_logits(of_labels, entropy, how, backend):
    model = Policy(of_labels, entropy, **how).double()
    assert_same(model, backend=backend)
    program = program_of(model, batch(), backend=backend, tiles={"loss": 3})
    chunks = {info(n).chunk for n in program.nodes if n.op == "call_function"} - {None}
    assert chunks == {f"loss {phase} {i}" for phase in ("forward", "backward") for i in range(3)}


@sweep("shift, backend", [(s, b) for b in ("inductor", "eager") for s in (False, True)], quick=1)
def test_a_policy_loss_is_part_of_the_chunks(shift, backend):
    assert_same(
        Loss("sum of exponentials", "log-softmax", shift=shift, temperature=0.8, layer=True).double(), backend=backend
    )


@pytest.mark.parametrize("model", [Policy, Loss])
@sweep("zero", [0, 1, 2, 3], quick=1)
def test_ranks_that_shard_weights_compute_them_in_chunks(model, zero):
    assert_same(model("by sequence", "softmax", shift=True).double(), 2, mesh={"dp": 2}, zero=zero)


@pytest.mark.parametrize("plan", [{"mesh": {"tp": 2}}, {"mesh": {"tp": 2}, "sequence_parallel": True}])
@pytest.mark.parametrize("of_labels, entropy, how", WAYS)
@pytest.mark.slow
def test_ranks_that_divide_a_vocabulary_compute_them_in_chunks(of_labels, entropy, how, plan):
    model = Policy(of_labels, entropy, **how, layer=True, width=16).double()
    assert_same(model, 2, rows=2, tensor_parallel={"head": "colwise"}, **plan)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.slow
def test_low_precision_differs_as_much_as_its_roundings(backend):
    assert_same(Policy("log-softmax", "sum of exponentials", shift=True), backend=backend, precision="bf16")


@pytest.mark.slow
def test_each_length_is_a_program_of_its_own():
    """Chunks have numbers of rows."""
    plain, model = Policy("sum of exponentials", "softmax"), Policy("sum of exponentials", "softmax")
    model.load_state_dict(plain.state_dict())
    model = zgraph.compile(model, zgraph.Plan(backend="eager", tiles={"loss": 3}))
    for length in (5, 9, 12):
        for mine, theirs in zip(model(*batch(2, length)), plain(*batch(2, length)), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert len(model.zgraph.programs) == 3


# -- what is whole ----------------------------------------------------------------------------------------------------
def test_logits_are_what_no_other_weights_are_read_after():
    """Neither attention's scores nor what a router chooses experts by."""
    plan = zgraph.Plan(backend="eager", zero=0, mesh={"dp": 1})
    program = captured_program(Policy("log-softmax", "softmax", layer=True), plan, batch(), 1)
    (product,) = logits_of(program)
    assert info(product).module == "head"


@sweep("of_labels, entropy, how", WAYS, quick=(0, 3))
def test_at_most_an_eighth_of_the_logits_is_there(of_labels, entropy, how):
    """Of their weight's gradient the sum so far is there beside them, and its next term. (Some KiB more are for rows.)"""
    peaks = []
    for tiles in {}, {"loss": 8}:
        inputs = (torch.zeros(ROWS, LENGTH + how.get("shift", False), dtype=torch.long),) * 2
        program = program_of(Policy(of_labels, entropy, **how, words=WORDS, width=WIDTH), inputs, tiles=tiles)
        peaks.append(max(sum(m.values()) for m in memory_of(program, False)))
        largest = max(t.numel() * 4 for n in program.nodes if n.op == "call_function" for t in tensors(n))
        assert largest >= LOGITS if not tiles else largest <= LOGITS // 8
    assert peaks[0] >= 2 * LOGITS
    assert peaks[1] <= peaks[0] / 8 + 2 * WEIGHT + 2**19


MEASURED = """
from zgraph import allocations
allocations.count()
import torch, zgraph
torch.set_num_threads(1)
import test_log_probabilities as here
inputs = (torch.zeros(here.ROWS, here.LENGTH, dtype=torch.long),) * 2
for tiles in {}, {"loss": 8}:
    torch.manual_seed(0)
    model = here.Policy("sum of exponentials", "softmax", words=here.WORDS, width=here.WIDTH)
    model = zgraph.compile(model, zgraph.Plan(tiles=tiles, backend="BACKEND"))
    for _ in range(2):
        model.zero_grad()
        before = allocations.live()
        allocations.reset_peak()
        of_labels, entropy = model(*inputs)
        (of_labels.sum() + 0.1 * entropy.sum()).backward()
    print(allocations.peak() - before, of_labels.sum().item(), *(p.grad.norm().item() for p in model.parameters()))
"""


@pytest.mark.parametrize("backend", [pytest.param("inductor", marks=pytest.mark.inductor), "eager"])
@pytest.mark.slow
def test_a_run_takes_as_little_memory(backend):
    code = MEASURED.replace("BACKEND", backend)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, timeout=280, check=False
    )
    if "can't be counted" in done.stderr:
        pytest.skip("no C++ compiler")
    assert done.returncode == 0, done.stderr
    (plain, *values), (tiled, *others) = ([float(text) for text in line.split()] for line in done.stdout.splitlines())
    assert plain >= 2 * LOGITS
    assert tiled <= plain / 8 + 2 * WEIGHT + 2**19
    assert values == pytest.approx(others, rel=1e-5)


# -- what can't be ----------------------------------------------------------------------------------------------------
class Shown(Policy):
    def forward(self, ids, labels):
        z = self.head(self.hidden(ids))
        return z.log_softmax(-1).gather(-1, labels.unsqueeze(-1)), z


class Unnormalised(Policy):
    def forward(self, ids, labels):
        return self.head(self.hidden(ids)).gather(-1, labels.unsqueeze(-1))


@pytest.mark.parametrize(
    "model, said",
    [
        (Shown(layer=True), "let the model return only the loss"),
        (Unnormalised(layer=True), "no classification loss, log-probability or entropy"),
    ],
)
def test_whole_logits_and_what_is_no_probability_are_refused(model, said):
    with pytest.raises(PlanError, match=said) as caught:
        program_of(model, batch(), tiles={"loss": 2})
    assert caught.value.where == "tiles.loss"
