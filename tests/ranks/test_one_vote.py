"""A step has one vote; ranks that differ in it anywhere are told so within seconds; healthy ranks are never told that they differ.

Functions at the top of this file run on the ranks.
"""

from __future__ import annotations

import contextlib
import math
import random
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from sweeps import covering, sweep
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zgraph
from zgraph.errors import RankMismatchError
from zgraph.ranks.agreement import Agreement
from zgraph.ranks.tree_maximum import neighbours

pytestmark = pytest.mark.gloo

SECONDS = 10.0
WARM = 4  # steps until all is foreseen


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 1)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).square().mean()


def rank() -> int:
    return dist.get_rank()


def compiled(**plan) -> nn.Module:
    torch.manual_seed(0)
    defaults = {"backend": "eager", "watch": {"interval": 0.5}, "hardware": "default"}
    inputs = (torch.ones(4, 6),) if "mesh" in plan else None  # (a divided model has no optimizer before its first call)
    return zgraph.compile(Net(), zgraph.Plan(**{**defaults, **plan}), inputs=inputs)


@contextlib.contextmanager
def counted():
    """The subjects of the votes in here."""
    votes, vote = [], Agreement.vote

    def counting(self, subject, *args, **kwargs):
        votes.append(subject)
        return vote(self, subject, *args, **kwargs)

    Agreement.vote = counting
    try:
        yield votes
    finally:
        Agreement.vote = vote


# -- how many votes ----------------------------------------------------------------------------------------------------
CALL, BACK, UPDATE = "the inputs of a call", "a backward pass", "an update"


def votes_of_a_step(style: str, zero: int, shapes: str, vote: str, interval: float = 0.5) -> list[str]:
    """Those of the step after some others, of three micro-batches; and what is voted on when all ranks evaluate after it, late on one."""
    loop = Loop(style, zero, 3, shapes, watch={"vote": vote, "interval": interval})
    for _ in range(WARM):
        loop.step()
    with counted() as votes:
        loop.step()
    return votes


COUNTS = [
    (("train_step", 3, "auto", "step"), [CALL]),
    (("train_step", 1, "static", "step"), [CALL]),
    (("plan", 1, "static", "step"), [CALL]),
    (("torch", 2, "static", "step"), [CALL]),
    (("plan", 2, "auto", "step"), [CALL] * 3),
    (("torch", 0, "auto", "step"), [CALL] * 3),
    (("train_step", 3, "auto", "call"), [CALL, BACK] * 3 + [UPDATE]),
    (("plan", 1, "static", "call"), [CALL, BACK] * 3 + [UPDATE]),
    (("plan", 0, "static", "step", 0.0), [CALL, BACK] * 3 + [UPDATE]),  # (no heartbeats would tell)
    (("plan", 0, "static", "step", 3.0), [CALL, BACK] * 3 + [UPDATE]),  # (they would tell too late)
]


@sweep("how, expected", COUNTS, ids=["-".join(map(str, how)) for how, _ in COUNTS], quick=(0,))
def test_a_step_has_one_vote(two, how, expected):
    assert two.run(votes_of_a_step, *how) == [expected, expected]


def another_program(style: str) -> list[list[str]]:
    """The votes of steps of another batch, of those that were seen before, and of evaluations between."""
    loop = Loop(style, 3, 2, "static")
    found = []
    for rows in (4, 4, 4, 8, 8, 4, 8):
        loop.batch = lambda _=0, rows=rows: torch.ones(rows * (2 if style == "train_step" else 1), 6)
        with counted() as votes:
            loop.step()
        found.append([v for v in votes if v in (CALL, BACK, UPDATE)])
    return found


def test_what_ranks_have_not_done_before_they_vote_on(two):
    """Each act of a step is voted on where it is done for the first time in such a place."""
    first, second = two.run(another_program, "plan")
    assert first == second
    everything, one = [CALL, BACK] * 2 + [UPDATE], [CALL]
    assert first[0] == everything and first[2] == one
    assert len(first[3]) > 1 and first[-1] != everything


def late() -> float:
    """One rank is late for a step, one for an evaluation that nobody has foreseen."""
    loop = Loop("plan", 3, 2, "static", watch={"interval": 0.3})
    for step in range(WARM + 3):
        if step == WARM + rank():
            time.sleep(1.4)
        if step == WARM + 1:
            with torch.no_grad():
                loop.model(loop.batch())
        loop.step()
    return float(loop.model(loop.batch()))


