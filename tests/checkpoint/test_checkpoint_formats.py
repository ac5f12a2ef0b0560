"""Checkpoints that other systems wrote: what is loaded of them is what they saved, and nothing in them is run.

Functions at the top of this file run on ranks. DeepSpeed's checkpoints are made by DeepSpeed, on two ranks of its own.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import deepspeed_scripts
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from sweeps import sweep
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import zgraph
from zgraph.checkpoint import convert as converting
from zgraph.checkpoint import manifest
from zgraph.checkpoint.convert import convert
from zgraph.checkpoint.detect_format import open_checkpoint
from zgraph.checkpoint.formats.deepspeed import DeepSpeed
from zgraph.checkpoint.formats.deepspeed_partitions import first_stages, third_stage
from zgraph.checkpoint.formats.huggingface import Safetensors
from zgraph.checkpoint.formats.plain_dcp import PlainDcp
from zgraph.checkpoint.formats.torchfile import Inert, TorchFile, plain_group
from zgraph.checkpoint.read_native import Checkpoint
from zgraph.errors import CheckpointError, UnsupportedError

WORDS, WIDTH, ROWS, LENGTH = 61, 20, 8, 9
BEFORE, AFTER = 3, 5  # steps
NUMBERS = {"lr": 5e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 53), nn.Linear(53, WIDTH)

    def forward(self, x):
        parts = self.attention(self.before(x)).unflatten(-1, (3, 2, WIDTH // 2)).movedim(-3, 0).transpose(-2, -3)
        mixed = scaled_dot_product_attention(*parts, is_causal=True).transpose(-2, -3).flatten(-2)
        x = x + self.out(mixed)
        return x + self.down(torch.nn.functional.gelu(self.up(self.after(x))))


class Gpt(nn.Module):
    """Rows that two ranks do not divide, a tied weight, a frozen one, a scalar and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.linspace(0, 0.1, WIDTH))
        self.places.weight.requires_grad_(False)

    def forward(self, words, targets):
        x = self.words(words) + self.places.weight + self.shift.to(self.gain.dtype)
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(self.norm(x) * self.gain).flatten(0, 1).float(), targets.flatten())


def built(seed: int = 0) -> Gpt:
    torch.manual_seed(seed)
    return Gpt()


