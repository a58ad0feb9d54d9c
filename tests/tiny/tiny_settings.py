# SPDX-License-Identifier: Apache-2.0
"""Settings and inputs of tiny models that no name says, by `model_type` or by class."""

from __future__ import annotations

from typing import Any

import torch


def _rope(*sections: int, **others: Any) -> dict[str, Any]:
    """Rotary embedding with sections for time, height and width."""
    return {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections), **others}
    }


_BOTH = ["sliding_attention", "full_attention"]

SETTINGS: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"layer_types": _BOTH, "rope_parameters": {one: {"rope_type": "default", "rope_theta": 10000.0} for one in _BOTH}},
    "cosmos3_edge_text": _rope(2, 3, 3),
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "donut-swin": {"image_size": 64, "window_size": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "ernie4_5_vl_moe_text": _rope(3, 3, 2),
    "efficientnet": {"hidden_dim": 320, "width_coefficient": 0.25, "depth_coefficient": 0.3},
    "esm": {"vocab_size": 128, "pad_token_id": 1, "mask_token_id": 27},
    "exaone4_5_vision": {"window_size": 16},
    "flint": {"mlp_only_layers": [0]},
    "fun_asr_nano_adaptor": {"intermediate_size": 16},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "gemma3n_text": {"num_kv_shared_layers": 0, "num_hidden_layers": 2, "layer_types": _BOTH, "activation_sparsity_pattern": [0.5, 0.0]},
    "glm4v_moe_text": _rope(1, 1, 2, partial_rotary_factor=0.5),
    "glm5_next_text": {"index_kpool": 2},
    "glmasr_encoder": {"intermediate_size": 256},
    "glm4v_text": _rope(2, 3, 3),
    "glm_image_text": _rope(2, 3, 3),
    "glm_ocr_text": _rope(2, 3, 3),
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"num_hidden_layers": 5},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "levit": {"image_size": 64, "patch_size": 16},
    "llava_next": {"image_grid_pinpoints": [[32, 32]]},
    "llava_next_video": {"image_grid_pinpoints": [[32, 32]]},
    "llava_onevision": {"image_grid_pinpoints": [[32, 32]]},
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 16, "input_size": 32},
    "lilt": {"hidden_size": 96},
    "llama4_vision_model": {"intermediate_size": 256},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8},
    "mobilevitv2": {"image_size": 64},
    "perceiver": {"d_latents": 64, "num_latents": 8, "num_self_attends_per_block": 2, "num_self_attention_heads": 4, "num_cross_attention_heads": 4},
    "qwen2_5_omni_text": _rope(2, 3, 3),
    "qwen2_5_omni_vision_encoder": {"window_size": 16},
    "qwen2_5_vl_text": _rope(2, 3, 3),
    "qwen2_5_vl_vision": {"window_size": 16},
    "qwen2_vl_text": _rope(2, 3, 3),
    "qwen3_asr_encoder": {"n_window": 16},
    "qwen4_exp_text": {
        "eos_token_id": 1,
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 2,
        "ple_layer_ids": [1], "ple_embed_dim": 16, "ngram_vocab_size_base": 64, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": (16, 48), "axial_pos_shape": (4, 8)},
    "ReformerModelWithLMHead": {"is_decoder": True},
    "resnet": {"num_labels": 16},
    "shieldgemma2": {"yes_token_index": 5, "no_token_index": 6},
    "swin": {"image_size": 64, "window_size": 2},
    "textnet": {"image_size": [32, 32]},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "voxtral_encoder": {"intermediate_size": 256},
    "vits": {"upsample_initial_channel": 32},
    "wav2vec2-bert": {"vocab_size": 128},
    "wav2vec2-conformer": {"vocab_size": 128},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
}  # fmt: skip

UNMADE: dict[str, str] = {
    "blt": "its configuration has no num_hidden_layers, which its cache asks for",
    "gemma4_assistant": "it reads the keys and values of another model",
    "gemma4_unified_assistant": "it reads the keys and values of another model",
}
"""Models that are not made, with the reason."""

INPUTS: dict[str, dict[str, Any]] = {
    "dia": {"decoder_input_ids": torch.arange(2, 110).view(2, 6, 9)},
    "gemma4_audio": {"input_features": (2, 64, 128)},
    "granite_speech5_encoder": {"input_features": (2, 64, 320)},
    "granite_speech5_ctc": {"input_features": (2, 64, 320)},
    "neomme": {"pixel_values": None},
    "pop2piano": {"input_features": None},
    "qwen2_audio": {
        "attention_mask": torch.ones(2, 12, dtype=torch.long)
    },  # it makes a longer one, which no result is chosen by
    "speech-encoder-decoder": {"input_features": None},
    "voxtral_realtime": {"input_features": (2, 128, 96)},
}
"""Inputs by `model_type`, where names and configuration do not say them: a shape, a tensor, or None for none."""

BESIDE_SDPA = ("grounding-dino", "mm-grounding-dino", "seamless_m4t_v2")
"""Models that make a boolean mask, which transformers' eager attention adds to the scores as 0 and 1."""
