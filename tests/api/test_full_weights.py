"""`full_weights`, `full_state_dict`, `stream_weights` and `generate`: what is whole is the plain model's, on every plan that divides it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import Ranks
from sweeps import sweep
from torch import nn
from trainers import adapted, model_of

import zgraph
from zgraph.errors import ModelError, PlanError, StepError, UnsupportedError

pytest.importorskip("transformers")

PLANS: list[dict[str, Any]] = [
    {"zero": 3},
    {"zero": 1, "precision": "bf16", "numerics": "deepspeed"},
    {"zero": 0},
    {"zero": 3, "mesh": {"replicate": 2, "dp": 1}},
    {"zero": 3, "offload": {"parameters": "cpu"}},
]


class Odd(nn.Module):
    """Parameters of odd sizes and memory formats, a tied one, one that only some ranks have rows of, a buffer, and blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, 5)
        self.again = nn.Linear(7, 5)
        self.again.weight = self.first.weight
        self.one = nn.Parameter(torch.randn(1, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.register_buffer("count", torch.arange(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) + self.again(x) * self.scale + self.one.sum() + self.conv.weight.sum()
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def plan_of(given: dict[str, Any], **more: Any) -> zgraph.Plan:
    return zgraph.Plan(**{"backend": "eager", **given, **more})


def equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert list(one) == list(other)
    for name, value in other.items():
        assert type(one[name]) is torch.Tensor and one[name].dtype is value.dtype, name
        assert torch.equal(one[name], value) and one[name].stride() == value.stride(), name


def states(plan: dict[str, Any]) -> bool:
    """Whole state dicts, beside those of the plain model with the same weights and states."""
    plain = Odd()
    low = plan.get("numerics") == "deepspeed"
    made = zgraph.compile(Odd(), plan_of(plan, optimizer=zgraph.AdamW(lr=0.1)))
    rows = torch.arange(28.0).reshape(4, 7) / 10
    if low:
        plain.bfloat16()
    equal(zgraph.full_state_dict(made), plain.state_dict())
    made.train_step(rows.bfloat16() if low else rows)
    held = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in made.named_parameters()}
    weights, optimizer = zgraph.full_state_dict(made, made.zgraph.optimizer, max_bytes="100B")
    for name, value in held.items():
        assert torch.equal(weights[name], value), name
    assert weights["again.weight"].data_ptr() == weights["first.weight"].data_ptr()
    plain.load_state_dict(weights)
    other = torch.optim.AdamW(plain.parameters(), lr=0.1)
    assert len(optimizer["state"]) == len(list(plain.parameters()))
    for at, param in enumerate(plain.parameters()):
        kept = optimizer["state"][at]
        assert type(kept["exp_avg"]) is torch.Tensor and kept["exp_avg"].shape == param.shape
    if not low:
        other.load_state_dict(optimizer)
        plain(rows).backward()
        other.step()
        made.train_step(rows)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(zgraph.full_state_dict(made)[name], value)
    return True


def each(function: Any, plans: list[dict[str, Any]]) -> list[Any]:
    return [function(plan) for plan in plans]


@pytest.mark.gloo
@sweep("plan", PLANS, quick=(0, 1), ids=str)
def test_whole_state_dicts_are_those_of_the_plain_model(two: Ranks, plan):
    assert two.run(states, plan)[0]


def test_whole_state_dicts_in_one_process():
    assert states({"zero": 3})


def on_one_rank(plan: dict[str, Any]) -> tuple[int, int]:
    made = zgraph.compile(Odd(), plan_of(plan, optimizer=zgraph.AdamW(lr=0.1)))
    weights, optimizer = zgraph.full_state_dict(made, made.zgraph.optimizer, ranks=[0])
    return len(weights), len(optimizer)


def weights_on(ranks: list[int] | None) -> list[int]:
    """How many weights this rank got, in `full_weights` and in a stream, where only these ranks need them; they are the plain model's."""
    plain, rows = Odd(), torch.arange(28.0).reshape(4, 7) / 10
    made = zgraph.compile(Odd(), plan_of({"zero": 3}))
    expected = plain.state_dict()
    with zgraph.full_weights(made, ranks=ranks), torch.no_grad():
        whole = [n for n, p in made.named_parameters() if torch.equal(p, expected[n])] if made.zgraph.whole else []
        assert not whole or torch.equal(made(rows), plain(rows))
    streamed = [n for n, value in zgraph.stream_weights(made, ranks=ranks) if torch.equal(value, expected[n])]
    torch.testing.assert_close(made(rows), plain(rows))
    return [len(whole), len(streamed)]


@pytest.mark.gloo
@pytest.mark.slow
def test_ranks_that_need_none_of_the_weights_are_sent_none(two: Ranks):
    everything, same = two.run(weights_on, None)
    assert everything == same and min(everything) > 10
    assert two.run(weights_on, [1]) == [[0, 0], everything]
    assert two.run(weights_on, [1, 0]) == [everything] * 2
    assert weights_on([0]) == everything  # (in one process)


def no_ranks() -> list[str]:
    made = zgraph.compile(Odd(), plan_of({"zero": 3}))
    said = []
    for options in ({"ranks": []}, {"ranks": [2]}, {"ranks": [0], "by_block": True}):
        with pytest.raises(PlanError) as caught, zgraph.full_weights(made, **options):
            pass
        said.append(str(caught.value))
    return said


@pytest.mark.gloo
def test_ranks_that_are_none_are_refused(two: Ranks):
    for empty, beyond, blocks in two.run(no_ranks):
        assert "ranks=[]" in empty and "ranks=[2] are not of the 2 ranks" in beyond and "from 0 to 1" in beyond
        assert "either ranks or by_block" in blocks


def inside(plan: dict[str, Any]) -> bool:
    plain, rows = Odd(), torch.arange(28.0).reshape(4, 7) / 10
    made = zgraph.compile(Odd(), plan_of(plan, optimizer=zgraph.SGD(lr=0.1)))
    names = [n for n, _ in made.named_parameters()]
    for by_block in (False, True):
        with zgraph.full_weights(made, by_block=by_block), torch.no_grad():
            assert torch.equal(made(rows), plain(rows)) and not made.zgraph._runtime.entries
            assert torch.equal(made.first(rows), plain.first(rows))
            assert by_block or all(
                torch.equal(a, b) for a, b in zip(made.parameters(), plain.parameters(), strict=True)
            )
            with zgraph.full_weights(made):
                assert torch.equal(made(rows), plain(rows))
            with pytest.raises(StepError, match="inside full_weights"):
                made.train_step(rows)
            with pytest.raises(StepError, match="inside full_weights"):
                made.save_checkpoint("nowhere")
        assert [n for n, _ in made.named_parameters()] == names
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        loss = plain(rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(made.train_step(rows), loss.detach())
        with zgraph.full_weights(made), torch.no_grad():
            torch.testing.assert_close(made(rows), plain(rows))
    return True


@pytest.mark.gloo
def test_inside_full_weights_the_model_is_the_plain_one_and_trains_on_after_it(two: Ranks):
    assert two.run(each, inside, [{"zero": 3}, {"zero": 0}, {"zero": 2}])[0] == [True] * 3


@pytest.mark.gloo
def test_only_the_ranks_that_are_named_get_a_state_dict(two: Ranks):
    assert two.run(on_one_rank, {"zero": 3}) == [(15, 2), (0, 0)]


def written(plan: dict[str, Any]) -> list[str]:
    """What is said of writes, and whether the next step sees those that were to stay."""
    plain, rows = Odd(), torch.arange(28.0).reshape(4, 7) / 10
    made = zgraph.compile(Odd(), plan_of(plan, optimizer=zgraph.SGD(lr=0.1)))
    before = float(made.train_step(rows))
    made.zgraph.optimizer.param_groups[0]["lr"] = 0.0
    weights = zgraph.full_state_dict(made)
    said = []
    for how in ("write", "data", "gradient", "replace"):
        with pytest.raises(ModelError) as caught, zgraph.full_weights(made):
            if how == "write":
                with torch.no_grad():
                    made.first.weight.add_(1)
            elif how == "data":
                made.first.weight.data.add_(1)
            elif how == "gradient":
                made(rows).backward()
            elif not torch.distributed.get_rank():
                made.first.weight = nn.Parameter(torch.zeros(5, 7))
        said.append(str(caught.value).splitlines()[0])
        if plan["zero"]:
            equal(zgraph.full_state_dict(made), weights)
    with zgraph.full_weights(made, write=True), torch.no_grad():
        for block in made.blocks:
            block.weight.copy_(torch.eye(5))
    plain.load_state_dict(zgraph.full_state_dict(made))
    assert torch.equal(plain.blocks[2].weight, torch.eye(5))
    torch.testing.assert_close(made.train_step(rows), plain(rows).detach())
    assert before
    return said


@pytest.mark.gloo
def test_what_is_done_to_whole_weights_is_refused_or_kept(two: Ranks):
    first, second = two.run(written, {"zero": 3})
    assert first[:3] == second[:3]
    assert "first.weight was written to inside full_weights" in first[0] and "written to" in first[1]
    assert "given a gradient" in first[2] and "first.weight was replaced" in first[3]
    assert "changed on another rank" in second[3]


def test_in_one_process_what_is_written_to_is_the_model_and_the_next_step_knows():
    plain, rows = Odd(), torch.ones(2, 7)
    made = zgraph.compile(copy.deepcopy(plain), plan_of({}))
    torch.testing.assert_close(made(rows), plain(rows), rtol=0, atol=0)
    with (
        pytest.raises(ModelError, match=r"scale was written to inside full_weights\n.*holds whole as it was written"),
        torch.no_grad(),
        zgraph.full_weights(made),
    ):
        made.scale.add_(1.0)
    with torch.no_grad():
        plain.scale.add_(1.0)
    torch.testing.assert_close(made(rows), plain(rows), rtol=0, atol=0)


def limits() -> list[str]:
    made = zgraph.compile(Odd(), plan_of({"zero": 3}))
    said = []
    for options in ({"max_bytes": 100}, {"max_bytes": 100, "by_block": True}, {"write": True, "dtype": "bf16"}):
        with pytest.raises((ModelError, PlanError)) as caught, zgraph.full_weights(made, **options):
            pass
        said.append(str(caught.value))
    with pytest.raises(StepError), zgraph.full_weights(made, ranks=[0]):
        assert torch.distributed.get_rank() == 0 or made(torch.ones(2, 7))
        raise StepError("as on the other rank")
    with pytest.raises(ModelError, match="no compiled model"), zgraph.full_weights(made.first):
        pass
    return said


@pytest.mark.gloo
def test_limits_are_said_with_what_helps(two: Ranks):
    above, still, both = two.run(limits)[0]
    assert "max_bytes is 0.0 MiB" in above and "by_block=True" in above
    assert "by_block=True" not in still and "leave dtype out" in both


# -- streams ------------------------------------------------------------------------------------------------------------
def streamed(plan: dict[str, Any], file: str) -> list[bool]:
    from safetensors.torch import load_file

    made = zgraph.compile(mixtral(), plan_of(plan))
    expected, equals = load_file(file), []
    for size in ("256MiB", "2KB"):
        found = {}
        for name, value in zgraph.stream_weights(made, max_bytes=size, dtype="bf16"):
            assert type(value) is torch.Tensor and name not in found
            found[name] = value.clone()
        equals.append(
            found.keys() == expected.keys() and all(torch.equal(found[n], v.bfloat16()) for n, v in expected.items())
        )
    return equals


def mixtral() -> nn.Module:
    import transformers as t

    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return t.MixtralForCausalLM(t.MixtralConfig(vocab_size=33, num_key_value_heads=1, num_local_experts=3, **small))


@pytest.mark.gloo
def test_a_stream_has_what_transformers_writes(two: Ranks, tmp_path):
    mixtral().save_pretrained(tmp_path)
    assert two.run(streamed, {"zero": 3}, str(tmp_path / "model.safetensors")) == [[True, True]] * 2


def allocations(limit: int) -> tuple[int, int, int]:
    """(the most bytes that a stream of weights held beyond the shards, those of the largest weight, collectives)."""
    made = zgraph.compile(
        nn.Sequential(nn.Linear(64, 256), *(nn.Linear(64, 64) for _ in range(12))), plan_of({"zero": 3})
    )
    largest, alive = 0, {}

    class Noting(torch.utils._python_dispatch.TorchDispatchMode):
        """Counts the bytes of storages for as long as something holds them."""

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for value in out if isinstance(out, (list, tuple)) else [out]:
                if type(value) is torch.Tensor and (key := value.untyped_storage()._cdata) not in known:
                    alive[key] = (
                        torch.multiprocessing.reductions.StorageWeakRef(value.untyped_storage()),
                        value.untyped_storage().nbytes(),
                    )
            for key in [k for k, (ref, _) in alive.items() if ref.expired()]:
                del alive[key]
            largest = max(largest, sum(size for _, size in alive.values()))
            return out

    known = {p.to_local().untyped_storage()._cdata for p in made.parameters()}
    with Noting():
        for _, value in zgraph.stream_weights(made, max_bytes=limit):
            del value
    return largest, max(p.numel() * 4 for p in made.parameters()), limit


@pytest.mark.gloo
def test_a_stream_holds_no_more_than_its_bound(two: Ranks):
    for limit in (2**16, 2**18):
        for held, weight, bound in two.run(allocations, limit):
            assert held <= max(bound, 1.5 * weight) + 2**12, (held, weight, bound)


# -- generate -----------------------------------------------------------------------------------------------------------
def generated(kind: str, plan: dict[str, Any] | None, adapter: str | None, options: dict[str, Any]) -> list[list[int]]:
    """The tokens of prompts of uneven lengths, other ones and other numbers of tokens on each rank."""
    made = model_of(kind) if adapter is None else adapted(kind, adapter)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    if plan is not None:
        made = zgraph.compile(made, plan_of(plan))
    made.eval()
    torch.manual_seed(rank)
    ids = torch.randint(3, 90, (2, 6 + rank))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    torch.manual_seed(5)
    return made.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5 + 4 * rank, **options).tolist()


# (gpt2 and llama have other numbers of heads, norms and caches; t5 has an encoder, which runs once)
WAYS: list[tuple[str, dict[str, Any], str | None, dict[str, Any]]] = [
    ("gpt2", {"zero": 3}, None, {"do_sample": True}),
    ("llama", {"zero": 3}, "lora", {"num_beams": 2}),
    ("llama", {"zero": 3, "precision": "bf16", "numerics": "deepspeed"}, None, {"cache_implementation": "static"}),
    ("t5", {"zero": 1}, None, {}),
    ("llama", {"mesh": {"tp": 2}}, None, {}),
]


@pytest.mark.gloo
@pytest.mark.parametrize("kind, plan, adapter, options", WAYS, ids=str)
def test_generate_gives_the_plain_models_tokens(two: Ranks, kind, plan, adapter, options):
    plain = two.run(generated, kind, None, adapter, options)
    if "numerics" not in plan:  # (else weights are low, and the plain model's are not)
        assert two.run(generated, kind, plan, adapter, options) == plain
    if "cache_implementation" in options:  # (a rank that is done would go on beyond its cache)
        return
    synced = {**options, "synced_gpus": True}
    assert two.run(generated, kind, plan, adapter, synced) == two.run(generated, kind, plan, adapter, options)


def of_stages() -> str:
    made = zgraph.compile(Odd(), plan_of({"mesh": {"pp": 2}}), inputs=(torch.ones(2, 7),))
    with pytest.raises(UnsupportedError) as caught:
        zgraph.full_state_dict(made)
    return str(caught.value)


@pytest.mark.gloo
def test_a_model_in_stages_is_refused(two: Ranks):
    assert "save_pretrained" in two.run(of_stages)[0]


class Two(nn.Module):
    """A matrix that is divided by its rows, and one by its columns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up, self.down = nn.Embedding(12, 8), nn.Linear(8, 16), nn.Linear(16, 12)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.down(torch.relu(self.up(self.embed(input_ids))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


DIVIDED = {
    "llama": ["lm_head", "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"],
    "two layers": ["embed", "up", "down"],
}


def divided(kind: str) -> bool:
    plain = model_of(kind) if kind == "llama" else Two()
    batch = {"input_ids": torch.arange(12).reshape(2, 6), "labels": torch.arange(12).reshape(2, 6)}
    made = zgraph.compile(copy.deepcopy(plain), plan_of({"mesh": {"dp": 2, "tp": 2}, "zero": 3}), inputs=batch)
    assert any(spec.division for spec in made.zgraph.runtime.shards.specs.values())
    equal(zgraph.full_state_dict(made), plain.state_dict())
    with zgraph.full_weights(made, write=True), torch.no_grad():
        for name in DIVIDED[kind]:
            made.get_submodule(name).weight.mul_(2)
    with torch.no_grad():
        for name in DIVIDED[kind]:
            plain.get_submodule(name).weight.mul_(2)
    equal(zgraph.full_state_dict(made), plain.state_dict())
    return True


@pytest.mark.gloo
@pytest.mark.parametrize("kind", list(DIVIDED))
@pytest.mark.slow
def test_what_is_divided_twice_is_whole(four: Ranks, kind: str):
    assert four.run(divided, kind) == [True] * 4


def test_a_backward_after_full_weights_is_refused():
    model = zgraph.compile(nn.Linear(3, 2), plan_of({"mesh": {"dp": 1}}))
    with zgraph.full_weights(model):
        loss = model(torch.ones(1, 3)).sum()
    with pytest.raises(ModelError, match="a backward after full_weights reaches the whole tensor that"):
        loss.backward()