def batches(first: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = [
        tuple(torch.randint(WORDS, (ROWS, LENGTH), generator=generator) for _ in "xy") for _ in range(first + count)
    ]
    return made[first:]  # type: ignore[return-value]


def mine(values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    if not dist.is_initialized():
        return values
    return tuple(v.chunk(dist.get_world_size())[dist.get_rank()] for v in values)


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def mean(loss: torch.Tensor) -> float:
    loss = loss.detach().float().clone()
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return float(loss)


def compiled(zero: int = 3, seed: int = 99, **fields: Any) -> Gpt:
    """A model that has nothing of a checkpoint's yet."""
    optimizer = zgraph.AdamW(**NUMBERS, decay="matrices")
    return zgraph.compile(built(seed), zgraph.Plan(backend="eager", zero=zero, optimizer=optimizer, **fields))


def everything(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {n: whole(t) for n, t in model.state_dict().items()}
    names = {id(p): n for n, p in model.named_parameters()}
    for param, states in model.zgraph.optimizer.state.items():
        found |= {f"{names[id(param)]}/{k}": whole(v) for k, v in states.items()}
    return found


def loaded(folder: str, zero: int = 3, tag: str | None = None) -> dict[str, torch.Tensor]:
    model = compiled(zero)
    model.load_checkpoint(folder, tag)
    return everything(model)


def go_on(folder: str, zero: int = 3, tag: str | None = None, **fields: Any) -> list[float]:
    model = compiled(zero, **fields)
    model.load_checkpoint(folder, tag)
    return [mean(model.train_step(*mine(values))) for values in batches(BEFORE, AFTER)]


# -- what plain torch writes
def saved_by_torch(folder: str, kind: str) -> dict[str, torch.Tensor]:
    """What `fully_shard` trained and torch.distributed.checkpoint saved, by the names of `everything`."""
    model = built()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **NUMBERS)
    for values in batches(0, BEFORE):
        model(*mine(values)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights, states = get_state_dict(model, optimizer)
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        flat = get_state_dict(model, optimizer, options=options)[1]
        wrapped = {f"_orig_mod.{k}": v for k, v in weights.items()}
        tensors = {k: v for k, v in flat.items() if isinstance(v, torch.Tensor)}
        kinds: dict[str, Any] = {
            "nested": {"model": weights, "optim": states, "train_state": {"step": torch.tensor(3)}, "epoch": 1},
            "flattened": {**weights, "optimizer": flat, "train_state": {"step": torch.tensor(3)}},
            "application": {"app": {"model": weights, "optim": states}},
            "wrapped": {"state_dict": wrapped, "optimizer_0": flat},
            # (safetensors hold a tied weight under one name)
            "safetensors": {"model": {k: v for k, v in weights.items() if k != "head.weight"}, "optimizer": tensors},
        }
        if kind == "safetensors":
            dcp.save(kinds[kind], storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True))
        else:
            dcp.save(kinds[kind], checkpoint_id=folder)
    found = {n: whole(t) for n, t in weights.items()}
    found |= {f"{n}/{k}": whole(v) for n, s in states["state"].items() for k, v in s.items()}
    return found


def read_by_torch(folder: str) -> dict[str, torch.Tensor]:
    """A checkpoint of zgraph's into `fully_shard`'s DTensors, by torch alone."""
    model = built(5)
    fully_shard(model)
    wanted = {f"model.{n}": t for n, t in model.state_dict().items()}
    dcp.load(wanted, storage_reader=HuggingFaceStorageReader(folder))
    return {n.removeprefix("model."): whole(t) for n, t in wanted.items()}


def saved_by_zgraph(folder: str) -> dict[str, torch.Tensor]:
    model = compiled(seed=0)
    for values in batches(0, BEFORE):
        model.train_step(*mine(values))
    model.save_checkpoint(folder, "here")
    return everything(model)


# -- what DeepSpeed writes
def by_deepspeed(folder: str, stage: int, precision: str) -> list[float]:
    """Train, save a checkpoint, go on: the losses after it."""
    deepspeed = deepspeed_scripts.ready()
    model = built()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1]},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    config = {
        "train_micro_batch_size_per_gpu": ROWS // dist.get_world_size(),
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": 3000},
        "optimizer": {"type": "AdamW", "params": NUMBERS | {"torch_adam": True}},
        "bf16": {"enabled": precision == "bf16"},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    losses = []
    for step, values in enumerate(batches(0, BEFORE + AFTER)):
        loss = engine(*mine(values))
        losses.append(mean(loss))
        engine.backward(loss)
        engine.step()
        if step + 1 == BEFORE:
            engine.save_checkpoint(folder)
    return losses[BEFORE:]


@pytest.fixture(scope="module")
def made_by_torch(two, tmp_path_factory) -> Any:
    """(folder, what is in it) by kind."""
    made: dict[str, tuple[Path, dict[str, torch.Tensor]]] = {}

    def make(kind: str) -> tuple[Path, dict[str, torch.Tensor]]:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = folder, two.run(saved_by_torch, str(folder), kind)[0]
        return made[kind]

    return make


@pytest.fixture(scope="module")
def made_by_deepspeed(deepspeeds, tmp_path_factory) -> Any:
    """(folder, the losses of DeepSpeed's own going on) by stage and precision."""
    made: dict[Any, tuple[Path, list[float]]] = {}

    def make(stage: int, precision: str = "fp32") -> tuple[Path, list[float]]:
        if (stage, precision) not in made:
            folder = tmp_path_factory.mktemp(f"stage{stage}{precision}")
            made[stage, precision] = folder, deepspeeds.run(by_deepspeed, str(folder), stage, precision)[0]
        return made[stage, precision]

    return make


def universal(folder: str, to: str) -> None:
    """DeepSpeed's own conversion, by the first rank."""
    if dist.get_rank():
        return
    from deepspeed.checkpoint import ds_to_universal

    tag = (Path(folder) / "latest").read_text()
    options = ["--inject_missing_state", "--num_extract_workers", "1", "--num_merge_workers", "1"]
    with pytest.MonkeyPatch.context() as patch:
        given = [
            "ds_to_universal",
            *options,
            "--input_folder",
            f"{folder}/{tag}",
            "--output_folder",
            f"{to}/{tag}_universal",
        ]
        patch.setattr(sys, "argv", given)
        ds_to_universal.main(ds_to_universal.parse_arguments())


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """The names of what is not the same bit for bit; a tensor that one lacks is not."""
    return [n for n in one.keys() | other.keys() if n not in one or n not in other or not torch.equal(one[n], other[n])]


# -- plain torch.distributed.checkpoint
@pytest.mark.gloo
@sweep("kind", ["nested", "flattened", "application", "wrapped", "safetensors"], quick=(4,))
def test_what_fully_shard_saved_is_loaded_bit_for_bit_on_one_rank_and_two(two, made_by_torch, kind):
    folder, saved = made_by_torch(kind)
    for found in (loaded(str(folder)), *two.run(loaded, str(folder), 3), *two.run(loaded, str(folder), 1)):
        assert differing(found, saved) == []


@pytest.mark.gloo
def test_what_it_leaves_out_it_says(made_by_torch, caplog):
    folder, _ = made_by_torch("nested")
    with caplog.at_level(logging.WARNING, "zgraph"):
        assert PlainDcp(folder).known.groups[0]["weight_decay"] == 0.1
    assert "train_state.step" in caplog.text


@pytest.mark.gloo
@pytest.mark.slow
def test_torch_alone_reads_what_zgraph_saved_bit_for_bit(two, tmp_path):
    saved, _ = two.run(saved_by_zgraph, str(tmp_path))
    for found in two.run(read_by_torch, str(tmp_path / "here")):
        assert differing(found, {n: saved[n] for n in found}) == []


@pytest.mark.parametrize("key", ["ema", "teacher"])
def test_two_models_in_a_checkpoint_are_refused(tmp_path, key):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, key: weights, "optim": states}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointError, match=rf"2 parts that could be the model(.|\n)*'{key}\.'"):
        open_checkpoint(tmp_path)


