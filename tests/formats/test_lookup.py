# SPDX-License-Identifier: Apache-2.0
"""nf4 and fp4: the levels are those of bitsandbytes to the last bit, and every weight becomes the nearest one."""

from __future__ import annotations

import pytest
import torch

import lowbit
from lowbit import testing
from lowbit.reference.quantize import LEVELS

MAKE = {"nf4": lowbit.nf4_weight_only, "fp4": lowbit.fp4_weight_only}


def layer(weight: torch.Tensor, format: str, group_size: int | None = 64) -> lowbit.QuantLinear:
    model = torch.nn.Sequential(torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False))
    model[0].weight.data = weight
    lowbit.quantize_(model, MAKE[format](group_size), lambda module, _: module is model[0])  # few rows are packed if asked for
    return model[0]


def levels_of_the_kernels(format: str) -> torch.Tensor:
    codes = torch.arange(16, dtype=torch.uint8)[None]
    quantized = lowbit.QuantLinear.pack(codes, torch.ones(1, 1), None, lowbit.formats.LinearSpec(format))
    return quantized.dequantize()[0]


@pytest.mark.parametrize("format", ["nf4", "fp4", "fp4_e2m1"])
def test_the_kernels_have_the_levels_of_the_specification(format: str) -> None:
    assert torch.equal(levels_of_the_kernels(format), LEVELS[format])


@pytest.mark.parametrize("format", MAKE)
def test_the_levels_are_those_of_bitsandbytes_bit_for_bit(format: str) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    levels = functional.get_4bit_type(format, device="cpu")
    assert torch.equal(levels_of_the_kernels(format).view(torch.int32), levels.view(torch.int32))


@pytest.mark.parametrize("format", MAKE)
@pytest.mark.parametrize("group_size", [64, None])
def test_quantizing_gives_what_bitsandbytes_gives(format: str, group_size: int | None) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(33, 256)
    size = group_size or 256
    packed, state = functional.quantize_4bit(weight, blocksize=size, quant_type=format)
    theirs = functional.dequantize_4bit(packed, state)
    ours = layer(weight, format, group_size).dequantize()
    spread = weight.view(33, -1, size).abs().amax(2).repeat_interleave(size, dim=1)
    gap = 0.16 if format == "nf4" else 1 / 6  # half of the widest distance of two levels
    assert ((ours - weight).abs() <= (gap + 2e-3) * spread).all()
    same = (ours - theirs).abs() <= 1e-3 * spread  # the rest lie at the middle of two levels
    assert same.float().mean() > 0.99


@pytest.mark.parametrize("format", MAKE)
def test_every_weight_becomes_the_nearest_level_of_its_group(format: str) -> None:
    weight = torch.randn(33, 200)
    quantized = layer(weight, format)
    codes, scale, zero = quantized.unpack()
    spread = scale.repeat_interleave(64, dim=1)[:, :200]
    distance = (weight[..., None] - spread[..., None] * LEVELS[format]).abs()
    torch.testing.assert_close(distance.gather(2, codes.long()[..., None])[..., 0], distance.amin(2))
    torch.testing.assert_close(quantized.dequantize(), spread * LEVELS[format][codes.int()], rtol=1e-6, atol=0)
    assert (zero == 0).all()
    again = lowbit.QuantLinear.pack(codes, scale, None, quantized.spec)
    assert torch.equal(again.weight, quantized.weight)


def test_of_two_codes_of_zero_the_first_is_written() -> None:
    weight = torch.tensor([[0.0, -0.0, 1e-4, -1e-4] * 16])
    weight[0, 63] = 1.0
    assert layer(weight, "fp4").unpack()[0][0, :60].unique().tolist() == [0]


def test_fp4_e2m1_is_the_table_of_the_microscaling_standard() -> None:
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert levels_of_the_kernels("fp4_e2m1").tolist() == [*magnitudes, *(-value for value in magnitudes)]
    packed = testing.pack_weight(torch.tensor([[6.0, -3.1, 0.2, 0.3] * 8]), "fp4_e2m1", 32)
    assert testing.decode_weight(packed, 1, 32, "fp4_e2m1", 32, "symmetric").decode()[0, :4].tolist() == [6, -3, 0, 0.5]
