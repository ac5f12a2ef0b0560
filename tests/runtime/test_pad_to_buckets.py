"""Batches are padded to few sizes inside of a call: losses, outputs and gradients are those of plain PyTorch on the batch as it is."""

from __future__ import annotations

import copy
import logging
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sweeps import sweep
from test_lengths import _model, difference
from torch import nn
from torch.nn.functional import cross_entropy

import zgraph
from zgraph.errors import CaptureError, PlanError, RankMismatchError, SignatureError, UnsupportedError, ZgraphError

warnings.filterwarnings("ignore")
WORDS = 31
PAD = {"words": 0, "mask": 0, "targets": -100}


class Reader(nn.Module):
    """Attention over what the mask shows; as wide as the largest bucket."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(WORDS, dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, WORDS)

    def forward(self, words, mask=None, targets=None):
        hidden = self.embed(words)
        q, k, v = self.qkv(hidden).unsqueeze(1).chunk(3, -1)
        shown = None if mask is None else mask[:, None, None, :] > 0
        hidden = hidden + nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=shown).squeeze(1)
        logits = self.head(hidden)
        first = hidden[:, 0]  # of shape [rows, 16], as the padded words have in the largest bucket
        if targets is None:
            return {"logits": logits, "first": first}
        return {"loss": cross_entropy(logits.flatten(0, 1), targets.flatten()), "logits": logits, "first": first}


def batch(rows: int, length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1000 * seed + 100 * rows + length)
    words = torch.randint(1, WORDS, (rows, length), generator=draw)
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[-1, (length + 1) // 2 :] = 0
    targets = torch.randint(0, WORDS, (rows, length), generator=draw).masked_fill(mask == 0, -100)
    return {"words": words, "mask": mask, "targets": targets}


def compiled(plain: nn.Module, pad: Any = PAD, buckets: Any = (8, 16), **fields: Any) -> nn.Module:
    plan = {"mesh": {"dp": -1}, "backend": "eager", "shapes": {"buckets": buckets, "pad": pad}, **fields}
    return zgraph.compile(copy.deepcopy(plain), zgraph.Plan(**plan))


def pair(**given: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Reader()
    return compiled(plain, **given), plain


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def apart(mine: nn.Module, plain: nn.Module) -> float:
    """The largest difference of a gradient, over its norm and a little of all together."""
    grads = [
        (whole(a.grad), b.grad)
        for a, b in zip(mine.parameters(), plain.parameters(), strict=True)
        if b.grad is not None
    ]
    every = float(torch.stack([b.norm() for _, b in grads]).norm())
    return max(float((a - b).norm()) / (float(b.norm()) + 0.03 * every) for a, b in grads)


@pytest.mark.core
@sweep("backend", [pytest.param("inductor", marks=pytest.mark.inductor), "eager"], quick=1)
def test_lengths_are_padded_to_few_programs(backend):
    mine, plain = pair(backend=backend)
    for length in (5, 8, 12, 16, 3, 9, 7):
        call = batch(3, length)
        for model in (mine, plain):
            model.zero_grad()
        found, known = mine(**call), plain(**call)
        for name in known:
            assert found[name].shape == known[name].shape
            assert torch.allclose(found[name], known[name], atol=1e-6), (name, length)
        for out in (found, known):  # (gradients come in through the loss, and through what is cut)
            (out["loss"] + out["logits"].square().mean() + out["first"].sin().sum()).backward()
        assert apart(mine, plain) < 2e-6
    assert list(mine.zgraph.programs) == [
        "train0",
        "train0.2",
        "train1",
        "train1.2",
    ]  # (by the loss alone, and by all outputs)


@pytest.mark.slow
def test_rows_that_differ_are_no_program_of_their_own():
    mine, plain = pair(buckets=(8,), dynamic={name: {0: "rows"} for name in PAD})
    for rows, length in ((3, 5), (5, 8), (2, 7)):
        call = batch(rows, length)
        found, known = mine(**call), plain(**call)
        assert found["logits"].shape == (rows, length, WORDS)
        for model, out in ((mine, found), (plain, known)):
            model.zero_grad()
            out["loss"].backward()
        assert apart(mine, plain) < 2e-6
    assert len(mine.zgraph.programs) == 1


@pytest.mark.slow  # (rows that differ: above)
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_models_of_transformers(name):
    plain = _model(name, layers=1)
    rows = {"input_ids": {0: "rows"}, "attention_mask": {0: "rows"}, "labels": {0: "rows"}}
    mine = compiled(plain, {"input_ids": 0, "attention_mask": 0, "labels": -100}, (8, 32), dynamic=rows)
    for at in ((3, 7), (2, 31), (5, 4), (3, 32)):
        call = dict(zip(("input_ids", "attention_mask", "labels"), batch(*at).values(), strict=True))
        assert difference(mine, plain, call) < 2e-6
        assert mine(**call).logits.shape == (*at, 97)
    assert len(mine.zgraph.programs) == 2


class Answers(Reader):
    """Has words and targets of two lengths: each target is told of itself and of the mean of the words."""

    def forward(self, words, mask, targets):
        read = super().forward(words, mask)["logits"]
        own = self.embed(targets.clamp(min=0))
        logits = self.head(own) + ((read * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))[:, None]
        return {"loss": cross_entropy(logits.flatten(0, 1), targets.flatten()), "read": read, "logits": logits}


def test_two_sizes_are_padded_apart():
    torch.manual_seed(0)
    plain = Answers()
    mine = compiled(plain, {**PAD, "targets": {"value": -100, "size": "targets"}}, (8, 16, 24))
    for length, answer in ((7, 12), (5, 16), (8, 9)):
        call = {**batch(3, length), "targets": batch(3, answer)["targets"]}
        found, known = mine(**call), plain(**call)
        assert found["logits"].shape == (3, answer, WORDS) and found["read"].shape == (3, length, WORDS)
        for model, out in ((mine, found), (plain, known)):
            model.zero_grad()
            out["loss"].backward()
        assert apart(mine, plain) < 2e-6
    assert len(mine.zgraph.programs) == 1


@pytest.mark.slow  # (a small model of two sizes: above)
def test_t5s_two_sizes_are_padded_apart():
    plain = _model("t5")
    targets = {"value": -100, "size": "targets"}
    mine = compiled(plain, {"input_ids": 0, "attention_mask": 0, "labels": targets}, (8, 16, 24))
    for length, answer in ((7, 12), (5, 16), (8, 9)):
        words = batch(3, length)
        call = {"input_ids": words["words"], "attention_mask": words["mask"], "labels": batch(3, answer)["targets"]}
        assert difference(mine, plain, call) < 2e-6
        out = mine(**call)
        assert out.logits.shape == (3, answer, 97) and out.encoder_last_hidden_state.shape == (3, length, 32)
    assert len(mine.zgraph.programs) == 1


class Nested(Reader):
    def forward(self, batch, *, flag=True):
        return (super().forward(batch["words"], *batch["more"]), flag)


@pytest.mark.slow
def test_arguments_by_place_by_name_inside_of_dicts_and_without_labels():
    mine, plain = pair()
    for length in (5, 7):
        call = batch(3, length)
        words, mask = call["words"], call["mask"]
        with torch.no_grad():
            for given, named in (((words, mask), {}), ((words,), {"mask": mask}), ((), {"words": words, "mask": mask})):
                assert torch.allclose(mine(*given, **named)["logits"], plain(words, mask)["logits"], atol=1e-6)
        out, known = mine.eval_step(**call), plain(**call)
        assert out["logits"].shape == (3, length, WORDS) and torch.allclose(out["loss"], known["loss"])
    assert len(mine.zgraph.programs) == 4
    torch.manual_seed(0)
    plain = Nested()
    mine = compiled(plain, {"batch['words']": 0, "batch['more'][0]": 0, "batch['more'][1]": -100})
    for length in (5, 7):
        words, *more = batch(3, length).values()
        (out, flag), (known, _) = (m({"words": words, "more": more}, flag=length) for m in (mine, plain))
        assert out["logits"].shape == (3, length, WORDS) and flag == length
        assert torch.allclose(out["loss"], known["loss"])


class Plain(Reader):
    """Gives logits alone."""

    def forward(self, words, mask):
        return super().forward(words, mask)["logits"]


@pytest.mark.slow
def test_a_loss_of_ones_own_gets_what_is_not_padded():
    torch.manual_seed(0)
    plain = Plain()

    def loss_of(logits, targets):
        return cross_entropy(logits.view(-1, WORDS), targets.view(-1))  # (as it is one piece in plain PyTorch)

    shapes = {"buckets": [8, 16], "pad": {"words": 0, "mask": 0}}
    plan = zgraph.Plan(
        backend="eager", micro_batches=2, optimizer=zgraph.SGD(lr=0.1), shapes=shapes, loss_average="token"
    )
    mine = zgraph.compile(copy.deepcopy(plain), plan, loss_fn=loss_of)
    for length in (5, 12, 7):
        call = batch(4, length)
        out = mine.train_step(call["words"], call["mask"], targets=call["targets"])
        assert out.shape == (4, length, WORDS)
        loss_of(plain(call["words"], call["mask"]), call["targets"]).backward()
        with torch.no_grad():
            for mine_, theirs in zip(mine.parameters(), plain.parameters(), strict=True):
                theirs -= 0.1 * theirs.grad
                assert torch.allclose(mine_, theirs, atol=1e-6)
        plain.zero_grad()
    assert len(mine.zgraph.programs) == 2
    assert mine.zgraph.samples == 12


def test_the_share_that_is_wasted_is_reported():
    mine, _ = pair()
    assert mine.zgraph.padding.share == 0.0
    for length in (6, 8, 12):
        mine(**batch(2, length))
    assert mine.zgraph.padding.share == pytest.approx(1 - 26 / 32)
    assert mine.zgraph.padding.calls == {8: 2, 16: 1}
    assert "padding: 18.8% of what 3 calls computed with (2 of 8, 1 of 16)" in str(mine.zgraph.report())


def test_gradients_of_inputs_are_of_the_batch():
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(4, 4)

        def forward(self, x):
            return self.mix(x).sin()

    torch.manual_seed(0)
    plain = Embedded()
    mine = compiled(plain, {"x": 0.0})
    given = [torch.randn(2, 5, 4).requires_grad_() for _ in range(2)]
    given[1].data.copy_(given[0].data)
    for model, x in zip((mine, plain), given, strict=True):
        model(x).square().sum().backward()
    assert torch.allclose(given[0].grad, given[1].grad) and given[0].grad.shape == (2, 5, 4)
    assert apart(mine, plain) < 2e-6


def test_with_what_has_static_programs_alone():
    class Loss(Reader):
        def forward(self, words, mask, targets):
            return super().forward(words, mask, targets)["loss"]

    torch.manual_seed(0)
    plain = Loss()
    mine = compiled(plain, tiles={"loss": 2})
    for length in (5, 12, 7):
        assert difference(mine, plain, batch(2, length)) < 2e-6
    assert len(mine.zgraph.programs) == 2


# What is refused.


@pytest.mark.parametrize(
    "shapes, said",
    [
        ({"buckets": [16, 8], "pad": PAD}, "8 is not larger than the one before it"),
        ({"buckets": [0, 8], "pad": PAD}, "0 is not larger than 0"),
        ({"buckets": [], "pad": PAD}, "there is none"),
        ({"buckets": [8]}, "shapes.pad"),
        ({"buckets": [8], "pad": {"words": "none"}}, "no input is padded"),
        ({"buckets": [8], "pad": {"words": "zero"}}, "'zero' is no padding"),
        ({"buckets": [8], "pad": {"words": {"value": 0, "dims": [-1]}}}, "dims"),
        ({"bucket": [8], "pad": PAD}, "did you mean 'buckets'?"),
        ("pad", "the known ones are auto, static, dynamic"),
    ],
    ids=str,
)
def test_buckets_that_can_not_be_are_refused(shapes, said):
    with pytest.raises(PlanError) as found:
        zgraph.Plan(shapes=shapes)
    assert said in str(found.value) and "shapes" in str(found.value)


def test_what_does_not_go_with_buckets_is_refused():
    shapes = {"buckets": [8], "pad": PAD}
    rows = {"buckets": [8], "pad": {"words": {"value": 0, "dims": [0]}}}
    with pytest.raises(PlanError, match=r"shapes\.pad pads dimension 0, and a pipeline has micro-batches"):
        zgraph.Plan(shapes=rows, mesh={"pp": 2}, micro_batches=2)
    with pytest.raises(PlanError, match=r"a symbol that shapes\.pad pads"):
        zgraph.Plan(shapes=shapes, dynamic={"words": {1: "length"}})
    with pytest.raises(PlanError, match="forward has no argument 'wrods'"):
        compiled(Reader(), {"wrods": 0})


@pytest.mark.parametrize(
    "pad, given, error, said",
    [
        (PAD, {"words": (2, 17), "mask": (2, 17)}, SignatureError, "a batch of 17 is larger than the largest bucket, 16"),
        ({"words": 0}, {"words": (2, 5), "mask": (2, 5)}, SignatureError, "mask has size 'length' too, and no value to be padded with"),
        (PAD, {"words": (2, 5), "mask": (2, 6)}, SignatureError, "size 'length' is 5 and 6 in one call"),
        ({"targets": 0}, {"words": (2, 5)}, SignatureError, "nothing of this call is padded: it has words"),
        ({"words": 0.5}, {"words": (2, 5)}, SignatureError, "words can't be padded with 0.5: it holds int64"),
        ({"words": {"value": 0, "dims": [2]}}, {"words": (2, 5)}, SignatureError, "pads dimension 2 of words, which has 2 dimensions"),
    ],
)  # fmt: skip
def test_a_call_that_can_not_be_padded_is_refused_before_harm(pad, given, error, said):
    mine = compiled(Reader(), pad)
    with pytest.raises(error) as found:
        mine(**{name: torch.ones(shape, dtype=torch.int64) for name, shape in given.items()})
    assert said in str(found.value) and "to do" in str(found.value)
    assert mine.zgraph.padding.calls == {} and not mine.zgraph.programs


def test_an_input_that_has_the_size_by_chance():
    class Kinds(Reader):
        def forward(self, words, kinds):
            return super().forward(words)["logits"].mean() + kinds.float().mean()

    plain = Kinds()
    told = compiled(plain, {"words": 0, "kinds": "none"})
    seen = compiled(plain, {"words": 0})
    with pytest.raises(SignatureError, match="kinds has size 'length' too"):
        seen(torch.ones(2, 5, dtype=torch.int64), torch.ones(2, 5))
    for length in (4, 5):  # (its second dimension was once another: it does not follow)
        for mine in (told, seen):
            mine(torch.ones(2, length, dtype=torch.int64), torch.ones(2, 5))
    assert len(seen.zgraph.programs) == 1


def to_even(hidden):  # as long as the words at each bucket, and a row longer than some batches
    return nn.functional.pad(hidden, (0, 0, 0, hidden.shape[1] % 2))


def at_least_the_bucket(hidden):  # as long as the words at each bucket, and longer than some batches
    return nn.functional.pad(hidden, (0, 0, 0, max(0, 8 - hidden.shape[1])))


@pytest.mark.parametrize(
    "of", [to_even, at_least_the_bucket, lambda h: h[:, 1:], lambda h: h.flatten(0, 1), lambda h: torch.cat([h, h], 1)]
)
def test_an_output_whose_padding_can_not_be_told_is_refused(of):
    class Changes(Reader):
        def forward(self, words):
            return of(self.embed(words))

    with pytest.raises(CaptureError) as found:
        compiled(Changes(), {"words": 0})(torch.ones(2, 5, dtype=torch.int64))
    assert "the padding of an output can't be told: dimension" in str(found.value) and "of output 0" in str(found.value)


def test_a_forward_that_writes_to_what_is_padded_is_refused():
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(4, 4)

        def forward(self, x):
            x.mul_(2)
            return self.mix(x)

    mine = compiled(Writes(), {"x": 0.0})
    with pytest.raises(UnsupportedError, match="forward writes to an input that is padded"):
        mine(torch.ones(2, 5, 4))
    given = torch.ones(2, 8, 4)
    mine(given)  # (nothing is padded)
    assert given.unique().tolist() == [2.0]


def test_a_mask_that_is_missing_is_told(caplog):
    mine, _ = pair()
    with caplog.at_level(logging.WARNING, "zgraph"):
        mine(batch(2, 5)["words"])
    assert any("shapes.pad names mask, which this call does not have" in r.getMessage() for r in caplog.records)


def test_verify_sees_a_model_that_does_not_mask_padding():
    class Mean(Reader):
        def forward(self, words):
            return super().forward(words)["logits"].square().mean()

    shapes = {"buckets": [8], "pad": {"words": 0}}
    found = zgraph.verify(
        Mean(), zgraph.Plan(backend="eager", shapes=shapes), 1, (batch(4, 5)["words"],), compiled=True
    )
    assert not found.ok


class Counts(nn.Module):
    """A model of words that masks nothing; `how` it counts what is behind them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.embed, self.normed = how, nn.Embedding(WORDS, 8), nn.BatchNorm1d(8)

    def forward(self, words):
        hidden = self.embed(words)
        if self.how == "mean":
            return hidden.mean(1)
        if self.how == "last":
            return hidden[:, -1] * 2
        if self.how == "attention":
            return nn.functional.scaled_dot_product_attention(hidden, hidden, hidden)
        if self.how == "statistics":
            return self.normed(hidden.flatten(0, 1)).view_as(hidden)
        if self.how == "windows":
            return nn.functional.conv1d(hidden.mT, torch.ones(4, 8, 3), padding=1).sum((1, 2))
        causal = nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)
        return nn.functional.dropout(causal, 0.5) if self.how == "dropout" else causal