def test_two_optimizers_and_numbers_for_parameters_are_refused(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    both = {"model": weights, "one": states, "two": states}
    dcp.save(both, checkpoint_id=tmp_path / "two", no_dist=True)
    with pytest.raises(CheckpointError, match="2 optimizers"):
        open_checkpoint(tmp_path, "two")
    dcp.save({"model": weights, "optim": optimizer.state_dict()}, checkpoint_id=tmp_path / "raw", no_dist=True)
    with pytest.raises(CheckpointError, match="numbers for parameters"):
        open_checkpoint(tmp_path, "raw")


# -- Hugging Face
@pytest.mark.parametrize("limit", ["1GB", "20KB"])
@pytest.mark.parametrize("tied", [False, True])
def test_what_save_pretrained_wrote_is_loaded_bit_for_bit(tmp_path, limit, tied):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=52,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    first = transformers.LlamaForCausalLM(config)
    first.save_pretrained(tmp_path, max_shard_size=limit)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (limit == "20KB")
    other = zgraph.compile(transformers.LlamaForCausalLM(config), zgraph.Plan(backend="eager"))
    other.load_checkpoint(tmp_path)
    assert differing(dict(first.state_dict()), {n: whole(t) for n, t in other.state_dict().items()}) == []
    if limit == "1GB":
        again = zgraph.compile(transformers.LlamaForCausalLM(config), zgraph.Plan(backend="eager"))
        again.load_checkpoint(tmp_path / "model.safetensors")
        assert differing(dict(first.state_dict()), {n: whole(t) for n, t in again.state_dict().items()}) == []


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "model.bin", "sub/model.safetensors", 7])
def test_an_index_names_files_of_its_folder_alone(tmp_path, name):
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": name}}))
    with pytest.raises(CheckpointError, match="names a file"):
        open_checkpoint(tmp_path)


