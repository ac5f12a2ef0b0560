"""DeepSpeed's sparse attention (0.19.6) by its names: configurations of layouts, the module, and what adapts a model of transformers.

The layouts are those of `zgraph.plan.attention`, and the operator is `zgraph.sparse_attention`. In a plan `attention` does the same to a model
that calls torch's attention, without a change to the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zgraph.codegen  # noqa: F401 (registers the kernels of CUDA devices)
from zgraph.deepspeed.ops.arguments import by_name
from zgraph.errors import ModelError, PlanError, SignatureError, UnsupportedError
from zgraph.plan.attention import BigBird, BlockLayout, Dense, Fixed, LocalWindow, Longformer, Sparsity, Variable
from zgraph.program.sparse_attention import SPARSE, block_rows, layout_text

__all__ = [
    "BSLongformerSparsityConfig",
    "BertSparseSelfAttention",
    "BigBirdSparsityConfig",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "LocalSlidingWindowSparsityConfig",
    "SparseAttentionUtils",
    "SparseSelfAttention",
    "SparsityConfig",
    "VariableSparsityConfig",
]


class SparsityConfig:
    """The base of DeepSpeed's configurations: a sparsity for a number of heads. Its subclasses take the arguments in `DEFAULTS`, in their order,
    after `num_heads`."""

    record: type[Sparsity] | None = None
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"block": 16, "different_layout_per_head": False}

    def __init__(self, num_heads: int, *args: Any, **kwargs: Any) -> None:
        if self.record is None:
            raise PlanError("SparsityConfig has no layout", hint="one of its subclasses: FixedSparsityConfig, say")
        given = by_name(type(self).__name__, "num_heads", self.DEFAULTS, args, kwargs)
        values = {**self.DEFAULTS, **given}
        self.num_heads = num_heads
        vars(self).update(values)
        fields = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        self.sparsity = self.record.model_validate(fields)

    def make_layout(self, seq_len: int) -> Tensor:
        """Return the layout for a length, [heads, blocks, blocks] of 0 and 1 (int64). Raises `SignatureError` for a length that the
        block does not divide, as DeepSpeed does."""
        block = self.sparsity.block
        if seq_len % block:
            raise SignatureError(
                f"a sequence of {seq_len} is not a number of blocks of {block}",
                hint="SparseAttentionUtils.pad_to_block_size; zgraph.sparse_attention itself takes any length",
            )
        blocks = seq_len // block
        rows = block_rows(self.sparsity.model_dump_json(), self.num_heads, seq_len)
        layout = torch.zeros((self.num_heads, blocks, blocks), dtype=torch.int64)
        for head in range(self.num_heads):
            for at, row in enumerate(rows[head % len(rows)]):
                layout[head, at, list(row)] = 1
        return layout


class DenseSparsityConfig(SparsityConfig):
    """All blocks."""

    record = Dense


class FixedSparsityConfig(SparsityConfig):
    """Windows side by side with representative blocks: see `zgraph.Fixed`."""

    record = Fixed
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **SparsityConfig.DEFAULTS,
        "num_local_blocks": 4,
        "num_global_blocks": 1,
        "attention": "bidirectional",
        "horizontal_global_attention": False,
        "num_different_global_patterns": 1,
    }


class VariableSparsityConfig(SparsityConfig):
    """Windows of several sizes, global and random blocks: see `zgraph.Variable`."""

    record = Variable
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **SparsityConfig.DEFAULTS,
        "num_random_blocks": 0,
        "local_window_blocks": (4,),
        "global_block_indices": (0,),
        "global_block_end_indices": None,
        "attention": "bidirectional",
        "horizontal_global_attention": False,
    }


class BigBirdSparsityConfig(SparsityConfig):
    """A sliding window, first and random blocks: see `zgraph.BigBird`."""

    record = BigBird
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **SparsityConfig.DEFAULTS,
        "num_random_blocks": 1,
        "num_sliding_window_blocks": 3,
        "num_global_blocks": 1,
        "attention": "bidirectional",
    }


class BSLongformerSparsityConfig(SparsityConfig):
    """A sliding window and global blocks: see `zgraph.Longformer`."""

    record = Longformer
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **SparsityConfig.DEFAULTS,
        "num_sliding_window_blocks": 3,
        "global_block_indices": (0,),
        "global_block_end_indices": None,
        "attention": "bidirectional",
    }


class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """A sliding window: see `zgraph.LocalWindow`."""

    record = LocalWindow
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"block": 16, "num_sliding_window_blocks": 3, "attention": "unidirectional"}


class SparseSelfAttention(nn.Module):
    """DeepSpeed's module: attention of query, key and value [rows, heads, length, width] by a sparsity.

    As there, a length below `max_seq_length` has the first blocks of the longest one's layout, and keys may come transposed.
    """

    def __init__(
        self,
        sparsity_config: SparsityConfig,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        max_seq_length: int = 2048,
    ) -> None:
        super().__init__()
        for mode in (key_padding_mask_mode, attn_mask_mode):
            if mode not in ("add", "mul"):
                raise PlanError(f"a mask can't be applied by {mode!r}", hint='"add": to the scores; "mul": 0 hides')
        self.sparsity_config = sparsity_config
        self.key_padding_mask_mode, self.attn_mask_mode = key_padding_mask_mode, attn_mask_mode
        layout = sparsity_config.make_layout(max_seq_length)
        self.blocks = layout.shape[-1]
        self.register_buffer("master_layout", layout)
        blocks = range(1, layout.shape[-1] + 1)
        alike = all(
            torch.equal(sparsity_config.make_layout(n * sparsity_config.sparsity.block), layout[:, :n, :n])
            for n in blocks
        )
        own = sparsity_config.sparsity
        squares = layout if own.heads_differ else layout[:1]
        self.layout = layout_text(own if alike else BlockLayout.model_validate({"block": own.block, "layout": squares}))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the context, [rows, heads, length, width]. `rpe` is added to the scores. Raises `SignatureError` for lengths that the
        block does not divide, `UnsupportedError` for keys of another sequence."""
        rows, _, length, _ = query.shape
        if key.shape[2] != length:
            key = key.transpose(2, 3)
        if not query.shape == key.shape == value.shape:
            raise UnsupportedError(
                "sparse attention of queries with other keys", hint="query, key and value of one shape"
            )
        if length % self.sparsity_config.sparsity.block:
            self.sparsity_config.make_layout(length)  # (which says so)
        longest = self.blocks * self.sparsity_config.sparsity.block
        if length > longest:
            raise SignatureError(
                f"a sequence of {length} is longer than max_seq_length, {longest}",
                hint="give SparseSelfAttention a larger max_seq_length",
            )
        masks = [] if rpe is None else [rpe.reshape((1,) * (4 - rpe.dim()) + tuple(rpe.shape))]
        if key_padding_mask is not None:
            of_keys = key_padding_mask.reshape(rows, 1, 1, length)
            masks.append(_added(of_keys, self.key_padding_mask_mode, query.dtype))
        if attn_mask is not None:
            masks.append(_added(attn_mask.reshape(1, 1, length, length), self.attn_mask_mode, query.dtype))
        mask = None
        for each in masks:
            mask = each if mask is None else mask + each
        out: Tensor = SPARSE(query, key, value, mask, False, None, self.layout)[0]
        return out


