"""Ranks of one step may have batches of different sizes: one program serves them, and gradients are those of plain PyTorch."""

from __future__ import annotations

import copy
import logging
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sized_models import Branches
from sweeps import sweep
from torch import nn
from torch.nn.functional import cross_entropy

import zgraph
from zgraph.errors import RankMismatchError, SignatureError

pytestmark = pytest.mark.gloo
WORDS = 31


class Attention(nn.Module):
    """One block with what lengths reach: positions, a mask made of them, attention over them."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, dim), nn.Embedding(64, dim)
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.head = nn.Linear(dim, WORDS)

    def forward(self, words, targets):
        rows, length = words.shape
        hidden = self.embed(words) + self.places.weight[:length]
        q, k, v = self.qkv(self.norm(hidden)).chunk(3, -1)
        q, k, v = (x.view(rows, length, 2, -1).transpose(1, 2) for x in (q, k, v))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.out(seen.transpose(1, 2).reshape(rows, length, -1))
        return cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten(), ignore_index=-100)


class Sentences(nn.Module):
    """A table of positions and layers that any rank may divide: what is refused, and who is told, needs no more."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, 8), nn.Embedding(64, 8)
        self.up, self.head = nn.Linear(8, 16), nn.Linear(16, WORDS)

    def forward(self, words, targets):
        hidden = self.embed(words) + self.places.weight[: words.shape[1]]
        logits = self.head(nn.functional.gelu(self.up(hidden)))
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def batch(rows: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1000 * seed + 10 * rows + length)
    words = torch.randint(0, WORDS, (rows, length), generator=draw)
    targets = torch.randint(0, WORDS, (rows, length), generator=draw)
    targets[:, 0] = -100
    return {"words": words, "targets": targets}


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


STEPS = [((3, 12), (3, 12)), ((3, 9), (3, 20)), ((2, 31), (4, 5)), ((5, 2), (2, 64)), ((2, 40), (6, 40))]
UNEVEN = [((1, 9), (3, 20)), ((3, 12), (1, 31)), ((2, 1), (6, 40)), ((1, 5), (1, 7))]


def gradients(
    zero: int, backend: str, steps: Any = STEPS, model: type[nn.Module] = Attention, shapes: Any = "auto"
) -> tuple[float, list[str]]:
    """(the largest relative difference to plain PyTorch's, the programs) after steps in which each rank has other sizes."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    plain = model()
    mine = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(zero=zero, backend=backend, shapes=shapes))
    worst = 0.0
    for number, sizes in enumerate(steps):
        mine(**batch(*sizes[dist.get_rank()], number)).backward()
        for at in sizes:
            (plain(**batch(*at, number)) / len(sizes)).backward()
        for one, other in zip(mine.parameters(), plain.parameters(), strict=True):
            worst = max(worst, float((whole(one.grad) - other.grad).norm() / other.grad.norm()))
        mine.zero_grad()
        plain.zero_grad()
    return worst, list(mine.zgraph.programs)


@sweep("zero", [0, 2, 1, 3], quick={3})
def test_ranks_with_different_lengths_share_one_program(two, zero):
    for worst, programs in two.run(gradients, zero, "eager"):
        assert worst < 2e-6
        assert programs == ["train0", "train1"]


def trained(tokens: bool, micro: int, zero: int, steps: Any) -> tuple[float, int]:
    """The largest difference of a weight to plain PyTorch's after steps with an optimizer, and the number of programs."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    plain = Sentences()
    plan = zgraph.Plan(
        zero=zero,
        backend="eager",
        optimizer=zgraph.SGD(lr=0.1),
        loss_average="token" if tokens else "batch",
        micro_batches=micro,
    )
    model = zgraph.compile(copy.deepcopy(plain), plan)
    for number, sizes in enumerate(steps):
        sizes = [(rows * micro, length) for rows, length in sizes]
        model.train_step(**batch(*sizes[dist.get_rank()], number))
        calls = [batch(*at, number) for at in sizes]
        counts = [(c["targets"] != -100).sum() for c in calls]
        for call, count in zip(calls, counts, strict=True):
            (plain(**call) * (count / sum(counts) if tokens else 1 / len(calls))).backward()
        with torch.no_grad():
            for p in plain.parameters():
                p -= 0.1 * p.grad
        plain.zero_grad()
    differences = [
        float((whole(a) - b).abs().max()) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    ]
    return max(differences), len(model.zgraph.programs)


