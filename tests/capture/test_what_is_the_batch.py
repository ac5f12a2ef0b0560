"""What `train_step` would cut into micro-batches though it is no batch is refused; batches are cut as they were."""

from __future__ import annotations

import pytest
import torch
from sweeps import sweep
from torch import nn
from torch.nn import functional as F

import zgraph
from zgraph.errors import StepError


class Recurrent(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        torch.manual_seed(1)
        self.cell = nn.LSTM(4, 3, batch_first=batch_first)

    def forward(self, x):
        return self.cell(x)[0].pow(2).mean()


class Weighted(nn.Module):
    """`weights` is read in a way of the model's, beside `x`."""

    def __init__(self, read):
        super().__init__()
        torch.manual_seed(1)
        self.out, self.read = nn.Linear(4, 8), read

    def forward(self, x, labels, weights):
        return self.read(self.out(x), labels, weights)


def train(model, *inputs, micro_batches=2, backend="eager"):
    zgraph.compile(model, zgraph.Plan(backend=backend, micro_batches=micro_batches))
    model.train_step(*inputs)
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_sequence_that_comes_first_is_not_cut(backend):
    with pytest.raises(StepError, match="is no batch: forward takes its elements"):
        train(Recurrent(False), torch.randn(4, 2, 4), backend=backend)


def test_a_batch_that_comes_first_is_cut():
    x, plain = torch.randn(4, 3, 4), Recurrent(True)
    plain(x).backward()
    torch.testing.assert_close(train(Recurrent(True), x), [p.grad for p in plain.parameters()])


NO_BATCH = {
    "apart": lambda h, y, w: h.pow(2).mean() * w.mean() + w[0] * h.mean(),
    "features": lambda h, y, w: (h * w).pow(2).mean(),
    "classes": lambda h, y, w: F.cross_entropy(h * w.exp(), y),
}
BATCH = {
    "rows": lambda h, y, w: (F.cross_entropy(h, y, reduction="none") * w).mean(),
    "columns": lambda h, y, w: (h * w[:, None]).pow(2).mean(),
    "masked": lambda h, y, w: torch.where(w.view(-1, 1) > 0, h, 0.0).pow(2).mean(),
}


@sweep("kind", NO_BATCH, quick=2)
def test_what_has_the_batchs_size_by_coincidence_is_not_cut(kind):
    with pytest.raises((StepError, zgraph.errors.ZgraphError)):
        train(Weighted(NO_BATCH[kind]), torch.randn(8, 4), torch.arange(8), torch.arange(8.0))


@pytest.mark.parametrize("kind", BATCH)
def test_what_belongs_to_the_batch_is_cut(kind):
    inputs, plain = (torch.randn(8, 4), torch.arange(8), torch.arange(8.0)), Weighted(BATCH[kind])
    plain(*inputs).backward()
    torch.testing.assert_close(train(Weighted(BATCH[kind]), *inputs), [p.grad for p in plain.parameters()])


WITHOUT_A_RULE = {
    "average pool": nn.AvgPool2d(2),
    "adaptive pool": nn.AdaptiveAvgPool2d((2, 2)),
    "largest of a window": nn.MaxPool2d(2),
    "upsampling": nn.Upsample(scale_factor=2),
    "reflections": nn.ReflectionPad2d(1),
    "frequencies": lambda x: torch.fft.rfft(x).abs(),
}


class Pictures(nn.Module):
    """Labels beside rows that have gone through an operator whose axes are not known."""

    def __init__(self, middle):
        super().__init__()
        torch.manual_seed(1)
        self.conv, self.middle = nn.Conv2d(1, 2, 3, padding=1), middle
        with torch.no_grad():
            size = middle(self.conv(torch.zeros(1, 1, 4, 4))).numel()
        self.head = nn.Linear(size, 5)

    def forward(self, x, y):
        return F.cross_entropy(self.head(self.middle(self.conv(x)).flatten(1)), y)


@sweep("kind", WITHOUT_A_RULE, quick=2)
def test_labels_of_rows_that_went_through_what_is_not_known_are_cut(kind):
    inputs = torch.randn(8, 1, 4, 4), torch.arange(8) % 5
    plain = Pictures(WITHOUT_A_RULE[kind])
    plain(*inputs).backward()
    torch.testing.assert_close(train(Pictures(WITHOUT_A_RULE[kind]), *inputs), [p.grad for p in plain.parameters()])


class Attends(nn.Module):
    """Self-attention of torch's modules or by hand, or a window, over a sequence that comes first or second."""

    def __init__(self, kind, first):
        super().__init__()
        torch.manual_seed(1)
        self.kind, self.first, self.out = kind, first, nn.Linear(8, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=not first)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=not first)
        self.window, self.table = nn.Conv1d(8, 8, 3, padding=1), nn.Embedding(16, 8)
        self.register_buffer("sines", torch.randn(16, 1, 8))

    def forward(self, x):
        x = self.out(x)
        t = 0 if self.first else 1  # the dimension of the sequence
        if self.kind == "module":
            h = self.attend(x, x, x, need_weights=False)[0]
        elif self.kind == "weights":
            h = self.attend(x, x, x)[0]
        elif self.kind == "layer":
            h = self.layer(x)
        elif self.kind == "hand":
            y = x.transpose(0, 1) if self.first else x
            h = torch.softmax(y @ y.transpose(1, 2) / 3, -1) @ y
        elif self.kind == "window":
            h = self.window(x.permute(1, 2, 0) if self.first else x.transpose(1, 2))
        elif self.kind == "pool":
            h = F.max_pool1d(x.permute(1, 2, 0) if self.first else x.transpose(1, 2), 2)
        elif self.kind == "buffer":
            h = x + (self.sines[: x.shape[0]] if self.first else self.sines.transpose(0, 1)[:, : x.shape[1]])
        elif self.kind == "table":
            h = self.table(torch.arange(x.shape[t]))
            h = x + (h[:, None] if self.first else h)
        elif self.kind == "shift":
            h = x.narrow(t, 1, x.shape[t] - 1) - x.narrow(t, 0, x.shape[t] - 1)
        return h.pow(2).mean()


