"""Models that accelerate has dispatched over devices, the host's memory or files: refused before they are changed, with what to do instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from trainers import as_launched, model_of, trainer_of

import zgraph
from zgraph.errors import ModelError

pytest.importorskip("accelerate")

import accelerate
from accelerate.big_modeling import attach_layerwise_casting_hooks
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

IDS = torch.arange(3, 21).reshape(2, 9)
SPREAD = {f"model.{name}": "cpu" for name in ("embed_tokens", "norm", "rotary_emb")}
SPREAD |= {"model.layers": "disk", "lm_head": "cpu"}


def cast(model: Any) -> Any:
    attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32)
    return model


def spread(model: Any, folder: str) -> Any:
    """The model as it is loaded with a `device_map` of several places."""
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, device_map=SPREAD, offload_folder=f"{folder}/offloaded")


HOOKED = {
    "cpu_offload": lambda model, folder: accelerate.cpu_offload(model, "cpu"),
    "disk_offload": lambda model, folder: accelerate.disk_offload(model, folder, "cpu"),
    "cpu_offload_with_hook": lambda model, folder: accelerate.cpu_offload_with_hook(model, "cpu")[0],
    "one device": lambda model, folder: accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True),
    "layerwise casting": lambda model, folder: cast(model),
    "device_map": spread,
}


@pytest.mark.parametrize("how", list(HOOKED))
def test_a_dispatched_model_is_refused_before_it_is_changed(how, tmp_path):
    model = HOOKED[how](model_of("llama"), str(tmp_path))
    before = {name: (p.device, type(p)) for name, p in model.named_parameters()}
    with pytest.raises(ModelError, match="accelerate has dispatched the model") as caught:
        zgraph.compile(model, zgraph.Plan(backend="eager"))
    assert "without device_map" in caught.value.hint and "offload in the plan" in caught.value.hint
    assert ("over cpu, disk" in str(caught.value)) == (how == "device_map")
    assert {name: (p.device, type(p)) for name, p in model.named_parameters()} == before


def test_a_trainer_of_one_is_refused_and_trains_without_hooks(tmp_path):
    with as_launched():
        trainer = trainer_of("llama", str(tmp_path), eval_strategy="no", save_strategy="no", steps=1)
        accelerate.dispatch_model(trainer.model, {"": "cpu"}, force_hooks=True)
        with pytest.raises(ModelError, match="accelerate has dispatched the model"):
            zgraph.hf.attach(trainer, zgraph.Plan(backend="eager"))
        remove_hook_from_module(trainer.model, recurse=True)
        zgraph.hf.attach(trainer, zgraph.Plan(backend="eager"))


def test_a_hook_of_ones_own_that_moves_nothing_is_captured():
    class Scaled(ModelHook):
        """Doubles the logits."""

        def post_forward(self, module: Any, output: Any) -> Any:
            return 2 * output

    model, plain = model_of("llama"), model_of("llama")
    for one in (model, plain):
        add_hook_to_module(one.lm_head, Scaled())
    zgraph.compile(model, zgraph.Plan(backend="eager"))
    torch.testing.assert_close(model(input_ids=IDS).logits, plain(input_ids=IDS).logits)
