"""Sizes that depend on values: what a mask selects, indices that are not zero, numbers out of tensors; and what `torch.linalg` checks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from sweeps import product, sweep
from torch import nn

import zgraph
from zgraph.errors import CaptureError, SignatureError, StepError, UnsupportedError
from zgraph.program import ops
from zgraph.program.serialize import from_json, to_json

EAGER = zgraph.Plan(backend="eager")
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Selects(nn.Module):
    """A loss of (rows of logits, a mask of rows, targets)."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.line, self.head, self.loss = nn.Linear(8, 5), nn.Linear(5, 5), loss

    def forward(self, x, mask, target):
        return self.loss(self, self.line(x), mask, target)


def experts(self, h, mask, target):
    out = torch.zeros_like(h)
    for expert in range(5):
        rows = torch.where(target == expert)[0]
        out.index_add_(0, rows, self.head(h[rows]) * (expert + 1))
    return out.sum()


def written(self, h, mask, target):
    out = torch.zeros_like(h)
    out[mask] = self.head(h[mask])
    out[h > 1] = 0.5
    return out.pow(2).mean()


class Parts(nn.Module):
    """Cuts its rows by counts out of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 5)

    def forward(self, x, counts):
        return sum((self.line(part).tanh().sum(0) ** 2).mean() for part in x.split(counts.tolist()))


def test_the_gradient_of_an_input_that_values_cut():
    plain = Parts()
    mine = zgraph.compile(copy.deepcopy(plain), EAGER)
    for counts in ([3, 4, 5], [1, 11, 0], [6, 3, 3]):
        rows, gradients = torch.randn(12, 8), []
        for model in (mine, plain):
            x = rows.clone().requires_grad_()
            model(x, torch.tensor(counts)).backward()
            gradients.append(x.grad)
        assert torch.equal(*gradients)
    assert len(mine.zgraph.programs) == 1
    with pytest.raises((StepError, RuntimeError), match="split"):
        mine(rows, torch.tensor([3, 4, 4]))


LOSSES = {
    "mean": lambda self, h, m, t: h[m].mean(),
    "loss": lambda self, h, m, t: F.cross_entropy(h, t, reduction="none")[m].mean(),
    "cross entropy": lambda self, h, m, t: F.cross_entropy(h[m], t[m]),
    "ignored": lambda self, h, m, t: F.cross_entropy(self.head(h[t != 2]), t[t != 2]),
    "mse": lambda self, h, m, t: F.mse_loss(h[m], torch.zeros_like(h)[m]),
    "positive": lambda self, h, m, t: h[h > 0].log().sum(),
    "norm": lambda self, h, m, t: h[m].norm(),
    "largest": lambda self, h, m, t: h[m].max(),
    "masked select": lambda self, h, m, t: torch.masked_select(h, m[:, None]).mean(),
    "nonzero": lambda self, h, m, t: h[m.nonzero().squeeze(1)].mean(),
    "where": lambda self, h, m, t: h[torch.where(m)].mean(),
    "layer": lambda self, h, m, t: self.head(h[m]).relu().mean(),
    "twice": lambda self, h, m, t: h[m][h[m] > 0].mean() + h[~m].sum(),
    "around": lambda self, h, m, t: (h * h[m].sum()).sum() + (h[m] * h.mean()).sum(),
    "count": lambda self, h, m, t: h[m].sum() / max(1, m.sum().item()),
    "rounded": lambda self, h, m, t: (
        h.sum() * abs(int(h[m].sum().item()) - math.floor(h.mean().item()) + math.ceil(h.mean().item()))
    ),
    "length": lambda self, h, m, t: h[m].sum() / max(1, len(h[m])),
    "weight": lambda self, h, m, t: (h @ self.head.weight[self.head.weight.sum(1) > 0].T).mean(),
    "unique": lambda self, h, m, t: h[torch.unique(t)].sum(),
    "experts": experts,
    "written": written,
    "filled": lambda self, h, m, t: (
        h.masked_fill(m[:, None], 0).masked_scatter(m[:, None].expand_as(h), h[m] * 2).sum()
    ),
}


def data(mask: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    return torch.randn(6, 8), torch.tensor([1, 0, 1, 1, 0, 0]).bool() if mask is None else mask, torch.arange(6) % 5


def step(model: nn.Module, given: tuple[torch.Tensor, ...]) -> list[torch.Tensor | None] | str:
    model.zero_grad()
    try:
        loss = model(*given)
        loss.backward()
    except (RuntimeError, IndexError) as error:
        return str(error).splitlines()[0]
    return [loss.detach(), *(p.grad for p in model.parameters())]


def assert_same(got, expected, exact: bool) -> None:
    if isinstance(expected, str) or isinstance(got, str):
        assert got == expected  # (plain PyTorch refuses as well: the largest of none)
        return
    for have, wanted in zip(got, expected, strict=True):
        assert (have is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(have, wanted, equal_nan=True, **({"rtol": 0, "atol": 0} if exact else {}))


def check(name: str, backend: str) -> None:
    torch.manual_seed(0)
    plain = Selects(LOSSES[name])
    mine = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(backend=backend))
    for mask in (None, torch.zeros(6).bool(), torch.ones(6).bool()):
        given = data(mask)
        assert_same(step(mine, given), step(plain, given), backend == "eager")
    assert len(mine.zgraph.programs) == 1  # (however many rows are selected)


@sweep("name", LOSSES, quick=6)
def test_what_a_mask_selects_is_as_in_plain_pytorch(name):
    check(name, "eager")


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["ignored", "written"])
@pytest.mark.slow
def test_what_a_mask_selects_is_so_on_inductor(name):
    check(name, "inductor")


@product("name, dim", ["cross entropy", "experts", "weight"], ["dp", "tp"], together=1)
def test_ranks_select_alike(name, dim):
    plan = zgraph.Plan(backend="eager", mesh={dim: 2})
    torch.manual_seed(0)
    mask = torch.tensor([1, 0, 1, 1, 0, 1]).bool()
    found = zgraph.verify(
        Selects(LOSSES[name]), plan, world=2, inputs=(*data(mask)[:2], torch.tensor([0, 1, 1, 0, 1, 1]))
    )
    assert found.ok, found


def test_a_region_has_a_json_form():
    mine = zgraph.compile(Selects(LOSSES["ignored"]), EAGER, inputs=data())
    program = next(iter(mine.zgraph.runtime.entries.values())).program().captured
    again = from_json(to_json(program))
    assert [n.args[1] for n in again.graph.find_nodes(op="call_function", target=ops.REGION)] == [
        n.args[1] for n in program.graph.find_nodes(op="call_function", target=ops.REGION)
    ]


class Returns(nn.Module):
    def __init__(self, what: str = "rows") -> None:
        super().__init__()
        self.line, self.what = nn.Linear(8, 5), what

    def forward(self, x, mask, target):
        h = self.line(x)
        if self.what == "number":
            return h.sum(), mask.sum().item()
        if self.what == "deviation":
            return h[mask].std()
        return h[mask], {
            "positive": h[h > 0],
            "at": torch.where(mask)[0],
            "all": torch.nonzero(mask),
            "inputs": x[mask],
        }


@sweep("backend", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)], quick=(0,))
def test_what_a_mask_selects_can_be_returned(backend):
    torch.manual_seed(0)
    plain = Returns()
    mine = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(backend=backend))
    for mask in (None, torch.zeros(6).bool(), torch.ones(6).bool()):
        found = [model(*data(mask)) for model in (mine, plain)]
        for rows, others in found:
            (rows.sin().sum() + others["positive"].pow(2).sum()).backward()
        torch.testing.assert_close(*found)
        assert found[0][0].requires_grad and not found[0][1]["at"].requires_grad
        torch.testing.assert_close(mine.line.weight.grad, plain.line.weight.grad)


@pytest.mark.parametrize("what, said", [("number", "Python number"), ("deviation", "one graph")])
def test_what_has_no_tensor_or_no_traceable_backward_is_refused(what, said):
    with pytest.raises(CaptureError, match=said) as caught:
        zgraph.compile(Returns(what), EAGER)(*data())
    assert "torch.where" in str(caught.value) or ".item()" in str(caught.value)


LINALG = {
    "inv": torch.linalg.inv,
    "solve": lambda w: torch.linalg.solve(w, torch.ones(4)),
    "cholesky": lambda w: torch.linalg.cholesky(w @ w.T),
    "eig": lambda w: torch.linalg.eig(w)[0].abs(),
    "lstsq": lambda w: torch.linalg.lstsq(w, torch.ones(4, 2)).solution,
    "cov": lambda w: torch.cov(w, aweights=torch.arange(1.0, 5.0)),
    "corrcoef": torch.corrcoef,
    "lu_factor": lambda w: torch.linalg.lu_factor(w)[0],
}


class Linalg(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.eye(4) * 2 + torch.ones(4, 4).triu() / 3)

    def forward(self):
        return self.function(self.weight).sum()


@sweep("name", LINALG, quick=4)
def test_linalg_is_as_in_plain_pytorch(name):
    plain, mine = Linalg(LINALG[name]), zgraph.compile(Linalg(LINALG[name]), EAGER)
    assert_same(step(mine, ()), step(plain, ()), exact=name not in ("cov", "corrcoef", "lstsq"))


LEAST_SQUARES = [(driver, rows) for driver in ("gels", "gelsy", "gelss", "gelsd") for rows in (2, 4)]


class LeastSquares(nn.Module):
    def __init__(self, driver: str, rows: int, batch: tuple[int, ...]) -> None:
        super().__init__()
        self.driver = driver
        self.weight = nn.Parameter(torch.randn(*batch, rows, 3, generator=torch.Generator().manual_seed(1)))

    def forward(self, target):
        return tuple(torch.linalg.lstsq(self.weight, target, driver=self.driver))


@sweep(
    "driver, rows, batch",
    [(*one, batch) for batch in ((), (2,)) for one in LEAST_SQUARES],
    quick=3,
)
def test_least_squares_are_as_in_plain_pytorch_by_each_driver(driver, rows, batch):
    plain, mine = LeastSquares(driver, rows, batch), zgraph.compile(LeastSquares(driver, rows, batch), EAGER)
    target = torch.arange(2.0 * rows).view(rows, 2).expand(*batch, rows, 2).contiguous()
    theirs, ours = plain(target), mine(target)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
    for results in (theirs, ours):
        sum(r.pow(2).sum() for r in results if r.requires_grad and r.numel()).backward()
    torch.testing.assert_close(mine.weight.grad, plain.weight.grad, rtol=1e-4, atol=1e-5)


def test_residuals_that_are_missing_are_refused_when_the_matrix_has_not_the_full_rank():
    class Residuals(LeastSquares):
        def forward(self, target):
            return super().forward(target)[1].sum()

    mine = zgraph.compile(Residuals("gelsd", 4, ()), EAGER)
    mine(torch.ones(4, 2))
    with torch.no_grad():
        mine.weight.zero_()
    with pytest.raises(StepError, match="no residuals"):
        mine(torch.ones(4, 2))


class Applies(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], *sizes: int) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.arange(1.0, 1 + math.prod(sizes)).view(sizes))

    def forward(self):
        return self.function(self.weight)


UNREACHED = {
    "count of what is not zero": lambda: Applies(lambda w: torch.linalg.vector_norm(w, ord=0, dim=1), 4, 3),
    "nothing": lambda: Applies(lambda w: torch.ormqr(w, w.new_ones(0), w.new_ones(5, 0)), 5, 0),
}


@pytest.mark.parametrize("name", UNREACHED)
def test_outputs_whose_gradients_reach_nothing_may_be_differentiated_as_in_plain_pytorch(name):
    plain, mine = UNREACHED[name](), zgraph.compile(UNREACHED[name](), EAGER)
    for model in (plain, mine):
        model().sum().backward()
    assert (mine.weight.grad is None or not mine.weight.grad.any()) and mine().requires_grad is plain().requires_grad


LABELS = {
    "one sample": [1, 0, -1, 2],
    "all": [3, 2, 1, 0],
    "twice": [2, 2, -1, -1],
    "batch": [[1, -1, 0, 2], [-1, 3, 3, 3], [0, 2, 3, 1]],
}


@product("reduction, name", ["none", "mean", "sum"], LABELS, together=1)
def test_a_loss_over_labels_counts_those_before_the_first_that_is_none(name, reduction):
    labels = torch.tensor(LABELS[name])

    def loss(w):
        return F.multilabel_margin_loss(w, labels, reduction=reduction)

    plain, mine = (Applies(loss, *labels.shape) for _ in range(2))
    mine = zgraph.compile(mine, EAGER)
    assert mine().shape == plain().shape
    for model in (plain, mine):
        model().sum().backward()
    torch.testing.assert_close(mine(), plain())
    torch.testing.assert_close(mine.weight.grad, plain.weight.grad)


class Layers(nn.Module):
    """Modules whose Python looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, momentum=None)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0), 1)
        self.ctc, self.gauss = nn.CTCLoss(), nn.GaussianNLLLoss()

    def forward(self, x, mask, variance):
        h = self.layers(self.norm(x).unsqueeze(1), mask=mask)
        labels = torch.ones(1, 2, dtype=torch.long)
        return self.ctc(h.log_softmax(-1), labels, (6,), (2,)) + self.gauss(h[:, 0], x, variance)