def test_a_rank_that_is_late_does_not_differ(two):
    first, second = two.run(late)
    assert first == second


# -- votes of many ranks -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("world", [1, 2, 3, 5, 6, 8, 12, 14, 60, 64, 97, 1024])
def test_all_ranks_are_in_one_tree_that_is_not_deep(world):
    tree = {rank: neighbours(rank, world) for rank in range(world)}
    assert all(tree[child][0] == rank for rank, (_, children) in tree.items() for child in children)
    assert sum(len(children) for _, children in tree.values()) == world - 1
    depths = {0: 0} | {rank: 1 + depth_of(tree, tree[rank][0]) for rank in range(1, world)}
    assert max(depths.values()) <= len(tree[0][1]) == math.ceil(math.log2(world))


def depth_of(tree: dict, rank: int) -> int:
    return 0 if rank == 0 else 1 + depth_of(tree, tree[rank][0])


def receives_in_a_profile() -> list[str]:
    """What a profile of two votes has of receives, the second of which come after it."""
    votes = Agreement(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        votes.vote("one", "ballot")
        votes.vote("two", "ballot")
    votes.vote("three", "ballot")
    return [event.name for event in profile.events() if "recv" in event.name]


def test_no_receive_outlives_a_profile_that_has_its_start(two):
    """(torch writes to a profile when a receive ends, and crashes where the profile has gone before.)"""
    assert two.run(receives_in_a_profile) == [[], []]


# -- disagreements -----------------------------------------------------------------------------------------------------
class Loop:
    """Steps of some micro-batches, by `train_step`, by the plan's optimizer, or by one of torch's."""

    def __init__(self, style: str, zero: int, parts: int, shapes: str, **plan) -> None:
        own = style == "torch"
        self.style, self.parts = style, parts
        batches = parts if style == "train_step" else 1
        optimizer = None if own else zgraph.AdamW(lr=0.01)
        self.model = compiled(zero=zero, optimizer=optimizer, micro_batches=batches, shapes=shapes, **plan)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01) if own else self.model.zgraph.optimizer

    def batch(self, rows: int = 4) -> torch.Tensor:
        return torch.ones(rows, 6)

    def step(self, at: int = -1, kind: str = "") -> None:
        """One step; this rank does something else at micro-batch `at`."""
        if self.style == "train_step":
            if at >= 0:
                self.differ(kind)
            rows = 4 * self.parts * (2 if kind == "shape" else 1)
            self.model.train_step(self.batch(rows))
            return
        for part in range(self.parts):
            mine = kind if part == at else ""
            if mine:
                self.differ(mine)
            reduces = part + 1 == self.parts
            if mine == "accumulation":
                reduces = not reduces
            with contextlib.nullcontext() if reduces else self.model.no_sync():
                loss = self.model(self.batch(8 if mine == "shape" else 4))
                if mine == "two forwards":
                    self.model(self.batch()).backward()
                if mine == "retained":
                    loss.backward(retain_graph=True)
                if mine == "grad":
                    torch.autograd.grad(loss, list(self.model.parameters()))
                if mine != "skipped backward":
                    loss.backward()
        if at >= 0:
            self.differ_at_update(kind)
        if kind != "skipped update":
            self.optimizer.step()
            self.optimizer.zero_grad()

    def differ(self, kind: str) -> None:
        model = self.model
        if kind == "mode":
            model.eval()
        elif kind == "python state":
            model.first.register_forward_hook(lambda module, args, output: output * 2)
        elif kind == "frozen":
            model.first.bias.requires_grad_(False)
        elif kind == "plan":
            model.zgraph.recompile(model.zgraph.plan)
        elif kind == "evaluation":
            with torch.no_grad():
                model(self.batch())
        elif kind == "timings":
            model.zgraph.timings()
        elif kind == "checkpoint":
            model.zgraph.runtime.everyone.vote("a checkpoint", "here")
        elif kind in ("learning rate", "decay", "state", "no gradient"):
            self.differ_at_update(kind)

    def differ_at_update(self, kind: str) -> None:
        model, optimizer = self.model, self.optimizer
        if kind == "learning rate":
            optimizer.param_groups[0]["lr"] = 0.5
        elif kind == "decay":
            optimizer.param_groups[0]["betas"] = (0.5, 0.999)
        elif kind == "no gradient":
            model.second.bias.grad = None


