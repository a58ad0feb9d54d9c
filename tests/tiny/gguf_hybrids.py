# SPDX-License-Identifier: Apache-2.0
"""GGUF files of small random models with state spaces, short convolutions or gated delta nets, changed as llama.cpp's
converter changes them (conversion/mamba.py, granite.py, falcon_h1.py, nemotron.py, lfm2.py, qwen.py). Tensors are named by
the table of the gguf package, as there, from the names of checkpoints; values are computed in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from gguf_files import _keys_replaced, _write_words, gguf, transformers
from torch import Tensor

SIZES = dict(vocab_size=64, hidden_size=64, bos_token_id=1, eos_token_id=2, pad_token_id=0)
ATTENTION = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)
HYBRID = SIZES | ATTENTION | dict(num_hidden_layers=4, intermediate_size=96)
SOME = dict(layer_types=["conv", "conv", "full_attention", "conv"])
GRANITE = dict(layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"], mamba_n_heads=8, mamba_d_state=32, mamba_n_groups=2, position_embedding_type=None, attention_multiplier=0.2, embedding_multiplier=3.0, residual_multiplier=0.4, logits_scaling=2.0)  # fmt: skip
NEMOTRON = SIZES | ATTENTION | dict(head_dim=32, mamba_num_heads=8, mamba_head_dim=16, n_groups=2, ssm_state_size=32, intermediate_size=96)
FALCON = HYBRID | dict(head_dim=32, num_hidden_layers=2, mamba_d_ssm=128, mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=32, mamba_norm_before_gate=False, rope_parameters={"rope_type": "default", "rope_theta": 1e11}, lm_head_multiplier=0.4, embedding_multiplier=3.0, mlp_multipliers=[0.7, 1.4], key_multiplier=0.6, attention_out_multiplier=0.8, attention_in_multiplier=1.2, ssm_multipliers=[0.9, 0.8, 0.7, 1.3, 1.1], ssm_in_multiplier=1.25, ssm_out_multiplier=0.5)  # fmt: skip
CONFIGS = {
    "lfm2": transformers.Lfm2Config(**HYBRID, **SOME, block_multiple_of=32),
    "lfm2moe": transformers.Lfm2MoeConfig(**HYBRID, **SOME, moe_intermediate_size=32, num_experts=5, num_experts_per_tok=2, num_dense_layers=1),
    "mamba": transformers.MambaConfig(**SIZES, num_hidden_layers=2, state_size=16, time_step_rank=32),
    "falcon mamba": transformers.FalconMambaConfig(**SIZES, num_hidden_layers=2, state_size=16, tie_word_embeddings=False),
    "mamba2": transformers.Mamba2Config(**SIZES, num_hidden_layers=2, num_heads=8, head_dim=16, state_size=32, n_groups=2),
    "granitehybrid": transformers.GraniteMoeHybridConfig(**HYBRID, **GRANITE, num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=96, tie_word_embeddings=True),
    "granitehybrid with experts": transformers.GraniteMoeHybridConfig(**HYBRID | dict(intermediate_size=32), **GRANITE, num_local_experts=5, num_experts_per_tok=2, shared_intermediate_size=96),
    "falcon-h1": transformers.FalconH1Config(**FALCON, mamba_rms_norm=True),
    "falcon-h1 without norm": transformers.FalconH1Config(**FALCON, mamba_rms_norm=False),
    "nemotron_h": transformers.NemotronHConfig(**NEMOTRON, layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]),
    "nemotron_h_moe": transformers.NemotronHConfig(**NEMOTRON, layers_block_type=["linear_attention", "moe", "full_attention", "moe"], n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, moe_shared_expert_intermediate_size=96, routed_scaling_factor=1.6),
    "qwen3next": transformers.Qwen3NextConfig(**HYBRID, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=32, linear_value_head_dim=32, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=96),
}  # fmt: skip
"""By ``general.architecture``, and what follows it here."""


def architecture_of(name: str) -> str:
    return "mamba" if name == "falcon mamba" else name.partition(" ")[0]


def model_of(name: str, config=None) -> torch.nn.Module:
    """A random model of this name, none of whose numbers is a default."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config or CONFIGS[name], attn_implementation="eager").float().eval()
    for key, value in model.state_dict().items():
        if key.endswith(("A_log", "dt_bias", "dt_proj.bias")):
            value.copy_(torch.rand(value.shape) * 2 - 1)
        elif value.dim() == 1:
            is_norm = key.endswith(("norm.weight", "norm_f.weight", "layernorm.weight", ".D")) and architecture_of(name) != "qwen3next"
            value.copy_(torch.randn(value.shape) * 0.1 + (is_norm or key.endswith("linear_attn.norm.weight")))
        else:
            value.copy_(torch.randn(value.shape) * (0.5 if key.endswith(("conv1d.weight", "conv.conv.weight", "gate.weight", "router.weight")) else 0.12))
    return model