def test_modules_that_look_at_values_are_as_in_plain_pytorch():
    torch.manual_seed(0)
    plain = Layers()
    mine = zgraph.compile(copy.deepcopy(plain), EAGER)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    for _ in range(2):
        given = (torch.randn(6, 8), mask, torch.rand(6, 8))
        assert_same(step(mine, given), step(plain, given), exact=False)
    assert_same([*mine.buffers()], [*plain.buffers()], exact=False)
    with pytest.raises(AssertionError, match="var has negative"):
        mine(torch.randn(6, 8), mask, -torch.ones(6, 8))


class Raises(nn.Module):
    def __init__(self, caught: bool) -> None:
        super().__init__()
        self.line, self.caught = nn.Linear(8, 5), caught

    def forward(self, x):
        if not self.caught:
            if x.max() > 9:
                raise ValueError("too large")
            return self.line(x)
        try:
            if x.max() > 9:
                raise ValueError
            return self.line(x)
        except ValueError:
            return self.line(x * 0)


def test_a_raise_by_a_value_is_an_assertion_unless_somebody_catches_it():
    mine = zgraph.compile(Raises(False), EAGER)
    mine(torch.ones(2, 8)).sum().backward()
    with pytest.raises(AssertionError, match="too large"):
        mine(torch.ones(2, 8) * 10)
    with pytest.raises(CaptureError):
        zgraph.compile(Raises(True), EAGER)(torch.ones(2, 8))


