"""The models that overlap is measured on, by name: the GPT of `gpt.py`, and models of transformers of the same sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from link import gpt


class Transformers(nn.Module):
    """Token indices and targets in, both [batch, length]; the mean loss out. `layers` are what is sharded and compiled by itself."""

    def __init__(self, model: nn.Module, layers: list[nn.Module]) -> None:
        super().__init__()
        self.model = model
        self._layers = [next(n for n, m in self.named_modules() if m is layer) for layer in layers]

    @property
    def blocks(self) -> list[nn.Module]:
        return [self.get_submodule(name) for name in self._layers]

    def forward(self, indices: Tensor, targets: Tensor) -> Tensor:
        return self.model(input_ids=indices, labels=targets, use_cache=False).loss  # type: ignore[no-any-return]


def make(name: str, size: gpt.Size) -> Any:
    """The same weights on every rank and in every process."""
    if name == "gpt":
        return gpt.make(size)
    import transformers

    torch.manual_seed(0)
    heads, layers, positions = size.heads, size.layers, size.positions
    if name == "llama":
        config: Any = transformers.LlamaConfig(
            hidden_size=size.dim,
            intermediate_size=8 * size.dim // 3,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            vocab_size=size.vocab,
            max_position_embeddings=positions,
        )
        model: Any = transformers.LlamaForCausalLM(config)
        return Transformers(model, list(model.model.layers))
    if name == "gpt2":
        no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(
            n_embd=size.dim, n_layer=layers, n_head=heads, vocab_size=size.vocab, n_positions=positions, **no_dropout
        )
        model = transformers.GPT2LMHeadModel(config)
        return Transformers(model, list(model.transformer.h))
    config = transformers.T5Config(
        d_model=size.dim,
        d_kv=size.dim // heads,
        d_ff=4 * size.dim,
        num_layers=layers // 2,
        num_heads=heads,
        vocab_size=size.vocab,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    model = transformers.T5ForConditionalGeneration(config)
    return Transformers(model, [*model.encoder.block, *model.decoder.block])