def told_of_padding(caplog, model: nn.Module, **given: torch.Tensor) -> int:
    with caplog.at_level(logging.WARNING, "zgraph"):
        model(**given)
    return sum("the model counts its padding" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("how", ["mean", "last", "attention", "statistics", "windows"])
def test_a_model_that_counts_its_padding_is_told(how, caplog):
    words, plain = batch(3, 5)["words"], Counts(how)
    mine = compiled(plain, pad={"words": 0})
    assert not told_of_padding(caplog, mine, words=torch.randint(1, WORDS, (3, 8)))  # (nothing is padded)
    told_of_padding(caplog, mine, words=words)
    assert told_of_padding(caplog, mine, words=words) == 1
    assert mine.normed.num_batches_tracked == (3 if how == "statistics" else 0)  # (what looks at it changes nothing)


@pytest.mark.parametrize("how", ["causal", "dropout"])
def test_one_whose_padding_counts_for_nothing_draws_what_it_would(how, caplog):
    mine = compiled(plain := Counts(how), pad={"words": 0}, buckets=(8,))
    words = torch.nn.functional.pad(batch(3, 5)["words"], (0, 3))
    torch.manual_seed(2)
    expected = plain(words)[:, :5]
    torch.manual_seed(2)
    assert torch.allclose(mine(words[:, :5]), expected)
    assert not any("the model counts" in r.getMessage() for r in caplog.records)


# Ranks.


def ranks_with_lengths(zero: int, backend: str) -> tuple[float, list[str], float]:
    warnings.filterwarnings("ignore")
    mine, plain = pair(zero=zero, backend=backend)
    worst = 0.0
    for number, lengths in enumerate([(5, 12), (7, 3), (16, 2), (9, 10)]):
        out = mine(**batch(3, lengths[dist.get_rank()], number))
        out["loss"].backward()
        assert out["logits"].shape == (3, lengths[dist.get_rank()], WORDS)
        for length in lengths:
            (plain(**batch(3, length, number))["loss"] / 2).backward()
        worst = max(worst, apart(mine, plain))
        mine.zero_grad()
        plain.zero_grad()
    return worst, list(mine.zgraph.programs), mine.zgraph.padding.share


@pytest.mark.gloo
@sweep(
    "zero, backend",
    [(0, "eager"), (1, "eager"), pytest.param(3, "inductor", marks=pytest.mark.inductor), (3, "eager")],
    quick=1,
)
def test_ranks_pad_to_one_bucket(two, zero, backend):
    for rank, (worst, programs, share) in enumerate(two.run(ranks_with_lengths, zero, backend)):
        assert worst < 2e-6
        assert programs == ["train0", "train1"]
        lengths = ((5, 7, 16, 9), (12, 3, 2, 10))[rank]
        assert share == pytest.approx(1 - sum(lengths) / (16 + 8 + 16 + 16))


def steps_on_ranks() -> tuple[float, int, int]:
    """(the largest difference of a weight to plain PyTorch's after steps of two micro-batches, the programs, the samples)."""
    warnings.filterwarnings("ignore")
    mine, plain = pair(zero=3, micro_batches=2, optimizer=zgraph.SGD(lr=0.1), loss_average="token")
    for number, lengths in enumerate([(5, 12), (7, 3), (6, 7), (9, 10)]):
        mine.train_step(**batch(4, lengths[dist.get_rank()], number))
        calls = [batch(4, length, number) for length in lengths]
        counts = [(call["targets"] != -100).sum() for call in calls]
        for call, count in zip(calls, counts, strict=True):
            (plain(**call)["loss"] * (count / sum(counts))).backward()
        with torch.no_grad():
            for p in plain.parameters():
                p -= 0.1 * p.grad
        plain.zero_grad()
    pairs = zip(mine.parameters(), plain.parameters(), strict=True)
    return max(float((whole(a) - b).abs().max()) for a, b in pairs), len(mine.zgraph.programs), mine.zgraph.samples


@pytest.mark.gloo
def test_steps_of_ranks_with_different_lengths(two):
    for worst, programs, samples in two.run(steps_on_ranks):
        assert worst < 1e-6 and programs == 2 and samples == 32


def too_long_on_one_rank() -> None:
    mine, _ = pair()
    mine(**batch(2, 5 + 20 * dist.get_rank()))


@pytest.mark.gloo
def test_a_batch_beyond_the_largest_bucket_is_refused_on_all_ranks(two):
    first, second = (outcome.error for outcome in two.attempt(too_long_on_one_rank, keep=True))
    assert isinstance(first, SignatureError) and "the batch of rank 1 can't be padded" in str(first)
    assert isinstance(second, SignatureError) and "25 is larger than the largest bucket" in str(second)


def other_sizes_in_a_group(lengths: tuple[int, int]) -> tuple[float, int]:
    mine, plain = pair(mesh={"tp": 2}, tensor_parallel="auto")
    mine(**batch(2, lengths[dist.get_rank()]))["loss"].backward()
    plain(**batch(2, lengths[dist.get_rank()]))["loss"].backward()
    return apart(mine, plain), len(mine.zgraph.programs)


@pytest.mark.gloo
@pytest.mark.slow
def test_ranks_of_one_group_have_equal_sizes_though_one_bucket_holds_them(two):
    for worst, programs in two.run(other_sizes_in_a_group, (5, 5)):
        assert worst < 2e-6 and programs == 1
    for outcome in two.attempt(other_sizes_in_a_group, (5, 6), keep=True):
        assert isinstance(outcome.error, RankMismatchError) and "length 5 on rank 0, length 6 on rank 1" in str(
            outcome.error
        )


class Written(Reader):
    """Writes to its mask."""

    def forward(self, words, mask=None, targets=None):
        mask.clamp_(max=1)
        return super().forward(words, mask, targets)


def in_stages(mesh: dict[str, int], micro: int) -> tuple[float, list[tuple[int, ...]], dict[int, int]]:
    """(the largest difference of a weight after steps with buckets in a pipeline, the shapes of an evaluation's logits where they are, the calls of
    each bucket)."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    plain = Reader()
    made = compiled(plain, mesh=mesh, micro_batches=micro, optimizer=zgraph.SGD(lr=0.1), zero=0)
    shapes = []
    rows = mesh.get("dp", 1)
    for number, lengths in enumerate(((5, 9), (7, 3), (12, 11), (16, 2))):
        calls = [batch(2 * micro, length, number) for length in lengths[:rows]]
        here = made.zgraph.mesh.get_local_rank("dp") if "dp" in mesh else 0
        loss = made.train_step(**calls[here])["loss"]
        parts = [{k: v[at : at + 2] for k, v in call.items()} for call in calls for at in range(0, 2 * micro, 2)]
        losses = [plain(**part)["loss"] for part in parts]
        torch.stack(losses).mean().backward()
        mine = torch.stack(losses[micro * here : micro * (here + 1)]).mean()
        assert torch.allclose(loss, mine.detach(), rtol=1e-5)
        with torch.no_grad():
            for p in plain.parameters():
                p -= 0.1 * p.grad
        plain.zero_grad()
        with torch.no_grad():
            given = made(**calls[here])
        if given["logits"] is not None:
            assert torch.allclose(given["logits"], plain(**calls[here])["logits"], atol=1e-5)
            shapes.append(tuple(given["logits"].shape))
    mine, theirs = (
        {n: whole(p).detach() for n, p in m.named_parameters() if p.device.type == "cpu"} for m in (made, plain)
    )
    worst = max(float((mine[n] - theirs[n]).abs().max()) for n in mine)
    return worst, shapes, made.zgraph.padding.calls


@pytest.mark.gloo
@sweep("mesh, micro", [({"pp": 2, "dp": 2}, 2), ({"pp": 2}, 2), ({"pp": 2}, 1)], quick={1}, ids=str)
@pytest.mark.slow
def test_stages_of_a_pipeline_pad_to_one_bucket(two, four, mesh, micro):
    found = (four if "dp" in mesh else two).run(in_stages, mesh, micro)
    assert all(worst < 1e-6 for worst, _, _ in found)
    shapes = [tuple(shape[1] for shape in shapes) for _, shapes, _ in found if shapes]
    assert shapes == ([(5, 7, 12, 16), (9, 3, 11, 2)] if "dp" in mesh else [(5, 7, 12, 16)])
    assert all(calls == ({16: 6, 8: 2} if "dp" in mesh else {8: 4, 16: 4}) for _, _, calls in found)


def refused_in_stages() -> list[str]:
    found = []
    for model, arguments in ((Written(), {}), (Reader(), {"loss_fn": lambda out, targets: out["logits"].mean()})):
        plan = zgraph.Plan(mesh={"pp": 2}, backend="eager", shapes={"buckets": [8], "pad": PAD})
        made = zgraph.compile(model, plan, **arguments)
        with pytest.raises(ZgraphError) as error:
            made.train_step(**batch(2, 5))
        found.append(str(error.value))
    return found


@pytest.mark.gloo
@pytest.mark.slow
def test_what_stages_can_not_pad_is_refused(two):
    for written, loss in two.run(refused_in_stages):
        assert "forward writes to an input that is padded" in written
        assert "a loss_fn can't have outputs without padding, in a pipeline" in loss
