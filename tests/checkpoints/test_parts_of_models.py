# SPDX-License-Identifier: Apache-2.0
"""Experts, heads, scales of key-value caches and vision towers in checkpoints of other methods."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints.read_checkpoints import check_reads, damaged, decoded, read
from tests.checkpoints.test_awq_checkpoints import awq
from tests.checkpoints.test_awq_checkpoints import settings as of_awq
from tests.checkpoints.test_compressed_tensors import integers, weights
from tests.checkpoints.test_compressed_tensors import settings as of_compressed_tensors
from tests.checkpoints.test_fp8_checkpoints import ROUNDED, blocks
from tests.checkpoints.test_fp8_checkpoints import settings as of_fp8
from tests.checkpoints.test_gptq_checkpoints import gptq
from tests.checkpoints.test_gptq_checkpoints import settings as of_gptq
from tests.tiny.quantized_checkpoints import write
from tests.tiny.tiny_models import LLAMA, transformers

from lowbit import LowbitConfig, load
from lowbit.quant.kinds import is_packed

INT4 = weights(4, group_size=64)
FORMS = {
    "gptq": (of_gptq(group=64), gptq(group=64)),
    "awq": (of_awq(group=64), awq(group=64)),
    "compressed-tensors": (of_compressed_tensors("pack-quantized", INT4), integers("pack-quantized", INT4)),
    "fp8": (of_fp8([128, 128]), blocks(128, 128)),
}


@pytest.mark.parametrize(
    "method, model",
    [
        ("gptq", "qwen3_moe"),
        ("awq", "deepseek_v3"),
        ("compressed-tensors", "qwen3_moe"),
        ("compressed-tensors", "deepseek_v3"),
        ("fp8", "qwen3_moe"),
        ("fp8", "deepseek_v3"),
    ],
)
def test_experts(method, model, tmp_path):
    told, form = FORMS[method]
    meant = write(tmp_path / "model", told, form, model)
    found = check_reads(tmp_path / "model", meant, exact=method != "fp8", bound=ROUNDED)
    mlp = found.model.layers[1].mlp
    assert is_packed(mlp.experts) and not is_packed(mlp.gate)
    assert model != "deepseek_v3" or is_packed(mlp.shared_experts.up_proj)


def test_experts_in_act_order_are_refused(tmp_path):
    def experts(name, n, k, generator):
        return gptq(group=64, desc_act="experts" in name)(name, n, k, generator)

    write(tmp_path / "model", of_gptq(group=64, desc_act=True), experts, "qwen3_moe")
    with pytest.raises(ValueError, match="must have one format and multiples of 16 rows, got an order of inputs"):
        read(tmp_path / "model")


@pytest.mark.parametrize("has_head", [False, True])
def test_a_tied_head(has_head, tmp_path):
    """A file of a model with tied weights has no head, or a packed one of its own beside the float table."""
    meant = write(tmp_path / "model", of_gptq(), gptq(), tie_word_embeddings=True)
    if has_head:
        table = meant.model.embed_tokens.weight
        tensors, weight = gptq()("lm_head", *table.shape, torch.Generator().manual_seed(5))
        file = tmp_path / "model" / "model.safetensors"
        apart = {f"lm_head{part}": tensor.contiguous() for part, tensor in tensors.items()}
        save_file(load_file(file) | apart, file, metadata={"format": "pt"})
        meant.lm_head.weight = torch.nn.Parameter(weight)
    model = check_reads(tmp_path / "model", meant, exact=True)
    assert is_packed(model.lm_head) is has_head
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is not has_head


def test_scales_of_key_value_caches_are_not_read(tmp_path):
    meant = write(tmp_path / "model", *FORMS["fp8"])
    file = tmp_path / "model" / "model.safetensors"
    scales = {f"model.layers.{i}.self_attn.{part}_scale": torch.tensor(0.03) for i in range(2) for part in "kv"}
    save_file(load_file(file) | scales, file, metadata={"format": "pt"})
    check_reads(tmp_path / "model", meant, bound=ROUNDED)


def test_codes_without_a_scale_are_refused(tmp_path):
    write(tmp_path / "model", *FORMS["fp8"])
    damaged(
        tmp_path / "model",
        lambda t, s: t.pop("model.layers.1.mlp.up_proj.weight_scale_inv"),
        "model.layers.1.mlp.up_proj.weight must be floats, or codes with the tensors of fp8 beside them, got F8_E4M3",
    )


def test_a_vision_tower_stays_float(tmp_path):
    vision = transformers.CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    text = transformers.LlamaConfig(**LLAMA | {"hidden_size": 128})
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=96)
    torch.manual_seed(0)
    meant, folder = transformers.LlavaForConditionalGeneration(config).eval(), tmp_path / "model"
    meant.save_pretrained(folder)
    generator, tensors = torch.Generator().manual_seed(1), {}
    for key, value in load_file(folder / "model.safetensors").items():
        name = key.removesuffix(".weight")
        if "language_model" not in key or not name.endswith("_proj"):
            tensors[key] = value
            continue
        parts, _ = FORMS["compressed-tensors"][1](name, *value.shape, generator)
        tensors |= {f"{name}{part}": tensor for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    told = json.loads((folder / "config.json").read_text())
    entry = FORMS["compressed-tensors"][0] | {"ignore": ["lm_head", "re:.*vision_tower.*"]}
    (folder / "config.json").write_text(json.dumps(told | {"quantization_config": entry}))
    model = type(meant).from_pretrained(folder, quantization_config=LowbitConfig("checkpoint"), dtype=torch.float32)
    assert len(decoded(model)) == 14 and all("language_model" in name for name in decoded(model))
    for (name, kept), (_, had) in zip(
        model.model.vision_tower.named_parameters(), meant.model.vision_tower.named_parameters(), strict=True
    ):
        assert torch.equal(kept, had), name
    other = type(meant)(config)
    assert len(load(other, folder)) == 14
    x = torch.arange(6)[None]
    with torch.no_grad():
        assert torch.equal(other.eval()(x).logits, model(x).logits)
