"""Architectures of transformers, each as a model of two narrow layers with a batch of its own kind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

import zgraph

WORDS = 99
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_MARKS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = {
    **_SIZES,
    **_MARKS,
    "vocab_size": WORDS,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_ENCODER = {**_SIZES, **_STILL, "vocab_size": WORDS, "max_position_embeddings": 64, "pad_token_id": 0}
_PAIR = {
    **_MARKS, "vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0, "decoder_start_token_id": 1,
}  # fmt: skip
_PICTURES = {"image_size": 16, "patch_size": 8}
_TWO_OF_FOUR = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SMALL_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
_LATENT = {
    **_ROUTED, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_group": 2, "topk_group": 1,
}  # fmt: skip
_STATES = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
_ALTERNATING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}

_GATED = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_OF_ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 1}
_OF_NEMOTRON = {
    **_ROUTED, "num_hidden_layers": 4, "hybrid_override_pattern": "M*-E", "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8,
    "n_groups": 1, "chunk_size": 8, "moe_shared_expert_intermediate_size": 24,
}  # fmt: skip

DECODERS: dict[str, dict[str, Any]] = {  # language models: what their config has besides `_DECODER`
    "Afmoe": {**_SMALL_EXPERTS, **_ALTERNATING, "num_dense_layers": 1, "num_shared_experts": 1},
    "BioGpt": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "Cohere2Moe": _SMALL_EXPERTS,
    "Cwm": {},
    "DeepseekV4": _LATENT,
    "DiffLlama": {},
    "Doge": {},
    "Dots1": {**_ROUTED, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "Ernie4_5_Moe": _OF_ERNIE,
    "ExaoneMoe": {**_SMALL_EXPERTS, "num_shared_experts": 1, "first_last_k_dense_replace": 1},
    "FalconMamba": {},
    "Glm": {},
    "Glm4MoeLite": _LATENT,
    "GlmMoeDsa": _LATENT,
    "GraniteMoeHybrid": {
        **_STATES,
        **_TWO_OF_FOUR,
        "shared_intermediate_size": 24,
        "layer_types": ["mamba", "attention"],
    },
    "HunYuanMoEV1": {"num_experts": 4, "moe_topk": [2, 2], "moe_intermediate_size": 24},
    "Jais2": {},
    "Lfm2Moe": {
        **_SMALL_EXPERTS,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention"],
        "full_attn_idxs": [1],
    },
    "ModernBertDecoder": {"layer_types": ["sliding_attention", "full_attention"]},
    "Mpt": {"attn_config": {"attn_pdrop": 0}, "resid_pdrop": 0, "emb_pdrop": 0},
    "NemotronH": _OF_NEMOTRON,
    "OlmoHybrid": {},
    "Persimmon": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "SolarOpen": _ROUTED,
    "Youtu": _LATENT,
    "Apertus": {},
    "Arcee": {},
    "Bamba": {**_STATES, "attn_layer_indices": [1]},
    "Cohere": {},
    "Cohere2": {"sliding_window": 4},
    "DeepseekV2": _LATENT,
    "DeepseekV3": _LATENT,
    "Ernie4_5": {},
    "Exaone4": {"sliding_window": 4},
    "FalconH1": {**_STATES, "mamba_d_ssm": 64},
    "GPTNeoX": {},
    "FlexOlmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "Gemma": {},
    "Gemma2": {"sliding_window": 4},
    "Glm4": {},
    "Glm4Moe": _ROUTED,
    "GptOss": {**_TWO_OF_FOUR, "sliding_window": 4},
    "Granite": {},
    "GraniteMoe": _TWO_OF_FOUR,
    "JetMoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8, "num_key_value_heads": 2},
    "Helium": {},
    "HunYuanDenseV1": {},
    "Jamba": {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "Lfm2": {"full_attn_idxs": [1], "block_auto_adjust_ff_dim": False},
    "MiniMax": {**_TWO_OF_FOUR, "block_size": 8, "layer_types": ["linear_attention", "full_attention"]},
    "MiniMaxM2": _TWO_OF_FOUR,
    "Ministral3": {},
    "Mistral": {"sliding_window": 5},
    "Mixtral": _TWO_OF_FOUR,
    "NanoChat": {},
    "Nemotron": {},
    "Olmo": {},
    "Olmo2": {},
    "Olmo3": {"sliding_window": 4},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "Phi": {},
    "Phi3": {},
    "Phimoe": _TWO_OF_FOUR,
    "Qwen2": {},
    "Qwen2Moe": {**_SMALL_EXPERTS, "shared_expert_intermediate_size": 24},
    "Qwen3": {},
    "Qwen3Moe": _SMALL_EXPERTS,
    "Qwen3Next": {
        **_SMALL_EXPERTS,
        "shared_expert_intermediate_size": 24,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "RecurrentGemma": {"lru_width": 32, "attention_window_size": 8, "num_hidden_layers": 3},
    "SeedOss": {},
    "SmolLM3": {},
    "StableLm": {},
    "Starcoder2": {},
    "VaultGemma": {"sliding_window": 4},
}

_GRID = {"image_token_id": 97, "video_token_id": 98, "vision_start_token_id": 96, "vision_end_token_id": 95}
_SOUND = {
    **_SIZES, "vocab_size": WORDS, "pad_token_id": 0, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0,
    "layerdrop": 0.0, "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
}  # fmt: skip
_OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {  # (class of the model, of its config, fields)
    "Gemma4": (
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {**_DECODER, **_ALTERNATING, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": WORDS, "global_head_dim": 8},
    ),
    "Qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", {**_DECODER, **_GATED}),
    "Qwen3_5Moe": (
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeTextConfig",
        {**_DECODER, **_GATED, **_SMALL_EXPERTS, "shared_expert_intermediate_size": 24},
    ),
    "Gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**_DECODER, **_ALTERNATING}),
    "Llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {**_DECODER, "num_local_experts": 2, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2, "attention_chunk_size": 8},
    ),
    "Bloom": ("BloomForCausalLM", "BloomConfig", {"vocab_size": WORDS, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "Falcon": ("FalconForCausalLM", "FalconConfig", {**_SIZES, "vocab_size": WORDS}),
    "GPTJ": (
        "GPTJForCausalLM",
        "GPTJConfig",
        {"vocab_size": WORDS, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    ),
    "GPTNeo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "vocab_size": WORDS, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
            "window_size": 4, "max_position_embeddings": 64,
        },
    ),
    "OPT": (
        "OPTForCausalLM",
        "OPTConfig",
        {**_SIZES, "vocab_size": WORDS, "ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": 32, "dropout": 0.0},
    ),
    "XGLM": (
        "XGLMForCausalLM",
        "XGLMConfig",
        {"vocab_size": WORDS, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "dropout": 0.0, "attention_dropout": 0.0},
    ),
    "Mamba": ("MambaForCausalLM", "MambaConfig", {"vocab_size": WORDS, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}),
    "Mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            "vocab_size": WORDS, "hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 8, "num_hidden_layers": 2, "n_groups": 2,
            "chunk_size": 8,
        },
    ),
    "Rwkv": ("RwkvForCausalLM", "RwkvConfig", {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 64}),
    "XLNet": (
        "XLNetForSequenceClassification",
        "XLNetConfig",
        {"vocab_size": WORDS, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "dropout": 0.0, "summary_last_dropout": 0.0},
    ),
    "Albert": (
        "AlbertForSequenceClassification",
        "AlbertConfig",
        {**_ENCODER, "embedding_size": 16, "classifier_dropout_prob": 0.0},
    ),
    "BERT": ("BertForSequenceClassification", "BertConfig", _ENCODER),
    "DeBERTa-v2": (
        "DebertaV2ForSequenceClassification",
        "DebertaV2Config",
        {**_ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "pooler_hidden_size": 32, "pooler_dropout": 0.0},
    ),
    "DistilBERT": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"vocab_size": WORDS, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "dropout": 0.0, "attention_dropout": 0.0},
    ),
    "Electra": (
        "ElectraForSequenceClassification",
        "ElectraConfig",
        {**_ENCODER, "embedding_size": 16, "classifier_dropout": 0.0},
    ),
    "Longformer": (
        "LongformerForSequenceClassification",
        "LongformerConfig",
        {**_ENCODER, "attention_window": [4, 4], "pad_token_id": 1},
    ),
    "MPNet": ("MPNetForSequenceClassification", "MPNetConfig", {**_ENCODER, "pad_token_id": 1}),
    "ModernBERT": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {**_ENCODER, **_MARKS, "local_attention": 4, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "RoBERTa": ("RobertaForMaskedLM", "RobertaConfig", {**_ENCODER, "pad_token_id": 1}),
    "BART": ("BartForConditionalGeneration", "BartConfig", {**_PAIR, "max_position_embeddings": 64, "forced_eos_token_id": 2}),
    "Pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", {**_PAIR, "max_position_embeddings": 64}),
    "T5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
    ),
    "Whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**_PAIR, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32, "suppress_tokens": None, "begin_suppress_tokens": None},
    ),
    "Wav2Vec2": ("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", {**_SOUND, "num_labels": 3}),
    "Wav2Vec2 with CTC": ("Wav2Vec2ForCTC", "Wav2Vec2Config", _SOUND),
    "ConvNeXt": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 3},
    ),
    "DINOv2": (
        "Dinov2ForImageClassification",
        "Dinov2Config",
        {**_PICTURES, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 3},
    ),
    "ResNet": (
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 3},
    ),
    "SegFormer": (
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {
            "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [7, 3], "strides": [4, 2],
            "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16, "classifier_dropout_prob": 0.0,
            "drop_path_rate": 0.0, "num_labels": 3,
        },
    ),
    "Swin": (
        "SwinForImageClassification",
        "SwinConfig",
        {
            "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "drop_path_rate": 0.0,
            "num_labels": 3,
        },
    ),
    "ViT": ("ViTForImageClassification", "ViTConfig", {**_SIZES, **_PICTURES, "num_labels": 3}),
    "CLIP": (
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {**_SIZES, **_MARKS, "vocab_size": WORDS, "max_position_embeddings": 32},
            "vision_config": {**_SIZES, **_PICTURES},
            "projection_dim": 16,
        },
    ),
    "SigLIP": (
        "SiglipModel",
        "SiglipConfig",
        {
            "text_config": {**_SIZES, "vocab_size": WORDS, "max_position_embeddings": 32, "projection_size": 32},
            "vision_config": {**_SIZES, **_PICTURES},
        },
    ),
    "LLaVA": (
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "text_config": {"model_type": "llama", **_DECODER},
            "vision_config": {"model_type": "clip_vision_model", **_SIZES, **_PICTURES},
            "image_token_id": 97,
            "vision_feature_layer": -1,
        },
    ),
    "Qwen2.5-VL": (
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        {
            **_GRID,
            "text_config": {**_DECODER, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2], "rope_theta": 1e4}},
            "vision_config": {
                "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2,
                "temporal_patch_size": 2, "out_hidden_size": 32, "window_size": 8, "fullatt_block_indexes": [1],
            },
        },
    ),
}  # fmt: skip

REFUSED = ("Longformer", "Wav2Vec2 with CTC")
"""Look at values of tensors, or turn cuDNN off, in forward."""
LANGUAGE = sorted({*DECODERS} | {n for n, (kind, *_) in _OTHERS.items() if kind.endswith("ForCausalLM")}, key=str.lower)
"""Language models: dense ones, mixtures of experts, state spaces."""
ELSE = sorted({*_OTHERS} - {*LANGUAGE} - {*REFUSED}, key=str.lower)
"""Encoders, pairs of encoder and decoder, vision, sound, several kinds of input."""


def words() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 90, (2, 11), generator=draw)
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def pictures(side: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, side, side), "labels": torch.tensor([0, 2])}


def _of_words_and_pictures(patches: int, **more: Any) -> dict[str, Any]:
    ids = torch.tensor([[5, *[97] * patches, 7, 8, 9]])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids.masked_fill(ids == 97, -100),
        **more,
    }


_BATCHES: dict[str, Callable[[], dict[str, Any]]] = {
    "Mamba": lambda: {k: v for k, v in words().items() if k != "attention_mask"},
    "Rwkv": lambda: {k: v for k, v in words().items() if k != "attention_mask"},
    "Whisper": lambda: {"input_features": torch.randn(2, 16, 40), "labels": words()["labels"]},
    "Wav2Vec2": lambda: {"input_values": torch.randn(2, 400), "labels": torch.tensor([0, 2])},
    "Wav2Vec2 with CTC": lambda: {"input_values": torch.randn(2, 400), "labels": torch.randint(3, WORDS, (2, 5))},
    "ViT": lambda: pictures(16),
    "DINOv2": lambda: pictures(16),
    "Swin": lambda: pictures(32),
    "ConvNeXt": lambda: pictures(32),
    "ResNet": lambda: pictures(32),
    "SegFormer": lambda: {**pictures(32), "labels": torch.randint(0, 3, (2, 32, 32))},
    "CLIP": lambda: {**words(), **pictures(16), "labels": None, "return_loss": True},
    "SigLIP": lambda: {
        "input_ids": words()["input_ids"],
        "pixel_values": torch.randn(2, 3, 16, 16),
        "return_loss": True,
    },
    "LLaVA": lambda: _of_words_and_pictures(4, pixel_values=torch.randn(1, 3, 16, 16)),
    "Qwen2.5-VL": lambda: _of_words_and_pictures(
        4, pixel_values=torch.randn(16, 96), image_grid_thw=torch.tensor([[1, 4, 4]])
    ),
}


def build(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """(a model in train mode, a batch of keywords with which it gives a loss)."""
    import transformers

    kind, config, fields = _OTHERS.get(name) or (f"{name}ForCausalLM", f"{name}Config", {**_DECODER, **DECODERS[name]})
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**fields)).train()
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    if name in _BATCHES:
        batch = {k: v for k, v in _BATCHES[name]().items() if v is not None}
    elif kind.endswith("SequenceClassification"):
        batch = {**words(), "labels": torch.tensor([0, 1])}
    else:
        batch = words()
    return model, batch


def for_two_ranks(name: str) -> tuple[torch.nn.Module, dict[str, Any], dict[str, Any]]:
    """(a model, a batch of which each of two ranks has a half, what its plan declares)."""
    model, batch = build(name)
    if name != "Qwen2.5-VL":
        return model, batch, {}
    two = {k: torch.stack([v, v.flip(0)]) if k == "pixel_values" else v.repeat(2, 1) for k, v in batch.items()}
    return model, two, {"image_grid_thw": "value"}


def compare(name: str, backend: str) -> tuple[float, float]:
    """What compiled training differs from plain PyTorch's by: the loss, relative, and the worst gradient, in parts of all gradients' norm."""
    plain, batch = build(name)
    mine = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(backend=backend))
    losses = []
    for model in (plain, mine):
        torch.manual_seed(5)
        losses.append(model(**batch).loss)
        losses[-1].backward()
    pairs = [(a.grad, b.grad) for a, b in zip(plain.parameters(), mine.parameters(), strict=True)]
    assert all((a is None) == (b is None) for a, b in pairs)
    grads = [(a, b) for a, b in pairs if a is not None]
    total = torch.stack([a.norm() for a, _ in grads]).norm()
    worst = max(float((a - b).norm() / total) for a, b in grads)
    return float((losses[0] - losses[1]).abs() / losses[0].abs()), worst
