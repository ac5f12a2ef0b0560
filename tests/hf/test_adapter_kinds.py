"""Kinds of PEFT's adapters on one process: captured as they are, with the numbers of plain PyTorch; others are refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from sweeps import sweep
from torch import nn
from trainers import ONE, as_launched, history, model_of, trainer_of

import zgraph
from zgraph.errors import CaptureError, ModelError, UnsupportedError

peft = pytest.importorskip("peft")

LORA = {"r": 4, "init_lora_weights": "gaussian"}
ATTENTION = ["q_proj", "v_proj"]
KINDS = {
    "dora": ("llama", "Lora", {**LORA, "use_dora": True, "target_modules": ["q_proj", "embed_tokens"]}),
    "dora of transposed weights": ("gpt2", "Lora", {**LORA, "use_dora": True, "target_modules": ["c_attn"]}),
    "rank-stabilized": ("llama", "Lora", {**LORA, "use_rslora": True, "target_modules": ["q_proj", "lm_head"]}),
    "embedding": ("llama", "Lora", {**LORA, "target_modules": ["embed_tokens"]}),
    "some tokens": ("llama", "Lora", {**LORA, "target_modules": ["q_proj"], "trainable_token_indices": [3, 4]}),
    "experts": (
        "mixtral",
        "Lora",
        {**LORA, "target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
    "loha": ("llama", "LoHa", {"r": 4, "target_modules": ATTENTION, "init_weights": False}),
    "lokr": ("llama", "LoKr", {"r": 4, "target_modules": ATTENTION, "init_weights": False}),
    "adalora": ("llama", "AdaLora", {"target_modules": ATTENTION, "total_step": 6, "tinit": 1, "tfinal": 1}),
    "shira": ("llama", "Shira", {"r": 2, "target_modules": ATTENTION}),
    "delora": ("llama", "Delora", {"r": 4, "target_modules": ATTENTION}),
    "gralora": ("llama", "Gralora", {"r": 4, "gralora_k": 2, "target_modules": ATTENTION}),
    "hira": ("llama", "Hira", {"r": 4, "target_modules": ATTENTION}),
    "psoft": ("llama", "Psoft", {"r": 4, "target_modules": ATTENTION}),
    "unilora": ("llama", "UniLora", {"r": 4, "target_modules": ATTENTION}),
    "vblora": (
        "llama",
        "VBLoRA",
        {
            "r": 2,
            "num_vectors": 8,
            "vector_length": 4,
            "topk": 2,
            "target_modules": ["q_proj"],
            "save_only_topk_weights": False,
        },
    ),
}


def base_of(kind: str) -> Any:
    if kind != "mixtral":
        return model_of(kind)
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=97, num_key_value_heads=1, num_local_experts=4, **small))


def adapted(kind: str, **more: Any) -> Any:
    base, config, options = KINDS[kind]
    if not hasattr(peft, f"{config}Config"):
        pytest.skip("the release has no such adapter")
    model = base_of(base)
    torch.manual_seed(1)
    return peft.get_peft_model(model, getattr(peft, f"{config}Config")(task_type="CAUSAL_LM", **options, **more))


def losses(model: nn.Module, step: Any) -> list[float]:
    ids = torch.arange(3, 21).reshape(2, 9)
    found = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        step()
        found.append(float(loss))
    return found


def compared(plain: nn.Module, mine: nn.Module) -> None:
    """Train both: losses and trained weights are equal."""
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2, foreach=False)
    zgraph.compile(mine, zgraph.Plan(backend="eager", zero=3, optimizer=zgraph.AdamW(lr=1e-2)))
    expected = losses(plain, lambda: (optimizer.step(), optimizer.zero_grad()))
    assert losses(mine, mine.step) == pytest.approx(expected, rel=1e-6)
    trained = {name: p for name, p in plain.named_parameters() if p.requires_grad}
    assert trained
    torch.testing.assert_close({n: p for n, p in mine.named_parameters() if p.requires_grad}, trained)


@sweep("kind", list(KINDS), quick=[0])
def test_a_kind_trains_as_in_plain_pytorch(kind):
    compared(adapted(kind), adapted(kind))


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layers_are_computed_again_in_a_loop_of_ones_own(reentrant):
    """(transformers lets the output of the frozen embeddings require gradients within the forward.)"""
    models = [adapted("rank-stabilized"), adapted("rank-stabilized")]
    for model in models:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    compared(*models)


class Embedded(nn.Module):
    """The least whose embeddings can get noise: lengths are symbols in a fifth of the time that a Llama takes."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(97, 8), nn.Linear(8, 97)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.words(ids)).flatten(0, 1), ids.flatten())


