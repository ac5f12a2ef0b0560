"""A model in stages reads tensors beside its parameters as plain PyTorch does, or is refused on all ranks."""

from __future__ import annotations

import pytest
import torch
from sweeps import product, sweep
from torch import nn
from torch.distributed.tensor import DTensor

import zgraph
from zgraph.errors import CaptureError, UnsupportedError
from zgraph.stages.channels import _flat, _shown


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.more()

    def more(self) -> None: ...


class SameStage(Base):
    def more(self):
        self.w = [self.a.weight]

    def forward(self, x):
        return self.b(torch.tanh(self.a(x) @ self.w[0])).square().mean()


class OtherStage(Base):
    """Each stage reads what the other one has."""

    def more(self):
        self.w = [self.a.weight, self.b.weight[:2]]

    def forward(self, x):
        h = torch.tanh(self.a(x)) @ self.w[1].t()
        return (self.b(torch.cat([h, h], 1)) @ self.w[0]).square().mean()


class Data(Base):
    def more(self):
        self.d = (self.a.weight.data, self.b.bias.detach())

    def forward(self, x):
        h = torch.tanh(self.a(x)) @ self.d[0] + self.d[1]
        return (self.b(h) @ self.d[0] + self.d[1]).square().mean()


class OnlyAlias(Base):
    def more(self):
        self.w = [self.b.weight]

    def forward(self, x):
        return (torch.tanh(self.a(x)) @ self.w[0]).square().mean() + self.b.bias.square().sum()


ALIASES = (SameStage, OtherStage, Data, OnlyAlias)


class Attribute(Base):
    def more(self):
        self.t = torch.zeros(4)

    def forward(self, x):
        h = self.b(torch.tanh(self.a(x)) + self.t)
        self.t = h.detach().mean(0)
        return h.square().mean()


class FirstNone(Base):
    def more(self):
        self.t = None

    def forward(self, x):
        h = self.b(torch.tanh(self.a(x if self.t is None else x + self.t)))
        self.t = h.detach().mean(0)
        return h.square().mean()


class Buffer(Base):
    def more(self):
        self.register_buffer("t", torch.zeros(4))

    def forward(self, x):
        h = torch.tanh(self.a(x)) + self.t
        self.t = h.detach().mean(0)
        return self.b(h).square().mean()


class Item(Base):
    def more(self):
        self.state = {"t": torch.zeros(4)}

    def forward(self, x):
        h = torch.tanh(self.a(x)) + self.state["t"]
        self.state["t"] = h.detach().mean(0)
        return self.b(h).square().mean()


CARRIED = (Attribute, FirstNone, Buffer, Item)


class InPlace(Base):
    def more(self):
        self.register_buffer("t", torch.zeros(4))
        self.ready = False

    def forward(self, x):
        self.ready = True
        h = torch.tanh(self.a(x)) + self.t
        self.t.copy_(h.detach().mean(0))
        h = self.b(h)
        self.last = h.detach()
        return h.square().mean()


class Counts(Base):
    """Each micro-batch is one of its own: none is what the program of the first gives."""

    def more(self):
        self.seen = []

    def forward(self, x):
        self.seen.append(1)
        return self.b(self.a(x) * len(self.seen)).square().mean()


class Spectral(Base):
    """Its norm puts buffers that it has written to into their places again."""

    def more(self):
        self.a = nn.utils.parametrizations.spectral_norm(self.a)

    def forward(self, x):
        return self.b(x + torch.tanh(self.a(x))).square().mean()


def made(kind):
    torch.manual_seed(0)
    return kind()


def trained(kind, mesh, backend="eager"):
    """Whether three steps of two micro-batches are those of the plain model."""
    plain, losses = made(kind), []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3)
    plan = zgraph.Plan(backend=backend, mesh=mesh, zero=0, micro_batches=2, optimizer=zgraph.SGD(lr=0.3))
    model = zgraph.compile(made(kind), plan)
    for number in range(3):
        # (the second batch is of another size, and has programs of its own; two of each are enough of Inductor's)
        x = torch.randn(
            4 if number == 1 and backend == "eager" else 8, 4, generator=torch.Generator().manual_seed(number)
        )
        optimizer.zero_grad()
        losses = [plain(part) / 2 for part in x.chunk(2)]
        sum(losses).backward()
        optimizer.step()
        torch.testing.assert_close(model.train_step(x).item(), sum(losses).item(), rtol=1e-5, atol=1e-6)
    for (name, mine), its in zip(model.named_parameters(), plain.parameters(), strict=True):
        if not mine.is_meta:
            mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
            torch.testing.assert_close(mine.detach(), its.detach(), rtol=1e-5, atol=1e-6, msg=name)


