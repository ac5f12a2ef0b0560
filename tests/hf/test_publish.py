"""What a compiled model publishes, `from_pretrained` reads: equal bit for bit, written by all ranks, gathered by none.

Functions at the top of this file run on the ranks; each returns what the test compares.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from safetensors.torch import load_file
from sweeps import sweep
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import zgraph
from zgraph.checkpoint import write_pretrained as publishing
from zgraph.checkpoint.detect_format import open_checkpoint
from zgraph.checkpoint.pretrained import View
from zgraph.checkpoint.source import Block
from zgraph.checkpoint.write_pretrained import export
from zgraph.deepspeed.config_sections import publishing as of_deepspeed
from zgraph.errors import CheckpointError, PlanError, StepError, UnsupportedError

LOW = {"precision": "bf16", "numerics": "deepspeed"}
NEW: dict[str, Any] = {"steps": 0}  # where it is not about what training makes of a model
NAMES = ["llama", "gpt2", "bert", "t5", "mixtral"]


class Mixed(nn.Module):
    """Rows that no world here divides, one row, none at all but a number, another memory format, ties, and buffers of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.first = nn.Linear(5, 7)
        self.again = nn.Linear(5, 7, bias=False)
        self.again.weight = self.first.weight
        self.head = nn.Linear(7, 1)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("unsaved", torch.ones(2), persistent=False)
        self.to(memory_format=torch.channels_last)

    def forward(self, x, y):
        hidden = self.norm(self.conv(x.to(self.conv.weight.dtype))).mean((2, 3))
        return (self.head(self.first(hidden) * self.gain + self.again(hidden)) - y).pow(2).mean()


def mixed() -> models.Case:
    torch.manual_seed(0)
    return models.Case(Mixed(), (torch.randn(24, 3, 6, 6), torch.randn(24, 1)))


class Heard(TorchDispatchMode):
    """The bytes that collectives carry."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            leaves = torch.utils._pytree.tree_leaves((args, kwargs))
            self.bytes += sum(t.numel() * t.element_size() for t in leaves if isinstance(t, torch.Tensor))
        return func(*args, **(kwargs or {}))


def forbidden(*_: Any, **__: Any) -> Any:
    raise AssertionError("a weight is gathered")


def mine(inputs: Any) -> Any:
    """This rank's rows of a batch."""
    if not dist.is_initialized():
        return inputs
    cut = lambda t: t.chunk(dist.get_world_size())[dist.get_rank()]  # noqa: E731
    return {k: cut(v) for k, v in inputs.items()} if isinstance(inputs, dict) else tuple(map(cut, inputs))


def trained(name: str, steps: int = 2, **fields: Any) -> nn.Module:
    case = mixed() if name == "mixed" else models.build(name)
    fields = {"backend": "eager", "optimizer": zgraph.AdamW(lr=1e-2)} | fields
    model = zgraph.compile(case.model, zgraph.Plan(**fields))
    batch = mine(case.inputs)
    for _ in range(steps):
        model.train_step(**batch) if isinstance(batch, dict) else model.train_step(*batch)
    return model


def whole(value: torch.Tensor) -> torch.Tensor:
    """Gathered; where a test has to, to compare."""
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone().contiguous()


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {k: whole(v) for k, v in model.state_dict().items()}


def masters(model: nn.Module) -> dict[str, torch.Tensor]:
    names = {id(p): n for n, p in model.named_parameters()}
    return {names[id(p)]: whole(s["master"]) for p, s in model.zgraph.optimizer.state.items()}


def save_quietly(model: nn.Module, folder: str, **given: Any) -> int:
    """Publish while nothing can gather; the bytes that ranks exchanged."""
    held = DTensor.full_tensor, DTensor.redistribute, dist.all_gather_into_tensor, dist.broadcast, dist.gather
    DTensor.full_tensor = DTensor.redistribute = forbidden
    dist.all_gather_into_tensor = dist.broadcast = dist.gather = forbidden
    try:
        with Heard() as heard:
            model.save_pretrained(folder, **given)
    finally:
        DTensor.full_tensor, DTensor.redistribute = held[:2]
        dist.all_gather_into_tensor, dist.broadcast, dist.gather = held[2:]
    return heard.bytes


