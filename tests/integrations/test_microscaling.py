# SPDX-License-Identifier: Apache-2.0
"""MXFP4 weights are read exactly."""

from __future__ import annotations

import pytest
import torch

from lowbit.integrations.microscaling import from_mxfp4

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@pytest.mark.parametrize("base", [1, 60, 127, 200, 248])
def test_every_weight_is_what_the_standard_says(base: int) -> None:
    codes, scales = torch.randint(0, 16, (20, 96)), base + torch.randint(0, 3, (20, 3))
    blocks = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    values = E2M1[codes & 7] * (1 - 2 * (codes >> 3))
    wanted = values * torch.exp2(scales.double() - 127).repeat_interleave(32, dim=1)
    layer = from_mxfp4(blocks.view(20, 3, 16), scales.to(torch.uint8))
    assert torch.equal(layer.dequantize().double(), wanted)
    assert torch.equal(from_mxfp4(blocks, scales.to(torch.uint8), torch.ones(20)).weight, layer.weight)


@pytest.mark.parametrize(
    ("scales", "text"),
    [
        ([[127, 255]], "no nan"),
        ([[127, 102]], r"within 2 \*\* 24"),
        ([[0, 0]], r"2 \*\* -126 or more"),
        ([[127]], r"got torch.uint8 \[1, 32\] and torch.uint8 \[1, 1\]"),
    ],
)
def test_scales_that_cannot_be_kept_are_refused(scales: list[list[int]], text: str) -> None:
    with pytest.raises(ValueError, match=f"from_mxfp4: .*{text}"):
        from_mxfp4(torch.zeros(1, 32, dtype=torch.uint8), torch.tensor(scales, dtype=torch.uint8))


def test_scales_2_24_apart_are_exact() -> None:
    layer = from_mxfp4(torch.full((1, 32), 0x22, dtype=torch.uint8), torch.tensor([[127, 103]], dtype=torch.uint8))
    assert layer.dequantize()[0].unique().tolist() == [2.0**-24, 1.0]