# What each is called in the error: of the first difference.
NAMED = {
    "shape": r"the inputs of a call.*\[8, 6\]",
    "mode": r"the inputs of a call",
    "python state": r"the inputs of a call.*new",
    "frozen": r"the inputs of a call|parameters",
    "accumulation": r"a backward pass.*(only accumulating|reducing)",
    "two forwards": r"the inputs of a call|a backward pass",
    "retained": r"a backward pass",
    "grad": r"a backward pass",
    "skipped backward": r"a backward pass",
    "plan": r"the plan of recompile",
    "evaluation": r"the inputs of a call.*no_grad",
    "timings": r"timings",
    "checkpoint": r"a checkpoint",
    "learning rate": r"lr of group 0",
    "decay": r"betas.0 of group 0",
    "no gradient": r"3 gradients",
    "skipped update": r"an update",
}
OF_UPDATES = ("learning rate", "decay", "no gradient", "skipped update")
OF_STEPS = (
    "shape",
    "mode",
    "python state",
    "frozen",
    "plan",
    "evaluation",
    "timings",
    "checkpoint",
    "learning rate",
    "decay",
)


def planted(seed: int) -> tuple[str, str, int, int, str]:
    """(kind, style, stage, micro-batches, shapes) of a disagreement."""
    draw = random.Random(seed)
    style = draw.choice(("train_step", "plan", "plan", "torch"))
    kinds = [k for k in NAMED if (style == "plan" or k not in OF_UPDATES) and (style != "train_step" or k in OF_STEPS)]
    if style == "train_step":
        kinds += ["learning rate", "decay"]
    kind = kinds[seed % len(kinds)]
    parts = draw.randint(1, 3)
    if kind == "accumulation":
        parts += 1
    shapes = "static" if kind == "shape" or draw.random() < 0.6 else "auto"
    return kind, style, draw.randint(0, 3), parts, shapes


def disagree(seed: int) -> None:
    """All is well for some steps; then one rank does something else at one micro-batch."""
    kind, style, zero, parts, shapes = planted(seed)
    loop = Loop(style, zero, parts, shapes)
    draw = random.Random(seed)
    culprit, at = draw.randrange(dist.get_world_size()), draw.randrange(parts)
    if kind == "skipped backward" and style == "torch":
        at = 0  # (after the last one torch's optimizer would communicate by itself, to reduce what waits)
    for _ in range(WARM):
        loop.step()
    begin = time.monotonic()
    try:
        loop.step(at if rank() == culprit else -1, kind if rank() == culprit else "")
        for _ in range(3):
            loop.step()
        raise AssertionError("nothing was found")
    except Exception as error:
        error.seconds = time.monotonic() - begin  # type: ignore[attr-defined]
        raise


def skip_a_backward(plan: dict) -> None:
    """One rank leaves out the only backward of a step, in a run of this plan; the others are in its program then."""
    loop = Loop("plan", 3, 1, "static", **plan)
    for _ in range(WARM):
        loop.step()
    begin = time.monotonic()
    try:
        loss = loop.model(loop.batch())
        if rank():
            loss.backward()
        loop.model(loop.batch())
        raise AssertionError("nothing was found")
    except Exception as error:
        error.seconds = time.monotonic() - begin  # type: ignore[attr-defined]
        raise


PLANS = [
    {"mesh": {"dp": 2, "tp": 2}},
    {"precision": "bf16", "grad_clip": 1.0},
    pytest.param({"backend": "inductor"}, marks=pytest.mark.inductor),
]


@sweep("plan", PLANS, quick=(0,))
def test_ranks_that_are_in_a_program_already_are_told_as_well(four, plan):
    outcomes = four.attempt(skip_a_backward, plan, limit=120, keep=True)
    for outcome in outcomes:
        assert isinstance(outcome.error, RankMismatchError), outcome.traceback
        assert outcome.error.seconds < SECONDS  # type: ignore[attr-defined]
        assert "a backward pass" in str(outcome.error) and "the inputs of a call" in str(outcome.error)


