# SPDX-License-Identifier: Apache-2.0
"""GGUF files of small mixtures of experts with random weights, as llama.cpp's converter lays them out, and the float
models of transformers that they mean: every tensor is decoded by the gguf package and put in its place by the tables of
this file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from gguf_files import _keys_replaced, _write_config, _write_words, gguf, random_blocks, transformers

SIZES = dict(vocab_size=64, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip
LATENT = SIZES | dict(num_hidden_layers=3, num_key_value_heads=4, moe_intermediate_size=128, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=2, first_k_dense_replace=1, kv_lora_rank=64, q_lora_rank=96, qk_nope_head_dim=96, qk_rope_head_dim=32, v_head_dim=64)  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096}  # fmt: skip
CONFIGS = {
    "llama": transformers.MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2),
    "qwen2moe": transformers.Qwen2MoeConfig(**SIZES, num_experts=5, num_experts_per_tok=3, moe_intermediate_size=256, shared_expert_intermediate_size=512),
    "qwen3moe": transformers.Qwen3MoeConfig(**SIZES, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=256, head_dim=64, norm_topk_prob=True),
    "olmoe": transformers.OlmoeConfig(**SIZES, num_experts=5, num_experts_per_tok=2),
    "granitemoe": transformers.GraniteMoeConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2, attention_multiplier=0.1, embedding_multiplier=3.0, residual_multiplier=0.4, logits_scaling=2.0),
    "gpt-oss": transformers.GptOssConfig(**SIZES | dict(max_position_embeddings=131072), head_dim=64, num_local_experts=5, num_experts_per_tok=2, sliding_window=4, rope_parameters=YARN),
    "glm4moe": transformers.Glm4MoeConfig(**SIZES | dict(num_hidden_layers=3), head_dim=64, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=256, n_shared_experts=2, routed_scaling_factor=1.7, n_group=2, use_qk_norm=True, attention_bias=True, num_mtp_layers=0),
    "minimax-m2": transformers.MiniMaxM2Config(**SIZES, head_dim=64, num_local_experts=5, num_experts_per_tok=2, rotary_dim=32),
    "deepseek2": transformers.DeepseekV3Config(**LATENT | dict(num_experts_per_tok=5), n_group=1, topk_group=1),
}  # fmt: skip
"""By ``general.architecture``."""
PERMUTED = "llama", "granitemoe"
NORM_BEHIND = "gpt-oss", "glm4moe"
ROUTERS = {"granitemoe": "block_sparse_moe.router", "gpt-oss": "mlp.router"}
BIASES_OF_CHOICE = {"glm4moe": "mlp.gate.e_score_correction_bias", "deepseek2": "mlp.gate.e_score_correction_bias", "minimax-m2": "mlp.e_score_correction_bias"}
SHARED = {"qwen2moe": "mlp.shared_expert", "glm4moe": "mlp.shared_experts", "deepseek2": "mlp.shared_experts"}
KV_B = "self_attn.kv_b_proj.weight"

LATENT_NAMES = {"q_a_proj": "q_a", "q_a_layernorm": "q_a_norm", "q_b_proj": "q_b", "kv_a_proj_with_mqa": "kv_a_mqa", "kv_a_layernorm": "kv_a_norm", "kv_b_proj": "kv_b"}


def halves_of_kv_b(config: transformers.PreTrainedConfig, kv_b: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of newer files: for each head, its keys' rows transposed, and its values' rows."""
    of_head = kv_b.view(config.num_attention_heads, config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank)
    return {"attn_k_b.weight": of_head[:, : config.qk_nope_head_dim].transpose(1, 2), "attn_v_b.weight": of_head[:, config.qk_nope_head_dim :]}


def parameters_in_layer(name: str, model: torch.nn.Module, layer: int) -> dict[str, str]:
    """Tensors by parameter of a layer; experts have tensors of their own."""
    experts = f"{'block_sparse_moe' if name == 'granitemoe' else 'mlp'}.experts"
    router = ROUTERS.get(name, "mlp.gate")
    table = {f"self_attn.{of}_proj": f"attn_{'output' if of == 'o' else of}" for of in "qkvo"}
    table |= {f"self_attn.{of}_norm": f"attn_{of}_norm" for of in "qk"}
    table |= {f"self_attn.{of}": f"attn_{to}" for of, to in LATENT_NAMES.items()}
    table |= {router: "ffn_gate_inp", "input_layernorm": "attn_norm", "mlp.shared_expert_gate": "ffn_gate_inp_shexp"}
    table["post_attention_layernorm"] = "post_attention_norm" if name in NORM_BEHIND else "ffn_norm"
    for of in ("gate", "up", "down"):
        table[f"mlp.{of}_proj"] = f"ffn_{of}"
        table[f"{SHARED.get(name, '-')}.{of}_proj"] = f"ffn_{of}_shexp"
    others = {"self_attn.sinks": "attn_sinks.weight", BIASES_OF_CHOICE.get(name, "-"): "exp_probs_b.bias"}
    found = {}
    for parameter in model.model.layers[layer].state_dict():
        path, _, key = parameter.rpartition(".")
        if path != experts:
            found[parameter] = others.get(parameter) or f"{table[path]}.{key}"
    return found


