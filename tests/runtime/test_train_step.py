"""A training step is torch's own loop: accumulation, clipping, update and schedule give the same numbers.

With `backend="eager"` a step does torch's operations in torch's order, so where a plan only updates, weights are compared
bit for bit, with clipping as well. Where a batch is cut, its sums have another order: then float32's rounding (6e-8) is
what differs, and 1e-6 of a tensor's norm is a dozen times that.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import Net, batch, built, compiled, equal, feed, weights
from sweeps import product, sweep
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

import zgraph
from zgraph.errors import PlanError, StepError

pytestmark = pytest.mark.core

ROUNDING = 1e-6  # a sum in another order, in float32 (see above)


class Logits(Net):
    def forward(self, x):
        return self.logits(x)


class Matrices(Net):
    """Nothing but matrices: all that Muon itself updates."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 12, bias=False)
        self.norm = nn.Identity()
        self.last = nn.Linear(12, 5, bias=False)


def furthest(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of two tensors of a name, as a part of the norm."""
    assert mine.keys() == other.keys()
    return max(float((mine[n] - other[n]).norm() / other[n].norm()) for n in other)


def torchs_loop(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    batches: Iterator[tuple[torch.Tensor, ...]],
    *,
    parts: int = 1,
    clip: float | None = None,
    scheduler: Any = None,
) -> nn.Module:
    for values in batches:
        for some in zip(*(v.chunk(parts) for v in values), strict=True):
            (model(*some) / parts).backward()
        if clip is not None:
            clip_grad_norm_(model.parameters(), clip, foreach=False)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return model


# -- the update -------------------------------------------------------------------------------------------------------
PAIRS = {
    "AdamW": (zgraph.AdamW(lr=1e-2), lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False)),
    "Adam": (
        zgraph.Adam(lr=1e-2, weight_decay=0.01),
        lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.01, foreach=False),
    ),
    "SGD": (
        zgraph.SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=False),
    ),
    "Adagrad": (zgraph.Adagrad(lr=1e-2), lambda p: torch.optim.Adagrad(p, lr=1e-2, foreach=False)),
}


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_step_and_train_step_and_torchs_loop_give_the_same_bits(name):
    record, make = PAIRS[name]
    by_hand, whole, other = compiled(optimizer=record), compiled(optimizer=record), built()
    for values in feed(5):
        loss = by_hand(*values)
        loss.backward()
        assert by_hand.step() is None  # nothing asks for a norm
        assert torch.equal(whole.train_step(*values), loss)
    torchs_loop(other, [make(other.parameters())], feed(5))
    assert equal(weights(by_hand), weights(whole))
    assert equal(weights(whole), weights(other))
    assert all(p.grad is None for p in by_hand.parameters())


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_an_optimizer_of_the_users_own_gives_torchs_bits(name):
    _, make = PAIRS[name]
    mine, other = compiled(), built()
    own, theirs = make(mine.parameters()), make(other.parameters())
    schedule, schedule_of_theirs = (torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (own, theirs))
    for values in feed(6):
        mine.train_step(*values)  # leaves the gradients
        own.step()
        own.zero_grad()
        schedule.step()
    torchs_loop(other, [theirs], feed(6), scheduler=schedule_of_theirs)
    assert equal(weights(mine), weights(other))


def test_torchs_scheduler_moves_the_plans_optimizer():
    record, make = PAIRS["AdamW"]
    mine, other = compiled(optimizer=record), built()
    schedule = torch.optim.lr_scheduler.LambdaLR(mine.zgraph.optimizer, lambda k: 1 / (k + 1))
    for values in feed(5):
        mine(*values).backward()
        mine.zgraph.optimizer.step()
        schedule.step()
    theirs = make(other.parameters())
    torchs_loop(other, [theirs], feed(5), scheduler=torch.optim.lr_scheduler.LambdaLR(theirs, lambda k: 1 / (k + 1)))
    assert equal(weights(mine), weights(other))


@pytest.mark.parametrize(
    "schedule",
    [
        zgraph.Cosine(warmup_steps=2, total_steps=6, min_ratio=0.1),
        zgraph.Linear(warmup_steps=1, total_steps=5),
        zgraph.WarmupDecayLR(total_num_steps=6, warmup_num_steps=3, warmup_max_lr=1e-2, warmup_type="linear"),
    ],
    ids=lambda s: s.name,
)
def test_a_schedule_of_the_plan_is_torchs_lambda_lr(schedule):
    record, make = PAIRS["AdamW"]
    mine, other = compiled(optimizer=record, lr_schedule=schedule), built()
    for values in feed(7):
        mine.train_step(*values)
    theirs = make(other.parameters())
    by_lambda = torch.optim.lr_scheduler.LambdaLR(theirs, lambda k: schedule.at(k, 1.0, 0.9).lr)
    if schedule.name == "WarmupDecayLR":  # its rates are its own: no part of the group's
        by_lambda = torch.optim.lr_scheduler.LambdaLR(theirs, lambda k: schedule.at(k, 1e-2, 0.9).lr / 1e-2)
    torchs_loop(other, [theirs], feed(7), scheduler=by_lambda)
    # The rate is a product of a few numbers in float64, which rounds (1e-16) before the weights do in float32.
    assert furthest(weights(mine), weights(other)) < ROUNDING


def test_a_schedule_by_its_name_is_torchs():
    record, make = PAIRS["SGD"]
    named = zgraph.TorchSchedule(scheduler="CosineAnnealingLR", args={"T_max": 4})
    mine, other = compiled(optimizer=record, lr_schedule=named), built()
    for values in feed(6):
        mine.train_step(*values)
    theirs = make(other.parameters())
    torchs_loop(other, [theirs], feed(6), scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(theirs, 4))
    assert equal(weights(mine), weights(other))
    assert mine.zgraph.optimizer.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]


def hundred_steps(cls, record, optimizers, backend: str = "eager") -> float:
    mine = compiled(cls, backend=backend, optimizer=record, grad_clip=1.0, micro_batches=2)
    other = built(cls)
    for values in feed(100):
        mine.train_step(*values)
    torchs_loop(other, optimizers(other), feed(100), parts=2, clip=1.0)
    return furthest(weights(mine), weights(other))


@sweep("name", list(PAIRS), quick=2)
def test_a_hundred_clipped_accumulated_steps_are_torchs(name):
    record, make = PAIRS[name]
    # A norm's last bit (6e-8) enters a hundred updates, of which each is some hundredth of a weight.
    assert hundred_steps(Net, record, lambda m: [make(m.parameters())]) < 1e-5


@sweep("name", list(PAIRS), quick=2)
def test_a_float64_model_is_updated_in_float64(name):
    record, make = PAIRS[name]
    plan = zgraph.Plan(backend="eager", optimizer=record, grad_clip=0.1, ema=0.9)
    mine, other = zgraph.compile(built().double(), plan), built().double()
    batches = [(x.double(), targets) for x, targets in feed(5)]
    for values in batches:
        mine.train_step(*values)
    torchs_loop(other, [make(other.parameters())], iter(batches), clip=0.1)
    assert equal(weights(mine), weights(other)) and mine.first.weight.dtype is torch.float64
    states = mine.zgraph.optimizer.state[mine.first.weight]
    assert all(s.dtype is torch.float64 for s in states.values())


@sweep("record", [zgraph.Lion(), zgraph.LAMB(), zgraph.Muon(), zgraph.AdamW8bit(min_row_size=4)], quick=2)
def test_every_optimizer_updates_a_float64_model(record):
    mine = zgraph.compile(built().double(), zgraph.Plan(backend="eager", optimizer=record))
    before = weights(mine)
    x, targets = batch()
    mine.train_step(x.double(), targets)
    after = weights(mine)
    assert all(after[n].dtype is torch.float64 and not torch.equal(after[n], before[n]) for n in before)


def torchs_muon(params, **numbers):
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    return torch.optim.Muon(params, **numbers)


def test_a_hundred_clipped_accumulated_steps_of_muon_are_torchs():
    record = zgraph.Muon(lr=1e-2)
    assert hundred_steps(Matrices, record, lambda m: [torchs_muon(m.parameters(), lr=1e-2)]) < 1e-5


def test_muon_and_its_companion_are_two_optimizers_of_torchs():
    record = zgraph.Muon(lr=1e-2, companion=zgraph.AdamW(lr=3e-3))

    def both(model):
        parameters = list(model.parameters())
        matrices, rest = [p for p in parameters if p.dim() == 2], [p for p in parameters if p.dim() != 2]
        return [torchs_muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=3e-3, foreach=False)]

    assert hundred_steps(Net, record, both) < 1e-5


@pytest.mark.inductor
@pytest.mark.slow
@pytest.mark.parametrize("name", list(PAIRS))
def test_a_hundred_steps_compiled_by_inductor_are_torchs(name):
    record, make = PAIRS[name]
    # Kernels fuse and contract products, so each gradient's rounding is another, and all but SGD divide by its size.
    assert hundred_steps(Net, record, lambda m: [make(m.parameters())], "inductor") < 1e-4


def test_another_rate_takes_effect_and_compiles_nothing():
    record, make = PAIRS["AdamW"]
    mine, other = compiled(optimizer=record), built()
    theirs = make(other.parameters())
    made = []
    for rate, values in zip((1e-2, 3e-3, 0.1), feed(3), strict=True):
        mine.zgraph.optimizer.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = rate
        mine.train_step(*values)
        torchs_loop(other, [theirs], iter([values]))
        updater = mine.zgraph.runtime.updater
        made.append((len(updater.programs.executables()), len(updater.programs.histories()), len(mine.zgraph.programs)))
    assert equal(weights(mine), weights(other))
    assert len(set(made)) == 1


# -- micro-batches ----------------------------------------------------------------------------------------------------
def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@sweep("parts", [2, 4, 8], quick=(1,))
def test_accumulated_micro_batches_equal_one_large_batch(parts):
    mine, whole = compiled(micro_batches=parts), compiled()
    values = batch()
    a, b = mine.train_step(*values), whole.train_step(*values)
    assert furthest(gradients(mine), gradients(whole)) < ROUNDING
    assert abs(a - b) < ROUNDING * b
    updated, at_once = (compiled(optimizer=zgraph.SGD(lr=0.1), micro_batches=n) for n in (parts, 1))
    for other in feed(3):
        updated.train_step(*other)
        at_once.train_step(*other)
    assert furthest(weights(updated), weights(at_once)) < ROUNDING


def test_a_loop_inside_no_sync_is_train_step():
    by_hand, whole = (compiled(optimizer=zgraph.AdamW(), micro_batches=2) for _ in range(2))
    for x, targets in feed(3):
        with by_hand.no_sync():
            (by_hand(x[:4], targets[:4]) / 2).backward()
        (by_hand(x[4:], targets[4:]) / 2).backward()
        by_hand.step()
        whole.train_step(x, targets)
    assert equal(weights(by_hand), weights(whole))


@pytest.mark.parametrize("clip", [None, 1e9], ids=["plain", "clipped"])
def test_counted_by_tokens_uneven_micro_batches_equal_one_batch(clip):
    x, targets = batch(7)
    targets[[0, 2, 4]] = -100
    mine, whole = compiled(micro_batches=3, loss_average="token", grad_clip=clip), built()
    loss = mine.train_step(x, targets)
    expected = whole(x, targets)
    expected.backward()
    assert furthest(gradients(mine), gradients(whole)) < ROUNDING
    assert abs(loss - expected) < ROUNDING * expected


def test_counted_by_tokens_a_micro_batch_without_targets_counts_nothing():
    x, targets = batch(6)
    targets[2:4] = -100
    mine, whole = compiled(micro_batches=3, loss_average="token"), built()
    loss = mine.train_step(x, targets)
    expected = whole(x, targets)
    expected.backward()
    assert furthest(gradients(mine), gradients(whole)) < ROUNDING
    assert abs(loss - expected) < ROUNDING * expected


FAILING = [
    {"micro_batches": 2},
    {"micro_batches": 2, "loss_average": "token", "zero": 0},
    {"micro_batches": 2, "grad_clip": 1.0, "on_nonfinite": "skip", "precision": "bf16"},
    {"offload": {"optimizer": "cpu", "least_bytes": 0}},
]


@product("fields, where", FAILING, ["loss", "hook"], together=1, ids=str)
def test_a_step_that_fails_leaves_nothing_for_the_next(fields, where):
    left = None  # calls until one fails

    def fail(*given):
        nonlocal left
        if left is not None:
            left -= 1
            if not left:
                raise ValueError("boom")

    def loss_fn(output, targets):
        if where == "loss":
            fail()
        return cross_entropy(output, targets)

    def run(failing):
        model = compiled(Logits, loss_fn=loss_fn, optimizer=zgraph.AdamW(), **fields)
        first, second, third = feed(3)
        model.train_step(*first)
        if where == "hook":
            model.zgraph.on_gradients(fail)
        if failing:
            nonlocal left
            left = fields.get("micro_batches", 1) if where == "loss" else 1
            with pytest.raises(ValueError, match="boom"):
                model.train_step(*second)
            assert all(p.grad is None for p in model.parameters())
            left = None
        model.train_step(*third)
        return weights(model)

    assert equal(run(True), run(False))


def test_a_failed_step_without_the_plans_optimizer_leaves_gradients_to_the_user():
    model = compiled(Logits, loss_fn=cross_entropy)
    model.train_step(*batch())
    before = {n: p.grad.clone() for n, p in model.named_parameters()}
    with pytest.raises(TypeError):
        model.train_step(batch()[0], "no targets")
    assert equal(before, {n: p.grad for n, p in model.named_parameters()})


def test_a_step_that_trains_nothing_says_so():
    model = compiled(Logits, loss_fn=cross_entropy, optimizer=zgraph.AdamW())
    model.requires_grad_(False)
    with pytest.raises(StepError, match="no parameter that trains"):
        model.train_step(*batch())
    model.requires_grad_(True)
    with torch.no_grad(), pytest.raises(StepError, match=r"outside of torch\.no_grad"):
        model.train_step(*batch())
    model.train_step(*batch())


def test_an_optimizer_for_a_model_without_parameters_is_refused():
    with pytest.raises(PlanError, match="no floating-point parameters"):
        compiled(nn.ReLU, optimizer=zgraph.AdamW())


def test_a_step_by_hand_after_one_counted_by_tokens_is_a_whole_one():
    mine, other = compiled(optimizer=zgraph.SGD(lr=0.1), micro_batches=2, loss_average="token"), built()
    first, second = feed(2)
    mine.train_step(*first)
    mine(*second).backward()
    mine.step()
    torchs_loop(other, [torch.optim.SGD(other.parameters(), lr=0.1, foreach=False)], iter([first, second]))
    assert furthest(weights(mine), weights(other)) < ROUNDING


def test_a_causal_language_models_shifted_labels_are_counted():
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=31,
        use_cache=False,
    )
    torch.manual_seed(0)
    whole = transformers.LlamaForCausalLM(config)
    plan = zgraph.Plan(backend="eager", micro_batches=2, loss_average="token")
    mine = zgraph.compile(copy.deepcopy(whole), plan)
    ids = torch.randint(31, (4, 9))
    labels = ids.clone()
    labels[0, 2:] = -100
    labels[1, :5] = -100
    output = mine.train_step(input_ids=ids, labels=labels)
    expected = whole(input_ids=ids, labels=labels)
    expected.loss.backward()
    assert type(output) is type(expected)
    assert (
        furthest(
            {"loss": output.loss[None], "logits": output.logits},
            {
                "loss": expected.loss.detach()[None],
                "logits": expected.logits.detach(),
            },
        )
        < ROUNDING
    )
    assert furthest(gradients(mine), gradients(whole)) < ROUNDING


# -- what comes back, and the loss in it --------------------------------------------------------------------------------
@dataclass
class Answer:
    loss: torch.Tensor
    logits: torch.Tensor
    name: str = "answer"


class Shaped(Net):
    """Loss and logits in some structure."""

    kind = "tuple"

    def forward(self, x, targets):
        logits = self.logits(x)
        loss = cross_entropy(logits, targets)
        if self.kind == "tuple":
            return loss, logits
        if self.kind == "list":
            return [loss, {"logits": logits}]
        if self.kind == "dict":
            return {"loss": loss, "logits": logits, "more": (logits.sum(1), 3)}
        if self.kind == "dataclass":
            return Answer(loss, logits)
        from transformers.modeling_outputs import SequenceClassifierOutput

        return SequenceClassifierOutput(loss=loss, logits=logits)


@product("parts, kind", [1, 2], ["tuple", "list", "dict", "dataclass", "ModelOutput"], together=1)
def test_train_step_returns_what_the_model_returns_for_the_whole_batch(kind, parts):
    if kind == "ModelOutput":
        pytest.importorskip("transformers")
    cls = type("Of" + kind, (Shaped,), {"kind": kind})
    mine, other = compiled(cls, micro_batches=parts), built(cls)
    values = batch()
    output, expected = mine.train_step(*values), other(*values)
    assert type(output) is type(expected)
    flat, whole = (_leaves(o) for o in (output, expected))
    assert len(flat) == len(whole)
    for a, b in zip(flat, whole, strict=True):
        if isinstance(b, torch.Tensor):
            assert not a.requires_grad and a.shape == b.shape and a.dtype == b.dtype
            assert (a - b).norm() <= ROUNDING * b.norm()
        else:
            assert a == b
    assert mine.first.weight.grad is not None


def _leaves(output: Any) -> list[Any]:
    if isinstance(output, Answer):
        return [output.loss, output.logits, output.name]
    return torch.utils._pytree.tree_leaves(output)


@sweep("parts", [1, 2], quick=1)
@pytest.mark.parametrize(
    ("loss_fn", "extra", "cls"),
    [
        (lambda out: out.square().mean(), False, Logits),
        (lambda out, targets: cross_entropy(out, targets), True, Logits),
        (nn.CrossEntropyLoss(), True, Logits),
        (lambda out, x: (out.sum(1) - x.sum(1)).square().mean(), False, Logits),
        (lambda out, x, targets: out[0] * x.square().mean() * targets.ne(9).float().mean(), False, Shaped),
    ],
    ids=["output", "output and what is given", "a module", "output and the model's", "output and all the model's"],
)
def test_loss_fn_gets_the_output_and_what_it_asks_for(loss_fn, extra, cls, parts):
    values = batch()
    given = values if extra or cls is Shaped else values[:1]
    mine, other = compiled(cls, loss_fn=loss_fn, micro_batches=parts), built(cls)
    mine.train_step(*given)
    theirs = [some for some in zip(*(v.chunk(parts) for v in given), strict=True)]
    for some in theirs:
        output = other(*some[:1]) if cls is Logits else other(*some)
        if extra:
            loss = loss_fn(output, some[1])
        elif cls is Shaped:
            loss = loss_fn(output, *some)
        else:
            loss = loss_fn(output, some[0]) if loss_fn.__code__.co_argcount == 2 else loss_fn(output)
        (loss / parts).backward()
    assert furthest(gradients(mine), gradients(other)) < ROUNDING


def test_loss_fn_gets_named_arguments_that_forward_does_not_know():
    x, targets = batch()
    mine, other = compiled(Logits, loss_fn=lambda out, *, answers: cross_entropy(out, answers)), built(Logits)
    assert torch.equal(mine.train_step(x, answers=targets), other(x).detach())
    cross_entropy(other(x), targets).backward()
    assert equal(gradients(mine), gradients(other))


class Keyed(Net):
    """What it computes does not need the targets, which only its loss function takes."""

    def forward(self, x, targets=None, **more):
        return self.logits(x)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda out, targets: cross_entropy(out, targets),
        lambda out, x, targets: cross_entropy(out, targets) + 0 * x.sum(),
        lambda out, *, targets: cross_entropy(out, targets),
    ],
    ids=["positional", "all", "by name"],
)
@pytest.mark.parametrize("backwards", [False, True])
def test_loss_fn_gets_named_arguments_by_their_names(loss_fn, backwards):
    x, targets = batch()
    named = {"targets": targets, "x": x} if backwards else {"x": x, "targets": targets}
    mine = compiled(Keyed, loss_fn=loss_fn, micro_batches=2)
    mine.train_step(**named)
    whole = built()
    whole(x, targets).backward()
    assert furthest(gradients(mine), gradients(whole)) < ROUNDING


def test_a_loss_fn_that_wants_what_is_not_given_is_refused():
    mine = compiled(Keyed, loss_fn=lambda out, x, answers: out.sum())
    with pytest.raises(zgraph.errors.StepError, match="wants 'answers'"):
        mine.train_step(batch()[0])


@pytest.mark.parametrize("backwards", [False, True])
def test_tokens_are_counted_however_arguments_are_ordered(backwards):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.last = nn.Embedding(7, 6), nn.Linear(6, 5)

        def forward(self, ids, y):
            return cross_entropy(self.last(self.embed(ids)), y)

    ids, y = torch.tensor([1, 2, 3, 4]), torch.tensor([0, -100, 2, 1])
    named = {"y": y, "ids": ids} if backwards else {"ids": ids, "y": y}
    mine, whole = compiled(Words, micro_batches=2, loss_average="token"), built(Words)
    mine.train_step(**named)
    whole(**named).backward()
    assert furthest(gradients(mine), gradients(whole)) < ROUNDING


def test_outputs_that_are_plain_objects_are_put_together():
    class Out:
        def __init__(self, loss, logits):
            self.loss, self.logits, self.name = loss, logits, "out"

    class Objects(Net):
        def forward(self, x, targets):
            logits = self.logits(x)
            return Out(cross_entropy(logits, targets), logits)

    out, whole = compiled(Objects, micro_batches=2).train_step(*batch()), built(Objects)(*batch())
    assert not out.loss.requires_grad and abs(out.loss - whole.loss) < ROUNDING * whole.loss
    assert out.logits.shape == whole.logits.shape and out.name == "out"


def test_eval_step_is_the_eval_model_and_keeps_modes():
    class Dropped(Net):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)
            self.frozen = nn.Dropout(0.5).eval()

        def logits(self, x):
            return self.frozen(self.drop(super().logits(x)))

    mine, other = compiled(Dropped), built(Dropped).eval()
    modes = {n: m.training for n, m in mine.named_modules()}
    output = mine.eval_step(*batch())
    assert torch.equal(output, other(*batch()).detach()) and not output.requires_grad
    assert {n: m.training for n, m in mine.named_modules()} == modes and not modes["frozen"]
    with pytest.raises(zgraph.errors.ZgraphError):
        mine.eval_step(torch.zeros(8, 6), batch()[1])
    assert {n: m.training for n, m in mine.named_modules()} == modes