def call_two_models(what: str) -> None:
    """Steps of two models, one after the other; then one rank does something in another order."""
    first, second = (Loop("plan", 3, 1, "static") for _ in range(2))
    begin = 0.0
    try:
        for step in range(WARM + 3):
            begin = begin or (time.monotonic() if step == WARM else 0.0)
            pair = (second, first) if step == WARM and rank() == 1 else (first, second)
            if what == "steps":
                for loop in pair:
                    loop.step()
            else:
                for loop in (first, second):
                    loop.model(loop.batch()).backward()
                if what == "evaluation" and step == WARM:
                    with torch.no_grad():
                        pair[0].model(loop.batch())
                for loop in pair if what == "updates" else (first, second):
                    loop.optimizer.step()
                    loop.optimizer.zero_grad()
        raise AssertionError("nothing was found")
    except Exception as error:
        error.seconds = time.monotonic() - begin  # type: ignore[attr-defined]
        raise


@sweep("what", ["steps", "updates", "evaluation"], quick=(0,))
def test_ranks_that_call_two_models_in_another_order_are_told(two, what):
    """Each model has a group of its own to vote in, where ranks would wait for each other."""
    for outcome in two.attempt(call_two_models, what, limit=120, keep=True):
        assert isinstance(outcome.error, RankMismatchError), outcome.traceback
        assert outcome.error.seconds < SECONDS  # type: ignore[attr-defined]
        assert "the order in which they call models" in str(outcome.error), str(outcome.error)


def check_found(ranks: Ranks, seed: int, how: Callable[[int], None] = disagree) -> None:
    kind = planted(seed)[0]
    outcomes = ranks.attempt(how, seed, limit=90, keep=True)
    said = "\n".join(str(o.error) for o in outcomes)
    for outcome in outcomes:
        assert isinstance(outcome.error, RankMismatchError), f"{planted(seed)}\n{outcome.traceback}"
        assert outcome.error.seconds < SECONDS, f"{planted(seed)}: {outcome.error.seconds}\n{said}"
    assert re.search(NAMED[kind], said, re.S), f"{planted(seed)}\n{said}"


FOUND = covering(range(42), lambda seed: planted(seed)[:2], 5, 17)
"""Each kind of disagreement in each style of a loop."""


@sweep("seed", FOUND, quick=(FOUND.index(5),))
def test_planted_disagreements_are_found_on_all_ranks(two, four, seed):
    if seed % 3 == 1:
        with Ranks(3, timeout=60.0) as three:
            check_found(three, seed)
    else:
        check_found(four if seed % 3 == 0 else two, seed)