def experts_of(model: torch.nn.Module, layer: int) -> torch.nn.Module | None:
    block = model.model.layers[layer]
    return getattr(getattr(block, "block_sparse_moe", None) or block.mlp, "experts", None)


def tensors_of(name: str, model: torch.nn.Module, merged: bool = False, split: bool = True) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor; with ``split`` that of deepseek2's two of `KV_B`."""
    held = model.state_dict()
    shapes = {"token_embd.weight": held["model.embed_tokens.weight"].shape, "output_norm.weight": held["model.norm.weight"].shape}
    if not model.config.tie_word_embeddings:
        shapes["output.weight"] = held["lm_head.weight"].shape
    for layer, block in enumerate(model.model.layers):
        parameters = block.state_dict()
        for parameter, tensor in parameters_in_layer(name, model, layer).items():
            shape = tuple(parameters[parameter].shape)
            if parameter == KV_B and split:
                halves = halves_of_kv_b(model.config, parameters[parameter])
                shapes |= {f"blk.{layer}.{half}": value.shape for half, value in halves.items()}
                continue
            shapes[f"blk.{layer}.{tensor}"] = shape[1:] if "inp_shexp" in tensor else shape
        if (experts := experts_of(model, layer)) is None:
            continue
        count, hidden, inner = experts.down_proj.shape if name != "gpt-oss" else experts.down_proj.mT.shape
        of = {"gate_up": (count, 2 * inner, hidden)} if merged else dict.fromkeys(("gate", "up"), (count, inner, hidden))
        for part, shape in {**of, "down": (count, hidden, inner)}.items():
            shapes[f"blk.{layer}.ffn_{part}_exps.weight"] = shape
            if name == "gpt-oss":
                shapes[f"blk.{layer}.ffn_{part}_exps.bias"] = shape[:2]
    return {tensor: tuple(shape) for tensor, shape in shapes.items()}


def write_mixture(path: Path, name: str, type: str = "Q4_0", *, experts: str | None = None, config: transformers.PreTrainedConfig | None = None, merged: bool = False, split: bool = True, words: bool = False, change: Callable[[dict[str, tuple[int, ...]]], None] = lambda shapes: None, types: dict[str, str] | None = None, more: Callable[[gguf.GGUFWriter], None] = lambda writer: None) -> Path:
    """A file whose matrices are of ``type`` and experts of ``experts``; ``types`` gives some tensors another one,
    ``change`` other shapes, ``more`` other keys."""
    config = config or CONFIGS[name]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    writer, random = gguf.GGUFWriter(path, name), np.random.default_rng(0)
    _write_config(writer, config, name)
    _write_words(writer, config, words)
    _write_experts(writer, name, config)
    if name == "deepseek2":
        with _keys_replaced(writer):
            _write_latent(writer, config, split)
    with _keys_replaced(writer):
        more(writer)
    shapes = tensors_of(name, model, merged, split)
    change(shapes)
    for tensor, shape in shapes.items():
        kind = (types or {}).get(tensor) or (experts or type if "_exps." in tensor else type)
        if len(shape) == 1 or "ffn_gate_inp" in tensor or "_exps.bias" in tensor or kind == "F32":
            spread = 0.3 if "ffn_gate_inp" in tensor or "sinks" in tensor else 0.1
            writer.add_tensor(tensor, random.normal(1 if "norm" in tensor else 0, spread, shape).astype(np.float32))
        elif kind == "F16":
            writer.add_tensor(tensor, random.normal(0, 0.1, shape).astype(np.float16))
        else:
            blocks = random_blocks(kind, int(np.prod(shape[:-1])), shape[-1], seed=int(random.integers(1 << 30)), spread=0.2)
            writer.add_tensor(tensor, blocks.reshape(*shape[:-1], -1), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_experts(writer: gguf.GGUFWriter, name: str, config: transformers.PreTrainedConfig) -> None:
    writer.add_expert_count(config.n_routed_experts if name in ("glm4moe", "deepseek2") else getattr(config, "num_experts", 5))
    writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size") or name in ("gpt-oss", "minimax-m2"):
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    if name == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if name == "granitemoe":
        writer.add_attention_scale(config.attention_multiplier), writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier), writer.add_logit_scale(config.logits_scaling)
    if name == "gpt-oss":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN), writer.add_rope_scaling_factor(32.0)
        writer.add_rope_scaling_orig_ctx_len(4096)
    if name in ("glm4moe", "minimax-m2") or config.model_type == "deepseek_v3":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if name in ("glm4moe", "deepseek2"):
        writer.add_expert_shared_count(config.n_shared_experts), writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor), writer.add_leading_dense_block_count(config.first_k_dense_replace)
    if name in ("glm4moe", "deepseek2") and config.n_group:
        writer.add_expert_group_count(config.n_group), writer.add_expert_group_used_count(config.topk_group)


