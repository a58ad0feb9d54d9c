# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of AutoRound, HQQ, ModelOpt, BitNet and gpt-oss beside decoders in float64."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints.read_checkpoints import check_reads, damaged, decoded, read
from tests.checkpoints.test_awq_checkpoints import awq
from tests.checkpoints.test_gptq_checkpoints import gptq
from tests.tiny.float_codes import e2m1, float8_codes, power_scales
from tests.tiny.quantized_checkpoints import random_codes, random_scales, write
from tests.tiny.tiny_models import transformers

import lowbit

UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    "packing, form",
    [
        ("auto_round:auto_gptq", gptq()),
        ("auto_round:gptqmodel", gptq(version=2)),
        ("auto_round:auto_awq", awq()),
        ("auto_round:auto_gptq", gptq(5)),
        ("auto_round:gptqmodel", gptq(6, version=2)),
        ("auto_round:auto_gptq", gptq(7)),
    ],
)
def test_packings_of_auto_round(packing, form, tmp_path):
    told = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": False, "packing_format": packing}
    check_reads(tmp_path / "model", write(tmp_path / "model", told, form), exact=True)


def test_bits_by_layer_of_auto_round(tmp_path):
    def form(name, n, k, generator):
        return gptq(8, 64)(name, n, k, generator) if "v_proj" in name else gptq(2)(name, n, k, generator)

    told = {"quant_method": "auto-round", "bits": 2, "group_size": 128, "packing_format": "auto_round:auto_gptq"}
    told["extra_config"] = {"model.layers.0.self_attn.v_proj": {"bits": 8, "group_size": 64}}
    model = check_reads(tmp_path / "model", write(tmp_path / "model", told, form), exact=True)
    attention = model.model.layers[0].self_attn
    assert (attention.v_proj.spec.name, attention.q_proj.spec.name) == ("int8 g64 asymmetric", "int2 g128 asymmetric")


def test_other_packings_of_auto_round_are_refused(tmp_path):
    write(
        tmp_path / "model",
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:llm_compressor"},
        gptq(),
    )
    damaged(tmp_path / "model", None, "packing_format of auto-round must be one of .*got 'auto_round:llm_compressor'")


def hqq(bits, group, dtype=torch.float16):
    parts = {8: 1, 4: 2, 3: 10, 2: 4}[bits]

    def layer(name, n, k, generator):
        if name == "lm_head":
            return None
        rows = n * k // group
        codes, scale = random_codes((rows, group), bits, generator), random_scales((rows, 1), bits, generator).to(dtype)
        zero = (torch.rand((rows, 1), generator=generator) * 2**bits).to(dtype)
        padded = torch.nn.functional.pad(codes, (0, 0, 0, -rows % parts)).chunk(parts)
        packed = sum(part << bits * (parts - 1 - i) for i, part in enumerate(padded))
        weight = (codes - zero.double()) * scale.double()
        tensors = {".W_q": packed.to(torch.int32 if bits == 3 else torch.uint8), ".scale": scale, ".zero": zero}
        return tensors | {".nbits": torch.tensor(bits), ".shape": torch.tensor([n, k])}, weight.view(n, k)

    return layer


def of_hqq(bits, group, axis=1):
    params = {"nbits": bits, "group_size": group, "axis": axis, "view_as_float": False, "channel_wise": True}
    told = {"weight_quant_params": params, "scale_quant_params": None, "zero_quant_params": None}
    return {"quant_method": "hqq", "quant_config": told, "skip_modules": ["lm_head"]}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [64, 128])
def test_hqq(bits, group, tmp_path):
    model = check_reads(
        tmp_path / "model", write(tmp_path / "model", of_hqq(bits, group), hqq(bits, group)), exact=True
    )
    assert model.model.layers[0].mlp.up_proj.spec.name == f"int{bits} g{group} asymmetric"


def test_hqq_along_the_other_axis_is_refused(tmp_path):
    write(tmp_path / "model", of_hqq(4, 64, axis=0), hqq(4, 64))
    damaged(tmp_path / "model", None, "axis of hqq must be one of 1, got 0")