# -- healthy ranks -----------------------------------------------------------------------------------------------------
class Beside:
    """A compiled model, and the plain one that is given what all ranks are given. Both draw what they do from one seed, alike on all ranks."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.seed, self.calls = seed, 0
        self.parts, self.own, self.dynamic, zero, *self.often = drawn(self.draw)
        plan = {"zero": zero, "micro_batches": self.parts, "shapes": "auto" if self.dynamic else "static"}
        torch.manual_seed(0)
        self.plain, model = Net().double(), Net().double()
        model.load_state_dict(self.plain.state_dict())
        self.model = zgraph.compile(
            model,
            zgraph.Plan(
                backend="eager",
                hardware="default",
                optimizer=None if self.own else zgraph.SGD(lr=0.05, momentum=0.9),
                **plan,
            ),
        )
        mine = (
            torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9) if self.own else self.model.zgraph.optimizer
        )
        self.optimizers = [mine, torch.optim.SGD(self.plain.parameters(), lr=0.05, momentum=0.9)]

    def batches(self, parts: int = 1) -> list[torch.Tensor]:
        """Those of all ranks."""
        self.calls += 1
        made = []
        for r in range(dist.get_world_size()):
            generator = torch.Generator().manual_seed(1000 * self.calls + r)
            rows = (
                random.Random(f"{self.seed} {self.calls} {r if self.dynamic else 0}").choice((2, 4, 4, 4, 5))
                if parts == 1
                else 4 * parts
            )
            made.append(torch.randn(rows, 6, generator=generator, dtype=torch.float64))
        return made

    def losses(self, batches: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        plain = torch.stack([self.plain(x) for x in batches]).mean()
        return self.model(batches[rank()]), plain

    def backward(self, pair: tuple[torch.Tensor, torch.Tensor], **how) -> None:
        for loss in pair:
            loss.backward(**how)

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    # -- what a step may be
    def whole_step(self) -> None:
        batches = self.batches(self.parts)
        self.model.train_step(batches[rank()])
        torch.stack([self.plain(x) for x in batches]).mean().backward()
        if self.own:
            self.optimizers[0].step()
            self.optimizers[0].zero_grad()
        self.optimizers[1].step()
        self.optimizers[1].zero_grad()

    def loop(self) -> None:
        parts, held = self.draw.randint(1, 4), self.draw.random() < 0.5
        for part in range(parts):
            with self.model.no_sync() if held and part + 1 < parts else contextlib.nullcontext():
                self.backward(self.losses(self.batches()))
            if self.draw.random() < 0.15:
                self.evaluate()
        self.update()

    def several_forwards(self) -> None:
        pairs = [self.losses(self.batches()) for _ in range(self.draw.randint(2, 3))]
        if self.draw.random() < 0.5:
            self.backward(tuple(sum(column) for column in zip(*pairs, strict=True)))  # type: ignore[arg-type]
        else:
            for number, pair in enumerate(pairs if self.draw.random() < 0.5 else pairs[::-1]):
                with self.model.no_sync() if number + 1 < len(pairs) else contextlib.nullcontext():
                    self.backward(pair)
        self.update()

    def retained(self) -> None:
        pair = self.losses(self.batches())
        self.backward(pair, retain_graph=True)
        self.backward(pair)
        self.update()

    def dropped(self) -> None:
        self.losses(self.batches())
        self.loop()

    def asked(self) -> None:
        for model, loss in zip((self.model, self.plain), self.losses(self.batches()), strict=True):
            torch.autograd.grad(loss, list(model.parameters()))

    def evaluate(self) -> None:
        for _ in range(self.draw.randint(1, 3)):
            with torch.no_grad():
                self.losses(self.batches())

    def change_weights(self) -> None:
        for model in (self.model, self.plain):
            with torch.no_grad():
                model.first.weight.mul_(1.01)
                model.second.bias.data.add_(0.01)

    def change_rate(self) -> None:
        rate = self.draw.choice((0.01, 0.02, 0.05))
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = rate

    # -- a schedule of calls
    def run(self) -> None:
        """Do seven steps, and what there may be between them."""
        for _ in range(7):
            if self.draw.random() < 0.3:
                self.draw.choice(BETWEEN)(self)
            self.draw.choice(self.often if self.draw.random() < 0.8 else STEPS)(self)

    def furthest(self) -> float:
        """The largest difference from plain weights."""
        whole = [p.full_tensor() for p in self.model.parameters()]
        return max(float((a - b).abs().max()) for a, b in zip(whole, self.plain.parameters(), strict=True))


STEPS = [Beside.whole_step, Beside.loop, Beside.several_forwards, Beside.retained, Beside.dropped]
BETWEEN = [Beside.asked, Beside.evaluate, Beside.change_weights, Beside.change_rate]


def drawn(draw: random.Random) -> list[Any]:
    """Micro-batches, whether the optimizer is torch's, whether lengths differ, the stage, and the two kinds of step that are frequent."""
    options = [draw.randint(1, 3), draw.random() < 0.4, draw.random() < 0.5, draw.randint(0, 3)]
    return [*options, *draw.sample(STEPS, 2)]


def healthy(seed: int) -> float:
    """Ranks that do alike what is drawn; the largest difference from plain weights."""
    both = Beside(seed)
    both.run()
    return both.furthest()


def check_healthy(ranks: Ranks, seed: int) -> None:
    assert max(ranks.run(healthy, seed, limit=120)) < 1e-9


def any_two_of(seeds: range, always: int) -> list[int]:
    """Few of these seeds, with which any two of the options that are drawn meet (the two kinds of step in either order)."""
    return covering(seeds, lambda seed: drawn(random.Random(seed)), always)


@sweep("seed", any_two_of(range(200), 3), quick=(any_two_of(range(200), 3).index(3),))
def test_healthy_schedules_raise_nothing_and_train_as_plain_pytorch(two, seed):
    check_healthy(two, seed)


@sweep("seed", [203, 207, 211, 215, 219], quick=(1,))
def test_healthy_schedules_on_more_ranks(four, seed):
    check_healthy(four, seed)