@pytest.mark.parametrize(
    "tokens, micro, zero, steps",
    [
        (True, 1, 3, STEPS),
        (False, 1, 3, STEPS),
        (True, 2, 3, STEPS),
        (False, 2, 3, UNEVEN[:2]),
        (True, 2, 1, UNEVEN[:2]),
    ],
)
@pytest.mark.slow
def test_steps_with_an_optimizer_are_those_of_plain_pytorch(two, tokens, micro, zero, steps):
    for worst, programs in two.run(trained, tokens, micro, zero, steps):
        assert worst < 1e-6
        assert programs == 2


def uneven_parts() -> tuple[float, int]:
    """(the largest difference of a weight to plain PyTorch's, the programs) where ranks have rows that micro-batches do not divide."""
    torch.manual_seed(0)
    plain = Sentences()
    optimizer = zgraph.SGD(lr=0.1)
    plan = zgraph.Plan(zero=3, backend="eager", optimizer=optimizer, loss_average="token", micro_batches=4)
    model = zgraph.compile(copy.deepcopy(plain), plan)
    for number, sizes in enumerate([((8, 7), (9, 6)), ((9, 5), (16, 9)), ((13, 4), (10, 20))]):
        model.train_step(**batch(*sizes[dist.get_rank()], number))
        calls = [batch(*at, number) for at in sizes]
        counts = [(c["targets"] != -100).sum() for c in calls]
        for call, count in zip(calls, counts, strict=True):
            (plain(**call) * count / sum(counts)).backward()
        with torch.no_grad():
            for p in plain.parameters():
                p -= 0.1 * p.grad
        plain.zero_grad()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(float((whole(a) - b).abs().max()) for a, b in pairs), len(model.zgraph.programs)


def test_ranks_whose_rows_micro_batches_do_not_divide_have_as_many_of_them(two):
    for worst, programs in two.run(uneven_parts):
        assert worst < 1e-6 and programs <= 2


def first_call_differs() -> list[str]:
    model = zgraph.compile(Sentences(), zgraph.Plan(zero=3, backend="eager"))
    model(**batch(3, 7 + 4 * dist.get_rank(), 0)).backward()
    return list(model.zgraph.programs)


def test_ranks_whose_first_calls_differ_need_one_program(two):
    assert two.run(first_call_differs) == [["train0"], ["train0"]]


@sweep("model", [Attention, Sentences], quick=1)
@pytest.mark.slow
def test_a_single_row_or_word_beside_several(two, model):
    for worst, programs in two.run(gradients, 3, "eager", UNEVEN, model):
        assert worst < 2e-6
        assert len(programs) == 3  # (a row, rows, and rows of a word)


class FirstToken(nn.Module):
    """A token before each row: to give it to one row is nothing, so that other weights lie between two reads of the head."""

    def __init__(self):
        super().__init__()
        self.embed, self.first = nn.Embedding(WORDS, 8), nn.Parameter(torch.randn(8))
        self.head = nn.Linear(8, WORDS)

    def forward(self, words, targets):
        hidden = self.embed(words)
        hidden = torch.cat([self.first.expand(hidden.shape[0], 1, -1), hidden], 1)
        hidden = nn.functional.scaled_dot_product_attention(hidden, hidden, hidden)[:, 1:]
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def test_what_one_program_gathers_again_is_gathered_again_beside_it(two):
    for worst, programs in two.run(gradients, 3, "eager", UNEVEN[:2], FirstToken):
        assert worst < 2e-6
        assert len(programs) == 2


@pytest.mark.slow  # (stage 3: above; stage 1: steps with an optimizer)
@pytest.mark.parametrize(("zero", "backend"), [(0, "eager"), (1, "eager"), (2, "eager"), (3, "inductor")])
def test_single_rows_at_each_zero_stage(two, zero, backend):
    for worst, programs in two.run(gradients, zero, backend, UNEVEN[:2]):
        assert worst < 2e-6
        assert len(programs) == 2