def test_noise_in_embeddings_is_one_program_for_all_lengths():
    from transformers.integrations.neftune import neftune_post_forward_hook

    plain = Embedded()
    plain.words.neftune_noise_alpha = 5.0
    plain.words.register_forward_hook(neftune_post_forward_hook)
    model = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(backend="eager"))
    for length in (9, 8, 7, 5):
        ids, found = torch.arange(2 * length).reshape(2, length), []
        for made in (plain, model):
            torch.manual_seed(length)
            found.append(float(made(ids)))
        assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert len(model.zgraph.programs) <= 2


def test_checkpointing_that_is_switched_off_and_on_makes_no_more_programs():
    """(As TRL does around each generation.)"""
    plain = model_of("llama")
    plain.gradient_checkpointing_enable()
    model = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(backend="eager"))
    for _ in range(3):
        losses(model, model.zero_grad)
        model.gradient_checkpointing_disable()
        model.gradient_checkpointing_enable()
    assert len(model.zgraph.programs) == 1
    part = copy.deepcopy(model.model)
    part.resize_token_embeddings(120)
    assert part.get_input_embeddings().weight.shape[0] == 120


class Kept(nn.Module):
    """Lets a tensor of its own require gradients, and returns it."""

    def __init__(self, by_method: bool) -> None:
        super().__init__()
        self.inner, self.by_method = nn.Linear(3, 3), by_method

    def forward(self, x: torch.Tensor) -> Any:
        leaf = x * 2
        if self.by_method:
            leaf.requires_grad_()
        else:
            leaf.requires_grad = True
        return self.inner(leaf), leaf


@pytest.mark.parametrize("by_method", [True, False])
def test_a_tensor_whose_gradient_could_be_asked_for_is_refused(by_method):
    model = zgraph.compile(Kept(by_method), zgraph.Plan(backend="eager"))
    with pytest.raises(CaptureError, match="requires_grad_"):
        model(torch.ones(2, 3))


def test_a_release_without_a_name_that_dora_needs_is_refused(monkeypatch):
    model = adapted("dora")
    monkeypatch.delattr("peft.tuners.lora.dora.transpose")
    with pytest.raises(ModelError, match="has no transpose") as caught:
        zgraph.compile(model, zgraph.Plan(backend="eager"))
    assert "is known to work" in str(caught.value)
    assert not hasattr(model, "zgraph")
    zgraph.compile(adapted("embedding"), zgraph.Plan(backend="eager"))  # (without DoRA)


