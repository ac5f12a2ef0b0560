"""`load_pretrained`: a folder of transformers' goes into shards as `from_pretrained` would have it, and no rank reads more than it needs."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build
from ranks import Ranks
from safetensors.torch import load_file, save_file
from sweeps import sweep
from torch import nn
from trainers import model_of

import zgraph
from zgraph.checkpoint import tensorfile
from zgraph.errors import CheckpointError, ModelError, ZgraphError

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


def test_models_inside_of_a_model_have_their_own_initialisation(tmp_path):
    """(Positions of CLIP's that no file holds; and a weight that the files lack.)"""
    plain, _ = build("LLaVA")
    plain.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = {n: v for n, v in load_file(path).items() if "class_embedding" not in n}
    save_file(weights, path, {"format": "pt"})
    mine = zgraph.load_pretrained(type(plain), tmp_path, plan())
    state = dict(mine.named_parameters())
    assert all(torch.equal(state[n], p) for n, p in plain.named_parameters() if "class_embedding" not in n)
    assert all(torch.equal(b, mine.get_buffer(n)) for n, b in plain.named_buffers())
    drawn = next(p for n, p in state.items() if "class_embedding" in n)
    assert 0.5 < drawn.std() / 32**-0.5 < 2  # (CLIP's rule; LLaVA has none for it)


def same(mine: Any, plain: nn.Module) -> bool:
    state, expected = zgraph.full_state_dict(mine), plain.state_dict()
    return state.keys() == expected.keys() and all(
        torch.equal(state[n], v) and state[n].dtype is v.dtype for n, v in expected.items()
    )


def change_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def with_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    path = folder / "model.safetensors"
    tensors = {n: v.clone().contiguous() for n, v in change(load_file(path)).items()}
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("kind", "stored", "dtype"),
    [
        ("llama", torch.float32, "bf16"),
        ("llama", torch.float32, "bfloat16"),
        ("llama", torch.bfloat16, None),  # (with a config that says no dtype)
        ("llama", torch.bfloat16, "auto"),
        ("t5", torch.float32, "float16"),  # (a part of which stays in float32)
    ],
)
def test_dtypes_are_those_of_from_pretrained(kind, stored, dtype, tmp_path):
    plain = model_of(kind).to(stored)
    plain.save_pretrained(tmp_path)
    if stored is torch.bfloat16:
        change_config(tmp_path, dtype=None)
    expected = type(plain).from_pretrained(tmp_path, dtype=torch.bfloat16 if dtype == "bf16" else dtype or "auto")
    assert same(zgraph.load_pretrained(type(plain), tmp_path, plan(), dtype=dtype), expected)


def test_a_tied_weight_is_read_by_any_of_its_names(tmp_path):
    model_of("gpt2").save_pretrained(tmp_path)
    by_both = lambda tensors: {**tensors, "lm_head.weight": tensors["transformer.wte.weight"]}  # noqa: E731
    with_tensors(tmp_path, by_both)
    made = zgraph.load_pretrained(transformers.GPT2LMHeadModel, tmp_path, plan())
    expected = model_of("gpt2").state_dict()
    assert torch.equal(made.lm_head.weight, expected["lm_head.weight"])
    with_tensors(tmp_path, lambda tensors: {n: v for n, v in tensors.items() if n != "transformer.wte.weight"})
    made = zgraph.load_pretrained(transformers.GPT2LMHeadModel, tmp_path, plan())
    assert torch.equal(made.transformer.wte.weight, expected["lm_head.weight"])
    with_tensors(tmp_path, lambda tensors: {**tensors, "transformer.wte.weight": 2 * tensors["lm_head.weight"]})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is tied to transformer\.wte\.weight"):
        zgraph.load_pretrained(transformers.GPT2LMHeadModel, tmp_path, plan())


def test_names_of_older_files_are_read(tmp_path, caplog):
    plain = model_of("bert")
    for param in plain.parameters():
        nn.init.normal_(param)
    plain.save_pretrained(tmp_path)
    older = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    rename = lambda name: next((name.replace(n, o) for n, o in older.items() if n in name), name)  # noqa: E731
    with_tensors(tmp_path, lambda tensors: {rename(name): value for name, value in tensors.items()})
    caplog.set_level(logging.WARNING, "zgraph")
    made = zgraph.load_pretrained(transformers.BertForSequenceClassification, tmp_path, plan())
    assert same(made, plain) and "in the files" not in caplog.text
    assert made.name_or_path == str(tmp_path)


def test_fields_of_the_config_are_taken_with_a_class(tmp_path):
    model_of("bert").bert.save_pretrained(tmp_path)
    options = {"num_labels": 7, "attn_implementation": "eager"}
    made = zgraph.load_pretrained(transformers.AutoModelForSequenceClassification, tmp_path, plan(), **options)
    assert made.classifier.weight.shape[0] == 7 and made.config._attn_implementation == "eager"
    with pytest.raises(ModelError, match="no argument 'subfolder'"):
        zgraph.load_pretrained(made.config, tmp_path, plan(), subfolder="x")
    with pytest.raises(ModelError, match="no argument 'num_lables'"):
        zgraph.load_pretrained(transformers.BertModel, tmp_path, plan(), num_lables=7)


def test_folders_that_hold_something_else_are_refused(tmp_path):
    def refused(kind: type[ZgraphError], said: str, **more: Any) -> None:
        with pytest.raises(kind, match=said) as caught:
            zgraph.load_pretrained(transformers.LlamaForCausalLM, tmp_path / "model", plan(), **more)
        assert caught.value.hint

    refused(CheckpointError, "is not there")
    model_of("llama").save_pretrained(tmp_path / "model")
    refused(CheckpointError, "'bfloat' is no dtype", dtype="bfloat")
    change_config(tmp_path / "model", quantization_config={"quant_method": "fp8"})
    refused(ModelError, r"quantized \(fp8\)")
    change_config(tmp_path / "model", quantization_config=None)
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    refused(ModelError, "has an adapter of PEFT's")
    (tmp_path / "model" / "adapter_config.json").unlink()
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "pytorch_model.bin")
    refused(CheckpointError, "pickled")
    (tmp_path / "model" / "config.json").unlink()
    refused(CheckpointError, "has no config.json")
