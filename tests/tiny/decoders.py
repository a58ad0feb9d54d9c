# SPDX-License-Identifier: Apache-2.0
"""Small decoders of transformers with random weights, and what is asked of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit

transformers = pytest.importorskip("transformers")

from lowbit.ops.run_program import KeptProgram  # noqa: E402

SIZES = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, pad_token_id=0, eos_token_id=96, bos_token_id=1,
)  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 6}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "gemma2": ("Gemma2", {"sliding_window": 6, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3", {"sliding_window": 6, "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]}),
    "phi3": ("Phi3", {}),
    "granite": ("Granite", {"residual_multiplier": 0.3, "attention_multiplier": 0.1, "embedding_multiplier": 3.0, "logits_scaling": 2.5}),
    "stablelm": ("StableLm", {"partial_rotary_factor": 0.5}),
    "cohere": ("Cohere", {"logit_scale": 0.3}),
    "cohere2": ("Cohere2", {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}),
    "olmo": ("Olmo", {}),
    "olmo2": ("Olmo2", {}),
    "phi": ("Phi", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    "gpt_neox": ("GPTNeoX", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}}),
    "gpt_neox_in_turn": ("GPTNeoX", {"use_parallel_residual": False}),
    "glm": ("Glm", {}),
    "glm4": ("Glm4", {}),
    "nemotron": ("Nemotron", {}),
    "starcoder2": ("Starcoder2", {"sliding_window": 6}),
    "helium": ("Helium", {}),
    "exaone4": ("Exaone4", {"sliding_window": 6, "sliding_window_pattern": 2}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "ernie4_5": ("Ernie4_5", {}),
    "apertus": ("Apertus", {}),
    "hunyuan": ("HunYuanDenseV1", {}),
}  # fmt: skip
CONFIGS = {
    "w4a8": lowbit.int8_dynamic_activation_int4_weight(group_size=32),
    "int8": lowbit.int8_weight_only(),
}


def made(name: str, config: str = "int8", attention: str = "lowbit", **more: Any) -> nn.Module:
    model = in_float(*MODELS[name], attention, **more)
    lowbit.quantize_(model, CONFIGS[config])
    return model


def in_float(kind: str, options: dict[str, Any], attention: str = "lowbit", **more: Any) -> nn.Module:
    prefix = "Gemma3Text" if kind == "Gemma3" else kind
    settings = getattr(transformers, f"{prefix}Config")(**SIZES | options | more)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")._from_config(settings, attn_implementation=attention).eval()
    for parameter in model.parameters():  # norms are made of ones, or of zeros, and biases of zeros
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.3)
    return model


def prompt(batch: int = 2, length: int = 9) -> Tensor:
    return torch.randint(2, 90, (batch, length), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor, **options: Any) -> Tensor:
    return model(ids, **options).logits


def answer(model: nn.Module, ids: Tensor, **options: Any) -> Tensor:
    options = {"do_sample": False, "max_new_tokens": 12, "attention_mask": torch.ones_like(ids)} | options
    return model.generate(ids, **options)


def attentions(model: nn.Module) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith(("self_attn", ".attention"))]


@contextlib.contextmanager
def calls_of_layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many layers each call of the op took."""
    counts: list[int] = []

    run = KeptProgram.__call__

    def counted(self: KeptProgram, states: Any, inputs: Any, starts: Any) -> Tensor:
        counts.append(len(states) // 2)
        return run(self, states, inputs, starts)

    with monkeypatch.context() as patch:
        patch.setattr(KeptProgram, "__call__", counted)
        yield counts
