# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of compressed-tensors beside a decoder that follows the definition of its formats, in float64."""

from __future__ import annotations

import pytest
import torch
from tests.checkpoints.read_checkpoints import check_reads, damaged
from tests.tiny.float_codes import e2m1, float8_codes, power_scales
from tests.tiny.quantized_checkpoints import random_codes, random_scales, words, write

TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
FLOAT = TOKEN | {"type": "float"}
ROUNDED = 2.0**-11  # scales of groups that are no float16


def settings(format, weights, activations=None, **more):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    told = {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}
    return told | {"ignore": ["lm_head"], "quantization_status": "compressed"} | more


def padded_words(codes, bits):
    """32 // bits codes to a word, the first lowest; the rest of the word is 0."""
    each = 32 // bits
    fields = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % each)).view(len(codes), -1, each)
    value = (fields << torch.arange(each) * bits).sum(-1)
    return torch.where(value >= 2**31, value - 2**32, value).to(torch.int32)


def spread(part, n, k):
    """One number per row and column, of scales or zero points of any of the shapes that strategies have."""
    part = part.view(1, 1) if part.numel() == 1 else part
    rows, columns = -(-n // part.shape[0]), -(-k // part.shape[1])
    return part.double().repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]


def integers(format, weights, dtype=torch.float16, act_order=False, fill=padded_words):
    """The layout of integers: w = scale * (q - zero), q from -2^(bits - 1). ``fill`` puts codes into words."""
    bits, symmetric = weights["num_bits"], weights.get("symmetric", True)

    def layer(name, n, k, generator):
        if name == "lm_head":
            return None
        groups = {"tensor": 1, "channel": 1, "group": k // weights.get("group_size", k)}[weights["strategy"]]
        shape = (1, 1) if weights["strategy"] == "tensor" else (n, groups)
        codes, scale = random_codes((n, k), bits, generator), random_scales(shape, bits, generator).to(dtype)
        middle = 2 ** (bits - 1)
        zero = torch.randint(-middle, middle, shape, generator=generator) if not symmetric else torch.zeros(shape)
        tensors = {".weight_scale": scale.view(-1) if shape == (1, 1) else scale}
        if format == "pack-quantized":
            tensors |= {".weight_packed": fill(codes, bits), ".weight_shape": torch.tensor([n, k])}
        else:
            tensors[".weight"] = (codes - middle).to(torch.int8)
        if not symmetric:
            packed = format == "pack-quantized"
            stored = fill((zero + middle).t().long(), bits).t() if packed else zero.to(torch.int8)
            tensors[".weight_zero_point"] = stored
        scale, zero = spread(scale, n, k), spread(zero, n, k)
        if act_order:
            order = torch.randperm(k, generator=generator)
            tensors[".weight_g_idx"] = (order // weights["group_size"]).to(torch.int32)
            scale, zero = scale[:, order], zero[:, order]
        return tensors, scale * (codes - middle - zero)

    return layer


def weights(bits, strategy="group", group_size=None, symmetric=True):
    group_size = 128 if strategy == "group" and group_size is None else group_size
    told = {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": symmetric, "dynamic": False}
    return told | ({"group_size": group_size} if group_size else {})


PACKED = {
    **{f"int{bits} groups": weights(bits) for bits in (2, 3, 4, 5, 6, 8)},
    **{f"int{bits} asymmetric": weights(bits, symmetric=False) for bits in (3, 4, 8)},
    "int4 channel": weights(4, "channel"),
    "int8 channel asymmetric": weights(8, "channel", symmetric=False),
    "int4 groups of 32": weights(4, group_size=32),
}


@pytest.mark.parametrize("case", PACKED)
def test_pack_quantized(case, tmp_path):
    told = PACKED[case]
    meant = write(tmp_path / "model", settings("pack-quantized", told), integers("pack-quantized", told))
    model = check_reads(tmp_path / "model", meant, exact=True)
    spec = model.model.layers[0].mlp.up_proj.spec
    assert (spec.format, spec.asymmetric, spec.x_format) == (f"int{told['num_bits']}", not told["symmetric"], "float")
    assert type(model.lm_head) is torch.nn.Linear


@pytest.mark.parametrize("case", ["int3 groups", "int3 asymmetric", "int5 groups", "int6 groups"])
def test_pack_quantized_in_words_without_gaps(case, tmp_path):
    """compressed-tensors 0.20 lets codes of 3, 5, 6 and 7 bits cross words."""
    told = PACKED[case]
    form = integers("pack-quantized", told, fill=words, act_order=case == "int6 groups")
    meant = write(tmp_path / "model", settings("pack-quantized", told), form)
    model = check_reads(tmp_path / "model", meant, exact=True)
    assert model.model.layers[0].mlp.up_proj.spec.format == f"int{told['num_bits']}"


def test_a_width_that_fits_both_ways_to_fill_words(tmp_path):
    told = weights(3, "channel")
    config = {"hidden_size": 20, "intermediate_size": 40, "head_dim": 10, "num_attention_heads": 2}
    write(tmp_path / "model", settings("pack-quantized", told), integers("pack-quantized", told), **config)
    damaged(tmp_path / "model", None, "k must be a multiple of 32 for 3 bits, got k=40, which has as many")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_of_other_dtypes(dtype, tmp_path):
    told = weights(4)
    meant = write(tmp_path / "model", settings("pack-quantized", told), integers("pack-quantized", told, dtype))
    check_reads(tmp_path / "model", meant, exact=dtype is torch.bfloat16, bound=ROUNDED)


def test_act_order(tmp_path):
    told = weights(4) | {"actorder": "group"}
    form = integers("pack-quantized", told, act_order=True)
    model = check_reads(
        tmp_path / "model", write(tmp_path / "model", settings("pack-quantized", told), form), exact=True
    )
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "PermutedLinear"


@pytest.mark.parametrize("act", ["symmetric", "asymmetric"])
def test_int8_weights_and_activations(act, tmp_path):
    told = weights(8, "channel")
    rounded = TOKEN | {"symmetric": act == "symmetric"}
    meant = write(tmp_path / "model", settings("int-quantized", told, rounded), integers("int-quantized", told))
    model = check_reads(tmp_path / "model", meant, exact=True)
    assert (
        model.model.layers[0].mlp.up_proj.spec.x_format
        == {"symmetric": "int8_row", "asymmetric": "int8_row_asymmetric"}[act]
    )


@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
def test_int8_without_packing(strategy, tmp_path):
    told = weights(8 if strategy != "group" else 4, strategy, symmetric=strategy == "channel")
    meant = write(tmp_path / "model", settings("naive-quantized", told), integers("naive-quantized", told))
    check_reads(tmp_path / "model", meant, exact=True)


def float8(strategy):
    def layer(name, n, k, generator):
        if name == "lm_head":
            return None
        shape = {"tensor": (1,), "channel": (n, 1), "block": (-(-n // 128), -(-k // 128))}[strategy]
        codes, scale = float8_codes((n, k), generator), random_scales(shape, 12, generator).float()
        tensors = {".weight": codes, ".weight_scale": scale}
        grid = scale if strategy != "block" else scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        return tensors, codes.double() * grid.double()

    return layer


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_float_quantized(strategy, tmp_path):
    told = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    told |= {"block_structure": [128, 128]} if strategy == "block" else {}
    acts = FLOAT | ({"strategy": "group", "group_size": 128} if strategy == "block" else {})
    meant = write(tmp_path / "model", settings("float-quantized", told, acts), float8(strategy))
    model = check_reads(tmp_path / "model", meant, exact=strategy != "block", bound=ROUNDED)
    spec = model.model.layers[0].mlp.up_proj.spec
    assert spec.format == "fp8_e4m3"
    assert (spec.group_size, spec.x_format) == ((128, "float") if strategy == "block" else (0, "float8_row"))


def nvfp4(name, n, k, generator):
    if name == "lm_head":
        return None
    packed, levels = e2m1((n, k), generator)
    scale = float8_codes((n, k // 16), generator).abs()
    whole = torch.tensor([3.7e4])
    weight = levels * scale.double().repeat_interleave(16, 1) / whole.double()
    return {".weight_packed": packed, ".weight_scale": scale, ".weight_global_scale": whole}, weight


def mxfp4(name, n, k, generator):
    if name == "lm_head":
        return None
    packed, levels = e2m1((n, k), generator)
    scale = power_scales((n, k // 32), generator)
    weight = levels * torch.exp2(scale.double() - 127).repeat_interleave(32, 1)
    return {".weight_packed": packed, ".weight_scale": scale}, weight


def mxfp8(name, n, k, generator):
    if name == "lm_head":
        return None
    codes, scale = float8_codes((n, k), generator), power_scales((n, k // 32), generator)
    weight = codes.double() * torch.exp2(scale.double() - 127).repeat_interleave(32, 1)
    return {".weight": codes, ".weight_scale": scale}, weight


def test_float8_with_powers_of_two(tmp_path):
    told = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    meant = write(tmp_path / "model", settings("mxfp8-quantized", told), mxfp8)
    model = check_reads(tmp_path / "model", meant, exact=True)
    assert model.model.layers[0].mlp.up_proj.spec.name == "fp8_e4m3 g32"


@pytest.mark.parametrize("form", [nvfp4, mxfp4])
def test_formats_of_e2m1(form, tmp_path):
    told = {"num_bits": 4, "type": "float", "strategy": "tensor_group" if form is nvfp4 else "group", "group_size": 16}
    format = f"{form.__name__}-pack-quantized"
    model = check_reads(tmp_path / "model", write(tmp_path / "model", settings(format, told), form), exact=True)
    assert model.model.layers[0].mlp.up_proj.spec.name == f"fp4_e2m1 g{16 if form is nvfp4 else 32}"


def test_groups_of_layers_by_pattern_and_by_name(tmp_path):
    four, eight = weights(4), weights(8, "channel")
    told = settings("pack-quantized", four)
    down = "model.layers.0.mlp.down_proj"
    told["config_groups"] |= {
        "group_1": {"targets": [r"re:.*self_attn\.[qkv]_proj$"], "weights": eight, "format": "int-quantized"},
        "group_2": {"targets": [down], "weights": eight, "input_activations": TOKEN, "format": "int-quantized"},
    }

    def layer(name, n, k, generator):
        of_eight = name == down or name.endswith(("q_proj", "k_proj", "v_proj"))
        form = integers("int-quantized", eight) if of_eight else integers("pack-quantized", four)
        return form(name, n, k, generator)

    model = check_reads(tmp_path / "model", write(tmp_path / "model", told, layer), exact=True)
    assert model.model.layers[0].mlp.down_proj.spec.name == "int8 per-channel int8-activations per row"
    assert model.model.layers[1].mlp.down_proj.spec.name == "int4 g128"
    assert model.model.layers[1].self_attn.k_proj.spec.name == "int8 per-channel"


def test_activations_of_a_fixed_scale_are_refused_unless_others_are_asked_for(tmp_path):
    told = weights(8, "channel")
    write(
        tmp_path / "model", settings("int-quantized", told, TOKEN | {"dynamic": False}), integers("int-quantized", told)
    )
    damaged(
        tmp_path / "model",
        None,
        r"must be dynamic, got a fixed scale; LowbitConfig\('checkpoint', activations='int8'\)",
    )


UP = "model.layers.1.mlp.up_proj"
BAD = {
    "sparse": (
        lambda t, s: s.update(sparsity_config={"format": "sparse-bitmask"}),
        "sparsity_config .* must be dense, got format 'sparse-bitmask'",
    ),
    "rotations": (lambda t, s: s.update(transform_config={"config_groups": {"u": {}}}), "transform_config .* must be empty"),
    "format": (lambda t, s: s.update(format="marlin-24"), "format of compressed-tensors must be one of .*got 'marlin-24'"),
    "targets": (lambda t, s: s["config_groups"]["group_0"].update(targets=["re:nothing"]), "targets must name model.*mlp"),
    "no groups": (lambda t, s: s.update(config_groups={}), "config_groups of compressed-tensors must name groups"),
    "another shape": (lambda t, s: t[f"{UP}.weight_shape"].fill_(7), rf"{UP}.weight_shape must be \[512, 256\], got \[7, 7\]"),
    "other bits": (lambda t, s: s["config_groups"]["group_0"]["weights"].update(num_bits=8), r"weight_packed must be int32 \["),
    "strategy": (
        lambda t, s: s["config_groups"]["group_0"]["weights"].update(strategy="attn_head"),
        "strategy of .* must be tensor, channel, group",
    ),
    "scales": (lambda t, s: t[f"{UP}.weight_scale"].fill_(float("nan")), f"{UP}.weight_scale must be finite"),
    "a missing tensor": (lambda t, s: t.pop(f"{UP}.weight_scale"), f"{UP}.weight_scale must be there"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_named_and_change_nothing(case, tmp_path):
    change, message = BAD[case]
    write(tmp_path / "model", settings("pack-quantized", weights(4)), integers("pack-quantized", weights(4)))
    damaged(tmp_path / "model", change, message)


def test_codes_out_of_range(tmp_path):
    told = weights(4)
    write(tmp_path / "model", settings("naive-quantized", told), integers("naive-quantized", told))
    damaged(
        tmp_path / "model", lambda t, s: t[f"{UP}.weight"].fill_(8), rf"{UP}.weight must be -8..7 for 4 bits, got 8..8"
    )


def test_nan_in_float8(tmp_path):
    told = {"num_bits": 8, "type": "float", "strategy": "channel"}
    write(tmp_path / "model", settings("float-quantized", told, FLOAT), float8("channel"))
    damaged(
        tmp_path / "model",
        lambda t, s: t[f"{UP}.weight"].view(torch.uint8).fill_(127),
        f"{UP}.weight must be finite, got nan",
    )
