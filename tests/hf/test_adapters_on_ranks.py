"""Kinds of PEFT's adapters on two ranks at ZeRO stages 0 to 2, each with half of the rows: losses and trained weights are those of plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from sweeps import sweep
from torch import nn
from torch.distributed.tensor import DTensor
from trainers import model_of

import zgraph
from zgraph.errors import UnsupportedError

peft = pytest.importorskip("peft")

IDS = torch.arange(3, 39).reshape(4, 9)
ATTENTION = ["q_proj", "v_proj"]
LORA = {"r": 4, "target_modules": ATTENTION}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("Lora", {**LORA, "init_lora_weights": "gaussian"}),
    "dora": ("Lora", {**LORA, "use_dora": True}),
    "lora and the head": ("Lora", {**LORA, "modules_to_save": ["lm_head"]}),
    "ia3": ("IA3", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "prompt": ("PromptTuning", {"num_virtual_tokens": 3}),
    "prefix": ("PrefixTuning", {"num_virtual_tokens": 3}),
    "loha": ("LoHa", {"r": 4, "target_modules": ATTENTION, "init_weights": False}),
    "lokr": ("LoKr", {"r": 4, "target_modules": ATTENTION, "init_weights": False}),
}


def adapted(kind: str, base: torch.dtype = torch.float32, adapter: torch.dtype = torch.float32) -> Any:
    """The model with an adapter, each of its dtype."""
    config, options = KINDS[kind]
    model = model_of("llama").to(base)
    torch.manual_seed(1)
    model = peft.get_peft_model(model, getattr(peft, f"{config}Config")(task_type="CAUSAL_LM", **options))
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.to(adapter)
    return model


def losses(model: nn.Module, rows: torch.Tensor, step: Any) -> list[torch.Tensor]:
    found = []
    for _ in range(3):
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        step()
        found.append(loss.detach().float())
    return found


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    weights = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    assert weights
    return {name: w.full_tensor() if isinstance(w, DTensor) else w for name, w in weights.items()}


def compared(kind: str, zero: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    plain, mine = adapted(kind, *dtypes), adapted(kind, *dtypes)
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    zgraph.compile(mine, zgraph.Plan(backend="eager", zero=zero, optimizer=zgraph.SGD(lr=0.1)))
    expected = losses(plain, IDS, lambda: (optimizer.step(), optimizer.zero_grad()))
    here = losses(mine, IDS.chunk(dist.get_world_size())[dist.get_rank()], mine.step)
    mean = torch.stack(here)
    dist.all_reduce(mean)
    least = torch.finfo(min(dtypes, key=lambda d: d.itemsize)).eps
    close = {"rtol": 16 * least, "atol": 16 * least}
    torch.testing.assert_close(mean / dist.get_world_size(), torch.stack(expected), **close)
    assert {n: p.dtype for n, p in mine.named_parameters()} == {n: p.dtype for n, p in plain.named_parameters()}
    before, after = trained(adapted(kind, *dtypes)), trained(plain)
    for name, weight in trained(mine).items():
        torch.testing.assert_close(weight, after[name], **close, msg=name)
    assert any(not torch.equal(before[name], after[name]) for name in after)


WHOLE, HALF = torch.float32, torch.bfloat16


@pytest.mark.gloo
@sweep("kind,zero", [(kind, zero) for zero in (2, 0, 1) for kind in KINDS], quick=[0])
def test_a_kind_trains_as_in_plain_pytorch(two: Ranks, kind, zero):
    two.run(compared, kind, zero, (WHOLE, WHOLE))


@pytest.mark.gloo
@sweep("base,adapter,zero", [(HALF, WHOLE, 2), (WHOLE, HALF, 2), (HALF, HALF, 1), (HALF, WHOLE, 3)], quick=[0])
def test_adapters_of_another_dtype_than_the_base_do(two: Ranks, base, adapter, zero):
    two.run(compared, "lora", zero, (base, adapter))


def of_osf() -> None:
    model = peft.get_peft_model(model_of("llama"), peft.OSFConfig(target_modules=["q_proj"], effective_rank=2))
    with pytest.raises(UnsupportedError, match="OSF can't be trained on ranks") as caught:
        zgraph.compile(model, zgraph.Plan(backend="eager", zero=2))
    assert caught.value.where.endswith("layers.0.self_attn.q_proj")


@pytest.mark.gloo
def test_an_adapter_with_hooks_of_whole_gradients_is_refused_by_name(two: Ranks):
    two.run(of_osf)