def permuted(rows: Tensor, heads: int) -> Tensor:
    """The rows of q or k as the files of Llama have them: columns i and i + d / 2 of a head lie side by side."""
    return rows.unflatten(0, (heads, 2, -1)).swapaxes(1, 2).flatten(0, 2)


def converted(name: str, model: torch.nn.Module) -> dict[str, Tensor]:
    """The tensors of the file, in float64."""
    architecture, config = architecture_of(name), model.config
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    table = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    tied = set(model.all_tied_weights_keys)
    made = {}
    for key, value in model.state_dict().items():
        if key in tied:
            continue
        for of, changed in changes(name, config, key, value.double()):
            direct = of if of.startswith(("blk.", "output", "token_embd")) else table.get_name(of, try_suffixes=(".weight", ".bias"))
            assert direct is not None and direct not in made, (key, of)
            made[direct] = changed
    return made


def changes(name: str, config, key: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The names in a checkpoint, or in the file, of what the converter makes of a parameter, with the values."""
    architecture = architecture_of(name)
    if architecture.startswith("nemotron_h"):
        key = key.replace("model.", "backbone.", 1)
    if architecture in ("granitehybrid", "nemotron_h", "nemotron_h_moe") and key.endswith(("q_proj.weight", "k_proj.weight")):
        value = permuted(value, config.num_attention_heads if key.endswith("q_proj.weight") else config.num_key_value_heads)
    if architecture == "qwen3next" and key.endswith("norm.weight") and not key.endswith("linear_attn.norm.weight"):
        value = value + 1
    if architecture == "falcon-h1":
        value = with_factors(config, key, value)
    if key.endswith("A_log"):
        value = -value.exp()
    if key.endswith((".A_log", ".D")) and architecture not in ("mamba", "qwen3next"):
        value = value[:, None]
    if key.endswith(("conv1d.weight", "conv.conv.weight")):
        value = value.squeeze(1)
    if key.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        value = value.unflatten(0, (getattr(config, "n_groups", None) or config.mamba_n_groups, -1))
    if key.endswith("dt_bias"):
        key = key.replace("dt_bias", "dt.bias" if architecture == "nemotron_h_moe" else "dt_proj.bias")
    key = key.replace("e_score_correction_bias", "e_score_correction.bias").replace("feed_forward.expert_bias", "feed_forward.expert_bias.bias")
    key = key.replace("router.weight", "router.layer.weight")
    layer = key.split(".")[2] if ".layers." in key else ""
    if key.endswith("experts.gate_up_proj"):
        yield from zip((f"blk.{layer}.ffn_gate_exps.weight", f"blk.{layer}.ffn_up_exps.weight"), value.chunk(2, 1), strict=True)
    elif key.endswith(("experts.up_proj", "experts.down_proj")):
        yield f"blk.{layer}.ffn_{key.rpartition('.')[2].removesuffix('_proj')}_exps.weight", value
    elif key.endswith("shared_mlp.input_linear.weight"):
        end = "_shexp" if config.num_local_experts else ""
        yield from zip((f"blk.{layer}.ffn_gate{end}.weight", f"blk.{layer}.ffn_up{end}.weight"), value.chunk(2), strict=True)
    elif key.endswith("shared_mlp.output_linear.weight"):
        yield f"blk.{layer}.ffn_down{'_shexp' if config.num_local_experts else ''}.weight", value
    elif key.endswith("in_proj_qkvz.weight"):
        yield from zip((f"blk.{layer}.attn_qkv.weight", f"blk.{layer}.attn_gate.weight"), by_kind(config, value), strict=True)
    else:
        yield key, value[0] if key.endswith("shared_expert_gate.weight") else value


def by_kind(config, value: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of q, k and v of all heads, one after the other, and those of z."""
    each = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
    size = config.linear_key_head_dim
    q, k, v, z = (part.flatten(0, 1) for part in value.unflatten(0, (config.linear_num_key_heads, -1)).split([size, size, each, each], 1))
    return torch.cat([q, k, v]), z


def with_factors(config, key: str, value: Tensor) -> Tensor:
    """A weight of Falcon-H1 times its factors."""
    factors = {
        "down_proj.weight": config.mlp_multipliers[1], "gate_proj.weight": config.mlp_multipliers[0],
        "k_proj.weight": config.key_multiplier * config.attention_in_multiplier, "q_proj.weight": config.attention_in_multiplier,
        "v_proj.weight": config.attention_in_multiplier, "o_proj.weight": config.attention_out_multiplier,
        "out_proj.weight": config.ssm_out_multiplier, "lm_head.weight": config.lm_head_multiplier,
        "embed_tokens.weight": config.embedding_multiplier,
    }  # fmt: skip
    for end, factor in factors.items():
        if key.endswith(f".{end}") or key == end:
            return value * factor
    if not key.endswith("in_proj.weight"):
        return value
    states = config.mamba_n_groups * config.mamba_d_state
    sizes = [config.mamba_d_ssm, config.mamba_d_ssm, states, states, config.mamba_n_heads]
    return value * torch.tensor(config.ssm_multipliers).double().repeat_interleave(torch.tensor(sizes))[:, None] * config.ssm_in_multiplier


def is_float(name: str, value: Tensor) -> bool:
    """Whether the converter always writes this tensor in float32."""
    return value.dim() == 1 or name.endswith(("_norm.weight", "conv1d.weight", "shortconv.conv.weight", "ffn_gate_inp.weight")) or not name.endswith(".weight")


def write_hybrid(path: Path, name: str, type: str = "F32", *, model: torch.nn.Module | None = None, types: dict[str, str] | None = None, change: Callable[[dict[str, Tensor]], None] = lambda tensors: None, more: Callable[[gguf.GGUFWriter], None] = lambda writer: None, like: Path | None = None) -> torch.nn.Module:
    """Write a random model with matrices of ``type``, or of ``types`` by the end of their name, and return it; with
    ``like`` the values that the tensors of another file have."""
    model = model or model_of(name)
    writer = gguf.GGUFWriter(path, architecture_of(name))
    _write_keys(writer, name, model.config)
    _write_words(writer, model.config, True)
    with _keys_replaced(writer):
        more(writer)
    tensors = converted(name, model)
    change(tensors)
    others = {tensor.name: tensor for tensor in gguf.GGUFReader(like).tensors} if like else {}
    for key, value in tensors.items():
        wanted = next((kind for end, kind in (types or {}).items() if key.endswith(end)), type)
        kind = "F32" if is_float(key, value) else wanted
        size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
        kind = gguf.GGMLQuantizationType["F16" if value.shape[-1] % size else kind]
        if like:
            value = torch.from_numpy(np.array(gguf.dequantize(others[key].data, others[key].tensor_type), np.float32)).view(value.shape)
        writer.add_tensor(key, gguf.quantize(value.float().contiguous().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file()
    writer.close()
    return model


def _write_keys(writer: gguf.GGUFWriter, name: str, config) -> None:
    writer.add_name("tiny"), writer.add_embedding_length(config.hidden_size), writer.add_block_count(config.num_hidden_layers)
    architecture = architecture_of(name)
    if architecture in ("mamba", "mamba2"):
        writer.add_context_length(2**20), writer.add_feed_forward_length(0), writer.add_head_count(0)
    else:
        writer.add_context_length(config.max_position_embeddings), writer.add_head_count(config.num_attention_heads)
        writer.add_vocab_size(config.vocab_size)
    epsilons = (getattr(config, each, None) for each in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"))
    writer.add_layer_norm_rms_eps(next(filter(None, epsilons)))
    {"mamba": _keys_of_mamba, "mamba2": _keys_of_mamba, "lfm2": _keys_of_lfm2, "lfm2moe": _keys_of_lfm2, "granitehybrid": _keys_of_granite, "falcon-h1": _keys_of_falcon, "nemotron_h": _keys_of_nemotron, "nemotron_h_moe": _keys_of_nemotron, "qwen3next": _keys_of_qwen3next}[architecture](writer, name, config)  # fmt: skip


def _groups(writer: gguf.GGUFWriter, config) -> None:
    writer.add_head_count_kv([config.num_key_value_heads if of == "full_attention" else 0 for of in config.layer_types])


def _keys_of_mixer(writer: gguf.GGUFWriter, kernel: int, inner: int, state: int, rank: int, groups: int | None) -> None:
    writer.add_ssm_conv_kernel(kernel), writer.add_ssm_inner_size(inner), writer.add_ssm_state_size(state), writer.add_ssm_time_step_rank(rank)
    if groups is not None:
        writer.add_ssm_group_count(groups)


def _keys_of_mamba(writer: gguf.GGUFWriter, name: str, config) -> None:
    if name == "mamba2":
        _keys_of_mixer(writer, config.conv_kernel, 2 * config.hidden_size, config.state_size, config.num_heads, config.n_groups)
        return
    _keys_of_mixer(writer, config.conv_kernel, config.intermediate_size, config.state_size, config.time_step_rank, None)
    writer.add_ssm_dt_b_c_rms(name == "falcon mamba")


def _keys_of_lfm2(writer: gguf.GGUFWriter, name: str, config) -> None:
    _groups(writer, config), writer.add_rope_freq_base(config.rope_parameters["rope_theta"]), writer.add_shortconv_l_cache(config.conv_L_cache)
    if name == "lfm2":
        multiple = config.block_multiple_of
        writer.add_feed_forward_length(-(-2 * config.intermediate_size // 3 // multiple) * multiple)
        return
    writer.add_feed_forward_length(config.intermediate_size), writer.add_expert_count(config.num_experts), writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size), writer.add_leading_dense_block_count(config.num_dense_layers)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _keys_of_granite(writer: gguf.GGUFWriter, name: str, config) -> None:
    _groups(writer, config), writer.add_feed_forward_length(config.intermediate_size), writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    writer.add_expert_count(config.num_local_experts), writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_attention_scale(config.attention_multiplier), writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier), writer.add_logit_scale(config.logits_scaling)
    writer.add_rope_freq_base(10000.0), writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads), writer.add_rope_scaling_finetuned(False)
    _keys_of_mixer(writer, config.mamba_d_conv, 2 * config.hidden_size, config.mamba_d_state, config.mamba_n_heads, config.mamba_n_groups)


def _keys_of_falcon(writer: gguf.GGUFWriter, name: str, config) -> None:
    writer.add_feed_forward_length(config.intermediate_size), writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim), writer.add_value_length(config.head_dim), writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _keys_of_mixer(writer, config.mamba_d_conv, config.mamba_d_ssm, config.mamba_d_state, config.mamba_n_heads, config.mamba_n_groups)


def _keys_of_nemotron(writer: gguf.GGUFWriter, name: str, config) -> None:
    _groups(writer, config), writer.add_key_length(config.head_dim), writer.add_value_length(config.head_dim), writer.add_layer_norm_eps(1e-5)
    writer.add_rope_dimension_count(config.head_dim), writer.add_rope_scaling_finetuned(False)
    inner = {"mlp": config.intermediate_size, "moe": config.moe_intermediate_size}
    writer.add_feed_forward_length([inner.get(of, 0) for of in config.layers_block_type])
    _keys_of_mixer(writer, config.conv_kernel, config.mamba_num_heads * config.mamba_head_dim, config.ssm_state_size, config.mamba_num_heads, config.n_groups)
    if name == "nemotron_h":
        return
    writer.add_expert_count(config.n_routed_experts), writer.add_expert_used_count(config.num_experts_per_tok), writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size), writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
    writer.add_expert_weights_norm(config.norm_topk_prob), writer.add_expert_weights_scale(config.routed_scaling_factor), writer.add_expert_group_count(config.n_group)


def _keys_of_qwen3next(writer: gguf.GGUFWriter, name: str, config) -> None:
    writer.add_feed_forward_length(config.intermediate_size), writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim), writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"]), writer.add_rope_dimension_count(config.head_dim // 4), writer.add_full_attention_interval(4)
    writer.add_expert_count(config.num_experts), writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size), writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    _keys_of_mixer(writer, config.linear_conv_kernel_dim, config.linear_value_head_dim * config.linear_num_value_heads, config.linear_key_head_dim, config.linear_num_value_heads, config.linear_num_key_heads)