class Normed(Sentences):
    """Normalises each row by itself: of a single row, the gradient of the norm's weight is ready before its bias's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(8, affine=True, track_running_stats=True)

    def forward(self, words, targets):
        hidden = self.norm((self.embed(words) + self.places.weight[: words.shape[1]]).transpose(1, 2))
        return cross_entropy(self.head(self.up(hidden.transpose(1, 2))).transpose(1, 2), targets, ignore_index=-100)


@pytest.mark.slow
def test_a_single_row_whose_gradients_of_one_layer_are_ready_in_another_order(two):
    for worst, programs in two.run(gradients, 3, "eager", UNEVEN[:2], Normed):
        assert worst < 2e-6
        assert len(programs) == 2


def without_rows() -> tuple[float, list[str]]:
    """The largest difference of a gradient to plain PyTorch's after steps in which a rank has no rows, or no words."""
    torch.manual_seed(0)
    plain = nn.Linear(4, 4)
    mine = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(zero=3, backend="eager"))
    worst = 0.0
    for shapes in [((3, 0, 4), (3, 5, 4)), ((2, 4, 4), (0, 5, 4)), ((3, 7, 4), (2, 0, 4))]:
        mine(torch.ones(shapes[dist.get_rank()])).square().sum().backward()
        for shape in shapes:
            (plain(torch.ones(shape)).square().sum() / len(shapes)).backward()
        for one, other in zip(mine.parameters(), plain.parameters(), strict=True):
            worst = max(worst, float((whole(one.grad) - other.grad).norm() / other.grad.norm()))
        mine.zero_grad()
        plain.zero_grad()
    return worst, list(mine.zgraph.programs)


def test_a_rank_without_rows_or_words_beside_one_with_several(two):
    (worst, first), (other, second) = two.run(without_rows)
    assert max(worst, other) < 2e-6 and first == second and len(first) <= 4


class Averages(nn.Module):
    """Sums so many terms for a long batch that Inductor adds them up in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x):
        return self.mix(x).square().mean(1).sin().mean()


def long_on_one_rank() -> tuple[float, list[str], int]:
    """(the largest relative difference of a gradient to plain PyTorch's, the programs, how often one was compiled anew here)."""
    warnings.filterwarnings("ignore")
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("zgraph")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    torch.manual_seed(0)
    plain = Averages()
    sizes = {"x": {0: zgraph.Size("batch", typical=2), 1: zgraph.Size("seq", typical=6)}}
    mine = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(zero=3, backend="inductor", dynamic=sizes))
    worst = 0.0
    for lengths in ((6, 7), (6, 9000), (9, 5)):
        batches = [torch.randn(2, n, 8, generator=torch.Generator().manual_seed(n)) for n in lengths]
        mine(batches[dist.get_rank()]).backward()
        for one in batches:
            (plain(one) / 2).backward()
        for one, other in zip(mine.parameters(), plain.parameters(), strict=True):
            worst = max(worst, float((whole(one.grad) - other.grad).norm() / other.grad.norm()))
        mine.zero_grad()
        plain.zero_grad()
    logger.removeHandler(handler)
    logger.setLevel(before)
    return worst, list(mine.zgraph.programs), sum("compiled once more" in text for text in told)


@pytest.mark.inductor
@pytest.mark.slow
def test_what_inductor_asks_is_answered_on_one_rank_alone(two):
    short, long = two.run(long_on_one_rank)
    assert max(short[0], long[0]) < 1e-5 and short[1] == long[1] == ["train0"]
    assert short[2] == 0 and long[2] >= 1


