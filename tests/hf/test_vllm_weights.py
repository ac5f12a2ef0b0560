"""What TRL's trainers send to vLLM of an attached model: whole weights by the names of a checkpoint, adapters merged. (vLLM stands in.)"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import nn
from trainers import EAGER, ONE, as_launched, model_of, trainer_of

import zgraph
from zgraph.errors import ModelError

pytest.importorskip("trl")
pytest.importorskip("peft")


class Engine:
    """Stands in for vLLM, in this process or as a server: it keeps what it is sent."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.announced: list[Any] = []

    def load_weights(self, named: list[tuple[str, torch.Tensor]]) -> None:
        self.weights |= {name: tensor.clone() for name, tensor in named}

    def update_named_params(self, announced: list[Any], named: Any) -> None:
        self.announced = announced
        for name, tensor in named:
            self.load_weights([(name, tensor)])

    def reset_prefix_cache(self) -> None:
        pass


def sender(trainer: Any, mode: str) -> tuple[Any, Engine]:
    """TRL's own object that sends weights, without vLLM, and what it sends them to."""
    from trl.generation.vllm_generation import VLLMGeneration

    engine = Engine()
    runner = SimpleNamespace(model_runner=SimpleNamespace(model=engine))
    generation = VLLMGeneration.__new__(VLLMGeneration)
    generation.model, generation.accelerator = trainer.model, trainer.accelerator
    generation.mode, generation.enable_sleep_mode = mode, False
    generation.vllm_client, generation._weight_metadata = engine, None
    generation.llm = SimpleNamespace(
        llm_engine=SimpleNamespace(model_executor=SimpleNamespace(driver_worker=runner)),
        reset_prefix_cache=engine.reset_prefix_cache,
    )
    return generation, engine


def attached(folder: str, zero: int, adapter: str | None, mode: str) -> tuple[Any, Any, Engine]:
    options = {"eval_strategy": "no", "save_strategy": "no", "lengths": ONE, "adapter": adapter}
    trainer = trainer_of("llama", folder, steps=2, **options)
    trainer.vllm_generation, engine = sender(trainer, mode)
    zgraph.hf.attach(trainer, zgraph.Plan(zero=zero, **EAGER))
    return trainer, trainer.vllm_generation, engine


def sent(folder: str, zero: int, adapter: str | None, mode: str) -> list[str]:
    """The names that were sent, after two steps of training. They are those of the plain model, which computes the same with them."""
    with as_launched():
        trainer, generation, engine = attached(folder, zero, adapter, mode)
        trainer.train()
        before = zgraph.full_state_dict(trainer.model)
        generation.sync_weights()
        after = zgraph.full_state_dict(trainer.model)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        words = torch.arange(3, 12)[None]
        trainer.model.eval()
        with torch.no_grad():
            expected = trainer.model(input_ids=words).logits
        if engine.weights:
            plain: nn.Module = model_of("llama").eval()
            plain.load_state_dict(engine.weights)
            with torch.no_grad():
                torch.testing.assert_close(plain(input_ids=words).logits, expected, rtol=1e-5, atol=1e-5)
        for name, dtype, shape in engine.announced:
            weight = engine.weights[name]
            assert (str(weight.dtype), list(weight.shape)) == (f"torch.{dtype}", shape)
        assert not engine.announced or len(engine.announced) == len(engine.weights)
        return sorted(engine.weights)


NAMES = sorted(model_of("llama").state_dict())


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    "zero, adapter, mode",
    [
        (3, None, "colocate"),
        (2, None, "server"),
        (3, "lora", "server"),
        (3, "lora, and the head", "colocate"),
        (0, "ia3", "colocate"),
    ],
)
def test_ranks_send_whole_merged_weights(two: Ranks, tmp_path, zero, adapter, mode):
    first, second = two.run(sent, str(tmp_path), zero, adapter, mode)
    assert first == NAMES
    assert second == (NAMES if mode == "colocate" else [])


@pytest.mark.parametrize("adapter", [pytest.param(None, marks=pytest.mark.slow), "lora"])
@pytest.mark.slow
def test_one_process_sends_them_as_well(tmp_path, adapter):
    assert sent(str(tmp_path), 3, adapter, "server") == NAMES


def test_adapters_that_change_no_weights_are_refused(tmp_path):
    with as_launched():
        _, generation, _ = attached(str(tmp_path), 3, "prompt", "colocate")
        with pytest.raises(ModelError, match=r"prompts can't be sent to vLLM[^~]*LoRA"):
            generation.sync_weights()