def _write_latent(writer: gguf.GGUFWriter, config: transformers.PreTrainedConfig, split: bool) -> None:
    """Newer files have the sizes of one head of latent keys; older ones those of the heads that it is projected to."""
    rank, rotated = config.kv_lora_rank, config.qk_rope_head_dim
    writer.add_kv_lora_rank(rank), writer.add_rope_dimension_count(rotated)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    if split:
        writer.add_key_length_mla(config.qk_head_dim), writer.add_value_length_mla(config.v_head_dim)
        writer.add_head_count_kv(1), writer.add_key_length(rank + rotated), writer.add_value_length(rank)
    else:
        writer.add_key_length(config.qk_head_dim), writer.add_value_length(config.v_head_dim)
    rope = config.rope_parameters
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN), writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def in_float(path: Path, name: str, config: transformers.PreTrainedConfig | None = None) -> torch.nn.Module:
    """transformers' model with every tensor as the gguf package decodes it."""
    config = config or CONFIGS[name]
    tensors = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        tensors[tensor.name] = torch.from_numpy(values.copy().reshape([*tensor.shape[::-1].tolist()]))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    state = {"model.embed_tokens.weight": tensors["token_embd.weight"], "model.norm.weight": tensors["output_norm.weight"]}
    state["lm_head.weight"] = tensors.get("output.weight", tensors["token_embd.weight"])
    for layer, block in enumerate(model.model.layers):
        for parameter, tensor in parameters_in_layer(name, model, layer).items():
            if parameter == KV_B and f"blk.{layer}.attn_k_b.weight" in tensors:
                keys, values = (tensors[f"blk.{layer}.attn_{of}_b.weight"] for of in "kv")
                tensors[f"blk.{layer}.{tensor}"] = torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)
            value = tensors[f"blk.{layer}.{tensor}"]
            for of, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
                if name in PERMUTED and tensor == f"attn_{of}.weight":
                    value = value.view(heads, -1, 2, value.shape[1]).transpose(1, 2).reshape(value.shape)
            state[f"model.layers.{layer}.{parameter}"] = value[None] if "inp_shexp" in tensor else value
        if (experts := experts_of(model, layer)) is not None:
            prefix = next(path for path, module in block.named_modules() if module is experts)
            for key, value in _experts_state(name, tensors, layer).items():
                state[f"model.layers.{layer}.{prefix}.{key}"] = value
    model.load_state_dict(state)
    return model.eval()


def _experts_state(name: str, tensors: dict[str, torch.Tensor], layer: int) -> dict[str, torch.Tensor]:
    def of(part: str, key: str) -> torch.Tensor:
        return tensors[f"blk.{layer}.ffn_{part}_exps.{key}"]

    if name != "gpt-oss":
        merged = f"blk.{layer}.ffn_gate_up_exps.weight" in tensors
        first = of("gate_up", "weight") if merged else torch.cat([of("gate", "weight"), of("up", "weight")], 1)
        return {"gate_up_proj": first, "down_proj": of("down", "weight")}
    state = {"down_proj": of("down", "weight").mT, "down_proj_bias": of("down", "bias")}
    state["gate_up_proj"] = torch.stack([of("gate", "weight"), of("up", "weight")], 2).flatten(1, 2).mT
    return state | {"gate_up_proj_bias": torch.stack([of("gate", "bias"), of("up", "bias")], 2).flatten(1)}
