# SPDX-License-Identifier: Apache-2.0
"""A small model, packed or of the decoded weights, and adapters of every method of peft on it, for the tests of peft."""

from __future__ import annotations

import zlib
from typing import Any

import peft
import torch
import transformers
from torch import Tensor, nn

import lowbit
from lowbit import QuantEmbedding, QuantLinear

SIZES = dict(
    vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, attention_bias=True, mlp_bias=True,
)  # fmt: skip
TARGETS = ["q_proj", "v_proj", "down_proj"]
IDS = torch.arange(24).view(2, 12)
OPTIONS: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10},
    "IA3": {"feedforward_modules": ["down_proj"]},
    "C3A": {"block_size": 16},
    "VBLORA": {"vector_length": 16},
    "POLY": {"n_tasks": 2},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [1, 2]},
    "ADAPTION_PROMPT": {"target_modules": "self_attn", "adapter_len": 4, "adapter_layers": 1},
    "SHADOW": {"target_modules": None},
}
METHODS = {str(name.value): config for name, config in peft.PEFT_TYPE_TO_CONFIG_MAPPING.items()}


def packed(dtype: torch.dtype = torch.float32, *, head: bool = True) -> nn.Module:
    """The table of words is packed with the head unless ``head`` is False."""
    torch.manual_seed(0)
    settings = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True, use_cache=False)  # X-LoRA wants none
    model = transformers.LlamaForCausalLM(settings).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    model.to(dtype)
    lowbit.quantize_(model, lowbit.int8_weight_only(32), head=lowbit.int8_weight_only(32) if head else None)
    if head:
        assert type(model.lm_head) is QuantLinear and type(model.model.embed_tokens) is QuantEmbedding
    return model


def decoded(dtype: torch.dtype = torch.float32, *, head: bool = True) -> nn.Module:
    model = packed(dtype, head=head)
    lowbit.dequantize_(model)
    return model


def config_of(name: str, **options: Any) -> Any:
    cls = METHODS[name]
    chosen: dict[str, Any] = {"task_type": "CAUSAL_LM"}
    if "target_modules" in cls.__dataclass_fields__ and name != "LN_TUNING":
        chosen["target_modules"] = TARGETS
    if "num_virtual_tokens" in cls.__dataclass_fields__:
        chosen["num_virtual_tokens"] = 4
    return cls(**chosen | OPTIONS.get(name, {}) | options)


def adapted(model: nn.Module, config: Any) -> Any:
    """The model with an adapter that is not zero, the same on a packed model and on a float one."""
    torch.manual_seed(1)
    model = peft.get_peft_model(model, config).eval()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "ranknum" not in name:  # AdaLoRA's count, which peft casts with its weights
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return model


def call(model: nn.Module) -> Any:
    tasks = {"task_ids": torch.tensor([0, 1])} if model.active_peft_config.peft_type == "POLY" else {}
    return model(IDS, labels=IDS, **tasks)


def results(model: nn.Module) -> dict[str, Tensor]:
    """Logits, and gradients by the names of their parameters."""
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad and "ranknum" not in name}
    out = call(model)
    grads = torch.autograd.grad(out.loss, list(trained.values()), allow_unused=True)
    found = {name: grad for name, grad in zip(trained, grads, strict=True) if grad is not None}
    return {"logits": out.logits.detach()} | found


def agree(got: dict[str, Tensor], wanted: dict[str, Tensor], scale: float = 1e-5) -> None:
    assert got.keys() == wanted.keys() and len(got) > 1
    for name in got:
        largest = float(wanted[name].abs().max())
        torch.testing.assert_close(got[name], wanted[name].to(got[name]), rtol=10 * scale, atol=scale * largest)


def bases(model: nn.Module) -> dict[str, Any]:
    """The layers that have adapters, by their names."""
    return {name: layer.get_base_layer() for name, layer in model.named_modules() if "base_layer" in layer._modules}


def numbers(model: nn.Module) -> dict[str, Tensor]:
    """What the layers with adapters hold."""
    return {
        f"{name} {key}": value.clone()
        for name, base in bases(model).items()
        for key, value in base._parameters.items()
        if value is not None
    }