@pytest.mark.parametrize(
    "kind, options, place, other",
    [
        ("WaveFT", {"n_frequency": 10, "target_modules": ["q_proj"]}, "layers.0.self_attn.q_proj", "FourierFT"),
        ("Frod", {"target_modules": ["q_proj"]}, "layers.0.self_attn.q_proj", "VeRA"),
        ("Poly", {"r": 4, "n_tasks": 2, "n_skills": 2, "n_splits": 2, "target_modules": ["q_proj"]}, "q_proj", "LoRA"),
        ("CPT", {"cpt_token_ids": [3], "cpt_mask": [1], "cpt_tokens_type_mask": [1]}, "default", "prompt tuning"),
        ("Cartridge", {"num_virtual_tokens": 4}, "default", "prefix tuning"),
    ],
)
def test_an_adapter_that_can_not_be_captured_is_refused_by_name(kind, options, place, other):
    if not hasattr(peft, f"{kind}Config"):
        pytest.skip("the release has no such adapter")
    model = peft.get_peft_model(model_of("llama"), getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", **options))
    with pytest.raises(UnsupportedError, match=f"(?i){kind} can't be captured") as caught:
        zgraph.compile(model, zgraph.Plan(backend="eager"))
    assert caught.value.where.endswith(place) and other in caught.value.hint


class Int8Params(nn.Parameter):
    """As bitsandbytes has one."""


def test_quantized_base_weights_are_refused_by_name():
    model = nn.Sequential(nn.Linear(2, 2))
    weight = torch.ones(2, 2, dtype=torch.int8)
    model[0].weight = torch.Tensor._make_subclass(Int8Params, weight, False)
    with pytest.raises(UnsupportedError, match="Int8Params, quantized weights of test_adapter_kinds") as caught:
        zgraph.compile(model, zgraph.Plan(backend="eager"))
    assert "without quantization" in str(caught.value)


def run(trainer: Any) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    trainer.train()
    return history(trainer), {
        n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in trainer.model.named_parameters()
    }


def equal(
    plain: tuple[list[dict[str, float]], dict[str, torch.Tensor]],
    mine: tuple[list[dict[str, float]], dict[str, torch.Tensor]],
) -> None:
    """What `run` returned of a plain trainer and of an attached one."""
    for one, other in zip(mine[0], plain[0], strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(mine[1], plain[1], rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_of_several_adapters_the_active_one_trains_and_others_stay(tmp_path: Path):
    found = []
    for plan in (None, zgraph.Plan(backend="eager", zero=3)):
        with as_launched():
            trainer = trainer_of("llama", str(tmp_path / str(plan is None)), adapter="lora", lengths=ONE)
            torch.manual_seed(2)
            trainer.model.add_adapter("other", copy.deepcopy(trainer.model.peft_config["default"]))
            trainer.model.set_adapter("other")
            if plan is not None:
                zgraph.hf.attach(trainer, plan)
            found.append(run(trainer))
    equal(*found)


@pytest.mark.slow
def test_an_adapter_is_disabled_switched_and_merged_after_training(tmp_path: Path):
    ids = torch.arange(3, 21).reshape(2, 9)
    with as_launched():
        trainer = trainer_of("llama", str(tmp_path), adapter="lora", lengths=ONE)
        base = model_of("llama").eval()
        zgraph.hf.attach(trainer, zgraph.Plan(backend="eager", zero=3))
        trainer.train()
        model = trainer.model.eval()
        with torch.no_grad():
            trained = model(input_ids=ids).logits
            with model.disable_adapter():
                torch.testing.assert_close(model(input_ids=ids).logits, base(input_ids=ids).logits)
            torch.testing.assert_close(model(input_ids=ids).logits, trained)
            model.save_pretrained(tmp_path / "adapter")
            again = peft.PeftModel.from_pretrained(model_of("llama"), tmp_path / "adapter").eval()
            torch.testing.assert_close(again(input_ids=ids).logits, trained)
            torch.testing.assert_close(again.merge_and_unload()(input_ids=ids).logits, trained, rtol=1e-4, atol=1e-5)
            assert not torch.allclose(trained, base(input_ids=ids).logits)
            model.merge_adapter()
            torch.testing.assert_close(model(input_ids=ids).logits, trained, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_an_adapter_that_the_optimizer_has_not_is_refused_in_training(tmp_path: Path):
    with as_launched():
        trainer = trainer_of("llama", str(tmp_path), adapter="lora", lengths=ONE)
        trainer.model.add_adapter("other", copy.deepcopy(trainer.model.peft_config["default"]))
        zgraph.hf.attach(trainer, zgraph.Plan(backend="eager"))
        trainer.model.set_adapter("other")
        with pytest.raises(ModelError, match=r"lora_A\.other\.weight is trained now, and was frozen"):
            trainer.train()


@pytest.mark.parametrize("enabled_before", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_an_adapter_trains_with_layers_that_are_computed_again(tmp_path: Path, enabled_before: bool):
    """(The embeddings are frozen, and transformers lets their output require gradients, TRL when its trainer is made.)"""
    found = []
    options = {"gradient_checkpointing": True, "eval_strategy": "no", "save_strategy": "no", "steps": 3}
    for plan in (None, zgraph.Plan(backend="eager", zero=3)):
        with as_launched():
            trainer = trainer_of("llama", str(tmp_path / str(plan is None)), adapter="lora", lengths=ONE, **options)
            if enabled_before:
                trainer.model.enable_input_require_grads()
            if plan is not None:
                zgraph.hf.attach(trainer, plan)
            found.append(run(trainer))
    equal(*found)