def test_an_index_that_files_do_not_fit_is_refused(tmp_path):
    save_file({"weight": torch.ones(2)}, tmp_path / "model-1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": "model-1.safetensors", "bias": "model-1.safetensors"}}))
    with pytest.raises(CheckpointError, match="does not hold bias"):
        open_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"weight": "model-1.safetensors", "bias": "model-2.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors is missing"):
        open_checkpoint(tmp_path)
    index.unlink()
    save_file({"weight": torch.ones(2)}, tmp_path / "model-2.safetensors")
    with pytest.raises(CheckpointError, match=r"weight is in model-1\.safetensors too"):
        open_checkpoint(tmp_path)


# -- DeepSpeed
@pytest.mark.gloo
@pytest.mark.parametrize("stage, zero", [(0, 3), (1, 2), (2, 3), (3, 1)])
@pytest.mark.slow
def test_zgraph_goes_on_where_deepspeed_stopped(two, made_by_deepspeed, stage, zero):
    folder, losses = made_by_deepspeed(stage)
    for found in (go_on(str(folder), zero), *two.run(go_on, str(folder), zero)):
        assert found == pytest.approx(losses, rel=1e-5)  # (float32, summed in another order)
    source = open_checkpoint(folder)
    assert isinstance(source, DeepSpeed)
    known = source.known
    assert (known.steps, known.skipped, known.samples, known.world) == (BEFORE, 0, BEFORE * ROWS, 2)
    assert [len(g["names"]) for g in known.groups] == [13, 24] and known.groups[1]["weight_decay"] == 0.0


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.slow
def test_zgraph_goes_on_from_a_universal_checkpoint(two, deepspeeds, made_by_deepspeed, tmp_path, stage):
    folder, losses = made_by_deepspeed(stage)
    deepspeeds.run(universal, str(folder), str(tmp_path))
    for found in two.run(go_on, str(tmp_path), 3):
        assert found == pytest.approx(losses, rel=1e-5)
    one, other = (open_checkpoint(p) for p in (folder, tmp_path))
    assert differing(*({n: s.whole(n) for n in s.tensors} for s in (one, other))) == []


@pytest.mark.gloo
@pytest.mark.slow
def test_all_stages_hold_the_same(made_by_deepspeed):
    found = [open_checkpoint(made_by_deepspeed(stage)[0]) for stage in range(4)]
    first, *others = ({n: s.whole(n) for n in s.tensors} for s in found)
    for other in others:
        assert other.keys() == first.keys()
        assert all(torch.allclose(other[n], first[n], rtol=1e-4, atol=1e-6) for n in first)


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.slow
def test_weights_of_bfloat16_come_from_their_copies_in_float32(made_by_deepspeed, stage):
    folder, losses = made_by_deepspeed(stage, "bf16")
    model = compiled(2, precision="bf16")
    model.load_checkpoint(folder)
    source = open_checkpoint(folder)
    for name, param in model.named_parameters():
        if param.requires_grad:
            held = source.whole(f"model.{name}")
            assert held.dtype is torch.float32 and not torch.equal(held, held.bfloat16().float())
            assert torch.equal(whole(param).float(), held if param.dtype is torch.float32 else held.bfloat16().float())
    found = [mean(model.train_step(*values)) for values in batches(BEFORE, AFTER)]
    assert found == pytest.approx(losses, rel=0.01)  # (two ways to round to bfloat16: 2**-8)


