"""The layers that `kernels.py` counts: of models that most fused kernels were written for, as large as they are trained."""

from __future__ import annotations

import torch
from torch import nn

Inputs = tuple[torch.Tensor, ...]


class TransformersLayer(nn.Module):
    """A layer of transformers' that is called with a hidden state and with tensors that it knows by name."""

    def __init__(self, layer: nn.Module, *names: str) -> None:
        super().__init__()
        self.layer = layer.train()
        self.names = names  # of the tensors

    def forward(self, hidden: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        arguments: dict[str, object] = dict(zip(self.names, tensors, strict=True))
        if "cos" in arguments:
            arguments = {"position_embeddings": (arguments["cos"], arguments["sin"])}
        result = self.layer(hidden, **arguments)
        return result[0] if isinstance(result, tuple) else result


class Head(nn.Module):
    """What follows a Llama's last layer: its norm, its head and the loss."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(hidden)).flatten(0, 1)
        return nn.functional.cross_entropy(logits.float(), labels.flatten())


def layer(name: str, dtype: torch.dtype) -> tuple[nn.Module, Inputs]:
    """Return (a layer of `kernels.LAYERS` on the meta device, its inputs)."""
    make = {"llama": _llama, "gpt2": _gpt2, "bert": _bert, "t5": _t5, "head": _head}[name]
    with torch.device("meta"):
        module, hidden, tensors = make()
        inputs = [t.to(dtype) if t.is_floating_point() else t for t in (torch.empty(hidden), *tensors)]
        inputs[0].requires_grad_()
        return module.to(dtype), tuple(inputs)


_Made = tuple[nn.Module, tuple[int, int, int], list[torch.Tensor]]  # a module, its hidden state's size, other tensors


def _llama() -> _Made:
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaDecoderLayer

    config = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
    config._attn_implementation = "sdpa"
    angles = [torch.empty(1, 4096, 128) for _ in range(2)]
    return TransformersLayer(LlamaDecoderLayer(config, 0), "cos", "sin"), (1, 4096, 4096), angles


def _gpt2() -> _Made:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2Config

    config = GPT2Config()
    config._attn_implementation = "sdpa"
    return TransformersLayer(GPT2Block(config, 0)), (8, 1024, 768), []


def _bert() -> _Made:
    from transformers.models.bert.modeling_bert import BertConfig, BertLayer

    config = BertConfig()
    config._attn_implementation = "sdpa"
    return TransformersLayer(BertLayer(config, 0)), (16, 512, 768), []


def _t5() -> _Made:
    from transformers.models.t5.modeling_t5 import T5Block, T5Config

    config = T5Config(d_model=768, d_ff=2048, num_heads=12, feed_forward_proj="gated-gelu")
    config._attn_implementation = "eager"
    return TransformersLayer(T5Block(config, False, 0), "position_bias"), (16, 512, 768), [torch.empty(1, 12, 512, 512)]


def _head() -> _Made:
    return Head(4096, 32000), (1, 4096, 4096), [torch.empty(1, 4096, dtype=torch.long)]


def attend_as_sm_90() -> None:
    """Let attention be what devices of sm_90 compute it by: the stand-in for one has no choice of its own, and would
    take it apart. (For the rest of this process.)
    """
    attention = torch.ops.aten._scaled_dot_product_flash_attention

    def flash(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):  # type: ignore[no-untyped-def]
        assert attn_mask is None
        return attention(query, key, value, dropout_p, is_causal, scale=scale)[0]

    nn.functional.scaled_dot_product_attention = flash