KINDS = ("module", "weights", "layer", "hand", "window", "pool", "buffer", "table", "shift")


@sweep("kind", KINDS, quick=4)
def test_a_sequence_that_comes_first_is_seen_by_what_is_done_with_it(kind):
    with pytest.raises(StepError, match="is no batch") as caught:
        train(Attends(kind, first=True), torch.randn(8, 4, 8))
    assert "micro_batches=1" in str(caught.value) and __file__.rpartition("/")[2] in str(caught.value.where)


def in_stages():
    model = zgraph.compile(Attends("layer", first=True), zgraph.Plan(backend="eager", mesh={"pp": 2}, micro_batches=2))
    try:
        model.train_step(torch.randn(8, 4, 8, generator=torch.Generator().manual_seed(0)))
    except StepError as error:
        return str(error)
    return "not refused"


@pytest.mark.gloo
def test_a_pipeline_sees_it_on_all_ranks(two):
    assert all("dimension 0 of input[0] is no batch" in said for said in two.run(in_stages))


@sweep("kind", KINDS, quick=4)
def test_the_same_with_the_batch_first_is_cut(kind):
    x, plain = torch.randn(8, 4, 8), Attends(kind, first=False)
    plain(x).backward()
    for mine, its in zip(train(Attends(kind, first=False), x), plain.parameters(), strict=True):
        assert (mine is None) == (its.grad is None)
        if mine is not None:
            torch.testing.assert_close(mine, its.grad)


