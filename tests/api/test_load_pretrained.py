"""`load_pretrained`: a folder of transformers' goes into shards as `from_pretrained` would have it, and no rank reads more than it needs."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from ranks import Ranks
from sweeps import sweep
from torch import nn
from trainers import model_of

import zgraph
from zgraph.checkpoint import tensorfile
from zgraph.errors import CheckpointError, ModelError

transformers = pytest.importorskip("transformers")


def plan(**more: Any) -> zgraph.Plan:
    return zgraph.Plan(backend="eager", **more)


def mixtral() -> nn.Module:
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MixtralConfig(vocab_size=33, num_key_value_heads=1, num_local_experts=3, **small)
    return transformers.MixtralForCausalLM(config)


KINDS = {
    "MixtralForCausalLM": mixtral,
    "GPT2LMHeadModel": lambda: model_of("gpt2"),
    "T5ForConditionalGeneration": lambda: model_of("t5"),
}


def loaded(folder: str, names: list[str], zero: int) -> list[tuple[bool, bool]]:
    """For each: whether all weights are those of `from_pretrained`, and whether a loss is."""
    found = []
    for name in names:
        made = zgraph.load_pretrained(getattr(transformers, name), f"{folder}/{name}", plan(zero=zero))
        plain = getattr(transformers, name).from_pretrained(f"{folder}/{name}")
        state, expected = zgraph.full_state_dict(made), plain.state_dict()
        same = state.keys() == expected.keys() and all(
            torch.equal(state[n], v) and state[n].dtype is v.dtype for n, v in expected.items()
        )
        ids = torch.arange(3, 15).reshape(2, 6)
        with torch.no_grad():
            losses = [float(m(input_ids=ids, labels=ids).loss) for m in (made, plain)]
        found.append((same, losses[0] == losses[1]))
    return found


@pytest.mark.gloo
@sweep("names", [["GPT2LMHeadModel", "T5ForConditionalGeneration"], ["MixtralForCausalLM"]], quick=1, ids=len)
def test_weights_are_those_of_from_pretrained(two: Ranks, tmp_path, names):
    for name in names:
        KINDS[name]().to(torch.bfloat16 if name.startswith("GPT2") else torch.float32).save_pretrained(
            tmp_path / name, max_shard_size="8KB"
        )
    assert two.run(loaded, str(tmp_path), names, 3) == [[(True, True)] * len(names)] * 2


def read(folder: str) -> tuple[int, int, int]:
    """(bytes read from files, the most at once, all bytes)."""
    counts: list[int] = []
    held = tensorfile.TensorFile.tensor

    def counted(self, piece, *rows):
        value = held(self, piece, *rows)
        counts.append(value.nbytes)
        return value

    tensorfile.TensorFile.tensor = counted
    try:
        made = zgraph.load_pretrained(transformers.LlamaForCausalLM, folder, plan(zero=3))
    finally:
        tensorfile.TensorFile.tensor = held
    return sum(counts), max(counts), sum(p.numel() * p.element_size() for p in made.parameters())


@pytest.mark.gloo
def test_each_rank_reads_its_rows(two: Ranks, tmp_path):
    model_of("llama").save_pretrained(tmp_path)
    for total, most, whole in two.run(read, str(tmp_path)):
        assert total <= whole / 2 + 2000 and most <= whole / 4


def test_what_is_missing_is_initialised_and_what_is_beyond_left_out(tmp_path, caplog):
    model_of("bert").save_pretrained(tmp_path / "head")
    model_of("bert").bert.save_pretrained(tmp_path / "body")
    caplog.set_level(logging.WARNING, "zgraph")
    config = transformers.BertConfig.from_pretrained(tmp_path / "head")
    made = zgraph.load_pretrained(transformers.BertForSequenceClassification, tmp_path / "body", plan())
    assert "2 weights are not in the files" in caplog.text and "classifier.bias" in caplog.text
    expected = model_of("bert").state_dict()
    state = made.state_dict()
    assert all(torch.equal(state[n], v) for n, v in expected.items() if n.startswith("bert."))
    assert state["classifier.weight"].isfinite().all()
    caplog.clear()
    zgraph.load_pretrained(transformers.BertModel, tmp_path / "head", plan())
    assert "not in the model: they are left out: classifier.bias, classifier.weight" in caplog.text
    config.architectures = ["BertForSequenceClassification"]
    again = zgraph.load_pretrained(config, tmp_path / "head", plan())
    assert torch.equal(again.classifier.weight, expected["classifier.weight"])


def test_what_is_no_model_of_transformers_is_refused(tmp_path):
    for given in (nn.Linear, nn.Linear(2, 2), transformers.LlamaConfig()):
        with pytest.raises(ModelError):
            zgraph.load_pretrained(given, tmp_path, plan())
    model_of("llama").save_pretrained(tmp_path)
    config = transformers.LlamaConfig.from_pretrained(tmp_path, hidden_size=32)
    with pytest.raises(CheckpointError, match="in the checkpoint and"):
        zgraph.load_pretrained(config, tmp_path, plan())
