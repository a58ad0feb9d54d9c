# SPDX-License-Identifier: Apache-2.0
"""Any architecture of the installed transformers, made tiny: the sizes of its configuration become small ones by their
names, and of its layers one of each kind stays; `tiny_settings.py` has what names do not say."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
import transformers
from tiny_settings import SETTINGS
from torch import nn
from transformers.backbone_utils import BackboneConfigMixin

HIDDEN, HEADS, HEAD, LENGTH = 64, 4, 16, 12
VOCABULARY = 128

# The first pattern that fits the name of a setting gives its value; a function gets the default.
SIZES: list[tuple[str, Any]] = [
    (r".*vocab_size.*|num_codebook_vectors|n_vocab", VOCABULARY),
    (r"(num_)?(hidden_layers|layers|encoder_layers|decoder_layers)|speech_encoder_layers|n_layers?|num_hidden_layers|(encoder|decoder)_num_hidden_layers|num_(encoder|decoder)_layers|depth", 2),
    (r"num_key_value_heads|num_kv_heads|n_head_kv|n_kv_heads|num_global_key_value_heads|swa_num_key_value_heads", lambda old: old if old == 1 else 2),
    (r"(num_|n_|encoder_|decoder_)?(attention_|attn_)?heads?|num_attention_heads|(num_)?(encoder|decoder)_(num_)?(attention_)?heads|n_heads?|speech_encoder_attention_heads|swa_num_attention_heads", HEADS),
    (r"hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|embedding_dim|model_dim|emb_dim|hidden_dim|decoder_hidden_size|word_embed_proj_dim|lru_width|attention_hidden_size", HIDDEN),
    (r".*intermediate_size|.*ffn_dim|d_ff|n_inner|ffn_hidden_size|ffn_size|intermediate_dim|mlp_dim|.*ffn_hidden_size|shared_expert_dim", 96),
    (r"head_dim|d_kv|.*v_head_dim|attention_head_dim|global_head_dim|key_value_head_dim|kv_channels|qk_nope_head_dim|index_head_dim|swa_head_dim", HEAD),
    (r".*qk_rope_head_dim|rotary_dim", 8),
    (r"(num_experts|n_routed_experts|num_local_experts|moe_num_experts)", 4),
    (r"num_experts_per_tok|num_experts_per_token|moe_topk|moe_k|top_k_experts", lambda old: min(old, 2)),
    (r"n_group|topk_group|num_expert_group", 1),
    (r".*lora_rank|.*_lora_dim|.*low_rank.*dim", 32),
    (r"max_position_embeddings|n_positions|max_sequence_length|n_ctx|max_seq_len", lambda old: min(old, 128)),
    (r"sliding_window|attention_window_size|attention_chunk_size|window_size|local_attention_window", lambda old: 8),
    (r"index_topk", 4), (r"index_n_heads", 2),
    (r"linear_num_(key_|value_)?heads", HEADS), (r"mamba_num_heads|mamba_n_heads", 2 * HEADS),
    (r"linear_(key_|value_)?head_dim|mamba_head_dim|mamba_d_head", HEAD),
    (r"state_size|mamba_d_state|ssm_state_size|mamba_state_size", 16),
    (r"n_groups|mamba_n_groups", lambda old: min(old, 2)),
    (r"time_step_rank|mamba_dt_rank", 8),
    (r"first_k_dense_replace|num_dense_layers", lambda old: min(old, 1)),
    (r"hidden_size_per_layer_input", 16),
    (r"mm_tokens_per_image|num_filters", 4), (r"num_queries", 8), (r"output_channels", HIDDEN), (r"encoder_hidden_size|projector_input_dim|upsample_groups", HIDDEN),
    (r"image_size|img_size", 32),
    (r"patch_size", lambda old: min(old, 8)),
    (r"(out|output|vision_output)_(hidden_size|dim)|projection_dim|projector_hidden_size|text_hidden_size|audio_hidden_size|vision_hidden_size", HIDDEN),
    (r"max_source_positions", lambda old: min(old, 32)),
]  # fmt: skip

PLACEHOLDERS = {
    f"{kind}_token_{end}": 100 + i for i, kind in enumerate(("image", "video", "audio")) for end in ("id", "index")
}
"""Tokens that no text of the tests has."""


def tiny_config(kind: type, **settings: Any) -> Any:
    """A configuration of this class in which all is small."""
    settings = SETTINGS.get(kind.model_type, {}) | settings
    default = kind()
    for field in dataclasses.fields(kind):
        if field.name not in settings and (new := _small(field.name, field.default)) is not None:
            settings[field.name] = new
    for name in kind.sub_configs:
        if name not in settings and isinstance(one := getattr(default, name, None), transformers.PreTrainedConfig):
            stages = {"out_features": one.out_features} if isinstance(one, BackboneConfigMixin) and hasattr(one, "depths") else {}
            settings[name] = tiny_config(type(one), **stages)
    if vars(default).get("num_key_value_heads") == vars(default).get("num_attention_heads", 0):
        settings.pop("num_key_value_heads", None)  # each head has keys of its own, or (MLA) must have them
        settings |= {name: HEADS for name in _names(kind) & {"num_key_value_heads"}}
    _keep_one_of_each(default, settings)
    _make_stages_small(default, settings)
    return kind(**settings)


def _names(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def _small(name: str, old: Any) -> Any:
    if name in PLACEHOLDERS:
        return PLACEHOLDERS[name]
    if name.endswith("token_id") or name.endswith("token_index"):
        return 1 + sum(map(ord, name)) % (VOCABULARY - 2) if isinstance(old, int) and old >= VOCABULARY else None
    if old is None and name in ("head_dim", "num_key_value_heads"):  # for some models this does not mean the usual
        return HEAD if name == "head_dim" else HEADS
    if isinstance(old, bool) or not isinstance(old, int) or old < 1:
        return None
    for pattern, new in SIZES:
        if re.fullmatch(pattern, name):
            return new(old) if callable(new) else new
    return None


def _keep_one_of_each(default: Any, settings: dict[str, Any]) -> None:
    """Of lists with an entry for each layer keep so many that each kind of layer is there."""
    count = getattr(default, "num_hidden_layers", None)
    lists = {
        name: list(value)
        for name, value in vars(default).items()
        if isinstance(value, list | tuple) and count and len(value) == count and name not in settings
    }
    if not lists:
        return
    kinds = list(zip(*lists.values(), strict=True))
    kept = sorted({str(kind): i for i, kind in reversed(list(enumerate(kinds)))}.values())[:6]
    if len(kept) == 1 < count:
        kept = [0, 1]
    for name, value in lists.items():
        settings[name] = [value[i] for i in kept]
    settings[type(default).attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(kept)


def _make_stages_small(default: Any, settings: dict[str, Any]) -> None:
    """Of a network of stages the width of the first, which each stage doubles with its heads, and the depths."""
    heads, depths = vars(default).get("num_heads"), settings.get("depths", vars(default).get("depths"))
    if isinstance(heads, list | tuple) and isinstance(vars(default).get("embed_dim"), int):
        settings["embed_dim"] = HEAD * heads[0]
    if isinstance(depths, list | tuple):
        settings["depths"] = [min(depth, 2) for depth in depths]


def tiny_model(name: str, config: Any) -> torch.nn.Module:
    """The model class of this name in float32, with random weights that make the result depend on each part."""
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).float().eval()
    if model.can_generate():
        model.generation_config.update(max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
        if model.generation_config.decoder_start_token_id is None:
            model.generation_config.decoder_start_token_id = 2
    generator = torch.Generator().manual_seed(1)
    kernels = {id(module.weight) for module in model.modules() if isinstance(module, nn.modules.conv._ConvNd)}
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.requires_grad:
                continue  # sinusoids, which no file has
            if parameter.dim() > 1:
                fan_in = parameter[0].numel() if id(parameter) in kernels else parameter.shape[-1]
                parameter.normal_(0.0, fan_in**-0.5, generator=generator)
            elif parameter.dim() == 1 and not parameter.any():
                parameter.normal_(0.0, 0.1, generator=generator)
    return model
