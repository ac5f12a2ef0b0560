"""Models of PEFT's in a loop of one's own on two ranks: adapters are saved, loaded, merged and taken off as those of a plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import nn
from trainers import adapted, model_of

import zgraph
from zgraph.errors import ModelError

peft = pytest.importorskip("peft")

IDS = torch.arange(3, 21).reshape(2, 9)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


def trained(adapter: str) -> tuple[Any, torch.Tensor]:
    """A compiled model after two steps, and what the plain one gives after them."""
    mine, plain = adapted("llama", adapter), adapted("llama", adapter)
    zgraph.compile(mine, zgraph.Plan(backend="eager", zero=3, optimizer=zgraph.AdamW(lr=1e-2)))
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2, foreach=False)
    for _ in range(2):
        mine(input_ids=IDS, labels=IDS).loss.backward()
        mine.step()
        plain(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return mine.eval(), logits(plain.eval())


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def saved_and_loaded(adapter: str, folder: str) -> None:
    model, expected = trained(adapter)
    model.save_pretrained(folder)
    close(logits(peft.PeftModel.from_pretrained(model_of("llama"), folder).eval()), expected)
    state = peft.utils.load_peft_weights(folder, device="cpu")
    with zgraph.full_weights(model, write=True):
        peft.set_peft_model_state_dict(model, {name: 2 * value for name, value in state.items()})
    assert not torch.allclose(logits(model), expected)
    with zgraph.full_weights(model, write=True):
        peft.set_peft_model_state_dict(model, state)
    close(logits(model), expected)
    with pytest.raises(ModelError, match="no longer those that were compiled"):
        model.load_adapter(folder, "second")
        logits(model)


def merged_and_unloaded() -> None:
    model, expected = trained("lora")
    model.merge_adapter()
    close(logits(model), expected)
    base = model.merge_and_unload()
    assert type(base) is type(model_of("llama")) and all(type(p) is nn.Parameter for p in base.parameters())
    close(logits(base), expected)
    model, expected = trained("lora")
    base = model.unload()
    close(logits(base), logits(model_of("llama").eval()))
    assert not hasattr(model, "zgraph") and "save_pretrained" not in vars(model)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["lora", "ia3", "prompt", "prefix"])
def test_adapters_are_saved_and_loaded(two: Ranks, tmp_path: Path, adapter: str):
    two.run(saved_and_loaded, adapter, str(tmp_path))


@pytest.mark.gloo
@pytest.mark.slow
def test_adapters_are_merged_and_taken_off(two: Ranks):
    two.run(merged_and_unloaded)