def all_trained(kinds, mesh):
    failed = []
    for kind in kinds:
        try:
            trained(kind, mesh)
        except (AssertionError, RuntimeError, ValueError) as error:
            failed.append((kind.__name__, str(error)[:300]))
    return failed


@pytest.mark.gloo
@sweep("kind", ALIASES, quick=(1,))
def test_stages_read_a_parameter_through_what_shares_its_memory(two, kind):
    assert two.run(all_trained, (kind,), {"pp": 2}) == [[], []]


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("other", ["dp", "tp"])
def test_they_do_with_other_ranks_inside_of_a_stage(four, other):
    """(Both ranks of "dp" see the same rows: a step is the plain model's.)"""
    assert four.run(all_trained, (*ALIASES, InPlace), {"pp": 2, other: 2}) == [[], [], [], []]


@pytest.mark.gloo
@pytest.mark.slow
def test_inductor_does(two):
    assert two.run(trained, OtherStage, {"pp": 2}, "inductor") == [None, None]


@product("kind, mesh", [SameStage, Data, OnlyAlias], [{"pp": 2}, {"pp": 2, "dp": 2}, {"dp": 2}], together=1)
def test_virtual_ranks_do(kind, mesh):
    plan = zgraph.Plan(backend="eager", mesh=mesh, micro_batches=2)
    inputs = (torch.randn(8 * mesh.get("dp", 1), 4),)
    found = zgraph.verify(made(kind), plan, 2 * (len(mesh)), inputs)
    assert found.ok, str(found)


def refusal(kind, parts):
    model = zgraph.compile(made(kind), zgraph.Plan(backend="eager", mesh={"pp": 2}, micro_batches=parts))
    try:
        model.train_step(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
    except CaptureError as error:
        return str(error)
    return None


@pytest.mark.gloo
@product("kind, parts", CARRIED, [1, 2], together=1)
def test_a_tensor_that_forward_replaces_is_refused_on_all_ranks(two, kind, parts):
    first, second = two.run(refusal, kind, parts)
    assert "reads a tensor and replaces it" in first and first == second


@pytest.mark.gloo
@sweep("kind", [InPlace, Spectral], quick=1)
def test_one_that_it_writes_to_is_right(two, kind):
    assert two.run(all_trained, (kind,), {"pp": 2}) == [[], []]


def first_step(parts):
    model = zgraph.compile(made(Counts), zgraph.Plan(backend="eager", mesh={"pp": 2}, micro_batches=parts))
    try:
        return model.train_step(torch.ones(4, 4)).item()
    except CaptureError as error:
        return str(error)


@pytest.mark.gloo
def test_state_that_changes_with_each_micro_batch_is_refused_before_the_step(two):
    assert all("several micro-batches" in said for said in two.run(first_step, 2))
    assert two.run(first_step, 1) == [made(Counts)(torch.ones(4, 4)).item()] * 2


def hooked():
    model = made(SameStage)
    zgraph.compile(model, zgraph.Plan(backend="eager", mesh={"pp": 2}, micro_batches=2))
    model.register_forward_hook(lambda *_: None)
    try:
        return model.train_step(torch.ones(4, 4)).item()
    except UnsupportedError as error:
        return str(error)


@pytest.mark.gloo
def test_hooks_of_the_model_itself_are_refused_where_a_step_does_not_call_it(two):
    assert all("hooks of its own" in said for said in two.run(hooked))


def test_a_stage_whose_gradients_are_nothing_but_zeros_is_right():
    plan = zgraph.Plan(backend="eager", mesh={"pp": 3}, micro_batches=2, schedule="loopedbfs")
    model = made(Spectral)
    model.b = nn.Sequential(*(m for _ in range(3) for m in (nn.LayerNorm(4), nn.Linear(4, 4))))
    found = zgraph.verify(model, plan, 3, (torch.randn(4, 4),))
    assert found.ok, str(found)


@pytest.mark.parametrize(
    "like",
    [
        torch.empty(3, 4),
        torch.empty(4, 3).t(),
        torch.empty(3).expand(4, 3),
        torch.empty(3, 1).expand(3, 4),
        torch.empty(2, 1, 3).expand(2, 5, 3),
        torch.empty(2, 3, 4).permute(2, 0, 1),
        torch.empty(6, 4)[::2, 1:3],
        torch.empty_strided((1, 3), (0, 1)),
        torch.empty(()),
        torch.empty(0, 3),
    ],
    ids=lambda like: f"{tuple(like.shape)} {like.stride()}",
)
def test_what_arrives_has_the_numbers_that_were_sent(like):
    for value in (torch.arange(float(like.numel())).view(like.shape), torch.ones(like.shape[-1:]).expand(like.shape)):
        assert _shown(_flat(value, like), like).equal(value)