class Nearest(nn.Module):
    """Rows beside anchors, whose number differs from call to call, and is that of the rows by chance."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, anchors):
        return (self.second(self.first(x)) @ anchors.T).logsumexp(-1).mean()


def beside_anchors(mesh):
    """(the losses of steps and plain PyTorch's, the number of programs)."""
    plan = zgraph.Plan(backend="eager", mesh=mesh, micro_batches=2, optimizer=zgraph.SGD(lr=0.1))
    plain, model = Nearest(), zgraph.compile(Nearest(), plan)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    draw, losses = torch.Generator().manual_seed(0), []
    for rows, anchors in ((4, 5), (6, 7), (8, 8), (4, 1), (4, 4)):
        inputs = torch.randn(rows, 4, generator=draw), torch.randn(anchors, 4, generator=draw)
        loss = plain(*inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mine = model.train_step(*inputs) if anchors != 7 else model.train_step(inputs[0], anchors=inputs[1])
        losses.append((float(mine.detach()), float(loss.detach())))
    return losses, len(model.zgraph.programs)


def test_what_had_another_size_than_the_batch_is_not_cut_where_it_has_the_same():
    losses, programs = beside_anchors({"dp": 1})
    assert all(mine == pytest.approx(its, rel=1e-6) for mine, its in losses)
    assert programs <= 4  # (by place and by name; one of a single anchor)


@pytest.mark.parametrize("rows", [8, 16])
def test_what_has_the_rows_of_a_micro_batch_by_chance_is_not_cut(rows):
    inputs = torch.randn(8, 4), torch.randn(4, 4)  # (as many anchors as a micro-batch of the first step has rows)
    plain, model = Nearest(), Nearest()
    plain(*inputs).backward()
    for mine, its in zip(train(model, *inputs), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, its.grad)
    model.zero_grad()
    plain.zero_grad()
    inputs = torch.randn(rows, 4), torch.randn(8, 4)
    plain(*inputs).backward()
    model.train_step(*inputs)
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)


def test_what_a_loss_function_gets_whole_is_not_refused_for_its_rows():
    weights = torch.rand(4)
    inputs = torch.randn(8, 4), torch.randint(4, (8,))

    def loss_fn(output, labels, weights):
        return F.cross_entropy(output, labels, weight=weights, reduction="sum") / 8

    plain, model = nn.Linear(4, 4), nn.Linear(4, 4)
    model.load_state_dict(plain.state_dict())
    loss_fn(plain(inputs[0]), inputs[1], weights).backward()
    zgraph.compile(model, zgraph.Plan(backend="eager", micro_batches=2), loss_fn=loss_fn)
    model.train_step(*inputs, weights)
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(2 * mine.grad, its.grad)  # (the mean of both micro-batches)


class Scaled(nn.Module):
    """Two features, each with a scale; or two rows, each with a weight; beside an offset of one row for all."""

    def __init__(self, of_rows):
        super().__init__()
        torch.manual_seed(1)
        self.out, self.of_rows = nn.Linear(4, 2), of_rows

    def forward(self, x, scales, offset):
        h = self.out(x) + offset
        return (h.sum(-1) * scales).square().mean() if self.of_rows else (h * scales).square().mean()


def test_what_is_no_batch_is_found_in_micro_batches_of_one_row_as_well():
    inputs, plain = (torch.randn(2, 4), torch.rand(2), torch.randn(1, 2)), Scaled(True)
    plain(*inputs).backward()
    grads = train(Scaled(True), *inputs)
    torch.testing.assert_close(grads, [p.grad for p in plain.parameters()])
    with pytest.raises(StepError, match="size of the batch, and forward never reads"):
        train(Scaled(False), *inputs)
    with pytest.raises(StepError, match="is no batch: forward takes its elements"):
        train(Recurrent(False), torch.randn(2, 3, 4))


class Sums(nn.Module):
    """Rows beside as many features."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 4)

    def forward(self, x, features):
        return (self.out(x) + features).square().mean()


def test_what_is_given_whole_is_told_with_an_error_of_a_part_and_a_step_that_fails_shows_nothing():
    model = zgraph.compile(Sums(), zgraph.Plan(backend="eager", micro_batches=2, optimizer=zgraph.SGD(lr=0.1)))
    model.train_step(torch.randn(4, 4), torch.randn(4, 4))
    with pytest.raises(zgraph.errors.ZgraphError) as caught:
        model.train_step(torch.randn(4, 4), features=torch.randn(3, 4))
    assert "each was given whole: features [3, 4]" in caught.value.__notes__[0]
    model.train_step(torch.randn(6, 4), features=torch.randn(6, 4))


@pytest.mark.gloo
def test_a_pipeline_does_not_cut_it_either(two):
    for losses, _ in two.run(beside_anchors, {"pp": 2}):
        assert all(mine == pytest.approx(its, rel=1e-6) for mine, its in losses)


class Pairs(nn.Module):
    """Rows in two halves that belong together."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 4)

    def forward(self, x):
        one, other = self.out(x).chunk(2)
        return (one - other).pow(2).mean()


def test_halves_of_a_batch_are_not_parted():
    with pytest.raises(StepError, match="takes rows by their places"):
        train(Pairs(), torch.randn(8, 4))


class Ordinary(nn.Module):
    """What models do with batches: types of zeros, places of the second dimension, a contrast of all rows, masks, expanded states."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.words, self.types, self.places = nn.Embedding(16, 8), nn.Embedding(2, 8), nn.Embedding(16, 8)
        self.start = nn.Parameter(torch.randn(1, 1, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.register_buffer("ids", torch.arange(16).expand(1, -1))

    def forward(self, words):
        rows, length = words.shape
        h = self.words(words) + self.types(torch.zeros_like(words))
        h = h + self.places(self.ids[:, :length].expand(rows, length)) + self.places(torch.arange(length))
        h = torch.cat([self.start.expand(rows, 1, 8), h], 1)
        mask = torch.ones(length + 1, length + 1, dtype=torch.bool).tril().logical_not()
        h = self.layer(h, src_mask=mask)
        h = h[torch.arange(rows), (words > 0).sum(1)] + h[:, 0] + h[:, 1:].mean(1)
        own = F.log_softmax(h @ h.t().detach(), -1)[torch.arange(rows), torch.arange(rows)]
        return own.mean() + F.cross_entropy(h, words[:, 0] % 8)


def test_ordinary_models_are_cut():
    words = torch.randint(0, 16, (8, 5), generator=torch.Generator().manual_seed(0))
    assert all(g is not None and g.isfinite().all() for g in train(Ordinary(), words))