def _added(mask: Tensor, mode: str, dtype: torch.dtype) -> Tensor:
    """Return what is added to the scores for a mask of DeepSpeed's: itself, or -inf where it is 0."""
    if mode == "add":
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask == 0, -torch.inf)


class BertSparseSelfAttention(nn.Module):
    """The self-attention of a BERT layer with `SparseSelfAttention`: its hidden states [rows, length, hidden] and mask in, the context out."""

    def __init__(self, config: Any, sparsity_config: SparsityConfig) -> None:
        super().__init__()
        if config.hidden_size % config.num_attention_heads:
            raise ModelError(
                f"a hidden size of {config.hidden_size} has no {config.num_attention_heads} equal heads",
                hint="num_attention_heads divides hidden_size",
            )
        self.num_attention_heads = config.num_attention_heads
        self.query, self.key, self.value = (nn.Linear(config.hidden_size, config.hidden_size) for _ in range(3))
        longest = config.max_position_embeddings // sparsity_config.sparsity.block * sparsity_config.sparsity.block
        self.sparse_self_attention = SparseSelfAttention(sparsity_config, max_seq_length=longest)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the context, [rows, length, hidden]."""
        layers = (self.query, self.key, self.value)
        q, k, v = (x(hidden_states).unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2) for x in layers)
        return self.sparse_self_attention(q, k, v, key_padding_mask=attention_mask).transpose(1, 2).flatten(2)  # type: ignore[no-any-return]


class SparseAttentionUtils:
    """What adapts a model of transformers to longer sequences."""

    @staticmethod
    def extend_position_embedding(model: Any, max_position: int) -> Any:
        """Repeat the position table of a BERT or RoBERTa until it has `max_position` rows (RoBERTa: and its two reserved ones), in place.
        Return the model. Raises `ModelError` for other models and for a table that is as long."""
        body = getattr(model, "bert", None) or getattr(model, "roberta", None)
        if body is None:
            raise ModelError(
                "only a BERT's or RoBERTa's positions are extended",
                hint="repeat the rows of the model's position table",
            )
        table, reserved = body.embeddings.position_embeddings, 0 if hasattr(model, "bert") else 2
        before = table.weight.shape[0] - reserved
        if max_position <= before:
            raise ModelError(
                f"the position table has {before} rows, not fewer than {max_position}", hint="a larger max_position"
            )
        rows = table.weight.detach()[reserved:].repeat(-(-max_position // before), 1)[:max_position]
        table.weight = nn.Parameter(torch.cat([table.weight.detach()[:reserved], rows]))
        table.num_embeddings = max_position + reserved
        for name in ("position_ids", "token_type_ids"):
            buffer = getattr(body.embeddings, name, None)
            if buffer is not None:
                longer = (
                    torch.arange(max_position + reserved).unsqueeze(0)
                    if name == "position_ids"
                    else buffer.new_zeros(1, max_position + reserved)
                )
                setattr(body.embeddings, name, longer)
        model.config.max_position_embeddings = max_position + reserved
        return model

    @staticmethod
    def update_tokenizer_model_max_length(tokenizer: Any, max_position: int) -> Any:
        """Set the longest sequence of a tokenizer. Return it."""
        tokenizer.model_max_length = tokenizer.init_kwargs["model_max_length"] = max_position
        return tokenizer

    @staticmethod
    def replace_model_self_attention_with_sparse_self_attention(
        model: Any, max_position: int, sparsity_config: SparsityConfig
    ) -> Any:
        """Raise `UnsupportedError`: the plan makes attention sparse, and the model stays as it is."""
        raise UnsupportedError(
            "the layers of a model are not replaced",
            why="their signatures differ between releases of transformers, and a plan needs no other model",
            hint=f'the plan\'s attention={{"*": zgraph.{sparsity_config.sparsity!r}}}; or "sparse_attention" in the configuration',
        )

    @staticmethod
    def pad_to_block_size(
        block_size: int,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        pad_token_id: int,
        model_embeddings: Any,
    ) -> tuple[int, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Pad the inputs of a model, [rows, length], to a multiple of the block. Return (how much was padded, the inputs in their order)."""
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None:
            raise SignatureError("there is nothing to pad", hint="input_ids or inputs_embeds")
        pad = -given.shape[1] % block_size
        if not pad:
            return 0, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
        if inputs_embeds is not None:
            added = torch.full((len(inputs_embeds), pad), pad_token_id, dtype=torch.int64, device=inputs_embeds.device)
            inputs_embeds = torch.cat([inputs_embeds, model_embeddings(added)], dim=-2)

        def padded(x: Tensor | None, value: int) -> Tensor | None:
            return None if x is None else F.pad(x, (0, pad), value=value)

        ids, places = padded(input_ids, pad_token_id), padded(position_ids, pad_token_id)
        return pad, ids, padded(attention_mask, 0), padded(token_type_ids, 0), places, inputs_embeds

    @staticmethod
    def unpad_sequence_output(pad_len: int, sequence_output: Tensor) -> Tensor:
        """Return the output without its padding, [rows, length, hidden]."""
        return sequence_output[:, :-pad_len] if pad_len > 0 else sequence_output
