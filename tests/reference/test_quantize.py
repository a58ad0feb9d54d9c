# SPDX-License-Identifier: Apache-2.0
"""Properties of the specification itself: error at most half a step, zero exact, activation codes in range."""

from __future__ import annotations

import pytest
import torch

from lowbit.reference.activations import quantize_activations
from lowbit.reference.quantize import quantize

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


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("mapping", ["symmetric", "symmetric_no_clipping_err", "asymmetric"])
def test_zero_stays_zero(mapping: str, format: str) -> None:
    weight = torch.randn(4, 64)
    weight[:, ::3] = 0
    assert (quantize(weight, format, 32, mapping).decode()[:, ::3] == 0).all()


@pytest.mark.parametrize("x_format", ["int8_group", "int8_row", "int8_row_asymmetric"])
def test_activation_codes_are_within_127_and_half_a_step(x_format: str) -> None:
    x = torch.randn(7, 100) + 0.3
    quantized = quantize_activations(x, x_format, 32)
    assert quantized.codes.abs().max() <= 127
    assert ((quantized.decode() - x).abs() / quantized.scale).max() <= (1.0 if "asymmetric" in x_format else 0.5 + 1e-3)


def test_rounding_is_half_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    assert quantize_activations(x, "int8_row", 0).codes.tolist() == [[127, 0, 2, 2, 0, -2]]