def published(name: str, folder: str, fields: dict[str, Any], given: dict[str, Any]) -> tuple[Any, Any, int]:
    """(the weights, their masters, the bytes that ranks exchanged to publish them)."""
    model = trained(name, **fields)
    heard = save_quietly(model, folder, **given)
    return state_of(model), masters(model) if fields.get("numerics") else {}, heard


def published_on_many(folder: str, cases: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> list[Any]:
    return [published(name, f"{folder}/{i}", *rest) for i, (name, *rest) in enumerate(cases)]


def out_of_room(folder: str) -> None:
    model = trained("mixed", zero=3, **NEW)
    if dist.get_rank() == 1:

        def full(*_: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        held, publishing.os.pwrite = os.pwrite, full
    try:
        model.save_pretrained(folder)
    finally:
        if dist.get_rank() == 1:
            publishing.os.pwrite = held


def other_arguments(folder: str) -> None:
    trained("mixed", zero=3, **NEW).save_pretrained(folder, averaged=dist.get_rank() == 1)


def averages(folder: str, zero: int) -> dict[str, torch.Tensor]:
    model = trained("mixed", zero=zero, ema=0.5, **LOW)
    save_quietly(model, folder, averaged=True, dtype="fp32")
    names = {id(p): n for n, p in model.named_parameters()}
    found = {names[id(p)]: whole(s["ema"]) for p, s in model.zgraph.optimizer.state.items()}
    return {k: whole(v) for k, v in model.state_dict().items()} | found


# -- what tests compare with ------------------------------------------------------------------------------------------
def files_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, as `from_pretrained` finds them."""
    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {n: load_file(folder / f)[n] for n, f in index["weight_map"].items()}
    assert sum(t.nbytes for t in found.values()) == index["metadata"]["total_size"]
    return found


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype is tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


def by_transformers(name: str, state: dict[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    """What transformers itself writes of a plain model with these weights."""
    model = with_weights(name, state)
    model.save_pretrained(folder)
    return files_of(folder)


def with_weights(name: str, state: dict[str, torch.Tensor]) -> nn.Module:
    model = models.build(name).model
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    return model.eval()


def assert_loads(name: str, folder: Path, state: dict[str, torch.Tensor]) -> None:
    """`from_pretrained` finds every weight, in the dtype of the config, and computes the same."""
    plain = with_weights(name, state)
    loaded, info = type(plain).from_pretrained(
        folder, output_loading_info=True, attn_implementation=plain.config._attn_implementation
    )
    assert not any(info.values()), info
    assert loaded.dtype is plain.dtype
    inputs = models.build(name).inputs
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**inputs).logits, plain(**inputs).logits)
    assert_equal(dict(loaded.state_dict()), state)


def mixed_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v for k, v in state.items() if k != "again.weight"}


# -- one process ------------------------------------------------------------------------------------------------------
@sweep("name, fields", [(name, fields) for fields in ({}, LOW) for name in NAMES], quick=(6,))
def test_from_pretrained_reads_the_trained_weights_and_computes_the_same(name, fields, tmp_path):
    state, _, _ = published(name, str(tmp_path / "one"), fields, {})
    assert_loads(name, tmp_path / "one", state)
    assert_equal(files_of(tmp_path / "one"), by_transformers(name, state, tmp_path / "other"))
    for file in ("config.json", "generation_config.json"):
        one, other = tmp_path / "one" / file, tmp_path / "other" / file
        assert one.exists() == other.exists() and (not one.exists() or one.read_text() == other.read_text())


def test_a_tied_weight_is_in_the_file_once_and_tied_again(tmp_path):
    state, _, _ = published("t5", str(tmp_path), NEW, {})
    assert "lm_head.weight" in state and "lm_head.weight" not in files_of(tmp_path)
    loaded = type(models.build("t5").model).from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.shared.weight is loaded.encoder.embed_tokens.weight


@pytest.mark.slow
def test_a_plain_module_has_the_tensors_of_its_state_dict_and_no_config(tmp_path):
    state, _, _ = published("mixed", str(tmp_path), {}, {})
    assert_equal(files_of(tmp_path), mixed_state(state))
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    assert "unsaved" not in state and state["gain"].shape == ()
    assert state["norm.num_batches_tracked"] == 2


@pytest.mark.slow
def test_fp32_comes_from_the_masters_and_the_config_says_so(tmp_path):
    state, wide, _ = published("gpt2", str(tmp_path), LOW, {"dtype": "fp32"})
    found = files_of(tmp_path)
    assert any(not torch.equal(wide[n], state[n].float()) for n in wide)
    assert_equal({n: found[n] for n in wide}, wide)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    assert type(models.build("gpt2").model).from_pretrained(tmp_path).dtype is torch.float32


@pytest.mark.parametrize("dtype", ["bf16", torch.float16])
def test_a_dtype_casts_what_is_floating_point(dtype, tmp_path):
    state, _, _ = published("mixed", str(tmp_path), NEW, {"dtype": dtype})
    low = torch.bfloat16 if dtype == "bf16" else torch.float16
    assert_equal(
        files_of(tmp_path), {k: v.to(low) if v.is_floating_point() else v for k, v in mixed_state(state).items()}
    )


def test_small_files_have_an_index_that_from_pretrained_reads(tmp_path):
    state, _, _ = published("mixtral", str(tmp_path / "one"), NEW, {"max_shard_size": "10KB"})
    files = sorted(p.name for p in (tmp_path / "one").glob("*.safetensors"))
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))] and len(files) > 5
    assert_loads("mixtral", tmp_path / "one", state)
    assert_equal(files_of(tmp_path / "one"), by_transformers("mixtral", state, tmp_path / "other"))


def test_a_weight_that_was_written_after_the_step_is_published_not_its_old_master(tmp_path, caplog):
    model = trained("mixed", **LOW)
    with torch.no_grad():
        model.head.weight.fill_(3.0)
    model.save_pretrained(tmp_path, dtype="fp32")
    assert torch.equal(files_of(tmp_path)["head.weight"], torch.full((1, 7), 3.0))
    assert "head.weight" in caplog.text and "changed since the last step" in caplog.text


def test_an_export_takes_such_a_weight_too_and_not_its_old_master(tmp_path, caplog):
    model = trained("mixed", **LOW)
    with torch.no_grad():
        model.head.weight.fill_(3.0)
    model.save_checkpoint(tmp_path / "run")
    (file,) = export(open_checkpoint(tmp_path / "run"), tmp_path / "files", dtype="fp32")
    found, wide = load_file(file), masters(model)
    assert torch.equal(found["head.weight"], torch.full((1, 7), 3.0))
    assert "1 weights" in caplog.text and "head.weight" in caplog.text and "changed since the last step" in caplog.text
    assert_equal(
        {n: found[n] for n in wide if n != "head.weight"}, {n: t for n, t in wide.items() if n != "head.weight"}
    )


def test_values_that_fp16_can_not_hold_are_refused(tmp_path):
    model = trained("mixed", **NEW)
    with torch.no_grad():
        model.gain.fill_(1e6)
    with pytest.raises(CheckpointError, match="gain has values that float16 can't hold"):
        model.save_pretrained(tmp_path, dtype="fp16")
    assert list(tmp_path.iterdir()) == []


def test_weights_that_lie_on_disk_are_published_from_there(tmp_path):
    away = {"parameters": f"nvme:{tmp_path}", "optimizer": f"nvme:{tmp_path}", "least_bytes": 0}
    state, wide, _ = published("mixed", str(tmp_path / "to"), {"offload": away} | LOW, {"dtype": "fp32"})
    found = files_of(tmp_path / "to")
    assert_equal({n: found[n] for n in wide}, wide)
    assert found.keys() == mixed_state(state).keys()


def test_an_update_that_runs_late_is_in_what_is_published(tmp_path):
    away = {"optimizer": "cpu", "least_bytes": 0, "delayed_after": 0}
    model = trained("mixed", offload=away)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.save_pretrained(tmp_path / "to")
    assert any(not torch.equal(before[n], p) for n, p in model.named_parameters())
    assert_equal(files_of(tmp_path / "to"), mixed_state(state_of(model)))


def test_averages_are_published_where_they_are_asked_for(tmp_path):
    found = averages(str(tmp_path), 0)
    wanted = {k: v.float() if v.is_floating_point() else v for k, v in mixed_state(found).items()}
    assert_equal(files_of(tmp_path), wanted)


def test_averages_that_there_are_none_of_are_refused(tmp_path):
    with pytest.raises(StepError, match="keeps no average"):
        trained("mixed").save_pretrained(tmp_path, averaged=True)


@pytest.mark.parametrize(
    "given", [{"dtype": "bf15"}, {"dtype": torch.int8}, {"max_shard_size": "much"}, {"max_shard_size": 0}]
)
def test_arguments_that_mean_nothing_are_refused(given, tmp_path):
    with pytest.raises(CheckpointError):
        zgraph.compile(mixed().model).save_pretrained(tmp_path / "one", **given)
    assert not (tmp_path / "one").exists()


def test_transformers_own_arguments_are_refused_not_ignored(tmp_path):
    with pytest.raises(TypeError, match="push_to_hub"):
        zgraph.compile(models.build("gpt2").model).save_pretrained(tmp_path, push_to_hub=True)


def test_a_state_dict_is_the_models_own_or_refused(tmp_path):
    model = zgraph.compile(mixed().model)
    own = model.state_dict()
    model.save_pretrained(tmp_path / "one", state_dict=own)
    model.save_pretrained(tmp_path / "one", state_dict={n: t.clone() for n, t in own.items()})
    first = next(iter(own))
    for other in ({}, {**own, "more": torch.ones(2)}, {**own, first: own[first] + 1}):
        with pytest.raises(UnsupportedError, match="state_dict is not that of the model"):
            model.save_pretrained(tmp_path / "two", state_dict=other)
    assert (tmp_path / "one").exists() and not (tmp_path / "two").exists()


# -- whose method it is -----------------------------------------------------------------------------------------------
class WithItsOwn(Mixed):
    def save_pretrained(self, folder):
        return f"my own: {folder}"


def test_a_method_of_the_users_stays_and_that_of_transformers_does_not(tmp_path):
    assert zgraph.compile(WithItsOwn()).save_pretrained("x") == "my own: x"
    model = zgraph.compile(models.build("gpt2").model)
    assert model.save_pretrained.__self__ is model.zgraph
    twin = copy.deepcopy(model)
    assert twin.save_pretrained.__self__ is twin.zgraph is not model.zgraph


def test_what_safetensors_can_not_hold_is_refused(tmp_path):
    class Extra(Mixed):
        def get_extra_state(self):
            return {"seen": 3}

    with pytest.raises(UnsupportedError, match="can't be published"):
        zgraph.compile(Extra()).save_pretrained(tmp_path)


def test_a_weight_that_files_have_in_more_than_parts_is_refused(tmp_path, monkeypatch):
    from transformers import core_model_loading

    model = zgraph.compile(models.build("gpt2").model)
    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", lambda m, s: {n: t + 1 for n, t in s.items()})
    with pytest.raises(UnsupportedError, match="more than taking a part of it"):
        model.save_pretrained(tmp_path)


def test_a_transposed_weight_is_written_transposed(tmp_path, monkeypatch):
    from transformers import core_model_loading

    def turned(model, state):
        return {n: t.transpose(0, -1).contiguous() if t.dim() else t for n, t in state.items()}

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", turned)
    state, _, _ = published("llama", str(tmp_path), NEW, {})
    assert_equal(files_of(tmp_path), {n: t.transpose(0, -1).contiguous() for n, t in state.items()})


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("shape", [(6, 4, 5), (7, 4), (12,), (1, 8)])
def test_what_ranks_cut_out_of_their_rows_is_all_of_a_view(shape, world):
    whole = torch.arange(math.prod(shape)).reshape(shape)
    parts = [whole, whole.transpose(0, -1), whole[1:], whole.unsqueeze(0), *whole.unbind(0)]
    parts += [piece for dim in range(whole.dim()) for piece in whole.chunk(2, dim)]
    parts += [whole.flatten(1), *(piece[-1].t() for piece in whole.chunk(2, 1))] if whole.dim() == 3 else []
    rows = -(-shape[0] // world)
    for part in parts:
        view = View("x", "y", tuple(part.shape), part.stride(), part.storage_offset())
        made = torch.full(part.shape, -1)
        for held in whole.split(rows):
            block = Block((int(held.flatten()[0]) // math.prod(shape[1:]), *[0] * (len(shape) - 1)), tuple(held.shape))
            found = view.cut(shape, block, held.clone())
            if found is not None:
                box, numbers = found
                into = made[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
                assert bool((into == -1).all()) and into.shape == numbers.shape
                into.copy_(numbers)
        assert torch.equal(made, part)


def test_parts_that_go_across_rows_are_refused():
    for part in (torch.zeros(6, 4).reshape(2, 3, 4), torch.zeros(6, 4).flatten(), torch.zeros(6, 4)[::2]):
        view = View("x", "y", tuple(part.shape), part.stride(), part.storage_offset())
        with pytest.raises(UnsupportedError, match="more than taking a part"):
            view.cut((6, 4), Block((0, 0), (6, 4)), torch.zeros(6, 4))


# -- what is there before ---------------------------------------------------------------------------------------------
def test_publishing_again_replaces_all_files_and_leaves_others_alone(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / ".publishing").mkdir()
    (tmp_path / ".publishing" / "model.safetensors").write_text("left by one that was killed")
    model = trained("mixed", **NEW)
    for size in ("100B", "5GB", "200B", "150B"):
        with torch.no_grad():
            model.gain.add_(1)
        model.save_pretrained(tmp_path, max_shard_size=size)
        found = files_of(tmp_path)
        assert_equal(found, mixed_state(state_of(model)))
        there = {p.name for p in tmp_path.iterdir()} - {"tokenizer.json"}
        index = tmp_path / "model.safetensors.index.json"
        listed = set(json.loads(index.read_text())["weight_map"].values()) | {index.name} if index.exists() else set()
        assert there == (listed or {"model.safetensors"})
    assert (tmp_path / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize(
    "sizes", [("5GB", "5GB"), ("100B", "100B"), ("100B", "5GB"), ("5GB", "100B"), ("100B", "300B")]
)
def test_a_reader_never_finds_parts_of_two_models(sizes, tmp_path, monkeypatch):
    model = trained("mixed", **NEW)
    model.save_pretrained(tmp_path, max_shard_size=sizes[0])
    old = mixed_state(state_of(model))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    new = mixed_state(state_of(model))
    seen = []

    def look() -> None:
        try:
            found = files_of(tmp_path)
        except FileNotFoundError:
            return
        found = {n: found[n] for n in ("gain", "conv.weight", "first.weight", "head.bias")}
        which = [all(torch.equal(t, state[n]) for n, t in found.items()) for state in (old, new)]
        assert any(which)
        seen.append(which.index(True))

    for name in ("rename", "unlink"):
        done = getattr(Path, name)

        def watched(self, *args, done=done, **kwargs):
            look()
            result = done(self, *args, **kwargs)
            look()
            return result

        monkeypatch.setattr(Path, name, watched)
    model.save_pretrained(tmp_path, max_shard_size=sizes[1])
    assert seen == sorted(seen) and seen[0] == 0 and seen[-1] == 1


def llama_of(width: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(width)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32}
    made = LlamaForCausalLM(LlamaConfig(hidden_size=width, intermediate_size=16, **sizes))
    return zgraph.compile(made, zgraph.Plan(backend="eager"))


@pytest.mark.parametrize("size", ["5GB", "2KB"])
def test_a_failure_between_any_two_moves_leaves_no_config_beside_the_weights_of_another(size, tmp_path, monkeypatch):
    llama_of(8).save_pretrained(tmp_path / "old", max_shard_size="5GB")
    model, moves = llama_of(16), 0
    done = {name: getattr(Path, name) for name in ("rename", "unlink")}

    def failing(name: str, which: int) -> Any:
        def move(self, *args, **kwargs):
            nonlocal moves
            moves += 1
            if moves > which:
                raise OSError(errno.EIO, "the disk fails")
            return done[name](self, *args, **kwargs)

        return move

    for which in range(100):
        folder, moves = shutil.copytree(tmp_path / "old", tmp_path / str(which)), 0
        with monkeypatch.context() as patched:
            for name in done:
                patched.setattr(Path, name, failing(name, which))
            try:
                model.save_pretrained(folder, max_shard_size=size)
            except CheckpointError as error:
                assert "the disk fails" in error.why
            else:
                break
        there = (folder / "config.json").exists()
        width = json.loads((folder / "config.json").read_text())["hidden_size"] if there else None
        try:
            found = files_of(folder)["lm_head.weight"].shape[1]
        except FileNotFoundError:
            continue
        assert width in (None, found)
    assert which >= 3 and json.loads((folder / "config.json").read_text())["hidden_size"] == 16
    assert files_of(folder)["lm_head.weight"].shape == (32, 16)


def test_an_interrupt_leaves_what_was_there(tmp_path, monkeypatch):
    model = trained("mixed", **NEW)
    model.save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()

    def interrupted(*_: Any) -> int:
        raise KeyboardInterrupt

    with torch.no_grad():
        model.gain.add_(1)
    with monkeypatch.context() as patched:
        patched.setattr(publishing.os, "pwrite", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.save_pretrained(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_write_that_is_cut_short_goes_on(tmp_path, monkeypatch):
    held = os.pwrite
    monkeypatch.setattr(publishing.os, "pwrite", lambda d, data, at: held(d, data[:7], at))
    state, _, _ = published("mixed", str(tmp_path), NEW, {})
    assert_equal(files_of(tmp_path), mixed_state(state))


def test_large_tensors_are_written_some_rows_at_a_time(tmp_path, monkeypatch):
    sizes, data_of = [], publishing.data_of
    monkeypatch.setattr(publishing, "CHUNK", 2 * 27 * 2)  # two rows of the convolution, in bf16
    monkeypatch.setattr(publishing, "data_of", lambda tensor: sizes.append(tensor.nbytes) or data_of(tensor))
    state, _, _ = published("mixed", str(tmp_path), NEW, {"dtype": "bf16"})
    assert max(sizes) == 2 * 27 * 2 and state["conv.weight"].numel() == 5 * 27
    assert torch.equal(files_of(tmp_path)["conv.weight"], state["conv.weight"].bfloat16())


def test_a_folder_that_can_not_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be published"):
        zgraph.compile(mixed().model).save_pretrained(tmp_path / "file")


# -- ranks ------------------------------------------------------------------------------------------------------------
ON_TWO = [
    *((name, {"zero": 3} | LOW, {}) for name in NAMES),
    ("mixed", {"zero": 3} | LOW, {"dtype": "fp32", "max_shard_size": "150B"}),
    ("mixed", {"zero": 0}, {}),
    ("mixed", {"zero": 3, "mesh": {"replicate": 2, "dp": 1}}, {}),
    ("gpt2", {"zero": 0} | LOW, {"dtype": "fp32"}),
]
ON_THREE = [
    ("llama", {"zero": 3}, {"max_shard_size": "20KB"}),
    ("mixtral", {"zero": 3} | LOW, {"max_shard_size": "10KB"}),
    ("mixed", {"zero": 3} | LOW, {}),
    ("mixed", {"zero": 0} | LOW, {"dtype": "fp32"}),
]
ONE_OF_EACH = [
    ("gpt2", {"zero": 3} | NEW, {"max_shard_size": "20KB"}),
    ("mixed", {"zero": 3} | LOW, {"dtype": "fp32"}),
    ("mixed", {"zero": 0}, {}),
]


@pytest.mark.gloo
@sweep(
    "world, cases",
    [(2, ON_TWO), (3, ON_THREE), (2, ONE_OF_EACH)],
    quick=1,
    ids=["two ranks", "three ranks", "two ranks, one of each kind"],
)
def test_ranks_write_what_each_holds_and_gather_nothing(two, world, cases, tmp_path):
    with contextlib.nullcontext(two) if world == 2 else Ranks(world) as ranks:
        results = ranks.run(published_on_many, str(tmp_path), cases)
    for i, (name, _, given) in enumerate(cases):
        state, wide, _ = results[0][i]
        folder, total = tmp_path / str(i), sum(t.nbytes for t in state.values())
        # (signatures and digests, not weights: as much whatever the model's size)
        assert all(result[i][2] < 12_000 for result in results), (total, [result[i][2] for result in results])
        if given.get("dtype") == "fp32":
            state = {k: wide.get(k, v.float() if v.is_floating_point() else v) for k, v in state.items()}
        if name == "mixed":
            assert_equal(files_of(folder), mixed_state(state))
        elif not given.get("dtype"):
            assert_loads(name, folder, state)
            assert_equal(files_of(folder), by_transformers(name, state, tmp_path / f"{i} by transformers"))
        else:
            found = files_of(folder)
            assert_equal({n: found[n] for n in wide}, wide)


@pytest.mark.gloo
def test_a_disk_that_is_full_on_one_rank_leaves_the_model_that_was_there(two, tmp_path):
    two.run(published, "mixed", str(tmp_path), {"zero": 3} | NEW, {"max_shard_size": "100B"})
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    outcomes = two.attempt(out_of_room, str(tmp_path))
    assert [type(o.error) for o in outcomes] == [CheckpointError, CheckpointError]
    assert "No space left" in str(outcomes[1].error) and "rank 1 could not publish" in str(outcomes[0].error)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    two.run(published, "mixed", str(tmp_path), {"zero": 3} | NEW, {})
    assert {p.name for p in tmp_path.iterdir()} == {"model.safetensors"}


@pytest.mark.gloo
def test_ranks_that_ask_for_different_things_are_told(two, tmp_path):
    outcomes = two.attempt(other_arguments, str(tmp_path))
    assert all("ranks disagree about a model to publish" in str(o.error) for o in outcomes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gloo
@pytest.mark.slow
def test_ranks_publish_averages_of_what_they_hold(two, tmp_path):
    found = two.run(averages, str(tmp_path), 3)[0]
    wanted = {k: v.float() if v.is_floating_point() else v for k, v in mixed_state(found).items()}
    assert_equal(files_of(tmp_path), wanted)


# -- from a checkpoint ------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_checkpoint_is_exported_as_its_model_is_published(tmp_path):
    model = trained("mixtral", **LOW)
    model.save_checkpoint(tmp_path / "run")
    model.save_pretrained(tmp_path / "one", dtype="fp32", max_shard_size="10KB")
    with torch.device("meta"):
        like = type(model)(copy.deepcopy(model.config))
    files = export(open_checkpoint(tmp_path / "run"), tmp_path / "two", dtype="fp32", max_shard_size="10KB", like=like)
    assert {p.name for p in files} == {p.name for p in (tmp_path / "two").iterdir()}
    for file in files:
        assert file.read_bytes() == (tmp_path / "one" / file.name).read_bytes(), file.name


def test_without_its_model_a_checkpoint_has_its_own_names_and_ties_one_master(tmp_path):
    model = trained("mixed", **LOW)
    model.save_checkpoint(tmp_path / "run")
    (file,) = export(open_checkpoint(tmp_path / "run"), tmp_path / "two", dtype="fp32")
    found, wide = load_file(file), masters(model)
    assert found.keys() == model.state_dict().keys()
    assert_equal({n: found[n] for n in wide}, wide)
    assert torch.equal(found["again.weight"], found["first.weight"])


def test_an_export_holds_one_tensor_at_a_time(tmp_path):
    import weakref

    trained("mixed").save_checkpoint(tmp_path / "run")
    source = open_checkpoint(tmp_path / "run")
    read, alive = source.whole, []

    def whole(name):
        assert not [ref for ref in alive if ref() is not None], name
        made = read(name).clone()
        alive.append(weakref.ref(made))
        return made

    source.whole = whole  # type: ignore[method-assign]
    export(source, tmp_path / "two")
    assert len(alive) > 10


def test_an_export_of_another_model_is_refused(tmp_path):
    trained("mixed").save_checkpoint(tmp_path / "run")
    with pytest.raises(CheckpointError, match="another model"):
        export(open_checkpoint(tmp_path / "run"), tmp_path / "two", like=models.build("gpt2").model)
    assert not (tmp_path / "two").exists()


# -- DeepSpeed's key --------------------------------------------------------------------------------------------------
def test_deepspeeds_key_says_which_dtype():
    assert of_deepspeed({"stage3_gather_16bit_weights_on_model_save": True}, "fp16") == {"dtype": "fp16"}
    assert of_deepspeed({"stage3_gather_16bit_weights_on_model_save": False}) == {}
    with pytest.raises(PlanError, match="unknown key"):
        of_deepspeed({"stage3_gather_16bits": True})
    with pytest.raises(PlanError):
        of_deepspeed({"stage3_gather_16bit_weights_on_model_save": 1})