def nvfp4(name, n, k, generator):
    packed, levels = e2m1((n, k), generator)
    scale, whole = float8_codes((n, k // 16), generator).abs(), torch.tensor(2.7e-5)
    weight = levels * scale.double().repeat_interleave(16, 1) * whole.double()
    tensors = {".weight": packed, ".weight_scale": scale, ".weight_scale_2": whole, ".input_scale": torch.tensor(0.1)}
    return tensors, weight


@pytest.mark.parametrize("apart", [False, True])
def test_nvfp4_of_modelopt(apart, tmp_path):
    meant = write(tmp_path / "model", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4)
    config = tmp_path / "model" / "config.json"
    if apart:
        told = json.loads(config.read_text())
        del told["quantization_config"]
        config.write_text(json.dumps(told))
        entry = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
        config.with_name("hf_quant_config.json").write_text(json.dumps(entry))
    model = check_reads(tmp_path / "model", meant, exact=True)
    assert model.lm_head.spec.name == "fp4_e2m1 g16"


def test_float8_of_modelopt_is_asked_for_without_its_fixed_scale(tmp_path):
    def form(name, n, k, generator):
        codes, scale = float8_codes((n, k), generator), random_scales((), 12, generator)
        return {
            ".weight": codes,
            ".weight_scale": scale,
            ".input_scale": scale.clone(),
        }, codes.double() * scale.double()

    meant = write(tmp_path / "model", {"quant_method": "modelopt", "quant_algo": "FP8"}, form)
    damaged(tmp_path / "model", None, r"fixed scale; LowbitConfig\('checkpoint', activations='float'\)")
    model = read(tmp_path / "model", activations="float")
    weights = dict(meant.named_parameters())
    assert all(torch.allclose(value, weights[key], rtol=2.0**-21, atol=0) for key, value in decoded(model).items())


def ternary(divides):
    def layer(name, n, k, generator):
        if name == "lm_head":
            return None
        signs, scale = torch.randint(0, 3, (n, k), generator=generator), torch.tensor([0.043])
        packed = sum(part << 2 * i for i, part in enumerate(signs.chunk(4)))
        factor = 1 / scale.double() if divides else scale.double()
        stored = scale if not divides else 1 / scale
        factor = 1 / stored.double() if divides else factor
        return {".weight": packed.to(torch.uint8), ".weight_scale": stored}, (signs - 1) * factor

    return layer


@pytest.mark.parametrize("kind", ["bitlinear", "autobitlinear"])
def test_bitnet(kind, tmp_path):
    told = {"quant_method": "bitnet", "linear_class": kind, "quantization_mode": "offline"}
    model = check_reads(tmp_path / "model", write(tmp_path / "model", told, ternary(kind == "bitlinear")), exact=True)
    assert model.model.layers[0].mlp.up_proj.spec.name == "int2 per-channel int8-activations per row"


def test_bitnet_codes_out_of_range(tmp_path):
    write(tmp_path / "model", {"quant_method": "bitnet"}, ternary(True))
    damaged(
        tmp_path / "model", lambda t, s: t[f"{UP}.weight"].fill_(255), f"{UP}.weight must be fields of 0, 1 or 2, got 3"
    )


def gpt_oss(folder):
    """A checkpoint of gpt-oss with experts in MXFP4, and the model that it means."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    meant = transformers.GptOssForCausalLM(config).double()
    meant.save_pretrained(folder)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    for key in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, k, n = tensors.pop(key).shape
        packed, levels = e2m1((experts * n, k), generator)
        scale = power_scales((experts, n, k // 32), generator)
        weight = levels.view(experts, n, k) * torch.exp2(scale.double() - 127).repeat_interleave(32, 2)
        meant.get_parameter(key).data = weight.transpose(1, 2).contiguous()
        tensors |= {f"{key}_blocks": packed.view(experts, n, k // 32, 16), f"{key}_scales": scale}
    tensors = {key: value.float() if value.is_floating_point() else value for key, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}))
    return meant


def test_experts_of_gpt_oss(tmp_path):
    meant = gpt_oss(tmp_path / "model")
    model = read(tmp_path / "model")
    weights, found = dict(meant.named_parameters()), decoded(model)
    assert len(found) == 4 and all(torch.equal(value, weights[key]) for key, value in found.items())
    other = transformers.GptOssForCausalLM(meant.config)
    assert set(lowbit.load(other, tmp_path / "model")) == {f"model.layers.{i}.mlp.experts" for i in range(2)}
    x = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(other.eval()(x).logits, model(x).logits)


@pytest.mark.parametrize("name", ["aqlm", "vptq", "spqr", "higgs", "paroquant"])
def test_refused_by_name(name, tmp_path):
    write(tmp_path / "model", {"quant_method": name}, nvfp4)
    with pytest.raises(ValueError, match=f"quant_method '{name}' is not read"):
        lowbit.load(torch.nn.Linear(1, 1), tmp_path / "model")