class Branching(Sentences):
    """Its last layer is used before the first one where there is a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)

    def forward(self, words, targets):
        gate = self.before(self.embed(words)).mean() if words.shape[0] == 1 else 0.0
        loss = super().forward(words, targets)
        return loss + (gate if words.shape[0] == 1 else self.before(self.embed(words)).mean())


def a_single_row_is_computed_otherwise() -> list[str]:
    model = zgraph.compile(Branching(), zgraph.Plan(zero=3, backend="eager"))
    model(**batch(2, 7, 0)).backward()
    with pytest.raises(RankMismatchError, match="communicate in different ways"):
        model(**batch(1 + dist.get_rank(), 7, 0))
    for rows in (1, 3):
        model(**batch(rows, 7 + dist.get_rank(), 0)).backward()
    return list(model.zgraph.programs)


@pytest.mark.slow
def test_programs_that_communicate_otherwise_are_refused_beside_each_other(two):
    first, second = two.run(a_single_row_is_computed_otherwise)
    assert first == second  # (the call that was refused has taught all ranks the same)


def static_shapes() -> None:
    model = zgraph.compile(Sentences(), zgraph.Plan(zero=3, backend="eager", shapes="static"))
    model(**batch(3, 7 + 4 * dist.get_rank(), 0)).backward()


def test_static_shapes_have_to_be_equal(two):
    for outcome in two.attempt(static_shapes, keep=True):
        assert isinstance(outcome.error, RankMismatchError)
        assert "int64[3, 7]" in str(outcome.error)


def cut_to_the_longest_row() -> float:
    """How far a loss is from plain PyTorch's after a call in which ranks have other sizes of inputs that are not contiguous."""
    torch.manual_seed(0)
    plain = Sentences()
    model = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(zero=3, backend="eager"))
    cut = {name: x[:, : 7 + dist.get_rank()] for name, x in batch(3, 12, 0).items()}
    with pytest.raises(RankMismatchError, match=r"not contiguous \(with strides above: .*x\.contiguous\(\)"):
        model(**cut)
    return float((model(**{name: x.contiguous() for name, x in cut.items()}) - plain(**cut)).abs())


@pytest.mark.slow
def test_inputs_that_are_not_contiguous_are_told_where_ranks_have_other_sizes_of_them(two):
    assert max(two.run(cut_to_the_longest_row)) < 1e-6


def beyond_what_is_declared(steps: bool) -> tuple[str, float]:
    """(the type of what this rank is told where one has more rows than the plan says, how far a later step is from plain PyTorch's)."""
    sizes = {0: zgraph.Size("rows", max=4), 1: "length"}
    optimizer = {"optimizer": zgraph.SGD(lr=0.1)} if steps else {}
    torch.manual_seed(0)
    plain = Sentences()
    plan = zgraph.Plan(
        zero=3, backend="eager", dynamic={"words": sizes, "targets": {0: "rows", 1: "length"}}, **optimizer
    )
    model = zgraph.compile(copy.deepcopy(plain), plan)
    run = model.train_step if steps else model
    with pytest.raises((SignatureError, RankMismatchError)) as found:
        run(**batch(3 + 2 * dist.get_rank(), 7, 0))
    assert "size 'rows' is 5 in this call, and declared to be 4 at most" in str(found.value)
    loss = run(**batch(2 + dist.get_rank(), 9, 0))
    ours = float(plain(**batch(2 + dist.get_rank(), 9, 0)))
    return type(found.value).__name__, abs(float(loss) - ours)


@sweep("steps", [False, True], ids=["a call", "a step"], quick=1)
def test_a_size_beyond_the_declared_maximum_on_one_rank_is_told_on_all(two, steps):
    (first, apart), (second, other) = two.run(beyond_what_is_declared, steps)
    assert (first, second) == ("RankMismatchError", "SignatureError")
    assert max(apart, other) < 1e-6


def too_long_on_one_rank() -> None:
    model = zgraph.compile(Sentences(), zgraph.Plan(zero=3, backend="eager"))
    model(**batch(3, 7, 0)).backward()
    model(**batch(3, 9, 0)).backward()
    model(**batch(3, 9 + 60 * dist.get_rank(), 0)).backward()


@pytest.mark.slow
def test_a_length_beyond_the_table_of_positions_is_refused_on_all_ranks(two):
    errors = [outcome.error for outcome in two.attempt(too_long_on_one_rank, keep=True)]
    assert all(isinstance(e, SignatureError) for e in errors), errors
    assert "64" in str(errors[0])


def branches() -> list[str]:
    model = zgraph.compile(Branches(), zgraph.Plan(zero=3, backend="eager"))
    for lengths in ((4, 6), (20, 30), (9, 3)):
        model(torch.ones(3, lengths[dist.get_rank()], 6)).backward()
    made = list(model.zgraph.programs)
    with pytest.raises(RankMismatchError):
        model(torch.ones(3, (4, 20)[dist.get_rank()], 6)).backward()
    return made


