# SPDX-License-Identifier: Apache-2.0
"""Properties of the specification itself: error at most half a step, zero exact, activation codes in range."""

from __future__ import annotations

import pytest
import torch

from lowbit.reference.activations import quantize_activations
from lowbit.reference.quantize import LEVELS, quantize

FORMATS = ("int8", "int4")


@pytest.mark.parametrize("group_size", [0, 32, 128])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("mapping", ["symmetric", "symmetric_no_clipping_err", "asymmetric"])
def test_error_is_at_most_half_a_step_unless_clipped(mapping: str, format: str, group_size: int) -> None:
    weight = torch.randn(20, 200)
    quantized = quantize(weight, format, group_size, mapping)
    steps = (quantized.decode() - weight).abs() / quantized.spread(quantized.scale)
    clipped = (quantized.codes == 0) | (quantized.codes == (255 if format == "int8" else 15))
    assert steps[~clipped].max() <= 0.5 + 1e-3
    assert steps.max() <= 1.0  # zero points are rounded too


@pytest.mark.parametrize("group_size", [0, 32, 128])
@pytest.mark.parametrize("format", LEVELS)
def test_every_weight_becomes_the_nearest_level(format: str, group_size: int) -> None:
    quantized = quantize(torch.randn(20, 200), format, group_size, "symmetric")
    weight = quantized.decode().float() * (1 + 0.2 * torch.randn(20, 200))
    quantized = quantize(weight, format, group_size, "symmetric")
    levels = LEVELS[format][LEVELS[format].isfinite()].double()
    scaled = weight.double() / quantized.spread(quantized.scale)
    nearest = (scaled[..., None] - levels).abs().amin(2)
    torch.testing.assert_close((quantized.levels - scaled).abs(), nearest, rtol=1e-5, atol=1e-6 * float(levels.max()))


MAPPINGS = [(format, mapping) for format in FORMATS for mapping in ("symmetric", "symmetric_no_clipping_err", "asymmetric")]


@pytest.mark.parametrize("format, mapping", [*MAPPINGS, *((format, "symmetric") for format in LEVELS)])
def test_zero_stays_zero(format: str, mapping: str) -> None:
    weight = torch.randn(4, 64)
    weight[:, ::3] = 0
    assert (quantize(weight, format, 32, mapping).decode()[:, ::3] == 0).all()


@pytest.mark.parametrize("x_format", ["int8_group", "int8_row", "int8_row_asymmetric"])
def test_activation_codes_are_within_127_and_half_a_step(x_format: str) -> None:
    x = torch.randn(7, 100) + 0.3
    quantized = quantize_activations(x, x_format, 32)
    assert quantized.codes.abs().max() <= 127
    assert ((quantized.decode() - x).abs() / quantized.scale).max() <= (1.0 if "asymmetric" in x_format else 0.5 + 1e-3)


def test_float8_activations_are_those_of_torch() -> None:
    x = torch.randn(7, 100) * torch.exp(3 * torch.randn(7, 100))
    x[3] = 0
    quantized = quantize_activations(x, "float8_row", 32)
    scale = x.abs().amax(1, keepdim=True) / 448
    assert torch.equal(quantized.scale, scale.expand(7, 100)) and (quantized.decode()[3] == 0).all()
    assert ((quantized.decode() - x).abs() <= x.abs() / 16 + quantized.scale * 2.0**-10).all()


def test_rounding_is_half_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    assert quantize_activations(x, "int8_row", 0).codes.tolist() == [[127, 0, 2, 2, 0, -2]]
