"""Python numbers that a model makes of sizes, and returns or keeps, are those of the call, whichever program runs.

Functions at the top of this file run on the ranks; each returns what the test compares.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sweeps import sweep
from torch import nn

import zgraph
from zgraph.errors import CaptureError

BUCKETS = {"buckets": [8, 16], "pad": {"words": 0, "mask": 0}}
SIZES = [(2, 7), (2, 9), (3, 5), (2, 20), (4, 4), (1, 6)]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(31, 4), nn.Linear(4, 31)
        self.longest, self.total, self.lengths = 0, 0, []

    def loss(self, words):
        return self.out(self.embed(words)).square().mean()

    @property
    def state(self):
        return self.longest, self.total, self.lengths


class Cache:
    """What no pytree knows, as the caches of transformers."""

    def __init__(self, keys, length):
        self.keys, self.length = keys, length


class Returned(Words):
    def forward(self, words):
        rows, length = words.shape
        return length, self.loss(words), {"half": length // 2, "all": 2 * rows * length + 1}, words.shape


class InACache(Words):
    def forward(self, words):
        return self.loss(words), Cache(self.embed(words)[:, -3:], words.shape[1])


class Kept(Words):
    def forward(self, words):
        self.longest = words.shape[1]
        self.lengths.append(words.shape[0])
        return self.loss(words)


class OfAnotherInput(Words):
    def forward(self, words, others):
        return self.loss(words), others.shape[0]


class Added(Words):
    def forward(self, words):
        self.total += words.numel()
        return self.loss(words)


class Largest(Words):
    def forward(self, words):
        self.longest = max(self.longest, words.shape[1])
        return self.loss(words)


class ReadBefore(Words):
    def forward(self, words):
        before, self.longest = self.longest, words.shape[1]
        return self.loss(words) + before


class Compared(Words):
    def forward(self, words):
        return self.loss(words), words.shape[1] > 5


class Divided(Words):
    def forward(self, words):
        return self.loss(words), 1 / words.shape[1]


def numbers(result: Any) -> list[Any]:
    """All numbers in what a model returns, tensors as lists, with their types."""
    leaves = torch.utils._pytree.tree_leaves(result)
    leaves = [x for leaf in leaves for x in ((leaf.keys, leaf.length) if isinstance(leaf, Cache) else (leaf,))]
    return [(type(x).__name__, x.tolist() if isinstance(x, torch.Tensor) else x) for x in leaves]


def differences(model: type[nn.Module], sizes=SIZES, **plan: Any) -> tuple[list[Any], int]:
    """The calls in which a compiled model differs from the plain one, and the number of its programs."""
    torch.manual_seed(0)
    plain = model()
    compiled: Any = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(**{"backend": "eager", **plan}))
    differing = []
    for rows, length in sizes:
        words = torch.randint(31, (rows, length))
        inputs = (words, torch.zeros(length + 3)) if model is OfAnotherInput else (words,)
        expected, result = plain(*inputs), compiled(*inputs)
        if numbers(expected) != numbers(result) or plain.state != compiled.state:
            differing.append((rows, length, numbers(expected), numbers(result), plain.state, compiled.state))
    return differing, len(compiled.zgraph.programs)


def differing_lengths() -> list[Any]:
    """Ranks with other lengths in one step: the calls that differ on this one."""
    rank = dist.get_rank()
    return differences(Returned, [(2, 7 + rank), (2, 9 + 3 * rank), (3, 12 - rank)], mesh={"dp": 2}, zero=3)[0]


@pytest.mark.parametrize("model", [Returned, InACache, Kept, OfAnotherInput])
def test_one_program_serves_all_lengths(model):
    assert differences(model) == ([], 3)  # (the first call's, that for all, and that for one row)


@pytest.mark.slow
@pytest.mark.inductor
def test_compiled_programs_give_them_as_well():
    assert differences(Returned, SIZES[:3], backend="inductor") == ([], 2)


def test_declared_sizes():
    assert differences(Returned, shapes="dynamic") == ([], 2)
    assert differences(Returned, shapes="static") == ([], 6)


@pytest.mark.gloo
def test_each_rank_has_those_of_its_own_call(two):
    assert two.run(differing_lengths) == [[], []]


@sweep(
    "model, said",
    [
        (Added, "a number that it keeps and reads from a size"),
        (Largest, "a number that it keeps and reads from a size"),
        (Compared, "a number that is made from a size"),
        (Divided, "each seq is a program of its own"),
    ],
    quick={2, 3},
)
def test_numbers_that_no_program_of_symbols_has_are_right_in_programs_for_one_size(model, said, caplog):
    with caplog.at_level(logging.WARNING, "zgraph"):
        differing, _ = differences(model, SIZES[:3])
    assert differing == [] and said in caplog.text


def test_a_number_that_is_read_before_it_is_set():
    assert differences(ReadBefore)[0] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Mistral", "Gemma3"])
def test_the_caches_of_windows_that_transformers_returns(name):
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "vocab_size": 31, "pad_token_id": 0}
    sizes |= {"num_key_value_heads": 1, "intermediate_size": 16, "sliding_window": 8}
    config = getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(name, f"{name}Config"))(**sizes)
    plain = getattr(transformers, f"{name}ForCausalLM")(config)
    compiled: Any = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(backend="eager"))
    for rows, length in ((2, 12), (2, 20), (3, 31), (4, 9)):
        words = torch.randint(1, 31, (rows, length))
        expected, result = plain(words, labels=words), compiled(words, labels=words)
        torch.testing.assert_close(result.loss, expected.loss)
        assert result.past_key_values.get_seq_length() == length == expected.past_key_values.get_seq_length()
        for mine, its in zip(result.past_key_values.layers, expected.past_key_values.layers, strict=True):
            torch.testing.assert_close(mine.keys, its.keys)
    assert len(compiled.zgraph.programs) == 2


class Masked(Words):
    """Takes padding; `form` says what it gives beside its loss."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, words, mask):
        loss = (self.out(self.embed(words)).square().mean(-1) * mask).sum() / mask.sum()
        if self.form == "keeps":
            self.longest = words.shape[1]
        return {
            "number": (loss, 2 * words.shape[1]),
            "rows": (loss, words.shape[0], "all words", words.dim() == 2),
            "truth": (loss, words.shape[1] > 10),
            "text": (loss, f"{words.shape[1]} words"),
            "cache": (loss, Cache(loss, words.shape[1])),
        }.get(self.form, loss)


@pytest.mark.parametrize("form", ["number", "cache", "keeps", "truth", "text"])
def test_buckets_refuse_numbers_of_the_padded_size(form):
    model: Any = zgraph.compile(Masked(form), zgraph.Plan(backend="eager", shapes=BUCKETS))
    with pytest.raises(
        CaptureError, match="a Python number or text that forward returns, or keeps, differs with length"
    ):
        model(torch.randint(31, (2, 7)), torch.ones(2, 7))


def test_buckets_give_numbers_of_other_sizes():
    model: Any = zgraph.compile(Masked("rows"), zgraph.Plan(backend="eager", shapes=BUCKETS))
    for rows, length in ((2, 7), (3, 5), (2, 12), (4, 16)):
        result = model(torch.randint(31, (rows, length)), torch.ones(rows, length))
        assert result[1:] == (rows, "all words", True)
