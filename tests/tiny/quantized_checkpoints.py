# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of other quantization methods around a tiny model of transformers, and what their weights mean.

A layout is a function that makes the tensors of one layer from random codes, and the weight that they mean in float64,
written from the definition of the layout alone.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.tiny.tiny_models import LLAMA, transformers
from torch import Tensor

WIDE = LLAMA | {"vocab_size": 128, "hidden_size": 256, "intermediate_size": 512}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
MODELS = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, {}),
    "mixtral": (transformers.MixtralForCausalLM, transformers.MixtralConfig, {"num_local_experts": 4}),
    "qwen3_moe": (
        transformers.Qwen3MoeForCausalLM,
        transformers.Qwen3MoeConfig,
        EXPERTS | {"num_experts": 4, "head_dim": 64, "mlp_only_layers": [0]},
    ),
    "deepseek_v3": (
        transformers.DeepseekV3ForCausalLM,
        transformers.DeepseekV3Config,
        EXPERTS
        | {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
        | {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 16, "qk_nope_head_dim": 48, "v_head_dim": 64}
        | {"num_key_value_heads": 4},
    ),
}
Layer = tuple[dict[str, Tensor], Tensor]
"""The tensors of a layer by what follows its name, and its weight, float64 ``[n, k]``."""


def words(codes: Tensor, bits: int) -> Tensor:
    """The codes ``[rows, count]`` as a stream of bits along each row in int32 words, the lowest bits first."""
    rows, count = codes.shape
    flat = codes.long()[:, :, None] >> torch.arange(bits) & 1
    flat = torch.nn.functional.pad(flat.flatten(1), (0, -count * bits % 32)).view(rows, -1, 32)
    value = (flat << torch.arange(32)).sum(-1)
    return torch.where(value >= 2**31, value - 2**32, value).to(torch.int32)


def random_codes(shape: tuple[int, ...], bits: int, generator: torch.Generator) -> Tensor:
    """Codes that include the smallest and the largest."""
    codes = torch.randint(0, 2**bits, shape, generator=generator)
    codes.view(-1)[:2] = torch.tensor([0, 2**bits - 1])
    return codes


def random_scales(shape: tuple[int, ...], bits: int, generator: torch.Generator) -> Tensor:
    """Scales so that weights are of the size of a model's, over three orders of magnitude."""
    return torch.exp(torch.randn(shape, generator=generator).clamp(-3, 3)) * 0.04 / 2**bits


def write(
    folder: Path,
    settings: Mapping[str, Any],
    layer: Callable[[str, int, int, torch.Generator], Layer | None],
    name: str = "llama",
    **config: Any,
) -> torch.nn.Module:
    """Write a checkpoint, and return the float64 model that it means.

    Args:
        folder: where to.
        settings: the entry ``quantization_config``.
        layer: the layout: the tensors of the layer of this name and size, or None for one that stays float.
        name: a name of `MODELS`; experts are layers of their own in a checkpoint.
        config: more settings of the model.
    """
    cls, told, extra = MODELS[name]
    torch.manual_seed(0)
    model = cls(told(**WIDE | extra | config))
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    generator, meant = torch.Generator().manual_seed(1), {}
    tensors = {}
    for key, value in state.items():
        made = None
        if value.dim() == 2 and key.endswith(".weight") and "embed" not in key and ".gate." not in key:
            made = layer(key.removesuffix(".weight"), *value.shape, generator)
        if made is None:
            tensors[key], meant[key] = value, value.double()
            continue
        tensors |= {f"{key.removesuffix('.weight')}{part}": tensor.contiguous() for part, tensor in made[0].items()}
        meant[key] = made[1]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": dict(settings)}))
    plain = folder.parent / f"{folder.name}-meant"
    plain.mkdir()
    save_file({key: value.contiguous() for key, value in meant.items()}, plain / "model.safetensors", {"format": "pt"})
    reference = copy.deepcopy(model.config)
    reference.save_pretrained(plain)
    return transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float64, experts_implementation="eager")


def prompt() -> Tensor:
    return torch.arange(14).view(2, 7)
