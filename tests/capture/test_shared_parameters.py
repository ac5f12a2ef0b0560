"""Tensors that share memory with a parameter without being registered are read from the parameter's shard, or refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from sweeps import product, sweep
from torch import nn
from torch.distributed.tensor import DTensor

import zgraph
from zgraph.errors import ModelError, StepError, UnsupportedError


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.alias()

    def alias(self) -> None: ...


class InList(Base):
    def alias(self):
        self.w = [self.a.weight]

    def forward(self, x):
        return (torch.tanh(self.a(x)) @ self.w[0]).square().mean()


class OnlyInList(InList):
    def forward(self, x):
        return (torch.tanh(x) @ self.w[0]).square().mean() + self.a.bias.square().sum()


class Views(Base):
    def alias(self):
        w = self.a.weight
        self.views = {"rows": w[:2], "columns": w[:, 1:3], "row": w[2], "t": w.t(), "flat": w.view(-1), "odd": w[::2]}

    def forward(self, x):
        h, v = torch.tanh(self.a(x)), self.views
        terms = [h[:, :2] @ v["rows"], h @ v["columns"], h * v["row"], h @ v["t"], v["flat"] * 0.1, v["odd"].square()]
        return sum(t.square().mean() for t in terms)


class OnlyRow(Base):
    def alias(self):
        self.row = (self.a.weight[2],)

    def forward(self, x):
        return (torch.tanh(x) * self.row[0]).square().mean() + self.a.bias.square().sum()


class Data(Base):
    def alias(self):
        self.data, self.other = self.a.weight.data, (self.a.weight.detach()[1:],)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return (h @ self.data).square().mean() + (h[:, 1:] @ self.other[0]).mean()


class Hidden(Base):
    """A module that is no child, with the same Parameter."""

    def alias(self):
        hidden = nn.Linear(4, 4, bias=False)
        hidden.weight = self.a.weight
        self.hidden = [hidden]

    def forward(self, x):
        return self.hidden[0](torch.tanh(self.a(x))).square().mean()


class Closure(Base):
    def alias(self):
        weight = self.a.weight
        self.use = lambda h: h @ weight.t()

    def forward(self, x):
        return self.use(torch.tanh(self.a(x))).square().mean()


class Transposed(Base):
    """The parameter itself is stored by columns."""

    def alias(self):
        self.t = nn.Parameter(torch.randn(6, 4).t())
        self.w = [self.t, self.t[:, 1:4], self.t.t()]

    def forward(self, x):
        h = torch.tanh(self.a(x)) @ self.t
        return h.square().mean() + (x @ self.w[1]).square().mean() + (x @ self.w[0] @ self.w[2]).mean()


class Flat(Base):
    """Parameters that are disjoint views of one tensor."""

    def alias(self):
        flat = torch.randn(32) * 0.5
        self.one, self.other = nn.Parameter(flat[:16].view(4, 4)), nn.Parameter(flat[16:].view(4, 4))

    def forward(self, x):
        return (torch.tanh(x @ self.one) @ self.other).square().mean() + self.a(x).mean()


MODELS = (InList, OnlyInList, Views, OnlyRow, Data, Hidden, Closure, Transposed, Flat)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def made(kind):
    torch.manual_seed(0)
    return kind()


def batch(number, rank=0):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * number + rank))


def expected(kind, world):
    model, losses = made(kind), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for number in range(3):
        optimizer.zero_grad()
        losses.append([])
        for rank in range(world):
            loss = model(batch(number, rank))
            losses[-1].append(loss.item())
            (loss / world).backward()
        optimizer.step()
    return losses, [p.detach() for p in model.parameters()]


def trained(kind, zero, backend="eager", plan=False):
    """Whether three steps on this rank are those of the plain model: by the plan's optimizer, or by torch's."""
    grouped = dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
    of_plan = zgraph.SGD(lr=0.3) if plan else None
    model = zgraph.compile(made(kind), zgraph.Plan(backend=backend, zero=zero, optimizer=of_plan))
    optimizer = None if plan else torch.optim.SGD(model.parameters(), lr=0.3)
    losses, params = expected(kind, world)
    for number in range(3):
        if optimizer is None:
            loss = model.train_step(batch(number, rank))
        else:
            optimizer.zero_grad()
            loss = model(batch(number, rank))
            loss.backward()
            optimizer.step()
        torch.testing.assert_close(loss.item(), losses[number][rank], rtol=1e-5, atol=1e-6)
    for mine, its in zip(model.parameters(), params, strict=True):
        torch.testing.assert_close(whole(mine).detach(), its, rtol=1e-5, atol=1e-6)


@pytest.mark.gloo
@sweep(
    "kind, zero, plan",
    [(k, zero, (at + zero) % 2 == 0) for zero in (0, 1, 3) for at, k in enumerate(MODELS)],
    quick=(0, 5, 25),
)
def test_ranks_read_the_parameter_as_it_is_now(two, kind, zero, plan):
    assert two.run(trained, kind, zero, "eager", plan) == [None, None]


@pytest.mark.slow  # eagerly above; with Inductor on one rank in test_inductor_reads_the_parameter_as_it_is_now
@pytest.mark.gloo
def test_ranks_with_inductor_too(two):
    assert two.run(trained, Views, 3, "inductor") == [None, None]


@product("kind, plan", MODELS, [False, True], together=1)
def test_one_process_reads_the_parameter_as_it_is_now(kind, plan):
    trained(kind, 3, plan=plan)


@pytest.mark.slow
def test_inductor_reads_the_parameter_as_it_is_now():
    trained(Views, 3, "inductor", plan=True)


class Twins(Base):
    """Two Parameters in one memory."""

    def alias(self):
        self.b = nn.Linear(4, 4, bias=False)
        self.b.weight = nn.Parameter(self.a.weight.data)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x))).square().mean()


class Overlapping(Base):
    def alias(self):
        flat = torch.randn(24)
        self.one, self.other = nn.Parameter(flat[:16].view(4, 4)), nn.Parameter(flat[8:].view(4, 4))

    def forward(self, x):
        return (x @ self.one @ self.other).square().mean()


class Buffer(Base):
    def alias(self):
        self.register_buffer("w", self.a.weight.detach())

    def forward(self, x):
        return (self.a(x) @ self.w).square().mean()


class Expanded(Base):
    def alias(self):
        self.e = nn.Parameter(torch.randn(4, 1).expand(4, 4))

    def forward(self, x):
        return (self.a(x) @ self.e).square().mean()


class Bits(Base):
    def alias(self):
        self.bits = self.a.weight.data.view(torch.int32)

    def forward(self, x):
        return self.a(x).square().mean() * (self.bits > 0).sum()


class Written(Base):
    def alias(self):
        self.rows = self.a.weight.data[:2]

    def forward(self, x):
        self.rows.mul_(0.9)
        return self.a(x).square().mean()


class Overlaid(Base):
    """A tensor that is more than the parameter."""

    def alias(self):
        self.flat = torch.randn(20)
        self.p = nn.Parameter(self.flat[:16].view(4, 4))

    def forward(self, x):
        return (self.a(x) @ self.p).square().mean() + self.flat.sum()


def refusal(kind, **plan):
    try:
        model = zgraph.compile(made(kind), zgraph.Plan(backend="eager", **plan))
        model(batch(0))
    except (ModelError, UnsupportedError, StepError) as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def refusals(zero):
    kinds = (Twins, Overlapping, Buffer, Expanded, Bits, Written, Overlaid)
    return {kind.__name__: refusal(kind, zero=zero) for kind in kinds}


def replaced_alias(zero):
    """What is said of a list whose tensor was exchanged after the first call."""
    model = zgraph.compile(made(InList), zgraph.Plan(backend="eager", zero=zero))
    model(batch(0))
    model.w[0] = nn.Parameter(torch.ones(4, 4))
    try:
        model(batch(0))
    except StepError as error:
        return str(error)
    return "not refused"


@pytest.mark.gloo
def test_what_would_part_from_the_parameter_is_refused(two):
    for said in two.run(refusals, 3):
        assert {n: s.split(":")[0] for n, s in said.items()} == {
            "Twins": "ModelError",
            "Overlapping": "ModelError",
            "Buffer": "ModelError",
            "Expanded": "ModelError",
            "Bits": "UnsupportedError",
            "Written": "UnsupportedError",
            "Overlaid": "UnsupportedError",
        }, said
        assert (
            "'b.weight' shares memory with parameter 'a.weight'" in said["Twins"]
            and "b.weight = a.weight" in said["Twins"]
        )
    for said in two.run(replaced_alias, 3):
        assert "w" in said and "another tensor" in said


@pytest.mark.parametrize("kind", [Twins, Overlapping])
def test_an_update_of_parameters_in_one_memory_is_refused(kind):
    assert "shares memory" in refusal(kind, optimizer=zgraph.SGD(lr=0.1))
    trained(kind, 3)  # torch's optimizer writes one after the other


class TransposedParameter(nn.Module):
    """The second parameter is a transposed view of the first: it gets memory of its own, for its rows lie apart."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 4))
        self.b = nn.Parameter(self.a.data.t())

    def forward(self, x):
        return (torch.tanh(x @ self.a) @ self.b).square().mean()


def test_parameters_that_are_stored_otherwise_share_no_memory():
    assert "'b' shares memory with parameter 'a'" in refusal(TransposedParameter)


@pytest.mark.parametrize("kind", [Expanded])
def test_an_expanded_parameter_is_refused(kind):
    assert "one in memory" in refusal(kind)


def assigned(zero):
    """What is said of a whole tensor that was put in the place of a shard."""
    model = zgraph.compile(made(InList), zgraph.Plan(backend="eager", zero=zero))
    model.load_state_dict(made(InList).state_dict(), assign=True)
    try:
        model(batch(0))
    except ModelError as error:
        return str(error)
    return "not refused"


@pytest.mark.gloo
@pytest.mark.parametrize("zero", [0, 3])
def test_a_whole_tensor_in_the_place_of_a_shard_is_refused(two, zero):
    for said in two.run(assigned, zero):
        assert "a.weight is a whole tensor now" in said and "assign=True" in said
