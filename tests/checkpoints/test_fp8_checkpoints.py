# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of float8 weights (DeepSeek, Qwen, AutoFP8, Llama) beside a decoder in float64."""

from __future__ import annotations

import pytest
import torch
from tests.checkpoints.read_checkpoints import check_reads, damaged
from tests.tiny.float_codes import float8_codes
from tests.tiny.quantized_checkpoints import random_scales, write

ROUNDED = 2.0**-11


def blocks(rows, columns, dtype=torch.float32):
    def layer(name, n, k, generator):
        shape = -(-n // rows), -(-k // columns)
        codes, scale = float8_codes((n, k), generator), random_scales(shape, 12, generator).to(dtype)
        grid = scale.double().repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
        return {".weight": codes, ".weight_scale_inv": scale}, codes.double() * grid

    return layer


def whole(part, shape=()):
    def layer(name, n, k, generator):
        codes, scale = float8_codes((n, k), generator), random_scales(shape or (), 12, generator)
        return {".weight": codes, part: scale}, codes.double() * scale.double()

    return layer


def rows(name, n, k, generator):
    codes, scale = float8_codes((n, k), generator), random_scales((n, 1), 12, generator)
    tensors = {".weight": codes, ".weight_scale": scale, ".input_scale_ub": torch.tensor([1200.0])}
    return tensors, codes.double() * scale.double()


def settings(block=None, scheme="dynamic"):
    return {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": scheme, "fmt": "e4m3"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_128(dtype, tmp_path):
    meant = write(tmp_path / "model", settings([128, 128]), blocks(128, 128, dtype), num_key_value_heads=1)
    model = check_reads(tmp_path / "model", meant, exact=dtype is torch.bfloat16, bound=ROUNDED)
    assert model.model.layers[0].mlp.up_proj.spec.name == "fp8_e4m3 g128"


def test_powers_of_two_for_blocks(tmp_path):
    meant = write(tmp_path / "model", settings([128, 128]), blocks(128, 128, torch.float8_e8m0fnu))
    check_reads(tmp_path / "model", meant, exact=True)


def test_blocks_that_are_cut_at_the_edges(tmp_path):
    meant = write(tmp_path / "model", settings([96, 64]), blocks(96, 64), intermediate_size=544)
    check_reads(tmp_path / "model", meant, bound=ROUNDED)


@pytest.mark.parametrize("part", [".weight_scale_inv", ".weight_scale"])
def test_a_scale_per_weight(part, tmp_path):
    model = check_reads(tmp_path / "model", write(tmp_path / "model", settings(), whole(part)), exact=True)
    assert model.model.layers[0].mlp.up_proj.spec.name == "fp8_e4m3 per-channel float8-activations per row"


def test_fbgemm(tmp_path):
    told = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    model = check_reads(tmp_path / "model", write(tmp_path / "model", told, rows), exact=True)
    assert model.model.layers[0].mlp.up_proj.spec.name == "fp8_e4m3 per-channel float8-activations per row"


def test_experts_by_blocks(tmp_path):
    meant = write(tmp_path / "model", settings([128, 128]), blocks(128, 128), "mixtral")
    check_reads(tmp_path / "model", meant, bound=ROUNDED)


UP = "model.layers.1.mlp.up_proj"
BAD = {
    "block size": (lambda t, s: s.update(weight_block_size=[128]), "weight_block_size of fp8 must be two numbers"),
    "another block size": (
        lambda t, s: s.update(weight_block_size=[64, 64]),
        r"weight_scale_inv must be \[2, 4\] for blocks of 64 x 64, got float32 \[1, 2\]",
    ),
    "static": (
        lambda t, s: s.update(activation_scheme="static"),
        r"activation_scheme of fp8 must be 'dynamic'.*LowbitConfig\('checkpoint', activations='float'\)",
    ),
    "experts of four bits": (lambda t, s: s.update(expert_dtype="fp4"), "expert_dtype of fp8 must be one of 'fp8', None"),
    "nan": (lambda t, s: t[f"{UP}.weight"].view(torch.uint8).fill_(255), f"{UP}.weight must be finite, got nan"),
    "no codes": (lambda t, s: t.pop(f"{UP}.weight"), f"{UP}.weight must be there"),
    "floats": (
        lambda t, s: t.update({f"{UP}.weight": t[f"{UP}.weight"].float()}),
        rf"{UP}.weight must be float8_e4m3fn \[512, 256\], got float32",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_named_and_change_nothing(case, tmp_path):
    change, message = BAD[case]
    write(tmp_path / "model", settings([128, 128]), blocks(128, 128))
    damaged(tmp_path / "model", change, message)


def test_int8_activations_need_integers(tmp_path):
    from tests.checkpoints.read_checkpoints import read

    write(tmp_path / "model", settings([128, 128]), blocks(128, 128))
    with pytest.raises(ValueError, match="activations must be 'float' or None for fp8 with weights in fp8_e4m3"):
        read(tmp_path / "model", activations="int8")