@pytest.mark.slow
def test_ranks_on_two_sides_of_a_branch_that_use_other_layers_are_refused(two):
    assert two.run(branches) == [["train0", "train1"]] * 2


class Thrice(nn.Module):
    """Computes otherwise for long rows, and again for very long ones, with the same layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        hidden = self.down(self.up(x).tanh())
        hidden = hidden * 2 + 1 if x.shape[1] > 8 else hidden
        return (hidden.relu() if x.shape[1] > 20 else hidden).square().mean()


def thrice(zero: int, micro: int) -> tuple[float, int]:
    """The largest difference of a weight to plain PyTorch's after steps on several sides, and the number of programs."""
    torch.manual_seed(0)
    plain = Thrice()
    plan = zgraph.Plan(zero=zero, backend="eager", optimizer=zgraph.SGD(lr=0.1), micro_batches=micro)
    mine = zgraph.compile(copy.deepcopy(plain), plan)
    for step, lengths in enumerate(((4, 6), (4, 12), (30, 5), (12, 25), (3, 40), (12, 12), (1, 30))):
        draws = [torch.Generator().manual_seed(100 * step + rank) for rank in range(2)]
        calls = [torch.randn(2 * micro, n, 6, generator=draw) for n, draw in zip(lengths, draws, strict=True)]
        mine.train_step(calls[dist.get_rank()])
        for call in calls:
            (plain(call) / 2).backward()
        with torch.no_grad():
            for p in plain.parameters():
                p -= 0.1 * p.grad
        plain.zero_grad()
    pairs = zip(mine.parameters(), plain.parameters(), strict=True)
    return max(float((whole(a) - b).abs().max()) for a, b in pairs), len(mine.zgraph.programs)


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "micro"), [(0, 1), (1, 2), (2, 1), (3, 2)])
def test_steps_of_ranks_on_several_sides(two, zero, micro):
    for worst, programs in two.run(thrice, zero, micro):
        assert worst < 1e-6 and programs == 4  # (a side each, and a length of 1)


class Shifted(Sentences):
    """Foretells each word from those before it: of two words one is foretold, and a size of 1 is a number."""

    def forward(self, words, targets):
        logits = self.head(nn.functional.gelu(self.up(self.embed(words))))[:, :-1]
        return cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten()) + self.places.weight.sum()


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
def test_a_length_of_two_beside_longer_ones_where_the_last_word_is_left_out(two, zero):
    steps = [((3, 12), (3, 12)), ((3, 9), (3, 20)), ((3, 2), (4, 7)), ((2, 30), (3, 2)), ((5, 2), (2, 2))]
    for worst, programs in two.run(gradients, zero, "eager", steps, Shifted):
        assert worst < 2e-6
        assert len(programs) <= 4


class Longest(nn.Module):
    """Pads two documents to the longer one: its code has a branch for each."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, documents):
        rows = nn.utils.rnn.pad_sequence(documents, batch_first=True)
        return (self.mix(rows).tanh().sum(1) ** 2).mean()


LONGEST = [((3, 5), (2, 9)), ((4, 7), (7, 4)), ((9, 2), (3, 8)), ((6, 3), (5, 4)), ((4, 9), (8, 7)), ((3, 4), (2, 5))]


def longest(zero: int) -> tuple[float, list[str]]:
    torch.manual_seed(0)
    plain = Longest()
    mine = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(zero=zero, backend="eager"))
    worst = 0.0
    for lengths in LONGEST:
        calls = [[torch.randn(n, 8, generator=torch.Generator().manual_seed(n)) for n in one] for one in lengths]
        mine(calls[dist.get_rank()]).backward()
        for call in calls:
            (plain(call) / len(calls)).backward()
        for one, other in zip(mine.parameters(), plain.parameters(), strict=True):
            worst = max(worst, float((whole(one.grad) - other.grad).norm() / other.grad.norm()))
        mine.zero_grad()
        plain.zero_grad()
    return worst, list(mine.zgraph.programs)


def test_ranks_on_two_sides_of_a_branch_run_two_programs(two):
    (worst, first), (other, second) = two.run(longest, 3)
    assert max(worst, other) < 2e-6 and first == second and len(first) == 2