def test_a_singular_matrix_raises_what_it_raises_in_plain_pytorch():
    mine = zgraph.compile(Linalg(torch.linalg.inv), EAGER)
    mine()
    with torch.no_grad():
        mine.weight.zero_()
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        mine()


class Strided(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self):
        return self.weight.as_strided((2, 2, 2, 2), (1, 1, 1, 1), 0)


def test_an_output_whose_elements_overlap_has_its_gradient():
    plain, mine = Strided(torch.randn(16)), zgraph.compile(Strided(torch.randn(16)), EAGER)
    tangent = torch.arange(16.0).view(2, 2, 2, 2)
    for model in (plain, mine):
        model().backward(tangent)
    torch.testing.assert_close(mine.weight.grad, plain.weight.grad)


def test_as_strided_of_what_begins_within_its_storage_is_refused():
    with pytest.raises(SignatureError, match="begins within its storage"):
        zgraph.compile(Strided(torch.randn(20)[4:]), EAGER)()


def test_as_strided_without_an_offset_counts_from_where_the_tensor_begins():
    class Windows(Strided):
        def forward(self):
            return self.weight.as_strided((3, 2), (1, 2)).pow(2).sum()

    plain, mine = Windows(torch.randn(20)[4:]), zgraph.compile(Windows(torch.zeros(20)[4:]), EAGER)
    mine.load_state_dict(plain.state_dict())
    assert_same(step(mine, ()), step(plain, ()), exact=True)


def test_a_sparse_parameter_is_refused():
    with pytest.raises(UnsupportedError, match="is sparse"):
        zgraph.compile(Strided(torch.eye(4).to_sparse_csr()), EAGER)


def test_an_output_whose_size_nothing_bounds_is_refused():
    class Counts(nn.Module):
        def forward(self, x, lengths):
            return x.mean(), torch.arange(sum(lengths.tolist()))

    with pytest.raises(CaptureError, match="a tensor whose size depends on values"):
        zgraph.compile(Counts(), EAGER)(torch.ones(5, 4, requires_grad=True), torch.tensor([2, 3]))