@pytest.mark.gloo
def test_files_that_do_not_belong_together_are_refused(made_by_deepspeed, tmp_path):
    folder, _ = made_by_deepspeed(2)
    tag = (folder / "latest").read_text()

    def copied(name: str) -> Path:
        shutil.copytree(folder, tmp_path / name)
        return tmp_path / name / tag

    place = copied("lost")
    (place / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="the checkpoint is of 2 ranks, but has the optimizer's files of 1"):
        open_checkpoint(tmp_path / "lost")
    place = copied("first")
    (place / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="the file of rank 0 is missing"):
        open_checkpoint(tmp_path / "first")
    place = copied("short")
    path = place / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=f"{path.name} is damaged"):
        open_checkpoint(tmp_path / "short")
    place = copied("parallel")
    (place / "mp_rank_01_model_states.pt").write_bytes(b"")
    with pytest.raises(UnsupportedError, match="tensor parallelism"):
        open_checkpoint(tmp_path / "parallel")
    place = copied("flipped")
    path = place / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda r: r.file_size)
    data = bytearray(path.read_bytes())
    data[largest.header_offset + largest.file_size // 2] ^= 1
    path.write_bytes(data)
    model = compiled()
    before = everything(model)
    with pytest.raises(CheckpointError, match="its checksum is not that of its bytes"):
        model.load_checkpoint(tmp_path / "flipped")
    assert differing(everything(model), before) == []


# -- how partitions are laid out, without DeepSpeed
def stored(tmp_path: Path, value: Any) -> Any:
    """As it is read from a file."""
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.pt"
    torch.save(value, path)
    return TorchFile(path).value


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_partitions_of_any_number_of_ranks_are_put_together(tmp_path, world):
    shapes = {"a": (3, 5), "b": (), "c": (7,), "empty": (0, 4), "d": (2, 2, 2)}
    tensors = {n: torch.randn(s) for n, s in shapes.items()}
    flat = torch.cat([t.reshape(-1) for t in tensors.values()])
    padded = torch.cat([flat, torch.zeros(-len(flat) % (2 * world))]).chunk(world)
    groups = [{"params": [0], "lr": 0.1}]

    def rank(number: int, key: str, part: torch.Tensor, states: torch.Tensor) -> Any:
        base = {"state": {0: {"step": 4, "exp_avg": states.clone()}}, "param_groups": groups}
        if key == "fp32_flat_groups":
            return stored(tmp_path, {key: [part.clone()], "optimizer_state_dict": base})
        return stored(tmp_path, {key: [part.clone()], "base_optimizer_state": base})

    last = len(flat) - sum(map(len, padded[:-1]))
    cut = [p if r + 1 < world else p[: max(0, last)] for r, p in enumerate(padded)]
    ranks = [rank(r, "single_partition_of_fp32_groups", cut[r], 2 * padded[r]) for r in range(world)]
    each = []
    for r in range(world):
        pieces = []
        for t in tensors.values():
            size = -(-t.numel() // world)
            pieces.append(torch.cat([t.reshape(-1), torch.zeros(size * world - t.numel())])[r * size : (r + 1) * size])
        each.append(torch.cat(pieces))
    thirds = [rank(r, "fp32_flat_groups", each[r], 2 * each[r]) for r in range(world)]
    for found in (first_stages([shapes], ranks, tmp_path), third_stage([shapes], thirds, tmp_path)):
        for name, tensor in tensors.items():
            assert torch.equal(found.weights[name].read(), tensor)
            assert torch.equal(found.states[name, "exp_avg"].read(), 2 * tensor)
            assert float(found.states[name, "step"]) == 4
        assert found.groups == [{"names": list(shapes), "lr": 0.1}]
    with pytest.raises(CheckpointError, match="do not fit"):
        first_stages([shapes | {"e": (2 * world,)}], ranks, tmp_path)
    with pytest.raises(CheckpointError, match="do not fit"):
        third_stage([shapes | {"e": (2 * world,)}], thirds, tmp_path)


def stage0(folder: Path, groups: list[list[int]], shapes: list[tuple[int, ...]]) -> Path:
    """A checkpoint without ZeRO of parameters p0, p1, …, as DeepSpeed lays it out; each state has its parameter's number in it."""
    weights = {f"p{i}": torch.full(s, float(i)) for i, s in enumerate(shapes)}
    order = [i for group in groups for i in group]
    state = {n: {"step": 1, "exp_avg": torch.full(shapes[i], float(i))} for n, i in enumerate(order)}
    numbers = iter(range(len(order)))
    described = [{"lr": 0.1, "params": [next(numbers) for _ in group]} for group in groups]
    optimizer = {"state": state, "param_groups": described}
    folder.mkdir(parents=True)
    torch.save({"module": weights, "buffer_names": [], "optimizer": optimizer}, folder / "mp_rank_00_model_states.pt")
    return folder


@pytest.mark.parametrize("deep", [19, 21, 40])
def test_a_short_pickle_that_would_be_long_when_written_out_is_refused(tmp_path, deep):
    value: Any = [0.1, 0.2]
    for _ in range(deep):
        value = [value, value]
    found = stored(tmp_path, {"betas": value, "params": [0]})
    with pytest.raises(CheckpointError, match="holds too much"):
        plain_group(found)
    assert plain_group({"betas": (0.9, [1, None]), "lr": 1, "params": [0], "hook": object()}) == {
        "betas": [0.9, [1, None]],
        "lr": 1,
        "hook": None,
    }


def test_without_zero_states_go_to_the_only_parameters_that_fit(tmp_path):
    shapes = [(3, 2), (3,), (5,), (2, 3), (2,), (5,)]
    source = open_checkpoint(stage0(tmp_path / "two", [[0, 3], [1, 2, 4, 5]], shapes))
    for i in range(6):
        assert float(source.whole(f"optimizer.state.p{i}.exp_avg").flatten()[0]) == i
    source = open_checkpoint(stage0(tmp_path / "frozen", [[0, 2, 3, 4, 5]], shapes))
    assert "optimizer.state.p1.exp_avg" not in source.tensors
    with pytest.raises(CheckpointError, match="several ways"):  # (which (5,) is frozen?)
        open_checkpoint(stage0(tmp_path / "ambiguous", [[0, 3], [1, 5]], [(3, 2), (3,), (5,), (2, 3), (5,), (5,)]))
    with pytest.raises(CheckpointError, match="no order"):
        open_checkpoint(stage0(tmp_path / "reversed", [[5, 4, 3, 2, 1, 0]], shapes))


# -- conversion
@pytest.mark.gloo
@sweep("kind", ["nested", "safetensors"], quick=1)
def test_a_conversion_holds_the_same_in_either_form(two, made_by_torch, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(converting, "FILE_BYTES", 20_000)  # (several files, then)
    folder, saved = made_by_torch(kind)
    convert(open_checkpoint(folder), tmp_path / "native", "one")
    assert len(list((tmp_path / "native/one").glob("*.safetensors"))) > 3
    for found in (loaded(str(tmp_path / "native")), *two.run(loaded, str(tmp_path / "native"))):
        assert differing(found, saved) == []
    if kind == "nested":  # (the other has no head.weight, which torch would look for)
        by_torch = two.run(read_by_torch, str(tmp_path / "native/one"))[0]
        assert differing(by_torch, {n: saved[n] for n in built().state_dict()}) == []
    place = convert(open_checkpoint(tmp_path / "native"), tmp_path, "plain", "dcp")
    assert isinstance(open_checkpoint(tmp_path, "plain"), PlainDcp)
    assert differing(loaded(str(place)), saved) == []
    held = {n.removeprefix("model.") for n in open_checkpoint(place).tensors}
    wanted = {"model": {n: torch.zeros_like(t) for n, t in built().state_dict().items() if n in held}}
    assert len(wanted["model"]) >= len(list(built().parameters()))
    dcp.load(wanted, checkpoint_id=place, no_dist=True)
    assert differing(wanted["model"], {n: saved[n] for n in wanted["model"]}) == []


def test_a_conversion_of_zgraphs_own_keeps_what_users_added(tmp_path):
    model = compiled()
    model.train_step(*batches(0, 1)[0])
    model.save_checkpoint(tmp_path / "one", client_state={"epoch": 3, "table": torch.arange(4)})
    convert(open_checkpoint(tmp_path / "one"), tmp_path / "other", "again")
    other = compiled(1)
    client = other.load_checkpoint(tmp_path / "other")
    assert client["epoch"] == 3 and torch.equal(client["table"], torch.arange(4))
    assert differing(everything(other), everything(model)) == []


def test_a_conversion_that_fails_leaves_nothing(tmp_path, monkeypatch):
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    source = open_checkpoint(tmp_path / "model.safetensors")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(converting, "write", full)
    with pytest.raises(CheckpointError, match="No space left"):
        convert(source, tmp_path / "out", "one")
    assert list((tmp_path / "out").iterdir()) == []
    (tmp_path / "out/two").mkdir()
    with pytest.raises(CheckpointError, match="something already"):
        convert(source, tmp_path / "out", "two", "dcp")


# -- what is what
def test_each_kind_is_known_by_what_lies_in_the_folder(tmp_path):
    save_file({"weight": torch.ones(2)}, tmp_path / "weights.safetensors")
    assert isinstance(open_checkpoint(tmp_path), Safetensors)
    dcp.save({"model": {"weight": torch.ones(2)}}, checkpoint_id=tmp_path, no_dist=True)
    assert isinstance(open_checkpoint(tmp_path), PlainDcp)
    stage0(tmp_path / "tag", [[0]], [(3, 2)])
    (tmp_path / "latest").write_text("tag")
    assert isinstance(open_checkpoint(tmp_path), DeepSpeed)
    convert(open_checkpoint(tmp_path), tmp_path, "own")
    assert isinstance(open_checkpoint(tmp_path), Checkpoint)


def test_a_folder_that_is_no_checkpoint_is_described(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "inner").mkdir()
    save_file({"weight": torch.ones(2)}, tmp_path / "inner/model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"no checkpoint of a known format(.|\n)*notes\.txt(.|\n)*are checkpoints: inner"
    ):
        open_checkpoint(tmp_path)
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(CheckpointError, match="is no tag"):
        open_checkpoint(tmp_path)
    convert(open_checkpoint(tmp_path / "inner"), tmp_path / "own", "tag")
    (tmp_path / "own/latest").write_text("tag")  # (cut off: zgraph's own has a checksum after it)
    with pytest.raises(CheckpointError, match="latest is damaged"):
        open_checkpoint(tmp_path / "own")


# -- what is refused
class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def plain_folder(place: Path) -> tuple[Path, Any]:
    dcp.save({"model": {"weight": torch.arange(6.0).view(2, 3)}}, checkpoint_id=place, no_dist=True)
    return place, pickle.loads((place / ".metadata").read_bytes())


def test_what_a_metadata_pickle_would_run_is_refused_and_not_run(tmp_path):
    place, found = plain_folder(tmp_path / "one")
    found.planner_data["payload"] = Payload(tmp_path / "executed")
    (place / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(CheckpointError, match=r"names (posix|os)\.system"):
        open_checkpoint(place)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda info: setattr(info, "relative_path", "../__0_0.distcp"),
        lambda info: setattr(info, "relative_path", "/etc/passwd"),
        lambda info: setattr(info, "offset", -1),
        lambda info: setattr(info, "offset", 10**6),
        lambda info: setattr(info, "length", 2**62),
        lambda info: setattr(info, "length", 100),
        lambda info: setattr(info, "transform_descriptors", ["zstd"]),
    ],
)
def test_places_outside_of_a_file_are_refused(tmp_path, change):
    place, found = plain_folder(tmp_path / "one")
    for info in found.storage_data.values():
        change(info)
    (place / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(CheckpointError):
        open_checkpoint(place).verify()


@pytest.mark.parametrize("size", [(2**40, 2**20), (3, 3), (2,), (2, -3)])
def test_shapes_that_blocks_do_not_fill_are_refused(tmp_path, size):
    place, found = plain_folder(tmp_path / "one")
    entry = found.state_dict_metadata["model.weight"]
    entry.size = size if min(size) < 0 else torch.Size(size)
    (place / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(CheckpointError):
        open_checkpoint(place)
    entry.chunks[0].sizes = torch.Size(max(n, 0) for n in size)
    entry.chunks[0].offsets = torch.Size([0] * len(size))
    (place / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(CheckpointError):
        source = open_checkpoint(place)
        source.block("model.weight", source.tensors["model.weight"].blocks[0])


def test_every_truncation_of_a_plain_folder_is_found(tmp_path):
    place, _ = plain_folder(tmp_path / "one")
    for path in sorted(place.iterdir()):
        data = path.read_bytes()
        for length in range(0, len(data) - 1, max(1, len(data) // 40)):
            path.write_bytes(data[:length])
            with pytest.raises(CheckpointError):
                open_checkpoint(place).verify()
        path.write_bytes(data)
    open_checkpoint(place).verify()


def test_a_payload_in_a_torch_file_is_not_run_and_nothing_is_imported(tmp_path):
    value = {"module": {"weight": torch.ones(2)}, "hook": Payload(tmp_path / "executed"), "buffer_names": []}
    (tmp_path / "here").mkdir()
    path = tmp_path / "here/mp_rank_00_model_states.pt"
    torch.save(value, path)
    found = TorchFile(path).value["hook"]
    assert isinstance(found, Inert) and found.args == (f"touch {tmp_path / 'executed'}",)
    assert torch.equal(open_checkpoint(tmp_path / "here").whole("model.weight"), torch.ones(2))
    assert not (tmp_path / "executed").exists()


def repickled(path: Path, change: Any) -> None:
    """The archive with another `data.pkl`."""
    with zipfile.ZipFile(path) as archive:
        records = {r.filename: archive.read(r) for r in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in records.items():
            archive.writestr(name, change(data) if name.endswith("/data.pkl") else data)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"K\x06", b"J\xff\xff\xff\x7f"),  # a storage and a tensor of 2**31 - 1 elements
        (b"K\x02K\x03\x86", b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86"),  # a shape
        (b"K\x02K\x03\x86", b"J\xff\xff\xff\xffK\x03\x86"),  # a negative size
        (b"K\x03K\x01\x86", b"J\xff\xff\xff\x7fK\x01\x86"),  # a stride
        (b"FloatStorage", b"AloatStorage"),  # a storage that there is none of
        (b"X\x07\x00\x00\x00storage", b"X\x07\x00\x00\x00another"),  # a reference to something else
        (b"\x80\x02", b"\x80\x02r\xff\xff\xff\xff"),  # a memory of 2**32 places
        (b"}q", b"cbuiltins\neval\n}q"),  # (left on the stack)
    ],
)
def test_tensors_beyond_their_storage_are_refused(tmp_path, old, new):
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.arange(6.0).view(2, 3)}, path)
    assert torch.equal(TorchFile(path).value["weight"].read(), torch.arange(6.0).view(2, 3))
    repickled(path, lambda data: data.replace(old, new, 1))
    with pytest.raises(CheckpointError, match=r"weights\.pt is damaged"):
        found = TorchFile(path).value
        assert not isinstance(found.get("weight") if isinstance(found, dict) else found, torch.Tensor)
        raise CheckpointError("weights.pt is damaged") if "eval" in str(new) else AssertionError(found)


def test_a_state_cannot_change_what_is_not_the_pickles(tmp_path):
    path = tmp_path / "weights.pt"
    torch.save({}, path)
    for named in (b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nSize\n", b"ccollections\nOrderedDict\n"):
        changed = b"\x80\x02" + named + b"}X\x0c\x00\x00\x00__defaults__)s\x86b."
        repickled(path, lambda _, changed=changed: changed)
        with pytest.raises(CheckpointError, match="damaged"):
            TorchFile(path)


def test_all_dtypes_strides_and_views_are_read_as_torch_reads_them(tmp_path):
    dtypes = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool]
    dtypes += [torch.complex64, torch.float8_e4m3fn, torch.uint16]
    base = torch.arange(24.0).view(2, 3, 4)
    value = {str(d): base.to(d) for d in dtypes} | {
        "transposed": base.transpose(0, 2),
        "view": base[:, 1:, 2],
        "scalar": base[1, 2, 3],
        "empty": torch.empty(0, 3),
        "parameter": nn.Parameter(base),
    }
    torch.save(value, tmp_path / "all.pt")
    found, expected = TorchFile(tmp_path / "all.pt"), torch.load(tmp_path / "all.pt", weights_only=True)
    found.verify()
    for name, stored_tensor in found.value.items():
        assert stored_tensor.dtype is expected[name].dtype and stored_tensor.shape == expected[name].shape
        assert torch.equal(stored_tensor.read().to(torch.complex128), expected[name].detach().to(torch.complex128)), (
            name
        )


@pytest.mark.parametrize("what", ["link", "pipe"])
def test_links_and_pipes_are_no_files_of_a_checkpoint(tmp_path, what):
    place, _ = plain_folder(tmp_path / "one")
    path = next(place.glob("*.distcp"))
    path.rename(tmp_path / "aside")
    path.symlink_to(tmp_path / "aside") if what == "link" else os.mkfifo(path)
    with pytest.raises(CheckpointError):
        open_checkpoint(place).verify()
    assert not (place / manifest.NAME).exists()
