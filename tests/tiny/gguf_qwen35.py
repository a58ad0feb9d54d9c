# SPDX-License-Identifier: Apache-2.0
"""GGUF files of small random Qwen3.5 models, changed as llama.cpp's converter changes them (conversion/qwen.py), and the
same models with the weights that the gguf package decodes from the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from gguf_files import _keys_replaced, _write_words, gguf, transformers
from torch import Tensor

SIZES = dict(vocab_size=64, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=64, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=32, linear_value_head_dim=64, linear_conv_kernel_dim=4, rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2]}, bos_token_id=1, eos_token_id=2, pad_token_id=0)  # fmt: skip
CONFIGS = {
    "qwen35": transformers.Qwen3_5TextConfig(**SIZES, intermediate_size=256),
    "qwen35moe": transformers.Qwen3_5MoeTextConfig(**SIZES, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=96),
}  # fmt: skip
"""By ``general.architecture``."""
NAMES = {
    "input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "post_attention_norm.weight",
    "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias", "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.norm.weight": "ssm_norm.weight", "linear_attn.out_proj.weight": "ssm_out.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight", "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight", "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "self_attn.o_proj.weight": "attn_output.weight", "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight", "mlp.experts.down_proj": "ffn_down_exps.weight",
    **{f"self_attn.{of}_proj.weight": f"attn_{of}.weight" for of in "qkv"},
    **{f"self_attn.{of}_norm.weight": f"attn_{of}_norm.weight" for of in "qk"},
    **{f"mlp.{of}_proj.weight": f"ffn_{of}.weight" for of in ("gate", "up", "down")},
    **{f"mlp.shared_expert.{of}_proj.weight": f"ffn_{of}_shexp.weight" for of in ("gate", "up", "down")},
}  # fmt: skip


def reordered(value: Tensor, dim: int, first: int, second: int, size: int) -> Tensor:
    """Swap the two dimensions that ``dim`` counts as ``[first, second, size]``; the inverse has first and second swapped."""
    parts = value.movedim(dim, 0).unflatten(0, (first, second, size))
    return parts.swapaxes(0, 1).flatten(0, 2).movedim(0, dim).contiguous()


def ordered(config, name: str, value: Tensor, to_file: bool) -> Tensor:
    """Value heads in the order of the file, or back in that of the model."""
    keys, each, size = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads, config.linear_value_head_dim
    counts = (keys, each) if to_file else (each, keys)
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        before = 2 * keys * config.linear_key_head_dim
        return torch.cat([value[:before], reordered(value[before:], 0, *counts, size)])
    if name.endswith("in_proj_z.weight"):
        return reordered(value, 0, *counts, size)
    if name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        return reordered(value, 0, *counts, 1)
    return reordered(value, 1, *counts, size) if name.endswith("linear_attn.out_proj.weight") else value


def is_shifted(name: str) -> bool:
    return name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")


def write_qwen35(path: Path, name: str, type: str = "F32", config=None, words: bool = False, more: Callable[[gguf.GGUFWriter], None] = lambda writer: None) -> torch.nn.Module:
    """Write a random model with matrices of ``type``, and return it with the weights of the file; with ``words`` that its
    tokenizer can cut a text into."""
    config = config or CONFIGS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    writer = gguf.GGUFWriter(path, name)
    _write_keys(writer, config, name)
    _write_words(writer, config, words)
    with _keys_replaced(writer):
        more(writer)
    state = model.state_dict()
    for key, value in state.items():
        spread = 0.3 if key.endswith(("gate.weight", "conv1d.weight")) else 0.06
        if not key.endswith(("A_log", "dt_bias")):
            value.copy_(torch.randn(value.shape) * (0.1 if value.dim() == 1 else spread) + (key.endswith("linear_attn.norm.weight")))
        else:
            value.copy_(torch.rand(value.shape) * 2)
        _write_tensor(writer, config, key, value, type)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file()
    writer.close()
    return model


def _write_tensor(writer: gguf.GGUFWriter, config, key: str, value: Tensor, type: str) -> None:
    """Write a parameter as the converter does, and set it to what the file holds."""
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
    of_layer = key.removeprefix("model.layers.").partition(".")
    prefix, name = ("", top[key]) if key in top else (f"blk.{of_layer[0]}.", NAMES.get(of_layer[2], ""))
    if key.endswith("gate_up_proj"):
        halves = [_written(writer, f"{prefix}ffn_{of}_exps.weight", half, type) for of, half in zip(("gate", "up"), value.chunk(2, 1), strict=True)]
        value.copy_(torch.cat(halves, 1))
        return
    in_file = ordered(config, key, value, to_file=True)
    if key.endswith("A_log"):
        in_file = -in_file.exp()
    elif key.endswith("conv1d.weight"):
        in_file = in_file.squeeze(1)
    elif key.endswith("shared_expert_gate.weight"):
        in_file = in_file[0]
    kept = in_file.dim() == 1 or key.endswith(("conv1d.weight", "mlp.gate.weight"))
    read = _written(writer, prefix + name, in_file + 1 if is_shifted(key) else in_file, "F32" if kept else type)
    if not kept:
        value.copy_(ordered(config, key, read, to_file=False))


def _written(writer: gguf.GGUFWriter, name: str, value: Tensor, type: str) -> Tensor:
    kind = gguf.GGMLQuantizationType[type]
    data = gguf.quantize(value.numpy(), kind)
    writer.add_tensor(name, data, raw_dtype=kind)
    return torch.from_numpy(np.array(gguf.dequantize(data, kind), np.float32)).view(value.shape)


def _write_keys(writer: gguf.GGUFWriter, config, name: str) -> None:
    writer.add_name("tiny"), writer.add_context_length(config.max_position_embeddings), writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers), writer.add_head_count(config.num_attention_heads), writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim), writer.add_value_length(config.head_dim), writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"]), writer.add_rope_dimension_count(int(config.head_dim * rope["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim), writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads), writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads), writer.add_full_attention_interval(4)
    if name == "qwen35":
        writer.add_feed_forward_length(config.intermediate_size)
        return
    writer.add_expert_count(config.num_experts), writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size), writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
