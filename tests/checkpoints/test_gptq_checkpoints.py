# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of GPTQ: every packing beside a decoder that follows the definition of the layout, in float64."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.checkpoints.read_checkpoints import check_reads, damaged
from tests.tiny.quantized_checkpoints import random_codes, random_scales, words, write

import lowbit
from lowbit.huggingface.packed_checkpoint import PackedCheckpoint


def gptq(bits=4, group=128, version=1, desc_act=False, sym=False):
    """The layout of GPTQ: w[n, k] = scales[g[k], n] * (code[k, n] - zero[g[k], n])."""

    def layer(name, n, k, generator):
        groups = 1 if group == -1 else -(-k // group)
        codes, scales = random_codes((k, n), bits, generator), random_scales((groups, n), bits, generator).half()
        low = 1 if version == 1 else 0
        zeros = torch.randint(low, 2**bits, (groups, n), generator=generator)
        zeros = torch.full_like(zeros, 2 ** (bits - 1)) if sym else zeros
        g_idx = torch.arange(k) // (k if group == -1 else group)
        if desc_act:
            g_idx = g_idx[torch.randperm(k, generator=generator)]
        tensors = {
            ".qweight": words(codes.t(), bits).t(),
            ".qzeros": words(zeros - low, bits),
            ".scales": scales,
            ".g_idx": g_idx.to(torch.int32),
        }
        return tensors, (scales.double()[g_idx] * (codes - zeros[g_idx])).t()

    return layer


def borrowed(bits):
    """Version 1 with zero points of 0, which GPTQModel writes by one subtraction per word: from its words, or in each
    of the fields of 3 bits."""

    def layer(name, n, k, generator):
        tensors, _ = gptq(bits, version=2)(name, n, k, generator)
        codes, scales = random_codes((k, n), bits, generator), tensors[".scales"]
        zeros = torch.randint(0, 2**bits, scales.shape, generator=generator)
        zeros[:, ::5] = 0
        stored = words(zeros - 1 & 7, 3) if bits == 3 else words(zeros, bits) - sum(1 << i for i in range(0, 32, bits))
        weight = (scales.double() * (codes.view(len(scales), -1, n) - zeros[:, None]).transpose(0, 1)).transpose(0, 1)
        return tensors | {".qweight": words(codes.t(), bits).t(), ".qzeros": stored}, weight.reshape(k, n).t()

    return layer


def settings(bits=4, group=128, version=1, desc_act=False, sym=False):
    form = {"checkpoint_format": "gptq_v2"} if version == 2 else {"checkpoint_format": "gptq"}
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": desc_act, "sym": sym} | form


CASES = {
    **{f"{bits} bits": {"bits": bits} for bits in (2, 3, 4, 8)},
    **{f"{bits} bits act order": {"bits": bits, "desc_act": True} for bits in (2, 3, 4, 8)},
    "version 2": {"version": 2},
    "symmetric": {"sym": True},
    "groups of 32": {"group": 32},
    "groups of 256": {"group": 256, "desc_act": True},
    "a scale per row": {"group": -1},
}


@pytest.mark.parametrize("case", CASES)
def test_codes_are_those_of_the_file(case, tmp_path):
    given = CASES[case]
    meant = write(tmp_path / "model", settings(**given), gptq(**given), attention_bias=True)
    model = check_reads(tmp_path / "model", meant, exact=True)
    spec = model.model.layers[0].mlp.up_proj.spec
    assert (spec.format, spec.asymmetric) == (f"int{given.get('bits', 4)}", not given.get("sym", False))
    assert spec.x_format == "float"


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_zero_points_of_0_in_version_1(bits, tmp_path):
    check_reads(tmp_path / "model", write(tmp_path / "model", settings(bits), borrowed(bits)), exact=True)


def test_the_other_name_of_the_version(tmp_path):
    told = settings() | {"format": "GPTQ_V2"}
    del told["checkpoint_format"]
    check_reads(tmp_path / "model", write(tmp_path / "model", told, gptq(version=2)), exact=True)


def test_int8_activations_are_asked_for(tmp_path):
    meant = write(tmp_path / "model", settings(sym=True), gptq(sym=True))
    model = check_reads(tmp_path / "model", meant, exact=True, activations="int8")
    assert model.model.layers[0].mlp.up_proj.spec.x_format == "int8_group"


def test_a_file_of_auto_gptq_without_g_idx_and_a_large_group(tmp_path):
    def without(name, n, k, generator):
        tensors, weight = gptq(group=512)(name, n, k, generator)
        return {part: tensor for part, tensor in tensors.items() if part != ".g_idx"}, weight

    meant = write(tmp_path / "model", settings(group=512), without)
    model = check_reads(tmp_path / "model", meant, exact=True)
    assert model.model.layers[0].mlp.down_proj.spec.group_size == 0


def test_bits_by_layer(tmp_path):
    def by_layer(name, n, k, generator):
        return gptq(8 if "down" in name else 4)(name, n, k, generator)

    told = settings() | {"dynamic": {r"+:.*\.down_proj": {"bits": 8}}}
    meant = write(tmp_path / "model", told, by_layer)
    model = check_reads(tmp_path / "model", meant, exact=True)
    assert model.model.layers[0].mlp.down_proj.spec.format == "int8"


def test_saved_and_loaded_again(tmp_path):
    meant = write(tmp_path / "model", settings(desc_act=True), gptq(desc_act=True))
    model = check_reads(tmp_path / "model", meant, exact=True)
    model.save_pretrained(tmp_path / "again")
    again = type(model).from_pretrained(tmp_path / "again")
    third = lowbit.load(type(model)(model.config), tmp_path / "again")
    assert len(third) == 15
    x = torch.arange(6)[None]
    assert torch.equal(again(x).logits, model(x).logits)
    lowbit.dequantize_(again)
    want = meant.model.layers[1].mlp.down_proj.weight
    assert torch.allclose(again.model.layers[1].mlp.down_proj.weight.double(), want, rtol=2.0**-20, atol=0)


def test_fused(tmp_path):
    meant = write(tmp_path / "model", settings(sym=True), gptq(sym=True))
    config = lowbit.LowbitConfig("checkpoint", activations="float", fuse=True)
    model = type(meant).from_pretrained(tmp_path / "model", quantization_config=config, dtype=torch.float32)
    x = torch.arange(6)[None]
    with torch.no_grad():
        assert (model(x).logits - meant(x).logits).norm() <= 1e-4 * meant(x).logits.norm()
    assert model.config.quantization_config.fuse


def test_experts(tmp_path):
    meant = write(tmp_path / "model", settings(), gptq(), "mixtral")
    check_reads(tmp_path / "model", meant, exact=True)


def test_a_model_of_torch_alone(tmp_path):
    write(tmp_path / "model", settings(), gptq())
    tensors, weight = gptq()("0", 64, 256, torch.Generator().manual_seed(2))
    tensors = {f"0{part}": tensor.contiguous() for part, tensor in tensors.items()}
    save_file(tensors | {"0.bias": torch.ones(64)}, tmp_path / "model" / "model.safetensors")
    model = torch.nn.Sequential(torch.nn.Linear(256, 64))
    assert lowbit.load(model, tmp_path / "model") == ["0"]
    assert torch.allclose(model[0].dequantize().double(), weight, rtol=2.0**-20, atol=0)


def test_other_devices_are_refused(tmp_path):
    meant = write(tmp_path / "model", settings(), gptq())
    files = [str(tmp_path / "model" / "model.safetensors")]
    with pytest.raises(ValueError, match="device_map must be 'cpu' .*got cuda:0; model.to"):
        PackedCheckpoint(meant, files, None, {"": "cuda:0"})


BAD = {
    "a missing tensor": (lambda t, s: t.pop("model.layers.0.mlp.up_proj.scales"), "up_proj.scales must be there"),
    "no permutation of groups": (
        lambda t, s: t["model.layers.1.mlp.up_proj.g_idx"].fill_(1),
        "up_proj.g_idx must be each of 0..1 for 128 inputs, got",
    ),
    "a group that is not there": (
        lambda t, s: t["model.layers.1.mlp.up_proj.g_idx"].add_(1),
        r"up_proj.g_idx must be each of 0..1 for 128 inputs, got groups 1 to 2",
    ),
    "other bits": (lambda t, s: s.update(bits=3), r"qweight must be int32 \[24, "),
    "unknown bits": (lambda t, s: s.update(bits=5), "bits of gptq must be one of 2, 3, 4, 8, got 5"),
    "another group size": (lambda t, s: s.update(group_size=64), r"scales must be \[4, .*got \[2, "),
    "group size 0": (lambda t, s: s.update(group_size=0), "group_size of gptq must be -1 or a positive"),
    "another version": (
        lambda t, s: s.update(checkpoint_format="marlin"),
        "checkpoint_format of gptq must be one of 'gptq', 'gptq_v2', None, got 'marlin'",
    ),
    "two versions": (
        lambda t, s: s.update(format="gptq_v2"),
        "checkpoint_format and format of gptq must be the same, got 'gptq' and 'gptq_v2'",
    ),
    "scales of inf": (
        lambda t, s: t["model.layers.1.mlp.up_proj.scales"].fill_(float("inf")),
        "up_proj.scales must be finite, got inf or nan",
    ),
    "zeros of floats": (
        lambda t, s: t.update({k: v.float() for k, v in t.items() if k.endswith("qzeros")}),
        r"qzeros must be int32 \[2, 16\], got float32",
    ),
    "another shape": (
        lambda t, s: t.update({"model.layers.1.mlp.up_proj.qweight": torch.zeros(32, 64, dtype=torch.int32)}),
        r"model.safetensors: model.layers.1.mlp.up_proj.qweight must be int32 \[32, 512\], got int32 \[32, 64\]",
    ),
    "a layer that is not there": (
        lambda t, s: t.update({"model.layers.7.mlp.up_proj.qweight": torch.zeros(32, 64, dtype=torch.int32)}),
        "the quantized weight model.layers.7.mlp.up_proj.weight must be that of a linear layer of LlamaForCausalLM",
    ),
    "no quantized weight": (
        lambda t, s: [t.pop(key) for key in [*t] if key.endswith("qweight")],
        r"a checkpoint of gptq must have tensors \*.qweight",
    ),
    "another method": (lambda t, s: s.update(quant_method="new"), "quant_method must be one of gptq, .*got 'new'"),
    "lowbit": (
        lambda t, s: s.update(quant_method="lowbit"),
        "packed by lowbit already|names must be those of the model",
    ),
    "aqlm": (lambda t, s: s.update(quant_method="aqlm"), "'aqlm' is not read: .*codebooks.*package aqlm"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_named_and_change_nothing(case, tmp_path):
    change, message = BAD[case]
    write(tmp_path / "model", settings(), gptq())
    damaged(tmp_path / "model", change, message)


def test_a_truncated_file(tmp_path):
    write(tmp_path / "model", settings(), gptq())
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    damaged(tmp_path / "model", None, "model.safetensors must be a safetensors file")


def test_a_float_checkpoint_is_refused(tmp_path):
    write(tmp_path / "model", settings(), gptq())
    path = Path(tmp_path / "model-meant")
    assert "quantization_config" not in json.loads((path / "config.json").read_text())
    damaged(path, None, "needs .*config.json with a quantization_config", load=False)
